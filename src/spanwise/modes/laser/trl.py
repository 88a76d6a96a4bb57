"""The mode laser in TRL's trainer: one more token per forward pass, one more term in the loss."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch
from spanwise.errors import DataError, RecipeError
from spanwise.modes.laser.config import FILE, Laser, read_measured, verdicts
from spanwise.modes.laser.logps import end_logp, ended, measured, reserved_id
from spanwise.modes.laser.score import class_weights, self_reward, verification_loss
from spanwise.modes.parts import TrlPart, token_logp
from spanwise.modes.sequences import image_inputs, sampled_end, sequences


class SelfRewarding(TrlPart):
    """Runs laser (LaSeR) in TRL's trainer: appends the reserved token and reads its log-probabilities."""

    def __init__(self, laser: Laser, trainer: Any) -> None:
        super().__init__(laser, trainer)
        self.temperature, self.tokenizer = trainer.temperature, trainer._text_tokenizer
        self.ends = list(getattr(trainer, "eos_token_ids", None) or [self.tokenizer.eos_token_id])
        vocabulary_size = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().weight.shape[0]
        self.token = reserved_id(laser, self.tokenizer, size=vocabulary_size, ends=self.ends)
        self.measured: dict[str, Any] | None = None  # The content of `laser.json`; None before the first batch.
        # The log-probabilities of `laser.token` from the first and the last forward pass after `generate`.
        self.passes: list[Tensor] = []
        # The log-probabilities of `laser.token` from each call of `generate`.
        self.heard: list[Tensor] = []
        self._written = False
        self._score_n: Tensor | None = None
        # Sum and count of the scores of right completions, then of wrong completions.
        self._class_sums, self._summed_rows = torch.zeros(4), 0

    @property
    def _generation(self) -> int:
        """The number of the current generation batch, from 0."""
        training_args = self.trainer.args
        steps_per_batch = training_args.steps_per_generation * self.trainer.num_iterations
        return self.trainer.state.global_step * training_args.gradient_accumulation_steps // steps_per_batch

    @property
    def _needed(self) -> bool:
        """True if the credit or `laser.reference` needs the policy's scores before the loss is computed."""
        return self.measured is None or self.mode.mixes(self._generation)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Record log-probabilities of laser's reserved token in `generate`, if scores are needed before the loss."""
        self.passes, self.heard = [], []
        policy_model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        # A PEFT adapter wraps the model, and the hook must be on the model itself.
        inner_model = policy_model.get_base_model() if hasattr(policy_model, "get_base_model") else policy_model
        records_scores = self.trainer.model.training and self._needed
        with inner_model.register_forward_hook(self.hear, with_kwargs=True) if records_scores else nullcontext():
            yield

    def hear(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record the reserved token's log-probability in a forward pass of `generate`."""
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        logits = getattr(output, "logits", None)
        if input_ids is None or logits is None:
            return
        if input_ids.shape[1] != 1 or not self.heard or len(input_ids) != len(self.heard[-1]):
            self.heard.append(torch.full((len(input_ids),), torch.nan))
            return
        is_end_n = torch.isin(input_ids[:, 0].cpu(), torch.tensor(self.ends))
        ended_row_r = (is_end_n & self.heard[-1].isnan()).nonzero()[:, 0]
        scaled_logits_rv = logits[ended_row_r.to(logits.device), -1].float() / self.temperature
        self.heard[-1][ended_row_r] = self.temperature * scaled_logits_rv.log_softmax(dim=-1)[:, self.token].cpu()

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
        """Run a forward pass with the reserved token after each row that was not cut off. Remove it from the result."""
        is_present_bt = attention_mask[:, -logits_to_keep:].bool()
        has_ended_b = ended(input_ids[:, -logits_to_keep:], is_present_bt, self.ends)
        last_token_index_b = is_present_bt.long().cumsum(dim=1).argmax(dim=1)
        end_column_b = torch.where(has_ended_b, last_token_index_b + 1, -1)
        is_end_token_bt = torch.arange(logits_to_keep + 1, device=input_ids.device) == end_column_b[:, None]
        ids_bl, mask_bl = pad(input_ids, (0, 1)), pad(attention_mask, (0, 1))
        ids_bl[:, -logits_to_keep - 1 :].masked_fill_(is_end_token_bt, self.token)
        mask_bl[:, -logits_to_keep - 1 :].masked_fill_(is_end_token_bt, 1)
        for name in ("token_type_ids", "mm_token_type_ids"):
            if kwargs.get(name) is not None:
                kwargs[name] = pad(kwargs[name], (0, 1))
        logps_bt, entropies_bt, auxiliary_loss = score(model, ids_bl, mask_bl, logits_to_keep + 1, *args, **kwargs)
        self.passes = [*self.passes[:1], self.temperature * token_logp(logps_bt, end_column_b)]
        logps_bt, entropies_bt = (
            None if x_bt is None else x_bt.masked_fill(is_end_token_bt, 0.0)[:, :-1] for x_bt in (logps_bt, entropies_bt)
        )
        return logps_bt, entropies_bt, auxiliary_loss

    def fill(self, read_batch: Any, output: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        """Add laser's scores to the batch. Add the weights and verdicts that laser's loss needs to TRL's output."""
        trainer, mode = self.trainer, self.mode
        batch, all_rows = read_batch.batch, read_batch.everyone
        if not trainer.model.training:
            return read_batch, {}
        if batch.steps is not None:
            mode.check_turns()
        is_reserved_nt = (output["completion_ids"] == self.token) & output["completion_mask"].bool()
        wrote_reserved_token_n = self.gather(is_reserved_nt.any(dim=1))
        new_warnings: list[str | None] = []
        if bool(wrote_reserved_token_n.any()) and not self._written:
            count_text = f"{int(wrote_reserved_token_n.sum())} of {len(wrote_reserved_token_n)} completions"
            token_text = f"laser.token '{mode.token}' (id {self.token})"
            if self.measured is None:
                raise RecipeError(
                    f"{token_text} was sampled in {count_text} of the first batch. Choose a laser.token that the policy never "
                    "writes."
                )
            self._written = True
            new_warnings.append(
                f"{token_text} was sampled in {count_text}. Laser's loss makes the policy write this token. Lower laser.beta or "
                "laser.alpha, or name another token."
            )
        has_ended_n = sampled_end(batch, self.ends)
        logp_n = self.known_logps(has_ended_n, output)
        is_logp_missing_n = has_ended_n & logp_n.isnan()
        if self._needed and bool(self.gather(is_logp_missing_n).any()):
            logp_n = torch.where(is_logp_missing_n, self._read_ends(batch, output, is_logp_missing_n), logp_n)
        if self.measured is None:
            self.mode, self.measured, warning = measured(mode, self.token, self.gather(logp_n), temperature=self.temperature)
            new_warnings.append(warning)
        for sentence in filter(None, new_warnings if trainer.accelerator.is_main_process else []):
            warnings.warn(f"Step {trainer.state.global_step}: {sentence}", UserWarning, stacklevel=2)
        score_n = self._score_n = self._scores(logp_n)
        self._class_sums, self._summed_rows = torch.zeros(4), 0
        if self._generation >= mode.reasoning_warmup:
            verdict_n = verdicts(mode, all_rows.reading, trainer.scheme)
            verdict_n = torch.where(self.gather(has_ended_n).bool(), verdict_n, torch.nan)
            weight_scale = len(verdict_n) / max(int((~verdict_n.isnan()).sum()), 1)
            weight_n = class_weights(verdict_n, balanced=mode.balanced) * weight_scale
            device = output["completion_ids"].device
            output["laser_verdict"] = verdict_n[read_batch.here].float().to(device)
            output["laser_weight"] = weight_n[read_batch.here].float().to(device)
            output["laser_row"] = torch.arange(len(has_ended_n), device=device)
        if mode.mixes(self._generation):
            all_rows = replace(all_rows, batch=replace(all_rows.batch, score_n=self.gather(score_n)))
        return replace(read_batch, batch=replace(batch, score_n=score_n), gathered=all_rows), {}

    def loss(self, inputs: Mapping[str, Any]) -> tuple[Tensor | float, dict[str, float]]:
        """Return laser's loss on a micro-batch. Fill in the scores of its rows that were still unknown."""
        if "laser_weight" not in inputs:
            return 0.0, {}
        verdict_b = inputs["laser_verdict"]
        score_b = self._scores(self.passes[-1])
        loss = verification_loss(score_b, verdict_b, weight_n=inputs["laser_weight"], count=float(len(verdict_b)))
        detached_score_b = score_b.detach()
        class_sums: list[Tensor] = []
        for verdict in (1, 0):
            is_of_class_b = verdict_b == verdict
            class_sums += [
                torch.where(is_of_class_b, detached_score_b, 0.0).sum(),
                is_of_class_b.sum().to(detached_score_b.dtype),
            ]
        self._class_sums = self._class_sums.to(score_b.device) + torch.stack(class_sums)
        self._summed_rows += len(verdict_b)
        metrics = {"laser/loss": float(self.trainer.accelerator.reduce(loss.detach(), reduction="mean"))}
        if self._score_n is not None:
            row_b = inputs["laser_row"].cpu()
            is_score_missing_b = self._score_n[row_b].isnan()
            self._score_n[row_b] = torch.where(is_score_missing_b, detached_score_b.to(self._score_n), self._score_n[row_b])
            if self._summed_rows == len(self._score_n):  # log after the last row, so that each row counts once
                global_class_sums: Any = self.trainer.accelerator.reduce(self._class_sums, reduction="sum")
                right_score_sum, right_count, wrong_score_sum, wrong_count = global_class_sums.tolist()
                metrics["laser/score_right"] = right_score_sum / right_count if right_count else math.nan
                metrics["laser/score_wrong"] = wrong_score_sum / wrong_count if wrong_count else math.nan
                self._class_sums, self._summed_rows = torch.zeros(4), 0
        return self.mode.alpha * loss, metrics

    def known_logps(self, ended_n: Tensor, output: dict[str, Any]) -> Tensor:
        """Return the log-probabilities of `laser.token` that forward passes recorded. Rows without one are NaN."""
        if "old_per_token_logps" in output:  # `passes[0]` computed the policy's `old_per_token_logps`
            return self.passes[0].detach().float().cpu()
        if "logp_nt" in self.trainer.scheme.needs:
            return self.passes[-1].detach().float().cpu()
        if len(self.heard) == 1 and len(self.heard[0]) == len(ended_n):  # one call of `generate` sampled the whole batch
            return torch.where(ended_n, self.heard[0], torch.nan)
        return torch.full((len(ended_n),), torch.nan)

    def _read_ends(self, batch: Batch, output: dict[str, Any], wanted_n: Tensor) -> Tensor:
        """Compute the reserved token's missing log-probabilities. All processes run equally many rows."""
        max_row_count = int(self.gather(wanted_n.sum()[None]).max())  # all processes call `gather`, even without images
        if "pixel_values" in output:
            return self._read_ends_with_images(output)
        sequence_rows = sequences(output, batch)
        row_r = wanted_n.to(torch.uint8).argsort(descending=True, stable=True)[:max_row_count]
        chosen_rows = sequence_rows.take(row_r.to(sequence_rows.ids_nl.device))
        row_pairs = zip(chosen_rows.ids_nl, chosen_rows.attention_nl, strict=True)
        token_lists = [ids_l[attention_l.bool()].tolist() for ids_l, attention_l in row_pairs]
        read_options = {"pad": int(self.tokenizer.pad_token_id), "temperature": self.temperature}
        read_options["batch_size"] = self.trainer.args.per_device_train_batch_size
        logp_n = torch.full((len(wanted_n),), torch.nan)
        with self.trainer.accelerator.autocast():
            logp_n[row_r] = end_logp(self.trainer.model, token_lists, self.token, **read_options)
        return logp_n

    @torch.no_grad()
    def _read_ends_with_images(self, output: dict[str, Any]) -> Tensor:
        """Compute the log-probability of `laser.token` after each row with images, in TRL's forward pass."""
        trainer, table_names = self.trainer, ("ids", "mask")
        ids_nl, mask_nl = (torch.cat([output[f"prompt_{name}"], output[f"completion_{name}"]], 1) for name in table_names)
        width_and_batch_size = (output["completion_ids"].shape[1], trainer.args.per_device_train_batch_size)
        images = image_inputs(output, ids_nl.shape[1])
        trainer._get_per_token_logps_and_entropies(trainer.model, ids_nl, mask_nl, *width_and_batch_size, **images)
        return self.passes[-1].float().cpu()

    def _scores(self, logp_n: Tensor) -> Tensor:
        """Compute laser's scores from log-probabilities. Completions that did not end are NaN."""
        return self_reward(logp_n, beta=self.mode.beta, reference=self.mode.reference)

    @property
    def files(self) -> dict[str, str]:
        """The file with the measured reference log-probability, as {name: text}. Empty before the first batch."""
        return {} if self.measured is None else {FILE: json.dumps(self.measured, indent=1) + "\n"}

    def restore(self, folder: Path) -> None:
        """Restore the reference log-probability from a checkpoint. Refuse one that was measured for another token."""
        if not (folder / FILE).is_file():
            raise DataError(
                f"The checkpoint '{folder}' is of a run without laser (it has no {FILE}), so a run with laser cannot resume "
                "from it. Start a new run."
            )
        measurement = read_measured(folder / FILE)
        if (trained_token_id := measurement["id"]) != self.token:
            raise DataError(
                f"The checkpoint '{folder}' was trained with the reserved token {trained_token_id}, but laser.token has the id "
                f"{self.token}. Set laser.token to {trained_token_id}."
            )
        self.mode = replace(self.mode, reference=measurement["reference"])
        self.measured = measurement
