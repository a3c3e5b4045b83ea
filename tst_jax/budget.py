"""Arithmetic of a run's budget: tokens, FLOPs, hours, and what a corpus is enough for (rule 21).

Everything follows from the settings; nothing is measured. `tst_jax.plan` prints it.
"""

import bisect
import copy
import re
from decimal import Decimal

from tst_jax import checks, flops
from tst_jax import config as config_lib
from tst_jax.compare import baseline_of, equal_data_steps
from tst_jax.config import Config
from tst_jax.data.store import stored_dtype
from tst_jax.errors import UserError
from tst_jax.schedule import LARGEST_BAG

MOST_TOKENS = 10**18
_SUFFIXES = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}
_TOKENS = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)(?:[eE]\+?(\d{1,2})|([KMBTkmbt]?))")


def parse_tokens(text: str) -> int:
    """`80e9`, `80_000_000_000`, `80B`, `1.5T` -> a count.

    Raises:
      UserError: it is no whole number of tokens within 1 .. MOST_TOKENS.
    """
    found = _TOKENS.fullmatch(text)
    tokens = Decimal(0)
    if found:
        number, exponent, suffix = found.groups()
        power = int(exponent) if exponent else _SUFFIXES[(suffix or "").upper()]
        tokens = Decimal(number).scaleb(power)
    if not 1 <= tokens <= MOST_TOKENS or tokens != int(tokens):
        raise UserError(
            f"--corpus_tokens is {checks.show(text)}; give a whole number of tokens, 1 to "
            f"{MOST_TOKENS:.0e}, as 80e9, 80_000_000_000, 80B or 1.5T"
        )
    return int(tokens)


def superposed(config: Config) -> bool:
    """Whether any step is."""
    return any(stage.bag_size > 1 for stage in config_lib.stages(config))


def spent(config: Config) -> dict:
    """Steps, data tokens and FLOPs of a run, exactly, each phase by itself where they differ."""
    steps, tokens = ({"superposition": 0, "recovery": 0} for _ in range(2))
    causal = full = positions = 0
    for stage in config_lib.stages(config):
        count, shape = stage.stop - stage.start, (stage.rows, stage.positions)
        steps[stage.phase] += count
        tokens[stage.phase] += count * stage.step_tokens
        positions += count * stage.step_positions
        causal += count * flops.step_flops(config.model, *shape)
        full += count * flops.step_flops(config.model, *shape, causal=False)
    return {
        "steps": config.steps,
        "superposition_steps": steps["superposition"],
        "recovery_steps": steps["recovery"],
        "positions": positions,
        "superposition_tokens": tokens["superposition"],
        "recovery_tokens": tokens["recovery"],
        "total_tokens": sum(tokens.values()),
        "flops": causal,
        "flops_full_attention": full,
    }


def hours(flops_full_attention: float, accelerator: str, chips: int, mfu: float) -> float:
    """Wall-clock hours of so many FLOPs, attention counted whole, as an MFU does (rule 22).

    Args:
      flops_full_attention: of the run, with step_flops(causal=False).
      accelerator: a name in flops.PEAK_FLOPS.
      chips: that share the work.
      mfu: share of their peak that the run reaches, above 0, up to 1.
    """
    return flops_full_attention / (chips * flops.PEAK_FLOPS[accelerator] * mfu) / 3600


def store_bytes(tokens: int, vocab_size: int) -> int:
    """Of a token store's ids; documents' offsets and the tokenizer come on top."""
    return tokens * stored_dtype(vocab_size).itemsize


def baselines(config: Config) -> dict[str, dict | None]:
    """Baselines of a TST run: `equal_flops` (as many steps) and `equal_data` (as many tokens).

    Returns:
      What `spent` says of each. None for equal_data where the batch size changes: its steps are
      then no plain multiple.
    """
    longer = None
    if not config.data.rows_from:
        longer = spent(baseline_of(config, equal_data_steps(config)))
    return {"equal_flops": spent(baseline_of(config)), "equal_data": longer}


def corpus(config: Config, corpus_tokens: int) -> dict:
    """How often a corpus is read, and the most superposition with which none of it is read twice.

    A run reads T0 (r s + 1 - r) tokens, T0 being its baseline's, so r (s - 1) <= C / T0 - 1.

    Returns:
      `epochs`; `baseline_epochs`; `r_times_s_minus_1` of this run and `r_times_s_minus_1_at_most`;
      `superposition_steps_at_most` and `ratio_at_most` at this run's bag size, `bag_size_at_most`
      at its ratio. Bounds are None where even the baseline repeats, or there is none: of the
      product with changing batch sizes or mode=output, of the others with several stages or where
      nothing is superposed.
    """
    plain, tst = spent(baseline_of(config))["total_tokens"], config.tst
    tokens = spent(config)["total_tokens"]
    found = {
        "epochs": tokens / corpus_tokens,
        "baseline_epochs": plain / corpus_tokens,
        "r_times_s_minus_1": tokens / plain - 1,
        "r_times_s_minus_1_at_most": None,
        "superposition_steps_at_most": None,
        "ratio_at_most": None,
        "bag_size_at_most": None,
    }
    if plain > corpus_tokens:
        return found
    if not config.data.rows_from and tst.mode != "output":
        found["r_times_s_minus_1_at_most"] = corpus_tokens / plain - 1
    if tst.stages and tst.ratio > 0:
        return found
    fits = lambda bag_size, steps: _tokens(config, bag_size, steps) <= corpus_tokens
    if tst.bag_size > 1:
        steps = _largest(lambda steps: fits(tst.bag_size, steps), config.steps)
        found["superposition_steps_at_most"] = steps
        found["ratio_at_most"] = steps / config.steps
    if superposed(config):
        steps = spent(config)["superposition_steps"]
        found["bag_size_at_most"] = _largest(lambda bag: fits(bag, steps), LARGEST_BAG)
    return found


def _tokens(config: Config, bag_size: int, superposition_steps: int) -> int:
    """Of the same run with another superposition phase. expand="batch" reads as many as "length",
    but not with every bag size."""
    other = copy.deepcopy(config)
    other.tst.bag_size, other.tst.superposition_steps = bag_size, superposition_steps
    other.tst.stages, other.tst.expand = "", "length"
    return sum((s.stop - s.start) * s.step_tokens for s in config_lib.stages(other))


def _largest(fits, most: int) -> int:
    """The largest of 0 .. most that fits, where 0 does, and whatever is below one that does."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda x: not fits(x))


def short(number: float, unit: str = "") -> str:
    """`104.9B` for 104,857,600,000, in four digits; with the unit B (bytes) `104.9 GB`."""
    power = 0
    while number >= 999.95 and power < 5:
        number, power = number / 1000, power + 1
    prefix = (" kMGTP" if unit else " KMBTQ")[power].strip()
    return f"{number:.4g} {prefix}{unit}" if unit else f"{number:.4g}{prefix}"
