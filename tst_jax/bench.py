"""Times what the claims of speed rest on, as ratios within one run.

    python -m tst_jax.bench step --config=configs/quickstart.py --json=step.json
    python -m tst_jax.bench kernels --json=kernels.json
    python -m tst_jax.bench data --store=DIR --json=data.json
    python -m tst_jax.bench checkpoints --config=configs/quickstart.py --every=50

`step` runs the baseline step and superposition steps of several bag sizes in turn, round after
round, so that a busy machine disturbs all of them alike. All hold the same number of positions.
Needs no data: token ids are drawn at random.

`kernels` runs the loss (value and both gradients) and the bag mean (value and gradient) in turn
with what a user would write instead, at each combination of --bag_sizes, --n, --d and --v. It needs
jax, numpy and this package, nothing else.

`data` measures how many tokens a second come out of a store, of yours or of one that is made for
it, beside plain slices of its memory map. `taskset -c 0` in front measures one core.

`checkpoints` measures how much longer --every steps take with a save among them than without, on
the disk of --dir. Needs no data.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

import jax
import numpy as np

from tst_jax import bench_kernels
from tst_jax.errors import UserError


def bench_step(config, bag_sizes, rounds: int) -> list[dict]:
    """Time and memory of a training step at each bag size, beside the baseline's (bag size 1).

    Returns:
      One dict a bag size: bag_size, step_seconds_median, ratio_to_baseline (median over rounds of
      the ratio within the round), positions_per_second, tokens_per_second, temp_bytes,
      compile_seconds.
    """
    # Here, because they need flax and optax, which the other benchmark does without.
    from tst_jax import config as config_lib
    from tst_jax.train_step import init_state, key_data, make_train_step

    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: init_state(config, key), key_data(0))
    state = jax.jit(lambda key: init_state(config, key))(key_data(0))
    cases = {}
    for bag_size in sorted({1, *bag_sizes}):
        tst = dataclasses.replace(config.tst, bag_size=bag_size, ratio=1.0, stages="")
        one = dataclasses.replace(config, tst=tst)
        (stage,) = config_lib.stages(one)
        ids = rng.integers(0, config.model.vocab_size, (stage.rows, stage.row_tokens))
        tokens = jax.device_put(ids.astype(np.int32))
        began = time.perf_counter()
        step = jax.jit(make_train_step(one, stage), donate_argnums=0)
        program = step.lower(shapes, tokens).compile()
        cases[bag_size] = (stage, tokens, program, time.perf_counter() - began)
    seconds = {bag_size: [] for bag_size in cases}
    for number in range(rounds + 2):  # two rounds to warm up
        for bag_size, (_, tokens, program, _) in cases.items():
            began = time.perf_counter()
            state, _ = jax.block_until_ready(program(state, tokens))
            if number >= 2:
                seconds[bag_size].append(time.perf_counter() - began)
    results = []
    for bag_size, (stage, _, program, compile_seconds) in cases.items():
        median = statistics.median(seconds[bag_size])
        ratios = [mine / base for mine, base in zip(seconds[bag_size], seconds[1])]
        results.append(
            {
                "bag_size": bag_size,
                "step_seconds_median": median,
                "ratio_to_baseline": statistics.median(ratios),
                "positions_per_second": stage.step_positions / median,
                "tokens_per_second": stage.step_tokens / median,
                "temp_bytes": program.memory_analysis().temp_size_in_bytes,
                "compile_seconds": compile_seconds,
            }
        )
    return results


def _step(options) -> list[dict]:
    from tst_jax import config as config_lib
    from tst_jax import config_file

    config = config_file.load_config(options.config)
    config_lib.validate(config)
    results = bench_step(config, options.bag_sizes, options.rounds)
    for line in results:
        print(
            f"s={line['bag_size']:<3} {1e3 * line['step_seconds_median']:8.2f} ms a step, "
            f"{line['ratio_to_baseline']:.3f} of the baseline's, "
            f"{line['tokens_per_second']:,.0f} tokens/s, {line['temp_bytes'] / 2**20:.1f} MiB"
        )
    return results


def _kernels(options) -> list[dict]:
    return bench_kernels.run(bench_kernels.sizes(options), options)


def _data(options) -> list[dict]:
    from tst_jax import bench_data  # needs grain

    return bench_data.run(options)


def _checkpoints(options) -> list[dict]:
    from tst_jax import bench_checkpoints, config_file  # needs orbax

    return bench_checkpoints.run(config_file.load_config(options.config), options)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; give numbers of at least 1, with commas")
    return numbers


def _about(name: str) -> str:
    """What the docstring above says of a command: its paragraph and its example."""
    paragraph = next(text for text in __doc__.split("\n\n") if text.startswith(f"`{name}`"))
    example = next(line for line in __doc__.splitlines() if f"bench {name} " in line)
    return f"{paragraph.strip()}\n\n{example}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tst_jax.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True)

    def command(name, what, run, rounds):
        made = commands.add_parser(
            name, help=what, description=_about(name), formatter_class=parser.formatter_class
        )
        made.set_defaults(run=run)
        if name in ("step", "checkpoints"):
            made.add_argument(
                "--config", required=True, metavar="FILE.py", help="Python file with get_config()"
            )
        made.add_argument("--json", metavar="FILE", help="for the results")
        made.add_argument(
            "--rounds", type=int, default=rounds, metavar="N", help=f"default {rounds}"
        )
        return made.add_argument

    add = command("step", "training steps of several bag sizes", _step, 30)
    sizes = "1,2,4,8,16"
    add("--bag_sizes", type=_numbers, default=sizes, metavar="S,S", help=f"default {sizes}")
    add = command("kernels", "loss and bag mean beside the alternatives", _kernels, 7)
    bench_kernels.add_arguments(add, _numbers)
    add = command("data", "rows out of a store beside plain slices", _data, 5)
    add("--store", metavar="DIR", help="that tst_jax.prepare made; default: one is made")
    add(
        "--seconds",
        type=float,
        default=0.5,
        metavar="X",
        help="of each case in each round, default 0.5",
    )
    add = command("checkpoints", "steps with a save beside steps without", _checkpoints, 10)
    add("--every", type=int, default=50, metavar="N", help="steps for each save, default 50")
    add("--dir", help="where to write; default: the system's temporary folder")
    return parser


def main(argv=None) -> int:
    options = _parser().parse_args(argv)
    try:
        if options.rounds < 1:
            raise UserError("--rounds starts at 1")
        if getattr(options, "every", 1) < 1:
            raise UserError("--every starts at 1")
        if options.json and not pathlib.Path(options.json).absolute().parent.is_dir():
            raise UserError(f"--json: {options.json} lies in no folder that exists; make it first")
        results = options.run(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
