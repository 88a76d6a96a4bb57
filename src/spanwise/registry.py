"""`register`: one way to name a method, a reward, an outcome or a segmenter, ours or a plug-in's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module, invalidate_caches
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from spanwise.errors import RecipeError, unknown

_Entry = TypeVar("_Entry")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_BY_KIND: dict[str, Registry[Any]] = {}
#: Kind -> the module that makes its registry, so that its names are known without an earlier import.
_HOMES = {
    **dict.fromkeys(("completion", "block", "token", "step"), "spanwise.credit.registry"),
    "mode": "spanwise.modes",
    "outcome": "spanwise.score.outcomes",
    "reward": "spanwise.score.reward",
    "segmenter": "spanwise.segment.claims",
}
_FILES: dict[Path, ModuleType] = {}
_SHOWN: set[tuple[str, Path | None]] = set()


class Registry(dict[str, _Entry], Generic[_Entry]):
    """The named entries of one kind; `find` also looks among the installed plug-ins."""

    def __init__(self, noun: str, *, kinds: Sequence[str], group: str, entry: Callable[..., _Entry]) -> None:
        super().__init__()
        self.noun, self.group, self.entry = noun, group, entry
        self._functions: dict[str, Callable[..., Any]] = {}
        for kind in kinds:
            _BY_KIND[kind] = self

    def find(self, name: str) -> _Entry:
        """Return the entry called `name`, ours or a plug-in's; refuse an unknown name."""
        if name not in self:
            self.load_plugins()
        if name not in self:
            raise RecipeError(unknown(self.noun, name, self))
        return self[name]

    def load_plugins(self) -> None:
        """Import the plug-ins that other distributions announce; an error names the one that is broken."""
        for point in entry_points(group=self.group):
            try:
                point.load()
            except Exception as error:  # whatever a stranger's module raises, the user must learn which one it was
                raise RecipeError(f"The plug-in '{point.name}' ({point.value}) cannot be loaded: {error}.") from error

    def add(self, name: str, function: Callable[..., Any], kind: str, facts: dict[str, Any]) -> None:
        """Add one entry; refuse another function under a name that is taken."""
        function_before = self._functions.get(name) if name in self else None
        if function_before is not None and function_before is not function:
            place = f"{function_before.__module__}.{function_before.__qualname__}"
            raise RecipeError(f"There is a {self.noun} '{name}' already ({place}); register yours under another name.")
        try:
            self[name] = self.entry(name, function, kind, **facts)
        except TypeError as error:
            raise RecipeError(f"{self.noun.capitalize()} '{name}' cannot be registered: {error}.") from error
        self._functions[name] = function


def registered(kind: str) -> Registry[Any]:
    """Return the registry of a kind, and load its room if needed."""
    if kind not in _BY_KIND and kind in _HOMES:
        import_module(_HOMES[kind])
    if kind not in _BY_KIND:
        raise RecipeError(unknown("kind", kind, {*_BY_KIND, *_HOMES}))
    return _BY_KIND[kind]


def is_registered(name: str, *, kind: str) -> bool:
    """Return whether a name is registered, by us or by a plug-in."""
    registry = registered(kind)
    if name not in registry and entry_points(group=registry.group):
        registry.load_plugins()
    return name in registry


def entry_of(name: str, *, kind: str) -> Any:
    """Return the entry of a name, for rooms that may not import the registry's own room."""
    return registered(kind).find(name)


def register(name: str, *, kind: str, **facts: Any) -> Callable[[_Function], _Function]:
    """Register a function under a name that recipes, schemes and the command line know; the function itself stays as it is.

    Args:
        name: a name can be taken once.
        kind: what the function is. A method credits `completion`, `block`, `token` or `step`, or is
            a `refinement` of another's advantages; the others are `reward`, `outcome`
            and `segmenter`.
        facts: of a method `paper`, `source`, `preset`, `exceptions` (`spanwise.credit.Method`); of a reward `tags`, `blocks`,
            `judged_by` (`spanwise.score.BuiltIn`).

    Raises:
        RecipeError: an unknown kind or fact, or another function has the name already.

    Example:
        >>> @register("mean_of_two", kind="completion", paper="none")
        ... def mean_of_two(reward_n, group_n):
        ...     '''Halve every reward.'''
        ...     return reward_n / 2
        >>> from spanwise.credit import METHODS
        >>> METHODS.pop("mean_of_two").summary
        'Halve every reward.'
    """
    registry = registered(kind)

    def decorate(function: _Function) -> _Function:
        registry.add(name, function, kind, facts)
        return function

    return decorate


