"""`Task`: everything a training run needs to know about what it trains on; `digits_task`: the embedded ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanwise.errors import DataError
from spanwise.layout import Layout
from spanwise.score import parse_confidence
from spanwise.tasks.embedded import Start, embedded
from spanwise.tasks.fields import Fields
from spanwise.tasks.problems import HELD_OUT
from spanwise.tasks.warm_start import WarmStartSettings, warm_start
from spanwise.types import BlockText


@dataclass(frozen=True)
class Task:
    """A model to start from, prompts with answers, and the shape of a completion.

    Args:
        name: how reports call it.
        model: a hub name or a folder that `from_pretrained` reads (model and tokenizer).
        train: training prompts, a `datasets.Dataset`; columns `prompt` and `answer`.
        evaluation: held-out prompts; the same columns.
        layout: the blocks of a completion.
        max_completion_length: no completion that keeps the format needs more tokens.

    Example:
        >>> from datasets import Dataset
        >>> from spanwise.tasks import DIGITS_LAYOUT
        >>> rows = Dataset.from_dict({"prompt": ["2 + 2?"], "answer": ["4"]})
        >>> Task("sums", "my/model", rows, rows, DIGITS_LAYOUT, 64).layout.names
        ('solution', 'confidence')
    """

    name: str
    model: str
    train: Any
    evaluation: Any
    layout: Layout
    max_completion_length: int


def digits_task(
    start: Start | Fields,
    *,
    seed: int = 0,
    start_seed: int = 0,
    train_size: int,
    eval_size: int = HELD_OUT,
    cache_folder: str | Path | None = None,
    progress: Callable[[int, int, float], None] | None = None,
    settings: WarmStartSettings | None = None,
) -> Task:
    """An embedded task with its warm-started model: the smudged digit chain, or a JSON object of small answers.

    The evaluation prompts are the same for every seed; neither the training prompts nor the warm start contain any of the 512.

    Args:
        start: how good the warm start is, "twice" for two attempts, "long" for the long chain; see `warm_start`. `Fields` ask for a
            JSON object, and the column `answer` holds the gold object as text.
        seed: of the training prompts.
        start_seed: of the warm start; runs that differ only in `seed` share it.
        train_size: how many training prompts.
        eval_size: how many of the 512 evaluation prompts, from the first.
        cache_folder, progress, settings: see `warm_start`.

    Raises:
        DataError: `eval_size` is not in 1..512, `train_size` is below 1, or the cache cannot be written.
    """
    if train_size < 1:
        what = "The fields need" if isinstance(start, Fields) else "The digit chain needs"
        raise DataError(f"{what} at least 1 training prompt; train_size is {train_size}.")
    task = embedded(start)
    evaluation = task.source.held_out(eval_size)
    train = task.source.training(train_size, rng=np.random.default_rng([seed, 1]))
    return Task(
        task.name,
        str(warm_start(start, seed=start_seed, cache_folder=cache_folder, progress=progress, settings=settings)),
        _dataset(train.prompts, task.answers(train)),
        _dataset(evaluation.prompts, task.answers(evaluation)),
        task.layout,
        task.longest,
    )


def _dataset(prompts: list[str], answers: list[str]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def stated_confidences(text: list[BlockText], block: str, layout: Layout, *, tag: str = "confidence") -> torch.Tensor:
    """Stated confidences; NaN where none is stated, or it cannot be read."""
    stated = [(entry.get(block) or {}).get(tag) if tag in layout.keys[block] else None for entry in text]
    values = [None if one is None else parse_confidence(one) for one in stated]
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
