"""What the critic of a trainer of its own is fitted to, and how far off it is."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.batch import Batch
from spanwise.credit import value_target
from spanwise.losses import critic_error
from spanwise.pipeline import Reading, streams
from spanwise.scheme import Scheme


def returns(reading: Reading, batch: Batch, scheme: Scheme, *, lam: float) -> tuple[Float[Tensor, "n t"], dict[str, float]]:
    """The targets of a critic of one value, and the metrics of its values.

    Edge cases:
        Where nothing is known of a token the target is its own value, which moves nothing.

    Example:
        >>> from spanwise import Layout, Vocabulary, read
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"5", b"</answer>"))
        >>> batch = Batch.jagged([[0, 1, 3]], [0], columns={"answer": ["4"]}, value_nt=torch.tensor([[.5, .5, .8]]))
        >>> scheme = Scheme.preset("gae", Layout({"all": ["answer"]}))
        >>> returns(read(batch, scheme, vocabulary), batch, scheme, lam=1.0)[0]
        tensor([[1., 1., 1.]])
    """
    (part,) = streams(reading, batch, scheme).inputs(batch.value_nt)
    value_nt, there_nt = part["value_nt"], part["mask_nt"]
    target_nt = value_target(**part, gamma=scheme.gamma, lam=lam)
    known = critic_error(value_nt, target_nt, there_nt).figures()
    return torch.where(there_nt, target_nt, value_nt), {f"critic/{name}": number for name, number in known.items()}
