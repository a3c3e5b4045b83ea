"""Proves `tst_jax.plan` and the published runs in configs/: exact counts, nothing allocated.

Parameter counts and the tokens of the paper's Table 1 (arXiv 2605.06546); rule 2 for the positions,
rule 21 for the baselines; the page and the JSON that a user gets.
"""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from tst_jax import config, config_file, plan, plan_page, published
from tst_jax.config import ConfigError
from tst_jax.models import shapes
from tst_jax.models.shapes import ModelConfig
from tst_jax.models.transformer import Transformer
from tst_jax.plan import count_parameters
from tst_jax.sharding import AXES, param_shardings

ROOT = pathlib.Path(__file__).parents[1]
MILLION = 1024 * 1024  # positions a step are powers of two

# parameters, those active outside the tables, positions a step, steps of TST, tokens of TST, steps
# of the baseline, tokens of the baseline
DENSE = 2 * MILLION, 20_000, 104_857_600_000, 20_000, 41_943_040_000
RUNS = {
    "dense_270m": (267_225_408, 267_225_408 - 2 * 128_256 * 576, *DENSE),
    "dense_270m_gqa": (253_954_368, 253_954_368 - 2 * 128_256 * 576, *DENSE),
    "dense_600m": (600_208_320, 600_208_320 - 2 * 128_256 * 960, *DENSE),
    "dense_600m_gqa": (560_886_720, 560_886_720 - 2 * 128_256 * 960, *DENSE),
    "dense_3b": (3_337_766_912, 3_337_766_912 - 2 * 128_256 * 2048, *DENSE),
    "moe_10b_a1b": (
        *(10_489_144_832, 962_700_800, 8 * MILLION),
        *(49_983, 1_990_012_698_624, 125_000, 1_048_576_000_000),
    ),
    "gpt2_124m": (
        *(124_439_808, 124_439_808 - (50_257 + 1024) * 768, MILLION // 2),
        *(20_000, 26_214_400_000, 20_000, 10_485_760_000),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_counts_of_the_published_runs(name):
    parameters, active, positions, steps, tokens, baseline_steps, baseline_tokens = RUNS[name]
    tst = plan.plan(config_file.load_config(ROOT / f"configs/{name}.py"))
    assert tst["parameters"] == parameters
    assert tst["parameters_active_non_embedding"] == active
    assert tst["positions_per_step"] == positions
    assert (tst["steps"], tst["total_tokens"]) == (steps, tokens)
    assert tst["superposition_tokens"] + tst["recovery_tokens"] == tokens
    baseline = plan.plan(config_file.load_config(f"{ROOT}/configs/{name}.py:baseline"))
    assert (baseline["steps"], baseline["total_tokens"]) == (baseline_steps, baseline_tokens)
    assert baseline["superposition_tokens"] == 0
    same = ("parameters", "parameters_active_non_embedding", "positions_per_step")
    assert all(baseline[key] == tst[key] for key in same)
    # Equal positions are equal FLOPs, whatever the phase (rule 2).
    assert baseline["flops"] * steps == tst["flops"] * baseline_steps


def load(name, **changes):
    """A config of configs/ with settings changed: "tst.ratio" is written tst__ratio."""
    cfg = config_file.load_config(f"{ROOT}/configs/{name}")
    for setting, value in changes.items():
        part, _, field = setting.rpartition("__")
        setattr(getattr(cfg, part) if part else cfg, field, value)
    return cfg


def test_every_token_count_of_table_1():
    """All 12 rows, from the file that a row names; only the steps of some are overridden."""
    assert len(published.TABLE_1) == 12
    for row in published.TABLE_1:
        arm = ":baseline" if row.bag_size == 1 else ""
        figures = plan.plan(load(f"{row.model}.py{arm}", steps=row.steps))
        assert figures["total_tokens"] == row.total_tokens, row
        assert figures["superposition_tokens"] == row.superposition_tokens, row
        assert figures["superposition_steps"] == row.superposition_steps, row
        assert figures["recovery_tokens"] == row.total_tokens - row.superposition_tokens


def test_two_arms_differ_in_superposition_alone():
    for path in sorted((ROOT / "configs").glob("*_*.py")):
        tst, baseline = (config_file.load_config(f"{path}{arm}") for arm in ("", ":baseline"))
        changed = {
            line.split(":")[0] for line in config.differences(vars_of(baseline), vars_of(tst))
        }
        allowed = {"tst.ratio", "tst.superposition_steps", "steps"}
        assert changed & {"tst.ratio", "tst.superposition_steps"} and changed <= allowed


def vars_of(cfg):
    return config.flatten(cfg)


@pytest.mark.parametrize("name", RUNS)
def test_published_shapes_divide_over_sixteen_devices(name):
    model = config_file.load_config(ROOT / f"configs/{name}.py").model
    params = jax.eval_shape(lambda key: Transformer(model, key), jax.random.key(0))
    mesh = jax.sharding.AbstractMesh((1, 16, 1, 1), AXES)
    if model.experts:
        mesh = jax.sharding.AbstractMesh((1, 2, 2, 4), AXES)
    for array, place in zip(
        jax.tree.leaves(params), jax.tree.leaves(param_shardings(params, mesh))
    ):
        place.shard_shape(array.shape)  # raises where an axis does not divide


def test_a_count_by_hand():
    cfg = ModelConfig(
        vocab_size=11, width=6, layers=3, heads=4, kv_heads=2, head_dim=2, ff=5, qk_norm=True
    )
    attention = 6 * 8 + 2 * 6 * 4 + 8 * 6 + 2 + 2
    assert count_parameters(cfg) == (
        2 * 11 * 6 + 3 * (6 + attention + 6 + 3 * 6 * 5) + 6,
        3 * (6 + attention + 6 + 3 * 6 * 5) + 6,
    )
    cfg.experts, cfg.experts_per_token = 7, 2
    layers = lambda used: 3 * (6 + attention + 6 + 6 * 7 + used * 3 * 6 * 5)
    assert count_parameters(cfg) == (2 * 11 * 6 + layers(7) + 6, layers(2) + 6)


def test_baselines_cost_what_they_read():
    """Equal data by rule 21, equal loss by the published factors, in steps of the same size."""
    figures = plan.plan(load("dense_3b.py"), accelerator="b200", chips=64, mfu=0.38)
    found, per_step = figures["baselines"], 2 * MILLION
    assert found["equal_flops"]["total_tokens"] == 20_000 * per_step
    # N (r s + 1 - r) = 20,000 (0.3 * 6 + 0.7): what the paper ran.
    assert found["equal_data"]["steps"] == 50_000
    assert found["equal_data"]["total_tokens"] == figures["total_tokens"] == 104_857_600_000
    longer, longest = found["equal_loss"]
    assert (longer["steps"], longer["total_tokens"]) == (36_000, 75_497_472_000)
    assert longest["steps"] == round(20_000 * 125_000 / 49_983)
    costs = (found["equal_flops"], found["equal_data"], longer, longest)
    for cost in costs:
        assert cost["total_tokens"] == cost["steps"] * per_step
        assert cost["flops"] * 20_000 == figures["flops"] * cost["steps"]
        assert cost["flops_ratio"] == pytest.approx(cost["steps"] / 20_000)
        assert cost["hours"] == pytest.approx(figures["hours"] * cost["steps"] / 20_000)
    corpus = plan.plan(load("dense_3b.py"), corpus_tokens="1e12")["corpus"]
    assert corpus["equal_data_epochs"] == corpus["epochs"] == 0.1048576
    # A batch that changes has no equal number of steps; compare refuses it too.
    figures = plan.plan(load("dense_3b.py", data__rows_from="10000:1024"))
    assert figures["baselines"]["equal_data"] is None
    assert "none, as data.rows_from" in plan_page.page(load("dense_3b.py"), figures)


def test_published_gain_needs_the_published_method():
    found = plan.plan(load("dense_270m.py"))["published"]
    assert (found["table"], found["model"], found["steps"]) == (4, "dense_270m", 20_000)
    assert found["loss_difference"] == pytest.approx(3.1423 - 3.2124)
    assert (found["parameters_ratio"], found["positions_ratio"]) == (1, 1)
    longer = plan.plan(load("dense_270m.py", steps=100_000))["published"]
    assert (longer["table"], longer["pair_steps"]) == (5, 100_000)
    others = {
        "tst.weights": dict(tst__weights="power"),
        "tst.mode": dict(tst__mode="input"),
        "tst.stages": dict(tst__stages="6:0.3"),
        "tst.reset_optimizer": dict(tst__reset_optimizer=True),
        "data.packing": dict(data__packing="document"),
        "data.rows_from": dict(data__rows_from="10000:2048"),
        "init_from": dict(init_from="gpt2"),
    }
    for name, changes in others.items():
        config = load("dense_270m.py", **changes)
        assert plan.unlike_published(config) == [name]
        found = plan.plan(config)["published"]
        assert found["loss_difference"] is None and name in found["why_none"]
    free = dict(tst__bag_size=7, tst__superposition_steps=500)
    assert plan.unlike_published(load("dense_270m.py", **free)) == []


@pytest.mark.parametrize("accelerator", [None, "b200"])
@pytest.mark.parametrize("name", ["dense_270m.py", "moe_10b_a1b.py", "dense_3b.py:baseline"])
def test_lines_of_the_page_fit(name, accelerator):
    config = load(name)
    lines = plan_page.page(config, plan.plan(config, accelerator)).splitlines()
    assert all(len(line) <= 120 and line == line.rstrip() for line in lines)


def test_page_of_a_run():
    config = load("dense_270m.py")
    figures = plan.plan(config, "v5p", None, None, "80B")
    text = plan_page.page(config, figures, assumed=True)
    for section in ("Run", "Data", "Compute", "Baselines"):
        assert any(line.startswith(section) for line in text.splitlines())
    assert "1.311  equal-FLOPs baseline 0.5243, equal-data baseline 1.311" in text
    assert text.count("published, not measured here") == 2  # the factors, and the gain
    assert "104,857,600,000  104.9B" in text and "419.4 GB, 4 a token" in text
    assert "1 v5p, 459 TFLOP/s each, at MFU 0.4 (an assumption; --mfu=...)" in text
    assert "You have 80B tokens: r*(s-1) may be at most 0.9073; here it is 1.5." in text
    assert "r up to 0.1814 with s=6 (3,629 of 20,000 steps), or s up to 4 with r=0.3" in text
    assert "-0.0701  nats a token at s=6, r=0.3: Table 4" in text
    assert "s=6, r=0.3 is inside" in text
    assert "assumption" not in plan_page.page(config, figures)


def test_page_says_what_there_is_no_figure_for():
    config = load("quickstart.py")
    text = plan_page.page(config, plan.plan(config))
    assert "hours" not in text and "epochs" not in text
    assert "no figure: Table 4, dense_270m, 20,000 steps is nearest, more than 10 times" in text
    moe = load("moe_10b_a1b.py")
    text = plan_page.page(moe, plan.plan(moe, corpus_tokens="80B"))
    assert "even a baseline of these steps repeats" in text and "may be at most" not in text
    assert "Table 5, dense_270m, 100,000 steps is nearest, which holds s 2 to 13" in text
    output = load("quickstart.py", tst__mode="output")
    text = plan_page.page(output, plan.plan(output, corpus_tokens="5M"))
    assert "tst.mode=output reads no more of them than a baseline" in text


def test_a_baseline_is_planned_too():
    config = load("dense_600m.py:baseline")
    figures = plan.plan(config, "h100", 8, 0.5, "100B")
    assert figures["corpus"]["equal_data_epochs"] is None
    text = plan_page.page(config, figures)
    assert figures["baselines"] is None and figures["published"] is None
    assert text.splitlines()[-1] == "Nothing is superposed: this is a baseline."
    assert "TST" not in text and "published" not in text and "superposition" not in text
    assert "r*(s-1) may be at most 1.3841; here it is 0." in text


def run(*arguments):
    command = [sys.executable, "-m", "tst_jax.plan", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_command_writes_and_prints_them(tmp_path):
    file = tmp_path / "plan.json"
    done = run("--config=configs/dense_270m.py", "--config.model.kv_heads=3", f"--json={file}")
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["parameters"] == 253_954_368 and "253,954,368" in done.stdout
    assert figures["positions_per_step"] == 2_097_152
    assert figures["accelerator"] is figures["hours"] is figures["corpus"] is None
    assert {"superposition_tokens", "recovery_tokens", "total_tokens", "steps", "flops"} <= set(
        figures
    )
    options = ("--accelerator=b200", "--chips=8", "--mfu=0.31", "--corpus_tokens=80B")
    done = run("--config=configs/dense_270m.py", *options, f"--json={file}")
    assert done.returncode == 0, done.stderr
    config = load("dense_270m.py")
    figures = plan.plan(config, "b200", 8, 0.31, "80B")
    assert json.loads(file.read_text()) == figures
    assert done.stdout == plan_page.page(config, figures) + "\n"
    assert json.loads(json.dumps(figures, allow_nan=False)) == figures


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--config is missing"),
        (["--config=configs/dense_270m.py:bseline"], "the arm is 'bseline'"),
        (["--config=configs/dense_270m.py", "--config.model.kv_heads=2"], "no multiple of"),
        (["--config=configs/dense_270m.py", "--json=nowhere/at/all.json"], "no folder that exists"),
        (["--config=configs/dense_270m.py", "--json=configs"], "configs is a folder"),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(accelerator="b20"), "--accelerator is 'b20'; choose one of v4, .*mean b200?"),
        (dict(accelerator=""), "--accelerator is ''; choose one of v4, "),
        (dict(accelerator="cpu"), "--accelerator is 'cpu'; choose one of v4, "),
        (dict(accelerator="v5e", chips=0), "--chips is 0; it must lie in 1 .. 2147483647"),
        (dict(accelerator="v5e", chips=-8), "--chips is -8; "),
        (dict(accelerator="v5e", mfu=0.0), "--mfu is 0.0; it must lie above 0, up to 1"),
        (dict(accelerator="v5e", mfu=-0.4), "--mfu is -0.4; "),
        (dict(accelerator="v5e", mfu=40.0), "--mfu is 40.0; it must lie above 0, up to 1"),
        (dict(accelerator="v5e", mfu=float("nan")), "--mfu is nan; "),
        (dict(accelerator="v5e", mfu=float("inf")), "--mfu is inf; "),
        (dict(mfu=0.4), "--mfu is 0.4 without --accelerator; name one of v4, "),
        (dict(chips=4), "--chips is 4 without --accelerator; name one of v4, "),
        (dict(corpus_tokens="lots"), "--corpus_tokens is 'lots'; .*80e9, .*80B or 1.5T"),
    ],
)
def test_an_option_that_cannot_be_is_one_line(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        plan.plan(load("quickstart.py"), **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_settings_and_options_are_refused_at_once():
    with pytest.raises(ConfigError) as caught:
        plan.plan(load("quickstart.py", steps=0), accelerator="v6", chips=0)
    steps, accelerator, chips = str(caught.value).splitlines()
    assert "steps is 0" in steps and "'v6'" in accelerator and "--chips is 0" in chips


def test_settings_that_no_decoder_has_are_refused():
    wrong = {
        "norm": dict(norm="batch"),
        "max_positions": dict(positions="learned"),
        "rope, which has no table": dict(max_positions=8),
        "experts_per_token": dict(experts=4),
        "1 .. experts": dict(experts=4, experts_per_token=5),
        "SwiGLU": dict(experts=4, experts_per_token=2, mlp="gelu"),
        "attention_backend": dict(attention_backend="flash"),
        "router_loss": dict(router_loss=-1.0),
    }
    for words, changes in wrong.items():
        (problem,) = ModelConfig(**changes).problems()
        assert words in problem and "\n" not in problem
    cfg = config.Config(model=shapes.gpt2_124m())
    cfg.data.store, cfg.data.positions = "x", 2048
    with pytest.raises(ConfigError, match="data.positions is 2048 and model.max_positions 1024"):
        plan.plan(cfg)
