"""launch/tpu_pod.sh and what it runs on the machines: a slice made, used, lost and deleted."""

import os
import shutil
import signal
import subprocess
import tarfile

import pytest
from fake_commands import ROOT, RUN, TPU, TRAIN, no_slice, wait_until

ON = "gcloud compute tpus tpu-vm"


def test_tpu_pod_dry_run(machine):
    lines = machine.dry(*TPU, *RUN, "--spot", "--store=gs://b/s", "--project=p")
    at = "--zone=z --project=p --quiet"
    assert lines == [
        "mkdir -p runs/launch",
        "tar --create --gzip --file=runs/launch/t.tar.gz --exclude=__pycache__ "
        "tst_jax configs launch requirements.txt",
        f"{ON} describe t '--format=value(state)' {at}",
        f"{ON} create t --accelerator-type=v6e-64 --version=v2-alpha-tpuv6e --spot {at}",
        "gcloud compute tpus tpu-vm scp launch/tpu_worker.sh runs/launch/t.tar.gz t: "
        f"--worker=all {at}",
        f"{ON} ssh t --worker=all '--command=bash tpu_worker.sh install t.tar.gz "
        f"'\\''jax[tpu]'\\'' gcsfs' {at}",
        f"{ON} ssh t --worker=all '--command=bash tpu_worker.sh store gs://b/s' {at}",
        f"{ON} ssh t --worker=all '--command=bash tpu_worker.sh start {TRAIN} --distributed "
        f"--config.data.store=../store' {at}",
        f"{ON} ssh t --worker=0 '--command=bash tpu_worker.sh follow +1' {at}",
        f"{ON} ssh t --worker=all '--command=bash tpu_worker.sh status' {at}",
        f"{ON} delete t {at}",
    ]


def test_tpu_pod_keeps_the_slice_and_takes_a_local_workdir_then(machine):
    lines = machine.dry(*TPU, RUN[0], "--workdir=runs/x", "--keep")
    assert "delete" not in lines[-1] and not any("gcsfs" in line for line in lines)


