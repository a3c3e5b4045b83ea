"""Proves `tst_jax.sharding`: a mesh changes where arrays lie, not what is trained.

One process with eight fake CPU devices starts a run on several meshes of 1, 2, 4 and 8 of them and
takes ten steps of each phase, with a dense model and with experts, one of them in micro-batches,
and prints losses, layouts and what the programs send; the tests read its report. Meshes and axes
that cannot be are refused by name.
"""

import dataclasses
import functools
import hashlib
import json
import math

import jax
import numpy as np
import pytest
from eight_devices import report_of
from jax.sharding import AbstractMesh, PartitionSpec

from tst_jax import config as config_lib
from tst_jax import hlo, programs, sharding
from tst_jax.config import Config, DataConfig
from tst_jax.models import attention, moe
from tst_jax.models.transformer import ModelConfig, Transformer
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig
from tst_jax.sharding import MeshConfig
from tst_jax.train_step import (
    init_state,
    key_data,
    make_eval_step,
    make_train_step,
    state_shardings,
)

STEPS = 10  # of each phase
ROUNDING = 2e-6  # of a loss: sums over devices are float32 sums in another order
MESHES = {
    "one device": dict(data=1),
    "tensor": dict(data=1, tensor=2),
    "fsdp and expert": dict(data=1, fsdp=2, expert=2),
    "data": dict(data=8),
    "all axes": dict(data=1, fsdp=2, tensor=2, expert=2),
}
MICRO_BATCHES = {"fsdp and expert": 2}
others = pytest.mark.parametrize("mesh", list(MESHES)[1:])
CONFIG = Config(
    steps=2 * STEPS,
    loss_chunk=16,  # more than one chunk a step
    model=ModelConfig(vocab_size=64, width=16, layers=3, heads=4, kv_heads=2, head_dim=4, ff=24),
    tst=TSTConfig(bag_size=3, ratio=0.5),
    data=DataConfig(rows=8, positions=4),
    optimizer=OptimizerConfig(weight_decay=0.1),
    # Larger steps would let rounding grow: twenty of them are compared.
    schedule=ScheduleConfig(peak_lr=3e-3, warmup_fraction=0.0, decay_fraction=0.0),
)
MOE = dataclasses.replace(
    CONFIG,
    model=dataclasses.replace(
        CONFIG.model, qk_norm=True, experts=4, experts_per_token=2, router_loss=0.5
    ),
)
CONFIGS = {"dense": CONFIG, "moe": MOE}
models = pytest.mark.parametrize("model", CONFIGS)


# ---- in the process with eight devices


def layouts(tree):
    """{"layers.query": [shape, shape on a device, number of different parts]}"""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    describe = lambda array: [
        array.shape,
        array.addressable_shards[0].data.shape,
        len({str(shard.index) for shard in array.addressable_shards}),
    ]
    return {
        name(path).removesuffix(".value"): describe(array)
        for path, array in jax.tree_util.tree_leaves_with_path(tree)
    }


def train_on(config, mesh, batches):
    """Ten steps of each phase, as the trainer compiles them: metrics, layouts and collectives."""
    shapes, shardings = state_shardings(config, mesh)
    init = jax.jit(functools.partial(init_state, config), out_shardings=shardings)
    state = init(key_data(0))
    bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state)))
    losses, norms, routing, sent = [], [], [], {}
    for stage, parts in zip(config_lib.stages(config), batches, strict=True):
        step = programs.lower_step(config, stage, mesh, shapes, shardings).compile()
        sent[stage.phase] = hlo.collectives(step.as_text())
        numbers = sharding.local_rows(mesh, stage.rows)
        for part in parts:
            rows = sharding.assemble(mesh, numbers, part[numbers], stage.rows)
            state, metrics = step(state, rows)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
            if config.model.experts:
                load = np.asarray(metrics["expert_load"]).tolist()
                routing.append([float(metrics["router_loss"]), load])
    (adam,) = [part for part in state.opt_state[1] if hasattr(part, "mu")]
    where = {name: layouts(getattr(adam, name)) for name in ("mu", "nu")}
    found = {"start": bits.hexdigest(), "losses": losses, "routing": routing, "sent": sent}
    found["norms"] = norms
    found["rows"] = list(rows.addressable_shards[0].data.shape)
    return {**found, "params": layouts(state.params), **where}


def main():
    rng = np.random.default_rng(0)
    batches = [
        rng.integers(0, 64, (STEPS, stage.rows, stage.row_tokens)).astype(np.int32)
        for stage in config_lib.stages(CONFIG)
    ]
    report = {}
    for model, config in CONFIGS.items():
        report[model] = {}
        for name, sizes in MESHES.items():
            devices = jax.devices()[: math.prod(sizes.values())]
            mesh = sharding.make_mesh(MeshConfig(**sizes), devices)
            one = dataclasses.replace(config, micro_batches=MICRO_BATCHES.get(name, 1))
            report[model][name] = train_on(one, mesh, batches)
    print(json.dumps(report))


