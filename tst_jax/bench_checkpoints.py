"""Times what a checkpoint costs the steps of a run: `python -m tst_jax.bench checkpoints`."""

import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from tst_jax import config as config_lib
from tst_jax import programs, sharding
from tst_jax.checkpoint import Checkpoints, size
from tst_jax.config import Config
from tst_jax.train_step import init_state, key_data


def measure(config: Config, every: int, rounds: int, folder) -> dict:
    """Blocks of `every` steps with a save at the beginning and without, in turn.

    The steps are the run's last stage's, on random tokens; as in training, the host waits for each
    step after it has sent the next one, and for all of them before a save. A save that is not done
    when its block ends is waited for, and counts.

    Args:
      config: of a run.
      every: steps of a block.
      rounds: of both kinds of block.
      folder: for the checkpoints, on the disk that is to be measured.
    Returns:
      every, state_bytes, block_seconds_median (without a save), ratio_median (over rounds, with a
      save over without), save_call_seconds_median (while which no step is sent).
    """
    where = mesh, shapes, shardings = programs.layout(config)
    stage = config_lib.stages(config)[-1]
    step = programs.lower_step(config, stage, *where).compile()
    state = jax.jit(lambda key: init_state(config, key), out_shardings=shardings)(key_data(0))
    ids = np.random.default_rng(0).integers(
        config.model.vocab_size, size=(stage.rows, stage.row_tokens), dtype=np.int32
    )
    tokens = sharding.assemble(mesh, np.arange(stage.rows), ids, stage.rows)
    calls, blocks = [], {True: [], False: []}
    with Checkpoints(folder, keep=1) as checkpoints:
        for number in range(rounds + 1):  # one to warm up
            for save in (False, True) if number % 2 else (True, False):
                began = time.perf_counter()
                if save:
                    checkpoints.save(number, state, {})
                    calls.append(time.perf_counter() - began)
                before = None
                for _ in range(every):
                    state, metrics = step(state, tokens)
                    jax.block_until_ready(before)
                    before = metrics
                jax.block_until_ready(before)
                checkpoints.wait()
                blocks[save].append(time.perf_counter() - began)
    ratios = [mine / base for mine, base in zip(blocks[True][1:], blocks[False][1:])]
    return {
        "every": every,
        "state_bytes": size(shapes),
        "block_seconds_median": statistics.median(blocks[False][1:]),
        "ratio_median": statistics.median(ratios),
        "save_call_seconds_median": statistics.median(calls[1:]),
    }


def run(config: Config, options) -> list[dict]:
    """Measures as the command line says, and prints a line."""
    config_lib.validate(config)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        found = measure(config, options.every, options.rounds, pathlib.Path(folder) / "checkpoints")
    print(
        f"{options.every} steps with a save of {found['state_bytes'] / 2**20:.1f} MiB take "
        f"{found['ratio_median']:.4f} of the time of {options.every} steps without; the call "
        f"holds the loop up for {1e3 * found['save_call_seconds_median']:.0f} ms"
    )
    return [found]
