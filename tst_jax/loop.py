"""The loop: from one checkpoint on, step by step, through evaluations, saves and switches."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
from etils import epath

from tst_jax import __version__, hosts, profiling, programs, sharding
from tst_jax import workdir as workdir_lib
from tst_jax.config import Config
from tst_jax.data import pipeline
from tst_jax.data.order import Order
from tst_jax.data.store import Store
from tst_jax.errors import Preempted
from tst_jax.models import hugging_face
from tst_jax.run_log import Log
from tst_jax.train_step import TrainState, key_data


@dataclasses.dataclass
class Run:
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

    def batches(self, index: int, step: int):
        """Iterator over the batches of a stage from `step` on, on the devices; to be closed."""
        rows = self.stages[index].rows
        numbers = sharding.local_rows(self.mesh, rows)
        put = functools.partial(self.batch, rows, numbers)
        ahead = self.config.data.prefetch
        return pipeline.batches(self.streams, self.order, index, step, numbers, put, ahead)


def is_switch(before, after) -> bool:
    """Whether two neighbouring stages differ in more than the batch size."""
    return before.bag_size != after.bag_size


def is_eval(config, stages, step) -> bool:
    """Whether the held-out loss is due after `step` steps."""
    every = config.eval.every
    ends = {config.steps, *(stage.stop for stage in stages)}
    return bool(every and step % every == 0) or step in ends


def initial_state(run: Run, compiled: programs.Programs, say) -> TrainState:
    """The state before step 0, on the devices."""
    config, given = run.config, []
    if config.init_from:
        say(f"starting from {config.init_from}")
        places = run.shapes.params, run.shardings.params
        given = [hugging_face.load_into(*places, config.init_from, config.model)]
    return compiled.init(key_data(config.seed), *given)


class Loop:
    """The steps from one checkpoint on. All processes of a run go through it alike."""

    def __init__(self, run, checkpoints, events, preemption, progress, check_lock):
        self._run, self._checkpoints, self._events = run, checkpoints, events
        self._preemption, self._progress, self._check_lock = preemption, progress, check_lock
        self.step = 0

    def go(self, step: int, evaluate: bool) -> None:
        """Trains from `step` on.

        Args:
          step: of the checkpoint to go on from; 0: anew.
          evaluate: whether that step's evaluation is still to be done.
        """
        run, config, stages = self._run, self._run.config, self._run.stages
        self.step, last, say = step, config.last, self._progress.say
        where = run.mesh, run.shapes, run.shardings
        compiled = self._preemption.watch(
            lambda: programs.compile_run(config, stages, *where, step, last, say)
        )
        state = None if step else initial_state(run, compiled, say)
        record = self._checkpoints.record(step) if step else None
        log = Log(run, step, record, self._events, self._progress)
        self._held_out = held_out(run)
        self._trace = profiling.Trace(config.profile, run.workdir, silent=not hosts.is_first())
        with contextlib.closing(self._trace), contextlib.closing(log):
            if evaluate:
                state = self._restore()
                log.stage = next(stage for stage in stages if stage.start < step <= stage.stop)
                if not self._write_eval(log, compiled, state):
                    raise self._told_to_end()
            for index, stage in enumerate(stages):
                if stage.stop <= self.step or stage.start >= last:
                    continue
                # A switch always goes through the checkpoint, so that going on and restarting are
                # one path (rule 16).
                if state is None or (self.step == stage.start and self.step > 0):
                    state = None  # frees the old one first: there is room for one (rule 17)
                    if self.step > step:  # was written a moment ago, and nobody has looked yet
                        self._checkpoints.verify(self.step, self._preemption.watch)
                    state = self._restore()
                if self.step == stage.start > 0 and is_switch(stages[index - 1], stage):
                    state = compiled.switch(state)
                state = self._stage(index, state, compiled, log)

    def _restore(self):
        run = self._run
        restore = lambda: self._checkpoints.restore(self.step, run.shapes, run.shardings)
        # Processes talk to each other here, so that they cannot be left to themselves.
        return restore() if jax.process_count() > 1 else self._preemption.watch(restore)

    def _told_to_end(self) -> Preempted:
        return Preempted(
            f"{self._run.workdir}: told to end, saved at step {self.step}; the same command goes on"
        )

    def _stage(self, index, state, compiled, log):
        """Trains to the end of a stage, or of the run, and saves there."""
        run, config, stage = self._run, self._run.config, self._run.stages[index]
        log.stage = stage
        end, every = min(stage.stop, config.last), config.checkpoint.every
        with contextlib.closing(run.batches(index, self.step)) as batches:
            while self.step < end:
                self._check_lock()
                self._checkpoints.check()
                self._trace.at(self.step, log)
                with log.waits_for_data():
                    batch = next(batches)
                with jax.profiler.StepTraceAnnotation("step", step_num=self.step + 1):
                    state, step_metrics = compiled.steps[index](state, *batch)
                self.step += 1
                log.push(self.step, step_metrics)  # reads the metrics of the step before
                stop, evaluated = self._preemption.reached(), True
                if is_eval(config, run.stages, self.step):
                    evaluated = not stop and self._write_eval(log, compiled, state)
                stop |= not evaluated
                if stop or (every and self.step % every == 0) or self.step == end:
                    log.flush()  # a state that is not finite is never saved
                    self._checkpoints.save(self.step, state, self._record(log))
                    if stop or self.step == end:
                        self._checkpoints.wait()
                    log.restart_clock()
                if stop and (self.step < config.last or not evaluated):
                    raise self._told_to_end()
        return state

    def _write_eval(self, log, compiled, state) -> bool:
        """False: told to end meanwhile; nothing is written then, and a resumed run begins here."""
        log.flush()
        losses = _evaluate(compiled.evaluate, state.params, self._held_out, self._preemption)
        if losses is not None:
            log.write_eval(self.step, losses)
        return losses is not None

    def _record(self, log) -> dict:
        return {
            "phase": log.stage.phase,
            "bag_size": log.stage.bag_size,
            "counters": dict(log.counters),
            "guard": log.guard.state(),
            "config": workdir_lib.plain(self._run.config),
            "stores": [store.fingerprint for store in self._run.stores],
            "vocabulary": self._run.stores[0].vocabulary_sha256,
            "version": __version__,
        }


def held_out(run) -> list[list]:
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


def _evaluate(evaluate, params, held_out, preemption) -> list[float] | None:
    """Next-token loss over each store's held-out rows, nats a token; None: told to end."""
    found = []
    for batches in held_out:
        results = []
        for batch in batches:
            if preemption.reached():
                return None
            results.append(evaluate(params, *batch))
            jax.block_until_ready(results[-3:-2])  # two are under way, so that an end comes soon
        sums = np.asarray(jax.device_get(results), np.float64).sum(0)
        found.append(float(sums[0] / sums[1]))
    return found
