"""One event loop for each process, in a thread of its own: rewards that wait for a server are awaited on it from any thread."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_kept: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Any]] = weakref.WeakKeyDictionary()


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Await a coroutine on the loop of this process, and cancel it if this thread is interrupted."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _running_loop())
    try:
        return future.result()
    finally:
        future.cancel()  # Ctrl-C: requests in flight must not outlive the training


def of_this_loop() -> dict[Any, Any]:
    """Return what belongs to the loop that runs, such as clients and semaphores; it goes with the loop."""
    return _kept.setdefault(asyncio.get_running_loop(), {})


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="spanwise-rewards", daemon=True).start()
        return _loop


def _after_fork() -> None:
    """Forget the parent's loop: its thread does not run in this process."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
