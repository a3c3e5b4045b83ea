"""Text in: where documents come from, how they are split, and a tokenizer trained on them.

A document is (name, text). Sources yield documents in an order that depends on nothing but their
names, so that the same files give the same store on any machine. Nothing here downloads.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tst_jax.errors import UserError

Document = tuple[str, str]

SEPARATOR = "<|endoftext|>"
_BYTES = 256  # the alphabet of a byte-level tokenizer

_STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "lib2to3"}
_STDLIB_SMALLEST = 200
_STDLIB_LARGEST = 200_000
_STDLIB_LARGEST_ENCODING = 10_000


class CorpusError(UserError):
    """Documents or a tokenizer that cannot be used; one line that says what to do."""


# ---- sources


def stdlib_documents(root: str | os.PathLike | None = None) -> Iterator[Document]:
    """Python's own standard library: a corpus of about 28 MB that every machine already has.

    Yields (path under `root` with forward slashes, text) for each `.py` file, folder by folder in
    sorted order, tests included where they are installed. Left out: installed packages, lib2to3
    (gone in Python 3.13), generated tables (large files of encodings/, the build settings in
    _sysconfigdata), files under 200 bytes and files that are not UTF-8. A file over 200,000 bytes
    is cut at the last line end before that, so that a few giants do not dominate.

    Args:
      root: the folder to walk; the running Python's standard library by default.
    """
    root = Path(sysconfig.get_paths()["stdlib"] if root is None else root)
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - _STDLIB_SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if path.suffix != ".py" or file.startswith("_sysconfigdata"):
                continue
            data = path.read_bytes()
            if len(data) < _STDLIB_SMALLEST:
                continue
            if path.parent.name == "encodings" and len(data) > _STDLIB_LARGEST_ENCODING:
                continue
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                continue  # the library's tests hold files in other encodings on purpose
            if len(data) > _STDLIB_LARGEST:
                end = data.rfind(b"\n", 0, _STDLIB_LARGEST) + 1 or _STDLIB_LARGEST
                text = data[:end].decode("utf-8", errors="ignore")
            yield path.relative_to(root).as_posix(), text


def matching_files(pattern: str) -> list[Path]:
    """The files that a glob matches (`**` crosses folders), sorted. Raises CorpusError if none."""
    files = [Path(name) for name in sorted(set(glob.glob(pattern, recursive=True)))]
    files = [file for file in files if file.is_file()]
    if not files:
        raise CorpusError(f"--files={pattern}: matches no file; quote the glob and check its path")
    return files


def text_documents(pattern: str) -> Iterator[Document]:
    """Every file that a glob matches is one document, in sorted order.

    Names are relative to the part of `pattern` before its first wildcard: a corpus that moves to
    another folder keeps its names, and with them its split. Raises CorpusError if no file matches
    or one is not UTF-8.
    """
    files = matching_files(pattern)
    fixed = []
    for part in Path(pattern).parts[:-1]:
        if glob.has_magic(part):
            break
        fixed.append(part)
    root = Path(*fixed)
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(
                f"{file}: is not UTF-8 (byte {error.start}); convert it, or leave it out of --files"
            ) from error
        yield file.relative_to(root).as_posix(), text


# ---- split


def split_documents(
    documents: Iterable[Document], heldout_fraction: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Splits documents into (train, heldout), each in a shuffled order that `seed` fixes.

    Of documents with the same text only the first is kept, so no text is in both splits. A
    document's side follows from its name and the seed alone: it stays when others come or go.
    Holds the corpus in memory. Raises CorpusError if either side would be empty.
    """
    if not 0 < heldout_fraction < 1:
        raise CorpusError(f"heldout_fraction is {heldout_fraction}; give a number between 0 and 1")
    if seed < 0:
        raise CorpusError(f"seed is {seed}; give a whole number from 0")
    splits: tuple[list[Document], list[Document]] = ([], [])
    seen = set()
    for name, text in documents:
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in seen:
            seen.add(digest)
            splits[_uniform(name, seed) < heldout_fraction].append((name, text))
    for split, members in zip(("train", "heldout"), splits):
        if not members:
            raise CorpusError(
                f"split {split} is empty: {len(seen)} different documents at "
                f"heldout_fraction={heldout_fraction}; give more documents, or another fraction "
                "or seed"
            )
    train, heldout = (
        [members[i] for i in np.random.default_rng([seed, side]).permutation(len(members))]
        for side, members in enumerate(splits)
    )
    return train, heldout


def _uniform(name: str, seed: int) -> float:
    """A number in [0, 1) that depends on a document's name and the seed only."""
    digest = hashlib.sha256(f"{seed}/{name}".encode("utf-8", errors="surrogateescape")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48  # 48 bits are exact in a float, and never 1.0


# ---- tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of exactly `vocab_size` tokens.

    Id 0 is the separator `<|endoftext|>`, a special token; then come the 256 bytes, so that any
    text is encoded and decodes to itself, and the merges. Raises CorpusError below 257 tokens, or
    if the texts are too small to yield that many.
    """
    if vocab_size < _BYTES + 1:
        raise CorpusError(
            f"vocab_size is {vocab_size}; a byte-level tokenizer needs {_BYTES + 1} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[SEPARATOR],
        # Sorted, because the library hands the alphabet out in a different order each time.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise CorpusError(
            f"the corpus yields {found} tokens, vocab_size is {vocab_size}; give more text or "
            f"vocab_size={found}"
        )
    return tokenizer
