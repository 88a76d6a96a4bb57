"""Tutorials run as they are read: `python tests/tutorial_pages.py PAGE` writes what each block prints under it."""

import contextlib
import io
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
#: A python block, and the output that stands under it. `about`: the numbers hang on the machine, see `agree`.
STEP = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text(?P<about> about)?\n(?P<output>.*?)^```\n)?", re.M | re.S)
NUMBER = re.compile(r"-?\d*\.?\d+")


def run(text, name):
    """Each step of a page in order, in one namespace, with what it printed."""
    namespace = {"__name__": f"tutorials.{name}"}
    for position, step in enumerate(STEP.finditer(text), start=1):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(step["code"], f"{name}, step {position}", "exec"), namespace)
        yield step, printed.getvalue()


def agree(expected, printed, *, about):
    """Whether an output is the one on the page; `about` lets numbers of a training differ by .15, as between processors.

    >>> [agree("a 1.00", printed, about=about) for about in (None, " about") for printed in ("a 1.00", "a 1.01", "a 1.20")]
    [True, False, False, True, True, False]
    >>> [agree("a 1.00 2.00", printed, about=" about") for printed in ("b 1.00 2.00", "a 1.00")]
    [False, False]
    """
    if not about:
        return expected == printed
    pairs = list(zip(NUMBER.findall(expected), NUMBER.findall(printed), strict=False))
    same = NUMBER.sub("#", expected).split() == NUMBER.sub("#", printed).split()
    return same and all(abs(float(a) - float(b)) <= 0.15 for a, b in pairs)


def written(text, name):
    """Return the page with the present output of its blocks."""
    parts, end = [], 0
    for step, printed in run(text, name):
        parts += [text[end : step.start()], f"```python\n{step['code']}```\n"]
        if printed:
            parts.append(f"\n```text{step['about'] or ''}\n{printed}```\n")
        end = step.end()
    return "".join([*parts, text[end:]])


if __name__ == "__main__":
    for page in sys.argv[1:]:
        path = FOLDER / page
        path.write_text(written(path.read_text(encoding="utf-8"), path.stem), encoding="utf-8")
