"""Credit the completions of a file by several methods, part by part, and read the credit that its trainer recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from rich.text import Text
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.commands.credit.arms import Arms, left_out, token_columns
from spanwise.credit import spread
from spanwise.credit_metrics import dead_strata
from spanwise.errors import RecipeError
from spanwise.explain import alarms, setup_warnings
from spanwise.explain.alarms import OF_SCORE, SCORE_FIGURES
from spanwise.layout import Layout
from spanwise.objective import families
from spanwise.pipeline import Reading, advantages, credit_batch, read
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.files import REPORT
from spanwise.rollouts.rows import stop_credit
from spanwise.rollouts.schema import RECORDED, STOP
from spanwise.rollouts.table import Ragged, fitting_runs, gather
from spanwise.scheme import Scheme
from spanwise.score import REWARDS, Reward, as_scores
from spanwise.score.items import completion_text
from spanwise.segment import find_blocks
from spanwise.types import BlockText, Credit, Scores, Spans, join_rows

_T = TypeVar("_T")
#: The largest number of places of a padded table that are processed at once.
AT_A_TIME = 250_000
_OF_A_SCORE = {"ece": "ECE", "brier": "Brier", "auroc": "AUROC"}


@dataclass(frozen=True)
class Marked:
    """The spans of one layout over all completions."""

    names: tuple[str, ...]
    start_nk: Int[Tensor, "n k"]  # every trainable token between the edges belongs to the block
    end_nk: Int[Tensor, "n k"]
    length_nk: Int[Tensor, "n k"]
    fault_n: Int[Tensor, " n"]
    trainable: Ragged
    #: 1 + the block of each token, flat, if some block has several pieces; 0 if the edges alone decide.
    pieces: Int[np.ndarray, " v"] | None = None

    def spans(self, rows: Tensor | slice, places: Int[np.ndarray, "r t"]) -> Spans:
        """Return the spans of some rows, whose tokens lie at `places`."""
        mask_nt, place_t = gather(places, self.trainable.values, False), torch.arange(places.shape[1])
        start_nk, end_nk = self.start_nk[rows], self.end_nk[rows]
        block_nt = torch.full(places.shape, -1, dtype=torch.int8 if len(self.names) < 128 else torch.int16)
        for k in range(len(self.names)):
            block_nt[mask_nt & (place_t >= start_nk[:, k, None]) & (place_t < end_nk[:, k, None])] = k
        if self.pieces is not None:
            piece_nt = gather(places, self.pieces, 0)
            block_nt = torch.where(piece_nt > 0, piece_nt - 1, block_nt)
        return Spans(self.names, start_nk, end_nk, block_nt, self.fault_n[rows])

    def blocks(self, first: int, last: int) -> Int[np.ndarray, " s"]:
        """Return the block of each token of the rows first..last - 1, end to end; -1 for tokens that are not trained."""
        places = self.trainable.places(slice(first, last))
        return self.spans(slice(first, last), places).block_nt.numpy()[places >= 0]


@dataclass(frozen=True)
class Applied:
    """The credit that one method, or the trainer that wrote the file, gives to the completions."""

    name: str
    marked: Marked
    credit: Credit  # NaN if nothing is recorded; credit per token is averaged over its block
    spread: Callable[[Credit, Spans], Float[Tensor, "n t"]]
    #: The advantages of all tokens if tokens of a block differ; else None, because spreading on demand saves memory.
    flat_v: Float[np.ndarray, " v"] | None = None
    #: Comparison -> share of strata in which no completion gets credit.
    dead: Mapping[str, float] = field(default_factory=dict)

    def advantages(self, table: RolloutTable, first: int, last: int) -> Float[np.ndarray, " s"]:
        """Return the advantages of the tokens of the rows first..last - 1, end to end; 0 in rows that the loss leaves out."""
        rows = slice(first, last)
        if self.flat_v is not None:
            flat = self.flat_v[table.tokens.offsets[first] : table.tokens.offsets[last]]
        else:
            places = table.tokens.places(rows)
            flat = self.spread(self.credit.take(rows), self.marked.spans(rows, places)).numpy()[places >= 0]
        return (
            flat if table.learned_n is None else flat * np.repeat(table.learned_n[rows].numpy(), table.tokens.lengths[rows])
        )

    @property
    def by_block(self) -> dict[str, Float[Tensor, " n"]]:
        """Return the credit of each block, NaN where a completion lacks the block, and of the decision to stop (`stop_credit`)."""
        credit_nk = self.credit.block_nk.masked_fill(self.marked.length_nk == 0, torch.nan)
        return {name: credit_nk[:, k] for k, name in enumerate(self.marked.names)} | stop_credit(self.credit.stop_n)

    @property
    def silent_n(self) -> Bool[Tensor, " n"]:
        """Return the completions none of whose blocks gets any credit."""
        return (self.credit.block_nk == 0).all(dim=1) & (self.credit.stop_n == 0)


@dataclass(frozen=True)
class CreditResult:
    """A rollout file under several methods."""

    table: RolloutTable
    group_n: Tensor  # the groups that are compared
    arms: Arms
    applied: tuple[Applied, ...]  # in the order of the methods; the credit that the file records comes last
    scores: Scores  # rewards of the objectives of all methods (`_scores`)
    marked: Marked  # the spans that are shown, of the layout with the most blocks
    notes: tuple[str, ...]
    score: dict[str, Any] | None = None  # coverage and calibration of the self-rewarding scores (`_score_figures`)

    @property
    def note(self) -> str:
        """The notes as one text."""
        return " ".join(self.notes)

    @property
    def title(self) -> Text:
        """The title over a table: the file and its size."""
        size = f"{len(self.table)} completions in {len(self.group_n.unique())} groups"
        # The console must not read a path as markup.
        return Text(f"{self.table.path} ({self.table.source}): {size}", style="table.title")


def apply_arms(
    table: RolloutTable, arms: Arms, group_n: Int[Tensor, " n"], notes: Sequence[str], *, recorded: bool, must: bool
) -> CreditResult:
    """Credit a file by all methods and, if `recorded`, by its recorded numbers; refuse missing numbers if they `must` exist."""
    marked, readings = read_file(table, arms, also=[arms.layout] if recorded else [])
    schemes = arms.schemes
    applied = [
        apply_arm(table, name, scheme, readings[name], marked[scheme.layout], group_n) for name, scheme in schemes.items()
    ]
    recorded_note = ""
    try:
        if recorded:
            recorded_arm, recorded_note = apply_recorded(table, marked[arms.layout])
            applied.append(recorded_arm)
    except RecipeError as error:
        if must:
            raise
        recorded_note = left_out([RECORDED], str(error))
    setup = [text for name, scheme in schemes.items() for text in setup_warnings(readings[name], scheme).values()]
    scores = _scores(len(table), arms, readings)
    figures, score_note = _score_figures(table, schemes.values(), scores)
    modes = next((scheme.modes for scheme in schemes.values() if scheme.modes), ())
    sentences = [
        *arms.notes, recorded_note, *dict.fromkeys(setup), table.note, *notes, _origins(table, arms), _sums(schemes), score_note,
        *(mode.note(table) for mode in modes),
    ]  # fmt: skip
    widest = max((arm.marked for arm in applied), key=lambda marked: len(marked.names))
    spans_shown = marked.get(arms.layout, widest)
    return CreditResult(table, group_n, arms, tuple(applied), scores, spans_shown, tuple(filter(None, sentences)), figures)


def _scores(completions: int, arms: Arms, readings: Mapping[str, Reading]) -> Scores:
    """Return the rewards of all objectives; if several methods share one, take its rewards from the method with the most blocks."""
    rewards: dict[str, Reward] = {}
    for name in sorted(readings, key=lambda name: -len(arms.schemes[name].layout.names)):
        scores = readings[name].scores
        tables = {"value_n": scores.reward_nm, "status_n": scores.status_nm, "by_outcome_n2": scores.by_outcome_nmo,
                  "stated_n": scores.stated_nm, "note_n": scores.note_nm}  # fmt: skip
        for m, objective in enumerate(scores.names):
            column: dict[str, Any] = {name: table[:, m] for name, table in tables.items() if table is not None}
            rewards.setdefault(objective, Reward(**column))
    if not rewards:  # only the recorded credit is shown
        return Scores((), torch.zeros(completions, 0), torch.zeros(completions, 0).long(), torch.zeros(completions, 0, 2))
    return as_scores(rewards)


def _score_figures(table: RolloutTable, schemes: Iterable[Scheme], scores: Scores) -> tuple[dict[str, Any] | None, str]:
    """Return coverage and calibration of the clipped scores, and a sentence on them; None and "" without scores."""
    if table.score_n is None:
        return None, ""
    verdict = next((mode.judge for scheme in schemes for mode in scheme.modes if mode.judge is not None), "correct")
    clipped_n = table.score_n.clamp(0.0, 1.0)
    known_n = ~clipped_n.isnan()
    right_n = scores.outcome(verdict).double() if verdict in scores.names else torch.full_like(clipped_n, torch.nan)
    right_n = right_n.masked_fill((right_n != 0) & (right_n != 1), torch.nan)
    is_judged = not bool(right_n.isnan().all())
    count, coverage = int(known_n.sum()), float(known_n.double().mean())
    score_figures: dict[str, Any] = {"completions": count, "coverage": coverage, "verdict": verdict if is_judged else None}
    sentence = f"Self-rewarding score (laser): {count:,} completions have a score ({100 * coverage:.3g} %)"
    reasons: list[str] = []
    try:
        from spanwise.measure import figures
    except ModuleNotFoundError:  # the extra `cli` does not install SciPy
        pass
    else:
        values = figures(clipped_n, right_n, well_formed_n=known_n)
        by_score = {name: values[name.removeprefix(OF_SCORE)] for name in SCORE_FIGURES}
        reasons = list(dict.fromkeys(alarms(by_score).values()))
        score_figures |= {**{name.removeprefix(OF_SCORE): value for name, value in by_score.items()}, "alarms": reasons}
        if is_judged:
            numbers = ((word, score_figures[name]) for name, word in _OF_A_SCORE.items())
            listed = ", ".join(f"{word} {'-' if value is None else f'{value:.3f}'}" for word, value in numbers)
            sentence = f"{sentence}, and against {verdict} {listed}"
    if not is_judged:
        return score_figures, f"{sentence}; the file does not say which completions are right."
    return score_figures, f"{sentence}." + "".join(f" {reason[:1].upper()}{reason[1:]}." for reason in reasons)


def _by_family(values: Mapping[str, _T]) -> dict[str, _T]:
    """Return the values of objectives by name, or once for all parts of a reward, where they agree.

    >>> _by_family({"x.a": 1, "x.b": 1, "x.c": 1, "x.d": 1, "y": 2})
    {'x (4 parts)': 1, 'y': 2}
    """
    joined: dict[str, _T] = {}
    for label, members in families(values).items():
        agree = len({values[member] for member in members}) == 1
        joined |= {label: values[members[0]]} if agree else {member: values[member] for member in members}
    return joined


def _origins(table: RolloutTable, arms: Arms) -> str:
    """Say where each reward comes from, and which recorded numbers are not used."""
    columns = {objective.name: arms.taken.get(objective.name) for objective in arms.objectives}
    if not columns:
        return ""
    places = {
        name: "the text" if column is None else "the file" if column == name else f"the file's '{column}'"
        for name, column in columns.items()
    }
    origins = ", ".join(f"{label} from {place}" for label, place in _by_family(places).items())
    unused = [name for name in table.rewards if name not in columns.values()]
    rest = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
    hint = f" No objective uses the file's {', '.join(unused[:3])}{rest}; --reward OBJECTIVE=COLUMN assigns one."
    return f"Rewards: {origins}.{hint if unused else ''}"


def _sums(schemes: Mapping[str, Scheme]) -> str:
    """Say which rewards are added up by each method that gives a completion one number."""
    if len({objective.name for scheme in schemes.values() for objective in scheme.objectives}) < 2:
        return ""
    parts = []
    for name, scheme in schemes.items():
        if scheme.entry.kind == "completion":
            weights = _by_family({term.name: term.weight for term in scheme.objectives})
            terms = (f"{'' if weight == 1 else f'{weight:g} '}{label}" for label, weight in weights.items())
            parts.append(f"{name}: {' + '.join(terms)}{'' if len(scheme.objectives) > 1 else ' alone'}")
    return f"The one number of a completion adds up rewards: {'; '.join(parts)}." if parts else ""


def read_file(
    table: RolloutTable, arms: Arms, *, also: Sequence[Layout] = ()
) -> tuple[dict[Layout, Marked], dict[str, Reading]]:
    """Find blocks and rewards of every completion: layout -> its spans, method -> its `Reading`."""
    spans_of: dict[Layout, list[tuple[Tensor, ...]]] = {}
    pieces: dict[Layout, np.ndarray] = {}
    for layout in (*(scheme.layout for scheme in arms.schemes.values()), *also):
        spans_of[layout] = []
    readings: dict[str, list[Reading]] = {name: [] for name in arms.schemes}
    for first, last in fitting_runs(table.tokens.lengths, AT_A_TIME):
        REPORT.get()("finding blocks", int(table.tokens.offsets[last]), len(table.tokens.values))
        rows = slice(first, last)
        places = table.tokens.places(rows)
        ids_nt, mask_nt = gather(places, table.tokens.values, 0), gather(places, table.trainable, False)
        columns = {name: values[rows] for name, values in table.columns.items()}
        # Rewards given another outcome are not recorded, so they are computed from the text.
        recorded = {name: table.rewards[column].take(rows) for name, column in arms.taken.items()}
        for layout, parts in spans_of.items():
            spans, texts = located = find_blocks(ids_nt, mask_nt, layout=layout, vocabulary=table.vocabulary)
            if spans.interleaved:
                block_nt = spans.block_nt.numpy()
                flat_v = pieces.setdefault(layout, np.zeros(len(table.tokens.values), block_nt.dtype))
                flat_v[places[places >= 0]] = block_nt[places >= 0] + 1
            parts.append((spans.start_nk, spans.end_nk, spans.length_nk, spans.fault_n))
            for name, scheme in arms.schemes.items():
                if scheme.layout == layout:
                    function_columns = _for_functions(table, rows, texts, scheme)
                    batch = Batch(table.group_n[rows], ids_nt, mask_nt, columns={**columns, **function_columns})
                    reading = read(batch, scheme, table.vocabulary, recorded=recorded, located=located)
                    readings[name].append(reading.take(slice(None)))
    marked = {}
    for layout, parts in spans_of.items():
        edges = (torch.cat(column) for column in zip(*parts, strict=True))
        trainable = table.tokens.with_values(table.trainable)
        marked[layout] = Marked(layout.names, *edges, trainable=trainable, pieces=pieces.get(layout))
    return marked, {name: Reading.joined(parts) for name, parts in readings.items()}


def _for_functions(table: RolloutTable, rows: slice, texts: Sequence[BlockText], scheme: Scheme) -> dict[str, Sequence[Any]]:
    """Return the columns that a trainer would hand to reward functions in addition to the dataset's columns."""
    rewards = [o.reward for o in scheme.objectives if o.name not in scheme.recorded]
    has_functions = any(map(callable, rewards))
    # A length in words or bytes would be taken for one in tokens.
    reads_ids = table.has_ids and any(isinstance(name, str) and REWARDS[name].reads_ids for name in rewards)
    columns: dict[str, Sequence[Any]] = {}
    if has_functions or reads_ids:
        columns["completion_ids"] = [table.tokens.slice(n, n + 1).tolist() for n in range(rows.start, rows.stop)]
    if has_functions:
        columns |= {"prompts": table.prompts[rows], "completions": [completion_text(blocks) for blocks in texts]}
    return columns


