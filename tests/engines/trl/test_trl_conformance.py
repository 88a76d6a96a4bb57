"""The conformance rollouts through TRL: the advantages that reach the loss, and its gradient, are those of the definitions."""

import pytest
import torch

import conformance
import trl_small as small
from helpers import assert_close
from oracles import slow_oar
from spanwise.pipeline import advantages
from trl_conformance_small import CASES, assert_defined, gradient, trained, trainer

#: The environment pays a turn that has no confidence; by the definitions this reward is not used.
UNUSED = pytest.mark.filterwarnings("ignore:.*spanwise ignores rewards of completions:UserWarning")
#: Lists of different lengths: leaving the last element out is free.
SHORT = pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning")
pytestmark = [UNUSED, SHORT]


@pytest.mark.parametrize(("recipe", "group"), CASES, ids=[f"{recipe}-{group[0][0]['group']}" for recipe, group in CASES])
def test_the_advantages_are_those_of_the_definitions_and_one_step_is_their_gradient(tmp_path, recipe, group):
    run = trainer(tmp_path, recipe, [row for row, _ in group])
    assert small.largest_difference(small.step(run), gradient(group)) < small.EXACT
    assert_defined(run, group)
    assert not run._canary_due


def test_float64_is_the_pipeline_to_the_last_bit(tmp_path):
    """The credit of TRL's batches, before it is rounded to float32 for TRL."""
    rows = [row for row in conformance.expected("blocks")[0] if row["group"] == "g4"]
    run = trained(tmp_path, "blocks", rows)
    rollouts = run.last_rollouts
    adv_nt = advantages(rollouts.credit, rollouts.spans, run.scheme, dtype=torch.float64).tolist()
    for row, values, exact in zip(rows, adv_nt, conformance.by_pipeline(rows, run.scheme), strict=True):
        assert values[: len(row["ids"])] == exact


def test_a_token_is_trained_with_what_a_refinement_makes_of_grpo(tmp_path):
    correct = [small.Objective("correct", pays=small.LAYOUT.names, if_missing=0.0, options={"verify": "exact"})]

    def trained_with(refine):
        extra = {"method": "grpo", "objectives": correct, "credit": {"per": 1, "refine": refine}}
        run = small.trainer(tmp_path / f"{refine}", extra=extra)
        run.train()
        return run.last_rollouts

    plain, refined = trained_with(None), trained_with("oar")
    mask_nt, adv_nt = refined.batch.mask_nt.bool(), plain.advantages_nt.double()
    want_nt = slow_oar(adv_nt, -refined.batch.logp_nt.double(), mask_nt, 0.25, 1.0, 0.1, False)
    assert_close(refined.advantages_nt.double(), torch.where(mask_nt, want_nt, 0.0), 1e-5)
    assert float((refined.advantages_nt - plain.advantages_nt).abs().max()) > 0.01
