"""Truncation and denominators."""

import torch

from faults.catches import catches, equals
from helpers import NAN, assert_close, double
from spanwise import Layout, Vocabulary, find_blocks
from spanwise.engines.trl.fold import fold_factor, kl_term, loss_mask, token_kl

LOSS = double([[1, 2, 0], [4, 4, 4], [3, 0, 0]])
THERE = torch.tensor([[True, True, False], [True, True, True], [True, False, False]])
KEPT = THERE & torch.tensor([[True], [False], [True]])  # the second was cut off


def test_f43_what_is_cut_off_leaves_the_denominator_too():
    """huggingface/trl#6369. Truncated completions left the numerator of the loss and stayed in its denominator."""
    expected = double(6 / 3)  # mean over three rows of the sum over the tokens that are left
    trls = {
        "grpo": lambda loss_nt: (loss_nt.sum(dim=1) / KEPT.sum(dim=1).clamp(min=1)).mean(),
        "bnpo": lambda loss_nt: loss_nt.sum() / KEPT.sum(),
        "dr_grpo": lambda loss_nt: loss_nt.sum() / (3 * 3),
        "dapo": lambda loss_nt: loss_nt.sum() / KEPT.sum(),
    }

    def check(mask_nt):
        for loss_type, reduce in trls.items():
            factor_n1 = fold_factor(mask_nt, loss_type=loss_type, max_completion_length=3, num_items=float(mask_nt.sum()))
            assert_close(reduce(torch.where(KEPT, LOSS * factor_n1, 0.0)), expected, 1e-6)

    catches(check, KEPT.long(), THERE.long())


def test_f44_the_denominator_is_that_of_the_last_mask():
    """huggingface/trl#7068. A denominator was computed, and then another mask took tokens away."""

    def check(mask_nt):
        factor_n1 = fold_factor(mask_nt, loss_type="bnpo", max_completion_length=3, num_items=6.0)
        loss = (LOSS * factor_n1.double() * KEPT).sum() / KEPT.sum()  # TRL's `bnpo`: over the tokens that are left
        assert_close(loss, double(6 / 3), 1e-6)  # mean over three rows of the sum over tokens

    catches(check, KEPT.long(), THERE.long())


def test_f45_one_mask_is_made_of_all():
    """huggingface/trl#4976. The completion mask of a truncated row was zeroed and its tool mask was not."""
    inputs = {"completion_mask": KEPT.long(), "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]])}
    catches(equals([[1, 0, 0], [0, 0, 0], [1, 0, 0]]), loss_mask(inputs).tolist(), inputs["tool_mask"].tolist())


def test_f46_a_masked_nan_stays_out_of_loss_gradient_and_divergence():
    """NovaSky-AI/SkyRL#1633, unsloth-zoo#1262. 0 times NaN is NaN, in a masked KL and in rows without any token."""
    logp_nt, mask_nt = double([[-1.0, -2.0, NAN], [NAN, NAN, NAN]]), torch.tensor([[True, True, False], [False] * 3])
    ref_nt = double([[-1.0, -1.0, 1e4], [NAN, 1e4, 0.0]])

    def check(divergence):
        leaf = logp_nt.clone().requires_grad_()
        total = divergence(leaf)
        total.backward()
        assert_close(total.detach(), double((torch.e - 2) / 2 / 2), 1e-12)
        assert bool(leaf.grad.isfinite().all())

    def ours(leaf):
        return kl_term(token_kl(leaf, ref_nt, mask_nt.long()), mask_nt.long())

    def multiplied(leaf):
        behind = ref_nt - leaf
        kl_nt = (behind.exp() - behind - 1) * mask_nt
        return (kl_nt.sum(dim=1) / mask_nt.sum(dim=1).clamp(min=1)).mean()

    catches(check, ours, multiplied)


def test_f47_uneven_ranks_have_one_mean():
    """huggingface/trl#3248. The mean of the ranks' means is not the mean where ranks hold different numbers of tokens."""

    def check(counted):
        means = []
        for loss_nt, mask_nt in [(LOSS[:1], THERE[:1]), (LOSS[1:2], THERE[1:2])]:  # a row of two tokens, a row of three
            options = {"loss_type": "dapo", "max_completion_length": 3, "num_items": counted(mask_nt), "processes": 2}
            factor_n1 = fold_factor(mask_nt, **options)
            means.append((loss_nt * factor_n1 * mask_nt).sum() / (5 / 2))  # TRL divides by all five tokens over two ranks
        assert_close(torch.stack(means).mean(), double((3 + 12) / 2), 1e-6)

    catches(check, lambda mask_nt: 5.0, lambda mask_nt: 2.0 * float(mask_nt.sum()))  # all tokens; its own


def test_f48_the_last_token_trains_whether_it_ends_the_text_or_was_cut():
    """torchtune#2967. An end of sequence put there at truncation was masked from the loss, another rule for one token."""
    vocabulary = Vocabulary((b"<eos>", b"<answer>", b"4", b"</answer>"))
    layout = Layout({"solution": ["answer"]})

    def ours(ids):
        rows = torch.tensor([ids])
        return find_blocks(rows, torch.ones_like(rows), layout=layout, vocabulary=vocabulary)[0].block_nt[0].tolist()

    def check(find):
        assert find([1, 2, 3, 0])[-1] == find([1, 2, 3])[-1] == find([1, 2])[-1] == 0

    catches(check, ours, lambda ids: [-1 if i == 0 else k for i, k in zip(ids, ours(ids), strict=True)])
