"""`MathVerifier`: equality of mathematical answers, checked in processes that can be killed.

Math-Verify may hang, eat memory or take its process down on a hostile answer, and its own timeout works in a main thread only.
So every check runs in a small worker process with a deadline of its own. The deadline is of processor time, so that a verdict does
not depend on what else the machine does; a check that sleeps is stopped by the clock. The workers are plain subprocesses rather
than a `multiprocessing` pool: those import the user's main script again (a training script without a `__main__` guard would train
in the worker), load torch with this package and cannot start from daemonic processes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from spanwise.errors import DataError, RewardError
from spanwise.types import Status

_WORKER = Path(__file__).with_name("math_worker.py")
_START_SECONDS = 120.0
#: Seconds of processor time that a check may take.
DEADLINE = 5.0
#: How often a start is tried before it costs the item that needs it, and the pause between two tries.
_STARTS = 3
_PAUSE_SECONDS = 0.5
#: What the system sends when it has no memory left, and whoever ends processes: not the doing of an answer.
_FROM_OUTSIDE = (-9, -15)
_UNREADABLE = "the gold answer cannot be read as mathematics"


class Verdict(NamedTuple):
    """What one check said: 1.0 or 0.0 with status OK, NaN with any other status and the reason in `why`."""

    status: Status
    value: float
    why: str = ""


class _Worker:
    """One worker process, started on first use and again after every kill."""

    def __init__(self, deadline: float, memory: int) -> None:
        self.deadline = deadline
        self.patience = 4 * deadline + 10.0  # by the clock: workers may share a core
        self.memory = memory
        self.process: subprocess.Popen[str] | None = None
        self.started = self.failed = False

    def check(self, gold: str, answer: str) -> tuple[Verdict, bool]:
        """The verdict, and whether it is the answer's own doing, so that it would be the same again."""
        if self.process is not None and self.process.poll() is not None:
            self.stop()  # died while idle, for instance of the out-of-memory killer: nobody's fault
        if self.process is None and (fault := self.start()):
            return Verdict(Status.ERROR, float("nan"), fault), False
        line, late = self.ask(json.dumps({"gold": gold, "answer": answer}), self.patience)
        if late or not line.endswith("\n"):
            code = self.stop()
            if late or code == -getattr(signal, "SIGPROF", 0):
                return Verdict(Status.TIMEOUT, float("nan"), f"stopped after {self.deadline:g} s"), True
            died = Verdict(Status.ERROR, float("nan"), f"the checking process died with exit code {code}")
            return died, code not in _FROM_OUTSIDE
        reply = json.loads(line)
        if "error" in reply:
            return Verdict(Status.ERROR, float("nan"), reply["error"]), True
        if reply["equal"] is None:
            return Verdict(Status.ERROR, float("nan"), _UNREADABLE), True
        return Verdict(Status.OK, float(reply["equal"])), True

    def start(self) -> str | None:
        """Start the process, several times if need be; what is wrong if it does not. After such a failure one try is enough."""
        fault = None
        for tried in range(1 if self.failed else _STARTS):
            if tried:
                time.sleep(_PAUSE_SECONDS)
            fault = self._start_once()
            if fault is None:
                self.started, self.failed = True, False
                return None
        self.failed = True
        return f"Math-Verify cannot start in a worker process ({fault})"

    def _start_once(self) -> str | None:
        limits = (self.deadline, self.patience + 5.0, self.memory)
        command = [sys.executable, "-P", str(_WORKER), *map(str, limits)]
        try:
            # A fixed hash seed makes sympy's orderings, hence its verdicts, the same in every worker.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONHASHSEED": "0"},
                encoding="ascii",
            )
        except OSError as error:  # no memory, or no process left
            return error.strerror or str(error)
        line, late = self.ask(None, _START_SECONDS)
        if late or not line.endswith("\n") or not json.loads(line).get("equal"):
            return f"exit code {self.stop()}: {line.strip() or 'no answer'}"
        return None

    def ask(self, message: str | None, seconds: float) -> tuple[str, bool]:
        """Send a line, read a line; the second item says that the clock ran out and the process was killed."""
        process, late = self.process, threading.Event()
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            if message is not None:
                print(message, file=process.stdin, flush=True)
            line = process.stdout.readline()
        except (OSError, ValueError):
            line = ""
        finally:
            timer.cancel()
            timer.join()
        return line, late.is_set()

    def stop(self) -> int | None:
        process, self.process = self.process, None
        if process is None:
            return None
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # unsent bytes of a dead process
                    pipe.close()
        return code


# Processes of a parent: closing their pipes here could send what the parent was about to send.
_inherited: list[subprocess.Popen[str]] = []
_verifiers: weakref.WeakSet[MathVerifier] = weakref.WeakSet()


