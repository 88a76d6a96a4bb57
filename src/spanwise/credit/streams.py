"""Streams: what a backward recursion with a critic runs over, made of the rewards and of the blocks that they pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.credit.strata import weighted
from spanwise.errors import AlignmentError, check_known
from spanwise.objective import Objective

#: What a value of the critic is of: all that is still to come, or what each objective is still to pay.
ValuesName = Literal["shared", "objective"]
VALUES: tuple[ValuesName, ...] = ("shared", "objective")


@dataclass(frozen=True)
class Streams:
    """The tokens that a recursion runs over, the rewards that lie on them, and whose values it reads.

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
        """What `gae`, `sae` and `value_target` are called with, stream by stream.

        Args:
            value_nt: (N, T), or (N, T, S) with one value per stream. None: none is given.
            bootstrap_n: (N,) for all streams or (N, S), see `gae`. It stands behind the streams that hold the completion's last
                trainable token; behind the others 0, for their blocks had ended.

        Raises:
            AlignmentError: another number of values than streams, other completions or tokens.

        Example:
            >>> found = reward_streams(torch.tensor([[1.]]), torch.tensor([[False]]), torch.tensor([[True]]),
            ...                        torch.tensor([[0, 0]]), torch.ones(1, 2).bool(), names=["return"],
            ...                        weight_m=torch.ones(1), values="shared")
            >>> [part["reward_nt"].tolist() for part in found.inputs(torch.tensor([[.5, .6]]))]
            [[[0.0, 1.0]]]
        """
        shape = tuple(self.mask_snt.shape[1:])
        value_nts = None if value_nt is None else _by_stream(value_nt, "value_nt", shape, self.names)
        if bootstrap_n is not None:
            bootstrap_n = bootstrap_n[:, None].expand(-1, len(self.names)) if bootstrap_n.dim() == 1 else bootstrap_n
        bootstrap_ns = None if bootstrap_n is None else _by_stream(bootstrap_n, "bootstrap_n", shape[:1], self.names)
        for s in range(len(self.names)):
            part = {"reward_nt": self.reward_snt[s], "mask_nt": self.mask_snt[s]}
            if value_nts is not None:
                part["value_nt"] = value_nts[..., s]
            if bootstrap_ns is not None:
                part["bootstrap_n"] = torch.where(self.last_sn[s], bootstrap_ns[..., s], 0.0)
            yield part


def resolved_values(objectives: Sequence[Objective], values: ValuesName | None) -> ValuesName:
    """What a critic's values are of: as it is said, else per objective where objectives pay different blocks."""
    if values is not None:
        check_known("kind of values", values, VALUES)
        return values
    return "objective" if len({frozenset(objective.pays) for objective in objectives}) > 1 else "shared"


def stream_names(objectives: Sequence[Objective], values: ValuesName | None) -> tuple[str, ...]:
    """What each value of the critic is of, in order: the return, or each objective.

    >>> stream_names([Objective("correct", pays="a"), Objective("brier", pays="a")], None)
    ('return',)
    """
    if resolved_values(objectives, values) == "shared":
        return ("return",)
    return tuple(objective.name for objective in objectives)


def check_values(count: int, names: Sequence[str], *, what: str = "value_nt") -> None:
    """Refuse another number of values than there are streams; `what` is where they are.

    >>> check_values(1, ("correct", "brier"))
    Traceback (most recent call last):
    spanwise.errors.AlignmentError: value_nt holds 1 value per token and there are 2 streams (correct, brier): ...
    """
    if count == len(names):
        return
    shared = " A critic of one value serves with values: shared." if count == 1 else ""
    raise AlignmentError(
        f"{what} holds {count} value{'' if count == 1 else 's'} per {'completion' if what.endswith('_n') else 'token'} and there "
        f"{'is 1 stream' if len(names) == 1 else f'are {len(names)} streams'} ({', '.join(names)}): give one value to each, in "
        f"this order.{shared}"
    )


