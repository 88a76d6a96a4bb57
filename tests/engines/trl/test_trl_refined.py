"""KTAE and OAR beside GRPO in a real TRL step: what each token is trained with, against slow oracles."""

import pytest
import torch

from helpers import assert_close
from oracles import slow_ktae, slow_oar
from spanwise.objective import Objective
from trl_small import GROUP, LAYOUT, SAID, THIRD_PARTY, trainer

pytestmark = THIRD_PARTY


@pytest.mark.parametrize("name", ["ktae", "oar"])
def test_a_token_is_trained_with_what_the_refinement_makes_of_grpo(tmp_path, name):
    correct = Objective("correct", pays=LAYOUT.names, if_missing=0.0, options={"verify": "exact"})
    parts = {"method": "grpo", "objectives": (correct,)}
    seen = {}
    for refine in (None, name):
        run = trainer(tmp_path / str(refine), extra={**parts, "credit": {"per": 1, "refine": refine}})
        run.train()
        seen[refine] = run.last_rollouts
    plain, refined = seen[None], seen[name]
    mask_nt, group_n = refined.batch.mask_nt.bool(), torch.arange(len(SAID)) // GROUP
    right_n = torch.tensor([one.right for one in SAID]).double()
    adv_nt = plain.advantages_nt.double()
    if name == "ktae":
        want_nt = slow_ktae(adv_nt, refined.batch.ids_nt, mask_nt, right_n, group_n, "paper", 1.0, 1.0, 1.0)
    else:
        want_nt = slow_oar(adv_nt, -refined.batch.logp_nt.double(), mask_nt, 0.25, 1.0, 0.1, False)
    assert_close(refined.advantages_nt.double(), torch.where(mask_nt, want_nt, 0.0), 1e-5)
    assert float((refined.advantages_nt - plain.advantages_nt).abs().max()) > 0.01
