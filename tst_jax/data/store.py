"""The prepared token store: one folder of token ids, written once and checked at every opening.

Layout of a store folder:

    manifest.json           what the folder holds, with the size and sha256 of every file below
    tokenizer.json          the tokenizer that made the ids (`tokenizers` format)
    train.tokens.bin        raw little-endian ids, document after document, no header
    train.documents.npy     int64 offsets [documents + 1]: document i is tokens[o[i]:o[i + 1]]
    heldout.tokens.bin, heldout.documents.npy     the same for the held-out split

A separator id ends every document and belongs to it, so the last offset is the number of tokens.
Ids are uint16 where the vocabulary allows it (half the disk and page cache), else uint32.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tst_jax.errors import UserError

FORMAT = "tst_jax.store/1"
SPLITS = ("train", "heldout")
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"

_CHUNK = 1 << 24  # bytes hashed, or ids checked, at a time: memory stays flat on large stores
_FILES = (TOKENIZER, *(f"{s}.{end}" for s in SPLITS for end in ("tokens.bin", "documents.npy")))
_ABANDONED_SECONDS = 7 * 24 * 3600
_ELSEWHERE = "give the folder of a tst_jax store, or prepare one in another folder"


class StoreError(UserError):
    """A store that is missing, damaged or not writable; the message names the file."""


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
        return self.manifest["separator_id"]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of the files and the vocabulary size: equal only for the same data."""
        return _sha256_of_json({key: self.manifest[key] for key in ("files", "vocab_size")})

    def tokens(self, split: str) -> np.memmap:
        """All ids of a split, a read-only map [tokens] in the stored dtype (uint16 or uint32)."""
        file = self.path / f"{self._known(split)}.tokens.bin"
        return np.memmap(file, dtype=_stored_dtype(self.vocab_size), mode="r")

    def documents(self, split: str) -> np.ndarray:
        """Offsets of a split's documents, int64 [documents + 1], from 0 to the number of tokens."""
        return np.load(self.path / f"{self._known(split)}.documents.npy", allow_pickle=False)

    def bytes_per_token(self, split: str) -> float:
        """UTF-8 bytes of text per token; separators count as tokens and as zero bytes.

        A mean loss of x nats per token is x / (ln 2 * bytes_per_token) bits per byte.
        """
        figures = self.manifest["splits"][self._known(split)]
        return figures["text_bytes"] / figures["tokens"]

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.path / TOKENIZER))

    def _known(self, split: str) -> str:
        if split not in SPLITS:
            raise StoreError(f"{self.path}: no split {split!r}; a store has {' and '.join(SPLITS)}")
        return split


