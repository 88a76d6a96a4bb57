"""`register`: give a method, a reward, an outcome or a segmenter the name that recipes call it by."""

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
#: Maps each kind, such as "reward", to the module that creates its registry.
_HOMES = {
    **dict.fromkeys(("completion", "block", "token", "step", "refinement"), "spanwise.credit.registry"),
    "mode": "spanwise.modes",
    "outcome": "spanwise.score.outcomes",
    "reward": "spanwise.score.reward",
    "segmenter": "spanwise.segment.claims",
}
_FILES: dict[Path, ModuleType] = {}
_BESIDE: dict[Path, dict[str, ModuleType]] = {}  # by folder: modules with the name of another folder's module
_SHOWN: set[tuple[str, Path | None]] = set()


class Registry(dict[str, _Entry], Generic[_Entry]):
    """All entries of one kind by name, such as all methods. `find` also searches the installed plug-ins."""

    def __init__(self, noun: str, *, kinds: Sequence[str], group: str, entry: Callable[..., _Entry]) -> None:
        super().__init__()
        self.noun, self.group, self.entry = noun, group, entry
        self._functions: dict[str, Callable[..., Any]] = {}
        for kind in kinds:
            _BY_KIND[kind] = self

    def find(self, name: str) -> _Entry:
        """Return the entry called `name`, from spanwise or an installed plug-in. Refuse an unknown name."""
        if name not in self:
            self.load_plugins()
        if name not in self:
            raise RecipeError(unknown(self.noun, name, self))
        return self[name]

    def load_plugins(self) -> None:
        """Import the plug-ins of other installed packages. An error names the plug-in that is broken."""
        for plugin in entry_points(group=self.group):
            try:
                plugin.load()
            except Exception as error:  # another package's plug-in may raise any error on import
                raise RecipeError(f"The plug-in '{plugin.name}' ({plugin.value}) cannot be loaded: {error}.") from error

    def add(self, name: str, function: Callable[..., Any], kind: str, facts: dict[str, Any]) -> None:
        """Add a function under a name. Refuse a name that another function has."""
        earlier_function = self._functions.get(name) if name in self else None
        if earlier_function is not None and earlier_function is not function:
            earlier_place = f"{earlier_function.__module__}.{earlier_function.__qualname__}"
            raise RecipeError(
                f"There is a {self.noun} '{name}' already ({earlier_place}); register yours under another name."
            )
        try:
            self[name] = self.entry(name, function, kind, **facts)
        except TypeError as error:
            raise RecipeError(f"{self.noun.capitalize()} '{name}' cannot be registered: {error}.") from error
        self._functions[name] = function


def registered(kind: str) -> Registry[Any]:
    """Return the registry of a kind, such as "reward". If needed, import the module that creates it."""
    if kind not in _BY_KIND and kind in _HOMES:
        import_module(_HOMES[kind])
    if kind not in _BY_KIND:
        raise RecipeError(unknown("kind", kind, {*_BY_KIND, *_HOMES}))
    return _BY_KIND[kind]


def is_registered(name: str, *, kind: str) -> bool:
    """Return whether spanwise or a plug-in has registered a name for a kind, such as "reward"."""
    registry = registered(kind)
    if name not in registry and entry_points(group=registry.group):
        registry.load_plugins()
    return name in registry


def register(name: str, *, kind: str, **facts: Any) -> Callable[[_Function], _Function]:
    """Register a function under a name that recipes and the command line use. It stays unchanged.

    Args:
        name: a name can be taken once.
        kind: what the function is. A method credits `completion`, `block`, `token` or `step`, or is a `refinement` of another's
            advantages; the others are `reward`, `outcome` and `segmenter`.
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
    """Import the function that a recipe names as `module:function` or `file.py:function`. First print its file."""
    module_name, _, attribute_path = path.rpartition(":")
    module_file = _file(module_name)
    _show(path, module_file or _origin(module_name))
    try:
        if module_file is None:
            if sys.modules.get(module_name) in _FILES.values():
                del sys.modules[module_name]  # otherwise import_module returns the user's file of the same name
            with _first(Path.cwd()):
                module = import_module(module_name)
            if getattr(module, "__file__", None) is None and module.__spec__ is not None and module.__spec__.origin is None:
                raise ModuleNotFoundError(name=module_name)  # the import found only a folder without code
        else:
            module = _run(module_file, module_name)
    except (Exception, SystemExit) as error:  # when imported, a user's module may raise any error, or exit
        failure_reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and module_file is None and f"{module_name}.".startswith(f"{error.name}."):
            source_noun = "file" if module_name.endswith(".py") else "module"
            failure_reason = (
                f"there is no {source_noun} '{module_name}' in the current folder '{Path.cwd()}', beside the recipe or among "
                "installed packages"
            )
        raise RecipeError(f"{what} '{path}' cannot be imported: {failure_reason}.") from error
    try:
        function = attrgetter(attribute_path)(module)
    except AttributeError as error:
        function_names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        kind_text = f"function in '{getattr(module, '__file__', module_name)}' called"
        raise RecipeError(
            f"{what} '{path}' cannot be imported: {unknown(kind_text, attribute_path, function_names)}"
        ) from error
    if isinstance(function, type):
        raise RecipeError(f"{what} '{path}' is a class. Name a function, or create an object of the class and name it.")
    return function


def _show(path: str, place: Path | None) -> None:
    """Print which file or folder holds the user's code that will run. This happens once, on the first rank only."""
    if place is not None and (path, place) not in _SHOWN and os.environ.get("RANK", "0") == "0":
        file_or_folder = "folder" if place.is_dir() else "file"
        print(f"The recipe runs code: {path!r}, from the {file_or_folder} {str(place)!r}.", file=sys.stderr)
    _SHOWN.add((path, place))


