"""Stores in, batches of rows out: a Grain pipeline whose element k is the batch of step k.

`order.py` says which rows a step reads and `packing.py` what a row holds; both are functions of the
step. So any number of processes read one and the same global batch, and a run that goes on, with
more or fewer of them, needs nothing but the number of its step.
"""

import dataclasses
import functools

import grain
import numpy as np

from tst_jax.data.order import DataError, Order
from tst_jax.data.packing import PaddedStream
from tst_jax.data.store import Store

Batch = tuple[np.ndarray, ...]  # (tokens,), or (tokens, segments) where documents are packed


class Stream:
    """A split of one store as rows are cut from it.

    Args:
      tokens: ids, sliceable.
      documents: offsets of each shard's documents, for `packing="document"` only.
      vocab_size: ids lie below it.
      name: for messages.
    """

    def __init__(self, tokens, documents=None, vocab_size: int = 1 << 31, name: str = "the store"):
        self.tokens, self.vocab_size, self.name = tokens, vocab_size, name
        self._documents = documents
        # One stream for each alignment that the run's stages ask for; not more than a few.
        self._padded = functools.lru_cache(lambda align: PaddedStream(tokens, documents, align))

    def length(self, align: int) -> int:
        """Places of the stream in which documents are padded to multiples of `align`."""
        return len(self.tokens if self._documents is None else self._padded(align))

    def read(self, place: int, count: int, align: int) -> Batch:
        """What stands at `count` places, in the fields of a batch."""
        if self._documents is None:
            return (self.tokens[place : place + count],)
        return self._padded(align).read(place, count)


def open_stream(store: Store, split: str, packing: str, name: str) -> Stream:
    """The split of a store, packed as a run wants it."""
    documents = store.documents(split) if packing == "document" else None
    return Stream(store.tokens(split), documents, store.vocab_size, name)


@dataclasses.dataclass(frozen=True)
class StageBatches:
    """Random access to the batches of a stage: element i is that of its i-th step.

    Only the rows `numbers` of each batch: those of one process.
    """

    streams: list[Stream]
    order: Order
    stage_index: int
    numbers: np.ndarray

    def __len__(self):
        stage = self.order.stages[self.stage_index]
        return stage.stop - stage.start

    def __getitem__(self, i) -> Batch:
        stage = self.order.stages[self.stage_index]
        places = [
            self.order.place(self.stage_index, i * stage.rows + row)
            for row in self.numbers.tolist()
        ]
        return _rows(self.streams, places, stage.row_tokens)


def _rows(streams: list[Stream], places, count: int) -> Batch:
    """Rows of `count` places from (stream, place, align), each field int32 [K, count].

    Raises:
      DataError: an id outside the vocabulary; a gather would clamp it.
    """
    batch: list = []
    for k, (number, place, align) in enumerate(places):
        for field, values in enumerate(streams[number].read(place, count, align)):
            if k == 0:
                batch.append(np.empty((len(places), count), np.int32))
            batch[field][k] = values
    limits = np.array([streams[number].vocab_size for number, _, _ in places])
    if batch[0].max() >= limits.min():
        for ids, (number, place, _), limit in zip(batch[0], places, limits):
            if ids.max() >= limit:
                raise DataError(
                    f"{streams[number].name}: holds id {ids.max()} near token {place}, the largest "
                    f"is {limit - 1}; the store changed since it was opened: prepare it again"
                )
    return tuple(batch)


def batches(streams, order: Order, stage_index: int, step: int, numbers=None, put=None, ahead=0):
    """Iterator of this process' part of each step's batch, from `step` to the end of the stage.

    Args:
      streams: of the run's stores.
      order: of the whole run.
      stage_index: which stage.
      step: of the run, inside the stage.
      numbers: the K rows of a batch to read, see `sharding.local_rows`; None: all of them.
      put: called with each batch, where it is read: lays it on the devices.
      ahead: batches that a thread reads and puts before they are asked for.
    Returns:
      a Grain iterator; an element is `put(batch)`, of the fields of `Batch` int32 [K, T].
    """
    stage = order.stages[stage_index]
    numbers = np.arange(stage.rows) if numbers is None else np.asarray(numbers)
    source = StageBatches(streams, order, stage_index, numbers)
    dataset = grain.MapDataset.source(source)[step - stage.start :]
    if put is not None:
        dataset = dataset.map(put)
    # Rows are slices of a memory map, so one thread is enough; the defaults (16, 500) only cost.
    options = grain.ReadOptions(num_threads=1 if ahead else 0, prefetch_buffer_size=ahead)
    return iter(dataset.to_iter_dataset(options))


def eval_batches(stream: Stream, rows: int, positions: int, limit: int, numbers=None):
    """Next-token rows spread evenly over a held-out split: a list of batches of positions + 1.

    Whole batches of `rows` rows only, so that one compiled program serves; about `limit` tokens
    (0: all). Of each, the rows `numbers` are read (None: all).

    Raises:
      DataError: the split is shorter than one batch.
    """
    batch = rows * positions
    length = stream.length(1)
    available = (length - 1) // batch
    if not available:
        raise DataError(
            f"the heldout split of {stream.name} has {length} tokens and one evaluation batch "
            f"needs {batch + 1}; lower eval.rows or data.positions, or hold out more"
        )
    count = min(available, max(1, limit // batch)) if limit else available
    spacing = (length - 1) // (count * rows)
    numbers = range(rows) if numbers is None else numbers
    starts = [[(part * rows + int(k)) * spacing for k in numbers] for part in range(count)]
    return [_rows([stream], [(0, at, 1) for at in part], positions + 1) for part in starts]
