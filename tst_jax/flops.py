"""Arithmetic of a step: matmul FLOPs with the explicit head size, and peaks of chips (rule 22)."""

from tst_jax.models.attention import LINEAR_CHUNK
from tst_jax.models.shapes import ModelConfig

TRAINING = 3  # a backward pass costs two forward passes

# FLOP/s of a whole chip in bfloat16, matrices dense (no structured sparsity), as its maker states
# them: Google's pages of each TPU; NVIDIA's data sheets, half of the figure that they give with
# sparsity. h100 and h200 are the SXM boards: PCIe and NVL ones are slower, and not here.
PEAK_FLOPS = {
    "v4": 275e12,
    "v5e": 197e12,
    "v5p": 459e12,
    "v6e": 918e12,
    "tpu7x": 2307e12,
    "a100": 312e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
}

# jax's `device_kind` -> name in PEAK_FLOPS. Whole strings: a card that merely begins so (H100 PCIe,
# GB200, a MIG slice) has another peak.
DEVICE_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
DEVICES_PER_CHIP = {"tpu7x": 2}  # jax devices; 1 of the others (of v4 with its default, megacore)


def accelerator(device_kind: str) -> str | None:
    """Name in PEAK_FLOPS of what jax calls `device_kind`; None if its peak is not known here."""
    return DEVICE_KINDS.get(device_kind)


def device_peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of one jax device, a part of a chip or all of it; None if it is not known."""
    name = accelerator(device_kind)
    return PEAK_FLOPS[name] / DEVICES_PER_CHIP.get(name, 1) if name else None


def forward_flops(cfg: ModelConfig, positions: int, causal: bool = True) -> int:
    """FLOPs of one position's forward pass in a row of `positions` positions.

    The bag size does not enter: the bag mean and the bag's targets are look-ups, not matmuls.

    Args:
      cfg: the decoder's shape.
      positions: L.
      causal: count the half of the attention scores that a causal mask keeps; False gives the
        usual MFU convention, which counts them all.
    """
    d, h, k, q = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_dim
    attention_projections = 2 * d * (h + 2 * k) * q + 2 * d * h * q
    attention_scores = 4 * positions * h * q // (2 if causal else 1)
    if cfg.attention == "linear":  # scores within a chunk; a state that is updated, and read
        chunk = min(LINEAR_CHUNK, positions)
        attention_projections += 2 * d * h
        attention_scores = 4 * chunk * h * q // (2 if causal else 1) + 4 * h * q * q
    matrices = 3 if cfg.mlp == "swiglu" else 2
    feed_forward = 2 * matrices * d * cfg.ff
    if cfg.experts:
        feed_forward = 2 * d * cfg.experts + cfg.experts_per_token * feed_forward
    head = 2 * d * cfg.vocab_size
    return cfg.layers * (attention_projections + attention_scores + feed_forward) + head


def step_flops(cfg: ModelConfig, rows: int, positions: int, causal: bool = True) -> int:
    """FLOPs of one training step over `rows` rows of `positions` positions."""
    return TRAINING * rows * positions * forward_flops(cfg, positions, causal)
