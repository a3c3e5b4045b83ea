"""A first look at TST on a laptop: 1.1M parameters on the Python standard library's source.

    bash launch/quickstart.sh                     # everything: data, baseline, TST, report

or by hand:

    python -m tst_jax.prepare --source=stdlib --out=runs/quickstart/store
    python -m tst_jax.train --config=configs/quickstart.py --workdir=runs/quickstart/tst-alone

The learning rate is the baseline's best (4.348 held out at 4e-3, 4.361 at 2e-3, 4.376 at 8e-3), so
that TST is compared with a baseline at its strongest.
configs/quickstart.py:NAME is one of the ablations of tst_jax/ablations.py.
"""

from tst_jax.ablations import ablated
from tst_jax.config import Config, DataConfig, EvalConfig
from tst_jax.models.transformer import ModelConfig
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig


def get_config(arm: str = "tst") -> Config:
    tst = Config(
        steps=4000,
        # 16 entries of padding: rows of logits that lie a power of two bytes apart are slow.
        model=ModelConfig(
            vocab_size=8208, width=64, layers=2, heads=4, kv_heads=4, head_dim=16, ff=160
        ),
        tst=TSTConfig(bag_size=4, ratio=0.3),
        data=DataConfig(store="runs/quickstart/store", rows=8, positions=64),
        optimizer=OptimizerConfig(name="adamw", weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(peak_lr=4e-3, warmup_fraction=0.05, decay_fraction=0.3),
        eval=EvalConfig(every=250),
    )
    return ablated(tst, arm)
