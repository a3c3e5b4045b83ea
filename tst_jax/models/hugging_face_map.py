"""What Hugging Face's Llama, Qwen3-MoE and GPT-2 call our settings and arrays, for both ways.

`ARCHITECTURES` is the correspondence of settings, `array_rows` that of arrays. Reading is strict: a
setting that is not understood may change the logits, so it is refused by name, not passed over.
"""

import dataclasses

import numpy as np

from tst_jax.errors import UserError
from tst_jax.models.shapes import ModelConfig

# --- Settings ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What one architecture's config.json can say, and which decoders it is."""

    model_type: str
    shape: dict  # fields of ModelConfig that are given with it
    keys: dict  # field of ModelConfig -> key
    constant: dict  # keys with the one value that our decoder has
    defaults: dict  # what a missing key means
    ignored: tuple  # keys that change no logit of a decoder with these constants
    optional: tuple  # fields that follow from others where their key is missing
    written: dict = dataclasses.field(default_factory=dict)  # further keys of an export


_ROPE = dict(norm="rms", positions="rope", mlp="swiglu", biases=False)
_ROPE_KEYS = dict(
    vocab_size="vocab_size",
    width="hidden_size",
    layers="num_hidden_layers",
    heads="num_attention_heads",
    kv_heads="num_key_value_heads",
    head_dim="head_dim",
    ff="intermediate_size",
    norm_eps="rms_norm_eps",
    rope_theta="rope_theta",
    tied="tie_word_embeddings",
)
_ROPE_DEFAULTS = dict(rms_norm_eps=1e-6, rope_theta=10_000.0, tie_word_embeddings=False)
_IGNORED = (
    *("architectures", "model_type", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "_name_or_path"),
    *("max_position_embeddings", "attention_dropout"),
)

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        shape=dict(_ROPE, qk_norm=False, experts=0),
        keys=_ROPE_KEYS,
        constant=dict(
            hidden_act="silu", attention_bias=False, mlp_bias=False, rope_interleaved=False
        ),
        defaults=_ROPE_DEFAULTS,
        ignored=("pretraining_tp", "is_llama_config", "transformers.js_config"),
        optional=("kv_heads", "head_dim"),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        model_type="qwen3_moe",
        shape=dict(_ROPE, qk_norm=True),
        keys=_ROPE_KEYS
        | dict(
            ff="moe_intermediate_size",
            experts="num_experts",
            experts_per_token="num_experts_per_tok",
        ),
        constant=dict(
            hidden_act="silu",
            attention_bias=False,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            use_sliding_window=False,
        ),
        defaults=dict(_ROPE_DEFAULTS, norm_topk_prob=False),
        # The width of dense layers, of which there are none, and of windows that are not in use;
        # the coefficient of a balancing loss that is another one than ours.
        ignored=(
            *("intermediate_size", "sliding_window", "max_window_layers", "output_router_logits"),
            "router_aux_loss_coef",
        ),
        optional=("head_dim",),
    ),
    "GPT2LMHeadModel": Architecture(
        model_type="gpt2",
        shape=dict(
            norm="layer", positions="learned", mlp="gelu", biases=True, qk_norm=False, experts=0
        ),
        keys=dict(
            vocab_size="vocab_size",
            width="n_embd",
            layers="n_layer",
            heads="n_head",
            ff="n_inner",
            max_positions="n_positions",
            norm_eps="layer_norm_epsilon",
            tied="tie_word_embeddings",
        ),
        constant=dict(
            activation_function="gelu_new",
            scale_attn_weights=True,
            scale_attn_by_inverse_layer_idx=False,
            add_cross_attention=False,
        ),
        defaults=dict(layer_norm_epsilon=1e-5, tie_word_embeddings=True),
        ignored=(
            *("n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn"),
            *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
            *("summary_type", "summary_use_proj", "task_specific_params"),
        ),
        optional=("ff",),
        written=dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),  # we train without dropout
    ),
}

_NOT_OF_THE_WEIGHTS = ("dtype", "remat", "attention_backend", "router_loss")


def _obstacles(name: str, cfg: ModelConfig) -> list[str]:
    """Why an architecture cannot hold a decoder."""
    wanted = {**ARCHITECTURES[name].shape, "attention": "softmax"}
    if name == "GPT2LMHeadModel":
        wanted["kv_heads"] = cfg.heads
    found = [
        f"model.{field} is {getattr(cfg, field)!r} and must be {value!r}"
        for field, value in wanted.items()
        if getattr(cfg, field) != value
    ]
    if name == "Qwen3MoeForCausalLM" and cfg.experts < 1:
        found.append(f"model.experts is {cfg.experts} and must be at least 1")
    if name == "GPT2LMHeadModel" and cfg.heads * cfg.head_dim != cfg.width:
        found.append(f"model.heads * model.head_dim must be model.width, which is {cfg.width}")
    if name == "LlamaForCausalLM" and cfg.width % cfg.heads:  # transformers 5 demands it
        found.append(f"model.width is {cfg.width} and must be a multiple of model.heads")
    return found


