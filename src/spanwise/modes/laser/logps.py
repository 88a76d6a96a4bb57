"""Reading a self-rewarding score: the reserved token after the end of a completion, off a model or in a trainer's rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from spanwise.errors import DataError, RecipeError, refuse
from spanwise.modes.laser.config import Laser, verdicts
from spanwise.modes.laser.score import class_weights, self_reward, verification_loss
from spanwise.modes.parts import RowPart
from spanwise.modes.sequences import left_padded, positions
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme

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
    ids, called = tokenizer.get_vocab(), f"laser.token '{laser.token}'"
    taken = {*ends, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    free = {token: ids[token] for token in tokenizer.all_special_tokens if token in ids}
    free |= {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = {token: number for token, number in free.items() if number not in taken}
    such = (
        f"such as {', '.join(list(free)[:3])}" if free else f"or an id from {len(tokenizer)} to {size - 1}, if there is one"
    )
    token = ids.get(laser.token) if isinstance(laser.token, str) else laser.token
    if token is None or not 0 <= token < size:
        raise RecipeError(f"{called} is not in the vocabulary of {len(tokenizer)} tokens; name one that is, {such}.")
    if token in taken:
        raise RecipeError(f"{called} begins, ends or pads a completion; name one that has no use, {such}.")
    if token in set(ids.values()) - set(free.values()):
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
    parts, training = [], model.training
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model  # adapters hide what the model takes
    try:
        model.eval()
        for first in range(0, len(rows), batch_size):
            here = rows[first : first + batch_size]
            ids_nt, mask_nt = left_padded(here, pad, model.device)
            more = {"use_cache": False, "logits_to_keep": 1, **positions(bare, mask_nt)}
            last_nv = model(input_ids=ids_nt, attention_mask=mask_nt, **more).logits[:, -1].float()
            parts.append(temperature * (last_nv / temperature).log_softmax(dim=-1)[:, token].cpu())
    finally:
        model.train(training)
    return torch.cat(parts) if parts else torch.zeros(0)


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


class Appended(RowPart):
    """The reserved token of a policy where a trainer gives log-probabilities of its rows alone: it is one more token of a row.

    It stands behind the end of the completion and outside the loss mask, as tool output does, so that every pass of the trainer
    gives its log-probability and no term of its loss looks at it. What teaches it travels where nothing else is read: at its place
    the advantage is a weight and the old log-probability a target (`lesson`), which a loss of ours takes out (`parted`).
    """

    def __init__(self, mode: Laser, tokenizer: Any, *, size: int, generation: Any, temperature: float) -> None:
        more = getattr(generation, "eos_token_id", None)
        self.mode, self.temperature = mode, temperature
        self.ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
        self.token = reserved_id(mode, tokenizer, size=size, ends=self.ends)
        self._score_n = torch.zeros(0)

    @staticmethod
    def check(mode: Laser, engine: str, config: Any) -> None:
        """Refuse rows that are no completions, and passes that do not give the log-probability of a token not sampled."""
        faults = _verl_faults(config) if engine == "verl" else _skyrl_faults(config)
        nobody = "laser has no reference, which nothing measures here; run `spanwise reference RECIPE` and write what it finds as "
        refuse({**faults, f"{nobody}reference: under laser:.": mode.reference is None})

    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Whether the last token of a row is the model's own, trained, and one that ends a completion."""
        return len(ids) > 0 and ids[-1] in self.ends and mask[-1] > 0

    def fields(self, logp_n: Float[Tensor, " n"], number: int) -> dict[str, Tensor]:
        """The score of each row by the trainer's log-probability, NaN for NaN, once it is mixed in."""
        self._score_n = self_reward(self.temperature * logp_n.float(), beta=self.mode.beta, reference=self.mode.reference)
        return {"score_n": self._score_n} if self.mode.mixes(number) else {}

    def lesson(self, reading: Reading, scheme: Scheme, number: int, *, rows: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        r"""The verification loss of the rows that were scored last, as a squared error of log-probabilities.

        Equation
            alpha l = 1/rows * sum of weight (logp - target)^2
            weight = alpha w (beta T)^2 rows / (N_c + N_i),   target = (reference + r_v / beta) / T

        Where a batch makes several optimiser steps, w and N_c + N_i are those of the batch, as in the mean over the steps.
        """
        laser, score_n, metrics = self.mode, self._score_n, {}
        verdict_n = verdicts(laser, reading, scheme).double()
        known_n = ~(score_n.isnan() | verdict_n.isnan())
        verdict_n = torch.where(known_n, verdict_n, torch.nan)
        w_n, count = class_weights(verdict_n, balanced=laser.balanced), int(known_n.sum())
        if count:
            right_n = (score_n > 0.5) == (verdict_n > 0.5)
            metrics["laser/loss"] = float(verification_loss(score_n.double(), verdict_n, weight_n=w_n))
            metrics["laser/accuracy"] = float(right_n[known_n].double().mean())
        scale = laser.alpha * (laser.beta * self.temperature) ** 2 * rows / max(count, 1)
        target_n = (laser.reference + torch.where(known_n, verdict_n, 0.0) / laser.beta) / self.temperature
        return (scale * w_n * (number >= laser.reasoning_warmup)).float(), target_n.float(), metrics

    @staticmethod
    def parted(
        logp_nt: Float[Tensor, "n t"],
        old_nt: Float[Tensor, "n t"],
        adv_nt: Float[Tensor, "n t"],
        mask_nt: Shaped[Tensor, "n t"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take a lesson out of a batch: what is left is one in which a reserved token is one more token that nothing reads.

        Weights stand outside the mask, right behind a trained token. Rows without a trained token have none: trainers fill batches
        up with such rows, whatever their advantages.

        >>> logp_nt, mask_nt = torch.tensor([[-1., -20.], [-1., -2.]]), torch.tensor([[1, 0], [0, 0]])
        >>> adv_nt = torch.tensor([[.5, .01], [.6, .6]])
        >>> old_nt, adv_nt, error_nt = Appended.parted(logp_nt, torch.tensor([[-1.5, -13.], [-1., -2.]]), adv_nt, mask_nt)
        >>> old_nt.tolist(), adv_nt[0].tolist(), round(float(error_nt.sum()), 6)
        ([[-1.5, -20.0], [-1.0, -2.0]], [0.5, 0.0], 0.49)
        """
        trained_nt = mask_nt > 0
        behind_nt = torch.cat([torch.zeros_like(trained_nt[:, :1]), trained_nt[:, :-1]], dim=1)
        here_nt = behind_nt & ~trained_nt & (adv_nt != 0)
        gap_nt = torch.where(here_nt, logp_nt - old_nt, 0.0)
        old_nt = torch.where(here_nt, logp_nt.detach().to(old_nt.dtype), old_nt)
        return old_nt, torch.where(here_nt, 0.0, adv_nt), torch.where(here_nt, adv_nt, 0.0) * gap_nt.square()


def _verl_faults(config: Any) -> dict[str, Any]:
    """Settings of verl that hide the token's log-probability."""
    return {
        "algorithm.rollout_correction.bypass_mode=True takes the log-probabilities of the rollout, and laser's token was not "
        "sampled there; leave one of them out.": (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"),
        "distillation asks its teacher about what was sampled alone, and laser's token is one more; leave one of them out.": (
            (config.get("distillation") or {}).get("enabled")
        ),
    }


def _skyrl_faults(cfg: Any) -> dict[str, Any]:
    """Settings of SkyRL that make rows no completions, or hide the token's log-probability."""
    return {
        "laser scores a completion at its end, and generator.step_wise_trajectories=true makes rows of turns, which have ends of "
        "their own. Use flat rows, or leave laser out.": cfg.generator.step_wise_trajectories,
        "laser is trained by SkyRL's synchronous trainer; set trainer.fully_async.enabled=false, or leave laser out.": (
            cfg.trainer.fully_async.enabled
        ),
        "trainer.algorithm.enable_sample_support_replay=true needs what the sampler saw at each token, and laser's token was not "
        "sampled; leave one of them out.": getattr(cfg.trainer.algorithm, "enable_sample_support_replay", False),
    }
