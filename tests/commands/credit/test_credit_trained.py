"""`spanwise credit` on runs: the advantages they were trained with, with a critic too, and what their report shows beside them."""

import shutil
from dataclasses import replace
from functools import cache

import numpy as np
import pyarrow.parquet as pq
import pytest

import trl_small
from rollout_files import LAYOUT, texts
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.report.report import recorded_view
from spanwise.commands.train.train import train
from spanwise.layout import Layout
from spanwise.recipe import load, resolved, scheme_of
from spanwise.rollouts.folder import RunFolder

pytestmark = [*trl_small.THIRD_PARTY, pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning")]


def column_of(folder, column):
    """A per-token column as the trainer wrote it, steps in order, end to end; NaN for null."""
    files = sorted((folder / "rollouts").glob("*.parquet"))
    values = [value for f in files for row in pq.read_table(f)[column].to_pylist() for value in row]
    return np.array([np.nan if value is None else value for value in values])


OWN_OBJECTIVES = [
    {"reward": "correct", "pays": ["solution"], "baseline": "group", "if_missing": 0.0},
    {"reward": "brier", "pays": ["confidence"], "given": "correct", "baseline": "group", "if_missing": -1.0},
]
VARIANTS = {
    "blended": ({"baseline": "blended"}, {}),
    "rlcr": ({"method": "rlcr"}, {}),
    "tools": ({}, {}),
    "truncated": ({"baseline": "batch"}, {"mask_truncated_completions": True}),
    "gdpo": ({"method": "gdpo"}, {}),
}


def script(*, tools=False, truncated=False):
    """Completions of four prompts, the first two equal: both outcomes in each, one confidence missing."""
    spoken = [
        trl_small.say("ab"[: k % 3], "4333"[(k + k // 4) % 4] if k % 3 else "4", None if k == 6 else (7 * k + 3) % 10 / 10, 0.0,
                      tool="7" * (k % 3) if tools else "")
        for k in range(16)
    ]  # fmt: skip
    if truncated:  # it stopped before its end-of-sequence token
        spoken[1] = replace(spoken[1], pieces=spoken[1].pieces[:-1], blocks=spoken[1].blocks[:-1])
    return spoken


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """The folder of a variant's run of two steps, trained once by the real trainer: one prompt for two groups."""

    @cache
    def folder_of(variant):
        folder, (choices, options) = RunFolder(tmp_path_factory.mktemp(variant)), VARIANTS[variant]
        recipe = load(None, {"layout": LAYOUT, "prompts": 4, "group_size": 4, "output": str(folder.path), **choices})
        filled = scheme_of(recipe, Layout(LAYOUT), 16)
        answers = script(tools=variant == "tools", truncated=variant == "truncated")
        dataset = trl_small.prompts().select([0, 0, 1, 1])
        for step, spoken in ((1, answers), (2, answers[::-1])):
            extra = {"scheme": filled, "train_dataset": dataset, "model": trl_small.policy()}
            options = {"per_device_train_batch_size": 16, **options}
            trainer = trl_small.trainer(folder.path / "c", scripts=spoken, tools=variant == "tools", extra=extra, **options)
            trainer.train()
            folder.write_rollouts([trainer.last_rollouts.recorded(step=step)], step=step)
        folder.write_recipe(resolved(recipe, filled))
        trl_small.tokenizer().save_pretrained(folder.path / "model")
        return folder.path

    return folder_of


@pytest.mark.parametrize("variant", VARIANTS)
def test_scripted_runs_get_the_advantages_they_were_trained_with(variant, scripted):
    run = scripted(variant)
    result = credit_rollouts(run, methods=["recipe"])
    expected = column_of(run, f"advantages/{load(run / 'recipe.yaml', None).method}")
    left_out = np.repeat(~result.table.learned_n.numpy(), result.table.tokens.lengths)
    np.testing.assert_array_equal(np.isnan(expected), left_out)
    expected[left_out] = 0.0
    assert np.abs(expected).max() > 0  # else this shows nothing
    advantages = result.applied[0].advantages(result.table, 0, len(result.table))
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-7)
    assert (result.table.trainable == column_of(run, "trainable")).all()
    if variant == "truncated":  # a method per token gives nothing to a completion left out of the loss either
        assert int((~result.table.learned_n).sum()) == 2
        by_token = credit_rollouts(run, methods=["reinforce++"]).applied[0]
        assert np.array_equal(by_token.advantages(result.table, 0, len(result.table)) == 0, left_out)


def test_a_file_of_a_run_is_known_by_its_folder(scripted):
    run = scripted("blended")
    file = run / "rollouts" / "step_000001.parquet"
    for place, rows in ((run, 32), (run / "rollouts", 32), (file, 16)):
        result = credit_rollouts(place, overrides={"method": "bae_paper", "objectives": OWN_OBJECTIVES, "per": "block"})
        assert len(result.table) == rows
        assert [arm.name for arm in result.applied] == ["grpo", "rlcr", "bae", "bae_paper:group"]
        assert result.table.has_ids
    assert texts(result.table) == pq.read_table(file)["text"].to_pylist()


@pytest.mark.parametrize(("variant", "trained"), [("blended", "bae"), ("rlcr", "rlcr")])
def test_the_report_of_a_run_shows_grpo_beside_its_own_unless_its_rollouts_cannot_be_credited_again(
    variant, trained, scripted, tmp_path
):
    bare, files = tmp_path / "run", [scripted(variant) / "rollouts" / "step_000002.parquet"]
    shutil.copytree(scripted(variant), bare, ignore=shutil.ignore_patterns("*token*"))
    view, credit = recorded_view(bare, {"method": trained}, [bare / "rollouts" / "step_000002.parquet"])
    assert (view.methods, list(credit)) == ((trained,), [trained])
    view, credit = recorded_view(scripted(variant), {"method": trained}, files)
    rows = pq.read_table(files[0]).to_pylist()
    assert list(view.methods) == list(credit) == [trained, "grpo"]
    for row, page in zip(rows, view.completions, strict=True):
        np.testing.assert_array_equal(page.advantages[trained], row[f"advantages/{trained}"])
    # One number: correctness against the mean of the group, four of them in file order.
    right_gn = np.array([row["reward/correct"] for row in rows]).reshape(4, 4)
    expected = np.sign((right_gn - right_gn.mean(axis=1, keepdims=True)).round(9)).flatten()
    grpo = [page.advantages["grpo"][row["start/solution"]] for row, page in zip(rows, view.completions, strict=True)]
    np.testing.assert_array_equal(np.sign(np.round(grpo, 9)), expected)
    assert (expected != 0).sum() > 8


ALONE = {"layout": {"solution": ["answer"]}, "objectives": [{"reward": "correct", "pays": "solution", "if_missing": 0.0}]}
BRIER = {"reward": "brier", "pays": "confidence", "given": "correct", "if_missing": -1.0}
TAGS = {"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]}
BOTH = {"layout": TAGS, "objectives": [*ALONE["objectives"], BRIER]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "options", "task"),
    [
        ("gae", {"lam": 0.9}, ALONE),
        ("sae", {"threshold": 0.7, "boundary": "end", "lam": 0.8}, BOTH),
        ("sae", {"threshold": 0.7}, {**BOTH, "values": "shared"}),
        ("gae", {}, {**BOTH, "critic": {"learning_rate": 1e-3, "truncated": "bootstrap"}, "max_completion_length": 20}),
        ("gae", {}, {**ALONE, "critic": {"learning_rate": 1e-3, "truncated": "mask"}, "max_completion_length": 17}),
    ],
    ids=["gae", "a value per objective", "one value of all blocks", "a value after the last token", "cut off and left out"],
)
def test_a_run_with_a_critic_keeps_what_every_token_was_trained_with(method, options, task, tmp_path):
    """A value of an objective is in the blocks that it pays, and nowhere else."""
    fields = {
        "steps": 2, "prompts": 2, "group_size": 4, "start_steps": 64, "eval_prompts": 2, "eval_samples": 2, "eval_every": 0,
        "report": False, "critic": {"learning_rate": 1e-3}, "output": str(tmp_path / "run"), "method": method, "options": options,
        **task,
    }  # fmt: skip
    train(load(None, fields))
    result = credit_rollouts(tmp_path / "run", methods=["recipe"])
    trained = column_of(tmp_path / "run", f"advantages/{method}")
    np.testing.assert_array_equal(result.applied[0].advantages(result.table, 0, 16), trained.astype(np.float32))
    assert np.unique(trained).size > 8
    rows = [row for file in sorted((tmp_path / "run" / "rollouts").glob("*")) for row in pq.read_table(file).to_pylist()]
    by_objective = len(task["objectives"]) > 1 and "values" not in task
    blocks = {"values/correct": "solution", "values/brier": "confidence"} if by_objective else {"values": None}
    assert [name for name in rows[0] if name.startswith("values")] == list(blocks)
    for row in rows:
        for name, block in blocks.items():
            has_value = [value is not None for value in row[name]]
            if block is None:
                assert has_value == row["trainable"]
            elif row[f"end/{block}"]:
                assert has_value == [row[f"start/{block}"] <= t < row[f"end/{block}"] for t in range(len(has_value))]
    if "critic" in task:  # some completions are cut off, and others end
        assert len({row[name] for row in rows for name in row if name.startswith("value_after")}) > 1
    assert "explained_variance" in (tmp_path / "run" / "metrics.jsonl").read_text()
