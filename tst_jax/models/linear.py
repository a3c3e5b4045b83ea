"""Matmuls of activations with a param, whose collectives are the same in each phase.

A param's part is cast and then gathered over fsdp: half the bytes in bfloat16. It is gathered again
in the backward pass, since the whole weights of all layers would not fit. Its gradient leaves the
matmul in float32 and is reduced in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from tst_jax import sharding

# What remat="dots" keeps: a custom_vjp hides its matmul from policies that look for one.
MATMUL = "matmul"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def linear(subscripts: str, x, weight, names: tuple[str, ...], mesh=None):
    """`einsum(subscripts, x, weight)` in x's dtype.

    Args:
      subscripts: as for einsum; each letter stands in two of the three arrays.
      x: activations, rows first.
      weight: a param, float32.
      names: the logical axes of the weight.
      mesh: where both lie, as `sharding.RULES` says; None: one device, or automatic.
    Returns:
      An array of x's dtype. Gradients: of x in its dtype, of the weight in the weight's, float32
      until it is reduced.
    """
    return jnp.einsum(subscripts, x, _whole(x, weight, names, mesh))


def _whole(x, weight, names, mesh):
    return sharding.constrain(weight.astype(x.dtype), mesh, *names, gathered=True)


def _forward(subscripts, x, weight, names, mesh):
    return checkpoint_name(linear(subscripts, x, weight, names, mesh), MATMUL), (x, weight)


def _backward(subscripts, names, mesh, residuals, d_y):
    x, weight = residuals
    inputs, y_axes = subscripts.split("->")
    x_axes, weight_axes = inputs.split(",")
    d_x = jnp.einsum(f"{y_axes},{weight_axes}->{x_axes}", d_y, _whole(x, weight, names, mesh))
    d_weight = jnp.einsum(
        f"{x_axes},{y_axes}->{weight_axes}", x, d_y, preferred_element_type=jnp.float32
    )
    d_weight = sharding.constrain(d_weight, mesh, *names, gathered=True)
    return d_x, sharding.constrain(d_weight, mesh, *names).astype(weight.dtype)


linear.defvjp(_forward, _backward)
