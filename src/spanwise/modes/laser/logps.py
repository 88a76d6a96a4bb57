"""Compute laser's scores from the reserved token's log-probability after each completion."""

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

#: Refuse a first mean score more than `_FAR` outside [0, 1], and warn if it is more than `_NEAR` from 0.
_FAR, _NEAR = 0.5, 0.1


def reserved_id(laser: Laser, tokenizer: Any, *, size: int, ends: Collection[int]) -> int:
    """Return the id of `laser.token`, whose probability is a confidence. Refuse a token that the policy may write."""
    vocabulary = tokenizer.get_vocab()
    token_setting = f"laser.token '{laser.token}'"
    used_ids = {*ends, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    id_of_special_token = {token: vocabulary[token] for token in tokenizer.all_special_tokens if token in vocabulary}
    id_of_special_token |= {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    id_of_special_token = {token: number for token, number in id_of_special_token.items() if number not in used_ids}
    remedy = f"Set laser.token to an unused special token, such as {', '.join(list(id_of_special_token)[:3])}."
    if not id_of_special_token:
        remedy = f"Set laser.token to an unused id from {len(tokenizer)} to {size - 1}, if there is one."
    token_id = vocabulary.get(laser.token) if isinstance(laser.token, str) else laser.token
    if token_id is None or not 0 <= token_id < size:
        raise RecipeError(f"{token_setting} is not in the vocabulary of {len(tokenizer)} tokens. {remedy}")
    if token_id in used_ids:
        raise RecipeError(f"{token_setting} begins, ends or pads a completion. {remedy}")
    if token_id in set(vocabulary.values()) - set(id_of_special_token.values()):
        raise RecipeError(f"{token_setting} is text that the policy writes, so the policy can sample it. {remedy}")
    return token_id


def ended(ids_nt: Int[Tensor, "n t"], present_nt: Bool[Tensor, "n t"], ends: Collection[int]) -> Bool[Tensor, " n"]:
    """Mark the completions whose last token is an end-of-sequence token. The others were cut off."""
    last_token_index_n = present_nt.long().cumsum(dim=1).argmax(dim=1)
    last_token_id_n = ids_nt.gather(1, last_token_index_n[:, None])[:, 0]
    return torch.isin(last_token_id_n, torch.tensor(list(ends), device=ids_nt.device)) & present_nt.any(dim=1)


@torch.no_grad()
def end_logp(
    model: Any, rows: Sequence[Sequence[int]], token: int, *, pad: int, temperature: float = 1.0, batch_size: int = 64
) -> Float[Tensor, " n"]:
    """Compute a token's log-probability after the end of each row. At temperature T the result is multiplied by T."""
    was_training = model.training
    logps_of_chunks: list[Tensor] = []
    # A PEFT adapter hides the arguments of the forward pass, so look them up in the wrapped model.
    inner_model = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        model.eval()
        for start in range(0, len(rows), batch_size):
            ids_nt, mask_nt = left_padded(rows[start : start + batch_size], pad, model.device)
            forward_options = {"use_cache": False, "logits_to_keep": 1, **positions(inner_model, mask_nt)}
            last_logit_nv = model(input_ids=ids_nt, attention_mask=mask_nt, **forward_options).logits[:, -1].float()
            logps_of_chunks.append(temperature * (last_logit_nv / temperature).log_softmax(dim=-1)[:, token].cpu())
    finally:
        model.train(was_training)
    return torch.cat(logps_of_chunks) if logps_of_chunks else torch.zeros(0)


class ScoreReader:
    """Scores completions by the probability that a model gives the reserved token (LaSeR)."""

    def __init__(self, laser: Laser, model: Any, tokenizer: Any, ends: Collection[int]) -> None:
        self.laser, self.model, self.tokenizer, self.ends = laser, model, tokenizer, ends
        self.token = reserved_id(laser, tokenizer, size=model.get_input_embeddings().num_embeddings, ends=ends)

    def logps(
        self,
        prompts: Sequence[Sequence[int]],
        ids_nt: Int[Tensor, "n t"],
        present_nt: Bool[Tensor, "n t"],
        *,
        temperature: float,
    ) -> Float[Tensor, " n"]:
        """Return the reserved token's log-probability after each completion. NaN for cut-off completions."""
        has_ended_n = ended(ids_nt, present_nt, self.ends)
        pad_id = int(self.tokenizer.pad_token_id)
        ended_rows = [[*prompts[n], *ids_nt[n][present_nt[n]].tolist()] for n in has_ended_n.nonzero()[:, 0].tolist()]
        logp_n = torch.full((len(ids_nt),), torch.nan)
        logp_n[has_ended_n.cpu()] = end_logp(self.model, ended_rows, self.token, pad=pad_id, temperature=temperature)
        return logp_n

    def scores(self, *completions: Any, temperature: float) -> Float[Tensor, " n"]:
        """Return the self-rewarding score of each completion. NaN for completions that did not end."""
        assert self.laser.reference is not None, "scores need a reference"
        logp_n = self.logps(*completions, temperature=temperature)
        return self_reward(logp_n, beta=self.laser.beta, reference=self.laser.reference)


def measured(
    laser: Laser, token: int, logp_n: Float[Tensor, " n"], *, temperature: float
) -> tuple[Laser, dict[str, Any], str | None]:
    """Set `laser.reference` to the starting policy's mean log-probability, or check the value that the recipe gives."""
    known_logp_n = logp_n[~logp_n.isnan()].double()
    if not len(known_logp_n):
        raise DataError(
            f"laser reads the probability of '{laser.token}' after the end of a completion, but none of the {len(logp_n)} "
            "completions of the first batch ended. Raise max_completion_length."
        )
    mean_logp = float(known_logp_n.mean())
    std_logp = float(known_logp_n.std()) if len(known_logp_n) > 1 else 0.0
    warning = None
    if laser.reference is None:
        laser.check_reach(mean_logp)
        laser = replace(laser, reference=mean_logp)
    else:
        first_self_reward = laser.beta * (mean_logp - laser.reference)
        self_reward_text = (
            f"laser.reference is {laser.reference:g}, but the starting policy gives '{laser.token}' the mean "
            f"log-probability {mean_logp:.4g} (standard deviation {std_logp:.2g}). So scores start at "
            f"{first_self_reward:.2g} instead of 0."
        )
        if not -_FAR <= first_self_reward <= 1 + _FAR:
            raise RecipeError(
                f"{self_reward_text} The reference belongs to another model or token. Remove laser.reference, and spanwise "
                "measures the reference."
            )
        if abs(first_self_reward) > _NEAR:
            warning = f"{self_reward_text} Unless laser has trained this policy before, remove laser.reference."
    measurement = {"token": laser.token, "id": token, "reference": laser.reference, "mean": mean_logp, "std": std_logp}
    return laser, {**measurement, "completions": len(known_logp_n), "temperature": temperature}, warning


class Appended(RowPart):
    """Runs laser (a policy scores its own answers) in verl and SkyRL. Each row that was not cut off gets one more token."""

    def __init__(self, mode: Laser, tokenizer: Any, *, size: int, generation: Any, temperature: float) -> None:
        end_ids = getattr(generation, "eos_token_id", None)
        self.mode, self.temperature = mode, temperature
        end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
        self.ends = {tokenizer.eos_token_id, *end_ids} - {None}
        self.token = reserved_id(mode, tokenizer, size=size, ends=self.ends)
        self._score_n = torch.zeros(0)

    @staticmethod
    def check(mode: Laser, engine: str, config: Any) -> None:
        """Refuse settings of verl or SkyRL with which LaSeR cannot work."""
        setting_faults = _verl_faults(config) if engine == "verl" else _skyrl_faults(config)
        no_reference_message = (
            "laser.reference is missing: it is the log-probability of laser's token before training, and "
            f"{engine} does not measure it. Run `spanwise reference RECIPE --model MODEL --dataset FILE`, and set "
            "laser.reference to the printed number."
        )
        refuse({**setting_faults, no_reference_message: mode.reference is None})

    def ended(self, ids: Sequence[int], mask: Sequence[Any]) -> bool:
        """Return whether a row ends with an end-of-sequence token that the model sampled and the loss trains."""
        return len(ids) > 0 and ids[-1] in self.ends and mask[-1] > 0

    def fields(self, logp_n: Float[Tensor, " n"], number: int) -> dict[str, Tensor]:
        """Compute and store the policy's score of each row. Return the scores only for batches whose credit uses them."""
        self._score_n = self_reward(self.temperature * logp_n.float(), beta=self.mode.beta, reference=self.mode.reference)
        return {"score_n": self._score_n} if self.mode.mixes(number) else {}

    def lesson(self, reading: Reading, scheme: Scheme, number: int, *, rows: int) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Return (weights, targets, metrics) of laser's squared error. Targets are log-probabilities that match verdicts."""
        laser = self.mode
        score_n = self._score_n
        metrics: dict[str, float] = {}
        verdict_n = verdicts(laser, reading, scheme).double()
        is_known_n = ~(score_n.isnan() | verdict_n.isnan())
        verdict_n = torch.where(is_known_n, verdict_n, torch.nan)
        class_weight_n = class_weights(verdict_n, balanced=laser.balanced)
        scored_count = int(is_known_n.sum())
        if scored_count:
            is_score_right_n = (score_n > 0.5) == (verdict_n > 0.5)
            metrics["laser/loss"] = float(verification_loss(score_n.double(), verdict_n, weight_n=class_weight_n))
            metrics["laser/accuracy"] = float(is_score_right_n[is_known_n].double().mean())
        # `weight_scale` converts the squared error of log-probabilities to alpha times the squared error of scores.
        weight_scale = laser.alpha * (laser.beta * self.temperature) ** 2 * rows / max(scored_count, 1)
        target_logp_n = (laser.reference + verdict_n.nan_to_num(nan=0.0) / laser.beta) / self.temperature
        return (weight_scale * class_weight_n * (number >= laser.reasoning_warmup)).float(), target_logp_n.float(), metrics

    @staticmethod
    def parted(
        logp_nt: Float[Tensor, "n t"],
        old_nt: Float[Tensor, "n t"],
        adv_nt: Float[Tensor, "n t"],
        mask_nt: Shaped[Tensor, "n t"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `old_nt` and `adv_nt` changed so that laser's token has no policy loss, and laser's loss by token."""
        # After a row's last trained token, `adv_nt` holds the weight of laser's squared error, not an advantage.
        is_trained_nt = mask_nt > 0
        is_after_trained_nt = torch.cat([torch.zeros_like(is_trained_nt[:, :1]), is_trained_nt[:, :-1]], dim=1)
        is_reserved_nt = is_after_trained_nt & ~is_trained_nt & (adv_nt != 0)
        logp_error_nt = torch.where(is_reserved_nt, logp_nt - old_nt, 0.0)
        old_nt = torch.where(is_reserved_nt, logp_nt.detach().to(old_nt.dtype), old_nt)
        weight_nt = torch.where(is_reserved_nt, adv_nt, 0.0)
        return old_nt, torch.where(is_reserved_nt, 0.0, adv_nt), weight_nt * logp_error_nt.square()


def _verl_faults(config: Any) -> dict[str, Any]:
    """Check verl's settings for laser. Return {error message: a true value if it applies}."""
    return {
        "algorithm.rollout_correction.bypass_mode=True takes log-probabilities from sampling, but laser's token is not sampled. "
        "Set bypass_mode=False, or leave laser out.": (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"),
        "algorithm.filter_groups drops groups with equal rewards, but laser learns from them, too. Set "
        "filter_groups.enable=False, or leave laser out.": (config.algorithm.get("filter_groups") or {}).get("enable"),
        "distillation.enabled is True, but the teacher only scores sampled tokens, and laser's token is not sampled. Set "
        "distillation.enabled=False, or leave laser out.": ((config.get("distillation") or {}).get("enabled")),
    }


def _skyrl_faults(cfg: Any) -> dict[str, Any]:
    """Check SkyRL's settings for laser. Return {error message: a true value if it applies}."""
    algorithm_config = cfg.trainer.algorithm
    return {
        "laser scores a completion at its end, but generator.step_wise_trajectories=true makes one row per turn. Set it to false, "
        "or leave laser out.": cfg.generator.step_wise_trajectories,
        "laser only works with SkyRL's synchronous trainer. Set trainer.fully_async.enabled=false, or leave laser out.": (
            cfg.trainer.fully_async.enabled
        ),
        "trainer.algorithm.enable_sample_support_replay=true needs sampling data of each token, but laser's token is "
        "appended, not sampled. Set it to false, or leave laser out.": getattr(
            algorithm_config, "enable_sample_support_replay", False
        ),
    }
