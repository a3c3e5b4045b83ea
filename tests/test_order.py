"""Proves `tst_jax.data.order` and `mixture`: which rows each step reads (rules 1, 2, 3).

On a stream whose tokens are their own places 0, 1, 2, ..., a batch says what it read: row after row
the stream goes on across each switch; shuffled, an epoch reads every whole block once, in each
store of a mixture; and a batch size that changes cuts the same sequence of rows elsewhere.
"""

import fractions

import numpy as np
import pytest

from tst_jax.data.mixture import Mixture
from tst_jax.data.order import DataError, Order
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


def make_order(sizes, steps, rows, positions, method, rows_from="", **options):
    sizes = [sizes] if isinstance(sizes, int) else sizes
    stages = make_stages(TSTConfig(**method), steps, rows, positions, rows_from)
    return Order(stages, [lambda align, n=n: n for n in sizes], **options)


def run_rows(order):
    """(stage, store, place) of every row of a run, in order."""
    for index, stage in enumerate(order.stages):
        for k in range((stage.stop - stage.start) * stage.rows):
            store, place, align = order.place(index, k)
            assert align % stage.align == 0
            yield stage, store, place


def used(order, store=0):
    """The places of a store that a run uses up, in order: not what is the next row's too."""
    parts = [p + np.arange(s.row_stride) for s, i, p in run_rows(order) if i == store]
    return np.concatenate([np.empty(0, int), *parts])


def whole_epochs(order, size, store=0):
    """Asserts that a store is read epoch after epoch, each whole block once; returns the epochs."""
    rows = [(stage, place) for stage, i, place in run_rows(order) if i == store]
    epochs, k = [], 0
    while k < len(rows):
        stage = rows[k][0]  # its rows cut the epoch
        extra = stage.row_tokens - stage.row_stride
        whole = (size - extra) // stage.row_stride * stage.row_stride
        places = []
        while k < len(rows) and sum(map(len, places)) < whole:
            places.append(rows[k][1] + np.arange(rows[k][0].row_stride))
            k += 1
        places = np.concatenate(places)
        if k < len(rows):
            np.testing.assert_array_equal(np.sort(places), np.arange(whole))
        else:  # cut off by the end of the run
            assert len(np.unique(places)) == len(places) and places.max() < size
        epochs.append(places)
    return epochs


@each_run
def test_unshuffled_rows_are_the_stream(steps, rows, positions, method):
    order = make_order(PRIME, steps, rows, positions, method, shuffle=False)
    place = 0
    for stage, _, start in run_rows(order):
        assert start == place
        place += stage.row_stride
    assert place == sum(stage.step_tokens * (stage.stop - stage.start) for stage in order.stages)
    assert order.progress(steps)[0] == (pytest.approx(place / PRIME, abs=0.05), place)
    assert order.first_repeat(0) is None


@each_run
@pytest.mark.parametrize("size", [PRIME, 97])  # within one epoch; several
def test_an_epoch_reads_each_block_once(steps, rows, positions, method, size):
    order = make_order(size, steps, rows, positions, method, seed=3)
    epochs = whole_epochs(order, size)
    (found, places), *_ = order.progress(steps)
    assert len(epochs) - 1 < found <= len(epochs) and places == len(used(order))


def test_no_epoch_repeats_the_order_of_another():
    order = make_order(500, 160, 2, 5, dict(bag_size=4, ratio=0.5))
    epochs = whole_epochs(order, 500)
    assert len(epochs) == 9  # six superposed, one across the switch, one and a part recovering
    orders = {tuple(epoch[epoch % 20 == 0]) for epoch in epochs[:-1]}
    assert len(orders) == 8 and tuple(range(0, 480, 20)) not in orders


