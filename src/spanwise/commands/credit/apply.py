"""Compute the credit of a rollout file's completions under several methods."""

import sys
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
from spanwise.commands.credit.arms import Arms, left_out_note, token_columns
from spanwise.commands.shared.progress import short
from spanwise.credit import spread
from spanwise.credit.methods._gae import SaeSegments
from spanwise.credit_metrics import dead_strata
from spanwise.errors import RecipeError
from spanwise.explain import alarms, setup_warnings
from spanwise.explain.alarms import OF_SCORE, SCORE_FIGURES
from spanwise.layout import Layout
from spanwise.objective import Objective, families
from spanwise.pipeline import Reading, advantages, credit_batch, read
from spanwise.rollouts import RolloutTable
from spanwise.rollouts.cells import parse_prompt
from spanwise.rollouts.files import REPORT
from spanwise.rollouts.rows import stop_credit
from spanwise.rollouts.schema import AFTER, RECORDED, STOP, value_columns
from spanwise.rollouts.table import fitting_runs, gather
from spanwise.rollouts.token_rows import disk_zeros
from spanwise.scheme import Scheme
from spanwise.score import REWARDS, Reward
from spanwise.score.custom import takes
from spanwise.score.foreign import completion_after
from spanwise.score.items import calling_convention, completion_text
from spanwise.score.score import as_scores
from spanwise.segment import find_blocks
from spanwise.types import BlockText, Credit, Fault, Scores, Spans, join_rows

_T = TypeVar("_T")
#: The largest number of tokens, padding included, that are processed at once.
AT_A_TIME = 250_000


@dataclass(frozen=True)
class FileSpans:
    """The places of all blocks in the completions of a rollout file."""

    names: tuple[str, ...]
    start_nk: Int[Tensor, "n k"]
    end_nk: Int[Tensor, "n k"]
    length_nk: Int[Tensor, "n k"]
    fault_n: Int[Tensor, " n"]
    block_v: Int[np.ndarray, " v"]  # The block index of every token of the file; -1 for tokens in no block.
    interleaved: bool  # Whether some block is interrupted by another block.

    def spans(self, rows: Tensor | slice, index_rt: Int[np.ndarray, "r t"]) -> Spans:
        """Return the block spans of the completions `rows`. `index_rt` has the positions of the tokens in the file."""
        block_index_rt = gather(index_rt, self.block_v, -1)
        return Spans(self.names, self.start_nk[rows], self.end_nk[rows], block_index_rt, self.fault_n[rows])


@dataclass(frozen=True)
class MethodCredit:
    """The credit that one method gives to the completions."""

    name: str
    file_spans: FileSpans
    credit: Credit  # the credit of each block; NaN if unknown
    spread: Callable[[Credit, Spans], Float[Tensor, "n t"]]
    #: The advantage of every token; None if `spread` computes the advantages from `credit`.
    adv_v: Float[np.ndarray, " v"] | None = None
    #: The share of strata (sets of compared completions) without any credit, by objective.
    dead: Mapping[str, float] = field(default_factory=dict)

    def advantages(self, table: RolloutTable, first: int, last: int) -> Float[np.ndarray, " s"]:
        """Return the advantages of all tokens in rows `first` to `last - 1`. Rows outside the loss get 0."""
        row_range = slice(first, last)
        if self.adv_v is not None:
            token_adv_s = self.adv_v[table.tokens.offsets[first] : table.tokens.offsets[last]]
        else:
            token_index_rt = table.tokens.places(row_range)
            adv_rt = self.spread(self.credit.take(row_range), self.file_spans.spans(row_range, token_index_rt))
            token_adv_s = adv_rt.numpy()[token_index_rt >= 0]
        if table.learned_n is None:
            return token_adv_s
        return token_adv_s * np.repeat(table.learned_n[row_range].numpy(), table.tokens.lengths[row_range])

    @property
    def by_block(self) -> dict[str, Float[Tensor, " n"]]:
        """Return the credit by block name (NaN if the block is missing). `stop` is the credit for omitting blocks."""
        credit_nk = self.credit.block_nk.masked_fill(self.file_spans.length_nk == 0, torch.nan)
        return {name: credit_nk[:, k] for k, name in enumerate(self.file_spans.names)} | stop_credit(self.credit.stop_n)

    @property
    def silent_n(self) -> Bool[Tensor, " n"]:
        """Marks the completions that get no credit at all."""
        return (self.credit.block_nk == 0).all(dim=1) & (self.credit.stop_n == 0)


