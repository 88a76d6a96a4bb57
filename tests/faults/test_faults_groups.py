"""Advantages and groups."""

import functools
from dataclasses import replace

import pytest
import torch

from credit_batches import scores_of
from faults.catches import catches, equals, gives, refuses
from helpers import NAN, assert_close, double
from oracles import textbook, z_scores
from spanwise import Batch, Layout, Objective, Reading, Scheme, Vocabulary, credit_batch, metrics, read
from spanwise.credit import advantage, assign_turns, dr_grpo, gae, grpo, opo, reinforce_plus_plus, rloo
from spanwise.credit.spread import to_tokens
from spanwise.credit_metrics import dead_strata
from spanwise.explain.alarms import batch_alarms
from spanwise.recipe import load
from spanwise.score import Reward
from spanwise.testing.batches import LABELS

VOCABULARY = Vocabulary((b"<answer>", b"</answer>", b"4", b"5", b"<length>", b"</length>"))
WHOLE = Layout({"all": ["answer"]})


def by_group(formula):
    """The estimator of a formula for the rewards of one group."""

    def estimator(reward_n, group_n):
        result = torch.zeros(len(reward_n), dtype=torch.float64)
        for group in group_n.unique():
            result[group_n == group] = formula(reward_n[group_n == group]).double()
        return result

    return estimator


def through_pipeline(values, groups=(0, 0, 0, 0), *, method="dr_grpo"):
    """The credit of completions <answer>4</answer> whose rewards are known."""
    columns = values if isinstance(values, dict) else {"won": values}
    n = len(groups)
    batch = Batch.jagged([[0, 2, 1]] * n, list(groups))
    objectives = [Objective("environment", "all", name=name) for name in columns]
    scheme = Scheme.preset(method, WHOLE, objectives=objectives, per="completion")
    recorded = {name: Reward.of(column) for name, column in columns.items()}
    reading = read(batch, scheme, VOCABULARY, recorded=recorded)
    return credit_batch(reading, batch, scheme), reading, scheme


def test_f01_two_roads_of_one_estimator_agree_on_groups_of_one():
    """verl-project/verl#7581. `rloo` kept the raw score of a group of one and its vectorised twin gave 0."""
    reward_n, group_n = double([0.7, 1.0, 0.0, 0.5]), torch.tensor([4, 2, 2, 2])

    def check(estimator):
        assert_close(estimator(reward_n, group_n), [0.0, 0.75, -0.75, 0.0], 1e-12)
        assert_close(estimator(reward_n, torch.arange(4)), [0.0] * 4, 0)  # n = 1

    raw = by_group(lambda r: r if len(r) == 1 else r - (r.sum() - r) / (len(r) - 1))
    other_road = functools.partial(dr_grpo, leave_one_out=True)
    for ours in (rloo, other_road, lambda r, g: advantage(r, g, leave_one_out=True).advantage_n):
        catches(check, ours, raw)


def test_f02_small_variances_are_not_floored():
    """verl-project/verl#3635, #6348. The fast path floored the variance, so rewards 1e-5 apart gave .005 for .62."""
    for spread in (1e-1, 1e-3, 1e-5):
        reward_n = 0.5 + spread * double([0.3, 0.1, 0.9, 0.4, 0.8, 0.5])
        check = gives(reward_n, torch.zeros(6).long(), want=z_scores(reward_n.tolist(), 1, 1e-6), tolerance=1e-9)
        check(grpo)
    catches(check, grpo, by_group(lambda r: (r - r.mean()) / (r.var().clamp(min=1e-6).sqrt() + 1e-6)))


def test_f03_singleton_group_is_zero_never_raw():
    """verl-project/verl (code). GRPO gave a group of one its raw reward: .7 in, .7 out."""
    rewards = double([0.7, 1.0, 0.0]), torch.tensor([0, 1, 1])
    check = gives(*rewards, want=[0.0, 0.5**0.5, -(0.5**0.5)], tolerance=1e-5)
    catches(check, grpo, by_group(lambda r: r if len(r) == 1 else (r - r.mean()) / (r.std() + 1e-6)))


def all_zero(estimator):
    constants = torch.rand(1000, generator=torch.Generator().manual_seed(4))
    for size in (3, 5, 7, 8, 16, 33, 64):
        groups = constants.repeat_interleave(size), torch.arange(1000).repeat_interleave(size)
        assert bool((estimator(*groups) == 0).all()), size


def by_rows(formula):
    """An estimator of groups of one size that lie together, in the dtype of the rewards."""
    return lambda reward_n, group_n: formula(reward_n.view(int(group_n.max()) + 1, -1)).flatten()


