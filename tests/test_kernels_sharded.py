"""Proves that tables may lie anywhere: one result on every mesh, and no traffic beyond need.

One process with eight fake CPU devices runs bag mean and loss on several meshes, compares them with
one device, lists their collectives and prints a report, which the tests read (rules 7, 8, 9).
"""

import functools
import json
import os

import jax
import pytest
from eight_devices import report_of
from kernel_problem import (
    ROUNDING,
    B,
    D,
    L,
    V,
    both_operations,
    compiled,
    largest_difference,
    problem,
)

from tst_jax import sharding, superposition
from tst_jax.kernels.dispatch import Kernels
from tst_jax.sharding import MeshConfig

MESHES = {
    "data": dict(data=8),
    "fsdp": dict(data=1, fsdp=8),
    "tensor": dict(data=1, tensor=8),
    "all axes": dict(data=2, fsdp=2, tensor=2),
}
# bce and hinge are left to automatic sharding, which one mesh shows.
SHARDED = [(mesh, objective) for mesh in MESHES for objective in ("mce", "mass")]
SHARDED += [("all axes", objective) for objective in ("bce", "hinge")]
COLLECTIVES = ("psum", "pmax", "all_gather", "reduce_scatter", "all_to_all", "ppermute")


def collectives(jaxpr, times=1):
    """[kind, shape] of every collective of a device, as often as it runs."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in COLLECTIVES:
            found += [[eqn.primitive.name, list(v.aval.shape)] for v in eqn.invars] * times
        rounds = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in jax.tree.leaves(list(eqn.params.values())):
            value = getattr(value, "jaxpr", value)
            if hasattr(value, "eqns"):
                found += collectives(value, times * rounds)
    return found


# ---- in the process with eight devices


def main():
    report = {}
    alone = functools.cache(
        lambda objective: compiled(both_operations(Kernels("xla"), objective), *problem(3))(
            *problem(3)
        )
    )
    for name, sizes in MESHES.items():
        mesh = sharding.make_mesh(MeshConfig(**sizes))
        for objective in (objective for mesh_name, objective in SHARDED if mesh_name == name):
            arrays = problem(3)
            want = alone(objective)
            on_mesh = both_operations(sharding.kernels_on(mesh, "xla"), objective)
            got = compiled(on_mesh, *arrays)(*arrays)
            report[f"{name} {objective}"] = largest_difference(got, want)
        for bag_size in (1, 16):
            arrays = problem(bag_size)
            on_mesh = both_operations(sharding.kernels_on(mesh, "xla"))
            found = collectives(jax.make_jaxpr(on_mesh)(*arrays).jaxpr)
            report[f"{name} traffic of {bag_size}"] = sorted(found)
            text = compiled(on_mesh, *arrays).as_text()
            kinds = ("all-reduce(", "all-gather(", "reduce-scatter(", "all-to-all(", "permute(")
            report[f"{name} compiled, {bag_size}"] = {kind: text.count(kind) for kind in kinds}
    flat = lambda hidden, head, tokens, kernels: superposition.bag_loss(
        hidden.reshape(-1, D), head, tokens.reshape(-1, 3), kernels=kernels
    )[0]
    mesh = sharding.make_mesh(MeshConfig(**MESHES["all axes"]))
    _, head, hidden, tokens, _ = problem(3)
    got, want = (
        jax.value_and_grad(flat, (0, 1))(hidden, head, tokens, kernels)
        for kernels in (sharding.kernels_on(mesh, "xla"), Kernels("xla"))
    )
    report["flat"] = largest_difference(got, want)
    # The interpreter needs a core for each device.
    mesh = sharding.make_mesh(
        MeshConfig(data=1, tensor=-1), jax.devices()[: min(2, os.cpu_count())]
    )
    got = jax.jit(both_operations(sharding.kernels_on(mesh, "interpret")))(*problem(3))
    report["interpreted"] = largest_difference(got, alone("mce"))
    print(json.dumps(report))


# ---- what it reports


@pytest.fixture(scope="module")
def report():
    return report_of(__file__)


@pytest.mark.parametrize("mesh,objective", SHARDED)
def test_sharded_tables_give_the_same_numbers(report, mesh, objective):
    """Rules 7, 8: loss and all gradients; a bag's tokens lie on several devices."""
    assert report[f"{mesh} {objective}"] <= ROUNDING


def test_flat_positions_are_shared_out(report):
    assert report["flat"] <= ROUNDING


def test_interpreted_kernels_run_sharded(report):
    assert report["interpreted"] <= ROUNDING


@pytest.mark.parametrize("mesh", MESHES)
def test_traffic_does_not_grow_with_the_bag(report, mesh):
    """Rule 7: the collectives of s = 16 are those of s = 1, in our program and in the compiled."""
    assert report[f"{mesh} traffic of 16"] == report[f"{mesh} traffic of 1"]
    assert report[f"{mesh} compiled, 16"] == report[f"{mesh} compiled, 1"]


def test_sharded_vocabulary_moves_two_scalars_a_position(report):
    """Rules 7, 9: per chunk of 16 positions a maximum, then two scalars; [B, L, D] twice a step."""
    chunks = B * L // 16
    whole = [["psum", [1, B * L, D]], ["psum", [B, L, D]]]
    want = [["pmax", [1, 16]]] * chunks + whole + [["psum", [2, 16]]] * chunks
    assert report["tensor traffic of 16"] == sorted(want)
    assert report["tensor compiled, 16"]["all-gather("] == 0


def test_gradients_of_tables_are_reduced_once(report):
    """Whatever the number of chunks: one reduction each of table and head, and the loss's sum."""
    tables = [["psum", [V, D]]] * 2
    assert report["data traffic of 16"] == sorted([["psum", []], *tables])
    gathered = [["all_gather", [V, D // 8]]] * 2 + [["reduce_scatter", [V, D]]] * 2
    assert report["fsdp traffic of 16"] == sorted([["psum", []], *gathered])


if __name__ == "__main__":
    main()
