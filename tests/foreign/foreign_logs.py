"""Logs that Inspect and lm-evaluation-harness write, against what their own readers say: `make test-foreign`."""

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import io
import itertools
import json
import math
import random
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rollout_files import texts
from spanwise.errors import DataError
from spanwise.rollouts import read_rollouts

pytestmark = pytest.mark.filterwarnings("default")  # their packages warn of themselves


def samples_in(log):
    """The samples of a log as Inspect reads them: those of a question together in `.eval`, in the file's own order in `.json`."""
    from inspect_ai.log import read_eval_log

    samples = read_eval_log(log).samples
    return samples if log.endswith(".json") else sorted(samples, key=lambda sample: (sample.id, sample.epoch))


def sampled_text(table, n):
    sampled = np.array(table.tokens.with_values(table.trainable).slice(n, n + 1))
    return table.vocabulary.join(table.tokens.slice(n, n + 1)[sampled].astype(np.int64))[0].decode()


def spoken(draw):
    words = ["so", "4", "é", "日本", "\u2028", "🙂", "<b>", '"q"', "{}", "a,b"]
    return " ".join(draw.choices(words, k=draw.randint(1, 6)))


@pytest.mark.parametrize("seed", range(10))
def test_any_messages_of_the_openai_package_are_read(seed, tmp_path):
    """Turns and calls written by the package's own types, with tools' results, images and missing rewards."""
    from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall

    draw = random.Random(seed)

    def question():
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        parts = [{"type": "text", "text": spoken(draw)}, image, {"type": "text", "text": spoken(draw)}]
        return {"role": "user", "content": draw.choice([spoken(draw), parts])}

    def reply(*, calls):
        function = {"name": "find", "arguments": json.dumps({"word": spoken(draw)}, ensure_ascii=draw.random() < 0.5)}
        call = ChatCompletionMessageFunctionToolCall(id="c", type="function", function=function)
        content = None if calls and draw.random() < 0.5 else spoken(draw)
        message = ChatCompletionMessage(role="assistant", content=content, tool_calls=[call] if calls else None)
        return message.model_dump(exclude_none=draw.random() < 0.5)

    def talk():
        before, after = [{"role": "system", "content": spoken(draw)}], []
        for _ in range(draw.randint(0, 2)):
            before += [question(), reply(calls=False)]
        for _ in range(draw.randint(0, 2)):
            after += [reply(calls=True), {"role": "tool", "content": spoken(draw)}]
        return [*before, question()], [*after, reply(calls=False)]

    def text(message):
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return "\n".join(part for part in (text, *(f"{call['name']}({call['arguments']})" for call in calls)) if part)

    talks = [talk() for _ in range(draw.randint(1, 4))]
    rewards = [draw.choice([0, 0.5, 1, None, True]) for _ in talks]
    lines = [{"messages": before + after, "passed": reward} for (before, after), reward in zip(talks, rewards, strict=True)]
    file = tmp_path / draw.choice(["log.jsonl", "log.json"])
    by_line = "".join(json.dumps(line) + "\n" for line in lines)
    file.write_text(by_line if file.suffix == ".jsonl" else json.dumps(lines, ensure_ascii=False))
    table = read_rollouts(file)
    assert len(table) == len(talks)
    for n, (before, after) in enumerate(talks):
        assert json.loads(table.prompts[n]) == [{"role": message["role"], "content": text(message)} for message in before]
        assert texts(table)[n] == "".join(map(text, after))
        assert sampled_text(table, n) == "".join(text(message) for message in after if message["role"] == "assistant")
    expected = [math.nan if reward is None else float(reward) for reward in rewards]
    found = table.rewards["passed"].value_n.tolist() if "passed" in table.rewards else [math.nan] * len(talks)
    assert found == pytest.approx(expected, nan_ok=True)


