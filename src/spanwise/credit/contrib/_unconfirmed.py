"""The methods HA-DW, GRPO-Verif and GAGPO, whose formulas no primary source confirms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.methods._bae import dcpo
from spanwise.credit.methods._gigpo import Anchors, anchor_groups
from spanwise.credit.methods._group_relative import grpo
from spanwise.credit.registry import Preset
from spanwise.credit.strata import Explained, call_explained, centred, explains, group_index, moments
from spanwise.credit.trajectories.rollouts import build_timeline
from spanwise.errors import RecipeError, check_known
from spanwise.registry import register


class HistoryWeight:
    r"""Apply the method HA-DW to successive batches. Each batch moves the expected success rate (the anchor).

    Call it once per batch with the options of `ha_dw`, and save its state with the run.

    Equation
        anchor after a batch of mean reward y:  (1 - eta_t) anchor + eta_t y,  eta_t = eta * std of the last `window` anchors
        (history=h: the mean of the last h values of y)

    Raises:
        RecipeError: a window below 2, an empty history.

    Example:
        >>> weigh = HistoryWeight()
        >>> weigh(torch.tensor([1., 0., 1., 0., 1.]), torch.zeros(5, dtype=torch.long), eta=0.02).shape, round(weigh.anchor, 4)
        (torch.Size([5]), 0.502)

    Reference:
        "Your Group-Relative Advantage Is Biased" (arXiv 2601.08521). The options and the first steps are not verified.
    """

    def __init__(self) -> None:
        self._anchors: list[float] = []
        self._rates: list[float] = []

    @property
    def anchor(self) -> float:
        """The success rate that the next batch is compared with. It exists only after the first batch."""
        return self._anchors[-1]

    def explained(
        self,
        reward_n: Float[Tensor, " n"],
        group_n: Int[Tensor, " n"],
        *,
        anchor: float = 0.5,
        lambda_scale: float = 1.3,
        eta: float = 0.1,
        window: int = 10,
        history: int | None = None,
        ddof: int = 1,
        eps: float = 1e-6,
        min_stratum: int = 2,
    ) -> Explained:
        """Apply `ha_dw` to a batch, and then move its anchor, the expected success rate, towards the mean reward.

        Args:
            reward_n, group_n, lambda_scale, ddof, eps, min_stratum: see `ha_dw`.
            anchor: of the first batch.
            eta: how fast the anchor follows.
            window: how many anchors the standard deviation sees; until there are that many, eta_t = eta, or it would stay 0.
            history: number of batches of the moving average; None: the exponential form.
        """
        if window < 2 or (history is not None and history < 1):
            raise RecipeError(f"window is {window} and history is {history}; use at least 2 for window and 1 for history.")
        self._anchors = self._anchors or [float(anchor)]
        options = {"lambda_scale": lambda_scale, "ddof": ddof, "eps": eps, "min_stratum": min_stratum}
        explained_advantage = call_explained(ha_dw, reward_n, group_n, anchor=self.anchor, **options)
        known_reward_i = reward_n[~reward_n.isnan()].double()
        if len(known_reward_i):
            self._move(float(known_reward_i.mean()), eta, window, history)
        return explained_advantage

    __call__ = explains(explained)

    def _move(self, mean_reward: float, eta: float, window: int, history: int | None) -> None:
        """Move the anchor (expected success rate) after a batch. The docstring of `HistoryWeight` has the equation."""
        if history is not None:
            self._rates = [*self._rates, mean_reward][-history:]
            self._anchors = [sum(self._rates) / len(self._rates)]
            return
        last_anchors = torch.tensor(self._anchors[-window:], dtype=torch.float64)
        eta *= float(last_anchors.std()) if len(last_anchors) >= window else 1.0
        self._anchors = [*self._anchors, (1 - eta) * self.anchor + eta * mean_reward][-window:]

    def state_dict(self) -> dict[str, list[float]]:
        """Return the anchors (expected success rates) and batch means for a resumed run ({} before the first batch)."""
        return {"anchors": list(self._anchors), "rates": list(self._rates)} if self._anchors else {}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Restore the state that `state_dict` returned.

        Raises:
            RecipeError: the state is of something else.
        """
        if state and (set(state) != {"anchors", "rates"} or not state["anchors"]):
            raise RecipeError(
                f"The saved state of ha_dw must hold 'anchors' and 'rates', but this one holds {', '.join(sorted(state))}."
            )
        self._anchors, self._rates = ([float(x) for x in state.get(name, ())] for name in ("anchors", "rates"))


