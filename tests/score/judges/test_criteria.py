"""Rubrics: each criterion pays the part it is about, from a file, a list or a column with one rubric per prompt."""

import json
import math
import re
from statistics import mean, stdev

import pytest
import torch

from judge_server import Server, part_of, reply, verdict
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
    """Answer yes if the part has the word with which its criterion ends."""
    word = request["messages"][-1]["content"].rpartition("mentions ")[2].split("\n")[0].rstrip(".")
    return verdict("yes" if word in part else "no", f"I looked for {word}")


def judge(server, *, options=None, **fields):
    return Objective("judge", options={"model": "m", "base_url": server.url, **(options or {})}, **fields)


def test_a_file_is_an_objective_per_criterion_which_pays_the_part_it_is_about(tmp_path):
    rubric = tmp_path / "rubric.yaml"
    rubric.write_text(
        "- {name: number, text: It mentions 3., part: plan, weight: 2}\n- {text: It mentions may., part: answer, weight: -1}\n"
    )
    with Server(by_words).serving() as server:
        scheme = Scheme.preset("bae", LAYOUT, objectives=[judge(server, name="rubric", criteria=str(rubric), weight=0.5)])
        rewards_nm = score_all(scheme.objectives, TEXT, columns={}).reward_nm
    objectives = [(o.name, o.pays, o.weight) for o in scheme.objectives]
    assert objectives == [("rubric.number", ("plan",), 1.0), ("rubric.2", ("answer",), -0.5)]
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
PLANNED = [[f"<plan>{plan}</plan>", f"<answer>{answer}</answer>"] for plan, answer in PIECES]
TAGS = Layout({"plan": ["plan"], "answer": ["answer"]})


def credited(scheme, texts, rubric):
    """The credit of each block of one group, which is written a piece a token; all of it has the same rubric."""
    words = sorted({word for row in texts for word in row})
    size = len(texts)
    ids = [[words.index(word) for word in row] for row in texts]
    batch = Batch.jagged(ids, [0] * size, columns={"rubric": [rubric] * size})
    reading = read(batch, scheme, Vocabulary(tuple(word.encode() for word in words)))
    return credit_batch(reading, batch, scheme).block_nk


def test_the_sum_over_a_blocks_criteria_is_credited_as_an_objective_for_each_and_as_an_option_to_every_block():
    with Server(by_words).serving() as server:
        for criteria in (RUBRIC, "rubric"):
            objective = judge(server, name="rubric", criteria=criteria, pays="*", baseline="group")
            credit_nk = credited(Scheme.preset("bae_paper", TAGS, objectives=[objective]), PLANNED, RUBRIC)
            # Plans earn 2, -.5, -.5, 1.5, whose mean is .625; answers 0, 0, 1, 1.
            assert credit_nk[:, 0].tolist() == pytest.approx([1.375, -1.125, -1.125, 0.875])
            assert credit_nk[:, 1].tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5])
        objective = judge(server, pays=["plan", "answer"], options={"criteria": "rubric"})
        credit_nk = credited(Scheme.preset("dr_grpo", TAGS, objectives=[objective], longest=8), PLANNED, RUBRIC)
    # Completions earn 2, -.5, .5, 2.5, whose mean is 1.125.
    assert credit_nk.T.tolist() == [pytest.approx([0.875, -1.625, -0.625, 1.375])] * 2


def test_a_criterion_about_a_part_that_is_not_there_is_not_asked():
    with Server(by_words).serving() as server:
        objective = judge(server, pays=["plan", "answer"], options={"criteria": "rubric"})
        scores = score_all([objective], [{"plan": None, "answer": {"": "may"}}], columns={"rubric": [RUBRIC]})
        assert [part_of(request) for request in server.requests] == ["may"]
    assert scores.reward_nm.tolist() == [[1.0]]


