"""Run checks that may hang, crash or use up memory in worker processes that can be killed.

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
import secrets
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spanwise.errors import RewardError, check_number
from spanwise.types import Status

_SCRIPT = Path(__file__).with_name("worker.py")
_START_SECONDS = 120.0
#: How often a worker is started before its request fails.
_STARTS = 3
#: Seconds to wait before a worker is started again.
_PAUSE_SECONDS = 0.5
#: A lock for repeating a failed check, so that two checks that need much memory do not run at once.
_REPEAT_LOCK = threading.Lock()
#: The arguments of one check, such as (gold, answer).
Request = tuple[str | None, ...]
#: Seconds of processor time that a check may take.
DEADLINE = 5.0
#: Bytes of address space that a check may take.
MEMORY = 4 * 2**30
#: For each kind of check: its name, a request to test the worker, and advice if the worker cannot start.
KINDS: Mapping[str, tuple[str, Request, str]] = {
    "math": ("Math-Verify", ("1/2", "1/2"), "Without Math-Verify no answer can be compared; set verify: exact."),
    "schema": ("jsonschema", ("{}", "{}"), "Without jsonschema a pattern, a $ref or uniqueItems cannot be checked."),
    "code": ("Python", ("", None), "Without a worker process no code can be run."),
}

_W = TypeVar("_W", bound="Workers")
# A forked child keeps references to the parent's worker processes, because closing their pipes could flush buffers.
_inherited: list[subprocess.Popen[str]] = []
_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


class Deadlines:
    """Call an action if a `with` block takes too long. One thread watches all such blocks."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: dict[object, tuple[float, Callable[[], object]]] = {}
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def over(self, seconds: float, action: Callable[[], object]) -> Iterator[None]:
        """Call an action when the `with` block has taken `seconds`. Never call it after the block."""
        action_key = object()
        with self._changed:
            self._due[action_key] = time.monotonic() + seconds, action
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spanwise-watch", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._due.pop(action_key, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                for action_key, (due_time, action) in list(self._due.items()):
                    if due_time <= time.monotonic():
                        del self._due[action_key]
                        action()
                next_due_time = min((due_time for due_time, _ in self._due.values()), default=math.inf)
                self._changed.wait(min(max(0.0, next_due_time - time.monotonic()), threading.TIMEOUT_MAX))


DEADLINES = Deadlines()


class Verdict(NamedTuple):
    """The result of one check: its status, its value, and the reason if it failed.

    Example:
        >>> Verdict(Status.TIMEOUT, float("nan"), "no answer after 5 s").why
        'no answer after 5 s'
    """

    status: Status
    value: float  # 1.0 if the check passed, 0.0 if it failed or broke twice, NaN if it gave no result
    why: str = ""


# Each reply begins with a secret from its request: the checked code may write into the same pipe.
class Worker:
    """One worker process, started on first use and again after every kill."""

    def __init__(self, kind: str, what: str, harmless: Request, deadline: float, memory: int) -> None:
        self.what, self.harmless, self.deadline = what, harmless, deadline
        # Workers may share a core, so a check may take more clock time than processor time.
        self.clock_deadline = 4 * deadline + 10.0
        self.command = [kind, str(deadline), str(self.clock_deadline + 5.0), str(memory)]
        self.process: subprocess.Popen[str] | None = None
        self.started = self.failed = False

    def check(self, request: Request) -> tuple[Verdict, bool]:
        """Have the worker check an answer, twice if the first check fails. Return the verdict, and whether to cache it."""
        verdict, has_failed = self._check_once(request)
        if has_failed:
            # If a check fails in two processes but a harmless check succeeds, the answer is to blame.
            with _REPEAT_LOCK if verdict.status == Status.ERROR else contextlib.nullcontext():
                verdict, has_failed = self._check_once(request)
                if has_failed and self._check_once(self.harmless)[0].status == Status.OK:
                    return Verdict(Status.BROKE, 0.0, f"{verdict.why}, twice"), True
        return verdict, not (has_failed or self.failed)

    def _check_once(self, request: Request) -> tuple[Verdict, bool]:
        """Send a request to the worker process once. Return the verdict, and whether the check hung or its process died."""
        if self.process is not None and self.process.poll() is not None:
            self.stop()  # the process died while idle, so no request is to blame
        if self.process is None and (start_fault := self.start()):
            return Verdict(Status.ERROR, math.nan, start_fault), False
        reply_secret = secrets.token_hex()
        reply_line, is_late = self.ask(json.dumps([reply_secret, *request]), self.clock_deadline)
        if is_late or not (reply_line.startswith(reply_secret) and reply_line.endswith("\n")):
            exit_code = self.stop()
            if is_late or exit_code == -getattr(signal, "SIGPROF", 0):
                return Verdict(Status.TIMEOUT, math.nan, f"stopped after {self.deadline:g} s"), True
            return Verdict(Status.ERROR, math.nan, f"the checking process died with exit code {exit_code}"), True
        worker_reply = json.loads(reply_line.removeprefix(reply_secret))
        if "error" in worker_reply:
            return Verdict(Status.ERROR, math.nan, worker_reply["error"]), False
        return Verdict(Status.OK, float(worker_reply["value"])), False

    def start(self) -> str | None:
        """Start the worker process in up to three tries (one if it failed before). If all fail, return the reason."""
        tries_left = 1 if self.failed else _STARTS
        while (start_fault := self._start_once()) is not None and (tries_left := tries_left - 1):
            time.sleep(_PAUSE_SECONDS)
        self.started, self.failed = self.started or start_fault is None, start_fault is not None
        return f"{self.what} cannot start in a worker process ({start_fault})" if self.failed else None

    def _start_once(self) -> str | None:
        try:
            # A fixed hash seed makes sympy give the same verdicts in every worker.
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_SCRIPT), *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                encoding="ascii",
            )
        except OSError as error:  # the machine is out of memory or processes
            return error.strerror or str(error)
        first_line, is_late = self.ask(None, _START_SECONDS)
        if is_late or not first_line.endswith("\n") or not json.loads(first_line).get("value"):
            return f"exit code {self.stop()}: {first_line.strip() or 'no answer'}"
        return None

    def ask(self, message: str | None, seconds: float) -> tuple[str, bool]:
        """Send a line to the process and return its reply. Also return whether it ran out of time."""
        worker_process: Any = self.process  # the caller has started the process, so it is not None
        reply_line = ""
        start_time = time.monotonic()
        with DEADLINES.over(seconds, worker_process.kill), contextlib.suppress(OSError, ValueError):
            if message is not None:
                print(message, file=worker_process.stdin, flush=True)
            reply_line = worker_process.stdout.readline()
        return reply_line, time.monotonic() - start_time >= seconds

    def stop(self) -> int | None:
        """End the worker process and return its exit code. Return None if no process runs."""
        worker_process, self.process = self.process, None
        if worker_process is None:
            return None
        worker_process.kill()
        with contextlib.suppress(OSError), worker_process:  # `Popen.__exit__` closes the pipes and waits for the process
            pass
        return worker_process.returncode


