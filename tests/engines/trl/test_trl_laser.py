"""A self-rewarding score in the real trainer: the whole loss against loops, what is mixed, what is never read, bad input."""

import json
import math
import statistics
import warnings
from dataclasses import replace

import pytest
import torch

import trl_small as small
from spanwise import DataError, Laser, RecipeError
from spanwise.objective import Objective

TOKEN = "?"  # the unknown token, which no script says
BETA, ALPHA, MIX = 1.0, 0.3, 0.25

#: A random policy writes every token, unless it is kept from it; the score is read from its own logits.
UNWRITTEN = {"suppress_tokens": [small.PIECES.index(TOKEN)]}
#: The last of the first group and the first of the second were cut off: no end, so no score.
CUT = [small.cut(reply) if i in (3, 4) else reply for i, reply in enumerate(small.SAID)]
CORRECT = (Objective("correct", pays=("solution",), options={"verify": "exact"}, baseline="group"),)


def laser(**changes):
    mixing = {"self_rewarding_warmup": 0, "threshold": 0.0, "scale": "none"} if changes.get("mix") else {"mix": 0.0}
    return Laser(TOKEN, **{"beta": BETA, "alpha": ALPHA, **mixing, **changes})


def run_with(folder, mine, *, objectives=CORRECT, extra=None, **options):
    rule = small.scheme(objectives=objectives, credit={"laser": mine})
    return small.trainer(folder, extra={"scheme": rule, **(extra or {})}, **options)


def end_logps(model, replies):
    """log pi(token | prompt, completion, end) of each completion on its own; None if it did not end."""
    logps = []
    for reply, question in zip(replies, small.questions(replies), strict=True):
        ids = [small.PIECES.index(sign) for sign in (*question, *reply.pieces, TOKEN)]
        logp_t = small.completion_logps(model, ids[:-1], ids[-1:])
        logps.append(logp_t[0] if reply.pieces[-1] == "<eos>" else None)
    return logps


