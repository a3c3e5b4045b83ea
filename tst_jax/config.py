"""The settings of a run, and what is checked about them before anything is compiled or written.

Each part of `Config` is defined beside the code that it configures. A run is a Python file with
`get_config() -> Config` that names what differs from the defaults (see `configs/`).
"""

import dataclasses
import re

from tst_jax import checks, profiling, schedule
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
    profile: str = ""  # "START:STOP": a trace of the steps after START up to STOP; "": none
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

    @property
    def last(self) -> int:
        """The step to end at: `stop_after`, if it is set."""
        return self.steps if self.stop_after < 0 else self.stop_after


LARGEST = 2**31 - 1  # of an integer setting: steps, rows and sizes are int32 on the devices

HARMLESS = (
    *("stop_after", "log_every", "micro_batches", "kernels", "debug_nans", "profile"),
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
    if not isinstance(config, Config):
        return [f"the config is a {type(config).__name__}; it must be a tst_jax.config.Config"]
    found, replaced = [], set()
    config = _sound(config, Config(), "", found, replaced)
    lines = _by_itself(config) + _beside_others(config, replaced)
    # What stands in for a setting that is not even of its type is nothing to complain about.
    lines = [line for line in lines if not any(_mentions(line, name) for name in replaced)]
    return found + list(dict.fromkeys(lines))


def _sound(part, wanted, path: str, found: list[str], replaced: set[str]):
    """A copy of `part` with the values of `wanted` in place of those that are not of their type.

    Args:
      path: in front of the fields' names, "tst.".
      found: takes a line for each of them, and for each attribute that is no field.
      replaced: takes their names.
    """
    names = [field.name for field in dataclasses.fields(wanted)]
    for name, value in vars(part).items():
        if name not in names:
            hint = checks.did_you_mean(name, names, before=path) or checks.did_you_mean(
                name, flatten(Config()), "; tst_jax.settings lists all"
            )
            found.append(f"{path}{name} is no setting (it was set to {checks.show(value)}){hint}")
    values = {}
    for name in names:
        value, default = getattr(part, name, None), getattr(wanted, name)
        whole, kind = f"{path}{name}", type(default)
        most = LARGEST if kind is int else checks.HUGE
        if dataclasses.is_dataclass(default) and type(value) is kind:
            value = _sound(value, default, f"{whole}.", found, replaced)
        elif type(value) is not kind and not (kind is float and type(value) is int):
            article = "a" if dataclasses.is_dataclass(default) else "of type"
            has = f"{checks.show(value)} ({_kind(value)})"
            found.append(f"{whole} is {has}; it must be {article} {kind.__name__}")
            replaced.add(whole)
            value = default
        elif kind is str and not value.isprintable():
            found.append(f"{whole} is {checks.show(value)}; it must be text that can be printed")
            replaced.add(whole)
            value = default
        elif type(value) is int and whole != "seed" and abs(value) > most:
            limit = f"{'at most ' if value > 0 else 'at least -'}{most:.10g}"
            found.append(f"{whole} is {checks.show(value)}; it must be {limit}")
            replaced.add(whole)
            value = default
        values[name] = value
    return type(wanted)(**values)


def _kind(value) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _mentions(line: str, name: str) -> bool:
    """Whether a line is about a setting, or about one inside it."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", line) is not None


def _by_itself(config: Config) -> list[str]:
    """Lines for settings that are out of their own range."""
    at_least = {
        "steps": 1,
        "log_every": 1,
        "micro_batches": 1,
        "loss_chunk": 1,
        "eval.every": 0,
        "eval.tokens": 0,
        "eval.rows": 1,
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "checkpoint.keep_every": 0,
    }
    values = flatten(config)
    found = checks.whole("seed", config.seed, 0, 2**32 - 1)
    for name, least in at_least.items():
        found += checks.whole(name, values[name], least)
    found += checks.choice("kernels", config.kernels, dispatch.CHOICES)
    parts = (config.data, config.model, config.tst, config.optimizer, config.mesh, config.hosts)
    for part in (*parts, config.numbers):
        found += part.problems()
    return found


def _beside_others(config: Config, replaced: set[str]) -> list[str]:
    """Lines for settings that do not go together.

    Args:
      replaced: names of settings whose values are not the user's.
    """
    found, steps, data, tst = [], config.steps, config.data, config.tst
    if steps >= 1:
        found += config.schedule.problems(steps)
        found += profiling.problems(config.profile, steps)
        if config.stop_after != -1 and not 1 <= config.stop_after <= steps:
            found.append(
                f"stop_after is {config.stop_after}; give a step of 1 .. {steps} (steps), or -1"
            )
    elif config.stop_after < -1:
        found.append(f"stop_after is {config.stop_after}; give a step, or -1")
    longest = config.model.max_positions
    if config.model.positions == "learned" and data.positions > longest > 0:
        found.append(
            f"data.positions is {data.positions} and model.max_positions {longest}; learned "
            "positions end there"
        )
    every, kept = config.checkpoint.every, config.checkpoint.keep_every
    if kept > 0 and every >= 0 and (every == 0 or kept % every):
        found.append(
            f"checkpoint.keep_every is {kept} and checkpoint.every {every}; of what is saved, none "
            "or not each would be kept: make keep_every a multiple of every, or 0"
        )
    if tst.ratio == 0 and tst.superposition_steps > 0:
        found.append(
            f"tst.ratio is 0 (the baseline) and tst.superposition_steps {tst.superposition_steps}; "
            "set tst.superposition_steps to -1, or tst.ratio above 0"
        )
    if tst.random_offset and data.packing == "document":
        found.append(
            "tst.random_offset is set and data.packing 'document', where bags begin with a "
            "document; set either"
        )
    # Stages can be made of settings that are each in their range.
    shape = (steps, data.rows, data.positions)
    theirs = ("steps", "data.rows", "data.rows_from", "data.positions")
    given = not any(name.startswith("tst") or name in (*theirs, "data") for name in replaced)
    if given and not tst.problems() and all(size >= 1 for size in shape):
        found += _stage_problems(config)
    return found


def _stage_problems(config: Config) -> list[str]:
    try:
        made = stages(config)
    except ValueError as error:
        return [str(error)]
    found, tst, parts = [], config.tst, config.micro_batches
    asked = tst.ratio > 0 and tst.superposition_steps < 0
    bags = [bag for bag, _ in schedule.parse_stages(tst.stages)] if tst.stages else [tst.bag_size]
    if asked and max(bags) > 1 and all(stage.bag_size == 1 for stage in made):
        what = f"tst.stages is {tst.stages!r}" if tst.stages else f"tst.ratio is {tst.ratio}"
        found.append(
            f"{what} and steps {config.steps}: less than half a step would be superposed; raise "
            "either, or set tst.ratio=0 for the baseline"
        )
    uneven = [stage for stage in made if parts >= 1 and stage.rows % parts]
    if uneven:
        found.append(
            f"a step of {uneven[0].phase} has {uneven[0].rows} rows, no multiple of micro_batches "
            f"{parts}; change data.rows, data.rows_from or micro_batches"
        )
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
