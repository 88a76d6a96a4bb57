"""Why an objective gives a block nothing: what its comparison says, or what a trainer's own numbers show."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spanwise.credit import group_index, moments
from spanwise.credit.strata import member_counts
from spanwise.errors import AlignmentError
from spanwise.scheme import Scheme
from spanwise.types import Credit, Zero
from spanwise.zeros.tally import KEYS, places


def zero_reasons(found: Credit, scheme: Scheme) -> Int[Tensor, "n k"]:
    """Say why a token of each block would get nothing, if it does.

    Of several objectives that pay a block the reason is the first one in the order of `Zero`, then of the objectives.

    Args:
        found: what `pipeline.credit_batch` gave.
        scheme: the rule.

    Returns:
        (N, K) keys for `tally_zeros`.

    Raises:
        AlignmentError: the credit does not know what it was compared with.

    Example:
        >>> from spanwise import Batch, Layout, Vocabulary, credit_batch, read
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3], [0, 1, 3], [0, 2, 3]], [0, 0, 1], columns={"answer": ["4", "4", "4"]})
        >>> scheme = Scheme.preset("grpo", Layout({"all": ["answer"]}))
        >>> reasons = zero_reasons(credit_batch(read(batch, scheme, vocabulary), batch, scheme), scheme)
        >>> [Zero(key % 32).name for key in reasons.flatten().tolist()]
        ['ALL_RIGHT', 'ALL_RIGHT', 'SINGLETON']
    """
    if found.comparison is None:
        raise AlignmentError("This credit does not know what it was compared with; take it from pipeline.credit_batch.")
    reason_nm, count = found.comparison.reason_nm, len(scheme.objectives)
    moved_nm = reason_nm == int(Zero.CREDITED)  # so that something else, or another objective, takes it away again
    key_nm = torch.where(moved_nm, int(Zero.CANCELLED), reason_nm + KEYS * (found.comparison.about_nm + 1))
    if scheme.entry.kind != "block":
        key_nm = key_nm.expand(-1, count)
    paid_mk = torch.tensor([[name in o.pays and o.weight != 0 for name in scheme.layout.names] for o in scheme.objectives])
    result_nk = torch.full((len(key_nm), paid_mk.shape[1]), int(Zero.UNPAID), dtype=torch.long)
    for k in range(paid_mk.shape[1]):
        paying = paid_mk[:, k].nonzero().flatten()
        if len(paying):
            first_n = places(key_nm[:, paying]).argmin(dim=1)
            some_n = (key_nm[:, paying] == int(Zero.CANCELLED)).any(dim=1)
            result_nk[:, k] = torch.where(some_n, int(Zero.CANCELLED), key_nm[:, paying].gather(1, first_n[:, None])[:, 0])
    return result_nk


def recorded_reasons(
    credit_nk: Float[Tensor, "n k"],
    group_n: Int[Tensor, " n"],
    *,
    reward_n: Float[Tensor, " n"] | None = None,
    rollout_n: Int[Tensor, " n"] | None = None,
) -> Int[Tensor, "n k"]:
    """Say why a trainer gave a token nothing, as far as what it recorded shows that.

    Args:
        credit_nk: what it recorded of each block; NaN where it recorded nothing.
        group_n: who is compared with whom.
        reward_n: the reward that says what is right, NaN where there is none; None: the file has none.
        rollout_n: the rollout of each completion, where some are parts of one; None: each is one.

    Returns:
        (N, K) keys for `tally_zeros`: about no objective, or about the first one if there is a reward.

    Example:
        >>> keys = recorded_reasons(torch.zeros(3, 1), torch.tensor([0, 0, 1]), reward_n=torch.tensor([0.0, 0.0, 1.0]))
        >>> [Zero(key % 32).name for key in keys.flatten().tolist()]
        ['ALL_WRONG', 'ALL_WRONG', 'SINGLETON']
    """
    moved_n = credit_nk.nan_to_num().abs().amax(dim=1) if credit_nk.shape[1] else torch.zeros(len(group_n))
    group_n = group_index(group_n)
    size_n = member_counts(group_n, torch.ones_like(group_n).bool(), voter_n=rollout_n)
    key_n = torch.full_like(group_n, int(Zero.ALL_EQUAL), dtype=torch.long)
    if reward_n is not None:
        reward_n = reward_n.double().where(reward_n.isfinite(), torch.nan)
        within, known_n = moments(reward_n, group_n), ~reward_n.isnan()
        agree_n = within.constant_n() & (member_counts(group_n, known_n, voter_n=rollout_n) == size_n)
        verdict = bool(((reward_n == 0) | (reward_n == 1) | ~known_n).all())
        said_n = torch.where(within.mean_n() == 1, int(Zero.ALL_RIGHT), int(Zero.ALL_WRONG)) if verdict else key_n
        key_n = torch.where(agree_n, KEYS + said_n, key_n)
    key_n = torch.where(moments(moved_n, group_n).mean_n() > 0, int(Zero.RECORDED), key_n)
    key_n = torch.where(size_n < 2, int(Zero.SINGLETON), key_n)
    return torch.where(credit_nk.isnan(), int(Zero.UNSCORED), key_n[:, None])
