"""Arithmetic of a step: matmul FLOPs with the explicit head size (rule 22)."""

from tst_jax.models.attention import LINEAR_CHUNK
from tst_jax.models.shapes import ModelConfig

TRAINING = 3  # a backward pass costs two forward passes


def forward_flops(cfg: ModelConfig, positions: int, causal: bool = True) -> int:
    """FLOPs of one position's forward pass in a row of `positions` positions.

    The bag size does not enter: the bag mean and the bag's targets are look-ups, not matmuls.

    Args:
      cfg: the decoder's shape.
      positions: L.
      causal: count the half of the attention scores that a causal mask keeps; False gives the
        usual MFU convention, which counts them all.
    """
    d, h, k, q = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim
    attention_projections = 2 * d * (h + 2 * k) * q + 2 * d * h * q
    attention_scores = 4 * positions * h * q // (2 if causal else 1)
    if cfg.attention == "linear":  # scores within a chunk; a state that is updated, and read
        chunk = min(LINEAR_CHUNK, positions)
        attention_projections += 2 * d * h
        attention_scores = 4 * chunk * h * q // (2 if causal else 1) + 4 * h * q * q
    matrices = 3 if cfg.mlp == "swiglu" else 2
    feed_forward = 2 * matrices * d * cfg.ff
    if cfg.experts:
        feed_forward = 2 * d * cfg.experts + cfg.experts_per_token * feed_forward
    head = 2 * d * cfg.vocab_size
    return cfg.layers * (attention_projections + attention_scores + feed_forward) + head


def step_flops(cfg: ModelConfig, rows: int, positions: int, causal: bool = True) -> int:
    """FLOPs of one training step over `rows` rows of `positions` positions."""
    return TRAINING * rows * positions * forward_flops(cfg, positions, causal)
