"""Trains one run: superposition, then recovery; or the baseline with --config.tst.ratio=0.

    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/tst
    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/b --config.tst.ratio=0

The same command resumes an interrupted run, to the same bits. --config.NAME=VALUE overrides a
setting; tst_jax/config.py lists them. Several processes train one run with --distributed; the
scripts in launch/ start them.
"""

import dataclasses
import json
import math
import time

import jax
import numpy as np
from etils import epath

from tst_jax import __version__, flops, hosts, metrics, programs, sharding
from tst_jax import config as config_lib
from tst_jax.checkpoint import Checkpoints
from tst_jax.config import Config, ConfigError
from tst_jax.data import pipeline
from tst_jax.data.store import Store, open_store
from tst_jax.errors import Preempted, UserError
from tst_jax.models import hugging_face
from tst_jax.train_step import TrainState, key_data

# Entries that table and head may have beyond the tokenizer's, so that they divide over a mesh.
MOST_PADDING = 1023


class TrainingError(UserError):
    """The run cannot go on; the message says from where it can."""


@dataclasses.dataclass
class _Run:
    """What is known of a run before anything is compiled or written."""

    config: Config
    workdir: epath.Path
    stages: list
    store: Store
    tokens: np.ndarray  # of the train split
    plan: pipeline.RowPlan
    mesh: jax.sharding.Mesh
    shapes: TrainState
    shardings: TrainState

    def batch(self, rows: int, numbers, parts) -> jax.Array:
        """Of the `rows` rows that all processes have read their parts of."""
        return sharding.assemble(self.mesh, numbers, parts, rows)


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
        run = hosts.together(lambda: _check(config, epath.Path(workdir)))
        hosts.first_alone(lambda: _claim_workdir(config, run.workdir))
        switches = [stage.start for stage in run.stages if stage.start > 0]
        folder = run.workdir / "checkpoints"
        with Checkpoints(folder, config.checkpoint.keep, switches) as checkpoints:
            _train(run, checkpoints, preemption, title)


def _check(config, workdir) -> _Run:
    config_lib.validate(config)
    try:
        workdir.exists()
    except ImportError as error:  # gs://, s3:// need packages that others do without
        raise ConfigError(f"{workdir} cannot be reached: {error}") from None
    store = open_store(config.data.store)
    if not 0 <= config.model.vocab_size - store.vocab_size <= MOST_PADDING:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size} and {config.data.store} has "
            f"{store.vocab_size} entries; set --config.model.vocab_size={store.vocab_size}, or up "
            f"to {MOST_PADDING} more as padding"
        )
    stages = config_lib.stages(config)
    tokens = store.tokens("train")
    plan = pipeline.RowPlan(stages, len(tokens), config.seed, config.data.shuffle)
    pipeline.eval_batches(  # refuses a held-out split that is too short; the rows are read later
        store.tokens("heldout"), config.eval.rows, config.data.positions, 1, numbers=[0]
    )
    mesh, shapes, shardings = programs.layout(config)
    if config.init_from and not (workdir / "checkpoints").is_dir():
        found = hugging_face.check_import(
            config.init_from, config.model, store.tokenizer().get_vocab(with_added_tokens=True)
        )
        if found:
            raise ConfigError("\n".join(found))
    return _Run(config, workdir, stages, store, tokens, plan, mesh, shapes, shardings)


def _claim_workdir(config, workdir) -> None:
    """A new folder is begun, a run's own taken up if its settings agree, any other refused."""
    path = workdir / "config.json"
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"{workdir} is a file; give --workdir a new folder")
    if path.exists():
        changed = config_lib.differences(json.loads(path.read_text()), dataclasses.asdict(config))
        if changed:
            raise ConfigError(
                f"{workdir} was started with other settings; give them again, or another workdir\n"
                + "\n".join(changed)
            )
    elif workdir.exists() and any(workdir.iterdir()):
        raise ConfigError(
            f"{workdir} is not empty and no run of tst_jax; give --workdir a new folder"
        )
    else:
        workdir.mkdir(parents=True, exist_ok=True)
        partial = workdir / "config.json.partial"
        partial.write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
        partial.replace(path)


