"""GiGPO: compare episodes of the same prompt, and steps taken from the same state."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.registry import Preset
from spanwise.credit.strata import centred, check_counts, group_index, list_ids, moments
from spanwise.credit.trajectories.rollouts import OutcomeName, build_timeline
from spanwise.errors import RecipeError, check_known
from spanwise.registry import register

Anchors = Sequence[Hashable] | Int[Tensor, " s"]


@register(
    "gigpo",
    kind="step",
    paper="Group-in-Group Policy Optimization, arXiv 2505.10978",
    source="two forks of the authors' code",
    preset=Preset(per="completion", calibrated=False),
    only_with={"ddof": ("scale", ("std",)), "eps": ("scale", ("std",))},
)
@torch.no_grad()
def gigpo(
    reward_s: Float[Tensor, " s"],
    group_s: Int[Tensor, " s"],
    trajectory_s: Int[Tensor, " s"],
    step_s: Int[Tensor, " s"],
    anchor_s: Anchors,
    *,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    scale: Literal["none", "std"] = "none",
    over: Literal["rows", "trajectories"] = "rows",
    reward: OutcomeName = "sum",
    similarity: float | None = None,
    singleton: Literal["zero", "raw"] = "zero",
    ddof: int = 1,
    eps: float = 1e-6,
    min_stratum: int = 2,
) -> Float[Tensor, " s"]:
    r"""Compare each episode with those of its prompt, and each step with those from the same state.

    Equation
        A[t] = episode_weight * A_E(j) + step_weight * A_S[t]
        A_E(j) = (R(j) - mean_g R) / F,   R(j) the reward of trajectory j
        A_S[t] = (R[t] - mean_u R) / F,   R[t] = sum over k >= t of gamma^(k-t) r[k], u the steps of prompt g with t's anchor state
        F = 1 (scale="none") or the standard deviation + eps (scale="std") of the same group

    Args:
        reward_s: one reward per step row; NaN where absent.
        group_s: prompt (task) ids, in any order, of any sizes.
        trajectory_s: trajectory ids; a trajectory belongs to one prompt.
        step_s: step numbers; only their order counts.
        anchor_s: the state each step starts from, anything hashable or integer ids; None in a list joins no step group.
        gamma: discount per step.
        step_weight, episode_weight: of the two parts (omega is `step_weight`).
        scale: "none" is the released code's `mean_norm`, "std" its `mean_std_norm`.
        over: what the episode's mean and deviation count: step rows (five steps five times, the released default), or trajectories.
        reward: the episode's reward, the sum of its steps' or the last one's.
        similarity: None for equal states, or the least `difflib` ratio of texts (0.95 in the released code); see `anchor_groups`.
        singleton: "zero", or "raw" for R(j) itself (over 1 + eps with "std") where R(j) is the only one counted; with over="rows"
            that is an episode of one step, for the steps of a longer one are compared with each other and give 0.
        ddof, eps, min_stratum: as for `grpo`, in groups of either kind.

    Edge cases:
        A state met once gives A_S exactly 0, a constant group gives exactly 0 in its part. A trajectory that is alone with its
        prompt has A_E = 0, but states it meets again are still compared with each other. An absent reward takes A_E from its
        whole trajectory (with reward="last": the last one) and A_S from its own and all earlier steps.

    Example:
        Two trajectories of one task, a: s0 s1 s2 with 10 at the end, b: s0 s1 s1 with nothing.

        >>> reward_s = torch.tensor([0., 0., 10., 0., 0., 0.])
        >>> one, ab, t = torch.zeros(6).long(), torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> gigpo(reward_s, one, ab, t, ["s0", "s1", "s2", "s0", "s1", "s1"])
        tensor([ 9.5125, 11.3333,  5.0000, -9.5125, -8.1667, -8.1667], dtype=torch.float64)

    Reference:
        Feng et al. 2025, "Group-in-Group Policy Optimization" (arXiv 2505.10978), equations 3 to 8; defaults are those of the
        released code, which gives a lone episode of one step its raw reward (`singleton="raw"`).
    """
    check_known("scale", scale, ("none", "std"))
    check_known("unit for episode moments", over, ("rows", "trajectories"))
    check_known("rule for singletons", singleton, ("zero", "raw"))
    timeline = build_timeline(trajectory_s, step_s, reward_s=reward_s, group_s=group_s)
    rollout_reward_j = timeline.outcome(reward_s, reward)
    rollout_group_j = timeline.groups(group_s)
    scaling_options = {"scale": scale, "ddof": ddof, "eps": eps, "min_stratum": min_stratum}
    if over == "rows":
        episode_adv_s = _compare_episodes(rollout_reward_j[timeline.index_s], group_s, singleton, scaling_options)
    else:
        episode_adv_s = _compare_episodes(rollout_reward_j, rollout_group_j, singleton, scaling_options)[timeline.index_s]
    return_s = timeline.backward_sum(reward_s, decay=gamma)
    step_adv_s = centred(return_s, anchor_groups(group_s, anchor_s, similarity=similarity), **scaling_options)
    return episode_weight * episode_adv_s + step_weight * step_adv_s


def _compare_episodes(reward_n: Tensor, group_n: Tensor, singleton: str, options: dict) -> Float[Tensor, " n"]:
    """Compare each episode's reward with its group. If `singleton` is "raw", a lone episode keeps its reward."""
    group_n = group_index(group_n)  # renumbered from 0, because a negative number would mean "no group"
    advantage_n = centred(reward_n, group_n, **options)
    if singleton == "zero":
        return advantage_n
    group_moments = moments(reward_n, group_n)
    lone_advantage_n = reward_n / (1.0 + options["eps"]) if options["scale"] == "std" else reward_n
    return torch.where(group_moments.member_n & (group_moments.count_n() == 1), lone_advantage_n, advantage_n)


