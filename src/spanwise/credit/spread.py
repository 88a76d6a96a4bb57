"""`reward_streams` puts rewards on tokens for a critic. `spread` gives tokens their share of a block's credit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from spanwise.credit.strata import check_mask, check_shapes, first_of, weighted
from spanwise.errors import AlignmentError, RecipeError, RewardError, check_known
from spanwise.objective import Objective
from spanwise.types import Credit, Scores, Spans, Status

#: What a critic predicts: the future reward of all objectives together ("shared"), or of each one ("objective").
ValuesName = Literal["shared", "objective"]

#: How many completions are processed at a time, so that their data fit into the cache.
_ROWS = 16
_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


def left_out(scores: Scores) -> Bool[Tensor, "n m"]:
    """Mark the rewards that are missing because the completion's text is absent or unreadable."""
    return (scores.status_nm == int(Status.ABSENT)) | (scores.status_nm == int(Status.UNPARSABLE))


def lacks_all(
    left_out_nm: Bool[Tensor, "n m"], objectives: Sequence[Objective], present_nk: Bool[Tensor, "n k"]
) -> Bool[Tensor, " n"]:
    """Mark completions without any rewarded block (`present_nk`) that left out a reward with a weight other than 0."""
    has_weight_m = torch.tensor([objective.weight != 0 for objective in objectives], device=left_out_nm.device)
    return (left_out_nm & has_weight_m).any(dim=1) & ~present_nk.any(dim=1)


def fill_missing(scores: Scores, objectives: Sequence[Objective]) -> Float[Tensor, "n m"]:
    """Replace each reward that `left_out` marks by the objective's `if_missing`."""
    if_missing_rewards = [torch.nan if objective.if_missing is None else objective.if_missing for objective in objectives]
    return torch.where(left_out(scores), scores.reward_nm.new_tensor(if_missing_rewards), scores.reward_nm)


def weights(objectives: Sequence[Objective], like: Tensor) -> Float[Tensor, " m"]:
    """Return the weights of the objectives as a tensor."""
    return like.new_tensor([objective.weight for objective in objectives])


def sum_rewards(scores: Scores, objectives: Sequence[Objective]) -> Float[Tensor, " n"]:
    """Return each completion's weighted sum of rewards. Return NaN if a reward is absent and its weight is not 0."""
    return weighted(fill_missing(scores, objectives), weights(objectives, scores.reward_nm)).sum(dim=1)


def paid_blocks(objectives: Sequence[Objective], block_names: Sequence[str], device: torch.device) -> Bool[Tensor, "m k"]:
    """Mark the blocks whose tokens each objective credits (`pays`). Refuse an objective that names an unknown block."""
    for objective in objectives:
        if unknown_names := [name for name in objective.pays if name not in block_names]:
            raise RecipeError(
                f"Objective '{objective.name}' pays '{unknown_names[0]}', which is no block. The blocks are: "
                f"{', '.join(block_names)}."
            )
    pays_block_mk = [[name in objective.pays for name in block_names] for objective in objectives]
    return torch.tensor(pays_block_mk, dtype=torch.bool, device=device).reshape(len(objectives), len(block_names))


def resolve_values(objectives: Sequence[Objective], values: ValuesName | None) -> ValuesName:
    """Return whether a critic predicts one value for all objectives, or one for each."""
    if values is not None:
        check_known("kind of values", values, get_args(ValuesName))
        return values
    return "objective" if len({frozenset(objective.pays) for objective in objectives}) > 1 else "shared"


def name_streams(objectives: Sequence[Objective], values: ValuesName | None) -> tuple[str, ...]:
    """Return the names of the values that the critic predicts for each token."""
    if resolve_values(objectives, values) == "shared":
        return ("return",)
    return tuple(objective.name for objective in objectives)


