"""Read the logs of evaluations: Inspect's, through its own reader, and the samples of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spanwise.errors import DataError
from spanwise.rollouts import cells
from spanwise.rollouts.files import parse_records
from spanwise.rollouts.table import RolloutTable, tokenize

#: What Inspect's letters are worth; any other text is no number.
_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
#: The fields that every row of lm-evaluation-harness has.
LM_EVAL_REQUIRED = frozenset({"doc_id", "resps", "arguments"})


def is_inspect(file: Path) -> bool:
    """Return whether a file is a log of Inspect: by its name, or by how a JSON log begins."""
    if file.suffix.lower() == ".eval":
        return True
    with file.open("rb") as stream:
        start = b"".join(stream.read(200).split())
    return start.startswith(b'{"version":') and b'"status":' in start


def read_inspect(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read the samples of logs: what follows the last user message is the completion, tools' results in it are masked.

    The epochs of a sample are a group. Each scorer is a reward by its name, or `scorer.key` where it gives several values. A sample
    that ended in an error has no reward.
    """
    rows: list[dict[str, Any]] = []
    silent: list[Any] = []
    tokens = tokenize(_inspect_parts(files, rows, silent), tokenizer)
    note = f"{len(silent)} of {len(rows) + len(silent)} samples hold no completion and are left out." if silent else ""
    return _table("Inspect", path, tokens, rows, note)


def _inspect_parts(files: Sequence[Path], rows: list[dict[str, Any]], silent: list[Any]) -> Iterator[cells.Parts]:
    """Yield the completion of every sample and append the other fields to `rows`; `silent` gets samples without one."""
    for sample in _samples(files):
        prompt, completion = cells.split_chat([*map(_message, sample.messages)])
        if completion is None:
            silent.append(sample.id)
            continue
        columns = {"answer": cells.answer_text(sample.target), "epoch": sample.epoch, **_plain(sample.metadata)}
        rewards = {} if sample.error else _scores(sample.scores or {})
        # Two tasks in a folder may both have a sample 1.
        key = sample.id, cells.prompt_text(sample.input if isinstance(sample.input, str) else [*map(_message, sample.input)])
        rows.append({"prompt": cells.prompt_text(prompt), "key": key, "rewards": rewards, "columns": columns})
        yield cells.completion_parts(completion)


def _samples(files: Sequence[Path]) -> Iterator[Any]:
    """Yield the samples of logs as Inspect reads them."""
    try:
        from inspect_ai.log import read_eval_log_samples  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"'{files[0]}' is a log of Inspect, which its own package reads: pip install inspect_ai. Or write its samples as JSON "
            "lines, each with the prompt, the completion and its rewards as numbers."
        ) from error
    for file in files:
        try:
            yield from read_eval_log_samples(str(file), all_samples_required=False)
        except Exception as error:  # zip, JSON and Inspect each raise their own type
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(f"'{file}' cannot be read as a log of Inspect; it is damaged or cut off ({reason}).") from error


def _message(message: Any) -> dict[str, Any]:
    """Return a message of Inspect as an OpenAI message, with its reasoning beside its content."""
    parts = message.content if isinstance(message.content, list) else []
    return {
        "role": message.role,
        "content": message.text,
        "reasoning_content": "".join(getattr(part, "reasoning", None) or "" for part in parts),
        "tool_calls": [{"name": c.function, "arguments": c.arguments} for c in getattr(message, "tool_calls", None) or ()],
    }


def _scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return every score by its name, a letter as its number."""
    values: dict[str, Any] = {}
    for name, score in scores.items():
        entries = score.value if isinstance(score.value, Mapping) else {"": score.value}
        for key, value in entries.items():
            values[f"{name}.{key}" if key else name] = _LETTERS.get(value, value) if isinstance(value, str) else value
    return values


def _plain(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (metadata or {}).items() if isinstance(value, str | int | float | None)}


def read_lm_eval(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read `samples_*.jsonl`: a completion for each response to a document, with the document's metrics as rewards.

    A document that several filters read stands in several lines; its metrics are `metric,filter` then. One number for several
    responses is the reward of none of them.
    """
    rows: list[dict[str, Any]] = []
    tokens = tokenize(_responses(files, rows), tokenizer)
    filters = {name for row in rows for _, name in row["rewards"]}
    for row in rows:
        row["rewards"] = {
            metric if len(filters) == 1 else f"{metric},{name}": v for (metric, name), v in row["rewards"].items()
        }
    shared = sum(row["shared"] for row in rows)
    note = (
        f"{shared} responses share one number with other responses to their document, and have no reward." if shared else ""
    )
    return _table("lm-eval", path, tokens, rows, note)


def _responses(files: Sequence[Path], rows: list[dict[str, Any]]) -> Iterator[cells.Parts]:
    """Yield the responses of every document once, and append their fields to `rows`."""
    by_document: dict[str, list[dict[str, Any]]] = {}
    for record in parse_records(files, _lm_eval):
        texts, key = record.pop("texts"), record["key"]
        if key in by_document:
            for row in by_document[key]:
                row["rewards"].update(record["rewards"])
            continue
        by_document[key] = [{**record, "rewards": {**record["rewards"]}} for _ in texts]
        rows += by_document[key]
        for text in texts:
            yield [(cells.content_text(text), True)]


def _lm_eval(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return prompt, responses and metrics of a line."""
    asked = cells.object_field(record, "arguments").get("gen_args_0")
    prompt = asked.get("arg_0") if isinstance(asked, Mapping) else None
    texts = [text for response in record["resps"] for text in (response if isinstance(response, list) else [response])]
    if prompt is None or not all(isinstance(text, str) for text in texts):
        raise cells.FieldError("holds no text that a model wrote; tasks that score given choices have no completions")
    metrics = {(name, str(record.get("filter"))): record.get(name) for name in record.get("metrics") or ()}
    return {
        "prompt": cells.prompt_text(cells.parse_literal(prompt)),
        "key": f"{record['doc_id']} {record.get('doc_hash', '')}",
        "texts": texts,
        "shared": len(texts) > 1,
        "rewards": metrics if len(texts) == 1 else dict.fromkeys(metrics),
        "columns": {"answer": cells.answer_text(record.get("target")), **_plain(cells.object_field(record, "doc"))},
    }


def _table(source: str, path: Path, tokens: Any, rows: Sequence[Mapping[str, Any]], note: str) -> RolloutTable:
    return RolloutTable.of(
        source,
        path,
        tokens,
        prompts=[row["prompt"] for row in rows],
        steps=[0] * len(rows),
        keys=[row["key"] for row in rows],
        columns=cells.by_column([row["columns"] for row in rows]),
        rewards=cells.by_column([row["rewards"] for row in rows]),
        notes=[note],
    )
