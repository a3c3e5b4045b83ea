"""Proves the mixture of experts: against float64, without drops, and the same on every mesh.

The reference computes all experts for all positions, in float64. One process with eight fake CPU
devices runs the layer on several meshes, and prints how far values and gradients are from one
device's.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import report_of
from jax.sharding import NamedSharding, PartitionSpec
from tpu_topology import chips, compile_for

from tst_jax import sharding
from tst_jax.models.moe import mix_experts
from tst_jax.sharding import MeshConfig

B, L, D, E, F = 8, 6, 16, 8, 12
ROUNDING = 3e-6  # of float32, in units of an array's largest entry
NAMES = ("x", "router", "gate", "up", "down")
AXES = dict(
    router=("embed", "choices"),
    gate=("experts", "embed", "mlp"),
    up=("experts", "embed", "mlp"),
    down=("experts", "mlp", "embed"),
)
MESHES = {
    "data": dict(data=8),
    "expert": dict(data=1, expert=8),
    "data, expert": dict(data=2, expert=4),
    "fsdp, tensor, expert": dict(data=1, fsdp=2, tensor=2, expert=2),
    "data, fsdp, tensor": dict(data=2, fsdp=2, tensor=2),
}
ROUTERS = {"free": (), "one device's experts": (0, 1), "one expert": (5,)}


def problem(favoured=(), seed=0):
    """x, weights and mask; every position chooses the `favoured` experts first, in this order."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    x = normal(B, L, D)
    x[..., 0] = 1
    router = normal(D, E) * (0.05 if favoured else 1)
    for place, expert in enumerate(favoured):
        router[0, expert] = 3 - place / 2
    gate, up, down = normal(E, D, F) / 4, normal(E, D, F) / 4, normal(E, F, D) / 4
    mask = rng.random((B, L)) < 0.8
    mask[0] = [True] + [False] * (L - 1)
    mask[1] = False
    return (x, router, gate, up, down), mask


def probes(seed=9):
    return np.random.default_rng(seed).standard_normal((B, L, D)).astype(np.float32)


@functools.cache
def layer(choices, mesh=None):
    """(y, balance, load), and gradients of a loss of all y and the balance, by name."""

    def loss(arrays, mask):
        y, routing = mix_experts(*arrays, choices, mask, mesh)
        return (y * probes()).sum() + 3 * routing.balance, (y, routing.balance, routing.load_E)

    def run(arrays, mask):
        (_, values), gradients = jax.value_and_grad(loss, has_aux=True)(arrays, mask)
        return dict(zip(("y", "balance", "load"), values)) | dict(zip(NAMES, gradients))

    return jax.jit(run, in_shardings=mesh and places(mesh)[:2])


def places(mesh):
    """Shardings of the arrays, of the mask, and of what every device holds whole."""
    place = lambda *names: NamedSharding(mesh, PartitionSpec(*map(sharding.RULES.get, names)))
    return (place("batch"), *(place(*AXES[name]) for name in NAMES[1:])), place("batch"), place()


def reference(arrays, mask, choices):
    """What `layer` finds, all experts of all positions, in float64."""

    def loss(arrays):
        x, router, gate, up, down = arrays
        p = jax.nn.softmax(x @ router)
        rank = jnp.argsort(jnp.argsort(-p, axis=-1), axis=-1)
        chosen = rank < choices
        weight = jnp.where(chosen, p, 0) / jnp.where(chosen, p, 0).sum(-1, keepdims=True)
        hidden = jax.nn.silu(jnp.einsum("bld,edf->blef", x, gate))
        hidden = hidden * jnp.einsum("bld,edf->blef", x, up)
        y = jnp.einsum("blef,efd,ble->bld", hidden, down, weight)
        balance, load = 0.0, jnp.zeros(E)
        for b in range(B):
            valid = np.flatnonzero(mask[b])
            if len(valid):
                f, mean = chosen[b, valid].sum(0) / (len(valid) * choices), p[b, valid].mean(0)
                balance += len(valid) * E * (f * mean).sum()
                load += chosen[b, valid].sum(0)
        return (y * probes()).sum() + 3 * balance, (y, balance, load)

    with jax.enable_x64(True):
        arrays = tuple(np.float64(x) for x in arrays)
        (_, values), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
        values, gradients = jax.tree.map(np.asarray, (values, gradients))
    return dict(zip(("y", "balance", "load"), values)) | dict(zip(NAMES, gradients))


