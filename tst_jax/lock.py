"""One writer at a time in a run's workdir.

The file `lock` says which process writes there, and holds a beat that this process goes on
counting. In a local folder the file is also locked by the kernel (flock), which lets go when the
process dies. Where that does not reach (buckets, some network file systems, processes of other
hosts) the beat alone says whether a process lives.
"""

import datetime
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
import weakref

from etils import epath

from tst_jax.errors import UserError

_POLL_SECONDS = 1.0  # between looks at a beat
_SETTLE_SECONDS = 2.0  # until two that wrote at once see what is left
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# All contents have one length: a beat needs no new block of a full disk, no reader finds half of
# it, and a listing that a bucket's client keeps has the right size.
_BYTES = 512


class LockError(UserError):
    """The workdir belongs to another process; the message is one line."""


class Lock:
    """Holds WORKDIR/lock while a run writes there: `with Lock(workdir) as lock: ...`.

    Args:
      workdir: an existing folder, local or gs://...
      say: called with each line of progress.
      beat_seconds: between two beats of the one that holds the lock.
      watch_seconds: a beat that stands still for so long is that of a dead process; several times
        `beat_seconds`.
    """

    def __init__(self, workdir, say=print, beat_seconds: float = 10.0, watch_seconds: float = 45.0):
        self.workdir = epath.Path(workdir)
        self.path = self.workdir / "lock"
        self._local = "://" not in os.fspath(self.workdir)
        self._say, self._beat_seconds, self._watch_seconds = say, beat_seconds, watch_seconds
        self._owner = {}  # what stands in the file while it is ours
        self._fd = None  # the file that the kernel holds locked for us
        self._thread = None  # beats; None: the lock is not held
        self._lost = ""

    def acquire(self) -> None:
        """Takes the lock, that of a dead process too.

        Returns at once, or after `watch_seconds` where only the beat can tell whether the process
        that the file names is alive.

        Raises:
          LockError: a live process holds it, or the file cannot be read or written.
        """
        try:
            while not self._take():
                pass
        except OSError as error:
            raise LockError(
                f"{self.path} cannot be read or written: {error}; a run needs a folder that it may "
                "write to"
            ) from None
        self._lost, self._stop = "", threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lock")
        self._thread.start()
        _HELD.add(self)

    def check(self) -> None:
        """Costs nothing: reads what the last beat found.

        Raises:
          LockError: the file is gone or names another process.
        """
        if self._lost:
            raise LockError(f"{self._lost}; this process stops so that two do not write one folder")

    def describe(self) -> str:
        """Which process the file names; takes nothing."""
        owner = _parse(self._read())
        return f"locked by {_name(owner)} since {owner['since']}" if owner else "not locked"

    def release(self) -> None:
        """Removes the file if it is still ours. Does nothing where the lock is not held."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()  # or a last beat would bring the file back
        self._thread = None
        _HELD.discard(self)
        try:
            if not self._taken():
                self.path.unlink()  # before the kernel's lock goes, so that it is nobody else's
        except Exception as error:  # also what clients of buckets raise; the run itself is done
            self._say(f"{self.path} could not be removed ({error}); the next run will take it over")
        finally:
            self._close()

    def __enter__(self):
        self.acquire()
        return self

    def __exit__(self, *_):
        self.release()

    def _take(self) -> bool:
        """False if the file went away meanwhile: to be tried again."""
        fd = self._flock() if self._local else None
        try:
            found = self._read()
            if found is None and self._local:
                return False
            owner, watched = _parse(found), False
            let_go = fd is not None and owner and owner["host"] == socket.gethostname()
            if not found:  # nobody's: absent, or made just now
                pass
            elif let_go or _ended(owner):
                pid = owner["pid"]
                self._say(f"{self.path} was left by process {pid}, which is gone; taken over")
            elif fd is not None and not owner:
                self._say(f"{self.path} does not say which process left it; taken over")
            elif watched := self._watch(found, owner):
                self._say(f"{self.path} was left by {_name(owner)}, which is silent; taken over")
            else:
                return False
            self._owner = _this_process()
            self._write()
            if fd is None or watched:
                time.sleep(_SETTLE_SECONDS)
                if taken := self._taken():
                    raise LockError(f"{taken} at the same moment; wait until it ends, or stop it")
            self._fd, fd = fd, None
            return True
        finally:
            if fd is not None:
                os.close(fd)

    def _flock(self) -> int | None:
        """The open file, locked; None on a file system that has no flock."""
        while True:
            fd, ours = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), False
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The one before may have removed it after we opened it: then this lock is of a
                # file that nobody else will find.
                ours = _is_at(fd, self.path)
                if ours:
                    return fd
            except BlockingIOError:
                if (found := self._read()) is not None:
                    owner = _parse(found)
                    # The one that holds it now may not have written its name yet.
                    raise self._refusal(None if _ended(owner) else owner) from None
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                return None
            finally:
                if not ours:
                    os.close(fd)

    def _watch(self, found: bytes, owner) -> bool:
        """True once the file stood still for `watch_seconds`, False if it went away.

        No clock of another host is looked at, only whether the content changes.
        """
        seconds = self._watch_seconds
        self._say(
            f"{self.path} names {_name(owner)}; waiting up to {seconds:g} seconds to see whether "
            "that process lives"
        )
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(min(_POLL_SECONDS, seconds))
            now = self._read()
            if now is None:
                return False
            if now != found:
                raise self._refusal(_parse(now))
        return True

    def _refusal(self, owner) -> LockError:
        since = f" since {owner['since']}" if owner else f" ({self.path} does not say which)"
        return LockError(
            f"{self.workdir} is being written by {_name(owner)}{since}; wait until it ends, or "
            "stop it"
        )

    def _beat(self) -> None:
        while not self._lost and not self._stop.wait(self._beat_seconds):
            try:
                self._lost = self._taken()
                if not self._lost:
                    self._owner["beat"] += 1
                    self._write()
            except Exception:  # a full disk, a network that is away: the next beat may come through
                pass

    def _taken(self) -> str:
        """What became of the lock if it is no longer ours, else ""."""
        found = self._read()
        if found is None:
            return f"{self.path} was removed"
        owner = _parse(found)
        if owner and owner["token"] != self._owner["token"]:
            return f"{self.path} was taken by {_name(owner)}"
        if self._fd is not None and not _is_at(self._fd, self.path):
            return f"{self.path} was taken by another process"
        return ""  # also if nothing can be read from it: it is written anew

    def _read(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None

    def _write(self) -> None:
        content = json.dumps(self._owner).encode().ljust(_BYTES - 1) + b"\n"
        if not self._local:
            self.path.write_bytes(content)
            return
        with open(self.path, "r+b") as file:  # the very file that is locked, not a new one
            file.write(content)
            file.truncate()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _disown(self) -> None:
        """In a forked child: the lock stays the parent's, and goes with it."""
        self._thread = None
        self._close()


