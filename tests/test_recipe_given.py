"""`given` in a recipe's objectives: how it is read, and how it is written out again."""

from dataclasses import replace

import pytest

from spanwise.layout import Layout
from spanwise.recipe import load, recorded_elsewhere, resolved, scheme_of

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})


def constant(text, *, columns):
    return [1] * len(text)


def tidy(blocks, block=""):
    return [1.0 for _ in blocks]


def filled(**report):
    entries = [{"reward": "correct", "pays": "solution"}, {"reward": "brier", "pays": ["confidence"], **report}]
    recipe = load(None, {"objectives": entries})
    return recipe, scheme_of(recipe, LAYOUT, 64)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("correct", ("correct",)),
        (["correct"], ("correct",)),
        (["correct", "complete"], ("correct", "complete")),
        (["complete", f"{__name__}:constant", "correct"], ("complete", f"{__name__}:constant", "correct")),
    ],
)
def test_given_is_read_and_written(given, read):
    recipe, scheme = filled(given=given, baseline="outcome")
    assert scheme.objectives[1].given == read
    written = resolved(recipe, scheme)["objectives"]
    assert written[1]["given"] == (list(read) if len(read) > 1 else read[0])
    assert scheme_of(load(None, {"objectives": written}), LAYOUT, 64).objectives == scheme.objectives


def test_what_is_left_open_stays_open():
    recipe, scheme = filled()
    correct, report = resolved(recipe, scheme)["objectives"]
    assert correct == {"reward": "correct", "pays": ["solution"], "weight": 1.0, "name": "correct"}
    assert {"given", "baseline", "scale", "back_off", "if_missing", "options"}.isdisjoint(report)
    recipe, scheme = filled(given=["correct", "complete"], baseline="outcome", back_off=False)
    assert resolved(recipe, scheme)["objectives"][1]["back_off"] is False


def test_functions_are_written_as_module_and_name():
    recipe, scheme = filled(reward=f"{__name__}:tidy")
    assert scheme.objectives[1].reward is tidy
    report = replace(scheme.objectives[1], given=("correct", constant), baseline="outcome")
    written = resolved(recipe, replace(scheme, objectives=(scheme.objectives[0], report)))["objectives"][1]
    assert (written["reward"], written["given"]) == (f"{__name__}:tidy", ["correct", f"{__name__}:constant"])


@pytest.mark.parametrize(
    ("recorded", "reward"), [([], tidy), (["other.solution"], tidy), (["tidy.confidence"], recorded_elsewhere)]
)
def test_a_function_for_each_block_is_imported_unless_its_rewards_are_recorded(recorded, reward):
    recipe = load(None, {"objectives": [{"reward": f"{__name__}:tidy", "each": "*"}]})
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


@pytest.mark.parametrize(("written", "read"), [("rubric", "rubric"), ("rubric.yaml", "there/rubric.yaml")])
def test_a_column_of_rubrics_is_no_path(written, read, tmp_path, monkeypatch):
    """A folder beside the recipe may have the name of a column."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there" / "rubric").mkdir(parents=True)
    (tmp_path / "there" / "rubric.yaml").write_text("[It is short.]")
    recipe = tmp_path / "there" / "recipe.yaml"
    recipe.write_text(f"objectives: [{{reward: judge, pays: [solution], criteria: {written}, options: {{model: m}}}}]")
    assert load(recipe.relative_to(tmp_path)).objectives[0]["criteria"] == read
