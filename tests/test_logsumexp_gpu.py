"""Proves `tst_jax.kernels.logsumexp_gpu` without a GPU.

Mosaic GPU's interpreter runs both kernels on the CPU, with its race detector, against a float64
reference: sizes that fill no tile, one entry in the last tile, logits that overflow or underflow
without their maximum. Where the CUDA plugin and ptxas are installed, the real compiler translates
both for an H200 and a B200, at the sizes of training. No test here runs on a GPU.

As a program, `python test_logsumexp_gpu.py H200` compiles for one target and prints one JSON line
a shape: a process can describe only one kind of GPU to the CUDA plugin.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax import bench_kernels as bench
from tst_jax.kernels.dispatch import Kernels
from tst_jax.kernels.logsumexp_gpu import logsumexp
from tst_jax.superposition import bag_loss

ARCHS = ("hopper", "blackwell")
each_arch = pytest.mark.parametrize("arch", ARCHS)


# --- Values, interpreted -----------------------------------------------------------------------


def interpreter_is_missing():
    """Why the installed jax cannot interpret the kernels, or None."""
    try:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    except ImportError:
        return f"jax {jax.__version__} has no Mosaic GPU interpreter"
    if "inline_mgpu" not in {field.name for field in dataclasses.fields(InterpretGPUParams)}:
        return f"the Mosaic GPU interpreter of jax {jax.__version__} cannot run these kernels"
    return None


MISSING = interpreter_is_missing()
interpreted = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

# A logit of 200 is 7.6e-8 of itself away from the next float32, and up to 320 products are rounded
# to that one after the other: 4.4e-7 was seen. Another order of the products may double it.
RTOL = 1e-6


def make_inputs(positions, width, vocab, dtype):
    """Logits of spread 4 around a level of their own per position, some far from zero.

    At the level 200, an exponential without its maximum overflows. At -200 it is 0, and the zero
    logit of a padded entry would be all there is.
    """
    rng = np.random.default_rng(positions + width + vocab)
    hidden = rng.normal(size=(positions, width))
    head = rng.normal(size=(vocab, width)) * 4 / np.sqrt(width)
    head[:, 0] = 1
    hidden[:, 0] = rng.choice([-200, -1, 0, 200], size=positions)
    return jnp.asarray(hidden, dtype), jnp.asarray(head, dtype)


def reference(hidden_NxD, head_VxD):
    z_NxV = np.asarray(hidden_NxD).astype(np.float64) @ np.asarray(head_VxD).astype(np.float64).T
    peak_Nx1 = z_NxV.max(1, keepdims=True)
    return peak_Nx1[:, 0] + np.log(np.exp(z_NxV - peak_Nx1).sum(1))


@interpreted
@each_arch
@pytest.mark.parametrize(
    "positions, width, vocab, dtype",
    [
        # Nothing fills its tiles. Eight tiles a block: the detector needs several to meet a race.
        (100, 80, 2000, "bfloat16"),
        (130, 128, 300, "bfloat16"),
        (257, 320, 129, "bfloat16"),  # more slices than stages; one entry in the last tile
        (1, 1, 2, "bfloat16"),
        (256, 64, 384, "float16"),  # whole tiles: neither padding nor mask
    ],
)
def test_the_kernel_equals_a_float64_reference(arch, positions, width, vocab, dtype):
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    hidden_NxD, head_VxD = make_inputs(positions, width, vocab, dtype)
    try:
        got_N = logsumexp(hidden_NxD, head_VxD, arch=arch, interpret=True)
        assert not interpreter.get_races().races_found  # jax 0.11 only notes a race; 0.12 raises
    finally:
        interpreter.reset_gpu_interpret_mode_state()  # a failure must not spoil the next test
    assert got_N.shape == (positions,) and got_N.dtype == jnp.float32
    want_N = reference(hidden_NxD, head_VxD)
    np.testing.assert_allclose(np.asarray(got_N).astype(np.float64), want_N, rtol=RTOL)


# --- What is asked for, and what is refused ----------------------------------------------------


def array(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    "hidden, head, arch, words",
    [
        (array(4, 8), array(9, 8), "ampere", ["ampere", "hopper", "blackwell"]),
        (array(4, 8), array(9, 8, dtype="float32"), "hopper", ["float32", "bfloat16", "cast"]),
        (
            array(4, 8, dtype="float32"),
            array(9, 8, dtype="float32"),
            "blackwell",
            ["hidden is float32", "head is float32", "float16", "cast"],
        ),
        (array(4, 8, dtype="float16"), array(9, 8), "hopper", ["float16", "bfloat16", "cast"]),
        (array(4, 8), array(9, 7), "hopper", ["(4, 8)", "(9, 7)", "[N, D]"]),
        (array(2, 4, 8), array(9, 8), "hopper", ["(2, 4, 8)", "[N, D]"]),
        (array(0, 8), array(9, 8), "hopper", ["(0, 8)", "at least 1"]),
        (array(4, 8), array(1, 8), "hopper", ["(1, 8)", "at least 2"]),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(hidden, head, arch, words):
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(functools.partial(logsumexp, arch=arch), hidden, head)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.skipif(MISSING is None, reason="the interpreter of this jax knows the kernels")
@each_arch
def test_an_interpreter_that_would_hang_is_refused_in_one_line(arch):
    with pytest.raises((NotImplementedError, ImportError)) as caught:
        logsumexp(*make_inputs(4, 8, 9, "bfloat16"), arch=arch, interpret=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arch, multiprocessors, vocab, blocks",
    [
        ("hopper", 114, 128256, 114),
        ("hopper", 114, 200, 2),  # no more than there are tiles
        ("hopper", None, 128256, 132),  # nobody can be asked
        ("blackwell", 160, 128256, 160),
        ("blackwell", None, 128256, 148),
    ],
)
def test_a_block_runs_on_each_multiprocessor(arch, multiprocessors, vocab, blocks):
    device = jax.sharding.AbstractDevice(
        device_kind="GPU", num_cores=multiprocessors, platform="gpu"
    )
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(functools.partial(logsumexp, arch=arch))(
            array(200, 64), array(vocab, 64)
        )
    assert f"grid=({blocks},)" in str(program)


# --- Compilation for GPUs that are not here ----------------------------------------------------

# What the compiler is told of a GPU: (arch, compute capability, multiprocessors, memory in bytes).
TARGETS = {
    "H200": ("hopper", (9, 0), 132, 150 * 10**9),
    "B200": ("blackwell", (10, 0), 148, 191 * 10**9),
}
LARGE = [(4096, width, vocab) for vocab in (128256, 151936) for width in (2048, 576)]
SHAPES = [*LARGE, (100, 80, 1000)]


def describe(target):
    _, (major, minor), multiprocessors, memory = TARGETS[target]
    return f"""
        platform_name: "CUDA"
        device_description_str: "NVIDIA {target}"
        runtime_version {{ major: 13 minor: 0 }}
        dnn_version_info {{ major: 9 minor: 12 }}
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {multiprocessors}
          fpus_per_core: 128
          clock_rate_ghz: 1.9
          device_memory_size: {memory}
          memory_bandwidth: 4800000000000
          l2_cache_size: 52428800
          threads_per_warp: 32
          threads_per_block_limit: 1024
          threads_per_core_limit: 2048
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535
          block_dim_limit_z: 65535
          registers_per_core_limit: 65536
          registers_per_block_limit: 65536
          shared_memory_per_core: 233472
          shared_memory_per_block: 49152
          shared_memory_per_block_optin: 232448
        }}
    """


def compile_for(target):
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=describe(target), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    run = jax.jit(functools.partial(logsumexp, arch=TARGETS[target][0]))
    for positions, width, vocab in SHAPES:
        arrays = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=everywhere)
            for shape in ((positions, width), (vocab, width))
        ]
        with jax.set_mesh(mesh):
            compiled = run.lower(*arrays).compile()
        found = {
            "shape": [positions, width, vocab],
            "custom_call": 'custom_call_target="mosaic_gpu' in compiled.as_text(),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        print("\n" + json.dumps(found), flush=True)
    for choice in ("xla", "pallas"):
        kernels = Kernels(choice, mesh)
        size = bench.Size(16, n=16384, d=2048, v=128256, dtype="bfloat16")
        arrays = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
            for x in jax.eval_shape(lambda size=size: bench.arrays(size))
        ]
        loss = lambda *arrays, kernels=kernels: bag_loss(*arrays, kernels=kernels)[0]
        with jax.set_mesh(mesh):
            compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arrays).compile()
        found = {
            "loss": choice,
            "custom_call": 'custom_call_target="mosaic_gpu' in compiled.as_text(),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
        }
        print("\n" + json.dumps(found), flush=True)


def compiler_is_missing():
    """Why nothing can be compiled for a GPU here, or None."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return "the CUDA plugin of jax is not installed"
    wheels = importlib.util.find_spec("nvidia")
    folders = wheels.submodule_search_locations if wheels else []
    in_wheels = any(any(pathlib.Path(folder).rglob("bin/ptxas")) for folder in folders)
    if not shutil.which("ptxas") and not in_wheels:
        return "ptxas is not installed"
    return None


