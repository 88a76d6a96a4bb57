"""The page of `spanwise credit` is made of its files and shows what was worked out: every token under every method."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trl_small
from report_pages import Page, data_of, decoded
from rollouts_cases import Case, completion
from spanwise.commands.credit.credit import credit
from spanwise.commands.credit.page import opening_tokens
from spanwise.credit import sae
from spanwise.credit.methods._gae import SaeSegments
from spanwise.rollouts import write_rollouts

LAYOUT = {"solution": ["answer"], "confidence": ["confidence"]}


def run(folder, *, answers, **options):
    """Completions of some prompts, four of each, the third left out of the loss."""
    tokenizer = trl_small.tokenizer()
    tokenizer.save_pretrained(folder / "model")
    rows = []
    for n, answer in enumerate(answers):
        ids = tokenizer.convert_tokens_to_ids(answer.pieces)
        spans = {"start": {"solution": 0, "confidence": 0}, "end": {"solution": len(ids) * (n != 2), "confidence": 0}}
        rows.append(completion(
            ids, group=n // 4, prompt=f"prompt {n // 4}", trainable=[block >= 0 for block in answer.blocks], **spans,
            reward={"correct": answer.right}, logprobs=[-0.25] * len(ids),
        ))  # fmt: skip
    write_rollouts(folder / "in.parquet", Case(rows, per_token=("logprobs",)).parts(), tokenizer=folder / "model")
    options = {"methods": ["grpo", "rlcr", "bae"], "overrides": {"layout": LAYOUT}, **options}
    return credit(folder / "in.parquet", output=folder / "out", **options)


def test_the_page_shows_what_was_worked_out_of_whole_groups_evenly_from_the_file(tmp_path, monkeypatch):
    """Eight of twelve, written in parts of one or two prompts: the first prompt and the last."""
    monkeypatch.setattr("spanwise.commands.credit.write.AT_A_TIME", 90)
    answers = [*trl_small.SAID, *trl_small.SAID[:4]]
    result = run(tmp_path, answers=answers, rows=8)
    html = (tmp_path / "out" / "report.html").read_text()
    data = data_of(html)
    assert data["methods"] == ["grpo", "rlcr", "bae"]
    for n, row in enumerate([*range(4), *range(8, 12)]):
        assert decoded(data["prompts"], n) == [f"prompt {row // 4}"]
        assert decoded(data["tokens"], n) == answers[row].pieces
        assert data["rewards"][n][0] == answers[row].right
        for method, applied in enumerate(result.applied):
            expected = pytest.approx(applied.advantages(result.table, row, row + 1).tolist(), rel=1e-3)
            untrained = [None] * len(answers[row].pieces)
            assert decoded(data["advantages"][method], n) == (untrained if row == 2 else expected)
    assert "The page shows 8 of 12 completions, drawn evenly over the file. The option --rows sets how many" in html
    assert ">12</" in html  # the figures are over all of them


def test_the_page_has_a_row_for_stopping_and_says_of_no_living_stratum_that_it_is_dead(tmp_path):
    """By prompt: right and wrong; right, right, right without a confidence, wrong; nothing differs; only stopping differs."""
    four, three = trl_small.say("", "4", 0.5, 1.0), trl_small.say("", "3", 0.5, 1.0)
    stops = trl_small.say("", "3", None, 1.0)
    run(tmp_path, answers=[*trl_small.SAID, *[four] * 4, *[three] * 3, stops], methods=["grpo", "bae"])
    cells = Page((tmp_path / "out" / "report.html").read_text()).cells
    # Prompt 1: -1 less the mean of -.0625 and -.25, the two that are right; prompt 3: -1 less -.25. Their mean is .796875.
    assert ["bae: stop", "2", "0.797", "0", "-0.844", "-0.750"] in cells
    counts = {row[0]: row[1] for row in cells if row}
    assert "grpo: stop" not in counts
    assert counts["bae: confidence"] == "14"  # two of the sixteen have none: absent, not credit 0
    # Of four prompts the last two are all right. The confidences have six strata: right and wrong of prompts 0 and 1, one of
    # each other prompt. The wrong one of prompt 1 is alone and in prompt 2 all are equal; in prompt 3 stopping is charged.
    assert ["correct", "0.500", "0.500"] in cells
    assert ["brier", "not measured", "0.333"] in cells


def read_by_sae(logp, trained, threshold, boundary):
    """The tokens whose value an earlier token's advantage depends on: by the definition of SAE those that open a segment."""
    size, mask_nt, positions = len(logp), torch.tensor([trained]), []
    for t in range(size):
        value_nt = torch.zeros(1, size)
        value_nt[0, t] = 1.0
        options = {"lam": 0.5, "threshold": threshold, "boundary": boundary}
        adv_nt = sae(torch.zeros(1, size), value_nt, torch.tensor([logp]), mask_nt, **options)
        if trained[t] and bool((adv_nt[0, :t] != 0).any()):
            positions.append(t)
    return positions


@settings(deadline=None)  # a busy machine is no fault
@given(
    tokens=st.lists(st.tuples(st.sampled_from([0.01, 0.15, 0.2, 0.25, 0.9]), st.booleans()), max_size=9),
    threshold=st.sampled_from([0.0, 0.2, 0.5, 2.0]),
    boundary=st.sampled_from(["start", "end"]),
)
def test_segments_open_where_sae_reads_a_value(tokens, threshold, boundary):
    logp, trained = [float(np.log(p)) for p, _ in tokens], [flag for _, flag in tokens]
    noisy = np.where(trained, logp, np.nan)  # tokens that are not trained are never read
    opened = opening_tokens(SaeSegments(threshold, boundary), noisy, np.array(trained, dtype=bool))
    assert opened == read_by_sae(logp, trained, threshold, boundary)
