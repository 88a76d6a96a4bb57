"""`Step`: the credit of one training step. Every engine computes it with two calls, `read` and `finish`.

Before them the engine fills in a batch; after them it puts the advantages where its trainer reads them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from spanwise.batch import Batch, Steps, by_turn
from spanwise.credit.spread import fill_missing, restrict
from spanwise.credit.strata import list_ids
from spanwise.credit.trajectories.rollouts import worth_of_turns
from spanwise.credit.trajectories.turns import Turns
from spanwise.errors import AlignmentError, DataError, RecipeError
from spanwise.explain.remarks import Watch
from spanwise.objective import Objective
from spanwise.pipeline import Reading, advantages, credit_batch, locate, metrics, read
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.score.custom import takes
from spanwise.score.items import calling_convention
from spanwise.score.reward import built_in
from spanwise.score.score import await_rewards, waits
from spanwise.segment import Vocabulary
from spanwise.types import Credit, Spans

__all__ = ["TURNS", "Ranks", "ReadBatch", "Step", "StepResult", "turn_rows"]

#: The column of turns, which rollout functions may return: for each completion, a list with a mapping for each turn.
TURNS = "turns"
#: Name endings of metrics that make sense only for a whole batch.
_OF_WHOLE_BATCHES = ("/unanimous", "/no_signal", "/dead_strata")


@dataclass(frozen=True)
class Ranks:
    """The processes of a distributed training run. Each holds the same number of completions."""

    rank: int  # The number of this process.
    gather: Callable[[Any], list[Any]]  # Called by all processes at once; returns all arguments in rank order.


@dataclass(frozen=True)
class ReadBatch:
    """A batch with the blocks, rewards and statuses that were read from its completions (`Reading`)."""

    batch: Batch  # One row per completion, or per turn.
    reading: Reading  # The blocks and rewards of each row; a `gathered` batch lacks the texts and usually the spans.
    completions: int  # The number of completions.
    turns: Turns | None = None  # The place of each row's turn in its completion; None without turns.
    gathered: ReadBatch | None = None  # The batch of all processes; None: there is one process.
    here: slice = field(default_factory=lambda: slice(None))  # The rows of this process within `gathered`.

    @property
    def everyone(self) -> ReadBatch:
        """The batch with the rows of all processes. Completions are compared across processes."""
        return self if self.gathered is None else self.gathered

    @property
    def spans(self) -> Spans:
        """The token spans of the blocks in each row. Rows from other processes have none."""
        assert self.reading.spans is not None, "another process sampled these completions, so only it knows their spans"
        return self.reading.spans

    def take(self, value_nt: Shaped[Tensor, "n t"]) -> Shaped[Tensor, "s u"]:
        """Turn a table with a row per completion into one with a row per turn. Without turns, keep it."""
        return value_nt if self.turns is None else self.turns.take(value_nt)

    def put(self, value_su: Shaped[Tensor, "s u"], *, width: int | None = None) -> Shaped[Tensor, "n t"]:
        """Turn a table with a row per turn into one with a row per completion. Put 0 between turns."""
        value_nt = value_su if self.turns is None else self.turns.put(value_su, rows=self.completions)
        return value_nt if width is None else wider(value_nt, width)

    def repeat(self, values: Sequence[Any]) -> list[Any]:
        """Repeat the value of each completion for each of its turns."""
        return list(values) if self.turns is None else self.turns.repeat(values)

    def worth_sm(self, scheme: Scheme) -> Float[Tensor, "s m"]:
        """Return each row's rewards. `if_missing` replaces a reward that the row, or its turn's rollout, left out."""
        turn_steps = self.batch.steps
        if turn_steps is None or not len(turn_steps.step_s):
            return fill_missing(self.reading.scores, scheme.objectives)
        trajectory_and_step = (turn_steps.trajectory_s, turn_steps.step_s)
        return worth_of_turns(self.reading.scores, *trajectory_and_step, objectives=scheme.objectives, kind="block")[0]

    def worth_nm(self, scheme: Scheme) -> Float[Tensor, "n m"]:
        """Return the rewards that a trainer logs. `if_missing` replaces what a completion left out.

        A completion of several turns has the last reward of its turns, or their mean for an objective of scope "turn".
        """
        reward_sm = self.worth_sm(scheme)
        turn_steps = self.batch.steps
        if turn_steps is None:
            return reward_sm
        reward_nm = reward_sm.new_full((self.completions, reward_sm.shape[1]), torch.nan)
        reward_nm[turn_steps.trajectory_s] = reward_sm  # each turn of a rollout holds the rollout's reward
        for m, objective in enumerate(scheme.objectives):
            if objective.scope == "turn":
                has_reward_s = ~reward_sm[:, m].isnan()
                completion_s = turn_steps.trajectory_s[has_reward_s]
                reward_sum_n = completion_s.bincount(reward_sm[has_reward_s, m].double(), minlength=self.completions)
                reward_nm[:, m] = reward_sum_n / completion_s.bincount(minlength=self.completions)  # 0 / 0 is NaN: no reward
        return reward_nm


def in_useful_groups(credit: Credit, group_n: Shaped[Tensor, " n"], *, tolerance: float = 0.0) -> Bool[Tensor, " n"]:
    """Mark the rows of groups in which some completion has credit above the tolerance."""
    return torch.isin(group_n, group_n[credit.signal_n(tolerance=tolerance)])


def gather_rows(read_batch: ReadBatch, scheme: Scheme, ranks: Ranks) -> ReadBatch:
    """Gather the rewards, group ids and turns of the rows of all processes."""
    steps = read_batch.batch.steps
    step_fields = None if steps is None else (steps.trajectory_s.cpu(), steps.step_s.cpu(), steps.anchor_s)
    rows_of_ranks = ranks.gather((read_batch.reading.pack(), read_batch.batch.group_n.cpu(), step_fields))
    packed_readings, groups_of_ranks, steps_of_ranks = zip(*rows_of_ranks, strict=True)
    row_counts = [len(packed_reading) for packed_reading in packed_readings]
    if None in steps_of_ranks and any(step_fields_of_rank is not None for step_fields_of_rank in steps_of_ranks):
        raise DataError(
            f"Process {steps_of_ranks.index(None)} got no '{TURNS}' for its completions, but another process did. Let rollout_func "
            f"return '{TURNS}' for every completion, also for one that failed."
        )
    batch = Batch(torch.cat(groups_of_ranks))
    if steps is not None:
        trajectories_of_ranks, step_numbers_of_ranks, anchors_of_ranks = zip(*steps_of_ranks, strict=True)
        trajectory_s = torch.cat([id_s + rank * read_batch.completions for rank, id_s in enumerate(trajectories_of_ranks)])
        anchor_states = None
        if any(anchors is not None for anchors in anchors_of_ranks):
            anchor_states = []
            for rank_anchors, row_count in zip(anchors_of_ranks, row_counts, strict=True):
                anchor_states += [None] * row_count if rank_anchors is None else list_ids(rank_anchors)
        batch = replace(batch, steps=Steps(trajectory_s, torch.cat(step_numbers_of_ranks), anchor_states))
    reading = Reading.unpack(torch.cat(packed_readings), scheme)
    all_rows = ReadBatch(batch, reading, len(row_counts) * read_batch.completions)
    rank_start_row = sum(row_counts[: ranks.rank])
    return replace(read_batch, gathered=all_rows, here=slice(rank_start_row, rank_start_row + len(read_batch.reading)))


def gather_tokens(read_batch: ReadBatch, scheme: Scheme, ranks: Ranks) -> ReadBatch:
    """Gather the tables with a value per token from all processes, if the credit method needs them."""
    all_rows = read_batch.everyone
    if all_rows.batch.steps is not None or "mask_nt" not in scheme.needs:
        return read_batch
    local_tensors = {name: getattr(read_batch.batch, name) for name in ("value_nt", "logp_nt", "bootstrap_n", "ids_nt")}
    # Add 1 to block numbers, because `_stack` pads with 0.
    tokens_of_ranks = ranks.gather((read_batch.spans.block_nt + 1, local_tensors))
    blocks_of_ranks, tensors_of_ranks = zip(*tokens_of_ranks, strict=True)
    block_nt = _stack(blocks_of_ranks) - 1
    filled_fields = [name for name, table in local_tensors.items() if table is not None]
    gathered_tensors = {name: _stack([tensors[name] for tensors in tensors_of_ranks]) for name in filled_fields}
    spans = Spans.of_blocks(scheme.layout.names, block_nt, all_rows.reading.fault_n)
    batch = replace(all_rows.batch, mask_nt=block_nt >= 0, **gathered_tensors)
    return replace(read_batch, gathered=replace(all_rows, reading=replace(all_rows.reading, spans=spans), batch=batch))


def _stack(tables: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of tables with different widths. Narrow tables are padded with 0 on the right."""
    largest_width = max(table.shape[1] for table in tables)
    return torch.cat([wider(table, largest_width) for table in tables])


