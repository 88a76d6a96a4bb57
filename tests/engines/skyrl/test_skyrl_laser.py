"""LaSeR under SkyRL: a reserved token in real rows, its score in the credit, and the gradient of a real training step."""

import json
from dataclasses import replace

import pytest
import skyrl_small as small
import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

from spanwise import Batch, advantages, credit_batch, read
from spanwise.engines.skyrl.config import check
from spanwise.errors import RecipeError
from spanwise.modes.laser.logps import end_logp

EOS, TOKEN = 1, len(small.WORDS) + 1  # a row of the embedding behind the tokenizer's last token
LASER = {
    "token": TOKEN, "verdict": "right", "reference": -4.0, "beta": 0.3, "alpha": 0.2, "mix": 0.5, "threshold": 0.0,
    "self_rewarding_warmup": 0,
}  # fmt: skip
SOLVED = "objectives: [{reward: environment, pays: turn, name: right, options: {column: solved}}]"


def recipe(**laser):
    return f"layout: {{turn: []}}\nmethod: rloo\n{SOLVED}\nlaser: {json.dumps({**LASER, **laser})}\n"


class Ending(small.SignsGenerator):
    """Says the right answer in every other conversation, says several things after it, and ends in all but every fifth."""

    def play(self, plans):
        return [[small.FIRST_SAID + (small.right(plan[0]) + n % 2) % small.SIGNS] for n, plan in enumerate(plans)]

    def flat(self, output, trajectory, plan, answers):
        super().flat(output, trajectory, plan, answers)
        n = len(output["response_ids"])
        more = [3] * (n % 3) + ([] if n % 5 == 0 else [EOS])
        output["response_ids"][-1] += more
        output["loss_masks"][-1] += [1] * len(more)


@pytest.fixture
def signs(tmp_path, monkeypatch):
    policy = small.policy

    def wider(seed=0):
        model = policy(seed)
        model.resize_token_embeddings(len(small.WORDS) + 2)
        torch.manual_seed(seed)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.4)
        return model

    monkeypatch.setattr(small, "policy", wider)
    return small.write_dataset(tmp_path / "signs.jsonl", size=6, turns=(1,))


def trainer_of(data, *, dp=1, laser=None, **changes):
    cfg = small.config(data, recipe=recipe(**(laser or {})), prompts=3, samples=5, **changes)
    trainer = small.trainer(cfg, dp=dp)
    trainer.generator = Ending(trainer.dispatch.model, cfg)
    trainer.global_step = 1
    return trainer


def by_hand(trainer, data):
    """Prompts, responses without the token, their scores, and the batch that the pipeline reads."""
    output = trainer.generator.outputs[-1]
    prompts, ids = output["prompt_token_ids"], output["response_ids"]
    ended = [[*prompt, *row] for prompt, row in zip(prompts, ids, strict=True) if row[-1:] == [EOS]]
    logp_n = torch.full((len(ids),), torch.nan)
    logp_n[torch.tensor([row[-1:] == [EOS] for row in ids])] = end_logp(trainer.dispatch.model, ended, TOKEN, pad=0)
    score_n = LASER["beta"] * (logp_n - LASER["reference"])
    columns = {"solved": output["solved"], "environment": output["rewards"]}
    return prompts, ids, score_n, Batch.jagged(ids, data.metadata["uids"][: len(ids)], columns=columns)


def test_what_ended_has_one_more_token_that_nothing_trains(signs):
    trainer = trainer_of(signs)
    data = small.batch_of(trainer)
    output = trainer.generator.outputs[-1]
    ids, uids = output["response_ids"], [str(n) for n, _ in enumerate(output["response_ids"])]
    ended = [row[-1] == EOS for row in ids]
    assert 0 < sum(ended) < len(ended)
    assert (data["sequences"][:, -1] == TOKEN).tolist() == ended
    assert (data["loss_mask"][:, -1] == 0).tolist() == ended
    assert all(TOKEN not in row for row in ids)
    # It earns nothing, and was not sampled.
    filled = {**output, "rollout_logprobs": [[-0.5] * len(row) for row in ids], "stop_reasons": None, "rollout_metrics": {}}
    trained, _ = trainer.postprocess_generator_output(filled, uids)
    for n, row in enumerate(ids):
        behind = [0.0] * (row[-1] == EOS)
        assert trained["rollout_logprobs"][n] == [-0.5] * len(row) + behind
        assert trained["rewards"][n] == [0.0] * (len(row) - 1) + [output["rewards"][n]] + behind


def test_the_advantages_are_those_of_the_pipeline(signs):
    trainer = trainer_of(signs)
    data = small.batch_of(trainer)
    _, ids, score_n, batch = by_hand(trainer, data)
    trainer.compute_advantages_and_returns(data)
    scheme, reading = trainer.scheme, read(batch, trainer.scheme, trainer.vocabulary)
    batches = (replace(batch, score_n=scores) for scores in (None, score_n))
    plain_nt, mixed_nt = (advantages(credit_batch(reading, one, scheme), reading.spans, scheme) for one in batches)
    assert not torch.allclose(plain_nt, mixed_nt, atol=1e-3)
    for n, row in enumerate(ids):
        adv_t = trainer.last_advantages[n][data["loss_mask"][n] > 0]
        torch.testing.assert_close(adv_t, mixed_nt[n, : len(row)], atol=1e-6, rtol=1e-5)
    assert trainer.all_metrics["laser/loss"] > 0
    assert 0 <= trainer.all_metrics["laser/accuracy"] <= 1


