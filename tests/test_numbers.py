"""Losses that are not finite, in whole runs: they stop a run or are left out, and can be replayed.

One token of the store is poison: its embedding is infinite from the start, so each step that reads
it has a loss of nan, and no other step has.
"""

import copy
import math

import jax
import numpy as np
import pytest
from test_train import assert_same_bits, final_state, untimed

from tst_jax import debug_nans, loop, metrics, nonfinite
from tst_jax.checkpoint import Checkpoints
from tst_jax.data.store import open_store
from tst_jax.data.store_writer import write_store
from tst_jax.guard import TrainingError
from tst_jax.train import train
from tst_jax.workdir import read_events

POISON = 60


@pytest.fixture(scope="module")
def run(request, tmp_path_factory):
    """A config of a store that holds the poison fifteen times."""
    clean = open_store(request.getfixturevalue("store"))
    folder = tmp_path_factory.mktemp("poison") / "store"
    rng = np.random.default_rng(1)

    def documents(poisoned):
        for number in range(60):
            ids = 1 + (np.arange(200) + rng.integers(58)) % 58
            if poisoned and number % 4 == 3:
                ids[100] = POISON
            yield ids, 200

    write_store(
        folder,
        vocabulary=clean.vocabulary(),
        train=documents(True),
        heldout=documents(False),
        separator_id=0,
        provenance={},
    )
    config = request.getfixturevalue("make_config")(folder)
    config.steps, config.checkpoint.every, config.checkpoint.keep = 60, 5, 100
    config.numbers.nonfinite = "skip"
    return config


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Of the initial parameters."""
    initial_state = loop.initial_state

    def poisoned(*arguments):
        state = initial_state(*arguments)
        set_row = lambda path, x: (
            x.at[POISON].set(np.inf) if "params.embedding" in _name(path) else x
        )
        return jax.tree_util.tree_map_with_path(set_row, state)

    _name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    for module in (loop, nonfinite):
        monkeypatch.setattr(module, "initial_state", poisoned)


@pytest.fixture(scope="module")
def bad_steps(run):
    """The steps (1 is the first) that read the poison, found in the store itself."""
    tokens = open_store(run.data.store).tokens("train")[:]
    assert (tokens == POISON).sum() == 15
    return tokens


def skipped(workdir):
    return [e for e in read_events(workdir) if e["event"] == "skipped"]


def test_skipped_batches_can_be_replayed_from_the_log(run, tmp_path, bad_steps, capsys):
    """Exactly the batches with the poison are left out; the log names their rows; the run learns,
    and one that was interrupted skips the same ones to the same bits."""
    train(run, tmp_path / "run")
    events = skipped(tmp_path / "run")
    assert 2 <= len(events) <= 8
    assert [event["skips"] for event in events] == list(range(1, len(events) + 1))
    lines = metrics.read_metrics(tmp_path / "run")
    done = {line["step"] for line in lines if "loss" in line}
    assert done == set(range(1, 61)) - {event["step"] for event in events}
    assert all(math.isfinite(line["loss"]) for line in lines if "loss" in line)
    for event in events:
        tokens = 8 * 3 + 3 if event["step"] <= 24 else 8 + 1
        rows = [bad_steps[place : place + tokens] for _, place in event["rows"]]
        assert len(rows) == 4 and event["loss"] == "nan"
        assert any(POISON in row for row in rows)
    said = capsys.readouterr().out
    assert said.count("is left out: loss nan, gradient norm nan") == len(events)
    state, record = final_state(run, tmp_path / "run")
    finite = {n: np.isfinite(x).all() for n, x in state.items() if n != "params.embedding"}
    assert all(finite.values()), finite
    assert np.isfinite(state["params.embedding"][:POISON]).all()
    assert lines[-1]["eval_loss"] < lines[0]["loss"] - 0.5
    assert record["guard"]["skips"] == len(events)

    part = copy.deepcopy(run)
    part.stop_after = events[0]["step"] + 1
    train(part, tmp_path / "parts")
    train(run, tmp_path / "parts")
    assert_same_bits(final_state(run, tmp_path / "parts")[0], state)
    assert untimed(tmp_path / "parts") == untimed(tmp_path / "run")
    again = skipped(tmp_path / "parts")
    assert [(e["step"], e["rows"], e["skips"]) for e in again] == [
        (e["step"], e["rows"], e["skips"]) for e in events
    ]


def test_too_many_skips_end_the_run(run, tmp_path):
    config = copy.deepcopy(run)
    config.numbers.skips = 1
    with pytest.raises(TrainingError, match="numbers.skips=1"):
        train(config, tmp_path / "run")
    config.numbers.skips = 20  # harmless: the run goes on from its last checkpoint
    train(config, tmp_path / "run")


def test_stop_and_then_find_out(run, tmp_path, capsys, monkeypatch):
    """The default: the run ends, its last checkpoint is good, and --config.debug_nans finds the
    step, the row and the parameter, and leaves the folder as it was."""
    config = copy.deepcopy(run)
    config.numbers.nonfinite = "stop"
    with pytest.raises(TrainingError, match="loss nan and gradient norm nan at step ") as caught:
        train(config, tmp_path / "run")
    bad = int(str(caught.value).split(" at step ")[1].split(";")[0])
    with Checkpoints(tmp_path / "run/checkpoints", read_only=True) as checkpoints:
        assert bad - 6 < checkpoints.newest() < bad
    ended = read_events(tmp_path / "run")[-1]
    assert ended["event"] == "ended" and "--config.debug_nans" in ended["why"]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    config.debug_nans = True
    capsys.readouterr()
    replay, replayed = debug_nans.replay, []

    def watched(config, stage, state, batch, mesh):
        replayed.append(int(state.step))
        return replay(config, stage, state, batch, mesh)

    monkeypatch.setattr(debug_nans, "replay", watched)
    monkeypatch.setattr(debug_nans, "_first_operation", lambda *_: "")  # compiles for long
    train(config, tmp_path / "run")
    assert replayed == [bad - 1]  # the state before the step
    said = capsys.readouterr().out
    assert f"step {bad}, " in said and ", is not finite:" in said
    assert "parameter embedding: 16 nan and 0 inf of 976 entries" in said  # weight decay: inf - inf
    (rows,) = [line for line in said.splitlines() if "rows that are not finite alone" in line]
    assert ", " not in rows.split(":")[-1].split("(")[0]  # one row of the four
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}


def test_nothing_to_find(run, tmp_path, capsys):
    """A healthy run, from its beginning, in a folder that stays unmade."""
    config = copy.deepcopy(run)
    config.debug_nans, config.stop_after = True, 2
    train(config, tmp_path / "new")
    assert "all steps up to 2 are finite" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()
