"""`Brevity`: a mode as small as one can be. Short completions earn more, and the loss pulls towards an end that comes soon."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from spanwise.errors import RecipeError, check_number
from spanwise.mode import Mode


@dataclass(frozen=True)
class Brevity(Mode):
    """A = A + bonus (mean tokens of the group - own tokens) in every block; loss + pull mean of -log pi(last token)."""

    name: ClassVar[str] = "brevity"
    parts: ClassVar[dict[str, str]] = {"trl": "modes.toy.trl:BrevityInTrl"}

    bonus: float = 0.01
    pull: float = 0.0

    def __post_init__(self):
        check_number("brevity.bonus", self.bonus, least=0.0)
        check_number("brevity.pull", self.pull, least=0.0)

    def check_scheme(self, scheme):
        if scheme.entry.kind == "token":
            raise RecipeError("brevity pays blocks, and this method pays tokens; leave it out.")

    def credit(self, credit, reading, batch, scheme):
        length_n = reading.length_nk.sum(dim=1).double()
        mean_n = torch.stack([length_n[batch.group_n == group].mean() for group in batch.group_n])
        more_nk = self.bonus * (mean_n - length_n)[:, None] * reading.present_nk
        return replace(credit, block_nk=credit.block_nk + more_nk)
