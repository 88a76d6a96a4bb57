"""The numbers of other frameworks: what each does at the corners where they differ from each other and from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.registry import method
from spanwise.credit.strata import EpsAt, group_index, moments, standardised, standardised_tokens

Framework = Literal["verl", "trl", "skyrl", "openrlhf"]


@dataclass(frozen=True)
class Whitening:
    """How a framework standardises over the batch.

    Attributes:
        ddof: of the variance.
        eps, eps_at: where epsilon stands, see `spanwise.credit.strata.standardised`.
        per: what counts once in the moments.
    """

    ddof: int
    eps: float
    eps_at: EpsAt
    per: Literal["token", "completion"] = "token"


@dataclass(frozen=True)
class Numbers:
    """What one framework does in one method.

    Attributes:
        name: what the framework calls the method.
        ddof, eps: of the group's standard deviation (maxrl: eps is added to the mean).
        singleton: the advantage of a group of one. raw: its reward; scaled: its reward / (1 + eps); nan: not a number.
        whitening: over the batch, after the group.
        masked: what the recursion does at a masked token. skip: carry on, dropping a reward there; reset: forget what comes
            after; gap: a step of reward 0 and value 0, at the cost of gamma and lambda; read: a token like any other.
    """

    name: str
    ddof: int | None = None
    eps: float | None = None
    singleton: Literal["zero", "raw", "scaled", "nan"] | None = None
    whitening: Whitening | None = None
    masked: Literal["skip", "reset", "gap", "read"] | None = None


_BESSEL = Whitening(ddof=1, eps=1e-8, eps_at="variance")
_FLOOR = Whitening(ddof=0, eps=1e-8, eps_at="floor")

#: framework -> method -> numbers, as read in verl 1dda039, TRL 1.16.0, SkyRL a956457 and OpenRLHF 3c3be62.
COMPAT: Mapping[str, Mapping[str, Numbers]] = {
    "verl": {
        "grpo": Numbers("grpo", ddof=1, eps=1e-6, singleton="scaled"),
        "dr_grpo": Numbers("grpo, norm_adv_by_std_in_grpo=False", singleton="raw"),
        "rloo": Numbers("rloo", singleton="raw"),
        "opo": Numbers("opo", singleton="raw"),
        "gdpo": Numbers("gdpo", ddof=1, eps=1e-6, singleton="scaled", whitening=_BESSEL),
        "reinforce++-baseline": Numbers("reinforce_plus_plus_baseline", singleton="raw", whitening=_BESSEL),
        "reinforce++": Numbers("reinforce_plus_plus", whitening=_BESSEL, masked="skip"),
        "gae": Numbers("gae", whitening=_BESSEL, masked="skip"),
    },
    "trl": {
        "grpo": Numbers("GRPOTrainer, scale_rewards=group", ddof=1, eps=1e-4, singleton="zero"),
        "dr_grpo": Numbers("GRPOTrainer, scale_rewards=none", singleton="zero"),
        "rloo": Numbers("RLOOTrainer", singleton="zero"),
        "gdpo": Numbers(
            "GRPOTrainer, normalize_then_sum",
            ddof=1,
            eps=1e-4,
            singleton="zero",
            whitening=Whitening(ddof=1, eps=1e-4, eps_at="std", per="completion"),
        ),
    },
    "skyrl": {
        "grpo": Numbers("grpo", ddof=1, eps=1e-6, singleton="scaled"),
        "dr_grpo": Numbers("grpo, grpo_norm_by_std=False", singleton="raw"),
        "rloo": Numbers("rloo", singleton="zero"),
        "maxrl": Numbers("maxrl", eps=1e-6, singleton="raw"),
        "reinforce++": Numbers("reinforce++", whitening=_BESSEL, masked="reset"),
        "gae": Numbers("gae", whitening=_BESSEL, masked="read"),
    },
    "openrlhf": {
        "grpo": Numbers("group_norm", ddof=1, eps=1e-9, singleton="nan"),
        "dr_grpo": Numbers("dr_grpo", singleton="zero"),
        "rloo": Numbers("rloo", singleton="nan"),
        "reinforce++-baseline": Numbers("reinforce_baseline", singleton="zero", whitening=_FLOOR),
        "reinforce++": Numbers("reinforce", whitening=_FLOOR, masked="gap"),
        "gae": Numbers("gae", whitening=_FLOOR, masked="gap"),
    },
}


def compatible(method_name: str, framework: Framework | str) -> Callable[..., Tensor]:
    """A method with a framework's ddof, epsilon, group of one, whitening and treatment of masked tokens, as loops for comparing."""
    numbers = COMPAT[framework][method_name]
    special = {"gdpo": _gdpo, "reinforce++-baseline": _reinforce_baseline, "reinforce++": _reinforce, "gae": _gae}
    return partial(special[method_name], numbers) if method_name in special else partial(_grouped, method_name, numbers)


