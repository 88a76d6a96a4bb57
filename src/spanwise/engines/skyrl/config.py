"""Check that SkyRL's configuration works with a recipe. Add spanwise's options to it."""

from dataclasses import dataclass, field
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from packaging.version import Version
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimator  # pyright: ignore[reportMissingImports]
from skyrl.train.config import AlgorithmConfig, make_config  # pyright: ignore[reportMissingImports]
from skyrl.train.config.config import BaseConfig  # pyright: ignore[reportMissingImports]

from spanwise.engines.rule import PROVIDES, compares_groups, idle_fields, read_rule
from spanwise.engines.shared import RunRecord, say
from spanwise.engines.windows import untested
from spanwise.errors import refuse, unknown
from spanwise.mode import added_by, part_class
from spanwise.modes.critic.config import CriticConfig, critic_faults
from spanwise.recipe import Recipe, RecipeRule
from spanwise.scheme import Scheme


@dataclass
class SpanwiseConfig(BaseConfig):
    """The options `trainer.algorithm.spanwise.*` of SkyRL's command line."""

    recipe: str | None = None  # The path of spanwise's recipe, a YAML file.
    folder: str | None = None  # The run folder; None: no folder.
    keep_rollouts: int = 0  # Write the rollouts of every k-th batch; 0: none.
    report: bool = False  # Write report.html when training ends or is interrupted.


@dataclass
class SpanwiseAlgorithmConfig(AlgorithmConfig):
    """SkyRL's options `trainer.algorithm.*` plus spanwise's options. The default estimator is `spanwise`."""

    advantage_estimator: str = "spanwise"
    spanwise: SpanwiseConfig = field(default_factory=SpanwiseConfig)


SpanwiseTrainConfig = make_config(algorithm_cls=SpanwiseAlgorithmConfig)

#: Maps SkyRL options to pairs: the option's required value, and a sentence that gives the reason.
_FIXED: dict[str, tuple[Any, str]] = {
    "trainer.algorithm.advantage_batch_normalize": (
        False,
        "SkyRL would subtract the mean advantage of all tokens, even of padding, from every advantage.",
    ),
    "trainer.algorithm.use_kl_in_reward": (
        False,
        "SkyRL would add the KL to a reward that spanwise does not use. For the KL, set use_kl_loss=true.",
    ),
}
REDUCTIONS = ("token_mean", "prompt_mean", "sequence_mean", "seq_mean_token_sum_norm", "token_mean_legacy")
#: The accepted values of SkyRL's `advantage_estimator`, which the recipe replaces.
ESTIMATORS = ("spanwise", *AdvantageEstimator)
#: SkyRL's policy losses to which spanwise can add another loss term.
LOSSES = ("regular", "dual_clip", "gspo", "cispo", "sapo")
OPTION = "trainer.algorithm.spanwise.folder"


def check(cfg: Any) -> RecipeRule:
    """Load the recipe that SkyRL's configuration names. Refuse settings that conflict with it."""
    skyrl_version = version("skyrl")
    say(untested("skyrl", skyrl_version))
    algorithm_config, generator_config = cfg.trainer.algorithm, cfg.generator
    is_stepwise = generator_config.step_wise_trajectories
    spanwise_options = algorithm_config.spanwise
    loss_name = algorithm_config.policy_loss_type
    estimator_name = algorithm_config.advantage_estimator
    loss_reduction = algorithm_config.loss_reduction
    mini_batch_row_count = cfg.trainer.policy_mini_batch_size * generator_config.n_samples_per_prompt
    micro_batch_row_count = cfg.trainer.micro_train_batch_size_per_gpu
    setting_faults = {
        "There is no recipe; add trainer.algorithm.spanwise.recipe=recipe.yaml.": spanwise_options.recipe is None,
        unknown("trainer.algorithm.advantage_estimator", estimator_name, ESTIMATORS): estimator_name not in ESTIMATORS,
        unknown("trainer.algorithm.loss_reduction", loss_reduction, REDUCTIONS): loss_reduction not in REDUCTIONS,
        f"trainer.algorithm.loss_reduction 'token_mean_legacy' cuts the {mini_batch_row_count} rows of a mini-batch into "
        f"micro-batches of {micro_batch_row_count} and drops the rest. Use token_mean, which gives the same loss here.": (
            loss_reduction == "token_mean_legacy" and mini_batch_row_count % micro_batch_row_count
        ),
        "trainer.algorithm.policy_loss_type is 'cross_entropy', a loss without advantages. Use 'regular'.": (
            loss_name == "cross_entropy"
        ),
        f"With trainer.algorithm.policy_loss_type '{loss_name}', a token's weight depends on more than its own advantage. "
        "Use regular, dual_clip, gspo, cispo or sapo.": loss_name in ("clip_cov", "kl_cov"),
    }
    rule, discount_notes = read_rule(
        spanwise_options.recipe,
        engine="SkyRL",
        longest=(getattr(generator_config, "max_turns", 1) or 1) * generator_config.sampling_params.max_generate_length,
        get_setting=lambda name: attrgetter(name)(cfg),
        faults=setting_faults,
        fixed=_FIXED,
        discounts={"trainer.algorithm.gamma": "gamma", "trainer.algorithm.lambd": "lam"},
        deviation="trainer.algorithm.grpo_norm_by_std",
    )
    recipe, scheme = rule
    critic = critic_of(recipe)
    skyrl_modes = [mode for mode in scheme.modes if "skyrl" in mode.parts]
    refuse(
        {
            **_group_faults(cfg, scheme, skyrl_version=skyrl_version),
            **critic_faults(
                critic,
                scheme,
                engine="SkyRL",
                has_critic=cfg.trainer.critic.model.path,
                option="trainer.critic.model.path=MODEL",
                instead=" To leave cut-off rollouts out of the loss, set generator.apply_overlong_filtering=true.",
            ),
            "The recipe has head: hl_gauss, but SkyRL's critic returns one number. Leave head out.": critic.head != "scalar",
            f"Method '{scheme.method}' needs a whole rollout in each row, but every row is one turn. Set "
            "generator.merge_stepwise_output=true. Or use 'gigpo', or a method that compares rollouts, such as 'grpo'.": (
                scheme.entry.kind == "token" and is_stepwise and not generator_config.merge_stepwise_output
            ),
            "The recipe's refine needs a whole rollout in each row. Set generator.step_wise_trajectories=false, which makes "
            "such rows, or leave refine out.": scheme.refine and is_stepwise,
            f"trainer.algorithm.policy_loss_type '{loss_name}' cannot be combined with a further loss, such as that of "
            f"laser. Use one of {', '.join(LOSSES)}.": skyrl_modes and loss_name not in LOSSES,
        }
    )
    scheme.check_forgets("SkyRL")
    scheme.check_loads("SkyRL")
    for mode in skyrl_modes:
        part_class(mode, "skyrl").check(mode, "skyrl", cfg)
    provided_fields = {*PROVIDES, "value_nt", *added_by(scheme.modes, "skyrl")}
    # SkyRL computes log-probabilities and values for rows, not turns.
    deferred_fields = {"logp_nt", "value_nt"} if reads_turns(scheme, stepwise=is_stepwise) else set()
    scheme.check(provided_fields, at_read=provided_fields - deferred_fields)
    say(idle_fields(spanwise_options.recipe, engine="SkyRL"))
    if estimator_name not in ("spanwise", scheme.method):
        say(f"trainer.algorithm.advantage_estimator={estimator_name} is ignored. The recipe's method is '{scheme.method}'.")
    algorithm_config.advantage_estimator = "spanwise"
    say(*discount_notes)
    RunRecord.of(vars(spanwise_options), option=OPTION)
    return rule


