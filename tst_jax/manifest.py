"""The list of a checkpoint's files with their checksums: with it, damage has a name.

It is the last file that is written, so a folder that has one is whole. Beside the checksums it
holds the checkpoint's record, see `checkpoint.py`.
"""

import concurrent.futures
import hashlib
import json
import os

from etils import epath

from tst_jax.errors import UserError

NAME = "manifest.json"
FORMAT = "tst_jax.checkpoint/1"
_THREADS = 8


class CheckpointError(UserError):
    """A checkpoint that is missing, damaged, cannot be written, or does not fit the run."""


def write(folder: epath.Path, record: dict) -> None:
    """Writes the manifest of all files that lie in `folder`; on a disk, all is synced to it."""
    inside = list(_walk(folder))
    paths = [path for path in inside if not path.is_dir() and path.name != NAME]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda name: _digest(folder / name, sync=True), names)
        files = {
            name: {"bytes": size, "sha256": digest} for name, (size, digest) in zip(names, found)
        }
    content = {"format": FORMAT, "files": files, "record": record}
    text = json.dumps({**content, "sha256": _own(content)}, indent=1) + "\n"
    (folder / NAME).write_text(text)
    if "://" not in str(folder):
        _digest(folder / NAME, sync=True)
        for path in [*inside, folder]:
            if path.is_dir():
                sync_folder(path)


def read(folder: epath.Path) -> dict:
    """The manifest of a checkpoint; CheckpointError if it is missing or not what was written."""
    path = folder / NAME
    try:
        content = json.loads(path.read_text())
        own, form = content.pop("sha256"), content["format"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: it cannot be read ({error})") from None
    if form != FORMAT and own == _own(content):
        raise CheckpointError(f"{path} is of format {form}; this version reads {FORMAT}")
    if own != _own(content):
        raise CheckpointError(f"{path} is damaged: its content is not what was written")
    return content


def damage(folder: epath.Path, manifest: dict, part: tuple[int, int] = (0, 1)) -> str:
    """What is wrong with the first damaged file, "" if all are as they were written.

    Args:
      folder: of the checkpoint.
      manifest: of the folder, from `read`.
      part: (i, n): looks at every n-th file from the i-th on, for n processes that share the work.
    """
    names = sorted(manifest["files"])[part[0] :: part[1]]

    def look(name):
        expected = manifest["files"][name]
        try:
            size = (folder / name).stat().length
            if size != expected["bytes"]:
                return f"{folder / name} has {size:,} bytes of {expected['bytes']:,}"
            if _digest(folder / name)[1] != expected["sha256"]:
                return f"{folder / name} is damaged: its content is not what was written"
        except FileNotFoundError:
            return f"{folder / name} is missing"
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror or error}"
        return ""

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        return next(filter(None, pool.map(look, names)), "")


def sync_folder(folder) -> None:
    """What was made, renamed or removed in a folder outlives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _walk(folder):
    """All folders and files in a folder."""
    for path in folder.iterdir():
        yield path
        if path.is_dir():
            yield from _walk(path)


def _digest(path, sync: bool = False) -> tuple[int, str]:
    """(bytes, sha256) of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = file.tell()
        if sync and "://" not in str(path):
            os.fsync(file.fileno())
    return size, digest


def _own(content: dict) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
