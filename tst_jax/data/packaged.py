"""Data sets that another package manages: TFDS, and Hugging Face's `datasets`.

Both packages are imported only when such a data set is read, and what they raise becomes one line
that says what to do. A data set that was opened is kept for the life of the process.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from tst_jax.data import units
from tst_jax.data.units import (
    SourceError,
    Unit,
    checked_text,
    decoded,
    named_errors,
    ranges,
    require,
    require_field,
    units_of_indices,
)


@dataclasses.dataclass(frozen=True)
class Tfds:
    """The texts under `field` of a data set that TFDS prepared as ArrayRecord files.

    What `tfds.data_source` reads, without TensorFlow; never downloads. `name` is TFDS's, with
    config and version if wanted, `split` may be a slice ("train[:50%]"), `data_dir` is TFDS's own
    default if None. Units are ranges of indices. units() raises SourceError if the data set is not
    prepared so, or has no such split or field.
    """

    name: str
    split: str = "train"
    field: str = "text"
    data_dir: str | None = None
    tokens: ClassVar[bool] = False

    def units(self) -> list[Unit]:
        builder, data = _tfds(self.name, self.split, self.data_dir)
        features = builder.info.features
        require_field(self.field, features, lambda: self.name)
        feature = features[self.field]
        require(
            feature.shape == () and feature.np_dtype == np.object_,
            f"{self.name}: field {self.field!r} is {feature}, not text; give another field",
        )
        splits = builder.info.splits.values()  # a slice does not know its bytes
        size = sum(split.num_bytes for split in splits)
        size /= max(sum(split.num_examples for split in splits), 1)
        return units_of_indices(f"{self.name} {self.split}", len(data), size)

    def read(self, unit: Unit) -> Iterator[str]:
        first, last = unit.args
        _, data = _tfds(self.name, self.split, self.data_dir)
        for start, end in ranges(last - first, units.ROWS):
            numbers = range(first + start, first + end)
            with named_errors(f"{self.name}: examples {numbers.start} to {numbers.stop - 1}"):
                examples = data.__getitems__(list(numbers))
            for number, example in zip(numbers, examples):
                where = lambda: f"{self.name}: example {number} of {self.split}"
                yield checked_text(decoded(example[self.field].decode), self.field, where)


@functools.cache  # once a process, not once a unit
def _tfds(name: str, split: str, data_dir: str | None) -> tuple[Any, Any]:
    """Returns a data set's (builder, data source)."""
    import tensorflow_datasets as tfds

    advice = f"prepare it: tfds.builder({name!r}, data_dir={data_dir!r}, "
    advice += "file_format='array_record').download_and_prepare()"
    with named_errors(name, advice):
        builder = tfds.builder(name, data_dir=data_dir)
        splits, found = builder.info.splits, builder.info.file_format
    require(splits, f"{name}: is not prepared in {builder.data_path}; {advice}")
    require(
        found == tfds.core.FileFormat.ARRAY_RECORD,
        f"{name}: has file_format {getattr(found, 'value', found)}, not array_record; {advice}",
    )
    advice = f"give one of {', '.join(splits)}, or a slice of it"
    with named_errors(f"{name}: split {split}", advice):
        return builder, builder.as_data_source(split)


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """The strings under `field` of a data set that the package `datasets` reads.

    `name` is a folder written by save_to_disk (units are ranges of rows; a folder of a single split
    is read whatever `split` says), or a name on the hub or a folder of data files, which is
    streamed (units are its own shards). Code of a data set is never run. units() raises SourceError
    if the package is missing, or there is no such data set, split or field.
    """

    name: str
    split: str = "train"
    field: str = "text"
    config: str | None = None
    tokens: ClassVar[bool] = False

    def units(self) -> list[Unit]:
        data, stored = _hugging_face(self.name, self.split, self.config)
        if data.column_names is not None:
            require_field(self.field, data.column_names, lambda: self.name)
        kind = getattr((data.features or {}).get(self.field), "dtype", "string")
        require(
            kind in ("string", "large_string"),
            f"{self.name}: field {self.field!r} is of type {kind}, not string; give another field",
        )
        name = f"{self.name} {self.split}"
        if stored:
            size = data.select_columns([self.field]).data.nbytes
            return units_of_indices(name, len(data), size / max(len(data), 1))
        count = data.num_shards
        size = getattr((data.info.splits or {}).get(self.split), "num_bytes", None) or 0
        return [
            Unit(f"{name} shard {i} of {count}", size // count, (i, count)) for i in range(count)
        ]

    def read(self, unit: Unit) -> Iterator[str]:
        data, stored = _hugging_face(self.name, self.split, self.config)
        first, last = unit.args
        part = data.select(range(first, last)) if stored else data.shard(last, first)
        if data.column_names is not None:
            part = part.select_columns([self.field])
        rows = iter(part)
        for row in itertools.count():
            with named_errors(f"{unit.name}: row {row}"):
                record = next(rows, None)
            if record is None:
                return
            where = lambda: f"{unit.name}: row {row}"
            require_field(self.field, record, where)
            yield checked_text(record[self.field], self.field, where)


@functools.cache  # once a process, not once a unit: a large repository is slow to list
def _hugging_face(name: str, split: str, config: str | None) -> tuple[Any, bool]:
    """Returns (data set, whether it is a folder written by save_to_disk)."""
    try:
        import datasets
    except ImportError as error:
        raise SourceError(
            f"{name}: needs the package datasets, which is missing; run: pip install datasets"
        ) from error
    stored = any(os.path.isfile(f"{name}/{mark}") for mark in ("state.json", "dataset_dict.json"))
    with named_errors(name, "check its name, split and config"):
        if not stored:
            return datasets.load_dataset(name, config, split=split, streaming=True), False
        data = datasets.load_from_disk(name)
    if isinstance(data, datasets.DatasetDict):
        require(split in data, f"{name}: has no split {split}; give one of {', '.join(data)}")
        data = data[split]
    return data, True
