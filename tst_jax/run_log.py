"""What a run says of its steps: counted, checked, timed, written, and shown."""

import contextlib
import math
import time

import numpy as np

from tst_jax import flops, hosts, metrics
from tst_jax.data import corpus
from tst_jax.guard import Guard


class Log:
    """Reads metrics one step late, checks and counts them, and writes a line every `log_every`
    steps.

    Args:
      run: of the trainer.
      step: steps done so far.
      record: of the checkpoint of that step, None before the first one.
      events, progress: where to say what happens.
    """

    def __init__(self, run, step, record, events, progress):
        self.stage = run.stages[0]
        names = "positions", "tokens", "flops", "flops_full_attention"
        self.counters = dict(record["counters"] if record else dict.fromkeys(names, 0))
        self.guard = Guard(run.config.numbers, record["guard"] if record else None)
        self._run, self._config, self._progress = run, run.config, progress
        self._events, self._due = events, False
        self._writer = metrics.Writer(run.workdir, step, silent=not hosts.is_first())
        self._pending = None
        self.restart_clock()

    def restart_clock(self):
        """Leaves out of `step_seconds` what was no step."""
        self._since, self._steps, self._waited = time.perf_counter(), 0, 0.0

    @contextlib.contextmanager
    def waits_for_data(self):
        """Counts the time inside as waiting for data."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

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
        numbers = values["loss"], values["grad_norm"], values["finite"]
        for event in self.guard.read(step, stage, *numbers):
            self._tell(event)
        self._steps += 1
        self.counters["positions"] += stage.step_positions
        tokens = values.get("valid_tokens", stage.step_tokens)
        self.counters["tokens"] += tokens
        shape = (self._config.model, stage.rows, stage.positions)
        self.counters["flops"] += flops.step_flops(*shape)
        self.counters["flops_full_attention"] += flops.step_flops(*shape, causal=False)
        self._due |= step % self._config.log_every == 0
        self._due |= step in (1, stage.stop, self._config.steps)
        if not self._due or not values["finite"]:  # a step that was left out has no figures
            return
        self._due = False
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
            "data_wait_seconds": self._waited / self._steps,
            "positions_per_second": stage.step_positions / seconds,
            "tokens_per_second": tokens / seconds,
            **corpus.progress(self._run.order, self._run.streams, step),
        }
        if "valid_tokens" in values:
            line["padding_efficiency"] = tokens / stage.step_tokens
        self._writer.write(line)
        self._progress.update(
            step,
            f"{stage.phase} s={stage.bag_size}",
            loss=values["loss"],
            positions_per_s=line["positions_per_second"],
            tokens_per_s=line["tokens_per_second"],
        )
        self.restart_clock()

    def _tell(self, event):
        if event["event"] == "skipped":
            # Step k is the one after k - 1 steps.
            event = {**event, "rows": self._run.order.places(event["step"] - 1)}
            text = (
                f"step {event['step']} is left out: loss {event['loss']}, gradient norm "
                f"{event['grad_norm']} ({event['skips']} of {self._config.numbers.skips} skips); "
                "events.jsonl says which rows it read"
            )
        else:
            text = (
                f"the loss of step {event['step']} is {event['loss']:.4f}, usual is "
                f"{event['usual']:.4f}"
            )
        self._events.write(**event)
        self._progress.say(f"warning: {text}")

    def write_eval(self, step, losses):
        """One line for an evaluation after step `step`: its loss on each store's held-out rows."""
        found = corpus.eval_figures(losses, self._run.stores, self._run.order)
        self._writer.write(
            {
                "step": step,
                "phase": self.stage.phase,
                "bag_size": self.stage.bag_size,
                **found,
                **self.counters,
            }
        )
        text = f"step {step}, held-out next-token loss {found['eval_loss']:.4f} nats a token"
        if found["eval_bits_per_byte"] is not None:
            text += f", {found['eval_bits_per_byte']:.4f} bits a byte"
        self._progress.say(text)
        self.restart_clock()

    def close(self):
        self.flush()
        self._writer.close()
        self._progress.close()
