"""Phases and learning rate as pure functions of the step (rules 2, 13, 14, 15)."""

import dataclasses

import jax.numpy as jnp

from tst_jax import checks, superposition

EXPAND = ("length", "batch")
_MOST_ROWS = 2**31 - 1
LARGEST_BAG = 65_536  # beyond anything that was tried; what loops over slots still ends


@dataclasses.dataclass
class TSTConfig:
    """How long to superpose, and how. `ratio = 0` is the baseline."""

    bag_size: int = 4  # s
    ratio: float = 0.3  # r: superposition runs for round(r * steps) steps
    superposition_steps: int = -1  # the same as a step count; -1: from ratio
    stages: str = ""  # several stages, "16:0.1,8:0.1,4:0.1" (bag size : fraction); "": one
    mode: str = "full"  # full; input: bags in, next token out; output: tokens in, next bag out
    objective: str = "mce"  # mce, mass, bce, hinge
    weights: str = "uniform"  # of the slots: uniform, power, exponential, first, fitted
    fitted: str = ""  # "C0,a,k" of weights=fitted; "": those of the store's data_report
    auxiliary: float = 0.0  # mode=output: next token's loss + so much of the bag's; 0: the bag's
    random_offset: bool = False  # each row's bags begin at a random one of its first s tokens
    expand: str = "length"  # a step's extra tokens as s times longer rows, or s times as many
    reset_optimizer: bool = False  # at each switch, start the optimizer state anew
    reinit_embedding_and_head: bool = False  # at each switch (the paper's Table 2 ablation)

    def fitted_constants(self) -> tuple[float, float, float]:
        """(C0, a, k) of C0 + a * i^k; the paper's where none are given.

        Raises:
          ValueError: no three finite numbers, or weights that are not all positive.
        """
        if not self.fitted:
            return superposition.FITTED
        try:
            offset, scale, exponent = (float(part) for part in self.fitted.split(","))
            slots = range(1, max(self.bag_size, 1) + 1)
            positive = all(0 < offset + scale * i**exponent < float("inf") for i in slots)
        except (ValueError, OverflowError):
            positive = False
        if not positive:
            raise ValueError(
                f"tst.fitted is {self.fitted!r}; write C0,a,k as '3.63,1.35,-1.25', such that "
                "C0 + a * i^k is above 0 for each slot i"
            )
        return offset, scale, exponent

    def problems(self) -> list[str]:
        """One line for each setting that is out of range by itself."""
        found = []
        try:
            self.fitted_constants()
        except ValueError as error:
            found.append(str(error))
        found += checks.whole("tst.bag_size", self.bag_size, 1, LARGEST_BAG)
        found += checks.real("tst.ratio", self.ratio, 1, hint=" (0 is the baseline)")
        if self.superposition_steps < -1:
            found.append(
                f"tst.superposition_steps is {self.superposition_steps}; "
                "give a step count, or -1 to derive it from tst.ratio"
            )
        if self.stages:
            try:
                parse_stages(self.stages)
            except ValueError as error:
                found.append(str(error))
        choices = {
            "mode": superposition.MODES,
            "objective": superposition.OBJECTIVES,
            "weights": superposition.WEIGHTS,
            "expand": EXPAND,
        }
        for name, allowed in choices.items():
            found += checks.choice(f"tst.{name}", getattr(self, name), allowed)
        found += checks.real("tst.auxiliary", self.auxiliary)
        if self.auxiliary and (self.mode, self.objective) != ("output", "mce"):
            found.append(
                f"tst.auxiliary is {self.auxiliary} and tst.mode {self.mode!r}, tst.objective "
                f"{self.objective!r}; a next-bag loss beside the next-token loss needs mode=output "
                "and objective=mce"
            )
        if self.random_offset and self.mode == "output":
            found.append(
                "tst.random_offset is set and tst.mode 'output', where bags begin at every token; "
                "leave it out"
            )
        return found

    def slot_weights(self, width: int):
        """Of the targets of a superposed position, float32 [width], summing to 1 (rule 12).

        With `auxiliary`, those of the next token's loss and so much of the bag's: both are losses
        of the same logits, and so their sum is one with other weights.
        """
        weights = superposition.slot_weights(self.weights, width, self.fitted_constants())
        if self.auxiliary:
            first = superposition.slot_weights("first", width)
            weights = (first + self.auxiliary * weights) / (1 + self.auxiliary)
        return weights.astype("float32")


