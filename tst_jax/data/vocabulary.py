"""Text <-> ids, whatever library made the ids: one small type for every tokenizer a store may hold.

Its content is one file, of one of the `_KINDS` below, and all that later use needs: no network, and
no further package but for sentencepiece and tiktoken.
"""

import array
import base64
import dataclasses
import difflib
import functools
import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tst_jax.errors import UserError

SEPARATOR = "<|endoftext|>"
_SEPARATORS = (SEPARATOR, "<|end_of_text|>", "</s>", "<eos>")  # looked for in this order
_GIVE = "give bytes, tiktoken:NAME, FILE.json (Hugging Face) or FILE.model (SentencePiece)"


class VocabularyError(UserError):
    """A tokenizer or token that cannot be used; one line that says what to do."""


@dataclasses.dataclass(frozen=True, repr=False)
class Vocabulary:
    """Text <-> ids of one tokenizer; equal, and equal in `sha256`, for equal content. Pickles to
    `kind` and `data` only, for worker processes: the library's object is made at the first use."""

    kind: str
    data: bytes

    @property
    def file(self) -> str:
        """Name of the file that holds `data` in a store; `load` reads it."""
        return f"tokenizer{_KINDS[self.kind][0]}"

    @property
    def size(self) -> int:
        """Rows an embedding needs: the largest id + 1 (ids may have gaps)."""
        return self._library.size

    @functools.cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.kind.encode() + b"\0" + self.data).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32 [n]; text that spells a special token is text. Raises
        VocabularyError for kind "none", as `decode_batch` does."""
        return self._library.encode(list(texts))

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def decode_batch(self, batch_of_ids: Iterable[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids [n]; bytes that are not UTF-8 become U+FFFD. Special
        tokens are spelled out, except by SentencePiece; ids that no token has give nothing."""
        return self._library.decode([np.asarray(ids, np.uint32).tolist() for ids in batch_of_ids])

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_batch([ids])[0]

    def id_of(self, token: str) -> int | None:
        """The id of a token by the tokenizer's name for it, special ones included."""
        return self._library.id_of(token)

    def token_of(self, id: int) -> str | None:
        return self._library.token_of(id) if 0 <= id < self.size else None

    def tokens(self) -> dict[str, int] | None:
        """All tokens by name for kind "tokenizers", None for others."""
        return self._library.tokens

    def describe(self) -> str:
        name = " ".join(filter(None, (self.kind, self._library.detail)))
        return f"{name} of {self.size:,} tokens, sha256 {self.sha256[:8]}"

    __repr__ = describe

    @functools.cached_property
    def _library(self) -> "_Library":
        return _KINDS[self.kind][1](self.data)

    def __getstate__(self):
        return {"kind": self.kind, "data": self.data}


def load(path: str | Path) -> Vocabulary:
    """Reads a store's file (see `Vocabulary.file`), or a user's *.json (Hugging Face) or *.model
    (SentencePiece). Raises VocabularyError for anything else."""
    path, found = Path(path), None
    kind = next((kind for kind, (end, _) in _KINDS.items() if path.name.endswith(end)), None)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
    elif kind is None:
        found = "is not known by its suffix"
    elif not path.stat().st_size:
        found = "is empty"
    if found or kind is None:
        raise VocabularyError(f"{path}: {found}; {_GIVE}")
    try:
        library = _KINDS[kind][1](path.read_bytes())
    except VocabularyError as error:
        raise VocabularyError(f"{path}: {error}") from error
    vocabulary = Vocabulary(kind, library.data)
    vocabulary.__dict__["_library"] = library  # a large one takes a second to read: not twice
    return vocabulary


def from_option(text: str) -> Vocabulary:
    """What --tokenizer= takes: "bytes", "tiktoken:NAME", or the path of a FILE.json or FILE.model.
    tiktoken may fetch NAME once; the vocabulary then holds all of it. Raises VocabularyError."""
    if text == "bytes":
        return byte_vocabulary()
    if not text.startswith("tiktoken:"):
        return load(text)
    tiktoken, name = _optional("tiktoken"), text.removeprefix("tiktoken:")
    try:
        return Vocabulary("tiktoken", _tiktoken_data(tiktoken.get_encoding(name)))
    except Exception as error:  # an unknown name, or whatever a download may raise
        known = tiktoken.list_encoding_names()
        found = f"tiktoken could not get it ({_line(error)}); check the network"
        if name not in known:
            found = f"tiktoken has no such encoding; give one of {', '.join(known)}"
        raise VocabularyError(f"--tokenizer={text}: {found}") from error


