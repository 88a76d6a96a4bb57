"""Define `SpanGRPOConfig`, TRL's `GRPOConfig` with more options. Check the arguments of a TRL training."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
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
#: The allowed ranges of options that TRL does not check.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "beta": (0.0, 1e3), "epsilon": (0.0, 1.0), "epsilon_high": (0.0, 1e3), "entropy_coef": (0.0, 1e3),
    "temperature": (0.01, 100.0), "learning_rate": (0.0, 1e3), "num_iterations": (1, 1e4),
}  # fmt: skip
#: TRL options that do nothing under a DPPO loss, each with its default.
_NOT_UNDER_DPPO = {
    "delta": None,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "use_liger_kernel": False,
    "importance_sampling_level": "token",
}
_Class = TypeVar("_Class", bound=type)


def no_type_check(cls: _Class) -> _Class:
    """Return a class unchanged. A decorator of this name makes jaxtyping's import hook skip the class."""
    # `typing.no_type_check` would also hide the annotations from TRL's argument parser.
    return cls


def _option(default: Any, text: str) -> Any:
    """Declare a field of the configuration with its help text."""
    return field(default=default, metadata={"help": text})


@no_type_check
@dataclass
class SpanGRPOConfig(GRPOConfig):
    """TRL's `GRPOConfig` with more options, and with `loss_type="dr_grpo"` as its default.

    The trainer's scheme decides the credit: TRL's `scale_rewards` and `multi_objective_aggregation` change nothing.

    Raises:
        RecipeError: a value cannot work, `reward_weights` is set, spanwise cannot undo the normaliser of the `loss_type`, or the
            packages that draw the `report` are missing.

    Example:
        >>> config = SpanGRPOConfig("out", use_cpu=True, bf16=False, gradient_checkpointing=None)
        >>> config.loss_type, config.beta
        ('dr_grpo', 0.0)
    """

    loss_type: str = _option(
        "dr_grpo", "The policy loss is dr_grpo, grpo, bnpo, dapo, cispo, sapo, luspo, vespo, dppo_tv or dppo_kl."
    )
    importance_sampling_level: str = _option(
        "token",
        "With 'token', each token has its own importance ratio. With 'block' or 'sequence', all tokens of a block or of a "
        "completion share the geometric mean of their ratios. Every token keeps its own advantage and gradient.",
    )
    dynamic_sampling: str | None = _option(
        None,
        "Replace groups that teach nothing by groups of other prompts (DAPO). With 'credit', replace groups in which no "
        "block gets credit. With an objective's name, replace groups whose completions all have the same reward of that "
        "objective.",
    )
    dynamic_sampling_rounds: int = _option(
        3, "The largest number of rounds in which dynamic_sampling may sample other prompts for a batch."
    )
    canary: bool = _option(True, "On the first micro-batch, check that TRL weighs each token by that token's advantage.")
    keep_rollouts: int = _option(
        0,
        "Write the rollouts of every k-th generation batch to output_dir, with recipe.yaml and metrics.jsonl. The commands "
        "`spanwise report`, `why` and `credit` read this folder. 0 writes no rollouts.",
    )
    report: bool = _option(False, "Write recipe.yaml, metrics.jsonl and, when training ends or is interrupted, report.html.")
    log_metrics: str = _option(
        "few",
        "Which metrics of a step the console shows: few (loss, rewards, entropy, length, malformed completions, gradient and "
        "learning rate) or all. Trackers, metrics.jsonl and the report always have every metric.",
    )

    def __post_init__(self) -> None:
        # TRL refuses groups of one completion, but later and with a bare ValueError.
        if self.num_generations is not None and self.num_generations < 2:
            raise RecipeError(
                f"num_generations is {self.num_generations}, so a prompt has no two completions to compare, and all credit "
                "would be 0. Set num_generations to 2 or more."
            )
        try:
            super().__post_init__()
        except ValueError as error:  # spanwise's commands print a RecipeError without traceback
            raise RecipeError(str(error)) from error
        check_args(self)
        check_known("log_metrics", self.log_metrics, ("few", "all"))
        check_keeping(self.keep_rollouts, self.report)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for trackers and model cards. Secrets are replaced by a placeholder."""
        return hidden({"trainer": super().to_dict()})["trainer"]


def check_base(*, moves_columns: bool) -> None:
    """Refuse a trainer that does not support Unsloth if Unsloth has replaced TRL's trainer."""
    if GRPOTrainer.__name__.startswith("Unsloth") and not moves_columns:
        raise RecipeError(
            "Unsloth has replaced TRL's trainer. Unsloth's loss expects completions in other columns than TRL's loss. "
            "Use UnslothSpanGRPOTrainer of spanwise.engines.unsloth."
        )


