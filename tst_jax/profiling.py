"""A trace of some steps: `--config.profile=START:STOP`."""

import pathlib
import tempfile

import jax

FOLDER = "profile"  # in the workdir


def parse(text: str) -> tuple[int, int]:
    """(start, stop) of "START:STOP"; (0, 0) of "".

    Raises:
      ValueError: no two numbers, or no step between them.
    """
    if not text:
        return 0, 0
    start, stop = (int(part) for part in text.split(":"))
    if not 0 <= start < stop:
        raise ValueError
    return start, stop


def problems(text: str, steps: int) -> list[str]:
    """A line if `text` names no steps of a run of `steps`."""
    try:
        start, _ = parse(text)
    except ValueError:
        return [f"profile is {text!r}; give START:STOP, e.g. 100:110 for the ten steps after 100"]
    if text and start >= steps:
        return [f"profile is {text!r} and steps {steps}; a trace begins before the last step"]
    return []


class Trace:
    """What the devices and the host do from step START to step STOP, written into WORKDIR/profile.

    Of several processes the first traces itself: all do the same. A run that goes on between the
    two steps traces what is left of them.

    Args:
      text: of the setting.
      workdir: the run's, an `epath.Path`.
      silent: trace nothing.
    """

    def __init__(self, text: str, workdir, silent: bool):
        self._start, self._stop = (0, 0) if silent else parse(text)
        self._folder = workdir / FOLDER
        self._running = None  # the folder that is written to

    def at(self, step: int, log) -> None:
        """Begins or ends where it is time to, with nothing of the steps before under way.

        Args:
          step: steps done so far.
          log: of the steps, which is told to leave out the time that this takes.
        """
        due = self._start <= step < self._stop
        if due == (self._running is not None):
            return
        log.flush()
        if due:
            remote = "://" in str(self._folder)
            self._running = tempfile.mkdtemp() if remote else str(self._folder)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = (
                0  # every call of Python: steps would take half as long again
            )
            jax.profiler.start_trace(self._running, profiler_options=options)
        else:
            self.close()
        log.restart_clock()

    def close(self) -> None:
        """Writes what was traced, where a trace is under way."""
        if self._running is None:
            return
        jax.profiler.stop_trace()
        written, self._running = pathlib.Path(self._running), None
        if str(written) == str(self._folder):
            return
        for path in written.rglob("*"):  # XLA writes to disks only
            if path.is_file():
                copy = self._folder / path.relative_to(written)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