@register(
    "ha_dw",
    kind="completion",
    paper="Your Group-Relative Advantage Is Biased, arXiv 2601.08521",
    source="third-party summaries of the paper (its full text and code were not used)",
    preset=Preset(whole=True, per="completion", calibrated=False),
    exceptions={
        "shift": "the weights of advantages depend on the mean reward, which is taken as a success rate",
        "monotone": "a higher reward raises the mean of the group, which lowers the weight of a right completion",
    },
    memory=HistoryWeight,
    only_with={"eta": ("history", (None,)), "window": ("history", (None,))},
)
@explains
def ha_dw(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    anchor: float = 0.5,
    lambda_scale: float = 1.3,
    ddof: int = 1,
    eps: float = 1e-6,
    min_stratum: int = 2,
) -> Explained:
    r"""Weight GRPO's advantages: successes count more on hard prompts, failures count more on easy ones.

    Equation
        diff = mean_g r - anchor;   D = -sign(A) sign(diff);   A'[i] = A[i] lambda_scale exp(D |diff|)

    Args:
        reward_n: as for `grpo`, a rate of success in [0, 1].
        group_n, ddof, eps, min_stratum: as for `grpo`.
        anchor: the rate of success to expect; in a run that of the first batch, which `HistoryWeight` moves with its options.
        lambda_scale: of all weights.

    Edge cases:
        A group of one and a constant group give exactly 0. With 1.3 every weight exceeds 1 while |diff| < .262.

    Example:
        >>> ha_dw(torch.tensor([1., 0., 0., 0.]), torch.tensor([0, 0, 0, 0]))  # hard: .25 where .5 is expected
        tensor([ 2.5038, -0.5062, -0.5062, -0.5062], dtype=torch.float64)

    Reference:
        "Your Group-Relative Advantage Is Biased" (arXiv 2601.08521), after a note on it.
    """
    adv_n, comparison = call_explained(grpo, reward_n, group_n, ddof=ddof, eps=eps, min_stratum=min_stratum)
    mean_above_anchor_n = moments(reward_n, group_index(group_n)).mean_n() - anchor
    weight_factor_n = (-adv_n.sign() * mean_above_anchor_n).exp()  # a group without any reward gets NaN
    divisor_n = torch.where(adv_n == 0, 1.0, 1 / (lambda_scale * weight_factor_n))
    comparison = comparison.rescaled(divisor=divisor_n[:, None])
    adv_n = (adv_n * lambda_scale * weight_factor_n).nan_to_num(nan=0.0)
    return Explained(adv_n, comparison.fitting(adv_n[:, None]))


@register(
    "grpo_verif",
    kind="block",
    paper="GRPO-Verif, arXiv 2511.15137",
    source="third-party summaries of the paper (its full text and code were not used)",
    preset=Preset(),
)
@explains
def grpo_verif(
    reward_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    weight: float = 0.2,
    if_missing_k: Sequence[float | Float[Tensor, " n"] | None] | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
    min_stratum: int = 2,
) -> Explained:
    r"""Standardise the rewards of solutions and of their verifications over the group.

    Equation
        A[i, 0] = (r[i, 0] - mean_g r[:, 0]) / (std_g r[:, 0] + eps)
        A[i, k] = weight (r[i, k] - mean_g r[:, k]) / (std_g r[:, k] + eps)    for the objectives after the first

    This is `dcpo` with less weight on the objectives after the first. In the preset, the confidence replaces the verification.

    Args:
        reward_nk: as for `dcpo`, of the solution and of the judgement on it (paper: 1 right, -1 wrong, -1.5 no valid output).
        group_n, if_missing_k, ddof, eps, min_stratum: as for `dcpo`.
        weight: the weight of the objectives after the first (alpha in the paper).

    Edge cases:
        A group of one and a block whose reward is constant in the group give exactly 0. Right and wrong solutions share one
        baseline for their verifications, so on easy prompts always saying "correct" pays; `bae` does without that.

    Example:
        >>> rewards = torch.tensor([[1., 1.], [-1., 1.], [1., -1.], [-1.5, -1.]])
        >>> grpo_verif(rewards, torch.zeros(4, dtype=torch.long), ddof=0)
        tensor([[ 0.9879,  0.2000],
                [-0.7683,  0.2000],
                [ 0.9879, -0.2000],
                [-1.2074, -0.2000]], dtype=torch.float64)

    Reference:
        "GRPO-Verif" (arXiv 2511.15137), with its alpha in the advantage instead of the loss. ddof and eps are not verified.
    """
    grpo_options = {"ddof": ddof, "eps": eps, "min_stratum": min_stratum}
    standardised_credit: Explained = call_explained(dcpo, reward_nk, group_n, if_missing_k=if_missing_k, **grpo_options)
    weight_k = torch.full((reward_nk.shape[1],), weight, dtype=torch.float64, device=reward_nk.device)
    weight_k[:1] = 1.0
    adv_nk = standardised_credit.advantages * weight_k
    inverse_weight_k = 1 / torch.where(weight_k == 0, torch.nan, weight_k)
    return Explained(adv_nk, standardised_credit.comparison.rescaled(divisor=inverse_weight_k).fitting(adv_nk))


