"""Every link and picture of the built site leads somewhere: `python docs/_ext/site_links.py docs/_build/html`."""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """What a page points at, and what in it can be pointed at."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value for name, value in attrs if value}
        self.anchors |= {named[name] for name in ("id", "name") if name in named}
        self.targets += [named[name] for name in ("href", "src") if name in named]


@cache
def _page(file: Path) -> _Page:
    page = _Page()
    page.feed(file.read_text(encoding="utf-8"))
    return page


def broken(site: Path) -> list[str]:
    """A sentence for each link of a built site that leads to no file, or to no place in it; links out of the site are left out."""
    faults = []
    for file in sorted(site.rglob("*.html")):
        for target in dict.fromkeys(_page(file).targets):
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            place = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if place.is_dir():
                place = place / "index.html"
            if not place.exists():
                faults.append(f"{file.relative_to(site)}: '{target}' leads to no file.")
            elif parts.fragment and place.suffix == ".html" and unquote(parts.fragment) not in _page(place).anchors:
                faults.append(f"{file.relative_to(site)}: '{target}' leads to no place on that page.")
    return faults


if __name__ == "__main__":
    found = broken(Path(sys.argv[1]).resolve())
    print("\n".join(found) or "Every link inside the site leads somewhere.")
    sys.exit(bool(found))
