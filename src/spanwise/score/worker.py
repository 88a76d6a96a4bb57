"""Run checks in a separate process, because they may hang or crash.

`worker.py KIND DEADLINE CLOCK_DEADLINE MEMORY` is run by path and imports nothing of this package, so that it starts in a second
and holds no torch. KIND is `math`, which compares answers with Math-Verify, `schema`, which judges JSON by a schema, or `code`,
which runs each program in a process, an empty folder and a session of its own, without this process's environment.
"""

import ast
import builtins
import json
import logging
import math
import os
import re
import signal
import socket
import subprocess
import symtable
import sys
import tempfile
import unicodedata
from collections.abc import Callable
from contextlib import ExitStack, suppress
from fractions import Fraction
from functools import lru_cache, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows has no module `resource`
    resource = None

# Matches a letter, but not letters that formulas use, such as Greek ones.
_LETTER = r"(?:[^\W\d_\xb2-\xbe\u0370-\u03ff\u2070-\u2bff\U0001d400-\U0001d7ff]|(?!\d)[\u0300-\u036f\u0900-\u0eff])"
_DATE = r"[12]\d{3}([/-])[0-3]?\d\3[0-3]?\d|[0-3]?\d([/-])[0-3]?\d\4[12]\d{3}"
_WORDS = re.compile(rf"({_LETTER}{{2,}}+|(?![A-Za-z]){_LETTER})([ '-]{_LETTER}++)*+|{_DATE}")  # `++` prevents backtracking
_SCIENTIFIC = re.compile(r"([+-]?(?:[0-9]++\.?[0-9]*+|\.[0-9]++))[eE]([+-]?[0-9]{1,3})")
#: Signs that mark mathematics in a text.
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
_PROGRAM = Path(__file__).with_name("program.py")
_FILE_BYTES = 2**26
#: Stands for the parsed value of a text that is not JSON.
MISSING = object()
#: JSON Schema keywords that are checked in linear time. Others, such as `pattern`, may take far longer.
_LINEAR = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "format", "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "items", "prefixItems", "additionalItems", "minItems", "maxItems", "properties", "required",
    "additionalProperties", "minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
}  # fmt: skip
#: Keywords such as `allOf`, whose inner schemas check the same value as the outer schema.
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")


def as_latex(text: str) -> str:
    r"""Prepare a text for Math-Verify: put it in dollar signs if it has no mathematical signs. Words become `\text{}`."""
    text = match.expand(r"\1 \\cdot 10^{\2}") if (match := _SCIENTIFIC.fullmatch(text.strip())) else text.strip()
    if any(delimiter in text for delimiter in DELIMITERS) or "\n" in text:
        return text
    return f"$\\text{{{text}}}$" if as_words(text) else f"${text}$"


def as_words(text: str) -> str | None:
    """Normalise words or a date, so that `==` can compare them. Return None for any other text."""
    is_word_text = _WORDS.fullmatch(text) is not None and text != "pi"
    return unicodedata.normalize("NFC", re.sub(r"\b0(?=\d)", "", text.replace("/", "-"))) if is_word_text else None


