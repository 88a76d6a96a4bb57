"""`MathVerifier`: equality of mathematical answers, checked in processes that can be killed.

Math-Verify may hang, eat memory or take its process down on a hostile answer, and its own timeout works in a main thread only.
So every check runs in a small worker process with a deadline that starts when the check starts. The workers are plain
subprocesses rather than a `multiprocessing` pool: those import the user's main script again (a training script without a
`__main__` guard would train in the worker), load torch with this package and cannot start from daemonic processes.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from spanwise.errors import DataError, RewardError
from spanwise.types import Status

_WORKER = Path(__file__).with_name("math_worker.py")
_START_SECONDS = 120.0
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
        self.memory = memory
        self.process: subprocess.Popen[str] | None = None

    def check(self, gold: str, answer: str) -> Verdict:
        if self.process is not None and self.process.poll() is not None:
            self.stop()  # died while idle, for instance of the out-of-memory killer: nobody's fault
        if self.process is None:
            self.start()
        line, late = self.ask(json.dumps({"gold": gold, "answer": answer}), self.deadline)
        if late or not line.endswith("\n"):
            code = self.stop()
            if late:
                return Verdict(Status.TIMEOUT, float("nan"), f"stopped after {self.deadline:g} s")
            return Verdict(Status.ERROR, float("nan"), f"the checking process died with exit code {code}")
        reply = json.loads(line)
        if "error" in reply:
            return Verdict(Status.ERROR, float("nan"), reply["error"])
        if reply["equal"] is None:
            return Verdict(Status.ERROR, float("nan"), _UNREADABLE)
        return Verdict(Status.OK, float(reply["equal"]))

    def start(self) -> None:
        command = [sys.executable, "-P", str(_WORKER), str(self.deadline), str(self.memory)]
        # A fixed hash seed makes sympy's orderings, hence its verdicts, the same in every worker.
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            encoding="ascii",
        )
        line, late = self.ask(None, _START_SECONDS)
        if late or not line or not json.loads(line).get("equal"):
            code = self.stop()
            raise RewardError(
                f"Math-Verify cannot start in a worker process (exit code {code}): {line.strip() or 'no answer'}."
            )

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

    The deadline of a check starts when the check starts: neither waiting for a free worker nor the worker's start-up counts.
    An answer that hangs or takes its process down costs its own item only; the worker is replaced. Works from any thread,
    from asyncio and from child processes. Verdicts are cached by (gold, answer); timeouts and crashes are not.

    Args:
        workers: how many processes check at a time. They start on first use.
        deadline: seconds one check may take.
        memory: address space of a worker in bytes, 0 for no limit (not enforced on Windows).
        cache: how many verdicts are kept.

    Raises:
        DataError: Math-Verify is not installed (on the first check).

    Example:
        >>> with MathVerifier() as verifier:
        ...     [verdict.value for verdict in verifier.equal([("1/2", "0.50"), ("1/2", "2")])]
        [1.0, 0.0]
    """

    def __init__(self, *, workers: int = 1, deadline: float = 5.0, memory: int = 4 * 2**30, cache: int = 65_536) -> None:
        if workers < 1 or deadline <= 0:
            raise RewardError(
                f"A verifier needs at least one worker and a deadline above 0 s, not {workers} and {deadline:g} s."
            )
        self._cache: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._cache_size = cache
        self._workers = [_Worker(deadline, memory) for _ in range(workers)]
        self._reset()
        _verifiers.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
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
            verdict = worker.check(*pair)
        finally:
            self._idle.put(worker)
        with self._lock:
            if verdict.status == Status.OK or verdict.why == _UNREADABLE:
                self._cache[pair] = verdict
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return verdict


_shared: MathVerifier | None = None
_shared_lock = threading.Lock()


def shared_verifier() -> MathVerifier:
    """The verifier that the built-in rewards use, made on first use and closed when Python ends."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = MathVerifier()
            atexit.register(close)
        return _shared


def close() -> None:
    """Stop the shared verifier's workers; the next check starts new ones.

    >>> close()
    """
    global _shared
    with _shared_lock:
        verifier, _shared = _shared, None
    if verifier is not None:
        verifier.close()


def _after_fork() -> None:
    # A forked child holds the pipes of its parent's workers and none of its threads: it must start its own.
    global _shared_lock
    _shared_lock = threading.Lock()
    for verifier in list(_verifiers):
        verifier._disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
