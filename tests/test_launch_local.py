"""launch/local_cluster.sh: several processes as one command."""

import os
import pathlib
import signal
import subprocess
import time

import pytest
from fake_commands import LOCAL, ROOT, RUN, TRAIN, wait_until


def test_local_cluster_dry_run(machine):
    lines = machine.dry(*LOCAL, *RUN, "--devices=3", "--port=7000", PYTHON="/py")
    assert lines == [
        "env JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=3 JAX_COORDINATOR_ADDRESS=127.0.0.1:7000 "
        f"JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={number} /py {TRAIN} --distributed"
        for number in (0, 1)
    ]
    changed = machine.dry(*LOCAL, *RUN, "--allow_changes=steps,seed", PYTHON="/py")
    assert all(
        line.endswith(f"{TRAIN} --distributed --allow_changes=steps,seed") for line in changed
    )


@pytest.fixture
def local(machine, tmp_path):
    """local_cluster.sh with a Python that is a bash script; its own number is $me."""

    def start(program, *arguments):
        python = tmp_path / "python"
        python.write_text(
            f'#!/bin/bash\nme=$JAX_PROCESS_ID; echo $$ >"{tmp_path}/pid$me"\n{program}\n'
        )
        python.chmod(0o755)
        return subprocess.Popen(
            ["bash", str(ROOT / "launch/local_cluster.sh"), *arguments, *RUN],
            env=machine.environment(PYTHON=str(python), PATH=os.environ["PATH"]),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A shell cannot trap what was ignored when it began, as for a job in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    start.numbers = lambda: [int(p.read_text() or 0) for p in sorted(tmp_path.glob("pid*"))]
    return start


@pytest.mark.parametrize(
    "program, ends",
    [
        ("exit 0", 0),
        ("exit $((me == 1 ? 75 : 0))", 75),
        ("exit 75", 75),
        ("exit $((me == 0 ? 75 : 3))", 3),
        ("[ $me = 2 ] || sleep 1; exit $((4 + me))", 6),  # the first to fail says why
        ("[ $me = 1 ] && kill -KILL $$; sleep 1; exit 1", 137),
    ],
)
def test_local_cluster_status(local, program, ends):
    script = local(program, "3")
    script.communicate(timeout=20)
    assert script.returncode == ends and len(local.numbers()) == 3


def test_local_cluster_waits_for_those_that_end_by_themselves(local):
    script = local("[ $me = 1 ] && exit 9; sleep 1.5; echo late", "2")
    out, _ = script.communicate(timeout=20)
    assert script.returncode == 9 and out == "late\n"


def test_local_cluster_marks_lines_of_all_but_the_first(local):
    script = local('echo "out $me $1 $JAX_NUM_CPU_DEVICES"; echo "err $me" >&2', "3", "--devices=2")
    out, err = script.communicate(timeout=20)
    assert out == "out 0 -m 2\n"
    lines = [line for line in err.splitlines() if not line.startswith("+ ")]
    assert sorted(lines) == [
        *("[1] err 1", "[1] out 1 -m 2", "[2] err 2", "[2] out 2 -m 2", "err 0"),
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_local_cluster_passes_signals_on(local, number):
    program = "trap 'echo saved; exit 75' TERM; echo ready; while true; do sleep 0.05; done"
    script = local(program, "2")
    assert script.stdout.readline() == "ready\n"
    wait_until(lambda: len([number for number in local.numbers() if number]) == 2)
    time.sleep(0.2)  # the second has set its trap
    script.send_signal(number)
    out, err = script.communicate(timeout=20)
    assert script.returncode == 75 and out == "saved\n" and "[1] saved" in err
    for process in local.numbers():
        assert not pathlib.Path(f"/proc/{process}").exists()
