"""The suite must find what it is there for: small wrong estimators, segmenters and rewards, each with the property it breaks."""

import itertools
import multiprocessing
import threading
from dataclasses import replace
from functools import partial

import pytest
import torch
from jaxtyping import Int

from helpers import NAN
from spanwise.credit import centred, dr_grpo, group_index, grpo
from spanwise.layout import Layout
from spanwise.segment import find_blocks
from spanwise.testing import ConformanceError, check_estimator, check_reward, check_segmenter, small_vocabulary
from spanwise.testing.search import differ
from spanwise.types import Spans

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # they cost four fifths of the time
CALLS = itertools.count(1)


def raw_for_singletons(reward_n, group_n):
    is_alone_n = (group_n[:, None] == group_n).sum(dim=1) == 1
    return torch.where(is_alone_n, reward_n.double().nan_to_num(), dr_grpo(reward_n, group_n))


def float_noise_over_epsilon(reward_n, group_n):
    out = torch.zeros(len(reward_n), dtype=torch.float64)
    for group in group_n.unique():
        members = (group_n == group) & ~reward_n.isnan()
        r = reward_n[members]
        if len(r) > 1:
            out[members] = ((r - r.mean()) / (r.std() + 1e-20)).double()
    return out


def means(reward_n, group_n):
    return torch.stack([reward_n[group_n == g].nanmean() for g in group_n])


def raises_on_one(reward_n, group_n):
    if len(reward_n) == 1:
        raise ValueError("one completion")
    return dr_grpo(reward_n, group_n)


def best(reward_n, group_n):
    return torch.stack([reward_n[group_n == g].nan_to_num(nan=-torch.inf).max() for g in group_n])


#: name: (the properties that it breaks, what is wrong with a reward and a group)
OF_COMPLETIONS = {
    "raw for singletons": ("constant", raw_for_singletons),
    "float noise over epsilon": ("constant", float_noise_over_epsilon),
    "absent as zero": ("absent", lambda r, g: centred(r.nan_to_num(), g)),
    "absent gets credit": ("absent", lambda r, g: torch.where(r.isnan(), -0.5, dr_grpo(r, g))),
    "whole batch": ("split shift", lambda r, g: centred(r, torch.zeros_like(g))),
    "divided by the mean": ("shift", lambda r, g: dr_grpo(r, g) / (1 + means(r, g).abs().nan_to_num())),
    "half precision rewards": ("shift", lambda r, g: dr_grpo(r.bfloat16(), g)),
    "moments as they come": ("precision", lambda r, g: (r - means(r, g)).double().nan_to_num()),
    "single precision": ("result precision", lambda r, g: dr_grpo(r, g).float()),
    "writes to its input": ("pure", lambda r, g: dr_grpo(r.nan_to_num_(nan=0.0), g)),
    "remembers": ("pure", lambda r, g: dr_grpo(r, g) * next(CALLS)),
    "order matters": ("permutation", lambda r, g: dr_grpo(r, g) * torch.arange(len(r))),
    "groups from zero on": ("permutation", lambda r, g: centred(r, torch.where(g >= 0, group_index(g), -1))),
    "ids as floats": ("permutation", lambda r, g: centred(r, group_index(g.double()))),
    "NaN where constant": ("result", lambda r, g: dr_grpo(r, g) / dr_grpo(r, g).abs().max()),
    "infinite": ("result", lambda r, g: dr_grpo(r, g) / (r.double().nan_to_num() != 0.5)),
    "only one number": ("result", lambda r, g: dr_grpo(r, g).sum()[None]),
    "flipped": ("monotone", lambda r, g: -dr_grpo(r, g)),
    "below the best": ("signs", lambda r, g: (r - best(r, g)).double().nan_to_num()),
}


def check_completions(faulty, **options):
    check_estimator(lambda reward_n, group_n: faulty(reward_n, group_n), examples=60, **options)