def check_limits(options: Mapping[str, Any]) -> None:
    """Refuse an impossible number of worker processes, or an impossible deadline."""
    check_number("The option 'workers'", 1 if options["workers"] is None else options["workers"], least=1.0, whole=True)
    check_number("The option 'deadline' (seconds)", options["deadline"], above=0.0)


class Workers:
    """Runs checks in worker processes with a deadline, and caches verdicts. Threads, asyncio and forks may share it."""

    kind: str  # the kind of check, a key of `KINDS`

    def __init__(
        self, *, workers: int | None = None, deadline: float | int = DEADLINE, memory: int = MEMORY, cache: int = 65_536
    ) -> None:
        workers = cores() if workers is None else workers
        check_limits({"workers": workers, "deadline": deadline})
        self._cache: OrderedDict[Request, Verdict] = OrderedDict()
        self._cache_size = cache
        check_name, harmless_request, self._advice = KINDS[self.kind]
        self._workers = [Worker(self.kind, check_name, harmless_request, deadline, memory) for _ in range(workers)]
        self._reset()
        _all_workers.add(self)

    def _reset(self) -> None:
        self._lock, self._threads = threading.Lock(), ThreadPoolExecutor(len(self._workers), "spanwise-worker")
        # Taking the worker that was used last keeps the number of workers small.
        self._idle = self._workers[::-1]

    def __enter__(self: _W) -> _W:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, requests: Sequence[Request]) -> list[Verdict]:
        """Check every request, and return the verdicts in order."""
        with self._lock:
            verdict_by_request = {request: self._cache.get(request) for request in requests}
            for request, verdict in verdict_by_request.items():
                if verdict is not None:
                    self._cache.move_to_end(request)
        unanswered_requests = [request for request, verdict in verdict_by_request.items() if verdict is None]
        verdict_by_request.update(zip(unanswered_requests, self._threads.map(self._check, unanswered_requests), strict=True))
        return [verdict for request in requests if (verdict := verdict_by_request[request]) is not None]

    def close(self) -> None:
        """Stop the workers. A later check starts them again."""
        for worker in self._workers:
            if (worker_process := worker.process) is not None:
                worker_process.kill()  # a thread that waits for the process's reply then stops
        self._threads.shutdown()
        for worker in self._workers:
            worker.stop()
        self._reset()

    def _check(self, request: Request) -> Verdict:
        worker = self._idle.pop()
        try:
            verdict, is_repeatable = worker.check(request)
        finally:
            self._idle.append(worker)
        if worker.failed and not any(other_worker.started for other_worker in self._workers):
            raise RewardError(f"{verdict.why}. {self._advice}")
        with self._lock:
            if is_repeatable:
                self._cache[request] = verdict
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return verdict


def cores() -> int:
    """Return how many cores this process may use. The ranks of a training on one machine divide the cores."""
    core_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, core_count // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


_shared: dict[tuple[Any, ...], Workers] = {}


def shared_workers(worker_class: type[_W], **limits: Any) -> _W:
    """Return the `Workers` object that callers with the same limits share. It is closed when Python ends."""
    workers_key = (worker_class, *sorted(limits.items()))
    if workers_key not in _shared:
        _shared.setdefault(workers_key, worker_class(**limits))
    return _shared[workers_key]  # pyright: ignore[reportReturnType] - the workers are of the class in the key


@atexit.register
def close() -> None:
    """Stop all shared worker processes. The next check starts new ones.

    >>> close()
    """
    for workers in list(_shared.values()):
        workers.close()


def _after_fork() -> None:
    """Drop the parent's worker processes after a fork. The child holds their pipes, but none of the threads."""
    global _REPEAT_LOCK
    DEADLINES.__init__()
    _REPEAT_LOCK = threading.Lock()
    for worker_pool in list(_all_workers):
        for worker in worker_pool._workers:
            if worker.process is not None:
                worker.process.returncode = 0  # a child cannot wait for its parent's processes
                _inherited.append(worker.process)
                worker.process = None
        worker_pool._reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