def byte_vocabulary() -> Vocabulary:
    """Ids 0..255 are the bytes of UTF-8 themselves, 256 is SEPARATOR."""
    return Vocabulary("tokenizers", _byte_data())


def train_bpe(texts: Iterable[str], size: int) -> Vocabulary:
    """Trains a byte-level BPE of exactly `size` tokens: id 0 is SEPARATOR, a special token, then
    come the 256 bytes, so that any text decodes to itself, and the merges. Raises VocabularyError
    below 257 tokens, or if the texts are too small to yield that many."""
    if size <= 256:
        raise VocabularyError(f"vocab_size is {size}; a byte-level tokenizer needs 257 or more")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[SEPARATOR],
        # Sorted, because the library hands the alphabet out in a different order each time.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != size:
        yields = f"the corpus yields {found} tokens, vocab_size is {size}"
        raise VocabularyError(f"{yields}; give more text or vocab_size={found}")
    return Vocabulary("tokenizers", tokenizer.to_str().encode())


def ids_only(size: int) -> Vocabulary:
    """For ready-made ids 0..size-1 without their tokenizer. Raises VocabularyError below 1."""
    return Vocabulary("none", _read_none(json.dumps({"size": size}).encode()).data)


def special_id(vocabulary: Vocabulary, name: str | None, what: str) -> int:
    """The id that --separator, --bos or --eos (`what`, without dashes) gives by `name`: a token's
    name, or a number in 0..size-1 (digits are never a name). None finds the usual separators.
    Raises VocabularyError."""
    if name is None:
        usual = _SEPARATORS if what == "separator" else ()
        found = [i for i in map(vocabulary.id_of, usual) if i is not None]
        if not found:
            lacks = f"{vocabulary} has none of {', '.join(usual)}; " if usual else ""
            raise VocabularyError(f"--{what}: {lacks}give --{what}=TOKEN or its id")
        return found[0]
    found = int(name) if name.removeprefix("-").isdecimal() else vocabulary.id_of(name)
    if found is None or not 0 <= found < vocabulary.size:
        special = vocabulary._library.special
        near = difflib.get_close_matches(name, special, cutoff=0.5) or special[:3]
        give = " or ".join([*near, f"an id in 0..{vocabulary.size - 1}"])
        raise VocabularyError(f"--{what}={name}: {vocabulary} lacks it; give {give}")
    return found


# ---- the kinds: each function reads `data`, or raises VocabularyError without the file's name


class _Library(NamedTuple):
    data: bytes  # canonical: equal for equal content
    size: int
    detail: str  # for messages
    special: list[str]  # names worth proposing
    encode: Callable[[list[str]], list[np.ndarray]]
    decode: Callable[[list[list[int]]], list[str]]
    id_of: Callable[[str], int | None]
    token_of: Callable[[int], str | None]  # of an id in 0..size-1
    tokens: dict[str, int] | None = None


def _read_tokenizers(data: bytes) -> _Library:
    try:
        tokenizer = Tokenizer.from_str(data.decode())
        ids = tokenizer.get_vocab(with_added_tokens=True)
        size = 1 + max(ids.values())
    except Exception as error:  # the library raises bare Exception
        found = f"is not a Hugging Face tokenizer.json ({_line(error)})"
        raise VocabularyError(f"{found}; {_GIVE}") from error
    # Both may be set in a file made for fine-tuning, and would cut or pad documents silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # in no file, and lost by the library's own pickles
    data, kind = tokenizer.to_str().encode(), type(tokenizer.model).__name__
    special = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
    encode_batch = functools.partial(tokenizer.encode_batch_fast, add_special_tokens=False)
    encode = lambda texts: [_array(encoding.ids) for encoding in encode_batch(texts)]
    if data == _byte_data():  # what the library gives too, in a fraction of its time
        ids_of = lambda text: np.frombuffer(text.encode(), np.uint8).astype(np.uint32)
        encode = lambda texts: list(map(ids_of, texts))
    decode = functools.partial(tokenizer.decode_batch, skip_special_tokens=False)
    return _Library(data, size, kind, special, encode, decode, ids.get, tokenizer.id_to_token, ids)


