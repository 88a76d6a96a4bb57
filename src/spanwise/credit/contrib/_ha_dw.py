"""HA-DW: any advantage, weighted by how a group's rate of success compares with that of earlier batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.methods._grpo import grpo
from spanwise.credit.registry import Preset, accepted
from spanwise.credit.strata import group_index, moments
from spanwise.errors import RecipeError
from spanwise.registry import register


def history_weighted(
    advantage_n: Float[Tensor, " n"],
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    anchor: float,
    lambda_scale: float = 1.3,
) -> Float[Tensor, " n"]:
    """Weight the advantages of any method as `ha_dw` does.

    >>> r, g = torch.tensor([1., 0., 0., 0.]), torch.tensor([0, 0, 0, 0])
    >>> history_weighted(torch.tensor([.75, -.25, -.25, -.25]).double(), r, g, anchor=0.5)
    tensor([ 1.2519, -0.2531, -0.2531, -0.2531], dtype=torch.float64)
    """
    diff_n = moments(reward_n, group_index(group_n)).mean_n() - anchor
    direction_n = -advantage_n.sign() * diff_n.sign()
    weighted_n = advantage_n.double() * lambda_scale * (direction_n * diff_n.abs()).exp()
    return weighted_n.nan_to_num(nan=0.0)


class HistoryWeight:
    r"""An estimator that weights another one by the history of the run: call it once per batch, save its state with the run.

    Equation
        anchor after a batch of mean reward y:  (1 - eta_t) anchor + eta_t y,  eta_t = eta * std of the last `window` anchors
        (history=h: the mean of the last h values of y)

    Args:
        estimator: of completions, called as estimator(reward_n, group_n, **inputs).
        lambda_scale: of all weights.
        eta: how fast the anchor follows.
        window: how many anchors the standard deviation sees; until there are that many, eta_t = eta, or it would stay 0.
        history: number of batches of the moving average; None: the exponential form.
        start: the anchor of the first batch.

    Raises:
        RecipeError: a window below 2, an empty history.

    Example:
        >>> weigh = HistoryWeight(eta=0.02)
        >>> weigh(torch.tensor([1., 0., 1., 0., 1.]), torch.zeros(5, dtype=torch.long)).shape, round(weigh.anchor, 4)
        (torch.Size([5]), 0.502)

    Reference:
        "Your Group-Relative Advantage Is Biased" (arXiv 2601.08521). eta, window, history, start and the first steps are not
        verified.
    """

    def __init__(
        self,
        estimator: Callable[..., Tensor] = grpo,
        *,
        lambda_scale: float = 1.3,
        eta: float = 0.1,
        window: int = 10,
        history: int | None = None,
        start: float = 0.5,
    ) -> None:
        if window < 2 or (history is not None and history < 1):
            raise RecipeError(f"window is {window} and history {history}; use at least 2 anchors and 1 batch.")
        self.estimator, self.lambda_scale = estimator, lambda_scale
        self.eta, self.window, self.history = eta, window, history
        self._anchors, self._rates = [float(start)], []

    @property
    def anchor(self) -> float:
        """The rate of success that the next batch is compared with."""
        return self._anchors[-1]

    def __call__(self, reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], **inputs: Any) -> Float[Tensor, " n"]:
        """Weighted advantages of one batch; the batch then moves the anchor, unless all its rewards are absent."""
        advantage_n = self.estimator(reward_n, group_n, **accepted(self.estimator, inputs))
        weighted_n = history_weighted(advantage_n, reward_n, group_n, anchor=self.anchor, lambda_scale=self.lambda_scale)
        present_i = reward_n[~reward_n.isnan()].double()
        if len(present_i):
            self._move(float(present_i.mean()))
        return weighted_n

    def state_dict(self) -> dict[str, list[float]]:
        """What a resumed run needs, as plain numbers."""
        return {"anchors": list(self._anchors), "rates": list(self._rates)}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            RecipeError: the state is of something else.
        """
        if set(state) != {"anchors", "rates"} or not state["anchors"]:
            raise RecipeError(f"The state of a HistoryWeight holds 'anchors' and 'rates'; got {', '.join(sorted(state))}.")
        self._anchors, self._rates = [float(x) for x in state["anchors"]], [float(x) for x in state["rates"]]

    def _move(self, rate: float) -> None:
        if self.history is not None:
            self._rates = [*self._rates, rate][-self.history :]
            self._anchors = [sum(self._rates) / len(self._rates)]
            return
        known = torch.tensor(self._anchors[-self.window :], dtype=torch.float64)
        eta = self.eta * (float(known.std()) if len(known) >= self.window else 1.0)
        self._anchors = [*self._anchors, (1 - eta) * self.anchor + eta * rate][-self.window :]


