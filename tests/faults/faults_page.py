"""Writes the section of docs/reliability.md on faults from the tests of this folder: python tests/faults/faults_page.py."""

import re
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
FILE = HERE.parent.parent / "docs" / "reliability.md"
TITLE = "## Faults seen elsewhere"
HEAD = f"""{TITLE}

This table lists faults found in other trainers, where runs went wrong without a warning. For each fault of another
trainer, spanwise has a test that fails on code with the fault (`pytest tests/faults`).
"""
#: Faults that cannot concern spanwise: number, where it was seen, what happened, why it cannot happen here.
NOT_OURS = [
    (
        26,
        "verl-project/verl#3960",
        "Tool calls were cleared, and training rendered another prompt than the one that was sampled from.",
        "Messages are not rendered here: an engine gives the ids that were sampled, and f24 holds that they stay as they are.",
    ),
    (
        34,
        "NVIDIA-NeMo/Megatron-Bridge#3927",
        "A chat template without `{% generation %}` gave a mask that covered everything.",
        "No template is asked for a mask: the engine says what was sampled, and f31 holds that another mask is refused.",
    ),
]


def tests():
    """Number -> (where it was seen, what happened, name of the test), from the docstrings."""
    by_number = {}
    for file in sorted(HERE.glob("test_faults_*.py")):
        for name, function in vars(import_module(f"faults.{file.stem}")).items():
            if number := re.match(r"test_f(\d\d)_", name):
                by_number.setdefault(int(number[1]), []).append((*function.__doc__.split(". ", 1), name))
    return by_number


def cell(text):
    """Text for a cell of a table: no columns in it, and tags as text."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if n % 2 else re.sub(r"([<|*])", r"\\\1", part) for n, part in enumerate(parts))


def section():
    """The whole section."""
    text = [HEAD, "| | seen at | what happened | test |", "|---|---|---|---|"]
    for number, cases in sorted(tests().items()):
        text += [f"| F{number} | {cell(where)} | {cell(what)} | `{name}` |" for where, what, name in cases]
    text += [
        "\nThe next table lists faults of other trainers that cannot occur in spanwise:\n",
        "| | seen at | what happened | why not here |",
        "|---|---|---|---|",
    ]
    text += [f"| F{number} | {cell(where)} | {cell(what)} | {cell(why)} |" for number, where, what, why in NOT_OURS]
    return "\n".join(text) + "\n"


def written():
    """The section as the page has it; empty where it does not."""
    page = FILE.read_text(encoding="utf-8") if FILE.exists() else "# Reliability\n"
    matched = re.search(rf"^{TITLE}\n.*?(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return page, "" if matched is None else matched[0].rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent)]
    page, before = written()
    text = page.replace(before, section()) if before else f"{page.rstrip()}\n\n{section()}"
    FILE.write_text(text, encoding="utf-8")
