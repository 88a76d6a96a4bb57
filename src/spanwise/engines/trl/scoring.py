"""`Scoring`: TRL's trainer whose forward passes read one more position, where the scheme has a self-rewarding score."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch
from spanwise.credit.assign import completed
from spanwise.engines.self_reward import end_logp
from spanwise.engines.trl.laser import SelfRewarding, without
from spanwise.engines.trl.metrics import MetricBuffer
from spanwise.engines.trl.saving import Saving
from spanwise.engines.trl.values import sampled_end, sequences
from spanwise.laser import Laser
from spanwise.pipeline import Reading
from spanwise.rollouts import Rollouts


class Scoring(Saving):
    """TRL's `GRPOTrainer` that reads, trains and hands on the score of a reserved token (`Laser`); without one nothing changes.

    Attributes:
        last_rollouts: of the last generation batch; the training's passes fill in the scores that nothing had to know before.
    """

    last_rollouts: Rollouts | None
    _span_metrics: MetricBuffer
    # TRL's annotation allows a None that a trainer never has.
    model: Any

    def _self_rewarding(self, laser: Laser) -> SelfRewarding:
        model, tokenizer = self.accelerator.unwrap_model(self.model), self._text_tokenizer
        size = model.get_input_embeddings().weight.shape[0]
        ends = getattr(self, "eos_token_ids", None) or [tokenizer.eos_token_id]
        return SelfRewarding(laser, tokenizer, size=size, ends=ends, temperature=self.temperature)

    def _gather(self, table_nc: Tensor) -> Tensor:
        gathered: Any = self.accelerator.gather(table_nc.to(self.accelerator.device))
        return gathered.cpu()

    # ------------------------------------------------------------------ what TRL calls

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        mine = self.self_rewarding
        if mine is None:
            return super()._generate(*args, **kwargs)
        mine.passes.clear()
        mine.overheard.forget()
        if not self.model.training or not (self._mixes(mine.laser) or mine.measured is None):
            return super()._generate(*args, **kwargs)
        model = self.accelerator.unwrap_model(self.model)
        inside = model.get_base_model() if hasattr(model, "get_base_model") else model  # of an adapter
        with mine.overheard.listening(inside):
            return super()._generate(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        mine, score = self.self_rewarding, super()._get_per_token_logps_and_entropies
        if mine is None:
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        input_ids, attention_mask, column_b = mine.extended(input_ids, attention_mask, logits_to_keep)
        for name in ("token_type_ids", "mm_token_type_ids"):
            if kwargs.get(name) is not None:
                kwargs[name] = pad(kwargs[name], (0, 1))
        logps, entropies, aux = score(model, input_ids, attention_mask, logits_to_keep + 1, *args, **kwargs)
        return mine.taken(logps, column_b), None if entropies is None else without(entropies, column_b), aux

    # ------------------------------------------------------------------ scores of a generation batch

    def _with_scores(
        self, batch: Batch, everyone: Reading, whole: Batch, here: slice, output: dict[str, Any]
    ) -> tuple[Tensor | None, Batch]:
        """The scores of this process's completions, None without any, and the batch of all with them once they are mixed in.

        They come from the pass that TRL makes over the old policy, or else from what was overheard while it generated. What neither
        knows is NaN: the training's own pass fills it in, unless it is needed now.
        """
        mine = self.self_rewarding
        if mine is None or not self.model.training:
            return None, whole
        mixes = self._mixes(mine.laser)
        written_n = ((output["completion_ids"] == mine.token) & output["completion_mask"].bool()).any(dim=1)
        said = [mine.check_unwritten(self._gather(written_n))]
        ended_n = sampled_end(batch, mine.ends)
        logp_n = self._known_logps(ended_n, output)
        missing_n = ended_n & logp_n.isnan()
        if (mixes or mine.measured is None) and bool(self._gather(missing_n).any()):
            logp_n = torch.where(missing_n, self._read_ends(batch, output, missing_n), logp_n)
        if mine.measured is None:
            said.append(mine.measure(self._gather(logp_n)))
        for sentence in filter(None, said if self.accelerator.is_main_process else []):
            warnings.warn(f"Step {self.state.global_step}: {sentence}", UserWarning, stacklevel=2)
        score_n = mine.scores(logp_n)
        if self._generation >= mine.laser.first_loss:
            verdict_n = completed(everyone.scores, self.scheme.objectives)[:, self.scheme.names.index(mine.laser.verdict)]
            verdict_n, weight_n = mine.targets(verdict_n, self._gather(ended_n).bool())
            device = output["completion_ids"].device
            output["laser_verdict"], output["laser_weight"] = (v_n[here].float().to(device) for v_n in (verdict_n, weight_n))
            output["laser_row"] = torch.arange(len(score_n), device=device)
        return score_n, replace(whole, self_reward_n=self._gather(score_n)) if mixes else whole

    def _known_logps(self, ended_n: Tensor, output: dict[str, Any]) -> Tensor:
        """What passes over the policy that sampled have read already."""
        mine = self.self_rewarding
        assert mine is not None, "the scheme has a score"
        if "old_per_token_logps" in output:
            return mine.passes[0].cpu()  # TRL scores the policy before the reference
        return mine.passes[-1].cpu() if "logp_nt" in self.scheme.needs else mine.heard(ended_n)

    def _read_ends(self, batch: Batch, output: dict[str, Any], wanted_n: Tensor) -> Tensor:
        """Log-probabilities of the reserved token after completions that no pass has read; as many rows in every process."""
        mine, rows = self.self_rewarding, sequences(output, batch)
        assert mine is not None, "the scheme has a score"
        count = int(self._gather(wanted_n.sum()[None]).max())
        row_r = wanted_n.to(torch.uint8).argsort(descending=True, stable=True)[:count]
        there = row_r.to(rows.ids_nl.device)
        whole = [ids[mask.bool()].tolist() for ids, mask in zip(rows.ids_nl[there], rows.attention_nl[there], strict=True)]
        size, pad_id = self.args.per_device_train_batch_size, int(self._text_tokenizer.pad_token_id)
        logp_n = torch.full((len(wanted_n),), torch.nan)
        with self.accelerator.autocast():
            how = {"pad": pad_id, "temperature": self.temperature, "batch_size": size}
            logp_n[row_r] = end_logp(self.model, whole, mine.token, **how)
        return logp_n

    def _mixes(self, laser: Laser) -> bool:
        """Whether the score is mixed into the credit of this generation batch."""
        return laser.first_mix is not None and self._generation >= laser.first_mix

    @property
    def _generation(self) -> int:
        """The number of the generation batch, from 0."""
        per_batch = self.args.steps_per_generation * self.num_iterations
        return self.state.global_step * self.args.gradient_accumulation_steps // per_batch

    # ------------------------------------------------------------------ loss

    def _verification(self, inputs: Any) -> Tensor | float:
        """The part of a micro-batch in the loss of the score, 0 where it has none; it fills in the scores not known yet."""
        mine = self.self_rewarding
        if mine is None or "laser_weight" not in inputs:
            return 0.0
        loss, (right, wrong) = mine.loss(inputs["laser_verdict"], inputs["laser_weight"])
        sums: Any = self.accelerator.reduce(torch.stack([*right, *wrong]), reduction="sum")
        means = {"score_right": sums[0] / sums[1], "score_wrong": sums[2] / sums[3], "loss": loss.detach()}
        self._span_metrics.add("train", {f"laser/{name}": float(value) for name, value in means.items()})
        kept_n = None if self.last_rollouts is None else self.last_rollouts.self_reward_n
        if kept_n is not None:
            row_b, seen_b = inputs["laser_row"].cpu(), mine.scores(mine.passes[-1]).to(kept_n)
            kept_n[row_b] = torch.where(kept_n[row_b].isnan(), seen_b, kept_n[row_b])
        return mine.laser.alpha * loss