def check_scheme(scheme: Any, critic: Any, options: Mapping[str, Any]) -> Scheme:
    """Check the scheme (the rule of credit) against the critic and the trainer's options, and return it."""
    scheme_parameters = inspect.signature(Scheme.preset).parameters
    misplaced_options = [name for name in options if name in scheme_parameters]
    known_names = [*_trl_arguments(), "scheme"]
    if misplaced_options:
        raise RecipeError(f"Set {' and '.join(misplaced_options)} in the scheme, not in the trainer. Write {_SCHEME}.")
    if not isinstance(scheme, Scheme):
        raise RecipeError(f"scheme is {scheme!r}, but must be a spanwise.Scheme. Write {_SCHEME}.")
    scheme_faults: dict[str, Any] = {
        **{unknown("argument of SpanGRPOTrainer called", name, known_names): name not in known_names for name in options},
        **{
            f"Objective '{objective.name}' has a model as reward. Pass a function that calls the model and returns one "
            "number per completion.": (isinstance(objective.reward, nn.Module))
            for objective in scheme.objectives
        },
        f"Method '{scheme.method}' needs a critic. In a script, write critic=CriticConfig(...). In a recipe, write critic: "
        "{learning_rate: 1.0e-5}. Or use a method that compares completions, such as 'bae' or 'grpo'.": (
            critic is None and scheme.value_names
        ),
        f"The critic is {critic!r}, which is no CriticConfig. Write critic=CriticConfig(learning_rate=1e-5, ...).": (
            critic is not None and not isinstance(critic, CriticConfig)
        ),
    }
    refuse(scheme_faults)
    if critic is not None:
        critic.check_scheme(scheme)
    return scheme


def _trl_arguments() -> list[str]:
    """List the arguments of TRL's trainer. Another package may hide them behind `**kwargs`."""
    for base_class in GRPOTrainer.__mro__:
        parameters = inspect.signature(base_class.__init__).parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            return [name for name in parameters if name != "self"]
    return []


def check_args(args: Any) -> None:
    """Refuse training arguments that cannot work."""
    if not isinstance(args, GRPOConfig):
        raise RecipeError(f"args is a {type(args).__name__}; pass SpanGRPOConfig(...) or TRL's GRPOConfig(...).")
    settings: dict[str, Any] = {name: getattr(args, name, None) for name in (*_BOUNDS, *_NOT_UNDER_DPPO)}
    ratio_level = args.importance_sampling_level
    setting_faults: dict[str, Any] = {
        unknown("loss_type", args.loss_type, LOSS_TYPES): args.loss_type not in LOSS_TYPES,
        unknown("importance_sampling_level", ratio_level, RATIO_LEVELS): ratio_level not in RATIO_LEVELS,
        f"importance_sampling_level is '{ratio_level}', but loss_type 'vespo' weighs every token by the ratio of its whole "
        "completion. Leave importance_sampling_level at 'token', or use another loss_type.": args.loss_type == "vespo"
        and ratio_level != "token",
        "max_completion_length is None, but loss_type 'dr_grpo' divides by this length. Set max_completion_length, or use "
        "another loss_type.": args.loss_type == "dr_grpo" and args.max_completion_length is None,
    }
    setting_faults |= {
        f"{name} is {settings[name]}; set it between {minimum:g} and {maximum:g}.": not minimum <= settings[name] <= maximum
        for name, (minimum, maximum) in _BOUNDS.items()
        if isinstance(settings[name], int | float)
    }
    setting_faults |= {
        f"{name} is {settings[name]}, but loss_type '{args.loss_type}' ignores {name} and chooses tokens by "
        f"epsilon and epsilon_high. Leave {name} at {default}, or use another loss_type.": args.loss_type in DPPO
        and settings[name] != default
        for name, default in _NOT_UNDER_DPPO.items()
    }
    setting_faults |= {
        f"reward_weights is {args.reward_weights}. TRL would use these weights only in the reward that it logs. Set the "
        "weight of each objective instead, for example Objective('brier', weight=0.5, ...).": args.reward_weights
        is not None,
    }
    refuse(setting_faults)


