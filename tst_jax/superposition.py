"""Token superposition: bags of tokens in, bags of tokens out (arXiv 2605.06546, sections 3.1, 3.2).

This file is the method, complete and alone. It needs jax and numpy, takes and returns arrays, and
can be called from any trainer:

    inputs_BxLxS, targets_BxLxS = split_rows(tokens_BxT, bag_size)
    hidden_BxLxD = embed_bags(table_VxD, inputs_BxLxS)           # then your transformer's layers
    loss_sum, weight_sum = bag_loss(hidden_BxLxD, head_VxD, targets_BxLxS)
    loss = loss_sum / weight_sum

With `bag_size = 1` each of the three is its ordinary next-token counterpart, to the bit (`loss_sum`
and its gradients are; dividing them by `weight_sum` rounds once more). The letters of the shapes
are listed in `tst_jax/__init__.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

MODES = ("full", "input", "output")
OBJECTIVES = ("mce", "mass", "bce", "hinge")
WEIGHTS = ("uniform", "power", "exponential", "first", "fitted")


# --- Rows and bags -----------------------------------------------------------------------------


def row_tokens(positions: int, bag_size: int, mode: str = "full") -> int:
    """Tokens that a row of `positions` positions reads, its last target included (rule 1)."""
    _check_row(positions, bag_size, mode)
    return positions + bag_size if mode == "output" else (positions + 1) * bag_size


def row_stride(positions: int, bag_size: int, mode: str = "full") -> int:
    """Tokens from the start of a row to the start of the next: what a row uses up (rule 1)."""
    _check_row(positions, bag_size, mode)
    return positions if mode == "output" else positions * bag_size


def _check_row(positions, bag_size, mode):
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; choose one of {', '.join(MODES)}")
    if positions < 1 or bag_size < 1:
        raise ValueError(f"{positions} positions of bags of {bag_size}; each must be at least 1")


def split_rows(tokens_BxT, bag_size: int, mode: str = "full"):
    """Rows of contiguous tokens -> what each position reads, and what it has to predict (rule 1).

    A position reads bag j and predicts bag j + 1: no target is visible to its own input. Works on
    a mask of the same shape too.

    Args:
      tokens_BxT: [B, T], any dtype, T = `row_tokens(L, bag_size, mode)`.
      bag_size: s >= 1.
      mode: `full`; `input`: the target is only the first token of the next bag; `output`: one
        token in, and the s tokens after it out, so that bags overlap (rule 12).
    Returns:
      inputs [B, L, S] and targets [B, L, S]; S is 1 where the mode says one token.
    Raises:
      ValueError: the row is no whole number of bags, or too short for one position.
    """
    _check_row(1, bag_size, mode)
    rows, tokens = tokens_BxT.shape
    if mode == "output":
        positions = tokens - bag_size
        if positions < 1:
            raise ValueError(
                f"a row of {tokens} tokens has no position with {bag_size} targets; "
                f"give positions + {bag_size} tokens"
            )
        window = np.arange(positions)[:, None] + np.arange(1, bag_size + 1)
        return tokens_BxT[:, :positions, None], tokens_BxT[:, window]
    if tokens % bag_size or tokens < 2 * bag_size:
        raise ValueError(
            f"a row of {tokens} tokens is not two or more whole bags of {bag_size}; "
            f"give (positions + 1) * {bag_size} tokens"
        )
    bags = tokens_BxT.reshape(rows, tokens // bag_size, bag_size)
    inputs, targets = bags[:, :-1], bags[:, 1:]
    return inputs, targets[..., :1] if mode == "input" else targets


# --- Input: the bag mean -----------------------------------------------------------------------


def embed_bags(table_VxD, tokens_BxLxS, mask_BxLxS=None, dtype=None):
    """Mean of the embeddings of a bag's tokens (section 3.1, rules 5 and 6).

    Summed in float32, divided by the number of valid tokens, then cast. A bag without a valid token
    gives zero. Any scaling or norm of your architecture's embedding comes after this.

    Args:
      table_VxD: embedding table, float.
      tokens_BxLxS: int ids in [0, V); any leading dimensions.
      mask_BxLxS: bool, False for a pad; None means that all are valid. Ids of pads are not read.
      dtype: of the result; None keeps the table's.
    Returns:
      [B, L, D].
    """
    mask_BxLxS = _checked_mask(mask_BxLxS, tokens_BxLxS)
    mean = _bag_sum(table_VxD, jnp.where(mask_BxLxS, tokens_BxLxS, 0), mask_BxLxS)
    if tokens_BxLxS.shape[-1] > 1:
        mean = mean / jnp.maximum(mask_BxLxS.sum(-1, keepdims=True), 1)
    return mean.astype(dtype or table_VxD.dtype)


def _checked_mask(mask, tokens):
    if mask is None:
        return jnp.ones(tokens.shape, bool)
    if mask.shape != tokens.shape:
        raise ValueError(f"mask {mask.shape} for tokens {tokens.shape}; give one value a token")
    return mask.astype(bool)


@jax.custom_vjp
def _bag_sum(table_VxD, tokens, mask):
    """Sum of a bag's valid rows in float32, a slot at a time: no [B, L, S, D] array."""

    def slot(i):
        return jnp.where(mask[..., i, None], table_VxD[tokens[..., i]].astype(jnp.float32), 0)

    total = slot(0)
    for i in range(1, tokens.shape[-1]):
        total = total + slot(i)
    return total


