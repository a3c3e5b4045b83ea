"""Lists all settings of a run: name, default, and what it is.

    python -m tst_jax.settings            # all of them
    python -m tst_jax.settings tst. data. # those that begin so

Names, defaults and words are those of the dataclasses in tst_jax/config.py and of the files that it
names; `--config.NAME=VALUE` of the other commands sets one. --markdown prints the README's table.
"""

import argparse
import dataclasses
import inspect
import re
import sys

from tst_jax.config import Config

_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.*))?")


def settings(part=None, path: str = "") -> list[tuple[str, str, str]]:
    """(name, default, what it is) of each setting, in the order of the dataclasses.

    What it is stands behind the field as a comment; "" where the name says it.

    Args:
      part: a Config or a part of one; None is the default Config.
      path: in front of the names, "tst.".
    """
    part = Config() if part is None else part
    lines = inspect.getsource(type(part)).splitlines()
    said = {found[1]: found[2] or "" for line in lines if (found := _FIELD.fullmatch(line))}
    found = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            found += settings(value, f"{path}{field.name}.")
        else:
            shown = repr(value).replace("'", '"') if isinstance(value, str) else f"{value}"
            found.append((f"{path}{field.name}", shown, said[field.name]))
    return found


def markdown(rows) -> str:
    """A table of them."""
    cell = lambda text: text.replace("|", "\\|")
    lines = ["| setting | default | |", "|---|---|---|"]
    return "\n".join(lines + [f"| `{n}` | `{v}` | {cell(said)} |" for n, v, said in rows])


def main(argv=None) -> int:
    parser = argparse.ArgumentParser("python -m tst_jax.settings", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginnings of names")
    parser.add_argument("--markdown", action="store_true", help="as a table for the README")
    options = parser.parse_args(argv)
    rows = [
        row for row in settings() if not options.names or row[0].startswith(tuple(options.names))
    ]
    if not rows:
        print(f"error: no setting begins with {' or '.join(options.names)}", file=sys.stderr)
        return 2
    if options.markdown:
        print(markdown(rows))
        return 0
    name, default = (max(len(row[i]) for row in rows) for i in (0, 1))
    for row in rows:
        print(f"{row[0]:{name}}  {row[1]:{default}}  {row[2]}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
