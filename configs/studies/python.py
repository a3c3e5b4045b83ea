"""TST at 1.1M parameters, on fresh data and with time to recover after the switch.

The data are the Python sources of the packages in corpus.txt, beside the standard library's: 74M
tokens, so that no run of the grid below reads anything twice.

    python -m pip install --no-deps --target=runs/packages -r configs/studies/corpus.txt
    python -m tst_jax.prepare --source=packages --data_dir=runs/packages --out=runs/study-store
    python -m tst_jax.sweep --config=configs/studies/python.py --workdir=runs/study \\
        --grid='tst.bag_size=2,4,8,16;tst.ratio=0,0.1,0.3,0.5;seed=0,1,2'

A run is 16,000 steps of 512 positions. configs/studies/python.py:NAME is one of the ablations of
tst_jax/ablations.py.
"""

from tst_jax.ablations import ablated
from tst_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig
from tst_jax.models.shapes import ModelConfig
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig


def get_config(arm: str = "tst") -> Config:
    tst = Config(
        steps=16_000,
        log_every=100,
        model=ModelConfig(
            vocab_size=8192, width=64, layers=2, heads=4, kv_heads=4, head_dim=16, ff=160
        ),
        tst=TSTConfig(bag_size=4, ratio=0.3),
        data=DataConfig(store="runs/study-store", rows=8, positions=64, verify="sizes"),
        optimizer=OptimizerConfig(name="adamw", b1=0.9, b2=0.95, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(peak_lr=3e-3, warmup_fraction=0.05, decay_fraction=0.1),
        eval=EvalConfig(every=1_000, tokens=2**18, rows=64),
        checkpoint=CheckpointConfig(every=2_000),
    )
    return ablated(tst, arm)
