"""`spanwise credit` on files as they really come: gaps, bad cells, no tags, equal prompts, other columns."""

import json
import re
import shlex

import pyarrow.parquet as pq
import pytest
import torch

import rollout_files
from helpers import assert_close
from rollout_files import LAYOUT, WELL_FORMED, own_run, tagged, trl_file, verifiers_file, verl_file, write_lines
from spanwise.cli import app
from spanwise.commands.credit.blocks import split_groups
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.errors import DataError, RecipeError
from spanwise.rollouts import read_rollouts
from spanwise.rollouts.table import fitting_runs
from spanwise.types import Status

pytestmark = pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning")

OK, UNPARSABLE, UNSCORED = Status.OK, Status.UNPARSABLE, Status.UNSCORED
WRITERS = {
    "TRL": lambda folder, outputs, **columns: trl_file(folder / "a.parquet", outputs, **columns),
    "verl": lambda folder, outputs, **columns: verl_file(folder / "1.jsonl", outputs, **columns),
    "verifiers": lambda folder, outputs, **columns: verifiers_file(folder / "traces.jsonl", outputs, **columns),
}

TAGLESS = [rf"The answer is \boxed{{{x}}}" for x in (4, 4, 3, 5)]


def test_an_arm_under_two_names_is_one_arm(tmp_path, monkeypatch):
    """Two chunks have different rewards: the second must not get those of the first."""
    monkeypatch.setattr("spanwise.commands.credit.apply.AT_A_TIME", 25)
    right = [1, 1, 1, 0, 0, 0, 0, 1]
    file = verl_file(tmp_path / "1.jsonl", [tagged("4", "0.5")] * 8, prompts=[*"aaaabbbb"], correct=right)
    result = credit_rollouts(file, methods=["recipe", "bae"], overrides={"layout": LAYOUT})
    assert [arm.name for arm in result.applied] == ["bae"]
    assert len(list(fitting_runs(result.table.tokens.lengths, 25))) > 1
    assert result.applied[0].credit.block_nk[:, 0].tolist() == [0.25, 0.25, 0.25, -0.75, -0.25, -0.25, -0.25, 0.75]


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("gap", [None, float("nan")])
def test_a_reward_that_was_never_scored_costs_nothing(kind, gap, tmp_path):
    file = WRITERS[kind](tmp_path, WELL_FORMED, acc=[1.0, gap, 1.0, 0.0])
    result = credit_rollouts(file, methods=["bae"], reward={"correct": "acc"}, overrides={"layout": LAYOUT})
    # Brier's outcome is not known either; the tags are read from the text.
    assert result.scores.status_nm.T.tolist() == [[OK, UNSCORED, OK, OK]] * 2 + [[OK] * 4] * 2
    assert re.search("missing or not finite: .*1 of 4 values of 'acc'", result.table.note)
    block_nk = result.applied[0].credit.block_nk
    # By hand: 1, 1 and 0 have mean 2/3. Brier -.01 and -.09 of the right ones have mean -.05; the wrong one is alone.
    assert_close(block_nk.T, [[1 / 3, 0, 1 / 3, -2 / 3], [0.04, 0, -0.04, 0]])
    assert result.applied[0].credit.stop_n.tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", ["TRL", "verifiers"])
def test_columns_are_asked_for_only_where_they_can_be_named(kind, tmp_path):
    """Without answers, and where each group has one completion. Names of traces are fixed: --columns is refused for them."""
    file = trl_file(tmp_path / "a.parquet", WELL_FORMED[:2], prompt=["g", "h"], acc=[1.0, 1.0])
    if kind == "verifiers":
        said, reward = tagged("4", "1"), {"acc": 1.0}
        traces = [rollout_files.small_episode(said, reward, answer=None, group=group) for group in "gh"]
        file = write_lines(tmp_path / "traces.jsonl", traces)
    options = {"methods": ["grpo"], "overrides": {"layout": LAYOUT}}
    with pytest.raises(DataError, match="needs gold answers") as error:
        credit_rollouts(file, reward={"correct": "text"}, **options)
    notes = " ".join(credit_rollouts(file, reward={"correct": "acc"}, **options).notes)
    assert "2 groups" in notes
    for sentence in (str(error.value), notes):
        assert ("--columns" in sentence) == (kind == "TRL")


