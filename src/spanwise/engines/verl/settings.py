"""Check verl's configuration, and set the options that the recipe decides."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict  # pyright: ignore[reportMissingImports]
from verl.utils.config import omega_conf_to_dataclass  # pyright: ignore[reportMissingImports]

from spanwise.engines.rule import idle_fields, read_rule
from spanwise.engines.verl.carry import KEY, MODES, USE
from spanwise.engines.verl.estimators import loss_of
from spanwise.engines.verl.plugin import around, say
from spanwise.engines.verl.run import OPTION, TOKENS, VerlRun
from spanwise.errors import RecipeError, refuse, unknown
from spanwise.mode import added_by, part_class, parts_of
from spanwise.modes.critic.config import CriticConfig, critic_faults
from spanwise.modes.parts import RowPart
from spanwise.recipe import RecipeRule
from spanwise.scheme import Scheme
from spanwise.score.reward import built_in

#: spanwise's reward manager for `reward.reward_manager`: source, module and class.
MANAGER = ("importlib", "pkg://spanwise.engines.verl.reward", "SpanRewardManager")
#: The field of `algorithm.spanwise` for the user's own reward manager.
OWN_MANAGER = "own_manager"
_FILTER = "algorithm.filter_groups"
#: The filter metric that drops a group only if all its rewards are equal.
ANY_REWARD = "any_reward"
#: The options in `algorithm.spanwise` that a user may set.
_KNOWN = ("recipe", "folder", "keep_rollouts", "report")
_ADD = "Add {reward: environment, pays: [...]} to the recipe's objectives, or remove verl's reward function or manager."
#: Maps verl options to pairs: the option's required value, and a sentence that gives the reason.
_FIXED: dict[str, tuple[Any, str]] = {
    "algorithm.use_kl_in_reward": (
        False,
        "verl would add the KL to its reward, which spanwise does not use. Set actor_rollout_ref.actor.use_kl_loss=True.",
    ),
    "algorithm.use_pf_ppo": (False, "verl reads this option only if adv_estimator is gae."),
}


def attach(trainer_class: Any) -> None:
    """Let a verl trainer class train with a recipe if the estimator is `spanwise`. Other runs stay unchanged."""
    trainer_class.spanwise = None  # The `VerlRun`, which computes a recipe's credit; None without a recipe.
    trainer_class.latest = getattr(trainer_class, "latest", None)  # The newest trainer, which functions in `legacy` look up.

    @around(trainer_class, "__init__")
    def create(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        estimator_name = config.algorithm.adv_estimator
        trainer_mode = _trainer_mode(config)
        if estimator_name == "spanwise":
            self.spanwise = prepare(config)
            trainer_class.latest = self
        elif (config.algorithm.get("spanwise") or {}).get("recipe"):
            raise RecipeError(
                f"algorithm.spanwise.recipe only works with algorithm.adv_estimator=spanwise, but yours is '{estimator_name}'. Set "
                f"adv_estimator=spanwise, or remove the recipe."
            )
        elif config.trainer.v1.trainer_mode == f"spanwise_{trainer_mode}":
            raise RecipeError(
                f"trainer.v1.trainer_mode=spanwise_{trainer_mode} needs algorithm.adv_estimator=spanwise, but yours is "
                f"'{estimator_name}'. Use trainer.v1.trainer_mode={trainer_mode}."
            )
        original(self, config, *args, **kwargs)

    @around(trainer_class, "fit")
    def fit(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded_step_count = getattr(self, "global_steps", None)  # verl's V0 trainer sets global_steps inside `fit`
        with nullcontext() if self.spanwise is None else self.spanwise.training(self, done=loaded_step_count):
            return original(self, *args, **kwargs)

    @around(trainer_class, "_save_checkpoint")
    def save_checkpoint(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.spanwise is not None:
            self.spanwise.save_memory(self.global_steps)
        return original(self, *args, **kwargs)

    @around(trainer_class, "_load_checkpoint")
    def load_checkpoint(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        load_result = original(self, *args, **kwargs)
        if self.spanwise is not None:
            self.spanwise.load_memory(self.global_steps)
        return load_result


def prepare(config: Any) -> VerlRun:
    """Load the recipe and refuse verl settings that do not work with it. Set verl's reward manager and loss."""
    rule, discount_notes = _rule_in(config)
    recipe, scheme = rule
    actor_config = config.actor_rollout_ref.actor
    spanwise_section = config.algorithm.spanwise
    critic_settings = recipe.modes.get("critic") or CriticConfig()
    has_critic = config.critic.get("enable")
    critic_option = "critic.enable=True and critic.model.path=MODEL"
    policy_start_step = critic_settings.policy_training_start_step
    critic_warmup = config.trainer.critic_warmup
    refuse(
        {
            **critic_faults(critic_settings, scheme, engine="verl", has_critic=has_critic, option=critic_option),
            f"critic.policy_training_start_step is {policy_start_step} in the recipe, but trainer.critic_warmup is "
            f"{critic_warmup}. Set trainer.critic_warmup to {policy_start_step + 1}, the first step that trains the "
            "policy.": (policy_start_step and critic_warmup != policy_start_step + 1),
        }
    )
    provided_fields = {"group_n", "columns", "steps", *TOKENS}
    if _trainer_mode(config) == "sync":
        provided_fields |= added_by(scheme.modes, "verl")
    # verl's reward workers read completions before the policy computes log-probabilities.
    scheme.check(provided_fields if has_critic else provided_fields - {"value_nt"}, at_read=provided_fields - {*TOKENS})
    scheme.check_loads("verl")
    change_notes = [_replace_loss_mode(config), _replace_filter_metric(config, scheme)]
    refuse(_faults(config, scheme))
    mode_parts = parts_in(config, scheme)
    verl_run = VerlRun(config, scheme, critic=critic_settings, parts=mode_parts)
    with open_dict(config):
        spanwise_section.recipe = str(Path(spanwise_section.recipe).resolve())
        if config.trainer.get("use_v1"):
            config.trainer.v1.trainer_mode = _trainer_mode(config)
        manager_config = config.reward.reward_manager
        if _manager_name(config) is not None:
            spanwise_section[OWN_MANAGER] = OmegaConf.to_container(manager_config)
        manager_config.source, manager_config.module.path, manager_config.name = MANAGER
        for part in mode_parts.values():
            actor_config.policy_loss.loss_mode = loss_of(part.mode, actor_config.policy_loss.get("loss_mode", "vanilla"))
    say(*change_notes, *_remarks(config, scheme, discount_notes))
    return verl_run


