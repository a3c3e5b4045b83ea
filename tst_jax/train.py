"""Trains one run: superposition, then recovery; or the baseline with --config.tst.ratio=0.

    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/tst
    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/b --config.tst.ratio=0

The same command resumes an interrupted run, to the same bits. --config.NAME=VALUE overrides a
setting (`python -m tst_jax.settings` lists them). A run that goes on refuses other settings, unless
--allow_changes=NAME,NAME names them. Several processes train one run with --distributed; the
scripts in launch/ start them.
"""

import contextlib
import dataclasses
import itertools

import jax
from etils import epath

from tst_jax import checkpoint as checkpoint_lib
from tst_jax import config as config_lib
from tst_jax import hosts, metrics, nonfinite, programs
from tst_jax import workdir as workdir_lib
from tst_jax.checkpoint import CheckpointError, Checkpoints
from tst_jax.config import Config, ConfigError
from tst_jax.data import corpus, pipeline
from tst_jax.data.order import Order
from tst_jax.data.store import SPLITS, Store
from tst_jax.errors import Preempted, UserError
from tst_jax.loop import Loop, Run, is_eval, is_switch
from tst_jax.models import hugging_face

# Entries that table and head may have beyond the tokenizer's, so that they divide over a mesh.
MOST_PADDING = 1023


def train(config: Config, workdir, title: str = "train", allow_changes=()) -> None:
    """Trains until `config.steps` (or `stop_after`), resuming what is in `workdir`.

    Called by every process of a run, each of which reads the rows of its own devices; the first
    writes. SIGTERM to any of them ends all at the same moment, with a checkpoint.

    Args:
      config: checked here, before anything is compiled or written.
      workdir: empty or new, or of a run with the same settings; a folder that all processes see,
        or gs://...
      title: in front of each line of progress.
      allow_changes: names of settings that may differ from those that the run was begun with.
    Raises:
      ConfigError, StoreError, DataError, CheckpointError, LockError: one line a problem.
      TrainingError: the loss is not finite.
      Preempted: told to end by SIGTERM; what was trained is saved.
    """
    say = lambda text: hosts.is_first() and print(f"{title}: {text}", flush=True)
    workdir, allow = epath.Path(workdir), frozenset(allow_changes)
    try:
        with hosts.Preemption() as preemption:
            check = lambda: _check(config, workdir, allow, say)
            run = hosts.together(lambda: preemption.watch(check))
            if config.debug_nans:
                check_record = lambda *found: _check_record(run, *found, allow)
                nonfinite.find(run, check_record, preemption, say)
            else:
                _train(run, allow, preemption, title, say)
    except OSError as error:
        if error.errno not in checkpoint_lib.FULL:
            raise
        raise CheckpointError(
            f"the disk of {workdir} is full; make room, and the same command goes on from the last "
            "checkpoint"
        ) from error


def open_stores(config: Config) -> list[Store]:
    """The stores of a run, which its model has the vocabulary for; see `corpus.open_stores`.

    Raises:
      UserError: a store that does not open or fit.
    """
    stores = corpus.open_stores(config.data)
    entries = stores[0].vocab_size
    if not 0 <= config.model.vocab_size - entries <= MOST_PADDING:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} and {stores[0].path} has {entries} "
            f"entries; set --config.model.vocab_size={entries}, or up to {MOST_PADDING} more as "
            "padding"
        )
    return stores


def _check(config, workdir, allow, say) -> Run:
    config_lib.validate(config)
    workdir_lib.check_allowed(allow)
    try:
        workdir_lib.check_place(workdir)
    except ImportError as error:  # gs://, s3:// need packages that others do without
        raise ConfigError(f"{workdir} cannot be reached: {error}") from None
    stores = open_stores(config)
    stages, names, shares = config_lib.stages(config), corpus.names(stores), config.data.shares()
    streams, heldout = (
        [pipeline.open_stream(s, split, config.data.packing, n) for s, n in zip(stores, names)]
        for split in SPLITS
    )
    lengths = [stream.length for stream in streams]
    shuffle, offset = config.data.shuffle, config.tst.random_offset
    order = Order(stages, lengths, shares, config.seed, shuffle, names, offset)
    tst = corpus.with_fitted(config.tst, stores, order.mixture.shares, say)
    config = dataclasses.replace(config, tst=tst)
    config_lib.validate(config)
    corpus.check_epochs(config.data, order)
    for stream in heldout:  # refuses one that is too short; the rows are read later
        pipeline.eval_batches(stream, config.eval.rows, config.data.positions, 1, numbers=[0])
    checkpoints = Checkpoints(workdir / "checkpoints")
    saved = checkpoints.steps()
    done = saved[-1] if saved else 0
    if old := workdir_lib.saved_config(workdir):
        for line in workdir_lib.check_changes(old, config, allow, done, workdir):
            say(f"changed since the run began: {line}")
    mesh, shapes, shardings = programs.layout(config)
    if done < config.last and not config.debug_nans:
        _check_space(config, stages, checkpoints, checkpoint_lib.size(shapes), say)
    if config.init_from and not (workdir / "checkpoints").is_dir():
        tokens = stores[0].vocabulary().tokens()
        found = hugging_face.check_import(config.init_from, config.model, tokens)
        if found:
            raise ConfigError("\n".join(found))
    # Last, because it takes longest.
    corpus.verify(config.data, (jax.process_index(), jax.process_count()), say)
    return Run(config, workdir, stages, stores, streams, heldout, order, mesh, shapes, shardings)


