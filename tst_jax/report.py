"""What a comparison shows a person: a table, a picture, report.md and one self-contained page."""

import base64
import dataclasses
import json
import os
import pathlib
import platform
import statistics

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from tst_jax import __version__, flops, report_page
from tst_jax import config as config_lib

COLORS = {"baseline": "#5b6770", "tst": "#c2410c"}
LABELS = {"baseline": "baseline", "tst": "TST"}


def verdict(summary: dict) -> str:
    """Who won, in the same words whoever it was."""
    mean, stderr = summary["eval_loss_difference_mean"], summary["eval_loss_difference_stderr"]
    count = len(summary["seeds"])
    winner, loser = ("TST", "the baseline") if mean < 0 else ("The baseline", "TST")
    text = (
        f"{winner} ends {abs(mean):.4f} nats a token below {loser} in held-out next-token loss, "
        f"at {summary['flops_ratio']:.3f} times the FLOPs (TST over baseline)"
    )
    if stderr is None:
        return text + "; one seed, so this may be noise."
    text += f"; mean of {count} seeds, standard error {stderr:.4f}"
    if abs(mean) < 2 * stderr:
        return text + ": less than two standard errors, so this may be noise."
    return text + "."


def _rows(summary: dict) -> list[list[str]]:
    arms = [summary["baseline"], summary["tst"]]
    if summary["equal_data"]:
        arms.append(summary["equal_data"])

    def spread(values, digits):
        text = f"{statistics.mean(values):.{digits}f}"
        if len(values) > 1:
            text += f" ± {statistics.stdev(values):.{digits}f}"
        return text

    lines = {
        "steps": lambda a: f"{a['steps']:,}",
        "positions": lambda a: f"{a['positions']:,}",
        "data tokens": lambda a: f"{a['tokens']:,}",
        "FLOPs": lambda a: f"{a['flops']:.4g}",
        "median step, ms": lambda a: f"{1e3 * a['step_seconds_median']:.1f}",
        "held-out loss, nats a token": lambda a: spread(a["final_eval_loss"], 4),
        "held-out bits a byte": lambda a: spread(a["final_eval_bits_per_byte"], 4),
    }
    if None in arms[0]["final_eval_bits_per_byte"]:  # of ids whose text nobody knows
        del lines["held-out bits a byte"]
    header = ["", "baseline", "TST", "baseline, equal data"][: len(arms) + 1]
    return [header] + [[name] + [line(arm) for arm in arms] for name, line in lines.items()]


def text_table(summary: dict) -> str:
    """The comparison as aligned text."""
    rows = _rows(summary)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    line = lambda row: "  ".join(
        cell.ljust(width) if i == 0 else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(row, widths))
    )
    return "\n".join(line(row) for row in rows)


def _findings(summary: dict) -> list[str]:
    losses = zip(
        summary["seeds"],
        summary["baseline"]["final_eval_loss"],
        summary["tst"]["final_eval_loss"],
        summary["eval_loss_difference"],
    )
    lines = [
        f"Seed {seed}: baseline {a:.4f}, TST {b:.4f}, difference {d:+.4f}."
        for seed, a, b, d in losses
    ]
    lines.append(
        f"TST read {summary['tokens_ratio']:.2f} times the data tokens of the baseline; a "
        f"superposition step took {summary['step_time_ratio']:.2f} times a baseline step."
    )
    if summary["equal_data"]:
        mean = statistics.mean(summary["equal_data"]["final_eval_loss"])
        lines.append(
            f"Equal data: a baseline that reads as many tokens "
            f"({summary['equal_data']['steps']:,} steps) ends at {mean:.4f}."
        )
    if "equal_loss_baselines" in summary:
        lines.append(_equal_loss(summary))
    return lines


