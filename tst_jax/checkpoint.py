"""Checkpoints of a run: Orbax, one flat dictionary of named arrays, and a manifest beside it.

A save goes on in the background, under another name: `12.partial` is checksummed and becomes `12`.
So a step's folder is whole or damaged, never half written. The manifest's record is plain JSON:
which step, which phase (rule 19), exact counters of tokens, positions and FLOPs (rule 23), the
settings, and the name, shape and dtype of every array. Restoring compares them with what the run
wants, because Orbax would cast a wrong dtype without a word.
"""

import concurrent.futures
import contextlib
import errno
import json
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable

import jax
import numpy as np
from absl import logging as absl_logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from tst_jax import hosts, manifest
from tst_jax.manifest import CheckpointError

_MOST = 100  # of the last checkpoints are looked at, until one is good
FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXT = re.compile("no space left|quota exceeded|file too large", re.I)


def named_leaves(tree) -> dict:
    """{"params.layers.query": leaf, ...}: the leaves of a state by readable name."""
    names = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names[name.removesuffix(".value")] = leaf
    return names


def size(tree) -> int:
    """Bytes of the checkpoint of a state, given as arrays or shapes."""
    arrays = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return arrays * 101 // 100 + (1 << 20)  # for what lies beside the arrays


def gigabytes(count: float) -> str:
    return f"{count / 1e9:.3g} GB"


def _describe(arrays: dict) -> dict:
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}