def test_f04_leave_one_out_of_a_constant_group_is_exactly_zero():
    """NVIDIA-NeMo/RL#4158. Rounding gave constant groups a deviation, and leave-one-out advantages spiked."""

    def noisy(r):
        baseline = (r.sum(dim=1, keepdim=True) - r) / (r.shape[1] - 1)
        return (r - baseline) / (r.std(dim=1, keepdim=True) + 1e-12)

    catches(all_zero, rloo, by_rows(noisy))


def group_norm(eps):
    return by_rows(lambda r: (r - r.mean(dim=1, keepdim=True)) / (r.std(dim=1, keepdim=True) + eps))


def test_f05_noise_is_never_divided_by_a_small_epsilon():
    """OpenRLHF `group_norm` (code). With epsilon 1e-9 eight equal rewards of .806 gave every member .93."""
    for eps in (1e-9, 0.0):
        catches(all_zero, functools.partial(grpo, eps=eps), group_norm(1e-9))


def test_f06_a_collapsed_confidence_is_credited_with_nothing():
    """verl-project/verl (code). Equal continuous rewards gave +.1 to all, as when every confidence is the same."""

    def check(estimator):
        for confidence in torch.linspace(0, 1, 21).tolist():
            for dtype in (torch.float32, torch.float64):
                brier_n = torch.full((7,), -((confidence - 1.0) ** 2), dtype=dtype)
                assert float(estimator(brier_n, torch.zeros(7).long()).abs().max()) == 0

    options = {"baseline": "outcome", "outcome_no": torch.ones(7).double(), "scale": "std", "eps": 1e-6}
    catches(check, lambda *rewards: advantage(*rewards, **options).advantage_n, group_norm(1e-6))


def test_f07_one_missing_reward_changes_nobody_else():
    """huggingface/trl#5773. A completion without any reward entered its group's mean as 0, or made it NaN."""

    ours_n = through_pipeline([1.0, None, 0.0, 1.0])[0].block_nk[:, 0]
    for absent in (0.0, NAN):
        reward_n = double([1.0, absent, 0.0, 1.0])
        catches(lambda adv_n: assert_close(adv_n, [1 / 3, 0, -2 / 3, 1 / 3], 1e-12), ours_n, reward_n - reward_n.mean())


def test_f08_a_group_without_credit_is_counted_beside_one_with_credit():
    """huggingface/trl#5588. A constant group has no policy term, and the KL term still pushed it; nothing said so."""
    credit, reading, scheme = through_pipeline([1.0, 1.0, 1.0, 0.0], groups=(0, 0, 1, 1))
    zero_share = metrics(credit, reading, scheme)["credit/all/zero_frac"]
    catches(equals(0.5), zero_share, float(not credit.has_signal))  # one flag for the batch


def test_f09_components_that_cancel_are_told():
    """huggingface/trl#3857. Two components varied and their total was constant: loss 0 for a whole run, no warning."""
    credit, reading, scheme = through_pipeline({"good": [1.0, 0.0, 1.0, 0.0], "bad": [0.0, 1.0, 0.0, 1.0]}, method="grpo")

    def check(logged):
        assert any("nothing was learned" in sentence for sentence in batch_alarms([logged]))

    # looks at each component's deviation, and both have one
    by_component = {"credit/no_signal": float(bool((reading.scores.reward_nm.std(dim=0) == 0).all()))}
    catches(check, metrics(credit, reading, scheme), by_component)


def test_f10_a_constant_group_is_found_whatever_its_rewards_are():
    """OpenRLHF#1270, #1272. A filter by the mean kept constant groups wherever rewards are not 0 and 1."""

    def check(dead):
        assert dead([0.5, 0.5, 0.0, 1.0]) == 1
        assert dead([0.0, 0.0, 1.0, 1.0]) == 2
        assert dead([0.2, 0.4, 0.3, 0.3]) == 1

    def ours(values):
        credit, _, scheme = through_pipeline(values, groups=(0, 0, 1, 1))
        return dead_strata(credit, scheme)["won"][1]

    def by_mean(values):
        means = double(values).view(2, 2).mean(dim=1)
        return int(((means <= 0) | (means >= 1)).sum())

    catches(check, ours, by_mean)


def test_f11_length_is_no_gradient_where_all_are_wrong():
    """NVIDIA-NeMo/RL#2431, verl-recipe#125. A shaped total kept all-wrong groups, and length became the gradient."""
    layout = Layout({"solution": ["answer"], "note": ["length"]})
    batch = Batch.jagged([[0, 3, 1, 4, 2, 5], [0, 3, 3, 3, 1, 4, 2, 5]], [0, 0])
    recorded = {"correct": Reward.of([0.0, 0.0]), "short": Reward.of([-0.1, -0.3])}
    separate = [Objective("environment", "solution", name="correct"), Objective("environment", "note", name="short")]
    shaped = [replace(objective, pays=("solution", "note")) for objective in separate]

    def credited(method, objectives):
        scheme = Scheme(method, layout, objectives)
        return credit_batch(read(batch, scheme, VOCABULARY, recorded=recorded), batch, scheme).block_nk

    catches(equals([0.0, 0.0]), credited("bae", separate)[:, 0].tolist(), credited("grpo", shaped)[:, 0].tolist())
    assert_close(credited("bae", separate)[:, 1], [0.1, -0.1], 1e-12)


