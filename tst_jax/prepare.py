r"""Makes a token store from a corpus: read, encode, shuffle, split, write.

    python -m tst_jax.prepare --source=stdlib --out=DIR
    python -m tst_jax.prepare --source=packages --out=DIR
    python -m tst_jax.prepare --source=text --files='corpus/**/*.txt' --out=DIR --vocab_size=32768
    python -m tst_jax.prepare --source=jsonl --files='gs://BUCKET/dclm/*.jsonl.zst' --out=DIR \
        --tokenizer=llama-3/tokenizer.json --bos='<|begin_of_text|>' --separator='<|end_of_text|>'
    python -m tst_jax.prepare --source=parquet --files='fineweb-edu/*.parquet' --out=DIR \
        --tokenizer=tokenizer.model
    python -m tst_jax.prepare --source=tfds --dataset=wiki40b/en --out=DIR
    python -m tst_jax.prepare --source=huggingface --dataset=roneneldan/TinyStories --out=DIR
    python -m tst_jax.prepare --source=llmc --files='fineweb10B/*.bin' --out=DIR \
        --tokenizer=tiktoken:gpt2
    python -m tst_jax.prepare --source=megatron --files='corpus_text_document.bin' --out=DIR \
        --vocab_size=50432 --separator=0

`stdlib` is the running Python's own standard library: a real corpus that needs no download.
`packages` adds the Python source of all installed packages, or of those in --data_dir. The
command can be killed at any time: run again it goes on, and a store that is done it verifies and
leaves as it is. Work in progress lies in .NAME.preparing beside the store. Documents with the same
content are kept once; the order of the documents, and which are held out, follow from their content
and --seed.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tst_jax.data import vocabulary
from tst_jax.data.making import make_store, size_of, special_ids
from tst_jax.data.sources import SOURCES, SourceError
from tst_jax.data.store import MANIFEST, SPLITS, Store, StoreError, open_store
from tst_jax.data.store_writer import SHARD_TOKENS, check_writable
from tst_jax.data.vocabulary import Vocabulary
from tst_jax.data.workers import Progress
from tst_jax.errors import UserError

DEFAULT_VOCAB_SIZE = 8192
# What the options of this command are called in each source.
_FIELDS = {"files": "files", "field": "field", "dataset": "name", "split": "split"}
_FIELDS |= {"data_dir": "data_dir", "dataset_config": "config"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command's flags; what they are stands in `_parser`."""

    out: Path
    source: str
    files: str | None = None
    field: str | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    split: str | None = None
    data_dir: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    bpe_bytes: int = 1_000_000_000
    separator: str | None = None
    bos: str | None = None
    eos: str | None = None
    heldout_fraction: float = 0.05
    seed: int = 0
    processes: int = 0
    shard_tokens: int = SHARD_TOKENS


# Flags that change how fast a store is made, and not what is in it.
_HARMLESS = ("out", "processes")


def prepare_store(out: str | os.PathLike, **flags) -> Store:
    """Prepares `out`, or goes on, or verifies it if this same request made it; prints what it does.

    Args:
      out: the store's folder.
      **flags: as the command's.
    Raises:
      UserError: in one line; an `out` that holds anything else is never touched.
    """
    options = Options(Path(out).absolute(), **flags)
    if not 0 < options.heldout_fraction < 1:
        raise StoreError(
            f"--heldout_fraction={options.heldout_fraction}: give a number between 0 and 1"
        )
    if not 0 <= options.seed < 1 << 64:
        raise StoreError(f"--seed={options.seed}: give a whole number from 0 to 2**64 - 1")
    for name, least in (("shard_tokens", 1), ("bpe_bytes", 1), ("processes", 0)):
        if (value := getattr(options, name)) < least:
            raise StoreError(f"--{name}={value}: give a number of at least {least}")
    given = _vocabulary(options)
    source = _source(options, given)
    # Before any work. What a BPE will learn beyond the bytes is text, so no special token.
    special_ids(options, given or vocabulary.train_bpe((), 257))
    done = (options.out / MANIFEST).is_file()
    if not done:
        check_writable(options.out)
    units = source.units()
    request = _request(options, given, source, units)
    if done:
        store = _verified(options.out, request)
        print("already prepared")
    else:
        with _work_folder(options.out, request) as work:
            store = make_store(options, request, source, units, given, work)
    # Also what a command that was killed at the very end has left.
    shutil.rmtree(_work_of(options.out), ignore_errors=True)
    for split in SPLITS:
        documents, tokens = (store.count(split, what) for what in ("documents", "tokens"))
        line = f"{split}: {documents:,} documents, {tokens:,} tokens"
        if (ratio := store.bytes_per_token(split)) is not None:
            line += f", {ratio:.3f} bytes per token"
        print(line)
    print(f"store: {store.path}")
    return store


def _vocabulary(options) -> Vocabulary | None:
    """The vocabulary that the flags name, None for one that is to be trained."""
    if options.tokenizer in (None, "bpe"):
        if SOURCES[options.source].tokens:
            if options.vocab_size is None or options.separator is None or options.tokenizer:
                raise StoreError(
                    f"--source={options.source} holds ids, not text; give the --tokenizer that "
                    "made them, or --vocab_size=N and --separator=ID"
                )
            return vocabulary.ids_only(options.vocab_size)
        if (size := _size_of_bpe(options)) < 257:
            raise StoreError(f"--vocab_size={size}: a byte-level BPE needs 257 or more")
        return None
    found = vocabulary.from_option(options.tokenizer)
    if options.vocab_size not in (None, found.size):
        raise StoreError(
            f"--vocab_size={options.vocab_size}: {options.tokenizer} has {found.size} tokens; "
            "leave out one of the two flags"
        )
    return found


