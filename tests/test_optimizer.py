"""Proves `tst_jax.optimizer`: any optax optimizer by name, with a learning rate from outside.

Each optimizer takes the step that optax's own takes at a constant learning rate, to the bit; weight
decay touches matrices only, also where the optimizer has no mask for it; the gradient is clipped
before; Muon works on each layer's weight by itself.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from tst_jax.models.transformer import ModelConfig, Transformer
from tst_jax.optimizer import OptimizerConfig, is_matrix, make_optimizer

# Two programs are compared to the bit: both are fused as they are outside the tests.
FUSED = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
jit = functools.partial(jax.jit, compiler_options=FUSED)
CFG = ModelConfig(vocab_size=23, width=8, layers=2, heads=2, kv_heads=1, head_dim=6, ff=20)
MOE = dataclasses.replace(CFG, experts=3, experts_per_token=1)
GPT2 = dataclasses.replace(CFG, positions="learned", max_positions=5, mlp="gelu", biases=True)
MATMULS = {"query": 1, "out": 2, "gate": 1}  # and how many axes of a layer's weight they sum over
EXPERTS = {"expert_gate": 1, "expert_down": 1}  # the same, of each expert's
TABLES = {"embedding", "positions"}
VECTORS = {"mlp_norm", "final_norm", "query_bias", "down_bias"}  # scales and biases
LR, DECAY = 0.125, 0.5  # powers of two: their product is exact


def random_params(seed):
    """Some of a decoder's params, a few of each kind, every array normal; {"query": nnx.Param}."""
    rng = np.random.default_rng(seed)
    shapes_of = lambda cfg: jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    model = shapes_of(CFG)
    layers = {name: getattr(model.layers, name) for name in (*MATMULS, "mlp_norm")}
    params = layers | {"embedding": model.embedding, "final_norm": model.final_norm}
    for name in EXPERTS:
        params[name] = getattr(shapes_of(MOE).layers, name.removeprefix("expert_"))
    gpt2 = shapes_of(GPT2)
    params |= {name: getattr(gpt2.layers, name) for name in ("query_bias", "down_bias")}
    params["positions"] = gpt2.positions
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), params)


PARAMS, GRADS = random_params(0), random_params(1)


def by_name(tree):
    """{"query": array}"""
    return {name: np.asarray(jax.tree.leaves(param)[0]) for name, param in tree.items()}


def updates(config, params=PARAMS, grads=GRADS, lr=LR, steps=1):
    """The update of the last of `steps` steps, the learning rate traced as in a train step."""

    @jit
    def step(grads, state, params, lr):
        return make_optimizer(config, lr).update(grads, state, params)

    state = make_optimizer(config, 0.0).init(params)
    for _ in range(steps):
        update, state = step(grads, state, params, jnp.float32(lr))
        params = optax.apply_updates(params, update)
    return update


def assert_same_bits(got, want):
    for (name, a), b in zip(by_name(got).items(), by_name(want).values(), strict=True):
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32), err_msg=name)


# ---- weight decay


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd", "muon"])
def test_weight_decay_touches_matrices_only(name):
    """Without a gradient, a step is the decay alone."""
    zeros = jax.tree.map(jnp.zeros_like, GRADS)
    got = by_name(updates(OptimizerConfig(name=name, weight_decay=DECAY), grads=zeros))
    for param, array in by_name(PARAMS).items():
        want = 0 if param in VECTORS else -LR * DECAY * array
        np.testing.assert_array_equal(got[param], want, err_msg=param)


# ---- the same as optax's own


def mask(params):
    matrices = lambda param: jax.tree.map(lambda _: is_matrix(param), param)
    return jax.tree.map(matrices, params, is_leaf=lambda x: hasattr(x, "axes"))


