"""Looks at this machine, and at a run that is to start or that will not, and says what is wrong.

    python -m tst_jax.doctor
    python -m tst_jax.doctor --config=configs/quickstart.py --workdir=runs/tst

One line for each thing that was looked at: pass or FAIL. What it prints is the first thing that a
bug report should hold. Writes nothing into a run. With --config it verifies the data stores and
runs one step of each phase with them, else with a small model and random tokens; with --workdir it
verifies all checkpoints. Ends with status 1 if anything fails.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import shutil
import time
import traceback

import jax
import numpy as np
from etils import epath
from packaging.requirements import Requirement

from tst_jax import __version__, programs, sharding
from tst_jax import config as config_lib
from tst_jax import workdir as workdir_lib
from tst_jax.checkpoint import Checkpoints, gigabytes
from tst_jax.config import Config
from tst_jax.data import corpus, pipeline
from tst_jax.data.order import Order
from tst_jax.errors import UserError
from tst_jax.lock import Lock
from tst_jax.models.shapes import ModelConfig
from tst_jax.train_step import key_data

PYTHONS = ((3, 11), (3, 13))


class Report:
    """Prints a line for each check, and counts."""

    def __init__(self):
        self.passed = self.failed = 0

    def check(self, name: str, function, *arguments):
        """`function(*arguments)` returns (what to print, a value), or raises what is wrong; here
        the value is returned, or None."""
        try:
            text, value = function(*arguments)
        except UserError as error:
            for line in str(error).splitlines():
                self._line("FAIL", name, line)
            self.failed += 1
        except Exception as error:  # whatever it is, the other checks are worth a look
            lines = str(error).strip().splitlines() or [""]
            self._line("FAIL", name, f"{type(error).__name__}: {lines[0]}")
            for line in "".join(traceback.format_exception(error)).splitlines():
                print(f"        {line}", flush=True)
            self.failed += 1
        else:
            self._line("pass", name, text)
            self.passed += 1
            return value

    @staticmethod
    def _line(outcome, name, text):
        print(f"{outcome}  {name:<18} {text}", flush=True)


# ---- the machine


def python():
    version = platform.python_version()
    allowed = f"{'.'.join(map(str, PYTHONS[0]))} to {'.'.join(map(str, PYTHONS[1]))}"
    if not PYTHONS[0] <= tuple(map(int, platform.python_version_tuple()[:2])) <= PYTHONS[1]:
        raise UserError(f"Python {version}; tst_jax runs on {allowed}")
    return f"{version} on {platform.platform()}", None


def packages():
    """Each requirement, installed in a version that its bounds allow."""
    file = pathlib.Path(__file__).parents[1] / "requirements.txt"
    lines = file.read_text().splitlines() if file.exists() else None
    lines = lines or importlib.metadata.requires("tst_jax") or []
    wrong, found = [], [f"tst_jax {__version__}"]
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{wanted.name} is missing; install {line}")
            continue
        found.append(f"{wanted.name} {version}")
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name} is {version}; install {line}")
    if wrong:
        raise UserError("\n".join(wrong))
    found.insert(2, f"jaxlib {importlib.metadata.version('jaxlib')}")
    return ", ".join(found), None


def devices():
    """What jax sees; each device computes a product whose result is known."""
    for device in jax.local_devices():
        ones = jax.device_put(np.ones((64, 64), np.float32), device)
        if not (np.asarray(ones @ ones) == 64).all():
            raise UserError(f"{device}: a product of ones is not what it should be; replace it")
    found = jax.devices()
    text = f"{len(found)} {found[0].platform}, {found[0].device_kind}"
    given = [f"{name}={os.environ[name]}" for name in ("XLA_FLAGS",) if os.environ.get(name)]
    return ", ".join([text, f"{jax.process_count()} processes", *given]), None


def memory():
    """Free memory of the host, and of the devices where they tell."""
    found = []
    info = pathlib.Path("/proc/meminfo")
    if info.exists():
        lines = dict(line.split(":") for line in info.read_text().splitlines() if ":" in line)
        size = lambda name: gigabytes(int(lines[name].split()[0]) * 1024)
        found.append(f"host {size('MemAvailable')} free of {size('MemTotal')}")
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
            found.append(
                f"device {device.id} {gigabytes(free)} free of {gigabytes(stats['bytes_limit'])}"
            )
    return ", ".join(found) or "unknown here", None


def disk(folder: epath.Path):
    """Free space, and whether files can be made, where runs are written."""
    place = folder
    while not place.exists():
        place = place.parent
    if "://" in str(folder):
        return f"{place} is there", None
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"{place} cannot be written; give another --workdir")
    usage = shutil.disk_usage(place)
    return f"{gigabytes(usage.free)} free of {gigabytes(usage.total)} at {place}", None


# ---- a run


def settings(config: Config):
    config_lib.validate(config)
    stages = config_lib.stages(config)
    text = ", ".join(f"{s.phase} s={s.bag_size} steps {s.start} .. {s.stop - 1}" for s in stages)
    return text, stages


def mesh(config: Config):
    """The mesh, and the state's bytes on a device beside those that there are."""
    where = programs.layout(config)
    found, shapes, shardings = where
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    parts = sum(
        np.prod(place.shard_shape(x.shape), dtype=np.int64) * x.dtype.itemsize for x, place in pairs
    )
    sizes = ", ".join(f"{name}={size}" for name, size in found.shape.items())
    limit = (found.devices.flat[0].memory_stats() or {}).get("bytes_limit")
    if limit and parts > limit:
        raise UserError(
            f"{sizes}: the state takes {gigabytes(parts)} of {gigabytes(limit)} on each device; "
            "give mesh.fsdp more devices"
        )
    return f"{sizes}; state {gigabytes(parts)} on each device", where


