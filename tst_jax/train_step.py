"""One pure training step, made for a bag size: superposition and recovery are two calls of it."""

import dataclasses
import functools

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
    shapes = jax.eval_shape(lambda: init_state(config, key_data(config.seed)))
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


def make_loss(config: Config, stage: schedule.Stage, mesh=None):
    """(count, loss_share) of steps of `stage`, two pure functions of a batch as a step takes it.

    `count(batch)` gives what the sums of a whole step are divided by. `loss_share(params, batch,
    totals)` gives (what some rows add to the loss of their step, and to its metrics), for the
    totals that `count` gave of all its rows.
    """
    kernels = sharding.kernels_on(mesh, config.kernels)
    of_targets = {}
    if stage.bag_size > 1:
        width = 1 if stage.mode == "input" else stage.bag_size
        of_targets["weights_S"] = config.tst.slot_weights(width)
        of_targets["objective"] = config.tst.objective

    def count(batch):
        """Targets (rule 8), and valid positions."""
        _, targets, documents = cut_rows(*batch, stage.bag_size, stage.mode)
        positions = stage.step_positions if documents is None else documents.read.any(-1).sum()
        asked = None if documents is None else documents.asked
        return superposition.count_targets(targets, asked, **of_targets), positions

    def loss_share(params, batch, totals):
        inputs, targets, documents = cut_rows(*batch, stage.bag_size, stage.mode)
        weight, positions = totals
        options = dict(chunk=config.loss_chunk, kernels=kernels, **of_targets)
        loss_sum, routing = _loss_sum(params, inputs, targets, documents, mesh, **options)
        loss = loss_sum / weight
        if routing is None:
            return loss, {"loss": loss}
        router_loss = routing.balance.mean() / positions
        metrics = {"loss": loss, "router_loss": router_loss, "expert_load": routing.load_E}
        return loss + config.model.router_loss * router_loss, metrics

    return count, loss_share


def make_train_step(config: Config, stage: schedule.Stage, mesh=None):
    """`train_step(state, tokens_BxT, segments_BxT=None) -> (state, metrics)` for steps of `stage`.

    Pure. `tokens_BxT` is int32. `segments_BxT` is int32 too: in each row 0 for a pad, else a number
    for each document, all tokens of a bag having one; positions see, predict and count from 0 on in
    their own document only (rule 20). None: a row is one document. `metrics` are float32 scalars:
    loss (the raw value, rule 11), grad_norm (before clipping) and lr; and finite, bool: whether
    loss and grad_norm are. If not, parameters and optimizer state stay as they were, to the bit,
    and only the count of steps goes on. With segments also valid_tokens, int32, that were read;
    with experts also router_loss (what balances them, 1 if they are balanced; it is trained on,
    times model.router_loss, and not part of loss) and expert_load [layers, E], the share of the
    positions' choices that fell on each. For `bag_size = 1` nothing of TST is in the program
    (rule 16). Without the mesh, the arrays are left to automatic sharding.
    """
    count, loss_share = make_loss(config, stage, mesh)

    def train_step(state: TrainState, tokens_BxT, segments_BxT=None):
        batch = tokens_BxT, segments_BxT
        share = functools.partial(loss_share, totals=count(batch))
        grads, metrics = add_up(share, state.params, batch, config.micro_batches, mesh)
        if "expert_load" in metrics:
            metrics["expert_load"] /= metrics["expert_load"].sum(-1, keepdims=True)
        lr = schedule.learning_rate(config.schedule, config.steps, state.step)
        optimizer = make_optimizer(config.optimizer, lr)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        grad_norm = optax.global_norm(grads)  # not finite if any gradient is not
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
        # A choice and no product: 0 * nan is nan.
        keep = lambda new, old: jnp.where(finite, new, old)
        params, opt_state = jax.tree.map(keep, (params, opt_state), (state.params, state.opt_state))
        metrics |= {"grad_norm": grad_norm, "lr": lr, "finite": finite}
        if segments_BxT is not None:
            documents = cut_rows(*batch, stage.bag_size, stage.mode)[-1]
            metrics["valid_tokens"] = documents.read.sum()
        return TrainState(params, opt_state, state.step + 1, state.rng), metrics

    return train_step


@dataclasses.dataclass(frozen=True)
class Documents:
    """Where documents lie in rows that hold several (rule 20)."""

    read: jax.Array  # bool [B, L, S]: an input token that is no pad
    asked: jax.Array  # bool [B, L, S]: a target in the document of its position
    segments: jax.Array  # int32 [B, L]: of the positions
    positions: jax.Array  # int32 [B, L]: from 0 on in each document


def cut_rows(tokens_BxT, segments_BxT, bag_size: int, mode: str = "full"):
    """(inputs [B, L, S], targets [B, L, S], Documents or None) of rows, see `split_rows`."""
    inputs, targets = superposition.split_rows(tokens_BxT, bag_size, mode)
    if segments_BxT is None:
        return inputs, targets, None
    of_inputs, of_targets = superposition.split_rows(segments_BxT, bag_size, mode)
    segments = of_inputs.max(-1)  # pads stand at the end of a document's last bag
    asked = (of_targets == segments[..., None]) & (of_targets > 0)
    index = jnp.arange(segments.shape[1])
    begins = jnp.diff(segments, axis=1, prepend=-1) != 0
    positions = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return inputs, targets, Documents(of_inputs > 0, asked, segments, positions)


def _loss_sum(params, inputs, targets, documents, mesh, *, kernels, **options):
    """(sum of the losses of some rows, how their experts were chosen)."""
    read, asked, rows = None, None, {}
    if documents is not None:
        read, asked = documents.read, documents.asked
        rows = dict(segments_BxL=documents.segments, positions_BxL=documents.positions)
        rows["mask_BxL"] = read.any(-1)
    hidden = params.embed(inputs, read, kernels=kernels)
    hidden, _, routing = params.body_and_routing(hidden, mesh=mesh, **rows)
    loss = superposition.bag_loss(hidden, params.head, targets, asked, kernels=kernels, **options)
    return loss[0], routing


def add_up(share, params, batch, parts: int, mesh):
    """Gradients and metrics of a step, summed over `parts` micro-batches, one after the other.

    A share is divided by the whole step's counts, so the sum is the whole step's mean whatever the
    masks of the parts: never a mean of means (rule 8).
    """
    gradients = jax.grad(share, has_aux=True)
    if parts == 1:
        return gradients(params, batch)

    def cut(x):
        # Part i holds rows i, i + parts, ...: some of each device's, so that no row moves.
        x = jnp.moveaxis(x.reshape(-1, parts, x.shape[-1]), 1, 0)
        return sharding.constrain(x, mesh, None, "batch", None)

    def add(sums, part):
        return jax.tree.map(jnp.add, sums, gradients(params, part)), None

    batch = jax.tree.map(cut, batch)
    shapes = jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], batch))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.scan(add, zeros, batch)[0]


def make_eval_step(config: Config, mesh=None):
    """`eval_step(params, tokens_BxT, segments_BxT=None) -> (nats, tokens)`: the next-token loss of
    rows (rule 11)."""
    options = dict(chunk=config.loss_chunk, kernels=sharding.kernels_on(mesh, config.kernels))

    def eval_step(params: Transformer, tokens_BxT, segments_BxT=None):
        inputs, targets, documents = cut_rows(tokens_BxT, segments_BxT, 1)
        nats, _ = _loss_sum(params, inputs, targets, documents, mesh, **options)
        asked = None if documents is None else documents.asked
        return nats, superposition.count_targets(targets, asked)

    return eval_step
