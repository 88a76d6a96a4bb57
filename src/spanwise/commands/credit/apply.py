"""What methods, and the trainer that wrote a file, credit its completions with: read and credited a part at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from rich.text import Text
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.commands.credit.arms import Arms, left_out, token_columns
from spanwise.credit_metrics import dead_strata
from spanwise.errors import RecipeError
from spanwise.explain import alarms, setup_warnings
from spanwise.explain.alarms import OF_SCORE, SCORE_FIGURES
from spanwise.layout import Layout
from spanwise.pipeline import Reading, advantages, credit_batch, read
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.schema import RECORDED, STOP
from spanwise.rollouts.table import AsRecorded, at, fitting_runs
from spanwise.scheme import Scheme
from spanwise.score import Reward, as_scores
from spanwise.segment import find_blocks
from spanwise.types import BlockText, Credit, Scores, Spans, join_rows, whole_text

#: Places of a padded table that are worked on at a time.
AT_A_TIME = 1_000_000
_OF_A_SCORE = {"ece": "ECE", "brier": "Brier", "auroc": "AUROC"}


@dataclass(frozen=True)
class Marked:
    """The spans of one layout over all completions; `block` lies flat, as the tokens of the table do.

    Some block is in several pieces where they are `interleaved`.
    """

    names: tuple[str, ...]
    start_nk: Int[Tensor, "n k"]
    end_nk: Int[Tensor, "n k"]
    length_nk: Int[Tensor, "n k"]
    fault_n: Int[Tensor, " n"]
    block: Int[np.ndarray, " v"]
    interleaved: bool = False

    def spans(self, rows: Tensor | slice, places: Int[np.ndarray, "r t"]) -> Spans:
        """The spans of some rows, whose tokens lie at `places`."""
        return Spans(self.names, self.start_nk[rows], self.end_nk[rows], at(places, self.block, -1), self.fault_n[rows])


@dataclass(frozen=True)
class Applied:
    """What one method credits the completions of a file with, or its trainer."""

    name: str
    marked: Marked
    credit: Credit  # NaN where nothing is recorded; what is known per token has the mean over the block
    #: Of a table and first, last: the advantages of the tokens of the rows first..last - 1, end to end.
    advantages: Callable[[RolloutTable, int, int], Float[np.ndarray, " s"]]
    dead: dict[str, float]  # comparison -> share of its strata in which nobody gets any credit

    @property
    def by_block(self) -> dict[str, Float[Tensor, " n"]]:
        """The credit of each block; NaN where a completion does not have it."""
        held_nk = self.credit.block_nk.masked_fill(self.marked.length_nk == 0, torch.nan)
        return {name: held_nk[:, k] for k, name in enumerate(self.marked.names)}

    @property
    def charged(self) -> dict[str, Float[Tensor, " n"]]:
        """The credit of the decision to stop, where anybody has any: NaN where it is 0."""
        stop_n = self.credit.stop_n
        return {STOP: stop_n.masked_fill(stop_n == 0, torch.nan)} if bool((stop_n != 0).any()) else {}

    @property
    def silent_n(self) -> Bool[Tensor, " n"]:
        """The completions none of whose blocks gets any credit."""
        return (self.credit.block_nk == 0).all(dim=1) & (self.credit.stop_n == 0)


@dataclass(frozen=True)
class CreditResult:
    """A rollout file under several methods.

    Attributes:
        table: the file.
        group_n: the groups as they were compared.
        arms: the methods, in order.
        applied: what they credit, and last what the file itself records (`recorded`), if that is shown.
        scores: rewards and statuses of the objectives of all methods; the first method that has one speaks for it.
        marked: the spans that are shown: of the layout with the most blocks.
        notes: what the user should know, sentence by sentence.
        score: what the self-rewarding scores of the file are worth (`_score_figures`); None where it has none.
    """

    table: RolloutTable
    group_n: Tensor
    arms: Arms
    applied: tuple[Applied, ...]
    scores: Scores
    marked: Marked
    notes: tuple[str, ...]
    score: dict[str, Any] | None = None

    @property
    def note(self) -> str:
        """The notes as one text."""
        return " ".join(self.notes)

    @property
    def title(self) -> Text:
        """Which file it is, and its size, over a table."""
        size = f"{len(self.table)} completions in {len(self.group_n.unique())} groups"
        return Text(f"{self.table.path} ({self.table.source}): {size}", style="table.title")  # a path is no markup


def apply_arms(
    table: RolloutTable, arms: Arms, group_n: Int[Tensor, " n"], notes: Sequence[str], *, recorded: bool, must: bool
) -> CreditResult:
    """Credit a file by all methods, and, if `recorded`, by what it records, which may be missing unless it `must` be there."""
    marked, readings = read_file(table, arms, also=[arms.layout] if recorded else [])
    schemes = arms.schemes
    applied = [
        apply_arm(table, name, scheme, readings[name], marked[scheme.layout], group_n) for name, scheme in schemes.items()
    ]
    about_recorded = ""
    try:
        if recorded:
            trained, about_recorded = apply_recorded(table, marked[arms.layout])
            applied.append(trained)
    except RecipeError as error:
        if must:
            raise
        about_recorded = left_out([RECORDED], str(error))
    setup = [text for name, scheme in schemes.items() for text in setup_warnings(readings[name], scheme).values()]
    scores = _scores(len(table), arms, readings)
    worth, of_score = _score_figures(table, schemes.values(), scores)
    modes = next((scheme.modes for scheme in schemes.values() if scheme.modes), ())
    sentences = [
        *arms.notes, about_recorded, *dict.fromkeys(setup), table.note, *notes, _origins(arms), _sums(schemes), of_score,
        *(mode.note(table) for mode in modes),
    ]  # fmt: skip
    widest = max((one.marked for one in applied), key=lambda marked: len(marked.names))
    shown = marked.get(arms.layout, widest)
    return CreditResult(table, group_n, arms, tuple(applied), scores, shown, tuple(filter(None, sentences)), worth)


def _scores(completions: int, arms: Arms, readings: Mapping[str, Reading]) -> Scores:
    """The rewards of all objectives; the method with the most blocks speaks first."""
    rewards: dict[str, Reward] = {}
    for name in sorted(readings, key=lambda name: -len(arms.schemes[name].layout.names)):
        scores = readings[name].scores
        tables = (scores.reward_nm, scores.status_nm, scores.by_outcome_nmo, scores.stated_nm)
        for m, objective in enumerate(scores.names):
            rewards.setdefault(objective, Reward(*(table[:, m] for table in tables if table is not None)))
    if not rewards:  # nothing but what the file records
        return Scores((), torch.zeros(completions, 0), torch.zeros(completions, 0).long(), torch.zeros(completions, 0, 2))
    return as_scores(rewards)


def _score_figures(table: RolloutTable, schemes: Iterable[Scheme], scores: Scores) -> tuple[dict[str, Any] | None, str]:
    """Coverage and calibration of the clipped scores against the verdict, and a sentence on them; None and "" without scores."""
    if table.score_n is None:
        return None, ""
    verdict = next((mode.judge for scheme in schemes for mode in scheme.modes if mode.judge is not None), "correct")
    clipped_n = table.score_n.clamp(0.0, 1.0)
    known_n = ~clipped_n.isnan()
    right_n = torch.full_like(clipped_n, torch.nan)
    if verdict in scores.names:
        right_n = scores.outcome(verdict).double()
        right_n = right_n.masked_fill((right_n != 0) & (right_n != 1), torch.nan)
    judged = not bool(right_n.isnan().all())
    worth: dict[str, Any] = {"completions": int(known_n.sum()), "coverage": float(known_n.double().mean())}
    worth["verdict"] = verdict if judged else None
    sentence = f"Score of its own (laser): {worth['completions']:,} completions have one ({100 * worth['coverage']:.3g} %)"
    reasons: list[str] = []
    try:
        from spanwise.measure import figures
    except ModuleNotFoundError:  # the extra cli does without SciPy
        pass
    else:
        values = figures(clipped_n, right_n, well_formed_n=known_n)
        by_score = {name: values[name.removeprefix(OF_SCORE)] for name in SCORE_FIGURES}
        reasons = list(dict.fromkeys(alarms(by_score).values()))
        worth |= {**{name.removeprefix(OF_SCORE): value for name, value in by_score.items()}, "alarms": reasons}
        numbers = ((word, worth[name]) for name, word in _OF_A_SCORE.items())
        if judged:
            shown = ", ".join(f"{word} {'-' if value is None else f'{value:.3f}'}" for word, value in numbers)
            sentence = f"{sentence}, and against {verdict} {shown}"
    if not judged:
        return worth, f"{sentence}; nothing in the file says which are right."
    return worth, f"{sentence}." + "".join(f" {why[:1].upper()}{why[1:]}." for why in reasons)


def _origins(arms: Arms) -> str:
    """Where each reward comes from."""
    places = []
    for name in dict.fromkeys(objective.name for objective in arms.objectives):
        column = arms.taken.get(name)
        places.append(
            f"{name} from " + ("the text" if column is None else "the file" if column == name else f"the file's '{column}'")
        )
    return f"Rewards: {', '.join(places)}." if places else ""


def _sums(schemes: Mapping[str, Scheme]) -> str:
    """Which rewards each method of one number per completion adds up."""
    several = len({objective.name for scheme in schemes.values() for objective in scheme.objectives}) > 1
    parts = []
    for name, scheme in schemes.items():
        if several and scheme.entry.kind == "completion":
            terms = (f"{'' if o.weight == 1 else f'{o.weight:g} '}{o.name}" for o in scheme.objectives)
            parts.append(f"{name}: {' + '.join(terms)}{'' if len(scheme.objectives) > 1 else ' alone'}")
    return f"One number for a completion is made of, in {'; in '.join(parts)}." if parts else ""


def read_file(
    table: RolloutTable, arms: Arms, *, also: Sequence[Layout] = ()
) -> tuple[dict[Layout, Marked], dict[str, Reading]]:
    """Find the blocks and rewards of every completion: layout -> its spans, method -> what completions say and what that is worth.

    A reward that the file records (`Arms.taken`) is taken from it; what it would be under the other outcome, and every other
    reward, is computed from the text.
    """
    layouts = dict.fromkeys((*(scheme.layout for scheme in arms.schemes.values()), *also))
    spans_of: dict[Layout, list[tuple[Tensor, ...]]] = {layout: [] for layout in layouts}
    readings: dict[str, list[Reading]] = {name: [] for name in arms.schemes}
    for first, last in fitting_runs(table.tokens.lengths, AT_A_TIME):
        rows = slice(first, last)
        places = table.tokens.places(rows)
        ids_nt, mask_nt = at(places, table.tokens.values, 0), at(places, table.trainable, False)
        columns = {name: values[rows] for name, values in table.columns.items()}
        recorded = {name: table.rewards[column].take(rows) for name, column in arms.taken.items()}
        for layout, parts in spans_of.items():
            spans, texts = located = find_blocks(ids_nt, mask_nt, layout=layout, vocabulary=table.vocabulary)
            block_v, pieces_1 = spans.block_nt[torch.from_numpy(places >= 0)], torch.tensor([spans.interleaved])
            block_v = block_v.to(torch.int8 if len(layout.names) < 128 else torch.int16)
            parts.append((spans.start_nk, spans.end_nk, spans.length_nk, spans.fault_n, block_v, pieces_1))
            for name, scheme in arms.schemes.items():
                if scheme.layout == layout:
                    asked = _for_functions(table, rows, texts, scheme)
                    batch = Batch(table.group_n[rows], ids_nt, mask_nt, columns={**columns, **asked})
                    reading = read(batch, scheme, table.vocabulary, recorded=recorded, located=located)
                    readings[name].append(reading.take(slice(None)))
    marked = {}
    for layout, parts in spans_of.items():
        start_nk, end_nk, length_nk, fault_n, block_v, pieces_c = (torch.cat(column) for column in zip(*parts, strict=True))
        pieces = bool(pieces_c.any())
        marked[layout] = Marked(layout.names, start_nk, end_nk, length_nk, fault_n, block_v.numpy(), interleaved=pieces)
    return marked, {name: Reading.joined(parts) for name, parts in readings.items()}


def _for_functions(table: RolloutTable, rows: slice, texts: Sequence[BlockText], scheme: Scheme) -> dict[str, Sequence[Any]]:
    """What a trainer would hand to reward functions beside the columns."""
    if not any(callable(objective.reward) for objective in scheme.objectives):
        return {}
    return {
        "prompts": table.prompts[rows],
        "completions": [whole_text(blocks) for blocks in texts],
        "completion_ids": [table.tokens.slice(n, n + 1).tolist() for n in range(rows.start, rows.stop)],
    }


def apply_arm(
    table: RolloutTable, name: str, scheme: Scheme, reading: Reading, marked: Marked, group_n: Int[Tensor, " n"]
) -> Applied:
    """Turn the rewards of a file into credit, step by step: a batch is what was generated in one step.

    A method per token goes over as many completions at a time as fit, unless it compares them.
    """
    by_token = scheme.entry.kind == "token" or scheme.refine is not None
    flat = np.zeros(len(table.tokens.values) if by_token else 0, dtype=np.float32)
    parts: list[tuple[Tensor, Credit]] = []
    for step in steps(table.step_n):
        mean_length = marked.length_nk[step].sum(dim=1).double().mean()  # a part is not a whole step
        fitting, whole = list(fitting_runs(table.tokens.lengths[step.numpy()], AT_A_TIME)), [(0, len(step))]
        for rows in [step[first:last] for first, last in (fitting if by_token and not _compares(scheme) else whole)]:
            here, fields = reading.take(rows), dict[str, Any]()
            for mode in scheme.modes:
                fields |= mode.recorded(table, rows)
            if by_token:
                places = table.tokens.places(rows.numpy())
                here = replace(here, spans=marked.spans(rows, places))
                fields |= {"ids_nt": at(places, table.tokens.values, 0), "mask_nt": at(places, table.trainable, False)}
                for need, columns in token_columns(scheme).items():
                    streams = [at(places, table.token_values[column], 0.0) for column in columns]
                    fields[need] = torch.stack(streams, dim=2).squeeze(2)
            elif table.rollout_n is not None:
                fields["steps"] = Steps(table.rollout_n[rows], rows)
            credit = credit_batch(here, Batch(group_n[rows], **fields), scheme)
            if by_token:
                credit = replace(credit, mean_length_n=mean_length.expand(len(rows)))
            else:  # without any token, nothing carries what stopping costs
                credit = replace(credit, stop_n=credit.stop_n.masked_fill(~here.present_nk.any(dim=1), 0.0))
            if by_token:
                places = table.tokens.places(rows.numpy())
                flat[places[places >= 0]] = _learned(table, credit, here.spans, scheme, rows)[places >= 0]
            parts.append((rows, credit))
    credit = _joined(parts)
    strata = dead_strata(credit, scheme, group_n=group_n if by_token else None)
    dead = {of: silent / total for of, (total, silent) in strata.items() if total}
    spread = partial(_kept, flat) if by_token else partial(_spread, marked, credit, scheme)
    return Applied(name, marked, credit, spread, dead)


def _learned(
    table: RolloutTable, credit: Credit, spans: Spans | None, scheme: Scheme, rows: Tensor | slice
) -> Float[np.ndarray, "n t"]:
    """The advantages of some rows; 0 at those that the trainer left out of the loss."""
    adv_nt = advantages(credit, spans, scheme)
    return (adv_nt if table.learned_n is None else adv_nt * table.learned_n[rows, None]).numpy()


def _kept(flat: Float[np.ndarray, " v"], table: RolloutTable, first: int, last: int) -> Float[np.ndarray, " s"]:
    """The advantages of some rows out of those of all."""
    return flat[table.tokens.offsets[first] : table.tokens.offsets[last]]


def _spread(
    marked: Marked, credit: Credit, scheme: Scheme, table: RolloutTable, first: int, last: int
) -> Float[np.ndarray, " s"]:
    """The advantages of some rows, spread over their tokens when they are asked for: those of all fill more than the file."""
    rows = slice(first, last)
    places = table.tokens.places(rows)
    return _learned(table, credit.take(rows), marked.spans(rows, places), scheme, rows)[places >= 0]


def _compares(scheme: Scheme) -> bool:
    """Whether a method per token compares the completions of a step; what is refined does, and often the refinement."""
    alone = scheme.entry.kind == "token" and "split" not in scheme.entry.exceptions and not scheme.options.get("whiten")
    return not alone or any(mode.compares for mode in scheme.modes)


def _joined(parts: Sequence[tuple[Tensor, Credit]]) -> Credit:
    """The credit of all parts, each at its rows; strata of different parts have different numbers."""
    order_n = torch.cat([rows for rows, _ in parts]).argsort()
    credits, strata = [], 0
    for _, credit in parts:
        assert credit.comparison is not None, "it was credited here"
        own_nm = credit.comparison.stratum_nm
        comparison = replace(credit.comparison, stratum_nm=torch.where(own_nm >= 0, own_nm + strata, -1))
        credits.append(replace(credit, comparison=comparison, token_nt=None, refined_nt=None))
        strata += int(own_nm.max()) + 1 if own_nm.numel() else 0
    return join_rows(credits).take(order_n)


def steps(step_n: Int[Tensor, " n"]) -> Iterator[Int[Tensor, " r"]]:
    """The rows of each step, or of each group, in the order of their numbers.

    >>> [rows.tolist() for rows in steps(torch.tensor([2, 1, 2]))]
    [[1], [0, 2]]
    """
    order = torch.argsort(step_n, stable=True)
    sizes = torch.unique_consecutive(step_n[order], return_counts=True)[1]
    yield from torch.split(order, sizes.tolist())


def apply_recorded(table: RolloutTable, marked: Marked) -> tuple[Applied, str]:
    """What the trainer that wrote the file says of its completions, as it stands there: nothing is compared; and a sentence.

    A number is shared out evenly over the tokens that the model sampled in the rollout, as a trainer does, one of a block over
    those of the block; one per token keeps its place.
    """
    recorded = table.as_recorded
    if recorded is None:
        raise RecipeError(
            f"'{table.path}' records no advantages, score or reward, so there is nothing to show under '{RECORDED}'; leave it out."
        )
    length_nk, stop_n = marked.length_nk.numpy(), np.zeros(len(table))
    divisor_nk, sampled_n = np.maximum(length_nk, 1), length_nk.sum(axis=1)
    if recorded.by_block:
        block_nk = _recorded_blocks(table, marked, recorded.by_block)
        stop_n = np.nan_to_num(recorded.by_block.get(STOP, stop_n))
    else:
        runs = fitting_runs(table.tokens.lengths, AT_A_TIME)
        sums = [_block_sums(table, marked, recorded, first, last) for first, last in runs]
        block_nk = np.concatenate(sums) / (1 if recorded.shares else divisor_nk)
    rollout_n = np.arange(len(table)) if table.rollout_n is None else table.rollout_n.numpy()
    shared_n = np.bincount(rollout_n, weights=sampled_n)[rollout_n]

    def spread(table: RolloutTable, first: int, last: int) -> Float[np.ndarray, " s"]:
        inside, rows, blocks = _sampled(table, marked, first, last)
        number = recorded.slice(table.tokens.offsets, first, last)
        flat = np.where(np.isnan(number), np.nan, 0.0)
        if recorded.by_block:
            flat[inside] = (block_nk / divisor_nk)[first + rows, blocks]
            last_sampled = inside[np.flatnonzero(np.diff(rows, append=-1))]
            flat[last_sampled] += stop_n[first + np.unique(rows)]
        else:
            flat[inside] = number[inside] if recorded.shares else number[inside] / shared_n[first + rows]
        return flat.astype(np.float32)

    nobody_m = torch.zeros(0, dtype=torch.long)
    credit = Credit(torch.from_numpy(block_nk), torch.from_numpy(stop_n), nobody_m, nobody_m)
    shared = f"shared out over the tokens of the {'block' if recorded.by_block else 'completion'}"
    note = f"{RECORDED} is no method: {recorded.says}, {'as it stands there' if recorded.shares else shared}."
    return Applied(RECORDED, marked, credit, spread, {}), note


def _sampled(table: RolloutTable, marked: Marked, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the rows first..last - 1: the places of the tokens inside blocks, and their rows, counted from `first`, and blocks."""
    edges = table.tokens.offsets[first : last + 1]
    block = marked.block[edges[0] : edges[-1]]
    inside = np.flatnonzero(block >= 0)
    return inside, np.repeat(np.arange(last - first), np.diff(edges))[inside], block[inside].astype(np.int64)