def _bag_sum_forward(table_VxD, tokens, mask):
    # An array of no elements carries the table's shape and dtype to the backward pass.
    return _bag_sum(table_VxD, tokens, mask), (table_VxD[:, :0], tokens, mask)


def _bag_sum_backward(residuals, d_total):
    like, tokens, mask = residuals
    d_table = jnp.zeros((like.shape[0], d_total.shape[-1]), jnp.float32)
    for i in range(tokens.shape[-1]):  # one accumulator for all slots, so memory is free of s
        d_table = d_table.at[tokens[..., i]].add(jnp.where(mask[..., i, None], d_total, 0))
    return d_table.astype(like.dtype), None, None


_bag_sum.defvjp(_bag_sum_forward, _bag_sum_backward)


# --- Output: multi-hot cross-entropy and its variants ------------------------------------------


def slot_weights(kind: str, bag_size: int, fitted=(3.63, 1.35, -1.25)) -> np.ndarray:
    """Weights w_1 .. w_s of a target bag's slots, float32 [S], summing to 1 (Appendix D, rule 12).

    `uniform`; `power` 1/i; `exponential` e^-i; `first` (slot 1 only); `fitted` C0 + a * i^k, the
    decay of mutual information between tokens i apart, with the paper's constants for DCLM as
    defaults (C0, a, k).
    """
    i = np.arange(1, bag_size + 1, dtype=np.float64)
    offset, scale, exponent = fitted
    shapes = {
        "uniform": lambda: np.ones_like(i),
        "power": lambda: 1 / i,
        "exponential": lambda: np.exp(-i),
        "first": lambda: (i == 1).astype(np.float64),
        "fitted": lambda: offset + scale * i**exponent,
    }
    if kind not in shapes:
        raise ValueError(f"slot weights are {kind!r}; choose one of {', '.join(WEIGHTS)}")
    weights = shapes[kind]()
    return (weights / weights.sum()).astype(np.float32)


