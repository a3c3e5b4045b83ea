"""Sweeps: which runs a grid needs, what of them is done, and what is said of the results."""

import csv
import subprocess
import sys

import pytest
from small_run import ROOT, environment, write_config
from test_evaluate import small_store

from tst_jax import compare, config_file, metrics, sweep_report, workdir
from tst_jax import config as config_lib
from tst_jax.ablations import ABLATIONS, ablated
from tst_jax.compare import Run, run_once
from tst_jax.errors import UserError
from tst_jax.lock import Lock
from tst_jax.sweep import (
    adopt,
    check_place,
    make_sweep,
    parse_grid,
    result,
    results,
    train_all,
)

GRID = "tst.bag_size=2,4;tst.ratio=0,0.4;seed=0,1"


@pytest.fixture
def variant(config):
    """What `cli.variant` does, of the tests' config."""

    def make(settings, arm=None):
        changed = ablated(config, arm or "tst")
        for name, text in settings.items():
            part, _, field = name.rpartition(".")
            place = getattr(changed, part) if part else changed
            setattr(place, field, type(getattr(place, field))(text))
        return changed

    return make


def test_axes():
    assert parse_grid(" tst.bag_size = 2, 4 ;\n seed=0;") == {
        "tst.bag_size": ["2", "4"],
        "seed": ["0"],
    }
    for text in ("", ";", "tst.ratio", "tst.ratio=", "tst.ratio=0.1,,0.2", "=1"):
        with pytest.raises(UserError, match="^--grid"):
            parse_grid(text)
    for text in ("seed=0;seed=1", "seed=1,2,1"):
        with pytest.raises(UserError, match="repeats"):
            parse_grid(text)


def test_cells_that_train_the_same_are_one_run(variant):
    """Ratio 0 is the baseline whatever the bag size: 8 cells, 6 runs."""
    sweep = make_sweep(parse_grid(GRID), variant)
    assert [list(cell.values.values()) for cell in sweep.cells][:3] == [
        ["2", "0", "0"],
        ["2", "0", "1"],
        ["2", "0.4", "0"],
    ]
    assert len(sweep.cells) == 8 and len(sweep.runs) == 6
    baselines = {cell.run for cell in sweep.cells if cell.values["tst.ratio"] == "0"}
    assert baselines == {"baseline,seed=0", "baseline,seed=1"}
    one = sweep.runs["tst.bag_size=4,tst.ratio=0.4,seed=1"]
    assert (one.tst.bag_size, one.tst.ratio, one.seed) == (4, 0.4, 1)
    assert sweep.runs["baseline,seed=1"].seed == 1


def test_all_that_cannot_work_is_said_at_once(variant):
    with pytest.raises(UserError) as error:
        make_sweep(parse_grid("tst.ratio=0.4,2,3;tst.bag_size=2,0"), variant)
    lines = str(error.value).splitlines()
    for word in ("tst.ratio is 2", "tst.ratio is 3", "tst.bag_size is 0"):
        assert sum(word in line for line in lines) == 1


def write_run(folder, config, loss, steps=None):
    """A folder as `train` would leave it."""
    folder.mkdir(parents=True)
    workdir.write_config(folder, config)
    writer = metrics.Writer(folder)
    step = config.steps if steps is None else steps
    writer.write({"step": step, "loss": 1.0, "tokens": 7 * step, "flops": 9 * step})
    writer.write({"step": step, "eval_loss": loss, "eval_bits_per_byte": None})
    writer.close()


def test_what_is_finished(config, tmp_path):
    assert result(tmp_path / "none", config) is None
    write_run(tmp_path / "half", config, 3.0, steps=10)
    assert result(tmp_path / "half", config) is None
    write_run(tmp_path / "whole", config, 3.0)
    assert result(tmp_path / "whole", config).final_eval_loss == 3.0
    config.log_every = 5  # harmless
    assert result(tmp_path / "whole", config)
    config.seed = 9
    with pytest.raises(UserError, match="other settings.*seed: 0 -> 9"):
        result(tmp_path / "whole", config)


