"""The warm start of the digit chain asked step by step: its chains, the noisy conversations it imitates, the model."""

import sys
from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from chain_agent import Chain, Episode, apply_step
from spanwise.errors import DataError
from spanwise.tasks import Phase, WarmStartSettings, warm_start
from spanwise.tasks.embedded import END, Course, Pairs, Stretch

OPERATORS = "+-*"
#: The turns of an episode that is not broken off.
FEWEST, MOST = 6, 10
_HELD_OUT, _HELD_OUT_SEED = 256, 20_261


def draw_chains(size: int, *, rng: np.random.Generator, exclude: Set[str] = frozenset()) -> list[Chain]:
    """Draw random chains: 6 to 10 steps, operators, operands 1 to 9 and start digits all uniform."""
    if size < 1:
        raise DataError(f"Cannot draw {size} chains; ask for at least 1.")
    chains: list[Chain] = []
    while len(chains) < size:
        steps = rng.integers(FEWEST, MOST + 1)
        pairs = zip(rng.choice(list(OPERATORS), steps).tolist(), rng.integers(1, 10, steps).tolist(), strict=True)
        chain = Chain(int(rng.integers(10)), tuple(f"{operator}{operand}" for operator, operand in pairs))
        if chain.prompt not in exclude:
            chains.append(chain)
    return chains


def held_out_chains() -> list[Chain]:
    """The 256 evaluation chains; no warm start and no training set contains one of them."""
    return draw_chains(_HELD_OUT, rng=np.random.default_rng(_HELD_OUT_SEED))


@dataclass(frozen=True)
class AgentNoise:
    """How often the replies of a warm start go wrong."""

    slip: tuple[float, float, float]  # to a random digit, by operator in the order of `OPERATORS`
    refusal: float  # to `?`, which ends the episode


AGENT_NOISE: dict[str, AgentNoise] = {
    "agent_early": AgentNoise(slip=(0.0, 0.0, 0.0), refusal=0.0),
    "agent": AgentNoise(slip=(0.15, 0.25, 0.45), refusal=0.02),
}


def noisy_talk(chain: Chain, noise: AgentNoise, *, rng: np.random.Generator) -> Iterable[tuple[str, str]]:
    """A conversation that the warm start imitates, as pairs of what the environment shows and what is replied."""
    episode = Episode(chain.prompt)
    question: str | None = episode.opening
    while question is not None:
        turn = len(episode.digits)
        before, step = episode.digits[-1] if turn else chain.start, chain.steps[turn]
        assert before is not None, "a reply that is no digit ends the episode"
        slips, refuses = rng.random() < noise.slip[OPERATORS.index(step[0])], rng.random() < noise.refusal
        answer = "?" if refuses else str(rng.integers(10)) if slips else str(apply_step(before, step))
        yield question, f"<answer>{answer}</answer>"
        question = episode.reply(f"<answer>{answer}</answer>")


def _talks(size: int, noise: AgentNoise, rng: np.random.Generator) -> Pairs:
    """What a conversation begins with, and all of it behind that; none is about a held-out chain."""
    chains = draw_chains(size, rng=rng, exclude=frozenset(chain.prompt for chain in held_out_chains()))
    talks = (END.join(f"{question}{reply}" for question, reply in noisy_talk(chain, noise, rng=rng)) for chain in chains)
    openings = (f"{chain.start}{chain.steps[0]}=" for chain in chains)
    return [(opening, talk.removeprefix(opening)) for opening, talk in zip(openings, talks, strict=True)]


def _replies(ids_nt: torch.Tensor, ids: dict[str, int]) -> torch.Tensor:
    """What the agent says, and not the environment."""
    return ~torch.isin(ids_nt, torch.tensor([index for word, index in ids.items() if word[0] in "+-*="]))


def _stretch(name: str, place: int) -> Stretch:
    noise = AGENT_NOISE[name]
    return Stretch(name, place, noise, lambda size, rng: _talks(size, noise, rng), _replies)


#: Conversations about a chain, from random weights and without a slip; then with replies that slip often.
AGENT = Course((_stretch("agent_early", 4), _stretch("agent", 5)))


EARLY = Phase(steps=200, learning_rate=3e-3, matrix_learning_rate=0.03)
LATE = Phase(steps=100, learning_rate=2e-3, matrix_learning_rate=0.02)


@dataclass(frozen=True)
class AgentSettings(WarmStartSettings):
    """The settings of a warm start with its two stretches of conversations."""

    agent_early: Phase = EARLY
    agent: Phase = LATE


def agent_start(**options: Any) -> Path:
    """The folder of the model: about 68 % of its turns are right, and 14 % of its episodes solved."""
    return warm_start(AGENT, **{"settings": AgentSettings(), **options})
