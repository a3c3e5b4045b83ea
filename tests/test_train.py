"""The trainer: exact resume, the switch, what a run leaves behind, and what it refuses to start."""

import copy
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from tst_jax import config as config_lib
from tst_jax import flops, generate, metrics, sharding
from tst_jax.checkpoint import CheckpointError, Checkpoints, named_leaves
from tst_jax.config import ConfigError
from tst_jax.data.order import Order
from tst_jax.data.pipeline import Stream, batches, eval_batches
from tst_jax.data.store import StoreError, open_store
from tst_jax.data.store_writer import write_store
from tst_jax.errors import UserError
from tst_jax.guard import TrainingError
from tst_jax.train import train
from tst_jax.train_step import at_switch, init_state, key_data, make_train_step, state_shardings

SWITCH = 8  # of the shared config: round(0.4 * 20)
TIMES = ("step_seconds", "data_wait_seconds", "positions_per_second", "tokens_per_second")


def final_state(config, workdir):
    """{name: array} of the last checkpoint, and its record."""
    shapes, shardings = state_shardings(config, sharding.make_mesh(config.mesh))
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.steps()[-1]
        state = checkpoints.restore(step, shapes, shardings)
        return jax.device_get(named_leaves(state)), checkpoints.record(step)


def untimed(workdir):
    lines = metrics.read_metrics(workdir)
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), name


@pytest.fixture(scope="module")
def whole(request, tmp_path_factory):
    """One uninterrupted run: (config, workdir, final state, record)."""
    store = request.getfixturevalue("store")
    config = request.getfixturevalue("make_config")(store)
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train(config, workdir)
    return config, workdir, *final_state(config, workdir)


@pytest.mark.parametrize("stop", range(SWITCH - 2, SWITCH + 3))
def test_resume_gives_the_same_bits(whole, tmp_path, stop):
    """2N steps = N + resume + N, and a stop around the switch changes nothing (rules 14, 16)."""
    config, workdir, state, record = whole
    part = copy.deepcopy(config)
    part.stop_after = stop
    train(part, tmp_path / "run")
    assert final_state(config, tmp_path / "run")[1]["step"] == stop
    train(config, tmp_path / "run")
    resumed, resumed_record = final_state(config, tmp_path / "run")
    assert_same_bits(resumed, state)
    assert resumed_record == record
    assert untimed(tmp_path / "run") == untimed(workdir)


def test_restart_from_the_switch_checkpoint(whole, tmp_path):
    """The checkpoint of the switch is kept, and going on from it gives the same bits (rule 16)."""
    config, workdir, state, _ = whole
    shutil.copytree(workdir, tmp_path / "run")
    for step in (tmp_path / "run/checkpoints").iterdir():
        if step.name != str(SWITCH):
            shutil.rmtree(step)
    train(config, tmp_path / "run")
    assert_same_bits(final_state(config, tmp_path / "run")[0], state)
    assert untimed(tmp_path / "run") == untimed(workdir)


def test_last_line_cut_off_by_a_kill(whole, tmp_path):
    """A metrics line half written is dropped and written again; a bad line inside is an error."""
    config, workdir, _, _ = whole
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/20")
    path = tmp_path / "run/metrics.jsonl"
    path.write_text(path.read_text()[:-30])
    train(config, tmp_path / "run")
    assert untimed(tmp_path / "run") == untimed(workdir)
    whole_text = path.read_bytes()
    for damaged in (b"{", b"3", b"{}", b'{"step\xff": 1}', b""):
        path.write_bytes(damaged + b"\n" + whole_text)
        with pytest.raises(UserError, match="metrics.jsonl, line 1 is damaged: .*; take it out"):
            metrics.read_metrics(tmp_path / "run")
        path.write_bytes(whole_text + damaged)
        assert untimed(tmp_path / "run") == untimed(workdir)


def test_finished_run_is_left_alone(whole, capsys):
    config, workdir, _, _ = whole
    before = {p: p.stat().st_mtime_ns for p in workdir.rglob("*") if p.is_file()}
    train(config, workdir)
    assert "is at step 20 already" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in workdir.rglob("*") if p.is_file()}


