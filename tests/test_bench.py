"""The step benchmark measures what it says: same positions, s times the tokens, no data needed."""

import pytest

from tst_jax import bench


def test_bench_step(config):
    results = bench.bench_step(config, [3], rounds=2)
    assert [line["bag_size"] for line in results] == [1, 3]
    base, bags = results
    assert base["ratio_to_baseline"] == 1.0 and bags["ratio_to_baseline"] > 0
    for line in results:
        assert line["positions_per_second"] * line["step_seconds_median"] == pytest.approx(32)
        tokens = line["tokens_per_second"] * line["step_seconds_median"]
        assert round(tokens) == 32 * line["bag_size"]
        assert line["temp_bytes"] > 0 and line["compile_seconds"] > 0


def test_wrong_input_is_one_line(tmp_path, capsys):
    assert bench.main(["step", f"--config={tmp_path}/none.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
