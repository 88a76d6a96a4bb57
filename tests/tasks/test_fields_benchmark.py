"""The benchmark of the fields: its credit against a hand-worked group, its sampler against the model, samples to a goal by hand."""

from __future__ import annotations

import math

import fields as benchmark
import pytest
import torch
from field_kinds import Chain

from spanwise import Batch, Vocabulary, advantages, credit_batch, read
from spanwise.tasks.embedded import build_fields_tokenizer, build_model

GOLD = '{"a": 3, "b": 1, "c": 2}'
# Right in all; wrong in b; wrong in a; wrong in a and without c.
SAID = (GOLD, '{"a": 3, "b": 2, "c": 2}', '{"a": 1, "b": 1, "c": 2}', '{"a": 1, "b": 1}')


def paid(arm: str) -> list[list[float]]:
    """The advantages of the four completions, token by token."""
    tokenizer = build_fields_tokenizer()
    ids = [tokenizer(f"{text}<eos>")["input_ids"] for text in SAID]
    batch = Batch.jagged(ids, [0] * 4, columns={"answer": [GOLD] * 4})
    scheme = benchmark.scheme_of(arm, Chain(3))
    reading = read(batch, scheme, Vocabulary.from_tokenizer(tokenizer))
    return advantages(credit_batch(reading, batch, scheme), reading.spans, scheme).tolist()


def test_by_field_pays_a_value_for_itself_and_the_form_for_all() -> None:
    # a: 1 1 0 0, mean 1/2; b: 1 0 1 1, mean 3/4; c: 1 1 1 0, mean 3/4; the form has five tokens, without c four
    key = [(0.5 + 0.25 + 0.25) / 5, (0.5 - 0.75 + 0.25) / 5, (-0.5 + 0.25 + 0.25) / 5, (-0.5 + 0.25 - 0.75) / 4]
    expected = [
        [key[0], 0.5, key[0], 0.25, key[0], 0.25, key[0], key[0]],
        [key[1], 0.5, key[1], -0.75, key[1], 0.25, key[1], key[1]],
        [key[2], -0.5, key[2], 0.25, key[2], 0.25, key[2], key[2]],
        [key[3], -0.5, key[3], 0.25, key[3], key[3], 0, 0],
    ]
    for paid_row, row in zip(paid("by_field"), expected, strict=True):
        assert paid_row == pytest.approx(row, abs=1e-6)


def test_one_number_pays_every_token_the_same() -> None:
    # sums 3 2 2 1: mean 2, standard deviation sqrt(2 / 3)
    high = 1 / math.sqrt(2 / 3)
    for arm, top, longest in (("grpo", high, (8, 6)), ("dr_grpo", 1.0, (8, 8))):  # a mean over tokens; a constant
        first, second, third, last = paid(arm)
        assert first == pytest.approx([top / longest[0]] * 8, rel=1e-4)
        assert second == third == [0.0] * 8
        assert last == pytest.approx([-top / longest[1]] * 6 + [0, 0], rel=1e-4)


def test_the_sampler_is_the_model_and_samples_follow_its_probabilities() -> None:
    tokenizer = build_fields_tokenizer()
    model = build_model(tokenizer, 0, width=64, heads=2)
    prompt_nt = tokenizer(["3_8_1_4_0_7_5_2_=", "9_0_4_3_3_8_7_1_="], return_tensors="pt")["input_ids"]
    end = tokenizer.eos_token_id
    ids_nt, mask_nt, logp_ntv = benchmark.sample(model, prompt_nt, 30, end, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits_ntv = model(torch.cat([prompt_nt, ids_nt], dim=1)).logits[:, prompt_nt.shape[1] - 1 : -1]
    torch.testing.assert_close(logp_ntv, logits_ntv.log_softmax(dim=-1), atol=1e-4, rtol=1e-4)
    for ids, mask in zip(ids_nt.tolist(), mask_nt.tolist(), strict=True):
        length = ids.index(end) + 1 if end in ids else len(ids)
        assert mask == [True] * length + [False] * (30 - length)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.1)  # a softer distribution
    prompt_nt = tokenizer(["3_8_="] * 4000, return_tensors="pt")["input_ids"]
    ids_nt, _, logp_ntv = benchmark.sample(model, prompt_nt, 1, 1, torch.Generator().manual_seed(0))
    share_v = torch.bincount(ids_nt[:, 0], minlength=len(tokenizer)) / 4000
    torch.testing.assert_close(share_v, logp_ntv[0, 0].exp(), atol=0.03, rtol=0)


def test_samples_to_a_goal_by_hand() -> None:
    curve = [{"samples": n, "accuracy": a} for n, a in ((0, 0.2), (256, 0.4), (1024, 0.8), (4096, 0.7))]
    # Half way between 256 and 1024, both powers of two, and between one step of 64 and 256.
    for goal, samples in {0.8: 1024, 0.6: 512, 0.3: 128, 0.81: math.inf}.items():
        assert benchmark.samples_to(curve, goal) == pytest.approx(samples)
    assert benchmark.samples_to(curve, 0.75) < 1024  # what comes after the first time does not count
    # Runs that were stopped are counted and never dropped.
    reached = {"seed": 0, "curve": [{"samples": 64, "accuracy": 0.2}, {"samples": 1024, "accuracy": 0.8}]}
    never = {"seed": 1, "curve": [{"samples": 64, "accuracy": 0.2}, {"samples": 1024, "accuracy": 0.3}]}
    assert benchmark.reach([reached, never], 0.8) == "1 of 2 within 8,192"
    assert benchmark.ratio([never], [{**reached, "seed": 1}], 0.8) == "more than 8.0"
    assert benchmark.price([never]) == pytest.approx(math.log(2 * 5120))
