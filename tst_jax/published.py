"""What the authors of TST published (arXiv 2605.06546), as far as a plan needs it.

Facts of the paper, re-keyed: Table 1, the grids of final losses of Tables 4 to 6, the robust range.
Nothing here was measured with this code. `expected_gain` and `nearest_pair` say what was published
near a run's scale, and how near.
"""

import dataclasses
import math

LABEL = "published, not measured here"

# ---- Table 1


@dataclasses.dataclass(frozen=True)
class Row:
    """A run of Table 1; `model` names a file of configs/."""

    model: str
    bag_size: int  # 1: a baseline
    superposition_steps: int
    steps: int
    superposition_tokens: int
    total_tokens: int
    final_loss: float  # of next tokens, nats
    b200_hours: int  # of GPUs, summed

    @property
    def ratio(self) -> float:
        return self.superposition_steps / self.steps


TABLE_1 = (
    Row("dense_270m", 1, 0, 20_000, 0, 41_943_040_000, 3.212, 34),
    Row("dense_270m", 6, 6_000, 20_000, 75_497_472_000, 104_857_600_000, 3.142, 34),
    Row("dense_270m", 1, 0, 100_000, 0, 209_715_200_000, 3.092, 170),
    Row("dense_270m", 6, 30_000, 100_000, 377_487_360_000, 524_288_000_000, 3.048, 170),
    Row("dense_600m", 1, 0, 20_000, 0, 41_943_040_000, 3.019, 61),
    Row("dense_600m", 6, 6_000, 20_000, 75_497_472_000, 104_857_600_000, 2.943, 61),
    Row("dense_3b", 1, 0, 20_000, 0, 41_943_040_000, 2.808, 247),
    Row("dense_3b", 1, 0, 36_000, 0, 75_497_472_000, 2.677, 443),
    Row("dense_3b", 1, 0, 50_000, 0, 104_857_600_000, 2.64, 622),
    Row("dense_3b", 6, 6_000, 20_000, 75_497_472_000, 104_857_600_000, 2.676, 247),
    Row("moe_10b_a1b", 1, 0, 125_000, 0, 1_048_576_000_000, 2.252, 12_311),
    Row("moe_10b_a1b", 16, 12_483, 49_983, 1_675_439_898_624, 1_990_012_698_624, 2.236, 4_768),
)