def anchor_groups(group_s: Int[Tensor, " s"], anchor_s: Anchors, *, similarity: float | None = None) -> Int[Tensor, " s"]:
    """Give equal states of one prompt the same number. None gets -1; `similarity` groups similar texts."""
    check_counts(
        anchor_s, "anchor states", group_s, "prompt ids", advice="give every row one anchor state and one prompt id"
    )
    if similarity is not None and not 0.0 < similarity < 1.0:
        raise RecipeError(f"similarity is {similarity}; it must lie between 0 and 1. Use None to compare states exactly.")
    anchor_states = list_ids(anchor_s)
    prompt_state_pairs = list(zip(group_s.tolist(), anchor_states, strict=True))
    # The order of rows matters, because a state gets the number of the first earlier state that is similar to it.
    matchers_by_prompt: dict[int, list[SequenceMatcher]] = {}
    text_id_by_state: dict[tuple[int, Any], int] = {}
    for row, (prompt, state) in enumerate(prompt_state_pairs):
        if state is not None and not (_is_hashable(state) if similarity is None else isinstance(state, str)):
            advice = "Only texts can be compared by similarity; use similarity=None for other states."
            if similarity is None:
                advice = "Turn each state into a string, or a tuple of strings and numbers, so that states can be compared."
            raise RecipeError(f"The anchor state of row {row} is of type {type(state).__name__}. {advice}")
        if similarity is not None and state is not None and (prompt, state) not in text_id_by_state:
            text_id_by_state[prompt, state] = _find_text(str(state), matchers_by_prompt.setdefault(prompt, []), similarity)
    if similarity is not None:
        prompt_state_pairs = [(prompt, text_id_by_state.get((prompt, state), -1)) for prompt, state in prompt_state_pairs]
    is_known_state_s = torch.tensor([state is not None for state in anchor_states], dtype=torch.bool, device=group_s.device)
    return torch.where(is_known_state_s, group_index(prompt_state_pairs).to(group_s.device), -1)


def _is_hashable(state: Any) -> bool:
    """Return whether a state and all that it holds can be hashed. A tuple of lists cannot."""
    try:
        hash(state)
    except TypeError:
        return False
    return True


def _find_text(state: str, matchers: list[SequenceMatcher], similarity: float) -> int:
    """Return the index of the first known text that is similar to `state`, or the next free index if none is."""
    for state_number, matcher in enumerate(matchers):
        matcher.set_seq1(state)
        # `SequenceMatcher.ratio` is slow, so test its two cheap upper bounds first.
        if min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= similarity and matcher.ratio() >= similarity:
            return state_number
    matchers.append(SequenceMatcher(None, "", state))
    return len(matchers) - 1
