"""`Worker`: one process that checks what it is sent, and can be killed.

Its script is run by path as `script deadline patience memory` and imports nothing of this package. It writes a line of JSON when
it is ready, then one for each that it reads: `{"value": 1}`, or `{"error": "why"}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from spanwise.types import Status

_START_SECONDS = 120.0
#: How often a start is tried before it costs the item that needs it, and the pause between two tries.
_STARTS = 3
_PAUSE_SECONDS = 0.5
#: What the system sends when it has no memory left, and whoever ends processes: not the doing of an answer.
_FROM_OUTSIDE = (-9, -15)
#: What is sent to a worker.
Request = tuple[str | None, ...]


class Verdict(NamedTuple):
    """What one check said: 1.0 or 0.0 with status OK, NaN with any other status and the reason in `why`.

    Example:
        >>> Verdict(Status.OK, 1.0).value
        1.0
        >>> Verdict(Status.TIMEOUT, float("nan"), "no answer after 5 s").why
        'no answer after 5 s'
    """

    status: Status
    value: float
    why: str = ""


class Worker:
    """One worker process, started on first use and again after every kill."""

    def __init__(self, script: Path, what: str, deadline: float, memory: int) -> None:
        self.script, self.what = script, what
        self.deadline = deadline
        self.patience = 4 * deadline + 10.0  # by the clock: workers may share a core
        self.memory = memory
        self.process: subprocess.Popen[str] | None = None
        self.started = self.failed = False

    def check(self, request: Request) -> tuple[Verdict, bool]:
        """The verdict, and whether it is the answer's own doing, so that it would be the same again."""
        if self.process is not None and self.process.poll() is not None:
            self.stop()  # died while idle, for instance of the out-of-memory killer: nobody's fault
        if self.process is None and (fault := self.start()):
            return Verdict(Status.ERROR, float("nan"), fault), False
        line, late = self.ask(json.dumps(request), self.patience)
        if late or not line.endswith("\n"):
            code = self.stop()
            if late or code == -getattr(signal, "SIGPROF", 0):
                return Verdict(Status.TIMEOUT, float("nan"), f"stopped after {self.deadline:g} s"), True
            died = Verdict(Status.ERROR, float("nan"), f"the checking process died with exit code {code}")
            return died, code not in _FROM_OUTSIDE
        reply = json.loads(line)
        if "error" in reply:
            return Verdict(Status.ERROR, float("nan"), reply["error"]), True
        return Verdict(Status.OK, float(reply["value"])), True

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
        return f"{self.what} cannot start in a worker process ({fault})"

    def _start_once(self) -> str | None:
        limits = (self.deadline, self.patience + 5.0, self.memory)
        command = [sys.executable, "-P", str(self.script), *map(str, limits)]
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
        if late or not line.endswith("\n") or not json.loads(line).get("value"):
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
        """End the process; its exit status, None if there is none."""
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
