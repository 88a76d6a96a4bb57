"""Which methods are applied to a rollout file, each as a scheme: on which blocks, with which rewards, as far as they fit."""

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
from spanwise.rollouts import RolloutTable, schema
from spanwise.rollouts.schema import RECORDED
from spanwise.scheme import Scheme
from spanwise.score import REWARDS, judge_of
from spanwise.segment import Census, census, census_of

#: What is shown beside the recipe's own method when nothing else is asked for.
USUAL = ("grpo", "rlcr", "bae")
#: Fields of a `Batch` that a file may hold, in words.
PER_TOKEN = {"value_nt": "values of a critic", "logp_nt": "log-probabilities"}


@dataclass(frozen=True)
class Arms:
    """What a file is credited by.

    Attributes:
        layout: the blocks that the recipe names, or the file shows.
        schemes: name as the user wrote it, a method or `method:baseline` -> its rule.
        own: the name of the recipe as it stands, if it is one of them.
        taken: objective -> the recorded reward that it is taken from; the others are computed from the text.
        notes: sentences on the blocks, and on methods that do not fit the file.
    """

    layout: Layout
    schemes: dict[str, Scheme]
    own: str | None
    taken: Mapping[str, str]
    notes: list[str]

    @property
    def objectives(self) -> list[Objective]:
        """Those of all methods."""
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
    """The methods asked for, each once, else the usual ones and the recipe's own as far as they fit the file.

    `texts` is what the model wrote, where it has to show the blocks; a recipe that is `given` must fit.
    """
    rewards = rewards or {}
    taken = taken_rewards(table, rewards)
    if blocks.lack:
        helps = remedy(table, texts) if made_of(texts) else ""
        blocks = replace(blocks, lack="" if "correct" in taken else f"{blocks.lack}{helps}")
    own: Scheme | SpanwiseError
    unsaid = table.folder is None and recipe.objectives is None and "correct" not in rewards
    presets, own_name = _Presets(recipe, blocks, taken, blocks.objectives, _summed(table, taken) if unsaid else ()), "recipe"
    try:
        own_name, own, presets = _own(presets, run_code)
    except (RecipeError, LayoutError) as error:
        if given:
            raise
        own = error
    schemes: dict[str, Scheme] = {}
    reasons: dict[str, list[str]] = {}
    failure: SpanwiseError | None = None
    for asked in [name for name in methods if name != RECORDED] if methods else (*USUAL, "recipe"):
        name = own_name if asked == "recipe" else asked
        try:
            scheme = own if name == own_name else presets.asked(name)
            if not isinstance(scheme, Scheme):
                raise scheme
            check_file(scheme, table)
            _check_answers(scheme, taken, table)
        except (RecipeError, LayoutError, DataError) as error:
            if methods or (given and asked == "recipe"):
                raise
            failure = error
            reasons.setdefault(str(error), []).append(asked)
            continue
        if methods or name in USUAL or scheme not in schemes.values():
            schemes[name] = scheme
    if failure is not None and not schemes:
        raise failure
    names = dict.fromkeys(objective.name for scheme in schemes.values() for objective in scheme.objectives)
    for objective in rewards:
        if objective not in names:
            raise RecipeError(unknown("objective", objective, names))
    notes = [blocks.note, *(left_out(listed, reason) for reason, listed in reasons.items())]
    if schemes and texts:
        notes += _leave_out_tagless(schemes, table, texts, must=schemes if methods else [own_name] if given else [])
    return Arms(blocks.layout, schemes, own_name if own_name in schemes else None, taken, notes)


def left_out(names: Sequence[str], reason: str) -> str:
    """The sentence on methods that do not fit; the recipe's own is named only where no other has the same reason.

    >>> left_out(["rlcr", "bae", "recipe"], "There is no confidence.")
    'rlcr and bae are left out: There is no confidence.'
    """
    methods = [name for name in names if name != "recipe"] or ["the recipe's own method"]
    return f"{' and '.join(methods)} {'is' if len(methods) == 1 else 'are'} left out: {reason}"


