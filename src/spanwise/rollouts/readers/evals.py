"""Read the logs of evaluations: Inspect's, through its own reader, and the samples of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spanwise.errors import DataError
from spanwise.rollouts import cells
from spanwise.rollouts.files import parse_records
from spanwise.rollouts.table import RolloutTable, tokenize

#: The numbers for the letters that Inspect's scorers give; any other text is not a number.
_LETTERS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
#: The fields that every row of lm-evaluation-harness has.
LM_EVAL_REQUIRED = frozenset({"doc_id", "resps", "arguments"})


def is_inspect(file: Path) -> bool:
    """Return whether a file is a log of Inspect, by its suffix or by the first fields of its JSON."""
    with file.open("rb") as stream:
        beginning = b"".join(stream.read(200).split())
    return file.suffix.lower() == ".eval" or (beginning.startswith(b'{"version":') and b'"status":' in beginning)


def read_inspect(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read the samples of Inspect's logs: the epochs of a sample are a group, and each scorer is a reward."""
    rows: list[dict[str, Any]] = []
    unanswered_ids: list[Any] = []
    tokens = tokenize(_inspect_completions(files, rows, unanswered_ids), tokenizer)
    count = len(unanswered_ids)
    unanswered_note = f"{count} of {len(rows) + count} samples hold no completion and are left out." if count else ""
    return _build_table("Inspect", path, tokens, rows, unanswered_note)


def _inspect_completions(
    files: Sequence[Path], rows: list[dict[str, Any]], unanswered_ids: list[Any]
) -> Iterator[cells.Parts]:
    """Yield every sample's completion, append its other fields to `rows`, and collect the ids of samples without completion."""
    for sample in _read_samples(files):
        prompt, completion = cells.split_chat([*map(_to_message, sample.messages)])
        if completion is None:
            unanswered_ids.append(sample.id)
            continue
        columns = {"answer": cells.answer_text(sample.target), "epoch": sample.epoch, **cells.scalar_fields(sample.metadata)}
        row_rewards = {} if sample.error else _score_values(sample.scores or {})
        question_input = sample.input if isinstance(sample.input, str) else [*map(_to_message, sample.input)]
        sample_key = sample.id, cells.prompt_text(question_input)  # the logs of two tasks may both have a sample 1
        rows.append({"prompt": cells.prompt_text(prompt), "key": sample_key, "rewards": row_rewards, "columns": columns})
        yield cells.completion_parts(completion)


def _read_samples(files: Sequence[Path]) -> Iterator[Any]:
    """Yield the samples of logs, read with Inspect's own package."""
    try:
        from inspect_ai.log import read_eval_log_samples  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise DataError(
            f"'{files[0]}' is a log of Inspect; to read it, install Inspect's package: pip install inspect_ai. Or write its "
            "samples as JSON lines, each with the prompt, the completion and its rewards as numbers."
        ) from error
    for file in files:
        try:
            yield from read_eval_log_samples(str(file), all_samples_required=False)
        except Exception as error:  # zip, JSON and Inspect each raise their own exceptions
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise DataError(f"'{file}' cannot be read as a log of Inspect; it is damaged or cut off ({reason}).") from error


def _to_message(message: Any) -> dict[str, Any]:
    """Convert a message of Inspect to an OpenAI message, with the reasoning beside the content."""
    content_parts = message.content if isinstance(message.content, list) else []
    return {
        "role": message.role,
        "content": message.text,
        "reasoning_content": "".join(getattr(part, "reasoning", None) or "" for part in content_parts),
        "tool_calls": [{"name": c.function, "arguments": c.arguments} for c in getattr(message, "tool_calls", None) or ()],
    }


def _score_values(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of every Inspect scorer by name, with numbers in place of grades such as "C" (correct)."""
    reward_values: dict[str, Any] = {}
    for name, score in scores.items():
        score_entries = score.value if isinstance(score.value, Mapping) else {"": score.value}
        for key, value in score_entries.items():
            reward_values[f"{name}.{key}" if key else name] = _LETTERS.get(value, value) if isinstance(value, str) else value
    return reward_values


def read_lm_eval(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read `samples_*.jsonl`: a completion for each response to a document, with `metric` or `metric,filter` as rewards."""
    rows: list[dict[str, Any]] = []
    tokens = tokenize(_lm_eval_responses(files, rows), tokenizer)
    filter_names = {name for row in rows for _, name in row["rewards"]}
    for row in rows:
        row["rewards"] = {
            metric if len(filter_names) == 1 else f"{metric},{name}": v for (metric, name), v in row["rewards"].items()
        }
    shared_count = sum(row["shared"] for row in rows)
    shared_note = (
        f"{shared_count} responses share one number with other responses to their document, so they have no reward."
        if shared_count
        else ""
    )
    return _build_table("lm-eval", path, tokens, rows, shared_note)


def _lm_eval_responses(files: Sequence[Path], rows: list[dict[str, Any]]) -> Iterator[cells.Parts]:
    """Yield the responses to each document once, though a file has a line per filter, and append their fields to `rows`."""
    rows_of_document: dict[str, list[dict[str, Any]]] = {}
    for record in parse_records(files, _parse_lm_eval):
        response_texts, document_key = record.pop("texts"), record["key"]
        if document_key in rows_of_document:
            for row in rows_of_document[document_key]:
                row["rewards"].update(record["rewards"])
            continue
        rows_of_document[document_key] = [{**record, "rewards": {**record["rewards"]}} for _ in response_texts]
        rows += rows_of_document[document_key]
        for text in response_texts:
            yield [(cells.content_text(text), True)]


def _parse_lm_eval(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt, the responses and the metrics in a line of lm-evaluation-harness."""
    call_arguments = cells.object_field(record, "arguments").get("gen_args_0")
    prompt_field = call_arguments.get("arg_0") if isinstance(call_arguments, Mapping) else None
    responses = [text for response in record["resps"] for text in (response if isinstance(response, list) else [response])]
    if prompt_field is None or not all(isinstance(text, str) for text in responses):
        raise cells.FieldError(
            "holds no text that a model wrote, as in tasks that score given choices; give samples of a generation task"
        )
    metric_values = {(name, str(record.get("filter"))): record.get(name) for name in record.get("metrics") or ()}
    return {
        "prompt": cells.prompt_text(cells.parse_literal(prompt_field)),
        "key": f"{record['doc_id']} {record.get('doc_hash', '')}",
        "texts": responses,
        "shared": len(responses) > 1,
        "rewards": metric_values if len(responses) == 1 else dict.fromkeys(metric_values),
        "columns": {
            "answer": cells.answer_text(record.get("target")),
            **cells.scalar_fields(cells.object_field(record, "doc")),
        },
    }


def _build_table(source: str, path: Path, tokens: Any, rows: Sequence[Mapping[str, Any]], note: str) -> RolloutTable:
    """Build a RolloutTable from the rows of an evaluation log; rows with equal keys are a group."""
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
