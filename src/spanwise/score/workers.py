"""`Workers`: checks that may hang, eat memory or take their process down, in processes that can be killed.

Every check runs in a small worker process with a deadline of its own. The deadline is of processor time, so that a verdict does
not depend on what else the machine does; a check that sleeps is stopped by the clock. The workers are plain subprocesses rather
than a `multiprocessing` pool: those import the user's main script again (a training script without a `__main__` guard would train
in the worker), load torch with this package and cannot start from daemonic processes.
"""

from __future__ import annotations

import atexit
import math
import os
import queue
import subprocess
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from spanwise.errors import RewardError
from spanwise.score.worker import Request, Verdict, Worker

#: Seconds of processor time that a check may take.
DEADLINE = 5.0
#: Bytes of address space that a check may take.
MEMORY = 4 * 2**30

_W = TypeVar("_W", bound="Workers")
# Processes of a parent: closing their pipes here could send what the parent was about to send.
_inherited: list[subprocess.Popen[str]] = []
_all: weakref.WeakSet[Workers] = weakref.WeakSet()


class Workers:
    """Check requests in worker processes with a deadline.

    Neither waiting for a free worker nor the worker's start-up counts. A request that hangs or takes its process down costs its
    own item only; the worker is replaced. Works from any thread, from asyncio and from child processes. Verdicts are cached by
    request, those of hanging and crashing ones too, so that each costs its deadline once; those that something else brought about
    (a process killed from outside, one that did not start) are not.
    """

    #: The worker's script, what it runs, and what to do where that cannot start.
    script: Path
    what: str
    advice: str

    def __init__(
        self,
        *,
        workers: int | None = None,
        deadline: float | int = DEADLINE,
        memory: int = MEMORY,
        cache: int = 65_536,
    ) -> None:
        workers = cores() if workers is None else workers
        if not _is_count(workers) or not _is_positive(deadline):
            raise RewardError(
                f"A verifier needs at least one worker and a deadline above 0 s, not {workers!r} and {deadline!r} s."
            )
        self._cache: OrderedDict[Request, Verdict] = OrderedDict()
        self._cache_size = cache
        self._workers = [Worker(self.script, self.what, deadline, memory) for _ in range(workers)]
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        # The worker that was used last comes first, so that few checks start few workers.
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in reversed(self._workers):
            worker.process = None
            self._idle.put(worker)

    def __enter__(self: _W) -> _W:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, requests: Sequence[Request]) -> list[Verdict]:
        """Check every request; the verdicts come in the order of the requests."""
        wanted = list(dict.fromkeys(requests))
        with self._lock:
            known = {request: self._cache[request] for request in wanted if request in self._cache}
            for request in known:
                self._cache.move_to_end(request)
            futures: dict[Request, Future[Verdict]] = {}
            if len(known) < len(wanted):
                threads = self._running_threads()
                futures = {request: threads.submit(self._check, request) for request in wanted if request not in known}
        try:
            known.update({request: future.result() for request, future in futures.items()})
        finally:
            for future in futures.values():
                future.cancel()
        return [known[request] for request in requests]

    def close(self) -> None:
        """Stop the workers; a later check starts them again."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is None:
            return
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            process = worker.process
            if process is not None:
                process.kill()  # a check in flight then ends by itself
        threads.shutdown(wait=True)
        for worker in self._workers:
            worker.stop()

    def _disown(self) -> None:
        for worker in self._workers:
            if worker.process is not None:
                worker.process.returncode = 0  # the parent's child, not ours to wait for
                _inherited.append(worker.process)
        self._reset()

    def _running_threads(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="spanwise-worker")
        return self._threads

    def _check(self, request: Request) -> Verdict:
        worker = self._idle.get()
        try:
            verdict, lasting = worker.check(request)
        finally:
            self._idle.put(worker)
        if worker.failed and not any(each.started for each in self._workers):
            raise RewardError(f"{verdict.why}. {self.advice}")
        with self._lock:
            if lasting:
                self._cache[request] = verdict
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return verdict


def cores() -> int:
    """The cores that this process may use, shared with the other ranks of its training on this machine; at least 1."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_shared: dict[tuple[Any, ...], Workers] = {}
_shared_lock = threading.Lock()


def shared_workers(kind: Callable[..., _W], **limits: Any) -> _W:
    """The workers of a kind and these limits that the built-in rewards use, made on first use and closed when Python ends."""
    with _shared_lock:
        key = (kind, *sorted(limits.items()))
        if key not in _shared:
            if not _shared:
                atexit.register(close)
            _shared[key] = kind(**limits)
        return _shared[key]  # pyright: ignore[reportReturnType] - what the kind made


def close() -> None:
    """Stop the workers of the shared verifiers; the next check starts new ones.

    >>> close()
    """
    with _shared_lock:
        known = list(_shared.values())
        _shared.clear()
    for workers in known:
        workers.close()


def _after_fork() -> None:
    # A forked child holds the pipes of its parent's workers and none of its threads: it must start its own.
    global _shared_lock
    _shared_lock = threading.Lock()
    for workers in list(_all):
        workers._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
