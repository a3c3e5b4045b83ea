"""A run's folder: whether it may be written, what it was begun with, and what happened in it.

Nothing is written before all is checked: first what config.json says, then, with the lock held,
what the checkpoint says.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import platform

import jax
from etils import epath

from tst_jax import __version__, checks, hosts, metrics, schedule
from tst_jax import config as config_lib
from tst_jax.config import Config, ConfigError
from tst_jax.lock import Lock

EVENTS = "events.jsonl"
# What a process that was killed before its first checkpoint may have left in a new folder.
_BEGINNINGS = ("lock", "config.json.partial", EVENTS)


def check_allowed(allow: frozenset[str]) -> None:
    """Raises ConfigError for a name in --allow_changes that is no setting."""
    known = list(config_lib.flatten(Config()))
    for name in sorted(allow):
        if name not in known:
            hint = checks.did_you_mean(name, known, "; tst_jax.settings lists all")
            raise ConfigError(f"--allow_changes: {name!r} is no setting{hint}")


def check_place(workdir: epath.Path) -> None:
    """Raises ConfigError unless `workdir` is new, empty, or a run's."""
    for path in [workdir, *workdir.parents]:
        if path.exists():
            if not path.is_dir():
                raise ConfigError(f"{path} is a file; give --workdir a new folder")
            if "://" not in str(path) and not os.access(path, os.W_OK | os.X_OK):
                raise ConfigError(f"{path} cannot be written; give --workdir another folder")
            break
    if (workdir / "config.json").exists() or not workdir.is_dir():
        return
    if any(path.name not in _BEGINNINGS for path in workdir.iterdir()):
        raise ConfigError(
            f"{workdir} is not empty and no run of tst_jax; give --workdir a new folder"
        )


def saved_config(workdir: epath.Path) -> dict | None:
    """config.json of a run as nested dicts; None in a new folder."""
    path = workdir / "config.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
        if not {"steps", "tst", "data"} <= found.keys():
            raise ValueError("no settings of a run")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); put back what was there") from None
    return found


def check_changes(old: dict, config: Config, allow: frozenset[str], done: int, where) -> list[str]:
    """Lines "name: old -> new" of settings that differ from those that a run was begun with.

    Harmless ones pass, and batch sizes of steps to come; others must be named in `allow`.

    Args:
      old: settings of the run, as nested dicts.
      config: settings that are wanted now.
      allow: names of settings that may differ.
      done: steps that the run has done; what they read cannot change any more.
      where: names the run in messages.
    Raises:
      ConfigError: one line for each difference that was not allowed.
    """
    new = plain(config)
    lines = config_lib.differences(old, new)
    changed = {line.split(":")[0] for line in lines}
    same_past = _past(old, done) == _past(new, done)
    if same_past:
        changed.discard("data.rows_from")
    if refused := sorted(changed - allow):
        lines = [line for line in lines if line.split(":")[0] in refused]
        raise ConfigError(
            f"{where} was started with other settings; give them again, or another workdir, or go "
            f"on from here with tst_jax.train --allow_changes={','.join(refused)}\n"
            + "\n".join(lines)
        )
    if not same_past:
        raise ConfigError(
            f"{where} has done {done} steps, and with {', '.join(sorted(changed))} changed other "
            "ones would have come before: the data would be read from another place; keep the "
            "switch where it was (tst.superposition_steps) and data.rows_from as it was"
        )
    return config_lib.differences(old, new, harmless=True)


def plain(config: Config) -> dict:
    """Settings as config.json gives them back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def same_run(old: dict, config: Config) -> bool:
    """Whether settings of a run, as nested dicts, are those of `config`, the harmless ones too.

    Of a baseline (ratio 0), what else `tst` says does nothing and may differ.
    """
    plainest = dataclasses.asdict(schedule.TSTConfig(ratio=0.0))
    settings = [old, plain(config)]
    found = [s | {"tst": plainest} if s["tst"].get("ratio") == 0 else s for s in settings]
    return found[0] == found[1]


def _past(settings: dict, done: int) -> list | str:
    """The stages up to step `done`."""
    known = dataclasses.asdict(schedule.TSTConfig())
    tst = schedule.TSTConfig(**{k: v for k, v in settings["tst"].items() if k in known})
    data = settings["data"]
    shape = (settings["steps"], data["rows"], data["positions"], data.get("rows_from", ""))
    try:
        stages = schedule.make_stages(tst, *shape)
    except ValueError as error:
        return str(error)
    return [
        (s.start, min(s.stop, done), s.bag_size, s.mode, s.rows, s.positions)
        for s in stages
        if s.start < done
    ]


def write_config(workdir: epath.Path, config: Config) -> None:
    """config.json, whole at any time."""
    path, text = workdir / "config.json", json.dumps(plain(config), indent=2) + "\n"
    if path.exists() and path.read_text() == text:
        return
    partial = workdir / "config.json.partial"
    partial.write_text(text)
    partial.replace(path)


@contextlib.contextmanager
def claimed(workdir: epath.Path, say):
    """The folder, made and locked until the end; yields a function that raises LockError once
    another process has taken the lock."""
    lock = Lock(workdir, say)

    def begin():
        workdir.mkdir(parents=True, exist_ok=True)
        lock.acquire()

    hosts.first_alone(begin)
    try:
        yield lambda: hosts.is_first() and lock.check()
    finally:
        if hosts.is_first():
            lock.release()


class Events:
    """Appends what happens to a run to events.jsonl: one JSON object a line, never rewritten.

    Args:
      workdir: of the run, which exists.
      silent: writes nothing; for all processes of a run but the first.
    """

    def __init__(self, workdir: epath.Path, silent: bool = False):
        self._file = None
        if not silent:
            path = workdir / EVENTS
            before = path.read_bytes().decode(errors="replace") if path.exists() else ""
            self._file = metrics.Appended(path, before.splitlines())

    def write(self, event: str, **fields) -> None:
        """Adds a line: `time` (UTC), `event`, and the fields."""
        if self._file:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            self._file.append(json.dumps({"time": now, "event": event, **fields}))

    def close(self) -> None:
        if self._file:
            self._file.close()


def read_events(workdir) -> list[dict]:
    """The lines of events.jsonl; what a kill or a bad disk left of others is left out."""
    path, found = epath.Path(workdir) / EVENTS, []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            event = json.loads(line)
            event["event"], event["step"]  # it has both
            found.append(event)
    return found


def allowed_before(workdir) -> frozenset[str]:
    """Names of settings that have been changed since the run began."""
    lines = [e["changes"] for e in read_events(workdir) if e["event"] == "settings_changed"]
    return frozenset(line.split(":")[0] for part in lines for line in part)


def environment() -> dict:
    """What a bug report wants to know of this process."""
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "tst_jax": __version__,
        "jax": jax.__version__,
        "processes": jax.process_count(),
        "devices": f"{jax.device_count()} {jax.devices()[0].device_kind}",
    }
