"""A workdir in a bucket: what the trainer itself writes there, and what it says if it cannot.

Orbax and tensorstore write the checkpoints; that they do is not proved here.
"""

import dataclasses
import importlib.util
from unittest import mock

import fsspec
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from tst_jax import metrics, profiling
from tst_jax import workdir as workdir_lib
from tst_jax.checkpoint import Checkpoints
from tst_jax.config import ConfigError
from tst_jax.train import train


@pytest.fixture
def bucket():
    """gs://bucket in memory."""

    class Bucket(MemoryFileSystem):
        protocol = ("gcs", "gs")

    fsspec.register_implementation("gcs", Bucket, clobber=True)
    return epath.Path("gs://bucket")


def test_a_workdir_in_a_bucket(bucket, make_config, store, monkeypatch):
    """gs:// through a file system in memory, except for the arrays, which tensorstore writes."""

    monkeypatch.setattr(metrics.tensorboardX, "SummaryWriter", lambda *_, **__: mock.Mock())
    workdir, config = bucket / "run", make_config(store)
    with workdir_lib.claimed(workdir, print) as check_lock:
        workdir_lib.write_config(workdir, config)
        check_lock()
    assert not (workdir / "lock").exists()
    workdir_lib.check_place(workdir)
    old = workdir_lib.saved_config(workdir)
    assert workdir_lib.check_changes(old, config, frozenset(), 0, workdir) == []
    with pytest.raises(ConfigError, match="seed: 0 -> 1"):
        other = dataclasses.replace(config, seed=1)
        workdir_lib.check_changes(old, other, frozenset(), 0, workdir)
    (bucket / "other" / "file").write_text("not ours")
    with pytest.raises(ConfigError, match="not empty"):
        workdir_lib.check_place(workdir.parent / "other")
    for number in range(2):  # two processes, one after the other
        events = workdir_lib.Events(workdir)
        events.write("started", step=number)
        events.close()
    assert [event["step"] for event in workdir_lib.read_events(workdir)] == [0, 1]
    # A checkpoint is there once its manifest is, which comes last.
    for step, name in (4, "manifest.json"), (8, "state/d"), (12, "manifest.json"):
        (workdir / "checkpoints" / str(step) / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / "checkpoints" / str(step) / name).write_text("{}")
    checkpoints = Checkpoints(workdir / "checkpoints", keep=1)
    assert checkpoints.steps() == [4, 12]
    checkpoints._expire()
    assert checkpoints.steps() == [12]
    assert (workdir / "checkpoints/8/state/d").exists()
    for first in 1, 3:  # a run of steps 1 .. 4, of which a resumed one keeps 2
        writer = metrics.Writer(workdir, first - 1)
        for step in range(first, first + 2):
            writer.write({"step": step, "loss": 1.0})
        writer.flush()
        assert [line["step"] for line in metrics.read_metrics(workdir)] == list(range(1, first + 2))
        writer.write({"step": first + 2, "loss": 2.0})
    writer.close()
    assert [line["step"] for line in metrics.read_metrics(workdir)] == [1, 2, 3, 4, 5]


def test_a_bucket_without_its_package_is_refused(config):
    if importlib.util.find_spec("s3fs"):
        pytest.skip("s3fs is installed")
    with pytest.raises(ConfigError, match="^s3://bucket/run cannot be reached: .*(i|I)nstall s3fs"):
        train(config, "s3://bucket/run")


def test_a_trace_is_copied_into_a_bucket(bucket):
    """XLA writes to disks only."""
    log = mock.Mock()
    trace = profiling.Trace("0:1", bucket / "traced", silent=False)
    trace.at(0, log)
    trace.at(1, log)
    assert len(list((bucket / "traced").glob("profile/plugins/profile/*/*.xplane.pb"))) == 1
    assert log.flush.call_count == log.restart_clock.call_count == 2
