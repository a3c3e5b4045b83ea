"""Loss and bag mean beside what a user would write instead: seconds and temporary memory."""

import dataclasses
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from tst_jax import superposition
from tst_jax.errors import UserError
from tst_jax.kernels import dispatch
from tst_jax.kernels.dispatch import Kernels

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Size:
    """One problem: N positions of width D, bags of s out of V entries."""

    bag_size: int
    n: int
    d: int
    v: int
    dtype: str

    @property
    def matmul_flops(self) -> int:
        """Of the logits. Value and gradients of the loss need three times as many."""
        return 2 * self.n * self.d * self.v


def add_arguments(add, numbers):
    """The options of `bench kernels`; `numbers` parses a list with commas."""
    on_cpu = jax.default_backend() == "cpu"

    def lists(name, default, what):
        add(name, type=numbers, default=default, metavar="N,N", help=f"{what}, default {default}")

    lists("--bag_sizes", "1,8,16" if on_cpu else "1,4,16", "s")
    lists("--n", "2048" if on_cpu else "16384", "positions")
    lists("--d", "256" if on_cpu else "576,2048", "width")
    lists("--v", "32768" if on_cpu else "128256", "vocabulary")
    lists("--chunks", "1024", "positions of a chunk of the loss; `ours` is the first")
    add("--dtype", choices=DTYPES, default="float32" if on_cpu else "bfloat16", help="of hidden")
    add("--check", action="store_true", help="first compare with float64 (256 positions)")
    add_limit(add)


def add_limit(add):
    add(
        "--limit_s",
        type=float,
        default=float("inf"),
        metavar="X",
        help="seconds after which nothing further begins",
    )


def sizes(options) -> list[Size]:
    """All combinations, in the order of the lists."""
    lists = options.d, options.v, options.n, options.bag_sizes
    return [Size(s, n, d, v, options.dtype) for d, v, n, s in itertools.product(*lists)]


# --- What is timed: of (hidden, head, targets), or of (table, tokens, cotangent) -----------------


def paper_style(hidden_NxD, head_VxD, targets_NxS):
    """s separate cross-entropies on float32 logits, as the paper's listing has it."""
    z_NxV = _logits(hidden_NxD, head_VxD)
    loss = 0.0
    for i in range(targets_NxS.shape[1]):
        log_p = jax.nn.log_softmax(z_NxV, axis=-1)
        loss -= jnp.take_along_axis(log_p, targets_NxS[:, i, None], axis=1).mean()
    return loss / targets_NxS.shape[1]


def one_logsumexp(hidden_NxD, head_VxD, targets_NxS):
    """The same number from one logsumexp (rule 9), on float32 logits for all positions."""
    z_NxV = _logits(hidden_NxD, head_VxD)
    positive_N = jnp.take_along_axis(z_NxV, targets_NxS, axis=1).mean(-1)
    return (jax.nn.logsumexp(z_NxV, axis=-1) - positive_N).mean()


def ours(chunk, choice):
    """`bag_loss` with logits of `chunk` positions at a time."""

    def loss(hidden_NxD, head_VxD, targets_NxS):
        total, weight = superposition.bag_loss(
            hidden_NxD, head_VxD, targets_NxS, chunk=chunk, kernels=Kernels(choice)
        )
        return total / weight

    return loss


def _logits(hidden_NxD, head_VxD):
    head = head_VxD.astype(hidden_NxD.dtype)
    return jnp.einsum("nd,vd->nv", hidden_NxD, head, preferred_element_type=jnp.float32)


def _bag_gathered(table_VxD, tokens_NxS, d_NxD):
    """The mean of an [N, S, D] array of rows."""
    mean = table_VxD[tokens_NxS].astype(jnp.float32).mean(1).astype(d_NxD.dtype)
    return (mean * d_NxD).sum(dtype=jnp.float32)


def _bag_ours(choice):
    def bag(table_VxD, tokens_NxS, d_NxD):
        mean = superposition.embed_bags(
            table_VxD, tokens_NxS, dtype=d_NxD.dtype, kernels=Kernels(choice)
        )
        return (mean * d_NxD).sum(dtype=jnp.float32)

    return bag


def cases(size: Size, chunks) -> dict:
    """{name: (function, arguments, FLOPs of its matmuls)}."""
    suffixes = {"xla": "", "pallas": "_pallas"}
    hidden, head, targets = arrays(size)
    loss = lambda f: (jax.value_and_grad(f, (0, 1)), (hidden, head, targets))
    bag = lambda f: (jax.value_and_grad(f), (head, targets, hidden))
    found = {"paper_style": loss(paper_style), "one_logsumexp": loss(one_logsumexp)}
    for choice in _choices(size):
        found["ours" + suffixes[choice]] = loss(ours(chunks[0], choice))
    for chunk in chunks[1:]:
        found[f"ours_chunk_{chunk}"] = loss(ours(chunk, "xla"))
    found["bag_gathered"] = bag(_bag_gathered)
    for choice in _choices(size):
        found["bag_ours" + suffixes[choice]] = bag(_bag_ours(choice))
    matmul = lambda hidden, head: jnp.einsum("nd,vd->nv", hidden, head.astype(hidden.dtype))
    found["matmul"] = matmul, (hidden, head)  # the bare logits, in hidden's dtype
    return found


