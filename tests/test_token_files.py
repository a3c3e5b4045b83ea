"""Files of token ids: what they yield however they are cut, and what they refuse in one line."""

import itertools
import os
import struct

import fsspec
import numpy as np
import pytest
from source_checks import check_every_cut, read, refuses

from tst_jax.data import token_files, units
from tst_jax.data.token_files import LlmC, Megatron

SEPARATOR = 7


def ids_of(seed, size, kind, share):
    ids = np.random.default_rng(seed).integers(8, 60_000, size).astype(kind)
    ids[np.random.default_rng(seed + 1).random(size) < share] = SEPARATOR
    return ids


def split(ids):
    groups = itertools.groupby(ids.tolist(), lambda token: token == SEPARATOR)
    return [list(group) for separates, group in groups if not separates]


def llmc(ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, ids.size if count is None else count
    return header.tobytes() + ids.tobytes()


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind, magic", [("<u2", (20240520, 1)), ("<u4", (20240801, 7))])
def test_llmc_is_the_same_at_every_cut(tmp_path, monkeypatch, kind, magic, remote):
    monkeypatch.setattr(units, "BLOCK", 16)
    root = f"memory://llmc{os.getpid()}{magic[1]}" if remote else str(tmp_path)
    expected = []
    for i, share in enumerate((0.1, 0.0, 0.6, 1.0)):
        ids = ids_of(i, 100, kind, share)
        with fsspec.open(f"{root}/{i}.bin", "wb") as file:
            file.write(llmc(ids, *magic))
        sizes = (1, 7, 20, 50, 10**6) if remote else [*range(1, 40), 10**6]
        check_every_cut(monkeypatch, LlmC(f"{root}/{i}.bin", SEPARATOR), split(ids), sizes)
        expected += split(ids)
    assert read(LlmC(f"{root}/*.bin", SEPARATOR)) == expected


def test_llmc_refuses(tmp_path, monkeypatch):
    file, ids = tmp_path / "x.bin", np.arange(30, dtype=np.uint16)
    source = LlmC(str(file), SEPARATOR)
    for data, match in [
        (llmc(ids, version=2), "magic 20240520, version 2"),
        (llmc(ids, magic=20240801), "magic 20240801, version 1; must"),
        (b"", "magic 0, version 0"),
        (llmc(ids)[:-1], "has 1083 bytes, its header says 30 tokens, 1084 bytes"),
        (llmc(ids, count=29), "1084 bytes, its header says 29"),
        (llmc(ids, count=-1), "its header says -1"),
        (llmc(ids)[:500], "has 500 bytes"),
    ]:
        file.write_bytes(data)
        refuses(f"x.bin: .*{match}", source.units)
    file.write_bytes(llmc(ids))
    refuses("separator_id 65536 .* 0 to 65535", LlmC(str(file), 65536).units)
    monkeypatch.setattr(token_files, "LARGEST_DOCUMENT", 29)
    assert read(source) == split(ids)
    refuses("30 tokens up to 30 without separator_id 50256", lambda: read(LlmC(str(file), 50256)))


def write_megatron(path, sequences, bounds, code=8, kind="<u2", version=1):
    lengths = np.array([len(sequence) for sequence in sequences], np.int32)
    pointers = (np.cumsum(lengths) - lengths).astype(np.int64) * np.dtype(kind).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code, len(lengths), len(bounds))
    index = head + lengths.tobytes() + pointers.tobytes() + np.array(bounds, np.int64).tobytes()
    for ending, data in (
        (".idx", index),
        (".bin", np.concatenate(sequences).astype(kind).tobytes()),
    ):
        with fsspec.open(f"{path}{ending}", "wb") as file:
            file.write(data)


@pytest.mark.parametrize("code, kind", [(1, "u1"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatron_is_the_same_at_every_cut(tmp_path, monkeypatch, code, kind):
    monkeypatch.setattr(units, "BLOCK", 3)
    root = f"memory://megatron{os.getpid()}" if code == 5 else str(tmp_path)
    sequences = [ids_of(i, size, kind, 0.2) for i, size in enumerate([5, 0, 9, 1, 30, 2, 7] * 2)]
    bounds = [0, 1, 1, 3, 7, 8, 8, 12, 14, 14]
    write_megatron(f"{root}/p", sequences, bounds, code, kind)
    whole = [np.concatenate([*sequences[i:j], []]) for i, j in itertools.pairwise(bounds)]
    sizes = [*range(1, 40), 100, 10**6]
    expected = [ids.tolist() for ids in whole if ids.size]
    check_every_cut(monkeypatch, Megatron(f"{root}/*.bin", None), expected, sizes)
    expected = [part for ids in whole for part in split(ids)]
    check_every_cut(monkeypatch, Megatron(f"{root}/p", SEPARATOR), expected, sizes)


def test_megatron_refuses(tmp_path):
    source = Megatron(f"{tmp_path}/*.bin", 7)
    good = [np.arange(4), np.arange(5)]

    def changed(place, data):
        write_megatron(tmp_path / "p", good, [0, 1, 2])
        with open(tmp_path / "p.idx", "r+b") as file:
            file.seek(place)
            file.write(data)

    for place, data, match in [
        (0, b"X", "does not begin with"),
        (9, b"\2", "has version 2"),
        (17, b"\6", "has type 6 of ids"),
        (18, b"\3", "has 82 bytes, its header needs 94"),
        (34, b"\5", "covers 20 of the 18 bytes"),
        (38, b"\6", "sequence 1 lies outside"),
        (38, b"\xff" * 4, "sequence 1 lies outside"),
        (50, b"\xff" * 7 + b"\x7f", "sequence 1 lies outside"),
        (50, b"\xff" * 8, "sequence 1 lies outside"),
        (58, b"\1", "do not rise"),
        (66, b"\3", "do not rise"),
        (74, b"\1", "documents end at sequence 1 of 2"),
    ]:
        changed(place, data)
        refuses(f"p.idx: .*{match}", source.units)
    changed(0, b"M")
    assert read(source) == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    refuses("separator_id -1 .* 0 to 65535", Megatron(f"{tmp_path}/p", -1).units)
    (tmp_path / "p.bin").write_bytes(b"a" * 17)
    refuses("p.idx: sequence 1 lies outside", source.units)
    (tmp_path / "p.bin").write_bytes(b"a" * 19)
    refuses("p.idx: covers 18 of the 19 bytes", source.units)
    (tmp_path / "p.idx").write_bytes(b"MMIDIDX\x00\x00")
    refuses("p.idx: has 9 bytes", source.units)
    (tmp_path / "p.idx").unlink()
    refuses("p.idx: cannot be read .FileNotFoundError", source.units)
