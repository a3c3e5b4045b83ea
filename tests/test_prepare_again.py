"""Preparation goes on after a kill, alone, in its own folder, and never over what is there."""

import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from prepared_corpus import (
    MODULES,
    ROOT,
    SEED,
    STDLIB,
    contents,
    documents_of,
    make_corpus,
    prepare_corpus,
    shards,
    write_jsonl,
)

from tst_jax import prepare
from tst_jax.data import runs
from tst_jax.data.store import StoreError, open_store


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory):
    return prepare_corpus(corpus, tmp_path_factory.mktemp("stores") / "store")


@pytest.fixture(scope="module")
def kill_corpus(tmp_path_factory):
    """Some MB in six units, so that two processes have work for a few seconds."""
    folder = tmp_path_factory.mktemp("kills")
    some = [(STDLIB / f"{module}.py").read_text() for module in MODULES]
    for number in range(6):
        write_jsonl(
            folder / f"{number}.jsonl", [f"# {number} {k}\n{t}" for k in (1, 2) for t in some]
        )
    return folder


def test_a_command_killed_at_any_time_goes_on_to_the_same_store(kill_corpus, tmp_path):
    out, work = tmp_path / "out", tmp_path / ".out.preparing"
    flags = {"source": "jsonl", "field": "body", "files": f"{kill_corpus}/*.jsonl"}
    flags |= {"vocab_size": 2000, "shard_tokens": 300_000, "processes": 2}
    command = [sys.executable, "-m", "tst_jax.prepare", f"--out={out}"]
    command += [f"--{name}={value}" for name, value in flags.items()]

    def start():
        return subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    # When the tokenizer is trained, it is done, a unit is, another one, and shards appear.
    moments = ["request.json", "tokenizer.json", "runs/unit-*", "runs/unit-*", "store/*"]
    rng, kills = random.Random(0), 0
    for moment in moments:
        before, process = len(list(work.glob(moment))), start()
        while process.poll() is None and len(list(work.glob(moment))) <= min(before, 5):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        # Its workers hold the pipe too: its end says that none of them has outlived the command.
        process.communicate(timeout=20)
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 4
    process = start()
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert "going on with the work" in text or "already prepared" in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    whole = prepare.prepare_store(tmp_path / "whole", **flags | {"processes": 1})
    assert shards(out) == shards(whole.path) and whole == open_store(whole.path)
    assert open_store(out).fingerprint == whole.fingerprint


def test_work_in_progress_is_held_against_a_second_command(corpus, tmp_path):
    work = tmp_path / ".store.preparing"
    work.mkdir()
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"/store: another command is preparing it; wait"):
            prepare_corpus(corpus, tmp_path / "store")
    prepare_corpus(corpus, tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_unfinished_work_of_another_request_is_left_alone(corpus, store, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runs, "merge_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(corpus, tmp_path / "store")
    before = contents(tmp_path)
    words = rf"/\.store\.preparing: holds unfinished work of another request .seed {SEED} there"
    with pytest.raises(StoreError, match=words):
        prepare_corpus(corpus, tmp_path / "store", seed=SEED + 1)
    assert len(before) > 4 and contents(tmp_path).keys() == before.keys()
    # Half a file of a killed process does not get into the store.
    (tmp_path / ".store.preparing" / "store" / "train-00000.partial-1").write_bytes(b"half")
    assert shards(prepare_corpus(corpus, tmp_path / "store").path) == shards(store.path)


def test_a_rerun_verifies_and_touches_nothing(corpus, store, capsys):
    before = contents(store.path)
    assert prepare_corpus(corpus, store.path, processes=2) == store
    assert "already prepared" in capsys.readouterr().out
    for change, words in (
        ({"seed": 3}, f"seed {SEED} there and 3 here"),
        ({"bos": "7"}, "bos None there and 7 here"),
        ({"heldout_fraction": 0.5}, "heldout_fraction 0.2 there and 0.5 here"),
        ({"files": f"{corpus}/*.py"}, "files .* units "),
        ({"tokenizer": None, "vocab_size": 300}, ".*vocab_size 257 there and 300 here"),
    ):
        with pytest.raises(StoreError, match=f"is a store of another request .{words}"):
            prepare_corpus(corpus, store.path, **change)
    assert contents(store.path) == before


def test_a_rerun_finds_damage_and_a_corpus_that_has_grown(corpus, tmp_path):
    files = tmp_path / "corpus"
    files.mkdir()
    for number, text in enumerate(documents_of(corpus)):
        (files / f"{number}.py").write_bytes(text.encode())
    store = prepare_corpus(files, tmp_path / "store")
    (files / "new.py").write_text("new = 1\n")
    with pytest.raises(StoreError, match="another request .units"):
        prepare_corpus(files, store.path)
    file = store.path / "train-00000.tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(StoreError, match=re.escape(str(file))):
        prepare_corpus(files, store.path)


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_foreign_folder_is_refused_untouched(corpus, tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text('{"mine": 1}')
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="not empty|format is None"):
        prepare_corpus(corpus, tmp_path / "mine")
    assert contents(tmp_path) == before and os.listdir(tmp_path) == ["mine"]
