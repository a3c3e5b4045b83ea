"""Checkpoints of a run: Orbax, one flat dictionary of named arrays, and a record beside it.

The record is plain JSON: which step, which phase (rule 19), exact counters of tokens, positions and
FLOPs (rule 23), and the name, shape and dtype of every array. Restoring compares it with what the
run wants, because Orbax would cast a wrong dtype without a word.
"""

import contextlib
import logging

import jax
import numpy as np
from absl import logging as absl_logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from tst_jax.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that is missing, or does not fit the run."""


def named_leaves(tree) -> dict:
    """{"params.layers.query": leaf, ...}: the leaves of a state by readable name."""
    names = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        names[name.removesuffix(".value")] = leaf
    return names


def _describe(arrays: dict) -> dict:
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in arrays.items()}


class Checkpoints:
    """The checkpoints of one run, in `folder`; made on the first save.

    Args:
      folder: where the checkpoints lie, one folder a step.
      keep: how many of the last ones stay.
      always: steps whose checkpoints stay for good (the switches).
      read_only: for commands that only look.
    """

    def __init__(self, folder, keep: int = 2, always=(), read_only: bool = False):
        self.folder = epath.Path(folder)
        if "://" not in str(folder):
            self.folder = self.folder.absolute()
        policies = ocp.training.preservation_policies
        if read_only and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} does not exist; give the workdir of a run")
        # Orbax reports every save at the info level, on the root logger.
        absl_logging.set_verbosity(absl_logging.WARNING)
        logging.getLogger("orbax").setLevel(logging.WARNING)
        self._orbax = ocp.training.Checkpointer(
            self.folder,
            preservation_policy=policies.AnyPreservationPolicy(
                [policies.LatestN(keep), policies.CustomSteps(tuple(always))]
            ),
            cleanup_tmp_directories=not read_only,
        )

    def steps(self) -> list[int]:
        """Steps that have a checkpoint, in rising order."""
        return sorted(checkpoint.step for checkpoint in self._orbax.checkpoints)

    def last(self) -> int:
        """The step of the last one; CheckpointError if there is none."""
        steps = self.steps()
        if not steps:
            raise CheckpointError(
                f"{self.folder} holds no checkpoint yet; let the run save one first"
            )
        return steps[-1]

    def save(self, step: int, state, record: dict) -> None:
        """Starts a save; returns once the arrays are copied. Nothing happens if it is there."""
        if step in self.steps():
            return
        arrays = named_leaves(state)
        record = {**record, "step": step, "arrays": _describe(arrays)}
        self._orbax.save_checkpointables_async(
            step, {"state": arrays}, force=True, custom_metadata=record
        )

    def wait(self) -> None:
        """Until the save that is under way lies on disk."""
        self._orbax.wait()

    def record(self, step: int) -> dict:
        """What was written beside the arrays of a step's checkpoint."""
        record = self._orbax.checkpointables_metadata(step).custom_metadata
        if not record or "arrays" not in record:
            raise CheckpointError(f"{self.folder}/{step} holds no checkpoint of tst_jax")
        return record

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
        context = ocp.Context()
        context.pytree.loading.partial_load = bool(prefix)
        with context:
            arrays = self._orbax.load_checkpointables(step, {"state": abstract})["state"]
        return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in wanted])

    def reader(self, step: int, shapes, prefix: str = ""):
        """A function from a name in `shapes` to that array in host memory, read when it is called.

        For what fits no device, or not twice in memory. Arguments and errors as in `restore`.
        """
        wanted = self._wanted(step, shapes, prefix)
        context = ocp.Context()
        context.pytree.loading.partial_load = True

        def read(name: str) -> np.ndarray:
            whole = f"{prefix}.{name}" if prefix else name
            x = wanted[whole]
            like = np.broadcast_to(np.zeros((), x.dtype), x.shape)  # takes no memory
            with context:
                found = self._orbax.load_checkpointables(step, {"state": {whole: like}})
            return found["state"][whole]

        return read

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
            raise CheckpointError(f"checkpoint {step} does not fit:\n" + "\n".join(lines))
        return wanted

    def close(self) -> None:
        """Ends the background threads, once the last save is on disk."""
        self._orbax.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(Exception) if error[0] else contextlib.nullcontext():
            self.close()
