"""`spread`: from credit per block to advantages per token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import pad

from spanwise.credit.checks import check_intervals, first_of
from spanwise.credit.streams import last_token
from spanwise.errors import AlignmentError, RecipeError, RewardError
from spanwise.types import Credit, Spans

_ROWS = 16
_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


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
    check_intervals(spans)
    if place := first_of(~(credit.block_nk.isfinite().all(dim=1) & credit.stop_n.isfinite())):
        raise RewardError(f"The credit of completion {place[0]} is not finite; absent rewards get credit 0.")
    length_nk = spans.length_nk
    total_n = length_nk.sum(dim=1)
    size_nk = _size(length_nk if credit.length_nk is None else credit.length_nk, per)
    share_nk = torch.where(length_nk > 0, credit.block_nk / size_nk, 0.0)
    # The last column serves the tokens of no block.
    table_nk = torch.cat([share_nk, torch.zeros_like(share_nk[:, :1])], dim=1).to(dtype)
    advantage_nt = fresh(spans.block_nt.shape, dtype=dtype, device=share_nk.device)
    for first in range(0, len(advantage_nt), _ROWS):  # a few rows at a time stay in the cache
        rows = slice(first, first + _ROWS)
        torch.gather(table_nk[rows], 1, _columns(spans.block_nt[rows], share_nk.shape[1]), out=advantage_nt[rows])
    row_n = torch.nonzero((total_n > 0) & (credit.stop_n != 0)).squeeze(1)
    if len(row_n):
        last_n = spans.end_nk[row_n].amax(dim=1) - 1
        advantage_nt[row_n, last_n] += credit.stop_n[row_n].to(dtype)
    return advantage_nt


def fresh(shape: tuple[int, ...] | torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory, on the CPU through NumPy: it asks Linux for huge pages where an array is large.

    Half of the time of an estimator over a large batch is the first touch of its result, page by page; with huge pages that part
    shrinks to a tenth.
    """
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.empty(tuple(shape), dtype=_NUMPY[dtype]))
    return torch.empty(shape, dtype=dtype, device=device)


def to_tokens(
    advantage_n: Float[Tensor, " n"], mask_nt: Shaped[Tensor, "n t"], *, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n t"]:
    """Give every trainable token the advantage of its completion, as the trainers' own estimators do; exactly 0 elsewhere.

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
    kept_n = mask_nt.any(dim=1)
    if place := first_of(kept_n & ((block_nt >= 0) != mask_nt).any(dim=1)):
        (n,) = place
        raise AlignmentError(
            f"Completion {n} trains on {int(mask_nt[n].sum())} tokens and its spans cover {int((block_nt[n] >= 0).sum())}; "
            "the trainer masks tokens that the spans do not know of (a tool mask that changed after scoring?)."
        )
    none = torch.zeros_like(spans.start_nk)
    return replace(
        spans,
        block_nt=block_nt.masked_fill(~mask_nt, -1),
        start_nk=torch.where(kept_n[:, None], spans.start_nk, none),
        end_nk=torch.where(kept_n[:, None], spans.end_nk, none),
    )


def spread_tokens(
    adv_nt: Float[Tensor, "n w"],
    spans: Spans,
    *,
    per: str | float | int | Float[Tensor, " n"] = "completion",
    stop_n: Float[Tensor, " n"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "n t"]:
    r"""Weight advantages that differ from token to token, so that a plain sum over tokens is the objective, as `spread` does.

    Equation
        A[i, t] = adv[i, t] / size,   size = |T_k(i)|, |T(i)| or c by `per`
        A[i, last] += stop[i] / size, where the last trainable token is a block of one token: size = 1, |T(i)| or c

    Tokens outside every block get exactly 0; `adv_nt` may be wider than the spans by padding, all 0. `stop_n` are the advantages of
    the decision to stop; None: there are none.

    Example:
        >>> block_nt = torch.tensor([[0, 0, -1, 1]], dtype=torch.int8)
        >>> spans = Spans(("a", "b"), torch.tensor([[0, 3]]), torch.tensor([[2, 4]]), block_nt, torch.tensor([0]))
        >>> spread_tokens(torch.tensor([[3., 6., 9., 3.]]), spans)
        tensor([[1., 2., 0., 1.]])
    """
    spare = spans.block_nt.shape[1] - adv_nt.shape[1]
    if len(adv_nt) != len(spans.block_nt) or (spare < 0 and bool((adv_nt[:, spare:] != 0).any())):
        raise AlignmentError(
            f"Advantages are for {tuple(adv_nt.shape)} completions and tokens, spans are for {tuple(spans.block_nt.shape)}."
        )
    size_nk = _size(spans.length_nk, per)
    size_nt = torch.gather(size_nk, 1, spans.block_nt.long().clamp(min=0)) if size_nk.shape[1] > 1 else size_nk
    trained_nt = spans.block_nt >= 0
    held_nt = torch.where(trained_nt, pad(adv_nt.double(), (0, spare)), 0.0) / size_nt
    if stop_n is not None:
        last_n, some_n = last_token(trained_nt)
        row_n = (some_n & (stop_n != 0)).nonzero()[:, 0]
        own_n = torch.ones_like(size_nk[row_n, 0]) if isinstance(per, str) and per == "block" else size_nk[row_n, 0]
        held_nt[row_n, last_n[row_n]] += stop_n[row_n].double() / own_n
    return held_nt.to(dtype)


def _columns(block_nt: Tensor, blocks: int) -> Tensor:
    """The column of each token in a table of `blocks` + 1 columns: its block, or the last one for -1."""
    if block_nt.dtype == torch.int8:
        return block_nt.view(torch.uint8).clamp(max=blocks).long()  # without a sign, -1 is 255
    return torch.where(block_nt < 0, blocks, block_nt).long()


def _size(length_nk: Tensor, per: str | int | float | Tensor) -> Tensor:
    """What the credit of each block is divided by; never 0."""
    if isinstance(per, Tensor):
        return torch.where(per > 0, per, 1.0).to(length_nk.device, torch.float64)[:, None].expand(length_nk.shape)
    if per == "block":
        return length_nk.clamp(min=1).double()
    if per == "completion":
        return length_nk.sum(dim=1, keepdim=True).clamp(min=1).double()
    if not isinstance(per, str) and per > 0:
        return torch.full_like(length_nk, per, dtype=torch.float64)
    raise RecipeError(f"spread(per={per!r}) is not known; use 'block', 'completion' or a positive number of tokens.")