def architecture(cfg: ModelConfig) -> str:
    """The architecture's name in Hugging Face's configs. Raises UserError if none holds `cfg`."""
    near = [name for name in ARCHITECTURES if (name == "Qwen3MoeForCausalLM") == (cfg.experts > 0)]
    name = min(near, key=lambda name: len(_obstacles(name, cfg)))
    obstacles = _obstacles(name, cfg)
    if obstacles:
        raise UserError(
            f"no architecture of {', '.join(ARCHITECTURES)} holds this decoder; for the nearest, "
            f"{name}, {'; '.join(obstacles)}"
        )
    return name


def hf_config(
    cfg: ModelConfig, max_positions: int, separator_id: int | None, dtype: str = "float32"
) -> dict:
    """config.json of a decoder, for transformers 4 and 5.

    Args:
      cfg: of a shape that `architecture` knows.
      max_positions: the longest row; with learned positions `cfg.max_positions` is taken.
      separator_id: begins and ends a text.
      dtype: of the weights, one of DTYPES.
    """
    name = architecture(cfg)
    kind = ARCHITECTURES[name]
    out = {"architectures": [name], "model_type": kind.model_type}
    out |= {key: getattr(cfg, field) for field, key in kind.keys.items()}
    if cfg.positions == "rope":
        out["max_position_embeddings"] = max_positions
    if cfg.experts:
        out["intermediate_size"] = cfg.ff
    out |= kind.constant | kind.written
    out |= {"bos_token_id": separator_id, "eos_token_id": separator_id}
    return out | {"dtype": dtype, "torch_dtype": dtype}  # transformers 5 and 4


