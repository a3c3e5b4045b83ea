"""The decoder: pre-norm attention and feed-forward layers on a residual stream.

Its stages are separate methods, because TST changes what goes into the first and what is asked of
the last, and nothing in between:

    hidden = model.embed(tokens_BxLxS)     bags of tokens -> one vector a position
    hidden = model.body(hidden)            the layers, at positions 0 .. L-1 whatever the bag size
    table  = model.head                    [V, D]: for `superposition.bag_loss`, or `logits(hidden)`

Parameters are float32 `nnx.Param`s. Each carries `axes`, the logical names of its dimensions (see
`tst_jax/sharding.py`); `inputs`, how many of them a matmul sums over (0: a table that is looked up;
None: a scale or a bias); and `batched`, how many of them stand in front of those (experts). Layers
are stacked along a leading axis that `axes` leaves out, and scanned.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tst_jax import sharding, superposition
from tst_jax.kernels.dispatch import Kernels
from tst_jax.models import attention, moe
from tst_jax.models.linear import MATMUL, linear
from tst_jax.models.shapes import ModelConfig


def _weight(rngs, shape, axes, inputs=1, gain=1.0, batched=0):
    """Normal with a standard deviation of gain / sqrt(fan-in)."""
    std = gain / math.sqrt(math.prod(shape[batched : batched + inputs]))
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(value, axes=axes, inputs=inputs, batched=batched)


def _table(rngs, entries, cfg, axis="vocab"):
    value = jax.random.normal(rngs.params(), (entries, cfg.width), jnp.float32) * 0.02
    return nnx.Param(value, axes=(axis, "embed"), inputs=0)


def _vector(shape, axes, fill=jnp.zeros):
    return nnx.Param(fill(shape, jnp.float32), axes=axes, inputs=None)


def _add_norm(module, name, size, axis, kind):
    """Gives `module` the parameters of a norm: `name`, and `name_bias` for LayerNorm."""
    setattr(module, name, _vector((size,), (axis,), jnp.ones))
    if kind == "layer":
        setattr(module, name + "_bias", _vector((size,), (axis,)))


def _apply_norm(module, name, x, cfg):
    scale = getattr(module, name)[...]
    if cfg.norm == "layer":
        return layer_norm(x, scale, getattr(module, name + "_bias")[...], cfg.norm_eps)
    return rms_norm(x, scale, cfg.norm_eps)


def rms_norm(x, scale, eps):
    """x / rms(x) * scale over the last axis, in float32, back in x's dtype."""
    x32 = x.astype(jnp.float32)
    rms = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return (x32 * rms * scale).astype(x.dtype)


