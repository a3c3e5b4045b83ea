"""Runs a test file as a program with eight fake CPU devices, and reads the JSON that it prints."""

import json
import os
import pathlib
import subprocess
import sys


def report_of(file):
    """What `main()` of the file prints as its last line."""
    root = pathlib.Path(file).parents[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-B", str(file)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
