"""What mutation testing found untested in `credit/` and `segment/`: defaults, options that are handed on, chunks and sentences.

`docs/testing.md` says how it is run.
"""

import pytest
import torch

import spanwise.segment.tagged as tagged
from spanwise.credit import (
    advantage,
    assign,
    bae,
    blended_baseline,
    centred,
    dr_grpo,
    grpo,
    moments,
    precision_mean,
    refine,
    rlcr,
    spread,
)
from spanwise.credit.strata import standardised, standardised_tokens, weighted_mean
from spanwise.errors import AlignmentError, LayoutError, RecipeError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.segment import Vocabulary, segment
from spanwise.segment.parse import TagParser
from spanwise.types import Credit, Scores, Spans

NAN = float("nan")
PAIR, SAME = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([0, 0])
HALF_ROOT = 2**-0.5


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=actual.dtype), atol=tolerance, rtol=0, equal_nan=True)


# strata


def test_two_are_enough_for_a_sample_standard_deviation():
    assert_close(moments(PAIR, SAME).std_n(ddof=1), [2**0.5] * 2)
    assert_close(moments(PAIR, SAME).std_n(ddof=0), [1.0] * 2)
    assert_close(moments(PAIR, SAME).std_n(ddof=2), [0.0] * 2)
    assert_close(centred(PAIR, SAME, scale="std"), [-HALF_ROOT, HALF_ROOT])
    assert_close(centred(PAIR, SAME, scale="none"), centred(PAIR, SAME).tolist())


def test_completions_outside_every_stratum():
    for stratum_n in (torch.tensor([0, -1]), torch.tensor([-1, -1])):  # some, and nobody in any
        within = moments(PAIR, stratum_n)
        assert within.count_n()[1] == 0
        assert within.mean_n()[1].isnan()
        assert within.std_n(ddof=0)[1] == 0
        assert within.deviation_n[1] == 0
        assert bool(within.pooled_variance_elsewhere().isnan().all())
    assert refine(SAME, torch.tensor([NAN, 1.0])).tolist()[0] == -1
    assert_close(advantage(PAIR, SAME, baseline="outcome", outcome_n=torch.full((2,), NAN)).advantage_n, [0.0, 0.0])


def test_precision_mean_ignores_what_is_unknown():
    mixed = precision_mean(torch.tensor([[NAN, 3.0], [2.0, NAN]]), torch.tensor([[1.0, NAN], [4.0, 1.0]]))
    assert_close(mixed, [2.0, NAN])


def test_defaults_of_whitening_tokens():
    value_nt, mask_nt = torch.tensor([[0.0, 2.0, NAN]], dtype=torch.float64), torch.tensor([[True, True, False]])
    before = value_nt.clone()
    expected = 1 / (2 + 1e-8) ** 0.5
    assert_close(standardised_tokens(value_nt, mask_nt), [[-expected, expected, 0.0]])
    assert value_nt.tolist()[0][:2] == before.tolist()[0][:2]  # its input stays as it is
    tiny = torch.tensor([[0.0, 2e-4]], dtype=torch.float64)
    assert_close(standardised_tokens(tiny, mask_nt[:, :2]), [[-1e-4 / (3e-8) ** 0.5, 1e-4 / (3e-8) ** 0.5]], 1e-9)


def test_whitening_skips_rows_without_tokens():
    mask_nt = torch.zeros(70, 2, dtype=torch.bool)
    mask_nt[[33, 69]] = True  # the first 32 rows, which are read together, hold nothing
    value_nt = torch.where(mask_nt, 0.0, NAN).double()
    value_nt[69] = 2.0
    result = standardised_tokens(value_nt, mask_nt, ddof=0, eps=0.0)
    assert_close(result[[0, 33, 69]], [[0.0, 0.0], [-1.0, -1.0], [1.0, 1.0]])


def test_where_epsilon_stands():
    value_n = torch.tensor([0.0, 2.0], dtype=torch.float64)  # variance 1 over both
    assert_close(standardised(value_n, ddof=0, eps=3.0), [-1 / 4, 1 / 4])
    assert_close(standardised(value_n, ddof=0, eps=3.0, eps_at="variance"), [-1 / 2, 1 / 2])
    assert_close(standardised(value_n, ddof=0, eps=4.0, eps_at="floor"), [-1 / 2, 1 / 2])
    assert_close(standardised(value_n, ddof=0, eps=0.25, eps_at="floor"), [-1.0, 1.0])
    for one in (standardised(value_n[1:], eps=1.0), standardised(value_n, ddof=2, eps=1.0)):
        assert one.abs().sum() == 0  # no degree of freedom
    assert_close(weighted_mean(value_n, torch.tensor([0.375, 0.125]), SAME), [0.5, 0.5])