def test_f12_interleaved_prompts_are_not_mixed():
    """StarsfieldAI/R1-V#67. `view(-1, G)` on the order P1 P2 P1 P2 compared completions of different prompts."""
    for labels in (torch.tensor([0, 1]), torch.tensor(LABELS)):
        check = gives(double([1, 5, 0, 9]), labels[[0, 1, 0, 1]], want=[0.5, -2, -0.5, 2])
        catches(check, dr_grpo, lambda reward_n, _: (reward_n.view(-1, 2) - reward_n.view(-1, 2).mean(1, True)).flatten())


def test_f13_a_group_may_lie_on_two_ranks():
    """huggingface/trl#3896. A reward function saw the part of a group that lay on its own rank."""
    _, reading, scheme = through_pipeline([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], groups=(0, 0, 0, 1, 1, 1))
    ranks, groups = [slice(0, 2), slice(2, 6)], torch.tensor([0, 0, 0, 1, 1, 1])  # the first group is cut

    def gathered():
        table = torch.cat([reading.take(rank).pack() for rank in ranks])
        return credit_batch(Reading.unpack(table, scheme), Batch(groups), scheme).block_nk[:, 0]

    def local():
        return torch.cat([credit_batch(reading.take(rank), Batch(groups[rank]), scheme).block_nk[:, 0] for rank in ranks])

    catches(gives(want=[2 / 3, -1 / 3, -1 / 3, 1 / 3, 1 / 3, -2 / 3]), gathered, local)


def test_f14_moments_are_those_of_the_group():
    """langfengQ/verl-agent#138. Mean and deviation were of the whole batch by default, and the paper's of the group."""
    up, rewards = 0.5**0.5, (double([1, 0, 5, 9]), torch.tensor([0, 0, 1, 1]))
    catches(gives(*rewards, want=[up, -up, -up, up], tolerance=1e-5), grpo, lambda r, g: (r - r.mean()) / (r.std() + 1e-6))


def test_f15_a_comparison_needs_two_completions():
    """OpenRLHF#980. An example script compared the completions of a group, and sampled one of each prompt."""
    catches(refuses, lambda: load(None, {"group_size": 1}), lambda: load(None, {"group_size": 2}))


TOOL_MASK = torch.tensor([[True, False, False, True]])


def test_f16_the_return_crosses_a_tool_token():
    """verl-project/verl#6376. The return was reset at a tool token, and the action before the tool lost its reward."""

    def resets(reward_nt, mask_nt):
        result, ahead = torch.zeros_like(reward_nt), 0.0
        for t in reversed(range(reward_nt.shape[1])):
            ahead = result[0, t] = float(reward_nt[0, t]) + 0.5 * ahead if mask_nt[0, t] else 0.0
        return result

    check = gives(double([[0, 0, 0, 1]]), TOOL_MASK, want=[[0.5, 0, 0, 1]])
    catches(check, functools.partial(reinforce_plus_plus, gamma=0.5, whiten=False), resets)


def textbook_gae(reward_nt, value_nt, mask_nt, lam, skips):
    """GAE from the end; `skips`: whether masked tokens are stepped over."""
    adv_nt = torch.zeros_like(reward_nt)
    for i, (reward_t, value_t) in enumerate(zip(reward_nt, value_nt, strict=True)):
        kept = [t for t in range(len(reward_t)) if mask_nt[i, t] or not skips]
        adv_nt[i, kept] = double(textbook(kept, reward_t, value_t, 0.0, 1.0, lambda *_: lam))
    return adv_nt * mask_nt


@pytest.mark.parametrize("poison", [100.0, 1e9, NAN])
def test_f17_no_value_is_read_at_a_masked_token(poison):
    """alibaba/ROLL#447. A critic's value of 100 in the padding turned returns of .95 and 1 into 5.7 and 6."""
    value_nt, reward_nt = double([[0.5, poison, poison, 0.6, poison]]), double([[0, 0, 0, 1, 0]])
    mask_nt = torch.tensor([[True, False, False, True, False]])
    check = gives(reward_nt, value_nt, mask_nt, want=[[0.3, 0, 0, 0.4, 0]])  # surprises .1 and .4: .1 + .5 x .4
    catches(check, functools.partial(gae, lam=0.5), lambda *inputs: textbook_gae(*inputs, 0.5, False).nan_to_num(nan=7.0))


