"""Recipes: presets, round trips, and one sentence for everything that cannot work."""

import pytest
import yaml

from spanwise import Layout, RecipeError
from spanwise.credit import METHODS, grpo, rlcr
from spanwise.recipe import answer_layout, load, resolved, scheme_of
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