def test_a_scale_that_does_not_exist_is_refused():
    with pytest.raises(RecipeError, match="There is no scale 'var'"):
        centred(PAIR, SAME, scale="var")


# methods hand their options on

METHODS = {
    "grpo": lambda r, g, **o: grpo(r, g, **o),
    "dr_grpo": lambda r, g, **o: dr_grpo(r, g, **o),
    "rlcr": lambda r, g, **o: rlcr(r, torch.zeros_like(r), g, **o),
    "bae": lambda r, g, **o: bae(r[:, None], g, **o)[:, 0],
    "advantage": lambda r, g, **o: advantage(r, g, **o).advantage_n,
}


@pytest.mark.parametrize("name", METHODS)
def test_min_stratum_is_two_and_can_be_three(name):
    assert METHODS[name](PAIR, SAME).abs().min() > 0
    assert METHODS[name](PAIR, SAME, min_stratum=3).tolist() == [0.0, 0.0]


def test_defaults_of_advantage():
    assert_close(advantage(PAIR, torch.tensor([0, 1])).advantage_n, [0.0, 0.0])  # the group, not the batch
    assert_close(advantage(PAIR, SAME, scale="std").advantage_n, [-HALF_ROOT, HALF_ROOT])


def test_bae_hands_outcomes_on():
    reward_nk = torch.tensor([[1.0, -0.1], [1.0, -0.3], [0.0, -0.5], [0.0, -0.7]], dtype=torch.float64)
    group_n = torch.tensor([0, 0, 0, 0])
    assert_close(bae(reward_nk, group_n)[:, 1], [0.1, -0.1, 0.1, -0.1])
    other = torch.tensor([[NAN, 1.0], [NAN, 0.0], [NAN, 1.0], [NAN, 0.0]])
    assert_close(bae(reward_nk, group_n, outcome_nk=other)[:, 1], [0.2, 0.2, -0.2, -0.2])


def brier_batch():
    q = torch.tensor([0.5, 0.9, 0.6, 0.8, 0.4, 0.7, 0.3, 0.5, 0.2, 0.6], dtype=torch.float64)
    c = torch.tensor([1.0, 1, 0, 1, 0, 0, 1, 0, 1, 0], dtype=torch.float64)
    return c, -((q - c) ** 2), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 3, 3]), torch.stack([-(q**2), -((q - 1) ** 2)], dim=1)


def test_rescored_rewards_reach_the_blended_baseline():
    c, brier, group_n, by_outcome = brier_batch()
    expected = brier - blended_baseline(brier, group_n, c, by_outcome)
    assert (expected - (brier - blended_baseline(brier, group_n, c))).abs().max() > 0.01
    result = advantage(brier, group_n, baseline="blended", outcome_n=c, by_outcome_n2=by_outcome)
    assert_close(result.advantage_n, expected.tolist())
    both = torch.stack([torch.full_like(by_outcome, NAN), by_outcome], dim=1)
    assert_close(bae(torch.stack([c, brier], 1), group_n, baseline="blended", by_outcome_nk2=both)[:, 1], expected.tolist())
    by_outcome_nmo = torch.stack([both[:, 0], by_outcome], dim=1)
    scores = Scores(
        ("correct", "brier"), torch.stack([c, brier], 1), torch.zeros(10, 2, dtype=torch.int8), by_outcome_nmo
    )  # fmt: skip
    objectives = (Objective("correct", pays=("a",)), Objective("brier", pays=("b",), given="correct", baseline="blended"))
    credit = assign(scores, group_n, torch.ones(10, 2).bool(), objectives=objectives, block_names=("a", "b"))
    assert_close(credit.block_nk[:, 1], expected.tolist())