class RememberedGrpo:
    """GRPO under a `HistoryWeight`, as a run has it: its options come with each batch, its history is kept from batch to batch."""

    def __init__(self) -> None:
        self._state: Mapping[str, list[float]] = {}

    def __call__(
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
    ) -> Float[Tensor, " n"]:
        """The weighted advantages of one batch, which then moves the anchor; `anchor` is that of the first batch."""
        plain = partial(grpo, ddof=ddof, eps=eps, min_stratum=min_stratum)
        moving = {"eta": eta, "window": window, "history": history, "start": anchor}
        weigh = HistoryWeight(plain, lambda_scale=lambda_scale, **moving)
        if self._state:
            weigh.load_state_dict(self._state)
        weighted_n = weigh(reward_n, group_n)
        self._state = weigh.state_dict()
        return weighted_n

    def state_dict(self) -> Mapping[str, list[float]]:
        """What a resumed run needs; nothing before the first batch."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Continue where `state_dict` was taken."""
        if state:
            HistoryWeight().load_state_dict(state)  # refuses what is none
        self._state = dict(state)


@register(
    "ha_dw",
    kind="completion",
    paper="Your Group-Relative Advantage Is Biased, arXiv 2601.08521",
    source="notes; neither the full paper nor code was read",
    preset=Preset(whole=True, per="completion", calibrated=False),
    exceptions={"shift": "the mean reward is compared with a rate of success"},
    memory=RememberedGrpo,
    only_with={"eta": ("history", (None,)), "window": ("history", (None,))},
)
def ha_dw(
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    anchor: float = 0.5,
    lambda_scale: float = 1.3,
    ddof: int = 1,
    eps: float = 1e-6,
    min_stratum: int = 2,
) -> Float[Tensor, " n"]:
    r"""Weight GRPO so that hard prompts gain from success and easy ones lose from failure more than the other way round.

    Equation
        diff = mean_g r - anchor;   D = -sign(A) sign(diff);   A'[i] = A[i] lambda_scale exp(D |diff|)

    Args:
        reward_n: one reward per completion, a rate of success in [0, 1]; NaN where absent (takes no part, gets 0).
        group_n: prompt ids, in any order, of any sizes.
        anchor: the rate of success to expect. In a run it is that of the first batch, and each batch moves it as `HistoryWeight`
            says, with the options `eta`, `window` and `history`.
        lambda_scale: of all weights.
        ddof, eps, min_stratum: see `grpo`.

    Edge cases:
        A group of one and a constant group give exactly 0. With 1.3 every weight exceeds 1 while |diff| < .262: much of the
        effect is a larger step, so compare with a plain factor of 1.3.

    Example:
        >>> ha_dw(torch.tensor([1., 0., 0., 0.]), torch.tensor([0, 0, 0, 0]))  # hard: .25 where .5 is expected
        tensor([ 2.5038, -0.5062, -0.5062, -0.5062], dtype=torch.float64)

    Reference:
        "Your Group-Relative Advantage Is Biased" (arXiv 2601.08521), after a note on it.
    """
    advantage_n = grpo(reward_n, group_n, ddof=ddof, eps=eps, min_stratum=min_stratum)
    return history_weighted(advantage_n, reward_n, group_n, anchor=anchor, lambda_scale=lambda_scale)
