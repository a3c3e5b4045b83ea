"""Evaluation: held-out loss as training logs it, log-probabilities as plain logits give them."""

import contextlib
import dataclasses
import functools
import importlib.util
import io
import json
import math
import os
import runpy
import shutil
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import report_of
from test_export import SHAPES, arrays_of

from tst_jax import evaluate as evaluate_lib
from tst_jax import generate, metrics, sharding
from tst_jax.data.store import open_store
from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import ids_only
from tst_jax.errors import UserError
from tst_jax.evaluate import evaluate
from tst_jax.models.shapes import ModelConfig
from tst_jax.models.transformer import Transformer
from tst_jax.scoring import Scorer, rounded
from tst_jax.sharding import MeshConfig
from tst_jax.train import train

LONGEST = 48  # positions of the models here
MODELS = {
    "llama": SHAPES["llama"],
    "gpt2": dataclasses.replace(SHAPES["gpt2"], max_positions=LONGEST),
    "linear": dataclasses.replace(SHAPES["llama"], attention="linear"),
}


@functools.cache
def model_of(cfg):
    """Of random numbers, so confident that log-probabilities are of -0.1 to -10."""
    shapes = jax.eval_shape(lambda key: Transformer(cfg, key), jax.random.key(0))
    arrays = [x * (0.3 if x.ndim > 2 else 1) for x in arrays_of(cfg).values()]
    return jax.tree.unflatten(jax.tree.structure(shapes), map(jnp.asarray, arrays))


def mesh_of(**sizes):
    count = math.prod(sizes.values())
    return sharding.make_mesh(MeshConfig(**sizes), jax.devices()[:count])


def ragged(count, seed=0, vocab=61):
    """Pairs of contexts of 1 to 90 ids and continuations of 1 to 30."""
    rng = np.random.default_rng(seed)
    ids = lambda n: rng.integers(1, vocab, n).tolist()
    return [(ids(rng.integers(1, 90)), ids(rng.integers(1, 30))) for _ in range(count)]


@jax.jit
def _logits(model, ids_1xL):
    return model.logits(model.body(model.embed(ids_1xL[..., None])))


def plain(model, context, continuation):
    """(log-probability, greedy, logits [C, V]) from whole logits of one text, in float64."""
    ids = [*context, *continuation][-(LONGEST + 1) :]
    inputs = np.full((1, LONGEST), 7, np.int32)  # what stands behind a text does not matter
    inputs[0, : len(ids) - 1] = ids[:-1]
    z = np.asarray(_logits(model, inputs)[0, : len(ids) - 1], np.float64)[-len(continuation) :]
    logprobs = z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= z.max(-1, keepdims=True)
    picked = logprobs[np.arange(len(continuation)), continuation]
    return picked.sum(), bool((z.argmax(-1) == continuation).all()), z


# ---- the core


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_whole_logits(name):
    """Ragged requests, too long ones among them, one token, and options after one question."""
    model = model_of(MODELS[name])
    pairs = ragged(24)
    context = pairs[0][0][:20]
    likely = []
    for _ in range(3):
        likely.append(int(plain(model, [*context, *likely], [1])[2][-1].argmax()))
    other = likely[:-1] + [likely[-1] % 60 + 1]
    pairs += [(context, likely), (context, other), (context, likely[:1]), ([0], [5])]
    pairs += [(context, [token]) for token in range(1, 7)]
    # One shape for most models, to save their compiling, and several for one of them.
    scorer = Scorer(model, mesh_of(data=1), LONGEST, 512 if name == "llama" else 1 << 14)
    seen = []
    found = scorer.score(pairs, lambda done, total: seen.append((done, total)))
    assert (scorer._asked._cache_size() > 1) == (len(seen) > 1) == (name == "llama")
    assert seen == sorted(seen) and seen[-1] == (len(pairs), len(pairs))
    for number, ((logprob, greedy), pair) in enumerate(zip(found, pairs)):
        wanted, wanted_greedy, _ = plain(model, *pair)
        assert abs(logprob - wanted) < 1e-5 * max(10, -wanted), number
        assert greedy == wanted_greedy, number
    assert [greedy for _, greedy in found[24:27]] == [True, False, True]
    assert np.std([logprob for logprob, _ in found]) > 1


