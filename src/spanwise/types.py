"""Data types that all modules share, such as spans, scores and credit.

The letters at the end of names are indices: n completions, t tokens, k blocks, m objectives, o outcomes. Intervals are half-open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.errors import AlignmentError, RecipeError, unknown

#: The text of a completion by block and tag, such as `text["solution"]["answer"]`. None stands for an absent
#: block, and for a tag that is not opened or not closed.
BlockText = Mapping[str, Mapping[str, str | None] | None]
_Table = TypeVar("_Table", bound="ByCompletion")
_ROWS = 64  # how many completions are processed at a time, so that data fit into the cache


@dataclass(frozen=True)
class ByCompletion:
    """The base class of tables with one row per completion. Only fields such as `_n` and `_nk` have rows."""

    def take(self: _Table, rows: Any) -> _Table:
        """Return the rows of some completions, given by a slice or by indices."""
        taken_tables = {
            name: table.take(rows) if isinstance(table, ByCompletion) else table[rows]
            for name, table in self._row_fields().items()
        }
        return replace(self, **taken_tables)

    def _row_fields(self) -> dict[str, Any]:
        """Return the fields that have one row per completion."""
        row_fields = {}
        for name, value in vars(self).items():
            is_row_tensor = isinstance(value, Tensor | np.ndarray) and name.rpartition("_")[2].startswith("n")
            if is_row_tensor or isinstance(value, ByCompletion):
                row_fields[name] = value
        return row_fields


def join_rows(parts: Sequence[_Table]) -> _Table:
    """Concatenate the rows of several tables. Fields without rows come from the first table."""
    joined_tables = {}
    for name, first_table in parts[0]._row_fields().items():
        part_tables: list[Any] = [getattr(part, name) for part in parts]
        if isinstance(first_table, np.ndarray):
            joined_tables[name] = np.concatenate(part_tables)
        else:
            joined_tables[name] = join_rows(part_tables) if isinstance(first_table, ByCompletion) else torch.cat(part_tables)
    return replace(parts[0], **joined_tables)


class PiecewiseText(dict[str, "Mapping[str, str | None] | None"]):
    """The text of a completion's blocks if some lie in several pieces. `whole` is the text of the completion."""

    __slots__ = ("whole",)

    def __init__(self, blocks: BlockText, whole: str) -> None:
        super().__init__(blocks)
        self.whole = whole


def whole_text(blocks: BlockText) -> str:
    """Return the whole text of a completion from the text of its blocks."""
    if isinstance(blocks, PiecewiseText):
        return blocks.whole
    return "".join(block[""] or "" for block in blocks.values() if block is not None)


def present(blocks: BlockText, names: Sequence[str]) -> list[str]:
    """Return the names of the blocks that a completion has."""
    return [name for name in names if blocks.get(name) is not None]


class Status(IntEnum):
    """Why a reward has its value, or has none. Only `OK` and `BROKE` go with a number, not NaN."""

    OK = 0
    ABSENT = 1  # The completion lacks the text that the reward reads.
    UNPARSABLE = 2  # The text that the reward reads has no readable value (such as a confidence of "high").
    TIMEOUT = 3  # The check of the completion was stopped at its deadline.
    ERROR = 4  # The check of the completion raised an error, or its process died.
    UNSCORED = 5  # No reward was computed: a file lacks it, no criterion asks for it, or the setting `only` excludes it.
    BROKE = 6  # The completion made its check fail twice, so it counts as wrong.


class Fault(IntFlag):
    """What is wrong with the form of a completion, such as a missing tag, as bits that add up. 0 means well-formed."""

    NONE = 0
    MISSING = 1  # A part of the layout is missing: its tag never opens, or its JSON path has no value.
    DUPLICATE = 2  # A tag opens twice in its block, or a JSON object has a key twice.
    ORDER = 4  # The tags do not stand in the layout's order.
    NESTED = 8  # A part, such as a tag, opens inside another part, or another part's closing mark ends it.
    TRUNCATED = 16  # A part, such as a tag, opens but never closes.
    EMPTY = 32  # The completion has no trainable token.
    MORE = 64  # The completion repeats a block more often than the layout allows.
    STRADDLED = 128  # A part, such as a tag, has no token of its own, because it lies inside an earlier token.


