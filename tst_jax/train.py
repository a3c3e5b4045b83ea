"""Trains one run: superposition, then recovery; or the baseline with --config.tst.ratio=0.

    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/tst
    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/b --config.tst.ratio=0

The same command resumes an interrupted run, to the same bits. --config.NAME=VALUE overrides a
setting; tst_jax/config.py lists them.
"""

import concurrent.futures
import dataclasses
import json
import math
import os
import pathlib
import time

import jax
import numpy as np

from tst_jax import __version__, flops, metrics, sharding
from tst_jax import config as config_lib
from tst_jax.checkpoint import Checkpoints
from tst_jax.config import Config, ConfigError
from tst_jax.data import pipeline
from tst_jax.data.store import open_store
from tst_jax.errors import UserError
from tst_jax.kernels import dispatch
from tst_jax.models import attention, hugging_face
from tst_jax.train_step import (
    at_switch,
    init_state,
    key_data,
    make_eval_step,
    make_train_step,
    state_shardings,
)

# Entries that table and head may have beyond the tokenizer's, so that they divide over a mesh.
MOST_PADDING = 1023


class TrainingError(UserError):
    """The run cannot go on; the message says from where it can."""


@dataclasses.dataclass
class Programs:
    """What runs on the devices, compiled before the first step (rule 17)."""

    init: object  # key data -> state; with config.init_from: (key data, params) -> state
    switch: object  # state -> state
    steps: dict  # stage index -> (state, tokens) -> (state, metrics)
    evaluate: object  # (params, tokens) -> (nats, tokens)


