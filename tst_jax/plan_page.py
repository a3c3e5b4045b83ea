"""What `tst_jax.plan` prints for a person: run, data, compute, baselines, what was published."""

import math

from tst_jax import budget, published
from tst_jax import config as config_lib
from tst_jax.config import Config


def page(config: Config, figures: dict, assumed: bool = False) -> str:
    """The figures in sections.

    Args:
      config: of the run.
      figures: of `plan.plan`.
      assumed: whether the MFU was not given, and is the default.
    """
    lines = _run(config, figures) + _data(config, figures) + _compute(figures, assumed)
    if figures["baselines"]:
        lines += _baselines(figures) + _published(config, figures)
    else:
        lines.append("Nothing is superposed: this is a baseline.")
    return "\n".join(lines)


def _row(name: str, value: str, more: str = "") -> str:
    return f"  {name:24}{value:>26}  {more}".rstrip()


def _count(name: str, value: int, more: str = "") -> str:
    return _row(name, f"{value:,}", f"{budget.short(value)}{more}")


def _down(value: float) -> str:
    """To four decimals, not above `value`: a bound that is rounded up is none."""
    return f"{math.floor(value * 10_000) / 10_000:g}"


def _run(config: Config, figures: dict) -> list[str]:
    data, active = config.data, figures["parameters_active_non_embedding"]
    parts = [
        f"{stage.stop - stage.start:,} "
        + (f"with bags of {stage.bag_size}" if stage.bag_size > 1 else "of next tokens")
        for stage in config_lib.stages(config)
    ]
    shape = f"{data.rows:,} rows of {data.positions:,}" + ", at first" * bool(data.rows_from)
    return [
        "Run",
        _count("parameters", figures["parameters"]),
        _count("used by a position", active, ", tables and head left out"),
        _row("steps", f"{figures['steps']:,}", ", ".join(parts[:4]) + ", ..." * (len(parts) > 4)),
        _row("positions a step", f"{figures['positions_per_step']:,}", shape),
    ]


# ---- data


def _data(config: Config, figures: dict) -> list[str]:
    tokens, size = figures["total_tokens"], figures["store_bytes"]
    lines = ["Data"]
    if figures["baselines"]:
        lines.append(_count("tokens, superposition", figures["superposition_tokens"]))
        lines.append(_count("tokens, recovery", figures["recovery_tokens"]))
    lines.append(_count("tokens", tokens, f", {tokens / figures['positions']:.4g} a position"))
    more = f"{budget.short(size, 'B')}, {size // tokens} a token, if nothing repeats"
    lines.append(_row("bytes to store", f"{size:,}", more))
    return lines + (_corpus(config, figures) if figures["corpus"] else [])


def _corpus(config: Config, figures: dict) -> list[str]:
    found, tst, steps = figures["corpus"], config.tst, config.steps
    have, others = f"{budget.short(found['tokens'])} tokens", []
    if figures["baselines"]:
        others.append(f"equal-FLOPs baseline {found['baseline_epochs']:.4g}")
    if found["equal_data_epochs"] is not None:
        others.append(f"equal-data baseline {found['equal_data_epochs']:.4g}")
    lines = [_row(f"epochs of {have}", f"{found['epochs']:.4g}", ", ".join(others))]
    have = f"  You have {have}:"
    if found["baseline_epochs"] > 1:
        return [*lines, f"{have} even a baseline of these steps repeats, whatever r and s."]
    if tst.mode == "output":
        return [*lines, f"{have} tst.mode=output reads no more of them than a baseline."]
    if found["r_times_s_minus_1_at_most"] is not None:
        most, here = _down(found["r_times_s_minus_1_at_most"]), found["r_times_s_minus_1"]
        lines.append(f"{have} r*(s-1) may be at most {most}; here it is {here:.4g}.")
    bounds = []
    if (most := found["superposition_steps_at_most"]) is not None:
        share = _down(most / steps)
        bounds.append(f"r up to {share} with s={tst.bag_size} ({most:,} of {steps:,} steps)")
    if found["bag_size_at_most"] is not None:
        ratio = figures["superposition_steps"] / steps
        bounds.append(f"s up to {found['bag_size_at_most']:,} with r={ratio:.4g}")
    if bounds:
        lines.append(f"  None of it is read twice with {', or '.join(bounds)}.")
    return lines


# ---- compute


