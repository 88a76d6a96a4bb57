"""What holds for every per-token method: empty batches, and what those that reshape refuse."""

import pytest
import torch

from credit_batches import all_of
from spanwise.credit.methods._gae import gae, sae
from spanwise.credit.methods._refinements import ktae, oar
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.testing import check_estimator

ONES, MASK, ALONE = torch.ones(1, 2), all_of(1, 2), torch.zeros(1).long()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_nothing_in_nothing_out(shape):
    empty, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    assert gae(empty, empty, mask, whiten=True).shape == shape
    assert sae(empty, empty, empty, mask, boundary="end").shape == shape
    assert oar(empty, empty, mask).shape == shape
    assert ktae(empty, empty.long(), mask, torch.zeros(shape[0]), torch.zeros(shape[0]).long()).shape == shape


@pytest.mark.parametrize(
    ("error", "says", "call"),
    [
        (RewardError, "completion 0 is -1", lambda: oar(ONES, -ONES, MASK)),
        (RecipeError, "25", lambda: oar(ONES, ONES, MASK, quantile=25)),
        (AlignmentError, "importance_nt", lambda: oar(ONES, torch.ones(1, 3), MASK)),
        (AlignmentError, "correct_n", lambda: ktae(ONES, ONES.long(), MASK, torch.ones(2), ALONE)),
        (RecipeError, "papr", lambda: ktae(ONES, ONES.long(), MASK, torch.ones(1), ALONE, form="papr")),
    ],
)
def test_what_reshapers_refuse(unchecked_shapes, error, says, call):
    with pytest.raises(error, match=says):
        call()


@pytest.mark.usefixtures("unchecked_shapes")  # they cost four fifths of the time
@pytest.mark.parametrize("method", ["gae", "sae"])
@pytest.mark.parametrize("options", [{"length_adaptive_alpha": 0.4}, {"lam": 0.6, "gamma": 0.9}])
def test_what_the_suite_asks_of_every_method_with_a_critic(method, options):
    check_estimator(method, options=options, optional=["bootstrap_n"], examples=15)
