"""From the losses of tokens to one number."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.checks import check_mask
from spanwise.credit.strata import group_index
from spanwise.errors import AlignmentError, RecipeError, unknown

#: What a loss is a mean of: all tokens, or each sequence first.
Mode = Literal[
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "sequence-mean-token-sum-norm",
    "token-sum",
    "prompt-mean",
]


def aggregate(
    loss_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    mode: Mode = "token-mean",
    group_n: Int[Tensor, " n"] | None = None,
    length: int | float | None = None,
    whole: int | float | None = None,
) -> Float[Tensor, ""]:
    r"""Make one number of the losses of all tokens, as if the masked ones had been deleted.

    Equation
        token-mean                    sum over tokens / number of tokens
        sequence-mean-token-mean      mean over completions of the mean over their tokens
        sequence-mean-token-sum       mean over completions of the sum over their tokens
        sequence-mean-token-sum-norm  the same, divided by `length`
        token-sum                     sum over tokens
        prompt-mean                   mean over prompts of the mean over the tokens of all their completions

    Args:
        loss_nt: losses; not read where masked.
        mask_nt: the tokens that count.
        mode: one of the above.
        group_n: prompt ids, for `prompt-mean`; all completions of a prompt must be here.
        length: the constant of `sequence-mean-token-sum-norm`, such as the largest completion length (verl divides by the padded
            width of the batch, which changes from batch to batch).
        whole: what to divide by instead of the number of tokens (token-mean), completions or prompts in this batch: that of the
            whole batch where this is a part of it. The parts then add up.

    Edge cases:
        A completion with no token left counts nowhere, nor does a prompt. Nothing left at all gives 0, with gradient 0.

    Example:
        >>> loss_nt = torch.tensor([[1., 1., 0., 0.], [2., 2., 2., 2.]])
        >>> mask_nt = torch.tensor([[True, True, False, False], [True] * 4])
        >>> aggregate(loss_nt, mask_nt), aggregate(loss_nt, mask_nt, mode="sequence-mean-token-mean")
        (tensor(1.6667), tensor(1.5000))

    Reference:
        The names are verl's, `prompt-mean` is SkyRL's.
    """
    if loss_nt.shape != mask_nt.shape:
        raise AlignmentError(f"loss_nt is {tuple(loss_nt.shape)} but mask_nt is {tuple(mask_nt.shape)}.")
    check_mask(mask_nt)
    if mode not in get_args(Mode):
        raise RecipeError(unknown("way to aggregate", mode, get_args(Mode)))
    sum_n = torch.where(mask_nt, loss_nt, 0.0).sum(dim=1)
    length_n = mask_nt.sum(dim=1)
    if mode == "token-sum":
        return sum_n.sum()
    if mode == "token-mean":
        return sum_n.sum() / (length_n.sum().clamp(min=1) if whole is None else whole)
    if mode == "prompt-mean":
        sum_n, length_n = _by_prompt(sum_n, length_n, group_n)
    if mode in ("sequence-mean-token-mean", "prompt-mean"):
        sum_n = sum_n / length_n.clamp(min=1)
    if mode == "sequence-mean-token-sum-norm":
        if length is None or length <= 0:
            raise RecipeError(
                f"'{mode}' divides by a constant; pass length, the largest length of a completion, not {length}."
            )
        sum_n = sum_n / length
    return sum_n.sum() / ((length_n > 0).sum().clamp(min=1) if whole is None else whole)


def _by_prompt(sum_n: Tensor, length_n: Tensor, group_n: Tensor | None) -> tuple[Tensor, Tensor]:
    if group_n is None:
        raise RecipeError("'prompt-mean' needs group_n, the prompt of each completion.")
    if len(group_n) != len(sum_n):
        raise AlignmentError(f"There are {len(sum_n)} completions for {len(group_n)} group ids.")
    prompt_n = group_index(group_n)
    prompts = int(prompt_n.max()) + 1 if len(prompt_n) else 0
    return sum_n.new_zeros(prompts).index_add(0, prompt_n, sum_n), length_n.new_zeros(prompts).index_add(
        0, prompt_n, length_n
    )
