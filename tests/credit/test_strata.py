"""Strata: moments, leaving one out, whitening, and who belongs to none."""

import pytest
import torch

from credit_batches import PAIR, SAME
from helpers import NAN, assert_close, double
from spanwise.credit import advantage, centred, group_index, moments, refine
from spanwise.credit.strata import compare_in_strata, standardise, standardise_tokens
from spanwise.errors import AlignmentError, RecipeError


def test_token_whitening_over_many_rows_survives_an_offset_and_poison():
    # More rows than are read together; the first of these hold nothing, nor do others. float32 keeps what float64 found.
    torch.manual_seed(0)
    value_nt = torch.randn(100, 9, dtype=torch.float64) + 1e6
    mask_nt = torch.rand(100, 9) < 0.6
    mask_nt[:40] = mask_nt[60:80:3] = False
    inside = value_nt[mask_nt]
    expected_nt = torch.where(mask_nt, (value_nt - inside.mean()) / inside.std(), 0.0)
    for poison in (NAN, 1e9):
        poisoned_nt = torch.where(mask_nt, value_nt, poison)
        before_nt = poisoned_nt.clone()
        whitened_nt = standardise_tokens(poisoned_nt, mask_nt, eps=0.0)
        assert_close(poisoned_nt, before_nt, 0, equal_nan=True)
        assert_close(whitened_nt, expected_nt, 1e-8)
        assert not whitened_nt[~mask_nt].any()
    small_nt = (value_nt - 1e6).float()
    assert_close(standardise_tokens(small_nt, mask_nt, eps=0.0), expected_nt.float(), 1e-5)
    assert not standardise_tokens(small_nt, torch.zeros_like(mask_nt)).any()
    for step in (2.0, 2e-4):  # the defaults: ddof 1, eps 1e-8 under the root
        expected = step / 2 / (step**2 / 2 + 1e-8) ** 0.5
        assert_close(standardise_tokens(double([[0, step]]), mask_nt.new_ones(1, 2)), [[-expected, expected]], 1e-9)


def test_numbers_of_strata_may_be_large_and_leave_gaps():
    for ids in ([3, 3, 9, 9, -1], [10**15, 10**15, 2, 2, -1]):
        grouped = moments(torch.tensor([1.0, 3.0, 7.0, NAN, 5.0]), torch.tensor(ids))
        assert grouped.mean_n()[:4].tolist() == [2.0, 2.0, 7.0, 7.0]
        assert grouped.count_n().tolist() == [2.0, 2.0, 1.0, 1.0, 0.0]
        assert grouped.deviation_n.tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0]
        assert len(grouped.count_s) < 100


def test_what_is_constant_has_no_scale():
    assert standardise(torch.full((5,), 0.7), eps=1e-6)[2] == 0.0
    assert standardise(torch.tensor([0.7, NAN]), eps=1e-6)[2] == 0.0
    assert standardise(torch.full((5,), 0.7), shift=False, eps=1e-6)[0].tolist() == [0.0] * 5


def test_two_are_enough_for_a_sample_standard_deviation():
    for ddof, expected in enumerate((1.0, 2**0.5, 0.0)):
        assert_close(moments(PAIR, SAME).std_n(ddof=ddof), [expected] * 2, 1e-12)
    assert_close(centred(PAIR, SAME, scale="std"), [-(2**-0.5), 2**-0.5], 1e-12)
    assert_close(centred(PAIR, SAME), [-1.0, 1.0], 1e-12)


def test_completions_outside_every_stratum():
    for stratum_n in (torch.tensor([0, -1]), torch.tensor([-1, -1])):  # some, and nobody in any
        within = moments(PAIR, stratum_n)
        assert within.count_n()[1] == 0
        assert within.mean_n()[1].isnan()
        assert within.std_n(ddof=0)[1] == 0
        assert within.deviation_n[1] == 0
        assert bool(within.pooled_variance_of_others().isnan().all())
    assert refine(SAME, torch.tensor([NAN, 1.0])).tolist()[0] == -1
    # 2 ** 70 combinations of outcomes do not fit into int64: three completions, of which two differ in the first outcome alone.
    outcome_no = torch.stack([torch.zeros(70), torch.eye(70)[0], torch.ones(70)])
    assert len(set(refine(torch.zeros(3, dtype=torch.long), outcome_no).tolist())) == 3
    assert_close(advantage(PAIR, SAME, baseline="outcome", outcome_no=torch.full((2,), NAN)).advantage_n, [0.0, 0.0], 1e-12)


def test_without_a_degree_of_freedom_nothing_is_scaled():
    for made_n in (standardise(PAIR[1:], eps=1.0)[0], standardise(PAIR, ddof=2, eps=1.0)[0]):
        assert not made_n.any()
    assert_close(moments(PAIR, SAME, weight_n=torch.tensor([0.375, 0.125])).mean_n(), [0.5, 0.5], 1e-12)


def test_an_id_below_minus_one_is_no_stratum_and_there_are_three_scales():
    with pytest.raises(AlignmentError, match="-7"):
        centred(PAIR, torch.tensor([-7, -7]))
    with pytest.raises(RecipeError, match="var"):
        centred(PAIR, SAME, scale="var")


def test_voters_may_have_any_ids():
    """Rewards 1 and 3, and 4 and 6 of one voter, whose vote is 5; 2**62 and its neighbours are one number in float64."""
    value_n, group_n = torch.tensor([1.0, 3.0, 4.0, 6.0]), torch.zeros(4).long()
    for voters in ([0, 1, 2, 2], [2**62, 2**62 + 1, -1, -1], [-(2**63), -1, 2**62, 2**62]):
        assert_close(centred(value_n, group_n, voter_n=torch.tensor(voters)), [-2.0, 0.0, 1.0, 3.0], 1e-12)
        compared = compare_in_strata(value_n, group_n, voter_n=torch.tensor(voters)).comparison
        assert compared.members_nm.flatten().tolist() == [3] * 4


def test_tensors_in_a_list_of_ids_are_their_numbers():
    assert group_index([torch.tensor(7), torch.tensor(7), torch.tensor(2)]).tolist() == [0, 0, 1]
