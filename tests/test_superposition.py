"""Proves `tst_jax.superposition` against the numbered rules of the method, without a trainer.

A position reads bag j and predicts bag j + 1 (rules 1, 2); the bag mean is a plain look-up at s = 1
and scatter-adds its gradient (rules 5, 6); the bag loss and both its gradients equal a float64
reference for every objective, slot weight and mode, and ordinary cross-entropy at s = 1
(rules 8, 10, 12); the logits are never whole, and a position costs one logsumexp whatever s
(rule 9); a foreign trainer needs nothing but this module to learn in both phases.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax import superposition as st
from tst_jax.kernels import scatter

B, L, S, V, D = 2, 5, 3, 37, 8
RTOL = 2e-6  # float32 rounding of sums this short, relative to the largest entry
each_objective = pytest.mark.parametrize("objective", st.OBJECTIVES)
each_mode = pytest.mark.parametrize("mode", st.MODES)


def bits(x):
    x = np.asarray(x)
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def assert_close(got, want, rtol=RTOL):
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()  # a zero must be exact


def assert_refused(call, *words, error=ValueError):
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def equations(jaxpr):
    """Every equation, those inside scans, jits, checkpoints and custom gradients included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(list(eqn.params.values())):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                yield from equations(value)


def traced(function, *args):
    """The equations of a function, and the size of the largest array in them."""
    eqns = list(equations(jax.make_jaxpr(function)(*args).jaxpr))
    return eqns, max(math.prod(v.aval.shape) for e in eqns for v in (*e.invars, *e.outvars))


@functools.partial(jax.jit, static_argnames=("objective", "chunk"))
def graded(hidden, head, targets, mask=None, weights=None, objective="mce", chunk=1024):
    """((loss_sum, weight_sum), (d_hidden, d_head)) of the loss summed."""
    loss = lambda h, w: st.bag_loss(
        h, w, targets, mask, weights_S=weights, objective=objective, chunk=chunk
    )
    return jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, head)


