"""What a command prints at 60, 80 and 200 columns: whole words, whole numbers, what is wrong, where a formula is from."""

from __future__ import annotations

import io
import re
from itertools import product
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from rollout_files import tagged, verl_file
from spanwise.commands.compare.compare import FIGURES, comparison_tables
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.credit.write import figures_tables, summary
from spanwise.commands.methods.methods import methods_table, show_methods
from spanwise.commands.shared.display import figure_table, gain_table, interval_table, pull_note, text_plot, vote_table
from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.progress import Live, large_files_shown
from spanwise.commands.shared.samples import unmeasured
from spanwise.commands.why.why import describe_completion, reason_table, reasons
from spanwise.credit import METHODS
from spanwise.layout import Layout
from spanwise.measure import Interval, compare_arms, curve_difference, voting
from spanwise.registry import register
from spanwise.rollouts import read_rollouts
from spanwise.scheme import Scheme

WRITTEN = Path(__file__).parents[1] / "rollouts" / "written"
TAGS = {"answer": "answer", "confidence": "confidence"}
WIDTHS = (60, 80, 200)


def printed(*parts, width=80, keep=1):
    """The printed text, in which nothing is cut off with an ellipsis and no line is wider than the console."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    say(console, *parts, keep=keep)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    return text


def check(table, width, *, keep=1):
    """No line is wider than the console, no cell of numbers is broken, no word is, and no part lacks a row."""
    text = printed(table, width=width, keep=keep)
    console = Console()
    for column in table.columns:
        texts = [console.render_str(c) if isinstance(c, str) else c for c in (column.header, *column.cells)]
        heading, *cells = (text.plain for text in texts)
        unwrapped = column.no_wrap or column.justify == "right"
        for piece in [*heading.split(), *(piece for cell in cells for piece in ([cell] if unwrapped else cell.split()))]:
            assert piece in text or len(piece) > width // 2, (piece, text)


def test_credit_and_why():
    credited = credit_rollouts(WRITTEN / "verl")
    zeros = reasons(credited)
    tables = [*figures_tables(summary(credited, {})["methods"], credited.title), reason_table(credited, zeros, 3)]
    tables += [part for part in describe_completion(credited, zeros, 1) if not isinstance(part, str)]
    for table, width in product(tables, WIDTHS):
        check(table, width, keep=2)


def test_a_path_of_any_length_and_with_brackets_stands_above_the_table(tmp_path):
    folder = tmp_path / ("deep" * 20) / "[bold]" / "a[red]b"
    result = credit_rollouts(verl_file(folder / "1.jsonl", [tagged("4", "0.9"), tagged("5", "0.1")], acc=[1, 0]))
    for width in WIDTHS:
        text = printed(*figures_tables(summary(result, {})["methods"], result.title), width=width, keep=2)
        assert str(folder / "1.jsonl") in re.sub(r"\s", "", text)


def numbers(size):
    return torch.rand(size, generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_figures_of_training_evaluation_and_demo(width):
    names = [*FIGURES, "mean_accuracy", "peak_refusal_rate", "seconds"]
    columns = {arm: dict(zip(names, numbers(len(names)), strict=True)) for arm in ("scalar", "blockwise", "a" * 30)}
    text = printed(*figure_table("the same start", columns), width=width)
    assert all(name.replace("_", " ") in text for name in names)
    assert all(f"{value:.3f}" in text for figures in columns.values() for value in figures.values())
    intervals = {name: Interval(0.123, 0.1, 0.15, 0.01, 0.95, 512) for name in names}
    assert printed(*interval_table("runs/a", intervals), width=width).count("0.100 to 0.150") == len(names)


def test_votes_and_methods():
    right_n, said_n = (torch.arange(64) % 3 == 0).double(), torch.tensor(numbers(64)).double()
    prompts, answers = [n // 32 for n in range(64)], [str(n % 5) for n in range(64)]
    votes = voting(answers, said_n, right_n, prompts=prompts, resamples=5)
    gains, methods = curve_difference(*list(votes.values())[:2]), methods_table()
    for table, width in product((vote_table("accuracy of a vote", votes), gain_table("a minus b", gains), methods), WIDTHS):
        check(table, width)
    assert "[bold]gigpo" in [*methods.columns[0].cells]
    assert any("arXiv 2602.10231" in cell for cell in methods.columns[2].cells)


def test_a_vote_says_what_stands_behind_its_sign_and_claims_no_certainty():
    """All of the four prompts right has a standard error of 0, and one prompt has none; neither is a figure without noise."""
    right, half = torch.ones(4).double(), torch.tensor([1.0, 1.0, 0.0, 0.0]).double()
    unsaid = torch.full((4,), torch.nan).double()
    for right_n, prompts, shown in ((right, range(4), "1.000"), (half, range(4), "0.500±0.2"), (half, [0] * 4, "0.500")):
        text = printed(vote_table("votes", voting(["4"] * 4, unsaid, right_n, prompts=list(prompts))))
        assert "± standard error" in text
        first_cell = next(line for line in text.splitlines() if line.strip().startswith("pass@1")).split()[1]
        assert (first_cell.startswith(shown), "±" in first_cell) == (True, "±" in shown)


def test_a_comparison():
    figures = [*FIGURES, "majority@16", "weighted@16", "second_accuracy"]
    comparison = compare_arms(
        {
            arm: {s: dict.fromkeys(figures, 0.8 + (3 * s + k) % 7 / 100) | {"refusal_rate": 0.0} for s in range(5)}
            for k, arm in enumerate(["outcome", "blended", "rlcr", "two_attempts"])
        }
    )
    for width in WIDTHS:
        text = printed(*comparison_tables(comparison), width=width)
        assert all(figure.replace("_", " ") in text for figure in figures)
        table = text.split("runs of the same seed")[0]
        for line in comparison.markdown().splitlines()[2:6]:
            assert all(cell in table for cell in line.strip("| ").split(" | "))
        assert table.count("accuracy") < 3 or width != 60
        first = next(line for line in table.splitlines() if "accuracy" in line)
        assert ("weighted@16" in first) == (width == 200)


def test_tables_of_one_run_mark_what_is_wrong():
    good = {"accuracy": 0.85, "ece": 0.03, "steps": 7}
    text = printed(*figure_table("train: a", {"start": good, "end": {"accuracy": 0.0, "ece": 0.001}}))
    assert "steps 7 -" in " ".join(text.split())
    assert "! end: hardly any answer is right (accuracy, ece)" in text
    assert next(line.split() for line in text.splitlines() if "ece" in line) == ["ece", "0.030", "0.001", "!"]
    assert "!" not in printed(*figure_table("train: a", {"start": good}))
    intervals = {"accuracy": Interval(0.001, 0.0, 0.01, 0.001, 0.95, 4), "auroc": None}
    text = printed(*interval_table("a", intervals))
    assert all(said in text for said in ("0.001 !", "! hardly any answer is right (accuracy)"))
    assert "auroc" not in printed(*interval_table("a", intervals, absent=["auroc"]))


JUDGED = {"ece", "brier", "auroc", "mean_confidence", "sharpness"}


def test_what_a_layout_cannot_tell_is_said_once():
    for layout, tags, names in (
        (Layout({"solution": ["answer"], "confidence": ["confidence"]}), TAGS, set()),
        (Layout({"all": []}), TAGS, set()),  # the task's own tags
        (None, TAGS, set()),
        (Layout({"first": ["answer"], "second": ["answer"]}), TAGS, {"coverage", *JUDGED}),
        (Layout({"plan": ["plan"], "sure": ["confidence"]}), TAGS, {"accuracy", "refusal_rate", "verdict_rate", *JUDGED}),
        (Layout({"plan": ["plan"], "sure": ["p"]}), {"answer": "plan", "confidence": "p"}, set()),
        (Layout(["answer", "confidence"], segmenter="json"), TAGS, set()),
        (Layout(["g", "h"], segmenter="json"), TAGS, {"coverage", "accuracy", "refusal_rate", "verdict_rate", *JUDGED}),
        (Layout({"answer": "json:answer", "rest": []}), TAGS, {"coverage", *JUDGED}),
    ):
        causes = unmeasured(layout, tags)
        assert (set(causes), len(set(causes.values()))) == (names, bool(names))
    spoken = unmeasured(Layout({"solution": ["answer"]}), TAGS, scored=True)
    assert set(spoken) == {"coverage", *JUDGED}
    assert spoken["ece"].endswith("only <answer>; the self-rewarding score is measured instead of a confidence")
    nothing = set(unmeasured(Layout({"plan": ["plan"]}), TAGS, scored=True))
    assert nothing - set(unmeasured(Layout({"plan": ["plan"]}), TAGS)) == {f"laser_{name}" for name in JUDGED}


def test_only_small_groups_get_a_note_on_their_pull_and_curves_are_drawn_as_text():
    """The .80 that it says is that of a run in test_cli."""
    assert text_plot({"accuracy": [0.0, 0.5, 1.0]}, height=2) == "accuracy  1 |  █\n          0 | ██"
    scheme = Scheme.preset("bae", Layout({"solution": ["answer"], "report": ["confidence"]}))
    assert "groups of 4" in pull_note(scheme, group_size=4)
    assert pull_note(scheme, group_size=16) is None


def test_a_plug_in_without_a_source_is_not_taken_from_the_paper(capsys):
    @register("halved", kind="completion", paper="none")
    def halved(reward_n, group_n):
        """Halve every reward."""
        return reward_n / 2

    try:
        for name, source in (
            ("halved", f"taken from the module {__name__}, which is not part of spanwise."),
            ("grpo", "The formula is taken from its paper, with the ddof of verl, TRL"),
            ("sae", "its full text was not used"),
        ):
            show_methods(name)
            assert source in " ".join(capsys.readouterr().out.split())
    finally:
        METHODS.pop("halved")
    show_methods("rlcr")
    preset = yaml.safe_load(capsys.readouterr().out)
    assert (preset["method"], preset["per"], preset["options"]) == ("rlcr", "block", {})
    assert all({*objective["pays"]} == {"solution", "confidence"} for objective in preset["objectives"])


def test_a_large_file_shows_how_far_it_is_read_and_a_small_one_nothing(tmp_path, monkeypatch):
    file, text = tmp_path / "a.jsonl", io.StringIO()
    file.write_text('{"prompt": "p", "completion": "one two"}\n' * 800)
    console = Console(file=text, width=80)
    with large_files_shown(console):
        assert len(read_rollouts(file)) == 800
    assert text.getvalue() == ""
    monkeypatch.setattr("spanwise.commands.shared.progress._LARGE", 1000)
    with large_files_shown(console):
        read_rollouts(file)
    progress = text.getvalue()
    assert "reading 50/100" in progress
    read_rollouts(file)
    assert text.getvalue() == progress  # nothing is shown afterwards


def test_the_time_left_of_a_resumed_run_is_that_of_its_own_steps_and_many_parts_of_a_reward_are_one():
    console = Console(file=io.StringIO(), width=80)
    live = Live(console, "train", 20, first=9)
    live._started -= 100  # the tenth step took 100 s, and ten are left
    live.step(10, {})
    parts = {"equals.a": 1.0, "equals.b": 0.0, "equals.c[0]": 0.5, "equals.c[1]": 0.0, "equals.d": None, "form": 1.0}
    Live(console, "train", 10).step(10, {**parts, "brier": None})
    lines = "train 10/20    1000 s left\ntrain 10/10  equals (4 parts) 0.500  form 1.000  0 s left\n"
    assert console.file.getvalue() == lines
