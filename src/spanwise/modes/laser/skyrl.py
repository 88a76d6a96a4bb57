"""A reserved token in the rows of SkyRL (`modes.laser.appended`): appended to responses, and a policy loss that teaches it."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry  # pyright: ignore[reportMissingImports]
from torch import Tensor
from transformers import GenerationConfig

from spanwise.errors import refuse
from spanwise.modes.laser.appended import Appended, check_reference, parted
from spanwise.modes.laser.config import Laser
from spanwise.modes.parts import SkyrlPart
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme

#: How a loss of SkyRL is called that also teaches a reserved token, and the losses that there are.
WITH_LASER = "spanwise_laser_"
LOSSES = ("regular", "dual_clip", "gspo", "cispo", "sapo")


class TokenInSkyrl(SkyrlPart):
    """The reserved token of a run in SkyRL's rows."""

    def __init__(self, mode: Laser, cfg: Any, tokenizer: Any, size: int | None) -> None:
        super().__init__(mode, cfg, tokenizer, size)
        try:
            generation = GenerationConfig.from_pretrained(cfg.trainer.policy.model.path)
        except OSError:
            generation = None
        size, temperature = size or len(tokenizer), cfg.trainer.algorithm.temperature
        self.reserved = Appended(mode, tokenizer, size=size, generation=generation, temperature=temperature)
        self._ended = torch.zeros(0).bool()

    @staticmethod
    def check(mode: Laser, cfg: Any) -> None:
        """Refuse rows that are no completions, and passes that do not give the log-probability of a token not sampled."""
        algorithm = cfg.trainer.algorithm
        refuse(
            {
                "laser scores a completion at its end, and generator.step_wise_trajectories=true makes rows of turns, which have "
                "ends of their own. Use flat rows, or leave laser out.": cfg.generator.step_wise_trajectories,
                "laser is trained by SkyRL's synchronous trainer; set trainer.fully_async.enabled=false, or leave laser out.": (
                    cfg.trainer.fully_async.enabled
                ),
                f"trainer.algorithm.policy_loss_type is '{algorithm.policy_loss_type}', beside which no loss of laser is there; "
                f"use one of {', '.join(LOSSES)}.": algorithm.policy_loss_type.removeprefix(WITH_LASER) not in LOSSES,
                "trainer.algorithm.enable_sample_support_replay=true needs what the sampler saw at each token, and laser's token "
                "was not sampled; leave one of them out.": getattr(algorithm, "enable_sample_support_replay", False),
            }
        )
        check_reference(mode)

    def loss_type(self, kind: str) -> str:
        """The loss that also teaches the token."""
        name = WITH_LASER + kind.removeprefix(WITH_LASER)
        if name not in PolicyLossRegistry._functions:
            PolicyLossRegistry.register(name, partial(_with_laser, kind))
        return name

    def append(self, output: Mapping[str, Any]) -> dict[str, Any]:
        """The token behind every response that ended, as one that the model did not sample."""
        ended = list(map(self.reserved.ended, output["response_ids"], output["loss_masks"]))
        self._ended = torch.tensor(ended)
        more = {"response_ids": self.reserved.token, "loss_masks": 0, "rewards": 0.0, "rollout_logprobs": 0.0}
        longer = {
            name: [[*row, value] if last else row for row, last in zip(output[name], ended, strict=True)]
            for name, value in more.items()
            if output.get(name) is not None
        }
        return {**output, **longer}

    def fields(self, data: Any, number: int) -> dict[str, Tensor]:
        """The score of each row, NaN where it did not end, once it is mixed in; rows are right-aligned: the token is the last."""
        logp_n = data["action_log_probs"][: len(self._ended), -1]
        return self.reserved.fields(torch.where(self._ended, logp_n, torch.nan), number)

    def teach(self, data: Any, reading: Reading, scheme: Scheme, factor_n: Tensor, number: int) -> dict[str, float]:
        """Weights among the advantages, targets among the old log-probabilities."""
        lesson, at = self.reserved.lesson(reading, scheme, number), self._ended.nonzero()[:, 0]
        for name, value_n in {"advantages": lesson.weight_n * factor_n, "action_log_probs": lesson.target_n}.items():
            data[name] = data[name].clone()
            data[name][at, -1] = value_n[at].to(data[name].dtype)
        return lesson.metrics


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
