"""The preparation command: what its store holds, whatever the corpus, and what it refuses."""

import os
import random
import re
import struct
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
from prepared_corpus import (
    ROOT,
    SEED,
    SPELLS_SEPARATOR,
    documents,
    documents_of,
    make_corpus,
    prepare_corpus,
    shards,
    texts,
    write_jsonl,
)

from tst_jax import prepare
from tst_jax.data import sources, vocabulary
from tst_jax.data.store import StoreError, open_store
from tst_jax.errors import UserError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory):
    return prepare_corpus(corpus, tmp_path_factory.mktemp("stores") / "store")


@pytest.fixture(scope="module")
def bpe(corpus, tmp_path_factory):
    """The same with a BPE that is trained on it."""
    out = tmp_path_factory.mktemp("stores") / "bpe"
    return prepare_corpus(corpus, out, tokenizer=None, vocab_size=400)


def run(capsys, *arguments):
    """Runs the command; returns (status, stdout, stderr)."""
    try:
        status = prepare.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


# ---- what a store holds


@pytest.mark.parametrize("name", ["store", "bpe"])
def test_prepared_documents_decode_to_the_corpus(corpus, request, name):
    store = request.getfixturevalue(name)
    train, heldout = texts(store, "train"), texts(store, "heldout")
    assert sorted(train + heldout) == documents_of(corpus)  # each once, also the one there twice
    assert len(heldout) > 1
    assert SPELLS_SEPARATOR in train + heldout  # as text: it did not become a separator
    assert all(np.sum(ids == store.separator_id) == 1 for ids in documents(store, "train"))
    size = sum(len(text.encode()) for text in train)
    assert store.bytes_per_token("train") == size / len(store.tokens("train"))
    assert len(store.manifest["shards"]["train"]) > (1 if name == "bpe" else 3)
    provenance = store.manifest["provenance"]
    assert provenance["documents"] == len(train + heldout) + 1 == len(list(corpus.rglob("*.py")))
    assert provenance["duplicates_dropped"] == 1


@pytest.mark.parametrize("processes", [1, 3])
def test_files_formats_and_processes_do_not_change_a_byte(corpus, store, tmp_path, processes):
    some = [*documents_of(corpus), (corpus / "copy-0.py").read_text(), ""]
    random.Random(processes).shuffle(some)
    for number, ending in enumerate(("jsonl", "jsonl.gz", "jsonl", "jsonl.gz")):
        write_jsonl(tmp_path / f"{number}.{ending}", some[number::4])
    options = {"source": "jsonl", "files": f"{tmp_path}/*.jsonl*", "field": "body"}
    found = prepare_corpus(corpus, tmp_path / "out", processes=processes, **options)
    assert shards(found.path) == shards(store.path)
    assert found.fingerprint == store.fingerprint
    provenance = found.manifest["provenance"]
    assert provenance["empty_dropped"] == 1 and provenance["duplicates_dropped"] == 1


def test_another_seed_gives_another_store(corpus, store, tmp_path):
    other = prepare_corpus(corpus, tmp_path / "other", seed=SEED + 1)
    assert set(texts(other, "heldout")) != set(texts(store, "heldout"))


def test_special_tokens_are_named_or_numbered(corpus, store, tmp_path):
    options = {"bos": "7", "eos": "8", "separator": "<|endoftext|>"}
    found = prepare_corpus(corpus, tmp_path / "all", **options)
    assert found.manifest["special"] == {"separator": 256, "bos": 7, "eos": 8}
    assert found.beginning == [256, 7]
    plain = [ids.tolist() for ids in documents(store, "train")]
    assert [d.tolist() for d in documents(found, "train")] == [[7, *d[:-1], 8, 256] for d in plain]
    same = prepare_corpus(corpus, tmp_path / "same", eos="256")
    assert shards(same.path) == shards(store.path)  # once, though it is both
    with pytest.raises(UserError, match=r"copy.*to the separator id 65 inside its text"):
        prepare_corpus(corpus, tmp_path / "refused", separator="65", files=f"{corpus}/copy-0.py")


# ---- tokenizers


def test_the_tokenizer_is_trained_without_the_heldout_text(corpus, bpe, tmp_path, monkeypatch):
    seen, original = [], vocabulary.train_bpe

    def train_bpe(some, size):
        some = list(some)
        seen.extend(some)
        return original(some, size)

    monkeypatch.setattr(vocabulary, "train_bpe", train_bpe)
    again = prepare_corpus(corpus, tmp_path / "store", tokenizer="bpe", vocab_size=400)
    assert set(seen) == set(texts(bpe, "train"))
    # Of a large corpus it sees a sample, from all over it; the whole corpus is encoded.
    seen.clear()
    options = {"source": "jsonl", "field": "body", "vocab_size": 300, "tokenizer": None}
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", documents_of(corpus)[number::4])
    options |= {"files": f"{tmp_path}/*.jsonl", "bpe_bytes": 40_000}
    found = prepare_corpus(corpus, tmp_path / "sample", **options)
    # A unit may go over its share by its last document.
    assert 0 < sum(map(len, seen)) < 40_000 + 4 * max(map(len, documents_of(corpus)))
    assert set(seen) < set(texts(found, "train"))
    assert all(set(seen) & set(documents_of(corpus)[number::4]) for number in range(4))
    assert sorted(texts(found, "train") + texts(found, "heldout")) == documents_of(corpus)
    assert again.fingerprint == bpe.fingerprint


