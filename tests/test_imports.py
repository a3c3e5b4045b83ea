"""Imports go downwards: the method needs jax alone, and some images have no data libraries."""

import subprocess
import sys

BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ImportError(name + " is absent here")
sys.meta_path.insert(0, Absent())
import {modules}
"""


def imports(modules, absent):
    code = BLOCK.format(absent=set(absent), modules=modules)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_method_needs_jax_and_numpy_only():
    absent = ["flax", "optax", "orbax", "grain", "ml_collections", "absl", "tokenizers"]
    result = imports("tst_jax.superposition", absent)
    assert result.returncode == 0, result.stderr
    assert imports("tst_jax.train_step", absent).returncode != 0  # the blocking itself works


def test_bench_of_kernels_needs_jax_and_numpy_only():
    absent = ["flax", "optax", "orbax", "grain", "ml_collections", "absl", "tensorflow_datasets"]
    small = "['kernels', '--n=8', '--d=8', '--v=16', '--bag_sizes=2', '--rounds=1']"
    result = imports(f"tst_jax.bench; sys.exit(tst_jax.bench.main({small}))", absent)
    assert result.returncode == 0 and "paper_style" in result.stdout, result.stderr


def test_models_and_bench_need_no_data_libraries():
    absent = ["grain", "ml_collections", "tensorflow_datasets", "tokenizers", "orbax"]
    result = imports(
        "tst_jax.models.transformer, tst_jax.flops, tst_jax.bench, tst_jax.train_step", absent
    )
    assert result.returncode == 0, result.stderr
