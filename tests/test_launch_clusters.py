"""The scripts that start a run on clusters: what they would execute, and what they do with it.

Their commands are replaced by fakes that record how they were called, and answer as a test says.
"""

import json
import shlex
import shutil
import signal
import subprocess

import pytest
from fake_commands import GKE, LOCAL, ROOT, RUN, SLURM, TPU, TRAIN, no_slice

ODD = "--config.data.store=two words, it's $HOME"


def test_gke_xpk_dry_run(machine):
    lines = machine.dry(*GKE, *RUN, "--zone=z", "--slices=2", "--retries=3", LAUNCH_PAUSE="")
    labels = "jobset.sigs.k8s.io/jobset-name=w,jobset.sigs.k8s.io/job-index=0"
    assert lines == [
        "rm -rf runs/launch/w",
        "mkdir -p runs/launch/w",
        "cp -R tst_jax configs launch requirements.txt runs/launch/w/",
        "xpk workload create --workload=w --cluster=c --zone=z --tpu-type=v5p-8 --num-slices=2 "
        "--base-docker-image=python:3.12 --script-dir=runs/launch/w --max-restarts=3 "
        "--restart-on-exit-codes=75 --termination-grace-period-seconds=300 "
        "'--command=python -m pip install --quiet -r requirements.txt '\\''jax[tpu]'\\'' gcsfs && "
        f"exec python {TRAIN} --distributed'",
        "kubectl logs --follow --tail=-1 "
        f"--selector={labels},batch.kubernetes.io/job-completion-index=0",
        "xpk workload list --wait-for-job-completion=w --timeout=60 --cluster=c --zone=z",
    ]
    there = ["gke_xpk.sh", "--cluster=c", "--workload=w"]
    assert machine.dry(*there, "--stop") == ["xpk workload delete --workload=w --cluster=c --force"]
    followed = [line.split()[:3] for line in machine.dry(*there, "--follow")]
    assert followed == [["kubectl", "logs", "--follow"], ["xpk", "workload", "list"]]


def test_slurm_dry_run(machine):
    assert machine.dry(*SLURM, *RUN, "--config.steps=7", PYTHON="/py") == [
        "export NCCL_DEBUG=WARN",
        "export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92",
        "srun --kill-on-bad-exit=0 --cpu-bind=none --export=ALL --label /py "
        f"{TRAIN} --config.steps=7 --distributed",
    ]
    assert machine.dry(*SLURM, *RUN, PYTHON="")[2].split()[5] == f"{ROOT}/.venv/bin/python"
    assert machine.dry(*SLURM, *RUN, NCCL_DEBUG="INFO")[0] == "export NCCL_DEBUG=INFO"


@pytest.mark.parametrize("script", [TPU, GKE, SLURM, LOCAL], ids=lambda script: script[0])
def test_arguments_arrive_as_they_were_given(machine, tmp_path, script):
    """Through the quotes of every shell between the user and the trainer."""
    workdir = "gs://b/a run"
    lines = machine.dry(*script, RUN[0], f"--workdir={workdir}", ODD, "--config.x=a;b\\c`d`*")
    words = next(shlex.split(line) for line in lines if "tst_jax.train" in line)
    for word in words:
        if word.startswith("--command="):  # which a shell reads again, on the machine
            (machine.folder / "python").write_text('#!/bin/bash\nprintf "%s\\n" "$@" >$OUT\n')
            (machine.folder / "python").chmod(0o755)
            (machine.folder / "bash").symlink_to(machine.folder / "python")
            subprocess.run(
                ["/bin/bash", "-c", word.removeprefix("--command=")],
                env=machine.environment(OUT=str(tmp_path / "out")),
                check=True,
            )
            words = (tmp_path / "out").read_text().splitlines()
    start = words.index("-m")
    assert words[start : start + 6] == [
        *("-m", "tst_jax.train", RUN[0], f"--workdir={workdir}", ODD),
        "--config.x=a;b\\c`d`*",
    ]
    assert words[start + 6] == "--distributed"