def layer_norm(x, scale, bias, eps):
    """(x - mean) / std * scale + bias over the last axis, in float32, back in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - x32.mean(-1, keepdims=True)
    std = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + eps)
    return (x32 * std * scale + bias).astype(x.dtype)


def rope(x_BxLxHxQ, positions_BxL, theta):
    """Rotary embedding, pairs (i, i + Q/2), angle position * theta^(-2i/Q) (rule 4)."""
    half = x_BxLxHxQ.shape[-1] // 2
    frequency = theta ** (-np.arange(half, dtype=np.float64) / half)
    angle = positions_BxL[..., None, None].astype(jnp.float32) * frequency.astype(np.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_BxLxHxQ.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BxLxHxQ.dtype)


def _keep_matmuls(primitive, *args, **params) -> bool:
    """What remat="dots" keeps of a layer: results of matmuls with weights, and of an attention
    kernel, which are as small. Attention without a kernel is computed again, scores and all."""
    kernel = primitive.name in ("dot_product_attention_fwd_wrapper", "pallas_call")
    named = jax.checkpoint_policies.save_only_these_names(MATMUL)
    return kernel or named(primitive, *args, **params)


@dataclasses.dataclass(frozen=True)
class Rows:
    """What all layers know of the rows of a batch, beside their residual stream."""

    positions: jax.Array  # [B, L]
    segments: jax.Array | None  # [B, L]: documents packed in a row
    mask: jax.Array | None  # [B, L] bool: False for a pad, which no expert's load counts
    at: int | jax.Array  # of the first position in the cache
    mesh: jax.sharding.Mesh | None


class Layer(nnx.Module):
    """Attention, then SwiGLU, GELU or experts, each added to the residual stream."""

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        d, h, k, q, f = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.ff
        out = 1 / math.sqrt(2 * cfg.layers)  # the residual stream keeps its size with depth
        _add_norm(self, "attention_norm", d, "width", cfg.norm)
        self.query = _weight(rngs, (d, h, q), ("embed", "heads", "head_dim"))
        self.key = _weight(rngs, (d, k, q), ("embed", "kv_heads", "head_dim"))
        self.value = _weight(rngs, (d, k, q), ("embed", "kv_heads", "head_dim"))
        self.out = _weight(rngs, (h, q, d), ("heads", "head_dim", "embed"), 2, out)
        if cfg.biases:
            self.query_bias = _vector((h, q), ("heads", "head_dim"))
            self.key_bias = _vector((k, q), ("kv_heads", "head_dim"))
            self.value_bias = _vector((k, q), ("kv_heads", "head_dim"))
            self.out_bias = _vector((d,), ("width",))
        if cfg.qk_norm:
            self.query_norm = _vector((q,), ("head_dim",), jnp.ones)
            self.key_norm = _vector((q,), ("head_dim",), jnp.ones)
        if cfg.attention == "linear":
            self.decay = _weight(rngs, (d, h), ("embed", "heads"))
            # Heads begin with memories from some twenty to some thousands of positions.
            self.decay_bias = _vector(
                (h,), ("heads",), lambda n, t: jnp.linspace(0, 6, *n, dtype=t)
            )
            self.mixed_norm = _vector((q,), ("head_dim",), jnp.ones)
        _add_norm(self, "mlp_norm", d, "width", cfg.norm)
        if cfg.experts:
            e = cfg.experts
            self.router = _weight(rngs, (d, e), ("embed", "choices"))
            self.gate = _weight(rngs, (e, d, f), ("experts", "embed", "mlp"), batched=1)
            self.up = _weight(rngs, (e, d, f), ("experts", "embed", "mlp"), batched=1)
            self.down = _weight(rngs, (e, f, d), ("experts", "mlp", "embed"), 1, out, batched=1)
            return
        if cfg.mlp == "swiglu":
            self.gate = _weight(rngs, (d, f), ("embed", "mlp"))
        self.up = _weight(rngs, (d, f), ("embed", "mlp"))
        self.down = _weight(rngs, (f, d), ("mlp", "embed"), 1, out)
        if cfg.biases:
            self.up_bias = _vector((f,), ("mlp",))
            self.down_bias = _vector((d,), ("width",))

    def linear(self, subscripts, x, name, rows):
        """x times the weight `name`."""
        weight = getattr(self, name)
        return linear(subscripts, x, weight[...], weight.axes, rows.mesh)

    def attend(self, x_BxLxD, cfg, rows, cache):
        """What the positions read from each other, [B, L, D], and the cache with them in it."""
        dtype = x_BxLxD.dtype
        bias = lambda name: getattr(self, name + "_bias")[...].astype(dtype) if cfg.biases else 0
        query = self.linear("bld,dhq->blhq", x_BxLxD, "query", rows) + bias("query")
        key = self.linear("bld,dkq->blkq", x_BxLxD, "key", rows) + bias("key")
        value = self.linear("bld,dkq->blkq", x_BxLxD, "value", rows) + bias("value")
        if cfg.qk_norm:
            query = rms_norm(query, self.query_norm[...], cfg.norm_eps)
            key = rms_norm(key, self.key_norm[...], cfg.norm_eps)
        if cfg.positions == "rope":
            query = rope(query, rows.positions, cfg.rope_theta)
            key = rope(key, rows.positions, cfg.rope_theta)
        if cfg.attention == "linear":
            gate = self.linear("bld,dh->blh", x_BxLxD, "decay", rows).astype(jnp.float32)
            # A sixteenth: a gate begins near one, and one step forgets little (GLA, section 4.4).
            log_decay = jax.nn.log_sigmoid(gate + self.decay_bias[...]) / 16
            mixed, state = attention.linear_attention(
                query, key, value, log_decay, rows.segments, cache
            )
            cache = None if cache is None else state
            mixed = rms_norm(mixed, self.mixed_norm[...], cfg.norm_eps)
        elif cache is None:
            backend, mesh = cfg.attention_backend, rows.mesh
            mixed = attention.attend(query, key, value, rows.segments, backend=backend, mesh=mesh)
        else:
            write = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, rows.at, axis=1)
            cache = jax.tree.map(write, cache, (key, value))
            mixed = attention.attend_cached(query, *cache, rows.positions)
        return self.linear("blhq,hqd->bld", mixed, "out", rows) + bias("out"), cache

    def feed_forward(self, x_BxLxD, cfg, rows):
        """Each position by itself, [B, L, D], and how its experts were chosen."""
        dtype = x_BxLxD.dtype
        bias = lambda name: getattr(self, name + "_bias")[...].astype(dtype) if cfg.biases else 0
        if cfg.experts:
            weights = [getattr(self, name)[...] for name in ("router", "gate", "up", "down")]
            return moe.mix_experts(x_BxLxD, *weights, cfg.experts_per_token, rows.mask, rows.mesh)
        up = self.linear("bld,df->blf", x_BxLxD, "up", rows) + bias("up")
        if cfg.mlp == "swiglu":
            up = jax.nn.silu(self.linear("bld,df->blf", x_BxLxD, "gate", rows)) * up
        else:
            up = jax.nn.gelu(up, approximate=True)
        return self.linear("blf,fd->bld", up, "down", rows) + bias("down"), None

    def __call__(self, x_BxLxD, cfg, rows, cache=None):
        """The new residual stream, the layer's cache with these positions in it, the routing."""
        change, cache = self.attend(
            _apply_norm(self, "attention_norm", x_BxLxD, cfg), cfg, rows, cache
        )
        x_BxLxD = x_BxLxD + change
        change, routing = self.feed_forward(_apply_norm(self, "mlp_norm", x_BxLxD, cfg), cfg, rows)
        return x_BxLxD + change, cache, routing


