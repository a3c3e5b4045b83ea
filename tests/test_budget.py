"""Proves `tst_jax.budget` and `tst_jax.published`.

Hours by hand, bounds of a corpus at their exact edge (rule 21), the paper's grids (arXiv
2605.06546, Tables 1 and 4 to 6) at their cells and between them, and silence where nothing was
published.
"""

import dataclasses
import pathlib

import pytest

from tst_jax import budget, config_file, flops, plan, published
from tst_jax.config import Config
from tst_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def config():
    """1,000 steps of 4 rows of 8: a baseline reads 32,000 tokens, this TST run 80,000."""
    cfg = Config(steps=1000)
    cfg.data.store, cfg.data.rows, cfg.data.positions = "x", 4, 8
    cfg.tst.bag_size, cfg.tst.ratio = 6, 0.3
    return cfg


# ---- tokens and hours


@pytest.mark.parametrize(
    "text, tokens",
    [
        ("80e9", 80_000_000_000),
        ("80_000_000_000", 80_000_000_000),
        ("80B", 80_000_000_000),
        ("80b", 80_000_000_000),
        ("1.5T", 1_500_000_000_000),
        ("1.23456789e8", 123_456_789),
        ("750M", 750_000_000),
        ("12k", 12_000),
        ("1", 1),
        ("1e18", 10**18),
        ("999_999_999_999_999_999", 999_999_999_999_999_999),  # no float holds it
    ],
)
def test_counts_of_tokens(text, tokens):
    assert budget.parse_tokens(text) == tokens


@pytest.mark.parametrize(
    "text",
    ["", "lots", "nan", "inf", "-80B", "0", "0B", "0.5", "1.5", "80G", "80BB", "80e9B", "8e-3"]
    + ["80,000", "1e19", "9" * 400, "1e99", "_8", "8__0", " 80B", "80e9\n", "０"],
)
def test_no_counts_of_tokens(text):
    with pytest.raises(UserError, match="--corpus_tokens is .*give a whole number") as caught:
        budget.parse_tokens(text)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_short_numbers():
    numbers = {999: "999", 94_528: "94.53K", 104_857_600_000: "104.9B", 999_990: "1M"}
    numbers |= {1_990_012_698_624: "1.99T", 10**18: "1000Q"}
    assert {number: budget.short(number) for number in numbers} == numbers
    assert budget.short(419_430_400_000, "B") == "419.4 GB" and budget.short(7, "B") == "7 B"


def test_hours_by_hand():
    """The 270M run: one position costs three forward passes of 30 layers and a head."""
    layer = 4 * 2 * 576 * (9 * 64) + 4 * 2048 * (9 * 64) + 6 * 576 * 1536  # whole attention
    position = 3 * (30 * layer + 2 * 576 * 128_256)
    run = 20_000 * 2**21 * position
    figures = plan.plan(
        config_file.load_config(ROOT / "configs/dense_270m.py"), "b200", chips=8, mfu=0.25
    )
    assert figures["flops_full_attention"] == run
    half = 3 * 30 * (4 * 2048 * (9 * 64)) // 2
    assert figures["flops"] == 20_000 * 2**21 * (position - half)
    seconds = run / (8 * 2.25e15 * 0.25)
    assert figures["hours"] == pytest.approx(seconds / 3600, rel=1e-12)
    assert figures["chip_hours"] == pytest.approx(8 * seconds / 3600, rel=1e-12)
    # Twice the share of the peak, half the hours; 40 percent of one chip where nothing is said.
    assert budget.hours(3.6e18, "v5p", 10, 0.5) == pytest.approx(1e15 / (10 * 459e12 * 0.5))
    plain = plan.plan(config_file.load_config(ROOT / "configs/dense_270m.py"), "v4")
    assert (plain["chips"], plain["mfu"]) == (1, 0.4)
    assert plain["hours"] == pytest.approx(run / (275e12 * 0.4) / 3600)