def taken_rewards(table: RolloutTable, rewards: Mapping[str, str]) -> dict[str, str]:
    """Objective -> the recorded reward it is taken from: the one of its name, or the one that `rewards` gives.

    `correct` is also taken from the column that says right and wrong (`RolloutTable.verdict`): what a trainer has recorded goes
    before what the text would give. "text" in `rewards` means that it is computed all the same.
    """
    for objective, column in rewards.items():
        if column != "text" and column not in table.rewards:
            cells = [value for value in table.columns.get(column, ()) if value is not None]
            why = f"holds no numbers; it has {reprlib.repr(cells[0])}" if cells else "is empty"
            if column in table.columns:
                raise RecipeError(f"--reward {objective}={column}: that column of '{table.path}' {why}.")
            if not table.rewards:
                raise RecipeError(f"--reward {objective}={column}: '{table.path}' records no rewards at all.")
            raise RecipeError(unknown(f"reward in '{table.path}' called", column, table.rewards))
    chosen = {"correct": table.verdict or "text"} | {name: name for name in table.rewards} | dict(rewards)
    return {name: column for name, column in chosen.items() if column != "text"}


def _summed(table: RolloutTable, taken: Mapping[str, str]) -> tuple[str, ...]:
    """The recorded rewards that the trainer compared the sum of; none where that is what says right and wrong."""
    pair = [table.rewards[name].value_n.nan_to_num() for name in (taken.get("correct"), *table.trained) if name is not None]
    return () if "correct" in taken and len(pair) == 2 and torch.equal(*pair) else table.trained


def _check_answers(scheme: Scheme, taken: Mapping[str, str], table: RolloutTable) -> None:
    """Refuse a reward that can come from nowhere."""
    for objective in scheme.objectives:
        name = objective.name
        options = {**REWARDS[objective.reward].options, **objective.options} if isinstance(objective.reward, str) else {}
        column = None if name in taken else options.get("column")
        if column is not None and not any(value is not None for value in table.columns.get(column, ())):
            lack = f"needs the right answers, and '{table.path}' has none (no column '{column}')"
            taken_from = f"--reward {name}={next(iter(table.rewards), '')}"
            there = f"It records {', '.join(table.rewards)}: take one with {taken_from}, or add the column."
            named = f" If another column has them: --columns {column}=NAME." if column == "answer" and table.columns else ""
            raise DataError(f"Reward '{name}' {lack}. {there if table.rewards else 'Add the column.'}{named}")


def _own(presets: _Presets, run_code: bool) -> tuple[str, Scheme, _Presets]:
    """The recipe as it stands, under the shortest name that means the same, and the presets with its objectives and blocks."""
    recipe, blocks = presets.recipe, presets.blocks
    if blocks.objectives is None:
        scheme = scheme_of(recipe, blocks.layout, blocks.longest, recorded=presets.taken, run_code=run_code)
        usual = recipe.objectives is None or any(preset.objectives == scheme.objectives for _, preset in presets.alike())
        if not usual:
            blocks = replace(blocks, layout=scheme.layout)
            presets = replace(presets, blocks=blocks, objectives=tuple(scheme.objectives))
        return next((name for name, preset in presets.alike() if preset == scheme), "recipe"), scheme, presets

    name = f"{recipe.method}:{recipe.baseline}" if recipe.baseline else recipe.method  # the file's blocks, not the recipe's
    scheme = presets.of(name)
    if modes := recipe.scheme_modes:
        name, scheme = "recipe", replace(scheme, modes=modes)
    return name, scheme, presets


