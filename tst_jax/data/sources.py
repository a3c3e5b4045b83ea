"""Where documents come from: the table of all sources, and those that read files of text.

Files are of any size and cut into units that are read alone (units.py says how and why). Data sets
that other packages manage are in packaged.py, files of ready token ids in token_files.py. Nothing
here downloads a data set as a whole.
"""

import dataclasses
import importlib.metadata
import io
import itertools
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from tst_jax.data import units
from tst_jax.data.packaged import HuggingFace, Tfds
from tst_jax.data.token_files import LlmC, Megatron
from tst_jax.data.units import (
    SourceError,
    Unit,
    checked_text,
    cut,
    decoded,
    matching_files,
    open_file,
    ranges,
    require,
    require_field,
    units_of_each,
    units_of_files,
)

TEXT_UNIT_BYTES = 16 << 20
STDLIB_UNIT_BYTES = 4 << 20

_CODECS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib2to3"}
_STDLIB_SMALLEST = 200
_STDLIB_LARGEST = 200_000
_STDLIB_LARGEST_ENCODING = 10_000


@dataclasses.dataclass(frozen=True)
class Stdlib:
    """Python's own standard library: a corpus of about 28 MB that every machine already has.

    Yields the text of each `.py` file, folder by folder in sorted order, tests included where they
    are installed. Left out: installed packages, lib2to3 (gone in Python 3.13), generated tables
    (large files of encodings/, the build settings in _sysconfigdata), files under 200 bytes and
    files that are not UTF-8. A file over 200,000 bytes is cut at the last line end before that, so
    that a few giants do not dominate. `root` is the folder to walk, by default the running Python's
    library; units() raises SourceError if it holds no such file.
    """

    root: str | os.PathLike | None = None
    tokens: ClassVar[bool] = False

    def units(self) -> list[Unit]:
        root = Path(sysconfig.get_paths()["stdlib"] if self.root is None else self.root)
        found = []
        for path, size in _python_files(root):
            table = path.parent.name == "encodings" and size > _STDLIB_LARGEST_ENCODING
            if not table and not path.name.startswith("_sysconfigdata"):
                found.append((path.relative_to(root).as_posix(), min(size, _STDLIB_LARGEST)))
        require(found, f"{root}: holds no Python file; give the folder of a standard library")
        return units_of_files(found, STDLIB_UNIT_BYTES, str(root))

    def read(self, unit: Unit) -> Iterator[str]:
        root, *names = unit.args
        for name in names:
            with open_file(os.path.join(root, name)) as file:
                data = file.read()
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue  # the library's tests hold files in other encodings on purpose
            if len(data) > _STDLIB_LARGEST:
                end = data.rfind(b"\n", 0, _STDLIB_LARGEST) + 1 or _STDLIB_LARGEST
                text = data[:end].decode("utf-8", errors="ignore")
            yield text


@dataclasses.dataclass(frozen=True)
class Packages:
    """The standard library, and the Python source of every package installed in an environment.

    Of the packages: each `.py` file of 200 to 200,000 bytes that is UTF-8. `data_dir` is a folder
    of packages (that of `pip install --target=DIR`), by default the running environment's.
    units() raises SourceError if it holds no package.
    """

    data_dir: str | None = None
    tokens: ClassVar[bool] = False

    def units(self) -> list[Unit]:
        units = Stdlib().units()
        for root in self._roots():
            files = [
                (path.relative_to(root).as_posix(), size)
                for path, size in _python_files(root)
                if size <= _STDLIB_LARGEST
            ]
            units += units_of_files(files, STDLIB_UNIT_BYTES, str(root))
        return units

    def read(self, unit: Unit) -> Iterator[str]:
        return Stdlib().read(unit)

    def installed(self) -> list[str]:
        """ "NAME==VERSION" of each package, sorted: what the corpus consists of."""
        found = importlib.metadata.distributions(path=[str(root) for root in self._roots()])
        named = {f"{package.name.lower()}=={package.version}" for package in found if package.name}
        return sorted(named)

    def _roots(self) -> list[Path]:
        paths = sysconfig.get_paths()
        given = [paths["purelib"], paths["platlib"]] if self.data_dir is None else [self.data_dir]
        roots = sorted({Path(path).resolve() for path in given})
        holds = [root for root in roots if next(root.glob("*.dist-info"), None)]
        require(
            holds,
            f"{roots[0]}: holds no installed package; give --data_dir the folder of "
            "pip install --target=DIR",
        )
        return holds


