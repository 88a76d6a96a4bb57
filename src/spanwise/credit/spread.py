"""Rewards and credit on tokens: the streams of a critic's recursion, and `spread`, from credit to advantages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from spanwise.credit.strata import check_shapes, first_of, weighted
from spanwise.errors import AlignmentError, RecipeError, RewardError, check_known
from spanwise.objective import Objective
from spanwise.types import Credit, Scores, Spans, Status

#: The kinds of values: one return for all objectives (shared), or the future reward of each objective.
ValuesName = Literal["shared", "objective"]

_ROWS = 16
_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def left_out(scores: Scores) -> Bool[Tensor, "n m"]:
    """Mark the rewards that are missing because the completion left something out, not because a check failed."""
    return (scores.status_nm == int(Status.ABSENT)) | (scores.status_nm == int(Status.UNPARSABLE))


def completed(scores: Scores, objectives: Sequence[Objective]) -> Float[Tensor, "n m"]:
    """Return the rewards, with `if_missing` for rewards that the completion left out, or NaN if `if_missing` is None."""
    stand_in_m = scores.reward_nm.new_tensor([torch.nan if o.if_missing is None else o.if_missing for o in objectives])
    return torch.where(left_out(scores), stand_in_m, scores.reward_nm)


def weights(objectives: Sequence[Objective], like: Tensor) -> Float[Tensor, " m"]:
    """Return the weight of each objective, in the dtype of a tensor."""
    return like.new_tensor([objective.weight for objective in objectives])


def summed(scores: Scores, objectives: Sequence[Objective]) -> Float[Tensor, " n"]:
    """Return the weighted sum of the rewards; NaN if a reward with a weight has no number."""
    return weighted(completed(scores, objectives), weights(objectives, scores.reward_nm)).sum(dim=1)


def paid_blocks(objectives: Sequence[Objective], block_names: Sequence[str], device: torch.device) -> Bool[Tensor, "m k"]:
    """Return which blocks each objective pays."""
    for objective in objectives:
        if unknown_names := [name for name in objective.pays if name not in block_names]:
            raise RecipeError(
                f"Objective '{objective.name}' pays '{unknown_names[0]}', which is no block; there are {', '.join(block_names)}."
            )
    paid_mk = [[name in objective.pays for name in block_names] for objective in objectives]
    return torch.tensor(paid_mk, dtype=torch.bool, device=device).reshape(len(objectives), len(block_names))


def resolved_values(objectives: Sequence[Objective], values: ValuesName | None) -> ValuesName:
    """Return `values`, or its default: "objective" if objectives pay different blocks, else "shared"."""
    if values is not None:
        check_known("kind of values", values, get_args(ValuesName))
        return values
    return "objective" if len({frozenset(objective.pays) for objective in objectives}) > 1 else "shared"


def stream_names(objectives: Sequence[Objective], values: ValuesName | None) -> tuple[str, ...]:
    """Name the values of the critic, in order: the return, or one value per objective."""
    if resolved_values(objectives, values) == "shared":
        return ("return",)
    return tuple(objective.name for objective in objectives)


@dataclass(frozen=True)
class Streams:
    """The tokens of each recursion, the rewards on them, and the values that it reads.

    Attributes:
        names: what each value of the critic is of.
        reward_snt: the rewards; 0 nearly everywhere.
        mask_snt: the tokens of the stream; every other token counts as deleted. None where the completion takes no part.
        weight_s: what the advantages of the stream are multiplied by.
        stop_sn: the stream is the decision to stop: the completion's last trainable token alone, see `reward_streams`.
        last_sn: the stream holds the completion's last trainable token, so that what comes after a cut is its to come.
    """

    names: tuple[str, ...]
    reward_snt: Float[Tensor, "s n t"]
    mask_snt: Bool[Tensor, "s n t"]
    weight_s: Float[Tensor, " s"]
    stop_sn: Bool[Tensor, "s n"]
    last_sn: Bool[Tensor, "s n"]

    def inputs(
        self, value_nt: Float[Tensor, "n t *s"] | None = None, bootstrap_n: Float[Tensor, " n *b"] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs of `gae`, `sae` and `value_target`, stream by stream.

        Args:
            value_nt: (N, T), or (N, T, S) with one value per stream. None: none is given.
            bootstrap_n: (N,) for all streams or (N, S), see `gae`. It stands behind the streams that hold the completion's last
                trainable token; behind the others 0, for their blocks had ended.

        Raises:
            AlignmentError: another number of values than streams, other completions or tokens.

        Example:
            >>> scores = Scores(("a",), torch.tensor([[1.]]), torch.zeros(1, 1).long(), torch.full((1, 1, 2), torch.nan))
            >>> block_nt = torch.tensor([[0, 0]])
            >>> found = reward_streams(scores, [Objective("correct", "all")], ("all",), block_nt, block_nt >= 0)
            >>> [part["reward_nt"].tolist() for part in found.inputs(torch.tensor([[.5, .6]]))]
            [[[0.0, 1.0]]]
        """
        shape = tuple(self.mask_snt.shape[1:])
        parts = {} if value_nt is None else {"value_nt": self._by_stream(value_nt, "value_nt", shape)}
        if bootstrap_n is not None:
            bootstrap_n = bootstrap_n[:, None].expand(-1, len(self.names)) if bootstrap_n.dim() == 1 else bootstrap_n
            end_value_ns = self._by_stream(bootstrap_n, "bootstrap_n", shape[:1])
            parts["bootstrap_n"] = torch.where(self.last_sn.T, end_value_ns, 0.0)
        for s in range(len(self.names)):
            of_stream = {name: value[..., s] for name, value in parts.items()}
            yield {"reward_nt": self.reward_snt[s], "mask_nt": self.mask_snt[s], **of_stream}

    def _by_stream(self, value: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
        """Return the values with streams as the last axis; refuse any other number of values."""
        if tuple(value.shape[: len(shape)]) != shape or value.dim() > len(shape) + 1:
            raise AlignmentError(f"{what} is {tuple(value.shape)} and the completions are {shape}; give one value to each.")
        value = value if value.dim() > len(shape) else value[..., None]
        count, names = value.shape[-1], self.names
        if count != len(names):
            shared = " A critic of one value serves with values: shared." if count == 1 else ""
            per = "completion" if what.endswith("_n") else "token"
            are = "is 1 stream" if len(names) == 1 else f"are {len(names)} streams"
            raise AlignmentError(
                f"{what} holds {count} value{'' if count == 1 else 's'} per {per} and there {are} ({', '.join(names)}): give one "
                f"value to each, in this order.{shared}"
            )
        return value


def reward_streams(
    scores: Scores,
    objectives: Sequence[Objective],
    block_names: Sequence[str],
    block_nt: Int[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    values: ValuesName | None = None,
    dtype: torch.dtype = torch.float32,
) -> Streams:
    """Put each reward on the last trainable token e of the last block it pays, in one shared stream or one per objective.

    shared: r[i, e] = sum of weight_m r[i, m] over the m with that e;   else: r_m[i, e] = r[i, m]
    """
    check_shapes(block_nt=block_nt, mask_nt=mask_nt)
    reward_nm, weight_m, trained_nt = completed(scores, objectives), weights(objectives, scores.reward_nm), mask_nt.bool()
    last_n, some_n = last_token(trained_nt)
    in_block_mk = pad(paid_blocks(objectives, block_names, mask_nt.device), (0, 1))  # a block number of -1 means no block
    paid_mnt = in_block_mk[:, block_nt.long()] & trained_nt
    ends = [last_token(paid_nt) for paid_nt in paid_mnt]
    has_paid_nm = torch.stack([has_n for _, has_n in ends], dim=1)
    # A completion without a paid block has its reward at its last token: the decision to stop.
    end_nm = torch.where(has_paid_nm, torch.stack([end_n for end_n, _ in ends], dim=1), last_n[:, None])
    rows_m, names = range(len(objectives)), stream_names(objectives, values)
    if resolved_values(objectives, values) == "shared":
        # Tokens of unpaid blocks train too: their reward comes later, as in ordinary PPO with rewards inside.
        weighted_nm = weighted(reward_nm, weight_m)
        has_sum_n = ~weighted_nm.sum(dim=1).isnan()  # with an absent reward the sum is unknown
        mask_snt, stop_sn = (trained_nt & has_sum_n[:, None])[None], torch.zeros_like(has_sum_n)[None]
        weight_s = torch.ones(1, dtype=torch.float64, device=mask_nt.device)
        reward_snt = torch.zeros((1, *mask_nt.shape), dtype=dtype, device=mask_nt.device)
        rows = (has_sum_n & some_n).nonzero().squeeze(1)
        for m in rows_m:  # add all rewards of one token in the order of the objectives
            same_end_nm = end_nm[rows] == end_nm[rows, m, None]
            reward_snt[0, rows, end_nm[rows, m]] = torch.where(same_end_nm, weighted_nm[rows], 0.0).sum(dim=1).to(dtype)
    else:
        has_reward_nm = ~reward_nm.isnan()
        stop_nm = has_reward_nm & left_out(scores) & ~has_paid_nm & some_n[:, None]
        reward_snt = torch.zeros(paid_mnt.shape, dtype=dtype, device=mask_nt.device)
        mask_snt = paid_mnt & has_reward_nm.T[..., None]
        for m in rows_m:
            stop = stop_nm[:, m].nonzero().squeeze(1)
            mask_snt[m, stop, last_n[stop]] = True
            rows = (stop_nm[:, m] | (has_paid_nm[:, m] & has_reward_nm[:, m])).nonzero().squeeze(1)
            reward_snt[m, rows, end_nm[rows, m]] = reward_nm[rows, m].to(dtype)
        stop_sn, weight_s = stop_nm.T, weight_m.double()
    holds_sn = mask_snt.gather(2, last_n.expand(len(mask_snt), -1)[..., None]).squeeze(2) if mask_nt.shape[1] else stop_sn
    return Streams(names, reward_snt, mask_snt, weight_s, stop_sn, holds_sn)


def last_token(flag_nt: Tensor) -> tuple[Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """Return the last flagged token of each completion (0 if no token is flagged), and whether a token is flagged."""
    some_n = flag_nt.any(dim=1)
    if not flag_nt.shape[1]:
        return some_n.long(), some_n
    place_t = torch.arange(flag_nt.shape[1], dtype=torch.int32, device=flag_nt.device)
    return torch.where(flag_nt, place_t, 0).amax(dim=1).long(), some_n


def on_last_token(reward_n: Float[Tensor, " n"], mask_nt: Bool[Tensor, "n t"]) -> Float[Tensor, "n t"]:
    """Put the reward of each completion on its last trainable token, and 0 on all other tokens."""
    reward_nt = torch.zeros(mask_nt.shape, device=mask_nt.device)
    last_n, has_n = last_token(mask_nt.bool())
    reward_nt[has_n, last_n[has_n]] = reward_n[has_n].to(reward_nt.dtype)
    return reward_nt


def spread(
    credit: Credit,
    spans: Spans,
    *,
    per: str | float | int | Float[Tensor, " n"] = "block",
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "n t"]:
    r"""Give every trainable token the credit of its block, weighted so that a plain sum over tokens is the objective.

    Equation
        A[i, t] = A[i, k] / |T_k(i)| for t in block k    (per="block": each block has the same say, however long)
        A[i, t] = A[i, k] / |T(i)|                        (per="completion": each completion has the same say, as in GRPO)
        A[i, t] = A[i, k] / c                             (per=c: a constant, as in Dr. GRPO; or one c of each completion)
        and A[i, last] += stop[i], the last trainable token as a block of one token.
        Where rows are turns of trajectories (`credit.length_nk`), |T_k| and |T| count the tokens of the whole trajectory.

    stop[i] is whole under every `per`: it is what leaving a block out costs, which no length of the completion thins out. In
    `spread_tokens` the decision to stop is one more token of the method's own sum, and is shared as the others are.

    The training objective is then mean over completions of sum over tokens of min(rho A, clip(rho) A): clipped surrogates are
    positively homogeneous in A, so dividing A is dividing the loss term.

    Args:
        credit: advantages (N, K) and (N,) from `assign`.
        spans: the tokens of each block.
        per: what one token's share is counted in.
        dtype: of the result; the division happens in float64.

    Returns:
        (N, T) advantages; exactly 0 at tokens outside every block.

    Example:
        >>> block_nt = torch.tensor([[0, 0, -1, 1, -1]], dtype=torch.int8)
        >>> spans = Spans(("solution", "confidence"), torch.tensor([[0, 3]]), torch.tensor([[2, 4]]), block_nt,
        ...               torch.tensor([0]))
        >>> credit = Credit(torch.tensor([[1., -.5]]).double(), torch.tensor([0.]).double(), torch.tensor([0]), torch.tensor([0]))
        >>> spread(credit, spans)
        tensor([[ 0.5000,  0.5000,  0.0000, -0.5000,  0.0000]])

    Reference:
        Pavlenko et al. 2026 (arXiv 2602.10231), equation of the loss; there the weight 1/|T_k| stands in the loss.
    """
    if credit.block_nk.shape != spans.start_nk.shape:
        raise AlignmentError(
            f"Credit is for {tuple(credit.block_nk.shape)} completions and blocks, spans are for {tuple(spans.start_nk.shape)}."
        )
    start_nk, end_nk, width = spans.start_nk, spans.end_nk, spans.block_nt.shape[1]
    if place := first_of((end_nk != start_nk) & ((end_nk < start_nk) | (end_nk > width) | (start_nk < 0))):
        n, k = place
        raise AlignmentError(
            f"Block '{spans.names[k]}' of completion {n} is [{int(start_nk[n, k])}, {int(end_nk[n, k])}), which is no interval of "
            f"the completion's {width} tokens."
        )
    if place := first_of(~(credit.block_nk.isfinite().all(dim=1) & credit.stop_n.isfinite())):
        raise RewardError(f"The credit of completion {place[0]} is not finite; absent rewards get credit 0.")
    length_nk = spans.length_nk
    size_nk = _size(length_nk if credit.length_nk is None else credit.length_nk, per)
    share_nk = torch.where(length_nk > 0, credit.block_nk / size_nk, 0.0)
    table_nk = pad(share_nk, (1, 0)).to(dtype)  # the first column serves the tokens of no block (-1)
    advantage_nt = fresh(spans.block_nt.shape, dtype=dtype, device=share_nk.device)
    parts = (table.split(_ROWS) for table in (table_nk, spans.block_nt, advantage_nt))  # few rows fit the cache
    for part_nk, block_nt, out_nt in zip(*parts, strict=True):
        torch.gather(part_nk, 1, (block_nt + 1).long(), out=out_nt)
    return _add_stops(advantage_nt, spans, credit.stop_n)


def spread_tokens(
    adv_nt: Float[Tensor, "n w"],
    spans: Spans,
    *,
    per: str | float | int | Float[Tensor, " n"] = "completion",
    stop_n: Float[Tensor, " n"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "n t"]:
    """Divide the advantages of tokens by the size that `per` names, so that a plain sum over tokens is the objective.

    A[i, t] = adv[i, t] / size,   A[i, last] += stop[i] / size,   size = |T_k(i)|, |T(i)| or c; a stop alone in its block: 1
    """
    spare = spans.block_nt.shape[1] - adv_nt.shape[1]
    if len(adv_nt) != len(spans.block_nt) or (spare < 0 and bool((adv_nt[:, spare:] != 0).any())):
        raise AlignmentError(
            f"Advantages are for {tuple(adv_nt.shape)} completions and tokens, spans are for {tuple(spans.block_nt.shape)}."
        )
    size_nk = _size(spans.length_nk, per)
    size_nt = torch.gather(size_nk, 1, spans.block_nt.long().clamp(min=0)) if size_nk.shape[1] > 1 else size_nk
    share_nt = torch.where(spans.block_nt >= 0, pad(adv_nt.double(), (0, spare)), 0.0) / size_nt
    if stop_n is not None:
        sums_by_block = isinstance(per, str) and per == "block"
        _add_stops(share_nt, spans, stop_n.double() if sums_by_block else stop_n.double() / size_nk[:, 0])
    return share_nt.to(dtype)


def _add_stops(advantage_nt: Tensor, spans: Spans, stop_n: Tensor) -> Tensor:
    """Add the credit for stopping to the last trainable token of each completion."""
    row_n = (spans.present_nk.any(dim=1) & (stop_n != 0)).nonzero()[:, 0]
    if len(row_n):
        advantage_nt[row_n, spans.end_nk[row_n].amax(dim=1) - 1] += stop_n[row_n].to(advantage_nt.dtype)
    return advantage_nt


def _size(length_nk: Tensor, per: str | int | float | Tensor) -> Tensor:
    """Return the number that the credit of each block is divided by; never 0."""
    if isinstance(per, Tensor):
        return torch.where(per > 0, per, 1.0).to(length_nk.device, torch.float64)[:, None].expand(length_nk.shape)
    if per == "block":
        return length_nk.clamp(min=1).double()
    if per == "completion":
        return length_nk.sum(dim=1, keepdim=True).clamp(min=1).double()
    if not isinstance(per, str) and per > 0:
        return torch.full_like(length_nk, per, dtype=torch.float64)
    raise RecipeError(f"spread(per={per!r}) is not known; use 'block', 'completion' or a positive number of tokens.")


def to_tokens(
    advantage_n: Float[Tensor, " n"], mask_nt: Shaped[Tensor, "n t"], *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n t"]:
    """Give every trainable token the advantage of its completion, as trainers' own estimators do; exactly 0 elsewhere.

    Args:
        advantage_n: one advantage per completion.
        mask_nt: bool or 0/1 integers.
        dtype: of the result.

    Example:
        >>> to_tokens(torch.tensor([.5, -1.]), torch.tensor([[1, 1, 0], [0, 1, 0]]))
        tensor([[ 0.5000,  0.5000,  0.0000],
                [ 0.0000, -1.0000,  0.0000]])
    """
    advantage_nt = fresh(mask_nt.shape, dtype=dtype, device=advantage_n.device)
    nothing = torch.zeros((), dtype=dtype, device=advantage_n.device)
    return torch.where(mask_nt.bool(), advantage_n.to(dtype)[:, None], nothing, out=advantage_nt)


def restrict(spans: Spans, mask_nt: Bool[Tensor, "n t"]) -> Spans:
    """Widen spans to the trainer's final token tensor and drop the completions that it left out of the loss.

    A completion without any token in the mask (TRL's `mask_truncated_completions`) loses its spans; every other completion
    must have the same tokens on both sides.

    Args:
        spans: spans of at most as many tokens.
        mask_nt: True where a token enters the loss.

    Returns:
        Spans of the width of the mask.

    Raises:
        AlignmentError: a completion has other tokens in the loss than in its spans.

    Example:
        >>> spans = Spans(("all",), torch.tensor([[0], [0]]), torch.tensor([[2], [1]]),
        ...               torch.tensor([[0, 0], [0, -1]], dtype=torch.int8), torch.tensor([0, 0]))
        >>> restrict(spans, torch.tensor([[True, True, False], [False, False, False]])).block_nt.tolist()
        [[0, 0, -1], [-1, -1, -1]]
    """
    spare = mask_nt.shape[1] - spans.block_nt.shape[1]
    if spare < 0:
        raise AlignmentError(
            f"The spans are {spans.block_nt.shape[1]} tokens wide and the trainer's mask {mask_nt.shape[1]}; "
            "pass the same completions to both."
        )
    block_nt = pad(spans.block_nt, (0, spare), value=-1)
    in_loss_n = mask_nt.any(dim=1)
    if place := first_of(in_loss_n & ((block_nt >= 0) != mask_nt).any(dim=1)):
        (n,) = place
        raise AlignmentError(
            f"Completion {n} trains on {int(mask_nt[n].sum())} tokens and its spans cover {int((block_nt[n] >= 0).sum())}; "
            "the trainer masks tokens that the spans do not know of (a tool mask that changed after scoring?)."
        )
    in_loss_n1 = in_loss_n[:, None]
    block_nt = block_nt.masked_fill(~mask_nt, -1)
    return replace(spans, block_nt=block_nt, start_nk=spans.start_nk * in_loss_n1, end_nk=spans.end_nk * in_loss_n1)


def fresh(shape: tuple[int, ...] | torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate memory without filling it."""
    # NumPy asks Linux for huge pages. The first touch of a large result, half of an estimator's time, then costs a tenth.
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.empty(tuple(shape), dtype=_NUMPY[dtype]))
    return torch.empty(shape, dtype=dtype, device=device)
