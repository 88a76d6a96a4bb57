"""`Task`: everything a training run needs to know about what it trains on; `digits_task`, `fields_task`: the embedded ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spanwise.errors import DataError
from spanwise.layout import Layout
from spanwise.score import parse_confidence
from spanwise.tasks.digits import DIGITS_LAYOUT, HELD_OUT, draw_problems, held_out_problems, held_out_prompts
from spanwise.tasks.digits_long import (
    LONG_LAYOUT,
    LONGEST,
    draw_long_problems,
    held_out_long_problems,
    held_out_long_prompts,
)
from spanwise.tasks.digits_twice import TWICE_LAYOUT
from spanwise.tasks.fields import (
    Fields,
    draw_field_problems,
    field_answers,
    held_out_field_problems,
    held_out_field_prompts,
)
from spanwise.tasks.warm_start import Start, WarmStartSettings, warm_start
from spanwise.types import BlockText

if TYPE_CHECKING:
    from datasets import Dataset
else:
    Dataset = Any  # the name must exist for runtime type checkers


#: The blocks of the digit chains, by the task's name in recipes.
CHAIN_LAYOUTS: Mapping[str, Layout] = {"digits": DIGITS_LAYOUT, "digits_twice": TWICE_LAYOUT, "digits_long": LONG_LAYOUT}


@dataclass(frozen=True)
class Task:
    """A model to start from, prompts with answers, and the shape of a completion.

    Args:
        name: how reports call it.
        model: a hub name or a folder that `from_pretrained` reads (model and tokenizer).
        train: training prompts; columns `prompt` and `answer`.
        evaluation: held-out prompts; the same columns.
        layout: the blocks of a completion.
        max_completion_length: no completion that keeps the format needs more tokens.
        generation: sampling options for training and evaluation.

    Example:
        >>> from datasets import Dataset
        >>> from spanwise.tasks import DIGITS_LAYOUT
        >>> rows = Dataset.from_dict({"prompt": ["2 + 2?"], "answer": ["4"]})
        >>> Task("sums", "my/model", rows, rows, DIGITS_LAYOUT, 64).generation["temperature"]
        1.0
    """

    name: str
    model: str
    train: Dataset
    evaluation: Dataset
    layout: Layout
    max_completion_length: int
    generation: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 1.0, "top_p": 1.0, "top_k": 0})


def digits_task(
    start: Start,
    *,
    seed: int = 0,
    start_seed: int = 0,
    train_size: int,
    eval_size: int = HELD_OUT,
    cache_folder: str | Path | None = None,
    progress: Callable[[int, int, float], None] | None = None,
    settings: WarmStartSettings | None = None,
) -> Task:
    """The smudged digit chain with its warm-started model.

    The evaluation prompts are the same for every seed; neither the training prompts nor the warm start contain any of the 512.

    Args:
        start: how good the warm start is, "twice" for two attempts, "long" for the long chain; see `warm_start`.
        seed: of the training prompts.
        start_seed: of the warm start; runs that differ only in `seed` share it.
        train_size: how many training prompts.
        eval_size: how many of the 512 evaluation prompts, from the first.
        cache_folder, progress, settings: see `warm_start`.

    Raises:
        DataError: `eval_size` is not in 1..512, `train_size` is below 1, or the cache cannot be written.
    """
    if train_size < 1:
        raise DataError(f"The digit chain needs at least 1 training prompt; train_size is {train_size}.")
    rng = np.random.default_rng([seed, 1])
    if start == "long":
        evaluation = held_out_long_problems(eval_size)
        train = draw_long_problems(train_size, rng=rng, exclude=held_out_long_prompts())
    else:
        evaluation = held_out_problems(eval_size)
        train = draw_problems(train_size, rng=rng, exclude=held_out_prompts())
    return Task(
        f"digits-{start}",
        str(warm_start(start, seed=start_seed, cache_folder=cache_folder, progress=progress, settings=settings)),
        _dataset(train.prompts, train.answers),
        _dataset(evaluation.prompts, evaluation.answers),
        CHAIN_LAYOUTS.get(f"digits_{start}", DIGITS_LAYOUT),
        LONGEST if start == "long" else 32,
    )


def fields_task(
    fields: Fields,
    *,
    seed: int = 0,
    start_seed: int = 0,
    train_size: int,
    eval_size: int = HELD_OUT,
    cache_folder: str | Path | None = None,
    progress: Callable[[int, int, float], None] | None = None,
    settings: WarmStartSettings | None = None,
) -> Task:
    """JSON objects of small answers with their warm-started model; the column `answer` holds the gold object as text.

    The evaluation prompts are the same for every seed; neither the training prompts nor the warm start contain any of the 512.

    Args:
        fields: kind and number.
        seed, start_seed, train_size, eval_size, cache_folder, progress, settings: see `digits_task`.

    Raises:
        DataError: see `digits_task`.
    """
    if train_size < 1:
        raise DataError(f"The fields need at least 1 training prompt; train_size is {train_size}.")
    evaluation = held_out_field_problems(fields.kind, eval_size)
    rng = np.random.default_rng([seed, 1])
    train = draw_field_problems(train_size, fields.kind, rng=rng, exclude=held_out_field_prompts(fields.kind))
    return Task(
        f"fields-{fields.kind}-{fields.count}",
        str(warm_start(fields, seed=start_seed, cache_folder=cache_folder, progress=progress, settings=settings)),
        _dataset(train.prompts, field_answers(train, fields)),
        _dataset(evaluation.prompts, field_answers(evaluation, fields)),
        fields.layout,
        fields.longest,
    )


def _dataset(prompts: list[str], answers: list[str]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": prompts, "answer": answers})


def stated_confidences(text: list[BlockText], block: str, layout: Layout, *, tag: str = "confidence") -> torch.Tensor:
    """Stated confidences; NaN where none is stated, or it cannot be read."""
    stated = [(entry.get(block) or {}).get(tag) if tag in layout.keys[block] else None for entry in text]
    values = [None if one is None else parse_confidence(one) for one in stated]
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
