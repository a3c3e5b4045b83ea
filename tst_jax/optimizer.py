"""Any optax optimizer by name. Nothing here knows of TST.

The learning rate comes in as a number of this step, not as an optax schedule: an optax schedule
counts in the optimizer's state, and that count would restart where a run resets its optimizer.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect

import jax
import numpy as np
import optax
import optax.contrib
from flax import nnx

from tst_jax import checks

_TRY = "try adamw, adam, lion, sgd, muon, adafactor or lamb"


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
        found = checks.real("optimizer.clip", self.clip, hint=" (0: no clipping)")
        found += checks.real("optimizer.weight_decay", self.weight_decay)
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                value = checks.show(getattr(self, name))
                found.append(f"optimizer.{name} is {value}; it must lie in 0 .. 1, below 1")
        # Name and options are tried beside numbers that are right.
        tried = OptimizerConfig(name=self.name, options=self.options) if found else self
        return found + _trial(*dataclasses.astuple(tried))


@functools.lru_cache  # a config is checked several times, and tracing a step takes a while
def _trial(*settings) -> list[str]:
    """A line if no step can be taken with an OptimizerConfig of `settings`; nothing is computed."""
    cfg = OptimizerConfig(*settings)

    def step(matrix, vector):
        axes = {"axes": ("embed", "mlp"), "inputs": 1, "batched": 0}
        params = nnx.Param(matrix, **axes), nnx.Param(vector, axes=("mlp",), inputs=None)
        optimizer = make_optimizer(cfg, 1e-3)
        return optimizer.update(params, optimizer.init(params), params)

    try:
        make_optimizer(cfg, 1e-3)
    except (ValueError, TypeError) as error:
        text = str(error).splitlines()[0]
        return [text if text.startswith("optimizer.") else f"optimizer.options: {text}"]
    try:
        shapes = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((2, 3), (5,))]
        jax.eval_shape(step, *shapes)
    except Exception as error:  # whatever someone else's optimizer raises
        text = (str(error).splitlines() or [type(error).__name__])[0]
        with_options = f" with optimizer.options {cfg.options!r}" if cfg.options else ""
        return [
            f"optimizer.name is {cfg.name!r}{with_options}: no step can be taken with it from "
            f"gradients alone ({text}); {_TRY}"
        ]
    return []


def _names() -> list[str]:
    """Of the functions of optax and optax.contrib that take a learning rate."""
    found = []
    for module in (optax, optax.contrib):
        for name in dir(module):
            with contextlib.suppress(
                TypeError, ValueError
            ):  # no function, or one without signature
                parameters = inspect.signature(getattr(module, name)).parameters
                if name[0] != "_" and "learning_rate" in parameters:
                    found.append(name)
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
            plain = all(np.isfinite(v) for v in options.values() if isinstance(v, int | float))
            if plain and None not in options and "learning_rate" not in options:
                return options
        raise ValueError
    except (SyntaxError, ValueError, AttributeError):
        raise ValueError(
            f"optimizer.options is {text!r}; write 'name=value,name=value' with plain values, none "
            "of them learning_rate"
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
    if build is None or "learning_rate" not in accepted:
        hint = checks.did_you_mean(cfg.name, _names(), f"; {_TRY}")
        raise ValueError(
            f"optimizer.name is {cfg.name!r}, no optimizer of optax or optax.contrib{hint}"
        )
    options = _parse_options(cfg.options)
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        hint = checks.did_you_mean(unknown[0], accepted, "; see its documentation")
        raise ValueError(
            f"optimizer.options is {cfg.options!r}, and {cfg.name} takes no {', '.join(unknown)}"
            + hint
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
