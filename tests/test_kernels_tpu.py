"""Proves the Pallas TPU kernels without a TPU: interpreted against float64, and compiled.

Interpreted, memory that nobody wrote holds NaN and copies are made as late as their wait allows, so
a wait too few, a wrong slot or a row beyond the vocabulary shows in the numbers. Races are looked
for as well; of copies they show only where these are made at once (`eager`). Compiled for four
generations, each kernel fits in VMEM at the sizes of a real model and needs no array of logits or
of looked-up rows. What is not shown here: that a device agrees, and how fast it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from tpu_topology import compile_for

from tst_jax.kernels import bag_sum_tpu, logsumexp_tpu
from tst_jax.kernels.bag_sum_tpu import bag_sum
from tst_jax.kernels.logsumexp_tpu import logsumexp, softmax_gradients

V = 50
bf16, f32 = jnp.bfloat16, jnp.float32


@pytest.fixture(autouse=True)
def no_race():
    """Every interpreted call of a test must be free of races; the last one is asked here."""
    pltpu.reset_tpu_interpret_mode_state()  # an interpreted kernel that fails leaves state behind
    yield
    assert_no_race()
    pltpu.reset_tpu_interpret_mode_state()


def assert_no_race():
    assert interpreter.races is None or not interpreter.races.races_found


def assert_one_line(error, *words):
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message


# --- Bag sum ------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles as small as they get, so that a few rows make several and the last one is ragged."""
    monkeypatch.setattr(bag_sum_tpu, "_MAX_ROWS", 8)
    monkeypatch.setattr(logsumexp_tpu, "_POSITIONS", 128)
    monkeypatch.setattr(logsumexp_tpu, "_ENTRIES", 128)


def bags(count, bag_size, width, seed=0):
    """A table, tokens and a mask. Rows 0 and 1 are NaN and inf; only masked slots point there."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(V, width)).astype(np.float32)
    table[0], table[1] = np.nan, np.inf
    mask = rng.random((count, bag_size)) < 0.7
    mask[0], mask[1:2] = True, False  # a full bag, and an empty one
    tokens = np.where(mask, rng.integers(2, V, mask.shape), rng.integers(0, 2, mask.shape))
    return table, tokens.astype(np.int32), mask


def summed(table, tokens, mask):
    """The reference, as an unrolled loop of look-ups; in numpy and float64, or in jax."""
    xp = jnp if isinstance(table, jax.Array) else np
    slot = lambda i: xp.where(mask[:, i, None], table[tokens[:, i]], xp.zeros_like(table[:1]))
    total = slot(0)
    for i in range(1, tokens.shape[1]):
        total = total + slot(i)
    return total


@pytest.mark.parametrize(
    "count, bag_size, width",
    [
        (21, 1, 128),
        (17, 2, 576),
        (11, 3, 80),
        (1, 5, 128),
        (13, 8, 256),
        (9, 16, 128),
        (5, 17, 80),
    ],
)
def test_bag_sum_is_the_unrolled_loop_to_the_bit(small_tiles, count, bag_size, width):
    table, tokens, mask = bags(count, bag_size, width)
    got = np.asarray(bag_sum(*map(jnp.asarray, (table, tokens, mask)), interpret=True))
    want = jax.jit(summed)(*map(jnp.asarray, (table, tokens, mask)))
    np.testing.assert_array_equal(got.view(np.uint32), np.asarray(want).view(np.uint32))
    exact = summed(table.astype(np.float64), tokens, mask)
    assert np.abs(got - exact).max() <= 1e-6 * np.abs(exact).max()
    assert got.dtype == np.float32 and not got[~mask.any(1)].any()


def test_bag_sum_has_no_race(small_tiles):
    table, tokens, mask = bags(21, 2, 128)
    eager = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    got = bag_sum(*map(jnp.asarray, (table, tokens, mask)), interpret=eager)
    np.testing.assert_array_equal(got, summed(table, tokens, mask))
    assert interpreter.races is not None, "races were not looked for"
    assert_no_race()


def test_bag_sum_stays_in_the_table(small_tiles):
    table, tokens, mask = bags(12, 3, 128)
    tokens = np.where(mask, tokens, np.array([-1, V, 2**31 - 1], np.int32))
    got = bag_sum(*map(jnp.asarray, (table, tokens, mask)), interpret=True)
    np.testing.assert_array_equal(got, summed(table, np.where(mask, tokens, 0), mask))
    table[0], beyond = 1.0, np.full((2, 1), V + 5, np.int32)
    got = bag_sum(jnp.asarray(table), beyond, np.ones((2, 1), bool), interpret=True)
    np.testing.assert_array_equal(got, table[[V - 1, V - 1]])


@pytest.mark.parametrize("bag_size", [1, 4, 16])
@pytest.mark.parametrize("width", [80, 576, 2048, 8192])
@pytest.mark.parametrize("count", [1, 100, 4096])
def test_bag_sum_tiles_fit(count, bag_size, width):
    rows, vmem_bytes = bag_sum_tpu._rows_per_tile(count, bag_size, width)
    buffers = 2 * bag_size * rows * 4 * width
    assert rows % 8 == 0 and rows < count + 8
    assert rows == 8 or buffers <= 8 << 20
    assert buffers < vmem_bytes <= 24 << 20


def test_bag_sum_refuses_other_tables_and_shapes():
    table, tokens, mask = map(jnp.asarray, bags(4, 2, 128))
    with pytest.raises(ValueError) as error:
        bag_sum(table.astype(bf16), tokens, mask)
    assert_one_line(error, "bfloat16", "float32", "pass")
    with pytest.raises(ValueError) as error:
        bag_sum(table, tokens, mask[:, :1])
    assert_one_line(error, "(4, 2)", "(4, 1)", "give")


# --- Logsumexp and its gradients ----------------------------------------------------------------


def head_case(count, vocabulary, width, dtype, seed=0):
    """Inputs, and the exact results of the same rounded inputs in float64."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.normal(size=(count, width)), dtype)
    head = jnp.asarray(rng.normal(size=(vocabulary, width)) * 2 / width**0.5, dtype)
    weight = rng.normal(size=count).astype(np.float32)
    hidden64, head64 = (np.asarray(x).astype(np.float64) for x in (hidden, head))
    z = hidden64 @ head64.T
    peak = z.max(1)
    exact = peak + np.log(np.exp(z - peak[:, None]).sum(1))
    given = exact.astype(np.float32)
    p = np.exp(z - given.astype(np.float64)[:, None]) * weight[:, None]
    return (
        hidden,
        head,
        jnp.asarray(given),
        jnp.asarray(weight),
        (exact, p @ head64, p.T @ hidden64),
    )


