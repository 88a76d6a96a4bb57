"""Files that other trainers really wrote: blocks, the arm as recorded, which rewards a number adds up, branches, `--write`.

`rollouts/written` holds what `_write_generations` of verl 0.9.1 and `write_episode` of verifiers 0.4.0 wrote; TRL runs here.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from trl import GRPOTrainer

import trl_small
from helpers import assert_close
from rollout_files import LAYOUT, WELL_FORMED, episode, node, tagged, trace, trl_file, verifiers_file, verl_file, write_lines
from spanwise.commands.credit.credit import credit, credit_rollouts
from spanwise.commands.report.report import report_folder
from spanwise.errors import RecipeError
from spanwise.rollouts import read_rollouts, read_traces
from spanwise.rollouts.rows import summarise_credit

WRITTEN = Path(__file__).parents[2] / "rollouts" / "written"
#: What verl recorded.
SCORE = [1.1, 1.1, 0.1, -1.0, 1.1, 1.1, 0.1, 0.1]


def by_name(result):
    return {arm.name: arm for arm in result.applied}


def sampled(result, n):
    """The credit of each sampled token of completion n under every arm, and the number of these tokens."""
    flags = result.table.tokens.with_values(result.table.trainable).slice(n, n + 1)
    return {arm.name: arm.advantages(result.table, n, n + 1)[flags] for arm in result.applied}, int(flags.sum())


@pytest.fixture
def other_tags(monkeypatch):
    """Tokenizer and policy with four more pairs of tags than usual."""
    more = [f"<{slash}{tag}>" for tag in ("draft", "final", "notes", "reply") for slash in ("", "/")]
    monkeypatch.setattr(trl_small, "PIECES", [*trl_small.PIECES, *more])


def test_the_advantages_of_verifiers_stay_at_their_tokens_and_are_a_mean_without_them(other_tags, tmp_path):
    result = credit_rollouts(WRITTEN / "verifiers")  # of one reward
    assert list(by_name(result)) == ["grpo", "bae", "recorded"]
    assert "rlcr is left out: " in result.note
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    result = credit_rollouts(WRITTEN / "verifiers_stream", tokenizer=tmp_path / "model")
    recorded = by_name(result)["recorded"]
    first, size = sampled(result, 0)
    assert size == 6
    np.testing.assert_allclose(first["recorded"], np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) / 6, rtol=1e-6)
    expected = [[0.2, 0.5], [0.7, 0.7], [-1.2, -1.2]]  # means over the blocks; the fourth has none, and no draft
    means = torch.stack([recorded.by_block[name] for name in ("draft", "final")], dim=1)
    np.testing.assert_allclose(means[:3], expected)
    assert means[3].isnan().all()
    assert np.isnan(sampled(result, 3)[0]["recorded"]).all()
    figures = summarise_credit(recorded.by_block["final"])
    assert (figures["completions"], figures["mean_abs"]) == (3, pytest.approx((0.5 + 0.7 + 1.2) / 3))
    without = credit_rollouts(WRITTEN / "verifiers_stream")
    assert "is the trainer's own credit, read from the mean of the file's 'advantages' in each completion" in without.note
    by_arm, size = sampled(without, 0)
    np.testing.assert_allclose(by_arm["recorded"], 0.35 / size, rtol=1e-6)


def accuracy_reward(completions, answer, **kwargs):
    return [float(f"<reply>{gold}</reply>" in text) for text, gold in zip(completions, answer, strict=True)]


@pytest.mark.filterwarnings("ignore")  # TRL's table of completions and pandas warn of themselves
def test_trl_with_notes_and_reply(other_tags, tmp_path):
    """Two optimiser steps on one generation batch: TRL writes it twice, and it counts once."""
    notes = ["<notes>", "a", "</notes>", "<reply>"]
    spoken = [trl_small.Said([*notes, n, "</reply>", "<eos>"], [0] * 3 + [1] * 4, 0.0, None) for n in "44453755"]
    options = {"per_device_train_batch_size": 4, "max_steps": 2, "steps_per_generation": 2, "log_completions": True}
    args = trl_small.plain(trl_small.config(tmp_path, **options))
    args.scale_rewards = "none"
    run = GRPOTrainer(
        model=trl_small.policy(), reward_funcs=[accuracy_reward], args=args,
        train_dataset=trl_small.prompts(), processing_class=trl_small.tokenizer(), rollout_func=trl_small.scripted(spoken),
    )  # fmt: skip
    run.train()
    assert len(list((tmp_path / "completions").glob("*.parquet"))) == 2
    result = credit_rollouts(tmp_path)
    arms = by_name(result)
    assert list(arms) == ["grpo", "bae", "recorded"]
    assert result.file_spans.names == ("notes", "reply")
    assert "correct from the file's 'accuracy_reward'." in result.note
    assert "1 of 2 files repeat the batch of the previous file" in result.note
    # By hand: answers 4 4 4 5 to 2+2= are 1 1 1 0 (mean .75), 3 7 5 5 to 1+2= are 1 0 0 0 (mean .25).
    expected_n = torch.tensor([0.25, 0.25, 0.25, -0.75, 0.75, -0.25, -0.25, -0.25], dtype=torch.float64)
    arms["dr_grpo"] = credit_rollouts(tmp_path, methods=["dr_grpo"]).applied[0]
    for name in ("dr_grpo", "bae", "recorded"):  # TRL's own advantages, and those of OCB's paper for each block
        torch.testing.assert_close(arms[name].credit.block_nk, expected_n[:, None].expand(8, 2), atol=1e-6, rtol=0)
    by_arm, size = sampled(result, 3)
    np.testing.assert_allclose(by_arm["recorded"], [-0.75 / size] * size, rtol=1e-6)
    assert "is the trainer's own credit, read from the file's 'advantage'. Each number is spread over the" in result.note


def test_credit_of_blocks_stays_in_its_blocks(tmp_path):
    """Our own trainer fills TRL's table with a credit of each block, of stopping, and their sum."""
    columns = {
        "advantage": [0.5, -0.75, 0.25], "credit/solution": [0.75, -0.5, 0.5], "credit/confidence": [-0.25, None, -0.25],
        "credit/stop": [0.0, -0.25, 0.0], "correct": [1.0, 0.0, 1.0],
    }  # fmt: skip
    file = trl_file(tmp_path / "a.parquet", [tagged("4", "0.9"), tagged("5", None), tagged("4", "0.7")], **columns)
    result = credit_rollouts(file, overrides={"layout": LAYOUT})
    assert set(result.table.rewards) == {"correct"}  # the columns of credit are no rewards
    # By hand: "so", "<answer>", "4", "</answer>" (and the space) are the solution, three words the confidence.
    assert result.file_spans.length_nk.tolist() == [[5, 3], [5, 0], [5, 3]]
    np.testing.assert_allclose(sampled(result, 0)[0]["recorded"], [0.75 / 5] * 5 + [-0.25 / 3] * 3, rtol=1e-6)
    np.testing.assert_allclose(sampled(result, 1)[0]["recorded"], [-0.1] * 4 + [-0.1 - 0.25], rtol=1e-6)
    assert "column 'credit/BLOCK' for each block. Each number is spread over the tokens of its block." in result.note
    other = {"layout": {"first": ["answer"], "confidence": ["confidence"]}}
    assert "recorded is left out: " in credit_rollouts(file, overrides=other).note
    with pytest.raises(RecipeError, match="the layout also has first"):
        credit_rollouts(file, overrides=other, methods=["recorded"])