OWN = {
    "adamw": (
        OptimizerConfig(name="adamw"),
        lambda lr: optax.adamw(lr, 0.9, 0.95, weight_decay=0.1, mask=mask),
    ),
    "adam": (OptimizerConfig(name="adam", weight_decay=0), lambda lr: optax.adam(lr, 0.9, 0.95)),
    "lion": (
        OptimizerConfig(name="lion", b2=0.99),
        lambda lr: optax.lion(lr, 0.9, 0.99, weight_decay=0.1, mask=mask),
    ),
    "sgd": (
        OptimizerConfig(name="sgd", weight_decay=0, options="momentum=0.75,nesterov=True"),
        lambda lr: optax.sgd(lr, momentum=0.75, nesterov=True),
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_learning_rate_from_outside_takes_optaxs_own_steps(name):
    config, make = OWN[name]
    own = optax.chain(optax.clip_by_global_norm(1.0), make(0.01))

    @jit
    def step(grads, state, params):
        return own.update(grads, state, params)

    params, state = PARAMS, own.init(PARAMS)
    for _ in range(3):
        want, state = step(GRADS, state, params)
        params = optax.apply_updates(params, want)
    assert_same_bits(updates(config, lr=0.01, steps=3), want)


# ---- clipping


def test_the_gradient_is_clipped_to_a_global_norm():
    sgd = lambda clip: OptimizerConfig(name="sgd", weight_decay=0, clip=clip)
    norm = float(optax.global_norm(GRADS))
    assert norm > 10
    clipped = updates(sgd(1.0), lr=1.0)
    np.testing.assert_allclose(optax.global_norm(clipped), 1, rtol=1e-6)
    for got, grad in zip(by_name(clipped).values(), by_name(GRADS).values()):
        np.testing.assert_allclose(got, -grad / norm, rtol=1e-5)  # one factor for all
    whole = jax.tree.map(jnp.negative, GRADS)
    for clip in (0.0, 2 * norm):  # none; not reached
        assert_same_bits(updates(sgd(clip), lr=1.0), whole)


def test_decay_is_not_clipped():
    sgd = OptimizerConfig(name="sgd", weight_decay=DECAY, clip=1e-6)
    got = by_name(updates(sgd))["query"]
    np.testing.assert_allclose(got, -LR * DECAY * by_name(PARAMS)["query"], atol=LR * 1e-6)


# ---- Muon


def test_muon_orthogonalises_each_weight_by_itself():
    got = by_name(updates(OptimizerConfig(name="muon", weight_decay=0, clip=0)))
    muon = optax.contrib.muon(LR)
    alone = jax.jit(lambda grad: muon.update(grad, muon.init(grad), grad)[0])
    for name, count in (MATMULS | EXPERTS).items():
        grads, update = by_name(GRADS)[name], got[name]
        if name in EXPERTS:  # each of each layer is a weight
            assert grads.shape[:2] == (2, 3)
            grads, update = (x.reshape(-1, *x.shape[2:]) for x in (grads, update))
        for layer in range(len(grads)):
            rows = int(np.prod(grads.shape[1 : 1 + count]))
            grad = jnp.asarray(grads[layer].reshape(rows, -1))
            want = alone(grad)
            mine = update[layer].reshape(rows, -1)
            np.testing.assert_allclose(mine, want, rtol=0, atol=1e-4 * np.abs(want).max())
            before = np.linalg.svd(grad, compute_uv=False)
            after = np.linalg.svd(mine, compute_uv=False)
            assert after.max() / after.min() < 2 < before.max() / before.min(), name


def test_muon_leaves_tables_scales_and_biases_to_adam():
    adam = OptimizerConfig(name="adam", weight_decay=0, clip=0, options="nesterov=True")
    adam = by_name(updates(adam))
    muon = by_name(updates(OptimizerConfig(name="muon", weight_decay=0, clip=0)))
    for param in adam:
        same = np.allclose(muon[param], adam[param], rtol=1e-5)
        assert same == (param in VECTORS | TABLES), param


# ---- what makes no optimizer


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(name="nope"), "is 'nope', no optimizer"),
        (dict(name="chain"), "is 'chain', no optimizer"),  # of optax, but takes no learning rate
        (dict(name="__doc__"), "no optimizer"),
        (dict(name=""), "no optimizer"),
        (dict(options="momentum=0.9"), "adamw takes no momentum"),
        (dict(options="eps"), "write 'name=value"),
        (dict(options="eps=1e-8 mu_dtype=3"), "write 'name=value"),
        (dict(options="eps=print(1)"), "write 'name=value"),
        (dict(name="sgd", options="momentum=0.9,b3=1,b4=1"), "sgd takes no b3, b4"),
        (dict(b1=1.0), "optimizer.b1"),
        (dict(b2=-0.1), "optimizer.b2"),
        (dict(weight_decay=-0.1), "optimizer.weight_decay"),
        (dict(weight_decay=float("nan")), "optimizer.weight_decay"),
        (dict(clip=-1.0), "optimizer.clip"),
        (dict(clip=float("inf")), "optimizer.clip"),
    ],
)
def test_settings_that_make_no_optimizer_give_one_line(settings, words):
    (problem,) = OptimizerConfig(**settings).problems()
    assert words in problem and "optimizer" in problem and "\n" not in problem


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "sgd", "muon", "adafactor", "lamb"])
def test_the_optimizers_that_the_message_names_exist(name):
    config = OptimizerConfig(name=name)
    assert not config.problems()
    one = make_optimizer(config, LR)
    step = lambda params, grads: one.update(grads, one.init(params), params)[0]
    got = jax.eval_shape(step, PARAMS, GRADS)
    shapes = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]
    assert shapes(got) == shapes(PARAMS)
