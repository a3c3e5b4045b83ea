"""One writer at a time: real processes where the kernel decides, a false clock where time does."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest
from etils import epath
from fsspec.implementations.memory import MemoryFileSystem

from tst_jax import lock as lock_lib
from tst_jax.lock import Lock, LockError

HOLD = """
import signal, sys
from tst_jax.lock import Lock
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with Lock(sys.argv[1]) as lock:
    print("held", flush=True)
    sys.stdin.read()
    lock.check()
"""
RACE = """
import os, sys, time
from tst_jax.lock import Lock, LockError
for _ in range(10):
    lock = Lock(sys.argv[1])
    while True:
        try:
            lock.acquire()
            break
        except LockError:
            time.sleep(0.001)
    os.close(os.open(sys.argv[1] + "/inside", os.O_CREAT | os.O_EXCL))  # fails if one is inside
    time.sleep(0.001)
    os.unlink(sys.argv[1] + "/inside")
    lock.release()
print("done")
"""
LEAVE = """
import os, subprocess, sys, time
from tst_jax.lock import Lock
lock = Lock(sys.argv[1])
lock.acquire()
quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
started = subprocess.Popen(["sleep", "600"], close_fds=False, **quiet).pid
forked = os.fork()
if not forked:
    lock.release()  # the parent's: stays
    print(f"{os.getpid()}\\n", end="", flush=True)  # whole, whoever writes beside it
    time.sleep(600)
print(f"{started}\\n", end="", flush=True)
time.sleep(600)
"""


def start(code, *arguments):
    how = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    how |= dict(text=True, start_new_session=True)
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], **how)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path until its stdin is closed."""
    process = start(HOLD, tmp_path)
    assert process.stdout.readline() == "held\n", process.stderr.read()
    yield process
    process.kill()
    process.wait()
    for pipe in process.stdin, process.stdout, process.stderr:
        pipe.close()


class Clock:
    """In place of `time`: sleeping takes no time, and may do something."""

    def __init__(self, during=lambda: None):
        self.now, self.during = 0.0, during

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.during()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(lock_lib, "time", clock)
    return clock


@pytest.fixture
def bucket(tmp_path):
    """A folder of gs://, which lies in memory."""

    class Bucket(MemoryFileSystem):
        protocol = ("gcs", "gs")

    fsspec.register_implementation("gcs", Bucket, clobber=True)
    return epath.Path("gs://bucket") / tmp_path.relative_to("/")  # of this test alone