@pytest.mark.parametrize("script", [TPU, GKE, SLURM], ids=lambda script: script[0])
def test_a_run_executes_what_the_dry_run_printed(machine, script):
    machine.answer(no_slice())
    more = [ODD] + ["--store=gs://b/s"] * (script is not SLURM)
    printed = [shlex.split(line) for line in machine.dry(*script, *RUN, *more)]
    done = machine.run(*script, *RUN, *more)
    assert done.returncode == 0, done.stderr
    shown = [shlex.split(line[2:]) for line in done.stderr.splitlines() if line.startswith("+ ")]
    if script is SLURM:  # the shell's own commands, which no fake sees
        assert printed[:2] == shown[:2] and {words[0] for words in printed[:2]} == {"export"}
        del printed[:2], shown[:2]
    assert machine.calls() == printed == shown


@pytest.mark.parametrize("script", [TPU, GKE], ids=lambda script: script[0])
def test_stores_of_a_mixture_are_named_inside_the_copied_folder(machine, script):
    text = "\n".join(machine.dry(*script, *RUN, "--store=gs://b/s"))
    assert text.count("--config.data.store=") == 1
    named = "--config.data.store=../store/a,../store/b"
    text = "\n".join(machine.dry(*script, *RUN, "--store=gs://b/s", named))
    assert text.count("--config.data.store=") == text.count(named) == 1


def test_gke_log_is_followed_until_xpk_says_how_it_ended(machine):
    machine.answer("*kubectl*) exit 1;;\n*list*) [ $(seen list) = 3 ] || exit 124;;")
    done = machine.run(*GKE, *RUN)
    assert done.returncode == 0, done.stderr
    assert machine.steps() == ["create", *["kubectl", "list"] * 3]
    logs = [call for call in machine.calls() if call[0] == "kubectl"]
    assert "--since=0s" not in logs[0] and "--since=0s" in logs[1]  # twice LAUNCH_PAUSE
    for status, message, looks in ((125, "failed", 1), (1, "left alone", 5)):
        machine.answer(f"*list*) exit {status};;")
        done = machine.run(*GKE, *RUN)
        assert done.returncode == 1 and message in done.stderr
        assert machine.steps() == ["create", *["kubectl", "list"] * looks]
    machine.answer("*create*) exit 3;;")
    assert machine.run(*GKE, *RUN).returncode == 3
    assert machine.steps() == ["create"]


@pytest.mark.parametrize(
    "status, requeued, ends",
    [(0, False, 0), (75, True, 0), (1, False, 1), (2, False, 2), (137, False, 137)],
)
def test_slurm_job_is_requeued_only_if_it_saved(machine, status, requeued, ends):
    machine.answer(f"*srun*) exit {status};;")
    done = machine.run(*SLURM, *RUN, SLURM_JOB_ID="17", SLURM_SUBMIT_DIR=str(ROOT))
    assert done.returncode == ends
    calls = machine.calls()
    assert calls[0][0] == "srun" and calls[1:] == requeued * [["scontrol", "requeue", "17"]]


def test_slurm_job_that_was_cancelled_is_not_requeued(machine):
    machine.answer("*srun*) kill -TERM $PPID; exit 75;;")
    assert machine.run(*SLURM, *RUN, SLURM_JOB_ID="17").returncode == -signal.SIGTERM
    assert len(machine.calls()) == 1


def test_slurm_requeue_that_is_refused_fails_the_job(machine):
    machine.answer("*srun*) exit 75;;\n*requeue*) exit 1;;")
    assert machine.run(*SLURM, *RUN, SLURM_JOB_ID="17").returncode == 1


