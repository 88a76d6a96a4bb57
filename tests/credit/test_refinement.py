"""`Scheme.refine`: KTAE and OAR beside other methods, through the whole road, against slow oracles."""

from dataclasses import replace

import pytest
import torch
import yaml

from helpers import assert_close
from oracles import slow_ktae, slow_oar
from spanwise.batch import Batch, Steps
from spanwise.credit.refinement import Refinement
from spanwise.errors import RecipeError
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.pipeline import advantages, credit_batch, metrics, read
from spanwise.recipe import load, scheme_of
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary

WORDS = ("<answer>", "</answer>", "4", "5", "a", "b", "c", "<confidence>", "</confidence>", ".5", ".9")
VOCABULARY = Vocabulary(tuple(word.encode() for word in WORDS))
LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
SAID = [
    "a a b <answer> 4 </answer> <confidence> .9 </confidence>",
    "b c <answer> 4 </answer> <confidence> .5 </confidence>",
    "a c c c <answer> 5 </answer> <confidence> .9 </confidence>",
    "c <answer> 5 </answer> <confidence> .5 </confidence>",
    "a <answer> 4 </answer> <confidence> .5 </confidence>",
    "b b <answer> 5 </answer>",
    "a b a <answer> 4 </answer> <confidence> .9 </confidence>",
]
GROUP = [0, 0, 0, 0, 1, 1, 1]


def batch(**more):
    ids = [[WORDS.index(word) for word in text.split()] for text in SAID]
    plain = Batch.jagged(ids, GROUP, columns={"answer": ["4"] * len(SAID)})
    logp_nt = -torch.rand(plain.ids_nt.shape, generator=torch.Generator().manual_seed(1)).double() * 3
    return replace(plain, logp_nt=logp_nt, **more)


CORRECT = Objective("correct", pays="solution", options={"verify": "exact"})
BRIER = Objective("brier", pays="confidence", given="correct", baseline="outcome", if_missing=-1.0)


def scheme(method="grpo", refine=None, **more):
    objectives = [CORRECT, BRIER] if method == "bae" else [replace(CORRECT, pays=LAYOUT.names, if_missing=0.0)]
    return Scheme.preset(method, LAYOUT, objectives=objectives, refine=refine, **more)


def trained(scheme, **more):
    inputs = batch(**more)
    reading = read(inputs, scheme, VOCABULARY)
    credit = credit_batch(reading, inputs, scheme)
    return advantages(credit, reading.spans, scheme, dtype=torch.float64), credit, reading


def token_credit(credit, reading):
    block_nt = reading.spans.block_nt.long()
    return torch.where(block_nt >= 0, credit.block_nk.gather(1, block_nt.clamp(min=0)), 0.0)


@pytest.mark.parametrize("method", ["grpo", "bae"])
@pytest.mark.parametrize("per", ["block", "completion", 7, "batch"])
@pytest.mark.parametrize("form", ["paper", "code"])
def test_ktae_adds_the_slow_oracles_term_to_what_a_token_has(method, per, form):
    plain_nt, credit, reading = trained(scheme(method, per=per))
    inputs, mask_nt = batch(), reading.spans.block_nt >= 0
    correct_n = reading.scores.reward_nm[:, 0]
    adv_nt = token_credit(credit, reading)
    ones = {"h1": 1.0, "h2": 1.0, "h3": 1.0}
    want_nt = slow_ktae(adv_nt, inputs.ids_nt, mask_nt, correct_n, inputs.group_n, form=form, **ones) - adv_nt
    length_nk = reading.length_nk.double()
    size_nt = {
        "block": length_nk.gather(1, reading.spans.block_nt.long().clamp(min=0)),
        "completion": length_nk.sum(dim=1, keepdim=True),
        "batch": length_nk.sum() / len(length_nk),
    }.get(per, torch.tensor(7.0))
    refined_nt, refined, _ = trained(scheme(method, {"method": "ktae", "options": {"form": form}}, per=per))
    assert_close(refined_nt, plain_nt + torch.where(mask_nt, want_nt / size_nt, 0.0), 1e-9)
    assert float((refined_nt - plain_nt).abs().max()) > 0.001
    # What the method credited stays as it was: the refinement is apart from it.
    assert torch.equal(refined.block_nk, credit.block_nk)
    assert torch.equal(refined.stop_n, credit.stop_n)


