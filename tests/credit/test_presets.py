"""The price of malformed tags in the presets: which credit it moves, by how much, and that no other moves."""

import pytest
import torch

from helpers import double
from spanwise import Batch, Layout, Scheme, Vocabulary, credit_batch, read
from spanwise.credit import METHODS
from spanwise.credit.registry import outcome_methods

LAYOUT = Layout({"solution": ["answer"], "confidence": ["analysis", "confidence"]})
PIECES = ("<answer>", "</answer>", "<analysis>", "</analysis>", "<confidence>", "</confidence>", "4", "5", "0.9", "0.2")
VOCABULARY = Vocabulary(tuple(piece.encode() for piece in PIECES))
SOLVED = ("<answer>", "4", "</answer>")
SURE = ("<analysis>", "</analysis>", "<confidence>", "0.9", "</confidence>")
DRIFT = (*SOLVED, *SURE, "</analysis>", "<confidence>", "0.9", "</confidence>")  # answer and confidence can still be read


def credited(name, *completions):
    """Return a row (solution, confidence, stop) of credit for each completion of one prompt, whose answer is 4."""
    ids = [[PIECES.index(piece) for piece in completion] for completion in completions]
    batch = Batch.jagged(ids, ["2 + 2"] * len(ids), columns={"answer": ["4"] * len(ids)})
    scheme = Scheme.preset(name, LAYOUT)
    credit = credit_batch(read(batch, scheme, VOCABULARY), batch, scheme)
    return torch.cat([credit.block_nk, credit.stop_n[:, None]], dim=1)


@pytest.mark.parametrize(
    ("name", "last", "others", "own"),
    [
        # All right, all .9; format of the confidence 1 1 1 0, mean .75: .25 x .25 and .25 x -.75, where the tags are wrong.
        ("bae", DRIFT, [0, 0.0625, 0], [0, -0.1875, 0]),
        ("bae", ("<answer>", "5", "</answer>", *SOLVED, *SURE), [0.0625, 0, 0], [-0.1875, 0, 0]),
        ("rlcr", DRIFT, [0.0625, 0.0625, 0], [-0.1875, -0.1875, 0]),  # R = 1 - .01 + .25 and 1 - .01
        ("bae_paper", DRIFT, [0, 0, 0], [0, 0, 0]),
        ("rlcr_paper", DRIFT, [0, 0, 0], [0, 0, 0]),
        # Brier -.01 of three right ones, -1 of the one that says nothing: its baseline is theirs.
        ("bae", SOLVED, [0, 0, 0], [0, 0, -0.99]),
    ],
)
def test_one_of_four_is_malformed_or_lacks_its_confidence(name, last, others, own):
    torch.testing.assert_close(credited(name, *[(*SOLVED, *SURE)] * 3, last), double([others] * 3 + [own]))


@pytest.mark.parametrize("silent", [SOLVED, ()])
def test_what_says_no_confidence_costs_what_it_costs_without_a_price(silent):
    group = [(*SOLVED, *SURE)] * 3 + [silent]
    assert torch.equal(credited("bae", *group), credited("bae_paper", *group))


def test_two_presets_have_the_price_and_which_methods_are_of_outcomes():
    weights = {name: method.preset.format for name, method in METHODS.items() if method.preset is not None}
    assert {name: weight for name, weight in weights.items() if weight} == {"bae": 0.25, "rlcr": 0.25}
    assert {"grpo", "dr_grpo", "bae", "rlcr", "gigpo"} & set(outcome_methods()) == {"grpo", "dr_grpo"}


@pytest.mark.parametrize(("priced", "bare"), [("bae", "bae_paper"), ("rlcr", "rlcr_paper")])
def test_where_all_are_well_formed_nothing_moves(priced, bare):
    wrong, unsure = (
        ("<answer>", "5", "</answer>"),
        ("<analysis>", "4", "</analysis>", "<confidence>", "0.2", "</confidence>"),
    )
    group = [solution + report for solution in (SOLVED, wrong) for report in (SURE, unsure, SURE)]
    assert credited(priced, *group)[:, :2].all()
    torch.testing.assert_close(credited(priced, *group), credited(bare, *group), atol=1e-15, rtol=0)


@pytest.mark.parametrize("name", ["grpo", "gdpo", "rlcr", "bae"])
def test_two_attempts_stay_two_blocks_so_that_every_preset_judges_the_first(name):
    two = Layout({"first": ["answer"], "second": ["answer"]})
    wrong = ("<answer>", "5", "</answer>")
    ids = [[PIECES.index(piece) for piece in (*first, *second)] for first, second in ((wrong, SOLVED), (SOLVED, wrong))]
    reading = read(Batch.jagged(ids, ["2 + 2"] * 2, columns={"answer": ["4"] * 2}), Scheme.preset(name, two), VOCABULARY)
    assert reading.scores.reward_nm[:, 0].tolist() == [0.0, 1.0]
    assert reading.fault_n.tolist() == [0, 0]


def test_units_without_marks_stay_blocks_in_a_preset_for_whole_completions():
    steps = Layout(["step[*]"], segmenter="steps", most=2)
    assert Scheme.preset("grpo", steps, recorded="correct").layout.names == ("step[0]", "step[1]")


def test_a_repeated_block_stays_one_in_a_preset_for_whole_completions():
    steps = Layout({"step[*]": ["analysis"], "end": ["answer"]}, most=2)
    ids = [PIECES.index(piece) for piece in ("<analysis>", "4", "</analysis>") * 2 + SOLVED]
    reading = read(Batch.jagged([ids], ["2 + 2"], columns={"answer": ["4"]}), Scheme.preset("grpo", steps), VOCABULARY)
    assert (reading.scores.reward_nm.tolist(), reading.fault_n.tolist()) == ([[1.0]], [0])
