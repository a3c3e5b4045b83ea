"""The store: what is written comes back at any position, and half a store is never left."""

import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from tst_jax.data.store import StoreError, open_store
from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import byte_vocabulary, ids_only

VOCAB_SIZE = 300
SEPARATOR = 7
TRAIN = [([1, 2, 3], 10), ([], 0), ([299, 0], 4)]
HELDOUT = [([5] * 6, 6)]


def write(path, train=TRAIN, heldout=HELDOUT, size=VOCAB_SIZE, **options):
    options = {"provenance": {"source": "test"}, "vocabulary": ids_only(size), **options}
    options.setdefault("separator_id", SEPARATOR)
    return write_store(path, train=iter(train), heldout=iter(heldout), **options)


def write_several(path, seed=0):
    """A store of bytes with several shards; returns (store, the ids of train)."""
    rng = np.random.default_rng(seed)
    documents = [(rng.integers(256, size=rng.integers(1, 9)), 5) for _ in range(40)]
    options = {"vocabulary": byte_vocabulary(), "separator_id": 256, "shard_tokens": 25}
    store = write(path, documents[:34], documents[34:], **options)
    whole = [i for ids, _ in documents[:34] for i in [*ids, 256]]
    return store, np.array(whole, np.uint16)


# ---- what is written comes back


def test_round_trip(tmp_path):
    written = write(tmp_path / "store", provenance={"source": "test", "fraction": 0.05})
    store = open_store(tmp_path / "store")
    assert store == written == pickle.loads(pickle.dumps(store))
    assert (store.vocab_size, store.separator_id) == (VOCAB_SIZE, SEPARATOR)
    assert store.beginning == [SEPARATOR]
    assert store.tokens("train")[:].tolist() == [1, 2, 3, 7, 7, 299, 0, 7]
    assert [offsets.tolist() for offsets in store.documents("train")] == [[0, 4, 5, 8]]
    assert store.tokens("heldout")[:].tolist() == [5] * 6 + [7]
    assert store.documents("heldout")[0].dtype == np.int64
    counts = [store.count("train", what) for what in ("tokens", "documents", "text_bytes")]
    assert counts == [8, 3, 14]
    assert store.manifest["provenance"] == {"source": "test", "fraction": 0.05}
    assert store.bytes_per_token("train") == 14 / 8
    assert store.vocabulary() == ids_only(VOCAB_SIZE)
    # The format is a promise to other readers: raw ids without a header.
    raw = (tmp_path / "store" / "train-00000.tokens.bin").read_bytes()
    assert raw == np.array([1, 2, 3, 7, 7, 299, 0, 7], "<u2").tobytes()


def test_slices_are_those_of_one_array_wherever_shards_end(tmp_path):
    store, whole = write_several(tmp_path / "store")
    tokens = store.tokens("train")
    assert len(store.manifest["shards"]["train"]) > 5
    assert len(tokens) == whole.size == store.count("train", "tokens")
    assert np.array_equal(np.asarray(tokens), whole)
    for start in range(whole.size + 1):
        for stop in range(start, whole.size + 1):
            found = tokens[start:stop]
            assert found.dtype == np.uint16 and np.array_equal(found, whole[start:stop])
    for part in (slice(None), slice(-9, None), slice(None, -9), slice(30, 9), slice(500, 900)):
        assert np.array_equal(tokens[part], whole[part])
    with pytest.raises(ValueError, match="a step of 2"):
        tokens[::2]


def test_documents_of_all_shards_are_those_written(tmp_path):
    store, whole = write_several(tmp_path / "store")
    starts = [0]
    for offsets in store.documents("train"):
        starts += (offsets[1:] + starts[-1]).tolist()
    assert starts[1:] == (np.flatnonzero(whole == 256) + 1).tolist()
    assert store.count("train", "documents") == 34 == len(starts) - 1
    assert store.count("train", "text_bytes") == 34 * 5


def test_reading_maps_the_files_and_opens_shards_when_they_are_needed(tmp_path, monkeypatch):
    opened = []
    original = np.memmap
    monkeypatch.setattr(np, "memmap", lambda *a, **k: opened.append(a) or original(*a, **k))
    store, whole = write_several(tmp_path / "store")
    opened.clear()
    tokens = store.tokens("train")
    assert not opened
    tokens[:3], tokens[1:4]
    assert len(opened) == 1
    # A slice inside a shard is the map itself, not a copy, and cannot be written.
    assert np.shares_memory(tokens[:3], tokens[:9])
    with pytest.raises(ValueError, match="read-only"):
        tokens[:3][0] = 1
    assert isinstance(store.documents("train")[0].base, original)  # mapped too


