"""A run's folder: what may change when a run goes on, who may write it, and what it tells."""

import copy
import dataclasses
import errno
import json
import shutil
import threading
import time

import pytest
from test_train import SWITCH, assert_same_bits, final_state, untimed

from tst_jax import checkpoint as checkpoint_lib
from tst_jax import generate, manifest, metrics
from tst_jax import workdir as workdir_lib
from tst_jax.checkpoint import CheckpointError
from tst_jax.config import ConfigError
from tst_jax.lock import Lock, LockError
from tst_jax.run_log import Log
from tst_jax.train import train
from tst_jax.workdir import check_changes, read_events


@pytest.fixture(scope="module")
def half(request, tmp_path_factory):
    """A run that was stopped at step 12, with a checkpoint every four steps: (config, workdir)."""
    store = request.getfixturevalue("store")
    config = request.getfixturevalue("make_config")(store)
    config.checkpoint.every, config.checkpoint.keep = 4, 5
    part = copy.deepcopy(config)
    part.stop_after = 12
    workdir = tmp_path_factory.mktemp("half") / "run"
    train(part, workdir)
    return config, workdir


@pytest.fixture(scope="module")
def whole(half, tmp_path_factory):
    """The same run to its end: (workdir, final state)."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(half[1], workdir)
    train(half[0], workdir)
    return workdir, final_state(half[0], workdir)[0]


@pytest.fixture
def run(half, tmp_path):
    """(config, a copy of the stopped run), both to be changed at will."""
    shutil.copytree(half[1], tmp_path / "run")
    return copy.deepcopy(half[0]), tmp_path / "run"


def content(folder):
    """Every file and its bytes."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# ---- settings


def test_a_changed_setting_is_refused_unless_it_is_named(run, capsys):
    """All differences are listed, with what to type; nothing is written."""
    config, workdir = run
    config.schedule.peak_lr, config.optimizer.clip, config.log_every = 5e-3, 0.5, 2
    before = content(workdir)
    with pytest.raises(ConfigError) as caught:
        train(config, workdir)
    first, *lines = str(caught.value).splitlines()
    assert "--allow_changes=optimizer.clip,schedule.peak_lr" in first
    assert lines == ["optimizer.clip: 1.0 -> 0.5", "schedule.peak_lr: 0.01 -> 0.005"]
    with pytest.raises(ConfigError, match="--allow_changes=optimizer.clip\n"):
        train(config, workdir, allow_changes=["schedule.peak_lr"])
    with pytest.raises(ConfigError, match="'schedule.peak' is no setting; did you mean schedule.p"):
        train(config, workdir, allow_changes=["schedule.peak"])
    assert content(workdir) == before

    allowed = ["schedule.peak_lr", "optimizer.clip", "seed"]  # seed: did not change, does no harm
    capsys.readouterr()
    train(config, workdir, allow_changes=allowed)
    said = capsys.readouterr().out
    for line in (*lines, "log_every: 1 -> 2"):
        assert f"changed since the run began: {line}" in said
    assert json.loads((workdir / "config.json").read_text())["schedule"]["peak_lr"] == 5e-3
    (event,) = [e for e in read_events(workdir) if e["event"] == "settings_changed"]
    assert set(lines) < set(event["changes"]) and event["step"] == 12
    rates = [line["lr"] for line in metrics.read_metrics(workdir) if "loss" in line]
    assert rates[11] == pytest.approx(0.01) and rates[12] == pytest.approx(5e-3)


def test_a_change_that_was_allowed_once_stays_so(run):
    """Killed before its next checkpoint, the run goes on with the plain command: the old checkpoint
    has the old settings, and the folder knows that they were changed."""
    config, workdir = run
    config.schedule.peak_lr = 5e-3
    train(dataclasses.replace(config, stop_after=14), workdir, allow_changes=["schedule.peak_lr"])
    shutil.rmtree(workdir / "checkpoints/14")
    train(config, workdir)
    assert final_state(config, workdir)[1]["step"] == 20


