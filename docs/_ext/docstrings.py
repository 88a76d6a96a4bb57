"""From a Google-style docstring to Markdown, and to the sentences of its arguments."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

#: The sections of a docstring, and how the page calls them.
SECTIONS = {
    "Args": "Arguments", "Attributes": "Fields", "Returns": "Returns", "Raises": "Raises", "Equation": "Equation",
    "Edge cases": "Edge cases", "Example": "Example", "Reference": "Reference",
}  # fmt: skip
_HEAD = re.compile(rf"^({'|'.join(SECTIONS)}):?$")
_ENTRY = re.compile(r"^([*\w][\w*, |.`\[\]]*?): +(.*)$", re.DOTALL)
_CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_PAPER = re.compile(r"arXiv (\d{4}\.\d{4,5})")


def sections(docstring: str) -> dict[str, str]:
    r"""The parts of a docstring, dedented; what stands before the first section has no name.

    >>> sections("Add.\n\nArgs:\n    a: one\n        number.\n")
    {'': 'Add.', 'Args': 'a: one\n    number.'}
    """
    parts: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(docstring).splitlines():
        head = _HEAD.match(line)
        if head:
            name = head[1]
            parts.setdefault(name, [])
        else:
            parts[name].append(line)
    return {name: textwrap.dedent("\n".join(lines)).strip("\n") for name, lines in parts.items()}


def entries(section: str) -> dict[str, str]:
    r"""What a section says of each name; several names before one colon share the sentence.

    >>> entries("a, b: two\n    numbers.\nRecipeError: none.")
    {'a': 'two numbers.', 'b': 'two numbers.', 'RecipeError': 'none.'}
    """
    texts = {}
    for entry in re.split(r"\n(?=\S)", section):
        named = _ENTRY.match(" ".join(entry.split()))
        if named:
            texts.update({name.strip(): named[2] for name in named[1].split(",")})
    return texts


def prose(text: str, link: Callable[[str], str] = lambda code: f"`{code}`") -> str:
    r"""Words as Markdown: code is linked where it names something, and nothing else is markup.

    >>> prose("Either <a> or `b*`, arXiv 2602.10231.")
    'Either \\<a> or `b*`, [arXiv 2602.10231](https://arxiv.org/abs/2602.10231).'
    """
    parts, last = [], 0
    for code in [*_CODE.finditer(text), None]:
        plain = text[last : code.start() if code else len(text)]
        plain = re.sub(r"([\\<*_\[\]|])", r"\\\1", plain)
        plain = re.sub(r"(?<=\w)\\_(?=\w)", "_", plain)
        parts.append(_PAPER.sub(r"[arXiv \1](https://arxiv.org/abs/\1)", plain))
        if code:
            parts.append(link(" ".join(code[2].split())))
            last = code.end()
    return "".join(parts)


def markdown(docstring: str, link: Callable[[str], str] = lambda code: f"`{code}`") -> str:
    """A docstring as Markdown: equations as they are written, arguments as a list, examples as code."""
    parts = []
    for name, text in sections(docstring).items():
        if name and text:
            parts.append(f"**{SECTIONS[name]}**")
        if name == "Equation":
            parts.append(f"```text\n{text}\n```")
        elif name in ("Args", "Attributes", "Raises") and entries(text):
            parts.append(_list(text, link))
        else:
            parts.append(_body(text, link))
    return "\n\n".join(part for part in parts if part)


def _list(section: str, link: Callable[[str], str]) -> str:
    """Arguments, fields or errors; an entry may separate several errors by semicolons."""
    lines = []
    for entry in re.split(r"\n(?=\S)", section):
        text = " ".join(entry.split())
        named = _ENTRY.match(text)
        if named:
            names = ", ".join(link(name.strip()) for name in named[1].replace("`", "").split(","))
            lines.append(f"- {names}: {prose(named[2], link)}")
        else:
            lines.append(f"- {prose(text, link)}")
    return "\n".join(lines)


def _body(text: str, link: Callable[[str], str]) -> str:
    """Paragraphs, and examples between them; what is indented is shown as it is."""
    parts = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.splitlines()
        start = next((n for n, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines))
        before, example = "\n".join(lines[:start]), textwrap.dedent("\n".join(lines[start:]))
        if before.strip():
            parts.append(f"```text\n{textwrap.dedent(before)}\n```" if before.startswith("    ") else prose(before, link))
        if example:
            parts.append(f"```pycon\n{example}\n```")
    return "\n\n".join(parts)


def has_example(thing: Any) -> bool:
    """Whether a function, or a class or one of its members, shows an example that runs."""
    members = vars(thing).values() if inspect.isclass(thing) else ()
    return any(">>>" in (getattr(one, "__doc__", None) or "") for one in (thing, *members) if not isinstance(one, Mapping))
