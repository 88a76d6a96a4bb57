"""The critic of a trainer that has one of its own (verl, SkyRL): what is refused of it, what it is fitted to, how far off it is."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from spanwise.batch import Batch
from spanwise.credit import value_target
from spanwise.losses import critic_error
from spanwise.modes.critic.config import CriticConfig
from spanwise.pipeline import Reading, streams
from spanwise.scheme import Scheme


def critic_faults(
    own: CriticConfig, scheme: Scheme, *, engine: str, there: Any, option: str, instead: str = ""
) -> dict[str, Any]:
    """The sentences about a method and a critic that do not fit; `option` asks for the engine's, which is `there` or not."""
    names, none = scheme.value_names, f"method '{scheme.method}' reads no values"
    return {
        f"Method '{scheme.method}' needs the values of {engine}'s critic: add {option}. Or use a method that compares completions, "
        f"such as 'bae' or 'grpo'.": names and not there,
        f"{option.split('=')[0]} asks for a critic, but {none}, so it would train on nothing. Leave it out, or use method 'gae' or "
        f"'sae'.": there and not names,
        f"The recipe has a critic section, but {none}. Leave it out, or use method 'gae' or 'sae'.": (
            own != CriticConfig() and not names
        ),
        f"Each objective has a value of its own here ({', '.join(names)}), and {engine}'s critic gives one per token; write "
        f"values: shared in the recipe.": len(names) > 1,
        f"critic.truncated is '{own.truncated}', and {engine} keeps no value from after the last token; leave it "
        f"out.{instead}": (own.truncated != "terminal"),
    }


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
    known = critic_error(value_nt, target_nt, there_nt)
    return torch.where(there_nt, target_nt, value_nt), {f"critic/{name}": number for name, number in known.items()}
