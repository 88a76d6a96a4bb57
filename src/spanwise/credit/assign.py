"""`assign`: turn the rewards of every objective into the credit of every block, with a reason for each exact 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.baselines import advantage_columns
from spanwise.credit.registry import FACTS, Method
from spanwise.credit.registry import method as find
from spanwise.credit.spread import (
    Streams,
    ValuesName,
    completed,
    left_out,
    on_last_token,
    paid_blocks,
    reward_streams,
    summed,
    weights,
)
from spanwise.credit.strata import Explained, call_explained, compare_in_strata, first_of, group_index, moments
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.score import check_discrete, judge_of, judged_column
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
    entry = find(method) if isinstance(method, str) else method
    _check_sizes(scores, group_n, present_nk, objectives, block_names)
    paid_mk = paid_blocks(objectives, block_names, present_nk.device)
    group_n = group_index(group_n)  # methods get dense ids, never negative or large ones
    data, min_size, whole_nm = dict(inputs or {}), options.get("min_stratum", 2), completed(scores, objectives)
    truncated_n, mask_nt = data.pop("truncated_n", None), data.get("mask_nt")
    ask = partial(_ask, entry, group_n, options)
    stop_n = torch.zeros(len(group_n), dtype=torch.float64, device=present_nk.device)
    token_nt, names, grouped = None, tuple(objective.name for objective in objectives), True
    if entry.kind == "block":
        value_nm = scores.reward_nm if "if_missing_k" in entry.inputs else whole_nm
        facts = _facts(scores, objectives)
        adv_nm, comparison = ask({**data, **facts, "reward_nk": value_nm, "reward_nm": value_nm}, value_nm.shape)
        left_out_nm = left_out(scores)
        adv_nm = torch.where(scores.reward_nm.isnan() & ~left_out_nm, 0.0, adv_nm.double())
        if comparison is None:
            outcomes = [facts["outcome_no"][:, columns] if columns else None for columns in facts["given_k"]]
            by_column = {"baseline": facts["baseline"], "outcome_no": outcomes, "back_off": facts["back_off_k"]}
            comparison = advantage_columns(value_nm, group_n, by_column, min_stratum=min_size).comparison.unexplained(adv_nm)
        weight_m = weights(objectives, adv_nm)
        block_nk = torch.zeros(present_nk.shape, dtype=torch.float64, device=stop_n.device)
        for m, paid_k in enumerate(paid_mk):  # a loop, because the order of a sum changes its last digits
            part_n = weight_m[m] * adv_nm[:, m]
            block_nk[:, paid_k] += part_n[:, None]
            stop_n += torch.where(present_nk[:, paid_k].any(dim=1) | ~left_out_nm[:, m], 0.0, part_n)
        explained = objective_reasons(comparison, scores, objectives, value_nm, truncated_n=truncated_n)
    else:
        reward_n = summed(scores, objectives)
        value_nm, comparison = reward_n[:, None], None
        data |= {
            "reward_n": reward_n,
            "reward_s": reward_n,
            "reward_nm": whole_nm,
            "weight_m": weights(objectives, reward_n),
        }
        if mask_nt is not None:  # a completion without a reward takes no part
            data["mask_nt"] = mask_nt.bool() & ~reward_n.isnan()[:, None]
            data["reward_nt"] = on_last_token(reward_n, data["mask_nt"])
        if entry.kind == "token":
            if data.get("block_nt") is None:
                raise RecipeError(
                    f"Method '{entry.name}' credits every token on its own and must know in which block it lies; give the "
                    f"reading with its spans, or block_nt."
                )
            streams = None
            if entry.reads_values and mask_nt is not None and data.get("value_nt") is not None:
                dtype = torch.promote_types(data["value_nt"].dtype, torch.float32)
                where = block_names, data["block_nt"], mask_nt
                streams = reward_streams(scores, objectives, *where, values=values, dtype=dtype)
            token_nt, stop_n = _over_tokens(ask, data, streams, stop_n)
            in_block_knt = [data["block_nt"] == k for k in range(len(block_names))]
            means = [
                torch.where(in_nt, token_nt.double(), 0.0).sum(dim=1) / in_nt.sum(dim=1).clamp(min=1)
                for in_nt in in_block_knt
            ]
            block_nk = torch.stack(means, dim=1)
            has_credit_n = (block_nk != 0).any(dim=1) | (stop_n != 0)
            adv_nm = has_credit_n.double()[:, None]  # no single reward was compared
        else:
            adv_n, comparison = ask(data, group_n.shape)
            adv_nm = adv_n.double()[:, None]
            block_nk = adv_nm * paid_mk.any(dim=0)
        if comparison is None:
            comparison = compare_in_strata(reward_n, group_n, min_stratum=min_size).comparison
            comparison = comparison.unexplained(adv_nm if token_nt is None else torch.zeros_like(adv_nm))
        weight_m, names = adv_nm.new_ones(1), (" + ".join(names),) if entry.kind == "completion" else ()
        grouped = not {"group_n", "group_s"}.isdisjoint(entry.inputs)
        explained = sum_reasons(comparison, scores, objectives, group_n, grouped=grouped, truncated_n=truncated_n)
    is_alone_nm = (comparison.reason_nm == int(Zero.SINGLETON)) & ~value_nm.isnan()
    coarser_nm = (comparison.level_nm > 0) & (comparison.stratum_nm >= 0) & ~value_nm.isnan()
    return Credit(
        torch.where(present_nk, block_nk, 0.0),
        stop_n,
        is_alone_nm.sum(dim=0).expand(len(objectives)) * int(grouped),
        scores.reward_nm.isnan().sum(dim=0),
        adv_nm=adv_nm,
        comparison=explained,
        weight_m=weight_m,
        names=names,
        coarser_m=coarser_nm.sum(dim=0).expand(len(objectives)),
        token_nt=token_nt,
    )


def _facts(scores: Scores, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Collect the objectives' fields under the names that methods ask for, and every outcome that a baseline is given."""
    names: dict[str, int] = {}
    columns_k = [[names.setdefault(name, len(names)) for name in objective.outcomes] for objective in objectives]
    values = {name: scores.outcome(name).double() for name in names}
    stand_in_nm = torch.where(left_out(scores), completed(scores, objectives), torch.nan)
    by_outcome_nk2, judged_k = scores.by_outcome_nmo.clone(), [judged_column(objective) for objective in objectives]
    for m, objective in enumerate(objectives):
        if judged_k[m] is None:  # none of the baseline's outcomes judges the reward
            by_outcome_nk2[:, m] = torch.nan
        for name in objective.outcomes if objective.baseline in ("outcome", "blended") else ():
            check_discrete(values[name][~values[name].isnan()].unique().tolist(), name)
    nothing_n0 = scores.reward_nm.new_zeros(len(scores.reward_nm), 0)
    return {
        "baseline": [o.baseline or "group" for o in objectives],
        "scale_k": [o.scale or "none" for o in objectives],
        "back_off_k": [o.back_off for o in objectives],
        "if_missing_k": [None if o.if_missing is None else stand_in_nm[:, m] for m, o in enumerate(objectives)],
        "outcome_no": torch.stack(list(values.values()), dim=1) if values else nothing_n0,
        "given_k": columns_k,
        "judged_k": [column or 0 for column in judged_k],
        "by_outcome_nk2": by_outcome_nk2,
    }