@dataclasses.dataclass
class ScheduleConfig:
    """Warmup, stable, decay: one schedule over all steps of both phases."""

    peak_lr: float = 1e-3
    warmup_steps: int = -1  # linear from 0; -1: from warmup_fraction
    warmup_fraction: float = 0.05
    decay_fraction: float = 0.1  # of all steps, linear to 0 at the end

    def problems(self, steps: int) -> list[str]:
        """One line for each setting that gives no schedule over `steps` steps."""
        found = []
        found += checks.real("schedule.peak_lr", self.peak_lr, above=True)
        for name in ("warmup_fraction", "decay_fraction"):
            found += checks.real(f"schedule.{name}", getattr(self, name), 1)
        if self.warmup_steps < -1:
            found.append(
                f"schedule.warmup_steps is {self.warmup_steps}; give a count, or -1 to derive "
                "it from schedule.warmup_fraction"
            )
        if not found and sum(warmup_and_decay(self, steps)) > steps:
            given = "warmup_fraction" if self.warmup_steps < 0 else "warmup_steps"
            found.append(
                f"warmup and decay together are longer than the run's {steps} steps (schedule."
                f"{given} is {getattr(self, given)}, schedule.decay_fraction {self.decay_fraction})"
                "; shorten either"
            )
        return found


@dataclasses.dataclass(frozen=True)
class Stage:
    """Steps `start <= k < stop` with one bag size: what a step of them reads and computes on."""

    start: int
    stop: int
    bag_size: int
    mode: str  # "full" in recovery
    rows: int  # B of this stage
    positions: int  # L of this stage

    @property
    def phase(self) -> str:
        """`superposition`, or `recovery` (which is also what a baseline does)."""
        return "superposition" if self.bag_size > 1 else "recovery"

    @property
    def row_tokens(self) -> int:
        """Tokens that a row reads, the last target included."""
        return superposition.row_tokens(self.positions, self.bag_size, self.mode)

    @property
    def row_stride(self) -> int:
        """Tokens that a row uses up: the distance between starts of neighbouring rows."""
        return superposition.row_stride(self.positions, self.bag_size, self.mode)

    @property
    def align(self) -> int:
        """Tokens that packed documents are padded to a multiple of: what a position reads."""
        return 1 if self.mode == "output" else self.bag_size

    @property
    def step_tokens(self) -> int:
        """Data tokens that a step uses up."""
        return self.rows * self.row_stride

    @property
    def step_positions(self) -> int:
        """Positions that a step computes on: the same in every stage (rule 2)."""
        return self.rows * self.positions


