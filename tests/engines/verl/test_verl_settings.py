"""What verl's configuration must be: every refusal is of an option of verl's, and names what to write."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from settings_small import check, scripts
from verl_small import RECIPE, V0, config_of

from spanwise.engines.verl.settings import prepare
from spanwise.errors import RecipeError

ACTOR = "actor_rollout_ref.actor."
LOSS = f"{ACTOR}policy_loss.loss_mode="
REFUSED = {
    "algorithm.use_kl_in_reward=True": "is True. .*actor.use_kl_loss=True.*Leave .* at False",
    "critic.enable=True": "critic.enable asks for a critic, but .* needs no critic",
    "algorithm.use_pf_ppo=True": "only if adv_estimator is gae",
    "reward.custom_reward_function.path=mine.py": r"No objective uses .* mine.py\. Add \{reward: environment",
    "reward.reward_manager.name=dapo": r"No objective uses .* dapo\. Add \{reward: environment",
    "reward.reward_model.enable=True": "only to reward.custom_reward_function",
    **{f"{LOSS}{mode}": f"'{mode}', a token's weight depends on" for mode in ("geo_mean", "clip_cov", "kl_cov", "dro")},
    f"{LOSS}sapo": "Use actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm": "loss_scale_factor to the length",
    f"{ACTOR}loss_agg_mode=mean": "no loss_agg_mode",
}
OWN = "+algorithm.spanwise."
#: spanwise's own options, with what stands beside them.
REFUSED_OF_OURS = {
    "algorithm.spanwise.recipe=null": r"add \+algorithm\.spanwise\.recipe=",
    f"{OWN}keep_rollouts=1": r"need a folder; add \+algorithm\.spanwise\.folder=runs/NAME",
    f"{OWN}report=true": "need a folder|not installed",
    f"{OWN}folder=run {OWN}keep_rollout=1": r"no option .*\.keep_rollout\. Use recipe, folder, keep_rollouts, report",
    f"{OWN}options.ddof=0": "Write the options in the recipe",
    f"{OWN}folder=run trainer.val_only=True": "trains nothing",
    f"{OWN}folder=run trainer.rollout_data_dir=run/rollouts": "writes its own rollouts",
}


@pytest.mark.parametrize(("overrides", "sentence"), [*REFUSED.items(), *REFUSED_OF_OURS.items()])
def test_refused(tmp_path, monkeypatch, overrides, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=sentence):
        prepare(config_of(tmp_path, *overrides.split()))
    assert not Path("run").exists()


@pytest.mark.parametrize("more", ["data.train_batch_size=8", f"{LOSS}sapo"])
def test_token_mean_gives_way_where_it_cannot_be_undone_and_the_critic_keeps_it(tmp_path, more):
    mode = f"{ACTOR}loss_agg_mode=token-mean"
    config = config_of(tmp_path, mode)
    assert prepare(config).reduction["mode"] == config.actor_rollout_ref.actor.loss_agg_mode == "token-mean"
    config = config_of(tmp_path, mode, more, f"{ACTOR}use_kl_loss=True")
    with pytest.warns(UserWarning, match="from token-mean to seq-mean-token-mean.* KL and entropy"):
        assert prepare(config).reduction["mode"] == config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"
    assert config.critic.loss_agg_mode == "token-mean"


def test_groups_are_dropped_by_a_number_that_there_is(tmp_path):
    on = "algorithm.filter_groups.enable=True"

    def metric(name):
        config = config_of(tmp_path, on, f"algorithm.filter_groups.metric={name}")
        prepare(config)
        return config.algorithm.filter_groups.metric

    with pytest.warns(UserWarning, match="metric from acc to any_reward"):
        assert metric("acc") == "any_reward"
    for name in ("reward", "brier"):
        with pytest.warns(UserWarning, match=f"metric={name} drops .* any_reward, which keeps such groups"):
            assert metric(name) == name
    assert metric("any_reward") == "any_reward"
    with pytest.warns(UserWarning, match="V0 trainer does not read algorithm.filter_groups"):
        prepare(config_of(tmp_path, on, "algorithm.filter_groups.metric=acc", *V0))


def test_verls_discounts_are_the_recipes_where_the_method_has_them(tmp_path):
    critic = ["critic.enable=True", "critic.model.path=x", "algorithm.lam=0.9", "algorithm.gamma=0.8"]
    with pytest.warns(UserWarning, match="lam=0.9 sets"):
        scheme = prepare(config_of(tmp_path, *critic, recipe=GAE.format("gae", "a", "options: {gamma: 0.8}\n"))).scheme
    assert scheme.options == {"lam": 0.9, "gamma": 0.8}
    with pytest.warns(UserWarning, match="lam=0.9 has no effect, as neither method 'bae'"):
        prepare(config_of(tmp_path, "algorithm.lam=0.9"))


def test_most_of_the_settings_of_verls_example_scripts_are_taken(tmp_path):
    refused = list(filter(None, (check(tmp_path, settings) for settings in scripts().values())))
    assert len(scripts()) == 110
    assert len(refused) <= 10, refused


GAE = "method: {}\nlayout: {{a: [answer], b: [confidence]}}\nobjectives:\n- {{reward: correct, pays: [{}]}}\n{}"
ON, ROWS = "critic.enable=True", f"{ACTOR}loss_agg_mode=seq-mean-token-mean"
CORRECTION = "algorithm.rollout_correction."
REJECTION = [f"{CORRECTION}bypass_mode=True", f"{CORRECTION}rollout_rs=token_k1"]
WAITS, MODEL = "critic: {policy_training_start_step: 20}\n", "reward: reward_model, options: {model: some}"
POOL, PAID = "reward.reward_model.enable_resource_pool", "- {reward: environment, pays: [b]}\n"
VERLS_MODEL = ["reward.reward_model.enable=True", "reward.custom_reward_function.path=mine.py"]
FUNCTION, BY_TURN = VERLS_MODEL[1:], "- {{reward: environment, scope: turn, pays: [b]{}}}\n"
TOOL, UNSCALED = ", options: {column: tool}", ["algorithm.norm_adv_by_std_in_grpo=False"]
MINE = "- {{reward: environment, name: mine, pays: [b], options: {{column: {}}}}}\n"
#: The method, more of the recipe, overrides, and the answer; None: it runs.
WITH_RECIPE = {
    "no critic": ("gae", "", [], "'gae' needs .*critic.enable=True"),
    # The same file as in TRL: 20 steps of the critic alone are those before verl's step 21.
    "the policy waits": ("gae", WAITS, [ON, "trainer.critic_warmup=21"], None),
    "the policy waits too short": ("gae", WAITS, [ON, "trainer.critic_warmup=20"], "Set trainer.critic_warmup to 21"),
    "no deviation, bae": ("bae", "", UNSCALED, None),
    "no deviation, grpo": ("grpo", "", UNSCALED, "replace the method by dr_grpo if it is grpo or dcpo"),
    "rejection inside the loss": ("bae", "", REJECTION, None),
    "rejection of rows' tokens": ("bae", "", [*REJECTION, ROWS], "rollout_rs"),
    # A function or a manager knows a whole rollout; each turn's number can only come from an agent loop.
    "one number for turns": ("bae", BY_TURN.format(""), FUNCTION, r"'environment' has scope: turn, but .* whole rollout"),
    "a manager's for turns": ("bae", BY_TURN.format(""), ["reward.reward_manager.name=dapo"], "has scope: turn, but"),
    "a result for turns": ("bae", BY_TURN.format(TOOL), FUNCTION, "has scope: turn, but"),
    # An agent loop may give an output per turn, and the function's number pays the last. One output of several turns is
    # refused in the worker.
    "one number for outputs, gigpo": ("gigpo", "- {reward: environment, pays: [a]}\n", FUNCTION, None),
    "an agent loop's for turns": ("bae", BY_TURN.format(""), [], None),
    "an agent loop's beside a function's": ("bae", PAID + BY_TURN.format(f", name: tool{TOOL}"), FUNCTION, None),
    # The function's `answer` would stand in the place of the dataset's, with which `correct` compares.
    "a result 'answer'": (
        "bae",
        MINE.format("answer"),
        FUNCTION,
        "'correct' reads .* 'answer', .* Rename the function's result",
    ),
    "a result 'mine'": ("bae", MINE.format("mine"), FUNCTION, None),
    # verl's validation counts a missing `acc` as 0; V0's does not.
    "a name for accuracy": ("bae", "- {reward: brier, name: acc, pays: [b]}\n", [], "of 'acc' as 0"),
    "a name for accuracy, V0": ("bae", "- {reward: brier, name: acc, pays: [b]}\n", [*V0], None),
    # verl's validation appends its total and the values of an objective `reward` to one list.
    "its name": ("bae", "- {reward: brier, name: reward, pays: [b]}\n", [], "'reward', .* another name"),
    "a reward model of verl's": ("bae", PAID, [*VERLS_MODEL, f"{POOL}=True"], None),
    # V1 then scores batches that have no columns but the messages; a function in verl's signature needs more.
    "a reward model that shares": ("bae", PAID, [*VERLS_MODEL, f"{POOL}=False"], f"Set {POOL}=True"),
    "a reward model that shares, V0": ("bae", PAID, [*VERLS_MODEL, f"{POOL}=False", *V0], None),
    "a reward model": ("bae", f"- {{{MODEL}, pays: [a]}}\n", [], "'reward_model' loads a reward model"),
}


@pytest.mark.parametrize("case", WITH_RECIPE)
def test_a_recipe_and_the_settings_beside_it(tmp_path, case):
    method, more, overrides, sentence = WITH_RECIPE[case]
    config = config_of(tmp_path, *overrides, recipe=GAE.format(method, "a, b" if method == "grpo" else "a", more))
    with nullcontext() if sentence is None else pytest.raises(RecipeError, match=sentence):
        prepare(config)


@pytest.mark.parametrize(("method", "more", "on"), [("gae", WAITS, True), ("gae", "", True), ("bae", "", False)])
def test_a_run_that_ends_before_the_policy_trains_is_warned_of(tmp_path, method, more, on):
    """verl's first update of the policy is in step 21, with or without a critic."""
    config = config_of(tmp_path, f"critic.enable={on}", "trainer.critic_warmup=21", recipe=GAE.format(method, "a", more))
    run = prepare(config)
    with pytest.warns(UserWarning, match="step 21.* has 20"), run.training(SimpleNamespace(total_training_steps=20)):
        pass
    with run.training(SimpleNamespace(total_training_steps=21)):  # warnings are errors here
        pass
    config.trainer.val_only = True
    with run.training(SimpleNamespace(total_training_steps=20)):
        pass


