"""Choose the methods for a rollout file, each as a scheme with its blocks and rewards, as far as they fit the file."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from spanwise.commands.credit.blocks import Blocks, made_of
from spanwise.credit import METHODS, Method, Preset, method, states_confidence
from spanwise.errors import DataError, LayoutError, RecipeError, SpanwiseError, unknown
from spanwise.layout import Layout
from spanwise.objective import BASELINES, Objective
from spanwise.recipe import Recipe, recorded_elsewhere, scheme_of
from spanwise.registry import is_registered
from spanwise.rollouts import RolloutTable, schema
from spanwise.rollouts.schema import RECORDED
from spanwise.scheme import Scheme
from spanwise.score import REWARDS, judge_of
from spanwise.segment import Census, census, census_of

#: The methods shown beside the recipe's own if the user names none.
USUAL = ("grpo", "rlcr", "bae")
#: Fields of a `Batch` that a file may hold -> their names in a sentence.
PER_TOKEN = {"value_nt": "values of a critic", "logp_nt": "log-probabilities"}


@dataclass(frozen=True)
class Arms:
    """The methods that a file is credited by."""

    layout: Layout  # the blocks that the recipe names, or that the file shows
    schemes: dict[str, Scheme]
    own: str | None
    taken: Mapping[str, str]
    notes: list[str]

    @property
    def objectives(self) -> list[Objective]:
        """The objectives of all methods."""
        return [objective for scheme in self.schemes.values() for objective in scheme.objectives]


def choose_arms(
    table: RolloutTable,
    recipe: Recipe,
    blocks: Blocks,
    methods: Sequence[str] = (),
    rewards: Mapping[str, str] | None = None,
    *,
    texts: Sequence[str],
    given: bool,
    run_code: bool,
) -> Arms:
    """Choose the requested methods, or else the usual methods and the recipe's own, and keep those that fit the file."""
    # An objective with a name of its own may be paid by a column under another.
    columns = [(entry["name"], entry["reward"]) for entry in recipe.objectives or () if {"name", "reward"} <= entry.keys()]
    rewards = {
        str(name): column for name, column in columns if column in table.rewards and not is_registered(column, kind="reward")
    } | dict(rewards or {})
    taken = taken_rewards(table, rewards)
    if blocks.lack:
        advice = remedy(table, texts) if made_of(texts) else ""
        blocks = replace(blocks, lack="" if "correct" in taken else f"{blocks.lack}{advice}")
    own_scheme: Scheme | SpanwiseError
    unsaid = table.folder is None and recipe.objectives is None and "correct" not in rewards
    presets, own_name = _Presets(recipe, blocks, taken, blocks.objectives, _summed(table, taken) if unsaid else ()), "recipe"
    try:
        own_name, own_scheme, presets = _own(presets, run_code)
    except (RecipeError, LayoutError) as error:
        if given:
            raise
        own_scheme = error
    schemes: dict[str, Scheme] = {}
    reasons: dict[str, list[str]] = {}
    failure: SpanwiseError | None = None
    for wanted in [name for name in methods if name != RECORDED] if methods else (*USUAL, "recipe"):
        name = own_name if wanted == "recipe" else wanted
        try:
            scheme = own_scheme if name == own_name else presets.asked(name)
            if not isinstance(scheme, Scheme):
                raise scheme
            check_file(scheme, table)
            _check_answers(scheme, taken, table)
        except (RecipeError, LayoutError, DataError) as error:
            if methods or (given and wanted == "recipe"):
                raise
            failure = error
            reasons.setdefault(str(error), []).append(wanted)
            continue
        if methods or name in USUAL or scheme not in schemes.values():
            schemes[name] = scheme
    if failure is not None and not schemes:
        raise failure
    names = dict.fromkeys(objective.name for scheme in schemes.values() for objective in scheme.objectives)
    for objective in rewards:
        if objective not in names:
            raise RecipeError(unknown("objective", objective, names))
    notes = [blocks.note, *(left_out(left_names, reason) for reason, left_names in reasons.items())]
    if schemes and texts:
        notes += _leave_out_tagless(schemes, table, texts, must=schemes if methods else [own_name] if given else [])
    return Arms(blocks.layout, schemes, own_name if own_name in schemes else None, taken, notes)


def left_out(names: Sequence[str], reason: str) -> str:
    """Say which methods do not fit, and why; the recipe's own method is named only if no other has the same reason."""
    methods = [name for name in names if name != "recipe"] or ["the recipe's own method"]
    return f"{' and '.join(methods)} {'is' if len(methods) == 1 else 'are'} left out: {reason}"


