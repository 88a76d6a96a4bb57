"""Dumps of verl: which rows are one group."""

from rollout_files import said, verl_file, verl_rows, write_lines
from spanwise.rollouts import read_rollouts


def test_keys_of_verl_v1_tell_equal_prompts_apart(tmp_path):
    rows = [{**row, "uid": f"sample-{n // 2}_{n % 2}_0"} for n, row in enumerate(verl_rows()[:4])]
    assert read_rollouts(write_lines(tmp_path / "1.jsonl", rows)).group_n.tolist() == [0, 0, 1, 1]


def test_uids_of_verl_that_rows_share_are_its_groups(tmp_path):
    outputs = [said("4", "0.5")] * 4
    shared = read_rollouts(verl_file(tmp_path / "1.jsonl", outputs, uid=["p", "q", "p", "q"]))
    assert shared.group_n.tolist() == [0, 1, 0, 1]
    own = read_rollouts(verl_file(tmp_path / "2.jsonl", outputs, uid=["p", "q", "r", "s"]))
    assert own.group_n.tolist() == [0] * 4  # a name for each row says nothing of prompts
    some = read_rollouts(verl_file(tmp_path / "3.jsonl", outputs, uid=["p", None, "p", "q"]))
    assert some.group_n.tolist() == [0] * 4