class Checkpoints:
    """The checkpoints of one run, in `folder`; made on the first save.

    All processes of a run call its methods, in the same order.

    Args:
      folder: where the checkpoints lie, one folder a step.
      keep: how many of the last ones stay.
      keep_every: those of a multiple of so many steps stay for good; 0: none.
      always: steps whose checkpoints stay for good (the switches).
      read_only: for commands that only look.
      say: called with a line for people when a checkpoint is damaged.
    """

    def __init__(
        self,
        folder,
        keep: int = 2,
        keep_every: int = 0,
        always=(),
        read_only: bool = False,
        say: Callable[[str], None] = print,
    ):
        self.folder = epath.Path(folder)
        self._local = "://" not in str(folder)
        if self._local:
            self.folder = self.folder.absolute()
        if read_only and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} does not exist; give the workdir of a run")
        self._keep, self._keep_every, self._always = keep, keep_every, set(always)
        self._read_only, self._say = read_only, say
        self.bad: list[str] = []  # what `good` found damaged
        self._manifests = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "save", _give_way)
        self._job = None  # (step, future) of the save that is under way
        # Orbax reports every save at the info level, on the root logger.
        absl_logging.set_verbosity(absl_logging.WARNING)
        logging.getLogger("orbax").setLevel(logging.WARNING)

    # ---- what is there

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in rising order; whether it is damaged is not known."""
        found = [path for path in self._entries() if path.name.isdecimal()]
        if not self._local:  # a bucket has no folders to rename: there the manifest comes last
            found = [path for path in found if (path / manifest.NAME).exists()]
        return sorted(int(path.name) for path in found)

    def good(self, watch: Callable = lambda function: function()) -> int | None:
        """The step of the newest checkpoint whose every byte is what was written; None: no step has
        a checkpoint.

        Newer ones are damaged: they are named, and set aside as `STEP.damaged` unless read_only.

        Args:
          watch: calls a function that may take minutes.
        Raises:
          CheckpointError: there are checkpoints, and all are damaged.
        """
        # What the first process sees: a shared folder may show others less.
        steps = json.loads(hosts.gathered(json.dumps(self.steps()[::-1][:_MOST]))[0])
        bad = self.bad = []
        for step in steps:
            found = self._look(step, watch)
            if not found:
                for line in bad:
                    self._say(f"warning: {line}; step {step} is the newest good checkpoint")
                if not self._read_only:
                    for other in steps[: len(bad)]:
                        hosts.first_alone(lambda: self._set_aside(other))
                return step
            bad.append(found)
        if bad:
            raise CheckpointError(
                "\n".join(bad) + f"\n{self.folder} has no good checkpoint; give another workdir "
                "to start anew, or put back the files"
            )
        return None

    def newest(self) -> int:
        """The step of the newest good checkpoint; CheckpointError if there is none."""
        step = self.good()
        if step is None:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint yet; let the run save one first"
            )
        return step

    def verify(self, step: int, watch: Callable = lambda function: function()) -> None:
        """CheckpointError unless every byte of a step's checkpoint is what was written."""
        if found := self._look(step, watch):
            raise CheckpointError(f"{found}; the same command goes on from the checkpoint before")

    def damage(self, step: int) -> str:
        """What is wrong with a step's checkpoint, "" for nothing; looked for by this process."""
        return self._damage(step, (0, 1))

    def _look(self, step, watch) -> str:
        """The same for all processes of a run, which share the work."""
        part = jax.process_index(), jax.process_count()
        return next(filter(None, hosts.gathered(watch(lambda: self._damage(step, part)))), "")

    def _damage(self, step, part) -> str:
        try:
            self._manifests[step] = manifest.read(self.folder / str(step))
        except CheckpointError as error:
            return str(error)
        return manifest.damage(self.folder / str(step), self._manifests[step], part)

    def record(self, step: int) -> dict:
        """What was written beside the arrays of a step's checkpoint."""
        if step not in self._manifests:
            self._manifests[step] = manifest.read(self.folder / str(step))
        return self._manifests[step]["record"]

    def _entries(self):
        return list(self.folder.iterdir()) if self.folder.is_dir() else []

    # ---- saving

    def clean(self) -> None:
        """Removes what a killed process left of saves and removals that it had begun."""
        for path in self._entries():
            if re.fullmatch(r"\d+\.(partial|expired).*", path.name):
                path.rmtree()

    def free(self) -> float:
        """Bytes that are free where the checkpoints lie; infinite in a bucket."""
        place = self.folder
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free if self._local else float("inf")

    def _check_space(self, step, state) -> None:
        need, free = size(state), self.free()
        if free < need:
            raise CheckpointError(
                f"the checkpoint of step {step} needs {gigabytes(need)} and {gigabytes(free)} "
                f"are free at {self.folder}; make room{self._then()}"
            )

    def save(self, step: int, state, record: dict) -> None:
        """Starts a save; returns once the arrays are copied. Nothing happens if it is there.

        Raises:
          CheckpointError: there is no room, or the save before this one failed.
        """
        self.wait()
        if hosts.agreed(step in self.steps()):
            return
        arrays = named_leaves(state)
        hosts.first_alone(lambda: self._check_space(step, state))
        record = {**record, "step": step, "arrays": _describe(arrays)}
        path = self.folder / (f"{step}.partial" if self._local else str(step))
        # From the pool's thread, so that all threads that it begins give way to the steps.
        start = self._pool.submit(_start, path, arrays)
        with _named(self._failed(step)):
            response = start.result()
        self._job = step, self._pool.submit(self._finish, response, step, path, record)

    def check(self) -> None:
        """Raises what the save in the background failed with, as CheckpointError."""
        if self._job and self._job[1].done():
            self._result()

    def wait(self) -> None:
        """Until the save that is under way lies on disk, in all processes."""
        hosts.together(self._result)

    def _result(self):
        if self._job is None:  # none, or `check` has seen its end: not in all processes at once
            return
        (step, job), self._job = self._job, None
        with _named(self._failed(step)):
            job.result()

    def _finish(self, response, step, path, record):
        try:
            response.result()
            if hosts.is_first():
                manifest.write(path, record)
                if self._local:
                    path.rename(self.folder / str(step))
                    manifest.sync_folder(self.folder)
        except BaseException:
            with contextlib.suppress(Exception):
                if hosts.is_first() and self._local:
                    self.clean()
            raise
        if hosts.is_first():
            with _named("a checkpoint that has expired cannot be removed: %s"):
                self._expire()

    def _expire(self):
        """Removes checkpoints that the policy does not keep; nothing else is ever removed."""
        steps = self.steps()
        for step in steps[: -self._keep]:
            if step in self._always or (self._keep_every and step % self._keep_every == 0):
                continue
            path = self.folder / str(step)
            if self._local:  # under its own name it is whole until it is gone
                path = path.rename(self.folder / f"{step}.expired")
            else:
                (path / manifest.NAME).unlink()
            path.rmtree()

    def _set_aside(self, step):
        """Damaged files are kept for whoever wants to look, under a name that no step has."""
        for number in range(1, 1000):
            name = f"{step}.damaged" + (f"-{number}" if number > 1 else "")
            if not (self.folder / name).exists():
                (self.folder / str(step)).rename(self.folder / name)
                return

    def _failed(self, step) -> str:
        return f"the checkpoint of step {step} was not written: %s{self._then()}"

    def _then(self) -> str:
        steps = self.steps()
        last = f"; {steps[-1]} is the last checkpoint" if steps else "; there is no checkpoint yet"
        return f"{last}, the same command goes on from there" if steps else last

    # ---- restoring

    def restore(self, step: int, shapes, shardings, prefix: str = ""):
        """The state of a step, on the devices that `shardings` name.

        Args:
          step: of an existing checkpoint.
          shapes: the wanted tree, of arrays or `jax.ShapeDtypeStruct`s.
          shardings: the same tree of shardings.
          prefix: name of the part of the state that `shapes` is, "params" for example.
        Raises:
          CheckpointError: an array is absent or has another shape or dtype; all are listed.
        """
        wanted = self._wanted(step, shapes, prefix)
        places = jax.tree.leaves(shardings)
        abstract = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
            for (name, x), place in zip(wanted.items(), places, strict=True)
        }
        arrays = self._load(step, abstract, partial=bool(prefix))
        return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in wanted])

    def reader(self, step: int, shapes, prefix: str = ""):
        """A function from a name in `shapes` to that array in host memory, read when it is called.

        For what fits no device, or not twice in memory. Arguments and errors as in `restore`.
        """
        wanted = self._wanted(step, shapes, prefix)

        def read(name: str) -> np.ndarray:
            whole = f"{prefix}.{name}" if prefix else name
            x = wanted[whole]
            like = np.broadcast_to(np.zeros((), x.dtype), x.shape)  # takes no memory
            return self._load(step, {whole: like}, partial=True)[whole]

        return read

    def _load(self, step, abstract, partial):
        context = ocp.Context()
        context.pytree.loading.partial_load = partial
        with context:
            found = ocp.load_checkpointables(self.folder / str(step), {"state": abstract})
        return found["state"]

    def check_fits(self, step: int, shapes) -> None:
        """CheckpointError unless a step has the arrays of `shapes`, by name, shape and dtype."""
        self._wanted(step, shapes, "")

    def _wanted(self, step, shapes, prefix) -> dict:
        """Full name -> shape of a tree's arrays, all of which the checkpoint has as they are."""
        dotted = prefix + "." if prefix else ""
        wanted = {dotted + name: x for name, x in named_leaves(shapes).items()}
        saved = self.record(step)["arrays"]
        if prefix:
            saved = {name: text for name, text in saved.items() if name.startswith(dotted)}
        expected = _describe(wanted)
        if saved != expected:
            lines = [
                f"{name}: {saved.get(name, 'absent')} in the checkpoint, "
                f"{expected.get(name, 'absent')} in the run"
                for name in sorted(saved.keys() | expected.keys())
                if saved.get(name) != expected.get(name)
            ]
            raise CheckpointError(
                f"{self.folder / str(step)} does not fit the run:\n" + "\n".join(lines)
            )
        return wanted

    def close(self) -> None:
        """Ends the background threads, once the last save is on disk."""
        self._pool.shutdown()
        if self._job:
            self._result()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(Exception) if error[0] else contextlib.nullcontext():
            self.close()


def _start(path, arrays: dict):
    """Orbax's save under way: the arrays are copied, and may change."""
    context = ocp.Context()
    # Trained numbers hardly get smaller, and it costs the cores that train.
    context.array.saving.use_compression = False
    context.array.saving.enable_write_sharding_file = False
    with context:
        return ocp.save_checkpointables_async(path, {"state": arrays}, overwrite=True)


def _give_way() -> None:
    """Lets this thread, and those that it begins, run where a step leaves a core idle."""
    if sys.platform == "linux":  # elsewhere a thread's number may be another process'
        with contextlib.suppress(OSError):  # not allowed
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


@contextlib.contextmanager
def _named(text: str):
    """Errors of a save as CheckpointError: `text` with the cause in place of %s."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if getattr(error, "errno", None) in FULL or _FULL_TEXT.search(str(error)):
            cause = "the disk is full"
        raise CheckpointError(text.replace("%s", cause)) from error
