"""Trains a baseline and TST at matched FLOPs, and reports which ends with the lower held-out loss.

    python -m tst_jax.compare --config=configs/quickstart.py --workdir=runs/quickstart --seeds=3

Both arms have the same settings, steps and positions a step, and so the same FLOPs; the baseline is
--config.tst.ratio=0. Finished runs in the workdir are reused, interrupted ones resumed.
--equal_data adds a baseline that reads as many data tokens as TST, --equal_loss a search for the
number of baseline steps that reaches TST's loss (method rule 21). Writes summary.json, report.md,
loss.png and report.html.
"""

import copy
import dataclasses
import itertools
import math
import pathlib
import statistics

from tst_jax import config as config_lib
from tst_jax import metrics
from tst_jax import workdir as workdir_lib
from tst_jax.checkpoint import Checkpoints
from tst_jax.config import Config
from tst_jax.data import corpus
from tst_jax.errors import UserError
from tst_jax.train import train

# How the equal-loss search lengthens the baseline, between which lengths it may interpolate, and
# where it gives up.
GROWTH = 1.15
WIDEST = 1.4
LONGEST = 4.0


@dataclasses.dataclass
class Run:
    """One finished run, read back from its metrics."""

    config: Config
    steps: list[dict]  # lines with a training loss
    evals: list[dict]  # lines with a held-out loss

    @property
    def final_eval_loss(self) -> float:
        return self.evals[-1]["eval_loss"]

    @property
    def finished(self) -> bool:
        return bool(self.steps and self.evals) and self.evals[-1]["step"] >= self.config.steps

    @property
    def switch(self) -> int:
        """The step at which recovery begins; 0 for a baseline."""
        superposed = [s.stop for s in config_lib.stages(self.config) if s.bag_size > 1]
        return superposed[-1] if superposed else 0


def baseline_of(config: Config, steps: int | None = None) -> Config:
    """The same run without superposition, over `steps` steps (as many as TST's if None).

    A longer baseline is a full schedule of its own (rule 21).
    """
    baseline = copy.deepcopy(config)
    baseline.tst.ratio, baseline.tst.superposition_steps, baseline.tst.stages = 0.0, -1, ""
    baseline.steps = steps or config.steps
    return baseline


def equal_data_steps(config: Config) -> int:
    """Baseline steps that read as many tokens as the TST run: N (r s + 1 - r) for one stage."""
    stages = config_lib.stages(config)
    tokens = sum((s.stop - s.start) * s.step_tokens for s in stages)
    return round(tokens / (config.data.rows * config.data.positions))


def run_once(config: Config, workdir, name: str, seed: int) -> Run:
    """Trains `config` with another seed in workdir/runs/NAME-seedSEED, or finds it done, there or
    in another folder of workdir/runs (a sweep's)."""
    config = copy.deepcopy(config)
    config.seed = seed
    full_name = f"{name}-seed{seed}"
    folder = pathlib.Path(workdir) / "runs" / full_name
    if not folder.exists() and (found := find_run(folder.parent, config)):
        check_data(found, config)
        print(f"{full_name}: {found} is this run already", flush=True)
        folder = found
    else:
        train(config, folder, title=full_name)
    return read_run(folder, config)


def read_run(folder, config: Config) -> Run:
    """What the metrics in `folder` say; of a run that has just begun nothing."""
    lines = metrics.read_metrics(folder)
    return Run(
        config,
        [line for line in lines if "loss" in line],
        [line for line in lines if "eval_loss" in line],
    )


def find_run(runs, config: Config) -> pathlib.Path | None:
    """The folder in `runs` of a finished run with these settings, whatever it is called."""
    for path in sorted(pathlib.Path(runs).glob("*/config.json")):
        saved = workdir_lib.saved_config(path.parent)
        if workdir_lib.same_run(saved, config) and read_run(path.parent, config).finished:
            return path.parent
    return None


