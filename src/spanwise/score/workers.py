"""`Workers`: checks that may hang, eat memory or take their process down, in processes that can be killed.

The deadline of a check is of processor time, so that a verdict does not depend on other load of the machine; a check that sleeps is
stopped by the clock. Workers are plain subprocesses: a `multiprocessing` pool would import the user's main script again, which may
train without a `__main__` guard, would load torch, and cannot start from daemonic processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spanwise.errors import RewardError
from spanwise.types import Status

_SCRIPT = Path(__file__).with_name("worker.py")
_START_SECONDS = 120.0
#: How often a start is tried before the request fails, and the pause between two tries.
_STARTS = 3
_PAUSE_SECONDS = 0.5
#: Held while a check is repeated whose process died: two that need much memory do not meet again.
_ALONE = threading.Lock()
#: A request to a worker.
Request = tuple[str | None, ...]
#: Seconds of processor time that a check may take.
DEADLINE = 5.0
#: Bytes of address space that a check may take.
MEMORY = 4 * 2**30

_W = TypeVar("_W", bound="Workers")
# Processes of a parent: closing their pipes here could send what the parent was about to send.
_inherited: list[subprocess.Popen[str]] = []
_all: weakref.WeakSet[Workers] = weakref.WeakSet()


class Deadlines:
    """Calls overdue actions from one thread of the process; a call that ends in time neither starts nor wakes the thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[object, tuple[float, Callable[[], object]]] = {}
        self._wakes = 0.0  # when the thread wakes next; 0: there is no thread yet

    @contextlib.contextmanager
    def over(self, seconds: float, action: Callable[[], object]) -> Iterator[None]:
        """Call an action if the block takes longer than `seconds`, and never after the block."""
        key, due = object(), time.monotonic() + seconds
        with self._changed:
            self._due[key] = due, action
            asleep, self._wakes = self._wakes, min(due, self._wakes or due)
            if not asleep:
                threading.Thread(target=self._run, name="spanwise-watch", daemon=True).start()
            elif due < asleep:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._due.pop(key, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                for key, (due, action) in list(self._due.items()):
                    if due <= time.monotonic():
                        del self._due[key]
                        action()
                # A call that has ended leaves the thread asleep until then, so that the next call need not wake it.
                planned = self._wakes if self._wakes > time.monotonic() else math.inf
                self._wakes = min((due for due, _ in self._due.values()), default=planned)
                self._changed.wait(None if self._wakes == math.inf else max(0.0, self._wakes - time.monotonic()))


DEADLINES = Deadlines()


class Verdict(NamedTuple):
    """The verdict of one check: 1.0 or 0.0 with status OK, 0.0 with BROKE, NaN with any other status; the reason in `why`.

    Example:
        >>> Verdict(Status.OK, 1.0).value
        1.0
        >>> Verdict(Status.TIMEOUT, float("nan"), "no answer after 5 s").why
        'no answer after 5 s'
    """

    status: Status
    value: float
    why: str = ""


# `worker.py` writes a line of JSON when it is ready, then one for each request: `{"value": 1}`, or `{"error": "why"}`, after the
# secret with which the request begins, as a check may write into the pipe too.
class Worker:
    """One worker process, started on first use and again after every kill."""

    def __init__(self, kind: str, what: str, harmless: Request, deadline: float, memory: int) -> None:
        self.what, self.harmless, self.deadline = what, harmless, deadline
        self.patience = 4 * deadline + 10.0  # by the clock: workers may share a core
        self.command = [kind, str(deadline), str(self.patience + 5.0), str(memory)]
        self.process: subprocess.Popen[str] | None = None
        self.started = self.failed = False

    def check(self, request: Request) -> tuple[Verdict, bool]:
        """Return the verdict, and whether it would be the same again.

        A check that hangs or dies is repeated in a fresh process. If it fails again where a harmless check succeeds, the answer
        itself broke it: then it is wrong.
        """
        verdict, failed = self._check_once(request)
        if failed:
            with _ALONE if verdict.status == Status.ERROR else contextlib.nullcontext():  # memory may be short
                verdict, failed = self._check_once(request)
                if failed and self._check_once(self.harmless)[0].status == Status.OK:
                    return Verdict(Status.BROKE, 0.0, f"{verdict.why}, twice"), True
        return verdict, not (failed or self.failed)

    def _check_once(self, request: Request) -> tuple[Verdict, bool]:
        """Return the verdict, and whether the check hung, or its process died."""
        if self.process is not None and self.process.poll() is not None:
            self.stop()  # died while idle, for instance by the out-of-memory killer: not caused by a request
        if self.process is None and (fault := self.start()):
            return Verdict(Status.ERROR, math.nan, fault), False
        secret = secrets.token_hex()
        line, late = self.ask(json.dumps([secret, *request]), self.patience)
        if late or not (line.startswith(secret) and line.endswith("\n")):
            code = self.stop()
            if late or code == -getattr(signal, "SIGPROF", 0):
                return Verdict(Status.TIMEOUT, math.nan, f"stopped after {self.deadline:g} s"), True
            return Verdict(Status.ERROR, math.nan, f"the checking process died with exit code {code}"), True
        reply = json.loads(line.removeprefix(secret))
        if "error" in reply:
            return Verdict(Status.ERROR, math.nan, reply["error"]), False
        return Verdict(Status.OK, float(reply["value"])), False

    def start(self) -> str | None:
        """Start the process, several times if need be, and return the reason of a failure; after a failure try once."""
        fault = self._start_once()
        for _ in range(0 if self.failed else _STARTS - 1):
            if fault is not None:
                time.sleep(_PAUSE_SECONDS)
                fault = self._start_once()
        self.started, self.failed = self.started or fault is None, fault is not None
        return None if fault is None else f"{self.what} cannot start in a worker process ({fault})"

    def _start_once(self) -> str | None:
        try:
            # A fixed hash seed makes sympy's orderings, hence its verdicts, the same in every worker.
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                encoding="ascii",
            )
        except OSError as error:  # no memory, or no process left
            return error.strerror or str(error)
        line, late = self.ask(None, _START_SECONDS)
        if late or not line.endswith("\n") or not json.loads(line).get("value"):
            return f"exit code {self.stop()}: {line.strip() or 'no answer'}"
        return None

    def ask(self, message: str | None, seconds: float) -> tuple[str, bool]:
        """Send a line and read a line; the second item tells whether the time ran out and the process was killed."""
        process, late = self.process, threading.Event()
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None

        def kill() -> None:
            late.set()
            process.kill()

        line = ""
        with DEADLINES.over(seconds, kill), contextlib.suppress(OSError, ValueError):
            if message is not None:
                print(message, file=process.stdin, flush=True)
            line = process.stdout.readline()
        return line, late.is_set()

    def stop(self) -> int | None:
        """End the process; return its exit status, None if there is none."""
        process, self.process = self.process, None
        if process is None:
            return None
        process.kill()
        code = process.wait()
        with contextlib.suppress(OSError), process:  # unsent bytes of a dead process
            pass
        return code


