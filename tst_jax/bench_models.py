"""What the published shapes reach on one card: both phases' steps, and the head's share of them."""

import concurrent.futures
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from tst_jax import config as config_lib
from tst_jax import flops, programs, sharding, superposition
from tst_jax.config import Config
from tst_jax.data.settings import DataConfig
from tst_jax.models import shapes
from tst_jax.models.shapes import ModelConfig
from tst_jax.schedule import TSTConfig
from tst_jax.train_step import init_state, key_data

CHUNKS = 1024, 4096  # of the loss, of which the faster is taken


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, and batches to try, each as (rows, remat)."""

    name: str
    model: ModelConfig
    bag_size: int
    positions: int
    batches: tuple[tuple[int, str], ...]


def _layers(model: ModelConfig, layers: int) -> ModelConfig:
    return dataclasses.replace(model, layers=layers)


_DENSE = (16, "none"), (32, "dots"), (32, "full")
# In this order, because the time may not suffice for all. Those that are cut hold as much of a card
# as fits with their optimizer; their layers are whole.
CASES = (
    Case("dense_600m", shapes.dense_600m(), 6, 2048, _DENSE),
    Case("dense_3b, 12 of 36 layers", _layers(shapes.dense_3b(), 12), 6, 2048, _DENSE),
    Case(
        "moe_10b_a1b, 6 of 32 layers",
        _layers(shapes.moe_10b_a1b(), 6),
        16,
        8192,
        ((4, "dots"), (8, "dots"), (8, "full")),
    ),
    Case("dense_270m", shapes.dense_270m(), 6, 2048, _DENSE),
)


def config_of(case: Case, rows: int, remat: str, chunk: int, bag_size: int) -> Config:
    """A run of nothing but steps of one bag size."""
    return Config(
        steps=100,
        model=dataclasses.replace(case.model, remat=remat),
        data=DataConfig(store="none", rows=rows, positions=case.positions),
        tst=TSTConfig(bag_size=bag_size, ratio=1.0 if bag_size > 1 else 0.0),
        loss_chunk=chunk,
    )


def lower(config: Config, devices=None):
    """(the step, lowered; its stage; mesh, shapes and shardings of its state)."""
    config_lib.validate(config)
    layout = programs.layout(config, devices)
    (stage,) = config_lib.stages(config)
    return programs.lower_step(config, stage, *layout), stage, layout


def head_of(case: Case, rows: int, chunk: int, bag_size: int):
    """(value and gradients of the loss alone, shapes of its arguments) for a step's positions."""
    model, places = case.model, (rows, case.positions)

    def loss(hidden_BxLxD, head_VxD, targets_BxLxS):
        total, weight = superposition.bag_loss(hidden_BxLxD, head_VxD, targets_BxLxS, chunk=chunk)
        return total / weight

    arguments = (
        jax.ShapeDtypeStruct((*places, model.width), model.dtype),
        jax.ShapeDtypeStruct((model.vocab_size, model.width), np.float32),
        jax.ShapeDtypeStruct((*places, bag_size), np.int32),
    )
    return jax.value_and_grad(loss, (0, 1)), arguments


# --- Timing --------------------------------------------------------------


def run(cases, options) -> dict:
    """Times the cases one after the other, and prints a line for each.

    A program takes a warm-up and `options.rounds` rounds, in turn with those that it is compared
    with. What a card's compiler or memory refuses is left out, with the reason.

    Returns:
      {"device", "jax", "models"}; of each model: name, layers, positions (of a row), tried: rows,
      remat, positions_per_second or refused; and of the fastest of these rows, remat, loss_chunk
      and, for bag sizes 1 and that of the paper, bag_size, step_seconds, mfu (whole attention
      scores counted; None where the peak is not known), peak_bytes, head_seconds and head_share:
      of the loss with both gradients, alone and as a part of the step.
    """
    device, began = jax.devices()[0], time.monotonic()
    found = {"device": device.device_kind, "jax": jax.__version__, "models": []}
    for case in cases:
        if time.monotonic() - began > options.limit_s:
            print(f"--limit_s={options.limit_s:g} is over; left out: {case.name}")
            continue
        found["models"].append(_measure(case, options.rounds))
        print(line_of(found["models"][-1]), flush=True)
    return found


