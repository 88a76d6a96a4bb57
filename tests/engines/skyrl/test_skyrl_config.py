"""The entrypoint's configuration: what is refused before anything starts, and what fits."""

import sys
import warnings

import cloudpickle
import pytest
import skyrl_small as small
from skyrl.train.entrypoints import main_base

from spanwise.engines.skyrl import main
from spanwise.engines.skyrl.config import REDUCTIONS, SpanwiseTrainConfig, check, critic_of
from spanwise.engines.skyrl.trainer import SpanRayPPOTrainer
from spanwise.errors import RecipeError

ALGORITHM = "trainer.algorithm."
GAE = "layout: {turn: []}\nmethod: gae\nobjectives: [{reward: environment, pays: turn}]\n"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"advantage_estimator": "grop"}, "There is no trainer.algorithm.advantage_estimator 'grop'. Did you mean 'grpo'"),
        ({"advantage_batch_normalize": True}, "including padding and other blocks"),
        ({"use_kl_in_reward": True}, "use_kl_loss=true"),
        ({"loss_reduction": "mean"}, "There is no trainer.algorithm.loss_reduction 'mean'"),
        ({"policy_loss_type": "cross_entropy"}, "without advantages"),
        ({"spanwise.recipe": None}, r"add trainer\.algorithm\.spanwise\.recipe="),
    ],
)
def test_options_that_would_change_the_credit(data, change, sentence):
    cfg = small.config(data, recipe=small.BROADCAST, **{ALGORITHM + name: value for name, value in change.items()})
    with pytest.raises(RecipeError, match=sentence):
        check(cfg)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_of_rows_fits(data, name):
    assert check(small.config(data, recipe=small.BROADCAST, **{ALGORITHM + "loss_reduction": name})).scheme.method == "rloo"


def test_the_reduction_that_drops_rows_fits_where_it_drops_none(data):
    legacy = {ALGORITHM + "loss_reduction": "token_mean_legacy", "trainer.micro_train_batch_size_per_gpu": 5}
    with pytest.raises(RecipeError, match=r"48 rows of a mini-batch do not divide into micro-batches of 5\. Use token_mean"):
        check(small.config(data, recipe=small.BROADCAST, **legacy))


def test_skyrls_estimator_gives_way_to_the_recipes_method_and_that_is_said(data):
    cfg = small.config(data, recipe=small.BROADCAST, **{ALGORITHM + "advantage_estimator": "grpo"})
    with pytest.warns(UserWarning, match="advantage_estimator=grpo is not used: method 'rloo' of the recipe replaces it"):
        check(cfg)
    assert cfg.trainer.algorithm.advantage_estimator == "spanwise"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(small.config(data, recipe=small.BROADCAST, **{ALGORITHM + "advantage_estimator": "rloo"}))


def test_discounts_and_deviation_of_skyrls_configuration(data):
    critic = {"trainer.critic.model.path": "some"}
    discounts = {ALGORITHM + "gamma": 0.9, ALGORITHM + "lambd": 0.8}
    with pytest.warns(
        UserWarning, match=r"trainer\.algorithm\.(gamma|lambd)=0\..* is taken as the recipe's option (gamma|lam)\."
    ):
        scheme = check(small.config(data, recipe=GAE, **critic, **discounts)).scheme
    assert {name: scheme.options[name] for name in ("gamma", "lam")} == {"gamma": 0.9, "lam": 0.8}
    with pytest.raises(
        RecipeError, match=r"trainer\.algorithm\.lambd is 0\.8, but the recipe has lam: 0\.7\. Remove one of the two"
    ):
        check(small.config(data, recipe=GAE + "options: {lam: 0.7}", **critic, **discounts))
    with pytest.warns(
        UserWarning, match="lambd=0.8 changes nothing: method 'rloo' does not discount, as SkyRL's grpo does not"
    ):
        check(small.config(data, recipe=small.BROADCAST, **{ALGORITHM + "lambd": 0.8}))
    plain = {ALGORITHM + "grpo_norm_by_std": False}
    check(small.config(data, recipe=small.BROADCAST, **plain))
    with pytest.raises(RecipeError, match="grpo_norm_by_std is False, but method 'grpo' of the recipe divides"):
        check(small.config(data, recipe=small.BROADCAST.replace("rloo", "grpo"), **plain))


def test_a_reward_that_loads_a_model_is_refused(data):
    recipe = (
        "{layout: {all: [answer]}, method: bae, objectives: [{reward: reward_model, pays: [all], options: {model: some}}]}"
    )
    with pytest.raises(RecipeError, match="'reward_model' loads a reward model, and the reward workers of SkyRL"):
        check(small.config(data, recipe=recipe))


@pytest.mark.parametrize("method", ["gae", "sae"])
def test_a_critic_is_there_where_it_is_asked_and_only_there(data, method):
    critic, recipe = {"trainer.critic.model.path": "some"}, GAE.replace("gae", method)
    with pytest.raises(RecipeError, match=r"needs the values of SkyRL's critic: add trainer\.critic\.model\.path=MODEL"):
        check(small.config(data, recipe=recipe))
    assert check(small.config(data, recipe=recipe, **critic)).scheme.method == method
    with pytest.raises(RecipeError, match=r"asks for a critic, but method .* reads no values"):
        check(small.config(data, recipe=small.BROADCAST, **critic))


