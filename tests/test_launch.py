"""The two scripts of the README: which Python they take, and the line when there is none."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]


def fake_python(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def find_python(path, **environment):
    """Runs find_python of launch/environment.sh with only `path` to look in."""
    return subprocess.run(
        ["/bin/bash", "-c", f"source {ROOT}/launch/environment.sh && find_python"],
        env={"PATH": str(path), **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def path(tmp_path):
    for tool in ("dirname", "bash"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    return tmp_path


def test_newest_python_that_starts_is_taken(path):
    """A stub that fails is passed over, and so is one that is too old."""
    real = f'exec {sys.executable} "$@"'
    fake_python(path, "python3.13", "exit 127")
    fake_python(path, "python3.12", real)
    fake_python(path, "python3", real)
    assert find_python(path).stdout.strip() == "python3.12"
    fake_python(path, "python3.12", "exit 1")  # what the check answers on Python 3.10
    assert find_python(path).stdout.strip() == "python3"
    fake_python(path, "other", real)
    assert find_python(path, PYTHON=str(path / "other")).stdout.strip() == str(path / "other")


def test_no_python_gives_one_line(path):
    for environment in ({}, {"PYTHON": "/no/such/python"}):
        result = find_python(path, **environment)
        assert result.returncode != 0 and result.stdout == ""
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert "3.11 to 3.13" in result.stderr


def test_version_check_itself(path):
    """The check accepts this Python and would refuse 3.10 and 3.14."""
    text = (ROOT / "launch/environment.sh").read_text()
    check = text.split("-c '")[1].split("'")[0]
    for version, accepted in (((3, 10), 0), ((3, 11), 1), ((3, 13), 1), ((3, 14), 0)):
        code = check.replace("sys.version_info[:2]", str(version))
        result = subprocess.run([sys.executable, "-c", code], env=dict(os.environ))
        assert (result.returncode == 0) == bool(accepted), version


def test_bench_of_kernels_takes_options_and_installs_nothing(tmp_path):
    small = ["--n=16", "--d=8", "--v=50", "--bag_sizes=2", "--chunks=8", "--rounds=1"]
    done = subprocess.run(
        ["bash", str(ROOT / "launch/bench_kernels.sh"), *small, f"--json={tmp_path}/k.json"],
        env=os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "check xla" in done.stdout and (tmp_path / "k.json").is_file()
    assert "n=16, d=8, v=50, dtype=bfloat16" in done.stdout
