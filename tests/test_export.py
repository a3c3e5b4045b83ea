"""Export: nothing is lost on the way, memory holds one array, and what is no model is refused."""

import collections
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from tst_jax.checkpoint import CheckpointError, Checkpoints, named_leaves
from tst_jax.data.store import open_store
from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import ids_only, train_bpe
from tst_jax.errors import UserError
from tst_jax.export import _tokenizer_files, export
from tst_jax.generate import load_model
from tst_jax.models.hugging_face import read_params, write_model
from tst_jax.models.hugging_face_map import architecture, array_rows, hf_config, model_config
from tst_jax.models.shapes import ModelConfig
from tst_jax.models.transformer import Transformer
from tst_jax.train import train

SMALL = dict(vocab_size=61, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, ff=24)
GPT2 = dict(norm="layer", positions="learned", max_positions=32, mlp="gelu", biases=True)
MOE = dict(qk_norm=True, experts=3, experts_per_token=2)
OTHER = dict(kv_heads=1, rope_theta=500.0, norm_eps=1e-2)  # no library's defaults
SHAPES = {
    "llama": ModelConfig(**SMALL | OTHER),
    "llama_tied": ModelConfig(**SMALL, tied=True),
    "qwen3_moe": ModelConfig(**SMALL | OTHER, **MOE),
    "qwen3_moe_tied": ModelConfig(**SMALL, **MOE, tied=True),
    "gpt2": ModelConfig(**SMALL, **GPT2, norm_eps=1e-2),
    "gpt2_tied": ModelConfig(**SMALL, **GPT2, tied=True),
}
PLACE = dict(max_positions=32, separator_id=0)
each_shape = pytest.mark.parametrize("cfg", SHAPES.values(), ids=SHAPES.keys())


def arrays_of(cfg, seed=0):
    """{"layers.query": float32 of random bits' worth, ...} for every parameter of the decoder."""
    shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(x.shape, np.float32) for name, x in named_leaves(shapes).items()
    }


def bits(array):
    return np.asarray(array).view(np.uint32)


def tensors_in(folder):
    """All tensors under a folder, as the safetensors library reads them."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            assert file.metadata() == {"format": "pt"}
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


# --- the files -----------------------------------------------------------------------------------


@each_shape
@pytest.mark.parametrize("max_shard_bytes", [10**9, 5000])
def test_round_trip_keeps_every_bit(tmp_path, cfg, max_shard_bytes):
    """Every array comes back with its bits, each was asked for once, and shards keep their size."""
    arrays, asked = arrays_of(cfg), collections.Counter()

    def get(name):
        asked[name] += 1
        return arrays[name]

    out = tmp_path / "out"
    write_model(out, cfg, get, **PLACE, max_shard_bytes=max_shard_bytes)
    assert asked == {name: 1 for name in arrays}
    read = read_params(out, cfg)
    for name, array in arrays.items():
        again = read(name)
        assert again.dtype == np.float32 and again.shape == array.shape
        np.testing.assert_array_equal(bits(again), bits(array), name)

    tensors = tensors_in(out)
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in arrays.values())
    index = out / "model.safetensors.index.json"
    assert index.exists() == (max_shard_bytes == 5000)
    if index.exists():
        index = json.loads(index.read_text())
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
        files = collections.defaultdict(int)
        for name, file in index["weight_map"].items():
            with safe_open(out / file, framework="np") as tensors_of_file:
                files[file] += tensors_of_file.get_tensor(name).nbytes
        count = len(files)
        assert set(files) == {
            f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
        }
        assert set(index["weight_map"]) == set(tensors)
        assert 1 < count and max(files.values()) <= max_shard_bytes
    assert not list(tmp_path.glob(".*"))


def test_bfloat16_is_rounded_once(tmp_path):
    cfg = SHAPES["llama"]
    arrays = arrays_of(cfg)
    write_model(tmp_path / "out", cfg, arrays.get, **PLACE, dtype="bfloat16")
    tensors = tensors_in(tmp_path / "out")
    assert {x.dtype for x in tensors.values()} == {jnp.dtype("bfloat16")}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    read = read_params(tmp_path / "out", cfg)
    for name, array in arrays.items():
        rounded = np.asarray(jnp.asarray(array).astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(bits(read(name)), bits(rounded), name)


def test_layouts_are_torch_s():
    """Linear keeps [outputs, inputs], GPT-2's Conv1D [inputs, outputs], heads follow each other."""
    d, h, q = 16, 2, 8
    query = arrays_of(SHAPES["llama"])["layers.query"]
    row = {row.ours: row for row in array_rows(SHAPES["llama"])}["layers.query"]
    theirs = row.to_theirs([query[1]])
    assert theirs.shape == (h * q, d) and theirs[1 * q + 3, 5] == query[1, 5, 1, 3]
    arrays = arrays_of(SHAPES["gpt2"])
    names = ["layers.query", "layers.key", "layers.value"]
    row = {row.ours: row for row in array_rows(SHAPES["gpt2"])}[" ".join(names)]
    theirs = row.to_theirs([arrays[name][0] for name in names])
    assert theirs.shape == (d, 3 * h * q)
    assert theirs[5, 1 * h * q + 1 * q + 3] == arrays["layers.key"][0, 5, 1, 3]


