"""A verl run leaves the folder of `spanwise train`: rewards, credit and advantages in it are those that it trained with."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from queue_small import fetch, filled, made, put
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl_runs import GROUP, PROMPTS, STEPS
from verl_small import RECIPE, TEXT, WHOLE, config_of

from rollout_files import records
from spanwise.engines.estimators import outcome_advantages
from spanwise.errors import AlignmentError, DataError, RecipeError
from spanwise.rollouts import read_rollouts
from spanwise.segment import Vocabulary

OWN = "+algorithm.spanwise."
RIGHT, WRONG = "<answer>4</answer>", "<answer>5</answer>"


def set_up(folder, *, recipe=WHOLE, every=1):
    """A trainer of V1 with a run folder and what its `init` finds before it looks for GPUs; a reward manager."""
    kept = f"{OWN}folder={folder / 'run'}", f"{OWN}keep_rollouts={every}"
    trainer, manager = made(folder, *kept, recipe=recipe)
    trainer.tokenizer, trainer.total_training_steps, trainer.global_steps = manager.tokenizer, 2, 0
    return trainer, manager


def credit_once(trainer, batch):
    trainer.global_steps = 1
    with trainer.spanwise.training(trainer, done=0):
        trainer._compute_advantage(batch, {})


def lines_of(run):
    return records(run / "metrics.jsonl")


def rows_in(run, step):
    return pq.read_table(run / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


@pytest.mark.usefixtures("queue")
class TestV1:
    def test_every_second_batch_by_hand(self, tmp_path):
        """rloo of rewards 1, 0, 0 is 1, -1/2, -1/2, and of 0, 1 it is -1, 1; a row that verl fills up with is in no file."""
        (trainer, manager), folder = set_up(tmp_path, every=2), tmp_path / "run"
        batch = filled(manager, [[[RIGHT], [WRONG], [WRONG]], [[WRONG], [RIGHT]]])
        with trainer.spanwise.training(trainer, done=0):
            for trainer.global_steps in (1, 2):
                padded = upsample_batch_to_divisible_size(batch, 4, manager.tokenizer.eos_token_id)
                assert len(padded) == 8
                trainer._compute_advantage(padded, {})
        assert [file.name for file in (folder / "rollouts").iterdir()] == ["step_000002.parquet"]
        rows = rows_in(folder, 2)
        assert [row["group"] for row in rows] == [0, 0, 0, 1, 1]
        assert [row["reward/correct"] for row in rows] == [1.0, 0.0, 0.0, 0.0, 1.0]
        assert [row["credit/rloo/all"] for row in rows] == pytest.approx([1.0, -0.5, -0.5, -1.0, 1.0])
        assert [sum(row["advantages/rloo"]) for row in rows] == pytest.approx([1.0, -0.5, -0.5, -1.0, 1.0], rel=1e-5)
        said = [manager.tokenizer.decode(row["completion_ids"]) for row in rows]
        assert said == [RIGHT, WRONG, WRONG, WRONG, RIGHT]
        assert [row["answer"] for row in rows] == ["4"] * 5
        assert {row["prompt"] for row in rows} == {manager.tokenizer.decode([1, 2])}
        lines = lines_of(folder)
        assert [line["step"] for line in lines] == [1, 2]
        assert [line["rewards/correct/mean"] for line in lines] == pytest.approx([0.4, 0.4])
        assert all(line["credit/all/mean_abs"] == pytest.approx(4 / 5) for line in lines)
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["steps"], summary["method"], summary["task"]) == (2, "rloo", "own")
        assert (folder / "tokenizer" / "tokenizer.json").is_file()

    def test_outputs_of_one_rollout_and_tool_output(self, tmp_path):
        (trainer, manager), folder = set_up(tmp_path), tmp_path / "run"
        ids, tool = (manager.tokenizer(text)["input_ids"] for text in ("So " + RIGHT, WRONG))
        mask = [1] * len(ids) + [0] * len(tool) + [1]
        batch = filled(manager, [[["So", RIGHT], ([ids + tool + ids[:1]], [mask]), [WRONG]]])
        credit_once(trainer, batch)
        rows = rows_in(folder, 1)
        assert [row["rollout"] for row in rows] == [0, 0, 1, 2]
        assert rows[2]["trainable"] == [bool(flag) for flag in mask]
        assert [value != 0 for value in rows[2]["advantages/rloo"]] == rows[2]["trainable"]
        first, second, third, fourth = (sum(row["advantages/rloo"]) for row in rows)
        # rewards 1, 1, 0: rloo compares each with the mean of the two others
        assert [first + second, third, fourth] == pytest.approx([0.5, 0.5, -1.0], rel=1e-5)

    def test_turns_are_rows(self, tmp_path):
        recipe = "layout: {a: [answer]}\nobjectives: [{reward: correct, pays: [a], scope: turn}]\n"
        trainer, manager = set_up(tmp_path, recipe=recipe)
        right, wrong = (manager.tokenizer(text)["input_ids"] for text in (RIGHT, WRONG))
        talk = [[*right, 7, 7, *wrong]], [[1] * len(right) + [0, 0] + [1] * len(wrong)]
        credit_once(trainer, filled(manager, [[talk, [WRONG]]]))
        rows = rows_in(tmp_path / "run", 1)
        assert [row["rollout"] for row in rows] == [0, 0, 1]
        assert [row["text"] for row in rows] == [RIGHT, WRONG, WRONG]
        assert [row["completion_ids"] for row in rows] == [right, wrong, wrong]
        assert [row["reward/correct"] for row in rows] == [1.0, 0.0, 0.0]
        size = len(right) + len(wrong)  # votes 1/2 and 0: the mean is 1/4, shared over the tokens of a rollout
        expected = [0.75 / size, -0.25 / size, -0.25 / len(wrong)]
        assert [row["advantages/bae"][0] for row in rows] == pytest.approx(expected, rel=1e-5)

    def test_what_was_rejected_is_recorded_as_trained_with_zero(self, tmp_path):
        trainer, manager = set_up(tmp_path)
        batch = filled(manager, [[[RIGHT], [WRONG], [WRONG]]])
        (masks,) = fetch(batch, "response_mask")
        masks[1] = torch.zeros_like(masks[1])
        put(batch, response_mask=masks)
        credit_once(trainer, batch)
        rows = rows_in(tmp_path / "run", 1)
        # the others are still compared with it
        assert [sum(row["advantages/rloo"]) for row in rows] == pytest.approx([1.0, 0.0, -0.5], rel=1e-5)
        assert [row["credit/rloo/all"] for row in rows] == pytest.approx([1.0, -0.5, -0.5])
        advantages, returns = fetch(batch, "advantages", "returns")
        assert not advantages[1].any()
        assert all(map(torch.equal, advantages, returns))

    def test_several_batches_of_one_step_are_counted(self, tmp_path):
        """`separate_async` may update several times between two broadcasts of its weights; none of it is written over."""
        trainer, manager = set_up(tmp_path)
        batch, trainer.parameter_sync_step, trainer.total_training_steps = filled(manager, [[[RIGHT], [WRONG]]]), 2, 3
        with trainer.spanwise.training(trainer, done=0):
            for trainer.global_steps in (1, 2):
                for trainer.local_trigger_step in (0, 1):
                    trainer._compute_advantage(batch, {})
        assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3, 4]
        assert len(list((tmp_path / "run" / "rollouts").iterdir())) == 4
        recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
        assert (recipe["steps"], recipe["prompts"]) == (6, 1)  # of two prompts a step, half in each batch

    def test_a_folder_that_holds_a_run_is_refused_before_anything_is_sampled(self, tmp_path):
        first, manager = set_up(tmp_path)
        credit_once(first, filled(manager, [[[RIGHT], [WRONG]]]))
        before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
        second, _ = set_up(tmp_path)
        with pytest.raises(DataError, match="already holds a run"):
            second.fit(None)  # verl's own would fail at None
        assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
        second.global_steps = 1  # as after a checkpoint of step 1
        with second.spanwise.training(second, done=1):
            second.global_steps = 2
            second._compute_advantage(filled(manager, [[[RIGHT], [WRONG]]]), {})
        assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2]

    def test_another_tokenizer_than_the_reward_workers_is_caught(self, tmp_path):
        trainer, manager = set_up(tmp_path, recipe=RECIPE)
        trainer.spanwise._vocabulary = Vocabulary(tuple(b"x" for _ in range(len(manager.tokenizer))))
        batch = filled(manager, [[[TEXT.format(4, 0.9)], [TEXT.format(5, 0.2)]]])
        with pytest.raises(AlignmentError, match="found different blocks"):
            credit_once(trainer, batch)


def test_an_estimator_of_one_reward_keeps_nothing_and_says_so(tmp_path):
    config = config_of(tmp_path, f"{OWN}folder={tmp_path / 'run'}", name="spanwise_rloo")
    with pytest.raises(RecipeError, match=r"algorithm\.spanwise\.folder"):
        outcome_advantages("rloo", torch.ones(2, 1), torch.ones(2, 1), index=["a", "a"], config=config.algorithm)


@pytest.fixture(params=["sync", "v0"])
def finished(request, whole_run):
    return whole_run(request.param)


@pytest.mark.timeout(900)
class TestWholeRuns:
    def test_the_folder_holds_what_verls_loss_took(self, finished):
        folder = finished.folder / "run"
        assert [line["step"] for line in lines_of(folder)] == list(range(1, STEPS + 1))
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["steps"] == STEPS
        column = f"advantages/{summary['method']}"
        for step in finished.trained_steps:
            rows, trained = rows_in(folder, step), finished.trained(step)
            assert len(rows) == len(trained) == PROMPTS * GROUP
            assert sum(abs(value) for row in rows for value in row[column]) > 0
            ours = sorted((row["completion_ids"], row[column]) for row in rows)
            theirs = sorted((row["ids"], row["advantages"]) for row in trained)
            for (ids, advantages), (their_ids, loss) in zip(ours, theirs, strict=True):
                assert ids == their_ids
                # Both losses average over the tokens of a completion, which the advantages undo.
                assert [value * len(ids) for value in advantages] == pytest.approx(loss, abs=1e-5)
        table = read_rollouts(folder)
        assert (table.source, table.has_ids, len(table)) == ("spanwise", True, STEPS * PROMPTS * GROUP)

    def test_the_update_is_told_as_verl_logs_it(self, finished):
        pairs = {
            "loss": "actor/loss", "grad_norm": "actor/grad_norm", "learning_rate": "actor/lr",
            "completions/mean_length": "response_length/mean", "completions/clipped_ratio": "response_length/clip_ratio",
            "entropy": "actor/entropy",
        }  # fmt: skip
        if finished.name == "v0":
            del pairs["entropy"]  # V0's loop keeps it for itself
        for line, logged in zip(lines_of(finished.folder / "run"), finished.metrics, strict=True):
            expected = {ours: logged.get(theirs) for ours, theirs in pairs.items()}
            assert {ours: line.get(ours) for ours in pairs} == expected
            assert line["step"] not in finished.trained_steps or line["grad_norm"] > 0
            assert line["completions/mean_length"] > 1
