"""What mixes the positions of a row: softmax attention with several backends, and a linear one.

All are pure functions of arrays. `xla` runs anywhere and holds a square of scores for each head;
`cudnn` and `splash` never hold it, so their memory grows with the length of a row, not its square.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from tst_jax import sharding

BACKENDS = ("auto", "xla", "cudnn", "splash")
LINEAR_CHUNK = 64  # positions that linear attention scores against each other

_LANES = 128  # of a TPU: splash wants positions and head size in multiples of it


def problem(
    backend: str, platform: str, dtype, head_dim: int, positions: int, packed: bool = False
) -> str | None:
    """One line if `backend` cannot run there, before anything is compiled.

    Args:
      backend: one of BACKENDS; `auto` and `xla` run anywhere.
      platform: cpu, gpu or tpu.
      dtype, head_dim, positions: of the activations; Q; L.
      packed: whether rows hold several documents, told apart by segment ids.
    """
    name, dtype = f"model.attention_backend={backend}", jnp.dtype(dtype).name
    instead = "give model.attention_backend=auto or xla"
    if backend not in BACKENDS:
        return f"{name} is unknown; choose one of {', '.join(BACKENDS)}"
    if backend == "splash":
        if platform != "tpu":
            return f"{name} runs on TPUs, not on a {platform}; {instead}"
        if dtype == "float16":
            return f"{name} does not compile for float16; give model.dtype=bfloat16, or {instead}"
        if positions % _LANES:
            found = f"data.positions in multiples of {_LANES}, not {positions}"
            return f"{name} needs {found}; change it, or {instead}"
    if backend == "cudnn":
        if platform != "gpu":
            return f"{name} runs on GPUs, not on a {platform}; {instead}"
        if dtype not in ("bfloat16", "float16"):
            found = f"bfloat16 or float16, not {dtype}"
            return f"{name} computes in {found}; give model.dtype=bfloat16, or {instead}"
        if head_dim % 8 or head_dim > 128:  # what all cards take; newer ones go to 256
            found = f"model.head_dim in multiples of 8 up to 128, not {head_dim}"
            return f"{name} needs {found}; change it, or {instead}"
        if packed:
            # Its mask would be a bias [B, H, L, L]: the square that it is there to avoid.
            return f"{name} cannot keep the documents of a packed row apart; {instead}"
    return None


def chosen(backend: str, platform: str, dtype, head_dim: int, positions: int, packed: bool) -> str:
    """The backend that runs: `auto` becomes the one that avoids the square, where one can.

    An explicit backend stays what it is, whether or not it can run; `problem` tells.
    """
    if backend != "auto":
        return backend
    able = lambda name: problem(name, platform, dtype, head_dim, positions, packed) is None
    return next(name for name in ("splash", "cudnn", "xla") if able(name))


def attend(
    query_BxLxHxQ,
    key_BxLxKxQ,
    value_BxLxKxQ,
    segments_BxL=None,
    *,
    backend: str = "auto",
    mesh=None,
    interpret: bool = False,
):
    """Causal softmax attention with scores scaled by 1 / sqrt(Q).

    Query head h uses key and value head h * K // H (grouped queries, arXiv 2305.13245).

    Args:
      query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ: of one dtype.
      segments_BxL: int32; a position sees positions of its own segment only. None: one segment.
      backend: one of BACKENDS. An explicit one runs or is an error; it is never replaced.
      mesh: what the program is for; rows and heads lie over it as `sharding.RULES` says.
      interpret: run what a TPU would run, slowly, on any platform (for tests).
    Returns:
      [B, L, H, Q] in the dtype of the query.
    Raises:
      ValueError: the line of `problem`, or rows or heads that do not divide over the mesh.
    """
    platform = "tpu" if interpret else sharding.platform(mesh)
    _, positions, _, head_dim = query_BxLxHxQ.shape
    where = (platform, query_BxLxHxQ.dtype, head_dim, positions, segments_BxL is not None)
    if line := problem(backend, *where):
        raise ValueError(line)
    backend = chosen(backend, *where)
    if backend == "splash":
        function = functools.partial(_splash, interpret=interpret)
        return _on_mesh(function, mesh)(query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ, segments_BxL)
    dense = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=backend)
    if backend == "cudnn":
        # Partitioned automatically, it refuses query, key and value that XLA laid out differently.
        return _on_mesh(dense, mesh)(query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ)
    mask = None
    if segments_BxL is not None:
        mask = segments_BxL[:, None, :, None] == segments_BxL[:, None, None, :]
    return dense(query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ, mask=mask)


def _on_mesh(function, mesh):
    """`function` of query, key, value (and segments), on each device for its rows and heads."""
    lie = {name: sharding.axes(mesh, name) for name in ("batch", "kv_heads")}
    if not any(lie.values()):
        return function
    # Every axis of the mesh is in one of these, so no gradient is summed over devices.
    batch, heads = sharding.RULES["batch"], sharding.RULES["kv_heads"]
    split, rows = PartitionSpec(batch, None, heads), PartitionSpec(batch)

    def call(query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ, *segments):
        batch, _, kv_heads, _ = key_BxLxKxQ.shape
        for setting, size, axes in (
            ("data.rows", batch, lie["batch"]),
            ("model.kv_heads", kv_heads, lie["kv_heads"]),
        ):
            if size % (devices := math.prod(mesh.shape[axis] for axis in axes)):
                raise ValueError(
                    f"{setting} of {size} does not divide by mesh.{' x mesh.'.join(axes)}="
                    f"{devices}; change either, or give model.attention_backend=xla"
                )
        specs = (split,) * 3 + (rows,) * len(segments)
        # The kernels do not declare over which axes their results vary, so jax cannot check it.
        on_parts = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False
        )
        return on_parts(query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ, *segments)

    return call


def _splash(query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ, segments_BxL, interpret):
    """Attention by the splash attention kernels that come with jax, on one TPU."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    _, positions, heads, head_dim = query_BxLxHxQ.shape
    # The kernel does not scale. A bfloat16 1 / sqrt(Q) would change the temperature of all scores.
    scaled = query_BxLxHxQ.astype(jnp.float32) / math.sqrt(head_dim)
    # Zeros beyond Q add nothing to a score; those of the value are cut off again.
    padding = ((0, 0), (0, 0), (0, 0), (0, -head_dim % _LANES))
    heads_first = lambda x: jnp.pad(x, padding).swapaxes(1, 2)
    query = heads_first(scaled.astype(query_BxLxHxQ.dtype))
    ids = None if segments_BxL is None else SegmentIds(segments_BxL, segments_BxL)
    kernel = _splash_kernel(heads, positions, _block(positions, query), interpret)
    mixed = jax.vmap(kernel)(query, heads_first(key_BxLxKxQ), heads_first(value_BxLxKxQ), ids)
    return mixed.swapaxes(1, 2)[..., :head_dim]


