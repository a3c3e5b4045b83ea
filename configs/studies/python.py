"""TST at 1.1M parameters, on fresh data and with time to recover after the switch.

The data are the Python sources of the packages in corpus.txt, beside the standard library's: 74M
tokens, so that no run of the study reads anything twice. README.md beside this file has the
commands and what came out.

    python -m tst_jax.compare --config=configs/studies/python.py --workdir=runs/study --seeds=3

A run is 8,000 steps of 512 positions, about 9 minutes on one core. configs/studies/python.py:NAME
is one of the ablations of tst_jax/ablations.py.
"""

from tst_jax.ablations import ablated
from tst_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig
from tst_jax.models.shapes import ModelConfig
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig


def get_config(arm: str = "tst") -> Config:
    tst = Config(
        steps=8_000,
        log_every=100,
        # 8,192 entries and 16 of padding: with rows of logits a power of two bytes apart, a CPU's
        # caches made a step 1.5 times as long.
        model=ModelConfig(
            vocab_size=8208, width=64, layers=2, heads=4, kv_heads=4, head_dim=16, ff=160
        ),
        tst=TSTConfig(bag_size=4, ratio=0.3),
        data=DataConfig(store="runs/study-store", rows=8, positions=64, verify="sizes"),
        optimizer=OptimizerConfig(name="adamw", b1=0.9, b2=0.95, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(peak_lr=3e-3, warmup_fraction=0.05, decay_fraction=0.1),
        eval=EvalConfig(every=1_000, tokens=2**17, rows=64),
        checkpoint=CheckpointConfig(every=2_000),
    )
    return ablated(tst, arm)