def imported(path: str, *, what: str) -> Any:
    """Import the function that a recipe calls `module:function` or `file.py:function`; say on stderr what is about to run."""
    module, _, name = path.rpartition(":")
    file = _file(module)
    _show(path, file or _origin(module))
    try:
        if file is None:
            if sys.modules.get(module) in _FILES.values():
                del sys.modules[module]  # another file was run under this name
            with _first(Path.cwd()):
                code = import_module(module)
            if getattr(code, "__file__", None) is None and code.__spec__ is not None and code.__spec__.origin is None:
                raise ModuleNotFoundError(name=module)  # the module is a folder
        else:
            code = _run(file, module)
    except (Exception, SystemExit) as error:  # whatever a stranger's module raises, the user must learn which one it was
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and file is None and f"{module}.".startswith(f"{error.name}."):
            file_or_module = "file" if module.endswith(".py") else "module"
            reason = f"there is no {file_or_module} '{module}' in the current folder '{Path.cwd()}', beside the recipe or installed"
        raise RecipeError(f"{what} '{path}' cannot be imported: {reason}.") from error
    try:
        return attrgetter(name)(code)
    except AttributeError as error:
        functions = [key for key, value in vars(code).items() if callable(value) and not key.startswith("_")]
        place = f"'{getattr(code, '__file__', module)}'"
        raise RecipeError(
            f"{what} '{path}' cannot be imported: {unknown(f'function in {place} called', name, functions)}"
        ) from error


def _show(path: str, place: Path | None) -> None:
    """Say once per process, and on the first rank only, whose code is about to run."""
    if place is not None and (path, place) not in _SHOWN and os.environ.get("RANK", "0") == "0":
        file_or_folder = "folder" if place.is_dir() else "file"
        print(f"The recipe runs code: {path!r}, from the {file_or_folder} {str(place)!r}.", file=sys.stderr)
    _SHOWN.add((path, place))


def _origin(module: str) -> Path | None:
    """Find the file or folder of a module's package without running it; None if there is none."""
    package = module.partition(".")[0]
    with _first(Path.cwd()), suppress(ValueError):
        spec = find_spec(package)
        if spec is not None:
            places = [*(spec.submodule_search_locations or ()), spec.origin or ""]
            return next((Path(place) for place in places if Path(place).exists() and place), None)
    return None


def seen_from_here(path: str, folder: Path) -> str:
    """Rewrite a `module:function` of a file in `folder` so that it is found from the current folder."""
    module, _, name = path.rpartition(":")
    if not module or _file(module) or (not module.endswith(".py") and _is_installed(module)):
        return path
    file = folder / (module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    return f"{file}:{name}" if file.is_file() else path


def _is_installed(module: str) -> bool:
    """Return whether a module or its package is installed; a file of this name that was run here does not count."""
    top, _, child = module.partition(".")
    imported_module = sys.modules.get(top)
    if imported_module is not None:
        return imported_module not in _FILES.values()
    spec = find_spec(top)
    # A folder without __init__.py counts as a package only through its modules.
    return (spec is not None and (spec.origin is not None or bool(child))) or (bool(child) and (Path.cwd() / top).is_dir())


def _file(module: str) -> Path | None:
    """Return the file of a module in the current folder; None if it holds none."""
    file = Path.cwd() / (module if module.endswith(".py") else f"{module}.py")
    return file if file.is_file() else None


def _run(file: Path, name: str) -> ModuleType:
    """Run a file as a module, once per process, whatever else has its name."""
    imported_module = sys.modules.get(name)
    if imported_module is not None and Path(getattr(imported_module, "__file__", None) or ".").resolve() == file.resolve():
        return imported_module
    if file.resolve() not in _FILES:
        spec = spec_from_file_location(name, file)
        assert spec is not None, "a file ending in .py has a loader"
        assert spec.loader is not None, "a file ending in .py has a loader"
        module = module_from_spec(spec)
        sys.modules.setdefault(name, module)  # dataclasses and pickle look modules up in sys.modules
        try:
            with _first(file.parent):
                spec.loader.exec_module(module)
        except BaseException:
            if sys.modules.get(name) is module:
                del sys.modules[name]
            raise
        _FILES[file.resolve()] = module
    return _FILES[file.resolve()]


@contextmanager
def _first(folder: Path) -> Iterator[None]:
    """Look for modules in a folder first while the block lasts."""
    invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
