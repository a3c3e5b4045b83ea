"""Checkpoints on disks that fill up, and of processes that are killed while they save."""

import os
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from small_run import environment

from tst_jax.checkpoint import Checkpoints

FILLS = """
    import sys, jax, jax.numpy as jnp
    from tst_jax.checkpoint import Checkpoints, CheckpointError
    checkpoints = Checkpoints(sys.argv[1], keep=9)
    checkpoints._check_space = lambda *_: None  # what was free a moment ago
    for step in range(1, 60):
        try:
            checkpoints.save(step, {"x": jax.random.normal(jax.random.key(step), (400_000,))}, {})
            checkpoints.wait()
        except CheckpointError as error:
            print(step, str(error))
            break
"""


def test_a_disk_that_fills_up(tmp_path):
    """A real one, of 8 MB: the run ends in a line, and what was saved before is whole."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, and a system where it may mount")
    try:
        command = [sys.executable, "-c", textwrap.dedent(FILLS), str(disk / "checkpoints")]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        step, line = done.stdout.strip().split(" ", 1)
        step = int(step)
        assert step > 2 and f"step {step} was not written: the disk is full; {step - 1} is" in line
        assert "\n" not in line
        with Checkpoints(disk / "checkpoints", read_only=True) as checkpoints:
            assert checkpoints.steps() == list(range(1, step))
            assert checkpoints.newest() == step - 1
            assert not any(checkpoints.damage(i) for i in checkpoints.steps())
        assert len(list((disk / "checkpoints").iterdir())) == step - 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_size_limit(tmp_path):
    """The same without root: files may not grow beyond what the process is allowed."""
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    limited += textwrap.dedent(FILLS)
    command = [sys.executable, "-c", limited, str(tmp_path / "checkpoints")]
    done = subprocess.run(
        command,
        env=environment(JAX_ENABLE_COMPILATION_CACHE="false"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 the checkpoint of step 1 was not written: ")
    assert "there is no checkpoint yet" in done.stdout and len(done.stdout.splitlines()) == 1
    assert list((tmp_path / "checkpoints").iterdir()) == []


SAVES = """
    import sys, jax
    from tst_jax.checkpoint import Checkpoints
    checkpoints = Checkpoints(sys.argv[1], keep=2)
    checkpoints.clean()
    first = (checkpoints.good() or 0) + 1
    print("ready", first, flush=True)
    for step in range(first, 10_000):
        checkpoints.save(step, {"x": jax.random.normal(jax.random.key(step), (50_000,))}, {})
        checkpoints.wait()
        print(step, flush=True)
"""


def test_killed_while_it_saves_and_removes(tmp_path):
    """SIGKILL at random moments: each checkpoint that was reported is there and good, and the next
    process removes what the killed one had begun."""
    folder, rng, last = tmp_path / "checkpoints", np.random.default_rng(3), 0
    leftovers = 0
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVES), str(folder)],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        first = int(process.stdout.readline().split()[1])
        assert first - 1 >= last
        reported = [int(process.stdout.readline())]
        time.sleep(0.1 + rng.random() / 4)
        unfinished = lambda: any(not p.name.isdecimal() for p in folder.iterdir())
        while process.poll() is None and not (folder.is_dir() and unfinished()):
            time.sleep(0.0005)
        process.kill()
        reported += [int(line) for line in process.stdout.read().split()]
        process.wait()
        last = reported[-1]
        names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
        leftovers += sum(not name.isdecimal() for name in names)
        with Checkpoints(folder) as checkpoints:
            assert (checkpoints.good() or 0) >= last
            assert not any(checkpoints.damage(step) for step in checkpoints.steps())
    assert leftovers  # a kill may come a moment too late, but not each
    with Checkpoints(folder) as checkpoints:
        checkpoints.clean()
        assert len(checkpoints.steps()) in (2, 3)
        assert all(p.name.isdecimal() for p in folder.iterdir())
