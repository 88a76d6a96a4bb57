"""What warm starts are made of: stretches of training on noisy traces of the embedded tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.tasks.digits import NOISE, EmbeddedProblems, draw_problems, held_out_prompts, noisy_traces
from spanwise.tasks.digits_long import (
    LONG_NOISE,
    LONG_POSITIONS,
    draw_long_problems,
    held_out_long_prompts,
    long_traces,
    tables,
)
from spanwise.tasks.digits_twice import TWICE_NOISE, twice_traces
from spanwise.tasks.fields import FIELDS_NOISE, Fields, draw_field_problems, field_traces, held_out_field_prompts
from spanwise.tasks.tiny import END, PAD, build_fields_tokenizer, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
else:
    PreTrainedTokenizerFast = Any  # the name must exist for runtime type checkers

#: Prompts, none of them held out, and what is written behind them.
Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Stretch:
    """One stretch of training."""

    name: str
    place: int  # seeds its traces
    noise: Any  # a dataclass: part of what the cache knows a model by
    draw: Callable[[int, np.random.Generator], Pairs]
    learned: Callable[[Int[Tensor, "n t"], dict[str, int]], Bool[Tensor, "n t"]] | None = (
        None  # None: all behind the prompts
    )

    def batch(
        self, tokenizer: PreTrainedTokenizerFast, size: int, rng: np.random.Generator
    ) -> tuple[Int[Tensor, "n t"], int]:
        """Token ids of noisy traces, prompt included and padded on the right, and how many tokens every prompt has."""
        pairs = self.draw(size, rng)
        texts = [f"{prompt}{trace}{END}" for prompt, trace in pairs]
        ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return ids_nt, len(tokenizer(pairs[0][0])["input_ids"])

    def imitated(
        self, tokenizer: PreTrainedTokenizerFast, ids_nt: Int[Tensor, "n t"], prompt_length: int
    ) -> Int[Tensor, "n c"]:
        """The tokens behind the prompts, with padding in place of those that are not learned."""
        ids = tokenizer.get_vocab()
        kept_nt = ids_nt if self.learned is None else torch.where(self.learned(ids_nt, ids), ids_nt, ids[PAD])
        return kept_nt[:, prompt_length:]


@dataclass(frozen=True)
class Course:
    """All stretches of a warm start, one after the other, and the model that is trained."""

    stretches: tuple[Stretch, ...]
    tokenizer: Callable[[], Any] = build_tokenizer
    shape: Mapping[str, int] = field(default_factory=dict)  # where the model is another one than that of the short chains
    folder: str = "digits-{}"
    key: Mapping[str, Any] = field(default_factory=dict)  # what else the weights depend on


def _stretch(
    name: str,
    place: int,
    noise: Any,
    problems: Callable[[int, np.random.Generator], EmbeddedProblems],
    traces: Callable[..., list[str]],
) -> Stretch:
    def draw(size: int, rng: np.random.Generator) -> Pairs:
        drawn = problems(size, rng)
        return list(zip(drawn.prompts, traces(drawn, noise, rng=rng), strict=True))

    return Stretch(name, place, noise, draw)


def _short(size: int, rng: np.random.Generator) -> EmbeddedProblems:
    return draw_problems(size, rng=rng, exclude=held_out_prompts())


def _long(size: int, rng: np.random.Generator) -> EmbeddedProblems:
    """Half as many long chains as there are short ones in a step."""
    return draw_long_problems(size // 2 or 1, rng=rng, exclude=held_out_long_prompts())


def _results(ids_nt: Int[Tensor, "n t"], ids: dict[str, int]) -> Bool[Tensor, "n t"]:
    """Nothing but what a step leads to."""
    return ids_nt.roll(1, dims=1) == ids["="]


_EASY = _stretch("easy", 0, NOISE["easy"], _short, noisy_traces)
_TABLES = Stretch("long_tables", 6, LONG_NOISE["long_tables"], lambda size, rng: tables(4 * size, rng=rng), _results)
#: The warm starts of the digit chain; 4 and 5 are the places of another one (benchmarks/agent_start.py).
COURSES: Mapping[str, Course] = {
    "easy": Course((_EASY,)),
    "hard": Course((_EASY, _stretch("hard", 1, NOISE["hard"], _short, noisy_traces))),
    "twice": Course((
        _stretch("twice_early", 2, TWICE_NOISE["twice_early"], _short, twice_traces),
        _stretch("twice", 3, TWICE_NOISE["twice"], _short, twice_traces),
    )),
    "long": Course((
        _TABLES,
        _stretch("long_early", 7, LONG_NOISE["long_early"], _long, long_traces),
        _stretch("long", 8, LONG_NOISE["long"], _long, long_traces),
    ), shape={"layers": 3, "positions": LONG_POSITIONS}),
}  # fmt: skip


def fields_course(fields: Fields) -> Course:
    """The warm start of some fields; every kind and number of fields has one of its own."""

    def problems(size: int, rng: np.random.Generator) -> EmbeddedProblems:
        return draw_field_problems(size, fields.kind, rng=rng, exclude=held_out_field_prompts(fields.kind))

    traces = partial(field_traces, fields=fields)
    return Course(
        tuple(_stretch(name, place, noise, problems, traces) for place, (name, noise) in enumerate(FIELDS_NOISE.items(), 9)),
        build_fields_tokenizer,
        {"width": 64, "heads": 2},
        f"{{}}-{fields.kind}-{fields.count}",
        {"fields": asdict(fields)},
    )
