"""Proves `tst_jax.checkpoint` and `tst_jax.manifest`: what is saved comes back to the bit or not at
all, and nothing that is whole is ever lost.

Damage at random in every kind of file; a save that fails in the background, or on a full disk, or
is killed; which checkpoints stay; and what does not fit.
"""

import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from tst_jax import checkpoint, hosts, manifest
from tst_jax.checkpoint import CheckpointError, Checkpoints

HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def state(step: int):
    """A small tree that differs at each step."""
    key = jax.random.key(step)
    return {
        "params": {"table": jax.random.normal(key, (300, 8)), "scale": jnp.ones(8) * step},
        "moments": {"table": jax.random.normal(key, (300, 8)).astype(jnp.bfloat16)},
        "step": jnp.int32(step),
    }


def save(folder, steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), {"phase": "recovery"})
    return folder


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def load(folder, say=lambda line: None, read_only=False):
    """(step, state) of what a run would go on from."""
    with Checkpoints(folder, read_only=read_only, say=say) as checkpoints:
        step = checkpoints.newest()
        wanted = state(0)
        return step, checkpoints.restore(step, wanted, jax.tree.map(lambda _: HERE, wanted))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with the checkpoints of steps 4, 8 and 12."""
    return save(tmp_path_factory.mktemp("saved") / "checkpoints", (4, 8, 12), keep=3)


def test_what_is_saved_comes_back(saved):
    """All bits, the record, the parameters alone, and one array in host memory."""
    step, found = load(saved)
    assert step == 12 and bits(found) == bits(state(12))
    with Checkpoints(saved, read_only=True) as checkpoints:
        assert checkpoints.steps() == [4, 8, 12]
        record = checkpoints.record(8)
        assert record["phase"] == "recovery" and record["step"] == 8
        assert record["arrays"]["moments.table"] == "bfloat16[300, 8]"
        params = state(8)["params"]
        alone = checkpoints.restore(8, params, jax.tree.map(lambda _: HERE, params), "params")
        assert bits(alone) == bits(params)
        read = checkpoints.reader(4, params, prefix="params")
        assert read("table").tobytes() == bits(state(4)["params"])[1]
    content = json.loads((saved / "12" / "manifest.json").read_text())
    files = {str(p.relative_to(saved / "12")) for p in (saved / "12").rglob("*") if p.is_file()}
    assert content["files"].keys() == files - {"manifest.json"} and len(files) > 5


def damage(rng, files):
    """Does something bad to one of the files, and says what and to which."""
    kinds = ("flip", "cut", "delete", "empty", "append", "swap", "rename", "zeros")
    kind, path = rng.choice(kinds), files[rng.integers(len(files))]
    data = bytearray(path.read_bytes())
    if kind in ("flip", "cut", "zeros") and not data:
        kind = "append"
    if kind == "empty" and not data:
        kind = "delete"
    if kind == "flip":
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
    elif kind == "cut":
        data = data[: rng.integers(len(data))]
    elif kind == "empty":
        data = b""
    elif kind == "append":
        data += b"\n"
    elif kind == "zeros":
        start = rng.integers(len(data))
        data[start : start + 512] = bytes(len(data[start : start + 512]))
        if data == path.read_bytes():
            data[0] ^= 1
    if kind == "delete":
        path.unlink()
    elif kind == "rename":
        path.rename(path.with_name(path.name + "~"))
    elif kind == "swap":
        other = next(f for f in files if f.read_bytes() != bytes(data))
        path.write_bytes(other.read_bytes())
        other.write_bytes(bytes(data))
    else:
        path.write_bytes(bytes(data))
    return kind, path


def test_a_manifest_that_cannot_be_read(saved, tmp_path):
    """As on a bad disk: here there is a folder in its place, and a file in the place of another."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / "8")
    (folder / "8").write_text("")
    (folder / "12/manifest.json").unlink()
    (folder / "12/manifest.json").mkdir()
    said = []
    assert load(folder, said.append)[0] == 4
    assert len(said) == 2 and all("manifest.json cannot be read: " in line for line in said)


