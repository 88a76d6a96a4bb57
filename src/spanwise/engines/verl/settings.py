"""Check verl's configuration for a recipe, and set the fields that the recipe decides."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict  # pyright: ignore[reportMissingImports]
from verl.utils.config import omega_conf_to_dataclass  # pyright: ignore[reportMissingImports]

from spanwise.engines.shared import Discounts, deviation_fault, fixed_faults, idle_fields
from spanwise.engines.verl.carry import MODES, USE
from spanwise.engines.verl.estimators import loss_of
from spanwise.engines.verl.plugin import around, say
from spanwise.engines.verl.run import OPTION, TOKENS, VerlRun
from spanwise.errors import RecipeError, refuse, unknown
from spanwise.mode import added_by, part_class, parts_of
from spanwise.modes.critic.config import CriticConfig, critic_faults
from spanwise.modes.parts import RowPart
from spanwise.recipe import Recipe, load, scheme_at
from spanwise.scheme import Scheme

#: Our reward manager, as verl's `reward.reward_manager` names one: source, module and class.
MANAGER = ("importlib", "pkg://spanwise.engines.verl.reward", "SpanRewardManager")
#: The field of `algorithm.spanwise` that keeps the user's reward manager, whose number the reward `environment` reads.
OWN_MANAGER = "own_manager"
#: verl's filter of groups, and the number of ours by which it drops a group exactly if no reward of it differs.
_FILTER, ANY_REWARD = "algorithm.filter_groups", "any_reward"
#: The fields of `algorithm.spanwise` under the estimator `spanwise` that a user may set.
_KNOWN = ("recipe", "folder", "keep_rollouts", "report")
#: What to do about a number of verl's own that pays no block.
_PAY = "add {reward: environment, pays: [...]} to the recipe, which pays blocks with its number, or leave it out"
#: Options that would change the credit or have no effect: their required value, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "algorithm.use_kl_in_reward": (
        False,
        "the option adds the KL term to a reward that pays no block; use actor_rollout_ref.actor.use_kl_loss=True",
    ),
    "algorithm.use_pf_ppo": (False, "the option resamples under GAE only and would change nothing"),
}
#: Settings of verl -> the options of methods that they set in place of the recipe.
_DISCOUNTS = {"algorithm.gamma": "gamma", "algorithm.lam": "lam"}


def attach(trainer_class: Any) -> None:
    """Let a trainer class of verl train by a recipe if the estimator is `spanwise`; other runs are unchanged."""
    trainer_class.spanwise = None  # the `VerlRun` of a trainer with a recipe
    trainer_class.latest = getattr(trainer_class, "latest", None)  # the newest trainer

    @around(trainer_class, "__init__")
    def create(original: Any, self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        name, mode = config.algorithm.adv_estimator, _trainer_mode(config)
        if name == "spanwise":
            self.spanwise, trainer_class.latest = prepare(config), self
        elif (config.algorithm.get("spanwise") or {}).get("recipe"):
            raise RecipeError(
                f"algorithm.spanwise.recipe only works with algorithm.adv_estimator=spanwise, but yours is '{name}'; leave "
                f"the recipe out, or use adv_estimator=spanwise."
            )
        elif config.trainer.v1.trainer_mode == f"spanwise_{mode}":
            raise RecipeError(
                f"trainer.v1.trainer_mode=spanwise_{mode} needs algorithm.adv_estimator=spanwise, but yours is '{name}'; use "
                f"trainer.v1.trainer_mode={mode}."
            )
        original(self, config, *args, **kwargs)

    @around(trainer_class, "fit")
    def fit(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        done = getattr(self, "global_steps", None)  # None in V0, which loads its checkpoint inside `fit`
        with nullcontext() if self.spanwise is None else self.spanwise.training(self, done=done):
            return original(self, *args, **kwargs)

    @around(trainer_class, "_save_checkpoint")
    def save_checkpoint(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.spanwise is not None:
            self.spanwise.save_memory(self.global_steps)
        return original(self, *args, **kwargs)

    @around(trainer_class, "_load_checkpoint")
    def load_checkpoint(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if self.spanwise is not None:
            self.spanwise.load_memory(self.global_steps)
        return result


def prepare(config: Any) -> VerlRun:
    """Read the recipe, refuse what would give wrong credit, and set the reward manager."""
    scheme = scheme_in(config)
    actor, section = config.actor_rollout_ref.actor, config.algorithm.spanwise
    recipe = load(section.recipe)
    critic = recipe.modes.get("critic") or CriticConfig()
    has_critic, steps, warmup = config.critic.get("enable"), critic.policy_training_start_step, config.trainer.critic_warmup
    option = "critic.enable=True and critic.model.path=MODEL"
    refuse(
        {
            **critic_faults(critic, scheme, engine="verl", there=has_critic, option=option),
            f"critic.policy_training_start_step is {steps} and trainer.critic_warmup is {warmup}; add "
            f"trainer.critic_warmup={steps + 1}, the first step at which verl trains the policy.": steps
            and warmup != steps + 1,
        }
    )
    fields = {"group_n", "columns", "steps", *TOKENS}
    if _trainer_mode(config) == "sync":
        fields |= added_by(scheme.modes, "verl")
    # verl's reward loop reads completions while others are still sampled, before the policy is asked for log-probabilities.
    scheme.check(fields if has_critic else fields - {"value_nt"}, at_read=fields - {*TOKENS})
    scheme.check_loads("verl")
    remarks = [_undoable_mode(config), _known_filter(config, scheme)]
    refuse(_faults(config) | _reward_faults(config, scheme))
    parts = parts_in(config, scheme, lambda: omega_conf_to_dataclass(config.actor_rollout_ref.model))
    run = VerlRun(config, scheme, value_lam=critic.gae_lambda_value, parts=parts)
    with open_dict(config):
        section.recipe = str(Path(section.recipe).resolve())
        if config.trainer.get("use_v1"):
            config.trainer.v1.trainer_mode = _trainer_mode(config)  # verl checks the name
        manager = config.reward.reward_manager
        if _manager_name(config) is not None:
            section[OWN_MANAGER] = OmegaConf.to_container(manager)
        manager.source, manager.module.path, manager.name = MANAGER
        for part in parts.values():
            actor.policy_loss.loss_mode = loss_of(part.mode, actor.policy_loss.get("loss_mode", "vanilla"))
    for sentence in filter(None, [*remarks, *_remarks(config, scheme, recipe)]):
        say(sentence)
    return run


def _undoable_mode(config: Any) -> str | None:
    """Replace a way of averaging that cannot be undone, verl's default over several mini-batches; return what to say of it.

    The credit's loss is the same under every mode that can be undone, so that nothing but KL and entropy notices.
    """
    actor = config.actor_rollout_ref.actor
    several = config.data.train_batch_size > actor.ppo_mini_batch_size and _trainer_mode(config) != "separate_async"
    averages_itself = actor.policy_loss.get("loss_mode", "vanilla") == "sapo"
    if actor.loss_agg_mode != "token-mean" or not (several or averages_itself):
        return None
    critic_mode = OmegaConf.select(config, "critic.loss_agg_mode")
    with open_dict(config):
        actor.loss_agg_mode = MODES[0]
        if critic_mode is not None:  # it is the actor's unless the user has set it
            config.critic.loss_agg_mode = critic_mode
    reason = (
        "sapo averages in one way alone"
        if averages_itself
        else "each of several mini-batches has tokens of its own to divide by"
    )
    more = " KL and entropy are averaged in that way, too." if actor.use_kl_loss or actor.entropy_coeff else ""
    return f"loss_agg_mode is set from token-mean to {MODES[0]}: {reason}. The loss of the credit is that of any mode.{more}"


def filter_metric(config: Any) -> str | None:
    """Return the number by which verl keeps or drops a group; None if it keeps all."""
    section = OmegaConf.select(config, _FILTER) or {}
    return section.get("metric") if section.get("enable") else None


def _known_filter(config: Any, scheme: Scheme) -> str | None:
    """Replace a number that the reward manager does not return; return what to say of it, or of a filter by one number."""
    metric = filter_metric(config)
    if metric is None or metric == ANY_REWARD:
        return None
    if metric == "reward" or metric in scheme.names:
        return (
            f"{_FILTER}.metric={metric} drops the groups in which this number is the same for all, though other blocks of such a "
            f"group may differ; {ANY_REWARD} keeps them."
        )
    with open_dict(config):
        OmegaConf.update(config, f"{_FILTER}.metric", ANY_REWARD)
    return (
        f"{_FILTER}.metric is set from {metric} to {ANY_REWARD}: a group is dropped if no objective's reward differs in it."
    )


def scheme_in(config: Any) -> Scheme:
    """Load the scheme of the recipe that verl's configuration names."""
    path = (config.algorithm.get("spanwise") or {}).get("recipe")
    if path is None:
        raise RecipeError("spanwise needs a recipe: add +algorithm.spanwise.recipe=recipe.yaml.")
    return scheme_at(path, longest=config.data.max_response_length, options=_discounts(config).options)