def wider(value_nt: Tensor, width: int, *, fill: float = 0.0) -> Tensor:
    """Pad a table of tokens on the right, to `width` columns."""
    return pad(value_nt, (*(0, 0) * (value_nt.dim() - 2), 0, width - value_nt.shape[1]), value=fill)


def says_turns(entry: Any) -> bool:
    """Return whether an entry of the column `turns` is a list of mappings."""
    return isinstance(entry, list | tuple) and all(isinstance(turn, Mapping) for turn in entry)


def turn_rows(batch: Batch, scheme: Scheme) -> tuple[Batch, Turns]:
    """Split each completion of a batch into its turns, with one row per turn.

    A turn is a run of tokens that the model wrote. The keys of the mappings in the column `turns` become columns of the rows
    (None if a turn lacks a key); the key `anchor` is the state from which a turn starts. If every completion is a single turn, a
    column `anchor` is enough.
    """
    turn_descriptions = batch.columns.get(TURNS)
    other_columns = {name: column for name, column in batch.columns.items() if name != TURNS}
    turn_batch, turns = by_turn(replace(batch, columns=other_columns))
    if turn_descriptions is None:
        anchor_column = None if turns.step_s.any() else turn_batch.columns.get("anchor")
        turn_mappings: list[Mapping[str, Any]] = [{"anchor": state} for state in anchor_column or [None] * len(turns.row_s)]
    else:
        turn_counts = turns.row_s.bincount(minlength=len(turn_descriptions)).tolist()
        for n, (entry, turn_count) in enumerate(zip(turn_descriptions, turn_counts, strict=True)):
            if not says_turns(entry):
                raise DataError(
                    f"Completion {n} has {TURNS} = {entry!r:.80}; write a list with one mapping per turn: {{'anchor': ...}}."
                )
            if len(entry) != turn_count:
                raise AlignmentError(
                    f"Completion {n} has {len(entry)} entries in '{TURNS}', but its mask has {turn_count} turns. A turn is an "
                    f"unbroken run of tokens with mask 1. Give each turn one entry. If '{TURNS}' is a column of the dataset, "
                    "rename the column."
                )
        turn_mappings = [turn for turn_list in turn_descriptions for turn in turn_list]
    turn_keys = dict.fromkeys(key for turn in turn_mappings for key in turn)
    rollout_columns = {name: column for name, column in other_columns.items() if name not in turn_keys}
    turn_count_n = turns.row_s.bincount().tolist()
    check_turn_rewards(scheme, rollout_columns, turn_count_n, advice=f"Give each entry of '{TURNS}' a reward of its own")
    if turns.step_s.any():
        check_turn_readers(scheme, rollout_columns, turn_keys=turn_keys)
    turn_columns = {key: [turn.get(key) for turn in turn_mappings] for key in turn_keys if key != "anchor"}
    turn_anchors = [turn.get("anchor") for turn in turn_mappings]
    if "anchor_s" in scheme.entry.needs and all(anchor is None for anchor in turn_anchors):
        raise DataError(
            f"Method '{scheme.method}' compares turns that start from the same state, but no turn names its state. Let your "
            f"environment return '{TURNS}'. For each completion, '{TURNS}' is a list with one {{'anchor': STATE}} per turn."
        )
    anchors_or_none = turn_anchors if any(anchor is not None for anchor in turn_anchors) else None
    steps_with_anchors = steps_of_turns(batch.steps, turns.row_s, turns.step_s, anchors_or_none)
    return replace(turn_batch, columns={**turn_batch.columns, **turn_columns}, steps=steps_with_anchors), turns


