"""What SkyRL's configuration says to spanwise: the recipe, and which of SkyRL's own options go with it."""

import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from skyrl.train.config import AlgorithmConfig, make_config  # pyright: ignore[reportMissingImports]
from skyrl.train.config.config import BaseConfig  # pyright: ignore[reportMissingImports]

from spanwise.engines.idle import idle_fields
from spanwise.engines.keep import check_folder
from spanwise.engines.windows import WINDOWS, is_tested
from spanwise.errors import RecipeError
from spanwise.mode import added_by, part_class
from spanwise.modes.critic.config import CriticConfig
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme


@dataclass
class SpanwiseConfig(BaseConfig):
    """`trainer.algorithm.spanwise.*`.

    Attributes:
        recipe: YAML file that says what is read, rewarded and compared; with a layout.
        folder: the run folder that `spanwise report`, `why` and `credit` read; None: none is written.
        keep_rollouts: the rollouts of every k-th batch are written there; 0: none.
        report: write its `report.html` when training ends or is interrupted.
    """

    recipe: str | None = None
    folder: str | None = None
    keep_rollouts: int = 0
    report: bool = False


@dataclass
class SpanwiseAlgorithmConfig(AlgorithmConfig):
    """SkyRL's algorithm with a recipe instead of an estimator."""

    advantage_estimator: str = "spanwise"
    spanwise: SpanwiseConfig = field(default_factory=SpanwiseConfig)


#: SkyRL's whole configuration, with a recipe.
SpanwiseTrainConfig = make_config(algorithm_cls=SpanwiseAlgorithmConfig)

#: Options of `trainer.algorithm` that would change the credit or be lost: what they must be, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "advantage_estimator": ("spanwise", "the recipe names the method, so an estimator would change nothing"),
    "gamma": (1.0, "it belongs to SkyRL's own estimators; a method takes its own in the recipe, as options: {gamma: ...}"),
    "lambd": (1.0, "it belongs to SkyRL's own estimators; a method takes its own in the recipe, as options: {lam: ...}"),
    "grpo_norm_by_std": (True, "it belongs to SkyRL's own GRPO; write method: dr_grpo in the recipe instead"),
    "advantage_batch_normalize": (
        False,
        "it would subtract one mean from all tokens, padding and other blocks included; say in the recipe what is compared "
        "(baseline, scale)",
    ),
    "use_kl_in_reward": (
        False,
        "it hides the KL term in the environment's reward, where no block is paid by it; set use_kl_loss=true instead",
    ),
    "zero_variance_filter": (
        False,
        "it drops groups by the environment's reward alone, although their blocks may differ; what does not differ gets credit 0 "
        "without it",
    ),
}
_REDUCTIONS = ("token_mean", "prompt_mean", "sequence_mean", "seq_mean_token_sum_norm")


def check_version(found: str) -> None:
    """Warn of a SkyRL that nobody tried.

    >>> check_version("0.4.0")
    """
    if not is_tested("skyrl", found):
        sentence = f"spanwise is tested with skyrl {WINDOWS['skyrl']} and this is skyrl {found}: compare a short run first."
        warnings.warn(sentence, UserWarning, stacklevel=3)


def check(cfg: Any) -> Scheme:
    """The rule of credit that a configuration asks for, if SkyRL can carry it.

    Args:
        cfg: a `SpanwiseTrainConfig`.

    Raises:
        RecipeError: no recipe, a recipe that needs what SkyRL does not have, an option of SkyRL that would change the credit.
    """
    check_version(version("skyrl"))
    algorithm = cfg.trainer.algorithm
    if algorithm.spanwise.recipe is None:
        raise RecipeError("There is no recipe; add trainer.algorithm.spanwise.recipe=recipe.yaml.")
    for name, (usual, why) in _FIXED.items():
        if getattr(algorithm, name) != usual:
            raise RecipeError(f"trainer.algorithm.{name} is {getattr(algorithm, name)}: {why}. Leave it at {usual}.")
    if algorithm.loss_reduction not in _REDUCTIONS:
        raise RecipeError(
            f"trainer.algorithm.loss_reduction is '{algorithm.loss_reduction}', which drops the rows that fill no micro-batch; "
            f"use token_mean. Under {', '.join(_REDUCTIONS)} spanwise gives the same loss."
        )
    if algorithm.policy_loss_type == "cross_entropy":
        raise RecipeError("trainer.algorithm.policy_loss_type is 'cross_entropy', a loss without advantages; use 'regular'.")
    generator = cfg.generator
    turns = getattr(generator, "max_turns", 1) or 1
    scheme = scheme_at(algorithm.spanwise.recipe, longest=turns * generator.sampling_params.max_generate_length)
    _check_sampling(cfg, scheme)
    _check_critic(cfg, scheme)
    _remark(algorithm.spanwise.recipe)
    own = algorithm.spanwise
    check_folder(own.folder, own.keep_rollouts, own.report, option="trainer.algorithm.spanwise.folder")
    return scheme


