"""Sampling completions with `transformers` outside of training: what evaluation looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@torch.no_grad()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Any],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 512,
) -> tuple[Int[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Sample completions, `samples` of each prompt next to each other, without touching the training's random state.

    Args:
        model: a causal language model; its training mode is restored.
        tokenizer: pads on the left while it is used here.
        prompts: strings, or message lists for a tokenizer with a chat template.
        samples: completions per prompt.
        max_new_tokens: longest completion.
        temperature: of the plain softmax; neither top-k nor top-p is applied.
        seed: of the sampling.
        batch_size: completions generated at a time.

    Returns:
        ids (right-padded) and a mask that ends with the first end-of-sequence token.
    """
    batches = (_encode(tokenizer, batch) for batch in _batches(prompts, max(1, batch_size // samples)))
    return _generate(model, tokenizer, batches, samples, max_new_tokens, temperature, seed)


@torch.no_grad()
def continue_ids(
    model: Any,
    tokenizer: Any,
    prefixes: Sequence[Sequence[int]],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    batch_size: int = 512,
) -> tuple[Int[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Sample continuations of token ids, `samples` of each prefix next to each other; for the rest as `sample`.

    Args:
        prefixes: token ids of everything before the continuation, the prompt included; any lengths, none of them empty.
        model, tokenizer, samples, max_new_tokens, temperature, seed, batch_size: see `sample`.

    Returns:
        ids and mask of what was added, as in `sample`.
    """
    pad = int(tokenizer.pad_token_id)
    batches = (_pad_left(batch, pad) for batch in _batches(prefixes, max(1, batch_size // samples)))
    return _generate(model, tokenizer, batches, samples, max_new_tokens, temperature, seed)


def prompt_ids(tokenizer: Any, prompts: Sequence[Any]) -> list[list[int]]:
    """The token ids `sample` starts from: those of each string, or of each message list in the tokenizer's chat template."""
    encoded = [_encode(tokenizer, [prompt])["input_ids"][0] for prompt in prompts]
    return [ids.tolist() for ids in encoded]


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """The token ids that end a completion."""
    ends = model.generation_config.eos_token_id
    return list(ends) if isinstance(ends, list) else [int(tokenizer.eos_token_id if ends is None else ends)]


def _generate(
    model: Any,
    tokenizer: Any,
    batches: Iterator[Mapping[str, Tensor]],
    samples: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> tuple[Int[Tensor, "n t"], Bool[Tensor, "n t"]]:
    training, side = model.training, tokenizer.padding_side
    ends = torch.tensor(end_ids(model, tokenizer))
    chunks = []
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        model.eval()
        tokenizer.padding_side = "left"
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            for batch in batches:
                inputs = {name: column.to(model.device) for name, column in batch.items()}
                output = model.generate(
                    **inputs,
                    do_sample=True,
                    temperature=temperature,
                    top_k=0,
                    top_p=1.0,
                    num_return_sequences=samples,
                    max_new_tokens=max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                    disable_compile=True,
                )
                chunks.append(output[:, inputs["input_ids"].shape[1] :].cpu())
    finally:
        model.train(training)
        tokenizer.padding_side = side
    width = max(chunk.shape[1] for chunk in chunks)
    ids_nt = torch.cat([torch.nn.functional.pad(chunk, (0, width - chunk.shape[1]), value=int(ends[0])) for chunk in chunks])
    ended_nt = torch.isin(ids_nt, ends).cumsum(dim=1)
    # A token counts until, and with, the first end; what generate pads with comes after it.
    mask_nt = torch.cat([torch.ones_like(ended_nt[:, :1]), (ended_nt[:, :-1] == 0).long()], dim=1).bool()
    return ids_nt, mask_nt


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def _pad_left(prefixes: Sequence[Sequence[int]], pad: int) -> dict[str, Tensor]:
    width = max(len(prefix) for prefix in prefixes)
    ids = [[pad] * (width - len(prefix)) + list(prefix) for prefix in prefixes]
    mask = [[0] * (width - len(prefix)) + [1] * len(prefix) for prefix in prefixes]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def _encode(tokenizer: Any, prompts: Sequence[Any]) -> Any:
    if isinstance(prompts[0], str):
        return tokenizer(list(prompts), return_tensors="pt", padding=True, return_token_type_ids=False)
    return tokenizer.apply_chat_template(
        list(prompts), add_generation_prompt=True, return_tensors="pt", padding=True, return_dict=True
    )
