"""A run that is killed at any moment, and started again, ends in the bits of one that was not.

`python tests/test_kills.py 30` does it 30 times; the tests do it once for each kind of moment.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import jax
import pytest
from small_run import SWITCH, environment, write_config

from tst_jax import metrics
from tst_jax.checkpoint import Checkpoints

STEPS, EVERY = 120, 4
TIMES = ("step_seconds", "data_wait_seconds", "positions_per_second", "tokens_per_second")
MOMENTS = ("step", "save", "removal", "switch", "evaluation", "start")


def start(config, workdir, **more):
    """The command, with its output in a file beside the workdir."""
    command = [sys.executable, "-m", "tst_jax.train", f"--config={config}", f"--workdir={workdir}"]
    output = open(workdir.with_suffix(".log"), "a")
    return subprocess.Popen(
        command, env=environment(**more), stdout=output, stderr=subprocess.STDOUT, text=True
    )


def finish(config, workdir):
    process = start(config, workdir)
    assert process.wait(120) == 0, workdir.with_suffix(".log").read_text()


def result(workdir):
    """({name: bits} of the last checkpoint, the lines of metrics.jsonl without times)."""
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.newest()
        assert step == STEPS
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shapes = {}
        for name, text in checkpoints.record(step)["arrays"].items():
            dtype, shape = text.removesuffix("]").split("[")
            sizes = [int(n) for n in shape.split(",") if n]
            shapes[name] = jax.ShapeDtypeStruct(sizes, dtype, sharding=here)
        state = checkpoints._load(step, shapes, partial=False)
    lines = [
        {k: v for k, v in line.items() if k not in TIMES} for line in metrics.read_metrics(workdir)
    ]
    return {name: jax.device_get(x).tobytes() for name, x in state.items()}, lines


def last_lines(workdir) -> list[dict]:
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = []
    for line in text.splitlines()[-3:]:
        try:
            found.append(json.loads(line))
        except ValueError:  # half a line
            pass
    return found


def reached(moment, workdir, log, rng) -> bool:
    """Whether the run is at such a moment now."""
    folder = workdir / "checkpoints"
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    lines = last_lines(workdir)
    if moment == "start":
        return "compiled in" in log and not lines and rng.random() < 0.3
    if moment == "save":
        return any(".partial" in name for name in names) and rng.random() < 0.3
    if moment == "removal":
        return any(".expired" in name for name in names)
    if moment == "switch":
        return bool(lines) and SWITCH <= lines[-1]["step"] <= SWITCH + 1
    if moment == "evaluation":
        due = lines and lines[-1]["step"] % 5 == 0 and "loss" in lines[-1]
        return bool(due) and rng.random() < 0.3
    return bool(lines) and rng.random() < 0.02


def kill(process, moment, workdir, rng, number=signal.SIGKILL) -> bool:
    """Signals the process at such a moment; False if it ended before."""
    log = workdir.with_suffix(".log")
    while process.poll() is None:
        if reached(moment, workdir, log.read_text(), rng):
            process.send_signal(number)
            process.wait()
            return process.returncode != 0
        time.sleep(0.0005)
    assert process.returncode == 0, log.read_text()
    return False


def kill_and_go_on(config, workdir, moments, seed, whole):
    """Kills one run at each of the moments in turn, ends it, and compares."""
    rng, hits = random.Random(seed), []
    for moment in moments:
        hits.append(kill(start(config, workdir), moment, workdir, rng))
    finish(config, workdir)
    arrays, lines = result(workdir)
    assert arrays == whole[0], f"{workdir}: other bits after kills at {moments}"
    assert lines == whole[1], f"{workdir}: other lines after kills at {moments}"
    return hits


def prepare(folder, store):
    """(config file, result of the run that nobody kills)."""
    config = write_config(folder / "config.py", store, STEPS, save_every=EVERY)
    config.write_text(config.read_text().replace("keep=100", "keep=2"))
    finish(config, folder / "whole")
    return config, result(folder / "whole")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, store):
    return prepare(tmp_path_factory.mktemp("kills"), store)


def test_killed_at_each_kind_of_moment(whole, tmp_path):
    """In a step, a save, a removal, the switch, an evaluation: one run, killed again and again."""
    config, expected = whole
    moments = ("switch", "save", "evaluation", "step", "removal")
    hits = kill_and_go_on(config, tmp_path / "run", moments, 5, expected)
    assert sum(hits) >= 2  # the others came after the end


if __name__ == "__main__":
    times, found, began = int(sys.argv[1]), [], time.time()
    with tempfile.TemporaryDirectory() as name:
        base = pathlib.Path(name)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", name + "/compiled")
        import conftest

        class Factory:
            def mktemp(self, part):
                (base / part).mkdir()
                return base / part

        made = conftest.store.__wrapped__(Factory())
        setup = prepare(base, made)
        draw = random.Random(time.time_ns())
        while len(found) < times:
            moment = MOMENTS[len(found) % len(MOMENTS)]
            number = draw.getrandbits(32)
            run = base / f"run-{moment}-{number}"
            (hit,) = kill_and_go_on(setup[0], run, [moment], number, setup[1])
            if hit:
                found.append(moment)
                print(f"{len(found)}: killed in {moment}, same bits", flush=True)
    seconds = time.time() - began
    print(f"{len(found)} of {times} kills resumed to the same bits, {seconds:.0f} s")
