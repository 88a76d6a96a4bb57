"""Check SkyRL's configuration for a recipe, and add the options of spanwise to it."""

from dataclasses import dataclass, field
from importlib.metadata import version
from operator import attrgetter
from typing import Any

from packaging.version import Version
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimator  # pyright: ignore[reportMissingImports]
from skyrl.train.config import AlgorithmConfig, make_config  # pyright: ignore[reportMissingImports]
from skyrl.train.config.config import BaseConfig  # pyright: ignore[reportMissingImports]

from spanwise.engines.shared import Discounts, RunRecord, deviation_fault, fixed_faults, idle_fields, say
from spanwise.engines.windows import untested
from spanwise.errors import refuse, unknown
from spanwise.mode import added_by, part_class
from spanwise.modes.critic.config import CriticConfig, critic_faults
from spanwise.recipe import load, scheme_at
from spanwise.scheme import Scheme


@dataclass
class SpanwiseConfig(BaseConfig):
    """The options `trainer.algorithm.spanwise.*`."""

    recipe: str | None = None  # a YAML file with a layout
    folder: str | None = None  # the run folder for `spanwise report`, `why` and `credit`; None: no folder
    keep_rollouts: int = 0  # write the rollouts of every k-th batch; 0: none
    report: bool = False  # write report.html when training ends or is interrupted


@dataclass
class SpanwiseAlgorithmConfig(AlgorithmConfig):
    """SkyRL's algorithm with a recipe instead of an estimator."""

    advantage_estimator: str = "spanwise"
    spanwise: SpanwiseConfig = field(default_factory=SpanwiseConfig)


#: SkyRL's whole configuration, with a recipe.
SpanwiseTrainConfig = make_config(algorithm_cls=SpanwiseAlgorithmConfig)

#: Options that would change the credit or have no effect: their required value, and why.
_FIXED: dict[str, tuple[Any, str]] = {
    "trainer.algorithm.advantage_batch_normalize": (
        False,
        "the option subtracts one mean over all tokens, including padding and other blocks",
    ),
    "trainer.algorithm.use_kl_in_reward": (
        False,
        "the option changes a reward that pays no block; set use_kl_loss=true instead",
    ),
}
#: Settings of SkyRL -> the options of methods that they set in place of the recipe.
_DISCOUNTS = {"trainer.algorithm.gamma": "gamma", "trainer.algorithm.lambd": "lam"}
REDUCTIONS = ("token_mean", "prompt_mean", "sequence_mean", "seq_mean_token_sum_norm", "token_mean_legacy")
#: The estimators that the recipe's method takes the place of: ours, and SkyRL's own.
ESTIMATORS = ("spanwise", *AdvantageEstimator)
#: SkyRL's losses that leave the token of a mode alone.
LOSSES = ("regular", "dual_clip", "gspo", "cispo", "sapo")
#: SkyRL's name for the option of the run folder.
OPTION = "trainer.algorithm.spanwise.folder"


