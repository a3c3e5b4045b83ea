"""Trains one run: superposition, then recovery; or the baseline with --config.tst.ratio=0.

    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/tst
    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/b --config.tst.ratio=0

The same command resumes an interrupted run, to the same bits. --config.NAME=VALUE overrides a
setting; tst_jax/config.py lists them. Several processes train one run with --distributed; the
scripts in launch/ start them.
"""

import dataclasses
import functools
import itertools
import json

import jax
import numpy as np
from etils import epath

from tst_jax import __version__, hosts, metrics, programs, schedule, sharding
from tst_jax import config as config_lib
from tst_jax.checkpoint import Checkpoints
from tst_jax.config import Config, ConfigError
from tst_jax.data import corpus, pipeline
from tst_jax.data.order import Order
from tst_jax.data.store import SPLITS, Store
from tst_jax.errors import Preempted, UserError
from tst_jax.models import hugging_face
from tst_jax.run_log import Log
from tst_jax.train_step import TrainState, key_data

# Entries that table and head may have beyond the tokenizer's, so that they divide over a mesh.
MOST_PADDING = 1023


@dataclasses.dataclass
class _Run:
    """What is known of a run before anything is compiled or written."""

    config: Config
    workdir: epath.Path
    stages: list
    stores: list[Store]
    streams: list[pipeline.Stream]  # of their train splits
    heldout: list[pipeline.Stream]
    order: Order
    mesh: jax.sharding.Mesh
    shapes: TrainState
    shardings: TrainState

    def batch(self, rows: int, numbers, parts) -> tuple[jax.Array, ...]:
        """Of the `rows` rows that all processes have read their parts of."""
        return tuple(sharding.assemble(self.mesh, numbers, part, rows) for part in parts)


def train(config: Config, workdir, title: str = "train") -> None:
    """Trains until `config.steps` (or `stop_after`), resuming what is in `workdir`.

    Called by every process of a run, each of which reads the rows of its own devices; the first
    writes. SIGTERM to any of them ends all after the same step, with a checkpoint.

    Args:
      config: checked here, before anything is compiled or written.
      workdir: empty or new, or of a run with the same settings; a folder that all processes see,
        or gs://...
      title: in front of each line of progress.
    Raises:
      ConfigError, StoreError, DataError, CheckpointError: one line a problem.
      TrainingError: the loss is not finite.
      Preempted: saved after SIGTERM.
    """
    with hosts.Preemption() as preemption:
        run = hosts.together(lambda: _check(config, epath.Path(workdir), title))
        hosts.first_alone(lambda: _claim_workdir(run.config, run.workdir))
        switches = [b.start for a, b in itertools.pairwise(run.stages) if _is_switch(a, b)]
        folder = run.workdir / "checkpoints"
        with Checkpoints(folder, config.checkpoint.keep, switches) as checkpoints:
            _train(run, checkpoints, preemption, title)


def _is_switch(before, after) -> bool:
    """Whether two neighbouring stages differ in more than the batch size."""
    return before.bag_size != after.bag_size


def _check(config, workdir, title) -> _Run:
    config_lib.validate(config)
    try:
        workdir.exists()
    except ImportError as error:  # gs://, s3:// need packages that others do without
        raise ConfigError(f"{workdir} cannot be reached: {error}") from None
    say = lambda text: hosts.is_first() and print(f"{title}: {text}", flush=True)
    stores = corpus.open_stores(config.data)
    entries = stores[0].vocab_size
    if not 0 <= config.model.vocab_size - entries <= MOST_PADDING:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} and {stores[0].path} has {entries} "
            f"entries; set --config.model.vocab_size={entries}, or up to {MOST_PADDING} more as "
            "padding"
        )
    stages, names, shares = config_lib.stages(config), corpus.names(stores), config.data.shares()
    streams, heldout = (
        [pipeline.open_stream(s, split, config.data.packing, n) for s, n in zip(stores, names)]
        for split in SPLITS
    )
    lengths = [stream.length for stream in streams]
    order = Order(stages, lengths, shares, config.seed, config.data.shuffle, names)
    tst = corpus.with_fitted(config.tst, stores, order.mixture.shares, say)
    config = dataclasses.replace(config, tst=tst)
    config_lib.validate(config)
    corpus.check_epochs(config.data, order)
    for stream in heldout:  # refuses one that is too short; the rows are read later
        pipeline.eval_batches(stream, config.eval.rows, config.data.positions, 1, numbers=[0])
    mesh, shapes, shardings = programs.layout(config)
    if config.init_from and not (workdir / "checkpoints").is_dir():
        tokens = stores[0].vocabulary().tokens()
        found = hugging_face.check_import(config.init_from, config.model, tokens)
        if found:
            raise ConfigError("\n".join(found))
    # Last, because it takes longest.
    corpus.verify(config.data, (jax.process_index(), jax.process_count()), say)
    return _Run(config, workdir, stages, stores, streams, heldout, order, mesh, shapes, shardings)