def test_a_criterion_without_a_verdict_leaves_its_block_without_a_reward():
    rubrics = [[{"text": "It mentions 3.", "part": "plan"}, {"text": "It mentions broken.", "part": "plan"}]] * 4

    def half_broken(part, request, times):
        return reply("?") if "mentions broken" in request["messages"][-1]["content"] else by_words(part, request, times)

    with Server(half_broken).serving() as server:
        scheme = Scheme.preset("bae", LAYOUT, objectives=[judge(server, name="rubric", criteria="rubric", pays="plan")])
        scores = score_all(scheme.objectives, TEXT, columns={"rubric": rubrics})
        alone = score_all(
            scheme.objectives, TEXT[:1], columns={"rubric": [["It mentions broken.", "Broken, it mentions broken."]]}
        )
    assert scores.status_nm[:, 0].tolist() == [ERROR, ERROR, ERROR, ABSENT]
    assert alone.status_nm.tolist() == [[ERROR]]  # all criteria of one completion may fail, and the run goes on


def test_each_criterion_of_a_file_may_be_for_each_step(tmp_path):
    layout = Layout({"step[*]": ["step"]}, most=2)
    options, criteria = {"model": "m", "base_url": "http://x"}, ["It is short.", "It is true."]
    objective = Objective("judge", name="r", each="step[*]", criteria=criteria, options=options)
    scheme = Scheme.preset("bae", layout, objectives=[objective])
    assert scheme.names == ("r.1.step[0]", "r.1.step[1]", "r.2.step[0]", "r.2.step[1]")
    assert [o.options["block"] for o in scheme.objectives] == ["step[0]", "step[1]"] * 2
    assert {o.options["criterion"] for o in scheme.objectives[:2]} == {"It is short."}


def test_criteria_go_to_functions_that_have_a_parameter_for_them():
    async def mentions(completion, criterion):
        return float(criterion in completion)

    objective = Objective(mentions, name="has", pays="answer", criteria=["4", "may"])
    scheme = Scheme.preset("bae", LAYOUT, objectives=[objective])
    assert score_all(scheme.objectives, TEXT, columns={}).reward_nm.tolist() == [[1, 0], [1, 0], [1, 1], [1, 0]]


STEPS = [
    {"step[0]": {"": "so 3"}, "step[1]": {"": "so 4"}, "end": {"": "4"}},
    {"step[0]": {"": "so 5"}, "step[1]": {"": "so 4"}, "end": {"": "4"}},
    {"step[0]": {"": "so 4"}, "step[1]": None, "end": {"": "5"}},
]
LOCATED = [{"text": "It mentions 3.", "weight": 2}, {"text": "It mentions 4.", "weight": -1}]


def located(server, **options):
    options = {"locate": True, "criteria": "rubric", **options}
    each = judge(server, name="rubric", each="step[*]", options=options)
    whole = judge(server, name="rest", pays="step[*]", options=options)
    scheme = Scheme.preset("bae", Layout({"step[*]": ["step"], "end": ["end"]}, most=2), objectives=[each, whole])
    return score_all(scheme.objectives, STEPS, columns={"rubric": [LOCATED] * 3})


def by_place(part, request, times):
    """Yes, and the first step that has the word; else no, about the whole."""
    word = request["messages"][-1]["content"].rpartition("mentions ")[2][0]
    steps = re.findall(r"<(step\[\d\]) \w+>\n(.*)\n", part)
    place = next((name for name, text in steps if word in text), None)
    return reply(json.dumps({"reason": "r", "verdict": "yes" if place else "no", "part": place or "whole"}))


def test_a_located_verdict_pays_the_step_it_is_about_is_asked_once_and_kept_with_its_place(tmp_path):
    with Server(by_place).serving() as server:
        scores, kept = (located(server, cache=str(tmp_path / "c.sqlite")) for _ in range(2))
    # 3 is in step 0 of the first. 4 is in step 1 of the first two and in step 0 of the last. Else the verdict is no, of the whole.
    assert scores.reward_nm[:, 0].tolist() == pytest.approx([2, math.nan, -1], nan_ok=True)
    assert scores.reward_nm[:, 1].tolist() == pytest.approx([-1, -1, math.nan], nan_ok=True)
    assert scores.status_nm[:, :2].tolist() == [[OK, OK], [UNSCORED, OK], [OK, ABSENT]]
    assert scores.reward_nm[1:, 2].tolist() == [0, 0]
    # Two criteria for each of three completions, asked by three objectives at once; then never again.
    assert len(server.requests) == 6
    assert torch.equal(scores.reward_nm.nan_to_num(9), kept.reward_nm.nan_to_num(9))
    assert scores.measured_nc[:, [0, 5, 10]].sum().item() == 6
    request = next(request for request in server.requests if "so 5" in part_of(request))
    properties = request["response_format"]["json_schema"]["schema"]["properties"]
    assert properties["part"]["enum"] == ["step[0]", "step[1]", "whole", "none"]


