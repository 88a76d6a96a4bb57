"""The segmenters `markdown`, which cuts at headings, and `code`, which cuts by syntax.

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
thing is read more kindly, since lists are where models indent: a fence may be indented at will. Underlined headings are text.

A mark of `code` is `fence`, a fenced code block, or `<language>.<kind>`: `python.function`, `python.class`, `python.statement`
(one at the top level), `python.import`, `python.docstring`, or a node type of the grammar, `python.for_statement`. Any language
works whose package `tree_sitter_<language>` is installed; `pip install 'spanwise[segment]'` brings Python's. `fence` needs none.

Rules. Code is what stands in fences of that language or of none, see above; without any fence, the whole completion. Matches of
one mark are the outermost ones, a function with its decorators; a match inside one of another mark takes its bytes out of that;
where two marks match the same bytes, the one that the layout names first has them. A mark takes its first match, one in two
blocks its first two; another match is a DUPLICATE, with `[*]` it takes them all; of a repeated block, one each, up to `most`
(MORE). The text of a part is its code. The text of a fence is the code between its two lines, without the fence's indentation. A
part with broken syntax has no text. A fence that never closes is TRUNCATED, and so is an error of syntax that reaches into the last
line of the code. Any other error is NESTED.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

from spanwise.errors import LayoutError, unknown
from spanwise.layout import Layout, Part
from spanwise.registry import register
from spanwise.segment.claims import (
    SEGMENTERS,
    Finder,
    Found,
    Match,
    Sample,
    assign,
    group_by_mark,
    text_end,
    with_line_ends,
    without_indent,
)
from spanwise.types import Fault

_ANY = "section"
#: Matches the line of a code fence or heading.
_LINE = re.compile(rb"^(?:[ \t]*+(`{3,}+|~{3,}+)| {0,3}+(#{1,6}+)(?![^ \t\r\n]))([^\n]*+)\n?", re.MULTILINE)


class Fence(NamedTuple):
    """A fenced code block: its bytes, its language, and whether it is closed."""

    start: int
    stop: int
    inner: tuple[int, int]
    language: str
    closed: bool


class Heading(NamedTuple):
    """A heading of Markdown: the bytes of its line, its level and its text."""

    start: int
    end: int
    level: int
    title: str


def outline(text: bytes) -> tuple[list[Fence], list[Heading]]:
    """Return the fenced code blocks of a text, and the headings outside of these blocks."""
    fences = list[Fence]()
    headings = list[Heading]()
    open_fence: re.Match[bytes] | None = None
    for match in _LINE.finditer(with_line_ends(text)):
        fence_sign, heading_sign, padded_text = match.groups()
        line_text = padded_text.strip()
        if open_fence is not None:
            if fence_sign and fence_sign.startswith(open_fence[1]) and not line_text:
                fences[-1] = fences[-1]._replace(stop=match.end(), inner=(open_fence.end(), match.start()), closed=True)
                open_fence = None
        elif heading_sign:
            text_without_hashes = line_text.rstrip(b"#")
            has_closing_hashes = text_without_hashes[-1:] in (b"", b" ", b"\t")
            heading_title = text_without_hashes.rstrip() if has_closing_hashes else line_text
            headings.append(Heading(match.start(), match.end(), len(heading_sign), heading_title.decode(errors="replace")))
        elif fence_sign[:1] == b"~" or b"`" not in line_text:
            open_fence = match
            info_words = line_text.split(None, 1)
            fence_language = info_words[0].decode(errors="replace").lower() if info_words else ""
            language = _ALIASES.get(fence_language, fence_language)
            fences.append(Fence(match.start(), len(text), (match.end(), len(text)), language, closed=False))
    return fences, headings


def _titles(text: str) -> list[str]:
    headings = outline(text.encode(errors="replace"))[1]
    return list(dict.fromkeys(heading.title for heading in headings if heading.title))


@lru_cache(maxsize=64)
def _build_finder(segmenter: str, mark: str) -> Finder:
    layout = Layout({"block": f"{segmenter}:{mark}"})
    return SEGMENTERS.find(segmenter).function(layout.parts, layout=layout)


def _finds(segmenter: str, text: str, mark: str) -> bool:
    return bool(_build_finder(segmenter, mark)(Sample.of(text.encode(errors="replace"))).claims)


@register("markdown", kind="segmenter", says=_titles, holds=partial(_finds, "markdown"))
def markdown(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find the sections of Markdown. The rules are at the top of this module."""
    parts_of: dict[str, list[Part]] = {}
    for mark, mark_parts in group_by_mark(parts).items():
        if not mark.strip("# \t") or "\n" in mark:
            raise LayoutError(
                f"'{mark}' is not a Markdown heading. Write the title of a heading without the #, such as Plan. For any heading, "
                "write section."
            )
        if mark.lower() in parts_of:
            raise LayoutError(
                f"The layout writes the heading '{mark}' with different capital letters; write it the same way everywhere."
            )
        parts_of[mark.lower()] = mark_parts

    def find(sample: Sample) -> Found:
        _, headings = outline(sample.text)
        titles = [heading.title.lower() for heading in headings]
        heading_marks = [title if title in parts_of else _ANY for title in titles]
        sections = zip(heading_marks, headings, _section_stops(headings, len(sample.text)), strict=True)
        matches = [(mark, heading.start, stop, (heading.end, stop)) for mark, heading, stop in sections if mark in parts_of]
        return assign(matches, parts_of, surplus="drop")

    return find


