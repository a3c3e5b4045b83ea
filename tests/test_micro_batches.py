"""Proves gradient accumulation: a step in micro-batches is the whole step (rule 8).

Rows whose masks are very unequal, so that a mean of the micro-batches' means is another number, in
both phases, with and without experts (whose balancing loss is a sum over rows too), and for
objectives with either kind of denominator. The whole step is itself checked against losses of its
valid tokens alone, written out.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax import config as config_lib
from tst_jax.config import Config, ConfigError, DataConfig
from tst_jax.models.transformer import ModelConfig
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig
from tst_jax.train_step import cut_rows, init_state, key_data, make_train_step

ROWS, L, S = 8, 6, 3
DENSE = Config(
    steps=10,
    loss_chunk=16,
    model=ModelConfig(vocab_size=32, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ff=24),
    tst=TSTConfig(bag_size=S, ratio=0.5),
    data=DataConfig(store="x", rows=ROWS, positions=L),
    # A step of plain descent: the new parameters are the gradient.
    optimizer=OptimizerConfig(name="sgd", weight_decay=0.0, clip=0.0),
    schedule=ScheduleConfig(peak_lr=1.0, warmup_fraction=0.0, decay_fraction=0.0),
)
MOE = dataclasses.replace(
    DENSE,
    model=dataclasses.replace(DENSE.model, experts=4, experts_per_token=2, router_loss=0.5),
)
CASES = [(config, phase, "mce") for config in ("dense", "moe") for phase in (0, 1)]
CASES += [("dense", 0, "mass")]  # whose denominator is another


def unequal_mask(rng, tokens):
    """Row k keeps a random 1 / (k + 1) of its tokens, and the last row none."""
    keep = 1 / np.arange(1, ROWS + 1)
    mask = rng.random((ROWS, tokens)) < keep[:, None]
    mask[-1] = False
    return mask


@functools.cache
def start(model):
    config = {"dense": DENSE, "moe": MOE}[model]
    return jax.jit(functools.partial(init_state, config))(key_data(0))


def one_step(model, config, phase, parts, mask):
    """(gradients as one vector, metrics) of a step; `mask` is a function as `unequal_mask`."""
    config = dataclasses.replace(config, micro_batches=parts)
    stage = config_lib.stages(config)[phase]
    rng = np.random.default_rng(phase)
    tokens = rng.integers(0, 32, (ROWS, stage.row_tokens)).astype(np.int32)
    state, step = start(model), make_train_step(config, stage)
    mask = mask(rng, stage.row_tokens)
    segments = None if mask is None else mask.astype(np.int32)
    after, metrics = jax.jit(step)(state, tokens, segments)
    change = jax.tree.map(lambda old, new: old - new, state.params, after.params)
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(change)]), metrics


@pytest.mark.parametrize("model, phase, objective", CASES)
def test_four_micro_batches_are_one_batch(model, phase, objective):
    config = {"dense": DENSE, "moe": MOE}[model]
    config = dataclasses.replace(config, tst=dataclasses.replace(config.tst, objective=objective))
    whole, metrics = one_step(model, config, phase, 1, unequal_mask)
    found, others = one_step(model, config, phase, 4, unequal_mask)
    # Sums of float32 in another order; a mean of the parts' means is off by more than 0.3.
    np.testing.assert_allclose(found, whole, atol=1e-6, rtol=1e-5)
    assert others.keys() == metrics.keys()
    for name in metrics:
        np.testing.assert_allclose(others[name], metrics[name], rtol=2e-6)
    if model == "moe":
        assert metrics["router_loss"] > 1 and np.allclose(metrics["expert_load"].sum(-1), 1)


@pytest.mark.parametrize("phase", [0, 1])
def test_masked_tokens_neither_count_nor_are_read(phase):
    """Other ids in their place change nothing, and the loss is the mean over the others."""
    stage = config_lib.stages(MOE)[phase]
    rng = np.random.default_rng(phase)
    tokens = rng.integers(0, 32, (ROWS, stage.row_tokens)).astype(np.int32)
    mask = unequal_mask(rng, stage.row_tokens)
    state = start("moe")
    step = jax.jit(make_train_step(MOE, stage))
    segments = mask.astype(np.int32)
    _, metrics = step(state, tokens, segments)
    _, others = step(state, np.where(mask, tokens, 7), segments)
    assert jax.tree.all(jax.tree.map(np.array_equal, metrics, others))
    assert metrics["valid_tokens"] == mask[:, : stage.row_stride].sum()
    # By hand, from whole logits in float32, and from the choices of the positions that are read.
    inputs, targets, documents = cut_rows(tokens, segments, stage.bag_size)
    valid, asked = documents.read.any(-1), documents.asked
    hidden, _, routing = state.params.body_and_routing(
        state.params.embed(inputs, documents.read),
        mask_BxL=valid,
        segments_BxL=documents.segments,
        positions_BxL=documents.positions,
    )
    np.testing.assert_array_equal(routing.load_E.sum(-1), 2 * valid.sum())
    load = routing.load_E / routing.load_E.sum(-1, keepdims=True)
    np.testing.assert_allclose(metrics["expert_load"], load, rtol=2e-6)
    balance = routing.balance.mean() / valid.sum()
    np.testing.assert_allclose(metrics["router_loss"], balance, rtol=2e-6)
    nats = -jax.nn.log_softmax(state.params.logits(hidden))
    picked = np.take_along_axis(np.asarray(nats, np.float64), targets, -1)
    np.testing.assert_allclose(metrics["loss"], (picked * asked).sum() / asked.sum(), rtol=2e-6)


def test_a_full_mask_is_no_mask():
    full = lambda rng, tokens: np.ones((ROWS, tokens), bool)
    with_mask, without = (
        one_step("moe", MOE, 0, 2, mask) for mask in (full, lambda rng, tokens: None)
    )
    assert with_mask[1].pop("valid_tokens") == ROWS * DENSE.data.positions * S
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-7), with_mask, without
    )


def test_rows_that_do_not_divide_are_refused():
    config = dataclasses.replace(DENSE, micro_batches=3)
    with pytest.raises(ConfigError, match="has 8 rows, no multiple of micro_batches 3"):
        config_lib.validate(config)
    with pytest.raises(ConfigError, match="micro_batches is 0; it must be at least 1"):
        config_lib.validate(dataclasses.replace(DENSE, micro_batches=0))
