"""A run that is told to end (SIGTERM) saves within one step, wherever it is, and goes on to the
same bits: in training, in an evaluation, at the switch, and while it starts."""

import dataclasses
import os
import signal
import threading
import time

import pytest
from test_train import SWITCH, assert_same_bits, final_state, untimed

from tst_jax import hosts, metrics, programs
from tst_jax.checkpoint import Checkpoints
from tst_jax.data import corpus
from tst_jax.errors import Preempted
from tst_jax.run_log import Log
from tst_jax.train import train


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory):
    """An uninterrupted run: (config, workdir, final state)."""
    store = request.getfixturevalue("store")
    config = request.getfixturevalue("make_config")(store)
    config.eval.tokens = 64  # eight batches of evaluation would only take time
    config.eval.rows = 1
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train(config, workdir)
    return config, workdir, final_state(config, workdir)[0]


def tell():
    """SIGTERM to this very process."""
    os.kill(os.getpid(), signal.SIGTERM)


def saved_steps(workdir):
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.steps()


def goes_on(whole, workdir):
    config, whole_workdir, state = whole
    train(config, workdir)
    assert_same_bits(final_state(config, workdir)[0], state)
    assert untimed(workdir) == untimed(whole_workdir)


@pytest.mark.parametrize("step", [1, SWITCH - 1, SWITCH, SWITCH + 1, 19])
def test_in_training(whole, tmp_path, monkeypatch, step):
    """The step that is under way is the last one."""
    config, push = whole[0], Log.push

    def told(self, done, step_metrics):
        push(self, done, step_metrics)
        if done == step:
            tell()

    monkeypatch.setattr(Log, "push", told)
    with pytest.raises(Preempted, match=f"told to end, saved at step {step}; the same command"):
        train(config, tmp_path / "run")
    assert saved_steps(tmp_path / "run")[-1] == step
    monkeypatch.undo()
    goes_on(whole, tmp_path / "run")


@pytest.mark.parametrize("step", [5, SWITCH, 20])
def test_in_an_evaluation(whole, tmp_path, monkeypatch, step):
    """It is broken off, and done by the run that goes on: the lines are the same."""
    config, calls = whole[0], []
    compile_run = programs.compile_run

    def compiled(*arguments):
        found = compile_run(*arguments)
        evaluate = found.evaluate

        def watched(*batch):
            calls.append(1)
            evaluations = [5, SWITCH, 10, 15, 20]
            if len(calls) == 8 * evaluations.index(step) + 3:
                tell()
            return evaluate(*batch)

        found.evaluate = watched
        return found

    monkeypatch.setattr(programs, "compile_run", compiled)
    with pytest.raises(Preempted, match=f"saved at step {step}"):
        train(config, tmp_path / "run")
    before = len(calls)
    assert before % 8 == 3  # no batch after the signal
    assert saved_steps(tmp_path / "run")[-1] == step
    lines = metrics.read_metrics(tmp_path / "run")
    assert lines[-1]["step"] == step and "loss" in lines[-1]
    monkeypatch.undo()
    goes_on(whole, tmp_path / "run")


def hanging(event):
    """Never ends by itself, as a large store or a large program would."""

    def hang(*_, **__):
        tell()
        event.wait(60)

    return hang


@pytest.mark.parametrize(
    "owner, name, left",
    [
        (corpus, "verify", None),
        (programs, "compile_run", ["config.json", "events.jsonl"]),
    ],
    ids=["while data is checked", "while programs are compiled"],
)
def test_while_it_starts(whole, tmp_path, monkeypatch, owner, name, left):
    """Nothing is to be saved yet; the lock is given back."""
    release = threading.Event()
    monkeypatch.setattr(owner, name, hanging(release))
    began = time.monotonic()
    with pytest.raises(Preempted, match="told to end, with nothing new"):
        train(whole[0], tmp_path / "run")
    assert time.monotonic() - began < 50
    release.set()
    found = [p.name for p in (tmp_path / "run").iterdir()] if left else None
    assert (sorted(found) if left else (tmp_path / "run").exists() or None) == left
    monkeypatch.undo()
    if left:
        goes_on(whole, tmp_path / "run")


def test_while_a_checkpoint_is_verified(whole, tmp_path, monkeypatch):
    config = whole[0]
    monkeypatch.setattr(config, "stop_after", 10)
    train(config, tmp_path / "run")
    monkeypatch.undo()
    release = threading.Event()
    monkeypatch.setattr(Checkpoints, "_damage", hanging(release))
    with pytest.raises(Preempted, match="told to end, with nothing new"):
        train(config, tmp_path / "run")
    release.set()
    monkeypatch.undo()
    goes_on(whole, tmp_path / "run")


def test_the_last_step_of_all_is_no_interruption(whole, tmp_path, monkeypatch):
    """Told to end in the step that the run was to end with anyway: it has done what it should."""
    push = Log.push

    def told(self, done, step_metrics):
        push(self, done, step_metrics)
        if done == 13:
            tell()

    monkeypatch.setattr(Log, "push", told)
    train(dataclasses.replace(whole[0], stop_after=13), tmp_path / "run")
    assert saved_steps(tmp_path / "run")[-1] == 13
    monkeypatch.undo()
    goes_on(whole, tmp_path / "run")


def test_the_handler_is_given_back():
    """What handled SIGTERM before handles it afterwards; a second signal does no harm."""
    before = signal.getsignal(signal.SIGTERM)
    with hosts.Preemption() as preemption:
        assert not preemption.reached()
        tell()
        tell()
        assert preemption.reached() and preemption.reached()
    assert signal.getsignal(signal.SIGTERM) == before


def test_watched_functions(tmp_path):
    """Their results and errors come through."""
    with hosts.Preemption() as preemption:
        assert preemption.watch(lambda: 3) == 3
        with pytest.raises(ZeroDivisionError):
            preemption.watch(lambda: 1 / 0)
