"""Methods that change the token advantages of another method: KTAE and OAR."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.strata import check_mask, check_rewards, check_shapes, group_index
from spanwise.errors import RecipeError, RewardError, check_known
from spanwise.registry import register


def _check_weights(options: Mapping[str, Any]) -> None:
    h1, h2, h3 = options["h1"], options["h2"], options["h3"]
    if min(h1, h2, h3) < 0 or h1 + h2 == 0:
        raise RecipeError(
            f"h1, h2 and h3 are {h1:g}, {h2:g} and {h3:g}. Write 0 or more for each. h1 or h2 must be above "
            "0, because no token changes if both are 0."
        )


@register(
    "ktae",
    kind="refinement",
    paper="KTAE, arXiv 2505.16826",
    source="the authors' code and third-party summaries",
    only_with={"top": ("form", ("code",))},
    check=_check_weights,
)
@torch.no_grad()
def ktae(
    adv_nt: Float[Tensor, "n t"],
    ids_nt: Int[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    correct_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    form: Literal["paper", "code"] = "paper",
    h1: float = 1.0,
    h2: float = 1.0,
    h3: float = 1.0,
    top: float = 1.0,
    k1: float = 2.0,
    b: float = 0.5,
    floor: float = 1e-5,
) -> Float[Tensor, "n t"]:
    r"""Add to each token's advantage how strongly that token goes with correct completions of its group.

    Equation
        over the completions of a group, with T correct and F wrong ones, for each token id w:
        Fi = exp(-2 p), p of Fisher's exact test of "holds w" against "is correct", 0 where p = 1;  IG = information gain in bits
        D = asin sqrt(share of T with w) - asin sqrt(share of F with w) + h3 (tf_T / (tf_F + floor) - tf_F / (tf_T + floor))
        tf = f (k1 + 1) / (f + k1 (1 - b + b len / avg)), f the share of w among the tokens of T or F, len their number
        A[t] <- A[t] + sigmoid((h1 Fi + h2 IG) D) - 1/2                             (form "paper"; p of the table itself)
        A[t] <- A[t] + 2 top (sigmoid((h1 Fi + h2 IG) D / (h1 + h2)) - 1/2)         (form "code"; two-sided p)

    Args:
        adv_nt: advantages of any method; the result has their dtype.
        ids_nt: token ids.
        mask_nt: the trainable tokens; the others get exactly 0, and their ids are not read.
        correct_n: above 0 is correct; NaN where unknown (joins no table, its advantages stay as they are).
        group_n: prompt ids, in any order.
        form: the paper's term, in (-1/2, 1/2), or the authors' code's, in (-top, top).
        h1, h2, h3: weights of Fisher's test, information gain and term frequency; 0 or more, and h1 or h2 above 0.
        top: size of the code's term.
        k1, b: saturation and length correction of the term frequency.
        floor: keeps the ratio of term frequencies finite.

    Edge cases:
        A group that is all correct, all wrong or of one adds exactly 0; so does a token that every completion holds.
        The term does not average to 0: it biases the gradient.

    Example:
        >>> ids_nt = torch.tensor([[7, 8], [7, 8], [7, 9], [7, 9]])
        >>> correct_n, one_prompt = torch.tensor([1., 1., 0., 0.]), torch.zeros(4, dtype=torch.long)
        >>> ktae(torch.zeros(4, 2), ids_nt, torch.ones(4, 2, dtype=torch.bool), correct_n, one_prompt)[0]
        tensor([0.0000, 0.5000])

    Reference:
        "KTAE" 2025 (arXiv 2505.16826). That the paper's p is the probability of the table itself is taken from its print.
    """
    check_shapes(adv_nt=adv_nt, ids_nt=ids_nt, mask_nt=mask_nt, correct_n=correct_n, group_n=group_n)
    check_mask(mask_nt)
    check_rewards(correct_n)
    check_known("form of KTAE", form, ("paper", "code"))
    _check_weights({"h1": h1, "h2": h2, "h3": h3})
    refined_adv_nt = torch.where(mask_nt, adv_nt, 0.0)
    group_index_n = torch.where(correct_n.isnan(), -1, group_index(group_n))
    for g in group_index_n[group_index_n >= 0].unique():
        group_row_i = (group_index_n == g).nonzero().squeeze(1)
        is_token_it = mask_nt[group_row_i]
        is_right_i = correct_n[group_row_i] > 0
        if bool(is_right_i.all()) or not bool(is_right_i.any()) or not bool(is_token_it.any()):
            continue
        token_id_w, id_index_u = torch.unique(ids_nt[group_row_i][is_token_it], return_inverse=True)
        row_of_token_u = is_token_it.nonzero()[:, 0]
        has_token_wi = torch.zeros(len(token_id_w), len(is_right_i), dtype=torch.bool, device=ids_nt.device)
        has_token_wi[id_index_u, row_of_token_u] = True
        right_count_w = has_token_wi[:, is_right_i].sum(dim=1)
        wrong_count_w = has_token_wi[:, ~is_right_i].sum(dim=1)
        right_count = int(is_right_i.sum())
        wrong_count = int((~is_right_i).sum())
        is_right_u = is_right_i[row_of_token_u]
        fisher_evidence_ab, information_gain_ab = _tabulate_evidence(right_count, wrong_count, form == "code")
        evidence_divisor = 1.0 if form == "paper" else h1 + h2
        evidence_ab = (h1 * fisher_evidence_ab + h2 * information_gain_ab).to(ids_nt.device) / evidence_divisor
        right_frequency_w = _count_frequency(id_index_u, is_right_u, len(token_id_w), k1, b)
        wrong_frequency_w = _count_frequency(id_index_u, ~is_right_u, len(token_id_w), k1, b)
        frequency_gap_w = right_frequency_w / (wrong_frequency_w + floor) - wrong_frequency_w / (right_frequency_w + floor)
        right_share_w = right_count_w.double() / right_count
        wrong_share_w = wrong_count_w.double() / wrong_count
        association_w = right_share_w.sqrt().asin() - wrong_share_w.sqrt().asin() + h3 * frequency_gap_w
        added_advantage_it = torch.zeros(is_token_it.shape, dtype=torch.float64, device=adv_nt.device)
        token_advantage_w = torch.sigmoid(evidence_ab[right_count_w, wrong_count_w] * association_w) - 0.5
        added_advantage_it[is_token_it] = (token_advantage_w if form == "paper" else 2 * top * token_advantage_w)[id_index_u]
        refined_adv_nt[group_row_i] = (refined_adv_nt[group_row_i] + added_advantage_it).to(adv_nt.dtype)
    return refined_adv_nt


def _count_frequency(word_u: Tensor, is_counted_u: Tensor, word_count: int, k1: float, b: float) -> Float[Tensor, " w"]:
    """Compute the BM25 term frequency of each token id in a completion."""
    word_share_w = torch.bincount(word_u[is_counted_u], minlength=word_count).double() / is_counted_u.sum().clamp(min=1)
    relative_length = float(is_counted_u.sum()) / (len(is_counted_u) / 2)
    return word_share_w * (k1 + 1) / (word_share_w + k1 * (1 - b + b * relative_length)).clamp(min=1e-300)


@lru_cache(maxsize=256)
def _tabulate_evidence(right: int, wrong: int, two_sided: bool) -> tuple[Float[Tensor, "a b"], Float[Tensor, "a b"]]:
    """Tabulate a token's association with correctness for all counts of right and wrong completions that have the token."""
    right_count_ab = torch.arange(right + 1, dtype=torch.float64)[:, None].expand(right + 1, wrong + 1)
    wrong_count_ab = torch.arange(wrong + 1, dtype=torch.float64).expand(right + 1, wrong + 1)
    count_with_token_ab = right_count_ab + wrong_count_ab
    completion_count = right + wrong
    log_ways_ab = _log_choose(right, right_count_ab) + _log_choose(wrong, wrong_count_ab)
    probability_ab = (log_ways_ab - _log_choose(completion_count, count_with_token_ab)).exp()
    p_value_ab = probability_ab  # the KTAE paper uses the probability of the observed counts as its p-value
    if two_sided:
        # Fisher's exact test: add up the probabilities of all tables that are no more likely than the observed one.
        p_value_ab = torch.zeros_like(probability_ab)
        for other_right_count in range(right + 1):
            other_wrong_count_ab = count_with_token_ab.long() - other_right_count
            table_exists_ab = (other_wrong_count_ab >= 0) & (other_wrong_count_ab <= wrong)
            other_probability_ab = probability_ab[other_right_count][other_wrong_count_ab.clamp(0, wrong)]
            is_counted_ab = table_exists_ab & (other_probability_ab <= probability_ab * (1 + 1e-7))
            p_value_ab += torch.where(is_counted_ab, other_probability_ab, 0.0)
    fisher_evidence_ab = torch.where(p_value_ab > 1 - 1e-9, 0.0, (-2 * p_value_ab).exp())
    entropy_term_with_token_ab = count_with_token_ab / completion_count * _compute_entropy(right_count_ab, wrong_count_ab)
    entropy_without_token_ab = _compute_entropy(right - right_count_ab, wrong - wrong_count_ab)
    entropy_term_without_token_ab = (completion_count - count_with_token_ab) / completion_count * entropy_without_token_ab
    prior_entropy = _compute_entropy(right_count_ab[-1, -1], wrong_count_ab[-1, -1])
    return fisher_evidence_ab, (prior_entropy - entropy_term_with_token_ab - entropy_term_without_token_ab).clamp(min=0.0)