def _replace_loss_mode(config: Any) -> str | None:
    """Replace verl's `loss_agg_mode` if spanwise cannot undo its division. Return a sentence on the change, or None."""
    actor_config = config.actor_rollout_ref.actor
    is_batch_split = config.data.train_batch_size > actor_config.ppo_mini_batch_size
    has_several_mini_batches = is_batch_split and _trainer_mode(config) != "separate_async"
    uses_sapo_loss = actor_config.policy_loss.get("loss_mode", "vanilla") == "sapo"
    if actor_config.loss_agg_mode != "token-mean" or not (has_several_mini_batches or uses_sapo_loss):
        return None
    critic_loss_mode = OmegaConf.select(config, "critic.loss_agg_mode")
    with open_dict(config):
        actor_config.loss_agg_mode = MODES[0]
        if critic_loss_mode is not None:  # keep the critic's loss_agg_mode, which by default follows the actor's
            config.critic.loss_agg_mode = critic_loss_mode
    divisor_reason = "With token-mean, each mini-batch would divide its loss by a different number of tokens."
    change_reason = f"With spanwise, the loss 'sapo' needs {MODES[0]}." if uses_sapo_loss else divisor_reason
    kl_note = " The KL and entropy terms change." if actor_config.use_kl_loss or actor_config.entropy_coeff else ""
    return (
        f"spanwise changes loss_agg_mode from token-mean to {MODES[0]}. {change_reason} The policy loss stays the "
        f"same.{kl_note}"
    )


def filter_metric(config: Any) -> str | None:
    """Return the metric by which verl filters groups, or None."""
    filter_section = OmegaConf.select(config, _FILTER) or {}
    return filter_section.get("metric") if filter_section.get("enable") else None


def _replace_filter_metric(config: Any, scheme: Scheme) -> str | None:
    """Replace the metric of verl's group filter if spanwise does not compute it. Return a note for users, or None."""
    metric = filter_metric(config)
    if metric is not None and not config.trainer.get("use_v1"):
        return f"verl's V0 trainer does not read {_FILTER}, so no group is dropped. Set trainer.use_v1=True, or remove the setting."
    if metric is None or metric == ANY_REWARD:
        return None
    if metric == "reward" or metric in scheme.names:
        reward_note = f" verl keeps a group in which a completion lacks '{metric}'." if metric in scheme.names else ""
        return (
            f"{_FILTER}.metric={metric} drops groups whose completions have the same {metric}, although their other "
            f"rewards may differ. Set the metric to {ANY_REWARD}, which keeps such groups.{reward_note}"
        )
    with open_dict(config):
        OmegaConf.update(config, f"{_FILTER}.metric", ANY_REWARD)
    return (
        f"spanwise changes {_FILTER}.metric from {metric} to {ANY_REWARD}, so that verl only drops groups whose rewards "
        "are all equal."
    )