@pytest.mark.parametrize(
    "kind, runtime",
    [
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-128", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_tpu_runtime_follows_from_the_type(machine, kind, runtime):
    base = ["tpu_pod.sh", "--name=t", "--zone=z", f"--type={kind}", *RUN]
    assert f"--accelerator-type={kind} --version={runtime} " in "\n".join(machine.dry(*base))
    assert "--version=mine " in "\n".join(machine.dry(*base, "--runtime=mine"))


def test_tpu_run_that_saved_is_started_again_on_the_same_slice(machine):
    machine.answer(
        no_slice(
            '*sh\\ status*) echo "exit status: 0"; '
            'echo "exit status: $(($(seen "sh status") < 3 ? 75 : 0))";;'
        )
    )
    done = machine.run(*TPU, *RUN)
    assert done.returncode == 0, done.stderr
    again = ["start", "follow", "status"]
    assert machine.steps() == ["describe", "create", "scp", "install", *again * 3, "delete"]


def test_tpu_run_is_started_again_after_a_machine_was_stopped(machine):
    """Which leaves no status; the other machines' runs fail for want of it."""
    machine.answer(
        no_slice(
            '*sh\\ status*) [ $(seen "sh status") != 1 ] || { echo "exit status: none"; '
            'echo "exit status: 134"; exit; }; echo "exit status: 0";;'
        )
    )
    assert machine.run(*TPU, *RUN).returncode == 0
    assert machine.steps().count("start") == 2 and machine.steps().count("create") == 1


def test_tpu_run_is_not_started_again_for_ever(machine):
    machine.answer(no_slice('*sh\\ status*) echo "exit status: 75";;'))
    done = machine.run(*TPU, *RUN, "--retries=2")
    assert done.returncode == 1 and "started 2 times again" in done.stderr
    assert machine.steps().count("start") == 3 and machine.steps()[-1] == "delete"


@pytest.mark.parametrize("keep", [(), ("--keep",)])
@pytest.mark.parametrize(
    "answer, last",
    [
        ('*sh\\ status*) echo "exit status: 0"; echo "exit status: 1";;', "status"),
        ('*sh\\ status*) echo "exit status: 75"; echo "exit status: 137";;', "status"),
        ("*install*) exit 1;;", "describe"),
        ("*scp*) exit 1;;", "describe"),
        ("*vm\\ create*) exit 1;;", "describe"),
    ],
)
def test_tpu_failure_ends_with_the_slice_deleted(machine, answer, last, keep):
    machine.answer(no_slice(answer))
    done = machine.run(*TPU, *RUN, *keep)
    assert done.returncode == 1 and done.stderr.count("error: ") == 1, done.stderr
    steps = machine.steps()
    assert steps.count("start") == (last == "status")
    assert steps[-2:] == [last, "delete"] if not keep else steps[-1] == last


def test_tpu_slice_that_was_taken_away_is_made_anew(machine):
    machine.answer(
        no_slice(
            "*follow*) [ $(seen follow) = 2 ] || exit 255;;",
            "*describe*) [ $(seen describe) = 1 ] || { echo PREEMPTED; exit; }; "
            "echo NOT_FOUND; exit 1;;",
        )
    )
    done = machine.run(*TPU, *RUN, "--spot")
    assert done.returncode == 0, done.stderr
    made = ["create", "scp", "install", "start", "follow"]
    assert machine.steps() == [
        *("describe", *made, "describe"),
        *("describe", "delete", *made, "status", "delete"),
    ]


def test_tpu_waits_for_room_after_a_slice_was_taken_away(machine):
    machine.answer(
        no_slice(
            "*follow*) [ $(seen follow) = 2 ] || exit 255;;",
            "*vm\\ create*) [ $(seen vm.create) != 2 ] || exit 1;;",
        )
    )
    done = machine.run(*TPU, *RUN)
    assert done.returncode == 0, done.stderr
    assert machine.steps().count("create") == 3 and machine.steps().count("start") == 2
    assert ["sleep", "0"] in machine.calls()  # 20 times LAUNCH_PAUSE
    machine.answer(no_slice("*follow*) exit 255;;", "*vm\\ create*) [ $(seen vm.create) = 1 ];;"))
    done = machine.run(*TPU, *RUN, "--retries=3")
    assert done.returncode == 1 and machine.steps().count("create") == 4


def test_tpu_slice_that_cannot_be_deleted_is_an_error(machine):
    machine.answer(no_slice("*delete*) exit 1;;"))
    done = machine.run(*TPU, *RUN)
    assert done.returncode == 1 and "may still be there, and cost" in done.stderr


def test_tpu_lost_connection_is_followed_again(machine):
    """The training goes on meanwhile: nothing is started or deleted."""
    machine.answer(
        no_slice(
            "*follow*) [ $(seen follow) = 3 ] || exit 255;;",
            "*describe*) [ $(seen describe) != 1 ] || { echo NOT_FOUND; exit 1; }; echo READY;;",
        )
    )
    assert machine.run(*TPU, *RUN).returncode == 0
    assert machine.steps()[4:-1] == [
        *("start", "follow", "describe", "follow", "describe", "follow", "status")
    ]
    machine.answer(
        '*follow*) exit 255;;\n*describe*) echo "ERROR: no network" >&2; '
        "[ $(seen describe) != 1 ] || echo NOT_FOUND; exit 1;;"
    )
    done = machine.run(*TPU, *RUN, "--retries=2")
    assert done.returncode == 1 and "left alone" in done.stderr
    assert machine.steps().count("follow") == 3 and "delete" not in machine.steps()


def test_tpu_slice_that_is_there_is_used(machine):
    machine.answer(no_slice("*describe*) echo READY;;"))
    assert machine.run(*TPU, *RUN).returncode == 0
    assert machine.steps()[:3] == ["describe", "scp", "install"]
    machine.answer(no_slice("*describe*) echo CREATING;;"))
    done = machine.run(*TPU, *RUN)
    assert done.returncode == 1 and "is CREATING" in done.stderr
    assert machine.steps() == ["describe"]  # what another made is not deleted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_tpu_script_that_is_interrupted_leaves_the_training_alone(machine, number):
    machine.answer(no_slice("*follow*) while [ ! -f $here/go ]; do /bin/sleep 0.05; done;;"))
    script = subprocess.Popen(
        ["bash", str(ROOT / "launch" / TPU[0]), *TPU[1:], *RUN],
        env=machine.environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell cannot trap what was ignored when it began, as nohup has it for all these tests.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    wait_until(lambda: "follow" in machine.steps())
    script.send_signal(number)
    (machine.folder / "go").touch()
    assert "left alone" in script.communicate(timeout=20)[1]
    assert script.returncode == 130 and "delete" not in machine.steps()


@pytest.fixture
def worker(tmp_path):
    """A machine of a slice: tpu_worker.sh with its own home, and a Python that is none."""
    home = tmp_path / "home"
    (home / "tst_jax" / "venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "launch/tpu_worker.sh", home)
    with tarfile.open(home / "t.tar.gz", "w:gz") as archive:
        archive.add(ROOT / "requirements.txt", "requirements.txt")
    tools = tmp_path / "tools"
    tools.mkdir()
    for path, body in (
        (tools / "python3", 'echo "$@" >>~/installed'),
        (home / "tst_jax/venv/bin/python", "echo started $PWD $*; source ~/program"),
    ):
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def step(*arguments):
        return subprocess.run(
            ["bash", str(home / "tpu_worker.sh"), *arguments],
            env=os.environ | {"HOME": str(home), "PATH": f"{tools}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=30,
        )

    step.home = home
    return step


def test_tpu_worker(worker):
    home = worker.home
    done = worker("install", "t.tar.gz", "jax[tpu]", "gcsfs")
    assert done.returncode == 0, done.stderr
    assert (home / "tst_jax/source/requirements.txt").is_file()
    assert "requirements.txt jax[tpu] gcsfs" in (home / "installed").read_text().splitlines()[-1]
    assert worker("status").stdout == "exit status: none\n"

    (home / "program").write_text("until [ -f ~/go ]; do sleep 0.05; done; echo ended; exit 75\n")
    assert worker("start", "-m", "tst_jax.train", "--config.x=a b").returncode == 0
    assert "followed again" in worker("start", "-m", "tst_jax.train").stdout
    assert "goes on" in worker("install", "t.tar.gz").stdout  # and its code stays
    process = int((home / "tst_jax/pid").read_text())
    assert os.getsid(process) == process  # the end of this connection does not reach it
    (home / "go").touch()
    log = f"started {home}/tst_jax/source -m tst_jax.train --config.x=a b\nended\n"
    assert worker("follow", "+1").stdout == log
    assert worker("status").stdout == "exit status: 75\n"

    (home / "program").write_text("exit 0\n")
    worker("start", "-m", "tst_jax.train")
    assert worker("status").stdout == "exit status: 0\n"
    assert "ended" not in worker("follow", "+1").stdout  # the log is this start's
    assert "ended" in next((home / "tst_jax").glob("log.*")).read_text()  # and that one is kept

    (home / "program").write_text("kill -KILL $PPID $$\n")  # as if the machine had been stopped
    worker("start", "-m", "tst_jax.train")
    assert worker("status").stdout == "exit status: none\n"
    assert worker("what").returncode == 2
