"""`tst_jax.doctor`: what is whole passes, and what is wrong has a line that names it."""

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from etils import epath

from tst_jax import doctor, programs
from tst_jax.lock import Lock
from tst_jax.train import train


def look(capsys, config=None, folder=None):
    """({name: [lines]}, the report) of an examination."""
    capsys.readouterr()
    report = doctor.Report()
    doctor.examine(config, folder, report)
    found = {}
    for line in capsys.readouterr().out.splitlines():
        if line[:4] in ("pass", "FAIL"):
            name, text = line[6:24].strip(), line[25:]
            found.setdefault(name, []).append(f"{line[:4]} {text}")
    return found, report


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """(config, workdir of its finished run)"""
    store = request.getfixturevalue("store")
    config = request.getfixturevalue("make_config")(store)
    workdir = tmp_path_factory.mktemp("doctor") / "run"
    train(config, workdir)
    return config, workdir


def test_a_machine_without_a_run(capsys):
    """Versions, devices, memory, disk, and one step of each phase of a small model."""
    found, report = look(capsys)
    names = ["python", "packages", "devices", "memory", "disk", "small config", "mesh", "steps"]
    assert list(found) == names and report.failed == 0 and report.passed == len(names)
    assert "jax " in found["packages"][0] and "orbax-checkpoint " in found["packages"][0]
    assert "superposition s=4: loss 5." in found["steps"][0]  # log 256 is 5.55
    assert "recovery s=1: loss 5." in found["steps"][0]


def test_a_run(trained, capsys):
    """Stores and checkpoints are verified, byte for byte; nothing of it changes."""
    config, workdir = trained
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    found, report = look(capsys, config, workdir)
    assert report.failed == 0
    assert "every byte verified" in found["data"][0] and "checkpoints 8, 20" in found["workdir"][0]
    assert "last event finished at step 20; not locked" in found["workdir"][0]
    assert found["checkpoint 8"] == ["pass every byte verified, superposition s=3"]
    assert found["checkpoint 20"] == ["pass every byte verified, recovery s=1"]
    assert before == {p: p.stat().st_mtime_ns for p in workdir.rglob("*")}
    with Lock(workdir):
        assert f"locked by process {os.getpid()}" in look(capsys, None, workdir)[0]["workdir"][0]


def test_what_is_wrong_is_named(trained, store, tmp_path, capsys, make_config):
    """A damaged checkpoint, a damaged store, other settings: each fails alone."""
    config, workdir = make_config(store), tmp_path / "run"
    shutil.copytree(trained[1], workdir)
    manifest = workdir / "checkpoints/8/manifest.json"
    manifest.write_text(manifest.read_text().replace("superposition", "recovery"))
    data = next(p for p in (workdir / "checkpoints/20").rglob("d/*") if p.stat().st_size > 9_000)
    data.write_bytes(data.read_bytes()[:-1])
    shutil.copytree(store, tmp_path / "store")
    shard = next(p for p in (tmp_path / "store").rglob("*") if p.stat().st_size > 20_000)
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    config.data.store = str(tmp_path / "store")
    config.schedule.peak_lr = 1.0
    found, report = look(capsys, config, workdir)
    assert report.failed == 4
    assert found["checkpoint 8"][0].startswith(f"FAIL {manifest} is damaged")
    assert found["checkpoint 20"][0].startswith(f"FAIL {data} has ")
    assert found["data"][0].startswith("FAIL") and shard.name in found["data"][0]
    assert found["workdir"][-1] == "FAIL schedule.peak_lr: 0.01 -> 1.0"
    assert "steps" not in found  # no data to run them on


def test_settings_that_cannot_work(config, capsys):
    config.tst.ratio, config.data.rows = 2.0, 0
    found, report = look(capsys, config)
    assert len(found["config"]) == 2 and report.failed == 1
    assert "tst.ratio is 2.0" in str(found["config"]) and "mesh" not in found


def test_packages_out_of_their_bounds(monkeypatch, capsys):
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1" if name == "optax" else version(name)
    )
    with pytest.raises(doctor.UserError, match="^optax is 0.1; install optax>=.*,<.*$"):
        doctor.packages()

    def missing(name):
        if name == "grain":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(doctor.UserError, match="^grain is missing; install grain>="):
        doctor.packages()


def test_a_step_that_is_not_finite(trained, capsys, monkeypatch):
    compile_run = programs.compile_run

    def broken(*arguments):
        found = compile_run(*arguments)
        steps = {
            index: lambda *given, step=step: (lambda out: (out[0], out[1] | {"finite": False}))(
                step(*given)
            )
            for index, step in found.steps.items()
        }
        found.steps = steps
        return found

    monkeypatch.setattr(programs, "compile_run", broken)
    found, report = look(capsys, trained[0])
    assert report.failed == 1 and "not finite" in found["steps"][0]


def test_an_error_that_nobody_foresaw_ends_one_check_only(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "memory", lambda: {}["no such key"])
    report = doctor.Report()
    assert report.check("memory", doctor.memory) is None
    assert report.check("disk", doctor.disk, epath.Path("/")) is None
    said = capsys.readouterr().out
    assert "FAIL  memory             KeyError: 'no such key'" in said and "Traceback" in said
    assert (report.passed, report.failed) == (1, 1)


def test_the_command(tmp_path):
    """Status 1 where something fails."""
    root = str(pathlib.Path(__file__).parents[1])
    command = [sys.executable, "-m", "tst_jax.doctor", "--config=configs/quickstart.py"]
    done = subprocess.run(
        [*command, "--config.steps=0", f"--config.data.store={tmp_path}"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "FAIL  config             steps is 0" in done.stdout
    assert done.stdout.splitlines()[-1] == "5 passed, 1 failed"
