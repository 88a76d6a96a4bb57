"""The long digit chain: what the traces hold, and a run of it."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from digits_small import by_hand

from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks.digits import LONG, LONG_LAYOUT, LONG_POSITIONS, LONGEST, LongNoise, LongProblems, long_traces, tables
from spanwise.tasks.embedded import build_tokenizer

TRACE = re.compile(r"<reasoning>(.*)</reasoning><answer>(\d)</answer>")
LINE = re.compile(r"(\d)\.([-+*~]\d)(\+\d|\?-\d)?_(\d)([-+*]\d)(_\d[-+*]\d)?=(\d)_")
EXACT = LongNoise(slip=(0.0, 0.0, 0.0), careful=0.0)


def drawn(size: int, seed: int = 1) -> LongProblems:
    return LONG.draw(size, rng=np.random.default_rng(seed))


def written(problems: LongProblems, noise: LongNoise, seed: int = 0) -> list[tuple[list[tuple[str, ...]], str]]:
    """The lines of each trace, as place, step shown, reading, value, step taken, care and new value; and the answer."""
    traces = []
    for trace in long_traces(problems, noise, rng=np.random.default_rng(seed)):
        body, answer = TRACE.fullmatch(trace).groups()
        lines = LINE.findall(body)
        assert re.fullmatch(f"(?:{LINE.pattern})+", body)
        traces.append((lines, answer))
    return traces


def after(value: str, step: str) -> str:
    return str(by_hand(value + step)[0])


def test_without_noise_every_line_follows_from_the_prompt_and_the_line_before() -> None:
    problems = drawn(200)
    rows = zip(problems.prompts, problems.answers, problems.plus_n.tolist(), written(problems, EXACT), strict=True)
    agreed = 0
    for prompt, answer, plus, (lines, final) in rows:
        value, steps = prompt[0], re.findall(r"\d([-+*~]\d)", prompt[1:])
        assert len(lines) == len(steps) in range(4, 9)
        as_it_is = True
        for place, (line, step) in enumerate(zip(lines, steps, strict=True)):
            read = line[2].removeprefix("?")
            assert bool(read) == (step[0] == "~")
            assert not read or read[1] == step[1]
            as_it_is &= not read or (read[0] == "+") == plus[place]
            assert line == (str(place), step, line[2], value, read or step, "", after(value, read or step))
            value = line[6]
        assert final == value
        assert not as_it_is or final == answer
        agreed += as_it_is
    assert agreed > 60


def test_lines_with_care_repeat_the_question_of_their_line_and_lines_hang_together() -> None:
    slips = 0
    for lines, final in written(drawn(200), LongNoise(slip=(0.3, 0.3, 0.3), careful=0.5)):
        before = None
        for _, step, read, value, taken, care, new in lines:
            assert taken == (read.removeprefix("?") or step)
            assert care in ("", f"_{value}{taken}")
            assert before in (None, value)  # what a line ends with, the next one starts from
            slips += new != after(value, taken)
            before = new
        assert final == before
    assert slips > 100


def test_shares_are_the_stated_ones() -> None:
    noise = LongNoise(slip=(0.1, 0.2, 0.4), careful=0.25, relief=0.5, plus=0.4)
    problems = drawn(4000)
    lines = [line for trace, _ in written(problems, noise) for line in trace]
    assert np.mean([bool(line[5]) for line in lines]) == pytest.approx(0.25, abs=0.01)
    assert np.mean([line[2][0] == "+" for line in lines if line[2]]) == pytest.approx(0.4, abs=0.02)
    assert problems.plus_n.mean() == pytest.approx(0.95, abs=0.01)
    for operator, slip in zip("+-*", noise.slip, strict=True):
        for care, share in ((False, 1.0), (True, 0.5)):
            chosen = [line for line in lines if line[4][0] == operator and bool(line[5]) == care]
            wrong = [line[6] != after(line[3], line[4]) for line in chosen]
            assert np.mean(wrong) == pytest.approx(0.9 * slip * share, abs=0.025)  # a random digit is right one time in ten


def test_exercises_are_right_and_reach_every_value_and_step() -> None:
    exercises = [row for seed in range(20) for row in tables(80, rng=np.random.default_rng(seed))]
    seen, lengths = set(), set()
    for prompt, solution in exercises:
        assert re.fullmatch(r"\d[-+*]\d=", prompt)
        steps = re.findall(r"(\d)([-+*]\d)=(\d)_", prompt + solution)
        lengths.add(len(steps))
        assert all(new == after(value, step) for value, step, new in steps)
        assert [new for _, _, new in steps[:-1]] == [value for value, _, _ in steps[1:]]
        seen |= {(value, step) for value, step, _ in steps}
    assert len(seen) == 270
    assert lengths == {1, 2, 4, 8}


def test_no_trace_is_longer_than_stated_and_prompts_have_one_length() -> None:
    tokenizer, problems = build_tokenizer(), drawn(50)
    most = LongNoise(slip=(0.5, 0.5, 0.5), careful=1.0, plus=0.0)
    problems.length_n[0], problems.operator_ns[0] = 8, 3
    traces = [f"{trace}<eos>" for trace in long_traces(problems, most, rng=np.random.default_rng(0))]
    assert max(map(len, tokenizer(traces)["input_ids"])) == LONGEST == 118
    prompt_ids = tokenizer(problems.prompts)["input_ids"]
    assert {len(ids) for ids in prompt_ids} == {18}
    assert 18 + LONGEST <= LONG_POSITIONS
    assert not any(tokenizer.unk_token_id in ids for ids in prompt_ids)


def test_the_layout_reads_the_answer() -> None:
    tokenizer = build_tokenizer()
    texts = ["<reasoning>0.~3?-3_7-3=4_1.+6_4+6=0_</reasoning><answer>0</answer><eos>", "<reasoning>0.~3?-3_7<eos>"]
    ids_nt = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    mask_nt = ids_nt != tokenizer.pad_token_id
    spans, text = find_blocks(ids_nt, mask_nt, layout=LONG_LAYOUT, vocabulary=Vocabulary.from_tokenizer(tokenizer))
    assert spans.fault_n.bool().tolist() == [False, True]
    assert (spans.start_nk[0].tolist(), spans.end_nk[0].tolist()) == ([0], [26])
    assert [entry["solution"]["answer"] for entry in text] == ["0", None]


@pytest.mark.filterwarnings("ignore::UserWarning")  # the model has learned next to nothing, which is a warning
@pytest.mark.long
def test_train_and_eval_run_on_it(tmp_path, monkeypatch) -> None:
    from spanwise.cli import app

    monkeypatch.setenv("SPANWISE_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    train = f"train --task digits_long --method grpo --steps 1 --prompts 2 --group-size 2 --eval-every 0 --output {run}"
    small = "--set start_steps=1 --set eval_prompts=4 --set eval_samples=2 --set report=false"
    app([*train.split(), *small.split()], exit_on_error=False, result_action="return_value")
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (recipe["task"], list(recipe["layout"])) == ("digits_long", ["solution"])
    for words, prompts in ((["--set", "eval_prompts=2"], 2), (["--prompts", "3"], 3)):
        app(["eval", str(run), "--samples", "2", *words], exit_on_error=False, result_action="return_value")
        assert len(pq.read_table(run / "evaluation.parquet")) == 2 * prompts
