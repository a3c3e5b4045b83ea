"""Any optax optimizer by name. Nothing here knows of TST.

The learning rate comes in as a number of this step, not as an optax schedule: an optax schedule
counts in the optimizer's state, and that count would restart where a run resets its optimizer.
"""

import ast
import dataclasses
import inspect

import jax
import optax
import optax.contrib
from flax import nnx


@dataclasses.dataclass
class OptimizerConfig:
    """`name` is any optimizer of optax or optax.contrib that is made from a learning rate."""

    name: str = "adamw"
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1  # on matrices only
    clip: float = 1.0  # global norm of the gradient; 0: no clipping
    options: str = ""  # further arguments of the optimizer, "momentum=0.9,nesterov=True"

    def problems(self) -> list[str]:
        """One line for each setting that makes no optimizer."""
        found = []
        if not 0 <= self.clip < float("inf"):
            found.append(f"optimizer.clip is {self.clip}; give a norm, or 0 for no clipping")
        if not 0 <= self.weight_decay < float("inf"):
            found.append(f"optimizer.weight_decay is {self.weight_decay}; it must not be negative")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"optimizer.{name} is {getattr(self, name)}; it must lie in 0 .. 1")
        try:
            make_optimizer(self, 1e-3)
        except (ValueError, TypeError) as error:
            text = str(error).splitlines()[0]
            found.append(text if text.startswith("optimizer.") else f"optimizer.options: {text}")
        return found


def _map_params(function, params):
    """A tree like `params` with `function(param, array)` as its leaves.

    Optax masks a tree by taking arrays out of it; a param that lost its array keeps its place.
    """
    inside = lambda param: jax.tree.map(lambda array: function(param, array), param)
    return jax.tree.map(inside, params, is_leaf=lambda x: isinstance(x, nnx.Param))


def is_matrix(param: nnx.Param, array=None) -> bool:
    """True for what weight decay applies to: tables and matrices, not scales and biases."""
    return param.inputs is not None


def _muon_dimensions(param: nnx.Param, array):
    """Which axes of a (stacked) matmul weight Muon orthogonalises over; None: left to Adam."""
    if not param.inputs:
        return None
    stacked = array.ndim - len(param.axes) + param.batched
    split = stacked + param.inputs
    return optax.contrib.MuonDimensionNumbers(
        tuple(range(stacked, split)), tuple(range(split, array.ndim))
    )


def _parse_options(text: str) -> dict:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if isinstance(call.func, ast.Name) and not call.args:
            options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            if None not in options and "learning_rate" not in options:
                return options
        raise ValueError
    except (SyntaxError, ValueError, AttributeError):
        raise ValueError(
            f"optimizer.options is {text!r}; write 'name=value,name=value' with plain values"
        ) from None


def make_optimizer(cfg: OptimizerConfig, learning_rate) -> optax.GradientTransformation:
    """Clipping, then the optimizer `cfg.name` at `learning_rate` (a number, traced or not).

    b1, b2, weight_decay and its mask are passed to the optimizer as far as it takes them. One that
    cannot decay matrices only (sgd, adam, muon) gets AdamW's decoupled decay after it: minus
    learning rate * decay * weight.

    Raises:
      ValueError: no such optimizer, or options that it does not take.
    """
    build = getattr(optax, cfg.name, None) or getattr(optax.contrib, cfg.name, None)
    accepted = inspect.signature(build).parameters if callable(build) else {}
    if "learning_rate" not in accepted:
        raise ValueError(
            f"optimizer.name is {cfg.name!r}, no optimizer of optax or optax.contrib; "
            "try adamw, adam, lion, sgd, muon, adafactor or lamb"
        )
    options = _parse_options(cfg.options)
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(
            f"optimizer.options: {cfg.name} takes no {', '.join(unknown)}; see its documentation"
        )
    arguments = {"b1": cfg.b1, "b2": cfg.b2, "adam_b1": cfg.b1, "adam_b2": cfg.b2}
    arguments = {k: v for k, v in arguments.items() if k in accepted}
    mask = lambda params: _map_params(is_matrix, params)
    decays = {"weight_decay", "mask"} <= set(accepted)
    if decays:
        arguments.update(weight_decay=cfg.weight_decay, mask=mask)
    if cfg.name == "muon":
        dimensions = lambda params: _map_params(_muon_dimensions, params)
        arguments["muon_weight_dimension_numbers"] = dimensions
    chain = [build(learning_rate, **{**arguments, **options})]
    if cfg.clip:
        chain.insert(0, optax.clip_by_global_norm(cfg.clip))
    if cfg.weight_decay and not decays:
        chain.append(optax.add_decayed_weights(-learning_rate * cfg.weight_decay, mask))
    return optax.chain(*chain)