def check_use(
    args: GRPOConfig,
    *,
    trl_version: str,
    model: Any = "",
    reward_funcs: Any = None,
    options: Mapping[str, Any] | None = None,
    critic: CriticConfig | None = None,
) -> None:
    """Refuse settings that do not work with TRL's version, the model, critic or other options. Warn of settings without effect."""
    has_adapters = (options or {}).get("peft_config") is not None or hasattr(model, "peft_config")
    path_in_config = getattr(getattr(model, "config", None), "_name_or_path", "")
    policy_waits = critic is not None and critic.policy_training_start_step > 0
    can_load_reference = has_adapters or isinstance(model, str) or bool(path_in_config)
    installed_version = Version(trl_version)
    setting_faults = {
        f"trl {installed_version} divides some losses in a way that spanwise cannot undo. Install trl 1.10 or newer.": (
            installed_version < Version("1.10")
        ),
        f"trl {installed_version} cannot run GRPO without triton, for example on CPU. Install trl 1.14.2, or 1.16 or newer.": (
            installed_version == Version("1.15.0")
        ),
        "You passed reward_funcs, but the trainer builds them from the objectives. Pass each reward as an objective, with "
        "the blocks that it pays: Objective(reward, pays=[...]).": reward_funcs,
        f"With use_liger_kernel=True, trl {installed_version} uses a loss with one advantage per completion, not per token. "
        "Set it to False, or install trl 1.14 or newer.": args.use_liger_kernel and installed_version < Version("1.14"),
        f"beta is {args.beta}, so TRL must load the reference model by name. Your model was built in memory and has no "
        "name. Save it and its tokenizer in a folder, and pass the folder as model. Or set beta=0.": (
            args.beta != 0.0 and not can_load_reference
        ),
        "With critic.policy_training_start_step, the policy has no gradients at first. The gradient scaler of fp16=True "
        "does not allow this. Set bf16=True instead, or policy_training_start_step to 0.": args.fp16 and policy_waits,
        "critic.policy_training_start_step keeps the policy unchanged at first, but DeepSpeed updates the policy within "
        "the backward pass. Set this step to 0, or train without DeepSpeed.": getattr(args, "deepspeed_plugin", None)
        and policy_waits,
    }
    refuse(setting_faults)
    condition_by_sentence = {
        "remove_unused_columns=True removes every column of the dataset except the prompt, so rewards can read only "
        "the prompt. Set it to False if a reward reads another column, such as the gold answer.": args.remove_unused_columns,
        **{
            f"{name}={getattr(args, name)!r} changes nothing. The option only shapes TRL's own advantages, but spanwise "
            "computes its own from the baseline, scale and weight of each objective.": getattr(args, name) != default
            for name, default in (("scale_rewards", "group"), ("multi_objective_aggregation", "sum_then_normalize"))
        },
    }
    for sentence, condition in condition_by_sentence.items():
        if condition:
            warnings.warn(sentence, UserWarning, stacklevel=3)