def _measure(case: Case, rounds: int) -> dict:
    found = {"name": case.name, "layers": case.model.layers, "positions": case.positions}
    most = max(rows for rows, _ in case.batches)
    heads = {chunk: _Head(case, most, chunk, 1) for chunk in CHUNKS}
    times = _in_turn(heads, rounds)
    chunk = min(times, key=lambda chunk: times[chunk])
    del heads  # and their arrays
    configs = [config_of(case, *batch, chunk, 1) for batch in case.batches]
    state = _State(configs[0])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        steps = list(pool.map(_step_or_reason, configs))
    found["tried"], speed = [], {}
    for config, step in zip(configs, steps):
        tried = {"rows": config.data.rows, "remat": config.model.remat}
        found["tried"].append(tried)
        if isinstance(step, _Step):
            try:
                seconds = _in_turn({0: lambda step=step: state.take(step)}, rounds)[0]
            except jax.errors.JaxRuntimeError as error:
                step = _reason(error)
                state = _State(configs[0])  # the old one was given to the step
        if isinstance(step, str):
            tried["refused"] = step
            continue
        tried["positions_per_second"] = step.stage.step_positions / seconds
        speed[tried["positions_per_second"]] = config, step
    if not speed:
        return found
    config, baseline = speed[max(speed)]
    rows, remat = config.data.rows, config.model.remat
    superposed = _Step(config_of(case, rows, remat, chunk, case.bag_size))
    heads = {s: _Head(case, rows, chunk, s) for s in (1, case.bag_size)}
    by_size = {1: baseline, case.bag_size: superposed}
    runs = {("step", s): (lambda step=step: state.take(step)) for s, step in by_size.items()}
    runs |= {("head", s): head for s, head in heads.items()}
    times = _in_turn(runs, rounds)
    peak = flops.device_peak_flops(jax.devices()[0].device_kind)
    found |= {"rows": rows, "remat": remat, "loss_chunk": chunk, "phases": []}
    work = flops.step_flops(config.model, rows, case.positions, causal=False)
    for s, step in by_size.items():
        seconds, head_seconds = times["step", s], times["head", s]
        found["phases"].append(
            {
                "bag_size": s,
                "step_seconds": seconds,
                "mfu": work / seconds / (peak * jax.device_count()) if peak else None,
                "peak_bytes": step.peak_bytes,
                "head_seconds": head_seconds,
                "head_share": head_seconds / seconds,
            }
        )
    return found


class _Step:
    """A compiled step and a batch for it."""

    def __init__(self, config):
        lowered, self.stage, (mesh, self.shapes, _) = lower(config)
        self.program = lowered.compile()
        memory = self.program.memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        self.peak_bytes = held - memory.alias_size_in_bytes + memory.temp_size_in_bytes
        size = self.stage.rows, self.stage.row_tokens
        ids = np.random.default_rng(0).integers(0, config.model.vocab_size, size, np.int32)
        self.tokens = jax.device_put(ids, sharding.batch_sharding(mesh))


class _State:
    """Of a model, which steps of all its settings take and give back."""

    def __init__(self, config):
        _, _, shardings = programs.layout(config)
        make = jax.jit(lambda key: init_state(config, key), out_shardings=shardings)
        self._leaves = jax.tree.leaves(make(key_data(0)))

    def take(self, step: _Step):
        # A state knows the settings of its model, such as remat; its arrays are the same.
        state = jax.tree.unflatten(jax.tree.structure(step.shapes), self._leaves)
        state, metrics = step.program(state, step.tokens)
        self._leaves = jax.tree.leaves(state)
        return metrics


class _Head:
    """The loss of a step alone, with its gradients, compiled, on arrays drawn at random."""

    def __init__(self, case, rows, chunk, bag_size):
        function, shapes = head_of(case, rows, chunk, bag_size)
        keys = jax.random.split(jax.random.key(0), 3)
        hidden, head = (jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, shapes[:2]))
        targets = jax.random.randint(keys[2], shapes[2].shape, 0, case.model.vocab_size)
        self._arrays = hidden, head * jnp.float32(0.02), targets
        self._program = jax.jit(function).lower(*self._arrays).compile()

    def __call__(self):
        return self._program(*self._arrays)


def _step_or_reason(config):
    try:
        return _Step(config)
    except jax.errors.JaxRuntimeError as error:  # does not fit, mostly
        return _reason(error)


def _reason(error) -> str:
    return str(error).splitlines()[0][:300]


def _in_turn(runs: dict, rounds: int) -> dict:
    """Median seconds of each, after one round to warm up."""
    seconds = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, function in runs.items():
            began = time.perf_counter()
            jax.block_until_ready(function())
            if number:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def line_of(found: dict) -> str:
    """A model's figures for the eye."""
    lines = [f"{found['name']}, rows of {found['positions']} positions:"]
    for tried in found["tried"]:
        speed = tried.get("positions_per_second")
        what = f"{speed:,.0f} positions/s" if speed else f"refused: {tried['refused']}"
        lines.append(f"  {tried['rows']} rows, remat {tried['remat']}: {what}")
    for phase in found.get("phases", []):
        mfu = f", MFU {phase['mfu']:.1%}" if phase["mfu"] else ""
        lines.append(
            f"  s={phase['bag_size']}, {found['rows']} rows, remat {found['remat']}, chunks of "
            f"{found['loss_chunk']}: {1e3 * phase['step_seconds']:.1f} ms a step{mfu}, peak "
            f"{phase['peak_bytes'] / 2**30:.1f} GiB, head and loss {phase['head_share']:.0%} of it"
        )
    return "\n".join(lines)