def _python_files(root: Path) -> Iterator[tuple[Path, int]]:
    """(path, bytes) of each Python file under a folder, in sorted order; small ones left out."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        for path in (Path(folder, file) for file in sorted(files)):
            if path.suffix == ".py" and (size := path.stat().st_size) >= _STDLIB_SMALLEST:
                yield path, size


@dataclasses.dataclass(frozen=True)
class Text:
    """Every file that the glob `files` matches is one document, in sorted order.

    units() raises SourceError if no file matches, read() if one is not UTF-8.
    """

    files: str
    tokens: ClassVar[bool] = False

    def units(self) -> list[Unit]:
        return units_of_files(matching_files(self.files), TEXT_UNIT_BYTES)

    def read(self, unit: Unit) -> Iterator[str]:
        for path in unit.args:
            with open_file(path) as file:
                data = file.read()
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                raise SourceError(
                    f"{path}: is not UTF-8 (byte {error.start}); convert it, or leave it out"
                ) from error
            yield text


@dataclasses.dataclass(frozen=True)
class Jsonl:
    """Files with one JSON object a line; the string under `field` is the document.

    Files that end in .gz, .gzip, .zst or .zstd are decompressed and are one unit each; plain files
    are cut into ranges of bytes, and a line belongs to the range in which it begins. Lines of white
    space are passed over. read() raises SourceError with file and line for anything else that is
    not such an object, and for a compressed file that is damaged or ends too early.
    """

    files: str
    field: str = "text"
    tokens: ClassVar[bool] = False

    def units(self) -> list[Unit]:
        found = []
        for path, size in matching_files(self.files):
            if _codec(path) is None:
                for start, end in ranges(size, units.UNIT_BYTES):
                    name = f"{path} bytes {start}-{end}"
                    found.append(Unit(name, end - start, (path, start, end)))
            else:  # of no bytes the decompressor would make no lines
                require(size, f"{path}: is empty, no {_codec(path)} file; copy it again")
                found.append(Unit(path, size, (path, 0, None)))
        return found

    def read(self, unit: Unit) -> Iterator[str]:
        path, start, end = unit.args
        for number, line in enumerate(_lines(path, start, end), 1):
            if line.isspace():
                continue
            where = lambda: f"{path}: line {_lines_before(path, start) + number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:  # bytes, syntax or depth
                reason = getattr(error, "msg", error)
                raise SourceError(
                    f"{where()}: is no JSON ({reason}); repair or remove the line"
                ) from error
            if not isinstance(record, dict):
                raise SourceError(f"{where()}: is no JSON object; repair or remove the line")
            require_field(self.field, record, where)
            yield checked_text(record[self.field], self.field, where)


def _codec(path: str) -> str | None:
    return _CODECS.get(os.path.splitext(path)[1].lower())


def _lines(path: str, start: int, end: int | None) -> Iterator[bytes]:
    """Yields the lines that begin at bytes `start` up to `end` of a file, decompressed by name."""
    with open_file(path) as file:
        if codec := _codec(path):
            import pyarrow

            # Reads on after the end of a member or frame, and refuses one without its end.
            file = io.BufferedReader(pyarrow.CompressedInputStream(file, codec), units.BLOCK)
        position = start
        if start:  # the line that holds the byte before `start` is of an earlier range
            file.seek(start - 1)
            position += len(file.readline()) - 1
        while end is None or position < end:
            line = file.readline()
            if not line:
                return
            position += len(line)
            yield line


def _lines_before(path: str, start: int) -> int:
    """The lines of a plain file before the first that begins at byte `start` or after it."""
    if not start:
        return 0
    with open_file(path) as file:
        blocks = (file.read(j - i) for i, j in ranges(start - 1, units.BLOCK))
        return 1 + sum(block.count(b"\n") for block in blocks)


@dataclasses.dataclass(frozen=True)
class Parquet:
    """The column `field` of Parquet files; each row is a document.

    A unit is a run of row groups. units() reads the footer of every file and raises SourceError if
    one is no Parquet file or has no column of strings, read() for a null (rows count from 0).
    """

    files: str
    field: str = "text"
    tokens: ClassVar[bool] = False

    def units(self) -> list[Unit]:
        return units_of_each(self._units_of, matching_files(self.files))

    def _units_of(self, found: tuple[str, int]) -> list[Unit]:
        import pyarrow.parquet

        path, _ = found
        with open_file(path) as file:
            parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False)
            schema, metadata = parquet.schema_arrow, parquet.metadata
            require_field(self.field, schema.names, lambda: path)
            kind = schema.field(self.field).type
            values = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
            require(
                values in (pyarrow.string(), pyarrow.large_string()),
                f"{path}: column {self.field!r} is of type {kind}, not string; give another field",
            )
            leaves = [parquet.schema.column(i).path for i in range(metadata.num_columns)]
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        leaf = leaves.index(self.field)
        sizes = [group.column(leaf).total_compressed_size for group in groups]
        rows = [0, *itertools.accumulate(group.num_rows for group in groups)]
        return [
            Unit(f"{path} row groups {i}-{j}", sum(sizes[i:j]), (path, i, j, rows[i]))
            for i, j in cut(sizes, units.UNIT_BYTES)
        ]

    def read(self, unit: Unit) -> Iterator[str]:
        import pyarrow.parquet

        path, first, last, row = unit.args
        with open_file(path) as file:
            # A buffer streams a column's pages; without one a whole row group's column is read.
            parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=units.BLOCK)
            batches = parquet.iter_batches(
                units.ROWS, range(first, last), columns=[self.field], use_threads=False
            )
            for value in itertools.chain.from_iterable(batch.column(0) for batch in batches):
                yield checked_text(decoded(value.as_py), self.field, lambda: f"{path}: row {row}")
                row += 1


SOURCES = {
    "stdlib": Stdlib,
    "packages": Packages,
    "text": Text,
    "jsonl": Jsonl,
    "parquet": Parquet,
    "tfds": Tfds,
    "huggingface": HuggingFace,
    "llmc": LlmC,
    "megatron": Megatron,
}
