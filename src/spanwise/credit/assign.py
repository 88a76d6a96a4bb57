"""`assign`: from the rewards of every objective to the credit of every block, by any method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.baselines import advantage
from spanwise.credit.checks import first_of
from spanwise.credit.explained import Explained, call_explained
from spanwise.credit.reasons import objective_reasons, sum_reasons
from spanwise.credit.registry import FACTS, Method
from spanwise.credit.registry import method as find
from spanwise.credit.strata import compare_in_strata, group_index, weighted
from spanwise.credit.streams import Streams, ValuesName, last_token, resolved_values, reward_streams, stream_names
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.score import check_discrete, judged_column
from spanwise.types import Comparison, Credit, Scores, Status, Zero


def assign(
    scores: Scores,
    group_n: Int[Tensor, " n"],
    present_nk: Bool[Tensor, "n k"],
    *,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    method: str | Method = "bae",
    values: ValuesName | None = None,
    inputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Credit:
    r"""Turn the rewards of every objective into the credit of every block.

    Equation
        a block method has a column per objective:  A = method(r_nm, group, ...),
            credit[i, k] = sum over the objectives m that pay block k of  weight_m * A[i, m]
        where r_m is left out and m has an `if_missing`: A[i, m] is what that would be worth, credited to the paid blocks that i
            has; if it has none of them, to stop[i], the decision to end the completion without them
        a method per token that reads a critic:     token[i, t] = sum over the streams s of  weight_s * method(r_s, V_s)[i, t]
            (`reward_streams`); a stream that is the decision to stop goes to stop[i]
        every other method has one number:          A = method(sum_m weight_m r_m, group, ...), paid to every paid block;
            what is left out stands for `if_missing`

    Left out means that the completion does not hold what the reward reads, or holds it unreadably. A check that failed (a
    timeout, an error) is not the completion's doing: its reward is absent and costs nothing.

    The method's function is called with what its parameters ask for by name: `reward_nm` or `reward_nk` (a column per
    objective), `reward_n` or `reward_s` (their sum), `reward_nt` (the sum on the last trainable token; with a critic that of a
    stream, as `mask_nt`, `value_nt` and `bootstrap_n`), `group_n`, `weight_m`,
    what the objectives say (`baseline`, `scale_k`, `given_k`, `outcome_no`, `if_missing_k`, ...) and what `inputs` holds.

    Args:
        scores: rewards (N, M) of the objectives, in order.
        group_n: prompt ids.
        present_nk: which blocks each completion has; an absent block gets 0.
        objectives: what each reward pays and what its baseline is.
        block_names: the K names that `pays` refers to.
        method: a registered method, or its name.
        values: what the values of a critic are of, see `Scheme.values`.
        inputs: further data by name: `length_n`, `mask_nt`, `block_nt`, `value_nt`, `trajectory_s`, ...
        **options: of the method (`leave_one_out`, `min_stratum`, `ddof`, ...).

    Raises:
        AlignmentError: sizes differ, also that of `value_nt` and the streams.
        RewardError: a reward that should be there is not finite.
        RecipeError: an objective names a block or an outcome that does not exist, a method whose inputs are not there.

    Example:
        Two completions of one prompt, `correct` pays the solution and `brier` the confidence.

        >>> scores = Scores(("correct", "brier"), torch.tensor([[1., -.01], [0., -.64]]).double(),
        ...                 torch.zeros(2, 2, dtype=torch.int8), torch.full((2, 2, 2), torch.nan).double())
        >>> objectives = [Objective("correct", pays=("solution",)), Objective("brier", pays=("confidence",))]
        >>> assign(scores, torch.tensor([0, 0]), torch.ones(2, 2).bool(), objectives=objectives,
        ...        block_names=("solution", "confidence")).block_nk
        tensor([[ 0.5000,  0.3150],
                [-0.5000, -0.3150]], dtype=torch.float64)
    """
    chosen = find(method) if isinstance(method, str) else method
    _check_sizes(scores, group_n, present_nk, objectives, block_names)
    paid_mk = paid_blocks(objectives, block_names, present_nk.device)
    group_n = group_index(group_n)  # methods never see whether an id is negative or large
    data = dict(inputs or {})
    rule = _Rule(scores, group_n, present_nk, objectives, paid_mk, chosen, options, data.pop("truncated_n", None))
    if chosen.kind == "block":
        return rule.by_block(data)
    streams = None
    if chosen.reads_values and data.get("mask_nt") is not None and data.get("value_nt") is not None:
        where_nt = rule.block_nt(data), data["mask_nt"]
        dtype = torch.promote_types(data["value_nt"].dtype, torch.float32)
        streams = streams_of(scores, objectives, block_names, *where_nt, values=values, dtype=dtype)
    return rule.by_completion(data, streams)


def streams_of(
    scores: Scores,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    block_nt: Int[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    values: ValuesName | None = None,
    dtype: torch.dtype = torch.float32,
) -> Streams:
    """What a recursion with a critic runs over: the rewards of every objective on the tokens of the blocks that it pays."""
    return reward_streams(
        completed(scores, objectives),
        left_out(scores),
        paid_blocks(objectives, block_names, mask_nt.device),
        block_nt,
        mask_nt,
        names=stream_names(objectives, values),
        weight_m=scores.reward_nm.new_tensor([objective.weight for objective in objectives]),
        values=resolved_values(objectives, values),
        dtype=dtype,
    )


def left_out(scores: Scores) -> Bool[Tensor, "n m"]:
    """Where the completion itself left out what the reward needs; a check that failed is not its doing."""
    return (scores.status_nm == int(Status.ABSENT)) | (scores.status_nm == int(Status.UNPARSABLE))


def summed(scores: Scores, objectives: Sequence[Objective]) -> Float[Tensor, " n"]:
    """The weighted sum of the rewards; what is left out stands for `if_missing`, NaN where one that weighs has no number."""
    weight_m = scores.reward_nm.new_tensor([objective.weight for objective in objectives])
    return weighted(completed(scores, objectives), weight_m).sum(dim=1)


def _stand_ins(scores: Scores, objectives: Sequence[Objective]) -> Float[Tensor, "n m"]:
    """What stands for a reward that the completion left out; NaN where nothing does."""
    stand_in_m = scores.reward_nm.new_tensor([torch.nan if o.if_missing is None else o.if_missing for o in objectives])
    return torch.where(left_out(scores), stand_in_m, torch.nan)


def completed(scores: Scores, objectives: Sequence[Objective]) -> Float[Tensor, "n m"]:
    """The rewards, and what stands for those that the completion left out; NaN where nothing does."""
    return torch.where(left_out(scores), _stand_ins(scores, objectives), scores.reward_nm)


@dataclass(frozen=True)
class _Rule:
    """What is credited in one call of `assign`, and by which method; each call gives `data` of its own."""

    scores: Scores
    group_n: Tensor
    present_nk: Tensor
    objectives: Sequence[Objective]
    paid_mk: Tensor
    chosen: Method
    options: Mapping[str, Any]
    truncated_n: Tensor | None

    def by_block(self, data: dict[str, Any]) -> Credit:
        """A number per objective, paid to its blocks."""
        scores, objectives, given = self.scores, self.objectives, _given(self.scores, self.objectives)
        prices = "if_missing_k" in self.chosen.inputs  # else what is left out is compared as the reward that it stands for
        reward_nm = scores.reward_nm if prices else completed(scores, objectives)
        stand_in_nm = _stand_ins(scores, objectives)
        data |= {
            "reward_nk": reward_nm,
            "reward_nm": reward_nm,
            **given,
            "baseline": [o.baseline or "group" for o in objectives],
            "scale_k": [o.scale or "none" for o in objectives],
            "back_off_k": [o.back_off for o in objectives],
            "if_missing_k": [None if o.if_missing is None else stand_in_nm[:, m] for m, o in enumerate(objectives)],
        }
        adv_nm, comparison = self.call(data, tuple(reward_nm.shape), "completions and objectives")
        left_out_nm = left_out(scores)
        adv_nm = torch.where(scores.reward_nm.isnan() & ~left_out_nm, 0.0, adv_nm.double())
        if comparison is None:
            columns = [
                advantage(
                    reward_nm[:, m],
                    self.group_n,
                    baseline=objective.baseline or "group",
                    outcome_no=given["outcome_no"][:, own] if (own := given["given_k"][m]) else None,
                    min_stratum=self.options.get("min_stratum", 2),
                    back_off=objective.back_off,
                ).comparison
                for m, objective in enumerate(objectives)
            ]
            comparison = Comparison.joined(columns).unexplained(adv_nm)
        weight_m = adv_nm.new_tensor([objective.weight for objective in objectives])
        weighted_nm, stop_n = weight_m * adv_nm, self.no_stop_n
        block_nk = torch.zeros(self.present_nk.shape, dtype=torch.float64, device=stop_n.device)
        for m, paid_k in enumerate(self.paid_mk):  # one after the other: the order of a sum is part of its digits
            block_nk[:, paid_k] += weighted_nm[:, m, None]
            elsewhere_n = self.present_nk[:, paid_k].any(dim=1) | ~left_out_nm[:, m]
            stop_n += torch.where(elsewhere_n, 0.0, weighted_nm[:, m])
        return Credit(
            torch.where(self.present_nk, block_nk, 0.0),
            stop_n,
            ((comparison.reason_nm == int(Zero.SINGLETON)) & ~reward_nm.isnan()).sum(dim=0),
            scores.reward_nm.isnan().sum(dim=0),
            adv_nm=adv_nm,
            comparison=objective_reasons(comparison, scores, objectives, reward_nm, truncated_n=self.truncated_n),
            weight_m=weight_m,
            names=tuple(objective.name for objective in objectives),
            coarser_m=((comparison.level_nm > 0) & (comparison.stratum_nm >= 0)).sum(dim=0),
        )

    def by_completion(self, data: dict[str, Any], streams: Streams | None) -> Credit:
        """One number per completion, step or token, paid to every block that an objective pays; with a critic, per stream."""
        scores, objectives, chosen = self.scores, self.objectives, self.chosen
        reward_n, reward_nm, stop_n = summed(scores, objectives), completed(scores, objectives), self.no_stop_n
        weight_m = reward_n.new_tensor([objective.weight for objective in objectives])
        data |= {"reward_n": reward_n, "reward_s": reward_n, "reward_nm": reward_nm, "weight_m": weight_m}
        if streams is None and "mask_nt" in data:  # a completion without a reward takes no part
            data["mask_nt"] = data["mask_nt"].bool() & ~reward_n.isnan()[:, None]
            data["reward_nt"] = on_last_token(reward_n, data["mask_nt"])
        comparison = token_nt = None
        if chosen.kind == "token":
            token_nt, stop_n = self.over_tokens(data, streams)
            block_nk = _block_means(token_nt, self.block_nt(data), self.present_nk)
            adv_n = ((block_nk != 0).any(dim=1) | (stop_n != 0)).double()  # whether it moved at all; there is no one number
        else:
            adv_n, comparison = self.call(data, (len(self.group_n),), "completions")
            adv_n = adv_n.double()
            block_nk = torch.where(self.present_nk, adv_n[:, None] * self.paid_mk.any(dim=0), 0.0)
        if comparison is None:
            comparison = compare_in_strata(reward_n, self.group_n, min_stratum=self.options.get("min_stratum", 2)).comparison
            comparison = comparison.unexplained(adv_n[:, None] if token_nt is None else torch.zeros_like(adv_n[:, None]))
        grouped, m = not {"group_n", "group_s"}.isdisjoint(chosen.inputs), len(objectives)
        alone = (comparison.reason_nm == int(Zero.SINGLETON)).sum() * int(grouped)
        compared_n = self.group_n if grouped else torch.zeros_like(self.group_n)
        reasons: dict[str, Any] = {"grouped": grouped, "truncated_n": self.truncated_n}
        return Credit(
            block_nk,
            stop_n,
            alone.repeat(m),
            scores.reward_nm.isnan().sum(dim=0),
            adv_nm=adv_n[:, None],
            comparison=sum_reasons(comparison, scores, objectives, reward_nm, compared_n, **reasons),
            weight_m=adv_n.new_ones(1),
            names=(" + ".join(objective.name for objective in objectives),) if chosen.kind == "completion" else (),
            coarser_m=torch.zeros(m, dtype=torch.long),
            token_nt=token_nt,
        )

    def over_tokens(self, data: Mapping[str, Any], streams: Streams | None) -> tuple[Tensor, Float[Tensor, " n"]]:
        """The method once per stream, and the weighted sum of what it gives tokens and decisions to stop."""
        shape, stop_n = tuple(data["mask_nt"].shape), self.no_stop_n
        if streams is None:
            return self.call(data, shape, "completions and tokens")[0], stop_n
        token_nt = torch.zeros((), device=stop_n.device)  # takes the dtype of what is added
        for s, part in enumerate(streams.inputs(data["value_nt"], data.get("bootstrap_n"))):
            weighted_nt = streams.weight_s[s] * self.call({**data, **part}, shape, "completions and tokens")[0]
            stops_n = streams.stop_sn[s]
            if bool(stops_n.any()):
                stop_n += torch.where(stops_n, weighted_nt.sum(dim=1).double(), 0.0)
                weighted_nt = weighted_nt.masked_fill(stops_n[:, None], 0.0)
            token_nt = token_nt + weighted_nt
        return token_nt, stop_n

    def call(self, data: Mapping[str, Any], shape: tuple[int, ...], words: str) -> tuple[Tensor, Comparison | None]:
        """What the method gives, of the shape that its kind promises, and what it was compared with if it explains itself."""
        made = call(self.chosen, self.group_n, data, self.options)
        adv, comparison = made if isinstance(made, Explained) else (made, None)
        if not isinstance(adv, Tensor) or tuple(adv.shape) != shape:
            returned = f"a tensor of {tuple(adv.shape)}" if isinstance(adv, Tensor) else type(adv).__name__
            raise AlignmentError(
                f"Method '{self.chosen.name}' is registered with kind='{self.chosen.kind}' and must return a tensor of {shape}, "
                f"the {words}; it returned {returned}."
            )
        return adv, comparison

    def block_nt(self, data: Mapping[str, Any]) -> Tensor:
        """The block of every token, which a method that credits tokens cannot do without."""
        if data.get("block_nt") is None:
            raise RecipeError(
                f"Method '{self.chosen.name}' credits every token on its own and must know in which block it lies; give the "
                f"reading with its spans, or block_nt."
            )
        return data["block_nt"]

    @property
    def no_stop_n(self) -> Float[Tensor, " n"]:
        """No credit for the decision to stop."""
        return torch.zeros(len(self.group_n), dtype=torch.float64, device=self.present_nk.device)


def call(chosen: Method, group_n: Tensor, data: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a method's function with what its parameters ask for by name; `Explained` if it explains what it gives.

    Raises:
        RecipeError: it needs something that is not there, or has no such option.
    """
    known = {**data, "group_n": group_n, "group_s": group_n}
    lacking = [name for name in chosen.required if known.get(name) is None]
    if lacking:
        raise RecipeError(f"Method '{chosen.name}' needs {' and '.join(lacking)}, which this batch does not have.")
    chosen.check_names(options)
    facts = [*data] if chosen.takes_everything else [name for name in FACTS if name in chosen.settings]
    asked = {*chosen.required, *(name for name in facts if known.get(name) is not None)}
    return call_explained(chosen.estimator, **{name: known[name] for name in asked}, **options)


