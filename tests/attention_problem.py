"""What the tests of attention share: inputs, documents, and how far from float64 a result is."""

import jax
import jax.numpy as jnp
import numpy as np

# Float32 against float64, relative to the largest entry of an array: 2e-6 was seen.
ROUNDING = 1e-5


def inputs(length, heads=4, kv_heads=2, head_dim=16, rows=2, seed=0):
    """Query, key, value and the gradient of the result. Scores are large enough to be uneven."""
    rng = np.random.default_rng(seed)
    draw = lambda count: rng.normal(size=(rows, length, count, head_dim)).astype(np.float32)
    return 2 * draw(heads), draw(kv_heads), draw(kv_heads), draw(heads)


def documents(length, rows=2):
    """Segment ids: four documents a row, at other places in each, one of a single position."""
    places = np.arange(length)
    cuts = [(length // 3 + row, 2 * length // 3, 2 * length // 3 + 1) for row in range(rows)]
    return np.stack([sum((places >= cut).astype(np.int32) for cut in row) for row in cuts])


def repeated(x, heads):
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def with_gradients(function, arrays, cotangent):
    """The value of `function(*arrays)`, and the gradients of its sum weighted by `cotangent`."""

    @jax.jit
    def both(arrays, cotangent):
        result, pull = jax.vjp(function, *arrays)
        return [result, *pull(cotangent)]

    return both(arrays, cotangent)


def exactly(function, arrays, cotangent):
    """Value and gradients of a reference, in float64."""
    with jax.enable_x64(True):
        wide = lambda x: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), x)
        return jax.tree.map(np.asarray, with_gradients(function, wide(arrays), wide(cotangent)))


def difference(got, want):
    """The largest of all arrays, each relative to its largest entry."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(
        float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()) for a, b in pairs
    )
