"""Choose the methods that credit a rollout file. Adapt them to its blocks and rewards."""

import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from spanwise.commands.credit.blocks import Blocks, common_layout
from spanwise.credit import METHODS, Method, Preset, method
from spanwise.credit.registry import states_confidence
from spanwise.errors import DataError, LayoutError, RecipeError, SpanwiseError, check_known, refuse, unknown
from spanwise.layout import Layout
from spanwise.objective import BASELINES, Objective
from spanwise.recipe import Recipe, recorded_elsewhere, scheme_of
from spanwise.registry import is_registered
from spanwise.rollouts import RolloutTable, schema
from spanwise.rollouts.cells import is_number_text
from spanwise.rollouts.schema import RECORDED
from spanwise.scheme import Scheme
from spanwise.score import REWARDS
from spanwise.score.outcomes import judge_of
from spanwise.segment import census
from spanwise.segment.census import Census, census_of

#: The methods that are shown by default, beside the recipe's own.
USUAL = ("grpo", "rlcr", "bae")
#: Maps `Batch` fields with numbers per token to their names in error messages.
PER_TOKEN = {"value_nt": "values of a critic", "logp_nt": "log-probabilities"}


@dataclass(frozen=True)
class Arms:
    """The methods that `spanwise credit` applies to a rollout file, and the columns that hold their rewards."""

    layout: Layout  # the blocks that the recipe names, or that were found in the completions
    schemes: dict[str, Scheme]
    own: str | None  # The key of the recipe's own method in `schemes`; None if `schemes` lacks the method.
    recorded_columns: Mapping[str, str]  # Maps each objective to the column with its reward.
    notes: list[str]

    @property
    def objectives(self) -> list[Objective]:
        """The objectives of all methods. An objective names a reward and the blocks that get the reward's credit."""
        return [objective for scheme in self.schemes.values() for objective in scheme.objectives]


def choose_arms(
    table: RolloutTable,
    recipe: Recipe,
    blocks: Blocks,
    methods: Sequence[str] = (),
    rewards: Mapping[str, str] | None = None,
    *,
    texts: Sequence[str],
    must_fit: bool,
    run_code: bool,
) -> Arms:
    """Choose the credit methods to apply to a rollout file. The default is the usual ones and the recipe's, if they fit."""
    # An objective's `reward` may name a column of the rollout file instead of a registered reward.
    column_by_objective = {
        str(objective_entry["name"]): objective_entry["reward"]
        for objective_entry in recipe.objectives or ()
        if {"name", "reward"} <= objective_entry.keys() and objective_entry["reward"] in table.rewards
        if not is_registered(objective_entry["reward"], kind="reward")
    } | dict(rewards or {})
    recorded_columns = choose_columns(table, column_by_objective)
    if blocks.no_verdict and "correct" in recorded_columns:
        blocks = replace(blocks, no_verdict="")
    elif blocks.no_verdict and common_layout(texts):
        blocks = replace(blocks, no_verdict=f"{blocks.no_verdict}{advise_tagless(table, texts)}")
    own_scheme_or_error: Scheme | SpanwiseError
    wants_summed_rewards = table.folder is None and recipe.objectives is None and "correct" not in column_by_objective
    summed_rewards = _summed_rewards(table, recorded_columns) if wants_summed_rewards else ()
    scheme_builder = _SchemeBuilder(recipe, blocks, recorded_columns, blocks.objectives, summed_rewards)
    own_method_name = "recipe"
    try:
        own_method_name, own_scheme_or_error, scheme_builder = _build_own(scheme_builder, run_code)
    except (RecipeError, LayoutError) as error:
        if must_fit:
            raise
        own_scheme_or_error = error
    schemes: dict[str, Scheme] = {}
    methods_by_reason: dict[str, list[str]] = {}
    last_error: SpanwiseError | None = None
    for requested_name in [name for name in methods if name != RECORDED] if methods else (*USUAL, "recipe"):
        method_name = own_method_name if requested_name == "recipe" else requested_name
        try:
            scheme = own_scheme_or_error if method_name == own_method_name else scheme_builder.build_for_file(method_name)
            if not isinstance(scheme, Scheme):
                raise scheme
            check_file(scheme, table)
            _check_answers(scheme, recorded_columns, table)
        except (RecipeError, LayoutError, DataError) as error:
            if methods or (must_fit and requested_name == "recipe"):
                raise
            last_error = error
            methods_by_reason.setdefault(str(error), []).append(requested_name)
            continue
        if methods or method_name in USUAL or scheme not in schemes.values():
            schemes[method_name] = scheme
    if last_error is not None and not schemes:
        raise last_error
    objective_names = dict.fromkeys(objective.name for scheme in schemes.values() for objective in scheme.objectives)
    objective_names = objective_names or ["correct"]  # without a method, the report uses only the reward `correct`
    for objective in column_by_objective:
        check_known("objective", objective, objective_names)
    left_out_notes = (left_out_note(method_names, reason) for reason, method_names in methods_by_reason.items())
    notes = [blocks.note, *left_out_notes]
    if table.source == "TRL" and len(summed_rewards) > 1 and any(x.names == summed_rewards for x in schemes.values()):
        notes.append(
            "TRL's table does not tell rewards from numbers that a function logs with log_extra. So spanwise uses both as rewards. "
            "To choose the rewards, give --pay BLOCK=COLUMN. To choose one reward, give --reward correct=COLUMN."
        )
    if schemes and texts:
        default_required_methods = [own_method_name] if must_fit else []
        required_methods = schemes if methods else default_required_methods
        notes += _drop_tagless(schemes, table, texts, required=required_methods)
    return Arms(blocks.layout, schemes, own_method_name if own_method_name in schemes else None, recorded_columns, notes)


