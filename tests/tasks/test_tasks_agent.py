"""The digit chain asked step by step: what the environment shows, what each turn earns, when an episode is over."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from spanwise.errors import DataError
from spanwise.tasks import build_model, build_tokenizer, digits_task, warm_start
from spanwise.tasks.agent import (
    FEWEST,
    MOST,
    OPERATORS,
    AgentNoise,
    Chain,
    Episode,
    draw_chains,
    held_out_chains,
    noisy_talk,
)
from spanwise.tasks.traces import ALL_NOISE, trace_batch
from spanwise.tasks.warm_start import shortened

torch.set_num_threads(1)


def say(digit) -> str:
    return f"<answer>{digit}</answer>"


def by_hand(start: int, steps: tuple[str, ...]) -> list[int]:
    """Read the steps as a person would."""
    digits, value = [], start
    for operator, operand in steps:
        value = eval(f"({value} {operator} {operand}) % 10")
        digits.append(value)
    return digits


def drawn(size: int = 300, seed: int = 0) -> list[Chain]:
    return draw_chains(size, rng=np.random.default_rng(seed))


def test_the_right_digits_are_those_a_person_reads() -> None:
    for chain in drawn():
        assert list(chain.digits) == by_hand(chain.start, chain.steps)
        assert Chain.of(chain.prompt) == chain


def test_an_agent_that_is_always_right_solves_every_chain_and_earns_every_turn() -> None:
    for chain in drawn(50):
        episode = Episode(chain.prompt)
        shown = [episode.opening]
        for digit in chain.digits:
            shown.append(episode.reply(say(digit)))
        assert "".join(str(part).strip("=") for part in shown[:-1]) == chain.prompt.strip("=")
        assert shown[-1] is None
        assert episode.done
        assert episode.solved
        assert episode.turn_rewards == [1.0] * len(chain.steps)


def test_a_turn_is_judged_by_what_was_said_before_and_the_outcome_by_the_chain() -> None:
    # 3 +4 = 7, *2 = 4, -5 = 9. Said: 7 right, 5 wrong, then 5 - 5 = 0 right for what was said; the chain ends with 9.
    episode = Episode("3+4*2-5=")
    assert [episode.reply(say(digit)) for digit in (7, 5, 0)] == ["*2=", "-5=", None]
    assert episode.turn_rewards == [1.0, 0.0, 1.0]
    assert episode.anchors == ["0:3", "1:7", "2:5"]
    assert not episode.solved
    assert episode.turns[1] == {"anchor": "1:7", "right": 0.0, "solved": 0.0}


def test_two_slips_that_cancel_solve_the_chain() -> None:
    episode = Episode("3+4*2-5=")
    for digit in (7, 5, 9):
        episode.reply(say(digit))
    assert episode.solved
    assert episode.turn_rewards == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "text",
    [
        "<answer>?</answer>",
        "",
        "7",
        "<answer>12</answer>",
        "</answer>7<answer>",
        "<answer>7</answer>7",
        "<answer>7</answer>" * 2,
    ],
)
def test_a_reply_that_is_no_digit_in_its_tags_is_wrong_and_ends_the_episode(text) -> None:
    episode = Episode("3+4*2=")
    assert episode.reply(text) is None
    assert episode.done
    assert not episode.solved
    assert episode.turn_rewards == [0.0]
    with pytest.raises(DataError, match=re.escape("The episode of '3+4*2=' is over after 1 turns.")):
        episode.reply(say(7))


def test_equal_anchors_of_one_prompt_are_asked_the_same_question() -> None:
    rng = np.random.default_rng(0)
    asked: dict[str, str] = {}
    for _ in range(200):
        episode, shown = Episode("3+4*2-5+1="), "3+4="
        while shown is not None:
            question = (shown, episode.said[-1] if episode.said else 3)
            assert asked.setdefault(episode.anchor, question) == question
            shown = episode.reply(say(rng.integers(10)))
    assert len(asked) == 1 + 10 + 10 + 10


@pytest.mark.parametrize("prompt", ["", "3=", "3+0=", "3~4=", "33+4=", "3+4", "3+4=5"])
def test_what_is_no_chain_is_refused(prompt) -> None:
    with pytest.raises(DataError, match="is no digit chain"):
        Chain.of(prompt)


def test_drawn_chains_are_as_long_as_said_and_never_held_out() -> None:
    held_out = frozenset(chain.prompt for chain in held_out_chains())
    chains = draw_chains(3000, rng=np.random.default_rng(20_261), exclude=held_out)  # the seed of the held-out ones
    assert not held_out & {chain.prompt for chain in chains}
    assert {len(chain.steps) for chain in chains} == set(range(FEWEST, MOST + 1))
    assert {step[0] for chain in chains for step in chain.steps} == set(OPERATORS)
    assert [chain.prompt for chain in held_out_chains()] == [chain.prompt for chain in held_out_chains()]


def test_noisy_talk_slips_as_often_as_said() -> None:
    rng = np.random.default_rng(0)
    turns = {operator: [] for operator in OPERATORS}
    for chain in drawn(1500):
        episode = Episode(chain.prompt)
        for shown, reply in noisy_talk(chain, AgentNoise(slip=(0.0, 0.2, 0.5), refusal=0.0), rng=rng):
            assert shown.endswith(f"{chain.steps[len(episode.said)]}=")
            episode.reply(reply)
            turns[chain.steps[len(episode.said) - 1][0]].append(episode.turn_reward)
        assert episode.done
    # A slip draws any digit, so one in ten is right all the same.
    assert [np.mean(turns[operator]) for operator in OPERATORS] == pytest.approx([1.0, 0.82, 0.55], abs=0.03)


def test_a_refusal_ends_the_talk() -> None:
    talk = list(noisy_talk(drawn(1)[0], AgentNoise(slip=(0.0, 0.0, 0.0), refusal=1.0), rng=np.random.default_rng(0)))
    assert [reply for _, reply in talk] == ["<answer>?</answer>"]


def test_the_warm_start_imitates_the_agent_and_not_the_environment(tmp_path) -> None:
    """One step on one batch, with the loss of every token written out."""
    settings = shortened(1)
    losses = []
    folder = warm_start("agent", cache_folder=tmp_path, settings=settings, progress=lambda *step: losses.append(step[2]))
    assert (folder / "model.safetensors").is_file()
    assert len(losses) == 2  # without slips, then with them
    tokenizer = build_tokenizer()
    rng = np.random.default_rng([0, 0, list(ALL_NOISE).index("agent_early")])
    ids_nt, width = trace_batch(tokenizer, settings.batch, part="agent_early", rng=rng)
    with torch.no_grad():
        logits_ntv = build_model(tokenizer, 0)(ids_nt).logits
    per_token = []
    for row, logits_tv in zip(ids_nt.tolist(), logits_ntv, strict=True):
        for t in range(width, len(row)):
            said = tokenizer.decode([row[t]])
            if said in ("<answer>", "</answer>", "<eos>", *"0123456789"):
                per_token.append(-logits_tv[t - 1].log_softmax(dim=0)[row[t]].item())
    assert losses[0] == pytest.approx(np.mean(per_token), rel=1e-4)


def test_the_start_of_conversations_is_no_start_for_whole_prompts() -> None:
    with pytest.raises(DataError, match="asked step by step"):
        digits_task("agent", train_size=1)


def test_no_conversation_of_the_warm_start_is_about_a_held_out_chain() -> None:
    held_out = {chain.prompt for chain in held_out_chains()}
    tokenizer, rng = build_tokenizer(), np.random.default_rng(20_261)  # the seed of the held-out chains
    ids_nt, _ = trace_batch(tokenizer, 300, part="agent_early", rng=rng)
    texts = tokenizer.batch_decode(ids_nt, skip_special_tokens=True)
    asked = {re.sub(r"=|<answer>\d</answer>", "", text) + "=" for text in texts}
    assert all(Chain.of(prompt) for prompt in asked)
    assert not asked & held_out


def test_the_environment_needs_no_torch() -> None:
    """A trainer's environment workers should not pay for it: only the module itself is asked, not the package around it."""
    code = (
        "import sys; import spanwise.tasks.agent as a; n = set(vars(a)); "
        "assert 'torch' not in n and 'transformers' not in sys.modules, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
