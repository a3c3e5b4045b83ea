"""Proves `tst_jax.kernels`: one result whichever implementation runs and however arrays lie.

Pallas kernels are proved one by one in test_kernels_tpu.py and test_logsumexp_gpu.py. Here: the
choice of a path, the paths against each other and float64, and what they hold in memory. Meshes are
in test_kernels_sharded.py.
"""

import dataclasses
import functools
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_problem import (
    ROUNDING,
    both_operations,
    compiled,
    largest_difference,
    problem,
)
from tpu_topology import chips, compile_for

from tst_jax import bench_kernels as bench
from tst_jax import config as config_lib
from tst_jax import sharding, superposition
from tst_jax.config import ConfigError
from tst_jax.kernels import dispatch, logsumexp_gpu
from tst_jax.kernels.dispatch import Kernels
from tst_jax.sharding import MeshConfig
from tst_jax.train import train
from tst_jax.train_step import init_state, key_data, make_train_step

# ---- one device


@pytest.mark.parametrize("objective", ["mce", "mass"])
@pytest.mark.parametrize("bag_size", [1, 5])
def test_interpreted_kernels_agree_with_xla(objective, bag_size):
    arrays = problem(bag_size)
    got, want = (
        jax.jit(both_operations(Kernels(choice), objective))(*arrays)
        for choice in ("interpret", "xla")
    )
    assert largest_difference(got, want) <= ROUNDING


@pytest.mark.parametrize("objective", ["mce", "mass"])
def test_what_surrounds_the_gpu_kernel_agrees_with_xla(monkeypatch, objective):
    """Gradients by chunks from the kernel's logsumexp, which a plain one stands for here."""
    arrays = problem(3)
    want = jax.jit(both_operations(Kernels("xla"), objective))(*arrays)
    run = lambda operation, kernels, tpu, cuda, xla, *args, as_measured: cuda("hopper")(*args)
    plain = lambda hidden, head, arch: jax.nn.logsumexp(hidden @ head.T, axis=-1)
    monkeypatch.setattr(dispatch, "run", run)
    monkeypatch.setattr(logsumexp_gpu, "logsumexp", plain)
    got = jax.jit(both_operations(Kernels("pallas"), objective, chunk=20))(*arrays)  # of 48
    assert largest_difference(got, want) <= ROUNDING


@pytest.mark.parametrize("objective", superposition.OBJECTIVES)
def test_flat_positions_on_a_mesh_are_taken_by_chunks(objective):
    """Rule 9: [N, D] too never has its logits whole."""
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    shape = jax.ShapeDtypeStruct
    arrays = shape((96, 8), "float32"), shape((50, 8), "float32"), shape((96, 2), "int32")
    loss = lambda *arrays: superposition.bag_loss(
        *arrays, objective=objective, chunk=12, kernels=sharding.kernels_on(mesh, "xla")
    )[0]
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arrays))
    assert "[12,50]" in text and "96,50]" not in text


