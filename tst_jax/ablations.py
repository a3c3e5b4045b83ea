"""Variations of a run by name: what the paper took away or exchanged, and what it left open.

A config file that ends in `return ablated(config, arm)` has them all as `FILE.py:NAME`, and a sweep
over them is `--grid='arm=baseline,tst,...;seed=0,1,2'` (see `sweep.py`).
"""

import copy

from tst_jax import checks
from tst_jax.config import Config
from tst_jax.errors import UserError

ABLATIONS: dict[str, dict] = {
    "tst": {},
    "baseline": {"ratio": 0.0},
    # One half of the method alone (Figure 6).
    "input_only": {"mode": "input"},
    "output_only": {"mode": "output"},
    # What crosses the switch (Table 2).
    "reinit": {"reinit_embedding_and_head": True},
    "reset_optimizer": {"reset_optimizer": True},
    # Weights of a bag's slots (Appendix D, Figures 8 and 9).
    "power": {"weights": "power"},
    "exponential": {"weights": "exponential"},
    "first": {"weights": "first"},
    "fitted": {"weights": "fitted"},
    # Other losses of a bag (Appendix C).
    "mass": {"objective": "mass"},
    "bce": {"objective": "bce"},
    "hinge": {"objective": "hinge"},
    # The extra tokens as more rows (section 3.1 names it, untried).
    "expand_batch": {"expand": "batch"},
    # Bags that get smaller in steps (rule 13); as many superposed steps as of `tst` at ratio 0.3.
    "stages": {"stages": "16:0.1,8:0.1,4:0.1"},
    # Bags that begin elsewhere whenever a row is read again.
    "random_offset": {"random_offset": True},
    # Where data is short: bags beside the next token, which read no more than the baseline does.
    "auxiliary": {"mode": "output", "auxiliary": 0.5, "ratio": 0.9},
}


def ablated(config: Config, name: str) -> Config:
    """A copy of the TST run `config` with one thing changed.

    Raises:
      UserError: no such name.
    """
    if name not in ABLATIONS:
        hint = checks.did_you_mean(name, ABLATIONS)
        raise UserError(f"the arm is {name!r}; choose one of {', '.join(ABLATIONS)}{hint}")
    config = copy.deepcopy(config)
    for field, value in ABLATIONS[name].items():
        setattr(config.tst, field, value)
    return config
