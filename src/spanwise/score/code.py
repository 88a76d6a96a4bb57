"""`runs`: whether code that a model wrote runs, in a process of its own with limits; off unless an objective allows it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from spanwise.errors import RecipeError
from spanwise.registry import register
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, column_of, of_verdicts, read_tag
from spanwise.score.workers import DEADLINE, MEMORY, Verdict, Workers, shared_workers

_FENCED = re.compile(r"```[\w+-]*+[^\S\n]*+\n(.*?)```", re.DOTALL)


class CodeRunner(Workers):
    """Run programs, each in a process of its own, see `worker.py`."""

    kind = "code"
    what = "Python"
    advice = "Without it no code can be run."


def _check(options: Mapping[str, Any]) -> None:
    if options["allow"] is not True:
        raise RecipeError(
            "The reward 'runs' executes on this machine what a model wrote, and limits of time and memory are no sandbox: it can "
            "read, send and delete whatever you can. Run it in a container that has nothing to lose and no network, and say so: "
            "options: {allow: true}."
        )
    if sys.platform == "win32":
        raise RecipeError("The reward 'runs' needs the limits of a POSIX system; this is Windows.")


@register("runs", kind="reward", tags=("tag",), check=_check)
def runs(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    tag: str = "code",
    tests: str | None = None,
    allow: bool = False,
    workers: int | None = None,
    deadline: float | int = DEADLINE,
    memory: int = MEMORY,
) -> Reward:
    """1 if the Python code in a block runs to its end and exits with 0, 0 if not.

    Rule: the code is what the tag holds; of Markdown in it, the last fenced code. With `tests` the code of that column runs after
    it in the same names, and must come to its end, so that a program which exits before it is judged is wrong. No code, an
    exception, any other exit status, a program that runs into its deadline or its memory: 0. No paid block: ABSENT. No test
    code: ERROR, and so is a process that did not start. SECURITY.md says what is contained.

    Args:
        text, pays, columns, scored: see `spanwise.score.rewards`.
        tag: the tag of the code; "" reads the whole block.
        tests: the dataset column of test code, a text or a list of lines; None: the code alone.
        allow: whether code that a model wrote may run here at all.
        workers: how many programs run at a time; None: one for each core.
        deadline: seconds of processor time for each; by the clock four times that and five seconds more.
        memory: bytes of address space for each, 0 for no limit.

    Raises:
        RecipeError: it is not allowed.
        DataError: there is no such column.

    Example:
        >>> text = [{"fix": {"": "", "code": code}} for code in ("x = 2", "x = 3", "exit(0)")]
        >>> columns = {"tests": ["assert x == 2"] * 3}
        >>> runs(text, pays=("fix",), columns=columns, scored={}, tests="tests", allow=True, workers=1).value_n
        tensor([1., 0., 0.], dtype=torch.float64)
    """
    _check({"allow": allow})
    cells = [None] * len(text) if tests is None else column_of(columns, tests, len(text))
    verdicts: dict[int, Verdict | bool | None] = {}
    programs: dict[int, tuple[str, str | None]] = {}
    for n, (blocks, cell) in enumerate(zip(text, cells, strict=True)):
        here, code = read_tag(blocks, pays, tag)
        judge = "\n".join(map(str, cell)) if isinstance(cell, list | tuple) else cell
        if here and tests is not None and not (isinstance(judge, str) and judge.strip()):
            verdicts[n] = None
        elif here and not (code or "").strip():
            verdicts[n] = False
        elif here:
            programs[n] = [code, *_FENCED.findall(code or "")][-1], judge
    runner = shared_workers(CodeRunner, workers=workers, deadline=deadline, memory=memory)
    verdicts.update(zip(programs, runner.check(list(programs.values())), strict=True))
    return of_verdicts(len(text), verdicts)
