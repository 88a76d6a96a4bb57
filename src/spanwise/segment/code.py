"""The segmenter `code`: blocks by the syntax of a programming language, with tree-sitter.

A mark is `fence`, a fenced code block, or `<language>.<kind>`: `python.function`, `python.class`, `python.statement` (one at the
top level), `python.import`, `python.docstring`, or a node type of the grammar, `python.for_statement`. Any language works whose
package `tree_sitter_<language>` is installed; `pip install 'spanwise[segment]'` brings Python's. `fence` needs none.

Rules. Code is what stands in fences of that language or of none, see `spanwise.segment.markdown`; without any fence, the whole
completion. Matches of one mark are the outermost ones, a function with its decorators; a match inside one of another mark takes its
bytes out of that; where two marks match the same bytes, the one that the layout names first has them. A mark takes its first
match, one in two blocks its first two; another match is a DUPLICATE, with `[*]` it takes them all; of a repeated block, one each,
up to `most` (MORE). A part says its code, a fence what stands between its lines; it says nothing where its syntax is broken. A
fence that never closes, and an error of syntax that reaches into the last line of the code, are TRUNCATED; any other error is
NESTED.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from spanwise.errors import LayoutError, unknown
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Found, Match, Sample, by_mark, taken
from spanwise.segment.markdown import Fence, outline
from spanwise.types import Fault

_ALIASES = {
    "py": "python", "python3": "python", "js": "javascript", "jsx": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash",
    "c++": "cpp", "c#": "c_sharp", "csharp": "c_sharp", "golang": "go", "rs": "rust", "rb": "ruby",
}  # fmt: skip
#: What each of our kinds is called by grammars.
_KINDS = {
    "function": ("function_definition", "function_declaration", "method_definition", "method_declaration", "function_item"),
    "class": ("class_definition", "class_declaration", "class_specifier"),
    "import": (
        "import_statement",
        "import_from_statement",
        "future_import_statement",
        "import_declaration",
        "use_declaration",
    ),
}
_MARK = re.compile(r"([a-z0-9_]+)\.(\w+)")

#: From the root of a syntax tree to the bytes of what one mark matches, and whether it is broken.
_Matcher = Callable[[Any], list[tuple[int, int, bool]]]


@register("code", kind="segmenter", says=lambda text: ["fence"] * bool(outline(text.encode(errors="replace"))[0]))
def code(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find fenced code blocks, and functions, classes, statements in them; see the module."""
    parts_of = by_mark(parts)
    parsers: dict[str, Any] = {}
    matchers: dict[str, dict[str, _Matcher]] = {}
    for mark in parts_of:
        if mark == "fence":
            continue
        written = _MARK.fullmatch(mark)
        if written is None:
            raise LayoutError(
                f"'{mark}' is no mark of code; write fence, or a language and a kind, such as python.function."
            )
        language, kind = written.groups()
        if language not in parsers:
            parsers[language], matchers[language] = _parser(language), {}
        matchers[language][mark] = _matcher(parsers[language].language, language, kind)

    def find(sample: Sample) -> Found:
        text, fault, pieces = sample.text, 0, list[Match]()
        blocks, _ = outline(text)
        for block in blocks if "fence" in parts_of else ():
            fault |= 0 if block.closed else Fault.TRUNCATED
            pieces.append(("fence", block.start, block.stop, block.inner if block.closed else None))
        for language, parser in parsers.items():
            for start, stop in _code_of(language, blocks, len(text)):
                root = parser.parse(text[start:stop]).root_node
                fault |= _broken(root, text[start:stop].rstrip().rfind(b"\n") + 1)
                seen: set[tuple[int, int]] = set()
                for mark, matches in matchers[language].items():
                    for first, last, whole in matches(root):
                        if (first, last) not in seen:
                            seen.add((first, last))
                            place = start + first, start + last
                            pieces.append((mark, *place, place if whole else None))
        return taken(pieces, parts_of, again="refused", fault=fault)

    return find


def _code_of(language: str, blocks: Sequence[Fence], size: int) -> list[tuple[int, int]]:
    """The bytes that hold code of a language."""
    if not blocks:
        return [(0, size)]
    return [
        block.inner for block in blocks if not block.language or _ALIASES.get(block.language, block.language) == language
    ]


def _broken(root: Any, last_line: int) -> int:
    """TRUNCATED if an error of syntax reaches into the last line, NESTED if there is one before it."""
    fault, stack = 0, [root] if root.has_error else []
    while stack:
        node = stack.pop()
        if node.is_error or node.is_missing:
            fault |= Fault.TRUNCATED if node.end_byte > last_line else Fault.NESTED
        else:
            stack += [child for child in node.children if child.has_error]
    return int(fault)


def _matcher(grammar: Any, language: str, kind: str) -> _Matcher:
    """What finds the outermost nodes of a kind."""
    if kind == "statement":
        return lambda root: [_place(node) for node in root.named_children if not node.is_error and not node.is_extra]
    if kind == "docstring" and language == "python":
        return lambda root: _outermost(root, _docstring)
    types = {grammar.node_kind_for_id(n) for n in range(grammar.node_kind_count) if grammar.node_kind_is_named(n)}
    names = {name for name in _KINDS.get(kind, (kind,)) if name in types}
    if not names:
        ours = [*(own for own, theirs in _KINDS.items() if types.intersection(theirs)), "statement"]
        ours += ["docstring"] if language == "python" else []
        raise LayoutError(f"{unknown(f'kind of {language}', kind, types)} Beside these: {', '.join(ours)}.")
    decorated = kind in ("function", "class")

    def match(node: Any) -> Any:
        inner = node.child_by_field_name("definition") if decorated and node.type == "decorated_definition" else node
        return node if inner is not None and inner.is_named and inner.type in names else None

    return lambda root: _outermost(root, match)


def _outermost(root: Any, match: Callable[[Any], Any]) -> list[tuple[int, int, bool]]:
    """Where the nodes lie that match, in order, without those inside of one; queries are quadratic in a node's children."""
    places, stack = list[tuple[int, int, bool]](), [root]
    while stack:
        node = stack.pop()
        matched = match(node)
        if matched is not None:
            places.append(_place(matched))
        if matched != node:
            stack += reversed(node.children)
    return places


def _docstring(node: Any) -> Any:
    """The string that a module, a class or a function of Python starts with."""
    if node.type not in ("module", "class_definition", "function_definition"):
        return None
    body = node if node.type == "module" else node.child_by_field_name("body")
    first = next((child for child in body.named_children if child.type != "comment"), None) if body is not None else None
    inner = first.named_children if first is not None and first.type == "expression_statement" else []
    return inner[0] if len(inner) == 1 and inner[0].type == "string" else None


def _place(node: Any) -> tuple[int, int, bool]:
    return node.start_byte, node.end_byte, not node.has_error


def _parser(language: str) -> Any:
    """The parser of a language."""
    try:
        sitter = import_module("tree_sitter")
        package = import_module(f"tree_sitter_{language}")
    except ModuleNotFoundError as error:
        there = sorted(
            one.name.removeprefix("tree_sitter_") for one in iter_modules() if one.name.startswith("tree_sitter_")
        )
        raise LayoutError(
            f"Code of '{language}' cannot be read: {error.name} is not installed. Languages here: {', '.join(there) or 'none'}; "
            f"pip install 'spanwise[segment]' brings python, pip install tree-sitter-{language.replace('_', '-')} this one."
        ) from None
    make = getattr(package, "language", None) or getattr(package, f"language_{language}")
    return sitter.Parser(sitter.Language(make()))