@dataclass(frozen=True)
class CreditResult:
    """The credit of a rollout file under several methods."""

    table: RolloutTable
    group_n: Tensor  # each completion's group number; completions of one group are compared
    arms: Arms
    applied: tuple[MethodCredit, ...]  # One entry per method; the credit that the file itself holds comes last.
    scores: Scores  # The rewards that the methods use, each reward once.
    file_spans: FileSpans  # The spans of the blocks that tables and reports show.
    notes: tuple[str, ...]
    score: dict[str, Any] | None = None  # How well the self-rewarding scores predict right answers (`_measure_score`)

    @property
    def note(self) -> str:
        """All notes on how the file was read and credited, in one text."""
        return " ".join(self.notes)

    @property
    def title(self) -> Text:
        """The title over a table: the file and its size."""
        size_text = f"{len(self.table)} completions in {len(self.group_n.unique())} groups"
        # A `Text`, because Rich would read brackets of a path in a plain string as markup.
        return Text(f"{self.table.path} ({self.table.source}): {size_text}", style="table.title")


def apply_arms(
    table: RolloutTable, arms: Arms, group_n: Int[Tensor, " n"], notes: Sequence[str], *, recorded: bool, must: bool
) -> CreditResult:
    """Compute the credit of a rollout file by every method. `recorded` adds the trainer's own credit; `must` requires it."""
    spans_by_layout, reading_by_method = read_file(table, arms, extra_layouts=[arms.layout] if recorded else [])
    method_credits = [
        apply_arm(table, name, scheme, reading_by_method[name], spans_by_layout[scheme.layout], group_n)
        for name, scheme in arms.schemes.items()
    ]
    file_credit_note = ""
    try:
        if recorded:
            recorded_credit, file_credit_note = apply_recorded(table, spans_by_layout[arms.layout])
            method_credits.append(recorded_credit)
    except RecipeError as error:
        if must:
            raise
        file_credit_note = left_out_note([RECORDED], str(error))
    setup_notes = [
        note for name, scheme in arms.schemes.items() for note in setup_warnings(reading_by_method[name], scheme).values()
    ]
    scores = _collect_scores(table, arms, reading_by_method)
    figures, score_note = _measure_score(table, arms.schemes.values(), scores)
    recipe_modes = next((scheme.modes for scheme in arms.schemes.values() if scheme.modes), ())
    all_notes = [
        *arms.notes, file_credit_note, *dict.fromkeys(setup_notes), table.note, *notes, _note_shared_words(table, spans_by_layout),
        _note_missing_tools(table, arms), _describe_origins(table, arms, scores.names), _describe_sums(arms), score_note,
        *(mode.note(table) for mode in recipe_modes),
    ]  # fmt: skip
    spans_with_most_blocks = max((credit.file_spans for credit in method_credits), key=lambda spans: len(spans.names))
    shown_spans = spans_by_layout.get(arms.layout, spans_with_most_blocks)
    shown_notes = tuple(filter(None, all_notes))
    return CreditResult(table, group_n, arms, tuple(method_credits), scores, shown_spans, shown_notes, figures)


def _note_shared_words(table: RolloutTable, spans_by_layout: Mapping[Layout, FileSpans]) -> str:
    """Return a note if words hold text of two blocks: without a tokenizer, one of the two blocks counts as missing."""
    straddled_flags = (spans.fault_n & int(Fault.STRADDLED) for spans in spans_by_layout.values())
    max_straddled_count = max((int(flag_n.count_nonzero()) for flag_n in straddled_flags), default=0)
    if table.has_ids or not max_straddled_count:
        return ""
    return (
        f"Without a tokenizer, credit is shown per word. In {max_straddled_count} of {len(table)} completions, one word holds "
        "the text of two blocks. The word goes to one block, so the other block counts as missing. To credit both, give "
        "the tokenizer's folder with --tokenizer."
    )


