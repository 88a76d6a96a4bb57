"""The one road from a batch of completions to advantages: `read`, `credit`, `advantages`, `metrics`.

An engine fills in a `Batch` and takes the advantages to its loss. `read` is local, row by row; `credit` needs whole groups, so
what `Reading.pack` makes of a reading is gathered first where groups lie on several processes; `advantages` is local again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.credit import assign, group_index, restrict, spread, spread_tokens
from spanwise.errors import AlignmentError, RecipeError
from spanwise.scheme import Scheme
from spanwise.score import Reward, score
from spanwise.segment import Vocabulary, locate
from spanwise.types import BlockText, Credit, Scores, Spans


@dataclass(frozen=True)
class Steps:
    """Where the rows of a batch stand in their trajectories, for methods that credit steps.

    Attributes:
        trajectory_s: id of each row's trajectory.
        step_s: number of the step; only its order counts.
        anchor_s: the state each step starts from: integer ids or anything hashable.
    """

    trajectory_s: Int[Tensor, " s"]
    step_s: Int[Tensor, " s"]
    anchor_s: Any = None


@dataclass(frozen=True)
class Batch:
    """All that an engine fills in.

    Attributes:
        group_n: the prompt of each completion: integer ids or anything hashable, in any order, groups of any sizes.
        ids_nt: token ids, aligned left, right or with gaps; any value where the mask is 0.
        mask_nt: the tokens that the model sampled and that are trained (no prompt, padding or tool output).
        columns: the dataset's columns and whatever else rewards read, N values each.
        extras: what else rewards may ask for by name, whatever it is (a trainer's state, its loggers).
        value_nt, logp_nt: a critic's values and the log-probabilities of the sampled tokens, for methods that need them.
        bootstrap_n: the value after the last token of completions that were cut off.
        steps: where rows that are steps of trajectories stand.

    Raises:
        AlignmentError: two fields differ in size; the message names both.

    Example:
        >>> Batch(["a", "b", "a"]).group_n
        tensor([0, 1, 0])
    """

    group_n: Any
    ids_nt: Int[Tensor, "n t"] | None = None
    mask_nt: Shaped[Tensor, "n t"] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)
    value_nt: Float[Tensor, "n t"] | None = None
    logp_nt: Float[Tensor, "n t"] | None = None
    bootstrap_n: Float[Tensor, " n"] | None = None
    steps: Steps | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.group_n, Tensor):
            object.__setattr__(self, "group_n", group_index(list(self.group_n)))
        n = len(self.group_n)
        shape = None if self.ids_nt is None else tuple(self.ids_nt.shape)
        for name in ("ids_nt", "mask_nt", "value_nt", "logp_nt"):
            value = getattr(self, name)
            if value is not None and (len(value) != n or (shape is not None and tuple(value.shape) != shape)):
                raise AlignmentError(
                    f"{name} is {tuple(value.shape)} for {n} group ids{'' if shape is None else f' and token ids {shape}'}."
                )
        for name, column in self.columns.items():
            if len(column) != n:
                raise AlignmentError(f"Column '{name}' has {len(column)} values for {n} completions; give one to each.")

    @staticmethod
    def jagged(
        ids: Sequence[Sequence[int]], group_n: Any, *, sampled: Sequence[Sequence[int]] | None = None, **more: Any
    ) -> Batch:
        """A batch of completions that are lists of token ids of different lengths.

        Args:
            ids: token ids of each completion.
            group_n: see `Batch`.
            sampled: 1 for a token the model sampled, 0 for tool or environment output; None: it sampled them all.
            more: further fields of `Batch`.

        Raises:
            AlignmentError: a completion and its flags differ in length.

        Example:
            >>> batch = Batch.jagged([[5, 6, 7], [8]], [0, 0], sampled=[[1, 0, 1], [1]])
            >>> batch.ids_nt.tolist(), batch.mask_nt.tolist()
            ([[5, 6, 7], [8, 0, 0]], [[True, False, True], [True, False, False]])
        """
        ids_nt, mask_nt = pad_tokens(ids, sampled)
        return Batch(group_n, ids_nt, mask_nt, **more)

    @property
    def provides(self) -> frozenset[str]:
        """The fields that are there, for `Scheme.check`."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) is not None)


@dataclass(frozen=True)
class Reading:
    """What N completions say and what that is worth; everything `credit` needs beside the groups.

    Attributes:
        scores: rewards, statuses and outcomes of the scheme's objectives.
        length_nk: trainable tokens of each block, 0 where it is absent.
        fault_n: `Fault` bits of each completion.
        spans, text: where the blocks lie and what they hold; None for completions of other processes.
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
        """Whether the completion has the block: it holds at least one trainable token."""
        return self.length_nk > 0

    def pack(self) -> Float[Tensor, "n c"]:
        """All that other processes must know of these completions as one float64 table: one gather per batch.

        Columns: M rewards, M statuses, 2 M rewards by outcome, M stated numbers, O outcomes, K block lengths, 1 fault.
        """
        scores = self.scores
        nothing_nm = torch.full_like(scores.reward_nm, torch.nan)
        parts = [
            scores.reward_nm.double(),
            scores.status_nm.double(),
            scores.by_outcome_nmo.double().flatten(1),
            nothing_nm.double() if scores.stated_nm is None else scores.stated_nm.double(),
            *([] if scores.outcome_no is None else [scores.outcome_no.double()]),
            self.length_nk.double(),
            self.fault_n.double()[:, None],
        ]
        return torch.cat([part.cpu() for part in parts], dim=1)

    @staticmethod
    def unpack(table_nc: Float[Tensor, "n c"], scheme: Scheme) -> Reading:
        """Read a table of `pack`, usually after a gather; spans and text stay where they were made.

        Raises:
            AlignmentError: the table was packed under another scheme.
        """
        m, k, outcomes = len(scheme.objectives), len(scheme.layout.names), scheme.outcome_names
        sizes = [m, m, 2 * m, m, len(outcomes), k, 1]
        if table_nc.shape[1] != sum(sizes):
            raise AlignmentError(
                f"The packed table has {table_nc.shape[1]} columns and the scheme's objectives and blocks make {sum(sizes)}; "
                f"pack and unpack with one scheme."
            )
        value_nm, status_nm, by_outcome, stated_nm, outcome_no, length_nk, fault = table_nc.split(sizes, dim=1)
        scores = Scores(
            scheme.names,
            value_nm,
            status_nm.to(torch.int8),
            by_outcome.reshape(-1, m, 2),
            outcome_names=outcomes,
            outcome_no=outcome_no if outcomes else None,
            stated_nm=stated_nm,
        )
        return Reading(scores, length_nk.long(), fault.squeeze(1).long())

    def take(self, rows: Any) -> Reading:
        """The scores of some completions (a slice, or indices), without spans and text."""
        return Reading(self.scores.take(rows), self.length_nk[rows], self.fault_n[rows])

    @staticmethod
    def joined(parts: Sequence[Reading]) -> Reading:
        """Several readings under one scheme as one, without spans and text."""
        return Reading(
            Scores.joined([part.scores for part in parts]),
            torch.cat([part.length_nk for part in parts]),
            torch.cat([part.fault_n for part in parts]),
        )


def read(
    batch: Batch,
    scheme: Scheme,
    vocabulary: Vocabulary,
    *,
    recorded: Mapping[str, Reward] | None = None,
    located: tuple[Spans, list[BlockText]] | None = None,
) -> Reading:
    """Find the blocks of every completion and score them: local, row by row.

    Args:
        batch: with token ids, mask and the columns that the rewards read.
        scheme: the layout and the objectives.
        vocabulary: the bytes of every token id.
        recorded: rewards that are known already, by objective; they are not computed.
        located: what `segment.locate` found under the scheme's layout, where several schemes share it.

    Raises:
        RecipeError: the batch has no token ids; an objective that does not fit.
        AlignmentError, DataError, RewardError: see `segment` and `score`.

    Example:
        >>> from spanwise import Layout
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 2, 3]], [0, 0], columns={"answer": ["4", "4"]})
        >>> read(batch, Scheme.preset("grpo", Layout({"all": ["answer"]})), vocabulary).scores.reward_nm.flatten()
        tensor([1., 0.], dtype=torch.float64)
    """
    if located is None:
        if batch.ids_nt is None or batch.mask_nt is None:
            raise RecipeError("This batch has no token ids and mask, so there is nothing to read; give ids_nt and mask_nt.")
        located = locate(batch.ids_nt, batch.mask_nt, layout=scheme.layout, vocabulary=vocabulary)
    spans, text = located
    scores = score(scheme.objectives, text, columns={**batch.columns, **batch.extras}, recorded=recorded)
    return Reading(scores, spans.length_nk, spans.fault_n, spans, text)


def credit(reading: Reading, batch: Batch, scheme: Scheme) -> Credit:
    """Compare completions with each other, as the scheme's method does: once per batch, whole groups.

    Args:
        reading: of all N completions.
        batch: their groups, and the fields that `scheme.needs`.
        scheme: the rule.

    Raises:
        RecipeError: the batch lacks what the method needs.
        AlignmentError: readings and groups differ in number.

    Example:
        >>> from spanwise import Layout
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 2, 3]], [0, 0], columns={"answer": ["4", "4"]})
        >>> scheme = Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion")
        >>> credit(read(batch, scheme, vocabulary), batch, scheme).block_nk.flatten()
        tensor([ 1., -1.], dtype=torch.float64)
    """
    if len(reading) != len(batch.group_n):
        raise AlignmentError(f"{len(reading)} completions were read and the batch has {len(batch.group_n)} group ids.")
    scheme.check(batch.provides)
    inputs: dict[str, Any] = {"length_n": reading.length_nk.sum(dim=1)}
    for name in ("mask_nt", "value_nt", "logp_nt", "bootstrap_n", "ids_nt"):
        if getattr(batch, name) is not None:
            inputs[name] = getattr(batch, name)
    if batch.steps is not None:
        inputs |= vars(batch.steps)
    if reading.spans is not None:
        inputs["block_nt"] = reading.spans.block_nt
    return assign(
        reading.scores,
        batch.group_n,
        reading.present_nk,
        objectives=scheme.objectives,
        block_names=scheme.layout.names,
        method=scheme.entry,
        inputs=inputs,
        **scheme.options,
    )


def advantages(
    found: Credit, spans: Spans, scheme: Scheme, *, mask_nt: Bool[Tensor, "n t"] | None = None
) -> Float[Tensor, "n t"]:
    """What every token is trained with, so that a plain sum over tokens is the objective: local.

    Args:
        found: credit of the completions of `spans`.
        spans: where their blocks lie.
        scheme: says what a token's share is counted in.
        mask_nt: the trainer's final mask, as wide or wider; completions that it leaves out get 0 (`restrict`).

    Returns:
        (N, T) float32; exactly 0 at tokens outside every block.
    """
    spans = spans if mask_nt is None else restrict(spans, mask_nt)
    if found.token_nt is not None:
        return spread_tokens(found.token_nt, spans, per=scheme.per)
    return spread(found, spans, per=scheme.per)


def metrics(found: Credit, reading: Reading, scheme: Scheme) -> dict[str, float]:
    """Summarise the credit of a batch of all processes.

    `credit/<block>/mean_abs`: mean |credit| of the completions that have the block; `credit/<block>/zero_frac`: the share of
    them whose credit is exactly 0; `credit/<objective>/singletons` and `credit/<objective>/reward_absent`: shares of all
    completions; `credit/<objective>/coarser` (several outcomes): the share compared with fewer outcomes than it is given;
    `credit/malformed`: share with any fault in its tags; `credit/stop/mean_abs`: mean |credit| of the decision to stop;
    `credit/no_signal`: 1 if every credit is 0, so its mean over a log interval is a share of batches.

    Returns:
        name -> value; NaN for a block that no completion has.

    Example:
        >>> from spanwise import Layout
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 2]], [0, 0], columns={"answer": ["4", "4"]})
        >>> scheme = Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion")
        >>> reading = read(batch, scheme, vocabulary)
        >>> found = metrics(credit(reading, batch, scheme), reading, scheme)
        >>> found["credit/malformed"], found["credit/all/mean_abs"]
        (0.5, 1.0)
    """
    completions = max(len(reading), 1)
    shown = {
        "credit/malformed": float((reading.fault_n != 0).double().mean()),
        "credit/stop/mean_abs": float(found.stop_n.abs().mean()),
        "credit/no_signal": float(not found.has_signal),
    }
    for k, block in enumerate(scheme.layout.names):
        here_n = found.block_nk[reading.present_nk[:, k], k]
        shown[f"credit/{block}/mean_abs"] = float(here_n.abs().mean())
        shown[f"credit/{block}/zero_frac"] = float((here_n == 0).double().mean())
    for m, objective in enumerate(scheme.objectives):
        shown[f"credit/{objective.name}/singletons"] = float(found.singleton_m[m]) / completions
        shown[f"credit/{objective.name}/reward_absent"] = float(found.absent_m[m]) / completions
        if len(objective.outcomes) > 1 and found.coarser_m is not None:
            shown[f"credit/{objective.name}/coarser"] = float(found.coarser_m[m]) / completions
    return shown


def dead_strata(found: Credit, scheme: Scheme) -> dict[str, tuple[int, int]]:
    """Per comparison, how many strata there are and in how many of them nobody gets any credit.

    A comparison is an objective of a method that credits blocks, and all objectives together of any other. What is compared
    with nothing has no stratum and is left out.

    Returns:
        name of the comparison -> (strata, dead ones).
    """
    if found.adv_nm is None or found.stratum_nm is None:
        return {}
    if scheme.entry.kind != "block":
        return {" + ".join(scheme.names): _dead(found.stratum_nm[:, 0], found.adv_nm[:, 0] != 0)}
    return {
        objective.name: _dead(found.stratum_nm[:, m], found.adv_nm[:, m] != 0)
        for m, objective in enumerate(scheme.objectives)
        if objective.baseline != "none"
    }


def _dead(stratum_n: Tensor, moved_n: Tensor) -> tuple[int, int]:
    held_n = stratum_n >= 0
    dense_n = group_index(stratum_n[held_n])
    total = int(dense_n.max()) + 1 if len(dense_n) else 0
    moved = torch.zeros(total).index_add(0, dense_n.cpu(), moved_n[held_n].float().cpu()) > 0
    return total, total - int(moved.sum())


def pad_tokens(
    ids: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]] | None = None
) -> tuple[Int[Tensor, "n t"], Bool[Tensor, "n t"]]:
    """Right-pad lists of token ids, and mark the tokens that the model sampled.

    Args:
        ids: token ids of each completion.
        sampled: 1 for a token the model sampled, 0 for tool or environment output; None: the model sampled them all.

    Returns:
        ids (int64, 0 at padding) and the mask.

    Raises:
        AlignmentError: a completion and its flags differ in length.

    Example:
        >>> pad_tokens([[5, 6, 7], [8]], [[1, 0, 1], [1]])[1].tolist()
        [[True, False, True], [True, False, False]]
    """
    lengths = [len(row) for row in ids]
    for n, (length, flags) in enumerate(zip(lengths, sampled or (), strict=bool(sampled))):
        if length != len(flags):
            raise AlignmentError(
                f"Completion {n} has {length} tokens and a tool mask of {len(flags)}; give one mask value to each token."
            )
    filled_nt = torch.arange(max(lengths, default=0)) < torch.tensor(lengths, dtype=torch.long)[:, None]
    ids_nt = torch.zeros(filled_nt.shape, dtype=torch.long)
    ids_nt[filled_nt] = torch.tensor(list(chain.from_iterable(ids)), dtype=torch.long)
    if sampled is None:
        return ids_nt, filled_nt
    mask_nt = torch.zeros_like(filled_nt)
    mask_nt[filled_nt] = torch.tensor(list(chain.from_iterable(sampled)), dtype=torch.long) != 0
    return ids_nt, mask_nt
