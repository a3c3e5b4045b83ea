"""A user's mistakes: each is refused with status 2 and a line for each, before anything happens.

`mistakes.TABLE` holds the commands and the words of their answers. To start a Python for each would
take minutes, so one process imports everything once and forks for each command; a real process
shows that it answers the same. `python tests/test_mistakes.py` starts a real one for every command
and prints how long they took.
"""

import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import pytest
from mistakes import CONFIG, ONE_STEP, ROOT, TABLE, make_folder

RIGHT = (CONFIG, "--workdir=run", *ONE_STEP)
FORMS = (  # of arguments that work: any order, values apart, switches by name
    *("--config.steps", "1_00", "--config.model.tied", "-config.stop_after", "-1"),
    *("--noconfig.data.shuffle", CONFIG, "--config.seed=1", "--config.seed=1", "--json=plan.json"),
)
AT_ONCE = 2
# Reads [[module, arguments, env, folder], ...] from stdin. Into each folder go stdout, stderr and
# `result`: the status and the names of the programs that were compiled. A child is the command
# from the first line of its module on, before which nothing has asked jax for a device; without a
# module it makes the key of a seed, as a run that is checked does.
FORKS = """
import json, os, runpy, sys, traceback
import jax
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **more: "backend_compile" in event and compiled.append(str(more))
)
import importlib
MODULES = "train prepare data_report plan compare generate export evaluate aot"
for name in MODULES.split():
    importlib.import_module("tst_jax." + name)
import optax.contrib

def child(module, arguments, env, folder):
    for number, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(os.path.join(folder, name), os.O_CREAT | os.O_WRONLY), number)
    os.environ.update(env)
    if "JAX_PLATFORMS" in env:
        jax.config.update("jax_platforms", env["JAX_PLATFORMS"])
    sys.argv = [module, *arguments]
    status = 0
    try:
        if not module:
            jax.random.key(0)
            sys.exit()
        del sys.modules["tst_jax." + module]
        runpy.run_module("tst_jax." + module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush(), sys.stderr.flush()
    with open(os.path.join(folder, "result"), "w") as file:
        json.dump([status, compiled], file)

commands = json.load(sys.stdin)
for at in range(0, len(commands), AT_ONCE):
    children = []
    for command in commands[at : at + AT_ONCE]:
        number = os.fork()
        if not number:
            child(*command)
            os._exit(0)
        children.append(number)
    for number in children:
        os.waitpid(number, 0)
""".replace("AT_ONCE", str(AT_ONCE))


def environment(**more):
    """Of a process with one CPU device."""
    hidden = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "SLURM_STEP_NUM_TASKS", "JAX_NUM_PROCESSES")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | more


def contents(folder):
    """Path -> digest of all there is."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """({name: (status, stdout, stderr, programs compiled)}, contents of two folders).

    The answers "right" and "forms" are those of commands without a mistake, "key" that of none. The
    contents are those of a folder before these three and after them, and of another before all
    mistakes and after them.
    """
    right, wrong, out = (tmp_path_factory.mktemp(name) for name in ("right", "wrong", "answers"))
    make_folder(right)
    make_folder(wrong)
    commands = {"right": ("train", RIGHT, {}), "key": ("", (), {})}
    commands["forms"] = ("plan", FORMS, {})
    commands |= {name: (m.module, m.arguments, m.env) for name, m in TABLE.items()}
    found, seen = {}, [contents(right)]

    def run(names, folder):
        work = []
        for name in names:
            (out / name).mkdir()
            work.append([*commands[name], str(out / name)])
        subprocess.run(
            [sys.executable, "-B", "-c", FORKS],
            cwd=folder,
            env=environment(),
            input=json.dumps(work),
            text=True,
            check=True,
        )
        for name in names:
            status, compiled = json.loads((out / name / "result").read_text())
            texts = [(out / name / stream).read_text() for stream in ("stdout", "stderr")]
            found[name] = (status, *texts, compiled)
        seen.append(contents(folder))

    run(["right", "key", "forms"], right)
    shutil.copytree(right / "run", wrong / "run")
    seen.append(contents(wrong))
    run(list(TABLE), wrong)
    return found, seen


def test_a_right_command_is_told_from_a_mistake(answers):
    """What all of the mistakes are held against can be seen at all."""
    found, (before, after, *_) = answers
    status, stdout, stderr, compiled = found["right"]
    assert status == 0 and "compiled in" in stdout, stderr
    assert set(compiled) > set(found["key"][3])
    assert after.keys() - before.keys() > {"run", "run/config.json"}


def test_arguments_may_have_many_forms(answers):
    status, stdout, stderr, _ = answers[0]["forms"]
    assert status == 0 and stderr == ""
    rows = [re.split(r"\s{2,}", line.strip()) for line in stdout.splitlines()]
    figures = {name: more[0] for name, *more in rows if more}
    one_table = 61 * 8  # beside it: a layer of 4 matrices of attention, 3 of the MLP, and 3 norms
    assert figures["steps"] == "100" and figures["parameters"] == str(one_table + 7 * 64 + 3 * 8)


def test_there_are_enough_mistakes():
    commands = {(m.module, m.arguments, str(m.env)) for m in TABLE.values()}
    assert len(commands) == len(TABLE) >= 60


@pytest.mark.parametrize("name", TABLE)
def test_a_mistake_is_refused_in_one_line(answers, name):
    status, stdout, stderr, compiled = answers[0][name]
    check(name, status, stdout, stderr)
    assert set(compiled) <= set(answers[0]["key"][3])


def check(name, status, stdout, stderr):
    mistake, lines = TABLE[name], stderr.splitlines()
    assert status == 2, stdout + stderr
    assert len(lines) == len(mistake.lines), stderr
    for line, words in zip(lines, mistake.lines):
        assert line.startswith("error: ") and len(line) < 400, line
        assert all(word in line for word in words), line
    assert "Traceback" not in stdout


def test_nothing_is_written(answers):
    *_, before, after = answers[1]
    assert after == before


def test_a_real_process_answers_the_same(answers, tmp_path):
    name = "several at once"
    make_folder(tmp_path)
    before = contents(tmp_path)
    done, _ = real(tmp_path, TABLE[name])
    assert (done.returncode, done.stdout, done.stderr) == answers[0][name][:3]
    assert contents(tmp_path) == before


def real(folder, mistake):
    """(what a user sees, seconds) of the command in a process of its own."""
    began = time.monotonic()
    command = [sys.executable, "-B", "-m", f"tst_jax.{mistake.module}", *mistake.arguments]
    env = environment(**mistake.env)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done, time.monotonic() - began


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder, times = pathlib.Path(name), {}
        make_folder(folder)
        run = [sys.executable, "-B", "-m", "tst_jax.train", *RIGHT]
        subprocess.run(run, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
        before = contents(folder)
        for name, mistake in TABLE.items():
            done, times[name] = real(folder, mistake)
            check(name, done.returncode, done.stdout, done.stderr)
            assert contents(folder) == before, name
        for name in sorted(times, key=times.get)[-5:]:
            print(f"{times[name]:.2f} s  {name}")
        print(f"{len(times)} mistakes, the slowest refused after {max(times.values()):.2f} s")
