"""Proves what `model.remat` computes again in the backward pass, by counting in the traced program;
that no gradient changes is in test_model.py.
"""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from tst_jax import sharding
from tst_jax.models.transformer import ModelConfig, Transformer

L = 128
CFG = ModelConfig(
    vocab_size=31, width=16, layers=2, heads=2, kv_heads=2, head_dim=64, ff=24, dtype="bfloat16"
)
# Matmuls of a layer with its weights in a forward pass; and those of its attention.
SHAPES = {
    "llama": (CFG, 7, 2),
    "gpt2": (
        dataclasses.replace(
            CFG, norm="layer", positions="learned", max_positions=L, mlp="gelu", biases=True
        ),
        6,
        2,
    ),
    "linear": (dataclasses.replace(CFG, attention="linear"), 8, 5),
}


def counted(cfg):
    """How often each primitive stands in the program of a layer's gradients."""
    model = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    hidden = jax.ShapeDtypeStruct((2, L, cfg.width), cfg.dtype)
    loss = lambda model, hidden: model.body(hidden).sum(dtype=np.float32)
    found = collections.Counter()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] += 1
            if eqn.primitive.name != "pallas_call":
                for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program):
                    if is_program(inner):
                        walk(getattr(inner, "jaxpr", inner))

    is_program = lambda x: hasattr(x, "eqns")
    walk(jax.make_jaxpr(jax.grad(loss, (0, 1)))(model, hidden).jaxpr)
    return found


def counts(cfg, primitive):
    return [
        counted(dataclasses.replace(cfg, remat=remat))[primitive]
        for remat in ("none", "dots", "full")
    ]


@pytest.mark.parametrize("shape", SHAPES)
def test_dots_keeps_every_matmul_with_a_weight(shape):
    cfg, weights, attention = SHAPES[shape]
    none, dots, full = counts(cfg, "dot_general")
    assert dots - none == attention
    # The last matmul of a layer is in no gradient.
    assert full - dots == weights - 1


def test_dots_keeps_matmuls_of_experts():
    cfg = dataclasses.replace(CFG, experts=4, experts_per_token=2)
    none, dots, full = counts(cfg, "platform_index")
    assert none == dots < full


@pytest.mark.parametrize(
    "platform, kernel",
    [("gpu", "dot_product_attention_fwd_wrapper"), ("tpu", "pallas_call")],
)
def test_dots_keeps_what_an_attention_kernel_computed(monkeypatch, platform, kernel):
    monkeypatch.setattr(sharding, "platform", lambda mesh: platform)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    none, dots, full = counts(CFG, kernel)
    assert 0 < none == dots == full - 1
