"""Whether a run fits a TPU slice, without a TPU: compiles both phases' steps for it, ahead of time.

    python -m tst_jax.aot --config=configs/moe_10b_a1b.py --topology=v5p:4x4x4 --json=fit.json

Prints, for a chip, what the compiled programs hold and send, and ends with status 2 where they do
not fit, after looking for a change of remat or micro-batches that would. Needs `libtpu`, for the
compiler in it. Nothing runs: these are no figures of speed. --config.NAME=VALUE overrides a
setting, as for training.
"""

import concurrent.futures
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import time

import jax
from jax.experimental import topologies

from tst_jax import config as config_lib
from tst_jax import flops, hlo, programs
from tst_jax.config import ConfigError
from tst_jax.errors import UserError

PHASES = ("superposition", "recovery")

# What the compiler lets a program use of a chip's memory (as its own errors say), GiB.
HBM = {
    "TPU v4": 15.25,  # a core; the other kinds: a chip or, for TPU7x, one of its two
    "TPU v5 lite": 15.75,
    "TPU v5": 95.73,
    "TPU v6 lite": 31.24,
    "TPU7x": 94.74,
}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_FROM_COMPILER = (
    *("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes"),
    *("collectives", "compile_seconds"),
)

# libtpu asks a metadata server and other hosts about itself unless it is told.
_ALONE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def prepare_compiler() -> None:
    """Makes libtpu usable on a machine without a TPU. Before jax looks for devices.

    Looks for it among the packages, then in .venv/tpu-compiler, where tests/run.sh puts it: jax
    looks for a TPU wherever it finds libtpu, so it lies apart.

    Raises:
      UserError: there is none.
    """
    jax.config.update("jax_platforms", "cpu")
    for name, value in _ALONE.items():
        os.environ.setdefault(name, value)
    if importlib.util.find_spec("libtpu") is not None:
        return
    environments = pathlib.Path(sys.prefix), pathlib.Path(__file__).parents[1] / ".venv"
    places = [environment / "tpu-compiler" for environment in environments]
    for place in places:
        if (place / "libtpu").is_dir():
            sys.path.append(str(place))
            return
    raise UserError(
        "libtpu, which holds the compiler for TPUs, is not installed; "
        f"python -m pip install --no-deps --target={places[0]} libtpu (Linux x86-64)"
    )


def devices(topology: str):
    """The chips of a slice, as devices to compile for.

    Args:
      topology: generation and shape, v5e:4x4 or v5p:4x4x8; v5e, v5p, v6e and tpu7x are known.
    Raises:
      UserError: libtpu knows no such slice.
    """
    try:
        return topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as error:  # libtpu's own, of several types
        line = str(error).splitlines()[0][:300]
        raise UserError(
            f"--topology={topology}: {line}; write one like v5e:4x4, v6e:8x8, v5p:4x4x4 or "
            "tpu7x:2x2x1"
        ) from None


def measure(config, stage, chips, layout) -> dict:
    """Compiles a stage's step. The figures of `--json` for a phase; see `check`."""
    mesh, shapes, shardings = layout
    found = {
        "bag_size": stage.bag_size,
        "parameter_bytes": _bytes_on_a_device(shapes.params, shardings.params),
        "optimizer_bytes": _bytes_on_a_device(shapes.opt_state, shardings.opt_state),
        "hbm_bytes": int(HBM[chips[0].device_kind] * 2**30),
        "flops": flops.step_flops(config.model, stage.rows, stage.positions),
        **dict.fromkeys(_FROM_COMPILER),
    }
    lowered = programs.lower_step(config, stage, mesh, shapes, shardings)
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found |= {"fits": False, "peak_bytes": _needed(str(error))}
        found["compile_seconds"] = time.perf_counter() - began
        return found
    memory = compiled.memory_analysis()
    found |= {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "peak_bytes": memory.peak_memory_in_bytes,
    }
    found["fits"] = found["peak_bytes"] <= found["hbm_bytes"]
    found["compile_seconds"] = time.perf_counter() - began
    return found | {"collectives": hlo.collectives(compiled.as_text())}


def _measure_all(config, chips, layout) -> list[dict]:
    one = lambda stage: measure(config, stage, chips, layout)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return list(pool.map(one, config_lib.stages(config)))


