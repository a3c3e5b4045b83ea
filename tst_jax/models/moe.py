"""A dropless mixture of SwiGLU experts: every position reaches all the experts that it chose.

Two more letters than in `tst_jax/__init__.py`: C for the choices of a position, and R for the rows
of a buffer that holds one row a (position, choice) pair, sorted by expert. Experts multiply their
stretches of the buffer (`grouped_matmul.py`): no capacity, no dropped pair, no [N, E, C] array.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from tst_jax import sharding
from tst_jax.models.grouped_matmul import grouped_matmul, grouped_weight_gradient
from tst_jax.models.linear import MATMUL


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """What the router did, summed over the whole batch: numerators, so that they add up."""

    balance: jax.Array  # float32 scalar; over the number of valid positions: the balance loss
    load_E: jax.Array  # float32: valid (position, choice) pairs of each expert; no gradient


def mix_experts(
    x_BxLxD,
    router_DxE,
    gate_ExDxF,
    up_ExDxF,
    down_ExFxD,
    experts_per_token: int,
    mask_BxL=None,
    mesh: Mesh | None = None,
):
    """sum_c w_c down_c(silu(gate_c x) * up_c x) over a position's C best experts c.

    As in Qwen3-MoE (arXiv 2505.09388): softmax over all experts, the C largest probabilities,
    scaled to sum to 1. Equal probabilities go to the lower expert. The router computes in float32
    whatever x's dtype, the experts in x's dtype, and choices are summed in float32.

    The balance loss of a row of n valid positions is E sum_e f_e P_e: f_e the share of its n C
    choices that went to e (no gradient), P_e the mean probability of e. It is 1 when balanced, and
    E / C if all choose the same C experts with certainty. `Routing.balance` sums n times that.
    A row stands for itself, as in DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20), so rows add
    up to one number however they are split over devices and micro-batches. The loss of Switch
    Transformer (arXiv 2101.03961) does not: it multiplies two means over the batch, and the product
    of means over a whole batch is not the mean of the products over its parts.

    On a mesh, rows lie over the batch axes and weights as `sharding.RULES` says: gathered over fsdp
    in x's dtype, again in the backward pass, their gradients reduced in float32.

    Args:
      x_BxLxD: float32 or bfloat16.
      router_DxE, gate_ExDxF, up_ExDxF, down_ExFxD: float; cast for use, gradients in their dtypes.
      experts_per_token: C, at least 1 and at most E.
      mask_BxL: bool, True for a valid position. Others count nothing in Routing; their y is any.
      mesh: the mesh of the arrays; None: one device.
    Returns:
      (y_BxLxD in x's dtype, Routing), Routing on every device.
    Raises:
      ValueError: C out of range, or an axis that does not divide by its mesh axes.
    """
    experts = router_DxE.shape[1]
    if not 1 <= experts_per_token <= experts:
        raise ValueError(f"{experts_per_token} experts a token of {experts}; choose 1 to {experts}")
    if mask_BxL is None:
        mask_BxL = jnp.ones(x_BxLxD.shape[:2], bool)
    axes = {name: sharding.axes(mesh, name) for name in sharding.RULES}
    run = functools.partial(_on_device, experts_per_token, axes)
    if mesh is not None:
        spec = lambda *names: PartitionSpec(*(axes[name] or None for name in names))
        rows, router = spec("batch"), spec("embed", "choices")
        widen, narrow = spec("experts", "embed", "mlp"), spec("experts", "mlp", "embed")
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(rows, router, widen, widen, narrow, rows),
            out_specs=(rows, PartitionSpec()),
            check_vma=False,  # it refuses the TPU kernel of grouped_matmul.py
        )
    return run(x_BxLxD, router_DxE, gate_ExDxF, up_ExDxF, down_ExFxD, mask_BxL)


def _on_device(choices, axes, x_BxLxD, router_DxE, gate_ExDxF, up_ExDxF, down_ExFxD, mask_BxL):
    """`mix_experts` with one device's parts of the arrays; `axes`: of the mesh, by logical name."""
    if axes["embed"]:
        router_DxE = jax.lax.all_gather(router_DxE, axes["embed"], axis=0, tiled=True)
    probability_BxLxE, weight_BxLxC, expert_BxLxC = _route(x_BxLxD, router_DxE, choices)
    routing = _account(probability_BxLxE, expert_BxLxC, mask_BxL, axes["batch"])

    flat = lambda x: x.reshape(-1, x.shape[-1])
    places, pairs, sizes_E = _plan(flat(expert_BxLxC), gate_ExDxF.shape[0], axes)
    x_RxD = _spread(flat(x_BxLxD), places)
    weight_Rx1 = _spread(weight_BxLxC.reshape(-1, 1), pairs)
    gate_RxF = _grouped_dot(x_RxD, gate_ExDxF, sizes_E, axes["embed"], 1)
    up_RxF = _grouped_dot(x_RxD, up_ExDxF, sizes_E, axes["embed"], 1)
    # Weighting here is weighting what comes out, which is wider and need not be kept for it.
    swiglu = jax.nn.silu(gate_RxF.astype(jnp.float32)) * up_RxF.astype(jnp.float32)
    hidden_RxF = (swiglu * weight_Rx1).astype(x_RxD.dtype)
    y_RxD = _grouped_dot(hidden_RxF, down_ExFxD, sizes_E, axes["embed"], 2)
    return _collect(y_RxD, places).reshape(x_BxLxD.shape), routing


def _route(x_BxLxD, router_DxE, choices):
    """Probabilities of all experts, and weights and numbers of the chosen ones."""
    x32, router32 = x_BxLxD.astype(jnp.float32), router_DxE.astype(jnp.float32)
    logits_BxLxE = jnp.dot(x32, router32, precision=jax.lax.Precision.HIGHEST)
    probability_BxLxE = jax.nn.softmax(logits_BxLxE, axis=-1)
    top_BxLxC, expert_BxLxC = jax.lax.top_k(probability_BxLxE, choices)
    return probability_BxLxE, top_BxLxC / top_BxLxC.sum(-1, keepdims=True), expert_BxLxC


def _account(probability_BxLxE, expert_BxLxC, mask_BxL, axes):
    choices, experts = expert_BxLxC.shape[-1], probability_BxLxE.shape[-1]
    chosen_BxLxE = (expert_BxLxC[..., None] == jnp.arange(experts)).any(-2)
    load_BxE = (chosen_BxLxE & mask_BxL[..., None]).sum(1).astype(jnp.float32)
    total_BxE = jnp.where(mask_BxL[..., None], probability_BxLxE, 0).sum(1)
    valid_B = jnp.maximum(mask_BxL.sum(1), 1)  # nothing is divided by 0, not in gradients either
    balance = (experts / choices * (load_BxE * total_BxE).sum(1) / valid_B).sum()
    balance, load_E = jax.lax.psum((balance, load_BxE.sum(0)), axes)
    return Routing(balance, load_E)


# --- From positions to rows sorted by expert, and back -------------------------------------------
#
# Over an expert axis, devices gather the rows of all, compute the pairs of their own experts, and
# reduce-scatter the results. With C >= shards, an all-to-all would send most rows to every device
# too, and it would have to drop pairs or hold room for the worst case at each of its ends.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Places:
    """Which entry each row of the buffer comes from, and which rows each entry goes to."""

    entry_R: jax.Array
    row_NxC: jax.Array
    here_NxC: jax.Array  # False for pairs of experts on other devices
    expert: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))
    tensor: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))


