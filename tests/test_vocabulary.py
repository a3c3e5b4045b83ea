"""Every kind of tokenizer: exact round trips, special tokens, content hashes, one-line refusals."""

import io
import json
import pickle
import sys

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

from tst_jax.data import vocabulary
from tst_jax.data.vocabulary import SEPARATOR, VocabularyError, from_option, load, special_id

EVERY_CHARACTER_CLASS = "".join(map(chr, [*range(0x300), *range(0x4E00, 0x4E40), 0x7FF, 0xFFFF]))
TEXTS = [
    "",
    "the cat sat on the mat, the rat did that",
    "def f(x):\r\n\treturn  x  ** 2\r\n\r\n",
    "nul \x00 and \x7f, e\u0301 \u00e9 \u4e16\u754c \U0001f600\u200d\U0001f469 \U0010ffff",
    f"spelled {SEPARATOR}</s><s><unk><|begin_of_text|><|e|> out",
    " leading and trailing \n",
    EVERY_CHARACTER_CLASS,
]
WORDS = ["the cat sat on the mat, the rat did that; return self.value", "theme there then 1234"] * 9
SPECIAL = {"<|begin_of_text|>", "<|end_of_text|>", SEPARATOR, "<s>", "</s>", "<unk>", "<|e|>"}


def llama3_content() -> dict:
    """A small tokenizer.json of Llama 3's form: split and bytes, added specials, a template."""
    trained = Tokenizer.from_str(vocabulary.train_bpe(WORDS, 281).data.decode())
    model = json.loads(trained.to_str())["model"]
    ids = {token: i - 1 for token, i in model["vocab"].items() if token != SEPARATOR}
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+|."), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = trained.decoder
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 280)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    return json.loads(tokenizer.to_str())


@pytest.fixture
def spm(tmp_path):
    package = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter(WORDS),
        model_writer=model,
        vocab_size=310,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        control_symbols=["<|begin_of_text|>"],
        minloglevel=2,
    )
    (tmp_path / "spm.model").write_bytes(model.getvalue())
    return load(tmp_path / "spm.model")


def tiktoken_encoding(special=None):
    package = pytest.importorskip("tiktoken")
    ranks = [*(bytes([b]) for b in range(256)), b"th", b"the", b" the", b"at", b"\xc3\xa9"]
    return package.Encoding(
        "small",
        pat_str=r" ?\p{L}+| ?\p{N}+|\s+|.",
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens=special or {SEPARATOR: 300, "<|e|>": 301},
    )


@pytest.fixture
def tiktoken_small(monkeypatch):
    encoding = tiktoken_encoding()
    monkeypatch.setattr("tiktoken.get_encoding", {"small": encoding}.__getitem__)
    return from_option("tiktoken:small")


@pytest.fixture
def llama3(tmp_path):
    (tmp_path / "llama.json").write_text(json.dumps(llama3_content()))
    return load(tmp_path / "llama.json")


@pytest.fixture(params=["bytes", "trained", "llama3", "spm", "tiktoken_small"])
def any_text(request):
    """Each vocabulary that has text."""
    if request.param == "bytes":
        return vocabulary.byte_vocabulary()
    if request.param == "trained":
        return vocabulary.train_bpe(WORDS, 280)
    return request.getfixturevalue(request.param)


def test_text_decodes_to_itself_and_never_yields_a_special_token(any_text):
    batch = any_text.encode_batch(TEXTS)
    assert all(ids.dtype == np.uint32 and ids.ndim == 1 for ids in batch)
    assert any_text.decode_batch(batch) == TEXTS
    special = {any_text.id_of(name) for name in SPECIAL} - {None}
    assert special and special.isdisjoint(np.concatenate(batch).tolist())
    assert any_text.encode(TEXTS[1]) == batch[1].tolist()
    assert any_text.encode_batch([]) == any_text.decode_batch([]) == []


def test_a_store_and_another_process_get_the_same_vocabulary(any_text, tmp_path):
    any_text.encode("warm")
    (tmp_path / any_text.file).write_bytes(any_text.data)
    state = pickle.dumps(any_text)
    assert len(state) < len(any_text.data) + 200
    for copy in (load(tmp_path / any_text.file), pickle.loads(state)):
        assert copy == any_text and copy.sha256 == any_text.sha256
        assert copy.size == any_text.size and copy.encode(TEXTS[4]) == any_text.encode(TEXTS[4])


def test_names_and_ids_agree_and_ids_without_a_token_decode_to_nothing(any_text):
    ids = any_text.encode(TEXTS[1])
    assert [any_text.id_of(any_text.token_of(i)) for i in ids] == ids
    assert any_text.id_of("no such token") is None
    assert any_text.token_of(any_text.size) is any_text.token_of(-1) is None
    assert any_text.token_of(any_text.size - 1) is not None
    named = any_text.tokens()
    assert (named is None) == (any_text.kind != "tokenizers")
    assert named is None or max(named.values()) == any_text.size - 1
    assert named is None or all(any_text.token_of(i) == name for name, i in named.items())
    ids = any_text.encode("the cat")
    assert any_text.decode([*ids, any_text.size, any_text.size + 5]) == "the cat"


