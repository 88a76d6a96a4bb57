"""Processes side by side, none of which outlives the one that started them."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

_LOOK_SECONDS = 0.1
_END_SECONDS = 10.0
_Item = TypeVar("_Item")


def side_by_side(
    items: Iterable[_Item],
    processes: int,
    *,
    start: Callable[[_Item], subprocess.Popen[bytes]],
    ended: Callable[[_Item, int], None],
) -> None:
    """Start a process for each item, so many at a time, and wait for all of them.

    Edge cases:
        Ctrl-C, SIGTERM (as SystemExit with status 143) and any error of `start` or `ended`: nothing more is started, what runs is
        ended, and the exception goes on. Outside of the main thread, where Python knows no signals, SIGTERM does what it did.
    """
    waiting, running = list(items)[::-1], dict[subprocess.Popen[bytes], _Item]()
    with _sigterm_raises():
        try:
            while waiting or running:
                while waiting and len(running) < max(1, processes):
                    item = waiting.pop()
                    running[start(item)] = item
                for process in list(running):
                    if (status := process.poll()) is not None:
                        ended(running.pop(process), status)
                time.sleep(_LOOK_SECONDS)
        finally:
            _end(running)


def _end(running: Collection[subprocess.Popen[bytes]]) -> None:
    """Ask the processes to end, and after some seconds or a second Ctrl-C make them."""
    for process in running:
        process.terminate()
    until = time.monotonic() + _END_SECONDS
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the block as an exception would, so that what must be cleaned up is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one must not break off the cleaning up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