def test_an_existing_tokenizer_is_used_as_it_is(corpus, bpe, tmp_path):
    file = tmp_path / "mine.json"
    file.write_bytes(bpe.vocabulary().data)
    again = prepare_corpus(corpus, tmp_path / "again", tokenizer=str(file))
    assert shards(again.path) == shards(bpe.path) and again.vocab_size == 400
    # The same request in other words; the file's content counts, not its name.
    moved = file.rename(tmp_path / "moved.json")
    assert prepare_corpus(corpus, again.path, tokenizer=str(moved), vocab_size=400) == again
    moved.write_bytes(vocabulary.byte_vocabulary().data)
    with pytest.raises(StoreError, match="another request .tokenizer .* vocab_size 400"):
        prepare_corpus(corpus, again.path, tokenizer=str(moved))


def test_a_sentencepiece_model_makes_a_store(corpus, tmp_path):
    package = pytest.importorskip("sentencepiece")
    options = dict(vocab_size=400, model_type="bpe", byte_fallback=True, minloglevel=2)
    options |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    options |= dict(add_dummy_prefix=False, num_threads=2, max_sentence_length=10**6)
    some = [line for text in documents_of(corpus) for line in text.splitlines()][:500]
    with open(tmp_path / "my.model", "wb") as file:
        package.SentencePieceTrainer.train(
            sentence_iterator=iter(some), model_writer=file, **options
        )
    store = prepare_corpus(corpus, tmp_path / "store", tokenizer=str(tmp_path / "my.model"))
    assert store.vocab_size == 400 and store.vocabulary().token_of(store.separator_id) == "</s>"
    assert sorted(texts(store, "train") + texts(store, "heldout")) == documents_of(corpus)
    assert open_store(store.path).path.joinpath("tokenizer.model").is_file()


# ---- ready-made ids


def write_llmc(path, parts):
    ids = np.concatenate([np.append(part, 256) for part in parts]).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, ids.size
    path.write_bytes(header.tobytes() + ids.tobytes())


def write_megatron(path, parts):
    lengths = np.array([len(part) for part in parts], "<i4")
    starts = (np.cumsum(lengths) - lengths).astype("<i8") * 2
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(parts), len(parts) + 1)
    bounds = np.arange(len(parts) + 1, dtype="<i8")
    index = head + lengths.tobytes() + starts.tobytes() + bounds.tobytes()
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(np.concatenate(parts).astype("<u2").tobytes())


@pytest.mark.parametrize("source, write", [("llmc", write_llmc), ("megatron", write_megatron)])
def test_ready_made_ids_give_the_documents_of_their_text(corpus, store, tmp_path, source, write):
    parts = [np.frombuffer(text.encode(), np.uint8) for text in documents_of(corpus)]
    write(tmp_path / "0.bin", parts[:7])
    write(tmp_path / "1.bin", parts[5:])
    options = {"source": source, "files": f"{tmp_path}/*.bin"}
    found = prepare_corpus(corpus, tmp_path / "known", **options)
    assert sorted(texts(found, "train") + texts(found, "heldout")) == documents_of(corpus)
    size = sum(len(text.encode()) for text in texts(found, "train"))
    assert found.count("train", "text_bytes") == size  # of the decoded text
    options |= {"tokenizer": None, "separator": "256", "vocab_size": 257}
    unknown = prepare_corpus(corpus, tmp_path / "unknown", **options)
    assert unknown.bytes_per_token("train") is None is unknown.count("heldout", "text_bytes")
    for split in ("train", "heldout"):
        assert np.array_equal(unknown.tokens(split), found.tokens(split))
    options |= {"separator": "0", "vocab_size": 200}
    with pytest.raises(UserError, match=r"[01]\.bin.* has ids .* the vocabulary 0 to 199"):
        prepare_corpus(corpus, tmp_path / "refused", **options)


# ---- the command


def test_the_command_reports_what_it_made(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(corpus)})
    monkeypatch.setattr(prepare.Progress.__init__, "__defaults__", ("tokens", 0.0))
    arguments = ["--source=stdlib", f"--out={tmp_path / 'store'}", "--vocab_size=300"]
    arguments += ["--heldout_fraction=0.2", f"--seed={SEED}", "--processes=1"]
    status, out, err = run(capsys, *arguments)
    store = open_store(tmp_path / "store")
    assert (status, err) == (0, "")
    tokens, ratio = len(store.tokens("heldout")), store.bytes_per_token("heldout")
    line = f"heldout: {len(documents(store, 'heldout'))} documents, {tokens:,} tokens"
    summary = f"{line}, {ratio:.3f} bytes per token\nstore: {tmp_path / 'store'}\n"
    assert out.endswith(summary)
    # The progress of a log: how far, how fast, how long still.
    rate = r"^encoding: \d+% of [\d.]+ kB, [\d.]+ [kM]? ?tokens/s, \d+:\d\d left$"
    assert re.search(rate, out, re.M), out
    assert re.search(r"^training the tokenizer: \d+%", out, re.M)
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "") and "already prepared" in out and out.endswith(summary)
    monkeypatch.setattr(prepare.platform, "python_version", lambda: "2.7.18")
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "and 2.7.18 here" in err


