"""Dynamic sampling: groups that teach nothing give way to groups of other prompts, before the batch is trained on.

DAPO (Yu et al. 2025, arXiv 2503.14476, section 3.2) drops the groups whose one reward is the same for all. With several objectives
a group is useless if no block gets credit, or, if the user prefers, if one objective's reward is the same for all.
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

#: The value of `dynamic_sampling` that looks at the credit of all blocks.
CREDIT = "credit"


def check_sampling(args: Any, scheme: Scheme, *, dataset: Any, options: Mapping[str, Any], modes: Sequence[Any]) -> None:
    """Refuse dynamic sampling where groups cannot be judged when they are sampled, or cannot be replaced."""
    kind = getattr(args, "dynamic_sampling", None)
    if kind is None:
        return
    check_known("dynamic_sampling", kind, (CREDIT, *scheme.names))
    late = sorted({"logp_nt", "value_nt"} & scheme.needs) if kind == CREDIT else []
    names = getattr(dataset, "column_names", None) or []
    advice = "Leave dynamic_sampling out."
    refuse(
        {
            f"dynamic_sampling='credit' needs credit when completions are sampled, and method '{scheme.method}' reads "
            f"{', '.join(late)}, which come later. Name an objective instead: dynamic_sampling='{scheme.names[0]}'.": late,
            **{
                f"dynamic_sampling would leave mode '{mode.name}' with completions that it did not see sampled. {advice}": True
                for mode in modes
                if mode.name != "critic"
            },
            f"dynamic_sampling draws other prompts by their number, and train_dataset is a {type(dataset).__name__}; pass a "
            f"datasets.Dataset.": not isinstance(dataset, Dataset),
            f"dynamic_sampling cannot exchange an environment in the middle of a batch. {advice}": options.get(
                "environment_factory"
            )
            is not None,
            f"dynamic_sampling cannot exchange images in the middle of a batch. {advice}": {"image", "images"} & {*names},
            f"dynamic_sampling_rounds is {args.dynamic_sampling_rounds}; set it to 1 or more.": (
                args.dynamic_sampling_rounds < 1
            ),
            f"dynamic_sampling needs whole groups in each process, and a process samples "
            f"{args.generation_batch_size // args.world_size} completions in groups of {args.num_generations}. Set "
            "per_device_train_batch_size or steps_per_generation to a multiple.": (
                args.generation_batch_size // args.world_size % args.num_generations
            ),
        }
    )


class DynamicSampling:
    """Exchanges useless groups of a generation batch, for at most `rounds` rounds.

    Attributes:
        metrics: of the last batch: groups sampled for each group of the batch, and the share of groups that stayed useless.
        scored: the completions of the last batch if no process exchanged a group, so that their rewards are known; else None.
    """

    def __init__(self, trainer: Any, kind: str, rounds: int) -> None:
        self.trainer, self.kind, self.rounds = trainer, kind, rounds
        self.metrics: dict[str, float] = {}
        self.scored: Any = None

    def fill(self, generated: tuple[Any, ...], prompts: list[Any], rows: list[dict[str, Any]]) -> tuple[Any, ...]:
        """Return the batch with other groups in the place of useless ones; `prompts` and `rows` are changed in place."""
        trainer, size = self.trainer, self.trainer.num_generations
        fresh_rows = self._fresh_rows()
        empty = (~self._useful(generated, prompts, rows)).nonzero()[:, 0].tolist()
        groups = sampled = len(rows) // size
        self.scored = generated[1]
        for _ in range(self.rounds):
            needed = max(gather_object([len(empty)]))  # every process samples as much as the neediest
            if needed == 0:
                break
            self.scored = None
            candidates = [dict(row) for row in [next(fresh_rows) for _ in range(needed)] for _ in range(size)]
            candidate_prompts = [row["prompt"] for row in candidates]
            answers = trainer._sample(candidate_prompts)
            sampled += needed
            useful_g = self._useful(answers, candidate_prompts, candidates)
            for group in useful_g.nonzero()[:, 0].tolist()[: len(empty)]:
                old, new = (range(number * size, (number + 1) * size) for number in (empty.pop(0), group))
                generated = tuple(_exchanged(part, other, old, new) for part, other in zip(generated, answers, strict=True))
                for place, source in zip(old, new, strict=True):
                    prompts[place], rows[place] = candidate_prompts[source], candidates[source]
        self.metrics = {"sampling/groups": sampled / groups, "sampling/useless": len(empty) / groups}
        return generated

    def _useful(self, generated: tuple[Any, ...], prompts: list[Any], rows: list[dict[str, Any]]) -> Bool[Tensor, " g"]:
        """Mark the useful groups."""
        fields = next((part for part in generated if isinstance(part, dict)), {})
        for n, row in enumerate(rows):
            row.update({name: values[n] if isinstance(values, list) else values for name, values in fields.items()})
        own, scheme, size = self.trainer._read(generated, prompts, rows), self.trainer.scheme, self.trainer.num_generations
        if self.kind != CREDIT:
            worth_gn = own.worth_nm(scheme)[:, scheme.names.index(self.kind)].view(-1, size)
            missing_gn = worth_gn.isnan()
            return worth_gn.masked_fill(missing_gn, -torch.inf).amax(1) > worth_gn.masked_fill(missing_gn, torch.inf).amin(1)
        useful_n = self.trainer.step.useful(own)
        if own.turns is not None:  # a row is a turn; a completion without a turn is in no group of its own
            useful_n = torch.zeros(own.completions, dtype=torch.bool).index_put((own.turns.row_s,), useful_n)
        return useful_n.view(-1, size).any(dim=1)

    def _fresh_rows(self) -> Any:
        """Yield rows of the dataset in an order of this step, others in every process, without end."""
        trainer, dataset = self.trainer, self.trainer.train_dataset
        seed = trainer.args.seed * 1_000_003 + trainer.state.global_step  # a resumed run draws the same
        generator = torch.Generator().manual_seed(seed)
        first, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
        while True:
            for index in torch.randperm(len(dataset), generator=generator).tolist()[first::processes] or [0]:
                yield dataset[index]


def _exchanged(part: Any, other: Any, old: range, new: range) -> Any:
    """Return one result of TRL's `_generate` with the completions `new` of another in the places `old`."""
    if isinstance(part, dict):
        lists = {name: values for name, values in part.items() if isinstance(values, list)}  # other fields are of all rows
        return {**part, **{name: _exchanged(values, other[name], old, new) for name, values in lists.items()}}
    if isinstance(part, list) and isinstance(other, list):
        copy = list(part)
        copy[old.start : old.stop] = other[new.start : new.stop]
        return copy
    if part is not None and other is not None:
        raise SpanwiseError(
            f"dynamic_sampling does not know the {type(part).__name__} among what this TRL's _generate returns. Install trl 1.16, "
            "or leave dynamic_sampling out."
        )
    return part