def taken_rewards(table: RolloutTable, rewards: Mapping[str, str]) -> dict[str, str]:
    """Return the recorded reward of each objective: the column that `rewards` names, or else the column of the same name."""
    for objective, column in rewards.items():
        if column != "text" and column not in table.rewards:
            cells = [value for value in table.columns.get(column, ()) if value is not None]
            reason = f"holds no numbers; it has {reprlib.repr(cells[0])}" if cells else "is empty"
            if column in table.columns:
                raise RecipeError(f"--reward {objective}={column}: that column of '{table.path}' {reason}.")
            if not table.rewards:
                raise RecipeError(f"--reward {objective}={column}: '{table.path}' records no rewards at all.")
            raise RecipeError(unknown(f"reward in '{table.path}' called", column, table.rewards))
    # The trainer's verdict is preferred to a verdict on the text; "text" asks for the text.
    chosen = {"correct": table.verdict or "text"} | {name: name for name in table.rewards} | dict(rewards)
    return {name: column for name, column in chosen.items() if column != "text"}


def _summed(table: RolloutTable, taken: Mapping[str, str]) -> tuple[str, ...]:
    """Return the recorded rewards whose sum the trainer compared; none if that sum is the verdict itself."""
    pair = [table.rewards[name].value_n.nan_to_num() for name in (taken.get("correct"), *table.trained) if name is not None]
    return () if "correct" in taken and len(pair) == 2 and torch.equal(*pair) else table.trained


def _check_answers(scheme: Scheme, taken: Mapping[str, str], table: RolloutTable) -> None:
    """Refuse a reward that needs gold answers which the file does not have."""
    for objective in scheme.objectives:
        name = objective.name
        options = {**REWARDS[objective.reward].options, **objective.options} if isinstance(objective.reward, str) else {}
        column = None if name in taken else options.get("column")
        if column is not None and not any(value is not None for value in table.columns.get(column, ())):
            problem = f"needs gold answers, but '{table.path}' has no column '{column}'"
            taken_from = f"--reward {name}={next(iter(table.rewards), '')}"
            advice = f"The file records {', '.join(table.rewards)}: take one with {taken_from}, or add the column."
            hint = f" If another column has them: --columns {column}=NAME." if column == "answer" and table.columns else ""
            raise DataError(f"Reward '{name}' {problem}. {advice if table.rewards else 'Add the column.'}{hint}")


def _own(presets: _Presets, run_code: bool) -> tuple[str, Scheme, _Presets]:
    """Build the recipe's own scheme and its shortest name, and the presets with the recipe's objectives and blocks."""
    recipe, blocks = presets.recipe, presets.blocks
    if blocks.objectives is None:
        scheme = scheme_of(recipe, blocks.layout, blocks.longest, recorded=presets.taken, run_code=run_code)
        usual = recipe.objectives is None or any(preset.objectives == scheme.objectives for _, preset in presets.alike())
        if not usual:
            blocks = replace(blocks, layout=scheme.layout)
            presets = replace(presets, blocks=blocks, objectives=tuple(scheme.objectives))
        return next((name for name, preset in presets.alike() if preset == scheme), "recipe"), scheme, presets

    name = f"{recipe.method}:{recipe.baseline}" if recipe.baseline else recipe.method  # on the file's blocks
    scheme = presets.of(name)
    if modes := recipe.scheme_modes:
        name, scheme = "recipe", replace(scheme, modes=modes)
    return name, scheme, presets


