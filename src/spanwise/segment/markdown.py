"""The segmenters `markdown`, blocks by headings, and `code`, blocks by the syntax of a programming language, with tree-sitter.

A mark of `markdown` is the title of a heading of any level, in small or capital letters, `Plan` for `## plan`; or `section`, any
heading that no other mark names. A `#` in a fenced code block is none.

Rules. A section runs to the next heading of its own level or a higher one, or to the end, and says all of that without the line of
its heading. A section inside it that has a block of its own takes its bytes out of the outer block; without a block for the rest
that block then runs on to where the next one starts. A title takes its first match, one in two blocks its first two; another
match is a DUPLICATE and belongs to what it stands in. With `[*]` it takes them all; of a repeated block, one each, up to `most`
(MORE).

Lines are read by CommonMark's rules for text outside of lists, quotes and HTML, where a line tells what it is by itself: a fence
(what the segmenter `code` finds) is three or more backticks or tildes at the start of a line, and ends at as many of the same sign
or more, alone on a line; a heading is one to six `#` and white space, at most three spaces from the left, outside of fences. One
thing is read more kindly, since lists are where models indent: a fence may be indented as far as it likes. Underlined headings are
text.

A mark of `code` is `fence`, a fenced code block, or `<language>.<kind>`: `python.function`, `python.class`, `python.statement`
(one at the top level), `python.import`, `python.docstring`, or a node type of the grammar, `python.for_statement`. Any language
works whose package `tree_sitter_<language>` is installed; `pip install 'spanwise[segment]'` brings Python's. `fence` needs none.

Rules. Code is what stands in fences of that language or of none, see above; without any fence, the whole completion. Matches of
one mark are the outermost ones, a function with its decorators; a match inside one of another mark takes its bytes out of that;
where two marks match the same bytes, the one that the layout names first has them. A mark takes its first match, one in two
blocks its first two; another match is a DUPLICATE, with `[*]` it takes them all; of a repeated block, one each, up to `most`
(MORE). A part says its code, a fence what stands between its lines; it says nothing where its syntax is broken. A fence that
never closes, and an error of syntax that reaches into the last line of the code, are TRUNCATED; any other error is NESTED.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from spanwise.errors import LayoutError, unknown
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import Finder, Found, Match, Sample, by_mark, taken
from spanwise.types import Fault

_ANY = "section"
# A line that opens or closes a fence, or a heading, and the text after its signs.
_LINE = re.compile(rb"^(?:[ \t]*+(`{3,}+|~{3,}+)| {0,3}+(#{1,6}+)(?![^ \t\r\n]))([^\n]*+)\n?", re.MULTILINE)


class Fence(NamedTuple):
    """A fenced code block: its bytes with and without the fences, the word after the opening fence, and whether it ends."""

    start: int
    stop: int
    inner: tuple[int, int]
    language: str
    closed: bool


class Heading(NamedTuple):
    """A heading: the bytes of its line, its level and its text."""

    start: int
    end: int
    level: int
    title: str


def outline(text: bytes) -> tuple[list[Fence], list[Heading]]:
    """Return the fenced code blocks of a text, and the headings outside of them; an open block runs to the end."""
    blocks, headings, size = list[Fence](), list[Heading](), len(text)
    open_fence: re.Match[bytes] | None = None
    for match in _LINE.finditer(text):
        sign, level, line = match[1], match[2], match[3].strip()
        if open_fence is not None:
            if sign and sign.startswith(open_fence[1]) and not line:
                inner = open_fence.end(), match.start()
                blocks[-1] = blocks[-1]._replace(stop=match.end(), inner=inner, closed=True)
                open_fence = None
        elif level:
            unhashed = line.rstrip(b"#")
            title = unhashed.rstrip() if unhashed[-1:] in (b"", b" ", b"\t") else line
            headings.append(Heading(match.start(), match.end(), len(level), title.decode(errors="replace")))
        elif sign[:1] == b"~" or b"`" not in line:
            open_fence = match
            language = b"".join(line.split(None, 1)[:1]).decode(errors="replace").lower()
            blocks.append(Fence(match.start(), size, (match.end(), size), language, closed=False))
    return blocks, headings


def _titles(text: str) -> list[str]:
    headings = outline(text.encode(errors="replace"))[1]
    return list(dict.fromkeys(heading.title for heading in headings if heading.title))


@register("markdown", kind="segmenter", says=_titles)
def markdown(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the sections of Markdown; see the module."""
    parts_of: dict[str, list[Part]] = {}
    for mark, mark_parts in by_mark(parts).items():
        if not mark.strip("# \t") or "\n" in mark:
            raise LayoutError(
                f"'{mark}' is no heading of Markdown; write its title without the #, such as Plan, or section for any heading."
            )
        if mark.lower() in parts_of:
            raise LayoutError(
                f"'{mark}' stands in the layout with other capital letters, too; write it the same way everywhere."
            )
        parts_of[mark.lower()] = mark_parts

    def find(sample: Sample) -> Found:
        _, headings = outline(sample.text)
        marks = [title if (title := heading.title.lower()) in parts_of else _ANY for heading in headings]
        sections = zip(marks, headings, _stops(headings, len(sample.text)), strict=True)
        matches = [(mark, one.start, stop, (one.end, stop)) for mark, one, stop in sections if mark in parts_of]
        return taken(matches, parts_of, again="refused")

    return find


