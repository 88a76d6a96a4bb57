"""`spanwise credit`, `why` and `train` on tables that anybody made."""

import json

import numpy as np
import pytest

from plain_files import KINDS, save
from rollout_files import quiet, said, trl_file
from spanwise.cli import app
from spanwise.commands.credit.credit import credit, credit_rollouts
from spanwise.commands.why.why import why

SPOKEN = [said("4", "0.9"), said("4", "0.6"), said("5", "0.8"), said("5", "0.1")]
ROWS = [{"question": "2+2=", "output": text, "gold": "4", "length": n} for n, text in enumerate(SPOKEN)]
GROUPED = [{"question": "2+2=", "responses": SPOKEN, "gold": "4", "length": [0, 1, 2, 3]}]
LAYOUT = {"layout": {"solution": ["answer"], "confidence": ["confidence"]}}


@pytest.mark.parametrize("rows", [ROWS, GROUPED], ids=["one in a row", "a list"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_credit_from_every_kind_of_file(kind, rows, tmp_path):
    """Two of four are right; of the right ones the surer report earns more than their mean, of the wrong ones the less sure."""
    result = credit_rollouts(save(tmp_path, rows, kind), overrides=LAYOUT, methods=["bae"])
    found = {name: result.applied[0].credit.block_nk[:, k].tolist() for k, name in enumerate(result.marked.names)}
    assert found["solution"] == pytest.approx([0.5, 0.5, -0.5, -0.5])
    brier = [-0.01, -0.16, -0.64, -0.01]  # 0 - (q - o)^2
    means = [-0.085, -0.085, -0.325, -0.325]
    assert found["confidence"] == pytest.approx(np.subtract(brier, means), abs=1e-9)


def test_the_same_credit_from_trls_file_and_its_csv(tmp_path):
    columns = {"step": [1] * 4, "accuracy_reward": [1.0, 1.0, 0.0, None], "advantage": [0.5, 0.5, -1.0, 0.0]}
    file = trl_file(tmp_path / "a.parquet", SPOKEN, **columns)
    rows = [
        {"prompt": "2+2=", "completion": text, **{name: values[n] for name, values in columns.items()}}
        for n, text in enumerate(SPOKEN)
    ]
    whole = credit_rollouts(file, overrides=LAYOUT)
    again = credit_rollouts(save(tmp_path, rows, "csv"), overrides=LAYOUT)
    assert [one.name for one in whole.applied] == [one.name for one in again.applied] == ["grpo", "rlcr", "bae", "recorded"]
    for one, other in zip(whole.applied, again.applied, strict=True):
        assert one.credit.block_nk.numpy() == pytest.approx(other.credit.block_nk.numpy(), nan_ok=True)


def test_the_command_takes_columns_and_the_report_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"q": "2+2=", "said": text, "key": "4"} for text in SPOKEN]
    file = save(tmp_path, rows, "csv")
    app(["credit", str(file), "--columns", "prompt=q,completion=said", "--columns", "answer=key", "--output", "out"])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["options"]["columns"] == {"prompt": "q", "completion": "said", "answer": "key"}
    assert (
        "--columns prompt=q --columns completion=said --columns answer=key" in (tmp_path / "out" / "report.html").read_text()
    )


def test_why_reads_them_too(tmp_path):
    rows = [{"prompt": "p", "completion": text, "acc": 1} for text in SPOKEN]
    found = why(save(tmp_path, rows, "json"), methods=["grpo"], console=quiet())
    assert found["grpo"].counts(1)[0].reason.name == "ALL_RIGHT"


def test_a_group_of_a_list_is_not_cut_by_its_prompt(tmp_path):
    """The same prompt in two rows is two groups: three right of three, and one of two."""
    rows = [
        {"prompt": "2+2=", "completions": [said("4", "0.9")] * 3, "answer": 4},
        {"prompt": "2+2=", "completions": [said("4", "0.9"), said("5", "0.2")], "answer": 4},
    ]
    result = credit(
        save(tmp_path, rows, "jsonl"), output=tmp_path / "out", methods=["bae"], overrides=LAYOUT, console=quiet()
    )
    assert result.applied[0].credit.block_nk[:, 0].tolist() == pytest.approx([0, 0, 0, 0.5, -0.5])