def test_a_crash_is_a_finding():
    with pytest.raises(ConformanceError, match=r"'raises_on_one' raises ValueError: one completion .* reward_n=\[0.0\]"):
        check_estimator(raises_on_one)
    with pytest.raises(ConformanceError, match="returns list"):
        check_estimator(lambda reward_n, group_n: reward_n.tolist(), kind="completion")


def test_the_sentence_says_everything():
    with pytest.raises(ConformanceError) as caught:
        check_estimator(raw_for_singletons, properties=["constant"])
    assert str(caught.value) == (
        "Method 'raw_for_singletons' breaks 'constant': a group whose rewards are all equal gets exactly 0, and so does a "
        "group of one. "
        "The smallest example is reward_n=[0.7], group_n=[0]. The method returned [0.7]. Advantages must be exactly 0 in rows [0]."
    )


def standardised(reward_nk, group_n):
    return torch.stack([grpo(column, group_n) for column in reward_nk.T], dim=1)


@pytest.mark.usefixtures("unshrunk_examples")
def test_wrong_estimators_of_blocks():
    for faulty, options, broken in (
        (lambda reward_nk, group_n: standardised(reward_nk, group_n).roll(1, dims=0), {}, "breaks 'permutation'"),
        (lambda reward_nk, group_n: dr_grpo(reward_nk.sum(dim=1), group_n), {}, r"breaks 'result'.*the shape"),
        (standardised, {"sequence": dr_grpo}, "breaks 'one block'"),
    ):
        with pytest.raises(ConformanceError, match=broken):
            check_estimator(faulty, properties=[broken.split("'")[1]], **options)
    check_estimator(standardised, sequence=grpo, examples=10)


def returns(reward_nt, mask_nt):
    """Right: sum of the rewards to come."""
    paid_nt = torch.where(mask_nt, reward_nt, 0.0)
    return torch.where(mask_nt, paid_nt.flip(1).cumsum(1).flip(1), 0.0)


def gae_that_reads_masked_values(reward_nt, value_nt, mask_nt):
    next_nt = torch.cat([value_nt[:, 1:], torch.zeros_like(value_nt[:, :1])], dim=1)
    return torch.where(mask_nt, reward_nt + next_nt - value_nt, 0.0)


def resets_at_masked_tokens(reward_nt, mask_nt):
    out, later = torch.zeros_like(reward_nt), torch.zeros(len(reward_nt))
    for t in reversed(range(reward_nt.shape[1])):
        later = torch.where(mask_nt[:, t], reward_nt[:, t] + later, 0.0)
        out[:, t] = later
    return out


def from_the_left(reward_nt, mask_nt):
    return returns(reward_nt, mask_nt) * torch.arange(reward_nt.shape[1])


def all_before(reward_nt):
    return reward_nt.flip(1).cumsum(1).flip(1) + 1.0


OF_TOKENS = {
    "reads masked values": ("poison masking", gae_that_reads_masked_values),
    "mask by multiplication": ("poison", lambda reward_nt, value_nt, mask_nt: (all_before(reward_nt) - value_nt) * mask_nt),
    "credit on padding": ("masking padding", lambda reward_nt, mask_nt: all_before(reward_nt)),
    "mean over the width": ("padding", lambda reward_nt, mask_nt: returns(reward_nt, mask_nt) / max(mask_nt.shape[1], 1)),
    "resets at masked tokens": ("masking", resets_at_masked_tokens),
    "position from the left": ("padding", from_the_left),
    "always double": ("precision", lambda reward_nt, mask_nt: returns(reward_nt, mask_nt).double()),
}


def sums(reward_s, trajectory_s):
    return torch.stack([reward_s[trajectory_s == j].double().sum() for j in trajectory_s])


def states_from_zero_on(reward_s, group_s, anchor_s: Int[torch.Tensor, " s"]):
    state_s = group_index([*map(tuple, torch.stack([group_s, anchor_s], dim=1).tolist())])
    return centred(reward_s, torch.where(anchor_s >= 0, state_s, -1))


def trajectories_from_zero_on(reward_s, trajectory_s):
    return torch.where(trajectory_s >= 0, sums(reward_s, trajectory_s), 0.0)


