"""Proves that a loss or gradient that is not finite reaches no parameter, and what is said of it.

A token whose embedding overflows in LayerNorm poisons the batches that hold it, and no others. The
warnings of spikes are tried on made curves of losses, healthy ones and others.
"""

import dataclasses
import functools
import json
import math
import types

import jax
import numpy as np
import pytest

from tst_jax import config as config_lib
from tst_jax.guard import GRACE, Guard, NumbersConfig, TrainingError
from tst_jax.optimizer import OptimizerConfig
from tst_jax.train_step import init_state, key_data, make_train_step

POISON = 60  # a token
CASES = {
    "adamw": (OptimizerConfig(), 1, False),
    "muon, packed documents": (OptimizerConfig(name="muon"), 1, True),
    "sgd, micro-batches": (
        OptimizerConfig(name="sgd", clip=0.0, options="momentum=0.9"),
        2,
        False,
    ),
}


# --- The step ------------------------------------------------------------------------------------


@functools.cache
def start(make_config, case):
    """(stage, state, step function) of superposition, one learning rate for all steps."""
    optimizer, micro_batches, _ = CASES[case]
    config = dataclasses.replace(make_config("x"), optimizer=optimizer, micro_batches=micro_batches)
    config.model.norm = "layer"
    config.schedule.warmup_fraction = config.schedule.decay_fraction = 0.0
    stage = config_lib.stages(config)[0]
    state = jax.jit(lambda key: init_state(config, key))(key_data(0))
    return stage, state, jax.jit(make_train_step(config, stage))


def change(state, **arrays):
    """The state with other parameters; the old one stays."""
    params = jax.tree.map(lambda x: x, state.params)
    for name, array in arrays.items():
        getattr(params, name)[...] = array
    return dataclasses.replace(state, params=params)


@pytest.mark.parametrize("case", CASES)
def test_a_bad_batch_changes_nothing_but_the_step(make_config, case):
    """To the bit; and the next batch trains as if the bad one had not been."""
    stage, state, step = start(make_config, case)
    packed = CASES[case][2]
    state = change(state, embedding=state.params.embedding[...].at[POISON].set(1e38))
    rng = np.random.default_rng(0)
    batches = rng.integers(1, POISON, (3, stage.rows, stage.row_tokens)).astype(np.int32)
    bad = batches[2].copy()
    bad[3, 4] = POISON  # in one of the rows, so in one of the micro-batches
    segments = (np.ones_like(bad),) if packed else ()

    state, metrics = step(state, batches[0], *segments)
    assert metrics["finite"] and np.isfinite(metrics["loss"])
    after, metrics = step(state, bad, *segments)
    assert not metrics["finite"] and not np.isfinite(metrics["loss"])
    assert int(after.step) == 2
    assert_same_bits(dataclasses.replace(after, step=state.step), state)
    assert any(np.any(np.asarray(x)) for x in jax.tree.leaves(state.opt_state))

    going_on, _ = step(after, batches[1], *segments)
    without, _ = step(state, batches[1], *segments)
    assert int(going_on.step) == 3
    assert_same_bits(dataclasses.replace(going_on, step=without.step), without)
    moved = np.asarray(going_on.params.layers.query[...] != state.params.layers.query[...])
    assert moved.mean() > 0.9


def assert_same_bits(found, expected):
    found, expected = jax.device_get((found, expected))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.tobytes() == y.tobytes()


def test_a_gradient_that_overflows_counts_too(make_config):
    """The loss is finite; the sum of the squares of a gradient of 1e25 is not."""
    stage, state, step = start(make_config, "adamw")
    norm, output = state.params.final_norm[...], state.params.output[...]
    state = change(state, final_norm=norm * 1e25, output=output * 1e-25)
    tokens = np.arange(stage.rows * stage.row_tokens, dtype=np.int32).reshape(stage.rows, -1) % 60
    after, metrics = step(state, tokens)
    assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] == np.inf
    assert not metrics["finite"]
    assert_same_bits(dataclasses.replace(after, step=state.step), state)


# --- The policy ----------------------------------------------------------------------------------


def stage_from(start):
    return types.SimpleNamespace(start=start)


def read_bad(guard, step):
    return guard.read(step, stage_from(0), math.nan, math.inf, False)


def test_stop_is_one_line_that_says_what_to_do():
    with pytest.raises(TrainingError) as error:
        read_bad(Guard(NumbersConfig()), 12)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith("loss nan and gradient norm inf at step 12; no parameter was changed")
    for part in ("last checkpoint", "--config.numbers.nonfinite=skip", "--config.debug_nans"):
        assert part in text


def test_skip_goes_on_so_many_times_also_over_a_restart():
    config = NumbersConfig(nonfinite="skip", skips=2)
    guard = Guard(config)
    expected = {"event": "skipped", "step": 3, "loss": "nan", "grad_norm": "inf", "skips": 1}
    assert read_bad(guard, 3) == [expected]
    assert guard.read(4, stage_from(0), 1.0, 1.0, True) == []
    guard = Guard(config, json.loads(json.dumps(guard.state(), allow_nan=False)))
    assert read_bad(guard, 5) == [expected | {"step": 5, "skips": 2}]
    with pytest.raises(TrainingError, match="at step 9, after numbers.skips=2 batches"):
        read_bad(guard, 9)