@each_shape
def test_settings_round_trip(cfg):
    config = hf_config(cfg, max_positions=40, separator_id=7, dtype="float32")
    assert model_config(json.loads(json.dumps(config))) == cfg
    assert config["bos_token_id"] == config["eos_token_id"] == 7
    longest = cfg.max_positions or 40
    assert config.get("n_positions", config.get("max_position_embeddings")) == longest


BAD_SHAPES = {
    "model.attention is 'linear'": dict(attention="linear"),
    "model.qk_norm is True": dict(qk_norm=True),
    "model.qk_norm is False": dict(experts=3, experts_per_token=2),
    "model.norm is 'layer'": dict(norm="layer"),
    "model.kv_heads is 1": GPT2 | dict(kv_heads=1),
    "model.heads [*] model.head_dim must be model.width": GPT2 | dict(head_dim=4),
    "model.width is 16 and must be a multiple": dict(heads=3, kv_heads=3),
    "model.biases is True": dict(biases=True),
    "model.mlp is 'gelu'": dict(mlp="gelu"),
}


@pytest.mark.parametrize("text, change", BAD_SHAPES.items())
def test_shapes_without_an_architecture_are_refused(text, change):
    with pytest.raises(UserError, match=text) as error:
        architecture(ModelConfig(**{**SMALL, **change}))
    assert "\n" not in str(error.value)


def test_no_folder_is_written_over(tmp_path):
    cfg = SHAPES["llama_tied"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(UserError, match="no empty folder"):
            write_model(tmp_path / name, cfg, arrays_of(cfg).get, **PLACE)
    assert (tmp_path / "full" / "file").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    write_model(tmp_path / "empty", cfg, arrays_of(cfg).get, **PLACE)
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_failure_leaves_nothing(tmp_path):
    cfg = SHAPES["llama"]
    arrays = arrays_of(cfg)
    del arrays["layers.down"]
    leftover = tmp_path / ".out.partial"  # of an export that was killed
    leftover.mkdir()
    (leftover / "old").write_text("")
    with pytest.raises(KeyError):
        write_model(tmp_path / "out", cfg, arrays.__getitem__, **PLACE)
    assert not list(tmp_path.iterdir())
    wrong = arrays_of(cfg)
    wrong["layers.query"] = wrong["layers.query"].swapaxes(1, 2)
    with pytest.raises(ValueError, match="layers.query"):
        write_model(tmp_path / "out", cfg, wrong.get, **PLACE)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_noticed_before(tmp_path, monkeypatch):
    cfg = SHAPES["llama"]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match="1,000 are free"):
        write_model(tmp_path / "out", cfg, arrays_of(cfg).get, **PLACE)
    assert not list(tmp_path.iterdir())


# --- the tokenizer -------------------------------------------------------------------------------


