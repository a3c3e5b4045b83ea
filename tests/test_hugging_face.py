"""Parity with Hugging Face: its weights give its logits here, and ours give ours there.

The models under fixtures/hugging_face are transformers' own (make_hugging_face_fixtures.py). What
runs transformers itself is skipped where that or torch is not installed.
"""

import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_export import PLACE, SHAPES, arrays_of, bits, each_shape, tensors_in

from tst_jax.checkpoint import named_leaves
from tst_jax.data.store import open_store
from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import train_bpe
from tst_jax.errors import UserError
from tst_jax.export import export
from tst_jax.generate import load_model, sample
from tst_jax.models.hugging_face import check_import, load_into, read_params, write_model
from tst_jax.models.hugging_face_map import model_config
from tst_jax.models.shapes import ModelConfig
from tst_jax.models.transformer import Transformer
from tst_jax.train import train

FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "hugging_face"
NAMES = ("llama_gqa", "llama_tied", "qwen3_moe", "qwen3_moe_tied", "gpt2_tied", "gpt2_untied")
CLOSE = 1e-4  # of logits; sums in another order differ by some 1e-5 at logits of 20

each_fixture = pytest.mark.parametrize("name", NAMES)


def config_of(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


def load(folder, cfg):
    shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return load_into(shapes, jax.tree.map(lambda x: place, shapes), folder, cfg)


@jax.jit
def logits(model, ids_BxL):
    return model.logits(model.body(model.embed(ids_BxL[..., None])))


def copy_of(tmp_path, name, tensors=None, **config):
    """A fixture with changed settings, and changed weights in one file."""
    folder = tmp_path / "copy"
    shutil.copytree(FIXTURES / name, folder)
    (folder / "config.json").write_text(json.dumps(config_of(name) | config))
    if tensors is not None:
        for file in folder.glob("model*"):
            file.unlink()
        save_file(tensors, folder / "model.safetensors")
    return folder


# --- fixtures ------------------------------------------------------------------------------------


@each_fixture
def test_fixture_gives_its_logits(name):
    """And each array moves them: one that was read wrongly, or not used, would be noticed."""
    model = load(FIXTURES / name, model_config(config_of(name)))
    expected = np.load(FIXTURES / name / "expected.npz")
    worst = np.abs(logits(model, expected["ids"]) - expected["logits"]).max()
    print(f"{name}: largest difference {worst:.1e}")
    assert worst <= CLOSE
    leaves, structure = jax.tree.flatten(model)
    for i, array in enumerate(named_leaves(model)):
        changed = [*leaves[:i], leaves[i][::-1] * 1.01, *leaves[i + 1 :]]
        if array == "layers.key_bias":
            continue  # adds the same to a query's scores of all keys, which softmax does not see
        moved = np.abs(logits(structure.unflatten(changed), expected["ids"]) - expected["logits"])
        assert moved.max() > 100 * CLOSE, array


@each_fixture
def test_fixture_is_written_as_it_was_read(tmp_path, name):
    """Names, shapes and bits are those that transformers wrote."""
    cfg = model_config(config_of(name))
    write_model(tmp_path / "out", cfg, read_params(FIXTURES / name, cfg), **PLACE)
    theirs, ours = tensors_in(FIXTURES / name), tensors_in(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    for tensor, array in theirs.items():
        assert ours[tensor].shape == array.shape
        np.testing.assert_array_equal(bits(ours[tensor]), bits(array), tensor)
    assert check_import(tmp_path / "out", cfg) == []
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert model_config(written) == cfg
    assert written["architectures"] == config_of(name)["architectures"]
    assert written["model_type"] == config_of(name)["model_type"]


def test_fixtures_are_small():
    assert sum(path.stat().st_size for path in FIXTURES.rglob("*")) < 2**20
    assert len(list((FIXTURES / "llama_gqa").glob("*.safetensors"))) > 1  # one is sharded


# --- settings ------------------------------------------------------------------------------------


def test_transformers_4_spelling_is_read():
    found = config_of("qwen3_moe")
    theta = found.pop("rope_parameters")["rope_theta"]
    old = found | {"rope_theta": theta, "rope_scaling": None, "torch_dtype": "float32"}
    old["num_experts"] = old.pop("num_local_experts")
    assert model_config(old) == model_config(config_of("qwen3_moe"))
    assert model_config(old | {"rope_theta": 1e6}).rope_theta == 1e6


def test_missing_keys_mean_what_transformers_takes():
    found = config_of("llama_gqa")
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters"):
        del found[key]
    cfg = model_config(found)
    assert (cfg.kv_heads, cfg.head_dim, cfg.norm_eps, cfg.rope_theta) == (4, 4, 1e-6, 1e4)
    assert not model_config(found | {"tie_word_embeddings": None}).tied
    found = config_of("gpt2_tied")
    del found["tie_word_embeddings"]
    assert model_config(found).tied and model_config(found).ff == 4 * 16


REFUSED = [
    ("llama_gqa", {"architectures": ["MistralForCausalLM"]}, "architectures"),
    ("llama_gqa", {"rope_scaling": {"type": "default", "factor": 8.0}}, "rope_scaling.factor"),
    ("llama_gqa", {"rope_scaling": {"type": "linear"}}, "rope_scaling.type"),
    ("llama_gqa", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type"),
    ("llama_gqa", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama_gqa", {"attention_bias": True}, "attention_bias"),
    ("llama_gqa", {"mlp_bias": True}, "mlp_bias"),
    ("llama_gqa", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama_gqa", {"sliding_window": 128}, "sliding_window"),
    ("llama_gqa", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama_gqa", {"hidden_size": None}, "hidden_size is missing"),
    ("llama_gqa", {"hidden_size": "16"}, "hidden_size is '16'"),
    ("llama_gqa", {"num_attention_heads": 0}, "heads"),
    ("llama_gqa", {"head_dim": 3}, "head_dim"),
    ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob"),
    ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
    ("qwen3_moe", {"num_local_experts": 0, "num_experts_per_tok": 0}, "model.experts is 0"),
    ("gpt2_tied", {"activation_function": "relu"}, "activation_function"),
    ("gpt2_tied", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ("gpt2_tied", {"scale_attn_weights": False}, "scale_attn_weights"),
    ("gpt2_tied", {"n_head": 3}, "model.heads"),
]


@pytest.mark.parametrize("name, change, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_other_decoders_are_refused_by_name(name, change, text):
    with pytest.raises(UserError) as error:
        model_config(config_of(name) | change)
    assert text in str(error.value) and "\n" not in str(error.value)


# --- weights -------------------------------------------------------------------------------------


def test_gpt2_without_prefix_and_with_buffers(tmp_path):
    """As GPT-2's own checkpoints are: of the model without a head, with the causal mask."""
    tensors = {
        name.removeprefix("transformer."): x
        for name, x in tensors_in(FIXTURES / "gpt2_tied").items()
    }
    for layer in range(2):
        tensors[f"h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 24, 24), np.float32))
        tensors[f"h.{layer}.attn.masked_bias"] = np.full(1, -1e4, np.float32)
    cfg = model_config(config_of("gpt2_tied"))
    read = read_params(copy_of(tmp_path, "gpt2_tied", tensors), cfg)
    plain = read_params(FIXTURES / "gpt2_tied", cfg)
    for name in named_leaves(load(FIXTURES / "gpt2_tied", cfg)):
        np.testing.assert_array_equal(read(name), plain(name), name)


def test_tied_head_may_be_there_if_it_is_the_embedding(tmp_path):
    tensors = tensors_in(FIXTURES / "llama_tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    cfg = model_config(config_of("llama_tied"))
    folder = copy_of(tmp_path, "llama_tied", tensors)
    assert check_import(folder, cfg) == []
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="lm_head.weight is not the embedding"):
        read_params(folder, cfg)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_are_read_exactly(tmp_path, dtype):
    tensors = {k: x.astype(jnp.dtype(dtype)) for k, x in tensors_in(FIXTURES / "gpt2_tied").items()}
    read = read_params(
        copy_of(tmp_path, "gpt2_tied", tensors), model_config(config_of("gpt2_tied"))
    )
    array, theirs = read("layers.up"), tensors["transformer.h.1.mlp.c_fc.weight"]
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array[1], theirs.astype(np.float32))


def test_every_wrong_tensor_is_named(tmp_path):
    tensors = tensors_in(FIXTURES / "llama_tied")
    at = "model.layers.1.mlp."
    del tensors["model.norm.weight"]
    tensors[at + "up_proj.weight"] = tensors[at + "up_proj.weight"].T.copy()
    tensors[at + "down_proj.weight"] = tensors[at + "down_proj.weight"].astype(np.int32)
    tensors[at + "up_proj.bias"] = np.zeros(24, np.float32)
    folder = copy_of(tmp_path, "llama_tied", tensors)
    lines = [
        f"{folder}: model.norm.weight is missing",
        f"{folder}: {at}up_proj.weight is [16, 24], wanted [24, 16]",
        f"{folder}: {at}down_proj.weight is I32; F32, F16, BF16 are read",
        f"{folder}: {at}up_proj.bias is unexpected",
    ]
    cfg = model_config(config_of("llama_tied"))
    with pytest.raises(UserError) as error:
        read_params(folder, cfg)
    assert sorted(str(error.value).splitlines()) == sorted(lines)
    assert sorted(check_import(folder, cfg)) == sorted(lines)


def test_files_that_are_not_read(tmp_path):
    cfg = model_config(config_of("llama_gqa"))
    folder = copy_of(tmp_path, "llama_gqa")
    shard = folder / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match="00002-of-00003.safetensors cannot be read"):
        read_params(folder, cfg)
    shard.unlink()
    with pytest.raises(UserError, match="00002-of-00003.safetensors cannot be read"):
        read_params(folder, cfg)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match="save_pretrained"):
        read_params(folder, cfg)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="pytorch_model.bin is a pickle"):
        read_params(folder, cfg)


def test_differences_from_the_run_are_named(tmp_path):
    folder = FIXTURES / "llama_tied"
    cfg = model_config(config_of("llama_tied"))
    other = ModelConfig(**{**vars(cfg), "remat": "full", "dtype": "bfloat16", "router_loss": 0.5})
    assert check_import(folder, other) == []
    other = ModelConfig(**{**vars(cfg), "width": 64, "tied": False, "norm_eps": 2e-6})
    assert check_import(folder, other) == [
        f"model.width is 64 and {folder} has 16; set --config.model.width=16",
        f"model.tied is False and {folder} has True; set --config.model.tied=True",
        f"model.norm_eps is 2e-06 and {folder} has 1e-06; set --config.model.norm_eps=1e-06",
    ]
    assert "does not exist" in check_import(tmp_path / "none", cfg)[0]
    assert "config.json cannot be read" in check_import(tmp_path, cfg)[0]
    folder = copy_of(tmp_path, "llama_tied", attention_bias=True, mlp_bias=True)
    lines = check_import(folder, cfg)
    assert len(lines) == 2 and f"{folder}/config.json: mlp_bias is True" in lines[1]


def test_another_tokenizer_is_refused(tmp_path):
    """A token of another id would be trained on in silence."""
    tokenizer = train_bpe(["one two three four five " * 20], 262)
    cfg = model_config(config_of("llama_tied"))
    folder = copy_of(tmp_path, "llama_tied")
    assert check_import(folder, cfg, tokenizer.tokens()) == []  # no tokenizer.json: no check
    (folder / "tokenizer.json").write_bytes(tokenizer.data)
    assert check_import(folder, cfg, tokenizer.tokens()) == []
    vocab = dict(tokenizer.tokens())
    token = tokenizer.token_of(260)
    del vocab[token]
    (line,) = check_import(folder, cfg, vocab)
    assert repr(token) in line and "260" in line and "None" in line
    (line,) = check_import(folder, cfg, vocab | {token: 300})
    assert repr(token) in line and "260" in line and "300" in line


# --- transformers itself -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers():
    os.environ["HF_HUB_OFFLINE"] = "1"
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@each_shape
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_agrees(tmp_path, transformers, cfg, dtype):
    """Weights of ours in transformers give our logits, and it misses nothing and has none left."""
    import torch

    arrays = {name: x * (0.3 if x.ndim > 2 else 1) for name, x in arrays_of(cfg).items()}
    out = tmp_path / "out"
    write_model(out, cfg, arrays.get, **PLACE, dtype=dtype, max_shard_bytes=9000)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[problem], problem
    assert (
        type(theirs).__name__ == json.loads((out / "config.json").read_text())["architectures"][0]
    )
    ids = np.random.default_rng(1).integers(cfg.vocab_size, size=(2, 20))
    with torch.no_grad():
        wanted = theirs.eval()(torch.from_numpy(ids)).logits.numpy()
    worst = np.abs(logits(load(out, cfg), jnp.asarray(ids)) - wanted).max()
    print(f"largest difference {worst:.1e} at logits of {wanted.std():.1f}")
    assert worst <= CLOSE and wanted.std() > 0.5


TEXT = ["the cat sat on the mat. a dog ran to the cat. ", "one two three, three two one; ", "so "]


@pytest.fixture(scope="module")
def text_store(tmp_path_factory):
    """A store of English words under a byte-level tokenizer of 280 entries."""
    texts = [TEXT[i % 2] * (3 + i % 5) + TEXT[2] for i in range(40)]
    tokenizer = train_bpe(texts, 280)
    documents = [(tokenizer.encode(text), len(text)) for text in texts]
    path = tmp_path_factory.mktemp("text") / "store"
    write_store(
        path,
        vocabulary=tokenizer,
        train=documents,
        heldout=documents[:4],
        separator_id=0,
        provenance={},
    )
    return path


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2_tied"])
def test_transformers_generates_what_generate_does(
    tmp_path, transformers, make_config, text_store, name
):
    """A trained run, exported: the same ids for a prompt, and the same greedy text after it."""
    config = make_config(text_store)
    config.steps, config.eval.every, config.tst.ratio = 200, 0, 0.2
    config.data.rows, config.data.positions = 8, 16
    config.model = ModelConfig(**{**vars(SHAPES[name]), "vocab_size": 288})
    if config.model.positions == "learned":
        config.model.max_positions = 128
    train(config, tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out")

    store = open_store(text_store)
    model, _ = load_model(tmp_path / "run")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    prompt = "the cat sat on"
    ids = [0] + store.vocabulary().encode(prompt)
    encoded = tokenizer(prompt, return_tensors="pt")
    assert encoded.input_ids[0].tolist() == ids
    found = theirs.generate(**encoded, do_sample=False, max_new_tokens=64)[0].tolist()
    ours = sample(model, ids, 64, temperature=0, stop_id=store.separator_id)
    assert found == ids + ours + ([0] if len(ours) < 64 else [])
    new = tokenizer.decode(found[len(ids) :], skip_special_tokens=True)
    assert new == store.vocabulary().decode(ours)
    print(repr(prompt + new))
    assert len(set(ours)) > 2  # a model that says one thing only would prove little
