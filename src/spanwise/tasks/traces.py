"""Noisy traces of every embedded task as token ids: what a warm start is trained on, and which of their tokens it imitates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from spanwise.tasks.agent import AGENT_NOISE, AgentNoise, draw_chains, held_out_chains, noisy_talk
from spanwise.tasks.digits import NOISE, TraceNoise, draw_problems, held_out_prompts, noisy_traces
from spanwise.tasks.digits_long import LONG_NOISE, LongNoise, draw_long_problems, held_out_long_prompts, long_traces, tables
from spanwise.tasks.digits_twice import TWICE_NOISE, TwiceNoise, twice_traces
from spanwise.tasks.fields import (
    FIELDS_NOISE,
    Fields,
    FieldsNoise,
    draw_field_problems,
    field_traces,
    held_out_field_prompts,
)
from spanwise.tasks.tiny import END, PAD

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
else:
    PreTrainedTokenizerFast = Any  # the name must exist for runtime type checkers

#: The stretches of training by name. New ones go to the end: the place of one seeds its traces.
ALL_NOISE: dict[str, TraceNoise | TwiceNoise | AgentNoise | LongNoise | FieldsNoise] = {
    **NOISE,
    **TWICE_NOISE,
    **AGENT_NOISE,
    **LONG_NOISE,
    **FIELDS_NOISE,
}


def trace_batch(
    tokenizer: PreTrainedTokenizerFast, size: int, *, part: str, rng: np.random.Generator, fields: Fields | None = None
) -> tuple[Int[Tensor, "n t"], int]:
    """Token ids of `size` noisy traces, prompt included and padded on the right, and how many tokens every prompt has."""
    pairs = _pairs(size, part, rng, fields or Fields())
    texts = [f"{prompt}{trace}{END}" for prompt, trace in pairs]
    ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    return ids_nt, len(tokenizer(pairs[0][0])["input_ids"])


def _pairs(size: int, part: str, rng: np.random.Generator, fields: Fields) -> list[tuple[str, str]]:
    """Prompts and what is written behind them; no held-out prompt is among them."""
    noise = ALL_NOISE[part]
    if isinstance(noise, AgentNoise):
        return _talks(size, noise, rng)
    if part == "long_tables":
        return tables(4 * size, rng=rng)
    if isinstance(noise, LongNoise):  # half as many long traces as there are short ones in a step
        problems = draw_long_problems(size // 2 or 1, rng=rng, exclude=held_out_long_prompts())
        traces = long_traces(problems, noise, rng=rng)
    elif isinstance(noise, FieldsNoise):
        problems = draw_field_problems(size, fields.kind, rng=rng, exclude=held_out_field_prompts(fields.kind))
        traces = field_traces(problems, fields, noise, rng=rng)
    elif isinstance(noise, TwiceNoise):
        problems = draw_problems(size, rng=rng, exclude=held_out_prompts())
        traces = twice_traces(problems, noise, rng=rng)
    else:
        problems = draw_problems(size, rng=rng, exclude=held_out_prompts())
        traces = noisy_traces(problems, noise, rng=rng)
    return list(zip(problems.prompts, traces, strict=True))


def _talks(size: int, noise: AgentNoise, rng: np.random.Generator) -> list[tuple[str, str]]:
    """What a conversation begins with, and all of it behind that."""
    held_out = frozenset(chain.prompt for chain in held_out_chains())
    chains = draw_chains(size, rng=rng, exclude=held_out)
    talks = (END.join(f"{shown}{reply}" for shown, reply in noisy_talk(chain, noise, rng=rng)) for chain in chains)
    openings = (f"{chain.start}{chain.steps[0]}=" for chain in chains)
    return [(opening, talk.removeprefix(opening)) for opening, talk in zip(openings, talks, strict=True)]


def imitated(
    tokenizer: PreTrainedTokenizerFast, ids_nt: Int[Tensor, "n t"], prompt_length: int, *, part: str
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