def _block_sums(
    table: RolloutTable, marked: Marked, recorded: AsRecorded, first: int, last: int
) -> Float[np.ndarray, "r k"]:
    """What the tokens of each block of some rows were recorded with, in sum."""
    inside, rows, blocks = _sampled(table, marked, first, last)
    shape = (last - first, len(marked.names))
    number = recorded.slice(table.tokens.offsets, first, last)[inside]
    return np.bincount(rows * shape[1] + blocks, weights=number, minlength=shape[0] * shape[1]).reshape(shape)


def _recorded_blocks(table: RolloutTable, marked: Marked, by_block: Mapping[str, np.ndarray]) -> Float[np.ndarray, "n k"]:
    """The recorded credit of each block, 0 where a completion has none."""
    present_nk = (marked.length_nk > 0).numpy()
    unknown = [name for k, name in enumerate(marked.names) if present_nk[:, k].any() and name not in by_block]
    if unknown:
        there = ", ".join(name for name in by_block if name != STOP)
        raise RecipeError(
            f"'{table.path}' records credit of the blocks {there}, and the layout has {', '.join(unknown)}; give the layout "
            f"that the trainer had to see it under '{RECORDED}'."
        )
    nothing_n = np.zeros(len(table))
    return np.nan_to_num(np.stack([by_block.get(name, nothing_n) for name in marked.names], axis=1)) * present_nk
