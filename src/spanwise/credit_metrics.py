"""The credit metrics of a batch, the same in every engine: one table, each metric with how it is computed.

A new one is a row of `CREDIT`, and a line of the docs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from spanwise.credit.strata import group_index
from spanwise.metric import Alarm, Metric
from spanwise.scheme import Scheme
from spanwise.types import Credit, Scores, Status


@dataclass(frozen=True)
class CreditedBatch:
    """The credit of all processes and its rewards, from which the metrics of a batch are computed."""

    credit: Credit
    fault_n: Int[Tensor, " n"]
    present_nk: Bool[Tensor, "n k"]
    scores: Scores
    scheme: Scheme
    group_n: Shaped[Tensor, " n"] | None = None  # prompt ids; None leaves out the metrics of groups

    @cached_property
    def agreement(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For each objective compared in groups: which groups have only equal rewards, and which have several rewards."""
        if self.group_n is None or self.scheme.value_names:
            return {}
        index_n, reward_nm = group_index(self.group_n).cpu(), self.scores.reward_nm.cpu().double()
        shape, index_nm = (len(index_n.unique()), reward_nm.shape[1]), index_n[:, None].expand_as(reward_nm)
        low_gm, high_gm = (
            torch.full(shape, start).double().scatter_reduce(0, index_nm, reward_nm.nan_to_num(nan=start), end)
            for end, start in (("amin", torch.inf), ("amax", -torch.inf))
        )
        count_gm = torch.zeros(shape).index_add(0, index_n, (~reward_nm.isnan()).float())
        return {
            objective.name: (low_gm[:, m] >= high_gm[:, m], count_gm[:, m] > 1)
            for m, objective in enumerate(self.scheme.objectives)
            if objective.baseline not in ("none", "batch")
        }