def scheme_in(config: Any) -> Scheme:
    """Load the rule of credit from the recipe that verl's configuration names."""
    return _rule_in(config)[0].scheme


def _rule_in(config: Any) -> tuple[RecipeRule, list[str]]:
    """Load the recipe that verl's configuration names. Also return notes on the discounts in the configuration."""
    recipe_path = (config.algorithm.get("spanwise") or {}).get("recipe")
    return read_rule(
        recipe_path,
        engine="verl",
        longest=config.data.max_response_length,
        get_setting=partial(OmegaConf.select, config),
        faults={"spanwise needs a recipe: add +algorithm.spanwise.recipe=recipe.yaml.": recipe_path is None},
        fixed=_FIXED,
        discounts={"algorithm.gamma": "gamma", "algorithm.lam": "lam"},
        deviation="algorithm.norm_adv_by_std_in_grpo",
    )


def _manager_name(config: Any) -> str | None:
    """Return the name of the user's reward manager. None if it is `SpanRewardManager`."""
    manager_config = config.reward.reward_manager
    return None if (manager_config.source, manager_config.name) == (MANAGER[0], MANAGER[2]) else manager_config.name


def user_chose_reward(config: Any, manager_name: str | None) -> bool:
    """Return whether the user chose a reward function, or a reward manager that is not verl's default."""
    return manager_name not in (None, "naive") or OmegaConf.select(config, "reward.custom_reward_function.path") is not None


def parts_in(config: Any, scheme: Scheme) -> dict[str, RowPart]:
    """Map each mode's name, such as laser, to an object that runs the mode."""
    verl_modes = [mode for mode in scheme.modes if "verl" in mode.parts]
    for mode in verl_modes:
        part_class(mode, "verl").check(mode, "verl", config)
    if not verl_modes:
        return {}
    model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    return parts_of(
        verl_modes,
        "verl",
        model_config.tokenizer,
        size=model_config.hf_config.get_text_config().vocab_size,
        generation=model_config.generation_config,
        temperature=config.actor_rollout_ref.rollout.temperature,
    )


def paid_results(scheme: Scheme) -> set[str]:
    """Return the names of the columns from which objectives with `reward: environment` take their rewards."""
    return {o.options.get("column", "environment") for o in scheme.objectives if o.reward == "environment"}