def check_datasets(
    train: Any, evaluation: Any, objectives: Sequence[Objective], options: Mapping[str, Any], *, needed: int = 0
) -> None:
    """Refuse unusable datasets, and a training set that is too small."""
    if train is None and options.get("environment_factory") is None:
        raise DataError("train_dataset is missing. Pass a dataset with the column 'prompt' and the columns of the rewards.")
    for argument_name, dataset in {"train_dataset": train, **_evaluation_datasets(evaluation)}.items():
        _check_dataset(argument_name, dataset, objectives, options)
    if isinstance(train, Dataset) and len(train) < needed:
        raise DataError(
            f"The training dataset has {len(train)} prompts, but one generation batch needs {needed}, so TRL would not make "
            "a single step. Add prompts, lower per_device_train_batch_size, gradient_accumulation_steps or "
            "steps_per_generation, or raise num_generations."
        )


def _check_dataset(argument: str, dataset: Any, objectives: Sequence[Objective], options: Mapping[str, Any]) -> None:
    """Refuse a dataset of a wrong type or without needed columns. Environments may add prompts, rollout functions other columns."""
    has_environment, has_rollout_function = (options.get(name) for name in ("environment_factory", "rollout_func"))
    opening, dataset_kind = ("", "training") if argument == "train_dataset" else (f"{argument}: ", "evaluation")
    split_names = list(dataset) if isinstance(dataset, Mapping) else []
    known_columns = None if split_names else getattr(dataset, "column_names", None)
    column_names = known_columns or ["none"]
    type_name = type(dataset).__name__
    dataset_faults: dict[str, Any] = {
        f"{argument} holds the splits {', '.join(split_names)}. Pass one of them: "
        f"{argument}=data[{next(iter(split_names), '')!r}].": split_names,
        f"{argument} is a {type_name}. Pass a dataset: datasets.Dataset.from_list(rows).": isinstance(dataset, list | tuple),
        f"{argument} is a {type_name}. Pass a datasets.Dataset or IterableDataset.": not isinstance(
            dataset, Dataset | IterableDataset | None
        ),
        f"{opening}The {dataset_kind} dataset has no column 'prompt' with the text or messages to complete. Its columns are "
        f"{', '.join(column_names)}. Rename one: dataset.rename_column({column_names[0]!r}, 'prompt').": known_columns
        and "prompt" not in known_columns
        and not has_environment,
    }
    dataset_faults |= {
        f"{opening}The {dataset_kind} dataset has a column '{name}', but TRL passes its own {name} to rewards under this name. "
        f"Rename the column: dataset.rename_column({name!r}, 'dataset_{name}').": name in column_names
        for name in ("prompts", "completions")
    }
    for objective in objectives if known_columns is not None else ():
        column_name = objective.options.get("column", "answer")
        missing_column_fault = (
            f"{opening}Objective '{objective.name}' reads the dataset column '{column_name}', which does not exist. The "
            f"columns are {', '.join(column_names)}. Name the right one in the objective: options: {{column: NAME}}."
        )
        needs_answer_column = objective.reward in ("correct", "second_attempt") and not has_rollout_function
        dataset_faults[missing_column_fault] = needs_answer_column and column_name not in column_names
    refuse(dataset_faults, DataError)


def _evaluation_datasets(evaluation: Any) -> dict[str, Any]:
    """Map names such as `eval_dataset['hard']` to the evaluation datasets."""
    if not isinstance(evaluation, Mapping):
        return {"eval_dataset": evaluation}
    return {f"eval_dataset[{name!r}]": dataset for name, dataset in evaluation.items()}


def taken_from(trainer: Any, objectives: Sequence[Objective]) -> list[Any]:
    """Take the environments' reward functions from TRL's trainer. Refuse rewards that no objective uses."""
    objective_count = len(objectives)
    reward_functions = trainer.reward_funcs[objective_count:]
    environment_names = trainer.reward_func_names[objective_count:]
    if reward_functions and not any(objective.reward == "environment" for objective in objectives):
        raise RecipeError(
            f"The environment {', '.join(environment_names)} has a get_reward method, but no objective uses its reward. Add "
            "an objective, with the blocks that the reward pays: Objective('environment', pays=[...])."
        )
    for trainer_list in (trainer.reward_funcs, trainer.reward_func_names, trainer.reward_processing_classes):
        del trainer_list[objective_count:]
    return reward_functions