def _bytes_on_a_device(shapes, shardings) -> int:
    sizes = jax.tree.map(
        lambda x, place: math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize, shapes, shardings
    )
    return sum(jax.tree.leaves(sizes))


def _needed(message: str) -> int | None:
    """Bytes that a program wanted, from the compiler's refusal."""
    found = re.search(r"\(([\d.]+)([KMGT]?)\) exceeds|Used ([\d.]+)([KMGT]?) of", message)
    if not found:
        return None
    number, unit = [group for group in found.groups() if group is not None]
    return int(float(number) * _UNITS[unit])


def check(config, topology: str) -> dict:
    """Compiles each phase's step for the slice; of several stages of a phase, the largest counts.

    Returns:
      The figures of `--json`: topology, chips, device_kind, mesh, fits, and under `superposition`
      and `recovery` (None where the run has no such phase), bytes being those of one chip:
      parameter_bytes, optimizer_bytes; argument_bytes (state and batch), output_bytes, alias_bytes
      (of outputs that take their arguments' place), temp_bytes (all temporaries, also such as never
      live at one time); peak_bytes, the most that lives at a time, arguments included, which is
      what has to fit; hbm_bytes, what a program may use; flops of a step by our count, on all
      chips; collectives, {kind: bytes a step}, see `tst_jax.hlo`; compile_seconds. Of a program
      that does not fit the compiler tells peak_bytes, at best; the others are None.
    Raises:
      UserError, ConfigError: the slice, or a setting that cannot be on it.
    """
    config_lib.validate(config)
    chips = devices(topology)
    if chips[0].device_kind not in HBM:
        raise ConfigError(
            f"--topology={topology}: nothing is known of the memory of a {chips[0].device_kind}; "
            f"choose a kind of {', '.join(HBM)}"
        )
    layout = programs.layout(config, chips)
    figures: dict = {
        "topology": topology,
        "chips": len(chips),
        "device_kind": chips[0].device_kind,
        "mesh": {axis: int(size) for axis, size in layout[0].shape.items()},
        "fits": True,
        **dict.fromkeys(PHASES),
    }
    stages = config_lib.stages(config)
    names = ", ".join(f"{stage.phase} s={stage.bag_size}" for stage in stages)
    print(f"compiling {names} for {len(chips)} chips of {topology}; minutes, if large", flush=True)
    for stage, found in zip(stages, _measure_all(config, chips, layout)):
        before = figures[stage.phase]
        if before is None or (found["peak_bytes"] or 0) > (before["peak_bytes"] or 0):
            figures[stage.phase] = found
        figures["fits"] &= found["fits"]
    return figures


def what_would_fit(config, topology: str, figures: dict) -> str | None:
    """Settings that make all phases fit, "--config.a=b ..."; None: not found.

    Tries, each by compiling: all of the state in parts, recomputing in the backward pass, and more
    micro-batches.
    """
    chips = devices(topology)
    worst = max(filter(None, map(figures.get, PHASES)), key=lambda found: not found["fits"])
    changes = {}
    if figures["mesh"]["data"] > 1:
        state = worst["parameter_bytes"] + worst["optimizer_bytes"]
        if state > worst["hbm_bytes"] / 10:
            changes |= {
                "mesh.data": 1,
                "mesh.fsdp": figures["mesh"]["data"] * figures["mesh"]["fsdp"],
            }
    if config.model.remat != "full":
        changes["model.remat"] = "full"
    parts = config.micro_batches * (1 if changes else 2)
    while True:
        tried = changes | ({"micro_batches": parts} if parts > config.micro_batches else {})
        text = " ".join(f"--config.{name}={value}" for name, value in tried.items())
        other = _changed(config, tried)
        try:
            config_lib.validate(other)
            layout = programs.layout(other, chips)
        except ConfigError:  # rows that do not divide into so many parts
            return None
        print(f"does not fit; trying {text}", flush=True)
        if all(found["fits"] for found in _measure_all(other, chips, layout)):
            return text
        parts *= 2


