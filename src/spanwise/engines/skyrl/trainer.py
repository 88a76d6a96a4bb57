"""`SpanRayPPOTrainer`: SkyRL's PPO trainer, with credit for every span of every turn."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from skyrl.train.trainer import RayPPOTrainer  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.nn.functional import pad

from spanwise.engines.keep import RunRecord
from spanwise.engines.skyrl.config import OPTION, check, critic_of, say
from spanwise.engines.skyrl.estimators import register
from spanwise.engines.skyrl.fold import fold_factor
from spanwise.engines.skyrl.keeping import UPDATE, keep
from spanwise.engines.skyrl.rows import SampledRows
from spanwise.engines.vocabulary import model_size
from spanwise.mode import parts_of
from spanwise.modes.critic.elsewhere import returns
from spanwise.pipeline import read
from spanwise.segment import Vocabulary
from spanwise.step import ReadBatch, Step


class SpanRayPPOTrainer(RayPPOTrainer):
    """SkyRL's `RayPPOTrainer` that pays every span of a turn for what that span controls.

    Generation, workers, mini-batches, losses, logging and checkpoints stay SkyRL's. What is read, rewarded and compared is the
    recipe of `trainer.algorithm.spanwise.recipe`. Under every `loss_reduction` the loss of a mini-batch is the mean over its
    rollouts of the sum over tokens of advantage times surrogate, however many rows the turns of a rollout became.

    Attributes:
        scheme: the rule of credit.
        parts: what each of its modes does here, by its name (`spanwise.modes`).
        critic_config: the `critic` section of the recipe.
        advantage_dtype: of the advantages; SkyRL trains in float32.
        last_advantages: of the last batch, before they are multiplied for the loss reduction.
        last_rows: the rows of the generator that they belong to.
    """

    advantage_dtype = torch.float32

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        self.scheme, self.critic_config = check(cfg), critic_of(cfg)
        register()
        super().__init__(cfg, *args, **kwargs)
        size = model_size(cfg.trainer.policy.model.path)
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer, size=size)
        self.parts = parts_of(self.scheme.modes, "skyrl", cfg, self.tokenizer, size)
        for part in self.parts.values():  # the workers are made later, by this name
            cfg.trainer.algorithm.policy_loss_type = part.loss_type(cfg.trainer.algorithm.policy_loss_type)
        self.last_advantages: Tensor | None = None
        self.last_rows: SampledRows | None = None
        self.step = Step(self.scheme)
        self._record = RunRecord.of(vars(cfg.trainer.algorithm.spanwise), option=OPTION)

    async def train(self) -> None:
        """SkyRL's training; where a run folder is asked for, it is complete however training ends."""
        with nullcontext() if self._record is None else self._record.running():
            return await super().train()

    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *more: Any, **rest: Any) -> Any:
        """Remember the turns before SkyRL merges them, which keeps neither their rewards nor where they end."""
        before, prompts = dict(generator_output), list(uids)
        trained, uids = super().postprocess_generator_output(generator_output, uids, *more, **rest)
        self.last_rows = SampledRows.of(before, prompts, trained, stepwise=self.cfg.generator.step_wise_trajectories)
        for part in self.parts.values():
            trained = part.append(trained)
        return trained, uids

    def _execute_forward_pass(self, model: str, batch: Any, key: str, mini_batch_boundaries: Any) -> Tensor:
        """Old log-probabilities and values, each at its own row.

        SkyRL fills up every mini-batch to a multiple of the ranks and never takes those rows out again, so that all rows after
        the first mini-batch would get what belongs to other rows. Where a mini-batch has to be filled up it is one pass instead.
        """
        ranks = self.dispatch.get_lcm_dp_size()
        fits = mini_batch_boundaries and not any((end - start) % ranks for start, end in mini_batch_boundaries)
        return super()._execute_forward_pass(model, batch, key, mini_batch_boundaries if fits else None)

    def _execute_training_step(self, model: str, data: Any) -> dict[str, float]:
        """The policy waits while its critic is fitted alone."""
        waits = model == "policy" and 0 < self.global_step <= self.critic_config.policy_training_start_step
        return {} if waits else super()._execute_training_step(model, data)

    def train_critic_and_policy(self, data: Any) -> Any:
        """SkyRL's update; a run folder has its loss, gradient norm and entropy."""
        status = super().train_critic_and_policy(data)
        if self._record is not None:
            self._record.add_update(self.all_metrics, UPDATE)
        return status

    @torch.no_grad()
    def compute_advantages_and_returns(self, data: Any) -> Any:
        """The advantages of the recipe in the place of those of an estimator."""
        data = super().compute_advantages_and_returns(data)
        rows = self.last_rows
        assert rows is not None, "SkyRL postprocesses what it trains on"
        by_turn = self.scheme.entry.kind != "token" and (rows.stepwise or "steps" in self.scheme.needs)
        mask_nt, real = data["loss_mask"] > 0, len(rows.length_n)
        if by_turn:
            anchored = "anchor_s" in self.scheme.entry.inputs
            batch, turns = rows.turns(self._columns, width=mask_nt.shape[1], anchored=anchored)
        else:
            batch, turns = rows.whole(self._columns, data), None
        reading = read(batch, self.scheme, self.vocabulary)
        if self.scheme.value_names:  # a row that the generator left out of the loss has a reward, and no token to run over
            batch = replace(batch, mask_nt=mask_nt[:real])
        for part in self.parts.values():
            batch = replace(batch, **part.fields(data, self.global_step - 1))
        own = ReadBatch(batch, reading, real, turns)
        result = self.step.finish(own, number=self.global_step, dtype=self.advantage_dtype)
        adv_nt = own.put(result.advantages_nt)
        adv_nt = pad(adv_nt, (0, 0, 0, len(mask_nt) - real)) * mask_nt  # what SkyRL left out of the loss, and its padding
        factor_n1, shown = self._factor(data, rows), dict(result.metrics)
        data["advantages"], data["returns"] = adv_nt * factor_n1, adv_nt
        if batch.value_nt is not None and self.scheme.value_names:
            # SkyRL multiplies errors by the loss mask, which a NaN survives, so masked tokens hold 0.
            return_nt, error = returns(reading, batch, self.scheme, lam=self.critic_config.gae_lambda_value)
            shown |= error
            for name, value_nt in (("values", batch.value_nt), ("returns", return_nt)):
                data[name] = torch.where(mask_nt, pad(value_nt, (0, 0, 0, len(mask_nt) - real)), 0.0)
        for part in self.parts.values():
            shown |= part.teach(data, reading, self.scheme, factor_n1[:real, 0], self.global_step - 1)
        self.last_advantages = adv_nt[:real]
        if self._record is not None:
            keep(self, self._record, replace(result, metrics=shown))
        self.all_metrics.update({name: value for name, value in shown.items() if value == value})
        trained = adv_nt[mask_nt]
        for name, values in (("", trained), ("_abs", trained.abs())):
            self.all_metrics[f"loss/avg_raw_advantages{name}"] = float(values.mean())
        for sentence in result.warnings:
            say(sentence)
        return data

    def _columns(self, uids: Sequence[str]) -> dict[str, list[Any]]:
        """What the dataset says of the prompts; a mapping in a column is columns of its own, `reward_spec.ground_truth`.

        A prompt's id is the number of its row (`PromptDataset`); of a dataset with ids of its own nothing is known here.
        """
        dataset: Any = self.train_dataset
        known = {uid: _flat(dataset[int(uid)][2]) if uid.isdecimal() else {} for uid in dict.fromkeys(uids)}
        names = dict.fromkeys(name for row in known.values() for name in row)
        return {name: [known[uid].get(name) for uid in uids] for name in names}

    def _factor(self, data: Any, rows: SampledRows) -> Tensor:
        """Of each row; rows of padding have no token in the loss."""
        spare = len(data["loss_mask"]) - len(rows.length_n)
        rollout_s = {n: rows.trajectory_s[s] for s, (n, _) in enumerate(rows.place_s)}
        rollouts = [*(rollout_s[n] for n in range(len(rows.length_n))), *([-1] * spare)]
        algorithm = self.cfg.trainer.algorithm
        return fold_factor(
            data["loss_mask"],
            torch.tensor(rollouts),
            loss_reduction=algorithm.loss_reduction,
            mini_batches=data.metadata["policy_mini_batch_boundaries"],
            prompts=data.metadata["policy_prompt_boundaries"],
            max_seq_len=algorithm.max_seq_len,
        )


def _flat(row: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A mapping without mappings in it."""
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {before + name: value}
    return found