def test_one_bad_cell_does_not_drop_the_column_and_one_without_numbers_is_no_reward(tmp_path):
    for cell in (float("inf"), "1.0", 10**400):
        file = verl_file(tmp_path / "1.jsonl", WELL_FORMED, correct=[0.0, cell, 1.0, 1.0], gts=["4"] * 4)
        result = credit_rollouts(file, methods=["grpo"], overrides={"layout": LAYOUT})
        assert result.scores.status_nm[:, 0].tolist() == [OK, UNSCORED, OK, OK]
        assert result.scores.reward_nm[[0, 2, 3], 0].tolist() == [0.0, 1.0, 1.0]  # the text would say 1 1 0
        for said in ("correct from the file", "Some recorded numbers are missing or not finite: 1 of 4 values of 'correct'"):
            assert said in result.note
    file = verl_file(tmp_path / "1.jsonl", WELL_FORMED, acc=["good", "bad", 1, "good"], none=[None] * 4, score=["1"] * 4)
    assert list(read_rollouts(file).rewards) == []
    for column, why in (("acc", "holds .*, which is no number"), ("none", "is empty")):
        with pytest.raises(RecipeError, match=why):
            credit_rollouts(file, reward={"correct": column}, overrides={"layout": LAYOUT})


def test_a_run_of_ours_is_cut_by_its_own_group_size_under_any_recipe_and_a_foreign_file_by_that_which_is_given(tmp_path):
    run = own_run(tmp_path / "run", rewards=[1.0, 0.0, 1.0, 1.0], status=["ok"] * 4)
    other = tmp_path / "other.yaml"
    other.write_text(f"layout: {json.dumps(LAYOUT)}\nmethod: rlcr\n")
    for recipe in (None, run / "recipe.yaml", other):
        result = credit_rollouts(run, methods=["dr_grpo"], recipe=recipe)
        assert result.group_n.tolist() == [0, 0, 1, 1]
        assert result.applied[0].credit.block_nk[:, 0].tolist() == [0.5, -0.5, 0.0, 0.0]
    chosen = credit_rollouts(run, methods=["dr_grpo"], recipe=other, overrides={"group_size": 4})
    assert chosen.group_n.tolist() == [0] * 4
    file = verl_file(tmp_path / "1.jsonl", WELL_FORMED, score=[1, 0, 1, 1])
    for recipe, fields, groups in (
        (None, {}, [0] * 4), (run / "recipe.yaml", {}, [0, 0, 1, 1]), (None, {"group_size": 3}, [0, 0, 0, 1]),
    ):  # fmt: skip
        options = {"methods": ["dr_grpo"], "reward": {"correct": "score"}, "recipe": recipe}
        result = credit_rollouts(file, **options, overrides={"layout": LAYOUT, **fields})
        assert result.group_n.tolist() == groups
    assert "1 groups have fewer than 3 completions" in result.note
    assert split_groups(torch.tensor([0, 1, 0, 1, 0, 0]), 2).tolist() == [0, 2, 0, 2, 1, 1]


def test_uneven_groups_of_a_step_are_pointed_out(tmp_path):
    def credited(prompts="aaaabbcc", group_size=None, **columns):
        file = verl_file(tmp_path / "1.jsonl", [tagged("4", "0.5")] * 8, score=[1, 0] * 4, prompts=[*prompts], **columns)
        cut = {} if group_size is None else {"group_size": group_size}
        return credit_rollouts(file, methods=["grpo"], reward={"correct": "score"}, overrides={"layout": LAYOUT, **cut})

    note = credited().note
    assert "Groups hold 2 to 4 completions. If a prompt was drawn twice in a step, its completions form one group" in note
    split = credited(group_size=int(re.search(r"--set group_size=(\d+)", note)[1]))
    assert split.group_n.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for even in (split, credited(uid=[*"aaaabbcc"]), credited("aaaabbbb")):
        assert "drawn twice" not in even.note


