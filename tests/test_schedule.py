"""Proves `tst_jax.schedule`: when each phase runs, what its steps hold, and the learning rate.

The switch lies at round(r N) or where a step count or a list of stages puts it (rules 13, 14); all
stages compute on the same positions and superposed ones read s times the tokens (rule 2); one
warmup-stable-decay schedule spans all steps, whatever the phases or a reset optimizer do (rule 15).
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax import config as config_lib
from tst_jax import superposition
from tst_jax.schedule import (
    ScheduleConfig,
    TSTConfig,
    learning_rate,
    make_stages,
    parse_stages,
    warmup_and_decay,
)
from tst_jax.train_step import at_switch, init_state, key_data, make_train_step

ROUNDING = 2**-21  # of the learning rate: a few float32 operations


def spans(steps, rows=2, positions=8, **method):
    """(start, stop, bag size) of each stage."""
    stages = make_stages(TSTConfig(**method), steps, rows, positions)
    return [(stage.start, stage.stop, stage.bag_size) for stage in stages]


# ---- stages


@pytest.mark.parametrize("ratio", ["0.01", "0.1", "0.25", "0.3", "0.35", "0.5", "0.999"])
def test_the_boundary_is_round_r_n(ratio):
    for steps in [*range(1, 60), 1000, 20_000, 100_000, 124_999]:
        exact = Fraction(ratio) * steps
        first, *rest = spans(steps, bag_size=4, ratio=float(ratio))
        boundary = first[1] if first[2] == 4 else 0
        assert abs(boundary - exact) <= Fraction(1, 2)  # the nearest step
        want = [(0, boundary, 4), (boundary, steps, 1)]
        assert [first, *rest] == [span for span in want if span[0] < span[1]]


def test_the_runs_of_the_paper_switch_where_they_did():
    assert spans(20_000, bag_size=6, ratio=0.3) == [(0, 6000, 6), (6000, 20_000, 1)]
    assert spans(100_000, bag_size=6, ratio=0.3) == [(0, 30_000, 6), (30_000, 100_000, 1)]
    count = dict(bag_size=4, superposition_steps=12_483)
    assert spans(49_983, **count) == [(0, 12_483, 4), (12_483, 49_983, 1)]


def test_without_superposition_there_is_one_stage_of_recovery():
    (baseline,) = make_stages(TSTConfig(ratio=0.0), 10, 2, 8)
    assert (baseline.start, baseline.stop, baseline.bag_size) == (0, 10, 1)
    assert (baseline.phase, baseline.mode, baseline.row_tokens) == ("recovery", "full", 9)
    for method in (dict(bag_size=1), dict(superposition_steps=0), dict(stages="4:0,2:0")):
        for mode in ("full", "input", "output"):  # a mode of superposition only
            assert make_stages(TSTConfig(mode=mode, **method), 10, 2, 8) == [baseline]


def test_without_recovery_there_is_one_stage_of_superposition():
    (stage,) = make_stages(TSTConfig(bag_size=3, ratio=1.0), 10, 2, 8)
    assert (stage.start, stage.stop, stage.bag_size, stage.phase) == (0, 10, 3, "superposition")


def test_a_step_count_goes_before_the_ratio():
    assert spans(10, bag_size=3, superposition_steps=7, ratio=0.1) == [(0, 7, 3), (7, 10, 1)]
    assert spans(10, bag_size=3, superposition_steps=10) == [(0, 10, 3)]
    with pytest.raises(ValueError, match=r"^superposition would end at step 11 of 10; [^\n]*$"):
        spans(10, superposition_steps=11)


def test_a_list_of_stages():
    assert parse_stages("16:0.1, 4:2e-1") == [(16, 0.1), (4, 0.2)]
    got = spans(100, stages="8:0.1,4:0.2,2:0.1")
    assert got == [(0, 10, 8), (10, 30, 4), (30, 40, 2), (40, 100, 1)]
    assert spans(10, stages="8:0.7,4:0.2,2:0.1") == [(0, 7, 8), (7, 9, 4), (9, 10, 2)]
    assert spans(20, stages="4:0.3") == spans(20, bag_size=4, ratio=0.3)
    assert spans(20, stages="4:0.3,1:0.2") == [(0, 6, 4), (6, 20, 1)]


def test_rounding_loses_no_step_between_stages():
    for steps in range(1, 80):
        got = spans(steps, stages="8:0.13,4:0.13,2:0.13")
        assert [start for start, _, _ in got] == [0, *(stop for _, stop, _ in got[:-1])]
        assert got[-1][1] == steps and all(start < stop for start, stop, _ in got)
        superposed = max((stop for _, stop, bag in got if bag > 1), default=0)
        assert abs(superposed - Fraction(39, 100) * steps) <= Fraction(1, 2)


@pytest.mark.parametrize(
    "text, words",
    [
        ("8", "write bag sizes and fractions"),
        ("8:a", "write bag sizes and fractions"),
        ("8.5:0.1", "write bag sizes and fractions"),
        ("8:0.1:4", "write bag sizes and fractions"),
        ("8:0.1,", "write bag sizes and fractions"),
        ("8:0.1,3:0.1", "from bag size 8 to 3; each must be a divisor"),
        ("4:0.1,8:0.1", "from bag size 4 to 8"),
        ("4:0.1,4:0.1", "from bag size 4 to 4"),
        ("0:0.1", "bag sizes start at 1"),
        ("8:-0.1", "fractions lie in 0 .. 1"),
        ("8:0.9,4:0.2", "end at step 11 of 10"),
    ],
)
def test_stages_that_do_not_fit_are_refused_in_one_line(text, words):
    with pytest.raises(ValueError) as caught:
        spans(10, stages=text)
    message = str(caught.value)
    assert words in message and "tst.stages" in message and "\n" not in message


# ---- what a step holds (rule 2)


@pytest.mark.parametrize("expand", ["length", "batch"])
@pytest.mark.parametrize("mode, reads", [("full", 1), ("input", 1), ("output", 0)])
def test_every_stage_computes_on_as_many_positions(mode, reads, expand):
    method = TSTConfig(stages="8:0.1,4:0.2,2:0.1", mode=mode, expand=expand)
    stages = make_stages(method, 100, 3, 16)
    assert [stage.bag_size for stage in stages] == [8, 4, 2, 1]
    for stage in stages:
        shape = (3, 16)
        if expand == "batch":
            shape = (3 * stage.bag_size, 16 // stage.bag_size)
            assert stage.row_stride == (16 if reads else 16 // stage.bag_size)
        assert (stage.rows, stage.positions) == shape
        assert stage.step_positions == 48
        assert stage.step_tokens == 48 * (stage.bag_size if reads else 1)
        assert stage.row_tokens == stage.row_stride + stage.bag_size  # the last target bag


def test_rows_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match=r"^tst.expand='batch' cuts rows of 16 [^\n]*positions"):
        make_stages(TSTConfig(bag_size=3, expand="batch"), 10, 2, 16)


# ---- learning rate (rule 15)


def reference(cfg, steps, step):
    warmup = cfg.warmup_steps if cfg.warmup_steps >= 0 else round(cfg.warmup_fraction * steps)
    decay = round(cfg.decay_fraction * steps)
    if step < warmup:
        return cfg.peak_lr * (step + 1) / warmup
    if step >= steps - decay:
        return cfg.peak_lr * (steps - step) / decay
    return cfg.peak_lr


@pytest.mark.parametrize(
    "steps, settings",
    [
        (20, dict(warmup_fraction=0.1, decay_fraction=0.2)),
        (20, dict(warmup_steps=7, warmup_fraction=0.9, decay_fraction=0.2)),
        (7, dict(warmup_steps=0, warmup_fraction=0.9, decay_fraction=0.0)),
        (10, dict(warmup_fraction=1.0, decay_fraction=0.0)),
        (10, dict(warmup_fraction=0.0, decay_fraction=1.0)),
        (10, dict(warmup_fraction=0.5, decay_fraction=0.5)),
        (1, dict(warmup_fraction=0.05, decay_fraction=0.1)),
        (20_000, dict(peak_lr=2e-3, warmup_steps=2000)),
    ],
)
def test_learning_rate_of_every_step(steps, settings):
    cfg = ScheduleConfig(**settings)
    assert not cfg.problems(steps)
    want = [reference(cfg, steps, step) for step in range(steps)]
    traced = jax.jit(lambda step: learning_rate(cfg, steps, step))(jnp.arange(steps))
    assert traced.dtype == jnp.float32
    np.testing.assert_allclose(traced, want, rtol=ROUNDING)
    for step in {0, steps // 2, steps - 1}:
        plain = learning_rate(cfg, steps, step)
        assert plain.dtype == jnp.float32
        np.testing.assert_allclose(plain, want[step], rtol=ROUNDING)


def test_the_schedule_of_the_papers_runs():
    cfg = ScheduleConfig(peak_lr=2e-3, warmup_steps=2000)  # decay: the default 10 %
    assert warmup_and_decay(cfg, 20_000) == (2000, 2000)
    at = lambda step: float(learning_rate(cfg, 20_000, step))
    peak = np.float32(2e-3)
    assert [at(step) for step in (1999, 6000, 17_999, 18_000)] == [peak] * 4
    parts = peak * np.array([1 / 2000, 0.5, 0.5])
    np.testing.assert_allclose([at(0), at(999), at(19_000)], parts, rtol=ROUNDING)
    assert 0 < at(19_999) <= at(0)  # it ends at peak / 2000, and never trains with 0


def test_a_schedule_longer_than_the_run_is_refused():
    (problem,) = ScheduleConfig(warmup_steps=15, decay_fraction=0.3).problems(20)
    assert "warmup and decay together" in problem and "20 steps" in problem
    assert not ScheduleConfig(warmup_steps=14, decay_fraction=0.3).problems(20)


@pytest.mark.parametrize("reset", [False, True])
def test_one_schedule_runs_through_the_switch(config, reset):
    """Also where the optimizer starts anew: a schedule that counts in its state would restart."""
    config.tst.reset_optimizer = reset
    shapes = jax.eval_shape(lambda key: init_state(config, key), key_data(0))
    state = jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), shapes)
    rates = {}
    for stage in config_lib.stages(config):
        if stage.start:
            state = jax.jit(lambda state: at_switch(config, state))(state)
        tokens = jnp.zeros((stage.rows, stage.row_tokens), jnp.int32)
        step = make_train_step(config, stage)
        rate = jax.jit(lambda state: step(state, tokens)[1]["lr"])  # the rest is not compiled
        for number in (stage.start, stage.start + 1, stage.stop - 1):
            rates[number] = float(rate(dataclasses.replace(state, step=jnp.int32(number))))
    assert list(rates) == [0, 1, 7, 8, 9, 19]
    want = [reference(config.schedule, config.steps, number) for number in rates]
    np.testing.assert_allclose(list(rates.values()), want, rtol=ROUNDING)


def test_ratio_zero_is_the_baseline_whatever_else_is_set():
    """A matched baseline of a run with several stages is one `tst.ratio = 0` away (rule 14)."""
    (only,) = make_stages(TSTConfig(ratio=0.0, stages="8:0.1,4:0.2"), 100, 4, 8)
    assert (only.bag_size, only.start, only.stop) == (1, 0, 100)


def test_an_auxiliary_next_bag_loss_is_a_matter_of_slot_weights():
    """Next token's cross-entropy + 0.7 of the bag's, over 1.7: value and gradient (rule 12)."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, head = jax.random.normal(keys[0], (2, 5, 8)), jax.random.normal(keys[1], (11, 8))
    targets = jax.random.randint(keys[2], (2, 5, 4), 0, 11)
    tst = TSTConfig(bag_size=4, mode="output", weights="power", auxiliary=0.7)
    assert tst.problems() == []

    def loss(hidden, targets, weights=None):
        nats, count = superposition.bag_loss(hidden, head, targets, weights_S=weights)
        return nats / count

    def both(hidden):
        power = superposition.slot_weights("power", 4)
        return (loss(hidden, targets[..., :1]) + 0.7 * loss(hidden, targets, power)) / 1.7

    ours = jax.value_and_grad(loss)(hidden, targets, tst.slot_weights(4))
    for got, wanted in zip(ours, jax.value_and_grad(both)(hidden), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=1e-7)
    assert np.array_equal(TSTConfig().slot_weights(4), np.full(4, 0.25, np.float32))
