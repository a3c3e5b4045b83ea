"""Proves that softmax attention is one function, whatever its backend, forward and backward.

The reference is written out and runs in float64. What must not reach a position (later ones,
another document's) is shown not to: gradients there are zero and outputs do not change, to the bit.
Splash attention runs in Pallas' interpreter; cuDNN's is lowered for a GPU and read. One process
with eight fake CPU devices compares a mesh with one device.
"""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_problem import (
    ROUNDING,
    difference,
    documents,
    exactly,
    inputs,
    repeated,
    with_gradients,
)
from eight_devices import report_of
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import NamedSharding, PartitionSpec

from tst_jax import sharding
from tst_jax.models import attention
from tst_jax.models.attention import attend, attend_cached, chosen, problem

RUNS_HERE = ("xla", "splash")
each_backend = pytest.mark.parametrize("backend", RUNS_HERE)


def run(backend, *arrays, **options):
    return attend(*arrays, backend=backend, interpret=backend == "splash", **options)


def dense(query, key, value, segments=None):
    """Softmax attention, written out."""
    length, heads, head_dim = query.shape[1:]
    key, value = repeated(key, heads), repeated(value, heads)
    scores = jnp.einsum("bthq,bihq->bhti", query, key) / np.sqrt(head_dim)
    seen = np.tril(np.ones((length, length), bool))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = jnp.where(
        seen, jnp.exp(scores - jnp.where(seen, scores, -np.inf).max(-1)[..., None]), 0
    )
    return jnp.einsum("bhti,bihq->bthq", weights / weights.sum(-1, keepdims=True), value)


def refusal(function, *arrays, **options):
    """The message of the ValueError, which must be one line."""
    with pytest.raises(ValueError) as error:
        function(*arrays, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- values and gradients


@each_backend
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("heads,kv_heads,head_dim", [(2, 2, 128), (4, 2, 64), (2, 1, 16)], ids=str)
def test_it_is_softmax_attention(backend, heads, kv_heads, head_dim, packed):
    """Three blocks of 128 positions; head sizes with and without padding."""
    *arrays, cotangent = inputs(384, heads, kv_heads, head_dim)
    segments = documents(384) if packed else None
    got = with_gradients(lambda *x: run(backend, *x, segments), arrays, cotangent)
    want = exactly(lambda *x: dense(*x, segments), arrays, cotangent)
    assert difference(got, want) <= ROUNDING
    assert got[0].dtype == jnp.float32


@each_backend
def test_no_position_reads_a_later_one(backend):
    """Gradients of one position with respect to all later ones are zeros, to the bit."""
    *arrays, cotangent = inputs(256)
    only = np.zeros_like(cotangent)
    only[:, 130] = cotangent[:, 130]
    _, query, key, value = with_gradients(lambda *x: run(backend, *x), arrays, only)
    for gradient in (query, key, value):
        assert not gradient[:, 131:].any() and gradient[:, 130].all()
    assert key[:, :130].all() and value[:, :130].all() and not query[:, :130].any()


@each_backend
def test_no_document_reads_another(backend):
    *arrays, _ = inputs(256)
    segments = documents(256)
    before = np.asarray(run(backend, *arrays, segments))
    other = segments == 0
    changed = [np.where(other[..., None, None], 3 - x, x) for x in arrays]
    after = np.asarray(run(backend, *changed, segments))
    np.testing.assert_array_equal(after[~other], before[~other])
    assert (after[other] != before[other]).mean() > 0.9
    assert (run(backend, *changed)[~other] != run(backend, *arrays)[~other]).mean() > 0.9


@each_backend
def test_grouped_queries_are_repeated_heads(backend):
    query, key, value, _ = inputs(128, heads=6, kv_heads=2)
    want = run(backend, query, repeated(key, 6), repeated(value, 6))
    np.testing.assert_allclose(run(backend, query, key, value), want, rtol=0, atol=1e-6)


@each_backend
def test_bfloat16_stays_bfloat16(backend):
    """Against float64 of the same rounded inputs; bfloat16 is 1/256 of an entry apart."""
    *arrays, cotangent = (np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in inputs(128))
    got = with_gradients(lambda *x: run(backend, *map(jnp.asarray, x)), arrays, cotangent)
    assert all(x.dtype == jnp.bfloat16 for x in got)
    assert difference(got, exactly(dense, arrays, cotangent)) <= 0.03


def test_a_cache_gives_what_the_whole_row_gives():
    query, key, value, _ = inputs(24)
    want = attend(query, key, value, backend="xla")
    later = np.full((2, 8, 2, 16), 1e3, np.float32)  # slots that nobody has written yet
    keys, values = (np.concatenate([x, later], 1) for x in (key, value))
    positions = np.broadcast_to(np.arange(24, dtype=np.int32), (2, 24))
    got = attend_cached(query, keys, values, positions)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    # One position a row, another one in each.
    at = np.array([[7], [19]], np.int32)
    one = np.take_along_axis(query, at[..., None, None], 1)
    got = attend_cached(one, keys, values, at)
    np.testing.assert_allclose(got[:, 0], [want[0, 7], want[1, 19]], rtol=0, atol=1e-6)


def test_splash_looks_at_the_diagonal_only(monkeypatch):
    """The blocks of the lazy mask are those of jax's, and only the diagonal's are written out."""
    seen, whole = set(), splash.CausalMask.__getitem__
    monkeypatch.setattr(
        splash.CausalMask,
        "__getitem__",
        lambda self, at: seen.add((at[0].start, at[1].start)) or whole(self, at),
    )
    got = attention._splash_kernel.__wrapped__(2, 9 * 128, 128, False)
    assert seen == {(start, start) for start in range(0, 9 * 128, 128)}
    mask = splash.MultiHeadMask([splash.CausalMask((9 * 128, 9 * 128))] * 2)
    want = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1)  # blocks of 128
    assert len(seen) == 81 and got.kwargs["block_sizes"] == want.kwargs["block_sizes"]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "size,length,head_dim,dtype",
    [
        (1024, 131072, 128, "bfloat16"),
        (512, 1536, 128, "bfloat16"),
        (128, 640, 128, "bfloat16"),
        (512, 131072, 256, "bfloat16"),
        (512, 131072, 128, "float32"),
        (256, 768, 128, "float32"),
    ],
)
def test_splash_takes_large_blocks_that_divide_the_row(size, length, head_dim, dtype):
    assert attention._block(length, jax.ShapeDtypeStruct((1, 1, length, head_dim), dtype)) == size