def _size_of_bpe(options) -> int:
    return DEFAULT_VOCAB_SIZE if options.vocab_size is None else options.vocab_size


def _source(options, given):
    source = SOURCES[options.source]
    names = {field.name: field for field in dataclasses.fields(source)}
    arguments = {}
    for flag, name in _FIELDS.items():
        value = getattr(options, flag)
        if value is not None and name not in names:
            raise SourceError(f"--{flag}={value}: --source={options.source} takes no --{flag}")
        if name in names and value is None and names[name].default is dataclasses.MISSING:
            raise SourceError(f"--source={options.source} needs --{flag}=...")
        if value is not None:
            arguments[name] = value
    if "separator_id" in names:
        arguments["separator_id"] = vocabulary.special_id(given, options.separator, "separator")
    return source(**arguments)


def _request(options, given, source, units) -> dict[str, Any]:
    """What decides the content of the store, as JSON."""
    request = dataclasses.asdict(options)
    for name in _HARMLESS:
        del request[name]
    request["vocab_size"] = _size_of_bpe(options) if given is None else given.size
    # By content: the same path may hold another one tomorrow.
    request["tokenizer"] = None if given is None else given.sha256
    listed = json.dumps([(unit.name, unit.bytes) for unit in units]).encode()
    request["units"] = {
        "count": len(units),
        "bytes": sum(unit.bytes for unit in units),
        "sha256": hashlib.sha256(listed).hexdigest(),
    }
    if options.source in ("stdlib", "packages"):
        request["python"] = platform.python_version()
    if options.source == "packages":
        request["packages"] = source.installed()
    return request


def _differences(found: dict, wanted: dict) -> str:
    texts = []
    for key in {**found, **wanted}:
        there, here = found.get(key), wanted.get(key)
        if there == here:
            continue
        if isinstance(there, list) and isinstance(here, list):  # of packages: only what differs
            there, here = sorted(set(there) - set(here)), sorted(set(here) - set(there))
            there, here = (", ".join(part[:5]) or "none" for part in (there, here))
        texts.append(f"{key} {there} there and {here} here")
    return ", ".join(texts)


def _verified(out: Path, request) -> Store:
    with Progress(f"verifying {out}", size_of(out)) as progress:
        store = open_store(out, progress=lambda done, total: progress.update(done))
    different = _differences(store.manifest["provenance"].get("request", {}), request)
    if different:
        raise StoreError(
            f"{out}: is a store of another request ({different}); choose another --out"
        )
    return store


def _work_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.preparing")


@contextlib.contextmanager
def _work_folder(out: Path, request) -> Iterator[Path]:
    """The folder of the work in progress, held against other commands while it is used."""
    work = _work_of(out)
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"{out}: another command is preparing it; wait for that one") from None
        file = work / "request.json"
        if file.exists():
            different = _differences(json.loads(file.read_text()), request)
            if different:
                raise StoreError(
                    f"{work}: holds unfinished work of another request ({different}); delete it, "
                    "or choose another --out"
                )
            print(f"going on with the work in {work}")
        else:
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(request))
            partial.replace(file)
        try:
            yield work
        except UserError:
            # Else a command that was wrong from the start would stand in the way of the right one.
            if not any((work / "runs").glob("run-*")) and not (work / "tokenizer.json").exists():
                shutil.rmtree(work)
            raise


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"error: {message} (see --help)\n")


def _parser() -> _Parser:
    # argparse, not absl: other commands import this module, and absl flags are global to a process.
    parser = _Parser(
        prog="python -m tst_jax.prepare",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--source", required=True, choices=tuple(SOURCES), help="where the text comes from")
    add("--out", required=True, metavar="DIR", help="folder of the store, on a local disk")
    add("--files", metavar="GLOB", help="of the corpus: a path, gs://..., s3://...; quote it")
    add("--field", help="of each record that holds its text; default text")
    add("--dataset", metavar="NAME", help="of tfds, or of the Hugging Face hub, or its folder")
    add("--dataset_config", metavar="NAME", help="of a Hugging Face dataset")
    add("--split", help="of the dataset; default train")
    add("--data_dir", metavar="DIR", help="of tfds; of packages: pip's --target")
    add(
        "--tokenizer",
        metavar="WHAT",
        help="FILE.json (Hugging Face), FILE.model (SentencePiece), tiktoken:NAME, bytes, or bpe "
        "(the default): train a byte-level BPE of --vocab_size on the corpus",
    )
    add("--vocab_size", type=int, metavar="N", help=f"of bpe, default {DEFAULT_VOCAB_SIZE}")
    add("--bpe_bytes", type=int, metavar="N", help="text that bpe is trained on, default 1e9")
    add("--separator", metavar="TOKEN", help="ends each document; default: what the tokenizer has")
    add("--bos", metavar="TOKEN", help="begins each document; default: none")
    add("--eos", metavar="TOKEN", help="stands before the separator; default: none")
    add("--heldout_fraction", type=float, metavar="X", help="of the documents, default 0.05")
    add("--seed", type=int, metavar="N", help="of the order and the held-out documents, default 0")
    add("--processes", type=int, metavar="N", help="default 0: as many as there are cores")
    add("--shard_tokens", type=int, metavar="N", help=f"of a shard, default {SHARD_TOKENS}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command on `argv` (without the program's name); returns the exit status."""
    given = vars(_parser().parse_args(argv))
    try:
        prepare_store(given.pop("out"), **{k: v for k, v in given.items() if v is not None})
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