def apply_arm(
    table: RolloutTable, name: str, scheme: Scheme, reading: Reading, marked: Marked, group_n: Int[Tensor, " n"]
) -> Applied:
    """Turn the rewards of a file into credit, step by step; the completions of one step are a batch."""
    by_token = scheme.entry.kind == "token" or scheme.refine is not None
    flat_v = np.zeros(len(table.tokens.values) if by_token else 0, dtype=np.float32)
    parts: list[tuple[Tensor, Credit]] = []
    for step in steps(table.step_n):
        mean_length = marked.length_nk[step].sum(dim=1).double().mean()  # the mean over the whole step, not over a part
        ranges, whole_step = list(fitting_runs(table.tokens.lengths[step.numpy()], AT_A_TIME)), [(0, len(step))]
        for rows in [step[first:last] for first, last in (ranges if by_token and not _compares(scheme) else whole_step)]:
            part, fields = reading.take(rows), dict[str, Any]()
            for mode in scheme.modes:
                fields |= mode.recorded(table, rows)
            if not by_token:
                if table.rollout_n is not None:
                    fields["steps"] = Steps(table.rollout_n[rows], rows)
                credit = credit_batch(part, Batch(group_n[rows], **fields), scheme)
                # A completion without any block has no token to carry the cost of stopping.
                credit = replace(credit, stop_n=credit.stop_n.masked_fill(~part.present_nk.any(dim=1), 0.0))
            else:
                places = table.tokens.places(rows.numpy())
                part = replace(part, spans=marked.spans(rows, places))
                fields |= {
                    "ids_nt": gather(places, table.tokens.values, 0),
                    "mask_nt": gather(places, table.trainable, False),
                }
                for field, columns in token_columns(scheme).items():
                    streams = [gather(places, table.token_values[column], 0.0) for column in columns]
                    fields[field] = torch.stack(streams, dim=2).squeeze(2)
                credit = credit_batch(part, Batch(group_n[rows], **fields), scheme)
                credit = replace(credit, mean_length_n=mean_length.expand(len(rows)))
                flat_v[places[places >= 0]] = advantages(credit, part.spans, scheme).numpy()[places >= 0]
            parts.append((rows, credit))
    credit = _joined(parts)
    strata = dead_strata(credit, scheme, group_n=group_n if by_token else None)
    dead = {objective: silent / total for objective, (total, silent) in strata.items() if total}
    return Applied(name, marked, credit, partial(advantages, scheme=scheme), flat_v if by_token else None, dead)