def test_metrics(whole):
    """Every field, the counters by hand, and the excess loss (rules 11, 22, 23)."""
    config, workdir, _, record = whole
    lines = [line for line in metrics.read_metrics(workdir) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 21))
    one = flops.step_flops(config.model, 4, 8)
    for k, line in enumerate(lines, 1):
        superposed = k <= SWITCH
        assert line["phase"] == ("superposition" if superposed else "recovery")
        assert line["bag_size"] == (3 if superposed else 1)
        assert line["loss_minus_log_s"] == line["loss"] - (math.log(3) if superposed else 0)
        assert line["positions"] == 32 * k and line["flops"] == one * k
        assert line["tokens"] == 32 * (3 * min(k, SWITCH) + max(k - SWITCH, 0))
        assert line["positions_per_second"] == pytest.approx(32 / line["step_seconds"])
        assert line["tokens_per_second"] == pytest.approx(
            line["bag_size"] * line["positions_per_second"]
        )
        assert line["grad_norm"] > 0
    rates = [float(config_lib.schedule.learning_rate(config.schedule, 20, k)) for k in range(20)]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-6)
    assert record["counters"] == {name: lines[-1][name] for name in record["counters"]}
    evals = [line for line in metrics.read_metrics(workdir) if "eval_loss" in line]
    assert [line["step"] for line in evals] == [5, SWITCH, 10, 15, 20]
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"] < math.log(61)
    assert (workdir / "config.json").exists()


def test_tensorboard_events_are_the_lines(whole):
    """Every plain number of metrics.jsonl, under its name and step, in float32."""
    _, workdir, _, _ = whole
    (path,) = (workdir / "tensorboard").iterdir()
    data, found = path.read_bytes(), []
    while data:  # length, its checksum, an event, its checksum
        length = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    lines = metrics.read_metrics(workdir)
    expected = [
        (line["step"], name, float(np.float32(value)))
        for line in lines
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float)
    ]
    assert len(found) > 20 * 10 and found == expected


def test_eval_loss_is_ordinary_cross_entropy(whole):
    """The logged held-out loss, from logits written out, and its bits a byte (rule 11)."""
    config, workdir, _, _ = whole
    model, _ = generate.load_model(workdir)
    store = open_store(config.data.store)
    found = eval_batches(Stream(store.tokens("heldout")), 4, 8, 256)
    rows = np.concatenate([ids for (ids,) in found])
    logits = model.logits(model.body(model.embed(rows[:, :-1, None])))
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1).mean()
    line = metrics.read_metrics(workdir)[-1]
    assert line["eval_loss"] == pytest.approx(float(nats), rel=1e-5)
    bits = line["eval_loss"] / math.log(2) / store.bytes_per_token("heldout")
    assert line["eval_bits_per_byte"] == pytest.approx(bits)


def test_golden_first_step(make_config, store):
    """The first loss and gradient of each phase for this seed; a change of initialisation, data
    order, loss or model shows here."""
    found = []
    for ratio in (0.4, 0.0):
        config = make_config(store)
        config.tst.ratio = ratio
        stages = config_lib.stages(config)
        stream = Stream(open_store(store).tokens("train"))
        (rows,) = next(batches([stream], Order(stages, [stream.length]), 0, 0))
        state = jax.jit(lambda key: init_state(config, key))(key_data(0))
        _, values = jax.jit(make_train_step(config, stages[0]))(state, rows)
        found += [float(values["loss"]), float(values["grad_norm"])]
    assert found == pytest.approx(GOLDEN, rel=2e-5)


GOLDEN = [4.1013865, 1.0545442, 4.1150436, 1.6741060]


def lowered(config, stage):
    shapes = jax.eval_shape(lambda key: init_state(config, key), key_data(0))
    rows = jax.ShapeDtypeStruct((stage.rows, stage.row_tokens), np.int32)
    return jax.jit(make_train_step(config, stage)).lower(shapes, rows).as_text()


def test_recovery_is_the_baseline_program(make_config, store):
    """Whatever TST's settings, recovery lowers to the baseline's very text (rule 16)."""
    baseline = make_config(store)
    baseline.tst.ratio = 0.0
    (stage,) = config_lib.stages(baseline)
    expected = lowered(baseline, stage)
    for settings in ({}, {"objective": "hinge", "mode": "output"}, {"weights": "power"}):
        tst = make_config(store)
        for name, value in settings.items():
            setattr(tst.tst, name, value)
        superposition, recovery = config_lib.stages(tst)
        assert lowered(tst, recovery) == expected
        assert lowered(tst, superposition) != expected


