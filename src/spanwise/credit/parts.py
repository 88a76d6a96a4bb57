"""`parts`: what each objective credits a completion with, taken apart into reward, baseline, scale and weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.assign import completed, left_out, summed
from spanwise.credit.registry import Method
from spanwise.credit.registry import method as find
from spanwise.credit.strata import moments
from spanwise.errors import RecipeError
from spanwise.objective import Objective
from spanwise.types import Credit, Scores

_CLOSE = 1e-9
#: What several objectives are called whose sum is compared.
JOINED = " + "


@dataclass(frozen=True)
class Parts:
    """Credit as a sum: `part = weight * (worth - baseline) / divisor` wherever there is a baseline.

    Attributes:
        names: M objectives; or one, where the method compares the sum of all: their names, joined by " + ".
        worth_nm: the reward, or what stands for one that the completion left out; NaN where nothing does.
        baseline_nm: what is subtracted; NaN where nothing of the kind gave the credit.
        divisor_nm: what the difference is divided by, 1 where it is not; NaN as above.
        weight_m: of each objective; 1 of a sum, whose worth has the weights in it.
        part_nm: what the objective credits the blocks with that it pays.
        stratum_nm: completions of one number were compared with each other; -1: with nobody.

    Example:
        >>> from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, credit, read
        >>> batch = Batch.jagged([[0, 1, 3], [0, 2, 3]], ["2+2"] * 2, columns={"answer": ["4"] * 2})
        >>> scheme = Scheme.preset("bae", Layout({"all": ["answer"]}), objectives=[Objective("correct", pays="all")])
        >>> reading = read(batch, scheme, Vocabulary((b"<answer>", b"4", b"5", b"</answer>")))
        >>> found = credit(reading, batch, scheme)
        >>> made = parts(found, reading.scores, batch.group_n, objectives=scheme.objectives, method="bae")
        >>> made.worth_nm.flatten().tolist(), made.baseline_nm.flatten().tolist(), made.part_nm.flatten().tolist()
        ([1.0, 0.0], [0.5, 0.5], [0.5, -0.5])
    """

    names: tuple[str, ...]
    worth_nm: Float[Tensor, "n m"]
    baseline_nm: Float[Tensor, "n m"]
    divisor_nm: Float[Tensor, "n m"]
    weight_m: Float[Tensor, " m"]
    part_nm: Float[Tensor, "n m"]
    stratum_nm: Int[Tensor, "n m"]

    def take(self, rows: Any) -> Parts:
        """Some of the completions."""
        tables = ("worth_nm", "baseline_nm", "divisor_nm", "part_nm", "stratum_nm")
        return replace(self, **{name: getattr(self, name)[rows] for name in tables})


def parts(
    found: Credit, scores: Scores, group_n: Int[Tensor, " n"], *, objectives: Sequence[Objective], method: str | Method
) -> Parts:
    r"""Take credit apart into what its completions are worth and what they are compared with.

    Equation
        A[i] = (r[i] - b[i]) / s[i].  The credit A and the strata are those that were computed. A method that divides by nothing has
        s = 1 and b = r - A. Of any other, b and s are those numbers that give all members of a stratum their credit at once, if
        there are such and b is the mean of the stratum or s is 1. Else b and s are NaN: no single baseline gives the credit.

    Args:
        found: what `assign` made of the scores, before a self-rewarding score is mixed in.
        scores, group_n, objectives, method: what it was made of.

    Edge cases:
        A reward that nobody was compared with has credit 0, and no baseline (NaN). A reward whose check failed is worth NaN.

    Raises:
        RecipeError: a method that credits tokens or steps, which are no differences between two numbers.

    Example:
        >>> from spanwise.credit import assign
        >>> scores = Scores(("correct",), torch.tensor([[1.], [0.], [0.], [0.]]).double(), torch.zeros(4, 1).to(torch.int8),
        ...                 torch.full((4, 1, 2), torch.nan).double())
        >>> rule = {"objectives": [Objective("correct", pays=("all",))], "method": "grpo"}
        >>> found = assign(scores, torch.zeros(4).long(), torch.ones(4, 1).bool(), block_names=("all",), **rule)
        >>> apart = parts(found, scores, torch.zeros(4).long(), **rule)
        >>> [round(float(each[0]), 4) for each in (apart.part_nm, apart.baseline_nm, apart.divisor_nm)]  # (1 - .25) / .5
        [1.5, 0.25, 0.5]
    """
    chosen = find(method) if isinstance(method, str) else method
    if chosen.kind not in ("block", "completion") or found.adv_nm is None or found.stratum_nm is None:
        raise RecipeError(
            f"The credit of method '{chosen.name}' is one number per {chosen.kind}, which no baseline alone explains; take apart "
            f"that of a method by block or by completion, such as bae or grpo."
        )
    if chosen.kind == "block":
        names = tuple(objective.name for objective in objectives)
        worth_nm, adv_nm, stratum_nm = completed(scores, objectives), found.adv_nm, found.stratum_nm
        weight_m = adv_nm.new_tensor([objective.weight for objective in objectives])
        plain_m = ["scale_k" in chosen.inputs and objective.scale != "std" for objective in objectives]
        free_m = [objective.baseline in ("none", "blended") and "baseline" in chosen.inputs for objective in objectives]
    else:
        names = (JOINED.join(objective.name for objective in objectives),)
        worth_nm, adv_nm, stratum_nm = summed(scores, objectives)[:, None], found.adv_nm[:, :1], found.stratum_nm[:, :1]
        weight_m, plain_m, free_m = adv_nm.new_ones(1), [False], [False]
    missing_nm = left_out(scores) if chosen.kind == "block" and "if_missing_k" in chosen.inputs else None
    worth_nm, adv_nm = worth_nm.double(), adv_nm.double()
    baseline_nm, divisor_nm = torch.full_like(worth_nm, torch.nan), torch.full_like(worth_nm, torch.nan)
    for m in range(len(names)):
        worth_n, adv_n, stratum_n = worth_nm[:, m], adv_nm[:, m], stratum_nm[:, m]
        instead_n = torch.zeros_like(worth_n).bool() if missing_nm is None else missing_nm[:, m] & ~worth_n.isnan()
        if plain_m[m]:
            baseline_n, divisor_n = _subtracted(worth_n, adv_n, stratum_n, instead_n, free=free_m[m])
        else:
            baseline_n, divisor_n = _fitted(worth_n, adv_n, stratum_n, instead_n, group_n)
        holds_n = _close((worth_n - baseline_n) / divisor_n, adv_n)
        baseline_nm[:, m] = baseline_n.where(holds_n, torch.nan)
        divisor_nm[:, m] = divisor_n.where(holds_n, torch.nan)
    return Parts(names, worth_nm, baseline_nm, divisor_nm, weight_m, weight_m * adv_nm, stratum_nm)


def _close(one_n: Tensor, other_n: Tensor) -> Tensor:
    return (one_n - other_n).abs() <= _CLOSE * (1 + other_n.abs())


def _subtracted(
    worth_n: Tensor, adv_n: Tensor, stratum_n: Tensor, instead_n: Tensor, *, free: bool
) -> tuple[Tensor, Tensor]:
    """Baseline and divisor where nothing is divided by: the baseline is what the credit leaves of the reward."""
    count_n = moments(worth_n.masked_fill(instead_n, torch.nan), stratum_n).count_n()
    somebody = bool((~worth_n.isnan() & ~instead_n).any())  # what is left out is compared with the batch in the end
    compared_n = torch.where(instead_n, somebody, (count_n > 1) | (adv_n != 0))
    if free:
        compared_n = compared_n | (stratum_n < 0) & ~instead_n & (worth_n == adv_n)
    return (worth_n - adv_n).where(compared_n & ~worth_n.isnan(), torch.nan), torch.ones_like(worth_n)


def _fitted(worth_n: Tensor, adv_n: Tensor, stratum_n: Tensor, instead_n: Tensor, group_n: Tensor) -> tuple[Tensor, Tensor]:
    """Baseline and divisor of each stratum, of those that give all its members their credit."""
    baseline_n, divisor_n = torch.full_like(worth_n, torch.nan), torch.full_like(worth_n, torch.nan)
    order_n = stratum_n.argsort(stable=True)
    sizes = torch.unique_consecutive(stratum_n[order_n], return_counts=True)[1].tolist()
    for members in torch.split(order_n, sizes):
        if int(stratum_n[members[0]]) < 0:
            continue
        members = members[~worth_n[members].isnan() & ~instead_n[members]]
        if len(members) > 1:
            baseline_n[members], divisor_n[members] = _line(worth_n[members], adv_n[members])
    for n in (instead_n & (adv_n != 0)).nonzero().flatten().tolist():  # compared with one of the strata of its group
        group = (group_n == group_n[n]) & ~baseline_n.isnan() & ~instead_n
        holds = group & _close((worth_n[n] - baseline_n) / divisor_n, adv_n[n].expand_as(adv_n))
        if bool(holds.any()):
            first = int(holds.nonzero()[0])
            baseline_n[n], divisor_n[n] = baseline_n[first], divisor_n[first]
    return baseline_n, divisor_n


def _line(worth_i: Tensor, adv_i: Tensor) -> tuple[Tensor, Tensor]:
    """The baseline and the divisor of one stratum, NaN where no two numbers give the credit of all its members."""
    nothing_i = torch.full_like(worth_i, torch.nan)
    low, high, count = int(worth_i.argmin()), int(worth_i.argmax()), len(worth_i)
    rise, gap, mean = adv_i[high] - adv_i[low], worth_i[high] - worth_i[low], worth_i.mean()
    if gap == 0:
        return (worth_i.clone(), torch.ones_like(worth_i)) if bool((adv_i == 0).all()) else (nothing_i, nothing_i)
    others_i = (worth_i.sum() - worth_i) / (count - 1)
    if bool(_close(worth_i - others_i, adv_i).all()):
        return others_i, torch.ones_like(worth_i)
    if rise == 0:
        return nothing_i, nothing_i
    divisor = gap / rise
    divisor = torch.ones_like(divisor) if bool((divisor - 1).abs() <= _CLOSE) else divisor
    baseline = worth_i[high] - divisor * adv_i[high]
    usual = bool(divisor == 1) or bool((baseline - mean).abs() <= _CLOSE * (1 + mean.abs()))
    if not usual or not bool(_close((worth_i - baseline) / divisor, adv_i).all()):
        return nothing_i, nothing_i
    return torch.full_like(worth_i, float(baseline)), torch.full_like(worth_i, float(divisor))