def test_a_kernel_made_under_jit_serves_the_next_program():
    arrays = inputs(128, heads=3, kv_heads=3)[:3]  # no other test has three heads
    first = jax.jit(lambda *x: run("splash", *x))(*arrays)
    np.testing.assert_array_equal(jax.jit(lambda *x: run("splash", *x) * 1)(*arrays), first)


# ---- cuDNN, which runs on GPUs only


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """As if there were a GPU with a recent cuDNN: enough to lower for it."""
    monkeypatch.setattr(sharding, "platform", lambda mesh: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)


def lowered(function, *arrays):
    return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("backend", ["auto", "cudnn", "xla"])
def test_cudnn_is_causal_and_holds_no_square(as_on_a_gpu, backend):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs(320)]
    gradients = lambda *x: with_gradients(lambda *y: attend(*y, backend=backend), x[:3], x[3])
    text = lowered(gradients, *arrays)
    square = re.search(r"x320x320x|x320x2x2x320x|x320x4x320x", text)
    calls = set(re.findall(r"__cudnn\$fmha\w+", text))
    if backend == "xla":
        assert square and not calls
    else:
        assert calls == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} and not square
        assert len(re.findall(r"mask_type[^,]*CAUSAL", text)) == len(re.findall("mask_type", text))
        assert re.search(r"fmha_scale[^,]*0\.25", text)


def test_cudnn_refuses_documents(as_on_a_gpu):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs(16)[:3]]
    line = refusal(attend, *arrays, documents(16), backend="cudnn")
    assert "packed" in line and "model.attention_backend=auto or xla" in line
    assert attend(*arrays, documents(16)).shape == arrays[0].shape  # auto takes xla


# ---- which backend


@pytest.mark.parametrize(
    "want,backend,platform,dtype,head_dim,positions,packed",
    [
        ("splash", "auto", "tpu", "bfloat16", 64, 256, False),
        ("splash", "auto", "tpu", "float32", 80, 131072, True),
        ("xla", "auto", "tpu", "bfloat16", 64, 200, False),
        ("xla", "auto", "tpu", "float16", 64, 256, False),
        ("cudnn", "auto", "gpu", "bfloat16", 128, 200, False),
        ("cudnn", "auto", "gpu", np.float16, 8, 256, False),
        ("xla", "auto", "gpu", "float32", 128, 256, False),
        ("xla", "auto", "gpu", "bfloat16", 256, 256, False),
        ("xla", "auto", "gpu", "bfloat16", 20, 256, False),
        ("xla", "auto", "gpu", "bfloat16", 128, 256, True),
        ("xla", "auto", "cpu", "bfloat16", 128, 256, False),
        ("xla", "xla", "tpu", "bfloat16", 128, 256, False),
        ("splash", "splash", "cpu", "bfloat16", 128, 256, False),  # `problem` refuses it
    ],
)
def test_auto_takes_what_can_run(want, backend, platform, dtype, head_dim, positions, packed):
    assert chosen(backend, platform, dtype, head_dim, positions, packed) == want
    if backend == "auto":
        assert problem(want, platform, dtype, head_dim, positions, packed) is None


