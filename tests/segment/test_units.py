"""Units of prose and runs of tokens: what ends one, by hand; `sae` as the oracle of its own segments."""

from functools import partial

import pytest
import torch

from segment_small import claims_in, segment
from spanwise import Batch, Objective, Scheme, pipeline
from spanwise.credit.methods._gae import SaeSegments
from spanwise.engines.trl.trainer import AT_READ, PROVIDES
from spanwise.errors import AlignmentError, RecipeError
from spanwise.layout import Layout
from spanwise.segment import Vocabulary, find_blocks


@pytest.mark.parametrize(
    ("segmenter", "text", "units"),
    [
        ("sentences", "Mr. Fu, cf. Fig. 3.5. So?! Yes... and no.", ["Mr. Fu, cf. Fig. 3.5.", "So?!", "Yes... and no."]),
        ("sentences", "1. Say e.g. B. Next.\n2. Halve. 3 is left", ["1. Say e.g. B.", "Next.", "2. Halve.", "3 is left"]),
        ("sentences", "She said “Go.” He went.) **Done.** End", ["She said “Go.”", "He went.)", "**Done.**", "End"]),
        ("sentences", "是。不是\uff01“真\uff1f”好", ["是。", "不是\uff01", "“真\uff1f”", "好"]),
        ("steps", "### Step 5\n**6.** e\n3.5 is none\nsteps 2", ["### Step 5", "**6.** e\n3.5 is none\nsteps 2"]),
        ("steps", "no step", []),
    ],
)  # fmt: skip
def test_units(segmenter, text, units):
    claims, _ = claims_in(Layout({"unit[*]": f"{segmenter}:"}, most=16), text)
    assert [content for _, _, content in claims] == units


def test_the_last_of_two_blocks_takes_the_units_that_are_left():
    owners, text, fault = segment({"first": "lines:", "others": "lines:"}, ["a\n", "b\n", "c\n", "d"])
    assert (owners, fault, text["others"]["others"]) == (["first"] + ["others"] * 3, 0, "d")


@pytest.mark.parametrize("segmenter", ["turns", "lines", "steps"])
def test_the_token_that_ends_a_turn_ends_its_line_and_no_unit_says_it(segmenter):
    first = '{"a": 1}' if segmenter == "turns" else "1. a"
    owners, texts, _ = segment({"unit[*]": f"{segmenter}:"}, [first, "<|im_end|>", "42", "2. b", "<|im_end|>"], masked={2})
    assert owners == ["unit[0]", "unit[0]", None, "unit[1]", "unit[1]"]  # "42" is a tool's
    assert (texts["unit[0]"]["unit[0]"], texts["unit[1]"]["unit[1]"]) == (first, "2. b")
    struck = "1. <s>a</s>2. b"  # `</s>` closes a tag of HTML
    assert [content for _, _, content in claims_in(Layout({"unit[*]": "lines:"}), struck)[0]] == [struck]


BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(256)))


def test_low_probability_cuts_where_sae_does():
    logp = torch.rand(1, 64, generator=torch.Generator().manual_seed(3)).log()
    logp[0, 5] = torch.tensor(0.5).log()  # which is not below 0.5
    is_all = torch.ones(1, 64, dtype=torch.bool)
    opens = SaeSegments(0.5).opens(logp, is_all)[0]
    assert not opens[5]
    opens[0] = False
    layout = Layout({"s[*]": "low_probability:0.5"}, most=64)
    spans, _ = find_blocks(torch.full((1, 64), 97), is_all, layout=layout, vocabulary=BYTES, logp_nt=logp)
    assert spans.block_nt[0].tolist() == opens.cumsum(0).tolist()


def scheme(mark):
    return Scheme("bae", Layout({"s[*]": mark}, most=2), [Objective("environment", "s[0]")])


def test_log_probabilities_that_come_too_late_are_refused_before_anything_runs():
    needs = scheme("cuts:5")
    assert (needs.needs, scheme("fixed:5").needs) == ({"logp_nt"}, frozenset())
    needs.check({"logp_nt"})
    for provides, at_read in ((PROVIDES, AT_READ), ((), None)):
        with pytest.raises(RecipeError, match="cuts"):
            needs.check(provides, at_read=at_read)
    scheme("fixed:5").check(PROVIDES, at_read=AT_READ)


def test_the_road_takes_log_probabilities_of_the_batch(unchecked_shapes):
    batch = Batch.jagged([[97, 98, 99], [97, 98]], [0, 0])
    with pytest.raises(RecipeError, match="cuts"):
        pipeline.read(batch, scheme("cuts:1"), BYTES, recorded={})
    find = partial(find_blocks, torch.full((1, 3), 97), layout=scheme("cuts:1").layout, vocabulary=BYTES)
    with pytest.raises(AlignmentError, match=r"completion 0 .* token 1"):
        find(torch.ones(1, 3, dtype=torch.bool), logp_nt=torch.tensor([[0.0, float("nan"), 0.0]]))
    find(torch.tensor([[1, 0, 1]]), logp_nt=torch.tensor([[0.0, float("nan"), 0.0]]))
    with pytest.raises(AlignmentError, match=r"logp_nt has shape \(1, 2\)"):
        find(torch.ones(1, 3, dtype=torch.bool), logp_nt=torch.zeros(1, 2))
