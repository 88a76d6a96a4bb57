"""A critic in TRL: it says the values of each generation batch and is fitted to it, and the policy may wait for it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spanwise.batch import Batch
from spanwise.modes.critic.config import CRITIC, CriticConfig
from spanwise.modes.critic.critic import Critic
from spanwise.modes.critic.value_model import ValueModel
from spanwise.modes.parts import TrlPart
from spanwise.modes.sequences import cut_off, sequences
from spanwise.pipeline import Reading, streams


class CriticInTrl(TrlPart):
    """The `Critic` of a trainer."""

    def __init__(self, mode: CriticConfig, trainer: Any) -> None:
        super().__init__(mode, trainer)
        names, tokenizer, args = trainer.scheme.value_names, trainer._text_tokenizer, trainer.args
        if mode.model is None:
            model = ValueModel.of_policy(trainer.model, names, mode)
        else:
            model = ValueModel.load(mode.model, names, mode, tokenizer)
        size, gamma = args.per_device_train_batch_size, trainer.scheme.gamma
        self.critic = Critic(model, mode, trainer.accelerator, micro_batch=size, gamma=gamma, seed=args.seed)
        self._ends = getattr(trainer, "eos_token_ids", None) or [tokenizer.eos_token_id]
        self._seconds = 0.0

    def read(self, batch: Batch, reading: Reading, output: dict[str, Any]) -> tuple[Batch, dict[str, float]]:
        """The values of a critic before it is fitted."""
        started = time.perf_counter()
        over = streams(reading, batch, self.trainer.scheme)
        fit = bool(self.trainer.model.training)
        learned = self.critic.learn(sequences(output, batch), over, cut_off(batch, self._ends), fit=fit)
        self._seconds += time.perf_counter() - started
        value_nts = learned.value_nts
        if over.names != ("return",):  # of an objective: outside its blocks it is of nothing
            value_nts = value_nts.masked_fill(~over.mask_snt.permute(1, 2, 0), torch.nan)
        return replace(batch, value_nt=value_nts, bootstrap_n=learned.bootstrap_ns), dict(learned.metrics)

    @property
    def waits(self) -> bool:
        """Whether the policy waits for its critic still."""
        return self.critic.batches <= self.mode.policy_training_start_step

    def logged(self, step_seconds: float) -> dict[str, float]:
        """The seconds of the critic as a share of those of the rest of the steps, once both are known."""
        seconds = self._seconds
        if not step_seconds > seconds > 0:
            return {}
        self._seconds = 0.0
        return {"critic/share": seconds / (step_seconds - seconds)}

    def save(self, folder: Path) -> None:
        """The critic with its optimizer."""
        self.critic.save(folder / CRITIC, self.trainer._text_tokenizer)

    def restore(self, folder: Path) -> None:
        """Go on with the critic of a checkpoint."""
        self.critic.restore(folder / CRITIC)