class MathVerifier:
    """Check answers against gold answers with Math-Verify, in worker processes with a deadline.

    Neither waiting for a free worker nor the worker's start-up counts. An answer that hangs or takes its process down costs its
    own item only; the worker is replaced. Works from any thread, from asyncio and from child processes. Verdicts are cached by
    (gold, answer), those of hanging and crashing answers too, so that each costs its deadline once; those that something else
    brought about (a process killed from outside, one that did not start) are not.

    Args:
        workers: how many processes check at a time; None: one for each core of this process, see `cores`. They start on first
            use, and no more of them than there are checks to make.
        deadline: seconds of processor time one check may take. By the clock it may take four times that and ten seconds more.
        memory: address space of a worker in bytes, 0 for no limit (not enforced on Windows).
        cache: how many verdicts are kept.

    Raises:
        DataError: Math-Verify is not installed (on the first check).
        RewardError: the first workers of all cannot start, three times in a row. A later start that fails costs its item (ERROR).

    Example:
        >>> with MathVerifier() as verifier:
        ...     [verdict.value for verdict in verifier.equal([("1/2", "0.50"), ("1/2", "2")])]
        [1.0, 0.0]
    """

    def __init__(
        self,
        *,
        workers: int | None = None,
        deadline: float | int = DEADLINE,
        memory: int = 4 * 2**30,
        cache: int = 65_536,
    ) -> None:
        workers = cores() if workers is None else workers
        if not _is_count(workers) or not _is_positive(deadline):
            raise RewardError(
                f"A verifier needs at least one worker and a deadline above 0 s, not {workers!r} and {deadline!r} s."
            )
        self._cache: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._cache_size = cache
        self._workers = [_Worker(deadline, memory) for _ in range(workers)]
        self._reset()
        _verifiers.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        # The worker that was used last comes first, so that few checks start few workers.
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in reversed(self._workers):
            worker.process = None
            self._idle.put(worker)

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def equal(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Check every (gold, answer) pair; the verdicts come in the order of the pairs.

        OK with 1.0 or 0.0; TIMEOUT past the deadline; ERROR if the gold answer cannot be read, or the process died or ran
        out of memory. An answer that cannot be read is not equal: 0.0.
        """
        wanted = list(dict.fromkeys(pairs))
        with self._lock:
            known = {pair: self._cache[pair] for pair in wanted if pair in self._cache}
            for pair in known:
                self._cache.move_to_end(pair)
            futures: dict[tuple[str, str], Future[Verdict]] = {}
            if len(known) < len(wanted):
                threads = self._running_threads()
                futures = {pair: threads.submit(self._check, pair) for pair in wanted if pair not in known}
        try:
            known.update({pair: future.result() for pair, future in futures.items()})
        finally:
            for future in futures.values():
                future.cancel()
        return [known[pair] for pair in pairs]

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
            if importlib.util.find_spec("math_verify") is None:
                raise DataError(
                    "Comparing answers as mathematics needs Math-Verify: install 'spanwise[math]', or set verify: exact."
                )
            self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="spanwise-math")
        return self._threads

    def _check(self, pair: tuple[str, str]) -> Verdict:
        worker = self._idle.get()
        try:
            verdict, lasting = worker.check(*pair)
        finally:
            self._idle.put(worker)
        if worker.failed and not any(each.started for each in self._workers):
            raise RewardError(f"{verdict.why}. Without it no answer can be compared; set verify: exact to compare text.")
        with self._lock:
            if lasting:
                self._cache[pair] = verdict
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return verdict


def cores() -> int:
    """The cores that this process may use, shared with the other ranks of its training on this machine; at least 1.

    >>> cores() >= 1
    True
    """
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, here // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


_shared: dict[tuple[int | None, float], MathVerifier] = {}
_shared_lock = threading.Lock()


def shared_verifier(*, workers: int | None = None, deadline: float | int = DEADLINE) -> MathVerifier:
    """The verifier of these limits that the built-in rewards use, made on first use and closed when Python ends.

    Args:
        workers, deadline: see `MathVerifier`.

    >>> shared_verifier() is shared_verifier(deadline=5.0)
    True
    """
    with _shared_lock:
        if (workers, deadline) not in _shared:
            if not _shared:
                atexit.register(close)
            _shared[workers, deadline] = MathVerifier(workers=workers, deadline=deadline)
        return _shared[workers, deadline]


def close() -> None:
    """Stop the workers of the shared verifiers; the next check starts new ones.

    >>> close()
    """
    with _shared_lock:
        verifiers = list(_shared.values())
        _shared.clear()
    for verifier in verifiers:
        verifier.close()


def _after_fork() -> None:
    # A forked child holds the pipes of its parent's workers and none of its threads: it must start its own.
    global _shared_lock
    _shared_lock = threading.Lock()
    for verifier in list(_verifiers):
        verifier._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
