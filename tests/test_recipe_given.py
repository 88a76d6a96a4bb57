"""`given` in a recipe's objectives: how it is read, and how it is written out again."""

from dataclasses import replace

import pytest

from spanwise.layout import Layout
from spanwise.recipe import load, recorded_elsewhere, resolved, scheme_of

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
CONSTANT, TIDY = f"{__name__}:constant", f"{__name__}:tidy"


def constant(text, *, columns):
    return [1] * len(text)


def tidy(blocks, block=""):
    return [1.0 for _ in blocks]


def filled(**report):
    entries = [{"reward": "correct", "pays": "solution"}, {"reward": "brier", "pays": ["confidence"], **report}]
    recipe = load(None, {"objectives": entries})
    return recipe, scheme_of(recipe, LAYOUT, 64)


@pytest.mark.parametrize("given", ["correct", ["correct"], ["correct", "complete"], ["complete", CONSTANT, "correct"]])
def test_given_is_read_and_written(given):
    recipe, scheme = filled(given=given, baseline="outcome")
    assert scheme.objectives[1].given == (("correct",) if given == "correct" else tuple(given))
    written = resolved(recipe, scheme)["objectives"]
    assert written[1]["given"] == ("correct" if given == ["correct"] else given)
    assert scheme_of(load(None, {"objectives": written}), LAYOUT, 64).objectives == scheme.objectives


def test_what_is_left_open_stays_open_and_functions_are_written_as_module_and_name():
    recipe, scheme = filled()
    correct, report = resolved(recipe, scheme)["objectives"]
    assert correct == {"reward": "correct", "pays": ["solution"], "weight": 1.0, "name": "correct"}
    assert {"given", "baseline", "scale", "back_off", "if_missing", "options"}.isdisjoint(report)
    recipe, scheme = filled(given=["correct", "complete"], baseline="outcome", back_off=False)
    assert resolved(recipe, scheme)["objectives"][1]["back_off"] is False
    recipe, scheme = filled(reward=TIDY)
    assert scheme.objectives[1].reward is tidy
    report = replace(scheme.objectives[1], given=("correct", constant), baseline="outcome")
    written = resolved(recipe, replace(scheme, objectives=(scheme.objectives[0], report)))["objectives"][1]
    assert (written["reward"], written["given"]) == (TIDY, ["correct", CONSTANT])


def test_a_function_for_each_block_is_imported_unless_its_rewards_are_recorded():
    recipe = load(None, {"objectives": [{"reward": TIDY, "each": "*"}]})
    for recorded, reward in (([], tidy), (["other.solution"], tidy), (["tidy.confidence"], recorded_elsewhere)):
        assert [o.reward for o in scheme_of(recipe, LAYOUT, 64, recorded=recorded).objectives] == [reward] * 2


def sees_one(solution_str, criteria=""):
    return {"score": 1.0, "style": 0.5}


@pytest.mark.parametrize(
    "fields",
    [
        {"options": {"sees": "part", "timeout": 1, "max_concurrent": 2}},
        {"each": "*", "options": {"sees": "part"}},
        {"each": "*", "criteria": "rubrics"},
        {"key": "style"},
    ],
)
def test_recorded_rewards_are_credited_whatever_says_how_their_function_was_called(fields):
    recipe = load(None, {"objectives": [{"reward": f"{__name__}:sees_one", "pays": "solution", **fields}]})
    recorded = ["sees_one", "sees_one.solution", "sees_one.confidence"]
    objectives = scheme_of(recipe, LAYOUT, 64, recorded=recorded, run_code=False).objectives
    assert {objective.name for objective in objectives} <= set(recorded)


def test_a_column_of_rubrics_is_no_path(tmp_path, monkeypatch):
    """A folder beside the recipe may have the name of a column."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "rubric").mkdir(parents=True)
    (tmp_path / "there" / "rubric.yaml").write_text("[It is short.]")
    objective = "{{reward: judge, pays: [solution], criteria: {}, options: {{model: m}}}}"
    for written, read in {"rubric": "rubric", "rubric.yaml": "there/rubric.yaml"}.items():
        (tmp_path / "there" / "recipe.yaml").write_text(f"objectives: [{objective.format(written)}]")
        assert load("there/recipe.yaml").objectives[0]["criteria"] == read
