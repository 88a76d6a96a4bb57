"""The folder of a run: its readable metrics are kept."""

import json

import pytest

from spanwise.rollouts.folder import metrics_until

LINES = [json.dumps({"step": step, "loss": 0.5}) for step in range(1, 41)]


@pytest.mark.parametrize("damage", [b'{"step": 3, "lo', b"\xff\xfe", b"3", b'{"loss": 0.5}', b"null"])
def test_a_damaged_line_costs_itself_and_is_counted(damage, tmp_path):
    text = [line.encode() for line in LINES]
    text[2] = text[10] = damage
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(text) + b"\n")
    with pytest.warns(UserWarning, match="^2 of 40 lines"):
        read = metrics_until(tmp_path, 40)
    assert [line["step"] for line in read] == [step for step in range(1, 41) if step not in (3, 11)]


def test_what_comes_after_a_step_is_neither_read_nor_counted(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("\n".join([*LINES[:4], '{"step": 5, "lo']))
    assert [line["step"] for line in metrics_until(tmp_path, 3)] == [1, 2, 3]
    assert metrics_until(tmp_path / "nowhere", 3) == []
