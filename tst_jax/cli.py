"""Command lines: a config file with overrides, checked arguments, and errors in one line."""

import re
import sys

from absl import flags
from ml_collections import config_flags

from tst_jax import checks, config_file, hosts
from tst_jax import config as config_lib
from tst_jax.errors import Preempted, UserError

_WORDS = {  # what a setting or option of a type is given
    "int": "a whole number, e.g. 1000",
    "float": "a number, e.g. 0.3 or 1e-3",
    "bool": "true or false",
}


def define_config():
    """`--config=FILE.py` and `--config.field=value` overrides of it."""
    return flags.DEFINE_string(
        "config", None, "Python file with get_config() -> Config, e.g. configs/quickstart.py"
    )


def read_config(holder) -> config_lib.Config:
    """The config behind `define_config()`'s flag, overrides applied."""
    if holder.value is None:
        raise UserError("--config is missing; give a config file, e.g. configs/quickstart.py")
    return holder.value


def variant(settings: dict[str, str], arm: str | None = None) -> config_lib.Config:
    """The command line's config with some settings changed; not checked yet beside the others.

    Args:
      settings: "tst.ratio" -> text, as on the command line.
      arm: the config of FILE.py:ARM in place of FILE.py's.
    Raises:
      UserError: a line for each that is no setting, or takes no such value.
    """
    path, overrides = flags.FLAGS["config"].made_of
    if arm is not None:
        if ":" in path:
            raise UserError(f"--config={path} names an arm already; write {path.partition(':')[0]}")
        path = f"{path}:{arm}"
    more = {f"config.{name}": text for name, text in settings.items()}
    if found := [line for name, text in more.items() if (line := _problem(name, text))]:
        raise UserError("\n".join(found))
    return _override(config_file.load_config(path), overrides | more)


def run(main, doc: str) -> None:
    """Parses sys.argv, calls main(), and ends with status 2 and one line on a user's mistake, or
    with Preempted.STATUS where the run was told to end and can go on.

    Args:
      main: called without arguments.
      doc: the module's docstring, shown by --help.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(_help(doc))
        return
    try:
        _parse(sys.argv)
        main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a folder that cannot be made, a full disk
        if not error.filename:
            raise
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:  # of JAX_PLATFORMS, mostly
        if "nitialize backend" not in str(error):
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except Preempted as stop:
        print(stop, file=sys.stderr)
        hosts.leave(Preempted.STATUS)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        hosts.leave(1)


def _help(doc: str) -> str:
    """The module's docstring and its flags, in the order in which they are defined."""
    rows = []
    if "config" in flags.FLAGS:
        rows = [
            ("--config=FILE.py", "Python file with get_config(); it is run."),
            (
                "--config.NAME=VALUE",
                "Overrides a setting; `python -m tst_jax.settings` lists them.",
            ),
        ]
    for flag in flags.FLAGS.get_flags_for_module(sys.argv[0]):
        if flag.name != "config":
            kind = {"int": "=N", "float": "=X", "bool": ""}.get(flag.flag_type(), "=TEXT")
            default = f" Default: {flag.default}." if flag.default else ""
            rows.append((f"--{flag.name}{kind}", f"{flag.help}{default}"))
    width = max(len(option) for option, _ in rows)
    return "\n".join([doc.strip(), "", *(f"  {o:{width}}  {text}" for o, text in rows)])


# ---- arguments


def _parse(argv: list[str]) -> None:
    """Sets the flags. UserError with a line for each argument that cannot be.

    Where arguments are wrong the settings of the others are checked too: all comes at once.
    """
    try:
        argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=True)
    except flags.Error as error:
        raise UserError(f"--flagfile: {' '.join(str(error).split())}") from None
    found, options, overrides, given = [], [], {}, {}
    for name, value in _split(argv[1:], found):
        line, several = _problem(name, value), _several(name)
        if line is None and given.setdefault(name, value) != value and not several:
            line = f"--{name} is given twice, as {given[name]} and as {value}; give it once"
        if line:
            found.append(line)
        elif name.startswith("config."):
            overrides[name] = value
        elif name != "config":
            options.append(f"--{name}={value}")
    config = None
    if "config" in flags.FLAGS and given.get("config"):
        try:
            config = _override(config_file.load_config(given["config"]), overrides)
            found += config_lib.problems(config) if found else []
        except UserError as error:
            found.insert(0, str(error))
    if found:
        raise UserError("\n".join(found))
    try:
        flags.FLAGS([argv[0], *options])
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from None
    if config is not None:
        flags.FLAGS["config"].value = config
        flags.FLAGS["config"].made_of = given["config"], overrides