def test_the_numbers_of_verl_beside_other_methods_go_to_every_file_and_an_export_keeps_them(tmp_path):
    result = credit(WRITTEN / "verl", output=tmp_path / "out")
    arms = by_name(result)
    assert list(arms) == ["grpo", "rlcr", "bae", "recorded"]
    assert result.file_spans.names == ("plan", "code", "confidence")
    # The second group by hand. acc 1 1 0 0: mean .5, deviation .5774. Brier -.09 -.25 -.16 -.04.
    expected = [[0.5, 0.5, 0.08], [0.5, 0.5, -0.08], [-0.5, -0.5, -0.06], [-0.5, -0.5, 0.06]]  # strata: means -.17, -.1
    assert_close(arms["bae"].credit.block_nk[4:], expected)
    rlcr = [[one] * 3 for one in (0.545, 0.385, -0.525, -0.405)]  # sums .91 .75 -.16 -.04, mean .365
    assert_close(arms["rlcr"].credit.block_nk[4:], rlcr)
    assert arms["grpo"].credit.block_nk[4:, 0].tolist() == pytest.approx([0.866, 0.866, -0.866, -0.866], abs=1e-4)
    rows = pq.read_table(tmp_path / "out" / "credit.parquet").to_pylist()
    for n, (row, score) in enumerate(zip(rows, SCORE, strict=True)):
        assert row["credit/recorded/plan"] == pytest.approx(score)
        by_arm, size = sampled(result, n)
        np.testing.assert_allclose(by_arm["recorded"], score / size, rtol=1e-6)
    assert rows[3]["credit/recorded/confidence"] is None  # it has none
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert "recorded" not in written["statuses"]
    figures = written["methods"]["recorded"]
    assert figures["blocks"]["code"]["mean_abs"] == pytest.approx(0.7125)  # four of 1.1, three of .1, one of 1
    assert figures["dead_strata"] == {}
    html = (tmp_path / "out" / "report.html").read_text()
    assert "that grpo, rlcr, bae would have given to 8 completions, without training, beside the recorded credit." in html
    assert report_folder(tmp_path / "out").read_text() == html
    exported = credit_rollouts(tmp_path / "out" / "credit.parquet", methods=["recorded"])
    for n in range(8):
        np.testing.assert_array_equal(sampled(exported, n)[0]["recorded"], sampled(result, n)[0]["recorded"])
    lone = credit(WRITTEN / "verl", output=tmp_path / "alone", methods=["recorded"])
    assert ([arm.name for arm in lone.applied], lone.file_spans.names) == (["recorded"], ("plan", "code", "confidence"))
    assert "The recorded credit of 8 completions." in (tmp_path / "alone" / "report.html").read_text()


