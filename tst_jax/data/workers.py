"""Processes that share a long piece of work, and what a person sees of it meanwhile."""

import concurrent.futures
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing import connection
from typing import Any

from tqdm import tqdm

from tst_jax.errors import UserError

_COUNTERS = 3  # documents, bytes, ids
_work: Any = None  # in a worker: (function's first argument, counters, whether to end)


class Workers:
    """Calls functions in processes, or in this one if one is enough.

    Args:
      processes: to start.
      threads: of the tokenizer in each.
      shared: the first argument of all calls; sent to each process once.
    """

    def __init__(self, processes: int, threads: int, shared):
        self._shared, self._pool = shared, None
        self._set_threads(threads)
        if processes == 1:
            self._counters = [_Counter() for _ in range(_COUNTERS)]
            return
        spawn = multiprocessing.get_context("spawn")
        self._counters = [spawn.Value("q") for _ in range(_COUNTERS)]
        self._end = spawn.Value("b", lock=False)
        self._pool = concurrent.futures.ProcessPoolExecutor(
            processes, spawn, _start, (shared, self._counters, self._end)
        )

    def _set_threads(self, threads):
        # The tokenizers library asks the environment, which workers inherit.
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(threads)

    def run(self, function: Callable, calls: Iterable[tuple], watch: Callable) -> list:
        """[function(shared, *call, tick) of each call], in order.

        Args:
          function: of a module; what it gives to `tick` is added up over all processes.
          calls: arguments.
          watch: called twice a second with the sums, and with how many calls are done.
        Raises:
          UserError: of a call, or that a process was killed; the others end at their next tick.
        """
        calls = list(calls)
        if self._pool is None:
            results = []
            for number, call in enumerate(calls):
                tick = _ticker(self._counters, lambda sums, n=number: watch(sums, n))
                results.append(function(self._shared, *call, tick))
            watch(self._sums(), len(calls))
            return results
        futures = [self._pool.submit(_call, function, call) for call in calls]
        left = set(futures)
        try:
            while left:
                done, left = concurrent.futures.wait(left, 0.5, concurrent.futures.FIRST_EXCEPTION)
                watch(self._sums(), len(calls) - len(left))
                for future in done:
                    future.result()
            return [future.result() for future in futures]
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "a process was killed, perhaps for want of memory; the same command goes on, with "
                "fewer --processes it needs less"
            ) from None

    def _sums(self):
        return [counter.value for counter in self._counters]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._pool is not None:
            # Calls that run, and some that the pool has queued, are beyond its cancelling.
            self._end.value = error[0] is not None
            self._pool.shutdown(cancel_futures=True)


class _Counter:
    """A counter of one process, like a shared one."""

    value = 0

    def get_lock(self):
        return threading.RLock()


def _ticker(counters, then):
    def tick(*numbers):
        for counter, number in zip(counters, numbers, strict=True):
            with counter.get_lock():
                counter.value += number
        then([counter.value for counter in counters])

    return tick


def _start(shared, counters, end):
    global _work
    _work = shared, counters, end

    def end_with_parent():
        # A killed command would leave its workers waiting for ever.
        connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _call(function, call):
    shared, counters, end = _work

    def check(sums=None):
        if end.value:
            raise UserError("ended, for another process failed")

    check()
    return function(shared, *call, _ticker(counters, check))


class Progress:
    """A bar with rate and time left on a terminal; elsewhere (a log) a line every ten seconds.

    Args:
      title: in front.
      total: bytes to do.
      unit: of what `update` counts beside them, for the rate.
    """

    def __init__(self, title: str, total: int, unit: str = "tokens", seconds: float = 10.0):
        self._title, self._total, self._unit, self._seconds = title, max(total, 1), unit, seconds
        self._began = self._last = time.monotonic()
        self._first = None  # what was done before, by a command that was killed
        self._bar = None
        if sys.stderr.isatty():
            options = dict(total=total, unit="B", unit_scale=True, dynamic_ncols=True)
            self._bar = tqdm(desc=title, **options)
        else:
            print(title, flush=True)

    def update(self, done: int, count: int = 0) -> None:
        """`done` bytes of the total are done, and `count` units."""
        now = time.monotonic()
        self._first = self._first or (now, done, count)
        began, before, counted = self._first
        seconds = max(now - began, 1e-9)
        rate = f"{_short((count - counted) / seconds).rstrip()} {self._unit}/s" if count else ""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)
            self._bar.set_postfix_str(rate)
        elif now - self._last >= self._seconds:
            self._last = now
            parts = [f"{self._title}: {100 * done // self._total}% of {_short(self._total)}B"]
            parts += [rate] if rate else []
            if done > before:
                left = seconds / (done - before) * (self._total - done)
                parts.append(f"{int(left // 60)}:{int(left % 60):02d} left")
            print(", ".join(parts), flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def _short(number: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f} "
