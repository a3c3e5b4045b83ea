"""Makes tests/fixtures/hugging_face: tiny models of transformers' own, and what they answer.

    python tests/make_hugging_face_fixtures.py

Needs torch and transformers (made with transformers 5.24 and torch 2.13), downloads nothing. Run
once; `test_hugging_face.py` reads the files, so that parity is tested where neither is installed.
Config and weights are as `save_pretrained` writes them.
"""

import os
import pathlib
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent / "fixtures" / "hugging_face"
SHARED = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24)
ROPE = dict(max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 5e3})
EXPERTS = dict(
    **SHARED,
    **ROPE,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
)
GPT2 = dict(n_embd=16, n_layer=2, n_head=2, n_positions=24, bos_token_id=0, eos_token_id=0)

MODELS = {
    "llama_gqa": transformers.LlamaConfig(
        vocab_size=101, num_key_value_heads=2, rms_norm_eps=1e-5, **SHARED, **ROPE
    ),
    "llama_tied": transformers.LlamaConfig(
        vocab_size=96, head_dim=6, tie_word_embeddings=True, **SHARED, **ROPE
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        vocab_size=97, num_key_value_heads=2, num_experts=5, **EXPERTS
    ),
    "qwen3_moe_tied": transformers.Qwen3MoeConfig(
        vocab_size=96, num_key_value_heads=4, num_experts=4, tie_word_embeddings=True, **EXPERTS
    ),
    "gpt2_tied": transformers.GPT2Config(vocab_size=131, **GPT2),
    "gpt2_untied": transformers.GPT2Config(
        vocab_size=99, n_inner=40, tie_word_embeddings=False, **GPT2
    ),
}
SHARDED = "llama_gqa"


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights of a size at which each of them moves the logits: no norm is one, no bias zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
            elif "embed" in name or "wte" in name or "wpe" in name:
                weight.copy_(noise)
            else:
                weight.copy_(noise / 3)


def main():
    for seed, (name, config) in enumerate(MODELS.items()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        randomize(model, seed)
        ids = np.random.default_rng(seed).integers(config.vocab_size, size=(2, 20))
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)).logits.numpy()
        folder = FOLDER / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, max_shard_size="12KB" if name == SHARDED else "5GB")
        np.savez(folder / "expected.npz", ids=ids.astype(np.int32), logits=logits)
        print(f"{name}: logits of {logits.std():.2f}, {[x.name for x in folder.iterdir()]}")


if __name__ == "__main__":
    main()
