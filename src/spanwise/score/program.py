"""The two processes of a program and its tests, started by path from `worker.py`; each asks the other in lines of JSON.

The code has its end of the line as standard input. The tests get code and tests there, and their end as an argument: they let the
code start, and their exit status is the verdict. Plain values travel as copies, anything else as a
`Handle`. The code is never asked how one of its objects compares with a plain value, and nothing that it sends is evaluated.
"""

from __future__ import annotations  # also in force in the code and in the tests

import _thread
import builtins
import json
import operator
import os
import sys
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

_MOST = 2**26
_SCALARS = (type(None), bool, float, str)
_CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_PARTS = {
    **dict.fromkeys(("bool", "int", "float", "str", "bytes", "bytearray", "complex", "range"), "builtins"),
    **dict.fromkeys(("date", "datetime", "time", "timedelta"), "datetime"),
    "Fraction": "fractions",
    "Decimal": "decimal",
}
_PLAIN = {f"{module}.{name}" for name, module in _PARTS.items()} | {f"builtins.{name}" for name in (*_CONTAINERS, "dict")}
#: Methods that the owner of an object runs, if its class has them: none of them sees a value that it is compared with.
_UNARY = {
    "__call__", "__len__", "__iter__", "__next__", "__reversed__", "__getitem__", "__setitem__", "__delitem__", "__bool__",
    "__hash__", "__str__", "__repr__", "__abs__", "__neg__", "__int__", "__float__", "__index__", "__enter__", "__exit__",
    "__instancecheck__",
}  # fmt: skip
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_BINARY = {f"__{name}__" for name in _COMPARE + _ARITHMETIC}
#: Methods that compare a text, a set or a float; objects of other types must not judge themselves.
_JUDGES = {one for kind in (str, set, float) for one in dir(kind) if one.startswith(("is", "startswith", "endswith"))}


class Ended(SystemExit):
    """Raised by the code's `sys.exit`: tests may expect it, and otherwise fail by it."""


