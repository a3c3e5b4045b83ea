"""Proves `tst_jax.data.pipeline`: what each step reads (rules 1, 2, 3).

On the data 0, 1, 2, ... a token is its own place in the stream, so every batch says what it read:
row after row the stream goes on across each switch; shuffled, an epoch reads every whole block
once; the batch of a step follows from the step alone, and each process reads its rows of it.
"""

import numpy as np
import pytest

from tst_jax.data.pipeline import DataError, RowPlan, batches, eval_batches
from tst_jax.data.store import open_store
from tst_jax.schedule import TSTConfig, make_stages

# (steps, B, L, method); s often divides neither L, nor B, nor the steps, nor the data.
RUNS = [
    (10, 2, 4, dict(bag_size=4, ratio=0.3)),
    (11, 3, 7, dict(bag_size=5, ratio=0.4)),
    (9, 1, 1, dict(bag_size=2, ratio=0.5)),
    (20, 2, 3, dict(stages="8:0.1,4:0.2,2:0.1")),
    (10, 3, 7, dict(bag_size=5, ratio=0.4, mode="output")),
    (10, 3, 7, dict(bag_size=5, ratio=0.4, mode="input")),
    (10, 2, 10, dict(bag_size=5, ratio=0.4, expand="batch")),
    (20, 3, 8, dict(stages="8:0.1,4:0.2,2:0.1", expand="batch")),
    (7, 2, 4, dict(ratio=0.0)),
    (7, 2, 4, dict(bag_size=3, ratio=1.0)),
]
each_run = pytest.mark.parametrize("steps, rows, positions, method", RUNS)
PRIME = 2003


def make_plan(size, steps, rows, positions, method, seed=0, shuffle=True):
    return RowPlan(make_stages(TSTConfig(**method), steps, rows, positions), size, seed, shuffle)


def run_steps(data, plan, **kwargs):
    """(stage, batch) of every step of a run."""
    for index, stage in enumerate(plan.stages):
        parts = list(batches(data, plan, index, stage.start, **kwargs))
        assert len(parts) == stage.stop - stage.start  # batches end with the stage
        yield from ((stage, part) for part in parts)


def used(data, plan):
    """The tokens that a run uses up, in order: of each row what is not the next row's too."""
    return np.concatenate([part[:, : s.row_stride].ravel() for s, part in run_steps(data, plan)])


def whole_epochs(order, plan):
    """Asserts that `order` is epoch after epoch of each whole block once; returns the epochs."""
    uses = [stage.step_tokens for stage in plan.stages for _ in range(stage.start, stage.stop)]
    owner = [stage for stage in plan.stages for _ in range(stage.start, stage.stop)]
    step_at, epochs, begin = np.cumsum(uses), [], 0
    while begin < len(order):
        stage = owner[np.searchsorted(step_at, begin, side="right")]  # its rows cut the epoch
        extra = stage.row_tokens - stage.row_stride
        size = (plan.tokens - extra) // stage.row_stride * stage.row_stride
        epoch = order[begin : begin + size]
        begin += size
        if len(epoch) == size:
            np.testing.assert_array_equal(np.sort(epoch), np.arange(size))
        else:  # cut off by the end of the run
            assert len(np.unique(epoch)) == len(epoch) and epoch.max() < size
        epochs.append(epoch)
    return epochs


@each_run
def test_unshuffled_steps_are_the_stream(steps, rows, positions, method):
    data = np.arange(PRIME)
    plan = make_plan(PRIME, steps, rows, positions, method, shuffle=False)
    place = 0
    for stage, batch in run_steps(data, plan):
        assert batch.shape == (stage.rows, stage.row_tokens) and batch.dtype == np.int32
        for row in batch:  # the target bag past a row's own bags is the next row's first
            np.testing.assert_array_equal(row, place + np.arange(stage.row_tokens))
            place += stage.row_stride
    assert place == sum(stage.step_tokens * (stage.stop - stage.start) for stage in plan.stages)
    assert plan.epochs == 1


def test_neighbouring_rows_share_one_bag():
    plan = make_plan(PRIME, 4, 3, 7, dict(bag_size=5, ratio=1.0), shuffle=False)
    stream = np.random.default_rng(0).integers(0, 99, PRIME)
    rows = np.concatenate([batch for _, batch in run_steps(stream, plan)])
    assert rows.shape == (12, 8 * 5)
    np.testing.assert_array_equal(rows[:-1, -5:], rows[1:, :5])


@each_run
@pytest.mark.parametrize("size", [PRIME, 97])  # within one epoch; several
def test_an_epoch_reads_each_block_once(steps, rows, positions, method, size):
    plan = make_plan(size, steps, rows, positions, method, seed=3)
    epochs = whole_epochs(used(np.arange(size), plan), plan)
    assert plan.epochs == len(epochs)


def test_no_epoch_repeats_the_order_of_another():
    method = dict(bag_size=4, ratio=0.5)
    plan = make_plan(500, 160, 2, 5, method)
    epochs = whole_epochs(used(np.arange(500), plan), plan)
    assert len(epochs) == 9  # six superposed, one across the switch, one and a part recovering
    orders = {tuple(epoch[epoch % 20 == 0]) for epoch in epochs[:-1]}
    assert len(orders) == 8 and tuple(range(0, 480, 20)) not in orders


