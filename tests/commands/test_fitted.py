"""Every table that a command prints, at 60, 80 and 200 columns: nothing is cut."""

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rollout_files import said, verl_file
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.credit.write import figures_tables, summary
from spanwise.commands.methods.methods import _table as methods_table
from spanwise.commands.shared.display import figure_table, gain_table, interval_table, vote_table
from spanwise.commands.shared.fitted import say
from spanwise.commands.why.why import _counts, _one, reasons
from spanwise.measure import Interval, curve_difference, voting

WRITTEN = Path(__file__).parents[1] / "rollouts" / "written"
WIDTHS = (60, 80, 200)
LONG = "a_method_with_a_name_of_its_own"


def printed(*things, width, keep=1):
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    say(console, *things, keep=keep)
    return console.file.getvalue()


def check(table, width, *, keep=1):
    """No line is wider than the console, no cell of numbers is broken, no word is, and no part lacks a row."""
    text = printed(table, width=width, keep=keep)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    console = Console()
    for column in table.columns:
        heading, *cells = (
            console.render_str(cell) if isinstance(cell, str) else cell for cell in (column.header, *column.cells)
        )
        whole = column.no_wrap or column.justify == "right"
        for cell in cells:
            for piece in [cell.plain] if whole else cell.plain.split():
                assert piece in text or len(piece) > width // 2, (piece, text)
        for word in heading.plain.split():
            assert word in text, (word, text)


@pytest.fixture(scope="module")
def credited():
    return credit_rollouts(WRITTEN / "verl")


@pytest.mark.parametrize("width", WIDTHS)
def test_credit_and_why(credited, width, tmp_path_factory):
    for table in figures_tables(summary(credited, {})["methods"], credited.title):
        check(table, width, keep=2)
    found = reasons(credited)
    check(_counts(credited, found, 3), width, keep=2)
    for line in _one(credited, found, 1)[1:]:
        if not isinstance(line, str):
            check(line, width, keep=2)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_path_of_any_length_stands_above_the_table(width, tmp_path):
    folder = tmp_path / ("deep" * 20)
    folder.mkdir()
    result = credit_rollouts(verl_file(folder / "1.jsonl", [said("4", "0.9"), said("5", "0.1")], acc=[1, 0]))
    text = printed(*figures_tables(summary(result, {})["methods"], result.title), width=width, keep=2)
    assert str(folder) in re.sub(r"\s", "", text).replace("\n", "")


@pytest.mark.parametrize("width", WIDTHS)
def test_methods(width):
    check(methods_table(), width)


def numbers(size, seed=0):
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_figures_of_training_evaluation_and_demo(width):
    names = (
        "accuracy", "mean_accuracy", "refusal_rate", "peak_refusal_rate", "format_rate", "ece", "brier", "auroc", "seconds",
    )  # fmt: skip
    columns = {arm: dict(zip(names, numbers(len(names)), strict=True)) for arm in ("scalar", "blockwise", LONG)}
    text = printed(*figure_table("the same start", columns), width=width)
    assert max(map(len, text.splitlines())) <= width
    for name in names:
        assert name.replace("_", " ") in text
    for found in columns.values():
        assert all(f"{value:.3f}" in text for value in found.values())
    intervals = {name: Interval(0.123, 0.1, 0.15, 0.01, 0.95, 512) for name in names}
    text = printed(*interval_table("runs/a", intervals), width=width)
    assert text.count("0.100 to 0.150") == len(names)


@pytest.fixture(scope="module")
def votes():
    return voting(
        [str(n % 5) for n in range(64)], torch.tensor(numbers(64)).double(), (torch.arange(64) % 3 == 0).double(),
        prompts=[n // 32 for n in range(64)], resamples=5,
    )  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_votes(votes, width):
    check(vote_table("accuracy of a vote", votes), width)
    check(gain_table("a minus b", curve_difference(*list(votes.values())[:2])), width)
