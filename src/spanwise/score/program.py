"""Run the code of a completion and its tests in two processes.

The code has its end of the connection as standard input. The tests get code and tests there, and their end as an argument: they
let the code start, and their exit status is the verdict. Plain values travel as copies, anything else as a `Handle`. The code is
never asked how one of its objects compares with a plain value, and nothing that it sends is evaluated.
"""

from __future__ import annotations  # `compile` applies the import to the tested code and the tests, too

import _thread
import builtins
import json
import operator
import os
import sys
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any

_LONGEST_LINE = 2**26
_SCALARS = (type(None), bool, float, str)
_CONTAINERS = (list, tuple, set, frozenset)
#: Maps a type's name to the type, for all types besides `_SCALARS` whose values are sent as copies.
_COPIED: dict[str, Any] = {
    kind.__name__: kind
    for kind in (*_CONTAINERS, int, bytes, bytearray, complex, range, date, datetime, time, timedelta, Fraction, Decimal)
}
#: Methods of a `Handle`, the stand-in for an object in another process, that run in that process.
_UNARY = {
    "__call__", "__len__", "__iter__", "__next__", "__reversed__", "__getitem__", "__setitem__", "__delitem__", "__bool__",
    "__hash__", "__str__", "__repr__", "__abs__", "__neg__", "__int__", "__float__", "__index__", "__enter__", "__exit__",
    "__instancecheck__",
}  # fmt: skip
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_BINARY = {f"__{name}__" for name in _COMPARE + _ARITHMETIC}
#: Methods, such as `isdigit`, that tests cannot call on objects of the tested code, because the objects could lie.
_JUDGES = {name for kind in (str, set, float) for name in dir(kind) if name.startswith(("is", "startswith", "endswith"))}


class Ended(SystemExit):
    """Raised in the tests if the tested code called `sys.exit`. The tests then fail, unless they expect this error."""