def equals_as_math(gold: str, answer: str) -> bool | None:
    """Return whether `answer` equals `gold` as mathematics. Return None if the gold answer cannot be read."""
    from math_verify import parse, verify  # import late, because math_verify loads slowly

    # Math-Verify's own time limits are off, because the parent kills this process in time.
    untimed_parse = partial(parse, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    parsed_gold = untimed_parse(as_latex(gold))
    if all(isinstance(part, str) for part in parsed_gold):  # Math-Verify found no mathematics, only the raw text
        return None
    try:
        parsed_answer = untimed_parse(as_latex(answer), raise_on_error=True)
        is_equal = bool(verify(parsed_gold, parsed_answer, timeout_seconds=None, raise_on_error=True))
        with suppress(TypeError, ValueError):  # Math-Verify compares only six decimals
            gold_abs = abs(float(parsed_gold[0]))
            if is_equal and gold_abs < 1e-5:  # sympy may turn 0 into a value below 1e-100
                is_equal = math.isclose(parsed_gold[0], parsed_answer[0], rel_tol=1e-6, abs_tol=1e-12 * (gold_abs < 1e-100))
        return is_equal
    except MemoryError:
        raise
    except Exception:
        return bool(verify(parsed_gold, untimed_parse(as_latex(answer)), timeout_seconds=None))


def exact(text: str) -> int | Fraction:
    """Return a JSON number as an exact int or Fraction. NaN and Infinity raise ValueError."""
    fraction = Fraction(repr(float(text)))  # `repr` returns the shortest decimal of a float
    return fraction.numerator if fraction.denominator == 1 else fraction


#: Reads JSON with numbers as exact decimals. A number too large for a float becomes infinite.
EXACT = json.JSONDecoder(
    parse_float=lambda text: exact(text) if math.isfinite(float(text)) else float(text), parse_constant=exact
)


def json_value(text: str, *, within: bool = False, decoder: json.JSONDecoder = EXACT) -> Any:
    """Return the value of a JSON text, or `MISSING` if it is invalid. With `within`, text may surround it."""
    try:
        return decoder.raw_decode(text, text.index("{"))[0] if within else decoder.decode(text)
    except (ValueError, RecursionError):
        return MISSING


def whole_json(completion: str) -> Any:
    """Return the value of a completion's JSON. If the whole text is not JSON, it begins at the first brace."""
    parsed_json = json_value(completion)
    return json_value(completion, within=True) if parsed_json is MISSING else parsed_json


def is_valid(schema: str, completion: str) -> bool:
    """Return whether the JSON of a completion is valid under a JSON Schema, given as text."""
    parsed_json = whole_json(completion)
    try:
        return parsed_json is not MISSING and read_schema(schema)[0].is_valid(parsed_json)
    except RecursionError:  # the value is nested deeper than Python can follow
        return False


@lru_cache(maxsize=4096)
def read_schema(text: str) -> tuple[Any, bool]:
    """Return a JSON Schema's validator, and whether validation takes linear time. An invalid schema raises ValueError."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    schema = json.loads(text, parse_float=exact, parse_constant=exact)
    if not isinstance(schema, dict):
        raise ValueError(f"the schema is {text:.60}, but a schema must be a JSON object")
    validator_class = validator_for(schema, default=Draft202012Validator)
    specification = specification_with(validator_class.META_SCHEMA["$schema"])
    schema_keywords: set[str] = set()
    subschema_ids: dict[int, list[int]] = {}  # maps a schema's id to the ids of the schemas that apply to the same value

    def check(contents: Any) -> None:
        try:
            validator_class.check_schema(contents)
        except SchemaError as error:
            error_path = "/".join(map(str, error.absolute_path))
            raise ValueError(f"{error.message:.200}" + (f" (at {error_path})" if error_path else "")) from error

    def follow(contents: Any, resolver: Any) -> None:
        """Check a JSON Schema, the schemas inside it and those that it refers to."""
        if not isinstance(contents, dict) or id(contents) in subschema_ids:
            return
        schema_keywords.update(contents)
        property_pattern = "|".join(contents.get("patternProperties", ()))
        try:
            re.compile(property_pattern)  # jsonschema's validator joins patterns, too
        except re.error as error:
            raise ValueError(f"{property_pattern!r} is not a valid regular expression in Python ({error})") from None
        subschemas: list[Any] = []
        for nested_schema in map(contents.get, _SAME_VALUE):
            subschemas += nested_schema if isinstance(nested_schema, list) else [nested_schema]
        subschema_ids[id(contents)] = list(map(id, subschemas))
        for reference_key in ("$ref", "$dynamicRef"):
            if isinstance(contents.get(reference_key), str):
                try:
                    resolved_target = resolver.lookup(contents[reference_key])
                except Unresolvable:
                    fault = f"{reference_key} {contents[reference_key]!r} refers to a missing schema"
                    raise ValueError(f"{fault}; copy that schema into $defs, because spanwise downloads nothing") from None
                check(resolved_target.contents)
                subschema_ids[id(contents)].append(id(resolved_target.contents))
                follow(resolved_target.contents, resolved_target.resolver)
        for inner_resource in specification.create_resource(contents).subresources():
            follow(inner_resource.contents, resolver.in_subresource(inner_resource))

    check(schema)
    schema_resource = specification.create_resource(schema)
    # The registry's method `crawl` finds inner schemas, and fetches nothing from the network.
    schema_registry = REGISTRY.with_resource(schema_resource.id() or "", schema_resource).crawl()
    follow(schema, schema_registry.resolver(schema_resource.id() or ""))
    try:
        TopologicalSorter(subschema_ids).prepare()
    except CycleError:
        raise ValueError("a $ref of the schema leads back to itself; remove this $ref") from None
    return validator_class(schema, registry=schema_registry), schema_keywords <= _LINEAR


def redefinable_builtins(tests: str) -> list[str]:
    """Return the builtins that the tests use and that the tested code may redefine."""
    definition_types = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    nodes = [node for stmt in ast.parse(tests).body if not isinstance(stmt, definition_types) for node in ast.walk(stmt)]
    loaded_names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if not loaded_names - {"true", "false", "null"} and not any(isinstance(node, ast.Assert) for node in nodes):
        raise ValueError("the tests only define or list something, so any code would pass them")
    module_table = symtable.symtable(tests, "tests", "exec")
    symbol_tables = [module_table]
    for symbol_table in symbol_tables:
        symbol_tables += symbol_table.get_children()
    module_symbols = module_table.get_symbols()
    global_symbols = [symbol for table in symbol_tables for symbol in table.get_symbols() if symbol.is_global()]
    defined_names = {s.get_name() for s in module_symbols if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used_names = {symbol.get_name() for symbol in (*module_symbols, *global_symbols) if symbol.is_referenced()}
    undefined_names = used_names - defined_names
    return sorted(undefined_names) if all(hasattr(builtins, name) for name in undefined_names) else []


def run(code: str, tests: str | None, *, deadline: float, clock: float, memory: int) -> bool:
    """Return whether a program, or its tests if it has any, ends with exit status 0."""
    code_request = [code] if tests is None else [code, tests, redefinable_builtins(tests)]
    with tempfile.TemporaryDirectory(prefix="spanwise-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:

        def start(*arguments: str, **pipes: Any) -> subprocess.Popen[Any]:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_PROGRAM), *arguments],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
                preexec_fn=lambda: _limit_program(deadline, clock, memory),
                **pipes,
            )
            stack.callback(_kill, process)
            return process

        if tests is None:
            judging_process = start(stdin=subprocess.PIPE)
        else:
            test_socket, code_socket = socket.socketpair()
            with test_socket, code_socket:
                judging_process = start(str(test_socket.fileno()), stdin=subprocess.PIPE, pass_fds=(test_socket.fileno(),))
                start(stdin=code_socket)
        with suppress(subprocess.TimeoutExpired):
            judging_process.communicate(json.dumps(code_request).encode() + b"\n", clock)
        return judging_process.poll() == 0


def _kill(process: subprocess.Popen[Any]) -> None:
    """Kill a process and every process that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _limit_program(deadline: float, clock: float, memory: int) -> None:
    """Limit the time, memory and file size of the process that calls this function. It then ends even without its parent."""
    assert resource is not None, "a POSIX system"
    resource_limits = {resource.RLIMIT_CPU: math.ceil(deadline), resource.RLIMIT_FSIZE: _FILE_BYTES, resource.RLIMIT_CORE: 0}
    if memory:
        resource_limits[resource.RLIMIT_AS] = memory
    for name, limit in resource_limits.items():
        hard_limit = resource.getrlimit(name)[1]
        limit = limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit)
        resource.setrlimit(name, (limit, limit))
    _limit_time(deadline, clock)


