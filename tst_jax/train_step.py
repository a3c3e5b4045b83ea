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


def init_state(config: Config, key_data) -> TrainState:
    """The state before step 0, from `jax.random.key_data` of the run's key. Pure: jit it."""
    key = jax.random.wrap_key_data(key_data)
    params_key, rng = jax.random.split(key)
    params = Transformer(config.model, params_key)
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
    """(numerator, denominator) of the stage's loss over rows of int32 tokens [B, T] (rule 8)."""
    kernels = sharding.kernels_on(mesh, config.kernels)
    inputs, targets = superposition.split_rows(tokens_BxT, stage.bag_size, stage.mode)
    hidden = params.body(params.embed(inputs, kernels=kernels))
    options = dict(chunk=config.loss_chunk, kernels=kernels)
    if stage.bag_size > 1:
        options["weights_S"] = superposition.slot_weights(config.tst.weights, targets.shape[-1])
        options["objective"] = config.tst.objective
    return superposition.bag_loss(hidden, params.head, targets, **options)


def make_train_step(config: Config, stage: schedule.Stage, mesh=None):
    """`train_step(state, tokens_BxT) -> (state, metrics)` for the steps of `stage`.

    Pure. `metrics` are float32 scalars: loss (the raw value, rule 11), grad_norm (before clipping)
    and lr. For `bag_size = 1` nothing of TST is in the program (rule 16). Without the mesh, bag
    mean and loss are left to automatic sharding.
    """

    def train_step(state: TrainState, tokens_BxT):
        def mean_loss(params):
            loss_sum, weight_sum = stage_loss(config, stage, params, tokens_BxT, mesh)
            return loss_sum / weight_sum

        loss, grads = jax.value_and_grad(mean_loss)(state.params)
        lr = schedule.learning_rate(config.schedule, config.steps, state.step)
        optimizer = make_optimizer(config.optimizer, lr)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": optax.global_norm(grads), "lr": lr}
        return TrainState(params, opt_state, state.step + 1, state.rng), metrics

    return train_step


def make_eval_step(config: Config, mesh=None):
    """`eval_step(params, tokens_BxT) -> (nats, tokens)`: the next-token loss of rows (rule 11)."""
    kernels = sharding.kernels_on(mesh, config.kernels)

    def eval_step(params: Transformer, tokens_BxT):
        inputs, targets = superposition.split_rows(tokens_BxT, 1)
        hidden = params.body(params.embed(inputs, kernels=kernels))
        return superposition.bag_loss(
            hidden, params.head, targets, chunk=config.loss_chunk, kernels=kernels
        )

    return eval_step