def test_what_is_set(tmp_path, capsys):
    config = config_of(tmp_path)
    settings = prepare(config)
    manager = config.reward.reward_manager
    expected = ("importlib", "pkg://spanwise.engines.verl.reward", "SpanRewardManager")
    assert (manager.source, manager.module.path, manager.name) == expected
    assert settings.reduction["mini_batch"] == 2 * 4
    assert settings.scheme.names == ("correct", "brier")
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"
    assert settings.parts == {}
    assert settings.record is None
    assert "spanwise" not in capsys.readouterr().err
    prepare(config)  # its own settings are not refused


IDLE = GAE.format("gae", "a", "critic: {learning_rate: 0.1, gae_lambda_value: 1.0}\nsteps: 50\n")
SAID = {
    "recipe": (ON, IDLE, "ignores the recipe's critic.learning_rate, steps and uses"),
    "alone": ("actor_rollout_ref.rollout.n=1", RECIPE, "a prompt has no two completions to compare"),
    "entropy": (f"{ACTOR}entropy_coeff=0.01", RECIPE, "both weigh more in longer"),
    "dppo": (f"{LOSS}dppo_tv", RECIPE, "instead of 3, that of PPO"),
}


@pytest.mark.parametrize("case", SAID)
def test_what_is_said(tmp_path, capsys, case):
    override, recipe, sentence = SAID[case]
    with pytest.warns(UserWarning, match=sentence):
        prepare(config_of(tmp_path, override, recipe=recipe))
    assert sentence in capsys.readouterr().err  # Ray's workers may have their warnings filtered


@pytest.mark.parametrize(("method", "enabled"), [("gae", True), ("bae", False)])
def test_nothing_is_said_of_one_rollout_beside_a_critic_or_a_mean_of_the_batch_and_of_dppos_own_cut(
    tmp_path, capsys, method, enabled
):
    recipe = GAE.format(method, "a", "").replace("pays: [a]", "pays: [a]" if enabled else "pays: [a], baseline: batch")
    dppo = f"{LOSS}dppo_tv", f"{ACTOR}clip_ratio_c=20"
    prepare(config_of(tmp_path, f"critic.enable={enabled}", "actor_rollout_ref.rollout.n=1", *dppo, recipe=recipe))
    assert "spanwise" not in capsys.readouterr().err  # and warnings are errors here


def test_the_page_names_everything_that_is_refused():
    page = (Path(__file__).parents[3] / "docs" / "verl.md").read_text(encoding="utf-8")
    for override in REFUSED:
        option, value = override.split("=")
        assert option.rsplit(".", 1)[-1] in page or option.rsplit(".", 2)[-2] in page, option
        assert value in ("True", "False", "0.9", "mine.py", "dapo", "mean") or f"`{value}`" in page, value