# ---- what it reports


@pytest.fixture(scope="module")
def report():
    return report_of(__file__)


@models
@others
def test_a_run_starts_from_the_same_bits_on_every_mesh(report, mesh, model):
    assert report[model][mesh]["start"] == report[model]["one device"]["start"]


@models
@others
def test_a_mesh_trains_to_the_same_losses(report, mesh, model):
    alone, found = report[model]["one device"], report[model][mesh]
    assert len(set(alone["losses"])) == 2 * STEPS
    np.testing.assert_allclose(found["losses"], alone["losses"], rtol=ROUNDING)
    # Adam would hide a gradient that is several times too large, and clipping too. Later norms
    # come from parameters that Adam made of gradients near zero, where rounding is all there is.
    np.testing.assert_allclose(found["norms"][0], alone["norms"][0], rtol=ROUNDING)
    np.testing.assert_allclose(found["norms"], alone["norms"], rtol=1e-3)
    assert len(found["routing"]) == (2 * STEPS if model == "moe" else 0)
    for (balance, load), (balance_alone, load_alone) in zip(found["routing"], alone["routing"]):
        np.testing.assert_allclose(balance, balance_alone, rtol=ROUNDING)
        np.testing.assert_allclose(load, load_alone, rtol=ROUNDING)
        np.testing.assert_allclose(np.sum(load, -1), 1, rtol=ROUNDING)


def test_every_device_holds_its_part(report):
    whole = {"query": [3, 16, 4, 4], "down": [3, 24, 16], "mlp_norm": [3, 16]}
    part = {"query": [3, 8, 2, 4], "down": [3, 12, 8], "mlp_norm": [3, 16]}
    params = report["dense"]["all axes"]["params"]
    for name in whole:
        got = params[f"layers.{name}"]
        assert got == [whole[name], part[name], 1 if name == "mlp_norm" else 4]
    assert params["embedding"] == params["output"] == [[64, 16], [32, 8], 4]
    experts = report["moe"]["all axes"]["params"]
    assert experts["layers.gate"] == [[3, 4, 16, 24], [3, 2, 8, 12], 8]
    assert experts["layers.router"] == [[3, 16, 4], [3, 8, 4], 2]
    for model in report.values():
        assert all(parts == 1 for _, _, parts in model["data"]["params"].values())  # plain copies
        assert model["data"]["rows"] == [1, 5] and model["all axes"]["rows"] == [2, 5]


@models
@others
def test_superposition_sends_no_more_than_recovery(report, mesh, model):
    """Rule 7: neither the bag mean nor the loss sends anything that grows with the bag size."""
    sent = report[model][mesh]["sent"]
    assert sent["superposition"] and sent["superposition"] == sent["recovery"]


@models
def test_what_is_sent_is_what_has_to_be(report, model):
    """Data parallelism alone sends each gradient once, and scalars; no rows, no activations."""
    found = report[model]["data"]
    gradients = 4 * sum(math.prod(shape) for shape, _, _ in found["params"].values())
    for sent in found["sent"].values():
        assert list(sent) == ["all-reduce"]
        assert gradients <= sent["all-reduce"] < gradients + 1000


@models
def test_moments_lie_where_their_params_lie(report, model):
    for found in report[model].values():
        assert found["mu"] == found["nu"] == found["params"]


def test_steps_tell_the_layers_of_their_mesh(monkeypatch):
    """Automatic sharding gives the same numbers here, but cannot partition a TPU's kernels."""
    seen = []
    for module, name in (moe, "mix_experts"), (attention, "attend"):
        inner = getattr(module, name)

        def spy(*args, inner=inner, name=name, **options):
            seen.append((name, options["mesh"] if name == "attend" else args[-1]))
            return inner(*args, **options)

        monkeypatch.setattr(module, name, spy)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    shapes = state_shardings(MOE, mesh)[0]
    for stage in config_lib.stages(MOE):
        rows = jax.ShapeDtypeStruct((stage.rows, stage.row_tokens), np.int32)
        jax.eval_shape(make_train_step(MOE, stage, mesh), shapes, rows)
    jax.eval_shape(make_eval_step(MOE, mesh), shapes.params, rows)
    assert {name for name, _ in seen} == {"mix_experts", "attend"} and len(seen) >= 6
    assert all(found is mesh for _, found in seen)


# ---- what cannot be