class Transformer(nnx.Module):
    """The decoder; a pytree of its parameters, so that jit, grad and optax take it as it is."""

    def __init__(self, cfg: ModelConfig, key):
        embed_key, layers_key, head_key = jax.random.split(key, 3)
        self.cfg = cfg
        self.embedding = _table(nnx.Rngs(params=embed_key), cfg.vocab_size, cfg)
        if cfg.positions == "learned":
            positions_rngs = nnx.Rngs(params=jax.random.fold_in(embed_key, 1))
            self.positions = _table(positions_rngs, cfg.max_positions, cfg, "position")
        make_layer = lambda key: Layer(cfg, nnx.Rngs(params=key))
        self.layers = jax.vmap(make_layer)(jax.random.split(layers_key, cfg.layers))
        _add_norm(self, "final_norm", cfg.width, "width", cfg.norm)
        if not cfg.tied:
            self.output = _table(nnx.Rngs(params=head_key), cfg.vocab_size, cfg)

    def embed(self, tokens_BxLxS, mask_BxLxS=None, kernels=Kernels()):
        """Bags of token ids -> hidden_BxLxD in the compute dtype: the mean of each bag."""
        table, dtype = self.embedding[...], jnp.dtype(self.cfg.dtype)
        return superposition.embed_bags(table, tokens_BxLxS, mask_BxLxS, dtype, kernels)

    def body(self, hidden_BxLxD, cache=None, at=0, **rows):
        """The layers and the final norm; causal, at positions `at .. at + L - 1`.

        Without a cache returns hidden_BxLxD. With one (see `empty_cache`) returns
        (hidden_BxLxD, cache), with what later positions need of these written into it. `rows` is as
        in `body_and_routing`.
        """
        hidden_BxLxD, grown, _ = self.body_and_routing(hidden_BxLxD, cache, at, **rows)
        return hidden_BxLxD if cache is None else (hidden_BxLxD, grown)

    def body_and_routing(
        self,
        hidden_BxLxD,
        cache=None,
        at=0,
        *,
        segments_BxL=None,
        positions_BxL=None,
        mask_BxL=None,
        mesh=None,
    ):
        """`body`, and how the experts were chosen.

        Args:
          hidden_BxLxD: in the compute dtype, from `embed`.
          cache, at: for decoding, see `body`.
          segments_BxL: int32, one value a document: attention stays inside it (rule 20). None: a
            row is one document. Not together with a cache.
          positions_BxL: int32, in place of `at .. at + L - 1` (rules 4, 20).
          mask_BxL: bool, False for pads; only the experts' load and balance look at it.
          mesh: where the arrays lie, as `tst_jax.sharding` says; None: one device, or automatic.
        Returns:
          (hidden_BxLxD, cache or None, `moe.Routing` with a leading [layers] axis or None).
        """
        cfg = self.cfg
        length = hidden_BxLxD.shape[1]
        if cfg.positions == "learned":
            if length > cfg.max_positions:
                raise ValueError(f"{length} positions; model.max_positions is {cfg.max_positions}")
            table = self.positions[...].astype(hidden_BxLxD.dtype)
            if positions_BxL is None:  # a slice, whose gradient is a sum over rows and no scatter
                hidden_BxLxD += jax.lax.dynamic_slice_in_dim(table, at, length)
            else:
                hidden_BxLxD += table[positions_BxL]
        if positions_BxL is None:
            positions_BxL = jnp.broadcast_to(at + jnp.arange(length), hidden_BxLxD.shape[:2])
        rows = Rows(positions_BxL, segments_BxL, mask_BxL, at, mesh)

        on_mesh = lambda x: sharding.constrain(x, mesh, "batch", "position", "width")

        def step(x, layer_and_cache):
            layer, layer_cache = layer_and_cache
            x, layer_cache, routing = layer(on_mesh(x), cfg, rows, layer_cache)
            return on_mesh(x), (layer_cache, routing)

        if cfg.remat != "none":
            policy = _keep_matmuls if cfg.remat == "dots" else None
            step = jax.checkpoint(step, policy=policy, prevent_cse=False)
        hidden_BxLxD, (cache, routing) = jax.lax.scan(step, hidden_BxLxD, (self.layers, cache))
        return _apply_norm(self, "final_norm", hidden_BxLxD, cfg), cache, routing

    @property
    def head(self):
        """The output head as a table [V, D], float32."""
        return (self.embedding if self.cfg.tied else self.output)[...]

    def logits(self, hidden_BxLxD):
        """float32 [B, L, V]. For sampling; the loss never needs them whole."""
        head = self.head.astype(hidden_BxLxD.dtype)
        return jnp.einsum("bld,vd->blv", hidden_BxLxD, head, preferred_element_type=jnp.float32)

    def empty_cache(self, rows: int, length: int):
        """What decoding `length` positions of `rows` rows remembers, before the first.

        Keys and values, two [layers, B, length, K, Q] in the compute dtype; for linear attention a
        state [layers, B, H, Q, Q] in float32, whatever the length.
        """
        cfg = self.cfg
        if cfg.attention == "linear":
            return jnp.zeros((cfg.layers, rows, cfg.heads, cfg.head_dim, cfg.head_dim))
        shape = (cfg.layers, rows, length, cfg.kv_heads, cfg.head_dim)
        return jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype)
