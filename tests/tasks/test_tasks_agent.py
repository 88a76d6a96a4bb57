"""The digit chain asked step by step: what the environment shows, what each turn earns, when an episode is over."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from digits_small import by_hand

from chain_agent import Chain, Episode
from spanwise.errors import DataError


def say(digit) -> str:
    return f"<answer>{digit}</answer>"


def test_an_agent_that_says_what_a_person_reads_solves_every_chain_and_earns_every_turn() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        steps = (f"{rng.choice(list('+-*'))}{rng.integers(1, 10)}" for _ in range(rng.integers(6, 11)))
        chain = Chain(int(rng.integers(10)), tuple(steps))
        assert list(chain.digits) == by_hand(chain.prompt)
        assert Chain.of(chain.prompt) == chain
        episode = Episode(chain.prompt)
        questions = [episode.opening, *(episode.reply(say(digit)) for digit in chain.digits)]
        assert "".join(str(part).strip("=") for part in questions[:-1]) == chain.prompt.strip("=")
        assert (questions[-1], episode.done, episode.solved) == (None, True, True)
        assert episode.turn_rewards == [1.0] * len(chain.steps)
    for prompt in ("", "3=", "3+0=", "3~4=", "33+4=", "3+4", "3+4=5"):  # what is no chain is refused
        with pytest.raises(DataError):
            Chain.of(prompt)


@pytest.mark.parametrize(
    ("digits", "rewards", "anchor", "solved"),
    [
        ((7, 5, 0), [1.0, 0.0, 1.0], "2:5", False),  # 5 - 5 = 0 is right for what was said; the chain ends with 9
        ((7, 5, 9), [1.0, 0.0, 0.0], "2:5", True),  # two slips that cancel
    ],
)
def test_a_turn_is_judged_by_what_was_said_before_and_the_outcome_by_the_chain(digits, rewards, anchor, solved) -> None:
    # 3 +4 = 7, *2 = 4, -5 = 9.
    episode = Episode("3+4*2-5=")
    assert [episode.reply(say(digit)) for digit in digits] == ["*2=", "-5=", None]
    assert (episode.turn_rewards, episode.solved) == (rewards, solved)
    assert episode.anchors == ["0:3", "1:7", anchor]
    assert episode.turns[1] == {"anchor": "1:7", "right": 0.0, "solved": float(solved)}


@pytest.mark.parametrize("text", [say("?"), "", "7", say(12), "</answer>7<answer>", f"{say(7)}7", say(7) * 2])
def test_a_reply_that_is_no_digit_in_its_tags_is_wrong_and_ends_the_episode(text) -> None:
    episode = Episode("3+4*2=")
    assert (episode.reply(text), episode.done, episode.solved, episode.turn_rewards) == (None, True, False, [0.0])
    with pytest.raises(DataError, match="over after 1 turns"):
        episode.reply(say(7))


def test_equal_anchors_of_one_prompt_are_asked_the_same_question() -> None:
    rng = np.random.default_rng(0)
    by_anchor: dict[str, str] = {}
    for _ in range(200):
        episode, text = Episode("3+4*2-5+1="), "3+4="
        while text is not None:
            question = (text, episode.digits[-1] if episode.digits else 3)
            assert by_anchor.setdefault(episode.anchor, question) == question
            text = episode.reply(say(rng.integers(10)))
    assert len(by_anchor) == 1 + 10 + 10 + 10


def test_the_environment_needs_no_torch() -> None:
    """A trainer's environment workers should not pay for it: only the module itself is asked, not the package around it."""
    code = (
        "import sys; import chain_agent as a; n = set(vars(a)); "
        "assert 'torch' not in n and 'transformers' not in sys.modules, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2] / "examples")