class Handle:
    """An object of the other process."""

    __slots__ = ("__weakref__", "_line", "_number")

    def __getattr__(self, name: str) -> Any:
        if self._line.judging and name in _JUDGES:
            raise AttributeError(f"{name} of what is no plain value")
        return self._line.ask("getattr", self, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._line.ask("setattr", self, (name, value))

    def __reduce__(self) -> Any:
        raise TypeError("It lives in another process.")


def _binary(name: str, *, swapped: bool = False) -> Any:
    """Build an operator: the other process computes it between its own objects; with a plain value, plain values are compared."""
    do = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if isinstance(other, Handle):
            return self._line.ask(name, self, (other,))
        plain = self._line.ask("plain", self)
        if isinstance(plain, Handle):
            return NotImplemented
        return do(other, plain) if swapped else do(plain, other)

    return method


@lru_cache
def _kind(names: tuple[str, ...]) -> type[Handle]:
    """Build a class of handles with these methods of the class of its object."""
    asked = {name: lambda self, *values, _name=name, **named: self._line.ask(_name, self, values, named) for name in names}
    swapped = {f"__r{name}__": _binary(f"__{name}__", swapped=True) for name in _ARITHMETIC}
    both = {"__hash__": None, **swapped, **{name: _binary(name) for name in _BINARY}}
    return type("Handle", (Handle,), {"__slots__": (), **both, **asked})


class Line:
    """One end of the line between the processes; `judging`: the end of the tests, which trusts nothing that it reads."""

    def __init__(self, end: int, space: dict[str, Any], *, judging: bool) -> None:
        self.reader, self.writer = os.fdopen(os.dup(end), "rb"), os.fdopen(os.dup(end), "wb")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if end:
            os.close(end)
        self.space, self.judging, self.lock = space, judging, _thread.RLock()
        self.ours: dict[int, Any] = {}
        self.theirs: dict[Any, Any] = {}

    def send(self, *message: Any) -> None:
        """Write a line."""
        try:
            self.writer.write(json.dumps(message).encode() + b"\n")
            self.writer.flush()
        except OSError:  # without tests, or after their end, nobody reads
            if self.judging:
                os._exit(1)

    def receive(self) -> list[Any]:
        """Read a line; at a bad line the tests fail and the code ends."""
        text = self.reader.readline(_MOST)
        if text.endswith(b"\n"):
            with suppress(Exception):
                return json.loads(text)
        if self.judging:
            os._exit(1)  # the other process ended, or sent an invalid line
        sys.exit()

    def ask(self, what: str, target: Any, values: Any = (), named: Any = None) -> Any:
        """Return the other process's answer or raise its exception; apply its changes to lists, dicts and sets here."""
        values = [*values, *(named or {}).values()]
        with self.lock:
            self.send(what, self.encode(target), [self.encode(item) for item in values], list(named or {}))
            while (reply := self.receive())[0] != "reply":
                self.serve(*reply)
        try:
            _, error, result, changed = reply
            raised, result = self.decode(error), self.decode(result)
            changed = [self.decode(item) for item in changed]
            if error:
                raised, attributes = raised.__new__(raised, *result[0]), result[1]
                with suppress(Exception):
                    raised.__init__(*result[0])
                raised.__dict__.update(attributes)
        except Exception:
            os._exit(1)
        for old, new in zip(values, changed, strict=False):
            if type(old) is type(new) and isinstance(old, list):
                old[:] = new
            elif type(old) is type(new) and isinstance(old, (dict, set)):
                old.clear()
                old.update(new)
        if error:
            raise raised
        return result

    def serve(self, what: str, target: Any, values: list[Any], names: list[str]) -> None:
        """Answer the requests of the other process."""
        error, result, given = None, None, []
        try:
            given = [self.decode(item) for item in values]
            first = len(given) - len(names)
            result = self.encode(
                self.do(what, self.decode(target), given[:first], dict(zip(names, given[first:], strict=True))),
                whole=what == "plain",
            )
        except BaseException as raised:
            if self.judging and isinstance(raised, AssertionError):
                os._exit(1)  # a test failed inside a call from the code, which could catch the exception
            error, result = self.encode(type(raised)), self.encode((raised.args, vars(raised)))
        now = [self.encode(item) for item in given]
        self.send("reply", error, result, [] if now == values else now)

    def do(self, what: str, one: Any, values: list[Any], named: dict[str, Any]) -> Any:
        """Do a request of the other process, if it is allowed."""
        attribute = what in ("getattr", "setattr")
        open_one = type(one).__module__ == "__main__" and attribute and not values[0].startswith("_")
        if self.judging and not (open_one or what == "plain" or what in _UNARY | _BINARY):
            raise AttributeError("The code sees only public attributes of what the tests define.")
        if what == "name":
            return self.space[one]
        if what == "plain":
            return one
        do = getattr(builtins, what) if attribute else vars(operator).get(what) or getattr(type(one), what)
        return do(one, *values, **named)

    def encode(self, value: Any, *, whole: bool = False) -> Any:
        """Encode a value as JSON; `whole`: encode the plain part of an object whose class derives from a plain kind."""
        kind = type(value)
        if kind in _SCALARS or (kind is int and value.bit_length() < 64):
            return value
        if isinstance(value, Handle):
            return ["yours", value._number]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if type in kind.__mro__ and BaseException in value.__mro__:
            if getattr(builtins, value.__name__, None) is value:
                return ["error", value.__name__]
            self.ours[id(value)] = value
            return ["error", value.__name__, id(value), self.encode(value.__base__)]
        if whole or kind.__module__ != "__main__":
            if kind.__module__ != "__main__" and hasattr(value, "tolist") and not self.judging:
                return self.encode(value.tolist())
            for base in kind.__mro__:
                name = base.__name__
                if f"{base.__module__}.{name}" not in _PLAIN:
                    continue
                if base is dict:
                    return ["dict", *([self.encode(key), self.encode(item)] for key, item in value.items())]
                if base in _CONTAINERS.values():
                    return [name, *map(self.encode, value)]
                if base in (bool, float, str):
                    return base.__str__(value) if base is str else base(value)
                return [name, *map(self.encode, _parts(base, value))]
        if self.judging and not isinstance(value, type(_parts)):
            import pickle  # pickles go only from the tests to the code

            with suppress(Exception):
                data = pickle.dumps(value)
                if b"__main__" not in data:
                    return ["pickle", data.hex()]
        self.ours[id(value)] = value
        return ["object", id(value), [name for name in sorted(_UNARY) if any(name in vars(base) for base in kind.__mro__)]]

    def decode(self, value: Any) -> Any:
        """Decode the value that `encode` of the other process had, or a stand-in for it."""
        if not isinstance(value, list):
            return value
        tag, *rest = value
        match tag:
            case "yours":
                return self.ours[rest[0]]
            case "object":
                if rest[0] not in self.theirs:
                    one = self.theirs[rest[0]] = _kind(tuple(name for name in rest[1] if name in _UNARY))()
                    object.__setattr__(one, "_line", self)
                    object.__setattr__(one, "_number", rest[0])
                return self.theirs[rest[0]]
            case "error" if len(rest) == 1:
                return Ended if rest[0] == "SystemExit" else _error(rest[0])
            case "error":
                if rest[1] not in self.theirs:
                    self.theirs[rest[1]] = type(rest[0], (self.decode(rest[2]),), {})
                return self.theirs[rest[1]]
            case "module":
                return import_module(rest[0])
            case "pickle" if not self.judging:
                import pickle

                return pickle.loads(bytes.fromhex(rest[0]))
            case "dict":
                return {self.decode(key): self.decode(one) for key, one in rest}
            case _ if tag in _CONTAINERS:
                return _CONTAINERS[tag](map(self.decode, rest))
        return getattr(import_module(_PARTS[tag]), tag)(*map(self.decode, rest))


def _parts(kind: Any, value: Any) -> tuple[Any, ...]:
    """Return the arguments from which the constructor of a plain kind rebuilds a value."""
    if kind is int:
        return hex(value), 16
    if kind in (bytes, bytearray):
        return value.decode("latin-1"), "latin-1"
    return (value.real, value.imag) if kind is complex else kind.__reduce__(value)[1]


def _error(name: str) -> type[BaseException]:
    kind = getattr(builtins, name)
    if not issubclass(kind, BaseException):
        raise TypeError(name)
    return kind


class Names(dict[str, Any]):
    """The names that tests can use: builtins first, then the names of the code."""

    line: Line

    def __missing__(self, name: str) -> Any:
        try:
            return self.line.ask("name", name)
        except KeyError:
            if hasattr(builtins, name):
                return getattr(builtins, name)
            raise


def _space() -> dict[str, Any]:
    sys.modules["_program"], sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    return vars(sys.modules["__main__"])


def code() -> None:
    """Run the code, then answer the requests of the tests."""
    space = _space()
    line = Line(0, space, judging=False)
    exec(compile(line.receive()[0], "completion", "exec"), space)
    line.send("ready")
    while True:
        line.serve(*line.receive())


def tests(end: int) -> None:
    """Run the tests, and exit with 0 if they reach their end."""
    program, judge, shadowed = json.loads(sys.stdin.buffer.read())
    sys.argv, status, space = ["tests"], 1, _space()
    line = Line(end, space, judging=True)
    space["__builtins__"] = names = Names({name: value for name, value in vars(builtins).items() if name not in shadowed})
    names.line = line
    line.send(program)
    try:
        line.receive()
        exec(compile(judge, "tests", "exec"), space)
        status = 0
    except SystemExit as ended:
        status = int(type(ended) is not SystemExit or bool(ended.code))
    finally:
        os._exit(status)


if __name__ == "__main__":
    tests(int(sys.argv[1])) if len(sys.argv) > 1 else code()
