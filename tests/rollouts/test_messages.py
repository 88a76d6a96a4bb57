"""Messages: calls of tools and reasoning, in completions and in prompts."""

import pytest

from rollout_files import texts, write_lines
from spanwise.rollouts import read_rollouts


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "function_call": {"name": "sum", "arguments": "{}"}}, "sum({})"),
        ({"content": "4", "reasoning": "Add."}, "Add.\n4"),
        ({"content": "4", "reasoning": "Add.", "reasoning_content": "Add."}, "Add.\n4"),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": None, "tool_calls": [{"name": "sum", "arguments": {"of": [2]}}]}, 'sum({"of": [2]})'),
        ({"content": None, "tool_calls": [], "function_call": {"name": "sum", "arguments": "{}"}}, "sum({})"),
    ],
)
def test_what_servers_call_otherwise_is_part_of_a_completion(message, text, tmp_path):
    """OpenAI's calls before tools, verifiers' calls, the reasoning of vLLM and OpenRouter, a refusal, which has no content."""
    row = {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", **message}]}
    assert texts(read_rollouts(write_lines(tmp_path / "log.jsonl", [row]))) == [text]


def test_an_answer_in_json_that_names_a_role_is_no_message(tmp_path):
    answer = '{"name": "Ada", "role": "engineer"}'
    assert texts(read_rollouts(write_lines(tmp_path / "results.jsonl", [{"prompt": "Who?", "completion": answer}]))) == [
        answer
    ]


def test_prompts_that_differ_in_a_call_are_two_groups(tmp_path):
    def prompt(name):
        call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": {"a": 1}}}]}
        return [{"role": "user", "content": "go"}, call]

    rows = [{"prompt": prompt(name), "completion": "x"} for name in ("left", "right", "left")]
    table = read_rollouts(write_lines(tmp_path / "results.jsonl", rows))
    assert table.prompts[0] == '[user] go\n[assistant] left({"a": 1})'
    assert table.group_n.tolist() == [0, 1, 0]
