"""The embedded tasks: where their problems come from, the shape of a completion, and what their models learned before.

A warm start is a `Course`: stretches of training on noisy traces, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.layout import Layout
from spanwise.tasks.digits import DIGITS, DIGITS_LAYOUT, NOISE, noisy_traces
from spanwise.tasks.digits_long import LONG, LONG_LAYOUT, LONG_NOISE, LONG_POSITIONS, LONGEST, long_traces, tables
from spanwise.tasks.digits_twice import TWICE_LAYOUT, TWICE_NOISE, twice_traces
from spanwise.tasks.fields import FIELDS_NOISE, Fields
from spanwise.tasks.problems import Source
from spanwise.tasks.tiny import END, PAD, build_fields_tokenizer, build_tokenizer

#: Prompts, none of them held out, and what is written behind them.
Pairs = list[tuple[str, str]]
#: The warm starts of the digit chain.
Start = Literal["easy", "hard", "twice", "long"]


@dataclass(frozen=True)
class Stretch:
    """One stretch of training; without `learned` the model learns all tokens behind the prompts."""

    name: str
    place: int  # seeds its traces
    noise: Any  # a dataclass: part of what the cache knows a model by
    draw: Callable[[int, np.random.Generator], Pairs]
    learned: Callable[[Int[Tensor, "n t"], dict[str, int]], Bool[Tensor, "n t"]] | None = None

    def batch(self, tokenizer: Any, size: int, rng: np.random.Generator) -> tuple[Int[Tensor, "n t"], int]:
        """Token ids of noisy traces, prompt included and padded on the right, and how many tokens every prompt has."""
        pairs = self.draw(size, rng)
        texts = [f"{prompt}{trace}{END}" for prompt, trace in pairs]
        ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
        return ids_nt, len(tokenizer(pairs[0][0])["input_ids"])

    def imitated(self, tokenizer: Any, ids_nt: Int[Tensor, "n t"], prompt_length: int) -> Int[Tensor, "n c"]:
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


@dataclass(frozen=True)
class Embedded:
    """A task that brings its own problems and a model that has learned its form."""

    name: str
    layout: Layout
    longest: int  # tokens of a completion that keeps the format
    source: Source[Any]
    course: Course
    answers: Callable[[Any], list[str]] = attrgetter("answers")


def _course(
    first: int,
    noises: Mapping[str, Any],
    source: Source[Any],
    traces: Callable[..., list[str]],
    *,
    share: int = 1,
    **model: Any,
) -> Course:
    """A stretch for each noise, whose places begin with `first`; a step takes one in `share` of the traces asked for."""

    def stretch(place: int, name: str, noise: Any) -> Stretch:
        def draw(size: int, rng: np.random.Generator) -> Pairs:
            problems = source.training(size // share or 1, rng=rng)
            return list(zip(problems.prompts, traces(problems, noise, rng=rng), strict=True))

        return Stretch(name, place, noise, draw)

    return Course(tuple(stretch(place, *entry) for place, entry in enumerate(noises.items(), first)), **model)


def _long_course() -> Course:
    """Arithmetic alone, of which the model learns nothing but what a step leads to; then long traces."""
    noises = dict(LONG_NOISE)
    exercises = Stretch(
        "long_tables", 6, noises.pop("long_tables"), lambda size, rng: tables(4 * size, rng=rng),
        lambda ids_nt, ids: ids_nt.roll(1, dims=1) == ids["="],
    )  # fmt: skip
    traces = _course(7, noises, LONG, long_traces, share=2)  # half as many long chains as there are short ones in a step
    return Course((exercises, *traces.stretches), shape={"layers": 3, "positions": LONG_POSITIONS})


_HARD = _course(0, NOISE, DIGITS, noisy_traces)
#: 4 and 5 are the places of another warm start (benchmarks/agent_start.py).
_TWICE = _course(2, TWICE_NOISE, DIGITS, twice_traces)
STARTS: Mapping[Start, Embedded] = {
    "easy": Embedded("digits-easy", DIGITS_LAYOUT, 32, DIGITS, Course(_HARD.stretches[:1])),
    "hard": Embedded("digits-hard", DIGITS_LAYOUT, 32, DIGITS, _HARD),
    "twice": Embedded("digits-twice", TWICE_LAYOUT, 32, DIGITS, _TWICE),
    "long": Embedded("digits-long", LONG_LAYOUT, LONGEST, LONG, _long_course()),
}


def embedded(task: Start | Fields) -> Embedded:
    """An embedded task by its start, or by its fields; every kind and number of fields has a warm start of its own."""
    if not isinstance(task, Fields):
        return STARTS[task]
    course = _course(
        9, FIELDS_NOISE, task.source, task.traces, tokenizer=build_fields_tokenizer, shape={"width": 64, "heads": 2},
        folder=f"{{}}-{task.kind}-{task.count}", key={"fields": {"kind": task.kind, "count": task.count}},
    )  # fmt: skip
    return Embedded(f"fields-{task.kind}-{task.count}", task.layout, task.longest, task.source, course, task.answers)
