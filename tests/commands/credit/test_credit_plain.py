"""`spanwise credit` on tables that anybody made; rollouts/test_read_plain shows that every kind of file is the same table."""

import json

import numpy as np
import pytest

from plain_files import save
from rollout_files import said
from spanwise.cli import app
from spanwise.commands.credit.credit import credit_rollouts

SPOKEN = [said("4", "0.9"), said("4", "0.6"), said("5", "0.8"), said("5", "0.1")]
ROWS = [{"question": "2+2=", "output": text, "gold": "4", "length": n} for n, text in enumerate(SPOKEN)]
GROUPED = [{"question": "2+2=", "responses": SPOKEN, "gold": "4", "length": [0, 1, 2, 3]}]
LAYOUT = {"layout": {"solution": ["answer"], "confidence": ["confidence"]}}


@pytest.mark.parametrize("rows", [ROWS, GROUPED], ids=["one in a row", "a list"])
def test_the_credit_of_a_table(rows, tmp_path):
    """Two of four are right; of the right ones the surer report earns more than their mean, of the wrong ones the less sure."""
    result = credit_rollouts(save(tmp_path, rows, "csv"), overrides=LAYOUT, methods=["bae"])
    found = {name: result.applied[0].credit.block_nk[:, k].tolist() for k, name in enumerate(result.marked.names)}
    assert found["solution"] == pytest.approx([0.5, 0.5, -0.5, -0.5])
    brier = [-0.01, -0.16, -0.64, -0.01]  # 0 - (q - o)^2
    means = [-0.085, -0.085, -0.325, -0.325]
    assert found["confidence"] == pytest.approx(np.subtract(brier, means), abs=1e-9)


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
