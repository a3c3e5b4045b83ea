"""Fused output head on TPU: logsumexp over the vocabulary, and its gradients, without the logits.

Multi-hot cross-entropy needs one logsumexp per position whatever the bag size (arXiv 2605.06546,
rule 9); everything else in it is a look-up. Logits are computed in float32 for a tile of positions
and a tile of the vocabulary at a time, in VMEM, and used up there:

    forward    a running maximum and a running sum of exponentials per position
    d_hidden   p @ head, summed over vocabulary tiles      p = exp(logits - logsumexp) * weight
    d_head     p^T @ hidden, summed over position tiles

The two gradients are two kernels, each of which computes the logits again: they sum over different
axes, and a sum stays in VMEM only while its axis is the inner one of the grid.

The last tile of the vocabulary may reach beyond V. Pallas does not say what its rows hold there, so
each kernel says how it keeps them out. Positions are padded with zero rows instead.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_VMEM_LIMIT = 48 << 20  # bytes; the smallest VMEM a kernel here may meet is 64 MiB (one tpu7x core)
_VMEM_BUDGET = 44 << 20  # what the tiles may add up to; the rest is the compiler's own
_POSITIONS, _ENTRIES = 1024, 512  # the largest tiles of positions and of vocabulary entries
_LANES = 128  # tiles are multiples of it in both directions
_DTYPES = ("bfloat16", "float32")


def logsumexp(hidden_NxD, head_VxD, *, interpret=False):
    """`logsumexp_v(hidden[n] . head[v])` for each position, online over tiles of the vocabulary.

    Args:
      hidden_NxD: bfloat16 or float32 [N, D], N and D at least 1.
      head_VxD: [V, D] of the same dtype, any V. With float32, products are float32 ones too.
      interpret: True runs on any backend in Pallas' TPU interpreter, with race detection; or
        the `InterpretParams` to run with.
    Returns:
      float32 [N].
    Raises:
      ValueError: another dtype, shapes that do not fit, or rows too wide for VMEM.
    """
    positions, entries = _tiles(hidden_NxD, head_VxD, sum_over="nothing")
    count, width = hidden_NxD.shape
    hidden_NxD = _pad_positions(hidden_NxD, positions)
    grid = (hidden_NxD.shape[0] // positions, pl.cdiv(head_VxD.shape[0], entries))
    logsumexp_1xN = pl.pallas_call(
        functools.partial(_forward_kernel, vocabulary=head_VxD.shape[0]),
        grid=grid,
        in_specs=[
            pl.BlockSpec((positions, width), lambda n, v: (n, 0)),
            pl.BlockSpec((entries, width), lambda n, v: (v, 0)),
        ],
        out_specs=pl.BlockSpec((1, positions), lambda n, v: (0, n)),
        out_shape=jax.ShapeDtypeStruct((1, count), jnp.float32),
        scratch_shapes=[pltpu.VMEM((1, positions), jnp.float32)] * 2,
        name="logsumexp",
        **_options(hidden_NxD, head_VxD, grid, interpret, matmuls=1),
    )(hidden_NxD, head_VxD)
    return logsumexp_1xN[0]


def softmax_gradients(hidden_NxD, head_VxD, logsumexp_N, weight_N, *, interpret=False):
    """Gradients of `sum_n weight[n] * logsumexp[n]` with respect to hidden and head.

    The softmax p[n, v] = exp(hidden[n] . head[v] - logsumexp[n]) * weight[n] is cast to hidden's
    dtype for the matmuls; they accumulate in float32. `logsumexp_N` is given and not computed: it
    may be the one of a whole vocabulary of which `head_VxD` is a shard.

    Args:
      hidden_NxD, head_VxD, interpret: as for `logsumexp`.
      logsumexp_N: float32 [N].
      weight_N: float32 [N], of any sign; the cotangent of logsumexp.
    Returns:
      (d_hidden float32 [N, D], d_head float32 [V, D]).
    Raises:
      ValueError: another dtype, shapes that do not fit, or rows too wide for VMEM.
    """
    count = hidden_NxD.shape[:1]
    if logsumexp_N.shape != count or weight_N.shape != count:
        raise ValueError(
            f"logsumexp {logsumexp_N.shape} and weight {weight_N.shape} for hidden "
            f"{hidden_NxD.shape}; give one value a position"
        )
    arrays = hidden_NxD, head_VxD, logsumexp_N.astype(jnp.float32), weight_N.astype(jnp.float32)
    return _d_hidden(*arrays, interpret), _d_head(*arrays, interpret)


def _d_hidden(hidden_NxD, head_VxD, logsumexp_N, weight_N, interpret):
    positions, entries = _tiles(hidden_NxD, head_VxD, sum_over="entries")
    count, width = hidden_NxD.shape
    arrays = [_pad_positions(x, positions) for x in (hidden_NxD, logsumexp_N, weight_N)]
    grid = (arrays[0].shape[0] // positions, pl.cdiv(head_VxD.shape[0], entries))
    per_position = lambda columns: pl.BlockSpec((positions, columns), lambda n, v: (n, 0))
    per_entry = pl.BlockSpec((entries, width), lambda n, v: (v, 0))
    return pl.pallas_call(
        functools.partial(_d_hidden_kernel, vocabulary=head_VxD.shape[0]),
        grid=grid,
        in_specs=[per_position(width), per_entry, per_position(1), per_position(1)],
        out_specs=per_position(width),
        out_shape=jax.ShapeDtypeStruct((count, width), jnp.float32),
        name="logsumexp_d_hidden",
        **_options(arrays[0], head_VxD, grid, interpret, matmuls=2),
    )(arrays[0], head_VxD, arrays[1][:, None], arrays[2][:, None])


def _d_head(hidden_NxD, head_VxD, logsumexp_N, weight_N, interpret):
    positions, entries = _tiles(hidden_NxD, head_VxD, sum_over="positions")
    width = hidden_NxD.shape[1]
    arrays = [_pad_positions(x, positions) for x in (hidden_NxD, logsumexp_N, weight_N)]
    grid = (pl.cdiv(head_VxD.shape[0], entries), arrays[0].shape[0] // positions)
    hidden = pl.BlockSpec((positions, width), lambda v, n: (n, 0))
    per_entry = pl.BlockSpec((entries, width), lambda v, n: (v, 0))
    per_position = pl.BlockSpec((1, positions), lambda v, n: (0, n))
    return pl.pallas_call(
        _d_head_kernel,
        grid=grid,
        in_specs=[hidden, per_entry, per_position, per_position],
        out_specs=per_entry,
        out_shape=jax.ShapeDtypeStruct(head_VxD.shape, jnp.float32),
        name="logsumexp_d_head",
        **_options(head_VxD, arrays[0], grid, interpret, matmuls=2),
    )(arrays[0], head_VxD, arrays[1][None], arrays[2][None])


# --- Kernels: N is a tile of positions here, V a tile of the vocabulary --------------------------


def _forward_kernel(hidden_ref, head_ref, logsumexp_ref, peak_ref, norm_ref, *, vocabulary):
    """Logits lie as [V, N], so that maximum and sum run down a column and a position is a lane."""
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _():
        peak_ref[...] = jnp.full_like(peak_ref, -jnp.inf)
        norm_ref[...] = jnp.zeros_like(norm_ref)

    z_VxN = _matmul(head_ref[...], hidden_ref[...], contract=(1, 1))
    z_VxN = jnp.where(_is_entry(z_VxN, 0, tile, vocabulary), z_VxN, -jnp.inf)
    # Every tile has an entry, so the new peak is finite, and exp(-inf - peak) is 0 and never NaN.
    old_peak = peak_ref[...]
    peak = jnp.maximum(old_peak, z_VxN.max(0, keepdims=True))
    here = jnp.exp(z_VxN - peak).sum(0, keepdims=True)
    norm_ref[...] = norm_ref[...] * jnp.exp(old_peak - peak) + here
    peak_ref[...] = peak

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        logsumexp_ref[...] = peak_ref[...] + jnp.log(norm_ref[...])


def _d_hidden_kernel(hidden_ref, head_ref, logsumexp_ref, weight_ref, d_hidden_ref, *, vocabulary):
    """Rows beyond V are zeroed, in p and in the head: a zero in one of them is not enough."""
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def _():
        d_hidden_ref[...] = jnp.zeros_like(d_hidden_ref)

    head = head_ref[...]
    head = jnp.where(_is_entry(head, 0, tile, vocabulary), head, jnp.zeros_like(head))
    z_NxV = _matmul(hidden_ref[...], head, contract=(1, 1))
    p_NxV = jnp.exp(z_NxV - logsumexp_ref[...]) * weight_ref[...]
    p_NxV = jnp.where(_is_entry(p_NxV, 1, tile, vocabulary), p_NxV, 0.0)
    d_hidden_ref[...] += _matmul(p_NxV.astype(head.dtype), head, contract=(1, 0))


def _d_head_kernel(hidden_ref, head_ref, logsumexp_ref, weight_ref, d_head_ref):
    """Rows beyond V write to rows of the output beyond V, which Pallas drops."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        d_head_ref[...] = jnp.zeros_like(d_head_ref)

    hidden = hidden_ref[...]
    z_VxN = _matmul(head_ref[...], hidden, contract=(1, 1))
    p_VxN = (jnp.exp(z_VxN - logsumexp_ref[...]) * weight_ref[...]).astype(hidden.dtype)
    d_head_ref[...] += _matmul(p_VxN, hidden, contract=(1, 0))


