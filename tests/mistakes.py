"""What a user does wrong, and what one line of the answer must say: the table of test_mistakes.py.

Commands run in a folder that `make_folder` makes: a config file, a store, and what goes wrong of
each.
"""

import dataclasses
import json
import pathlib
import shutil

import numpy as np
from tokenizers import Tokenizer, models

from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import Vocabulary

ROOT = pathlib.Path(__file__).resolve().parents[1]
HEAD = "from tst_jax.config import *\n"
GOOD = """from tst_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig
from tst_jax.models.shapes import ModelConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig


def get_config():
    return Config(
        steps=20,
        model=ModelConfig(vocab_size=61, width=8, layers=1, heads=1, kv_heads=1, head_dim=8, ff=8),
        tst=TSTConfig(bag_size=3, ratio=0.4),
        data=DataConfig(store="store", rows=4, positions=8),
        schedule=ScheduleConfig(peak_lr=1e-2, warmup_fraction=0.1, decay_fraction=0.2),
        eval=EvalConfig(every=0, tokens=64, rows=4),
        checkpoint=CheckpointConfig(every=0),
    )
"""
ONE_STEP = ("--config.steps=1", "--config.tst.ratio=0")  # of the run in the folder `run`


def make_folder(folder: pathlib.Path) -> None:
    """All that the commands are given, right and wrong; the run in `run` is left to a command."""
    for name, entries in (("store", 61), ("other", 71)):
        _make_store(folder / name, entries)
    for name in ("cut", "flipped", "bare", "garbled", "edited"):
        shutil.copytree(folder / "store", folder / name)
    for name in ("cut", "flipped"):
        shard = folder / name / "train-00000.tokens.bin"
        data = bytearray(shard.read_bytes())
        data[100] ^= 1
        shard.write_bytes(data[:-8] if name == "cut" else data)
    (folder / "bare/manifest.json").unlink()
    (folder / "garbled/manifest.json").write_text("{")
    manifest = folder / "edited/manifest.json"
    manifest.write_text(manifest.read_text().replace('"vocab_size": 61', '"vocab_size": 60'))
    for name in ("empty", "full", "hf_other", "bad"):  # beside no module that `-m` could find
        (folder / name).mkdir()
    (folder / "full/notes.txt").write_text("mine\n")
    (folder / "file.txt").write_text("a file\n")
    llama = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 8,
    }  # fmt: skip
    (folder / "hf_other/config.json").write_text(json.dumps(llama))
    (folder / "good.py").write_text(GOOD)
    bodies = {
        "syntax": "def get_config():\n    return Config(\n",
        "keyword": "def get_config():\n    return Config(tst=TSTConfig(ration=1))\n",
        "package": "import no_such_package\n",
        "name": "from tst_jax.config import Confg\n",
        "nothing": "steps = 3\n",
        "none": "def get_config():\n    Config()\n",
        "dict": "def get_config():\n    return {'steps': 3}\n",
        "raises": "def get_config():\n    return open('gone.txt')\n",
    }
    for name, body in bodies.items():
        (folder / f"bad/{name}.py").write_text(HEAD + body)
    changes = {
        "attribute": "c.tst.ration = 0.3",
        "module": "import math; c.math = math",
        "part": "c.tst = {'ratio': 0.3}",
        "numpy": "import numpy; c.tst.bag_size = numpy.arange(5)[3]",
        "several": "c.tst.ration = 0.3; c.steps = '20'; c.model.heads = 0; c.eval = None",
    }
    for name, change in changes.items():
        body = (
            GOOD + f"\n\nmake = get_config\n\n\ndef get_config():\n    c = make()\n    {change}\n"
        )
        (folder / f"bad/{name}.py").write_text(body + "    return c\n")


def _make_store(path, entries):
    rng = np.random.default_rng(0)
    words = models.WordLevel({f"w{i}": i for i in range(entries)}, unk_token="w1")

    def documents(count):
        for _ in range(count):
            yield rng.integers(1, entries, 100), 100

    write_store(
        path,
        vocabulary=Vocabulary("tokenizers", Tokenizer(words).to_str().encode()),
        train=documents(12),
        heldout=documents(3),
        separator_id=0,
        provenance={"made": "by a test"},
    )


