"""Data sets of other packages: what they yield however they are cut, and what they refuse."""

import sys

import numpy as np
import pytest
from absl import logging
from source_checks import TEXTS, check_every_cut, lines, read, refuses

from tst_jax.data import units
from tst_jax.data.packaged import HuggingFace, Tfds


@pytest.fixture(scope="module")
def tfds_folder(tmp_path_factory):
    tfds = pytest.importorskip("tensorflow_datasets")

    class SmallTexts(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"n": tfds.features.Scalar(np.int64), "text": tfds.features.Text()}
            features["raw"] = tfds.features.Tensor(shape=(), dtype=np.str_)
            features = tfds.features.FeaturesDict(features)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, manager):
            return {"train": self._generate_examples(TEXTS), "test": self._generate_examples("xyz")}

        def _generate_examples(self, texts):
            for i, text in enumerate(texts):
                yield i, {"n": i, "text": text, "raw": b"\xff" if i == 2 else b"r"}

    folder, verbosity = tmp_path_factory.mktemp("tfds"), logging.get_verbosity()
    config = tfds.download.DownloadConfig(try_download_gcs=False)
    for file_format in ("array_record", "parquet"):
        builder = SmallTexts(data_dir=folder / file_format, file_format=file_format)
        builder.download_and_prepare(download_config=config)
    logging.set_verbosity(verbosity)
    return folder


def test_tfds(tfds_folder, monkeypatch):
    data_dir = f"{tfds_folder}/array_record"
    make = lambda **options: Tfds("small_texts", data_dir=data_dir, **options)
    expected = read(make())
    assert sorted(expected) == sorted(TEXTS)
    monkeypatch.setattr(units, "ROWS", 4)
    check_every_cut(monkeypatch, make(), expected, [*range(1, 2000, 50), 10**6])
    assert read(make(split="train[:5]")) == expected[:5]
    assert sorted(read(make(split="test"))) == ["x", "y", "z"]
    assert "tensorflow" not in sys.modules
    refuses("split nope: .*give one of train, test", make(split="nope").units)
    refuses("has no field 'body'; give one of n, text, raw", make(field="body").units)
    refuses("field 'n' is .*not text", make(field="n").units)
    refuses(r"example \d+ of train: field 'raw' is not UTF-8", lambda: read(make(field="raw")))


def test_tfds_says_how_to_prepare(tfds_folder, tmp_path):
    advice = r"; prepare it: tfds.builder\(.*file_format='array_record'\).download_and_prepare\(\)$"
    refuses(f"not found.*{advice}", Tfds("no_such_set", data_dir=str(tmp_path)).units)
    refuses(f"is not prepared in .*{advice}", Tfds("mnist", data_dir=str(tmp_path)).units)
    other = Tfds("small_texts", data_dir=f"{tfds_folder}/parquet")
    refuses(f"has file_format parquet, not array_record{advice}", other.units)


def test_hugging_face_names_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refuses("needs the package datasets.*pip install datasets", HuggingFace("missing").units)


def test_hugging_face_saved_to_disk(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": TEXTS, "n": range(len(TEXTS))})
    data.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": data, "b": data.select([1, 0])}).save_to_disk(tmp_path / "two")
    for name in ("one", "two"):
        sizes = (1, 20, 50, 10**6)
        check_every_cut(monkeypatch, HuggingFace(f"{tmp_path}/{name}"), TEXTS, sizes)
    assert read(HuggingFace(f"{tmp_path}/two", split="b")) == ["", "a"]
    refuses("has no split c; give one of train, b", HuggingFace(f"{tmp_path}/two", "c").units)
    refuses("no field 'body'", HuggingFace(f"{tmp_path}/one", field="body").units)
    refuses("'n' is of type int64", HuggingFace(f"{tmp_path}/one", field="n").units)
    datasets.Dataset.from_dict({"text": ["a", None]}).save_to_disk(tmp_path / "null")
    refuses("row 1: field 'text' is null", lambda: read(HuggingFace(f"{tmp_path}/null")))


def test_hugging_face_streams_shards(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_bytes(lines([f"{i} {text}" for text in TEXTS]))
    source = HuggingFace(str(tmp_path))
    assert read(source) == [f"{i} {text}" for i in range(3) for text in TEXTS]
    assert len(source.units()) == 3
    refuses("check its name, split and config", HuggingFace(str(tmp_path), "c").units)
    refuses("check its name, split and config", HuggingFace(f"{tmp_path}/none").units)
    refuses("no field 'body'", HuggingFace(str(tmp_path), field="body").units)
