"""The built-in rewards: `correct`, `brier`, `log_score`, `format`, `second_attempt`, `runs`, `environment` and `overlong`.

Each takes `(text, *, pays, columns, scored, **options)`: the blocks of every completion, the paid blocks, the dataset's columns and
the objectives scored before. A tag is read in the first paid block that has it.
"""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from spanwise.errors import RecipeError, RewardError, check_known, check_number
from spanwise.registry import register
from spanwise.score.answers import MathVerifier, check_comparison, check_package, judge, parse_confidence
from spanwise.score.reward import Columns, Pays, Reward, Scored, Texts, column_of, judged, read_tag
from spanwise.score.workers import DEADLINE, MEMORY, Verdict, Workers, check_limits, shared_workers
from spanwise.segment.claims import without_indent
from spanwise.types import BlockText, Status

# Possessive quantifiers keep the time linear for long runs of spaces.
_FENCED = re.compile(r"(?:^([^\S\n]*)```[^`\n]*+|```[\w+-]*+[^\S\n]*+)\n(.*?)```", re.DOTALL | re.MULTILINE)
# Matches a string in a list that NumPy printed without commas.
_STRING = re.compile(r"""('(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+")(\s+(?=['"]))?""", re.DOTALL)


@register("correct", kind="reward", tags=("tag",), check=check_comparison, ready=check_package)
def correct(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    tag: str = "answer",
    column: str = "answer",
    verify: str = "auto",
    workers: int | None = None,
    deadline: float | int = DEADLINE,
    verifier: MathVerifier | None = None,
) -> Reward:
    r"""Reward 1 if the answer equals the gold answer, 0 if not.

    Rule: see `judge`. If a present block has no answer, or an unreadable answer, the completion is wrong (0, OK). A
    check that hangs or dies twice: wrong (0, BROKE). No paid block: ABSENT. A gold answer that is missing or unreadable: ERROR.

    Args:
        text, pays, columns, scored: see the module.
        tag: the tag of the answer; "" reads the whole block, in which Math-Verify looks for `\boxed{}` or `$...$`.
        column: the dataset column of the gold answers.
        verify: `auto`, `math` or `exact`.
        workers, deadline: how many processes compare answers as mathematics, and the seconds each may take, see `MathVerifier`.
        verifier: a `MathVerifier` of your own instead.

    Raises:
        DataError: there is no such column.

    Example:
        >>> text = [{"solution": {"": "", "answer": "4"}}, {"solution": {"": "", "answer": None}}, {"solution": None}]
        >>> correct(text, pays=("solution",), columns={"answer": ["4", "4", "4"]}, scored={}).value_n
        tensor([1., 0., nan], dtype=torch.float64)
    """
    gold_answers = column_of(columns, column, len(text))
    verifier = verifier or shared_workers(MathVerifier, workers=workers, deadline=deadline)

    def check(pairs: list[tuple[object, str | None]]) -> list[Verdict]:
        return judge([gold for gold, _ in pairs], [answer for _, answer in pairs], verify=verify, verifier=verifier)

    return judged(text, pays, tag, gold_answers, lambda _, block, gold: (gold, block.get(tag)), check)


@register("brier", kind="reward", tags=("tag",), judged_by="of")
def brier(
    text: Texts, *, pays: Pays, columns: Columns, scored: Scored, tag: str = "confidence", of: str = "correct"
) -> Reward:
    """Reward the stated confidence q with its Brier score for the outcome c: -(q - c)^2.

    q is read by `parse_confidence`; c is the reward of objective `of`. No block or no tag: ABSENT; not a number in [0, 1]:
    UNPARSABLE; else the status of c. Where c is unknown, `by_outcome_n2` still holds -q^2 and -(q - 1)^2. `stated_n` is q.

    Args:
        text, pays, columns, scored: see the module.
        tag: the tag of the confidence.
        of: the objective whose reward is c; a recipe that leaves it out gets the one that `judge_of` says.

    Raises:
        RecipeError: the objective `of` is not scored before this one.
        RewardError: c is outside [0, 1].

    Example:
        >>> text = [{"confidence": {"": "", "confidence": "0.7"}}] * 2
        >>> brier(text, pays=("confidence",), columns={}, scored={"correct": Reward.of([1.0, 0.0])}).value_n
        tensor([-0.0900, -0.4900], dtype=torch.float64)
    """
    return _score_confidence(text, pays, tag, scored, of, lambda q, c: -((q - c) ** 2))


