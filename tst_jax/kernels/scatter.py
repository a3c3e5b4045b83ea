"""Adds rows to the rows of a table that ids name: the gradient of a look-up.

Ids repeat, and floating-point sums depend on their order. CPUs and TPUs add one row after the
other. A GPU adds with atomics, in whatever order they arrive; told to be deterministic, XLA sorts
not rows but all their numbers, tens of millions a slot. So on GPUs rows are sorted by id and summed
by matmuls before anything is added, each row of the table once: nothing is left that an order could
change.
"""

import jax
import jax.numpy as jnp

BLOCK = 64  # rows that are compared and summed at a time on GPUs


def scatter_slots(table_VxD, rows, ids, arrays):
    """Adds `rows(arrays[..., i])` to the rows `ids[..., i]` of the table, slot after slot.

    Args:
      table_VxD: float32.
      rows: of an array [...] gives float32 [..., D].
      ids: int32 [..., S] in [0, V).
      arrays: [..., S].
    """

    def add(table_VxD, slot):
        ids, values = slot[0].reshape(-1), rows(slot[1])
        values = values.reshape(-1, values.shape[-1])
        added = jax.lax.platform_dependent(table_VxD, ids, values, cuda=add_rows, default=_add)
        return added, None

    slots_first = lambda x: jnp.moveaxis(x, -1, 0)
    return jax.lax.scan(add, table_VxD, (slots_first(ids), slots_first(arrays)))[0]


def _add(table_VxD, ids_N, rows_NxD):
    return table_VxD.at[ids_N].add(rows_NxD)


def add_rows(table_VxD, ids_N, rows_NxD):
    """`table.at[ids].add(rows)`, the same bits every time on a GPU too.

    In each block of the sorted rows, those of one id are summed by a matmul with zeros and ones, in
    float32, and the sum is added to the table in one row, unless the block before has that id too.
    This can be so for the first id of a block only. What it left are sorted rows again, one a
    block, with which the same is done.
    """
    order_N = jnp.argsort(ids_N)
    return _add_sorted(table_VxD, ids_N[order_N], rows_NxD[order_N])


def _add_sorted(table_VxD, ids_N, rows_NxD):
    entries, width = table_VxD.shape
    missing = -ids_N.shape[0] % BLOCK
    ids_AxK = jnp.pad(ids_N, (0, missing), mode="edge").reshape(-1, BLOCK)  # the last id gets zeros
    rows_AxKxD = jnp.pad(rows_NxD, ((0, missing), (0, 0))).reshape(-1, BLOCK, width)
    same_AxKxK = (ids_AxK[:, :, None] == ids_AxK[:, None, :]).astype(jnp.float32)
    sums_AxKxD = jnp.einsum(
        "akj,ajd->akd", same_AxKxK, rows_AxKxD, precision=jax.lax.Precision.HIGHEST
    )
    new_N = jnp.diff(ids_AxK.reshape(-1), prepend=-1) != 0
    # Ids beyond the table are dropped. They differ too, which is what XLA is promised.
    beyond_N = entries + jnp.arange(ids_AxK.size, dtype=ids_N.dtype)
    at_N = jnp.where(new_N, ids_AxK.reshape(-1), beyond_N)
    sums_NxD = sums_AxKxD.reshape(-1, width)
    table_VxD = table_VxD.at[at_N].add(sums_NxD, mode="drop", unique_indices=True)
    if len(ids_AxK) == 1:
        return table_VxD
    left_AxD = jnp.where(new_N[::BLOCK, None], 0, sums_AxKxD[:, 0])
    return _add_sorted(table_VxD, ids_AxK[:, 0], left_AxD)