def _over_tokens(
    ask: Callable[..., tuple[Tensor, Any]], data: Mapping[str, Any], streams: Streams | None, stop_n: Float[Tensor, " n"]
) -> tuple[Tensor, Float[Tensor, " n"]]:
    """Run the method once per stream; return the weighted sum over streams for tokens and decisions to stop."""
    shape = data["block_nt"].shape
    if streams is None:
        return ask(data, shape)[0], stop_n
    token_nt = torch.zeros((), device=stop_n.device)  # 0 takes the dtype of the first stream
    for s, part in enumerate(streams.inputs(data["value_nt"], data.get("bootstrap_n"))):
        weighted_nt = streams.weight_s[s] * ask({**data, **part}, shape)[0]
        stops_n = streams.stop_sn[s]
        if bool(stops_n.any()):
            stop_n = stop_n + torch.where(stops_n, weighted_nt.sum(dim=1).double(), 0.0)
            weighted_nt = weighted_nt.masked_fill(stops_n[:, None], 0.0)
        token_nt = token_nt + weighted_nt
    return token_nt, stop_n


def _ask(
    entry: Method, group_n: Tensor, options: Mapping[str, Any], data: Mapping[str, Any], shape: Sequence[int]
) -> tuple[Tensor, Comparison | None]:
    """Call the method, check the shape of its result, and return the advantages with the comparison, if the method gives one."""
    result = call(entry, group_n, data, options)
    adv, comparison = result if isinstance(result, Explained) else (result, None)
    if not isinstance(adv, Tensor) or adv.shape != shape:
        returned = f"a tensor of {tuple(adv.shape)}" if isinstance(adv, Tensor) else type(adv).__name__
        axes = {"block": "completions and objectives", "token": "completions and tokens"}.get(entry.kind, "completions")
        raise AlignmentError(
            f"Method '{entry.name}' is registered with kind='{entry.kind}' and must return a tensor of {tuple(shape)}, "
            f"the {axes}; it returned {returned}."
        )
    return adv, comparison


