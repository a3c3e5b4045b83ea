"""Times what the claims of speed rest on, as ratios within one run.

    python -m tst_jax.bench step --config=configs/dense_270m.py --config.model.layers=2
    python -m tst_jax.bench kernels --json=kernels.json
    python -m tst_jax.bench models --json=models.json
    python -m tst_jax.bench data --store=DIR --json=data.json
    python -m tst_jax.bench checkpoints --config=configs/quickstart.py --every=50
    python -m tst_jax.bench all --json=all.json

`step` runs the baseline step and superposition steps of several bag sizes in turn, round after
round, so that a busy machine disturbs all of them alike. All hold the same number of positions.
The programs are the trainer's, over all devices. Needs no data: token ids are drawn at random.

`kernels` runs the loss (value and both gradients) and the bag mean (value and gradient) in turn
with what a user would write instead, at each combination of --bag_sizes, --n, --d and --v. It needs
jax, numpy and this package, nothing else.

`models` runs the published shapes, two of them with fewer layers, on the accelerator at hand, and
finds the best batch and remat for it, the MFU of both phases, and what the head takes of a step.
Needs no data.

`data` measures how many tokens a second come out of a store, of yours or of one that is made for
it, beside plain slices of its memory map. `taskset -c 0` in front measures one core.

`checkpoints` measures how much longer --every steps take with a save among them than without, on
the disk of --dir. Needs no data.

`all` runs these but `models` with their defaults, and leaves out those whose packages are not
installed.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import statistics
import sys
import time

import jax
import numpy as np

from tst_jax import bench_kernels
from tst_jax.errors import UserError


def bench_step(config, bag_sizes, rounds: int) -> tuple[list[dict], dict]:
    """Time and memory of a training step at each bag size, beside the baseline's (bag size 1).

    The programs are the trainer's, over all devices.

    Args:
      config: validated. Its ratio, stages, packing and batch sizes of later steps do not enter.
      bag_sizes: besides 1.
      rounds: each takes one step of every bag size; two more warm up.
    Returns:
      One dict a bag size: bag_size, step_seconds_median, ratio_to_baseline (median over rounds of
      the ratio within the round), positions_per_second, tokens_per_second, temp_bytes (of a
      device), compile_seconds, mfu (whole attention scores counted; None where the peak of the
      devices is not known). And {bag_size: bytes a device at the peak of a step, state included}.
    """
    # Here, because they need flax and optax, which the other benchmark does without.
    from tst_jax import config as config_lib
    from tst_jax import flops, programs, sharding
    from tst_jax.train_step import init_state, key_data

    rng = np.random.default_rng(0)
    data = dataclasses.replace(config.data, packing="concat", rows_from="")
    config = dataclasses.replace(config, data=data)
    mesh, shapes, shardings = programs.layout(config)
    init = jax.jit(lambda key: init_state(config, key), out_shardings=shardings)
    state, cases, peaks = init(key_data(0)), {}, {}
    for bag_size in sorted({1, *bag_sizes}):
        tst = dataclasses.replace(config.tst, bag_size=bag_size, ratio=1.0, stages="")
        tst = dataclasses.replace(tst, superposition_steps=-1)
        one = dataclasses.replace(config, tst=tst)
        (stage,) = config_lib.stages(one)
        ids = rng.integers(0, config.model.vocab_size, (stage.rows, stage.row_tokens))
        tokens = jax.device_put(ids.astype(np.int32), sharding.batch_sharding(mesh))
        began = time.perf_counter()
        program = programs.lower_step(one, stage, mesh, shapes, shardings).compile()
        cases[bag_size] = (stage, tokens, program, time.perf_counter() - began)
        memory = program.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        peaks[bag_size] = held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    seconds = {bag_size: [] for bag_size in cases}
    for number in range(rounds + 2):  # two rounds to warm up
        for bag_size, (_, tokens, program, _) in cases.items():
            began = time.perf_counter()
            state, _ = jax.block_until_ready(program(state, tokens))
            if number >= 2:
                seconds[bag_size].append(time.perf_counter() - began)
    peak = flops.device_peak_flops(mesh.devices.flat[0].device_kind)
    results = []
    for bag_size, (stage, _, program, compile_seconds) in cases.items():
        median = statistics.median(seconds[bag_size])
        ratios = [mine / base for mine, base in zip(seconds[bag_size], seconds[1])]
        work = flops.step_flops(config.model, stage.rows, stage.positions, causal=False)
        results.append(
            {
                "bag_size": bag_size,
                "step_seconds_median": median,
                "ratio_to_baseline": statistics.median(ratios),
                "positions_per_second": stage.step_positions / median,
                "tokens_per_second": stage.step_tokens / median,
                "temp_bytes": program.memory_analysis().temp_size_in_bytes,
                "compile_seconds": compile_seconds,
                "mfu": work / median / (peak * mesh.size) if peak else None,
            }
        )
    return results, peaks


def _config(options):
    """The config file's, with the command line's settings, checked."""
    from tst_jax import config as config_lib
    from tst_jax import config_file

    config = config_file.load_config(options.config)
    for name, text in options.settings:
        config = _with(config, name, name, text)
    # No store is read, so that none need be named.
    data = dataclasses.replace(config.data, store=config.data.store or "none")
    config = dataclasses.replace(config, data=data)
    config_lib.validate(config)
    return config


def _with(part, name: str, whole: str, text: str):
    """`part` of a config with one setting from text; without ml-collections, which does it
    elsewhere."""
    head, _, rest = name.partition(".")
    if head not in (field.name for field in dataclasses.fields(part)):
        raise UserError(f"unknown setting --config.{whole}; tst_jax.settings lists all")
    old = getattr(part, head)
    if dataclasses.is_dataclass(old) != bool(rest):
        raise UserError(f"unknown setting --config.{whole}; tst_jax.settings lists all")
    if rest:
        return dataclasses.replace(part, **{head: _with(old, rest, whole, text)})
    try:
        value = {"true": True, "false": False}[text] if isinstance(old, bool) else type(old)(text)
    except (KeyError, ValueError):
        words = {bool: "true or false", int: "a whole number"}.get(type(old), "a number")
        raise UserError(f"--config.{whole} is {text!r}; give {words}") from None
    return dataclasses.replace(part, **{head: value})


def _step(options) -> list[dict]:
    results, peaks = bench_step(_config(options), options.bag_sizes, options.rounds)
    for line in results:
        mfu = f", MFU {line['mfu']:.1%}" if line["mfu"] else ""
        print(
            f"s={line['bag_size']:<3} {1e3 * line['step_seconds_median']:8.2f} ms a step, "
            f"{line['ratio_to_baseline']:.3f} of the baseline's, "
            f"{line['positions_per_second']:,.0f} positions/s, "
            f"{line['tokens_per_second']:,.0f} tokens/s{mfu}, compiled in "
            f"{line['compile_seconds']:.1f} s, peak {peaks[line['bag_size']] / 2**20:,.1f} MiB, "
            f"temporaries {line['temp_bytes'] / 2**20:,.1f} MiB"
        )
    return results


def _all(options) -> dict:
    """What the others find with their defaults, by name; None for what is not installed."""
    results = {}
    for name in ("step", "kernels", "data", "checkpoints"):
        arguments = [name] if options.rounds is None else [name, f"--rounds={options.rounds}"]
        if name in ("step", "checkpoints"):
            arguments += [f"--config={options.config}"]
        one = _parser().parse_args(arguments)
        one.settings = options.settings
        print(f"{name}:", flush=True)
        try:
            results[name] = one.run(one)
        except ModuleNotFoundError as error:
            print(f"left out: {error.name} is not installed")
            results[name] = None
    return results


def _kernels(options) -> list[dict]:
    return bench_kernels.run(bench_kernels.sizes(options), options)


def _models(options) -> dict:
    from tst_jax import bench_models  # needs flax and optax

    if jax.default_backend() == "cpu":
        raise UserError("bench models is for a GPU or TPU, and jax finds none; try bench step")
    return bench_models.run(bench_models.CASES, options)


def _data(options) -> list[dict]:
    from tst_jax import bench_data  # needs grain

    return bench_data.run(options)


def _checkpoints(options) -> list[dict]:
    from tst_jax import bench_checkpoints  # needs orbax

    return bench_checkpoints.run(_config(options), options)


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
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="what", required=True)

    def command(name, what, run, rounds):
        made = commands.add_parser(
            name,
            help=what,
            description=_about(name),
            formatter_class=parser.formatter_class,
            allow_abbrev=False,
        )
        made.set_defaults(run=run)
        if name in ("step", "checkpoints", "all"):
            what = "Python file with get_config(); --config.NAME=VALUE overrides a setting"
            needed = {"default": "configs/quickstart.py"} if name == "all" else {"required": True}
            made.add_argument("--config", metavar="FILE.py", help=what, **needed)
        made.add_argument("--json", metavar="FILE", help="for the results")
        default = f"default {rounds}" if rounds else "default: each one's own"
        made.add_argument("--rounds", type=int, default=rounds, metavar="N", help=default)
        return made.add_argument

    add = command("step", "training steps of several bag sizes", _step, 30)
    sizes = "1,2,4,8,16"
    add("--bag_sizes", type=_numbers, default=sizes, metavar="S,S", help=f"default {sizes}")
    add = command("kernels", "loss and bag mean beside the alternatives", _kernels, 7)
    bench_kernels.add_arguments(add, _numbers)
    add = command("models", "the published shapes on an accelerator", _models, 5)
    bench_kernels.add_limit(add)
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
    command("all", "all of these, with their defaults", _all, None)
    return parser


def main(argv=None) -> int:
    parser = _parser()
    options, others = parser.parse_known_args(argv)
    given = [re.fullmatch(r"--config\.([\w.]+)=(.*)", argument) for argument in others]
    if not all(given) or (given and not hasattr(options, "config")):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    options.settings = [match.groups() for match in given]
    try:
        if options.rounds is not None and options.rounds < 1:
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