@register(
    "gagpo",
    kind="step",
    paper="Generalized Advantage Grouped Policy Optimization, arXiv 2605.13217",
    source="third-party summaries of the paper with worked numbers (its full text and code were not used)",
    preset=Preset(per="completion", calibrated=False),
    only_with={"ddof": ("scale", ("std",)), "eps": ("scale", ("std",)), "min_stratum": ("scale", ("std",))},
)
@torch.no_grad()
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
    r"""Compute GAE without a critic: the value of a state is its mean return in the group.

    Equation
        R[t] = sum over k >= t of gamma^(k-t) r[k],   V(u) = mean of R over the steps of the prompt that start in state u
        delta[t] = r[t] + gamma V(u[t+1]) - V(u[t]),   V after the last step = 0
        A[t] = delta[t] + gamma lam A[t+1]
        scale="std":  A[t] becomes (A[t] - mean_g A) / (std_g A + eps), over the rows of the prompt

    Args:
        reward_s, group_s, trajectory_s, step_s, gamma, similarity: as for `gigpo`.
        anchor_s: as for `gigpo`; None in a list is like no other state.
        lam: 1 gives R[t] - V(u[t]), the step part of GiGPO; 0 the TD error alone.
        scale: "std" standardises the advantages inside the prompt.
        ddof, eps, min_stratum: of `scale="std"`.

    Edge cases:
        The value of a state met once is its own return, so a trajectory none of whose states is met again gets exactly 0, and a
        lone state hands on what its successors earn. A trajectory that is alone with its prompt is compared with itself where it
        returns to a state. An absent reward takes the advantage from its own and all earlier steps, and their returns from V.

    Example:
        The two trajectories of `gigpo`.

        >>> reward_s = torch.tensor([0., 0., 10., 0., 0., 0.])
        >>> one, ab, t = torch.zeros(6).long(), torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
        >>> gagpo(reward_s, one, ab, t, ["s0", "s1", "s2", "s0", "s1", "s1"])
        tensor([ 4.2117,  6.3333,  0.0000, -4.2263, -3.0162, -3.1667], dtype=torch.float64)

    Reference:
        Zhu et al. 2026, "Generalized Advantage Grouped Policy Optimization" (arXiv 2605.13217). The paper also normalises inside
        groups; which group and which moments is not verified: the option `scale`. Its ratio per action belongs to the loss.
    """
    check_known("scale", scale, ("none", "std"))
    timeline = build_timeline(trajectory_s, step_s, reward_s=reward_s, group_s=group_s)
    timeline.groups(group_s)  # raises an error if a trajectory has rows of two prompts
    return_s = timeline.backward_sum(reward_s, decay=gamma)
    state_id_s = anchor_groups(group_s, anchor_s, similarity=similarity)
    # Each unknown state gets its own number, so that it is compared with no other.
    unique_stratum_s = len(state_id_s) + torch.arange(len(state_id_s), device=state_id_s.device)
    state_value_s = moments(return_s, torch.where(state_id_s < 0, unique_stratum_s, state_id_s)).mean_n()
    next_state_value_s = torch.where(timeline.next_s >= 0, gamma * state_value_s[timeline.next_s], 0.0)
    td_error_s = reward_s.double() + next_state_value_s - state_value_s
    advantage_s = timeline.backward_sum(td_error_s, decay=gamma * lam)
    if scale == "none":
        return advantage_s.nan_to_num(nan=0.0)
    return centred(advantage_s, group_index(group_s), scale=scale, ddof=ddof, eps=eps, min_stratum=min_stratum)