def check_data(folder, config: Config) -> None:
    """Raises StoreError unless a finished run was trained on what its stores hold now: one that was
    prepared anew under the same name would be compared with another. Says so where its checkpoints,
    which know that, have been removed."""
    place = pathlib.Path(folder) / "checkpoints"
    if not any(path.name.isdecimal() for path in place.glob("*")):
        print(f"warning: {folder} has no checkpoint left to tell which data it read", flush=True)
        return
    with Checkpoints(place, read_only=True) as checkpoints:
        record = checkpoints.record(checkpoints.steps()[-1])
    stores = corpus.open_stores(config.data)
    corpus.check_same(folder, record["stores"], stores, record["vocabulary"])


def stderr(values) -> float | None:
    """Standard error of the mean; None of fewer than two values, which show no noise."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def equal_loss(config: Config, workdir, seeds, tst: list[Run], baselines: dict) -> dict | None:
    """The baseline steps whose final held-out loss is TST's, interpolated in log(steps) (rule 21).

    Lengths grow or shrink by `GROWTH` until the mean over seeds passes TST's between two that are
    at most `WIDEST` apart. The uncertainty is that of the seeds: the standard error of
    (interpolated baseline - TST), paired by seed, over the slope of the baseline's loss there.

    Args:
      config: the TST run's.
      workdir, seeds: as for the comparison.
      tst: its runs, one a seed.
      baselines: {steps: runs} of the baselines that are there already; grows.
    Returns:
      {"speedup": baseline steps over TST's, "low", "high": the same one standard error away (None
      with one seed)}; None where it lies outside 1/LONGEST .. LONGEST.
    """
    targets = [run.final_eval_loss for run in tst]
    target = statistics.mean(targets)
    losses = lambda steps: [run.final_eval_loss for run in baselines[steps]]
    mean = lambda steps: statistics.mean(losses(steps))
    factor = GROWTH if mean(config.steps) > target else 1 / GROWTH
    last = config.steps
    while True:
        pairs = itertools.pairwise(sorted(baselines))
        crossed = [(a, b) for a, b in pairs if mean(a) > target >= mean(b)]
        if crossed:
            low, high = crossed[0]
            steps = round(math.sqrt(low * high))
            if high <= WIDEST * low or steps in baselines:
                break
        else:
            steps = last = round(last * factor)
            if not 1 / LONGEST <= steps / config.steps <= LONGEST:
                return None
        if steps not in baselines:
            longer, name = baseline_of(config, steps), f"baseline-{steps}-steps"
            baselines[steps] = [run_once(longer, workdir, name, seed) for seed in seeds]
    fall, width = mean(low) - mean(high), math.log(high / low)
    share = (mean(low) - target) / fall
    speedup = low / config.steps * math.exp(share * width)
    pairs = zip(losses(low), losses(high), targets)
    gaps = [a + share * (b - a) - wanted for a, b, wanted in pairs]
    error = stderr(gaps)
    if error is None:
        return {"speedup": speedup, "low": None, "high": None}
    spread = math.exp(error * width / fall)
    return {"speedup": speedup, "low": speedup / spread, "high": speedup * spread}


def _step_seconds(runs: list[Run], superposed: bool = False) -> float:
    """Median time of a step, of all or of the superposed ones. The first step of a run also pays
    for starting up, and counts only where there is no other."""
    lines = [line for run in runs for line in run.steps]
    if superposed:
        lines = [line for line in lines if line["bag_size"] > 1]
    later = [line for line in lines if line["step"] > 1]
    return statistics.median(line["step_seconds"] for line in later or lines)


def summarize_arm(runs: list[Run]) -> dict:
    """What summary.json says of an arm; counts are of one run."""
    last = runs[0].steps[-1]
    return {
        "steps": last["step"],
        "positions": last["positions"],
        "tokens": last["tokens"],
        "flops": last["flops"],
        "final_eval_loss": [run.final_eval_loss for run in runs],
        "final_eval_bits_per_byte": [run.evals[-1]["eval_bits_per_byte"] for run in runs],
        "step_seconds_median": _step_seconds(runs),
    }


def summarize(baseline: list[Run], tst: list[Run]) -> dict:
    """summary.json, the searches left out. Differences are TST minus baseline, paired by seed."""
    arms = {"baseline": summarize_arm(baseline), "tst": summarize_arm(tst)}
    pairs = zip(arms["baseline"]["final_eval_loss"], arms["tst"]["final_eval_loss"])
    differences = [b - a for a, b in pairs]
    ratio = lambda name: arms["tst"][name] / arms["baseline"][name]
    return {
        **arms,
        "seeds": [run.config.seed for run in tst],
        "switch_step": tst[0].switch,
        "flops_ratio": ratio("flops"),
        "tokens_ratio": ratio("tokens"),
        "step_time_ratio": _step_seconds(tst, superposed=True) / _step_seconds(baseline),
        "eval_loss_difference": differences,
        "eval_loss_difference_mean": statistics.mean(differences),
        "eval_loss_difference_stderr": stderr(differences),
        "equal_loss_speedup": None,
        "equal_data": None,
    }


def compare(config: Config, workdir, seeds: int, with_equal_loss=False, equal_data=False) -> dict:
    """Runs what is missing, writes the report, returns the summary.

    Args:
      config: the TST run's.
      workdir: of the comparison; finished runs in it are reused.
      seeds: how many, from config.seed on.
      with_equal_loss: searches the baseline length that reaches TST's loss.
      equal_data: adds a baseline that reads as many tokens.
    Raises:
      UserError: nothing to compare, or what `train` refuses.
    """
    from tst_jax import report  # matplotlib takes a second to import; not before the runs

    config_lib.validate(config)
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; give at least 1, better 3")
    if config.stop_after >= 0:
        raise UserError("stop_after is set; a comparison needs whole runs, leave it at -1")
    if config.data.rows_from and (with_equal_loss or equal_data):
        raise UserError(
            "data.rows_from is set; --equal_loss and --equal_data need one batch size in all runs"
        )
    if all(stage.bag_size == 1 for stage in config_lib.stages(config)):
        raise UserError("no step is superposed; set tst.ratio above 0 and tst.bag_size above 1")
    numbers = range(config.seed, config.seed + seeds)
    arms = {"baseline": baseline_of(config), "tst": config}
    runs = {name: [] for name in arms}
    for seed in numbers:
        for name, arm in arms.items():
            runs[name].append(run_once(arm, workdir, name, seed))
    summary = summarize(runs["baseline"], runs["tst"])
    baselines = {config.steps: runs["baseline"]}
    if equal_data:
        steps = equal_data_steps(config)
        longer = baseline_of(config, steps)
        name = f"baseline-{steps}-steps"
        baselines[steps] = [run_once(longer, workdir, name, seed) for seed in numbers]
        summary["equal_data"] = summarize_arm(baselines[steps])
    if with_equal_loss:
        found = equal_loss(config, workdir, numbers, runs["tst"], baselines)
        summary["equal_loss_speedup"] = found and found["speedup"]
        summary["equal_loss_speedup_interval"] = found and [found["low"], found["high"]]
        summary["equal_loss_baselines"] = {
            str(steps): [run.final_eval_loss for run in baselines[steps]]
            for steps in sorted(baselines)
        }
    report.write(workdir, summary, baselines, runs["tst"])
    return summary


if __name__ == "__main__":
    from absl import flags

    from tst_jax import cli

    CONFIG = cli.define_config()
    WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the comparison.")
    SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each arm; a claim needs three (rule 24).")
    EQUAL_LOSS = flags.DEFINE_bool("equal_loss", False, "Search the baseline that reaches TST.")
    EQUAL_DATA = flags.DEFINE_bool("equal_data", False, "Add a baseline with as many tokens.")

    def main():
        from tst_jax import programs, report

        config = cli.read_config(CONFIG)
        if not WORKDIR.value:
            raise UserError("--workdir is missing; give the folder of the comparison")
        programs.use_cache()
        summary = compare(config, WORKDIR.value, SEEDS.value, EQUAL_LOSS.value, EQUAL_DATA.value)
        print("\n" + report.text_table(summary))
        print(f"\n{report.verdict(summary)}\nReport: {WORKDIR.value}/report.html")

    cli.run(main, __doc__)
