"""The programs of a run: compiled before step 0, with the state donated, and kept for next time."""

import dataclasses
import re

import jax
import pytest

from tst_jax import config as config_lib
from tst_jax import programs
from tst_jax.run_log import Log
from tst_jax.train import train
from tst_jax.train_step import key_data, make_train_step


def test_both_phases_compile_before_step_0(make_config, store, tmp_path, monkeypatch):
    """A recovery step that cannot be compiled ends the run before it trains anything (rule 17)."""

    def broken(config, stage, mesh):
        if stage.bag_size == 1:
            return lambda state, tokens: (state, tokens @ tokens)
        return make_train_step(config, stage, mesh)

    monkeypatch.setattr(programs, "make_train_step", broken)
    with pytest.raises(TypeError):
        train(make_config(store), tmp_path / "run")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_state_is_donated(make_config, store):
    """The step writes into its input's buffers, and copies none: a run holds its state once."""
    config = make_config(store)
    said = []
    compiled = programs.compile_run(
        config, config_lib.stages(config), *programs.layout(config), 0, config.steps, said.append
    )
    (line,) = said
    for name in ("superposition s=3 ", "recovery s=1 ", "evaluate ", "init "):
        assert name in line and line.startswith("compiled in ")
    size = sum(x.nbytes for x in jax.tree.leaves(compiled.init(key_data(0))))
    for program in compiled.steps.values():
        assert program.memory_analysis().alias_size_in_bytes == size
        entry = program.as_text().split("\nENTRY ")[1]
        arguments = re.findall(r"(%\S+) = f32\S+ parameter\(", entry)
        assert len(arguments) > 20
        assert not [name for name in arguments if f" copy({name})" in entry]


@pytest.fixture
def compilations():
    """A list that grows with each compilation."""
    found = []
    listener = lambda name, seconds, **_: "compile" in name and found.append(name)
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield found
    jax.monitoring.unregister_event_duration_listener(listener)


def test_nothing_is_compiled_after_the_first_step(
    make_config, store, tmp_path, monkeypatch, compilations
):
    """Not at the switch, an evaluation, a save, the last batch, or when a run goes on (rule 17)."""
    config = make_config(store)
    config.tst = dataclasses.replace(config.tst, reset_optimizer=True)
    config.eval.every, config.checkpoint.every = 3, 4
    before, compile_run = [], programs.compile_run

    def counted(*args):
        compiled = compile_run(*args)
        before.append(len(compilations))
        return compiled

    monkeypatch.setattr(programs, "compile_run", counted)
    for stop_after in (5, -1):
        train(dataclasses.replace(config, stop_after=stop_after), tmp_path / "run")
        assert 3 < before[-1] == len(compilations)


def test_a_step_is_dispatched_before_the_last_one_is_waited_for(
    make_config, store, tmp_path, monkeypatch
):
    """The devices never wait for the host, but where a state is evaluated, saved or switched."""
    config = make_config(store)
    config.eval.every = config.checkpoint.every = 5
    dispatched, waited_for = 0, {}
    compile_run, read = programs.compile_run, Log._read

    def compiled(*args):
        found = compile_run(*args)

        def counting(step):
            def run(*args):
                nonlocal dispatched
                dispatched += 1
                return step(*args)

            return run

        steps = {index: counting(step) for index, step in found.steps.items()}
        return dataclasses.replace(found, steps=steps)

    def reading(log, step, *args):
        waited_for[step] = dispatched
        read(log, step, *args)

    monkeypatch.setattr(programs, "compile_run", compiled)
    monkeypatch.setattr(Log, "_read", reading)
    train(config, tmp_path / "run")
    ends = {5, 8, 10, 15, 20}  # 8: the switch
    assert waited_for == {n: n if n in ends else n + 1 for n in range(1, 21)}


def test_compiled_programs_are_kept_by_default(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "elsewhere")
    programs.use_cache()
    assert jax.config.jax_compilation_cache_dir == before
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    try:
        programs.use_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "tst_jax")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