def varied_log(seed, folder, form=None):
    """A log that Inspect writes of a task drawn by a seed: turns, tools, images, reasoning, scores that are missing, any script."""
    import inspect_ai
    from inspect_ai import dataset, model, scorer, solver

    draw = random.Random(seed)

    text = partial(spoken, draw)

    def question():
        image = model.ContentImage(image="data:image/png;base64,iVBORw0KGgo=")
        contents = (text(), [model.ContentText(text=text()), image, model.ContentText(text=text())])
        return model.ChatMessageUser(content=draw.choice(contents))

    def inquiry():
        earlier = [m for _ in range(draw.randint(0, 2)) for m in (question(), model.ChatMessageAssistant(content=text()))]
        return draw.choice([text(), [model.ChatMessageSystem(content=text()), *earlier, question()]])

    @solver.solver
    def agent():
        async def solve(state, generate):
            for _ in range(draw.randint(0, 2)):
                call = model.ModelOutput.for_tool_call("m", "find", {"word": text()}, content=text()).message
                state.messages += [call, model.ChatMessageTool(content=text(), tool_call_id=call.tool_calls[0].id)]
            reasoning = [model.ContentReasoning(reasoning=text())] * draw.randint(0, 1)
            state.messages.append(model.ChatMessageAssistant(content=[*reasoning, model.ContentText(text=text())]))
            return state

        return solve

    def grader(name, value, metrics=()):
        @scorer.scorer(name=name, metrics=metrics or [])
        def new_scorer():
            async def score(state, target):
                grade = value(target.text)
                return None if grade is None else scorer.Score(value=grade)

            return score

        return new_scorer()

    metrics = {"style": [scorer.mean()], "short": [scorer.mean()]}
    scorers = [
        grader("grade", lambda _: draw.choice([0, 0.25, 1, True, math.nan, "C", "I", None])),
        grader("parts", lambda target: {"style": 0.5, "short": len(target)}, metrics),
        grader("several", lambda _: [0.5, 1.0]),
    ]
    count, form = draw.randint(1, 4), form or draw.choice(["eval", "json"])
    samples = [dataset.Sample(id=n, input=inquiry(), target=text(), metadata={"level": n}) for n in range(count)]
    task = inspect_ai.Task(dataset=samples, solver=agent(), scorer=scorers, epochs=draw.randint(1, 3))
    options = {"display": "none", "max_samples": 1, "log_dir": str(folder), "log_format": form}
    (result,) = inspect_ai.eval(task, model="mockllm/model", **options)
    assert result.status == "success", result.error
    return result.location


def spoken_of(message):
    parts = [] if isinstance(message.content, str) else message.content
    reasoning = "".join(part.reasoning for part in parts if part.type == "reasoning")
    made = getattr(message, "tool_calls", None) or []
    calls = [f"{call.function}({json.dumps(call.arguments, ensure_ascii=False)})" for call in made]
    return "\n".join(part for part in (reasoning, message.text, *calls) if part)


@pytest.mark.parametrize("seed", range(10))
def test_any_log_of_inspect_is_what_its_own_reader_says(seed, tmp_path):
    log = varied_log(seed, tmp_path)
    table, samples = read_rollouts(log), samples_in(log)
    assert (table.source, len(table)) == ("Inspect", len(samples))
    assert table.rewards.keys() - {"grade"} == {"parts.style", "parts.short"}  # a list is no number
    for n, sample in enumerate(samples):
        last = max(i for i, message in enumerate(sample.messages) if message.role == "user")
        before, after = sample.messages[: last + 1], sample.messages[last + 1 :]
        assert json.loads(table.prompts[n]) == [{"role": m.role, "content": spoken_of(m)} for m in before]
        assert texts(table)[n] == "".join(map(spoken_of, after))
        assert sampled_text(table, n) == "".join(spoken_of(message) for message in after if message.role == "assistant")
        assert (table.columns["answer"][n], table.columns["level"][n]) == (sample.target, sample.metadata["level"])
        for key, value in sample.scores["parts"].value.items():
            assert table.rewards[f"parts.{key}"].value_n[n].item() == value
        score = sample.scores.get("grade")
        value = {"C": 1.0, "I": 0.0}.get(score.value, score.value) if score is not None else math.nan
        found = table.rewards["grade"].value_n[n].item() if "grade" in table.rewards else math.nan
        assert found == pytest.approx(float(value), nan_ok=True)
    groups = [sample.id for sample in samples]
    assert [[a == b for b in groups] for a in groups] == (table.group_n[:, None] == table.group_n).tolist()


def test_logs_of_two_tasks_are_not_compared(tmp_path):
    """Both have a sample 0."""
    alone = [read_rollouts(varied_log(seed, tmp_path, form="eval")) for seed in (0, 1)]
    assert len(read_rollouts(tmp_path).group_n.unique()) == sum(len(table.group_n.unique()) for table in alone)


def test_logs_of_two_models_are_not_compared(tmp_path):
    """Both answer the same sample twice. A reply may lack the model's name, or have that of one of its versions."""
    import inspect_ai
    from inspect_ai import dataset, model, solver

    @solver.solver
    def answers():
        async def solve(state, generate):
            state.output = model.ModelOutput.from_content(("", "version-2")[state.epoch - 1], "4")
            state.messages.append(state.output.message)
            return state

        return solve

    for name in ("small", "large"):
        task = inspect_ai.Task(dataset=[dataset.Sample(id=1, input="2+2=")], solver=answers(), epochs=2)
        inspect_ai.eval(task, model=f"mockllm/{name}", display="none", log_dir=str(tmp_path))
    assert read_rollouts(tmp_path).group_n.tolist() == [0, 0, 1, 1]


