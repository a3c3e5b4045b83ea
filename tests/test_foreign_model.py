"""A model that is not ours learns by TST with nothing of this package but `tst_jax.superposition`.

The ten lines are the README's, run as they stand there, around a Flax Linen decoder as anybody has
one: its own embedding, layers and head, which know nothing of bags.
"""

import functools
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

V, D, L, S = 48, 32, 12, 4
README = pathlib.Path(__file__).parents[1] / "README.md"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, mask=mask)
        return x + nn.Dense(D)(nn.gelu(nn.Dense(4 * D)(nn.LayerNorm()(x))))


class Foreign(nn.Module):
    """A decoder for next tokens, written for nothing else."""

    def setup(self):
        self.embed = nn.Embed(V, D)
        self.place = self.param("place", nn.initializers.normal(0.02), (L, D))
        self.blocks = [Block() for _ in range(2)]
        self.norm = nn.LayerNorm()
        self.head = nn.Dense(V, use_bias=False)

    def layers(self, x):
        x = x + self.place[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def __call__(self, tokens_BxL):
        return self.head(self.layers(self.embed(tokens_BxL)))


def readme_lines():
    """The code that README.md shows for a trainer of one's own."""
    section = README.read_text().split("## In your own trainer")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    assert "tst_jax.superposition" in code and code.count("tst_jax") == 1
    return code


@pytest.fixture(scope="module")
def foreign():
    """(model, its first parameters, the README's loss)"""
    model = Foreign()
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, L), int))["params"]
    namespace = {"model": model}
    exec(readme_lines(), namespace)
    return model, params, namespace["loss"]


def rows(rng, bag_size, batch=16):
    """Noisy counting, modulo V."""
    start = rng.integers(0, V, (batch, 1))
    slips = rng.random((batch, (L + 1) * bag_size)) < 0.05
    return (start + np.arange((L + 1) * bag_size) + slips.cumsum(1)) % V


def test_a_bag_of_one_is_its_own_next_token_loss(foreign):
    model, params, loss = foreign
    tokens = rows(np.random.default_rng(0), 1)

    def ordinary(params):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    graded = lambda f: jax.jit(jax.value_and_grad(f))(params)
    want, got = graded(ordinary), graded(lambda params: loss(params, tokens, 1))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-7)


def test_it_learns_in_both_phases(foreign):
    """30 steps of bags, then 30 of tokens; after them it counts, which it did not before."""
    model, params, loss = foreign
    optimizer = optax.adamw(1e-2)

    @functools.partial(jax.jit, static_argnames="bag_size")
    def step(params, state, tokens, bag_size):
        value, grads = jax.value_and_grad(loss)(params, tokens, bag_size)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, rng = optimizer.init(params), np.random.default_rng(1)
    losses = {S: [], 1: []}
    for bag_size in losses:
        for _ in range(30):
            params, state, value = step(params, state, rows(rng, bag_size), bag_size)
            losses[bag_size].append(float(value))
    assert abs(losses[S][0] - np.log(V)) < 0.5
    # A bag of four different tokens costs at least log 4 a token (rule 11).
    assert np.log(S) - 0.05 < losses[S][-1] < np.log(S) + 0.7 < losses[S][0]
    assert losses[1][-1] < 0.8 < losses[1][0]
    tokens = rows(rng, 1)
    guesses = model.apply({"params": params}, tokens[:, :-1]).argmax(-1)
    assert (guesses == tokens[:, 1:]).mean() > 0.8
