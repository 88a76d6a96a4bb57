"""The entry point `verl.plugins`: verl loads this module while it is half imported, in every process it starts.

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
#: The errors in this process, by part; `spanwise doctor` reads them.
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
    """Wrap a function of verl; the wrapper gets the original first. Wrapping twice does nothing."""
    stock = getattr(owner, name)

    def put(function: Callable[..., Any]) -> None:
        @wraps(stock)
        def own(*args: Any, **kwargs: Any) -> Any:
            return function(stock, *args, **kwargs)

        own.by_spanwise = True  # type: ignore[attr-defined]
        if not hasattr(stock, "by_spanwise"):
            setattr(owner, name, own)

    return put


class _Behind(MetaPathFinder):
    """An import finder that calls `attach` after a module of verl has run."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in PARTS:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((candidate for finder in others if (candidate := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:

            @around(spec.loader, "exec_module")
            def _(stock: Callable[[ModuleType], None], module: ModuleType) -> None:
                stock(module)
                _attach(module)

        return spec


def _attach(module: ModuleType) -> None:
    part = PARTS[module.__name__]
    try:
        importlib.import_module(f"spanwise.engines.verl.{part}").attach(module)
        FAULTS.pop(part, None)
    except Exception as error:  # verl must go on for users without spanwise
        FAULTS[part] = f"{type(error).__name__}: {error}"
        say(f"spanwise could not attach '{part}' to {module.__name__}, so what it offers there is missing: {FAULTS[part]}")


def say(sentence: str) -> None:
    """Print a warning and also raise it as one, because Ray and verl's log levels each swallow one of the two."""
    print(f"[spanwise] {sentence}", file=sys.stderr, flush=True)
    warnings.warn(sentence, UserWarning, stacklevel=3)


register()
