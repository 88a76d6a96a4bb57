"""Logged metrics: a console shows few of them, every other listener gets all, and none is None."""

import ast
import json
import logging

import pytest
from transformers import PrinterCallback, TrainerCallback
from transformers.integrations import MLflowCallback

from spanwise.objective import Objective
from trl_small import OBJECTIVES, trainer

#: Those of docs/options.md that this run can have.
FEW = {
    "loss", "grad_norm", "learning_rate", "epoch", "reward", "rewards/correct/mean", "rewards/brier/mean",
    "rewards/never/mean", "entropy", "kl", "completions/mean_length", "completions/clipped_ratio", "credit/malformed",
}  # fmt: skip


class Listener(TrainerCallback):
    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


class Tracker(MLflowCallback):
    """transformers' own `on_log` for MLflow, which warns of values that are no numbers; nothing is sent."""

    def __init__(self):
        self._initialized, self._async_log, self._auto_end_run = True, False, False
        self.sent, self._ml_flow = [], self

    def log_metrics(self, metrics, step, **options):
        self.sent.append(metrics)


def printed(text):
    lines = [line for line in text.splitlines() if line.startswith("{") and "'loss'" in line]
    return [ast.literal_eval(line.replace(": nan", ": None")) for line in lines]


@pytest.mark.filterwarnings("ignore:Step 0. Objective 'never' has no reward")
@pytest.mark.parametrize("choice", ["few", "all"])
def test_a_console_shows_few_metrics_and_all_others_get_all_that_are_there(tmp_path, capsys, caplog, monkeypatch, choice):
    listener, tracker = Listener(), Tracker()
    never = Objective(lambda completions: [None] * len(completions), pays="solution", name="never")
    extra = {"objectives": (*OBJECTIVES, never), "callbacks": [listener, tracker]}
    run = trainer(tmp_path, extra=extra, max_steps=2, learning_rate=0.01, keep_rollouts=1, log_metrics=choice)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    run.train()
    out, err = capsys.readouterr()
    assert "attempting to log" not in caplog.text + err
    on_console, lines = printed(out), listener.lines
    assert len(on_console) == 2
    assert on_console[0].keys() == (lines[0].keys() & FEW if choice == "few" else lines[0].keys() - {"total_flos"})
    assert [value for line in lines for value in line.values() if not isinstance(value, int | float)] == []
    assert len(tracker.sent[0]) == len(lines[0]) > 2 * len(FEW)
    assert not any("never/mean" in name for name in lines[0])
    assert isinstance(run.callback_handler.pop_callback(PrinterCallback), PrinterCallback)
    line_in_file = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert lines[0].keys() - {"epoch"} <= line_in_file.keys()
