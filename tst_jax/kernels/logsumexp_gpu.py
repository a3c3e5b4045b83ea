"""Matmul and logsumexp in one kernel for NVIDIA GPUs: Hopper and Blackwell, in Pallas Mosaic GPU.

The loss of a position needs one logsumexp over the vocabulary, whatever the bag size (rule 9;
arXiv 2605.06546, section 3.2). XLA writes the logits to memory to get it. These kernels reduce
each tile of logits where the tensor cores leave it, to two numbers a position: the tile's largest
logit and the sum of exponentials relative to it. XLA joins these partial results, [V / 128, N].

In both kernels as many blocks as the GPU has multiprocessors loop over the tiles of logits. The
width streams through shared memory, and warps of their own keep the copies in flight:

    hopper     wgmma; two compute warpgroups, each with 128 positions of a [256, 128] tile, and
               one for the copies.
    blackwell  tcgen05; one warp copies, one issues the matmuls, and a second warpgroup reduces a
               [128, 128] tile while the next is being multiplied.

Blackwell's hardware can deal tiles out to blocks. It is not asked to: the interpreter would then
give each block a single tile, and what one tile leaves behind for the next would go untested.

P is the number of vocabulary tiles in the names of arrays here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

# Mosaic GPU is imported inside the functions: only a caller of the kernel should pay for it, and
# an installation for CPU or TPU may not be able to import it.

_DTYPES = ("bfloat16", "float16")
_TILE = 128  # positions a warpgroup, and vocabulary entries a tile
_DEPTH = 64  # of the width at a time: 128 bytes, the longest row that swizzled memory knows
_STAGES = 4  # such slices in shared memory at once
_WARPGROUPS = 2  # that multiply, on Hopper
_SNAKE = 8  # position tiles that pass over the vocabulary together, so that they share its rows
_MULTIPROCESSORS = {"hopper": 132, "blackwell": 148}  # where no device can be asked


def logsumexp(hidden_NxD, head_VxD, *, arch: str, interpret: bool = False):
    """The logsumexp over the vocabulary of every position's logits, which stay on the chip.

    Element n is log(sum over v of exp(hidden_NxD[n] @ head_VxD[v])). Logits are accumulated in
    float32. Any N >= 1, D >= 1 and V >= 2 will do: the arrays are padded to whole tiles, and
    padded entries of the vocabulary are left out of the sum. The arrays are those of one device: on
    a mesh call it inside `jax.shard_map`, or every device gathers all of them and repeats the work.
    It has no gradient of its own.

    Args:
      hidden_NxD: bfloat16 or float16 [N, D], after the final norm.
      head_VxD: output head [V, D] of the same dtype, one row an entry.
      arch: `hopper` (compute capability 9.0) or `blackwell` (10.0).
      interpret: run on the CPU in Mosaic GPU's interpreter, which is slow and looks for races.
    Returns:
      logsumexp_N: float32 [N], in nats.
    Raises:
      ValueError: another arch or dtype, or shapes that do not fit together.
      NotImplementedError: `interpret` with a jax whose interpreter does not know these kernels.
    """
    _check(hidden_NxD, head_VxD, arch)
    positions, vocab = hidden_NxD.shape[0], head_VxD.shape[0]
    rows = _TILE * _WARPGROUPS if arch == "hopper" else _TILE
    hidden_NxD = _pad(hidden_NxD, rows)
    head_VxD = _pad(head_VxD, _TILE)
    peaks_PxN, sums_PxN = _partials(hidden_NxD, head_VxD, vocab, rows, arch, interpret)
    peak_N = peaks_PxN.max(0)
    sum_N = (sums_PxN * jnp.exp(peaks_PxN - peak_N)).sum(0)
    return (peak_N + jnp.log(sum_N))[:positions]


def _check(hidden_NxD, head_VxD, arch):
    if arch not in ("hopper", "blackwell"):
        raise ValueError(f"arch is {arch!r}; choose hopper or blackwell")
    dtypes = [jnp.dtype(x.dtype).name for x in (hidden_NxD, head_VxD)]
    if dtypes[0] != dtypes[1] or dtypes[0] not in _DTYPES:
        raise ValueError(
            f"hidden is {dtypes[0]} and head is {dtypes[1]}; "
            f"both must be {' or both '.join(_DTYPES)}: cast them first"
        )
    shapes = hidden_NxD.shape, head_VxD.shape
    fit = all(len(s) == 2 for s in shapes) and shapes[0][1] == shapes[1][1]
    if not fit or min(shapes[0]) < 1 or shapes[1][0] < 2:
        raise ValueError(
            f"hidden {shapes[0]} and head {shapes[1]}; "
            "give [N, D] and [V, D] with N and D at least 1 and V at least 2"
        )


def _pad(x, rows):
    """Zeros up to whole tiles: they add nothing to a dot product."""
    return jnp.pad(x, ((0, -x.shape[0] % rows), (0, -x.shape[1] % _DEPTH)))


def _interpreter():
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # Older interpreters fail in a callback at the transposed operand, and then wait for ever.
    if "inline_mgpu" not in {field.name for field in dataclasses.fields(InterpretGPUParams)}:
        raise NotImplementedError(
            f"the Mosaic GPU interpreter of jax {jax.__version__} has no transposed operands and "
            "no tcgen05; run these kernels on a GPU, or interpret them with jax 0.11.2 or newer"
        )
    return InterpretGPUParams(detect_races=True)


def _partials(hidden_NxD, head_VxD, vocab, rows, arch, interpret):
    """Whole tiles -> per tile of the vocabulary and position what `_reduce` gives, [P, N] each."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    positions, width = hidden_NxD.shape
    tiles = positions // rows, head_VxD.shape[0] // _TILE
    make = _hopper if arch == "hopper" else _blackwell
    kernel, threads, scratch = make(tiles, width // _DEPTH, vocab, hidden_NxD.dtype)
    # The interpreter gets two blocks: each takes several tiles, as on a GPU with many more.
    blocks = 2 if interpret else _multiprocessors(arch)
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((tiles[1], positions), jnp.float32)] * 2,
        grid=(min(blocks, tiles[0] * tiles[1]),),
        grid_names=("block",),
        num_threads=threads,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Releases of jax disagree on the default.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **({"interpret": _interpreter()} if interpret else {}),
    )(hidden_NxD, head_VxD)


