"""Proves `tst_jax.plan` and the published runs in configs/: exact counts, nothing allocated.

Parameter counts and the tokens of the paper's Table 1 (arXiv 2605.06546); rule 2 for the positions.
"""

import json
import pathlib
import subprocess
import sys

import jax
import pytest

from tst_jax import config, config_file, plan
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


def test_the_paper_s_longer_pair():
    longer = config_file.load_config(ROOT / "configs/dense_270m.py")
    longer.steps = 100_000
    assert plan.plan(longer)["superposition_tokens"] == 377_487_360_000
    assert plan.plan(longer)["total_tokens"] == 524_288_000_000


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


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "--config is missing"),
        (["--config=configs/dense_270m.py:bseline"], "the arm is 'bseline'"),
        (["--config=configs/dense_270m.py", "--config.model.kv_heads=2"], "no multiple of"),
        (["--config=configs/dense_270m.py", "--json=nowhere/at/all.json"], "no folder that exists"),
    ],
)
def test_mistakes_are_one_line(arguments, words):
    done = run(*arguments)
    assert done.returncode == 2 and words in done.stderr
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


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