def steps_from_zero_on(reward_s, trajectory_s, step_s):
    return torch.where(step_s >= 0, sums(reward_s, trajectory_s), 0.0)


OF_STEPS = {
    "row order": ("permutation split", lambda reward_s, trajectory_s, step_s: reward_s.flip(0).cumsum(0).flip(0)),
    "trajectories from zero on": ("permutation", trajectories_from_zero_on),
    "steps from zero on": ("permutation", steps_from_zero_on),
    "states from zero on": ("permutation", states_from_zero_on),
    "one for trying": ("constant", lambda reward_s, trajectory_s: sums(reward_s, trajectory_s) + 1.0),
}


LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
right = partial(find_blocks, layout=LAYOUT, vocabulary=small_vocabulary())


def changed(of_spans=lambda spans, ids_nt, mask_nt: spans, of_text=lambda text: text):
    """The right segmenter with something changed in its result."""

    def segmenter(ids_nt, mask_nt):
        spans, text = right(ids_nt, mask_nt)
        return of_spans(spans, ids_nt, mask_nt), [
            {name: block and {**block, "": of_text(block[""])} for name, block in row.items()} for row in text
        ]

    return segmenter


def more_faults(count):
    return changed(lambda spans, ids_nt, mask_nt: replace(spans, fault_n=spans.fault_n + count(ids_nt, mask_nt)))


def pads_in_place(ids_nt, mask_nt):
    result = right(ids_nt, mask_nt)
    ids_nt[mask_nt] = 0
    return result


def every_other_token(ids_nt, mask_nt):
    spans, _ = right(ids_nt, mask_nt)
    return Spans.of_blocks(spans.names, torch.where(mask_nt, torch.arange(mask_nt.shape[1]) % 2, -1))


def reads_masked_ids(ids_nt, mask_nt):
    return right(ids_nt.clamp(0, 255), torch.ones_like(mask_nt))


def without_block(spans, *_):
    return replace(spans, block_nt=torch.where(spans.block_nt == 1, -1, spans.block_nt.long()))


def one_too_far(spans, *_):
    return replace(spans, end_nk=torch.where(spans.present_nk, spans.end_nk + 1, 0))


SEGMENTERS = {
    "every other token": ("contiguous", every_other_token),
    "text in another order": ("text", changed(of_text=lambda text: text[::-1])),
    "all is trainable": ("partition", changed(lambda spans, *_: replace(spans, block_nt=spans.block_nt.clamp(min=0)))),
    "a token without block": ("partition", changed(without_block)),
    "one too far": ("partition", changed(one_too_far)),
    # as if the pad id were also a token
    "mask from ids": ("partition", lambda ids_nt, mask_nt: right(ids_nt, mask_nt & (ids_nt != 60))),
    "text with a space": ("text", changed(of_text=lambda text: text + " ")),
    "reads masked ids": ("masking poison", reads_masked_ids),
    "longest of the batch": ("split", more_faults(lambda ids_nt, mask_nt: mask_nt.sum(dim=1).max())),
    "first row only": ("permutation", more_faults(lambda ids_nt, mask_nt: torch.arange(len(ids_nt)))),
    "counts columns": ("padding", more_faults(lambda ids_nt, mask_nt: mask_nt.shape[1])),
    "pads in place": ("pure", pads_in_place),
}


def test_a_segmenter_whose_marks_occur_in_no_example_was_not_checked():
    of_other_tags = partial(find_blocks, layout=Layout({"a": ["thoughts"], "b": ["verdict"]}), vocabulary=small_vocabulary())
    with pytest.raises(ConformanceError, match="breaks 'seen': if there are several blocks"):
        check_segmenter(of_other_tags, examples=5)
    check_segmenter(right, properties=["seen"])


def test_segmenters_that_crash_or_return_something_else():
    with pytest.raises(ConformanceError, match=r"raises AlignmentError: .*Token id"):
        check_segmenter(lambda ids_nt, mask_nt: right(ids_nt + 1000, mask_nt))
    with pytest.raises(ConformanceError, match="returns Tensor; return Spans"):
        check_segmenter(lambda ids_nt, mask_nt: mask_nt)


