"""A self-rewarding score in TRL: one more position in the forward passes that TRL makes, and one more term in its loss."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from spanwise.credit import self_reward
from spanwise.engines.self_reward import ended, measured, reserved_id
from spanwise.engines.trl.overheard import Overheard
from spanwise.errors import DataError, RecipeError
from spanwise.laser import Laser
from spanwise.losses import class_weights, verification_loss

#: What a checkpoint keeps of it.
FILE = "laser.json"


class SelfRewarding:
    """The reserved token of a run, its reference, and what one batch says by it.

    Args:
        laser: how the score is read, trained and mixed.
        tokenizer, size: of the policy, and the rows of its embedding.
        ends: the ids that end a completion.
        temperature: of sampling.

    Attributes:
        laser: with its reference, once that is known.
        measured: what `laser.json` holds; None before the first batch.
        logp_b: of the reserved token in the last forward pass, NaN where a row did not end; with the policy's gradient.
        passes: the same of the passes since the last generation, without it.
        overheard: what was heard while completions were generated.

    Raises:
        RecipeError: the token cannot be used; see `reserved_id`.
    """

    def __init__(self, laser: Laser, tokenizer: Any, *, size: int, ends: Collection[int], temperature: float) -> None:
        self.laser, self.ends, self.temperature = laser, list(ends), temperature
        self.token = reserved_id(laser, tokenizer, size=size, ends=ends)
        self.measured: dict[str, Any] | None = None
        self.logp_b: Tensor | None = None
        self._written = False
        self.passes: list[Tensor] = []
        self.overheard = Overheard(self.token, self.ends, temperature=temperature)

    # ------------------------------------------------------------------ the forward pass

    def extended(
        self, ids_bl: Int[Tensor, "b l"], attention_bl: Int[Tensor, "b l"], keep: int
    ) -> tuple[Int[Tensor, "b m"], Int[Tensor, "b m"], Int[Tensor, " b"]]:
        """The rows with the reserved token after the end of each completion, one column wider.

        Args:
            ids_bl, attention_bl: prompts, padded on the left, and completions, padded on the right.
            keep: columns of the completions.

        Returns:
            ids, mask, and the column of the token among the completions'; -1 for a row that did not end.
        """
        there_bt = attention_bl[:, -keep:].bool()
        ended_b = ended(ids_bl[:, -keep:], there_bt, self.ends)
        last_b = there_bt.long().cumsum(dim=1).argmax(dim=1)
        column_b = torch.where(ended_b, last_b + 1, -1)
        ids_bm, mask_bm = pad(ids_bl, (0, 1)), pad(attention_bl, (0, 1))
        row_r = ended_b.nonzero()[:, 0]
        at_r = column_b[row_r] + ids_bl.shape[1] - keep
        ids_bm[row_r, at_r], mask_bm[row_r, at_r] = self.token, 1
        return ids_bm, mask_bm, column_b

    def taken(self, logps_bt: Float[Tensor, "b t"], column_b: Int[Tensor, " b"]) -> Float[Tensor, "b u"]:
        """The log-probabilities of the completions' own tokens; that of the reserved one is kept in `logp_b`."""
        at_b1 = column_b.clamp(min=0)[:, None]
        own_b = self.temperature * logps_bt.gather(1, at_b1)[:, 0]
        self.logp_b = torch.where(column_b >= 0, own_b, torch.nan)
        self.passes.append(self.logp_b.detach().float())
        return without(logps_bt, column_b)

    def heard(self, ended_n: Tensor) -> Float[Tensor, " n"]:
        """What was overheard of completions that ended; NaN for all where they came of several calls, or of another generator."""
        heard_n = self.overheard.logp_n
        if heard_n is None or self.overheard.calls != 1 or len(heard_n) != len(ended_n):
            return torch.full((len(ended_n),), torch.nan)
        return torch.where(ended_n, heard_n, torch.nan)

    # ------------------------------------------------------------------ the reference

    def measure(self, logp_n: Float[Tensor, " n"]) -> str | None:
        """Take the reference from the first batch of the starting policy, or hold the given one against it.

        Args:
            logp_n: of all completions of all processes.

        Returns:
            A warning, if there is something to say.

        Raises:
            DataError: none of the completions ended.
            RecipeError: the reference is of another model, or too near to 0 for the score to reach 1.
        """
        self.laser, self.measured, warning = measured(self.laser, self.token, logp_n, temperature=self.temperature)
        return warning

    def check_unwritten(self, written_n: Tensor) -> str | None:
        """What to say, once, where completions hold the reserved token itself.

        Raises:
            RecipeError: in the first batch already.
        """
        held = int(written_n.sum())
        if not held or self._written:
            return None
        said = f"laser.token '{self.laser.token}' (id {self.token}) was sampled in {held} of {len(written_n)} completions"
        if self.measured is None:
            raise RecipeError(f"{said} of the first batch; name one that the policy never writes.")
        self._written = True
        return f"{said}: its score leaks into what the policy writes. Set beta or alpha down, or name another token."

    # ------------------------------------------------------------------ loss

    def targets(self, verdict_n: Float[Tensor, " n"], ended_n: Tensor) -> tuple[Tensor, Tensor]:
        """Verdict and weight of each completion, so that the loss is the mean over rows of weight times squared error.

        A completion that did not end, or has no verdict, has the weight 0.
        """
        known_n = torch.where(ended_n, verdict_n, torch.nan)
        count = int((~known_n.isnan()).sum())
        return known_n.nan_to_num(nan=0.0), class_weights(known_n, balanced=self.laser.balanced) * (
            len(known_n) / max(count, 1)
        )

    def loss(
        self, verdict_b: Float[Tensor, " b"], weight_b: Float[Tensor, " b"]
    ) -> tuple[Float[Tensor, ""], list[list[Tensor]]]:
        """This micro-batch's part of `verification_loss`: its mean over micro-batches of one size is the loss of the batch.

        Returns:
            The loss, and for right and for wrong completions the sum of their scores and their number.
        """
        assert self.logp_b is not None, "a forward pass came before"
        score_b = self.scores(self.logp_b)
        known_b = torch.where(weight_b > 0, verdict_b, torch.nan)
        loss = verification_loss(score_b, known_b, weight_n=weight_b, count=float(len(weight_b)))
        seen_b = score_b.detach()
        classes = [known_b == verdict for verdict in (1, 0)]
        said = [[torch.where(held_b, seen_b, 0.0).sum(), held_b.sum().to(seen_b.dtype)] for held_b in classes]
        return loss, said

    def scores(self, logp_n: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """r_s of completions, NaN where they did not end."""
        assert self.laser.reference is not None, "it was measured on the first batch"
        return self_reward(logp_n, beta=self.laser.beta, reference=self.laser.reference)

    # ------------------------------------------------------------------ checkpoints

    def save(self, folder: Path) -> None:
        """Keep the reference in a checkpoint."""
        (folder / FILE).write_text(json.dumps(self.measured, indent=1), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Go on with the reference of a checkpoint.

        Raises:
            DataError: it holds none, or one of another token.
        """
        try:
            held = json.loads((folder / FILE).read_text(encoding="utf-8"))
            token, reference = held["id"], float(held["reference"])
        except (OSError, ValueError, KeyError, TypeError):
            raise DataError(
                f"'{folder}' holds no reference of laser ({FILE}); it was trained without, so start anew."
            ) from None
        if token != self.token:
            raise DataError(
                f"'{folder}' was trained with the reserved token {token} and laser.token is {self.token}; use that one."
            )
        self.laser, self.measured = replace(self.laser, reference=reference), held


def without(value_bt: Float[Tensor, "b t"], column_b: Int[Tensor, " b"]) -> Float[Tensor, "b u"]:
    """What a pass gives for the completions' own tokens: without the last column, and 0 where the reserved token stood.

    >>> without(torch.tensor([[-1., -2., -9.], [-1., -9., 0.]]), torch.tensor([2, 1]))
    tensor([[-1., -2.],
            [-1.,  0.]])
    """
    here_bt = torch.arange(value_bt.shape[1], device=value_bt.device) == column_b[:, None]
    return value_bt.masked_fill(here_bt, 0.0)[:, :-1]
