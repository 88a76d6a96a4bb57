"""What reading takes beside what it keeps: the ids of the tokens, and no text; and that credit keeps no more of a token."""

import tracemalloc

import pytest

from rollout_files import write_lines
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.rollouts import read_rollouts


def chat(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("names", "said"),
    [(("input", "output"), str), (("prompt", "completion"), str), (("question", "responses"), lambda text: [chat(text)])],
)
def test_a_dump_of_texts_is_read_without_ever_holding_its_texts(names, said, tmp_path):
    words = " ".join(f"<a>word{n % 50}</a>" for n in range(500))
    prompt, completion = names
    rows = [{prompt: f"{n // 8}", completion: said(f"{n} {words}"), "score": 1.0, "step": 1} for n in range(150)]
    file = write_lines(tmp_path / "1.jsonl", rows)
    del rows
    tracemalloc.start()
    try:
        table = read_rollouts(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    kept = table.tokens.values.nbytes + table.trainable.nbytes  # four bytes and one for each token
    assert file.stat().st_size > 1_000_000
    assert peak < 1.5 * kept


def test_credit_keeps_nothing_of_a_token_beside_what_was_read(tmp_path):
    words = " ".join(f"word{n % 50}" for n in range(2000))
    said = f"<reasoning>{words}</reasoning><answer>4</answer><analysis>{words}</analysis><confidence>0.5</confidence>"
    rows = [{"prompt": f"{n // 8}", "completion": said, "answer": str(n % 2 + 3), "step": 1} for n in range(50)]
    file = write_lines(tmp_path / "1.jsonl", rows)
    tracemalloc.start()
    try:
        result = credit_rollouts(file, methods=["grpo", "rlcr", "bae"])
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len({one.file_spans.names for one in result.applied}) == 2
    assert kept < 1.2 * (result.table.tokens.values.nbytes + result.table.trainable.nbytes)