def _split(arguments: list[str], found: list[str]):
    """(name, value) of each argument `--name=value`, `--name value`, `--name` or `--noname`."""
    left = list(arguments)
    while left:
        argument = left.pop(0)
        if not re.match(r"--?[A-Za-z]", argument):
            found.append(
                f"unexpected argument {argument!r}; options are written --name=value, with dashes"
            )
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        if not equals:
            if _kind(name) == "bool":
                value = "true"
            elif name.startswith("no") and _kind(name[2:]) == "bool":
                name, value = name[2:], "false"
            elif _kind(name) and left and not left[0].startswith("--"):
                value = left.pop(0)
            elif _kind(name):
                what = "a config file" if name == "config" else "a value"
                found.append(f"--{name} has no value; write --{name}=... with {what}")
                continue
        yield name, value


def _kind(name: str) -> str | None:
    """The type of an option or setting by its name, None for one that does not exist."""
    if name.startswith("config.") and "config" in flags.FLAGS:
        default = config_lib.flatten(config_lib.Config()).get(name.removeprefix("config."))
        return None if default is None else type(default).__name__
    if name not in flags.FLAGS:
        return None
    kind = flags.FLAGS[name].flag_type()
    return {"int": "int", "float": "float", "bool": "bool"}.get(kind, "str")


def _several(name: str) -> bool:
    """Whether an option may be given more than once."""
    return name in flags.FLAGS and isinstance(flags.FLAGS[name], flags.MultiFlag)


def _problem(name: str, value: str) -> str | None:
    """A line if there is no such option, or it does not take the value."""
    kind = _kind(name)
    settings, setting = list(config_lib.flatten(config_lib.Config())), name.removeprefix("config.")
    if kind is None and name != setting and "config" in flags.FLAGS:
        inside = [known for known in settings if known.startswith(f"{setting}.")]
        if inside:
            example = f"--config.{inside[0]}=VALUE"
            return f"--{name} is a group of settings; give one of them, e.g. {example}"
        hint = checks.did_you_mean(setting, settings, "; tst_jax.settings lists all", "--config.")
        return f"unknown setting --{name}{hint}"
    if kind is None:
        known = [flag.name for flag in flags.FLAGS.get_flags_for_module(sys.argv[0])]
        hint = checks.did_you_mean(name, known, "", "--")
        if not hint and "config" in flags.FLAGS:  # --steps for --config.steps
            ends = [known for known in settings if known.rpartition(".")[2] == name]
            hint = f"; did you mean --config.{ends[0]}?" if ends else ""
        return f"unknown option --{name}{hint or '; --help lists what there is'}"
    if name == "config" and not value:
        return "--config is empty; give a config file, e.g. configs/quickstart.py"
    if kind == "str":
        return None
    parser = {"int": flags.IntegerParser, "float": flags.FloatParser, "bool": flags.BooleanParser}
    try:
        parser[kind]().parse(value)
    except (TypeError, ValueError):
        shown = "empty" if not value else checks.show(value)
        return f"--{name} is {shown}; give {_WORDS[kind]}"
    return None


def _override(config, overrides: dict[str, str]) -> config_lib.Config:
    """The config with settings as on the command line.

    Args:
      overrides: "config.tst.ratio" -> text, each a setting with text of its type.
    """
    template, arguments = config_lib.Config(), [""]
    for name, text in overrides.items():
        part, wanted = config, template
        for field in name.split(".")[1:-1]:
            part, wanted = getattr(part, field, None), getattr(wanted, field)
        if type(part) is type(wanted):  # else `config.problems` says what is there instead
            arguments.append(f"--{name}={text}")
    values = flags.FlagValues()
    try:
        holder = config_flags.DEFINE_config_dataclass(
            "config", config, flag_values=values, sys_argv=arguments
        )
        values(arguments)
    except flags.Error:  # an attribute that cannot even be copied, so it is no setting
        raise UserError("\n".join(config_lib.problems(config))) from None
    return holder.value