def solution_advantages(replies, scores=None):
    """Right minus the mean of the group, mixed with the score minus its mean if there is a score."""
    adv_n = []
    for i, reply in enumerate(replies):
        peers = [j for j in range(len(replies)) if j // small.GROUP == i // small.GROUP]
        adv = reply.right - statistics.mean(replies[j].right for j in peers)
        if scores is not None and scores[i] is not None:
            clipped = {j: min(max(scores[j], 0.0), 1.0) for j in peers if scores[j] is not None}
            if len(clipped) > 1 and statistics.stdev(clipped.values()) > 0:
                adv = (1 - MIX) * adv + MIX * (clipped[i] - statistics.mean(clipped.values()))
        adv_n.append(adv)
    return adv_n


def whole_gradient(model, replies, *, reference, mixed=False):
    """-(1/N) sum of advantage over tokens of the solution, plus ALPHA times the weighted squared error; loops, no padding."""
    at_end = end_logps(model, replies)
    scores = [None if logp is None else BETA * (logp - reference) for logp in at_end]
    adv = solution_advantages(replies, [None if s is None else float(s.detach()) for s in scores] if mixed else None)
    total = 0.0
    for i, (reply, row) in enumerate(zip(replies, small.log_probs(model, replies), strict=True)):
        for t, block in enumerate(reply.blocks):
            if block == 0:
                total = total - adv[i] * (row[t] - row[t].detach()).exp() / reply.blocks.count(0) / len(replies)
    ends = [i for i, score in enumerate(scores) if score is not None]
    right = sum(replies[i].right == 1 for i in ends)
    for i in ends:
        weight = len(ends) / (2 * (right if replies[i].right == 1 else len(ends) - right))
        total = total + ALPHA * weight * (scores[i] - replies[i].right) ** 2 / len(ends)
    return small.gradient_of(model, total)


def reference_of(replies):
    return statistics.mean(float(logp.detach()) for logp in end_logps(small.policy(), replies) if logp is not None)


@pytest.mark.parametrize(("loss_type", "mix"), [("grpo", 0.0), ("dapo", 0.0), ("dr_grpo", MIX)])
def test_the_gradient_of_the_whole_loss(tmp_path, loss_type, mix):
    shape = {"loss_type": loss_type, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    run, reference = run_with(tmp_path, laser(mix=mix), scripts=CUT, **shape), reference_of(CUT)
    want, plain = (whole_gradient(small.policy(), CUT, reference=reference, mixed=mixed) for mixed in (mix > 0, False))
    assert small.largest_difference(small.step(run), want) < small.EXACT
    assert not mix or small.largest_difference(plain, want) > 100 * small.EXACT  # mixing makes a difference
    assert run.parts["laser"].measured["completions"] == 6
    assert run.parts["laser"].mode.reference == pytest.approx(reference, abs=1e-5)


def test_the_kl_s_reference_policy_is_not_taken_for_the_one_that_sampled(tmp_path):
    """With several updates and a KL term TRL scores both; the score is the policy's own."""
    options = {"beta": 0.1, "num_iterations": 2, "max_steps": 2, "learning_rate": 1e-3}
    run = run_with(tmp_path / "run", laser(mix=MIX), extra={"model": small.beside_a_reference(tmp_path)}, **options)
    run.train()
    want = [BETA * (float(logp.detach()) - reference_of(small.SAID)) for logp in end_logps(small.policy(), small.SAID)]
    torch.testing.assert_close(run.last_rollouts.batch.score_n, torch.tensor(want), atol=1e-5, rtol=0)


def test_one_more_position_changes_nothing_of_the_other_terms(tmp_path):
    """If the verification loss has no weight, the gradient is that of a run without a score, KL and entropy bonus included."""
    gradients = []
    options = {"beta": 0.2, "entropy_coef": 0.1, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    for mine in ({}, {"laser": laser(alpha=1e-12)}):
        extra = {"scheme": small.scheme(credit=mine), "model": small.beside_a_reference(tmp_path)}
        run = small.trainer(tmp_path / f"{len(mine)}", scripts=small.SAID_WITH_TOOLS, tools=True, extra=extra, **options)
        gradients.append(small.step(run))
    assert small.largest_difference(gradients[1], gradients[0]) < 1e-7


def test_the_score_of_a_run_that_does_not_mix_is_filled_in_by_the_training_s_own_pass(tmp_path):
    shape = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    run = run_with(tmp_path, laser(reference=-5.0), scripts=CUT, **shape)
    part, passes = run.parts["laser"], []
    part.measured = {"reference": -5.0}  # as after a first batch, so that nothing asks for a pass
    forward = part.forward
    part.forward = lambda *args, **kwargs: passes.append(1) or forward(*args, **kwargs)
    run.train()
    assert len(passes) == 4  # the micro-batches of the training and nothing else
    want = [math.nan if logp is None else BETA * (float(logp.detach()) + 5.0) for logp in end_logps(small.policy(), CUT)]
    torch.testing.assert_close(run.last_rollouts.batch.score_n, torch.tensor(want), atol=1e-5, rtol=0, equal_nan=True)
    # Each completion counts once, however the micro-batches lie.
    for name, right in (("laser/score_right", 1), ("laser/score_wrong", 0)):
        scores = [score for score, reply in zip(want, CUT, strict=True) if reply.right == right and not math.isnan(score)]
        assert run.state.log_history[0][name] == pytest.approx(statistics.mean(scores), rel=1e-4)


def test_the_warm_ups_are_counted_in_generation_batches(tmp_path):
    run = run_with(tmp_path, laser(mix=MIX, reasoning_warmup=1, self_rewarding_warmup=1), max_steps=3, learning_rate=1e-3)
    run.train()
    losses = [line.get("laser/loss") for line in run.state.log_history if "loss" in line]
    assert [loss is not None for loss in losses] == [False, True, True]


def test_a_run_that_ends_before_the_mixing_begins_is_refused(tmp_path):
    """Four steps on batches of two steps are two batches."""
    options = {"max_steps": 4, "per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 1}
    with pytest.raises(RecipeError, match="be mixed in after 2 generation batches, but the run has only 2"):
        run_with(tmp_path / "two", laser(mix=MIX, self_rewarding_warmup=2), **options).train()
    run_with(tmp_path / "one", laser(mix=MIX, self_rewarding_warmup=1), **options).train()


def test_rollouts_that_say_their_turns_are_refused_at_the_first_step_and_not_once_scores_are_mixed(tmp_path):
    def rollout(batch, trainer):
        return {**small.scripted()(batch, trainer), "turns": [[{"anchor": "0"}] for _ in batch]}

    run = run_with(tmp_path, laser(mix=MIX, self_rewarding_warmup=5), extra={"rollout_func": rollout}, max_steps=6)
    with pytest.raises(RecipeError, match="several turns"):
        run.train()


@pytest.mark.filterwarnings("ignore:Step 0:UserWarning", "ignore:Every advantage:UserWarning")
def test_what_is_overheard_in_generation_is_what_a_pass_would_say(tmp_path):
    options = {"generation_kwargs": UNWRITTEN, "per_device_train_batch_size": 32, "temperature": 1.5}
    extra = {"rollout_func": None, "train_dataset": small.prompts(8)}
    run = run_with(tmp_path, laser(mix=MIX), objectives=small.OBJECTIVES, extra=extra, **options)
    part, record = run.parts["laser"], {}
    read_ends, known_logps = part._read_ends, part.known_logps

    def listen(ended_n, output):
        record["heard"] = known_logps(ended_n, output)
        record["ended"] = ended_n
        return record["heard"]

    def read_all(batch, output, wanted_n):
        record["passed"] = read_ends(batch, output, record["ended"])
        record["wanted"] = wanted_n
        return read_ends(batch, output, wanted_n)

    part.known_logps, part._read_ends = listen, read_all
    run.train()
    heard_n, ended_n = record["heard"], record["ended"]
    both_n = ~heard_n.isnan()
    assert 0 < int(both_n.sum()) < int(ended_n.sum())
    torch.testing.assert_close(heard_n[both_n], record["passed"][both_n].to(heard_n), atol=1e-6, rtol=0)
    assert torch.equal(record["wanted"], ended_n & ~both_n)
    assert torch.equal(run.last_rollouts.batch.score_n.isnan(), ~ended_n)
    assert not run.model._forward_hooks


def test_a_resumed_run_goes_on_with_its_reference_and_from_no_checkpoint_without_one(tmp_path):
    options = {"learning_rate": 0.05, "save_strategy": "steps", "save_steps": 1}
    first = run_with(tmp_path, laser(mix=MIX), max_steps=1, **options)
    first.train()
    saved = json.loads((tmp_path / "checkpoint-1" / "laser.json").read_text())
    assert saved["reference"] == pytest.approx(reference_of(small.SAID), abs=1e-5)
    resumed = run_with(tmp_path, laser(mix=MIX), max_steps=2, **options)
    resumed.train(resume_from_checkpoint=True)
    part = resumed.parts["laser"]
    assert part.mode.reference == saved["reference"]
    with pytest.raises(DataError, match="is of a run without laser"):
        part.restore(tmp_path)
    (tmp_path / "laser.json").write_text(json.dumps({"token": "x", "id": 3, "reference": -4.0}))
    with pytest.raises(DataError, match=r"reserved token 3, .* the id 20"):
        part.restore(tmp_path)


WRITES = [replace(small.SAID[0], pieces=[TOKEN, *small.SAID[0].pieces], blocks=[0, *small.SAID[0].blocks]), *small.SAID[1:]]
GRADED = (*CORRECT, Objective("brier", pays=("confidence",), baseline="group"))


@pytest.mark.parametrize(
    ("error", "match", "mine", "more"),
    [
        (RecipeError, r"sampled in 1 of 8", {}, {"scripts": WRITES}),
        (RecipeError, r"the score is at most 0\.1", {"beta": 0.1}, {}),  # with the reference that it measured
        (DataError, r"none of the 8", {}, {"scripts": [small.cut(reply) for reply in small.SAID]}),
        (ValueError, r"whose reward is 1 or 0", {"verdict": "brier"}, {"objectives": GRADED}),
    ],
)  # beside those of docs/border.md
def test_a_score_that_cannot_work_is_refused_by_the_first_batch(tmp_path, error, match, mine, more):
    with pytest.raises(error, match=match):
        run_with(tmp_path, laser(**mine), **more).train()


def test_a_trained_policy_is_pointed_out_and_its_own_reference_is_not(tmp_path):
    mean = reference_of(small.SAID)
    with pytest.warns(UserWarning, match=r"scores start at 0\.4"):
        run_with(tmp_path / "near", laser(reference=mean - 0.4)).train()
    with warnings.catch_warnings(action="error", category=UserWarning):
        run_with(tmp_path / "own", laser(reference=mean + 0.01)).train()


def test_an_evaluation_reads_no_score_and_changes_nothing(tmp_path):
    run = run_with(tmp_path, laser(mix=MIX), extra={"eval_dataset": small.prompts()}, per_device_eval_batch_size=8)
    metrics = run.evaluate()
    assert run.last_rollouts.batch.score_n is None
    assert run.parts["laser"].measured is None
    assert math.isfinite(metrics["eval_loss"])