def test_batches_hold_each_row_once_and_no_more_than_they_should():
    scorer = Scorer(None, mesh_of(data=1), 1024, batch_positions=2048)
    rng = np.random.default_rng(3)
    pairs = [([1] * int(n), [2, 3]) for n in rng.integers(1, 1000, 300)]
    rows = scorer._rows(pairs)
    batches = list(scorer._batches(rows))
    numbers = [number for _, rows in batches for row in rows for number, _ in row.answers]
    assert sorted(numbers) == list(range(300)) and len(rows) < 300  # equal requests are asked once
    lengths = [length for (_, length, *_), _ in batches]
    assert lengths == sorted(lengths, reverse=True)
    for (size, length, asked, _), members in batches:
        assert len(members) <= size and size * length <= 2048 and asked == 16
        assert all(len(row.inputs) <= length for row in members)
    pads = sum(size * length for (size, length, *_), _ in batches)
    assert pads < 1.5 * sum(len(row.inputs) for row in rows)
    assert len({shape for shape, _ in batches}) <= 12
    assert [rounded(n) for n in (1, 33, 49, 64, 65, 97)] == [32, 48, 64, 64, 96, 128]
    assert rounded(65, 70) == 70


def test_options_of_one_token_are_one_row():
    scorer = Scorer(None, mesh_of(data=1), 64)
    pairs = [([1, 2, 3], [token]) for token in (4, 5, 6, 7)] + [([1, 2], [3, 4])]
    (((size, _, _, answers), rows),) = scorer._batches(scorer._rows(pairs))
    numbers = [[number for number, _ in row.answers] for row in rows]
    assert sorted(numbers) == [[0, 1, 2, 3], [4]] and (size, answers) == (2, 4)


def test_requests_that_cannot_be_asked_about():
    scorer = Scorer(None, mesh_of(data=1), 8)
    for pair, text in (
        (([1], []), "request 1 has a continuation of no tokens"),
        (([], [1]), "request 1 has a context of no tokens"),
        (([1], [2] * 9), "continuation of 9 tokens and the model reads 8"),
    ):
        with pytest.raises(UserError, match=text) as error:
            scorer.score([([1], [2]), pair])
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["llama", "linear"])
def test_texts_are_the_likeliest_tokens(name):
    """A prompt that goes in by parts, and up to where `stop` is content."""
    model = model_of(MODELS[name])
    scorer = Scorer(model, mesh_of(data=1), LONGEST)
    said = set()
    for prompt in ([2, 3, 4], [9, 8, 7], [30, 31, 5]):  # parts of 2 and 1
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(plain(model, ids, [1])[2][-1].argmax()))
        assert scorer.generate(prompt, 8) == ids[3:]
        said |= set(ids[3:])
    assert len(said) > 3
    assert scorer.generate(prompt, 8, lambda new: len(new) == 5) == ids[3:8]


def test_draws_are_among_what_is_allowed():
    """All of it, and nothing else."""
    model = model_of(MODELS["llama"])
    scorer = Scorer(model, mesh_of(data=1), LONGEST)
    z = plain(model, [3], [1])[2][-1] / 8.0  # so warm that the first ones are nearly equal
    order = np.argsort(-z)
    p = np.exp(z[order]) / np.exp(z).sum()
    three = float(p[:2].sum() + p[2] / 2)  # the third reaches it
    draw = lambda seed, **how: scorer.generate([3], 1, temperature=8.0, seed=seed, **how)[0]
    assert {draw(seed, top_p=three) for seed in range(40)} == set(order[:3].tolist())
    assert {draw(seed, top_k=2) for seed in range(40)} == set(order[:2].tolist())


def main():
    """With eight devices: scores and texts on some meshes, and the command."""
    model = model_of(dataclasses.replace(MODELS["llama"], vocab_size=64, kv_heads=2))
    one, data, all_axes = dict(data=1), dict(data=8), dict(data=2, fsdp=2, tensor=2)
    found = {"scores": [], "texts": []}
    for sizes in (one, data, all_axes):
        mesh = mesh_of(**sizes)
        placed = jax.device_put(model, sharding.param_shardings(model, mesh))
        scorer = Scorer(placed, mesh, LONGEST)
        found["scores"].append(scorer.score(ragged(16)))
        if sizes != data:
            found["texts"].append([scorer.generate([token], 6) for token in range(5)])
    sys.argv = ["evaluate", *json.loads(os.environ["EVALUATE"])]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_module("tst_jax.evaluate", run_name="__main__")
    print(json.dumps(found | {"printed": printed.getvalue().splitlines()}))