def test_the_seed_and_nothing_else_makes_the_order():
    run = (11, 3, 7, dict(bag_size=5, ratio=0.4))
    first, again, other = (used(make_order(PRIME, *run, seed=s)) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.5


def test_shuffling_does_not_stop_at_the_switch():
    """The blocks that superposition left are cut into recovery's rows, and those shuffled."""
    order = make_order(PRIME, 10, 2, 4, dict(bag_size=4, ratio=0.3))
    starts = [place for _, _, place in run_rows(order)]
    before, after = np.asarray(starts[:6]), np.asarray(starts[6:])
    assert set(before % 16) == {0} and set(after % 16) == {0, 4, 8, 12}
    assert not set(after // 16) & set(before // 16)
    assert (np.diff(after) == 4).mean() < 0.3


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("mode, longest", [("full", 35), ("output", 11)])
def test_a_corpus_of_one_row_is_read_and_a_shorter_one_refused(mode, longest, shuffle):
    run = (4, 2, 6, dict(bag_size=5, ratio=0.5, mode=mode))
    order = make_order(longest, *run, shuffle=shuffle)
    assert [place for stage, _, place in run_rows(order) if stage.bag_size > 1] == [0] * 4
    with pytest.raises(DataError) as caught:
        make_order(longest - 1, *run, shuffle=shuffle, names=["dclm"])
    message = str(caught.value)
    assert "\n" not in message and f"{longest - 1} tokens" in message and f"{longest};" in message
    assert "dclm" in message


# ---- batch sizes


@each_run
@pytest.mark.parametrize("weights", [None, ["0.29", "0.71"]])
def test_other_batch_sizes_cut_the_same_rows(steps, rows, positions, method, weights):
    """Within a phase, whatever the number of rows in each step: one sequence."""
    sizes = [PRIME] if weights is None else [PRIME, 1499]
    plain = make_order(sizes, steps, rows, positions, method, weights=weights)
    switch = next(s.start for s in plain.stages if s.bag_size == plain.stages[-1].bag_size)
    changed = make_order(
        *(sizes, steps, rows, positions, method, f"{switch + 1}:{rows + 2},{switch + 2}:1"),
        weights=weights,
    )
    assert [s.rows for s in changed.stages][-2:] != [s.rows for s in plain.stages][-2:]
    last = lambda order: [
        (store, place) for s, store, place in run_rows(order) if s.start >= switch
    ]
    first, second = last(plain), last(changed)
    count = min(len(first), len(second))
    assert count > 2 and first[:count] == second[:count]
    before = lambda order: [row for row in run_rows(order) if row[0].start < switch]
    assert before(plain) == before(changed)


def test_a_batch_size_may_change_in_both_phases():
    method = dict(bag_size=4, ratio=0.5)
    order = make_order(PRIME, 20, 2, 4, method, "4:6,15:8")
    shape = [(s.start, s.stop, s.bag_size, s.rows) for s in order.stages]
    assert shape == [(0, 4, 4, 2), (4, 10, 4, 6), (10, 15, 1, 6), (15, 20, 1, 8)]
    assert len(np.unique(used(order))) == len(used(order))
    assert order.progress(20)[0][1] == len(used(order))


# ---- mixtures


@pytest.mark.parametrize(
    "weights", [["0.5", "0.5"], ["0.29", "0.71"], ["1", "2", "4"], ["0.001", "0.999"], ["7"]]
)
def test_shares_are_exact(weights):
    mixture = Mixture(weights)
    total = sum(map(fractions.Fraction, weights))
    shares = [fractions.Fraction(weight) / total for weight in weights]
    owners, counts = [], [0] * len(weights)
    for k in range(2 * mixture.cycle + 3):
        assert [mixture.count(store, k) for store in range(len(weights))] == counts
        store, row = mixture.locate(k)
        assert row == counts[store]
        counts[store] += 1
        owners.append(store)
        if (k + 1) % mixture.cycle == 0:  # to the row, not on average
            assert counts == [share * (k + 1) for share in shares]
        # Never further from its share than a row for each store: spread evenly.
        assert all(abs(n - s * (k + 1)) < len(weights) for n, s in zip(counts, shares))
    far = 10**12 + 7
    assert sum(mixture.count(store, far) for store in range(len(weights))) == far


@each_run
def test_each_store_of_a_mixture_is_covered_across_the_switch(steps, rows, positions, method):
    sizes = [1499, 97, 311]
    order = make_order(sizes, steps, rows, positions, method, weights=["0.6", "0.3", "0.1"])
    for store, size in enumerate(sizes):
        epochs = whole_epochs(order, size, store)
        found, places = order.progress(steps)[store]
        assert len(epochs) - 1 < found <= len(epochs) and places == len(used(order, store))


def test_stores_of_one_length_have_orders_of_their_own():
    order = make_order([PRIME, PRIME], 20, 4, 5, dict(ratio=0.0), weights=["1", "1"])
    first, second = used(order, 0), used(order, 1)
    assert (first[:100] == second[:100]).mean() < 0.2


def test_progress_and_the_first_repeat_step_by_step():
    """Against rows counted one by one."""
    sizes = [1499, 97]
    run = (20, 2, 4, dict(bag_size=4, ratio=0.3))
    order = make_order(sizes, *run, weights=["0.7", "0.3"], seed=5)
    seen = [set(), set()]
    repeated = [None, None]
    places = [0, 0]
    rows = iter(run_rows(order))
    for step in range(20):
        stage = next(s for s in order.stages if step < s.stop)
        before = order.progress(step)
        assert [n for _, n in before] == places
        for _ in range(stage.rows):
            _, store, place = next(rows)
            own = set(range(place, place + stage.row_stride))
            if seen[store] & own and repeated[store] is None:
                repeated[store] = step
            seen[store] |= own
            places[store] += stage.row_stride
        after = order.progress(step + 1)
        assert all(a[0] <= b[0] for a, b in zip(before, after))
    assert repeated[0] is None and repeated[1] is not None
    assert [order.first_repeat(store) for store in (0, 1)] == repeated
    assert order.progress(0) == [(0.0, 0), (0.0, 0)]


def test_random_offsets_move_the_bags_of_superposed_rows_alone():
    """By 0 .. s - 1 tokens, anew in each epoch, and never past the end; recovery stays in place."""
    method = dict(bag_size=4, ratio=0.8)
    run = PRIME, 100, 4, 8, method
    plain, moved = make_order(*run), make_order(*run, random_offset=True)
    offsets, seen = [], {}
    for (stage, _, place), (_, _, other) in zip(run_rows(plain), run_rows(moved), strict=True):
        assert other + stage.row_tokens <= PRIME
        if stage.bag_size == 1:
            assert other == place
            continue
        assert 0 <= other - place < 4
        offsets.append(other - place)
        seen.setdefault(place, set()).add(other - place)
    counts = np.bincount(offsets, minlength=4)
    assert counts.min() > len(offsets) / 6  # of 4, each about as often
    assert len(offsets) > 3 * len(seen)  # several epochs
    assert sum(len(found) > 1 for found in seen.values()) > len(seen) / 2
    again = make_order(*run, random_offset=True)
    assert list(run_rows(again)) == list(run_rows(moved))
    assert list(run_rows(make_order(*run, random_offset=True, seed=1))) != list(run_rows(moved))
    # The last row of a stream that its rows fill to the end has nowhere to go.
    full = make_order(PRIME // 32 * 32 + 4, 100, 4, 8, method, random_offset=True, shuffle=False)
    assert max(place + s.row_tokens for s, _, place in run_rows(full)) == PRIME // 32 * 32 + 4