def test_switch_changes_nothing_unless_asked(make_config, store):
    """Parameters, optimizer state, step and rng cross as they are; the options change what they
    name, and only that (rule 15)."""
    config = make_config(store)
    stage = config_lib.stages(config)[0]
    rows = np.arange(4 * stage.row_tokens, dtype=np.int32).reshape(4, -1) % 61
    state = jax.jit(lambda key: init_state(config, key))(key_data(0))
    state, _ = jax.jit(make_train_step(config, stage))(state, rows)
    before = jax.device_get(named_leaves(state))
    assert_same_bits(jax.device_get(named_leaves(at_switch(config, state))), before)

    config.tst.reset_optimizer = True
    after = jax.device_get(named_leaves(at_switch(config, state)))
    moments = [name for name in after if name.startswith("opt_state")]
    assert len(moments) > 20
    assert all(not after[name].any() for name in moments)
    assert_same_bits(*[{n: x[n] for n in x if n not in moments} for x in (after, before)])

    config.tst.reset_optimizer, config.tst.reinit_embedding_and_head = False, True
    after = jax.device_get(named_leaves(at_switch(config, state)))
    tables = {"params.embedding", "params.output"}
    assert all(not np.array_equal(after[name], before[name]) for name in tables)
    assert_same_bits(*[{n: x[n] for n in x if n not in tables} for x in (after, before)])


def test_learning_rate_goes_on_when_the_optimizer_is_reset(make_config, store, tmp_path):
    """One schedule over both phases: it counts steps, not the optimizer's updates (rule 15)."""
    config = make_config(store)
    config.tst.reset_optimizer = config.tst.reinit_embedding_and_head = True
    train(config, tmp_path / "run")
    lines = [line for line in metrics.read_metrics(tmp_path / "run") if "loss" in line]
    rates = [float(config_lib.schedule.learning_rate(config.schedule, 20, k)) for k in range(20)]
    assert [line["lr"] for line in lines] == pytest.approx(rates, rel=1e-6)
    # A fresh embedding and head predict nothing: the loss is back near log V (Table 2).
    assert lines[SWITCH]["loss"] == pytest.approx(math.log(61), abs=0.15)
    assert lines[SWITCH - 1]["loss"] < math.log(61) - 0.2


@pytest.mark.parametrize("ratio, phases", [(0.0, {"recovery"}), (1.0, {"superposition"})])
def test_ratio_zero_and_one(make_config, store, tmp_path, ratio, phases):
    """The baseline, and a run that never recovers; sampling from that one warns (rules 14, 19)."""
    config = make_config(store)
    config.tst.ratio = ratio
    train(config, tmp_path / "run")
    assert {line["phase"] for line in metrics.read_metrics(tmp_path / "run")} == phases
    model, record = generate.load_model(tmp_path / "run")
    assert (generate.warning(record) is None) == (ratio == 0)
    assert len(generate.sample(model, [0, 5, 6], 7, temperature=0)) == 7


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "input", "weights": "power"},
        {"mode": "output", "objective": "mass"},
        {"expand": "batch", "bag_size": 2},
        {"stages": "4:0.2,2:0.3", "objective": "hinge"},
    ],
    ids=lambda settings: ",".join(map(str, settings.values())),
)
def test_variants_train(make_config, store, tmp_path, settings):
    """Each mode, objective and way to spend the tokens goes through both phases and learns."""
    config = make_config(store)
    for name, value in settings.items():
        setattr(config.tst, name, value)
    train(config, tmp_path / "run")
    lines = metrics.read_metrics(tmp_path / "run")
    evals = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert evals[-1] < math.log(61) - 0.3
    assert lines[-1]["positions"] == 20 * 32


def test_nonfinite_loss_is_never_saved(make_config, store, tmp_path):
    config = make_config(store)
    config.schedule.peak_lr, config.optimizer.clip = 1e30, 0.0
    config.checkpoint.every = 1
    with pytest.raises(TrainingError, match="(loss|norm) (nan|inf)") as error:
        train(config, tmp_path / "run")
    bad = int(str(error.value).split(" at step ")[1].split(";")[0])
    with Checkpoints(tmp_path / "run/checkpoints", read_only=True) as checkpoints:
        assert max(checkpoints.steps()) < bad
    assert all(math.isfinite(line["loss"]) for line in metrics.read_metrics(tmp_path / "run"))


