"""Proves `tst_jax.models.grouped_matmul`: every path against float64, at any imbalance.

Rows behind the last stretch are NaN on the way in, and must not be seen again. Counted FLOPs show
that no path multiplies all rows with all matrices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax.models import grouped_matmul as lib

R, D, F = 40, 12, 20
ROUNDING = 3e-6  # of float32, in units of the largest entry
SIZES = [9, 0, 14, 2, 0], [0, 0, 0, 0, 0], [0, 0, 16, 0, 0], [37, 0, 0, 0, 3], [8, 8, 8, 8, 8], [40]
sizes_and_dtype = pytest.mark.parametrize(
    "sizes, dtype", [(s, "float32") for s in SIZES] + [(SIZES[0], "bfloat16")], ids=str
)


def problem(sizes, dtype):
    rng = np.random.default_rng(0)
    draw = lambda *shape: np.array(jnp.asarray(rng.standard_normal(shape), dtype))
    x, w, d_y = draw(R, D), draw(len(sizes), D, F), draw(R, F)
    x[sum(sizes) :] = d_y[sum(sizes) :] = np.nan
    return x, w, d_y


def written_out(x, w, d_y, sizes):
    y, d_w, start = np.zeros((R, F)), np.zeros(w.shape), 0
    x, w, d_y = (array.astype(np.float64) for array in (x, w, d_y))
    for expert, size in enumerate(sizes):
        here = slice(start, start := start + size)
        y[here], d_w[expert] = x[here] @ w[expert], x[here].T @ d_y[here]
    return y, d_w


def assert_close(got, want, tolerance=ROUNDING):
    got = np.asarray(got, np.float64)
    assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-30)


@sizes_and_dtype
@pytest.mark.parametrize("path", ["blocks", "ragged_dot", "garbage"])
def test_each_stretch_meets_its_matrix(monkeypatch, path, sizes, dtype):
    """Here the path of a TPU takes the place of the other one; `garbage`: as it may be there."""
    if path != "blocks":
        fill = jnp.nan if path == "garbage" else 0

        def ragged(x, w, sizes):
            live = jnp.arange(R)[:, None] < sizes.sum()
            return jnp.where(live, jax.lax.ragged_dot(x, w, sizes), fill)

        monkeypatch.setattr(lib, "_in_blocks", ragged)
    x, w, d_y = problem(sizes, dtype)
    got = jax.jit(lambda *args: lib.grouped_matmul(*args))(x, w, jnp.array(sizes, jnp.int32))
    assert got.dtype == dtype
    assert_close(got, written_out(x, w, d_y, sizes)[0], ROUNDING if dtype == "float32" else 8e-3)
    assert not np.asarray(got, np.float32)[sum(sizes) :].any()


@sizes_and_dtype
def test_weight_gradients_of_both_paths(monkeypatch, sizes, dtype):
    monkeypatch.setattr(lib, "TILE", 8)
    x, w, d_y = problem(sizes, dtype)
    want = written_out(x, w, d_y, sizes)[1]
    sizes = jnp.array(sizes, jnp.int32)
    blocks = jax.jit(lambda *args: lib.grouped_weight_gradient(*args))(x, d_y, sizes)
    kernel = lib._gradient_tpu(x, d_y, sizes, interpret=True)
    for got in (blocks, kernel):
        assert got.dtype == jnp.float32
        assert_close(got, want)


@pytest.mark.parametrize("imbalance", [0, 1, 7, 31])
def test_blocks_suffice_at_any_imbalance(imbalance):
    """The bound on blocks holds where every stretch but one just begins another block."""
    experts, rows = 32, 512
    sizes = np.full(experts, 9)  # a block of 8, and one row of another
    sizes[imbalance] += rows - sizes.sum()
    expert_A, row_AxT, live_AxT, slot_R = lib._blocks(rows, jnp.array(sizes, jnp.int32))
    assert live_AxT.shape[1] == 8 and live_AxT.sum() == rows
    np.testing.assert_array_equal(np.sort(row_AxT[live_AxT]), np.arange(rows))
    np.testing.assert_array_equal(row_AxT.reshape(-1)[slot_R], np.arange(rows))
    owner = np.repeat(np.arange(experts), sizes)
    np.testing.assert_array_equal(np.asarray(expert_A)[np.asarray(slot_R) // 8], owner)


def test_no_path_here_multiplies_all_rows_with_all_matrices():
    experts, rows = 16, 1024
    shape = lambda *sizes, dtype=jnp.float32: jax.ShapeDtypeStruct(sizes, dtype)
    sizes = shape(experts, dtype=jnp.int32)
    flops = lambda f, *args: jax.jit(f).lower(*args, sizes).compile().cost_analysis()["flops"]
    least = 2 * rows * 64 * 96
    x, w, d_y = shape(rows, 64), shape(experts, 64, 96), shape(rows, 96)
    assert least < flops(lib.grouped_matmul, x, w) < 1.5 * least
    wave = flops(lib.grouped_weight_gradient, x, d_y)  # a loop counts once
    assert least < lib.WAVES * wave < 1.5 * least
    assert flops(jax.lax.ragged_dot, x, w) > 8 * least  # what this is there for