def case(seed, mode="full", batch=B, positions=L, bag=S):
    """Random hidden, head, targets, mask: a bag of one token thrice, pads, a bag of pads only.

    Pads are read as token 0, so that is made a likely logit, and a target that follows a pad.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (batch, st.row_tokens(positions, bag, mode)))
    mask = rng.random(tokens.shape) < 0.7
    tokens[0, bag : 2 * bag], mask[0, bag : 2 * bag], mask[-1, -bag:] = 5, True, False
    tokens[0, -bag:], mask[0, -bag:] = 0, np.arange(bag) > 0
    tokens[~mask] = rng.choice([-1, V, 2**31 - 1], (~mask).sum())  # ids of pads are not read
    targets, mask = (st.split_rows(x, bag, mode)[1] for x in (tokens.astype(np.int32), mask))
    head = normal(seed + 99, V, D) * np.where(np.arange(V) == 0, 3, 1)[:, None].astype(np.float32)
    return normal(seed, batch, positions, D), head, targets, mask


def reference(hidden, head, targets, mask, weights, objective):
    """float64: loss_sum, weight_sum, d_hidden, d_head. A slot of weight 0 is not in the bag."""
    h, w, weights = (np.asarray(x, np.float64) for x in (hidden, head, weights))
    loss, weight, d_hidden, d_head = 0.0, 0.0, np.zeros_like(h), np.zeros_like(w)
    for at in np.ndindex(targets.shape[:-1]):
        z = w @ h[at]
        lse = z.max() + np.log(np.exp(z - z.max()).sum())
        p, every, once = np.exp(z - lse), np.zeros(V), np.zeros(V)
        for token, slot, valid in zip(targets[at], weights, mask[at], strict=True):
            if valid and slot > 0:
                every[token] += slot  # the multiset
                once[token] = once[token] or slot / weights.max()  # at its first valid slot
        if not every.any():
            continue
        weight += every.sum() if objective in ("mce", "hinge") else 1
        if objective == "mce":
            loss += every.sum() * lse - every @ z
            d_z = every.sum() * p - every
        elif objective == "mass":
            loss -= np.log(once @ p)
            d_z = p - once * p / (once @ p)
        elif objective == "bce":
            yes, no = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
            loss -= once @ np.log(yes) + (1 - once) @ np.log(no)
            d_z = yes - once
        else:
            rival = np.where(every > 0, -np.inf, z).argmax()
            hits = every * (1 + z[rival] - z > 0)
            loss += hits @ (1 + z[rival] - z)
            d_z = -hits
            d_z[rival] += hits.sum()
        d_hidden[at] = d_z @ w
        d_head += np.outer(d_z, h[at])
    return loss, weight, d_hidden, d_head


@each_mode
@pytest.mark.parametrize("positions,bag", [(1, 1), (4, 1), (1, 3), (5, 2), (3, 7), (16, 16)])
def test_rows_of_a_stream(positions, bag, mode):
    """Rules 1-3, 12: target j follows input j; neighbours share one bag; nothing is skipped."""
    stride, length = st.row_stride(positions, bag, mode), st.row_tokens(positions, bag, mode)
    rows = np.arange(4)[:, None] * stride + np.arange(length)
    inputs, targets = st.split_rows(rows, bag, mode)
    s_in, s_out = 1 if mode == "output" else bag, 1 if mode == "input" else bag
    assert stride == positions * s_in  # with bags in, s times the data tokens (rule 2)
    np.testing.assert_array_equal(inputs, np.arange(4 * stride).reshape(4, positions, s_in))
    np.testing.assert_array_equal(targets, inputs[..., -1:] + 1 + np.arange(s_out))
    assert len(set(rows[0]) & set(rows[1])) == bag
    np.testing.assert_array_equal(targets[:-1, -1, 0], inputs[1:, 0, 0])
    if mode == "full":
        np.testing.assert_array_equal(targets[:, :-1], inputs[:, 1:])
        np.testing.assert_array_equal(targets[:-1, -1], inputs[1:, 0])
    if bag == 1:  # the ordinary shifted row
        np.testing.assert_array_equal(targets[..., 0], rows[:, 1:])


def test_rows_refused():
    """Rule 1: a row that is no whole number of bags, or has no position, is refused."""
    for length, mode in [(10, "full"), (3, "full"), (0, "full"), (7, "input"), (3, "input")]:
        assert_refused(lambda n=length, m=mode: st.split_rows(np.zeros((1, n)), 3, m), str(length))
    assert_refused(lambda: st.split_rows(np.zeros((1, 3)), 3, "output"), "3")
    assert_refused(lambda: st.split_rows(np.zeros((1, 6)), 3, "half"), "half", *st.MODES)


@pytest.mark.parametrize("special", [-0.0, 1e-38])  # 1e-38: arithmetic flushes it to zero
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_embed_one_token_is_a_look_up(dtype, special):
    """Rule 5: with s = 1 bit-equal to table[tokens], whatever the entry; the gradient too."""
    table = jnp.asarray(normal(0, V, D), dtype).at[4].set(special)
    tokens = jnp.asarray([[3, 4, 0, 36, 3], [7, 7, 7, 1, 2]])
    assert (bits(table[4]) != 0).all()
    for embed, *mask in [(st.embed_bags,), (jax.jit(st.embed_bags), tokens[..., None] >= 0)]:
        got = embed(table, tokens[..., None], *mask)
        assert got.dtype == dtype
        np.testing.assert_array_equal(bits(got), bits(table[tokens]))
    got, want = (
        jax.jit(jax.grad(lambda t, f=f: (f(t) * np.arange(D)).sum()))(table.astype(jnp.float32))
        for f in (lambda t: st.embed_bags(t, tokens[..., None]), lambda t: t[tokens])
    )
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype,rtol", [(jnp.float32, RTOL), (jnp.bfloat16, 2**-8)])
def test_embed_mean_and_gradient(dtype, rtol):
    """Rules 5, 8: mean over the valid tokens, ids of pads not read; duplicates accumulate."""
    table, out = jnp.asarray(normal(2, V, D), dtype), normal(3, 5, D)
    big = 2**31 - 1
    tokens = np.array([[5, 5, 5], [1, -1, 2], [-1, big, -7], [9, 5, V], [0, 1, 36]], np.int32)
    mask = (tokens >= 0) & (tokens < V)
    embed = functools.partial(st.embed_bags, tokens_BxLxS=tokens, mask_BxLxS=mask)
    mean, gradient = np.zeros((5, D)), np.zeros((V, D))
    for n in (0, 1, 3, 4):
        for token in tokens[n][mask[n]]:
            mean[n] += np.asarray(table, np.float64)[token] / mask[n].sum()
            gradient[token] += np.asarray(out, np.float64)[n] / mask[n].sum()
    got = embed(table, dtype=jnp.float32)
    assert_close(got, mean)  # float32 sums: as near with a bfloat16 table
    assert not got[2].any()
    np.testing.assert_array_equal(bits(embed(table)), bits(got.astype(dtype)))  # cast last, once
    got = jax.grad(lambda t: (embed(t, dtype=jnp.float32) * out).sum())(table)
    assert got.dtype == dtype
    assert_close(got, gradient, rtol)
    assert not jax.grad(lambda t: st.embed_bags(t, tokens[2], mask[2]).sum())(table).any()


def test_embed_bfloat16_sums_in_float32():
    """Rule 5: 256 + 1 + .. + 1 loses every 1 in bfloat16; so does its gradient's scatter-add."""
    table, bag = jnp.asarray([[256.0], [1.0]], jnp.bfloat16), jnp.ones(64, int).at[0].set(0)
    assert st.embed_bags(table, bag, dtype=jnp.float32)[0] == (256 + 63) / 64
    # Slot 0 of a bag of one valid token adds 256 to its gradient, the 64 slots of another 1 each.
    ones, mask = jnp.ones((2, 64), int), jnp.ones((2, 64), bool).at[0, 1:].set(False)
    embed = lambda t: st.embed_bags(t, ones, mask, jnp.float32)[:, 0]
    assert jax.grad(lambda t: embed(t) @ jnp.asarray([256.0, 64.0]))(table)[1, 0] == 256 + 64


