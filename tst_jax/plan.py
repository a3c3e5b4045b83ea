"""Says what a run will be, from its config alone: nothing is allocated, compiled or read.

    python -m tst_jax.plan --config=configs/dense_270m.py
    python -m tst_jax.plan --config=configs/dense_270m.py --accelerator=v5p --chips=16 \\
        --corpus_tokens=80B --json=plan.json

Steps, data tokens of each phase, FLOPs, hours, epochs over a corpus, what baselines of equal data
and equal loss would cost, and what gain the paper's figures suggest near this scale.
--config.NAME=VALUE overrides a setting, as for training.
"""

import json
import math
import pathlib

import jax

from tst_jax import budget, checks, flops, plan_page, published
from tst_jax import config as config_lib
from tst_jax.checkpoint import named_leaves
from tst_jax.config import Config, ConfigError
from tst_jax.errors import UserError
from tst_jax.models.shapes import ModelConfig
from tst_jax.models.transformer import Transformer

TABLES = ("embedding", "positions", "output")
EXPERTS = ("layers.gate", "layers.up", "layers.down")
ASSUMED_MFU = 0.4
# Settings of the method that the published grids go over, or that do nothing by themselves.
FREE = ("tst.bag_size", "tst.ratio", "tst.superposition_steps", "tst.fitted")


def count_parameters(cfg: ModelConfig) -> tuple[int, int]:
    """(all parameters, those that a position uses outside embedding, position table and head)."""
    shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    sizes = {name: math.prod(array.shape) for name, array in named_leaves(shapes).items()}
    active = 0
    for name, size in sizes.items():
        if name in TABLES:
            continue
        if cfg.experts and name in EXPERTS:
            size = size // cfg.experts * cfg.experts_per_token
        active += size
    return sum(sizes.values()), active


# ---- figures


def plan(
    config: Config,
    accelerator: str | None = None,
    chips: int | None = None,
    mfu: float | None = None,
    corpus_tokens: str | None = None,
) -> dict:
    """The figures of `--json`; counts are exact.

    Args:
      config: of the run.
      accelerator: a name in flops.PEAK_FLOPS; without one no hours are given.
      chips, mfu: how many of them (1), and the share of their peak that is reached (ASSUMED_MFU).
      corpus_tokens: text that budget.parse_tokens takes.
    Returns:
      Counts of the run; `store_bytes`; `accelerator`, `chips`, `mfu`, `peak_flops_per_second` of a
      chip, `hours`, `chip_hours`: None without an accelerator. `corpus`: see budget.corpus, and
      `equal_data_epochs`; None without one. `baselines` and `published`: see `_baselines` and
      `_published`; None where nothing is superposed.
    Raises:
      ConfigError: one line for each setting or option that cannot work.
    """
    found = config_lib.problems(config)
    found += option_problems(accelerator, chips, mfu, corpus_tokens)
    if found:
        raise ConfigError("\n".join(found))
    parameters, active = count_parameters(config.model)
    run = budget.spent(config)
    figures = {
        "parameters": parameters,
        "parameters_active_non_embedding": active,
        "positions_per_step": config.data.rows * config.data.positions,
        **run,
        "store_bytes": budget.store_bytes(run["total_tokens"], config.model.vocab_size),
    }
    figures |= dict.fromkeys(("accelerator", "chips", "mfu", "peak_flops_per_second"))
    hours = lambda spent: None
    if accelerator:
        chips, mfu = chips or 1, mfu or ASSUMED_MFU
        figures |= {"accelerator": accelerator, "chips": chips, "mfu": mfu}
        figures["peak_flops_per_second"] = flops.PEAK_FLOPS[accelerator]
        hours = lambda spent: budget.hours(spent["flops_full_attention"], accelerator, chips, mfu)
    figures["hours"] = hours(run)
    figures["chip_hours"] = chips * hours(run) if accelerator else None
    figures["corpus"] = figures["baselines"] = figures["published"] = None
    if budget.superposed(config):
        figures["baselines"] = _baselines(config, active, run, hours)
        figures["published"] = _published(config, active, run)
    if corpus_tokens:
        tokens = budget.parse_tokens(corpus_tokens)
        longer = figures["baselines"] and figures["baselines"]["equal_data"]
        epochs = longer and longer["total_tokens"] / tokens
        found = budget.corpus(config, tokens)
        figures["corpus"] = {"tokens": tokens, "equal_data_epochs": epochs, **found}
    return figures