def _changed(config, changes: dict):
    for name, value in changes.items():
        *path, field = name.split(".")
        parts = [config]
        for part in path:
            parts.append(getattr(parts[-1], part))
        value = dataclasses.replace(parts[-1], **{field: value})
        for part, owner in zip(reversed(path), reversed(parts[:-1])):
            value = dataclasses.replace(owner, **{part: value})
        config = value
    return config


def table(figures: dict) -> str:
    """The figures for the eye."""
    phases = [name for name in PHASES if figures[name]]
    found = [figures[name] for name in phases]
    gib = lambda name: lambda f: f"{f[name] / 2**30:.2f}" if f[name] is not None else "?"

    def temporaries(f):  # at the peak
        return f"{(f['peak_bytes'] - f['argument_bytes']) / 2**30:.2f}" if f["fits"] else "?"

    def room(f):
        if not f["fits"]:
            return "does not fit"
        left = f["hbm_bytes"] - f["peak_bytes"]
        return f"{left / 2**30:.2f} ({left / f['hbm_bytes']:.0%})"

    rows = {
        "bag size": lambda f: str(f["bag_size"]),
        "parameters, GiB": gib("parameter_bytes"),
        "optimizer state, GiB": gib("optimizer_bytes"),
        "arguments, GiB": gib("argument_bytes"),
        "temporaries, GiB": temporaries,
        "peak, GiB": gib("peak_bytes"),
        "memory, GiB": gib("hbm_bytes"),
        "room left, GiB": room,
        "FLOPs a step, all chips": lambda f: f"{f['flops']:.4g}",
        "FLOPs a step, one chip": lambda f: f"{f['flops'] / figures['chips']:.4g}",
    }
    for kind in sorted({kind for f in found for kind in f["collectives"] or {}}):
        sent = lambda f, kind=kind: f"{(f['collectives'] or {}).get(kind, 0) / 1e9:.3f}"
        rows[f"{kind}, GB a step"] = sent
    rows["compiled in, s"] = lambda f: f"{f['compile_seconds']:.0f}"
    mesh = ", ".join(f"{axis}={size}" for axis, size in figures["mesh"].items())
    lines = [f"{figures['chips']} {figures['device_kind']}, mesh {mesh}; for each of them:"]
    lines.append(" " * 26 + "".join(f"{name:>16}" for name in phases))
    for name, value in rows.items():
        lines.append(f"{name:26}" + "".join(f"{value(f):>16}" for f in found))
    return "\n".join(lines)


def main(config, topology: str, json_file: str | None) -> None:
    """Prints and writes the figures. UserError where the run does not fit."""
    figures = check(config, topology)
    print(table(figures))
    if not figures["fits"]:
        figures["would_fit"] = what_would_fit(config, topology, figures)
    if json_file:
        pathlib.Path(json_file).write_text(json.dumps(figures, indent=2) + "\n")
    lines = []
    for name in PHASES:
        found = figures[name]
        if found and not found["fits"]:
            needed = f"{found['peak_bytes'] / 2**30:.2f} GiB" if found["peak_bytes"] else "more"
            lines.append(f"{name} needs {needed} of a chip's {found['hbm_bytes'] / 2**30:.2f} GiB")
    if lines:
        instead = figures["would_fit"]
        advice = f"with {instead} it fits" if instead else "no remat or micro_batches would fit"
        raise UserError(
            f"{'; '.join(lines)} on {topology}: {advice}"
            + ("" if instead else "; take more chips, or some with more memory")
        )


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    CONFIG = cli.define_config()
    TOPOLOGY = flags.DEFINE_string("topology", None, "TPU slice: v5e:4x4, v6e:8x8, v5p:4x4x8.")
    JSON = flags.DEFINE_string("json", None, "File for the figures.")

    def _main():
        config = cli.read_config(CONFIG)
        if not TOPOLOGY.value:
            raise UserError("--topology is missing; give a TPU slice, e.g. v5p:4x4x4")
        if JSON.value and not pathlib.Path(JSON.value).absolute().parent.is_dir():
            raise UserError(f"--json: {JSON.value} lies in no folder that exists; make it first")
        config_lib.validate(config)
        prepare_compiler()
        main(config, TOPOLOGY.value, JSON.value)

    cli.run(_main, __doc__)