def untouched(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def test_refusals_write_nothing(whole, make_config, store, tmp_path):
    """Each refused in a line that names the cause, before anything is compiled or written."""
    config, workdir, _, _ = whole
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    cases = [
        (foreign, {}, ConfigError, "not empty"),
        (foreign / "thesis.txt", {}, ConfigError, "is a file"),
        (workdir, {"seed": 1}, ConfigError, "seed: 0 -> 1"),
        (workdir, {"steps": 30}, ConfigError, "steps: 20 -> 30"),
        (tmp_path / "new", {"data.positions": 100_000}, ValueError, "train split of store has"),
        (tmp_path / "new", {"model.vocab_size": 60}, ConfigError, "model.vocab_size=61"),
        (tmp_path / "new", {"data.store": str(tmp_path / "no")}, StoreError, "tst_jax.prepare"),
        (tmp_path / "new", {"mesh.data": 3}, ConfigError, "do not fill a mesh"),
        (tmp_path / "new", {"stop_after": 21}, ConfigError, "stop_after"),
        (tmp_path / "new", {"model.dtype": "float16"}, ConfigError, "model.dtype"),
        (tmp_path / "new", {"eval.rows": 100_000}, ValueError, "heldout split of store has"),
    ]
    for folder, settings, kind, words in cases:
        before = untouched(tmp_path), untouched(workdir)
        wrong = make_config(store)
        for name, value in settings.items():
            *parents, last = name.split(".")
            holder = wrong
            for parent in parents:
                holder = getattr(holder, parent)
            setattr(holder, last, value)
        with pytest.raises(kind, match=words):
            train(wrong, folder)
        assert (untouched(tmp_path), untouched(workdir)) == before, settings
    assert json.loads((workdir / "config.json").read_text())["seed"] == 0


def test_other_shape_is_refused_on_resume(whole, tmp_path):
    """A checkpoint is restored into arrays of its own shapes only, and says which differ."""
    config, workdir, _, _ = whole
    shutil.copytree(workdir, tmp_path / "run")
    saved = json.loads((workdir / "config.json").read_text())
    saved["model"]["ff"] = 32
    (tmp_path / "run/config.json").write_text(json.dumps(saved))
    shutil.rmtree(tmp_path / "run/checkpoints/20")
    wider = copy.deepcopy(config)
    wider.model.ff = 32
    with pytest.raises(CheckpointError, match=r"params.layers.gate: float32\[2, 16, 24\]"):
        train(wider, tmp_path / "run")


def test_other_store_is_refused_on_resume(whole, tmp_path):
    """The same settings on other tokens are another run."""
    config, workdir, _, _ = whole
    shutil.copytree(workdir, tmp_path / "run")
    store = open_store(config.data.store)
    documents = lambda split: [(store.tokens(split)[:-1][:5000] % 60 + 1, 5000)]
    write_store(
        tmp_path / "other",
        vocabulary=store.vocabulary(),
        train=documents("train"),
        heldout=documents("heldout"),
        separator_id=0,
        provenance={},
    )
    moved = copy.deepcopy(config)
    moved.data.store = str(tmp_path / "other")
    with pytest.raises(StoreError, match="another store"):
        train(moved, tmp_path / "run")
    shutil.copytree(config.data.store, tmp_path / "copy")  # a copy of the store is the same store
    moved.data.store = str(tmp_path / "copy")
    train(moved, tmp_path / "run")


def test_harmless_settings_may_change_on_resume(whole, tmp_path):
    config, workdir, state, _ = whole
    shutil.copytree(workdir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/20")
    again = copy.deepcopy(config)
    again.log_every, again.checkpoint.every, again.eval.every = 5, 4, 0
    train(again, tmp_path / "run")
    assert_same_bits(final_state(config, tmp_path / "run")[0], state)


def test_switch_holds_one_state(make_config, store, tmp_path, monkeypatch):
    """When the switch restores its checkpoint the old state is gone: no second copy on the devices
    at the one moment where nobody watches memory (rule 17)."""
    config = make_config(store)
    config.model.ff = 25  # arrays that no other test holds alive
    alive = []
    restore = Checkpoints.restore

    def watched(self, *args, **kwargs):
        gate = (config.model.layers, config.model.width, config.model.ff)
        alive.append(sum(x.shape == gate for x in jax.live_arrays()))
        return restore(self, *args, **kwargs)

    monkeypatch.setattr(Checkpoints, "restore", watched)
    train(config, tmp_path / "run")
    assert alive == [0]


def test_the_first_step_has_a_line_however_fast_it_comes(config, tmp_path, capsys):
    """It says that training goes on, and how fast; the next lines come every ten seconds."""
    train(config, tmp_path / "run")
    shown = [line for line in capsys.readouterr().out.splitlines() if "/20, " in line]
    assert "step 1/20, superposition s=3, loss " in shown[0]
    assert "step 20/20, recovery s=1, loss " in shown[-1] and len(shown) == 2