def option_problems(accelerator, chips, mfu, corpus_tokens) -> list[str]:
    """One line for each option that cannot work; None is one that is not given."""
    found = []
    if accelerator is not None:
        found += checks.choice("--accelerator", accelerator, list(flops.PEAK_FLOPS))
    for name, value in (("--chips", chips), ("--mfu", mfu)):
        if value is not None and accelerator is None:
            known = ", ".join(flops.PEAK_FLOPS)
            found.append(f"{name} is {value} without --accelerator; name one of {known}")
    if chips is not None:
        found += checks.whole("--chips", chips, 1, config_lib.LARGEST)
    if mfu is not None:
        found += checks.real("--mfu", mfu, 1, above=True, hint=f" ({ASSUMED_MFU}: 40 percent)")
    if corpus_tokens is not None:
        try:
            budget.parse_tokens(corpus_tokens)
        except UserError as error:
            found.append(str(error))
    return found


def _baselines(config: Config, active: int, run: dict, hours) -> dict:
    """{"equal_flops", "equal_data", "equal_loss"}: counts, `flops_ratio` (over TST's) and `hours`.

    equal_data may be None, see budget.baselines. equal_loss is a list, one for each `factor` that
    was published: the baseline of as many steps, scaled by it; with the published `model`, and this
    run's size over that of its TST run.
    """
    found = budget.baselines(config)
    plain, scaled = found["equal_flops"], []
    for pair in published.EQUAL_LOSS:
        steps = round(run["steps"] * pair.step_ratio)
        away = published.distance(active, run["positions"], pair.tst.model, pair.tst.steps)
        cost = {
            name: plain[name] * steps // plain["steps"]
            for name in ("steps", "total_tokens", "flops", "flops_full_attention")
        }
        cost |= {"factor": pair.step_ratio, "model": pair.tst.model}
        cost |= {"parameters_ratio": away.parameters, "positions_ratio": away.positions}
        scaled.append(cost)
    for cost in [cost for cost in found.values() if cost] + scaled:
        cost["flops_ratio"] = cost["flops"] / run["flops"]
        cost["hours"] = hours(cost)
    return found | {"equal_loss": scaled}


def _published(config: Config, active: int, run: dict) -> dict:
    """What the nearest grid and the nearest pair of Table 1 say; see `published.expected_gain`."""
    ratio = run["superposition_steps"] / run["steps"]
    found = published.expected_gain(active, run["positions"], config.tst.bag_size, ratio)
    difference, why = found.loss_difference, found.why_none
    others = unlike_published(config)
    if others:
        difference, why = None, f"whose runs differ in {', '.join(others)}"
    pair, away = published.nearest_pair(active, run["positions"])
    return {
        "loss_difference": difference,
        "why_none": why,
        "table": found.grid.table,
        "model": found.grid.model,
        "steps": found.grid.steps,
        "parameters_ratio": found.distance.parameters,
        "positions_ratio": found.distance.positions,
        "pair_model": pair.tst.model,
        "pair_steps": pair.tst.steps,
        "pair_bag_size": pair.tst.bag_size,
        "pair_ratio": pair.tst.ratio,
        "pair_baseline_loss": pair.baseline.final_loss,
        "pair_tst_loss": pair.tst.final_loss,
        "pair_parameters_ratio": away.parameters,
        "pair_positions_ratio": away.positions,
    }


def unlike_published(config: Config) -> list[str]:
    """Settings in which a run is not the published method, so that no figure of it applies."""
    has, usual = config_lib.flatten(config), config_lib.flatten(Config())
    names = [name for name in usual if name.startswith("tst.") and name not in FREE]
    names += ["data.packing", "data.rows_from", "init_from"]
    return [name for name in names if has[name] != usual[name]]


if __name__ == "__main__":
    from absl import flags as options

    from tst_jax import cli

    CONFIG = cli.define_config()
    JSON = options.DEFINE_string("json", None, "File for the figures.")
    ACCELERATOR = options.DEFINE_string(
        "accelerator", None, f"Gives hours; one of {', '.join(flops.PEAK_FLOPS)}."
    )
    CHIPS = options.DEFINE_integer("chips", None, "How many of them; 1 where not given.")
    MFU = options.DEFINE_float(
        "mfu", None, f"Share of their peak that is reached; {ASSUMED_MFU} where not given."
    )
    CORPUS = options.DEFINE_string("corpus_tokens", None, "What you have: 80e9, 80B, 1.5T.")

    def main():
        config = cli.read_config(CONFIG)
        if JSON.value and not pathlib.Path(JSON.value).absolute().parent.is_dir():
            raise UserError(f"--json: {JSON.value} lies in no folder that exists; make it first")
        if JSON.value and pathlib.Path(JSON.value).is_dir():
            raise UserError(f"--json: {JSON.value} is a folder; give a file")
        figures = plan(config, ACCELERATOR.value, CHIPS.value, MFU.value, CORPUS.value)
        print(plan_page.page(config, figures, assumed=MFU.value is None))
        if JSON.value:
            pathlib.Path(JSON.value).write_text(json.dumps(figures, indent=2) + "\n")

    cli.run(main, __doc__)
