"""GAGPO: the mean return of identical states as a value, and TD errors over it."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.methods._gigpo import Anchors, anchor_groups
from spanwise.credit.registry import Preset
from spanwise.credit.strata import centred, group_index, moments
from spanwise.credit.trajectories.rollouts import trajectory_outcomes
from spanwise.errors import check_known
from spanwise.registry import register


@register(
    "gagpo",
    kind="step",
    paper="Generalized Advantage Grouped Policy Optimization, arXiv 2605.13217",
    source="notes and worked numbers; neither the full paper nor code was read",
    preset=Preset(per="completion", calibrated=False),
    only_with={"ddof": ("scale", ("std",)), "eps": ("scale", ("std",)), "min_stratum": ("scale", ("std",))},
)
def gagpo(
    reward_s: Float[Tensor, " s"],
    group_s: Int[Tensor, " s"],
    trajectory_s: Int[Tensor, " s"],
    step_s: Int[Tensor, " s"],
    anchor_s: Anchors,
    *,
    gamma: float = 0.95,
    lam: float = 0.95,
    scale: Literal["none", "std"] = "none",
    similarity: float | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    min_stratum: int = 2,
) -> Float[Tensor, " s"]:
    r"""Carry credit backwards through a trajectory with the mean return of each state as its value, without a critic.

    Equation
        R[t] = sum over k >= t of gamma^(k-t) r[k],   V(u) = mean of R over the steps of the prompt that start in state u
        delta[t] = r[t] + gamma V(u[t+1]) - V(u[t]),   V after the last step = 0
        A[t] = delta[t] + gamma lam A[t+1]
        scale="std":  A[t] becomes (A[t] - mean_g A) / (std_g A + eps), over the rows of the prompt

    Args:
        reward_s: one reward per step row; NaN where absent.
        group_s: prompt (task) ids, in any order, of any sizes.
        trajectory_s: trajectory ids; a trajectory belongs to one prompt.
        step_s: step numbers; only their order counts.
        anchor_s: the state each step starts from, anything hashable or integer ids; None in a list is like no other state.
        gamma: discount per step.
        lam: 1 gives R[t] - V(u[t]), the step part of GiGPO; 0 the TD error alone.
        scale: "std" standardises the advantages inside the prompt.
        similarity: None for equal states, or the least `difflib` ratio of texts; see `anchor_groups`.
        ddof, eps, min_stratum: of `scale="std"`.

    Edge cases:
        The value of a state met once is its own return, so a trajectory none of whose states is met again gets exactly 0, and a
        lone state hands on what its successors earn. A trajectory that is alone with its prompt is compared with itself where it
        returns to a state. An absent reward takes the advantage from its own and all earlier steps, and their returns from V.

    Example:
        Two trajectories of one task, a: s0 s1 s2 with 10 at the end, b: s0 s1 s1 with nothing.

        >>> reward_s = torch.tensor([0., 0., 10., 0., 0., 0.])
        >>> one, ab, t = torch.zeros(6).long(), torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> gagpo(reward_s, one, ab, t, ["s0", "s1", "s2", "s0", "s1", "s1"])
        tensor([ 4.2117,  6.3333,  0.0000, -4.2263, -3.0162, -3.1667], dtype=torch.float64)

    Reference:
        Zhu et al. 2026, "Generalized Advantage Grouped Policy Optimization" (arXiv 2605.13217), from a secondary account. The
        paper also normalises advantages inside groups; which group and which moments is not verified, so it is the option
        `scale`, off by default. Its ratio per action belongs to the loss.
    """
    check_known("scale", scale, ("none", "std"))
    line = trajectory_outcomes(reward_s, group_s, trajectory_s, step_s).line  # refuses trajectories that cross prompts
    return_s = line.backward_sum(reward_s, decay=gamma)
    state_s = anchor_groups(group_s, anchor_s, similarity=similarity)
    # A state that is not known is a stratum of its own.
    alone_s = len(state_s) + torch.arange(len(state_s), device=state_s.device)
    value_s = moments(return_s, torch.where(state_s < 0, alone_s, state_s)).mean_n()
    later_s = torch.where(line.next_s >= 0, gamma * value_s[line.next_s], 0.0)
    advantage_s = line.backward_sum((reward_s.double() + later_s) - value_s, decay=gamma * lam)
    if scale == "none":
        return advantage_s.nan_to_num(nan=0.0)
    return centred(advantage_s, group_index(group_s), scale=scale, ddof=ddof, eps=eps, min_stratum=min_stratum)