def _compute(figures: dict, assumed: bool) -> list[str]:
    lines = [
        "Compute",
        _row("FLOPs", f"{figures['flops']:.4g}", "attention halved by the causal mask"),
        _row("FLOPs, attention whole", f"{figures['flops_full_attention']:.4g}", "as MFU counts"),
    ]
    if figures["accelerator"]:
        known = " (an assumption; --mfu=...)" if assumed else ""
        peak = f"{figures['peak_flops_per_second'] / 1e12:,g} TFLOP/s each"
        where = f"{figures['chips']:,} {figures['accelerator']}, {peak}"
        lines.append(_row("hours", _hours(figures), f"{where}, at MFU {figures['mfu']:g}{known}"))
        lines.append(_row("hours of chips", f"{figures['chip_hours']:,.4g}", "steps alone"))
    return lines


def _hours(cost: dict) -> str:
    return "" if cost["hours"] is None else f"{cost['hours']:,.4g}"


# ---- baselines, and what was published


def _times(cost: dict, before: str = "") -> str:
    parameters, positions = (cost[f"{before}{x}_ratio"] for x in ("parameters", "positions"))
    return f"this run: {parameters:.3g} x its active parameters, {positions:.3g} x its positions"


def _baselines(figures: dict) -> list[str]:
    found, hours = figures["baselines"], "hours" * bool(figures["accelerator"])
    costs = {"equal FLOPs": found["equal_flops"], "equal data": found["equal_data"]}
    costs |= {f"equal loss, {cost['factor']:.2f}*": cost for cost in found["equal_loss"]}
    header = f"{'Baselines':20}{'steps':>14}{'tokens':>24}{'FLOPs':>12}{'x TST':>9}{hours:>12}"
    lines: list[str] = [header.rstrip()]
    for name, cost in costs.items():
        if cost is None:
            lines.append(f"  {name}: none, as data.rows_from changes the batch size")
            continue
        line = f"  {name:18}{cost['steps']:>14,}{cost['total_tokens']:>24,}{cost['flops']:>12.4g}"
        lines.append(f"{line}{cost['flops_ratio']:>9.3f}{_hours(cost):>12}".rstrip())
    lines.append(f"  * {published.LABEL} (Table 1): steps to TST's loss over TST's steps")
    for pair, cost in zip(published.EQUAL_LOSS, found["equal_loss"]):
        tst, baseline = pair.tst, pair.baseline
        lines.append(
            f"    {pair.step_ratio:.2f}: {tst.model}, s={tst.bag_size}, r={tst.ratio:.4g}, "
            f"{tst.steps:,} steps to {tst.final_loss:.3f}; "
            f"baseline {baseline.steps:,} to {baseline.final_loss:.3f}"
        )
        lines.append(f"          {_times(cost)}")
    return lines


def _published(config: Config, figures: dict) -> list[str]:
    found, tst = figures["published"], config.tst
    ratio = figures["superposition_steps"] / figures["steps"]
    here = f"s={tst.bag_size}, r={ratio:.4g}"
    grid = f"Table {found['table']}, {found['model']}, {found['steps']:,} steps"
    lines = [f"Gain near this scale: {published.LABEL} (arXiv 2605.06546)"]
    if found["loss_difference"] is None:
        lines.append(f"  no figure: {grid} is nearest, {found['why_none']}")
    else:
        difference = f"{found['loss_difference']:+.4f}"
        lines.append(_row("loss, TST - baseline", difference, f"nats a token at {here}: {grid}"))
    lines.append(f"          {_times(found)}")
    before, after = found["pair_baseline_loss"], found["pair_tst_loss"]
    lines.append(
        f"  nearest pair of Table 1: {found['pair_model']}, {found['pair_steps']:,} steps, "
        f"s={found['pair_bag_size']}, r={found['pair_ratio']:.4g}: "
        f"{before:.3f} to {after:.3f}, {after - before:+.3f}"
    )
    lines.append(f"          {_times(found, 'pair_')}")
    (few, many), (low, high) = published.ROBUST_BAG_SIZES, published.ROBUST_RATIOS
    text = f"  robust range: s {few} to {many}, r {low} to {high}"
    if not tst.stages:
        inside = few <= tst.bag_size <= many and low <= ratio <= high
        text += f"; {here} is {'inside' if inside else 'outside'}"
    return [*lines, text]
