"""Multi-hot cross-entropy of linear logits that are never whole in memory (rules 8 and 9).

For a position h, a head E [V, D] and a target bag y_1 .. y_s with weights w_i:

    mce   (sum_i w_i) logsumexp(E h) - h . sum_i w_i E[y_i]
    mass  logsumexp(E h) - log sum_i w_i exp(h . E[y_i])

One logsumexp whatever s, and the positive term is a look-up of the bag in the head. The loss is a
scalar, so its gradients are finished in the forward pass and only scaled in the backward:

    d_h = c softmax(E h) E - sum_i q_i E[y_i]
    d_E = (c softmax(E h))^T h - scatter-add of q_i h to row y_i

with c, q = sum_i w_i, w for mce, and 1, the bag's own softmax for mass. The XLA path, which is the
default everywhere, holds the logits of a chunk of positions, takes three matmuls, and computes
nothing twice.
"""

import functools

import jax
import jax.numpy as jnp

from tst_jax.kernels import dispatch
from tst_jax.kernels.bag_mean import owned, reduce_table, sum_slots
from tst_jax.kernels.dispatch import Kernels
from tst_jax.kernels.scatter import scatter_slots

OBJECTIVES = ("mce", "mass")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def cross_entropy_sum(
    head_VxD,
    hidden_BxLxD,
    targets_BxLxS,
    slots_BxLxS,
    objective="mce",
    chunk=1024,
    kernels=Kernels(),
):
    """The loss summed over all positions, in nats (rules 8, 9, 12).

    On a mesh, each device of a vocabulary axis multiplies with the rows of the head that it holds:
    a maximum and one all-reduce of two scalars a position make the logsumexp and the positive term
    whole, and one all-reduce of float32 hidden gradients ends the backward. The head's gradient is
    reduced once, not once a chunk.

    Args:
      head_VxD: float [V, D]; cast to hidden's dtype for the matmuls.
      hidden_BxLxD: float32, bfloat16 or float16 [B, L, D].
      targets_BxLxS: int [B, L, S], ids in [0, V).
      slots_BxLxS: float32 [B, L, S], w_i m_i: 0 for a target that does not count.
      objective: one of OBJECTIVES.
      chunk: positions whose float32 logits exist at a time (XLA path).
      kernels: see `Kernels`.
    Returns:
      float32 scalar. Gradients: of head (accumulated in float32, then in its dtype) and hidden.
    """
    run = _on_mesh(objective, chunk, kernels, gradients=False)
    return run(head_VxD, hidden_BxLxD, targets_BxLxS, slots_BxLxS)


def _forward(head_VxD, hidden, targets, slots, objective, chunk, kernels):
    loss, d_head, d_hidden = _on_mesh(objective, chunk, kernels, gradients=True)(
        head_VxD, hidden, targets, slots
    )
    return loss, (d_head, d_hidden)


def _backward(objective, chunk, kernels, gradients, cotangent):
    scale = lambda g: (g.astype(jnp.float32) * cotangent).astype(g.dtype)
    return *map(scale, gradients), None, None


cross_entropy_sum.defvjp(_forward, _backward)


def _on_mesh(objective, chunk, kernels: Kernels, gradients: bool):
    """(head, hidden, targets, slots) -> loss, or (loss, d_head, d_hidden), on whole arrays."""

    def local(head_VxD, hidden, targets, slots):
        dtype, shape = head_VxD.dtype, hidden.shape
        # Cast before the gather: half the bytes in bfloat16.
        head_VxD = jnp.asarray(head_VxD, hidden.dtype)
        if kernels.width:
            head_VxD = jax.lax.all_gather(head_VxD, kernels.width, axis=1, tiled=True)
        totals = slots.sum(-1) if objective == "mce" else (slots > 0).any(-1).astype(jnp.float32)
        targets, slots = owned(targets, slots, head_VxD.shape[0], kernels.vocab)
        if kernels.mesh is not None:  # one device's positions: rows need not stay apart
            hidden, targets, slots = (
                x.reshape(1, -1, x.shape[-1]) for x in (hidden, targets, slots)
            )
            totals = totals.reshape(1, -1)
        how = (objective, kernels.vocab, gradients, chunk)
        tpu, xla = (functools.partial(path, how) for path in (_tpu, _xla))
        paths = tpu, lambda arch: functools.partial(_gpu, how, arch), xla
        arrays = head_VxD, hidden, targets, slots, totals
        measured = hidden.dtype == jnp.bfloat16
        found = dispatch.run("cross_entropy", kernels, *paths, *arrays, as_measured=measured)
        loss = jax.lax.psum(found[0], kernels.batch) if kernels.batch else found[0]
        if not gradients:
            return loss
        _, d_head, d_hidden = found
        if kernels.vocab:
            d_hidden = jax.lax.psum(d_hidden, kernels.vocab)
        d_hidden = d_hidden.reshape(shape).astype(hidden.dtype)
        return loss, reduce_table(d_head, kernels).astype(dtype), d_hidden

    rows, whole = kernels.rows, jax.sharding.PartitionSpec()
    outputs = (whole, kernels.table, rows) if gradients else whole
    return kernels.shard(local, (kernels.table, rows, rows, rows), outputs)


