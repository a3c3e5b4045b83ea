"""What a run's last checkpoint is worth: scores of downstream tasks, and held-out loss of a store.

    python -m tst_jax.evaluate --workdir=runs/tst --tasks=hellaswag,arc_easy,piqa,winogrande
    python -m tst_jax.evaluate --workdir=runs/tst --heldout=runs/quickstart/store

Tasks are those of EleutherAI's lm-evaluation-harness (pip install lm-eval), and of files like its
own under --include_path; a task's data comes from where its file says, a hub mostly. --heldout
needs no more than the trainer, and reads rows as its evaluations do.
"""

import dataclasses
import functools
import importlib.util
import json
import math
import pathlib
import sys
import time

import jax
import numpy as np
import tqdm

from tst_jax import programs, sharding
from tst_jax.checkpoint import Checkpoints
from tst_jax.config import Config
from tst_jax.data import pipeline
from tst_jax.data.store import Store, StoreError, open_store
from tst_jax.errors import UserError
from tst_jax.generate import open_run_store, read_run_config, warning
from tst_jax.models.shapes import ModelConfig
from tst_jax.models.transformer import Transformer
from tst_jax.scoring import Scorer
from tst_jax.train_step import make_eval_step

HARNESS = "'lm-eval>=0.4.13,<0.5'"  # earlier ones begin contexts otherwise


def evaluate(
    workdir,
    tasks=(),
    heldout=(),
    *,
    store=None,
    include_path=None,
    limit: int = 0,
    num_fewshot: int = 0,
    batch_positions: int = 16384,
    heldout_tokens: int = 0,
) -> dict:
    """Scores of the newest good checkpoint of a run.

    Args:
      workdir: of a run that `tst_jax.train` made.
      tasks: names of tasks, groups or tags of the harness.
      heldout: folders of stores with the run's vocabulary.
      store: folder of the store that the run was trained on, for its tokenizer, if it was moved.
      include_path: folder of further task files.
      limit: at most so many documents of a task; 0: all.
      num_fewshot: examples in front of each question.
      batch_positions: about so many in a batch of requests.
      heldout_tokens: at most about so many of a store; 0: all. With the run's own store and
        `eval.tokens` it is the evaluation that training does.
    Returns:
      {"step": int, "heldout": {folder: {"loss", "bits_per_byte", "tokens"}}, "tasks": {name:
      {"acc,none": ..., "acc_stderr,none": ...}}}
    Raises:
      UserError: a line a problem, before anything is compiled.
    """
    harness = _harness() if tasks else None
    manager = harness.task_manager(tasks, include_path) if tasks else None
    run = read_run_config(workdir)
    model_config = ModelConfig(**run["model"])
    # What ran the training may not run here; the parameters are the same.
    model_config = dataclasses.replace(model_config, attention_backend="auto")
    shapes = jax.eval_shape(lambda key: Transformer(model_config, key), jax.random.key(0))
    folder = pathlib.Path(workdir) / "checkpoints"
    with Checkpoints(folder, read_only=True, say=_say) as checkpoints:
        step = checkpoints.newest()
        record = checkpoints.record(step)
        stores = [_open_heldout(path, record, run) for path in heldout]
        mesh, shardings = _layout(run, shapes)

        @functools.cache
        def params():
            return checkpoints.restore(step, shapes, shardings, prefix="params")

        if text := warning(record):
            _say(text)
        found = {"workdir": str(workdir), "step": step}
        if tasks:  # first, because some may not be there
            store = open_run_store(run, record, store)
            store.vocabulary().encode("")  # refuses ids without a tokenizer
            longest = model_config.max_positions or run["data"]["positions"]
            scorer = lambda: Scorer(params(), mesh, longest, batch_positions)
            lm = harness.RunLM(scorer, store, Progress)
            found |= harness.run(lm, tasks, manager, limit, num_fewshot)
        if stores:
            program = _heldout_program(run, model_config, mesh)
            found["heldout"] = {
                str(path): _heldout_loss(program, params(), run, mesh, opened, heldout_tokens)
                for path, opened in zip(heldout, stores)
            }
    return found


