"""Corpora and the preparation command: what goes in, how it is split, and when it is refused."""

import itertools
import os
import pathlib
import subprocess
import sys
import sysconfig

import numpy as np
import pytest

from tst_jax import prepare
from tst_jax.data import corpora
from tst_jax.data.store import StoreError, open_store

STDLIB = pathlib.Path(sysconfig.get_paths()["stdlib"])
MODULES = [
    "abc",
    "bisect",
    "calendar",
    "copy",
    "csv",
    "fnmatch",
    "glob",
    "heapq",
    "keyword",
    "operator",
    "os",
    "queue",
    "sched",
    "shlex",
    "shutil",
    "textwrap",
    "this",
    "token",
]
SPELLS_SEPARATOR = "before <|endoftext|> after \u00e9\u4e16\U0001f600\r\n\x00" * 9
SEED = 1


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


def prepare_corpus(corpus, out, **options):
    options = {"vocab_size": 400, "heldout_fraction": 0.2, "seed": SEED, **options}
    return prepare.prepare_store(out, source="text", files=f"{corpus}/**/*.py", **options)


@pytest.fixture(scope="module")
def store(corpus, tmp_path_factory):
    return prepare_corpus(corpus, tmp_path_factory.mktemp("stores") / "store")


def texts(store, split):
    tokens, offsets = store.tokens(split), store.documents(split)
    for start, end in itertools.pairwise(offsets):
        yield store.tokenizer().decode(tokens[start : end - 1].tolist(), skip_special_tokens=False)


def contents(folder):
    return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.rglob("*.*")}


def run(capsys, *arguments):
    """Runs the command; returns (status, stdout, stderr)."""
    try:
        status = prepare.main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


# ---- the standard library


def test_stdlib_is_real_code_without_installed_packages():
    documents = dict(corpora.stdlib_documents())
    assert documents["os.py"] == (STDLIB / "os.py").read_bytes().decode()
    assert len(documents) > 500
    folders = {folder for name in documents for folder in name.split("/")[:-1]}
    assert folders.isdisjoint({"site-packages", "dist-packages", "lib2to3", "__pycache__"})
    assert max(len(text.encode()) for text in documents.values()) <= 200_000
    assert sum(len(text.encode()) for text in documents.values()) > 5_000_000


def test_stdlib_rules_on_a_made_up_library(tmp_path):
    line = b"x = 1  # nine and more bytes\n"
    files = {
        "b.py": line * 10,
        "a/z.py": line * 10,
        "a/test/t.py": line * 10,
        "encodings/small.py": line * 10,
        "encodings/table.py": line * 400,
        "table.py": line * 400,
        "giant.py": line * 10_000,
        "one_line.py": ("\u00e9" * 150_001).encode(),
        "latin.py": line * 10 + b"\xe9",
        "tiny.py": line,
        "notes.txt": line * 10,
        "_sysconfigdata_x.py": line * 10,
        "lib2to3/l.py": line * 10,
        "site-packages/p/p.py": line * 10,
        "dist-packages/d.py": line * 10,
        "a/__pycache__/c.py": line * 10,
    }
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    documents = list(corpora.stdlib_documents(tmp_path))
    assert [name for name, _ in documents] == [
        "b.py",
        "giant.py",
        "one_line.py",
        "table.py",
        "a/z.py",
        "a/test/t.py",
        "encodings/small.py",
    ]
    giant, one_line = dict(documents)["giant.py"], dict(documents)["one_line.py"]
    assert giant.endswith("bytes\n") and 200_000 - len(line) < len(giant) <= 200_000
    assert one_line == "\u00e9" * 100_000


# ---- files


def test_text_names_do_not_depend_on_where_the_corpus_lies(tmp_path):
    for root in ("here", "there"):
        (tmp_path / root / "sub").mkdir(parents=True)
        (tmp_path / root / "b.txt").write_text("b")
        (tmp_path / root / "sub" / "a.txt").write_text("a")
    here, there = (
        list(corpora.text_documents(f"{tmp_path}/{root}/**/*.txt")) for root in ("here", "there")
    )
    assert here == there == [("b.txt", "b"), ("sub/a.txt", "a")]
    assert list(corpora.text_documents(f"{tmp_path}/here/b.txt")) == [("b.txt", "b")]


