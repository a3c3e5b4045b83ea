"""A dense decoder in the Llama manner: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases.

Its stages are separate methods, because TST changes what goes into the first and what is asked of
the last, and nothing in between:

    hidden = model.embed(tokens_BxLxS)     bags of tokens -> one vector a position
    hidden = model.body(hidden)            the layers, at positions 0 .. L-1 whatever the bag size
    table  = model.head                    [V, D]: for `superposition.bag_loss`, or `logits(hidden)`

Parameters are float32 `nnx.Param`s. Each carries `axes`, the logical names of its dimensions (see
`tst_jax/sharding.py`), and `inputs`, how many of them a matmul sums over (0: no matmul). Layers are
stacked along a leading axis that `axes` leaves out, and scanned.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tst_jax import superposition
from tst_jax.kernels.dispatch import Kernels

DTYPES = ("float32", "bfloat16")
REMAT = ("none", "dots", "full")


@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig:
    """Shape of the decoder. Treat as frozen once a model is made from it."""

    vocab_size: int = 8192
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention
    head_dim: int = 16
    ff: int = 160
    tied: bool = False  # one table for embedding and head
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dtype: str = "float32"  # of activations and matmuls; parameters are always float32
    remat: str = "none"  # recompute in the backward pass: none; dots: all but matmuls; full

    def problems(self) -> list[str]:
        """One line for each setting that no decoder can be built from."""
        found = []
        sizes = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ff")
        for name in sizes:
            if getattr(self, name) < 1:
                found.append(f"model.{name} is {getattr(self, name)}; it must be at least 1")
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            found.append(
                f"model.heads is {self.heads}, no multiple of model.kv_heads {self.kv_heads}"
            )
        if self.head_dim % 2:
            found.append(f"model.head_dim is {self.head_dim}; RoPE needs an even number")
        if self.dtype not in DTYPES:
            found.append(f"model.dtype is {self.dtype!r}; choose one of {', '.join(DTYPES)}")
        if self.remat not in REMAT:
            found.append(f"model.remat is {self.remat!r}; choose one of {', '.join(REMAT)}")
        if not self.rope_theta > 0 or not self.norm_eps > 0:
            found.append("model.rope_theta and model.norm_eps must be positive")
        return found


def _weight(rngs, shape, axes, inputs=1, gain=1.0):
    """Normal with a standard deviation of gain / sqrt(fan-in)."""
    std = gain / math.sqrt(math.prod(shape[:inputs]))
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(value, axes=axes, inputs=inputs)


def _table(rngs, cfg):
    value = jax.random.normal(rngs.params(), (cfg.vocab_size, cfg.width), jnp.float32) * 0.02
    return nnx.Param(value, axes=("vocab", "embed"), inputs=0)


def _scale(cfg):
    return nnx.Param(jnp.ones(cfg.width, jnp.float32), axes=("embed",), inputs=0)


def rms_norm(x, scale_D, eps):
    """x / rms(x) * scale, in float32, back in x's dtype."""
    x32 = x.astype(jnp.float32)
    rms = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return (x32 * rms * scale_D).astype(x.dtype)


def rope(x_BxLxHxQ, positions_BxL, theta):
    """Rotary embedding, pairs (i, i + Q/2), angle position * theta^(-2i/Q) (rule 4)."""
    half = x_BxLxHxQ.shape[-1] // 2
    frequency = theta ** (-np.arange(half, dtype=np.float64) / half)
    angle = positions_BxL[..., None, None].astype(jnp.float32) * frequency.astype(np.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BxLxHxQ.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BxLxHxQ.dtype)


