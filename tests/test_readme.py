"""The README's commands work as they stand there, its tables are those of the code, and the
messages that it explains exist.

Commands run in a folder of their own with the repository's configs, of which quickstart.py is a
small run and the standard library a part of it; SHORTER says what else is made smaller. One process
imports everything and forks for each command.
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tst_jax import settings

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
# What stands in the README, and what the test does in its place.
SHORTER = {
    "--seeds=3 ": "--seeds=1 ",
    "arm=baseline,tst,input_only,output_only,reinit;seed=0,1,2'": "arm=reinit;seed=0'",
    "seed=0,1,2'": "seed=0,1,2' --list",
    "--config.stop_after=60 --config.profile=50:60": "--config.stop_after=9 --config.profile=5:9",
    "gs://BUCKET/dclm/**/*.jsonl.zst": "dclm/**/*.jsonl",
}
# Commands that other tests run, most of them with fakes in place of hardware or with less work.
ELSEWHERE = {
    "bash launch/quickstart.sh": "test_compare.py::test_one_comparison_from_runs_to_report",
    "bash tests/run.sh": "by itself",
    "bash .ci/run": "by itself",
    "bash launch/tpu_pod.sh": "test_launch_tpu.py::test_tpu_pod_dry_run",
    "bash launch/gke_xpk.sh": "test_launch_clusters.py::test_gke_xpk_dry_run",
    "bash launch/local_cluster.sh": "test_launch_local.py::test_local_cluster_dry_run",
    "sbatch": "test_launch_clusters.py::test_slurm_dry_run",
    "python -m tst_jax.bench": "test_bench.py::test_bench_data",
    "python -m tst_jax.aot": "test_aot.py::test_both_phases_of_a_run_that_fits",
    "python -m tst_jax.evaluate --workdir=runs/tst --tasks": (
        "test_harness.py::test_scores_are_the_harness_s_own"
    ),
}


def commands():
    """All of them, in order, once; comments behind them left out."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
    lines = [line for kind, block in blocks if not kind for line in block.splitlines()]
    found = [line for line in lines if re.match(r"(python|bash|sbatch) ", line)]
    return list(dict.fromkeys(re.sub(r"\s+# .*", "", line) for line in found))


def elsewhere(command):
    return next((test for start, test in ELSEWHERE.items() if command.startswith(start)), None)


# Reads [[module, arguments], ...] from stdin and runs one after the other in a process of its own;
# what a command prints goes to stdout. Ends with the first that fails.
FORKS = """
import importlib, json, os, runpy, sys, traceback
for name in "prepare train data_report compare sweep generate export evaluate plan doctor".split():
    importlib.import_module("tst_jax." + name)
from tst_jax.data import sources
everything = sources._python_files
small = ("json/", "email/", "asyncio/", "unittest/")  # of the standard library
sources._python_files = lambda root: (
    (path, size) for path, size in everything(root)
    if path.relative_to(root).as_posix().startswith(small)
)
for module, arguments in json.load(sys.stdin):
    print("$", module, *arguments, flush=True)
    child = os.fork()
    if not child:
        status = 0
        try:
            sys.argv = [module, *arguments]
            sys.modules.pop("tst_jax." + module, None)
            runpy.run_module("tst_jax." + module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(status)
"""


@pytest.fixture
def folder(tmp_path):
    """Where the commands run: the README's paths, with little in them."""
    shutil.copytree(
        ROOT / "configs", tmp_path / "configs", ignore=shutil.ignore_patterns("results")
    )
    quickstart = (tmp_path / "configs/quickstart.py").read_text()
    smaller = {
        "steps=4000": "steps=20, log_every=5",
        "width=64, layers=2, heads=4, kv_heads=4": "width=16, layers=1, heads=1, kv_heads=1",
        "ff=160": "ff=16",
        "rows=8, positions=64": "rows=4, positions=16",
        "every=250": "every=10, tokens=1024, rows=4",
    }
    for text, other in smaller.items():
        assert text in quickstart
        quickstart = quickstart.replace(text, other)
    (tmp_path / "configs/quickstart.py").write_text(quickstart)
    (tmp_path / "dclm/a").mkdir(parents=True)
    texts = [json.dumps({"text": path.read_text()}) for path in sorted(ROOT.glob("tst_jax/*.py"))]
    (tmp_path / "dclm/a/some.jsonl").write_text("\n".join(texts))
    return tmp_path


def test_commands_run_as_they_stand_there(folder):
    ours = [command for command in commands() if elsewhere(command) is None]
    assert len(ours) > 15
    asked = []
    for command in ours:
        for text, shorter in SHORTER.items():
            command = command.replace(text, shorter)
        python, dash, module, *arguments = shlex.split(command)
        assert (python, dash) == ("python", "-m")
        asked.append([module.removeprefix("tst_jax."), arguments])
    helps = sorted({path.stem for path in (ROOT / "tst_jax").glob("*.py") if is_command(path)})
    asked += [[name, ["--help"]] for name in helps]
    make_tokenizer(folder)
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        input=json.dumps(asked),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for left in (
        "runs/quickstart/report.html",
        "runs/sweep/ablations.csv",
        "plan.json",
        "exported",
    ):
        assert (folder / left).exists(), left
    said = dict(re.findall(r"^\$ (\w+) --help\n(.*?)(?=^\$|\Z)", done.stdout, re.M | re.S))
    assert list(said) == helps and len(helps) > 10
    for name, text in said.items():
        paragraphs = text.split("\n\n")
        if paragraphs[0].startswith("usage:"):
            del paragraphs[0]
        assert paragraphs[0].strip().endswith((".", ":")) and "\n" not in paragraphs[0].strip(), (
            name
        )
        assert re.match(rf"    python -m tst_jax.{name}\b", paragraphs[1]), name
        assert max(map(len, text.splitlines())) <= 120, name


def is_command(path):
    return '__name__ == "__main__"' in path.read_text()


def make_tokenizer(folder):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end_of_text|>"])
    (folder / "llama-3").mkdir()
    tokenizer.save(str(folder / "llama-3/tokenizer.json"))


def test_other_commands_are_run_by_other_tests():
    assert all(any(c.startswith(start) for c in commands()) for start in ELSEWHERE)
    for test in set(ELSEWHERE.values()) - {"by itself"}:
        file, name = test.split("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), test


def test_the_table_of_settings_is_that_of_the_code():
    """`python -m tst_jax.settings --markdown` prints it."""
    assert settings.markdown(settings.settings()) in README


def test_messages_that_are_explained_exist():
    table = README.partition("## When something goes wrong")[2].partition("\n## ")[0]
    said = re.findall(r"^\| `([^`]+)` \|", table, re.M)
    sources = "\n".join(path.read_text() for path in (ROOT / "tst_jax").rglob("*.py"))
    assert len(said) > 8
    theirs = {"RESOURCE_EXHAUSTED", "initialize backend"}  # XLA's, jax's
    assert [text for text in said if text not in sources and text not in theirs] == []


def test_the_map_of_the_code_names_every_file():
    table = README.partition("## The code")[2].partition("\n## ")[0]
    files = {path.name for path in (ROOT / "tst_jax").glob("*.py")} - {"__init__.py"}
    assert {name for name in files if f"{name}`" not in table} == set()
    assert "`tst_jax/kernels/`" in table and "`tst_jax/models/`" in table
