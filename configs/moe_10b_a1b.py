"""The paper's mixture of experts: 10B parameters, 1B active, in Qwen3-MoE's manner.

    python -m tst_jax.train --config=configs/moe_10b_a1b.py --workdir=runs/moe_10b_a1b
    python -m tst_jax.train --config=configs/moe_10b_a1b.py:baseline --workdir=runs/baseline

The paper prints the optimizer, its betas, schedule, learning rate, positions a step, bag size and
steps. Row length, weight decay, clipping and the coefficient
of the balancing loss are not printed; these are usual values.
The baseline ran 125,000 steps, TST 49,983 to about equal loss.
"""

from tst_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig
from tst_jax.errors import UserError
from tst_jax.models import shapes
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig
from tst_jax.sharding import MeshConfig


def get_config(arm: str = "tst") -> Config:
    if arm not in ("tst", "baseline"):
        raise UserError(f"the arm is {arm!r}; write moe_10b_a1b.py, or moe_10b_a1b.py:baseline")
    superposed = arm == "tst"
    return Config(
        steps=49_983 if superposed else 125_000,
        log_every=100,
        model=shapes.moe_10b_a1b(),
        tst=TSTConfig(bag_size=16, superposition_steps=12_483)
        if superposed
        else TSTConfig(bag_size=16, ratio=0.0),
        # 2**23 positions a step. The data were DCLM and FineWeb-Edu, half and half.
        data=DataConfig(
            store="stores/dclm-qwen3,stores/fineweb-edu-qwen3",
            weights="0.5,0.5",
            rows=1_024,
            positions=8_192,
        ),
        optimizer=OptimizerConfig(name="adamw", b1=0.9, b2=0.95, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(peak_lr=3e-4, warmup_steps=2_000, decay_fraction=0.1),
        mesh=MeshConfig(data=-1, fsdp=64),  # the paper ran on 64 B200
        eval=EvalConfig(every=1_000, tokens=2**23, rows=1_024),
        checkpoint=CheckpointConfig(every=1_000),
    )
