"""Let a model talk to many environments at once, with a rollout function for TRL that does so.

An environment opens a conversation, answers the model's turns and describes each turn. `Episode` in chain_agent.py is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from spanwise.modes.sequences import left_padded
from spanwise.step import TURNS

#: What models call their cache: `cache` from transformers 5.24 on.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class Environment(Protocol):
    """Open a conversation, answer every reply, and describe each turn for credit."""

    @property
    def opening(self) -> str:
        """Return the text that the model sees first."""
        ...

    def reply(self, text: str) -> str | None:
        """Take the model's turn and return the answer; None if the conversation is over."""
        ...

    @property
    def turns(self) -> Sequence[Mapping[str, Any]]:
        """Return one mapping per turn: its `anchor` (the state it started from) and the columns that rewards read."""
        ...


@dataclass
class Conversation:
    """Hold one conversation as one sequence of tokens.

    Attributes:
        prompt_ids: tokens of the opening.
        completion_ids: all later tokens, those of the environment included.
        env_mask: 1 at each token that the model wrote, 0 at the environment's tokens.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)


@torch.no_grad()
def play(
    model: Any, tokenizer: Any, environments: Sequence[Environment], *, max_turn_tokens: int, temperature: float = 1.0
) -> list[Conversation]:
    """Let a model talk to many environments at once.

    A turn ends with the end-of-sequence token or after `max_turn_tokens` tokens. Each conversation grows by one token per step,
    sampled by the model or taken from the environment's answer. So all conversations share one cache. Sampling uses the global
    random state, as `generate` of transformers does.
    """
    talks = [_Talk(environment, tokenizer, max_turn_tokens) for environment in environments]
    training, end = model.training, int(tokenizer.eos_token_id)
    starts = [talk.conversation.prompt_ids for talk in talks]
    ids_nt, attention_nt = left_padded(starts, end, model.device)
    cache: Any = None
    active = list(talks)
    model.eval()
    try:
        while active:
            position_nt = (attention_nt.cumsum(dim=1) - 1).clamp(min=0)[:, -ids_nt.shape[1] :]
            inputs = {"input_ids": ids_nt, "attention_mask": attention_nt, "position_ids": position_nt, CACHE: cache}
            output = model(**inputs, use_cache=True)
            cache = output[CACHE]
            probability_nv = (output.logits[:, -1].float() / temperature).softmax(dim=-1)
            tokens = torch.multinomial(probability_nv, 1)[:, 0].tolist()
            for talk, token in zip(active, tokens, strict=True):
                talk.take(token, end)
            active_rows = torch.tensor([row for row, talk in enumerate(active) if not talk.over], dtype=torch.long)
            if len(active_rows) < len(active):
                active = [active[row] for row in active_rows]
                active_rows = active_rows.to(model.device)
                cache.batch_select_indices(active_rows)
                attention_nt = attention_nt[active_rows]
            ids_nt = torch.tensor([[talk.conversation.completion_ids[-1]] for talk in active], device=model.device)
            attention_nt = torch.nn.functional.pad(attention_nt, (0, 1), value=1)
    finally:
        model.train(training)
    return [talk.conversation for talk in talks]


class _Talk:
    """Keep the state of a conversation that is not over."""

    def __init__(self, environment: Environment, tokenizer: Any, max_turn_tokens: int) -> None:
        self.environment, self.tokenizer, self.max_turn_tokens = environment, tokenizer, max_turn_tokens
        self.conversation = Conversation(self._encode(environment.opening))
        self.turn: list[int] = []
        self.unread: list[int] = []  # tokens of the environment that the model has not read yet
        self.over = False

    def take(self, token: int, end: int) -> None:
        """Append the environment's next unread token; append the sampled token if there is none."""
        sampled = not self.unread
        token = token if sampled else self.unread.pop(0)
        self.conversation.completion_ids.append(token)
        self.conversation.env_mask.append(int(sampled))
        if not sampled:
            return
        self.turn.append(token)
        if token == end or len(self.turn) == self.max_turn_tokens:
            answer = self.environment.reply(self.tokenizer.decode(self.turn, skip_special_tokens=True))
            self.turn, self.over = [], answer is None
            self.unread = [] if answer is None else self._encode(answer)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def rollout_function(
    make_environment: Callable[[Any], Environment], *, max_turn_tokens: int
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """Return a rollout function for TRL that plays one conversation for each prompt."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        environments = [make_environment(prompt) for prompt in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        options = {"max_turn_tokens": max_turn_tokens, "temperature": trainer.temperature}
        conversations = play(model, trainer.processing_class, environments, **options)
        return {
            "prompt_ids": [conversation.prompt_ids for conversation in conversations],
            "completion_ids": [conversation.completion_ids for conversation in conversations],
            "logprobs": None,
            "env_mask": [conversation.env_mask for conversation in conversations],
            TURNS: [list(environment.turns) for environment in environments],
        }

    return rollout
