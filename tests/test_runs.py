"""From documents to shards: a random order that depends on content and seed only, kills or not."""

import dataclasses
import itertools
import os
import random
import signal
import time

import numpy as np
import pytest

from tst_jax.data import runs, workers
from tst_jax.data.runs import Job, document_key, encode_unit, key_ranges, merge_shard, totals
from tst_jax.data.store import SPLITS
from tst_jax.data.units import Unit
from tst_jax.data.vocabulary import byte_vocabulary, ids_only
from tst_jax.errors import UserError

SEPARATOR = 256
TEXTS = [f"document {i} " + "x" * (i % 23) for i in range(300)]


@dataclasses.dataclass(frozen=True)
class Listed:
    """A source whose units are lists of documents."""

    documents: list
    tokens: bool = False

    def units(self):
        return [Unit(f"unit {i}", 1, (i,)) for i in range(len(self.documents))]

    def read(self, unit):
        yield from self.documents[unit.args[0]]


def no_tick(*numbers):
    pass


def make(folder, units, counts=(3, 2), seed=0, tick=no_tick, **options):
    """Encodes and merges; returns split -> entries of the shards, which lie in `folder`/store."""
    source = Listed(units, options.pop("tokens", False))
    job = {"vocabulary": byte_vocabulary(), "bos": None, "eos": None, "separator": SEPARATOR}
    job |= {"heldout_fraction": 0.3, "seed": seed, **options}
    job = Job(folder / "runs", source, **job)
    for name in ("runs", "store"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, unit in enumerate(source.units()):
        encode_unit(job, number, unit, tick)
    merge = lambda split, k, n: merge_shard(job, len(units), folder / "store", split, k, n)
    return {s: [merge(s, k, n) for k in range(n)] for s, n in zip(SPLITS, counts)}


def files(folder):
    return {file.name: file.read_bytes() for file in (folder / "store").iterdir()}


def documents(folder, split):
    """The texts of a split in the store's order, shard by shard."""
    found = []
    for shard in sorted((folder / "store").glob(f"{split}-*.tokens.bin")):
        ids = np.fromfile(shard, np.uint16)
        ends = np.flatnonzero(ids == SEPARATOR)
        assert ends[-1] == ids.size - 1
        found.append([bytes(part[part < 256].tolist()).decode() for part in np.split(ids, ends)])
        assert found[-1].pop() == ""
    return found


def flat(folder, split):
    return list(itertools.chain.from_iterable(documents(folder, split)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make(folder, [TEXTS])
    return folder


# ---- the result depends on documents, vocabulary and seed only


def cut(texts, count):
    return [texts[i::count] for i in range(count)]


@pytest.mark.parametrize("units", [1, 2, 7])
@pytest.mark.parametrize("run_tokens, batch", [(1, 1), (500, 60), (1 << 20, 300), (1, 1 << 20)])
def test_units_runs_and_batches_do_not_change_a_byte(
    made, tmp_path, monkeypatch, units, run_tokens, batch
):
    monkeypatch.setattr(runs, "RUN_TOKENS", run_tokens)
    monkeypatch.setattr(runs, "_BATCH_CHARACTERS", batch)
    shuffled = random.Random(units).sample(TEXTS, len(TEXTS))
    make(tmp_path, cut(shuffled, units))
    assert files(tmp_path) == files(made)
    count = len(list((tmp_path / "runs").glob("run-*.ids")))
    if run_tokens == 1:
        assert count == (len(TEXTS) if batch == 1 else units)


def test_every_document_is_there_once_and_equal_ones_once(made, tmp_path):
    again = TEXTS[:50] + ["", TEXTS[3], ""]
    entries = make(tmp_path, [TEXTS, again, TEXTS[200:]])
    found = flat(tmp_path, "train") + flat(tmp_path, "heldout")
    assert sorted(found) == sorted(TEXTS) and len(set(TEXTS)) == len(TEXTS)
    assert files(tmp_path) == files(made)
    sums = totals(tmp_path / "runs", 3)
    assert sum(sums[s]["documents"] for s in SPLITS) == 300 + 51 + 100
    assert sum(e["documents"] for s in SPLITS for e in entries[s]) == 300
    size = sum(e["text_bytes"] for s in SPLITS for e in entries[s])
    assert size == sum(map(len, TEXTS))


def test_the_split_of_a_document_follows_from_its_content_and_the_seed(made, tmp_path):
    heldout = set(flat(made, "heldout"))
    make(tmp_path / "few", [TEXTS[:100]])
    assert set(flat(tmp_path / "few", "heldout")) == heldout & set(TEXTS[:100])
    make(tmp_path / "other", [TEXTS], seed=1)
    other = set(flat(tmp_path / "other", "heldout"))
    assert 0 < len(other & heldout) < len(heldout)  # another choice, but not the complement
    both = [t for t in flat(made, "train") if t not in other]
    assert both != [t for t in flat(tmp_path / "other", "train") if t not in heldout]


def test_the_order_is_a_good_shuffle_and_the_held_out_share_is_right(tmp_path):
    count = 4000
    make(tmp_path, [[f"{i}" for i in range(count)]], counts=(5, 2))
    for split, share in (("train", 0.7), ("heldout", 0.3)):
        shards = documents(tmp_path, split)
        order = np.array([int(text) for text in itertools.chain(*shards)])
        # Both within five standard deviations of what independent keys give.
        assert abs(len(order) - share * count) < 5 * np.sqrt(0.3 * 0.7 * count)
        rank = np.argsort(np.argsort(order))
        assert abs(np.corrcoef(rank, np.arange(rank.size))[0, 1]) < 5 / np.sqrt(rank.size)
        assert np.mean(np.abs(np.diff(order)) == 1) < 0.01  # neighbours are torn apart
        sizes = [len(shard) for shard in shards]
        assert max(sizes) < 1.3 * min(sizes)


def test_shards_are_ranges_of_keys_that_partition_the_documents(made):
    for split, (low, high) in key_ranges(0.3).items():
        keys = [[document_key(text, 0) for text in shard] for shard in documents(made, split)]
        assert len(keys) == {"train": 3, "heldout": 2}[split]
        everything = [key for shard in keys for key in shard]
        assert everything == sorted(everything)
        assert all(low <= first < high for first, _ in everything)
        for number, shard in enumerate(keys):
            ends = [low + (high - low) * (number + k) // len(keys) for k in (0, 1)]
            assert all(ends[0] <= first < ends[1] for first, _ in shard)


def test_keys_are_of_the_content_whatever_holds_it():
    ids = [3, 200, 7]
    keys = {document_key(np.array(ids, dtype), 5) for dtype in ("u2", "<u4", "i8")}
    assert len(keys) == 1
    keys |= {document_key(np.array(ids), 6), document_key(np.array(ids[::-1]), 5)}
    keys |= {document_key("text", 5), document_key("text ", 5), document_key("text", 2**64 - 1)}
    assert len(keys) == 6
    (end, top), (zero, same) = key_ranges(0.25).values()
    assert (zero, same, end, top) == (0, 1 << 62, 1 << 62, 1 << 64)


# ---- kills


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_before_or_after_any_file_appears_loses_and_doubles_nothing(
    made, tmp_path, monkeypatch, after
):
    monkeypatch.setattr(runs, "RUN_TOKENS", 1500)
    monkeypatch.setattr(runs, "_BATCH_CHARACTERS", 700)
    original, left = os.replace, 0

    def replace(old, new):
        nonlocal left
        if left == 0 and not after:
            raise Killed
        original(old, new)
        if left == 0:
            raise Killed
        left -= 1

    monkeypatch.setattr(os, "replace", replace)
    units = cut(TEXTS, 3)
    # Starts that live a little longer each time, in the folder where others died.
    for kills in itertools.count():
        left = kills % 7
        try:
            make(tmp_path, units)
            break
        except Killed:
            assert kills < 99
    assert kills > 9
    for file in (tmp_path / "store").glob("*.partial-*"):
        file.unlink()  # as the command does
    assert files(tmp_path) == files(made)


def test_a_kill_at_any_batch_counts_each_document_once(made, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUN_TOKENS", 900)
    monkeypatch.setattr(runs, "_BATCH_CHARACTERS", 300)
    for calls in range(0, 24, 3):
        folder, left = tmp_path / str(calls), [calls]

        def tick(*numbers):
            left[0] -= 1
            if left[0] < 0:
                raise Killed

        with pytest.raises(Killed):
            make(folder, cut(TEXTS, 2), tick=tick)
        done = sum(runs.documents_read(folder / "runs", n) or 0 for n in (0, 1))
        assert done in (0, 150)
        seen = []
        make(folder, cut(TEXTS, 2), tick=lambda *numbers: seen.append(numbers))
        assert files(folder) == files(made)
        # What a unit's earlier runs hold is told as well: progress is of the whole.
        assert np.sum(seen, axis=0)[0] == 300 - done
        assert runs.documents_read(folder / "runs", 1) == 150


def test_a_cut_run_is_refused(tmp_path):
    make(tmp_path, [TEXTS], counts=(0, 0))
    file = tmp_path / "runs" / "run-000000-0000.ids"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UserError, match="run-000000-0000.ids is cut off; delete .* begin again"):
        make(tmp_path, [TEXTS])


# ---- what stands in a document


def test_special_tokens_stand_around_each_document(tmp_path):
    texts = ["<|endoftext|>", "b", "c<|endoftext|>"]
    for name, bos, eos, want in (
        ("none", None, None, ([], [256])),
        ("both", 1, 2, ([1], [2, 256])),
        ("same", 256, 256, ([256], [256])),
    ):
        job = {"bos": bos, "eos": eos}
        job = Job(None, Listed([]), byte_vocabulary(), separator=256, heldout_fraction=0.1, **job,
                  seed=0)  # fmt: skip
        encoded = runs._encode(job, None, texts)
        for text, (content, size, ids) in zip(texts, encoded):
            assert (content, size, ids.dtype) == (text, len(text), np.uint16)
            assert ids.tolist() == [*want[0], *text.encode(), *want[1]], name


@pytest.mark.parametrize(
    "units, options, words",
    [
        ([["a"], ["b", "a\0b"]], {"separator": 0}, r"unit 1: a document is encoded to the separ"),
        ([[np.array([1, 9])]], {}, "unit 0: has ids 1 to 9, the vocabulary 0 to 8; give the --tok"),
        ([[np.array([-1, 3])]], {}, "unit 0: has ids -1 to 3"),
        ([[np.array([1, 5])]], {}, "unit 0: a document is encoded to the separator id 5"),
    ],
)
def test_ids_that_cannot_be_are_refused_with_their_unit(tmp_path, units, options, words):
    if not isinstance(units[0][0], str):
        options = {"tokens": True, "vocabulary": ids_only(9), "separator": 5}
    with pytest.raises(UserError, match=words) as caught:
        make(tmp_path, units, **options)
    assert "\n" not in str(caught.value)


def test_bytes_of_ids_are_those_of_their_text_or_unknown(tmp_path):
    units = [[np.array(list(text.encode()), np.uint16) for text in TEXTS]]
    entries = make(tmp_path / "known", units, tokens=True)
    size = sum(e["text_bytes"] for s in SPLITS for e in entries[s])
    assert size == sum(map(len, TEXTS))
    entries = make(tmp_path / "unknown", units, tokens=True, vocabulary=ids_only(257))
    assert {e["text_bytes"] for s in SPLITS for e in entries[s]} == {None}
    assert files(tmp_path / "known") == files(tmp_path / "unknown")


def test_a_range_without_documents_makes_no_shard(tmp_path):
    entries = make(tmp_path, [["alone"]], counts=(2, 2))
    assert sorted(e is None for s in SPLITS for e in entries[s]) == [False, True, True, True]
    assert len(files(tmp_path)) == 2


# ---- processes and progress


def work(shared, number, tick):
    tick(1, number, 2)
    if number == shared:
        raise UserError("this one is wrong")
    if number == -1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * 10


def test_calls_in_processes_and_in_this_one_give_the_same():
    for processes in (1, 2):
        seen = []
        with workers.Workers(processes, 1, 99) as pool:
            calls = [(number,) for number in range(5)]
            results = pool.run(work, calls, lambda sums, done: seen.append((*sums, done)))
            assert results == [0, 10, 20, 30, 40] and seen[-1] == (5, 10, 10, 5)
            assert seen == sorted(seen)
            with pytest.raises(UserError, match="this one is wrong"):
                pool.run(work, [(99,)], lambda sums, done: None)


def slow_work(folder, number, tick):
    if number == 0:
        raise UserError("this one is wrong")
    for _ in range(30):
        time.sleep(0.1)
        tick(1, 1, 1)
    (folder / str(number)).touch()


def test_an_error_ends_the_calls_of_other_processes_too(tmp_path):
    with pytest.raises(UserError, match="this one is wrong"):
        with workers.Workers(2, 1, tmp_path) as pool:
            pool.run(slow_work, [(1,), (0,), (2,), (3,), (4,)], lambda sums, done: None)
    assert not list(tmp_path.iterdir())  # neither one that ran nor one that was queued went on


def test_a_killed_process_is_told_in_one_line():
    with workers.Workers(2, 1, 99) as pool:
        with pytest.raises(UserError, match="a process was killed.*the same command goes on"):
            pool.run(work, [(-1,), (1,)], lambda sums, done: None)


def test_progress_in_a_log_has_rate_and_time_left(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(workers.time, "monotonic", lambda: now[0])
    with workers.Progress("encoding", 4_000_000) as progress:
        # The first 1 MB were done by a command that was killed, and do not make this one fast.
        for seconds, done, tokens in (
            (1, 1e6, 5e5),
            (6, 2e6, 7e5),
            (11, 2e6, 10e5),
            (12, 3e6, 2e6),
        ):
            now[0] = seconds
            progress.update(int(done), int(tokens))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["encoding", "encoding: 50% of 4.0 MB, 50.0 k tokens/s, 0:20 left"]