def wait_for(condition):
    """Until it holds; what never comes fails."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def write(folder, **changes):
    """A lock file of this very process, except for the changes."""
    owner = lock_lib._this_process() | changes
    (epath.Path(folder) / "lock").write_bytes(json.dumps(owner).encode().ljust(511) + b"\n")
    return owner


def read(folder):
    return json.loads((epath.Path(folder) / "lock").read_bytes())


def refused(workdir, **options):
    """The line of a lock that must not be had."""
    with pytest.raises(LockError) as caught:
        Lock(workdir, **options).acquire()
    line = str(caught.value)
    assert "\n" not in line and str(workdir) in line
    return line


def gone_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_needs_little():
    code = (
        "import sys, tst_jax.lock; "
        "print(*{name.split('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"etils", "tst_jax"} <= set(found.stdout.split())
    assert not {"jax", "numpy", "flax", "orbax", "fsspec"} & set(found.stdout.split())


def test_a_second_process_is_refused_while_the_first_lives(tmp_path, holder):
    before = (tmp_path / "lock").read_bytes()
    for _ in range(2):
        line = refused(tmp_path)
        assert f"process {holder.pid} on {socket.gethostname()} since 20" in line
        assert line.endswith("wait until it ends, or stop it")
    assert (tmp_path / "lock").read_bytes() == before
    output, errors = holder.communicate()
    assert (holder.returncode, output, errors) == (0, "", "")
    assert not (tmp_path / "lock").exists()


def test_two_locks_of_one_process(tmp_path):
    with Lock(tmp_path):
        assert f"process {os.getpid()} on" in refused(tmp_path)
        assert (tmp_path / "lock").exists()
    with Lock(tmp_path):
        pass


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, holder, clock):
    holder.kill()
    holder.wait()
    said = []
    with Lock(tmp_path, said.append) as lock:
        gone = f"{tmp_path}/lock was left by process {holder.pid}, which is gone; taken over"
        assert said == [gone] and clock.now == 0
        assert read(tmp_path)["pid"] == os.getpid()
        lock.check()


def test_release_removes_the_file(tmp_path, holder):
    holder.send_signal(signal.SIGTERM)
    assert holder.wait() == 0, holder.stderr.read()
    assert list(tmp_path.iterdir()) == []
    said = []
    lock = Lock(tmp_path, said.append)
    lock.release()
    for _ in range(2):
        lock.acquire()
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        lock.release()
        assert list(tmp_path.iterdir()) == []
        write(tmp_path, pid=1)
        lock.release()
        assert read(tmp_path)["pid"] == 1
        (tmp_path / "lock").unlink()
    assert said == []


def test_of_many_one_has_it(tmp_path, holder):
    holder.kill()
    holder.wait()
    racing = [start(RACE, tmp_path) for _ in range(8)]
    results = [process.communicate() for process in racing]
    assert [errors for _, errors in results] == [""] * 8
    said = "".join(text for text, _ in results)
    assert said.count("done") == 8 and said.count("taken over") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_removed_between_opening_and_locking(tmp_path, monkeypatch):
    flock, calls = lock_lib.fcntl.flock, []

    def late(fd, how):
        calls.append(fd)
        if len(calls) == 1:
            (tmp_path / "lock").unlink()
        if len(calls) == 2:  # and another made in its place
            (tmp_path / "lock").rename(tmp_path / "old")
            (tmp_path / "lock").touch()
        flock(fd, how)

    monkeypatch.setattr(lock_lib.fcntl, "flock", late)
    with Lock(tmp_path):
        assert len(calls) == 3 and read(tmp_path)["pid"] == os.getpid()
        assert f"process {os.getpid()} on" in refused(tmp_path)


def test_a_file_removed_after_locking(tmp_path, monkeypatch):
    """By hand, or by a host that the kernel's lock does not reach."""
    is_at, calls = lock_lib._is_at, []

    def before(*arguments):
        found = is_at(*arguments)
        calls.append(len(calls) or (tmp_path / "lock").unlink())
        return found

    monkeypatch.setattr(lock_lib, "_is_at", before)
    with Lock(tmp_path) as lock:
        assert len(calls) == 2 and read(tmp_path)["pid"] == os.getpid()
        lock.check()


def test_a_file_removed_before_it_is_read(tmp_path, monkeypatch):
    """The holder removes it, and lets go after that."""
    held = Lock(tmp_path)
    held.acquire()
    flock, calls = lock_lib.fcntl.flock, []

    def late(fd, how):
        calls.append(fd)
        try:
            flock(fd, how)
        finally:
            if len(calls) == 1:
                held.release()

    monkeypatch.setattr(lock_lib.fcntl, "flock", late)
    with Lock(tmp_path):
        assert len(calls) == 2 and read(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("content", [b"", b'{"host": "a', b"5", b"\xff", b'{"pid": 1}'])
def test_a_held_file_that_does_not_say_by_whom(tmp_path, holder, content):
    (tmp_path / "lock").write_bytes(content)
    assert f"another process ({tmp_path}/lock does not say which)" in refused(tmp_path)


def test_the_dead_is_not_named_for_the_living(tmp_path, holder):
    """Who has just got the lock may not have written its name."""
    write(tmp_path, pid=gone_pid())
    assert "another process" in refused(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"machine": "before it was started again"}])