def left_out_note(names: Sequence[str], reason: str) -> str:
    """Say which methods are left out and why. The recipe's method is mentioned only if it is the only one."""
    method_names = [name for name in names if name != "recipe"] or ["the recipe's own method"]
    verb = "is" if len(method_names) == 1 else "are"
    return f"{' and '.join(method_names)} {verb} left out: {reason}"


def choose_columns(table: RolloutTable, rewards: Mapping[str, str]) -> dict[str, str]:
    """Map each objective to the column that holds its reward."""
    for objective, column in rewards.items():
        if column != "text" and column not in table.rewards:
            known_values = [value for value in table.columns.get(column, ()) if value is not None]
            wrong_values = [value for value in known_values if not (isinstance(value, int | float) or is_number_text(value))]
            column_place = f"column '{column}' of '{table.path}'"
            column_problem = f"{column_place} is empty"
            if known_values:
                column_problem = f"spanwise reads {column_place} as something else than a reward"
            if wrong_values:
                column_problem = f"{column_place} holds {reprlib.repr(wrong_values[0])}, which is no number"
            if column in table.columns:
                raise RecipeError(f"--reward {objective}={column}: {column_problem}.")
            if not table.rewards:
                raise RecipeError(f"--reward {objective}={column}: '{table.path}' records no rewards at all.")
            raise RecipeError(unknown(f"reward in '{table.path}' called", column, table.rewards))
    # Read the objective `correct` from recorded verdicts if there are any. `--reward correct=text` prevents this.
    column_by_objective = {"correct": table.verdict or "text", **{name: name for name in table.rewards}, **rewards}
    return {name: column for name, column in column_by_objective.items() if column != "text"}


