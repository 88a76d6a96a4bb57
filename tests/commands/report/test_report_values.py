"""What a run folder and an export keep of a critic, on their pages: values, segments by the options of the run, what it knows."""

import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trl_small
from report_pages import data_of
from rollout_files import quiet
from spanwise.commands.credit.credit import credit
from spanwise.commands.report.report import report_folder

METRICS = {
    "step": 1, "loss": 0.5, "critic/explained_variance": -0.5, "critic/error_mean": 0.25, "critic/error_within": 0.125,
}  # fmt: skip


def run(path, options, **columns):
    """A run of SAE on solutions: two completions of five tokens, the fourth of the first a tool's."""
    tokenizer = trl_small.tokenizer()
    tokenizer.save_pretrained(path / "model")
    ids = tokenizer.convert_tokens_to_ids(["<answer>", "4", "</answer>", "a", "b"])
    trainable = [[True, True, True, False, True], [True] * 5]
    held = {
        "step": [1] * 2, "group": [0] * 2, "prompt": ["2+2="] * 2, "completion_ids": [ids] * 2, "trainable": trainable,
        "text": ["<answer>4</answer>b", "<answer>4</answer>ab"], "fault": [0, 0], "start/solution": [0, 0], "end/solution": [5, 5],
        "reward/correct": [1.0, 1.0], "status/correct": ["ok"] * 2,
        "values": [[0.5, 0.25, 0.75, None, 1.0], [0.5] * 5],
        "logprobs": [[math.log(p) if p else None for p in row] for row in ([0.1, 0.9, 0.1, None, 0.9], [0.9, 0.3, 0.9, 0.9, 0.1])],
        "credit/sae/solution": [0.5, 0.25], "credit/sae/stop": [0.0, 0.0],
        "advantages/sae": [[0.1 * flag for flag in row] for row in trainable], **columns,
    }  # fmt: skip
    (path / "rollouts").mkdir(parents=True)
    pq.write_table(pa.table(held), path / "rollouts" / "step_000001.parquet")
    objective = "{reward: correct, pays: solution, if_missing: 0.0}"
    recipe = f"method: sae\nlayout: {{solution: [answer]}}\nobjectives: [{objective}]\noptions: {json.dumps(options)}\n"
    (path / "recipe.yaml").write_text(recipe + "prompts: 1\ngroup_size: 2\n")
    (path / "metrics.jsonl").write_text(json.dumps(METRICS) + "\n")
    return path


@pytest.mark.parametrize(
    ("options", "opens", "words"),
    [
        ({}, [[2], [4]], "below 0.2 opens a segment"),  # the first token has none before it
        ({"threshold": 0.4}, [[2], [1, 4]], "below 0.4 opens a segment"),
        ({"boundary": "end"}, [[1, 4], []], "below 0.2 has closed a segment"),  # the tool's token is as if deleted
        ({"boundary": "end", "threshold": 0.4, "lam": 0.9}, [[1, 4], [2]], "below 0.4 has closed a segment"),
    ],
)
def test_the_segments_of_a_run_are_those_of_its_recipe(options, opens, words, tmp_path):
    data = data_of(report_folder(run(tmp_path, options)).read_text())
    assert data["opens"] == [{"": tokens} for tokens in opens]
    assert words in data["segments"]
    assert data["methods"][0] == "sae"
    (column,) = data["values"]
    assert column["name"] == ""
    assert [column["words"][ord(code) - 32] for code in column["codes"][0]] == [0.5, 0.25, 0.75, None, 1]


def test_the_page_of_a_run_says_what_its_critic_knows(tmp_path):
    html = report_folder(run(tmp_path, {})).read_text()
    assert html.count("The critic knows nothing: its explained variance is -0.50 at the end") == 2
    assert '<section id="critic">' in html


def test_values_by_objective_have_a_line_each(tmp_path):
    named = {"values/correct": [[0.5] * 3 + [None, 0.25], [0.5] * 5], "values/short": [[None] * 4 + [0.25], [None] * 5]}
    folder = run(tmp_path, {"boundary": "end"}, **named)
    file = folder / "rollouts" / "step_000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["values"]), file)
    data = data_of(report_folder(folder).read_text())
    assert [column["name"] for column in data["values"]] == ["correct", "short"]
    assert data["opens"] == [{"correct": [1, 4], "short": []}, {"correct": [], "short": []}]  # each in its own tokens


def test_a_run_without_values_is_shown_as_before(tmp_path):
    folder = run(tmp_path, {})
    file = folder / "rollouts" / "step_000001.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["values", "logprobs"]), file)
    data = data_of(report_folder(folder).read_text())
    assert (data["values"], data["opens"], data["probabilities"]) == ([], [{}, {}], None)


def test_an_export_shows_the_segments_of_the_method_it_applied(tmp_path):
    folder = run(tmp_path / "run", {"boundary": "end"})
    options = {"methods": ["sae", "grpo"], "output": tmp_path / "out", "console": quiet()}
    credit(folder, **options)
    first = (tmp_path / "out" / "report.html").read_text()
    data = data_of(first)
    assert data["opens"] == [{"": [1, 4]}, {"": []}]
    assert "has closed a segment" in data["segments"]
    assert report_folder(tmp_path / "out").read_text() == first  # from its files alone
    credit(folder, **{**options, "methods": ["gae"], "output": tmp_path / "gae"})
    data = data_of((tmp_path / "gae" / "report.html").read_text())
    assert (data["segments"], len(data["values"])) == ("", 1)
