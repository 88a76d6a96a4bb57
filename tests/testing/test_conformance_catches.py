"""The suite must find what it is there for: small wrong estimators, segmenters and rewards, each with the property it breaks."""

import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from jaxtyping import Int

from spanwise.credit import centred, dr_grpo, group_index, grpo
from spanwise.layout import Layout
from spanwise.score.reward import NAN, Reward
from spanwise.segment import find_blocks
from spanwise.testing import ConformanceError, check_estimator, check_reward, check_segmenter, small_vocabulary
from spanwise.types import Spans, Status

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # they cost four fifths of the time


def raw_for_singletons(reward_n, group_n):
    count_n = (group_n[:, None] == group_n[None, :]).sum(dim=1)
    return torch.where(count_n == 1, reward_n.double().nan_to_num(), dr_grpo(reward_n, group_n))


def float_noise_over_epsilon(reward_n, group_n):
    out = torch.zeros(len(reward_n), dtype=torch.float64)
    for group in group_n.unique():
        here = (group_n == group) & ~reward_n.isnan()
        r = reward_n[here]
        if len(r) > 1:
            out[here] = ((r - r.mean()) / (r.std() + 1e-20)).double()
    return out


def groups_by_position(reward_n, group_n):
    size = 2 if len(reward_n) % 2 == 0 else 1
    r = reward_n.double().nan_to_num().view(-1, size)
    return (r - r.mean(dim=1, keepdim=True)).flatten()


def absent_as_zero(reward_n, group_n):
    return centred(reward_n.nan_to_num(), group_n)


def absent_gets_credit(reward_n, group_n):
    return torch.where(reward_n.isnan(), -0.5, dr_grpo(reward_n, group_n))


def whole_batch(reward_n, group_n):
    return centred(reward_n, torch.zeros_like(group_n))


def divided_by_the_mean(reward_n, group_n):
    adv_n = dr_grpo(reward_n, group_n)
    return adv_n / (1 + torch.stack([reward_n[group_n == g].nanmean().abs().nan_to_num() for g in group_n]))


def half_precision_rewards(reward_n, group_n):
    return dr_grpo(reward_n.bfloat16(), group_n)


def moments_as_they_come(reward_n, group_n):
    mean_n = torch.stack([reward_n[group_n == g].nanmean() for g in group_n])
    return (reward_n - mean_n).double().nan_to_num()


def single_precision(reward_n, group_n):
    return dr_grpo(reward_n, group_n).float()


def writes_to_its_input(reward_n, group_n):
    reward_n.nan_to_num_(nan=0.0)
    return dr_grpo(reward_n, group_n)


def remembers(reward_n, group_n, *, calls=[0]):  # noqa: B006
    calls[0] += 1
    return dr_grpo(reward_n, group_n) * calls[0]


def order_matters(reward_n, group_n):
    return dr_grpo(reward_n, group_n) * torch.arange(len(reward_n))


def labels_matter(reward_n, group_n):
    return dr_grpo(reward_n, group_n) * group_n.double()


def groups_from_zero_on(reward_n, group_n):
    return centred(reward_n, torch.where(group_n >= 0, group_index(group_n), -1))


def ids_as_floats(reward_n, group_n):
    return centred(reward_n, group_index(group_n.double()))


def nan_where_constant(reward_n, group_n):
    adv_n = dr_grpo(reward_n, group_n)
    return adv_n / adv_n.abs().max()


def only_one_number(reward_n, group_n):
    return dr_grpo(reward_n, group_n).sum()[None]


def raises_on_one(reward_n, group_n):
    if len(reward_n) == 1:
        raise ValueError("one completion")
    return dr_grpo(reward_n, group_n)


def infinite(reward_n, group_n):
    return dr_grpo(reward_n, group_n) / (reward_n.double().nan_to_num() != 0.5)


def flipped(reward_n, group_n):
    return -dr_grpo(reward_n, group_n)


def always_zero(reward_n, group_n):
    return torch.zeros(len(reward_n), dtype=torch.float64)


def below_the_best(reward_n, group_n):
    best_n = torch.stack([reward_n[group_n == g].nan_to_num(nan=-torch.inf).max() for g in group_n])
    return (reward_n - best_n).double().nan_to_num()


