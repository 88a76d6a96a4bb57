"""Where a page says `reference` with the name of a part, that part stands, written from the code while the site is built."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

import reference_pages

_PLACE = re.compile(r"^```\{reference\} ([\w. ]+)\n```$", re.MULTILINE)


def filled(text: str) -> str:
    """The Markdown of a page with its parts of the reference."""

    def part(found: re.Match[str]) -> str:
        name, *rest = found[1].split()
        return reference_pages.PARTS[name](*rest)

    return _PLACE.sub(part, text)


def _source_read(_app: Sphinx, _docname: str, content: list[str]) -> None:
    content[0] = filled(content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Join the build."""
    app.connect("source-read", _source_read)
    # What is written from the code may have changed where the page has not.
    app.connect("env-get-outdated", lambda _app, env, *_: [name for name in env.found_docs if name.startswith("reference/")])
    return {"parallel_read_safe": True, "parallel_write_safe": True}
