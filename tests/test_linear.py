"""Proves `tst_jax.models.linear`: a weight's gradient keeps its float32 bits.

In bfloat16, jax's own transpose would round the gradient to bfloat16 before it is reduced.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax import sharding
from tst_jax.models.linear import linear
from tst_jax.sharding import MeshConfig

CASES = {  # of the decoder: subscripts, x, weight, names
    "query": ("bld,dhq->blhq", (2, 5, 8), (8, 3, 4), ("embed", "heads", "head_dim")),
    "out": ("blhq,hqd->bld", (2, 5, 3, 4), (3, 4, 8), ("heads", "head_dim", "embed")),
    "down": ("blf,fd->bld", (2, 5, 12), (12, 8), ("mlp", "embed")),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_value_and_gradients_against_float64(name, dtype):
    subscripts, x_shape, w_shape, names = CASES[name]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=x_shape), dtype)
    w = jnp.asarray(rng.normal(size=w_shape), jnp.float32)
    y, pull = jax.vjp(lambda x, w: linear(subscripts, x, w, names), x, w)
    d_y = jnp.asarray(rng.normal(size=y.shape), dtype)
    d_x, d_w = pull(d_y)
    assert (y.dtype, d_x.dtype, d_w.dtype) == (x.dtype, x.dtype, jnp.float32)
    exact = lambda a: np.asarray(a, np.float64)
    x64, w64, d_y64 = exact(x), exact(w.astype(dtype)), exact(d_y)
    x_axes, w_axes, y_axes = subscripts.replace("->", ",").split(",")
    rounding = {"float32": 2e-6, "bfloat16": 8e-3}[dtype]
    close = lambda a, b, rtol: np.testing.assert_allclose(exact(a), b, rtol=rtol, atol=rtol)
    close(y, np.einsum(subscripts, x64, w64), rounding)
    close(d_x, np.einsum(f"{y_axes},{w_axes}->{x_axes}", d_y64, w64), rounding)
    close(d_w, np.einsum(f"{x_axes},{y_axes}->{w_axes}", x64, d_y64), 2e-6)  # in either dtype


def test_a_mesh_of_one_device_changes_no_bits():
    subscripts, x_shape, w_shape, names = CASES["query"]
    rng = np.random.default_rng(1)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (x_shape, w_shape))
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    grads = [
        jax.jit(jax.grad(lambda w, m=m: (linear(subscripts, x, w, names, m) ** 2).sum()))(w)
        for m in (None, mesh)
    ]
    np.testing.assert_array_equal(*grads)
    text = jax.jit(lambda w: linear(subscripts, x, w, names, mesh)).lower(w).as_text()
    assert "sharding_constraint" in text or "Sharding" in text
