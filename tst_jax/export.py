"""Writes a run's last checkpoint as a Hugging Face model, tokenizer included.

    python -m tst_jax.export --workdir=runs/quickstart/runs/tst-seed0 --out=exported

What `AutoModelForCausalLM` and `AutoTokenizer` load from it answers as `tst_jax.generate` does.
"""

import json
import pathlib
import sys

import jax
import tqdm
from tokenizers import Tokenizer, processors

from tst_jax.checkpoint import Checkpoints
from tst_jax.data.vocabulary import Vocabulary
from tst_jax.errors import UserError
from tst_jax.generate import open_run_store, read_run_config, warning
from tst_jax.models.hugging_face import DTYPES, write_model
from tst_jax.models.hugging_face_map import architecture
from tst_jax.models.shapes import ModelConfig
from tst_jax.models.transformer import Transformer


def export(workdir, out, store=None, dtype: str = "float32", force: bool = False) -> None:
    """Writes the Hugging Face folder `out` from a run's last checkpoint.

    Reads one array at a time: memory holds the largest one, never the model.

    Args:
      workdir: of a run that `tst_jax.train` made.
      out: the folder to make; it may exist if it is empty.
      store: folder of the store that the run was trained on, if it was moved.
      dtype: of the weights: float32 as they were trained, or bfloat16, rounded.
      force: also from the superposition phase (rule 19).
    Raises:
      UserError: one line a problem; nothing is then left at `out`.
    """
    if dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    run = read_run_config(workdir)
    cfg = ModelConfig(**run["model"])
    architecture(cfg)  # complains before the store is read
    shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    folder = pathlib.Path(workdir) / "checkpoints"
    say = lambda line: print(line, file=sys.stderr)
    with Checkpoints(folder, read_only=True, say=say) as checkpoints:
        step = checkpoints.newest()
        record = checkpoints.record(step)
        text = warning(record)
        if text and not force:
            raise UserError(f"{text.removeprefix('warning: ')}; train on, or give --force")
        if text:
            print(text, file=sys.stderr)
        store = open_run_store(run, record, store)
        longest = cfg.max_positions or run["data"]["positions"]
        with _Progress(f"step {step} to {out}") as progress:
            write_model(
                out,
                cfg,
                checkpoints.reader(step, shapes, prefix="params"),
                max_positions=longest,
                separator_id=store.separator_id,
                dtype=dtype,
                files=_tokenizer_files(store.vocabulary(), store.beginning, longest),
                progress=progress.update,
            )


def _tokenizer_files(
    vocabulary: Vocabulary, beginning: list[int], max_positions: int
) -> dict[str, str | bytes]:
    """Name -> content of what `AutoTokenizer` reads, which begins each text with `beginning`:
    a training document stands after these ids, and so does the prompt of `tst_jax.generate`.

    A vocabulary of another kind than Hugging Face's is written as it is.
    """
    if vocabulary.kind != "tokenizers":
        print(f"{vocabulary.file} is written as it is: transformers may need it converted")
        return {vocabulary.file: vocabulary.data}
    tokenizer = Tokenizer.from_str(vocabulary.data.decode())
    names = [tokenizer.id_to_token(i) for i in beginning]
    # In place of any other: training ids were made without special tokens.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*names, "$A"],
        pair=[*names, "$A", *names, "$B:1"],
        special_tokens=sorted(set(zip(names, beginning))),
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[-1],
        "eos_token": names[0],
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }


class _Progress:
    """A bar on a terminal; elsewhere (a log) a line at each quarter."""

    def __init__(self, title: str):
        self._title, self._quarter, self._bar = title, 0, None

    def update(self, done: int, total: int) -> None:
        """`done` of `total` bytes are written."""
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = tqdm.tqdm(total=total, desc=self._title, unit="B", unit_scale=True)
            self._bar.update(done - self._bar.n)
        elif done * 4 // total > self._quarter:
            self._quarter = done * 4 // total
            print(f"{self._title}: {done:,} of {total:,} bytes", flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._bar is not None:
            self._bar.close()


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run that tst_jax.train made.")
    OUT = flags.DEFINE_string("out", None, "Folder to make.")
    STORE = flags.DEFINE_string("store", None, "Store with the tokenizer, if it was moved.")
    DTYPE = flags.DEFINE_string("dtype", "float32", "Of the weights: float32 or bfloat16.")
    FORCE = flags.DEFINE_bool("force", False, "Also from the superposition phase.")

    def main():
        for name, value in (("workdir", WORKDIR.value), ("out", OUT.value)):
            if not value:
                raise UserError(f"--{name} is missing; give a folder")
        export(WORKDIR.value, OUT.value, STORE.value, DTYPE.value, FORCE.value)

    cli.run(main, __doc__)
