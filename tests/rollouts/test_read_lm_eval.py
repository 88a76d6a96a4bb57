"""Samples of lm-evaluation-harness: a response with the rewards of all its filters, and the responses of several runs."""

from rollout_files import texts, write_lines
from spanwise.rollouts import read_rollouts


def sample(response, score, *, filter="strict", doc=0, shots=0):
    return {
        "doc_id": doc, "doc": {}, "doc_hash": "h", "prompt_hash": f"{shots} shots", "target": "4",
        "arguments": {"gen_args_0": {"arg_0": "2+2="}},
        "resps": [[response]], "filter": filter, "metrics": ["exact_match"], "exact_match": score,
    }  # fmt: skip


def test_a_second_run_leaves_the_rewards_of_the_first_as_they_are(tmp_path):
    """lm-eval names a file by its time, so a second run of a task writes beside the first; an equal response is none again."""
    write_lines(tmp_path / "samples_sums_1.jsonl", [sample("4", 1.0), sample("x", 0.0, doc=1)])
    write_lines(tmp_path / "samples_sums_2.jsonl", [sample("9", 0.0), sample("x", 0.0, doc=1)])
    table = read_rollouts(tmp_path)
    assert texts(table) == ["4", "x", "9", "x"]
    assert table.rewards["exact_match"].value_n.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert table.group_n.tolist() == [0, 1, 0, 1]
    write_lines(tmp_path / "samples_sums_2.jsonl", [sample("9", 0.0, shots=5)])
    assert read_rollouts(tmp_path).group_n.tolist() == [0, 1, 2]  # another prompt is not compared


def test_the_target_is_the_gold_answer_whatever_the_document_calls_answer(tmp_path):
    """A document of gsm8k holds a derivation as its answer, one of mmlu an index."""
    rows = [{**sample("4", 1.0, doc=n), "doc": {"answer": answer}} for n, answer in enumerate(("2+2=4 #### 4", 2, None))]
    assert read_rollouts(write_lines(tmp_path / "samples_sums.jsonl", rows)).columns["answer"] == ["4"] * 3


def test_tasks_without_hashes_are_told_apart_by_their_prompts(tmp_path):
    """Every task has a document 0, and a file need not hold hashes."""
    for task, prompt in (("sums", "2+2="), ("capitals", "France?")):
        changes = {"prompt_hash": None, "doc_hash": None, "arguments": {"gen_args_0": {"arg_0": prompt}}}
        write_lines(tmp_path / f"samples_{task}.jsonl", [sample(response, 0.0) | changes for response in "ab"])
    assert read_rollouts(tmp_path).group_n.tolist() == [0, 0, 1, 1]


def test_two_filters_of_a_response_are_two_rewards_of_one_completion(tmp_path):
    rows = [sample("4", 1.0), sample("5", 0.0, doc=1)]
    rows += [sample("4", 0.0, filter="flexible"), sample("5", 1.0, filter="flexible", doc=1)]
    table = read_rollouts(write_lines(tmp_path / "samples_sums.jsonl", rows))
    assert texts(table) == ["4", "5"]
    assert table.rewards["exact_match,strict"].value_n.tolist() == [1.0, 0.0]
    assert table.rewards["exact_match,flexible"].value_n.tolist() == [0.0, 1.0]