def call(chosen: Method, group_n: Tensor, data: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a method's function with the inputs that its parameters name; refuse a missing input and an unknown option."""
    inputs = {**data, "group_n": group_n, "group_s": group_n}
    lacking = [name for name in chosen.required if inputs.get(name) is None]
    if lacking:
        raise RecipeError(f"Method '{chosen.name}' needs {' and '.join(lacking)}, which this batch does not have.")
    chosen.check_names(options)
    facts = [*data] if chosen.takes_everything else [name for name in FACTS if name in chosen.settings]
    names = {*chosen.required, *(name for name in facts if inputs.get(name) is not None)}
    return call_explained(chosen.estimator, **{name: inputs[name] for name in names}, **options)


def _check_sizes(
    scores: Scores, group_n: Tensor, present_nk: Tensor, objectives: Sequence[Objective], block_names: Sequence[str]
) -> None:
    n, m, k = len(group_n), len(objectives), len(block_names)
    if scores.reward_nm.shape != (n, m) or present_nk.shape != (n, k):
        raise AlignmentError(
            f"{n} group ids, {m} objectives and {k} blocks, but rewards are {tuple(scores.reward_nm.shape)} and block presence "
            f"is {tuple(present_nk.shape)}."
        )
    if bad_entry := first_of((scores.status_nm == int(Status.OK)) & ~scores.reward_nm.isfinite()):
        i, j = bad_entry
        raise RewardError(
            f"Reward '{scores.names[j]}' of completion {i} is {float(scores.reward_nm[i, j])} with status OK; "
            f"a reward must be finite, or absent with a status that says why."
        )


def objective_reasons(
    comparison: Comparison,
    scores: Scores,
    objectives: Sequence[Objective],
    value_nm: Float[Tensor, "n m"],
    *,
    truncated_n: Bool[Tensor, " n"] | None,
) -> Comparison:
    """Return the comparison of each objective with exact reasons, from statuses, verdicts and weights."""
    reason_nm = torch.where(comparison.reason_nm == int(Zero.ABSENT), _missing(scores, truncated_n), comparison.reason_nm)
    for m, objective in enumerate(objectives):
        reason_nm[:, m] = _verdict(objective, value_nm[:, m], reason_nm[:, m], comparison.worth_nm[:, m])
        if objective.weight == 0:
            reason_nm[:, m] = int(Zero.NO_WEIGHT)
    about_nm = torch.arange(len(objectives), device=reason_nm.device).expand_as(reason_nm)
    return replace(comparison, reason_nm=reason_nm, about_nm=about_nm)


def sum_reasons(
    comparison: Comparison,
    scores: Scores,
    objectives: Sequence[Objective],
    group_n: Int[Tensor, " n"],
    *,
    grouped: bool,
    truncated_n: Bool[Tensor, " n"] | None,
) -> Comparison:
    """Return the comparison of the objectives' sum with exact reasons, and with the objective that each reason is about."""
    set_n = group_n if grouped else torch.zeros_like(group_n)
    reason_n, about_n = comparison.reason_nm[:, 0], comparison.about_nm[:, 0]
    set_moments = moments(comparison.worth_nm[:, 0], set_n)
    size_n = set_moments.count_n()
    if not grouped:
        still_n = torch.where(set_moments.constant_n(), int(Zero.ALL_EQUAL), int(Zero.AT_BASELINE))
        reason_n = torch.where(reason_n == int(Zero.CREDITED), reason_n, still_n)
    equal_n = reason_n == int(Zero.ALL_EQUAL)
    for m in reversed(range(len(objectives))):  # "all right" or "all wrong" says more than "all equal"
        groups = moments(scores.reward_nm[:, m], set_n)
        all_equal_n = torch.full_like(reason_n, int(Zero.ALL_EQUAL))
        verdict_n = _verdict(objectives[m], scores.reward_nm[:, m], all_equal_n, groups.mean_n())
        is_unanimous_n = equal_n & groups.constant_n() & (groups.count_n() == size_n) & (verdict_n != all_equal_n)
        reason_n, about_n = torch.where(is_unanimous_n, verdict_n, reason_n), torch.where(is_unanimous_n, m, about_n)
    missing_nm, column_m = _missing(scores, truncated_n), torch.arange(len(objectives), device=reason_n.device)
    weighs_m = torch.tensor([objective.weight != 0 for objective in objectives], device=reason_n.device)
    is_missing_nm = completed(scores, objectives).isnan() & weighs_m
    rank_nm = torch.where(is_missing_nm, missing_nm * len(objectives) + column_m, len(Zero) * len(objectives))
    first_n = rank_nm.argmin(dim=1)
    # GDPO may credit the rewards that are present although the sum is unknown.
    is_missing_n = comparison.worth_nm[:, 0].isnan() & (reason_n != int(Zero.CREDITED))
    reason_n = torch.where(is_missing_n, missing_nm.gather(1, first_n[:, None])[:, 0], reason_n)
    return replace(comparison, reason_nm=reason_n[:, None], about_nm=torch.where(is_missing_n, first_n, about_n)[:, None])


def _missing(scores: Scores, truncated_n: Tensor | None) -> Int[Tensor, "n m"]:
    """Return the reason for each missing reward."""
    reason_nm = torch.full(scores.status_nm.shape, int(Zero.ABSENT), device=scores.status_nm.device)
    if truncated_n is not None:
        reason_nm[truncated_n] = int(Zero.TRUNCATED)
    for status in (Status.UNPARSABLE, Status.TIMEOUT, Status.ERROR, Status.UNSCORED):
        reason_nm[scores.status_nm == int(status)] = int(Zero[status.name])
    return reason_nm


def _verdict(objective: Objective, value_n: Tensor, reason_n: Tensor, worth_n: Tensor) -> Tensor:
    """Replace "all equal" by "all right" or "all wrong" if the reward is a verdict of 1 and 0."""
    verdict_n = (value_n == 0) | (value_n == 1) | value_n.isnan()
    if judge_of(objective) is not None or not bool(verdict_n.all()):
        return reason_n
    reasons = torch.where(worth_n == 1, int(Zero.ALL_RIGHT), int(Zero.ALL_WRONG))
    return torch.where((reason_n == int(Zero.ALL_EQUAL)) & ((worth_n == 0) | (worth_n == 1)), reasons, reason_n)