def _by_block(batch: CreditedBatch, of: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Compute a number from each block's credit, over the completions that have the block."""
    blocks = enumerate(batch.scheme.layout.names)
    return {name: float(of(batch.credit.block_nk[batch.present_nk[:, k], k])) for k, name in blocks}


def _shares(batch: CreditedBatch, count_m: Tensor | None) -> dict[str, float]:
    """Return the share of each objective's rewards that was counted."""
    if count_m is None:
        return {}
    total_m = torch.full_like(count_m, len(batch.fault_n)) if batch.credit.count_m is None else batch.credit.count_m
    counts = zip(batch.scheme.names, count_m.tolist(), total_m.tolist(), strict=True)
    return {name: float(count) / max(int(total), 1) for name, count, total in counts}


def _coarser(batch: CreditedBatch) -> dict[str, float]:
    names_with_levels = {objective.name for objective in batch.scheme.objectives if len(objective.outcomes) > 1}
    return {name: share for name, share in _shares(batch, batch.credit.coarser_m).items() if name in names_with_levels}


def _unanimous(batch: CreditedBatch) -> dict[str, float]:
    return {name: float(same_g[compared_g].double().mean()) for name, (same_g, compared_g) in batch.agreement.items()}


def _all_unanimous(batch: CreditedBatch) -> dict[str, float]:
    # An objective of another baseline may have credit although all rewards of the group agree.
    if len(batch.agreement) < len(batch.scheme.objectives):
        return {}
    is_unanimous_mg, is_compared_mg = map(torch.stack, zip(*batch.agreement.values(), strict=True))
    return {"": float(is_unanimous_mg.all(dim=0)[is_compared_mg.any(dim=0)].double().mean())}


def _costs(batch: CreditedBatch) -> dict[str, float]:
    """Sum what rewards measured of themselves over the batch."""
    scores = batch.scores
    return (
        {} if scores.measured_nc is None else dict(zip(scores.measures, scores.measured_nc.sum(dim=0).tolist(), strict=True))
    )


def _broke(batch: CreditedBatch) -> dict[str, float]:
    """Return the share of completions that broke their own check, for the objectives where there are any."""
    broke_m = (batch.scores.status_nm == int(Status.BROKE)).double().mean(dim=0)
    return {name: share for name, share in zip(batch.scores.names, broke_m.tolist(), strict=True) if share > 0}


def _dead_strata(batch: CreditedBatch) -> dict[str, float]:
    counts = dead_strata(batch.credit, batch.scheme).items()
    return {comparison: dead / strata if strata else math.nan for comparison, (strata, dead) in counts}


def dead_strata(found: Credit, scheme: Scheme, *, group_n: Shaped[Tensor, " n"] | None = None) -> dict[str, tuple[int, int]]:
    """Count the strata of each comparison, and those in which no completion has any credit."""
    if found.adv_nm is None or found.comparison is None:
        return {}
    column_of = {" + ".join(scheme.names): 0}
    if scheme.entry.kind == "block" and group_n is None:
        column_of = {objective.name: m for m, objective in enumerate(scheme.objectives) if objective.baseline != "none"}
    stratum_nm, counts = found.comparison.stratum_nm if group_n is None else group_n[:, None], {}
    for name, m in column_of.items():
        placed_n, credited_n = stratum_nm[:, m] >= 0, found.adv_nm[:, m] != 0
        strata, alive = (len(stratum_nm[rows_n, m].unique()) for rows_n in (placed_n, placed_n & credited_n))
        counts[name] = strata, strata - alive
    return counts


#: Every metric of a batch's credit.
CREDIT = (
    Metric("credit/<block>/mean_abs", lambda batch: _by_block(batch, lambda credit_n: credit_n.abs().mean())),
    Metric("credit/<block>/zero_frac", lambda batch: _by_block(batch, lambda credit_n: (credit_n == 0).double().mean())),
    Metric("credit/stop/mean_abs", lambda batch: {"": float(batch.credit.stop_n.abs().mean())}),
    Metric(
        "credit/malformed",
        lambda batch: {"": float((batch.fault_n != 0).double().mean())},
        lasting=Alarm(
            "above", 0.5, "of the completions are malformed: tags or fields are missing, doubled, nested, out of order or cut off.",
            "Usually the prompt does not ask for them, completions are cut off at the longest length, or nothing pays for the form "
            "and the policy drifts (`format` for tags, `json_schema` for fields).",
        ),
    ),
    Metric(
        "credit/no_signal",
        lambda batch: {"": float(not batch.credit.has_signal)},
        lasting=Alarm(
            "above", 0.99, "of the batches taught nothing: every advantage is 0.",
            "`spanwise why` on their rollouts counts the reasons.",
        ),
        overall=Alarm(
            "above", 0.5,
            "In {share} of the training batches nothing was learned: no completion differed from what it is compared with.",
        ),
    ),
    Metric(
        "credit/<objective>/reward_absent",
        lambda batch: _shares(batch, batch.credit.absent_m),
        lasting=Alarm(
            "above", 0.5, "of the completions have no reward '{name}'.",
            "Usually they leave its block out and if_missing is None, so that this costs nothing; or the reward function returns "
            "None, or its check times out.",
        ),
        overall=Alarm("at least", 1.0, "No completion of any training batch has the reward '{name}'."),
    ),
    Metric(
        "credit/<objective>/broke",
        _broke,
        lasting=Alarm(
            "above", 0.1, "of the completions broke the check of '{name}' twice, and count as wrong.",
            "The policy may have learned to write what the check cannot bear. Read some of them: `spanwise why` names them.",
        ),
    ),
    Metric("cost/<measure>", _costs),
    Metric("credit/<objective>/singletons", lambda batch: _shares(batch, batch.credit.singleton_m)),
    Metric("credit/<objective>/coarser", _coarser),
    Metric("credit/<objective>/unanimous", _unanimous),
    Metric(
        "credit/unanimous",
        _all_unanimous,
        lasting=Alarm(
            "above", 0.9, "of the groups are unanimous: under no objective does a completion differ from the others, so nothing is "
            "learned from them.",
            "Usually the prompts are too easy or too hard for the policy, or the temperature is too low.",
        ),
    ),
    Metric(
        "credit/<comparison>/dead_strata",
        _dead_strata,
        lasting=Alarm(
            "above", 0.95, "of the strata of '{name}' are dead: no completion in them gets any credit, though "
            "rewards differ within groups.",
            "Usually groups are too small to be split by these outcomes: raise group_size, or use baseline: blended.",
            unless="credit/{name}/unanimous",
        ),
    ),
)  # fmt: skip