def _log_choose(n: int, k: Tensor) -> Tensor:
    """Compute the logarithm of "n choose k" for each entry of k."""
    total_count = torch.full_like(k, n)
    return (total_count + 1).lgamma() - (k + 1).lgamma() - (total_count - k + 1).lgamma()


def _compute_entropy(x: Tensor, y: Tensor) -> Tensor:
    """Compute the entropy in bits of a set with x items of one class and y of another."""
    item_count = (x + y).clamp(min=1.0)
    return -(torch.xlogy(x / item_count, x / item_count) + torch.xlogy(y / item_count, y / item_count)) / math.log(2)


@register(
    "oar", kind="refinement", paper="Outcome-Grounded Advantage Reshaping, arXiv 2601.07408", source="the authors' code"
)
@torch.no_grad()
def oar(
    adv_nt: Float[Tensor, "n t"],
    importance_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    quantile: float = 0.25,
    beta: float = 1.0,
    floor: float = 0.1,
    sum_to_length: bool = False,
    eps: float = 1e-8,
) -> Float[Tensor, "n t"]:
    r"""Multiply any method's advantages by a weight that grows with the token's importance for the answer.

    Equation
        m[t] = (log1p(imp[t]) - min) / (max - min) over the trainable tokens of the completion, q = their quantile
        w[t] = max(m[t] / (q + eps), floor) if m[t] < q, else 1 + beta (m[t] - q) / (1 - q + eps);  A[t] <- w[t] A[t]

    Args:
        adv_nt: advantages of any method; the result has their dtype.
        importance_nt: how much each token matters for the answer, >= 0 (a divergence, a gradient norm). Under `Scheme.refine` it is
            the surprise of the token, -logp, as no trainer here makes the further passes of the paper's own.
        mask_nt: the tokens to reshape; the others get exactly 0 and are not read.
        quantile: the share of tokens whose advantage shrinks.
        beta: -1 or more. The most important token gets the weight 1 + beta.
        floor: the smallest weight.
        sum_to_length: scale the weights of a completion so that their mean is 1.
        eps: added to both divisors.

    Edge cases:
        Equal importance everywhere gives weight 1 everywhere. Weights are positive: signs never change.

    Example:
        >>> imp_nt = torch.tensor([[0., .2, .5, 1., 3.]])
        >>> oar(torch.ones(1, 5), imp_nt, torch.ones(1, 5, dtype=torch.bool))
        tensor([[0.1000, 1.0000, 1.1853, 1.4243, 2.0000]])

    Reference:
        "OAR" 2026 (arXiv 2601.07408). Its code weights the reasoning only, not the answer; here that is the caller's mask.
    """
    check_shapes(adv_nt=adv_nt, importance_nt=importance_nt, mask_nt=mask_nt)
    check_mask(mask_nt)
    if not 0 <= quantile <= 1:
        raise RecipeError(
            f"quantile is {quantile:g}; it is the share of tokens whose advantage shrinks, so it must lie between 0 and 1."
        )
    if beta < -1:
        raise RecipeError(
            f"beta is {beta:g}; write -1 or more, because smaller numbers would reverse the signs of advantages."
        )
    weighted_adv_nt = torch.zeros_like(adv_nt)
    for i in range(len(adv_nt)):
        mask_t = mask_nt[i]
        importance_u = importance_nt[i, mask_t].double()
        if not len(importance_u):
            continue
        if not bool((importance_u >= 0).all()):
            raise RewardError(f"Completion {i} has an importance of {float(importance_u.amin()):g}; it must be 0 or more.")
        weight_u = _weigh_tokens(importance_u, quantile, beta, floor, eps)
        if sum_to_length:
            weight_u = weight_u / weight_u.mean()
        weighted_adv_nt[i, mask_t] = (adv_nt[i, mask_t] * weight_u).to(adv_nt.dtype)
    return weighted_adv_nt


def _weigh_tokens(importance_u: Tensor, quantile: float, beta: float, floor: float, eps: float) -> Tensor:
    """Turn the importance of tokens into factors for their advantages."""
    log_importance_u = importance_u.log1p()
    min_log_importance, max_log_importance = log_importance_u.aminmax()
    log_range = max_log_importance - min_log_importance if max_log_importance > min_log_importance else 1.0
    scaled_log_u = (log_importance_u - min_log_importance) / log_range
    quantile_rank = quantile * (len(scaled_log_u) - 1)  # not by torch.quantile, which refuses long inputs
    sorted_log_u = scaled_log_u.sort().values
    rank_below = int(quantile_rank)
    next_rank = min(rank_below + 1, len(scaled_log_u) - 1)
    quantile_log = torch.lerp(sorted_log_u[rank_below], sorted_log_u[next_rank], quantile_rank - rank_below)
    reduced_weight_u = (scaled_log_u / (quantile_log + eps)).clamp(min=floor)
    increased_weight_u = 1 + beta * (scaled_log_u - quantile_log) / (1 - quantile_log + eps)
    return torch.where(scaled_log_u < quantile_log, reduced_weight_u, increased_weight_u)