def test_shards_are_checked_together_and_their_heads_read_one_at_a_time(tmp_path, monkeypatch):
    """Python 3.11 fails now and then where two threads parse; NumPy parses the head of a file."""
    store, _ = write_several(tmp_path / "store")
    load, inside, most = np.load, [], []

    def slow_load(file, **options):
        inside.append(file)
        most.append(len(inside))
        time.sleep(0.005)
        found = load(file, **options)
        inside.remove(file)
        return found

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(np, "load", slow_load)
    open_store(store.path)
    assert len(most) == sum(map(len, store.manifest["shards"].values())) > 8
    assert max(most) == 1


@pytest.mark.parametrize("size, dtype", [(65536, np.uint16), (65537, np.uint32)])
def test_ids_are_stored_as_narrow_as_the_vocabulary_allows(tmp_path, size, dtype):
    write(tmp_path / "store", train=[([size - 1], 1)], size=size)
    tokens = open_store(tmp_path / "store").tokens("train")
    assert tokens.dtype == tokens[:].dtype == tokens[:0].dtype == dtype
    assert tokens[:].tolist() == [size - 1, SEPARATOR]
    file = tmp_path / "store" / "train-00000.tokens.bin"
    assert file.stat().st_size == 2 * np.dtype(dtype).itemsize


def test_fingerprint_is_of_the_data_only(tmp_path):
    first = write(tmp_path / "first", provenance={"date": "yesterday"})
    again = write(tmp_path / "again", provenance={"date": "today"})
    other = write(tmp_path / "other", train=[([1, 2, 4], 10), *TRAIN[1:]])
    assert re.fullmatch("[0-9a-f]{64}", first.fingerprint)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_unknown_bytes_are_none_and_not_a_number(tmp_path):
    store = write(tmp_path / "store", train=[([1], None), ([2], 3)])
    assert store.count("train", "text_bytes") is None is store.bytes_per_token("train")
    assert store.count("heldout", "text_bytes") == 6


def test_unknown_split_is_refused(tmp_path):
    store = write(tmp_path / "store")
    for read in (store.tokens, store.documents, store.bytes_per_token):
        with pytest.raises(StoreError, match="no split 'valid'; a store has train and heldout"):
            read("valid")


# ---- writing


@pytest.mark.parametrize(
    "train, words",
    [
        ([([1], 1), ([300], 1)], "train has ids 7 to 300, the vocabulary 0 to 299"),
        ([([-1], 1)], "ids -1 to 7"),
        ([([1, SEPARATOR, 2], 3)], "holds the separator id 7 inside"),
        ([], "split train has no documents"),
    ],
)
def test_wrong_documents_are_refused_and_leave_nothing(tmp_path, train, words):
    with pytest.raises(StoreError, match=re.escape(words)):
        write(tmp_path / "store", train=train)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path):
    def documents():
        yield [1, 2], 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "store", heldout=documents())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_filled_meanwhile_is_left_alone(tmp_path):
    def documents():
        yield [1, 2], 2
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "mine").write_text("mine")

    with pytest.raises(StoreError, match="not empty"):
        write(tmp_path / "store", heldout=documents())
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "mine"]


def test_a_killed_write_leaves_no_store(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys
        from tests.test_store import write
        def documents():
            yield [1, 2], 2
            os.kill(os.getpid(), signal.SIGKILL)
        write(sys.argv[1], heldout=documents())
    """)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    killed = subprocess.run([sys.executable, "-c", script, tmp_path / "store"], cwd=root)
    assert killed.returncode == -signal.SIGKILL
    (rest,) = tmp_path.iterdir()  # what the kill left does not bear the store's name
    assert rest.name.startswith(".store.partial-")
    write(tmp_path / "store")
    assert open_store(tmp_path / "store").tokens("heldout")[:].tolist() == [5] * 6 + [7]


def test_an_empty_folder_is_filled_and_any_other_refused(tmp_path):
    (tmp_path / "store").mkdir()
    write(tmp_path / "store")
    with pytest.raises(StoreError, match="not empty"):
        write(tmp_path / "store")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="is a file"):
        write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert open_store(tmp_path / "store").vocab_size == VOCAB_SIZE
