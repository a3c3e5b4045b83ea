"""The comparison: matched arms, an honest summary, and a report that is the same whoever wins."""

import copy
import html
import json
import math
import re
import statistics

import pytest

from tst_jax import compare as compare_lib
from tst_jax import config as config_lib
from tst_jax import report
from tst_jax.compare import Run, baseline_of, compare, equal_data_steps, equal_loss, summarize
from tst_jax.errors import UserError


def fake_run(config, loss):
    """A finished run that ends at `loss`, with the metrics that a real one would have."""
    superposed = {s.stop: s for s in config_lib.stages(config)}
    steps, tokens = [], 0
    for k in range(1, config.steps + 1):
        stage = superposed[min(stop for stop in superposed if stop >= k)]
        tokens += stage.step_tokens
        steps.append(
            {"step": k, "bag_size": stage.bag_size, "loss": 4.0, "step_seconds": 0.01 * k,
             "positions": 32 * k, "tokens": tokens, "flops": 1000 * k}
        )  # fmt: skip
    evals = [
        {"step": k, "eval_loss": loss + 5 / k - 5 / config.steps, "eval_bits_per_byte": loss / 2}
        for k in range(5, config.steps + 1, 5)
    ]
    return Run(config, steps, evals)


def test_one_comparison_from_runs_to_report(config, tmp_path, capsys):
    """Real runs; every field of summary.json; reused, not repeated, the second time."""
    summary = compare(config, tmp_path, seeds=1, equal_data=True)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    for arm, tokens in (("baseline", 32 * 20), ("tst", 32 * (3 * 8 + 12))):
        assert summary[arm]["steps"] == 20
        assert summary[arm]["positions"] == 32 * 20
        assert summary[arm]["tokens"] == tokens
        assert len(summary[arm]["final_eval_loss"]) == 1
        assert summary[arm]["step_seconds_median"] > 0
    assert summary["flops_ratio"] == 1.0
    assert summary["tokens_ratio"] == (3 * 8 + 12) / 20
    assert summary["eval_loss_difference_stderr"] is None
    assert summary["equal_loss_speedup"] is None
    # Equal data: N (r s + 1 - r) = 36 steps, which read what TST read (rule 21).
    assert summary["equal_data"]["steps"] == 36
    assert summary["equal_data"]["tokens"] == summary["tst"]["tokens"]
    last = [line for line in open(tmp_path / "runs/tst-seed0/metrics.jsonl") if "eval_loss" in line]
    assert summary["tst"]["final_eval_loss"] == [json.loads(last[-1])["eval_loss"]]

    page = (tmp_path / "report.html").read_text()
    assert "data:image/png;base64," in page and html.escape(report.verdict(summary)) in page
    assert not re.search(r"(src|href)=\"?(https?:)?//", page)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert report.verdict(summary) in (tmp_path / "report.md").read_text()
    assert "tst.ratio: 0.0 -> 0.4" in (tmp_path / "report.md").read_text()

    capsys.readouterr()
    again = compare(config, tmp_path, seeds=1, equal_data=True)
    assert capsys.readouterr().out.count("is at step") == 3
    assert again == summary
    assert report.text_table(summary).splitlines()[0].endswith("  baseline, equal data")


def test_summary_arithmetic(config):
    """Differences are paired by seed; the error is theirs; step times are the phases' medians."""
    baseline = [fake_run(baseline_of(config), loss) for loss in (3.0, 3.2, 3.1)]
    tst = [fake_run(config, loss) for loss in (2.9, 3.15, 3.0)]
    summary = summarize(baseline, tst)
    assert summary["eval_loss_difference"] == pytest.approx([-0.1, -0.05, -0.1])
    assert summary["eval_loss_difference_mean"] == pytest.approx(-0.25 / 3)
    spread = math.sqrt(((0.1 - 0.25 / 3) ** 2 * 2 + (0.05 - 0.25 / 3) ** 2) / 2)
    assert summary["eval_loss_difference_stderr"] == pytest.approx(spread / math.sqrt(3))
    # The first line of a run is left out: it holds what starting up costs.
    assert summary["step_time_ratio"] == pytest.approx(0.05 / 0.11)
    assert summary["baseline"]["step_seconds_median"] == pytest.approx(0.11)
    assert summary["switch_step"] == 8


def test_verdict_is_the_same_sentence_for_either_winner(config):
    low, high = [fake_run(config, x) for x in (3.0, 3.1)], [fake_run(config, x) for x in (3.3, 3.5)]
    wins = report.verdict(summarize([copy.copy(r) for r in high], low))
    loses = report.verdict(summarize(low, high))
    swapped = loses.replace("The baseline", "TST").replace("below TST", "below the baseline")
    assert wins == swapped and wins.startswith("TST ends 0.3500 nats a token below the baseline")
    noisy = report.verdict(summarize(low, [fake_run(config, x) for x in (2.8, 3.2)]))
    assert "may be noise" in noisy and "may be noise" not in wins
    assert "may be noise" in report.verdict(summarize(low[:1], high[:1]))


def curve(steps, seed=0):
    """Falls by half a nat for each e-fold of steps; odd seeds lie 0.01 higher than even ones."""
    return 3 - 0.5 * math.log(steps / 1000) + 0.01 * (seed % 2)