@dataclass(frozen=True)
class _Presets:
    """The presets on the blocks of a file; `objectives` of the file or the recipe take the place of those of a preset."""

    recipe: Recipe
    blocks: Blocks
    taken: Mapping[str, str]
    objectives: tuple[Objective, ...] | None
    summed: tuple[str, ...]  # the recorded rewards that a method of one number per completion adds up

    def alike(self) -> Iterator[tuple[str, Scheme]]:
        """Those of the recipe's method, with each baseline that fits."""
        for name in (self.recipe.method, *(f"{self.recipe.method}:{baseline}" for baseline in BASELINES)):
            with suppress(RecipeError, LayoutError):
                yield name, self.of(name)

    def asked(self, name: str) -> Scheme:
        """The rule of `method` or `method:baseline`, if a file can be credited by it."""
        METHODS.load_plugins()
        chosen = METHODS.get(name.partition(":")[0])
        if chosen is None:
            raise RecipeError(unknown("method", name, [*METHODS, "recipe", RECORDED]))
        if ":" in name and "baseline" not in chosen.inputs:
            raise RecipeError(f"Method '{chosen.name}' takes no baseline; ask for '{chosen.name}' alone, or for 'bae'.")
        if lacking := [need for need in chosen.needs if need not in ("mask_nt", "length_n", *PER_TOKEN)]:
            raise RecipeError(
                f"Method '{chosen.name}' cannot be applied to a rollout file: it needs {', '.join(lacking)}, which no format holds."
                f" Call spanwise.credit.{chosen.estimator.__name__} from Python."
            )
        return self.of(name)

    def of(self, name: str) -> Scheme:
        """The preset `method` or `method:baseline` on the blocks of the file; its options are those of the recipe's own method.

        Objectives of the file or the recipe take the place of the preset's, each in the blocks that it pays there.
        """
        wanted, _, baseline = name.partition(":")
        if baseline and baseline not in BASELINES:
            raise RecipeError(f"Baseline '{baseline}' of '{name}' is none of {', '.join(BASELINES)}.")
        chosen, layout, objectives = method(wanted), self.blocks.layout, self.objectives
        calibrated = (chosen.preset or Preset()).calibrated
        choices: dict[str, Any] = {"baseline": baseline or None}
        if chosen.kind == "completion" and not calibrated and self.summed:
            objectives = tuple(Objective(recorded_elsewhere, layout.names, name=name) for name in self.summed)
        elif self.blocks.lack:
            raise RecipeError(self.blocks.lack)
        if objectives is not None:
            if objectives is self.blocks.objectives and not calibrated:
                objectives = tuple(
                    o for o in objectives if judge_of(o) is None
                )  # nobody asked for right and confident in one
            choices = {"objectives": _compared(chosen, objectives, layout.names, baseline)}
        elif calibrated and states_confidence(layout):
            choices["calibration"] = self.recipe.rule
        own = self.recipe.options if wanted == self.recipe.method else {}
        return Scheme.preset(wanted, layout, **{**choices, **own}, longest=self.blocks.longest, recorded=self.taken)


def token_columns(scheme: Scheme) -> dict[str, list[str]]:
    """The columns per token that a scheme reads, by the field of a `Batch` that they are.

    >>> from spanwise import Layout, Objective
    >>> pair = [Objective("correct", "solution"), Objective("brier", "confidence", given="correct")]
    >>> token_columns(Scheme("sae", Layout({"solution": ["answer"], "confidence": ["confidence"]}), pair))
    {'value_nt': ['values/correct', 'values/brier'], 'logp_nt': ['logprobs']}
    """
    asked = {"value_nt": schema.value_columns(scheme.value_names), "logp_nt": [schema.LOGP]}
    return {need: names for need, names in asked.items() if need in scheme.needs}


def check_file(scheme: Scheme, table: RolloutTable) -> None:
    """Refuse what a file does not hold values, log-probabilities or scores for, or whose rollouts are several rows."""
    if scheme.entry.kind == "token" and table.rollout_n is not None:
        raise RecipeError(
            f"Method '{scheme.method}' runs over the tokens of a rollout from its end, and rollouts of '{table.path}' are several "
            f"rows (branches). Use a method that needs rewards only (grpo, rlcr, bae)."
        )
    for mode in scheme.modes:
        mode.recorded(table, ())
    if scheme.refine is not None and table.rollout_n is not None:
        raise RecipeError(
            f"refine changes the tokens of whole completions, and rollouts of '{table.path}' are several rows. Leave it out."
        )
    asked, columns_there = token_columns(scheme), table.token_values
    missing = [need for need, names in asked.items() if any(name not in columns_there for name in names)]
    if not missing:
        return
    streams = [name.partition("/")[2] for name in columns_there if name.startswith(schema.VALUES)]
    wanted, there = "", "none of them" if table.has_ids else "no token ids"
    columns = " and ".join(name for names in asked.values() for name in names)
    advice = f"Use a method that needs rewards only (grpo, rlcr, bae), or a file with the columns {columns}"
    if streams and missing == ["value_nt"]:
        there = f"those of {', '.join(streams)}" if streams != [""] else "one value"
        wanted = f" for {', '.join(scheme.value_names)}"
        advice = "Use the recipe that the critic was trained under (its objectives and `values`)"
    raise RecipeError(
        f"Method '{scheme.method}' needs {' and '.join(PER_TOKEN[need] for need in missing)} of every token{wanted}, and "
        f"'{table.path}' holds {there}. {advice}."
    )


