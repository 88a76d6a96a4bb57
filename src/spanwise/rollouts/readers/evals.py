"""Read the logs of Inspect and the samples of lm-evaluation-harness."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

from spanwise.errors import DataError, first_line
from spanwise.rollouts import cells
from spanwise.rollouts.collected import Collected
from spanwise.rollouts.files import ReadingProgress, parse_records
from spanwise.rollouts.json_array import member_entries
from spanwise.rollouts.table import RolloutTable, tokenize
from spanwise.score.foreign import score_number

LM_EVAL_REQUIRED = frozenset({"doc_id", "resps", "arguments"})


def is_inspect(file: Path) -> bool:
    """Return whether a file is a log of Inspect."""
    with file.open("rb") as stream:
        file_start = b"".join(stream.read(200).split())  # the file's first bytes, without white space
    return file.suffix.lower() == ".eval" or (file_start.startswith(b'{"version":') and b'"status":' in file_start)


def read_inspect(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read the samples of Inspect's logs. The epochs of a sample form a group, and each scorer is a reward."""
    samples = Collected()
    unanswered_ids: list[Any] = []
    tokens = tokenize(_inspect_completions(files, samples, unanswered_ids), tokenizer)
    sample_count, no_reply_count = len(samples.fields), len(unanswered_ids)
    later_turn_count = sum(samples.values("is_later"))
    no_completion_note = f"{no_reply_count} of {sample_count + no_reply_count} samples hold no completion and are left out."
    later_turn_note = (
        f"In {later_turn_count} of {sample_count} samples the model spoke before the last user message. There, the "
        "completion is only what follows that message."
    )
    table_notes = [no_completion_note if no_reply_count else "", later_turn_note if later_turn_count else ""]
    return samples.table("Inspect", path, tokens, keys=samples.values("key"), notes=table_notes)


def _inspect_completions(files: Sequence[Path], samples: Collected, unanswered_ids: list[Any]) -> Iterator[cells.Parts]:
    """Yield each sample's completion. Collect its other fields, or its id if it has no completion."""
    for model_name, sample in _read_samples(files):
        prompt, completion = cells.split_chat([_to_message(message) for message in sample.messages])
        if completion is None:
            unanswered_ids.append(sample.id)
            continue
        columns = {**cells.scalar_fields(sample.metadata), "answer": cells.answer_text(sample.target), "epoch": sample.epoch}
        input_chat = [] if isinstance(sample.input, str) else [_to_message(message) for message in sample.input]
        input_text = cells.prompt_text(input_chat or sample.input)
        # Ids alone are not unique: two tasks may use the same ids, and two models the same samples.
        sample_key = f"{model_name} {sample.id} {input_text}"
        input_turn_count = sum(message["role"] == "assistant" for message in input_chat)
        prompt_turn_count = sum(message["role"] == "assistant" for message in prompt)
        sample_fields = {"prompt": cells.prompt_text(prompt), "step": 0, "key": sample_key}
        sample_fields["is_later"] = prompt_turn_count > input_turn_count
        samples.append(sample_fields, {} if sample.error else _score_values(sample.scores or {}), columns)
        yield cells.completion_parts(completion)