def _harness():
    """`tst_jax.harness`, which imports lm_eval."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"lm_eval is missing, which --tasks needs; run: pip install {HARNESS}")
    try:
        from tst_jax import harness
    except ImportError as error:
        why = " ".join(str(error).split())
        raise UserError(f"lm_eval cannot be imported ({why}); run: pip install {HARNESS}") from None
    return harness


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _layout(run, shapes):
    """(mesh, shardings of the parameters) over all devices: as in training if that goes here, else
    parameters in parts over all devices, else a copy on each."""
    wanted = sharding.MeshConfig(**run["mesh"])
    for config in (wanted, sharding.MeshConfig(data=1, fsdp=-1), sharding.MeshConfig()):
        try:
            mesh = sharding.make_mesh(config, jax.local_devices())
            return mesh, sharding.param_shardings(shapes, mesh)
        except ValueError:
            continue
    raise AssertionError("a copy on each device goes anywhere")


# ---- held-out loss


def _open_heldout(path, record: dict, run: dict) -> Store:
    store = open_store(path, verify="sizes")
    if store.vocabulary_sha256 != record["vocabulary"]:
        raise StoreError(
            f"--heldout: {store.path} was made with {store.vocabulary().describe()}, and the run "
            f"was trained with the vocabulary sha256 {record['vocabulary'][:8]}; prepare it with "
            "the run's tokenizer"
        )
    _heldout_rows(run, store, limit=1, numbers=[0])  # refuses a split that is too short
    return store


def _heldout_rows(run, store, limit, numbers=None) -> list:
    stream = pipeline.open_stream(store, "heldout", run["data"]["packing"], store.path.name)
    rows, positions = run["eval"]["rows"], run["data"]["positions"]
    return pipeline.eval_batches(stream, rows, positions, limit, numbers)


def _heldout_program(run, model_config, mesh):
    """The evaluation of training, jitted: (params, *batch) -> (nats, tokens)."""
    config = Config(model=model_config, loss_chunk=run["loss_chunk"])
    options = programs.COMPILER_OPTIONS[sharding.platform(mesh)]
    return jax.jit(make_eval_step(config, mesh), compiler_options=options)


def _heldout_loss(program, params, run, mesh, store, limit) -> dict:
    """Mean next-token loss over a held-out split, and what it says of a byte of its text."""
    batches = _heldout_rows(run, store, limit)
    parts = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"])
    missing = -run["eval"]["rows"] % parts  # rows that make a batch divide over the devices
    if missing:
        batches = [_filled_up(batch, missing) for batch in batches]
    place, results = sharding.batch_sharding(mesh), []
    with Progress(f"held-out loss of {store.path.name}", "batches") as progress:
        for batch in batches:
            results.append(program(params, *jax.device_put(batch, place)))
            jax.block_until_ready(results[-3:-2])  # two are under way
            progress.update(len(results), len(batches))
    nats, tokens = np.asarray(jax.device_get(results), np.float64).sum(0)
    loss, per_token = float(nats / tokens), store.bytes_per_token("heldout")
    bits = None if per_token is None else loss / math.log(2) / per_token
    return {"loss": loss, "bits_per_byte": bits, "tokens": int(tokens)}


def _filled_up(batch, missing: int):
    """A batch with `missing` rows of pads, which the segments tell apart."""
    tokens, segments = batch if len(batch) == 2 else (batch[0], np.ones_like(batch[0]))
    return tuple(np.pad(x, ((0, missing), (0, 0))) for x in (tokens, segments))


# ---- what is printed


class Progress:
    """How far it is: a bar on a terminal; elsewhere (a log) a line every ten seconds.

    Args:
      title: in front.
      unit: of what is counted, in the plural.
    """

    def __init__(self, title: str, unit: str):
        self._title, self._unit, self._bar = title, unit, None
        self._began = self._last = time.monotonic()
        self._first = None  # (time, done) at the first update: compiling is over

    def update(self, done: int, total: int) -> None:
        """`done` of `total` are over."""
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = tqdm.tqdm(total=total, desc=self._title, unit=f" {self._unit}")
            self._bar.update(done - self._bar.n)
            return
        now = time.monotonic()
        self._first = self._first or (now, done)
        if now - self._last < 10 and done < total:
            return
        self._last, (began, before) = now, self._first
        line = f"{self._title}: {done:,} of {total:,} {self._unit}"
        if done > before and now > began:
            rate = (done - before) / (now - began)
            left = int((total - done) / rate)
            line += f", {rate:,.1f} a second, {left // 60}:{left % 60:02d} left"
        _say(line)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._bar is not None:
            self._bar.close()


def table(found: dict) -> str:
    """The figures of `evaluate` for the eye: a line each, with the standard error if there is."""
    lines = [("", "", "score", "standard error")]
    for path, figures in found.get("heldout", {}).items():
        lines.append((path, "held-out loss, nats a token", f"{figures['loss']:.4f}", ""))
        if figures["bits_per_byte"] is not None:
            lines.append((path, "held-out bits a byte", f"{figures['bits_per_byte']:.4f}", ""))
    for task, figures in found.get("tasks", {}).items():
        for name, value in figures.items():
            metric, _, kind = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or not kind:
                continue
            error = figures.get(f"{metric}_stderr,{kind}")
            error = f"{error:.4f}" if isinstance(error, int | float) else ""
            label = metric if kind == "none" else f"{metric} ({kind})"
            lines.append((task, label, f"{value:.4f}", error))
    widths = [max(map(len, column)) for column in zip(*lines)]
    left = lambda line: [text.ljust(width) for text, width in zip(line[:2], widths)]
    right = lambda line: [text.rjust(width) for text, width in zip(line[2:], widths[2:])]
    return "\n".join("  ".join(left(line) + right(line)).rstrip() for line in lines)


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run that tst_jax.train made.")
    HELDOUT = flags.DEFINE_list("heldout", [], "Stores whose held-out loss is wanted.")
    TOKENS = flags.DEFINE_integer("heldout_tokens", 0, "About so many of each; 0: all.")
    TASKS = flags.DEFINE_list("tasks", [], "Names of tasks, groups or tags of lm_eval.")
    INCLUDE = flags.DEFINE_string(
        "include_path", None, "Folder of task files; functions that they name are run."
    )
    LIMIT = flags.DEFINE_integer("limit", 0, "At most so many documents of a task; 0: all.")
    FEWSHOT = flags.DEFINE_integer("num_fewshot", 0, "Examples in front of each question.")
    POSITIONS = flags.DEFINE_integer("batch_positions", 16384, "In a batch of requests, about.")
    STORE = flags.DEFINE_string("store", None, "Store with the tokenizer, if it was moved.")
    JSON = flags.DEFINE_string("json", None, "File for the figures.")

    def problems():
        """One line for each option that cannot be."""
        if not WORKDIR.value:
            yield "--workdir is missing; give the folder of a run"
        if not TASKS.value and not HELDOUT.value:
            yield "--tasks and --heldout are missing; give names of tasks, or folders of stores"
        for flag, least in ((LIMIT, 0), (FEWSHOT, 0), (POSITIONS, 1), (TOKENS, 0)):
            if flag.value < least:
                yield f"--{flag.name} is {flag.value}; it must be at least {least}"
        if INCLUDE.value and not pathlib.Path(INCLUDE.value).is_dir():
            yield f"--include_path: {INCLUDE.value} is no folder; give one with task files"
        if JSON.value and not pathlib.Path(JSON.value).absolute().parent.is_dir():
            yield f"--json: {JSON.value} lies in no folder that exists; make it first"
        if JSON.value and pathlib.Path(JSON.value).is_dir():
            yield f"--json: {JSON.value} is a folder; give a file"

    def main():
        if found := list(problems()):
            raise UserError("\n".join(found))
        programs.use_cache()
        found = evaluate(
            WORKDIR.value,
            TASKS.value,
            HELDOUT.value,
            store=STORE.value,
            include_path=INCLUDE.value,
            limit=LIMIT.value,
            num_fewshot=FEWSHOT.value,
            batch_positions=POSITIONS.value,
            heldout_tokens=TOKENS.value,
        )
        print(table(found))
        if JSON.value:
            pathlib.Path(JSON.value).write_text(json.dumps(found, indent=2) + "\n")

    cli.run(main, __doc__)