def distance(got, want):
    assert got.shape == want.shape and got.dtype == np.float32
    return np.linalg.norm(np.asarray(got).astype(np.float64) - want) / np.linalg.norm(want)


SHAPES = [(260, 300, 128), (130, 200, 80), (128, 256, 128), (1, 7, 80), (40, 1, 128)]


@pytest.mark.parametrize(
    "count, vocabulary, width, dtype",
    [(*dims, f32) for dims in SHAPES] + [(*dims, bf16) for dims in SHAPES[:2]],
)
def test_logsumexp_and_gradients_equal_float64(small_tiles, count, vocabulary, width, dtype):
    hidden, head, given, weight, exact = head_case(count, vocabulary, width, dtype)
    assert distance(logsumexp(hidden, head, interpret=True), exact[0]) <= 2e-6
    assert_no_race()
    gradients = softmax_gradients(hidden, head, given, weight, interpret=True)
    for got, want in zip(gradients, exact[1:]):
        assert distance(got, want) <= (2e-6 if dtype == f32 else 2e-3)


@pytest.mark.parametrize("vocabulary", [1000, 4096])
def test_logsumexp_with_the_tiles_of_a_real_run(vocabulary):
    hidden, head, given, weight, exact = head_case(300, vocabulary, 128, f32)
    assert distance(logsumexp(hidden, head, interpret=True), exact[0]) <= 2e-6
    for got, want in zip(softmax_gradients(hidden, head, given, weight, interpret=True), exact[1:]):
        assert distance(got, want) <= 2e-6


@pytest.mark.parametrize("shift", [304.0, -304.0])
def test_logits_far_from_zero_do_not_overflow(small_tiles, shift):
    """exp(300) is no float32. Below zero it is rows beyond the vocabulary, whose logit is 0."""
    hidden, head, _, weight, _ = head_case(20, 300, 128, f32)
    # Multiples of 1/8, so that logits are exact in float32: rounding one of 300 would cost 1e-5.
    hidden, head = (jnp.round(8 * x) / 8 for x in (hidden, head))
    hidden, head = hidden.at[:, 0].set(16.0), head.at[:, 0].set(shift / 16)
    hidden64, head64 = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    z = hidden64 @ head64.T
    exact = np.log(np.exp(z).sum(1))
    assert distance(logsumexp(hidden, head, interpret=True), exact) <= 2e-6
    given = exact.astype(np.float32)
    p = np.exp(z - given[:, None]) * np.asarray(weight)[:, None]
    d_hidden, d_head = softmax_gradients(hidden, head, given, weight, interpret=True)
    assert distance(d_hidden, p @ head64) <= 2e-6
    assert distance(d_head, p.T @ hidden64) <= 2e-6


