"""Run coroutines from any thread on one event loop per process. The loop has its own thread."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
#: Maps a process id to the event loop that computes the process's rewards. A forked child needs its own loop.
_loops: dict[int, asyncio.AbstractEventLoop] = {}
_objects: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Any]] = weakref.WeakKeyDictionary()


def run(coroutine: Coroutine[Any, Any, _T], loop: asyncio.AbstractEventLoop | None = None) -> _T:
    """Run a coroutine on `loop`, or on this process's event loop for rewards. Cancel it if the calling thread is interrupted."""
    coroutine_future = asyncio.run_coroutine_threadsafe(coroutine, loop or _running_loop())
    try:
        return coroutine_future.result()
    finally:
        coroutine_future.cancel()  # after Ctrl-C no request may stay in flight


def once_per_loop(key: Any, make: Callable[[], _T]) -> _T:
    """Return an object, such as a semaphore, that exists once per event loop and key."""
    objects_by_key = _objects.setdefault(asyncio.get_running_loop(), {})
    if key not in objects_by_key:
        objects_by_key[key] = make()
    return objects_by_key[key]


def _running_loop() -> asyncio.AbstractEventLoop:
    process_id = os.getpid()
    if process_id not in _loops:
        new_loop = asyncio.new_event_loop()
        if _loops.setdefault(process_id, new_loop) is new_loop:
            threading.Thread(target=new_loop.run_forever, name="spanwise-rewards", daemon=True).start()
        else:  # another thread was faster and started its event loop
            new_loop.close()
    return _loops[process_id]
