"""The conformance rollouts through TRL: the advantages that reach the loss are those of loops over the definitions."""

import pytest
import torch

import conformance
from spanwise.pipeline import advantages
from trl_conformance_small import CASES, assert_defined, trained

#: The environment pays a turn that has no confidence; by the definitions this reward is not used.
UNUSED = pytest.mark.filterwarnings("ignore:.*Such rewards are ignored:UserWarning")
#: Lists of different lengths: leaving the last element out is free.
SHORT = pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning")
pytestmark = [UNUSED, SHORT]


@pytest.mark.parametrize(("recipe", "group"), CASES, ids=[f"{recipe}-{group[0][0]['group']}" for recipe, group in CASES])
def test_the_advantages_are_those_of_the_definitions(tmp_path, recipe, group):
    assert_defined(trained(tmp_path, recipe, [row for row, _ in group]), group)


def test_float64_is_the_pipeline_to_the_last_bit(tmp_path):
    """The credit of TRL's batches, before it is rounded to float32 for TRL."""
    rows = [row for row in conformance.expected("blocks")[0] if row["group"] == "g4"]
    run = trained(tmp_path, "blocks", rows)
    rollouts = run.last_rollouts
    adv_nt = advantages(rollouts.credit, rollouts.spans, run.scheme, dtype=torch.float64).tolist()
    for row, values, exact in zip(rows, adv_nt, conformance.by_pipeline(rows, run.scheme), strict=True):
        assert values[: len(row["ids"])] == exact