def on_last_token(reward_n: Float[Tensor, " n"], mask_nt: Bool[Tensor, "n t"]) -> Float[Tensor, "n t"]:
    """A reward of the whole completion on its last trainable token, 0 at every other one.

    >>> on_last_token(torch.tensor([2.0]), torch.tensor([[True, True, False]]))
    tensor([[0., 2., 0.]])
    """
    reward_nt = torch.zeros(mask_nt.shape, device=mask_nt.device)
    last_n, has_n = last_token(mask_nt.bool())
    reward_nt[has_n, last_n[has_n]] = reward_n[has_n].to(reward_nt.dtype)
    return reward_nt


def _block_means(token_nt: Tensor, block_nt: Tensor, present_nk: Tensor) -> Float[Tensor, "n k"]:
    """The mean over the tokens of each block, 0 where it is absent."""
    block_nk = torch.zeros(present_nk.shape, dtype=torch.float64, device=present_nk.device)
    for k in range(present_nk.shape[1]):
        here_nt = block_nt == k
        total_n = torch.where(here_nt, token_nt.double(), 0.0).sum(dim=1)
        block_nk[:, k] = total_n / here_nt.sum(dim=1).clamp(min=1)
    return block_nk


def _given(scores: Scores, objectives: Sequence[Objective]) -> dict[str, Any]:
    """The outcomes that any objective is given, which of them each one is, and which its reward is judged by."""
    names: dict[str, int] = {}
    given_k = [[names.setdefault(name, len(names)) for name in objective.outcomes] for objective in objectives]
    judged_k = [judged_column(objective) for objective in objectives]
    values = {name: scores.outcome(name).double() for name in names}
    for objective in objectives:
        for name in objective.outcomes if objective.baseline in ("outcome", "blended") else ():
            check_discrete(values[name][~values[name].isnan()].unique().tolist(), name)
    nothing_n0 = scores.reward_nm.new_zeros(len(scores.reward_nm), 0)
    by_outcome_nk2 = scores.by_outcome_nmo.clone()
    for m, judged in enumerate(judged_k):
        if judged is None:  # what it would be under another outcome says nothing about those that it is given
            by_outcome_nk2[:, m] = torch.nan
    return {
        "outcome_no": torch.stack(list(values.values()), dim=1) if values else nothing_n0,
        "given_k": given_k,
        "judged_k": [judged or 0 for judged in judged_k],
        "by_outcome_nk2": by_outcome_nk2,
    }


