"""Proves `tst_jax.models.transformer` on numbers: a causal decoder that does not know of bags.

Nothing flows from a bag to an earlier position, in either phase; RoPE turns by the bag's index
(rule 4); grouped queries, the scan over layers, remat and the cache change nothing; documents in a
row do not see each other (rule 20); bf16 stays near float32; a tied table gets both gradients; with
s = 1 the input is a look-up (rule 5). For Llama's, GPT-2's and Qwen3-MoE's layers and for linear
attention, where the architecture could matter.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax.models.transformer import (
    ModelConfig,
    Rows,
    Transformer,
    layer_norm,
    rms_norm,
    rope,
)

V, D, LAYERS, L = 31, 16, 3, 6
CFG = ModelConfig(vocab_size=V, width=D, layers=LAYERS, heads=4, kv_heads=2, head_dim=4, ff=24)
SHAPES = {
    "llama": CFG,
    "gpt2": dataclasses.replace(
        CFG, kv_heads=4, norm="layer", positions="learned", max_positions=9, mlp="gelu", biases=True
    ),
    "moe": dataclasses.replace(CFG, qk_norm=True, experts=4, experts_per_token=2),
    "linear": dataclasses.replace(CFG, attention="linear"),
}
every_shape = pytest.mark.parametrize("cfg", SHAPES.values(), ids=SHAPES)
ROUNDING = 1e-5  # float32, summed in another order: of the largest entry


def make(cfg=CFG, seed=0):
    """A decoder with normal weights that matter, made by numpy: its own init compiles for long."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(0.4 * rng.normal(size=x.shape), x.dtype), shapes)


def retype(model, **changes):
    """The same parameters under other settings."""
    cfg = dataclasses.replace(model.cfg, **changes)
    shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    return jax.tree.unflatten(jax.tree.structure(shapes), jax.tree.leaves(model))


def tokens(rows=2, length=L, bag=1, seed=0):
    return np.random.default_rng(seed).integers(0, V, (rows, length, bag))


def logits(model, ids, **rows):
    return model.logits(model.body(model.embed(ids), **rows))


forward = jax.jit(logits)


def assert_close(got, want, rtol=ROUNDING):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= rtol * np.abs(want).max()


# ---- who sees whom


@every_shape
@pytest.mark.parametrize("bag", [1, 5])
def test_nothing_flows_from_a_bag_to_an_earlier_position(bag, cfg):
    """By the gradient of each position's logits with respect to each token's table row."""
    model, ids = make(cfg), np.random.default_rng(1).permutation(V)[: L * bag].reshape(1, L, bag)
    mix = jnp.asarray(np.random.default_rng(2).normal(size=V), jnp.float32)

    def mixed(table, position):
        inside = retype(model)  # a copy made within the trace
        inside.embedding.set_value(table)
        return logits(inside, ids)[0, position] @ mix

    table = model.embedding[...]
    gradients = jax.jit(lambda t: jax.lax.map(lambda i: jax.grad(mixed)(t, i), jnp.arange(L)))
    size = np.abs(gradients(table)).max(-1)  # [L, V]
    assert not np.delete(size, ids.ravel(), axis=1).any()
    size = size[:, ids[0]]  # [position, bag it could see, token of that bag]
    for position in range(L):
        assert (size[position, : position + 1] > 1e-5).all()
        assert not size[position, position + 1 :].any()  # exactly


@every_shape
def test_documents_in_a_row_do_not_see_each_other(cfg):
    """Each is what it would be alone, to the bit whatever the other's tokens are."""
    model, ids = make(cfg), tokens()
    segments = jnp.asarray([[4, 4, 4, 7, 7, 7], [1, 2, 2, 2, 2, 3]])
    starts = np.asarray([[0, 0, 0, 3, 3, 3], [0, 1, 1, 1, 1, 5]])
    positions = jnp.asarray(np.arange(L) - starts)  # they restart
    run = jax.jit(lambda ids: logits(model, ids, segments_BxL=segments, positions_BxL=positions))
    got = run(ids)
    for row, start, stop in (0, 0, 3), (0, 3, 6), (1, 0, 1), (1, 1, 5), (1, 5, 6):
        alone = forward(model, ids[row : row + 1, start:stop])
        assert_close(got[row : row + 1, start:stop], alone)
    changed = ids.copy()
    changed[0, 1] = (changed[0, 1] + 1) % V
    moved = np.abs(run(changed) - got).max(-1)
    assert moved[0, 1] > 1e-3 and not moved[0, 3:].any() and not moved[1].any()


# ---- positions (rule 4)


