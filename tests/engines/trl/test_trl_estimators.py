"""Estimators by name inside the real trainer: their numbers are those of the definition, on the rollouts just made."""

import warnings

import pytest
import torch

import trl_small as small
from spanwise.credit import gdpo
from spanwise.errors import RecipeError
from spanwise.layout import Layout
from spanwise.objective import Objective

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
CORRECT = [Objective("correct", pays=small.LAYOUT.names)]


def trained(tmp_path, **extra):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = small.trainer(tmp_path, extra=extra)
        run.train()
    return run.last_rollouts


def groups(rollouts):
    rights = rollouts.reading.scores.reward_nm[:, 0].tolist()
    for first in range(0, len(rights), small.GROUP):
        for i in range(first, first + small.GROUP):
            yield i, rights[i], rights[first : first + small.GROUP], range(first, first + small.GROUP)


@pytest.mark.parametrize("name", ["rloo", "maxrl"])
def test_rewards_alone(tmp_path, name):
    rollouts = trained(tmp_path, objectives=CORRECT, method=name, credit={"per": "completion"})
    for i, right, group, _ in groups(rollouts):
        mean = sum(group) / len(group)
        expected = (right - mean) * len(group) / (len(group) - 1) if name == "rloo" else (right - mean) / (mean + 1e-6)
        assert rollouts.credit.block_nk[i, 0].item() == pytest.approx(expected if mean else 0.0)


def test_opo_gets_the_lengths(tmp_path):
    rollouts = trained(tmp_path, objectives=CORRECT, method="opo", credit={"per": "completion"})
    lengths = (rollouts.spans.block_nt >= 0).sum(dim=1).tolist()
    assert len(set(lengths)) > 1  # otherwise weights would not show
    for i, right, group, members in groups(rollouts):
        baseline = sum(lengths[j] * r for j, r in zip(members, group, strict=True)) / sum(lengths[j] for j in members)
        assert rollouts.credit.block_nk[i, 0].item() == pytest.approx(right - baseline)


def test_gdpo_in_the_trainer_is_its_own_function(tmp_path):
    objectives = [Objective("correct", pays="all"), Objective("format", pays="all", if_missing=0.0, weight=0.5)]
    rollouts = trained(tmp_path, layout=Layout({"all": ["answer", "confidence"]}), objectives=objectives, method="gdpo")
    weight_m = torch.tensor([1.0, 0.5])
    group_n = torch.arange(8) // small.GROUP
    expected = gdpo(rollouts.reading.scores.reward_nm, group_n, weight_m=weight_m)
    assert rollouts.credit.block_nk[:, 0].tolist() == pytest.approx(expected.tolist())
    assert bool((expected != 0).any())


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"method": "rlo"}, "There is no method 'rlo'. Did you mean 'rloo'?"),
        ({"method": "gae", "objectives": CORRECT}, "Method 'gae' needs a critic, but there is none"),
        (
            {"method": "rloo", "credit": {"per": "completion"}},
            "Objective 'brier' has the baseline 'outcome', but method 'rloo' has its own way",
        ),
    ],
)
def test_sentences(tmp_path, parts, sentence):
    with pytest.raises(RecipeError, match=sentence.replace("?", r"\?")):
        small.trainer(tmp_path, extra=parts)