@pytest.mark.parametrize(
    "sizes, shape",
    [
        (dict(), (8, 1, 1, 1)),
        (dict(data=2, tensor=-1), (2, 1, 4, 1)),
        (dict(data=1, fsdp=8), (1, 8, 1, 1)),
        (dict(data=2, fsdp=2, tensor=2), (2, 2, 2, 1)),
        (dict(data=1, fsdp=2, expert=-1), (1, 2, 1, 4)),
    ],
)
def test_one_axis_takes_what_the_others_leave(sizes, shape):
    assert sharding.mesh_shape(MeshConfig(**sizes), 8) == shape


@pytest.mark.parametrize(
    "sizes", [dict(data=4), dict(data=16), dict(fsdp=3), dict(data=3, fsdp=-1), dict(tensor=16)]
)
def test_a_mesh_that_the_devices_do_not_fill_is_refused(sizes):
    with pytest.raises(ValueError) as caught:
        sharding.mesh_shape(MeshConfig(**sizes), 8)
    message = str(caught.value)
    assert "\n" not in message and "8 devices" in message and "mesh.*" in message
    assert all(f"{axis}={size}" in message for axis, size in sizes.items())


@pytest.mark.parametrize(
    "shape, sizes, words",
    [
        (dict(vocab_size=63), (1, 1, 2), ["embedding", "vocab axis of 63", "mesh.tensor=2"]),
        (dict(width=18), (1, 4, 1), ["embed axis of 18", "mesh.fsdp=4"]),
        (dict(), (1, 1, 4), ["layers.key", "kv_heads axis of 2", "mesh.tensor=4"]),
        (dict(heads=6), (1, 1, 4), ["layers.", "heads axis of ", "mesh.tensor=4"]),
        (dict(ff=25), (1, 1, 2), ["layers.", "mlp axis of 25", "mesh.tensor=2"]),
    ],
)
def test_an_axis_that_does_not_divide_is_refused_by_name(shape, sizes, words):
    cfg = ModelConfig(
        **dict(vocab_size=64, width=16, layers=3, heads=4, kv_heads=2, head_dim=4, ff=24) | shape
    )
    params = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    with pytest.raises(ValueError) as caught:
        sharding.param_shardings(params, AbstractMesh((*sizes, 1), sharding.AXES))
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


def test_specs_follow_the_names_of_the_axes():
    params = jax.eval_shape(lambda key: Transformer(CONFIG.model, key), jax.random.key(0))
    got = sharding.param_shardings(params, AbstractMesh((2, 2, 2, 1), sharding.AXES))
    assert got.embedding.get_value().spec == PartitionSpec("tensor", "fsdp")
    assert got.layers.out.get_value().spec == PartitionSpec(None, "tensor", None, "fsdp")
    assert got.layers.gate.get_value().spec == PartitionSpec(None, "fsdp", "tensor")
    assert got.final_norm.get_value().spec == PartitionSpec(None)


def test_two_axes_that_claim_one_axis_of_the_mesh_are_refused_by_name(monkeypatch):
    assert sharding.spec("batch", "position", "heads") == PartitionSpec(
        ("data", "fsdp", "expert"), None, "tensor"
    )
    cases = {
        ("batch", "embed"): "fsdp",
        ("vocab", "heads"): "tensor",
        ("experts", "batch"): "expert",
    }
    for names, axis in cases.items():
        with pytest.raises(ValueError) as caught:
            sharding.spec(*names)
        message = str(caught.value)
        assert all(repr(name) in message for name in names) and f"mesh.{axis}" in message
    with pytest.raises(ValueError, match="'widht'.*width"):
        sharding.spec("widht")
    # A change of the table that makes params collide ends before any compile, with their name.
    monkeypatch.setitem(sharding.RULES, "heads", "fsdp")
    with pytest.raises(config_lib.ConfigError, match=r"layers\.out: axes .heads. and .embed."):
        programs.layout(dataclasses.replace(CONFIG, data=DataConfig("x", 8, 4)))


if __name__ == "__main__":
    main()


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd", "muon", "adafactor", "sm3"])
def test_any_optimizer_state_has_a_place(name):
    """Moments that exist for some params only, or of other shapes, break no mesh (eval_shape)."""
    config = Config(optimizer=OptimizerConfig(name=name), model=CONFIG.model)
    mesh = AbstractMesh((2, 2, 2, 1), sharding.AXES)
    shapes, places = state_shardings(config, mesh)
    for leaf, place in zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True):
        place.shard_shape(leaf.shape)  # raises where an axis does not divide
    moments = {
        tuple(place.spec)
        for path, place in jax.tree_util.tree_leaves_with_path(places.opt_state)
        if "query" in jax.tree_util.keystr(path) and len(place.spec) > 1
    }
    if name not in ("sgd", "adafactor", "sm3"):  # these keep none of a param's shape
        assert moments == {(None, "fsdp", "tensor", None)}
