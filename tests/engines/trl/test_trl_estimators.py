"""Estimators by name inside the real trainer: their numbers are those of the definition, on the rollouts just made."""

import pytest
import torch

from helpers import assert_close
from oracles import slow_ktae, slow_oar
from spanwise.objective import Objective
from trl_small import GROUP, LAYOUT, SAID, trainer

GROUP_N = torch.arange(len(SAID)) // GROUP
CORRECT = [Objective("correct", pays=LAYOUT.names, if_missing=0.0, options={"verify": "exact"})]


def trained(folder, **extra):
    run = trainer(folder, extra={"objectives": CORRECT, **extra})
    run.train()
    return run.last_rollouts


@pytest.mark.parametrize("name", ["ktae", "oar"])
def test_a_token_is_trained_with_what_the_refinement_makes_of_grpo(tmp_path, name):
    parts = {"method": "grpo", "objectives": CORRECT}
    plain, refined = (trained(tmp_path / str(r), **parts, credit={"per": 1, "refine": r}) for r in (None, name))
    mask_nt, adv_nt = refined.batch.mask_nt.bool(), plain.advantages_nt.double()
    right_n = torch.tensor([completion.right for completion in SAID]).double()
    if name == "ktae":
        want_nt = slow_ktae(adv_nt, refined.batch.ids_nt, mask_nt, right_n, GROUP_N, "paper", 1.0, 1.0, 1.0)
    else:
        want_nt = slow_oar(adv_nt, -refined.batch.logp_nt.double(), mask_nt, 0.25, 1.0, 0.1, False)
    assert_close(refined.advantages_nt.double(), torch.where(mask_nt, want_nt, 0.0), 1e-5)
    assert float((refined.advantages_nt - plain.advantages_nt).abs().max()) > 0.01
