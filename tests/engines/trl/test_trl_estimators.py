"""A refinement by name inside the real trainer: its numbers are those of the definition, on the rollouts just made."""

import torch

from helpers import assert_close
from oracles import slow_oar
from spanwise.objective import Objective
from trl_small import LAYOUT, trainer

CORRECT = [Objective("correct", pays=LAYOUT.names, if_missing=0.0, options={"verify": "exact"})]


def trained(folder, refine):
    run = trainer(folder, extra={"method": "grpo", "objectives": CORRECT, "credit": {"per": 1, "refine": refine}})
    run.train()
    return run.last_rollouts


def test_a_token_is_trained_with_what_the_refinement_makes_of_grpo(tmp_path):
    plain, refined = trained(tmp_path / "plain", None), trained(tmp_path / "refined", "oar")
    mask_nt, adv_nt = refined.batch.mask_nt.bool(), plain.advantages_nt.double()
    want_nt = slow_oar(adv_nt, -refined.batch.logp_nt.double(), mask_nt, 0.25, 1.0, 0.1, False)
    assert_close(refined.advantages_nt.double(), torch.where(mask_nt, want_nt, 0.0), 1e-5)
    assert float((refined.advantages_nt - plain.advantages_nt).abs().max()) > 0.01