def _paid_by_turn(scheme: Scheme) -> list[Objective]:
    """Return the objectives whose reward belongs to a single turn."""
    return [objective for objective in scheme.objectives if (objective.scope or scheme.default_scope) == "turn"]


def check_turn_rewards(scheme: Scheme, columns: Mapping[str, Any], turn_count_n: Sequence[int], *, advice: str) -> None:
    """Refuse one environment reward for a completion of several turns, if each turn needs a reward of its own."""
    environment_objectives = (objective for objective in _paid_by_turn(scheme) if objective.reward == "environment")
    for name in {objective.options.get("column", "environment") for objective in environment_objectives} & columns.keys():
        for n, turn_count in enumerate(turn_count_n):
            if turn_count > 1 and columns[name][n] is not None:
                raise DataError(
                    f"An objective pays each turn, but completion {n} has only one reward ('{name}') for its {turn_count} turns. "
                    f"{advice}, or write scope: rollout."
                )


def check_turn_readers(scheme: Scheme, columns: Mapping[str, Sequence[Any]], *, turn_keys: Iterable[str]) -> None:
    """If turns get their own rewards, refuse a reward that reads only the conversation, which is the same for all turns."""
    has_messages = any(isinstance(completion, list) for completion in columns.get("completions", ()))
    for objective in _paid_by_turn(scheme):
        reward_entry, convention, column_names = built_in(objective), calling_convention(objective), []
        advice = "use a function with the parameter 'blocks'"
        if reward_entry is not None:
            column_names = ["completion_ids"] if reward_entry.reads_ids else []
        elif convention is not None:
            advice = "scope: turn to show the function one turn at a time"
            column_names = ["completions"] if convention.takes_messages and has_messages and objective.scope is None else []
        elif not any(takes(objective, name) for name in ("blocks", *turn_keys)):
            column_names = [name for name in ("completions", "completion_ids") if takes(objective, name)]
        if column_names:
            raise RecipeError(
                f"Objective '{objective.name}' pays each turn, but its reward reads '{column_names[0]}', the whole conversation. "
                f"Write scope: rollout, or {advice}."
            )