def answers(blocks):
    return [block["solution"] and block["solution"]["answer"] for block in blocks]


def right_or_wrong(blocks):
    return [None if text is None else float(text == "4") for text in answers(blocks)]


def longest_wins(blocks):
    sizes = [len(text or "") for text in answers(blocks)]
    return [float(size == max(sizes)) for size in sizes]


def counts_its_calls(blocks):
    return [None if value is None else value + next(CALLS) for value in right_or_wrong(blocks)]


def only_in_the_main_thread(blocks):
    inside = threading.current_thread() is threading.main_thread()
    return [value and float(inside) for value in right_or_wrong(blocks)]


def other_process(blocks):
    return [value and float(multiprocessing.parent_process() is None) for value in right_or_wrong(blocks)]


REWARDS = {
    "crashes on words": ("result", lambda blocks: [None if text is None else float(text or 0) for text in answers(blocks)]),
    "longest wins": ("split", longest_wins),
    "counts the absent": ("absent", lambda blocks: [sum(block["solution"] is None for block in blocks) for _ in blocks]),
    "by position": ("permutation", lambda blocks: list(range(len(blocks)))),
    "counts its calls": ("pure", counts_its_calls),
    "only in the main thread": ("threads", only_in_the_main_thread),
}


@pytest.mark.long
@pytest.mark.usefixtures("unshrunk_examples")
def test_a_reward_that_fails_in_another_process():
    with pytest.raises(ConformanceError, match=r"breaks 'threads'.*another process"):
        check_reward(other_process, properties=["threads"])
    with pytest.raises(Exception, match="another process"):
        check_reward(lambda blocks: right_or_wrong(blocks), properties=["threads"])


#: (how it is checked, the property that it breaks, what is wrong), by name.
WRONG = {
    f"{kind}, {name}, {broken}": (check, broken, faulty)
    for kind, check, cases in (
        ("completion", check_completions, OF_COMPLETIONS),
        ("token", check_estimator, OF_TOKENS),
        ("step", check_estimator, OF_STEPS),
        ("segmenter", check_segmenter, SEGMENTERS),
        ("reward", partial(check_reward, processes=False), REWARDS),
    )
    for name, (properties, faulty) in cases.items()
    for broken in properties.split()
}


@pytest.mark.parametrize(("check", "broken", "faulty"), WRONG.values(), ids=WRONG)
@pytest.mark.usefixtures("unshrunk_examples")
def test_what_is_wrong_is_found(check, broken, faulty):
    with pytest.raises(ConformanceError, match=f"breaks '{broken}'"):
        check(faulty, properties=[broken])


@pytest.mark.parametrize(
    ("actual", "expected", "differs"),
    [
        ([1e6 + 5e-4, 0.0], [1e6, 0.0], False), ([1e6 + 2e-3], [1e6], True), ([0.0, 2e-3], [-1e6, 0.0], True),
        ([5e-10], [0.0], False), ([1.5e-9], [0.0], True), ([0.0, NAN], [0.0, NAN], True), ([], [], False), ([0.0], [], True),
    ],
)  # fmt: skip
def test_numbers_differ_if_by_more_than_a_billionth_of_the_largest(actual, expected, differs):
    result, right_result = (torch.tensor(numbers, dtype=torch.float64) for numbers in (actual, expected))
    assert differ(result, right_result, tolerance=1e-9) is differs


def test_what_is_right_passes():
    check_estimator(lambda reward_n, group_n: dr_grpo(reward_n, group_n), examples=10)
    check_estimator(lambda reward_n, group_n: (grpo(reward_n, group_n), "more"), kind="completion", examples=5)
    check_estimator(returns, examples=10)
    check_estimator(sums, examples=10)
    check_segmenter(right, examples=5)
    for pays in ("solution", "*", ["*"]):
        check_reward(right_or_wrong, pays=pays, processes=False, examples=5)
