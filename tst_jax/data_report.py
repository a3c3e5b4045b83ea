"""Shows what a token store holds, and measures the slot weights that fit it.

    python -m tst_jax.data_report --store=DIR
    python -m tst_jax.data_report --store=DIR --out=ELSEWHERE --pairs=30000000 --bag_size=8

Writes data_report.json, data_report.txt and data_report.png into the store's folder, or --out. From
the one in the store's folder a run with tst.weights=fitted takes its weights.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tst_jax.data.corpus import REPORT
from tst_jax.data.mutual_information import PAIRS, fit, mutual_information
from tst_jax.data.order import DataError
from tst_jax.data.store import SPLITS, TOKENS, Store, StoreError, open_store
from tst_jax.data.workers import Progress
from tst_jax.errors import UserError
from tst_jax.superposition import FITTED, slot_weights

BAG_SIZES = (1, 2, 4, 8, 16)
_CHUNK = 1 << 22  # tokens counted at a time: memory stays flat
_FREQUENT = 8  # tokens shown


def measure(store: Store, pairs: int = PAIRS, bag_size: int | None = None) -> dict[str, Any]:
    """The report as JSON: of both splits their sizes, all else of the train split.

    Args:
      store: verified.
      pairs: see `mutual_information`.
      bag_size: one more, beside `BAG_SIZES`.
    Raises:
      DataError: `pairs` below 1, or no document has two tokens.
    """
    splits = {}
    for split in SPLITS:
        figures = ("documents", "tokens", "text_bytes")
        splits[split] = {what: store.count(split, what) for what in figures}
        splits[split]["bytes_per_token"] = store.bytes_per_token(split)
        splits[split]["shards"] = len(store.documents(split))
    report = {
        "store": store.fingerprint,
        "path": str(store.path),
        "vocabulary": store.vocabulary().describe(),
        "vocab_size": store.vocab_size,
        "special": store.manifest["special"],
        "splits": splits,
        "bag_size": bag_size,
    }
    report |= _documents(store, sorted({*BAG_SIZES, bag_size or 1})) | _ids(store)

    tokens, documents = store.tokens("train"), store.documents("train")
    with Progress("counting pairs", 100, "") as progress:
        show = lambda done, total: progress.update(100 * done // total)
        try:
            curve = mutual_information(tokens, documents, store.vocab_size, pairs, show)
        except DataError as error:
            raise DataError(f"{store.path}: train split: {error}") from None
    report |= {
        "distances": curve.distances,
        "mutual_information": curve.values,
        "pairs": curve.pairs,
        "chance": curve.chance,
        "fitted": None,
        "fitted_problem": None,
    }
    try:
        report["fitted"] = list(fit(curve.distances, curve.values))
    except DataError as error:  # all else in the report is worth having
        report["fitted_problem"] = str(error)
    return report


def _documents(store, bag_sizes) -> dict[str, Any]:
    """Lengths of documents, separators included, by powers of two; what padding to bags leaves."""
    bins = np.zeros((2, 64), np.int64)
    padded = dict.fromkeys(bag_sizes, 0)
    for offsets in store.documents("train"):
        lengths = np.diff(offsets)
        powers = np.frexp(lengths)[1] - 1  # floor of log2, exact
        np.add.at(bins, (slice(None), powers), [np.ones_like(lengths), lengths])
        for s in bag_sizes:
            padded[s] += int((-(-lengths // s) * s).sum())
    low, high = np.flatnonzero(bins[0])[[0, -1]]
    rows = zip(range(low, high + 1), *bins[:, low : high + 1].tolist())
    total = store.count("train", "tokens")
    return {
        "lengths": [{"from": 1 << i, "documents": n, "tokens": size} for i, n, size in rows],
        "padding_efficiency": {str(s): total / n for s, n in padded.items()},
    }


def _ids(store) -> dict[str, Any]:
    tokens, counts = store.tokens("train"), np.zeros(store.vocab_size, np.int64)
    size = tokens.dtype.itemsize
    with Progress("counting tokens", len(tokens) * size) as progress:
        for start in range(0, len(tokens), _CHUNK):
            counts += np.bincount(tokens[start : start + _CHUNK], minlength=counts.size)
            done = min(start + _CHUNK, len(tokens))
            progress.update(done * size, done)
    name = store.vocabulary().token_of
    frequent = [int(i) for i in np.argsort(-counts, kind="stable")[:_FREQUENT] if counts[i]]
    return {
        "distinct_ids": int(np.count_nonzero(counts)),
        "frequent": [{"id": i, "token": name(i), "count": int(counts[i])} for i in frequent],
    }


def text(report: dict[str, Any]) -> str:
    """What a person reads of it."""
    train = report["splits"]["train"]
    lines = [f"store            {report['path']}", f"vocabulary       {report['vocabulary']}"]
    special = [f"{name} {i}" for name, i in report["special"].items() if i is not None]
    lines.append(f"special tokens   {', '.join(special)}")
    for name, split in report["splits"].items():
        ratio = split["bytes_per_token"]
        line = f"{split['documents']:,} documents, {split['tokens']:,} tokens, "
        line += "bytes unknown" if ratio is None else f"{ratio:.3f} bytes per token"
        lines.append(f"{name:<17}{line}, shards: {split['shards']}")
    lines += ["", "All that follows is of the train split."]
    used, size = report["distinct_ids"], report["vocab_size"]
    lines.append(f"distinct ids     {used:,} of {size:,} ({used / size:.2%})")
    token = lambda row: "" if row["token"] is None else f" {row['token']!r}"
    frequent = [
        f"{row['id']}{token(row)} {row['count'] / train['tokens']:.2%}"
        for row in report["frequent"]
    ]
    lines.append(f"most frequent    {', '.join(frequent)}")

    lines += ["", "Tokens in a document, separator included"]
    lines.append(f"{'from':>12} {'documents':>14} {'share':>7} {'of tokens':>9}")
    most = max(row["documents"] for row in report["lengths"])
    for row in report["lengths"]:
        share, of_tokens = row["documents"] / train["documents"], row["tokens"] / train["tokens"]
        bar = "#" * round(40 * row["documents"] / most)
        line = f"{row['from']:>12,} {row['documents']:>14,} {share:>7.2%} {of_tokens:>9.2%} {bar}"
        lines.append(line.rstrip())
    kept = [f"{s}: {x:.2%}" for s, x in report["padding_efficiency"].items()]
    lines.append(f"tokens among places with packing=document, by bag size: {', '.join(kept)}")

    lines += ["", f"Mutual information of two tokens, nats, from {report['pairs']:,} pairs each"]
    fitted = report["fitted"]
    lines.append(f"{'distance':>12} {'measured':>10}" + (f" {'fit':>10}" if fitted else ""))
    for d, value in zip(report["distances"], report["mutual_information"]):
        line = f"{d:>12} {value:>10.4f}"
        lines.append(line + (f" {_law(fitted, d):>10.4f}" if fitted else ""))
    chance = f"{'by chance':>12} {report['chance']:>10.4f}"
    lines.append(f"{chance}   about the bias of so few pairs, a part of C0")
    constants = lambda values: ", ".join(f"{x:.4g}" for x in values)
    if not fitted:
        lines.append(f"no fit: {report['fitted_problem']}")
        return "\n".join(lines) + "\n"
    lines += ["", f"C0, a, k of C0 + a * d^k: {constants(fitted)}"]
    lines.append(f"the paper's for DCLM:     {constants(FITTED)}")
    lines.append("slot weights of tst.weights=fitted")
    for s in [report["bag_size"]] if report["bag_size"] else BAG_SIZES[1:]:
        weights = " ".join(f"{w:.4f}" for w in slot_weights("fitted", s, fitted))
        lines.append(f"  bag size {s:>2}: {weights}")
    return "\n".join(lines) + "\n"


def _law(constants, d):
    offset, scale, exponent = constants
    return offset + scale * d**exponent


def draw(path: Path, report: dict[str, Any]) -> None:
    """A PNG of two panels: lengths of documents; mutual information and its fit over distance."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    rows, train = report["lengths"], report["splits"]["train"]
    for shift, what, color in ((-0.2, "documents", "#5b6770"), (0.2, "tokens", "#c2410c")):
        shares = [row[what] / train[what] for row in rows]
        left.bar(np.arange(len(rows)) + shift, shares, 0.4, color=color, label=what)
    left.set_xticks(range(len(rows)), [f"{row['from']:,}" for row in rows], rotation=45)
    left.set_xlabel("tokens in a document, from (up to twice that)")
    left.set_ylabel("share of the train split")

    d, values = report["distances"], report["mutual_information"]
    right.plot(d, values, "o", color="#5b6770", label="measured")
    if report["fitted"]:
        label = "{:.3g} + {:.3g} d^{:.3g}".format(*report["fitted"])
        d = np.geomspace(d[0], d[-1], 200)
        right.plot(d, _law(report["fitted"], d), color="#c2410c", label=label)
    if min(values) > 0:
        right.set_yscale("log")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    right.set_xlabel("distance, tokens")
    right.set_ylabel("mutual information, nats")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130, format="png")