def test_embed_holds_no_array_of_all_slots():
    """Rule 5: nothing as large as [B, L, S, D] in either pass, so memory does not grow with s."""
    positions = width = scatter.BLOCK  # of the gradient on GPUs, which fills blocks
    table, out = normal(4, 6, width), normal(5, B, positions, width)
    bags = jnp.zeros((B, positions, S), int)
    embed = lambda t: st.embed_bags(t, bags, jnp.ones(bags.shape, bool)) * out
    for function in (embed, jax.grad(lambda t: embed(t).sum())):
        assert traced(function, table)[1] == B * positions * width


@pytest.mark.parametrize("bag", [1, 2, 6, 16])
def test_slot_weights(bag):
    """Rule 12: the closed forms, each summing to 1, and no others."""
    forms = {
        "uniform": lambda i: 1.0,
        "power": lambda i: 1 / i,
        "exponential": lambda i: math.exp(-i),
        "first": lambda i: float(i == 1),
        "fitted": lambda i: 3.63 + 1.35 / i**1.25,
    }
    assert set(forms) == set(st.WEIGHTS)
    for kind, form in forms.items():
        want = np.asarray([form(i) for i in range(1, bag + 1)])
        got = st.slot_weights(kind, bag)
        assert got.dtype == np.float32 and abs(got.astype(np.float64).sum() - 1) < 2e-7
        assert_close(got, want / want.sum(), 1e-7)
    line = np.arange(2, bag + 2)
    assert_close(st.slot_weights("fitted", bag, (1, 1, 1)), line / line.sum(), 1e-7)
    assert_refused(lambda: st.slot_weights("last", bag), "last", *st.WEIGHTS)