def arrays(size: Size):
    """Random hidden [N, D] of the size's dtype, float32 head [V, D], targets [N, S]."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (size.n, size.d), jnp.dtype(size.dtype))
    head = jax.random.normal(keys[1], (size.v, size.d), jnp.float32) / size.d**0.5
    return hidden, head, jax.random.randint(keys[2], (size.n, size.bag_size), 0, size.v)


# --- Timing --------------------------------------------------------------


def run(wanted: list[Size], options) -> list[dict]:
    """Compiles the cases of each size, runs them in turn, prints a table as it goes.

    Returns:
      One dict a case and size: name, the fields of Size, chunk, rounds, seconds (median),
      temp_bytes, tflops (of its matmuls; on an accelerator), device, jax. A case that the compiler
      or the device refuses has seconds None and the reason in `refused`.
    """
    device, began, results = jax.devices()[0], time.monotonic(), []
    print(
        f"{device.device_kind}, {device.platform}, jax {jax.__version__}; {options.rounds} rounds"
    )
    for size in wanted:
        if time.monotonic() - began > options.limit_s:
            print(f"--limit_s={options.limit_s:g} is over; left out: {size}")
            continue
        print(", ".join(f"{k}={v}" for k, v in dataclasses.asdict(size).items()), flush=True)
        if options.check:
            check(size)
        programs, lines = {}, {}
        for name, (function, args) in cases(size, options.chunks).items():
            line = {"name": name} | dataclasses.asdict(size)
            line |= {"rounds": options.rounds, "seconds": None, "temp_bytes": None}
            line |= {"device": device.device_kind, "jax": jax.__version__}
            lines[name] = line
            try:
                program = jax.jit(function).lower(*args).compile()
                jax.block_until_ready(program(*args))
            except jax.errors.JaxRuntimeError as error:  # too large, mostly
                line["refused"] = str(error).splitlines()[0]
                continue
            line["temp_bytes"] = program.memory_analysis().temp_size_in_bytes
            programs[name] = program, args
        seconds = {name: [] for name in programs}
        for _ in range(options.rounds):
            for name, (program, args) in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(*args))
                seconds[name].append(time.perf_counter() - start)
        for name, times in seconds.items():
            lines[name]["seconds"] = statistics.median(times)
            if device.platform != "cpu" and not name.startswith("bag"):
                matmuls = 1 if name == "matmul" else 3
                flops = matmuls * size.matmul_flops
                lines[name]["tflops"] = flops / lines[name]["seconds"] / 1e12
        for line in lines.values():
            print(_table_line(line, lines), flush=True)
        results += lines.values()
    return results


def _table_line(line, lines) -> str:
    name = f"  {line['name']:<16}"
    if line["seconds"] is None:
        return f"{name} refused: {line['refused']}"
    text = f"{name}{1e3 * line['seconds']:10.2f} ms {line['temp_bytes'] / 2**20:9.1f} MiB"
    base = lines["bag_gathered" if line["name"].startswith("bag") else "paper_style"]
    if base["seconds"] is not None and line["name"] != "matmul":
        ratio, memory = (line[k] / max(base[k], 1e-9) for k in ("seconds", "temp_bytes"))
        text += f"   {ratio:.2f} of the time, {memory:.3f} of the memory of {base['name']}"
    if "tflops" in line:
        text += f"   {line['tflops']:.1f} TFLOP/s"
    return text


# --- Numbers --------------------------------------------------------------


# Of loss, d hidden and d head. With bfloat16 inputs the softmax is rounded to bfloat16 for the
# matmuls, and d hidden once more at its end.
LIMITS = {"float32": (2e-6, 2e-6, 2e-6), "bfloat16": (2e-6, 4e-3, 2e-3)}


def errors(size: Size, choice: str, chunk: int = 128) -> list[float]:
    """Distance of loss, d hidden and d head from float64, relative to its norm."""
    hidden, head, targets = arrays(size)
    exact = reference(hidden, head.astype(hidden.dtype), targets)
    found = jax.jit(jax.value_and_grad(ours(chunk, choice), (0, 1)))(hidden, head, targets)
    pairs = zip(jax.tree.leaves(found), exact, strict=True)
    norm = np.linalg.norm
    return [float(norm(np.asarray(x, np.float64) - y) / norm(y)) for x, y in pairs]


def check(size: Size):
    """Compares loss and gradients of every implementation with float64, on 256 positions.

    Raises:
      UserError: one is further off than LIMITS allow.
    """
    size = dataclasses.replace(size, n=min(size.n, 256))
    for choice in _choices(size):
        off = errors(size, choice)
        text = "off float64 by {:.1e} (loss), {:.1e} (d hidden), {:.1e} (d head)".format(*off)
        print(f"  check {choice}: {text}", flush=True)
        if not all(a <= b for a, b in zip(off, LIMITS[size.dtype])):
            raise UserError(f"{choice} at {size} is {text}; rounding explains {LIMITS[size.dtype]}")


def _choices(size: Size):
    runs = dispatch.problem("pallas", jax.devices(), size.dtype) is None
    return ["xla", "pallas"] if runs else ["xla"]


def reference(hidden_NxD, head_VxD, targets_NxS):
    """Mean MCE in float64 numpy, and its gradients by hidden and head."""
    h, e = np.asarray(hidden_NxD, np.float64), np.asarray(head_VxD, np.float64)
    targets = np.asarray(targets_NxS)
    n, s = targets.shape
    z = h @ e.T
    peak = z.max(-1, keepdims=True)
    p = np.exp(z - peak)
    norm = p.sum(-1, keepdims=True)
    p /= norm
    rows = np.arange(n)[:, None]
    loss = (np.log(norm) + peak - z[rows, targets]).mean()
    np.subtract.at(p, (rows, targets), 1 / s)
    return loss, p @ e / n, p.T @ h / n
