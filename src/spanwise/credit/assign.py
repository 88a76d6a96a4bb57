"""`assign` turns the rewards of completions into credit for their blocks. It gives a reason for each credit of 0."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from spanwise.credit.baselines import compare_columns
from spanwise.credit.registry import FACTS, Method
from spanwise.credit.registry import method as find
from spanwise.credit.spread import (
    Streams,
    ValuesName,
    fill_missing,
    find_last_token,
    lacks_all,
    left_out,
    paid_blocks,
    put_on_last_token,
    reward_streams,
    sum_rewards,
    weights,
)
from spanwise.credit.strata import Explained, call_explained, compare_in_strata, first_of, group_index, moments
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.objective import Objective
from spanwise.score.outcomes import check_discrete, judge_of, judged_column
from spanwise.types import Comparison, Credit, Scores, Status, Zero

#: Calls a method with its inputs, and checks that its advantages have the given shape.
RunMethod = Callable[[Mapping[str, Any], Sequence[int]], tuple[Tensor, Comparison | None]]


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
    r"""Turn the rewards of completions into the credit (advantage) of each block.

    Equation
        a block method has a column per objective:  A = method(r_nm, group, ...),
            credit[i, k] = sum over the objectives m that pay block k of  weight_m * A[i, m]
        where r_m is left out and m has an `if_missing`: A[i, m] is what that would be worth, credited to the paid blocks that i
            has; if it has none of them, to stop[i], the decision to end the completion without them
        a method per token that reads a critic:     token[i, t] = sum over the streams s of  weight_s * method(r_s, V_s)[i, t]
            (`reward_streams`); a stream that is the decision to stop goes to stop[i]
        every other method has one number:          A = method(sum_m weight_m r_m, group, ...), paid to every paid block, and to
            stop[i] where i left out a reward and has no paid block. A reward that is left out counts as `if_missing`. A method per
            token sees only the tokens of the paid blocks, or, if there are none, the last token, whose credit is stop[i]

    Left out means that the completion does not hold what the reward reads, or holds it unreadably. A check that failed (a
    timeout, an error) is not the completion's doing: its reward is absent and costs nothing.

    The method's function is called with what its parameters ask for by name; docs/write_your_own.md lists all inputs.

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
    method_entry = find(method) if isinstance(method, str) else method
    _check_sizes(scores, group_n, present_nk, objectives, block_names)
    pays_block_mk = paid_blocks(objectives, block_names, present_nk.device)
    group_n = group_index(group_n)  # methods rely on group ids that run from 0 without gaps
    method_inputs = dict(inputs or {})
    truncated_n = method_inputs.pop("truncated_n", None)
    run_method = partial(_run_method, method_entry, group_n, options)
    min_stratum_size = options.get("min_stratum", 2)
    objective_names = tuple(objective.name for objective in objectives)
    compares_in_groups = True
    token_credit_nt = None
    if method_entry.kind == "block":
        reward_nm = scores.reward_nm if "if_missing_k" in method_entry.inputs else fill_missing(scores, objectives)
        method_inputs |= _collect_inputs(scores, objectives) | {"reward_nk": reward_nm, "reward_nm": reward_nm}
        adv_nm, comparison = run_method(method_inputs, reward_nm.shape)
        adv_nm = torch.where(scores.reward_nm.isnan() & ~left_out(scores), 0.0, adv_nm.double())
        if comparison is None:
            comparison = _compare_objectives(method_inputs, group_n, min_stratum_size).unexplained(adv_nm)
        weight_m = weights(objectives, adv_nm)
        block_credit_nk, stop_credit_n = _pay_blocks(weight_m * adv_nm, left_out(scores), present_nk, pays_block_mk)
        explained_comparison = explain_objectives(comparison, scores, objectives, reward_nm, truncated_n=truncated_n)
    else:
        streams = _find_streams(method_entry, scores, objectives, block_names, method_inputs, values)
        reward_sum_n = sum_rewards(scores, objectives)
        reward_nm = reward_sum_n[:, None]
        method_inputs |= _collect_sum_inputs(scores, objectives, reward_sum_n, method_inputs.get("mask_nt"))
        is_paid_k = pays_block_mk.any(dim=0)
        pays_stop_n = lacks_all(left_out(scores), objectives, present_nk[:, is_paid_k])
        comparison = None
        if method_entry.kind == "token":
            token_credit_nt, stop_credit_n = _credit_tokens(run_method, method_inputs, streams, is_paid_k, pays_stop_n)
            block_credit_nk = _average_by_block(token_credit_nt, method_inputs["block_nt"], len(block_names))
            adv_nm = ((block_credit_nk != 0).any(dim=1) | (stop_credit_n != 0)).double()[:, None]
        else:
            advantage_n, comparison = run_method(method_inputs, group_n.shape)
            adv_nm = advantage_n.double()[:, None]
            block_credit_nk = adv_nm * is_paid_k
            stop_credit_n = torch.where(pays_stop_n, adv_nm[:, 0], 0.0)
        if comparison is None:
            completion_adv_nm = adv_nm if token_credit_nt is None else torch.zeros_like(adv_nm)
            comparison = compare_in_strata(reward_sum_n, group_n, min_stratum=min_stratum_size).comparison
            comparison = comparison.unexplained(completion_adv_nm)
        weight_m = adv_nm.new_ones(1)
        objective_names = (" + ".join(objective_names),) if method_entry.kind == "completion" else ()
        compares_in_groups = "group_n" in method_entry.inputs or "group_s" in method_entry.inputs
        explained_comparison = explain_sum(
            comparison, scores, objectives, group_n, in_groups=compares_in_groups, truncated_n=truncated_n
        )
        if method_entry.reads_values:
            explained_comparison = _explain_masked(explained_comparison, method_inputs.get("bootstrap_n"), adv_nm)
    is_alone_nm = (comparison.reason_nm == int(Zero.SINGLETON)) & ~reward_nm.isnan()
    has_backed_off_nm = (comparison.level_nm > 0) & (comparison.stratum_nm >= 0) & ~reward_nm.isnan()
    return Credit(
        torch.where(present_nk, block_credit_nk, 0.0),
        stop_credit_n,
        is_alone_nm.sum(dim=0).expand(len(objectives)) * int(compares_in_groups),
        scores.reward_nm.isnan().sum(dim=0),
        adv_nm=adv_nm,
        comparison=explained_comparison,
        weight_m=weight_m,
        names=objective_names,
        coarser_m=has_backed_off_nm.sum(dim=0).expand(len(objectives)),
        token_nt=token_credit_nt,
    )


