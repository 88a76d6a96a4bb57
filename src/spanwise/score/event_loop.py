"""Run coroutines from any thread on one event loop per process; the loop has a thread of its own."""

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
_objects: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Any]] = weakref.WeakKeyDictionary()


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on this process's event loop for rewards, and cancel it if the calling thread is interrupted."""
    coroutine_future = asyncio.run_coroutine_threadsafe(coroutine, _running_loop())
    try:
        return coroutine_future.result()
    finally:
        coroutine_future.cancel()  # after Ctrl-C no request may stay in flight


def objects_of_loop() -> dict[Any, Any]:
    """Return the objects that belong to the running loop, such as clients and semaphores; they are dropped with the loop."""
    return _objects.setdefault(asyncio.get_running_loop(), {})


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="spanwise-rewards", daemon=True).start()
        return _loop


def _after_fork() -> None:
    """Forget the parent process's event loop after a fork, because the child has no thread that runs it."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
