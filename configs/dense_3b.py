"""The paper's 3B model: SmolLM3-3B's shape, Llama-3 vocabulary, untied.

    python -m tst_jax.train --config=configs/dense_3b.py --workdir=runs/dense_3b
    python -m tst_jax.train --config=configs/dense_3b.py:baseline --workdir=runs/baseline

The paper prints the optimizer, its betas, schedule, learning rate, positions a step, bag size and
steps. Row length, weight decay and clipping are not printed; these are usual values.
Baselines of equal loss and equal data took 36,000 and 50,000 steps (--config.steps).
"""

from tst_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig
from tst_jax.errors import UserError
from tst_jax.models import shapes
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig
from tst_jax.sharding import MeshConfig


def get_config(arm: str = "tst") -> Config:
    if arm not in ("tst", "baseline"):
        raise UserError(f"the arm is {arm!r}; write dense_3b.py, or dense_3b.py:baseline")
    superposed = arm == "tst"
    return Config(
        steps=20_000,
        log_every=100,
        model=shapes.dense_3b(),
        tst=TSTConfig(bag_size=6, ratio=0.3 if superposed else 0.0),
        # 2**21 positions a step. The data were DCLM, in Llama-3's tokens.
        data=DataConfig(store="stores/dclm-llama3", rows=512, positions=4_096),
        optimizer=OptimizerConfig(name="adamw", b1=0.9, b2=0.95, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(peak_lr=2e-4, warmup_steps=2_000, decay_fraction=0.1),
        mesh=MeshConfig(data=1, fsdp=-1),
        eval=EvalConfig(every=1_000, tokens=2**23, rows=256),
        checkpoint=CheckpointConfig(every=1_000),
    )
