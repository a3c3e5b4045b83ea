"""What runs on the devices: the programs of a run, how they are compiled, and where they are kept.

The trainer and the ahead-of-time check make the same programs here.
"""

import concurrent.futures
import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Callable

import jax
import numpy as np

from tst_jax import config as config_lib
from tst_jax import schedule, sharding
from tst_jax.config import Config, ConfigError
from tst_jax.kernels import dispatch
from tst_jax.models import attention
from tst_jax.train_step import (
    at_switch,
    init_state,
    key_data,
    make_eval_step,
    make_train_step,
    state_shardings,
)

# All that XLA is told beyond its defaults, by platform.
COMPILER_OPTIONS = {
    "cpu": {
        # Otherwise the optimizer's moments are copied in each step, before they are updated.
        "xla_cpu_copy_insertion_use_region_analysis": True,
    },
    "gpu": {
        # Starts communication early and waits for it late, so that matmuls run meanwhile.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # Sums in a fixed order: a resumed run ends in the same bits. Not deterministic_ops, which
        # would also end the search for the fastest matmuls.
        "xla_gpu_exclude_nondeterministic_ops": True,
    },
    "tpu": {},
}


@dataclasses.dataclass
class Programs:
    """What runs on the devices, compiled before the first step (rule 17)."""

    init: Callable  # key data -> state; with config.init_from: (key data, params) -> state
    switch: Callable  # state -> state
    steps: dict  # stage index -> (state, *batch) -> (state, metrics)
    evaluate: Callable  # (params, *batch) -> (nats, tokens)


def use_cache() -> None:
    """Keeps compiled programs in ~/.cache/tst_jax, unless JAX_COMPILATION_CACHE_DIR names a place.

    Set to nothing, it keeps none. A pod's hosts each have their own cache, or share one on gs://.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "tst_jax"
        jax.config.update("jax_compilation_cache_dir", str(folder))


def layout(config: Config, devices=None):
    """(mesh, shapes, shardings): where the state of a run lies, without allocating it.

    Args:
      config: validated.
      devices: of the mesh; None: all that there are.
    Raises:
      ConfigError: mesh, rows, kernels and attention that do not go together, one line each.
    """
    stages, found = config_lib.stages(config), []
    devices = jax.devices() if devices is None else list(devices)
    try:
        mesh = sharding.make_mesh(config.mesh, devices)
    except ValueError as error:
        found.append(str(error))
        mesh = None  # kernels and attention can be told about without it
    if mesh is not None:
        try:
            shapes, shardings = state_shardings(config, mesh)
        except ValueError as error:
            found.append(str(error))
    found.append(dispatch.problem(config.kernels, devices, config.model.dtype))
    for stage in stages:
        found.append(
            attention.problem(
                config.model.attention_backend,
                devices[0].platform,
                config.model.dtype,
                config.model.head_dim,
                stage.positions,
                packed=config.data.packing == "document",
            )
        )
    if mesh is not None:
        parts = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
        # Stages with as many rows are one problem.
        batches = {stage.rows / config.micro_batches: f"{stage.phase} rows" for stage in stages}
        for rows, name in [*batches.items(), (config.eval.rows, "eval.rows")]:
            if rows % parts:
                found.append(
                    f"{rows:g} {name} do not divide over mesh.data * mesh.fsdp * mesh.expert = "
                    f"{parts} devices; change data.rows, micro_batches, eval.rows or mesh"
                )
    found = [line for line in dict.fromkeys(found) if line]
    if found:
        raise ConfigError("\n".join(found))
    return mesh, shapes, shardings


def _batch(config, rows, tokens):
    """Shapes of a batch's fields, which a step takes as arguments."""
    fields = 2 if config.data.packing == "document" else 1
    return (jax.ShapeDtypeStruct((rows, tokens), np.int32),) * fields


def lower_step(config: Config, stage: schedule.Stage, mesh, shapes, shardings, donate=True):
    """The training step of a stage, `jax.stages.Lowered`; the state is donated, or kept."""
    batch = _batch(config, stage.rows, stage.row_tokens)
    return jax.jit(
        make_train_step(config, stage, mesh),
        in_shardings=(shardings, *[sharding.batch_sharding(mesh)] * len(batch)),
        out_shardings=(shardings, sharding.replicated(mesh)),
        donate_argnums=[0] if donate else [],
        compiler_options=COMPILER_OPTIONS[sharding.platform(mesh)],
    ).lower(shapes, *batch)


def compile_run(config: Config, stages, mesh, shapes, shardings, step, last, say) -> Programs:
    """Compiles whatever is needed from `step` to `last`, at the same time.

    Args:
      stages, shapes, shardings: of the run and its state.
      say: called with one line that names the programs and their seconds.
    """
    whole = sharding.replicated(mesh)
    lower = lambda function, *arguments, **options: jax.jit(
        function, compiler_options=COMPILER_OPTIONS[sharding.platform(mesh)], **options
    ).lower(*arguments)
    began = time.perf_counter()
    lowered = {}
    for index, stage in enumerate(stages):
        if stage.stop > step and stage.start < last:
            donate = not config.debug_nans  # which goes back to the state before a step
            lowered[index] = lower_step(config, stage, mesh, shapes, shardings, donate)
    batch = _batch(config, config.eval.rows, config.data.positions + 1)
    lowered["evaluate"] = lower(
        make_eval_step(config, mesh),
        *(shapes.params, *batch),
        in_shardings=(shardings.params, *[sharding.batch_sharding(mesh)] * len(batch)),
        out_shardings=whole,
    )
    if step == 0:
        given = (shapes.params,) if config.init_from else ()
        lowered["init"] = lower(
            lambda key, *given: init_state(config, key, *given),
            *(key_data(0), *given),
            in_shardings=(whole, *([shardings.params] if given else [])),
            out_shardings=shardings,
            donate_argnums=[1] if given else [],
        )
    if config.tst.reset_optimizer or config.tst.reinit_embedding_and_head:
        lowered["switch"] = lower(
            lambda state: at_switch(config, state),
            shapes,
            in_shardings=(shardings,),
            out_shardings=shardings,
            donate_argnums=0,
        )

    def compile_one(lowered):
        began = time.perf_counter()
        return lowered.compile(), time.perf_counter() - began

    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(lowered, pool.map(compile_one, lowered.values())))
    names = {index: f"{stage.phase} s={stage.bag_size}" for index, stage in enumerate(stages)}
    times = ", ".join(f"{names.get(name, name)} {s:.1f} s" for name, (_, s) in compiled.items())
    say(f"compiled in {time.perf_counter() - began:.1f} s: {times}")
    compiled: dict = {name: program for name, (program, _) in compiled.items()}
    unchanged = lambda state: state
    return Programs(
        compiled.pop("init", None),
        compiled.pop("switch", unchanged),
        evaluate=compiled.pop("evaluate"),
        steps=compiled,
    )