@pytest.mark.parametrize("choice", ["xla", "interpret"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bag_size", [1, 4, 16])
def test_loss_and_gradients_are_near_float64(choice, dtype, bag_size):
    """Rules 8 to 10, at a size where sums are long: 2e-6, and with bfloat16 2e-3 for the head's."""
    off = bench.errors(bench.Size(bag_size, n=300, d=96, v=1000, dtype=dtype), choice)
    assert (np.array(off) <= bench.LIMITS[dtype]).all(), off
    assert bench.LIMITS["float32"] == (2e-6,) * 3 and bench.LIMITS["bfloat16"][2] == 2e-3


@pytest.mark.parametrize("objective", ["mce", "mass"])
def test_on_a_cpu_rows_do_not_lie_a_power_of_two_apart(objective):
    """The same numbers; filled up on a CPU alone, where the size of a vocabulary asks for it."""
    rng = np.random.default_rng(0)
    hidden, head = (rng.normal(size=(n, 8)).astype("float32") for n in (20, 1024))
    head -= 3 * hidden[0]  # far below 0, where an entry that does not exist would be the largest
    targets = rng.integers(0, 1024, (20, 3)).astype("int32")

    def loss(hidden, head, chunk=16):
        options = dict(objective=objective, chunk=chunk, kernels=Kernels("xla"))
        return superposition.bag_loss(hidden, head, targets, **options)[0]

    def plainly(hidden, head):
        each = -jax.nn.log_softmax(hidden @ head.T)[jnp.arange(20)[:, None], targets]
        mass = -jax.nn.logsumexp(-each, axis=-1)
        return (each.mean(-1) if objective == "mce" else mass).sum()

    got = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
    with jax.enable_x64(True):
        exact = (x.astype("float64") for x in (hidden, head))
        want = jax.tree.map(np.asarray, jax.value_and_grad(plainly, (0, 1))(*exact))
    # The gradient of hidden is a difference of rows of the head, which have a part in common.
    for found, exact, unit in zip(jax.tree.leaves(got), jax.tree.leaves(want), (1, head, 1)):
        unit = max(np.abs(unit).max(), np.abs(exact).max())
        assert exact.dtype == "float64" and np.abs(found - exact).max() <= ROUNDING * unit
    for entries, platform, filled in ((1024, "cpu", 1), (1024, "tpu", 0), (1000, "cpu", 0)):
        gradient = jax.jit(jax.grad(loss, (0, 1))).trace(hidden, head[:entries])
        text = gradient.lower(lowering_platforms=(platform,)).as_text()
        # Half of the 16 positions of a chunk, so that memory is what it was.
        assert (f"8x{entries + 16}xf32" in text) == filled
        assert (f"<16x{entries}xf32>" in text) != filled


def test_gradients_take_three_matmuls():
    """Nothing is computed again for the backward pass, and a value alone takes one."""
    table, head, hidden, tokens, mask = problem(3)
    loss = lambda hidden, head: superposition.bag_loss(hidden, head, tokens, mask, chunk=16)[0]

    def matmuls(function):
        text = jax.jit(function).lower(hidden, head).as_text()
        return text.count("stablehlo.dot_general")

    assert matmuls(loss) == 1
    assert matmuls(jax.value_and_grad(loss, (0, 1))) == 3


def temporaries(function, size):
    hidden, head, targets = jax.eval_shape(lambda: bench.arrays(size))
    program = jax.jit(jax.value_and_grad(function, (0, 1))).lower(hidden, head, targets).compile()
    return program.memory_analysis().temp_size_in_bytes


def test_memory_is_a_tenth_of_separate_cross_entropies():
    size = bench.Size(8, n=2048, d=256, v=32768, dtype="float32")
    assert 10 * temporaries(bench.ours(1024, "xla"), size) <= temporaries(bench.paper_style, size)


def test_bag_mean_holds_no_array_of_all_slots():
    """Rule 5, in the compiled program: less than half of [N, S, D], gradient included."""
    size = bench.Size(16, n=4096, d=64, v=512, dtype="float32")
    hidden, table, tokens = jax.eval_shape(lambda: bench.arrays(size))
    bag = jax.value_and_grad(lambda t, y: superposition.embed_bags(t, y).sum())
    used = jax.jit(bag).lower(table, tokens).compile().memory_analysis().temp_size_in_bytes
    assert used < size.n * size.bag_size * size.d * 4 / 2


# ---- compiled for TPUs


def test_loss_of_a_large_vocabulary_fits_a_v5e():
    """At most 1.5 GB beside inputs and gradients; whole float32 logits (8.4 GB) do not fit.

    Of the peak, because newer compilers count what shares a gradient's place as temporary too.
    """
    size = bench.Size(16, n=16384, d=2048, v=128256, dtype="bfloat16")
    hidden, head, targets = jax.eval_shape(lambda: bench.arrays(size))
    head = jax.ShapeDtypeStruct(head.shape, jnp.bfloat16)
    loss = jax.value_and_grad(bench.ours(512, "xla"), (0, 1))
    memory = compile_for("v5e", loss, hidden, head, targets).memory_analysis()
    others = memory.argument_size_in_bytes + memory.output_size_in_bytes
    assert memory.peak_memory_in_bytes - others <= 1.5e9
    whole = jax.value_and_grad(bench.one_logsumexp, (0, 1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compile_for("v5e", whole, hidden, head, targets)


def test_pallas_kernels_compile_on_a_mesh():
    """Four chips, tables sharded both ways: Mosaic kernels, and no traffic but our own."""
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), chips("v5e"))
    programs = {}
    for choice in ("xla", "pallas"):
        kernels = sharding.kernels_on(mesh, choice)
        rows, table = (jax.NamedSharding(mesh, spec) for spec in (kernels.rows, kernels.table))
        array = jax.ShapeDtypeStruct
        programs[choice] = compile_for(
            "v5e",
            both_operations(kernels, chunk=1024),
            array((32768, 1024), jnp.float32, sharding=table),
            array((32768, 1024), jnp.float32, sharding=table),
            array((8, 512, 1024), jnp.bfloat16, sharding=rows),
            array((8, 512, 4), jnp.int32, sharding=rows),
            array((8, 512, 4), jnp.bool, sharding=rows),
        ).as_text()
    assert programs["pallas"].count('custom_call_target="tpu_custom_call"') == 4
    assert "tpu_custom_call" not in programs["xla"]
    for kind in ("all-to-all", "collective-permute"):
        assert kind not in programs["pallas"] + programs["xla"]


# ---- the choice of a path


def lowered(choice, platform, dtype="float32"):
    function = both_operations(Kernels(choice))
    table, head, hidden, tokens, mask = problem(3)
    arrays = table, head, hidden.astype(dtype), tokens, mask
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=(platform,)).as_text()


def test_path_is_chosen_at_lowering_time(monkeypatch):
    """`pallas` is Mosaic on a TPU and an error where there is no kernel; `auto` is XLA so far."""
    mosaic = "tpu_custom_call"
    assert lowered("pallas", "tpu").count(mosaic) >= 4  # bag mean, logsumexp, two gradients
    with pytest.raises(NotImplementedError):
        lowered("pallas", "cpu")
    for choice in ("auto", "xla"):
        assert mosaic not in lowered(choice, "tpu") + lowered(choice, "cpu")
    with pytest.raises(NotImplementedError):  # the bag mean alone too
        bag = lambda table, tokens: superposition.embed_bags(
            table, tokens, kernels=Kernels("pallas")
        )
        jax.jit(bag).lower(*problem(3)[0::3])
    kind = jax.devices()[0].device_kind
    wins = frozenset({("bag_mean", kind), ("cross_entropy", kind)})
    monkeypatch.setattr(dispatch, "WINS", wins)
    text = lowered("auto", "tpu", jnp.bfloat16)
    assert text.count(mosaic) >= 4
    # Other dtypes than the measured ones, platforms and choices keep to XLA: here the table's, too.
    assert 0 < lowered("auto", "tpu").count(mosaic) < text.count(mosaic)
    assert mosaic not in lowered("auto", "cpu") + lowered("xla", "tpu")


def test_tracing_starts_no_devices():
    """Programs are traced before `jax.distributed` is, and on hosts that only compile."""
    code = """
import jax, jax.numpy as jnp
from tst_jax import superposition as st
shape = jax.ShapeDtypeStruct
step = lambda t, y: st.bag_loss(st.embed_bags(t, y), t, y)[0]
jax.eval_shape(jax.grad(step), shape((9, 8), jnp.float32), shape((2, 3, 4), jnp.int32))
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_auto_takes_pallas_only_where_it_was_measured_to_win():
    """Nobody has measured a win yet; an entry needs its figures in kernels/README.md."""
    notes = (pathlib.Path(dispatch.__file__).parent / "README.md").read_text()
    unproved = lambda wins: [win for win in wins if "# {} on {}\n".format(*win) not in notes]
    assert not unproved(dispatch.WINS) and unproved({("bag_mean", "TPU v5 lite")})


device = lambda platform, kind: SimpleNamespace(platform=platform, device_kind=kind)
H200 = device("gpu", "NVIDIA H200")


@pytest.mark.parametrize(
    "choice,devices,dtype,words",
    [
        ("auto", [device("cpu", "cpu")] * 8, "float32", None),
        ("xla", [device("gpu", "NVIDIA A100-SXM4-80GB")], "float32", None),
        ("pallas", [device("tpu", "TPU v5 lite")], "float32", None),
        ("pallas", [H200], "bfloat16", None),
        ("pallas", [device("gpu", "NVIDIA GB200")], "bfloat16", None),
        ("interpret", [device("cpu", "cpu")], "float32", None),
        ("pallas", [H200], "float32", ["bfloat16", "float32", "H200"]),
        ("pallas", [device("gpu", "NVIDIA A100-SXM4-80GB")], "bfloat16", ["A100", "kernels=auto"]),
        ("pallas", [device("cpu", "cpu")], "float32", ["cpu", "kernels=auto"]),
        ("interpret", [device("cpu", "cpu")] * 4096, "float32", ["4096", "cores"]),
    ],
)
def test_what_cannot_run_is_said_in_one_line(choice, devices, dtype, words):
    found = dispatch.problem(choice, devices, dtype)
    if words is None:
        assert found is None
    else:
        assert "\n" not in found and all(word in found for word in words)


def test_wrong_kernels_are_refused_before_anything_is_written(config, tmp_path):
    for choice, words in [("triton", ["'triton'", *dispatch.CHOICES]), ("pallas", ["cpu"])]:
        wrong = dataclasses.replace(config, kernels=choice)
        with pytest.raises(ConfigError) as caught:
            train(wrong, tmp_path / "run")
        message = str(caught.value)
        assert "\n" not in message and all(word in message for word in words), message
        assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="choose one of auto"):
        Kernels("triton")
    with pytest.raises(ValueError, match="must be among"):
        Kernels("xla", batch=("data",), width=("fsdp",))
    with pytest.raises(ValueError, match="share an axis"):
        Kernels("xla", batch=("data",), vocab=("data",))


def test_training_step_with_interpreted_kernels(config):
    """Both phases take the path that the config names, to the same loss and gradient."""
    state = compiled(functools.partial(init_state, config), key_data(0))(key_data(0))
    for stage in config_lib.stages(config):
        shape = (stage.rows, stage.row_tokens)
        rows = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, np.int32)
        metrics, programs = {}, {}
        for choice in ("xla", "interpret"):
            chosen = dataclasses.replace(config, kernels=choice)
            programs[choice] = jax.jit(make_train_step(chosen, stage)).lower(state, rows)
            metrics[choice] = programs[choice].compile()(state, rows)[1]
        for name, value in metrics["xla"].items():
            np.testing.assert_allclose(metrics["interpret"][name], value, rtol=1e-5, err_msg=name)
        # The interpreter, and not XLA's path under another name.
        assert ["callback" in x.as_text() for x in programs.values()] == [False, True]