def _compares(scheme: Scheme) -> bool:
    """Return whether a method compares tokens of a whole step, so that the step cannot be processed in parts."""
    alone = scheme.entry.kind == "token" and "split" not in scheme.entry.exceptions and not scheme.options.get("whiten")
    return not alone or any(mode.compares for mode in scheme.modes)


def _joined(parts: Sequence[tuple[Tensor, Credit]]) -> Credit:
    """Join the credit of all parts, each at its rows; strata of different parts get different numbers."""
    order_n = torch.cat([rows for rows, _ in parts]).argsort()
    credits, strata = [], 0
    for _, credit in parts:
        assert credit.comparison is not None, "it was credited here"
        stratum_nm = credit.comparison.stratum_nm
        comparison = replace(credit.comparison, stratum_nm=torch.where(stratum_nm >= 0, stratum_nm + strata, -1))
        credits.append(replace(credit, comparison=comparison, token_nt=None, refined_nt=None))
        strata += int(stratum_nm.max()) + 1 if stratum_nm.numel() else 0
    return join_rows(credits).take(order_n)


def steps(step_n: Int[Tensor, " n"]) -> Iterator[Int[Tensor, " r"]]:
    """Return the rows of each step, or of each group, in the order of their numbers."""
    order = torch.argsort(step_n, stable=True)
    sizes = torch.unique_consecutive(step_n[order], return_counts=True)[1]
    yield from torch.split(order, sizes.tolist())


