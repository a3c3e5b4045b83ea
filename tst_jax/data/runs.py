"""From a corpus of any size to shards in a random order, in little memory and from many processes.

Each document has a key, a hash of its content and the seed. First, processes encode the units of a
source into *runs*: files of at most RUN_TOKENS ids whose documents are sorted by key. Then each
shard, which is a range of keys, is gathered from all runs and sorted. The keys are random numbers,
so this is a shuffle of all documents; which split a document belongs to follows from its key too;
and documents with the same content have the same key, lie side by side, and only one is kept.

The result depends on the documents, the vocabulary and the seed only: not on the order of the
files, the number of processes, or how often they were killed. A run appears by one rename, so a
process that starts again goes on after the last one of its unit.
"""

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tst_jax.data.sources import SourceError
from tst_jax.data.store import SPLITS, stored_dtype
from tst_jax.data.store_writer import write_shard
from tst_jax.data.vocabulary import Vocabulary

RUN_TOKENS = 1 << 25
# A batch is enough text to keep a tokenizer's threads busy; its encodings take far more memory
# than the text, so this, not the corpus, sets the peak.
_BATCH_CHARACTERS = 1 << 20
_KEYS = 1 << 64
_DOCUMENT = np.dtype(
    [("high", "<u8"), ("low", "<u8"), ("start", "<i8"), ("length", "<i8"), ("bytes", "<i8")]
)
_UNKNOWN = -1  # bytes of a document whose text nobody knows


@dataclasses.dataclass(frozen=True)
class Job:
    """What all processes know of the work; picklable."""

    folder: Path  # of the runs
    source: Any  # see sources.py
    vocabulary: Vocabulary
    bos: int | None
    eos: int | None
    separator: int
    heldout_fraction: float
    seed: int

    @property
    def dtype(self) -> np.dtype:
        return stored_dtype(self.vocabulary.size)


