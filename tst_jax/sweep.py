"""Trains every cell of a grid of settings, and says which is best and how sure that is.

    python -m tst_jax.sweep --config=configs/quickstart.py --workdir=runs/sweep \\
        --grid='tst.bag_size=2,4,8;tst.ratio=0,0.2,0.3,0.4;seed=0,1,2'
    python -m tst_jax.sweep --config=configs/quickstart.py --workdir=runs/lr \\
        --grid='schedule.peak_lr=1e-3,2e-3,4e-3;seed=0,1,2'
    python -m tst_jax.sweep --config=configs/studies/python.py --workdir=runs/ablations \\
        --grid='arm=baseline,tst,input_only,output_only,reinit;seed=0,1,2'

An axis is a setting of tst_jax/config.py, or `arm` for FILE.py:ARM. The same command goes on:
finished cells are skipped, interrupted ones resumed; cells that train the same thing (ratio 0,
whatever the bag size) are one run. A cell that fails leaves the others alone. Several copies of the
command share the work, on other machines too. Writes sweep.csv (a line each cell), sweep.md (a
table, means over seeds) and sweep.png into the workdir; --report=NAME names them otherwise.

As jobs of a cluster, one a cell: --cell=NUMBER, from 0 on (launch/slurm_sweep.sbatch is a Slurm
array); then the command without --cell for the report. --list says what each cell is.
"""

import copy
import dataclasses
import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from tst_jax import config as config_lib
from tst_jax import programs, workdir
from tst_jax.compare import Run, check_data, find_run, read_run
from tst_jax.config import Config
from tst_jax.errors import Preempted, UserError
from tst_jax.lock import LockError
from tst_jax.schedule import TSTConfig
from tst_jax.train import open_stores, train

ARM = "arm"
ELSEWHERE = 3  # status of a cell that another process trains


@dataclasses.dataclass(frozen=True)
class Cell:
    """A point of the grid; several have one `run` if they train the same thing."""

    values: dict[str, str]  # axis -> value
    run: str  # name of its folder in WORKDIR/runs


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All cells of a grid, and the runs that they need."""

    axes: dict[str, list[str]]
    cells: list[Cell]
    runs: dict[str, Config]


def parse_grid(text: str) -> dict[str, list[str]]:
    """`"tst.bag_size=2,4;seed=0,1"` -> {"tst.bag_size": ["2", "4"], "seed": ["0", "1"]}.

    Raises:
      UserError: not of that form.
    """
    axes: dict[str, list[str]] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        name, equals, values = part.partition("=")
        found = [value.strip() for value in values.split(",")]
        if not equals or not name.strip() or not all(found):
            raise UserError(f"--grid: {part!r} is no axis; write NAME=VALUE,VALUE")
        if name.strip() in axes or len(set(found)) < len(found):
            raise UserError(f"--grid: {part!r} repeats an axis or a value; give each once")
        axes[name.strip()] = found
    if not axes:
        raise UserError("--grid is empty; write axes as 'tst.bag_size=2,4,8;seed=0,1,2'")
    return axes


def make_sweep(axes: dict[str, list[str]], variant: Callable[..., Config]) -> Sweep:
    """The cells of `axes`, the last axis fastest.

    Args:
      axes: values of each, as text.
      variant: (settings, arm or None) -> Config, see `cli.variant`.
    Raises:
      UserError: one line for each cell that cannot work.
    """
    cells, runs, found = [], {}, []
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination))
        settings = {name: value for name, value in values.items() if name != ARM}
        try:
            config = _plain_baseline(variant(settings, values.get(ARM)))
            config_lib.validate(config)
        except UserError as error:
            found += str(error).splitlines()
            continue
        if config.stop_after >= 0:
            found.append("stop_after is set; a sweep needs whole runs, leave it at -1")
        same = next((name for name, other in runs.items() if other == config), None)
        name = same or _name(values, config)
        if same is None and name in runs:
            raise UserError(f"--grid: two cells would both be called {name}; rename one's arm")
        runs[name] = config
        cells.append(Cell(values, name))
    if found:
        raise UserError("\n".join(dict.fromkeys(found)))
    return Sweep(axes, cells, runs)


def _plain_baseline(config: Config) -> Config:
    """A run without superposition in its plainest form: whatever `tst` says besides, it is one."""
    if config_lib.problems(config) or any(s.bag_size > 1 for s in config_lib.stages(config)):
        return config
    config = copy.deepcopy(config)
    config.tst = TSTConfig(ratio=0.0)
    return config


def _name(values: dict[str, str], config: Config) -> str:
    if config.tst == TSTConfig(ratio=0.0):
        values = {k: v for k, v in values.items() if not k.startswith("tst.") and k != ARM}
        parts = ["baseline"]
    else:
        parts = []
    parts += [f"{name}={value}" for name, value in values.items()]
    return re.sub(r"[^\w.,=+-]", "_", ",".join(parts))


# ---- what is done and what is not


def adopt(sweep: Sweep, folder: pathlib.Path) -> Sweep:
    """The sweep with the names that its runs have already, from another grid or a comparison in
    this folder."""
    names = {}
    for name, config in sweep.runs.items():
        found = None
        if not (folder / "runs" / name).exists():
            found = find_run(folder / "runs", config)
        names[name] = found.name if found else name
    cells = [Cell(cell.values, names[cell.run]) for cell in sweep.cells]
    return Sweep(sweep.axes, cells, {names[name]: c for name, c in sweep.runs.items()})


def check_place(folder: pathlib.Path) -> None:
    """Raises UserError unless `folder` is new, empty, or a sweep's."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "runs").is_dir():
        raise UserError(f"{folder} is not empty and no sweep's; give --workdir a new folder")