def test_what_the_kernel_let_go_is_of_a_dead_process(tmp_path, clock, changes):
    """Whatever process of this host has its number now: here this very one."""
    write(tmp_path, **changes)
    said = []
    with Lock(tmp_path, said.append):
        assert len(said) == 1 and "which is gone" in said[0] and clock.now == 0


@pytest.mark.parametrize(
    "content", [b'{"host": "a', b"5", b"\xff\x00", b'{"pid": 1}', b"[]", b"x" * 2000]
)
def test_a_half_written_file_is_taken_over(tmp_path, clock, content):
    (tmp_path / "lock").write_bytes(content)
    said = []
    with Lock(tmp_path, said.append):
        assert said == [f"{tmp_path}/lock does not say which process left it; taken over"]
        assert read(tmp_path)["pid"] == os.getpid() and clock.now == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 0},
        {"pid": "1"},
        {"pid": 1.5},
        {"pid": 2**40},
        {"host": "a\nb"},
        {"since": None},
        {"token": 3},
    ],
)
def test_a_file_with_nonsense_in_it_is_taken_over(tmp_path, changes):
    write(tmp_path, **changes)
    said = []
    with Lock(tmp_path, said.append):
        assert said == [f"{tmp_path}/lock does not say which process left it; taken over"]


def test_the_silent_of_another_host_is_taken_over(tmp_path, clock):
    write(tmp_path, host="elsewhere", pid=7)
    said = []
    with Lock(tmp_path, said.append, watch_seconds=5):
        assert clock.now == 5 + lock_lib._SETTLE_SECONDS
        assert said == [
            f"{tmp_path}/lock names process 7 on elsewhere; waiting up to 5 seconds to see whether "
            "that process lives",
            f"{tmp_path}/lock was left by process 7 on elsewhere, which is silent; taken over",
        ]
        assert read(tmp_path)["host"] == socket.gethostname()


def test_the_living_of_another_host_is_left_alone(tmp_path, clock):
    def beat():
        if clock.now == 3:
            write(tmp_path, **owner | {"beat": 1})

    owner, clock.during = write(tmp_path, host="elsewhere", pid=7), beat
    line = refused(tmp_path, watch_seconds=5)
    assert f"process 7 on elsewhere since {owner['since']}" in line and clock.now == 3
    assert read(tmp_path) == owner | {"beat": 1}


def test_the_other_host_lets_go_meanwhile(tmp_path, clock):
    write(tmp_path, host="elsewhere")
    clock.during = lambda: (tmp_path / "lock").unlink(missing_ok=True)
    with Lock(tmp_path, watch_seconds=5) as lock:
        assert clock.now == 1 and read(tmp_path)["pid"] == os.getpid()
        lock.check()


def test_two_hosts_take_over_at_once(tmp_path, clock):
    def other():
        if clock.now > 5:
            write(tmp_path, host="third")

    write(tmp_path, host="elsewhere")
    clock.during = other
    line = refused(tmp_path, watch_seconds=5)
    assert f"was taken by process {os.getpid()} on third at the same moment" in line
    assert read(tmp_path)["host"] == "third"


def test_an_interrupted_watch(tmp_path, clock):
    def interrupt():
        raise KeyboardInterrupt

    owner = write(tmp_path, host="elsewhere")
    clock.during = interrupt
    with pytest.raises(KeyboardInterrupt):
        Lock(tmp_path).acquire()
    assert read(tmp_path) == owner
    clock.during = lambda: None
    with Lock(tmp_path):  # the kernel's lock went, too
        pass