@each_mode
@pytest.mark.parametrize("kind", st.WEIGHTS)
@each_objective
def test_loss_against_float64(objective, kind, mode):
    """Rules 8, 12: loss, denominator and both gradients, with pads and a token that repeats."""
    hidden, head, targets, mask = case(6, mode)
    weights = st.slot_weights(kind, targets.shape[-1])
    want = reference(hidden, head, targets, mask, weights, objective)
    sums, grads = graded(hidden, head, targets, mask, weights, objective)
    assert all(x.dtype == jnp.float32 and x.shape == () for x in sums)
    for got, expected in zip((*sums, *grads), want, strict=True):
        assert_close(got, expected)
    assert not grads[0][-1, -1].any()  # the position without a valid target


@pytest.mark.parametrize("bag", [1, 2, 6, 16])
def test_loss_of_zero_logits_is_log_v(bag):
    """Rule 10, whichever of hidden and head is zero; repeats, pads and weights change nothing."""
    hidden, head, targets, mask = case(7, bag=bag)
    for h, w in [(hidden, head * 0), (hidden * 0, head)]:
        for kind in st.WEIGHTS:
            loss, weight = graded(h, w, targets, mask, st.slot_weights(kind, bag))[0]
            assert_close(loss / weight, math.log(V), 1e-6)


@pytest.mark.parametrize(
    "shape,v", [((1, 4), 7), ((6, 8), 37), ((64, 32), 256), ((2, 25, 16), 1001)]
)
def test_loss_of_one_token_is_cross_entropy(shape, v):
    """Rule 10: s = 1 is ordinary cross-entropy, gradients too: to 2e-6 of float64's."""
    hidden, head, n = normal(8, *shape), normal(9, v, shape[-1]), math.prod(shape[:-1])
    targets = np.random.default_rng(n).integers(0, v, (*shape[:-1], 1))
    z = hidden.reshape(n, -1).astype(np.float64) @ head.T
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    at = np.arange(n), targets.reshape(n)
    d_z = p.copy()
    d_z[at] -= 1
    want = -np.log(p[at]).sum(), (d_z @ head).reshape(shape), d_z.T @ hidden.reshape(n, -1)
    for chunk in (n, 3):
        (loss, _), grads = graded(hidden, head, targets, chunk=chunk)
        for a, b in zip((loss, *grads), want, strict=True):
            assert_close(a, b, 2e-6)


@each_objective
def test_loss_chunks_and_flat_positions_agree(objective):
    """Rules 8, 9: any chunk size, dividing the positions or not, and [N, D] give one result."""
    hidden, head, targets, mask = case(10, positions=11)
    weights = st.slot_weights("power", S)
    whole = graded(hidden, head, targets, mask, weights, objective)
    flat = [x.reshape(-1, x.shape[-1]) for x in (hidden, targets, mask)]
    for chunk in (3, 7) if objective == "mce" else (7,):
        parts = graded(hidden, head, targets, mask, weights, objective, chunk)
        jax.tree.map(assert_close, parts, whole)
    for chunk in (1, 3, 7, 1000) if objective == "mce" else (7,):
        sums, grads = graded(flat[0], head, *flat[1:], weights, objective, chunk)
        jax.tree.map(assert_close, (sums, (grads[0].reshape(hidden.shape), grads[1])), whole)


@each_objective
def test_loss_of_parts_adds_up(objective):
    """Rule 8: numerators and denominators are summed over micro-batches before the division."""
    hidden, head, targets, mask = case(11, positions=2 * L)
    weights = st.slot_weights("fitted", S)
    part = lambda at, m: graded(hidden[:, at], head, targets[:, at], m[:, at], weights, objective)
    parts = [part(slice(0, L), mask), part(slice(L, 2 * L), mask)]
    want = reference(hidden, head, targets, mask, weights, objective)
    for i in (0, 1):
        assert_close(parts[0][0][i] + parts[1][0][i], want[i])
    assert_close(np.concatenate([p[1][0] for p in parts], 1), want[2])
    assert_close(parts[0][1][1] + parts[1][1][1], want[3])
    for x in jax.tree.leaves(part(slice(0, L), mask & False)):
        assert not np.asarray(x).any()  # nor NaN