def _check_sampling(cfg: Any, scheme: Scheme) -> None:
    """Dynamic sampling looks at the environment's reward of single rows."""
    kind = cfg.trainer.algorithm.dynamic_sampling.type
    if kind is None:
        return
    other = next((objective.name for objective in scheme.objectives if objective.reward != "environment"), None)
    if other is not None or cfg.generator.step_wise_trajectories:
        why = (
            f"'{other}' may differ where that does not" if other else "in step-wise training rows, not rollouts, are counted"
        )
        raise RecipeError(
            f"trainer.algorithm.dynamic_sampling.type is '{kind}', which keeps groups by the environment's reward, and {why}. "
            f"Leave it out."
        )


#: The fields of a recipe's `critic` section that are read here; it may say `terminal`, for that is what SkyRL does.
_CRITIC = ("gae_lambda_value", "policy_training_start_step", "truncated")


def critic_of(cfg: Any) -> CriticConfig:
    """The `critic` section of the recipe."""
    return load(cfg.trainer.algorithm.spanwise.recipe).critic or CriticConfig()


def _check_critic(cfg: Any, scheme: Scheme) -> None:
    """A critic where values are asked for, and only there; a rollout in one row where a method runs over its tokens."""
    generator, critic, names, own = cfg.generator, cfg.trainer.critic.model.path, scheme.value_names, critic_of(cfg)
    rows = generator.step_wise_trajectories and not generator.merge_stepwise_output
    sentences = {
        f"Method '{scheme.method}' needs a critic: add trainer.critic.model.path=MODEL, the policy's own for a new value head on "
        f"a copy of it. Or use a method that compares completions, such as 'bae' or 'grpo'.": names and not critic,
        f"trainer.critic.model.path is set, but method '{scheme.method}' asks no critic, so it would train on nothing. Leave it "
        f"out, or use method 'gae' or 'sae'.": critic and not names,
        f"The recipe has a critic section, but method '{scheme.method}' asks no critic. Leave it out, or use method 'gae' or "
        f"'sae'.": own != CriticConfig() and not names,
        f"Each objective has a value of its own here ({', '.join(names)}), and SkyRL's critic gives one per token; write values: "
        f"shared in the recipe.": len(names) > 1,
        "The recipe's critic has head: hl_gauss, and SkyRL's critic says one number; leave it out.": own.head != "scalar",
        f"The recipe's critic has truncated: {own.truncated}, and SkyRL has no value after the last token; leave it out. "
        f"generator.apply_overlong_filtering=true takes what was cut off out of the loss.": own.truncated != "terminal",
        f"Method '{scheme.method}' runs over the tokens of a whole rollout, and every row is a turn. Set "
        f"generator.merge_stepwise_output=true, or use an outcome method or 'gigpo'.": scheme.entry.kind == "token" and rows,
    }
    for sentence, wrong in sentences.items():
        if wrong:
            raise RecipeError(sentence)
    scheme.check_forgets("SkyRL")
    for part, mode in ((part_class(mode, "skyrl"), mode) for mode in scheme.modes):
        if part is not None:
            part.check(mode, cfg)
    provides = {"group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt", "value_nt", *added_by(scheme.modes, "skyrl")}
    # SkyRL's log-probabilities are of whole rows; turns are read from what the generator said (`SampledRows.turns`).
    by_turn = scheme.entry.kind != "token" and (generator.step_wise_trajectories or "steps" in scheme.needs)
    scheme.check(provides, at_read=provides - {"logp_nt", "value_nt"} if by_turn else provides)


def _remark(path: str) -> None:
    """Say what of the recipe nothing reads here."""
    idle = idle_fields(path, critic=_CRITIC)
    if idle:
        sentence = f"The recipe also sets {', '.join(idle)}, which SkyRL's own configuration decides; nothing reads it here."
        warnings.warn(sentence, UserWarning, stacklevel=3)
