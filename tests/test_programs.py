"""The programs of a run: compiled before step 0, with the state donated, and kept for next time."""

import re

import jax
import pytest

from tst_jax import config as config_lib
from tst_jax import programs
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