INSPECT = '{"version": 2, "status": "success", "eval": {}, "samples": [%s]}'


def half_a_log(form, folder):
    content = Path(varied_log(0, folder, form)).read_bytes()
    return content[: len(content) // 2]


def zip_of_weights(_):
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        archive.writestr("weights.bin", "x")
    return packed.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.eval", partial(half_a_log, "eval"), "a log of Inspect"),
        ("a.json", partial(half_a_log, "json"), "a log of Inspect"),
        ("a.eval", zip_of_weights, "is a zip archive without Inspect's header.json; it holds weights.bin. Give a log"),
        ("a.eval", "no zip", "it is damaged or cut off (the file is not a complete zip archive)."),
        ("a.json", INSPECT % '{"id": 1, "epoch": "x"}', "it is damaged or cut off (a sample has the fault '"),
        ("a.json", INSPECT % "1", "it is damaged or cut off (a sample is of type int instead of an object)."),
        ("a.json", INSPECT[:50], "it is damaged or cut off ("),
        ("a.json", INSPECT % "", "holds no completions."),
    ],
)
def test_what_is_no_log_is_one_sentence(name, content, sentence, tmp_path):
    (tmp_path / name).write_bytes(content(tmp_path / "logs") if callable(content) else content.encode())
    with pytest.raises(DataError) as error:
        read_rollouts(tmp_path / name)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def write_log(file, talks):
    from inspect_ai import log

    samples = [
        log.EvalSample(id=n, epoch=1, input=question, target="4", messages=messages)
        for n, (question, messages) in enumerate(talks)
    ]
    spec = log.EvalSpec(
        created="2026-11-28T08:00:00+00:00", task="t", model="m", config=log.EvalConfig(),
        dataset=log.EvalDataset(sample_ids=[*range(len(samples))]),
    )  # fmt: skip
    log.write_eval_log(log.EvalLog(eval=spec, status="success", samples=samples), str(file))


def test_a_json_log_is_read_in_little_more_than_its_tokens(tmp_path):
    """Inspect's own reader would hold the whole log."""
    import tracemalloc

    from inspect_ai import model

    words, question = " ".join(f"word{n % 50}" for n in range(6000)), model.ChatMessageUser(content="q")
    replies = [model.ChatMessageAssistant(content=f"{n} {words}") for n in range(200)]
    write_log(tmp_path / "a.json", [("q", [question, reply]) for reply in replies])
    tracemalloc.start()
    try:
        table = read_rollouts(tmp_path / "a.json")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(table) == 200
    size = (tmp_path / "a.json").stat().st_size
    assert size > 8_000_000
    assert peak < 5 * len(table.tokens.values) + 12 * 2**20  # a piece of the text, twice, in up to four bytes a character