def _check_clip(options: Mapping[str, Any]) -> None:
    check_number("The option 'clip' of reward 'log_score'", options["clip"], above=0.0)
    if options["clip"] >= 0.5:
        raise RecipeError(
            f"The option 'clip' of reward 'log_score' is {options['clip']}. It must lie above 0 and below 0.5."
        )


@register("log_score", kind="reward", tags=("tag",), judged_by="of", check=_check_clip)
def log_score(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    tag: str = "confidence",
    of: str = "correct",
    clip: float = 0.01,
) -> Reward:
    """Reward the stated confidence q with its log score for the outcome c: c log q + (1 - c) log(1 - q).

    q is first clipped to [clip, 1 - clip]; everything else as in `brier`.

    Args:
        text, pays, columns, scored, tag, of: see `brier`, for errors too.
        clip: the least confidence that counts, above 0 and below 0.5.

    Example:
        >>> text = [{"confidence": {"": "", "confidence": "50%"}}]
        >>> log_score(text, pays=("confidence",), columns={}, scored={"correct": Reward.of([1.0])}).value_n
        tensor([-0.6931], dtype=torch.float64)
    """

    def rule(q: float, c: float) -> float:
        q = min(max(q, clip), 1.0 - clip)
        return c * math.log(q) + (1.0 - c) * math.log(1.0 - q)

    return _score_confidence(text, pays, tag, scored, of, rule)


@register("format", kind="reward", segmenters=("tags",))
def format_(
    text: Texts, *, pays: Pays, columns: Columns, scored: Scored, tags: Sequence[str] | None = None, empty: bool = False
) -> Reward:
    """Reward 1 if every block in `pays` is well-formed, 0 if not.

    Well-formed: every tag of the block (or every one of `tags` that it has) holds something, these tags open and close once, in
    order, without nesting, and no tag of another block stands in this one. The first opening tag may be missing, as the prompt
    may hold it. One missing block: 0; all paid blocks missing, an empty completion included: ABSENT. A repeated block: refused.

    Args:
        text, pays, columns, scored: see the module.
        tags: the tags that count; None: the tags of the blocks that the completion has. A recipe's default is the layout's tags.
        empty: a tag may hold nothing, so that the tags alone count: `<reasoning></reasoning>` is well-formed.

    Example:
        >>> good = {"solution": {"": "<answer>4</answer>", "answer": "4"}}
        >>> twice = {"solution": {"": "<answer>4</answer><answer>5</answer>", "answer": "4"}}
        >>> format_([good, twice, {"solution": None}], pays=("solution",), columns={}, scored={}).value_n
        tensor([1., 0., nan], dtype=torch.float64)
    """

    def are_well_formed(blocks: BlockText, *_: Any) -> bool:
        required_tags = {tag for block in blocks.values() if block for tag in block if tag} if tags is None else {*tags}
        paid_blocks = [blocks.get(name) for name in pays]
        return all(block is not None and _is_well_formed(block, required_tags, empty) for block in paid_blocks)

    return judged(text, pays, "", [None] * len(text), are_well_formed)


@register("second_attempt", kind="reward", tags=("tag",), blocks=("first",), check=check_comparison, ready=check_package)
def second_attempt(
    text: Texts,
    *,
    pays: Pays,
    columns: Columns,
    scored: Scored,
    first: str = "first",
    tag: str = "answer",
    column: str = "answer",
    verify: str = "auto",
    partial: float = 0.1,
    workers: int | None = None,
    deadline: float | int = DEADLINE,
    verifier: MathVerifier | None = None,
) -> Reward:
    """Reward a second attempt with 1 if right, `partial` if wrong but new, 0 otherwise.

    The second attempt is the first paid block. "New" is the contrary of "equal" by `judge`, the first answer in the place of
    the gold one, so that "1/2" after "0.5" is the same; what cannot be compared is new. Without an answer the second attempt gets
    0; without a first answer, a wrong second one gets `partial`.

    Args:
        text, pays, columns, scored, tag, column, verify, workers, deadline, verifier: see `correct`, for errors too.
        first: the block of the first attempt.
        partial: the reward of trying something else.

    Example:
        >>> text = [{"first": {"": "", "answer": "3"}, "second": {"": "", "answer": a}} for a in ("4", "5", "3")]
        >>> second_attempt(text, pays=("second",), columns={"answer": ["4", "4", "4"]}, scored={}).value_n
        tensor([1.0000, 0.1000, 0.0000], dtype=torch.float64)
    """
    verifier = verifier or shared_workers(MathVerifier, workers=workers, deadline=deadline)
    options: dict[str, Any] = {"tag": tag, "column": column, "verify": verify, "verifier": verifier}
    second_reward = correct(text, pays=pays[:1], columns=columns, scored=scored, **options)
    reward_n = second_reward.value_n.clone()
    second_answers = [read_tag(blocks, pays[:1], tag) or "" for blocks in text]
    wrong_indices = [n for n, value in enumerate(reward_n.tolist()) if value == 0.0 and second_answers[n].strip()]
    first_answers = [read_tag(text[n], (first,), tag) for n in wrong_indices]
    repeat_verdicts = judge(first_answers, [second_answers[n] for n in wrong_indices], verify=verify, verifier=verifier)
    for n, repeat_verdict in zip(wrong_indices, repeat_verdicts, strict=True):
        reward_n[n] = 0.0 if repeat_verdict.value == 1.0 else partial
    return replace(second_reward, value_n=reward_n)


