"""Proves `tst_jax.flops` (rule 22).

FLOPs against a count by hand and against what XLA counts in the compiled forward pass; the same for
every bag size (rule 2).
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tst_jax import flops
from tst_jax.models.transformer import ModelConfig, Transformer
from tst_jax.schedule import TSTConfig, make_stages

SMALL = ModelConfig(vocab_size=11, width=6, layers=3, heads=4, kv_heads=2, head_dim=2, ff=10)


def test_a_count_by_hand():
    layer = [
        2 * 6 * (4 * 2),  # query
        2 * 6 * (2 * 2),  # key
        2 * 6 * (2 * 2),  # value
        2 * (4 * 2) * 6,  # out
        2 * 6 * 10,  # gate
        2 * 6 * 10,  # up
        2 * 10 * 6,  # down
    ]
    scores = 2 * (4 * 2) * 8  # one query against the 8 keys of a row, in 4 heads of 2
    mixing = 2 * (4 * 2) * 8
    head = 2 * 6 * 11
    whole = 3 * (sum(layer) + scores + mixing) + head
    assert (sum(layer), whole) == (648, 2844)
    assert flops.forward_flops(SMALL, 8, causal=False) == whole
    half = 3 * (sum(layer) + (scores + mixing) // 2) + head
    assert flops.forward_flops(SMALL, 8) == half == 2460
    # Forward, and twice that backward, for each of 5 rows of 8 positions.
    assert flops.step_flops(SMALL, 5, 8) == 3 * 5 * 8 * 2460
    assert flops.step_flops(SMALL, 5, 8, causal=False) == 3 * 5 * 8 * 2844


def test_counts_by_hand_of_other_layers():
    plain = flops.forward_flops(SMALL, 8, causal=False)
    gelu = dataclasses.replace(SMALL, mlp="gelu", norm="layer", biases=True)
    assert flops.forward_flops(gelu, 8, causal=False) == plain - 3 * 2 * 6 * 10  # no gate
    moe = dataclasses.replace(SMALL, experts=9, experts_per_token=2)
    router, expert = 2 * 6 * 9, 6 * 6 * 10
    assert flops.forward_flops(moe, 8, causal=False) == plain + 3 * (router + expert)
    linear = dataclasses.replace(SMALL, attention="linear")
    softmax, decay, state = 4 * (4 * 2) * 500, 2 * 6 * 4, 4 * (4 * 2) * 2
    chunk = 4 * (4 * 2) * 64
    got = flops.forward_flops(SMALL, 500, causal=False) - 3 * softmax + 3 * (decay + state + chunk)
    assert flops.forward_flops(linear, 500, causal=False) == got


@pytest.mark.parametrize("mode", ["full", "input", "output"])
def test_a_step_costs_the_same_for_every_bag_size(mode):
    stages = []
    for bag_size in (2, 3, 8, 16):
        stages += make_stages(TSTConfig(bag_size=bag_size, ratio=0.5, mode=mode), 8, 5, 8)
    assert {stage.bag_size for stage in stages} == {1, 2, 3, 8, 16}
    costs = {flops.step_flops(SMALL, stage.rows, stage.positions) for stage in stages}
    assert costs == {3 * 5 * 8 * 2460}


@pytest.mark.parametrize("bag_size", [1, 8])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_xla_counts_as_many(kv_heads, bag_size):
    """XLA counts a scan's body once, so one layer; and what is no matmul too, hence the 5 %."""
    cfg = ModelConfig(
        vocab_size=1000, width=128, layers=1, heads=4, kv_heads=kv_heads, head_dim=32, ff=384
    )
    model = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((2, 64, bag_size), jnp.int32)
    forward = lambda model, tokens: model.logits(model.body(model.embed(tokens)))
    counted = jax.jit(forward).lower(model, tokens).cost_analysis()["flops"]
    expected = 2 * 64 * flops.forward_flops(cfg, 64, causal=False)
    assert expected <= counted <= 1.05 * expected