def _note_missing_tools(table: RolloutTable, arms: Arms) -> str:
    """Return a note on reward functions that see completions without the tool output between turns."""
    computed_objectives = [x for scheme in arms.schemes.values() for x in scheme.objectives if x.name not in scheme.recorded]
    objective_names = dict.fromkeys(objective.name for objective in computed_objectives if _reads_completions(objective))
    if table.trainable.all() or not objective_names:
        return ""
    return (
        f"The reward function of {' and '.join(objective_names)} reads whole completions. Here, a completion is one text or one "
        "message without tool output. In training, a completion may be a list of messages, so rewards may differ. To use recorded "
        f"rewards instead, give --reward {next(iter(objective_names))}=COLUMN."
    )


def _reads_completions(objective: Objective) -> bool:
    if not callable(objective.reward):
        return False
    convention = calling_convention(objective)
    if convention is None:
        return takes(objective, "completions")
    return convention.takes_messages and objective.options.get("sees", "whole") == "whole"


def _collect_scores(table: RolloutTable, arms: Arms, reading_by_method: Mapping[str, Reading]) -> Scores:
    """Collect each reward once; if several methods use a reward, take it from the method with the most blocks."""
    reward_by_objective: dict[str, Reward] = {}
    for method_name in sorted(reading_by_method, key=lambda name: -len(arms.schemes[name].layout.names)):
        scores = reading_by_method[method_name].scores
        for m, objective_name in enumerate(scores.names):
            score_columns = scores.reward_nm[:, m], scores.status_nm[:, m], scores.by_outcome_nmo[:, m]
            confidence_n = None if scores.stated_nm is None else scores.stated_nm[:, m]
            note_n = None if scores.note_nm is None else scores.note_nm[:, m]
            reward_by_objective.setdefault(objective_name, Reward(*score_columns, confidence_n, note_n=note_n))
    if not reward_by_objective and "correct" in arms.recorded_columns:  # no method: show only the credit in the file
        reward_by_objective["correct"] = table.rewards[arms.recorded_columns["correct"]]
    if not reward_by_objective:
        no_rewards_n0 = torch.zeros(len(table), 0)
        return Scores((), no_rewards_n0, no_rewards_n0.long(), torch.zeros(len(table), 0, 2))
    return as_scores(reward_by_objective)


def _measure_score(table: RolloutTable, schemes: Iterable[Scheme], scores: Scores) -> tuple[dict[str, Any] | None, str]:
    """Measure how well self-rewarding scores predict right answers. Return figures, and a sentence on them."""
    if table.score_n is None:
        return None, ""
    judge_names = (mode.judge for scheme in schemes for mode in scheme.modes)
    judge_name = next((name for name in judge_names if name is not None), "correct")
    score_n = table.score_n.clamp(0.0, 1.0)
    has_score_n = ~score_n.isnan()
    verdict_n = torch.full_like(score_n, torch.nan)
    if judge_name in scores.names:
        outcome_n = scores.outcome(judge_name).double()
        verdict_n = outcome_n.masked_fill((outcome_n != 0) & (outcome_n != 1), torch.nan)
    is_judged = not bool(verdict_n.isnan().all())
    score_count = int(has_score_n.sum())
    coverage = float(has_score_n.double().mean())
    stats: dict[str, Any] = {"completions": score_count, "coverage": coverage, "verdict": judge_name if is_judged else None}
    score_sentence = (
        f"LaSeR has the model rate its answer. {score_count:,} completions have a score ({100 * coverage:.3g} %)"
    )
    alarm_reasons: list[str] = []
    try:
        from spanwise.measure import figures
    except ModuleNotFoundError:  # SciPy is missing: the extra `cli` does not install it
        pass
    else:
        figure_values = figures(score_n, verdict_n, well_formed_n=has_score_n)
        score_figures = {name: figure_values[name.removeprefix(OF_SCORE)] for name in SCORE_FIGURES}
        alarm_reasons = list(dict.fromkeys(alarms(score_figures).values()))
        stats |= {name.removeprefix(OF_SCORE): value for name, value in score_figures.items()} | {"alarms": alarm_reasons}
        if is_judged:
            figures_text = ", ".join(f"{label} {short(stats[label.lower()])}" for label in ("ECE", "Brier", "AUROC"))
            score_sentence = f"{score_sentence}. The scores predict the reward '{judge_name}' with {figures_text}"
    if not is_judged:
        return stats, f"{score_sentence}. The file does not say which completions are right."
    return stats, f"{score_sentence}." + "".join(f" {reason[:1].upper()}{reason[1:]}." for reason in alarm_reasons)