def test_peaks_of_devices():
    kinds = {
        "TPU v4": 275e12,
        "TPU v5 lite": 197e12,
        "TPU v5p": 459e12,
        "TPU v5": 459e12,
        "TPU v6 lite": 918e12,
        "TPU7x": 2307e12 / 2,  # jax shows a chip as two devices
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H200": 989e12,
        "NVIDIA B200": 2250e12,
    }
    assert {kind: flops.device_peak_flops(kind) for kind in kinds} == kinds
    assert {flops.accelerator(kind) for kind in kinds} == set(flops.PEAK_FLOPS)
    # No MFU rather than a wrong one (rule 22): slower boards, parts of one, and what is not listed.
    unknown = ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H20", "NVIDIA GB200", "TPU v4 lite")
    for kind in (*unknown, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", ""):
        assert flops.accelerator(kind) is None and flops.device_peak_flops(kind) is None
    assert set(flops.DEVICE_KINDS.values()) == set(flops.PEAK_FLOPS) >= set(flops.DEVICES_PER_CHIP)


@pytest.mark.parametrize("vocab_size, itemsize", [(61, 2), (65_536, 2), (65_537, 4)])
def test_bytes_of_a_store(vocab_size, itemsize):
    assert budget.store_bytes(1000, vocab_size) == 1000 * itemsize


# ---- a corpus


def read(config, bag_size, steps):
    """Tokens of the run with another phase of superposition, by the formula of rule 21."""
    return 32 * (steps * bag_size + config.steps - steps)


@pytest.mark.parametrize("tokens", [32_000, 32_159, 32_160, 50_000, 79_999, 80_000, 10**7])
def test_bounds_of_a_corpus_are_exact(config, tokens):
    found = budget.corpus(config, tokens)
    assert found["epochs"] == 80_000 / tokens and found["baseline_epochs"] == 32_000 / tokens
    assert found["r_times_s_minus_1"] == 1.5
    assert found["r_times_s_minus_1_at_most"] == pytest.approx(tokens / 32_000 - 1)
    steps, bag_size = found["superposition_steps_at_most"], found["bag_size_at_most"]
    assert read(config, 6, steps) <= tokens
    assert steps == 1000 or read(config, 6, steps + 1) > tokens
    assert read(config, bag_size, 300) <= tokens < read(config, bag_size + 1, 300)
    # The run with these settings reads as much, and one step of the grid more reads too much.
    config.tst.ratio = found["ratio_at_most"]
    assert budget.spent(config)["superposition_steps"] == steps
    assert budget.spent(config)["total_tokens"] == read(config, 6, steps)
    # The bound on the product: s = 101 moves r (s - 1) in steps of 0.1.
    steps = int(found["r_times_s_minus_1_at_most"] * 10)
    assert read(config, 101, steps) <= tokens < read(config, 101, steps + 1)


def test_bounds_hold_for_other_forms_of_the_phase(config):
    expected = budget.corpus(config, 50_000)
    config.tst.expand = "batch"  # as many tokens; 8 positions are no multiple of most bag sizes
    config.tst.bag_size, config.tst.ratio = 4, 0.5
    found = budget.corpus(config, 50_000)
    assert found["superposition_steps_at_most"] == 18_000 // (3 * 32)
    assert found["bag_size_at_most"] == 1 + 18_000 // (500 * 32)
    config.tst.bag_size, config.tst.expand, config.tst.ratio = 6, "length", 0.9
    config.tst.superposition_steps = 300
    assert budget.corpus(config, 50_000) == expected

    config.data.rows_from = "500:8"  # twice the rows from the middle on: 48,000 for a baseline
    found = budget.corpus(config, 48_000 + 32 * 5 * 123)
    assert found["superposition_steps_at_most"] == 123
    assert found["r_times_s_minus_1_at_most"] is None
    config.data.rows_from = ""

    config.tst.superposition_steps, config.tst.stages = -1, "8:0.1,4:0.2"
    found = budget.corpus(config, 50_000)
    assert found["r_times_s_minus_1"] == pytest.approx(0.1 * 7 + 0.2 * 3)
    assert found["ratio_at_most"] is found["bag_size_at_most"] is None
    assert found["r_times_s_minus_1_at_most"] == pytest.approx(18 / 32)


def test_bounds_that_there_are_not(config):
    found = budget.corpus(config, 31_999)  # even the baseline repeats
    assert found["baseline_epochs"] > 1
    assert {value for name, value in found.items() if name.endswith("at_most")} == {None}
    config.tst.ratio = 0.0
    found = budget.corpus(config, 40_000)
    assert found["superposition_steps_at_most"] == 8_000 // (5 * 32)
    assert found["bag_size_at_most"] is None and found["epochs"] == 0.8
    config.tst.ratio, config.tst.mode = 0.3, "output"
    found = budget.corpus(config, 40_000)
    assert found["epochs"] == 0.8 and found["r_times_s_minus_1_at_most"] is None


# ---- what was published


def test_grids_agree_with_table_1():
    """Two places of the paper that give one figure; a slip of a key would part them."""
    for grid in published.GRIDS:
        rows = [r for r in published.TABLE_1 if (r.model, r.steps) == (grid.model, grid.steps)]
        baseline, tst = sorted(rows, key=lambda row: row.bag_size)
        assert grid.baseline == pytest.approx(baseline.final_loss, abs=5.1e-4)
        assert grid.loss(6, 0.3) == pytest.approx(tst.final_loss, abs=1.1e-3)  # of 600M by 0.0009
        assert all(len(row) == len(published.RATIOS) for row in grid.losses.values())
        assert sorted(grid.losses) == list(range(2, len(grid.losses) + 2))
        # A smooth surface: no cell is far from the mean of its neighbours.
        for bag, row in grid.losses.items():
            for at in range(1, 6):
                assert abs(row[at] - (row[at - 1] + row[at + 1]) / 2) < 0.005, (grid.name, bag)
    sizes = [len(grid.losses) for grid in published.GRIDS]
    assert sizes == [15, 12, 12]


def test_scales_are_those_of_the_configs():
    for name, active in published.ACTIVE.items():
        cfg = config_file.load_config(ROOT / f"configs/{name}.py")
        assert plan.count_parameters(cfg.model)[1] == active
        assert cfg.data.rows * cfg.data.positions == published.STEP_POSITIONS[name]


def test_factors_of_equal_loss():
    dense, moe = published.EQUAL_LOSS
    assert (dense.tst.model, dense.step_ratio, dense.loss_difference) == ("dense_3b", 1.8, -0.001)
    assert moe.tst.model == "moe_10b_a1b" and moe.step_ratio == pytest.approx(2.5, abs=1e-3)
    assert len(published.EQUAL_STEPS) == 4
    assert {pair.loss_difference for pair in published.EQUAL_STEPS} == {
        *(-0.07, -0.044, -0.076, -0.132)
    }


def at(grid, bag_size, ratio):
    """`expected_gain` at the scale of a grid."""
    positions = grid.steps * published.STEP_POSITIONS[grid.model]
    found = published.expected_gain(published.ACTIVE[grid.model], positions, bag_size, ratio)
    assert found.grid is grid
    assert (found.loss_difference is None) == bool(found.why_none)
    return found.loss_difference


@pytest.mark.parametrize("grid", published.GRIDS, ids=lambda grid: grid.name)
def test_expected_is_the_table_at_its_cells_and_between_them(grid):
    for bag, row in grid.losses.items():
        for ratio, loss in zip(published.RATIOS[:-1], row):
            assert at(grid, bag, ratio) == pytest.approx(loss - grid.baseline, abs=1e-12)
    cells = [at(grid, bag, ratio) for bag in (5, 6) for ratio in (0.6, 0.7)]
    middle = at(grid, 5.5, 0.65)
    assert min(cells) < middle < max(cells) and middle == pytest.approx(sum(cells) / 4)
    # Three quarters of the way from r = 0.6 to 0.7.
    assert at(grid, 5, 0.675) == pytest.approx(cells[0] / 4 + 3 * cells[1] / 4)
    assert at(grid, 5.25, 0.6) == pytest.approx(3 * cells[0] / 4 + cells[2] / 4)


def test_figures_of_the_paper_by_hand():
    short, long, larger = published.GRIDS
    assert at(short, 16, 0.9) == pytest.approx(3.3381 - 3.2124)
    assert at(long, 5, 0.3) == pytest.approx(3.0459 - 3.0921)
    assert at(larger, 8, 0.2) == pytest.approx(2.9434 - 3.0186)


def test_nothing_where_nothing_was_published():
    for grid in published.GRIDS:
        top = max(grid.losses)
        for bag, ratio in ((1, 0.3), (top + 1, 0.3), (6, 0), (6, 0.05), (6, 0.95), (6, 1.0)):
            assert at(grid, bag, ratio) is None, (bag, ratio)
    # A cell that is missing takes with it what lies between it and its neighbours, and no more.
    grid = published.GRIDS[0]
    row = grid.losses[6]
    holes = dataclasses.replace(grid, losses=grid.losses | {6: (*row[:2], None, *row[3:])})
    assert published.interpolated(holes, 6, 0.3) is None
    assert published.interpolated(holes, 6, 0.25) is None
    assert published.interpolated(holes, 6.5, 0.3) is None
    assert published.interpolated(holes, 6, 0.2) == pytest.approx(row[1] - grid.baseline)
    assert published.interpolated(holes, 7, 0.3) is not None


def test_the_nearest_scale_is_taken_and_its_distance_told():
    active, positions = published.ACTIVE["dense_270m"], 20_000 * 2**21
    short, long, larger = published.GRIDS
    found = published.expected_gain(2 * active, positions // 2, 6, 0.3)
    assert found.grid is larger  # 1.5 times as large as this run; the 270M model half as large
    assert found.distance.parameters == pytest.approx(2 * 119_474_496 / 353_956_800)
    assert found.distance.positions == 0.5
    assert published.expected_gain(active, 3 * positions, 6, 0.3).grid is long  # beyond sqrt(5)
    assert published.expected_gain(active, 2 * positions, 6, 0.3).grid is short


def test_a_figure_is_not_carried_more_than_ten_times_away():
    active, positions = published.ACTIVE["dense_600m"], 20_000 * 2**21
    assert published.expected_gain(9.9 * active, positions, 6, 0.3).loss_difference is not None
    found = published.expected_gain(10.1 * active, positions, 6, 0.3)
    assert found.loss_difference is None and found.why_none == "more than 10 times away"
    for near, far in ((9.99, 10.01), (1 / 9.99, 1 / 10.01)):
        assert not published.Distance(near, 1).far and not published.Distance(1, near).far
        assert published.Distance(far, 1).far and published.Distance(1, far).far


def test_the_nearest_pair_of_table_1():
    """At 3B the paper has a pair but no grid."""
    pair, away = published.nearest_pair(published.ACTIVE["dense_3b"], 20_000 * 2**21)
    assert (pair.tst.final_loss, pair.baseline.final_loss) == (2.676, 2.808)
    assert (away.parameters, away.positions, away.far) == (1, 1, False)
