"""HA-DW: GRPO, weighted by how a group's rate of success compares with that of earlier batches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit.methods._group_relative import grpo
from spanwise.credit.registry import Preset
from spanwise.credit.strata import Explained, call_explained, explains, group_index, moments
from spanwise.errors import RecipeError
from spanwise.registry import register


class HistoryWeight:
    r"""HA-DW as a run has it: call it once per batch with the options of `ha_dw`, save its state with the run.

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
        "Your Group-Relative Advantage Is Biased" (arXiv 2601.08521). eta, window, history, anchor and the first steps are not
        verified.
    """

    def __init__(self) -> None:
        self._anchors: list[float] = []
        self._rates: list[float] = []

    @property
    def anchor(self) -> float:
        """The rate of success that the next batch is compared with, once there was a first one."""
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
        """`ha_dw` of one batch, which then moves the anchor, unless all its rewards are absent.

        Args:
            reward_n, group_n, lambda_scale, ddof, eps, min_stratum: see `ha_dw`.
            anchor: of the first batch.
            eta: how fast the anchor follows.
            window: how many anchors the standard deviation sees; until there are that many, eta_t = eta, or it would stay 0.
            history: number of batches of the moving average; None: the exponential form.
        """
        if window < 2 or (history is not None and history < 1):
            raise RecipeError(f"window is {window} and history {history}; use at least 2 anchors and 1 batch.")
        self._anchors = self._anchors or [float(anchor)]
        options = {"lambda_scale": lambda_scale, "ddof": ddof, "eps": eps, "min_stratum": min_stratum}
        weighted = call_explained(ha_dw, reward_n, group_n, anchor=self.anchor, **options)
        present_i = reward_n[~reward_n.isnan()].double()
        if len(present_i):
            self._move(float(present_i.mean()), eta, window, history)
        return weighted

    __call__ = explains(explained)

    def _move(self, rate: float, eta: float, window: int, history: int | None) -> None:
        if history is not None:
            self._rates = [*self._rates, rate][-history:]
            self._anchors = [sum(self._rates) / len(self._rates)]
            return
        known = torch.tensor(self._anchors[-window:], dtype=torch.float64)
        eta *= float(known.std()) if len(known) >= window else 1.0
        self._anchors = [*self._anchors, (1 - eta) * self.anchor + eta * rate][-window:]

    def state_dict(self) -> dict[str, list[float]]:
        """What a resumed run needs, as plain numbers; nothing before the first batch."""
        return {"anchors": list(self._anchors), "rates": list(self._rates)} if self._anchors else {}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Continue where `state_dict` was taken.

        Raises:
            RecipeError: the state is of something else.
        """
        if state and (set(state) != {"anchors", "rates"} or not state["anchors"]):
            raise RecipeError(f"The state of a HistoryWeight holds 'anchors' and 'rates'; got {', '.join(sorted(state))}.")
        self._anchors, self._rates = ([float(x) for x in state.get(name, ())] for name in ("anchors", "rates"))


@register(
    "ha_dw",
    kind="completion",
    paper="Your Group-Relative Advantage Is Biased, arXiv 2601.08521",
    source="notes; neither the full paper nor code was read",
    preset=Preset(whole=True, per="completion", calibrated=False),
    exceptions={"shift": "the mean reward is compared with a rate of success"},
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
    adv_n, comparison = call_explained(grpo, reward_n, group_n, ddof=ddof, eps=eps, min_stratum=min_stratum)
    diff_n = moments(reward_n, group_index(group_n)).mean_n() - anchor
    leaning_n = (-adv_n.sign() * diff_n).exp()  # NaN where the group has no rate of success
    comparison = comparison.rescaled(divisor=torch.where(adv_n == 0, 1.0, 1 / (lambda_scale * leaning_n))[:, None])
    adv_n = (adv_n * lambda_scale * leaning_n).nan_to_num(nan=0.0)
    return Explained(adv_n, comparison.fitting(adv_n[:, None]))
