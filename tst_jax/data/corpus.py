"""What a run reads, one store or a mixture of them: opened, compared, and accounted for."""

import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from tst_jax.data.mutual_information import fit
from tst_jax.data.order import DataError, Order
from tst_jax.data.pipeline import Stream
from tst_jax.data.settings import DataConfig
from tst_jax.data.store import Store, StoreError, open_store
from tst_jax.schedule import TSTConfig

REPORT = "data_report.json"  # that `tst_jax.data_report` writes into a store's folder


def open_stores(data: DataConfig) -> list[Store]:
    """The stores of a run; their shards are not read yet, see `verify`.

    Raises:
      StoreError: one that does not open, or stores with different vocabularies.
    """
    stores = [open_store(path, verify="sizes") for path in data.stores()]
    first = stores[0]
    for store in stores[1:]:
        if store.vocabulary_sha256 != first.vocabulary_sha256:
            raise StoreError(
                f"{store.path} was made with {store.vocabulary().describe()}, {first.path} with "
                f"{first.vocabulary().describe()}; prepare both with one tokenizer"
            )
    return stores


def verify(data: DataConfig, part: tuple[int, int], say: Callable[[str], None]) -> None:
    """Checks every byte and id of the stores, as `data.verify` says; may take minutes.

    Args:
      part: (i, n): this is process i of n.
      say: called with a line now and then, if it takes long.
    Raises:
      StoreError: what is damaged, by its file's name.
    """
    for path in data.stores():
        spoken = time.monotonic()

        def progress(done, total, path=path):
            nonlocal spoken
            if time.monotonic() - spoken > 10:
                spoken = time.monotonic()
                say(f"verifying {path}: {100 * done // total}% of {total / 1e9:.1f} GB")

        open_store(path, data.verify, part, progress)


def names(stores: list[Store]) -> list[str]:
    """Of the stores, for metrics: of their folders, with a number where two are the same."""
    found = [store.path.name for store in stores]
    return [f"{name}-{i}" if found.count(name) > 1 else name for i, name in enumerate(found)]


def check_same(workdir, fingerprints: list[str], stores: list[Store], vocabulary: str) -> None:
    """Raises StoreError unless a checkpoint was made from these stores.

    Args:
      workdir: of the run, for the message.
      fingerprints, vocabulary: of the checkpoint's record.
    """
    if stores[0].vocabulary_sha256 != vocabulary:
        raise StoreError(
            f"{workdir} was trained with the vocabulary sha256 {vocabulary[:8]} and "
            f"{stores[0].path} has {stores[0].vocabulary().describe()}; give data.store the store "
            "it was started with"
        )
    if [store.fingerprint for store in stores] != fingerprints:
        paths = ", ".join(str(store.path) for store in stores)
        raise StoreError(
            f"{workdir} was trained on another store than {paths}; give data.store what it was "
            "started with, in the same order"
        )


def check_epochs(data: DataConfig, order: Order) -> None:
    """Raises DataError if a store would be read more often than `data.max_epochs` allows."""
    last = order.stages[-1].stop
    for name, (epochs, _) in zip(order.names, order.progress(last)):
        if 0 < data.max_epochs < epochs - 1e-9:
            raise DataError(
                f"{name} would be read {epochs:.3f} times in {last} steps, data.max_epochs is "
                f"{data.max_epochs:g}; lower steps or tst.bag_size * tst.ratio, change "
                "data.weights, or prepare more"
            )


def repeats(order: Order) -> list[str]:
    """A warning for each store that the run reads more than once."""
    found = []
    for i, (name, (epochs, _)) in enumerate(
        zip(order.names, order.progress(order.stages[-1].stop))
    ):
        step = order.first_repeat(i)
        if step is not None:
            found.append(
                f"warning: {name} is read again from step {step} on, {epochs:.2f} epochs in all"
            )
    return found


def progress(order: Order, streams: list[Stream], step: int) -> dict[str, float | int]:
    """What a line of metrics says of each store once `step` steps are done.

    `epochs/NAME`, and `source_tokens/NAME`: exact where documents are concatenated; where they are
    packed, the share of pads is taken to be that of the whole store.
    """
    found = {}
    align = order.stages[0].align
    for stream, (epochs, places) in zip(streams, order.progress(step)):
        found[f"epochs/{stream.name}"] = epochs
        share = len(stream.tokens) / stream.length(align)
        found[f"source_tokens/{stream.name}"] = round(places * share)
    return found


def eval_figures(losses: list[float], stores: list[Store], order: Order) -> dict:
    """What a line says of an evaluation: the mean of the stores' losses, weighted as the mixture.

    Bits per byte are None for ids whose text nobody knows.
    """
    shares = order.mixture.shares
    mean = sum(share * loss for share, loss in zip(shares, losses))
    ratios = [store.bytes_per_token("heldout") for store in stores]
    bits = None
    if None not in ratios:
        bits = mean / math.log(2) / sum(share * ratio for share, ratio in zip(shares, ratios))
    found = {"eval_loss": mean, "eval_bits_per_byte": bits}
    if len(losses) > 1:
        found |= {f"eval_loss/{name}": loss for name, loss in zip(order.names, losses)}
    return found


def with_fitted(
    tst: TSTConfig, stores: list[Store], shares: list[float], say: Callable[[str], None]
) -> TSTConfig:
    """`tst` with the constants that `weights=fitted` takes from the stores' data reports.

    Of a mixture, the mean of the stores' curves is fitted. Without any report the paper's constants
    for DCLM are taken, and said.

    Raises:
      StoreError: a report of another store; reports of some stores only.
    """
    if tst.weights != "fitted" or tst.fitted:
        return tst
    reports = [_report(store) for store in stores]
    if not any(reports):
        say(
            f"tst.weights=fitted: {stores[0].path} has no {REPORT} (python -m tst_jax.data_report "
            "makes it); the paper's constants for DCLM are taken"
        )
        return dataclasses.replace(tst, fitted=",".join(f"{x:g}" for x in tst.fitted_constants()))
    for store, report in zip(stores, reports):
        if report is None:
            raise StoreError(
                f"{store.path}: has no {REPORT}, other stores have; run python -m "
                f"tst_jax.data_report --store={store.path}"
            )
    curves = [dict(zip(r["distances"], r["mutual_information"])) for r in reports]
    # A store of short documents has no long distances.
    distances = [d for d in curves[0] if all(d in curve for curve in curves)]
    mean = [sum(w * curve[d] for w, curve in zip(shares, curves)) for d in distances]
    constants = fit(distances, mean)
    say(f"tst.weights=fitted: C0, a, k = {', '.join(f'{x:.4g}' for x in constants)}")
    return dataclasses.replace(tst, fitted=",".join(f"{x:.6g}" for x in constants))


def _report(store: Store) -> dict | None:
    file = Path(store.path) / REPORT
    if not file.exists():
        return None
    try:
        report = json.loads(file.read_text())
        found = report["store"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{file}: cannot be read ({error}); make it again") from None
    if found != store.fingerprint:
        raise StoreError(
            f"{file}: is the report of another store; run python -m tst_jax.data_report "
            f"--store={store.path}"
        )
    return report