def apply_recorded(table: RolloutTable, marked: Marked) -> tuple[Applied, str]:
    """Return the credit that the trainer recorded, and a sentence on how the file stores that credit."""
    recorded = table.as_recorded
    if recorded is None:
        raise RecipeError(
            f"'{table.path}' records no advantages, score or reward, so there is nothing to show; leave '{RECORDED}' out."
        )
    present_nk, length_n = marked.length_nk > 0, marked.length_nk.sum(dim=1)
    shared_n = length_n.double()  # a number is spread over all sampled tokens of the rollout, as in a trainer
    if table.rollout_n is not None:
        shared_n = torch.bincount(table.rollout_n, weights=shared_n)[table.rollout_n]
    stop_n, flat_v = torch.zeros(len(table)).double(), None
    if recorded.by_block:
        block_nk = torch.stack([recorded.by_block.get(name, torch.zeros(len(table))) for name in marked.names], dim=1)
        missing = [name for k, name in enumerate(marked.names) if present_nk[:, k].any() and name not in recorded.by_block]
        if missing:
            known_names = ", ".join(name for name in recorded.by_block if name != STOP)
            raise RecipeError(
                f"'{table.path}' records credit of the blocks {known_names}, but the layout also has {', '.join(missing)}; give "
                f"the layout that the trainer had to see it under '{RECORDED}'."
            )
        block_nk, stop_n = block_nk.double().nan_to_num(), recorded.by_block.get(STOP, stop_n).nan_to_num()
    elif recorded.by_token:
        sums, inside = list[Tensor](), list[np.ndarray]()
        for first, last in fitting_runs(table.tokens.lengths, AT_A_TIME):
            places = table.tokens.places(slice(first, last))
            place_nt = marked.spans(slice(first, last), places).block_nt.long() + 1
            inside.append(place_nt.numpy()[places >= 0] > 0)
            sum_nk = torch.zeros(last - first, len(marked.names) + 1).double()
            sums.append(sum_nk.scatter_add_(1, place_nt, gather(places, recorded.value, 0.0))[:, 1:])
        block_nk = torch.cat(sums)
        flat_v = np.where(np.isnan(recorded.value) | np.concatenate(inside), recorded.value, 0.0).astype(np.float32)
        if not recorded.shares:
            block_nk = block_nk / marked.length_nk.clamp(min=1)
            flat_v /= np.repeat(shared_n.numpy(), table.tokens.lengths)
    else:
        block_nk = torch.from_numpy(recorded.value)[:, None].expand(present_nk.shape)
    nobody_m = torch.zeros(0, dtype=torch.long)
    credit = Credit(torch.where(present_nk, block_nk, 0.0), stop_n, nobody_m, nobody_m, mean_length_n=shared_n)
    shared_text = f"spread over the tokens of the {'block' if recorded.by_block else 'completion'}"
    note = f"{RECORDED} is no method: {recorded.says}, {'as it stands there' if recorded.shares else shared_text}."
    return Applied(RECORDED, marked, credit, partial(_as_recorded, by_block=bool(recorded.by_block)), flat_v), note


def _as_recorded(credit: Credit, spans: Spans, *, by_block: bool) -> Float[Tensor, "n t"]:
    """Spread recorded credit over the tokens of each block or rollout; NaN for tokens without credit."""
    finite_credit = replace(credit, block_nk=credit.block_nk.nan_to_num())
    adv_nt = spread(finite_credit, spans, per="block" if by_block or credit.mean_length_n is None else credit.mean_length_n)
    return adv_nt.masked_fill(credit.block_nk.isnan().any(dim=1, keepdim=True), torch.nan)
