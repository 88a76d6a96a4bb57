"""What verl's configuration must be for a recipe to be trained, and what of it is set here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import open_dict  # pyright: ignore[reportMissingImports]
from verl.utils.config import omega_conf_to_dataclass  # pyright: ignore[reportMissingImports]

from spanwise.engines.checks import idle_fields
from spanwise.engines.verl.estimators import loss_of
from spanwise.engines.verl.run import OPTION, TOKENS, VerlRun, say
from spanwise.engines.verl.weights import check_mode
from spanwise.errors import RecipeError, refuse
from spanwise.mode import added_by, parts_of
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.elsewhere import critic_faults
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme

#: Where the reward manager is, as `reward.reward_manager` names it.
MANAGER = ("importlib", "pkg://spanwise.engines.verl.reward", "SpanRewardManager")
#: All that `algorithm.spanwise` may say under the estimator `spanwise`.
_KNOWN = ("recipe", "folder", "keep_rollouts", "report")
#: Losses that one advantage per token does not suit.
_LOSSES = {
    "geo_mean": "takes the mean of a completion's advantages, so spans lose their own",
    "clip_cov": "picks tokens by the size of their advantages, which shares and normalisers change",
    "kl_cov": "picks tokens by the size of their advantages, which shares and normalisers change",
}


def prepare(config: Any) -> VerlRun:
    """Read the recipe, refuse what would give wrong credit, and set the reward manager."""
    scheme = scheme_in(config)
    path = Path(config.algorithm.spanwise.recipe).resolve()
    critic = load(path).modes.get("critic") or CriticConfig()
    refuse(_critic_faults(config, critic, scheme))
    provides = {"group_n", "columns", "steps", *TOKENS}  # in every mode
    if _trainer_mode(config) == "sync":
        provides |= added_by(scheme.modes, "verl")
    # verl's reward loop reads completions while others are still sampled, before the policy is asked for log-probabilities.
    scheme.check(provides if config.critic.get("enable") else provides - {"value_nt"}, at_read=provides - {*TOKENS})
    actor = config.actor_rollout_ref.actor
    check_mode(actor.loss_agg_mode, horizon=actor.get("loss_scale_factor"))
    refuse(_faults(config))
    parts = parts_of(scheme.modes, "verl", config, lambda: omega_conf_to_dataclass(config.actor_rollout_ref.model))
    run = VerlRun(config, scheme, value_lam=critic.gae_lambda_value, parts=parts)
    with open_dict(config):
        config.algorithm.spanwise.recipe = str(path)
        manager = config.reward.reward_manager
        manager.source, manager.module.path, manager.name = MANAGER
        for mode in (part.mode for part in parts.values() if part.policy_loss is not None):
            actor.policy_loss.loss_mode = loss_of(mode, actor.policy_loss.get("loss_mode", "vanilla"))
    for sentence in _remarks(config, scheme):
        say(sentence)
    return run


def scheme_in(config: Any) -> Scheme:
    """The scheme of the recipe that verl's configuration names."""
    path = (config.algorithm.get("spanwise") or {}).get("recipe")
    if path is None:
        raise RecipeError("spanwise needs a recipe: add +algorithm.spanwise.recipe=recipe.yaml.")
    return scheme_at(path, longest=config.data.max_response_length)


def _critic_faults(config: Any, own: CriticConfig, scheme: Scheme) -> dict[str, Any]:
    """What is wrong with verl's critic under a recipe."""
    alone, warmup = own.policy_training_start_step, config.trainer.critic_warmup
    option = "critic.enable=True and critic.model.path=MODEL"
    return {
        **critic_faults(own, scheme, engine="verl", there=config.critic.get("enable"), option=option),
        f"critic.policy_training_start_step is {alone} and trainer.critic_warmup is {warmup}; add "
        f"trainer.critic_warmup={alone + 1} (verl trains the policy from that step on, counted from 1).": alone
        and warmup != alone + 1,
    }