def test_slurm_script_needs_the_root_and_a_python(machine, tmp_path):
    done = machine.run(*SLURM, *RUN, SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 2 and "submit the script from there" in done.stderr
    done = machine.run(*SLURM, *RUN, PYTHON="/no/python")
    assert done.returncode == 2 and "there is no Python at /no/python" in done.stderr
    assert done.stderr.count("\n") == 1 and machine.calls() == []


def one_line(done):
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize("script", [TPU, GKE, SLURM, LOCAL], ids=lambda script: script[0])
@pytest.mark.parametrize(
    "arguments, words",
    [
        (RUN[1:], "--config is missing; give a config file"),
        (RUN[:1], "--workdir is missing"),
        ([*RUN, "--workdir="], "--workdir has no value"),
        (["--config=configs/none.py:arm", RUN[1]], "there is no file configs/none.py"),
        ([*RUN, "--wrkdir=x"], "unknown option --wrkdir; there are --config --workdir"),
        ([*RUN, "--dry_run=1"], "--dry_run takes no value"),
        ([*RUN, "steps=3"], "unexpected argument 'steps=3'"),
        ([*RUN, "--config.x=a\nb"], "several lines"),
        ([RUN[0], "--workdir=s3://b/r"], "gs://BUCKET/FOLDER"),
        ([RUN[0], "--workdir=gs://b"], "gs://BUCKET/FOLDER"),
    ],
)
def test_bad_arguments_of_all(machine, script, arguments, words):
    assert words in one_line(machine.run(*script, *arguments))
    assert machine.calls() == []


@pytest.mark.parametrize(
    "command, words",
    [
        ([TPU[0], *TPU[2:], *RUN], "--name is missing"),
        ([*TPU, *RUN, "--name=T_1"], "--name is T_1; give small letters"),
        ([*TPU[:2], TPU[3], *RUN], "--zone is missing"),
        ([*TPU[:3], *RUN], "--type is missing"),
        ([*TPU, *RUN, "--type=h100"], "v5litepod-N, v5p-N or v6e-N"),
        ([*TPU, *RUN, "--retries=many"], "--retries is many; give a number of at least 0"),
        ([*TPU, *RUN, "--spot=yes"], "--spot takes no value"),
        ([*TPU, RUN[0], "--workdir=runs/x"], "is deleted with the slice"),
        ([*TPU, *RUN, "--config=requirements.txt"], "one in configs/"),
        ([*TPU, *RUN, "--store=here"], "--store is here; give a gs://"),
        ([GKE[0], *GKE[2:], *RUN], "--cluster is missing"),
        ([*GKE[:2], GKE[3], *RUN], "--workload is missing"),
        ([*GKE[:3], *RUN], "--type is missing"),
        ([*GKE, *RUN, "--slices=0"], "--slices is 0; give a number of at least 1"),
        ([*GKE, RUN[0], "--workdir=runs/x"], "which outlives the machines"),
        ([*GKE, "--stop", "--follow"], "exclude each other"),
        ([LOCAL[0], *RUN], "give the number of processes"),
        ([LOCAL[0], "0", *RUN], "give the number of processes"),
        ([*LOCAL, *RUN, "--devices=1.5"], "--devices is 1.5; give a number of at least 1"),
    ],
)
def test_bad_arguments_of_one(machine, command, words):
    assert words in one_line(machine.run(*command))
    assert machine.calls() == []


@pytest.mark.parametrize("script", [TPU, GKE, SLURM, LOCAL], ids=lambda script: script[0])
def test_help_is_the_head_of_the_script(machine, script):
    done = machine.run(script[0], "--help")
    assert done.returncode == 0 and f"launch/{script[0]} " in done.stdout
    assert "--dry_run" in done.stdout and "#" not in done.stdout


def test_scripts_pass_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    scripts = [*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch")]
    scripts += [ROOT / "tests/run.sh", ROOT / ".ci/run"]
    done = subprocess.run(
        ["shellcheck", "-x", "-s", "bash", "-P", "SCRIPTDIR", "-P", ".", "-f", "json", *scripts],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = [f"{x['file']}:{x['line']}: {x['message']}" for x in json.loads(done.stdout)]
    assert len(scripts) > 8 and not found