def _multiprocessors(arch):
    """Of a GPU of the mesh in use, or else of the local device, or else as most have."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    count = getattr(device, "num_cores", None)
    return count or getattr(jax.local_devices()[0], "core_count", None) or _MULTIPROCESSORS[arch]


def _transforms(dtype):
    """The layout in shared memory that both kinds of tensor core read."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    swizzle = plgpu.find_swizzle(_DEPTH * jnp.dtype(dtype).itemsize * 8)
    elements = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(swizzle)


def _reduce(logits, vocab_tile, vocab):
    """Logits [128, 128] -> per row, the largest and the sum of exponentials relative to it.

    Padding ends within the last tile, so that every tile has an entry that counts and the largest
    logit of a row is finite. A vocabulary of whole tiles is not masked at all.
    """
    if vocab % _TILE:
        entry = vocab_tile * _TILE + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        logits = jnp.where(entry < vocab, logits, -jnp.inf)
    peak = logits.max(axis=1)
    return peak, jnp.exp(logits - lax.broadcast_in_dim(peak, logits.shape, [0])).sum(axis=1)


def _hopper(tiles, slices, vocab, dtype):
    """A kernel for `tiles` of positions and of the vocabulary, its warpgroups and its scratch."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows = _TILE * _WARPGROUPS

    memory = dict(memory_space=plgpu.SMEM, transforms=_transforms(dtype))
    operand = lambda rows: plgpu.BlockSpec((rows, _DEPTH), lambda k: (0, k), **memory)

    def pipeline(multiply, compute):
        return plgpu.emit_pipeline_warp_specialized(
            multiply,
            grid=(slices,),
            in_specs=[operand(rows), operand(_TILE)],
            max_concurrent_steps=_STAGES,
            wg_axis="warpgroup",
            num_compute_wgs=_WARPGROUPS,
            memory_registers=40,  # copies need few; the others hold a tile of logits
            compute_context=compute,
        )

    def logsumexp_hopper(hidden_ref, head_ref, peaks_ref, sums_ref):
        unused = lambda *_: None  # the buffers do not depend on what is done with them

        @functools.partial(
            pl.run_scoped,
            buffers=pipeline(unused, unused).get_allocations(hidden_ref, head_ref),
            peak_smem=plgpu.SMEM((_WARPGROUPS, _TILE), jnp.float32),
            sum_smem=plgpu.SMEM((_WARPGROUPS, _TILE), jnp.float32),
            collective_axes="warpgroup",
        )
        def _(buffers, peak_smem, sum_smem):
            warpgroup = lax.axis_index("warpgroup")

            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
            def _(loop):
                n, v = plgpu.planar_snake(loop.index[0], tiles, 0, _SNAKE)

                def multiply(_, hidden_smem, head_smem, logits_acc):
                    own = pl.ds(warpgroup * _TILE, _TILE)
                    head_DxV = plgpu.transpose_ref(head_smem, (1, 0))
                    plgpu.wgmma(logits_acc, hidden_smem.at[own], head_DxV)
                    plgpu.wgmma_wait(0)  # the pipeline frees this slice as soon as we return
                    return logits_acc

                def compute(run_pipeline):
                    tile = plgpu.ACC((_TILE, _TILE), jnp.float32)

                    @functools.partial(pl.run_scoped, logits_acc=tile)
                    def _(logits_acc):
                        run_pipeline(logits_acc)
                        peak, total = _reduce(logits_acc[...], v, vocab)
                        # The previous tile's results must have left before they are overwritten.
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        peak_smem[warpgroup] = peak
                        sum_smem[warpgroup] = total
                        plgpu.commit_smem()
                        own = pl.ds(n * rows + warpgroup * _TILE, _TILE)
                        plgpu.copy_smem_to_gmem(peak_smem.at[warpgroup], peaks_ref.at[v, own])
                        plgpu.copy_smem_to_gmem(sum_smem.at[warpgroup], sums_ref.at[v, own])

                pipeline(multiply, compute)(
                    hidden_ref.at[pl.ds(n * rows, rows), :],
                    head_ref.at[pl.ds(v * _TILE, _TILE), :],
                    allocations=buffers,
                )

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return logsumexp_hopper, _WARPGROUPS + 1, {}


def _blackwell(tiles, slices, vocab, dtype):
    """A kernel for `tiles` of positions and of the vocabulary, its warpgroups and its scratch."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    stages = min(_STAGES, slices)

    def logsumexp_blackwell(
        hidden_ref,
        head_ref,
        peaks_ref,
        sums_ref,
        *,
        hidden_smem,
        head_smem,
        logits_tmem,
        peak_smem,
        sum_smem,
        loaded,
        consumed,
        multiplied,
        reduced,
    ):
        warpgroup = lax.axis_index("warpgroup")

        # All buffers are free at the start: nobody has to know which tile is a block's first.
        @pl.when(warpgroup == 1)
        def _():
            for stage in range(stages):
                plgpu.barrier_arrive(consumed.at[stage])
            for half in range(2):
                plgpu.barrier_arrive(reduced.at[half])

        @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="block")
        def _(loop):
            n, v = plgpu.planar_snake(loop.index[0], tiles, 0, _SNAKE)
            own = pl.ds(n * _TILE, _TILE)
            half = lax.rem(loop.local_index, jnp.int32(2))  # the other half is being reduced
            logits = logits_tmem.at[:, pl.ds(half * _TILE, _TILE)]

            def copy(k, _):
                stage = lax.rem(k, jnp.int32(stages))
                columns = pl.ds(k * _DEPTH, _DEPTH)
                plgpu.barrier_wait(consumed.at[stage])
                for source, target in (
                    (hidden_ref.at[own, columns], hidden_smem.at[stage]),
                    (head_ref.at[pl.ds(v * _TILE, _TILE), columns], head_smem.at[stage]),
                ):
                    plgpu.copy_gmem_to_smem(source, target, loaded.at[stage])

            def multiply(k, _):
                stage = lax.rem(k, jnp.int32(stages))
                plgpu.barrier_wait(loaded.at[stage])
                plgpu.tcgen05_mma(
                    logits,
                    hidden_smem.at[stage],
                    plgpu.transpose_ref(head_smem.at[stage], (1, 0)),
                    consumed.at[stage],
                    accumulate=k > 0,
                )

            @pl.when(warpgroup == 0)
            def _():
                @plgpu.warp_map
                def _(warp):
                    @pl.when(warp == 0)
                    def _():
                        lax.fori_loop(0, slices, copy, None)

                    @pl.when(warp == 1)
                    def _():
                        plgpu.barrier_wait(reduced.at[half])
                        lax.fori_loop(0, slices, multiply, None)
                        plgpu.tcgen05_commit_arrive(multiplied.at[half])

            @pl.when(warpgroup == 1)
            def _():
                plgpu.barrier_wait(multiplied.at[half])
                tile = plgpu.async_load_tmem(logits)
                plgpu.wait_load_tmem()
                plgpu.barrier_arrive(reduced.at[half])
                peak, total = _reduce(tile, v, vocab)
                # The previous tile's results must have left before they are overwritten.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                peak_smem[...] = peak
                sum_smem[...] = total
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(peak_smem, peaks_ref.at[v, own])
                plgpu.copy_smem_to_gmem(sum_smem, sums_ref.at[v, own])

        # A block must not end before all that it started has: its barriers and memory go with it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        @pl.when(warpgroup == 0)
        def _():
            @plgpu.warp_map
            def _(warp):
                for waiting, barriers, count in ((0, consumed, stages), (1, reduced, 2)):

                    @pl.when(warp == waiting)
                    def _():
                        for i in range(count):
                            plgpu.barrier_wait(barriers.at[i])

    # What a tensor core's work signals, or waits for, has to be ordered with it.
    barrier = functools.partial(plgpu.Barrier, num_arrivals=1, orders_tensor_core=True)
    operand = plgpu.SMEM((stages, _TILE, _DEPTH), dtype, transforms=_transforms(dtype))
    scratch = dict(
        hidden_smem=operand,
        head_smem=operand,
        logits_tmem=plgpu.TMEM((_TILE, 2 * _TILE), jnp.float32),
        peak_smem=plgpu.SMEM((_TILE,), jnp.float32),
        sum_smem=plgpu.SMEM((_TILE,), jnp.float32),
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # two copies a stage
        consumed=barrier(num_barriers=stages),
        multiplied=barrier(num_barriers=2),
        reduced=barrier(num_barriers=2),
    )
    return logsumexp_blackwell, 2, scratch