def _compare_objectives(inputs: Mapping[str, Any], group_n: Tensor, min_stratum_size: int) -> Comparison:
    """Compare rewards as each objective's `baseline` says, for a method that returns no `Comparison` itself."""
    outcome_matrix = inputs["outcome_no"]
    given_outcomes_m = [outcome_matrix[:, columns] if columns else None for columns in inputs["given_k"]]
    options_by_objective = {"outcome_no": given_outcomes_m, "back_off": inputs["back_off_k"], "baseline": inputs["baseline"]}
    return compare_columns(inputs["reward_nm"], group_n, options_by_objective, min_stratum=min_stratum_size).comparison


def _pay_blocks(
    weighted_adv_nm: Tensor, is_left_out_nm: Tensor, present_nk: Tensor, pays_block_mk: Tensor
) -> tuple[Float[Tensor, "n k"], Float[Tensor, " n"]]:
    """Credit an objective's advantage to its blocks, or to the decision to stop if the blocks and the reward are missing."""
    block_credit_nk = torch.zeros(present_nk.shape, dtype=torch.float64, device=present_nk.device)
    stop_credit_n = torch.zeros(len(present_nk), dtype=torch.float64, device=present_nk.device)
    for m, paid_k in enumerate(pays_block_mk):  # a loop, because a matrix product would round differently
        block_credit_nk[:, paid_k] += weighted_adv_nm[:, m, None]
        has_paid_block_n = present_nk[:, paid_k].any(dim=1)
        stop_credit_n += torch.where(has_paid_block_n | ~is_left_out_nm[:, m], 0.0, weighted_adv_nm[:, m])
    return block_credit_nk, stop_credit_n