def test_turns_before_the_last_user_message_are_told_from_examples_of_the_input(tmp_path):
    """An agent that is urged on by a user message: only its last turn is the completion, and a note says so."""
    from inspect_ai import model

    user, said = model.ChatMessageUser, model.ChatMessageAssistant
    example = [user(content="1+1"), said(content="2"), user(content="2+2")]
    talks = [
        (example, [*example, said(content="4")]),
        ("2+2", [user(content="2+2"), said(content="Hm."), *example[2:], said(content="4")]),
    ]
    write_log(tmp_path / "a.json", talks)
    table = read_rollouts(tmp_path / "a.json")
    assert texts(table) == ["4", "4"]
    assert "In 1 of 2 samples the model spoke before the last user message" in table.note


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """Return a function that lets lm-evaluation-harness ask its own dummy model, and gives the file of samples that it wrote."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    class Fixed(LM):
        def generate_until(self, requests, **_):
            return [next(replies) for _ in requests]

        def loglikelihood(self, requests, **_):
            return [(-1.0, False) for _ in requests]

        loglikelihood_rolling = loglikelihood

    sums = [{"question": "2+2=", "answer": "4", "level": 1}, {"question": "3+3= é", "answer": "6", "level": 2}]
    replies = itertools.repeat("the answer is 4")

    def write(rows=sums, spoken=None, **changes):
        nonlocal replies
        replies = replies if spoken is None else iter(spoken)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        number = {"function": "regex", "regex_pattern": r"(\d+)"}
        config = {
            "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
            "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
            "generation_kwargs": {"until": ["\n"]},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            "filter_list": [{"name": "strict", "filter": [{"function": "take_first"}]},
                            {"name": "flexible", "filter": [number, {"function": "take_first"}]}],
            **changes,
        }  # fmt: skip
        options = {"log_samples": True, "bootstrap_iters": 0, "task_manager": TaskManager(include_defaults=False)}
        result = lm_eval.simple_evaluate(model=Fixed(), tasks=[config], **options)
        tracker = EvaluationTracker(output_path=str(tmp_path / "out"))
        tracker.general_config_tracker.model_name = tracker.general_config_tracker.model_name_sanitized = "fixed"
        tracker.save_results_aggregated(result, result["samples"])
        tracker.save_results_samples(task_name="sums", samples=result["samples"]["sums"])
        (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
        return file

    return write


@pytest.mark.parametrize("seed", range(10))
def test_any_samples_of_lm_evaluation_harness_are_what_the_file_says(seed, harness):
    """Documents, replies and targets in any script; with two filters, or with several replies to a document."""
    draw = random.Random(seed)
    count, repeats = draw.randint(1, 5), draw.choice([1, 1, 3])
    rows = [{"question": f"{n} {spoken(draw)}", "answer": draw.choice(["4", "é"]), "level": n} for n in range(count)]
    replies = [draw.choice(["4", "é", spoken(draw)]) for _ in range(len(rows) * repeats)]
    file = harness(rows, replies, **({} if repeats == 1 else {"repeats": repeats}))
    lines = [json.loads(line) for line in file.read_text().split("\n") if line]  # other line breaks stand in texts
    first = {line["doc_id"]: line for line in lines}  # a document stands once for each filter
    table = read_rollouts(file)
    expected = [(n, reply) for n in first for reply in first[n]["resps"][0]]
    assert sorted(reply for _, reply in expected) == sorted(replies)
    assert texts(table) == [reply for _, reply in expected]
    assert table.prompts == [first[n]["arguments"]["gen_args_0"]["arg_0"] for n, _ in expected]
    assert table.columns["answer"] == [first[n]["target"] for n, _ in expected]
    assert table.columns["level"] == [rows[n]["level"] for n, _ in expected]
    assert (table.source, table.group_n.tolist()) == ("lm-eval", [list(first).index(n) for n, _ in expected])
    if repeats == 3:  # one number for several responses is nobody's reward
        assert not table.rewards
        assert f"{len(expected)} responses" in table.note
        return
    for line in lines:
        reward = table.rewards[f"exact_match,{line['filter']}"]
        assert reward.value_n[list(first).index(line["doc_id"])].item() == line["exact_match"]


def test_given_choices_hold_no_completion(harness):
    choices = {"doc_to_choice": ["4", "6"], "doc_to_target": 0, "metric_list": [{"metric": "acc"}]}
    file = harness(output_type="multiple_choice", generation_kwargs=None, filter_list=None, **choices)
    with pytest.raises(DataError, match="holds no text that a model wrote"):
        read_rollouts(file)


@pytest.mark.parametrize("seed", range(10))
def test_any_results_of_verifiers_before_1_0_are_what_its_own_reader_says(seed, tmp_path):
    """Conversations, tools, several rewards, rollouts that failed."""
    from verifiers.utils.save_utils import load_outputs, save_outputs, states_to_outputs

    draw = random.Random(seed)

    def state(example):
        def said(role, **more):
            return {"role": role, "content": spoken(draw), **more}

        call = {"id": "c", "name": "find", "arguments": json.dumps({"word": spoken(draw)})}
        tools = [said("assistant", tool_calls=[call]), said("tool", tool_call_id="c")]
        return {
            "example_id": example, "prompt": [{"role": "user", "content": f"{example} é"}], "answer": "4",
            "completion": [*tools * draw.randint(0, 2), said("assistant")], "info": {"level": example},
            "reward": draw.choice([0.0, 0.5, 1.0]), "metrics": {"exact": draw.choice([0.0, 1.0])}, "timing": {"total": 1.0},
            "error": ValueError("no answer") if draw.random() < 0.3 else None,
        }  # fmt: skip

    states = [state(example) for example in range(draw.randint(1, 3)) for _ in range(2)]
    save_outputs(states_to_outputs(states), tmp_path)
    table, outputs = read_rollouts(tmp_path), load_outputs(tmp_path)
    assert len(table) == len(outputs)
    for n, output in enumerate(outputs):
        parts = [[message["content"], *(message.get("tool_calls") or [])] for message in output["completion"]]
        assert texts(table)[n] == "".join("\n".join(part) for part in parts)
        assert (table.columns["answer"][n], table.columns["level"][n]) == (output["answer"], output["info"]["level"])
        for name, value in (("reward", output["reward"]), ("exact", output["metrics"]["exact"])):
            found = table.rewards[name].value_n[n].item() if name in table.rewards else math.nan
            assert found == pytest.approx(math.nan if output["error"] else value, nan_ok=True)
    examples = [output["example_id"] for output in outputs]
    assert [[a == b for b in examples] for a in examples] == (table.group_n[:, None] == table.group_n).tolist()
