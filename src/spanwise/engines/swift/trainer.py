"""ms-swift's GRPO trainer with the advantages of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer  # pyright: ignore[reportMissingImports]
from swift.rlhf_trainers.utils import get_even_process_data  # pyright: ignore[reportMissingImports]
from torch import Tensor

from spanwise.batch import Batch
from spanwise.engines.shared import fold_factor, say
from spanwise.engines.swift import settings
from spanwise.errors import refuse
from spanwise.segment import Vocabulary
from spanwise.step import Ranks, Step, wider


class SwiftSpanTrainer(GRPOTrainer):
    """ms-swift's `GRPOTrainer` with the advantages of a recipe instead of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        template = self.template
        options = {
            **vars(self.args),
            "teacher": self._has_teacher_explicit(),
            "dynamic_num_samples": self.dynamic_num_samples,
        }
        options |= {"padding_free": template.padding_free, "sequence_parallel_size": template.sequence_parallel_size}
        scheme = settings.check(settings.installed_recipe, options, longest=self.max_completion_length)
        ranks = Ranks(self.accelerator.process_index, lambda local: gather_object([local]))
        distributed = self.accelerator.num_processes > 1
        self.step = Step(scheme, Vocabulary.of(template.tokenizer, self.model), ranks=ranks if distributed else None)

    def _postprocess_batch(self, samples: Sequence[Any], batch_encoded_inputs: Sequence[Any]) -> None:
        """Replace ms-swift's advantages in each micro-batch by those of the recipe."""
        super()._postprocess_batch(samples, batch_encoded_inputs)
        ordered_samples = [sample for chunk in self.split_by_mini_batches(samples) for sample in chunk]
        training, micro_batches = self.model.training, [encoded["grpo_batch"] for encoded in batch_encoded_inputs]
        rows = [
            _row(micro_batch, ids_l, n)
            for micro_batch, encoded in zip(micro_batches, batch_encoded_inputs, strict=True)
            for n, ids_l in enumerate(encoded["model_inputs"]["input_ids"])
        ]
        refuse({settings.NO_TEACHER: any(micro_batch.teacher_per_token_logps is not None for micro_batch in micro_batches)})
        width = max(len(row["ids"]) for row in rows)
        logp_nt = torch.stack([wider(row["logp"][None].float(), width)[0] for row in rows]).cpu()
        group_size = self.num_generations if training else self.num_generations_eval
        group_n = (self.accelerator.process_index * len(rows) + torch.arange(len(rows))) // group_size
        ids, sampled = ([row[name] for row in rows] for name in ("ids", "sampled"))
        columns = self._columns(ordered_samples)
        read_batch = self.step.read(Batch.jagged(ids, group_n, sampled=sampled, columns=columns, logp_nt=logp_nt))
        mask_nt = torch.tensor([[*row["sampled"], *[0] * (width - len(row["ids"]))] for row in rows]).bool()
        if self.overlong_filter:
            mask_nt &= ~torch.cat([micro_batch.truncated_mask for micro_batch in micro_batches]).cpu()[:, None]
        result = self.step.finish(read_batch, mask_nt=mask_nt, learn=training, number=self.state.global_step)
        advantage_rows = iter(read_batch.put(result.advantages_nt, width=width))
        column_ranges = iter(row["place"] for row in rows)
        for micro_batch in micro_batches:
            micro_batch.advantages = torch.zeros_like(micro_batch.completion_mask, dtype=torch.float32)
            for advantage_t in micro_batch.advantages:
                column_range = next(column_ranges)
                advantage_t[column_range] = next(advantage_rows)[: column_range.stop - column_range.start].to(advantage_t)
        for name, value in result.metrics.items():
            self._metrics["train" if training else "eval"][name].append(value)
        say(*result.warnings if self.accelerator.is_main_process else ())

    def _columns(self, samples: Sequence[Any]) -> dict[str, list[Any]]:
        """Return the columns that reward functions read: the dataset's, prompts, ms-swift's rewards and their sum."""
        reward_nf = torch.stack(list(get_even_process_data(self, self._rewards_per_func)))
        total_n = (reward_nf * self.reward_weights).nansum(dim=1).masked_fill(reward_nf.isnan().all(dim=1), torch.nan)
        extra_names = dict.fromkeys(name for sample in samples for name in sample.extra)
        columns = {name: [sample.extra.get(name) for sample in samples] for name in extra_names}
        columns |= {"prompts": [sample.messages[:-1] for sample in samples], "environment": total_n.tolist()}
        return columns | {name: reward_nf[:, f].tolist() for f, name in enumerate(self.reward_func_names)}

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        """Compute ms-swift's loss with advantages scaled so that they undo its division by tokens or rows."""
        mask_bt = grpo_batch.completion_mask
        if self.overlong_filter:
            mask_bt = mask_bt & ~grpo_batch.truncated_mask[:, None]
        factor_b1 = fold_factor(
            mask_bt,
            loss_type=self.loss_type,
            max_completion_length=self.max_completion_length,
            num_items=grpo_batch.num_items_in_batch,
            processes=self.accelerator.num_processes,
            steps_per_generation=self.current_gradient_accumulation_steps if self.model.training else 1,
        )
        scaled_batch = replace(grpo_batch, advantages=grpo_batch.advantages * factor_b1)
        return super()._compute_loss_and_metrics(model, model_inputs, scaled_batch)


def _row(micro_batch: Any, ids_l: Tensor, n: int) -> dict[str, Any]:
    """Cut completion n out of a micro-batch, from its first trained token to its last."""
    mask_t = micro_batch.completion_mask[n].bool()
    trained_columns = mask_t.nonzero()[:, 0].tolist() or [0, -1]
    column_range = slice(trained_columns[0], trained_columns[-1] + 1)
    ids_t = ids_l[-len(mask_t) :]
    logp_t, sampled = micro_batch.old_per_token_logps[n, column_range], mask_t[column_range].int().tolist()
    return {"ids": ids_t[column_range].tolist(), "sampled": sampled, "logp": logp_t, "place": column_range}