def result(folder, config: Config) -> Run | None:
    """The run in `folder`; None if it is not finished.

    Raises:
      UserError: it is one with other settings.
    """
    saved = workdir.saved_config(folder)
    if saved is None:
        return None
    ours = copy.deepcopy(config)
    if config.tst.weights == "fitted":  # the constants are taken when the run begins
        ours.tst.fitted = saved["tst"].get("fitted", "")
    different = config_lib.differences(saved, workdir.plain(ours))
    if different and not workdir.same_run(saved, ours):
        raise UserError(
            f"{folder} was trained with other settings ({'; '.join(different)}); give the same "
            "--config, or another --workdir"
        )
    run = read_run(folder, config)
    return run if run.finished else None


def results(sweep: Sweep, folder: pathlib.Path) -> dict[str, Run]:
    """Of the runs that are finished."""
    found = {name: result(folder / "runs" / name, config) for name, config in sweep.runs.items()}
    return {name: done for name, done in found.items() if done}


def check_stores(sweep: Sweep) -> None:
    """Raises UserError, a line for each of them, if runs name stores that they cannot read."""
    distinct = {(c.data.store, c.model.vocab_size): c for c in sweep.runs.values()}
    found = []
    for config in distinct.values():
        try:
            open_stores(config)
        except UserError as error:
            found += str(error).splitlines()
    if found:
        raise UserError("\n".join(dict.fromkeys(found)))


# ---- training


def train_run(sweep: Sweep, folder: pathlib.Path, name: str) -> None:
    """Trains one run to its end, in this process; returns at once if it is finished."""
    programs.use_cache()
    train(sweep.runs[name], folder / "runs" / name, title=name)