def _section_stops(headings: Sequence[Heading], text_end: int) -> list[int]:
    """Return, for each heading, the byte at which its section ends."""
    section_stops: list[int] = []
    stop_of_level = [text_end] * 8  # where a section of each heading level ends
    for heading in reversed(headings):
        section_stops.append(stop_of_level[heading.level])
        for level in range(heading.level, len(stop_of_level)):
            stop_of_level[level] = heading.start
    return section_stops[::-1]


_ALIASES = {
    "py": "python", "python3": "python", "js": "javascript", "jsx": "javascript", "ts": "typescript", "sh": "bash", "shell": "bash",
    "c++": "cpp", "c#": "c_sharp", "csharp": "c_sharp", "golang": "go", "rs": "rust", "rb": "ruby",
}  # fmt: skip
#: Maps a kind of code, such as `function`, to its names in tree-sitter's grammars.
_KINDS = {
    "function": ("function_definition", "function_declaration", "method_definition", "method_declaration", "function_item"),
    "class": ("class_definition", "class_declaration", "class_specifier"),
    "import": (
        "import_statement", "import_from_statement", "future_import_statement", "import_declaration", "use_declaration",
    ),
}  # fmt: skip
_MARK = re.compile(r"([a-z0-9_]+)\.(\w+)")

#: A function that finds nodes in a syntax tree. It returns each node as (first byte, end byte, is valid).
_Matcher = Callable[[Any], list[tuple[int, int, bool]]]


@register(
    "code",
    kind="segmenter",
    says=lambda text: ["fence"] * bool(outline(text.encode(errors="replace"))[0]),
    holds=partial(_finds, "code"),
)
def code(parts: Sequence[Part], *, layout: Layout) -> Finder:
    """Find fenced code blocks, and functions, classes and statements in them. The module has the rules."""
    parts_of_mark = group_by_mark(parts)
    parser_by_language: dict[str, Any] = {}
    matchers_by_language: dict[str, dict[str, _Matcher]] = {}
    for mark in parts_of_mark:
        if mark == "fence":
            continue
        mark_match = _MARK.fullmatch(mark)
        if mark_match is None:
            raise LayoutError(
                f"The segmenter 'code' does not know '{mark}'. Write 'fence' for a whole code block, or a language and a "
                f"kind, such as python.function."
            )
        language, code_kind = mark_match.groups()
        if language not in parser_by_language:
            parser_by_language[language] = _load_parser(language)
            matchers_by_language[language] = {}
        matchers_by_language[language][mark] = _build_matcher(parser_by_language[language].language, language, code_kind)

    def find(sample: Sample) -> Found:
        text = sample.text[: text_end(sample.text)]
        fault_flags = 0
        code_matches = list[Match]()
        code_fences, _ = outline(text)
        for fence in code_fences if "fence" in parts_of_mark else ():
            fault_flags |= 0 if fence.closed else Fault.TRUNCATED
            code_matches.append(("fence", fence.start, fence.stop, _content(text, fence) if fence.closed else None))
        for language, parser in parser_by_language.items():
            code_spans = [fence.inner for fence in code_fences if fence.language in ("", language)]
            for code_start, code_stop in code_spans if code_fences else [(0, len(text))]:
                code_text = text[code_start:code_stop]
                syntax_root = parser.parse(code_text).root_node
                fault_flags |= _syntax_fault(syntax_root, code_text.rstrip().rfind(b"\n") + 1)
                seen_spans: set[tuple[int, int]] = set()
                for mark, matcher in matchers_by_language[language].items():
                    for node_start, node_stop, is_valid in matcher(syntax_root):
                        if (node_start, node_stop) not in seen_spans:
                            seen_spans.add((node_start, node_stop))
                            span_in_text = code_start + node_start, code_start + node_stop
                            code_matches.append((mark, *span_in_text, span_in_text if is_valid else None))
        return assign(code_matches, parts_of_mark, surplus="drop", fault=fault_flags)

    return find