@pytest.fixture(scope="module")
def report(run, store, tmp_path_factory):
    """What `main` prints, and what its command writes."""
    file = tmp_path_factory.mktemp("report") / "found.json"
    arguments = [f"--workdir={run}", f"--heldout={store}", "--heldout_tokens=256"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVALUATE", json.dumps([*arguments, f"--json={file}"]))
        return report_of(__file__), json.loads(file.read_text())


def test_meshes(report):
    """One device and eight give the same."""
    one, *others = report[0]["scores"]
    for scores in others:
        for (logprob, greedy), (wanted, wanted_greedy) in zip(scores, one, strict=True):
            assert abs(logprob - wanted) < 2e-5 * max(10, -wanted)
            assert greedy == wanted_greedy
    texts, on_a_mesh = report[0]["texts"]
    assert texts == on_a_mesh and len(set(map(tuple, texts))) > 2


def test_command(report, run, store):
    """The table, and the same figures in a file; of four rows a batch, which do not divide over
    eight devices."""
    printed, found = report[0]["printed"], report[1]
    figures, line = found["heldout"][str(store)], logged(run)
    assert abs(figures["loss"] - line["eval_loss"]) < 1e-5 and figures["tokens"] == 256
    assert printed[0].split() == ["score", "standard", "error"]
    assert f"{figures['loss']:.4f}" in printed[1] and "bits" in printed[2] and len(printed) == 3


# ---- held-out loss


def small_store(path, bytes_a_token, entries=61):
    rng = np.random.default_rng(5)
    documents = [(rng.integers(1, entries, 50).tolist(), 50 * bytes_a_token) for _ in range(8)]
    return write_store(
        path,
        vocabulary=ids_only(entries),
        train=documents[:2],
        heldout=documents,
        separator_id=0,
        provenance={},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, make_config, store):
    workdir = tmp_path_factory.mktemp("run") / "tst"
    train(make_config(store), workdir)
    return workdir


def logged(workdir):
    lines = [line for line in metrics.read_metrics(workdir) if "eval_loss" in line]
    return lines[-1]


def test_heldout_loss_is_what_training_logged(run, store):
    """With as many tokens as training's evaluation; with all of them it is another number."""
    found = evaluate(run, heldout=[store], heldout_tokens=256)
    figures, line = found["heldout"][str(store)], logged(run)
    assert found["step"] == line["step"] == 20
    assert abs(figures["loss"] - line["eval_loss"]) < 1e-5
    assert abs(figures["bits_per_byte"] - line["eval_bits_per_byte"]) < 1e-5
    assert figures["tokens"] == 256
    everything = evaluate(run, heldout=[store])["heldout"][str(store)]
    assert everything["tokens"] > 1000 and abs(everything["loss"] - figures["loss"]) > 1e-4


def test_packed_documents_too(store):
    """Each document by itself; rows of pads, which make a batch divide over devices, count not."""
    model, mesh, opened = model_of(MODELS["llama"]), mesh_of(data=1), open_store(store)
    run = dict(eval={"rows": 3}, loss_chunk=64, data={"packing": "document", "positions": 24})
    program = evaluate_lib._heldout_program(run, model.cfg, mesh)
    figures = evaluate_lib._heldout_loss(program, model, run, mesh, opened, 200)
    nats = tokens = 0
    batches = evaluate_lib._heldout_rows(run, opened, 200)
    for ids, segments in batches:
        for row, of in zip(ids, segments):
            for number in set(of.tolist()) - {0}:
                text = row[of == number].tolist()
                if len(text) > 1:
                    nats -= plain(model, text[:1], text[1:])[0]
                    tokens += len(text) - 1
    assert figures["tokens"] == tokens < len(batches) * 3 * 24
    assert abs(figures["loss"] - nats / tokens) < 1e-5
    for batch in (batches[0], batches[0][:1]):
        more = evaluate_lib._filled_up(batch, 2)
        assert [x.shape for x in more] == [(5, 25)] * 2
        assert more[1][:3].any(1).all() and not more[1][3:].any()


def test_bits_count_the_bytes_of_the_store(tmp_path, run, store):
    """Another store of the same vocabulary: its own text, and its own bytes a token."""
    source = open_store(store)
    documents = [([5, 6, 7, 8] * 20, 240)] * 4
    write_store(
        tmp_path / "other",
        vocabulary=source.vocabulary(),
        train=documents,
        heldout=documents,
        separator_id=0,
        provenance={},
    )
    figures = evaluate(run, heldout=[tmp_path / "other"])["heldout"][str(tmp_path / "other")]
    wanted = figures["loss"] / math.log(2) / (240 / 81)  # a separator is a token of no bytes
    assert abs(figures["bits_per_byte"] - wanted) < 1e-9
    model = generate.load_model(run)[0]
    tokens = np.asarray(open_store(tmp_path / "other").tokens("heldout"), np.int32)
    # 10 batches of 4 rows of 8 positions, evenly spread over 324 tokens.
    rows = [tokens[at : at + 9].tolist() for at in range(0, 40 * 8, 8)]
    nats = -sum(plain(model, row[:1], row[1:])[0] for row in rows)
    assert figures["tokens"] == 320 and abs(figures["loss"] - nats / 320) < 1e-5


def test_other_vocabularies_and_short_stores_are_refused(tmp_path, run, store):
    other = small_store(tmp_path / "other", 3)
    with pytest.raises(UserError, match="--heldout: .*other was made with none") as error:
        evaluate(run, heldout=[store, other.path])
    assert "\n" not in str(error.value) and "vocabulary sha256" in str(error.value)
    write_store(
        tmp_path / "short",
        vocabulary=open_store(store).vocabulary(),
        train=[([1, 2, 3], 9)],
        heldout=[([4, 5], 6)],
        separator_id=0,
        provenance={},
    )
    with pytest.raises(UserError, match="heldout split of short has 3 tokens"):
        evaluate(run, heldout=[tmp_path / "short"])


def test_superposition_checkpoint_warns(tmp_path, run, capsys):
    """Rule 19."""
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/20")
    assert evaluate(tmp_path / "run")["step"] == 8
    assert "step 8 lies in the superposition phase" in capsys.readouterr().err
    assert evaluate(run)["step"] == 20
    assert "superposition" not in capsys.readouterr().err


def test_layout_falls_back_to_what_goes_here(make_config, store):
    """A run of 64 devices can be looked at on one."""
    model = dataclasses.asdict(MODELS["llama"])
    shapes = jax.eval_shape(lambda key: Transformer(ModelConfig(**model), key), jax.random.key(0))
    mesh, _ = evaluate_lib._layout({"mesh": dataclasses.asdict(MeshConfig(fsdp=64))}, shapes)
    assert mesh.size == 1


def test_missing_harness_is_one_line(run, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a)
    )
    with pytest.raises(UserError, match="lm_eval is missing.*pip install 'lm-eval>=") as error:
        evaluate(run, tasks=["hellaswag"])
    assert "\n" not in str(error.value)


def test_progress_in_a_log(capsys):
    with evaluate_lib.Progress("hellaswag", "requests") as progress:
        for done in (10, 20, 40):
            time.sleep(0.01)
            progress.update(done, 40)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hellaswag: 40 of 40 requests, ") and line.endswith(
        "a second, 0:00 left"
    )


def test_table_of_tasks():
    figures = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": 0.125, "samples": 4}
    figures |= {"exact_match,strict": 0.25, "exact_match_stderr,strict": "N/A"}
    rows = evaluate_lib.table({"tasks": {"tiny": figures}}).splitlines()
    assert [row.split() for row in rows[1:]] == [
        ["tiny", "acc", "0.5000", "0.1250"],
        ["tiny", "exact_match", "(strict)", "0.2500"],
    ]
    assert len({len(row) for row in rows[:2]}) == 1


if __name__ == "__main__":
    main()