def test_recorded_rewards_go_before_the_text(tmp_path):
    """The text gives 1 1 1 0, the trainer recorded other numbers; only a column of 0 and 1 counts as correctness."""
    options = {"overrides": {"layout": LAYOUT}, "methods": ["bae"]}

    def rewards(**columns):
        file = verl_file(tmp_path / "1.jsonl", WELL_FORMED, gts=["4"] * 4, **columns)
        return credit_rollouts(file, **options).scores.reward_nm[:, 0].tolist()

    assert rewards(score=[0, 0, 1, 1]) == [0, 0, 1, 1]
    assert rewards(score=[0, 0, 1, 1], acc=[1, 0, 0, 1]) == [1, 0, 0, 1]
    assert rewards(score=[0, 0, 1, 1], acc=[1, 0, 0, 1], correct=[0, 0, 0, 1]) == [0, 0, 0, 1]
    assert rewards(score=[-1, -1, 1, 1], format=[0, 0, 0, 0]) == [1, 1, 1, 0]
    options["reward"] = {"correct": "text"}
    assert rewards(score=[0, 0, 1, 1]) == [1, 1, 1, 0]


CENTRED = [1.0, 0.0, 0.0, -1.0]  # form + right = 1 + (2, 1, 1, 0), minus their mean
FORM, RIGHT, ACC = [1.0] * 4, [2.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]


def credit_of(file, name, **options):
    result = credit_rollouts(file, methods=[name], **options)
    return result, result.applied[0].credit.block_nk[:, 0].tolist()


def own_table(**columns):
    """A table of one's own with these columns."""
    columns = {"prompt": ["2+2="] * 4, "completion": WELL_FORMED, **columns}
    rows = [{name: column[n] for name, column in columns.items()} for n in range(4)]
    return lambda folder: write_lines(folder / "mine.jsonl", rows)


def of_trl(name="completions_1.parquet", **columns):
    return lambda folder: trl_file(folder / name, WELL_FORMED, step=[1] * 4, **columns)


LISTED = {"prompt": "2+2=", "completions": WELL_FORMED, "rewards": [3, 2, 2, 1], "acc": ACC}