def _score_confidence(
    text: Texts, pays: Pays, tag: str, scored: Scored, of: str, rule: Callable[[float, float], float]
) -> Reward:
    """Score stated confidences q against outcomes c by a proper scoring rule. The reward of `of` is c."""
    check_known("objective scored before this one", of, scored)
    outcome_rewards = scored[of].value_n.tolist()
    for n, outcome in enumerate(outcome_rewards):
        if outcome < 0.0 or outcome > 1.0:
            raise RewardError(
                f"Objective '{of}' gives completion {n} the outcome {outcome}, but a confidence can only be judged by an "
                "outcome in [0, 1]. Set 'given' to an objective with rewards from 0 to 1, or remove the objective of the "
                "confidence."
            )
    confidence_texts = [read_tag(blocks, pays, tag) for blocks in text]
    confidences = [None if stated_text is None else parse_confidence(stated_text) for stated_text in confidence_texts]
    rewards = [None if q is None or math.isnan(c) else rule(q, c) for q, c in zip(confidences, outcome_rewards, strict=True)]
    # If a confidence can be read, its reward has the status of the reward for the outcome.
    statuses = [
        Status.ABSENT if stated_text is None else Status.UNPARSABLE if q is None else Status(outcome_status)
        for stated_text, q, outcome_status in zip(confidence_texts, confidences, scored[of].status_n.tolist(), strict=True)
    ]
    rewards_by_outcome = [None if q is None else (rule(q, 0.0), rule(q, 1.0)) for q in confidences]
    return Reward.of(rewards, status=statuses, by_outcome=rewards_by_outcome, stated=confidences)


class CodeRunner(Workers):
    """Run the Python code of completions and its tests in separate processes."""

    kind = "code"


def _check_allowed(options: Mapping[str, Any]) -> None:
    if options["allow"] is not True:
        raise RecipeError(
            "The reward 'runs' executes a model's code on this machine. Limits of time and memory are no sandbox: the code can "
            "read, send and delete whatever you can. Run it in a container that has no network and holds nothing of value. "
            "Then set options: {allow: true}."
        )
    check_limits(options)
    memory = options["memory"]
    if not isinstance(memory, int) or 0 != memory < 2**25:
        raise RecipeError(f"The option 'memory' of reward 'runs' is {memory!r}. Set 0 (no limit) or 33554432 bytes or more.")
    if sys.platform == "win32":
        raise RecipeError("The reward 'runs' needs the process limits of a POSIX system. Use Linux or macOS.")


@register("runs", kind="reward", tags=("tag",), check=_check_allowed)
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
    """Reward 1 if the Python code in a block runs to its end and exits with 0, else 0.

    Rule: the code is what the tag holds; of Markdown in it, the last fenced code. With `tests` the code of that column runs in a
    process of its own, sees the names of the code, and must come to its end. Plain values (numbers, texts, lists, dicts, ...)
    cross as copies; any other object is a stand-in that asks for its methods, and equals no plain value. Async functions,
    subclasses of the code's classes, its operators with plain values, and what it prints cannot be tested. No code, an exception,
    any other exit status, a program that runs into its deadline or its memory: 0. No paid block: ABSENT. No Python in the cell,
    tests that call nothing (a `check` alone, a list of cases), a process that did not start: ERROR. Its limits: SECURITY.md.

    Args:
        text, pays, columns, scored: see the module.
        tag: the tag of the code; "" reads the whole block.
        tests: the dataset column of test code, a text or a list of lines (or its text); None: the code alone.
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
    _check_allowed({"allow": allow, "memory": memory, "workers": workers, "deadline": deadline})
    test_codes = [None] * len(text) if tests is None else map(_test_code, column_of(columns, tests, len(text)))

    def request(_: BlockText, block: Mapping[str, str | None], test_code: Any) -> bool | tuple[str, str | None] | None:
        program_code = block.get(tag) or ""
        if tests is not None and test_code is None:
            return None
        indent, code = [("", program_code), *_FENCED.findall(program_code)][-1]
        return (without_indent(code, len(indent)), test_code) if program_code.strip() else False

    code_runner = shared_workers(CodeRunner, workers=workers, deadline=deadline, memory=memory)
    return judged(text, pays, tag, [*test_codes], request, code_runner.check)


def _test_code(cell: Any) -> str | None:
    """Return the test code in a dataset cell, or None if there is none."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            cell = ast.literal_eval(_STRING.sub(lambda match: match[1] + ("," if match[2] else ""), cell.strip()))
    test_code = "\n".join(map(str, cell)) if isinstance(cell, list | tuple) or getattr(cell, "ndim", 0) else cell
    return test_code if isinstance(test_code, str) and test_code.strip() else None


