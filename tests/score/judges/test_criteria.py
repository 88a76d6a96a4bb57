"""Rubrics: each criterion pays the part it is about, from a file, a list or a column with one rubric per prompt."""

import json
import math

import pytest

from judge_server import Server, reply, verdict
from score_small import ABSENT, ERROR, OK, UNSCORED
from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, credit_batch, read, score_all

LAYOUT = Layout(["plan", "answer"])
TEXT = [
    {"plan": {"": "take 3"}, "answer": {"": "4"}},
    {"plan": {"": "think"}, "answer": {"": "4"}},
    {"plan": {"": "think"}, "answer": {"": "it may be 4"}},
    {"plan": None, "answer": {"": "4"}},
]


def by_words(part, request, times):
    """Yes to a criterion if the part has the word in its last quotes."""
    word = request["messages"][-1]["content"].rpartition("mentions ")[2].split("\n")[0].rstrip(".")
    return verdict("yes" if word in part else "no", f"I looked for {word}")


def judge(server, **fields):
    return Objective("judge", options={"model": "m", "base_url": server.url}, **fields)


def test_a_file_is_an_objective_per_criterion_which_pays_the_part_it_is_about(tmp_path):
    rubric = tmp_path / "rubric.yaml"
    rubric.write_text(
        "- {name: number, text: It mentions 3., part: plan, weight: 2}\n- {text: It mentions may., part: answer, weight: -1}\n"
    )
    with Server(by_words).serving() as server:
        scheme = Scheme.preset("bae", LAYOUT, objectives=[judge(server, name="rubric", criteria=str(rubric), weight=0.5)])
        rewards_nm = score_all(scheme.objectives, TEXT, columns={}).reward_nm
    assert [(o.name, o.pays, o.weight) for o in scheme.objectives] == [
        ("rubric.number", ("plan",), 1.0),
        ("rubric.2", ("answer",), -0.5),
    ]
    assert rewards_nm.T.tolist() == [pytest.approx([1, 0, 0, math.nan], nan_ok=True), [0, 0, 1, 0]]


def test_a_column_has_a_rubric_for_each_prompt_and_a_reward_for_each_block():
    rubrics = [
        [{"text": "It mentions 3.", "weight": 2, "part": "plan"}, {"text": "It mentions take.", "part": "plan"}],
        json.dumps([{"criterion": "It mentions in.", "points": -3, "part": "plan", "tags": ["x"]}, "It mentions 4."]),
        [{"text": "It mentions may.", "part": "answer", "name": "sure"}, {"text": "It mentions 5.", "part": "answer"}],
        None,
    ]
    with Server(by_words).serving() as server:
        scheme = Scheme.preset("bae", LAYOUT, objectives=[judge(server, name="rubric", criteria="rubric", pays=["*"])])
        scores = score_all(scheme.objectives, TEXT, columns={"rubric": rubrics})
    assert scheme.names == ("rubric.plan", "rubric.answer")
    # Worked by hand: 2 x 1 + 1 x 1; -3 x 1 + (no 4 in the plan) 0; nothing about this plan; no plan at all.
    assert scores.reward_nm[:, 0].tolist() == pytest.approx([3, -3, math.nan, math.nan], nan_ok=True)
    assert scores.status_nm[:, 0].tolist() == [OK, OK, UNSCORED, ABSENT]
    assert scores.reward_nm[:, 1].tolist() == pytest.approx([math.nan, 1, 1, math.nan], nan_ok=True)
    assert scores.status_nm[:, 1].tolist() == [UNSCORED, OK, OK, UNSCORED]
    assert scores.note_nm[2, 1] == "+1 sure: I looked for may\n+0 It mentions 5.: I looked for 5"
    assert scores.measured_nc[:, 0].tolist() == [2, 2, 0, 0]  # calls for the plans


RUBRIC = [
    {"name": "a", "text": "It mentions 3.", "weight": 2, "part": "plan"},
    {"name": "b", "text": "It mentions think.", "weight": -0.5, "part": "plan"},
    {"name": "c", "text": "It mentions may.", "part": "answer"},
]
PIECES = [["take 3", "4"], ["think", "4"], ["think", "it may be 4"], ["think 3", "may"]]