@each_objective
def test_loss_with_a_pad_far_above_its_bag(objective):
    """Rule 8: what a pad is read as may have by far the largest logit, here 300."""
    hidden, head, targets, mask = case(25)
    targets[0, 1], mask[0, 1] = [-1, 5, 7], [False, True, True]
    head[0] = 300 * hidden[0, 1] / np.square(hidden[0, 1]).sum()  # a pad is read as token 0
    weights = st.slot_weights("uniform", S)
    want = reference(hidden, head, targets, mask, weights, objective)
    sums, grads = graded(hidden, head, targets, mask, weights, objective)
    for got, expected in zip((*sums, *grads), want, strict=True):
        assert_close(got, expected)


@each_objective
def test_loss_repeats(objective):
    """Rules 8, 12: mce and hinge count [5, 5, 7] as a multiset, mass and bce as the set {5, 7}."""
    hidden, head = normal(12, 4, D), normal(13, V, D)
    loss = lambda bag, weights, mask=(1, 1, 1): graded(
        hidden, head, np.array([bag] * 4), np.array([mask] * 4, bool),
        np.array(weights, np.float32), objective,
    )  # fmt: skip
    weights = [2 / 3, 1 / 3, 0.1] if objective in ("mce", "hinge") else [1, 1, 1]
    got = loss([5, 5, 7], [1 / 3] * 3)
    jax.tree.map(assert_close, got, loss([5, 7, 9], weights, [1, 1, 0]))
    if objective == "mass":
        p = np.exp(hidden @ head.T) / np.exp(hidden @ head.T).sum(-1, keepdims=True)
        assert_close(got[0][0], -np.log(p[:, 5] + p[:, 7]).sum())
    # Only the first slot: the ordinary loss of the next token, whatever the objective.
    jax.tree.map(assert_close, loss([5, 7, 9], [1, 0, 0]), loss([5, 7, 9], [1] * 3, [1, 0, 0]))


def test_loss_bfloat16_hidden_float32_head():
    """Rule 8 in mixed precision: the head's gradient is float32, and near the float64 one."""
    hidden, head, targets, mask = case(14, positions=16)
    hidden, weights = jnp.asarray(hidden, jnp.bfloat16), st.slot_weights("uniform", S)
    # The matmuls run in hidden's dtype, their sums and all else in float32.
    want = reference(hidden, head.astype(jnp.bfloat16), targets, mask, weights, "mce")
    for chunk in (1024, 8):
        (loss, _), grads = graded(hidden, head, targets, mask, weights, chunk=chunk)
        assert grads[1].dtype == jnp.float32 and grads[0].dtype == jnp.bfloat16
        assert_close(loss, want[0])
        assert_close(grads[0], want[2], 2**-7)
        assert_close(grads[1], want[3], 2e-3)


def test_loss_value_is_the_same_with_and_without_gradient():
    """Rule 9: the value alone takes another code path, and gives the same bits in one chunk."""
    hidden, head, targets, mask = case(15)
    value = lambda h, w: st.bag_loss(h, w, targets, mask)[0]
    both = jax.jit(jax.value_and_grad(value, (0, 1)))(hidden, head)[0]
    assert bits(jax.jit(value)(hidden, head)) == bits(both)


@each_objective
def test_loss_never_holds_all_logits(objective, monkeypatch):
    """Rule 9: one chunk's logits are the largest array, and take one logsumexp whatever s."""
    monkeypatch.setattr(scatter, "BLOCK", 8)  # of the gradient on GPUs, here larger than the batch
    chunk, counts = 12, []  # of 48 positions; chunk > D, so that the head is smaller
    for bag in (1, 16) if objective == "mce" else (1, 2):
        hidden, head, targets, mask = case(16, positions=24, bag=bag)
        for wrap in (lambda f: f, lambda f: jax.grad(f, (0, 1))):
            loss = lambda h, w, y=targets, m=mask: st.bag_loss(
                h, w, y, m, objective=objective, chunk=chunk
            )[0]
            eqns, largest = traced(wrap(loss), hidden, head)
            assert largest == max(chunk * V, targets.size) < mask[..., 0].size * V
            # A pass over the logits: a maximum, a sum of exponentials, and exponentials.
            passes = [e for e in eqns if e.primitive.name in ("reduce_max", "reduce_sum", "exp")]
            counts.append(sum(V in e.invars[0].aval.shape for e in passes))
    assert counts[:2] == counts[2:]