@pytest.mark.parametrize(
    ("estimator", "broken"),
    [
        (raw_for_singletons, "constant"),
        (float_noise_over_epsilon, "constant"),
        (groups_by_position, "permutation"),
        (groups_by_position, "split"),
        (absent_as_zero, "absent"),
        (absent_gets_credit, "absent"),
        (whole_batch, "split"),
        (whole_batch, "shift"),
        (divided_by_the_mean, "shift"),
        (half_precision_rewards, "shift"),
        (moments_as_they_come, "precision"),
        (single_precision, "result"),
        (single_precision, "precision"),
        (writes_to_its_input, "pure"),
        (remembers, "pure"),
        (order_matters, "permutation"),
        (labels_matter, "permutation"),
        (groups_from_zero_on, "permutation"),
        (ids_as_floats, "permutation"),
        (nan_where_constant, "result"),
        (infinite, "result"),
        (only_one_number, "result"),
        (flipped, "monotone"),
        (always_zero, "signs"),
        (below_the_best, "signs"),
    ],
)
def test_wrong_estimators_of_completions(estimator, broken):
    with pytest.raises(ConformanceError, match=f"Method '{estimator.__name__}' breaks '{broken}'"):
        check_estimator(estimator, properties=[broken], examples=60)


def test_a_crash_is_a_finding():
    with pytest.raises(
        ConformanceError, match=r"'raises_on_one' raises ValueError: one completion Inputs: reward_n=\[0.0\]"
    ):
        check_estimator(raises_on_one)


def test_no_tensor_is_a_finding():
    with pytest.raises(ConformanceError, match="returns list, not a tensor"):
        check_estimator(lambda reward_n, group_n: reward_n.tolist(), kind="completion")


def test_the_first_field_of_a_named_result_is_the_advantage():
    check_estimator(lambda reward_n, group_n: (grpo(reward_n, group_n), "more"), kind="completion", examples=5)


def test_right_methods_pass():
    check_estimator(lambda reward_n, group_n: dr_grpo(reward_n, group_n))


def test_the_sentence_says_everything():
    with pytest.raises(ConformanceError) as caught:
        check_estimator(raw_for_singletons, properties=["constant"])
    assert str(caught.value) == (
        "Method 'raw_for_singletons' breaks 'constant': a group whose rewards are all equal, or a group of one, gets exactly 0. "
        "Smallest example: reward_n=[0.7], group_n=[0]. Got [0.7], expected exactly 0 in rows [0]."
    )


def last_block_gets_all(reward_nk, group_n):
    adv_nk = torch.stack([dr_grpo(column, group_n) for column in reward_nk.T], dim=1)
    return adv_nk.roll(1, dims=0)


def flattened(reward_nk, group_n):
    return dr_grpo(reward_nk.sum(dim=1), group_n)


def test_wrong_estimators_of_blocks():
    with pytest.raises(ConformanceError, match="breaks 'permutation'"):
        check_estimator(last_block_gets_all, properties=["permutation"])
    with pytest.raises(ConformanceError, match=r"breaks 'result'.*the shape"):
        check_estimator(flattened)

    def standardised(reward_nk, group_n):
        return torch.stack([grpo(column, group_n) for column in reward_nk.T], dim=1)

    with pytest.raises(ConformanceError, match="breaks 'one block'"):
        check_estimator(standardised, sequence=dr_grpo)
    check_estimator(standardised, sequence=grpo, examples=10)


def returns(reward_nt, mask_nt):
    """Right: sum of the rewards to come."""
    paid_nt = torch.where(mask_nt, reward_nt, 0.0)
    return torch.where(mask_nt, paid_nt.flip(1).cumsum(1).flip(1), 0.0)


def gae_that_reads_masked_values(reward_nt, value_nt, mask_nt):
    next_nt = torch.cat([value_nt[:, 1:], torch.zeros_like(value_nt[:, :1])], dim=1)
    return torch.where(mask_nt, reward_nt + next_nt - value_nt, 0.0)


def mask_by_multiplication(reward_nt, value_nt, mask_nt):
    return (returns(reward_nt, mask_nt) - value_nt) * mask_nt


def credit_on_padding(reward_nt, mask_nt):
    return reward_nt.flip(1).cumsum(1).flip(1) + 1.0


def mean_over_the_width(reward_nt, mask_nt):
    return returns(reward_nt, mask_nt) / max(mask_nt.shape[1], 1)


def resets_at_masked_tokens(reward_nt, mask_nt):
    out, later = torch.zeros_like(reward_nt), torch.zeros_like(reward_nt[:, 0]) if reward_nt.shape[1] else None
    for t in reversed(range(reward_nt.shape[1])):
        later = torch.where(mask_nt[:, t], reward_nt[:, t] + later, 0.0)
        out[:, t] = later
    return out


def decays_over_masked_tokens(reward_nt, mask_nt):
    out, later = torch.zeros_like(reward_nt), 0.0
    for t in reversed(range(reward_nt.shape[1])):
        later = torch.where(mask_nt[:, t], reward_nt[:, t], 0.0) + 0.5 * later
        out[:, t] = torch.where(mask_nt[:, t], later, 0.0)
    return out