def _faults(config: Any, scheme: Scheme) -> dict[str, Any]:
    """Return error messages about verl's settings, each with a value that is true if the error applies."""
    manager_name = _manager_name(config)
    function_path = OmegaConf.select(config, "reward.custom_reward_function.path")
    paid_result_names = paid_results(scheme)
    turn_objectives = [o for o in scheme.objectives if o.reward == "environment" and o.scope == "turn"]
    turn_columns = {o.options.get("column", "environment"): o.name for o in turn_objectives}
    objectives_with_columns = [
        (objective, {**entry.options, **objective.options}.get("column"))
        for objective in scheme.objectives
        if objective.reward != "environment" and (entry := built_in(objective)) is not None
    ]
    actor_config = config.actor_rollout_ref.actor
    loss_mode = actor_config.policy_loss.get("loss_mode", "vanilla")
    loss_agg_mode = actor_config.loss_agg_mode
    section = config.algorithm.spanwise
    correction_config = config.algorithm.get("rollout_correction") or {}
    run_folder = section.get("folder")
    dump_folder = config.trainer.get("rollout_data_dir")
    model_config = OmegaConf.select(config, "reward.reward_model") or {}
    return {
        f"{unknown('loss_agg_mode', loss_agg_mode, MODES)} {USE}": loss_agg_mode not in MODES,
        f"loss_agg_mode '{loss_agg_mode}' divides by the width of each micro-batch, but micro-batches differ in width. "
        f"{USE} Or set actor_rollout_ref.actor.loss_scale_factor to the length of the longest response.": (
            loss_agg_mode == "seq-mean-token-sum-norm" and not actor_config.get("loss_scale_factor")
        ),
        f"With policy_loss.loss_mode '{loss_mode}', a token's weight depends on more than its own advantage. Use vanilla, "
        "cispo, gspo or sapo.": loss_mode in ("geo_mean", "clip_cov", "kl_cov", "dro"),
        f"policy_loss.loss_mode 'sapo' always averages like loss_agg_mode seq-mean-token-mean. {USE}": (
            loss_mode == "sapo" and loss_agg_mode != MODES[0]
        ),
        "With rollout_correction.bypass_mode, rollout_rs rejects tokens inside the loss. So the loss divides by fewer "
        "tokens than spanwise counted. Use actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum.": (
            correction_config.get("bypass_mode") and correction_config.get("rollout_rs") and loss_agg_mode == MODES[0]
        ),
        **{
            f"verl's validation has a value of its own called '{name}', and would mix it up with the objective '{name}'. "
            f"Give the objective another name: {{reward: ..., name: NAME}}.": name in scheme.names
            for name in ("reward", KEY)
        },
        **{
            f"Objective '{objective.name}' reads right answers in the column '{column}', but your reward function also returns a "
            f"result '{column}', for another objective. Rename the function's result.": column in paid_result_names
            for objective, column in objectives_with_columns
        },
        "verl's validation counts missing values of 'acc' as 0. Give the objective 'acc' another name: "
        "{reward: ..., name: NAME}.": "acc" in scheme.names and config.trainer.get("use_v1"),
        **{
            f"Objective '{name}' has scope: turn, but your reward function or manager gives one number for a whole "
            f"rollout. Write scope: rollout. Or remove the function or manager, and let your agent loop give each entry of "
            f"'turns' its own '{column}'.": user_chose_reward(config, manager_name)
            # The user's function may reward whole rollouts for one objective while the agent loop rewards turns for another.
            and (column == "environment" or turn_columns.keys() == paid_result_names)
            for column, name in turn_columns.items()
        },
        "algorithm.spanwise.options is for runs without a recipe. Write the options in the recipe.": "options" in section,
        **{
            f"There is no option algorithm.spanwise.{name}. Use {', '.join(_KNOWN)}.": name not in (*_KNOWN, OWN_MANAGER)
            for name in section
        },
        f"trainer.val_only=True trains nothing, so there is no run to write. Remove {OPTION}.": run_folder
        and config.trainer.get("val_only"),
        f"trainer.rollout_data_dir is '{dump_folder}', to which spanwise writes its own rollouts ({OPTION}). Remove "
        f"trainer.rollout_data_dir, or name another folder.": (
            run_folder and dump_folder and Path(dump_folder).resolve() == (Path(str(run_folder)) / "rollouts").resolve()
        ),
        f"No objective uses the reward of reward.reward_manager {manager_name}. {_ADD}": manager_name not in (None, "naive")
        and not paid_result_names,
        f"No objective uses the reward of reward.custom_reward_function {function_path}. {_ADD}": function_path is not None
        and not paid_result_names,
        "reward.reward_model.enable is True, but verl passes its reward model only to reward.custom_reward_function. Set the path "
        "and name of such a function, and add {reward: environment, pays: [...]} to the recipe.": (
            model_config.get("enable") and not (paid_result_names and function_path is not None)
        ),
        "With reward.reward_model.enable_resource_pool=False, verl's V1 trainer passes whole batches to the reward model, "
        "but no column of the dataset. Set reward.reward_model.enable_resource_pool=True.": (
            model_config.get("enable") and not model_config.get("enable_resource_pool") and config.trainer.get("use_v1")
        ),
    }


def _remarks(config: Any, scheme: Scheme, discount_notes: list[str]) -> list[str]:
    """Return warnings about settings that work but are probably not intended."""
    actor = config.actor_rollout_ref.actor
    condition_by_sentence = {
        idle_fields(config.algorithm.spanwise.recipe, engine="verl"): True,
        "rollout.n is 1, so a prompt has no two completions to compare. Set rollout.n to 2 or more.": (
            config.actor_rollout_ref.rollout.n == 1
            and not scheme.value_names
            and any(objective.baseline not in ("none", "batch") for objective in scheme.objectives)
        ),
        **dict.fromkeys(discount_notes, True),
        "DPPO cuts importance weights at clip_ratio_c. Set it to 20, the default of DPPO, instead of 3, that of PPO.": (
            actor.policy_loss.get("loss_mode", "vanilla").startswith("dppo") and actor.get("clip_ratio_c") == 3.0
        ),
        f"loss_agg_mode '{actor.loss_agg_mode}' also sums KL and entropy over tokens, so both weigh more in longer "
        "completions.": (
            actor.loss_agg_mode in ("seq-mean-token-sum", "token-sum") and (actor.use_kl_loss or actor.entropy_coeff)
        ),
    }
    return [sentence for sentence, condition in condition_by_sentence.items() if sentence and condition]


def _trainer_mode(config: Any) -> str:
    """Return the mode of verl's trainer, without the prefix `spanwise_`."""
    return config.trainer.v1.trainer_mode.removeprefix("spanwise_") if config.trainer.get("use_v1") else "v0"