def _faults(config: Any) -> dict[str, Any]:
    """Settings of verl that would change, drop or double the credit, or keep nothing, each with its sentence."""
    algorithm, actor, reward, trainer = config.algorithm, config.actor_rollout_ref.actor, config.reward, config.trainer
    loss, own = actor.policy_loss.get("loss_mode", "vanilla"), algorithm.spanwise
    correction = algorithm.get("rollout_correction") or {}
    manager = (reward.reward_manager.source, reward.reward_manager.name)
    one_step = config.data.train_batch_size <= actor.ppo_mini_batch_size
    folder, dump = own.get("folder"), trainer.get("rollout_data_dir")
    return {
        "algorithm.use_kl_in_reward=True puts the KL term into a reward that blocks do not read. Use "
        "actor_rollout_ref.actor.use_kl_loss=True.": algorithm.get("use_kl_in_reward"),
        "algorithm.use_pf_ppo=True resamples under GAE only and would change nothing; leave it out.": (
            algorithm.get("use_pf_ppo")
        ),
        "algorithm.norm_adv_by_std_in_grpo=False changes only verl's own grpo; write method: dr_grpo in the recipe.": (
            algorithm.get("norm_adv_by_std_in_grpo") is False
        ),
        "algorithm.gamma and algorithm.lam change nothing here; write them under options: in the recipe.": (
            (algorithm.get("gamma", 1.0), algorithm.get("lam", 1.0)) != (1.0, 1.0)
        ),
        "reward.reward_model.enable=True scores in verl's reward model, whose number no block is paid by. Call the model from a "
        "reward function of the recipe.": reward.reward_model.get("enable"),
        "reward.custom_reward_function is not called under a recipe; name the function there, as in {reward: 'module:function', "
        "pays: [...]}.": reward.custom_reward_function.get("path"),
        f"reward.reward_manager is {manager[1]}, which carries no reading; leave it out, spanwise sets its own.": (
            manager not in (("register", "naive"), (MANAGER[0], MANAGER[2]))
        ),
        f"policy_loss.loss_mode '{loss}' {_LOSSES.get(loss)}. Use vanilla, cispo, gspo or sapo.": loss in _LOSSES,
        "policy_loss.loss_mode 'sapo' always averages as seq-mean-token-mean. Set actor_rollout_ref.actor.loss_agg_mode to it.": (
            loss == "sapo" and actor.loss_agg_mode != "seq-mean-token-mean"
        ),
        "rollout_correction.bypass_mode with rollout_rs rejects tokens inside the loss, after their shares were counted. Use "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum.": (
            correction.get("bypass_mode") and correction.get("rollout_rs") and actor.loss_agg_mode == "seq-mean-token-mean"
        ),
        "loss_agg_mode 'token-mean' divides each mini-batch by its own tokens, and a batch of train_batch_size="
        f"{config.data.train_batch_size} prompts makes several of ppo_mini_batch_size={actor.ppo_mini_batch_size}. Use "
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean.": (
            actor.loss_agg_mode == "token-mean" and not one_step and _trainer_mode(config) != "separate_async"
        ),
        "algorithm.spanwise.options belongs to the estimators of one reward (spanwise_grpo, ...); write options: in the recipe.": (
            "options" in own
        ),
        **{
            f"algorithm.spanwise.{name} is no option; there are {', '.join(_KNOWN)}.": True
            for name in own
            if name not in _KNOWN
        },
        f"trainer.val_only=True trains nothing, so there is no run to keep; leave {OPTION} out.": (
            folder and trainer.get("val_only")
        ),
        f"trainer.rollout_data_dir is '{dump}', where {OPTION} keeps rollouts of its own; leave it out, or give another folder.": (
            folder and dump and Path(dump).resolve() == (Path(str(folder)) / "rollouts").resolve()
        ),
    }


def _remarks(config: Any, scheme: Scheme) -> list[str]:
    """What is legal and may not be what was meant."""
    actor = config.actor_rollout_ref.actor
    remarks = {
        idle_fields(config.algorithm.spanwise.recipe, engine="verl"): True,
        "actor_rollout_ref.rollout.n is 1: a completion that is alone in its group has nothing to be compared with.": (
            config.actor_rollout_ref.rollout.n == 1 and not scheme.value_names
        ),
        "algorithm.filter_groups drops groups by one number per completion; blocks of such a group may still differ.": (
            (config.algorithm.get("filter_groups") or {}).get("enable")
        ),
        "DPPO cuts importance weights at clip_ratio_c, which is 3, verl's default for PPO; DPPO's own is 20.": (
            actor.policy_loss.get("loss_mode", "vanilla").startswith("dppo") and actor.get("clip_ratio_c") == 3.0
        ),
        f"{actor.loss_agg_mode} sums KL and entropy over tokens too, so kl_loss_coef and entropy_coeff weigh by length.": (
            actor.loss_agg_mode in ("seq-mean-token-sum", "token-sum") and (actor.use_kl_loss or actor.entropy_coeff)
        ),
    }
    return [sentence for sentence, applies in remarks.items() if sentence and applies]


def _trainer_mode(config: Any) -> str:
    mode = config.trainer.v1.trainer_mode if config.trainer.get("use_v1") else "v0"
    return mode.removeprefix("spanwise_")
