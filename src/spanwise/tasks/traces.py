"""Noisy traces of every embedded task as token ids: what a warm start is trained on, and which of their tokens it imitates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.tasks.agent import AGENT_NOISE, AgentNoise, AgentPart, draw_chains, held_out_chains, noisy_talk
from spanwise.tasks.digits import NOISE, Difficulty, TraceNoise, draw_problems, held_out_prompts, noisy_traces
from spanwise.tasks.digits_long import (
    LONG_NOISE,
    LongNoise,
    LongPart,
    draw_long_problems,
    held_out_long_prompts,
    long_traces,
    tables,
)
from spanwise.tasks.digits_twice import TWICE_NOISE, TwiceNoise, TwicePart, twice_traces
from spanwise.tasks.fields import (
    FIELDS_NOISE,
    Fields,
    FieldsNoise,
    FieldsPart,
    draw_field_problems,
    field_traces,
    held_out_field_prompts,
)
from spanwise.tasks.tiny import END, PAD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
else:
    PreTrainedTokenizerFast = Any  # the name must exist for runtime type checkers

#: A stretch of training.
Part = Difficulty | TwicePart | AgentPart | LongPart | FieldsPart
# New parts go to the end: a part's place seeds its traces.
ALL_NOISE: dict[Part, TraceNoise | TwiceNoise | AgentNoise | LongNoise | FieldsNoise] = {
    **NOISE,
    **TWICE_NOISE,
    **AGENT_NOISE,
    **LONG_NOISE,
    **FIELDS_NOISE,
}


def trace_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, *, part: Part, rng: np.random.Generator, fields: Fields | None = None
) -> tuple[Int[Tensor, "n t"], int]:
    """Token ids of `size` noisy traces, prompt included and padded on the right, and how many tokens every prompt has.

    No held-out prompt is among them. `fields` says which fields, where the part is one of theirs.
    """
    if part == "agent_early" or part == "agent":
        return _talk_batch(tokenizer, size, AGENT_NOISE[part], rng)
    if part == "long_tables" or part == "long_early" or part == "long":
        return _batch(tokenizer, _long_pairs(size, part, rng))
    if part == "fields_early" or part == "fields":
        fields = fields or Fields()
        drawn = draw_field_problems(size, fields.kind, rng=rng, exclude=held_out_field_prompts(fields.kind))
        return _batch(tokenizer, _pairs(drawn.prompts, field_traces(drawn, fields, FIELDS_NOISE[part], rng=rng)))
    problems = draw_problems(size, rng=rng, exclude=held_out_prompts())
    if part == "twice_early" or part == "twice":
        traces = twice_traces(problems, TWICE_NOISE[part], rng=rng)
    else:
        traces = noisy_traces(problems, NOISE[part], rng=rng)
    return _batch(tokenizer, _pairs(problems.prompts, traces))


def imitated(
    tokenizer: PreTrainedTokenizerFast, ids_nt: Int[Tensor, "n t"], prompt_length: int, *, part: Part
) -> Int[Tensor, "n c"]:
    """The tokens behind the prompts, with padding in place of those that are not learned."""
    ids = tokenizer.get_vocab()
    imitated_nt = ids_nt[:, prompt_length:]
    if part in AGENT_NOISE:  # not what the environment says
        shown = torch.tensor([index for word, index in ids.items() if word[0] in "+-*="])
        return imitated_nt.masked_fill(torch.isin(imitated_nt, shown), ids[PAD])
    if part == "long_tables":  # nothing but what a step leads to
        return imitated_nt.masked_fill(ids_nt[:, prompt_length - 1 : -1] != ids["="], ids[PAD])
    return imitated_nt


def _pairs(prompts: list[str], traces: list[str]) -> list[tuple[str, str]]:
    return list(zip(prompts, traces, strict=True))


def _batch(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> tuple[Int[Tensor, "n t"], int]:
    texts = [f"{prompt}{trace}{END}" for prompt, trace in pairs]
    ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    return ids_nt, len(tokenizer(pairs[0][0])["input_ids"])


def _long_pairs(size: int, part: LongPart, rng: np.random.Generator) -> list[tuple[str, str]]:
    """Exercises, or half as many long traces as there are short ones in a step."""
    if part == "long_tables":
        return tables(4 * size, rng=rng)
    problems = draw_long_problems(size // 2 or 1, rng=rng, exclude=held_out_long_prompts())
    return _pairs(problems.prompts, long_traces(problems, LONG_NOISE[part], rng=rng))


def _talk_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, noise: AgentNoise, rng: np.random.Generator
) -> tuple[Int[Tensor, "n t"], int]:
    held_out = frozenset(chain.prompt for chain in held_out_chains())
    chains = draw_chains(size, rng=rng, exclude=held_out)
    talks = [noisy_talk(chain, noise, rng=rng) for chain in chains]
    texts = ["".join(f"{shown}{reply}{END}" for shown, reply in talk) for talk in talks]
    ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    return ids_nt, len(tokenizer(f"{chains[0].start}{chains[0].steps[0]}=")["input_ids"])
