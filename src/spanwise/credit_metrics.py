"""The metrics of a batch's credit. They are the same in every engine.

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

from spanwise.batch import Steps
from spanwise.credit.spread import fill_missing, weights
from spanwise.credit.strata import group_index, moments, weighted
from spanwise.credit.trajectories.rollouts import worth_of_turns
from spanwise.metric import Alarm, Metric
from spanwise.scheme import Scheme
from spanwise.types import Credit, Scores, Status


@dataclass(frozen=True)
class CreditedBatch:
    """The credit and rewards of a batch, gathered from all processes. Its metrics are computed from them."""

    credit: Credit
    fault_n: Int[Tensor, " n"]
    present_nk: Bool[Tensor, "n k"]
    scores: Scores
    scheme: Scheme
    group_n: Shaped[Tensor, " n"] | None = None  # The prompt id of each row; without it, metrics of groups are left out.
    steps: Steps | None = None  # The rollout of each row, if rows are turns.

    @cached_property
    def agreement(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Maps rewards to two masks of groups: rewards are equal, two or more exist. The baseline `batch` has one group."""
        if self.group_n is None or self.scheme.value_names:
            return {}
        group_n = group_index(self.group_n).cpu()
        objectives = self.scheme.objectives
        reward_nm = fill_missing(self.scores, objectives)
        peer_reward_nm = reward_nm
        if self.steps is not None:
            ids = self.steps.trajectory_s, self.steps.step_s
            reward_nm, peer_reward_nm = worth_of_turns(self.scores, *ids, objectives=objectives, kind=self.scheme.entry.kind)
        names, baselines = list(self.scheme.names), [objective.baseline for objective in objectives]
        if self.scheme.entry.kind != "block" and len(names) > 1:  # without block credit, a method compares sums of rewards
            names, baselines = [*names, " + ".join(names)], [*baselines, None]
            weight_m = weights(objectives, reward_nm)
            reward_nm, peer_reward_nm = (
                torch.cat([compared_reward_nm, weighted(compared_reward_nm, weight_m).sum(dim=1, keepdim=True)], dim=1)
                for compared_reward_nm in (reward_nm, peer_reward_nm)
            )
        agreement_by_comparison = {}
        for m, (name, baseline) in enumerate(zip(names, baselines, strict=True)):
            if baseline != "none":
                peer_group_n = torch.zeros_like(group_n) if baseline == "batch" else group_n
                is_unanimous_g = moments(reward_nm[:, m].cpu(), peer_group_n).square_s == 0
                agreement_by_comparison[name] = is_unanimous_g, moments(peer_reward_nm[:, m].cpu(), peer_group_n).count_s > 1
        return agreement_by_comparison