def _read_sentencepiece(data: bytes) -> _Library:
    try:
        model = _optional("sentencepiece").SentencePieceProcessor(model_proto=data)
        ids = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    except RuntimeError as error:
        raise VocabularyError("is no SentencePiece model; give one, or a tokenizer.json") from error
    size, special = len(ids), [name for name, i in ids.items() if model.is_control(i)]
    encode = lambda texts: [_array(ids) for ids in model.encode(texts)]
    decode = lambda batch: [model.decode([i for i in ids if i < size]) for ids in batch]
    return _Library(data, size, "", special, encode, decode, ids.get, model.id_to_piece)


def _read_tiktoken(data: bytes) -> _Library:
    tiktoken = _optional("tiktoken")
    try:
        content = json.loads(data)
        ranks = {base64.b64decode(k): rank for k, rank in content["mergeable_ranks"].items()}
        name, special = content["name"], content["special_tokens"]
        # The library panics at both, at a missing byte only when it meets one.
        if len(set(ranks.values())) < len(ranks) or sum(len(key) == 1 for key in ranks) < 256:
            raise ValueError("mergeable_ranks repeat a rank or lack a byte")
        encoding = tiktoken.Encoding(
            name, pat_str=content["pat_str"], mergeable_ranks=ranks, special_tokens=special
        )
    except Exception as error:  # of many kinds, for what is no such file
        raise VocabularyError(f"is not a store's tiktoken file ({_line(error)})") from error
    by_name = {**ranks, **{token.encode(): i for token, i in special.items()}}
    by_id = {i: token for token, i in by_name.items()}
    text = lambda parts: b"".join(parts).decode(errors="replace")
    encode = lambda texts: [_array(ids) for ids in encoding.encode_ordinary_batch(texts)]
    # Not the library's decode, which raises for an id that no token has.
    decode = lambda batch: [text(by_id.get(i, b"") for i in ids) for ids in batch]
    id_of = lambda token: by_name.get(token.encode())
    token_of = lambda i: text([by_id[i]]) if i in by_id else None
    size, data = encoding.max_token_value + 1, _tiktoken_data(encoding)
    return _Library(data, size, name, list(special), encode, decode, id_of, token_of)


def _read_none(data: bytes) -> _Library:
    try:
        size = int(json.loads(data)["size"])
    except (ValueError, KeyError, TypeError) as error:
        raise VocabularyError('holds no {"size": N}; prepare the store again') from error
    if not 1 <= size <= 2**32:
        raise VocabularyError(f"size is {size}; give 1 to 2**32")

    def refuse(_):
        raise VocabularyError("ids without a tokenizer; for text prepare them with --tokenizer")

    data, nothing = json.dumps({"size": size}).encode(), lambda _: None
    return _Library(data, size, "(ids only)", [], refuse, refuse, nothing, nothing)


# How a kind's file ends (the first that fits counts), and what reads it.
_KINDS = {
    "tiktoken": (".tiktoken.json", _read_tiktoken),
    "none": (".none.json", _read_none),
    "tokenizers": (".json", _read_tokenizers),
    "sentencepiece": (".model", _read_sentencepiece),
}


def _array(ids: list[int]) -> np.ndarray:
    """uint32 [n], in a third of np.array's time."""
    return np.frombuffer(array.array("I", ids), np.uint32)


def _byte_level(model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@functools.cache
def _byte_data() -> bytes:
    # The library spells printable bytes by themselves, others by characters from 256 on, in order.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(symbol for symbol in alphabet if ord(symbol) >= 256))
    ids = {chr(b) if chr(b) in alphabet else next(others): b for b in range(256)}
    tokenizer = _byte_level(models.BPE(vocab=ids, merges=[]))
    tokenizer.add_special_tokens([SEPARATOR])
    return tokenizer.to_str().encode()


def _tiktoken_data(encoding) -> bytes:
    ranks = encoding._mergeable_ranks  # the library's README extends encodings by these attributes
    content = {
        "name": encoding.name,
        "pat_str": encoding._pat_str,
        "mergeable_ranks": {base64.b64encode(key).decode(): rank for key, rank in ranks.items()},
        "special_tokens": encoding._special_tokens,
    }
    return json.dumps(content, sort_keys=True).encode()


def _optional(package: str):
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise VocabularyError(f"needs {package}: pip install {package}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
