"""Proves `tst_jax.data.pipeline` and `packing`: what the batch of a step holds (rules 1, 3, 20).

The batch of a step follows from the step alone: from any step on, read ahead or not, by 1, 2, 4 or
8 processes, it is the same. With documents packed, each row is checked against a padded stream
written out token by token.
"""

import numpy as np
import pytest
from test_order import PRIME, RUNS

from tst_jax.data.order import DataError, Order
from tst_jax.data.packing import PaddedStream
from tst_jax.data.pipeline import Stream, batches, eval_batches, open_stream
from tst_jax.data.store import open_store
from tst_jax.schedule import TSTConfig, make_stages


def documents_of(rng, count, longest, shards=3):
    """(ids [n], offsets of the documents of each shard); document k holds k * 1000 + 0, 1, ..."""
    lengths = rng.integers(1, longest + 1, count)
    ids = np.concatenate([k * 1000 + np.arange(n) for k, n in enumerate(lengths)])
    parts = np.array_split(lengths, shards)
    return ids, [np.concatenate([[0], np.cumsum(part)]) for part in parts]


def stream_of(size, packing="concat", seed=0):
    if packing == "concat":
        return Stream(np.arange(size))
    ids, offsets = documents_of(np.random.default_rng(seed), size // 10, 19)
    return Stream(ids, offsets)


def make_order(streams, steps, rows, positions, method, **options):
    stages = make_stages(TSTConfig(**method), steps, rows, positions)
    return Order(stages, [stream.length for stream in streams], **options)


def run_steps(streams, order, **options):
    """[batch of every step]."""
    found = []
    for index, stage in enumerate(order.stages):
        parts = list(batches(streams, order, index, stage.start, **options))
        assert len(parts) == stage.stop - stage.start  # batches end with the stage
        found += parts
    return found


def assert_equal(batch, other):
    for field, wanted in zip(batch, other, strict=True):
        np.testing.assert_array_equal(field, wanted)


@pytest.mark.parametrize("steps, rows, positions, method", RUNS)
def test_a_batch_holds_the_rows_of_its_step(steps, rows, positions, method):
    streams = [stream_of(PRIME)]
    order = make_order(streams, steps, rows, positions, method, seed=3)
    for (found,), step in zip(run_steps(streams, order), range(steps), strict=True):
        index = next(i for i, s in enumerate(order.stages) if step < s.stop)
        stage = order.stages[index]
        assert found.shape == (stage.rows, stage.row_tokens) and found.dtype == np.int32
        for row, k in zip(found, range(stage.rows)):
            _, place, _ = order.place(index, (step - stage.start) * stage.rows + k)
            np.testing.assert_array_equal(row, place + np.arange(stage.row_tokens))


def test_neighbouring_rows_share_one_bag():
    streams = [Stream(np.random.default_rng(0).integers(0, 99, PRIME))]
    order = make_order(streams, 4, 3, 7, dict(bag_size=5, ratio=1.0), shuffle=False)
    rows = np.concatenate([ids for (ids,) in run_steps(streams, order)])
    assert rows.shape == (12, 8 * 5)
    np.testing.assert_array_equal(rows[:-1, -5:], rows[1:, :5])


@pytest.mark.parametrize("packing", ["concat", "document"])
@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("size", [PRIME, 97])
def test_a_batch_is_a_pure_function_of_the_step(size, ahead, packing):
    for steps, rows, positions, method in RUNS[1:4]:
        streams = [stream_of(size, packing), stream_of(2 * size, packing, 1)]
        fresh = lambda: make_order(  # noqa: B023
            streams, steps, rows, positions, method, weights=["0.29", "0.71"]
        )
        order = fresh()
        whole = run_steps(streams, order)
        for index, stage in enumerate(order.stages):
            for step in range(stage.start, stage.stop):  # the steps around each switch among them
                rest = list(batches(streams, fresh(), index, step, ahead=ahead))
                assert len(rest) == stage.stop - step
                assert_equal(rest[0], whole[step])
                assert_equal(rest[-1], whole[stage.stop - 1])
            assert not list(batches(streams, order, index, stage.stop))


@pytest.mark.parametrize("packing", ["concat", "document"])
@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_any_number_of_hosts_reads_one_global_batch(hosts, packing):
    """And the rest of the run after a change of their number: nothing is kept but the step."""
    streams = [stream_of(PRIME, packing), stream_of(PRIME, packing, 1)]
    order = make_order(
        streams, 8, 8, 6, dict(bag_size=3, ratio=0.5), weights=["0.5", "0.5"], seed=1
    )
    whole = run_steps(streams, order)
    for index, stage in enumerate(order.stages):
        shares = np.array_split(np.arange(stage.rows), hosts)
        parts = [list(batches(streams, order, index, stage.start + 1, n)) for n in shares]
        for step, fields in enumerate(zip(*parts), stage.start + 1):
            together = [np.concatenate(field) for field in zip(*fields)]
            assert_equal(together, whole[step])


@pytest.mark.parametrize("numbers", [[1, 3], [0], [2, 1]])
def test_a_process_reads_its_rows_and_no_others(numbers):
    class Read(np.ndarray):
        def __getitem__(self, index):
            read.append((index.start, index.stop))
            return super().__getitem__(index)

    read = []
    streams = [Stream(np.arange(PRIME).view(Read))]
    order = make_order(streams, 12, 4, 6, dict(bag_size=3, ratio=0.5))
    for index, stage in enumerate(order.stages):
        read.clear()
        parts = [ids for (ids,) in batches(streams, order, index, stage.start, numbers)]
        starts = np.concatenate([part[:, 0] for part in parts]).tolist()
        assert read == [(k, k + stage.row_tokens) for k in starts]
        whole = [ids for (ids,) in batches(streams, order, index, stage.start)]
        np.testing.assert_array_equal(parts, np.asarray(whole)[:, numbers])


def test_batches_are_put_ahead_of_the_step():
    """By a thread, so that reading and copying to the devices take no time of the step."""
    import threading
    import time

    put, streams = [], [stream_of(PRIME)]
    order = make_order(streams, 30, 2, 4, dict(ratio=0.0))

    def put_one(batch):
        put.append(threading.current_thread())
        return batch

    found = batches(streams, order, 0, 0, put=put_one, ahead=3)
    next(found)
    deadline = time.monotonic() + 10
    while len(put) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert 4 <= len(put) <= 6 and threading.current_thread() not in put  # three more, not all
    found.close()


def test_ids_of_a_store_come_out_as_int32(store):
    found = open_store(store)
    stream = open_stream(found, "train", "concat", "small")
    assert stream.tokens.dtype == np.uint16 and stream.name == "small"
    order = make_order([stream], 4, 2, 3, dict(bag_size=2, ratio=0.5), shuffle=False)
    (first,) = next(batches([stream], order, 0, 0))
    ids = np.asarray(found.tokens("train"))
    np.testing.assert_array_equal(first, [ids[:8], ids[6:14]])
    high = Stream(np.arange(65_000, 65_500).astype(np.uint16))  # no sign bit, no wrap
    (rows,) = next(batches([high], make_order([high], *RUNS[0]), 0, 0))
    assert rows.dtype == np.int32 and 65_000 <= rows.min() <= rows.max() < 65_500


def test_an_id_outside_the_vocabulary_stops_the_run():
    """Of a store that changed after it was verified, or was not: a gather would clamp the id."""
    ids = np.arange(PRIME) % 50
    streams = [Stream(ids, vocab_size=50, name="good"), Stream(ids + 1, vocab_size=50, name="bad")]
    run = (20, 8, 8, dict(ratio=0.0))
    assert len(run_steps(streams[:1], make_order(streams[:1], *run))) == 20
    for ahead in (0, 2):  # also from the thread that reads ahead
        with pytest.raises(DataError, match="bad: holds id 50 near token .*the largest is 49"):
            run_steps(streams, make_order(streams, *run, weights=["1", "1"]), ahead=ahead)


# ---- packed documents (rule 20)


def padded(ids, offsets, align):
    """(ids, document from 1 on or 0 for a pad) of every place, written out."""
    tokens, owners, first, number = [], [], 0, 0
    for part in offsets:
        for begin, end in zip(part, part[1:]):
            number += 1
            document = ids[first + begin : first + end].tolist()
            pads = -len(document) % align
            tokens += document + [0] * pads
            owners += [number] * len(document) + [0] * pads
        first += part[-1]
    return np.array(tokens), np.array(owners)


@pytest.mark.parametrize("longest", [3, 40])
@pytest.mark.parametrize("align", [1, 2, 5, 16])
def test_the_padded_stream_at_every_place(align, longest, monkeypatch):
    monkeypatch.setattr("tst_jax.data.packing._BLOCK", 4)
    ids, offsets = documents_of(np.random.default_rng(align), 23, longest)
    stream = PaddedStream(ids, offsets, align)
    tokens, owners = padded(ids, offsets, align)
    assert len(stream) == len(tokens)
    for count in (1, 7, 60):
        for place in range(len(tokens) - count + 1):
            found, segments = stream.read(place, count)
            assert found.dtype == segments.dtype == np.int32
            np.testing.assert_array_equal(found, tokens[place : place + count])
            wanted = owners[place : place + count]
            # The same documents, numbered anew from 1.
            np.testing.assert_array_equal(segments == 0, wanted == 0)
            pairs = set(zip(segments[segments > 0].tolist(), wanted[wanted > 0].tolist()))
            assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})
            assert all(segment >= 1 for segment, _ in pairs)


