"""`tst_jax.bench_models` on shapes of a test's size; that no accelerator is a line; its script."""

import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest

from tst_jax import bench, bench_models, flops
from tst_jax.models.shapes import ModelConfig

MODEL = ModelConfig(vocab_size=64, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, ff=24)
CASE = bench_models.Case("tiny", MODEL, 3, 16, ((4, "none"), (8, "dots"), (8, "full")))
OPTIONS = types.SimpleNamespace(rounds=1, limit_s=1e9)


def test_the_fastest_batch_is_taken_for_both_phases(monkeypatch, capsys):
    monkeypatch.setattr(flops, "device_peak_flops", lambda kind: 1e12)
    found = bench_models.run([CASE], OPTIONS)["models"][0]
    assert [(x["rows"], x["remat"]) for x in found["tried"]] == list(CASE.batches)
    best = max(found["tried"], key=lambda tried: tried["positions_per_second"])
    assert (found["rows"], found["remat"]) == (best["rows"], best["remat"])
    assert found["loss_chunk"] in bench_models.CHUNKS
    assert [phase["bag_size"] for phase in found["phases"]] == [1, 3]
    work = flops.step_flops(MODEL, found["rows"], 16, causal=False)
    for phase in found["phases"]:
        assert phase["mfu"] == pytest.approx(work / phase["step_seconds"] / 1e12)
        assert phase["head_share"] == phase["head_seconds"] / phase["step_seconds"]
        assert phase["peak_bytes"] > 3 * 4 * sum(  # parameters and two moments
            x.size for x in jax.tree.leaves(bench_models._Step(_config()).shapes.params)
        )
    printed = capsys.readouterr().out
    assert printed.count("positions/s") == 3 and printed.count("ms a step, MFU") == 2


def _config(rows=4):
    return bench_models.config_of(CASE, rows, "none", 1024, 1)


@pytest.mark.parametrize("when", ["compiled", "run"])
def test_what_a_card_refuses_is_left_out_with_the_reason(monkeypatch, when):
    full = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large\nand much more")
    made, take = bench_models._Step.__init__, bench_models._State.take

    def make(self, config):
        if when == "compiled" and config.data.rows == 8:
            raise full
        made(self, config)

    def run(self, step):
        if when == "run" and step.stage.rows == 8:
            self._leaves = None  # was given away
            raise full
        return take(self, step)

    monkeypatch.setattr(bench_models._Step, "__init__", make)
    monkeypatch.setattr(bench_models._State, "take", run)
    found = bench_models.run([CASE], OPTIONS)["models"][0]
    refused = [tried.get("refused") for tried in found["tried"]]
    assert refused == [None] + ["RESOURCE_EXHAUSTED: too large"] * 2
    assert found["rows"] == 4 and len(found["phases"]) == 2
    assert "refused: RESOURCE_EXHAUSTED" in bench_models.line_of(found)
    only = bench_models.Case("tiny", MODEL, 3, 16, ((8, "none"),))
    assert "phases" not in bench_models.run([only], OPTIONS)["models"][0]


def test_no_model_begins_after_the_limit(capsys):
    options = types.SimpleNamespace(rounds=1, limit_s=-1)
    assert bench_models.run([CASE], options)["models"] == []
    assert "left out: tiny" in capsys.readouterr().out


@pytest.mark.parametrize("case", bench_models.CASES, ids=lambda case: case.name)
def test_settings_of_the_published_shapes_go_together(case):
    """Each superposition step lowers, here for no card."""
    rows, remat = case.batches[0]
    config = bench_models.config_of(case, rows, remat, 4096, case.bag_size)
    _, stage, _ = bench_models.lower(config)
    assert (stage.bag_size, stage.rows) == (case.bag_size, rows)
    assert stage.positions == case.positions


def test_without_an_accelerator_it_is_one_line(tmp_path):
    script = pathlib.Path(__file__).parents[1] / "launch/bench_models.sh"
    done = subprocess.run(
        ["bash", str(script), f"--json={tmp_path}/models.json"],
        env=os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert done.stderr.count("\n") == 1 and "bench models is for a GPU or TPU" in done.stderr
    assert bench.main(["models", "--rounds=0"]) == 2
