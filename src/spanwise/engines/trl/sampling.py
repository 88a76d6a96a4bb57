"""Dynamic sampling: replace groups without learning signal before training on a batch.

DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2) drops groups whose completions all have the same reward. With several
objectives a group is useless if no block gets credit, or, if the user prefers, if one objective's reward is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from jaxtyping import Bool
from torch import Tensor

from spanwise.errors import SpanwiseError, check_known, refuse
from spanwise.scheme import Scheme

#: With this value of `dynamic_sampling`, a group is replaced if none of its blocks gets credit.
CREDIT = "credit"


def check_sampling(args: Any, scheme: Scheme, *, dataset: Any, options: Mapping[str, Any], modes: Sequence[Any]) -> None:
    """Refuse dynamic sampling if it cannot work."""
    sampling_criterion = getattr(args, "dynamic_sampling", None)
    if sampling_criterion is None:
        return
    check_known("dynamic_sampling", sampling_criterion, (CREDIT, *scheme.names))
    deferred_field_names = sorted({"logp_nt", "value_nt"} & scheme.needs) if sampling_criterion == CREDIT else []
    column_names = getattr(dataset, "column_names", None) or []
    advice, round_count = "Leave dynamic_sampling out.", args.dynamic_sampling_rounds
    completions_per_process = args.generation_batch_size // args.world_size
    has_environment = options.get("environment_factory") is not None
    refuse(
        {
            f"dynamic_sampling='credit' needs credit right after sampling, but method '{scheme.method}' reads "
            f"{', '.join(deferred_field_names)}, which TRL computes later. Name an objective instead: "
            f"dynamic_sampling='{scheme.names[0]}'.": deferred_field_names,
            **{
                f"Mode '{mode.name}' needs all sampled completions, but dynamic_sampling replaces some. {advice}": True
                for mode in modes
                if mode.name != "critic"
            },
            f"dynamic_sampling picks other prompts by row number, but train_dataset is a {type(dataset).__name__}. Pass a "
            f"datasets.Dataset.": not isinstance(dataset, Dataset),
            f"dynamic_sampling cannot replace prompts that have an environment. {advice}": has_environment,
            f"dynamic_sampling cannot replace prompts with images. {advice}": {"image", "images"} & {*column_names},
            f"dynamic_sampling_rounds is {round_count}; set it to 1 or more.": round_count < 1,
            f"dynamic_sampling needs whole groups of {args.num_generations} completions in each process, but each process "
            f"samples {completions_per_process} completions. Change per_device_train_batch_size or "
            "steps_per_generation.": completions_per_process % args.num_generations,
        }
    )


class DynamicSampling:
    """Replaces groups that teach nothing, in at most `rounds` rounds of sampling."""

    def __init__(self, trainer: Any, criterion: str, rounds: int) -> None:
        self.trainer, self.criterion, self.rounds = trainer, criterion, rounds
        self.metrics: dict[str, float] = {}  # The metrics of the last batch.
        self.scored: Any = None  # The completion ids of the last batch, if its rewards are known already.

    def fill(self, outputs: tuple[Any, ...], prompts: list[Any], rows: list[dict[str, Any]]) -> tuple[Any, ...]:
        """Replace the groups of a generated batch that teach nothing. This changes `prompts` and `rows` in place."""
        group_size = self.trainer.num_generations
        fresh_rows = self._fresh_rows()
        is_useful_g = self._useful(outputs, prompts, rows)
        useless_group_indices = (~is_useful_g).nonzero()[:, 0].tolist()
        group_rows = [range(first_row, first_row + group_size) for first_row in range(0, len(rows), group_size)]
        group_count = len(group_rows)
        sampled_group_count = group_count
        self.scored = outputs[1]
        for _ in range(self.rounds):
            # Every process samples as many groups as the one that needs the most.
            group_count_to_sample = max(gather_object([len(useless_group_indices)]))
            if group_count_to_sample == 0:
                break
            self.scored = None
            sampled_rows = [next(fresh_rows) for _ in range(group_count_to_sample)]
            candidate_rows = [dict(row) for row in sampled_rows for _ in range(group_size)]
            candidate_prompts = [row["prompt"] for row in candidate_rows]
            candidate_outputs = self.trainer._sample(candidate_prompts)
            sampled_group_count += group_count_to_sample
            is_useful_g = self._useful(candidate_outputs, candidate_prompts, candidate_rows)
            for candidate_index in is_useful_g.nonzero()[:, 0].tolist()[: len(useless_group_indices)]:
                old_rows, new_rows = group_rows[useless_group_indices.pop(0)], group_rows[candidate_index]
                output_pairs = zip(outputs, candidate_outputs, strict=True)
                outputs = tuple(_replaced(old_field, new_field, old_rows, new_rows) for old_field, new_field in output_pairs)
                for old_row, new_row in zip(old_rows, new_rows, strict=True):
                    prompts[old_row], rows[old_row] = candidate_prompts[new_row], candidate_rows[new_row]
        if self.scored is None:  # TRL scores the final batch again, so drop what rewards have logged so far
            self.trainer._pending_extra_logs.clear()
            self.trainer._pending_metrics.clear()
        useless_group_counts = gather_object([len(useless_group_indices)])
        useless_share = sum(useless_group_counts) / (group_count * len(useless_group_counts))
        self.metrics = {"sampling/groups": sampled_group_count / group_count, "sampling/useless": useless_share}
        return outputs

    def _useful(self, generated: tuple[Any, ...], prompts: list[Any], rows: list[dict[str, Any]]) -> Bool[Tensor, " g"]:
        """Mark the groups that get credit or, if the user chose an objective, the groups with unequal rewards for it."""
        extra_fields = next((output for output in generated if isinstance(output, dict)), {})
        for n, row in enumerate(rows):
            row.update({name: values[n] if isinstance(values, list) else values for name, values in extra_fields.items()})
        scored_rows = self.trainer._read(generated, prompts, rows)
        scheme = self.trainer.scheme
        group_size = self.trainer.num_generations
        if self.criterion != CREDIT:
            reward_gn = scored_rows.worth_nm(scheme)[:, scheme.names.index(self.criterion)].view(-1, group_size)
            is_nan_gn = reward_gn.isnan()
            return reward_gn.masked_fill(is_nan_gn, -torch.inf).amax(1) > reward_gn.masked_fill(is_nan_gn, torch.inf).amin(1)
        is_useful_n = self.trainer.step.useful(scored_rows)
        if scored_rows.turns is not None:  # rows are turns, so a completion is useful if one of its turns is
            is_useful_n = torch.isin(torch.arange(scored_rows.completions), scored_rows.turns.row_s[is_useful_n])
        return is_useful_n.view(-1, group_size).any(dim=1)

    def _fresh_rows(self) -> Any:
        """Yield rows of the dataset in random order, without end. Each process gets different rows."""
        trainer = self.trainer
        dataset = trainer.train_dataset
        accumulation_steps = trainer.args.gradient_accumulation_steps
        micro_batch_number = trainer.state.global_step * accumulation_steps + trainer._step % accumulation_steps
        seed = trainer.args.seed * 1_000_003 + micro_batch_number  # a resumed run draws the same rows
        random_generator = torch.Generator().manual_seed(seed)
        rows_of_rank = slice(trainer.accelerator.process_index, None, trainer.accelerator.num_processes)
        while True:
            for row_index in torch.randperm(len(dataset), generator=random_generator).tolist()[rows_of_rank] or [0]:
                yield dataset[row_index]


def _replaced(old: Any, new: Any, old_rows: range, new_rows: range) -> Any:
    """Replace rows `old_rows` of `old` by rows `new_rows` of `new`. Both are outputs of TRL's `_generate`."""
    if isinstance(old, dict):
        row_lists = {name: values for name, values in old.items() if isinstance(values, list)}
        return {**old, **{name: _replaced(values, new[name], old_rows, new_rows) for name, values in row_lists.items()}}
    if isinstance(old, list) and isinstance(new, list):
        updated_rows = list(old)
        updated_rows[old_rows.start : old_rows.stop] = new[new_rows.start : new_rows.stop]
        return updated_rows
    if old is not None and new is not None:
        raise SpanwiseError(
            f"dynamic_sampling cannot replace groups in the {type(old).__name__} that TRL's _generate returned. Install trl 1.16, "
            "or leave dynamic_sampling out."
        )
    return old