@pytest.mark.parametrize("method", [dict(bag_size=4, ratio=0.4), dict(stages="8:0.2,2:0.2")])
def test_bags_hold_one_document_and_the_switch_loses_nothing(method):
    ids, offsets = documents_of(np.random.default_rng(2), 150, 30)
    streams = [Stream(ids, offsets)]
    order = make_order(streams, 30, 2, 5, method, seed=4)
    seen = []
    for index, stage in enumerate(order.stages):
        for tokens, segments in batches(streams, order, index, stage.start):
            bags = segments.reshape(stage.rows, -1, stage.bag_size)
            inside = np.where(bags == 0, bags.max(-1, keepdims=True), bags)
            assert (inside == bags.max(-1, keepdims=True)).all()  # of one document, or pads
            own = slice(stage.row_stride)
            seen += tokens[:, own][segments[:, own] > 0].tolist()
    assert len(seen) > 600 and len(set(seen)) == len(seen)  # nothing twice, nothing skipped
    whole = list(range(len(order.stages)))
    assert whole and set(seen) <= set(ids.tolist())


def test_one_epoch_of_packed_documents_reads_every_token_once():
    ids, offsets = documents_of(np.random.default_rng(3), 200, 30)
    streams = [Stream(ids, offsets)]
    length = streams[0].length(4)
    steps = 3 + (length - 4 - 3 * 2 * 20) // 20 * 20 // 10  # superposed, then the rest of the epoch
    method = dict(bag_size=4, superposition_steps=3, ratio=0.1)
    order = make_order(streams, steps, 2, 5, method, seed=4)
    seen = []
    for index, stage in enumerate(order.stages):
        for tokens, segments in batches(streams, order, index, stage.start):
            own = slice(stage.row_stride)
            seen += tokens[:, own][segments[:, own] > 0].tolist()
    epochs = order.progress(steps)[0][0]
    assert len(set(seen)) == len(seen) and 0.99 < epochs <= 1.0
    assert len(seen) > len(ids) - 4 * 5 * 2 - 20  # all but the tail that fills no row


