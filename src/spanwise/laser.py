"""`Laser`: a confidence without words, the probability of one reserved token after the end of an answer (LaSeR)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from spanwise.errors import RecipeError, check_number, unknown

_SCALES = ("std", "none")


@dataclass(frozen=True)
class Laser:
    """How a self-rewarding score is read, trained and mixed into the credit of a verdict, beside any method.

    Equation
        r_s = beta (log pi(token | prompt, completion, end) - reference)
        loss = ... + alpha * mean of w (r_s - r_v)^2, w balances right and wrong (`losses.verification_loss`)
        A = (1 - mix) A_v + mix z(clip(r_s, 0, 1)) in the blocks that the verdict pays (`credit.mixed_credit`)

    The score of a completion that did not end is absent: it has no loss and is not mixed in.

    Attributes:
        token: the reserved token, as the tokenizer writes it or as an id. It must be one that the policy never writes.
        verdict: the objective whose reward r_v is 1 for right and 0 for wrong.
        beta: how many nats a score is worth.
        reference: the mean of log pi(token | ...) under the starting policy; None: the mean over the first generation batch.
        alpha: the weight of the loss.
        mix: the share of the score in the credit, tau in the paper; 0: none.
        threshold: a group whose scores have a smaller standard deviation is not mixed.
        scale: what the scores of a group are divided by: "std", as in the paper, whose A_v is divided so too; "none" suits methods
            that do not divide (`bae`, `dr_grpo`, `rloo`), the score is then one more reward.
        balanced: right and wrong answers weigh the same in the loss, as in the paper: the score is then the probability of being
            right if half of the answers were. False: it is the probability itself (`losses.class_weights`).
        reasoning_warmup: generation batches without the loss.
        self_rewarding_warmup: further generation batches without the mixing.

    Raises:
        RecipeError: a value that cannot work, or one that would change nothing.

    Source: LaSeR, arXiv 2510.14943; the defaults are those of its code, the warm-ups those of a model that reasons already.

    Example:
        >>> round(Laser("<|vision_start|>", reference=-23.0).highest, 6)
        2.3
        >>> Laser("<unk>", reference=-4.2)
        Traceback (most recent call last):
        spanwise.errors.RecipeError: laser: with beta 0.1 and the reference -4.2 no score can exceed 0.42, ... beta to 0.24 or more.
    """

    token: str | int
    verdict: str = "correct"
    beta: float = 0.1
    reference: float | None = None
    alpha: float = 0.1
    mix: float = 0.1
    threshold: float = 0.1
    scale: str = "std"
    balanced: bool = True
    reasoning_warmup: int = 0
    self_rewarding_warmup: int = 200

    def __post_init__(self) -> None:
        if isinstance(self.token, bool) or not isinstance(self.token, str | int) or self.token == "":
            raise RecipeError(f"laser.token is {self.token!r}; name one token of the vocabulary, or its id.")
        check_number("laser.beta", self.beta, above=0.0)
        check_number("laser.alpha", self.alpha, above=0.0)
        check_number("laser.mix", self.mix, least=0.0)
        check_number("laser.threshold", self.threshold, least=0.0)
        if self.mix > 1:
            raise RecipeError(f"laser.mix is {self.mix}; it is a share, between 0 and 1.")
        if self.scale not in _SCALES:
            raise RecipeError(unknown("laser.scale", self.scale, _SCALES))
        if not isinstance(self.balanced, bool):
            raise RecipeError(f"laser.balanced is {self.balanced!r}; write true or false.")
        for name in ("reasoning_warmup", "self_rewarding_warmup"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise RecipeError(f"laser.{name} is {value!r}; it must be a whole number of generation batches.")
        if self.reference is not None:
            check_number("laser.reference", self.reference)
            self.check_reach(self.reference)

    @property
    def highest(self) -> float:
        """The score of a token of probability 1, given the reference.

        Raises:
            RecipeError: there is no reference yet.
        """
        if self.reference is None:
            raise RecipeError("laser: the reference is not known yet; it is measured on the first generation batch.")
        return -self.beta * self.reference

    def check_reach(self, reference: float) -> None:
        """Refuse a reference from which no answer could be called right: a log-probability is never above 0.

        Raises:
            RecipeError: the highest score there can be is below 1.
        """
        if -self.beta * reference < 1:
            needed = math.inf if reference >= 0 else math.ceil(-100 / reference) / 100
            mend = f"set beta to {needed:.2f} or more" if reference < 0 else "a log-probability is below 0"
            raise RecipeError(
                f"laser: with beta {self.beta:g} and the reference {reference:.3g} no score can exceed "
                f"{-self.beta * reference:.2g}, so no answer could be called right; {mend}."
            )

    @property
    def first_loss(self) -> int:
        """The generation batch, from 0, that is the first with the loss."""
        return self.reasoning_warmup

    @property
    def first_mix(self) -> int | None:
        """The generation batch, from 0, that is the first whose credit is mixed; None if none ever is."""
        return self.reasoning_warmup + self.self_rewarding_warmup if self.mix > 0 else None

    @staticmethod
    def of(written: Mapping[str, Any]) -> Laser:
        """The configuration that a recipe's `laser:` section says.

        Raises:
            RecipeError: an unknown field, with a suggestion, or no token; see `Laser`.

        Example:
            >>> Laser.of({"token": "<unk>", "tau": 0.2})
            Traceback (most recent call last):
            spanwise.errors.RecipeError: There is no field of laser 'tau'... mix...
        """
        known = [field.name for field in fields(Laser)]
        for name in written:
            if name not in known:
                raise RecipeError(unknown("field of laser", str(name), known))
        if "token" not in written:
            raise RecipeError("laser has no token; name one that the policy never writes, such as token: <|vision_start|>.")
        return Laser(**dict(written))