@pytest.mark.parametrize("dtype, precision", [(f32, "HIGHEST"), (bf16, "DEFAULT")])
def test_float32_is_not_rounded_for_the_matmuls(dtype, precision):
    """A TPU would round float32 operands to bfloat16 by default; a CPU, interpreting, does not."""
    hidden, head, given, weight, _ = head_case(4, 9, 128, dtype)
    for matmuls, jaxpr in [
        (1, jax.make_jaxpr(logsumexp)(hidden, head)),
        (4, jax.make_jaxpr(softmax_gradients)(hidden, head, given, weight)),
    ]:
        text = str(jaxpr)
        assert text.count("dot_general[") == matmuls
        assert text.count(f"precision=(Precision.{precision}, Precision.{precision})") == matmuls


def test_gradients_of_two_shards_of_a_vocabulary_add_up(small_tiles):
    """With the logsumexp of all entries, a shard gives its own rows and its share of d_hidden."""
    hidden, head, given, weight, (_, d_hidden, d_head) = head_case(140, 300, 128, f32)
    shards = [
        softmax_gradients(hidden, part, given, weight, interpret=True)
        for part in (head[:170], head[170:])
    ]
    assert distance(shards[0][0] + shards[1][0], d_hidden) <= 2e-6
    assert distance(jnp.concatenate([shards[0][1], shards[1][1]]), d_head) <= 2e-6


def test_logsumexp_refuses_other_dtypes_and_shapes():
    hidden, head, given, weight, _ = head_case(4, 9, 128, f32)
    wide = jnp.zeros((4, 8192))
    for call, *words in [
        (lambda: logsumexp(hidden, head.astype(bf16)), "float32", "bfloat16", "cast"),
        (lambda: logsumexp(hidden.astype(jnp.float16), head.astype(jnp.float16)), "float16"),
        (lambda: logsumexp(hidden, head[:, :64]), "(4, 128)", "(9, 64)", "give"),
        (lambda: softmax_gradients(hidden, head, given, weight[:1]), "(1,)", "give"),
        (lambda: softmax_gradients(wide, wide, given, weight), "8192", "use"),
    ]:
        with pytest.raises(ValueError) as error:
            call()
        assert_one_line(error, *words)


# --- Compiled for TPUs --------------------------------------------------------------------------

GENERATIONS = ["v5e", "v5p", "v6e", "tpu7x"]
each_generation = pytest.mark.parametrize("generation", GENERATIONS)
shape = jax.ShapeDtypeStruct
N = 4096


def compiled(generation, function, *shapes, kernels):
    """Temporary bytes of a compiled program that holds this many Mosaic kernels."""
    program = compile_for(generation, function, *shapes)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == kernels
    return program.memory_analysis().temp_size_in_bytes


@each_generation
@pytest.mark.parametrize("bag_size, width", [(16, 2048), (4, 576)])
def test_bag_sum_compiles(generation, bag_size, width):
    table, ids = shape((128256, width), f32), (N, bag_size)
    temporary = compiled(
        generation, bag_sum, table, shape(ids, "int32"), shape(ids, bool), kernels=1
    )
    # No [N, S, D] array. If rows are no whole lanes, the table is copied, and on v5p the result.
    padded_table = 0 if width % 128 == 0 else table.shape[0] * (width + -width % 128) * 4
    assert temporary - padded_table < 16 << 20 < N * bag_size * width * 4


@pytest.mark.parametrize(
    "generation, vocabulary, width, dtype",
    [
        ("v5e", 128256, 2048, bf16),
        ("v5p", 151936, 2048, bf16),
        ("v6e", 151936, 576, bf16),
        ("tpu7x", 128256, 2048, bf16),
        ("tpu7x", 4096, 4096, bf16),
        ("v5e", 5000, 4096, f32),
    ],
)
def test_logsumexp_and_gradients_compile(generation, vocabulary, width, dtype):
    hidden, head = shape((N, width), dtype), shape((vocabulary, width), dtype)
    per_position = shape((N,), f32)
    forward = compiled(generation, logsumexp, hidden, head, kernels=1)
    both = (hidden, head, per_position, per_position)
    backward = compiled(generation, softmax_gradients, *both, kernels=2)
    # A head whose rows are no whole lanes is copied, and so is its gradient, in float32.
    padded_head = 0 if width % 128 == 0 else vocabulary * (width + -width % 128)
    assert forward - padded_head * head.dtype.itemsize < 8 << 20
    assert backward - padded_head * (head.dtype.itemsize + 4) < 16 << 20
    assert max(forward, backward) < N * vocabulary * 4 / 4
