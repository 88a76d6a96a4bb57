"""Which column of a table holds what: as the user says, else by its name; what is not clear is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spanwise.errors import DataError, RecipeError, unknown
from spanwise.rollouts import schema

#: What can be read, in words for messages.
FORMATS = (
    "spanwise's rollouts (parquet with prompt, trainable, completion_ids or tokens), TRL's completions (parquet with prompt, "
    "completion), verl's rollout dump (jsonl with input, output), verifiers' traces (jsonl with traces) and tables (csv, tsv, "
    "json, jsonl, parquet) with prompt, question or messages, and completion(s) or response(s)"
)
#: Role -> the names that a column of it may have. A column that is called like the role itself goes before the others.
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "messages", "input", "instruction"),
    "completion": ("completion", "response", "output"),
    "completions": ("completions", "responses"),
    "answer": ("answer", "ground_truth", "gold", "gts", "target"),
    "group": ("group", "group_id", "prompt_id", "example_id"),
    "step": ("step",),
}
#: Before the name of a reward.
REWARD_STARTS = ("rewards/", schema.column("reward", ""))
HOW = "--columns {role}=NAME, in Python columns={{'{role}': 'NAME'}}"


@dataclass(frozen=True)
class Roles:
    """The column of each role.

    Attributes:
        prompt: None where a group column says what is compared.
        completion: None where `prompt` holds whole conversations, whose end the model said.
        grouped: a list in the completion column is always several completions of one prompt.
        answer, group, step: None where there is none.
    """

    prompt: str | None
    completion: str | None
    grouped: bool = False
    answer: str | None = None
    group: str | None = None
    step: str | None = None

    @property
    def used(self) -> set[str]:
        """The columns that have a role, as far as it is no reward's."""
        return {name for name in (self.prompt, self.completion, self.answer, self.group, self.step) if name is not None}


def check_roles(columns: Mapping[str, str] | None) -> dict[str, str]:
    """What the user has said of columns, checked.

    >>> check_roles({"completoin": "output"})
    Traceback (most recent call last):
    spanwise.errors.RecipeError: There is no role of --columns 'completoin'. Did you mean 'completion'? Known: answer, ...
    """
    asked = dict(columns or {})
    for role in asked:
        if role not in NAMES:
            raise RecipeError(unknown("role of --columns", role, NAMES))
    if "completion" in asked and "completions" in asked:
        raise RecipeError("--columns names both completion and completions; completions is for a list in each cell.")
    by_name: dict[str, str] = {}
    for role, name in asked.items():
        other = by_name.setdefault(name, role)
        if other != role and {other, role} != {"prompt", "group"}:
            raise RecipeError(f"--columns takes '{name}' for both {other} and {role}; a column has one role.")
    return asked


def find_roles(path: Path, names: Sequence[str], asked: Mapping[str, str]) -> Roles:
    """The column of each role."""
    for role, name in asked.items():
        if name not in names:
            raise DataError(f"--columns {role}={name}: {_no_column(path, name, names)}")
    taken = {name for role, name in asked.items() if role != "group"}  # which may be the prompt
    found = {role: asked.get(role) or _only(path, role, names, taken) for role in ("prompt", "answer", "group", "step")}
    spoken = "completions" if "completions" in asked else "completion"
    completion = asked.get(spoken) or _only(path, "completion", names, taken, also=NAMES["completions"])
    talks = found["prompt"] == "messages" and completion is None
    if completion is None and not talks:
        raise DataError(
            f"{_has(path, names)}, which is no rollout format known here: none of them is called "
            f"{_either((*NAMES['completion'], *NAMES['completions']))}. Say which holds the completions: "
            f"{HOW.format(role='completion')}. Known here: {FORMATS}."
        )
    if found["prompt"] is None and found["group"] is None:
        raise DataError(
            f"{_has(path, names)}, which is no rollout format known here: nothing says which completions are of one prompt. Say "
            f"which column holds the prompts: {HOW.format(role='prompt')}; or an id that those of one prompt share: "
            "--columns group=NAME."
        )
    grouped = "completions" in asked or ("completion" not in asked and completion in NAMES["completions"])
    return Roles(found["prompt"], completion, grouped, found["answer"], found["group"], found["step"])


def _only(path: Path, role: str, names: Sequence[str], taken: set[str], *, also: Sequence[str] = ()) -> str | None:
    """The one column whose name says that it has the role."""
    here = [name for name in (*NAMES[role], *also) if name in names and name not in taken]
    if role in here and not (role == "completion" and "completions" in here):
        return role
    if len(here) > 1:
        raise DataError(
            f"'{path}' has the columns {' and '.join(here)}, and each may hold the {role}. Say which: {HOW.format(role=role)}."
        )
    return here[0] if here else None


def _has(path: Path, names: Sequence[str]) -> str:
    shown = ", ".join(map(str, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return f"'{path}' has the columns {shown or '(none)'}"


def _no_column(path: Path, name: str, names: Sequence[str]) -> str:
    return f"{_has(path, names)}. {unknown('column', name, names).split(' Known: ')[0]}"


def _either(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"
