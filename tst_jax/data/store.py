"""The prepared token store: one folder of token ids, written once and checked at every opening.

Layout of a store folder:

    manifest.json                 what the folder holds, with size and sha256 of every file below
    tokenizer.json                what made the ids; the name depends on its kind (vocabulary.py)
    train-00000.tokens.bin        a shard: little-endian ids, document after document, no header
    train-00000.documents.npy     int64 offsets [documents + 1]: document i is ids[o[i]:o[i + 1]]
    train-00001...., heldout-00000....     more shards; the held-out split

A separator id ends every document and belongs to it. Ids are uint16 where the vocabulary allows it
(half the disk and page cache), else uint32. The shards of a split, in order, are one stream.
"""

import bisect
import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tst_jax.data.settings import VERIFY
from tst_jax.data.vocabulary import Vocabulary
from tst_jax.errors import UserError

FORMAT = "tst_jax.store/2"
SPLITS = ("train", "heldout")
MANIFEST = "manifest.json"
TOKENS, DOCUMENTS = ".tokens.bin", ".documents.npy"

_CHUNK = 1 << 22  # bytes hashed, and ids checked, at a time by each thread: memory stays flat
_THREADS = 16
# NumPy reads the head of a file with `ast`, which Python 3.11 lets only one thread use.
_ONE_AT_A_TIME = threading.Lock()
_ELSEWHERE = "give the folder of a tst_jax store, or prepare one in another folder"


class StoreError(UserError):
    """A store that is missing, damaged or not writable; the message names the file."""


class Shards:
    """Random access to the ids of a split as one stream: `tokens[a:b]` in the stored dtype.

    Memory-mapped, each shard from its first use on. A slice across shards is a copy.
    """

    def __init__(self, files: list[Path], sizes: list[int], dtype: np.dtype):
        self.dtype, self._files = dtype, files
        self._maps: list = [None] * len(files)
        self._starts = [0, *itertools.accumulate(sizes)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"a step of {step}; give a slice [start:stop]")
        pieces = []
        shard = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            first, end = self._starts[shard], min(stop, self._starts[shard + 1])
            pieces.append(self._shard(shard)[start - first : end - first])
            start, shard = end, shard + 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self[:], dtype)

    def _shard(self, number):
        if self._maps[number] is None:
            # Again, for a file that was cut since the store was opened would give short slices.
            file, size = self._files[number], self._starts[number + 1] - self._starts[number]
            _check_size(file, {"bytes": size * self.dtype.itemsize})
            # As an ndarray: slices of np.memmap itself cost a Python call each.
            found = np.memmap(file, dtype=self.dtype, mode="r")
            self._maps[number] = found.view(np.ndarray)
        return self._maps[number]


@dataclasses.dataclass(frozen=True)
class Store:
    """A verified store. Holds no open file, so it can be pickled to data workers."""

    path: Path
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def separator_id(self) -> int:
        return self.manifest["special"]["separator"]

    @property
    def beginning(self) -> list[int]:
        """Ids in front of a text that begins a document: the separator before it, and BOS."""
        bos = self.manifest["special"]["bos"]
        return [self.separator_id] if bos is None else [self.separator_id, bos]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the files and the vocabulary: equal only for the same data."""
        return sha256_of_json({key: self.manifest[key] for key in ("files", "vocabulary")})

    @property
    def vocabulary_sha256(self) -> str:
        return self.manifest["vocabulary"]["sha256"]

    def tokens(self, split: str) -> Shards:
        """All ids of a split, uint16 or uint32."""
        shards = self._shards(split)
        files = [self.path / (shard["name"] + TOKENS) for shard in shards]
        return Shards(files, [shard["tokens"] for shard in shards], stored_dtype(self.vocab_size))

    def documents(self, split: str) -> list[np.ndarray]:
        """Offsets of the documents of each shard, int64 [documents + 1], memory-mapped.

        They count from the shard's first token to its last.
        """
        files = [self.path / (shard["name"] + DOCUMENTS) for shard in self._shards(split)]
        # As ndarrays: slices of np.memmap itself cost a Python call each.
        load = lambda file: np.load(file, mmap_mode="r", allow_pickle=False).view(np.ndarray)
        try:
            return [load(file) for file in files]
        except ValueError as error:  # of a store that was opened with verify="sizes"
            raise StoreError(f"{self.path}: {split} documents cannot be read ({error})") from None

    def count(self, split: str, what: str) -> int | None:
        """`tokens`, `documents` or `text_bytes` of a split; bytes are None where nobody knows."""
        figures = [shard[what] for shard in self._shards(split)]
        return None if None in figures else sum(figures)

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of text per token; separators count as tokens and as zero bytes.

        A mean loss of x nats per token is x / (ln 2 * bytes_per_token) bits per byte. None for a
        store of ready-made ids without their tokenizer.
        """
        size = self.count(split, "text_bytes")
        return None if size is None else size / self.count(split, "tokens")

    def vocabulary(self) -> Vocabulary:
        described = self.manifest["vocabulary"]
        return Vocabulary(described["kind"], (self.path / described["file"]).read_bytes())

    def _shards(self, split):
        if split not in SPLITS:
            raise StoreError(f"{self.path}: no split {split!r}; a store has {' and '.join(SPLITS)}")
        return self.manifest["shards"][split]


