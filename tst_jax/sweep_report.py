"""What a sweep shows a person: a CSV of its cells, a table of means over seeds, and pictures."""

import csv
import dataclasses
import itertools
import pathlib
import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tst_jax import config as config_lib
from tst_jax.compare import stderr
from tst_jax.sweep import Sweep

SEED = "seed"


@dataclasses.dataclass(frozen=True)
class Point:
    """A cell of the grid over its seeds, as far as they are finished."""

    values: dict[str, str]  # without the seed
    losses: dict[str, float]  # seed -> final held-out loss
    baseline: bool
    difference: float | None = None  # from the baseline, mean of the pairs of seeds
    difference_stderr: float | None = None

    @property
    def mean(self) -> float:
        return statistics.mean(self.losses.values())

    @property
    def stderr(self) -> float | None:
        return stderr(list(self.losses.values()))

    @property
    def label(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items()) or "the run"


def points(sweep: Sweep, results) -> list[Point]:
    """Cells that have a finished run, in the grid's order, each with its distance from the baseline
    that shares the settings outside `tst` and the seeds, if there is one."""
    groups: dict[tuple, dict] = {}
    runs: dict[tuple, str] = {}
    for cell in sweep.cells:
        key = tuple((name, value) for name, value in cell.values.items() if name != SEED)
        runs[key] = cell.run
        if cell.run in results:
            seed = cell.values.get(SEED, "")
            groups.setdefault(key, {})[seed] = results[cell.run].final_eval_loss
    plain = lambda key: all(s.bag_size == 1 for s in config_lib.stages(sweep.runs[runs[key]]))
    found = [Point(dict(key), losses, plain(key)) for key, losses in groups.items()]
    outside = lambda point: {
        k: v for k, v in point.values.items() if not k.startswith("tst.") and k != "arm"
    }
    paired = []
    for point in found:
        bases = [p for p in found if p.baseline and outside(p) == outside(point)]
        seeds = [seed for seed in point.losses if bases and seed in bases[0].losses]
        if point.baseline or not seeds:
            paired.append(point)
            continue
        gaps = [point.losses[seed] - bases[0].losses[seed] for seed in seeds]
        paired.append(
            dataclasses.replace(
                point, difference=statistics.mean(gaps), difference_stderr=stderr(gaps)
            )
        )
    return paired


def write(path, sweep: Sweep, results) -> str:
    """Writes PATH.csv, PATH.md and PATH.png; returns the table and what follows from it, as text.

    Args:
      path: in the sweep's folder, without a suffix.
      results: {name: Run} of the finished ones, at least one.
    """
    path = pathlib.Path(path)
    _write_csv(path.with_name(path.name + ".csv"), sweep, results)
    found = points(sweep, results)
    rows, said = table(found), best(found)
    missing = len(sweep.runs) - len(results)
    if missing:
        said += f" {missing} of {len(sweep.runs)} runs are not finished."
    draw(path.with_name(path.name + ".png"), sweep, found)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    text = "\n".join(["# Sweep", "", said, "", f"![losses]({path.name}.png)", "", *lines, ""])
    path.with_name(path.name + ".md").write_text(text)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    shown = ["  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in rows]
    return "\n".join([*shown, "", said, f"Report: {path}.md, {path}.csv, {path}.png"])


def _write_csv(path, sweep, results) -> None:
    fields = ["eval_loss", "eval_bits_per_byte", "step", "tokens", "flops"]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*sweep.axes, "run", *fields])
        for cell in sweep.cells:
            done = results.get(cell.run)
            last = done.steps[-1] | done.evals[-1] if done else {}
            values = [last.get(field, "") for field in fields]
            writer.writerow([*cell.values.values(), cell.run, *values])


def table(found: list[Point]) -> list[list[str]]:
    """Rows of text, a header first: a point each, best first, with its noise."""
    names = list(found[0].values)
    rows = [[*names, "seeds", "held-out loss", "from the baseline", "in standard errors"]]
    once = {}  # a baseline is a point for each bag size, and one run
    for point in found:
        once.setdefault(tuple(point.losses.items()) if point.baseline else id(point), point)
    for point in sorted(once.values(), key=lambda point: point.mean):
        row = [*point.values.values(), str(len(point.losses)), _noisy(point.mean, point.stderr)]
        if point.difference is None:
            row += ["baseline" if point.baseline else "", ""]
        else:
            error = point.difference_stderr
            row.append(_noisy(point.difference, error, "+"))
            row.append(f"{point.difference / error:+.1f}" if error else "")
        rows.append(row)
    return rows


def _noisy(mean, error, sign="") -> str:
    text = f"{mean:{sign}.4f}"
    return text if error is None else f"{text} ± {error:.4f}"


def best(found: list[Point]) -> str:
    """One sentence: the best point, its noise, and whether the next one is told from it."""
    first, *others = sorted(found, key=lambda point: point.mean)
    others = [point for point in others if point.losses != first.losses]
    text = f"Best: {first.label}, held-out loss {_noisy(first.mean, first.stderr)}"
    count = len(first.losses)
    text += f" (standard error of {count} seeds)" if count > 1 else " (one seed, so no noise known)"
    if not others:
        return text + "."
    second = others[0]
    text += f"; next: {second.label}, {_noisy(second.mean, second.stderr)}"
    shared = [seed for seed in first.losses if seed in second.losses]
    gaps = [second.losses[seed] - first.losses[seed] for seed in shared]
    error = stderr(gaps)
    if error is None or statistics.mean(gaps) < 2 * error:
        return text + ": less than two standard errors apart, so the order of the two may be noise."
    return text + "."