def position_from_the_left(reward_nt, mask_nt):
    return returns(reward_nt, mask_nt) * torch.arange(reward_nt.shape[1])


def always_double(reward_nt, mask_nt):
    return returns(reward_nt, mask_nt).double()


@pytest.mark.parametrize(
    ("estimator", "broken"),
    [
        (gae_that_reads_masked_values, "poison"),
        (gae_that_reads_masked_values, "masking"),
        (mask_by_multiplication, "poison"),
        (credit_on_padding, "masking"),
        (credit_on_padding, "padding"),
        (mean_over_the_width, "padding"),
        (resets_at_masked_tokens, "masking"),
        (decays_over_masked_tokens, "masking"),
        (position_from_the_left, "padding"),
        (always_double, "precision"),
    ],
)
def test_wrong_estimators_of_tokens(estimator, broken):
    check_estimator(returns, examples=10)
    with pytest.raises(ConformanceError, match=f"Method '{estimator.__name__}' breaks '{broken}'"):
        check_estimator(estimator, properties=[broken])


def sums(reward_s, trajectory_s):
    return torch.stack([reward_s[trajectory_s == j].double().sum() for j in trajectory_s])


def steps_in_row_order(reward_s, trajectory_s, step_s):
    return reward_s.flip(0).cumsum(0).flip(0)


def trajectories_from_zero_on(reward_s, trajectory_s):
    return torch.where(trajectory_s >= 0, sums(reward_s, trajectory_s), 0.0)


def steps_from_zero_on(reward_s, trajectory_s, step_s):
    return torch.where(step_s >= 0, sums(reward_s, trajectory_s), 0.0)


def states_from_zero_on(reward_s, group_s, anchor_s: Int[torch.Tensor, " s"]):
    state_s = group_index([*map(tuple, torch.stack([group_s, anchor_s], dim=1).tolist())])
    return centred(reward_s, torch.where(anchor_s >= 0, state_s, -1))


def one_for_trying(reward_s, trajectory_s):
    return sums(reward_s, trajectory_s) + 1.0


@pytest.mark.parametrize(
    ("estimator", "broken"),
    [
        (steps_in_row_order, "permutation"),
        (steps_in_row_order, "split"),
        (trajectories_from_zero_on, "permutation"),
        (steps_from_zero_on, "permutation"),
        (states_from_zero_on, "permutation"),
        (one_for_trying, "constant"),
    ],
)
def test_wrong_estimators_of_steps(estimator, broken):
    check_estimator(sums, examples=10)
    with pytest.raises(ConformanceError, match=f"Method '{estimator.__name__}' breaks '{broken}'"):
        check_estimator(estimator, properties=[broken])


LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
right = partial(find_blocks, layout=LAYOUT, vocabulary=small_vocabulary())


def everything_is_trainable(ids_nt, mask_nt):
    spans, text = right(ids_nt, mask_nt)
    return replace(spans, block_nt=spans.block_nt.clamp(min=0)), text


def a_token_without_block(ids_nt, mask_nt):
    spans, text = right(ids_nt, mask_nt)
    return replace(spans, block_nt=torch.where(spans.block_nt == 1, -1, spans.block_nt.long())), text


def one_too_far(ids_nt, mask_nt):
    spans, text = right(ids_nt, mask_nt)
    return replace(spans, end_nk=torch.where(spans.present_nk, spans.end_nk + 1, 0)), text


def reads_masked_ids(ids_nt, mask_nt):
    return right(ids_nt.clamp(0, 255), torch.ones_like(mask_nt))


def mask_from_ids(ids_nt, mask_nt):
    return right(ids_nt, mask_nt & (ids_nt != 60))  # as if the pad id were also a token


def text_with_a_space(ids_nt, mask_nt):
    spans, text = right(ids_nt, mask_nt)
    return spans, [{name: block and {**block, "": block[""] + " "} for name, block in row.items()} for row in text]


def longest_of_the_batch(ids_nt, mask_nt):
    spans, text = right(ids_nt, mask_nt)
    return replace(spans, fault_n=spans.fault_n + mask_nt.sum(dim=1).max()), text


def first_row_only(ids_nt, mask_nt):
    spans, text = right(ids_nt, mask_nt)
    return replace(spans, fault_n=spans.fault_n + torch.arange(len(ids_nt))), text


def counts_columns(ids_nt, mask_nt):
    spans, text = right(ids_nt, mask_nt)
    return replace(spans, fault_n=spans.fault_n + mask_nt.shape[1]), text


def pads_in_place(ids_nt, mask_nt):
    result = right(ids_nt, mask_nt)
    ids_nt[mask_nt] = 0
    return result


