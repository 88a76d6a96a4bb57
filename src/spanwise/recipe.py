"""`Recipe`: a YAML file that says what to train, how to give credit and for how long. `load` reads and checks it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cached_property
from inspect import cleandoc
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from spanwise.credit import METHODS, method
from spanwise.credit.refinement import Refinement
from spanwise.disk import read_yaml
from spanwise.errors import RecipeError, check_known, unknown
from spanwise.layout import Layout
from spanwise.modes import MODES, Mode
from spanwise.objective import OWN, Objective
from spanwise.registry import imported, is_registered, seen_from_here
from spanwise.scheme import SCRIPT, Scheme
from spanwise.score import REWARDS, MathVerifier
from spanwise.score.criteria import is_column

EMBEDDED = ("digits", "digits_twice", "digits_long", "fields", "invoices")  # The tasks with their own model and prompts.
_BY_NAME = ("confidence", "two_attempts", SCRIPT)  # The tasks whose recipe names a model and a dataset.
#: Maps some recipe fields to the tasks that can use them. All tasks can use the other fields.
_USED_BY: Mapping[str, tuple[str, ...]] = {
    "start": EMBEDDED[:1],
    **dict.fromkeys(("start_seed", "start_steps"), EMBEDDED),
    "fields": ("fields",),
    **dict.fromkeys(("split", "question_column", "prompt_column", "answer_column", "instruction"), _BY_NAME),
}
LARGEST_SEED = 2**32 - 1  # The largest seed that NumPy takes.
#: Defaults for recipes that name a model and a dataset.
HUB: Mapping[str, Any] = {
    "learning_rate": 1e-6, "warmup_steps": 20, "entropy": 0.0, "eval_every": 0, "eval_prompts": 100, "eval_samples": 4,
    "save_every": 40, "keep_rollouts": 20,
}  # fmt: skip


class Recipe(BaseModel):
    """All settings of one run. `resolved` also writes out what the method's preset stands for.

    Missing fields take the defaults of the embedded task below; for a model by name `load` takes `HUB` instead. An
    unlisted field is the section of a feature beside the method, by name (`spanwise.modes.MODES`), such as `critic` or `laser`.

    Attributes:
        task: digits: the embedded task; digits_twice: the same with two attempts; digits_long: completions of some seventy
            tokens; fields: a JSON object of many small answers; invoices: letters to be read into JSON; confidence,
            two_attempts: a model and a dataset by name or folder; own: of a script of your own, in the recipe.yaml that it
            leaves in its run folder
        start: quality of the embedded task's warm start
        start_seed: seed of the embedded task's warm start, which runs of every seed share
        start_steps: steps of each warm-start phase of the embedded task, for a quick look
        fields: number of fields of the object in the task fields
        model: hub name or folder of the model; not for the embedded task
        dataset: hub name, folder or file of the prompts; not for the embedded task
        split: split of the dataset
        question_column: column of the dataset that holds the question
        prompt_column: column of whole prompts, texts or conversations, used unchanged; default: prompt if no question
        answer_column: column of the dataset that holds the right answer, or a field of it, such as
            reward_model.ground_truth; null: there is no such column
        instruction: text before each question that asks for the layout's tags; '': no text; default: the task's
        method: name of the preset, see `spanwise methods`
        calibration: scoring rule of the confidence if objectives are missing; default: brier
        baseline: baseline that the confidence is compared with (bae); default: outcome
        layout: block: its marks (tags, paths, ...), in order; or a list of blocks marked by their names; default: the
            task's
        segmenter: segmenter of marks that name none, as json:price does
        most: number of blocks that a repeated block such as items[*] becomes; default: the task's, else 16
        prefilled: mark that the prompt already opens
        objectives: list of objectives that replaces the preset's
        per: 'block', 'completion', 'batch' or a number of tokens; default: the preset's
        values: targets of a critic's values (gae, sae): all rewards to come, or each objective; default: objective
            if objectives pay different blocks
        verifier: limits of comparing answers as mathematics: workers, processes (default: one a core); deadline, seconds for
            each comparison (default: 5)
        options: options of the method, see `spanwise methods NAME`: leave_one_out, min_stratum, ddof, ...
        refine: stage that changes token advantages after the method: ktae, oar, or a mapping of method, options and
            correct
        steps: generation batches
        prompts: prompts per step
        group_size: completions per prompt, which are compared with each other
        mini_batches: optimizer steps per generation batch
        micro_batch: completions per forward pass; default: a whole mini-batch, of a model by name at most 4
        learning_rate: learning rate of AdamW; constant after the warm-up
        warmup_steps: generation batches over which the learning rate rises to its full value
        clip: PPO clip range of the ratio
        entropy: coefficient of the entropy bonus; its first value, if there is a target
        entropy_target: nats per token below which the bonus acts; its coefficient moves by 5e-4 a step; null: constant
        temperature: temperature of sampling, in training and in evaluations
        max_completion_length: largest number of tokens of a completion; default: the task's
        seed: seed of prompts and sampling
        trainer: further SpanGRPOConfig options, as TRL names them. The sampling options (top_p, top_k, min_p, repetition_penalty,
            generation_kwargs, chat_template_kwargs) hold in evaluations, too, except vLLM's generation_kwargs
        eval_every: steps between evaluations; 0: only at the end
        eval_prompts: held-out prompts of each evaluation
        eval_samples: completions per prompt in the final evaluation; 2 while training
        output: folder of the run; default: a new one, runs/<task>-<method>-<seed>-<n>
        save_every: steps between checkpoints to resume from; 0: none
        keep_rollouts: write the rollouts of every k-th step; 0: none
        report: write report.html at the end
        report_to: tracker of TRL: none, trackio or wandb
        threads: torch threads on CPU; more than one is slower on a shared machine
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    # Task, model and data.
    task: Literal["digits", "digits_twice", "digits_long", "fields", "invoices", "confidence", "two_attempts", "own"] = (
        "digits"
    )
    start: Literal["easy", "hard"] = "easy"
    start_seed: int = Field(0, ge=0, le=LARGEST_SEED)
    start_steps: int | None = Field(None, ge=1)
    fields: int = Field(8, ge=1, le=16)
    model: str | None = None
    dataset: str | None = None
    split: str = "train"
    question_column: str = "question"
    prompt_column: str | None = None
    answer_column: str | None = "answer"
    instruction: str | None = None

    # Rule of credit.
    method: str = "bae"
    calibration: Literal["brier", "log_score"] | None = None
    baseline: Literal["none", "batch", "group", "outcome", "blended"] | None = None
    layout: dict[str, str | list[str]] | None = None
    segmenter: str = "tags"
    most: int | None = Field(None, ge=1)
    prefilled: str | None = None
    objectives: list[dict[str, Any]] | None = None
    per: str | float | None = None
    values: Literal["shared", "objective"] | None = None
    verifier: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    refine: str | dict[str, Any] | None = None

    # Training loop.
    steps: int = Field(120, ge=1)
    prompts: int = Field(16, ge=1)
    group_size: int = Field(16, ge=2)
    mini_batches: int = Field(1, ge=1)
    micro_batch: int | None = Field(None, ge=1)
    learning_rate: float = Field(4e-4, gt=0, le=1)
    warmup_steps: int = Field(10, ge=0)
    clip: float = Field(0.2, gt=0, le=1)
    entropy: float = Field(0.04, ge=0, le=10)
    entropy_target: float | None = Field(0.2, ge=0)
    temperature: float = Field(1.0, ge=0.01, le=100)
    max_completion_length: int | None = Field(None, ge=2)
    seed: int = Field(0, ge=0, le=LARGEST_SEED)
    trainer: dict[str, Any] = Field(default_factory=dict)

    # Evaluation and files.
    eval_every: int = Field(10, ge=0)
    eval_prompts: int = Field(512, ge=1)
    eval_samples: int = Field(8, ge=1)
    output: str | None = None
    save_every: int = Field(0, ge=0)
    keep_rollouts: int = Field(1, ge=0)
    report: bool = True
    report_to: str = "none"
    threads: int = Field(1, ge=1)

    @field_validator("method")
    @classmethod
    def _known_method(cls, name: str) -> str:
        return method(name).name  # pydantic reports a RecipeError together with other faults

    @field_validator("layout", mode="before")
    @classmethod
    def _marked_by_name(cls, written: Any) -> Any:
        is_list_of_names = isinstance(written, list) and all(isinstance(name, str) for name in written)
        return {name: [name] for name in written} if is_list_of_names else written

    @field_validator("verifier")
    @classmethod
    def _known_limits(cls, limits: dict[str, Any]) -> dict[str, Any]:
        for name, limit in limits.items():
            check_known("field of verifier", name, ("workers", "deadline"))
            number_type, type_text = (int, "a whole number") if name == "workers" else (int | float, "a number of seconds")
            if isinstance(limit, bool) or not isinstance(limit, number_type):
                raise ValueError(f"verifier.{name} is {limit!r}, but must be {type_text}.")
        MathVerifier(**limits)  # let the constructor refuse wrong limits; it starts no worker process yet
        return limits

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_is_a_bool(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and info.field_name != "report":
            raise ValueError(
                f"{info.field_name} cannot be {str(value).lower()}; only the field report can be true or false."
            )
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        for name, section in (self.model_extra or {}).items():
            if not is_registered(name, kind="mode"):
                raise RecipeError(_no_field(name))
            if not isinstance(section, Mapping | None):
                raise RecipeError(f"{name} is {section!r}, but must be {_KINDS['dict']} ({MODES[name].about})")
        _ = self.modes, self.refinement  # reading `modes` and `refinement` checks the recipe's sections
        if self.task not in EMBEDDED:
            for field in () if self.task == SCRIPT else ("model", "dataset"):
                if getattr(self, field) is None:
                    raise ValueError(f"Task '{self.task}' needs a {field}; add --{field} with a hub name or a folder.")
        elif self.model or self.dataset:
            raise ValueError(
                f"You named a model or a dataset, but task '{self.task}' has its own. To use yours, add --task confidence."
            )
        if self.task == SCRIPT and self.layout is None:
            raise ValueError(f"Task '{SCRIPT}' has no layout of its own; add the layout of its completions to the recipe.")
        for field, tasks in _USED_BY.items():
            field_value = getattr(self, field)
            if self.task not in tasks and field_value != type(self).model_fields[field].default:
                raise ValueError(f"Task '{self.task}' does not use {field} (got {field_value!r}); leave {field} out.")
        batch_size = self.prompts * self.group_size
        if batch_size % self.mini_batches or (batch_size // self.mini_batches) % (self.micro_batch or 1):
            raise ValueError(
                f"A batch has {self.prompts} prompts x {self.group_size} completions = {batch_size} completions. They cannot be "
                f"split into {self.mini_batches} equal mini-batches with micro-batches of "
                f"{self.micro_batch or batch_size // self.mini_batches} completions. Choose mini_batches and micro_batch so that "
                f"their product divides {batch_size}."
            )
        return self

    @cached_property
    def modes(self) -> dict[str, Any]:
        """The recipe's modes (optional features), by name."""
        section_by_name = self.model_extra or {}
        return {name: MODES[name].of(section_by_name[name]) for name in MODES if section_by_name.get(name) is not None}

    @cached_property
    def refinement(self) -> Refinement | None:
        """The stage that changes the tokens' advantages after the method. None if there is none."""
        return None if self.refine is None else Refinement.of(self.refine)

    @cached_property
    def own_layout(self) -> Layout | None:
        """The layout that the recipe names. None if it leaves the layout to the task."""
        if self.layout is None:
            return None
        return Layout(self.layout, prefilled=self.prefilled, segmenter=self.segmenter, most=self.most or 16)

    @property
    def scheme_modes(self) -> tuple[Mode, ...]:
        """The recipe's modes (optional features) that are part of its `Scheme`, the rule of credit."""
        return tuple(mode for mode in self.modes.values() if mode.in_scheme)

    @property
    def is_scored(self) -> bool:
        """Whether a mode of the recipe gives completions a score."""
        return any(mode.judge is not None for mode in self.modes.values())

    @property
    def rule(self) -> Literal["brier", "log_score"]:
        """The scoring rule for confidences. Objectives name it, else `calibration`, else it is Brier."""
        reward_names = [objective_entry.get("reward") for objective_entry in self.objectives or ()]
        if "log_score" in reward_names:
            return "log_score"
        return "brier" if "brier" in reward_names else self.calibration or "brier"

    @property
    def answer_tags(self) -> dict[str, str]:
        """The tags that hold the answer and the confidence. Objectives name the tags in their option `tag`."""
        tag_by_role = {"answer": "answer", "confidence": "confidence"}
        role_of_reward = {"correct": "answer", "brier": "confidence", "log_score": "confidence"}
        for objective_entry in self.objectives or ():
            if (role := role_of_reward.get(str(objective_entry.get("reward")))) is not None:
                tag_by_role[role] = (objective_entry.get("options") or {}).get("tag", role)
        return tag_by_role


def _parse_descriptions(docstring: str | None) -> dict[str, str]:
    """Read the description of each attribute from the section `Attributes` of a docstring."""
    _, _, attributes_text = cleandoc(docstring or "").partition("Attributes:")
    attribute_entries = re.split(r"\n {4}(?=\w)", attributes_text)
    return {name: " ".join(text.split()) for name, _, text in (entry.partition(": ") for entry in attribute_entries[1:])}


for _name, _description in _parse_descriptions(Recipe.__doc__).items():
    Recipe.model_fields[_name].description = _description


def load(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe file, apply overrides, and check everything that can be checked without a model."""
    file_settings = {} if path is None else read_file(path)
    changed_settings = dict(overrides or {})
    _check_presets(file_settings, changed_settings)
    settings = {**file_settings, **changed_settings}
    if "task" not in settings and (settings.get("model") or settings.get("dataset")):
        settings["task"] = "confidence"
    if settings.get("task", EMBEDDED[0]) not in EMBEDDED:
        settings = {**HUB, **settings}
    try:
        return Recipe.model_validate(settings)
    except ValidationError as error:
        raise RecipeError(_explain(error)) from error


def read_file(path: str | Path) -> dict[str, Any]:
    """Read a recipe file as a dictionary. Its fields are not checked yet."""
    recipe_folder = Path(path).parent
    recipe_data = read_yaml(path, f"The recipe '{path}'")
    if recipe_data is not None and not isinstance(recipe_data, dict):
        raise RecipeError(f"The recipe '{path}' must hold 'field: value' lines, not a {type(recipe_data).__name__}.")
    # The paths in a run folder's copy of a recipe are not relative to that folder.
    is_run_folder = (recipe_folder / "metrics.jsonl").is_file()
    return dict(recipe_data or {}) if is_run_folder else _resolve_paths(recipe_data or {}, recipe_folder)


def _resolve_paths(written: Any, folder: Path, field: str = "") -> Any:
    """Resolve file and module paths in a recipe: in the current folder, then beside the recipe."""
    if isinstance(written, dict) and field in ("", "critic", "objectives"):
        return {key: _resolve_paths(value, folder, str(key)) for key, value in written.items()}
    if isinstance(written, list):
        return [_resolve_paths(list_entry, folder, field) for list_entry in written]
    if not isinstance(written, str):
        return written
    if field in ("reward", "given") and ":" in written:
        return seen_from_here(written, folder)
    is_path_field = field in ("model", "dataset") or (field == "criteria" and not is_column(written))
    is_beside_recipe = is_path_field and not Path(written).exists() and (folder / written).exists()
    return str(folder / written) if is_beside_recipe else written


def _no_field(key: str) -> str:
    """Return the error message for an unknown recipe field. Give advice if a method has an option of that name."""
    if any(key in method_entry.of_a_run().options for method_entry in METHODS.values()):
        return f"There is no recipe field '{key}'. It is an option of a method, so write options: {{{key}: ...}}."
    return unknown("recipe field", key, [*Recipe.model_fields, *MODES])


def _check_presets(from_file: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Refuse a change of `method`, `baseline` or `calibration` if other recipe fields undo part of its effect."""
    for field in ("method", "baseline", "calibration"):
        old_setting = from_file.get(field, Recipe.model_fields[field].default)
        if field not in changes or changes[field] == old_setting:
            continue
        preset_fields = ("objectives", "per") if field == "method" else ("objectives",)
        kept_fields = [name for name in preset_fields if from_file.get(name) is not None and name not in changes]
        if kept_fields:
            reset_text = " ".join(f"--set {name}=null" for name in kept_fields)
            raise RecipeError(
                f"The recipe sets {' and '.join(kept_fields)}, so {field}: {changes[field]} would not have its full effect. "
                f"Remove {' and '.join(kept_fields)} from the recipe file. Or add {reset_text} to the command."
            )


def scheme_of(
    recipe: Recipe, task_layout: Layout, longest: int, *, recorded: Collection[str] = (), run_code: bool = True
) -> Scheme:
    """Build the credit rule (`Scheme`) of a recipe. Import a function only if `run_code` is true and it is not `recorded`."""
    objective_entries = _task_objectives(recipe, task_layout) if recipe.objectives is None else recipe.objectives
    preset_options = {
        "name": recipe.method,
        "layout": _choose_layout(recipe, task_layout),
        "objectives": objective_entries
        and [_build_objective(position, entry, recorded, run_code) for position, entry in enumerate(objective_entries, 1)],
        **{field: getattr(recipe, field) for field in ("calibration", "baseline", "per", "values")},
        "modes": recipe.scheme_modes,
        "refine": recipe.refinement,
    }
    method(recipe.method).check_names(preset_options.keys() & recipe.options.keys())
    scheme = Scheme.preset(**preset_options, **recipe.options, longest=longest, recorded=recorded)
    return _apply_limits(scheme, recipe.verifier)


def _task_objectives(recipe: Recipe, layout: Layout) -> list[dict[str, Any]] | None:
    """Return the objectives of the tasks `fields` and `invoices`, one reward per JSON field, and None for other tasks."""
    if recipe.task not in ("fields", "invoices"):
        return None
    method_entry = method(recipe.method)
    credits_blocks = method_entry.kind == "block"
    rest_blocks = () if layout.rest is None else (layout.names[layout.rest],)
    shared_fields: dict[str, Any] = {"if_missing": 0.0}
    if "baseline" in method_entry.inputs:
        shared_fields["baseline"] = "group"
    field_block_names = (OWN, *rest_blocks) if credits_blocks else layout.names
    field_objective = {"reward": "equals", "each": "*", "pays": field_block_names, **shared_fields}
    if recipe.task == "fields":
        return [field_objective]  # JSON keys get credit, too, because a wrong key makes its field missing
    paid_block_names = rest_blocks if credits_blocks else layout.names
    if credits_blocks:
        # Let no field reward the block of keys and punctuation, because many fields would outweigh its own two rewards.
        field_objective |= {"pays": (OWN,), "if_missing": None}
    schema_options = {"schema": _invoice_schema(layout), "alone": True}
    return [
        field_objective,
        {"reward": "json_schema", "pays": paid_block_names, "options": schema_options, **shared_fields},
        {"reward": "count", "pays": paid_block_names, "options": {"path": "items"}, **shared_fields},
    ]


def _invoice_schema(layout: Layout) -> dict[str, Any]:
    json_paths = [path for _, marks in layout.blocks for path in marks]
    item_fields = [path.removeprefix("items[*].") for path in json_paths if "[" in path]
    schema_properties = {"items": {"items": {"type": "object", "required": item_fields}}}
    required_fields = [*(path for path in json_paths if "[" not in path), "items"]
    return {"type": "object", "required": required_fields, "properties": schema_properties}


def _apply_limits(scheme: Scheme, limits: Mapping[str, Any]) -> Scheme:
    """Pass the recipe's `verifier` limits to objectives that verify math. An objective's own limits win."""
    if not limits:
        return scheme
    verifying_rewards = [name for name in REWARDS if limits.keys() <= REWARDS[name].options.keys()]
    if not any(objective.reward in verifying_rewards for objective in scheme.objectives):
        raise RecipeError(
            f"No objective compares answers as mathematics, so verifier: {dict(limits)} does nothing. Leave verifier out."
        )
    objectives = (
        replace(objective, options={**limits, **objective.options}) if objective.reward in verifying_rewards else objective
        for objective in scheme.objectives
    )
    return replace(scheme, objectives=tuple(objectives))


class RecipeRule(NamedTuple):
    """A recipe and its scheme, for an engine that brings its own training settings."""

    recipe: Recipe
    scheme: Scheme


def rule_at(path: str | Path, *, longest: int, options: Mapping[str, Any] | None = None) -> RecipeRule:
    """Load a recipe file and build its credit rule (`Scheme`). Refuse a recipe without a layout.

    `options` are the engine's own settings: the method takes those that it has and that the recipe does not name.
    """
    recipe = load(path)
    if recipe.own_layout is None:
        raise RecipeError(
            f"The recipe '{path}' names no layout, so spanwise cannot find the blocks of completions; add for example "
            f"layout: {{solution: [answer], confidence: [confidence]}}."
        )
    method_options = METHODS.find(recipe.method).options
    used_options = {name: value for name, value in (options or {}).items() if name in method_options}
    recipe_with_options = recipe.model_copy(update={"options": {**used_options, **recipe.options}})
    return RecipeRule(recipe, scheme_of(recipe_with_options, recipe.own_layout, longest))


def scheme_at(path: str | Path, *, longest: int, options: Mapping[str, Any] | None = None) -> Scheme:
    """Build the credit rule (`Scheme`) of a recipe file. See `rule_at`."""
    return rule_at(path, longest=longest, options=options).scheme


def _choose_layout(recipe: Recipe, task_layout: Layout) -> Layout:
    if recipe.own_layout is not None:
        return recipe.own_layout
    segmenter = task_layout.segmenter if recipe.segmenter == "tags" else recipe.segmenter
    prefilled_tag = recipe.prefilled or task_layout.prefilled
    has_repeated_block = any("[*]" in name for name, _ in task_layout.blocks)
    max_repeats = recipe.most or task_layout.most
    if max_repeats != task_layout.most and not has_repeated_block:
        raise RecipeError(
            f"most is {max_repeats}, but no block of the layout is repeated (with [*], as in items[*]). Leave most out."
        )
    return Layout(dict(task_layout.blocks), prefilled=prefilled_tag, segmenter=segmenter, most=max_repeats)


def answer_layout(recipe: Recipe, task_layout: Layout) -> Layout:
    """Return the layout that finds the answers in completions. It is the recipe's or the task's."""
    used_layout = _choose_layout(recipe, task_layout)
    # The model writes the task's tags even if the recipe's layout has a single block.
    may_take_task_blocks = not used_layout.marks and (recipe.own_layout is None or recipe.task in EMBEDDED)
    if len(used_layout.names) == 1 and (may_take_task_blocks or used_layout.marks == task_layout.marks):
        segmenter = used_layout.segmenter if used_layout.marks else task_layout.segmenter
        return Layout(dict(task_layout.blocks), prefilled=used_layout.prefilled, segmenter=segmenter, most=task_layout.most)
    return used_layout


def check_written(recipe: Recipe, task_layout: Layout) -> None:
    """Refuse a layout with tags that the model of an embedded task has not learnt to write."""
    layout = recipe.own_layout
    task_tags = dict.fromkeys(task_layout.tags)
    recipe_tags = layout.tags if layout and layout.segmenter == "tags" else ()
    unknown_tags = [f"<{tag}>" for tag in recipe_tags if tag not in task_tags]
    if unknown_tags:
        raise RecipeError(
            f"The model of the embedded task '{recipe.task}' writes only {', '.join(f'<{tag}>' for tag in task_tags)}, "
            f"so no completion would hold {', '.join(unknown_tags)}. Use the task's tags, or train a model of your own "
            "(--model) on a --dataset."
        )


def resolved(recipe: Recipe, scheme: Scheme) -> dict[str, Any]:
    """Return the recipe as plain data, with its presets filled in. Loaded again, it gives the same run."""
    plain_scheme = scheme.plain()
    import_paths = [entry["reward"] for entry in recipe.objectives or () if ":" in str(entry["reward"])]
    function_by_path = {path: imported(path, what="The reward") for path in import_paths}
    for plain_objective, objective in zip(plain_scheme["objectives"], scheme.objectives, strict=True):
        for path, function in function_by_path.items():
            if function == objective.reward:  # write the function as its path in the recipe
                plain_objective["reward"] = path
    return {**recipe.model_dump(mode="json"), "calibration": None, "baseline": None, **plain_scheme}


def recorded_elsewhere(*, block: str = "", criteria: str = "", criterion: str = "", **_: Any) -> list[float]:
    """Stand in for a reward function whose rewards are in a file. Take the parameters that objectives may ask for."""
    raise RecipeError(
        "This reward is only recorded in a file, so it cannot be computed. To compute it, name its function in the recipe."
    )


def _build_objective(position: int, entry: Mapping[str, Any], recorded: Collection[str], run_code: bool) -> Objective:
    """Build an objective from its recipe entry. Import its function only if code may run and rewards are not recorded."""
    for field_name in entry:
        if field_name not in Objective.__dataclass_fields__:
            raise RecipeError(f"Objective {position}: {unknown('field', str(field_name), Objective.__dataclass_fields__)}")
    for field_name in ("reward", *(() if "each" in entry or "criteria" in entry else ("pays",))):
        if field_name not in entry:
            raise RecipeError(
                f"Objective {position} has no '{field_name}'; write for example {{reward: correct, pays: [solution]}}."
            )
    reward = entry["reward"]
    given_outcomes = entry.get("given") or ()
    outcome_names = [given_outcomes] if isinstance(given_outcomes, str) else given_outcomes
    import_paths = [name for name in outcome_names if ":" in str(name)]
    if isinstance(reward, str) and ":" in reward:
        objective_name = str(entry.get("name") or reward.rpartition(":")[2])
        if objective_name in recorded or ("each" in entry and any(r.startswith(f"{objective_name}.") for r in recorded)):
            entry = {**entry, "name": objective_name, "reward": recorded_elsewhere}
        elif run_code:
            entry = {**entry, "reward": imported(reward, what=f"Objective {position}: the reward")}
        else:
            import_paths = [reward, *import_paths]
    elif isinstance(reward, str) and reward in recorded and not is_registered(reward, kind="reward"):
        entry = {"name": reward, **entry, "reward": recorded_elsewhere}  # the rollout file has this reward as a column
    elif isinstance(reward, str) and recorded and not is_registered(reward, kind="reward"):
        raise RecipeError(f"Objective {position}: {unknown('reward', reward, [*recorded, *REWARDS])}")
    if import_paths and not run_code:
        raise RecipeError(
            f"Objective {position} needs the function '{import_paths[0]}'. spanwise does not run code just because the recipe in a "
            "run folder names it. If you trust the code, name the recipe: --recipe FILE."
        )
    return Objective(**entry)


def _explain(error: ValidationError) -> str:
    """Turn pydantic's validation error into sentences for users. Each has field, value, allowed values and purpose."""
    field_bounds: dict[tuple[str, str], list[str]] = {}
    faults = []
    for pydantic_error in error.errors():
        fault_type = pydantic_error["type"]
        wrong_value = pydantic_error["input"]
        fault_context = pydantic_error.get("ctx", {})
        # Leave out the names of types, which Pydantic adds to a field's path.
        field_path = ".".join(str(name) for name in pydantic_error["loc"] if name not in ("str", "float", "list[str]"))
        if fault_type == "invalid_key":
            faults.append(_no_field(field_path))
        elif fault_type == "value_error":
            faults.append(pydantic_error["msg"].removeprefix("Value error, "))
        elif fault_type == "literal_error":
            faults.append(unknown(field_path, wrong_value, re.findall(r"'([^']*)'", fault_context["expected"])))
        else:
            bound_texts = [f"{bound} {fault_context[name]}" for name, bound in _BOUNDS.items() if name in fault_context]
            purpose_text = f" ({Recipe.model_fields[field_path].description})" if field_path in Recipe.model_fields else ""
            allowed_text = bound_texts[0] if bound_texts else _KINDS.get(fault_type.split("_")[0], pydantic_error["msg"])
            field_bounds.setdefault((f"{field_path} is {wrong_value!r}", purpose_text), []).append(allowed_text)
    faults += [f"{fault}, but must be {' or '.join(bounds)}{purpose}" for (fault, purpose), bounds in field_bounds.items()]
    return "; ".join(faults)


#: Maps Pydantic's names of bounds and types to words for error messages.
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most"}
_KINDS = {
    "int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false", "string": "text",
    "list": "a list", "dict": "'name: value' lines",
}  # fmt: skip
