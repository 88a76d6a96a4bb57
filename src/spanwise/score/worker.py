"""The process that runs what may hang or crash: one JSON line in, one JSON line out, until its input closes.

`worker.py KIND DEADLINE PATIENCE MEMORY` is run by path and imports nothing of this package, so that it starts in a second and
holds no torch; `workers.py` starts it, watches the clock and kills it. KIND is `math`, which compares answers with Math-Verify,
`schema`, which judges JSON by a schema, or `code`, which runs programs: each in a process of its own, in an empty folder, in a
session of its own, which is killed as a whole when the program ends, and without this process's environment.
"""

import ast
import inspect
import json
import logging
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Set
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from numbers import Rational
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # on Windows
    resource = None

_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*")
_DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
# Code and tests are compiled one by one: what the code leaves open (a quote, a bracket) cannot swallow the tests. What the harness
# needs is bound before the code runs, which may replace it, and the sign of the end stands neither in its source nor in its names.
_PROGRAM = """\
from __future__ import annotations
import os
from collections.abc import Set
from decimal import Decimal
from fractions import Fraction
from numbers import Rational
{plain}
def main(run=exec, read=os.read, write=os.write, plain=plain):
    space = {{"__name__": "__main__"}}
    code, tests = compile({code}, "completion", "exec"), compile({tests}, "tests", "exec")
    run(code, space)
    space["{report}"] = lambda number, value: write({end}, f"{{number}} {{plain(value)}}\\n".encode())
    run(tests, space)
    write({end}, read({key}, 16))
main()
"""
_REPORT = "_spanwise_report"
_FILE_BYTES = 2**26
#: A text is no JSON.
MISSING = object()
#: Keywords of a schema whose time is linear in the value. With any other one (`pattern`, `uniqueItems`, `$ref`) a value may hang.
_LINEAR = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated", "readOnly",
    "writeOnly", "format", "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "items", "prefixItems", "additionalItems", "minItems", "maxItems", "properties", "required",
    "additionalProperties", "minProperties", "maxProperties", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
}  # fmt: skip
#: Keywords whose schemas look at the same value as the one that they stand in.
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")


def as_latex(text: str) -> str:
    r"""Put bare text between dollars, so that `\frac{1}{3}` is not read as 3; words become `\text{...}`, not a product of letters.

    >>> as_latex(r"\frac{1}{3}"), as_latex("Paris"), as_latex("it is $4$")
    ('$\\frac{1}{3}$', '$\\text{Paris}$', 'it is $4$')
    """
    text = text.strip()
    if any(sign in text for sign in _DELIMITERS) or "\n" in text:
        return text
    return f"$\\text{{{text}}}$" if _WORDS.fullmatch(text) and text != "pi" else f"${text}$"


def equals_as_math(gold: str, answer: str) -> bool | None:
    """Whether `answer` equals `gold` as mathematics; None if the gold answer cannot be read.

    Memory errors rise; any other exception inside a comparison counts as "not equal", as Math-Verify itself has it.
    """
    from math_verify import parse, verify  # only in this process

    # This process is killed from outside: alarms of its own would only work in a main thread.
    parsed_gold = parse(as_latex(gold), parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    if all(isinstance(part, str) for part in parsed_gold):  # nothing found, or only the raw text
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
    """The decimal that is the shortest for this float, so that remainders are exact; ValueError if it is none."""
    number = Fraction(repr(float(text)))
    return number.numerator if number.denominator == 1 else number


#: Reads numbers as the decimals that are written; one that is beyond every float is infinite.
EXACT = json.JSONDecoder(
    parse_float=lambda text: exact(text) if math.isfinite(float(text)) else float(text), parse_constant=exact
)


def json_value(text: str, *, within: bool = False, decoder: json.JSONDecoder = EXACT) -> Any:
    """What the JSON of a text says, or that from its first brace on (`within`); `MISSING` if it is no JSON."""
    try:
        return decoder.raw_decode(text, text.index("{"))[0] if within else decoder.decode(text)
    except (ValueError, RecursionError):
        return MISSING


def whole_json(said: str) -> Any:
    """The JSON of a completion: from its first brace on, if it is not JSON as a whole."""
    value = json_value(said)
    return json_value(said, within=True) if value is MISSING else value


def is_valid(schema: str, said: str) -> bool:
    """Whether the JSON of a completion is valid under a schema, of its JSON text."""
    value = whole_json(said)
    try:
        return value is not MISSING and read_schema(schema)[0].is_valid(value)
    except RecursionError:  # nested deeper than any schema means
        return False


@lru_cache(maxsize=4096)
def read_schema(text: str) -> tuple[Any, bool]:
    """What checks values under a schema, of its JSON text, and whether its time is linear in the value.

    ValueError: it is no schema, a pattern in it is none, or a reference leads nowhere or back to itself.
    """
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
    same_value: dict[int, list[int]] = {}  # the identity of each schema, and of those that look at the same value

    def check(contents: Any) -> None:
        try:
            kind.check_schema(contents)
        except SchemaError as error:
            place = "/".join(map(str, error.absolute_path))
            raise ValueError(f"{error.message:.200}" + (f" (at {place})" if place else "")) from error

    def follow(contents: Any, resolver: Any) -> None:
        """Look into a schema, those in it and those that it refers to."""
        if not isinstance(contents, dict) or id(contents) in same_value:
            return
        keywords.update(contents)
        patterns = "|".join(contents.get("patternProperties", ()))
        try:
            re.compile(patterns)  # as one, as it is searched for
        except re.error as error:
            raise ValueError(f"{patterns!r} is no regular expression of Python ({error})") from None
        values = [contents.get(key) for key in _SAME_VALUE]
        same_value[id(contents)] = [id(one) for value in values for one in (value if isinstance(value, list) else [value])]
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
    registry = REGISTRY.with_resource(resource.id() or "", resource).crawl()  # without a way to fetch anything
    follow(schema, registry.resolver(resource.id() or ""))
    try:
        TopologicalSorter(same_value).prepare()
    except CycleError:
        raise ValueError("its $ref leads back to itself") from None
    return kind(schema, registry=registry), keywords <= _LINEAR


def plain(value: Any) -> str:
    """A text that plain values share which are equal: numbers, texts, None, lists, tuples, sets and dicts; else a TypeError."""
    if value is None or isinstance(value, complex):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return ascii(value[:])
    if isinstance(value, (Rational, float, Decimal)):
        try:
            number = Fraction(value)
        except (OverflowError, ValueError):  # infinite, or NaN
            return str(float(value))
        return f"{int(number.numerator):x}/{int(number.denominator):x}"
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{plain(key)}:{plain(one)}" for key, one in value.items())) + "}"
    if isinstance(value, Set):
        return "<" + ",".join(sorted(map(plain, value))) + ">"
    if isinstance(value, (list, tuple)):
        return ("[%s]" if isinstance(value, list) else "(%s)") % ",".join(map(plain, value))
    if hasattr(value, "item"):  # a number of numpy
        return plain(value.item())
    raise TypeError(f"{type(value)} is no plain value")


