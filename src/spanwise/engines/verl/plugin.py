"""The entry point `verl.plugins`. Every verl process loads it while verl itself is only half imported.

So this module imports nothing of verl. Each part of the adapter waits for its module of verl and runs once that is imported, so a
rollout server that never uses advantages pays nothing. verl hides errors of plug-ins, so this module prints them on stderr.
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

#: Maps modules of verl to the modules of this package that patch them.
PATCHES = {
    "verl.trainer.ppo.core_algos": "estimators",
    "verl.trainer.ppo.v1": "trainer",
    "verl.trainer.ppo.ray_trainer": "legacy",
    "verl.experimental.agent_loop.agent_loop": "masks",
}
#: Maps modules that could not attach to verl to their errors. `spanwise doctor` shows them.
FAULTS: dict[str, str] = {}


def register() -> None:
    """Patch the modules of verl, now or after their import. A second call does nothing."""
    verl_version = getattr(sys.modules.get("verl"), "__version__", "unknown")
    if verl_version != "unknown":
        say(untested("verl", verl_version))
    if not any(isinstance(finder, _AttachOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AttachOnImport())
    for name in PATCHES:
        verl_module = sys.modules.get(name)
        if verl_module is not None and not getattr(getattr(verl_module, "__spec__", None), "_initializing", False):
            _attach(verl_module)


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that wraps `owner.name`, but only once. Its function gets the original as first argument."""
    original_function = getattr(owner, name)

    def wrap(function: Callable[..., Any]) -> None:
        @wraps(original_function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(original_function, *args, **kwargs)

        wrapper.by_spanwise = True  # type: ignore[attr-defined]
        if not hasattr(original_function, "by_spanwise"):
            setattr(owner, name, wrapper)

    return wrap


class _AttachOnImport(MetaPathFinder):
    """Patches a module of verl as soon as it is imported."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        module_specs = (finder.find_spec(fullname, path, target) for finder in finders)
        module_spec = next(filter(None, module_specs), None)
        if module_spec is not None and module_spec.loader is not None:

            @around(module_spec.loader, "exec_module")
            def exec_module(original: Callable[[ModuleType], None], module: ModuleType) -> None:
                original(module)
                _attach(module)

        return module_spec


def _attach(module: ModuleType) -> None:
    patch_name = PATCHES[module.__name__]
    try:
        importlib.import_module(f"spanwise.engines.verl.{patch_name}").attach(module)
        FAULTS.pop(patch_name, None)
    except Exception as error:  # verl must keep working if spanwise fails
        FAULTS[patch_name] = f"{type(error).__name__}: {error}"
        fault = FAULTS[patch_name]
        say(f"spanwise could not attach its part '{patch_name}' to {module.__name__}, and runs without this part: {fault}")


def say(*sentences: str | None) -> None:
    """Print each sentence and issue it as a warning. Ray swallows one of the two, verl the other."""
    for sentence in filter(None, sentences):
        print(f"[spanwise] {sentence}", file=sys.stderr, flush=True)
        warnings.warn(sentence, UserWarning, stacklevel=3)


register()