def _claim_workdir(config, workdir) -> None:
    """A new folder is begun, a run's own taken up if its settings agree, any other refused."""
    path, folder = workdir / "config.json", workdir / "checkpoints"
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"{workdir} is a file; give --workdir a new folder")
    if path.exists():
        old, new = json.loads(path.read_text()), dataclasses.asdict(config)
        if old["data"]["rows_from"] != new["data"]["rows_from"]:
            with Checkpoints(folder, read_only=True) as checkpoints:
                done = checkpoints.last()
            before = [
                [pair for pair in schedule.parse_rows_from(text, config.steps) if pair[0] < done]
                for text in (old["data"]["rows_from"], new["data"]["rows_from"])
            ]
            if before[0] == before[1]:  # the batch size of steps that are yet to come may change
                old["data"]["rows_from"] = new["data"]["rows_from"]
        changed = config_lib.differences(old, new)
        if changed:
            raise ConfigError(
                f"{workdir} was started with other settings; give them again, or another workdir\n"
                + "\n".join(changed)
            )
        _write_config(path, new)
    elif workdir.exists() and any(workdir.iterdir()):
        raise ConfigError(
            f"{workdir} is not empty and no run of tst_jax; give --workdir a new folder"
        )
    else:
        workdir.mkdir(parents=True, exist_ok=True)
        _write_config(path, dataclasses.asdict(config))


def _write_config(path, config: dict) -> None:
    text = json.dumps(config, indent=2) + "\n"
    if path.exists() and path.read_text() == text:
        return
    partial = path.parent / "config.json.partial"
    partial.write_text(text)
    partial.replace(path)


def _train(run: _Run, checkpoints, preemption, title):
    config, stages, mesh = run.config, run.stages, run.mesh
    saved = checkpoints.steps()
    step = hosts.agreed(saved[-1] if saved else 0)
    last = config.steps if config.stop_after < 0 else config.stop_after
    counters = {"positions": 0, "tokens": 0, "flops": 0, "flops_full_attention": 0}
    if step:
        found = checkpoints.record(step)
        corpus.check_same(run.workdir, found["stores"], run.stores, found["vocabulary"])
        counters = found["counters"]
    progress = metrics.Progress(title, step, last, silent=not hosts.is_first())
    if step and step >= last:
        progress.say(f"{run.workdir} is at step {step} already")
        progress.close()
        return
    if step:
        progress.say(f"resuming at step {step}")
    for warning in corpus.repeats(run.order):
        progress.say(warning)

    compiled = programs.compile_run(
        config, stages, mesh, run.shapes, run.shardings, step, last, progress.say
    )
    state = None
    if not step:
        given = []
        if config.init_from:
            progress.say(f"starting from {config.init_from}")
            where = (run.shapes.params, run.shardings.params)
            given = [hugging_face.load_into(*where, config.init_from, config.model)]
        state = compiled.init(key_data(config.seed), *given)
    log = Log(run, step, counters, progress)
    record = lambda: {
        "phase": log.stage.phase,
        "bag_size": log.stage.bag_size,
        "counters": dict(log.counters),
        "stores": [store.fingerprint for store in run.stores],
        "vocabulary": run.stores[0].vocabulary_sha256,
        "version": __version__,
    }
    held_out = _held_out(run)

    for index, stage in enumerate(stages):
        if stage.stop <= step or stage.start >= last:
            continue
        # A switch always goes through the checkpoint, so that going on and restarting are one
        # path (rule 16).
        if state is None or (step == stage.start and step > 0):
            state = None  # frees the old one first: there is room for one state (rule 17)
            state = checkpoints.restore(step, run.shapes, run.shardings)
        if step == stage.start and step > 0 and _is_switch(stages[index - 1], stage):
            state = compiled.switch(state)
        log.stage = stage
        numbers = sharding.local_rows(mesh, stage.rows)
        put = functools.partial(run.batch, stage.rows, numbers)
        ahead = config.data.prefetch
        batches = pipeline.batches(run.streams, run.order, index, step, numbers, put, ahead)
        end = min(stage.stop, last)
        run_step = compiled.steps[index]
        while step < end:
            with log.waits_for_data():
                batch = next(batches)
            state, step_metrics = run_step(state, *batch)
            step += 1
            log.push(step, step_metrics)  # reads the metrics of the step before
            every = config.eval.every
            if (every and step % every == 0) or step in (stage.stop, config.steps):
                log.flush()
                log.write_eval(step, _evaluate(compiled.evaluate, state.params, held_out))
            stop = preemption.reached(step)
            every = config.checkpoint.every
            if stop or (every and step % every == 0) or step == end:
                log.flush()  # a state that is not finite is never saved
                checkpoints.save(step, state, record())
                if stop or step == end:
                    checkpoints.wait()
                log.restart_clock()
            if stop and step < last:
                batches.close()
                log.close()
                raise Preempted(
                    f"{run.workdir}: told to end, saved at step {step}; the same command goes on"
                )
    log.close()


def _held_out(run) -> list[list]:
    """Of each store, batches of its held-out split; together about `eval.tokens`."""
    config = run.config
    rows, positions = config.eval.rows, config.data.positions
    numbers = sharding.local_rows(run.mesh, rows)
    found = []
    for stream, share in zip(run.heldout, run.order.mixture.shares):
        limit = max(1, round(config.eval.tokens * share)) if config.eval.tokens else 0
        parts = pipeline.eval_batches(stream, rows, positions, limit, numbers)
        found.append([run.batch(rows, numbers, part) for part in parts])
    return found


def _evaluate(evaluate, params, held_out) -> list[float]:
    """Next-token loss over each store's held-out rows, nats a token."""
    results = [[evaluate(params, *batch) for batch in batches] for batches in held_out]
    sums = [np.asarray(jax.device_get(result), np.float64).sum(0) for result in results]
    return [float(nats / count) for nats, count in sums]


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    CONFIG = cli.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: new, or of this very run.")
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
        train(config, WORKDIR.value)

    cli.run(main, __doc__)