def steps_of_turns(outer: Steps | None, row_s: Int[Tensor, " s"], step_s: Int[Tensor, " s"], anchor_s: Any) -> Steps:
    """Number the turns of each rollout. Without `outer`, each row of the batch is a rollout."""
    if outer is None:
        return Steps(row_s, step_s, anchor_s)
    return Steps(outer.trajectory_s[row_s], outer.step_s[row_s] * len(row_s) + step_s, anchor_s)


class BatchCredit(NamedTuple):
    """The credit of all processes' rows, with the metrics and warnings of the batch."""

    credits: Credit
    metrics: dict[str, float]
    warnings: list[str]


@dataclass(frozen=True)
class StepResult:
    """The advantages of this process's rows, and the metrics and warnings of the batch."""

    own: ReadBatch  # The rows of this process. If rows are turns, `own.put` copies their values into one row per completion.
    advantages_nt: Float[Tensor, "n t"]  # The advantage of each token of each row.
    spans: Spans  # The blocks of each row; a row that the trainer left out has none.
    credit: Credit  # The credit of this process's rows; counts such as `members_nm` include the rows of all processes.
    metrics: dict[str, float]  # The batch's metrics, computed from the rows of all processes.
    warnings: list[str]  # The warnings that no earlier batch had.
    credits: Credit  # The credit of all processes' rows.

    @property
    def blocks_nt(self) -> Int[Tensor, "n t"]:
        """The number of each token's block. Numbers start at 1 and differ between turns; 0 means outside blocks."""
        block_nt = self.spans.block_nt
        turns = self.own.turns  # None if each row is a whole completion
        if turns is not None:
            earlier_block_count_s1 = len(self.spans.names) * turns.step_s[:, None]
            block_nt = torch.where(block_nt >= 0, block_nt + earlier_block_count_s1, -1)
        return self.own.put(block_nt + 1)

    def by_completion(self) -> tuple[Credit, Bool[Tensor, "n k"]]:
        """Return each completion's mean credit over its turns, and a mask of the blocks that it has."""
        all_rows = self.own.everyone
        if all_rows.batch.steps is None:
            return self.credits, all_rows.reading.present_nk
        trajectory_s = all_rows.batch.steps.trajectory_s
        credit, present_sk = self.credits, all_rows.reading.present_nk.to(self.credits.block_nk.dtype)
        zero_nk = present_sk.new_zeros((all_rows.completions, present_sk.shape[1]))
        turn_count_nk = zero_nk.index_add(0, trajectory_s, present_sk)
        credit_sum_nk = zero_nk.index_add(0, trajectory_s, credit.block_nk * present_sk)
        stop_credit_n = credit.stop_n.new_zeros(all_rows.completions).index_add(0, trajectory_s, credit.stop_n)
        mean_credit_nk = credit_sum_nk / turn_count_nk.clamp(min=1)
        return Credit(mean_credit_nk, stop_credit_n, credit.singleton_m, credit.absent_m), turn_count_nk > 0