def _collect_sum_inputs(
    scores: Scores, objectives: Sequence[Objective], reward_sum_n: Tensor, mask_nt: Tensor | None
) -> dict[str, Any]:
    """Build the keyword arguments of a method that credits the sum of the rewards."""
    sum_inputs: dict[str, Any] = {"reward_n": reward_sum_n, "reward_s": reward_sum_n}
    sum_inputs |= {"reward_nm": fill_missing(scores, objectives), "weight_m": weights(objectives, reward_sum_n)}
    if mask_nt is not None:  # the tokens of a completion without a reward are masked
        sum_inputs["mask_nt"] = mask_nt.bool() & ~reward_sum_n.isnan()[:, None]
        sum_inputs["reward_nt"] = put_on_last_token(reward_sum_n, sum_inputs["mask_nt"])
    return sum_inputs


def _find_streams(
    method: Method,
    scores: Scores,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    inputs: Mapping[str, Any],
    values: ValuesName | None,
) -> Streams | None:
    """Build a table of token rewards for each kind of value that the critic predicts, or None without a critic."""
    block_nt, mask_nt, value_nt = inputs.get("block_nt"), inputs.get("mask_nt"), inputs.get("value_nt")
    if method.kind != "token":
        return None
    if block_nt is None:
        raise RecipeError(
            f"Method '{method.name}' credits each token separately, so it needs the block of each token. Pass block_nt, such "
            f"as `spans.block_nt`."
        )
    if not method.reads_values or mask_nt is None or value_nt is None:
        return None
    dtype = torch.promote_types(value_nt.dtype, torch.float32)
    return reward_streams(scores, objectives, block_names, block_nt, mask_nt, values=values, dtype=dtype)


def _credit_tokens(
    run_method: RunMethod, inputs: Mapping[str, Any], streams: Streams | None, is_paid_k: Tensor, pays_stop_n: Tensor
) -> tuple[Tensor, Float[Tensor, " n"]]:
    """Return each token's credit, and each completion's credit for its decision to stop; use the critic if there is one."""
    stop_credit_n = torch.zeros(len(pays_stop_n), dtype=torch.float64, device=pays_stop_n.device)
    block_nt = inputs["block_nt"]
    if streams is not None:
        return _run_over_streams(run_method, inputs, streams, stop_credit_n)
    if inputs.get("mask_nt") is None or bool(is_paid_k.all()):
        return run_method(inputs, block_nt.shape)[0], stop_credit_n
    is_paid_nt = pad(is_paid_k, (0, 1))[block_nt.long()]  # tokens outside blocks have the index -1
    return _run_over_paid_tokens(run_method, inputs, is_paid_nt, pays_stop_n)


def _average_by_block(token_credit_nt: Tensor, block_nt: Tensor, block_count: int) -> Float[Tensor, "n k"]:
    """Return the mean credit of each block's tokens; 0 for a block without tokens."""
    block_credit_nk = torch.zeros(len(block_nt), block_count, dtype=torch.float64, device=block_nt.device)
    for k in range(block_count):
        is_in_block_nt = block_nt == k
        block_sum_n = torch.where(is_in_block_nt, token_credit_nt.double(), 0.0).sum(dim=1)
        block_credit_nk[:, k] = block_sum_n / is_in_block_nt.sum(dim=1).clamp(min=1)
    return block_credit_nk


def _explain_masked(comparison: Comparison, bootstrap_n: Tensor | None, adv_nm: Tensor) -> Comparison:
    """Explain zero credit by LEFT_OUT if the bootstrap value is NaN because `truncated: mask` drops the completion."""
    if bootstrap_n is None:
        return comparison
    is_masked_n1 = bootstrap_n.reshape(len(adv_nm), -1).isnan().any(dim=1, keepdim=True)
    return replace(comparison, reason_nm=torch.where(is_masked_n1 & (adv_nm == 0), int(Zero.LEFT_OUT), comparison.reason_nm))


