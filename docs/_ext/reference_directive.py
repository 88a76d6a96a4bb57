"""The directive `reference`: a part of the reference, written from the code by `reference_pages` while the site is built."""

from __future__ import annotations

from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import reference_pages


class Reference(SphinxDirective):
    """`reference` with the name of a part, and for `api` the room."""

    required_arguments = 1
    optional_arguments = 1
    final_argument_whitespace: ClassVar[bool] = False

    def run(self) -> list[nodes.Node]:
        """The part, read as Markdown."""
        part, *rest = self.arguments
        return self.parse_text_to_nodes(reference_pages.PARTS[part](*rest), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Join the build."""
    app.add_directive("reference", Reference)
    # What is written from the code may have changed where the page has not.
    app.connect("env-get-outdated", lambda _app, env, *_: [name for name in env.found_docs if name.startswith("reference/")])
    return {"parallel_read_safe": True, "parallel_write_safe": True}