# --- Spikes --------------------------------------------------------------------------------------


def healthy(rng, lengths, noise, recovery=15, warmup=0):
    """A list of losses for each stage: log V, a fall like a power, and a spike at each switch.

    Args:
      noise: standard deviation, nats.
      recovery: steps in which a switch's spike falls to 1 / e.
      warmup: steps at the beginning in which nothing is learnt.
    """
    found, before = [], 0
    for length in lengths:
        k = np.arange(length)
        loss = 3 + 6 * (1 + np.maximum(before + k - warmup, 0) / 60) ** -0.6
        if before:
            loss += rng.uniform(1, 2) * np.exp(-k / recovery)
        found.append(loss + noise * rng.standard_normal(length))
        before += length
    return found


def events_of(curves, guard=None, from_step=0):
    guard, step, start, found = guard or Guard(NumbersConfig()), 0, 0, []
    for curve in curves:
        for loss in curve:
            step += 1
            if step > from_step:
                found += guard.read(step, stage_from(start), float(loss), 1.0, True)
        start = step
    return found


@pytest.mark.parametrize("noise", [0.003, 0.05, 0.4])
@pytest.mark.parametrize("lengths", [[700], [200, 400], [60, 60, 60, 400]])
def test_healthy_curves_give_no_warning(lengths, noise):
    """Neither the fall from log V nor a switch's spike is one, fast or slow (rule 18)."""
    for seed in range(25):
        rng = np.random.default_rng(seed)
        curves = healthy(rng, lengths, noise, (5, 15, 60)[seed % 3], (0, 50)[seed % 2])
        assert events_of(curves) == [], seed


# Stage, step in it, steps: soon after the grace, and late; of the first stage and of others.
SPIKES = [(0, GRACE + 10, 1), (0, 195, 3), (1, GRACE + 10, 10), (1, 150, 1), (3, GRACE + 10, 5)]


@pytest.mark.parametrize("stage, at, length", [*SPIKES, (3, 350, 30)])
def test_a_spike_gives_one_warning(stage, at, length):
    for seed in range(10):
        curves = healthy(np.random.default_rng(seed), [200, 200, 100, 400], 0.05)
        usual = curves[stage][at - 5 : at].mean()
        curves[stage][at : at + length] += 2 * np.exp(-np.arange(length) / 10)
        step = sum(map(len, curves[:stage])) + at + 1
        (event,) = events_of(curves)
        assert event.pop("event") == "loss_spike" and event.pop("step") == step
        assert event["loss"] == curves[stage][at] and event["usual"] == pytest.approx(
            usual, abs=0.5
        )
        # Of the noise, not of the fall.
        assert event["deviation"] == pytest.approx(0.05, rel=0.5)


def test_a_new_level_gives_one_warning_and_later_spikes_another():
    rng = np.random.default_rng(0)
    losses = 3 + 0.05 * rng.standard_normal(1000)
    losses[300:] += 1  # for good
    losses[700:703] += 1
    losses[800:803] += 1
    assert [event["step"] for event in events_of([losses])] == [301, 701, 801]


def test_small_jumps_of_a_smooth_loss_are_none():
    losses = 3 + 0.001 * np.random.default_rng(0).standard_normal(400)
    losses[200] += 0.09
    losses[300] += 0.2
    assert [event["step"] for event in events_of([losses])] == [301]


def test_spike_is_the_number_of_deviations_and_zero_is_never():
    losses = 3 + 0.1 * np.random.default_rng(0).standard_normal(400)
    losses[200] = 3.8
    losses[300] = 30
    found = lambda spike: [
        e["step"] for e in events_of([losses], Guard(NumbersConfig(spike=spike)))
    ]
    assert (found(6.0), found(12.0), found(0.0)) == ([201, 301], [301], [])


def test_steps_that_are_not_finite_are_no_part_of_the_statistics():
    losses = 3 + 0.05 * np.random.default_rng(0).standard_normal(200)
    one, other = (Guard(NumbersConfig(nonfinite="skip")) for _ in range(2))
    for step, loss in enumerate(losses, 1):
        one.read(step, stage_from(0), float(loss), 1.0, True)
        other.read(step, stage_from(0), float(loss), 1.0, True)
        if step % 50 == 0:
            other.read(step, stage_from(0), math.inf, math.nan, False)
    assert one.state() | {"skips": 4} == other.state()


def test_a_restart_gives_the_same_warnings():
    """From the state at any step, in a spike, after it, in the grace, and at a switch."""
    curves = healthy(np.random.default_rng(1), [120, 200], 0.05)
    curves[0][80:90] += 2
    curves[1][100:180] += 2
    whole, guard, step, start = events_of(curves), Guard(NumbersConfig()), 0, 0
    assert [event["step"] for event in whole] == [81, 221]
    for curve in curves:
        for loss in curve:
            again = Guard(NumbersConfig(), json.loads(json.dumps(guard.state(), allow_nan=False)))
            later = [event for event in whole if event["step"] > step]
            assert events_of(curves, again, step) == later
            step += 1
            guard.read(step, stage_from(start), float(loss), 1.0, True)
        start = step