def test_a_lone_surrogate_does_not_end_the_process(any_text):
    try:
        any_text.encode_batch(["a\ud800b", "c"])
    except Exception as error:
        assert type(error).__module__ == "builtins"


def test_bytes_are_the_ids_and_the_library_agrees():
    bytes_ = from_option("bytes")
    assert bytes_ == vocabulary.byte_vocabulary() and bytes_.size == 257
    assert bytes_.id_of(SEPARATOR) == 256 and bytes_.token_of(256) == SEPARATOR
    library = Tokenizer.from_str(bytes_.data.decode())
    library.encode_special_tokens = True
    texts = [*TEXTS, "".join(map(chr, range(0x800, 0xD800, 97)))]
    for text, ids in zip(texts, bytes_.encode_batch(texts), strict=True):
        assert ids.tolist() == list(text.encode())
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    assert bytes_.decode([104, 105, 256, 255]) == f"hi{SEPARATOR}\ufffd"


def test_training_gives_the_separator_then_bytes_then_merges():
    trained = vocabulary.train_bpe(iter(WORDS), 270)
    assert trained.size == 270 and trained.id_of(SEPARATOR) == 0
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(map(trained.id_of, alphabet)) == list(range(1, 257))
    assert trained == vocabulary.train_bpe(WORDS, 270)
    assert repr(trained) == f"tokenizers BPE of 270 tokens, sha256 {trained.sha256[:8]}"
    with pytest.raises(VocabularyError, match="vocab_size is 256; .* 257 or more"):
        vocabulary.train_bpe(WORDS, 256)
    with pytest.raises(VocabularyError, match=r"yields 2\d\d tokens, vocab_size is 9000; give"):
        vocabulary.train_bpe(["abcabc"], 9000)


def test_llama3_file_is_taken_by_path(llama3, tmp_path):
    assert llama3.size == 282 and llama3 == from_option(str(tmp_path / "llama.json"))
    assert special_id(llama3, None, "separator") == 281
    ids = llama3.encode("the cat sat on the mat")
    assert len(ids) > 4 and 280 not in ids  # neither cut, nor begun as its template would
    assert llama3.decode([280, *ids[:1], 281]) == "<|begin_of_text|>the<|end_of_text|>"
    assert len(llama3.encode_batch(["a", "the cat sat on the mat"])[0]) == 1  # not padded


def test_added_tokens_that_are_not_special_stay_the_tokenizers_own_matter(tmp_path):
    tokenizer = Tokenizer.from_str(vocabulary.train_bpe(WORDS, 270).data.decode())
    tokenizer.add_tokens([AddedToken("<tab>")])
    tokenizer.save(str(tmp_path / "t.json"))
    given = load(tmp_path / "t.json")
    assert given.encode("<tab>") == [270] and len(given.encode(SEPARATOR)) > 1


def test_ids_with_gaps_count_to_the_largest(tmp_path):
    model = models.WordLevel({"a": 0, "b": 7}, unk_token="a")
    Tokenizer(model).save(str(tmp_path / "gaps.json"))
    gaps = load(tmp_path / "gaps.json")
    assert gaps.size == 8 and gaps.token_of(3) is None and gaps.encode("b") == [7]


def test_hash_is_of_the_content_not_of_the_file(tmp_path):
    def written(name, content, **options):
        (tmp_path / name).write_text(json.dumps(content, **options), encoding="utf-8")
        return load(tmp_path / name)

    content = llama3_content()
    plain = written("plain.json", content)
    pretty = written("pretty.json", content, indent=3, ensure_ascii=False)
    uncut = written("uncut.json", {**content, "truncation": None, "padding": None})
    assert plain == pretty == uncut and plain.sha256 == pretty.sha256 == uncut.sha256
    content["model"]["merges"][-2:] = content["model"]["merges"][:-3:-1]
    swapped = written("swapped.json", content)
    assert swapped != plain and swapped.sha256 != plain.sha256


def test_sentencepiece_control_symbols_are_found_by_name_only(spm):
    eos = spm.id_of("</s>")
    assert spm.kind == "sentencepiece" and spm.token_of(eos) == "</s>" and spm.size == 310
    assert special_id(spm, None, "separator") == eos
    assert special_id(spm, "<|begin_of_text|>", "bos") == spm.id_of("<|begin_of_text|>")
    for name in ("</s>", "<s>", "<|begin_of_text|>"):
        assert spm.id_of(name) not in spm.encode(f"a{name}b")
    assert spm.id_of("<unk>") == 0 and spm.decode([eos]) == ""
    assert repr(spm).startswith("sentencepiece of 310 tokens, sha256 ")


def test_tiktoken_is_kept_whole(tiktoken_small):
    assert tiktoken_small.file == "tokenizer.tiktoken.json" and tiktoken_small.size == 302
    expected = tiktoken_encoding().encode_ordinary_batch(TEXTS)
    assert [ids.tolist() for ids in tiktoken_small.encode_batch(TEXTS)] == expected
    assert tiktoken_small.id_of(SEPARATOR) == 300 and tiktoken_small.token_of(301) == "<|e|>"
    assert tiktoken_small.decode([300, 195]) == f"{SEPARATOR}\ufffd"
    assert tiktoken_small.token_of(299) is None and tiktoken_small.token_of(260) == "\u00e9"
    assert special_id(tiktoken_small, None, "separator") == 300
    assert repr(tiktoken_small).startswith("tiktoken small of 302 tokens, sha256 ")


