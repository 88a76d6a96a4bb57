"""The folder of a run that a script or a trainer drives: a run goes on in it under its own rule alone."""

import json
from dataclasses import fields

import numpy as np
import pytest
import torch
import yaml

from spanwise import Laser, Layout, Objective, Scheme, score_all
from spanwise.engines.changes import changes as changed_settings
from spanwise.engines.shared import RULE, RunRecord, columns_of, reward_means
from spanwise.errors import DataError
from spanwise.rollouts.folder import sole_writer

LAYOUT = Layout({"part[*]": ["part"], "answer": ["answer"]})


def length(completions, **_):
    return [float(len(text)) for text in completions]


def rule(method="grpo", layout=LAYOUT, **changes):
    objectives = changes.pop("objectives", [Objective(length, pays=layout.names[-1])])
    return Scheme.preset(method, layout, objectives=objectives, **changes)


USUAL = rule()
#: Another value of each field that a scheme and its layout are made of.
OTHERS = {
    "method": rule("rloo", longest=9),
    "layout": rule(layout=Layout({"part[*]": ["part"], "answer": ["reply"]})),
    "prefilled": rule(layout=Layout(dict(LAYOUT.blocks), prefilled="part")),
    "segmenter": rule(layout=Layout({"answer": ["answer"]}, segmenter="json")),
    "most": rule(layout=Layout(dict(LAYOUT.blocks), most=3)),
    "objectives": rule(objectives=[Objective(length, pays="answer", weight=0.5)]),
    "per": rule(per="batch"),
    "options": rule(ddof=0),
    "values": rule("gae", values="shared", per="completion"),
    "refine": rule(refine="ktae"),
    "laser": rule(modes=[Laser(token="<unk>", verdict="length")]),
}


def test_every_field_of_a_scheme_has_its_case():
    made_of = {field.name for part in (Scheme, Layout) for field in fields(part)} - {"blocks", "recorded", "modes"}
    assert made_of <= {*OTHERS}
    assert {*OTHERS} == {*RULE}


@pytest.fixture
def record(tmp_path):
    return RunRecord(tmp_path, keep_rollouts=0, report=False, option="folder")


def test_functions_of_verl_and_verifiers_find_the_mappings_of_a_row_whole():
    """Some engines also make a column of each of their entries."""

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return extra_info["limits"]["most"]

    def rubric(completion, info):
        return info.get("most", -1.0)

    rows = [{"answer": "4", "extra_info": {"limits": {"most": n}}, "info": {"most": n} if n else {}} for n in (0.0, 2.0)]
    objectives = rule("gdpo", objectives=[Objective(f, pays="answer") for f in (compute_score, rubric)]).objectives
    scores = score_all(objectives, [{"answer": {"": "4"}}] * 2, columns=columns_of(rows))
    assert scores.reward_nm.tolist() == [[0.0, -1.0], [2.0, 2.0]]


def begun(record, scheme):
    """Let the folder hold a run under a scheme, which may go on."""
    recipe = record.recipe(scheme)
    (record.folder.path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    (record.folder.path / "metrics.jsonl").write_text("")
    record.check(recipe, step=1)


def assert_another_rule(record, before, after):
    """Check that a run does not go on with other objectives, neither in its folder nor from a checkpoint."""
    begun(record, before)
    with pytest.raises(DataError, match="another objectives"):
        record.check(record.recipe(after), step=1)
    assert changed_settings(before.plain(), after.plain()) == ["objectives differs"]


#: The usual layout with its blocks in another order.
TURNED = rule(layout=Layout(dict(reversed(LAYOUT.blocks))), objectives=USUAL.objectives)


@pytest.mark.parametrize(("name", "other"), [*OTHERS.items(), ("layout", TURNED)])
def test_another_rule_does_not_go_on_in_a_folder(record, name, other):
    begun(record, USUAL)
    with pytest.raises(DataError, match=rf"was trained with another .*{name}"):
        record.check(record.recipe(other), step=1)


@pytest.mark.parametrize("as_array", [np.array, torch.tensor])
def test_a_run_with_an_array_among_the_options_of_a_reward_goes_on_with_the_same_array_alone(record, as_array):
    def with_levels(numbers):
        return rule(objectives=[Objective(length, pays="answer", options={"levels": as_array(numbers)})])

    zeros, other = [with_levels([0.0] * 1000 + [number] + [0.0] * 999) for number in (0.0, 1.0)]
    assert_another_rule(record, zeros, other)


def judged(model="m", reward="judge", **options):
    return rule(objectives=[Objective(reward, pays="answer", options={"model": model, **options})])


def test_a_run_whose_judge_moved_to_another_server_goes_on_and_one_with_another_judge_does_not(record):
    before, moved = judged(base_url="http://a/v1"), judged(base_url="http://b/v1", timeout=9.0, retries=0, cache="verdicts")
    assert_another_rule(record, before, judged("n", base_url="http://a/v1"))
    record.check(record.recipe(moved), step=1)
    assert changed_settings(before.plain(), moved.plain()) == []


def test_a_number_of_workers_that_was_not_set_before_changes_no_rule():
    unset, two = (rule(objectives=[Objective("correct", pays="answer", options=x)]) for x in ({}, {"workers": 2}))
    assert changed_settings(unset.plain(), two.plain()) == []


def test_an_option_of_a_scripts_own_function_may_decide_its_reward(record):
    def of_cache(completions, model, cache, **_):
        return [float(cache == model)] * len(completions)

    assert_another_rule(record, *(judged(reward=of_cache, cache=name) for name in "ab"))


@pytest.mark.parametrize("name", ["recipe.yaml", "rollouts/mine.parquet", "report.html"])
def test_files_that_no_run_wrote_are_left_alone(tmp_path, record, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(DataError, match=rf"holds {name.partition('/')[0]}"):
        record.check(record.recipe(USUAL), step=0)


def test_settings_that_changed():
    assert changed_settings({"seed": 0, "steps": 5}, {"seed": 1, "steps": 9}) == ["seed was 0 and is 1 now"]
    # A stage that the rule no longer has is a setting, too.
    assert changed_settings({"refine": "oar", "values": None}, {}) == ["refine was 'oar' and is None now"]
    # The order of blocks is a setting.
    assert len(changed_settings({"layout": {"a": ["a"], "b": ["b"]}}, {"layout": {"b": ["b"], "a": ["a"]}})) == 1


def test_the_mean_of_a_reward_leaves_absent_numbers_out():
    means = reward_means(torch.tensor([[1.0, -0.5], [0.0, torch.nan]]), ("correct", "brier"))
    assert means == {"rewards/correct/mean": 0.5, "rewards/brier/mean": -0.5}


def test_rows_become_columns_with_dotted_names():
    gold = {"answer": "4", 7: {1: "a"}}
    columns = columns_of([{"gold": gold}, {"level": 2}])
    mappings = {"gold": [gold, None], "gold.7": [{1: "a"}, None]}
    assert columns == {**mappings, "gold.answer": ["4", None], "gold.7.1": ["a", None], "level": [None, 2]}


def test_a_folder_that_another_process_writes_is_refused_by_the_name_of_its_option(tmp_path, record):
    with sole_writer(tmp_path), pytest.raises(DataError, match=r"give another folder\."), record.running():
        pass


def test_a_time_that_no_trainer_measured_is_not_called_zero(record):
    with record.running():
        record._recipe = record.recipe(USUAL)
    summary = json.loads((record.folder.path / "summary.json").read_text())
    assert summary["seconds"] > 0
    assert not {"spanwise_seconds", "spanwise_share"} & summary.keys()
