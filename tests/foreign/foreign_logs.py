"""Logs that Inspect and lm-evaluation-harness write, against what their own readers say: `make test-foreign`."""

import os

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import json

import numpy as np
import pytest

from spanwise.errors import DataError
from spanwise.rollouts import read_rollouts

pytestmark = pytest.mark.filterwarnings("default")  # their packages warn of themselves


def text_of(table, n):
    return table.vocabulary.join(table.tokens.slice(n, n + 1).astype(np.int64))[0].decode()


@pytest.fixture(params=["eval", "json"])
def log(request, tmp_path):
    """Two questions asked three times: a tool call, its result, an answer; one scorer by letters, one with two numbers."""
    import inspect_ai
    from inspect_ai import dataset, model, scorer, solver, tool

    @tool.tool
    def add():
        async def execute(a: int, b: int):
            """Add two numbers.

            Args:
                a: one
                b: the other
            """
            return a + b

        return execute

    @scorer.scorer(metrics={"style": [scorer.mean()], "short": [scorer.mean()]})
    def parts():
        async def score(state, target):
            return scorer.Score(value={"style": 0.5, "short": len(state.output.completion)})

        return score

    @scorer.scorer(metrics=[])
    def several():
        async def score(state, target):
            return scorer.Score(value=[0.5, 1.0])

        return score

    outputs = []
    for question in range(2):
        for epoch in range(3):
            outputs.append(model.ModelOutput.for_tool_call("mockllm/model", "add", {"a": question, "b": 2}))
            outputs.append(model.ModelOutput.from_content("mockllm/model", f"{question + 2 + (epoch == 2)} é"))
    for output in outputs:
        output.usage = model.ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    samples = [
        dataset.Sample(id=f"q{n}", input=f"What is {n}+2? é", target=str(n + 2), metadata={"level": n}) for n in range(2)
    ]
    task = inspect_ai.Task(
        dataset=samples,
        solver=[solver.system_message("Use the tool."), solver.use_tools(add()), solver.generate()],
        scorer=[scorer.includes(), parts(), several()],
        epochs=3,
    )
    options = {
        "display": "none",
        "max_samples": 1,
        "max_connections": 1,
        "log_dir": str(tmp_path),
        "log_format": request.param,
    }
    (result,) = inspect_ai.eval(task, model=model.get_model("mockllm/model", custom_outputs=outputs), **options)
    assert result.status == "success", result.error
    return result.location


def test_inspects_log_is_what_its_own_reader_says(log):
    from inspect_ai.log import read_eval_log

    table, samples = read_rollouts(log), sorted(read_eval_log(log).samples, key=lambda sample: (sample.id, sample.epoch))
    assert (table.source, len(table)) == ("Inspect", len(samples) == 6 and 6)
    assert table.group_n.tolist() == [0, 0, 0, 1, 1, 1]
    for n, sample in enumerate(samples):
        assert table.prompts[n] == f"[system] Use the tool.\n[user] {sample.input}"
        _, _, calls, result, answer = sample.messages
        call = f"{calls.text}\nadd({json.dumps(calls.tool_calls[0].arguments)})"
        assert text_of(table, n) == f"{call}{result.text}{answer.text}"
        assert table.columns["answer"][n] == sample.target
        assert table.columns["level"][n] == sample.metadata["level"]
        letter = sample.scores["includes"].value
        assert table.rewards["includes"].value_n[n].item() == {"C": 1.0, "I": 0.0}[letter]
        for key, value in sample.scores["parts"].value.items():
            assert table.rewards[f"parts.{key}"].value_n[n].item() == value
    assert table.rewards.keys() == {"includes", "parts.style", "parts.short"}  # a list is no number
    sampled = table.tokens.with_values(table.trainable).slice(0, 1)
    assert (~sampled).sum() == 1  # what the tool said


def test_a_damaged_log_is_one_sentence(log, tmp_path):
    from pathlib import Path

    whole = Path(log).read_bytes()
    cut = tmp_path / f"cut{Path(log).suffix}"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="cannot be read as a log of Inspect; it is damaged or cut off") as error:
        read_rollouts(cut)
    assert "\n" not in str(error.value)


@pytest.fixture
def harness(tmp_path, monkeypatch):
    """Return a function that lets lm-evaluation-harness ask its own dummy model, and gives the file of samples that it wrote."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    class Fixed(LM):
        def generate_until(self, requests, **_):
            return ["the answer is 4" for _ in requests]

        def loglikelihood(self, requests, **_):
            return [(-1.0, False) for _ in requests]

        loglikelihood_rolling = loglikelihood

    rows = [{"question": "2+2=", "answer": "4", "level": 1}, {"question": "3+3= é", "answer": "6", "level": 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def write(**changes):
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
        manager = TaskManager(include_defaults=False)
        result = lm_eval.simple_evaluate(
            model=Fixed(), tasks=[config], log_samples=True, bootstrap_iters=0, task_manager=manager
        )
        tracker = EvaluationTracker(output_path=str(tmp_path / "out"))
        tracker.general_config_tracker.model_name = tracker.general_config_tracker.model_name_sanitized = "fixed"
        tracker.save_results_aggregated(result, result["samples"])
        tracker.save_results_samples(task_name="sums", samples=result["samples"]["sums"])
        (file,) = (tmp_path / "out").rglob("samples_*.jsonl")
        return file

    return write


def test_samples_of_lm_evaluation_harness(harness):
    table = read_rollouts(harness())
    assert (table.source, len(table), table.prompts) == ("lm-eval", 2, ["2+2=", "3+3= é"])
    assert [text_of(table, n) for n in range(2)] == ["the answer is 4"] * 2
    rewards = {name: reward.value_n.tolist() for name, reward in table.rewards.items()}
    assert rewards == {"exact_match,strict": [0.0, 0.0], "exact_match,flexible": [1.0, 0.0]}
    assert (table.columns["answer"], table.columns["level"]) == (["4", "6"], [1, 2])


def test_one_number_for_several_responses_is_nobodys_reward(harness):
    table = read_rollouts(harness(repeats=3))
    assert table.group_n.tolist() == [0, 0, 0, 1, 1, 1]
    assert not table.rewards
    assert "6 responses share one number" in table.note


def test_given_choices_hold_no_completion(harness):
    choices = {"doc_to_choice": ["4", "6"], "doc_to_target": 0, "metric_list": [{"metric": "acc"}]}
    file = harness(output_type="multiple_choice", generation_kwargs=None, filter_list=None, **choices)
    with pytest.raises(DataError, match="holds no text that a model wrote"):
        read_rollouts(file)