def _train(run: _Run, checkpoints, preemption, title):
    config, store, stages, mesh = run.config, run.store, run.stages, run.mesh
    saved = checkpoints.steps()
    step = hosts.agreed(saved[-1] if saved else 0)
    last = config.steps if config.stop_after < 0 else config.stop_after
    counters = {"positions": 0, "tokens": 0, "flops": 0, "flops_full_attention": 0}
    if step:
        found = checkpoints.record(step)
        if found["store"] != store.fingerprint:
            raise ConfigError(
                f"{run.workdir} was trained on another store than {config.data.store}; give "
                "data.store the one it was started with"
            )
        counters = found["counters"]
    progress = metrics.Progress(title, step, last, silent=not hosts.is_first())
    if step and step >= last:
        progress.say(f"{run.workdir} is at step {step} already")
        progress.close()
        return
    if step:
        progress.say(f"resuming at step {step}")
    if run.plan.epochs > 1:
        progress.say(f"the train split is read again: {run.plan.epochs} epochs are begun")

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
    log = _Log(config, run.workdir, stages, step, counters, progress)
    record = lambda: {
        "phase": log.stage.phase,
        "bag_size": log.stage.bag_size,
        "counters": dict(log.counters),
        "store": store.fingerprint,
        "version": __version__,
    }
    bytes_per_token = store.bytes_per_token("heldout")
    rows = config.eval.rows
    numbers = sharding.local_rows(mesh, rows)
    held_out = pipeline.eval_batches(
        store.tokens("heldout"), rows, config.data.positions, config.eval.tokens, numbers
    )
    held_out = [run.batch(rows, numbers, part) for part in held_out]

    for index, stage in enumerate(stages):
        if stage.stop <= step or stage.start >= last:
            continue
        # A switch always goes through the checkpoint, so that going on and restarting are one
        # path (rule 16).
        if state is None or (step == stage.start and step > 0):
            state = None  # frees the old one first: there is room for one state (rule 17)
            state = checkpoints.restore(step, run.shapes, run.shardings)
        if step == stage.start and step > 0:
            state = compiled.switch(state)
        log.stage = stage
        numbers = sharding.local_rows(mesh, stage.rows)
        batches = pipeline.batches(run.tokens, run.plan, index, step, numbers)
        end = min(stage.stop, last)
        run_step = compiled.steps[index]
        while step < end:
            state, step_metrics = run_step(state, run.batch(stage.rows, numbers, next(batches)))
            step += 1
            log.push(step, step_metrics)  # reads the metrics of the step before
            every = config.eval.every
            if (every and step % every == 0) or step in (stage.stop, config.steps):
                log.flush()
                loss = _evaluate(compiled.evaluate, state.params, held_out)
                log.write_eval(step, loss, loss / math.log(2) / bytes_per_token)
            stop = preemption.reached(step)
            every = config.checkpoint.every
            if stop or (every and step % every == 0) or step == end:
                log.flush()  # a state that is not finite is never saved
                checkpoints.save(step, state, record())
                if stop or step == end:
                    checkpoints.wait()
                log.restart_clock()
            if stop and step < last:
                log.close()
                raise Preempted(
                    f"{run.workdir}: told to end, saved at step {step}; the same command goes on"
                )
    log.close()


def _evaluate(evaluate, params, batches) -> float:
    """Next-token loss over held-out rows, nats a token."""
    results = [evaluate(params, batch) for batch in batches]
    nats, count = np.asarray(jax.device_get(results), np.float64).sum(0)
    return float(nats / count)


class _Log:
    """Reads metrics one step late, counts, and writes a line every `log_every` steps."""

    def __init__(self, config, workdir, stages, step, counters, progress):
        self.stage = stages[0]
        self.counters = counters
        self._config, self._progress = config, progress
        self._writer = metrics.Writer(workdir, step, silent=not hosts.is_first())
        self._pending = None
        self.restart_clock()

    def restart_clock(self):
        """Leaves out of `step_seconds` what was no step."""
        self._since, self._steps = time.perf_counter(), 0

    def push(self, step, step_metrics):
        """Step `step` has been dispatched; waits for the one before it."""
        pending, self._pending = self._pending, (step, self.stage, step_metrics)
        if pending:
            self._read(*pending)

    def flush(self):
        """Waits for all steps that were dispatched."""
        if self._pending:
            self._read(*self._pending)
        self._pending = None
        self._writer.flush()

    def _read(self, step, stage, step_metrics):
        values = {name: np.asarray(x).tolist() for name, x in step_metrics.items()}
        if not math.isfinite(values["loss"]) or not math.isfinite(values["grad_norm"]):
            raise TrainingError(
                f"loss {values['loss']} and gradient norm {values['grad_norm']} at step {step}; "
                "nothing of it was saved. Lower schedule.peak_lr and start anew"
            )
        self._steps += 1
        self.counters["positions"] += stage.step_positions
        self.counters["tokens"] += stage.step_tokens
        shape = (self._config.model, stage.rows, stage.positions)
        self.counters["flops"] += flops.step_flops(*shape)
        self.counters["flops_full_attention"] += flops.step_flops(*shape, causal=False)
        if step % self._config.log_every and step not in (1, stage.stop, self._config.steps):
            return
        seconds = (time.perf_counter() - self._since) / self._steps
        targets = 1 if stage.mode == "input" else stage.bag_size
        line = {
            "step": step,
            "phase": stage.phase,
            "bag_size": stage.bag_size,
            "loss": values["loss"],
            "loss_minus_log_s": values["loss"] - math.log(targets),
            "lr": values["lr"],
            "grad_norm": values["grad_norm"],
            **metrics.of_experts(values),
            **self.counters,
            "step_seconds": seconds,
            "positions_per_second": stage.step_positions / seconds,
            "tokens_per_second": stage.step_tokens / seconds,
        }
        self._writer.write(line)
        self._progress.update(
            step,
            f"{stage.phase} s={stage.bag_size}",
            loss=values["loss"],
            positions_per_s=line["positions_per_second"],
            tokens_per_s=line["tokens_per_second"],
        )
        self.restart_clock()

    def write_eval(self, step, loss, bits_per_byte):
        """One line for an evaluation after step `step`."""
        self._writer.write(
            {
                "step": step,
                "phase": self.stage.phase,
                "bag_size": self.stage.bag_size,
                "eval_loss": loss,
                "eval_bits_per_byte": bits_per_byte,
                **self.counters,
            }
        )
        self._progress.say(
            f"step {step}, held-out next-token loss {loss:.4f} nats a token, "
            f"{bits_per_byte:.4f} bits a byte"
        )
        self.restart_clock()

    def close(self):
        self.flush()
        self._writer.close()
        self._progress.close()


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