def _equal_loss(summary: dict) -> str:
    tried = ", ".join(
        f"{int(steps):,} steps {statistics.mean(losses):.4f}"
        for steps, losses in summary["equal_loss_baselines"].items()
    )
    if not summary["equal_loss_speedup"]:
        found = "no baseline length that was tried reaches TST's loss"
    else:
        found = f"the baseline needs {summary['equal_loss_speedup']:.2f} times TST's steps"
        low, high = summary["equal_loss_speedup_interval"]
        if low is not None:
            found += f" ({low:.2f} to {high:.2f}: one standard error of {len(summary['seeds'])} "
            found += "seeds)"
    return f"Equal loss: {found} (baselines tried: {tried})."


def _curves(runs):
    """(steps, mean loss, one list of losses a run) of the held-out evaluations."""
    steps = [line["step"] for line in runs[0].evals]
    losses = [[line["eval_loss"] for line in run.evals] for run in runs]
    return steps, [statistics.mean(column) for column in zip(*losses)], losses


def _spent(config, step: int) -> dict[str, float]:
    """What a run has spent once `step` steps are done."""
    tokens = spent = 0
    for stage in config_lib.stages(config):
        steps = max(0, min(step, stage.stop) - stage.start)
        tokens += steps * stage.step_tokens
        spent += steps * flops.step_flops(config.model, stage.rows, stage.positions)
    return {"step": step, "FLOPs": spent, "data tokens": tokens}


def _mark_switch(axes, where) -> None:
    axes.axvline(where, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        "switch",
        (where, 1),
        (3, -10),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=8,
    )


def draw(path, baselines: dict, tst) -> None:
    """loss.png, in the manner of the paper's Figure 3: held-out loss over steps (equal FLOPs), over
    FLOPs (equal loss) and over data tokens (equal data), and the difference after the switch.

    Args:
      path: of the picture.
      baselines: {steps: runs}; those of TST's own length are compared, others drawn beside them.
      tst: its runs.
    """
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    same, switch = baselines[tst[0].config.steps], tst[0].switch
    arms = [("baseline", same, LABELS["baseline"]), ("tst", tst, LABELS["tst"])]
    others = [
        ("baseline", runs, f"baseline, {steps:,} steps")
        for steps, runs in sorted(baselines.items())
        if runs is not same
    ]
    lowest = min(min(_curves(runs)[1]) for _, runs, _ in arms + others)
    highest = max(_curves(same)[1])
    room = 0.05 * (highest - lowest) or 0.01  # a run of one evaluation has no range
    for axes, unit in zip(panels.flat, ("step", "FLOPs", "data tokens")):
        for i, (name, runs, label) in enumerate(arms if unit == "step" else arms + others):
            steps, mean, each = _curves(runs)
            x = [_spent(runs[0].config, step)[unit] for step in steps]
            style = dict(color=COLORS[name], marker=".")
            if i >= len(arms):
                style |= dict(linestyle="--", linewidth=0.8, marker="", alpha=0.4 + 0.6 / (i - 0.5))
            for losses in each if len(each) > 1 and i < len(arms) else []:
                axes.plot(x, losses, color=COLORS[name], alpha=0.25, linewidth=0.8)
            axes.plot(x, mean, label=label, **style)
        axes.set_ylim(lowest - room, highest + room)
        axes.set_xlabel({"step": "step (equal FLOPs)"}.get(unit, unit))
        axes.set_ylabel("held-out next-token loss, nats a token")
        axes.legend(frameon=False)
        _mark_switch(axes, _spent(tst[0].config, switch)[unit])
    _draw_difference(panels.flat[3], same, tst, switch)
    panels.flat[3].set_xlim(panels.flat[0].get_xlim())
    for axes in panels.flat:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _chart(baselines: dict, tst) -> dict:
    """The curves as report_chart.js takes them: those that `draw` draws over FLOPs."""
    same, units = baselines[tst[0].config.steps], ("step", "FLOPs", "data tokens")
    arms = [(f"baseline, {steps:,} steps", "baseline", runs) for steps, runs in baselines.items()]
    curves = []
    for label, name, runs in [*arms, ("TST", "tst", tst)]:
        steps, mean, each = _curves(runs)
        spent = [_spent(runs[0].config, step) for step in steps]
        style = {"color": COLORS[name], "x": {unit: [at[unit] for at in spent] for unit in units}}
        style["dashed"] = name == "baseline" and runs is not same
        seeds = zip(runs, each) if len(runs) > 1 and not style["dashed"] else ()
        for run, losses in seeds:
            one = {"label": f"{label}, seed {run.config.seed}", "faint": True, "loss": losses}
            curves.append(style | one)
        curves.append(style | {"label": label, "faint": False, "loss": mean})
    return {"switch": _spent(tst[0].config, tst[0].switch), "curves": curves}