def test_runs_of_another_grid_are_taken_over(
    variant, make_config, store, tmp_path, monkeypatch, capsys
):
    first = make_sweep(parse_grid("tst.ratio=0,0.4;seed=0"), variant)
    for name, config in first.runs.items():
        write_run(tmp_path / "runs" / name, config, 3.0)
    second = make_sweep(parse_grid("arm=tst,baseline,input_only;seed=0,1"), variant)
    second = adopt(second, tmp_path)
    assert [cell.run for cell in second.cells] == [
        *("tst.ratio=0.4,seed=0", "arm=tst,seed=1", "baseline,seed=0", "baseline,seed=1"),
        *("arm=input_only,seed=0", "arm=input_only,seed=1"),
    ]
    assert set(results(second, tmp_path)) == set(first.runs)
    # A comparison finds them too, by their settings.
    config, checked = make_config(store), []
    monkeypatch.setattr(compare, "check_data", lambda folder, _: checked.append(folder.name))
    assert run_once(config, tmp_path, "tst", 0).final_eval_loss == 3.0
    assert checked == ["tst.ratio=0.4,seed=0"]
    monkeypatch.undo()  # its checkpoints removed, to save room: what it read cannot be told
    for make in (lambda: None, (tmp_path / "runs/tst.ratio=0.4,seed=0/checkpoints").mkdir):
        make()
        assert run_once(config, tmp_path, "tst", 0).final_eval_loss == 3.0
        assert "seed=0 has no checkpoint left to tell which data" in capsys.readouterr().out
    (tmp_path / "foreign").mkdir()
    check_place(tmp_path / "foreign")
    (tmp_path / "foreign/notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty and no sweep"):
        check_place(tmp_path / "foreign")


# ---- what is said of it

LOSSES = {  # of seeds 0 and 1
    ("2", "0"): (3.0, 3.1),
    ("2", "0.4"): (2.9, 2.98),
    ("4", "0.4"): (2.8, 2.88),
}


def fake_result(config, loss):
    steps = [{"step": 20, "loss": 1.0, "tokens": 140, "flops": 180}]
    return Run(config, steps, [{"step": 20, "eval_loss": loss, "eval_bits_per_byte": None}])


@pytest.fixture
def done(variant):
    """(sweep, results) of GRID."""
    sweep = make_sweep(parse_grid(GRID), variant)
    found = {}
    for cell in sweep.cells:
        bag, ratio, seed = cell.values.values()
        loss = LOSSES["2" if ratio == "0" else bag, ratio][int(seed)]
        found[cell.run] = fake_result(sweep.runs[cell.run], loss)
    return sweep, found


def test_differences_are_paired_by_seed(done):
    found = {
        (p.values["tst.bag_size"], p.values["tst.ratio"]): p for p in sweep_report.points(*done)
    }
    assert found["2", "0"].baseline and found["4", "0"].losses == found["2", "0"].losses
    point = found["4", "0.4"]
    assert point.mean == pytest.approx(2.84) and point.stderr == pytest.approx(0.04)
    assert point.difference == pytest.approx(-0.21)
    assert point.difference_stderr == pytest.approx(0.01)  # of -0.20 and -0.22
    assert found["2", "0"].difference is None


def test_the_best_and_its_noise(done):
    sweep, found = done
    text = sweep_report.best(sweep_report.points(sweep, found))
    assert text.startswith("Best: tst.bag_size 4, tst.ratio 0.4, held-out loss 2.8400 ± 0.0400")
    assert "may be noise" not in text  # 0.1 apart in both seeds
    name = "tst.bag_size=2,tst.ratio=0.4,seed=1"
    found[name] = fake_result(sweep.runs[name], 2.78)
    assert "may be noise" in sweep_report.best(sweep_report.points(sweep, found))