def test_a_checkpoint_of_other_settings_is_refused(run):
    """As where config.json was edited, or checkpoints of another run were copied."""
    config, workdir = run
    config.optimizer.b1 = 0.5
    workdir_lib.write_config(workdir, config)
    before = content(workdir)
    with pytest.raises(ConfigError, match="checkpoints/12 was started with.*\noptimizer.b1: 0.9"):
        train(config, workdir)
    assert content(workdir) == before
    train(config, workdir, allow_changes=["optimizer.b1"])


def test_what_was_done_cannot_change(half):
    """A longer run keeps its switch, or the steps that are done would have read other data."""
    config, done = half[0], 12
    old = workdir_lib.plain(config)
    longer = copy.deepcopy(config)
    longer.steps = 40
    allow = frozenset({"steps", "tst.superposition_steps", "data.rows_from", "tst.ratio"})
    with pytest.raises(ConfigError, match="done 12 steps.*keep the switch where it was"):
        check_changes(old, longer, allow, done, "run")
    longer.tst.superposition_steps = SWITCH
    changes = check_changes(old, longer, allow, done, "run")
    assert changes == ["steps: 20 -> 40", "tst.superposition_steps: -1 -> 8"]
    with pytest.raises(ConfigError, match="--allow_changes=steps,tst.superposition_steps"):
        check_changes(old, longer, frozenset(), done, "run")
    for rows_from, wrong in (("12:8", False), ("14:8", False), ("11:8", True)):
        other = copy.deepcopy(config)
        other.data.rows_from = rows_from
        if wrong:
            with pytest.raises(ConfigError, match="data.rows_from"):
                check_changes(old, other, frozenset(), done, "run")
            with pytest.raises(ConfigError, match="done 12 steps"):
                check_changes(old, other, allow, done, "run")
        else:
            assert check_changes(old, other, frozenset(), done, "run")
    # Before the switch it may still be moved.
    moved = copy.deepcopy(config)
    moved.tst.ratio = 0.5
    assert check_changes(old, moved, allow, 8, "run") == ["tst.ratio: 0.4 -> 0.5"]
    with pytest.raises(ConfigError, match="done 9 steps"):
        check_changes(old, moved, allow, 9, "run")


def test_a_config_that_cannot_be_read(run):
    config, workdir = run
    for text in ("{", "[]", '{"steps": 3}', ""):
        (workdir / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="config.json cannot be read"):
            train(config, workdir)
        assert (workdir / "config.json").read_text() == text


# ---- who writes it


def test_two_writers(run, capsys):
    """A live one is refused before anything is written; what a dead one left is taken over."""
    config, workdir = run
    before = content(workdir)
    with Lock(workdir):
        with pytest.raises(LockError, match="is being written by process"):
            train(config, workdir)
    assert content(workdir) == before
    (workdir / "lock").write_text('{"host": "')
    train(config, workdir)
    assert "taken over" in capsys.readouterr().out
    assert not (workdir / "lock").exists()


def test_a_run_that_loses_its_lock_ends(run, monkeypatch):
    config, workdir = run

    def lost(self):
        raise LockError("taken")

    monkeypatch.setattr(Lock, "check", lost)
    with pytest.raises(LockError):
        train(config, workdir)
    assert final_state(config, workdir)[1]["step"] == 12


def test_a_folder_that_was_only_begun_is_no_foreign_one(half, tmp_path):
    """A kill between the lock and config.json."""
    (tmp_path / "run").mkdir()
    for name in ("lock", "config.json.partial", "events.jsonl"):
        (tmp_path / "run" / name).write_text("")
        workdir_lib.check_place(checkpoint_lib.epath.Path(tmp_path / "run"))
    (tmp_path / "run/more").write_text("")
    with pytest.raises(ConfigError, match="not empty and no run"):
        workdir_lib.check_place(checkpoint_lib.epath.Path(tmp_path / "run"))


# ---- disks


def test_a_damaged_checkpoint(run, whole, capsys):
    """The run says so, goes on from the one before, and ends in the same bits."""
    config, workdir = run
    data = next(p for p in (workdir / "checkpoints/12").rglob("d/*") if p.stat().st_size > 10_000)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(bytes(content))
    assert generate.load_model(workdir)[1]["step"] == 8  # and so does what only reads
    assert "step 8 is the newest good checkpoint" in capsys.readouterr().err
    assert (workdir / "checkpoints/12").is_dir()
    train(config, workdir)
    said = capsys.readouterr().out
    assert f"warning: {data} is damaged: its content is not what was written; step 8 is" in said
    assert "resuming at step 8" in said
    assert_same_bits(final_state(config, workdir)[0], whole[1])
    assert untimed(workdir) == untimed(whole[0])
    assert (workdir / "checkpoints/12.damaged").is_dir()
    (event,) = [e for e in read_events(workdir) if e["event"] == "damaged"]
    assert event["found"].startswith(str(data)) and event["step"] == 8