def reads_turns(scheme: Scheme, *, stepwise: bool) -> bool:
    """Return whether credit is computed per turn. Methods that work on tokens need whole rollouts instead."""
    return scheme.entry.kind != "token" and (stepwise or "steps" in scheme.needs)


def _group_faults(cfg: Any, scheme: Scheme, *, skyrl_version: str) -> dict[str, Any]:
    """Check SkyRL's group filters. Return {error message: a true value if it applies}."""
    mode_names = [mode.name for mode in scheme.modes if "skyrl" in mode.parts]
    sampling_type = cfg.trainer.algorithm.dynamic_sampling.type
    filter_setting = ""
    if sampling_type:
        filter_setting = f"trainer.algorithm.dynamic_sampling.type={sampling_type}"
    elif cfg.trainer.fully_async.sample_full_batch:
        filter_setting = "trainer.fully_async.sample_full_batch"
    # SkyRL judges each group alone, and drops a group of equal rewards even if other groups would give it credit.
    batch_wide_labels = [f"objective '{o.name}'" for o in scheme.objectives if o.baseline in ("batch", "blended")]
    options = {**scheme.entry.options, **scheme.options}
    subtracts_mean = options.get("zero_constant_groups") is False or options.get("conflict") is not None
    if compares_groups(scheme) and (scheme.entry.kind == "token" or subtracts_mean):
        batch_wide_labels.append(f"method '{scheme.method}'")
    deferred_field_names = sorted({"logp_nt", "value_nt"} & scheme.needs) or mode_names
    return {
        f"Under SkyRL {skyrl_version}, {filter_setting} drops the columns that the generator adds to its output. Install skyrl 0.4 "
        "or newer, or remove the setting.": sampling_type is not None and Version(skyrl_version) < Version("0.4"),
        f"{filter_setting} takes each row for a rollout, but in step-wise training a row is one turn. Remove the setting.": (
            sampling_type is not None and cfg.generator.step_wise_trajectories
        ),
        f"{filter_setting} needs the credit right after sampling, but credit depends on {', '.join(deferred_field_names)}, "
        "which SkyRL computes later. Remove the setting.": filter_setting and deferred_field_names,
        f"trainer.fully_async.sample_full_batch looks at one group at a time, but {''.join(batch_wide_labels[:1])} compares "
        "completions of the whole batch. So SkyRL would drop groups that get credit. Remove the setting.": (
            cfg.trainer.fully_async.sample_full_batch and batch_wide_labels
        ),
        "trainer.algorithm.zero_variance_filter drops groups with equal rewards, but "
        f"{''.join(mode_names[:1])} learns from them, too. Remove the filter.": (
            cfg.trainer.algorithm.zero_variance_filter and mode_names
        ),
    }


def critic_of(recipe: Recipe) -> CriticConfig:
    """Return the critic settings of a recipe, or default settings."""
    return recipe.modes.get("critic") or CriticConfig()