def _matmul(a, b, contract):
    """float32 result. Float32 operands are multiplied as such and not rounded to bfloat16."""
    exact = a.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)


def _is_entry(x, axis, tile, vocabulary):
    """bool, shaped like x: whether an index of this axis of this vocabulary tile is below V."""
    return tile * x.shape[axis] + jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) < vocabulary


# --- What the three calls share ------------------------------------------------------------------


def _tiles(hidden_NxD, head_VxD, sum_over):
    """Sizes of the tiles of positions and of vocabulary entries, within _VMEM_BUDGET."""
    if hidden_NxD.dtype not in _DTYPES or head_VxD.dtype != hidden_NxD.dtype:
        raise ValueError(
            f"hidden is {hidden_NxD.dtype} and head {head_VxD.dtype}; "
            f"cast both to one of {', '.join(_DTYPES)}"
        )
    if hidden_NxD.ndim != 2 or head_VxD.ndim != 2 or hidden_NxD.shape[1] != head_VxD.shape[1]:
        raise ValueError(
            f"hidden {hidden_NxD.shape} and head {head_VxD.shape}; give [N, D] and [V, D]"
        )
    width = pl.cdiv(hidden_NxD.shape[1], _LANES) * _LANES
    itemsize = hidden_NxD.dtype.itemsize
    # What the compiler keeps of a float32 operand: it is split into bfloat16 parts for the matmul.
    split = 16 if itemsize == 4 else 0

    def vmem_bytes(positions, entries):
        # Blocks are double buffered; the product that is added to a sum has the size of the sum.
        sums = {"nothing": 0, "entries": positions, "positions": entries}[sum_over]
        columns = (2 * itemsize + split) * (positions + entries) + (2 + 1) * 4 * sums
        return width * columns + 3 * 4 * positions * entries  # logits, exponentials, softmax

    positions, entries = _POSITIONS, _ENTRIES
    while vmem_bytes(positions, entries) > _VMEM_BUDGET:
        if max(positions, entries) <= _LANES:
            raise ValueError(
                f"hidden is {hidden_NxD.shape[1]} wide in {hidden_NxD.dtype}; the smallest tile "
                f"must fit in {_VMEM_BUDGET >> 20} MiB of VMEM; use the XLA loss"
            )
        if positions >= entries:
            positions //= 2
        else:
            entries //= 2
    # Tiles of positions of one size, so that few rows are padding.
    count = hidden_NxD.shape[0]
    even = pl.cdiv(count, pl.cdiv(count, positions))
    return pl.cdiv(even, _LANES) * _LANES, entries


def _pad_positions(x, positions):
    return jnp.pad(x, [(0, -x.shape[0] % positions)] + [(0, 0)] * (x.ndim - 1))


def _options(outer, inner, grid, interpret, matmuls):
    """Of a call that keeps a block of `outer` while it sums over all blocks of `inner`."""
    pairs = outer.shape[0] * inner.shape[0]
    return {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        "cost_estimate": pl.CostEstimate(
            flops=2 * matmuls * pairs * outer.shape[1],
            transcendentals=pairs,
            bytes_accessed=outer.nbytes + grid[0] * inner.nbytes,
        ),
        "interpret": pltpu.InterpretParams(detect_races=True) if interpret is True else interpret,
    }
