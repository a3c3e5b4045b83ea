"""What a run does about its own numbers: losses that are not finite, and losses that jump."""

import dataclasses
import math

from tst_jax import checks
from tst_jax.errors import UserError

POLICIES = ("stop", "skip")

# Steps at the start of a stage that give no warning: the loss begins high there and falls quickly,
# from log V or by the 1 to 2 nats of the switch (rule 18), and nothing is known of its noise yet.
GRACE = 30
# Steps that the mean and the deviation are taken over, once there are so many.
MEAN_STEPS, DEVIATION_STEPS = 50, 100
# Nats. A lower jump is no spike however calm the loss was before: it is a tenth of the likelihood
# of a token, less than the smoothest runs lose and regain between neighbouring batches.
LEAST_SPIKE = 0.1
# Steps that a spike may last. A loss that is high for longer has found a new level.
LONGEST_SPIKE = 50


class TrainingError(UserError):
    """A loss or gradient is not finite and the policy ends the run; no parameter has it."""


@dataclasses.dataclass
class NumbersConfig:
    """A loss or gradient that is not finite changes no parameter; then the run stops or goes on."""

    nonfinite: str = "stop"  # stop; skip: the batch is left out, up to `skips` times
    skips: int = 10  # of the whole run
    spike: float = 6.0  # warn of a loss so many deviations above the last ones; 0: never

    def problems(self) -> list[str]:
        """One line for each setting that cannot work."""
        found = checks.choice("numbers.nonfinite", self.nonfinite, POLICIES)
        found += checks.whole("numbers.skips", self.skips, 0)
        return found + checks.real("numbers.spike", self.spike)


@dataclasses.dataclass
class _Statistics:
    """Of the losses of one stage, spikes left out. Plain numbers: a checkpoint keeps them.

    A falling loss is never a spike. Its mean lags above it, and its deviation comes from the
    differences of neighbouring losses, which a slope hardly touches.
    """

    stage: int = -1  # first step of the stage
    count: int = 0  # losses that have been added
    usual: float = 0.0  # their mean, nats
    square: float = 0.0  # mean square of the differences of neighbours: twice the variance
    last: float = 0.0  # the last loss that was added
    spike_steps: int = 0  # so long has the present spike lasted; 0: there is none

    @property
    def deviation(self) -> float:
        """Nats."""
        return math.sqrt(self.square / 2)

    def add(self, loss: float) -> None:
        # Losses fall like a power of the steps: early on, only the last quarter is a guide to the
        # next. The deviation, which changes little, is better known from half of them.
        self.usual += (loss - self.usual) * max(1 / MEAN_STEPS, min(1, 4 / (self.count + 1)))
        if self.count:
            share = max(1 / DEVIATION_STEPS, min(1, 2 / (self.count + 1)))
            self.square += ((loss - self.last) ** 2 - self.square) * share
        self.last, self.count = loss, self.count + 1


class Guard:
    """What is to be done and said about the numbers of each step, one step after the other.

    Args:
      config: the policy.
      state: of an earlier process of the run, from `state()`; None: the run begins.
    """

    def __init__(self, config: NumbersConfig, state: dict | None = None):
        state = dict(state or {})
        self._config = config
        self._skips = state.pop("skips", 0)
        self._losses = _Statistics(**state)

    def state(self) -> dict:
        """Plain numbers; a guard that is made from them gives the same events from here on."""
        return {"skips": self._skips, **dataclasses.asdict(self._losses)}

    def read(self, step: int, stage, loss: float, grad_norm: float, finite: bool) -> list[dict]:
        """Events of a step; to be called with all of them, in their order.

        Args:
          step: the number of steps done: 1 after the first.
          stage: its `schedule.Stage`.
          loss, grad_norm, finite: the step's metrics.
        Returns:
          `{"event": "skipped", "step", "loss", "grad_norm", "skips"}`, both numbers as text, for a
          batch that was left out, `skips` of them by now; `{"event": "loss_spike", "step", "loss",
          "usual", "deviation"}`, in nats, at the first step of a spike.
        Raises:
          TrainingError: the policy ends the run.
        """
        if self._losses.stage != stage.start:
            self._losses = _Statistics(stage.start)
        if finite:
            return self._spikes(step, loss)
        found = f"loss {loss} and gradient norm {grad_norm} at step {step}"
        if self._config.nonfinite == "stop":
            raise TrainingError(
                f"{found}; no parameter was changed by it and the last checkpoint is good. "
                "--config.numbers.nonfinite=skip leaves such batches out, --config.debug_nans "
                "shows where it comes from"
            )
        if self._skips >= self._config.skips:
            raise TrainingError(
                f"{found}, after numbers.skips={self._config.skips} batches that were left out; no "
                "parameter was changed by it and the last checkpoint is good. Raise "
                "--config.numbers.skips, or see with --config.debug_nans where it comes from"
            )
        self._skips += 1
        texts = {"loss": str(loss), "grad_norm": str(grad_norm)}
        return [{"event": "skipped", "step": step, **texts, "skips": self._skips}]

    def _spikes(self, step, loss):
        seen, spike = self._losses, self._config.spike
        above, limit = loss - seen.usual, max(spike * seen.deviation, LEAST_SPIKE)
        # A spike has ended once the loss is half-way back: one that hovers at the limit is one.
        if not spike or seen.count < GRACE or above <= (limit / 2 if seen.spike_steps else limit):
            seen.spike_steps = 0
            seen.add(loss)
            return []
        usual, deviation = seen.usual, seen.deviation
        seen.spike_steps += 1
        if seen.spike_steps > LONGEST_SPIKE:
            self._losses = _Statistics(seen.stage)  # a new level, to be learnt anew
            self._losses.add(loss)
        if seen.spike_steps > 1:
            return []
        event = {"event": "loss_spike", "step": step, "loss": loss}
        return [event | {"usual": usual, "deviation": deviation}]