class Layer(nnx.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        d, q = cfg.width, cfg.head_dim
        out = 1 / math.sqrt(2 * cfg.layers)  # the residual stream keeps its size with depth
        self.attention_norm = _scale(cfg)
        self.query = _weight(rngs, (d, cfg.heads, q), ("embed", "heads", "head_dim"))
        self.key = _weight(rngs, (d, cfg.kv_heads, q), ("embed", "kv_heads", "head_dim"))
        self.value = _weight(rngs, (d, cfg.kv_heads, q), ("embed", "kv_heads", "head_dim"))
        self.out = _weight(rngs, (cfg.heads, q, d), ("heads", "head_dim", "embed"), 2, out)
        self.mlp_norm = _scale(cfg)
        self.gate = _weight(rngs, (d, cfg.ff), ("embed", "mlp"))
        self.up = _weight(rngs, (d, cfg.ff), ("embed", "mlp"))
        self.down = _weight(rngs, (cfg.ff, d), ("mlp", "embed"), 1, out)

    def __call__(self, x_BxLxD, positions_BxL, cfg, cache=None, at=None):
        """Returns the new residual stream, and the layer's cache with these positions written."""
        w = lambda param: param[...].astype(x_BxLxD.dtype)
        x = rms_norm(x_BxLxD, self.attention_norm[...], cfg.norm_eps)
        query = jnp.einsum("bld,dhq->blhq", x, w(self.query))
        key = jnp.einsum("bld,dkq->blkq", x, w(self.key))
        value = jnp.einsum("bld,dkq->blkq", x, w(self.value))
        query = rope(query, positions_BxL, cfg.rope_theta)
        key = rope(key, positions_BxL, cfg.rope_theta)
        if cache is None:
            mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        else:
            write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=1)
            cache = jax.tree.map(write, cache, (key, value))
            slots = jnp.arange(cache[0].shape[1])
            seen = slots <= positions_BxL[:, None, :, None]  # [B, 1, L, slots]
            mixed = jax.nn.dot_product_attention(query, *cache, mask=seen)
        x_BxLxD = x_BxLxD + jnp.einsum("blhq,hqd->bld", mixed, w(self.out))
        x = rms_norm(x_BxLxD, self.mlp_norm[...], cfg.norm_eps)
        x = jax.nn.silu(x @ w(self.gate)) * (x @ w(self.up))
        return x_BxLxD + x @ w(self.down), cache


class Transformer(nnx.Module):
    """The decoder; a pytree of its parameters, so that jit, grad and optax take it as it is."""

    def __init__(self, cfg: ModelConfig, key):
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.cfg = cfg
        self.embedding = _table(nnx.Rngs(params=embed_key), cfg)
        make_layer = lambda key: Layer(cfg, nnx.Rngs(params=key))
        self.layers = jax.vmap(make_layer)(jax.random.split(layers_key, cfg.layers))
        self.final_norm = _scale(cfg)
        if not cfg.tied:
            self.output = _table(nnx.Rngs(params=head_key), cfg)

    def embed(self, tokens_BxLxS, mask_BxLxS=None, kernels=Kernels()):
        """Bags of token ids -> hidden_BxLxD in the compute dtype: the mean of each bag."""
        table, dtype = self.embedding[...], jnp.dtype(self.cfg.dtype)
        return superposition.embed_bags(table, tokens_BxLxS, mask_BxLxS, dtype, kernels)

    def body(self, hidden_BxLxD, cache=None, at=0):
        """The layers and the final norm; causal, at positions `at .. at + L - 1`.

        Without a cache returns hidden_BxLxD. With one (see `empty_cache`) returns
        (hidden_BxLxD, cache), keys and values of these positions written into it.
        """
        cfg = self.cfg
        rows, length, _ = hidden_BxLxD.shape
        positions_BxL = jnp.broadcast_to(at + jnp.arange(length), (rows, length))

        def step(x, layer_and_cache):
            layer, layer_cache = layer_and_cache
            return layer(x, positions_BxL, cfg, layer_cache, at)

        policies = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
        if cfg.remat != "none":
            step = jax.checkpoint(step, policy=policies[cfg.remat], prevent_cse=False)
        hidden_BxLxD, cache = jax.lax.scan(step, hidden_BxLxD, (self.layers, cache))
        hidden_BxLxD = rms_norm(hidden_BxLxD, self.final_norm[...], cfg.norm_eps)
        return hidden_BxLxD if cache is None else (hidden_BxLxD, cache)

    @property
    def head(self):
        """The output head as a table [V, D], float32."""
        return (self.embedding if self.cfg.tied else self.output)[...]

    def logits(self, hidden_BxLxD):
        """float32 [B, L, V]. For sampling; the loss never needs them whole."""
        head = self.head.astype(hidden_BxLxD.dtype)
        return jnp.einsum("bld,vd->blv", hidden_BxLxD, head, preferred_element_type=jnp.float32)

    def empty_cache(self, rows: int, length: int):
        """Keys and values for `length` positions of `rows` rows: two [layers, B, L, K, Q]."""
        cfg = self.cfg
        shape = (cfg.layers, rows, length, cfg.kv_heads, cfg.head_dim)
        return jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype)
