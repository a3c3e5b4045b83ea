"""The benchmarks measure what they say: same positions or same arrays, no data needed."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tst_jax import bench, bench_checkpoints, bench_data, bench_kernels, flops
from tst_jax.errors import UserError
from tst_jax.models.transformer import Transformer

SIZE = bench_kernels.Size(3, n=32, d=16, v=100, dtype="float32")


def test_bench_step(config, monkeypatch):
    monkeypatch.setitem(flops.DEVICE_KINDS, "cpu", "h200")
    config.tst.superposition_steps, config.data.rows_from = 7, "3:8"  # of a run, not of a step
    results, peaks = bench.bench_step(config, [3], rounds=2)
    assert [line["bag_size"] for line in results] == [1, 3]
    base, bags = results
    assert base["ratio_to_baseline"] == 1.0 and bags["ratio_to_baseline"] > 0
    for line in results:
        assert line["positions_per_second"] * line["step_seconds_median"] == pytest.approx(32)
        tokens = line["tokens_per_second"] * line["step_seconds_median"]
        assert round(tokens) == 32 * line["bag_size"]
        assert line["temp_bytes"] > 0 and line["compile_seconds"] > 0
        work = flops.step_flops(config.model, rows=4, positions=8, causal=False)
        assert line["mfu"] * line["step_seconds_median"] * 989e12 == pytest.approx(work)
        # Parameters and two moments are held, and written where they were.
        shapes = jax.eval_shape(lambda: Transformer(config.model, jax.random.key(0)))
        state = 12 * sum(leaf.size for leaf in jax.tree.leaves(shapes))
        assert state < peaks[line["bag_size"]] - line["temp_bytes"] < 1.2 * state


def test_bench_step_as_a_command(tmp_path, capsys):
    config, file = tmp_path / "config.py", tmp_path / "step.json"
    config.write_text("from tst_jax.config import Config\nget_config = Config\n")
    small = [f"--config={config}", "--bag_sizes=1,2", "--rounds=1", f"--json={file}"]
    settings = [
        "--config.model.vocab_size=61",
        "--config.data.rows=2",
        "--config.data.shuffle=false",
    ]
    assert bench.main(["step", *small, *settings]) == 0
    names = "bag_size step_seconds_median ratio_to_baseline positions_per_second tokens_per_second"
    names = [*names.split(), "temp_bytes", "compile_seconds", "mfu"]
    assert [list(line) for line in json.loads(file.read_text())] == [names, names]
    assert all(line["mfu"] is None for line in json.loads(file.read_text()))  # of a CPU
    printed = capsys.readouterr().out
    assert printed.count("positions/s") == 2 and "MFU" not in printed
    for wrong, words in {
        "--config.data.row=2": "unknown setting --config.data.row;",
        "--config.data=2": "unknown setting --config.data;",
        "--config.steps.more=2": "unknown setting --config.steps.more;",
        "--config.data.rows=two": "--config.data.rows is 'two'; give a whole number",
        "--config.data.shuffle=no": "--config.data.shuffle is 'no'; give true or false",
        "--config.data.rows=0": "data.rows is 0; it must be at least 1",
    }.items():
        assert bench.main(["step", *small, wrong]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {words}") and error.count("\n") == 1
    for wrong in (["step", *small, "--round=3"], ["data", "--config.steps=2"]):
        with pytest.raises(SystemExit):
            bench.main(wrong)
    capsys.readouterr()


def test_bench_all(tmp_path, capsys, monkeypatch, store):
    """With what each would find in its place; those that lack a package are left out."""
    config, file = tmp_path / "config.py", tmp_path / "all.json"
    config.write_text("from tst_jax.config import Config\nget_config = Config\n")

    def missing(options):
        raise ModuleNotFoundError(name="grain")

    monkeypatch.setattr(bench, "_kernels", lambda options: [options.rounds])
    monkeypatch.setattr(bench, "_data", missing)
    monkeypatch.setattr(bench, "_checkpoints", lambda options: [options.settings])
    small = ["--rounds=3", "--config.data.rows=2", "--config.model.vocab_size=61"]
    assert bench.main(["all", f"--config={config}", *small, f"--json={file}"]) == 0
    found = json.loads(file.read_text())
    assert list(found) == ["step", "kernels", "data", "checkpoints"]
    assert [line["bag_size"] for line in found["step"]] == [1, 2, 4, 8, 16]
    assert found["kernels"] == [3] and found["data"] is None
    assert found["checkpoints"] == [[["data.rows", "2"], ["model.vocab_size", "61"]]]
    assert "left out: grain is not installed" in capsys.readouterr().out


def test_bench_kernels_writes_one_object_a_case_and_size(tmp_path, capsys):
    file = tmp_path / "kernels.json"
    small = ["--n=32", "--d=16", "--v=100", "--bag_sizes=1,3", "--chunks=8,16", "--rounds=2"]
    assert bench.main(["kernels", "--check", *small, f"--json={file}"]) == 0
    results = json.loads(file.read_text())
    losses = ["paper_style", "one_logsumexp", "ours", "ours_chunk_16"]
    names = [*losses, "bag_gathered", "bag_ours", "matmul"]
    assert [(x["bag_size"], x["name"]) for x in results] == [(s, n) for s in (1, 3) for n in names]
    for line in results:
        assert (line["n"], line["d"], line["v"], line["dtype"]) == (32, 16, 100, "float32")
        assert line["seconds"] > 0 and (line["temp_bytes"] > 0 or line["name"] == "matmul")
        assert "tflops" not in line  # nothing is claimed of an accelerator here
    printed = capsys.readouterr().out
    assert printed.count("check xla") == 2 and printed.count("paper_style") > 4


def test_bench_checkpoints(config, tmp_path):
    found = bench_checkpoints.measure(config, every=3, rounds=2, folder=tmp_path / "saved")
    assert found["every"] == 3 and found["state_bytes"] > 40_000
    assert found["ratio_median"] > 0 and found["block_seconds_median"] > 0
    assert 0 < found["save_call_seconds_median"]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["2"]


def test_bench_data(store, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_data, "SHAPES", ((3, 8), (1, 8)))
    monkeypatch.setattr(bench_data, "STEP_TOKENS", 480)
    file = tmp_path / "data.json"
    small = [f"--store={store}", f"--json={file}", "--rounds=2", "--seconds=0.02"]
    assert bench.main(["data", *small]) == 0
    results = json.loads(file.read_text())
    names = ["numpy_slice", "grain", "grain_mixture_3", "grain_document"]
    assert [(x["row_tokens"], x["name"]) for x in results] == [
        (t, n) for t in (24, 8) for n in names
    ]
    assert all(set(x) == {"name", "row_tokens", "tokens_per_second"} for x in results)
    assert all(x["tokens_per_second"] > 0 for x in results)
    assert capsys.readouterr().out.count("of numpy_slice") == 8
    assert bench.main(["data", f"--store={tmp_path / 'none'}"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_compared_computes_the_same(dtype):
    """Otherwise a time beside another says nothing; values and gradients."""
    size = bench_kernels.Size(3, n=32, d=16, v=100, dtype=dtype)
    found = {
        name: function(*arrays)
        for name, (function, arrays) in bench_kernels.cases(size, [8, 32]).items()
    }
    for name, (value, gradients) in ((k, v) for k, v in found.items() if k != "matmul"):
        base = found["bag_gathered" if name.startswith("bag") else "paper_style"]
        for a, b in zip((value, *_tuple(gradients)), (base[0], *_tuple(base[1])), strict=True):
            a, b = (np.asarray(x, np.float64) for x in (a, b))
            limit = 1e-5 if dtype == "float32" else 1e-2
            assert np.abs(a - b).max() <= limit * np.abs(b).max(), name
    hidden, head, _ = bench_kernels.arrays(size)
    assert found["matmul"].shape == (32, 100) and found["matmul"].dtype == hidden.dtype


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)


def test_the_check_is_against_float64_and_fails():
    """Uniform logits give log V (rule 10), and a wrong loss is not let through."""
    hidden, head, targets = bench_kernels.arrays(SIZE)
    loss, d_hidden, d_head = bench_kernels.reference(hidden * 0, head, targets)
    assert loss == pytest.approx(math.log(SIZE.v)) and d_head.shape == head.shape
    assert not d_head.any() and d_hidden.any()
    broken = lambda chunk, choice: lambda h, e, y: jnp.float32(1.001) * (h @ e.T).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_kernels, "ours", broken)
        with pytest.raises(UserError, match="off float64"):
            bench_kernels.check(SIZE)
    bench_kernels.check(SIZE)


def test_a_refused_case_is_kept_and_a_limit_is_said(monkeypatch, capsys):
    """What does not fit has no seconds but a reason; other cases of the size go on."""
    from jax.errors import JaxRuntimeError

    def refused(*arrays):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: too large\nmore")

    options = types.SimpleNamespace(rounds=1, chunks=[8], check=False, limit_s=math.inf)
    with monkeypatch.context() as patch:
        patch.setattr(bench_kernels, "paper_style", refused)
        results = bench_kernels.run([SIZE], options)
    assert results[0]["seconds"] is None and "too large" in results[0]["refused"]
    assert all(x["seconds"] > 0 for x in results[1:])
    assert "refused: RESOURCE_EXHAUSTED: too large" in capsys.readouterr().out
    options.limit_s = -1
    assert bench_kernels.run([SIZE], options) == []
    assert "left out" in capsys.readouterr().out


def test_wrong_input_is_one_line(tmp_path, capsys):
    for wrong in (
        ["step", f"--config={tmp_path}/none.py"],
        ["kernels", "--rounds=0"],
        ["kernels", f"--json={tmp_path}/none/k.json"],
    ):
        assert bench.main(wrong) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    for wrong in ("none", "3,0", ""):
        with pytest.raises(SystemExit):
            bench.main(["kernels", f"--n={wrong}"])
        assert f"{wrong!r}; give numbers" in capsys.readouterr().err