def bag_loss(
    hidden_BxLxD,
    head_VxD,
    targets_BxLxS,
    mask_BxLxS=None,
    *,
    weights_S=None,
    objective: str = "mce",
    chunk: int = 1024,
):
    """Loss of predicting each position's target bag, as a numerator and a denominator (rule 8).

    Sum both over hosts and micro-batches before the one division. Logits are computed in float32
    for `chunk` positions at a time and never exist for the whole batch (rule 9).

    Objectives, per position with logits z, bag y_1 .. y_s, slot weights w_i and validity m_i (0 too
    where w_i is 0, so that with weights `first` each of them is its own loss of s = 1):
      mce    sum_i w_i m_i (logsumexp(z) - z[y_i]); a token that occurs twice counts twice.
      mass   -log of the bag's total probability (MCEAlt, Appendix C.2). Here and in bce a token
             counts once, at its first valid slot, with weight w_i / max(w).
      bce    sum over the vocabulary of binary cross-entropies against the multi-hot bag.
      hinge  sum_i w_i m_i max(0, 1 + max of z outside the bag - z[y_i]).
    The denominator is sum_i w_i m_i (mce, hinge) or 1 (mass, bce) for a position with a valid
    target, and 0 for one without.

    Args:
      hidden_BxLxD: float [B, L, D], after the final norm; or [N, D].
      head_VxD: output head, one row an entry; cast to hidden's dtype for the matmuls, its gradient
        is accumulated in float32.
      targets_BxLxS: int ids in [0, V), one leading shape with hidden. Masked ones are not read.
      mask_BxLxS: bool, False for a target that does not count; None means that all count.
      weights_S: float [S], e.g. from `slot_weights`; None is uniform.
      objective: one of OBJECTIVES.
      chunk: positions at a time, over all rows; at least one of each row.
    Returns:
      (loss_sum, weight_sum), float32 scalars; loss_sum in nats.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    bag_size = targets_BxLxS.shape[-1]
    if hidden_BxLxD.ndim not in (2, 3) or hidden_BxLxD.shape[:-1] != targets_BxLxS.shape[:-1]:
        raise ValueError(
            f"hidden {hidden_BxLxD.shape} and targets {targets_BxLxS.shape}; "
            "give [B, L, D] and [B, L, S], or [N, D] and [N, S]"
        )
    weights = np.full(bag_size, 1 / bag_size) if weights_S is None else weights_S
    weights = jnp.asarray(weights, jnp.float32)
    if weights.shape != (bag_size,):
        raise ValueError(f"{weights.shape} slot weights for bags of {bag_size}; give one a slot")
    mask_BxLxS = _checked_mask(mask_BxLxS, targets_BxLxS)
    targets_BxLxS = jnp.where(mask_BxLxS, targets_BxLxS, 0)
    if objective in ("mass", "bce"):
        mask_BxLxS = mask_BxLxS & ~_repeats(targets_BxLxS, mask_BxLxS)
        weights = weights / weights.max()
    slots_BxLxS = jnp.where(mask_BxLxS, weights, 0)  # w_i m_i

    # Chunks run along the positions of a row and hold every row, so that a batch sharded by rows
    # stays where it is. The last chunk is filled up with positions that count nothing.
    as_rows = (lambda x: x) if hidden_BxLxD.ndim == 3 else (lambda x: x[None])
    arrays = [as_rows(x) for x in (hidden_BxLxD, targets_BxLxS, slots_BxLxS)]
    rows, positions, _ = arrays[0].shape
    width = min(positions, max(1, chunk // rows))
    fill = -positions % width

    def split(x):  # [B, L, X] -> [chunks, B, width, X]
        x = jnp.pad(x, ((0, 0), (0, fill), (0, 0)))
        return jnp.moveaxis(x.reshape(rows, -1, width, x.shape[-1]), 1, 0)

    chunks = tuple(split(x) for x in arrays)
    if objective == "mce":
        loss_sum = _mce_sum(head_VxD, *chunks)
    else:
        loss_sum = _objective_sum(_POSITION_LOSS[objective], head_VxD, *chunks)
    if objective in ("mce", "hinge"):
        return loss_sum, slots_BxLxS.sum()
    return loss_sum, (slots_BxLxS > 0).any(-1).sum().astype(jnp.float32)


def _logits(hidden_NxD, head_VxD):
    return jax.lax.dot_general(
        hidden_NxD, head_VxD, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _flat(x):  # [B, width, X] -> [N, X]
    return x.reshape(-1, x.shape[-1])


def _mce_terms(hidden_NxD, head_VxD, targets_NxS, slots_NxS):
    """One chunk: the loss summed, and the parts that its gradient is made of."""
    z_NxV = _logits(hidden_NxD, head_VxD)
    peak_Nx1 = z_NxV.max(-1, keepdims=True)
    exp_NxV = jnp.exp(z_NxV - peak_Nx1)
    norm_Nx1 = exp_NxV.sum(-1, keepdims=True)
    logsumexp_N = (jnp.log(norm_Nx1) + peak_Nx1)[:, 0]  # one for all s targets (rule 9)
    positive_N = (jnp.take_along_axis(z_NxV, targets_NxS, axis=1) * slots_NxS).sum(-1)
    weight_N = slots_NxS.sum(-1)
    return (logsumexp_N * weight_N - positive_N).sum(), exp_NxV, norm_Nx1, weight_N[:, None]


@jax.custom_vjp
def _mce_sum(head_VxD, hidden, targets, slots):
    """Sum of the MCE over chunks [C, B, width, X]: no gradient wanted, none computed."""
    head = head_VxD.astype(hidden.dtype)

    def body(total, chunk):
        h, y, w = (_flat(x) for x in chunk)
        return total + _mce_terms(h, head, y, w)[0], None

    return jax.lax.scan(body, jnp.float32(0), (hidden, targets, slots))[0]


def _mce_forward(head_VxD, hidden, targets, slots):
    """Value and gradients in one pass: three matmuls, and nothing recomputed for the backward.

    The loss is a scalar, so its gradients need only be scaled by the cotangent later on. With one
    chunk every operation is the one that differentiating logsumexp(z) - z[y] would run, which
    makes s = 1 equal to ordinary cross-entropy bit for bit (rule 10).
    """
    head = head_VxD.astype(hidden.dtype)

    def body(d_head, chunk):
        h, y, w = (_flat(x) for x in chunk)
        loss, exp_NxV, norm_Nx1, weight_Nx1 = _mce_terms(h, head, y, w)
        rows = jnp.arange(h.shape[0])[:, None]
        d_z = (exp_NxV * (weight_Nx1 / norm_Nx1)).at[rows, y].add(-w)  # add: a bag is a multiset
        d_z = d_z.astype(head.dtype)
        d_h = jnp.dot(d_z, head, preferred_element_type=jnp.float32).astype(h.dtype)
        d_head_part = jax.lax.dot_general(
            d_z, h, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return d_head + d_head_part, (loss, d_h.reshape(chunk[0].shape))

    start = jnp.zeros(head_VxD.shape, jnp.float32)
    d_head, (loss, d_hidden) = jax.lax.scan(body, start, (hidden, targets, slots))
    return loss.sum(), (d_head.astype(head_VxD.dtype), d_hidden)


def _mce_backward(gradients, cotangent):
    d_head, d_hidden = gradients
    scale = lambda g: (g.astype(jnp.float32) * cotangent).astype(g.dtype)
    return scale(d_head), scale(d_hidden), None, None


_mce_sum.defvjp(_mce_forward, _mce_backward)


def _repeats(targets, mask):
    """bool [..., S]: True where an earlier valid slot of the bag holds the same token."""
    same = (targets[..., :, None] == targets[..., None, :]) & mask[..., None, :]
    return (same & np.tri(targets.shape[-1], k=-1, dtype=bool)).any(-1)


def _mass(z_NxV, targets_NxS, slots_NxS):
    counts = (slots_NxS > 0).any(-1)
    picked = jnp.take_along_axis(z_NxV, targets_NxS, axis=1)
    log_slots = jnp.log(jnp.where(slots_NxS > 0, slots_NxS, 1))
    weighted = jnp.where(slots_NxS > 0, picked + log_slots, -jnp.inf)
    weighted = jnp.where(counts[:, None], weighted, 0)  # an empty bag keeps a finite gradient
    return counts * (jax.nn.logsumexp(z_NxV, axis=-1) - jax.nn.logsumexp(weighted, axis=-1))


def _bce(z_NxV, targets_NxS, slots_NxS):
    counts = (slots_NxS > 0).any(-1)
    positive = (jnp.take_along_axis(z_NxV, targets_NxS, axis=1) * slots_NxS).sum(-1)
    return counts * (jax.nn.softplus(z_NxV).sum(-1) - positive)


def _hinge(z_NxV, targets_NxS, slots_NxS):
    rows = jnp.arange(z_NxV.shape[0])[:, None]
    columns = jnp.where(slots_NxS > 0, targets_NxS, z_NxV.shape[1])  # V: dropped by the scatter
    rival_N = z_NxV.at[rows, columns].set(-jnp.inf, mode="drop").max(-1)
    margins = 1 + rival_N[:, None] - jnp.take_along_axis(z_NxV, targets_NxS, axis=1)
    return (slots_NxS * jnp.maximum(margins, 0)).sum(-1)


_POSITION_LOSS = {"mass": _mass, "bce": _bce, "hinge": _hinge}


def _objective_sum(position_loss, head_VxD, hidden, targets, slots):
    """Sum over chunks of an objective that has no hand-written gradient; logits are recomputed."""
    head = head_VxD.astype(hidden.dtype)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(total, chunk):
        h, y, w = (_flat(x) for x in chunk)
        return total + position_loss(_logits(h, head), y, w).sum(), None

    return jax.lax.scan(body, jnp.float32(0), (hidden, targets, slots))[0]