def test_blended_with_an_absent_reward():
    c, brier, group_n, by_outcome = brier_batch()
    brier[1] = NAN
    result = advantage(brier, group_n, baseline="blended", outcome_n=c, by_outcome_n2=by_outcome, if_missing=-1.0)
    baseline_n = blended_baseline(brier, group_n, c, by_outcome)
    assert_close(result.missing_n, [0.0, -1.0 - float(baseline_n[1]), 0, 0, 0, 0, 0, 0, 0, 0])
    assert result.alone_n.tolist() == [False] * 10
    nobody = advantage(torch.tensor([NAN, 1.0]), SAME, baseline="blended", outcome_n=torch.tensor([NAN, NAN]))
    assert nobody.alone_n.tolist() == [False, True]


@pytest.mark.parametrize("baseline", ["batch", "group", "outcome", "blended"])
def test_a_batch_without_any_reward_costs_nothing(baseline):
    nothing = torch.tensor([NAN, NAN])
    result = advantage(nothing, SAME, baseline=baseline, outcome_n=torch.tensor([1.0, 1.0]), if_missing=-1.0)
    assert result.missing_n.tolist() == [0.0, 0.0]
    assert result.advantage_n.tolist() == [0.0, 0.0]
    assert result.missing_n.dtype == result.advantage_n.dtype == torch.float64


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([0.0, 2.0, NAN], -2 / (2**0.5 + 0.5)), ([0.0, 0.5, NAN], -1.25 / (0.125**0.5 + 0.5)), ([1.0, 1.0, NAN], -2.0)],
)
def test_what_is_missing_is_scaled_like_the_rest(rewards, expected):  # a constant stratum has no scale
    reward_n, group_n = torch.tensor(rewards, dtype=torch.float64), torch.zeros(3).long()
    result = advantage(reward_n, group_n, scale="std", eps=0.5, if_missing=-1.0)
    assert_close(result.missing_n, [0.0, 0.0, expected])


def test_without_a_baseline_nobody_is_alone():
    result = advantage(torch.tensor([NAN, 0.5]), SAME, baseline="none")
    assert result.alone_n.tolist() == [False, False]
    assert [value.dtype for value in result] == [torch.float64, torch.float64, torch.bool]


# assign


def scores_of(*rows, names=("correct", "brier")):
    reward_nm = torch.tensor(rows, dtype=torch.float64)
    status = torch.where(reward_nm.isnan(), 1, 0).to(torch.int8)
    return Scores(names, reward_nm, status, torch.full((*reward_nm.shape, 2), NAN, dtype=torch.float64))


def test_two_objectives_of_one_block_add_up():
    objectives = [Objective("correct", pays=("a",)), Objective("brier", pays=("a",), weight=10.0)]
    credit = assign(scores_of([1, 0.2], [0, 0.0]), SAME, torch.ones(2, 1).bool(), objectives=objectives, block_names=("a",))
    assert_close(credit.block_nk, [[0.5 + 1.0], [-0.5 - 1.0]])
    assert credit.block_nk.dtype == credit.stop_n.dtype == torch.float64


def test_two_missing_blocks_both_cost_the_decision_to_stop():
    objectives = [Objective("correct", pays=("a",), if_missing=-1.0), Objective("brier", pays=("b",), if_missing=-2.0)]
    present = torch.tensor([[True, True, True], [False, False, True]])
    scores = scores_of([0.5, 0.25], [NAN, NAN])
    credit = assign(scores, SAME, present, objectives=objectives, block_names=("a", "b", "c"))
    assert_close(credit.stop_n, [0.0, -1.5 - 2.25])


def test_two_objectives_of_one_missing_block_add_up():
    objectives = [Objective("correct", pays=("a",), if_missing=-1.0), Objective("brier", pays=("a",), if_missing=-2.0)]
    present = torch.tensor([[True, True], [False, True]])
    scores = scores_of([0.5, 0.25], [NAN, NAN])
    credit = assign(scores, SAME, present, objectives=objectives, block_names=("a", "c"))
    assert_close(credit.stop_n, [0.0, -1.5 - 2.25])


def test_weights_and_stand_ins_are_not_rounded_to_single_precision():
    objectives = [Objective("correct", pays=("a",), weight=0.1), Objective("brier", pays=("a",), if_missing=-0.3)]
    credit = assign(
        scores_of([1, -0.5], [0, NAN]),
        SAME,
        torch.ones(2, 1).bool(),
        objectives=objectives,
        block_names=("a",),
        sum_first=True,
    )
    assert_close(credit.block_nk, [[(-0.4 + 0.3) / 2], [(0.4 - 0.3) / 2]], 1e-15)