def _check_space(config, stages, checkpoints, size, say) -> None:
    """Refuses a disk without room for two checkpoints, warns of one without room for all."""
    keep, every = config.checkpoint.keep, config.checkpoint.keep_every
    switches = sum(is_switch(a, b) for a, b in itertools.pairwise(stages))
    # One more is written before the oldest goes.
    copies = keep + 1 + switches + (config.steps // every if every else 0)
    copies = max(copies - len(checkpoints.steps()), 1)
    free, text = checkpoints.free(), checkpoint_lib.gigabytes
    found = (
        f"the run will write {copies} checkpoints more of {text(size)} each, and {text(free)} are "
        f"free at {checkpoints.folder}"
    )
    if free < min(copies, 2) * size:
        raise CheckpointError(f"{found}; make room, or give another workdir")
    if free < copies * size:
        say(f"warning: {found}; make room, or lower checkpoint.keep or checkpoint.keep_every")


def _check_record(run, checkpoints, step, allow) -> None:
    """Refuses a checkpoint of another model, other settings or another store."""
    checkpoints.check_fits(step, run.shapes)
    record, where = checkpoints.record(step), checkpoints.folder / str(step)
    allow = allow | workdir_lib.allowed_before(run.workdir)
    workdir_lib.check_changes(record["config"], run.config, allow, step, where)
    corpus.check_same(run.workdir, record["stores"], run.stores, record["vocabulary"])


def _train(run: Run, allow, preemption, title, say) -> None:
    """Claims the folder, takes up its newest good checkpoint, and trains on."""
    config, workdir, stages = run.config, run.workdir, run.stages
    switches = [b.start for a, b in itertools.pairwise(stages) if is_switch(a, b)]
    keep = config.checkpoint.keep, config.checkpoint.keep_every, switches
    with contextlib.ExitStack() as stack:
        check_lock = stack.enter_context(workdir_lib.claimed(workdir, say))
        checkpoints = Checkpoints(workdir / "checkpoints", *keep, say=say)
        hosts.first_alone(checkpoints.clean)
        stack.enter_context(checkpoints)
        step = checkpoints.good(preemption.watch) or 0
        if step:
            hosts.together(lambda: _check_record(run, checkpoints, step, allow))
        progress = metrics.Progress(title, step, config.last, silent=not hosts.is_first())
        stack.callback(progress.close)
        lines = metrics.read_metrics(workdir)
        evaluated = any(line["step"] == step and "eval_loss" in line for line in lines)
        evaluate = hosts.agreed(step > 0 and is_eval(config, stages, step) and not evaluated)
        if step and step >= config.last and not evaluate:
            progress.say(f"{workdir} is at step {step} already")
            return
        if step:
            progress.say(f"resuming at step {step}")
        for warning in corpus.repeats(run.order):
            progress.say(warning)
        events = workdir_lib.Events(workdir, silent=not hosts.is_first())
        stack.callback(events.close)
        hosts.first_alone(lambda: _begin(run, step, checkpoints.bad, events))
        loop = Loop(run, checkpoints, events, preemption, progress, check_lock)
        try:
            loop.go(step, evaluate)
        except (UserError, Preempted) as error:
            events.write("ended", step=loop.step, why=str(error))
            raise
        events.write("finished", step=loop.step)


def _begin(run, step, damaged, events) -> None:
    old = workdir_lib.saved_config(run.workdir)
    workdir_lib.write_config(run.workdir, run.config)
    events.write("resumed" if step else "started", step=step, **workdir_lib.environment())
    for line in damaged:
        events.write("damaged", step=step, found=line)
    changes = old and config_lib.differences(old, workdir_lib.plain(run.config), harmless=True)
    if changes:
        events.write("settings_changed", step=step, changes=changes)


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    CONFIG = cli.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: new, or of this very run.")
    ALLOW = flags.DEFINE_list(
        "allow_changes", [], "Settings that may differ from those the run was begun with."
    )
    DISTRIBUTED = flags.DEFINE_bool("distributed", False, "Whether this is one of more processes.")

    def main():
        config = cli.read_config(CONFIG)
        if not WORKDIR.value:
            raise UserError("--workdir is missing; give the folder of the run")
        config_lib.validate(config)
        programs.use_cache()
        if DISTRIBUTED.value:
            hosts.initialize(config.hosts)
        elif found := hosts.copies_problem():
            raise UserError(found)
        train(config, WORKDIR.value, allow_changes=ALLOW.value)

    cli.run(main, __doc__)
