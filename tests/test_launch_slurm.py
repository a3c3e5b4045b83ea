"""launch/slurm_b200.sbatch under a Slurm of its own: two tasks on this machine's CPU.

A job that is told to end saves, goes back into the queue, and ends with the numbers of a run that
was left in peace.
"""

import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from small_run import ROOT, environment, write_config

from tst_jax.metrics import read_metrics

DAEMONS = ("munged", "slurmctld", "slurmd")
STEPS = 300
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={second_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
KillWait=5
ReturnToService=2
FirstJobId={job}
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing():
    """Why there can be no Slurm here, or None."""
    for name in (*DAEMONS, "sbatch", "srun", "scontrol", "scancel"):
        if not shutil.which(name):
            return f"{name} is not installed"
    if os.geteuid():
        return "Slurm's daemons are started as root only"
    try:
        socket.gethostbyname(host())
    except OSError:
        return f"this machine's name {host()} has no address"
    return None


def host():
    return socket.gethostname().split(".")[0]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Slurm:
    """Daemons of this test's own; all that they start knows the folder from its environment."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, []
        self.environment = environment(SLURM_CONF=f"{folder}/slurm.conf")

    def begin(self):
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "key").write_bytes(random.randbytes(128))
        (folder / "key").chmod(0o600)
        (folder / "slurm.conf").write_text(
            CONF.format(
                host=host(),
                folder=folder,
                port=free_port(),
                second_port=free_port(),
                job=random.randrange(1, 4096),  # jax makes the coordinator's port of it
            )
        )
        munge = {
            "key-file": "key",
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "seed",
        }
        self.start(
            *("munged", "--foreground", "--force", "--num-threads=2"),
            *(f"--{option}={folder}/{name}" for option, name in munge.items()),
        )
        wait_until(lambda: (folder / "munge.socket").exists(), "munged listens")
        self.start("slurmctld", "-D", "-c")
        self.start("slurmd", "-D", "-c")
        wait_until(lambda: " idle" in self.call("sinfo", "-h", "-o", "x %T"), "the node is idle")

    def start(self, *command):
        log = open(self.folder / f"{command[0]}.out", "w")
        self.daemons.append(
            subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd="/")
        )

    def call(self, *command):
        done = subprocess.run(
            command, env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    def submit(self, output, *arguments):
        """The script on two tasks without GPUs; the job's number."""
        return self.call(
            *("sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0"),
            *(f"--output={output}", "launch/slurm_b200.sbatch", *arguments),
        ).strip()

    def job(self, number):
        """What Slurm knows of it."""
        words = self.call("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, number):
        return self.job(number).get("JobState")

    def processes(self):
        """All processes with this cluster's settings."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{self.folder}/slurm.conf".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                pass  # it has ended
        return found

    def stop(self):
        try:
            self.call("scancel", "--user=root")
            wait_until(lambda: not self.call("squeue", "-h", "-t", "R,CG").strip(), "all jobs end")
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
                try:
                    daemon.wait(20)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        wait_until(lambda: not self.processes(), "no process is left")


def wait_until(condition, what, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not in {seconds} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.begin()
    except (AssertionError, OSError) as error:
        cluster.stop()
        logs = "; ".join(path.read_text()[-200:] for path in cluster.folder.glob("*.out"))
        pytest.skip(f"Slurm does not start on this machine, {error}: {logs}")
    yield cluster
    cluster.stop()


@pytest.fixture
def config_file(tmp_path, store):
    return write_config(tmp_path / "small.py", store, STEPS, save_every=0)


def losses(workdir):
    return {line["step"]: line["loss"] for line in read_metrics(workdir) if "loss" in line}


def test_job_that_is_told_to_end_is_requeued_and_finishes(slurm, config_file, tmp_path):
    workdir, output = tmp_path / "run", tmp_path / "output"
    number = slurm.submit(output, f"--config={config_file}", f"--workdir={workdir}")
    assert number.isdigit(), number
    said = lambda: output.read_text() if output.exists() else ""

    wait_until(lambda: said().count("step 1/") or slurm.state(number) == "FAILED", said(), 240)
    slurm.call("scancel", "--signal=TERM", number)
    wait_until(lambda: slurm.state(number) == "PENDING", "it is in the queue again", 90)
    assert slurm.job(number)["Restarts"] == "1"
    stopped = max(losses(workdir))
    assert 1 <= stopped < STEPS
    assert said().count(f"told to end, saved at step {stopped};") == 2  # both processes

    # Slurm lets a job wait for two minutes after it was requeued, until what it had signed for the
    # start before is void; seconds are enough.
    slurm.call("scontrol", "update", f"JobId={number}", "StartTime=now+5")
    wait_until(lambda: slurm.state(number) in ("COMPLETED", "FAILED"), "the job ends", 240)
    assert slurm.state(number) == "COMPLETED", said()
    assert f"resuming at step {stopped}" in said()
    assert not slurm.call("squeue", "-h").strip()  # and is not in the queue again

    alone = tmp_path / "alone"
    subprocess.run(
        [sys.executable, "-m", "tst_jax.train", f"--config={config_file}", f"--workdir={alone}"],
        env=slurm.environment | {"JAX_NUM_CPU_DEVICES": "2"},  # as many as both had
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    found, expected = losses(workdir), losses(alone)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(
        [found[step] for step in sorted(found)],
        [expected[step] for step in sorted(expected)],
        rtol=2e-6,
    )


def test_job_that_fails_is_not_requeued(slurm, config_file, tmp_path):
    output = tmp_path / "output"
    run = [f"--config={config_file}", f"--workdir={tmp_path / 'run'}"]
    number = slurm.submit(output, *run, "--config.steps=0")
    wait_until(lambda: slurm.state(number) == "FAILED", "the job fails", 120)
    assert slurm.job(number)["ExitCode"] == "2:0" and slurm.job(number)["Restarts"] == "0"
    assert "steps is 0" in output.read_text()


def test_job_that_is_cancelled_does_not_come_back(slurm, config_file, tmp_path):
    """Though it saves, as when it is told to end."""
    workdir, output = tmp_path / "run", tmp_path / "output"
    number = slurm.submit(output, f"--config={config_file}", f"--workdir={workdir}")
    wait_until(lambda: output.exists() and "step 1/" in output.read_text(), "it trains", 240)
    slurm.call("scancel", number)
    wait_until(lambda: not slurm.call("squeue", "-h").strip(), "the job is gone", 60)
    time.sleep(1)
    assert slurm.state(number) == "CANCELLED" and slurm.job(number)["Restarts"] == "0"
    assert slurm.call("squeue", "-h").strip() == ""
