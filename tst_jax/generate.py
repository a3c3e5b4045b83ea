"""Samples text from a run's last checkpoint.

    python -m tst_jax.generate --workdir=runs/quickstart/runs/tst-seed0 --prompt='def '

One position a step, with a cache of keys and values. The same seed draws the same text.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from tst_jax import sharding
from tst_jax.checkpoint import Checkpoints
from tst_jax.data.store import Store, open_store
from tst_jax.errors import UserError
from tst_jax.models.transformer import ModelConfig, Transformer


def read_run_config(workdir) -> dict:
    """config.json of a run, as nested dicts."""
    path = pathlib.Path(workdir) / "config.json"
    if not path.exists():
        raise UserError(f"{path} does not exist; give --workdir the folder of one training run")
    return json.loads(path.read_text())


def load_model(workdir) -> tuple[Transformer, dict]:
    """The parameters of a run's last checkpoint, on the first device, and its record."""
    cfg = ModelConfig(**read_run_config(workdir)["model"])
    shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    mesh = sharding.make_mesh(sharding.MeshConfig(), jax.devices()[:1])
    shardings = sharding.param_shardings(shapes, mesh)
    folder = pathlib.Path(workdir) / "checkpoints"
    say = lambda line: print(line, file=sys.stderr)
    with Checkpoints(folder, read_only=True, say=say) as checkpoints:
        step = checkpoints.newest()
        params = checkpoints.restore(step, shapes, shardings, prefix="params")
        return params, checkpoints.record(step)


def open_run_store(run: dict, record: dict, path=None) -> Store:
    """A store that a run was trained on, for its vocabulary: at `path`, or where its config says.

    Its tokens are not read.
    """
    store = open_store(path or run["data"]["store"].split(",")[0].strip(), verify="sizes")
    if store.vocabulary_sha256 != record["vocabulary"]:
        raise UserError(
            f"{store.path} has another vocabulary than this run was trained with; give --store"
        )
    return store


def warning(record: dict) -> str | None:
    """What to say before sampling from, exporting or evaluating a checkpoint (rule 19)."""
    if record["phase"] == "recovery":
        return None
    return (
        f"warning: step {record['step']} lies in the superposition phase (bag size "
        f"{record['bag_size']}); this is not yet a next-token model and its text is no text"
    )


@functools.partial(jax.jit, static_argnames=("temperature", "top_k"), donate_argnames="cache")
def _next_token(model, tokens_1xL, cache, at, key, temperature, top_k):
    """The token after `tokens_1xL`, which stand at positions `at ..`, and the grown cache."""
    hidden, cache = model.body(model.embed(tokens_1xL[..., None]), cache, at)
    logits_V = model.logits(hidden[:, -1:])[0, 0]
    if top_k:
        kept = jax.lax.top_k(logits_V, top_k)[0][-1]
        logits_V = jnp.where(logits_V < kept, -jnp.inf, logits_V)
    if temperature == 0:
        return jnp.argmax(logits_V), cache
    return jax.random.categorical(key, logits_V / temperature), cache


def sample(
    model: Transformer,
    prompt_ids: list[int],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_id: int = -1,
) -> list[int]:
    """New token ids after the prompt, with a KV cache: one position a step.

    Args:
      model: the decoder.
      prompt_ids: at least one id.
      max_tokens: at most so many new ones.
      temperature: 0 takes the likeliest token each time.
      top_k: draw among the k likeliest only; 0: among all.
      seed: of the draws.
      stop_id: ends the text, and is not returned; -1: never.
    Raises:
      UserError: learned positions end before the text would.
    """
    longest = model.cfg.max_positions
    if model.cfg.positions == "learned" and len(prompt_ids) + max_tokens > longest:
        raise UserError(
            f"{len(prompt_ids)} tokens of prompt and {max_tokens} new ones do not fit the model's "
            f"{longest} learned positions; lower --max_tokens, or shorten the prompt"
        )
    cache = model.empty_cache(1, len(prompt_ids) + max_tokens)
    fed, at, new = np.asarray([prompt_ids], np.int32), 0, []
    key = jax.random.key(seed)
    while len(new) < max_tokens:
        draw = jax.random.fold_in(key, len(new))
        token, cache = _next_token(model, fed, cache, at, draw, temperature, top_k)
        if int(token) == stop_id:
            break
        new.append(int(token))
        at += fed.shape[1]
        fed = np.asarray([[new[-1]]], np.int32)
    return new


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run that tst_jax.train made.")
    PROMPT = flags.DEFINE_string("prompt", "def ", "Text to go on from.")
    MAX_TOKENS = flags.DEFINE_integer("max_tokens", 128, "At most so many new tokens.")
    TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 takes the likeliest token each time.")
    TOP_K = flags.DEFINE_integer("top_k", 40, "Draw among the likeliest K only; 0: among all.")
    SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.")
    STORE = flags.DEFINE_string("store", None, "Store with the tokenizer, if it was moved.")

    def main():
        if not WORKDIR.value:
            raise UserError("--workdir is missing; give the folder of a run")
        if MAX_TOKENS.value < 1 or TEMPERATURE.value < 0 or TOP_K.value < 0:
            raise UserError("--max_tokens starts at 1, --temperature and --top_k at 0")
        run = read_run_config(WORKDIR.value)
        model, record = load_model(WORKDIR.value)
        store = open_run_store(run, record, STORE.value)
        vocabulary = store.vocabulary()
        # Documents begin after a separator, so an empty prompt is one too.
        prompt_ids = [*store.beginning, *vocabulary.encode(PROMPT.value)]
        text = warning(record)
        if text:
            print(text, file=sys.stderr)
        new = sample(
            model,
            prompt_ids,
            MAX_TOKENS.value,
            TEMPERATURE.value,
            min(TOP_K.value, model.cfg.vocab_size),
            SEED.value,
            store.separator_id,
        )
        print(PROMPT.value + vocabulary.decode(new))

    cli.run(main, __doc__)
