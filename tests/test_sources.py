"""Files of text: what they yield however they are cut, and what they refuse in one line."""

import gzip
import os
import struct
import sys

import fsspec
import jax
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from source_checks import TEXTS, check_every_cut, lines, read, refuses

from tst_jax.data import sources, units
from tst_jax.data.sources import SOURCES, Jsonl, Packages, Parquet, Stdlib, Text


def zstd(data):
    stream = pa.BufferOutputStream()
    with pa.CompressedOutputStream(stream, "zstd") as compressed:
        compressed.write(data)
    return stream.getvalue().to_pybytes()


# ---- files


def write_tree(path):
    for name in ("b.txt", "a/x.txt", "a/b/c.txt", ".hidden/h.txt", "a/.h.txt", "other.bin"):
        with fsspec.open(f"{path}/{name}", "w", auto_mkdir=True) as file:
            file.write(name)


@pytest.mark.parametrize("remote", [False, True])
def test_globs_cross_folders_sort_and_leave_out_hidden_files_and_folders(tmp_path, remote):
    root = f"memory://tree{os.getpid()}" if remote else str(tmp_path)
    write_tree(root)
    assert read(Text(f"{root}/**/*.txt")) == ["a/b/c.txt", "a/x.txt", "b.txt"]
    assert read(Text(f"{root}/**")) == ["a/b/c.txt", "a/x.txt", "b.txt", "other.bin"]
    assert read(Text(f"{root}/*.txt")) == ["b.txt"] == read(Text(f"{root}/b.txt"))
    assert read(Text(f"{root}/.hidden/*")) == [".hidden/h.txt"]
    for nothing in ("*.md", "a", ""):
        refuses(r"--files=.*matches no file; quote the glob", Text(f"{root}/{nothing}").units)


def test_linked_files_and_relative_paths(tmp_path, monkeypatch):
    (tmp_path / "blob").write_text("linked")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.txt").symlink_to("../blob")
    monkeypatch.chdir(tmp_path)
    assert read(Text("d/*.txt")) == ["linked"]
    assert Text("d/*.txt").units()[0].name == "d/x.txt (1 files)"


@pytest.mark.parametrize(
    "protocol, package", [("gs", "gcsfs"), ("s3", "s3fs"), ("no", "known: no")]
)
def test_missing_backends_are_named(protocol, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    refuses(f"^{protocol}://b/x.*{package}", Text(f"{protocol}://b/x*").units)


def test_text(tmp_path, monkeypatch):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i:02}.txt").write_bytes(text.encode())
    for size in (1, 10, 50, 10**6):
        monkeypatch.setattr(sources, "TEXT_UNIT_BYTES", size)
        assert read(Text(f"{tmp_path}/*")) == TEXTS
        total = sum(unit.bytes for unit in Text(f"{tmp_path}/*").units())
        assert total == sum(len(text.encode()) for text in TEXTS)
    (tmp_path / "00.txt").write_bytes(b"ab\xff")
    refuses(r"/00.txt: is not UTF-8 \(byte 2\)", lambda: read(Text(f"{tmp_path}/*")))


