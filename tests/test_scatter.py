"""Proves `tst_jax.kernels.scatter`: a table's gradient on GPUs is exact, and the same whatever the
order in which a card gets to its rows; and nothing else in a training step adds rows in any order.
"""

import dataclasses
import re

import jax
import numpy as np
import pytest

from tst_jax import config as config_lib
from tst_jax import programs
from tst_jax.kernels import scatter
from tst_jax.train_step import init_state, key_data, make_train_step

WIDTH = 3


def table_and_rows(seed, entries, ids):
    """Whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-9, 9, shape).astype(np.float32)
    return draw(entries, WIDTH), np.asarray(ids, np.int32), draw(len(ids), WIDTH)


def zipf(seed, count, entries):
    """Ids as frequent as words are."""
    return (np.random.default_rng(seed).zipf(1.3, count) - 1) % entries


# A block is 64 rows and the third level begins at 2048.
CASES = {
    "one row": (3, [1]),
    "one id, two levels": (4, [3] * 200),
    "one id, four levels": (1, [0] * 70_000),
    "a full block of one id": (2, [0] * 64 + [1] * 64),
    "all differ": (500, np.random.default_rng(0).permutation(500)),
    "an id that fills blocks between two others": (9, [1] * 30 + [5] * 300 + [8] * 30),
    "words, 63": (50, zipf(1, 63, 50)),
    "words, 5000": (1000, zipf(2, 5000, 1000)),
    "words, many": (100_000, zipf(3, 9000, 100_000)),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_are_exact(case):
    entries, ids = CASES[case]
    table, ids, rows = table_and_rows(4, entries, ids)
    want = table.copy()
    np.add.at(want, ids, rows)
    assert np.array_equal(jax.jit(scatter.add_rows)(table, ids, rows), want)


def test_sums_are_in_float32():
    rows = np.ones((4096, 1), np.float32)
    rows[0] = 2**22 + 0.5  # a bfloat16 would lose the half, and a sum in bfloat16 the ones
    arguments = np.zeros((2, 1), np.float32), np.ones(4096, int), rows
    assert jax.jit(scatter.add_rows)(*arguments)[1, 0] == rows.sum(dtype=np.float64)
    # By default a GPU would multiply with the precision of TF32.
    text = jax.jit(scatter.add_rows).lower(*arguments).as_text()
    assert 0 < text.count("stablehlo.dot_general") == text.count("precision = [HIGHEST, HIGHEST]")


# ---- whole steps, as lowered for a GPU, which needs none


def additions_in_any_order(function, *arguments):
    """Scatters that add rows of floating-point numbers at places that may be the same."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    _, *scatters = lowered.as_text().split('"stablehlo.scatter"')
    scatters = [text[: text.index("}) :")] for text in scatters]
    adds = re.compile(r"stablehlo\.add .*: tensor<b?f\d+>")
    risky = lambda text: "unique_indices = false" in text and "update_window_dims" in text
    return [text for text in scatters if risky(text) and adds.search(text)]


def test_a_plain_scatter_is_noticed():
    arguments = table_and_rows(5, 10, [1, 1])
    assert len(additions_in_any_order(scatter._add, *arguments)) == 1
    assert not additions_in_any_order(scatter.add_rows, *arguments)


MODELS = {
    "dense": {},
    "tied": dict(tied=True),
    "gpt2": dict(positions="learned", max_positions=16, norm="layer", mlp="gelu", biases=True),
    "moe": dict(experts=4, experts_per_token=2),
    "linear": dict(attention="linear"),
}


@pytest.mark.parametrize(
    "model, objective",
    [*((model, "mce") for model in MODELS), *(("dense", x) for x in ("mass", "bce", "hinge"))],
)
def test_no_sum_of_a_step_depends_on_the_order_of_a_gpu(make_config, store, model, objective):
    """Exact resume (rule 16). XLA would sort each number of such rows, before it adds them."""
    config = make_config(store)
    config.model = dataclasses.replace(config.model, **MODELS[model])
    config.tst = dataclasses.replace(config.tst, objective=objective)
    for stage in config_lib.stages(config):
        state = jax.eval_shape(lambda: init_state(config, key_data(0)))
        step = make_train_step(config, stage)
        tokens = jax.ShapeDtypeStruct((stage.rows, stage.row_tokens), np.int32)
        assert not additions_in_any_order(step, state, tokens)


def test_gpus_add_in_a_fixed_order_and_still_tune_their_matmuls():
    """`xla_gpu_deterministic_ops` would also end XLA's search for the fastest matmuls."""
    options = programs.COMPILER_OPTIONS["gpu"]
    assert options["xla_gpu_exclude_nondeterministic_ops"]
    assert "xla_gpu_deterministic_ops" not in options