def every_other_token(ids_nt, mask_nt):
    spans, _ = right(ids_nt, mask_nt)
    return Spans.of_blocks(spans.names, torch.where(mask_nt, torch.arange(mask_nt.shape[1]) % 2, -1))


def text_in_another_order(ids_nt, mask_nt):
    spans, text = right(ids_nt, mask_nt)
    return spans, [{name: said and {**said, "": said[""][::-1]} for name, said in row.items()} for row in text]


@pytest.mark.parametrize(
    ("segmenter", "broken"),
    [
        (every_other_token, "contiguous"),
        (text_in_another_order, "text"),
        (everything_is_trainable, "partition"),
        (a_token_without_block, "partition"),
        (one_too_far, "partition"),
        (mask_from_ids, "partition"),
        (text_with_a_space, "text"),
        (reads_masked_ids, "masking"),
        (reads_masked_ids, "poison"),
        (longest_of_the_batch, "split"),
        (first_row_only, "permutation"),
        (counts_columns, "padding"),
        (pads_in_place, "pure"),
    ],
)
def test_wrong_segmenters(segmenter, broken):
    check_segmenter(right, properties=[broken], examples=5)
    with pytest.raises(ConformanceError, match=f"Segmenter '{segmenter.__name__}' breaks '{broken}'"):
        check_segmenter(segmenter, properties=[broken])


def test_a_segmenter_whose_marks_occur_in_no_example_was_not_checked():
    of_other_tags = partial(find_blocks, layout=Layout({"a": ["thoughts"], "b": ["verdict"]}), vocabulary=small_vocabulary())
    with pytest.raises(ConformanceError, match="breaks 'seen': its marks occur"):
        check_segmenter(of_other_tags)
    check_segmenter(right, properties=["seen"])


def test_segmenters_that_crash_or_return_something_else():
    with pytest.raises(ConformanceError, match=r"raises AlignmentError: .*Token id"):
        check_segmenter(lambda ids_nt, mask_nt: right(ids_nt + 1000, mask_nt))
    with pytest.raises(ConformanceError, match="returns Tensor; return Spans"):
        check_segmenter(lambda ids_nt, mask_nt: mask_nt)


def answers(blocks):
    return [None if block["solution"] is None else block["solution"]["answer"] for block in blocks]


def right_or_wrong(blocks):
    return [None if text is None else float(text == "4") for text in answers(blocks)]


def crashes_on_words(blocks):
    return [None if text is None else float(text or 0) for text in answers(blocks)]


def longest_wins(blocks):
    sizes = [len(text or "") for text in answers(blocks)]
    return [float(size == max(sizes)) for size in sizes]


def counts_the_absent(blocks):
    return [sum(block["solution"] is None for block in blocks) for _ in blocks]


def by_position(blocks):
    return list(range(len(blocks)))


def counts_its_calls(blocks, calls=[]):  # noqa: B006 - a memory is what is wrong with it
    calls.append(len(blocks))
    return [None if value is None else value + len(calls) for value in right_or_wrong(blocks)]


def only_in_the_main_thread(blocks):
    inside = threading.current_thread() is threading.main_thread()
    return [value and float(inside) for value in right_or_wrong(blocks)]


def other_process(blocks):
    import multiprocessing

    return [value and float(multiprocessing.parent_process() is None) for value in right_or_wrong(blocks)]


@pytest.mark.parametrize(
    ("reward", "broken"),
    [
        (crashes_on_words, "result"),
        (longest_wins, "split"),
        (counts_the_absent, "absent"),
        (by_position, "permutation"),
        (counts_its_calls, "pure"),
        (only_in_the_main_thread, "threads"),
    ],
)
def test_wrong_rewards(reward, broken):
    check_reward(right_or_wrong, properties=[broken], processes=False, examples=5)
    with pytest.raises(ConformanceError, match=f"Reward '{reward.__name__}' breaks '{broken}'"):
        check_reward(reward, properties=[broken], processes=False)


def test_a_reward_that_fails_in_another_process():
    with pytest.raises(ConformanceError, match=r"breaks 'threads'.*another process"):
        check_reward(other_process, properties=["threads"])
    with pytest.raises(Exception, match=r"cannot be sent to another process .*; define it at the top of a module"):
        check_reward(lambda blocks: right_or_wrong(blocks), properties=["threads"])


def test_absent_is_neither_zero_nor_failed():
    reward = Reward.of([0.0, None, None], status=[Status.OK, Status.ABSENT, Status.TIMEOUT])
    assert reward.status_n.tolist() == [0, 1, 3]
    assert repr(reward.value_n.tolist()) == repr([0.0, NAN, NAN])
