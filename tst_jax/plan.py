"""Says what a run will be, from its config alone: nothing is allocated, compiled or read.

    python -m tst_jax.plan --config=configs/dense_270m.py --json=plan.json

--config.NAME=VALUE overrides a setting, as for training.
"""

import json
import math
import pathlib

import jax

from tst_jax import config as config_lib
from tst_jax import flops
from tst_jax.checkpoint import named_leaves
from tst_jax.config import Config
from tst_jax.errors import UserError
from tst_jax.models.shapes import ModelConfig
from tst_jax.models.transformer import Transformer

TABLES = ("embedding", "positions", "output")
EXPERTS = ("layers.gate", "layers.up", "layers.down")


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


def plan(config: Config) -> dict:
    """The figures of `--json`; counts are exact.

    Raises:
      ConfigError: one line for each setting that cannot work.
    """
    config_lib.validate(config)
    parameters, active = count_parameters(config.model)
    tokens = {"superposition": 0, "recovery": 0}
    spent = 0
    for stage in config_lib.stages(config):
        steps = stage.stop - stage.start
        tokens[stage.phase] += steps * stage.step_tokens
        spent += steps * flops.step_flops(config.model, stage.rows, stage.positions)
    return {
        "parameters": parameters,
        "parameters_active_non_embedding": active,
        "positions_per_step": config.data.rows * config.data.positions,
        "steps": config.steps,
        "superposition_tokens": tokens["superposition"],
        "recovery_tokens": tokens["recovery"],
        "total_tokens": sum(tokens.values()),
        "flops": spent,
    }


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    CONFIG = cli.define_config()
    JSON = flags.DEFINE_string("json", None, "File for the figures.")

    def main():
        config = cli.read_config(CONFIG)
        if JSON.value and not pathlib.Path(JSON.value).absolute().parent.is_dir():
            raise UserError(f"--json: {JSON.value} lies in no folder that exists; make it first")
        figures = plan(config)
        for name, value in figures.items():
            shown = f"{value:.4g}" if name == "flops" else f"{value:,}"
            print(f"{name.replace('_', ' '):32} {shown:>20}")
        if JSON.value:
            pathlib.Path(JSON.value).write_text(json.dumps(figures, indent=2) + "\n")

    cli.run(main, __doc__)