@pytest.mark.parametrize("code", ["ENOLCK", "ENOTSUP", "EOPNOTSUPP", "ENOSYS"])
def test_a_file_system_without_flock(tmp_path, clock, monkeypatch, code):
    def flock(*_):
        raise OSError(getattr(errno, code), code)

    monkeypatch.setattr(lock_lib.fcntl, "flock", flock)
    open_files = len(os.listdir("/proc/self/fd"))
    with Lock(tmp_path, beat_seconds=0.01) as lock:
        assert clock.now == lock_lib._SETTLE_SECONDS
        clock.during = beaten(tmp_path)
        assert f"process {os.getpid()} on" in refused(tmp_path)
        lock.check()
    assert list(tmp_path.iterdir()) == []
    said, clock.now, clock.during = [], 0, lambda: None
    write(tmp_path, host="elsewhere")
    with Lock(tmp_path, said.append, watch_seconds=5):
        assert len(said) == 2 and clock.now == 5 + lock_lib._SETTLE_SECONDS
    write(tmp_path, pid=gone_pid())
    with Lock(tmp_path, said.append):
        assert said[2].endswith("which is gone; taken over")
    assert len(os.listdir("/proc/self/fd")) == open_files


def beaten(folder):
    """Waits for a beat, whatever the clock says."""
    before = read(folder)
    return lambda: wait_for(lambda: read(folder)["beat"] > before["beat"])


