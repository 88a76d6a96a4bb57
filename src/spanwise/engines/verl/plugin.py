"""The entry point `verl.plugins`: every verl process loads this module while verl itself is half imported.

So nothing of verl is imported here. Each part of the adapter is hung behind the module of verl that it belongs to and runs when
that module has been imported: a rollout server that never looks at advantages pays nothing. verl keeps what a plug-in raises to
itself, so whatever fails is said on stderr.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from spanwise.engines.windows import untested

#: Module of verl -> the module of this package whose `attach` is called with it.
PARTS = {
    "verl.trainer.ppo.core_algos": "estimators",
    "verl.trainer.ppo.v1": "trainer",
    "verl.trainer.ppo.ray_trainer": "legacy",
    "verl.experimental.agent_loop.agent_loop": "masks",
}
#: Part of the adapter -> its error in this process; `spanwise doctor` shows these errors.
FAULTS: dict[str, str] = {}


def register() -> None:
    """Attach every part to its module of verl, at once if the module is imported already; a second call does nothing."""
    version = getattr(sys.modules.get("verl"), "__version__", "unknown")
    if version != "unknown" and (sentence := untested("verl", version)):
        say(sentence)
    if not any(isinstance(finder, _Behind) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Behind())
    for name in PARTS:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _attach(module)


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Wrap a function of verl; the wrapper gets the original as first argument. A second wrapping does nothing."""
    original = getattr(owner, name)

    def wrap(function: Callable[..., Any]) -> None:
        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        wrapper.by_spanwise = True  # type: ignore[attr-defined]
        if not hasattr(original, "by_spanwise"):
            setattr(owner, name, wrapper)

    return wrap


class _Behind(MetaPathFinder):
    """An import finder that calls `attach` after a module of verl has run."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in PARTS:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((candidate for finder in finders if (candidate := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:

            @around(spec.loader, "exec_module")
            def exec_module(original: Callable[[ModuleType], None], module: ModuleType) -> None:
                original(module)
                _attach(module)

        return spec


def _attach(module: ModuleType) -> None:
    part = PARTS[module.__name__]
    try:
        importlib.import_module(f"spanwise.engines.verl.{part}").attach(module)
        FAULTS.pop(part, None)
    except Exception as error:  # verl must keep working if spanwise fails
        FAULTS[part] = f"{type(error).__name__}: {error}"
        say(f"spanwise could not attach '{part}' to {module.__name__}, so this part of spanwise is missing: {FAULTS[part]}")


def say(sentence: str) -> None:
    """Print a sentence and also warn with it, because Ray and verl's log levels each swallow one of the two."""
    print(f"[spanwise] {sentence}", file=sys.stderr, flush=True)
    warnings.warn(sentence, UserWarning, stacklevel=3)


register()