@pytest.mark.parametrize(
    "words,arguments",
    [
        ("model.attention_backend=flash xla splash", ("flash", "tpu", "bfloat16", 128, 256)),
        ("model.attention_backend=splash cpu TPU", ("splash", "cpu", "bfloat16", 128, 256)),
        ("data.positions 128 200", ("splash", "tpu", "bfloat16", 128, 200)),
        ("model.dtype float16", ("splash", "tpu", "float16", 128, 256)),
        ("model.attention_backend=cudnn tpu GPU", ("cudnn", "tpu", "bfloat16", 128, 256)),
        ("model.dtype float32", ("cudnn", "gpu", "float32", 128, 256)),
        ("model.head_dim 8 128 36", ("cudnn", "gpu", "bfloat16", 36, 256)),
        ("model.head_dim 8 128 256", ("cudnn", "gpu", "bfloat16", 256, 256)),
        ("model.attention_backend=cudnn packed", ("cudnn", "gpu", "bfloat16", 128, 256, True)),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(words, arguments):
    line = problem(*arguments)
    assert "\n" not in line and all(word in line for word in words.split()), line


def test_nothing_stands_in_for_an_explicit_backend():
    arrays = inputs(128)[:3]
    for backend in ("splash", "cudnn", "flash"):
        want = problem(backend, "cpu", "float32", 16, 128)
        assert refusal(attend, *arrays, backend=backend) == want
    want = problem("splash", "tpu", "float32", 16, 130)
    assert refusal(attend, *inputs(130)[:3], backend="splash", interpret=True) == want


# ---- in the process with eight devices


def main():
    mesh = sharding.make_mesh(sharding.MeshConfig(data=2, fsdp=2, tensor=2))
    *arrays, cotangent = inputs(256, rows=4)
    segments = documents(256, rows=4)
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    places = [split] * 4, rows
    report = {}
    for backend in RUNS_HERE:
        on = lambda mesh: (
            lambda x, segments: with_gradients(
                lambda *y: run(backend, *y, segments, mesh=mesh), x[:3], x[3]
            )
        )
        want = jax.jit(on(None))([*arrays, cotangent], segments)
        jitted = jax.jit(on(mesh), in_shardings=places, out_shardings=[split] * 4)
        got = jitted([*arrays, cotangent], segments)
        report[backend] = difference(got, want)
        text = jitted.lower([*arrays, cotangent], segments).compile().as_text()
        report[backend + " traffic"] = re.findall(r"(?:all|collective)-[a-z-]+\(", text)
    odd = inputs(128, rows=3)[:3], inputs(128, kv_heads=1, rows=4)[:3]
    report["refused"] = [refusal(run, "splash", *x, mesh=mesh) for x in odd]
    sharding.platform, cudnn.check_cudnn_version = lambda mesh: "gpu", lambda: 91300
    half = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=split) for x in arrays]
    total = lambda *x: attend(*x, backend="cudnn", mesh=mesh).sum(dtype=jnp.float32)
    text = lowered(jax.grad(total, (0, 1, 2)), *half)
    report["cudnn"] = [
        name for name in ("__cudnn$fmhaSoftmaxBackward", "CustomSPMD") if name in text
    ]
    # Of one device: one row, two of four query heads, one of two kv heads.
    call = next(line for line in text.splitlines() if "__cudnn$fmhaSoftmax(" in line)
    report["cudnn parts"] = re.findall(r"tensor<([\dx]+)xbf16>", call)
    print(json.dumps(report))


# ---- what it reports


@pytest.fixture(scope="module")
def report():
    return report_of(__file__)


@each_backend
def test_meshes_give_the_same_numbers(report, backend):
    """Values and gradients of packed rows; rows over four devices, heads over two."""
    assert report[backend] <= ROUNDING
    assert report[backend + " traffic"] == []


def test_what_does_not_divide_is_refused(report):
    rows, heads = report["refused"]
    assert "data.rows of 3" in rows and "mesh.data x mesh.fsdp=4" in rows
    assert "model.kv_heads of 1" in heads and "mesh.tensor=2" in heads


def test_cudnn_gets_the_parts_of_one_device(report):
    assert report["cudnn"] == ["__cudnn$fmhaSoftmaxBackward"]
    assert "1x256x2x16" in report["cudnn parts"] and "1x256x1x16" in report["cudnn parts"]


if __name__ == "__main__":
    main()
