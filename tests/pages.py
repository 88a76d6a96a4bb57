"""The pages of the documentation, for the tests that hold them against the code."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
MADE = {"_build", "generated"}  # what a build leaves behind
PAGES = [README, *sorted(page for page in DOCS.rglob("*.md") if not MADE & set(page.relative_to(ROOT).parts))]
FENCED = re.compile(r"^ *```(\w*) *([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def page_id(page):
    """The name of a page in the ids of tests: folders and name."""
    return page.relative_to(ROOT).with_suffix("").as_posix()


def blocks(page, language, about=""):
    """The code of a page in one language; `about` is what stands behind the name of the language."""
    fenced = FENCED.findall(page.read_text(encoding="utf-8"))
    return [code for kind, more, code in fenced if (kind, more) == (language, about)]


def rows(page, first):
    """The cells of the tables whose heading starts with the cell `first`."""
    tables = page.read_text(encoding="utf-8").split(f"\n| {first} |")[1:]
    lines = (line for table in tables for line in table.partition("\n\n")[0].splitlines()[2:])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def named(cell):
    """Return the words in backticks of a cell."""
    return re.findall(r"`([^`]+)`", cell)
