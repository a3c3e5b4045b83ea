"""Config files: Python with get_config() -> Config, which is run; an error in one is one line."""

import dataclasses
import difflib
import importlib.machinery
import importlib.util
import inspect
import pathlib
import re
import sys
import traceback

from tst_jax import checks
from tst_jax import config as config_lib
from tst_jax.errors import UserError

_MODULE = "tst_jax_config_file"


class _Loader(importlib.machinery.SourceFileLoader):
    """Leaves no __pycache__ beside a config file."""

    def set_data(self, *_, **__):
        pass


def load_config(path) -> config_lib.Config:
    """The config of `FILE.py`, or of `FILE.py:NAME`, whose get_config() is then given NAME.

    Raises:
      UserError: one line, with the file and where known the line in it.
    """
    text = str(path)
    name, colon, arm = text.partition(":")
    file = pathlib.Path(name)
    if file.is_dir():
        raise UserError(f"--config: {name} is a folder; give a .py file in it")
    if not file.exists():
        others = [str(path) for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
        found = difflib.get_close_matches(name, others, 1)
        hint = f"; did you mean {found[0]}?" if found else "; give a Python file with get_config()"
        raise UserError(f"--config: {name} does not exist{hint}")
    if file.suffix != ".py":
        raise UserError(f"--config: {name} is no .py file; give a Python file with get_config()")
    spec = importlib.util.spec_from_loader(_MODULE, _Loader(_MODULE, name))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for their module
    try:
        spec.loader.exec_module(module)
        make = getattr(module, "get_config", None)
        if not callable(make):
            raise UserError(f"--config: {name} has no function get_config()")
        try:
            inspect.signature(make).bind(*([arm] if colon else []))
        except TypeError:
            how = "takes no NAME: write" if colon else "takes one argument: write"
            wanted = name if colon else f"{name}:NAME"
            raise UserError(f"--config={text}: get_config() {how} --config={wanted}") from None
        config = make(*([arm] if colon else []))
    except UserError as error:
        said = " ".join(str(error).split())
        raise UserError(said if said.startswith("--config") else f"--config: {said}") from None
    except (Exception, SystemExit) as error:
        raise UserError(_told(error, name, module)) from None
    if not isinstance(config, config_lib.Config):
        what = "None (is `return` missing?)" if config is None else type(config).__name__
        raise UserError(
            f"--config: get_config() of {name} returned {what}; it must return a "
            "tst_jax.config.Config"
        )
    return config


def _told(error: BaseException, name: str, module) -> str:
    """File, line, and what a config file raised, with a near name for what it misspelt."""
    text, line = " ".join(str(error).split()), None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == name:
            line = number
    if isinstance(error, SyntaxError):
        text, line = error.msg, error.lineno if error.filename == name else line
    hint = ""
    keyword = re.search(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", text)
    missing = re.fullmatch(r"cannot import name '(\w+)' from '([\w.]+)' .*", text)
    if keyword:
        kinds = [type(part) for part in vars(config_lib.Config()).values()]
        kind = {kind.__name__: kind for kind in (*kinds, config_lib.Config)}.get(keyword[1])
        known = [field.name for field in dataclasses.fields(kind)] if kind in kinds else []
        if kind is config_lib.Config:
            known = [*config_lib.flatten(kind()), *vars(kind())]
        text = text.partition(". Did you mean")[0]
        hint = checks.did_you_mean(keyword[2], known)
    elif missing:
        hint = checks.did_you_mean(missing[1], dir(sys.modules.get(missing[2])))
        text = text.partition(" (")[0]
    elif isinstance(error, NameError) and error.name:
        hint = checks.did_you_mean(error.name, vars(module))
    elif isinstance(error, AttributeError) and error.name:
        hint = checks.did_you_mean(error.name, dir(error.obj))
    where = f"{name}, line {line}" if line else name
    return f"--config: {where}: {type(error).__name__}: {text}{hint}"