class Zero(IntEnum):
    """Why a token has the advantage 0. Of several, the first in this order counts (`zeros.zero_reasons`)."""

    words: str

    def __new__(cls, number: int, words: str) -> Zero:
        """Create a reason from its number and the words that explain the reason."""
        enum_member = int.__new__(cls, number)
        enum_member._value_, enum_member.words = number, words
        return enum_member

    CREDITED = 0, "credited"
    MASKED = 1, "masked: the model did not sample the token (it is tool output or an observation)"
    LEFT_OUT = 2, "left out: the trainer took the completion out of the loss"
    EMPTY = 3, "empty: the completion has no tokens"
    UNPAID = 4, "no objective pays the block"
    TIMEOUT = 5, "timeout: the check was stopped at its deadline"
    ERROR = 6, "error: the check raised or its process died"
    UNSCORED = 7, "unscored: no reward was computed or recorded"
    TRUNCATED = 8, "truncated: the part that the reward reads never closes"
    UNPARSABLE = 9, "unparsable: the part that the reward reads has no readable value"
    ABSENT = 10, "absent: the part that the reward reads is missing"
    SINGLETON = 11, "singleton: there is no other completion to compare with"
    ALL_RIGHT = 12, "unanimous: all right"
    ALL_WRONG = 13, "unanimous: all wrong"
    ALL_EQUAL = 14, "unanimous: all rewards are equal"
    AT_BASELINE = 15, "at the baseline: the reward equals the baseline, its expected value"
    CANCELLED = 16, "cancelled: the credits of several objectives add up to 0"
    RECORDED = 17, "recorded as 0, though other completions of the group got credit"
    NO_SCALE = 18, "no scale: the reward minus its baseline would be divided by 0"
    NO_WEIGHT = 19, "no weight: the objective is only logged"


@dataclass(frozen=True)
class Spans:
    """The tokens of each block of each completion.

    Attributes:
        names: the K block names, in order.
        start_nk, end_nk: half-open interval of block k in completion n; equal where the block is absent.
        block_nt: the block of every trainable token, -1 at every other token (padding, tool output).
        fault_n: `Fault` bits of each completion.
    """

    names: tuple[str, ...]
    start_nk: Int[Tensor, "n k"]
    end_nk: Int[Tensor, "n k"]
    block_nt: Int[Tensor, "n t"]
    fault_n: Int[Tensor, " n"]

    @staticmethod
    def of_blocks(names: Sequence[str], block_nt: Int[Tensor, "n t"], fault_n: Int[Tensor, " n"] | None = None) -> Spans:
        """Build spans from each token's block number. A block's interval runs from its first token to its last.

        Args:
            names, block_nt, fault_n: the fields of `Spans`; without `fault_n` every completion is well-formed.

        Example:
            >>> spans = Spans.of_blocks(["a", "b"], torch.tensor([[0, -1, 0, 1]]))
            >>> spans.start_nk.tolist(), spans.end_nk.tolist()
            ([[0, 3]], [[3, 4]])
        """
        token_count = block_nt.shape[1]
        start_nk = torch.zeros((len(block_nt), len(names)), dtype=torch.long, device=block_nt.device)
        end_nk = torch.zeros_like(start_nk)
        for first_row in range(0, len(block_nt) if token_count else 0, _ROWS):
            row_range = slice(first_row, first_row + _ROWS)
            for k in range(len(names)):
                has_block_nt = (block_nt[row_range] == k).view(torch.uint8)
                start_nk[row_range, k] = has_block_nt.argmax(dim=1)
                end_nk[row_range, k] = (token_count - has_block_nt.flip(dims=(1,)).argmax(dim=1)) * has_block_nt.amax(dim=1)
        fault_n = start_nk.new_zeros(len(start_nk)) if fault_n is None else fault_n
        return Spans(tuple(names), start_nk, end_nk, block_nt, fault_n)

    @cached_property
    def length_nk(self) -> Int[Tensor, "n k"]:
        """The number of trainable tokens of each block. Equations call it |T_k|."""
        length_nk = torch.zeros(self.start_nk.shape, dtype=torch.long, device=self.block_nt.device)
        for length_rows_nk, block_rows_nt in zip(length_nk.split(_ROWS), self.block_nt.split(_ROWS), strict=True):
            for k in range(len(self.names)):
                length_rows_nk[:, k] = (block_rows_nt == k).view(torch.uint8).sum(dim=1, dtype=torch.int32)
        return length_nk

    @property
    def present_nk(self) -> Bool[Tensor, "n k"]:
        """True for each block of which the completion has at least one trainable token."""
        return self.length_nk > 0

    @cached_property
    def interleaved(self) -> bool:
        """True if a block lies in several pieces, with tokens of other blocks between them."""
        for block_nt in self.block_nt.split(_ROWS):
            highest_block_nt = block_nt.cummax(dim=1).values  # the highest block number so far
            is_unordered_n = ((block_nt >= 0) & (block_nt < highest_block_nt)).any(dim=1)
            for row_index in is_unordered_n.nonzero().flatten().tolist():
                block_order = block_nt[row_index][block_nt[row_index] >= 0].unique_consecutive()
                if len(block_order) > len(block_order.unique()):
                    return True
        return False


