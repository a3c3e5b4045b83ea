"""The notebooks run from top to bottom on a CPU, and are stored without outputs."""

import ast
import importlib.util
import pathlib
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tst_jax import settings

ROOT = pathlib.Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
names = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
# What stands in the cell of sizes, and what the test runs in its place: fewer steps.
SHORTER = {
    "01": ("--config.steps=500 --config.eval.every=50", "--config.steps=40 --config.eval.every=20"),
    "02": ("(512, 64, 8000, 8, 400)", "(256, 64, 1000, 8, 60)"),
    "03": ("(64, 16, 400)", "(32, 4, 60)"),
    "04": (
        '(120, "0", ("tst.bag_size=4;tst.ratio=0,0.2,0.3", "baseline,tst,reinit"))',
        '(20, "0", ("tst.bag_size=4;tst.ratio=0,0.3", "baseline,tst"))',
    ),
    "05": ("", ""),
}


def cells(path, kind="code"):
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def test_all_of_them_are_there():
    assert [path.stem[:2] for path in NOTEBOOKS] == list(SHORTER)


@names
def test_it_is_stored_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    repository = re.search(r'REPOSITORY = "https://github.com/([\w./-]+)"', cells(path)[1])[1]
    badge = "https://colab.research.google.com/assets/colab-badge.svg"
    opens = f"https://colab.research.google.com/github/{repository}/blob/main/colabs/{path.name}"
    assert f"[![Open in Colab]({badge})]({opens})" in notebook.cells[0].source
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            ast.parse(cell.source)  # plain Python: no magic that only a notebook understands


def test_all_of_them_are_set_up_alike():
    """Up to the function that runs commands, which two of them do not need."""
    heads = {cells(path)[1].partition("\n\n\ndef run(")[0] for path in NOTEBOOKS}
    assert len(heads) == 1


@names
@pytest.mark.parametrize("runtime", ["t4", "a100", "tpu"])
def test_sizes_of_other_runtimes_are_settings(path, runtime):
    source = cells(path)[0]
    assert source.count('RUNTIME = "cpu"') == 1
    exec(source.replace('RUNTIME = "cpu"', f'RUNTIME = "{runtime}"'), {})
    known = {name for name, *_ in settings.settings()}
    named = re.findall(r"--config\.([\w.]+)=", "\n".join(cells(path)))  # of all cells
    assert set(named) <= known


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of all notebooks, which find the store that the first of them has prepared."""
    return tmp_path_factory.mktemp("runs")


@names
def test_it_runs(path, tmp_path, runs, monkeypatch):
    """In a folder as in a fresh clone, with what has been installed."""
    if path.stem.startswith("05") and importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for folder in ("tst_jax", "configs", "launch", "colabs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "runs").symlink_to(runs)
    notebook = nbformat.read(path, as_version=4)
    text, shorter = SHORTER[path.stem[:2]]
    assert text in notebook.cells[1].source
    notebook.cells[1].source = notebook.cells[1].source.replace(text, shorter)
    client = NotebookClient(
        notebook,
        timeout=600,
        resources={"metadata": {"path": str(tmp_path)}},
        kernel_name="python3",
    )
    client.execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert any("image/png" in out.get("data", {}) for out in outputs) or "05" in path.stem
