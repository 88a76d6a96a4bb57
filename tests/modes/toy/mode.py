"""`Brevity`: a mode as small as one can be. Short completions earn more, and the loss pulls towards an end that comes soon."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from spanwise.errors import RecipeError
from spanwise.metric import Alarm, Metric
from spanwise.mode import Chart, Mode, Page, setting


@dataclass(frozen=True)
class Brevity(Mode):
    """A = A + bonus (mean tokens of the group - own tokens) in every block; loss + pull mean of -log pi(last token)."""

    about: ClassVar[str] = "pays short completions, fields of `Brevity`: bonus, pull"
    parts: ClassVar[dict[str, str]] = {"trl": "modes.toy.trl:BrevityInTrl"}
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "brevity/sure",
            lasting=Alarm("above", 0.9, "{share} of the ends are foregone conclusions.", "Usually bonus is large."),
        ),
    )
    page: ClassVar[Page] = Page(
        "Brevity", "How sure it is of its ends.", "Does it end soon?", (Chart("Ends", {"sure": "sure"}, "share", "Of all ends."),),
        headline=("sure", "sure of its ends", "too sure"),
    )  # fmt: skip

    bonus: float = setting(0.01, least=0.0)
    pull: float = setting(0.0, least=0.0)

    def check_scheme(self, scheme):
        if scheme.entry.kind == "token":
            raise RecipeError("brevity pays blocks, and this method pays tokens; leave it out.")

    def credit(self, credit, reading, batch, scheme):
        more_nk = self.bonus * self.shorter(batch)[:, None] * reading.present_nk
        return replace(credit, block_nk=credit.block_nk + more_nk)

    def columns(self, batch):
        return {"shorter": self.shorter(batch)}

    def shorter(self, batch):
        """How many tokens each completion is shorter than the mean of its group."""
        length_n = batch.mask_nt.sum(dim=1).double()
        return torch.stack([length_n[batch.group_n == group].mean() for group in batch.group_n]) - length_n