class Handle:
    """A stand-in for an object of the other process. It asks that process for attributes and calls."""

    __slots__ = ("__weakref__", "_spanwise_connection", "_spanwise_number")  # tests are unlikely to use these names

    def __getattr__(self, name: str) -> Any:
        if self._spanwise_connection.judging and name in _JUDGES:
            raise AttributeError(
                f"This object of the tested code has no {name}. Only plain values (numbers, texts, lists) have this attribute."
            )
        return self._spanwise_connection.ask("getattr", self, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._spanwise_connection.ask("setattr", self, (name, value))

    def __reduce__(self) -> Any:
        raise TypeError("This object of the tested code is in another process, so it cannot be copied or pickled.")


def _binary(name: str, *, swapped: bool = False) -> Any:
    """Build an operator such as `+` for stand-ins (`Handle`). It runs in the other process, or here with a plain operand."""
    operator_function = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if isinstance(other, Handle):
            return self._spanwise_connection.ask(name, self, (other,))
        plain_operand = self._spanwise_connection.ask("plain", self)
        if isinstance(plain_operand, Handle):
            return NotImplemented
        return operator_function(other, plain_operand) if swapped else operator_function(plain_operand, other)

    return method


@lru_cache
def _handle_class(method_names: tuple[str, ...]) -> type[Handle]:
    """Build a subclass of `Handle` with the named methods. Each of them runs in the other process."""
    remote_methods = {
        name: lambda self, *values, _name=name, **named: self._spanwise_connection.ask(_name, self, values, named)
        for name in method_names
    }
    swapped_operators = {f"__r{name}__": _binary(f"__{name}__", swapped=True) for name in _ARITHMETIC}
    operators = {name: _binary(name) for name in _BINARY}
    return type("Handle", (Handle,), {"__slots__": (), "__hash__": None, **swapped_operators, **operators, **remote_methods})


class Connection:
    """One end of the connection between two processes. The tests' end is `judging` and trusts nothing it reads."""

    def __init__(self, descriptor: int, namespace: dict[str, Any], *, judging: bool) -> None:
        self.reader, self.writer = (os.fdopen(os.dup(descriptor), file_mode) for file_mode in ("rb", "wb"))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if descriptor:
            os.close(descriptor)
        self.namespace, self.judging, self.lock = namespace, judging, _thread.RLock()
        self.own_objects: dict[int, Any] = {}
        self.stand_ins: dict[Any, Any] = {}

    def send(self, *message: Any) -> None:
        """Send a message to the other process as one line of JSON."""
        try:
            self.writer.write(json.dumps(message).encode() + b"\n")
            self.writer.flush()
        except OSError:  # nobody reads the message: there are no tests, or the other process has ended
            if self.judging:
                os._exit(1)

    def receive(self) -> list[Any]:
        """Read a message from the process at the other end of the connection. End this process if the message is invalid."""
        received_line = self.reader.readline(_LONGEST_LINE)
        if received_line.endswith(b"\n"):
            with suppress(Exception):
                return json.loads(received_line)
        if self.judging:
            os._exit(1)  # the tests must not pass after an invalid message
        sys.exit()

    def ask(self, what: str, target: Any, argument_values: Any = (), named: Any = None) -> Any:
        """Ask the process at the other end: return its result or raise its exception. Repeat its changes to arguments."""
        argument_values = [*argument_values, *(named or {}).values()]
        with self.lock:
            self.send(what, self.encode(target), [self.encode(item) for item in argument_values], list(named or {}))
            while (reply := self.receive())[0] != "reply":
                self.serve(*reply)
        try:
            _, error, encoded_result, encoded_changes = reply
            exception_class, result = self.decode(error), self.decode(encoded_result)
            exception = None
            changed_values = [self.decode(item) for item in encoded_changes]
            if error:
                exception_arguments, attributes = result
                exception = exception_class.__new__(exception_class, *exception_arguments)
                with suppress(Exception):
                    exception.__init__(*exception_arguments)
                exception.__dict__.update(attributes)
        except Exception:
            os._exit(1)
        for old_value, new_value in zip(argument_values, changed_values, strict=False):
            if type(old_value) is type(new_value) and isinstance(old_value, (list, dict, set)):
                old_value.clear()
                (old_value.extend if isinstance(old_value, list) else old_value.update)(new_value)
        if exception is not None:
            raise exception
        return result

    def serve(self, what: str, target: Any, values: list[Any], names: list[str]) -> None:
        """Answer one request from the process at the other end of the connection."""
        error, encoded_result, arguments = None, None, []
        try:
            arguments = [self.decode(argument) for argument in values]
            positional_count = len(arguments) - len(names)
            named_arguments = dict(zip(names, arguments[positional_count:], strict=True))
            returned_value = self.do(what, self.decode(target), arguments[:positional_count], named_arguments)
            encoded_result = self.encode(returned_value, as_plain=what == "plain")
        except BaseException as raised:
            if self.judging and isinstance(raised, AssertionError):
                os._exit(1)  # the tested code must not catch a failed assertion of the tests
            error, encoded_result = self.encode(type(raised)), self.encode((raised.args, vars(raised)))
        encoded_arguments = [self.encode(argument) for argument in arguments]
        self.send("reply", error, encoded_result, [] if encoded_arguments == values else encoded_arguments)

    def do(self, action: str, target: Any, values: list[Any], named: dict[str, Any]) -> Any:
        """Carry out the other process's request, such as `getattr`. The tests' process refuses private attributes."""
        is_attribute = action in ("getattr", "setattr")
        is_public = type(target).__module__ == "__main__" and is_attribute and not values[0].startswith("_")
        if self.judging and not (is_public or action == "plain" or action in _UNARY | _BINARY):
            raise AttributeError("The tested code can reach only public attributes of objects that the tests define.")
        if action == "name":
            return self.namespace[target]
        if action == "plain":
            return target
        if is_attribute:
            return getattr(builtins, action)(target, *values, **named)
        return (vars(operator).get(action) or getattr(type(target), action))(target, *values, **named)

    def encode(self, value: Any, *, as_plain: bool = False) -> Any:
        """Encode a value as JSON. With `as_plain`, an instance of a plain type's subclass becomes one of that type."""
        value_type = type(value)
        if value_type in _SCALARS or (value_type is int and value.bit_length() < 64):
            return value
        if isinstance(value, Handle):
            return ["yours", value._spanwise_number]
        if isinstance(value, ModuleType):
            return ["module", value.__name__]
        if type in value_type.__mro__ and BaseException in value.__mro__:
            if getattr(builtins, value.__name__, None) is value:
                return ["error", value.__name__]
            self.own_objects[id(value)] = value
            return ["error", value.__name__, id(value), self.encode(value.__base__)]
        if as_plain or value_type.__module__ != "__main__":
            if value_type.__module__ != "__main__" and hasattr(value, "tolist") and not self.judging:
                return self.encode(value.tolist())
            for base in value_type.__mro__:
                if base in (bool, float, str):
                    return base.__str__(value) if base is str else base(value)
                if base is dict:
                    return ["dict", *([self.encode(key), self.encode(item)] for key, item in value.items())]
                if base in _CONTAINERS:
                    return [base.__name__, *map(self.encode, value)]
                if base in _COPIED.values():
                    return [base.__name__, *map(self.encode, _constructor_arguments(base, value))]
        if self.judging and not isinstance(value, type(_error)):
            import pickle  # unpickling may run any code, so the tests' process sends pickles but reads none

            with suppress(Exception):
                pickled_value = pickle.dumps(value)
                if b"__main__" not in pickled_value:
                    return ["pickle", pickled_value.hex()]
        self.own_objects[id(value)] = value
        unary_names = [name for name in sorted(_UNARY) if any(name in vars(base) for base in value_type.__mro__)]
        return ["object", id(value), unary_names]

    def decode(self, value: Any) -> Any:
        """Decode a value from the other process; an object that cannot be copied becomes a stand-in (`Handle`)."""
        if not isinstance(value, list):
            return value
        value_tag, *payload = value
        match value_tag:
            case "yours":
                return self.own_objects[payload[0]]
            case "object":
                object_number, method_names = payload
                if object_number not in self.stand_ins:
                    handle = _handle_class(tuple(name for name in method_names if name in _UNARY))()
                    object.__setattr__(handle, "_spanwise_connection", self)
                    object.__setattr__(handle, "_spanwise_number", object_number)
                    self.stand_ins[object_number] = handle
                return self.stand_ins[object_number]
            case "error" if len(payload) == 1:
                return Ended if payload[0] == "SystemExit" else _error(payload[0])
            case "error":
                if payload[1] not in self.stand_ins:
                    self.stand_ins[payload[1]] = type(payload[0], (self.decode(payload[2]),), {})
                return self.stand_ins[payload[1]]
            case "module":
                return import_module(payload[0])
            case "pickle" if not self.judging:
                import pickle

                return pickle.loads(bytes.fromhex(payload[0]))
            case "dict":
                return {self.decode(key): self.decode(item) for key, item in payload}
        plain_type = _COPIED[value_tag]
        return plain_type(map(self.decode, payload)) if plain_type in _CONTAINERS else plain_type(*map(self.decode, payload))


def _constructor_arguments(kind: Any, value: Any) -> tuple[Any, ...]:
    """Return the arguments from which `kind`, a type such as `bytes`, builds a copy of a value."""
    if kind is int:
        return hex(value), 16
    if kind in (bytes, bytearray):
        return value.decode("latin-1"), "latin-1"
    return (value.real, value.imag) if kind is complex else kind.__reduce__(value)[1]


def _error(name: str) -> type[BaseException]:
    error_class = getattr(builtins, name)
    if not issubclass(error_class, BaseException):
        raise TypeError(name)
    return error_class


class Names(dict[str, Any]):
    """The builtins of test code. Names that this code does not define are looked up in the tested code's process."""

    connection: Connection

    def __missing__(self, name: str) -> Any:
        try:
            return self.connection.ask("name", name)
        except KeyError:
            if hasattr(builtins, name):
                return getattr(builtins, name)
            raise


def _replace_main_module() -> dict[str, Any]:
    """Replace the module `__main__` by an empty module, and return the dict of its names."""
    main_module = ModuleType("__main__")
    sys.modules.update(_program=sys.modules["__main__"], __main__=main_module)
    return vars(main_module)


def code() -> None:
    """Run the tested code in this process, then answer the requests of the tests' process."""
    main_namespace = _replace_main_module()
    connection = Connection(0, main_namespace, judging=False)
    exec(compile(connection.receive()[0], "completion", "exec"), main_namespace)
    connection.send("ready")
    while True:
        connection.serve(*connection.receive())


def tests(descriptor: int) -> None:
    """Run the tests in this process, and exit with status 0 if they reach their end."""
    program_text, test_code, redefined_names = json.loads(sys.stdin.buffer.read())
    sys.argv = ["tests"]
    exit_status = 1
    main_namespace = _replace_main_module()
    connection = Connection(descriptor, main_namespace, judging=True)
    test_builtins = Names({name: value for name, value in vars(builtins).items() if name not in redefined_names})
    test_builtins.connection = connection
    main_namespace["__builtins__"] = test_builtins
    connection.send(program_text)
    try:
        connection.receive()
        exec(compile(test_code, "tests", "exec"), main_namespace)
        exit_status = 0
    except SystemExit as ended:
        exit_status = int(type(ended) is not SystemExit or bool(ended.code))
    finally:
        os._exit(exit_status)


if __name__ == "__main__":
    tests(int(sys.argv[1])) if len(sys.argv) > 1 else code()