@pytest.mark.parametrize(
    ("write", "names", "expected"),
    [
        (of_trl(form=FORM, right=RIGHT, advantage=CENTRED), ("form", "right"), CENTRED),
        # verl's score is the reward and `acc` a diagnostic: the reward is neither acc nor score + acc.
        (lambda f: verl_file(f / "1.jsonl", WELL_FORMED, gts=["4"] * 4, score=RIGHT, acc=FORM), ("score",), CENTRED),
        # The sum that verifiers writes is not added to its parts.
        (lambda f: verifiers_file(f / "traces.jsonl", WELL_FORMED, form=FORM, right=RIGHT), ("reward",), CENTRED),
        # A table of one's own says by name which columns are the reward.
        (own_table(**{"rewards/form": FORM, "rewards/right": RIGHT, "length": [9, 1, 1, 1]}), ("form", "right"), CENTRED),
        (own_table(rewards=[{"form": 1, "right": n} for n in RIGHT]), ("form", "right"), CENTRED),
        (own_table(form=FORM, acc=ACC, reward=[3, 2, 2, 1]), ("reward",), CENTRED),
        (own_table(acc=ACC, length=[9, 1, 1, 1]), ("correct",), [0.5, -0.5, -0.5, 0.5]),  # nothing says what length is
        # A step beside prompt and completion is not yet TRL's: TRL writes advantages, too.
        (of_trl("mine.parquet", acc=ACC, length=[9, 1, 1, 1]), ("correct",), [0.5, -0.5, -0.5, 0.5]),
        (lambda f: write_lines(f / "mine.jsonl", [LISTED]), ("rewards",), CENTRED),
    ],
    ids=["TRL", "verl", "verifiers", "prefixed", "an object", "reward", "acc", "no advantage", "a list"],
)
def test_the_rewards_that_the_trainer_added_up_are_added_up(write, names, expected, tmp_path):
    result, credit = credit_of(write(tmp_path), "dr_grpo")
    assert result.arms.schemes["dr_grpo"].names == names
    assert credit == expected
    assert list(result.applied[0].dead) == [" + ".join(names)]


def test_what_the_user_says_goes_before_what_the_trainer_added_up(tmp_path):
    file = of_trl(form=FORM, right=ACC)(tmp_path)
    _, credit = credit_of(file, "dr_grpo", reward={"correct": "right"})
    assert credit == [0.5, -0.5, -0.5, 0.5]
    objective = {"reward": "mine:right", "pays": ["solution"], "weight": 4.0}
    _, credit = credit_of(file, "dr_grpo", overrides={"objectives": [objective]})
    assert credit == [2.0, -2.0, -2.0, 2.0]
    blocks, _ = credit_of(file, "bae", reward={"correct": "right"})
    assert blocks.arms.schemes["bae"].names[:2] == ("correct", "brier")


def recipe(folder):
    (folder / "recipe.yaml").write_text(f"layout: {LAYOUT}\n")
    return folder / "recipe.yaml"


def test_a_group_size_counts_rollouts_not_their_branches(tmp_path):
    other = node("assistant", tagged("4", "0.8"), parent=0, sampled=True)
    rewards = [{"correct": {"score": right, "weight": 1.0}} for right in (1.0, 0.0, 1.0, 0.0)]
    episodes = [episode(trace(tagged("4", "0.9"), "4", reward, extra=[other])) for reward in rewards]
    file = write_lines(tmp_path / "traces.jsonl", episodes)
    result = credit_rollouts(file, recipe=recipe(tmp_path), methods=["rloo"], overrides={"group_size": 2})
    assert result.group_n.tolist() == [0] * 4 + [1] * 4


def test_what_the_trainer_gave_stands_beside_another_method_and_an_export_keeps_the_rollouts(tmp_path):
    """A method over tokens needs one row per rollout; without branches nothing changes."""
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    given = {"tokenizer": tmp_path / "model", "recipe": recipe(tmp_path)}
    options, methods = {**given, "reward": {"correct": "exact"}}, ["grpo", "rloo", "recorded"]
    result = credit(WRITTEN / "verifiers_branches", methods=methods, output=tmp_path / "out", **options)
    grpo, rloo, recorded = result.applied
    assert recorded.credit.block_nk[:, 1].tolist() == [0.5, 0.5, -0.5, -0.5]
    ours, theirs = (arm.advantages(result.table, 0, 4) for arm in (grpo, recorded))
    np.testing.assert_allclose(ours, 2**0.5 * theirs, rtol=1e-3)  # token by token, 0 where no model sampled
    np.testing.assert_allclose(np.abs(theirs[theirs != 0]), 0.5 / 20, rtol=1e-6)  # 20 tokens of a rollout share one vote
    file = tmp_path / "out" / "credit.parquet"
    assert pq.read_table(file)["rollout"].to_pylist() == [0, 0, 1, 1]
    exported = credit_rollouts(file, methods=["rloo"], **given)
    assert exported.table.rollout_n.tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(exported.applied[0].credit.block_nk, rloo.credit.block_nk)
    assert "rollout" not in exported.table.columns
    with pytest.raises(RecipeError, match=r"Method 'gae' .*branches"):
        credit_rollouts(WRITTEN / "verifiers_branches", methods=["gae"], **options)
    assert read_rollouts(WRITTEN / "verifiers").rollout_n is None


