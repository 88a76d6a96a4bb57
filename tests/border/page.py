"""Writes docs/border.md from the cases of this folder: python tests/border/page.py."""

import importlib.util
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE = HERE.parent.parent / "docs" / "border.md"
HEAD = """# What it says when something does not fit

You see at once what is wrong, and what to write instead. A run that cannot give right numbers does not start.
What shows itself only in the completions is said with the first batch. Nothing ends in success with a wrong figure.

Every line here is a test: the set-up is really made and the sentence really read (`pytest tests/border`).
Three dots stand for names, numbers and paths of the set-up, or for more of the sentence.
"""


def modules():
    """The test files of this folder with their cases, by name."""
    for file in sorted(HERE.glob("test_border_*.py")):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "CASES"):
            yield module


def plain(text):
    """Text for a cell: outside code, what Markdown would take for tags and columns is escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part.replace("|", "\\|") if n % 2 else re.sub(r"([<|*])", r"\\\1", part) for n, part in enumerate(parts))


def page():
    """The whole page."""
    text = [HEAD]
    for module in modules():
        title = (module.__doc__ or "").strip().splitlines()[0].rstrip(".")
        text += [f"\n## {title}\n", "| what was done | what it says |", "|---|---|"]
        text += [f"| {plain(case.setup)} | {plain(case.says)} |" for case in module.CASES]
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]
    FILE.write_text(page(), encoding="utf-8")