def train(config: Config, workdir, title: str = "train") -> None:
    """Trains until `config.steps` (or `stop_after`), resuming what is in `workdir`.

    Args:
      config: checked here, before anything is compiled or written.
      workdir: empty or new, or of a run with the same settings.
      title: in front of each line of progress.
    Raises:
      ConfigError, StoreError, DataError, CheckpointError: one line a problem.
      TrainingError: the loss is not finite.
    """
    config_lib.validate(config)
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
    held_out = pipeline.eval_batches(
        store.tokens("heldout"), config.eval.rows, config.data.positions, config.eval.tokens
    )
    try:
        mesh = sharding.make_mesh(config.mesh)
        shapes, shardings = state_shardings(config, mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    found = dispatch.problem(config.kernels, list(mesh.devices.flat), config.model.dtype)
    for stage in stages:
        found = found or attention.problem(
            config.model.attention_backend,
            sharding.platform(mesh),
            config.model.dtype,
            config.model.head_dim,
            stage.positions,
        )
    if found:
        raise ConfigError(found)
    _check_rows_divide(config, stages, mesh)
    if config.init_from and not (pathlib.Path(workdir) / "checkpoints").is_dir():
        found = hugging_face.check_import(
            config.init_from, config.model, store.tokenizer().get_vocab(with_added_tokens=True)
        )
        if found:
            raise ConfigError("\n".join(found))
    checkpoints = _open_workdir(config, stages, workdir)

    with checkpoints:
        saved = checkpoints.steps()
        step = saved[-1] if saved else 0
        last = config.steps if config.stop_after < 0 else config.stop_after
        counters = {"positions": 0, "tokens": 0, "flops": 0, "flops_full_attention": 0}
        if saved:
            found = checkpoints.record(step)
            if found["store"] != store.fingerprint:
                raise ConfigError(
                    f"{workdir} was trained on another store than {config.data.store}; give "
                    "data.store the one it was started with"
                )
            counters = found["counters"]
        progress = metrics.Progress(title, step, last)
        if saved and step >= last:
            progress.say(f"{workdir} is at step {step} already")
            progress.close()
            return
        if saved:
            progress.say(f"resuming at step {step}")
        if plan.epochs > 1:
            progress.say(f"the train split is read again: {plan.epochs} epochs are begun")

        programs = _compile(config, stages, mesh, shapes, shardings, step, last)
        state = None
        if not step:
            given = []
            if config.init_from:
                progress.say(f"starting from {config.init_from}")
                where = (shapes.params, shardings.params)
                given = [hugging_face.load_into(*where, config.init_from, config.model)]
            state = programs.init(key_data(config.seed), *given)
        log = _Log(config, workdir, stages, step, counters, progress)
        record = lambda: {
            "phase": log.stage.phase,
            "bag_size": log.stage.bag_size,
            "counters": dict(log.counters),
            "store": store.fingerprint,
            "version": __version__,
        }
        bytes_per_token = store.bytes_per_token("heldout")
        place = sharding.batch_sharding(mesh)
        put = lambda rows: jax.make_array_from_process_local_data(place, rows)
        held_out = [put(_local(rows)) for rows in held_out]

        for index, stage in enumerate(stages):
            if stage.stop <= step or stage.start >= last:
                continue
            # A switch always goes through the checkpoint, so that going on and restarting are one
            # path (rule 16).
            if state is None or (step == stage.start and step > 0):
                state = None  # frees the old one first: there is room for one state (rule 17)
                state = checkpoints.restore(step, shapes, shardings)
            if step == stage.start and step > 0:
                state = programs.switch(state)
            log.stage = stage
            rows = pipeline.batches(
                tokens, plan, index, step, jax.process_index(), jax.process_count()
            )
            end = min(stage.stop, last)
            run_step = programs.steps[index]
            while step < end:
                state, step_metrics = run_step(state, put(next(rows)))
                step += 1
                log.push(step, step_metrics)  # reads the metrics of the step before
                every = config.eval.every
                if (every and step % every == 0) or step in (stage.stop, config.steps):
                    log.flush()
                    loss = _evaluate(programs.evaluate, state.params, held_out)
                    log.write_eval(step, loss, loss / math.log(2) / bytes_per_token)
                every = config.checkpoint.every
                if (every and step % every == 0) or step == end:
                    log.flush()  # a state that is not finite is never saved
                    checkpoints.save(step, state, record())
                    if step == end:
                        checkpoints.wait()
                    log.restart_clock()
        log.close()


def _check_rows_divide(config, stages, mesh):
    devices = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
    batches = {f"{stage.phase} rows": stage.rows for stage in stages}
    for name, rows in (batches | {"eval.rows": config.eval.rows}).items():
        if rows % devices:
            raise ConfigError(
                f"{rows} {name} do not divide over mesh.data * mesh.fsdp * mesh.expert = {devices} "
                "devices; change data.rows, eval.rows or mesh"
            )


def _open_workdir(config, stages, workdir) -> Checkpoints:
    """A new folder is begun, a run's own taken up if its settings agree, any other refused."""
    workdir = pathlib.Path(workdir)
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
        os.replace(partial, path)
    switches = [stage.start for stage in stages if stage.start > 0]
    return Checkpoints(workdir / "checkpoints", config.checkpoint.keep, switches)


def _compile(config, stages, mesh, shapes, shardings, step, last) -> Programs:
    """Compiles whatever the rest of the run needs, at the same time."""
    batch = sharding.batch_sharding(mesh)
    whole = sharding.replicated(mesh)
    int32 = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
    lowered = {}
    for index, stage in enumerate(stages):
        if stage.stop > step and stage.start < last:
            lowered[index] = jax.jit(
                make_train_step(config, stage, mesh),
                in_shardings=(shardings, batch),
                out_shardings=(shardings, whole),
                donate_argnums=0,
            ).lower(shapes, int32(stage.rows, stage.row_tokens))
    lowered["evaluate"] = jax.jit(
        make_eval_step(config, mesh), in_shardings=(shardings.params, batch), out_shardings=whole
    ).lower(shapes.params, int32(config.eval.rows, config.data.positions + 1))
    if step == 0:
        given = (shapes.params,) if config.init_from else ()
        lowered["init"] = jax.jit(
            lambda key, *given: init_state(config, key, *given),
            in_shardings=(whole, *([shardings.params] if given else [])),
            out_shardings=shardings,
            donate_argnums=[1] if given else [],
        ).lower(key_data(0), *given)
    changes = config.tst.reset_optimizer or config.tst.reinit_embedding_and_head
    if changes:
        lowered["switch"] = jax.jit(
            lambda state: at_switch(config, state),
            in_shardings=(shardings,),
            out_shardings=shardings,
            donate_argnums=0,
        ).lower(shapes)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values())))
    unchanged = lambda state: state
    return Programs(
        compiled.pop("init", None),
        compiled.pop("switch", unchanged),
        evaluate=compiled.pop("evaluate"),
        steps=compiled,
    )


def _local(rows):
    """This process' share of rows that every process has read."""
    share = len(rows) // jax.process_count()
    return rows[jax.process_index() * share :][:share]


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
        self._writer = metrics.Writer(workdir, step)
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

    def main():
        config = cli.read_config(CONFIG)
        if not WORKDIR.value:
            raise UserError("--workdir is missing; give the folder of the run")
        train(config, WORKDIR.value)

    cli.run(main, __doc__)