def _read_samples(files: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Yield the samples of Inspect's logs, each with the name of the model."""
    try:
        from inspect_ai.log import EvalSample, read_eval_log, read_eval_log_samples  # pyright: ignore[reportMissingImports]
        from pydantic import ValidationError
    except ImportError as error:
        raise DataError(
            f"'{files[0]}' is a log of Inspect. To read it, install Inspect's package (pip install inspect_ai). Or write "
            "its samples as JSON lines, each with the prompt, the completion and its rewards as numbers."
        ) from error
    progress = ReadingProgress(files)
    for file in files:
        try:
            if file.suffix.lower() == ".eval":
                _check_archive(file)
                log_header = read_eval_log(str(file), header_only=True).eval
                sample_names = _sample_names(file, log_header.dataset.sample_ids or (), log_header.config.epochs or 1)
                if sample_names is None:
                    yield from zip(repeat(log_header.model), read_eval_log_samples(str(file), all_samples_required=False))
                for sample_fields in _read_members(file, sample_names or ()):
                    progress.add(file.stat().st_size / len(sample_names or ()))
                    yield log_header.model, EvalSample.model_validate(sample_fields)
            else:  # Inspect's reader would hold the whole log in memory
                with file.open("rb") as stream:
                    for sample_fields in member_entries(stream, "samples", progress.add):
                        if not isinstance(sample_fields, dict):
                            raise ValueError(f"a sample is of type {type(sample_fields).__name__} instead of an object")
                        sample_fields.pop("events", None)
                        yield "", EvalSample.model_validate(sample_fields)
        except DataError:
            raise
        except Exception as error:  # zip, JSON and Inspect each raise their own exceptions
            reason = first_line(error)
            if isinstance(error, ValidationError):
                first_error = error.errors()[0]
                fault_place = ".".join(map(str, first_error["loc"]))
                reason = f"a sample has the fault '{first_error['msg']}' in {fault_place}"
            raise DataError(f"'{file}' cannot be read as a log of Inspect; it is damaged or cut off ({reason}).") from error


def _check_archive(file: Path) -> None:
    """Refuse a file that is not a zip archive written by Inspect."""
    if not zipfile.is_zipfile(file):
        raise ValueError("the file is not a complete zip archive")
    with zipfile.ZipFile(file) as archive:
        member_names = archive.namelist()
    if not {"header.json", "_journal/start.json"} & {*member_names}:
        raise DataError(
            f"'{file}' is a zip archive without Inspect's header.json; it holds {', '.join(member_names[:3]) or 'nothing'}. Give "
            "a log that inspect eval wrote."
        )


def _sample_names(file: Path, sample_ids: Sequence[Any], epochs: int) -> list[str] | None:
    """Return the names of an archive's samples, ordered by their ids. Return None if Inspect named them differently."""
    # Inspect's own reader lists the archive again for each sample, so its time grows with the square of the sample count.
    with zipfile.ZipFile(file) as archive:
        archived_names = {name for name in archive.namelist() if name.startswith("samples/")}
    sample_names = [f"samples/{sample_id}_epoch_{epoch}.json" for sample_id in sample_ids for epoch in range(1, epochs + 1)]
    return [name for name in sample_names if name in archived_names] if archived_names <= {*sample_names} else None


def _read_members(file: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in some files of an archive, without their field `events`."""
    with zipfile.ZipFile(file) as archive:
        for name in names:
            yield {key: field for key, field in json.loads(archive.read(name)).items() if key != "events"}


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
    """Return the values of all Inspect scorers by name. Grades such as "C" (correct) become numbers."""
    reward_values: dict[str, Any] = {}
    for name, score in scores.items():
        score_entries = score.value if isinstance(score.value, Mapping) else {"": score.value}
        for entry_name, value in score_entries.items():
            reward_values[f"{name}.{entry_name}" if entry_name else name] = score_number(value)
    return reward_values


def read_lm_eval(path: Path, files: Sequence[Path], tokenizer: str | Path | None) -> RolloutTable:
    """Read lm-evaluation-harness's samples. Each response to a document is a completion, each filter's metric a reward."""
    responses = Collected()
    tokens = tokenize(_lm_eval_responses(files, responses), tokenizer)
    reward_columns = responses.rewards.columns
    filter_names = {name for _, name in reward_columns}
    responses.rewards.columns = {
        metric if len(filter_names) == 1 else f"{metric},{name}": column for (metric, name), column in reward_columns.items()
    }
    unscored_count = sum(responses.values("is_unscored"))
    note = f"{unscored_count} responses have no reward, because lm-eval scores all responses to a document with one number."
    return responses.table("lm-eval", path, tokens, keys=responses.values("key"), notes=[note] if unscored_count else [])


def _lm_eval_responses(files: Sequence[Path], responses: Collected) -> Iterator[cells.Parts]:
    """Yield each response once, although filters repeat it, and add its fields and all filters' rewards to `responses`."""
    # A document seen before shows a second lm-eval run if its responses differ or its filter (answer extractor) repeats.
    no_responses: tuple[range, int, list[str]] = (range(0), 0, [])
    responses_of_document: dict[str, tuple[range, int, list[str]]] = {}
    for record in parse_records(files, _parse_lm_eval):
        response_texts = record["texts"]
        texts_hash = hash(tuple(response_texts))  # keep a hash of the texts, which may not fit into memory
        seen_rows, seen_texts_hash, seen_filters = responses_of_document.get(record["key"], no_responses)
        if seen_rows and texts_hash == seen_texts_hash and record["filter"] not in seen_filters:
            seen_filters.append(record["filter"])
            for row in seen_rows:
                responses.rewards.update(row, record["rewards"])
            continue
        row_count = len(responses.fields)
        new_row_numbers = range(row_count, row_count + len(response_texts))
        responses_of_document[record["key"]] = (new_row_numbers, texts_hash, [record["filter"]])
        response_fields = {"prompt": record["prompt"], "step": 0, "key": record["key"]}
        response_fields["is_unscored"] = len(response_texts) > 1
        for text in response_texts:
            responses.append(response_fields, record["rewards"], record["columns"])
            yield [(cells.content_text(text), True)]


def _parse_lm_eval(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt, the responses and the metrics in a line of lm-evaluation-harness."""
    call_arguments = cells.object_field(record, "arguments").get("gen_args_0")
    prompt_field = call_arguments.get("arg_0") if isinstance(call_arguments, Mapping) else None
    for name in sorted(LM_EVAL_REQUIRED):
        if name not in record:
            raise cells.missing_field(name, record)
    response_lists = cells.list_field(record, "resps", (list, str), "responses")
    text_lists = [response if isinstance(response, list) else [response] for response in response_lists]
    responses = [text for texts in text_lists for text in texts]
    if prompt_field is None or not all(isinstance(text, str) for text in responses):
        raise cells.FieldError(
            "the sample holds no text that a model wrote, as in a multiple-choice task; give samples of a generation task"
        )
    metric_names = cells.list_field(record, "metrics", str, "names")
    filter_name = str(record.get("filter"))
    metric_values = {(name, filter_name): record.get(name) for name in metric_names}
    prompt = cells.prompt_text(cells.parse_literal(prompt_field))
    return {
        "prompt": prompt,
        "key": f"{record['doc_id']} {record.get('doc_hash', '')} {record.get('prompt_hash') or prompt}",
        "texts": responses,
        "filter": filter_name,
        "rewards": metric_values if len(responses) == 1 else dict.fromkeys(metric_values),
        "columns": {
            **cells.scalar_fields(cells.object_field(record, "doc")),
            "answer": cells.answer_text(record.get("target")),
        },
    }
