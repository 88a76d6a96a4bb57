"""Walks whose states an environment writes: the policy chooses the moves, and no state can be false.

The environment speaks inside the sampling loop: behind the last number of a countdown it gives the state that follows all
probability. Its tokens are masked, as those of a tool are: the critic reads them, and nothing trains on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from walk_task import MOVES, STATES, STEP

from spanwise.engines.sample import continue_ids, prompt_ids
from spanwise.engines.trl import SpanGRPOTrainer

#: The token that ends a countdown; the environment's turn follows.
LAST_COUNT = "(1)"


class StateWriter(LogitsProcessor):
    """Leaves one token possible behind each countdown: the state that follows from the last state and the last move."""

    def __init__(self, tokenizer: Any) -> None:
        ids = tokenizer.get_vocab()
        self.last_count = ids[LAST_COUNT]
        self.state_by_id = {ids[str(state)]: state for state in range(STATES)}
        self.move_by_id = {ids[move]: number for number, move in enumerate(MOVES)}
        self.id_by_state = {state: index for index, state in self.state_by_id.items()}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of the next tokens, with the environment's where it is its turn."""
        for row in torch.nonzero(input_ids[:, -1] == self.last_count).flatten().tolist():
            scores[row] = -torch.inf
            scores[row, self.id_by_state[self.state_after(input_ids[row].tolist())]] = 0.0
        return scores

    def state_after(self, ids: list[int]) -> int:
        """Return the state that follows a text, whose last line may lack it."""
        state, move = 0, None
        for index in ids:
            if index in self.state_by_id:
                state, move = self.state_by_id[index], None
            elif index in self.move_by_id:
                move = self.move_by_id[index]
        return state if move is None else int(STEP[state, move])

    def env_mask(self, ids: Sequence[int]) -> list[int]:
        """Return 1 for each token of a completion that the policy wrote, and 0 for each of the environment."""
        return [int(place == 0 or ids[place - 1] != self.last_count) for place in range(len(ids))]


def tell(model: Any, tokenizer: Any) -> None:
    """Let the environment write the states in all that a model generates."""
    generate, writer = model.generate, StateWriter(tokenizer)
    model.generate = lambda **more: generate(**more, logits_processor=[writer])


class ToldTrainer(SpanGRPOTrainer):
    """The trainer with the environment in every generation, those of evaluations among them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, rollout_func=_rollout)
        tell(self.accelerator.unwrap_model(self.model), self.processing_class)


def _rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Sample one walk for each prompt."""
    tokenizer, longest = trainer.processing_class, trainer.args.max_completion_length
    prefixes, writer = prompt_ids(tokenizer, prompts), StateWriter(tokenizer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    seed = int(torch.randint(2**31, ()))
    ids_nt, mask_nt = continue_ids(model, tokenizer, prefixes, samples=1, max_new_tokens=longest, seed=seed)
    completions = [ids[mask].tolist() for ids, mask in zip(ids_nt, mask_nt, strict=True)]
    return {
        "prompt_ids": prefixes,
        "completion_ids": completions,
        "logprobs": None,
        "env_mask": [writer.env_mask(ids) for ids in completions],
    }
