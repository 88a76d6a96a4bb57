"""ms-swift with the credit of a recipe, in `swift rlhf --rlhf_type grpo`; written for and run with ms-swift 4.6.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from swift.rewards import ORM, orms  # pyright: ignore[reportMissingImports]
from swift.rlhf_trainers import GRPOTrainer  # pyright: ignore[reportMissingImports]
from swift.rlhf_trainers.utils import get_even_process_data  # pyright: ignore[reportMissingImports]
from swift.trainers import TrainerFactory  # pyright: ignore[reportMissingImports]
from torch import Tensor

from spanwise.batch import Batch
from spanwise.engines.shared import fixed_faults, fold_factor, idle_fields, kl_fault, say
from spanwise.errors import refuse, unknown
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary
from spanwise.step import Ranks, Step, wider

__all__ = ["install"]

#: The fields of `Batch` that ms-swift's rollouts fill in; old log-probabilities are known before completions are read.
PROVIDES = ("group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt")
LOSS_TYPES = ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "sapo")
RATIO_LEVELS = ("token", "sequence_token")
_TEACHER = "ms-swift's teacher would change the advantages. Leave teacher_model and the column teacher_prompt out."
#: Maps options that would change the credit to their required value, and the reason for it.
_FIXED: dict[str, tuple[Any, str]] = {
    "kl_in_reward": (False, "the option changes a reward that spanwise does not use"),
    "dynamic_sample": (False, "the option chooses groups by ms-swift's rewards and not by the recipe's"),
    "off_policy_sequence_mask_delta": (None, "the option judges a completion by its mean advantage"),
    "advantage_reweight": (None, "the option lets a teacher change advantages"),
    "sdar_loss_coef": (0.0, "the option needs a teacher"),
    "use_liger_kernel": (False, "its loss takes one advantage per completion"),
    "padding_free": (False, "it packs several completions into one row, but spanwise needs a row for each"),
    "sequence_parallel_size": (1, "it spreads the tokens of a completion over several processes"),
}


def install(recipe: str | Path) -> None:
    """Let `swift rlhf --rlhf_type grpo` train by a recipe; call it in a file for `--external_plugins`.

    Args:
        recipe: a YAML file with a layout.

    Example:
        In `plugin.py`, for `swift rlhf --rlhf_type grpo --external_plugins plugin.py --reward_funcs spanwise ...`::

            from spanwise.engines.swift import install
            install("recipe.yaml")
    """
    SwiftSpanTrainer.recipe = Path(recipe).absolute()
    orms["spanwise"] = NoReward
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.{SwiftSpanTrainer.__name__}"


class NoReward(ORM):
    """The reward function `spanwise` for runs whose rewards are all in the recipe, as ms-swift needs at least one function."""

    def __call__(self, completions: Sequence[str], **columns: Any) -> list[float]:
        """Return reward 0 for each completion."""
        return [0.0] * len(completions)


def check(recipe: Path, settings: Mapping[str, Any], *, longest: int) -> Scheme:
    """Load the scheme of a recipe; refuse settings of ms-swift that do not work with it."""
    scheme, loss_type = scheme_at(recipe, longest=longest), settings["loss_type"]
    level, mode_sections = settings["importance_sampling_level"], load(recipe).modes
    refuse(
        {
            f"Under ms-swift: {unknown('loss_type', loss_type, LOSS_TYPES)}": loss_type not in LOSS_TYPES,
            f"Under ms-swift: {unknown('importance_sampling_level', level, RATIO_LEVELS)}": level not in RATIO_LEVELS,
            **kl_fault(settings["beta"], loss_type, engine="ms-swift"),
            _TEACHER: settings["teacher"],
            "The rollout server returns a changing number of samples per prompt, as servers with several turns do. Use single "
            "turns, or train with SkyRL.": settings["dynamic_num_samples"],
            f"The recipe has {', '.join(mode_sections)}, which does not work with ms-swift. Leave it out, or train with "
            "TRL.": mode_sections,
            **fixed_faults(_FIXED, settings.get),
        }
    )
    scheme.check(PROVIDES)
    scheme.check_forgets("ms-swift")
    scheme.check_loads("ms-swift")
    say(idle_fields(recipe, engine="ms-swift"))
    return scheme


class SwiftSpanTrainer(GRPOTrainer):
    """ms-swift's `GRPOTrainer` with the advantages of a recipe instead of its own."""

    recipe: Path

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        template = self.template
        settings = {
            **vars(self.args),
            "teacher": self._has_teacher_explicit(),
            "dynamic_num_samples": self.dynamic_num_samples,
        }
        settings |= {"padding_free": template.padding_free, "sequence_parallel_size": template.sequence_parallel_size}
        scheme = check(self.recipe, settings, longest=self.max_completion_length)
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
        refuse({_TEACHER: any(micro_batch.teacher_per_token_logps is not None for micro_batch in micro_batches)})
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
        """Return the columns for rewards: the dataset's, the prompts, ms-swift's rewards, and their sum as `environment`."""
        reward_nf = torch.stack(list(get_even_process_data(self, self._rewards_per_func)))
        total_n = (reward_nf * self.reward_weights).nansum(dim=1).masked_fill(reward_nf.isnan().all(dim=1), torch.nan)
        extra_names = dict.fromkeys(name for sample in samples for name in sample.extra)
        columns = {name: [sample.extra.get(name) for sample in samples] for name in extra_names}
        columns |= {"prompts": [sample.messages[:-1] for sample in samples], "environment": total_n.tolist()}
        return columns | {name: reward_nf[:, f].tolist() for f, name in enumerate(self.reward_func_names)}

    def _compute_loss_and_metrics(self, model: Any, model_inputs: Any, grpo_batch: Any) -> Any:
        """Compute ms-swift's loss with advantages that undo its normaliser."""
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