def _limit_time(processor: float, clock: float) -> None:
    """Let the operating system end this process after some processor or clock time."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, processor)
        signal.setitimer(signal.ITIMER_REAL, clock)


def _reply(check: Callable[..., bool | None], *request: Any, **limits: Any) -> str:
    """Return the JSON reply to one request. An exception becomes an `error` entry."""
    try:
        verdict = check(*request, **limits)
    except MemoryError:
        os._exit(1)  # a process that ran out of memory may be broken
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:300]})
    return json.dumps({"error": "the gold answer cannot be read as mathematics"} if verdict is None else {"value": verdict})


def main() -> None:
    """Run a harmless check to show that checks work, and then answer each request that arrives on standard input."""
    kind_of_check, memory_limit = sys.argv[1], int(sys.argv[4])
    processor_seconds, clock_seconds = map(float, sys.argv[2:4])
    # Libraries must not print into the pipe that carries the replies.
    reply_file = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program_limits: dict[str, Any] = {}
    if kind_of_check != "code":
        check_function, trial_input = (equals_as_math, "1/2") if kind_of_check == "math" else (is_valid, "{}")
        print(_reply(check_function, trial_input, trial_input), file=reply_file, flush=True)
        if resource is not None and memory_limit:
            resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    else:
        check_function = run
        program_limits = {"deadline": processor_seconds, "clock": 4 * processor_seconds + 5.0, "memory": memory_limit}
        print(_reply(check_function, "", None, deadline=30.0, clock=60.0, memory=0), file=reply_file, flush=True)
    for line in sys.stdin:
        _limit_time(processor_seconds, clock_seconds)
        reply_secret, *check_request = json.loads(line)
        check_reply = _reply(check_function, *check_request, **program_limits)
        _limit_time(0.0, 0.0)
        print(reply_secret + check_reply, file=reply_file, flush=True)


if __name__ == "__main__":
    main()