def without_values(tests: str) -> tuple[str, set[bytes]]:
    """Tests whose `assert tested == literal` reports what is tested, and the reports of right code: the literals stay outside.

    Each of these must be reached: they are statements of the module, and of its functions that it calls and that do not return.
    """
    reports: set[bytes] = set()
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the code fails with them
        return tests, reports
    always = [one for one in tree.body if isinstance(one, ast.Expr | ast.Assign | ast.Assert)]
    nodes = chain.from_iterable(map(ast.walk, always))
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    functions = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in calls]
    to_the_end = [one.body for one in functions if not any(isinstance(node, ast.Return) for node in ast.walk(one))]
    for body in (tree.body, *to_the_end):
        for place, statement in enumerate(body):
            match statement:
                case ast.Assert(ast.Compare(left, [ast.Eq()], [right])):
                    for tested, literal in ((left, right), (right, left)):
                        with suppress(ValueError, TypeError):
                            report = plain(ast.literal_eval(literal))
                            number = ast.Constant(len(reports))
                            reports.add(f"{len(reports)} {report}".encode())
                            body[place] = ast.Expr(ast.Call(ast.Name(_REPORT, ast.Load()), [number, tested], []))
                            break
    return ast.unparse(ast.fix_missing_locations(tree)), reports


def run(code: str, tests: str | None, *, deadline: float, clock: float, memory: int) -> bool:
    """Whether the code, and the tests after it, come to their end and exit with 0, and what the tests report is right."""
    sign = secrets.token_hex(8).encode()
    tests_run, reports = without_values(tests or "")
    key, lock = os.pipe()
    try:
        os.write(lock, sign)
        with (
            tempfile.TemporaryDirectory(prefix="spanwise-", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as report,
        ):
            program = Path(folder, "program.py")
            harness = {"plain": inspect.getsource(plain), "report": _REPORT, "end": report.fileno(), "key": key}
            program.write_text(_PROGRAM.format(code=ascii(code), tests=ascii(tests_run), **harness))
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(program)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
                pass_fds=(report.fileno(), key),
                start_new_session=True,
                preexec_fn=lambda: _limit_program(deadline, clock, memory),
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(clock)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind, too
                ended = process.wait()
            report.seek(0)
            *lines, last = report.read().split(b"\n")
        return ended == 0 and (tests is None or (last == sign and set(lines) == reports))
    finally:
        os.close(key)
        os.close(lock)


def _limit_program(deadline: float, clock: float, memory: int) -> None:
    """In the new process: what ends it even if nobody is left to watch it."""
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
    """End this process after so many seconds of its own time, or by the clock: if the parent dies, nobody else would stop it."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, processor)
        signal.setitimer(signal.ITIMER_REAL, clock)


def _reply(check: Callable[..., bool | None], *request: Any, **limits: Any) -> str:
    """A line for one request; an exception becomes an `error` entry."""
    try:
        value = check(*request, **limits)
    except Exception as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"[:300]})
    return json.dumps({"error": "the gold answer cannot be read as mathematics"} if value is None else {"value": value})


def main() -> None:
    """Warm up, say so, then answer line by line."""
    kind, (deadline, patience), memory = sys.argv[1], map(float, sys.argv[2:4]), int(sys.argv[4])
    # What the libraries print must not reach the pipe that carries the answers.
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
        reply = _reply(check, *json.loads(line), **limits)
        _limit_time(0.0, 0.0)
        print(reply, file=out, flush=True)


if __name__ == "__main__":
    main()