def model_config(found: dict) -> ModelConfig:
    """The decoder that a config.json describes; `dtype`, `remat` and backend are left at default.

    Raises UserError, one line for each setting that is missing, unknown here, or of a value that
    this decoder does not have.
    """
    names = found.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UserError(f"architectures is {names}; supported are {', '.join(ARCHITECTURES)}")
    kind = ARCHITECTURES[names[0]]
    found = kind.defaults | {key: x for key, x in found.items() if x is not None}
    if "num_local_experts" in found:  # as transformers 5 writes it; it reads both
        found["num_experts"] = found.pop("num_local_experts")
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    for name in ("rope_scaling", "rope_parameters"):  # of transformers 4 and 5
        if isinstance(found.get(name), dict) and "rope_theta" in found:
            rope = found.pop(name)
            found["rope_theta"] = rope.get("rope_theta", found["rope_theta"])
            rope = {
                key: x for key, x in rope.items() if key != "rope_theta" and x != plain.get(key)
            }
            found |= {f"{name}.{key}": x for key, x in rope.items()}

    problems = []
    for key, value in found.items():
        if key in kind.constant:
            if value != kind.constant[key]:
                problems.append(f"{key} is {value!r}; only {kind.constant[key]!r} is supported")
        elif key not in (*kind.keys.values(), *kind.ignored, *_IGNORED):
            problems.append(f"{key} is {value!r}; this setting is not supported")
    fields = {}
    for field, key in kind.keys.items():
        wanted = type(getattr(ModelConfig, field))
        if key not in found:
            problems += [] if field in kind.optional else [f"{key} is missing"]
        elif type(found[key]) is not wanted and (wanted, type(found[key])) != (float, int):
            problems.append(f"{key} is {found[key]!r}; it must be of type {wanted.__name__}")
        else:
            fields[field] = found[key]
    if not problems:
        width, heads = fields["width"], fields["heads"]
        derived = dict(kv_heads=heads, head_dim=width // max(heads, 1), ff=4 * width)
        cfg = ModelConfig(**{**derived, **kind.shape, **fields})
        problems = cfg.problems() or _obstacles(names[0], cfg)
    if problems:
        raise UserError("\n".join(problems))
    return cfg


def differences(found: dict, cfg: ModelConfig, folder) -> list[str]:
    """One line for each setting in which `folder`'s config.json, `found`, is no `cfg`."""
    try:
        theirs = model_config(found)
    except UserError as error:
        return [f"{folder}/config.json: {line}" for line in str(error).splitlines()]
    lines = []
    for field in dataclasses.fields(ModelConfig):
        mine, wanted = getattr(cfg, field.name), getattr(theirs, field.name)
        unused = field.name == "rope_theta" and theirs.positions == "learned"
        if mine != wanted and not unused and field.name not in _NOT_OF_THE_WEIGHTS:
            lines.append(
                f"model.{field.name} is {mine!r} and {folder} has {wanted!r}; set "
                f"--config.model.{field.name}={wanted}"
            )
    return lines


# --- Arrays --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of tensor, and the array of ours that it is; or the arrays that it joins."""

    ours: str  # one or more names
    shape: tuple  # of each of ours, without leading axes for layer and expert
    theirs: str  # with a {} for each of those axes
    their_shape: tuple
    transposed: bool = False  # torch's Linear keeps its weight as [outputs, inputs]

    def lead(self, cfg) -> tuple:
        return (cfg.layers, cfg.experts)[: self.theirs.count("{}")]

    def to_theirs(self, arrays):
        """One array of `shape` for each of ours -> `their_shape`."""
        *first, last = self.their_shape[::-1] if self.transposed else self.their_shape
        parts = [x.reshape(*first, last // len(arrays)) for x in arrays]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        return joined.T if self.transposed else joined

    def to_ours(self, tensor):
        """`their_shape` -> a list with one array of `shape` for each of ours."""
        tensor = tensor.T if self.transposed else tensor
        return [x.reshape(self.shape) for x in np.split(tensor, len(self.ours.split()), -1)]


def array_rows(cfg: ModelConfig) -> list[Row]:
    """Name and shape of ours, name and shape of theirs, for a shape that `architecture` knows."""
    v, d, f, p = cfg.vocab_size, cfg.width, cfg.ff, cfg.max_positions
    h, k, q, turned = cfg.heads, cfg.kv_heads, cfg.head_dim, True
    if architecture(cfg) == "GPT2LMHeadModel":
        at = "transformer.h.{}."
        rows = [
            Row("embedding", (v, d), "transformer.wte.weight", (v, d)),
            Row("positions", (p, d), "transformer.wpe.weight", (p, d)),
            Row("layers.attention_norm", (d,), at + "ln_1.weight", (d,)),
            Row("layers.attention_norm_bias", (d,), at + "ln_1.bias", (d,)),
            Row(
                *("layers.query layers.key layers.value", (d, h, q)),
                *(at + "attn.c_attn.weight", (d, 3 * h * q)),
            ),
            Row(
                *("layers.query_bias layers.key_bias layers.value_bias", (h, q)),
                *(at + "attn.c_attn.bias", (3 * h * q,)),
            ),
            Row("layers.out", (h, q, d), at + "attn.c_proj.weight", (h * q, d)),
            Row("layers.out_bias", (d,), at + "attn.c_proj.bias", (d,)),
            Row("layers.mlp_norm", (d,), at + "ln_2.weight", (d,)),
            Row("layers.mlp_norm_bias", (d,), at + "ln_2.bias", (d,)),
            Row("layers.up", (d, f), at + "mlp.c_fc.weight", (d, f)),
            Row("layers.up_bias", (f,), at + "mlp.c_fc.bias", (f,)),
            Row("layers.down", (f, d), at + "mlp.c_proj.weight", (f, d)),
            Row("layers.down_bias", (d,), at + "mlp.c_proj.bias", (d,)),
            Row("final_norm", (d,), "transformer.ln_f.weight", (d,)),
            Row("final_norm_bias", (d,), "transformer.ln_f.bias", (d,)),
        ]
    else:
        at, mlp = "model.layers.{}.self_attn.", "model.layers.{}.mlp."
        rows = [
            Row("embedding", (v, d), "model.embed_tokens.weight", (v, d)),
            Row("layers.attention_norm", (d,), "model.layers.{}.input_layernorm.weight", (d,)),
            Row("layers.query", (d, h, q), at + "q_proj.weight", (h * q, d), turned),
            Row("layers.key", (d, k, q), at + "k_proj.weight", (k * q, d), turned),
            Row("layers.value", (d, k, q), at + "v_proj.weight", (k * q, d), turned),
            Row("layers.out", (h, q, d), at + "o_proj.weight", (d, h * q), turned),
            Row("layers.mlp_norm", (d,), "model.layers.{}.post_attention_layernorm.weight", (d,)),
            Row("final_norm", (d,), "model.norm.weight", (d,)),
        ]
        if cfg.qk_norm:
            rows += [
                Row("layers.query_norm", (q,), at + "q_norm.weight", (q,)),
                Row("layers.key_norm", (q,), at + "k_norm.weight", (q,)),
            ]
        if cfg.experts:
            e = cfg.experts
            rows += [Row("layers.router", (d, e), mlp + "gate.weight", (e, d), turned)]
            mlp += "experts.{}."
        rows += [
            Row("layers.gate", (d, f), mlp + "gate_proj.weight", (f, d), turned),
            Row("layers.up", (d, f), mlp + "up_proj.weight", (f, d), turned),
            Row("layers.down", (f, d), mlp + "down_proj.weight", (d, f), turned),
        ]
    return rows if cfg.tied else [*rows, Row("output", (v, d), "lm_head.weight", (v, d))]


def tensor_shapes(cfg: ModelConfig) -> dict[str, tuple]:
    """Name -> shape of all their tensors, in the order of the table."""
    return {
        row.theirs.format(*index): row.their_shape
        for row in array_rows(cfg)
        for index in np.ndindex(row.lead(cfg))
    }
