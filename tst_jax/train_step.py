"""One pure training step, made for a bag size: superposition and recovery are two calls of it."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from tst_jax import schedule, sharding, superposition
from tst_jax.config import Config
from tst_jax.models.transformer import Transformer
from tst_jax.optimizer import make_optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that a step changes. Crosses the switch as it is (rule 15)."""

    params: Transformer
    opt_state: optax.OptState
    step: jax.Array  # int32: steps done so far, which is also the index of the next one
    rng: jax.Array  # uint32 [2]: key data for what is drawn after step 0


def init_state(config: Config, key_data, params: Transformer | None = None) -> TrainState:
    """The state before step 0, from `jax.random.key_data` of the run's key. Pure: jit it.

    With `params` it starts from those, else from random ones.
    """
    key = jax.random.wrap_key_data(key_data)
    params_key, rng = jax.random.split(key)
    params = Transformer(config.model, params_key) if params is None else params
    opt_state = make_optimizer(config.optimizer, 0.0).init(params)
    return TrainState(params, opt_state, jnp.int32(0), jax.random.key_data(rng))


def state_shardings(config: Config, mesh) -> tuple[TrainState, TrainState]:
    """(shapes, shardings) of the state, without allocating it."""
    shapes = jax.eval_shape(lambda k: init_state(config, k), key_data(config.seed))
    shardings = TrainState(
        sharding.param_shardings(shapes.params, mesh),
        sharding.optimizer_shardings(shapes.opt_state, shapes.params, mesh),
        sharding.replicated(mesh),
        sharding.replicated(mesh),
    )
    return shapes, shardings


def key_data(seed: int):
    """The run's key as plain numbers, uint32 [2]."""
    return jax.random.key_data(jax.random.key(seed))


def at_switch(config: Config, state: TrainState) -> TrainState:
    """What may change between two stages. By default nothing does (rule 15)."""
    params, opt_state = state.params, state.opt_state
    if config.tst.reinit_embedding_and_head:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        fresh = Transformer(config.model, key)
        params = jax.tree.map(lambda x: x, params)  # a copy: modules are mutable
        params.embedding = fresh.embedding
        if not config.model.tied:
            params.output = fresh.output
    if config.tst.reset_optimizer:
        opt_state = make_optimizer(config.optimizer, 0.0).init(params)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def stage_loss(config: Config, stage: schedule.Stage, params: Transformer, tokens_BxT, mesh=None):
    """The stage's loss over rows of int32 tokens [B, T], in parts that add up over rows (rule 8).

    Returns:
      (numerator, denominator, `moe.Routing` of the layers or None).
    """
    kernels = sharding.kernels_on(mesh, config.kernels)
    inputs, targets = superposition.split_rows(tokens_BxT, stage.bag_size, stage.mode)
    hidden, _, routing = params.body_and_routing(params.embed(inputs, kernels=kernels), mesh=mesh)
    options = dict(chunk=config.loss_chunk, kernels=kernels)
    if stage.bag_size > 1:
        options["weights_S"] = superposition.slot_weights(config.tst.weights, targets.shape[-1])
        options["objective"] = config.tst.objective
    return *superposition.bag_loss(hidden, params.head, targets, **options), routing


def make_train_step(config: Config, stage: schedule.Stage, mesh=None):
    """`train_step(state, tokens_BxT) -> (state, metrics)` for the steps of `stage`.

    Pure. `metrics` are float32 scalars: loss (the raw value, rule 11), grad_norm (before clipping)
    and lr; with experts also router_loss (what balances them, 1 if they are balanced; it is trained
    on, times model.router_loss, and not part of loss) and expert_load [layers, E], the share of the
    positions' choices that fell on each. For `bag_size = 1` nothing of TST is in the program (rule
    16). Without the mesh, the arrays are left to automatic sharding.
    """

    def train_step(state: TrainState, tokens_BxT):
        def mean_loss(params):
            loss_sum, weight_sum, routing = stage_loss(config, stage, params, tokens_BxT, mesh)
            loss = loss_sum / weight_sum
            if routing is None:
                return loss, {"loss": loss}
            router_loss = routing.balance.mean() / stage.step_positions
            load = routing.load_E / routing.load_E.sum(-1, keepdims=True)
            total = loss + config.model.router_loss * router_loss
            return total, {"loss": loss, "router_loss": router_loss, "expert_load": load}

        (_, metrics), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
        lr = schedule.learning_rate(config.schedule, config.steps, state.step)
        optimizer = make_optimizer(config.optimizer, lr)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics |= {"grad_norm": optax.global_norm(grads), "lr": lr}
        return TrainState(params, opt_state, state.step + 1, state.rng), metrics

    return train_step


def make_eval_step(config: Config, mesh=None):
    """`eval_step(params, tokens_BxT) -> (nats, tokens)`: the next-token loss of rows (rule 11)."""
    kernels = sharding.kernels_on(mesh, config.kernels)

    def eval_step(params: Transformer, tokens_BxT):
        inputs, targets = superposition.split_rows(tokens_BxT, 1)
        hidden = params.body(params.embed(inputs, kernels=kernels), mesh=mesh)
        return superposition.bag_loss(
            hidden, params.head, targets, chunk=config.loss_chunk, kernels=kernels
        )

    return eval_step
