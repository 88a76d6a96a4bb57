"""A reserved token in the rows of SkyRL (`engines.appended`): appended to responses, and a policy loss that teaches it."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # pyright: ignore[reportMissingImports]
from torch import Tensor
from transformers import GenerationConfig

from spanwise.engines.appended import Appended, check_reference, parted
from spanwise.errors import RecipeError
from spanwise.scheme import Scheme

#: How a loss of SkyRL is called that also teaches a reserved token, and the losses that there are.
WITH_LASER = "spanwise_laser_"
LOSSES = ("regular", "dual_clip", "gspo", "cispo", "sapo")


def taught(kind: str) -> str:
    """The name of a policy loss that also teaches a reserved token, in SkyRL's registry and its workers'."""
    name = WITH_LASER + kind.removeprefix(WITH_LASER)
    if name not in PolicyLossRegistry._functions:
        PolicyLossRegistry.register(name, partial(_with_laser, kind))
    return name


def check_laser(cfg: Any, scheme: Scheme) -> None:
    """Refuse a laser where a row is no completion, or no pass gives the log-probability of a token that was not sampled.

    Raises:
        RecipeError: with what to write.
    """
    if scheme.laser is None:
        return
    algorithm, generator = cfg.trainer.algorithm, cfg.generator
    sentences = {
        "laser scores a completion at its end, and generator.step_wise_trajectories=true makes rows of turns, which have ends of "
        "their own. Use flat rows, or leave laser out.": generator.step_wise_trajectories,
        "laser is trained by SkyRL's synchronous trainer; set trainer.fully_async.enabled=false, or leave laser out.": (
            cfg.trainer.fully_async.enabled
        ),
        f"trainer.algorithm.policy_loss_type is '{algorithm.policy_loss_type}', beside which no loss of laser is there; use one of "
        f"{', '.join(LOSSES)}.": algorithm.policy_loss_type.removeprefix(WITH_LASER) not in LOSSES,
        "trainer.algorithm.enable_sample_support_replay=true needs what the sampler saw at each token, and laser's token was not "
        "sampled; leave one of them out.": getattr(algorithm, "enable_sample_support_replay", False),
    }
    for sentence, wrong in sentences.items():
        if wrong:
            raise RecipeError(sentence)
    check_reference(scheme.laser)


def reserved_of(cfg: Any, scheme: Scheme, tokenizer: Any, *, size: int | None) -> Appended | None:
    """The reserved token of the recipe, if it has one, in a policy of `size` ids.

    Raises:
        RecipeError: see `Appended.of`.
    """
    if scheme.laser is None:
        return None
    try:
        generation = GenerationConfig.from_pretrained(cfg.trainer.policy.model.path)
    except OSError:
        generation = None
    size = len(tokenizer) if size is None else size
    return Appended.of(
        scheme.laser, tokenizer, size=size, generation=generation, temperature=cfg.trainer.algorithm.temperature
    )


def append(output: Mapping[str, Any], reserved: Appended) -> tuple[dict[str, Any], list[bool]]:
    """The token behind every response that ended, as one that the model did not sample; and which these are.

    Args:
        output: of a generator, with rewards per token.
        reserved: the token.
    """
    rows = zip(output["response_ids"], output["loss_masks"], strict=True)
    ended = [reserved.ended(ids, mask) for ids, mask in rows]
    more = {"response_ids": reserved.token, "loss_masks": 0, "rewards": 0.0, "rollout_logprobs": 0.0}
    longer = {
        name: [[*row, value] if last else row for row, last in zip(output[name], ended, strict=True)]
        for name, value in more.items()
        if output.get(name) is not None
    }
    return {**output, **longer}, ended


def scores(data: Any, ended: list[bool], reserved: Appended) -> Tensor:
    """The self-rewarding score of each row, NaN where it did not end; SkyRL's rows are right-aligned, so the token is the last."""
    logp_n = data["action_log_probs"][: len(ended), -1]
    return reserved.scores(torch.where(torch.tensor(ended), logp_n, torch.nan))


def teach(data: Any, ended: list[bool], weight_n: Tensor, target_n: Tensor) -> None:
    """Lay a lesson out for the loss: weights among the advantages, targets among the old log-probabilities."""
    at = torch.tensor(ended).nonzero()[:, 0]
    for name, value_n in {"advantages": weight_n, "action_log_probs": target_n}.items():
        data[name] = data[name].clone()
        data[name][at, -1] = value_n[at].to(data[name].dtype)


def _with_laser(
    kind: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """A policy loss of SkyRL, plus what teaches a reserved token; both are sums, divided in the advantages."""
    assert loss_mask is not None, "SkyRL trains with a mask"
    found = parted(log_probs, old_log_probs, advantages, loss_mask)
    own = copy.copy(config)
    own.policy_loss_type = kind  # which some losses look at
    loss, shown = PolicyLossRegistry._functions[kind](
        log_probs, found.old_nt, found.adv_nt, config=own, loss_mask=loss_mask, rollout_logprobs=rollout_logprobs
    )
    return loss + found.error_nt.sum(), shown
