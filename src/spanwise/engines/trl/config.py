"""`SpanGRPOConfig`: TRL's `GRPOConfig` with the few options that span credit adds; and the checks before a run starts."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from datasets import Dataset, IterableDataset
from packaging.version import Version
from torch import nn
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from spanwise.engines.shared import check_keeping
from spanwise.engines.trl.fold import DPPO, LOSS_TYPES, RATIO_LEVELS
from spanwise.errors import DataError, RecipeError, check_known, refuse, unknown
from spanwise.layout import Layout
from spanwise.modes.critic.config import CriticConfig
from spanwise.objective import Objective
from spanwise.rollouts.cells import prompt_fault
from spanwise.rollouts.folder import hidden
from spanwise.scheme import Scheme
from spanwise.segment import SEGMENTERS

_SCHEME = "scheme=Scheme.preset('bae', layout, objectives=[Objective(...), ...])"
#: Options that TRL does not check; a negative or huge value would reverse a term of the loss or drown the other terms.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "beta": (0.0, 1e3), "epsilon": (0.0, 1.0), "epsilon_high": (0.0, 1e3), "entropy_coef": (0.0, 1e3),
    "temperature": (0.01, 100.0), "learning_rate": (0.0, 1e3), "num_iterations": (1, 1e4),
}  # fmt: skip
#: Options of TRL that have no effect under DPPO -> their defaults.
_NOT_UNDER_DPPO = {
    "delta": None,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "use_liger_kernel": False,
    "importance_sampling_level": "token",
}
_Class = TypeVar("_Class", bound=type)


def no_type_check(cls: _Class) -> _Class:
    """Return a class unchanged; jaxtyping's import hook goes by this name and adds no run-time check to the class."""
    # TRL's annotations are not strict (`logging_steps=1` for a float). `typing.no_type_check` would empty the type hints, which
    # TRL's argument parser reads.
    return cls


def _option(default: Any, text: str) -> Any:
    """Build a field of the configuration with the help that TRL's argument parser shows."""
    return field(default=default, metadata={"help": text})