@each_mode
def test_no_target_reaches_its_own_input(mode):
    """Rule 1: the loss of a position has no gradient to its targets, nor to anything later."""
    tokens = np.arange(st.row_tokens(L, S, mode))[None]  # each token its own row of the table
    inputs, targets = st.split_rows(tokens, S, mode)
    head = normal(17, tokens.size, D)

    @jax.jit
    def gradient(table, last):
        def loss(table):
            x = jnp.tanh(jnp.cumsum(st.embed_bags(table, inputs), 1))  # a causal body
            mask = jnp.broadcast_to(jnp.arange(L)[:, None] <= last, targets.shape)
            return st.bag_loss(x, head, targets, mask)[0]

        return jax.grad(loss)(table)

    for j in range(L):
        read = np.asarray(gradient(normal(18, tokens.size, D), j)).any(-1)
        assert read[: inputs[0, j].max() + 1].all()
        assert not read[targets[0, j].min() :].any()


def test_loss_refused():
    """One line that names what is wrong."""
    h, w, y, m = case(19)
    assert_refused(lambda: st.bag_loss(h, w, y, objective="mse"), "mse", *st.OBJECTIVES)
    assert_refused(lambda: st.bag_loss(h[:, :4], w, y), "(2, 4, 8)", "(2, 5, 3)")
    assert_refused(lambda: st.bag_loss(h[0], w, y), "(5, 8)", "(2, 5, 3)")
    assert_refused(lambda: st.bag_loss(h, w, y[..., 0]), "(2, 5, 8)", "(2, 5)")
    assert_refused(lambda: st.bag_loss(h, w, y, weights_S=[0.5, 0.5]), "(2,) slot weights")
    assert_refused(lambda: st.bag_loss(h, w, y, m[..., 0]), "(2, 5)")
    assert_refused(lambda: st.bag_loss(h[..., :7], w, y), error=(TypeError, ValueError))


@pytest.mark.parametrize("objective", ["embed", *st.OBJECTIVES])
def test_mask_of_positions_is_not_taken_for_slots(objective):
    """Rule 8: m_i belongs to a target: a mask [N] with N = s must not broadcast over the slots."""
    ids, mask = np.array([[1, 2, 3]] * 3), np.array([True, True, False])
    loss = functools.partial(st.bag_loss, normal(20, 3, D), objective=objective)
    call = st.embed_bags if objective == "embed" else loss
    assert_refused(lambda: call(normal(21, V, D), ids, mask))


def test_foreign_trainer_learns_in_both_phases():
    """Rules 3, 8, 15: plain SGD, a model of its own, 30 steps each of s = 4 and then s = 1."""
    batch, positions, at = 4, 8, 0
    stream = np.tile(np.random.default_rng(22).permutation(V), 200)  # the next token is certain
    params = [0.3 * normal(i, *shape) for i, shape in enumerate([(V, 16), (16, 16), (V, 16)], 23)]

    @functools.partial(jax.jit, static_argnums=2)
    def step(params, rows, bag):
        def loss(params):
            table, dense, head = params
            inputs, targets = st.split_rows(rows, bag)
            x = st.embed_bags(table, inputs)
            total, weight = st.bag_loss(x + jnp.tanh(x @ dense), head, targets)
            return total / weight

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.5 * g for p, g in zip(params, grads, strict=True)], value

    for bag in (4, 1):
        stride, length = st.row_stride(positions, bag), st.row_tokens(positions, bag)
        losses = []
        for _ in range(30):
            rows = stream[at + np.arange(batch)[:, None] * stride + np.arange(length)]
            params, value = step(params, rows, bag)
            at += batch * stride
            losses.append(float(value))
        assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3, losses