@dataclass(frozen=True)
class Scores(ByCompletion):
    """The rewards and outcomes of every completion under every objective. Baselines may use outcomes.

    Attributes:
        names: the M objective names, in order.
        reward_nm: float64; NaN wherever `status_nm` is neither `Status.OK` nor `Status.BROKE`.
        status_nm: `Status` of each reward.
        by_outcome_nmo: float64; the reward the same text would have got had the outcome it is judged by been 0 (o=0) or
            1 (o=1); NaN where the reward is no known function of a binary outcome.
        outcome_names: the O outcomes that are no rewards.
        outcome_no: float64 codes of their values; NaN where unknown. None: there are none.
        stated_nm: float64; what the text states and the scorer read (a confidence); NaN where there is none. None: nobody kept it.
        unused_nm: float64; the number that came for a block which is not there, so that it is no reward; NaN elsewhere. None:
            nobody kept it (it stays in the process that scored).
        measured_nc: float64; what rewards cost, by `measures`. None: nothing is measured.
        measures: of its columns, "<objective>/<measure>".
        note_nm: text; why a judge gave the reward, or why a check failed; None where nothing is said. None: nobody kept it.

    Raises:
        AlignmentError: names and columns of outcomes differ in number.
    """

    names: tuple[str, ...]
    reward_nm: Float[Tensor, "n m"]
    status_nm: Int[Tensor, "n m"]
    by_outcome_nmo: Float[Tensor, "n m 2"]
    outcome_names: tuple[str, ...] = ()
    outcome_no: Float[Tensor, "n o"] | None = None
    stated_nm: Float[Tensor, "n m"] | None = None
    unused_nm: Float[Tensor, "n m"] | None = None
    note_nm: np.ndarray | None = None
    measured_nc: Float[Tensor, "n c"] | None = None
    measures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        outcome_count = 0 if self.outcome_no is None else self.outcome_no.shape[1]
        if outcome_count != len(self.outcome_names):
            raise AlignmentError(
                f"There are {len(self.outcome_names)} names for {outcome_count} outcomes; give one name to each."
            )

    def outcome(self, name: str) -> Float[Tensor, " n"]:
        """Return the outcome called `name` of every completion. It is a reward or a column of `outcome_no`.

        Raises:
            RecipeError: there is neither.

        >>> nothing_n1 = torch.zeros(1, 1)
        >>> Scores(("correct",), nothing_n1, nothing_n1.long(), torch.zeros(1, 1, 2), ("tidy",), nothing_n1 + 1).outcome("tidy")
        tensor([1.])
        """
        if name in self.names:
            return self.reward_nm[:, self.names.index(name)]
        if self.outcome_no is None or name not in self.outcome_names:
            raise RecipeError(unknown("outcome", name, (*self.names, *self.outcome_names)))
        return self.outcome_no[:, self.outcome_names.index(name)]


@dataclass(frozen=True)
class Comparison(ByCompletion):
    """The numbers behind each advantage `(reward - baseline) / divisor`, and which rewards were compared."""

    worth_nm: Float[Tensor, "n m"]  # The float64 reward, else `if_missing`; NaN if there is neither.
    #: The float64 baseline that is subtracted from `worth_nm`; NaN if no single number is subtracted.
    baseline_nm: Float[Tensor, "n m"]
    #: The float64 divisor of `worth_nm - baseline_nm`: 1 if nothing is divided, NaN without a baseline.
    divisor_nm: Float[Tensor, "n m"]
    stratum_nm: Int[Tensor, "n m"]  # The number of the set of compared rewards; -1: in no set.
    level_nm: Int[Tensor, "n m"]  # How many of the last outcomes in `Objective.given` the comparison ignores.
    members_nm: Int[Tensor, "n m"]  # How many rewards are compared, without those from `if_missing`.
    averaged_nm: Int[Tensor, "n m"]  # How many rewards the baseline averages; 0 if it is not a plain mean.
    reason_nm: Int[Tensor, "n m"]  # Why the advantage is 0 (a `Zero`); `Zero.CREDITED` for any other advantage.
    about_nm: Int[Tensor, "n m"]  # The number of the objective that the reason is about; -1: all objectives.

    def where(self, mask_nm: Bool[Tensor, ...], other: Comparison) -> Comparison:
        """Take this comparison's entries where the mask is true, and elsewhere those of `other`."""
        return Comparison(**{name: torch.where(mask_nm, table, getattr(other, name)) for name, table in vars(self).items()})

    @staticmethod
    def joined(columns: Sequence[Comparison]) -> Comparison:
        """Join the comparisons of several objectives, side by side, into one comparison with a column per objective."""
        return Comparison(
            **{name: torch.cat([getattr(column, name) for column in columns], dim=1) for name in vars(columns[0])}
        )

    def fitting(self, adv_nm: Float[Tensor, "n m"]) -> Comparison:
        """Return a copy with `reason_nm` for new advantages: which of them are 0, and why."""
        credited_reason = int(Zero.CREDITED)
        zero_reason_nm = torch.where(self.reason_nm == credited_reason, int(Zero.AT_BASELINE), self.reason_nm)
        return replace(self, reason_nm=torch.where(adv_nm != 0, credited_reason, zero_reason_nm))

    def unexplained(self, adv_nm: Float[Tensor, "n m"]) -> Comparison:
        """Return a copy for new advantages that are computed without a baseline. Its baselines and divisors are NaN."""
        nan_nm = torch.full_like(self.baseline_nm, torch.nan)
        zero_nm = torch.zeros_like(self.averaged_nm)
        return replace(self, baseline_nm=nan_nm, divisor_nm=nan_nm, averaged_nm=zero_nm).fitting(adv_nm)

    def rescaled(self, *, divisor: Float[Tensor, ...] | float, shift: float = 0.0) -> Comparison:
        """Return a copy whose baselines and divisors give (advantage - `shift`) / `divisor` for each advantage."""
        return replace(self, baseline_nm=self.baseline_nm + shift * self.divisor_nm, divisor_nm=self.divisor_nm * divisor)


