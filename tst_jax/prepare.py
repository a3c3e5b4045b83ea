"""Makes a token store from text: read, split, train a tokenizer, encode, write.

    python -m tst_jax.prepare --source=stdlib --out=DIR
    python -m tst_jax.prepare --source=text --files='corpus/**/*.txt' --out=DIR --vocab_size=32768
    python -m tst_jax.prepare --source=text --files='*.md' --out=DIR --tokenizer=tokenizer.json

`stdlib` is the running Python's own standard library: a real corpus that needs no download. Run
again, the same command verifies the store that it finds and leaves it as it is.
"""

import argparse
import datetime
import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer
from tqdm import tqdm

from tst_jax.data import corpora
from tst_jax.data.store import (
    MANIFEST,
    SPLITS,
    Store,
    StoreError,
    check_writable,
    open_store,
    sha256_of_file,
    tokenizer_vocab_size,
    write_store,
)

DEFAULT_VOCAB_SIZE = 8192
SEPARATORS = (corpora.SEPARATOR, "<|end_of_text|>")

# A batch is enough text to keep every core busy; the library's encodings take far more memory than
# their text, so this, not the corpus, sets the peak.
_BATCH_CHARACTERS = 1 << 20


def prepare_store(
    out: str | os.PathLike,
    *,
    source: str,
    files: str | None = None,
    vocab_size: int | None = None,
    tokenizer: str | os.PathLike | None = None,
    heldout_fraction: float = 0.05,
    seed: int = 0,
) -> Store:
    """Prepares `out`, or verifies it if this same request made it before; prints what it does.

    Args:
      out: the store's folder.
      source: "stdlib" or "text".
      files: for "text", the glob of the files; each is one document.
      vocab_size: of the tokenizer to train on the train split; 8192 if not given.
      tokenizer: an existing tokenizer.json to use instead; `vocab_size` is then its size.
      heldout_fraction: share of the documents that is held out.
      seed: decides which documents those are, and the order of both splits.

    Raises CorpusError or StoreError, with one line; an `out` that holds anything else is never
    touched.
    """
    if source not in ("stdlib", "text"):
        raise corpora.CorpusError(f"--source={source}: the sources are stdlib and text")
    if source == "text" and not files:
        raise corpora.CorpusError("--source=text needs --files=GLOB")
    if source == "stdlib" and files:
        raise corpora.CorpusError(f"--files={files}: belongs to --source=text, not to stdlib")

    given = None
    if tokenizer is not None:
        given = _load_tokenizer(Path(tokenizer), vocab_size)
        vocab_size = tokenizer_vocab_size(given)
    request = {
        "source": source,
        "files": files,
        "vocab_size": DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size,
        "tokenizer_sha256": None if given is None else sha256_of_file(Path(tokenizer)),
        "heldout_fraction": heldout_fraction,
        "seed": seed,
    }
    if source == "stdlib":
        request["python"] = platform.python_version()
    else:  # so that files added since are not passed over as "already prepared"
        sizes = [file.stat().st_size for file in corpora.matching_files(files)]
        request["matched"] = {"files": len(sizes), "bytes": sum(sizes)}

    out = Path(out).absolute()
    store = _find_prepared(out, request)
    if store is not None:
        print("already prepared")
    else:
        if source == "stdlib":
            documents = corpora.stdlib_documents()
        else:
            documents = corpora.text_documents(files)
        store = _make_store(out, documents, given, request)
    for split in SPLITS:
        figures = store.manifest["splits"][split]
        print(
            f"{split}: {figures['documents']:,} documents, {figures['tokens']:,} tokens, "
            f"{store.bytes_per_token(split):.3f} bytes per token"
        )
    print(f"store: {store.path}")
    return store


def _find_prepared(out: Path, request: dict[str, Any]) -> Store | None:
    """The verified store of the same request, None if `out` is free, or a StoreError."""
    if not (out / MANIFEST).is_file():
        check_writable(out)
        return None
    store = open_store(out)
    found = store.manifest["provenance"].get("request", {})
    different = [key for key in {**found, **request} if found.get(key) != request.get(key)]
    if different:
        listed = ", ".join(
            f"{key} {found.get(key)} there and {request.get(key)} here" for key in different
        )
        raise StoreError(f"{out}: is a store of another request ({listed}); choose another --out")
    return store


