"""The stages of making a store: train a tokenizer, encode to runs, shuffle to shards, seal."""

import datetime
import os
import platform
import random
from pathlib import Path

import numpy as np
import tokenizers

from tst_jax.data import runs, vocabulary
from tst_jax.data.store import SPLITS, Store
from tst_jax.data.store_writer import no_documents, seal
from tst_jax.data.vocabulary import Vocabulary
from tst_jax.data.workers import Progress, Workers


def make_store(options, request, source, units, given, work: Path) -> Store:
    """Makes the store of `options`, a `prepare.Options`, or goes on making it.

    Args:
      options: the command's flags, checked.
      request: what decides the content of the store; kept in the manifest.
      source, units: of the documents.
      given: the vocabulary; None to train one.
      work: folder of the work in progress, held by this command.
    Raises:
      UserError: of documents that cannot be read or encoded, in one line.
    """
    folder, shards = work / "runs", work / "store"
    folder.mkdir(exist_ok=True)
    shards.mkdir(exist_ok=True)
    found = given or _trained(options, source, units, request["vocab_size"], work)
    special = special_ids(options, found)
    job = runs.Job(
        folder,
        source,
        found,
        heldout_fraction=options.heldout_fraction,
        seed=options.seed,
        **special,
    )
    cores = options.processes or os.cpu_count() or 1
    processes = max(1, min(cores, len(units)))
    with Workers(processes, cores // processes, job) as workers:
        _encode(workers, units, folder)
        totals = runs.totals(folder, len(units))
        for split in SPLITS:
            if not totals[split]["documents"]:
                raise no_documents(split)
        counts = {
            split: max(1, round(totals[split]["ids"] / options.shard_tokens)) for split in SPLITS
        }
        calls = [(len(units), shards, s, k, counts[s]) for s in SPLITS for k in range(counts[s])]
        size = sum(totals[split]["ids"] for split in SPLITS) * job.dtype.itemsize
        with Progress("shuffling", size, "") as progress:
            show = lambda sums, done: progress.update(size * done // len(calls))
            entries = workers.run(_merge, calls, show)
    by_split = {s: [e for c, e in zip(calls, entries) if c[2] == s] for s in SPLITS}
    read = sum(int(runs.documents_read(folder, number)) for number in range(len(units)))
    kept = sum(entry["documents"] for entry in entries if entry)
    encoded = sum(totals[split]["documents"] for split in SPLITS)
    provenance = {
        "request": request,
        "tokenizer": options.tokenizer,
        "documents": read,
        "empty_dropped": read - encoded,
        "duplicates_dropped": encoded - kept,
        "python": platform.python_version(),
        "tools": {"numpy": np.__version__, "tokenizers": tokenizers.__version__},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    for leftover in shards.glob("*.partial-*"):
        leftover.unlink()
    with Progress("verifying", size_of(shards)) as progress:
        show = lambda done, total: progress.update(done)
        return seal(shards, options.out, found, special, by_split, provenance, show)


def _encode(workers, units, folder: Path) -> None:
    calls = [c for c in enumerate(units) if runs.documents_read(folder, c[0]) is None]
    total = sum(unit.bytes for unit in units)
    done_bytes = [total - sum(unit.bytes for _, unit in calls)]
    for _, unit in calls:
        done_bytes.append(done_bytes[-1] + unit.bytes)
    with Progress("encoding", total) as progress:
        progress.update(done_bytes[0])

        def watch(sums, done):
            # Bytes of text are not bytes on disk where files are compressed: units that are done
            # say how many there are to one.
            _, text, ids = sums
            progress.update(max(min(done_bytes[0] + text, total), done_bytes[done]), ids)

        workers.run(runs.encode_unit, calls, watch)


def _merge(job, units, shards, split, number, count, tick):
    return runs.merge_shard(job, units, shards, split, number, count)


def _trained(options, source, units, size: int, work: Path) -> Vocabulary:
    """A byte-level BPE of the train split's text, or of --bpe_bytes from all over it."""
    kept = work / "tokenizer.json"
    if kept.exists():
        return vocabulary.load(kept)
    total = sum(unit.bytes for unit in units)
    order = list(units)
    most = None
    if total > options.bpe_bytes:
        random.Random(options.seed).shuffle(order)
        most = max(1, options.bpe_bytes // min(len(order), 64))
    low, high = runs.key_ranges(options.heldout_fraction)["train"]

    def texts():
        seen = 0
        with Progress("training the tokenizer", min(total, options.bpe_bytes), "") as progress:
            for unit in order:
                of_unit = 0
                for text in source.read(unit):
                    if low <= runs.document_key(text, options.seed)[0] < high:
                        yield text  # never held-out text
                        of_unit += len(text)
                        progress.update(min(seen + of_unit, total))
                    if most is not None and of_unit >= most:
                        break
                seen += of_unit
                if seen >= options.bpe_bytes:
                    return

    found = vocabulary.train_bpe(texts(), size)
    partial = work / "tokenizer.partial"
    partial.write_bytes(found.data)
    partial.replace(kept)
    return found


def special_ids(options, found: Vocabulary) -> dict[str, int | None]:
    """Ids of what --separator, --bos and --eos name."""
    special: dict[str, int | None] = {
        "separator": vocabulary.special_id(found, options.separator, "separator")
    }
    for name in ("bos", "eos"):
        token = getattr(options, name)
        special[name] = None if token is None else vocabulary.special_id(found, token, name)
    return special


def size_of(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(file.stat().st_size for file in folder.iterdir())
