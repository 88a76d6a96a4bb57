"""Advantages that say what they were compared with, from methods that are called for the advantages alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.types import Comparison, Zero

_Inputs = ParamSpec("_Inputs")


class Explained(NamedTuple):
    """What a method gives, and what each number was compared with.

    Attributes:
        advantages: float64, one number per completion, or a column per objective.
        comparison: of as many columns.

    Example:
        >>> import torch
        >>> from spanwise.credit import compare_in_strata
        >>> found = compare_in_strata(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        >>> found.advantages.tolist(), found.comparison.baseline_nm.flatten().tolist()
        ([0.5, -0.5], [0.5, 0.5])
    """

    advantages: Float[Tensor, " n *m"]
    comparison: Comparison


def explains(method: Callable[_Inputs, Explained]) -> Callable[_Inputs, Tensor]:
    """Let a method that returns `Explained` be called for its advantages; `call_explained` still calls it for both.

    Example:
        >>> import torch
        >>> from spanwise.credit import compare_in_strata
        >>> @explains
        ... def minus_mean(reward_n, group_n):
        ...     return compare_in_strata(reward_n, group_n)
        >>> minus_mean(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """

    @functools.wraps(method)
    def advantages(*args: _Inputs.args, **kwargs: _Inputs.kwargs) -> Tensor:
        return method(*args, **kwargs).advantages

    signature = inspect.signature(method).replace(return_annotation="Tensor")
    advantages.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    advantages.explained = method  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]
    return advantages


def call_explained(estimator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a method returns with its comparison, if it `explains`; else what it returns."""
    if isinstance(estimator, functools.partial):
        return call_explained(estimator.func, *estimator.args, *args, **{**estimator.keywords, **kwargs})
    return getattr(estimator, "explained", estimator)(*args, **kwargs)


def comparison_of(
    advantage_n: Float[Tensor, " n"],
    worth_n: Float[Tensor, " n"],
    baseline_n: Float[Tensor, " n"],
    divisor_n: Float[Tensor, " n"],
    *,
    alone_n: Bool[Tensor, " n"] | None = None,
    equal_n: Bool[Tensor, " n"] | None = None,
    stratum_n: Int[Tensor, " n"] | None = None,
    members_n: Tensor | None = None,
    averaged_n: Tensor | None = None,
) -> Comparison:
    """One column: who is alone has no baseline, and neither has a difference that cannot be divided (`divisor_n` is NaN)."""
    nobody_n = torch.zeros_like(worth_n, dtype=torch.bool)
    alone_n, equal_n = nobody_n if alone_n is None else alone_n, nobody_n if equal_n is None else equal_n
    nothing_n = nobody_n.long()
    known_n = ~(worth_n.isnan() | baseline_n.isnan() | divisor_n.isnan() | alone_n)
    reason_n = torch.where(known_n, int(Zero.AT_BASELINE), int(Zero.NO_SCALE))
    for applies_n, reason in (
        (equal_n, Zero.ALL_EQUAL),
        (alone_n, Zero.SINGLETON),
        (worth_n.isnan(), Zero.ABSENT),
        (advantage_n != 0, Zero.CREDITED),
    ):
        reason_n = torch.where(applies_n, int(reason), reason_n)
    columns = {
        "worth_nm": worth_n.double(),
        "baseline_nm": baseline_n.double().where(known_n, torch.nan),
        "divisor_nm": divisor_n.double().where(known_n, torch.nan),
        "stratum_nm": nothing_n - 1 if stratum_n is None else stratum_n,
        "level_nm": nothing_n,
        "members_nm": nothing_n if members_n is None else members_n.long(),
        "averaged_nm": nothing_n if averaged_n is None else averaged_n.where(known_n, 0).long(),
        "reason_nm": reason_n,
        "about_nm": nothing_n - 1,
    }
    return Comparison(**{name: column_n[:, None] for name, column_n in columns.items()})