def test_tiktoken_hash_does_not_depend_on_order(monkeypatch):
    found = []
    for special in ({"<|a|>": 300, "<|b|>": 301}, {"<|b|>": 301, "<|a|>": 300}, {"<|a|>": 300}):
        encoding = tiktoken_encoding(special=special)
        monkeypatch.setattr("tiktoken.get_encoding", lambda name: encoding)
        found.append(from_option("tiktoken:any").sha256)
    assert found[0] == found[1] != found[2]


def test_tiktoken_names_that_cannot_be_had(monkeypatch):
    pytest.importorskip("tiktoken")
    with pytest.raises(VocabularyError, match=r"^--tokenizer=tiktoken:gpt9: .*gpt2.*$"):
        from_option("tiktoken:gpt9")

    def offline(name):
        raise OSError("no route\nto host")

    monkeypatch.setattr("tiktoken.get_encoding", offline)
    with pytest.raises(VocabularyError, match=r"^--tokenizer=tiktoken:gpt2: .*no route to host.*$"):
        from_option("tiktoken:gpt2")


def test_tiktoken_file_that_would_panic_is_refused(tiktoken_small, tmp_path):
    content = json.loads(tiktoken_small.data)
    ranks, file = content["mergeable_ranks"], tmp_path / "bad.tiktoken.json"
    lacking = {name: rank for name, rank in ranks.items() if rank != 0}
    for bad in (lacking, ranks | {"dGg=": 0}, None):
        file.write_text(json.dumps({**content, "mergeable_ranks": bad}))
        with pytest.raises(VocabularyError, match=r"bad.tiktoken.json: is not a store's .*$"):
            load(file)


def test_ids_only_know_their_number_and_no_text(tmp_path):
    none = vocabulary.ids_only(70_000)
    assert (none.kind, none.file, none.size) == ("none", "tokenizer.none.json", 70_000)
    (tmp_path / none.file).write_bytes(none.data)
    assert load(tmp_path / none.file) == none
    assert none.id_of("a") is none.token_of(5) is none.tokens() is None
    assert special_id(none, "69999", "separator") == 69_999
    for call in (lambda: none.encode("a"), lambda: none.decode([1])):
        with pytest.raises(VocabularyError, match="prepare .*--tokenizer"):
            call()
    with pytest.raises(VocabularyError, match="size is 0"):
        vocabulary.ids_only(0)


def test_special_ids_by_name_and_number(llama3):
    bytes_ = vocabulary.byte_vocabulary()
    assert special_id(bytes_, None, "separator") == 256
    assert special_id(bytes_, "7", "eos") == 7 != bytes_.id_of("7")
    for name in ("257", "-1"):
        with pytest.raises(VocabularyError, match=rf"^--eos={name}: .* an id in 0\.\.256$"):
            special_id(bytes_, name, "eos")
    with pytest.raises(
        VocabularyError, match=r"^--eos=<.end.*give <\|end_of_text\|> or .*0\.\.281$"
    ):
        special_id(llama3, "<|end_of_txt|>", "eos")
    for what, found in {"bos": bytes_, "separator": vocabulary.ids_only(9)}.items():
        with pytest.raises(VocabularyError, match=f"^--{what}: .*give --{what}=TOKEN or its id$"):
            special_id(found, None, what)


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("missing.json", None, "no such file"),
        ("folder.json", "folder", "is a folder"),
        ("empty.json", b"", "is empty"),
        ("t.pkl", pickle.dumps({"a": 1}), "suffix"),
        ("gpt2", b"{}", "suffix"),
        ("pickle.json", pickle.dumps({"a": 1}), "tokenizer.json"),
        ("config.json", b'{"vocab_size": 5}', "tokenizer.json"),
        ("pickle.model", pickle.dumps({"a": 1}), "SentencePiece"),
        ("text.model", b"IQ== 0\nIg== 1\n", "SentencePiece"),
        ("a.tiktoken.json", b"[]", "tiktoken"),
        ("a.none.json", b"[]", "size"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, name, content, said):
    if said in ("SentencePiece", "tiktoken"):
        pytest.importorskip(said.lower())
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(VocabularyError) as caught:
        from_option(str(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and said in message.removeprefix(str(path))
    assert "\n" not in message


@pytest.mark.parametrize("package", ["sentencepiece", "tiktoken"])
def test_a_missing_package_is_named(monkeypatch, tmp_path, package):
    monkeypatch.setitem(sys.modules, package, None)  # what import then raises: ImportError
    (tmp_path / "t.model").write_bytes(b"x")
    option = "tiktoken:gpt2" if package == "tiktoken" else str(tmp_path / "t.model")
    with pytest.raises(VocabularyError, match=f"needs {package}: pip install {package}$"):
        from_option(option)
