"""The store: what is written comes back, and nothing damaged is opened."""

import hashlib
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from tst_jax.data.store import Store, StoreError, open_store, write_store

VOCAB_SIZE = 300
SEPARATOR_ID = 7
TRAIN = [([1, 2, 3], 10), ([], 0), ([299, 0], 4)]
HELDOUT = [([5] * 6, 6)]


def make_tokenizer(size=VOCAB_SIZE):
    return Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0"))


def write(path, train=TRAIN, heldout=HELDOUT, size=VOCAB_SIZE, provenance=None):
    return write_store(
        path,
        tokenizer=make_tokenizer(size),
        train=iter(train),
        heldout=iter(heldout),
        separator_id=SEPARATOR_ID,
        provenance=provenance or {"source": "test"},
    )


def sign(path, **changes):
    """Makes the manifest agree with the files as they now are, as a careful forger would."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest["tokenizer"]["sha256"] = manifest["files"]["tokenizer.json"]["sha256"]
    manifest |= changes
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def assert_refused(path, name, *words):
    with pytest.raises(StoreError) as caught:
        open_store(path)
    message = str(caught.value)
    assert str(path / name) in message
    assert "\n" not in message
    for word in words:
        assert word in message


def test_round_trip(tmp_path):
    written = write(tmp_path / "store", provenance={"source": "test", "fraction": 0.05})
    store = open_store(tmp_path / "store")
    assert store == written == pickle.loads(pickle.dumps(store))
    assert (store.vocab_size, store.separator_id) == (VOCAB_SIZE, SEPARATOR_ID)
    assert store.tokens("train").tolist() == [1, 2, 3, 7, 7, 299, 0, 7]
    assert store.documents("train").tolist() == [0, 4, 5, 8]
    assert store.tokens("heldout").tolist() == [5] * 6 + [7]
    assert store.documents("heldout").dtype == np.int64
    assert store.manifest["splits"]["train"] == {"tokens": 8, "documents": 3, "text_bytes": 14}
    assert store.manifest["provenance"] == {"source": "test", "fraction": 0.05}
    assert store.bytes_per_token("train") == 14 / 8
    assert store.tokenizer().get_vocab_size() == VOCAB_SIZE
    # The format is a promise to other readers: raw ids without a header.
    raw = (tmp_path / "store" / "train.tokens.bin").read_bytes()
    assert raw == np.array([1, 2, 3, 7, 7, 299, 0, 7], "<u2").tobytes()


def test_tokens_are_a_read_only_map(tmp_path):
    tokens = write(tmp_path / "store").tokens("train")
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize("size, dtype", [(65536, np.uint16), (65537, np.uint32)])
def test_ids_are_stored_as_narrow_as_the_vocabulary_allows(tmp_path, size, dtype):
    write(tmp_path / "store", train=[([size - 1], 1)], size=size)
    tokens = open_store(tmp_path / "store").tokens("train")
    assert tokens.dtype == dtype
    assert tokens.tolist() == [size - 1, SEPARATOR_ID]


def test_a_tokenizer_with_gaps_needs_a_row_for_its_largest_id(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7, "c": 20}, unk_token="a"))
    store = write_store(
        tmp_path / "store",
        tokenizer=tokenizer,
        train=[([20], 1)],
        heldout=[([0], 1)],
        separator_id=7,
        provenance={},
    )
    assert store.vocab_size == 21


def test_fingerprint_is_of_the_data_only(tmp_path):
    first = write(tmp_path / "first", provenance={"date": "yesterday"})
    again = write(tmp_path / "again", provenance={"date": "today"})
    other = write(tmp_path / "other", train=[([1, 2, 4], 10), *TRAIN[1:]])
    assert re.fullmatch("[0-9a-f]{64}", first.fingerprint)
    assert first.fingerprint == again.fingerprint != other.fingerprint


def test_unknown_split_is_refused(tmp_path):
    store = write(tmp_path / "store")
    for read in (store.tokens, store.documents, store.bytes_per_token):
        with pytest.raises(StoreError, match="no split 'valid'; a store has train and heldout"):
            read("valid")


# ---- writing


@pytest.mark.parametrize(
    "train, words",
    [
        ([([1], 1), ([300], 1)], "train document 1: ids span 7..300, the tokenizer has 0..299"),
        ([([-1], 1)], "ids span -1..7"),
        ([([1, SEPARATOR_ID, 2], 3)], "holds the separator id 7 inside"),
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


def test_a_killed_write_leaves_no_store_and_its_rest_is_cleaned_up(tmp_path):
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
    assert [entry.name for entry in tmp_path.iterdir()] == ["store"]
    assert open_store(tmp_path / "store").tokens("heldout").tolist() == [5] * 6 + [7]


def test_a_live_write_of_another_process_is_left_alone(tmp_path):
    alive = tmp_path / f".store.partial-{socket.gethostname()}-{os.getppid()}"
    elsewhere = tmp_path / ".store.partial-another-machine-1"
    neighbour = tmp_path / ".store2.partial-x-1"
    for folder in (alive, elsewhere, neighbour):
        folder.mkdir()
    os.utime(neighbour, (0, 0))
    write(tmp_path / "store")
    assert alive.is_dir() and elsewhere.is_dir() and neighbour.is_dir()
    os.utime(elsewhere, (0, 0))
    (tmp_path / "store").rename(tmp_path / "moved")
    write(tmp_path / "store")
    assert alive.is_dir() and not elsewhere.exists() and neighbour.is_dir()


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


# ---- damage


FILES = [
    "tokenizer.json",
    "train.tokens.bin",
    "train.documents.npy",
    "heldout.tokens.bin",
    "heldout.documents.npy",
]


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_damaged_file_is_refused_by_name(tmp_path, name):
    path = tmp_path / "store"
    write(path)
    file = path / name
    data = file.read_bytes()

    file.write_bytes(data[:-2])
    cut = "is not JSON" if name == "manifest.json" else f"has {len(data) - 2} bytes"
    assert_refused(path, name, cut)
    for position in (0, len(data) // 2, len(data) - 2):
        flipped = bytearray(data)
        flipped[position] ^= 1
        file.write_bytes(flipped)
        assert_refused(path, name)
    file.unlink()
    assert_refused(path, name, "missing")
    file.mkdir()
    assert_refused(path, name, "missing")
    file.rmdir()
    file.write_bytes(data)
    open_store(path)


def test_an_edited_manifest_is_refused(tmp_path):
    path = tmp_path / "store"
    write(path)
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"text_bytes": 14', '"text_bytes": 15'))
    assert_refused(path, "manifest.json", "changed since it was written")


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "is not JSON"),
        ("[]", "format is None, wanted 'tst_jax.store/1'"),
        ('{"format": "tst_jax.store/2"}', "format is 'tst_jax.store/2'"),
    ],
)
def test_an_unreadable_manifest_is_refused(tmp_path, text, words):
    write(tmp_path / "store")
    (tmp_path / "store" / "manifest.json").write_text(text)
    assert_refused(tmp_path / "store", "manifest.json", words)


# From here on the manifest agrees with the files: only the contents are wrong.


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    path = tmp_path / "store"
    write(path)
    ids = np.fromfile(path / "heldout.tokens.bin", "<u2")
    ids[2] = VOCAB_SIZE
    ids.tofile(path / "heldout.tokens.bin")
    sign(path)
    assert_refused(path, "heldout.tokens.bin", "holds id 300, the largest is 299")


@pytest.mark.parametrize(
    "offsets, words",
    [
        ([0, 4, 5, 7], "from 0 to 7, they must rise from 0 to 8"),
        ([1, 4, 5, 8], "from 1 to 8"),
        ([0, 5, 4, 8], "must rise"),
        ([0, 4, 4, 8], "must rise"),
        ([0, 3, 5, 8], "does not end in the separator 7"),
        ([0, 4, 8], "wants int64(4,)"),
        ([0.0, 4.0, 5.0, 8.0], "is float64"),
    ],
)
def test_wrong_offsets_are_refused(tmp_path, offsets, words):
    path = tmp_path / "store"
    write(path)
    np.save(path / "train.documents.npy", np.array(offsets))
    sign(path)
    assert_refused(path, "train.documents.npy", words)


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "store"
    write(path)
    (path / "train.documents.npy").write_bytes(b"not an array")
    sign(path)
    assert_refused(path, "train.documents.npy", "is not a NumPy array")
    (path / "tokenizer.json").write_bytes(b"{}")
    sign(path)
    assert_refused(path, "tokenizer.json", "is not a tokenizer")


def test_a_tokenizer_of_another_size_is_refused(tmp_path):
    path = tmp_path / "store"
    write(path)
    make_tokenizer(VOCAB_SIZE + 1).save(str(path / "tokenizer.json"))
    sign(path)
    assert_refused(path, "tokenizer.json", "has 301 tokens, manifest.json says 300")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"separator_id": VOCAB_SIZE}, "contradict"),
        ({"dtype": "uint32"}, "contradict"),
        ({"vocab_size": "300"}, "contradict"),
        ({"splits": {"train": {"tokens": 8}}}, "lacks an entry"),
        ({"files": {}}, "lacks an entry"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, changes, words):
    path = tmp_path / "store"
    write(path)
    sign(path, **changes)
    assert_refused(path, "manifest.json", words)


def test_a_token_count_that_is_not_the_file_s_is_refused(tmp_path):
    path = tmp_path / "store"
    splits = write(path).manifest["splits"]
    sign(path, splits={**splits, "train": {**splits["train"], "tokens": 9}})
    assert_refused(path, "train.tokens.bin", "has 16 bytes, which is not 9 ids")


def test_an_empty_split_is_refused(tmp_path):
    path = tmp_path / "store"
    splits = write(path).manifest["splits"]
    (path / "heldout.tokens.bin").write_bytes(b"")
    np.save(path / "heldout.documents.npy", np.zeros(1, np.int64))
    sign(path, splits={**splits, "heldout": {"tokens": 0, "documents": 0, "text_bytes": 0}})
    assert_refused(path, "heldout.tokens.bin", "has 0 bytes")


def test_a_missing_folder_says_how_to_make_one(tmp_path):
    with pytest.raises(StoreError) as caught:
        open_store(tmp_path / "none")
    command = f"python -m tst_jax.prepare --source=stdlib --out={tmp_path / 'none'}"
    assert command in str(caught.value)
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "manifest.json", "this is not a store")


def test_the_store_s_fields_cannot_be_reassigned(tmp_path):
    store = write(tmp_path / "store")
    assert isinstance(store, Store)
    with pytest.raises(AttributeError):
        store.path = tmp_path
