"""Proves without a TPU that splash attention needs memory of the length of a row, not its square.

Value and gradients are compiled for real chips; `xla` shows what the square looks like. Short rows
fit in a chip's fast memory, which is not counted, so growth is measured between long ones.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tpu_topology import chips, compile_for

from tst_jax.models.attention import attend
from tst_jax.sharding import MeshConfig, make_mesh

HEADS, KV_HEADS = 8, 2
KERNELS = {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}


def compiled(
    generation,
    length,
    backend="splash",
    packed=False,
    head_dim=128,
    dtype="bfloat16",
    backward=True,
):
    """Value and gradients for one row on one chip."""
    mesh = make_mesh(MeshConfig(), chips(generation)[:1])

    def total(query, key, value, *segments):
        mixed = attend(query, key, value, *segments, backend=backend, mesh=mesh)
        return mixed.sum(dtype=jnp.float32)

    shapes = [
        jax.ShapeDtypeStruct((1, length, heads, head_dim), dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    shapes += [jax.ShapeDtypeStruct((1, length), jnp.int32)] * packed
    function = jax.value_and_grad(total, (0, 1, 2)) if backward else total
    return compile_for(generation, function, *shapes)


def temporary(program):
    """Bytes that the program needs beside its arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def kernels(program):
    return set(re.findall(r"splash_mha_(?:fwd|dq|dkv)", program.as_text()))


def test_memory_of_splash_grows_with_the_length():
    long, longer = (temporary(compiled("v5p", length)) for length in (32_768, 131_072))
    assert longer <= 1.2 * 4 * long
    # One matrix of scores for one head would take 16 GiB in bytes; all of this takes 1.4.
    assert longer <= 2048 * HEADS * 131_072 < 131_072**2 / 4


def test_segment_ids_need_no_square_either():
    program = compiled("v5p", 131_072, packed=True)
    assert temporary(program) <= 2048 * HEADS * 131_072
    assert kernels(program) == KERNELS


def test_memory_of_xla_grows_with_the_square():
    """The forward pass shows it, and compiles sooner."""
    short, longer = (temporary(compiled("v5p", n, "xla", backward=False)) for n in (1024, 4096))
    assert longer > 12 * short and longer > 2048 * HEADS * 4096


@pytest.mark.parametrize(
    "generation,head_dim,dtype",
    [
        ("v5e", 256, "float32"),
        ("v6e", 64, "bfloat16"),
        ("tpu7x", 128, "bfloat16"),
    ],
)
def test_auto_takes_splash_on_every_chip(generation, head_dim, dtype):
    """The blocks fit in its fast memory, also in float32 and with wide heads."""
    program = compiled(generation, 8192, "auto", packed=True, head_dim=head_dim, dtype=dtype)
    assert kernels(program) == KERNELS
    assert temporary(program) < HEADS * 8192**2  # a byte for each score


def test_four_chips_work_on_their_rows_and_heads_alone():
    """Rows over two, heads over two: no traffic, forward or backward."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2), chips("v5e"))
    split = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def gradients(query, key, value, cotangent, segments):
        mix = lambda *x: attend(*x, segments, mesh=mesh)
        result, pull = jax.vjp(mix, query, key, value)
        return result, pull(cotangent)

    shapes = [
        jax.ShapeDtypeStruct((2, 1024, heads, 128), jnp.bfloat16, sharding=split)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    shapes.append(jax.ShapeDtypeStruct((2, 1024), jnp.int32, sharding=rows))
    program = compile_for("v5e", gradients, *shapes)
    assert kernels(program) == KERNELS
    assert not re.findall(r"\b(?:all-|reduce-scatter|collective-)[a-z-]*\(", program.as_text())
    assert all(x.spec == split.spec for x in jax.tree.leaves(program.output_shardings))
