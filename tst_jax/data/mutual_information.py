"""How much a token tells of the one d places on: the decay that gives slot weights (rule 12).

Appendix D of the paper measures the mutual information between pairs of tokens at distance d and
finds a power law, C0 + a * d^k, whose values at 1, 2, .. s are weights for a target bag's slots.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tst_jax.data.order import DataError

DISTANCES = (*range(1, 17), 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256)
PAIRS = 10_000_000

_BLOCK = 1 << 16  # neighbouring tokens that are taken or left together
_LEFT = 0.5  # of the variance, at most, by a fit: noise around a constant leaves more


class Curve(NamedTuple):
    """Mutual information against distance."""

    distances: list[int]  # tokens
    values: list[float]  # nats, one a distance
    pairs: int  # that each value is counted from
    chance: float  # nats, the same count for pairs put together at random: bias alone


def mutual_information(
    tokens,
    documents: Sequence[np.ndarray],
    vocab_size: int,
    pairs: int = PAIRS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Curve:
    """The plug-in estimate H(X) + H(Y) - H(X, Y) of X = ids[t], Y = ids[t + d], from counts.

    All distances are counted over the same places t, those that have t + d in their own document
    (which its separator belongs to) even for the largest d. So the number of pairs and X itself are
    the same at all distances, and with them nearly the bias of a finite sample: upwards, about
    (distinct pairs) / (2 * pairs). It makes part of the constant C0 of `fit`, so that curves of the
    same number of pairs compare. The largest d is that of `DISTANCES` which a quarter of the places
    still have that have a next token: in a corpus of short documents it is less than 256.

    Args:
      tokens: ids of a split, sliceable; `Store.tokens`.
      documents: offsets of each shard's documents, int64; `Store.documents`.
      vocab_size: ids are below it, at most 2**32.
      pairs: at most so many, from blocks of neighbouring tokens spread evenly over the split.
        Memory is at most 50 bytes a pair, whatever the size of the split.
      progress: called with pairs that are counted and pairs to count, over all distances.
    Raises:
      DataError: `pairs` below 1, or no document has two tokens.
    """
    if pairs < 1:
        raise DataError(f"pairs is {pairs}; give 1 or more")
    places = np.zeros(len(DISTANCES), np.int64)  # that have a token so far on in their document
    for offsets in documents:
        lengths = np.diff(offsets)
        places += [np.maximum(lengths - d, 0).sum() for d in DISTANCES]
    if not places[0]:
        raise DataError(
            "no document has two tokens, so there are no pairs; prepare other documents"
        )
    distances = [d for d, n in zip(DISTANCES, places) if 4 * n >= places[0]]
    sample = _sample(tokens, documents, distances[-1], places[len(distances) - 1], pairs)
    count = sum(int(valid.sum()) for _, valid in sample)
    if not count:
        raise DataError(f"the blocks of a sample of {pairs} pairs hold none; give more pairs")

    at = lambda d: np.concatenate([ids[d : d + valid.size][valid] for ids, valid in sample])
    keys = np.uint32 if vocab_size <= 1 << 16 else np.uint64
    first_N = at(0).astype(keys) * keys(vocab_size)
    first_entropy, values = _entropy(first_N.copy()), []
    for number, d in enumerate([*distances, distances[-1]]):
        second_N = at(d)
        if number == len(distances):
            np.random.default_rng(0).shuffle(second_N)
        joint_entropy = _entropy(first_N + second_N)
        values.append(max(first_entropy + _entropy(second_N) - joint_entropy, 0.0))
        progress((number + 1) * count, (len(distances) + 1) * count)
    return Curve(distances, values[:-1], count, values[-1])


def _sample(tokens, documents, longest, places, pairs):
    """[(ids [n + longest], bool [n])]: where True, id i and id i + longest are of one document."""
    blocks = math.ceil(len(tokens) / _BLOCK)
    taken = min(blocks, math.ceil(blocks * pairs / places))
    # Where documents differ much in length, the blocks may hold a few places less than wanted.
    found = []
    for number in range(taken):
        start = number * blocks // taken * _BLOCK
        stop = min(start + _BLOCK, len(tokens) - longest)
        if start >= stop:
            continue
        valid = np.arange(start, stop) + longest < _ends(documents, start, stop)
        # The last ones beyond `pairs` are left out.
        valid &= np.cumsum(valid) <= pairs
        pairs -= int(valid.sum())
        found.append((tokens[start : stop + longest], valid))
    return found


def _ends(documents, start, stop):
    """int64 [stop - start]: where in the stream the document of each place ends."""
    found, before = [], 0
    for offsets in documents:
        low, high = max(start - before, 0), min(stop - before, int(offsets[-1]))
        if low < high:
            i, j = np.searchsorted(offsets, [low, high - 1], side="right")
            ends = np.asarray(offsets[i : j + 1])
            counts = np.minimum(ends, high) - np.maximum(offsets[i - 1 : j], low)
            found.append(np.repeat(before + ends, counts))
        before += int(offsets[-1])
    return np.concatenate(found)


def _entropy(keys_N) -> float:
    """Entropy of the counts of equal keys, nats. Sorts `keys_N` in place."""
    keys_N.sort()
    last = np.append(np.flatnonzero(keys_N[1:] != keys_N[:-1]), keys_N.size - 1)
    counts = np.diff(last, prepend=-1)
    return math.log(keys_N.size) - float((counts * np.log(counts)).sum()) / keys_N.size


def fit(distances: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """(C0, a, k) of C0 + a * d^k by least squares, C0 >= 0, a > 0, k < 0: above 0 for every d.

    The paper finds about 3.63, 1.35 and -1.25 for DCLM (Appendix D), `superposition.FITTED`.

    Args:
      distances: tokens, at least 1.
      values: mutual information at each, nats.
    Raises:
      DataError: fewer than four distances, or values that do not decay so.
    """
    import scipy.optimize  # of all that runs only this needs it

    if len(distances) < 4:
        raise DataError(
            f"mutual information at {len(distances)} distances gives no power law; it needs 4, "
            "that is documents of 5 tokens and more"
        )
    d, y = np.asarray(distances, np.float64), np.asarray(values, np.float64)
    size = np.abs(y).max()
    if 0 < size < np.inf:
        y = y / size  # about 1, since the optimizer's tolerances are in part absolute
        law = lambda d, offset, scale, exponent: offset + scale * d**exponent
        begin = max(0.9 * y.min(), 1e-6), 0.5, -1.0
        bounds = (0, 0, -20), (np.inf, np.inf, -1e-3)
        options = dict.fromkeys(("ftol", "xtol", "gtol"), 1e-13) | {"max_nfev": 10_000}
        try:
            found = scipy.optimize.curve_fit(law, d, y, begin, bounds=bounds, **options)[0]
        except RuntimeError:  # it does not converge
            found = begin
        variance, left = y.var(), ((y - law(d, *found)) ** 2).mean()
        if variance > 1e-20 and left <= _LEFT * variance and found[1] > 0:
            return float(found[0] * size), float(found[1] * size), float(found[2])
    raise DataError(
        "mutual information does not decay with distance as C0 + a * d^k; give more pairs, or "
        "other slot weights than fitted"
    )
