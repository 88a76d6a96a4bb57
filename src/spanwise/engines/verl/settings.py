"""What verl's configuration must be for a recipe to be trained, and what of it is set here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import open_dict  # pyright: ignore[reportMissingImports]
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass  # pyright: ignore[reportMissingImports]

from spanwise.engines.idle import idle_fields
from spanwise.engines.verl.carry import Credited, Rows, credited
from spanwise.engines.verl.estimators import CARRIED, loss_of
from spanwise.engines.verl.keeping import Keeper
from spanwise.engines.verl.weights import check_mode, loss_factor
from spanwise.errors import RecipeError
from spanwise.mode import added_by, parts_of
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.parts import VerlPart
from spanwise.pipeline import Reading
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme
from spanwise.step import Step

#: What verl calls the fields of `Batch` with a number per token: of its critic, of the policy that its loss starts from, and ids.
TOKENS = {"value_nt": "values", "logp_nt": "old_log_probs", "ids_nt": "responses"}
#: Where the reward manager is, as `reward.reward_manager` names it.
MANAGER = ("importlib", "pkg://spanwise.engines.verl.reward", "SpanRewardManager")
#: Losses that one advantage per token does not suit.
_LOSSES = {
    "geo_mean": "takes the mean of a completion's advantages, so spans lose their own",
    "clip_cov": "picks tokens by the size of their advantages, which shares and normalisers change",
    "kl_cov": "picks tokens by the size of their advantages, which shares and normalisers change",
}


@dataclass
class Settings:
    """A recipe, and how verl reduces the loss it is trained with.

    Attributes:
        scheme: the rule of credit.
        mode, horizon: `actor.loss_agg_mode` and `actor.loss_scale_factor`.
        mini_batch: rows per optimiser step.
        value_lam: lambda of what verl's critic is fitted to.
        parts: what each mode of the scheme does here, by its name (`spanwise.modes`).
        keeper: writes the run folder; None: none is asked for.
        step: credits the batches, and says each thing of them once.
        found: what was credited last.
    """

    scheme: Scheme
    mode: str
    horizon: int | float | None
    mini_batch: int
    value_lam: float = 1.0
    parts: Mapping[str, VerlPart] = field(default_factory=dict)
    keeper: Keeper | None = None
    step: Step = field(init=False)
    found: Credited | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.step = Step(self.scheme)

    @property
    def tokens(self) -> dict[str, str]:
        """Those of `TOKENS` that the method needs, or a mode."""
        needed = self.scheme.needs.union(*(part.tokens for part in self.parts.values()))
        return {name: field for name, field in TOKENS.items() if name in needed}

    @contextmanager
    def carrying(self, rows: Rows, number: int = 0) -> Iterator[dict[str, float]]:
        """Lay the rows of a batch out for verl's call of the estimator `spanwise`; what is yielded then holds the metrics."""
        shown: dict[str, float] = {}

        def credited_here(uids: Sequence[Any], mask_nt: Tensor) -> tuple[Tensor, Tensor]:
            more = {name: value for part in self.parts.values() for name, value in part.fields(rows, number).items()}
            found = credited(rows, uids, mask_nt, self.step, value_lam=self.value_lam, more=more)
            self.found = found
            shown.update(found.metrics)
            for sentence in found.result.warnings:
                say(sentence)
            reading = found.result.own.reading
            adv_nt = found.adv_nt * self._factor(rows, reading, mask_nt)
            return_nt = adv_nt if found.return_nt is None else found.return_nt
            for part in self.parts.values():
                adv_nt, of_mode = part.teach(adv_nt, rows, reading, self.scheme, number)
                shown.update(of_mode)
            return adv_nt, return_nt

        token = CARRIED.set(credited_here)
        try:
            yield shown
        finally:
            CARRIED.reset(token)

    def _factor(self, rows: Rows, reading: Reading, mask_nt: Tensor) -> Tensor:
        sessions = rows.real if rows.session is None else {rows.session[n] for n in rows.real}
        return loss_factor(
            mask_nt,
            mode=self.mode,
            rollouts=len(sessions),
            mini_batch=self.mini_batch,
            tokens=int(reading.length_nk.sum()),
            horizon=self.horizon,
        )


def prepare(config: Any) -> Settings:
    """Read the recipe, refuse what would give wrong credit, and set the reward manager."""
    scheme = scheme_in(config)
    path = Path(config.algorithm.spanwise.recipe).resolve()
    critic = load(path).critic or CriticConfig()
    _check_critic(config.critic.get("enable"), critic, scheme)
    value_lam = _value_lambda(critic, config)
    provides = {"group_n", "columns", "steps", *TOKENS}  # in every mode
    if _trainer_mode(config) == "sync":
        provides |= added_by(scheme.modes, "verl")
    # verl's reward loop reads completions while others are still sampled, before the policy is asked for log-probabilities.
    scheme.check(provides if config.critic.get("enable") else provides - {"value_nt"}, at_read=provides - {*TOKENS})
    _check(config)
    actor = config.actor_rollout_ref.actor
    parts = parts_of(scheme.modes, "verl", config, lambda: omega_conf_to_dataclass(config.actor_rollout_ref.model))
    with open_dict(config):
        config.algorithm.spanwise.recipe = str(path)
        manager = config.reward.reward_manager
        manager.source, manager.module.path, manager.name = MANAGER
        for mode in (part.mode for part in parts.values() if part.policy_loss is not None):
            actor.policy_loss.loss_mode = loss_of(mode, actor.policy_loss.get("loss_mode", "vanilla"))
    _remark(config, scheme)
    rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    horizon = actor.get("loss_scale_factor")
    return Settings(scheme, actor.loss_agg_mode, horizon, rows, value_lam, parts, Keeper.of(config, scheme))