def _summed_rewards(table: RolloutTable, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the rewards that the trainer added up, or () for a single reward that equals `correct`."""
    if "correct" not in columns or len(table.trained) != 1:
        return table.trained
    correct_reward_n = table.rewards[columns["correct"]].value_n.nan_to_num()
    trained_reward_n = table.rewards[table.trained[0]].value_n.nan_to_num()
    return () if torch.equal(correct_reward_n, trained_reward_n) else table.trained


def _check_answers(scheme: Scheme, columns: Mapping[str, str], table: RolloutTable) -> None:
    """Refuse a reward that needs gold answers which the file does not have."""
    for objective in scheme.objectives:
        if objective.name in columns or not isinstance(objective.reward, str):
            continue
        answer_column = {**REWARDS[objective.reward].options, **objective.options}.get("column")
        if answer_column is not None and not any(value is not None for value in table.columns.get(answer_column, ())):
            reward_option = f"--reward {objective.name}={next(iter(table.rewards), '')}"
            recorded_rewards_text = ", ".join(table.rewards)
            advice = f" You can also use a reward of the file ({recorded_rewards_text}). For example, add {reward_option}."
            other_column_may_fit = answer_column == "answer" and table.columns and not table.has_fixed_columns
            columns_hint = " If another column has the answers, give --columns answer=NAME." if other_column_may_fit else ""
            raise DataError(
                f"Reward '{objective.name}' needs gold answers, but '{table.path}' has no column '{answer_column}'. "
                f"Add the column '{answer_column}'.{advice if table.rewards else ''}{columns_hint}"
            )


@dataclass(frozen=True)
class _SchemeBuilder:
    """Builds the schemes of methods for the blocks and rewards of one rollout file."""

    recipe: Recipe
    blocks: Blocks
    recorded_columns: Mapping[str, str]
    objectives: tuple[Objective, ...] | None
    summed: tuple[str, ...]  # the rewards that methods for whole completions add up

    def with_each_baseline(self) -> Iterator[tuple[str, Scheme]]:
        """Yield the recipe's method without a baseline, then with each baseline that suits method and objectives."""
        for name in (self.recipe.method, *(f"{self.recipe.method}:{baseline}" for baseline in BASELINES)):
            with suppress(RecipeError, LayoutError):
                yield name, self.build(name)

    def build_for_file(self, name: str) -> Scheme:
        """Build the `Scheme` named `method` or `method:baseline`. Refuse a method that cannot work on a rollout file."""
        METHODS.load_plugins()
        entry = METHODS.get(name.partition(":")[0])
        if entry is None:
            raise RecipeError(unknown("method", name, [*METHODS, "recipe", RECORDED]))
        if ":" in name and "baseline" not in entry.inputs:
            raise RecipeError(f"Method '{entry.name}' takes no baseline; use '{entry.name}' alone, or use 'bae'.")
        if missing_inputs := [need for need in entry.needs if need not in ("mask_nt", "length_n", *PER_TOKEN)]:
            raise RecipeError(
                f"Method '{entry.name}' cannot be applied to a rollout file: it needs {', '.join(missing_inputs)}, which no "
                f"file format holds. Call spanwise.credit.{entry.estimator.__name__} from Python."
            )
        return self.build(name)

    def build(self, name: str, **changes: Any) -> Scheme:
        """Build the preset `method` or `method:baseline` for the file's blocks and objectives."""
        method_name, _, baseline = name.partition(":")
        if baseline and baseline not in BASELINES:
            raise RecipeError(f"Baseline '{baseline}' of '{name}' does not exist; choose from {', '.join(BASELINES)}.")
        method_entry = method(method_name)
        layout = self.blocks.layout
        objectives = self.objectives
        pays_calibration = (method_entry.preset or Preset()).calibrated
        scheme_fields: dict[str, Any] = {"baseline": baseline or None}
        if method_entry.kind == "completion" and not pays_calibration and self.summed:
            objectives = tuple(Objective(recorded_elsewhere, layout.names, name=name) for name in self.summed)
        elif self.blocks.no_verdict:
            raise RecipeError(self.blocks.no_verdict)
        if objectives is not None:
            if objectives is self.blocks.objectives and not pays_calibration:
                # Drop the reward for the stated confidence unless the method uses it.
                objectives = tuple(objective for objective in objectives if judge_of(objective) is None)
            scheme_fields = {"objectives": _adapt_objectives(method_entry, objectives, layout.names, baseline)}
        elif pays_calibration and states_confidence(layout):
            scheme_fields["calibration"] = self.recipe.rule
        method_options = self.recipe.options if method_name == self.recipe.method else {}
        preset_fields = {**scheme_fields, **method_options, **changes}
        return Scheme.preset(
            method_name, layout, **preset_fields, longest=self.blocks.longest, recorded=self.recorded_columns
        )


def _build_own(builder: _SchemeBuilder, run_code: bool) -> tuple[str, Scheme, _SchemeBuilder]:
    """Return the name and the scheme (credit rule) of the recipe's method, and the builder for schemes of other methods."""
    recipe = builder.recipe
    blocks = builder.blocks
    if blocks.objectives is None:
        scheme = scheme_of(recipe, blocks.layout, blocks.longest, recorded=builder.recorded_columns, run_code=run_code)
        method_presets = builder.with_each_baseline()
        if recipe.objectives is not None and all(preset.objectives != scheme.objectives for _, preset in method_presets):
            blocks = replace(blocks, layout=scheme.layout)
            builder = replace(builder, blocks=blocks, objectives=tuple(scheme.objectives))
        method_presets = builder.with_each_baseline()
        return next((name for name, preset in method_presets if preset == scheme), "recipe"), scheme, builder
    preset_name = f"{recipe.method}:{recipe.baseline}" if recipe.baseline else recipe.method
    recipe_fields = {"per": recipe.per, "values": recipe.values, "refine": recipe.refinement, "modes": recipe.scheme_modes}
    recipe_fields = {name: value for name, value in recipe_fields.items() if value}
    return "recipe" if recipe_fields else preset_name, builder.build(preset_name, **recipe_fields), builder


def token_columns(scheme: Scheme) -> dict[str, list[str]]:
    """Map `Batch` fields (values, log-probabilities) to the columns that a method reads."""
    columns_by_field = {"value_nt": schema.value_columns(scheme.value_names), "logp_nt": [schema.LOGP]}
    return {field: columns for field, columns in columns_by_field.items() if field in scheme.needs}


def check_file(scheme: Scheme, table: RolloutTable) -> None:
    """Refuse a method that cannot work with the rows and columns of a file."""
    has_split_rollouts = table.has_split_rollouts
    refuse({
        f"Method '{scheme.method}' needs each rollout in one row, but rollouts of '{table.path}' have several rows "
        "(branches). Use a method that needs rewards only (grpo, rlcr, bae).": has_split_rollouts and scheme.entry.kind == "token",
        f"The field `refine` needs each rollout in one row, but rollouts of '{table.path}' have several. Remove `refine`.": (
            has_split_rollouts and scheme.refine is not None
        ),
    })  # fmt: skip
    for mode in scheme.modes:
        mode.recorded(table, ())
    columns_by_field = token_columns(scheme)
    missing_fields = [field for field, columns in columns_by_field.items() if set(columns) - table.token_values.keys()]
    if not missing_fields:
        fields_of_modes = {name for mode in scheme.modes for name in mode.adds}
        turn_fields = set() if table.rollout_n is None else {"steps"}
        scheme.check({"ids_nt", *columns_by_field, *fields_of_modes, *turn_fields}, at_read=scheme.reads)
        return
    critic_names = [name.partition("/")[2] for name in table.token_values if name.startswith(schema.VALUES)]
    needed_values_text = ""
    present_values_text = "none of them" if table.has_ids else "no token ids"
    columns_text = " and ".join(name for columns in columns_by_field.values() for name in columns)
    advice = f"Use a method that needs rewards only (grpo, rlcr, bae), or a file with the columns {columns_text}"
    if critic_names and missing_fields == ["value_nt"]:
        present_values_text = f"only values for {', '.join(critic_names)}" if critic_names != [""] else "only one value"
        needed_values_text = f" for {', '.join(scheme.value_names)}"
        advice = "Use the recipe that the critic was trained with, because its objectives and `values` fit the critic"
    missing_fields_text = " and ".join(PER_TOKEN[field] for field in missing_fields)
    raise RecipeError(
        f"Under method '{scheme.method}', every token needs {missing_fields_text}{needed_values_text}, but '{table.path}' holds "
        f"{present_values_text}. {advice}."
    )


def _adapt_objectives(
    entry: Method, objectives: Sequence[Objective], block_names: tuple[str, ...], baseline: str
) -> tuple[Objective, ...]:
    """Adapt the rewarded blocks, outcomes, baseline and scale of each objective to a method."""
    pays_calibration = (entry.preset or Preset()).calibrated
    if pays_calibration and len(objectives) == 1 and entry.kind != "block":
        raise RecipeError(
            f"Method '{entry.name}' adds up several objectives, but the only one is '{objectives[0].name}'; use grpo."
        )
    credits_blocks = entry.kind == "block"
    takes_baseline = "baseline" in entry.inputs
    adapted_objectives = []
    for objective in objectives:
        judge_name = judge_of(objective)
        fitting_baseline = (baseline or "outcome") if objective.given else "group"
        used_baseline = fitting_baseline if takes_baseline else None
        verdict_outcomes = tuple(outcome for outcome in objective.given if outcome == judge_name)
        outcomes = objective.given if used_baseline in ("outcome", "blended") else verdict_outcomes
        all_blocks = tuple(dict.fromkeys((*objective.pays, *block_names)))
        paid_blocks = objective.pays if credits_blocks else all_blocks  # the summed reward pays every block
        new_fields = {"pays": paid_blocks, "given": outcomes, "baseline": used_baseline, "scale": None, "back_off": None}
        if entry.kind == "completion" and objective.reward == "equals" and objective.if_missing is None:
            # A sum needs a number in place of each missing reward.
            new_fields["if_missing"] = 0.0
        adapted_objectives.append(replace(objective, **new_fields))
    if baseline and not any(objective.given for objective in objectives):
        raise RecipeError(
            f"No objective sets `given`, so the baseline '{baseline}' would change nothing. Leave the baseline out."
        )
    return tuple(adapted_objectives)


def _drop_tagless(
    schemes: dict[str, Scheme], table: RolloutTable, texts: Sequence[str], *, required: Collection[str]
) -> list[str]:
    """Remove the methods that need a tag which no completion has. Return sentences that say so."""
    layouts = dict.fromkeys(scheme.layout for scheme in schemes.values())
    census_by_sentence = {count.sentence: count for layout in layouts for count in census_of(layout, texts)}
    tag_counts = [count for count in census_by_sentence.values() if count.lacking]
    if not tag_counts:
        return []
    tag_notes = [f"{count.sentence} The layout in use contains {count.lacking_text}." for count in tag_counts]
    # If no completion has a reward's tag, the reward would count all of them as wrong.
    missing_tags_by_method: dict[str, list[str]] = {}
    missing_sentences: list[str] = []
    for count in tag_counts:
        tags_by_method = {name: tags for name, scheme in schemes.items() if (tags := _missing_tags(scheme, count))}
        missing_tags_by_method |= tags_by_method
        if missing_tags := dict.fromkeys(tag for tags in tags_by_method.values() for tag in tags):
            missing_sentences.append(census(texts, missing_tags, segmenter=count.segmenter).sentence)
    if not missing_tags_by_method:
        return tag_notes
    tags_sentence = " ".join(dict.fromkeys(missing_sentences))
    if len(missing_tags_by_method) == len(schemes) or any(name in required for name in missing_tags_by_method):
        advice = advise_tagless(table, texts, next(iter(schemes.values())).names[0])
        methods_text = " and ".join(missing_tags_by_method)
        raise RecipeError(f"{methods_text} cannot be applied to '{table.path}': {tags_sentence}{advice}")
    for name in missing_tags_by_method:
        del schemes[name]
    return [left_out_note(list(missing_tags_by_method), tags_sentence), *tag_notes]


def advise_tagless(table: RolloutTable, texts: Sequence[str], name: str = "correct") -> str:
    """Say what to do if completions lack the layout's tags. The options in the text can be copied."""
    rewards_text = f" The file records {', '.join(table.rewards)}." if table.rewards else ""
    layout_note = f" (most completions have the layout {layout})" if (layout := common_layout(texts)) else ""
    if table.rewards:
        options_text = f"--methods grpo --reward {name}={table.verdict or next(iter(table.rewards))}"
    else:
        example_objective = '{reward: correct, pays: [completion], options: {tag: ""}}'
        layout_options = "--set segmenter=tags --set 'layout={completion: []}'"
        options_text = f"--methods recipe {layout_options} --set 'objectives=[{example_objective}]'"
    return (
        f"{rewards_text} Give the layout of the completions with --set layout=...{layout_note}, or credit whole "
        f"completions with {options_text}"
    )


def _missing_tags(scheme: Scheme, tag_census: Census) -> list[str]:
    """Return the tags that a method needs but no completion has."""
    layout = scheme.layout
    keys_read_by_rewards: set[str] = set()
    for objective in scheme.objectives:
        if objective.name not in scheme.recorded and isinstance(objective.reward, str):
            reward_entry = REWARDS[objective.reward]
            keys_read_by_rewards.update({**reward_entry.options, **objective.options}[name] for name in reward_entry.tags)
    layout_parts = layout.parts_of(tag_census.segmenter)
    needed_parts = [part for part in layout_parts if part.key and part.key in keys_read_by_rewards]
    if scheme.entry.kind == "block" and len(layout.names) > 1:
        paid_blocks = {name for objective in scheme.objectives for name in objective.pays}
        seen_blocks = {part.block for part in layout_parts if tag_census.count(part.mark)}
        unseen_parts = [part for part in layout_parts if part.block not in seen_blocks and not part.index]
        needed_parts += [part for part in unseen_parts if layout.names[part.block] in paid_blocks]
    needed_tags = dict.fromkeys(part.mark for part in layout_parts if part in needed_parts)
    return [mark for mark in needed_tags if tag_census.count(mark) == 0]