def _collect_inputs(scores: Scores, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Build a method's keyword arguments from the objectives' settings and outcomes."""
    outcome_names = list(dict.fromkeys(name for objective in objectives for name in objective.outcomes))
    values_by_outcome = {name: scores.outcome(name).double() for name in outcome_names}
    stand_in_reward_nm = torch.where(left_out(scores), fill_missing(scores, objectives), torch.nan)
    reward_by_outcome_nm2 = scores.by_outcome_nmo.clone()
    judged_columns = [judged_column(objective) for objective in objectives]
    for m, objective in enumerate(objectives):
        if judged_columns[m] is None:  # the reward does not depend on an outcome, such as right or wrong
            reward_by_outcome_nm2[:, m] = torch.nan
        for name in objective.outcomes if objective.baseline in ("outcome", "blended") else ():
            check_discrete(values_by_outcome[name][~values_by_outcome[name].isnan()].unique().tolist(), name)
    no_outcomes_n0 = scores.reward_nm.new_zeros(len(scores.reward_nm), 0)
    return {
        "baseline": [o.baseline or "group" for o in objectives],
        "scale_k": [o.scale or "none" for o in objectives],
        "back_off_k": [o.back_off for o in objectives],
        "if_missing_k": [None if o.if_missing is None else stand_in_reward_nm[:, m] for m, o in enumerate(objectives)],
        "outcome_no": torch.stack(list(values_by_outcome.values()), dim=1) if values_by_outcome else no_outcomes_n0,
        "given_k": [[outcome_names.index(name) for name in objective.outcomes] for objective in objectives],
        "judged_k": [column or 0 for column in judged_columns],
        "by_outcome_nk2": reward_by_outcome_nm2,
    }


def _run_over_streams(
    run_method: RunMethod, inputs: Mapping[str, Any], streams: Streams, stop_n: Tensor
) -> tuple[Tensor, Float[Tensor, " n"]]:
    """Run a method once for each kind of value that the critic predicts, and add up the weighted advantages."""
    credit_sum = torch.zeros((), device=stop_n.device)  # a 0-d tensor does not change the dtype of the sum
    for s, stream_inputs in enumerate(streams.inputs(inputs["value_nt"], inputs.get("bootstrap_n"))):
        advantage_nt, _ = run_method({**inputs, **stream_inputs}, inputs["block_nt"].shape)
        weighted_advantage_nt = streams.weight_s[s] * advantage_nt
        pays_stop_n = streams.stop_sn[s]
        if bool(pays_stop_n.any()):
            stop_n = stop_n + torch.where(pays_stop_n, weighted_advantage_nt.sum(dim=1).double(), 0.0)
            weighted_advantage_nt = weighted_advantage_nt.masked_fill(pays_stop_n[:, None], 0.0)
        credit_sum = credit_sum + weighted_advantage_nt
    return credit_sum, stop_n


def _run_over_paid_tokens(
    run_method: RunMethod, inputs: Mapping[str, Any], is_paid_nt: Tensor, pays_stop_n: Tensor
) -> tuple[Tensor, Float[Tensor, " n"]]:
    """Run a method on tokens of rewarded blocks. Without such a block, the last token stands for the decision to stop."""
    position_t = torch.arange(is_paid_nt.shape[1], device=is_paid_nt.device)
    is_stop_nt = pays_stop_n[:, None] & (position_t == find_last_token(inputs["mask_nt"])[0][:, None])
    mask_nt = inputs["mask_nt"] & (is_paid_nt | is_stop_nt)
    token_inputs = {"mask_nt": mask_nt, "reward_nt": put_on_last_token(inputs["reward_n"], mask_nt)}
    advantage_nt, _ = run_method({**inputs, **token_inputs}, is_paid_nt.shape)
    return advantage_nt.masked_fill(is_stop_nt, 0.0), torch.where(is_stop_nt, advantage_nt.double(), 0.0).sum(dim=1)


def _run_method(
    entry: Method, group_n: Tensor, options: Mapping[str, Any], inputs: Mapping[str, Any], shape: Sequence[int]
) -> tuple[Tensor, Comparison | None]:
    """Call a method and check the shape of its advantages. Return them, with their `Comparison` if the method gives one."""
    method_result = call(entry, group_n, inputs, options)
    advantages = method_result.advantages if isinstance(method_result, Explained) else method_result
    if not isinstance(advantages, Tensor) or advantages.shape != shape:
        axes_text = {"block": "completions, objectives", "token": "completions, tokens"}.get(entry.kind, "completions")
        type_text = f"a tensor of {tuple(advantages.shape)}" if isinstance(advantages, Tensor) else type(advantages).__name__
        raise AlignmentError(
            f"Method '{entry.name}' is registered with kind='{entry.kind}' and must return a tensor of shape "
            f"{tuple(shape)} ({axes_text}). It returned {type_text}."
        )
    return advantages, method_result.comparison if isinstance(method_result, Explained) else None


def call(chosen: Method, group_n: Tensor, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call a method with the inputs that its parameters name. Refuse a missing input and an unknown option."""
    available_inputs = {**inputs, "group_n": group_n, "group_s": group_n}
    if missing_inputs := [name for name in chosen.required if available_inputs.get(name) is None]:
        raise RecipeError(f"Method '{chosen.name}' needs {' and '.join(missing_inputs)}, which this batch does not have.")
    chosen.check_names(options)
    parameters = inspect.signature(chosen.estimator).parameters.values()
    takes_all_inputs = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    input_names = {*chosen.required, *(inputs if takes_all_inputs else chosen.settings.keys() & FACTS)}
    used_inputs = {name: available_inputs[name] for name in input_names if available_inputs.get(name) is not None}
    return call_explained(chosen.estimator, **used_inputs, **options)


def _check_sizes(
    scores: Scores, group_n: Tensor, present_nk: Tensor, objectives: Sequence[Objective], block_names: Sequence[str]
) -> None:
    """Refuse rewards, group ids and blocks of different sizes. Refuse a reward of status OK that is not finite."""
    reward_shape = (len(group_n), len(objectives))
    present_shape = (len(group_n), len(block_names))
    if scores.reward_nm.shape != reward_shape or present_nk.shape != present_shape:
        raise AlignmentError(
            f"reward_nm (completions, objectives) must have the shape {reward_shape}; it has "
            f"{tuple(scores.reward_nm.shape)}. present_nk (completions, blocks) must have the shape {present_shape}; it has "
            f"{tuple(present_nk.shape)}."
        )
    if bad_entry := first_of((scores.status_nm == int(Status.OK)) & ~scores.reward_nm.isfinite()):
        row, column = bad_entry
        raise RewardError(
            f"Reward '{scores.names[column]}' of completion {row} is {float(scores.reward_nm[row, column])}, but its status "
            f"is OK. Give a finite reward, or a status that says why there is none."
        )


def explain_objectives(
    comparison: Comparison,
    scores: Scores,
    objectives: Sequence[Objective],
    reward_nm: Float[Tensor, "n m"],
    *,
    truncated_n: Bool[Tensor, " n"] | None,
) -> Comparison:
    """Find the reason why an objective's credit is exactly 0, such as a missing reward."""
    missing_reason_nm = _explain_missing(scores, truncated_n)
    reason_nm = torch.where(comparison.reason_nm == int(Zero.ABSENT), missing_reason_nm, comparison.reason_nm)
    for m, objective in enumerate(objectives):
        reason_nm[:, m] = _specify_all_equal(objective, reward_nm[:, m], reason_nm[:, m], comparison.worth_nm[:, m])
        if objective.weight == 0:
            reason_nm[:, m] = int(Zero.NO_WEIGHT)
    objective_index_nm = torch.arange(len(objectives), device=reason_nm.device).expand_as(reason_nm)
    return replace(comparison, reason_nm=reason_nm, about_nm=objective_index_nm)


def explain_sum(
    comparison: Comparison,
    scores: Scores,
    objectives: Sequence[Objective],
    group_n: Int[Tensor, " n"],
    *,
    in_groups: bool,
    truncated_n: Bool[Tensor, " n"] | None,
) -> Comparison:
    """Find why the credit for a sum of rewards is 0. Return the reason and the objective that it is about."""
    comparison_group_n = group_n if in_groups else torch.zeros_like(group_n)
    reason_n = comparison.reason_nm[:, 0]
    objective_index_n = comparison.about_nm[:, 0]
    sum_moments = moments(comparison.worth_nm[:, 0], comparison_group_n)
    if not in_groups:
        zero_reason_n = torch.where(sum_moments.constant_n(), int(Zero.ALL_EQUAL), int(Zero.AT_BASELINE))
        reason_n = torch.where(reason_n == int(Zero.CREDITED), reason_n, zero_reason_n)
    is_all_equal_n = reason_n == int(Zero.ALL_EQUAL)
    all_equal_reason_n = torch.full_like(reason_n, int(Zero.ALL_EQUAL))
    for m in reversed(range(len(objectives))):  # the reasons "all right" and "all wrong" say more than "all equal"
        reward_n = scores.reward_nm[:, m]
        reward_moments = moments(reward_n, comparison_group_n)
        exact_reason_n = _specify_all_equal(objectives[m], reward_n, all_equal_reason_n, reward_moments.mean_n())
        is_constant_reward_n = reward_moments.constant_n() & (reward_moments.count_n() == sum_moments.count_n())
        is_all_right_or_wrong_n = is_all_equal_n & is_constant_reward_n & (exact_reason_n != all_equal_reason_n)
        reason_n = torch.where(is_all_right_or_wrong_n, exact_reason_n, reason_n)
        objective_index_n = torch.where(is_all_right_or_wrong_n, m, objective_index_n)
    missing_reason_nm = _explain_missing(scores, truncated_n)
    has_weight_m = torch.tensor([objective.weight != 0 for objective in objectives], device=reason_n.device)
    is_reward_missing_nm = fill_missing(scores, objectives).isnan() & has_weight_m
    # If a completion lacks several rewards, report the one whose reason comes first in the enum `Zero`.
    missing_objective_index_n = missing_reason_nm.where(is_reward_missing_nm, len(Zero)).argmin(dim=1)
    # GDPO adds up the advantages of single rewards, so it may credit a completion that lacks one of them.
    sum_is_missing_n = comparison.worth_nm[:, 0].isnan() & (reason_n != int(Zero.CREDITED))
    missing_reason_n = missing_reason_nm.gather(1, missing_objective_index_n[:, None])[:, 0]
    reason_n = torch.where(sum_is_missing_n, missing_reason_n, reason_n)
    objective_index_n = torch.where(sum_is_missing_n, missing_objective_index_n, objective_index_n)
    return replace(comparison, reason_nm=reason_n[:, None], about_nm=objective_index_n[:, None])


def _explain_missing(scores: Scores, truncated_n: Tensor | None) -> Int[Tensor, "n m"]:
    """Return the reason for each missing reward, such as a timeout."""
    reason_nm = torch.full(scores.status_nm.shape, int(Zero.ABSENT), device=scores.status_nm.device)
    if truncated_n is not None:
        reason_nm[truncated_n] = int(Zero.TRUNCATED)
    for reward_status in (Status.UNPARSABLE, Status.TIMEOUT, Status.ERROR, Status.UNSCORED):
        reason_nm.masked_fill_(scores.status_nm == int(reward_status), int(Zero[reward_status.name]))
    return reason_nm


def _specify_all_equal(objective: Objective, reward_n: Tensor, reason_n: Tensor, worth_n: Tensor) -> Tensor:
    """If all of an objective's rewards are 0 or 1, turn the reason ALL_EQUAL into ALL_RIGHT (all 1) or ALL_WRONG (all 0)."""
    is_zero_one_or_nan_n = (reward_n == 0) | (reward_n == 1) | reward_n.isnan()
    if judge_of(objective) is not None or not bool(is_zero_one_or_nan_n.all()):
        return reason_n
    verdict_reason_n = torch.where(worth_n == 1, int(Zero.ALL_RIGHT), int(Zero.ALL_WRONG))
    return torch.where((reason_n == int(Zero.ALL_EQUAL)) & ((worth_n == 0) | (worth_n == 1)), verdict_reason_n, reason_n)
