"""What a run writes while it goes: metrics.jsonl, TensorBoard events, and a line for the eye."""

import json
import math
import os
import pathlib
import sys
import time

import numpy as np
import tensorboardX
import tqdm


class Writer:
    """Appends to `metrics.jsonl` (one JSON object a line) and to TensorBoard events.

    Args:
      workdir: of the run.
      resume_step: lines of later steps are dropped: those steps will run again.
    """

    def __init__(self, workdir, resume_step: int = 0):
        self._path = pathlib.Path(workdir) / "metrics.jsonl"
        kept = [line for line in read_metrics(workdir) if line["step"] <= resume_step]
        partial = self._path.with_suffix(".jsonl.partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, self._path)
        self._file = open(self._path, "a")
        self._events = tensorboardX.SummaryWriter(
            str(pathlib.Path(workdir) / "tensorboard"), purge_step=resume_step + 1
        )

    def write(self, line: dict) -> None:
        """`line` has `step`; its other plain numbers become TensorBoard scalars."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float):
                self._events.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._file.close()
        self._events.close()


def read_metrics(workdir) -> list[dict]:
    """The lines of a run's metrics.jsonl; a last one that a kill cut off is left out."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            if number + 1 < len(lines):
                raise ValueError(f"{path}, line {number + 1} is not JSON: {line[:80]!r}") from None
    return found


def of_experts(values: dict) -> dict:
    """What a line says of the experts, from a step's metrics; empty for a dense model.

    The least and the most loaded expert of any layer, where 1 is an even share, and all shares,
    [layers, E], to three digits.
    """
    if "expert_load" not in values:
        return {}
    load = np.asarray(values["expert_load"])
    return {
        "router_loss": values["router_loss"],
        "expert_load_min": float(load.min() * load.shape[-1]),
        "expert_load_max": float(load.max() * load.shape[-1]),
        "expert_load": [[float(f"{share:.3g}") for share in layer] for layer in load],
    }


class Progress:
    """On a terminal a bar with phase, loss, rate and time left; else a plain line now and then.

    Args:
      title: of the run, in front.
      start, stop: steps done so far, and to be done.
      seconds: at least between plain lines.
    """

    def __init__(self, title: str, start: int, stop: int, seconds: float = 10.0):
        self._title, self._stop, self._seconds = title, stop, seconds
        self._first = None  # (time, step) of the first update: compiling is no step
        self._last = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(
                total=stop, initial=start, desc=title, unit="step", dynamic_ncols=True
            )

    def update(self, step: int, phase: str, **values) -> None:
        """`step` steps are done. `values` are shown as they are named."""
        text = ", ".join(f"{k.replace('_', ' ')} {_short(v)}" for k, v in values.items())
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(f"{phase}, {text}", refresh=False)
            return
        now = time.monotonic()
        self._first = self._first or (now, step)
        if now - self._last < self._seconds and step != self._stop:
            return
        self._last = now
        line = f"{self._title}: step {step}/{self._stop}, {phase}, {text}"
        if step > self._first[1]:
            left = (now - self._first[0]) / (step - self._first[1]) * (self._stop - step)
            line += f", {int(left // 60)}:{int(left % 60):02d} left"
        print(line, flush=True)

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._bar is not None:
            self._bar.write(f"{self._title}: {text}")
        else:
            print(f"{self._title}: {text}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _short(value) -> str:
    if isinstance(value, str):
        return value
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.2e}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
