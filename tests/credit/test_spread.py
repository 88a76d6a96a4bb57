"""Spread: credit per block to advantages per token."""

from dataclasses import replace

import pytest
import torch

from helpers import NAN, assert_close, double
from spanwise.credit import spread
from spanwise.credit.spread import spread_tokens
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.types import Credit, Spans


def spans_of(rows, blocks):
    return Spans.of_blocks([f"b{k}" for k in range(blocks)], torch.tensor(rows, dtype=torch.int8))


def credit_of(block_nk, stop_n=None):
    counts = torch.zeros(len(block_nk[0])).long()
    return Credit(double(block_nk), double(stop_n or [0] * len(block_nk)), counts, counts)


# A block of two tokens, a token of a tool, a block of two; one block of three tokens, then padding.
SPANS = spans_of([[0, 0, -1, 1, 1], [0, 0, 0, -1, -1]], 2)


@pytest.mark.parametrize(
    ("per", "expected"),
    [
        ("block", [[1 / 2, 1 / 2, 0, -1 / 4, -1 / 4], [-1 / 3, -1 / 3, -1 / 3 - 3 / 4, 0, 0]]),
        ("completion", [[1 / 4, 1 / 4, 0, -1 / 8, -1 / 8], [-1 / 3, -1 / 3, -1 / 3 - 3 / 4, 0, 0]]),
        (2.5, [[2 / 5, 2 / 5, 0, -1 / 5, -1 / 5], [-2 / 5, -2 / 5, -2 / 5 - 3 / 4, 0, 0]]),
        (torch.tensor([2.0, 4.0, 1.0]), [[1 / 2, 1 / 2, 0, -1 / 4, -1 / 4], [-1 / 4, -1 / 4, -1 / 4 - 3 / 4, 0, 0]]),
    ],
)
def test_spread(per, expected):
    spans = spans_of([*SPANS.block_nt.tolist(), [-1] * 5], 2)  # the last one has no token that could carry its stop
    credit = credit_of([[1.0, -0.5], [-1.0, 0.0], [0.0, 0.0]], [0.0, -0.75, 3.0])
    assert_close(spread(credit, spans, per=per, dtype=torch.float64), [*expected, [0] * 5], 1e-12)
    assert spread(credit, spans, per=per).dtype == torch.float32


@pytest.mark.parametrize(
    ("per", "expected"),
    [
        ("block", [[1, 1, 0, 1 / 2, 1 / 2], [1, 1, 1 - 3, 0, 0]]),
        ("completion", [[1 / 2, 1 / 2, 0, 1 / 4, 1 / 4], [1, 1, 1 - 1, 0, 0]]),
        (6, [[1 / 3, 1 / 3, 0, 1 / 6, 1 / 6], [1 / 2, 1 / 2, 1 / 2 - 1 / 2, 0, 0]]),
        (torch.tensor([2.0, 6.0]), [[1, 1, 0, 1 / 2, 1 / 2], [1 / 2, 1 / 2, 1 / 2 - 1 / 2, 0, 0]]),
    ],
)
def test_the_decision_to_stop_is_a_block_of_one_token(per, expected):
    # Advantages 2, 2 and 1, 1; then 3, 3, 3 and -3 for the decision to stop.
    adv_nt = torch.tensor([[2.0, 2.0, 9.0, 1.0, 1.0], [3.0, 3.0, 3.0, 9.0, 9.0]])
    stop_n = double([0.0, -3.0])
    assert_close(spread_tokens(adv_nt, SPANS, per=per, stop_n=stop_n, dtype=torch.float64), expected, 1e-12)
    untrained = replace(SPANS, block_nt=torch.full_like(SPANS.block_nt, -1))
    assert not spread_tokens(adv_nt, untrained, per=per, stop_n=stop_n).any()


def test_credit_that_is_not_finite_or_of_another_size_is_refused(unchecked_shapes):
    with pytest.raises(RewardError, match="completion 1"):
        spread(credit_of([[1.0, -0.5], [-1.0, NAN]]), SPANS)
    with pytest.raises(AlignmentError):
        spread(credit_of([[1.0]]), spans_of([[0, 1]], 2))
    for start, end in (([0, 5], [2, 3]), ([0, 3], [2, 6])):  # no intervals of five tokens
        spans = replace(SPANS, start_nk=torch.tensor([start, [0, 0]]), end_nk=torch.tensor([end, [3, 0]]))
        with pytest.raises(AlignmentError, match=f"completion 0 starts at token {start[1]} and ends before token {end[1]}"):
            spread(credit_of([[1.0, -0.5], [-1.0, 0.0]]), spans)
    for per in (0, -1, "token"):
        with pytest.raises(RecipeError):
            spread(credit_of([[1.0]]), spans_of([[0, 0]], 1), per=per)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32, 33, 100])
def test_spread_any_number_of_completions(size):
    rows = [[-1, 0, 1, 1, -1][i % 3 :] + [-1] * (i % 3) for i in range(size)]
    credit = credit_of([[i + 1.0, -2.0 * i] for i in range(size)])
    result = spread(credit, spans_of(rows, 2), dtype=torch.float64)
    for i, row in enumerate(rows):
        length = [max(row.count(0), 1), max(row.count(1), 1)]
        assert result[i].tolist() == [0.0 if k < 0 else float(credit.block_nk[i, k]) / length[k] for k in row]


def test_tokens_of_a_method_fit_their_spans():
    spans = spans_of([[0, 0, -1]], 1)
    for row in ([3.0, 4.0, 9.0], [3.0, 4.0], [3.0, 4.0, 9.0, 0.0]):  # padded by the trainer, or for other ranks
        assert spread_tokens(torch.tensor([row]), spans).tolist() == [[1.5, 2.0, 0.0]]
    with pytest.raises(AlignmentError):
        spread_tokens(torch.tensor([[3.0, 4.0, 9.0, 1.0]]), spans)
