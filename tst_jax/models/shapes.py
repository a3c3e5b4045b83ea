"""The shape of a decoder as settings, and the published shapes.

One decoder (`transformer.py`) covers what the paper trained and what it did not: Llama's and
Qwen3-MoE's layers, GPT-2's, and linear attention. TST is the same in front of and behind all.
"""

import dataclasses

from tst_jax import checks
from tst_jax.models.attention import BACKENDS

CHOICES = {
    "norm": ("rms", "layer"),
    "positions": ("rope", "learned"),
    "mlp": ("swiglu", "gelu"),
    "attention": ("softmax", "linear"),
    "attention_backend": BACKENDS,
    "dtype": ("float32", "bfloat16"),
    "remat": ("none", "dots", "full"),
}


@dataclasses.dataclass(unsafe_hash=True)
class ModelConfig:
    """Shape of the decoder. Treat as frozen once a model is made from it."""

    vocab_size: int = 8192  # entries of table and head; may be padded beyond the tokenizer's
    width: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4  # fewer than heads: grouped-query attention
    head_dim: int = 16
    ff: int = 160  # width of the feed-forward part, or of one expert of it
    tied: bool = False  # one table for embedding and head
    norm: str = "rms"  # rms; layer: LayerNorm with a bias, as in GPT-2
    norm_eps: float = 1e-5
    positions: str = "rope"  # rope; learned: a table of max_positions entries
    rope_theta: float = 10_000.0
    max_positions: int = 0  # for learned positions: the longest row
    mlp: str = "swiglu"  # swiglu; gelu: two matrices and GELU (tanh form)
    biases: bool = False  # on all matmuls of a layer
    qk_norm: bool = False  # RMSNorm of each query and key over head_dim
    attention: str = "softmax"  # softmax; linear: gated linear attention
    attention_backend: str = "auto"  # of softmax: auto, xla, cudnn, splash (models/attention.py)
    experts: int = 0  # 0: dense
    experts_per_token: int = 0
    router_loss: float = 0.003  # coefficient of the loss that balances experts (DeepSeek-V2)
    dtype: str = "float32"  # of activations and matmuls; parameters are always float32
    remat: str = "none"  # recompute in the backward pass: none; dots: all but matmuls; full

    def problems(self) -> list[str]:
        """One line for each setting that no decoder can be built from."""
        found = []
        sizes = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ff")
        for name in sizes:
            found += checks.whole(f"model.{name}", getattr(self, name), 1)
        for name, allowed in CHOICES.items():
            found += checks.choice(f"model.{name}", getattr(self, name), allowed)
        if self.kv_heads >= 1 and self.heads % self.kv_heads:
            found.append(
                f"model.heads is {self.heads}, no multiple of model.kv_heads {self.kv_heads}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            found.append(f"model.head_dim is {self.head_dim}; RoPE needs an even number")
        if self.positions == "learned" and self.max_positions < 1:
            found.append(
                f"model.max_positions is {self.max_positions} with model.positions=learned; give "
                "the longest row, at least data.positions"
            )
        if self.positions == "rope" and self.max_positions != 0:
            found.append(
                f"model.max_positions is {self.max_positions} with model.positions=rope, which has "
                "no table; set it to 0, or model.positions=learned"
            )
        found += checks.real("model.rope_theta", self.rope_theta, above=True)
        found += checks.real("model.norm_eps", self.norm_eps, above=True)
        if self.experts < 0 or not min(self.experts, 1) <= self.experts_per_token <= self.experts:
            found.append(
                f"model.experts is {self.experts} and model.experts_per_token "
                f"{self.experts_per_token}; give 0 and 0, or 1 .. experts of them to each position"
            )
        if self.experts and (self.mlp != "swiglu" or self.biases):
            found.append(
                f"model.experts is {self.experts} with model.mlp={self.mlp} and model.biases="
                f"{self.biases}; experts are SwiGLU without biases: set swiglu and False"
            )
        if self.attention == "linear" and self.attention_backend in ("cudnn", "splash"):
            found.append(
                f"model.attention_backend is {self.attention_backend!r} with model.attention="
                "linear, which has no such kernel; give auto"
            )
        found += checks.real("model.router_loss", self.router_loss)
        return found


# --- Published shapes (arXiv 2605.06546, section 4) ---------------------------------------------
# Parameter counts of 270M and 600M follow from as many key/value heads as heads; SmolLM2, whose
# shapes they are, groups queries by three. Where the paper prints no value (RoPE's base, the MoE's
# details) the one of the family that it names is taken.

LLAMA_3_VOCAB = 128_256


def dense_270m(kv_heads: int = 9) -> ModelConfig:
    """267,225,408 parameters; 253,954,368 with 3 key/value heads."""
    return _dense(width=576, layers=30, heads=9, kv_heads=kv_heads, head_dim=64, ff=1536)


def dense_600m(kv_heads: int = 15) -> ModelConfig:
    """600,208,320 parameters; 560,886,720 with 5 key/value heads."""
    return _dense(width=960, layers=32, heads=15, kv_heads=kv_heads, head_dim=64, ff=2560)


def dense_3b() -> ModelConfig:
    """3,337,766,912 parameters."""
    return _dense(width=2048, layers=36, heads=16, kv_heads=4, head_dim=128, ff=11008)


def _dense(**shape) -> ModelConfig:
    return ModelConfig(
        vocab_size=LLAMA_3_VOCAB, rope_theta=100_000.0, dtype="bfloat16", remat="full", **shape
    )


def moe_10b_a1b() -> ModelConfig:
    """10,489,144,832 parameters, of which a position uses 962,700,800 beside table and head."""
    return ModelConfig(
        vocab_size=151_936,
        width=1536,
        layers=32,
        heads=24,
        kv_heads=4,
        head_dim=128,
        ff=512,
        norm_eps=1e-6,
        rope_theta=50_000.0,
        qk_norm=True,
        experts=128,
        experts_per_token=8,
        dtype="bfloat16",
        remat="full",
    )


def gpt2_124m() -> ModelConfig:
    """GPT-2's smallest, 124,439,808 parameters; the paper trained none of this kind."""
    return ModelConfig(
        vocab_size=50_257,
        width=768,
        layers=12,
        heads=12,
        kv_heads=12,
        head_dim=64,
        ff=3072,
        tied=True,
        norm="layer",
        positions="learned",
        max_positions=1024,
        mlp="gelu",
        biases=True,
        dtype="bfloat16",
        remat="dots",
    )
