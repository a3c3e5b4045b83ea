"""How fast rows come out of a store: the pipeline beside plain slices of the same memory map."""

import pathlib
import statistics
import tempfile
import time

import numpy as np

from tst_jax.data.order import DataError, Order
from tst_jax.data.pipeline import Batch, Stream, batches, open_stream
from tst_jax.data.store import Store, open_store
from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import ids_only
from tst_jax.schedule import TSTConfig, make_stages

SHAPES = ((8, 1024), (1, 1024))  # bag size, positions: rows of 8,192 and 1,024 tokens
STEP_TOKENS = 1 << 19
_MADE_TOKENS = 1 << 26  # of a store that is made for the occasion: 128 MiB
_AHEAD = 2


def run(options) -> list[dict]:
    """The cases, in turn and round after round; prints and returns a dict for each.

    `name`, `row_tokens`, `tokens_per_second` (median over the rounds). Names: `numpy_slice`, rows
    of the memory map copied in order into batches, the ceiling; `grain`, the trainer's pipeline
    (shuffled, one thread that reads ahead); `grain_mixture_3`, the same with three streams;
    `grain_document`, with documents packed.
    """
    if options.store:
        return _measure(open_store(options.store), options)
    with tempfile.TemporaryDirectory() as folder:
        print(f"making a store of {_MADE_TOKENS:,} random ids; --store=DIR measures yours")
        return _measure(_made(pathlib.Path(folder) / "store"), options)


def _made(path) -> Store:
    rng = np.random.default_rng(0)

    def documents(tokens):
        while tokens > 0:
            length = int(rng.integers(100, 2000))
            tokens -= length
            yield rng.integers(1, 50_000, length), None

    return write_store(
        path,
        vocabulary=ids_only(50_000),
        train=documents(_MADE_TOKENS),
        heldout=documents(1),
        separator_id=0,
        provenance={"made": "random ids"},
        shard_tokens=_MADE_TOKENS // 4,
    )


def _measure(store: Store, options) -> list[dict]:
    results = []
    for bag_size, positions in SHAPES:
        row_tokens = bag_size * positions
        cases = {
            "numpy_slice": _Slices(store.tokens("train"), row_tokens),
            "grain": _Pipeline([_stream(store)], bag_size, positions),
            "grain_mixture_3": _Pipeline([_stream(store) for _ in range(3)], bag_size, positions),
            "grain_document": _Pipeline([_stream(store, "document")], bag_size, positions),
        }
        rates = {name: [] for name in cases}
        for number in range(options.rounds + 1):  # one to warm up
            for name, case in cases.items():
                rate = _rate(case, row_tokens, options.seconds)
                if number:
                    rates[name].append(rate)
        ceiling = statistics.median(rates["numpy_slice"])
        for name in cases:
            median = statistics.median(rates[name])
            results.append({"name": name, "row_tokens": row_tokens, "tokens_per_second": median})
            print(
                f"{name:16} rows of {row_tokens:5} tokens: {median / 1e6:8.1f} million tokens/s, "
                f"{median / ceiling:.2f} of numpy_slice"
            )
    return results


def _stream(store, packing="concat") -> Stream:
    return open_stream(store, "train", packing, store.path.name)


def _rate(case, row_tokens, seconds) -> float:
    """Tokens a second while batches are taken from a case for so long."""
    began, rows = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        rows += case.next()[0].shape[0]
    return rows * row_tokens / passed


class _Slices:
    def __init__(self, tokens, row_tokens):
        if len(tokens) < row_tokens:
            raise DataError(f"the store has {len(tokens)} tokens, a row {row_tokens}; give more")
        self._tokens, self._row_tokens, self._at = tokens, row_tokens, 0

    def next(self) -> Batch:
        batch = np.empty((STEP_TOKENS // self._row_tokens, self._row_tokens), np.int32)
        for row in batch:
            if self._at + self._row_tokens > len(self._tokens):
                self._at = 0
            row[:] = self._tokens[self._at : self._at + self._row_tokens]
            self._at += self._row_tokens
        return (batch,)


class _Pipeline:
    """The trainer's, over a run without end."""

    def __init__(self, streams, bag_size, positions):
        rows = STEP_TOKENS // (bag_size * positions)
        tst = TSTConfig(bag_size=bag_size, ratio=float(bag_size > 1))
        stages = make_stages(tst, 1_000_000, rows, positions)
        weights = ["1"] * len(streams) if len(streams) > 1 else None
        order = Order(stages, [stream.length for stream in streams], weights)
        self._batches = batches(streams, order, 0, 0, ahead=_AHEAD)

    def next(self) -> Batch:
        return next(self._batches)