def stores(config: Config):
    """Opens them, and reads every byte."""
    found = corpus.open_stores(config.data)
    data = dataclasses.replace(config.data, verify="all")
    corpus.verify(data, (0, 1), lambda text: print(f"      {text}", flush=True))
    if config.model.vocab_size < found[0].vocab_size:
        raise UserError(
            f"model.vocab_size is {config.model.vocab_size} and {found[0].path} has "
            f"{found[0].vocab_size} entries"
        )
    counts = [f"{s.path}: {len(s.tokens('train')):,} tokens, every byte verified" for s in found]
    return f"{'; '.join(counts)}; {found[0].vocabulary().describe()}", found


def workdir(folder: epath.Path, config: Config | None):
    """Whose it is, who writes it, and whether a config would go on in it."""
    workdir_lib.check_place(folder)
    saved = workdir_lib.saved_config(folder)
    if saved is None:
        return f"{folder} is new", None
    steps = Checkpoints(folder / "checkpoints").steps()
    if config:
        done = steps[-1] if steps else 0
        workdir_lib.check_changes(saved, config, frozenset(), done, folder)
    text = f"{folder}: checkpoints {', '.join(map(str, steps)) or 'none'}"
    events = workdir_lib.read_events(folder)
    if events:
        text += f"; last event {events[-1]['event']} at step {events[-1]['step']}"
    return f"{text}; {Lock(folder).describe()}", None


def checkpoint(checkpoints: Checkpoints, step: int, shapes):
    """Every byte of one, and whether its arrays are the config's."""
    if found := checkpoints.damage(step):
        raise UserError(found)
    if shapes is not None:
        checkpoints.check_fits(step, shapes)
    record = checkpoints.record(step)
    return f"every byte verified, {record['phase']} s={record['bag_size']}", None