def document_key(content: str | np.ndarray, seed: int) -> tuple[int, int]:
    """128 random bits, as two numbers, that depend on a document's content and the seed only."""
    if isinstance(content, str):
        data = content.encode()
    else:
        data = np.ascontiguousarray(content, "<u4").data
    digest = hashlib.blake2b(data, digest_size=16, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def key_ranges(heldout_fraction: float) -> dict[str, tuple[int, int]]:
    """Split -> the first parts of its documents' keys, from, to."""
    end = round(heldout_fraction * _KEYS)
    return {"train": (end, _KEYS), "heldout": (0, end)}


# ---- units to runs


def encode_unit(job: Job, number: int, unit, tick: Callable[[int, int, int], None]) -> None:
    """Encodes what is left of a unit into runs.

    Args:
      job: the work.
      number: of the unit.
      unit: of `job.source`.
      tick: called with documents, bytes and ids since the last call.
    """
    if documents_read(job.folder, number) is not None:
        return
    found = list(_runs(job.folder, number))
    run = _Run(job, number, len(found))
    read = 0
    if found:
        read = found[-1]["read"]
        for figures in found:
            tick(*(sum(figures[s][what] for s in SPLITS) for what in ("documents", "bytes", "ids")))
    documents = itertools.islice(job.source.read(unit), read, None)
    for batch in _batches(documents):
        read += len(batch)
        batch = [document for document in batch if len(document)]
        encoded = _encode(job, unit, batch)
        run.add(encoded)
        tick(len(batch), sum(size for _, size, _ in encoded), sum(ids.size for *_, ids in encoded))
        if run.ids >= RUN_TOKENS:
            run.write(read)
            run = _Run(job, number, run.index + 1)
    if run.ids:
        run.write(read)
    _write_json(_unit(job.folder, number), {"name": unit.name, "documents": read})


def documents_read(folder: Path, number: int) -> int | None:
    """The documents of a unit, empty ones included; None if it is not done."""
    file = _unit(folder, number)
    return json.loads(file.read_text())["documents"] if file.exists() else None


def _unit(folder, number) -> Path:
    return folder / f"unit-{number:06d}.json"


def _encode(job: Job, unit, batch) -> list[tuple[Any, int, np.ndarray]]:
    """(content, bytes of its text, ids with the special ones) of each document."""
    if job.source.tokens:
        for ids in batch:
            if ids.min() < 0 or ids.max() >= job.vocabulary.size:
                raise SourceError(
                    f"{unit.name}: has ids {ids.min()} to {ids.max()}, the vocabulary 0 to "
                    f"{job.vocabulary.size - 1}; give the --tokenizer that made them"
                )
        sizes = [_UNKNOWN] * len(batch)
        if job.vocabulary.kind != "none":
            sizes = [len(text.encode()) for text in job.vocabulary.decode_batch(batch)]
        ids = batch
    else:
        sizes = [len(text.encode()) for text in batch]
        ids = job.vocabulary.encode_batch(batch)
    before = [] if job.bos is None else [job.bos]
    after = [job.separator] if job.eos in (None, job.separator) else [job.eos, job.separator]
    before, after = np.asarray(before, job.dtype), np.asarray(after, job.dtype)
    encoded = []
    for content, size, inside in zip(batch, sizes, ids):
        if np.any(inside == job.separator):
            raise SourceError(
                f"{unit.name}: a document is encoded to the separator id {job.separator} inside "
                f"its text ({str(content)[:40]!r}...); mark the separator as special in the "
                "tokenizer, or choose another --separator"
            )
        whole = np.concatenate([before, inside.astype(job.dtype), after])
        encoded.append((content, size, whole))
    return encoded


def _batches(documents) -> Iterator[list]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Run:
    """Encoded documents until they are sorted and written.

    Kept as one array a batch: an array a document would take far more memory than short documents.
    """

    def __init__(self, job: Job, unit: int, index: int):
        self.job, self.unit, self.index, self.ids = job, unit, index, 0
        self._batches, self._documents = [], []

    def add(self, batch):
        """What `_encode` returned."""
        documents = np.empty(len(batch), _DOCUMENT)
        for i, (content, size, ids) in enumerate(batch):
            documents[i] = *document_key(content, self.job.seed), 0, ids.size, size
        # Until `write`, `start` counts within the batch.
        documents["start"] = np.cumsum(documents["length"]) - documents["length"]
        self._documents.append(documents)
        self._batches.append(np.concatenate([np.empty(0, self.job.dtype), *(x[2] for x in batch)]))
        self.ids += self._batches[-1].size

    def write(self, read: int):
        """Puts the run in place; `read` documents of the unit are then done."""
        batch = np.repeat(np.arange(len(self._batches)), [len(part) for part in self._documents])
        documents = np.concatenate(self._documents)
        order = np.lexsort((documents["low"], documents["high"]))
        documents, batch = documents[order], batch[order]

        def write_ids(file):
            for b, (_, _, start, length, _) in zip(batch, documents):
                file.write(self._batches[b][start : start + length].data)

        stem = _stem(self.job.folder, self.unit, self.index)
        _replace(stem + ".ids", write_ids)
        documents["start"] = np.cumsum(documents["length"]) - documents["length"]
        _replace(stem + ".npy", lambda file: np.save(file, documents))
        figures = {"read": read}
        for split, (low, high) in key_ranges(self.job.heldout_fraction).items():
            part = documents[_between(documents, low, high)]
            names = {"documents": part.size, "ids": part["length"].sum(), "bytes": 0}
            names["bytes"] = part["bytes"][part["bytes"] >= 0].sum()
            figures[split] = {name: int(value) for name, value in names.items()}
        _write_json(Path(stem + ".json"), figures)  # last: it says that the run is whole


def _stem(folder, unit, index) -> str:
    return str(folder / f"run-{unit:06d}-{index:04d}")


def _replace(path, write):
    # Another name for each process: an orphan of a killed command may still be writing.
    partial = f"{path}.partial-{os.getpid()}"
    with open(partial, "wb") as file:
        write(file)
    os.replace(partial, path)


def _write_json(path: Path, value):
    _replace(path, lambda file: file.write(json.dumps(value).encode()))


def _runs(folder: Path, unit: int) -> Iterator[dict]:
    """What the finished runs of a unit say of themselves, in order."""
    for index in itertools.count():
        file = Path(_stem(folder, unit, index) + ".json")
        if not file.exists():
            return
        yield json.loads(file.read_text()) | {"stem": _stem(folder, unit, index)}


def _between(documents, low, high) -> slice:
    """The documents, sorted by key, whose keys begin with low <= number < high."""
    # 2**64 does not fit the keys' type.
    ends = [
        documents.size if x == _KEYS else int(np.searchsorted(documents["high"], np.uint64(x)))
        for x in (low, high)
    ]
    return slice(*ends)


# ---- runs to shards


def totals(folder: Path, units: int) -> dict[str, dict[str, int]]:
    """split -> documents, ids and bytes of all runs, duplicates included."""
    sums = {split: {"documents": 0, "ids": 0, "bytes": 0} for split in SPLITS}
    for number in range(units):
        for figures in _runs(folder, number):
            for split in SPLITS:
                for name in sums[split]:
                    sums[split][name] += figures[split][name]
    return sums


def merge_shard(job: Job, units: int, store: Path, split: str, number: int, count: int):
    """Writes shard `number` of `count` of a split into the folder `store`; its manifest entry.

    What is there already, from a command that was killed, is taken as it is.
    """
    done = job.folder / f"shard-{split}-{number:05d}.json"
    if done.exists():
        return json.loads(done.read_text())
    low, high = key_ranges(job.heldout_fraction)[split]
    ends = [low + (high - low) * k // count for k in (number, number + 1)]
    tables, pieces, before = [], [], 0
    for unit in range(units):
        for figures in _runs(job.folder, unit):
            documents = np.load(figures["stem"] + ".npy", mmap_mode="r")
            part = documents[_between(documents, *ends)]
            if part.size:
                start, ids = int(part["start"][0]), int(part["length"].sum())
                offset = start * job.dtype.itemsize
                found = np.fromfile(figures["stem"] + ".ids", job.dtype, ids, offset=offset)
                if found.size != ids:
                    raise SourceError(
                        f"{figures['stem']}.ids is cut off; delete {job.folder.parent} and begin "
                        "again"
                    )
                table = part.copy()
                table["start"] += before - start
                before += ids
                tables.append(table)
                pieces.append(found)
    table = np.concatenate(tables) if tables else np.empty(0, _DOCUMENT)
    ids = np.concatenate(pieces) if pieces else np.empty(0, job.dtype)
    del pieces, tables
    table = table[np.lexsort((table["low"], table["high"]))]
    same = (table["high"][1:] == table["high"][:-1]) & (table["low"][1:] == table["low"][:-1])
    table = table[np.append(True, ~same)[: table.size]]
    documents = (
        (ids[start : start + length], None if size == _UNKNOWN else size)
        for _, _, start, length, size in table  # row by row: a list of tuples is much larger
    )
    entry = write_shard(store, split, number, documents, job.vocabulary.size, job.separator)
    _write_json(done, entry)
    return entry