def test_other_packages_are_another_request(tmp_path, monkeypatch, capsys):
    """The packages and their versions stand in the store, and what differs is named."""
    for name in ("one", "two"):
        (tmp_path / f"site/{name}").mkdir(parents=True)
        for i in range(8):
            (tmp_path / f"site/{name}/code{i}.py").write_text(f"{name} = {i}\n" * 100)
        (tmp_path / f"site/{name}-1.0.dist-info").mkdir()
        text = f"Name: {name}\nVersion: 1.0\n"
        (tmp_path / f"site/{name}-1.0.dist-info/METADATA").write_text(text)
    monkeypatch.setattr(sources.Stdlib, "units", lambda self: [])
    arguments = ["--source=packages", f"--data_dir={tmp_path / 'site'}", "--vocab_size=257"]
    arguments += [f"--out={tmp_path / 'store'}", "--heldout_fraction=0.5"]
    assert run(capsys, *arguments)[::2] == (0, "")
    request = open_store(tmp_path / "store").manifest["provenance"]["request"]
    assert request["packages"] == ["one==1.0", "two==1.0"]
    (tmp_path / "site/one-1.0.dist-info/METADATA").write_text("Name: one\nVersion: 1.1\n")
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "(packages one==1.0 there and one==1.1 here)" in err


TEXT = ["--source=text", "--files=ok.txt", "--out=x"]
LLMC = ["--source=llmc", "--files=ok.txt", "--out=x"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--source=stdlib"], "--out"),
        (["--source=web", "--out=x"], "invalid choice: 'web'"),
        ([*TEXT, "seed=3"], "unrecognized arguments: seed=3"),
        ([*TEXT, "--vocab=300"], "unrecognized arguments: --vocab=300"),
        (["--source=text", "--out=x"], "--source=text needs --files=..."),
        (["--source=tfds", "--out=x"], "--source=tfds needs --dataset=..."),
        (["--source=stdlib", "--out=x", "--files=*.txt"], "--source=stdlib takes no --files"),
        ([*LLMC, "--tokenizer=bytes", "--field=text"], "--source=llmc takes no --field"),
        (["--source=text", "--out=x", "--files=none/*.txt"], "matches no file"),
        ([*TEXT, "--vocab_size=0"], "--vocab_size=0: a byte-level BPE needs 257 or more"),
        ([*TEXT, "--vocab_size=300"], "the corpus yields"),
        ([*TEXT, "--tokenizer=none.json"], "none.json: no such file"),
        ([*TEXT, "--tokenizer=bad.json"], "bad.json: is not a Hugging Face tokenizer"),
        ([*TEXT, "--tokenizer=bytes", "--vocab_size=9"], "bytes has 257 tokens"),
        ([*TEXT, "--tokenizer=bytes", "--separator=<s>"], "--separator=<s>: "),
        ([*TEXT, "--tokenizer=bytes", "--bos=<s>"], "--bos=<s>: "),
        ([*TEXT, "--eos=<s>"], "--eos=<s>: "),
        ([*TEXT, "--separator=-1"], "--separator=-1: "),
        (LLMC, "holds ids, not text; give the --tokenizer that made them"),
        ([*LLMC, "--vocab_size=9"], "--vocab_size=N and --separator=ID"),
        ([*LLMC, "--tokenizer=bpe"], "give the --tokenizer that made them"),
        ([*LLMC, "--tokenizer=bytes"], "magic"),
        ([*TEXT, "--heldout_fraction=0"], "--heldout_fraction=0.0: give a number between 0 and 1"),
        ([*TEXT, "--heldout_fraction=nan"], "--heldout_fraction=nan"),
        ([*TEXT, "--seed=-1"], "--seed=-1"),
        ([*TEXT, "--processes=-1"], "--processes=-1"),
        ([*TEXT, "--shard_tokens=0"], "--shard_tokens=0"),
        ([*TEXT, "--bpe_bytes=0"], "--bpe_bytes=0"),
        (["--source=text", "--files=ok.txt", "--out=bad.json"], "bad.json: is a file"),
        (["--source=text", "--files=latin.txt", "--out=x"], "latin.txt: is not UTF-8"),
    ],
)
def test_wrong_commands_are_refused_in_one_line(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "ok.txt").write_text("a text")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert words in err and err.startswith("error: ")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert sorted(os.listdir()) == ["bad.json", "latin.txt", "ok.txt"]  # and nothing else


def test_the_module_runs_by_itself_without_jax(tmp_path):
    script = (
        "import sys; from tst_jax import prepare; "
        "assert 'jax' not in sys.modules, 'jax was imported'; print(prepare.DEFAULT_VOCAB_SIZE)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "8192"), done.stderr
