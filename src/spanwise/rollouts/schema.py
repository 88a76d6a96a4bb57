"""The columns of a rollout file, each name spelled here and nowhere else.

A run's `rollouts/step_*.parquet` and the `credit.parquet` of `spanwise credit` are one format: a row per completion, and credit
under the name of the method that made it. A run has one method, an export has those that were asked for, and under the name
`recorded` what the trainer that wrote the rollouts says of them.

| column | type | what it holds |
|---|---|---|
| `step` | int64 | the training step that the completion was generated in |
| `group` | int64 | completions of one step with the same number are compared with each other |
| `rollout` | int64 | completions of one group with the same number are parts of one rollout (branches), which has one vote |
| `prompt` | string | its text; a conversation as JSON |
| `completion_ids` | list<int32> | the ids that were sampled, and those of tools in between |
| `tokens` | list<string> | instead of ids, where none are known: the texts; list<binary> where they cut characters |
| `trainable` | list<bool> | for each token, whether the model sampled it |
| `text` | string | what the completion says; left out of an export |
| `fault` | int64 | what is wrong with the tags, as bits of `Fault` |
| `start/<block>` | int64 | the block's first token |
| `end/<block>` | int64 | the token after its last; no block has any token where the completion was left out of the loss |
| `block` | list<int16> | the block of each token, by its place among the blocks, -1 for none; where blocks lie in several pieces |
| `reward/<objective>` | double | null where there is none |
| `status/<objective>` | string | why the reward has its value or has none: `Status` in lower case |
| `stated/<objective>` | double | the number that its text states and the reward read, as a confidence; null where there is none |
| `values` | list<float> | what a critic expected before each token; null where it is not known |
| `values/<stream>` | list<float> | the same of a critic with several values, by their names (`Scheme.value_names`) |
| `logprobs` | list<float> | log-probability of each token under the policy that sampled it; null where it is not known |
| `self_reward` | double | the score r_s of the completion's reserved token (`Laser`); null where it did not end |
| `credit/<method>/<block>` | double | null where the completion does not have the block |
| `credit/<method>/stop` | double | credit of the decision to stop, which the last trainable token carries |
| `parts/<method>` | list<struct> | what the credit is made of, an entry per objective, or one for the sum of all, see `PART` |
| `advantages/<method>` | list<float> | what each token trains with; null where the completion was left out of the loss |

Required are `prompt`, `trainable` and one of `completion_ids` and `tokens`. Any other column is handed to rewards; a gold answer
is called `answer`, and is JSON where it is no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa

from spanwise.errors import DataError, SpanwiseError

STEP, GROUP, ROLLOUT, PROMPT, IDS, TOKENS = "step", "group", "rollout", "prompt", "completion_ids", "tokens"
TRAINABLE, TEXT, FAULT, STOP, BLOCK, SCORE = "trainable", "text", "fault", "stop", "block", "self_reward"
ANSWER = "answer"
VALUES, LOGP = "values", "logprobs"

#: What stands in place of a method where a trainer's own numbers are shown as it recorded them.
RECORDED = "recorded"

#: Of the format; it stands in the file's metadata.
VERSION = "1"
_VERSION_KEY, _TOKENIZER_KEY = b"spanwise.rollouts", b"spanwise.tokenizer"
_NUMBERS = pa.list_(pa.float32())
_TYPES = {
    STEP: pa.int64(), GROUP: pa.int64(), ROLLOUT: pa.int64(), PROMPT: pa.string(), IDS: pa.list_(pa.int32()),
    TOKENS: pa.list_(pa.string()),
    TRAINABLE: pa.list_(pa.bool_()), TEXT: pa.string(), FAULT: pa.int64(), BLOCK: pa.list_(pa.int16()),
    SCORE: pa.float64(), VALUES: _NUMBERS, LOGP: _NUMBERS,
}  # fmt: skip
#: What `parts/<method>` says of each objective: `part = weight (worth - baseline) / divisor`, where there is a baseline; the others
#: of its stratum, how many members that has and of how many of them the baseline is the mean; why the part is 0 (`types.Zero`).
PART = pa.struct({
    "objective": pa.string(), "worth": pa.float64(), "baseline": pa.float64(), "divisor": pa.float64(), "weight": pa.float64(),
    "part": pa.float64(), "stratum": pa.int64(), "members": pa.int64(), "averaged": pa.int64(), "reason": pa.string(),
})  # fmt: skip
_FAMILIES = {
    "start": pa.int64(), "end": pa.int64(), "reward": pa.float64(), "status": pa.string(), "credit": pa.float64(),
    "advantages": _NUMBERS, VALUES: _NUMBERS, "stated": pa.float64(), "parts": pa.list_(PART),
}  # fmt: skip
_BY_METHOD = ("credit", "advantages", "parts")


def column(family: str, *names: str) -> str:
    """A column of a family: that of a block, an objective, a method, or of a block under a method (`STOP` among them).

    >>> column("end", "solution"), column("credit", "bae:group", "solution")
    ('end/solution', 'credit/bae:group/solution')
    """
    assert family in _FAMILIES, f"no column is called {family}/..."
    if family in _BY_METHOD and "/" in names[0]:
        raise SpanwiseError(
            f"Method '{names[0]}' has a '/' in its name, which the columns of a rollout file are cut at; rename it."
        )
    return "/".join((family, *names))


def behind(names: Iterable[str], *family: str) -> list[str]:
    """What the columns of a family are about: blocks behind `end`, objectives behind `reward`, blocks behind `credit`, method.

    >>> columns = ["credit/bae/a", "credit/bae:group/a", "credit/bae/stop", "advantages/bae", "end/c/d"]
    >>> behind(columns, "credit", "bae"), behind(columns, "end")
    (['a', 'stop'], ['c/d'])
    """
    start = f"{column(*family)}/"
    return [name.removeprefix(start) for name in names if name.startswith(start)]


def value_columns(streams: Sequence[str]) -> list[str]:
    """The columns of a critic's values.

    >>> value_columns(["return"]), value_columns(["correct", "brier"])
    (['values'], ['values/correct', 'values/brier'])
    """
    return [VALUES] if len(streams) < 2 else [column(VALUES, stream) for stream in streams]


def token_columns(names: Iterable[str]) -> list[str]:
    """The columns of what is known of each token.

    >>> token_columns(["values/correct", "logprobs", "values/brier", "prompt"])
    ['values/correct', 'values/brier', 'logprobs']
    """
    known = [name for name in names if name in (VALUES, LOGP) or name.startswith(f"{VALUES}/")]
    return sorted(known, key=lambda name: (name == LOGP, name != VALUES))


def methods_in(names: Iterable[str]) -> list[str]:
    """The methods that columns tell of.

    >>> methods_in(["credit/bae/a", "credit/bae/stop", "advantages/grpo"])
    ['bae', 'grpo']
    """
    parts = (name.split("/") for name in names)
    return list(dict.fromkeys(part[1] for part in parts if part[0] in ("credit", "advantages") and len(part) > 1))


def made_by(method: str, names: Iterable[str]) -> list[str]:
    """The columns, of those there are, that a method made.

    >>> made_by("bae", ["credit/bae/a", "credit/bae:group/a", "credit/bae/stop", "advantages/bae"])
    ['credit/bae/a', 'credit/bae/stop', 'advantages/bae']
    """
    own = (column("advantages", method), column("parts", method))
    return [name for name in names if name in own or name.startswith(column("credit", method, ""))]


def type_of(name: str) -> pa.DataType | None:
    """What a column is written as; None if the format has no such column.

    >>> type_of("credit/bae/solution"), type_of("answer")
    (DataType(double), None)
    """
    family, slash, _ = name.partition("/")
    return _FAMILIES.get(family) if slash else _TYPES.get(name)


def is_own(names: Iterable[str]) -> bool:
    """Whether the columns are of this format.

    >>> is_own(["prompt", "tokens", "trainable"]), is_own(["prompt", "completion"])
    (True, False)
    """
    return {PROMPT, TRAINABLE} <= set(names) and not {IDS, TOKENS}.isdisjoint(names)


def metadata(tokenizer: Path | None = None) -> dict[bytes, bytes]:
    """What a file says of itself: the version of its format, and the folder of the tokenizer that its ids are of."""
    said = {_VERSION_KEY: VERSION.encode()}
    return said if tokenizer is None else {**said, _TOKENIZER_KEY: str(tokenizer.resolve()).encode()}


def tokenizer_of(schema: pa.Schema) -> Path | None:
    """The folder of the tokenizer that the ids of a file are of, if it says so and it is still there."""
    said = (schema.metadata or {}).get(_TOKENIZER_KEY)
    place = None if said is None else Path(said.decode())
    return place if place is not None and place.exists() else None


def check(file: Path, schema: pa.Schema) -> None:
    """Refuse a file of another version; one without any is taken at its columns."""
    said = (schema.metadata or {}).get(_VERSION_KEY)
    if said is not None and said != VERSION.encode():
        raise DataError(
            f"'{file}' has version {said.decode(errors='replace')} of the rollout format and this spanwise reads {VERSION}; "
            "write it again, or read it with the spanwise that wrote it."
        )
    if said is None and "advantages" in schema.names:
        raise DataError(
            f"'{file}' has a column 'advantages' that names no method, as spanwise wrote before its rollout format had a version; "
            "write it again, or call the column 'advantages/<method>'."
        )
