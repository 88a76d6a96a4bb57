"""Pages read the same in the repository and on the site: links out of docs/ find a page, pictures have a dark twin."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).resolve().parent.parent
ROOT = DOCS.parent
#: Pages of the repository's root that the site shows, and where.
SHOWN = {
    ROOT / "README.md": DOCS / "index.md",
    ROOT / "CONTRIBUTING.md": DOCS / "project" / "contributing.md",
    ROOT / "SECURITY.md": DOCS / "project" / "security.md",
    ROOT / "CHANGELOG.md": DOCS / "project" / "changelog.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")
_PICTURE = re.compile(r"<picture>.*?<img\b([^>]*)>.*?</picture>", re.DOTALL)
_GLOB = re.compile(r"^([\w/]+\*)\n", re.MULTILINE)  # an entry of a contents list, which may match nothing yet
_FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)


def for_site(text: str, page: Path, written_in: Path | None = None) -> str:
    """The Markdown of a page with links as the site needs them.

    Args:
        text: the Markdown.
        page: the file of the site that shows it.
        written_in: the folder that its links start from, where it is not the page's own.
    """
    start = written_in or page.parent

    def link(found: re.Match[str]) -> str:
        bang, words, target = found.groups()
        path, hash_, anchor = target.partition("#")
        place = (start / path).resolve()
        if path.startswith("/") or not path:
            return found[0]
        if place in SHOWN:
            place, hash_, anchor = SHOWN[place], hash_ if anchor else "", anchor
        elif place.is_dir() or not place.exists():
            return found[0] if not place.exists() else words
        return f"{bang}[{words}]({Path(os.path.relpath(place, page.parent)).as_posix()}{hash_}{anchor})"

    def picture(found: re.Match[str]) -> str:
        named = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
        return f"![{named.get('alt', '')}]({named['src']})" if "src" in named else found[0]

    parts, last = [], 0
    for fence in [*_FENCE.finditer(text), None]:
        plain = text[last : fence.start() if fence else len(text)]
        parts.append(_LINK.sub(link, _PICTURE.sub(picture, plain)))
        if fence:
            parts.append(fence[0])
            last = fence.end()
    return "".join(parts)


def twin(picture: Path) -> Path | None:
    """The picture to show in the dark, if there is one beside it."""
    stem = picture.stem.removesuffix("-light")
    there = picture.with_name(f"{stem}-dark{picture.suffix}")
    return there if there != picture and there.exists() else None


class Twins(SphinxTransform):
    """Put the dark twin of each picture beside it; the theme shows one of the two."""

    default_priority = 200  # before the pictures are collected

    def apply(self, **_: Any) -> None:
        """Change the page."""
        folder = Path(self.document.settings.env.doc2path(self.env.docname)).parent
        for image in list(self.document.findall(nodes.image)):
            uri = image["uri"]
            if "://" in uri or uri.startswith("data:"):
                continue
            dark = twin((folder / uri).resolve())
            if dark is not None:
                other = image.copy()
                other["uri"] = Path(os.path.relpath(dark, folder)).as_posix()
                image["classes"] = [*image["classes"], "only-light"]
                other["classes"] = [*other["classes"], "only-dark"]
                image.parent.insert(image.parent.index(image) + 1, other)


def _source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    root = next((file for file, shown_page in SHOWN.items() if shown_page == page and page.parent != DOCS), None)
    if root is not None:  # the page says where to read; the site shows what stands there
        app.env.note_dependency(str(root))
        content[0] = for_site(root.read_text(encoding="utf-8"), page, ROOT)
    elif page.suffix == ".md":
        content[0] = _GLOB.sub(
            lambda line: line[0] if any(page.parent.glob(f"{line[1]}.*")) else "", for_site(content[0], page)
        )


def setup(app: Sphinx) -> dict[str, Any]:
    """Join the build."""
    app.connect("source-read", _source_read)
    app.add_transform(Twins)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
