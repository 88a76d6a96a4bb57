"""`Refinement`: token advantages in, token advantages out, after a method has credited blocks, completions or tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.credit.assign import call, completed
from spanwise.credit.registry import METHODS, Method, method
from spanwise.credit.strata import group_index
from spanwise.errors import RecipeError, check_known, unknown
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

    name: ClassVar[str] = "refine"
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
        if not isinstance(given, Mapping) or "method" not in given:
            raise RecipeError(
                f"refine is {written!r}; write refine: ktae, or refine: {{method: ktae, options: {{form: code}}}}."
            )
        for name in given:
            check_known("field of refine", name, [each.name for each in fields(Refinement)])
        return Refinement(**given)

    def check_scheme(self, scheme: Any) -> None:
        """Refuse a scheme whose rows are no completions, an objective that is not there, and options that would do nothing."""
        if scheme.entry.kind == "step" or any(objective.scope == "turn" for objective in scheme.objectives):
            raise RecipeError(
                f"refine changes the tokens of whole completions, and method '{scheme.method}' credits turns here. Leave refine "
                f"out, or use a method that credits whole rollouts, such as 'grpo'."
            )
        if self.correct is not None and self.correct not in scheme.names:
            raise RecipeError(f"refine.correct: {unknown('objective', self.correct, scheme.names)}")
        self.entry.check_options(self.options)

    def check_provided(self, provided: Collection[str]) -> None:
        """Refuse batches without what the method reads."""
        if lacking := self.entry.lacking(provided):
            raise RecipeError(f"refine: '{self.method}' needs {lacking}, which is not there. Leave refine out.")

    def credit(self, credit: Credit, reading: Any, batch: Any, scheme: Any) -> Credit:
        """The credit of method and modes with what this adds to each token, see `refined`; as `Mode.credit`."""
        if batch.steps is not None:
            raise RecipeError(
                "refine changes the tokens of whole completions, and these rows are turns; leave refine out, or give whole "
                "completions."
            )
        inputs = {"ids_nt": batch.ids_nt, "logp_nt": batch.logp_nt}
        block_nt = None if reading.spans is None else reading.spans.block_nt
        return refined(credit, self, reading.scores, batch.group_n, block_nt, objectives=scheme.objectives, inputs=inputs)

    def plain(self) -> dict[str, Any]:
        """The refinement as plain data, ready for YAML."""
        said = {"method": self.method, "options": dict(self.options), "correct": self.correct}
        return {name: value for name, value in said.items() if value}


def refined(
    credit: Credit,
    refinement: Refinement,
    scores: Scores,
    group_n: Int[Tensor, " n"],
    block_nt: Int[Tensor, "n t"] | None,
    *,
    objectives: Sequence[Objective],
    inputs: Mapping[str, Any],
) -> Credit:
    r"""The credit with what a refinement adds to the advantage of each token; the decision to stop keeps its own credit.

    Equation
        A[i, t] = the credit of t's block, or of t itself under a method per token, before it is shared over tokens
        refined[i, t] = refinement(A, ...)[i, t] - A[i, t]

    `inputs` are what the refinement asks for: `ids_nt`, `logp_nt`. A token's importance (`importance_nt`) is its surprise, -logp.

    >>> scores = Scores(("correct",), torch.tensor([[1.], [0.]]).double(), torch.zeros(2, 1).to(torch.int8),
    ...                 torch.full((2, 1, 2), torch.nan))
    >>> nothing_n, none_m = torch.zeros(2).double(), torch.zeros(1).long()
    >>> credit = Credit(torch.tensor([[1.], [-1.]]).double(), nothing_n, none_m, none_m)
    >>> refined(credit, Refinement("ktae"), scores, torch.tensor([0, 0]), torch.zeros(2, 2).long(),
    ...         objectives=[Objective("correct", pays="all")], inputs={"ids_nt": torch.tensor([[7, 8], [7, 9]])}).refined_nt
    tensor([[ 0.0000,  0.5000],
            [ 0.0000, -0.5000]], dtype=torch.float64)
    """
    if block_nt is None:
        raise RecipeError("refine changes the advantage of each token, and where blocks lie is not known; give spans.")
    mask_nt = block_nt >= 0
    of_blocks_nt = credit.block_nk.gather(1, block_nt.long().clamp(min=0))
    adv_nt = of_blocks_nt if credit.token_nt is None else credit.token_nt.double()
    adv_nt = torch.where(mask_nt, adv_nt, 0.0)
    names = [objective.name for objective in objectives]
    right = 0 if refinement.correct is None else names.index(refinement.correct)
    data = {**inputs, "adv_nt": adv_nt, "mask_nt": mask_nt, "correct_n": completed(scores, objectives)[:, right]}
    if inputs.get("logp_nt") is not None:
        data["importance_nt"] = (-inputs["logp_nt"]).clamp(min=0.0)
    new_nt = call(refinement.entry, group_index(group_n), data, refinement.options)
    return replace(credit, refined_nt=new_nt - adv_nt)
