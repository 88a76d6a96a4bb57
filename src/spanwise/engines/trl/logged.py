"""What TRL's own logs say of a run: its table of completions, its model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from spanwise.scheme import Scheme
from spanwise.types import Credit


def log_credit(logs: Mapping[str, Any], found: Credit, present_nk: Bool[Tensor, "n k"], scheme: Scheme) -> str:
    """Put the credit of a batch in the place of the scalar advantage that TRL worked out for its table of completions.

    The columns are `credit/<block>` (None where the completion does not have it), `credit/stop`, and `advantage`, their sum: with
    one block, what TRL's own trainer writes there.
    """
    lack = [name for name in ("advantages", "extra") if name not in logs]
    if lack:
        return (
            f"TRL's table of completions (log_completions) has no {' and no '.join(lack)} in this version, so it does not show the "
            "credit of blocks. Training is the same; keep_rollouts=10 writes the credit of every block."
        )
    total = logs["advantages"]
    for _ in range(min(len(total), len(present_nk))):
        total.pop()
    total.extend((found.block_nk.sum(dim=1) + found.stop_n).tolist())
    for k, name in enumerate(scheme.layout.names):
        held = zip(found.block_nk[:, k].tolist(), present_nk[:, k].tolist(), strict=True)
        logs["extra"][f"credit/{name}"].extend(value if there else None for value, there in held)
    logs["extra"]["credit/stop"].extend(found.stop_n.tolist())
    return ""


def cited(scheme: Scheme) -> tuple[str, dict[str, str]]:
    """What a model card calls the training, and the paper of its method.

    >>> from spanwise import Layout
    >>> cited(Scheme.preset("bae", Layout({"solution": ["answer"], "confidence": ["confidence"]})))
    ("spanwise's method 'bae'", {'title': 'Blockwise Advantage Estimation', 'id': '2602.10231'})
    """
    title, _, number = scheme.entry.paper.rpartition(", arXiv ")
    return f"spanwise's method '{scheme.method}'", {"title": title, "id": number} if title else {}