def _discounts(config: Any) -> Discounts:
    """Return gamma and lam, where verl's configuration sets them."""
    return Discounts.of(_DISCOUNTS, lambda name: OmegaConf.select(config, name))


def _manager_name(config: Any) -> str | None:
    """Return the name of verl's or the user's own reward manager; None if it is ours."""
    manager = config.reward.reward_manager
    return None if (manager.source, manager.name) == (MANAGER[0], MANAGER[2]) else manager.name


def parts_in(config: Any, scheme: Scheme, policy: Callable[[], Any]) -> dict[str, RowPart]:
    """Return the part of each mode of a scheme, by name; `policy` gives an `HFModelConfig`, called only if there is a mode."""
    modes = [mode for mode in scheme.modes if "verl" in mode.parts]
    for mode in modes:
        part_class(mode, "verl").check(mode, "verl", config)
    if not modes:
        return {}
    model = policy()
    return parts_of(
        modes,
        "verl",
        model.tokenizer,
        size=model.hf_config.get_text_config().vocab_size,
        generation=model.generation_config,
        temperature=config.actor_rollout_ref.rollout.temperature,
    )


def _reward_faults(config: Any, scheme: Scheme) -> dict[str, Any]:
    """Return a sentence for each reward and each option of a method that verl is told of and that would have no effect."""
    manager, function = _manager_name(config), OmegaConf.select(config, "reward.custom_reward_function.path")
    is_paid = any(objective.reward == "environment" for objective in scheme.objectives)
    norm_name = "algorithm.norm_adv_by_std_in_grpo"
    return {
        f"reward.reward_manager is {manager}, and it pays no block; {_PAY}.": manager not in (None, "naive") and not is_paid,
        f"reward.custom_reward_function is {function}, and it pays no block; {_PAY}.": function is not None and not is_paid,
        "reward.reward_model.enable is True, and verl hands its reward model to nobody but reward.custom_reward_function; set its "
        "path and name, and add {reward: environment, pays: [...]} to the recipe.": (
            OmegaConf.select(config, "reward.reward_model.enable") and not (is_paid and function is not None)
        ),
        **deviation_fault(norm_name, OmegaConf.select(config, norm_name), scheme),
        **_discounts(config).faults(scheme),
    }