NO_COMPILER = compiler_is_missing()


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_compiles_for_a_gpu_and_keeps_no_logits(target):
    root = pathlib.Path(__file__).parents[1]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program from the cache is not compiled
        "MOSAIC_GPU_DUMP_PTXAS": "1",  # lets ptxas say which kernel it translated, and for what
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, __file__, target], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"shape')]
    assert [tuple(result["shape"]) for result in results] == SHAPES

    # The whole loss with its gradients: whole float32 logits alone would take 8.4 GB.
    losses = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"loss')]
    assert [(x["loss"], x["custom_call"]) for x in losses] == [("xla", False), ("pallas", True)]
    assert max(x["temporaries"] for x in losses) < 2e9, losses

    arch, (major, _), _, _ = TARGETS[target]
    entry = f"entry function 'logsumexp_{arch}_mosaic_gpu_kernel' for 'sm_{major}0a'"
    assert (done.stdout + done.stderr).count(entry) == len(SHAPES) + 1
    for (positions, width, vocab), result in zip(SHAPES, results):
        assert result["custom_call"], result
        rows = -(-positions // 256) * 256
        tiles, columns = -(-vocab // 128), -(-width // 64) * 64
        # Two float32 per position and tile of the vocabulary, and a third while they are joined.
        expected = 3 * tiles * rows * 4
        # Copies of the inputs, only if they do not fill their tiles.
        if (rows, columns) != (positions, width):
            expected += 2 * rows * columns
        if (tiles * 128, columns) != (vocab, width):
            expected += 2 * tiles * 128 * columns
        assert result["temporaries"] <= expected + 4096, result  # and small change
        if (positions, width, vocab) in LARGE:
            assert 20 * result["temporaries"] < positions * vocab * 4, result


if __name__ == "__main__":
    compile_for(sys.argv[1])