@pytest.mark.parametrize("overrides", [{}, {"layout": {"all": []}}, {"layout": {"solution": ["answer"]}}])
def test_a_file_without_tags_is_credited_by_its_recorded_reward(overrides, tmp_path):
    """By hand: 1 1 0 0 have mean .5 and standard deviation .5774 (ddof 1)."""
    file = verl_file(tmp_path / "1.jsonl", TAGLESS, gts=["4"] * 4, score=[1.0, 1.0, 0.0, 0.0])
    for methods, names in (([], ["grpo", "recorded"]), (["grpo"], ["grpo"])):
        result = credit_rollouts(file, methods=methods, reward={"correct": "score"}, overrides=overrides)
        assert [arm.name for arm in result.applied] == names
        expected = [sign * 0.75**0.5 for sign in (1, 1, -1, -1)]
        assert result.applied[0].credit.block_nk[:, 0].tolist() == pytest.approx(expected, rel=1e-5)
        assert bool(re.search(r"(rlcr and bae are|bae is) left out", result.note)) == (not methods)


WITHOUT_ANSWERS = pytest.mark.parametrize("outputs", [TAGLESS, [f"<think>hm</think> {text}" for text in TAGLESS]])


@WITHOUT_ANSWERS
def test_recorded_numbers_are_the_rewards_if_nothing_says_what_is_right(outputs, tmp_path):
    file = verl_file(tmp_path / "1.jsonl", outputs, gts=["4"] * 4, grade=[1.0, 1.0, -1.0, 0.5], style=[0, 0, 1, 0])
    bae = next(arm for arm in credit_rollouts(file).applied if arm.name == "bae").credit.block_nk
    # By hand: grade has the mean .375 and style .25.
    assert bae.sum(dim=1).tolist() == pytest.approx([0.375, 0.375, -0.625, -0.125])
    own = credit_rollouts(file, methods=["recipe"], overrides={"method": "bae", "per": 10})  # every token: a tenth
    assert own.applied[0].advantages(own.table, 2, 3).tolist() == pytest.approx([-0.0625] * own.table.tokens.lengths[2])


@WITHOUT_ANSWERS
def test_the_remedy_in_the_message_runs(outputs, tmp_path):
    file = verl_file(tmp_path / "1.jsonl", outputs, gts=[*outputs[:3], None])
    with pytest.raises(RecipeError, match=r"<answer> is in 0 .*of 4 completions") as error:
        credit_rollouts(file)
    remedy = re.search(r"whole completions with (--methods .*)", str(error.value))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("segmenter: json\nlayout: {answer: answer}\n")  # the remedy replaces its layout, too
    command = ["credit", str(file), "--recipe", str(recipe), *shlex.split(remedy[1]), "--output", str(tmp_path / "out")]
    app(command, exit_on_error=False, result_action="return_value")
    rewards = [row["reward/correct"] for row in pq.read_table(tmp_path / "out" / "credit.parquet").to_pylist()]
    assert rewards == [1.0, 1.0, 1.0, None]  # without a right answer, no verdict


def test_usual_methods_without_a_source_are_left_out(tmp_path):
    """No right answers, correctness recorded: the second attempt cannot be judged, the rest can."""
    layout = {"first": ["answer"], "second": ["answer"]}
    file = verl_file(tmp_path / "1.jsonl", ["<answer>3</answer><answer>4</answer>"] * 4, score=[1, 1, 0, 0])
    result = credit_rollouts(file, reward={"correct": "score"}, overrides={"layout": layout})
    assert [arm.name for arm in result.applied] == ["grpo", "recorded"]
    assert "rlcr and bae are left out: Reward 'second_attempt' needs gold answers" in result.note
    with pytest.raises(DataError, match="Reward 'second_attempt' needs gold answers"):
        credit_rollouts(file, methods=["bae"], reward={"correct": "score"}, overrides={"layout": layout})
