"""Commands that record how they were called, for the tests of the scripts in launch/."""

import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMANDS = ("gcloud", "xpk", "kubectl", "srun", "scontrol", "tar", "mkdir", "rm", "cp", "sleep")
TPU = ["tpu_pod.sh", "--name=t", "--zone=z", "--type=v6e-64"]
GKE = ["gke_xpk.sh", "--cluster=c", "--workload=w", "--type=v5p-8"]
SLURM = ["slurm_b200.sbatch"]
LOCAL = ["local_cluster.sh", "2"]
RUN = ["--config=configs/dense_3b.py:baseline", "--workdir=gs://b/r"]
TRAIN = "-m tst_jax.train --config=configs/dense_3b.py:baseline --workdir=gs://b/r"

# Each call is a line of ./calls; `answer`, which a test gives, is run with the call in "$*".
FAKE = r"""#!/bin/bash
here="$(dirname "$0")"
line="${0##*/}"
for word in "$@"; do line+=$'\x1f'"$word"; done
echo "$line" >>"$here/calls"
seen() { grep -c -- "$1" "$here/calls"; }
set -- "${0##*/}" "$@"
"""


class Machine:
    """A PATH with fakes in front, and the scripts run on it."""

    def __init__(self, folder):
        self.folder, self.calls_file = folder, folder / "calls"
        self.answer("")

    def answer(self, body):
        """What the fakes do, as bash; first come, first served: `case "$*" in` this."""
        self.calls_file.write_text("")
        for name in COMMANDS:
            path = self.folder / name
            extra = "exec 2>/dev/null\n" if name == "kubectl" else ""
            path.write_text(f'{FAKE}{extra}case "$*" in\n{body}\nesac\n')
            path.chmod(0o755)

    def environment(self, **more):
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "NCCL"))}
        path = f"{self.folder}:{os.environ['PATH']}"
        return kept | {"PATH": path, "LAUNCH_PAUSE": "0", "PYTHON": sys.executable} | more

    def run(self, script, *arguments, **environment):
        return subprocess.run(
            ["bash", str(ROOT / "launch" / script), *arguments],
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=60,
        )

    def dry(self, *command, **environment):
        """The lines of a dry run, which calls nothing."""
        done = self.run(*command, "--dry_run", **environment)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert self.calls() == []
        return done.stdout.splitlines()

    def calls(self):
        """What was called, each as a list."""
        return [line.split("\x1f") for line in self.calls_file.read_text().splitlines()]

    def steps(self):
        """The same in a word each, as long as it says something: `create`, `start`, `requeue`."""
        found = []
        for call in self.calls():
            text = " ".join(call)
            words = ("describe", "create", "scp", "install", "start", "follow", "status", "delete")
            words += ("kubectl", "list", "srun", "requeue")
            found += [word for word in words if f" {word}" in f" {text}"][:1]
        return found


def no_slice(*more):
    """An answer: there is no TPU slice yet, and all goes well; but for what `more` says."""
    return "\n".join(
        [
            *more,
            '*describe*) echo "ERROR: NOT_FOUND: none" >&2; exit 1;;',
            '*sh\\ status*) echo "exit status: 0"; echo "exit status: 0";;',
        ]
    )


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
