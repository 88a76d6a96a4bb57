"""What SkyRL's configuration says to spanwise: the recipe, and which of SkyRL's own options go with it."""

import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from skyrl.train.config import AlgorithmConfig, make_config  # pyright: ignore[reportMissingImports]
from skyrl.train.config.config import BaseConfig  # pyright: ignore[reportMissingImports]

from spanwise.engines.checks import idle_fields
from spanwise.engines.keep import RunRecord
from spanwise.engines.windows import untested
from spanwise.errors import refuse
from spanwise.mode import added_by, part_class
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.elsewhere import critic_faults
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
#: What the folder of a run is called in SkyRL's configuration.
OPTION = "trainer.algorithm.spanwise.folder"


def check(cfg: Any) -> Scheme:
    """The rule of credit that a configuration asks for, if SkyRL can carry it."""
    say(untested("skyrl", version("skyrl")))
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    own = algorithm.spanwise
    set_to = {name: getattr(algorithm, name) for name in _FIXED}
    refuse(
        {
            "There is no recipe; add trainer.algorithm.spanwise.recipe=recipe.yaml.": own.recipe is None,
            **{
                f"trainer.algorithm.{name} is {set_to[name]}: {why}. Leave it at {usual}.": set_to[name] != usual
                for name, (usual, why) in _FIXED.items()
            },
            f"trainer.algorithm.loss_reduction is '{algorithm.loss_reduction}', which drops the rows that fill no micro-batch; use "
            f"token_mean. Under {', '.join(_REDUCTIONS)} spanwise gives the same loss.": (
                algorithm.loss_reduction not in _REDUCTIONS
            ),
            "trainer.algorithm.policy_loss_type is 'cross_entropy', a loss without advantages; use 'regular'.": (
                algorithm.policy_loss_type == "cross_entropy"
            ),
        }
    )
    turns = getattr(generator, "max_turns", 1) or 1
    scheme = scheme_at(own.recipe, longest=turns * generator.sampling_params.max_generate_length)
    refuse({**_sampling_faults(cfg, scheme), **_critic_faults(cfg, scheme)})
    scheme.check_forgets("SkyRL")
    for part, mode in ((part_class(mode, "skyrl"), mode) for mode in scheme.modes):
        if part is not None:
            part.check(mode, cfg)
    provides = {"group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt", "value_nt", *added_by(scheme.modes, "skyrl")}
    # SkyRL's log-probabilities are of whole rows; turns are read from what the generator said (`SampledRows.turns`).
    by_turn = scheme.entry.kind != "token" and (generator.step_wise_trajectories or "steps" in scheme.needs)
    scheme.check(provides, at_read=provides - {"logp_nt", "value_nt"} if by_turn else provides)
    say(idle_fields(own.recipe, engine="SkyRL"))
    RunRecord.of(vars(own), option=OPTION)
    return scheme


def critic_of(cfg: Any) -> CriticConfig:
    """The `critic` section of the recipe."""
    return load(cfg.trainer.algorithm.spanwise.recipe).modes.get("critic") or CriticConfig()


def say(sentence: str) -> None:
    """Warn, if there is anything to say."""
    if sentence:
        warnings.warn(sentence, UserWarning, stacklevel=3)


def _sampling_faults(cfg: Any, scheme: Scheme) -> dict[str, Any]:
    """Dynamic sampling looks at the environment's reward of single rows."""
    kind, by_row = cfg.trainer.algorithm.dynamic_sampling.type, cfg.generator.step_wise_trajectories
    other = next((objective.name for objective in scheme.objectives if objective.reward != "environment"), None)
    why = f"'{other}' may differ where that does not" if other else "in step-wise training rows, not rollouts, are counted"
    return {
        f"trainer.algorithm.dynamic_sampling.type is '{kind}', which keeps groups by the environment's reward, and {why}. Leave it "
        f"out.": kind is not None and (other is not None or by_row)
    }


def _critic_faults(cfg: Any, scheme: Scheme) -> dict[str, Any]:
    """What is wrong with SkyRL's critic under a recipe; a rollout is one row where a method runs over its tokens."""
    generator, path, own = cfg.generator, cfg.trainer.critic.model.path, critic_of(cfg)
    rows = generator.step_wise_trajectories and not generator.merge_stepwise_output
    return {
        **critic_faults(
            own,
            scheme,
            engine="SkyRL",
            there=path,
            option="trainer.critic.model.path=MODEL",
            instead=" generator.apply_overlong_filtering=true takes what was cut off out of the loss.",
        ),
        "The recipe's critic has head: hl_gauss, and SkyRL's critic says one number; leave it out.": own.head != "scalar",
        f"Method '{scheme.method}' runs over the tokens of a whole rollout, and every row is a turn. Set "
        f"generator.merge_stepwise_output=true, or use an outcome method or 'gigpo'.": scheme.entry.kind == "token" and rows,
    }
