"""A config file of a small run and the environment of its processes, for tests that start them."""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
SWITCH = 8
CONFIG = """
from tst_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig
from tst_jax.models.shapes import ModelConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig
from tst_jax.sharding import MeshConfig


def get_config():
    return Config(
        steps={steps},
        log_every=1,
        model=ModelConfig(
            vocab_size=64, width=16, layers=2, heads=2, kv_heads=2, head_dim=8, ff=24
        ),
        tst=TSTConfig(bag_size=3, superposition_steps={switch}),
        data=DataConfig(store="{store}", rows=8, positions=8),
        schedule=ScheduleConfig(peak_lr=1e-2, warmup_fraction=0.1, decay_fraction=0.2),
        mesh=MeshConfig(data=-1, fsdp={fsdp}),
        eval=EvalConfig(every=5, tokens=256, rows=8),
        checkpoint=CheckpointConfig(every={save_every}, keep=100),
    )
"""


def write_config(path, store, steps, fsdp=1, save_every=4):
    """The file, and its path."""
    settings = dict(store=store, steps=steps, fsdp=fsdp, save_every=save_every)
    path.write_text(CONFIG.format(switch=SWITCH, **settings))
    return path


def environment(devices=None, **more):
    """Of a process that has so many CPU devices."""
    ours = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHON": sys.executable}
    if devices:
        ours["JAX_NUM_CPU_DEVICES"] = str(devices)
    return os.environ | ours | more
