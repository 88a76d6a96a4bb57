"""What an adapter needs of another package: its names, their parameters, and the order of things in their source.

A release that breaks an adapter breaks the contract first, and says which name.
"""

import importlib
import inspect
import re
from dataclasses import dataclass
from importlib.metadata import version

import pytest
from packaging.version import Version


@dataclass(frozen=True)
class Needed:
    """A name of another package."""

    path: str  # module, colon, attributes
    takes: tuple[str, ...] = ()  # parameters that it must have; with *args and **kwargs it takes any
    says: tuple[str, ...] = ()  # phrases of its source, in this order
    since: str = "0"  # the release that has it; what needs it is refused before

    def fault(self):
        """Return what is missing, or None."""
        module, _, names = self.path.partition(":")
        if self.since != "0" and Version(version(module.partition(".")[0])) < Version(self.since):
            return None
        try:
            target = importlib.import_module(module)
            for name in filter(None, names.split(".")):
                target = inspect.getattr_static(target, name) if inspect.isclass(target) else getattr(target, name)
        except (ImportError, AttributeError) as error:
            return f"{self.path} is gone: {error}"
        function = inspect.unwrap(getattr(target, "__func__", target))
        if self.takes:
            parameters = inspect.signature(function).parameters.values()
            names = {parameter.name for parameter in parameters}
            takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
            missing = [name for name in self.takes if name not in names and not takes_any]
            if missing:
                return f"{self.path} no longer takes {', '.join(missing)}"
        if self.says:
            text = re.sub(r"\s+", " ", inspect.getsource(function))
            place = 0
            for phrase in self.says:
                place = text.find(phrase, place)
                if place < 0:
                    return f"{self.path} no longer says {phrase!r} where it did"
        return None


def check(names):
    """The test that every name is as an adapter needs it."""

    @pytest.mark.parametrize("needed", names, ids=lambda needed: needed.path.partition(":")[2])
    def test(needed):
        assert needed.fault() is None

    return test