def _compared(
    chosen: Method, objectives: Sequence[Objective], names: tuple[str, ...], baseline: str
) -> tuple[Objective, ...]:
    """The objectives of a recipe as a preset compares them.

    A method by block leaves them the blocks they pay; any other adds them up and pays every block, what the objective is read in
    first.
    """
    if (chosen.preset or Preset()).calibrated and len(objectives) == 1 and chosen.kind != "block":
        raise RecipeError(
            f"Method '{chosen.name}' adds up several objectives, and there is only '{objectives[0].name}'; use grpo."
        )
    by_block, compares = chosen.kind == "block", "baseline" in chosen.inputs
    compared = []
    for objective in objectives:
        judge = judge_of(objective)
        against = ((baseline or "outcome") if objective.given else "group") if compares else None
        judged = tuple(entry for entry in objective.given if entry == judge)
        given = objective.given if against in ("outcome", "blended") else judged
        pays = objective.pays if by_block else tuple(dict.fromkeys((*objective.pays, *names)))
        compared.append(replace(objective, pays=pays, given=given, baseline=against, scale=None, back_off=None))
    if baseline and not any(objective.given for objective in objectives):
        raise RecipeError(
            f"No objective of the recipe is given an outcome, so the baseline '{baseline}' would change nothing."
        )
    return tuple(compared)


def _leave_out_tagless(
    schemes: dict[str, Scheme], table: RolloutTable, texts: Sequence[str], *, must: Collection[str]
) -> list[str]:
    """Take away the schemes that the tags of a file are not enough for; sentences on them, and on parts that nobody writes.

    A scheme needs every tag that it reads a reward in, as a reward that is read where nothing is makes everybody wrong; by block it
    also needs a tag of every block that it pays. A recorded reward of the whole completion needs none.
    """
    layouts = dict.fromkeys(scheme.layout for scheme in schemes.values())
    counts = {one.sentence: one for layout in layouts for one in census_of(layout, texts)}
    lacking = [one for one in counts.values() if one.lacking]
    if not lacking:
        return []
    rest = [f"{one.sentence} The layout asks for {'it' if len(one.lacking) == 1 else 'them'}." for one in lacking]
    lost = {name: marks for name, scheme in schemes.items() if (marks := _lacking_marks(scheme, lacking[0]))}
    if not lost:
        return rest
    needed = [mark for mark in lacking[0].wanted if any(mark in marks for marks in lost.values())]
    lack = census(texts, needed, segmenter=lacking[0].segmenter).sentence
    if len(lost) == len(schemes) or any(name in must for name in lost):
        helps = remedy(table, texts, next(iter(schemes.values())).names[0])
        raise RecipeError(f"{' and '.join(lost)} cannot be applied to '{table.path}': {lack}{helps}")
    for name in lost:
        del schemes[name]
    return [left_out(list(lost), lack), *rest]


def remedy(table: RolloutTable, texts: Sequence[str], name: str = "correct") -> str:
    """What to do where the tags are not there; it must run as it stands."""
    records = f" The file records {', '.join(table.rewards)}." if table.rewards else ""
    most = f" (most are made of {layout})" if (layout := made_of(texts)) else ""
    whole = f"{records} Give the layout they were sampled with{most}, or credit whole completions with"
    if table.rewards:
        return f"{whole} --methods grpo --reward {name}={table.verdict or next(iter(table.rewards))}"
    objective = '{reward: correct, pays: [completion], options: {tag: ""}}'
    return f"{whole} --methods recipe --set 'layout={{completion: []}}' --set 'objectives=[{objective}]'"


def _lacking_marks(scheme: Scheme, seen: Census) -> list[str]:
    """The marks that a scheme needs and no completion has."""
    layout, keys = scheme.layout, set[str]()
    for objective in scheme.objectives:
        if objective.name not in scheme.recorded and isinstance(objective.reward, str):
            entry = REWARDS[objective.reward]
            options = {**entry.options, **objective.options}
            keys.update(options[name] for name in entry.tags)
    own = layout.parts_of(seen.segmenter)
    needed = [part for part in own if part.key and part.key in keys]
    if scheme.entry.kind == "block" and len(layout.names) > 1:
        paid = {name for objective in scheme.objectives for name in objective.pays}
        there = {part.block for part in own if seen.wanted.get(part.mark)}
        needed += [part for part in own if layout.names[part.block] in paid and part.block not in there and not part.index]
    order = dict.fromkeys(part.mark for part in own if part in needed)
    return [mark for mark in order if mark in seen.wanted and not seen.wanted[mark]]
