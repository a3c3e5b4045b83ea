"""Proves that a step that is not finite is traced to its parameters, rows and first operation.

Faults are put in: a parameter that is nan, and a token whose embedding is finite but overflows in
LayerNorm, so that exactly the rows that hold it are to be named. Small functions stand for what
the search has to see through: loops, calls, backward passes, and masks, which are no fault.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax import config as config_lib
from tst_jax.debug_nans import first_operation, replay
from tst_jax.models import transformer
from tst_jax.train_step import init_state, key_data

TOKEN = 60


def make(make_config, phase, experts=0, norm="layer"):
    """(config, stage, state, batch): TOKEN is read in rows 1 and 3, if it is there at all."""
    config = make_config("x")
    config.model.norm = norm
    config.model.experts, config.model.experts_per_token = experts, min(experts, 2)
    stage = config_lib.stages(config)[phase]
    state = jax.jit(lambda key: init_state(config, key))(key_data(0))
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, TOKEN, (stage.rows, stage.row_tokens)).astype(np.int32)
    tokens[1, 0] = tokens[3, stage.row_stride - 1] = TOKEN
    tokens[2, -1] = TOKEN  # only predicted
    return config, stage, state, tokens


def line_of(function, text):
    """`tst_jax/FILE.py:NUMBER` of the line of a function of the package that holds the text."""
    lines, first = inspect.getsourcelines(function)
    (at,) = [number for number, line in enumerate(lines, first) if text in line]
    return f"tst_jax/models/transformer.py:{at} ({function.__name__})"


@pytest.mark.parametrize("phase, experts, packed", [(0, 0, True), (1, 4, False)])
def test_an_embedding_that_overflows(make_config, phase, experts, packed):
    config, stage, state, tokens = make(make_config, phase, experts)
    state.params.embedding[...] = state.params.embedding[...].at[TOKEN].set(1e38)
    before = jax.device_get(jax.tree.leaves(state))
    batch = (tokens,)
    if packed:
        segments = np.ones_like(tokens)
        segments[0] = 0  # a row without a target is no fault
        batch = (tokens, segments)
    text = "\n".join(replay(config, stage, state, batch))
    for x, y in zip(jax.tree.leaves(state), before, strict=True):
        assert np.asarray(x).tobytes() == y.tobytes()
    assert "all parameters are finite" in text
    assert "rows that are not finite alone: 1, 3 (of 0 .. 3)" in text
    assert "gradient layers.query: 512 nan and 0 inf of 512 entries" in text
    place = line_of(transformer.layer_norm, "x32 = x32 - x32.mean")
    assert "the first operation of row 1 that made it: inf from reduce_sum, float32[1,8]," in text
    assert f"at {place}; turn 0 of 0 .. 1 of the loop at tst_jax/models/transformer.py" in text


def test_a_parameter_that_is_nan(make_config):
    config, stage, state, tokens = make(make_config, 1, norm="rms")
    query = state.params.layers.query
    query[...] = query[...].at[1, 0, 0, 0].set(np.nan).at[1, 2, 0, 0].set(np.inf)
    lines = replay(config, stage, state, (tokens,))
    assert "parameter layers.query: 1 nan and 1 inf of 512 entries" in lines
    assert "rows that are not finite alone: 0, 1, 2, 3 (of 0 .. 3)" in lines
    assert "no operation made it: it came in with the parameters" in lines
    assert not any(line.startswith("parameter layers.key") for line in lines)


def test_a_healthy_step(make_config):
    config, stage, state, tokens = make(make_config, 1, norm="rms")
    lines = replay(config, stage, state, (tokens,))
    assert lines[-1] == "this step is finite when it is replayed" and len(lines) == 4


def test_a_search_that_fails_is_a_line(make_config, monkeypatch):
    config, stage, state, tokens = make(make_config, 1, norm="rms")
    state.params.layers.query[...] = state.params.layers.query[...] * np.nan

    def fails(*_):
        raise NotImplementedError("no such thing\nmore")

    monkeypatch.setattr("tst_jax.debug_nans.first_operation", fails)
    lines = replay(config, stage, state, (tokens,))
    expected = "the first operation cannot be looked for: NotImplementedError: no such thing"
    assert lines[-1] == expected and "parameter layers.query" in lines[1]


# --- The search ----------------------------------------------------------------------------------


def masked(x):
    """A softmax with a mask of -inf, written as some libraries do."""
    mask = jnp.where(jnp.arange(4) < 3, 0, -jnp.inf)
    return jax.nn.softmax(x + mask) @ x


def squares(x):
    """x^16 in a loop, which overflows in turn 2 or 3."""
    return jax.lax.scan(lambda x, _: (jnp.square(x), x.sum()), x, length=4)[0].sum()


def grows(x):
    return jax.lax.scan(lambda x, _: (x * 1e15, None), x, length=3)[0].sum()


@jax.jit
def inner(x):
    return jnp.sqrt(x).sum()


CASES = {
    "mask": (masked, 1.0, None),
    "an empty mask": (lambda x: jax.nn.softmax(x - jnp.inf), 1.0, "nan from sub"),
    "infinities that meet": (lambda x: masked(x) + (x / 0 - x / 0).sum(), 1.0, "inf from div"),
    "of an input": (lambda x: x - x, jnp.inf, "nan from sub"),
    "nan of an input": (lambda x: x - x, jnp.nan, None),
    "loop": (squares, 1e6, "turn 2 of 0 .. 3"),
    "later in the loop": (squares, 1e3, "turn 3 of 0 .. 3"),
    "call": (inner, -1.0, "nan from sqrt"),
    "backward": (
        jax.grad(lambda x: (1e25 * jnp.tanh(1e25 * x)).sum()),
        0.0,
        "in the backward pass",
    ),
    # Turns 2, 1 and 0, in this order, each multiply a gradient of 1.
    "backward loop": (jax.grad(grows), 1e-30, "in the backward pass; turn 0 of 0 .. 2"),
    "remat": (jax.grad(jax.checkpoint(lambda x: jnp.log(x).sum())), 0.0, "inf from log"),
    "bfloat16": (lambda x: x.astype(jnp.bfloat16) * 8, 3e38, "inf from mul, bfloat16[4]"),
}


@pytest.mark.parametrize("case", CASES)
def test_first_operation(case):
    function, value, expected = CASES[case]
    found = first_operation(function, (jnp.full(4, value, jnp.float32),))
    assert found is None if expected is None else expected in found