def _origin(module: str) -> Path | None:
    """Find the file or folder of a module's package without running it. None if there is none."""
    with _first(Path.cwd()), suppress(ValueError):
        module_spec = find_spec(module.partition(".")[0])
        if module_spec is not None:
            candidate_paths = [*(module_spec.submodule_search_locations or ()), module_spec.origin or ""]
            return next((Path(path) for path in candidate_paths if Path(path).exists() and path), None)
    return None


def seen_from_here(path: str, folder: Path) -> str:
    """Put `folder` before the path `file.py:function` of a file in it, so that the path works from the current folder."""
    module_name, _, function_name = path.rpartition(":")
    if not module_name or _file(module_name) or (not module_name.endswith(".py") and _is_installed(module_name)):
        return path
    file_name = module_name if module_name.endswith(".py") else f"{module_name.replace('.', '/')}.py"
    file_in_folder = folder / file_name
    return f"{file_in_folder}:{function_name}" if file_in_folder.is_file() else path


def _is_installed(module: str) -> bool:
    """Return whether a module or its package is installed. A user's file that ran under this name does not count."""
    package_name, _, submodule_name = module.partition(".")
    loaded_module = sys.modules.get(package_name)
    if loaded_module is not None:
        return loaded_module not in _FILES.values()
    package_spec = find_spec(package_name)
    # A folder without __init__.py counts as a package only if `module` names a module inside it.
    return (package_spec is not None and (package_spec.origin is not None or bool(submodule_name))) or (
        bool(submodule_name) and (Path.cwd() / package_name).is_dir()
    )


def _file(module: str) -> Path | None:
    """Return the file in the current folder that a module's name stands for. None if there is none."""
    module_file = Path.cwd() / (module if module.endswith(".py") else f"{module}.py")
    return module_file if module_file.is_file() else None


def _run(file: Path, module_name: str) -> ModuleType:
    """Run a user's file as a module, once per process. Another module may have its name."""
    loaded_module = sys.modules.get(module_name)
    if loaded_module is not None and Path(getattr(loaded_module, "__file__", None) or ".").resolve() == file.resolve():
        return loaded_module
    if file.resolve() not in _FILES:
        module_spec = spec_from_file_location(module_name, file)
        assert module_spec is not None, f"Python cannot import '{file}'; its name must end in .py"
        assert module_spec.loader is not None, f"Python cannot import '{file}'; its name must end in .py"
        module = module_from_spec(module_spec)
        with _first(file.parent), _hide_namesakes(file.parent):
            sys.modules.setdefault(module_name, module)  # dataclasses and pickle look up a class's module in `sys.modules`
            try:
                module_spec.loader.exec_module(module)
            except BaseException:
                if sys.modules.get(module_name) is module:
                    del sys.modules[module_name]
                raise
        _FILES[file.resolve()] = module
    return _FILES[file.resolve()]


@contextmanager
def _hide_namesakes(folder: Path) -> Iterator[None]:
    """During the `with` block, hide modules of other folders if `folder` has a module of the same name."""
    folder = folder.resolve()
    user_files = [Path(module.__file__ or ".") for module in _FILES.values()]
    other_folders = {file.parent.resolve() for file in user_files} - {folder}

    def is_namesake(name: str, module: Any) -> bool:
        package_name = name.partition(".")[0]
        if not ((folder / f"{package_name}.py").is_file() or (folder / package_name).is_dir()):
            return False
        module_file = Path(getattr(module, "__file__", None) or ".").resolve()
        return any(
            module_file == other_folder / f"{package_name}.py" or other_folder / package_name in module_file.parents
            for other_folder in other_folders
        )

    loaded_modules = list(sys.modules.items()) if other_folders else []
    namesakes = {name: module for name, module in loaded_modules if is_namesake(name, module)}
    package_names = {name.partition(".")[0] for name in namesakes}
    for name in namesakes:
        del sys.modules[name]
    sys.modules.update(_BESIDE.get(folder, {}))
    try:
        yield
    finally:
        imported_names = [name for name in sys.modules if name.partition(".")[0] in package_names]
        _BESIDE.setdefault(folder, {}).update({name: sys.modules.pop(name) for name in imported_names})
        sys.modules.update(namesakes)


@contextmanager
def _first(folder: Path) -> Iterator[None]:
    """Let imports search a folder before all others while the `with` block runs."""
    invalidate_caches()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