@no_type_check
@dataclass
class SpanGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` with more options and `loss_type="dr_grpo"` as default; the trainer's scheme decides the credit.

    `scale_rewards` and `multi_objective_aggregation` shape a scalar advantage of TRL's that nothing is trained on.

    Raises:
        RecipeError: a value that cannot work, `reward_weights`, a `loss_type` whose normaliser cannot be undone, or `report`
            without the packages that draw it.

    Example:
        >>> config = SpanGRPOConfig("out", use_cpu=True, bf16=False, gradient_checkpointing=None)
        >>> config.loss_type, config.beta
        ('dr_grpo', 0.0)
    """

    loss_type: str = _option(
        "dr_grpo",
        "Policy loss: dr_grpo, grpo, bnpo, dapo, cispo, sapo, luspo or vespo (spanwise undoes the normaliser), dppo_tv or dppo_kl.",
    )
    importance_sampling_level: str = _option(
        "token",
        "The tokens that share an importance ratio, their geometric mean: token (each its own), block, or sequence (the "
        "completion). Each token keeps its own advantage and gradient.",
    )
    dynamic_sampling: str | None = _option(
        None,
        "Groups that teach nothing give way to groups of other prompts (DAPO). credit: a group teaches nothing if no block gets "
        "credit; the name of an objective: if its reward is the same for all.",
    )
    dynamic_sampling_rounds: int = _option(3, "How often dynamic_sampling samples other prompts for a batch, at most.")
    canary: bool = _option(True, "On the first micro-batch, check that TRL weighs every token with its own advantage.")
    keep_rollouts: int = _option(
        0,
        "Write a run folder into output_dir: recipe.yaml, metrics.jsonl and the rollouts of every k-th generation batch. "
        "`spanwise report`, `why` and `credit` read it. 0: no rollouts.",
    )
    report: bool = _option(False, "Write the run folder and, when training ends or is interrupted, its report.html.")
    log_metrics: str = _option(
        "few",
        "The metrics of a step that a console shows. few: loss, rewards, entropy, length, malformed completions, gradient and "
        "learning rate; all: every metric. Trackers, metrics.jsonl and the report always have every metric.",
    )

    def __post_init__(self) -> None:
        # TRL refuses a group of one with a bare ValueError after the distributed set-up; refuse it here first.
        if self.num_generations is not None and self.num_generations < 2:
            raise RecipeError(
                f"num_generations is {self.num_generations}: a completion that is alone in its group has no other to be "
                "compared with, so its credit is always 0. Set num_generations to 2 or more."
            )
        try:
            super().__post_init__()
        except ValueError as error:  # an error of TRL or transformers, which the command line prints as ours
            raise RecipeError(str(error)) from error
        check_args(self)
        check_known("log_metrics", self.log_metrics, ("few", "all"))
        check_keeping(self.keep_rollouts, self.report)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for trackers and model cards, with a placeholder for each secret."""
        return hidden({"trainer": super().to_dict()})["trainer"]


def check_base(*, moves_columns: bool) -> None:
    """Refuse a `GRPOTrainer` that Unsloth has rewritten, unless the trainer moves advantages to its columns."""
    if GRPOTrainer.__name__.startswith("Unsloth") and not moves_columns:
        raise RecipeError(
            "Unsloth has replaced TRL's trainer, and its loss has completions in other columns. Use UnslothSpanGRPOTrainer of "
            "spanwise.engines.unsloth."
        )


def check_scheme(scheme: Any, critic: Any, options: Mapping[str, Any]) -> Scheme:
    """Return the scheme if this trainer can use it with the critic and options; refuse it otherwise."""
    scheme_options = [name for name in options if name in inspect.signature(Scheme.preset).parameters]
    known = [*_trl_arguments(), "scheme"]
    if scheme_options:
        raise RecipeError(f"Set {' and '.join(scheme_options)} in the scheme, not in the trainer. Write {_SCHEME}.")
    if not isinstance(scheme, Scheme):
        raise RecipeError(f"The scheme is {scheme!r}, which is no Scheme. Write {_SCHEME}.")
    faults: dict[str, Any] = {
        **{unknown("argument of SpanGRPOTrainer called", name, known): True for name in options if name not in known},
        **{
            f"Objective '{objective.name}' has a model as reward; pass a function that calls it and returns one number per "
            "completion.": (isinstance(objective.reward, nn.Module))
            for objective in scheme.objectives
        },
        f"Method '{scheme.method}' needs a critic, but there is none. Write critic=CriticConfig(...), or in a recipe critic: "
        "{learning_rate: 1.0e-5}, or use a method that compares completions, such as 'bae' or 'grpo'.": (
            critic is None and scheme.value_names
        ),
        f"The critic is {critic!r}; write critic=CriticConfig(learning_rate=1e-5, ...).": (
            critic is not None and not isinstance(critic, CriticConfig)
        ),
    }
    refuse(faults)
    if critic is not None:
        critic.check_scheme(scheme)
    return scheme


def _trl_arguments() -> list[str]:
    """List the arguments of TRL's trainer; a package that wraps it may take `**kwargs` in its name."""
    for kind in GRPOTrainer.__mro__:
        parameters = inspect.signature(kind.__init__).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            return [name for name in parameters if name != "self"]
    return []


def check_args(args: Any) -> None:
    """Refuse a configuration that is no `GRPOConfig`, that would give wrong credit, or that would ruin any training."""
    if not isinstance(args, GRPOConfig):
        raise RecipeError(f"args is a {type(args).__name__}; pass SpanGRPOConfig(...) or TRL's GRPOConfig(...).")
    values: dict[str, Any] = {name: getattr(args, name, None) for name in (*_BOUNDS, *_NOT_UNDER_DPPO)}
    level = args.importance_sampling_level
    faults: dict[str, Any] = {
        unknown("loss_type", args.loss_type, LOSS_TYPES): args.loss_type not in LOSS_TYPES,
        unknown("importance_sampling_level", level, RATIO_LEVELS): level not in RATIO_LEVELS,
        f"importance_sampling_level is '{level}', but loss_type 'vespo' weighs every token by the ratio of its whole completion. "
        "Leave importance_sampling_level at 'token', or use another loss_type.": args.loss_type == "vespo"
        and level != "token",
    }
    faults |= {
        f"{name} is {values[name]}; set it between {least:g} and {most:g}.": not least <= values[name] <= most
        for name, (least, most) in _BOUNDS.items()
        if isinstance(values[name], int | float)
    }
    faults |= {
        f"{name} is {values[name]}, but loss_type '{args.loss_type}' ignores {name} and chooses tokens by "
        f"epsilon and epsilon_high. Leave {name} at {default}, or use another loss_type.": args.loss_type in DPPO
        and values[name] != default
        for name, default in _NOT_UNDER_DPPO.items()
    }
    faults |= {
        f"reward_weights is {args.reward_weights}: TRL would weigh only the logged reward. Set the weight of each objective "
        "instead, for example Objective('brier', weight=0.5, ...).": args.reward_weights is not None,
    }
    refuse(faults)


def check_use(
    args: GRPOConfig,
    *,
    trl_version: str,
    model: Any = "",
    reward_funcs: Any = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Refuse a configuration that this TRL, model or options cannot use; warn of options without effect."""
    has_adapters = (options or {}).get("peft_config") is not None or hasattr(model, "peft_config")
    has_name = isinstance(model, str) or has_adapters or getattr(getattr(model, "config", None), "_name_or_path", "")
    version = Version(trl_version)
    faults = {
        f"trl {version} normalises some losses in a way that spanwise cannot undo. Install trl 1.10 or newer.": (
            version < Version("1.10")
        ),
        f"trl {version} cannot run GRPO without triton, for example on CPU. Install trl 1.14.2, or 1.16 or newer.": (
            version == Version("1.15.0")
        ),
        "The trainer builds reward_funcs from the objectives. Pass each reward as Objective(reward, pays=[...]), which names the "
        "blocks that it pays.": reward_funcs,
        f"use_liger_kernel=True with trl {version} sends the advantages to a loss that takes one number per completion. Set it "
        "to False, or install trl 1.14 or newer.": args.use_liger_kernel and version < Version("1.14"),
        f"beta is {args.beta}, so TRL must load the reference model by name, but your model has no name: it was "
        "built in memory. Save it and its tokenizer in a folder and pass the folder as model, or set beta=0.": (
            args.beta != 0.0 and not has_name
        ),
    }
    refuse(faults)
    for name, default in (("scale_rewards", "group"), ("multi_objective_aggregation", "sum_then_normalize")):
        if getattr(args, name) != default:
            sentence = (
                f"{name}={getattr(args, name)!r} changes nothing: the option shapes TRL's own advantage of a completion, but "
                "spanwise takes advantages from the objectives (their baseline, scale and weight)."
            )
            warnings.warn(sentence, UserWarning, stacklevel=3)


def check_datasets(
    train: Any, evaluation: Any, objectives: Sequence[Objective], options: Mapping[str, Any], *, needed: int = 0
) -> None:
    """Refuse an object that is no dataset, a dataset without the needed columns, and fewer prompts than a batch takes."""
    if train is None and options.get("environment_factory") is None:
        raise DataError("train_dataset is missing: pass a dataset with the column 'prompt' and the columns of the rewards.")
    _check_dataset("train_dataset", train, objectives)
    for name, dataset in (evaluation if isinstance(evaluation, Mapping) else {"": evaluation}).items():
        argument = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        _check_dataset(argument, dataset, objectives, prefix=f"{argument}: ", kind="evaluation")
    size = len(train) if isinstance(train, Dataset) else needed
    if size < needed:
        raise DataError(
            f"The training dataset has {size} prompts and one generation batch takes {needed}, so TRL would not make a "
            "single step. Add prompts, or set per_device_train_batch_size, gradient_accumulation_steps or "
            "steps_per_generation down or num_generations up."
        )


def _check_dataset(
    argument: str, dataset: Any, objectives: Sequence[Objective], *, prefix: str = "", kind: str = "training"
) -> None:
    """Refuse an object that is no dataset, and a dataset without prompts or without a built-in reward's gold answers."""
    splits = list(dataset) if isinstance(dataset, Mapping) else []
    columns = getattr(dataset, "column_names", None) if not splits else None
    type_name, column_names = type(dataset).__name__, columns or ["none"]
    faults: dict[str, Any] = {
        f"{argument} holds the splits {', '.join(splits)}; pass one of them: {argument}=data[{next(iter(splits), '')!r}].": splits,
        f"{argument} is a {type_name}; make a dataset: datasets.Dataset.from_list(rows).": isinstance(dataset, list | tuple),
        f"{argument} is a {type_name}; pass a datasets.Dataset or IterableDataset.": (
            dataset is not None and not isinstance(dataset, Dataset | IterableDataset)
        ),
        f"{prefix}The {kind} dataset has no column 'prompt' with the text or messages to complete; its columns are "
        f"{', '.join(column_names)}. Rename one: dataset.rename_column({column_names[0]!r}, 'prompt').": columns
        and "prompt" not in columns,
    }
    for objective in objectives if columns is not None else ():
        column = objective.options.get("column", "answer")
        faults[
            f"{prefix}Objective '{objective.name}' reads the dataset column '{column}', which does not exist; the columns are "
            f"{', '.join(column_names)}. Rename the column, or set options: {{column: NAME}} in the objective."
        ] = objective.reward in ("correct", "second_attempt") and column not in column_names
    refuse(faults, DataError)


def check_prompts(prompts: Iterable[Any], *, template: bool) -> None:
    """Refuse a dataset with a row that is not a prompt."""
    for row, prompt in enumerate(prompts):
        fault = prompt_fault(prompt, template=template)
        if fault:
            raise DataError(f"Row {row} of the training dataset has the prompt {prompt!r:.80}; {fault}")


def check_prefilled(prompt: str, layout: Layout) -> None:
    """Refuse a prompt and a layout that disagree on whether the completion starts inside a tag, a channel or delimiters."""
    prompt_end, prefilled = prompt.rstrip(), layout.prefilled or ""
    finders = {part.mark: SEGMENTERS.find(part.segmenter).opens for part in layout.parts}
    signs_of = {
        mark: tuple(sign.strip() for sign in find(mark) if sign.strip())
        for mark, find in finders.items()
        if find is not None
    }
    opened_signs = ((mark, sign) for mark, signs in signs_of.items() for sign in signs if prompt_end.endswith(sign))
    mark, sign = next(opened_signs, ("", ""))
    signs = signs_of.get(prefilled, ())
    faults = {
        f"The prompt already opens {sign}, so no completion will hold that {_noun(mark, sign)}. Write Layout(..., "
        f"prefilled='{mark}').": sign and mark != prefilled,
        f"The layout says that the prompt opens {' or '.join(signs)}, but a prompt ends with {prompt_end[-40:]!r}. End the prompt "
        f"with that {_noun(prefilled, *signs[:1])}, or leave 'prefilled' out of the layout.": signs and not sign,
    }
    refuse(faults)


def _noun(mark: str, sign: str = "") -> str:
    return "tag" if sign == f"<{mark}>" else "sign"