def test_damage_at_the_switch_is_found_before_it_is_trained_on(run, monkeypatch):
    """What the switch reads back was written a moment ago, and is verified all the same."""
    config, workdir = run
    for path in (workdir / "checkpoints").iterdir():
        if int(path.name) > 4:
            shutil.rmtree(path)
    wait = checkpoint_lib.Checkpoints.wait

    def damages(self):
        wait(self)
        for path in (workdir / f"checkpoints/{SWITCH}").rglob("d/*"):
            path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(checkpoint_lib.Checkpoints, "wait", damages)
    with pytest.raises(CheckpointError, match=f"checkpoints/{SWITCH}/.* bytes of "):
        train(config, workdir)
    monkeypatch.undo()
    train(config, workdir)


def test_too_little_room(run, monkeypatch, tmp_path, capsys):
    """Refused before anything is compiled or written; a warning where it will be too little."""
    config, workdir = run
    usage, before = shutil.disk_usage(tmp_path), content(workdir)
    free = lambda count: monkeypatch.setattr(
        checkpoint_lib.shutil, "disk_usage", lambda _: usage._replace(free=count)
    )
    free(1_500_000)
    for folder in (workdir, tmp_path / "new" / "run"):
        with pytest.raises(CheckpointError, match=r"checkpoints more .* 0.0015 GB are free at "):
            train(config, folder)
    assert content(workdir) == before and not (tmp_path / "new").exists()
    config.stop_after = 13
    free(5_000_000)
    train(config, workdir)
    assert "warning" not in capsys.readouterr().out
    config.checkpoint.keep, config.stop_after = 100, 14
    train(config, workdir)
    assert "warning: the run will write 98 checkpoints more of" in capsys.readouterr().out


def test_a_save_that_fails_in_the_background_ends_the_run_soon(run, monkeypatch):
    """At one of the next steps, not only where the next checkpoint is due."""
    config, workdir = run
    (workdir / "checkpoints/12").rename(workdir / "12")  # so that it is saved again
    push, failed = Log.push, threading.Event()

    def fails(*_):
        failed.set()
        raise OSError(errno.EIO, "Input/output error")

    def slow(self, step, *arguments):
        if step > 12:
            assert failed.wait(60)
            time.sleep(0.2)  # until the thread of the save has ended
        push(self, step, *arguments)

    monkeypatch.setattr(manifest, "write", fails)
    monkeypatch.setattr(Log, "push", slow)
    with pytest.raises(CheckpointError, match="step 12 was not written.*8 is the last checkpoint"):
        train(config, workdir)
    ended = read_events(workdir)[-1]
    assert ended["event"] == "ended" and 12 < ended["step"] < 16
    monkeypatch.undo()
    train(config, workdir)


def test_a_disk_that_is_full_for_other_files(run, monkeypatch):
    """metrics.jsonl cannot grow: one line, not a traceback; the checkpoints are whole."""
    config, workdir = run

    def full(self, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(metrics.Writer, "write", full)
    with pytest.raises(CheckpointError, match="the disk of .*run is full; make room") as caught:
        train(config, workdir)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    train(config, workdir)


# ---- what it tells


def test_events(half, whole, tmp_path):
    found = [(e["event"], e["step"]) for e in read_events(whole[0])]
    assert found == [
        *[("started", 0), ("finished", 12), ("resumed", 12)],
        *[("settings_changed", 12), ("finished", 20)],
    ]
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\n3\n{}\n" + (whole[0] / "events.jsonl").read_bytes() + b'{"eve')
    assert read_events(tmp_path) == read_events(whole[0])
    started = read_events(whole[0])[0]
    assert {"time", "host", "pid", "tst_jax", "jax", "processes", "devices"} < started.keys()