def scheme_in(config: Any) -> Scheme:
    """The scheme of the recipe that verl's configuration names."""
    path = (config.algorithm.get("spanwise") or {}).get("recipe")
    if path is None:
        raise RecipeError("spanwise needs a recipe: add +algorithm.spanwise.recipe=recipe.yaml.")
    return scheme_at(path, longest=config.data.max_response_length)


def _check_critic(enabled: bool | None, own: CriticConfig, scheme: Scheme) -> None:
    """Refuse a method without the critic it needs, a critic that nobody reads, and one value where several are needed."""
    if enabled and not scheme.value_names:
        raise RecipeError(
            f"critic.enable=True trains a critic, and method '{scheme.method}' reads no values; leave critic.enable out, or write "
            f"method: gae or method: sae in the recipe."
        )
    if own != CriticConfig() and not scheme.value_names:
        raise RecipeError(
            f"The recipe has a critic: section, and method '{scheme.method}' reads no values; leave it out, or write "
            f"method: gae or method: sae."
        )
    if scheme.value_names and not enabled:
        raise RecipeError(
            f"Method '{scheme.method}' needs the values of verl's critic, which is there for verl's own gae alone; add "
            f"critic.enable=True and critic.model.path."
        )
    if len(scheme.value_names) > 1:
        raise RecipeError(
            f"Each objective has a value of its own here ({', '.join(scheme.value_names)}), and verl's critic gives one per token; "
            f"write values: shared in the recipe."
        )


def _value_lambda(critic: CriticConfig, config: Any) -> float:
    """The critic's lambda. Of the recipe's `critic:` the rest is verl's own business, which must not say otherwise."""
    alone = critic.policy_training_start_step
    if alone and config.trainer.critic_warmup != alone + 1:
        raise RecipeError(
            f"critic.policy_training_start_step is {alone} and trainer.critic_warmup is {config.trainer.critic_warmup}; add "
            f"trainer.critic_warmup={alone + 1} (verl counts steps from 1 and trains the policy from that one on)."
        )
    if critic.truncated != "terminal":
        raise RecipeError(
            f"critic.truncated is '{critic.truncated}', and verl keeps no value from after the last token and trains on what was "
            f"cut off; leave it out."
        )
    return critic.gae_lambda_value


def _check(config: Any) -> None:
    """Refuse settings of verl that would change, drop or double the credit, each with its sentence."""
    algorithm, actor, reward = config.algorithm, config.actor_rollout_ref.actor, config.reward
    check_mode(actor.loss_agg_mode, horizon=actor.get("loss_scale_factor"))
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    correction = algorithm.get("rollout_correction") or {}
    manager = (reward.reward_manager.source, reward.reward_manager.name)
    one_step = config.data.train_batch_size <= actor.ppo_mini_batch_size
    faults = {
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
    }
    for sentence, wrong in faults.items():
        if wrong:
            raise RecipeError(sentence)


def _remark(config: Any, scheme: Scheme) -> None:
    """Say what is legal and may not be what was meant."""
    used = ("gae_lambda_value", "policy_training_start_step", "truncated")
    idle = idle_fields(config.algorithm.spanwise.recipe, critic=used)
    if idle:
        say(f"The recipe also sets {', '.join(idle)}, which verl's own configuration decides; nothing reads it here.")
    if config.actor_rollout_ref.rollout.n == 1 and not scheme.value_names:
        say("actor_rollout_ref.rollout.n is 1: a completion that is alone in its group has nothing to be compared with.")
    if (config.algorithm.get("filter_groups") or {}).get("enable"):
        say("algorithm.filter_groups drops groups by one number per completion; blocks of such a group may still differ.")
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss.get("loss_mode", "vanilla").startswith("dppo") and actor.get("clip_ratio_c") == 3.0:
        say("DPPO cuts importance weights at clip_ratio_c, which is 3, verl's default for PPO; DPPO's own is 20.")
    if actor.loss_agg_mode in ("seq-mean-token-sum", "token-sum") and (actor.use_kl_loss or actor.entropy_coeff):
        say(f"{actor.loss_agg_mode} sums KL and entropy over tokens too, so kl_loss_coef and entropy_coeff weigh by length.")


def _trainer_mode(config: Any) -> str:
    mode = config.trainer.v1.trainer_mode if config.trainer.get("use_v1") else "v0"
    return mode.removeprefix("spanwise_")


def say(sentence: str) -> None:
    """Warn, and print: Ray and verl's log levels swallow one or the other."""
    print(f"[spanwise] {sentence}", file=sys.stderr, flush=True)
    warnings.warn(sentence, UserWarning, stacklevel=3)