@pytest.mark.parametrize("estimator", [None, dr_grpo])
def test_a_pair_is_not_alone(estimator):
    objectives = [Objective("correct", pays=("a",))]
    present, group_n = torch.ones(3, 1).bool(), torch.tensor([0, 0, 1])
    scores = scores_of([1.0], [0.0], [1.0], names=("correct",))
    credit = assign(
        scores, group_n, present, objectives=objectives, block_names=("a",), sum_first=True, estimator=estimator
    )  # fmt: skip
    assert credit.singleton_m.tolist() == [1]
    assert credit.block_nk.flatten().tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("sum_first", [False, True])
def test_assign_hands_its_options_on(sum_first):
    def run(objective, rewards, **options):
        scores = scores_of(*([r] for r in rewards), names=("correct",))
        size = len(rewards)
        return assign(
            scores, torch.zeros(size).long(), torch.ones(size, 2).bool(), objectives=[objective], block_names=("a", "b"),
            sum_first=sum_first, **options,
        ).block_nk  # fmt: skip

    plain, scaled = Objective("correct", pays=("a",)), Objective("correct", pays=("a",), scale="std")
    rewards = [1.0, 0.0, 0.0, 0.5]
    reward_n, group_n = torch.tensor(rewards, dtype=torch.float64), torch.zeros(4).long()
    assert_close(run(plain, rewards)[:, 0], dr_grpo(reward_n, group_n).tolist())
    assert_close(run(plain, rewards, leave_one_out=True)[:, 0], dr_grpo(reward_n, group_n, leave_one_out=True).tolist())
    assert_close(run(scaled, rewards)[:, 0], grpo(reward_n, group_n).tolist())
    assert_close(run(scaled, rewards, ddof=0, eps=0.5)[:, 0], grpo(reward_n, group_n, ddof=0, eps=0.5).tolist())
    assert_close(run(Objective("correct", pays=("a",), baseline="none"), rewards)[:, 0], rewards)
    assert run(plain, rewards)[:, 1].tolist() == [0.0] * 4  # not paid
    assert run(plain, [1.0, 0.0], min_stratum=3).tolist() == [[0.0, 0.0]] * 2


def test_a_sum_counts_who_is_alone_and_who_is_absent():
    objectives = [Objective("correct", pays=("a",)), Objective("brier", pays=("a",))]
    credit = assign(
        scores_of([1, 0.5], [0, NAN], [1, 1]), torch.tensor([0, 0, 1]), torch.ones(3, 1).bool(), objectives=objectives,
        block_names=("a",), sum_first=True,
    )  # fmt: skip
    assert credit.singleton_m.tolist() == [2, 2]
    assert credit.absent_m.tolist() == [0, 1]
    assert credit.block_nk.tolist() == [[0.0]] * 3
    assert credit.block_nk.dtype == torch.float64


@pytest.mark.parametrize(("count", "fine"), [(16, True), (17, False)])
@pytest.mark.parametrize("baseline", ["outcome", "blended"])
def test_an_outcome_is_discrete(count, fine, baseline):
    scores = scores_of(*([i, 0.0] for i in range(count)))
    objectives = [Objective("correct", pays=("a",)), Objective("brier", pays=("a",), given="correct", baseline=baseline)]
    group_n, present = torch.zeros(count).long(), torch.ones(count, 1).bool()
    if fine:
        assign(scores, group_n, present, objectives=objectives, block_names=("a",))
    else:
        with pytest.raises(RecipeError, match="took 17 different values"):
            assign(scores, group_n, present, objectives=objectives, block_names=("a",))


@pytest.mark.parametrize("baseline", ["outcome", "blended"])
def test_a_sum_has_one_baseline_without_outcome(baseline):
    given = {"given": "correct", "baseline": baseline}
    objectives = [Objective("correct", pays=("a",), **given), Objective("brier", pays=("a",), **given)]
    with pytest.raises(RecipeError, match=f"'correct' has {baseline}, 'correct' has {baseline}. Use none, batch or group"):
        assign(
            scores_of([1, 0]), SAME[:1], torch.ones(1, 1).bool(), objectives=objectives, block_names=("a",), sum_first=True
        )
    mixed = [Objective("correct", pays=("a",)), Objective("brier", pays=("a",), scale="std")]
    with pytest.raises(RecipeError, match="'correct' has group, 'brier' has group"):
        assign(scores_of([1, 0]), SAME[:1], torch.ones(1, 1).bool(), objectives=mixed, block_names=("a",), sum_first=True)


