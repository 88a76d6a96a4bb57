"""The digit chain: arithmetic, distribution, traces and the tiny model's tokenizer."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from digits_small import by_hand

from spanwise.tasks.digits import DIGITS, NOISE, Problems, TraceNoise, is_refusal, noisy_traces, success_probability
from spanwise.tasks.embedded import build_model, build_tokenizer

COMPLETION = re.compile(
    r"<reasoning>(\d{0,6})</reasoning><answer>(\d|\?)</answer>"
    r"<analysis>((?:[*~][1-9])*)</analysis><confidence>(0\.\d|1\.0)</confidence>"
)


def one_problem(start: int, steps: list[tuple[str, int]], *, plus: bool = True) -> Problems:
    operators = [["+-*~".index(o) for o, _ in steps] + [0] * (6 - len(steps))]
    operands = [[d for _, d in steps] + [1] * (6 - len(steps))]
    return Problems(*map(np.array, ([start], [len(steps)], operators, operands, [plus])))


def test_answers_follow_the_written_prompt() -> None:
    problems = DIGITS.draw(1500, rng=np.random.default_rng(0))
    expected = [str(by_hand(p, plus)[-1]) for p, plus in zip(problems.prompts, problems.plus_n.tolist(), strict=True)]
    assert problems.answers == expected
    # hand-worked: 2-5 = 7, 7*4 = 8, 8~9 = 9 as a minus and 7 as a plus
    minus, plus = (one_problem(2, [("-", 5), ("*", 4), ("~", 9)], plus=plus) for plus in (False, True))
    assert (minus.answers, plus.answers, plus.prompts) == (["9"], ["7"], ["2-5*4~9___="])


def test_problems_have_the_stated_distribution() -> None:
    problems = DIGITS.draw(12_000, rng=np.random.default_rng(1))
    text = "".join(problems.prompts)
    share = {sign: text.count(sign) / sum(map(text.count, "+-*~")) for sign in "+-*~"}
    assert share == pytest.approx({"+": 0.35, "-": 0.25, "*": 0.25, "~": 0.15}, abs=0.01)
    assert problems.plus_n.mean() == pytest.approx(0.7, abs=0.02)
    lengths = Counter(len(re.findall(r"[-+*~]", prompt)) for prompt in problems.prompts)
    assert {k: lengths[k] / 12_000 for k in range(1, 7)} == pytest.approx(dict.fromkeys(range(1, 7), 1 / 6), abs=0.015)
    digits = {*re.findall(r"[-+*~](\d)", text)}
    assert (digits, {prompt[0] for prompt in problems.prompts}) == ({*"123456789"}, {*"0123456789"})


def test_traces_without_noise_are_right_and_copy_the_risky_steps() -> None:
    problems = DIGITS.draw(300, rng=np.random.default_rng(3))
    exact = TraceNoise(slip=(0.0, 0.0, 0.0, 0.0), refusal=0.0)
    traces = noisy_traces(problems, exact, rng=np.random.default_rng(3))
    for prompt, plus, trace in zip(problems.prompts, problems.plus_n.tolist(), traces, strict=True):
        reasoning, answer, analysis, _ = COMPLETION.fullmatch(trace).groups()
        assert reasoning == "".join(map(str, by_hand(prompt, plus)))
        assert answer == reasoning[-1]
        assert analysis == "".join(re.findall(r"[*~]\d", prompt))


@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_slips_and_refusals_have_the_stated_rates(difficulty: str) -> None:
    noise, size = NOISE[difficulty], 20_000
    problems = DIGITS.draw(size, rng=np.random.default_rng(4))
    traces = noisy_traces(problems, noise, rng=np.random.default_rng(5))
    wrong, seen, refused = Counter(), Counter(), []
    for prompt, plus, trace in zip(problems.prompts, problems.plus_n.tolist(), traces, strict=True):
        reasoning, answer, _, confidence = COMPLETION.fullmatch(trace).groups()
        if answer == "?":
            assert reasoning == ""
            refused.append(float(confidence))
            continue
        assert answer == reasoning[-1]
        value = int(prompt[0])
        for (operator, operand), digit in zip(re.findall(r"([-+*~])(\d)", prompt), reasoning, strict=True):
            right = by_hand(f"{value}{operator}{operand}", plus)[0]
            seen[operator] += 1
            wrong[operator] += int(digit) != right
            value = int(digit)  # the chain goes on from what was written
    # a random digit is right one time in ten
    stated = {"easy": (0.03, 0.08, 0.20, 0.05), "hard": (0.15, 0.25, 0.45, 0.20)}[difficulty]
    expected = {operator: 0.9 * slip for operator, slip in zip("+-*~", stated, strict=True)}
    assert {operator: wrong[operator] / seen[operator] for operator in "+-*~"} == pytest.approx(expected, abs=0.012)
    assert len(refused) / size == pytest.approx({"easy": 0.05, "hard": 0.10}[difficulty], abs=0.007)
    assert (set(refused) == {0.0, 0.1, 0.2}) == (difficulty == "hard")


def test_success_probability_is_a_product_over_steps() -> None:
    # (1 - .9*.20) for *, .58 * (1 - .9*.05) for ~, (1 - .9*.08) for -; fillers count nothing
    problem = one_problem(1, [("*", 2), ("~", 3), ("-", 4)])
    assert success_probability(problem, NOISE["easy"]) == pytest.approx([0.82 * 0.58 * 0.955 * 0.928])
    sure = TraceNoise(slip=NOISE["easy"].slip, refusal=0.0, spread=0.0)
    # the square root of .4215 is .649
    assert noisy_traces(problem, sure, rng=np.random.default_rng(0))[0].endswith("<confidence>0.6</confidence>")


def test_round_trip_and_one_token_per_meaning() -> None:
    tokenizer = build_tokenizer()
    problems = DIGITS.draw(400, rng=np.random.default_rng(6))
    traces = noisy_traces(problems, NOISE["hard"], rng=np.random.default_rng(6))
    texts = [prompt + trace for prompt, trace in zip(problems.prompts, traces, strict=True)]
    assert tokenizer.batch_decode(tokenizer(texts)["input_ids"], skip_special_tokens=True) == texts
    assert tokenizer.tokenize("2-5*4~9___=") == ["2", "-5", "*4", "~9", "_", "_", "_", "="]
    assert {len(ids) for ids in tokenizer(problems.prompts)["input_ids"]} == {8}
    # 8 digit-chain tags and 2 specials; six steps, all risky: 2+6 reasoning, 3 answer, 2+6 analysis, 2+3 confidence, 1 end
    longest = max(len(ids) for ids in tokenizer([trace + "<eos>" for trace in traces])["input_ids"])
    assert longest <= 8 + 3 + 8 + 5 + 1 <= 32
    assert tokenizer.unk_token_id not in {token for ids in tokenizer(texts)["input_ids"] for token in ids}
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert tokenizer("hi", add_special_tokens=True)["input_ids"] == [tokenizer.unk_token_id] * 2


def test_model_depends_on_the_seed_alone() -> None:
    tokenizer = build_tokenizer()
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = build_model(tokenizer, 0)
    assert torch.equal(torch.rand(3), expected)  # the caller's random state is untouched
    second, other = build_model(tokenizer, 0), build_model(tokenizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.num_parameters() == 403_712
    assert build_model(tokenizer, 0, layers=3, positions=256).num_parameters() == 601_600


def test_refusal_is_an_answer_that_is_no_digit() -> None:
    assert [is_refusal(answer) for answer in ("7", "?", "12", "²", None)] == [False, True, True, True, True]