def _by_family(values: Mapping[str, _T]) -> dict[str, _T]:
    """Merge entries such as `equals.a` and `equals.b` into `equals` if their values agree."""
    value_by_label: dict[str, _T] = {}
    for label, members in families(values).items():
        values_agree = len({values[member] for member in members}) == 1
        value_by_label |= {label: values[members[0]]} if values_agree else {member: values[member] for member in members}
    return value_by_label


def _describe_origins(table: RolloutTable, arms: Arms, objective_names: Sequence[str]) -> str:
    """Say whether each reward comes from the completions' text or from a column. Name the unused reward columns."""
    column_by_objective = {name: arms.recorded_columns.get(name) for name in objective_names}
    if not column_by_objective:
        return ""
    origin_by_objective = {
        name: "the text" if column is None else "the file" if column == name else f"the file's '{column}'"
        for name, column in column_by_objective.items()
    }
    origins_text = ", ".join(f"{label} from {origin}" for label, origin in _by_family(origin_by_objective).items())
    unused_columns = [name for name in table.rewards if name not in column_by_objective.values()]
    unused_text = ", ".join(unused_columns[:3])
    more_names_text = f" and {len(unused_columns) - 3} more" if len(unused_columns) > 3 else ""
    unused_hint = (
        f" No objective uses the file's rewards {unused_text}{more_names_text}. To use one, give --reward OBJECTIVE=COLUMN."
    )
    return f"Rewards: {origins_text}.{unused_hint if unused_columns else ''}"


def _describe_sums(arms: Arms) -> str:
    """Say which rewards are added up by methods that credit whole completions."""
    if len({objective.name for objective in arms.objectives}) < 2:
        return ""
    method_sums = []
    for name, scheme in arms.schemes.items():
        if scheme.entry.kind == "completion":
            weight_by_label = _by_family({sum_objective.name: sum_objective.weight for sum_objective in scheme.objectives})
            weighted_labels = (label if weight == 1 else f"{weight:g} {label}" for label, weight in weight_by_label.items())
            lone_reward_note = "" if len(scheme.objectives) > 1 else " alone"
            method_sums.append(f"{name}: {' + '.join(weighted_labels)}{lone_reward_note}")
    sums_text = "; ".join(method_sums)
    return f"Each of these methods adds up all rewards of a completion: {sums_text}." if method_sums else ""


def read_file(
    table: RolloutTable, arms: Arms, *, extra_layouts: Sequence[Layout] = ()
) -> tuple[dict[Layout, FileSpans], dict[str, Reading]]:
    """Find the blocks and compute the rewards of all completions. Return spans by layout, rewards by method."""
    layouts = (*(scheme.layout for scheme in arms.schemes.values()), *extra_layouts)
    span_parts_by_layout: dict[Layout, list[tuple[Tensor, ...]]] = {layout: [] for layout in layouts}
    interleaved_layouts: set[Layout] = set()
    block_index_by_layout = {
        layout: disk_zeros(len(table.tokens.values), np.int8 if len(layout.names) < 128 else np.int16) for layout in layouts
    }
    readings_by_method: dict[str, list[Reading]] = {name: [] for name in arms.schemes}
    for start_row, end_row in fitting_runs(table.tokens.lengths, AT_A_TIME):
        REPORT.get()("finding blocks", int(table.tokens.offsets[end_row]), len(table.tokens.values))
        row_range = slice(start_row, end_row)
        token_index_rt = table.tokens.places(row_range)
        is_token_rt = token_index_rt >= 0
        ids_rt = gather(token_index_rt, table.tokens.values, 0)
        mask_rt = gather(token_index_rt, table.trainable, False)
        file_columns = {name: values[row_range] for name, values in table.columns.items()}
        file_rewards = {name: table.rewards[column].take(row_range) for name, column in arms.recorded_columns.items()}
        for layout, spans_parts in span_parts_by_layout.items():
            spans, block_texts = find_blocks(ids_rt, mask_rt, layout=layout, vocabulary=table.vocabulary)
            if spans.interleaved:
                interleaved_layouts.add(layout)
            block_index_by_layout[layout][token_index_rt[is_token_rt]] = spans.block_nt.numpy()[is_token_rt]
            spans_parts.append((spans.start_nk, spans.end_nk, spans.length_nk, spans.fault_n))
            for name, scheme in arms.schemes.items():
                if scheme.layout == layout:
                    reward_inputs = _function_columns(table, row_range, block_texts, scheme)
                    batch = Batch(table.group_n[row_range], ids_rt, mask_rt, columns={**file_columns, **reward_inputs})
                    scored_rows = read(batch, scheme, table.vocabulary, recorded=file_rewards, located=(spans, block_texts))
                    readings_by_method[name].append(scored_rows.take(slice(None)))
    spans_by_layout = {}
    for layout, spans_parts in span_parts_by_layout.items():
        span_columns = (torch.cat(column) for column in zip(*spans_parts, strict=True))
        spans_by_layout[layout] = FileSpans(
            layout.names, *span_columns, block_v=block_index_by_layout[layout], interleaved=layout in interleaved_layouts
        )
    return spans_by_layout, {name: Reading.joined(readings) for name, readings in readings_by_method.items()}


