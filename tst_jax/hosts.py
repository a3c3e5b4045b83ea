"""Several processes as one run: how they start, agree, and stop together.

All of them run the same program on the same settings. What only one may do (write a file) the
first does, and what one of them finds wrong ends all of them.
"""

import concurrent.futures
import dataclasses
import os
import signal
import sys
import threading

import jax
import numpy as np
from jax.experimental import multihost_utils

from tst_jax import checks
from tst_jax.errors import Preempted, UserError

_POLL_SECONDS = 0.2
_DAY = 86_400  # seconds
_LONGEST = 4096  # bytes of a message that processes exchange


@dataclasses.dataclass
class HostsConfig:
    """Of runs with more than one process (`--distributed`)."""

    heartbeat_seconds: int = 100  # a process that is silent for so long ends the others

    def problems(self) -> list[str]:
        """One line for each setting that cannot work."""
        return checks.whole("hosts.heartbeat_seconds", self.heartbeat_seconds, 1, _DAY)


def initialize(cfg: HostsConfig) -> None:
    """Joins the other processes; before anything else asks jax for a device.

    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name them, or jax finds them
    itself (Slurm, Cloud TPU, GKE, Open MPI).

    Raises:
      UserError: nothing says who the others are.
    """
    given = {}
    for argument, name in ("num_processes", "JAX_NUM_PROCESSES"), ("process_id", "JAX_PROCESS_ID"):
        if name in os.environ:
            if not os.environ[name].isdigit():
                raise UserError(f"{name} is {os.environ[name]!r}; give a number")
            given[argument] = int(os.environ[name])
    try:
        jax.distributed.initialize(
            **given,
            heartbeat_timeout_seconds=cfg.heartbeat_seconds,
            shutdown_timeout_seconds=cfg.heartbeat_seconds,
        )
    except ValueError as error:
        raise UserError(
            f"--distributed: {error} Start it under Slurm, on TPU VMs or GKE, or set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from None


def leave(status: int):
    """Ends this process now, whatever its threads still do: one that compiles cannot be stopped."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def copies_problem() -> str | None:
    """One line if this process is one of several that do not know of each other."""
    for name in ("JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS"):
        if os.environ.get(name, "1") not in ("", "1"):
            return (
                f"{name} is {os.environ[name]} and --distributed is off: so many copies would "
                "write one workdir; give --distributed, or start one process"
            )
    return None


def is_first() -> bool:
    """True in the process that writes."""
    return jax.process_index() == 0


def together(function):
    """`function()` of each process; a UserError of one is a UserError of all, before any waits."""
    result, error = None, None
    try:
        result = function()
    except UserError as found:
        error = found
    if jax.process_count() == 1:
        if error:
            raise error
        return result
    texts = gathered(f"{type(error).__name__}: {error}" if error else "")
    if error:
        raise error
    for number, text in enumerate(texts):
        if text:
            raise UserError(f"process {number}: {text}")
    return result


def first_alone(function):
    """The first process calls `function()`; the others wait. Its UserError is one of all."""
    return together(lambda: function() if is_first() else None)


def agreed(number: int) -> int:
    """The first process' number, in all of them."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def gathered(text: str) -> list[str]:
    """The text of each process, cut at 4,096 bytes, in all of them."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()[:_LONGEST]
    padded = np.zeros(_LONGEST, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    found = multihost_utils.process_allgather(padded)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in np.asarray(found)]


class Preemption:
    """Tells all processes, at one and the same moment, that one of them is to end (SIGTERM).

    In a run of one process without `--distributed` this is a signal handler. Otherwise jax's
    preemption service catches the signal, and its sync point picks a moment that no process has
    passed yet. Moments are counted: all processes ask equally often.
    """

    def __init__(self):
        self._received = threading.Event()
        self._before = None
        self._asked = 0
        # jax's service exists exactly where processes have joined, one or more.
        self._service = jax.distributed.is_initialized()

    def __enter__(self):
        if not self._service and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, lambda *_: self._received.set())
        return self

    def __exit__(self, *error):
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def reached(self) -> bool:
        """Whether to end now. All processes call it at the same places of the program."""
        self._asked += 1
        if self._service:
            return multihost_utils.reached_preemption_sync_point(self._asked)
        return self._received.is_set()

    def check(self) -> None:
        """Raises Preempted where `reached` is true: for places where nothing is to be saved."""
        if self.reached():
            raise Preempted("told to end, with nothing new to save; the same command goes on")

    def watch(self, function):
        """`function()`, which may take minutes and talks to no other process.

        Raises:
          Preempted: told to end meanwhile; `function` is left to itself in a thread that ends with
            the process.
        """
        outcome = concurrent.futures.Future()

        def call():
            try:
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=call, daemon=True).start()
        together = jax.process_count() > 1
        while True:
            concurrent.futures.wait([outcome], _POLL_SECONDS)
            done = outcome.done()
            if together:  # nobody leaves before all are done, so that all ask equally often
                done = bool(np.all(multihost_utils.process_allgather(np.int32(done))))
            if done:
                return outcome.result()
            self.check()