# ---- pictures


def draw(path, sweep: Sweep, found: list[Point]) -> None:
    """Dots with their noise for points that have names; for one axis of numbers curves, for two a
    heat map and curves. Further axes give a row of panels for each of their combinations."""
    several = [name for name, values in sweep.axes.items() if name != SEED and len(values) > 1]
    numbers = [name for name in several if None not in map(_number, sweep.axes[name])][:2]
    rest = [name for name in several if name not in numbers]
    lines = rest.pop(0) if len(numbers) == 1 and rest else None
    groups: dict[str, list[Point]] = {}
    for point in found if numbers else []:
        title = ", ".join(f"{name} {point.values[name]}" for name in rest)
        groups.setdefault(title, []).append(point)
    groups = groups or {"": found}
    columns = 3 if len(numbers) == 2 else 1
    height = 4.2 if numbers else 1.5 + 0.35 * len(found)
    figure, panels = plt.subplots(
        len(groups),
        columns,
        figsize=(5 * columns if columns > 1 else 6.5, height * len(groups)),
        squeeze=False,
        layout="constrained",
    )
    for row, (title, group) in zip(panels, groups.items()):
        row[0].set_title(title, loc="left", fontsize=9)
        if not numbers:
            _dots(row[0], group)
        elif len(numbers) == 1:
            _curves(row[0], group, numbers[0], lines)
        else:
            _heat_map(row[0], group, *numbers)
            _curves(row[1], group, *numbers)
            _curves(row[2], group, *reversed(numbers))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _dots(axes, found) -> None:
    """A line each point: its distance from the baseline, or its loss where there is none."""
    paired = any(point.difference is not None for point in found)
    found = sorted(found, key=lambda point: -point.mean)
    value = lambda p: (p.difference or 0.0) if paired else p.mean
    error = lambda p: (p.difference_stderr if paired else p.stderr) or 0.0
    x, bars = [value(p) for p in found], [error(p) for p in found]
    axes.errorbar(x, range(len(found)), xerr=bars, fmt="o", color="#c2410c", capsize=3)
    axes.set_yticks(range(len(found)), [", ".join(p.values.values()) for p in found])
    if paired:
        axes.axvline(0, color="#5b6770", linewidth=1)
    label = "held-out loss minus the baseline's" if paired else "held-out loss"
    axes.set_xlabel(f"{label}, nats a token (bars: standard error)")
    axes.spines[["top", "right"]].set_visible(False)


def _curves(axes, found, x_name, line_name) -> None:
    """Held-out loss over one axis, a line for each value of the other."""
    groups: dict[str, list[Point]] = {}
    for point in found:
        groups.setdefault(point.values[line_name] if line_name else "", []).append(point)
    plain = [value for value, group in groups.items() if all(p.baseline for p in group)]
    others = [value for value in groups if value not in plain]
    for value, group in groups.items():
        if value in plain:
            style = dict(color="#5b6770", linestyle="--")
        else:
            style = dict(color=plt.cm.viridis(0.85 * others.index(value) / max(len(others) - 1, 1)))
        group = sorted(group, key=lambda point: float(point.values[x_name]))
        x = [float(point.values[x_name]) for point in group]
        bars = [point.stderr or 0.0 for point in group]
        axes.errorbar(
            x,
            [point.mean for point in group],
            yerr=bars,
            marker=".",
            capsize=2,
            label=f"{line_name} {value}" if line_name else None,
            **style,
        )
    xs = sorted({float(point.values[x_name]) for point in found})
    if len(xs) > 2 and xs[0] > 0 and xs[-1] / xs[0] >= 4:
        axes.set_xscale("log", base=2 if xs[-1] < 100 else 10)
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.minorticks_off()
    axes.set_xlabel(x_name)
    axes.set_ylabel("held-out loss, nats a token")
    if line_name:
        axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _heat_map(axes, found, x_name, y_name) -> None:
    xs = sorted({point.values[x_name] for point in found}, key=float)
    ys = sorted({point.values[y_name] for point in found}, key=float)
    grid = [[float("nan")] * len(xs) for _ in ys]
    for point in found:
        grid[ys.index(point.values[y_name])][xs.index(point.values[x_name])] = point.mean
    image = axes.imshow(grid, cmap="viridis_r", origin="lower", aspect="auto")
    middle = statistics.mean(image.get_clim())
    for i, j in itertools.product(range(len(ys)), range(len(xs))):
        if grid[i][j] == grid[i][j]:
            color = "black" if grid[i][j] < middle else "white"  # low losses are light
            axes.text(j, i, f"{grid[i][j]:.3f}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(len(xs)), xs)
    axes.set_yticks(range(len(ys)), ys)
    axes.set_xlabel(x_name)
    axes.set_ylabel(y_name)
    axes.figure.colorbar(image, ax=axes, label="held-out loss, nats a token")
