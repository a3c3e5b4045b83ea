"""What the tests of kernels compute: bag mean and loss together, with pads, and how far apart."""

import jax
import numpy as np

from tst_jax import superposition

B, L, D, V = 8, 6, 16, 64
ROUNDING = 2e-6  # of float32 sums in another order, relative to the largest entry


def problem(bag_size, seed=0):
    """Table, head, hidden, tokens and mask, with a bag of pads only and one of a single token."""
    rng = np.random.default_rng(seed)
    table, head = rng.normal(size=(2, V, D)).astype(np.float32)
    hidden = rng.normal(size=(B, L, D)).astype(np.float32)
    tokens = rng.integers(0, V, (B, L, bag_size)).astype(np.int32)
    mask = rng.random(tokens.shape) < 0.8
    tokens[0, 0], mask[0, 0], mask[-1, -1] = V - 1, True, False
    return table, head, hidden, tokens, mask


def both_operations(kernels, objective="mce", chunk=2 * B):
    """Bag mean and loss together: (value, gradients of table, head and hidden)."""

    def mean_loss(table, head, hidden, tokens, mask):
        bags = superposition.embed_bags(table, tokens, mask, hidden.dtype, kernels)
        hidden = hidden + bags
        loss, weight = superposition.bag_loss(
            hidden, head, tokens, mask, objective=objective, chunk=chunk, kernels=kernels
        )
        return loss / weight

    return jax.value_and_grad(mean_loss, (0, 1, 2))


def largest_difference(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(np.abs(a - np.asarray(b)).max() / np.abs(b).max()) for a, b in pairs)


def compiled(function, *arrays):
    return jax.jit(function).lower(*arrays).compile()
