"""`Recipe`: one YAML, checked at the border, that says what to train, how credit is given and for how long."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from spanwise.credit import method, preset_layout, preset_objectives
from spanwise.errors import RecipeError, unknown
from spanwise.layout import Layout
from spanwise.objective import Objective, function_name
from spanwise.score import check_objectives

#: The tasks that need no model or dataset by name.
EMBEDDED = ("digits", "digits_twice")
#: What a model and a dataset by name start from instead of the defaults below, which suit a model of 0.4 M parameters: the paper's
#: learning rate and entropy control, and evaluations that do not take longer than the training.
HUB: Mapping[str, Any] = {
    "learning_rate": 1e-6, "warmup_steps": 20, "entropy": 0.0, "eval_every": 0, "eval_prompts": 100, "eval_samples": 4,
    "save_every": 40, "keep_rollouts": 20,
}  # fmt: skip


class Recipe(BaseModel):
    """Everything one run depends on; `resolved` fills in the preset.

    Fields left out take the values below, those of the embedded task; for a model by name `load` puts `HUB` in their place.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # What is trained on what.
    task: Literal["digits", "digits_twice", "confidence", "two_attempts"] = Field(
        "digits",
        description="digits: the embedded task; digits_twice: the same with two attempts; "
        "confidence, two_attempts: a model and a dataset by name or folder",
    )
    start: Literal["easy", "hard"] = Field("easy", description="embedded task: how good the warm start is")
    start_seed: int = Field(0, description="embedded task: seed of the warm start, shared by runs of every seed")
    start_steps: int | None = Field(
        None, ge=1, description="embedded task: shorten each phase of the warm start, for a quick look"
    )
    model: str | None = Field(None, description="hub name or folder of the model; not for the embedded task")
    dataset: str | None = Field(None, description="hub name, folder or file of the prompts; not for the embedded task")
    split: str = Field("train", description="split of the dataset")
    question_column: str = Field("question", description="column of the dataset that holds the question")
    answer_column: str = Field("answer", description="column of the dataset that holds the right answer")

    # How credit is given.
    method: str = Field("bae", description="named preset: see `spanwise methods`")
    calibration: Literal["brier", "log_score"] = Field("brier", description="score of the confidence")
    baseline: Literal["none", "batch", "group", "outcome", "blended"] = Field(
        "outcome", description="what the confidence is compared with (bae)"
    )
    layout: dict[str, list[str]] | None = Field(None, description="block: tags, in order; default: the task's own")
    prefilled: str | None = Field(None, description="tag that the prompt already opened")
    objectives: list[dict[str, Any]] | None = Field(None, description="replaces the preset's objectives")
    sum_first: bool | None = Field(None, description="add the rewards before the baseline; default: the preset's")
    per: str | float | None = Field(None, description="'block', 'completion' or a number of tokens; default: the preset's")
    leave_one_out: bool = Field(False, description="leave a completion out of its own baseline")
    min_stratum: int = Field(2, ge=2, description="smaller strata get no credit")

    # How long and how fast.
    steps: int = Field(120, ge=1, description="generation batches")
    prompts: int = Field(16, ge=1, description="prompts per step")
    group_size: int = Field(16, ge=2, description="completions per prompt")
    mini_batches: int = Field(1, ge=1, description="optimizer steps per generation batch")
    micro_batch: int | None = Field(
        None, ge=1, description="completions per forward pass; default: a whole mini-batch, of a model by name at most 4"
    )
    learning_rate: float = Field(4e-4, gt=0)
    warmup_steps: int = Field(10, ge=0)
    clip: float = Field(0.2, gt=0, description="PPO clip range of the ratio")
    entropy: float = Field(0.04, ge=0, description="coefficient of the entropy bonus; where it starts, if there is a target")
    entropy_target: float | None = Field(
        0.2,
        ge=0,
        description="nats per token: the bonus acts below it only, its coefficient moves by 5e-4 a step; null: constant",
    )
    temperature: float = Field(1.0, gt=0)
    max_completion_length: int | None = Field(None, ge=2, description="tokens; default: the task's")
    seed: int = 0
    trainer: dict[str, Any] = Field(default_factory=dict, description="further SpanGRPOConfig options, as TRL names them")

    # What is looked at and kept.
    eval_every: int = Field(10, ge=0, description="steps between evaluations; 0: only at the end")
    eval_prompts: int = Field(512, ge=1)
    eval_samples: int = Field(8, ge=1, description="completions per prompt in the final evaluation; 2 while training")
    output: str = Field("runs/train", description="folder of the run")
    save_every: int = Field(0, ge=0, description="steps between checkpoints to resume from; 0: none")
    keep_rollouts: int = Field(1, ge=0, description="write the rollouts of every k-th step; 0: none")
    report: bool = Field(True, description="write report.html at the end")
    report_to: str = Field("none", description="none, trackio, wandb: as TRL takes it")
    threads: int = Field(1, ge=1, description="torch threads on CPU; more than one is slower on a shared machine")

    @field_validator("method")
    @classmethod
    def _known_method(cls, name: str) -> str:
        try:
            return method(name).name
        except RecipeError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.task not in EMBEDDED:
            for field in ("model", "dataset"):
                if getattr(self, field) is None:
                    raise ValueError(f"Task '{self.task}' needs a {field}; add --{field} with a hub name or a folder.")
        elif self.model or self.dataset:
            raise ValueError(
                f"A model or dataset is given, but the task is '{self.task}'; add --task confidence to train on them."
            )
        if self.task == "digits_twice" and self.start != "easy":
            raise ValueError(f"Task 'digits_twice' has one warm start; leave out start (got '{self.start}').")
        batch = self.prompts * self.group_size
        if batch % self.mini_batches or (batch // self.mini_batches) % (self.micro_batch or 1):
            raise ValueError(
                f"{self.prompts} prompts x {self.group_size} completions = {batch} cannot be cut into {self.mini_batches} "
                f"mini-batches of whole micro-batches of {self.micro_batch or batch // self.mini_batches}."
            )
        return self


@dataclass(frozen=True)
class Plan:
    """How a recipe gives credit, once its preset is filled in.

    Attributes:
        layout: blocks and tags.
        objectives: rewards, what they pay, their baselines.
        sum_first: add the rewards before the baseline.
        per: what a token's share is counted in.
        estimator: what turns the sum of the rewards into advantages; None: the objectives' baselines.
        whiten: scale the credit of each block to a standard deviation of 1 over the batch.
    """

    layout: Layout
    objectives: tuple[Objective, ...]
    sum_first: bool
    per: str | float
    estimator: str | None = None
    whiten: bool = False


def load(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe file, apply overrides, check everything that can be checked before a model is loaded.

    Args:
        path: YAML file; None: the embedded default.
        overrides: field -> value, from the command line; they win over the file, None as well.

    Raises:
        RecipeError: the file cannot be read, an unknown field (with a suggestion), a value of the wrong kind, an override that
            another field of the file would make void.

    Example:
        >>> load(None, {"method": "rlcr", "steps": 50}).steps
        50
    """
    written = {} if path is None else _read(path)
    given = dict(overrides or {})
    for key in (*written, *given):
        if key not in Recipe.model_fields:
            raise RecipeError(unknown("recipe field", str(key), Recipe.model_fields))
    _check_void(written, given)
    values = {**written, **given}
    if "task" not in values and (values.get("model") or values.get("dataset")):
        values["task"] = "confidence"
    if values.get("task", EMBEDDED[0]) not in EMBEDDED:
        values = {**HUB, **values}
    try:
        return Recipe(**values)
    except ValidationError as error:
        raise RecipeError(_sentence(error)) from error


def _read(path: str | Path) -> dict[str, Any]:
    """What a recipe file says."""
    try:
        read = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"The recipe '{path}' cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"The recipe '{path}' is not valid YAML: {' '.join(str(error).split())}") from error
    if read is not None and not isinstance(read, dict):
        raise RecipeError(f"The recipe '{path}' must hold 'field: value' lines, not a {type(read).__name__}.")
    return dict(read or {})


def _check_void(written: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse to change a preset that the file has written out: the change would do nothing, without a word.

    Raises:
        RecipeError: naming the fields that are in the way.
    """
    for field in ("method", "baseline", "calibration"):
        before = written.get(field, Recipe.model_fields[field].default)
        if field not in given or given[field] == before:
            continue
        fixed = ("objectives", "sum_first", "per") if field == "method" else ("objectives",)
        void = [name for name in fixed if written.get(name) is not None and name not in given]
        if void:
            null = " ".join(f"--set {name}=null" for name in void)
            raise RecipeError(
                f"The recipe has its own {' and '.join(void)}, so changing {field} from {before} to {given[field]} would change "
                f"nothing or half of it. Change it there, or take the preset's with {null}."
            )


def plan(recipe: Recipe, task_layout: Layout, max_completion_length: int, *, recorded: Collection[str] = ()) -> Plan:
    """Fill in the preset: layout, objectives and spreading as the recipe and its method say.

    Args:
        recipe: what is asked for.
        task_layout: the blocks where the recipe names none.
        max_completion_length: in tokens, for presets that divide by it.
        recorded: objectives whose rewards are known already, so that the tags they would read need not be in the layout.

    Raises:
        RecipeError: an objective with an unknown field, reward, block or outcome; LayoutError: a layout that cannot work.
    """
    chosen = method(recipe.method)
    preset = chosen.preset
    if preset is None:
        raise RecipeError(
            f"Method '{recipe.method}' is a function to call from Python (spanwise.credit.{recipe.method}): no trainer here has "
            f"what it needs ({', '.join(chosen.needs)}). Use 'bae' or another method of `spanwise methods`."
        )
    if recipe.layout is not None:
        layout = Layout(recipe.layout, prefilled=recipe.prefilled)
    else:
        layout = preset_layout(preset, Layout(dict(task_layout.blocks), prefilled=recipe.prefilled or task_layout.prefilled))
    if recipe.objectives is not None:
        objectives = tuple(_objective(entry, position) for position, entry in enumerate(recipe.objectives))
    else:
        objectives = preset_objectives(preset, layout, calibration=recipe.calibration, baseline=recipe.baseline)
    check_objectives(objectives, layout, recorded=recorded)
    per = preset.per if recipe.per is None else recipe.per
    sum_first = preset.sum_first if recipe.sum_first is None else recipe.sum_first
    if per == "length":
        per = max_completion_length
    # The sum of several rewards (rlcr) is compared by its objectives' baseline; a single one by the method's own function.
    own = chosen.kind == "completion" and preset.sum_first and not preset.calibrated and sum_first
    return Plan(
        layout,
        objectives,
        sum_first,
        per if isinstance(per, str) else float(per),
        recipe.method if own else None,
        preset.whiten,
    )


def answer_layout(recipe: Recipe, task_layout: Layout) -> Layout:
    """The blocks that completions are read by: the recipe's, or the task's.

    Where the recipe pays the whole completion as one block, of the task's tags or of none, the task's blocks: a method that sees
    one block does not change what the completions say.
    """
    if recipe.layout is None:
        return Layout(dict(task_layout.blocks), prefilled=recipe.prefilled or task_layout.prefilled)
    layout = Layout(recipe.layout, prefilled=recipe.prefilled)
    if len(layout.names) == 1 and layout.tags in ((), tuple(dict.fromkeys(task_layout.tags))):
        return Layout(dict(task_layout.blocks), prefilled=layout.prefilled)
    return layout


def answer_tags(recipe: Recipe) -> dict[str, str]:
    """The tags of answer and confidence, as the recipe's objectives name them.

    >>> answer_tags(load(None, {"objectives": [{"reward": "correct", "pays": "a", "options": {"tag": "x"}}]}))
    {'answer': 'x', 'confidence': 'confidence'}
    """
    tags = {"answer": "answer", "confidence": "confidence"}
    kinds = {"correct": "answer", "brier": "confidence", "log_score": "confidence"}
    for entry in recipe.objectives or ():
        if entry.get("reward") in kinds:
            tags[kinds[entry["reward"]]] = (entry.get("options") or {}).get("tag", kinds[entry["reward"]])
    return tags


def resolved(recipe: Recipe, filled: Plan) -> dict[str, Any]:
    """The recipe as plain data with its preset written out, ready for YAML; loading it again gives the same run."""
    data = recipe.model_dump(mode="json")
    data["layout"] = {name: list(tags) for name, tags in filled.layout.blocks}
    data["prefilled"] = filled.layout.prefilled
    data["objectives"] = [_plain(objective) for objective in filled.objectives]
    data["sum_first"] = filled.sum_first
    data["per"] = filled.per
    return data


def _plain(objective: Objective) -> dict[str, Any]:
    reward = objective.reward if isinstance(objective.reward, str) else function_name(objective.reward)
    given = objective.outcomes[0] if len(objective.given) == 1 else list(objective.outcomes)
    entry = {**vars(objective), "reward": reward, "pays": list(objective.pays), "given": given}
    entry["options"] = dict(objective.options)
    return {key: value for key, value in entry.items() if value is not None and value not in ({}, [])}


def _objective(entry: Mapping[str, Any], position: int) -> Objective:
    fields = tuple(Objective.__dataclass_fields__)
    for key in entry:
        if key not in fields:
            raise RecipeError(f"Objective {position + 1}: {unknown('field', str(key), fields)}")
    for key in ("reward", "pays"):
        if key not in entry:
            raise RecipeError(
                f"Objective {position + 1} has no '{key}'; write for example {{reward: correct, pays: [solution]}}."
            )
    reward = entry["reward"]
    if isinstance(reward, str) and ":" in reward:
        reward = _imported(reward, position)
    return Objective(**{**entry, "reward": reward})


def _imported(path: str, position: int) -> Any:
    """A reward function of the user's own, written as `module:function` in a recipe."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"Objective {position + 1}: the reward '{path}' cannot be imported: {error}.") from error


def _sentence(error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        message = item["msg"].removeprefix("Value error, ")
        field = ".".join(str(part) for part in item["loc"])
        parts.append(f"{field}: {message} (got {item['input']!r})" if field and item["type"] != "value_error" else message)
    return "; ".join(parts)
