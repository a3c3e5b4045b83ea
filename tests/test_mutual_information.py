"""Mutual information against closed forms and a count by hand; the fit against known constants."""

import collections
import math

import numpy as np
import pytest

from tst_jax.data import mutual_information as module
from tst_jax.data.mutual_information import DISTANCES, fit, mutual_information
from tst_jax.data.order import DataError
from tst_jax.superposition import FITTED


def stream(*lengths):
    """Offsets of one shard."""
    return [np.cumsum([0, *lengths])]


def repeating(rng, stay, vocab, lengths):
    """Each token repeats the one before with probability `stay`, or is drawn anew."""
    fresh = rng.random(sum(lengths)) >= stay
    fresh[np.cumsum([0, *lengths[:-1]])] = True
    drawn = rng.integers(vocab, size=fresh.size)
    return drawn[np.maximum.accumulate(np.where(fresh, np.arange(fresh.size), 0))]


def by_hand(documents, d, longest):
    """Of the same pairs, with a dictionary."""
    pairs = [(doc[t], doc[t + d]) for doc in documents for t in range(len(doc) - longest)]
    entropy = lambda items: (
        -sum(n / len(pairs) * math.log(n / len(pairs)) for n in collections.Counter(items).values())
    )
    x, y = zip(*pairs)
    return entropy(x) + entropy(y) - entropy(pairs), len(pairs)


def test_a_copy_process_has_the_mutual_information_of_its_closed_form():
    vocab, stay, lengths = 4, 0.8, [4000] * 100
    ids = repeating(np.random.default_rng(0), stay, vocab, lengths).astype(np.uint16)
    curve = mutual_information(ids, stream(*lengths), vocab)
    assert curve.distances == list(DISTANCES) and curve.pairs == 100 * (4000 - 256)
    for d, value in zip(curve.distances, curve.values):
        same = stay**d + (1 - stay**d) / vocab
        other = (1 - same) / (vocab - 1)
        wanted = math.log(vocab) + same * math.log(same)
        wanted += (vocab - 1) * other * math.log(other) if other else 0
        assert value == pytest.approx(wanted, abs=0.005), d
    assert curve.chance < 1e-4


def test_independent_ids_give_the_bias_of_the_sample_at_every_distance():
    vocab, lengths = 50, [1000] * 60
    ids = np.random.default_rng(1).integers(vocab, size=sum(lengths)).astype(np.uint16)
    curve = mutual_information(ids, stream(*lengths), vocab)
    bias = (vocab - 1) ** 2 / (2 * curve.pairs)
    np.testing.assert_allclose([*curve.values, curve.chance], bias, rtol=0.12)
    with pytest.raises(DataError, match="does not decay"):
        fit(curve.distances, curve.values)


def test_a_token_that_fixes_the_next_gives_the_entropy():
    ids = np.tile(np.random.default_rng(2).permutation(61), 20)[: 256 + 61 * 12]
    ids = np.tile(ids, 3).astype(np.uint16)
    curve = mutual_information(ids, stream(*[ids.size // 3] * 3), 61)
    np.testing.assert_allclose(curve.values, math.log(61), rtol=1e-12)
    assert curve.chance < 0.3 * math.log(61)  # what a few pairs give by chance


@pytest.mark.parametrize("block", [37, 1000, 1 << 16])
def test_pairs_are_those_of_one_document_whatever_the_blocks_and_shards(monkeypatch, block):
    monkeypatch.setattr(module, "_BLOCK", block)
    rng = np.random.default_rng(3)
    lengths = [rng.integers(1, 700, size=n) for n in (9, 1, 14)]
    documents = [
        rng.integers(3, size=n) + 3 * (i % 5) for i, n in enumerate(np.concatenate(lengths))
    ]
    ids = np.concatenate(documents).astype(np.uint16)
    offsets = [np.concatenate([[0], np.cumsum(n)]) for n in lengths]
    curve = mutual_information(ids, offsets, 15)
    longest = curve.distances[-1]
    for d, value in zip(curve.distances, curve.values):
        wanted, pairs = by_hand(documents, d, longest)
        assert (curve.pairs, value) == (pairs, pytest.approx(wanted, abs=1e-12))
    # No overflow where a key needs 64 bits.
    large = (ids.astype(np.uint32) << 28) - 1
    found = mutual_information(large, offsets, 1 << 32)
    np.testing.assert_allclose(found.values, curve.values, rtol=1e-12)


def test_distances_end_where_too_few_pairs_have_them():
    rng = np.random.default_rng(4)
    ids = rng.integers(9, size=4000).astype(np.uint16)
    # Of 40 tokens, 39 have a next one and 16 one at 24, but only 8 one at 32.
    assert mutual_information(ids, stream(*[40] * 100), 9).distances == [*range(1, 17), 20, 24]
    assert mutual_information(ids, stream(*[2] * 2000), 9).distances == [1]
    with pytest.raises(DataError, match="no document has two tokens"):
        mutual_information(ids, stream(*[1] * 4000), 9)
    with pytest.raises(DataError, match="sample of 1 pairs hold none"):
        mutual_information(np.resize(ids, 140_000), stream(*[1] * 70_000, 70_000), 9, 1)
    with pytest.raises(DataError, match="pairs is 0"):
        mutual_information(ids, stream(4000), 9, 0)


def test_a_sample_is_spread_over_the_split_and_reads_no_more():
    class Recorder:
        read = []

        def __len__(self):
            return 1 << 26

        def __getitem__(self, part):
            self.read.append((part.start, part.stop))
            return np.arange(part.start, part.stop, dtype=np.uint32) % 1009

    steps, tokens = [], Recorder()
    offsets = [np.arange(0, (1 << 25) + 1, 1 << 12)] * 2
    show = lambda done, total: steps.append(done / total)
    curve = mutual_information(tokens, offsets, 1009, 200_000, show)
    assert 0.95 * 200_000 <= curve.pairs <= 200_000
    assert sum(stop - start for start, stop in tokens.read) < 300_000
    places = [start / len(tokens) for start, _ in tokens.read]
    np.testing.assert_allclose(places, np.arange(len(places)) / len(places), atol=0.01)
    assert steps == sorted(steps) and steps[-1] == 1 and len(steps) > 20


def test_fit_recovers_the_constants_of_the_paper():
    d = np.array(DISTANCES)
    law = lambda offset, scale, exponent: offset + scale * d**exponent
    np.testing.assert_allclose(fit(DISTANCES, law(*FITTED)), FITTED, rtol=1e-6)
    np.testing.assert_allclose(fit(d, law(1e-4, 3e-3, -0.5)), (1e-4, 3e-3, -0.5), rtol=1e-4)
    noise = 0.01 * np.random.default_rng(5).standard_normal(d.size)
    np.testing.assert_allclose(fit(d, law(*FITTED) + noise), FITTED, rtol=0.05)


@pytest.mark.parametrize(
    "values",
    [np.zeros(28), np.ones(28), np.arange(28.0), np.full(28, np.nan), np.full(28, np.inf)]
    + [1 + 0.01 * np.random.default_rng(seed).standard_normal(28) for seed in range(5)],
)
def test_fit_refuses_what_does_not_decay(values):
    with pytest.raises(DataError, match="does not decay"):
        fit(DISTANCES, values)


def test_fit_needs_four_distances_and_gives_weights_above_zero():
    with pytest.raises(DataError, match="at 3 distances"):
        fit([1, 2, 3], [3, 2, 1])
    offset, scale, exponent = fit(DISTANCES, 1 - np.log(DISTANCES) / 5)  # would go below 0
    assert offset >= 0 and scale > 0 and exponent < 0