BRANCHES = WRITTEN / "verifiers_branches" / "traces.jsonl"


@pytest.fixture
def tokenizer(tmp_path):
    trl_small.tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def write(source, folder, method="recipe", **options):
    rule = {"layout": LAYOUT, "method": "rloo", "per": "completion"}
    usual = {"methods": ["recipe", "bae"], "overrides": rule, "reward": {"correct": "exact"}}
    return credit(source, output=folder, write=method, **{**usual, **options})


def test_what_was_written_is_read_back_as_recorded_and_a_preset_is_written_by_either_name(tmp_path, tokenizer):
    result = write(BRANCHES, tmp_path / "out", "bae", tokenizer=tokenizer)
    table = read_rollouts(tmp_path / "out" / "traces.jsonl", tokenizer=tokenizer)
    (arm,) = [arm for arm in result.applied if arm.name == "bae"]
    expected = arm.advantages(result.table, 0, len(result.table))
    assert table.as_recorded.value == pytest.approx(expected)
    assert len(set(expected.tolist())) > 2
    turns = read_traces(tmp_path / "out" / "traces.jsonl")[0].turns
    assert [len(turn.per_token["advantages"]) for turn in turns] == [2, 9, 9]
    for name in ("bae", "recipe"):
        write(BRANCHES, tmp_path / name, name, tokenizer=tokenizer, methods=["recipe"], overrides={"layout": LAYOUT})
    assert (tmp_path / "bae" / "traces.jsonl").read_bytes() == (tmp_path / "recipe" / "traces.jsonl").read_bytes()


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path, tokenizer):
    with pytest.raises(RecipeError):
        write(BRANCHES, tmp_path / "out", "grpo", tokenizer=tokenizer)
    assert list((tmp_path / "out").glob("[!.]*")) == []


def test_dumps_of_slime_are_written_with_advantages_and_read_back_equal(tmp_path, tokenizer):
    """Right and wrong, leave-one-out over the tokens that were sampled; what was left out of the loss, and tool output, gets 0."""
    texts = [tagged("4", "0.9"), tagged("5", "0.9"), tagged("5", "0.8")]
    samples = []
    for n, text in enumerate(texts):
        ids = trl_small.tokenizer()(text)["input_ids"]
        mask = [0, *[1] * (len(ids) - 1)] if n == 0 else None
        samples.append({
            "group_index": 0, "prompt": "2+2=", "response": text, "tokens": [5, *ids], "response_length": len(ids),
            "loss_mask": mask, "reward": 1.0 * (n == 0), "label": "4", "remove_sample": n == 2, "metadata": {"level": [1]},
        })  # fmt: skip
    (tmp_path / "dumps").mkdir()
    for number in (0, 1):
        torch.save({"rollout_id": number, "samples": samples, "more": "x"}, tmp_path / "dumps" / f"{number}.pt")
    rule = {"methods": ["rloo"], "reward": {"correct": "reward"}, "overrides": {"layout": LAYOUT}}
    result = write(tmp_path / "dumps", tmp_path / "out", "rloo", tokenizer=tokenizer, **rule)
    expected = result.applied[0].advantages(result.table, 0, 6)
    tables = [read_rollouts(tmp_path / "out" / f"{number}.pt", tokenizer=tokenizer) for number in (0, 1)]
    assert np.concatenate([table.as_recorded.value for table in tables]) == pytest.approx(expected)
    assert np.unique(expected).size >= 3
    for number in (0, 1):
        dump = torch.load(tmp_path / "out" / f"{number}.pt", weights_only=True)
        for before, after in zip(samples, dump.pop("samples"), strict=True):
            advantages = after["metadata"].pop("spanwise_advantages")
            assert len(advantages) == after["response_length"]
            assert any(advantages) != after["remove_sample"]
            assert after == before
        assert dump == {"rollout_id": number, "more": "x"}
    assert torch.load(tmp_path / "out" / "0.pt", weights_only=True)["samples"][0]["metadata"]["spanwise_advantages"][0] == 0