def _content(text: bytes, fence: Fence) -> tuple[int, int] | bytes:
    """Return the code in a fence. Remove the fence's own indentation from each line."""
    opening_line = text[fence.start : fence.inner[0]]
    indent = len(opening_line) - len(opening_line.lstrip(b" \t"))
    code = text[slice(*fence.inner)].decode(errors="surrogateescape")
    return without_indent(code, indent).encode(errors="surrogateescape") if indent else fence.inner


def _syntax_fault(root: Any, last_line: int) -> int:
    """Return flags for syntax errors: TRUNCATED for an error that reaches into the last line, NESTED for others."""
    fault_flags = 0
    nodes_to_visit = [root] if root.has_error else []
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        if node.is_error or node.is_missing:
            fault_flags |= Fault.TRUNCATED if node.end_byte > last_line else Fault.NESTED
        else:
            nodes_to_visit += [child for child in node.children if child.has_error]
    return int(fault_flags)


def _build_matcher(grammar: Any, language: str, kind: str) -> _Matcher:
    """Return a function that finds the outermost nodes of a kind, such as `function`, in a syntax tree."""
    if kind == "statement":
        return lambda root: [_locate(node) for node in root.named_children if not node.is_error and not node.is_extra]
    if kind == "docstring" and language == "python":
        return lambda root: _match_outermost(root, _find_docstring)
    named_type_ids = filter(grammar.node_kind_is_named, range(grammar.node_kind_count))
    node_types = {grammar.node_kind_for_id(type_id) for type_id in named_type_ids}
    types_of_kind = node_types.intersection(_KINDS.get(kind, (kind,)))
    if not types_of_kind:
        kind_names = [name for name, kind_types in _KINDS.items() if node_types.intersection(kind_types)]
        kind_names += ["statement", "docstring"] if language == "python" else ["statement"]
        raise LayoutError(f"{unknown(f'{language} element', kind, node_types)} Also known: {', '.join(kind_names)}.")
    may_be_decorated = kind in ("function", "class")

    def match(node: Any) -> Any:
        is_decorated = may_be_decorated and node.type == "decorated_definition"
        definition = node.child_by_field_name("definition") if is_decorated else node
        return node if definition is not None and definition.is_named and definition.type in types_of_kind else None

    return lambda root: _match_outermost(root, match)


def _match_outermost(root: Any, match: Callable[[Any], Any]) -> list[tuple[int, int, bool]]:
    """Locate the nodes of a syntax tree that `match` accepts, except those inside an accepted node."""
    node_locations = list[tuple[int, int, bool]]()
    nodes_to_visit = [root]  # tree-sitter's own queries would take quadratic time
    while nodes_to_visit:
        node = nodes_to_visit.pop()
        matched_node = match(node)
        if matched_node is not None:
            node_locations.append(_locate(matched_node))
        if matched_node != node:
            nodes_to_visit += reversed(node.children)
    return node_locations


def _find_docstring(node: Any) -> Any:
    """Return the docstring of a Python module, class or function; None if the node has no docstring."""
    if node.type not in ("module", "class_definition", "function_definition"):
        return None
    body_node = node if node.type == "module" else node.child_by_field_name("body")
    body_statements = [] if body_node is None else body_node.named_children
    first_statement = next((child for child in body_statements if child.type != "comment"), None)
    if first_statement is None or first_statement.type != "expression_statement":
        return None
    expressions = first_statement.named_children
    return expressions[0] if len(expressions) == 1 and expressions[0].type == "string" else None


def _locate(node: Any) -> tuple[int, int, bool]:
    """Return the bytes of a syntax node, and whether its syntax is valid."""
    return node.start_byte, node.end_byte, not node.has_error


def _load_parser(language: str) -> Any:
    """Load the tree-sitter parser of a programming language."""
    try:
        tree_sitter = import_module("tree_sitter")
        grammar_package = import_module(f"tree_sitter_{language}")
    except ModuleNotFoundError as error:
        grammar_names = [module.name for module in iter_modules() if module.name.startswith("tree_sitter_")]
        installed_languages = sorted(name.removeprefix("tree_sitter_") for name in grammar_names)
        raise LayoutError(
            f"Code of '{language}' cannot be read, because {error.name} is not installed. Installed languages: "
            f"{', '.join(installed_languages) or 'none'}. Install this language with pip install "
            f"tree-sitter-{language.replace('_', '-')}. For python, use pip install 'spanwise[segment]'."
        ) from None
    load_grammar = getattr(grammar_package, "language", None) or getattr(grammar_package, f"language_{language}")
    return tree_sitter.Parser(tree_sitter.Language(load_grammar()))
