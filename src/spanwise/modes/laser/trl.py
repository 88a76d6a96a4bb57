"""A self-rewarding score in TRL: one more position in the forward passes that TRL makes, and one more term in its loss."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch
from spanwise.credit.spread import completed
from spanwise.errors import DataError, RecipeError
from spanwise.modes.laser.config import FILE, Laser
from spanwise.modes.laser.logps import end_logp, ended, measured, reserved_id
from spanwise.modes.laser.mixing import self_reward
from spanwise.modes.laser.overheard import Overheard
from spanwise.modes.laser.verification import class_weights, verification_loss
from spanwise.modes.parts import TrlPart
from spanwise.modes.sequences import sampled_end, sequences
from spanwise.pipeline import Reading


class SelfRewarding(TrlPart):
    """The reserved token of a run, its reference, and what one batch says by it.

    Scores come from the pass that TRL makes over the old policy, or else from what was overheard while it generated. What neither
    knows is NaN: the training's own pass fills it in, unless it is needed now.

    Attributes:
        mode: with its reference, once that is known.
        measured: what `laser.json` holds; None before the first batch.
        logp_b: of the reserved token in the last forward pass, NaN where a row did not end; with the policy's gradient.
        passes: the same of the passes since the last generation, without it.
        overheard: what was heard while completions were generated.
    """

    def __init__(self, laser: Laser, trainer: Any) -> None:
        super().__init__(laser, trainer)
        self.temperature, self.tokenizer = trainer.temperature, trainer._text_tokenizer
        self.ends = list(getattr(trainer, "eos_token_ids", None) or [self.tokenizer.eos_token_id])
        size = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.shape[0]
        self.token = reserved_id(laser, self.tokenizer, size=size, ends=self.ends)
        self.measured: dict[str, Any] | None = None
        self.logp_b: Tensor | None = None
        self.passes: list[Tensor] = []
        self.overheard = Overheard(self.token, self.ends, temperature=self.temperature)
        self._written = False
        self._score_n: Tensor | None = None

    @property
    def _generation(self) -> int:
        """The number of the generation batch, from 0."""
        args = self.trainer.args
        per_batch = args.steps_per_generation * self.trainer.num_iterations
        return self.trainer.state.global_step * args.gradient_accumulation_steps // per_batch

    @property
    def _needed(self) -> bool:
        """Whether scores are needed before the training's own pass."""
        return self.measured is None or self.mode.mixes(self._generation)

    # ------------------------------------------------------------------ what TRL calls

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Listen to the steps of `generate`, where a score is needed before the training's own pass."""
        self.passes.clear()
        self.overheard.forget()
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        inside = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
        listening = self.trainer.model.training and self._needed
        with self.overheard.listening(inside) if listening else nullcontext():
            yield

    def forward(
        self,
        score: Callable[..., Any],
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The pass with the reserved token after each end, and its log-probability taken out of what comes back."""
        input_ids, attention_mask, column_b = self.extended(input_ids, attention_mask, logits_to_keep)
        for name in ("token_type_ids", "mm_token_type_ids"):
            if kwargs.get(name) is not None:
                kwargs[name] = pad(kwargs[name], (0, 1))
        logps, entropies, aux = score(model, input_ids, attention_mask, logits_to_keep + 1, *args, **kwargs)
        return self.taken(logps, column_b), None if entropies is None else without(entropies, column_b), aux

    def fill(
        self, batch: Batch, everyone: Reading, whole: Batch, here: slice, output: dict[str, Any]
    ) -> tuple[Batch, Batch]:
        """The scores of this process's completions, and those of all once they are mixed in."""
        if not self.trainer.model.training:
            return batch, whole
        written_n = ((output["completion_ids"] == self.token) & output["completion_mask"].bool()).any(dim=1)
        sentences = [self._check_unwritten(self.gather(written_n))]
        ended_n = sampled_end(batch, self.ends)
        logp_n = self._known_logps(ended_n, output)
        missing_n = ended_n & logp_n.isnan()
        if self._needed and bool(self.gather(missing_n).any()):
            logp_n = torch.where(missing_n, self._read_ends(batch, output, missing_n), logp_n)
        if self.measured is None:
            known_n = self.gather(logp_n)
            self.mode, self.measured, warning = measured(self.mode, self.token, known_n, temperature=self.temperature)
            sentences.append(warning)
        for sentence in filter(None, sentences if self.trainer.accelerator.is_main_process else []):
            warnings.warn(f"Step {self.trainer.state.global_step}: {sentence}", UserWarning, stacklevel=2)
        score_n = self._score_n = self._scores(logp_n)
        if self._generation >= self.mode.first_loss:
            self._lay_out_lesson(everyone, self.gather(ended_n).bool(), here, output)
        mixed = replace(whole, score_n=self.gather(score_n)) if self.mode.mixes(self._generation) else whole
        return replace(batch, score_n=score_n), mixed

    def _lay_out_lesson(self, everyone: Reading, ended_n: Tensor, here: slice, output: dict[str, Any]) -> None:
        """Verdict and weight of each completion, so that the loss is the mean over rows of weight times squared error."""
        scheme, device = self.trainer.scheme, output["completion_ids"].device
        verdict_n = completed(everyone.scores, scheme.objectives)[:, scheme.names.index(self.mode.verdict)]
        known_n = torch.where(ended_n, verdict_n, torch.nan)  # what did not end, or has no verdict, has the weight 0
        scale = len(known_n) / max(int((~known_n.isnan()).sum()), 1)
        weight_n = class_weights(known_n, balanced=self.mode.balanced) * scale
        output["laser_verdict"] = known_n.nan_to_num(nan=0.0)[here].float().to(device)
        output["laser_weight"] = weight_n[here].float().to(device)
        output["laser_row"] = torch.arange(len(output["laser_weight"]), device=device)

    def loss(self, inputs: Mapping[str, Any]) -> tuple[Tensor | float, dict[str, float]]:
        """The part of a micro-batch in the loss of the score, 0 where it has none; it fills in the scores not known yet.

        Its mean over micro-batches of one size is the `verification_loss` of the batch.
        """
        if "laser_weight" not in inputs:
            return 0.0, {}
        assert self.logp_b is not None, "a forward pass came before"
        weight_b, score_b = inputs["laser_weight"], self._scores(self.logp_b)
        known_b = torch.where(weight_b > 0, inputs["laser_verdict"], torch.nan)
        loss = verification_loss(score_b, known_b, weight_n=weight_b, count=float(len(weight_b)))
        seen_b, sums = score_b.detach(), []
        for verdict in (1, 0):
            of_class_b = known_b == verdict
            sums += [torch.where(of_class_b, seen_b, 0.0).sum(), of_class_b.sum().to(seen_b.dtype)]
        right, rights, wrong, wrongs = self.trainer.accelerator.reduce(torch.stack(sums), reduction="sum")
        if self._score_n is not None:
            row_b, own_b = inputs["laser_row"].cpu(), self._scores(self.passes[-1]).to(self._score_n)
            self._score_n[row_b] = torch.where(self._score_n[row_b].isnan(), own_b, self._score_n[row_b])
        means = {"score_right": right / rights, "score_wrong": wrong / wrongs, "loss": loss.detach()}
        return self.mode.alpha * loss, {f"laser/{name}": float(value) for name, value in means.items()}

    # ------------------------------------------------------------------ scores of a generation batch

    def _known_logps(self, ended_n: Tensor, output: dict[str, Any]) -> Tensor:
        """What passes over the policy that sampled have read already."""
        if "old_per_token_logps" in output:
            return self.passes[0].cpu()  # TRL scores the policy before the reference
        return self.passes[-1].cpu() if "logp_nt" in self.trainer.scheme.needs else self.heard(ended_n)

    def _read_ends(self, batch: Batch, output: dict[str, Any], wanted_n: Tensor) -> Tensor:
        """Log-probabilities of the reserved token after completions that no pass has read; as many rows in every process."""
        rows = sequences(output, batch)
        count = int(self.gather(wanted_n.sum()[None]).max())
        row_r = wanted_n.to(torch.uint8).argsort(descending=True, stable=True)[:count]
        some = rows.take(row_r.to(rows.ids_nl.device))
        whole = [ids[mask.bool()].tolist() for ids, mask in zip(some.ids_nl, some.attention_nl, strict=True)]
        size, pad_id = self.trainer.args.per_device_train_batch_size, int(self.tokenizer.pad_token_id)
        logp_n = torch.full((len(wanted_n),), torch.nan)
        with self.trainer.accelerator.autocast():
            how = {"pad": pad_id, "temperature": self.temperature, "batch_size": size}
            logp_n[row_r] = end_logp(self.trainer.model, whole, self.token, **how)
        return logp_n

    # ------------------------------------------------------------------ the forward pass

    def extended(
        self, ids_bl: Int[Tensor, "b l"], attention_bl: Int[Tensor, "b l"], keep: int
    ) -> tuple[Int[Tensor, "b m"], Int[Tensor, "b m"], Int[Tensor, " b"]]:
        """The rows with the reserved token after the end of each completion, one column wider."""
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

    def _check_unwritten(self, written_n: Tensor) -> str | None:
        """What to say, once, where completions hold the reserved token itself."""
        count = int(written_n.sum())
        if not count or self._written:
            return None
        sentence = (
            f"laser.token '{self.mode.token}' (id {self.token}) was sampled in {count} of {len(written_n)} completions"
        )
        if self.measured is None:
            raise RecipeError(f"{sentence} of the first batch; name one that the policy never writes.")
        self._written = True
        return f"{sentence}: its score leaks into what the policy writes. Set beta or alpha down, or name another token."

    def _scores(self, logp_n: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """r_s of completions, NaN where they did not end."""
        return self_reward(logp_n, beta=self.mode.beta, reference=self.mode.reference)

    # ------------------------------------------------------------------ checkpoints

    @property
    def files(self) -> dict[str, str]:
        """The reference, once it is measured."""
        return {} if self.measured is None else {FILE: json.dumps(self.measured, indent=1) + "\n"}

    def restore(self, folder: Path) -> None:
        """Go on with the reference of a checkpoint."""
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
        self.mode, self.measured = replace(self.mode, reference=reference), held


def without(value_bt: Float[Tensor, "b t"], column_b: Int[Tensor, " b"]) -> Float[Tensor, "b u"]:
    """What a pass gives for the completions' own tokens: without the last column, and 0 where the reserved token stood.

    >>> without(torch.tensor([[-1., -2., -9.], [-1., -9., 0.]]), torch.tensor([2, 1]))
    tensor([[-1., -2.],
            [-1.,  0.]])
    """
    here_bt = torch.arange(value_bt.shape[1], device=value_bt.device) == column_b[:, None]
    return value_bt.masked_fill(here_bt, 0.0)[:, :-1]