@pytest.mark.parametrize("method", ["grpo", "bae", "reinforce++"])
def test_oar_multiplies_with_the_slow_oracles_weight_by_surprise(method):
    plain_nt, credit, reading = trained(scheme(method, per=1))
    adv_nt = credit.token_nt.double() if method == "reinforce++" else token_credit(credit, reading)
    mask_nt = reading.spans.block_nt >= 0
    want_nt = slow_oar(adv_nt, -batch().logp_nt, mask_nt, 0.25, 1.0, 0.1, False) - adv_nt
    refined_nt, _, _ = trained(scheme(method, "oar", per=1))
    assert_close(refined_nt, plain_nt + torch.where(mask_nt, want_nt, 0.0), 1e-6 if method == "reinforce++" else 1e-9)
    assert float((refined_nt - plain_nt).abs().max()) > 0.001


def test_what_is_right_is_said_by_the_objective_that_is_named():
    first_nt, correct_nt, brier_nt = (
        trained(scheme("bae", {"method": "ktae", **named}))[0]
        for named in ({}, {"correct": "correct"}, {"correct": "brier"})
    )
    assert torch.equal(first_nt, correct_nt)
    assert not torch.equal(first_nt, brier_nt)


def test_a_signal_of_the_refinement_alone_is_a_signal():
    _, credit, reading = trained(scheme("grpo", "ktae"))
    assert credit.has_signal
    assert set(metrics(credit, reading, scheme())) == set(metrics(credit, reading, scheme("grpo", "ktae")))
    assert torch.equal(credit.take([1]).refined_nt, credit.refined_nt[[1]])


def test_a_recipe_says_it_and_writes_it(tmp_path):
    for refine in ("oar", {"method": "ktae", "options": {"form": "code", "top": 0.5}}):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump({"method": "grpo", "refine": refine}))
        rule = scheme_of(load(recipe), LAYOUT, 32)
        assert rule.refine == Refinement.of(refine)
        recipe.write_text(yaml.safe_dump({**rule.plain(), "layout": {"completion": ["answer", "confidence"]}}))
        assert scheme_of(load(recipe), LAYOUT, 32).refine == rule.refine


@pytest.mark.parametrize(
    "refine",
    [
        "rloo",
        {"options": {}},
        {"method": "ktae", "form": "code"},
        {"method": "ktae", "options": ["form"]},
        {"method": "oar", "options": {"form": "code"}},
        {"method": "ktae", "options": {"top": 2.0}},  # of the form "code" alone
        {"method": "oar", "correct": "correct"},
        {"method": "ktae", "correct": "corect"},
    ],
)
def test_what_is_refused(refine, unchecked_shapes):
    with pytest.raises(RecipeError):
        scheme("grpo", refine)


def test_what_a_trainer_does_not_bring_is_refused():
    provides = {"group_n", "mask_nt"}
    for refine, lacking in (("ktae", "ids_nt"), ("oar", "logp_nt")):
        refined = scheme("grpo", refine)
        with pytest.raises(RecipeError, match=lacking):
            refined.check(provides)
        refined.check({*provides, lacking})
    assert scheme("grpo", "ktae").needs == {"ids_nt", "mask_nt"}


def test_turns_are_refused_and_a_refinement_without_a_method():
    rows = torch.arange(len(SAID))
    with pytest.raises(RecipeError):
        trained(scheme("grpo", "ktae"), steps=Steps(rows // 2, rows))
    with pytest.raises(RecipeError):
        Scheme.preset("grpo", LAYOUT, objectives=[replace(CORRECT, scope="turn")], refine="ktae")
    with pytest.raises(RecipeError, match="refine: ktae"):  # it is no method of its own
        Scheme.preset("ktae", LAYOUT)
