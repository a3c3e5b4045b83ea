"""Proves `tst_jax.aot`: the command tells what the compiler for TPUs says of both phases.

A small model is compiled for a v5e host as a user would; its bytes of state follow from the shapes,
and a superposition step sends what a recovery step sends. What does not fit is refused, and what
would is looked for.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
from jax.experimental import topologies

from tst_jax import aot, flops, sharding
from tst_jax.config import ConfigError
from tst_jax.config_file import load_config
from tst_jax.errors import UserError
from tst_jax.sharding import MeshConfig

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = """
from tst_jax.config import Config, DataConfig
from tst_jax.models.shapes import ModelConfig
from tst_jax.schedule import TSTConfig
from tst_jax.sharding import MeshConfig


def get_config():
    return Config(
        model=ModelConfig(
            vocab_size=1024, width=256, layers=2, heads=2, kv_heads=2, ff=256, dtype="bfloat16"
        ),
        tst=TSTConfig(bag_size=16, ratio=0.3),
        data=DataConfig(store="none is needed", rows=16, positions=256),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
"""
PHASE = {
    *("argument_bytes", "temp_bytes", "output_bytes", "peak_bytes", "hbm_bytes", "flops"),
    *("collectives", "compile_seconds"),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("aot") / "small.py"
    path.write_text(CONFIG)
    return path


def check(config, topology, *arguments):
    """The command, finished; its figures lie beside the config."""
    try:
        aot.prepare_compiler()
    except UserError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tst_jax.aot", f"--config={config}", f"--topology={topology}"]
    return subprocess.run(
        [*command, f"--json={config.parent}/fit.json", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_both_phases_of_a_run_that_fits(config):
    done = check(config, "v5e:2x2")
    assert done.returncode == 0, done.stderr
    figures = json.loads((config.parent / "fit.json").read_text())
    assert figures["fits"] is True and figures["chips"] == 4
    assert figures["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1, "expert": 1}
    model = load_config(config).model
    large = 2 * 1024 * 256 + 2 * (4 * 256 * 2 * 16 + 3 * 256 * 256)  # tables and matrices
    scales = 5 * 256
    for name in ("superposition", "recovery"):
        found = figures[name]
        assert found.keys() >= PHASE
        assert found["parameter_bytes"] == 4 * (large // 4 + scales)
        assert found["optimizer_bytes"] == 2 * found["parameter_bytes"] + 4
        assert found["flops"] == flops.step_flops(model, 16, 256)
        assert found["parameter_bytes"] < found["argument_bytes"] < found["peak_bytes"]
        assert found["peak_bytes"] < found["hbm_bytes"] == int(15.75 * 2**30)
        assert f"{found['peak_bytes'] / 2**30:.2f}" in done.stdout
        assert found["collectives"] and found["compile_seconds"] > 0
    ours, theirs = (sum(figures[name]["collectives"].values()) for name in aot.PHASES)
    assert ours == theirs >= 4 * 2 * 1024 * 256  # the table, and its gradient, at least
    assert figures["superposition"]["peak_bytes"] <= 1.03 * figures["recovery"]["peak_bytes"]


def test_what_does_not_fit_is_refused(config):
    """Scores of all pairs of 65,536 positions, one row a chip: no micro-batches would help."""
    arguments = ["--config.tst.ratio=0", "--config.model.remat=full", "--config.data.rows=4"]
    arguments += ["--config.data.positions=65536", "--config.eval.rows=4"]
    done = check(config, "v5e:2x2", *arguments, "--config.model.attention_backend=xla")
    assert done.returncode == 2
    (line,) = (text for text in done.stderr.splitlines() if text.startswith("error: "))
    figures = json.loads((config.parent / "fit.json").read_text())
    assert figures["fits"] is False and figures["superposition"] is figures["would_fit"] is None
    found = figures["recovery"]
    assert found.keys() >= PHASE and found["temp_bytes"] is found["collectives"] is None
    assert found["peak_bytes"] > found["hbm_bytes"]
    assert line.startswith(f"error: recovery needs {found['peak_bytes'] / 2**30:.2f} GiB of a chip")
    assert "no remat or micro_batches would fit; take more chips" in line
    assert "does not fit" in done.stdout


@pytest.mark.parametrize(
    "topology, arguments, words",
    [
        ("v9:2x2", [], ["--topology=v9:2x2", "v5e:4x4"]),
        ("v5e:2x3", [], ["--topology=v5e:2x3"]),
        ("v5e:2x2", ["--config.mesh.fsdp=3"], ["4 devices", "fsdp=3"]),
        ("v5e:2x2", ["--config.data.rows=6"], ["rows", "devices"]),
        ("v5e:2x2", ["--config.model.attention_backend=cudnn"], ["cudnn", "tpu"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(config, topology, arguments, words):
    done = check(config, topology, *arguments)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), done.stderr


@pytest.mark.parametrize(
    "mesh, remat, enough, advice",
    [
        ((4, 2), "none", 1, "mesh.data=1 mesh.fsdp=8 model.remat=full"),
        ((1, 8), "none", 4, "model.remat=full micro_batches=4"),
        ((1, 8), "full", 2, "micro_batches=2"),
        ((1, 8), "full", 99, None),  # 16 rows over 8 devices: 2 parts at the most
    ],
)
def test_what_is_tried_until_it_fits(config, monkeypatch, mesh, remat, enough, advice):
    """Nothing is compiled here: a program is said to fit with `enough` micro-batches."""
    run = load_config(config)
    run.model.remat = remat
    run.mesh = MeshConfig(data=mesh[0], fsdp=mesh[1])
    run.data.rows = 32 if enough == 4 else 16
    state = {"parameter_bytes": 2**33, "optimizer_bytes": 0, "hbm_bytes": 2**34, "fits": False}
    figures = {"mesh": dict(zip(("data", "fsdp"), mesh)), "superposition": None, "recovery": state}
    chip = mock.Mock(platform="tpu", device_kind="TPU v5 lite", slice_index=0)
    monkeypatch.setattr(aot, "devices", lambda topology: [chip] * 8)
    monkeypatch.setattr(aot, "_measure_all", lambda c, *_: [{"fits": c.micro_batches >= enough}])

    def layout(config, chips):
        if config.data.rows % (8 * config.micro_batches):
            raise ConfigError("rows do not divide")

    monkeypatch.setattr(aot.programs, "layout", layout)
    found = aot.what_would_fit(run, "v5e:2x4", figures)
    assert found == (advice and " ".join(f"--config.{word}" for word in advice.split()))


def test_several_slices_lie_along_data():
    """The network between slices is slow, and data parallelism asks least of it."""
    try:
        aot.prepare_compiler()
    except UserError as error:
        pytest.skip(str(error))
    two = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=2).devices
    mesh = sharding.make_mesh(MeshConfig(data=-1, fsdp=2, tensor=2), two)
    slices = [[chip.slice_index for chip in part.flat] for part in mesh.devices]
    assert slices == [[0] * 4, [1] * 4]
    with pytest.raises(ValueError, match=r"mesh\.data=1 .* 2 slices"):
        sharding.make_mesh(MeshConfig(data=1, fsdp=8), two)


def test_the_compilers_own_words_are_understood():
    older = (
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (241.53G) exceeds available HBM (15.75G)."
    )
    other = "RESOURCE_EXHAUSTED: ... Used 16.80G of 15.75G hbm. Exceeded hbm capacity by 1.05G."
    assert aot._needed(older) == int(241.53 * 2**30)
    assert aot._needed(other) == int(16.8 * 2**30)
    assert aot._needed("RESOURCE_EXHAUSTED: something else") is None


def test_without_libtpu_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(aot, "__file__", str(tmp_path / "repository/tst_jax/aot.py"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in aot._ALONE:
        monkeypatch.setenv(name, os.environ.get(name, "x"))
    with pytest.raises(UserError, match="pip install --no-deps --target=.*tpu-compiler libtpu"):
        aot.prepare_compiler()
    (tmp_path / "tpu-compiler/libtpu").mkdir(parents=True)
    aot.prepare_compiler()
    assert sys.path[-1] == str(tmp_path / "tpu-compiler")