def test_srar_adds_each_steps_standardised_verdicts_to_the_outcome():
    """The oracle is Algorithm 1 as in the authors' code: loops over the steps of one prompt."""
    fields, located_by = {"baseline": "group", "scale": "std"}, {"locate": True, "criteria": "rubric"}
    layout, right = Layout({"step[*]": ["step"]}, most=2), [1.0, 0.0, 0.0, 1.0]
    steps = [("a 3", "b 4"), ("a 4", "b"), ("a 3 4", "b"), ("a", "b 4")]
    texts = [[f"<step>{step}</step>" for step in pair] for pair in steps]
    with Server(by_place).serving() as server:
        objectives = [
            Objective(lambda blocks: right, pays="step[*]", name="correct", **fields),
            judge(server, name="rubric", each="step[*]", options=located_by, **fields),
            judge(server, name="rest", pays="step[*]", options=located_by, **fields),
        ]
        credit_nk = credited(Scheme.preset("bae_paper", layout, objectives=objectives), texts, LOCATED)
    deltas = [{}, {}, {}, {}]  # place -> the sum of the weights of its satisfied criteria
    for n, pair in enumerate(steps):
        for word, weight in (("3", 2.0), ("4", -1.0)):
            place = next((k for k in (0, 1) if word in pair[k]), "whole")
            deltas[n][place] = deltas[n].get(place, 0.0) + (weight if place != "whole" else 0.0)

    def standardised(values):
        middle, spread = mean(values.values()), stdev(values.values()) if len(values) > 1 else 0.0
        return {n: (value - middle) / (spread + 1e-6) if spread > 1e-6 else 0.0 for n, value in values.items()}

    expected = [[standardised(dict(enumerate(right)))[n]] * 2 for n in range(4)]
    for place in (0, 1, "whole"):
        for n, offset in standardised({n: delta[place] for n, delta in enumerate(deltas) if place in delta}).items():
            for k in (0, 1) if place == "whole" else (place,):
                expected[n][k] += offset
    assert credit_nk.tolist() == [pytest.approx(row) for row in expected]
    assert len({round(value, 6) for row in expected for value in row}) > 4


def test_papo_compares_the_rubric_among_right_completions_alone():
    rewards = {"correct": [1.0, 1.0, 1.0, 0.0, 0.0], "rubric": [0.5, 0.7, 0.9, 1.0, 0.0]}
    fields = {"pays": "all", "baseline": "group", "scale": "std"}
    objectives = [
        Objective(lambda blocks: rewards["correct"], name="correct", **fields),
        Objective(lambda blocks: rewards["rubric"], name="rubric", only="correct", if_missing=-9.0, **fields),
    ]
    scheme = Scheme.preset("bae_paper", Layout({"all": []}), objectives=objectives)
    batch = Batch.jagged([[0]] * 5, [0] * 5)
    reading = read(batch, scheme, Vocabulary((b"x",)))
    assert reading.scores.status_nm[:, 1].tolist() == [OK, OK, OK, UNSCORED, UNSCORED]
    # Outcome: (1 - .6) / .5477 and -.6 / .5477. Rubric of the right ones: mean .7, deviation .2.
    expected = [0.7303 - 1, 0.7303, 0.7303 + 1, -1.0954, -1.0954]
    assert credit_batch(reading, batch, scheme).block_nk[:, 0].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_judge_that_writes_freely_and_gives_no_reason_is_asked_for_the_part():
    with Server(by_place).serving() as server:
        scores = located(server, constrain="none", reasons=False)
        content = server.requests[0]["messages"][-1]["content"]  # cached verdicts are found by this text
        assert '"part": the part that this is about most ("step[0]"' in content
        assert content.endswith('), "whole" if it is all of them, "none" if none.')
        assert len(server.requests) == 6  # without a cache, too
    assert scores.reward_nm[0, :2].tolist() == [2, -1]
