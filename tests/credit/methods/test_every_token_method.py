"""What holds for every per-token method: empty batches, and the sentences of those that reshape."""

import pytest
import torch

from credit_batches import all_of
from spanwise.credit.methods._gae import gae, sae
from spanwise.credit.methods._refinements import ktae, oar
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.testing import check_estimator


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_in_nothing_out(shape):
    empty, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    assert gae(empty, empty, mask, whiten=True).shape == shape
    assert sae(empty, empty, empty, mask, boundary="end").shape == shape
    assert oar(empty, empty, mask).shape == shape
    assert ktae(empty, empty.long(), mask, torch.zeros(shape[0]), torch.zeros(shape[0]).long()).shape == shape


def test_errors_of_the_reshapers(unchecked_shapes):
    adv, mask = torch.ones(1, 2), all_of(1, 2)
    with pytest.raises(RewardError, match="importance of completion 0 is -1"):
        oar(adv, -adv, mask)
    with pytest.raises(RecipeError, match="quantile is 25"):
        oar(adv, adv, mask, quantile=25)
    with pytest.raises(AlignmentError, match="importance_nt"):
        oar(adv, torch.ones(1, 3), mask)
    with pytest.raises(AlignmentError, match=r"correct_n is \(2,\)"):
        ktae(adv, adv.long(), mask, torch.ones(2), torch.zeros(1).long())
    with pytest.raises(RecipeError, match="no form of KTAE 'papr'"):
        ktae(adv, adv.long(), mask, torch.ones(1), torch.zeros(1).long(), form="papr")


@pytest.mark.usefixtures("unchecked_shapes")  # they cost four fifths of the time
@pytest.mark.parametrize("method", ["gae", "sae"])
@pytest.mark.parametrize("options", [{"length_adaptive_alpha": 0.4}, {"lam": 0.6, "gamma": 0.9}])
def test_what_the_suite_asks_of_every_method_with_a_critic(method, options):
    check_estimator(method, options=options, optional=["bootstrap_n"], examples=15)
