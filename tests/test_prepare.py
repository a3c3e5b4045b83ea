"""The preparation command: what its store holds, that kills change nothing, and what it refuses."""

import fcntl
import functools
import gzip
import itertools
import json
import os
import pathlib
import random
import re
import signal
import struct
import subprocess
import sys
import sysconfig
import time

import numpy as np
import pytest

from tst_jax import prepare
from tst_jax.data import runs, vocabulary
from tst_jax.data.store import StoreError, open_store
from tst_jax.errors import UserError

ROOT = pathlib.Path(prepare.__file__).parent.parent
STDLIB = pathlib.Path(sysconfig.get_paths()["stdlib"])
MODULES = "abc bisect calendar copy csv fnmatch glob heapq keyword operator os queue sched shlex"
MODULES = f"{MODULES} shutil textwrap this token".split()
SPELLS_SEPARATOR = "before <|endoftext|> after \u00e9\u4e16\U0001f600\r\n\x00" * 9
SEED = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small real corpus: some modules, one of them twice, and one text with odd characters."""
    folder = tmp_path_factory.mktemp("corpus")
    for module in MODULES:
        (folder / f"{module}.py").write_bytes((STDLIB / f"{module}.py").read_bytes())
    (folder / "deep").mkdir()
    (folder / "deep" / "copy_again.py").write_bytes((STDLIB / "copy.py").read_bytes())
    (folder / "separator.py").write_bytes(SPELLS_SEPARATOR.encode())
    return folder


@functools.cache
def documents_of(corpus):
    return sorted({file.read_bytes().decode() for file in corpus.rglob("*.py")})


def prepare_corpus(corpus, out, **options):
    files = f"{corpus}/**/*.py"
    options = {"source": "text", "files": files, "heldout_fraction": 0.2, "seed": SEED, **options}
    options.setdefault("tokenizer", "bytes")
    return prepare.prepare_store(out, **{"processes": 1, "shard_tokens": 50_000, **options})


@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory):
    return prepare_corpus(corpus, tmp_path_factory.mktemp("stores") / "store")


@pytest.fixture(scope="module")
def bpe(corpus, tmp_path_factory):
    """The same with a BPE that is trained on it."""
    out = tmp_path_factory.mktemp("stores") / "bpe"
    return prepare_corpus(corpus, out, tokenizer=None, vocab_size=400)


def documents(store, split):
    """The ids of each document, separator included, in order."""
    found, begin = [], 0
    for offsets in store.documents(split):
        part = store.tokens(split)[begin : begin + offsets[-1]]
        found += [part[i:j] for i, j in itertools.pairwise(offsets)]
        begin += offsets[-1]
    return found


def texts(store, split):
    return store.vocabulary().decode_batch([ids[:-1] for ids in documents(store, split)])


def shards(folder):
    """What must be the same bytes, whatever happened meanwhile."""
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.name != "manifest.json"}


def contents(folder):
    return {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.rglob("*") if f.is_file()}


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
    assert len(train + heldout) == len(MODULES) + 1 and len(heldout) > 1
    assert SPELLS_SEPARATOR in train + heldout  # as text: it did not become a separator
    assert all(np.sum(ids == store.separator_id) == 1 for ids in documents(store, "train"))
    size = sum(len(text.encode()) for text in train)
    assert store.bytes_per_token("train") == size / len(store.tokens("train"))
    assert len(store.manifest["shards"]["train"]) > (1 if name == "bpe" else 3)
    provenance = store.manifest["provenance"]
    assert (provenance["documents"], provenance["duplicates_dropped"]) == (len(MODULES) + 2, 1)


def write_jsonl(path, some):
    data = "".join(json.dumps({"body": text}) + "\n" for text in some).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("processes", [1, 3])
def test_files_formats_and_processes_do_not_change_a_byte(corpus, store, tmp_path, processes):
    some = documents_of(corpus) + documents_of(corpus)[:3] + [""]
    random.Random(processes).shuffle(some)
    for number, ending in enumerate(("jsonl", "jsonl.gz", "jsonl", "jsonl.gz")):
        write_jsonl(tmp_path / f"{number}.{ending}", some[number::4])
    options = {"source": "jsonl", "files": f"{tmp_path}/*.jsonl*", "field": "body"}
    found = prepare_corpus(corpus, tmp_path / "out", processes=processes, **options)
    assert shards(found.path) == shards(store.path)
    assert found.fingerprint == store.fingerprint
    provenance = found.manifest["provenance"]
    assert provenance["empty_dropped"] == 1 and provenance["duplicates_dropped"] == 3


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
        prepare_corpus(corpus, tmp_path / "refused", separator="65", files=f"{corpus}/copy.py")


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
    with pytest.raises(StoreError, match="another request .vocab_size 400 .* tokenizer"):
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


# ---- kills, and other commands at the same time


@pytest.fixture(scope="module")
def kill_corpus(tmp_path_factory):
    """Some MB in six units, so that two processes have work for a few seconds."""
    folder = tmp_path_factory.mktemp("kills")
    some = [(STDLIB / f"{module}.py").read_text() for module in MODULES]
    for number in range(6):
        write_jsonl(
            folder / f"{number}.jsonl", [f"# {number} {k}\n{t}" for k in (1, 2) for t in some]
        )
    return folder


def test_a_command_killed_at_any_time_goes_on_to_the_same_store(kill_corpus, bpe, tmp_path):
    out, work = tmp_path / "out", tmp_path / ".out.preparing"
    flags = {"source": "jsonl", "field": "body", "files": f"{kill_corpus}/*.jsonl"}
    flags |= {"tokenizer": f"{bpe.path}/tokenizer.json", "shard_tokens": 300_000, "processes": 2}
    command = [sys.executable, "-m", "tst_jax.prepare", f"--out={out}"]
    command += [f"--{name}={value}" for name, value in flags.items()]

    def start():
        return subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    # When a process begins to encode, a unit is done, the second is, shards are made.
    moments = ["request.json", "runs/unit-*", "runs/unit-*", "store/*"]
    rng, kills = random.Random(0), 0
    for moment in moments:
        before, process = len(list(work.glob(moment))), start()
        while process.poll() is None and len(list(work.glob(moment))) <= min(before, 5):
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        # Its workers hold the pipe too: its end says that none of them has outlived the command.
        process.communicate(timeout=20)
        kills += process.returncode == -signal.SIGKILL
    assert kills >= 3
    process = start()
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert "going on with the work" in text or "already prepared" in text
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    whole = prepare.prepare_store(tmp_path / "whole", **flags | {"processes": 1})
    assert shards(out) == shards(whole.path) and whole == open_store(whole.path)
    assert open_store(out).fingerprint == whole.fingerprint


def test_work_in_progress_is_held_against_a_second_command(corpus, tmp_path):
    work = tmp_path / ".store.preparing"
    work.mkdir()
    with open(work / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match=r"/store: another command is preparing it; wait"):
            prepare_corpus(corpus, tmp_path / "store")
    prepare_corpus(corpus, tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_unfinished_work_of_another_request_is_left_alone(corpus, store, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runs, "merge_shard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus(corpus, tmp_path / "store")
    before = contents(tmp_path)
    words = rf"{tmp_path}/\.store\.preparing: holds unfinished work of another request .seed 2"
    with pytest.raises(StoreError, match=words):
        prepare_corpus(corpus, tmp_path / "store", seed=SEED + 1)
    assert len(before) > 4 and contents(tmp_path).keys() == before.keys()
    assert shards(prepare_corpus(corpus, tmp_path / "store").path) == shards(store.path)


def test_a_rerun_verifies_and_touches_nothing(corpus, store, capsys):
    before = contents(store.path)
    assert prepare_corpus(corpus, store.path, processes=2) == store
    assert "already prepared" in capsys.readouterr().out
    for change, words in (
        ({"seed": 3}, "seed 2 there and 3 here"),
        ({"bos": "7"}, "bos None there and 7 here"),
        ({"heldout_fraction": 0.5}, "heldout_fraction 0.2 there and 0.5 here"),
        ({"files": f"{corpus}/*.py"}, "files .* units "),
        ({"tokenizer": None, "vocab_size": 300}, "vocab_size 257 there and 300 here"),
    ):
        with pytest.raises(StoreError, match=f"is a store of another request .{words}"):
            prepare_corpus(corpus, store.path, **change)
    assert contents(store.path) == before


def test_a_rerun_finds_damage_and_a_corpus_that_has_grown(corpus, tmp_path):
    files = tmp_path / "corpus"
    files.mkdir()
    for number, text in enumerate(documents_of(corpus)):
        (files / f"{number}.py").write_bytes(text.encode())
    store = prepare_corpus(files, tmp_path / "store")
    (files / "new.py").write_text("new = 1\n")
    with pytest.raises(StoreError, match="another request .units"):
        prepare_corpus(files, store.path)
    file = store.path / "train-00000.tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(StoreError, match=re.escape(str(file))):
        prepare_corpus(files, store.path)


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_foreign_folder_is_refused_untouched(corpus, tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text('{"mine": 1}')
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="not empty|format is None"):
        prepare_corpus(corpus, tmp_path / "mine")
    assert contents(tmp_path) == before and os.listdir(tmp_path) == ["mine"]


# ---- the command


def test_the_command_reports_what_it_made(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(corpus)})
    monkeypatch.setattr(prepare.Progress.__init__, "__defaults__", ("tokens", 0.0))
    arguments = ["--source=stdlib", f"--out={tmp_path / 'store'}", "--vocab_size=300"]
    arguments += ["--heldout_fraction=0.2", "--seed=2", "--processes=1"]
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
    assert words in err and err.startswith("prepare: ")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert sorted(os.listdir()) == ["bad.json", "latin.txt", "ok.txt"]  # and nothing else


def test_the_module_runs_by_itself_without_jax(tmp_path):
    script = (
        "import sys; from tst_jax import prepare; "
        "assert 'jax' not in sys.modules, 'jax was imported'; print(prepare.DEFAULT_VOCAB_SIZE)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "8192"), done.stderr