def tokenizer_vocab_size(tokenizer: Tokenizer) -> int:
    """Rows an embedding needs: the largest id + 1 (a tokenizer's ids may have gaps)."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def sha256_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


# ---- writing


def write_store(
    path: str | os.PathLike,
    *,
    tokenizer: Tokenizer,
    train: Iterable[tuple[Any, int]],
    heldout: Iterable[tuple[Any, int]],
    separator_id: int,
    provenance: dict[str, Any],
) -> Store:
    """Writes a store as a stream and puts it in place by one rename.

    Args:
      path: the folder to make; it may exist if it is empty. Missing parents are made.
      tokenizer: saved beside the ids; its size becomes the store's `vocab_size`.
      train, heldout: documents as (ids, text_bytes): integer ids [n] without the separator, and
        the UTF-8 bytes of their text. Read once, `train` first; only offsets stay in memory.
      separator_id: written after every document.
      provenance: where the text came from; any JSON object.

    Raises StoreError for a folder that is not empty, an id outside the vocabulary, a document that
    holds the separator, and a split without documents. Nothing is then left under `path`, nor
    after a kill: files are written in a sibling folder that the next write to `path` removes.
    """
    path = Path(path).absolute()
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    partial = path.with_name(f".{path.name}.partial-{socket.gethostname()}-{os.getpid()}")
    partial.mkdir()
    try:
        vocab_size, kind = tokenizer_vocab_size(tokenizer), type(tokenizer.model).__name__
        tokenizer.save(str(partial / TOKENIZER))
        splits = {
            split: _write_split(partial, split, documents, vocab_size, separator_id)
            for split, documents in zip(SPLITS, (train, heldout))
        }
        files = {
            name: {"bytes": file.stat().st_size, "sha256": sha256_of_file(file)}
            for name in _FILES
            for file in [partial / name]
        }
        manifest = {
            "format": FORMAT,
            "vocab_size": vocab_size,
            "dtype": _stored_dtype(vocab_size).name,
            "separator_id": int(separator_id),
            "tokenizer": {"kind": kind, "sha256": files[TOKENIZER]["sha256"]},
            "splits": splits,
            "files": files,
            "provenance": provenance,
        }
        manifest["sha256"] = _sha256_of_json(manifest)
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        # Verified before it has its name: whoever finds `path` finds a store that opens.
        manifest = open_store(partial).manifest
        os.rename(partial, path)  # replaces an empty folder, fails on one filled meanwhile
    except BaseException:  # also Ctrl-C: half a store is of no use to anyone
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return Store(path, manifest)


def check_writable(path: Path) -> None:
    """Raises StoreError unless `path` is free: missing, or an empty folder."""
    if os.path.lexists(path) and not path.is_dir():
        raise StoreError(f"{path}: is a file; a store needs a folder: choose another path")
    if path.is_dir() and any(path.iterdir()):
        raise StoreError(
            f"{path}: the folder is not empty, and a store is never written over other files: "
            "choose another path or empty it"
        )


def _write_split(folder, split, documents, vocab_size, separator_id) -> dict[str, int]:
    dtype = _stored_dtype(vocab_size)
    offsets, text_bytes = [0], 0
    with open(folder / f"{split}.tokens.bin", "wb") as file:
        for number, (ids, size) in enumerate(documents):
            ids = np.append(np.asarray(ids, np.int64), separator_id)
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise StoreError(
                    f"{split} document {number}: ids span {ids.min()}..{ids.max()}, the tokenizer "
                    f"has 0..{vocab_size - 1}: encode with the tokenizer that is stored"
                )
            if np.count_nonzero(ids == separator_id) != 1:
                raise StoreError(
                    f"{split} document {number}: holds the separator id {separator_id} inside its "
                    "text: mark the separator as special in the tokenizer, and encode its "
                    "spelling as plain text"
                )
            file.write(ids.astype(dtype).tobytes())
            offsets.append(offsets[-1] + ids.size)
            text_bytes += int(size)
    if len(offsets) == 1:
        raise StoreError(f"split {split} has no documents: give at least one to each split")
    np.save(folder / f"{split}.documents.npy", np.asarray(offsets, np.int64))
    return {"tokens": offsets[-1], "documents": len(offsets) - 1, "text_bytes": text_bytes}


def _remove_abandoned(path: Path) -> None:
    """Removes what killed writes of `path` left, and nothing that a live one may still write."""
    pattern = re.compile(re.escape(f".{path.name}.partial-") + r"(.+)-(\d+)")
    for folder in path.parent.glob(".*.partial-*"):
        if match := pattern.fullmatch(folder.name):
            # Another machine's process cannot be asked; its folder counts as abandoned by age.
            old = time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS
            if old or match[1] == socket.gethostname() and not _is_running(int(match[2])):
                shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    if process == os.getpid():
        return False  # this one has only begun: an earlier process had the same number
    if os.name == "nt":
        return True  # os.kill(_, 0) is not a question there
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True


# ---- opening


def open_store(path: str | os.PathLike) -> Store:
    """Opens a store after checking all of it: every file's size and sha256, and every id.

    Reads the whole store once. Raises StoreError, with the file's name, for anything missing,
    changed or inconsistent; ids are checked because a gather would clamp a wrong one silently.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise StoreError(
            f"{path}: no such folder; make a store with "
            f"`python -m tst_jax.prepare --source=stdlib --out={path}`"
        )
    try:
        manifest = _read_manifest(path / MANIFEST)
        for name in _FILES:
            _check_file(path / name, manifest["files"][name])
        _check_tokenizer(path / TOKENIZER, manifest)
        store = Store(path, manifest)
        for split in SPLITS:
            _check_split(store, split)
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
    if manifest.get("sha256") != _sha256_of_json(body):
        raise _damaged(file, "changed since it was written (sha256 differs)")
    try:
        vocab_size, separator_id = manifest["vocab_size"], manifest["separator_id"]
        counts = ("tokens", "documents", "text_bytes")
        figures = [manifest["splits"][split][key] for split in SPLITS for key in counts]
        sizes = [manifest["files"][name]["bytes"] for name in _FILES]
        valid = (
            all(type(value) is int for value in (vocab_size, separator_id, *figures, *sizes))
            and 0 <= separator_id < vocab_size
            and manifest["dtype"] == _stored_dtype(vocab_size).name
            and manifest["tokenizer"]["sha256"] == manifest["files"][TOKENIZER]["sha256"]
            and isinstance(manifest["provenance"], dict)
        )
    except (KeyError, TypeError) as error:
        raise _damaged(file, f"lacks an entry of {FORMAT} ({error})") from error
    if not valid:
        raise _damaged(file, "has entries that contradict each other")
    return manifest