def steps(config: Config, stages, where, found_stores):
    """Compiles all programs of the run, and trains one step of each stage from the beginning."""
    lines = []
    compiled = programs.compile_run(config, stages, *where, 0, config.steps, lines.append)
    state = compiled.init(key_data(config.seed), *_params(config, where))
    for index, stage in enumerate(stages):
        batch = _batch(config, stages, index, where[0], found_stores)
        began = time.perf_counter()
        state, metrics = compiled.steps[index](state, *batch)
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        seconds = time.perf_counter() - began
        text = f"{stage.phase} s={stage.bag_size}: loss {loss:.4f}, gradient norm {norm:.4f}"
        if not metrics["finite"]:
            raise UserError(f"{text}; not finite: see --config.debug_nans of tst_jax.train")
        lines.append(f"{text}, {seconds:.2f} s")
    return "; ".join(lines), None


def _params(config, where):
    """Random ones in place of those of `init_from`, whose files `train` looks at."""
    if not config.init_from:
        return []
    _, shapes, shardings = where
    zeros = lambda x, place: jax.device_put(np.zeros(x.shape, x.dtype), place)
    return [jax.tree.map(zeros, shapes.params, shardings.params)]


def _batch(config, stages, index, mesh, found_stores):
    stage = stages[index]
    numbers = sharding.local_rows(mesh, stage.rows)
    if found_stores:
        names, packing = corpus.names(found_stores), config.data.packing
        streams = [
            pipeline.open_stream(s, "train", packing, n) for s, n in zip(found_stores, names)
        ]
        lengths, shares = [s.length for s in streams], config.data.shares()
        shuffle, offset = config.data.shuffle, config.tst.random_offset
        order = Order(stages, lengths, shares, config.seed, shuffle, names, offset)
        parts = next(pipeline.batches(streams, order, index, stage.start, numbers))
    else:
        shape = (len(numbers), stage.row_tokens)
        rng = np.random.default_rng(0)
        parts = (rng.integers(config.model.vocab_size, size=shape, dtype=np.int32),)
        if config.data.packing == "document":
            parts += (np.ones(shape, np.int32),)
    return [sharding.assemble(mesh, numbers, part, stage.rows) for part in parts]


def small() -> Config:
    """A model of two layers in place of a config."""
    shape = dict(vocab_size=256, width=32, layers=2, heads=2, kv_heads=2, head_dim=16, ff=64)
    config = Config(steps=10, model=ModelConfig(**shape))
    config.data.store = "random tokens"
    rows = 8 * len(jax.devices())
    config.data.rows, config.eval.rows, config.data.positions = rows, rows, 64
    return config


def examine(config: Config | None, folder, report: Report) -> None:
    """All checks, in an order in which the first failure explains the others."""
    report.check("python", python)
    report.check("packages", packages)
    report.check("devices", devices)
    report.check("memory", memory)
    place = epath.Path(folder or ".")
    report.check("disk", disk, place if "://" in str(place) else place.absolute())
    found_stores, given = None, config
    if config is None:
        config = small()
    stages = report.check("config" if given else "small config", settings, config)
    if given and stages:
        found_stores = report.check("data", stores, config)
    where = report.check("mesh", mesh, config) if stages else None
    if folder:
        report.check("workdir", workdir, place, given)
        checkpoints = Checkpoints(place / "checkpoints")
        shapes = where[1] if given and where else None
        for step in checkpoints.steps():
            report.check(f"checkpoint {step}", checkpoint, checkpoints, step, shapes)
    if where and (found_stores or not given):
        report.check("steps", steps, config, stages, where, found_stores)


if __name__ == "__main__":
    import sys

    from absl import flags

    from tst_jax import cli

    CONFIG = cli.define_config()
    WORKDIR = flags.DEFINE_string(
        "workdir", None, "Folder of a run: one that there is, or a place."
    )

    def main():
        report = Report()
        programs.use_cache()
        examine(CONFIG.value and cli.read_config(CONFIG), WORKDIR.value, report)
        print(f"{report.passed} passed, {report.failed} failed")
        if report.failed:
            sys.exit(1)

    cli.run(main, __doc__)