class Workers:
    """Checks requests in worker processes with a deadline, and caches verdicts; works in threads, asyncio and child processes."""

    # Verdicts of requests that hang or crash are cached too, so that each costs its deadline once. Verdicts of a process that was
    # killed from outside, or did not start, are not.
    #: The kind of check for `worker.py`, its name in a sentence, a check that succeeds unless the workers themselves are broken,
    #: and the advice if the workers cannot start.
    kind: str
    what: str
    harmless: Request
    advice: str

    def __init__(
        self, *, workers: int | None = None, deadline: float | int = DEADLINE, memory: int = MEMORY, cache: int = 65_536
    ) -> None:
        workers = cores() if workers is None else workers
        counts = isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1
        lasts = isinstance(deadline, int | float) and not isinstance(deadline, bool) and 0 < deadline < math.inf
        if not counts or not lasts:
            raise RewardError(
                f"A verifier needs at least one worker and a deadline above 0 s, not {workers!r} and {deadline!r} s."
            )
        self._cache: OrderedDict[Request, Verdict] = OrderedDict()
        self._cache_size = cache
        self._workers = [Worker(self.kind, self.what, self.harmless, deadline, memory) for _ in range(workers)]
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        # The worker that was used last comes first, so that few checks start few workers.
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in reversed(self._workers):
            self._idle.put(worker)

    def __enter__(self: _W) -> _W:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, requests: Sequence[Request]) -> list[Verdict]:
        """Check every request; the verdicts come in the order of the requests."""
        with self._lock:
            verdicts = {request: self._cache.get(request) for request in requests}
            for request, verdict in verdicts.items():
                if verdict is not None:
                    self._cache.move_to_end(request)
        missing = [request for request, verdict in verdicts.items() if verdict is None]
        if missing:
            threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="spanwise-worker")
            try:
                verdicts.update(zip(missing, threads.map(self._check, missing), strict=True))
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
        return [verdict for request in requests if (verdict := verdicts[request]) is not None]

    def close(self) -> None:
        """Stop the workers; a later check starts them again."""
        for worker in self._workers:
            process = worker.process
            if process is not None:
                process.kill()  # a check in flight then ends by itself
        for _ in self._workers:
            self._idle.get()
        for worker in reversed(self._workers):
            worker.stop()
            self._idle.put(worker)

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
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


_shared: dict[tuple[Any, ...], Workers] = {}


def shared_workers(kind: Callable[..., _W], **limits: Any) -> _W:
    """Return the shared workers of a kind with these limits, made on first use and closed when Python ends."""
    key = (kind, *sorted(limits.items()))
    if key not in _shared:
        _shared.setdefault(key, kind(**limits))
    return _shared[key]  # pyright: ignore[reportReturnType] - what the kind made


@atexit.register
def close() -> None:
    """Stop the workers of the shared verifiers; the next check starts new ones.

    >>> close()
    """
    for workers in list(_shared.values()):
        workers.close()


def _after_fork() -> None:
    # A forked child holds the pipes of its parent's workers and none of its threads: it must start its own.
    global _ALONE
    DEADLINES.__init__()
    _ALONE = threading.Lock()
    for workers in list(_all):
        for worker in workers._workers:
            if worker.process is not None:
                worker.process.returncode = 0  # a child of the parent, which this process cannot wait for
                _inherited.append(worker.process)
                worker.process = None
        workers._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
