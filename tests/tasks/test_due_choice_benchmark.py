"""The random walk of the due date's choice: one step by hand, and what a start without any difference comes to."""

from unittest.mock import MagicMock

import due_choice
import numpy as np
import pytest


def test_null_is_one_token_and_so_pushes_twelve_times_as_hard_as_a_date():
    """Half are nulls: .5 x .5 x (.5 + .5 / 12). Rare nulls push with p, rare dates with their share of p and a twelfth."""
    assert due_choice.null_push(0.5) == pytest.approx(0.25 * (0.5 + 0.5 / 12))
    assert due_choice.null_push(0.01) / 0.01 == pytest.approx(0.98, abs=0.01)
    assert due_choice.null_push(0.99) / 0.01 == pytest.approx(0.99 * (0.01 + 0.99 / 12))


def test_a_step_moves_each_kind_of_letter_by_the_shares_of_the_batch():
    """With momentum .9 a first step is a tenth; half of eight letters state a date on average, and a date is worth a half."""
    response = np.array([[-4.0, 0.0], [0.0, 4.0]])
    stated, absent = due_choice.walk(response, (0.5, 0.5), right=0.5, steps=1, runs=20_000)
    assert np.log(stated / (1 - stated)).mean() == pytest.approx(-4 * 0.1 * 0.5 * 0.5, abs=0.005)
    assert np.log(absent / (1 - absent)).mean() == pytest.approx(4 * 0.1 * 0.5, abs=0.005)
    assert {round(float(odds), 4) for odds in np.log(absent / (1 - absent))} <= {round(0.4 * n / 8, 4) for n in range(9)}
    # Without a difference a date that is worth less ends at null.
    alike = np.array([[-1.5, 1.5], [-1.5, 1.5]])
    stated, absent = due_choice.walk(alike, (0.5, 0.5), right=0.5)
    assert stated == pytest.approx(absent)
    assert (stated > 0.9).mean() > 0.99


def test_a_model_on_a_gpu_comes_to_the_letters(monkeypatch):
    model, tokenizer = MagicMock(), MagicMock()
    monkeypatch.setattr(due_choice, "load_model", lambda _: (model, tokenizer))
    monkeypatch.setattr(due_choice, "sample", MagicMock(side_effect=StopIteration))
    with pytest.raises(StopIteration):
        due_choice.measure("folder")
    model.to.assert_called_once_with("cpu")