_HELD = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [lock._disown() for lock in list(_HELD)])


def _this_process() -> dict:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "token": secrets.token_hex(16),
        "machine": _machine(),
        "ticks": _ticks(os.getpid()),
        "beat": 0,
    }


def _parse(content: bytes | None) -> dict | None:
    """What `_this_process` gave; None if the content does not say which process wrote it."""
    try:
        owner = json.loads(content or b"")
        names = [owner["host"], owner["since"], owner["token"]]
        whole = all(isinstance(name, str) and name.isprintable() for name in names)
        whole = whole and isinstance(owner["pid"], int) and 0 < owner["pid"] < 2**31
        return owner if whole else None
    except (ValueError, TypeError, KeyError):
        return None


def _name(owner: dict | None) -> str:
    return f"process {owner['pid']} on {owner['host']}" if owner else "another process"


def _ended(owner: dict | None) -> bool:
    """Whether a process of this machine is gone; False where that cannot be known from here."""
    if not owner or owner["host"] != socket.gethostname() or owner.get("machine") != _machine():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # another user's
        return False
    return owner.get("ticks") != _ticks(owner["pid"])  # another process with its number


def _machine() -> str:
    """Of all processes whose numbers mean the same: hosts and containers may share a name."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _ticks(pid: int) -> str:
    """When a process started, by the kernel's count."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except OSError:
        return ""


def _is_at(fd: int, path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