def test_tokenizer_begins_with_the_separator():
    """An encoded prompt is what `tst_jax.generate` feeds, and decodes without the separator."""
    vocabulary = train_bpe(["one two three four five " * 20, "six seven"], 270)
    prompt = " five seven\n"
    ids = vocabulary.encode(prompt)
    files = _tokenizer_files(vocabulary, [0], 32)
    exported = Tokenizer.from_str(files["tokenizer.json"])
    assert exported.encode(prompt).ids == [0] + ids
    assert exported.encode("").ids == [0]
    assert exported.encode(prompt, add_special_tokens=False).ids == ids
    assert exported.decode([0] + ids) == prompt
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["bos_token"] == settings["eos_token"] == "<|endoftext|>"
    assert settings["model_max_length"] == 32
    begun = Tokenizer.from_str(_tokenizer_files(vocabulary, [0, 9], 32)["tokenizer.json"])
    assert begun.encode(prompt).ids == [0, 9] + ids  # a store with BOS
    kept = _tokenizer_files(ids_only(300), [0], 32)
    assert kept == {"tokenizer.none.json": ids_only(300).data}


# --- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_config, store):
    """A trained run whose model has a padded vocabulary."""
    workdir = tmp_path_factory.mktemp("run") / "tst"
    config = make_config(store)
    config.model.vocab_size = 64
    train(config, workdir)
    return workdir


def test_exported_run(tmp_path, run, store, capsys):
    """Checkpoint, export, import: the same bits; and what transformers wants lies beside them."""
    out = tmp_path / "new" / "out"
    export(run, out)
    model, _ = load_model(run)
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 64 and config["max_position_embeddings"] == 8
    assert config["bos_token_id"] == config["eos_token_id"] == 0
    cfg = model_config(config)
    read = read_params(out, cfg)
    for name, array in named_leaves(model).items():
        np.testing.assert_array_equal(bits(read(name)), bits(array), name)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 0}
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("w7").ids == [0, 7]
    assert tokenizer.get_vocab() == open_store(store).vocabulary().tokens()
    size = sum(array.nbytes for array in named_leaves(model).values())
    assert f"{size:,} of {size:,} bytes" in capsys.readouterr().out
    with pytest.raises(UserError, match="no empty folder"):
        export(run, out)


def test_reader_is_as_strict_as_restore(run):
    with Checkpoints(run / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.steps()[-1]
        cfg = ModelConfig(**{**SMALL, "kv_heads": 1, "vocab_size": 64, "ff": 25})
        shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
        with pytest.raises(CheckpointError, match="params.layers.up"):
            checkpoints.reader(step, shapes, prefix="params")


def test_superposition_needs_force(tmp_path, run, capsys):
    """Rule 19: no export of what is no next-token model yet, unless it is asked for."""
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "20")  # now the last one is of the switch
    with pytest.raises(UserError, match="superposition phase.*--force") as error:
        export(tmp_path / "run", tmp_path / "out")
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()
    export(tmp_path / "run", tmp_path / "out", force=True)
    assert "step 8 lies in the superposition phase" in capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_what_cannot_be_exported(tmp_path, run, store):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="--dtype is 'float16'"):
        export(run, out, dtype="float16")
    with pytest.raises(UserError, match="config.json does not exist"):
        export(tmp_path, out)

    settings = json.loads((run / "config.json").read_text())
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="no checkpoint yet"):
        export(tmp_path, out)
    settings["model"]["attention"] = "linear"
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="model.attention is 'linear'"):
        export(tmp_path, out)

    other = write_store(
        tmp_path / "store",
        vocabulary=ids_only(61),
        train=[([1, 2, 3], 9)],
        heldout=[([4, 5], 6)],
        separator_id=0,
        provenance={},
    )
    with pytest.raises(UserError, match="another vocabulary than this run"):
        export(run, out, store=other.path)
    assert not out.exists()


def test_command(tmp_path, run):
    """The command writes the folder; a mistake is one line and status 2."""
    command = [sys.executable, "-m", "tst_jax.export", f"--workdir={run}"]
    root = pathlib.Path(__file__).parent.parent
    failed = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert failed.returncode == 2 and failed.stderr == "error: --out is missing; give a folder\n"
    command += [f"--out={tmp_path / 'out'}", "--dtype=bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
