"""Streams: rewards of blocks under a critic, against a slow oracle."""

import math
from dataclasses import replace

import pytest
import torch

from credit_batches import scores_of
from helpers import NAN, assert_close, double
from oracles import slow_streams
from spanwise import Batch, Layout, Objective, Reading, Scheme, Spans, advantages, credit_batch
from spanwise.credit import value_target
from spanwise.credit.spread import reward_streams
from spanwise.errors import AlignmentError, RecipeError
from spanwise.pipeline import streams
from spanwise.types import Status

OK, ABSENT, UNPARSABLE, TIMEOUT, ERROR, UNSCORED, BROKE = (int(status) for status in Status)
BLOCKS = Layout({"solution": ["answer"], "confidence": ["confidence"]})
PAIR = (
    Objective("correct", pays="solution"),
    Objective("brier", pays="confidence", given="correct", weight=2.0, if_missing=-1.0),
)
# Two tokens of solution, one that a tool wrote, two of confidence.
TOKENS = torch.tensor([[0, 0, -1, 1, 1]])


def reading_of(block_nt, reward_nm, status_nm=None, *, names=("solution", "confidence"), rewards=("correct", "brier")):
    scores = scores_of(reward_nm, tuple(rewards))
    if status_nm is not None:
        scores.status_nm[:] = status_nm
    spans = Spans.of_blocks(names, block_nt.to(torch.int8))
    return Reading(scores, spans.length_nk, spans.fault_n, spans)


def run(scheme, block_nt, reward_nm, value_nt, status_nm=None, *, mask_nt=None, **fields):
    """What every token gets through the whole road, and what the decision to stop gets."""
    reading = reading_of(block_nt, reward_nm, status_nm, names=scheme.layout.names, rewards=scheme.names)
    mask_nt = block_nt >= 0 if mask_nt is None else mask_nt
    batch = Batch(torch.zeros(len(block_nt)).long(), mask_nt=mask_nt, value_nt=value_nt, **fields)
    credit = credit_batch(reading, batch, scheme)
    return credit, advantages(credit, reading.spans, scheme, dtype=torch.float64)


@pytest.mark.parametrize("values", ["shared", "objective"])
def test_whitening_is_of_one_stream(values):
    """Tokens are compared with the tokens of their stream; a decision to stop is one of them."""
    options = {"lam": 1.0, "whiten": True, "ddof": 0, "eps": 0.0}
    scheme = Scheme("gae", BLOCKS, (PAIR[0], replace(PAIR[1], weight=1.0)), 1, options, values=values)
    block_nt = torch.tensor([[0, 1], [0, -1]])
    value_nt = torch.zeros(2, 2, len(scheme.value_names), dtype=torch.float64)
    credit, _ = run(scheme, block_nt, [[1, -0.5], [0, NAN]], value_nt)
    if values == "objective":  # correct: 1 and 0; brier: -1/2, and -1 for stopping
        assert_close(credit.token_nt, [[1, 1], [-1, 0]], 1e-12)
        assert_close(credit.stop_n, [0, -1], 1e-12)
    else:  # returns 1/2, -1/2 and -1: mean -1/3, squares 25 + 1 + 16 over 36 and 3
        std = (42 / 108) ** 0.5
        assert_close(credit.token_nt, [[5 / 6 / std, -1 / 6 / std], [-2 / 3 / std, 0]], 1e-12)


def test_a_bootstrap_stands_behind_the_streams_that_were_cut():
    value_nts = double([[[0.25, NAN], [0.5, NAN], [NAN, NAN], [NAN, -0.25], [NAN, -0.125]]])
    scheme = Scheme("gae", BLOCKS, PAIR, 1, {"lam": 0.5, "gamma": 0.5})
    # The solution had ended: 1 - 1/2; 1/4 - 1/4 + 1/4 x 1/2. The confidence: 0 + 1/2 (-1/4) + 1/8 = 0; 1/4 - 1/16 + 0; times 2.
    for behind, confidence in ((double([-0.25]), 3 / 8), (double([[7.0, -0.25]]), 3 / 8), (double([NAN]), 0)):
        credit, _ = run(scheme, TOKENS, [[1, 0]], value_nts, bootstrap_n=behind)
        assert_close(credit.token_nt, [[1 / 8, 1 / 2, 0, confidence, 0]], 1e-12)  # an unknown end teaches nothing


