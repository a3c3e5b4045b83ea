"""Where a loss or gradient that is not finite comes from: one step, replayed with checks.

The parameters, the gradients, each row of the batch by itself, and then every operation of the
first bad row: the first one that made nan out of numbers, or inf out of finite ones, with its line
in this package. Infinities that a program writes down itself, as masks do, are no such thing.
"""

import dataclasses
import math
import operator
import pathlib

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from tst_jax import schedule, sharding
from tst_jax.checkpoint import named_leaves
from tst_jax.config import Config
from tst_jax.train_step import TrainState, add_up, make_loss

PACKAGE = pathlib.Path(__file__).parent
# Operations that run another program once, as it is.
CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2")
CALLS += ("custom_jvp_call", "custom_vjp_call")
NAN, INF = 2, 1
# Operations that hold afterwards what they were given: not looked at.
SAME = ("broadcast_in_dim", "reshape", "transpose", "squeeze", "neg", "copy", "stop_gradient")


def replay(config: Config, stage: schedule.Stage, state: TrainState, batch, mesh=None) -> list[str]:
    """What of a step is not finite, in lines for people.

    Of several processes all call it, with the same arguments, and all get the same lines.

    Args:
      config, stage: of the step.
      state: before it. Stays as it is.
      batch: (tokens_BxT,) or (tokens_BxT, segments_BxT), as the step takes it.
      mesh: of the arrays; None: one device.
    """
    batch = (*batch, None)[:2]
    params, lines = state.params, []
    bad_params = _report("parameter", params, _run(mesh, _bad_entries, params))

    def whole_step(params, batch):
        gradients, metrics = _gradients(config, stage, mesh, params, batch)
        return metrics["loss"], optax.global_norm(gradients), _bad_entries(gradients)

    loss, norm, bad = _run(mesh, whole_step, params, batch)
    bad_gradients = _report("gradient", params, bad)
    count, _ = make_loss(config, stage, mesh)
    targets, _ = _run(mesh, count, batch)
    lines.append(f"loss {loss} of {targets:g} weighted targets, gradient norm {norm}")
    lines += bad_params or ["all parameters are finite before the step"]
    lines += bad_gradients or ["all gradients are finite"]
    if math.isfinite(loss) and not bad_gradients:
        if math.isfinite(norm):
            return [*lines, "this step is finite when it is replayed"]
        return [*lines, "the sum of their squares, of which the norm is the root, overflows"]

    rows = _bad_rows(config, stage, mesh, params, batch)
    total = batch[0].shape[0]
    if rows:
        numbers = ", ".join(map(str, rows))
        lines.append(f"rows that are not finite alone: {numbers} (of 0 .. {total - 1})")
    else:
        lines.append(f"each of the {total} rows is finite alone")
    try:
        lines.append(_first_operation(config, stage, mesh, params, batch, rows, bad_params))
    except Exception as error:  # of jax, on a mesh or a program that this was not written for
        text = (str(error).splitlines() or [""])[0]
        lines.append(f"the first operation cannot be looked for: {type(error).__name__}: {text}")
    return lines


def _compiled(mesh, function):
    """What it returns is whole on every process."""
    options = {} if mesh is None else {"out_shardings": sharding.replicated(mesh)}
    if sharding.platform(mesh) == "cpu":  # hundreds of checks take longer to compile than to run
        fast = {"xla_backend_optimization_level": 0}
        if jax.__version_info__ < (0, 11):  # jax 0.12 knows no such option, and refuses it
            fast["xla_cpu_use_fusion_emitters"] = False
        options["compiler_options"] = fast
    return jax.jit(function, **options)


def _run(mesh, function, *arguments):
    return jax.device_get(_compiled(mesh, function)(*arguments))


def _gradients(config, stage, mesh, params, batch, rows=None):
    """(gradients, metrics) of a step; with `rows`, a batch, only what those add to it."""
    count, loss_share = make_loss(config, stage, mesh)
    totals = count(batch)
    share = lambda params, part: loss_share(params, part, totals)
    if rows is not None:
        return add_up(share, params, rows, 1, mesh)
    return add_up(share, params, batch, config.micro_batches, mesh)


def _bad_entries(tree):
    """Of each array (number of nan, number of inf)."""
    count = lambda x: (jnp.isnan(x).sum(dtype=jnp.uint32), jnp.isinf(x).sum(dtype=jnp.uint32))
    return [count(x) for x in jax.tree.leaves(tree)]


