"""What a run writes while it goes: metrics.jsonl, TensorBoard events, and a line for the eye."""

import json
import math
import sys
import time

import numpy as np
import tensorboardX
import tqdm
from etils import epath
from tensorboardX.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]

from tst_jax.errors import UserError


class Writer:
    """Appends to `metrics.jsonl` (one JSON object a line) and to TensorBoard events.

    Args:
      workdir: of the run; a folder or gs://...
      resume_step: lines of later steps are dropped: those steps will run again.
      silent: writes nothing; for all processes of a run but the first.
    """

    def __init__(self, workdir, resume_step: int = 0, silent: bool = False):
        self._file = self._events = None
        if silent:
            return
        workdir = epath.Path(workdir)
        kept = [line for line in read_metrics(workdir) if line["step"] <= resume_step]
        self._file = Appended(workdir / "metrics.jsonl", [json.dumps(line) for line in kept])
        self._events = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=resume_step + 1
        )

    def write(self, line: dict) -> None:
        """`line` has `step`; its other plain numbers become TensorBoard scalars."""
        if self._file is None:
            return
        self._file.append(json.dumps(line))
        # One event for all: `add_scalar` takes nine times as long, in the thread that trains.
        numbers = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in line.items()
            if name != "step" and isinstance(value, int | float)
        ]
        self._events.file_writer.add_summary(Summary(value=numbers), line["step"])

    def flush(self) -> None:
        """All lines so far lie where a resumed run looks for them."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._events.close()


class Appended:
    """A text file that begins with `lines` and grows; whole at any time.

    A bucket cannot append: there it is written anew, every 30 seconds and whenever it is flushed.
    """

    def __init__(self, path, lines):
        self._path, self._lines = path, list(lines)
        self._written = time.monotonic()
        self._remote = "://" in str(path)
        text = "".join(line + "\n" for line in self._lines)
        partial = path.parent / (path.name + ".partial")
        (path if self._remote else partial).write_text(text)
        if not self._remote:
            partial.replace(path)
            self._file = open(path, "a")

    def append(self, line):
        if not self._remote:
            self._file.write(line + "\n")
            self._file.flush()
            return
        self._lines.append(line)
        if time.monotonic() - self._written > 30:
            self.flush()

    def flush(self):
        if self._remote:
            self._path.write_text("".join(line + "\n" for line in self._lines))
            self._written = time.monotonic()

    def close(self):
        self.flush()
        if not self._remote:
            self._file.close()


def read_metrics(workdir) -> list[dict]:
    """The lines of a run's metrics.jsonl; a last one that a kill cut off is left out.

    Raises:
      UserError: another line is not what was written.
    """
    path = epath.Path(workdir) / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = []
    for number, line in enumerate(lines):
        try:
            found.append(json.loads(line))
            found[-1]["step"]
        except (ValueError, KeyError, TypeError):
            if number + 1 < len(lines):
                raise UserError(
                    f"{path}, line {number + 1} is damaged: {line[:80]!r}; take it out, and the "
                    "same command goes on"
                ) from None
            del found[number:]
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
      seconds: at least between plain lines, of which the first step has one.
      silent: says nothing; for all processes of a run but the first.
    """

    def __init__(
        self, title: str, start: int, stop: int, seconds: float = 10.0, silent: bool = False
    ):
        self._title, self._stop, self._seconds, self._silent = title, stop, seconds, silent
        self._first = None  # (time, step) of the first update: compiling is no step
        self._last = time.monotonic()
        self._bar = None
        if sys.stderr.isatty() and not silent:
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
        if self._silent:
            return
        now = time.monotonic()
        begins = self._first is None
        self._first = self._first or (now, step)
        if now - self._last < self._seconds and step != self._stop and not begins:
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
        elif not self._silent:
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
