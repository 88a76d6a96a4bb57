"""`Refinement`: a method, such as KTAE, that changes the token advantages of another method."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch

from spanwise.credit.assign import call
from spanwise.credit.registry import METHODS, Method, method
from spanwise.credit.spread import fill_missing
from spanwise.credit.strata import group_index
from spanwise.errors import RecipeError, check_known, unknown
from spanwise.types import Credit


@dataclass(frozen=True)
class Refinement:
    """A method, such as KTAE, that changes another method's token advantages."""

    name: ClassVar[str] = "refine"
    method: str  # The name of the method that changes the advantages, such as `ktae`.
    options: Mapping[str, Any] = field(default_factory=dict)  # The method's options that differ from its defaults.
    correct: str | None = None  # The objective whose reward is above 0 for right completions; None is the first objective.

    def __post_init__(self) -> None:
        if self.entry.kind != "refinement":
            known_text = " or ".join(sorted(name for name, entry in METHODS.items() if entry.kind == "refinement"))
            raise RecipeError(f"refine: '{self.method}' credits {self.entry.kind}s and refines no method; use {known_text}.")
        if not isinstance(self.options, Mapping):
            raise RecipeError(f"refine.options is {self.options!r}; write each option by name, such as {{form: code}}.")
        if self.correct is not None and "correct_n" not in self.entry.inputs:
            raise RecipeError(
                f"refine: correct is '{self.correct}', but method '{self.method}' does not ask which completions are correct. "
                f"Leave correct out."
            )

    @property
    def entry(self) -> Method:
        """The registered method that changes the advantages, such as `ktae`."""
        return method(self.method)

    @staticmethod
    def of(written: Any) -> Refinement:
        """Build a `Refinement` from a recipe's entry `refine`, which names a method that changes token advantages."""
        if isinstance(written, Refinement):
            return written
        refinement_fields: Any = {"method": written} if isinstance(written, str) else written
        if not isinstance(refinement_fields, Mapping) or "method" not in refinement_fields:
            raise RecipeError(f"refine is {written!r}; write ktae, or {{method: ktae, options: {{form: code}}}}.")
        for name in refinement_fields:
            check_known("field of refine", name, [allowed_field.name for allowed_field in fields(Refinement)])
        return Refinement(**refinement_fields)

    def check_scheme(self, scheme: Any) -> None:
        """Refuse a scheme whose token advantages `refine` cannot change, such as one that credits single turns."""
        if scheme.entry.kind == "step" or any(objective.scope == "turn" for objective in scheme.objectives):
            raise RecipeError(
                f"refine needs the credit of whole rollouts, but method '{scheme.method}' credits single turns here. Leave refine "
                f"out, or use a method that credits whole rollouts, such as 'grpo'."
            )
        if self.correct is not None and self.correct not in scheme.names:
            raise RecipeError(f"refine.correct: {unknown('objective', self.correct, scheme.names)}")
        self.entry.check_options(self.options)

    def check_provided(self, provided: Collection[str]) -> None:
        """Refuse to run if the trainer's batches lack an input of the method."""
        if missing_inputs := self.entry.lacking(provided):
            raise RecipeError(f"refine: '{self.method}' needs {missing_inputs}, which these batches lack. Leave refine out.")

    def credit(self, credit: Credit, reading: Any, batch: Any, scheme: Any) -> Credit:
        """Let the refining method change each token's advantage. The credit of the decision to stop stays the same.

        Equation
            A[i, t] = the credit of t's block, or of t itself under a method per token, before it is shared over tokens
            refined[i, t] = refinement(A, ...)[i, t] - A[i, t]

        A token's importance (`importance_nt`) is its surprise, -logp.
        """
        if batch.steps is not None:
            raise RecipeError(
                "refine needs whole completions, but each row of this batch is a single turn. Leave refine out, or pass whole "
                "completions."
            )
        if reading.spans is None:
            raise RecipeError("refine needs each token's block, but `reading.spans` is None. Call `read` in this process.")
        block_nt = reading.spans.block_nt
        correctness_index = 0 if self.correct is None else scheme.names.index(self.correct)
        block_adv_nt = credit.block_nk.gather(1, block_nt.long().clamp(min=0))
        adv_nt = block_adv_nt if credit.token_nt is None else credit.token_nt.double()
        method_inputs = {
            "ids_nt": batch.ids_nt,
            "logp_nt": batch.logp_nt,
            "importance_nt": None if batch.logp_nt is None else (-batch.logp_nt).clamp(min=0.0),
            "adv_nt": torch.where(block_nt >= 0, adv_nt, 0.0),
            "mask_nt": block_nt >= 0,
            "correct_n": fill_missing(reading.scores, scheme.objectives)[:, correctness_index],
        }
        refined_adv_nt = call(self.entry, group_index(batch.group_n), method_inputs, self.options)
        return replace(credit, refined_nt=refined_adv_nt - method_inputs["adv_nt"])

    def plain(self) -> dict[str, Any]:
        """Return the recipe's entry `refine` as plain data, ready for YAML."""
        recipe_section = {"method": self.method, "options": dict(self.options), "correct": self.correct}
        return {name: value for name, value in recipe_section.items() if value}
