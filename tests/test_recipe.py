"""Recipes: presets, round trips, and one sentence for everything that cannot work."""

from dataclasses import replace

import pytest
import yaml

from spanwise import Layout, RecipeError
from spanwise.credit import METHODS, grpo, rlcr
from spanwise.recipe import answer_layout, load, recorded_elsewhere, resolved, scheme_of
from spanwise.tasks import task_shape

LAYOUT = Layout({"solution": ["reasoning", "answer"], "confidence": ["analysis", "confidence"]})


def filled(**fields):
    return scheme_of(load(None, fields), LAYOUT, 32)


def written_out(folder, recipe):
    settings = resolved(recipe, scheme_of(recipe, LAYOUT, 32))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder / "recipe.yaml"


def test_what_presets_pay():
    scheme = filled(method="rlcr", calibration="log_score")
    assert scheme.entry.estimator is rlcr
    assert [o.pays for o in scheme.objectives] == [LAYOUT.names, LAYOUT.names[::-1], LAYOUT.names]
    assert scheme.objectives[1].if_missing == pytest.approx(-4.60517, abs=1e-5)  # log .01, the worst a clipped score can be
    formed = scheme.objectives[2]
    assert (formed.reward, formed.weight, formed.if_missing, formed.baseline) == ("format", 0.25, 0.0, None)
    bare = filled(method="rlcr_paper", calibration="log_score")
    assert (bare.entry.estimator, bare.objectives) == (rlcr, scheme.objectives[:2])
    # GRPO sees one block, and Dr. GRPO divides by the length.
    scheme = filled(method="grpo")
    assert (scheme.layout.names, scheme.per, scheme.entry.estimator) == (("completion",), "completion", grpo)
    assert filled(method="dr_grpo").per == 32
    attempts = Layout({"first": ["reasoning", "answer"], "second": ["reasoning", "answer"]})
    correct, second, *formats = scheme_of(load(None, {}), attempts, 64).objectives
    assert [(o.name, o.pays) for o in formats] == [("first_format", ("first",)), ("second_format", ("second",))]
    assert (correct.pays, second.pays, second.reward) == (("first",), ("second",), "second_attempt")
    assert second.options == {"first": "first"}


@pytest.mark.parametrize("name", sorted(name for name, entry in METHODS.items() if entry.preset))
def test_a_resolved_recipe_says_everything(name, tmp_path):
    method = METHODS[name]
    baseline = {"baseline": "blended"} if "baseline" in method.inputs else {}
    options = {"min_stratum": 3} if "min_stratum" in {*method.options} - {*method.only_with} else {}
    recipe = load(None, {"method": name, "steps": 7, "options": options, **baseline})
    reloaded = load(written_out(tmp_path, recipe))
    assert reloaded.steps == 7
    assert scheme_of(reloaded, LAYOUT, 32) == scheme_of(recipe, LAYOUT, 32)


def test_the_least_and_the_most_of_every_setting_are_allowed_and_nothing_beyond():
    one = ("steps", "prompts", "mini_batches", "micro_batch", "eval_prompts", "eval_samples", "threads", "fields", "most")
    zero = ("warmup_steps", "entropy", "entropy_target", "eval_every", "save_every", "keep_rollouts")
    least = {**dict.fromkeys(one, 1), **dict.fromkeys(zero, 0), "group_size": 2, "max_completion_length": 2}
    least |= {"temperature": 0.01, "start_steps": 1}
    most = {"fields": 16, "learning_rate": 1, "clip": 1, "entropy": 10, "temperature": 100}
    for settings, step in ((least, -1), (most, 1)):
        assert load(None, {**settings, "task": "fields"}).model_dump(include={*settings}) == settings
        for name, number in settings.items():
            with pytest.raises(RecipeError, match=f"^{name} is"):
                load(None, {"task": "fields", name: number + step})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"baseline": "blended"}, ["baseline: blended would not have its full effect", "--set objectives=null"]),
        ({"calibration": "log_score"}, ["calibration: log_score would not have its full effect"]),
        ({"method": "rlcr"}, ["The recipe sets objectives and per, so method: rlcr", "--set per=null"]),
    ],
)
def test_a_preset_that_is_written_out_is_not_changed_in_vain(overrides, words, tmp_path):
    path = written_out(tmp_path, load(None, {"baseline": "outcome"}))
    with pytest.raises(RecipeError) as error:
        load(path, overrides)
    assert all(word in str(error.value) for word in words), error.value
    load(path, {"method": "bae"})  # what it says already
    scheme = scheme_of(load(path, {**overrides, "objectives": None, "per": None}), LAYOUT, 32)
    assert scheme == filled(**overrides)


def test_a_model_by_name_means_the_real_task_and_not_the_toys_learning_rate(tmp_path):
    names = {"model": "m", "dataset": "d"}
    assert load(None, names).task == "confidence"
    assert (load(None, names).learning_rate, load(None).learning_rate) == (1e-6, 4e-4)
    assert load(None, {**names, "learning_rate": 3e-6}).learning_rate == 3e-6
    path = tmp_path / "recipe.yaml"
    path.write_text("task: confidence\nmodel: m\ndataset: d\nlearning_rate: 2.0e-6\n")
    assert (load(path).learning_rate, load(path).eval_prompts) == (2e-6, 100)
    recipe = load(path, {"steps": 9, "learning_rate": 3e-6, "entropy_target": None})  # the command line wins over the file
    assert (recipe.steps, recipe.learning_rate, recipe.entropy_target, recipe.model) == (9, 3e-6, None, "m")


TAGGED, OWN = dict(LAYOUT.blocks), {"s": ["think", "answer"], "c": ["confidence"]}