def test_the_files_of_a_report(done, tmp_path):
    sweep, found = done
    missing = found.pop("tst.bag_size=4,tst.ratio=0.4,seed=1")
    text = sweep_report.write(tmp_path / "grid", sweep, found)
    assert "1 of 6 runs are not finished" in text
    with open(tmp_path / "grid.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8 and [row["seed"] for row in rows] == ["0", "1"] * 4
    losses = {row["run"]: row["eval_loss"] for row in rows}
    assert losses.pop("tst.bag_size=4,tst.ratio=0.4,seed=1") == ""
    assert {run: float(loss) for run, loss in losses.items()} == {
        run: one.final_eval_loss for run, one in found.items()
    }
    table = (tmp_path / "grid.md").read_text()
    assert "-0.1100 ± 0.0100" in table and "-11.0" in table and "(grid.png)" in table
    assert table.count("| baseline |") == 1  # one run, whatever the bag size
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert missing.final_eval_loss == 2.88


@pytest.mark.parametrize(
    "grid",
    [
        "seed=0",
        "arm=tst,baseline,mass;seed=0,1",
        "schedule.peak_lr=1e-3,2e-3,8e-3",
        "schedule.peak_lr=1e-3,2e-3;arm=tst,baseline",
        "tst.bag_size=2,4;tst.ratio=0.1,0.4;data.rows=4,8;seed=0,1",
    ],
)
def test_every_kind_of_grid_has_a_picture(variant, tmp_path, grid):
    sweep = make_sweep(parse_grid(grid), variant)
    found = {name: fake_result(c, 3 + i / 10) for i, (name, c) in enumerate(sweep.runs.items())}
    sweep_report.write(tmp_path / "sweep", sweep, found)
    assert (tmp_path / "sweep.png").stat().st_size > 5_000


# ---- ablations


@pytest.mark.parametrize("arm", ABLATIONS)
def test_each_ablation_is_a_config_that_differs_in_the_method_alone(arm):
    file = ROOT / "configs/studies/python.py"
    plain, changed = (config_file.load_config(f"{file}{name}") for name in ("", f":{arm}"))
    assert config_lib.problems(changed) == []
    old, new = (workdir.plain(config) for config in (plain, changed))
    names = {line.split(":")[0] for line in config_lib.differences(old, new)}
    assert names == {f"tst.{name}" for name in ABLATIONS[arm]}
    stages = config_lib.stages(changed)
    superposed = [stage for stage in stages if stage.bag_size > 1]
    assert bool(superposed) == (arm != "baseline")
    if arm not in ("baseline", "auxiliary"):  # the others superpose for as long as TST does
        assert superposed[-1].stop == config_lib.stages(plain)[0].stop
    if arm == "auxiliary":  # reads what the baseline reads
        assert {stage.step_tokens for stage in stages} == {stages[-1].step_tokens}


def test_an_unknown_ablation_is_one_line(config):
    with pytest.raises(UserError, match="the arm is 'input'; choose one of .* did you mean"):
        ablated(config, "input")


# ---- the command


def test_stores_are_looked_at_once_and_before_anything_is_written(variant, tmp_path):
    grid = f"data.store={tmp_path}/none;model.vocab_size=61,99;tst.ratio=0,0.4;seed=0,1"
    with pytest.raises(UserError) as caught:
        train_all(make_sweep(parse_grid(grid), variant), tmp_path / "sweep", 2)
    (line,) = str(caught.value).splitlines()
    assert f"{tmp_path}/none: no such folder; make a store" in line
    grid = "model.vocab_size=60,61,5000;seed=0,1"
    with pytest.raises(UserError) as caught:
        train_all(make_sweep(parse_grid(grid), variant), tmp_path / "sweep", 2)
    assert [line[:25] for line in str(caught.value).splitlines()] == [
        "model.vocab_size is 60 an",
        "model.vocab_size is 5000 ",
    ]
    assert not (tmp_path / "sweep").exists()


def sweep_command(*arguments, **more):
    return subprocess.run(
        [sys.executable, "-m", "tst_jax.sweep", *arguments],
        env=environment(**more),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_the_command_trains_what_is_left_and_reports(store, tmp_path):
    """Two processes; one cell diverges, one is another's; the rest is trained once and no more."""
    write_config(tmp_path / "c.py", store, steps=10)
    folder = tmp_path / "sweep"
    arguments = [f"--config={tmp_path}/c.py", f"--workdir={folder}", "--config.eval.every=0"]
    arguments += ["--grid=schedule.peak_lr=1e-2,1e30;tst.superposition_steps=4,0;seed=0"]
    listed = sweep_command(*arguments, "--list")
    assert listed.returncode == 0 and listed.stdout.count("  -  ") == 4
    held = folder / "runs/baseline,schedule.peak_lr=1e-2,seed=0"
    held.mkdir(parents=True)
    with Lock(held):
        done = sweep_command(*arguments, "--processes=2")
    assert done.returncode == 2, done.stdout + done.stderr
    errors = done.stderr.splitlines()
    assert len(errors) == 3 and sum("another process trains it" in line for line in errors) == 1
    assert sum("peak_lr=1e30" in line and "finite" in line for line in errors) == 2
    assert "3 of 4 runs are not finished" in done.stdout
    one = folder / "runs/schedule.peak_lr=1e-2,tst.superposition_steps=4,seed=0"
    before = (one / "metrics.jsonl").stat().st_mtime_ns

    listed = sweep_command(*arguments, "--list").stdout.splitlines()
    number = next(line.split()[0] for line in listed if line.endswith(held.name))
    assert sweep_command(*arguments, f"--cell={number}").returncode == 0
    grid = arguments[-1].replace(",1e30", "")
    done = sweep_command(*arguments[:-1], grid, "--report=again")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs are finished" in done.stdout
    assert (one / "metrics.jsonl").stat().st_mtime_ns == before
    with open(folder / "again.csv") as file:
        rows = {row["run"]: float(row["eval_loss"]) for row in csv.DictReader(file)}
    for name, loss in rows.items():
        lines = metrics.read_metrics(folder / "runs" / name)
        assert [line["eval_loss"] for line in lines if "eval_loss" in line][-1] == loss
    # Prepared anew, it is other data: what is finished does not compare with what would come.
    small_store(tmp_path / "other", 3)
    done = sweep_command(*arguments[:-1], grid, f"--config.data.store={tmp_path}/other")
    assert done.returncode == 2 and "was trained" in done.stderr and "sweep:" not in done.stdout


def test_a_job_of_a_slurm_array_trains_its_cell(machine):
    run = ["--config=configs/quickstart.py", "--workdir=/w", "--grid=seed=0,1;tst.ratio=0,0.3"]
    done = machine.run("slurm_sweep.sbatch", *run, "--config.steps=9", SLURM_ARRAY_TASK_ID="3")
    assert done.returncode == 0, done.stderr
    (call,) = machine.calls()
    assert call[0] == "srun"
    wanted = ["-m", "tst_jax.sweep", *run[:3], "--config.steps=9", "--cell=3"]
    assert call[-len(wanted) :] == wanted
    machine.answer("srun*) exit 75 ;;")
    done = machine.run("slurm_sweep.sbatch", *run, SLURM_ARRAY_TASK_ID="0", SLURM_JOB_ID="17")
    assert done.returncode == 0 and machine.calls()[-1] == ["scontrol", "requeue", "17"]
    done = machine.run("slurm_sweep.sbatch", *run, "--allow_changes=steps")
    assert done.returncode == 2 and "--allow_changes is for one run" in done.stderr
    done = machine.run("slurm_sweep.sbatch", *run)
    assert done.returncode == 2 and "--array=0-N" in done.stderr
    done = machine.run("slurm_sweep.sbatch", *run[:2], SLURM_ARRAY_TASK_ID="0")
    assert done.returncode == 2 and "--grid is missing" in done.stderr
