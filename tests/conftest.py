"""What several tests share: a small prepared store, and a run small enough to train in seconds."""

import os

import jax
import numpy as np
import pytest
from fake_commands import Machine
from tokenizers import Tokenizer, models

from tst_jax.config import CheckpointConfig, Config, DataConfig, EvalConfig
from tst_jax.data.store_writer import write_store
from tst_jax.data.vocabulary import Vocabulary
from tst_jax.models.transformer import ModelConfig
from tst_jax.optimizer import OptimizerConfig
from tst_jax.schedule import ScheduleConfig, TSTConfig

VOCAB = 61

# Files of few and long tests: first, so that no process ends long after the other.
LONG = ("sharding", "hosts", "launch_slurm", "train", "architectures", "kernels_sharded", "aot")
LONG += ("debug_nans", "numbers", "bench", "kills", "export", "workdir", "preemption", "doctor")

# The tests compile longer than they compute. So XLA compiles for CPUs fast, to slow programs, here
# and in the processes that the tests start; it reads this before its first use.
FAST = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):  # jax 0.12 ends at the sight of this one
    FAST += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST}".strip()


def pytest_collection_modifyitems(items):
    place = {f"test_{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(LONG)))


@pytest.fixture(scope="session")
def store(tmp_path_factory):
    """A store of 61 entries whose text is learnable: noisy counting, in documents of any length."""
    rng = np.random.default_rng(0)

    def documents(count):
        for _ in range(count):
            length = int(rng.integers(20, 400))
            ids = 1 + (np.arange(length) + rng.integers(60) + (rng.random(length) < 0.1)) % 60
            yield ids, length

    words = models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1")
    vocabulary = Vocabulary("tokenizers", Tokenizer(words).to_str().encode())
    path = tmp_path_factory.mktemp("data") / "store"
    write_store(
        path,
        vocabulary=vocabulary,
        train=documents(120),
        heldout=documents(12),
        separator_id=0,
        provenance={"made": "by a test"},
    )
    return path


@pytest.fixture(scope="session")
def make_config():
    """A function of the store's path: 20 steps, the switch after step 8."""

    def make(store) -> Config:
        return Config(
            steps=20,
            log_every=1,
            model=ModelConfig(
                vocab_size=VOCAB, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, ff=24
            ),
            tst=TSTConfig(bag_size=3, ratio=0.4),
            data=DataConfig(store=str(store), rows=4, positions=8),
            optimizer=OptimizerConfig(weight_decay=0.1),
            schedule=ScheduleConfig(peak_lr=1e-2, warmup_fraction=0.1, decay_fraction=0.2),
            eval=EvalConfig(every=5, tokens=256, rows=4),
            checkpoint=CheckpointConfig(every=0, keep=3),
        )

    return make


@pytest.fixture
def machine(tmp_path):
    """A PATH with fake commands in front, for the scripts in launch/."""
    (tmp_path / "bin").mkdir()
    return Machine(tmp_path / "bin")


@pytest.fixture
def config(make_config, store):
    """A config of the shared store, to be changed at will."""
    return make_config(store)