def train_all(sweep: Sweep, folder: pathlib.Path, processes: int) -> dict[str, str]:
    """Trains what is not finished, each run in a process of its own.

    Args:
      folder: of the sweep.
      processes: how many at a time; each gets its share of the CPU cores.
    Returns:
      {run: why it is not finished} of those that failed or are trained by another process.
    Raises:
      Preempted: told to end by SIGTERM; all runs are saved.
      UserError: a store that does not open or fit, before anything is written; a finished run that
        read other data.
    """
    check_stores(sweep)
    (folder / "runs").mkdir(parents=True, exist_ok=True)  # it is a sweep's folder from now on
    done = results(sweep, folder)
    for name in done:
        check_data(folder / "runs" / name, sweep.runs[name])
    waiting = [name for name in sweep.runs if name not in done]
    total, left, running = len(sweep.runs), {}, {}
    say = lambda text: print(f"sweep: {text}", flush=True)
    say(f"{total - len(waiting)} of {total} runs are finished")
    cores = _shares(processes)
    began, ended, told, passed_on = time.monotonic(), 0, [], False
    before = signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    try:
        while (waiting and not told) or running:
            while waiting and len(running) < processes and not told:
                name = waiting.pop(0)
                slot = next(i for i in range(processes) if i not in running)
                running[slot] = name, _start(sweep, folder, name, processes, cores[slot])
            time.sleep(0.2)
            if told and not passed_on:
                passed_on = True
                for _, process in running.values():
                    process.terminate()
            for slot, (name, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                if process.returncode == Preempted.STATUS and not told:
                    told.append(True)  # the whole machine is told to end, not only us
                elif process.returncode == ELSEWHERE:
                    left[name] = "another process trains it"
                elif process.returncode and not told:
                    left[name] = _last_words(folder, name, processes, process.returncode)
                    say(f"{name} failed: {left[name]}")
                elif not process.returncode:
                    ended += 1
                    loss = result(folder / "runs" / name, sweep.runs[name]).final_eval_loss
                    rate = (time.monotonic() - began) / ended
                    rest = _clock(rate * (len(waiting) + len(running)))
                    say(f"{name} ends at {loss:.4f}; {len(waiting)} to begin, about {rest} left")
    except KeyboardInterrupt:
        for _, process in running.values():
            process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if told:
        raise Preempted("told to end; the same command goes on with the runs that are left")
    return left


def _start(sweep, folder, name, processes, cores):
    number = next(i for i, cell in enumerate(sweep.cells) if cell.run == name)
    command = [sys.executable, "-m", "tst_jax.sweep", *sys.argv[1:], f"--cell={number}"]
    if processes == 1:
        return subprocess.Popen(command)
    _log(folder, name).parent.mkdir(parents=True, exist_ok=True)
    with open(_log(folder, name), "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    if cores and process.poll() is None:
        os.sched_setaffinity(process.pid, cores)  # before it starts its threads
    return process


def _shares(processes: int) -> list[set[int]]:
    """CPU cores of each of so many processes; empty where they have to share or cannot be bound."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if not 1 < processes <= len(cores):
        return [set()] * processes
    return [set(part.tolist()) for part in np.array_split(cores, processes)]


def _log(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / "logs" / f"{name}.log"


def _last_words(folder, name, processes, status) -> str:
    if processes > 1:
        lines = _log(folder, name).read_text(errors="replace").splitlines()
        if lines:
            return f"{lines[-1]} ({_log(folder, name)})"
    return f"status {status}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    CONFIG = cli.define_config()
    GRID = flags.DEFINE_string("grid", None, "Axes: 'NAME=VALUE,VALUE;NAME=VALUE,VALUE'.")
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the sweep.")
    REPORT = flags.DEFINE_string("report", "sweep", "Name of the report's files in the workdir.")
    PROCESSES = flags.DEFINE_integer("processes", 1, "Runs at a time, on this machine's cores.")
    CELL = flags.DEFINE_integer("cell", None, "Train this cell only, and write no report.")
    LIST = flags.DEFINE_bool("list", False, "Say what the cells are, and train nothing.")

    def main():
        cli.read_config(CONFIG)
        for name, value in (("grid", GRID.value), ("workdir", WORKDIR.value)):
            if not value:
                raise UserError(f"--{name} is missing; --help shows an example")
        if not 1 <= PROCESSES.value <= 1000:
            raise UserError(f"--processes is {PROCESSES.value}; give 1 .. 1000")
        sweep = make_sweep(parse_grid(GRID.value), cli.variant)
        last = len(sweep.cells) - 1
        if CELL.value is not None and not 0 <= CELL.value <= last:
            raise UserError(f"--cell is {CELL.value}; give 0 .. {last} (--list shows them)")
        place = WORKDIR.value or ""
        if "://" in place:
            raise UserError(f"--workdir is {place}; give a folder that is mounted here")
        folder = pathlib.Path(place)
        check_place(folder)
        sweep = adopt(sweep, folder)
        if LIST.value:
            done = results(sweep, folder)
            for i, cell in enumerate(sweep.cells):
                state = f"{done[cell.run].final_eval_loss:.4f}" if cell.run in done else "-"
                print(f"{i:5}  {state:>8}  {cell.run}")
            return
        if CELL.value is not None:
            try:
                train_run(sweep, folder, sweep.cells[CELL.value].run)
            except LockError as error:
                print(error, file=sys.stderr)
                sys.exit(ELSEWHERE)
            return
        left = train_all(sweep, folder, PROCESSES.value)
        from tst_jax import sweep_report  # matplotlib takes a second to import

        done = results(sweep, folder)
        if done:
            print("\n" + sweep_report.write(folder / REPORT.value, sweep, done))
        if left:
            raise UserError(
                "\n".join(f"{name} is not finished: {why}" for name, why in left.items())
            )

    cli.run(main, __doc__)