def parse_stages(text: str) -> list[tuple[int, float]]:
    """`"16:0.1,4:0.2"` -> [(16, 0.1), (4, 0.2)]; ValueError if it is not of that form."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return [(int(bag), float(fraction)) for bag, fraction in pairs]
    except ValueError:
        raise ValueError(
            f"tst.stages is {text!r}; write bag sizes and fractions as '16:0.1,4:0.2'"
        ) from None


def parse_rows_from(text: str, steps: int) -> list[tuple[int, int]]:
    """`"1000:32,2000:64"` -> [(1000, 32), (2000, 64)]; ValueError if it cannot be."""
    try:
        pairs = [part.split(":") for part in text.split(",") if text]
        found = [(int(step), int(rows)) for step, rows in pairs]
    except ValueError:
        raise ValueError(
            f"data.rows_from is {text!r}; write steps and rows as '1000:32,2000:64'"
        ) from None
    rising = [0, *(step for step, _ in found), steps]
    right = all(1 <= rows <= _MOST_ROWS for _, rows in found)
    if any(a >= b for a, b in zip(rising, rising[1:])) or not right:
        raise ValueError(
            f"data.rows_from is {text!r}; steps must rise between 0 and {steps}, rows start at 1 "
            f"and end at {_MOST_ROWS}"
        )
    return found


def make_stages(
    tst: TSTConfig, steps: int, rows: int, positions: int, rows_from: str = ""
) -> list[Stage]:
    """The run's stages, recovery last; empty ones are left out (rules 13, 14).

    Args:
      tst: the method's settings, each in its range.
      steps: N, of the whole run.
      rows, positions: B and L of a recovery step.
      rows_from: "STEP:ROWS,...": other B from later steps on. Each begins a stage.
    Raises:
      ValueError: the stages do not fit each other or the run, in one line.
    """
    plan = [(tst.bag_size, tst.ratio)]
    if tst.stages and tst.superposition_steps >= 0:
        raise ValueError(
            "tst.stages and tst.superposition_steps are both set; leave one at default"
        )
    if tst.stages and tst.ratio > 0:  # ratio = 0 is the baseline whatever else is set
        plan = parse_stages(tst.stages)
    bags = [bag for bag, _ in plan]
    if min(bags) < 1 or not all(0 <= fraction <= 1 for _, fraction in plan):
        raise ValueError(
            f"tst.stages is {tst.stages!r}; bag sizes start at 1, fractions lie in 0 .. 1"
        )
    for bigger, smaller in zip(bags, bags[1:]):
        if bigger % smaller or bigger == smaller:
            raise ValueError(
                f"tst.stages goes from bag size {bigger} to {smaller}; each must be a divisor of "
                "the one before, so that the token stream goes on without a gap"
            )
    # Boundaries are rounded from the running sum, so that no step is lost between stages.
    boundaries, total = [0], 0.0
    for _, fraction in plan:
        total += fraction
        boundaries.append(round(total * steps))
    if tst.superposition_steps >= 0:
        boundaries[1] = tst.superposition_steps
    if boundaries[-1] > steps:
        raise ValueError(
            f"superposition would end at step {boundaries[-1]} of {steps}; "
            "shorten tst.superposition_steps or tst.stages, or raise steps"
        )

    stages = []
    for (bag, _), start, stop in zip(plan, boundaries, boundaries[1:]):
        if start == stop or bag == 1:
            continue
        if tst.expand == "batch" and positions % bag:
            raise ValueError(
                f"tst.expand='batch' cuts rows of {positions} positions into {bag}; "
                "make data.positions a multiple of the bag size"
            )
        shape = (rows, positions) if tst.expand == "length" else (rows * bag, positions // bag)
        stages.append(Stage(start, stop, bag, tst.mode, *shape))
    end = stages[-1].stop if stages else 0
    if end < steps:
        stages.append(Stage(end, steps, 1, "full", rows, positions))
    for step, changed in parse_rows_from(rows_from, steps):
        # Rows of a stage may be a multiple of B, with expand="batch".
        later = [dataclasses.replace(s, rows=s.rows // rows * changed) for s in stages]
        stages = [
            part
            for stage, other in zip(stages, later)
            for part in (
                dataclasses.replace(stage, stop=min(stage.stop, step)),
                dataclasses.replace(other, start=max(stage.start, step)),
            )
            if part.start < part.stop
        ]
        rows = changed
    return stages


def warmup_and_decay(cfg: ScheduleConfig, steps: int) -> tuple[int, int]:
    """Lengths of the first and last part of the schedule, in steps."""
    decay = round(cfg.decay_fraction * steps)
    if cfg.warmup_steps >= 0:
        return cfg.warmup_steps, decay
    warmup = round(cfg.warmup_fraction * steps)
    if cfg.warmup_fraction + cfg.decay_fraction <= 1 + 1e-9:
        decay = min(decay, steps - warmup)  # both halves may have been rounded up
    return warmup, decay


def learning_rate(cfg: ScheduleConfig, steps: int, step):
    """Learning rate of step `step` (0-based; int or traced), float32.

    Reaches its peak on the last step of the warmup and is peak / decay length on the last step.
    """
    warmup, decay = warmup_and_decay(cfg, steps)
    rise = (step + 1) / max(warmup, 1)
    fall = (steps - step) / max(decay, 1)
    return cfg.peak_lr * jnp.minimum(jnp.minimum(rise, fall), 1.0).astype(jnp.float32)
