"""Command lines: a config file with overrides, checked arguments, and errors in one line."""

import difflib
import sys

from absl import flags
from ml_collections import config_flags

from tst_jax import config as config_lib
from tst_jax.errors import Preempted, UserError


def define_config():
    """`--config=FILE.py` and `--config.field=value` overrides of it."""
    return config_flags.DEFINE_config_file(
        "config", None, "Python file with get_config() -> Config, e.g. configs/quickstart.py"
    )


def read_config(holder) -> config_lib.Config:
    """The config behind `define_config()`'s flag, overrides applied."""
    if not holder.present:
        raise UserError("--config is missing; give a config file, e.g. configs/quickstart.py")
    try:
        getattr(holder.value, "seed", None)  # a file that failed to load raises here, and says why
    except OSError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"--config: {lines[0]} {lines[-1]}") from None
    if not isinstance(holder.value, config_lib.Config):
        raise UserError(
            f"--config: get_config() returned {type(holder.value).__name__}; it must return a "
            "tst_jax.config.Config"
        )
    return holder.value


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
        left = _parse(sys.argv)
        if left:
            raise UserError(
                f"unexpected argument {left[0]!r}; options are written --name=value, with dashes"
            )
        main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    except Preempted as stop:
        print(stop, file=sys.stderr)
        sys.exit(Preempted.STATUS)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command resumes from the last checkpoint")


def _help(doc: str) -> str:
    lines = [doc.strip(), ""]
    if "config" in flags.FLAGS:
        lines += [
            "  --config=FILE.py  Python file with get_config(); it is run.",
            "  --config.NAME=VALUE  Overrides a setting; tst_jax/config.py lists them.",
        ]
    for flag in flags.FLAGS.get_flags_for_module(sys.argv[0]):
        if flag.name != "config":
            default = "" if flag.default is None else f" Default: {flag.default}."
            lines.append(f"  --{flag.name}  {flag.help}{default}")
    return "\n".join(lines)


def _parse(argv):
    try:
        return flags.FLAGS(argv)[1:]
    except flags.UnrecognizedFlagError as error:
        near = difflib.get_close_matches(error.flagname, list(flags.FLAGS), 1)
        hint = f"; did you mean --{near[0]}?" if near else "; --help lists what there is"
        raise UserError(f"unknown option --{error.flagname}{hint}") from None
    except flags.Error as error:
        # A config file that raises has its whole traceback in here; its own words end it.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(" ".join(dict.fromkeys((lines[0], lines[-1])))) from None
    except (KeyError, IndexError, AttributeError) as error:
        raise UserError(_unknown_field(argv, error)) from None


def _unknown_field(argv, error) -> str:
    """ml_collections ends in a raw KeyError for a field that does not exist; find which it was."""
    known = [f"config.{name}" for name in config_lib.flatten(config_lib.Config())]
    for argument in argv[1:]:
        name = argument.lstrip("-").split("=")[0]
        if name.startswith("config.") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean --{near[0]}?" if near else "; see tst_jax/config.py"
            return f"unknown setting --{name}{hint}"
    return f"the command line cannot be read: {error}"
