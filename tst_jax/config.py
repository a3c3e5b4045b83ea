"""The settings of a run, and what is checked about them before anything is compiled or written.

Each part of `Config` is defined beside the code that it configures. A run is a Python file with
`get_config() -> Config` that names what differs from the defaults (see `configs/`).
"""

import dataclasses

from tst_jax import schedule
from tst_jax.data.settings import DataConfig
from tst_jax.errors import UserError
from tst_jax.guard import NumbersConfig
from tst_jax.hosts import HostsConfig
from tst_jax.kernels import dispatch
from tst_jax.models.shapes import ModelConfig
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig
from tst_jax.sharding import MeshConfig


class ConfigError(UserError):
    """Settings that cannot work; the message has one line a problem."""


@dataclasses.dataclass
class EvalConfig:
    """The held-out next-token loss: the only one that compares with a baseline (rule 11)."""

    every: int = 250  # steps; also at each switch and at the end. 0: only at the end
    tokens: int = 65_536  # how much of the held-out split, in rows spread evenly over it; 0: all
    rows: int = 32  # rows of an evaluation batch


@dataclasses.dataclass
class CheckpointConfig:
    """When to save beside the switch, the stop and the end, and how many of those to keep."""

    every: int = 500  # steps; 0: only at the switch, at a stop and at the end
    keep: int = 2  # the last ones; checkpoints at a switch are always kept
    keep_every: int = 0  # of a multiple of so many steps are kept for good, too; 0: none


@dataclasses.dataclass
class Config:
    """A run. Two configs that differ only in HARMLESS fields train the same parameters."""

    seed: int = 0  # of the initial parameters and of the order of the data
    steps: int = 1000  # N, over both phases
    stop_after: int = -1  # end cleanly, with a checkpoint, once so many steps are done; -1: never
    log_every: int = 10  # steps between lines of metrics.jsonl
    init_from: str = ""  # folder of a Hugging Face model to start from; "": random parameters
    micro_batches: int = 1  # parts of a step's rows, one after the other: less memory, same numbers
    loss_chunk: int = 1024  # positions whose logits exist at a time, on each device
    debug_nans: bool = False  # look for the first step that is not finite; writes nothing
    kernels: str = "auto"  # of bag mean and loss: auto, xla, pallas, interpret (kernels/README.md)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    tst: TSTConfig = dataclasses.field(default_factory=TSTConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = dataclasses.field(default_factory=ScheduleConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    numbers: NumbersConfig = dataclasses.field(default_factory=NumbersConfig)


HARMLESS = (
    *("stop_after", "log_every", "micro_batches", "kernels", "debug_nans"),
    *("model.attention_backend", "model.remat"),
    *("data.store", "data.verify", "data.prefetch", "data.max_epochs"),
    *("mesh", "hosts", "eval", "checkpoint", "numbers"),
)


def stages(config: Config) -> list[schedule.Stage]:
    """The run's stages, from the final settings (rule 14)."""
    data = config.data
    return schedule.make_stages(config.tst, config.steps, data.rows, data.positions, data.rows_from)


def problems(config: Config) -> list[str]:
    """One line for each setting that cannot work, by itself or beside the others."""
    found = _wrong_types(config)
    if found:
        return found
    at_least = {
        "seed": 0,
        "steps": 1,
        "log_every": 1,
        "micro_batches": 1,
        "loss_chunk": 1,
        "data.rows": 1,
        "data.positions": 1,
        "data.prefetch": 0,
        "eval.every": 0,
        "eval.tokens": 0,
        "eval.rows": 1,
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "checkpoint.keep_every": 0,
    }
    values = flatten(config)
    for name, least in at_least.items():
        if values[name] < least:
            found.append(f"{name} is {values[name]}; it must be at least {least}")
    if config.seed >= 2**32:
        found.append(f"seed is {config.seed}; it must be below 2**32")
    if config.stop_after != -1 and not 1 <= config.stop_after <= config.steps:
        found.append(
            f"stop_after is {config.stop_after}; give a step of 1 .. {config.steps} (steps), or -1"
        )
    if config.kernels not in dispatch.CHOICES:
        found.append(f"kernels is {config.kernels!r}; choose one of {', '.join(dispatch.CHOICES)}")
    found += config.data.problems()
    found += config.model.problems() + config.tst.problems() + config.optimizer.problems()
    longest = config.model.max_positions
    if config.model.positions == "learned" and config.data.positions > longest > 0:
        found.append(
            f"data.positions is {config.data.positions} and model.max_positions {longest}; learned "
            "positions end there"
        )
    found += config.mesh.problems() + config.hosts.problems() + config.numbers.problems()
    if config.steps >= 1:
        found += config.schedule.problems(config.steps)
    if not found:
        try:
            for stage in stages(config):
                if stage.rows % config.micro_batches:
                    raise ValueError(
                        f"a step of {stage.phase} has {stage.rows} rows, no multiple of "
                        f"micro_batches {config.micro_batches}; change data.rows, data.rows_from "
                        "or micro_batches"
                    )
        except ValueError as error:
            found.append(str(error))
    return found


def _wrong_types(config: Config) -> list[str]:
    found = []
    for name, default in flatten(Config()).items():
        value, wanted = flatten(config).get(name), type(default)
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            found.append(f"{name} is {value!r}; it must be of type {wanted.__name__}")
    return found


def validate(config: Config) -> None:
    """Raises ConfigError with all problems at once."""
    found = problems(config)
    if found:
        raise ConfigError("\n".join(found))


def flatten(config) -> dict:
    """{"steps": 1000, "tst.ratio": 0.3, ...}, in the order of the fields; also of a nested dict."""
    tree = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else config
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": v for inner, v in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def differences(old: dict, new: dict, harmless: bool = False) -> list[str]:
    """Lines "name: old -> new" for fields of two configs (as nested dicts) that differ.

    Leaves out the HARMLESS ones, which change no trained parameter, unless they are asked for.
    """
    old, new = flatten(old), flatten(new)
    lines = []
    for name in old | new:
        if not harmless and any(name == h or name.startswith(h + ".") for h in HARMLESS):
            continue
        if old.get(name) != new.get(name):
            lines.append(f"{name}: {old.get(name, '(absent)')} -> {new.get(name, '(absent)')}")
    return lines