@dataclasses.dataclass
class Mistake:
    """A command that cannot work.

    Args:
      arguments: of the command.
      lines: words of each line of the answer.
      module: of tst_jax.
      env: what it finds in the environment.
    """

    arguments: tuple[str, ...]
    lines: list[list[str]]
    module: str = "train"
    env: dict = dataclasses.field(default_factory=dict)


def _train(more: str, *words: str, env=None, workdir="new", config="good.py") -> Mistake:
    """Of `train` with more arguments, answered with one line."""
    arguments = (f"--config={config}", f"--workdir={workdir}", *more.split())
    return Mistake(arguments, [list(words)], env=env or {})


def _set(more: str, *words: str) -> Mistake:
    """Of settings: NAME=VALUE with spaces between."""
    return _train(" ".join(f"--config.{setting}" for setting in more.split()), *words)


def _file(name: str, *words: str) -> Mistake:
    return _train("", name, *words, config=name)


def _other(module: str, arguments: str, *words: str) -> Mistake:
    return Mistake(tuple(arguments.split()), [list(words)], module)


CONFIG = "--config=good.py"
TABLE = {
    # ---- the command line
    "mistyped setting": _set("tst.ration=0.2", "--config.tst.ration", "mean --config.tst.ratio?"),
    "setting without its group": _set("bag_size=4", "mean --config.tst.bag_size?"),
    "setting that is like none": _set("zzz=4", "--config.zzz", "tst_jax.settings lists all"),
    "mistyped option": _train("--workdri=a", "unknown option --workdri", "mean --workdir?"),
    "setting as an option": _train("--steps=9", "unknown option --steps", "mean --config.steps?"),
    "no dashes": _train("steps=3", "unexpected argument 'steps=3'", "--name=value"),
    "word for a number": _set("steps=abc", "--config.steps is 'abc'", "whole number"),
    "exponent for a whole number": _set("steps=1e3", "--config.steps is '1e3'", "whole number"),
    "fraction for a whole number": _set("tst.bag_size=2.5", "tst.bag_size is '2.5'", "whole"),
    "nothing for a number": _set("steps=", "--config.steps is empty", "whole number"),
    "word for a fraction": _set("tst.ratio=half", "--config.tst.ratio is 'half'", "a number"),
    "word for a switch": _set("model.tied=maybe", "model.tied is 'maybe'", "true or false"),
    "whole group set": _set("tst=4", "--config.tst is a group", "--config.tst.bag_size="),
    "group without a value": _set("data", "--config.data is a group", "--config.data.store="),
    "setting without a value": _set("steps", "--config.steps has no value"),
    "setting given twice": _set("steps=5 steps=6", "steps is given twice", "5 and as 6"),
    "several at once": Mistake(
        (CONFIG, "--workdri=w", "--config.tst.ration=1", "--config.steps=x", "--config.seed=-1"),
        [["--workdri"], ["--config.tst.ration"], ["--config.steps is 'x'"], ["seed is -1"]],
    ),
    "no config": Mistake(("--workdir=new",), [["--config is missing", "quickstart.py"]]),
    "no workdir": Mistake((CONFIG,), [["--workdir is missing"]]),
    "empty config": _train("", "--config is empty", config=""),
    # ---- config files
    "no such file": _file("goood.py", "does not exist", "did you mean good.py?"),
    "folder as a config": _file("empty", "is a folder"),
    "text as a config": _file("file.txt", "no .py file"),
    "unknown arm": _train("", "'tts'", ":baseline", config=f"{ROOT}/configs/dense_270m.py:tts"),
    "arm that it does not take": _file("good.py:baseline", "takes no NAME"),
    "file with a syntax error": _file("bad/syntax.py", "line 3", "SyntaxError", "never closed"),
    "file with an unknown field": _file(
        "bad/keyword.py", "line 3", "'ration'", "did you mean ratio?"
    ),
    "file that needs a package": _file("bad/package.py", "line 2", "no_such_package"),
    "file with a wrong import": _file("bad/name.py", "line 2", "'Confg'", "did you mean Config?"),
    "file without get_config": _file("bad/nothing.py", "has no function get_config()"),
    "file that returns nothing": _file("bad/none.py", "returned None", "return"),
    "file that returns a dict": _file("bad/dict.py", "returned dict", "tst_jax.config.Config"),
    "file that raises": _file("bad/raises.py", "line 3", "FileNotFoundError", "gone.txt"),
    "attribute that is no setting": _train(
        "", "tst.ration is no setting", "0.3", "did you mean tst.ratio?", config="bad/attribute.py"
    ),
    "module as an attribute": _train(
        "--config.seed=1", "math is no setting", "<module 'math'", config="bad/module.py"
    ),
    "dict for a group": _train(
        "", "tst is {'ratio': 0.3} (dict)", "TSTConfig", config="bad/part.py"
    ),
    "number of NumPy": _train("", "tst.bag_size", "numpy.int64", "type int", config="bad/numpy.py"),
    "wrong types among others": Mistake(
        ("--config=bad/several.py", "--workdir=new"),
        [["steps is '20' (str)"], ["tst.ration", "ratio?"], ["eval is None"], ["heads is 0"]],
    ),
    # ---- settings out of their range
    "no steps": _set("steps=0", "steps is 0", "at least 1"),
    "negative seed": _set("seed=-1", "seed is -1", "0 .. 4294967295"),
    "huge number": _set("loss_chunk=9999999999", "loss_chunk is 9999999999", "at most 2147483647"),
    "ratio as a percentage": _set("tst.ratio=30", "tst.ratio is 30.0", "0 .. 1"),
    "ratio that is no number": _set("tst.ratio=nan", "tst.ratio is nan", "0 .. 1"),
    "ratio below one step": _set("tst.ratio=0.01", "tst.ratio is 0.01", "less than half a step"),
    "no bag": _set("tst.bag_size=0", "tst.bag_size is 0", "1 .. 65536"),
    "mistyped mode": _set("tst.mode=ful", "tst.mode is 'ful'", "input", "did you mean full?"),
    "unknown objective": _set("tst.objective=mse", "tst.objective is 'mse'", "mce, mass"),
    "mistyped weights": _set("tst.weights=Uniform", "'Uniform'", "did you mean uniform?"),
    "unknown dtype": _set("model.dtype=fp16", "model.dtype is 'fp16'", "float32, bfloat16"),
    "unknown remat": _set("model.remat=all", "model.remat is 'all'", "none, dots, full"),
    "negative learning rate": _set("schedule.peak_lr=-1", "schedule.peak_lr is -1.0", "above 0"),
    "warmup as a percentage": _set("schedule.warmup_fraction=5", "fraction is 5.0", "0 .. 1"),
    "mistyped optimizer": _set("optimizer.name=adamv", "'adamv'", "did you mean adam"),
    "option that it does not take": _set("optimizer.options=epss=1", "epss", "did you mean eps?"),
    "optimizer with a line search": _set("optimizer.name=lbfgs", "'lbfgs'", "try adamw"),
    "optimizer's beta of 1": _set("optimizer.b1=1", "optimizer.b1 is 1.0", "below 1"),
    "width of nothing": _set("model.width=0", "model.width is 0", "at least 1"),
    "odd head size": _set("model.head_dim=7", "model.head_dim is 7", "even"),
    "unknown packing": _set("data.packing=documents", "'documents'", "did you mean document?"),
    "stages without fractions": _set("tst.stages=8", "tst.stages is '8'", "16:0.1,4:0.2"),
    "batch sizes of no form": _set("data.rows_from=5", "data.rows_from is '5'", "1000:32"),
    "batch size after the end": _set("data.rows_from=20:8", "must rise between 0 and 20"),
    "no heartbeat": _set("hosts.heartbeat_seconds=0", "hosts.heartbeat_seconds is 0", "86400"),
    "policy that there is not": _set("numbers.nonfinite=ignore", "'ignore'", "stop, skip"),
    # ---- settings that do not go together
    "stages that do not divide": _set("tst.stages=8:0.1,3:0.1", "bag size 8 to 3", "divisor"),
    "stages and a step count": _set("tst.stages=8:0.1 tst.superposition_steps=5", "both set"),
    "superposition beyond the end": _set("tst.superposition_steps=21", "21 of 20"),
    "baseline that is superposed": _set("tst.ratio=0 tst.superposition_steps=5", "tst.ratio is 0"),
    "rows that no bag divides": _set("tst.expand=batch", "tst.expand='batch'", "data.positions"),
    "stop after the end": _set("stop_after=21", "stop_after is 21", "1 .. 20"),
    "warmup longer than the run": _set("schedule.warmup_steps=19", "warmup and decay", "20 steps"),
    "heads that share unevenly": _set("model.heads=3 model.kv_heads=2", "heads is 3", "kv_heads 2"),
    "experts that are too few": _set("model.experts=2 model.experts_per_token=3", "1 .. experts"),
    "table for RoPE": _set("model.max_positions=8", "model.max_positions is 8", "set it to 0"),
    "table that is too short": _set(
        "model.positions=learned model.max_positions=4", "data.positions is 8", "max_positions 4"
    ),
    "parts that do not divide": _set("micro_batches=3", "4 rows", "micro_batches 3"),
    "two axes that take the rest": _set("mesh.fsdp=-1", "mesh.data and mesh.fsdp are -1"),
    "kept but never saved": _set("checkpoint.keep_every=5", "keep_every is 5", "every 0"),
    "weights without a mixture": _set("data.weights=0.5,0.5", "data.store names 1"),
    "weight that is no number": _set("data.store=a,b data.weights=1,half", "'half'", "0.29,0.71"),
    # ---- the machine
    "mesh that is too large": _set("mesh.data=3", "1 devices do not fill", "data=3"),
    "Pallas on a CPU": _set("kernels=pallas", "kernels=pallas", "kernels=auto"),
    "cuDNN on a CPU": _set("model.attention_backend=cudnn", "attention_backend=cudnn", "GPUs"),
    "splash on a CPU": _set("model.attention_backend=splash", "attention_backend=splash", "TPUs"),
    "mesh, kernels and attention": Mistake(
        (
            CONFIG,
            "--workdir=new",
            "--config.mesh.data=3",
            "--config.kernels=pallas",
            "--config.model.attention_backend=cudnn",
        ),
        [["do not fill"], ["kernels=pallas"], ["attention_backend=cudnn"]],
    ),  # fmt: skip
    "copies without --distributed": _train(
        "", "JAX_NUM_PROCESSES is 2", "--distributed", env={"JAX_NUM_PROCESSES": "2"}
    ),
    "--distributed by itself": _train("--distributed", "JAX_COORDINATOR_ADDRESS"),
    "platform that is not there": _train("", "backend", "nope", env={"JAX_PLATFORMS": "nope"}),
    # ---- the data
    "store that is not there": _set("data.store=stor", "no such folder", "tst_jax.prepare"),
    "no store": _set("data.store=", "data.store is ''", "tst_jax.prepare"),
    "folder that is no store": _set("data.store=full", "full/manifest.json", "not a store"),
    "store without its manifest": _set("data.store=bare", "bare/manifest.json", "missing"),
    "manifest that is not JSON": _set("data.store=garbled", "garbled/manifest.json", "not JSON"),
    "manifest that was edited": _set("data.store=edited", "edited/manifest.json", "changed"),
    "shard that is cut": _set("data.store=cut", "cut/train", "bytes", "prepare it again"),
    "shard that was changed": _set("data.store=flipped", "flipped/train", "sha256"),
    "store of another vocabulary": _set("data.store=other", "vocab_size is 61", "71"),
    "vocabulary of another store": _set("model.vocab_size=60", "vocab_size is 60", "=61"),
    "mixture of two vocabularies": _set("data.store=store,other data.weights=1,1", "one tokenizer"),
    "rows longer than the data": _set("data.positions=5000", "train split", "data.positions"),
    "evaluation larger than its data": _set("eval.rows=400", "heldout split", "eval.rows"),
    "more epochs than allowed": _set("data.max_epochs=0.5", "data.max_epochs is 0.5", "prepare"),
    "model that is not there": _set("init_from=gone", "gone does not exist", "Hugging Face"),
    "model of another shape": _set("init_from=hf_other", "hf_other", "model.width"),
    # ---- the folder of the run
    "workdir that is a file": _train("", "file.txt", workdir="file.txt"),
    "workdir inside a file": _train("", "file.txt", workdir="file.txt/new"),
    "workdir of something else": _train("", "full", "not empty", workdir="full"),
    "other settings than before": Mistake(
        (CONFIG, "--workdir=run", *ONE_STEP, "--config.seed=7", "--config.schedule.peak_lr=1"),
        [["run", "other settings"], ["seed: 0 -> 7"], ["schedule.peak_lr: 0.01 -> 1.0"]],
    ),
    # ---- other commands
    "prepare from nothing": _other("prepare", "--out=new --source=stdlb", "--source", "stdlib"),
    "prepare without its files": _other("prepare", "--out=new --source=text", "--files"),
    "prepare of no files": _other("prepare", "--out=new --source=text --files=x/*", "x/*"),
    "prepare over a folder": _other("prepare", "--out=full --source=stdlib", "full"),
    "prepare that holds out all": _other(
        "prepare", "--out=new --source=stdlib --heldout_fraction=5", "heldout_fraction=5"
    ),
    "report of no store": _other("data_report", "--store=gone", "gone", "no such folder"),
    "report of no pairs": _other("data_report", "--store=store --pairs=0", "--pairs=0"),
    "plan into no folder": _other("plan", f"{CONFIG} --json=gone/a.json", "--json", "gone/a.json"),
    "plan for no accelerator": _other(
        "plan", f"{CONFIG} --accelerator=b20 --json=a.json", "is 'b20'", "did you mean b200?"
    ),
    "plan at an MFU in percent": _other(
        "plan", f"{CONFIG} --accelerator=v5p --mfu=40", "--mfu is 40.0", "above 0, up to 1"
    ),
    "plan with no count of tokens": _other(
        "plan", f"{CONFIG} --corpus_tokens=80G", "--corpus_tokens is '80G'", "80B or 1.5T"
    ),
    "comparison of no seeds": _other(
        "compare", f"{CONFIG} --workdir=new --seeds=0", "--seeds is 0"
    ),
    "comparison with itself": _other(
        "compare", f"{CONFIG} --workdir=new --config.tst.ratio=0", "no step is superposed"
    ),
    "text of no run": _other("generate", "--workdir=full", "config.json does not exist"),
    "text of negative warmth": _other(
        "generate", "--workdir=run --temperature=-1", "--temperature"
    ),
    "text of no workdir": _other("generate", "--prompt=a", "--workdir is missing"),
    "evaluation of nothing": _other("evaluate", "--workdir=run", "--tasks", "--heldout"),
    "evaluation in batches of nothing": _other(
        "evaluate", "--workdir=run --heldout=store --batch_positions=0", "batch_positions is 0"
    ),
    "held-out loss of another vocabulary": _other(
        "evaluate", "--workdir=run --heldout=store,other", "other", "vocabulary sha256"
    ),
    "export to nowhere": _other("export", "--workdir=run", "--out is missing"),
    "export of no run": _other("export", "--workdir=full --out=new", "config.json does not exist"),
    "export of a rare dtype": _other("export", "--workdir=run --out=new --dtype=int8", "'int8'"),
    "fit without a slice": _other("aot", CONFIG, "--topology is missing", "v5p"),
}