@pytest.mark.parametrize("kind", ["regular", "dual_clip"])
@pytest.mark.parametrize("reduction", ["token_mean", "prompt_mean", "sequence_mean", "seq_mean_token_sum_norm"])
def test_the_gradient_of_a_step_is_that_of_a_loop_over_completions(signs, reduction, kind):
    """SkyRL fills 15 rows up to 16 with a copy of the first, which takes no part."""
    changes = {"loss_reduction": reduction, "policy_loss_type": kind, "max_seq_len": 32}
    trainer = trainer_of(signs, dp=4, **{f"trainer.algorithm.{name}": value for name, value in changes.items()})
    data = small.batch_of(trainer)
    prompts, ids, _, _ = by_hand(trainer, data)
    model, old = trainer.dispatch.model, data["action_log_probs"].clone()
    trainer.compute_advantages_and_returns(data)
    torch.manual_seed(1)
    with torch.no_grad():  # another policy than the one that sampled
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    trainer.dispatch.optim_step = lambda model: 0.0
    trainer._execute_training_step("policy", data)
    gradient = {name: weight.grad.clone() for name, weight in model.named_parameters()}

    solved, total, errors = trainer.generator.outputs[-1]["solved"], 0.0, []
    right = [v for v, row in zip(solved, ids, strict=True) if row[-1] == EOS]
    weights = {v: len(right) / (2 * right.count(v)) for v in (0.0, 1.0)}
    for n, (prompt, reply) in enumerate(zip(prompts, ids, strict=True)):
        logp_tv = model(input_ids=torch.tensor([prompt + reply])).logits[0].log_softmax(dim=-1)
        adv_t = trainer.last_advantages[n][data["loss_mask"][n] > 0]
        for t, token in enumerate(reply):
            ratio = (logp_tv[len(prompt) + t - 1, token] - old[n][data["loss_mask"][n] > 0][t]).exp()
            surrogate = torch.min(ratio * adv_t[t], ratio.clamp(0.8, 1.2) * adv_t[t])
            if kind == "dual_clip" and adv_t[t] < 0:
                surrogate = torch.max(surrogate, 3.0 * adv_t[t])
            total = total - surrogate / len(ids)
        if reply[-1] == EOS:
            score = LASER["beta"] * (logp_tv[-1, TOKEN] - LASER["reference"])
            errors.append(weights[solved[n]] * (score - solved[n]) ** 2)
    total = total + LASER["alpha"] * sum(errors) / len(errors)
    model.zero_grad()
    total.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(gradient[name], weight.grad, atol=1e-6, rtol=1e-4)


def test_the_other_losses_see_rows_without_a_lesson(signs):
    """At the token's place they get a ratio of 1 and no advantage; the difference in the loss is the verification loss."""
    for kind in ("gspo", "cispo", "sapo"):
        changes = {"policy_loss_type": kind, "loss_reduction": "sequence_mean"}
        trainer = trainer_of(signs, **{f"trainer.algorithm.{name}": value for name, value in changes.items()})
        config = trainer.cfg.trainer.algorithm
        assert config.policy_loss_type == f"spanwise_laser_{kind}"
        now, mask_nt = torch.tensor([[-1.0, -2.0, -9.0], [-1.5, -0.5, -7.0]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
        old, adv = torch.tensor([[-1.2, -2.0, -3.0], [-1.4, -0.6, -4.0]]), torch.tensor([[0.5, -0.5, 0.1], [0.2, 0.3, 0.2]])
        loss, _ = PolicyLossRegistry.get(config.policy_loss_type)(now, old, adv, config=config, loss_mask=mask_nt)
        config.policy_loss_type = kind
        shorter = (part[:, :2] for part in (now, old, adv))
        plain, _ = PolicyLossRegistry.get(kind)(*shorter, config=config, loss_mask=mask_nt[:, :2])
        assert loss.item() == pytest.approx(plain.item() + 0.1 * 36 + 0.2 * 9, rel=1e-5)


def test_before_the_warm_ups_nothing_is_taught_and_nothing_mixed(signs):
    waits = trainer_of(signs, laser={"reasoning_warmup": 5, "self_rewarding_warmup": 5})
    data = small.batch_of(waits)
    old = data["action_log_probs"].clone()
    waits.compute_advantages_and_returns(data)
    ended = data["sequences"][:, -1] == TOKEN
    assert float(data["advantages"][ended, -1].abs().sum()) == 0
    assert torch.equal(data["action_log_probs"][:, :-1], old[:, :-1])


def test_a_run_that_ends_before_the_mixing_begins_is_refused(signs):
    with pytest.raises(RecipeError, match="the run has only 5"):
        small.run(trainer_of(signs, laser={"self_rewarding_warmup": 5}, steps=5))


REFUSED = {
    "makes one row per turn": {"layout": "stepwise"},
    "synchronous trainer": {"trainer.fully_async.enabled": True},
    # It has no old log-probabilities.
    "Use one of regular, dual_clip, gspo, cispo, sapo": {"trainer.algorithm.policy_loss_type": "rollout_is"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(signs, sentence):
    with pytest.raises(RecipeError, match=sentence):
        check(small.config(signs, recipe=recipe(), **REFUSED[sentence]))