def _draw_difference(axes, baseline, tst, switch) -> None:
    # An evaluation at the switch exists in one arm only.
    losses = lambda run: {line["step"]: line["eval_loss"] for line in run.evals}
    pairs = [(losses(ours), losses(theirs)) for ours, theirs in zip(tst, baseline)]
    x = [step for step in pairs[0][0] if step in pairs[0][1] and step > switch]
    differences = [[ours[step] - theirs[step] for step in x] for ours, theirs in pairs]
    for line in differences if len(differences) > 1 else []:
        axes.plot(x, line, color=COLORS["tst"], alpha=0.3, linewidth=0.8)
    mean = [statistics.mean(column) for column in zip(*differences)]
    axes.plot(x, mean, color=COLORS["tst"], marker=".", label="TST minus baseline")
    axes.axhline(0, color=COLORS["baseline"], linewidth=1)
    axes.set_xlabel("step (equal FLOPs)")
    axes.set_ylabel("difference, nats a token (below 0: TST is better)")
    axes.legend(frameon=False)
    _mark_switch(axes, switch)


def _environment() -> list[str]:
    devices = jax.devices()
    return [
        f"tst_jax {__version__}, jax {jax.__version__}, Python {platform.python_version()}",
        f"{len(devices)} x {devices[0].device_kind}, {os.cpu_count()} CPU cores, "
        f"{platform.system()} {platform.machine()}",
    ]


def write(workdir, summary: dict, baselines: dict, tst) -> None:
    """summary.json, loss.png, report.md and report.html in `workdir`; arguments as of `draw`."""
    workdir = pathlib.Path(workdir)
    (workdir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(workdir / "loss.png", baselines, tst)
    baseline = baselines[tst[0].config.steps]
    settings = config_lib.flatten(tst[0].config)
    changed = config_lib.differences(
        dataclasses.asdict(baseline[0].config), dataclasses.asdict(tst[0].config), harmless=True
    )
    findings = _findings(summary)
    (workdir / "report.md").write_text(_markdown(summary, findings, changed, settings))
    picture = base64.b64encode((workdir / "loss.png").read_bytes()).decode()
    lists = {
        "": findings,
        "Where the two arms differ": changed,
        "Environment": _environment(),
    }
    text = report_page.page(
        verdict(summary), _chart(baselines, tst), picture, _rows(summary), lists, settings
    )
    (workdir / "report.html").write_text(text)


def _markdown(summary, findings, changed, settings) -> str:
    rows = _rows(summary)
    table = ["| " + " | ".join(row) + " |" for row in rows]
    table.insert(1, "|" + "---|" * len(rows[0]))
    listing = lambda lines: "\n".join(f"- {line}" for line in lines)
    return "\n\n".join(
        [
            "# Baseline and Token Superposition Training at equal FLOPs",
            f"**{verdict(summary)}**",
            "![held-out loss](loss.png)",
            "\n".join(table),
            listing(findings),
            "## Where the two arms differ\n\n" + listing(changed),
            "## Settings of the TST arm\n\n"
            + listing(f"`{name} = {value!r}`" for name, value in settings.items()),
            "## Environment\n\n" + listing(_environment()) + "\n",
        ]
    )