# --- What all paths share: the bag of a position ------------------------------------------------


def _flat(x):  # [B, L, X] -> [N, X]
    return x.reshape(-1, x.shape[-1])


def _d_hidden_dtype(hidden, axes):
    """What other devices have yet to add stays in float32."""
    return jnp.float32 if axes else hidden.dtype


def _bag(head_VxD, targets_NxS, weights_NxS):
    """sum_i w_i E[y_i], float32 [N, D]."""
    rows = lambda ids, w: w[:, None] * head_VxD[ids].astype(jnp.float32)
    return sum_slots(rows, targets_NxS, weights_NxS)


def _combine(peak_N, norm_N, head_VxD, hidden_NxD, targets, slots, totals_N, objective, axes):
    """The loss of each position, whole over the vocabulary, from one device's part of it.

    Args:
      peak_N, norm_N: of the logits held here: logsumexp = peak + log(norm).
      slots: [N, S], w_i m_i, 0 for a target that another device holds.
      totals_N: c of this module's docstring.
    Returns:
      (loss_N, peak_N, norm_N, bag_NxD, q_NxS): peak and norm of all logits, and the bag's share of
      the gradient.
    """
    hidden32 = hidden_NxD.astype(jnp.float32)
    sum_over = lambda *x: jax.lax.psum(jnp.stack(x), axes) if axes else x
    max_over = lambda *x: jax.lax.pmax(jnp.stack(x), axes) if axes else x
    if objective == "mce":
        bag = _bag(head_VxD, targets, slots)
        (top,) = max_over(peak_N)
        norm, positive = sum_over(norm_N * jnp.exp(peak_N - top), (hidden32 * bag).sum(-1))
        loss = totals_N * (jnp.log(norm) + top) - positive
        return loss, top, norm, bag, slots
    pick = lambda ids: (hidden32 * head_VxD[ids].astype(jnp.float32)).sum(-1)
    picked = jax.lax.map(pick, targets.T).T
    # A slot that does not count may hold the largest logit: it must neither count nor overflow.
    picked = jnp.where(slots > 0, picked, -1e30)
    top, bag_top = max_over(peak_N, picked.max(-1))
    shares = jnp.where(slots > 0, slots * jnp.exp(picked - bag_top[:, None]), 0)
    norm, bag_norm = sum_over(norm_N * jnp.exp(peak_N - top), shares.sum(-1))
    bag_norm = jnp.where(totals_N > 0, bag_norm, 1)  # an empty bag: a finite loss, times 0
    loss = totals_N * (jnp.log(norm) + top - jnp.log(bag_norm) - bag_top)
    q = shares / bag_norm[:, None]
    return loss, top, norm, _bag(head_VxD, targets, q), q


def _scatter(d_head_VxD, hidden_NxD, targets_NxS, q_NxS):
    """Subtracts q_i h from row y_i. Add, never set: a bag is a multiset (rule 8)."""
    hidden32 = hidden_NxD.astype(jnp.float32)
    return scatter_slots(d_head_VxD, lambda q_N: -q_N[:, None] * hidden32, targets_NxS, q_NxS)


# --- XLA: a chunk of positions at a time --------------------------------------------------------


def logits(hidden_NxD, head_VxD):
    """float32 [N, V]."""
    return jnp.einsum("nd,vd->nv", hidden_NxD, head_VxD, preferred_element_type=jnp.float32)