def _make_store(out, documents, given: Tokenizer | None, request: dict[str, Any]) -> Store:
    digest, count, size = hashlib.sha256(), 0, 0

    def counted() -> Iterator[corpora.Document]:
        nonlocal count, size
        for name, text in documents:
            # Lengths go in too, or text could move between two neighbours unnoticed.
            for part in (os.fsencode(name), text.encode()):
                digest.update(len(part).to_bytes(8, "big") + part)
            count, size = count + 1, size + len(part)
            yield name, text

    train, heldout = corpora.split_documents(
        _progress(counted(), "reading", "documents"), request["heldout_fraction"], request["seed"]
    )
    if given is None:
        texts = (text for _, text in train)  # never the held-out text
        tokenizer = corpora.train_bpe(
            _progress(texts, "training the tokenizer", "documents", len(train)),
            request["vocab_size"],
        )
    else:
        tokenizer = given
    return write_store(
        out,
        tokenizer=tokenizer,
        train=_encode(tokenizer, train, "encoding train"),
        heldout=_encode(tokenizer, heldout, "encoding heldout"),
        separator_id=_separator_id(tokenizer),
        provenance={
            "request": request,
            "documents": count,
            "text_bytes": size,
            "duplicates_dropped": count - len(train) - len(heldout),
            "corpus_sha256": digest.hexdigest(),
            "python": platform.python_version(),
            "tools": {"numpy": np.__version__, "tokenizers": tokenizers.__version__},
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    )


def _encode(tokenizer: Tokenizer, documents: list[corpora.Document], description: str):
    """Yields (ids, text_bytes) of each document, without special tokens of any kind."""
    # A document that spells the separator is text, not two documents.
    tokenizer.encode_special_tokens = True
    for batch in _batches(_progress(documents, description, "documents", len(documents))):
        for text, encoding in zip(batch, tokenizer.encode_batch(batch, add_special_tokens=False)):
            yield encoding.ids, len(text.encode())


def _batches(documents: Iterable[corpora.Document]) -> Iterator[list[str]]:
    batch, characters = [], 0
    for _, text in documents:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _load_tokenizer(path: Path, vocab_size: int | None) -> Tokenizer:
    if not path.is_file():
        raise corpora.CorpusError(f"--tokenizer={path}: no such file; give a tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise corpora.CorpusError(
            f"--tokenizer={path}: is not a tokenizer.json ({error})"
        ) from error
    _separator_id(tokenizer)
    size = tokenizer_vocab_size(tokenizer)
    if vocab_size not in (None, size):
        raise corpora.CorpusError(
            f"--vocab_size={vocab_size}: {path} has {size} tokens; leave out one of the two flags"
        )
    # Both may be set in a file made for fine-tuning, and would cut or pad documents silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _separator_id(tokenizer: Tokenizer) -> int:
    for separator in SEPARATORS:
        token_id = tokenizer.token_to_id(separator)
        if token_id is not None:
            return token_id
    raise corpora.CorpusError(
        f"the tokenizer has no separator: add {' or '.join(SEPARATORS)} as a special token"
    )


def _progress(items: Iterable, description: str, unit: str, total: int | None = None) -> Iterator:
    """A bar on a terminal; elsewhere (a log) a line at the start and at each quarter."""
    if sys.stderr.isatty():
        yield from tqdm(items, desc=description, unit=f" {unit}", total=total)
        return
    print(description, flush=True)
    for number, item in enumerate(items, 1):
        yield item
        if total and total >= 8 and number * 4 // total > (number - 1) * 4 // total:
            print(f"{description}: {number} of {total} {unit}", flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"prepare: {message} (see --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (without the program's name); returns the exit status."""
    # argparse, not absl: other commands import this module, and absl flags are global to a process.
    parser = _Parser(
        prog="python -m tst_jax.prepare",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--source", required=True, choices=("stdlib", "text"))
    parser.add_argument("--files", metavar="GLOB", help="for text: one document per file")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of the store")
    parser.add_argument("--vocab_size", type=int, help=f"default {DEFAULT_VOCAB_SIZE}")
    parser.add_argument("--tokenizer", metavar="FILE", help="use this tokenizer.json, train none")
    parser.add_argument("--heldout_fraction", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(argv))
    try:
        prepare_store(options.pop("out"), **options)
    except (corpora.CorpusError, StoreError, OSError) as error:
        print(f"prepare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # This process encodes and ends; it never forks, which is what the library's warning is about.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    sys.exit(main())