# Parameters that a position uses beside embedding and head (they follow from the shapes), and
# positions a step.
ACTIVE = {
    "dense_270m": 119_474_496,
    "dense_600m": 353_956_800,
    "dense_3b": 2_812_430_336,
    "moe_10b_a1b": 962_700_800,
}
STEP_POSITIONS = {
    "dense_270m": 2**21,
    "dense_600m": 2**21,
    "dense_3b": 2**21,
    "moe_10b_a1b": 2**23,
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A TST run of Table 1 and a baseline of the same model."""

    tst: Row
    baseline: Row

    @property
    def step_ratio(self) -> float:
        """Steps of the baseline over TST's: the equal-loss factor where the losses are equal."""
        return self.baseline.steps / self.tst.steps

    @property
    def loss_difference(self) -> float:
        """TST minus baseline, nats a token; below 0 where TST ends lower."""
        return round(self.tst.final_loss - self.baseline.final_loss, 4)


_PAIRS = [
    Pair(tst, baseline)
    for tst in TABLE_1
    for baseline in TABLE_1
    if tst.model == baseline.model and tst.bag_size > 1 == baseline.bag_size
]
EQUAL_STEPS = tuple(pair for pair in _PAIRS if pair.step_ratio == 1)
# Baselines that ran on until their loss was about TST's: 3B, 36,000 steps for 20,000, and the
# mixture of experts, 125,000 for 49,983.
EQUAL_LOSS = tuple(
    pair for pair in _PAIRS if pair.step_ratio > 1 and abs(pair.loss_difference) < 0.02
)

# Choices that the authors found robust over their models.
ROBUST_BAG_SIZES = (4, 8)
ROBUST_RATIOS = (0.2, 0.4)

# ---- Tables 4 to 6: final losses over bag size and ratio, full method, uniform weights

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of the columns below
# {bag size: final loss for each of RATIOS}; None where no figure is printed.
_LOSS_270M_20K: dict[int, tuple[float | None, ...]] = {
    2: (3.1847, 3.1751, 3.1723, 3.172, 3.1729, 3.1755, 3.1807, 3.1904, 3.2131, 4.6099),
    3: (3.1646, 3.1555, 3.1517, 3.151, 3.1527, 3.1563, 3.1635, 3.1768, 3.211, 5.2482),
    4: (3.1549, 3.148, 3.1457, 3.1467, 3.1496, 3.1548, 3.163, 3.1774, 3.2221, 5.6289),
    5: (3.1539, 3.1461, 3.1434, 3.1434, 3.1461, 3.1521, 3.1621, 3.1808, 3.2324, 5.8658),
    6: (3.1496, 3.1425, 3.1423, 3.1444, 3.1485, 3.1545, 3.1664, 3.1879, 3.2487, 6.0365),
    7: (3.148, 3.1393, 3.1392, 3.1409, 3.145, 3.1516, 3.1635, 3.1862, 3.2501, 6.1567),
    8: (3.1495, 3.1419, 3.1425, 3.1452, 3.1506, 3.1587, 3.172, 3.197, 3.2681, 6.2477),
    9: (3.1487, 3.1417, 3.1417, 3.1454, 3.1502, 3.159, 3.173, 3.1998, 3.2765, 6.3146),
    10: (3.1498, 3.1434, 3.1438, 3.1481, 3.1544, 3.1638, 3.1794, 3.2075, 3.2894, 6.3677),
    11: (3.1489, 3.1439, 3.145, 3.1489, 3.1546, 3.1644, 3.1806, 3.2105, 3.2985, 6.4152),
    12: (3.1495, 3.1437, 3.1454, 3.1488, 3.155, 3.1655, 3.1823, 3.2138, 3.3073, 6.4529),
    13: (3.1505, 3.145, 3.1464, 3.1504, 3.1574, 3.1675, 3.1847, 3.2176, 3.3146, 6.4835),
    14: (3.1513, 3.1451, 3.1475, 3.152, 3.1597, 3.1708, 3.1893, 3.2239, 3.3275, 6.5082),
    15: (3.1493, 3.1431, 3.1456, 3.1508, 3.1583, 3.1699, 3.1882, 3.2226, 3.3254, 6.5314),
    16: (3.1487, 3.1455, 3.1484, 3.1534, 3.1611, 3.1734, 3.1922, 3.228, 3.3381, 6.5519),
}
_LOSS_270M_100K: dict[int, tuple[float | None, ...]] = {
    2: (3.0844, 3.0812, 3.0783, 3.0772, 3.0771, 3.078, 3.0805, 3.0852, 3.0984, 4.512),
    3: (3.0711, 3.0662, 3.0652, 3.0639, 3.0652, 3.0668, 3.0703, 3.077, 3.0963, 5.2018),
    4: (3.0603, 3.0534, 3.0519, 3.0517, 3.0533, 3.0557, 3.0601, 3.0683, 3.0908, 5.5772),
    5: (3.0553, 3.0472, 3.0459, 3.0474, 3.0496, 3.0525, 3.0574, 3.067, 3.0934, 5.8255),
    6: (3.0512, 3.0486, 3.048, 3.0493, 3.0513, 3.0553, 3.0608, 3.0711, 3.1009, 5.9952),
    7: (3.0488, 3.0465, 3.0463, 3.0475, 3.0497, 3.0535, 3.0597, 3.0706, 3.102, 6.1179),
    8: (3.0488, 3.0479, 3.0485, 3.0506, 3.0534, 3.0577, 3.0642, 3.0761, 3.1097, 6.2156),
    9: (3.0508, 3.0501, 3.051, 3.0527, 3.0556, 3.0604, 3.0673, 3.08, 3.1161, 6.2891),
    10: (3.0506, 3.0503, 3.0515, 3.054, 3.0575, 3.0623, 3.0697, 3.0827, 3.1209, 6.3461),
    11: (3.051, 3.0502, 3.0514, 3.0535, 3.057, 3.062, 3.0694, 3.083, 3.1236, 6.389),
    12: (3.0511, 3.0517, 3.0538, 3.0571, 3.0611, 3.066, 3.0738, 3.0881, 3.1306, 6.4285),
    13: (3.0525, 3.0524, 3.0551, 3.0588, 3.0627, 3.0681, 3.0762, 3.0909, 3.1348, 6.4628),
}
_LOSS_600M_20K: dict[int, tuple[float | None, ...]] = {
    2: (2.9876, 2.9782, 2.9757, 2.9757, 2.977, 2.98, 2.9857, 2.9946, 3.015, 4.3622),
    3: (2.9697, 2.9595, 2.9569, 2.9576, 2.9601, 2.9648, 2.9723, 2.9865, 3.0194, 5.0131),
    4: (2.9597, 2.9508, 2.9492, 2.9507, 2.9547, 2.9605, 2.9702, 2.9874, 3.0305, 5.4091),
    5: (2.9541, 2.9461, 2.9461, 2.948, 2.9523, 2.9593, 2.9708, 2.9918, 3.0441, None),
    6: (2.9522, 2.944, 2.9439, 2.9465, 2.9517, 2.9598, 2.9726, 2.9955, 3.0546, 5.8477),
    7: (2.9525, 2.9447, 2.9445, 2.9466, 2.9518, 2.9605, 2.9747, 3.0, 3.0659, 5.988),
    8: (2.9499, 2.9434, 2.9439, 2.9477, 2.9544, 2.9645, 2.9801, 3.0079, 3.0811, 6.0884),
    9: (2.9517, 2.945, 2.9458, 2.9497, 2.9563, 2.9668, 2.9832, 3.0132, 3.0915, 6.1684),
    10: (2.9507, 2.945, 2.9464, 2.9508, 2.9583, 2.9695, 2.9871, 3.0181, 3.1029, 6.2315),
    11: (2.9503, 2.9437, 2.9467, 2.9523, 2.9607, 2.9724, 2.9911, 3.0243, 3.1146, 6.2853),
    12: (2.9498, 2.9457, 2.9488, 2.9549, 2.9636, 2.9764, 2.9962, 3.031, 3.1264, 6.3318),
    13: (2.9514, 2.9465, 2.9501, 2.9558, 2.9647, 2.9779, 2.9987, 3.0356, 3.1366, 6.3679),
}


@dataclasses.dataclass(frozen=True)
class Grid:
    """Final losses of a model, each cell a whole run of the same steps."""

    table: int  # of the paper
    model: str
    steps: int
    baseline: float  # its final loss without superposition
    losses: dict[int, tuple[float | None, ...]]

    @property
    def name(self) -> str:
        return f"Table {self.table}, {self.model}, {self.steps:,} steps"

    def loss(self, bag_size: int, ratio: float) -> float | None:
        """Of one cell, None where there is none."""
        if bag_size not in self.losses or ratio not in RATIOS:
            return None
        return self.losses[bag_size][RATIOS.index(ratio)]


GRIDS = (
    Grid(4, "dense_270m", 20_000, 3.2124, _LOSS_270M_20K),
    Grid(5, "dense_270m", 100_000, 3.0921, _LOSS_270M_100K),
    Grid(6, "dense_600m", 20_000, 3.0186, _LOSS_600M_20K),
)

# ---- What that says of another run

FAR = 10.0  # times the parameters or positions, either way: beyond, no figure is carried over


@dataclasses.dataclass(frozen=True)
class Distance:
    """A run's size over a published one's."""

    parameters: float
    positions: float

    @property
    def log(self) -> float:
        return math.hypot(math.log(self.parameters), math.log(self.positions))

    @property
    def far(self) -> bool:
        """Whether either differs by more than FAR."""
        return max(abs(math.log(x)) for x in (self.parameters, self.positions)) > math.log(FAR)


def distance(active: int, positions: int, model: str, steps: int) -> Distance:
    """How far a run is from a published one of `model` over `steps` steps.

    Args:
      active: parameters that a position uses, tables left out: what a position costs follows them.
      positions: that are trained on, N B L: the same for TST and its baseline.
    """
    trained = steps * STEP_POSITIONS[model]
    return Distance(active / ACTIVE[model], positions / trained)


def nearest_pair(active: int, positions: int) -> tuple[Pair, Distance]:
    """The TST run of Table 1 with a baseline of as many steps that is nearest in scale."""
    away = {
        pair: distance(active, positions, pair.tst.model, pair.tst.steps) for pair in EQUAL_STEPS
    }
    pair = min(away, key=lambda pair: away[pair].log)
    return pair, away[pair]


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a grid says of a run, or why it says nothing."""

    grid: Grid
    distance: Distance
    loss_difference: float | None  # TST minus baseline, nats a token
    why_none: str  # "" beside a figure


def expected_gain(active: int, positions: int, bag_size: float, ratio: float) -> Expected:
    """The published loss of TST minus its baseline, at the run's s and r, near the run's scale.

    The grid is the one whose scale is nearest: the Euclidean distance of (log active parameters,
    log positions trained on). Between its cells the loss is bilinear in (r, s). None where
    a cell that this needs was not published, at r = 1 (no recovery, so no next-token model), and
    where the scale is FAR.

    Args:
      active, positions: as for `distance`.
      bag_size, ratio: s and r; a single stage of the full method with uniform weights.
    """
    away = lambda grid: distance(active, positions, grid.model, grid.steps)
    grid = min(GRIDS, key=lambda grid: away(grid).log)
    found = interpolated(grid, bag_size, ratio)
    why = ""
    if away(grid).far:
        found, why = None, f"more than {FAR:g} times away"
    elif found is None:
        top = max(grid.losses)
        why = f"which holds s 2 to {top} and r {RATIOS[0]} to {RATIOS[-2]}"
    return Expected(grid, away(grid), found, why)


def interpolated(grid: Grid, bag_size: float, ratio: float) -> float | None:
    """Loss of TST minus the grid's baseline, bilinear in (r, s) between cells; None outside."""
    shares = {
        (bag, column): bag_share * ratio_share
        for bag, bag_share in _around(bag_size, sorted(grid.losses)).items()
        for column, ratio_share in _around(ratio, RATIOS[:-1]).items()
    }
    losses = [grid.loss(*cell) for cell in shares]
    if not losses or None in losses:
        return None
    return sum(loss * share for loss, share in zip(losses, shares.values())) - grid.baseline


def _around(value: float, points) -> dict[float, float]:
    """{point: share} of the one or two points that `value` lies at or between; {} outside."""
    for low, high in zip(points, points[1:]):
        if low <= value <= high:
            share = (value - low) / (high - low)
            return {point: x for point, x in ((low, 1 - share), (high, share)) if x > 0}
    return {}