def open_store(
    path: str | os.PathLike,
    verify: str = "all",
    part: tuple[int, int] = (0, 1),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Store:
    """Opens a store after checking it: every file's size and sha256, and every id.

    Ids are checked because a gather would clamp a wrong one silently.

    Args:
      path: the folder.
      verify: `all`: this process reads all of it once. `shared`: shards number i, i + n, ... of
        `part` = (i, n), the rest being checked by the other processes that see the same folder.
        `sizes`: no shard is read, but its size compared; for a store that was verified before.
      part: see `shared`.
      progress: called with bytes that are checked and bytes to check.
    Raises:
      StoreError: in one line with the file's name, for anything missing, changed or inconsistent.
    """
    path = Path(path).absolute()
    if verify not in VERIFY:
        raise StoreError(f"verify is {verify!r}; choose one of {', '.join(VERIFY)}")
    if not path.is_dir():
        raise StoreError(
            f"{path}: no such folder; make a store with `python -m tst_jax.prepare --out={path}` "
            "and a --source (--help lists them; stdlib needs no download)"
        )
    try:
        manifest = _read_manifest(path / MANIFEST)
        store = Store(path, manifest)
        for name, signed in manifest["files"].items():
            _check_size(path / name, signed)
        _check_vocabulary(store)
        numbered = [(split, shard) for split in SPLITS for shard in manifest["shards"][split]]
        if verify == "shared":
            numbered = numbered[part[0] :: part[1]]
        if verify != "sizes":
            _check_shards(store, numbered, progress)
    except OSError as error:
        raise StoreError(f"{error.filename or path}: cannot be read ({error.strerror})") from error
    return store


def _read_manifest(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise StoreError(f"{file}: missing, so this is not a store; {_ELSEWHERE}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(f"{file}: is not JSON ({error}); {_ELSEWHERE}") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found != FORMAT:
        raise StoreError(f"{file}: format is {found!r}, wanted {FORMAT!r}; {_ELSEWHERE}")
    # The digest also covers what no file repeats, such as text_bytes behind bits per byte.
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    if manifest.get("sha256") != sha256_of_json(body):
        raise _damaged(file, "changed since it was written (sha256 differs)")
    try:
        problem = _contradiction(manifest)
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, f"lacks an entry of {FORMAT} ({error})") from error
    if problem:
        raise _damaged(file, f"has entries that contradict each other ({problem})")
    return manifest


def _contradiction(manifest) -> str | None:
    """What in a manifest cannot be; also raises KeyError or TypeError for what is absent."""
    size, special, files = manifest["vocab_size"], manifest["special"], manifest["files"]
    wanted = {manifest["vocabulary"]["file"]}
    for split in SPLITS:
        if not manifest["shards"][split]:
            return f"{split} has no shard"
        for shard in manifest["shards"][split]:
            wanted |= {shard["name"] + TOKENS, shard["name"] + DOCUMENTS}
            itemsize = stored_dtype(size).itemsize
            if files[shard["name"] + TOKENS]["bytes"] != shard["tokens"] * itemsize:
                return f"size of {shard['name']}"
            if not 0 < shard["documents"] <= shard["tokens"]:
                return f"documents of {shard['name']}"
            if not (shard["text_bytes"] is None or shard["text_bytes"] >= 0):
                return f"text_bytes of {shard['name']}"
    if set(files) != wanted or any(Path(name).name != name for name in files):
        return "the names of files"
    for name in ("separator", "bos", "eos"):
        found = special[name]
        absent = found is None and name != "separator"
        if not absent and not (type(found) is int and 0 <= found < size):
            return f"special {name}"
    if manifest["dtype"] != stored_dtype(size).name:
        return "dtype"
    return None if isinstance(manifest["provenance"], dict) else "provenance"


def _check_size(file: Path, signed: dict[str, Any]) -> None:
    if not file.is_file():
        raise _damaged(file, "missing")
    if (size := file.stat().st_size) != signed["bytes"]:
        raise _damaged(file, f"has {size} bytes, was written with {signed['bytes']}")


def _check_vocabulary(store: Store) -> None:
    described = store.manifest["vocabulary"]
    file = store.path / described["file"]
    if sha256_of_file(file)[0] != store.manifest["files"][described["file"]]["sha256"]:
        raise _damaged(file, "changed since it was written (sha256 differs)")
    found = store.vocabulary()
    if found.sha256 != described["sha256"] or found.size != store.vocab_size:
        raise _damaged(file, f"holds {found.describe()}, {MANIFEST} names another vocabulary")


def _check_shards(store: Store, numbered, progress) -> None:
    files = store.manifest["files"]
    sizes = [files[shard["name"] + TOKENS]["bytes"] for _, shard in numbered]
    done, total = 0, sum(sizes)
    # Hashing and NumPy release the lock of Python, so threads are enough.
    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(_check_shard, store, shard) for _, shard in numbered]
        try:
            for future, size in zip(futures, sizes):
                future.result()
                done += size
                progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _check_shard(store: Store, shard: dict[str, Any]) -> None:
    signed = store.manifest["files"]
    dtype = stored_dtype(store.vocab_size)
    file = store.path / (shard["name"] + TOKENS)
    digest, largest = sha256_of_file(file, dtype)
    if digest != signed[file.name]["sha256"]:
        raise _damaged(file, "changed since it was written (sha256 differs)")
    if largest >= store.vocab_size:
        raise _damaged(file, f"holds id {largest}, the largest is {store.vocab_size - 1}")

    documents = store.path / (shard["name"] + DOCUMENTS)
    if sha256_of_file(documents)[0] != signed[documents.name]["sha256"]:
        raise _damaged(documents, "changed since it was written (sha256 differs)")
    try:
        with _ONE_AT_A_TIME:
            offsets = np.load(documents, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _damaged(documents, f"is not a NumPy array ({error})") from error
    shape, size = (shard["documents"] + 1,), shard["tokens"]
    if offsets.dtype != np.int64 or offsets.shape != shape:
        found = f"{offsets.dtype}{offsets.shape}"
        raise _damaged(documents, f"is {found}, {MANIFEST} wants int64{shape}")
    if offsets[0] != 0 or offsets[-1] != size or np.any(np.diff(offsets) <= 0):
        found = f"offsets run from {offsets[0]} to {offsets[-1]}"
        raise _damaged(documents, f"{found}, they must rise from 0 to {size}")
    tokens = np.memmap(file, dtype=dtype, mode="r")
    if np.any(tokens[offsets[1:] - 1] != store.separator_id):
        raise _damaged(documents, f"a document does not end in the separator {store.separator_id}")


def sha256_of_file(file: Path, dtype: np.dtype | None = None) -> tuple[str, int]:
    """(sha256 in hex, the largest number in the file if a dtype is given, else -1); one read."""
    digest, largest = hashlib.sha256(), -1
    with open(file, "rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
            if dtype is not None and len(chunk) % dtype.itemsize == 0:
                largest = max(largest, int(np.frombuffer(chunk, dtype).max()))
    return digest.hexdigest(), largest


def _damaged(file: Path, found: str) -> StoreError:
    return StoreError(f"{file}: {found}; delete the store and prepare it again")


def stored_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def sha256_of_json(value: Any) -> str:
    """Of the canonical form, so that key order and white space do not matter."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
