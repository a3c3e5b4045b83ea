"""A small real corpus and the stores that are prepared from it, for the tests of the command."""

import functools
import gzip
import itertools
import json
import pathlib
import sysconfig

from tst_jax import prepare

ROOT = pathlib.Path(prepare.__file__).parent.parent
STDLIB = pathlib.Path(sysconfig.get_paths()["stdlib"])
MODULES = "abc bisect calendar copy csv fnmatch glob heapq keyword operator os queue sched shlex"
MODULES = f"{MODULES} shutil textwrap this token".split()
SPELLS_SEPARATOR = "before <|endoftext|> after \u00e9\u4e16\U0001f600\r\n\x00" * 9
SEED = 1


def make_corpus(folder):
    """Some modules in pieces, so that every seed holds out some; one twice, one that is odd."""
    for module in MODULES:
        text = (STDLIB / f"{module}.py").read_text(encoding="utf-8")
        for start in range(0, len(text), 4000):
            (folder / f"{module}-{start}.py").write_bytes(text[start : start + 4000].encode())
    (folder / "deep").mkdir()
    (folder / "deep" / "copy_again.py").write_bytes((folder / "copy-0.py").read_bytes())
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


def write_jsonl(path, some):
    data = "".join(json.dumps({"body": text}) + "\n" for text in some).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
