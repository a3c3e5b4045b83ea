"""Proves packed documents in both phases (rule 20): attention, positions, targets, and the mean.

A row of several documents gives the sum of the losses of its documents, each in a row of its own;
no gradient crosses from one to another; and the baseline's program is that of recovery.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax import config as config_lib
from tst_jax.config import Config, DataConfig
from tst_jax.models.transformer import ModelConfig
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig
from tst_jax.train_step import cut_rows, init_state, key_data, make_eval_step, make_train_step

L, S, ROWS = 10, 3, 2
CONFIG = Config(
    steps=10,
    model=ModelConfig(vocab_size=32, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ff=24),
    tst=TSTConfig(bag_size=S, ratio=0.5),
    data=DataConfig(store="x", rows=ROWS, positions=L, packing="document"),
    # A step of plain descent: the new parameters are the gradient.
    optimizer=OptimizerConfig(name="sgd", weight_decay=0.0, clip=0.0),
    schedule=ScheduleConfig(peak_lr=1.0, warmup_fraction=0.0, decay_fraction=0.0),
)
MODELS = {
    "rope": CONFIG.model,
    "learned": dataclasses.replace(CONFIG.model, positions="learned", max_positions=L),
    "linear": dataclasses.replace(CONFIG.model, attention="linear"),
}


def packed_rows(rng, stage):
    """(tokens, segments) int32 [B, T] of documents that are padded to whole bags."""
    tokens = np.zeros((ROWS, stage.row_tokens), np.int32)
    segments = np.zeros_like(tokens)
    for row in range(ROWS):
        at, number = 0, 0
        while at < stage.row_tokens:
            number += 1
            length = min(int(rng.integers(1, 5 * stage.bag_size)), stage.row_tokens - at)
            tokens[row, at : at + length] = rng.integers(1, 32, length)
            segments[row, at : at + length] = number
            at += -(-length // stage.align) * stage.align
    return tokens, segments


def alone(tokens, segments, stage):
    """Each document as a row of its own, at its beginning; pads after it."""
    rows = []
    for row, owners in zip(tokens, segments):
        for number in range(1, owners.max() + 1):
            inside = np.flatnonzero(owners == number)
            document, marks = np.zeros((2, stage.row_tokens), np.int32)
            document[: inside.size], marks[: inside.size] = row[inside], 1
            rows.append((document, marks))
    return [np.stack(field) for field in zip(*rows)]


def gradients(config, stage, state, tokens, segments):
    step = jax.jit(make_train_step(config, stage))
    after, metrics = step(state, tokens, segments)
    change = jax.tree.map(lambda old, new: old - new, state.params, after.params)
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(change)]), metrics


@pytest.mark.parametrize(
    "model, mode",
    [*[("rope", mode) for mode in ("full", "input", "output", "recovery")]]
    + [("learned", "full"), ("linear", "full")],
)
def test_a_row_of_documents_is_its_documents_one_by_one(model, mode):
    """Loss and gradient, so also that nothing crosses over, and that positions begin anew."""
    config = dataclasses.replace(CONFIG, model=MODELS[model])
    if mode != "recovery":
        config = dataclasses.replace(config, tst=TSTConfig(bag_size=S, ratio=0.5, mode=mode))
    stage = config_lib.stages(config)[-1 if mode == "recovery" else 0]
    tokens, segments = packed_rows(np.random.default_rng(0), stage)
    state = jax.jit(lambda key: init_state(config, key))(key_data(0))
    together, metrics = gradients(config, stage, state, tokens, segments)
    apart, others = gradients(config, stage, state, *alone(tokens, segments, stage))
    assert segments.max() > 2
    np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-5)
    np.testing.assert_allclose(together, apart, atol=3e-6, rtol=1e-4)
    # What belongs to a row is counted; the last bag of a row is the next row's.
    assert metrics["valid_tokens"] == (segments[:, : stage.row_stride] > 0).sum()


def test_without_segments_the_same_rows_are_other_rows():
    stage = config_lib.stages(CONFIG)[0]
    tokens, segments = packed_rows(np.random.default_rng(0), stage)
    state = jax.jit(lambda key: init_state(CONFIG, key))(key_data(0))
    with_segments, _ = gradients(CONFIG, stage, state, tokens, segments)
    without, _ = gradients(CONFIG, stage, state, tokens, None)
    assert not np.allclose(with_segments, without, atol=1e-3)


@pytest.mark.parametrize("bag_size", [1, S])
def test_no_target_lies_in_another_document_or_in_a_pad(bag_size):
    stage = config_lib.stages(CONFIG)[0 if bag_size > 1 else -1]
    tokens, segments = packed_rows(np.random.default_rng(1), stage)
    inputs, targets, found = cut_rows(jnp.asarray(tokens), jnp.asarray(segments), bag_size)
    for row in range(ROWS):
        seen = {}
        for position in range(L):
            places = slice(position * bag_size, (position + 1) * bag_size)
            after = slice(places.stop, places.stop + bag_size)
            own = segments[row, places].max()
            assert found.segments[row, position] == own
            assert found.positions[row, position] == seen.get(own, 0)
            seen[own] = seen.get(own, 0) + 1
            np.testing.assert_array_equal(found.read[row, position], segments[row, places] > 0)
            asked = (segments[row, after] == own) & (segments[row, after] > 0)
            np.testing.assert_array_equal(found.asked[row, position], asked)
    assert 0 < found.asked.mean() < 1 and 0 < found.read.mean() <= 1


def test_a_row_of_one_document_is_an_ordinary_row():
    for stage in config_lib.stages(CONFIG):
        rng = np.random.default_rng(2)
        tokens = rng.integers(1, 32, (ROWS, stage.row_tokens)).astype(np.int32)
        state = jax.jit(lambda key: init_state(CONFIG, key))(key_data(0))
        with_segments, _ = gradients(CONFIG, stage, state, tokens, np.ones_like(tokens))
        without, _ = gradients(CONFIG, stage, state, tokens, None)
        np.testing.assert_allclose(with_segments, without, atol=1e-6, rtol=1e-5)


def test_held_out_documents_are_told_apart_too():
    stage = config_lib.stages(CONFIG)[-1]
    tokens, segments = packed_rows(np.random.default_rng(3), stage)
    state = jax.jit(lambda key: init_state(CONFIG, key))(key_data(0))
    evaluate = jax.jit(make_eval_step(CONFIG))
    nats, count = evaluate(state.params, tokens, segments)
    _, metrics = gradients(CONFIG, stage, state, tokens, segments)
    np.testing.assert_allclose(nats / count, metrics["loss"], rtol=1e-6)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    assert count == same.sum()