def test_100_random_damages(saved, tmp_path):
    """Every damage to the newest checkpoint is found and named, the one before is taken, loudly;
    what is damaged stays, under another name."""
    rng, kinds = np.random.default_rng(7), set()
    for number in range(100):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        files = sorted(p for p in (folder / "12").rglob("*") if p.is_file())
        kind, path = damage(rng, files)
        kinds.add(kind)
        said = []
        step, found = load(folder, said.append)
        assert step == 8 and bits(found) == bits(state(8)), (kind, path)
        (line,) = said
        assert line.startswith("warning: ") and "step 8 is the newest good checkpoint" in line
        if kind != "swap":  # of two files, the first is named
            assert str(path) in line, (kind, path, line)
        assert sorted(p.name for p in folder.iterdir()) == ["12.damaged", "4", "8"]
    assert len(kinds) == 8


def test_several_damaged_ones(saved, tmp_path):
    """The first good one from the end is taken; without any nothing is begun anew in silence."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)
    (folder / "12/manifest.json").unlink()
    shutil.rmtree(folder / "8/state")
    said = []
    assert load(folder, said.append, read_only=True)[0] == 4
    assert len(said) == 2 and "12/manifest.json is missing" in said[0]
    assert sorted(p.name for p in folder.iterdir()) == ["12", "4", "8"]  # read_only moves nothing
    assert load(folder)[0] == 4
    assert sorted(p.name for p in folder.iterdir()) == ["12.damaged", "4", "8.damaged"]
    # Saved again, and damaged again: the first evidence is not lost.
    save(folder, (8, 12), keep=3)
    assert load(folder)[0] == 12
    (folder / "12/manifest.json").write_text("{}")
    assert load(folder)[0] == 8
    assert {"12.damaged", "12.damaged-2"} < {p.name for p in folder.iterdir()}
    for step in (4, 8):
        (folder / f"{step}/manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match="no good checkpoint") as caught:
        load(folder)
    assert all(f"/{step}/manifest.json" in str(caught.value) for step in (4, 8))
    assert {"4", "8"} < {p.name for p in folder.iterdir()}


def test_a_manifest_of_another_version_is_named(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints/12/manifest.json"
    content = json.loads(path.read_text()) | {"format": "tst_jax.checkpoint/9"}
    del content["sha256"]
    path.write_text(json.dumps(content | {"sha256": manifest._own(content)}))
    said = []
    assert load(tmp_path / "checkpoints", said.append)[0] == 8
    assert "is of format tst_jax.checkpoint/9; this version reads" in said[0]


@pytest.mark.parametrize(
    "options, left",
    [
        (dict(keep=1), [24]),
        (dict(keep=2, always=(4, 8)), [4, 8, 20, 24]),
        (dict(keep=1, keep_every=8), [8, 16, 24]),
        (dict(keep=2, keep_every=12, always=(16,)), [12, 16, 20, 24]),
    ],
    ids=str,
)
def test_which_checkpoints_stay(tmp_path, options, left):
    """The last n, every k steps, the switches; and nothing else is removed."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    others = ["notes.txt", "12.damaged", "best", "4.bak"]
    for name in others:
        (folder / name).write_text("mine")
    save(folder, range(4, 25, 4), **options)
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == left
    assert sorted(p.name for p in folder.iterdir()) == sorted([*others, *map(str, left)])
    assert load(folder)[0] == 24


