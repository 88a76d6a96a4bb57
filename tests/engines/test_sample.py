"""Sampling and continuing completions: padding is not seen, continuations stand next to each other."""

import pytest
import torch

from spanwise.engines.sample import continue_ids, prompt_ids, sample
from spanwise.tasks import build_model, build_tokenizer


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer()
    return build_model(tokenizer, 0).eval(), tokenizer


def test_continuing_greedily_gives_the_rest(tiny):
    model, tokenizer = tiny
    prompts = ["7+3*4____=", "2-5*4~9___="]
    options = {"samples": 1, "temperature": 1e-4}
    ids_nt, mask_nt = sample(model, tokenizer, prompts, max_new_tokens=12, **options)
    starts = prompt_ids(tokenizer, prompts)
    assert tokenizer.decode(starts[1]) == prompts[1]
    cuts = (3, 7)  # prefixes of different lengths are padded on the left
    heads = [start + ids_nt[n, :cut].tolist() for n, (start, cut) in enumerate(zip(starts, cuts, strict=True))]
    more_nt, more_mask_nt = continue_ids(model, tokenizer, heads, max_new_tokens=9, **options)
    for n, cut in enumerate(cuts):
        rest = ids_nt[n, cut:12][mask_nt[n, cut:12]].tolist()
        assert more_nt[n][more_mask_nt[n]].tolist()[: len(rest)] == rest


def test_padding_is_not_seen(tiny, monkeypatch):
    model, tokenizer = tiny
    seen, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda **inputs: seen.append(inputs) or generate(**inputs))
    continue_ids(model, tokenizer, [[11], [12, 13, 14]], samples=2, max_new_tokens=2)
    assert seen[0]["input_ids"].tolist() == [[tokenizer.pad_token_id] * 2 + [11], [12, 13, 14]]
    assert seen[0]["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]


def test_continuations_stand_next_to_each_other_and_repeat(tiny):
    model, tokenizer = tiny
    heads = [[5, 6, 7], [8, 9]]
    options = {"samples": 3, "max_new_tokens": 4, "temperature": 9.0, "seed": 5, "batch_size": 3}
    state = torch.random.get_rng_state()
    one, two = continue_ids(model, tokenizer, heads, **options), continue_ids(model, tokenizer, heads, **options)
    assert one[0].shape == (6, 4)
    assert torch.equal(one[0], two[0])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.equal(one[0], continue_ids(model, tokenizer, heads, **(options | {"seed": 6}))[0])
