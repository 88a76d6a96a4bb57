"""Two attempts at the digit chain: what the traces hold and how they are read."""

import re
from collections import Counter

import numpy as np
import pytest
from digits_small import by_hand

from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks.digits import DIGITS, TWICE_LAYOUT, Problems, TwiceNoise, twice_traces
from spanwise.tasks.embedded import STARTS, build_tokenizer

TRACE = re.compile(r"<answer>(\d|\?)</answer><reasoning>(\d{0,6})</reasoning><answer>(\d|\?)</answer>")
EXACT = TwiceNoise(slip=(0.0, 0.0, 0.0, 0.0), repeat=0.0, refusal=0.0, glance=1.0)


def traces(problems: Problems, noise: TwiceNoise) -> list[tuple[str, str, str]]:
    """First answer, reflection and second answer of each trace."""
    return [TRACE.fullmatch(trace).groups() for trace in twice_traces(problems, noise, rng=np.random.default_rng(0))]


def drawn(size: int) -> Problems:
    return DIGITS.draw(size, rng=np.random.default_rng(1))


def test_without_noise_the_reflection_holds_a_digit_for_every_step_and_a_repeating_one_none() -> None:
    problems = drawn(400)
    rows = zip(problems.prompts, problems.plus_n.tolist(), traces(problems, EXACT), strict=True)
    for prompt, plus, (first, reasoning, second) in rows:
        assert reasoning == "".join(map(str, by_hand(prompt, plus)))
        assert first == second == reasoning[-1]
    attempts = traces(problems, TwiceNoise(slip=(0.5, 0.5, 0.5, 0.5), repeat=1.0, refusal=0.3, glance=0.0))
    assert all((reasoning, first) == ("", second) for first, reasoning, second in attempts)
    assert {first for first, _, _ in attempts} == set("0123456789?")


def test_shares_are_the_stated_ones() -> None:
    problems = drawn(12_000)
    noise = TwiceNoise(slip=(0.45, 0.45, 0.45, 0.45), repeat=0.3, refusal=0.1, glance=0.8)
    attempts = traces(problems, noise)
    assert np.mean([first == "?" for first, _, _ in attempts]) == pytest.approx(0.1, abs=0.01)
    assert np.mean([reasoning == "" for _, reasoning, _ in attempts]) == pytest.approx(0.3, abs=0.015)
    right, total, slips = Counter(), Counter(), []
    columns = (problems.prompts, problems.plus_n.tolist(), problems.answers, problems.length_n.tolist())
    for (first, reasoning, second), prompt, plus, answer, k in zip(attempts, *columns, strict=True):
        if first != "?":
            right[k] += first == answer
            total[k] += 1
        if reasoning:
            slips.append(int(reasoning[0]) != by_hand(prompt, plus)[0])
            assert second == reasoning[-1]
    # .8 ** (k - 1) of them know, and a random digit is right one time in ten
    expected = {1: 1.0, 2: 0.82, 3: 0.676, 4: 0.5608, 5: 0.46864, 6: 0.394912}
    assert {k: right[k] / total[k] for k in expected} == pytest.approx(expected, abs=0.035)
    assert np.mean(slips) == pytest.approx(0.9 * 0.45, abs=0.025)


def test_the_layout_reads_both_answers() -> None:
    tokenizer = build_tokenizer()
    attempts = (("4", "17", "7"), ("?", "", "?"))
    texts = ["<answer>{}</answer><reasoning>{}</reasoning><answer>{}</answer><eos>".format(*attempt) for attempt in attempts]
    ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    mask_nt = ids_nt != tokenizer.pad_token_id
    spans, text = find_blocks(ids_nt, mask_nt, layout=TWICE_LAYOUT, vocabulary=Vocabulary.from_tokenizer(tokenizer))
    assert spans.fault_n.tolist() == [0, 0]
    assert spans.start_nk.tolist() == [[0, 3], [0, 3]]
    assert spans.end_nk.tolist() == [[3, 11], [3, 9]]
    assert [(entry["first"]["answer"], entry["second"]["answer"]) for entry in text] == [("4", "7"), ("?", "?")]
    assert len(tokenizer(texts[0].replace("17", "123456"))["input_ids"]) <= STARTS["twice"].longest