@pytest.mark.parametrize(
    ("fields", "blocks", "prefilled"),
    [
        ({}, TAGGED, None),
        ({"prefilled": "reasoning"}, TAGGED, "reasoning"),
        ({"layout": {"all": []}}, TAGGED, None),
        ({"layout": {"all": ["reasoning", "answer", "analysis", "confidence"]}}, TAGGED, None),
        ({"layout": OWN}, OWN, None),
        ({"model": "m", "dataset": "d", "layout": {"walk": []}}, {"walk": []}, None),
        ({"model": "m", "dataset": "d", "method": "grpo"}, TAGGED, None),
    ],
)
def test_completions_are_read_by_the_recipes_blocks(fields, blocks, prefilled):
    assert answer_layout(load(None, fields), LAYOUT) == Layout(blocks, prefilled=prefilled)


def test_what_values_are_of_is_read_and_written():
    apart = [{"reward": "correct", "pays": "solution"}, {"reward": "brier", "pays": "confidence", "given": "correct"}]
    left_open = load(None, {"method": "sae", "objectives": apart, "options": {"gae_lambda_policy": 0.9}})
    scheme = scheme_of(left_open, LAYOUT, 32)
    assert scheme.value_names == ("correct", "brier")
    assert resolved(left_open, scheme)["values"] is None
    shared = load(None, {**left_open.model_dump(), "values": "shared"})
    scheme = scheme_of(shared, LAYOUT, 32)
    written = resolved(shared, scheme)
    assert (written["values"], written["options"], scheme.value_names) == ("shared", {"lam": 0.9}, ("return",))
    assert filled(**written) == scheme


def test_limits_of_comparing_answers_reach_every_objective_that_compares():
    scheme = filled(verifier={"workers": 3, "deadline": 1.5})
    assert scheme.objectives[0].options == {"workers": 3, "deadline": 1.5}
    assert "workers" not in scheme.objectives[1].options
    objective = {"reward": "correct", "pays": "solution", "options": {"deadline": 9.0}}
    (mixed,) = filled(verifier={"workers": 3, "deadline": 1.5}, objectives=[objective]).objectives
    assert mixed.options == {"workers": 3, "deadline": 9.0}
    reloaded = filled(**resolved(load(None, {"verifier": {"workers": 2}}), scheme))
    assert reloaded.objectives[0].options["workers"] == 3  # as written out, which goes before


def test_what_is_read_off_a_recipe():
    for fields, most in (({}, 3), ({"most": 5}, 5), ({"most": 16}, 16)):  # repeated blocks: the recipe's or else the task's
        recipe = load(None, {"task": "invoices", **fields})
        assert scheme_of(recipe, *task_shape(recipe)).layout.most == most
    assert load(None, {"objectives": [{"reward": "log_score", "pays": "a"}]}).rule == "log_score"
    tagged = load(None, {"objectives": [{"reward": "correct", "pays": "a", "options": {"tag": "x"}}]})
    assert tagged.answer_tags == {"answer": "x", "confidence": "confidence"}
    assert [mode.name for mode in load(None, {"laser": {"token": "<unk>"}}).scheme_modes] == ["laser"]


PLAIN = Layout({"solution": ["answer"], "confidence": ["confidence"]})
CONSTANT, TIDY = f"{__name__}:constant", f"{__name__}:tidy"


def constant(text, *, columns):
    return [1] * len(text)


def tidy(blocks, block=""):
    return [1.0 for _ in blocks]


def with_report(**report):
    entries = [{"reward": "correct", "pays": "solution"}, {"reward": "brier", "pays": ["confidence"], **report}]
    recipe = load(None, {"objectives": entries})
    return recipe, scheme_of(recipe, PLAIN, 64)


@pytest.mark.parametrize("given", ["correct", ["correct"], ["correct", "complete"], ["complete", CONSTANT, "correct"]])
def test_given_is_read_and_written(given):
    recipe, scheme = with_report(given=given, baseline="outcome")
    assert scheme.objectives[1].given == (("correct",) if given == "correct" else tuple(given))
    written = resolved(recipe, scheme)["objectives"]
    assert written[1]["given"] == ("correct" if given == ["correct"] else given)
    assert scheme_of(load(None, {"objectives": written}), PLAIN, 64).objectives == scheme.objectives


def test_what_is_left_open_stays_open_and_functions_are_written_as_module_and_name():
    recipe, scheme = with_report()
    correct, report = resolved(recipe, scheme)["objectives"]
    assert correct == {"reward": "correct", "pays": ["solution"], "weight": 1.0, "name": "correct"}
    assert {"given", "baseline", "scale", "back_off", "if_missing", "options"}.isdisjoint(report)
    recipe, scheme = with_report(given=["correct", "complete"], baseline="outcome", back_off=False)
    assert resolved(recipe, scheme)["objectives"][1]["back_off"] is False
    recipe, scheme = with_report(reward=TIDY)
    assert scheme.objectives[1].reward is tidy
    report = replace(scheme.objectives[1], given=("correct", constant), baseline="outcome")
    written = resolved(recipe, replace(scheme, objectives=(scheme.objectives[0], report)))["objectives"][1]
    assert (written["reward"], written["given"]) == (TIDY, ["correct", CONSTANT])


def test_a_function_for_each_block_is_imported_unless_its_rewards_are_recorded():
    recipe = load(None, {"objectives": [{"reward": TIDY, "each": "*"}]})
    for recorded, reward in (([], tidy), (["other.solution"], tidy), (["tidy.confidence"], recorded_elsewhere)):
        assert [o.reward for o in scheme_of(recipe, PLAIN, 64, recorded=recorded).objectives] == [reward] * 2


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
    objectives = scheme_of(recipe, PLAIN, 64, recorded=recorded, run_code=False).objectives
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