def _faults(config: Any) -> dict[str, Any]:
    """Return a sentence for each verl setting that would change, drop or double the credit."""
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    loss, section, mode = actor.policy_loss.get("loss_mode", "vanilla"), config.algorithm.spanwise, actor.loss_agg_mode
    correction = config.algorithm.get("rollout_correction") or {}
    folder, dump_folder = section.get("folder"), trainer.get("rollout_data_dir")
    return {
        f"{unknown('loss_agg_mode', mode, MODES)} {USE}": mode not in MODES,
        f"loss_agg_mode '{mode}' divides by the width of each micro-batch, which is not constant. Set "
        f"actor_rollout_ref.actor.loss_scale_factor to the longest response. Or: {USE}": (
            mode == "seq-mean-token-sum-norm" and not actor.get("loss_scale_factor")
        ),
        **fixed_faults(_FIXED, lambda name: OmegaConf.select(config, name)),
        f"policy_loss.loss_mode '{loss}' averages advantages, picks tokens by their size or adds a term that does not grow "
        f"with them; use vanilla, cispo, gspo or sapo.": loss in ("geo_mean", "clip_cov", "kl_cov", "dro"),
        f"policy_loss.loss_mode 'sapo' always averages as seq-mean-token-mean. {USE}": loss == "sapo" and mode != MODES[0],
        "rollout_correction.bypass_mode with rollout_rs rejects tokens inside the loss, after their shares were counted. Use "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum.": (
            correction.get("bypass_mode") and correction.get("rollout_rs") and mode == MODES[0]
        ),
        "algorithm.spanwise.options is for estimators of one reward; write options: in the recipe.": "options" in section,
        **{
            f"algorithm.spanwise.{name} is no option; use {', '.join(_KNOWN)}.": name not in (*_KNOWN, OWN_MANAGER)
            for name in section
        },
        f"trainer.val_only=True trains nothing, so no run folder is written; leave {OPTION} out.": folder
        and trainer.get("val_only"),
        f"trainer.rollout_data_dir is '{dump_folder}', where {OPTION} keeps its own rollouts; leave it out, or give another "
        f"folder.": (folder and dump_folder and Path(dump_folder).resolve() == (Path(str(folder)) / "rollouts").resolve()),
    }


def _remarks(config: Any, scheme: Scheme, recipe: Recipe) -> list[str]:
    """Return warnings about settings that are valid but probably not intended."""
    actor = config.actor_rollout_ref.actor
    rules = {
        idle_fields(config.algorithm.spanwise.recipe, engine="verl"): True,
        "rollout.n is 1: a completion that is alone in its group has no other to be compared with.": (
            config.actor_rollout_ref.rollout.n == 1
            and not scheme.value_names
            and any(objective.baseline not in ("none", "batch") for objective in scheme.objectives)
        ),
        **dict.fromkeys(_discounts(config).remarks(scheme, recipe.options, engine="verl"), True),
        "DPPO cuts importance weights at clip_ratio_c. Yours is 3, verl's default for PPO; the default of DPPO is 20.": (
            actor.policy_loss.get("loss_mode", "vanilla").startswith("dppo") and actor.get("clip_ratio_c") == 3.0
        ),
        f"loss_agg_mode '{actor.loss_agg_mode}' also sums KL and entropy over tokens, so their coefficients grow with length.": (
            actor.loss_agg_mode in ("seq-mean-token-sum", "token-sum") and (actor.use_kl_loss or actor.entropy_coeff)
        ),
    }
    return [sentence for sentence, applies in rules.items() if sentence and applies]


def _trainer_mode(config: Any) -> str:
    """Return the mode of verl's trainer, without the prefix `spanwise_`."""
    return config.trainer.v1.trainer_mode.removeprefix("spanwise_") if config.trainer.get("use_v1") else "v0"