@dataclass(frozen=True)
class Streams:
    """For each value that a critic predicts, a table of token rewards on which GAE or SAE runs."""

    names: tuple[str, ...]  # The names of the values that the critic predicts.
    reward_snt: Float[Tensor, "s n t"]  # The reward of each token; 0 nearly everywhere.
    mask_snt: Bool[Tensor, "s n t"]  # The tokens that get advantages; GAE and SAE skip all others.
    weight_s: Float[Tensor, " s"]  # The weight of each value: the objective's weight, or 1 for the sum of all rewards.
    stop_sn: Bool[Tensor, "s n"]  # True if the completion lacks the rewarded blocks, so its last token has the reward.
    last_sn: Bool[Tensor, "s n"]  # True if the completion's last trainable token gets an advantage.

    def inputs(
        self, value_nt: Float[Tensor, "n t *s"] | None = None, bootstrap_n: Float[Tensor, " n *b"] | None = None
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the inputs of `gae`, `sae` and `value_target`, once for each value that the critic predicts."""
        mask_shape = tuple(self.mask_snt.shape[1:])
        token_tables = {} if value_nt is None else {"value_nt": self._arrange_by_stream(value_nt, "value_nt", mask_shape)}
        if bootstrap_n is not None:
            end_value_ns = bootstrap_n if bootstrap_n.dim() > 1 else bootstrap_n[:, None].expand(-1, len(self.names))
            end_value_ns = self._arrange_by_stream(end_value_ns, "bootstrap_n", mask_shape[:1])
            token_tables["bootstrap_n"] = torch.where(self.last_sn.T, end_value_ns, 0.0)
        for s in range(len(self.names)):
            stream_tables = {name: table[..., s] for name, table in token_tables.items()}
            yield {"reward_nt": self.reward_snt[s], "mask_nt": self.mask_snt[s], **stream_tables}

    def _arrange_by_stream(self, value: Tensor, what: str, shape: tuple[int, ...]) -> Tensor:
        """Return a critic's values with one entry per name in `names` on the last axis, and refuse any other shape."""
        unit_noun = "completion" if what.endswith("_n") else "token"
        if tuple(value.shape[: len(shape)]) != shape or value.dim() > len(shape) + 1:
            raise AlignmentError(
                f"{what} has the shape {tuple(value.shape)}, but the batch has the shape {shape}; give each {unit_noun} a value."
            )
        value = value if value.dim() > len(shape) else value[..., None]
        value_count = value.shape[-1]
        if value_count != len(self.names):
            advice = " If the critic predicts the sum of all rewards, set values: shared." if value_count == 1 else ""
            raise AlignmentError(
                f"{what} has {value_count} numbers per {unit_noun}, but the critic predicts {len(self.names)}: "
                f"{', '.join(self.names)}. Give one number for each, in this order.{advice}"
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
    """Put each reward on the last token of the last block that it credits. Rewards share a table or have one each.

    With e that token:  shared: r[i, e] = sum of weight_m r[i, m] over the m with that e;   else: r_m[i, e] = r[i, m]
    """
    check_shapes(block_nt=block_nt, mask_nt=mask_nt)
    reward_nm = fill_missing(scores, objectives)
    weight_m = weights(objectives, scores.reward_nm)
    is_trained_nt = mask_nt.bool()
    last_position_n, has_token_n = find_last_token(is_trained_nt)
    # Tokens outside blocks have the index -1, which selects the last column. So add a column of False at the end.
    pays_block_mk = pad(paid_blocks(objectives, block_names, mask_nt.device), (0, 1))
    is_paid_mnt = pays_block_mk[:, block_nt.long()] & is_trained_nt
    positions_and_flags = [find_last_token(is_paid_nt) for is_paid_nt in is_paid_mnt]
    has_paid_token_nm = torch.stack([is_found_n for _, is_found_n in positions_and_flags], dim=1)
    last_paid_position_nm = torch.stack([position_n for position_n, _ in positions_and_flags], dim=1)
    # If the rewarded block is absent, the last token gets the reward, because the completion stopped there.
    reward_position_nm = torch.where(has_paid_token_nm, last_paid_position_nm, last_position_n[:, None])
    if resolve_values(objectives, values) == "shared":
        # Tokens of unrewarded blocks get advantages, too, because later rewards reach them, as in PPO.
        weighted_reward_nm = weighted(reward_nm, weight_m)
        has_sum_n = ~weighted_reward_nm.sum(dim=1).isnan()  # the sum is NaN (unknown) if any reward with a weight is absent
        mask_snt = (is_trained_nt & has_sum_n[:, None])[None]
        pays_stop_sn = torch.zeros_like(has_sum_n)[None]
        weight_s = torch.ones(1, dtype=torch.float64, device=mask_nt.device)
        reward_snt = torch.zeros((1, *mask_nt.shape), dtype=dtype, device=mask_nt.device)
        rewarded_row_i = (has_sum_n & has_token_n).nonzero().squeeze(1)
        position_im = reward_position_nm[rewarded_row_i]
        reward_im = weighted_reward_nm[rewarded_row_i]
        for m in range(len(objectives)):  # a token that gets several rewards gets their sum
            reward_sum_i = torch.where(position_im == position_im[:, m, None], reward_im, 0.0).sum(dim=1)
            reward_snt[0, rewarded_row_i, position_im[:, m]] = reward_sum_i.to(dtype)
    else:
        has_reward_nm = ~reward_nm.isnan()
        pays_stop_nm = has_reward_nm & left_out(scores) & ~has_paid_token_nm & has_token_n[:, None]
        reward_snt = torch.zeros(is_paid_mnt.shape, dtype=dtype, device=mask_nt.device)
        mask_snt = is_paid_mnt & has_reward_nm.T[..., None]
        is_reward_placed_nm = pays_stop_nm | (has_paid_token_nm & has_reward_nm)
        for m in range(len(objectives)):
            stop_row_i = pays_stop_nm[:, m].nonzero().squeeze(1)
            mask_snt[m, stop_row_i, last_position_n[stop_row_i]] = True
            rewarded_row_i = is_reward_placed_nm[:, m].nonzero().squeeze(1)
            reward_snt[m, rewarded_row_i, reward_position_nm[rewarded_row_i, m]] = reward_nm[rewarded_row_i, m].to(dtype)
        pays_stop_sn = pays_stop_nm.T
        weight_s = weight_m.double()
    includes_last_token_sn = torch.zeros_like(pays_stop_sn)
    if mask_nt.shape[1]:
        includes_last_token_sn = mask_snt.gather(2, last_position_n.expand(len(mask_snt), -1)[..., None]).squeeze(2)
    return Streams(name_streams(objectives, values), reward_snt, mask_snt, weight_s, pays_stop_sn, includes_last_token_sn)


def find_last_token(flag_nt: Tensor) -> tuple[Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """Return the index of each completion's last token for which `flag_nt` is true, and whether there is one."""
    has_flag_n = flag_nt.any(dim=1)
    if not flag_nt.shape[1]:
        return has_flag_n.long(), has_flag_n
    position_t = torch.arange(flag_nt.shape[1], dtype=torch.int32, device=flag_nt.device)
    return torch.where(flag_nt, position_t, 0).amax(dim=1).long(), has_flag_n


def put_on_last_token(reward_n: Float[Tensor, " n"], mask_nt: Bool[Tensor, "n t"]) -> Float[Tensor, "n t"]:
    """Put the reward of each completion on its last trainable token, and 0 on all other tokens."""
    reward_nt = torch.zeros(mask_nt.shape, device=mask_nt.device)
    last_position_n, has_token_n = find_last_token(mask_nt.bool())
    reward_nt[has_token_n, last_position_n[has_token_n]] = reward_n[has_token_n].to(reward_nt.dtype)
    return reward_nt


def spread(
    credit: Credit,
    spans: Spans,
    *,
    per: str | float | int | Float[Tensor, " n"] = "block",
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "n t"]:
    r"""Give every trainable token its block's credit, divided by the length of the block or completion, or by a constant.

    Equation
        A[i, t] = A[i, k] / |T_k(i)| for t in block k    (per="block": each block has the same say, however long)
        A[i, t] = A[i, k] / |T(i)|                        (per="completion": each completion has the same say, as in GRPO)
        A[i, t] = A[i, k] / c                             (per=c: a constant, as in Dr. GRPO; or one c of each completion)
        and A[i, last] += stop[i], the last trainable token as a block of one token.
        Where rows are turns of trajectories (`credit.length_nk`), |T_k| and |T| count the tokens of the whole trajectory.

    stop[i] is whole under every `per`: it is what leaving a block out costs, which no length of the completion thins out.
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
            f"The credit has the shape {tuple(credit.block_nk.shape)} (completions, blocks), but the spans have the "
            f"shape {tuple(spans.start_nk.shape)}. Pass the credit and the spans of the same completions."
        )
    start_nk, end_nk = spans.start_nk, spans.end_nk
    token_width = spans.block_nt.shape[1]
    if bad_entry := first_of((end_nk != start_nk) & ((end_nk < start_nk) | (end_nk > token_width) | (start_nk < 0))):
        n, k = bad_entry
        raise AlignmentError(
            f"Block '{spans.names[k]}' of completion {n} starts at token {int(start_nk[n, k])} and ends before token "
            f"{int(end_nk[n, k])}. The end must not lie before the start, and both must lie between 0 and {token_width}."
        )
    if bad_entry := first_of(~(credit.block_nk.isfinite().all(dim=1) & credit.stop_n.isfinite())):
        raise RewardError(f"The credit of completion {bad_entry[0]} is not finite; give an absent reward the credit 0.")
    length_nk = spans.length_nk
    divisor_nk = _find_divisor(length_nk if credit.length_nk is None else credit.length_nk, per)
    credit_share_nk = torch.where(length_nk > 0, credit.block_nk / divisor_nk, 0.0)
    credit_share_nk = pad(credit_share_nk, (1, 0)).to(dtype)  # column 0 is for tokens in no block
    advantage_nt = allocate(spans.block_nt.shape, dtype=dtype, device=credit_share_nk.device)
    row_tables = (credit_share_nk, spans.block_nt, advantage_nt)
    for share_rows_nk, block_nt, advantage_rows_nt in zip(*(table.split(_ROWS) for table in row_tables), strict=True):
        torch.gather(share_rows_nk, 1, (block_nt + 1).long(), out=advantage_rows_nt)
    return _add_stops(advantage_nt, spans, credit.stop_n)


def spread_tokens(
    adv_nt: Float[Tensor, "n w"],
    spans: Spans,
    *,
    per: str | float | int | Float[Tensor, " n"] = "completion",
    stop_n: Float[Tensor, " n"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "n t"]:
    """Divide tokens' advantages by a length or constant, as `per` says. The loss is then a sum over tokens.

    A[i, t] = adv[i, t] / size,   A[i, last] += stop[i] / size,   size = |T_k(i)|, |T(i)| or c; a stop alone in its block: 1
    """
    missing_width = spans.block_nt.shape[1] - adv_nt.shape[1]
    if len(adv_nt) != len(spans.block_nt) or (missing_width < 0 and bool((adv_nt[:, missing_width:] != 0).any())):
        raise AlignmentError(
            f"The advantages have the shape {tuple(adv_nt.shape)} (completions, tokens), but the spans have the "
            f"shape {tuple(spans.block_nt.shape)}. Pass the advantages and the spans of the same completions."
        )
    divisor_nk = _find_divisor(spans.length_nk, per)
    is_per_block = isinstance(per, str) and per == "block"
    divisor_nt = divisor_nk.gather(1, spans.block_nt.long().clamp(min=0)) if is_per_block else divisor_nk[:, :1]
    credit_share_nt = torch.where(spans.block_nt >= 0, pad(adv_nt.double(), (0, missing_width)), 0.0) / divisor_nt
    if stop_n is not None:
        _add_stops(credit_share_nt, spans, stop_n.double() if is_per_block else stop_n.double() / divisor_nk[:, 0])
    return credit_share_nt.to(dtype)


def _add_stops(advantage_nt: Tensor, spans: Spans, stop_n: Tensor) -> Tensor:
    """To each completion's last token in a block, add the credit of the decision to stop."""
    stop_row_i = (spans.present_nk.any(dim=1) & (stop_n != 0)).nonzero()[:, 0]
    if len(stop_row_i):
        advantage_nt[stop_row_i, spans.end_nk[stop_row_i].amax(dim=1) - 1] += stop_n[stop_row_i].to(advantage_nt.dtype)
    return advantage_nt


def _find_divisor(length_nk: Tensor, per: str | int | float | Tensor) -> Tensor:
    """Return the length by which each block's credit is divided."""
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
    """Give every trainable token its completion's advantage, and all other tokens 0."""
    advantage_nt = allocate(mask_nt.shape, dtype=dtype, device=advantage_n.device)
    zero_advantage = torch.zeros((), dtype=dtype, device=advantage_n.device)
    return torch.where(mask_nt.bool(), advantage_n.to(dtype)[:, None], zero_advantage, out=advantage_nt)


def restrict(spans: Spans, mask_nt: Bool[Tensor, "n t"]) -> Spans:
    """Pad the spans to the width of the trainer's mask. Completions without a token in the mask get empty spans."""
    check_mask(mask_nt)
    span_width, mask_width = spans.block_nt.shape[1], mask_nt.shape[1]
    if span_width > mask_width:
        raise AlignmentError(
            f"The spans are {span_width} tokens wide, but the trainer's mask is only {mask_width} wide. Pass the spans and "
            f"the mask of the same completions."
        )
    block_nt = pad(spans.block_nt, (0, mask_width - span_width), value=-1)
    is_in_loss_n = mask_nt.any(dim=1)
    if bad_entry := first_of(is_in_loss_n & ((block_nt >= 0) != mask_nt).any(dim=1)):
        (row,) = bad_entry
        raise AlignmentError(
            f"Completion {row} trains on {int(mask_nt[row].sum())} tokens, but its spans cover "
            f"{int((block_nt[row] >= 0).sum())}. Both must be the same tokens, so change no mask after scoring."
        )
    is_in_loss_n1 = is_in_loss_n[:, None]
    block_nt = block_nt.masked_fill(~mask_nt, -1)
    return replace(spans, block_nt=block_nt, start_nk=spans.start_nk * is_in_loss_n1, end_nk=spans.end_nk * is_in_loss_n1)


def allocate(shape: tuple[int, ...] | torch.Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor without filling it. On a CPU, use memory that is fast to write to."""
    # NumPy asks Linux for huge pages, which makes the first write much faster.
    if device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.empty(tuple(shape), dtype=_NUMPY[dtype]))
    return torch.empty(shape, dtype=dtype, device=device)
