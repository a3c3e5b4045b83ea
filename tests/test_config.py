"""Proves `tst_jax.config` and `tst_jax.cli`: each wrong setting has its own line, before a run.

A table of settings that cannot work and of the words that name them; all problems come at once; two
configs that differ in harmless fields only train the same parameters; and the commands answer a
mistake with status 2, one line and nothing written.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tst_jax import config as config_lib
from tst_jax.config import ConfigError

NAN, INF = float("nan"), float("inf")


def change(config, **changes):
    """`tst__ratio=0.5` sets config.tst.ratio."""
    for name, value in changes.items():
        *path, last = name.split("__")
        part = config
        for field in path:
            part = getattr(part, field)
        assert hasattr(part, last)
        setattr(part, last, value)
    return config


# Settings, and what the one line about them says.
WRONG = [
    (dict(seed=-1), ["seed is -1"]),
    (dict(seed=2**32), ["seed is 4294967296", "below 2**32"]),
    (dict(steps=0), ["steps is 0", "at least 1"]),
    (dict(stop_after=-2), ["stop_after is -2"]),
    (dict(stop_after=0), ["stop_after is 0"]),
    (dict(stop_after=21), ["stop_after is 21", "1 .. 20 (steps)"]),
    (dict(steps="20"), ["steps is '20'", "type int"]),
    (dict(model__tied=1), ["model.tied is 1", "type bool"]),
    (dict(data__store=None), ["data.store is None", "type str"]),
    (dict(tst__stages="4:0.2", tst__superposition_steps=5), ["tst.stages", "both set"]),
    (dict(tst__stages="8:inf"), ["tst.stages", "0 .. 1"]),
    (dict(tst__stages="8:nan"), ["tst.stages", "0 .. 1"]),
    (dict(optimizer__options="learning_rate=1.0"), ["optimizer.options"]),
    (dict(optimizer__options="a=1)(b1=0.5"), ["optimizer.options"]),
    (dict(optimizer__options="**{'b1': 1}"), ["optimizer.options"]),
    (dict(log_every=0), ["log_every is 0"]),
    (dict(loss_chunk=0), ["loss_chunk is 0"]),
    (dict(model__vocab_size=0), ["model.vocab_size is 0"]),
    (dict(model__width=-8), ["model.width is -8"]),
    (dict(model__layers=0), ["model.layers is 0"]),
    (dict(model__heads=0), ["model.heads is 0"]),
    (dict(model__kv_heads=0), ["model.kv_heads is 0"]),
    (dict(model__heads=3, model__kv_heads=2), ["model.heads is 3", "model.kv_heads 2"]),
    (dict(model__head_dim=7), ["model.head_dim is 7", "even"]),
    (dict(model__ff=0), ["model.ff is 0"]),
    (dict(model__dtype="float16"), ["model.dtype is 'float16'", "bfloat16"]),
    (dict(model__remat="all"), ["model.remat is 'all'", "none, dots, full"]),
    (dict(model__rope_theta=0.0), ["model.rope_theta"]),
    (dict(model__norm_eps=NAN), ["model.norm_eps"]),
    (dict(tst__bag_size=0), ["tst.bag_size is 0"]),
    (dict(tst__ratio=1.1), ["tst.ratio is 1.1", "0 .. 1"]),
    (dict(tst__ratio=NAN), ["tst.ratio is nan"]),
    (dict(tst__superposition_steps=-2), ["tst.superposition_steps is -2"]),
    (dict(tst__superposition_steps=21), ["tst.superposition_steps", "21 of 20"]),
    (dict(tst__stages="8"), ["tst.stages is '8'"]),
    (dict(tst__stages="8:0.1,3:0.1"), ["tst.stages", "8 to 3"]),
    (dict(tst__stages="8:0.9,4:0.9"), ["tst.stages", "36 of 20"]),
    (dict(tst__mode="half"), ["tst.mode is 'half'", "full, input, output"]),
    (dict(tst__objective="mse"), ["tst.objective is 'mse'", "mce, mass, bce, hinge"]),
    (dict(tst__weights="even"), ["tst.weights is 'even'", "uniform"]),
    (dict(tst__expand="width"), ["tst.expand is 'width'", "length, batch"]),
    (dict(tst__expand="batch"), ["tst.expand='batch'", "data.positions"]),  # 8 positions into 3
    (dict(data__store=""), ["data.store is ''", "tst_jax.prepare"]),
    (dict(data__store="a,,b", data__weights="1,1,1"), ["data.store is 'a,,b'"]),
    (dict(data__store="a,b"), ["data.store names 2", "data.weights 1"]),
    (dict(data__weights="0.5,0.5"), ["data.store names 1", "data.weights 2"]),
    (dict(data__store="a,b", data__weights="0.5,half"), ["data.weights", "half", "0.29,0.71"]),
    (dict(data__store="a,b", data__weights="0,1"), ["data.weights", "above 0"]),
    (dict(data__store="a,b", data__weights="0.1234567,0.8765433"), ["data.weights", "round"]),
    (dict(data__max_epochs=-1.0), ["data.max_epochs is -1.0"]),
    (dict(data__packing="pack"), ["data.packing is 'pack'", "concat, document"]),
    (dict(data__verify="no"), ["data.verify is 'no'", "all, shared, sizes"]),
    (dict(data__prefetch=-1), ["data.prefetch is -1"]),
    (dict(data__rows_from="5"), ["data.rows_from is '5'", "1000:32"]),
    (dict(data__rows_from="5:8,5:4"), ["data.rows_from", "must rise between 0 and 20"]),
    (dict(data__rows_from="20:8"), ["data.rows_from", "must rise between 0 and 20"]),
    (dict(data__rows_from="5:0"), ["data.rows_from", "rows start at 1"]),
    (dict(data__rows_from="5:6", micro_batches=4), ["a step of", "6 rows", "micro_batches 4"]),
    (dict(tst__fitted="1,2"), ["tst.fitted is '1,2'", "C0,a,k"]),
    (dict(tst__fitted="-1,0.5,-1"), ["tst.fitted", "above 0"]),
    (dict(data__rows=0), ["data.rows is 0"]),
    (dict(data__positions=0), ["data.positions is 0"]),
    (dict(optimizer__name="adamv"), ["optimizer", "'adamv'", "adamw"]),
    (dict(optimizer__options="eps"), ["optimizer.options is 'eps'"]),
    (dict(optimizer__options="momentum=0.9"), ["optimizer", "adamw takes no momentum"]),
    (dict(optimizer__b1=1.0), ["optimizer.b1 is 1.0"]),
    (dict(optimizer__b2=-0.1), ["optimizer.b2 is -0.1"]),
    (dict(optimizer__weight_decay=-0.1), ["optimizer.weight_decay is -0.1"]),
    (dict(optimizer__clip=NAN), ["optimizer.clip is nan"]),
    (dict(schedule__peak_lr=0.0), ["schedule.peak_lr is 0.0"]),
    (dict(schedule__peak_lr=INF), ["schedule.peak_lr is inf"]),
    (dict(schedule__warmup_fraction=-0.1), ["schedule.warmup_fraction is -0.1"]),
    (dict(schedule__decay_fraction=1.5), ["schedule.decay_fraction is 1.5"]),
    (dict(schedule__warmup_steps=-2), ["schedule.warmup_steps is -2"]),
    (dict(schedule__warmup_steps=17), ["warmup and decay", "20 steps", "schedule.warmup_steps"]),
    (dict(mesh__data=0), ["mesh.data is 0"]),
    (dict(mesh__tensor=-2), ["mesh.tensor is -2"]),
    (dict(mesh__fsdp=-1), ["mesh", "more than one -1"]),
    (dict(eval__every=-1), ["eval.every is -1"]),
    (dict(eval__tokens=-1), ["eval.tokens is -1"]),
    (dict(eval__rows=0), ["eval.rows is 0"]),
    (dict(checkpoint__every=-1), ["checkpoint.every is -1"]),
    (dict(checkpoint__keep=0), ["checkpoint.keep is 0"]),
]


def test_settings_that_work_have_no_problem(config):
    assert config_lib.problems(config) == []
    for changes in [
        dict(tst__ratio=0.0),
        dict(tst__ratio=1.0),
        dict(tst__superposition_steps=20),
        dict(tst__stages="8:0.1,4:0.2", tst__superposition_steps=-1),
        dict(stop_after=20, seed=2**32 - 1),
        dict(schedule__warmup_steps=16),
        dict(optimizer__clip=0.0, optimizer__b1=0.0, optimizer__weight_decay=0.0),
        dict(eval__every=0, eval__tokens=0, checkpoint__every=0),
        dict(mesh__data=1, mesh__tensor=-1),
        dict(data__store="a, b", data__weights="0.29,0.71", data__rows_from="5:8,12:4"),
    ]:
        assert config_lib.problems(change(config, **changes)) == [], changes


@pytest.mark.parametrize("changes, words", WRONG, ids=str)
def test_a_wrong_setting_gives_its_own_line_and_no_other(config, changes, words):
    (problem,) = config_lib.problems(change(config, **changes))
    assert "\n" not in problem and all(word in problem for word in words), problem
    with pytest.raises(ConfigError) as caught:
        config_lib.validate(config)
    assert str(caught.value) == problem


def test_all_problems_come_at_once(config):
    parts = [dict(steps=0), dict(data__store=""), dict(model__heads=3, model__kv_heads=2)]
    parts += [dict(tst__ratio=1.1), dict(optimizer__b1=1.0), dict(mesh__data=0), dict(log_every=0)]
    for changes in parts:
        change(config, **changes)
    with pytest.raises(ConfigError) as caught:
        config_lib.validate(config)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(parts)
    for changes in parts:
        words = next(words for wrong, words in WRONG if wrong == changes)
        assert sum(all(word in line for word in words) for line in lines) == 1, changes


# ---- two configs


def test_flatten_names_each_field_once(config):
    flat = config_lib.flatten(config)
    assert flat["steps"] == 20 and flat["tst.ratio"] == 0.4 and flat["mesh.data"] == -1
    assert not any(dataclasses.is_dataclass(value) for value in flat.values())
    again = json.loads(json.dumps(dataclasses.asdict(config)))  # as in a run's folder
    assert config_lib.flatten(again) == flat and list(config_lib.flatten(again)) == list(flat)
    assert config_lib.flatten({"a": {"b": {"c": 1}}}) == {"a.b.c": 1}


def test_differences_leave_out_what_trains_the_same_parameters(config):
    harmless = {"stop_after", "log_every", "kernels", "model.attention_backend"}
    harmless |= {"micro_batches", "model.remat", "hosts.heartbeat_seconds"}
    harmless |= {"debug_nans", "numbers.nonfinite", "numbers.skips", "numbers.spike"}
    harmless |= {"checkpoint.keep_every"}
    harmless |= {"data.verify", "data.prefetch", "data.max_epochs"}
    harmless |= {"data.store", "mesh.data", "mesh.fsdp", "mesh.tensor", "mesh.expert"}
    harmless |= {"eval.every", "eval.tokens", "eval.rows", "checkpoint.every", "checkpoint.keep"}
    old = dataclasses.asdict(config)
    assert config_lib.differences(old, old, harmless=True) == []
    assert harmless < config_lib.flatten(old).keys()
    for field, value in config_lib.flatten(old).items():
        new = dataclasses.asdict(config)
        *part, last = field.split(".")
        (new[part[0]] if part else new)[last] = "new"
        line = f"{field}: {value} -> new"
        assert config_lib.differences(old, new) == ([] if field in harmless else [line])
        assert config_lib.differences(old, new, harmless=True) == [line]


def test_a_field_of_another_version_is_a_difference(config):
    old, new = dataclasses.asdict(config), dataclasses.asdict(config)
    del old["tst"]["expand"]
    new["model"].pop("tied")
    want = ["model.tied: False -> (absent)", "tst.expand: (absent) -> length"]
    assert sorted(config_lib.differences(old, new)) == want


# ---- the command line

GOOD = "from tst_jax.config import Config\ndef get_config():\n    return Config()\n"
FILES = {"good.py": GOOD, "other.py": "def get_config():\n    return {'steps': 3}\n"}
MISTAKES = {  # arguments, and what the line says
    "unknown field": (
        ["--config=good.py", "--workdir=w", "--config.tst.ration=0.2"],
        "unknown setting --config.tst.ration; did you mean --config.tst.ratio?",
    ),
    "wrong type": (["--config=good.py", "--workdir=w", "--config.steps=abc"], "--config.steps=abc"),
    "no dashes": (["--config=good.py", "--workdir=w", "steps=3"], "unexpected argument 'steps=3'"),
    "no config": (["--workdir=w"], "--config is missing"),
    "no such file": (["--config=gone.py", "--workdir=w"], "gone.py"),
    "no Config": (["--config=other.py", "--workdir=w"], "get_config() returned dict"),
    "no workdir": (["--config=good.py"], "--workdir is missing"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_with_status_2_one_line_and_nothing_written(tmp_path, name):
    arguments, words = MISTAKES[name]
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    root = str(pathlib.Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-B", "-m", "tst_jax.train", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and words in line and done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
