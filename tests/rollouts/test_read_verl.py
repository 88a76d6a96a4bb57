"""Dumps of verl: which rows are one group."""

import pytest

from rollout_files import tagged, verl_file
from spanwise.rollouts import read_rollouts


@pytest.mark.parametrize(
    ("uids", "groups"),
    [
        (["sample-0_0_0", "sample-0_1_0", "sample-1_0_0", "sample-1_1_0"], [0, 0, 1, 1]),  # the keys of V1
        (["p", "q", "p", "q"], [0, 1, 0, 1]),
        (["p", "q", "r", "s"], [0] * 4),  # a name for each row says nothing of prompts
        (["p", None, "p", "q"], [0] * 4),
        ([7, 8, 7, 8], [0, 1, 0, 1]),  # numbers, as other tools write them
    ],
)
def test_uids_that_rows_share_are_the_groups_of_equal_prompts(uids, groups, tmp_path):
    assert read_rollouts(verl_file(tmp_path / "1.jsonl", [tagged("4", "0.5")] * 4, uid=uids)).group_n.tolist() == groups


def test_a_row_without_a_uid_is_told(tmp_path):
    for uids, told in ((["p", None, "p", "q"], True), ([7, 8, 7, 8], False)):
        table = read_rollouts(verl_file(tmp_path / f"{told}.jsonl", [tagged("4", "0.5")] * 4, uid=uids))
        assert ("uid" in table.note) == told