def test_f18_lambda_decays_per_trained_token_and_a_masked_reward_is_not_lost():
    """radixark/miles#1827, verl-project/verl#2337. GAE decayed at every tool token, and lost a reward on a masked last one."""
    mask_nt = torch.tensor([[True, False, False, True, False]])
    value_nt, reward_nt = torch.zeros(1, 5).double(), double([[0, 0, 0, 0, 1]])
    check = gives(reward_nt, value_nt, mask_nt, want=[[0.5, 0, 0, 1, 0]])
    for skips in (False, True):  # the one decays, the other loses the reward
        catches(check, functools.partial(gae, lam=0.5), functools.partial(textbook_gae, lam=0.5, skips=skips))


def test_f19_a_rejected_completion_enters_no_moment_of_the_others():
    """verl-project/verl#6362. A reward on tokens that rejection had masked still changed the tokens that were kept."""
    reward_nt = double([[0, 1], [0, 0], [0, 100]])
    mask_nt = torch.tensor([[True, True], [True, True], [False, False]])
    check = gives(reward_nt, mask_nt, want=[[1, 1], [-1, -1], [0, 0]], tolerance=1e-6)  # returns 1 1 0 0: deviation 1/2

    def counts_it(reward_nt, mask_nt):
        return_nt = reward_nt.flip(1).cumsum(1).flip(1)
        return (return_nt - return_nt.mean()) / return_nt.std(correction=0) * mask_nt

    catches(check, functools.partial(reinforce_plus_plus, ddof=0), counts_it)


def test_f20_every_step_is_credited_on_its_own_mask():
    """NovaSky-AI/SkyRL#1492, #1507. The last step's masked advantages were copied to all steps, most of which got zeros."""
    reward_s, step_s = double([0, 1, 0]), torch.tensor([0, 1, 0])
    trajectory_s, mask_st = torch.tensor([0, 0, 1]), torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]])

    def check(run):
        adv_st = run()
        assert_close(adv_st.sum(dim=1), [1.5, 0.5, -1.0], 1e-6)
        assert bool(((adv_st != 0) == mask_st.bool()).all())

    def ours():
        scores, group_s = scores_of(reward_s[:, None], names=("correct",)), torch.zeros(3).long()
        rule = {"objectives": [Objective("correct", pays="all")], "block_names": ["all"], "method": "dr_grpo"}
        credit = assign_turns(scores, group_s, mask_st.sum(dim=1)[:, None], trajectory_s=trajectory_s, step_s=step_s, **rule)
        return to_tokens(credit.block_nk[:, 0], mask_st, dtype=torch.float64)

    def copied():
        last_jt = double([[0.5], [-0.5]]) * mask_st[[1, 2]]
        return last_jt[trajectory_s] * mask_st

    catches(check, ours, copied)


def test_f21_advantages_are_no_mask(unchecked_shapes):
    """verl-project/verl#2506. `advantages` were passed as `response_mask`, and any number is a truth value."""
    reward_nt, value_nt = double([[0, 1]]), double([[0.5, 0.5]])
    catches(
        refuses,
        lambda: gae(reward_nt, value_nt, value_nt),
        lambda: textbook_gae(reward_nt, value_nt, value_nt, 0.95, skips=True),
    )


def test_f22_no_credit_for_blocks_is_not_no_credit():
    """PrimeIntellect-ai/prime-rl#3223, #2840. A filter of zero advantages dropped rollouts that carried another loss."""
    layout = Layout({"solution": ["answer"], "note": ["length"]})
    batch = Batch.jagged([[0, 2, 1, 4, 2, 5], [0, 2, 1]], [0, 0])
    scheme = Scheme("bae", layout, [Objective("format", "note", if_missing=-1.0)])
    credit = credit_batch(read(batch, scheme, VOCABULARY), batch, scheme)
    assert not credit.block_nk.any()
    assert credit.stop_n.tolist() == [0.0, -2.0]
    catches(equals(True), credit.has_signal, bool((credit.block_nk != 0).any()))


def test_f23_what_is_left_out_is_in_no_weighted_baseline():
    """PrimeIntellect-ai/prime-rl#1746. Rollouts that had been filtered stayed in a baseline weighted by length."""
    reward_n, length_n = double([1, 0, NAN, 1]), torch.tensor([3, 1, 50, 2])
    kept = [1 / 6, -5 / 6, 0, 1 / 6]  # the mean over tokens is 5/6

    def keeps(reward_n, group_n, *, length_n):
        value_n = reward_n.nan_to_num()
        return torch.where(reward_n.isnan(), 0.0, value_n - (length_n * value_n).sum() / length_n.sum())

    group_n = torch.zeros(4).long()
    catches(lambda estimator: assert_close(estimator(reward_n, group_n, length_n=length_n), kept, 1e-12), opo, keeps)
