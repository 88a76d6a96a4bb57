"""verl's critic: its values and log-probabilities reach `gae` and `sae`, and its targets are those of the recipe."""

import math

import pytest
import torch
from legacy_small import batch_of, credited
from legacy_small import trainer_of as v0_trainer_of
from queue_small import fetch, filled, made, put
from verl.trainer.ppo import ray_trainer
from verl_small import V0, config_of, manager_of

from oracles import slow_recursion

GAMMA, LAM, VALUE_LAM, THRESHOLD = 0.97, 0.8, 0.9, 0.2
PAIR = """
layout: {solution: [reasoning, answer], confidence: [analysis, confidence]}
objectives:
  - {reward: correct, pays: [solution], if_missing: 0.0}
  - {reward: brier, pays: [confidence], given: correct, if_missing: -1.0, weight: 0.5}
values: shared
critic: {gae_lambda_value: 0.9}
"""
RECIPES = {
    "gae": PAIR + f"method: gae\noptions: {{lam: {LAM}, gamma: {GAMMA}}}\n",
    "sae": PAIR + f"method: sae\noptions: {{lam: {LAM}, gamma: {GAMMA}, threshold: {THRESHOLD}}}\n",
}
CRITIC = ("critic.enable=True", "critic.model.path=model")
#: Parts of a completion (0: the tool's), what it answers, what it states.
THOUGHT = [(1, "<reasoning>So"), (0, " 7 7 "), (1, "</reasoning><answer>4</answer>")]
TOLD = [
    ([*THOUGHT, (1, "<confidence>0.9</confidence>")], 1.0, 0.9),
    ([(1, "<answer>5</answer>"), (1, "<confidence>0.3</confidence>")], 0.0, 0.3),
    ([(1, "<answer>4</answer>"), (0, "tool")], 1.0, None),
    ([(1, "So")], None, None),
]


def completions_of(tokenizer):
    """Ids, mask and the rewards of the tokens of each completion: of the answer, and half a Brier score at the last own token."""
    rows = []
    for parts, right, stated in TOLD:
        ids, mask, rewards = [], [], []
        for mine, text in parts:
            piece = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, mask, rewards = [*ids, *piece], [*mask, *[mine] * len(piece)], [*rewards, *[0.0] * len(piece)]
            rewards[-1] = right if "</answer>" in text else 0.0
        rewards[len(mask) - 1 - mask[::-1].index(1)] += 0.5 * (-1.0 if stated is None else -((stated - right) ** 2))
        rows.append((ids, mask, rewards))
    return rows


def critics(rows, *, poison):
    """A value and a log-probability for each token; `poison` where the token is not the model's."""
    draw = torch.Generator().manual_seed(0)
    values, logps = [], []
    for _, mask, _ in rows:
        sampled = torch.tensor(mask).bool()
        drawn = torch.rand(2, len(mask), generator=draw)
        values.append(torch.where(sampled, drawn[0] * 2 - 1, poison))
        logps.append(torch.where(sampled, drawn[1].log(), poison))
    return values, logps


def loops(row, value, logp, name):
    """Advantages and targets over the model's own tokens, by the definitions; 0 elsewhere."""
    mask_1t, reward_1t = torch.tensor([row[1]]).bool(), torch.tensor([row[2]]).double()

    def lam_after(_, place, later):
        return 1.0 if name == "sae" and math.exp(float(logp[later])) >= THRESHOLD else LAM

    lams = lam_after, lambda *_: VALUE_LAM
    adv_1t, critic_1t = (slow_recursion(reward_1t, value[None], mask_1t, gamma=GAMMA, lam_after=lam) for lam in lams)
    target_1t = torch.where(mask_1t, critic_1t + value, 0.0)
    return adv_1t[0] / mask_1t.sum(), target_1t[0]  # per: completion


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("poison", [1e9, math.nan], ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_v1(tmp_path, name, poison):
    trainer, manager = made(tmp_path, *CRITIC, recipe=RECIPES[name])
    assert trainer.use_critic
    rows = completions_of(manager.tokenizer)
    batch, metrics = filled(manager, [[([ids], [mask]) for ids, mask, _ in rows]]), {}
    values, logps = critics(rows, poison=poison)
    put(batch, values=values, **({"old_log_probs": logps} if name == "sae" else {}))
    trainer._compute_advantage(batch, metrics)
    for row, value, logp, adv, target in zip(rows, values, logps, *fetch(batch, "advantages", "returns"), strict=True):
        expected = loops(row, value, logp, name)
        torch.testing.assert_close(adv.double(), expected[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(target.double(), expected[1], atol=1e-6, rtol=0)
    assert metrics["credit/solution/mean_abs"] > 0


@pytest.mark.usefixtures("loop")
@pytest.mark.parametrize("name", RECIPES)
def test_v0_divides_by_lengths_and_targets_do_not_know(tmp_path, name):
    """The factor that undoes verl's division is on the advantages, never on the critic's targets."""
    mean = "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    config = config_of(tmp_path, *V0, "critic.strategy=fsdp2", *CRITIC, mean, recipe=RECIPES[name])
    trainer, manager = v0_trainer_of(config), manager_of(config)
    rows = completions_of(manager.tokenizer)
    batch = batch_of(manager, [("a", (ids, mask)) for ids, mask, _ in rows])
    values, logps = critics(rows, poison=1e9)
    width = batch.batch["responses"].shape[1]
    for field, column in (("values", values), ("old_log_probs", logps)):
        batch.batch[field] = torch.nn.utils.rnn.pad_sequence([*column, torch.zeros(width)], True, 1e9)[: len(rows)]
    credited(config, batch)
    for n, (row, value, logp) in enumerate(zip(rows, values, logps, strict=True)):
        adv, target = loops(row, value, logp, name)
        for field, expected in (("advantages", adv * sum(row[1])), ("returns", target)):
            found = batch.batch[field][n].double()
            torch.testing.assert_close(found[: len(adv)], expected, atol=1e-6, rtol=0)
            assert not found[len(adv) :].any()
    batch.meta_info["global_token_num"] = [1]
    metrics = ray_trainer.compute_data_metrics(batch, use_critic=trainer.use_critic)
    assert math.isfinite(metrics["critic/vf_explained_var"])