def test_sentences_of_credit(unchecked_shapes):
    objective = [Objective("brier", pays=("a",), given="right", baseline="outcome")]
    scores, present = scores_of([0.5], names=("brier",)), torch.ones(1, 1).bool()
    with pytest.raises(RecipeError, match="'brier' is given 'right', which is no objective; known: brier"):
        assign(scores, SAME[:1], present, objectives=objective, block_names=("a",))
    plain = [Objective("brier", pays=("c",))]
    with pytest.raises(RecipeError, match="pays 'c', which is no block; there are a, b"):
        assign(scores, SAME[:1], torch.ones(1, 2).bool(), objectives=plain, block_names=("a", "b"))
    sizes = r"1 group ids, 1 objectives and 1 blocks, but rewards are \(1, {}\) and block presence is \(1, {}\)"
    with pytest.raises(AlignmentError, match=sizes.format(1, 2)):
        assign(scores, SAME[:1], torch.ones(1, 2).bool(), objectives=plain, block_names=("a",))
    with pytest.raises(AlignmentError, match=sizes.format(2, 1)):
        assign(scores_of([0.5, 0.5]), SAME[:1], present, objectives=plain, block_names=("a",))
    with pytest.raises(AlignmentError, match="There are 2 rewards for 1 group ids"):
        advantage(PAIR, SAME[:1])
    with pytest.raises(AlignmentError, match="There are 2 rows of rewards for 1 group ids"):
        bae(PAIR[:, None], SAME[:1])
    with pytest.raises(RecipeError) as unknown:
        advantage(PAIR, SAME, baseline="grup")
    known = "Known: batch, blended, group, none, outcome."
    assert str(unknown.value) == f"There is no baseline 'grup'. Did you mean 'group'? {known}"
    for baseline in ("none", "blended"):
        with pytest.raises(RecipeError, match=f"Baseline '{baseline}' has no stratum"):
            advantage(PAIR, SAME, baseline=baseline, scale="std", outcome_n=PAIR)
    with pytest.raises(RecipeError, match="Baseline 'outcome' needs an outcome"):
        advantage(PAIR, SAME, baseline="outcome")
    with pytest.raises(AlignmentError, match=r"Credit is for \(1, 1\) completions and blocks, spans are for \(1, 2\)"):
        spread(credit_of([[1.0]]), spans_of([[0, 1]], 2))


# spread


def spans_of(rows, blocks):
    block_nt = torch.tensor(rows)
    start, end = torch.zeros(len(rows), blocks, dtype=torch.long), torch.zeros(len(rows), blocks, dtype=torch.long)
    for i, row in enumerate(rows):
        for k in set(row) - {-1}:
            mine = [t for t, block in enumerate(row) if block == k]
            start[i, k], end[i, k] = mine[0], mine[-1] + 1
    return Spans(tuple(f"b{k}" for k in range(blocks)), start, end, block_nt, torch.zeros(len(rows), dtype=torch.long))


def credit_of(block_nk, stop_n=None):
    block = torch.tensor(block_nk, dtype=torch.float64)
    stop = torch.zeros(len(block), dtype=torch.float64) if stop_n is None else torch.tensor(stop_n, dtype=torch.float64)
    return Credit(block, stop, torch.zeros(block.shape[1]).long(), torch.zeros(block.shape[1]).long())


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 65, 100])
def test_spread_any_number_of_completions(size):
    rows = [[-1, 0, 1, 1, -1][i % 3 :] + [-1] * (i % 3) for i in range(size)]
    credit = credit_of([[i + 1.0, -2.0 * i] for i in range(size)])
    result = spread(credit, spans_of(rows, 2), dtype=torch.float64)
    for i, row in enumerate(rows):
        length = [max(row.count(0), 1), max(row.count(1), 1)]
        assert result[i].tolist() == [0.0 if k < 0 else float(credit.block_nk[i, k]) / length[k] for k in row]


def test_one_token_carries_everything():
    spans = spans_of([[0]], 1)
    for per in ("block", "completion", 1):
        assert spread(credit_of([[3.0]], [0.5]), spans, per=per).tolist() == [[3.5]]
    assert spread(credit_of([[3.0]], [1.0]), spans).tolist() == [[4.0]]