def check(cfg: Any) -> Scheme:
    """Load the scheme that the configuration names; refuse settings that SkyRL cannot combine with it."""
    release = version("skyrl")
    say(untested("skyrl", release))
    algorithm, generator, stepwise = cfg.trainer.algorithm, cfg.generator, cfg.generator.step_wise_trajectories
    section, loss_name = algorithm.spanwise, algorithm.policy_loss_type
    rows, micro = (
        cfg.trainer.policy_mini_batch_size * generator.n_samples_per_prompt,
        cfg.trainer.micro_train_batch_size_per_gpu,
    )
    refuse(
        {
            "There is no recipe; add trainer.algorithm.spanwise.recipe=recipe.yaml.": section.recipe is None,
            **fixed_faults(_FIXED, lambda name: attrgetter(name)(cfg)),
            unknown("trainer.algorithm.advantage_estimator", algorithm.advantage_estimator, ESTIMATORS): (
                algorithm.advantage_estimator not in ESTIMATORS
            ),
            unknown("trainer.algorithm.loss_reduction", algorithm.loss_reduction, REDUCTIONS): (
                algorithm.loss_reduction not in REDUCTIONS
            ),
            f"trainer.algorithm.loss_reduction is 'token_mean_legacy', which drops the rows that fill no micro-batch, and {rows} "
            f"rows of a mini-batch do not divide into micro-batches of {micro}. Use token_mean, which gives the same loss here.": (
                algorithm.loss_reduction == "token_mean_legacy" and rows % micro
            ),
            "trainer.algorithm.policy_loss_type is 'cross_entropy', a loss without advantages; use 'regular'.": (
                loss_name == "cross_entropy"
            ),
        }
    )
    max_turns = getattr(generator, "max_turns", 1) or 1
    discounts = Discounts.of(_DISCOUNTS, lambda name: attrgetter(name)(cfg))
    longest = max_turns * generator.sampling_params.max_generate_length
    scheme = scheme_at(section.recipe, longest=longest, options=discounts.options)
    critic, modes = critic_of(cfg), [mode for mode in scheme.modes if "skyrl" in mode.parts]
    note = " generator.apply_overlong_filtering=true leaves cut-off rollouts out of the loss."
    critic_path, option = cfg.trainer.critic.model.path, "trainer.critic.model.path=MODEL"
    refuse(
        {
            **_group_faults(cfg, scheme, release=release),
            **deviation_fault("trainer.algorithm.grpo_norm_by_std", algorithm.grpo_norm_by_std, scheme),
            **discounts.faults(scheme),
            **critic_faults(critic, scheme, engine="SkyRL", there=critic_path, option=option, instead=note),
            "The recipe's critic has head: hl_gauss, and SkyRL's critic returns one number; leave head out.": critic.head
            != "scalar",
            f"Method '{scheme.method}' runs over the tokens of a whole rollout, but every row is one turn. Set "
            f"generator.merge_stepwise_output=true, or use an outcome method or 'gigpo'.": (
                scheme.entry.kind == "token" and stepwise and not generator.merge_stepwise_output
            ),
            f"trainer.algorithm.policy_loss_type is '{loss_name}', which does not work with a mode's loss; use one of "
            f"{', '.join(LOSSES)}.": modes and loss_name not in LOSSES,
        }
    )
    scheme.check_forgets("SkyRL")
    scheme.check_loads("SkyRL")
    for mode in modes:
        part_class(mode, "skyrl").check(mode, "skyrl", cfg)
    fields = {"group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt", "value_nt", *added_by(scheme.modes, "skyrl")}
    # SkyRL has log-probabilities of whole rows; turns come from the generator's output (`SampledRows.turns`).
    late_fields = {"logp_nt", "value_nt"} if reads_turns(scheme, stepwise=stepwise) else set()
    scheme.check(fields, at_read=fields - late_fields)
    say(idle_fields(section.recipe, engine="SkyRL"))
    estimator = algorithm.advantage_estimator
    if estimator not in ("spanwise", scheme.method):
        say(
            f"trainer.algorithm.advantage_estimator={estimator} is not used: method '{scheme.method}' of the recipe replaces it."
        )
    algorithm.advantage_estimator = "spanwise"
    for remark in discounts.remarks(scheme, load(section.recipe).options, engine="SkyRL"):
        say(remark)
    RunRecord.of(vars(section), option=OPTION)
    return scheme


def reads_turns(scheme: Scheme, *, stepwise: bool) -> bool:
    """Return whether a row of the batch is a turn: the scheme or the generator asks for it, and no recursion runs over tokens."""
    return scheme.entry.kind != "token" and (stepwise or "steps" in scheme.needs)


def _group_faults(cfg: Any, scheme: Scheme, *, release: str) -> dict[str, Any]:
    """Return a sentence for each way of choosing groups that would not go by the credit of blocks."""
    algorithm, modes = cfg.trainer.algorithm, [mode.name for mode in scheme.modes if "skyrl" in mode.parts]
    sampling = algorithm.dynamic_sampling.type
    name = "trainer.fully_async.sample_full_batch" if cfg.trainer.fully_async.sample_full_batch else ""
    name = f"trainer.algorithm.dynamic_sampling.type={sampling}" if sampling else name
    late_fields = sorted({"logp_nt", "value_nt"} & scheme.needs) or modes
    return {
        f"{name} loses a generator's columns in SkyRL {release}, which copies its own fields alone. Install skyrl 0.4, or leave it "
        "out.": sampling is not None and Version(release) < Version("0.4"),
        f"{name} counts rows, and in step-wise training a row is one turn, not a rollout. Leave it out.": (
            sampling is not None and cfg.generator.step_wise_trajectories
        ),
        f"{name} keeps the groups that get credit, and the recipe's credit reads {', '.join(late_fields)}, which SkyRL computes "
        "after sampling. Leave it out.": name and late_fields,
        "trainer.algorithm.zero_variance_filter leaves out completions that a mode still learns from. Leave it out.": (
            algorithm.zero_variance_filter and modes
        ),
    }


def critic_of(cfg: Any) -> CriticConfig:
    """Return the `critic` section of the recipe."""
    return load(cfg.trainer.algorithm.spanwise.recipe).modes.get("critic") or CriticConfig()