@pytest.mark.parametrize("method", ["gae", "sae", "reinforce++"])
def test_methods_over_tokens_need_a_rollout_in_one_row(data, method):
    critic = {} if method == "reinforce++" else {"trainer.critic.model.path": "some"}
    recipe = GAE.replace("gae", method)
    with pytest.raises(RecipeError, match=r"every row is one turn\. Set generator\.merge_stepwise_output=true"):
        check(small.config(data, recipe=recipe, layout="stepwise", **critic))
    for layout in ("flat", "merged"):
        assert check(small.config(data, recipe=recipe, layout=layout, **critic)).scheme.method == method


BLOCKS = (
    "layout: {solution: [answer], confidence: [confidence]}\nmethod: gae\nobjectives:\n"
    "  - {reward: correct, pays: [solution]}\n  - {reward: brier, pays: [confidence], if_missing: -1.0}\n"
)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        (BLOCKS, r"\(correct, brier\), and SkyRL's critic gives one per token; write values: shared"),
        (GAE + "critic: {head: hl_gauss}", "returns one number. Leave head out"),
        (GAE + "critic: {truncated: bootstrap}", "'bootstrap', but SkyRL stores no value after the last token"),
    ],
)
def test_what_skyrls_critic_cannot_do(data, recipe, sentence):
    critic = {"trainer.critic.model.path": "some"}
    with pytest.raises(RecipeError, match=sentence):
        check(small.config(data, recipe=recipe, **critic))
    assert check(small.config(data, recipe=BLOCKS + "values: shared", **critic)).scheme.value_names == ("return",)


def test_what_nothing_reads_is_said(data):
    recipe = GAE + "steps: 9\ncritic: {learning_rate: 1.0e-3, gae_lambda_value: 0.9, policy_training_start_step: 2}"
    cfg = small.config(data, recipe=recipe, **{"trainer.critic.model.path": "some"})
    with pytest.warns(UserWarning, match=r"also sets critic\.learning_rate, steps, but SkyRL's own configuration decides"):
        recipe_of_cfg = check(cfg).recipe
    assert critic_of(recipe_of_cfg).gae_lambda_value == 0.9
    with pytest.raises(RecipeError, match="has a critic section, but method 'rloo' reads no values"):
        check(small.config(data, recipe=small.BROADCAST + "critic: {gae_lambda_value: 0.9}"))


def test_the_configuration_travels_to_the_task_that_trains(data):
    cfg = small.config(data, recipe=small.BROADCAST)
    there = cloudpickle.loads(cloudpickle.dumps(cfg))
    assert there.trainer.algorithm.spanwise.recipe == cfg.trainer.algorithm.spanwise.recipe
    assert check(there).scheme.method == "rloo"


def arguments(data, tmp_path, **changes):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(small.BROADCAST)
    given = {
        "trainer.override_entrypoint": "spanwise.engines.skyrl.main",
        "trainer.algorithm.spanwise.recipe": recipe.name,
        "trainer.policy.model.path": "some",
        "data.train_data": f"['{data}']",
        "trainer.logger": "console",
        "trainer.placement.policy_num_gpus_per_node": 1,
        "generator.inference_engine.num_engines": 1,
        **changes,
    }
    return [f"{name}={value}" for name, value in given.items()]


@pytest.mark.parametrize("command", [main_base, main])
def test_both_commands_come_here(data, tmp_path, monkeypatch, command):
    """SkyRL's own command up to where it asks for GPUs; ours reads every argument, the first one too."""
    started = []
    monkeypatch.setattr(main, "initialize_ray", started.append)
    monkeypatch.setattr(main.ray, "get", lambda task: None)
    monkeypatch.setattr(main._run, "remote", lambda cfg: started.append(cfg))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["main", *arguments(data, tmp_path)[command is main :]])
    command.main()
    assert [type(cfg) for cfg in started] == [SpanwiseTrainConfig] * 2
    assert started[0].trainer.algorithm.advantage_estimator == "spanwise"
    assert [cfg.trainer.algorithm.spanwise.recipe for cfg in started] == [str(tmp_path / "recipe.yaml")] * 2


def test_it_is_refused_before_ray_starts(data, tmp_path, monkeypatch):
    monkeypatch.setattr(main, "initialize_ray", lambda cfg: pytest.fail("too late"))
    monkeypatch.chdir(tmp_path)
    bad = arguments(data, tmp_path, **{"trainer.algorithm.use_kl_in_reward": "true"})
    monkeypatch.setattr(sys, "argv", ["main_base", *bad])
    with pytest.raises(RecipeError, match="use_kl_loss=true"):
        main_base.main()


def test_the_experiment_makes_our_trainer(data):
    made = small.trainer(small.config(data, recipe=small.BROADCAST))
    parts = {name: getattr(made, name) for name in ("cfg", "tracker", "tokenizer", "train_dataset", "generator")}
    parts |= dict.fromkeys(("eval_dataset", "inference_engine_client", "colocate_pg"))
    exp = object.__new__(main.SpanPPOExp)
    exp.cfg = made.cfg
    assert isinstance(exp.get_trainer(**parts), SpanRayPPOTrainer)
