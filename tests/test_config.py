"""Proves `tst_jax.config`: each wrong setting has its own line, before a run.

A table of settings that cannot work and of the words that name them; all problems come at once; two
configs that differ in harmless fields only train the same parameters. What the commands make of a
mistake is in test_mistakes.py.
"""

import dataclasses
import json

import numpy as np
import pytest

from tst_jax import config as config_lib
from tst_jax import schedule
from tst_jax.config import Config, ConfigError, ScheduleConfig

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
    (dict(seed=2**32), ["seed is 4294967296", "0 .. 4294967295"]),
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
    (dict(optimizer__name="adamv"), ["optimizer", "'adamv'", "did you mean adam?"]),
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
    (dict(mesh__fsdp=-1), ["mesh.data and mesh.fsdp are -1", "only one"]),
    (dict(eval__every=-1), ["eval.every is -1"]),
    (dict(eval__tokens=-1), ["eval.tokens is -1"]),
    (dict(eval__rows=0), ["eval.rows is 0"]),
    (dict(checkpoint__every=-1), ["checkpoint.every is -1"]),
    (dict(checkpoint__keep=0), ["checkpoint.keep is 0"]),
    (dict(checkpoint__keep_every=5), ["checkpoint.keep_every is 5", "checkpoint.every 0"]),
    (dict(checkpoint__every=4, checkpoint__keep_every=6), ["keep_every is 6", "multiple of every"]),
    (dict(tst__ratio=0.01), ["tst.ratio is 0.01", "less than half a step", "tst.ratio=0"]),
    (dict(tst__stages="8:0.01,4:0.01"), ["tst.stages is '8:0.01,4:0.01'", "less than half a step"]),
    (dict(tst__ratio=0.0, tst__superposition_steps=5), ["tst.ratio is 0", "superposition_steps 5"]),
    (dict(tst__ratio=0.0, tst__stages="8"), ["tst.stages is '8'"]),
    (dict(tst__auxiliary=0.5), ["tst.auxiliary is 0.5", "tst.mode 'full'", "mode=output"]),
    (dict(tst__auxiliary=NAN, tst__mode="output"), ["tst.auxiliary is nan"]),
    (dict(tst__random_offset=True, tst__mode="output"), ["tst.random_offset", "every token"]),
    (
        dict(tst__random_offset=True, data__packing="document"),
        ["tst.random_offset is set", "data.packing 'document'"],
    ),
    (dict(tst__bag_size=65_537), ["tst.bag_size is 65537", "1 .. 65536"]),
    (dict(data__prefetch=1001), ["data.prefetch is 1001", "0 .. 1000"]),
    (dict(data__weights="1e999999999"), ["data.weights is '1e999999999'", "0.29,0.71"]),
    (dict(data__rows_from="5:8000000000", data__rows=8), ["data.rows_from", "2147483647"]),
    (dict(hosts__heartbeat_seconds=86_401), ["hosts.heartbeat_seconds is 86401", "1 .. 86400"]),
    (dict(model__max_positions=8), ["model.max_positions is 8", "positions=rope", "0"]),
    (dict(model__positions="learned"), ["model.max_positions is 0", "data.positions"]),
    (dict(model__rope_theta=1e-45), ["model.rope_theta is 1e-45", "above 0"]),
    (dict(model__experts=2), ["model.experts is 2", "experts_per_token 0"]),
    (
        dict(model__attention="linear", model__attention_backend="cudnn"),
        ["model.attention_backend is 'cudnn'", "model.attention=linear", "auto"],
    ),
    (dict(optimizer__name="lbfgs"), ["optimizer.name is 'lbfgs'", "gradients alone", "adamw"]),
    (
        dict(
            optimizer__name="dpsgd",
            optimizer__options="l2_norm_clip=1.0,noise_multiplier=1.0,seed=0",
        ),
        ["optimizer.name is 'dpsgd'", "seed=0", "batch dimension"],
    ),
    (dict(optimizer__options="eps='x'"), ["optimizer.name is 'adamw'", "eps='x'"]),
    (dict(optimizer__options="eps=1e999"), ["optimizer.options is 'eps=1e999'"]),
    (dict(data__store="a\0b"), ["data.store is 'a\\x00b'", "printed"]),
    (dict(init_from="a\nb"), ["init_from is 'a\\nb'", "printed"]),
    (dict(steps=np.int64(20)), ["steps is", "(numpy.int64)", "type int"]),
    (dict(tst__ratio=np.float32(0.5)), ["tst.ratio is", "(numpy.float32)", "type float"]),
    (dict(seed=True), ["seed is True (bool)", "type int"]),
    (dict(tst={"ratio": 0.3}), ["tst is {'ratio': 0.3} (dict)", "must be a TSTConfig"]),
    (dict(mesh=ScheduleConfig()), ["mesh is", "tst_jax.schedule.ScheduleConfig", "a MeshConfig"]),
    (dict(model=None), ["model is None (NoneType)", "must be a ModelConfig"]),
    # A replaced value is nothing to complain about: by default the run has 1000 steps.
    (dict(steps="20", stop_after=2000), ["steps is '20'"]),
    (dict(steps=20.0, schedule__warmup_steps=999), ["steps is 20.0 (float)"]),
    (dict(tst__bag_size="3", data__positions=9, tst__expand="batch"), ["tst.bag_size is '3'"]),
    (dict(data__rows="8", micro_batches=3), ["data.rows is '8'"]),
]