def check_prompts(train: Any, evaluation: Any, *, template: bool) -> None:
    """Refuse a prompt that is neither a text nor a list of messages. Streams are not checked."""
    for name, dataset in {"the training dataset": train, **_evaluation_datasets(evaluation)}.items():
        for row, prompt in enumerate(dataset["prompt"] if isinstance(dataset, Dataset) else ()):
            if fault := prompt_fault(prompt, template=template):
                raise DataError(f"Row {row} of {name} has the prompt {prompt!r:.80}; {fault}")


def check_prefilled(prompt: str, layout: Layout) -> None:
    """Check that a prompt ends with the `prefilled` opening tag. Without one, it must end with no opening tag."""
    bare_prompt = prompt.rstrip()
    prefill_mark = layout.prefilled or ""
    opening_tags_by_mark = {part.mark: _opening_tags(part.segmenter, part.mark) for part in layout.parts}
    marks_and_tags = ((mark, tag) for mark, tags in opening_tags_by_mark.items() for tag in tags)
    opened_mark, opened_tag = next((pair for pair in marks_and_tags if bare_prompt.endswith(pair[1])), ("", ""))
    prefilled_tags = opening_tags_by_mark.get(prefill_mark, [])
    prompt_faults = {
        f"The prompt ends with {opened_tag}, so completions begin without {opened_tag}. Tell the layout that the prompt already "
        f"holds {opened_tag}: Layout(..., prefilled='{opened_mark}').": opened_tag and opened_mark != prefill_mark,
        f"The layout's 'prefilled' says that every prompt ends with {' or '.join(prefilled_tags)}, but a prompt ends with "
        f"{bare_prompt[-40:]!r}. Let the prompt end with {' or '.join(prefilled_tags)}, or leave "
        "'prefilled' out of the layout.": prefilled_tags and not opened_tag,
    }
    refuse(prompt_faults)


def warn_reopened(ids_nt: Any, mask_nt: Any, layout: Layout, tokenizer: Any) -> str:
    """Warn that tool output ends with the `prefilled` opening tag. There, only the segmenter `channels` counts the tag."""
    if layout.prefilled is None or layout.parts[0].segmenter == "channels":
        return ""
    segmenter_name = layout.parts[0].segmenter
    opening_tags = tuple(_opening_tags(segmenter_name, layout.prefilled))
    is_output_end_nt = (mask_nt.cumsum(dim=1)[:, :-1] > 0) & ~mask_nt[:, :-1] & mask_nt[:, 1:]
    reopened_rows = {
        n
        for n, t in is_output_end_nt.nonzero().tolist()
        if tokenizer.decode(ids_nt[n, max(0, t - 63) : t + 1]).rstrip().endswith(opening_tags)
    }
    if not reopened_rows:
        return ""
    advice = f"Change the environment so that no tool output ends with {opening_tags[0]}, or set scope: turn."
    if opening_tags[0] == "<think>":
        advice = "To start each turn with reasoning, use channels:reasoning in the layout, with prefilled='reasoning'."
    return (
        f"In {len(reopened_rows)} of {len(mask_nt)} completions, tool output ends with {opening_tags[0]}, as the prompt does. The "
        f"segmenter '{segmenter_name}' counts the tag at the end of the prompt ('prefilled'), but not at the end of tool output. "
        f"{advice}"
    )


def _opening_tags(segmenter_name: str, mark: str) -> list[str]:
    segmenter = SEGMENTERS.find(segmenter_name)
    opening_tags = [] if segmenter.opens is None else segmenter.opens(mark)
    return [tag.strip() for tag in opening_tags if tag.strip()]
