"""Imports go downwards: the method needs jax alone, and some images have no data libraries."""

import ast
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What any file may import: errors are for all, and a command parses its arguments.
ANYWHERE = {"errors", "cli"}
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


def test_method_imports_little_beside_jax():
    """Pallas, 0.2 s of modules, comes in with the first kernel that is asked for."""
    code = (
        "import sys, jax; before = set(sys.modules); import tst_jax.superposition; "
        "print(*sorted(m for m in set(sys.modules) - before if not m.startswith('tst_jax')))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not [name for name in result.stdout.split() if "pallas" in name or "mosaic" in name]


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


def lines():
    """Name of a module or folder of tst_jax -> number of its line in the README's table."""
    table = (ROOT / "README.md").read_text().partition("## The code")[2].partition("\n## ")[0]
    found = {}
    for number, line in enumerate(re.findall(r"^\| `(.*)", table, re.M)):
        first = line.partition(" | ")[0]
        for name in re.findall(r"(?:tst_jax/)?(\w+)(?:\.py|/)", first):
            found.setdefault(name, number)
    return found


def imported(path):
    """Names under tst_jax that a file imports, at its top or in a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "tst_jax":
            names = [f"tst_jax.{alias.name}" for alias in node.names]
        else:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (
            name.split(".")[1]
            for name in names
            if name.startswith("tst_jax.") and name != "tst_jax.__version__"
        )


def test_a_file_imports_what_stands_above_it():
    line = lines()
    files = [path for path in (ROOT / "tst_jax").rglob("*.py") if path.name != "__init__.py"]
    assert len(files) > 70
    wrong, seen = [], 0
    for path in files:
        file = path.relative_to(ROOT / "tst_jax").parts[0].removesuffix(".py")
        for name in imported(path):
            seen += 1
            if name not in ANYWHERE and line[name] > line[file]:
                wrong.append(f"{path.relative_to(ROOT)} imports tst_jax.{name}")
    assert wrong == [] and seen > 200