@dataclass(frozen=True)
class _Presets:
    """The presets on the blocks of a file; objectives of the file or the recipe replace those of a preset."""

    recipe: Recipe
    blocks: Blocks
    taken: Mapping[str, str]
    objectives: tuple[Objective, ...] | None
    summed: tuple[str, ...]  # the recorded rewards that a method of one number per completion adds up

    def alike(self) -> Iterator[tuple[str, Scheme]]:
        """Yield the presets of the recipe's method, with each baseline that fits."""
        for name in (self.recipe.method, *(f"{self.recipe.method}:{baseline}" for baseline in BASELINES)):
            with suppress(RecipeError, LayoutError):
                yield name, self.of(name)

    def asked(self, name: str) -> Scheme:
        """Build the scheme of `method` or `method:baseline`, if a file can be credited by it."""
        METHODS.load_plugins()
        entry = METHODS.get(name.partition(":")[0])
        if entry is None:
            raise RecipeError(unknown("method", name, [*METHODS, "recipe", RECORDED]))
        if ":" in name and "baseline" not in entry.inputs:
            raise RecipeError(f"Method '{entry.name}' takes no baseline; ask for '{entry.name}' alone, or for 'bae'.")
        if missing := [need for need in entry.needs if need not in ("mask_nt", "length_n", *PER_TOKEN)]:
            raise RecipeError(
                f"Method '{entry.name}' cannot be applied to a rollout file: it needs {', '.join(missing)}, which no format holds."
                f" Call spanwise.credit.{entry.estimator.__name__} from Python."
            )
        return self.of(name)

    def of(self, name: str) -> Scheme:
        """Build the preset `method` or `method:baseline` on the file's blocks, with the objectives of the file or of a recipe."""
        method_name, _, baseline = name.partition(":")
        if baseline and baseline not in BASELINES:
            raise RecipeError(f"Baseline '{baseline}' of '{name}' does not exist; choose from {', '.join(BASELINES)}.")
        entry, layout, objectives = method(method_name), self.blocks.layout, self.objectives
        calibrated = (entry.preset or Preset()).calibrated
        choices: dict[str, Any] = {"baseline": baseline or None}
        if entry.kind == "completion" and not calibrated and self.summed:
            objectives = tuple(Objective(recorded_elsewhere, layout.names, name=name) for name in self.summed)
        elif self.blocks.lack:
            raise RecipeError(self.blocks.lack)
        if objectives is not None:
            if objectives is self.blocks.objectives and not calibrated:
                # The user asked for no reward that mixes correctness and confidence.
                objectives = tuple(objective for objective in objectives if judge_of(objective) is None)
            choices = {"objectives": _compared(entry, objectives, layout.names, baseline)}
        elif calibrated and states_confidence(layout):
            choices["calibration"] = self.recipe.rule
        options = self.recipe.options if method_name == self.recipe.method else {}
        return Scheme.preset(method_name, layout, **{**choices, **options}, longest=self.blocks.longest, recorded=self.taken)


def token_columns(scheme: Scheme) -> dict[str, list[str]]:
    """Return the columns per token that a scheme reads, by the field of `Batch` that they fill."""
    names_by_field = {"value_nt": schema.value_columns(scheme.value_names), "logp_nt": [schema.LOGP]}
    return {field: names for field, names in names_by_field.items() if field in scheme.needs}


def check_file(scheme: Scheme, table: RolloutTable) -> None:
    """Refuse a scheme that needs values, log-probabilities or scores which the file lacks, or whole rollouts in one row."""
    if scheme.entry.kind == "token" and table.rollout_n is not None:
        raise RecipeError(
            f"Method '{scheme.method}' runs over the tokens of a rollout from its end, and rollouts of '{table.path}' are several "
            f"rows (branches). Use a method that needs rewards only (grpo, rlcr, bae)."
        )
    for mode in scheme.modes:
        mode.recorded(table, ())
    if scheme.refine is not None and table.rollout_n is not None:
        raise RecipeError(
            f"refine changes the tokens of whole completions, but rollouts of '{table.path}' have several rows. Leave refine out."
        )
    names_by_field, columns_there = token_columns(scheme), table.token_values
    missing = [field for field, names in names_by_field.items() if any(name not in columns_there for name in names)]
    if not missing:
        return
    streams = [name.partition("/")[2] for name in columns_there if name.startswith(schema.VALUES)]
    suffix, found_text = "", "none of them" if table.has_ids else "no token ids"
    columns = " and ".join(name for names in names_by_field.values() for name in names)
    advice = f"Use a method that needs rewards only (grpo, rlcr, bae), or a file with the columns {columns}"
    if streams and missing == ["value_nt"]:
        found_text = f"those of {', '.join(streams)}" if streams != [""] else "one value"
        suffix = f" for {', '.join(scheme.value_names)}"
        advice = "Use the recipe that the critic was trained under (its objectives and `values`)"
    raise RecipeError(
        f"Method '{scheme.method}' needs {' and '.join(PER_TOKEN[field] for field in missing)} of every token{suffix}, and "
        f"'{table.path}' holds {found_text}. {advice}."
    )