@register("environment", kind="reward")
def environment(text: Texts, *, pays: Pays, columns: Columns, scored: Scored, column: str = "environment") -> Reward:
    """Reward a completion with the number that its environment gave. The engine (a trainer) passes it in a column.

    Rule: None or NaN is no reward (ABSENT): in a turn that the environment does not judge. 0 is a reward.

    Args:
        text, pays, columns, scored: see the module.
        column: where the number stands; an environment that gives several has several columns.

    Raises:
        DataError: there is no such column.

    Example:
        >>> environment([{"turn": {"": "4"}}] * 2, pays=("turn",), columns={"environment": [0.5, None]}, scored={}).status_n
        tensor([0, 1])
    """
    reward_numbers = column_of(columns, column, len(text))
    return Reward.of([None if number is None or number != number else float(number) for number in reward_numbers])


def _check_lengths(options: Mapping[str, Any]) -> None:
    max_length, buffer = options["longest"], options["buffer"]
    check_number("The option 'longest' (tokens) of reward 'overlong'", max_length, least=1.0, whole=True)
    check_number("The option 'buffer' (tokens) of reward 'overlong'", buffer, least=1.0, most=float(max_length), whole=True)


@register("overlong", kind="reward", check=_check_lengths, reads_ids=True)
def overlong(text: Texts, *, pays: Pays, columns: Columns, scored: Scored, longest: int = 0, buffer: int = 0) -> Reward:
    r"""Penalise long completions: 0 up to a soft limit, then less, down to -1.

    Equation
        reward = -min(max(length - (longest - buffer), 0) / buffer, 1),  length the tokens of the completion

    No paid block: ABSENT. The length is that of the whole completion, with what tools wrote in it.

    Args:
        text, pays, columns, scored: see the module.
        longest: tokens of the longest completion, such as `max_completion_length`.
        buffer: the charge begins this many tokens before.

    Raises:
        RecipeError: not 1 <= buffer <= longest.
        DataError: the token ids of completions are not known (column `completion_ids`).

    Example:
        >>> ids = [[1] * length for length in (6, 8, 9, 12)]
        >>> columns = {"completion_ids": ids}
        >>> overlong([{"all": {"": ""}}] * 4, pays=("all",), columns=columns, scored={}, longest=10, buffer=4).value_n
        tensor([ 0.0000, -0.5000, -0.7500, -1.0000], dtype=torch.float64)

    Source: DAPO's soft overlong punishment (Yu et al. 2025, arXiv 2503.14476, equation 13).
    """
    _check_lengths({"longest": longest, "buffer": buffer})
    token_ids = column_of(columns, "completion_ids", len(text))
    return judged(text, pays, "", token_ids, lambda _, __, ids: 0.0 - min(max(len(ids) - longest + buffer, 0) / buffer, 1.0))


def _is_well_formed(block: Mapping[str, str | None], counted_tags: Collection[str], empty: bool) -> bool:
    """Return whether a block's tags stand in order, each once and with content."""
    block_tags = [tag for tag in block if tag in counted_tags]
    if any(tag_content is None or not (empty or tag_content.strip()) for tag_content in map(block.get, block_tags)):
        return False
    tag_pattern = "|".join(map(re.escape, sorted(counted_tags)))
    actual_marks = re.findall(f"</?(?:{tag_pattern})>", block.get("") or "") if counted_tags else []
    expected_marks = [mark for tag in block_tags for mark in (f"<{tag}>", f"</{tag}>")]
    return actual_marks in (expected_marks, expected_marks[1:])