def test_text_files_that_cannot_be_used_are_refused(tmp_path):
    with pytest.raises(corpora.CorpusError, match="matches no file"):
        list(corpora.text_documents(f"{tmp_path}/*.txt"))
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(corpora.CorpusError, match=r"a\.txt: is not UTF-8 \(byte 3\)"):
        list(corpora.text_documents(f"{tmp_path}/*.txt"))


# ---- split


def numbered(count):
    return [(f"document {i}", f"text {i}") for i in range(count)]


def test_split_shares_no_text_even_with_duplicates():
    documents = [(f"document {i}", f"text {i % 100}") for i in range(400)]
    train, heldout = corpora.split_documents(documents, 0.3, 0)
    assert len({text for _, text in train + heldout}) == len(train + heldout) == 100
    assert 15 < len(heldout) < 45
    assert {name for name, _ in train + heldout} == {f"document {i}" for i in range(100)}


def test_a_document_s_side_depends_on_its_name_and_the_seed_only():
    few = corpora.split_documents(numbered(100), 0.3, 5)[1]
    many = corpora.split_documents(reversed(numbered(200)), 0.3, 5)[1]
    other = corpora.split_documents(numbered(100), 0.3, 6)[1]
    assert set(few) == set(many) & set(numbered(100))
    assert set(few) != set(other)


def test_split_orders_are_shuffled_by_the_seed():
    first, again, other = (corpora.split_documents(numbered(100), 0.3, s) for s in (0, 0, 1))
    assert first == again != other
    for members in first:
        assert members != sorted(members, key=numbered(100).index)


@pytest.mark.parametrize(
    "fraction, seed, words",
    [
        (1e-9, 0, "split heldout is empty: 20 different documents"),
        (1 - 1e-9, 0, "split train is empty"),
        (0.0, 0, "heldout_fraction is 0.0"),
        (1.0, 0, "heldout_fraction is 1.0"),
        (float("nan"), 0, "heldout_fraction is nan"),
        (0.5, -1, "seed is -1"),
    ],
)
def test_split_refuses(fraction, seed, words):
    with pytest.raises(corpora.CorpusError, match=words):
        corpora.split_documents(numbered(20), fraction, seed)


# ---- tokenizer


def test_bpe_has_the_size_asked_for_and_encodes_any_text():
    tokenizer = corpora.train_bpe([(STDLIB / "os.py").read_text()], 300)
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    text = "".join(map(chr, range(1, 500))) + " \t\r\n\u4e16\U0001f600 no leading space"
    encoding = tokenizer.encode(text)
    assert tokenizer.decode(encoding.ids) == text
    assert len(tokenizer.encode("import os").ids) < len("import os")


def test_bpe_refuses_sizes_it_cannot_reach():
    with pytest.raises(corpora.CorpusError, match="vocab_size is 256; .* needs 257 or more"):
        corpora.train_bpe(["text"], 256)
    assert corpora.train_bpe(["text"], 257).get_vocab_size() == 257
    with pytest.raises(corpora.CorpusError, match="the corpus yields 260 tokens"):
        corpora.train_bpe(["text"], 8192)


# ---- the whole command


def test_prepared_documents_decode_to_the_corpus(corpus, store):
    train, heldout = list(texts(store, "train")), list(texts(store, "heldout"))
    assert set(train).isdisjoint(heldout)
    expected = {file.read_bytes().decode() for file in corpus.rglob("*.py")}
    assert sorted(train + heldout) == sorted(expected) and len(expected) == len(MODULES) + 1
    assert SPELLS_SEPARATOR in train + heldout
    size = sum(len(text.encode()) for text in train)
    assert store.bytes_per_token("train") == size / store.tokens("train").size


def test_separators_end_documents_and_stand_nowhere_else(store):
    for split in ("train", "heldout"):
        ends = np.flatnonzero(store.tokens(split) == store.separator_id) + 1
        assert ends.tolist() == store.documents(split)[1:].tolist()


