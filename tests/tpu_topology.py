"""Compiles for a TPU without one: the compiler is in libtpu, and a topology says what to aim at.

The four topologies are the smallest that every libtpu accepts (one host of four chips); a program
is compiled for the first of them, or for all.
"""

import functools
import math

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from tst_jax import aot
from tst_jax.errors import UserError

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


@functools.cache
def chips(generation):
    """The devices of one host of a generation; skips a test without libtpu."""
    try:
        aot.prepare_compiler()
    except UserError as error:
        pytest.skip(str(error))
    return topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu").devices


def compile_for(generation, function, *shapes):
    """The compiled program of `function` for arguments of these `jax.ShapeDtypeStruct`s.

    It is for one device, unless the shapes carry shardings.
    """
    jitted = jax.jit(function)
    if all(shape.sharding is None for shape in shapes):
        mesh = jax.sharding.Mesh(np.array(chips(generation)[:1]), ("device",))
        on_device = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        jitted = jax.jit(function, in_shardings=on_device, out_shardings=on_device)
    lowered = jitted.trace(*shapes).lower(lowering_platforms=("tpu",))
    # Without a device, no program can be read back from jax's persistent cache: write none.
    option = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, option)
    jax.config.update(option, math.inf)
    try:
        return lowered.compile()
    finally:
        jax.config.update(option, before)