class Step:
    """Computes the credit of a training step. Engines call `read`, then `finish` for advantages, metrics and warnings.

    Args:
        scheme: the rule of credit.
        vocabulary: the bytes of every token id; None if other processes read the completions.
        ranks: the processes of the training; None if there is one.

    Example:
        >>> from spanwise import Layout
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> step = Step(Scheme.preset("rloo", Layout({"all": ["answer"]}), per="completion"), vocabulary)
        >>> own = step.read(Batch.jagged([[0, 1, 3], [0, 2, 3]], ["a", "a"], columns={"answer": ["4", "4"]}))
        >>> result = step.finish(own)
        >>> result.advantages_nt.sum(dim=1).tolist(), result.metrics["credit/malformed"], result.warnings
        ([1.0, -1.0], 0.0, [])
    """

    def __init__(self, scheme: Scheme, vocabulary: Vocabulary | None = None, *, ranks: Ranks | None = None) -> None:
        self.scheme, self.vocabulary, self.ranks = scheme, vocabulary, ranks
        self.zero_batches = 0  # how many training batches gave no credit at all
        self._watch, self._evaluation_watch = Watch(scheme), Watch(scheme)
        self._noted: dict[str, float] = {}

    def note(self, metrics: Mapping[str, float]) -> None:
        """Store metrics that modes, such as LaSeR, compute after the credit. The next `finish` warns of alarming ones."""
        self._noted.update(metrics)

    def read(self, batch: Batch) -> ReadBatch:
        """Find and score this process's blocks. If the scheme or the batch has turns, score each turn separately."""
        assert self.vocabulary is not None, "reading needs a vocabulary"
        row_batch, turns = self._rows(batch)
        local_batch = ReadBatch(row_batch, read(row_batch, self.scheme, self.vocabulary), len(batch.group_n), turns)
        return local_batch if self.ranks is None else gather_rows(local_batch, self.scheme, self.ranks)

    async def read_waiting(self, batch: Batch, in_thread: Callable[..., Awaitable[Any]]) -> ReadBatch:
        """Find and score blocks like `read`, but await slow rewards. `in_thread` runs the other work."""
        assert self.vocabulary is not None, "reading needs a vocabulary"
        awaited_objectives = [objective for objective in self.scheme.objectives if waits(objective)]
        if not awaited_objectives:
            return await in_thread(self.read, batch)
        rows, turns = self._rows(batch)
        spans, block_texts = await in_thread(locate, rows, self.scheme, self.vocabulary)
        rewards = await await_rewards(awaited_objectives, block_texts, {**rows.columns, **rows.extras})
        finish_reading = partial(read, rows, self.scheme, self.vocabulary, recorded=rewards, located=(spans, block_texts))
        return ReadBatch(rows, await in_thread(finish_reading), len(batch.group_n), turns)

    def _rows(self, batch: Batch) -> tuple[Batch, Turns | None]:
        """Split completions into one row per turn, if the scheme or the rollouts ask for it."""
        # A method for tokens credits a whole conversation as one sequence.
        turn_lists = None if self.scheme.entry.kind == "token" else batch.columns.get(TURNS)
        # Split if any completion lists turns, so that `turn_rows` refuses completions that list none.
        must_split_turns = turn_lists is not None and (
            all(map(says_turns, turn_lists)) or any(says_turns(turn_list) and turn_list for turn_list in turn_lists)
        )
        return turn_rows(batch, self.scheme) if "steps" in self.scheme.needs or must_split_turns else (batch, None)

    def finish(
        self,
        read_batch: ReadBatch,
        *,
        mask_nt: Bool[Tensor, "n t"] | None = None,
        learn: bool = True,
        number: int | None = None,
        whole_batch: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> StepResult:
        """Compute the credit and the advantages of a batch that `read` returned.

        Args:
            read_batch: result of `read`, with the values and log-probabilities that the scheme needs filled into its batch.
            mask_nt: the trainer's final mask over the completions; None: it trains on every sampled token.
            learn: False for an evaluation, of which estimators and warnings must remember nothing.
            number: number of the step, for warnings.
            whole_batch: False for one group of the trainer's batch. If the group gets no credit, there is no warning.
            dtype: dtype of the advantages.
        """
        if self.ranks is not None:
            read_batch = gather_tokens(read_batch, self.scheme, self.ranks)
        batch_credit = self.credit(read_batch, learn=learn, number=number, whole_batch=whole_batch)
        local_credit = batch_credit.credits.take(read_batch.here)
        spans = read_batch.spans
        if mask_nt is not None:
            mask_su = read_batch.take(mask_nt)
            if int(mask_su.sum()) != int(mask_nt.sum()):
                raise AlignmentError(
                    f"The trainer's mask has {int(mask_nt.sum())} tokens, but only {int(mask_su.sum())} of them lie in the "
                    "turns that spanwise read before. So the mask has changed. Keep the mask of sampled tokens unchanged."
                )
            spans = restrict(spans, mask_su)
        adv_nt = advantages(local_credit, spans, self.scheme, dtype=dtype)
        return StepResult(
            read_batch, adv_nt, spans, local_credit, batch_credit.metrics, batch_credit.warnings, batch_credit.credits
        )

    def credit(
        self, read_batch: ReadBatch, *, learn: bool = True, number: int | None = None, whole_batch: bool = True
    ) -> BatchCredit:
        """Compute the credit of all processes' rows. Unlike `finish`, leave out token advantages."""
        all_rows = read_batch.everyone
        batch_credits = self._credit(all_rows, learn=learn)
        group_n, steps = all_rows.batch.group_n, all_rows.batch.steps
        batch_metrics = metrics(batch_credits, all_rows.reading, self.scheme, group_n=group_n, steps=steps)
        watch = self._watch if learn else self._evaluation_watch
        new_warnings, has_unscored_objective = watch.of_reading(read_batch.reading, all_rows.reading)
        if steps is not None:
            new_warnings += watch.of_turns(all_rows.reading, all_rows.worth_sm(self.scheme), steps.trajectory_s)
        if learn:
            watched_metrics = {**self._noted, **batch_metrics}
            if not whole_batch:  # equal rewards in a single group are no reason for a warning
                watched_metrics = {name: v for name, v in watched_metrics.items() if not name.endswith(_OF_WHOLE_BATCHES)}
            new_warnings += self._watch.of_batch(watched_metrics, step=number)
            self._noted.clear()
        if number is not None:
            new_warnings = [f"Step {number}: {sentence}" for sentence in new_warnings]
        if learn and whole_batch and not batch_credits.has_signal:
            self.zero_batches += 1
            if self.zero_batches == 1:
                objectives_text = ", ".join(repr(objective.name) for objective in self.scheme.objectives if objective.weight)
                step_label = "" if number is None else f" at step {number}"
                cause_text = "Parts of the layout are missing, or an objective has no rewards. See the earlier warning."
                if not has_unscored_objective:
                    cause_text = "If credit/no_signal stays high, prompts are too easy or too hard, or a reward is constant."
                zero_reason = f"No reward ({objectives_text}) of any completion differs from its baseline. {cause_text}"
                new_warnings.append(
                    f"Every advantage of the batch{step_label} is zero, so nothing is learned from it. "
                    + (zero_reason if objectives_text else "Every objective has weight 0; give at least one another weight.")
                )
        return BatchCredit(batch_credits, batch_metrics, new_warnings)

    def _credit(self, all_rows: ReadBatch, *, learn: bool) -> Credit:
        """Compute the credit of all processes' rows. If `learn` is False, restore the credit method's state afterwards."""
        method_entry: Any = self.scheme.entry
        old_state = method_entry.estimator.state_dict() if method_entry.stateful and not learn else None
        batch_credits = credit_batch(all_rows.reading, all_rows.batch, self.scheme)
        if old_state is not None:
            method_entry.estimator.load_state_dict(old_state)
        return batch_credits

    def useful(self, read_batch: ReadBatch) -> Bool[Tensor, " n"]:
        """Mark the rows of groups in which some completion gets credit. The credit method's state does not change."""
        if self.ranks is not None:
            read_batch = gather_tokens(read_batch, self.scheme, self.ranks)
        all_rows = read_batch.everyone
        return in_useful_groups(self._credit(all_rows, learn=False), all_rows.batch.group_n)[read_batch.here]

    def rollouts(
        self,
        result: StepResult,
        *,
        number: int,
        prompts: Sequence[Any],
        completions: Sequence[Any] = (),
        columns: Mapping[str, Sequence[Any]] | None = None,
        learn: bool = True,
    ) -> Rollouts:
        """Return this process's rows as a table of rollouts. Prompts, completions and columns have one entry per row."""
        batch = result.own.batch
        steps_of_all_rows = result.own.everyone.batch.steps
        if batch.steps is not None and steps_of_all_rows is not None:  # rollout numbers must differ between processes
            trajectory_s = steps_of_all_rows.trajectory_s[result.own.here]
            batch = replace(batch, steps=replace(batch.steps, trajectory_s=trajectory_s))
        if "logp_nt" not in self.scheme.needs:
            batch = replace(batch, logp_nt=None)
        padding_by_field = {"ids_nt": 0.0, "mask_nt": 0.0, "value_nt": torch.nan, "logp_nt": torch.nan}
        padded_tables: dict[str, Any] = {
            name: wider(table, result.advantages_nt.shape[1], fill=padding)
            for name, padding in padding_by_field.items()
            if (table := getattr(batch, name)) is not None
        }
        batch = replace(batch, columns={name: list(values) for name, values in (columns or {}).items()}, **padded_tables)
        return Rollouts(
            mode="train" if learn else "eval",
            step=number,
            method=self.scheme.method,
            batch=batch,
            reading=result.own.reading,
            spans=result.spans,
            credit=result.credit,
            advantages_nt=result.advantages_nt,
            prompts=list(prompts),
            completions=list(completions),
            value_names=self.scheme.value_names,
            more={name: column_n for mode in self.scheme.modes for name, column_n in mode.columns(result.own.batch).items()},
        )