def test_provenance_tells_the_corpus(corpus, store):
    provenance = store.manifest["provenance"]
    size = sum(file.stat().st_size for file in corpus.rglob("*.py"))
    assert provenance["documents"] == len(MODULES) + 2
    assert provenance["text_bytes"] == size
    assert provenance["duplicates_dropped"] == 1
    assert provenance["request"]["files"] == f"{corpus}/**/*.py"


def test_batches_do_not_change_the_ids(corpus, store, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_BATCH_CHARACTERS", 3000)
    again = prepare_corpus(corpus, tmp_path / "again")
    assert again.fingerprint == store.fingerprint  # also: the same request gives the same bytes
    assert (
        again.manifest["provenance"]["corpus_sha256"]
        == (store.manifest["provenance"]["corpus_sha256"])
    )


def test_another_seed_gives_another_store(corpus, store, tmp_path):
    other = prepare_corpus(corpus, tmp_path / "other", seed=SEED + 2)
    assert set(texts(other, "heldout")) != set(texts(store, "heldout"))


def test_the_tokenizer_is_trained_without_the_heldout_text(corpus, tmp_path, monkeypatch):
    seen = []

    def train_bpe(corpus_texts, vocab_size):
        seen.extend(corpus_texts)
        return original(seen, vocab_size)

    original = corpora.train_bpe
    monkeypatch.setattr(corpora, "train_bpe", train_bpe)
    store = prepare_corpus(corpus, tmp_path / "store")
    assert seen == list(texts(store, "train"))


def test_a_rerun_verifies_and_touches_nothing(corpus, store, capsys):
    before = contents(store.path)
    assert prepare_corpus(corpus, store.path) == store
    assert "already prepared" in capsys.readouterr().out
    assert contents(store.path) == before


def test_a_rerun_finds_damage(corpus, tmp_path):
    store = prepare_corpus(corpus, tmp_path / "store")
    file = store.path / "train.tokens.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(StoreError, match=r"train\.tokens\.bin"):
        prepare_corpus(corpus, store.path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"seed": SEED + 2}, "seed 1 there and 3 here"),
        ({"vocab_size": 401}, "vocab_size 400 there and 401 here"),
        ({"heldout_fraction": 0.5}, "heldout_fraction 0.2 there and 0.5 here"),
    ],
)
def test_another_request_is_refused(corpus, store, change, words):
    before = contents(store.path)
    with pytest.raises(StoreError, match=f"another request .{words}"):
        prepare_corpus(corpus, store.path, **change)
    assert contents(store.path) == before


def test_a_corpus_that_has_grown_is_not_passed_over(corpus, store):
    extra = corpus / "extra.py"
    extra.write_text("new = 1\n")
    try:
        with pytest.raises(StoreError, match="another request .matched"):
            prepare_corpus(corpus, store.path)
    finally:
        extra.unlink()


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_foreign_folder_is_refused_untouched(corpus, tmp_path, name):
    (tmp_path / name).write_text('{"mine": 1}')
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="not empty|format is None"):
        prepare_corpus(corpus, tmp_path)
    assert contents(tmp_path) == before and len(before) == 1


def test_an_existing_tokenizer_is_used_as_it_is(corpus, store, tmp_path):
    tokenizer = store.tokenizer()
    tokenizer.enable_truncation(5)  # must not cut documents
    tokenizer.enable_padding(length=50_000)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = prepare_corpus(
        corpus, tmp_path / "again", vocab_size=None, tokenizer=tmp_path / "tokenizer.json"
    )
    assert again.vocab_size == 400
    assert again.manifest["provenance"]["request"]["vocab_size"] == 400
    for split in ("train", "heldout"):
        assert np.array_equal(again.tokens(split), store.tokens(split))
    with pytest.raises(StoreError, match="tokenizer_sha256"):
        prepare_corpus(corpus, store.path, tokenizer=tmp_path / "tokenizer.json")


