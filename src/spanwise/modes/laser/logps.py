"""Read a self-rewarding score: the reserved token after the end of a completion, in a model or in a trainer's rows."""

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

#: A new policy starts at a score of 0, a policy trained with it between 0 and 1; beyond, the reference is of another model.
_FAR, _NEAR = 0.5, 0.1


def reserved_id(laser: Laser, tokenizer: Any, *, size: int, ends: Collection[int]) -> int:
    """Return the id of the reserved token, which the policy must never write."""
    ids, setting = tokenizer.get_vocab(), f"laser.token '{laser.token}'"
    used_ids = {*ends, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    free = {token: ids[token] for token in tokenizer.all_special_tokens if token in ids}
    free |= {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    free = {token: number for token, number in free.items() if number not in used_ids}
    example = (
        f"such as {', '.join(list(free)[:3])}" if free else f"or an id from {len(tokenizer)} to {size - 1}, if there is one"
    )
    token = ids.get(laser.token) if isinstance(laser.token, str) else laser.token
    if token is None or not 0 <= token < size:
        raise RecipeError(f"{setting} is not in the vocabulary of {len(tokenizer)} tokens; name one that is, {example}.")
    if token in used_ids:
        raise RecipeError(f"{setting} begins, ends or pads a completion; name one that has no use, {example}.")
    if token in set(ids.values()) - set(free.values()):
        raise RecipeError(f"{setting} is text that the policy writes, so it can be sampled; name a special one, {example}.")
    return token


def ended(ids_nt: Int[Tensor, "n t"], there_nt: Bool[Tensor, "n t"], ends: Collection[int]) -> Bool[Tensor, " n"]:
    """Return the completions whose last token ends them; all others were cut off."""
    index_n = there_nt.long().cumsum(dim=1).argmax(dim=1)
    last_id_n = ids_nt.gather(1, index_n[:, None])[:, 0]
    return torch.isin(last_id_n, torch.tensor(list(ends), device=ids_nt.device)) & there_nt.any(dim=1)


@torch.no_grad()
def end_logp(
    model: Any, rows: Sequence[Sequence[int]], token: int, *, pad: int, temperature: float = 1.0, batch_size: int = 64
) -> Float[Tensor, " n"]:
    r"""Return T log softmax(logits / T)[token] after each row, T the temperature: one forward pass, one position each."""
    parts, training = [], model.training
    # An adapter hides the arguments of the model.
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        model.eval()
        for first in range(0, len(rows), batch_size):
            part = rows[first : first + batch_size]
            ids_nt, mask_nt = left_padded(part, pad, model.device)
            options = {"use_cache": False, "logits_to_keep": 1, **positions(bare, mask_nt)}
            last_nv = model(input_ids=ids_nt, attention_mask=mask_nt, **options).logits[:, -1].float()
            parts.append(temperature * (last_nv / temperature).log_softmax(dim=-1)[:, token].cpu())
    finally:
        model.train(training)
    return torch.cat(parts) if parts else torch.zeros(0)


class ScoreReader:
    """Reads the self-rewarding score of completions from a model."""

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
        """Return the log-probability of the token after each completion, NaN for a completion that did not end."""
        ended_n, pad = ended(ids_nt, there_nt, self.ends), int(self.tokenizer.pad_token_id)
        rows = [[*prompts[n], *ids_nt[n][there_nt[n]].tolist()] for n in ended_n.nonzero()[:, 0].tolist()]
        logp_n = torch.full((len(ids_nt),), torch.nan)
        logp_n[ended_n.cpu()] = end_logp(self.model, rows, self.token, pad=pad, temperature=temperature)
        return logp_n

    def scores(self, *completions: Any, temperature: float) -> Float[Tensor, " n"]:
        """Return the score of each completion, NaN for those that did not end."""
        assert self.laser.reference is not None, "scores are read once the reference is known"
        logp_n = self.logps(*completions, temperature=temperature)
        return self_reward(logp_n, beta=self.laser.beta, reference=self.laser.reference)


def measured(
    laser: Laser, token: int, logp_n: Float[Tensor, " n"], *, temperature: float
) -> tuple[Laser, dict[str, Any], str | None]:
    """Return the mode with its reference, the mean of log-probabilities under the starting policy; check one that was given."""
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
    contents = {"token": laser.token, "id": token, "reference": laser.reference, "mean": mean, "std": std}
    return laser, {**contents, "completions": len(known_n), "temperature": temperature}, warning


class Appended(RowPart):
    """The reserved token in trainers that compute log-probabilities of their rows alone: it becomes one more token of a row."""

    def __init__(self, mode: Laser, tokenizer: Any, *, size: int, generation: Any, temperature: float) -> None:
        more = getattr(generation, "eos_token_id", None)
        self.mode, self.temperature = mode, temperature
        self.ends = {tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None}
        self.token = reserved_id(mode, tokenizer, size=size, ends=self.ends)
        self._score_n = torch.zeros(0)

    @staticmethod
    def check(mode: Laser, engine: str, config: Any) -> None:
        """Refuse rows that are not whole completions, and passes without the log-probability of a token that was not sampled."""
        faults = _verl_faults(config) if engine == "verl" else _skyrl_faults(config)
        problem = "laser has no reference, which nothing measures here; run `spanwise reference RECIPE` and write what it finds as "
        refuse({**faults, f"{problem}reference: under laser:.": mode.reference is None})

    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Return whether the last token of a row was sampled, is trained, and ends a completion."""
        return len(ids) > 0 and ids[-1] in self.ends and mask[-1] > 0

    def fields(self, logp_n: Float[Tensor, " n"], number: int) -> dict[str, Tensor]:
        """Return the score of each row from the trainer's log-probability, NaN for NaN, once scores are mixed in."""
        self._score_n = self_reward(self.temperature * logp_n.float(), beta=self.mode.beta, reference=self.mode.reference)
        return {"score_n": self._score_n} if self.mode.mixes(number) else {}

    def lesson(self, reading: Reading, scheme: Scheme, number: int, *, rows: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        r"""Return weight and target of each scored row, so that their squared error is the verification loss; and metrics."""
        laser, score_n, metrics = self.mode, self._score_n, {}
        verdict_n = verdicts(laser, reading, scheme).double()
        known_n = ~(score_n.isnan() | verdict_n.isnan())
        verdict_n = torch.where(known_n, verdict_n, torch.nan)
        w_n, count = class_weights(verdict_n, balanced=laser.balanced), int(known_n.sum())
        if count:
            right_n = (score_n > 0.5) == (verdict_n > 0.5)
            metrics["laser/loss"] = float(verification_loss(score_n.double(), verdict_n, weight_n=w_n))
            metrics["laser/accuracy"] = float(right_n[known_n].double().mean())
        # loss = 1/rows * sum of weight (logp - target)^2; of a batch with several optimizer steps, `count` is that of the batch.
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
        """Split off the verification loss: return old log-probabilities and advantages without it, and its error per token."""
        # A weight stands right behind a trained token: advantages elsewhere are of rows that fill a batch up.
        trained_nt = mask_nt > 0
        behind_nt = torch.cat([torch.zeros_like(trained_nt[:, :1]), trained_nt[:, :-1]], dim=1)
        token_nt = behind_nt & ~trained_nt & (adv_nt != 0)
        gap_nt = torch.where(token_nt, logp_nt - old_nt, 0.0)
        old_nt = torch.where(token_nt, logp_nt.detach().to(old_nt.dtype), old_nt)
        return old_nt, torch.where(token_nt, 0.0, adv_nt), torch.where(token_nt, adv_nt, 0.0) * gap_nt.square()


def _verl_faults(config: Any) -> dict[str, Any]:
    """Return the verl settings under which the log-probability of the reserved token is not available."""
    return {
        "algorithm.rollout_correction.bypass_mode=True takes the log-probabilities of the rollout, and laser's token was not "
        "sampled there; leave one of them out.": (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"),
        "the distillation teacher only scores sampled tokens, and laser's token is not sampled; leave one of them out.": (
            (config.get("distillation") or {}).get("enabled")
        ),
    }


def _skyrl_faults(cfg: Any) -> dict[str, Any]:
    """Return the settings of SkyRL under which rows are not whole completions, or that hide the token's log-probability."""
    return {
        "laser scores a completion at its end, and generator.step_wise_trajectories=true makes rows of turns, which have ends of "
        "their own. Use flat rows, or leave laser out.": cfg.generator.step_wise_trajectories,
        "laser is trained by SkyRL's synchronous trainer; set trainer.fully_async.enabled=false, or leave laser out.": (
            cfg.trainer.fully_async.enabled
        ),
        "trainer.algorithm.enable_sample_support_replay=true needs what the sampler saw at each token, and laser's token was not "
        "sampled; leave one of them out.": getattr(cfg.trainer.algorithm, "enable_sample_support_replay", False),
    }
