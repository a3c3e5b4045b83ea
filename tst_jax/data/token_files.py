"""Files of token ids that another project wrote: llm.c's, and the indexed ones of Megatron-LM.

They hold no text and name no tokenizer, so a mistake in them would train on garbage in silence:
headers and indices are checked against the sizes of the files before any work begins.
"""

import dataclasses
import itertools
import os
import struct
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from tst_jax.data import units
from tst_jax.data.units import (
    Unit,
    matching_files,
    open_file,
    ranges,
    read_array,
    require,
    units_of_each,
    units_of_indices,
)

LARGEST_DOCUMENT = 1 << 25  # tokens; a longer one in an LlmC file means a wrong separator

_LLMC_HEADER = 1024
_LLMC_KINDS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}  # magic: version, ids

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = 34
_MEGATRON_IDS = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclasses.dataclass(frozen=True)
class LlmC:
    """Token files of llm.c and modded-nanogpt: documents are what lies between separators.

    A file is 256 int32 (magic, version, count of tokens) and then uint16 ids, or uint32 in llm.c's
    variant for Llama. Yields 1-D uint16 or uint32 ids without separators; empty documents are left
    out. A unit is what begins in a range of tokens right after a separator. A document that the end
    of a file cuts becomes two documents, for nothing says that files go on in each other. units()
    raises SourceError if a file's header is foreign or its size is not what the header says, and
    read() for a document of over 33 million tokens: a wrong `separator_id` matches nowhere.
    """

    files: str
    separator_id: int
    tokens: ClassVar[bool] = True

    def units(self) -> list[Unit]:
        return units_of_each(self._units_of, matching_files(self.files))

    def _units_of(self, found: tuple[str, int]) -> list[Unit]:
        path, size = found
        with open_file(path) as file:
            header = file.read(_LLMC_HEADER)
        # The header may be cut short, and its magic is checked first.
        magic, version, count = struct.unpack("<3i", header[:12].ljust(12, b"\0"))
        known, dtype = _LLMC_KINDS.get(magic, (None, "<u2"))
        require(
            version == known,
            f"{path}: begins with magic {magic}, version {version}; must be 20240520 with 1 or "
            "20240801 with 7: give token files of llm.c",
        )
        width = np.dtype(dtype).itemsize
        needed = _LLMC_HEADER + count * width
        require(
            count >= 0 and size == needed,
            f"{path}: has {size} bytes, its header says {count} tokens, {needed} bytes; "
            "copy it again",
        )
        _check_separator(self.separator_id, dtype, path)
        return [
            Unit(f"{path} tokens {i}-{j}", (j - i) * width, (path, dtype, count, i, j))
            for i, j in ranges(count, max(units.UNIT_BYTES // width, 1))
        ]

    def read(self, unit: Unit) -> Iterator[np.ndarray]:
        path, dtype, count, first, last = unit.args
        width = np.dtype(dtype).itemsize
        begun = first == 0  # else all up to the next separator belongs to an earlier unit
        position = max(first - 1, 0)  # what stands before `first` may be that separator
        pieces: list[np.ndarray] = []
        length = 0
        with open_file(path) as file:
            while position < count:
                here = min(units.BLOCK // width, count - position)
                block = read_array(file, _LLMC_HEADER + position * width, dtype, here)
                begin = 0
                for end in np.flatnonzero(block == self.separator_id):
                    pieces.append(block[begin:end])
                    if begun and length + end > begin:
                        yield np.concatenate(pieces)
                    pieces, length, begun, begin = [], 0, True, int(end) + 1
                    if position + begin >= last:
                        return
                pieces.append(block[begin:])
                length += here - begin
                require(
                    length <= LARGEST_DOCUMENT,
                    f"{path}: {length} tokens up to {position + here} without separator_id "
                    f"{self.separator_id}; at most {LARGEST_DOCUMENT}: give the right separator",
                )
                position += here
        if begun and length:
            yield np.concatenate(pieces)


@dataclasses.dataclass(frozen=True)
class Megatron:
    """Indexed token files of Megatron-LM: NAME.bin with NAME.idx beside it.

    `files` is a glob of .bin files, or of their names without the ending. Yields 1-D ids of the
    index's integer type: a document is the run of sequences that the index says, split further
    at `separator_id` unless that is None; empty ones are left out. Units are ranges of the index's
    documents. units() reads each index and raises SourceError unless all of it fits both files.
    """

    files: str
    separator_id: int | None
    tokens: ClassVar[bool] = True

    def units(self) -> list[Unit]:
        ending = "" if self.files.endswith(".bin") else ".bin"
        return units_of_each(self._units_of, matching_files(self.files + ending))

    def _units_of(self, found: tuple[str, int]) -> list[Unit]:
        path, size = found
        dtype, sequences, documents = _check_megatron(path, size)
        if self.separator_id is not None:
            _check_separator(self.separator_id, dtype, path)
        size_each = size / max(documents, 1)
        return units_of_indices(path, documents, size_each, path, dtype, sequences)

    def read(self, unit: Unit) -> Iterator[np.ndarray]:
        path, dtype, sequences, first, last = unit.args
        with open_file(_index_of(path)) as file:
            start = _MEGATRON_HEADER + 12 * sequences + 8 * first
            bounds = read_array(file, start, "<i8", last - first + 1)
            count, first = bounds[-1] - bounds[0], bounds[0]
            lengths = read_array(file, _MEGATRON_HEADER + 4 * first, "<i4", count)
            start = _MEGATRON_HEADER + 4 * sequences + 8 * first
            pointers = read_array(file, start, "<i8", count)
        with open_file(path) as file:
            for begin, end in itertools.pairwise(bounds - first):
                spans = zip(pointers[begin:end], lengths[begin:end])
                parts = [read_array(file, pointer, dtype, length) for pointer, length in spans]
                ids = np.concatenate([np.empty(0, dtype), *parts])
                cuts = [] if self.separator_id is None else np.flatnonzero(ids == self.separator_id)
                for i, j in itertools.pairwise([-1, *cuts, ids.size]):
                    if j > i + 1:
                        yield ids[i + 1 : j]


def _check_separator(separator: int, dtype: str, path: str) -> None:
    info = np.iinfo(dtype)
    require(
        info.min <= separator <= info.max,
        f"{path}: separator_id {separator} is none of its {info.dtype} ids; "
        f"give one of {info.min} to {info.max}",
    )


def _index_of(path: str) -> str:
    return path.removesuffix(".bin") + ".idx"


def _check_megatron(path: str, size: int) -> tuple[str, int, int]:
    """Checks all of an index against `size` bytes of ids; returns (dtype, sequences, documents)."""
    index = _index_of(path)

    def check(fits, problem):
        require(fits, f"{index}: {problem}; copy it and {path} again, or build them anew")

    with open_file(index) as file:
        header = file.read(_MEGATRON_HEADER)
        check(header.startswith(_MEGATRON_MAGIC), f"does not begin with {_MEGATRON_MAGIC!r}")
        check(len(header) == _MEGATRON_HEADER, f"has {len(header)} bytes, less than a header")
        version, code, sequences, entries = struct.unpack("<QBQQ", header[9:])
        check(version == 1, f"has version {version}, not 1")
        check(code in _MEGATRON_IDS, f"has type {code} of ids, not one of {list(_MEGATRON_IDS)}")
        dtype = np.dtype(_MEGATRON_IDS[code])
        needed, found = _MEGATRON_HEADER + 12 * sequences + 8 * entries, file.seek(0, os.SEEK_END)
        check(found == needed, f"has {found} bytes, its header needs {needed}")
        covered = 0
        for i, j in ranges(sequences, units.BLOCK):
            lengths = read_array(file, _MEGATRON_HEADER + 4 * i, "<i4", j - i).astype(np.int64)
            pointers = read_array(file, _MEGATRON_HEADER + 4 * sequences + 8 * i, "<i8", j - i)
            lengths *= dtype.itemsize
            fits = (lengths >= 0) & (pointers >= 0) & (pointers <= size - lengths)
            check(fits.all(), f"sequence {i + fits.argmin()} lies outside {path} ({size} bytes)")
            covered += int(lengths.sum())
        check(covered == size, f"covers {covered} of the {size} bytes of {path}")
        before = 0
        for i, j in ranges(entries, units.BLOCK):
            bounds = read_array(file, _MEGATRON_HEADER + 12 * sequences + 8 * i, "<i8", j - i)
            rises = (np.diff(bounds, prepend=before) >= 0).all() and (i > 0 or bounds[0] == 0)
            check(rises, "its documents do not rise from sequence 0")
            before = int(bounds[-1])
        check(before == sequences, f"its documents end at sequence {before} of {sequences}")
    return dtype.str, sequences, max(entries - 1, 0)
