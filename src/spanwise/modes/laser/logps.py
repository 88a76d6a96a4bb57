"""Reading a self-rewarding score off a model: the reserved token, and its log-probability after the end of a completion."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spanwise.errors import DataError, RecipeError
from spanwise.modes.laser.config import Laser
from spanwise.modes.laser.score import self_reward

#: A policy that never had this score starts at 0, one that was trained with it between 0 and 1; further off is another reference.
_FAR, _NEAR = 0.5, 0.1


def reserved_id(laser: Laser, tokenizer: Any, *, size: int, ends: Collection[int]) -> int:
    """The id of the reserved token, which the policy must never write.

    Example:
        >>> from spanwise.tasks import build_tokenizer
        >>> reserved_id(Laser("<unk>"), build_tokenizer(), size=61, ends=[1])
        2
        >>> reserved_id(Laser("7"), build_tokenizer(), size=61, ends=[1])
        Traceback (most recent call last):
        spanwise.errors.RecipeError: laser.token '7' is text that the policy writes, ... such as <unk>.
    """
    known, called = tokenizer.get_vocab(), f"laser.token '{laser.token}'"
    taken = {*ends, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    free = {token: known[token] for token in tokenizer.all_special_tokens if token in known}
    free |= {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = {token: number for token, number in free.items() if number not in taken}
    such = (
        f"such as {', '.join(list(free)[:3])}" if free else f"or an id from {len(tokenizer)} to {size - 1}, if there is one"
    )
    token = known.get(laser.token) if isinstance(laser.token, str) else laser.token
    if token is None or not 0 <= token < size:
        raise RecipeError(f"{called} is not in the vocabulary of {len(tokenizer)} tokens; name one that is, {such}.")
    if token in taken:
        raise RecipeError(f"{called} begins, ends or pads a completion; name one that has no use, {such}.")
    if token in set(known.values()) - set(free.values()):
        raise RecipeError(f"{called} is text that the policy writes, so it can be sampled; name a special one, {such}.")
    return token


def ended(ids_nt: Int[Tensor, "n t"], there_nt: Bool[Tensor, "n t"], ends: Collection[int]) -> Bool[Tensor, " n"]:
    """The completions whose last token is one that ends them; all others were cut off.

    >>> ended(torch.tensor([[5, 1, 0], [5, 6, 7]]), torch.tensor([[1, 1, 0], [1, 1, 1]]).bool(), [1])
    tensor([ True, False])
    """
    last_n = there_nt.long().cumsum(dim=1).argmax(dim=1)
    last_id_n = ids_nt.gather(1, last_n[:, None])[:, 0]
    return torch.isin(last_id_n, torch.tensor(list(ends), device=ids_nt.device)) & there_nt.any(dim=1)


@torch.no_grad()
def end_logp(
    model: Any, rows: Sequence[Sequence[int]], token: int, *, pad: int, temperature: float = 1.0, batch_size: int = 64
) -> Float[Tensor, " n"]:
    r"""The log-probability of one token after each row: one forward pass, one position of the vocabulary.

    Equation
        T log softmax(logits / T)[token], T the temperature: at any T about the logit, counted from the others'
    """
    found, training = [], model.training
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model  # adapters hide what the model takes
    try:
        model.eval()
        for first in range(0, len(rows), batch_size):
            here = rows[first : first + batch_size]
            width, where = max(map(len, here)), {}
            ids_nt = torch.tensor([[pad] * (width - len(row)) + list(row) for row in here], device=model.device)
            mask_nt = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in here], device=model.device)
            # Counted from the row's first token, as when it was sampled.
            if "position_ids" in signature(bare.forward).parameters:
                where["position_ids"] = (mask_nt.cumsum(dim=1) - 1).clamp(min=0)
            said = model(input_ids=ids_nt, attention_mask=mask_nt, use_cache=False, logits_to_keep=1, **where)
            last_nv = said.logits[:, -1].float()
            found.append(temperature * (last_nv / temperature).log_softmax(dim=-1)[:, token].cpu())
    finally:
        model.train(training)
    return torch.cat(found) if found else torch.zeros(0)


class ScoreReader:
    """Reads the self-rewarding score of completions off a model."""

    def __init__(self, laser: Laser, model: Any, tokenizer: Any, ends: Collection[int]) -> None:
        self.laser, self.model, self.tokenizer, self.ends = laser, model, tokenizer, ends
        self.token = reserved_id(laser, tokenizer, size=model.get_input_embeddings().num_embeddings, ends=ends)

    def logps(
        self,
        prompts: Sequence[Sequence[int]],
        ids_nt: Int[Tensor, "n t"],
        there_nt: Bool[Tensor, "n t"],
        *,
        temperature: float,
    ) -> Float[Tensor, " n"]:
        """The log-probability of the token after each completion, NaN for those that did not end."""
        ended_n, pad = ended(ids_nt, there_nt, self.ends), int(self.tokenizer.pad_token_id)
        rows = [[*prompts[n], *ids_nt[n][there_nt[n]].tolist()] for n in ended_n.nonzero()[:, 0].tolist()]
        logp_n = torch.full((len(ids_nt),), torch.nan)
        logp_n[ended_n.cpu()] = end_logp(self.model, rows, self.token, pad=pad, temperature=temperature)
        return logp_n

    def scores(self, *completions: Any, temperature: float) -> Float[Tensor, " n"]:
        """The score of each completion, NaN for those that did not end."""
        assert self.laser.reference is not None, "scores are read once the reference is known"
        logp_n = self.logps(*completions, temperature=temperature)
        return self_reward(logp_n, beta=self.laser.beta, reference=self.laser.reference)


def measured(
    laser: Laser, token: int, logp_n: Float[Tensor, " n"], *, temperature: float
) -> tuple[Laser, dict[str, Any], str | None]:
    """The reference of the starting policy: the mean of what it says of the reserved token; a given one is held against that.

    >>> found, about, warning = measured(Laser("<unk>"), 2, torch.tensor([-18., -20., float("nan")]), temperature=1.0)
    >>> found.reference, about["completions"], warning
    (-19.0, 2, None)
    """
    known_n = logp_n[~logp_n.isnan()].double()
    if not len(known_n):
        raise DataError(
            f"laser: none of the {len(logp_n)} completions of the first batch ended, so there is no end after which to read "
            f"'{laser.token}'. Set max_completion_length up."
        )
    mean, std, warning = float(known_n.mean()), float(known_n.std()) if len(known_n) > 1 else 0.0, None
    if laser.reference is None:
        laser.check_reach(mean)
        laser = replace(laser, reference=mean)
    else:
        start = laser.beta * (mean - laser.reference)
        sentence = (
            f"laser.reference is {laser.reference:g}, and the starting policy gives '{laser.token}' {mean:.4g} nats "
            f"(+- {std:.2g}), so its answers start at a score of {start:.2g}"
        )
        if not -_FAR <= start <= 1 + _FAR:
            raise RecipeError(f"{sentence}: the reference is of another model, or token. Leave it out, and it is measured.")
        if abs(start) > _NEAR:
            warning = f"{sentence}. That is as it should be only for a policy that was trained with this score before."
    about = {"token": laser.token, "id": token, "reference": laser.reference, "mean": mean, "std": std}
    return laser, {**about, "completions": len(known_n), "temperature": temperature}, warning