@pytest.mark.parametrize("gap, expected", [(0.1, math.exp(0.2)), (-0.1, math.exp(-0.2))])
def test_equal_loss_is_interpolated(config, monkeypatch, gap, expected):
    """The search finds the length that closes the gap, longer or shorter than TST (rule 21)."""
    tried = []

    def run(config, workdir, name, seed):
        tried.append(config.steps)
        assert config.tst.ratio == 0 and str(config.steps) in name
        return fake_run(config, curve(config.steps))

    config.steps = 1000
    monkeypatch.setattr(compare_lib, "run_once", run)
    tst, baselines = [fake_run(config, 3 - gap)], {1000: [fake_run(config, 3.0)]}
    found = equal_loss(config, "unused", [0], tst, baselines)
    assert found == {"speedup": pytest.approx(expected, rel=1e-3), "low": None, "high": None}
    assert len(tried) == 2 and sorted([1000, *tried]) == sorted(baselines)


def test_equal_loss_has_the_uncertainty_of_its_seeds(config, monkeypatch):
    """Pairs of seeds differ by 0.1 +- 0.02: on a slope of half a nat an e-fold, 0.2 +- 0.04."""
    config.steps = 1000
    run = lambda config, workdir, name, seed: fake_run(config, curve(config.steps, seed))
    monkeypatch.setattr(compare_lib, "run_once", run)
    gaps = [0.08, 0.12, 0.06, 0.14]
    tst = [fake_run(config, curve(1000, seed) - gap) for seed, gap in enumerate(gaps)]
    baselines = {1000: [fake_run(config, curve(1000, seed)) for seed in range(4)]}
    found = equal_loss(config, "unused", range(4), tst, baselines)
    error = statistics.stdev(gaps) / 2 / 0.5
    assert found["speedup"] == pytest.approx(math.exp(0.2), rel=1e-3)
    assert found["low"] == pytest.approx(math.exp(0.2 - error), rel=1e-3)
    assert found["high"] == pytest.approx(math.exp(0.2 + error), rel=1e-3)


def test_equal_loss_interpolates_between_near_lengths_only(config, monkeypatch):
    """The baseline of equal data, twice as long, is no neighbour: lengths between are run."""
    config.steps = 1000
    run = lambda config, workdir, name, seed: fake_run(config, curve(config.steps))
    monkeypatch.setattr(compare_lib, "run_once", run)
    baselines = {steps: [fake_run(config, curve(steps))] for steps in (1000, 2000)}
    found = equal_loss(config, "unused", [0], [fake_run(config, curve(1200))], baselines)
    assert found["speedup"] == pytest.approx(1.2, rel=1e-3)
    assert sorted(baselines) == [1000, 1189, 1414, 2000]


def test_equal_loss_gives_up(config, monkeypatch):
    """A loss that no baseline length up to four times reaches gives None, not a guess."""
    monkeypatch.setattr(compare_lib, "run_once", lambda c, *_: fake_run(c, 3.0))
    baselines = {config.steps: [fake_run(config, 3.0)]}
    assert equal_loss(config, "unused", [0], [fake_run(config, 2.0)], baselines) is None


def test_equal_data_steps(config):
    """N (r s + 1 - r) steps, for one stage and for several (rule 21)."""
    config.steps = 1000
    config.tst.bag_size, config.tst.ratio = 6, 0.3
    assert equal_data_steps(config) == 2500
    config.tst.stages = "8:0.1,4:0.2"
    assert equal_data_steps(config) == 800 + 800 + 700


def test_nothing_to_compare_is_refused(config, tmp_path):
    for name, value, words in (("ratio", 0.0, "no step"), ("bag_size", 1, "no step")):
        wrong = copy.deepcopy(config)
        setattr(wrong.tst, name, value)
        with pytest.raises(UserError, match=words):
            compare(wrong, tmp_path / "new", seeds=1)
    with pytest.raises(UserError, match="--seeds is 0"):
        compare(config, tmp_path / "new", seeds=0)
    config.stop_after = 3
    with pytest.raises(UserError, match="whole runs"):
        compare(config, tmp_path / "new", seeds=1)
    assert not (tmp_path / "new").exists()


def test_page_escapes_what_it_shows(config, tmp_path):
    config.data.store = "<script>alert(1)</script>"
    baseline, tst = [fake_run(baseline_of(config), 3.0)], [fake_run(config, 2.9)]
    report.write(tmp_path, summarize(baseline, tst), {config.steps: baseline}, tst)
    assert "<script>alert" not in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("steps, ratio", [(5, 0.2), (1, 1.0), (20, 1.0)])
def test_shortest_phases_still_give_a_report(config, tmp_path, steps, ratio):
    """One superposed step, one step in all, no recovery: the runs are paid for, so report them."""
    config.steps, config.tst.ratio = steps, ratio
    arms = [[fake_run(baseline_of(config), 3.0)], [fake_run(config, 2.9)]]
    for (run,) in arms:
        run.evals[:] = [{"step": steps, "eval_loss": 3.0, "eval_bits_per_byte": 1.0}]
    summary = summarize(*arms)
    assert summary["step_time_ratio"] > 0
    report.write(tmp_path, summary, {steps: arms[0]}, arms[1])
    assert (tmp_path / "report.html").exists()
