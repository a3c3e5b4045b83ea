"""The study's files are of one piece: each CSV line is a run of the config that stands there, and
each line of a table in its README follows from a CSV."""

import csv
import math
import pathlib
import re

import numpy as np
import pytest

from tst_jax import budget, compare, config_file
from tst_jax import config as config_lib

STUDIES = pathlib.Path(__file__).parents[1] / "configs" / "studies"
RESULTS = sorted((STUDIES / "results").glob("*.csv"))
TRAIN_TOKENS = 74_273_044  # of the study's store, as its README says
MEASURED = ("run", "eval_loss", "eval_bits_per_byte", "step", "tokens", "flops")


def read(path):
    """The lines of a sweep's CSV, and the names of its axes."""
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    return lines, [name for name in lines[0] if name not in MEASURED]


def config_of(line, axes):
    arm = f":{line['arm']}" if "arm" in axes else ""
    config = config_file.load_config(f"{STUDIES / 'python.py'}{arm}")
    for name in axes:
        *parts, last = name.split(".")
        part = config
        for field in parts:
            part = getattr(part, field)
        if name != "arm":
            setattr(part, last, type(getattr(part, last))(line[name]))
    return config


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_each_line_is_a_run_of_the_config(path):
    lines, axes = read(path)
    for line in lines:
        config = config_of(line, axes)
        assert config_lib.problems(config) == []
        spent = budget.spent(config)
        found = [int(line[name]) for name in ("step", "tokens", "flops")]
        assert found == [config.steps, spent["total_tokens"], spent["flops"]]
        assert spent["total_tokens"] <= TRAIN_TOKENS  # nothing is read twice
        assert 3 < float(line["eval_loss"]) < math.log(8192)


def rows_of(path):
    """Lines as the README's tables have them, computed anew: {values of the axes: (mean ± standard
    error, difference from the baseline, the same in standard errors)}."""
    lines, axes = read(path)
    # A grid names its baseline once for each bag size: the first of them stands in the table.
    lines = {line["run"]: line for line in reversed(lines)}.values()
    axes = [name for name in axes if name != "seed"]
    groups = {}
    for line in lines:
        groups.setdefault(tuple(line[a] for a in axes), {})[line["seed"]] = float(line["eval_loss"])
    plain = [k for k in groups if not budget.superposed(config_of(dict(zip(axes, k)), axes))]
    found = {}
    for key, losses in groups.items():
        cells = [str(len(losses)), noisy(list(losses.values())), "baseline", ""]
        if key not in plain:
            (baseline,) = plain
            gaps = [loss - groups[baseline][seed] for seed, loss in losses.items()]
            cells[2] = noisy(gaps, "+")
            cells[3] = f"{np.mean(gaps) / error(gaps):+.1f}" if len(gaps) > 1 else ""
        found[key] = " | ".join(cells)
    return found


def error(values):
    return np.std(values, ddof=1) / math.sqrt(len(values))


def noisy(values, sign=""):
    after = f" ± {error(values):.4f}" if len(values) > 1 else ""
    return f"{np.mean(values):{sign}.4f}{after}"


def test_tables_follow_from_the_results():
    text = (STUDIES / "README.md").read_text()
    tables = dict(re.findall(r"`results/(\w+)\.csv`:\n\n((?:\|.*\n)+)", text))
    assert set(tables) == {path.stem for path in RESULTS}
    for path in RESULTS:
        want = {"| " + " | ".join([*key, cells]) + " |" for key, cells in rows_of(path).items()}
        shown = set(tables[path.stem].splitlines()[2:])
        assert shown == want, path.stem


def test_the_speed_up_follows_from_the_results():
    """Rule 21: from baselines with whole schedules of their own, paired by seed."""
    groups = {}
    for name in ("gain", "lengths"):
        lines, axes = read(STUDIES / "results" / f"{name}.csv")
        for line in lines:
            config = config_of(line, axes)
            length = config.steps if config.tst.ratio == 0 else "tst"
            run = compare.Run(config, [], [{"eval_loss": float(line["eval_loss"])}])
            groups.setdefault(length, {})[config.seed] = run
    baselines = {length: [runs[seed] for seed in range(3)] for length, runs in groups.items()}
    tst = baselines.pop("tst")
    assert sorted(baselines) == [8000, 9200, 10580, 12167]
    found = compare.equal_loss(tst[0].config, None, range(3), tst, baselines)
    said = "{speedup:.2f} times TST's steps and FLOPs ({low:.2f} to {high:.2f}: one standard error"
    assert said.format(**found) in " ".join((STUDIES / "README.md").read_text().split())


def test_all_of_it_is_small():
    files = [path for path in STUDIES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2**20
    named = set(re.findall(r"results/(\w+\.\w+)", (STUDIES / "README.md").read_text()))
    assert named == {path.name for path in (STUDIES / "results").iterdir()}
