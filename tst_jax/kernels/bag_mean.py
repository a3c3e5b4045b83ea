"""Sums of bags of embedding rows, the hot half of the bag mean: no [B, L, S, D] array (rule 5)."""

import functools

import jax
import jax.numpy as jnp

from tst_jax.kernels import dispatch
from tst_jax.kernels.dispatch import Kernels
from tst_jax.kernels.scatter import scatter_slots


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def bag_sum(table_VxD, tokens, mask, kernels: Kernels = Kernels()):
    """Sum of a bag's valid rows in float32, slot after slot (rule 5).

    On a mesh, each device of a vocabulary axis sums the rows that it holds, and one all-reduce of
    float32 [B, L, D] adds them up: nothing between chips grows with the bag size (rule 7).

    Args:
      table_VxD: float [V, D].
      tokens: int [..., S], ids in [0, V); of invalid slots too.
      mask: bool [..., S], True for a valid slot.
      kernels: see `Kernels`.
    Returns:
      float32 [..., D]. Backward is a scatter-add into one float32 [V, D], whatever the bag size.
    """

    def local(table, tokens, mask):
        if kernels.width:
            table = _gather_as_it_is(table, kernels.width)
        tokens, mask = owned(tokens, mask, table.shape[0], kernels.vocab)
        paths = _tpu, lambda arch: _xla, _xla  # XLA's gather is the only path on a GPU
        measured = table.dtype == jnp.float32
        arrays = table, tokens, mask
        total = dispatch.run("bag_mean", kernels, *paths, *arrays, as_measured=measured)
        return jax.lax.psum(total, kernels.vocab) if kernels.vocab else total

    rows = kernels.rows
    return kernels.shard(local, (kernels.table, rows, rows), rows)(table_VxD, tokens, mask)


def _gather_as_it_is(table_VxD, axes):
    """Bags are summed in float32, so the table travels in float32, whatever the bag size.

    At bag size 1 XLA would cast a float32 table before it travels, and a comparison of the phases
    would not be of like with like; it cannot cast what it is told are integers.
    """
    bits = jax.lax.bitcast_convert_type(table_VxD, f"uint{8 * table_VxD.dtype.itemsize}")
    bits = jax.lax.all_gather(bits, axes, axis=1, tiled=True)
    return jax.lax.bitcast_convert_type(bits, table_VxD.dtype)


def owned(tokens, valid, entries: int, axes):
    """Ids within this device's `entries` rows of a table, and False for slots that lie elsewhere.

    `valid` may also be weights, which then become 0. Without axes both come back as they are.
    """
    if not axes:
        return tokens, valid
    local = tokens - jax.lax.axis_index(axes) * entries
    here = (local >= 0) & (local < entries)
    return jnp.where(here, local, 0), jnp.where(here, valid, jnp.zeros_like(valid))


def _xla(table_VxD, tokens, mask):
    def rows(ids, valid):
        return jnp.where(valid[..., None], table_VxD[ids].astype(jnp.float32), 0)

    return sum_slots(rows, tokens, mask)


def _tpu(table_VxD, tokens, mask, interpret=False):
    from tst_jax.kernels import bag_sum_tpu  # imports Pallas, which takes 0.2 s

    flat = lambda x: x.reshape(-1, x.shape[-1])
    total = bag_sum_tpu.bag_sum(table_VxD, flat(tokens), flat(mask), interpret=interpret)
    return total.reshape(*tokens.shape[:-1], -1)


def _forward(table_VxD, tokens, mask, kernels):
    # Of the table, the backward pass reads only shape and dtype.
    return bag_sum(table_VxD, tokens, mask, kernels), (table_VxD, tokens, mask)


def _backward(kernels, residuals, d_total):
    table_VxD, tokens, mask = residuals

    def local(table, tokens, mask, d_total):
        tokens, mask = owned(tokens, mask, table.shape[0], kernels.vocab)
        d_table = jnp.zeros((table.shape[0], d_total.shape[-1]), jnp.float32)
        rows = lambda valid: jnp.where(valid[..., None], d_total, 0)
        d_table = scatter_slots(d_table, rows, tokens, mask)
        return reduce_table(d_table, kernels).astype(table.dtype)

    rows = kernels.rows
    spread = kernels.shard(local, (kernels.table, rows, rows, rows), kernels.table)
    return spread(table_VxD, tokens, mask, d_total), None, None


def sum_slots(rows, ids, arrays):
    """`rows(ids[..., 0], arrays[..., 0])` plus the same of slot 1, 2, ... in this order.

    A loop in the program, not an unrolled one: XLA could keep the rows of all slots at a time.
    """
    total = rows(ids[..., 0], arrays[..., 0])
    if ids.shape[-1] == 1:
        return total
    add = lambda total, slot: (total + rows(*slot), None)
    return jax.lax.scan(add, total, (_slots_first(ids[..., 1:]), _slots_first(arrays[..., 1:])))[0]


def _slots_first(x):
    return jnp.moveaxis(x, -1, 0)


def reduce_table(d_table_VxD, kernels: Kernels):
    """Adds up the table's gradient over the batch: each device keeps the part that it holds."""
    if kernels.width:
        d_table_VxD = jax.lax.psum_scatter(
            d_table_VxD, kernels.width, scatter_dimension=1, tiled=True
        )
    others = tuple(axis for axis in kernels.batch if axis not in kernels.width)
    return jax.lax.psum(d_table_VxD, others) if others else d_table_VxD


bag_sum.defvjp(_forward, _backward)