def _report(what, tree, counts) -> list[str]:
    """A line for each array that holds one."""
    return [
        f"{what} {name}: {nans} nan and {infs} inf of {x.size} entries"
        for (name, x), (nans, infs) in zip(named_leaves(tree).items(), counts, strict=True)
        if nans or infs
    ]


# --- Rows ----------------------------------------------------------------------------------------


def _one_row(batch, number, mesh):
    """A batch of row `number` alone, once for each device that shares out rows."""
    copies = math.prod(mesh.shape[axis] for axis in sharding.RULES["batch"]) if mesh else 1
    pick = lambda x: jnp.broadcast_to(x[number], (copies, x.shape[1]))
    return jax.tree.map(lambda x: sharding.constrain(pick(x), mesh, "batch", None), batch)


def _bad_rows(config, stage, mesh, params, batch) -> list[int]:
    """Rows whose own share of the loss, or of its gradients, is not finite."""

    def one(params, batch, number):
        row = _one_row(batch, number, mesh)
        gradients, metrics = _gradients(config, stage, mesh, params, batch, row)
        arrays = [metrics["loss"], *jax.tree.leaves(gradients)]
        return jnp.stack([jnp.isfinite(x).all() for x in arrays]).all()

    one = _compiled(mesh, one)
    return [k for k in range(batch[0].shape[0]) if not one(params, batch, k)]


# --- Operations ----------------------------------------------------------------------------------


def _first_operation(config, stage, mesh, params, batch, rows, bad_params) -> str:
    """A line on the first operation of the first bad row, or of the whole step if no row is bad.

    Kernels hide their operations, so the plain path is looked through.
    """
    model = dataclasses.replace(config.model, attention_backend="xla")
    plain = dataclasses.replace(config, kernels="xla", model=model)
    params = jax.tree.map(lambda x: x, params)  # a copy: modules are mutable
    params.cfg = model

    def step(params, batch):
        row = _one_row(batch, rows[0], None) if rows else None
        return _gradients(plain, stage, None, params, batch, row)

    found = first_operation(step, (params, batch), mesh)
    if found:
        whose = f"of row {rows[0]}" if rows else "of the step"
        return f"the first operation {whose} that made it: {found}"
    if bad_params:
        return "no operation made it: it came in with the parameters"
    chosen = (
        f"kernels={config.kernels} and model.attention_backend={config.model.attention_backend}"
    )
    return f"no operation of the plain path made it; suspect {chosen}, or rounding in the compiler"


def first_operation(function, arguments, mesh=None) -> str | None:
    """The first operation of `function(*arguments)` that made nan, or inf from finite numbers.

    What an operation is given counts as it is, so neither a mask of -inf nor what follows from it
    is found. One program computes the function and looks at what each operation returns.

    Returns:
      Its kind, shape, place in this package, and the turns of the loops that it is in; None: there
      is no such operation.
    """
    program = jax.make_jaxpr(function)(*arguments)
    watch = lambda *leaves: _watch(program.jaxpr, program.consts, leaves)[1]
    seen = _run(mesh, watch, *jax.tree.leaves(arguments))
    found = _first(program.jaxpr, seen)
    return _describe(*found) if found else None


def _inner(eqn):
    """The program that an operation runs, with its constants; None if it is a plain one."""
    if eqn.primitive.name not in (*CALLS, "scan"):
        return None
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def _watch(jaxpr, consts, arguments):
    """(what a program returns, what was seen of it).

    The second is the codes (see `_codes`) of what it is given, and for each operation the codes of
    what that returns, None for one of SAME, and, if it runs a program, what was seen of that: in a
    loop with a leading axis, one entry a turn.
    """
    given = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments]))
    values, seen = dict(given), []
    read = lambda x: x.val if isinstance(x, Literal) else values[x]
    for eqn in jaxpr.eqns:
        inputs, inner, below = [read(x) for x in eqn.invars], _inner(eqn), None
        if eqn.primitive.name == "scan":
            out, below = _watch_scan(eqn, inner, inputs)
        elif inner:
            out, below = _watch(inner.jaxpr, inner.consts, inputs)
        else:
            out = _run_one(jaxpr, eqn, values)
        values |= zip(eqn.outvars, out)
        same = eqn.primitive.name in SAME
        seen.append((None if same else _codes(out), below))
    return [read(x) for x in jaxpr.outvars], (_codes(given.values()), seen)


