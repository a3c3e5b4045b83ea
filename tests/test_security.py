"""Nothing that is read can run code, and the report shows what it is given as text.

A config file is Python and is run; nothing else is. So no file of the package unpickles, evaluates
text or hands it to a shell, and each ban is shown to catch what it bans.
"""

import ast
import html.parser
import pathlib

import pytest
from test_compare import fake_run

from tst_jax import report
from tst_jax.compare import baseline_of, summarize

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("tst_jax", "configs", "launch")
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
    *("torch.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle"),
}
ARGUMENTS = {"trust_remote_code", "allow_pickle", "shell"}  # that may be given, but only as False


def banned(source: str) -> list[str]:
    """What in a Python file could run what it reads, "line: what"."""
    tree, found = ast.parse(source), []
    imported = {}  # name here -> what it is

    def dotted(node):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            return imported.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
            return f"{before}.{node.attr}"
        return None

    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            imported |= {a.asname: a.name for a in node.names if a.asname}
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        found += [f"{node.lineno}: import {n}" for n in names if n.split(".")[0] in MODULES]
    for node in ast.walk(tree):
        name = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else None
        # Also where it is not called at once: f = eval, or map(eval, texts).
        name = name.removeprefix("builtins.") if name else None
        if name in BUILTINS | CALLS:
            found.append(f"{node.lineno}: {name}")
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ARGUMENTS and not off:
                    found.append(f"{node.lineno}: {keyword.arg}")
    return found


def files():
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def test_no_file_runs_what_it_reads():
    assert {"train.py", "store.py", "quickstart.py"} <= {path.name for path in files()}
    found = {str(path.relative_to(ROOT)): banned(path.read_text()) for path in files()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "source, what",
    [
        ("import pickle", "import pickle"),
        ("import os, dill as d", "import dill"),
        ("from marshal import loads", "import marshal"),
        ("def f():\n    import cloudpickle.compat", "import cloudpickle.compat"),
        ("from shelve import open", "import shelve"),
        ("eval('1')", "eval"),
        ("exec(text)", "exec"),
        ("list(map(eval, texts))", "eval"),
        ("import builtins\nbuiltins.exec(text)", "exec"),
        ("compile(text, 'f', 'exec')", "compile"),
        ("import os\nos.system('ls')", "os.system"),
        ("from os import system\nsystem('ls')", "os.system"),
        ("import os as o\no.popen('ls')", "os.popen"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell"),
        ("import subprocess\nsubprocess.run('ls', shell=flag)", "shell"),
        ("import subprocess\nsubprocess.getoutput('ls')", "subprocess.getoutput"),
        ("import torch\ntorch.load('f')", "torch.load"),
        ("import numpy as np\nnp.load('f', allow_pickle=True)", "allow_pickle"),
        ("load_dataset('name', trust_remote_code=True)", "trust_remote_code"),
    ],
)
def test_each_ban_catches_what_it_bans(source, what):
    assert [line.partition(": ")[2] for line in banned(source)][-1:] == [what]


@pytest.mark.parametrize(
    "source",
    [
        "import ast\nast.literal_eval('1')",
        "import re\nre.compile('a')",
        "lowered.compile()",
        "import numpy as np\nnp.load('f')\nnp.load('f', allow_pickle=False)",
        "import subprocess\nsubprocess.run(['ls'])",
        "def evaluate(eval_shape): return eval_shape",
        "import jax\njax.eval_shape(f)",
    ],
)
def test_what_is_harmless_is_allowed(source):
    assert banned(source) == []


# ---- the report

WRONG = "<script>alert(1)</script>&\"'><img src=x onerror=alert(1)>"


class Page(html.parser.HTMLParser):
    """Counts of the tags of a page, its attributes and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = {}, [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [name for name, _ in attributes]

    def handle_data(self, data):
        self.text += data


def test_the_parser_sees_a_script():
    page = Page(f"<p>{WRONG}</p>")
    assert page.tags == {"p": 1, "script": 1, "img": 1} and "onerror" in page.attributes


def written(config, workdir):
    """The page of a comparison of two made-up runs, parsed."""
    workdir.mkdir(parents=True)
    baseline, tst = [fake_run(baseline_of(config), 3.0)], [fake_run(config, 2.9)]
    summary = summarize(baseline, tst)
    summary["equal_loss_baselines"] = {"20": [3.0]}
    report.write(workdir, summary, {config.steps: baseline}, tst)
    return Page((workdir / "report.html").read_text())


def test_the_report_shows_what_it_is_given_as_text(
    config, make_config, store, tmp_path, monkeypatch
):
    """Settings, folders, versions and devices that look like HTML change no tag of the page."""
    plain = written(config, tmp_path / "plain")
    assert plain.tags["script"] == 2 and plain.tags["img"] == 1

    class Device:
        device_kind = WRONG

    marked = make_config(store)
    marked.init_from = marked.data.store = marked.optimizer.options = WRONG
    marked.kernels = marked.tst.objective = marked.model.dtype = WRONG
    monkeypatch.setattr(report.jax, "devices", lambda: [Device()])
    monkeypatch.setattr(report, "__version__", WRONG)
    monkeypatch.setattr(report.config_lib, "differences", lambda *_, **__: [WRONG])
    page = written(marked, tmp_path / WRONG.replace("/", "|"))
    assert page.tags == plain.tags and not any(name.startswith("on") for name in page.attributes)
    # Six settings, the device, the version, and the difference of the arms.
    assert page.text.count(WRONG) == 9
