"""Proves `tst_jax.hosts`: several processes on this machine train what one process trains.

Four processes start a run, and its losses are those of one process with four devices; each reads
only its rows; their checkpoints go on on 1, 2 and 8 devices. Two processes agree on the step after
which SIGTERM to one of them ends both, and end when one is killed or falls silent.
`launch/local_cluster.sh` starts them, or this file as a program, which also notes what it reads.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from small_run import ROOT, SWITCH, environment, write_config

from tst_jax import config as config_lib
from tst_jax import hosts, metrics, programs
from tst_jax.checkpoint import Checkpoints, named_leaves
from tst_jax.config import ConfigError
from tst_jax.data import pipeline
from tst_jax.errors import Preempted, UserError
from tst_jax.train import train

STEPS = 20
ROUNDING = 2e-6


def alone(config, workdir, devices, *arguments):
    """The command of a user with one process."""
    command = [sys.executable, "-m", "tst_jax.train", f"--config={config}", f"--workdir={workdir}"]
    done = subprocess.run(
        [*command, *arguments], env=environment(devices), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def cluster():
    """A function that starts launch/local_cluster.sh with two processes; none outlives the test."""
    started = []

    def start(config, workdir, *arguments):
        started.append(
            subprocess.Popen(
                ["bash", str(ROOT / "launch/local_cluster.sh"), "2", f"--config={config}"]
                + [f"--workdir={workdir}", *arguments],
                env=environment(1),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for script in started:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


def losses(workdir):
    """[(step, loss or held-out loss)]"""
    return [
        (line["step"], line.get("loss", line.get("eval_loss")))
        for line in metrics.read_metrics(workdir)
    ]


def same_losses(found, wanted):
    assert [step for step, _ in found] == [step for step, _ in wanted]
    np.testing.assert_allclose([x for _, x in found], [x for _, x in wanted], rtol=ROUNDING)


# ---- one of four processes: trains, and prints which rows it read


def main(config, workdir):
    config = programs_config(config)
    hosts.initialize(config.hosts)
    number = jax.process_index()

    def wrong_in_the_third():
        if number == 2:
            raise ConfigError("no such store")

    try:
        hosts.together(wrong_in_the_third)
        caught = None
    except UserError as error:
        caught = f"{type(error).__name__}: {error}"
    read, get = {}, pipeline.StageBatches.__getitem__

    def spy(batches, step):
        rows = [[step, row] for row in batches.numbers.tolist()]
        read.setdefault(batches.stage_index, []).extend(rows)
        return get(batches, step)

    pipeline.StageBatches.__getitem__ = spy
    train(config, workdir)
    agreed = hosts.agreed(100 + number)
    report = {"number": number, "caught": caught, "read": read, "agreed": agreed}
    pathlib.Path(f"{workdir}.{number}.json").write_text(json.dumps(report))


def programs_config(path):
    from tst_jax.config_file import load_config

    return load_config(path)


# ---- what they did


@pytest.fixture(scope="module")
def folder(tmp_path_factory, store):
    path = tmp_path_factory.mktemp("hosts")
    for name, fsdp, steps in ("short", 2, STEPS), ("whole", 1, STEPS), ("long", 2, 100_000):
        write_config(path / f"{name}.py", store, steps, fsdp)
    return path


@pytest.fixture(scope="module")
def one(folder):
    """A run of one process with four devices."""
    alone(folder / "short.py", folder / "one", 4)
    return folder / "one"


@pytest.fixture(scope="module")
def four(folder):
    """The same run of four processes, and what each reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "4"}
    command = [sys.executable, "-B", __file__, str(folder / "short.py"), str(folder / "four")]
    running = [
        subprocess.Popen(command, env=environment(1, **shared, JAX_PROCESS_ID=str(number)))
        for number in range(4)
    ]
    assert [process.wait() for process in running] == [0] * 4
    reports = [json.loads((folder / f"four.{number}.json").read_text()) for number in range(4)]
    return folder / "four", reports