def _block(positions: int, query) -> int:
    """How many queries, and keys, the kernels compare at once: large, but they must fit in VMEM."""
    wide = query.shape[-1] * query.dtype.itemsize > 2 * _LANES  # more than 128 in bfloat16
    sizes = (512, 256, _LANES) if wide else (1024, 512, 256, _LANES)
    return next(size for size in sizes if positions % size == 0)


@functools.cache
def _splash_kernel(heads: int, positions: int, block: int, interpret: bool):
    """A function of the query, key, value [heads, L, Q] and segment ids of one row."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    class Causal(splash.CausalMask):
        # All blocks are looked at several times, and only those on the diagonal need more than one
        # entry: 131,072 positions would take over a minute otherwise.
        def __getitem__(self, idx):
            queries, keys = idx
            if queries.start >= keys.stop or queries.stop <= keys.start:
                return np.full((1, 1), queries.start >= keys.stop)
            return super().__getitem__(idx)

    # Not the fused backward kernel: it writes one gradient of the query for each block of keys,
    # which again grows with the square of the length.
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes = splash.BlockSizes(**{f"block_{name}": block for name in names})
    mask = splash.MultiHeadMask([Causal((positions, positions))] * heads)
    # Made at once and in numpy: the next program must not hold a tracer or a device of this one.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret
        )
        return jax.tree.map(np.asarray, kernel)


def attend_cached(query_BxLxHxQ, keys_BxMxKxQ, values_BxMxKxQ, positions_BxL):
    """Attention over a cache of M slots, for decoding: position p sees the slots 0 .. p.

    Args:
      query_BxLxHxQ: of positions anywhere in the row, whose keys and values are already written.
      keys_BxMxKxQ, values_BxMxKxQ: what slots after p hold does not matter, if it is finite.
      positions_BxL: int32.
    Returns:
      [B, L, H, Q] in the dtype of the query, scaled and grouped as in `attend`.
    """
    seen = jnp.arange(keys_BxMxKxQ.shape[1]) <= positions_BxL[:, None, :, None]
    return jax.nn.dot_product_attention(
        query_BxLxHxQ, keys_BxMxKxQ, values_BxMxKxQ, mask=seen, implementation="xla"
    )


def linear_attention(
    query_BxLxHxQ,
    key_BxLxKxQ,
    value_BxLxKxQ,
    log_decay_BxLxH,
    segments_BxL=None,
    state_BxHxQxQ=None,
    chunk: int = LINEAR_CHUNK,
):
    """Gated linear attention with one decay for each head and position.

        S_t = exp(log_decay_t) S_(t-1) + k_t^T v_t        out_t = q_t S_t / sqrt(Q)

    This is gated linear attention (arXiv 2312.06635) with the scalar decay of Mamba-2 (arXiv
    2405.21060). Inside a chunk it is attention with decaying weights, between chunks a state is
    carried, so that time and memory grow with L. All of it is computed in float32.

    Args:
      query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ: grouped as in `attend`.
      log_decay_BxLxH: at most 0.
      segments_BxL: int32. Where it changes from one position to the next, the state starts anew.
      state_BxHxQxQ: float32, S before the first position, of the same segment. None: zeros.
      chunk: positions of a chunk; L need not divide by it.
    Returns:
      mixed_BxLxHxQ in the dtype of the query, and the float32 state [B, H, Q, Q] after the last
      position (rows are of keys, columns of values), from which another call continues.
    """
    batch, positions, heads, head_dim = query_BxLxHxQ.shape
    group = heads // key_BxLxKxQ.shape[2]
    chunk = min(chunk, positions)
    missing = -positions % chunk
    # Runs of equal ids are counted, so that an id that comes back is another segment.
    run_BxL = jnp.zeros((batch, positions), jnp.int32)
    if segments_BxL is not None:
        starts = segments_BxL[:, 1:] != segments_BxL[:, :-1]
        run_BxL = jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
    if state_BxHxQxQ is None:
        state_BxHxQxQ = jnp.zeros((batch, heads, head_dim, head_dim), jnp.float32)

    def chunks(x, mode="constant"):
        """[B, L, ...] -> [chunks, B, C, ...]. A padded key of 0 and decay of 1 keep the state."""
        x = jnp.pad(x, ((0, 0), (0, missing)) + ((0, 0),) * (x.ndim - 2), mode=mode)
        return x.reshape(batch, -1, chunk, *x.shape[2:]).swapaxes(0, 1)

    later = np.tril(np.ones((chunk, chunk), bool), -1)  # [t, i]: t comes after i
    seen = later | np.eye(chunk, dtype=bool)

    # Recomputed in the backward pass, which then keeps the states and no scores.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry, inputs):
        (state, run_B), (q, k, v, log_decay, run_BxC) = carry, inputs
        q, k, v, log_decay = (x.astype(jnp.float32).swapaxes(1, 2) for x in (q, k, v, log_decay))
        q = q / math.sqrt(head_dim)
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))  # [B, H, C, Q]
        # Log decay from i to t: the sum over (i, t], added up for each i by itself, because a
        # difference of two long sums would lose the small ones. Never positive, so exp is safe.
        since_BxHxCxC = jnp.cumsum(jnp.where(later, log_decay[..., None], 0.0), axis=2)
        same = (run_BxC[:, :, None] == run_BxC[:, None, :])[:, None]
        weights = jnp.where(seen & same, jnp.exp(since_BxHxCxC), 0.0)
        mixed = jnp.einsum("bhtq,bhiq->bhti", q, k) * weights @ v
        # What of the carried state reaches each position, and the next chunk.
        first = (run_BxC == run_B[:, None])[:, None]
        kept = jnp.where(first, jnp.exp(jnp.cumsum(log_decay, axis=2)), 0.0)[..., None]
        mixed = mixed + kept * (q @ state)
        added = jnp.einsum("bhi,bhiq,bhir->bhqr", weights[:, :, -1], k, v)
        state = kept[:, :, -1:] * state + added
        return (state, run_BxC[:, -1]), mixed.swapaxes(1, 2).astype(query_BxLxHxQ.dtype)

    arrays = (query_BxLxHxQ, key_BxLxKxQ, value_BxLxKxQ, log_decay_BxLxH)
    inputs = (*map(chunks, arrays), chunks(run_BxL, "edge"))
    carry = state_BxHxQxQ.astype(jnp.float32), run_BxL[:, 0]
    (state_BxHxQxQ, _), mixed = jax.lax.scan(step, carry, inputs)
    mixed_BxLxHxQ = mixed.swapaxes(0, 1).reshape(batch, -1, heads, head_dim)[:, :positions]
    return mixed_BxLxHxQ, state_BxHxQxQ