def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    assert "cannot be read or written: " in refused(tmp_path / "absent")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Lock, "_write", full)
        assert "No space left on device" in refused(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(lock_lib.fcntl, "flock", full)
        assert "No space left on device" in refused(tmp_path)
    with Lock(tmp_path):  # neither kept the kernel's lock
        pass


def test_beats_go_into_the_very_file(tmp_path):
    with Lock(tmp_path, beat_seconds=0.005) as lock:
        first, inode = read(tmp_path), (tmp_path / "lock").stat().st_ino
        (tmp_path / "lock").write_bytes(b'{"host"')  # as by a disk that is full
        wait_for(lambda: (tmp_path / "lock").stat().st_size > 7 and read(tmp_path)["beat"] > 3)
        assert read(tmp_path) | {"beat": 0} == first
        text = (tmp_path / "lock").read_bytes()
        assert (tmp_path / "lock").stat().st_ino == inode
        assert len(text) == 512 and text.count(b"\n") == 1 and text.endswith(b"\n")
        (tmp_path / "lock").write_bytes(b"x" * 2000)
        wait_for(lambda: (tmp_path / "lock").stat().st_size == 512)
        lock.check()


def test_a_full_disk_does_not_lose_the_lock(tmp_path, monkeypatch):
    written, failed = Lock._write, []

    def full(self):
        if self._owner["beat"] and len(failed) < 3:
            failed.append(1)
            raise OSError(errno.ENOSPC, "No space left on device")
        written(self)

    monkeypatch.setattr(Lock, "_write", full)
    with Lock(tmp_path, beat_seconds=0.005) as lock:
        wait_for(lambda: read(tmp_path)["beat"] > 3)
        assert len(failed) == 3
        lock.check()
    assert list(tmp_path.iterdir()) == []


def test_who_loses_the_lock_is_told_so(tmp_path, bucket, clock):
    for workdir in tmp_path, bucket:
        with Lock(workdir, beat_seconds=0.005) as lock:
            other = write(workdir, host="elsewhere", pid=7)
            wait_for(lambda: lock._lost)
            with pytest.raises(LockError) as caught:
                lock.check()
            assert str(caught.value) == (
                f"{workdir}/lock was taken by process 7 on elsewhere; this process stops so that "
                "two do not write one folder"
            )
        assert read(workdir) == other  # neither a beat nor the release touches it
        (epath.Path(workdir) / "lock").unlink()
        with Lock(workdir, beat_seconds=0.005) as lock:
            lock.check()
            (epath.Path(workdir) / "lock").unlink()
            wait_for(lambda: lock._lost)
            with pytest.raises(LockError, match="lock was removed; this process stops"):
                lock.check()
        assert not (epath.Path(workdir) / "lock").exists()
        with lock:
            lock.check()


def test_a_file_in_the_place_of_ours_is_not_ours(tmp_path):
    """Removed by hand, then made by another process that has not written its name yet."""
    with Lock(tmp_path, beat_seconds=0.005) as lock:
        (tmp_path / "new").touch()
        (tmp_path / "new").replace(tmp_path / "lock")
        wait_for(lambda: lock._lost)
        with pytest.raises(LockError, match="was taken by another process; this"):
            lock.check()
    assert (tmp_path / "lock").read_bytes() == b""


def test_children_do_not_keep_the_lock(tmp_path):
    parent = start(LEAVE, tmp_path)
    try:
        children = [int(parent.stdout.readline()) for _ in range(2)]
        assert f"process {parent.pid} on" in refused(tmp_path)
        parent.kill()
        parent.wait()
        said = []
        with Lock(tmp_path, said.append):
            assert said[0].endswith(f"process {parent.pid}, which is gone; taken over")
        assert all(Path(f"/proc/{child}").exists() for child in children)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def test_a_bucket(bucket, clock):
    with Lock(bucket, beat_seconds=0.01) as lock:
        assert read(bucket)["pid"] == os.getpid() and clock.now == lock_lib._SETTLE_SECONDS
        clock.during = beaten(bucket)
        assert f"{bucket} is being written by process {os.getpid()} on" in refused(bucket)
        lock.check()
        clock.during = lambda: None
    assert not (bucket / "lock").exists()


@pytest.mark.parametrize(
    "changes, waits",
    [
        ({"pid": 0}, True),  # unknown
        ({"host": "elsewhere"}, True),
        ({}, True),  # this very process, which does not beat
        ({"machine": "another of this name", "ticks": "1"}, True),
        ({"ticks": "1"}, False),  # another process had this number
        ({"pid": None}, False),  # gone
    ],
)
def test_a_dead_process_in_a_bucket(bucket, clock, changes, waits):
    if "pid" in changes and changes["pid"] is None:
        changes = {"pid": gone_pid()}
    write(bucket, **changes)
    said = []
    with Lock(bucket, said.append, watch_seconds=5):
        assert clock.now == 5 * waits + lock_lib._SETTLE_SECONDS
        assert len(said) == 1 + waits and said[-1].endswith("; taken over")
        assert ("which is gone" in said[-1]) != waits
        assert read(bucket)["pid"] == os.getpid()


def test_a_half_written_file_in_a_bucket(bucket, clock):
    (bucket / "lock").write_bytes(b'{"host')
    clock.during = lambda: clock.now == 2 and (bucket / "lock").write_bytes(b'{"hos')
    assert "another process" in refused(bucket, watch_seconds=5)
    assert clock.now == 2 and (bucket / "lock").read_bytes() == b'{"hos'


def test_two_at_once_in_a_bucket(bucket, clock):
    clock.during = lambda: write(bucket, host="elsewhere", pid=7)
    assert "was taken by process 7 on elsewhere at the same moment" in refused(bucket)
    assert read(bucket)["host"] == "elsewhere"


def test_the_last_beat_comes_before_the_end(bucket, clock, monkeypatch):
    written, begun = Lock._write, threading.Event()

    def slow(self):
        if self._owner["beat"]:
            begun.set()
            time.sleep(0.2)
        written(self)

    monkeypatch.setattr(Lock, "_write", slow)
    with Lock(bucket, beat_seconds=0.001) as lock:
        beating = lock._thread
        assert begun.wait(30)
    beating.join()
    assert not (bucket / "lock").exists()


def test_a_bucket_that_cannot_be_reached_at_the_end(bucket, clock, monkeypatch):
    said = []
    lock = Lock(bucket, said.append)
    lock.acquire()

    def away(*_):
        raise RuntimeError("no network")

    monkeypatch.setattr(Lock, "_read", away)
    lock.release()
    assert said == [
        f"{bucket}/lock could not be removed (no network); the next run will take it over"
    ]
