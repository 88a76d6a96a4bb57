"""The factor that undoes a reduction, against the reduction written out; no verl needed."""

import pytest
import torch

from spanwise.engines.verl.carry import loss_factor
from spanwise.errors import RecipeError

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]])


def factor(mode, mask_nt=MASK, **more):
    return loss_factor(mask_nt, **{"mode": mode, "rollouts": 3, "mini_batch": 4, "tokens": 7, **more})


def test_by_hand():
    assert factor("seq-mean-token-sum").flatten().tolist() == pytest.approx([4 / 3] * 4)
    assert factor("seq-mean-token-mean").flatten().tolist() == pytest.approx([4.0, 4 / 3, 4.0, 0.0])
    assert factor("seq-mean-token-sum-norm", horizon=512).flatten().tolist() == pytest.approx([512 * 4 / 3] * 4)
    assert factor("token-sum").flatten().tolist() == pytest.approx([1 / 3] * 4)
    assert factor("token-mean").flatten().tolist() == pytest.approx([7 / 3] * 4)


def test_several_mini_batches():
    with pytest.raises(RecipeError, match=r"4 rows makes mini-batches of 2.*seq-mean-token-mean"):
        factor("token-mean", mini_batch=2)