# Of each choice something near to it.
CHOICES = {
    "kernels": {"Pallas": "pallas"},
    "model.norm": {"layernorm": "layer"},
    "model.positions": {"ropes": "rope"},
    "model.mlp": {"swi-glu": "swiglu"},
    "model.attention": {"linar": "linear"},
    "model.attention_backend": {"cuDNN": "cudnn"},
    "model.dtype": {"float23": "float32"},
    "model.remat": {"dot": "dots"},
    "tst.mode": {"inputs": "input"},
    "tst.objective": {"hing": "hinge"},
    "tst.weights": {"exp_onential": "exponential"},
    "tst.expand": {"lenght": "length"},
    "data.packing": {"concatenate": "concat"},
    "data.verify": {"share": "shared"},
    "optimizer.name": {"adammw": "adamw"},
}


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
        dict(tst__auxiliary=0.5, tst__mode="output", tst__random_offset=False),
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


def put(config, name, value):
    """`put(config, "tst.ratio", 0.5)`."""
    return change(config, **{name.replace(".", "__"): value})


@pytest.mark.parametrize("name", CHOICES)
def test_a_mistyped_choice_gets_a_near_one(config, name):
    ((wrong, right),) = CHOICES[name].items()
    (problem,) = config_lib.problems(put(config, name, wrong))
    assert problem.startswith(f"{name} is {wrong!r}") and f"did you mean {right}?" in problem


def test_no_number_is_too_odd_to_be_named(make_config, store):
    """NaN and infinity for each float, numbers that no array could have for each integer."""
    for name, value in config_lib.flatten(Config()).items():
        odd = {float: [NAN, INF, -INF, 10**400], int: [2**40, -(2**40), 10**5000]}
        for wrong in odd.get(type(value), []):
            found = config_lib.problems(put(make_config(store), name, wrong))
            # A second line may be about what does not go together with it.
            assert found and all(name.rpartition(".")[2] in line for line in found), (name, found)
            assert any(line.startswith(f"{name} ") for line in found), (name, found)
            assert all("\n" not in line and len(line) < 300 for line in found)


def test_an_attribute_that_is_no_setting_is_named(config):
    config.tst.ration = 0.3
    config.optimiser = "adam"
    config.bag_size = 4
    config.model.frobnicate = [1]
    assert config_lib.problems(config) == [
        "optimiser is no setting (it was set to 'adam'); did you mean optimizer?",
        "bag_size is no setting (it was set to 4); did you mean tst.bag_size?",
        "model.frobnicate is no setting (it was set to [1]); tst_jax.settings lists all",
        "tst.ration is no setting (it was set to 0.3); did you mean tst.ratio?",
    ]


@pytest.mark.parametrize("thing", [None, {}, ScheduleConfig()])
def test_what_is_no_config_is_refused(thing):
    (problem,) = config_lib.problems(thing)
    assert type(thing).__name__ in problem and "tst_jax.config.Config" in problem


def test_one_problem_hides_no_other(config):
    """Wrong types, wrong classes, stages and what stands apart from them, all in one answer."""
    change(config, seed="0", eval=None, tst__stages="8:0.1,3:0.1", mesh__data=0, model__heads=0)
    config.data.stor = "x"
    found = config_lib.problems(config)
    for words in ("seed is '0'", "eval is None", "8 to 3", "mesh.data is 0", "model.heads is 0"):
        assert sum(words in line for line in found) == 1, (words, found)
    assert sum("data.stor is no setting" in line for line in found) == 1 and len(found) == 6


def test_checking_changes_nothing(config):
    config.tst, config.steps = None, "20"
    before = repr(config)
    assert len(config_lib.problems(config)) == 2
    assert repr(config) == before


def test_fractions_that_fill_the_run_fill_it_at_any_length():
    """Rounding up both would make a schedule of 4 steps in a run of 3."""
    for steps in range(1, 60):
        for warmup in (0.0, 0.1, 0.25, 0.5, 0.9):
            cfg = ScheduleConfig(warmup_fraction=warmup, decay_fraction=1 - warmup)
            assert cfg.problems(steps) == []
            first, last = schedule.warmup_and_decay(cfg, steps)
            assert first + last <= steps and abs(last - (1 - warmup) * steps) <= 1
    assert ScheduleConfig(warmup_fraction=0.6, decay_fraction=0.5).problems(20)


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
    harmless |= {"debug_nans", "profile", "numbers.nonfinite", "numbers.skips", "numbers.spike"}
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