def paid_blocks(objectives: Sequence[Objective], block_names: Sequence[str], device: torch.device) -> Bool[Tensor, "m k"]:
    """Which blocks each objective pays."""
    paid_mk = torch.zeros(len(objectives), len(block_names), dtype=torch.bool, device=device)
    for m, objective in enumerate(objectives):
        for name in objective.pays:
            if name not in block_names:
                raise RecipeError(
                    f"Objective '{objective.name}' pays '{name}', which is no block; there are {', '.join(block_names)}."
                )
            paid_mk[m, list(block_names).index(name)] = True
    return paid_mk


def _check_sizes(
    scores: Scores, group_n: Tensor, present_nk: Tensor, objectives: Sequence[Objective], block_names: Sequence[str]
) -> None:
    n, m, k = len(group_n), len(objectives), len(block_names)
    if scores.reward_nm.shape != (n, m) or present_nk.shape != (n, k):
        raise AlignmentError(
            f"{n} group ids, {m} objectives and {k} blocks, but rewards are {tuple(scores.reward_nm.shape)} and block presence "
            f"is {tuple(present_nk.shape)}."
        )
    if place := first_of((scores.status_nm == int(Status.OK)) & ~scores.reward_nm.isfinite()):
        i, j = place
        raise RewardError(
            f"Reward '{scores.names[j]}' of completion {i} is {float(scores.reward_nm[i, j])} with status OK; "
            f"a reward must be finite, or absent with a status that says why."
        )