def split(arrays, chunk: int):
    """[B, L, X] each -> [chunks, N, X]: about `chunk` positions, at least one of each row.

    Chunks run along the positions of a row and hold every row, so that a batch sharded by rows
    stays where it is. The last one is filled up with zeros: positions that count nothing.
    """
    rows, positions, _ = arrays[0].shape
    width = min(positions, max(1, chunk // rows))

    def one(x):
        x = jnp.pad(x, ((0, 0), (0, -positions % width), (0, 0)))
        x = jnp.moveaxis(x.reshape(rows, -1, width, x.shape[-1]), 1, 0)
        return x.reshape(-1, rows * width, x.shape[-1])

    return tuple(map(one, arrays))


def _join(x, rows, positions):
    """What `split` took apart, back in [B, L, X]."""
    x = jnp.moveaxis(x.reshape(x.shape[0], rows, -1, x.shape[-1]), 0, 1)
    return x.reshape(rows, -1, x.shape[-1])[:, :positions]


def _softmax_gradients(e_NxV, hidden_NxD, head_VxD, scale_N, fill=0):
    """What scale e, with e = exp(z - peak), passes on to hidden and head, both float32.

    What is scaled is not e, which is as large as the logits, but what comes out and goes in.
    """
    dtype, scale_Nx1 = hidden_NxD.dtype, scale_N[:, None]
    e_NxV = jnp.pad(e_NxV.astype(dtype), ((0, 0), (0, fill)))
    filled = jnp.pad(head_VxD, ((0, fill), (0, 0)))
    d_hidden = scale_Nx1 * jnp.dot(e_NxV, filled, preferred_element_type=jnp.float32)
    scaled = (scale_Nx1 * hidden_NxD).astype(dtype)
    d_head = jnp.einsum("nv,nd->vd", e_NxV, scaled, preferred_element_type=jnp.float32)
    return d_hidden, d_head[: head_VxD.shape[0]]


# Rows of logits that lie a multiple of 4,096 bytes apart share few lines of a CPU's caches, and
# p^T @ hidden, which walks down their columns, takes up to twice as long.
_APART, _FILL = 1024, 16


def _xla(how, *arrays):
    plain = functools.partial(_by_chunks, how)
    if arrays[0].shape[0] % _APART:
        return plain(*arrays)
    filled = functools.partial(_by_chunks, how, fill=_FILL)
    return jax.lax.platform_dependent(*arrays, cpu=filled, default=plain)


def _by_chunks(how, head_VxD, hidden, targets, slots, totals, fill=0):
    """With `fill`, rows of the logits' gradient are so many zeros longer.

    It cannot lie where the logits are then, so that a chunk has half as many positions.
    """
    objective, axes, gradients, chunk = how
    chunk = max(1, chunk // 2) if fill and gradients else chunk

    def body(d_head, arrays):
        h, y, w, c = arrays
        c = c[:, 0]
        z_NxV = logits(h, head_VxD)
        peak = z_NxV.max(-1)
        e_NxV = jnp.exp(z_NxV - peak[:, None])
        norm = e_NxV.sum(-1)
        loss, top, norm, bag, q = _combine(peak, norm, head_VxD, h, y, w, c, objective, axes)
        if not gradients:
            return d_head, (loss.sum(),)
        scale = c * jnp.exp(peak - top) / norm
        d_h, d_head_part = _softmax_gradients(e_NxV, h, head_VxD, scale, fill)
        d_h = (d_h - bag).astype(_d_hidden_dtype(h, axes))
        return d_head + d_head_part, (loss.sum(), d_h, q)

    start = jnp.zeros(head_VxD.shape, jnp.float32) if gradients else None
    arrays = split((hidden, targets, slots, totals[..., None]), chunk)
    d_head, (loss, *rows) = jax.lax.scan(body, start, arrays)
    if not gradients:
        return (loss.sum(),)
    d_hidden, q = (_join(x, *hidden.shape[:2]) for x in rows)
    # Once, not once a chunk: a TPU's matmul and its scatter want the table laid out differently.
    return loss.sum(), _scatter(d_head, *map(_flat, (hidden, targets, q))), d_hidden


# --- Pallas: the logits never leave the chip ----------------------------------------------------


def _tpu(how, *arrays, interpret=False):
    """Logsumexp and both gradients in Pallas kernels, which compute the logits three times."""
    from tst_jax.kernels import logsumexp_tpu  # imports Pallas, which takes 0.2 s

    call = lambda kernel: functools.partial(kernel, interpret=interpret)
    kernels = call(logsumexp_tpu.logsumexp), call(logsumexp_tpu.softmax_gradients)
    return _fused(how, *kernels, *arrays)


def _gpu(how, arch, *arrays):
    """Logsumexp in a Pallas kernel; the gradients compute the logits again, a chunk at a time."""
    from tst_jax.kernels import logsumexp_gpu  # imports Pallas, see above

    chunk = how[-1]

    def softmax_gradients(hidden_NxD, head_VxD, logsumexp_N, scale_N):
        def body(d_head, arrays):
            h, logsumexp, scale = arrays
            p_NxV = jnp.exp(logits(h, head_VxD) - logsumexp)
            found = _softmax_gradients(p_NxV, h, head_VxD, scale[:, 0])
            return d_head + found[1], found[0]

        arrays = hidden_NxD[None], logsumexp_N[None, :, None], scale_N[None, :, None]
        start = jnp.zeros(head_VxD.shape, jnp.float32)
        d_head, d_hidden = jax.lax.scan(body, start, split(arrays, chunk))
        return _join(d_hidden, 1, hidden_NxD.shape[0])[0], d_head

    logsumexp = functools.partial(logsumexp_gpu.logsumexp, arch=arch)
    return _fused(how, logsumexp, softmax_gradients, *arrays)


def _fused(how, logsumexp, softmax_gradients, head_VxD, hidden, targets, slots, totals):
    objective, axes, gradients, _ = how
    h, y, w, c = _flat(hidden), _flat(targets), _flat(slots), totals.reshape(-1)
    peak = logsumexp(h, head_VxD)
    norm = jnp.ones_like(peak)
    loss, peak, norm, bag, q = _combine(peak, norm, head_VxD, h, y, w, c, objective, axes)
    if not gradients:
        return (loss.sum(),)
    d_h, d_head = softmax_gradients(h, head_VxD, peak + jnp.log(norm), c)
    d_hidden = (d_h - bag).reshape(hidden.shape).astype(_d_hidden_dtype(h, axes))
    return loss.sum(), _scatter(d_head, h, y, q), d_hidden