def compat_table() -> str:
    """All of `COMPAT` as a Markdown table, one row per framework and method."""
    lines = [
        "| framework | method | its name there | ddof | eps | group of one | whitening over the batch | masked tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for framework, methods in COMPAT.items():
        for name, numbers in methods.items():
            white = numbers.whitening
            whitening = "" if white is None else f"per {white.per}, ddof {white.ddof}, {_formula(white)}"
            cells = [framework, name, numbers.name, numbers.ddof, numbers.eps, numbers.singleton, whitening, numbers.masked]
            lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _formula(white: Whitening) -> str:
    forms = {"std": "std + {eps}", "variance": "sqrt(var + {eps})", "floor": "sqrt(max(var, {eps}))"}
    return forms[white.eps_at].format(eps=f"{white.eps:g}")


def _grouped(
    name: str, numbers: Numbers, reward_n: Float[Tensor, " n"], group_n: Int[Tensor, " n"], **inputs: Any
) -> Float[Tensor, " n"]:
    known = method(name)
    inputs = {key: value for key, value in inputs.items() if key in known.inputs}
    settings = {key: value for key, value in (("ddof", numbers.ddof), ("eps", numbers.eps)) if value is not None}
    advantage_n = known.estimator(reward_n, group_n, **settings, **inputs)
    alone_n = ~reward_n.isnan() & (moments(reward_n, group_index(group_n)).count_n() == 1)
    raw_n = reward_n.double()
    lone = {"zero": torch.zeros_like(raw_n), "raw": raw_n, "nan": torch.full_like(raw_n, torch.nan)}
    lone["scaled"] = raw_n / (1 + (numbers.eps or 0.0))
    return torch.where(alone_n, lone[numbers.singleton or "zero"], advantage_n)


def _gdpo(
    numbers: Numbers,
    reward_nm: Float[Tensor, "n m"],
    group_n: Int[Tensor, " n"],
    *,
    weight_m: Float[Tensor, " m"] | None = None,
    length_n: Int[Tensor, " n"] | Float[Tensor, " n"] | None = None,
    **_: Any,
) -> Float[Tensor, " n"]:
    weight_m = torch.ones(reward_nm.shape[1]) if weight_m is None else weight_m
    columns = [_grouped("grpo", numbers, reward_nm[:, m], group_n) for m in range(reward_nm.shape[1])]
    summed_n = torch.stack(columns, dim=1) @ weight_m.double()
    return _whitened(numbers, torch.where(reward_nm.isnan().all(dim=1), torch.nan, summed_n), length_n)


def _reinforce_baseline(
    numbers: Numbers,
    reward_n: Float[Tensor, " n"],
    group_n: Int[Tensor, " n"],
    *,
    length_n: Int[Tensor, " n"] | Float[Tensor, " n"],
    **_: Any,
) -> Float[Tensor, " n"]:
    centred_n = _grouped("dr_grpo", numbers, reward_n, group_n)
    return _whitened(numbers, torch.where(reward_n.isnan(), torch.nan, centred_n), length_n)


def _whitened(numbers: Numbers, value_n: Tensor, length_n: Tensor | None) -> Tensor:
    white = numbers.whitening
    assert white is not None, "only methods that whiten come here"
    weight_n = length_n.double() if white.per == "token" and length_n is not None else None
    shift = white.per == "token"  # counted once each, credit relative to a group has mean 0 but for rounding errors
    return standardised(value_n, weight_n=weight_n, shift=shift, ddof=white.ddof, eps=white.eps, eps_at=white.eps_at)[0]


def _reinforce(
    numbers: Numbers,
    reward_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float = 1.0,
    whiten: bool = True,
) -> Float[Tensor, "n t"]:
    return _gae(numbers, reward_nt, torch.zeros_like(reward_nt), mask_nt, gamma=gamma, lam=1.0, whiten=whiten)


def _gae(
    numbers: Numbers,
    reward_nt: Float[Tensor, "n t"],
    value_nt: Float[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Float[Tensor, "n t"]:
    mask_nt = mask_nt & ~(reward_nt.isnan() & mask_nt).any(dim=1, keepdim=True)  # an absent reward takes no part
    advantage_nt = _recursion(reward_nt, value_nt, mask_nt, gamma, lam, numbers)
    white = numbers.whitening
    if not whiten or white is None:
        return advantage_nt
    return standardised_tokens(advantage_nt, mask_nt, ddof=white.ddof, eps=white.eps, eps_at=white.eps_at)


def _recursion(
    reward_nt: Tensor, value_nt: Tensor, mask_nt: Tensor, gamma: float, lam: float, numbers: Numbers
) -> Float[Tensor, "n t"]:
    """A[t] = r[t] + gamma V[t+1] - V[t] + gamma lam A[t+1] with the framework's own rule at masked tokens."""
    if numbers.masked == "gap":
        reward_nt, value_nt = (torch.where(mask_nt, x, 0.0) for x in (reward_nt, value_nt))
    next_value_n = torch.zeros_like(reward_nt[:, :1]).flatten()
    next_advantage_n = next_value_n
    advantage_nt = torch.zeros_like(reward_nt)
    for t in range(reward_nt.shape[1] - 1, -1, -1):
        step_n = reward_nt[:, t] + gamma * next_value_n - value_nt[:, t] + gamma * lam * next_advantage_n
        keep_n = mask_nt[:, t] if numbers.masked in ("skip", "reset") else torch.ones_like(mask_nt[:, t])
        before_n = next_advantage_n if numbers.masked == "skip" else torch.zeros_like(step_n)
        advantage_nt[:, t] = torch.where(mask_nt[:, t], step_n, 0.0)
        next_advantage_n = torch.where(keep_n, step_n, before_n)
        next_value_n = torch.where(keep_n, value_nt[:, t], next_value_n)
    return advantage_nt
