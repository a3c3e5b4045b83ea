"""Proves that chunked linear attention is its recurrence, and forgets what it has to forget."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import (
    ROUNDING,
    difference,
    documents,
    exactly,
    inputs,
    repeated,
    with_gradients,
)

from tst_jax.models.attention import linear_attention


def recurrence(query, key, value, log_decay, segments=None, state=None):
    """One position after the other."""
    rows, length, heads, head_dim = query.shape
    key, value = repeated(key, heads), repeated(value, heads)
    if state is None:
        state = jnp.zeros((rows, heads, head_dim, head_dim), query.dtype)
    starts = np.zeros((rows, length), bool)
    if segments is not None:
        starts[:, 1:] = segments[:, 1:] != segments[:, :-1]

    def step(state, now):
        q, k, v, a, start = now
        state = jnp.where(start[:, None, None, None], 0, jnp.exp(a)[..., None, None] * state)
        state = state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhq,bhqr->bhr", q / np.sqrt(head_dim), state)

    by_position = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, log_decay, starts)]
    state, mixed = jax.lax.scan(step, state, by_position)
    return jnp.moveaxis(mixed, 0, 1), state


def decays(length, rows=2):
    """Log decays: a first head that hardly forgets, to a fourth that sometimes forgets all."""
    size = np.random.default_rng(1).uniform(-3, [-1.5, -0.5, 0.5, 1.7], (rows, length, 4))
    return -(10.0**size).astype(np.float32)


def states(seed, rows=2):
    return np.random.default_rng(seed).normal(size=(rows, 4, 16, 16)).astype(np.float32)


def whole_problem(packed):
    """All arguments but segments, these, and gradients of the result and the final state."""
    query, key, value, cotangent = inputs(96)
    segments = documents(96) if packed else None
    return (query, key, value, decays(96), states(2)), segments, (cotangent, states(3))


@functools.cache
def exact_answer(packed):
    arrays, segments, cotangents = whole_problem(packed)
    return exactly(lambda *x: recurrence(*x[:4], segments, x[4]), arrays, cotangents)


def changed_where(at_BxL, arrays):
    """Other numbers there; decays stay below 0."""
    spread = lambda x: at_BxL.reshape(at_BxL.shape + (1,) * (x.ndim - 2))
    return [np.where(spread(x), 1.5 * x - 1, x) for x in arrays]


each_packing = pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])


@each_packing
@pytest.mark.parametrize("chunk", [7, 32, 200])
def test_it_is_the_recurrence(chunk, packed):
    """Result, final state, and the gradients of both with respect to every input."""
    arrays, segments, cotangents = whole_problem(packed)
    chunked = lambda *x: linear_attention(*x[:4], segments, x[4], chunk)
    got = with_gradients(chunked, arrays, cotangents)
    assert difference(got, exact_answer(packed)) <= ROUNDING


def test_slight_decays_count_beside_total_ones():
    """Sums of log decays from the start of a chunk would lose the digits of what comes later."""
    query, key, value, cotangent = inputs(64)
    log_decay = np.full((2, 64, 4), -0.01, np.float32)
    log_decay[:, :20], log_decay[:, 20] = -50, -1e5
    problem = (query, key, value, log_decay), (cotangent, states(3))
    got = with_gradients(linear_attention, *problem)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    assert difference(got, exactly(recurrence, *problem)) <= ROUNDING


@pytest.mark.parametrize("pieces", [(1,) * 40, (13, 27), (32, 8)], ids=["tokens", "odd", "chunks"])
def test_a_state_continues_the_row(pieces):
    """Token by token, as in decoding, and in longer pieces."""
    arrays = (*inputs(40)[:3], decays(40), documents(40))
    want = linear_attention(*arrays, chunk=8)
    step = jax.jit(functools.partial(linear_attention, chunk=8))
    state, mixed = None, []
    for end, count in zip(np.cumsum(pieces), pieces):
        start = end - count
        if start:  # the state belongs to the first document of a piece: not to a new one
            new = arrays[-1][:, start] != arrays[-1][:, start - 1]
            state = jnp.where(new[:, None, None, None], 0, state)
        piece, state = step(*(x[:, start:end] for x in arrays), state)
        mixed.append(piece)
    assert difference((np.concatenate(mixed, 1), state), want) <= ROUNDING


@pytest.mark.parametrize("chunk", [16, 96])
def test_no_document_reads_another(chunk):
    """Nor the state before the row; an id that comes back is another document."""
    arrays, segments, _ = whole_problem(packed=True)
    first, segments = segments == 0, segments % 3
    mix = jax.jit(lambda *x: linear_attention(*x[:4], segments, x[4], chunk))
    before, last = map(np.asarray, mix(*arrays))
    after, state = map(np.asarray, mix(*changed_where(first, arrays[:4]), 2 - arrays[4]))
    np.testing.assert_array_equal(after[~first], before[~first])
    np.testing.assert_array_equal(state, last)
    assert (after[first] != before[first]).mean() > 0.9


def test_no_position_reads_a_later_one():
    arrays = (*inputs(96)[:3], decays(96))
    mix = jax.jit(lambda *x: linear_attention(*x, chunk=32)[0])
    later = np.broadcast_to(np.arange(96) >= 50, (2, 96))
    before, after = np.asarray(mix(*arrays)), np.asarray(mix(*changed_where(later, arrays)))
    np.testing.assert_array_equal(after[~later], before[~later])
    assert (after[later] != before[later]).mean() > 0.9


def test_queries_are_grouped_and_dtypes_kept():
    *arrays, _ = inputs(32)
    mix = jax.jit(linear_attention)
    got = mix(*arrays, decays(32))
    want = mix(arrays[0], *(repeated(x, 4) for x in arrays[1:]), decays(32))
    assert difference(got, want) <= 1e-6
    # In bfloat16 only the inputs and the result are rounded, and nothing between them.
    half = [jnp.asarray(x, jnp.bfloat16) for x in arrays]
    mixed, state = mix(*half, decays(32))
    assert mixed.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    want, want_state = mix(*(x.astype(jnp.float32) for x in half), decays(32))
    assert difference(mixed, want) <= 2**-8 and difference(state, want_state) <= 1e-6


def test_memory_grows_with_the_length():
    """Of value and gradients; four times the positions, at most a little over four times it."""

    def bytes_for(length):
        arrays = (*inputs(length, rows=1)[:3], decays(length, rows=1))
        total = lambda *x: linear_attention(*x)[0].sum()
        compiled = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3))).lower(*arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_for(16384) <= 1.2 * 4 * bytes_for(4096)