RULES = {
    "apart": (
        Objective("correct", pays="a", if_missing=0.0),
        Objective("brier", pays="b", given="correct", if_missing=-1.0, weight=0.5),
        Objective("format", pays="c", weight=-2.0),
    ),
    "overlapping": (
        Objective("correct", pays=("a", "b"), if_missing=0.0, weight=3.0),
        Objective("format", pays=("b", "c"), if_missing=-0.5),
        Objective("brier", pays="c", given="correct"),
    ),
    "the same": (
        Objective("correct", pays=("a", "b", "c"), if_missing=0.0),
        Objective("format", pays=("c", "b", "a"), weight=0.25),
    ),
    "some": (Objective("format", pays="b"),),  # shared, tokens that nobody pays train, too
}
THREE = Layout({"a": ["answer"], "b": ["confidence"], "c": ["answer", "confidence"]})


def draw_case(seed, m, s):
    """Completions of up to three blocks, each of up to four tokens, with a tool's tokens in between and padding on both sides."""
    n, g = 24, torch.Generator().manual_seed(seed)

    def whole(high, *shape):
        return torch.randint(high, shape, generator=g)

    rows = []
    for _ in range(n):
        row = []
        for k in range(3):
            for _ in range(int(whole(5)) * int(whole(4) > 0)):
                row += [-1] * int(whole(4) == 0) + [k]
        rows.append([-1] * int(whole(3)) + row)
    width = max(map(len, rows))
    block_nt = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    status_nm = torch.tensor([OK, OK, OK, OK, ABSENT, UNPARSABLE, ERROR, TIMEOUT, UNSCORED])[whole(9, n, m)]
    reward_nm = torch.where(status_nm == OK, torch.randn(n, m, generator=g, dtype=torch.float64), NAN)
    value_nts, logp_nt, end_ns = (
        torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((n, width, s), (n, width), (n, s))
    )
    return block_nt, reward_nm, status_nm, value_nts, -2 * logp_nt.abs(), end_ns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("values", ["shared", "objective"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", ["gae", "start", "end", "adaptive"])
def test_streams_equal_the_slow_oracle(method, rule, values, seed):
    objectives, is_sae = RULES[rule], method in ("start", "end")
    options = {"length_adaptive_alpha": 0.7} if method == "adaptive" else {"lam": 0.6}
    options |= {"boundary": method, "threshold": 0.4} if is_sae else {}
    scheme = Scheme("sae" if is_sae else "gae", THREE, objectives, 1, {"gamma": 0.9, **options}, values=values)
    case = draw_case(seed, len(objectives), len(scheme.value_names))
    block_nt, reward_nm, status_nm, value_nts, logp_nt, end_ns = case
    credit, adv_nt = run(scheme, block_nt, reward_nm, value_nts, status_nm, logp_nt=logp_nt, bootstrap_n=end_ns)
    expected_nt, stop_n = slow_streams(
        *case, objectives=objectives, names=THREE.names, shared=values == "shared", method=method, gamma=0.9, lam=0.6
    )
    assert_close(credit.token_nt, expected_nt, 1e-10)
    assert_close(credit.stop_n, stop_n, 1e-10)
    assert torch.equal(credit.adv_nm[:, 0], ((credit.token_nt != 0).any(dim=1) | (stop_n != 0)).double())
    assert values == "objective" or not stop_n.any()
    last_n = torch.where(block_nt >= 0, torch.arange(block_nt.shape[1]), -1).max(dim=1).values
    assert_close(adv_nt, expected_nt.scatter_add(1, last_n.clamp(min=0)[:, None], stop_n[:, None]), 1e-10)


@pytest.mark.parametrize("poison", [NAN, 1e9, math.inf, -1e30])
@pytest.mark.parametrize("values", ["shared", "objective"])
@pytest.mark.parametrize(("method", "options"), [("gae", {}), ("gae", {"whiten": True}), ("sae", {})])
def test_what_stands_outside_a_stream_is_never_read(method, options, values, poison):
    scheme = Scheme(method, THREE, RULES["apart"], "block", options, values=values)
    block_nt, reward_nm, status_nm, value_nts, logp_nt, _ = draw_case(5, 3, len(scheme.value_names))
    mask_nt = block_nt >= 0
    reading = reading_of(block_nt, reward_nm, status_nm, names=THREE.names, rewards=scheme.names)
    held_nts = streams(reading, Batch([0] * 24, mask_nt=mask_nt), scheme).mask_snt.permute(1, 2, 0)
    poisoned = torch.where(held_nts, value_nts, poison), torch.where(mask_nt, logp_nt, poison)
    clean, dirty = (
        run(scheme, block_nt, reward_nm, value, status_nm, logp_nt=logp)[1]
        for value, logp in ((value_nts, logp_nt), poisoned)
    )
    assert bool(clean.any())
    assert torch.equal(clean, dirty)
    assert not bool(dirty[~mask_nt].any() | dirty[~mask_nt].signbit().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_credit_of_tokens_is_as_wide_as_float32_at_least(dtype):
    credit, _ = run(Scheme("gae", BLOCKS, PAIR, values="shared"), TOKENS, [[1, -0.25]], torch.zeros(1, 5, dtype=dtype))
    assert credit.token_nt.dtype == torch.float32
    reading, batch = reading_of(TOKENS, [[1, -0.25]]), Batch([0], mask_nt=TOKENS >= 0)
    narrow_nts, wide_nts = torch.zeros(1, 5, 2, dtype=dtype), torch.zeros(1, 5, 2).double()
    for value_nt, expected in ((None, torch.float32), (narrow_nts, torch.float32), (wide_nts, torch.float64)):
        assert streams(reading, replace(batch, value_nt=value_nt), Scheme("gae", BLOCKS, PAIR)).reward_snt.dtype == expected


def test_the_targets_of_a_critic():
    scheme = Scheme("gae", BLOCKS, PAIR)
    block_nt = torch.cat([TOKENS, torch.tensor([[0, 0, -1, -1, -1]])])
    reading = reading_of(block_nt, [[1, -0.25], [0, NAN]])
    batch = Batch([0, 0], mask_nt=block_nt >= 0, value_nt=torch.full((2, 5, 2), 0.125))
    by_stream = streams(reading, batch, scheme)
    targets = [value_target(**part) for part in by_stream.inputs(batch.value_nt)]
    assert by_stream.names == scheme.value_names == ("correct", "brier")
    assert targets[0].dtype == torch.float32
    assert targets[0].tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert targets[1].tolist() == [[0, 0, 0, -0.25, -0.25], [0, -1, 0, 0, 0]]  # the value before the decision to stop
    assert by_stream.weight_s.tolist() == [1.0, 2.0]
    assert by_stream.stop_sn.tolist() == [[False, False], [False, True]]
    assert by_stream.last_sn.tolist() == [[False, True], [True, True]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
@pytest.mark.parametrize("values", ["shared", "objective"])
def test_nothing_in_nothing_out(shape, values):
    scheme = Scheme("gae", BLOCKS, PAIR, values=values)
    value_nt = torch.zeros(*shape, len(scheme.value_names))
    _, adv_nt = run(scheme, torch.zeros(shape).long(), torch.zeros(shape[0], 2), value_nt)
    assert adv_nt.shape == shape
    # Nothing carries what a completion without a trainable token owes.
    credit, adv_nt = run(scheme, torch.tensor([[-1, -1]]), [[1, NAN]], torch.zeros(1, 2, len(scheme.value_names)))
    assert not adv_nt.any()
    assert not credit.stop_n.any()


def test_what_does_not_fit_is_refused(unchecked_shapes):
    scheme, shared = Scheme("gae", BLOCKS, PAIR), Scheme("gae", BLOCKS, PAIR, values="shared")
    for rule, shape, ends in (
        (scheme, (1, 5), None),
        (scheme, (1, 5, 1), None),
        (shared, (1, 5, 2), None),
        (shared, (1, 4), None),
        (shared, (1, 5, 1, 1), None),
        (scheme, (1, 5, 2), torch.zeros(1, 3)),
    ):
        with pytest.raises(AlignmentError):
            run(rule, TOKENS, [[1, -0.25]], torch.zeros(shape), bootstrap_n=ends)
    reading = reading_of(TOKENS, [[1, -0.25]])
    afar = Reading(reading.scores, reading.length_nk, reading.fault_n)  # without its spans
    batch = Batch([0], mask_nt=TOKENS >= 0, value_nt=torch.zeros(1, 5, 2))
    for function in (credit_batch, streams):
        with pytest.raises(RecipeError):
            function(afar, batch, scheme)
    with pytest.raises(RecipeError):
        streams(reading, batch, Scheme("bae", BLOCKS, PAIR))
    with pytest.raises(AlignmentError):
        reward_streams(reading.scores, PAIR, BLOCKS.names, TOKENS, torch.ones(1, 4).bool())


@pytest.mark.parametrize("values", ["shared", "objective"])
def test_a_token_of_a_block_that_is_not_trained_is_deleted(values):
    """The mask of the batch has the last word: the reward lies on the last trained token of the block."""
    scheme = Scheme("gae", BLOCKS, PAIR[:1], 1, {"lam": 0.5}, values=values)
    mask_nt = torch.tensor([[True, False, False, False, True]])
    credit, _ = run(scheme, TOKENS, [[1]], double([[0.25, NAN, NAN, 1e9, 0.5]]), mask_nt=mask_nt)
    # Shared: 0 - 1/2; 1 + 1/2 - 1/4 - 1/4. Alone: 1 - 1/4.
    assert credit.token_nt.tolist() == [[1.0 if values == "shared" else 0.75, 0, 0, 0, -0.5 if values == "shared" else 0]]
