"""The report on a store: its figures by hand, its files, and what a run takes from them."""

import json
import struct

import numpy as np
import pytest

from tst_jax import data_report
from tst_jax.data import corpus, vocabulary
from tst_jax.data.mutual_information import fit
from tst_jax.data.store import StoreError, open_store
from tst_jax.data.store_writer import write_store
from tst_jax.schedule import TSTConfig
from tst_jax.superposition import slot_weights


def make(path, stay=0.8, lengths=(300,) * 200, words=None, seed=0):
    """A store in which each token repeats the one before with probability `stay`."""
    rng = np.random.default_rng(seed)

    def documents(lengths):
        for n in lengths:
            ids = rng.integers(1, 41, size=n)
            for t in np.flatnonzero(rng.random(n) < stay):
                ids[t] = ids[max(t - 1, 0)]
            yield ids, 4 * n

    return write_store(
        path,
        vocabulary=words or vocabulary.ids_only(61),
        train=documents(lengths),
        heldout=documents((7, 9)),
        separator_id=words.id_of(vocabulary.SEPARATOR) if words else 0,
        provenance={},
        shard_tokens=20_000,
    )


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """(store, its report, what the command printed lies in data_report.txt)."""
    store = make(tmp_path_factory.mktemp("report") / "store")
    assert data_report.main([f"--store={store.path}"]) == 0
    return store, json.loads((store.path / corpus.REPORT).read_text())


def test_command_writes_json_text_and_picture_beside_the_store(reported, capsys):
    store, report = reported
    assert data_report.main([f"--store={store.path}", "--bag_size=3", "--pairs=9000"]) == 0
    printed = capsys.readouterr().out
    assert (store.path / "data_report.txt").read_text() in printed
    again = json.loads((store.path / "data_report.json").read_text())
    assert again["pairs"] == 9000 and 9000 < report["pairs"] == 200 * (301 - 192)
    assert again["store"] == report["store"] == store.fingerprint
    (store.path / "data_report.json").write_text(json.dumps(report))

    picture = (store.path / "data_report.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1430, 546)
    assert not list(store.path.glob("*.partial"))
    assert open_store(store.path).fingerprint == store.fingerprint  # still a store

    weights = " ".join(f"{w:.4f}" for w in slot_weights("fitted", 3, again["fitted"]))
    assert f"bag size  3: {weights}" in printed and "bag size  4" not in printed
    for line in (
        "special tokens   separator 0",
        "train            200 documents, 60,200 tokens, 3.987 bytes per token, shards: 3",
        "heldout          2 documents, 18 tokens, 3.556 bytes per token, shards: 1",
        "the paper's for DCLM:     3.63, 1.35, -1.25",
        "verifying",
        "counting pairs",
    ):
        assert line in printed


def test_figures_are_those_by_hand(tmp_path):
    lengths = np.random.default_rng(1).integers(1, 500, size=300)
    store = make(tmp_path / "store", lengths=lengths)
    report = data_report.measure(store, bag_size=6)
    sizes = lengths + 1  # with the separator
    for row in report["lengths"]:
        inside = sizes[(sizes >= row["from"]) & (sizes < 2 * row["from"])]
        assert (row["documents"], row["tokens"]) == (inside.size, inside.sum())
    assert sum(row["documents"] for row in report["lengths"]) == 300
    assert list(report["padding_efficiency"]) == ["1", "2", "4", "6", "8", "16"]
    for s, found in report["padding_efficiency"].items():
        padded = sum(-(-n // int(s)) * int(s) for n in sizes.tolist())
        assert found == sizes.sum() / padded
    ids = np.asarray(store.tokens("train"))
    counts = np.bincount(ids, minlength=61)
    assert report["distinct_ids"] == np.count_nonzero(counts) == 41
    first = report["frequent"][0]
    assert (first["id"], first["count"]) == (counts.argmax(), counts.max())
    assert first["token"] is None and len(report["frequent"]) == 8


def test_tokens_are_shown_by_name(tmp_path):
    store = make(tmp_path / "store", words=vocabulary.byte_vocabulary(), lengths=(20,) * 300)
    report = data_report.measure(store)
    assert {row["id"]: row["token"] for row in report["frequent"]}[256] == vocabulary.SEPARATOR
    assert f"256 '{vocabulary.SEPARATOR}' 4.76%" in data_report.text(report)


def test_a_run_takes_the_constants(reported, tmp_path):
    store, report = reported
    said = []
    tst = corpus.with_fitted(TSTConfig(weights="fitted"), [store], [1.0], said.append)
    np.testing.assert_allclose(tst.fitted_constants(), report["fitted"], rtol=1e-5)

    other = make(tmp_path / "other", stay=0.95, seed=7)
    with pytest.raises(StoreError, match="has no data_report.json, other stores have"):
        corpus.with_fitted(TSTConfig(weights="fitted"), [store, other], [0.25, 0.75], said.append)
    assert data_report.main([f"--store={other.path}"]) == 0
    tst = corpus.with_fitted(TSTConfig(weights="fitted"), [store, other], [0.25, 0.75], said.append)
    second = json.loads((other.path / corpus.REPORT).read_text())
    mean = 0.25 * np.array(report["mutual_information"])
    mean += 0.75 * np.array(second["mutual_information"])
    np.testing.assert_allclose(tst.fitted_constants(), fit(report["distances"], mean), rtol=1e-5)

    (other.path / corpus.REPORT).write_text(json.dumps(report))
    with pytest.raises(StoreError, match="report of another store"):
        corpus.with_fitted(TSTConfig(weights="fitted"), [other], [1.0], said.append)


def test_a_store_without_structure_gets_its_report_without_a_fit(tmp_path, capsys):
    store = make(tmp_path / "store", stay=0.0)
    assert data_report.main([f"--store={store.path}", f"--out={tmp_path / 'a' / 'b'}"]) == 0
    assert "no fit: mutual information does not decay" in capsys.readouterr().out
    names = sorted(file.name for file in (tmp_path / "a" / "b").iterdir())
    assert names == ["data_report.json", "data_report.png", "data_report.txt"]
    assert json.loads((tmp_path / "a" / "b" / corpus.REPORT).read_text())["fitted"] is None
    assert not (store.path / corpus.REPORT).exists()


def test_files_are_replaced_whole_or_not_at_all(reported, tmp_path, monkeypatch):
    def fails(path, report):
        path.write_bytes(b"half")
        raise OSError("disk full")

    data_report.write(tmp_path, reported[1])
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    monkeypatch.setattr(data_report, "draw", fails)
    with pytest.raises(OSError, match="disk full"):
        data_report.write(tmp_path, reported[1])
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_errors_have_one_line(reported, tmp_path, capsys):
    path = reported[0].path
    (tmp_path / "file").touch()
    tiny = make(tmp_path / "tiny", lengths=(0, 0, 0)).path
    for arguments, wanted in {
        (f"--store={tmp_path / 'none'}",): "no such folder",
        (f"--store={path}", f"--out={tmp_path / 'file'}"): "cannot be written to",
        (f"--store={path}", "--pairs=0"): "--pairs=0: give a number of at least 1",
        (f"--store={path}", "--bag_size=0"): "--bag_size=0: give a number of at least 1",
        (f"--store={tiny}",): "train split: no document has two tokens",
    }.items():
        assert data_report.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and wanted in error and error.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        data_report.main(["--store=x", "--pairs=many"])
    assert capsys.readouterr().err.count("\n") == 1
