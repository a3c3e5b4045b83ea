"""Proves what a run does with its data: mixtures, packed documents, batch sizes that change, what
the metrics say of them, and what is refused before anything is compiled or written.
"""

import copy
import dataclasses
import json
import shutil
import time

import numpy as np
import pytest
from test_train import assert_same_bits, final_state

from tst_jax import metrics, programs
from tst_jax.config import ConfigError
from tst_jax.data import corpus
from tst_jax.data.order import DataError, Order
from tst_jax.data.store import StoreError, open_store
from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import ids_only
from tst_jax.superposition import slot_weights
from tst_jax.train import train

VOCAB = 61


def make_store(path, tokens, seed, size=VOCAB):
    rng = np.random.default_rng(seed)

    def documents(left):
        while left > 0:
            length = int(rng.integers(3, 60))
            left -= length
            yield 1 + (np.arange(length) * (seed + 1) + rng.integers(60)) % 60, 2 * length

    return write_store(
        path,
        vocabulary=ids_only(size),
        train=documents(tokens),
        heldout=documents(600),
        separator_id=0,
        provenance={},
        shard_tokens=700,
    )


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Two, of 3,000 and 1,000 tokens in shards of 700."""
    folder = tmp_path_factory.mktemp("stores")
    return [make_store(folder / name, n, n) for name, n in (("dclm", 3000), ("edu", 1000))]


@pytest.fixture
def mixed(make_config, stores):
    config = make_config(", ".join(str(store.path) for store in stores))
    config.data.weights, config.data.packing = "0.7,0.3", "document"
    config.checkpoint.keep = 20
    return config


@pytest.fixture(scope="module")
def whole(make_config, stores, tmp_path_factory):
    """Mixture, packed documents and a batch size that grows, without a stop: (config, workdir)."""
    config = make_config(", ".join(str(store.path) for store in stores))
    config.data.weights, config.data.packing = "0.7,0.3", "document"
    config.data.rows_from = "12:8"
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    train(config, workdir)
    return config, workdir


def test_metrics_say_what_was_read(whole, stores):
    config, workdir = whole
    lines = metrics.read_metrics(workdir)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 21))
    tokens = 0
    for line in steps:
        rows = 8 if line["step"] > 12 else 4
        most = rows * 8 * line["bag_size"]
        valid = line["tokens"] - tokens
        tokens = line["tokens"]
        assert 0 < line["padding_efficiency"] <= 1
        assert valid == pytest.approx(line["padding_efficiency"] * most)
        assert 0 <= line["data_wait_seconds"] <= line["step_seconds"]
    assert min(line["padding_efficiency"] for line in steps) < 1  # documents of odd lengths
    last = steps[-1]
    # Rows in exact shares, stage by stage; the store's own share of pads.
    sources = {name: last[f"source_tokens/{name}"] for name in ("dclm", "edu")}
    assert sum(sources.values()) == pytest.approx(tokens, rel=0.05)
    assert sources["dclm"] / sources["edu"] == pytest.approx(7 / 3, rel=0.15)
    for name, store in zip(("dclm", "edu"), stores):
        size = store.count("train", "tokens")
        assert last[f"epochs/{name}"] == pytest.approx(sources[name] / size, rel=0.05)
    for line in lines:
        if "eval_loss" in line:
            parts = [line["eval_loss/dclm"], line["eval_loss/edu"]]
            assert line["eval_loss"] == pytest.approx(0.7 * parts[0] + 0.3 * parts[1])
            ratio = sum(w * s.bytes_per_token("heldout") for w, s in zip((0.7, 0.3), stores))
            bits = line["eval_loss"] / np.log(2) / ratio
            assert line["eval_bits_per_byte"] == pytest.approx(bits)


@pytest.mark.parametrize("stop", [7, 8, 12])
def test_a_batch_size_may_change_at_a_checkpoint(whole, tmp_path, stop):
    """The run that learns of it when it resumes ends in the bits of the one that knew (rule 3)."""
    config, workdir = whole
    first = copy.deepcopy(config)
    first.data.rows_from, first.stop_after = "", stop
    train(first, tmp_path / "run")
    train(config, tmp_path / "run")
    assert_same_bits(final_state(config, tmp_path / "run")[0], final_state(config, workdir)[0])
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["data"]["rows_from"] == "12:8"  # the history of the run stands in its config


def test_a_batch_size_is_no_switch(whole, tmp_path, monkeypatch):
    """What is done anew at each switch is not where only the number of rows changes (rule 15)."""
    config, workdir = whole
    switched = []
    compile_run = programs.compile_run

    def watched(*args):
        found = compile_run(*args)
        return dataclasses.replace(found, switch=lambda state: switched.append(1) or state)

    monkeypatch.setattr(programs, "compile_run", watched)
    shutil.copytree(workdir, tmp_path / "run")
    for removed, times in (("20",), 0), (("20", "12"), 1):
        for step in removed:
            shutil.rmtree(tmp_path / "run/checkpoints" / step)
        train(config, tmp_path / "run")  # from step 12, then from the switch after step 8
        assert len(switched) == times


def test_the_past_cannot_change(whole, tmp_path):
    config, workdir = whole
    shutil.copytree(workdir, tmp_path / "run")
    before = (tmp_path / "run/config.json").read_text()
    for text in ("", "11:8", "12:4", "5:2,12:8"):
        other = copy.deepcopy(config)
        other.data.rows_from = text
        with pytest.raises(ConfigError, match="data.rows_from: 12:8 -> "):
            train(other, tmp_path / "run")
    other = copy.deepcopy(config)
    other.data.weights = "0.5,0.5"
    with pytest.raises(ConfigError, match="data.weights: 0.7,0.3 -> 0.5,0.5"):
        train(other, tmp_path / "run")
    assert (tmp_path / "run/config.json").read_text() == before


# ---- refusals


def refused(config, workdir, kind, match):
    with pytest.raises(kind, match=match) as caught:
        train(config, workdir)
    assert "\n" not in str(caught.value)
    assert not workdir.exists()


def test_repeats_are_said_beforehand_and_max_epochs_refuses(mixed, tmp_path, capsys):
    """edu gives 0.3 of the rows: in 20 steps those are more than its 1,000 tokens."""
    mixed.tst.ratio, mixed.data.rows = 1.0, 8
    mixed.data.max_epochs = 1.0
    refused(mixed, tmp_path / "run", DataError, r"^edu would be read 1\.\d+ times in 20 steps")
    mixed.data.max_epochs, mixed.stop_after = 1.9, 1
    train(mixed, tmp_path / "run")
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "is read again" in line]
    assert "warning: edu is read again from step 1" in line and "epochs in all" in line
    assert printed.index(line) < printed.index("step 1/1")  # before the first step, not at it


@pytest.mark.parametrize("shard", ["train-00001.tokens.bin", "train-00001.documents.npy"])
def test_a_damaged_shard_stops_before_step_0(mixed, stores, tmp_path, shard):
    shutil.copytree(stores[1].path, tmp_path / "edu")
    mixed.data.store = f"{stores[0].path},{tmp_path / 'edu'}"
    file = tmp_path / "edu" / shard
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    refused(mixed, tmp_path / "run", StoreError, f"{shard}: changed since it was written")
    file.write_bytes(data[:-2])
    refused(mixed, tmp_path / "run", StoreError, f"{shard}: has ")
    file.unlink()
    refused(mixed, tmp_path / "run", StoreError, f"{shard}: missing")


def test_what_takes_longest_is_checked_last(mixed, stores, tmp_path, monkeypatch):
    """A wrong mesh is not found only after terabytes were read; and `sizes` reads none of them,
    but a row with an id outside the vocabulary still stops the run."""
    shutil.copytree(stores[0].path, tmp_path / "dclm")
    for file in (tmp_path / "dclm").glob("train-*.tokens.bin"):
        file.write_bytes(b"\xff" * file.stat().st_size)
    mixed.data.store = f"{tmp_path / 'dclm'},{stores[1].path}"
    mixed.mesh.tensor = 3
    refused(mixed, tmp_path / "run", ConfigError, "devices do not fill a mesh")
    mixed.mesh.tensor = 1
    refused(mixed, tmp_path / "run", StoreError, "tokens.bin: changed since it was written")
    mixed.data.verify, mixed.stop_after = "sizes", 1
    with pytest.raises(DataError, match="dclm: holds id 65535 .* the largest is 60"):
        train(mixed, tmp_path / "run")


def test_another_vocabulary_is_refused_by_name(mixed, whole, stores, tmp_path):
    other = make_store(tmp_path / "other", 1000, 1000, size=VOCAB + 1)
    mixed.data.store = f"{stores[0].path},{other.path}"
    match = f"{other.path} was made with none .* 62 tokens.*{stores[0].path} with none .* 61 tokens"
    refused(mixed, tmp_path / "run", StoreError, match)
    config, workdir = whole
    shutil.copytree(workdir, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy/checkpoints/20")
    changed = copy.deepcopy(config)
    changed.data.store = f"{other.path},{other.path}"
    changed.model.vocab_size = 61
    with pytest.raises(ConfigError, match="has 62 entries"):
        train(changed, tmp_path / "copy")
    record = {"stores": ["x", "y"], "vocabulary": stores[0].vocabulary_sha256}
    with pytest.raises(
        StoreError, match=r"trained with the vocabulary sha256 .* has none .ids only. of 62"
    ):
        corpus.check_same("run", record["stores"], [other], record["vocabulary"])
    with pytest.raises(StoreError, match="another store"):
        corpus.check_same("run", record["stores"], stores, record["vocabulary"])


@pytest.mark.parametrize("packing", ["concat", "document"])
def test_the_attention_backend_is_asked_about_documents(mixed, monkeypatch, packing):
    """One that cannot keep them apart says so before anything is compiled (rule 20)."""
    asked = []

    def problem(*args, packed):
        asked.append(packed)
        return "cannot" if packed else None

    monkeypatch.setattr(programs.attention, "problem", problem)
    mixed.data.packing = packing
    if packing == "document":
        with pytest.raises(ConfigError, match="cannot"):
            programs.layout(mixed)
    else:
        programs.layout(mixed)
    assert set(asked) == {packing == "document"}


def test_short_splits_are_refused_by_the_name_of_the_store(mixed, tmp_path):
    mixed.data.positions = 400
    refused(mixed, tmp_path / "run", DataError, "train split of edu")
    mixed.data.positions, mixed.eval.rows = 8, 100
    refused(mixed, tmp_path / "run", DataError, "heldout split of dclm")


# ---- fitted weights


def write_report(store, constants, distances=range(1, 17)):
    offset, scale, exponent = constants
    curve = [offset + scale * d**exponent for d in distances]
    report = {"store": store.fingerprint, "distances": list(distances), "mutual_information": curve}
    (store.path / corpus.REPORT).write_text(json.dumps(report))


def test_fitted_weights_come_from_the_report(make_config, stores, tmp_path, capsys):
    shutil.copytree(stores[0].path, tmp_path / "store")
    store = open_store(tmp_path / "store")
    config = make_config(store.path)
    config.tst.weights, config.stop_after = "fitted", 1
    train(config, tmp_path / "paper")
    assert "the paper's constants for DCLM are taken" in capsys.readouterr().out
    saved = json.loads((tmp_path / "paper/config.json").read_text())
    assert saved["tst"]["fitted"] == "3.63,1.35,-1.25"

    write_report(store, (0.5, 2.0, -0.8))
    train(config, tmp_path / "own")
    saved = json.loads((tmp_path / "own/config.json").read_text())
    found = [float(x) for x in saved["tst"]["fitted"].split(",")]
    np.testing.assert_allclose(found, (0.5, 2.0, -0.8), rtol=1e-4)
    loss = [metrics.read_metrics(tmp_path / run)[0]["loss"] for run in ("paper", "own")]
    assert loss[0] != loss[1]  # the step was made with them
    # A run that began with others does not go on with these by itself.
    with pytest.raises(ConfigError, match="tst.fitted: 3.63,1.35,-1.25 -> "):
        train(config, tmp_path / "paper")
    config.tst.fitted, config.stop_after = "3.63,1.35,-1.25", 2
    train(config, tmp_path / "paper")

    report = json.loads((store.path / corpus.REPORT).read_text())
    (store.path / corpus.REPORT).write_text(json.dumps(report | {"store": "another"}))
    config.tst.fitted = ""
    refused(config, tmp_path / "new", StoreError, "is the report of another store")


def test_fitted_weights_of_a_mixture_are_of_the_mean_curve(stores, tmp_path, make_config):
    """The constants are a matter of `mutual_information.fit`; here, that both curves count."""
    copies = []
    for number, (store, constants) in enumerate(zip(stores, [(1, 2, -1), (3, 1, -1)])):
        shutil.copytree(store.path, tmp_path / str(number))
        copies.append(open_store(tmp_path / str(number)))
        # The second store has short documents only.
        write_report(copies[-1], constants, range(1, 17 - 4 * number))
    tst = dataclasses.replace(make_config(stores[0].path).tst, weights="fitted")
    found = corpus.with_fitted(tst, copies, [0.75, 0.25], print).fitted_constants()
    np.testing.assert_allclose(found, (1.5, 1.75, -1), rtol=1e-4)
    wanted = [1.5 + 1.75 / i for i in (1, 2, 3)]
    weights = slot_weights("fitted", 3, found)
    np.testing.assert_allclose(weights, np.array(wanted) / sum(wanted), rtol=1e-4)
    (copies[1].path / corpus.REPORT).unlink()
    with pytest.raises(StoreError, match="has no data_report.json, other stores have"):
        corpus.with_fitted(tst, copies, [0.75, 0.25], print)


# ---- waiting


def test_waiting_for_data_is_measured(make_config, stores, tmp_path, monkeypatch):
    """A source that takes its time shows as waiting, also though batches are read ahead."""
    config = make_config(stores[0].path)
    config.steps, config.tst.ratio, config.schedule.warmup_fraction = 6, 0.0, 0.0
    place = Order.place

    def slow(self, stage, k):
        time.sleep(0.02)
        return place(self, stage, k)

    monkeypatch.setattr(Order, "place", slow)
    train(config, tmp_path / "run")
    lines = [line for line in metrics.read_metrics(tmp_path / "run") if "loss" in line]
    waited = [line["data_wait_seconds"] for line in lines[2:]]
    assert np.median(waited) > 0.03  # four rows of a batch take 0.08 s
