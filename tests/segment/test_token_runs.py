"""Runs of tokens: cuts by number, by probability and by mask, worked out by hand; `sae` as the oracle of its own segments."""

from functools import partial

import pytest
import torch

from spanwise import Batch, Objective, Scheme, pipeline
from spanwise.credit.methods._gae import SaeSegments
from spanwise.engines.trl.trainer import AT_READ, PROVIDES
from spanwise.errors import AlignmentError, LayoutError, RecipeError
from spanwise.layout import Layout
from spanwise.segment import Vocabulary, find_blocks
from spanwise.types import Fault

BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(256)))


def owners(layout, probabilities, mask=None):
    """The block numbers of tokens that were sampled with these probabilities."""
    logp = torch.tensor([probabilities]).log()
    ids = torch.full(logp.shape, 97)
    mask_nt = torch.ones_like(ids) if mask is None else torch.tensor([mask])
    spans, _ = find_blocks(ids, mask_nt, layout=layout, vocabulary=BYTES, logp_nt=logp)
    return spans.block_nt[0].tolist(), Fault(int(spans.fault_n))


def test_low_probability_cuts_where_sae_does():
    layout = Layout({"s[*]": "low_probability:0.2"}, most=8)
    assert owners(layout, [0.9, 0.95, 0.1, 0.9, 0.15, 0.99]) == ([0, 0, 1, 1, 2, 2], 0)
    logp = torch.rand(64, generator=torch.Generator().manual_seed(3)).tolist()
    opens = SaeSegments().opens(torch.tensor([logp]).log(), torch.ones(1, 64, dtype=torch.bool))[0]
    opens[0] = False
    assert owners(Layout({"s[*]": "low_probability:0.2"}, most=64), logp)[0] == opens.cumsum(0).tolist()


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        ("fixed:0", "takes a whole number of tokens from 1 on, such as fixed:32; there is '0'"),
        ("fixed:a", "whole number"),
        ("cuts:5@2", "a probability above 0 and up to 1, such as cuts:5@0.9; there is '2'"),
        ("cuts:@0.5", "whole number"),
        ("low_probability:", "a probability above 0"),
        ("low_probability:nan", "a probability above 0"),
    ],
)
def test_marks_that_are_no_number(mark, sentence):
    with pytest.raises(LayoutError, match=sentence):
        Layout({"s[*]": mark})


def test_one_way_to_cut():
    with pytest.raises(LayoutError, match="'2' and '3' cut the same tokens in two ways"):
        Layout({"a[*]": "fixed:2", "b[*]": "fixed:3"})


def scheme(mark):
    return Scheme("bae", Layout({"s[*]": mark}, most=2), [Objective("environment", "s[0]")])


def test_log_probabilities_that_come_too_late_are_refused_before_anything_runs():
    needs = scheme("cuts:5")
    assert (needs.needs, scheme("fixed:5").needs) == ({"logp_nt"}, frozenset())
    needs.check({"logp_nt"})
    for provides, at_read in ((PROVIDES, AT_READ), ((), None)):
        with pytest.raises(RecipeError, match="'cuts' cuts by log-probabilities"):
            needs.check(provides, at_read=at_read)
    scheme("fixed:5").check(PROVIDES, at_read=AT_READ)


def test_the_road_takes_log_probabilities_of_the_batch(unchecked_shapes):
    batch = Batch.jagged([[97, 98, 99], [97, 98]], [0, 0])
    with pytest.raises(RecipeError, match="'cuts' cuts by log-probabilities"):
        pipeline.read(batch, scheme("cuts:1"), BYTES, recorded={})
    find = partial(find_blocks, torch.full((1, 3), 97), layout=scheme("cuts:1").layout, vocabulary=BYTES)
    with pytest.raises(AlignmentError, match="completion 0 is nan at trainable token 1"):
        find(torch.ones(1, 3, dtype=torch.bool), logp_nt=torch.tensor([[0.0, float("nan"), 0.0]]))
    find(torch.tensor([[1, 0, 1]]), logp_nt=torch.tensor([[0.0, float("nan"), 0.0]]))
    with pytest.raises(AlignmentError, match=r"logp_nt has shape \(1, 2\)"):
        find(torch.ones(1, 3, dtype=torch.bool), logp_nt=torch.zeros(1, 2))
