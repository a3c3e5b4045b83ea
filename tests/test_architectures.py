"""TST does not care what lies between embedding and head.

Other architectures train through both phases and sample; one with experts resumes to the same bits
(rule 16). Experts' metrics; padded vocabularies.
"""

import copy
import dataclasses
import math

import jax
import numpy as np
import pytest

from tst_jax.checkpoint import Checkpoints
from tst_jax.config import ConfigError
from tst_jax.errors import UserError
from tst_jax.generate import load_model, sample
from tst_jax.metrics import read_metrics
from tst_jax.train import train

SHAPES = {
    "gpt2": dict(
        kv_heads=2, norm="layer", positions="learned", max_positions=16, mlp="gelu", biases=True,
        tied=True,
    ),
    "moe": dict(qk_norm=True, experts=4, experts_per_token=2, remat="full"),
    "linear": dict(attention="linear", vocab_size=64),  # 61 entries, padded
}  # fmt: skip


def of_shape(config, name):
    config = copy.deepcopy(config)
    config.model = dataclasses.replace(config.model, **SHAPES[name])
    return config


@pytest.fixture(scope="module", params=SHAPES)
def run(request, store, make_config, tmp_path_factory):
    """(name, config, workdir of a finished run)"""
    name = request.param
    config = of_shape(make_config(store), name)
    workdir = tmp_path_factory.mktemp(name) / "run"
    train(config, workdir)
    return name, config, workdir


def last_arrays(workdir, config):
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps()[-1] == config.steps
    return jax.tree.map(np.asarray, load_model(workdir)[0])


def training_lines(workdir):
    return [line for line in read_metrics(workdir) if "loss" in line]


def test_it_learns_in_both_phases(run):
    _, config, workdir = run
    lines = training_lines(workdir)
    assert [line["phase"] for line in lines] == ["superposition"] * 8 + ["recovery"] * 12
    first, before_switch, last = lines[0]["loss"], lines[7]["loss"], lines[-1]["loss"]
    assert abs(first - math.log(config.model.vocab_size)) < 0.3
    assert before_switch < first - 0.05 and last < first - 0.3


@pytest.mark.parametrize("run", ["moe"], indirect=True)
def test_a_run_with_experts_resumes_to_the_same_bits(run, tmp_path):
    _, config, workdir = run
    train(dataclasses.replace(config, stop_after=12), tmp_path / "run")
    train(config, tmp_path / "run")
    got, want = (last_arrays(folder, config) for folder in (tmp_path / "run", workdir))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    keys = ("loss", "router_loss", "expert_load")
    pick = lambda folder: [[line[key] for key in keys] for line in training_lines(folder)]
    assert pick(tmp_path / "run") == pick(workdir)


def test_it_samples_what_its_forward_pass_says(run):
    model, record = load_model(run[2])
    assert record["phase"] == "recovery"
    ids, prompt = [3, 14, 15], 3
    for _ in range(5):
        hidden = model.body(model.embed(np.asarray(ids)[None, :, None]))
        ids.append(int(model.logits(hidden)[0, -1].argmax()))
    assert sample(model, ids[:prompt], 5, temperature=0) == ids[prompt:]
    if model.cfg.positions == "learned":  # a look-up behind the table's end would be silent
        with pytest.raises(UserError, match="3 tokens of prompt and 14 new ones do not fit"):
            sample(model, ids[:prompt], 14)


def test_lines_tell_how_the_experts_were_loaded(run):
    name, config, workdir = run
    for line in training_lines(workdir):
        keys = {"expert_load", "expert_load_min", "expert_load_max", "router_loss"}
        if name != "moe":
            assert not keys & line.keys()
            continue
        load = np.asarray(line["expert_load"])
        assert load.shape == (2, 4)
        np.testing.assert_allclose(load.sum(-1), 1, atol=5e-3)  # three digits are written
        assert line["expert_load_min"] <= 1 <= line["expert_load_max"] <= 4 / 2
        assert line["router_loss"] > 0.99  # 1 is balanced
        np.testing.assert_allclose(line["expert_load_max"], load.max() * 4, rtol=5e-3)


def test_the_router_s_loss_is_trained_on_and_not_reported_as_loss(config, tmp_path):
    """A large coefficient changes the second step's loss, not the first's."""
    lines = []
    for coefficient in (0.0, 10.0):
        changed = of_shape(config, "moe")
        changed.stop_after, changed.model.router_loss = 2, coefficient
        train(changed, tmp_path / str(coefficient))
        lines.append(training_lines(tmp_path / str(coefficient)))
    (first, second), (first_too, second_too) = lines
    assert first["loss"] == first_too["loss"] and first["router_loss"] == first_too["router_loss"]
    assert second["loss"] != second_too["loss"]
    assert second_too["router_loss"] < second["router_loss"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"vocab_size": 61 + 1024}, "up to 1023 more as padding"),
        ({"vocab_size": 60}, "set --config.model.vocab_size=61"),
        ({"attention_backend": "splash"}, "model.attention_backend=splash runs on TPUs"),
        ({"attention_backend": "cudnn"}, "model.attention_backend=cudnn runs on GPUs"),
        ({"positions": "learned", "max_positions": 4}, "data.positions is 8"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(config, tmp_path, changes, words):
    config.model = dataclasses.replace(config.model, **changes)
    with pytest.raises(ConfigError) as caught:
        train(config, tmp_path / "run")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