def _function_columns(
    table: RolloutTable, rows: slice, texts: Sequence[BlockText], scheme: Scheme
) -> dict[str, Sequence[Any]]:
    """Return the columns that a trainer adds for reward functions: prompts, completions and token ids."""
    functions_or_names = [objective.reward for objective in scheme.objectives if objective.name not in scheme.recorded]
    if not functions_or_names:
        return {}
    has_functions = any(map(callable, functions_or_names))
    # Without token ids, a length reward would count words or bytes instead of tokens.
    reward_entries = [REWARDS[name] for name in functions_or_names if isinstance(name, str)]
    reads_token_ids = table.has_ids and any(reward.reads_ids for reward in reward_entries)
    prompts = [parse_prompt(text) for text in table.prompts[rows]]
    reward_inputs: dict[str, Sequence[Any]] = {"prompts": prompts} if has_functions or any(prompts) else {}
    if has_functions or reads_token_ids:
        reward_inputs["completion_ids"] = [table.tokens.slice(n, n + 1).tolist() for n in range(rows.start, rows.stop)]
    if has_functions:
        reward_inputs["completions"] = [
            completion_after(prompt, completion_text(blocks)) for prompt, blocks in zip(prompts, texts, strict=True)
        ]
    return reward_inputs


def apply_arm(
    table: RolloutTable, name: str, scheme: Scheme, reading: Reading, file_spans: FileSpans, group_n: Int[Tensor, " n"]
) -> MethodCredit:
    """Compute the credit of all completions by one method. The completions of one training step are one batch."""
    credits_tokens = scheme.entry.kind == "token" or scheme.refine is not None
    adv_v = disk_zeros(len(table.tokens.values) if credits_tokens else 0, np.float32)
    # A method that compares tokens across a training step is given the whole step at once.
    has_comparing_mode = any(mode.compares for mode in scheme.modes)
    needs_whole_step = scheme.options.get("whiten") or scheme.refine is not None or has_comparing_mode
    can_split_step = scheme.entry.kind == "token" and "split" not in scheme.entry.exceptions
    max_tokens = AT_A_TIME if can_split_step and not needs_whole_step else sys.maxsize
    credit_parts: list[tuple[Tensor, Credit]] = []
    for step_rows in rows_by_number(table.step_n):
        # Average over the whole training step. The loop below may compute the credit of the step in several parts.
        mean_length = file_spans.length_nk[step_rows].sum(dim=1).double().mean()
        for start_index, end_index in fitting_runs(table.tokens.lengths[step_rows.numpy()], max_tokens):
            row_indices = step_rows[start_index:end_index]
            scored_rows = reading.take(row_indices)
            batch_fields: dict[str, Any] = {}
            for mode in scheme.modes:
                batch_fields |= mode.recorded(table, row_indices)
            if credits_tokens:
                token_index_rt = table.tokens.places(row_indices.numpy())
                scored_rows = replace(scored_rows, spans=file_spans.spans(row_indices, token_index_rt))
                batch_fields["ids_nt"] = gather(token_index_rt, table.tokens.values, 0)
                batch_fields["mask_nt"] = gather(token_index_rt, table.trainable, False)
                for batch_field, column_names in token_columns(scheme).items():
                    token_values = [gather(token_index_rt, table.token_values[column], 0.0) for column in column_names]
                    batch_fields[batch_field] = torch.stack(token_values, dim=2).squeeze(2)
                end_value_columns = value_columns(scheme.value_names, AFTER)
                if "value_nt" in batch_fields and table.after_values.keys() >= {*end_value_columns}:
                    end_values = [table.after_values[column][row_indices] for column in end_value_columns]
                    batch_fields["bootstrap_n"] = torch.stack(end_values, dim=1)
                credit = credit_batch(scored_rows, Batch(group_n[row_indices], **batch_fields), scheme)
                credit = replace(credit, mean_length_n=mean_length.expand(len(row_indices)))
                is_token_rt = token_index_rt >= 0
                adv_v[token_index_rt[is_token_rt]] = advantages(credit, scored_rows.spans, scheme).numpy()[is_token_rt]
            else:
                if table.rollout_n is not None:
                    batch_fields["steps"] = Steps(table.rollout_n[row_indices], row_indices)
                credit = credit_batch(scored_rows, Batch(group_n[row_indices], **batch_fields), scheme)
                # A completion without blocks has no token that could get credit.
                is_empty_n = ~scored_rows.present_nk.any(dim=1)
                adv_nm = None if credit.adv_nm is None else credit.adv_nm.masked_fill(is_empty_n[:, None], 0.0)
                credit = replace(credit, stop_n=credit.stop_n.masked_fill(is_empty_n, 0.0), adv_nm=adv_nm)
            credit_parts.append((row_indices, credit))
    credit = _join_credit(credit_parts)
    strata_counts = dead_strata(credit, scheme, group_n=group_n if credits_tokens else None)
    dead_share_by_objective = {name: dead_count / total for name, (total, dead_count) in strata_counts.items() if total}
    spread_credit = partial(advantages, scheme=scheme)
    return MethodCredit(name, file_spans, credit, spread_credit, adv_v if credits_tokens else None, dead_share_by_objective)


