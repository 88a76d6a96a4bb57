"""Turn a batch of completions into advantages: `read`, `credit_batch`, `advantages`, `metrics`.

An engine fills in a `Batch` and takes the advantages to its loss. `read` works row by row. `credit_batch` needs whole groups: if
groups lie on several processes, gather the tables of `Reading.pack` first. `advantages` works row by row again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.batch import Batch, Steps
from spanwise.credit import assign, assign_turns, spread
from spanwise.credit.spread import Streams, restrict, reward_streams, spread_tokens
from spanwise.credit.strata import first_of
from spanwise.credit.trajectories.rollouts import build_timeline, settle_turns
from spanwise.credit_metrics import CREDIT, CreditedBatch
from spanwise.errors import AlignmentError, DataError, DivergedError, RecipeError
from spanwise.scheme import Scheme
from spanwise.score import Reward, score_all
from spanwise.segment import Vocabulary, find_blocks
from spanwise.types import BlockText, ByCompletion, Credit, Fault, Scores, Spans, join_rows


@dataclass(frozen=True)
class Reading(ByCompletion):
    """The blocks and rewards that `read` found in N completions. `credit_batch` needs only them and the batch.

    Attributes:
        scores: rewards, statuses and outcomes of the scheme's objectives.
        length_nk: number of trainable tokens of each block, 0 if it is absent.
        fault_n: `Fault` bits of each completion.
        spans, text: the tokens and the text of each block; None for completions of other processes.

    Example:
        Two completions of two blocks; the second one has no second block.

        >>> nothing_n1 = torch.zeros(2, 1)
        >>> scores = Scores(("correct",), torch.tensor([[1.0], [0.0]]).double(), nothing_n1.long(), torch.zeros(2, 1, 2))
        >>> Reading(scores, torch.tensor([[3, 1], [2, 0]]), torch.zeros(2).long()).present_nk.tolist()
        [[True, True], [True, False]]
    """

    scores: Scores
    length_nk: Int[Tensor, "n k"]
    fault_n: Int[Tensor, " n"]
    spans: Spans | None = None
    text: list[BlockText] | None = None

    def __len__(self) -> int:
        return len(self.fault_n)

    @property
    def present_nk(self) -> Bool[Tensor, "n k"]:
        """True where a completion has at least one trainable token of a block."""
        return self.length_nk > 0

    def pack(self) -> Float[Tensor, "n c"]:
        """Pack rewards, outcomes and lengths into one float64 table, so that processes exchange them in one gather.

        Columns: M rewards, M statuses, 2 M rewards by outcome, M stated numbers, O outcomes, C measures, K block lengths, 1 fault.
        """
        scores = self.scores
        packed_tables = [
            scores.reward_nm,
            scores.status_nm,
            scores.by_outcome_nmo.flatten(1),
            torch.full_like(scores.reward_nm, torch.nan) if scores.stated_nm is None else scores.stated_nm,
            *([] if scores.outcome_no is None else [scores.outcome_no]),
            *([] if scores.measured_nc is None else [scores.measured_nc]),
            self.length_nk,
            self.fault_n[:, None],
        ]
        return torch.cat([table.double().cpu() for table in packed_tables], dim=1)

    @staticmethod
    def unpack(table_nc: Float[Tensor, "n c"], scheme: Scheme) -> Reading:
        """Rebuild a `Reading` (blocks and rewards) from a table made by `pack`. It has no spans and no text.

        Raises:
            AlignmentError: the table was packed under another scheme.
        """
        outcome_names, measure_names, m = scheme.outcome_names, scheme.measures, len(scheme.objectives)
        column_widths = [m, m, 2 * m, m, len(outcome_names), len(measure_names), len(scheme.layout.names), 1]
        if len(table_nc) == 0:  # a table without rows may also have no columns
            table_nc = table_nc.new_zeros(0, sum(column_widths))
        if table_nc.shape[1] != sum(column_widths):
            raise AlignmentError(
                f"unpack got a table with {table_nc.shape[1]} columns, but the scheme's objectives and blocks need "
                f"{sum(column_widths)} columns. Use the same scheme for pack and unpack."
            )
        tables = table_nc.split(column_widths, dim=1)
        reward_nm, status_nm, reward_by_outcome_nc, stated_number_nm, outcome_no, cost_nc, length_nk, fault_n1 = tables
        scores = Scores(
            scheme.names,
            reward_nm,
            status_nm.to(torch.int8),
            reward_by_outcome_nc.reshape(-1, m, 2),
            outcome_names=outcome_names,
            outcome_no=outcome_no if outcome_names else None,
            stated_nm=stated_number_nm,
            measured_nc=cost_nc if measure_names else None,
            measures=measure_names,
        )
        return Reading(scores, length_nk.long(), fault_n1.squeeze(1).long())

    def take(self, rows: Any) -> Reading:
        """Select the rewards and blocks of some completions, given by a slice or by indices. Spans and text are left out."""
        return super(Reading, replace(self, spans=None, text=None)).take(rows)

    @staticmethod
    def joined(parts: Sequence[Reading]) -> Reading:
        """Join the rewards and blocks read from several batches of one scheme. Spans and text are left out."""
        return join_rows([replace(reading, spans=None, text=None) for reading in parts])


def read(
    batch: Batch,
    scheme: Scheme,
    vocabulary: Vocabulary,
    *,
    recorded: Mapping[str, Reward] | None = None,
    located: tuple[Spans, list[BlockText]] | None = None,
) -> Reading:
    """Find the blocks of every completion, and compute its reward under each objective of the scheme.

    Args:
        batch: has token ids, mask and the columns that the rewards read.
        scheme: gives the layout and the objectives.
        vocabulary: the bytes of every token id.
        recorded: rewards that were computed before, by objective; they are not computed again.
        located: result of `find_blocks` under the scheme's layout, if several schemes share it.

    Raises:
        RecipeError: the batch has no token ids; an objective does not fit.
        AlignmentError, DataError, RewardError: see `find_blocks` and `score_all`.

    Example:
        >>> from spanwise import Layout
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 2, 3]], [0, 0], columns={"answer": ["4", "4"]})
        >>> read(batch, Scheme.preset("grpo", Layout({"all": ["answer"]})), vocabulary).scores.reward_nm.flatten()
        tensor([1., 0.], dtype=torch.float64)
    """
    spans, block_texts = locate(batch, scheme, vocabulary) if located is None else located
    columns = {**batch.columns, **batch.extras}
    settle_rewards = None
    if batch.steps is not None:
        timeline = build_timeline(batch.steps.trajectory_s, batch.steps.step_s)
        settle_rewards = partial(
            settle_turns, timeline, spans.present_nk, block_names=scheme.layout.names, scope=scheme.default_scope
        )
    scores = score_all(scheme.objectives, block_texts, columns=columns, recorded=recorded, settle=settle_rewards)
    return Reading(scores, spans.length_nk, spans.fault_n, spans, block_texts)


def locate(batch: Batch, scheme: Scheme, vocabulary: Vocabulary) -> tuple[Spans, list[BlockText]]:
    """Find the blocks of every completion of a batch. Refuse a batch without token ids and mask."""
    if batch.ids_nt is None or batch.mask_nt is None:
        raise RecipeError("This batch has no token ids or no mask, so there is nothing to read; give ids_nt and mask_nt.")
    return find_blocks(batch.ids_nt, batch.mask_nt, layout=scheme.layout, vocabulary=vocabulary, logp_nt=batch.logp_nt)


def credit_batch(reading: Reading, batch: Batch, scheme: Scheme) -> Credit:
    """Compute the credit of completions' blocks by a scheme's method (its estimator). The batch holds whole groups.

    Args:
        reading: the reading of all N completions.
        batch: has their groups, and the fields that `scheme.needs`.
        scheme: the rule of credit.

    Raises:
        RecipeError: the batch lacks what the method needs.
        AlignmentError: readings and groups differ in number.

    Example:
        >>> from spanwise import Layout
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 2, 3]], [0, 0], columns={"answer": ["4", "4"]})
        >>> scheme = Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion")
        >>> credit_batch(read(batch, scheme, vocabulary), batch, scheme).block_nk.flatten()
        tensor([ 1., -1.], dtype=torch.float64)
    """
    if len(reading) != len(batch.group_n):
        raise AlignmentError(
            f"{len(reading)} completions were read, but the batch has {len(batch.group_n)} group ids; give each an id."
        )
    mode_fields = {name for mode in scheme.modes for name in mode.adds}  # fields of the batch that modes may fill in later
    scheme.check({*batch.provides, *mode_fields}, at_read=scheme.reads)
    method_inputs: dict[str, Any] = {
        name: getattr(batch, name) for name in ("mask_nt", "value_nt", "logp_nt", "bootstrap_n", "ids_nt")
    }
    method_inputs |= {
        "length_n": reading.length_nk.sum(dim=1),
        "truncated_n": (reading.fault_n & int(Fault.TRUNCATED)) != 0,
        "block_nt": None if reading.spans is None else reading.spans.block_nt,
    }
    credit_settings: dict[str, Any] = {
        "objectives": scheme.objectives,
        "block_names": scheme.layout.names,
        "method": scheme.entry,
        "values": scheme.values,
        **scheme.options,
    }
    if batch.steps is not None:
        step_fields = {"trajectory_s": batch.steps.trajectory_s, "step_s": batch.steps.step_s}
        method_inputs["anchor_s"] = batch.steps.anchor_s
        credit = assign_turns(
            reading.scores, batch.group_n, reading.length_nk, **step_fields, inputs=method_inputs, **credit_settings
        )
    else:
        credit = assign(reading.scores, batch.group_n, reading.present_nk, inputs=method_inputs, **credit_settings)
        credit = replace(credit, mean_length_n=method_inputs["length_n"].double().mean().expand(len(reading)))
    for stage in scheme.stages:
        credit = stage.credit(credit, reading, batch, scheme)
    return credit


def streams(reading: Reading, batch: Batch, scheme: Scheme) -> Streams:
    """For a critic, put each reward on the last token that it credits. Refuse a scheme without a critic."""
    if not scheme.entry.reads_values:
        raise RecipeError(f"Method '{scheme.method}' has no critic that gives each token a value; use 'gae' or 'sae'.")
    if reading.spans is None or batch.mask_nt is None:
        raise RecipeError("A critic needs Batch.mask_nt and Reading.spans. Set both.")
    dtype = torch.float32 if batch.value_nt is None else torch.promote_types(batch.value_nt.dtype, torch.float32)
    block_nt, mask_nt = reading.spans.block_nt, batch.mask_nt
    return reward_streams(
        reading.scores, scheme.objectives, scheme.layout.names, block_nt, mask_nt, values=scheme.values, dtype=dtype
    )


def advantages(
    credit: Credit,
    spans: Spans | None,
    scheme: Scheme,
    *,
    mask_nt: Bool[Tensor, "n t"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "n t"]:
    """Give every token its share of its block's credit. A plain sum over tokens is then the training objective.

    Args:
        credit: the credit of the completions of `spans`.
        spans: the tokens of their blocks.
        scheme: its `per` is the length that a credit is divided by.
        mask_nt: the trainer's final mask, as wide or wider; completions that it leaves out get 0 and change no other's share.
        dtype: dtype of the result.

    Returns:
        (N, T); exactly 0 at tokens outside every block.

    Raises:
        RecipeError: `per` is "batch" and the credit does not know the lengths of its batch.
        DataError: `spans` is None, as in a reading that came from another process.
        DivergedError: an advantage is not finite; the message names the completion.

    Example:
        A block of two tokens shares .5, a block of one token gets -.25.

        >>> from spanwise import Layout
        >>> nothing = torch.zeros(1)
        >>> credit = Credit(torch.tensor([[0.5, -0.25]]).double(), nothing.double(), nothing.long(), nothing.long())
        >>> scheme = Scheme.preset("bae", Layout({"solution": ["answer"], "confidence": ["confidence"]}))
        >>> advantages(credit, Spans.of_blocks(scheme.layout.names, torch.tensor([[0, 0, 1, -1]])), scheme).tolist()
        [[0.25, 0.25, -0.25, 0.0]]
    """
    if spans is None:
        raise DataError(
            "spans is None, so the tokens of each block are unknown. Pass `reading.spans`, where `reading` is what `read` "
            "returned for these completions. A reading from another process has no spans; call `read` in this process."
        )
    spans = spans if mask_nt is None else restrict(spans, mask_nt)
    divisor_length: Any = credit.mean_length_n if scheme.per == "batch" else scheme.per
    if divisor_length is None:
        raise RecipeError(
            "per: batch divides each advantage by the batch's mean length, but the credit's mean_length_n is None. Take "
            "the credit from spanwise.credit_batch, or set its mean_length_n."
        )
    if credit.token_nt is None:
        adv_nt = spread(credit, spans, per=divisor_length, dtype=dtype)
    else:
        adv_nt = spread_tokens(credit.token_nt, spans, per=divisor_length, stop_n=credit.stop_n, dtype=dtype)
    if credit.refined_nt is not None:
        adv_nt = adv_nt + spread_tokens(credit.refined_nt, spans, per=divisor_length, dtype=dtype)
    adv_sum_n = adv_nt.sum(dim=1)  # a sum is finite only if all its terms are, and a test of sums needs little memory
    if not adv_sum_n.isfinite().all() and (bad_position := first_of(~adv_nt.isfinite())):
        n, t = bad_position
        credits_text = ", ".join(f"{block_credit:g}" for block_credit in credit.block_nk[n])
        raise DivergedError(
            f"The advantage of completion {n} of {len(adv_nt)} at token {t} is {float(adv_nt[n, t])}. The credits of the "
            f"completion's blocks are {credits_text}. Training stopped before the advantage changed the model. Look for very large "
            "numbers in the completion's rewards, in `weight` and `if_missing` of objectives, and in the critic's values."
        )
    return adv_nt


def metrics(
    credit: Credit,
    reading: Reading,
    scheme: Scheme,
    *,
    group_n: Shaped[Tensor, " n"] | None = None,
    steps: Steps | None = None,
) -> dict[str, float]:
    """Compute the metrics of a batch's credit, gathered from all processes. `spanwise.credit_metrics.CREDIT` lists them.

    Args:
        credit: the credit that `credit_batch` returns.
        reading, scheme: see `credit_batch`.
        group_n: prompt ids; without them there are no metrics of unanimous groups.
        steps: `Batch.steps`, if rows are turns; groups are then unanimous if their rollouts are.

    Returns:
        name -> value; NaN for a block that no completion has.

    Example:
        >>> from spanwise import Layout
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 2]], [0, 0], columns={"answer": ["4", "4"]})
        >>> scheme = Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion")
        >>> reading = read(batch, scheme, vocabulary)
        >>> logged = metrics(credit_batch(reading, batch, scheme), reading, scheme)
        >>> logged["credit/malformed"], logged["credit/all/mean_abs"]
        (0.5, 1.0)
    """
    batch = CreditedBatch(credit, reading.fault_n, reading.present_nk, reading.scores, scheme, group_n, steps)
    return {
        metric.key(part): value for metric in CREDIT if metric.of is not None for part, value in metric.of(batch).items()
    }
