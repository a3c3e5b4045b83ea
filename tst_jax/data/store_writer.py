"""Writes token stores: shards one by one, from any process, then the manifest that seals them."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tst_jax.data.store import (
    DOCUMENTS,
    FORMAT,
    MANIFEST,
    SPLITS,
    TOKENS,
    Store,
    StoreError,
    open_store,
    sha256_of_file,
    sha256_of_json,
    stored_dtype,
)
from tst_jax.data.vocabulary import Vocabulary

SHARD_TOKENS = 1 << 26  # about so many in a shard: 128 MiB as uint16


def write_shard(
    folder: Path,
    split: str,
    number: int,
    documents: Iterable[tuple[np.ndarray, int | None]],
    vocab_size: int,
    separator_id: int,
) -> dict[str, Any] | None:
    """Writes one shard and returns its entry for `seal`; None if there is no document.

    Args:
      folder: of the store to be.
      split, number: which shard.
      documents: (ids, UTF-8 bytes of their text, None if unknown), in order; ids end in the
        separator.
      vocab_size, separator_id: of the store.
    Raises:
      StoreError: an id outside the vocabulary; a document that does not end in the separator, or
        holds it inside.
    """
    name, dtype = f"{split}-{number:05d}", stored_dtype(vocab_size)
    offsets, text_bytes = [0], 0
    # Under another name until it is whole, and another for each process.
    partial = folder / f"{name}.partial-{os.getpid()}"
    with open(partial, "wb") as file:
        for ids, size in documents:
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise StoreError(
                    f"a document of {split} has ids {ids.min()} to {ids.max()}, the vocabulary "
                    f"0 to {vocab_size - 1}; give the tokenizer that made them"
                )
            if ids[-1] != separator_id or np.count_nonzero(ids == separator_id) != 1:
                raise StoreError(
                    f"a document of {split} holds the separator id {separator_id} inside its text, "
                    "or does not end in it; choose a separator that no text is encoded to"
                )
            file.write(ids.astype(dtype).tobytes())
            offsets.append(offsets[-1] + ids.size)
            text_bytes = None if size is None or text_bytes is None else text_bytes + int(size)
    if len(offsets) == 1:
        partial.unlink()
        return None
    os.replace(partial, folder / (name + TOKENS))
    with open(partial, "wb") as file:
        np.save(file, np.asarray(offsets, np.int64))
    os.replace(partial, folder / (name + DOCUMENTS))
    files = [folder / (name + end) for end in (TOKENS, DOCUMENTS)]
    figures = {"name": name, "tokens": offsets[-1], "documents": len(offsets) - 1}
    return figures | {"text_bytes": text_bytes, "files": signed(files)}


def signed(files: list[Path]) -> dict[str, dict[str, Any]]:
    """What the manifest says of files: name -> size and sha256."""
    return {
        file.name: {"bytes": file.stat().st_size, "sha256": sha256_of_file(file)[0]}
        for file in files
    }


def seal(
    folder: Path,
    path: Path,
    vocabulary: Vocabulary,
    special: dict[str, int | None],
    entries: dict[str, list],
    provenance: dict[str, Any],
    progress=lambda done, total: None,
) -> Store:
    """Writes tokenizer and manifest beside the shards in `folder`, verifies, renames it to `path`.

    Args:
      folder: holds the shards and nothing else.
      path: the store's folder: missing, or empty.
      vocabulary: of the ids.
      special: ids of `separator`, `bos`, `eos`; None for what is not used.
      entries: split -> what `write_shard` returned, in order.
      provenance: where the text came from; any JSON object.
      progress: of the verification, as for `open_store`.
    Raises:
      StoreError: a split without documents, or a store that does not open.
    """
    shards, files = {}, {}
    for split in SPLITS:
        shards[split] = []
        for entry in entries[split]:
            if entry is not None:
                files |= entry["files"]
                shards[split].append({k: v for k, v in entry.items() if k != "files"})
        if not shards[split]:
            raise no_documents(split)
    (folder / vocabulary.file).write_bytes(vocabulary.data)
    manifest = {
        "format": FORMAT,
        "vocab_size": vocabulary.size,
        "dtype": stored_dtype(vocabulary.size).name,
        "special": special,
        "vocabulary": {
            "kind": vocabulary.kind,
            "file": vocabulary.file,
            "sha256": vocabulary.sha256,
        },
        "shards": shards,
        "files": signed([folder / vocabulary.file]) | files,
        "provenance": provenance,
    }
    manifest["sha256"] = sha256_of_json(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    # Verified before it has its name: whoever finds `path` finds a store that opens.
    open_store(folder, progress=progress)
    check_writable(path)
    os.rename(folder, path)  # replaces an empty folder, fails on one filled meanwhile
    return Store(path, manifest)


def no_documents(split: str) -> StoreError:
    """What is wrong with a split that would be empty."""
    return StoreError(
        f"split {split} has no documents; give more documents, or another heldout_fraction or seed"
    )


def write_store(
    path: str | os.PathLike,
    *,
    vocabulary: Vocabulary,
    train: Iterable[tuple[Any, int | None]],
    heldout: Iterable[tuple[Any, int | None]],
    separator_id: int,
    provenance: dict[str, Any],
    shard_tokens: int = SHARD_TOKENS,
) -> Store:
    """Writes a store from documents as they come, in one process: for ids made elsewhere.

    Args:
      path: the folder to make; it may exist if it is empty. Missing parents are made.
      vocabulary: of the ids.
      train, heldout: documents as (ids, text_bytes): integers [n] without the separator, and the
        UTF-8 bytes of their text, or None. Read once, `train` first, a shard at a time.
      separator_id: written after every document.
      provenance: where they came from; any JSON object.
      shard_tokens: a shard ends with the document that reaches so many.
    Raises:
      StoreError: a folder that is not empty, and what `write_shard` and `seal` refuse. Nothing is
        then left at `path`.
    """
    path = Path(path).absolute()
    check_writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        entries = {}
        for split, documents in zip(SPLITS, (train, heldout)):
            entries[split] = []
            for part in _parts(documents, shard_tokens):
                ended = ((np.append(np.asarray(ids, np.int64), separator_id), n) for ids, n in part)
                place = partial, split, len(entries[split])
                entries[split].append(write_shard(*place, ended, vocabulary.size, separator_id))
        special = {"separator": int(separator_id), "bos": None, "eos": None}
        return seal(partial, path, vocabulary, special, entries, provenance)
    except BaseException:  # also Ctrl-C: half a store is of no use to anyone
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _parts(documents, shard_tokens):
    part, tokens = [], 0
    for ids, size in documents:
        part.append((ids, size))
        tokens += len(ids) + 1
        if tokens >= shard_tokens:
            yield part
            part, tokens = [], 0
    if part:
        yield part


def check_writable(path: Path) -> None:
    """Raises StoreError unless `path` is free: missing, or an empty folder."""
    if os.path.lexists(path) and not path.is_dir():
        raise StoreError(f"{path}: is a file; a store needs a folder: choose another path")
    if path.is_dir() and any(path.iterdir()):
        raise StoreError(
            f"{path}: the folder is not empty, and a store is never written over other files: "
            "choose another path or empty it"
        )
