"""Dynamic sampling: useless groups are replaced by groups of other prompts, as if those had been sampled at once."""

from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from spanwise import Objective
from trl_small import OBJECTIVES, SAID, prompts, say, scripted, step, trainer

#: A group in which no block gets credit: all right, all equally sure.
USELESS = [SAID[0]] * 4
#: All right, but not equally sure: `correct` is the same for all, the confidence is not.
SURE = [replace(SAID[0], pieces=SAID[n].pieces, confidence=SAID[n].confidence) for n in (0, 1, 0, 1)]
#: For the prompts 2+2= and 1+2=: some right, some wrong.
FIRST, SECOND = SAID[:4], SAID[4:]


class Calls:
    """A rollout function with an answer for each call; records the prompts of each call."""

    def __init__(self, *scripts):
        self.scripts, self.asked = list(scripts), []

    def __call__(self, batch, trainer):
        self.asked.append(list(batch))
        return scripted(self.scripts.pop(0))(batch, trainer)


def sampled(folder, calls, *, objectives=OBJECTIVES, train_dataset=None, dynamic_sampling="credit", **options):
    extra = {"rollout_func": calls, "train_dataset": train_dataset or prompts(6), "objectives": objectives}
    run = trainer(folder, extra=extra, dynamic_sampling=dynamic_sampling, **options)
    step(run)
    return run


def test_a_useless_group_gives_way_and_the_batch_is_as_if_it_had_been_sampled(tmp_path):
    # 2+2= is useless, twice; the third time there is a useful group for a prompt of the dataset's.
    calls = Calls([*USELESS, *SECOND], USELESS, FIRST)
    run = sampled(tmp_path / "sampled", calls)
    assert [len(batch) for batch in calls.asked] == [8, 4, 4]
    final_prompts = [*calls.asked[2], *calls.asked[0][4:]]
    assert list(run.last_rollouts.prompts) == final_prompts
    plain = sampled(tmp_path / "plain", Calls([*FIRST, *SECOND]), dynamic_sampling=None)
    assert torch.equal(run.last_rollouts.batch.ids_nt, plain.last_rollouts.batch.ids_nt)
    answers = {"2+2=": "4", "1+2=": "3"}
    assert run.last_rollouts.batch.columns["answer"] == [answers[prompt] for prompt in final_prompts]
    logged = run.state.log_history[0]
    assert (logged["sampling/groups"], logged["sampling/useless"]) == (2.0, 0.0)
    assert run.last_rollouts.advantages_nt.view(2, -1).any(dim=1).all()


@pytest.mark.parametrize(("kind", "calls"), [("credit", 1), ("correct", 2)])
def test_a_group_of_one_outcome_is_useful_for_the_confidence_and_useless_for_the_answer(tmp_path, kind, calls):
    script = Calls([*SURE, *SECOND], FIRST)
    run = sampled(tmp_path, script, dynamic_sampling=kind)
    assert len(script.asked) == calls
    assert run.state.log_history[0]["sampling/useless"] == 0.0
    assert run.last_rollouts.credit.block_nk[:4, 1].any()


@pytest.mark.filterwarnings("ignore:Step 0. 1 of 8 completions leave out confidence:UserWarning")
def test_a_reward_that_is_missing_differs_from_nothing(tmp_path):
    nearly = [*USELESS[:3], say("ab", "4", None, 1.0)]
    calls = Calls([*nearly, *SECOND], FIRST)
    sampled(tmp_path, calls, objectives=(OBJECTIVES[0], replace(OBJECTIVES[1], if_missing=None)), dynamic_sampling="brier")
    assert calls.scripts == []


@pytest.mark.parametrize(("scripts", "times"), [([[*FIRST, *SECOND]], 1), ([[*USELESS, *SECOND], FIRST], 3)])
def test_rewards_are_computed_again_only_after_an_exchange(tmp_path, scripts, times):
    """What rewards log of groups that gave way is not in TRL's table and metrics: only the 8 that are trained."""
    counts, table = [], []

    def counted(completions, answer, trainer_state, log_metric, log_extra, **columns):
        assert trainer_state.global_step == 0
        counts.append(len(columns["completion_ids"]))
        log_metric("completions", len(completions))
        log_extra("text", completions)
        return [float(f"<answer>{gold}</answer>" in text) for text, gold in zip(completions, answer, strict=True)]

    objectives = (Objective(counted, pays="solution", name="correct"), OBJECTIVES[1])
    extra = {"rollout_func": Calls(*scripts), "train_dataset": prompts(6), "objectives": objectives}
    run = trainer(tmp_path, extra=extra, dynamic_sampling="credit")
    run._logs["extra"]["text"] = table  # TRL's own keeps only the newest 8
    step(run)
    assert len(counts) == times
    assert table == list(run.last_rollouts.completions)
    assert run.state.log_history[0]["completions"] == 8.0


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_stays_useless_after_the_last_round_is_trained_with_credit_0(rounds, tmp_path):
    calls = Calls([*USELESS, *SECOND], *[USELESS] * rounds)
    run = sampled(tmp_path, calls, dynamic_sampling_rounds=rounds)
    assert calls.scripts == []
    assert not run.last_rollouts.advantages_nt[:4].any()
    logged = run.state.log_history[0]
    assert (logged["sampling/groups"], logged["sampling/useless"]) == (1 + rounds / 2, 0.5)


def test_the_prompts_that_are_drawn_belong_to_the_seed_and_the_generation_batch(tmp_path):
    """Four generation batches make one step. Each draws one of 64 prompts."""
    questions = Dataset.from_list([{"prompt": f"{n}+2=", "answer": "4"} for n in range(64)])
    shape = {"steps_per_generation": 1, "gradient_accumulation_steps": 4, "dynamic_sampling_rounds": 1}

    def drawn(name, seed):
        calls = Calls(*[[*USELESS, *SECOND], USELESS] * 4)
        sampled(tmp_path / name, calls, train_dataset=questions, seed=seed, **shape)
        return [prompts[0] for prompts in calls.asked[1::2]]

    first = drawn("a", 1)
    assert drawn("b", 1) == first != drawn("c", 2)
    assert len(set(first)) > 1


@pytest.mark.parametrize("to_training", [False, True], ids=["as called", "the model is left in training mode"])
def test_nothing_is_sampled_twice_in_an_evaluation(tmp_path, to_training):
    """TRL's continuous batching, too, leaves the model in training mode."""

    def rollout(batch, trainer):
        trainer.model.train(to_training)
        return scripted(USELESS)(batch, trainer)

    extra = {"rollout_func": rollout, "eval_dataset": prompts(2)}
    run = trainer(tmp_path, extra=extra, dynamic_sampling="credit", per_device_eval_batch_size=8)
    assert "eval_sampling/groups" not in run.evaluate()
    assert run.last_rollouts.mode == "eval"
