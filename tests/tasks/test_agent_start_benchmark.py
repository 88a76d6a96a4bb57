"""The warm start of the agent in the benchmarks: its chains, its noisy conversations, what it imitates."""

import re

import agent_start as agents
import numpy as np
import pytest
import torch

from chain_agent import Chain, Episode
from spanwise.tasks.embedded import build_model, build_tokenizer
from spanwise.tasks.warm_start import shortened


def test_drawn_chains_are_as_long_as_said_and_never_held_out() -> None:
    held_out = frozenset(chain.prompt for chain in agents.held_out_chains())
    chains = agents.draw_chains(3000, rng=np.random.default_rng(20_261), exclude=held_out)  # the seed of the held-out ones
    assert not held_out & {chain.prompt for chain in chains}
    assert {len(chain.steps) for chain in chains} == set(range(agents.FEWEST, agents.MOST + 1))
    assert {step[0] for chain in chains for step in chain.steps} == set(agents.OPERATORS)
    assert [chain.prompt for chain in agents.held_out_chains()] == [chain.prompt for chain in agents.held_out_chains()]


def test_noisy_talk_slips_as_often_as_said_and_a_refusal_ends_it() -> None:
    rng = np.random.default_rng(0)
    turns = {operator: [] for operator in agents.OPERATORS}
    for chain in agents.draw_chains(1500, rng=np.random.default_rng(0)):
        episode = Episode(chain.prompt)
        for question, reply in agents.noisy_talk(chain, agents.AgentNoise(slip=(0.0, 0.2, 0.5), refusal=0.0), rng=rng):
            assert question.endswith(f"{chain.steps[len(episode.digits)]}=")
            episode.reply(reply)
            turns[chain.steps[len(episode.digits) - 1][0]].append(episode.turn_reward)
        assert episode.done
    # A slip draws any digit, so one in ten is right all the same.
    assert [np.mean(turns[operator]) for operator in agents.OPERATORS] == pytest.approx([1.0, 0.82, 0.55], abs=0.03)
    talk = agents.noisy_talk(chain, agents.AgentNoise(slip=(0.0, 0.0, 0.0), refusal=1.0), rng=rng)
    assert [reply for _, reply in talk] == ["<answer>?</answer>"]


def test_the_warm_start_imitates_the_agent_and_not_the_environment(tmp_path) -> None:
    """One step on one batch, with the loss of every token written out."""
    settings = shortened(1, agents.AgentSettings())
    losses = []
    folder = agents.agent_start(cache_folder=tmp_path, settings=settings, progress=lambda *step: losses.append(step[2]))
    assert (folder / "model.safetensors").is_file()
    assert len(losses) == 2  # without slips, then with them
    tokenizer = build_tokenizer()
    rng = np.random.default_rng([0, 0, 4])  # what its first traces were always seeded by
    ids_nt, length_n = agents.AGENT.stretches[0].batch(tokenizer, settings.batch, rng)
    (width,) = set(length_n.tolist())
    with torch.no_grad():
        logits_ntv = build_model(tokenizer, 0)(ids_nt).logits
    per_token = []
    for row, logits_tv in zip(ids_nt.tolist(), logits_ntv, strict=True):
        for t in range(width, len(row)):
            word = tokenizer.decode([row[t]])
            if word in ("<answer>", "</answer>", "<eos>", *"0123456789"):
                per_token.append(-logits_tv[t - 1].log_softmax(dim=0)[row[t]].item())
    assert losses[0] == pytest.approx(np.mean(per_token), rel=1e-4)


def test_no_conversation_of_the_warm_start_is_about_a_held_out_chain() -> None:
    held_out = {chain.prompt for chain in agents.held_out_chains()}
    tokenizer, rng = build_tokenizer(), np.random.default_rng(20_261)  # the seed of the held-out chains
    ids_nt, _ = agents.AGENT.stretches[0].batch(tokenizer, 300, rng)
    texts = tokenizer.batch_decode(ids_nt, skip_special_tokens=True)
    prompts = {re.sub(r"=|<answer>\d</answer>", "", text) + "=" for text in texts}
    assert all(Chain.of(prompt) for prompt in prompts)
    assert not prompts & held_out
