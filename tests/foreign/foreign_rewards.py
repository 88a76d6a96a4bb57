"""Reward functions of verifiers and inspect_ai, in an environment that has them: `make test-foreign`."""

import asyncio

import numpy as np
import pytest

from spanwise import Layout, Objective, Scheme, score_all
from spanwise.errors import DataError, RewardError
from spanwise.types import Status

LAYOUT = Layout({"solution": ["answer"]})
COLUMNS = {"answer": ["4", "5", "4"], "prompt": [[{"role": "user", "content": "2+2"}]] * 3, "info": [{"size": 3}] * 3}
TEXT = [{"solution": {"": f"<answer>{answer}</answer>", "answer": answer}} for answer in ("4", "4", "no")]


def rewards(reward, columns=COLUMNS, **fields):
    scheme = Scheme("gdpo", LAYOUT, [Objective(reward, pays="solution", **fields)])
    return scheme.objectives, score_all(scheme.objectives, TEXT, columns=columns)


def test_verifiers_rubric_is_an_objective_per_function():
    """`verifiers.Rubric` scores the same states to the same numbers."""
    import verifiers

    parser = verifiers.XMLParser(["answer"], answer_field="answer")

    def correct(parser, completion, answer, **kwargs):
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    async def awaited(parser, completion, answer):
        return correct(parser, completion, answer)

    async def short(completion, info):
        return info["size"] / len(completion[0]["content"])

    rubric = verifiers.Rubric(funcs=[correct, awaited, short], weights=[1.0, 0.5, 0.2], parser=parser)
    objectives, scores = rewards(rubric)
    assert [(o.name, o.weight) for o in objectives] == [("correct", 1.0), ("awaited", 0.5), ("short", 0.2)]
    for n, text in enumerate(TEXT):
        completion = [{"role": "assistant", "content": text["solution"][""]}]
        row = {name: column[n] for name, column in COLUMNS.items()}
        state = verifiers.State(**row, completion=completion, task="sum")
        theirs = [asyncio.run(rubric._call_individual_reward_func(function, state)) for function in rubric.funcs]
        assert scores.reward_nm[n].tolist() == pytest.approx(theirs)


def test_a_group_of_rubrics_has_all_their_functions():
    """`add_rubric` of an environment makes such a group. A name given to the objective keeps equal functions apart."""
    import verifiers

    def correct(completion, answer):
        return float(answer in completion[0]["content"])

    def short(completion):
        return 1 / len(completion[0]["content"])

    group = verifiers.RubricGroup([verifiers.Rubric(funcs=[correct], weights=[0.5]), verifiers.Rubric(funcs=[short])])
    objectives, scores = rewards(group, weight=2.0)
    assert [(o.name, o.weight) for o in objectives] == [("correct", 1.0), ("short", 2.0)]
    assert scores.reward_nm[0].tolist() == [1.0, 1 / 18]
    assert [objective.name for objective in rewards(group, name="old")[0]] == ["old.correct", "old.short"]
    with pytest.raises(DataError, match="'answer'"):  # "" in its place would make every completion wrong
        rewards(correct, columns={"prompt": COLUMNS["prompt"], "solution": COLUMNS["answer"]})


def test_an_inspect_ai_scorer_needs_a_target_and_gives_a_number():
    """inspect_ai finds an empty target in every completion, and counts a value that it cannot convert as 0."""
    from inspect_ai import scorer

    @scorer.scorer(metrics=[scorer.mean()])
    def said():
        async def score(state, target):
            return scorer.Score(value=state.metadata["value"])

        return score

    for name, targets in (
        ("reward_model.ground_truth", ["4", "5", None]),
        ("target", [["4", "5"], np.array(["5", "6"]), " "]),
    ):
        scores = rewards(scorer.includes, columns={name: targets})[1]
        assert scores.reward_nm.flatten()[:2].tolist() == [1.0, 0.0]
        assert scores.status_nm.flatten().tolist() == [Status.OK, Status.OK, Status.ERROR]
    scores = rewards(scorer.includes, columns={"target": [4, [], np.float64("nan")]})[1]
    assert scores.status_nm.flatten().tolist() == [Status.OK, Status.ERROR, Status.ERROR]
    with pytest.raises(RewardError, match="failed for all 3"):
        rewards(scorer.includes, columns={"prompt": COLUMNS["prompt"]})
    assert rewards(said, columns={"value": ["P", "Yes", "0.25"]})[1].reward_nm.flatten().tolist() == [0.5, 1.0, 0.25]
    with pytest.raises(RewardError, match="completion 1 of 3 the reward 'unsure'"):
        rewards(said, columns={"value": ["C", "unsure", "I"]})


def test_inspect_ai_scorers_and_what_they_explain():
    from inspect_ai import scorer

    @scorer.scorer(metrics=[scorer.mean()])
    def lengths():
        async def score(state, target):
            reply = state.output.completion
            return scorer.Score(value={"said": len(reply), "right": target.text in reply})

        return score

    objectives, scores = rewards(scorer.includes)  # theirs: "C" or "I"
    assert objectives[0].name == "includes"
    assert scores.reward_nm.flatten().tolist() == [1.0, 0.0, 0.0]
    assert scores.note_nm[0, 0] == "<answer>4</answer>"  # Score.explanation
    assert rewards(scorer.includes())[1].reward_nm.flatten().tolist() == [1.0, 0.0, 0.0]
    both = [Objective(lengths, pays="solution", key=key) for key in ("said", "right")]
    assert score_all(both, TEXT, columns=COLUMNS).reward_nm[0].tolist() == [18.0, 1.0]