def test_stdlib_rules_on_a_made_up_library(tmp_path, monkeypatch):
    line = b"x = 1  # nine and more bytes\n"
    kept = ["b.py", "giant.py", "one_line.py", "table.py", "a/z.py", "a/test/t.py"]
    skipped = ["n.txt", "_sysconfigdata_x.py", "lib2to3/l.py", "site-packages/p/p.py"]
    skipped += ["dist-packages/d.py", "a/__pycache__/c.py"]
    contents = {name: f"# {name}\n".encode() + line * 10 for name in [*kept, *skipped]}
    contents["giant.py"] = line * 10_000
    contents["one_line.py"] = ("\u00e9" * 150_001).encode()
    contents |= {"table.py": line * 400, "encodings/table.py": line * 400}
    contents |= {"latin.py": line * 10 + b"\xe9", "tiny.py": line}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    for size in (1, 10**5, 10**9):
        monkeypatch.setattr(sources, "STDLIB_UNIT_BYTES", size)
        documents = dict(zip(kept, read(Stdlib(tmp_path)), strict=True))
    assert documents.pop("giant.py") == (line * (200_000 // len(line))).decode()
    assert documents.pop("one_line.py") == "\u00e9" * 100_000
    assert documents == {name: contents[name].decode() for name in documents}
    refuses("holds no Python file", Stdlib(tmp_path / "none").units)


def test_stdlib_of_this_python():
    units = Stdlib().units()
    assert len(units) > 3 and max(unit.bytes for unit in units) <= 4 << 20
    texts = list(Stdlib().read(units[0]))
    with open(os.__file__, encoding="utf-8") as file:
        assert file.read() in texts


def test_packages_beside_the_standard_library(tmp_path):
    """Each package's files, and what is installed by name and version."""
    line = b"x = 1  # nine and more bytes\n"
    contents = {"one/a.py": line * 10, "one/sub/b.py": line * 11, "two.py": line * 12}
    contents |= {"one/tiny.py": line, "one/giant.py": line * 10_000, "one/c.pyc": line * 10}
    contents |= {"one/__pycache__/d.py": line * 10}
    contents |= {"one-1.5.dist-info/METADATA": b"Name: one\nVersion: 1.5\n"}
    contents |= {"two-2.0.dist-info/METADATA": b"Name: Two\nVersion: 2.0\n"}
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    source, library = Packages(str(tmp_path)), Stdlib().units()
    assert source.units()[: len(library)] == library
    own = [text for unit in source.units()[len(library) :] for text in source.read(unit)]
    assert own == [contents[name].decode() for name in ("two.py", "one/a.py", "one/sub/b.py")]
    assert source.installed() == ["one==1.5", "two==2.0"]
    refuses("holds no installed package", Packages(str(tmp_path / "one")).units)


def test_packages_of_this_environment():
    source = Packages()
    assert f"jax=={jax.__version__}" in source.installed()
    # Far more than the library alone, which is the first part.
    size = lambda units: sum(unit.bytes for unit in units)
    assert size(source.units()) > 1.5 * size(Stdlib().units())


# ---- JSON lines


@pytest.mark.parametrize("remote", [False, True])
def test_jsonl_is_the_same_at_every_cut(tmp_path, monkeypatch, remote):
    root = f"memory://lines{os.getpid()}" if remote else str(tmp_path)
    data = lines(TEXTS[:6]) + b"\n \n" + lines(TEXTS[6:12], ensure_ascii=False, ends="\r\n")
    data += lines(["no line end"], ends="")
    for name, part in (("a.jsonl", data), ("b.jsonl", b""), ("c.jsonl", b"\n\n")):
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(part)
    expected = [*TEXTS[:12], "no line end"]
    sizes = range(1, len(data) + 2) if not remote else (1, 2, 30, 100, 10**6)
    check_every_cut(monkeypatch, Jsonl(f"{root}/a.jsonl"), expected, sizes)
    assert read(Jsonl(f"{root}/*.jsonl")) == expected


@pytest.mark.parametrize("ending, compress", [(".gz", gzip.compress), (".zstd", zstd)])
def test_compressed_jsonl_holds_all_members_or_is_refused(tmp_path, ending, compress):
    texts = [f"{i} {os.urandom(40).hex()}" for i in range(3000)]
    data = lines(texts, field="body")
    parts = [compress(data[i : i + 100_000]) for i in range(0, len(data), 100_000)]
    file = tmp_path / f"x.jsonl{ending}"
    source = Jsonl(str(file), field="body")
    file.write_bytes(b"".join(parts))
    assert read(source) == texts and len(source.units()) == 1
    file.write_bytes(compress(b"\n"))
    assert read(source) == []
    whole = compress(data)
    for size in (1, 9, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        file.write_bytes(whole[:size])
        refuses(rf"{ending}: cannot be read \(OSError", lambda: read(source))
    file.write_bytes(parts[0] + b"junk")
    refuses(rf"x.jsonl{ending}", lambda: read(source))
    file.write_bytes(lines(texts))
    refuses(rf"{ending}: cannot be read", lambda: read(source))
    file.write_bytes(b"")
    refuses(f"{ending}: is empty", source.units)


@pytest.mark.parametrize(
    "line, match",
    [
        (b'{"text": "a"', "is no JSON"),
        (b'{"text": "a"} {"text": "b"}', "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"\xff", "is no JSON .*utf-8"),
        (b'{"text": "\xc3"}', "is no JSON .*utf-8"),
        (b'["text"]', "is no JSON object"),
        (b'{"body": "a", "n": 1}', "no field 'text'; give one of body, n"),
        (b'{"text": null}', "field 'text' is null"),
        (b'{"text": 3}', "is int, not a string"),
        (b'{"text": "\\ud800"}', r"lone surrogate \(character 0\)"),
    ],
)
def test_jsonl_names_the_line_that_it_refuses(tmp_path, monkeypatch, line, match):
    good = lines(["x" * 20, "\n", "y"])
    (tmp_path / "x.jsonl").write_bytes(good + line + b"\n" + good)
    (tmp_path / "y.jsonl.gz").write_bytes(gzip.compress(good + line + b"\n"))
    for size in (1, 9, 40, 60, 10**6):
        monkeypatch.setattr(units, "UNIT_BYTES", size)
        refuses(f"x.jsonl: line 4: .*{match}", lambda: read(Jsonl(f"{tmp_path}/x.jsonl")))
    refuses(f"y.jsonl.gz: line 4: .*{match}", lambda: read(Jsonl(f"{tmp_path}/y*")))


# ---- Parquet


def write_parquet(path, texts, kind="string", groups=3, field="text"):
    column = pa.array(texts, pa.string()).cast(kind)
    table = pa.table({"n": pa.array(range(len(texts))), field: column})
    with fsspec.open(path, "wb") as file:
        pq.write_table(table, file, row_group_size=groups)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary("int32", "string")])
def test_parquet_is_the_same_at_every_cut(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(units, "ROWS", 4)
    root = f"memory://parquet{os.getpid()}" if kind == pa.string() else str(tmp_path)
    for i in range(3):
        write_parquet(f"{root}/{i}.parquet", [f"{i} {text}" for text in TEXTS], kind)
    expected = [f"{i} {text}" for i in range(3) for text in TEXTS]
    assert read(Parquet(f"{root}/*")) == expected
    sizes = (1, 100, 200, 300, 500, 10**6)
    check_every_cut(monkeypatch, Parquet(f"{root}/0.parquet"), expected[: len(TEXTS)], sizes)


def test_parquet_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "UNIT_BYTES", 1)
    source = Parquet(f"{tmp_path}/*")
    write_parquet(f"{tmp_path}/a", ["a", "b", "c", "d", None])
    refuses("/a: row 4: field 'text' is null", lambda: read(source))
    write_parquet(f"{tmp_path}/a", ["1", "2"], "int64")
    refuses("/a: column 'text' is of type int64, not string", source.units)
    pq.write_table(pa.table({"text": [["a"]]}), tmp_path / "a")
    refuses("/a: column 'text' is of type list<.*>, not string", source.units)
    write_parquet(f"{tmp_path}/a", ["a"], field="body")
    refuses("/a: has no field 'text'; give one of n, body", source.units)
    bad = pa.StringArray.from_buffers(
        2, *map(pa.py_buffer, (struct.pack("<3i", 0, 1, 2), b"a\xff"))
    )
    pq.write_table(pa.table({"text": bad}), tmp_path / "a")
    refuses(r"/a: row 1: field 'text' is not UTF-8 \(byte 0\)", lambda: read(source))
    (tmp_path / "a").write_bytes(b"PAR1 this is none PAR1")
    refuses("/a: cannot be read", source.units)


def test_every_source_has_a_name():
    assert [source.tokens for source in SOURCES.values()] == [False] * 7 + [True] * 2
