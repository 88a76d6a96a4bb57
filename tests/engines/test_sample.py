"""Sampling and continuing completions, and conversations sampled many at once, which are those sampled one turn at a time."""

import pytest
import torch

from chain_agent import Episode
from play_turns import play
from spanwise.engines import sample as room
from spanwise.engines.sample import continue_ids, end_ids, prompt_ids, sample
from spanwise.tasks.embedded import build_model, build_tokenizer
from tokenizers_small import last_token_model

#: As good as greedy.
COLD = 1e-4


@pytest.fixture(scope="module")
def tiny():
    """A model that heeds all tokens before: with its first weights alone it would repeat the last one."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, 0).eval()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 100
    return model, tokenizer


def test_continuations_stand_next_to_each_other_and_repeat(tiny):
    model, tokenizer = tiny
    heads, options = [[5, 6, 7], [8, 9]], {"samples": 3, "max_new_tokens": 4, "temperature": 9.0, "batch_size": 3}
    state = torch.random.get_rng_state()
    first, second, other = (continue_ids(model, tokenizer, heads, seed=seed, **options)[0] for seed in (5, 5, 6))
    assert first.shape == (6, 4)
    assert torch.equal(first, second)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(first, other)


def test_a_sample_follows_from_its_whole_prompt_and_nothing_beside_it(tiny):
    """Each token is the likeliest one of a forward pass over the prompt alone, without padding."""
    model, tokenizer = tiny
    prompts = ["7+3*4-2+1-5=", "2="]
    ids_nt, _ = sample(model, tokenizer, prompts, samples=1, max_new_tokens=4, temperature=COLD)
    for prompt, ids in zip(prompts, ids_nt.tolist(), strict=True):
        logits_tv = model(torch.tensor([[*tokenizer.encode(prompt), *ids]])).logits[0]
        assert logits_tv.argmax(dim=1)[-5:-1].tolist() == ids


def test_a_batch_holds_as_many_tokens_as_fit_and_at_least_one_completion(tiny, monkeypatch):
    model, tokenizer = tiny
    batch_sizes, generate = [], model.generate
    monkeypatch.setattr(
        model, "generate", lambda **options: batch_sizes.append(len(options["input_ids"])) or generate(**options)
    )
    for tokens, expected in ((1000, [6]), (12, [3, 3]), (8, [2, 2, 2]), (3, [1] * 6)):
        monkeypatch.setattr(room, "TOKENS", tokens)
        ids_nt, _ = continue_ids(model, tokenizer, [[5, 6, 7], [8, 9]], samples=3, max_new_tokens=4)
        assert (batch_sizes, len(ids_nt)) == (expected, 6)
        batch_sizes.clear()


def test_the_models_own_sampling_options_change_nothing_and_its_ends_are_kept():
    seven, logits_fv = build_tokenizer().get_vocab()["7"], torch.zeros(64, 64)
    logits_fv[:, seven] = 64.0  # 7 follows everything
    model, tokenizer = last_token_model(logits_fv)
    model.generation_config.update(repetition_penalty=1e6, top_p=0.1, eos_token_id=5)
    assert end_ids(model, tokenizer) == [5, tokenizer.eos_token_id]
    options = {"samples": 1, "max_new_tokens": 4}
    assert sample(model, tokenizer, ["7="], **options)[0].tolist() == [[seven] * 4]
    suppressed_ids_nt, _ = sample(model, tokenizer, ["7="], **options, generation={"suppress_tokens": [seven]})
    assert seven not in suppressed_ids_nt


class Scripted:
    """An environment that answers with fixed lines, and records the policy's turns."""

    def __init__(self, opening, *lines):
        self.opening, self.lines, self.turns = opening, list(lines), []

    def reply(self, text):
        self.turns.append(text)
        return self.lines.pop(0) if self.lines else None


def environments():
    """Openings of different lengths, one to four turns."""
    script = [("7+3=", "*4=", "-2="), ("7+3*4-2=", "+1="), ("2=",), ("5-5+1=", "*4=", "1234=", "+9=")]
    return [Scripted(*lines) for lines in script]


def turn_by_turn(model, tokenizer, environment, longest):
    """One conversation; the whole prefix is read again for every turn, padded beside a longer one."""
    (ids,) = prompt_ids(tokenizer, [environment.opening])
    start, mask, answer = len(ids), [], ""
    while answer is not None:
        prefixes, options = [ids, [*ids, 5, 6]], {"samples": 1, "max_new_tokens": longest, "temperature": COLD}
        more, more_mask = continue_ids(model, tokenizer, prefixes, **options)
        turn = more[0][more_mask[0]].tolist()
        answer = environment.reply(tokenizer.decode(turn, skip_special_tokens=True))
        reply = [] if answer is None else tokenizer.encode(answer)
        ids, mask = [*ids, *turn, *reply], [*mask, *[1] * len(turn), *[0] * len(reply)]
    return ids[:start], ids[start:], mask


def test_all_at_once_is_one_turn_at_a_time(tiny):
    together, apart = environments(), environments()
    played = play(*tiny, together, max_turn_tokens=5, temperature=COLD)
    for rollout, environment, other in zip(played, together, apart, strict=True):
        want = turn_by_turn(*tiny, other, 5)
        assert (rollout.prompt_ids, rollout.completion_ids, rollout.env_mask) == want
        assert environment.turns == other.turns


def test_sampling_has_the_models_probabilities(tiny):
    """The first token after an opening, over many conversations, against the softmax of one forward pass."""
    model, tokenizer = tiny
    torch.manual_seed(0)
    played = play(model, tokenizer, [Scripted("7+3=") for _ in range(4000)], max_turn_tokens=1, temperature=0.3)
    seen_v = torch.bincount(torch.tensor([rollout.completion_ids[0] for rollout in played]), minlength=len(tokenizer)) / 4000
    with torch.no_grad():
        logits_v = model(torch.tensor([tokenizer.encode("7+3=")])).logits[0, -1]
    assert torch.allclose(seen_v, (logits_v / 0.3).softmax(dim=0), atol=0.035)


def test_training_mode_comes_back_and_episodes_end(tiny):
    model, tokenizer = tiny
    model.train()
    episodes = [Episode("7+3*4-2+1-5=") for _ in range(8)]
    play(model, tokenizer, episodes, max_turn_tokens=4)
    assert model.training
    model.eval()
    assert all(episode.done for episode in episodes)