def difference(got, want):
    """The largest, in units of the largest entry."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


def assert_same(got, want, tolerance=ROUNDING):
    assert {
        name: d for name in want if not (d := difference(got[name], want[name])) < tolerance
    } == {}


# ---- in the process with eight devices


def main():
    report = {}
    wanted = {name: jax.device_get(layer(2)(*problem(first))) for name, first in ROUTERS.items()}
    for name, sizes in MESHES.items():
        mesh, report[name] = sharding.make_mesh(MeshConfig(**sizes)), {}
        for router, favoured in ROUTERS.items():
            got = layer(2, mesh)(*problem(favoured))
            report[name][router] = {k: difference(got[k], w) for k, w in wanted[router].items()}
        arrays, rows, whole = places(mesh)
        where = dict(zip(NAMES, arrays)) | dict(y=rows, balance=whole, load=whole)
        fits = lambda key: got[key].sharding.is_equivalent_to(where[key], got[key].ndim)
        report[name]["misplaced"] = [key for key in where if not fits(key)]
    print(json.dumps(report))


@pytest.fixture(scope="module")
def report():
    return report_of(__file__)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_values_and_gradients_on_a_mesh_are_those_of_one_device(report, mesh, router):
    found = report[mesh][router]
    assert set(found) == {"y", "balance", "load", *NAMES} and found["load"] == 0
    assert {name: d for name, d in found.items() if not d < ROUNDING} == {}


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_lie_where_the_weights_lie(report, mesh):
    assert report[mesh]["misplaced"] == []


# ---- on one device


@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize("favoured", [(), (2,)])
def test_values_and_gradients_equal_float64(choices, favoured):
    arrays, mask = problem(favoured)
    assert_same(layer(choices)(arrays, mask), reference(arrays, mask, choices))


def test_nothing_is_dropped_when_all_choose_the_same_experts():
    arrays, mask = problem((4, 1))
    got = layer(2)(arrays, np.ones_like(mask))
    assert got["load"].tolist() == [0, B * L, 0, 0, B * L, 0, 0, 0]
    assert_same(got, reference(arrays, np.ones_like(mask), 2))


def test_weights_of_the_choices_sum_to_one():
    (x, router, *experts), _ = problem()
    gate, up, down = (np.broadcast_to(w[:1], w.shape) for w in experts)  # all experts the same
    y, _ = mix_experts(x, router, gate, up, down, 3)
    assert difference(y, (jax.nn.silu(x @ gate[0]) * (x @ up[0])) @ down[0]) < ROUNDING


def test_masked_positions_count_nothing():
    (x, *weights), mask = problem()

    def balance(x):
        routing = mix_experts(x, *weights, 2, mask)[1]
        return routing.balance, routing.load_E

    (before, load), gradient = jax.value_and_grad(balance, has_aux=True)(x)
    after, load_after = balance(np.where(mask[..., None], x, 50 * x[::-1]))
    assert before == after and load.tolist() == load_after.tolist()
    assert load.sum() == 2 * mask.sum()
    assert not gradient[~mask].any() and np.abs(gradient[2:][mask[2:]]).min() > 0
    everything = mix_experts(x, *weights, 2)[1]
    assert everything.load_E.sum() == 2 * mask.size and everything.balance > before


def test_balance_is_one_without_preference_and_experts_over_choices_at_worst():
    (x, router, *experts), _ = problem((3, 6))
    mean = lambda router: mix_experts(x, router, *experts, 2)[1].balance / (B * L)
    assert mean(np.zeros_like(router)) == pytest.approx(1, rel=1e-6)
    router[0, [3, 6]] = 90
    assert mean(router) == pytest.approx(E / 2, rel=1e-6)
    # Rows that prefer different experts are no balance: each row stands for itself.
    rows = np.zeros((B, L, D), np.float32)
    rows[np.arange(B), :, np.arange(B)] = 1
    one_each = 90 * np.eye(D, E, dtype=np.float32)
    routing = mix_experts(rows, one_each, *experts, 1)[1]
    assert routing.load_E.tolist() == [L] * E
    assert routing.balance / (B * L) == pytest.approx(E, rel=1e-6)


def test_balance_adds_up_over_micro_batches():
    (x, *weights), mask = problem()

    def mean(router, rows):
        routing = mix_experts(x[rows], router, *weights[1:], 2, mask[rows])[1]
        return routing.balance / mask.sum(), routing.load_E

    parts = [slice(0, B)], [slice(0, 4), slice(4, B)]
    found = [
        [jax.value_and_grad(mean, has_aux=True)(weights[0], rows) for rows in part]
        for part in parts
    ]
    (((whole, load), gradient),), split = found
    assert float(sum(value for (value, _), _ in split)) == pytest.approx(float(whole), rel=ROUNDING)
    assert sum(load for (_, load), _ in split).tolist() == load.tolist()
    assert difference(sum(gradient for _, gradient in split), gradient) < ROUNDING


def test_ties_go_to_the_lower_expert():
    (x, router, *experts), mask = problem()
    load = mix_experts(x, np.zeros_like(router), *experts, 3, mask)[1].load_E
    assert load.tolist() == [mask.sum()] * 3 + [0] * (E - 3)


def test_the_router_is_float32_in_a_bfloat16_model():
    (x, router, *experts), _ = problem()
    router[:] = -1
    router[:, 4] = x[0, 0]
    router[:, 6] = x[0, 0] * (1 + 2**-11)  # the same in bfloat16
    bags = jnp.broadcast_to(jnp.asarray(x[0, 0], jnp.bfloat16), x.shape)
    layer = lambda *arrays: mix_experts(*arrays, 1)
    y, routing = layer(bags, router, *experts)
    assert y.dtype == jnp.bfloat16
    assert routing.load_E.tolist() == [0] * 6 + [B * L, 0]
    text = str(jax.make_jaxpr(layer)(bags, router, *experts))
    dots = [line for line in text.splitlines() if "= dot_general" in line]
    kinds = [line.split("=")[0].split(":")[1][:4].strip("[") for line in dots]
    assert set(kinds) == {"bf16", "f32"} and kinds.count("f32") == 1  # experts', and the router's
    assert text.count("HIGHEST") == 2  # of one dot


def test_bfloat16_is_as_near_float64_as_bfloat16_can_be():
    (x, router, *experts), mask = problem()
    x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)
    exact = reference((x, router, *experts), mask, 2)
    got = layer(2)((jnp.asarray(x, jnp.bfloat16), router, *experts), mask)
    assert [got[name].dtype for name in NAMES] == ["bfloat16"] + ["float32"] * 4
    assert_same(got, exact, 2e-2)
    assert difference(got["balance"], exact["balance"]) < ROUNDING


@pytest.mark.parametrize("choices", [0, E + 1])
def test_more_choices_than_experts_are_refused(choices):
    with pytest.raises(ValueError, match=f"^{choices} experts a token of {E}; .* 1 to {E}$"):
        mix_experts(*problem()[0], choices)


# ---- compiled for TPUs


@pytest.mark.parametrize("sizes", [None, dict(data=1, fsdp=2, expert=2)])
def test_no_tpu_computes_all_experts(sizes):
    """A masked matmul of all rows with all experts would be E times the operations."""
    rows, length, choices, experts, width, ff = 4, 128, 2, 16, 256, 128
    mesh = sizes and sharding.make_mesh(MeshConfig(**sizes), chips("v5p"))

    def shape(dtype, names, *sizes):
        spec = PartitionSpec(*map(sharding.RULES.get, names))
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=mesh and NamedSharding(mesh, spec))

    def loss(*arrays):
        y, routing = mix_experts(*arrays, choices, mesh=mesh)
        return y.astype(jnp.float32).sum() + routing.balance

    weights = (width, experts), *[(experts, width, ff)] * 2, (experts, ff, width)
    arrays = [shape(jnp.float32, AXES[name], *w) for name, w in zip(NAMES[1:], weights)]
    x = shape(jnp.bfloat16, ("batch",), rows, length, width)
    program = compile_for("v5p", jax.value_and_grad(loss, tuple(range(5))), x, *arrays)
    devices, buffer = (1, 1) if mesh is None else (4, 2)  # each has room for all of its pair's rows
    matmuls = 3 * 2 * rows * length * choices * 3 * width * ff / devices * buffer
    assert matmuls < program.cost_analysis()["flops"] < 1.3 * matmuls


if __name__ == "__main__":
    main()