def _join_credit(parts: Sequence[tuple[Tensor, Credit]]) -> Credit:
    """Join the credit of several batches in file order. Renumber the sets of compared completions (strata)."""
    row_order = torch.cat([rows for rows, _ in parts]).argsort()
    renumbered_credits = []
    stratum_offset = 0
    for _, credit in parts:
        assert credit.comparison is not None, "it was credited here"
        stratum_nm = credit.comparison.stratum_nm
        new_stratum_nm = torch.where(stratum_nm >= 0, stratum_nm + stratum_offset, -1)
        new_comparison = replace(credit.comparison, stratum_nm=new_stratum_nm)
        renumbered_credits.append(replace(credit, comparison=new_comparison, token_nt=None, refined_nt=None))
        stratum_offset += int(stratum_nm.max()) + 1 if stratum_nm.numel() else 0
    return join_rows(renumbered_credits).take(row_order)


def rows_by_number(number_n: Int[Tensor, " n"]) -> Iterator[Int[Tensor, " r"]]:
    """Yield the row indices of each step or group, in the order of their numbers."""
    row_order = torch.argsort(number_n, stable=True)
    _, row_counts = torch.unique_consecutive(number_n[row_order], return_counts=True)
    yield from torch.split(row_order, row_counts.tolist())


def apply_recorded(table: RolloutTable, file_spans: FileSpans) -> tuple[MethodCredit, str]:
    """Return the credit that the trainer recorded, and a note on it."""
    trainer_record = table.as_recorded
    if trainer_record is None:
        raise RecipeError(
            f"'{table.path}' records no advantages, score or reward that could be shown; leave the method '{RECORDED}' out."
        )
    present_nk = file_spans.length_nk > 0
    # Trainers divide a rollout's advantage or reward equally among all its sampled tokens.
    token_count_n = file_spans.length_nk.sum(dim=1).double()
    if table.rollout_n is not None:
        token_count_n = torch.bincount(table.rollout_n, weights=token_count_n)[table.rollout_n]
    stop_credit_n = torch.zeros(len(table)).double()
    token_adv_v = None
    if trainer_record.by_block:
        zero_credit_n = torch.zeros(len(table))
        block_credits = [trainer_record.by_block.get(name, zero_credit_n) for name in file_spans.names]
        is_present_k = present_nk.any(dim=0)
        present_names = (name for k, name in enumerate(file_spans.names) if is_present_k[k])
        if missing_names := [name for name in present_names if name not in trainer_record.by_block]:
            recorded_blocks_text = ", ".join(name for name in trainer_record.by_block if name != STOP)
            raise RecipeError(
                f"'{table.path}' has the trainer's credit only for blocks {recorded_blocks_text}, but the layout also has "
                f"{', '.join(missing_names)}. To see this credit (method '{RECORDED}'), give the layout of the training run."
            )
        credit_nk = torch.stack(block_credits, dim=1).double().nan_to_num()
        stop_credit_n = trainer_record.by_block.get(STOP, stop_credit_n).nan_to_num()
    elif trainer_record.by_token:
        credit_sum_parts: list[Tensor] = []
        token_adv_v = disk_zeros(len(table.tokens.values), np.float32)
        for row_range in (slice(*bounds) for bounds in fitting_runs(table.tokens.lengths, AT_A_TIME)):
            token_index_rt = table.tokens.places(row_range)
            block_column_rt = gather(token_index_rt, file_spans.block_v, -1).long() + 1
            credit_sum_rk = torch.zeros(len(token_index_rt), len(file_spans.names) + 1).double()
            credit_sum_rk.scatter_add_(1, block_column_rt, gather(token_index_rt, trainer_record.value, 0.0))
            credit_sum_parts.append(credit_sum_rk[:, 1:])
            is_token_rt = token_index_rt >= 0
            token_index_s = token_index_rt[is_token_rt]
            is_in_block_s = block_column_rt.numpy()[is_token_rt] > 0
            token_adv_s = trainer_record.value[token_index_s]
            if not trainer_record.shares:
                token_adv_s = token_adv_s / np.repeat(token_count_n[row_range].numpy(), table.tokens.lengths[row_range])
            token_adv_v[token_index_s] = np.where(np.isnan(token_adv_s) | is_in_block_s, token_adv_s, 0.0)
        credit_nk = torch.cat(credit_sum_parts)
        if not trainer_record.shares:
            credit_nk = credit_nk / file_spans.length_nk.clamp(min=1)
    else:
        credit_nk = torch.from_numpy(trainer_record.value)[:, None].expand(present_nk.shape)
    count_m = torch.zeros(0, dtype=torch.long)
    block_credit_nk = torch.where(present_nk, credit_nk, 0.0)
    credit = Credit(block_credit_nk, stop_credit_n, singleton_m=count_m, absent_m=count_m, mean_length_n=token_count_n)
    spread_unit = "block" if trainer_record.by_block else "completion"
    spread_text = (
        "Each token has a number of its own"
        if trainer_record.shares
        else f"Each number is spread over the tokens of its {spread_unit}"
    )
    recorded_note = f"'{RECORDED}' is the trainer's own credit, read from {trainer_record.says}. {spread_text}."
    spread_function = partial(_spread_recorded, by_block=bool(trainer_record.by_block))
    return MethodCredit(RECORDED, file_spans, credit, spread_function, token_adv_v), recorded_note


def _spread_recorded(credit: Credit, spans: Spans, *, by_block: bool) -> Float[Tensor, "n t"]:
    """Spread recorded credit over the tokens of each block or rollout. A row without credit gets NaN."""
    finite_credit = replace(credit, block_nk=credit.block_nk.nan_to_num())
    spread_divisor = "block" if by_block or credit.mean_length_n is None else credit.mean_length_n
    adv_nt = spread(finite_credit, spans, per=spread_divisor)
    return adv_nt.masked_fill(credit.block_nk.isnan().any(dim=1, keepdim=True), torch.nan)


def opening_tokens(segments: SaeSegments, logp: np.ndarray, trained: np.ndarray) -> list[int]:
    """Return the index of each SAE segment's first token, except for the first segment."""
    logp_1t = torch.from_numpy(logp).float().nan_to_num(nan=0.0)[None]  # NaN (unknown) starts no segment
    return segments.opens(logp_1t, torch.from_numpy(trained)[None])[0].nonzero().flatten()[1:].tolist()
