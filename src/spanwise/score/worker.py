"""The process that runs checks which may hang or crash: one JSON line in, one JSON line out, until its input closes.

`worker.py KIND DEADLINE PATIENCE MEMORY` is run by path and imports nothing of this package, so that it starts in a second and
holds no torch. KIND is `math`, which compares answers with Math-Verify, `schema`, which judges JSON by a schema, or `code`, which
runs each program in a process, an empty folder and a session of its own, without this process's environment.
"""

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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from fractions import Fraction
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # on Windows
    resource = None

# Possessive, because an answer may be a megabyte of letters: giving them back one by one would take quadratic time.
_WORDS = re.compile(r"[A-Za-z]{2,}+(?:[ '-][A-Za-z]++)*+")
#: What a text with mathematics in it holds.
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
_PROGRAM = Path(__file__).with_name("program.py")
_FILE_BYTES = 2**26
#: The value of a text that is not JSON.
MISSING = object()
#: Keywords of a schema whose time is linear in the value; with others (`pattern`, `uniqueItems`, `$ref`) a check may hang.
_LINEAR = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "format", "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "items", "prefixItems", "additionalItems", "minItems", "maxItems", "properties", "required",
    "additionalProperties", "minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
}  # fmt: skip
#: Keywords whose schemas check the same value as the schema around them.
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")


def as_latex(text: str) -> str:
    r"""Put bare text between dollars, so that `\frac{1}{3}` is not read as 3; words become `\text{...}`, not a product."""
    text = text.strip()
    if any(sign in text for sign in DELIMITERS) or "\n" in text:
        return text
    return f"$\\text{{{text}}}$" if is_words(text) else f"${text}$"


def is_words(text: str) -> bool:
    """Return whether a text is words, and no product of letters."""
    return _WORDS.fullmatch(text) is not None and text != "pi"