def _compared(
    chosen: Method, objectives: Sequence[Objective], names: tuple[str, ...], baseline: str
) -> tuple[Objective, ...]:
    """Return the objectives of a recipe with the comparison of a preset."""
    if (chosen.preset or Preset()).calibrated and len(objectives) == 1 and chosen.kind != "block":
        raise RecipeError(
            f"Method '{chosen.name}' adds up several objectives, but there is only '{objectives[0].name}'; use grpo."
        )
    by_block, compares = chosen.kind == "block", "baseline" in chosen.inputs
    compared = []
    for objective in objectives:
        judge = judge_of(objective)
        against = ((baseline or "outcome") if objective.given else "group") if compares else None
        judges = tuple(outcome for outcome in objective.given if outcome == judge)
        given = objective.given if against in ("outcome", "blended") else judges
        # A method that adds up objectives pays every block, the objective's own block first.
        pays = objective.pays if by_block else tuple(dict.fromkeys((*objective.pays, *names)))
        changes = {"pays": pays, "given": given, "baseline": against, "scale": None, "back_off": None}
        if chosen.kind == "completion" and objective.reward == "equals" and objective.if_missing is None:
            changes["if_missing"] = 0.0  # or a list of two would have no sum beside an objective of its third element
        compared.append(replace(objective, **changes))
    if baseline and not any(objective.given for objective in objectives):
        raise RecipeError(
            f"No objective of the recipe is given an outcome, so the baseline '{baseline}' would change nothing."
        )
    return tuple(compared)


def _leave_out_tagless(
    schemes: dict[str, Scheme], table: RolloutTable, texts: Sequence[str], *, must: Collection[str]
) -> list[str]:
    """Remove the schemes whose tags the file lacks; return sentences on these schemes and on parts that no completion has."""
    layouts = dict.fromkeys(scheme.layout for scheme in schemes.values())
    censuses = {count.sentence: count for layout in layouts for count in census_of(layout, texts)}
    incomplete = [count for count in censuses.values() if count.lacking]
    if not incomplete:
        return []
    notes = [f"{count.sentence} The layout asks for {'it' if len(count.lacking) == 1 else 'them'}." for count in incomplete]
    # Without its tag, a reward that reads the text would call every completion wrong.
    lost_marks = {name: marks for name, scheme in schemes.items() if (marks := _lacking_marks(scheme, incomplete[0]))}
    if not lost_marks:
        return notes
    needed = [mark for mark in incomplete[0].wanted if any(mark in marks for marks in lost_marks.values())]
    sentence = census(texts, needed, segmenter=incomplete[0].segmenter).sentence
    if len(lost_marks) == len(schemes) or any(name in must for name in lost_marks):
        advice = remedy(table, texts, next(iter(schemes.values())).names[0])
        raise RecipeError(f"{' and '.join(lost_marks)} cannot be applied to '{table.path}': {sentence}{advice}")
    for name in lost_marks:
        del schemes[name]
    return [left_out(list(lost_marks), sentence), *notes]


def remedy(table: RolloutTable, texts: Sequence[str], name: str = "correct") -> str:
    """Say what to do if tags are missing; the command in the sentence must run unchanged."""
    recorded_text = f" The file records {', '.join(table.rewards)}." if table.rewards else ""
    majority_text = f" (most are made of {layout})" if (layout := made_of(texts)) else ""
    advice = f"{recorded_text} Give the layout that they were sampled with{majority_text}, or credit whole completions with"
    if table.rewards:
        return f"{advice} --methods grpo --reward {name}={table.verdict or next(iter(table.rewards))}"
    objective = '{reward: correct, pays: [completion], options: {tag: ""}}'
    return f"{advice} --methods recipe --set 'layout={{completion: []}}' --set 'objectives=[{objective}]'"


def _lacking_marks(scheme: Scheme, seen: Census) -> list[str]:
    """Return the tags and tokens that a scheme needs and no completion has."""
    layout, keys = scheme.layout, set[str]()
    for objective in scheme.objectives:
        if objective.name not in scheme.recorded and isinstance(objective.reward, str):
            entry = REWARDS[objective.reward]
            options = {**entry.options, **objective.options}
            keys.update(options[name] for name in entry.tags)
    parts = layout.parts_of(seen.segmenter)
    needed = [part for part in parts if part.key and part.key in keys]
    if scheme.entry.kind == "block" and len(layout.names) > 1:
        paid = {name for objective in scheme.objectives for name in objective.pays}
        seen_blocks = {part.block for part in parts if seen.wanted.get(part.mark)}
        needed += [
            part for part in parts if layout.names[part.block] in paid and part.block not in seen_blocks and not part.index
        ]
    order = dict.fromkeys(part.mark for part in parts if part in needed)
    return [mark for mark in order if mark in seen.wanted and not seen.wanted[mark]]