def _check_file(file: Path, signed: dict[str, Any]) -> None:
    if not file.is_file():
        raise _damaged(file, "missing")
    if (size := file.stat().st_size) != signed["bytes"]:
        raise _damaged(file, f"has {size} bytes, was written with {signed['bytes']}")
    if sha256_of_file(file) != signed["sha256"]:
        raise _damaged(file, "changed since it was written (sha256 differs)")


def _check_tokenizer(file: Path, manifest: dict[str, Any]) -> None:
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise _damaged(file, f"is not a tokenizer ({error})") from error
    size = tokenizer_vocab_size(tokenizer)
    if size != manifest["vocab_size"]:
        raise _damaged(file, f"has {size} tokens, {MANIFEST} says {manifest['vocab_size']}")


def _check_split(store: Store, split: str) -> None:
    figures = store.manifest["splits"][split]
    file = store.path / f"{split}.tokens.bin"
    size = file.stat().st_size
    if size != figures["tokens"] * _stored_dtype(store.vocab_size).itemsize or not size:
        raise _damaged(file, f"has {size} bytes, which is not {figures['tokens']} ids")
    tokens = store.tokens(split)
    for start in range(0, tokens.size, _CHUNK):
        largest = int(tokens[start : start + _CHUNK].max())
        if largest >= store.vocab_size:
            raise _damaged(file, f"holds id {largest}, the largest is {store.vocab_size - 1}")

    file = store.path / f"{split}.documents.npy"
    try:
        offsets = store.documents(split)
    except (ValueError, EOFError) as error:
        raise _damaged(file, f"is not a NumPy array ({error})") from error
    shape = (figures["documents"] + 1,)
    if offsets.dtype != np.int64 or offsets.shape != shape:
        raise _damaged(file, f"is {offsets.dtype}{offsets.shape}, {MANIFEST} wants int64{shape}")
    if offsets[0] != 0 or offsets[-1] != tokens.size or np.any(np.diff(offsets) <= 0):
        found = f"offsets run from {offsets[0]} to {offsets[-1]}"
        raise _damaged(file, f"{found}, they must rise from 0 to {tokens.size}")
    if np.any(tokens[offsets[1:] - 1] != store.separator_id):
        raise _damaged(file, f"a document does not end in the separator {store.separator_id}")


def _damaged(file: Path, found: str) -> StoreError:
    return StoreError(f"{file}: {found}; delete the store and prepare it again")


def _stored_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _sha256_of_json(value: Any) -> str:
    """Of the canonical form, so that key order and white space do not matter."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
