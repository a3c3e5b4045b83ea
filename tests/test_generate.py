"""Sampling: the KV cache changes nothing, and a superposition checkpoint warns (rule 19)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax.errors import UserError
from tst_jax.generate import load_model, sample, warning
from tst_jax.models.transformer import ModelConfig, Transformer


@pytest.fixture(scope="module")
def model():
    cfg = ModelConfig(vocab_size=61, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ff=24)
    model = jax.jit(lambda key: Transformer(cfg, key))(jax.random.key(1))
    model.output[...] = model.output[...] * 40  # confident enough that draws differ from argmax
    return model


def next_logits(model, ids):
    hidden = model.body(model.embed(jnp.asarray(ids)[None, :, None]))
    return np.asarray(model.logits(hidden)[0, -1])


def test_greedy_equals_the_full_forward(model):
    """Each new token is the argmax of a forward pass over everything so far, without a cache."""
    prompt = [3, 14, 15, 9]
    ids = list(prompt)
    for _ in range(8):
        ids.append(int(next_logits(model, ids).argmax()))
    assert sample(model, prompt, 8, temperature=0) == ids[4:]
    assert sample(model, prompt, 8, temperature=1.0, top_k=1) == ids[4:]


def test_stop_id_ends_the_text(model):
    full = sample(model, [3, 14], 8, temperature=0)
    stop = full[3]
    assert sample(model, [3, 14], 8, temperature=0, stop_id=stop) == full[: full.index(stop)]


def test_draws_follow_the_softmax(model):
    """A draw is one from the softmax at that temperature, and top_k cuts the tail."""
    logits = next_logits(model, [3, 14]) / 2
    key = lambda seed: jax.random.fold_in(jax.random.key(seed), 0)
    draws = [sample(model, [3, 14], 1, temperature=2.0, seed=seed)[0] for seed in range(3)]
    direct = [int(jax.random.categorical(key(seed), logits)) for seed in range(3)]
    assert draws == direct
    top = set(np.argsort(logits)[-3:].tolist())
    assert {sample(model, [3, 14], 1, temperature=2.0, top_k=3, seed=s)[0] for s in range(4)} <= top


def test_superposition_checkpoint_warns():
    assert warning({"phase": "recovery", "step": 9, "bag_size": 1}) is None
    text = warning({"phase": "superposition", "step": 9, "bag_size": 4})
    assert "step 9" in text and "bag size 4" in text and "\n" not in text


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="config.json does not exist"):
        load_model(tmp_path)