def test_the_other_spelling_of_the_separator_is_known(corpus, store, tmp_path, capsys):
    text = (store.path / "tokenizer.json").read_text()
    file = tmp_path / "tokenizer.json"
    file.write_text(text.replace("<|endoftext|>", "<|end_of_text|>"))
    assert prepare_corpus(corpus, tmp_path / "a", tokenizer=file).separator_id == 0
    file.write_text(text.replace("<|endoftext|>", "<eos>"))
    capsys.readouterr()
    with pytest.raises(corpora.CorpusError, match="no separator"):
        prepare_corpus(corpus, tmp_path / "b", tokenizer=file)
    assert not (tmp_path / "b").exists()
    assert capsys.readouterr().out == ""  # refused at once, not after reading the corpus


def test_stdlib_source_prepares_and_reports(tmp_path, monkeypatch, capsys):
    few = list(itertools.islice(corpora.stdlib_documents(), 40))
    monkeypatch.setattr(corpora, "stdlib_documents", lambda: iter(few))
    arguments = (
        "--source=stdlib",
        f"--out={tmp_path / 'store'}",
        "--vocab_size=300",
        "--heldout_fraction=0.2",
    )
    status, out, err = run(capsys, *arguments)
    store = open_store(tmp_path / "store")
    assert (status, err) == (0, "")
    assert sorted([*texts(store, "train"), *texts(store, "heldout")]) == sorted(
        {text for _, text in few}
    )
    tokens, size = store.tokens("heldout").size, store.bytes_per_token("heldout")
    count = len(store.documents("heldout")) - 1
    assert f"heldout: {count} documents, {tokens:,} tokens, {size:.3f} bytes per token" in out
    assert f"store: {tmp_path / 'store'}" in out

    summary = out[out.index("\ntrain: ") :]
    assert run(capsys, *arguments) == (0, "already prepared" + summary, "")
    monkeypatch.setattr(prepare.platform, "python_version", lambda: "2.7.18")
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "and 2.7.18 here" in err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--source=stdlib"], "--out"),
        (["--source=web", "--out=x"], "invalid choice: 'web'"),
        (["--source=stdlib", "--out=x", "seed=3"], "unrecognized arguments: seed=3"),
        (["--source=stdlib", "--out=x", "--vocab=300"], "unrecognized arguments: --vocab=300"),
        (["--source=text", "--out=x"], "needs --files=GLOB"),
        (["--source=stdlib", "--out=x", "--files=*.txt"], "belongs to --source=text"),
        (["--source=text", "--out=x", "--files=none/*.txt"], "matches no file"),
        (["--source=stdlib", "--out=x", "--vocab_size=0"], "vocab_size is 0"),
        (["--source=stdlib", "--out=x", "--tokenizer=none.json"], "none.json: no such file"),
        (["--source=stdlib", "--out=x", "--tokenizer=bad.json"], "is not a tokenizer.json"),
        (
            ["--source=stdlib", "--out=x", "--tokenizer=good.json", "--vocab_size=9"],
            "has 400 tokens",
        ),
        (["--source=stdlib", "--out=bad.json"], "is a file"),
    ],
)
def test_wrong_commands_are_refused_in_one_line(
    store, tmp_path, monkeypatch, capsys, arguments, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(corpora, "stdlib_documents", lambda: iter(numbered(100)))
    (tmp_path / "bad.json").write_text("{}")
    store.tokenizer().save("good.json")
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert words in err and err.count("\n") == 1 and err.endswith("\n")
    assert sorted(os.listdir()) == ["bad.json", "good.json"]


def test_the_module_runs_by_itself_without_jax(tmp_path):
    root = pathlib.Path(prepare.__file__).parent.parent
    script = (
        "import sys; from tst_jax import prepare; "
        "assert 'jax' not in sys.modules, 'jax was imported'; print(prepare.DEFAULT_VOCAB_SIZE)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "8192"), done.stderr
    command = [
        sys.executable,
        "-m",
        "tst_jax.prepare",
        "--source=text",
        "--files=none/*",
        f"--out={tmp_path / 'x'}",
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "prepare: --files=none/*: matches no file; quote the glob and check its path\n"
    )