def test_a_save_that_is_there_is_not_written_again(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoints")
    before = (tmp_path / "checkpoints/12/manifest.json").stat().st_mtime_ns
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        checkpoints.save(12, state(1), {})
        assert checkpoints.steps() == [4, 8, 12]
    assert (tmp_path / "checkpoints/12/manifest.json").stat().st_mtime_ns == before


def wait_for(checkpoints):
    """As the trainer's steps do: until the save in the background has ended or failed."""
    for _ in range(1000):
        checkpoints.check()
        if checkpoints._job is None:
            return
        time.sleep(0.01)


def test_an_error_in_the_background_is_raised_at_the_next_step(saved, tmp_path, monkeypatch):
    """Whatever fails: Orbax, or the checksums; the last good one stays, and a later save works."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)

    def fails(*_):
        raise OSError(5, "Input/output error")

    with Checkpoints(folder, keep=3) as checkpoints:
        monkeypatch.setattr(manifest, "write", fails)
        checkpoints.save(16, state(16), {})
        with pytest.raises(CheckpointError) as caught:
            wait_for(checkpoints)
        assert "checkpoint of step 16 was not written: [Errno 5]" in str(caught.value)
        assert "12 is the last checkpoint" in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1
        checkpoints.save(16, state(16), {})  # and where no step looked, the next save does
        with pytest.raises(CheckpointError, match="step 16 was not written"):
            checkpoints.save(20, state(20), {})
        monkeypatch.undo()
        assert sorted(p.name for p in folder.iterdir()) == ["12", "4", "8"]
        checkpoints.save(16, state(16), {})
        checkpoints.wait()
        assert checkpoints.steps() == [8, 12, 16]
    assert load(folder)[0] == 16


def test_a_removal_that_fails(saved, tmp_path, monkeypatch):
    """Half removed, it is no checkpoint any more; and the new one is there."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved, folder)

    def fails(path):
        (path / "manifest.json").unlink()
        raise OSError(13, "Permission denied")

    with Checkpoints(folder, keep=3) as checkpoints:
        monkeypatch.setattr(type(checkpoints.folder), "rmtree", fails)
        checkpoints.save(16, state(16), {})
        with pytest.raises(CheckpointError, match="expired cannot be removed: .*denied"):
            checkpoints.wait()
        assert checkpoints.steps() == [8, 12, 16]
    assert load(folder)[0] == 16


def test_waiting_for_what_other_processes_still_write(saved, tmp_path, monkeypatch):
    """One process has seen the end of a save in one of its steps, another has not: both wait."""
    shutil.copytree(saved, tmp_path / "checkpoints")
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        checkpoints.save(16, state(16), {})
        wait_for(checkpoints)
        monkeypatch.setattr(hosts, "agreed", lambda mine: True)  # what the first process says
        checkpoints.wait()


def test_orbax_failing_in_the_background(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "checkpoints")

    class Response:
        def result(self):
            raise ValueError("RESOURCE_EXHAUSTED: write failed\nmore\nNo space left on device")

    monkeypatch.setattr(ocp, "save_checkpointables_async", lambda *_, **__: Response())
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    checkpoints.save(16, state(16), {})
    with pytest.raises(CheckpointError, match="16 was not written: the disk is full"):
        checkpoints.wait()
    checkpoints.close()


def test_too_little_room_is_refused_before_anything_is_written(saved, tmp_path, monkeypatch):
    shutil.copytree(saved, tmp_path / "checkpoints")
    usage = shutil.disk_usage(tmp_path)._replace(free=20_000)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: usage)
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        with pytest.raises(
            CheckpointError, match="step 16 needs 0.001.* GB and 2e-05 GB are free"
        ) as caught:
            checkpoints.save(16, state(16), {})
        assert "12 is the last checkpoint, the same command goes on" in str(caught.value)
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["12", "4", "8"]


def test_what_does_not_fit_is_named(saved):
    """Shapes, dtypes and names; nothing is cast."""
    wanted = state(0)
    wanted["params"]["scale"] = jnp.ones(9)
    wanted["moments"]["table"] = wanted["params"]["table"]
    wanted["more"] = jnp.int32(0)
    del wanted["step"]
    with Checkpoints(saved, read_only=True) as checkpoints:
        with pytest.raises(CheckpointError) as caught:
            checkpoints.check_fits(12, wanted)
    assert str(caught.value).splitlines()[1:] == [
        "moments.table: bfloat16[300, 8] in the checkpoint, float32[300, 8] in the run",
        "more: absent in the checkpoint, int32[] in the run",
        "params.scale: float32[8] in the checkpoint, float32[9] in the run",
        "step: int32[] in the checkpoint, absent in the run",
    ]


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        Checkpoints(tmp_path / "no", read_only=True)
    (tmp_path / "yes").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint yet"):
        load(tmp_path / "yes")
    with Checkpoints(tmp_path / "no") as checkpoints:
        assert checkpoints.good() is None and checkpoints.steps() == []
    assert not (tmp_path / "no").exists()