def _by_block(batch: CreditedBatch, compute: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Compute one number from the credits of each block by `compute`. Completions without the block are left out."""
    numbered_blocks = enumerate(batch.scheme.layout.names)
    return {name: float(compute(batch.credit.block_nk[batch.present_nk[:, k], k])) for k, name in numbered_blocks}


def _divide(batch: CreditedBatch, count_m: Tensor | None) -> dict[str, float]:
    """Divide each objective's count by the number of completions, trajectories or turns that the objective scores."""
    if count_m is None:
        return {}
    scored_count_m = batch.credit.count_m
    scored_counts = [len(batch.fault_n)] * len(count_m) if scored_count_m is None else scored_count_m.tolist()
    counts_and_totals = zip(batch.scheme.names, count_m.tolist(), scored_counts, strict=True)
    return {name: float(count) / max(int(total), 1) for name, count, total in counts_and_totals}


def _measure_coarser(batch: CreditedBatch) -> dict[str, float]:
    """For each objective, return the share of rewards that are compared without regard to some outcome in `given`."""
    multi_outcome_names = {objective.name for objective in batch.scheme.objectives if len(objective.outcomes) > 1}
    return {name: share for name, share in _divide(batch, batch.credit.coarser_m).items() if name in multi_outcome_names}


def _measure_unanimous(batch: CreditedBatch) -> dict[str, float]:
    """Return each reward's share of groups with equal rewards, leaving out groups with only one reward."""
    return {name: float(is_same_g[has_peer_g].double().mean()) for name, (is_same_g, has_peer_g) in batch.agreement.items()}


def _measure_all_unanimous(batch: CreditedBatch) -> dict[str, float]:
    """Return the share of groups whose rewards are all equal under every objective."""
    # With the baseline `none` or `batch`, even a group of equal rewards may get credit, so the metric is left out.
    if not batch.agreement or any(objective.baseline in ("none", "batch") for objective in batch.scheme.objectives):
        return {}
    unanimous_masks, compared_masks = zip(*(batch.agreement[name] for name in batch.scheme.names), strict=True)
    is_unanimous_g = torch.stack(unanimous_masks).all(dim=0)
    is_compared_g = torch.stack(compared_masks).any(dim=0)
    return {"": float(is_unanimous_g[is_compared_g].double().mean())}


def _add_up_costs(batch: CreditedBatch) -> dict[str, float]:
    """Add up the costs, such as tokens and seconds, that reward functions report for the batch."""
    cost_nc = batch.scores.measured_nc
    return {} if cost_nc is None else dict(zip(batch.scores.measures, cost_nc.sum(dim=0).tolist(), strict=True))


def _measure_broke(batch: CreditedBatch) -> dict[str, float]:
    """Return each objective's share of completions whose check failed twice. Zero shares are left out."""
    broken_share_m = (batch.scores.status_nm == int(Status.BROKE)).double().mean(dim=0)
    return {name: share for name, share in zip(batch.scores.names, broken_share_m.tolist(), strict=True) if share > 0}


def _measure_dead_strata(batch: CreditedBatch) -> dict[str, float]:
    """Return the share of compared sets (strata) in which no completion gets credit."""
    strata_counts = dead_strata(batch.credit, batch.scheme)
    return {comparison: dead / strata if strata else math.nan for comparison, (strata, dead) in strata_counts.items()}


def dead_strata(
    credit: Credit, scheme: Scheme, *, group_n: Shaped[Tensor, " n"] | None = None
) -> dict[str, tuple[int, int]]:
    """Count the strata (sets of completions that are compared), and the strata in which no completion gets credit."""
    # With a critic, completions are not compared with each other, so there are no strata.
    if scheme.value_names or credit.adv_nm is None or credit.comparison is None:
        return {}
    index_by_name = {" + ".join(scheme.names): 0}
    if scheme.entry.kind == "block" and group_n is None:
        index_by_name = {objective.name: m for m, objective in enumerate(scheme.objectives) if objective.baseline != "none"}
    stratum_nm = credit.comparison.stratum_nm if group_n is None else group_n[:, None]
    strata_counts = {}
    for name, m in index_by_name.items():
        stratum_n = stratum_nm[:, m]
        is_in_stratum_n = stratum_n >= 0
        stratum_count = len(stratum_n[is_in_stratum_n].unique())
        credited_stratum_count = len(stratum_n[is_in_stratum_n & (credit.adv_nm[:, m] != 0)].unique())
        strata_counts[name] = stratum_count, stratum_count - credited_stratum_count
    return strata_counts


#: All metrics that are computed from a batch's credit.
CREDIT = (
    Metric("credit/<block>/mean_abs", lambda batch: _by_block(batch, lambda credit_n: credit_n.abs().mean())),
    Metric("credit/<block>/zero_frac", lambda batch: _by_block(batch, lambda credit_n: (credit_n == 0).double().mean())),
    Metric("credit/stop/mean_abs", lambda batch: {"": float(batch.credit.stop_n.abs().mean())}),
    Metric(
        "credit/malformed",
        lambda batch: {"": float((batch.fault_n != 0).double().mean())},
        lasting=Alarm(
            "above", 0.5,
            "{share} of the completions are malformed: tags or fields are missing, doubled, nested, out of order or cut off.",
            "Malformed completions usually mean that the prompt does not ask for tags or fields, or that completions are cut off "
            "at the token limit. If no reward pays for the format, add the reward `format` (tags) or `json_schema` (fields).",
        ),
    ),
    Metric(
        "credit/no_signal",
        lambda batch: {"": float(not batch.credit.has_signal)},
        lasting=Alarm(
            "above", 0.99, "{share} of the batches taught nothing: every advantage is 0.",
            "Run `spanwise why` on the rollouts: it counts the reasons why advantages are 0.",
        ),
        overall=Alarm("above", 0.5, "In {share} of the training batches nothing was learned: every advantage was 0."),
    ),
    Metric(
        "credit/<objective>/reward_absent",
        lambda batch: _divide(batch, batch.credit.absent_m),
        lasting=Alarm(
            "above", 0.5, "{share} of the completions have no reward '{name}'.",
            "Missing rewards usually mean that completions leave out the rewarded block, or that the reward function returns None "
            "or times out. A completion that leaves the block out loses nothing unless you set if_missing.",
        ),
        overall=Alarm("at least", 1.0, "No completion of any training batch has the reward '{name}'."),
    ),
    Metric(
        "credit/<objective>/broke",
        _measure_broke,
        lasting=Alarm(
            "above", 0.1, "The check of '{name}' crashed or hung twice on {share} of the completions; these count as wrong.",
            "The policy may have learned to write text that crashes the check. `spanwise why` names these completions; read some.",
        ),
    ),
    Metric("cost/<measure>", _add_up_costs),
    Metric("credit/<objective>/singletons", lambda batch: _divide(batch, batch.credit.singleton_m)),
    Metric("credit/<objective>/coarser", _measure_coarser),
    Metric("credit/<comparison>/unanimous", _measure_unanimous),
    Metric(
        "credit/unanimous",
        _measure_all_unanimous,
        lasting=Alarm(
            "above", 0.9, "{share} of the groups taught nothing, because all their completions have equal rewards under "
            "every objective.",
            "Equal rewards usually mean that the prompts are too easy or too hard, or that the temperature is too low.",
        ),
    ),
    Metric(
        "credit/<comparison>/dead_strata",
        _measure_dead_strata,
        lasting=Alarm(
            "above", 0.95, "{share} of the sets of completions that '{name}' compares (strata) give no credit, "
            "though rewards differ within groups.",
            "Strata without credit usually mean that groups are too small to be split by outcome. Raise group_size, or set "
            "baseline: blended.",
            unless="credit/{name}/unanimous",
        ),
    ),
)  # fmt: skip
