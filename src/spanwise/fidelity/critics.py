"""The critics of token fidelity: the run's own, and one fitted on other prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.errors import DataError, RecipeError
from spanwise.fidelity.rerolls import FirstBlocks, Roller, make_seeds
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.value_model import ABOUT, Saved, ValueModel

#: How long the critic is fitted, in steps, each time it is looked at.
CRITIC_STEPS = (5, 25, 80)
#: Completions per step.
CRITIC_BATCH = 256
LEARNING_RATE = 1e-3


def own_critic_folder(model_folder: Path) -> Path | None:
    """The critic that was saved with a model: in a checkpoint, or beside the model of a run that has ended; None: there is none."""
    places = [model_folder / "critic", *([model_folder.parent / "critic"] if model_folder.name == "model" else [])]
    return next((place for place in places if (place / ABOUT).is_file()), None)


def own_critic(place: Path, tokenizer: Any, objectives: Sequence[str]) -> tuple[ValueModel, int]:
    """A saved critic as it is, and which of its values is that of being right; `objectives` are the rewards of the run, by name."""
    saved = Saved.of(place)
    if saved is None:
        raise DataError(f"There is no {ABOUT} in '{place}'.")
    names = saved.names
    alone = names[0] if len(names) == len(objectives) == 1 else "correct"
    if alone not in names:
        of = " + ".join(objectives) if len(names) == 1 else ", ".join(names)
        raise RecipeError(
            f"The critic '{place}' gives the value of {of}, and what is re-rolled is the reward 'correct' alone. Train with "
            "values: objective, or look at other critics: --critics fitted,mc."
        )
    return ValueModel.load(str(place), names, saved.config, tokenizer).eval(), names.index(alone)


@torch.no_grad()
def values(critic: ValueModel, blocks: FirstBlocks, *, stream: int = 0) -> Float[Tensor, "n t"]:
    """What a critic says before each token."""
    device = next(critic.parameters()).device
    return critic.value(critic(blocks.sequences(device)))[:, :-1, stream].cpu().double()


def fitted_critics(roller: Roller, rows: Any, *, steps: Sequence[int], seed: int) -> Iterator[tuple[int, ValueModel]]:
    """A critic fitted to the rewards of fresh completions, by mean squared error over tokens, after each of these numbers of steps.

    The head starts at the mean reward of the first batch. It is one critic: look at it before asking for the next.
    """
    batches = _batches(roller, rows, make_seeds(seed))
    first = next(batches)
    critic = ValueModel.of_policy(roller.model, ("return",), CriticConfig())
    trunk = {id(parameter) for parameter in critic.model.base_model.parameters()}
    for parameter in critic.model.parameters():
        if id(parameter) not in trunk and parameter.dim() == 1:
            torch.nn.init.constant_(parameter, float(first.reward_n.nanmean().nan_to_num(nan=0.0)))
    optimizer = torch.optim.AdamW(critic.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for step, rest in zip(range(1, max(steps) + 1), chain([first], batches), strict=False):
        use_nt = rest.mask_nt & ~rest.reward_n.isnan()[:, None]
        if bool(use_nt.any()):
            value_nt = critic(rest.sequences(roller.model.device))[:, :-1, 0]
            error_nt = value_nt - rest.reward_n.float()[:, None].to(value_nt.device)
            error_nt[use_nt.to(value_nt.device)].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step in steps:
            yield step, critic


def _batches(roller: Roller, rows: Any, seeds: Iterator[int]) -> Iterator[FirstBlocks]:
    """Batches of fresh completions for ever, sampled two at a time: large batches cost less each."""
    for first in count(0, 2 * CRITIC_BATCH):
        picked = [x % len(rows) for x in range(first, first + 2 * CRITIC_BATCH)]
        blocks = roller.blocks(rows.select(picked), samples=1, seed=next(seeds))
        yield blocks.take(slice(0, CRITIC_BATCH))
        yield blocks.take(slice(CRITIC_BATCH, None))
