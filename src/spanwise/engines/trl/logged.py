"""What TRL's own logs say of a run: its table of completions, its means of rewards, its model card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from spanwise.credit.assign import left_out
from spanwise.objective import Objective
from spanwise.scheme import Scheme
from spanwise.types import Credit, Scores


def logged_rewards(scores: Scores, objectives: Sequence[Objective]) -> Float[Tensor, "n m"]:
    """The rewards as TRL logs them: what a completion left out counts as its `if_missing`, and is NaN without one.

    >>> scores = Scores(("r",), torch.tensor([[0.5], [torch.nan]]), torch.tensor([[0], [1]]), torch.zeros(2, 1, 2))
    >>> logged_rewards(scores, [Objective("r", pays="a", if_missing=-1.0)]).flatten()
    tensor([ 0.5000, -1.0000])
    """
    stand_in_m = scores.reward_nm.new_tensor([torch.nan if o.if_missing is None else o.if_missing for o in objectives])
    return torch.where(left_out(scores), stand_in_m, scores.reward_nm)


def log_credit(logs: Mapping[str, Any], found: Credit, present_nk: Bool[Tensor, "n k"], scheme: Scheme) -> None:
    """Put the credit of a batch in the place of the scalar advantage that TRL worked out for its table of completions.

    The columns are `credit/<block>` (None where the completion does not have it), `credit/stop`, and `advantage`, their sum: with
    one block, what TRL's own trainer writes there.

    Args:
        logs: TRL's queues of the last completions; the batch is their end.
        found: of all processes, in TRL's order.
        present_nk: which blocks each completion has.
        scheme: names the blocks.
    """
    total = logs["advantages"]
    for _ in range(min(len(total), len(present_nk))):
        total.pop()
    total.extend((found.block_nk.sum(dim=1) + found.stop_n).tolist())
    for k, name in enumerate(scheme.layout.names):
        held = zip(found.block_nk[:, k].tolist(), present_nk[:, k].tolist(), strict=True)
        logs["extra"][f"credit/{name}"].extend(value if there else None for value, there in held)
    logs["extra"]["credit/stop"].extend(found.stop_n.tolist())


def cited(scheme: Scheme) -> tuple[str, dict[str, str]]:
    """What a model card calls the training, and the paper of its method.

    >>> from spanwise import Layout
    >>> cited(Scheme.preset("bae", Layout({"solution": ["answer"], "confidence": ["confidence"]})))
    ("spanwise's method 'bae'", {'title': 'Blockwise Advantage Estimation', 'id': '2602.10231'})
    """
    title, _, number = scheme.entry.paper.rpartition(", arXiv ")
    return f"spanwise's method '{scheme.method}'", {"title": title, "id": number} if title else {}
