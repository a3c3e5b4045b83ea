"""Token Superposition Training (TST, arXiv 2605.06546) in JAX.

Array names carry their shape as a suffix, in these letters:

    B  rows of a batch             D  model width
    L  positions of a row          V  vocabulary entries
    S  tokens of a bag             H  attention heads
    T  tokens of a row             K  key/value heads
    N  flattened positions         Q  head size
    E  experts                     F  feed-forward width (of an expert, where there are some)

A *position* is what the transformer computes on: one bag ("s-token") while superposed, one token
in recovery. `tokens` always means data tokens.
"""

__version__ = "0.1.0"