def write(out: Path, report: dict[str, Any]) -> None:
    """The three files, each whole or not at all; the JSON, which runs read, comes last."""
    body = json.dumps(report, indent=1, allow_nan=False) + "\n"
    files = {
        ".txt": lambda file: file.write_text(text(report), encoding="utf-8"),
        ".png": lambda file: draw(file, report),
        ".json": lambda file: file.write_text(body, encoding="utf-8"),
    }
    for suffix, make in files.items():
        file = out / Path(REPORT).with_suffix(suffix)
        partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
        try:
            make(partial)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def run(store: str, out: str | None, pairs: int, bag_size: int | None) -> None:
    """The command; arguments are its flags."""
    for name, value in (("pairs", pairs), ("bag_size", bag_size)):
        if value is not None and value < 1:
            raise DataError(f"--{name}={value}: give a number of at least 1")
    path = Path(store)
    size = sum(file.stat().st_size for file in path.glob(f"*{TOKENS}"))
    with Progress(f"verifying {path}", size, "") as progress:
        opened = open_store(path, progress=lambda done, total: progress.update(done))
    out = Path(out or path)
    try:  # before the work, not after it
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise StoreError(
            f"{out}: cannot be written to ({error.strerror}); give another --out"
        ) from None
    report = measure(opened, pairs, bag_size)
    write(out, report)
    print("\n" + text(report))
    print(f"written: {out / REPORT}, and .txt and .png beside it")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"error: {message} (see --help)\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m tst_jax.data_report",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--store", required=True, metavar="DIR", help="that tst_jax.prepare made")
    add("--out", metavar="DIR", help="folder of the three files; default: that of the store")
    pairs = f"of tokens counted at each distance, at most; default {PAIRS}"
    add("--pairs", type=int, default=PAIRS, metavar="N", help=pairs)
    add("--bag_size", type=int, metavar="S", help="whose slot weights are shown; default: several")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (without the program's name); returns the exit status."""
    try:
        run(**vars(_parser().parse_args(argv)))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
