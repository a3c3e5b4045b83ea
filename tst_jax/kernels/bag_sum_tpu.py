"""Bag sum on TPU: rows of the embedding table by DMA, summed in VMEM (arXiv 2605.06546, rule 5).

The bag mean is a sum in float32 over the valid tokens of a bag, divided by their number. This is
the sum. Each row of the table goes from HBM to VMEM once per token that reads it, and only the
[N, D] sum goes back: no [N, S, D] array and no partial sum is ever in HBM.

Bags are taken `rows` at a time (a tile). The rows of a tile are in one half of a double buffer;
while they are summed, the rows of the next tile are on their way into the other half. Every buffer
half has one DMA semaphore, which counts bytes and not rows, so a tile is summed only once all of
its rows have been waited for.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_BUFFER_BYTES = 8 << 20  # of VMEM, for everything that grows with the rows of a tile
_MAX_ROWS = 128  # of a tile, which bounds the ids it keeps in scalar memory
_SUBLANES, _LANES = 8, 128  # rows and columns of a float32 vector register


def bag_sum(table_VxD, tokens_NxS, mask_NxS, *, interpret=False):
    """Sum of the table rows of each bag's valid tokens: `sum_i mask[n, i] * table[tokens[n, i]]`.

    Slots are added in order, slot 0 first, so the result is equal to the bit to an unrolled loop of
    look-ups, and for S = 1 to one look-up. A masked slot adds zero whatever its row holds, NaN
    included. It has no gradient of its own.

    The table is read in place if D is a multiple of 128. For other widths XLA copies the table once
    per call into a layout whose rows are padded to 128 columns.

    Args:
      table_VxD: float32 [V, D]. No other dtype: rows of 2-byte types share a tile in HBM, so one
        row cannot be addressed by a DMA.
      tokens_NxS: int [N, S], N and S at least 1; ids in [0, V) where the mask is set. Others are
        clamped into the table, since no DMA may leave it.
      mask_NxS: bool [N, S], False for a slot that adds nothing, whatever its id.
      interpret: True runs on any backend in Pallas' TPU interpreter, with race detection; or
        the `InterpretParams` to run with.
    Returns:
      float32 [N, D].
    Raises:
      ValueError: the table is not float32, or the shapes do not fit.
    """
    if table_VxD.dtype != jnp.float32:
        raise ValueError(
            f"table is {table_VxD.dtype}; the TPU bag sum reads float32 only; "
            "pass the float32 master table or use the XLA bag sum"
        )
    if tokens_NxS.ndim != 2 or tokens_NxS.size == 0 or mask_NxS.shape != tokens_NxS.shape:
        raise ValueError(
            f"tokens {tokens_NxS.shape} and mask {mask_NxS.shape}; give one non-empty [N, S] shape"
        )
    vocabulary, width = table_VxD.shape
    bags, bag_size = tokens_NxS.shape
    rows, vmem_bytes = _rows_per_tile(bags, bag_size, width)
    tiles = pl.cdiv(bags, rows)

    # Slots that fill up the last tile are masked ones too; their sums fall outside the result.
    fill = ((0, tiles * rows - bags), (0, 0))
    mask_NxS = jnp.pad(mask_NxS.astype(bool), fill)
    tokens_NxS = jnp.clip(jnp.pad(tokens_NxS, fill), 0, vocabulary - 1).astype(jnp.int32)
    tokens_TxSxR = tokens_NxS.reshape(tiles, rows, bag_size).transpose(0, 2, 1)

    def ids_of(tile):  # a block of ids in scalar memory, where addresses are computed
        return pl.BlockSpec((1, bag_size, rows), lambda t: (tile(t), 0, 0), memory_space=pltpu.SMEM)

    return pl.pallas_call(
        functools.partial(_kernel, tiles=tiles),
        grid=(tiles,),
        in_specs=[
            ids_of(lambda t: t),
            ids_of(lambda t: jnp.minimum(t + 1, tiles - 1)),
            pl.BlockSpec((rows, bag_size), lambda t: (t, 0)),
            pl.BlockSpec(memory_space=pl.ANY),  # the table stays in HBM
        ],
        out_specs=pl.BlockSpec((rows, width), lambda t: (t, 0)),
        out_shape=jax.ShapeDtypeStruct((bags, width), jnp.float32),
        scratch_shapes=[
            pltpu.VMEM((2, bag_size, rows, width), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        # Tile t starts the DMAs of tile t + 1, so the tiles run in order on one core.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=bags * bag_size * width,
            transcendentals=0,
            bytes_accessed=4 * bags * width * (bag_size + 1),
        ),
        interpret=pltpu.InterpretParams(detect_races=True) if interpret is True else interpret,
        name="bag_sum",
    )(tokens_TxSxR, tokens_TxSxR, mask_NxS.astype(jnp.int32), table_VxD)


def _rows_per_tile(bags, bag_size, width):
    """Bags of a tile, and the VMEM to allow for: buffers within _BUFFER_BYTES if 8 bags fit."""
    lanes = lambda columns: pl.cdiv(columns, _LANES) * _LANES
    # Two halves of S rows each, and the two blocks each of the mask and the sum.
    row_bytes = 4 * (2 * bag_size * lanes(width) + 2 * lanes(bag_size) + 2 * lanes(width))
    most = min(_MAX_ROWS, max(_SUBLANES, _BUFFER_BYTES // row_bytes // _SUBLANES * _SUBLANES))
    even = pl.cdiv(bags, pl.cdiv(bags, most))  # all tiles of one size, so that few rows are idle
    rows = pl.cdiv(even, _SUBLANES) * _SUBLANES
    return rows, rows * row_bytes + _BUFFER_BYTES


def _kernel(
    ids_ref, next_ids_ref, mask_ref, table_ref, total_ref, buffer_ref, semaphores, *, tiles
):
    """Sums tile t while the rows of tile t + 1 are fetched."""
    _, bag_size, rows, _ = buffer_ref.shape
    tile = pl.program_id(0)
    half = tile % 2

    def each_copy(act, ids, half):
        def of_one_bag(row, _):
            for slot in range(bag_size):
                act(
                    pltpu.make_async_copy(
                        table_ref.at[ids[0, slot, row]],
                        buffer_ref.at[half, slot, row],
                        semaphores.at[half],
                    )
                )

        jax.lax.fori_loop(0, rows, of_one_bag, None)

    start = functools.partial(each_copy, lambda copy: copy.start())
    wait = functools.partial(each_copy, lambda copy: copy.wait())

    pl.when(tile == 0)(lambda: start(ids_ref, half))
    # The other half was read by tile t - 1, which is done.
    pl.when(tile + 1 < tiles)(lambda: start(next_ids_ref, 1 - half))
    wait(ids_ref, half)

    def sum_eight_bags(group, _):
        here = pl.ds(pl.multiple_of(group * _SUBLANES, _SUBLANES), _SUBLANES)

        def slot_rows(slot):  # a select and not a product: 0 * NaN is NaN
            valid = mask_ref[here, slot : slot + 1] != 0
            return jnp.where(valid, buffer_ref[half, slot, here, :], 0.0)

        total = slot_rows(0)
        for slot in range(1, bag_size):
            total += slot_rows(slot)
        total_ref[here, :] = total

    jax.lax.fori_loop(0, rows // _SUBLANES, sum_eight_bags, None)
