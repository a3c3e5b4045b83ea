"""Token superposition: bags of tokens in, bags of tokens out (arXiv 2605.06546, sections 3.1, 3.2).

This file is the method, complete; what it computes most is in `kernels/` beside it. Both need only
jax and numpy, take and return arrays, and can be called from any trainer:

    inputs_BxLxS, targets_BxLxS = split_rows(tokens_BxT, bag_size)
    hidden_BxLxD = embed_bags(table_VxD, inputs_BxLxS)           # then your transformer's layers
    loss_sum, weight_sum = bag_loss(hidden_BxLxD, head_VxD, targets_BxLxS)
    loss = loss_sum / weight_sum

With `bag_size = 1` each of the three is its ordinary next-token counterpart: rows and look-up to
the bit, the loss within float32 rounding. The letters of the shapes are listed in
`tst_jax/__init__.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tst_jax.kernels import bag_mean, linear_cross_entropy
from tst_jax.kernels.dispatch import Kernels

MODES = ("full", "input", "output")
OBJECTIVES = ("mce", "mass", "bce", "hinge")
WEIGHTS = ("uniform", "power", "exponential", "first", "fitted")
FITTED = (3.63, 1.35, -1.25)  # C0, a, k of DCLM (Appendix D)


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


def embed_bags(table_VxD, tokens_BxLxS, mask_BxLxS=None, dtype=None, kernels=Kernels()):
    """Mean of the embeddings of a bag's tokens (section 3.1, rules 5 and 6).

    Summed in float32, divided by the number of valid tokens, then cast. A bag without a valid token
    gives zero. Any scaling or norm of your architecture's embedding comes after this.

    Args:
      table_VxD: embedding table, float.
      tokens_BxLxS: int ids in [0, V); any leading dimensions.
      mask_BxLxS: bool, False for a pad; None means that all are valid. Ids of pads are not read.
      dtype: of the result; None keeps the table's.
      kernels: which implementation sums, and how the arrays lie on a mesh; see `Kernels`.
    Returns:
      [B, L, D].
    """
    mask_BxLxS = _checked_mask(mask_BxLxS, tokens_BxLxS)
    tokens_BxLxS = jnp.where(mask_BxLxS, tokens_BxLxS, 0)
    mean = bag_mean.bag_sum(table_VxD, tokens_BxLxS, mask_BxLxS, kernels)
    if tokens_BxLxS.shape[-1] > 1:
        mean = mean / jnp.maximum(mask_BxLxS.sum(-1, keepdims=True), 1)
    return mean.astype(dtype or table_VxD.dtype)


def _checked_mask(mask, tokens):
    if mask is None:
        return jnp.ones(tokens.shape, bool)
    if mask.shape != tokens.shape:
        raise ValueError(f"mask {mask.shape} for tokens {tokens.shape}; give one value a token")
    return mask.astype(bool)


# --- Output: multi-hot cross-entropy and its variants ------------------------------------------


def slot_weights(kind: str, bag_size: int, fitted=FITTED) -> np.ndarray:
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
    kernels: Kernels = Kernels(),
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
      chunk: positions at a time, over all rows; at least one of each row. On a mesh: per device.
      kernels: which implementation runs mce and mass, and how arrays lie on a mesh; see `Kernels`.
    Returns:
      (loss_sum, weight_sum), float32 scalars; loss_sum in nats.
    """
    if hidden_BxLxD.ndim not in (2, 3) or hidden_BxLxD.shape[:-1] != targets_BxLxS.shape[:-1]:
        raise ValueError(
            f"hidden {hidden_BxLxD.shape} and targets {targets_BxLxS.shape}; "
            "give [B, L, D] and [B, L, S], or [N, D] and [N, S]"
        )
    targets_BxLxS, slots_BxLxS = _slots(targets_BxLxS, mask_BxLxS, weights_S, objective)

    shares_logsumexp = objective in linear_cross_entropy.OBJECTIVES
    if hidden_BxLxD.ndim == 2:
        # One row to be cut into chunks; but where a mesh shares out rows, each position is one.
        at = 1 if kernels.mesh is not None and shares_logsumexp else 0
        arrays = [jnp.expand_dims(x, at) for x in (hidden_BxLxD, targets_BxLxS, slots_BxLxS)]
    else:
        arrays = [hidden_BxLxD, targets_BxLxS, slots_BxLxS]
    if shares_logsumexp:
        loss_sum = linear_cross_entropy.cross_entropy_sum(
            head_VxD, *arrays, objective, chunk, kernels
        )
    else:
        loss_sum = _objective_sum(_POSITION_LOSS[objective], head_VxD, *arrays, chunk)
    return loss_sum, _count(slots_BxLxS, objective)


def count_targets(targets_BxLxS, mask_BxLxS=None, *, weights_S=None, objective: str = "mce"):
    """The denominator of `bag_loss` alone, a float32 scalar; arguments as there.

    For who sums gradients of micro-batches: all of them are divided by the sum of their counts.
    """
    return _count(_slots(targets_BxLxS, mask_BxLxS, weights_S, objective)[1], objective)


def _slots(targets_BxLxS, mask_BxLxS, weights_S, objective):
    """Targets without what is not to be read, and the float32 weights w_i m_i of their slots."""
    if objective not in OBJECTIVES:
        raise ValueError(f"objective is {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    bag_size = targets_BxLxS.shape[-1]
    weights = np.full(bag_size, 1 / bag_size) if weights_S is None else weights_S
    weights = jnp.asarray(weights, jnp.float32)
    if weights.shape != (bag_size,):
        raise ValueError(f"{weights.shape} slot weights for bags of {bag_size}; give one a slot")
    mask_BxLxS = _checked_mask(mask_BxLxS, targets_BxLxS)
    targets_BxLxS = jnp.where(mask_BxLxS, targets_BxLxS, 0)
    if objective in ("mass", "bce"):
        mask_BxLxS = mask_BxLxS & ~_repeats(targets_BxLxS, mask_BxLxS)
        weights = weights / weights.max()
    return targets_BxLxS, jnp.where(mask_BxLxS, weights, 0)


def _count(slots_BxLxS, objective):
    if objective in ("mce", "hinge"):
        return slots_BxLxS.sum()
    return (slots_BxLxS > 0).any(-1).sum().astype(jnp.float32)


def _repeats(targets, mask):
    """bool [..., S]: True where an earlier valid slot of the bag holds the same token."""
    same = (targets[..., :, None] == targets[..., None, :]) & mask[..., None, :]
    return (same & np.tri(targets.shape[-1], k=-1, dtype=bool)).any(-1)


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


_POSITION_LOSS = {"bce": _bce, "hinge": _hinge}


def _objective_sum(position_loss, head_VxD, hidden, targets, slots, chunk):
    """Sum of an objective that needs more of the logits than their logsumexp.

    No hand-written gradient: the logits of a chunk are computed again for it.
    """
    head = head_VxD.astype(hidden.dtype)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(total, chunk):
        h, y, w = chunk
        return total + position_loss(linear_cross_entropy.logits(h, head), y, w).sum(), None

    chunks = linear_cross_entropy.split((hidden, targets, slots), chunk)
    return jax.lax.scan(body, jnp.float32(0), chunks)[0]