@dataclass(frozen=True)
class Credit(ByCompletion):
    """The credit (advantage) of every block of every completion. It is not spread over tokens yet.

    Attributes:
        block_nk: float64 advantage of block k; 0 where the block is absent.
        stop_n: float64 advantage of the decision to stop: what the completion pays for objectives none of whose blocks it has
            (`if_missing`), carried by its last trainable token.
        singleton_m: per objective, how many rewards had no other completion to compare with (their credit is exactly 0).
        absent_m: per objective, how many rewards are absent.
        adv_nm: what each comparison (an objective, or the sum of all) credits a completion with, before its weight.
        comparison: what that was compared with.
        weight_m: of each comparison; 1 of a sum, whose worth has the weights in it.
        names: of the comparisons: the objectives, or all of them joined by " + "; () if each token or step is credited by itself.
        coarser_m: per objective, how many rewards were compared with fewer outcomes than the baseline is given.
        token_nt: of a method per token its advantages, of which `block_nk` is the mean over each block; without `stop_n`.
        refined_nt: what a refinement adds to each token's advantage, before it is shared over tokens. None: no refinement.
        mean_length_n: trainable tokens per completion of the batch that each was credited in, all its completions counted.
        length_nk: the tokens that share the credit of each block: if rows are turns, those of the trajectory. None: of the row.
        count_m: per objective, of how many rewards the counters are: completions, trajectories or turns. None: of all rows.

    Example:
        >>> nothing = torch.zeros(1)
        >>> one = Credit(torch.tensor([[0.5, -0.25]]).double(), nothing.double(), nothing.long(), nothing.long())
        >>> one.has_signal, one.take([0]).block_nk.tolist()
        (True, [[0.5, -0.25]])
    """

    block_nk: Float[Tensor, "n k"]
    stop_n: Float[Tensor, " n"]
    singleton_m: Int[Tensor, " m"]
    absent_m: Int[Tensor, " m"]
    adv_nm: Float[Tensor, "n c"] | None = None
    comparison: Comparison | None = None
    weight_m: Float[Tensor, " c"] | None = None
    names: tuple[str, ...] = ()
    coarser_m: Int[Tensor, " m"] | None = None
    token_nt: Float[Tensor, "n t"] | None = None
    refined_nt: Float[Tensor, "n t"] | None = None
    mean_length_n: Float[Tensor, " n"] | None = None
    length_nk: Int[Tensor, "n k"] | None = None
    count_m: Int[Tensor, " m"] | None = None

    @property
    def has_signal(self) -> bool:
        """True if any block, token or decision to stop has a credit other than 0."""
        return bool(self.signal_n().any())

    def signal_n(self, *, tolerance: float = 0.0) -> Bool[Tensor, " n"]:
        """Mark completions with credit beyond plus or minus `tolerance` at a block, a token or the decision to stop."""
        block_or_token_credit = self.block_nk if self.token_nt is None else self.token_nt
        credit_tables = (block_or_token_credit, self.stop_n[:, None], self.refined_nt)
        # Testing both bounds needs less memory than absolute values. NaN counts as above the tolerance.
        no_credit_masks = [
            ((table <= tolerance) & (table >= -tolerance)).all(dim=1) for table in credit_tables if table is not None
        ]
        return ~torch.stack(no_credit_masks).all(dim=0)

    @property
    def explained(self) -> tuple[Tensor, Comparison]:
        """The advantages, and the baseline and group behind each. Raises `AlignmentError` if the credit lacks them."""
        if self.adv_nm is None or self.comparison is None:
            raise AlignmentError(
                "The credit lacks adv_nm or comparison, which explain advantages. Compute it with spanwise.credit_batch."
            )
        return self.adv_nm, self.comparison