def equals_as_math(gold: str, answer: str) -> bool | None:
    """Return whether `answer` equals `gold` as mathematics; None if the gold answer cannot be read."""
    from math_verify import parse, verify  # loaded only in this process

    # This process is killed from outside: alarms of its own would only work in a main thread.
    parsed_gold = parse(as_latex(gold), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if all(isinstance(part, str) for part in parsed_gold):  # no mathematics in it, only the raw text
        return None
    try:
        parsed = parse(as_latex(answer), parsing_timeout=None, raise_on_error=True)  # pyright: ignore[reportArgumentType]
        return bool(verify(parsed_gold, parsed, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:
        parsed = parse(as_latex(answer), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        return bool(verify(parsed_gold, parsed, timeout_seconds=None))


def exact(text: str) -> int | Fraction:
    """Return the shortest decimal of a float, so that remainders are exact; raise ValueError if there is none."""
    number = Fraction(repr(float(text)))
    return number.numerator if number.denominator == 1 else number


#: Reads numbers as the decimals that are written; one that is beyond every float is infinite.
EXACT = json.JSONDecoder(
    parse_float=lambda text: exact(text) if math.isfinite(float(text)) else float(text), parse_constant=exact
)


def json_value(text: str, *, within: bool = False, decoder: json.JSONDecoder = EXACT) -> Any:
    """Return the value of a JSON text, or of the JSON from its first brace on (`within`); `MISSING` if it is not JSON."""
    try:
        return decoder.raw_decode(text, text.index("{"))[0] if within else decoder.decode(text)
    except (ValueError, RecursionError):
        return MISSING


def whole_json(said: str) -> Any:
    """Return the JSON of a completion: from its first brace on, if the whole is not JSON."""
    value = json_value(said)
    return json_value(said, within=True) if value is MISSING else value


def is_valid(schema: str, said: str) -> bool:
    """Return whether the JSON of a completion is valid under the schema of this JSON text."""
    value = whole_json(said)
    try:
        return value is not MISSING and read_schema(schema)[0].is_valid(value)
    except RecursionError:  # nested deeper than any schema intends
        return False


@lru_cache(maxsize=4096)
def read_schema(text: str) -> tuple[Any, bool]:
    """Return a checker of values under a schema's JSON text, and whether its time is linear in the value; ValueError if invalid."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    schema = json.loads(text, parse_float=exact, parse_constant=exact)
    if not isinstance(schema, dict):
        raise ValueError(f"it is {text:.60}, and must be an object")
    kind = validator_for(schema, default=Draft202012Validator)
    specification = specification_with(kind.META_SCHEMA["$schema"])
    keywords: set[str] = set()
    same_value: dict[int, list[int]] = {}  # the identity of each schema, and of those that check the same value

    def check(contents: Any) -> None:
        try:
            kind.check_schema(contents)
        except SchemaError as error:
            place = "/".join(map(str, error.absolute_path))
            raise ValueError(f"{error.message:.200}" + (f" (at {place})" if place else "")) from error

    def follow(contents: Any, resolver: Any) -> None:
        """Check a schema, the schemas in it and those that it refers to."""
        if not isinstance(contents, dict) or id(contents) in same_value:
            return
        keywords.update(contents)
        patterns = "|".join(contents.get("patternProperties", ()))
        try:
            re.compile(patterns)  # as one, as it is searched for
        except re.error as error:
            raise ValueError(f"{patterns!r} is no regular expression of Python ({error})") from None
        values = [contents.get(key) for key in _SAME_VALUE]
        same_value[id(contents)] = [
            id(nested) for value in values for nested in (value if isinstance(value, list) else [value])
        ]
        for key in ("$ref", "$dynamicRef"):
            if isinstance(contents.get(key), str):
                try:
                    target = resolver.lookup(contents[key])
                except Unresolvable:
                    why = f"its {key} {contents[key]!r} leads nowhere; nothing is fetched, so put what it means under $defs"
                    raise ValueError(why) from None
                check(target.contents)
                same_value[id(contents)].append(id(target.contents))
                follow(target.contents, target.resolver)
        for inner in specification.create_resource(contents).subresources():
            follow(inner.contents, resolver.in_subresource(inner))

    check(schema)
    resource = specification.create_resource(schema)
    registry = REGISTRY.with_resource(resource.id() or "", resource).crawl()  # without a way to fetch a schema
    follow(schema, registry.resolver(resource.id() or ""))
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError:
        raise ValueError("its $ref leads back to itself") from None
    return kind(schema, registry=registry), keywords <= _LINEAR


def builtins_of_code(tests: str) -> list[str]:
    """Return the builtins that the code may define for its tests: all that the tests use, if they use no other undefined name."""
    try:
        table = symtable.symtable(tests, "tests", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the tests fail with them
        return []
    tables = [table]
    for one in tables:
        tables += one.get_children()
    defined = {one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported() or one.is_namespace()}
    used = {one.get_name() for each in tables for one in each.get_symbols() if one.is_referenced() and one.is_global()}
    used |= {one.get_name() for one in table.get_symbols() if one.is_referenced()}
    return sorted(used - defined) if all(hasattr(builtins, name) for name in used - defined) else []


def run(code: str, tests: str | None, *, deadline: float, clock: float, memory: int) -> bool:
    """Return whether the code runs to its end and exits with 0, or whether the tests that use it do."""
    with tempfile.TemporaryDirectory(prefix="spanwise-", ignore_cleanup_errors=True) as folder, ExitStack() as stack:

        def start(*words: str, **ends: Any) -> subprocess.Popen[Any]:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_PROGRAM), *words],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                start_new_session=True,
                preexec_fn=lambda: _limit_program(deadline, clock, memory),
                **ends,
            )
            stack.callback(_end, process)
            return process

        if tests is None:
            judge, request = start(stdin=subprocess.PIPE), [code]
        else:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                judge = start(str(ours.fileno()), stdin=subprocess.PIPE, pass_fds=(ours.fileno(),))
                start(stdin=theirs)
            request = [code, tests, builtins_of_code(tests)]
        with suppress(subprocess.TimeoutExpired):
            judge.communicate(json.dumps(request).encode() + b"\n", clock)
        return judge.poll() == 0


def _end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it started and left behind."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _limit_program(deadline: float, clock: float, memory: int) -> None:
    """Set limits in the new process that end it even if its parent is gone."""
    assert resource is not None, "a POSIX system"
    limits = {resource.RLIMIT_CPU: math.ceil(deadline), resource.RLIMIT_FSIZE: _FILE_BYTES, resource.RLIMIT_CORE: 0}
    if memory:
        limits[resource.RLIMIT_AS] = memory
    for name, most in limits.items():
        hard = resource.getrlimit(name)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (most, most))
    _limit_time(deadline, clock)


def _limit_time(processor: float, clock: float) -> None:
    """End this process after `seconds` of its own time, or by the clock: if the parent dies, nobody else would."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, processor)
        signal.setitimer(signal.ITIMER_REAL, clock)


def _reply(check: Callable[..., bool | None], *request: Any, **limits: Any) -> str:
    """Return the reply to one request; an exception becomes an `error` entry."""
    try:
        value = check(*request, **limits)
    except MemoryError:
        os._exit(1)  # the answer has used up what a check may take: it broke this process
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:300]})
    return json.dumps({"error": "the gold answer cannot be read as mathematics"} if value is None else {"value": value})


def main() -> None:
    """Warm up, announce it, then answer line by line."""
    kind, (deadline, patience), memory = sys.argv[1], map(float, sys.argv[2:4]), int(sys.argv[4])
    # Output of libraries must not reach the pipe that carries the answers.
    out = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if kind != "code":
        check, right, limits = (equals_as_math, "1/2", {}) if kind == "math" else (is_valid, "{}", {})
        print(_reply(check, right, right), file=out, flush=True)
        if resource is not None and memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    else:
        check, limits = run, {"deadline": deadline, "clock": 4 * deadline + 5.0, "memory": memory}
        print(_reply(check, "", None, deadline=30.0, clock=60.0, memory=0), file=out, flush=True)
    for line in sys.stdin:
        _limit_time(deadline, patience)
        secret, *request = json.loads(line)
        reply = _reply(check, *request, **limits)
        _limit_time(0.0, 0.0)
        print(secret + reply, file=out, flush=True)


if __name__ == "__main__":
    main()