def test_four_processes_train_what_one_trains(one, four):
    found = losses(four[0])
    assert len(found) == STEPS + 5
    same_losses(found, losses(one))


def test_each_process_reads_only_its_rows(four):
    for report in four[1]:
        number = report["number"]
        mine = [2 * number, 2 * number + 1]
        for stage, steps in ("0", SWITCH), ("1", STEPS - SWITCH):
            assert report["read"][stage] == [[step, row] for step in range(steps) for row in mine]


def test_what_one_process_finds_wrong_ends_all(four):
    for report in four[1]:
        third = report["number"] == 2
        assert report["caught"] == (
            "ConfigError: no such store"
            if third
            else "UserError: process 2: ConfigError: no such store"
        )
        assert report["agreed"] == 100


@pytest.mark.parametrize("devices, step", [(1, 4), (8, 4), (2, 12)])
def test_checkpoints_of_four_processes_go_on_anywhere(folder, four, one, devices, step):
    """On another number of devices, laid out otherwise, before and after the switch."""
    run = folder / f"on {devices}"
    shutil.copytree(four[0], run)
    for path in (run / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    config = folder / ("whole.py" if devices == 1 else "short.py")
    assert f"resuming at step {step}" in alone(config, run, devices)
    same_losses(losses(run), losses(one))


def test_they_are_restored_to_the_bit(four, one, folder):
    """Each array as it was saved, whatever the layout; here on one device."""
    config = programs_config(folder / "whole.py")
    _, shapes, shardings = programs.layout(config)
    states = []
    for workdir in four[0], one:
        with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
            assert checkpoints.steps() == [4, 8, 12, 16, 20]
            states.append(named_leaves(checkpoints.restore(12, shapes, shardings)))
            read = checkpoints.reader(12, shapes)
            for name, array in states[-1].items():
                np.testing.assert_array_equal(read(name), array)
    for name, array in states[0].items():
        np.testing.assert_allclose(array, states[1][name], atol=2e-5)


def wait_until(there, workdir, running):
    """Until `there()`; returns the ids of the run's two processes, first one first."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and running.poll() is None and not there():
        time.sleep(0.05)
    assert running.poll() is None, running.stdout.read()
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command = (path / "cmdline").read_text()
            numbers = [
                text.split("=")[1]
                for text in (path / "environ").read_text().split("\0")
                if text.startswith("JAX_PROCESS_ID=")
            ]
        except (OSError, UnicodeDecodeError):
            continue
        if f"--workdir={workdir}\0" in command and "tst_jax.train" in command and numbers:
            found[int(numbers[0])] = int(path.name)
    assert len(found) == 2
    return [found[0], found[1]]


def wait_for_steps(workdir, running, least):
    """Until the run has logged so many steps."""
    file = workdir / "metrics.jsonl"
    return wait_until(lambda: file.exists() and len(losses(workdir)) > least, workdir, running)


def test_sigterm_to_one_process_saves_in_all_and_the_run_goes_on(folder, cluster):
    """It evaluates nearly all the time here, and an evaluation is broken off and done later."""
    run, often = folder / "preempted", ["--config.eval.every=1", "--config.eval.tokens=1024"]
    running = cluster(folder / "long.py", run, *often)
    os.kill(wait_for_steps(run, running, 8)[1], signal.SIGTERM)
    told = running.communicate(timeout=60)[0]
    assert running.returncode == Preempted.STATUS, told
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        saved = checkpoints.steps()[-1]
    assert losses(run)[-1][0] == saved and f"saved at step {saved}" in told
    running = cluster(folder / "long.py", run, f"--config.stop_after={saved + 3}", *often)
    told = running.communicate(timeout=240)[0]
    assert running.returncode == 0 and f"resuming at step {saved}" in told, told
    steps = [line["step"] for line in metrics.read_metrics(run) if "loss" in line]
    assert steps == list(range(1, saved + 4))
    evaluated = [line["step"] for line in metrics.read_metrics(run) if "eval_loss" in line]
    assert evaluated == steps


def test_sigterm_to_one_process_while_all_compile(folder, cluster):
    """There is nothing to save yet, and all end so that they are started again."""
    run = folder / "compiling"
    running = cluster(folder / "long.py", run)
    os.kill(wait_until((run / "events.jsonl").exists, run, running)[1], signal.SIGTERM)
    told = running.communicate(timeout=60)[0]
    assert running.returncode == Preempted.STATUS, told
    assert "told to end, with nothing new to save" in told
    assert sorted(p.name for p in run.iterdir()) == ["config.json", "events.jsonl"]


HEARTBEAT = 10


def test_a_killed_process_ends_the_others(folder, cluster):
    """Also where it is the first, which all others report to."""
    run = folder / "killed"
    running = cluster(folder / "long.py", run, f"--config.hosts.heartbeat_seconds={HEARTBEAT}")
    saved = (run / "checkpoints/4").exists  # saves go on in the background
    os.kill(wait_until(saved, run, running)[0], signal.SIGKILL)
    began = time.monotonic()
    running.communicate(timeout=90)
    assert time.monotonic() - began < HEARTBEAT + 20
    assert running.returncode not in (0, Preempted.STATUS)
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps()[-1] >= 4


def test_a_silent_process_ends_the_others(folder, cluster):
    """A machine that is gone closes no connection; only its heartbeats are missing."""
    run = folder / "silent"
    running = cluster(folder / "long.py", run, f"--config.hosts.heartbeat_seconds={HEARTBEAT}")
    first, second = wait_for_steps(run, running, 6)
    os.kill(second, signal.SIGSTOP)
    began = time.monotonic()
    try:
        while pathlib.Path(f"/proc/{first}").exists() and time.monotonic() - began < 90:
            time.sleep(0.2)
        seconds = time.monotonic() - began
    finally:
        os.kill(second, signal.SIGCONT)  # which finds that it is too late
    running.communicate(timeout=90)
    assert HEARTBEAT / 2 < seconds < 2 * HEARTBEAT + 20
    assert running.returncode not in (0, Preempted.STATUS)


# ---- one process


def test_sigterm_to_a_run_of_one_process(folder):
    run = folder / "single"
    command = [sys.executable, "-m", "tst_jax.train", f"--config={folder}/long.py"]
    running = subprocess.Popen(
        [*command, f"--workdir={run}"],
        env=environment(2),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while len(losses(run)) < 6 and running.poll() is None:
        time.sleep(0.1)
    running.terminate()
    told = running.communicate(timeout=60)[0]
    assert running.returncode == Preempted.STATUS, told
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        assert losses(run)[-1][0] == checkpoints.steps()[-1]


def test_copies_that_do_not_know_of_each_other_are_refused(folder):
    command = [sys.executable, "-m", "tst_jax.train", f"--config={folder}/short.py"]
    for name in "JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS":
        done = subprocess.run(
            [*command, f"--workdir={folder}/copies"],
            env=environment(1, **{name: "2"}),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert f"{name} is 2 and --distributed is off" in done.stderr
    assert not (folder / "copies").exists()


def test_distributed_without_others_is_refused(folder):
    command = [sys.executable, "-m", "tst_jax.train", f"--config={folder}/short.py"]
    done = subprocess.run(
        [*command, f"--workdir={folder}/nobody", "--distributed"],
        env=environment(1),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "JAX_COORDINATOR_ADDRESS" in done.stderr
    found = config_lib.problems(config_lib.Config(hosts=hosts.HostsConfig(heartbeat_seconds=0)))
    assert any("hosts.heartbeat_seconds is 0" in line for line in found)


if __name__ == "__main__":
    main(*sys.argv[1:])
