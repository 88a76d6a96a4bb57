"""Sample completions with `transformers` for evaluation, outside of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig

from spanwise.modes.sequences import left_padded

#: The most new tokens in one sampled batch. An 8B model's KV cache takes 128 KB per token, so 17 GB for 131,072 tokens.
TOKENS = 131_072


def sample(
    model: Any, tokenizer: Any, prompts: Sequence[Any], *, template: Mapping[str, Any] = {}, **options: Any
) -> tuple[Int[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Sample completions of prompts from a model. `prompt_ids` describes the prompts, and `continue_ids` the options."""
    return continue_ids(model, tokenizer, prompt_ids(tokenizer, prompts, template), **options)


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
    generation: Mapping[str, Any] = {},  # further options of `generate`, such as top_p
) -> tuple[Int[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Sample `samples` continuations of each list of token ids, as TRL samples. Restore the random state."""
    was_training = model.training
    end_token_ids = torch.tensor(end_ids(model, tokenizer))
    # Set every default, because `generate` takes missing options from the model's own configuration.
    sampling_options: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "temperature": temperature}
    sampling_options |= {"max_new_tokens": max_new_tokens, "eos_token_id": end_token_ids.tolist(), "do_sample": True}
    sampling_options |= {"pad_token_id": tokenizer.pad_token_id, "disable_compile": True, **generation}
    repeated_prefixes = [prefix for prefix in prefixes for _ in range(samples)]
    max_chunk_size = max(1, TOKENS // max_new_tokens)
    chunk_size = min(max(1, batch_size // samples) * samples, max_chunk_size // samples * samples or max_chunk_size)
    continuations = []
    model.eval()
    try:
        with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            torch.manual_seed(seed)
            for start in range(0, len(repeated_prefixes), chunk_size):
                prefix_chunk = repeated_prefixes[start : start + chunk_size]
                padded_ids_nl, attention_mask_nl = left_padded(prefix_chunk, int(tokenizer.pad_token_id), model.device)
                generated_ids = model.generate(
                    input_ids=padded_ids_nl,
                    attention_mask=attention_mask_nl,
                    generation_config=GenerationConfig(**sampling_options),
                )
                continuations.append(generated_ids[:, padded_ids_nl.shape[1] :].cpu())
    finally:
        model.train(was_training)
    max_length = max(output.shape[1] for output in continuations)
    pad_id = int(end_token_ids[0])
    ids_nt = torch.cat([pad(output, (0, max_length - output.shape[1]), value=pad_id) for output in continuations])
    is_end_nt = torch.isin(ids_nt, end_token_ids).long()
    end_count_before_nt = is_end_nt.cumsum(dim=1) - is_end_nt
    return ids_nt, end_count_before_nt == 0  # padding follows the first end token


def prompt_ids(tokenizer: Any, prompts: Sequence[Any], template: Mapping[str, Any] = {}) -> list[list[int]]:
    """Return the token ids of each prompt, a string or a list of messages. `template` holds options of the chat template."""
    return [
        tokenizer(prompt)["input_ids"]
        if isinstance(prompt, str)
        else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **template)["input_ids"]
        for prompt in prompts
    ]


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids of the model's and the tokenizer's end tokens. In TRL, too, either of them ends a completion."""
    model_end_ids = model.generation_config.eos_token_id
    model_end_ids = model_end_ids if isinstance(model_end_ids, list) else [model_end_ids]
    return [end_id for end_id in dict.fromkeys([*model_end_ids, tokenizer.eos_token_id]) if end_id is not None]
