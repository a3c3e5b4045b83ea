"""A trace of some steps changes nothing of a run, and holds those steps."""

import pathlib

import jax
import pytest

from tst_jax import metrics, profiling
from tst_jax.config import ConfigError
from tst_jax.train import train


def steps_traced(workdir):
    """Of each trace, in the order of their names: the numbers of its steps."""
    found = []
    for file in sorted(pathlib.Path(workdir, "profile").rglob("*.xplane.pb")):
        planes = jax.profiler.ProfileData.from_file(str(file)).planes
        lines = [line for plane in planes for line in plane.lines]
        events = [event for line in lines for event in line.events if event.name == "step"]
        found.append(sorted(dict(event.stats)["step_num"] for event in events))
    return found


def losses(workdir):
    return [line["loss"] for line in metrics.read_metrics(workdir) if "loss" in line]


def test_a_trace_across_the_switch(config, tmp_path):
    """Four steps of 20, the switch after the second of them; stopped among them and gone on."""
    train(config, tmp_path / "plain")
    config.profile, config.stop_after = "6:10", 7
    train(config, tmp_path / "traced")
    assert steps_traced(tmp_path / "traced") == [[7]]
    config.stop_after = -1
    train(config, tmp_path / "traced")
    assert steps_traced(tmp_path / "traced") == [[7], [8, 9, 10]]
    assert losses(tmp_path / "traced") == losses(tmp_path / "plain")
    train(config, tmp_path / "traced")  # is done, and traces nothing
    assert len(steps_traced(tmp_path / "traced")) == 2


def test_no_trace_where_none_is_asked_for(tmp_path):
    for text, silent in (("", False), ("0:5", True)):
        trace = profiling.Trace(text, tmp_path, silent)
        trace.at(0, None)  # a log that cannot even be flushed
        trace.close()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["5", "5:", "a:b", "5:5", "7:5", "-1:5", "1:2:3", "20:25"])
def test_steps_that_are_none(config, text, tmp_path):
    config.profile = text
    with pytest.raises(ConfigError, match=f"profile is '{text}'"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
