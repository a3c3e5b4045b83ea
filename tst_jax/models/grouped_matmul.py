"""Stretches of rows, each times a matrix of its own: the matmuls of a mixture of experts.

`x_RxD` holds the rows of expert 0, then those of expert 1, and so on: sizes_E of them. On a TPU
`jax.lax.ragged_dot` is a kernel that multiplies each stretch with its expert's matrix. Elsewhere
XLA expands it into all rows times all matrices (jax 0.10 to 0.12, on GPUs too, whatever its flags
for a grouped matmul). So there the rows are cut into blocks that belong to one expert each, some
1.25 times the work, and multiplied as one batch; and a weight's gradient takes as many rows of each
expert at a time. All are exact at any imbalance.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

BLOCKS = 4  # for each expert, if rows spread evenly; another one is partly empty
# Of the weight gradients: so many while no expert has more than SLACK times its even share.
WAVES, SLACK = 2, 1.25
TILE = 512  # of the TPU kernel for weight gradients: rows, and at most so many columns


def grouped_matmul(x_RxD, w_ExDxF, sizes_E):
    """Stretch e of x, sizes_E[e] rows, times w[e].

    Args:
      x_RxD: float; rows behind the last stretch may hold anything.
      w_ExDxF: x's dtype.
      sizes_E: int32, summing to at most R.
    Returns:
      [R, F] in x's dtype; rows behind the last stretch are zero.
    """
    y_RxF = jax.lax.platform_dependent(
        x_RxD, w_ExDxF, sizes_E, tpu=jax.lax.ragged_dot, default=_in_blocks
    )
    # What ragged_dot leaves in rows behind the last stretch is documented nowhere.
    live_R = jnp.arange(x_RxD.shape[0]) < sizes_E.sum()
    return jnp.where(live_R[:, None], y_RxF, 0)


def grouped_weight_gradient(x_RxD, d_y_RxF, sizes_E):
    """Of each stretch, x^T d_y: float32 [E, D, F]. Rows behind the last stretch do not count."""
    return jax.lax.platform_dependent(
        x_RxD, d_y_RxF, sizes_E, tpu=_gradient_tpu, default=_gradient_in_waves
    )


def _gradient_tpu(x_RxD, d_y_RxF, sizes_E, interpret=False):
    # A kernel of jax's own, as jax 0.10 expands this ragged_dot on TPUs too.
    pad = lambda x: jnp.pad(x, ((0, -x.shape[0] % TILE), (0, 0)))
    tiles = TILE, min(TILE, x_RxD.shape[1]), min(TILE, d_y_RxF.shape[1])
    x_DxR = pad(x_RxD).swapaxes(0, 1)
    return tgmm(x_DxR, pad(d_y_RxF), sizes_E, jnp.float32, tiles, interpret=interpret)


# --- Blocks: A of them, of T rows ----------------------------------------------------------------


def _blocks(rows, sizes_E):
    """(expert_A, row_AxT, live_AxT, slot_R): each block's expert and rows, False where a stretch
    ends within it, and the place of each row among all blocks' rows.

    A stretch fills whole blocks but its last, so R / T + E of them always suffice.
    """
    experts = sizes_E.shape[0]
    size = max(8, -(-rows // (BLOCKS * experts * 8)) * 8)
    blocks_E = -(-sizes_E // size)
    ends_E, block_ends_E = jnp.cumsum(sizes_E), jnp.cumsum(blocks_E)
    starts_E, block_starts_E = ends_E - sizes_E, block_ends_E - blocks_E
    owner = lambda ends, i: jnp.minimum(jnp.searchsorted(ends, i, side="right"), experts - 1)

    block_A = jnp.arange(rows // size + experts)
    expert_A = owner(block_ends_E, block_A)
    first_A = starts_E[expert_A] + (block_A - block_starts_E[expert_A]) * size
    row_AxT = first_A[:, None] + jnp.arange(size)
    live_AxT = row_AxT < ends_E[expert_A][:, None]

    row_R = jnp.arange(rows)
    expert_R = owner(ends_E, row_R)
    slot_R = block_starts_E[expert_R] * size + row_R - starts_E[expert_R]
    return expert_A, jnp.minimum(row_AxT, rows - 1), live_AxT, slot_R


def _in_blocks(x_RxD, w_ExDxF, sizes_E):
    expert_A, row_AxT, live_AxT, slot_R = _blocks(x_RxD.shape[0], sizes_E)
    y_AxTxF = jnp.einsum("atd,adf->atf", x_RxD[row_AxT], w_ExDxF[expert_A])
    return y_AxTxF.reshape(-1, w_ExDxF.shape[2])[slot_R]


def _gradient_in_waves(x_RxD, d_y_RxF, sizes_E):
    """Some rows of every expert at a time, until no expert has more.

    Blocks would be E * (BLOCKS + 1) products, and then a sum of those of one expert.
    """
    rows, experts = x_RxD.shape[0], sizes_E.shape[0]
    size = max(8, -(-int(SLACK * rows) // (WAVES * experts * 8)) * 8)
    ends_E = jnp.cumsum(sizes_E)
    starts_E = ends_E - sizes_E

    def wave(carry):
        done, total_ExDxF = carry
        row_ExT = (starts_E + done)[:, None] + jnp.arange(size)
        live_ExT = row_ExT < ends_E[:, None]
        row_ExT = jnp.minimum(row_ExT, rows - 1)
        take = lambda rows: jnp.where(live_ExT[..., None], rows[row_ExT], 0)
        products_ExDxF = jnp.einsum(
            "etd,etf->edf", take(x_RxD), take(d_y_RxF), preferred_element_type=jnp.float32
        )
        return done + size, total_ExDxF + products_ExDxF

    zeros = jnp.zeros((experts, x_RxD.shape[1], d_y_RxF.shape[1]), jnp.float32)
    return jax.lax.while_loop(lambda carry: carry[0] < sizes_E.max(), wave, (0, zeros))[1]