def test_the_seed_and_nothing_else_makes_the_order():
    data, run = np.arange(PRIME), (11, 3, 7, dict(bag_size=5, ratio=0.4))
    first, again, other = (used(data, make_plan(PRIME, *run, seed=s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5


def test_shuffling_does_not_stop_at_the_switch():
    """The blocks that superposition left are cut into recovery's rows, and those shuffled."""
    plan = make_plan(PRIME, 10, 2, 4, dict(bag_size=4, ratio=0.3))
    starts = [row[0] for stage, batch in run_steps(np.arange(PRIME), plan) for row in batch]
    before, after = np.asarray(starts[:6]), np.asarray(starts[6:])
    assert set(before % 16) == {0} and set(after % 16) == {0, 4, 8, 12}
    assert not set(after // 16) & set(before // 16)
    assert (np.diff(after) == 4).mean() < 0.3


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("size", [PRIME, 97])
def test_a_batch_is_a_pure_function_of_the_step(size, shuffle):
    data = np.arange(size)
    for steps, rows, positions, method in RUNS[1:4]:
        plan = make_plan(size, steps, rows, positions, method, shuffle=shuffle)
        whole = [batch for _, batch in run_steps(data, plan)]
        for index, stage in enumerate(plan.stages):
            for step in range(stage.start, stage.stop):  # the steps around each switch among them
                fresh = make_plan(size, steps, rows, positions, method, shuffle=shuffle)
                rest = list(batches(data, fresh, index, step))
                assert len(rest) == stage.stop - step
                np.testing.assert_array_equal(rest[0], whole[step])
                np.testing.assert_array_equal(rest[-1], whole[stage.stop - 1])
            assert not list(batches(data, plan, index, stage.stop))


@pytest.mark.parametrize(
    "shares", [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[1, 3], [0, 2], [1, 3]]]
)
@pytest.mark.parametrize("expand", ["length", "batch"])
def test_processes_read_their_rows_of_one_batch(shares, expand):
    """Any rows, also such as two processes share or as do not lie side by side, and no others."""

    class Read(np.ndarray):
        def __getitem__(self, index):
            read.append((index.start, index.stop))
            return super().__getitem__(index)

    data, read = np.arange(PRIME), []
    plan = make_plan(PRIME, 12, 4, 6, dict(bag_size=3, ratio=0.5, expand=expand))
    scale = {stage.rows: stage.rows // 4 for stage in plan.stages}
    for numbers in shares:
        wide = {
            rows: np.concatenate([np.arange(n * k, n * k + k) for n in numbers])
            for rows, k in scale.items()
        }
        for index, stage in enumerate(plan.stages):
            mine = wide[stage.rows]
            read.clear()
            parts = list(batches(data.view(Read), plan, index, stage.start, mine))
            whole = list(batches(data, plan, index, stage.start))
            for part, all_rows in zip(parts, whole, strict=True):
                np.testing.assert_array_equal(part, all_rows[mine])
            starts = [(part[:, 0]).tolist() for part in parts]
            assert read == [(k, k + stage.row_tokens) for step in starts for k in step]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("mode, longest", [("full", 35), ("output", 11)])
def test_a_corpus_of_one_row_is_read_and_a_shorter_one_refused(mode, longest, shuffle):
    run = (4, 2, 6, dict(bag_size=5, ratio=0.5, mode=mode))
    plan = make_plan(longest, *run, shuffle=shuffle)
    for stage, batch in run_steps(np.arange(longest), plan):
        if stage.bag_size > 1:
            np.testing.assert_array_equal(batch, [np.arange(longest)] * 2)
    with pytest.raises(DataError) as caught:
        make_plan(longest - 1, *run, shuffle=shuffle)
    message = str(caught.value)
    assert "\n" not in message and f"{longest - 1} tokens" in message and f"{longest};" in message


def test_ids_of_a_store_come_out_as_int32(store):
    tokens = open_store(store).tokens("train")
    assert tokens.dtype == np.uint16
    plan = make_plan(len(tokens), 4, 2, 3, dict(bag_size=2, ratio=0.5), shuffle=False)
    stream = np.asarray(tokens)
    first = next(batches(tokens, plan, 0, 0))
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, [stream[:8], stream[6:14]])
    high = np.arange(65_000, 65_500).astype(np.uint16)  # no sign bit, no wrap
    assert next(batches(high, make_plan(500, *RUNS[0], shuffle=False), 0, 0)).min() == 65_000
    assert eval_batches(high, 2, 5, 0)[0].dtype == np.int32


# ---- held-out rows


@pytest.mark.parametrize("size, rows, positions", [(PRIME, 3, 7), (PRIME, 4, 8), (22, 3, 7)])
@pytest.mark.parametrize("limit", [0, 1, 100, 10**9])
def test_held_out_rows_are_spread_and_predict_nothing_twice(size, rows, positions, limit):
    got = eval_batches(np.arange(size), rows, positions, limit)
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


def test_a_held_out_split_below_one_batch_is_refused():
    with pytest.raises(DataError) as caught:
        eval_batches(np.arange(21), 3, 7, 0)
    message = str(caught.value)
    assert "\n" not in message and "21 tokens" in message and "22" in message
