"""What the tests of sources share: documents to store, and what every source must do with them."""

import json
import pickle

import pytest

from tst_jax.data import units

TEXTS = ["a", "", "caf\u00e9 \u4e16 \U0001f600", "two\nlines", "\u2028\x85\x00", "last" * 9] * 3


def read(source):
    """All documents of a source, unit by unit, through what a worker process would get."""
    parts = source.units()
    assert parts == source.units() and len({part.name for part in parts}) == len(parts)
    source, parts = pickle.loads(pickle.dumps((source, parts)))
    documents = [document for part in parts for document in source.read(part)]
    if source.tokens:
        assert all(d.ndim == 1 and d.size and d.dtype.kind in "iu" for d in documents)
        documents = [document.tolist() for document in documents]
    return documents


def check_every_cut(monkeypatch, source, expected, sizes):
    """Whatever the size of units, they hold each document once, in order."""
    counts = set()
    for size in sizes:
        monkeypatch.setattr(units, "UNIT_BYTES", size)
        assert read(source) == expected, size
        counts.add(len(source.units()))
    assert min(counts) == 1 and max(counts) > 3


def refuses(match, act):
    with pytest.raises(units.SourceError, match=match) as caught:
        act()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def lines(texts, ends="\n", field="text", **options):
    return "".join(json.dumps({"n": 1, field: t}, **options) + ends for t in texts).encode()