def _plan(expert_NxC, own, axes):
    """_Places of positions, those of (position, choice) pairs, and rows of each of `own` experts.

    A position's choices are different experts: min(C, own) rows each suffice at any imbalance.
    """
    if axes["experts"]:
        expert_NxC = jax.lax.all_gather(expert_NxC, axes["experts"], tiled=True)
        expert_NxC = expert_NxC - jax.lax.axis_index(axes["experts"]) * own
    count, choices = expert_NxC.shape
    rows = count * min(choices, own)
    here_NxC = (expert_NxC >= 0) & (expert_NxC < own)
    key = jnp.where(here_NxC, expert_NxC, own).reshape(-1)  # pairs of others: behind all rows
    sizes_E = (key[:, None] == jnp.arange(own)).sum(0, dtype=jnp.int32)
    order = jnp.argsort(key)
    row = jnp.minimum(jnp.argsort(order), rows - 1)
    place = functools.partial(_Places, expert=axes["experts"], tensor=axes["mlp"])
    positions = place(order[:rows] // choices, row.reshape(count, choices), here_NxC)
    pairs = place(order[:rows], row[:, None], here_NxC.reshape(-1, 1))
    return positions, pairs, sizes_E


# Each is the other's transpose. As gathers both ways they add in a fixed order, where the transpose
# that jax would derive is a scatter-add.


@jax.custom_vjp
def _spread(x_NxD, places: _Places):
    """Rows of the buffer; behind those that are needed, any."""
    if places.expert:
        x_NxD = jax.lax.all_gather(x_NxD, places.expert, tiled=True)
    return x_NxD[places.entry_R]


@jax.custom_vjp
def _collect(x_RxD, places: _Places):
    """Sum of an entry's rows, and over devices, in float32, then back in x's dtype."""

    def add(total_NxD, choice):
        row_N, here_N = choice
        return total_NxD + jnp.where(here_N[:, None], x_RxD[row_N].astype(jnp.float32), 0), None

    start = jnp.zeros((places.row_NxC.shape[0], x_RxD.shape[1]), jnp.float32)
    # A choice at a time: over an expert axis most of [N, C, D] would be other devices' pairs.
    total_NxD, _ = jax.lax.scan(add, start, (places.row_NxC.T, places.here_NxC.T))
    if places.expert:
        total_NxD = jax.lax.psum_scatter(total_NxD, places.expert, tiled=True)
    if places.tensor:
        total_NxD = jax.lax.psum(total_NxD, places.tensor)
    return total_NxD.astype(x_RxD.dtype)


def _spread_backward(places, d_x_RxD):
    # shard_map adds up over the tensor axis, after the router's share.
    return _collect(d_x_RxD, dataclasses.replace(places, tensor=())), None


def _collect_backward(places, d_total_NxD):
    if places.tensor:  # psum's transpose is psum; these are copies, which need no communication
        d_total_NxD = d_total_NxD * jax.lax.axis_size(places.tensor)
    return _spread(d_total_NxD, places), None


_spread.defvjp(lambda x, places: (_spread(x, places), places), _spread_backward)
_collect.defvjp(lambda x, places: (_collect(x, places), places), _collect_backward)


# --- Matmuls of stretches of rows with their experts' weights ------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_dot(x_RxD, w_ExDxF, sizes_E, axes, dim):
    """Stretch e of x's rows, sizes_E[e] of them, times w_ExDxF[e]. `w` lies in parts along `dim`
    over the mesh axes `axes`. Rows behind the last stretch give zeros, and get zeros for gradients.
    """
    return grouped_matmul(x_RxD, _whole(w_ExDxF, x_RxD.dtype, axes, dim), sizes_E)


def _whole(w_ExDxF, dtype, axes, dim):
    w_ExDxF = w_ExDxF.astype(dtype)  # before the gather: half the bytes in bfloat16
    return jax.lax.all_gather(w_ExDxF, axes, axis=dim, tiled=True) if axes else w_ExDxF


def _dot_forward(x_RxD, w_ExDxF, sizes_E, axes, dim):
    # The part of w is kept and gathered again: whole weights of all layers would not fit.
    y_RxF = checkpoint_name(_grouped_dot(x_RxD, w_ExDxF, sizes_E, axes, dim), MATMUL)
    return y_RxF, (x_RxD, w_ExDxF, sizes_E)


def _dot_backward(axes, dim, residuals, d_y_RxF):
    x_RxD, w_ExDxF, sizes_E = residuals
    whole = _whole(w_ExDxF, d_y_RxF.dtype, axes, dim)
    d_x_RxD = grouped_matmul(d_y_RxF, whole.swapaxes(1, 2), sizes_E)
    d_w_ExDxF = grouped_weight_gradient(x_RxD, d_y_RxF, sizes_E)
    if axes:
        d_w_ExDxF = jax.lax.psum_scatter(d_w_ExDxF, axes, scatter_dimension=dim, tiled=True)
    return d_x_RxD, d_w_ExDxF.astype(w_ExDxF.dtype), None


_grouped_dot.defvjp(_dot_forward, _dot_backward)
