"""Units: the parts of a corpus that are read alone, and what the sources share to make them.

A corpus of terabytes is read by several processes and over several starts, so every source lists
its work as units, the same ones in the same order each time, and reads any unit without the
others. What one unit yields is all that must be redone after a kill. Everything is streamed:
memory holds about one document, or a block of them, whatever the size of a file. Mistakes that
can be seen without reading the corpus (no such files, no such field, a foreign format) are raised
by units(), before any work begins.

Local paths are matched by Python's globs; a pattern with `://` goes through fsspec (gs://, s3://
and others). In both `**` crosses folders, hidden files need a pattern that names the dot, and
folders are no files.
"""

import concurrent.futures
import contextlib
import dataclasses
import glob
import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from tst_jax.errors import UserError

UNIT_BYTES = 64 << 20
BLOCK = 1 << 20  # bytes or numbers, read at a time
ROWS = 100  # of a table, held at a time
_LARGEST_UNIT = 1 << 20  # documents; a unit's part of an index stays small


class SourceError(UserError):
    """Documents that cannot be found or read; one line that says what to do."""


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of a corpus that one process reads from its beginning to its end."""

    name: str  # unique in the source; names the work that is done
    bytes: int  # to be read, for progress and time left only; 0 where unknown
    args: tuple  # what the source needs to read it; plain picklable values


# ---- files


def matching_files(pattern: str) -> list[tuple[str, int]]:
    """The files that a glob matches as sorted (path or URL, bytes). Raises SourceError if none."""
    if "://" not in pattern:
        names = set(glob.glob(os.path.expanduser(pattern), recursive=True))
        found = [(name, os.path.getsize(name)) for name in names if os.path.isfile(name)]
    else:
        import fsspec.core

        # The message for a protocol whose package is missing names that package.
        with named_errors(pattern, "check the address, the package for it and the access rights"):
            system, path = fsspec.core.url_to_fs(pattern)
            infos = system.glob(path, detail=True).items()
        found = [
            (system.unstrip_protocol(path), info["size"])
            for path, info in infos
            if info["type"] == "file" and ("/." in pattern or "/." not in path)
        ]
    require(
        found,
        f"--files={pattern}: matches no file; quote the glob, check its path, and give files, "
        "not a folder",
    )
    return sorted(found)


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """Opens a file or URL to read bytes; what fails within is one line that names it."""
    with named_errors(path), contextlib.ExitStack() as stack:
        if "://" in path:
            import fsspec.core

            system, inner = fsspec.core.url_to_fs(path)
            raw = stack.enter_context(system.open(inner, "rb"))
            yield stack.enter_context(io.BufferedReader(raw, BLOCK))
        else:
            yield stack.enter_context(open(path, "rb"))


def read_array(file: BinaryIO, offset: int, dtype: str, count: int) -> np.ndarray:
    """Reads `count` numbers that begin at byte `offset`."""
    file.seek(int(offset))
    data = file.read(int(count) * np.dtype(dtype).itemsize)
    array = np.frombuffer(data, dtype)
    if array.size != count:
        raise EOFError(f"ends before byte {offset + count * array.itemsize}")
    return array


# ---- units


def ranges(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Cuts `count` items into ranges (first, last + 1) of `step`; the last may be shorter."""
    return ((i, min(i + step, count)) for i in range(0, count, step))


def cut(sizes: list[int], limit: int) -> Iterator[tuple[int, int]]:
    """Cuts a list into runs (first, last + 1) of at most `limit` in sum, or of one item."""
    first = total = 0
    for i, size in enumerate(sizes):
        if i > first and total + size > limit:
            yield first, i
            first, total = i, 0
        total += size
    if sizes:
        yield first, len(sizes)


def units_of_files(found: list[tuple[str, int]], limit: int, *args: str) -> list[Unit]:
    """Units that read whole files one after another: args are `args` and their names."""
    names, sizes = zip(*found)
    return [
        Unit(f"{names[i]} ({j - i} files)", sum(sizes[i:j]), (*args, *names[i:j]))
        for i, j in cut(sizes, limit)
    ]


def units_of_indices(name: str, count: int, bytes_each: float, *args: Any) -> list[Unit]:
    """Units that read ranges of `count` items of about `bytes_each`.

    args are `args`, first and last + 1.
    """
    step = int(min(max(UNIT_BYTES / max(bytes_each, 1), 1), _LARGEST_UNIT))
    return [
        Unit(f"{name} {i}-{j}", int((j - i) * bytes_each), (*args, i, j))
        for i, j in ranges(count, step)
    ]


def units_of_each(units_of: Callable, found: list[tuple[str, int]]) -> list[Unit]:
    """The units of all files in order; several are opened at a time, as each may be far away."""
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(itertools.chain.from_iterable(pool.map(units_of, found)))


# ---- errors


@contextlib.contextmanager
def named_errors(where: str, advice: str = "check it, or leave it out") -> Iterator[None]:
    """Makes one line of what other packages raise: each has errors of its own."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise SourceError(
            f"{where}: cannot be read ({type(error).__name__}: {reason}); {advice}"
        ) from error


def require(holds: Any, message: str) -> None:
    """Raises SourceError(message) unless it holds."""
    if not holds:
        raise SourceError(message)


def require_field(field: str, found: Iterable[str], where: Callable[[], str]) -> None:
    """Raises SourceError, with where() and what there is, if `field` is not among the found."""
    if field not in found:
        raise SourceError(f"{where()}: has no field {field!r}; give one of {', '.join(found)}")


def decoded(decode: Callable[[], Any]) -> Any:
    """The decoded value, or why it is none, for checked_text to say with its place."""
    try:
        return decode()
    except UnicodeDecodeError as error:
        return error


def checked_text(value: Any, field: str, where: Callable[[], str]) -> str:
    """Returns a value that is text and has an encoding; raises SourceError with where() if not."""
    problem = None
    if isinstance(value, UnicodeDecodeError):
        problem = f"is not UTF-8 (byte {value.start})"
    elif not isinstance(value, str):
        problem = "is null" if value is None else f"is {type(value).__name__}, not a string"
    elif not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a pair of surrogates
            problem = f"holds a lone surrogate (character {error.start}), which is no text"
    if problem:
        raise SourceError(f"{where()}: field {field!r} {problem}; repair or leave out the document")
    return value
