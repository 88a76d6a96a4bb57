"""Conversations of a model with environments, many at once; and a rollout function for TRL that plays them.

An environment begins a conversation, answers the model's turns and says what each turn was, as `Episode` of chain_agent.py does.
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
    """How a conversation begins, an answer to every reply (None where it is over), and what credit needs of each turn."""

    @property
    def opening(self) -> str:
        """What the model sees first."""
        ...

    def reply(self, text: str) -> str | None:
        """Take the model's turn."""
        ...

    @property
    def turns(self) -> Sequence[Mapping[str, Any]]:
        """One mapping per turn: its `anchor` (the state it started from), and whatever rewards read of it."""
        ...


@dataclass
class Played:
    """One conversation as one sequence.

    Attributes:
        prompt_ids: what the model saw first.
        completion_ids: all that followed, the environment's part included.
        env_mask: 1 at each token that the model wrote, 0 at the environment's.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)


@torch.no_grad()
def play(
    model: Any, tokenizer: Any, environments: Sequence[Environment], *, max_turn_tokens: int, temperature: float = 1.0
) -> list[Played]:
    """Let a model talk to many environments at once; a turn ends with the end-of-sequence token or at its longest.

    Every conversation grows by one token at a time, sampled in a turn and given between turns, so that all share one cache and
    nothing is read twice. The global random state is used, as `generate` of transformers does.

    """
    talks = [_Talk(environment, tokenizer, max_turn_tokens) for environment in environments]
    training, end = model.training, int(tokenizer.eos_token_id)
    starts = [talk.played.prompt_ids for talk in talks]
    ids_nt, seen_nt = left_padded(starts, end, model.device)
    cache: Any = None
    active = list(talks)
    model.eval()
    try:
        while active:
            position_nt = (seen_nt.cumsum(dim=1) - 1).clamp(min=0)[:, -ids_nt.shape[1] :]
            inputs = {"input_ids": ids_nt, "attention_mask": seen_nt, "position_ids": position_nt, CACHE: cache}
            output = model(**inputs, use_cache=True)
            cache = output[CACHE]
            chance_nv = (output.logits[:, -1].float() / temperature).softmax(dim=-1)
            drawn = torch.multinomial(chance_nv, 1)[:, 0].tolist()
            for talk, token in zip(active, drawn, strict=True):
                talk.take(token, end)
            going = torch.tensor([row for row, talk in enumerate(active) if not talk.over], dtype=torch.long)
            if len(going) < len(active):
                active = [active[row] for row in going]
                going = going.to(model.device)
                cache.batch_select_indices(going)
                seen_nt = seen_nt[going]
            ids_nt = torch.tensor([[talk.played.completion_ids[-1]] for talk in active], device=model.device)
            seen_nt = torch.nn.functional.pad(seen_nt, (0, 1), value=1)
    finally:
        model.train(training)
    return [talk.played for talk in talks]


class _Talk:
    """A conversation under way."""

    def __init__(self, environment: Environment, tokenizer: Any, max_turn_tokens: int) -> None:
        self.environment, self.tokenizer, self.longest = environment, tokenizer, max_turn_tokens
        self.played = Played(self._encode(environment.opening))
        self.turn: list[int] = []
        self.said: list[int] = []  # by the environment, and not yet read by the model
        self.over = False

    def take(self, token: int, end: int) -> None:
        """Go on by one token: the next one of the environment, else the one that was sampled."""
        written = not self.said
        token = token if written else self.said.pop(0)
        self.played.completion_ids.append(token)
        self.played.env_mask.append(int(written))
        if not written:
            return
        self.turn.append(token)
        if token == end or len(self.turn) == self.longest:
            answer = self.environment.reply(self.tokenizer.decode(self.turn, skip_special_tokens=True))
            self.turn, self.over = [], answer is None
            self.said = [] if answer is None else self._encode(answer)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def conversations(
    environment: Callable[[Any], Environment], *, max_turn_tokens: int
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """A rollout function for TRL that plays one conversation for each prompt."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        environments = [environment(prompt) for prompt in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        options = {"max_turn_tokens": max_turn_tokens, "temperature": trainer.temperature}
        played = play(model, trainer.processing_class, environments, **options)
        return {
            "prompt_ids": [one.prompt_ids for one in played],
            "completion_ids": [one.completion_ids for one in played],
            "logprobs": None,
            "env_mask": [one.env_mask for one in played],
            TURNS: [list(one.turns) for one in environments],
        }

    return rollout
