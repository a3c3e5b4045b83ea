"""Runs that start from a Hugging Face folder: TST in the middle of a training.

The folder's parameters are the run's, to the bit; what does not fit is refused before anything is
written; a run that has begun no longer needs the folder.
"""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from tst_jax.config import ConfigError
from tst_jax.export import export
from tst_jax.generate import load_model
from tst_jax.metrics import read_metrics
from tst_jax.train import train
from tst_jax.train_step import init_state, key_data


@pytest.fixture(scope="module")
def first(store, make_config, tmp_path_factory):
    """(workdir of a finished run, its export)"""
    folder = tmp_path_factory.mktemp("first")
    train(make_config(store), folder / "run")
    export(folder / "run", folder / "exported")
    return folder / "run", folder / "exported"


@pytest.fixture
def second(config, first):
    """Settings of a run that starts from the export, and moves nothing: all of it is smaller than
    half a unit in the last place of any parameter."""
    config.init_from, config.seed, config.stop_after = str(first[1]), 5, 1
    config.schedule.peak_lr = 1e-30
    return config


def test_it_starts_from_those_parameters(first, second, tmp_path):
    train(second, tmp_path / "run")
    got, want = (load_model(folder)[0] for folder in (tmp_path / "run", first[0]))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_knows_what_they_know(first, second, tmp_path):
    second.tst.ratio, second.eval.every = 0.0, 1
    train(second, tmp_path / "run")
    last = [line for line in read_metrics(first[0]) if "eval_loss" in line][-1]
    (line,) = [line for line in read_metrics(tmp_path / "run") if "eval_loss" in line]
    assert line["eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)


def test_once_begun_it_needs_the_folder_no_more(first, second, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(first[1], copy)
    second.init_from = str(copy)
    train(second, tmp_path / "run")
    shutil.rmtree(copy)
    train(dataclasses.replace(second, stop_after=2), tmp_path / "run")
    steps = [line["step"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert steps == [1, 2]
    with pytest.raises(ConfigError, match="init_from"):
        train(dataclasses.replace(second, init_from=""), tmp_path / "run")


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(width=32), "set --config.model.width=16"),
        (dict(kv_heads=2), "set --config.model.kv_heads=1"),
        (dict(norm_eps=1e-6), "set --config.model.norm_eps=1e-05"),
    ],
)
def test_another_shape_is_refused_before_anything_is_written(second, tmp_path, change, words):
    second.model = dataclasses.replace(second.model, **change)
    with pytest.raises(ConfigError) as caught:
        train(second, tmp_path / "run")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_there_is_refused(second, tmp_path):
    second.init_from = str(tmp_path / "gone")
    with pytest.raises(ConfigError, match="gone does not exist"):
        train(second, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_optimizers_that_copy_the_parameters_copy_these(config):
    config.optimizer.name, config.optimizer.clip = "schedule_free_adamw", 0.0
    make = jax.jit(lambda key: init_state(config, key))
    other = make(key_data(1)).params
    state = jax.jit(lambda key, params: init_state(config, key, params))(key_data(0), other)
    for copies in (state.params, state.opt_state[0].z):
        for a, b in zip(jax.tree.leaves(copies), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