def _stops(titled: Sequence[Heading], size: int) -> list[int]:
    """Return where each section ends."""
    stops: list[int] = []
    next_of = [size] * 8  # for each level, the start of the next heading that ends it
    for heading in reversed(titled):
        stops.append(next_of[heading.level])
        next_of[heading.level :] = [heading.start] * (8 - heading.level)
    return stops[::-1]


_ALIASES = {
    "py": "python", "python3": "python", "js": "javascript", "jsx": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash",
    "c++": "cpp", "c#": "c_sharp", "csharp": "c_sharp", "golang": "go", "rs": "rust", "rb": "ruby",
}  # fmt: skip
#: The grammars' names of each of our kinds.
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

#: A function from the root of a syntax tree to the bytes of each match, and whether the match is broken.
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
    """Return the bytes that hold code of a language."""
    if not blocks:
        return [(0, size)]
    return [
        block.inner for block in blocks if not block.language or _ALIASES.get(block.language, block.language) == language
    ]


def _broken(root: Any, last_line: int) -> int:
    """Return TRUNCATED if a syntax error reaches into the last line, NESTED if one lies before it."""
    fault, stack = 0, [root] if root.has_error else []
    while stack:
        node = stack.pop()
        if node.is_error or node.is_missing:
            fault |= Fault.TRUNCATED if node.end_byte > last_line else Fault.NESTED
        else:
            stack += [child for child in node.children if child.has_error]
    return int(fault)


def _matcher(grammar: Any, language: str, kind: str) -> _Matcher:
    """Return a function that finds the outermost nodes of a kind."""
    if kind == "statement":
        return lambda root: [_place(node) for node in root.named_children if not node.is_error and not node.is_extra]
    if kind == "docstring" and language == "python":
        return lambda root: _outermost(root, _docstring)
    types = {grammar.node_kind_for_id(n) for n in range(grammar.node_kind_count) if grammar.node_kind_is_named(n)}
    names = {name for name in _KINDS.get(kind, (kind,)) if name in types}
    if not names:
        ours = [*(kinds for kinds, theirs in _KINDS.items() if types.intersection(theirs)), "statement"]
        ours += ["docstring"] if language == "python" else []
        raise LayoutError(f"{unknown(f'kind of {language}', kind, types)} Beside these: {', '.join(ours)}.")
    decorated = kind in ("function", "class")

    def match(node: Any) -> Any:
        inner = node.child_by_field_name("definition") if decorated and node.type == "decorated_definition" else node
        return node if inner is not None and inner.is_named and inner.type in names else None

    return lambda root: _outermost(root, match)


def _outermost(root: Any, match: Callable[[Any], Any]) -> list[tuple[int, int, bool]]:
    """Return the places of the nodes that match, in order, without nested ones; queries are quadratic in a node's children."""
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
    """Return the string that a module, class or function of Python starts with."""
    if node.type not in ("module", "class_definition", "function_definition"):
        return None
    body = node if node.type == "module" else node.child_by_field_name("body")
    first = next((child for child in body.named_children if child.type != "comment"), None) if body is not None else None
    inner = first.named_children if first is not None and first.type == "expression_statement" else []
    return inner[0] if len(inner) == 1 and inner[0].type == "string" else None


def _place(node: Any) -> tuple[int, int, bool]:
    return node.start_byte, node.end_byte, not node.has_error


def _parser(language: str) -> Any:
    """Return the parser of a language."""
    try:
        sitter = import_module("tree_sitter")
        package = import_module(f"tree_sitter_{language}")
    except ModuleNotFoundError as error:
        installed = sorted(
            module.name.removeprefix("tree_sitter_") for module in iter_modules() if module.name.startswith("tree_sitter_")
        )
        raise LayoutError(
            f"Code of '{language}' cannot be read: {error.name} is not installed. Languages here: "
            f"{', '.join(installed) or 'none'}; pip install 'spanwise[segment]' brings python, "
            f"pip install tree-sitter-{language.replace('_', '-')} this one."
        ) from None
    make = getattr(package, "language", None) or getattr(package, f"language_{language}")
    return sitter.Parser(sitter.Language(make()))