def test_rope_is_a_turn_of_complex_numbers():
    rng = np.random.default_rng(0)
    x, positions, theta = rng.normal(size=(2, 5, 3, 8)), rng.integers(0, 900, (2, 5)), 500.0
    got = rope(jnp.asarray(x, jnp.float32), jnp.asarray(positions), theta)
    for row, place, head, i in np.ndindex(2, 5, 3, 4):
        angle = positions[row, place] * theta ** (-2 * i / 8)
        a, b = x[row, place, head, i], x[row, place, head, i + 4]
        turned = complex(a, b) * complex(math.cos(angle), math.sin(angle))
        pair = got[row, place, head, i], got[row, place, head, i + 4]
        assert abs(complex(*pair) - turned) < 1e-4 * abs(turned)  # angles to 900 in float32


def test_rope_makes_scores_depend_on_the_distance_alone():
    query, key = np.random.default_rng(0).normal(size=(2, 1, 9, 1, 8)).astype(np.float32)
    query, key = np.repeat(query[:, :1], 9, 1), np.repeat(key[:, :1], 9, 1)

    def scores(shift):
        at = jnp.arange(9)[None] + shift
        return np.einsum("blhq,bmhq->lm", rope(query, at, 1e4), rope(key, at, 1e4))

    assert_close(scores(20), scores(0))
    by_distance = scores(0)
    for distance in range(-8, 9):
        assert np.ptp(np.diagonal(by_distance, distance)) < 1e-5
    assert np.ptp(by_distance) > 0.1


def test_positions_are_bag_indices():
    """Bags of one token three times over are that token, and stand where it stands."""
    model, ids = make(), tokens()
    np.testing.assert_array_equal(forward(model, ids.repeat(4, -1)), forward(model, ids))
    swapped = ids[:, [1, 0, *range(2, L)]]
    assert np.abs(forward(model, swapped) - forward(model, ids))[:, -1].max() > 1e-2


# ---- the same numbers another way


def test_grouped_queries_are_heads_that_share_their_keys():
    model = make()
    mha = make(dataclasses.replace(CFG, kv_heads=4))
    for name in ("attention_norm", "query", "out", "mlp_norm", "gate", "up", "down"):
        setattr(mha.layers, name, getattr(model.layers, name))
    for name in ("key", "value"):
        weight = jnp.repeat(getattr(model.layers, name)[...], 2, axis=2)  # heads 0, 0, 1, 1
        getattr(mha.layers, name).set_value(weight)
    mha.embedding, mha.final_norm, mha.output = model.embedding, model.final_norm, model.output
    assert_close(forward(mha, tokens()), forward(model, tokens()))


@every_shape
@pytest.mark.parametrize("pieces", [[1] * L, [4, 2], [L]], ids=str)
def test_decoding_with_a_cache_is_the_forward_pass(pieces, cfg):
    """One position at a time; a prefill in two pieces; and the cache may be longer than the row."""
    model, ids = make(cfg), tokens()
    step = jax.jit(lambda ids, cache, at: model.body(model.embed(ids), cache, at))
    cache, done, got = model.empty_cache(2, L + 3), 0, []
    for length in pieces:
        hidden, cache = step(ids[:, done : done + length], cache, done)
        got.append(model.logits(hidden))
        done += length
    assert_close(np.concatenate(got, 1), forward(model, ids))