# ---- held-out rows


@pytest.mark.parametrize("size, rows, positions", [(PRIME, 3, 7), (PRIME, 4, 8), (22, 3, 7)])
@pytest.mark.parametrize("limit", [0, 1, 100, 10**9])
def test_held_out_rows_are_spread_and_predict_nothing_twice(size, rows, positions, limit):
    got = [ids for (ids,) in eval_batches(Stream(np.arange(size)), rows, positions, limit)]
    most = (size - 1) // (rows * positions)
    wanted = most if limit == 0 else max(1, limit // (rows * positions))
    assert len(got) == min(most, wanted)  # whole batches only
    for batch in got:
        assert batch.shape == (rows, positions + 1) and batch.dtype == np.int32
    together = np.concatenate(got)
    np.testing.assert_array_equal(together, together[:, :1] + np.arange(positions + 1))
    predicted = together[:, 1:].ravel()
    assert len(np.unique(predicted)) == len(predicted) and predicted.max() < size
    starts = together[:, 0]
    spacing = np.unique(np.diff(starts))
    assert starts[0] == 0 and len(spacing) == 1
    assert size - 1 - (starts[-1] + spacing[0]) < len(starts)  # up to the end of the split


def test_held_out_documents_are_packed_too():
    ids, offsets = documents_of(np.random.default_rng(0), 40, 30)
    tokens, owners = padded(ids, offsets, 1)
    for found, segments in eval_batches(Stream(ids, offsets), 2, 9, 0, numbers=[1]):
        assert found.shape == segments.shape == (1, 10)
        (place,) = np.flatnonzero(tokens == found[0, 0])
        np.testing.assert_array_equal(found[0], tokens[place : place + 10])
        same = owners[place : place + 10]
        np.testing.assert_array_equal(np.diff(segments[0]) != 0, np.diff(same) != 0)


def test_a_held_out_split_below_one_batch_is_refused():
    with pytest.raises(DataError) as caught:
        eval_batches(Stream(np.arange(21), name="dclm"), 3, 7, 0)
    message = str(caught.value)
    assert "\n" not in message and "21 tokens" in message and "22" in message and "dclm" in message
