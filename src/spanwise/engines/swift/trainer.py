"""ms-swift's GRPO trainer with the advantages of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from swift.rlhf_trainers import GRPOTrainer  # pyright: ignore[reportMissingImports]
from swift.rlhf_trainers.utils import get_even_process_data  # pyright: ignore[reportMissingImports]
from torch.nn.utils.rnn import pad_sequence

from spanwise.batch import Batch
from spanwise.engines import swift as adapter
from spanwise.engines.recipe_run import RecipeRun
from spanwise.engines.shared import columns_of, fold_factor
from spanwise.errors import refuse
from spanwise.segment import Vocabulary
from spanwise.step import Ranks


class SwiftSpanTrainer(GRPOTrainer):
    """ms-swift's `GRPOTrainer` with the advantages of a recipe instead of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        template = self.template
        trainer_settings = {
            **vars(self.args),
            "teacher": self._has_teacher_explicit(),
            "dynamic_num_samples": self.dynamic_num_samples,
            "padding_free": template.padding_free,
            "sequence_parallel_size": template.sequence_parallel_size,
        }
        recipe_rule = adapter.check(adapter.installed_recipe, trainer_settings, longest=self.max_completion_length)
        process_ranks = Ranks(self.accelerator.process_index, lambda own: gather_object([own]))
        ranks = process_ranks if self.accelerator.num_processes > 1 else None
        vocabulary = Vocabulary.of(template.tokenizer, self.model)
        model_name = getattr(self.args, "model", None)
        self.recipe_run = RecipeRun(recipe_rule, template.tokenizer, vocabulary, ranks=ranks, resumes=True, model=model_name)

    def _postprocess_batch(self, samples: Sequence[Any], batch_encoded_inputs: Sequence[Any]) -> None:
        """Replace ms-swift's advantages in each micro-batch by those of the recipe."""
        super()._postprocess_batch(samples, batch_encoded_inputs)
        ordered_samples = [sample for chunk in self.split_by_mini_batches(samples) for sample in chunk]
        is_training = self.model.training
        micro_batches = [encoded_batch["grpo_batch"] for encoded_batch in batch_encoded_inputs]
        refuse({adapter.NO_TEACHER: any(micro_batch.teacher_per_token_logps is not None for micro_batch in micro_batches)})
        completion_ids, sampled_masks, logp_rows, column_ranges = [], [], [], []
        for micro_batch, encoded_batch in zip(micro_batches, batch_encoded_inputs, strict=True):
            input_ids = encoded_batch["model_inputs"]["input_ids"]
            token_rows = zip(micro_batch.completion_mask, input_ids, micro_batch.old_per_token_logps, strict=True)
            for mask_t, ids_l, logp_t in token_rows:
                trained_columns = mask_t.nonzero()[:, 0].tolist()
                column_range = slice(trained_columns[0], trained_columns[-1] + 1) if trained_columns else slice(0, 0)
                completion_ids.append(ids_l[-len(mask_t) :][column_range].tolist())
                sampled_masks.append(mask_t[column_range].int().tolist())
                logp_rows.append(logp_t[column_range].float().cpu())
                column_ranges.append(column_range)
        group_size = self.num_generations if is_training else self.num_generations_eval
        first_row_index = self.accelerator.process_index * len(completion_ids)
        group_n = (first_row_index + torch.arange(len(completion_ids))) // group_size
        batch_fields = {"columns": self._columns(ordered_samples), "logp_nt": pad_sequence(logp_rows, batch_first=True)}
        batch = Batch.jagged(completion_ids, group_n, sampled=sampled_masks, **batch_fields)
        scored_batch = self.recipe_run.step.read(batch)
        mask_nt = batch.mask_nt
        assert mask_nt is not None
        if self.overlong_filter:
            is_truncated_n = torch.cat([micro_batch.truncated_mask for micro_batch in micro_batches]).cpu()
            mask_nt = mask_nt & ~is_truncated_n[:, None]
        micro_batches_per_generation = self.args.steps_per_generation * self.num_iterations
        finished_micro_batch_count = self.state.global_step * self.args.gradient_accumulation_steps
        finished_batch_count = finished_micro_batch_count // micro_batches_per_generation
        batch_number = max(finished_batch_count, self.recipe_run.batches) + 1  # several batches may share one optimizer step
        adv_nt, metrics = self.recipe_run.finish(scored_batch, mask_nt=mask_nt, learn=is_training, number=batch_number)
        ranges_and_advantages = zip(column_ranges, adv_nt, strict=True)
        for micro_batch in micro_batches:
            micro_batch.advantages = torch.zeros_like(micro_batch.completion_mask, dtype=torch.float32)
            for advantage_t in micro_batch.advantages:
                column_range, completion_advantage_t = next(ranges_and_advantages)
                advantage_t[column_range] = completion_advantage_t[: column_range.stop - column_range.start].to(advantage_t)
        for name, value in metrics.items():
            self._metrics["train" if is_training else "eval"][name].append(value)

    def _columns(self, samples: Sequence[Any]) -> dict[str, list[Any]]:
        """Return the columns that reward functions read."""
        reward_nf = torch.stack(list(get_even_process_data(self, self._rewards_per_func)))
        weighted_sum_n = (reward_nf * self.reward_weights).nansum(dim=1)
        total_reward_n = weighted_sum_n.masked_fill(reward_nf.isnan().all(dim=1), torch.nan)
        reward_columns = columns_of([{**sample.extra, **(sample.rollout_infos or {})} for sample in samples], flat=False)
        reward_columns |= {"prompts": [_prompt(sample) for sample in samples], "environment": total_reward_n.tolist()}
        return reward_columns | {name: reward_nf[:, f].tolist() for f, name in enumerate(self.reward_func_names)}

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        """Compute ms-swift's loss with scaled advantages, to undo its normaliser."""
        mask_bt = grpo_batch.completion_mask
        if self.overlong_filter:
            mask_bt = mask_bt & ~grpo_batch.truncated_mask[:, None]
        fold_factor_b1 = fold_factor(
            mask_bt,
            loss_type=self.loss_type,
            max_completion_length=self.max_completion_length,
            num_items=grpo_batch.num_items_in_batch,
            processes=self.accelerator.num_processes,
            steps_per_generation=self.current_gradient_accumulation_steps if self.model.training else 1,
        )
        scaled_grpo_batch = replace(grpo_batch, advantages=grpo_batch.advantages * fold_factor_b1)
        return super()._compute_loss_and_metrics(model, model_inputs, scaled_grpo_batch)


def _prompt(sample: Any) -> list[Any]:
    """Return the messages before the first reply of a rollout."""
    turn_count = (sample.rollout_infos or {}).get("num_turns", 1)
    reply_indices = [n for n, message in enumerate(sample.messages) if message["role"] == "assistant"]
    return sample.messages[: reply_indices[-turn_count:][0]]
