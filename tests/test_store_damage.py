"""Nothing damaged is opened: a cut, missing or altered file of a store is refused by its name."""

import hashlib
import json
import random
import re
import shutil

import numpy as np
import pytest
from test_store import VOCAB_SIZE, write, write_several

from tst_jax.data import store as store_module
from tst_jax.data.store import StoreError, open_store
from tst_jax.data.vocabulary import ids_only


def sign(path, change=lambda manifest: None):
    """Makes the manifest agree with the files as they now are, as a careful forger would."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    for name in manifest["files"]:
        data = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(manifest)
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def assert_refused(path, name, *words, **options):
    with pytest.raises(StoreError) as caught:
        open_store(path, **options)
    message = str(caught.value)
    assert str(path / name) in message and "\n" not in message
    for word in words:
        assert word in message


def everything(store):
    """All that a reader can get out of a store."""
    tokens = [store.tokens(split)[:].tolist() for split in store_module.SPLITS]
    documents = [[o.tolist() for o in store.documents(split)] for split in store_module.SPLITS]
    whats = ("tokens", "documents", "text_bytes")
    counts = [store.count(s, what) for s in store_module.SPLITS for what in whats]
    vocabulary = store.vocabulary()
    texts = vocabulary.decode_batch([[65, 66, 200], [256]])
    described = store.fingerprint, store.vocab_size, store.beginning, store.manifest
    return tokens, documents, counts, vocabulary, texts, described


def damage(rng, folder):
    """Does one thing to a store that disks, copies and people do; returns (what, files)."""
    files = sorted(folder.iterdir())
    # Each kind of file as often as the others, though most files are shards.
    kinds = [[f for f in files if f.name.endswith(e)] for e in (".bin", ".npy", "t.json", "r.json")]
    file, other = rng.choice(rng.choice(kinds)), rng.choice(files)
    data = bytearray(file.read_bytes())
    start, length = rng.randrange(len(data)), rng.randrange(1, 40)
    what = rng.choice(["cut", "flip", "swap files", "swap ranges", "delete", "rename", "append"])
    if what == "cut":
        file.write_bytes(data[:start])
    elif what == "flip":
        data[start] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
    elif what == "swap files":
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return what, [file, other]
    elif what == "swap ranges":
        length = min(length, len(data) // 2)
        start = rng.randrange(len(data) - 2 * length + 1)
        first, second = data[start : start + length], data[-length:]
        data[start : start + length], data[-length:] = second, first
        file.write_bytes(data)
    elif what == "delete":
        file.unlink()
    elif what == "rename":
        file.rename(folder / (file.name + ".old"))
    else:
        file.write_bytes(data + rng.choice([b"\0", b"\n", b" ", data[:length], rng.randbytes(9)]))
    return what, [file]


def test_200_random_damages_are_refused_by_name_or_change_nothing(tmp_path):
    write_several(tmp_path / "whole")
    whole = everything(open_store(tmp_path / "whole"))
    rng, refused, seen = random.Random(0), 0, set()
    for number in range(200):
        folder = tmp_path / "store"
        shutil.copytree(tmp_path / "whole", folder)
        what, files = damage(rng, folder)
        seen.add((what, files[0].suffix))
        case = number, what, files
        try:
            found = everything(open_store(folder))
        except StoreError as error:
            refused += 1
            assert "\n" not in str(error), case
            assert any(str(file) in str(error) for file in files), (case, str(error))
        else:
            assert found == whole, case
        shutil.rmtree(folder)
    # Harmless is little: white space in the manifest, a file against itself.
    assert 180 < refused < 200 and len(seen) > 18


def test_a_shard_is_not_clamped_if_it_is_cut_after_opening(tmp_path):
    store, whole = write_several(tmp_path / "store")
    tokens = store.tokens("train")
    file = tmp_path / "store" / "train-00003.tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(StoreError, match=re.escape(str(file))):
        tokens[:]
    file.unlink()
    with pytest.raises(StoreError, match=r"train-00003\.tokens\.bin: missing"):
        tokens[:]


def test_shared_parts_cover_every_shard_and_sizes_reads_none(tmp_path, monkeypatch):
    path = tmp_path / "store"
    write_several(path)
    everywhere = {f.name for f in path.iterdir() if f.suffix in (".bin", ".npy")}
    read = []
    original = store_module.sha256_of_file
    record = lambda file, *rest: read.append(file.name) or original(file, *rest)
    monkeypatch.setattr(store_module, "sha256_of_file", record)
    for count in (1, 2, 3, 50):
        read.clear()
        for index in range(count):
            open_store(path, "shared", (index, count))
        shards = [name for name in read if not name.startswith("tokenizer")]
        assert sorted(shards) == sorted(everywhere)  # each once
    read.clear()
    open_store(path, "sizes")
    assert not everywhere & set(read)

    # A change is found by who reads it, a cut one by everybody.
    file = path / "train-00001.tokens.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    open_store(path, "sizes")
    open_store(path, "shared", (0, 2))
    assert_refused(path, file.name, "sha256 differs", verify="shared", part=(1, 2))
    file.write_bytes(data[:-2])
    for options in ({"verify": "sizes"}, {"verify": "shared", "part": (0, 2)}):
        assert_refused(path, file.name, "bytes", **options)
    with pytest.raises(StoreError, match="verify is 'some'; choose one of all, shared, sizes"):
        open_store(path, "some")


def test_progress_of_verifying_reaches_the_end(tmp_path):
    write_several(tmp_path / "store")
    seen = []
    open_store(tmp_path / "store", progress=lambda done, total: seen.append((done, total)))
    total = sum(f.stat().st_size for f in (tmp_path / "store").glob("*.bin"))
    assert seen == sorted(seen) and seen[-1] == (total, total)


# From here on the manifest agrees with the files: only the contents are wrong.


def test_an_id_outside_the_vocabulary_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_CHUNK", 8)  # found in every chunk
    for position in (0, 5, 6):
        path = tmp_path / f"store{position}"
        write(path)
        ids = np.fromfile(path / "heldout-00000.tokens.bin", "<u2")
        ids[position] = VOCAB_SIZE
        ids.tofile(path / "heldout-00000.tokens.bin")
        sign(path)
        assert_refused(path, "heldout-00000.tokens.bin", "holds id 300, the largest is 299")


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
        (b"not an array", "is not a NumPy array"),
    ],
)
def test_wrong_offsets_are_refused(tmp_path, offsets, words):
    write(path := tmp_path / "store")
    file = path / "train-00000.documents.npy"
    file.write_bytes(offsets) if isinstance(offsets, bytes) else np.save(file, np.array(offsets))
    sign(path)
    assert_refused(path, file.name, words)


def test_a_vocabulary_that_is_not_the_manifest_s_is_refused(tmp_path):
    write(path := tmp_path / "store")
    (path / "tokenizer.none.json").write_bytes(ids_only(VOCAB_SIZE + 1).data)
    sign(path)
    assert_refused(path, "tokenizer.none.json", "301 tokens", "names another vocabulary")


def set_in(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(manifest):
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value

    return change


@pytest.mark.parametrize(
    "change, words",
    [
        (set_in("special", "separator", VOCAB_SIZE), "contradict"),
        (set_in("special", "separator", None), "contradict"),
        (set_in("special", "bos", -1), "contradict"),
        (set_in("dtype", "uint32"), "contradict"),
        (set_in("vocab_size", "300"), "lacks an entry"),
        (set_in("shards", {"train": []}), "contradict"),
        (set_in("shards", "heldout", []), "heldout has no shard"),
        (set_in("shards", "train", 0, "tokens", 9), "size of train-00000"),
        (set_in("shards", "train", 0, "documents", 0), "documents of train-00000"),
        (set_in("shards", "train", 0, "text_bytes", -1), "text_bytes of train-00000"),
        (set_in("files", {}), "lacks an entry"),
        (set_in("files", "../other", {"bytes": 1, "sha256": ""}), "the names of files"),
        (set_in("provenance", None), "provenance"),
        (set_in("format", "tst_jax.store/1"), "format is 'tst_jax.store/1'"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path, change, words):
    write(path := tmp_path / "store")
    sign(path, change)
    assert_refused(path, "manifest.json", words)


@pytest.mark.parametrize("text", ["{", "[]", "{}", "null", "\udcff", ""])
def test_what_is_no_manifest_is_refused(tmp_path, text):
    write(path := tmp_path / "store")
    (path / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    assert_refused(path, "manifest.json", "give the folder of a tst_jax store")


def test_a_missing_folder_says_how_to_make_one(tmp_path):
    command = f"python -m tst_jax.prepare --out={tmp_path / 'none'}"
    with pytest.raises(StoreError, match=re.escape(command)):
        open_store(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "manifest.json", "this is not a store")
