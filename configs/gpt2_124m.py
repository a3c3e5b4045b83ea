"""GPT-2's smallest: learned positions, LayerNorm, GELU, biases, one tied table; 124M parameters.

    python -m tst_jax.train --config=configs/gpt2_124m.py --workdir=runs/gpt2_124m
    python -m tst_jax.train --config=configs/gpt2_124m.py:baseline --workdir=runs/baseline

Not in the paper: for the question whether TST cares about the architecture. Learning rate and batch
are those usual for this shape, bag size and ratio the paper's for its small models. A vocabulary
that divides over mesh.tensor is --config.model.vocab_size=50304 (padded).
"""

from tst_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig
from tst_jax.errors import UserError
from tst_jax.models import shapes
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig
from tst_jax.sharding import MeshConfig


def get_config(arm: str = "tst") -> Config:
    if arm not in ("tst", "baseline"):
        raise UserError(f"the arm is {arm!r}; write gpt2_124m.py, or gpt2_124m.py:baseline")
    superposed = arm == "tst"
    return Config(
        steps=20_000,
        log_every=100,
        model=shapes.gpt2_124m(),
        tst=TSTConfig(bag_size=6, ratio=0.3 if superposed else 0.0),
        # 2**19 positions a step.
        data=DataConfig(store="stores/fineweb-edu-gpt2", rows=512, positions=1_024),
        optimizer=OptimizerConfig(name="adamw", b1=0.9, b2=0.95, weight_decay=0.1, clip=1.0),
        schedule=ScheduleConfig(peak_lr=6e-4, warmup_steps=2_000, decay_fraction=0.1),
        mesh=MeshConfig(data=1, fsdp=-1),
        eval=EvalConfig(every=1_000, tokens=2**23, rows=256),
        checkpoint=CheckpointConfig(every=1_000),
    )