def credited(scheme):
    texts = [[f"<plan>{plan}</plan>", f"<answer>{answer}</answer>"] for plan, answer in PIECES]
    words = sorted({word for row in texts for word in row})
    batch = Batch.jagged([[words.index(word) for word in row] for row in texts], [0] * 4, columns={"rubric": [RUBRIC] * 4})
    reading = read(batch, scheme, Vocabulary(tuple(word.encode() for word in words)))
    return credit_batch(reading, batch, scheme).block_nk


@pytest.mark.parametrize("criteria", [RUBRIC, "rubric"])
def test_the_sum_over_a_blocks_criteria_is_credited_as_an_objective_for_each(criteria):
    with Server(by_words).serving() as server:
        one = judge(server, name="rubric", criteria=criteria, pays="*", baseline="group")
        credit_nk = credited(Scheme.preset("bae_paper", Layout({"plan": ["plan"], "answer": ["answer"]}), objectives=[one]))
    # Plans earn 2, -.5, -.5, 1.5, whose mean is .625; answers 0, 0, 1, 1.
    assert credit_nk[:, 0].tolist() == pytest.approx([1.375, -1.125, -1.125, 0.875])
    assert credit_nk[:, 1].tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5])


def test_as_an_option_the_column_pays_the_sum_of_all_criteria_to_every_block():
    with Server(by_words).serving() as server:
        options = {"model": "m", "base_url": server.url, "criteria": "rubric"}
        one = Objective("judge", pays=["plan", "answer"], options=options)
        layout = Layout({"plan": ["plan"], "answer": ["answer"]})
        credit_nk = credited(Scheme.preset("dr_grpo", layout, objectives=[one], longest=8))
    # Completions earn 2, -.5, .5, 2.5, whose mean is 1.125.
    assert credit_nk.T.tolist() == [pytest.approx([0.875, -1.625, -0.625, 1.375])] * 2


def test_a_criterion_without_a_verdict_leaves_its_block_without_a_reward():
    rubrics = [[{"text": "It mentions 3.", "part": "plan"}, {"text": "It mentions broken.", "part": "plan"}]] * 4

    def half_broken(part, request, times):
        is_broken = "mentions broken" in request["messages"][-1]["content"]
        return reply("?") if is_broken else by_words(part, request, times)

    with Server(half_broken).serving() as server:
        one = judge(server, name="rubric", criteria="rubric", pays="plan")
        (objective,) = Scheme.preset("bae", LAYOUT, objectives=[one]).objectives
        scores = score_all([objective], TEXT, columns={"rubric": rubrics})
    assert scores.status_nm[:, 0].tolist() == [ERROR, ERROR, ERROR, ABSENT]


def test_each_criterion_of_a_file_may_be_for_each_step(tmp_path):
    layout = Layout({"step[*]": ["step"]}, most=2)
    one = Objective(
        "judge",
        name="r",
        each="step[*]",
        criteria=["It is short.", "It is true."],
        options={"model": "m", "base_url": "http://x"},
    )
    scheme = Scheme.preset("bae", layout, objectives=[one])
    assert scheme.names == ("r.1.step[0]", "r.1.step[1]", "r.2.step[0]", "r.2.step[1]")
    assert [o.options["block"] for o in scheme.objectives] == ["step[0]", "step[1]"] * 2
    assert {o.options["criterion"] for o in scheme.objectives[:2]} == {"It is short."}


def test_criteria_go_to_functions_that_have_a_parameter_for_them():
    async def mentions(completion, criterion):
        return float(criterion in completion)

    one = Objective(mentions, name="has", pays="answer", criteria=["4", "may"])
    scheme = Scheme.preset("bae", LAYOUT, objectives=[one])
    assert score_all(scheme.objectives, TEXT, columns={}).reward_nm.tolist() == [[1, 0], [1, 0], [1, 1], [1, 0]]