def test_stop_goes_to_each_completions_own_last_token_and_nowhere_if_there_is_none():
    spans = spans_of([[0, -1, -1], [0, 0, 0], [-1, -1, -1]], 1)
    result = spread(credit_of([[0.0]] * 3, [1.0, 2.0, 3.0]), spans)
    assert result.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 0.0]]


def test_per_a_constant():
    spans = spans_of([[0, 0]], 1)
    assert spread(credit_of([[1.0]]), spans, per=2.5, dtype=torch.float64).tolist() == [[0.4, 0.4]]
    assert spread(credit_of([[1.0]]), spans, per=0.5).tolist() == [[2.0, 2.0]]
    with pytest.raises(RecipeError, match=r"per=0\) is not known"):
        spread(credit_of([[1.0]]), spans, per=0)


# segment

VOCABULARY = Vocabulary((b"x", b"<a>", b"</a>", b"<c>", b"</c>"))
LAYOUT = Layout({"one": ["a"], "two": ["c"]})
ROWS = torch.tensor([[0, 1, 0, 2], [1, 2, 3, 4], [3, 4, 0, 0], [0, 0, 0, 0], [0, 1, 2, 3]])


@pytest.mark.parametrize("at_a_time", [1, 4, 8, 9, 20, 1000])
def test_completions_are_read_in_chunks(monkeypatch, at_a_time):
    whole, texts = segment(ROWS, ROWS >= 0, layout=LAYOUT, vocabulary=VOCABULARY)
    monkeypatch.setattr(tagged, "_TOKENS_AT_A_TIME", at_a_time)
    spans, chunked = segment(ROWS, ROWS >= 0, layout=LAYOUT, vocabulary=VOCABULARY)
    assert chunked == texts
    assert len(texts) == 5
    for name in ("block_nt", "start_nk", "end_nk", "fault_n"):
        assert torch.equal(getattr(spans, name), getattr(whole, name))
        assert getattr(spans, name).dtype == (torch.int8 if name == "block_nt" else torch.int64)
    wrong = ROWS.clone()
    wrong[3, 1] = 5  # the first id that is not there
    with pytest.raises(AlignmentError, match="Completion 3: Token id 5 is not in the vocabulary, which has 5 ids"):
        segment(wrong, wrong >= 0, layout=LAYOUT, vocabulary=VOCABULARY)


@pytest.mark.parametrize(("blocks", "dtype"), [(127, torch.int8), (128, torch.int16)])
def test_numbers_of_blocks_fit(blocks, dtype):
    layout = Layout({f"b{k}": [f"t{k}"] for k in range(blocks)})
    spans, _ = segment(torch.tensor([[0]]), torch.tensor([[1]]), layout=layout, vocabulary=VOCABULARY)
    assert spans.block_nt.dtype == dtype


def test_the_parser_reads_the_whole_text_by_default():
    parsed = TagParser(LAYOUT).parse(b"<a>x</a><c>x</c>")
    assert (parsed.starts, parsed.contents) == ((0, 8), {(0, "a"): (3, 4), (1, "c"): (11, 12)})
    assert TagParser(LAYOUT).parse(b"<a>x</a>", 3).contents == {}


def test_the_parser_works_a_sequence_out_once(monkeypatch):
    parser, calls = TagParser(LAYOUT), []
    work_out = parser._work_out
    monkeypatch.setattr(parser, "_work_out", lambda *key: calls.append(key) or work_out(*key))
    for text in (b"<a>x</a>", b"<a>xyz</a>", b"x<a>x</a>"):
        parser.parse(text)
    assert len(calls) == 2  # it begins with a tag, or it does not


def test_layout_sentences():
    assert Layout({"X": ["X"]}).tags == ("X",)
    assert Layout({"whole": [], "c": ["c"]}).names == ("whole", "c")
    assert Layout({"one": ["a", "b"]}, prefilled="a").prefilled == "a"
    with pytest.raises(LayoutError, match="'b' must be the first tag of the first block, which is 'a'"):
        Layout({"one": ["a", "b"]}, prefilled="b")
    with pytest.raises(LayoutError, match="'b' must be the first tag of the first block, which is 'none'"):
        Layout({"one": []}, prefilled="b")
    with pytest.raises(LayoutError, match=r"^A layout needs at least one block"):
        Layout({})
    with pytest.raises(LayoutError, match="names a tag twice: a, b, a"):
        Layout({"one": ["a", "b", "a"]})
