"""`Refinement`: token advantages in, token advantages out, after a method has credited blocks, completions or tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.credit.assign import call, completed
from spanwise.credit.registry import METHODS, Method, method
from spanwise.credit.strata import group_index
from spanwise.errors import RecipeError, unknown
from spanwise.objective import Objective
from spanwise.types import Credit, Scores


@dataclass(frozen=True)
class Refinement:
    """How the advantages of tokens are refined once a method has credited them.

    Attributes:
        method: name of a method of kind "refinement", such as `ktae` or `oar`.
        options: of it, those that differ from its defaults (`spanwise methods NAME` lists them).
        correct: the objective whose reward says whether a completion is right (above 0), for a method that asks; None: the first.

    Raises:
        RecipeError: there is no such refinement, or it asks for no `correct`.

    Example:
        >>> Refinement("ktae").entry.kind
        'refinement'
        >>> Refinement("grpo")
        Traceback (most recent call last):
        spanwise.errors.RecipeError: refine: 'grpo' credits completions and refines nothing; use ktae or oar.
    """

    method: str
    options: Mapping[str, Any] = field(default_factory=dict)
    correct: str | None = None

    def __post_init__(self) -> None:
        if self.entry.kind != "refinement":
            others = " or ".join(sorted(name for name, known in METHODS.items() if known.kind == "refinement"))
            raise RecipeError(f"refine: '{self.method}' credits {self.entry.kind}s and refines nothing; use {others}.")
        if not isinstance(self.options, Mapping):
            raise RecipeError(f"refine: the options are {self.options!r}; write them by name, such as {{form: code}}.")
        if self.correct is not None and "correct_n" not in self.entry.inputs:
            raise RecipeError(
                f"refine: correct is '{self.correct}', but '{self.method}' does not ask what is right, so it would change nothing. "
                f"Leave it out."
            )

    @property
    def entry(self) -> Method:
        """The registered method."""
        return method(self.method)

    @staticmethod
    def of(written: Any) -> Refinement:
        """What a recipe's `refine:` says: a name, or a mapping with the fields of `Refinement`.

        Raises:
            RecipeError: an unknown field, with a suggestion, or no method.

        Example:
            >>> Refinement.of("oar") == Refinement.of({"method": "oar"}) == Refinement("oar")
            True
        """
        if isinstance(written, Refinement):
            return written
        given: Any = {"method": written} if isinstance(written, str) else written
        known = [each.name for each in fields(Refinement)]
        if not isinstance(given, Mapping) or "method" not in given:
            raise RecipeError(
                f"refine is {written!r}; write refine: ktae, or refine: {{method: ktae, options: {{form: code}}}}."
            )
        for name in given:
            if name not in known:
                raise RecipeError(unknown("field of refine", str(name), known))
        options: dict[str, Any] = dict(given)
        return Refinement(**options)

    def plain(self) -> dict[str, Any]:
        """The refinement as plain data, ready for YAML."""
        said = {"method": self.method, "options": dict(self.options), "correct": self.correct}
        return {name: value for name, value in said.items() if value}


def refined(
    credit: Credit,
    refinement: Refinement,
    scores: Scores,
    group_n: Int[Tensor, " n"],
    *,
    objectives: Sequence[Objective],
    inputs: Mapping[str, Any],
) -> Credit:
    r"""The credit with what a refinement adds to the advantage of each token.

    Equation
        A[i, t] = the credit of t's block, or of t itself under a method per token, before it is shared over tokens
        refined[i, t] = refinement(A, ...)[i, t] - A[i, t];   the decision to stop keeps its own credit

    Args:
        credit: of a method, whole groups.
        refinement: what refines it.
        scores: of the same completions.
        group_n: prompt ids.
        objectives: of the scores.
        inputs: `block_nt`, and what the refinement asks for: `ids_nt`, `logp_nt`. The importance of a token (`importance_nt`) is
            its surprise, -logp.

    Raises:
        RecipeError: an input that is not there.

    Example:
        >>> scores = Scores(("correct",), torch.tensor([[1.], [0.]]).double(), torch.zeros(2, 1).to(torch.int8),
        ...                 torch.full((2, 1, 2), torch.nan))
        >>> nothing_n, none_m = torch.zeros(2).double(), torch.zeros(1).long()
        >>> credit = Credit(torch.tensor([[1.], [-1.]]).double(), nothing_n, none_m, none_m)
        >>> inputs = {"block_nt": torch.zeros(2, 2).long(), "ids_nt": torch.tensor([[7, 8], [7, 9]])}
        >>> refined(credit, Refinement("ktae"), scores, torch.tensor([0, 0]), objectives=[Objective("correct", pays="all")],
        ...         inputs=inputs).refined_nt
        tensor([[ 0.0000,  0.5000],
                [ 0.0000, -0.5000]], dtype=torch.float64)
    """
    if inputs.get("block_nt") is None:
        raise RecipeError("refine changes the advantage of each token, and where blocks lie is not known; give spans.")
    mask_nt = inputs["block_nt"] >= 0
    if credit.token_nt is None:
        adv_nt = credit.block_nk.gather(1, inputs["block_nt"].long().clamp(min=0))
    else:
        adv_nt = credit.token_nt.double()
    adv_nt = torch.where(mask_nt, adv_nt, 0.0)
    names = [objective.name for objective in objectives]
    right = 0 if refinement.correct is None else names.index(refinement.correct)
    data = {**inputs, "adv_nt": adv_nt, "mask_nt": mask_nt, "correct_n": completed(scores, objectives)[:, right]}
    if inputs.get("logp_nt") is not None:
        data["importance_nt"] = (-inputs["logp_nt"]).clamp(min=0.0)
    new_nt = call(refinement.entry, group_index(group_n), data, refinement.options)
    return replace(credit, refined_nt=new_nt - adv_nt)