def _run_one(jaxpr, eqn, values):
    """What a plain operation returns."""
    needs = list(dict.fromkeys(x for x in eqn.invars if not isinstance(x, Literal)))
    alone = jaxpr.replace(
        constvars=[],
        invars=needs,
        outvars=eqn.outvars,
        eqns=[eqn],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(ClosedJaxpr(alone, ()))(*[values[x] for x in needs])


def _watch_scan(eqn, inner, given):
    # What is not sliced is whole in every turn, or carried on, in this order; counted by shapes,
    # because the names of the counts are no interface of jax.
    alike = lambda outer, inside: [
        len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outer, inside)
    ]
    carried = sum(alike(eqn.outvars, inner.jaxpr.outvars))
    fixed = sum(alike(eqn.invars, inner.jaxpr.invars)) - carried
    whole, given = given[:fixed], given[fixed:]

    def turn(carry, slices):
        out, seen = _watch(inner.jaxpr, inner.consts, [*whole, *carry, *slices])
        return out[:carried], (out[carried:], seen)

    how = dict(length=eqn.params["length"], reverse=eqn.params["reverse"])
    carry, (stacked, seen) = jax.lax.scan(turn, given[:carried], given[carried:], **how)
    return [*carry, *stacked], seen


def _codes(values) -> list:
    """Of each array the largest of NAN, INF and 0 that it holds."""

    def one(x):
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            return jnp.int32(0)
        return jnp.where(jnp.isnan(x), NAN, jnp.where(jnp.isinf(x), INF, 0)).max(initial=0)

    return [one(x) for x in values]


def _first(jaxpr, seen, inside=()):
    """(the operation, NAN or INF, around it the operations that run programs), or None.

    The third pairs each operation with its turn, None if it is no loop.
    """
    codes = dict(zip([*jaxpr.constvars, *jaxpr.invars], seen[0]))
    read = lambda x: _codes([x.val])[0] if isinstance(x, Literal) else codes[x]
    for eqn, (out, below) in zip(jaxpr.eqns, seen[1], strict=True):
        given = max(map(read, eqn.invars), default=0)
        out = [given] if out is None else out
        codes |= zip(eqn.outvars, out)
        if below is None:
            made = max(out, default=0)
            if made == NAN > given or made == INF > given == 0:
                return eqn, made, inside
            continue
        turns = [None]
        if eqn.primitive.name == "scan":
            turns = range(eqn.params["length"])
            turns = reversed(turns) if eqn.params["reverse"] else turns
        for turn in turns:
            of_turn = below if turn is None else jax.tree.map(operator.itemgetter(turn), below)
            found = _first(_inner(eqn).jaxpr, of_turn, (*inside, (eqn, turn)))
            if found:
                return found
    return None


def _describe(eqn, what, inside) -> str:
    # jax traces a jitted function once, and its lines are then those of whoever called it first.
    # Where it is called from is always right.
    calls = [call for call, _ in inside if call.primitive.name in ("jit", "pjit")]
    seen = calls[0] if calls else eqn
    shapes = ", ".join(str(x.aval.str_short()) for x in eqn.outvars)
    name = "nan" if what == NAN else "inf"
    text = f"{name} from {eqn.primitive.name}, {shapes}, at {_place(seen)}"
    around = [call for call, _ in inside] + [eqn]
    if any("transpose(" in str(e.source_info.name_stack) for e in around):
        text += ", in the backward pass"
    for loop, turn in inside:
        if turn is not None:
            text += (
                f"; turn {turn} of 0 .. {loop.params['length'] - 1} of the loop at {_place(loop)}"
            )
    return text


def _place(eqn) -> str:
    """Where in this package an operation is written down."""
    trace = eqn.source_info.traceback
    for frame in trace.frames if trace else ():
        path = pathlib.Path(frame.file_name)
        if PACKAGE in path.parents and path != pathlib.Path(__file__):
            name = path.relative_to(PACKAGE.parent).as_posix()
            return f"{name}:{frame.line_num} ({frame.function_name.split('.')[-1]})"
    return "a line outside tst_jax"