def written_out(model, ids):
    """The decoder in float64 numpy, layer after layer, position after position: [B, L, V]."""
    cfg, whole = model.cfg, lambda param: np.asarray(param[...], np.float64)
    norm = lambda x, scale: x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) * scale

    def turned(x):  # [B, L, heads, Q], RoPE in complex numbers
        half = cfg.head_dim // 2
        angle = np.arange(L)[:, None, None] * cfg.rope_theta ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    x = whole(model.embedding)[ids].mean(2)
    for i in range(cfg.layers):
        w = {name: whole(param)[i] for name, param in vars(model.layers).items() if name[0] != "_"}
        h = norm(x, w["attention_norm"])
        query, key = (turned(np.einsum("bld,dhq->blhq", h, w[name])) for name in ("query", "key"))
        value = np.einsum("bld,dhq->blhq", h, w["value"])
        for at, head in np.ndindex(L, cfg.heads):
            group = head * cfg.kv_heads // cfg.heads
            past = np.einsum("bq,bmq->bm", query[:, at, head], key[:, : at + 1, group])
            share = np.exp(past / np.sqrt(cfg.head_dim))
            share /= share.sum(-1, keepdims=True)
            mixed = np.einsum("bm,bmq->bq", share, value[:, : at + 1, group])
            x[:, at] += mixed @ w["out"][head]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x += (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return norm(x, whole(model.final_norm)) @ whole(model.head).T


@pytest.mark.parametrize("bag", [1, 3])
def test_the_scanned_decoder_is_the_written_out_one(bag):
    model, ids = make(), tokens(bag=bag)
    assert_close(forward(model, ids), written_out(model, ids))


MIX = jnp.asarray(np.random.default_rng(7).normal(size=(2, L, V)), jnp.float32)
score = lambda model, ids: (MIX * logits(model, ids)).sum()
# Of one model in several forms: each is fused alike, so that sums which cancel do so in all.
FUSED = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
graded = jax.jit(jax.value_and_grad(score), compiler_options=FUSED)


@every_shape
def test_scanning_the_layers_is_calling_them_in_turn(cfg):
    model, ids = make(cfg), tokens()

    @jax.jit
    def unrolled(model, ids):
        hidden = model.embed(ids)
        if cfg.positions == "learned":
            hidden += model.positions[...][:L]
        rows = Rows(jnp.broadcast_to(jnp.arange(L), (2, L)), None, None, 0, None)
        for i in range(cfg.layers):
            layer = jax.tree.map(lambda stacked: stacked[i], model.layers)
            hidden, _, _ = layer(hidden, cfg, rows)
        scale = model.final_norm[...]
        if cfg.norm == "layer":
            hidden = layer_norm(hidden, scale, model.final_norm_bias[...], cfg.norm_eps)
        else:
            hidden = rms_norm(hidden, scale, cfg.norm_eps)
        return model.logits(hidden)

    assert_close(forward(model, ids), unrolled(model, ids))


@every_shape
def test_remat_changes_no_gradient(cfg):
    model, ids = make(cfg), tokens()
    want = graded(model, ids)
    for remat in ("dots", "full"):
        got = graded(retype(model, remat=remat), ids)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_close(a, b)


@every_shape
def test_bfloat16_stays_near_float32(cfg):
    """Within 3 %: eight bits of mantissa, rounded some ten times a layer."""
    model, ids = make(cfg), tokens(bag=3)
    low = retype(model, dtype="bfloat16")
    assert low.embed(ids).dtype == jnp.bfloat16 and low.embedding[...].dtype == jnp.float32
    got, want = forward(low, ids), forward(model, ids)
    assert got.dtype == jnp.float32
    error = np.sqrt(np.mean(np.square(got - want)) / np.mean(np.square(want)))
    assert 1e-4 < error < 3e-2
    x = jnp.asarray(np.random.default_rng(0).normal(size=(99, D)), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    exact /= np.sqrt(np.square(exact).mean(-1, keepdims=True) + 1e-5)
    once = np.abs(np.asarray(rms_norm(x, jnp.ones(D), 1e-5), np.float64) / exact - 1)
    assert once.max() < 1.01 * 2**-8  # a norm is computed in float32 and rounded once
    grads = jax.eval_shape(jax.grad(score), low, ids)
    assert {grad.dtype for grad in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


# ---- tables


def test_a_tied_table_is_one_and_gets_both_gradients():
    tied, untied = make(dataclasses.replace(CFG, tied=True)), make()
    for name in ("layers", "embedding", "final_norm"):
        setattr(untied, name, getattr(tied, name))
    untied.output.set_value(tied.embedding[...])
    count = lambda model: sum(x.size for x in jax.tree.leaves(model))
    assert count(untied) - count(tied) == V * D
    ids = tokens(bag=3)
    (value, grads), (same, split) = graded(tied, ids), graded(untied, ids)
    assert_close(value, same)
    assert_close(grads.embedding[...], split.embedding[...] + split.output[...])
    assert_close(grads.layers.query[...], split.layers.query[...])
    parts = [np.abs(split.embedding[...]).max(), np.abs(split.output[...]).max()]
    assert min(parts) > 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bag_of_one_is_a_look_up(dtype):
    model, ids = retype(make(), dtype=dtype), tokens()
    got, want = model.embed(ids), model.embedding[...].astype(dtype)[ids[..., 0]]
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_initial_weights_follow_the_seed_and_predict_nothing_yet():
    make_real = jax.jit(lambda seed: Transformer(CFG, jax.random.key(seed)))
    first, again, other = (make_real(seed) for seed in (0, 0, 1))
    ids = tokens(rows=8, length=32)
    z = np.asarray(forward(first, ids), np.float64)
    picked = np.take_along_axis(z, tokens(rows=8, length=32, seed=1), -1)[..., 0]
    assert abs((np.log(np.exp(z).sum(-1)) - picked).mean() - math.log(V)) < 0.02
    leaves = lambda model: [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    for a, b, c in zip(leaves(first), leaves(again), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a == 1).all() or (a != c).mean() > 0.99  # norm scales begin at one
    query, out = np.asarray(first.layers.query[...]), np.asarray(first.layers.out[...])
    assert (query[0] != query[1]).all()  # layers differ
    np.testing.assert_allclose(query.std(), 1 / math.sqrt(D), rtol=0.1)
    np.testing.assert_allclose(out.std(), 1 / math.sqrt(16 * 2 * LAYERS), rtol=0.1)