def reward_streams(
    reward_nm: Float[Tensor, "n m"],
    left_out_nm: Bool[Tensor, "n m"],
    paid_mk: Bool[Tensor, "m k"],
    block_nt: Int[Tensor, "n t"],
    mask_nt: Bool[Tensor, "n t"],
    *,
    names: Sequence[str],
    weight_m: Float[Tensor, " m"],
    values: ValuesName,
    dtype: torch.dtype = torch.float32,
) -> Streams:
    r"""Lay the rewards on the tokens that a recursion runs over.

    Equation
        end[i, m] = the last trainable token of the last block that m pays and i has; of i, if i has none of them
        shared:     one stream, all trainable tokens;   r[i, t] = sum of weight_m r[i, m] over the m with end[i, m] = t
        objective:  a stream per objective, the trainable tokens of the blocks it pays;   r_m[i, end[i, m]] = r[i, m]
            where i has none of them and left out what m reads: the one token end[i, m], the decision to stop

    What is left out holds what it stands for (`if_missing`). Shared, tokens of every block train, also those that nothing pays:
    their reward is what comes after them (ordinary PPO with rewards inside). An absent reward (NaN): shared, the completion takes
    no part, for its sum is unknown; else that stream has no token there. A reward for blocks that are not there, and not left out:
    shared, it lies on the completion's last trainable token; else nothing is paid.

    >>> made = {"reward_nm": torch.tensor([[1., -.25]]), "left_out_nm": torch.zeros(1, 2).bool(),
    ...         "paid_mk": torch.eye(2).bool(), "block_nt": torch.tensor([[0, 0, 1]]), "mask_nt": torch.ones(1, 3).bool()}
    >>> reward_streams(**made, names=["return"], weight_m=torch.ones(2), values="shared").reward_snt
    tensor([[[ 0.0000,  1.0000, -0.2500]]])
    >>> reward_streams(**made, names=["correct", "brier"], weight_m=torch.ones(2), values="objective").mask_snt.int()
    tensor([[[1, 1, 0]],
    <BLANKLINE>
            [[0, 0, 1]]], dtype=torch.int32)
    """
    if block_nt.shape != mask_nt.shape:
        raise AlignmentError(f"The blocks of tokens are {tuple(block_nt.shape)} and the mask is {tuple(mask_nt.shape)}.")
    trained_nt = mask_nt.bool()
    last_n, some_n = last_token(trained_nt)
    column_nt = block_nt.long()
    paid_mnt = [_of_blocks(column_nt, paid_k) & trained_nt for paid_k in paid_mk]
    ends = [last_token(paid_nt) for paid_nt in paid_mnt]
    has_nm = torch.stack([has_n for _, has_n in ends], dim=1)
    end_nm = torch.where(has_nm, torch.stack([end_n for end_n, _ in ends], dim=1), last_n[:, None])
    known_nm = ~reward_nm.isnan()
    if values == "shared":
        weighted_nm = weighted(reward_nm, weight_m)
        whole_n = ~weighted_nm.sum(dim=1).isnan()
        mask_snt = (trained_nt & whole_n[:, None])[None]
        reward_snt = _shared(weighted_nm, end_nm, whole_n & some_n, mask_nt, dtype)[None]
        stop_sn, weight_s = torch.zeros_like(whole_n)[None], torch.ones(1, dtype=torch.float64, device=mask_nt.device)
    else:
        stop_nm = known_nm & left_out_nm & ~has_nm & some_n[:, None]
        reward_snt = torch.zeros((len(paid_mk), *mask_nt.shape), dtype=dtype, device=mask_nt.device)
        mask_snt = torch.stack([paid_nt & known_nm[:, m, None] for m, paid_nt in enumerate(paid_mnt)])
        for m in range(len(paid_mk)):
            stop = stop_nm[:, m].nonzero().squeeze(1)
            mask_snt[m, stop, last_n[stop]] = True
            rows = (stop_nm[:, m] | (has_nm[:, m] & known_nm[:, m])).nonzero().squeeze(1)
            reward_snt[m, rows, end_nm[rows, m]] = reward_nm[rows, m].to(dtype)
        stop_sn, weight_s = stop_nm.T, weight_m.double()
    holds_sn = mask_snt.gather(2, last_n.expand(len(mask_snt), -1)[..., None]).squeeze(2) if mask_nt.shape[1] else stop_sn
    return Streams(tuple(names), reward_snt, mask_snt, weight_s, stop_sn, holds_sn)


def _shared(weighted_nm: Tensor, end_nm: Tensor, row_n: Tensor, mask_nt: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the rewards that end at one token on that token; added as a plain sum over objectives adds them."""
    reward_nt = torch.zeros(mask_nt.shape, dtype=dtype, device=mask_nt.device)
    rows = row_n.nonzero().squeeze(1)
    for m in range(weighted_nm.shape[1]):
        here_nm = end_nm[rows] == end_nm[rows, m, None]
        reward_nt[rows, end_nm[rows, m]] = torch.where(here_nm, weighted_nm[rows], 0.0).sum(dim=1).to(dtype)
    return reward_nt


def _of_blocks(column_nt: Tensor, kept_k: Tensor) -> Bool[Tensor, "n t"]:
    """The tokens of some blocks; -1 is the last entry of the table, which is no block."""
    return torch.cat([kept_k, kept_k.new_zeros(1)])[column_nt]


def last_token(flag_nt: Tensor) -> tuple[Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """The last token of each completion that has the flag (0 if there is none), and whether there is one."""
    some_n = flag_nt.any(dim=1)
    if not flag_nt.shape[1]:
        return some_n.long(), some_n
    place_t = torch.arange(flag_nt.shape[1], dtype=torch.int32, device=flag_nt.device)
    return torch.where(flag_nt, place_t, 0).amax(dim=1).long(), some_n


def _by_stream(value: Tensor, what: str, shape: tuple[int, ...], names: Sequence[str]) -> Tensor:
    """The values with the streams as their last axis."""
    if tuple(value.shape[: len(shape)]) != shape or value.dim() > len(shape) + 1:
        raise AlignmentError(f"{what} is {tuple(value.shape)} and the completions are {shape}; give one value to each.")
    value = value if value.dim() > len(shape) else value[..., None]
    check_values(value.shape[-1], names, what=what)
    return value
