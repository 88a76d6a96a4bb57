"""Compare numbers with the mean of their stratum, which is a set of comparable completions.

A stratum is the batch, the completions of one prompt (a group), or those of one prompt with equal outcomes. No other module
divides by a group's moment. Everything here is float64, takes strata of any size in any order, and leaves NaN values out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, ParamSpec, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError, RecipeError, RewardError, check_known
from spanwise.types import Comparison, Zero

#: Where epsilon enters a divisor: std + eps, sqrt(var + eps) or sqrt(max(var, eps)).
EpsAt = Literal["std", "variance", "floor"]

_ROWS = 32
_Inputs = ParamSpec("_Inputs")


def first_of(wrong: Tensor) -> list[int]:
    """Return the indices of the first True in `wrong`, or an empty list."""
    return wrong.nonzero()[:1].flatten().tolist()


def check_rewards(reward: Tensor, *, row: str = "completion", column: str = "token") -> None:
    """Refuse an infinite reward. NaN is allowed, because it means an absent reward."""
    if bool(reward.sum().isfinite()):  # a finite sum proves that no reward is infinite
        return
    if location := first_of(reward.isinf()):
        column_text = f" at {column} {location[1]}" if len(location) > 1 else ""
        raise RewardError(
            f"The reward of {row} {location[0]} is {float(reward[tuple(location)])}{column_text}; a reward must be finite, or NaN "
            f"if it is absent."
        )


def check_mask(mask_nt: Tensor) -> None:
    """Refuse a mask that is not boolean, because 0 and 1 would be read as indices."""
    if mask_nt.dtype != torch.bool:
        raise AlignmentError(f"mask_nt holds {mask_nt.dtype}, but a mask must be boolean; pass mask_nt.bool().")


def check_counts(items: Sized, item_noun: str, others: Sized, other_noun: str, *, advice: str) -> None:
    """Refuse two lists or tensors of different lengths."""
    if len(items) != len(others):
        raise AlignmentError(f"There are {len(items)} {item_noun} for {len(others)} {other_noun}; {advice}.")


def check_shapes(**tensors: Tensor | None) -> None:
    """Refuse tensors of different sizes along an axis that their names share, such as `n` in `x_n` and `y_nt`."""
    given_tensors = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
    first_tensor_name, first_tensor = given_tensors[0]
    first_axis_letters = first_tensor_name.rpartition("_")[2]
    for name, tensor in given_tensors[1:]:
        axis_pairs = zip(first_axis_letters, name.rpartition("_")[2], strict=False)
        shared_axis_count = sum(first_axis == axis for first_axis, axis in axis_pairs)
        if tensor.shape[:shared_axis_count] != first_tensor.shape[:shared_axis_count]:
            raise AlignmentError(
                f"{first_tensor_name} has the shape {tuple(first_tensor.shape)}, which does not fit the shape "
                f"{tuple(tensor.shape)} of {name}."
            )


class Explained(NamedTuple):
    """The advantages that a method returned, and the baseline and compared group behind each advantage.

    Attributes:
        advantages: float64, one number per completion, or a column per objective.
        comparison: of as many columns.

    Example:
        >>> result = compare_in_strata(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        >>> result.advantages.tolist(), result.comparison.baseline_nm.flatten().tolist()
        ([0.5, -0.5], [0.5, 0.5])
    """

    advantages: Float[Tensor, " n *m"]
    comparison: Comparison

    def where(self, mask_n: Bool[Tensor, " n"], other: Explained) -> Explained:
        """Take this result's advantages where the mask is true, else those of `other`. Each result has one column."""
        merged_comparison = self.comparison.where(mask_n[:, None], other.comparison)
        return Explained(self.advantages.where(mask_n, other.advantages), merged_comparison)


def explains(method: Callable[_Inputs, Explained]) -> Callable[_Inputs, Tensor]:
    """Decorate a method that returns `Explained`, so that an ordinary call returns the advantages alone.

    Example:
        >>> @explains
        ... def minus_mean(reward_n, group_n):
        ...     return compare_in_strata(reward_n, group_n)
        >>> minus_mean(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    @functools.wraps(method)
    @torch.no_grad()  # no gradient may flow through advantages
    def return_advantages(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> Tensor:
        return method(*args, **kwargs).advantages

    return_advantages.explained = method  # type: ignore[attr-defined]
    return return_advantages


def call_explained(estimator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method, and return an `Explained` (advantages with reasons) if the method can, else plain advantages."""
    if isinstance(estimator, functools.partial):
        return call_explained(estimator.func, *estimator.args, *args, **{**estimator.keywords, **kwargs})
    return getattr(estimator, "explained", estimator)(*args, **kwargs)


def explain_advantages(
    advantage_n: Float[Tensor, " n"],
    worth_n: Float[Tensor, " n"],
    baseline_n: Float[Tensor, " n"],
    divisor_n: Float[Tensor, " n"],
    *,
    alone_n: Bool[Tensor, " n"],
    equal_n: Bool[Tensor, " n"],
    stratum_n: Int[Tensor, " n"] | None = None,
    members_n: Tensor | None = None,
    averaged_n: Tensor | None = None,
) -> Explained:
    """Return advantages with the rewards, baselines and divisors behind them."""
    zeros_n = torch.zeros_like(worth_n, dtype=torch.long)
    has_baseline_n = ~(worth_n.isnan() | baseline_n.isnan() | divisor_n.isnan() | alone_n)
    reason_n = torch.full_like(zeros_n, int(Zero.NO_SCALE))
    for has_reason_n, reason in (
        (has_baseline_n, Zero.AT_BASELINE),
        (equal_n, Zero.ALL_EQUAL),
        (alone_n, Zero.SINGLETON),
        (worth_n.isnan(), Zero.ABSENT),
        (advantage_n != 0, Zero.CREDITED),
    ):
        reason_n.masked_fill_(has_reason_n, int(reason))
    comparison_columns = {
        "worth_nm": worth_n.double(),
        "baseline_nm": baseline_n.double().where(has_baseline_n, torch.nan),
        "divisor_nm": divisor_n.double().where(has_baseline_n, torch.nan),
        "stratum_nm": zeros_n - 1 if stratum_n is None else stratum_n,
        "level_nm": zeros_n,
        "members_nm": zeros_n if members_n is None else members_n.long(),
        "averaged_nm": zeros_n if averaged_n is None else averaged_n.where(has_baseline_n, 0).long(),
        "reason_nm": reason_n,
        "about_nm": zeros_n - 1,
    }
    return Explained(advantage_n, Comparison(**{name: column_n[:, None] for name, column_n in comparison_columns.items()}))


def list_ids(ids: Any) -> list[Any]:
    """Return ids, such as group ids, as a list of Python values, because equal tensors have different hashes."""
    id_values = ids.tolist() if hasattr(ids, "tolist") else ids
    return [id_value.tolist() if isinstance(id_value, Tensor) else id_value for id_value in id_values]


def group_index(groups: Sequence[Hashable] | Tensor) -> Int[Tensor, " n"]:
    """Turn group ids of any kind (integers, strings, ...) into dense integers 0..G-1. Equal ids get equal integers.

    >>> group_index(["b", "a", "b"])
    tensor([0, 1, 0])
    """
    if isinstance(groups, Tensor):
        return torch.unique(groups, return_inverse=True)[1]
    index_of_group: dict[Hashable, int] = {}
    return torch.tensor(
        [index_of_group.setdefault(group, len(index_of_group)) for group in list_ids(groups)], dtype=torch.long
    )


def weighted(reward_nm: Float[Tensor, "n m"], weight_m: Float[Tensor, " m"]) -> Float[Tensor, "n m"]:
    """Multiply rewards by their weights. A reward of weight 0 adds 0 even if it is absent (NaN)."""
    return torch.where(weight_m == 0, 0.0, reward_nm * weight_m)


def weights_of(reward_nm: Float[Tensor, "n m"], weight_m: Float[Tensor, " m"] | None) -> Float[Tensor, " m"]:
    """Return the weights of the rewards in float64. If none are given, each weight is 1."""
    weight_m = torch.ones(reward_nm.shape[1]) if weight_m is None else weight_m
    check_counts(weight_m, "weights", reward_nm.T, "rewards", advice="give one weight to each reward")
    return weight_m.double().to(reward_nm.device)


def as_columns(outcome_no: Float[Tensor, " n *o"]) -> Float[Tensor, "n o"]:
    """Return outcomes as a table with one column per outcome. A vector becomes one column."""
    return outcome_no[:, None] if outcome_no.dim() == 1 else outcome_no


def refine(group_n: Int[Tensor, " n"], outcome_no: Float[Tensor, " n *o"]) -> Int[Tensor, " n"]:
    """Split groups by outcome: equal outcomes of one group share a stratum. Any unknown one (NaN) gives -1.

    Args:
        group_n: group ids of any sign.
        outcome_no: one outcome (n) or several (n, o).

    >>> refine(torch.tensor([0, 0, 0, 1]), torch.tensor([1., 0., 1., float("nan")]))
    tensor([ 1,  0,  1, -1])
    >>> refine(torch.tensor([-7, -7, -7]), torch.tensor([[1., 0.], [1., 2.], [1., 0.]]))
    tensor([0, 1, 0])
    """
    stratum_n = group_index(group_n)
    outcome_no = as_columns(outcome_no)
    for outcome_index, outcome_n in enumerate(outcome_no.T):
        distinct_outcomes, outcome_id_n = torch.unique(outcome_n.nan_to_num(nan=0.0), return_inverse=True)
        # Number the strata from 0 again, so that the numbers stay small.
        renumbered_stratum_n = group_index(stratum_n) if outcome_index > 0 else stratum_n
        stratum_n = renumbered_stratum_n * len(distinct_outcomes) + outcome_id_n
    return torch.where(outcome_no.isnan().any(dim=1), -1, stratum_n)


@dataclass(frozen=True)
class Moments:
    """The count, mean and sum of squared deviations in each stratum (compared set of completions)."""

    stratum_n: Int[Tensor, " n"]  # The number of each completion's stratum; -1: in no stratum.
    member_n: Bool[Tensor, " n"]  # True if the completion has a stratum and a value to compare, such as a reward.
    deviation_n: Float[Tensor, " n"]  # The value minus its stratum's mean; 0 if the value is absent.
    count_s: Float[Tensor, " s"]
    mean_s: Float[Tensor, " s"]
    square_s: Float[Tensor, " s"]  # the sum of squared deviations; 0 in an empty stratum

    def count_n(self) -> Float[Tensor, " n"]:
        """Return how many members each completion's stratum has (0 for a completion without a stratum)."""
        return self.look_up(self.count_s, 0.0)

    def mean_n(self) -> Float[Tensor, " n"]:
        """Return the mean of each completion's stratum, or NaN if the stratum is empty."""
        return self.look_up(self.mean_s, torch.nan)

    def std_n(self, *, ddof: int, stand_in_n: Float[Tensor, " n"] | None = None) -> Float[Tensor, " n"]:
        """Return the standard deviation of each completion's stratum, or 0 if it is undefined."""
        count_s, sum_of_squares_s = self.count_s, self.square_s
        if stand_in_n is not None:
            joins_stratum_n = (self.stratum_n >= 0) & ~self.member_n & ~stand_in_n.isnan()
            stand_in_deviation_i = (stand_in_n.double() - self.mean_n())[joins_stratum_n]
            stratum_i = self.stratum_n[joins_stratum_n]
            count_s = count_s.index_add(0, stratum_i, torch.ones_like(stand_in_deviation_i))
            sum_of_squares_s = sum_of_squares_s.index_add(0, stratum_i, stand_in_deviation_i.square())
        degrees_of_freedom_s = count_s - ddof
        variance_s = torch.where(degrees_of_freedom_s > 0, sum_of_squares_s / degrees_of_freedom_s.clamp(min=1.0), 0.0)
        return self.look_up(variance_s.sqrt(), 0.0)

    def constant_n(self) -> Bool[Tensor, " n"]:
        """Return whether each completion's stratum holds only equal values. Return True for a stratum without values."""
        return self.look_up(self.square_s, 0.0) == 0

    def look_up(self, value_s: Tensor, nowhere: float) -> Float[Tensor, " n"]:
        """Return the entry of each completion's stratum in a table, such as the means, or `nowhere` without a stratum."""
        return value_s[self.stratum_n.clamp(min=0)].masked_fill_(self.stratum_n < 0, nowhere)

    def pooled_variance_of_others(self) -> Float[Tensor, " s"]:
        """For each stratum, pool the variances inside all other strata."""
        degrees_of_freedom_s = (self.count_s - 1).clamp(min=0.0)
        degrees_of_freedom_of_others_s = degrees_of_freedom_s.sum() - degrees_of_freedom_s
        square_sum_of_others_s = (self.square_s.sum() - self.square_s).clamp(min=0.0)
        return square_sum_of_others_s / degrees_of_freedom_of_others_s  # NaN (0 / 0) if no other stratum has 2 members


def moments(
    value_n: Float[Tensor, " n"], stratum_n: Int[Tensor, " n"], *, weight_n: Float[Tensor, " n"] | None = None
) -> Moments:
    """Compute the count, mean and sum of squared deviations of each stratum (compared set). Skip NaN.

    `stratum_n` is numbered as by `group_index` and `refine`; -1 is no stratum. Values are shifted by their stratum's minimum
    before they are summed, so a constant stratum has deviation exactly 0. Each is counted `weight_n` times; None: once.

    Raises:
        AlignmentError: sizes differ; a number below -1, which is an id of something and no stratum.
        RewardError: an infinite value, in a stratum or not.

    Example:
        >>> m = moments(torch.tensor([1., 0., 0., 5.]), torch.tensor([7, 7, 7, 2]))
        >>> m.deviation_n, m.count_n()
        (tensor([ 0.6667, -0.3333, -0.3333,  0.0000], dtype=torch.float64), tensor([3., 3., 3., 1.], dtype=torch.float64))
    """
    check_counts(value_n, "rewards", stratum_n, "group ids", advice="give one group id to each completion")
    check_rewards(value_n)
    lowest_stratum, highest_stratum = map(int, stratum_n.aminmax()) if len(stratum_n) else (-1, -1)
    if lowest_stratum < -1:
        raise AlignmentError(
            f"stratum_n holds {lowest_stratum}. The number of a stratum (a set of compared completions) is 0 or more, or -1 "
            f"for none. Pass group_index(ids) instead of ids of your own."
        )
    is_in_stratum_n = stratum_n >= 0
    if highest_stratum > 16 * len(stratum_n):  # memory grows with the highest stratum number
        stratum_n = group_index(stratum_n).where(is_in_stratum_n, -1)
        highest_stratum = len(stratum_n)
    is_member_n = is_in_stratum_n & ~value_n.isnan()
    stratum_index_n = stratum_n.clamp(min=0).long()
    weight_n = is_member_n.double() if weight_n is None else weight_n.double().where(is_member_n, 0.0)
    value_n = value_n.double().where(is_member_n, torch.inf)
    zeros_s = torch.zeros(max(highest_stratum, 0) + 1, dtype=torch.float64, device=value_n.device)
    count_s = zeros_s.index_add(0, stratum_index_n, weight_n)
    minimum_s = zeros_s.scatter_reduce(0, stratum_index_n, value_n, "amin", include_self=False)
    excess_n = (value_n - minimum_s[stratum_index_n]).masked_fill_(~is_member_n, 0.0)
    mean_excess_s = zeros_s.index_add(0, stratum_index_n, weight_n * excess_n) / count_s.where(count_s > 0, 1.0)
    deviation_n = (excess_n - mean_excess_s[stratum_index_n]).masked_fill_(~is_member_n, 0.0)
    mean_s = (minimum_s + mean_excess_s).masked_fill_(count_s <= 0, torch.nan)
    square_sum_s = zeros_s.index_add(0, stratum_index_n, weight_n * deviation_n.square())
    return Moments(stratum_n, is_member_n, deviation_n, count_s, mean_s, square_sum_s)


def compare_in_strata(
    value_n: Float[Tensor, " n"],
    stratum_n: Int[Tensor, " n"],
    *,
    leave_one_out: bool = False,
    min_stratum: int = 2,
    scale: str = "none",
    ddof: int = 1,
    eps: float = 0.0,
    stand_in_n: Float[Tensor, " n"] | None = None,
    voter_n: Int[Tensor, " n"] | None = None,
) -> Explained:
    r"""Subtract from each value the mean of its stratum (compared set). Divide by the stratum's deviation or mean if asked.

    Equation
        A[i] = (v[i] - mean_S v) * (n/(n-1) if leave_one_out else 1) / divisor
        divisor = 1 (scale "none"), std_S + eps ("std") or mean_S + eps ("mean")
        with stand-ins u:  A[j] = (u[j] - mean_S v) / divisor  at an absent value j,
            std_S^2 = (sum of (v[i] - mean_S v)^2 + sum of (u[j] - mean_S v)^2) / (n + k - ddof)

    n/(n-1) times the deviation is exactly v[i] minus the mean of the *other* members. Absent values, strata with fewer than
    `min_stratum` (at least 2) members, constant strata and strata whose divisor is not positive give exactly 0.

    The k stand-ins join the deviation and not the mean: members are compared with members alone, and |A[j]| is at most
    sqrt((n + k - ddof) / k), however close to each other the members are. One member is enough to compare a stand-in with.

    voter_n: the rows of one voter in a stratum (the turns of a trajectory) are one member, which has their mean; each row is then
    compared with the mean of the members. `leave_one_out` leaves out the whole voter. Not with a scale.

    `centred` returns the advantages alone.

    Example:
        >>> centred(torch.tensor([1., 0., 0., 5.]), torch.tensor([0, 0, 0, 1]), leave_one_out=True)
        tensor([ 1.0000, -0.5000, -0.5000,  0.0000], dtype=torch.float64)
        >>> value_n, minus_one_n = torch.tensor([0., 2., float("nan")]), torch.full((3,), -1.0)
        >>> centred(value_n, torch.zeros(3).long(), scale="std", stand_in_n=minus_one_n)  # mean 1, std sqrt((1 + 1 + 4) / 2)
        tensor([-0.5774,  0.5774, -1.1547], dtype=torch.float64)

        Three turns of one trajectory and one of another: the mean of the votes 2/3 and 0 is 1/3.

        >>> centred(torch.tensor([1., 1., 0., 0.]), torch.zeros(4).long(), voter_n=torch.tensor([0, 0, 0, 1]))
        tensor([ 0.6667,  0.6667, -0.3333, -0.3333], dtype=torch.float64)
    """
    check_known("scale", scale, ("none", "std", "mean"))
    stratum_moments = moments(value_n, stratum_n)
    float64_value_n = value_n.double()
    stand_in_n = torch.full_like(float64_value_n, torch.nan) if stand_in_n is None else stand_in_n.double()
    if voter_n is None:
        count_n = stratum_moments.count_n()
        mean_n = stratum_moments.mean_n()
        advantage_n = stratum_moments.deviation_n
        if leave_one_out:
            advantage_n = advantage_n * count_n / (count_n - 1).clamp(min=1.0)
    elif scale != "none":
        raise RecipeError(f"In trajectories, credit is not divided by a scale, but scale is '{scale}'. Set scale='none'.")
    else:
        count_n, mean_n, advantage_n = _compare_rollouts(value_n, stratum_n, voter_n, leave_one_out, min_stratum)
    uses_stand_in_n = ~stratum_moments.member_n & ~stand_in_n.isnan() & (count_n > 0)
    advantage_n = torch.where(uses_stand_in_n, stand_in_n - mean_n, advantage_n)
    float64_value_n = torch.where(float64_value_n.isnan(), stand_in_n, float64_value_n)
    baseline_n = float64_value_n - advantage_n
    divisor_n = torch.ones_like(advantage_n)
    if scale != "none":
        scale_n = (mean_n if scale == "mean" else stratum_moments.std_n(ddof=ddof, stand_in_n=stand_in_n)) + eps
        has_divisor_n = (advantage_n != 0) | ((scale_n > 0) & ~stratum_moments.constant_n())
        scale_or_nan_n = torch.where(scale_n > 0, scale_n, torch.nan)
        divisor_n = torch.where(has_divisor_n, scale_or_nan_n, divisor_n)
        advantage_n = torch.where(scale_n > 0, advantage_n / scale_or_nan_n, 0.0)
    is_compared_n = (stratum_moments.member_n & (count_n >= max(min_stratum, 2))) | uses_stand_in_n
    advantage_n = torch.where(is_compared_n, advantage_n, 0.0)
    return explain_advantages(
        advantage_n, float64_value_n, baseline_n, divisor_n,
        alone_n=~is_compared_n, equal_n=stratum_moments.member_n & stratum_moments.constant_n(),
        stratum_n=stratum_n.long().where(stratum_moments.member_n | uses_stand_in_n, -1), members_n=count_n,
        averaged_n=count_n - stratum_moments.member_n.double() if leave_one_out else count_n,
    )  # fmt: skip


centred = explains(compare_in_strata)


def _compare_rollouts(
    value_n: Tensor, stratum_n: Tensor, rollout_n: Tensor, leave_one_out: bool, min_stratum: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compare turns so that a rollout counts once in its stratum, and return rollout counts, means and advantages."""
    # Merge a rollout's turns in the same stratum into one entry with their mean reward.
    rollout_moments = moments(value_n, refine(stratum_n, group_index(rollout_n).double()).where(stratum_n >= 0, -1))
    rollout_stratum_j = torch.full_like(rollout_moments.count_s, -1, dtype=torch.long)
    is_in_stratum_n = rollout_moments.stratum_n >= 0
    rollout_stratum_j[rollout_moments.stratum_n[is_in_stratum_n]] = stratum_n[is_in_stratum_n].long()
    rollout_adv_j = centred(rollout_moments.mean_s, rollout_stratum_j, leave_one_out=leave_one_out, min_stratum=min_stratum)
    stratum_moments = moments(rollout_moments.mean_s, rollout_stratum_j)
    rollout_count_n = rollout_moments.look_up(stratum_moments.count_n(), 0.0)
    stratum_mean_n = rollout_moments.look_up(stratum_moments.mean_n(), torch.nan)
    return rollout_count_n, stratum_mean_n, rollout_moments.deviation_n + rollout_moments.look_up(rollout_adv_j, 0.0)


def standardise(
    value_n: Float[Tensor, " n"],
    *,
    weight_n: Int[Tensor, " n"] | Float[Tensor, " n"] | None = None,
    shift: bool = True,
    ddof: int = 1,
    eps: float = 0.0,
    eps_at: EpsAt = "std",
) -> tuple[Float[Tensor, " n"], float, float]:
    """Standardise weighted values over the batch. Return the results (0 if all are equal), mean and divisor.

    A[i] = (v[i] - mean v if shift else v[i]) / (std + eps, sqrt(var + eps) or sqrt(max(var, eps)) by `eps_at`)
    """
    weight_n = torch.ones_like(value_n) if weight_n is None else weight_n
    is_member_n = ~value_n.isnan() & (weight_n > 0)
    value_n = torch.where(is_member_n, value_n.double(), torch.nan)
    weight_n = torch.where(is_member_n, weight_n.double(), 0.0)
    mean_n = moments(value_n, torch.zeros(len(value_n), dtype=torch.long, device=value_n.device), weight_n=weight_n).mean_n()
    deviation_n = (value_n - mean_n).nan_to_num(nan=0.0)
    square_sum = float((weight_n * deviation_n.square()).sum())
    divisor = _find_divisor(square_sum, float(weight_n.sum()), ddof, eps, eps_at)
    numerator_n = deviation_n if shift else value_n.nan_to_num(nan=0.0)
    batch_mean = float(mean_n[0]) if shift and len(mean_n) else 0.0
    return numerator_n / divisor if divisor > 0 else torch.zeros_like(value_n), batch_mean, divisor


def standardise_tokens(
    value_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_at: EpsAt = "variance",
    in_place: bool = False,
) -> Float[Tensor, "n t"]:
    """Standardise the values of all tokens in the mask together. All other tokens get exactly 0."""
    token_mean, square_sum, token_count = _measure_tokens(value_nt, mask_nt)
    deviation_divisor = _find_divisor(square_sum, token_count, ddof, eps, eps_at)
    whitened_nt = value_nt if in_place else value_nt.clone()
    if deviation_divisor == 0:
        return whitened_nt.zero_()
    for whitened_chunk, mask_chunk in zip(whitened_nt.split(_ROWS), mask_nt.split(_ROWS), strict=True):
        whitened_chunk.sub_(token_mean).div_(deviation_divisor).masked_fill_(~mask_chunk, 0.0)
    return whitened_nt


def _measure_tokens(value_nt: Tensor, mask_nt: Tensor) -> tuple[float, float, int]:
    """Compute the mean, the sum of squared deviations and the number of the values inside the mask."""
    running_mean, square_sum, token_count = 0.0, 0.0, 0
    # A few rows at a time are copied to float64, so that the copies stay in the cache.
    for value_chunk, mask_chunk in zip(value_nt.split(_ROWS), mask_nt.split(_ROWS), strict=True):
        chunk_token_count = int(torch.count_nonzero(mask_chunk))
        if chunk_token_count == 0:
            continue
        if token_count == 0:  # subtracting the first value makes a constant batch exactly 0
            running_mean = float(value_chunk.flatten()[mask_chunk.flatten().int().argmax()])
        deviation = (value_chunk.double() - running_mean).masked_fill_(~mask_chunk, 0.0).flatten()
        deviation_sum = float(deviation.sum())
        square_sum += float(deviation.dot(deviation)) - deviation_sum**2 / (token_count + chunk_token_count)
        running_mean = running_mean + deviation_sum / (token_count + chunk_token_count)
        token_count = token_count + chunk_token_count
    return running_mean, max(square_sum, 0.0), token_count


def _find_divisor(square_sum: float, total_weight: float | int, ddof: int, eps: float, eps_at: EpsAt) -> float:
    """Return the standard deviation, with eps, or 0 if the values do not vary."""
    check_known("place of eps", eps_at, get_args(EpsAt))
    if square_sum <= 0 or total_weight <= max(ddof, 1):
        return 0.0
    variance = square_sum / (total_weight - ddof)
    if eps_at == "std":
        return variance**0.5 + eps
    return (max(variance, eps) if eps_at == "floor" else variance + eps) ** 0.5
