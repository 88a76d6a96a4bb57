"""`Critic`: a value model that is fitted to each generation batch. `CriticInTrl` runs it inside TRL's trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import get_constant_schedule_with_warmup

from spanwise.credit import bootstrap_values, value_target
from spanwise.credit.spread import Streams
from spanwise.errors import DataError, DivergedError, RecipeError
from spanwise.losses import critic_error
from spanwise.modes.critic.config import CRITIC, CriticConfig
from spanwise.modes.critic.value_model import ABOUT, ValueModel
from spanwise.modes.parts import TrlPart
from spanwise.modes.sequences import Sequences, cut_off, sequences
from spanwise.pipeline import streams

#: The file in a checkpoint with the state of the critic's optimizer.
STATE = "optimizer.pt"


class Learned(NamedTuple):
    """A critic's values from before it was fitted to the batch, and the metrics of the fit."""

    value_nts: Float[Tensor, "n t s"]
    bootstrap_ns: Float[Tensor, "n s"]
    metrics: Mapping[str, float]


class Critic:
    """A value model with its own optimizer, trained beside the policy."""

    def __init__(
        self,
        model: ValueModel,
        config: CriticConfig,
        accelerator: Accelerator,
        *,
        micro_batch: int,
        gamma: float = 1.0,
        seed: int = 0,
    ) -> None:
        if config.offload and accelerator.device.type == "cpu":
            raise RecipeError("critic.offload is true, but on a CPU the critic is in main memory. Remove critic.offload.")
        self.model, self.config, self.accelerator, self.gamma, self.seed = model, config, accelerator, gamma, seed
        self.micro_batch = config.micro_batch or micro_batch
        self.updates = self.batches = 0  # the numbers of the critic's optimizer steps and generation batches
        self.model.to("cpu" if config.offload else accelerator.device)
        if config.gradient_checkpointing:
            inner_model = self.model.model  # transformers 5 renamed `gradient_checkpointing_enable`
            getattr(inner_model, "activation_checkpointing_enable", inner_model.gradient_checkpointing_enable)()
        trained_parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained_parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        self.schedule = get_constant_schedule_with_warmup(self.optimizer, config.warmup_steps)

    def learn(self, rows: Sequences, streams: Streams, truncated_n: Bool[Tensor, " n"], *, fit: bool) -> Learned:
        """Compute the critic's values of a batch, and with `fit` also train the critic on it."""
        start_time = time.perf_counter()
        row_count = len(truncated_n)
        self._move(self.accelerator.device)
        try:
            device = self.accelerator.device
            batch = _Batch(rows, streams, truncated_n, self.config, self.gamma).changed(lambda tensor: tensor.to(device))
            value_nts = torch.zeros(row_count, rows.width + 1, len(self.model.names), device=device)
            # `_fit` stores each row's values before the critic learns from the row.
            fit_metrics = self._fit(batch, value_nts) if fit else {}
            if not fit:
                self.model.eval()
                with torch.no_grad():
                    for row_r in torch.arange(row_count).split(self.micro_batch):
                        value_nts[row_r] = self.model.value(self._read(batch.take(row_r)))
                self._check_finite(batch, value_nts, torch.arange(row_count))
        finally:
            self._move("cpu")
        batch = batch.changed(lambda tensor: tensor.cpu())
        value_nts = value_nts.cpu()
        all_metrics = {**self._compare(batch, value_nts), **fit_metrics, "seconds": time.perf_counter() - start_time}
        prefixed_metrics = {f"critic/{name}": number for name, number in all_metrics.items()}
        return Learned(value_nts[:, :-1], batch.bootstrap(value_nts), prefixed_metrics)

    def _fit(self, batch: _Batch, value_nts: Tensor) -> dict[str, float]:
        """Fit the critic to a batch. Store its values from before the fit in `value_nts`; return loss and gradient norm."""
        self.model.train()
        step_metrics: list[dict[str, float]] = []
        row_count = len(value_nts)
        if self.config.mini_batches > row_count:
            raise RecipeError(
                f"critic.mini_batches is {self.config.mini_batches}, but each process has {row_count} completions of a generation "
                f"batch. Set critic.mini_batches to {row_count} or less."
            )
        for epoch in range(self.config.epochs):
            mini_batches: Sequence[Tensor] = [torch.arange(row_count)]
            if self.config.mini_batches > 1:
                random_generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.batches) * 1_000 + epoch)
                mini_batches = torch.randperm(row_count, generator=random_generator).tensor_split(self.config.mini_batches)
            step_metrics += [self._update(batch, mini_batch, value_nts, first=epoch == 0) for mini_batch in mini_batches]
        self.batches += 1
        return {name: sum(metrics[name] for metrics in step_metrics) / len(step_metrics) for name in step_metrics[0]}

    def _read(self, batch: _Batch) -> Tensor:
        """Run the value model on some rows, and return the raw output of its head."""
        with self.accelerator.autocast():
            return self.model(batch.rows)

    def _update(self, batch: _Batch, row_r: Tensor, value_nts: Tensor, *, first: bool) -> dict[str, float]:
        """Take one optimizer step of the critic on some rows of each process. Return gradient norm and loss."""
        token_count = self._sum(batch.take(row_r).mask_nts.sum().float()).clamp(min=1)
        total_loss = torch.zeros((), device=token_count.device)
        for micro_row_r in row_r.split(self.micro_batch):
            micro_batch = batch.take(micro_row_r)
            head_output = self._read(micro_batch)
            if first:
                value_nts[micro_row_r] = self.model.value(head_output).detach()
            old_value_nts = value_nts[micro_row_r]
            mask_nts = micro_batch.mask_nts
            target_nts = micro_batch.targets(old_value_nts)
            losses_by_value = (
                self.model.loss(head_output[:, :-1, s], target_nts[..., s], mask_nts[..., s], old_value_nts[:, :-1, s]).sum()
                / token_count
                for s in range(len(self.model.names))
            )
            critic_loss = sum(losses_by_value, start=torch.zeros((), device=token_count.device))
            critic_loss.backward()
            total_loss += critic_loss.detach()
        self._check_finite(batch, value_nts, row_r)
        parameters_with_gradient = [p for p in self.model.parameters() if p.grad is not None]
        for parameter in parameters_with_gradient:
            parameter.grad = self._sum(parameter.grad)
        gradient_norm = float(nn.utils.clip_grad_norm_(parameters_with_gradient, self.config.max_grad_norm))
        if not gradient_norm < float("inf"):  # all processes have the same gradient norm
            raise self._diverged(f"The norm of the critic's gradient is {gradient_norm}.")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.updates += 1
        return {"grad_norm": gradient_norm, "loss": float(self._sum(total_loss))}

    def _check_finite(self, batch: _Batch, value_nts: Tensor, row_r: Tensor) -> None:
        """Raise an error in all processes if one of them has a value that is not finite."""
        nonfinite_count_r = batch.take(row_r).lost_n(value_nts[row_r])
        nonfinite_count = int(self._sum(nonfinite_count_r.sum()))
        if nonfinite_count:
            faulty_rows = row_r[nonfinite_count_r.cpu() > 0].tolist()
            place_sentence = "The values that are not finite belong to completions of another process."
            if faulty_rows:
                place_sentence = f"The first value that is not finite is in completion {faulty_rows[0]}."
            raise self._diverged(f"{nonfinite_count:g} of the critic's values are not finite. {place_sentence}")

    def _diverged(self, problem: str) -> DivergedError:
        self.optimizer.zero_grad()
        return DivergedError(
            f"The critic has diverged after {self.updates} updates. {problem} This step updated no weight. Lower "
            f"critic.learning_rate ({self.config.learning_rate:g}), or resume from an earlier checkpoint."
        )

    def _sum(self, value: Any) -> Any:
        """Return the sum of a tensor over all processes."""
        return self.accelerator.reduce(value, reduction="sum")

    def _compare(self, batch: _Batch, value_nts: Tensor) -> dict[str, float]:
        """Measure how far the critic's values are from their targets, over the rows of all processes."""
        target_nts, mask_nts = batch.targets(value_nts), batch.mask_nts.to(value_nts)
        local_table_ntsc = torch.stack([value_nts[:, :-1], target_nts, mask_nts], dim=-1).to(self.accelerator.device)
        global_table_ntsc: Any = self.accelerator.gather(self.accelerator.pad_across_processes(local_table_ntsc, dim=1))
        all_metrics = {}
        for name, stream_ntc in zip(self.model.names, global_table_ntsc.cpu().unbind(2), strict=True):
            value_nt, target_nt, mask_nt = stream_ntc.unbind(-1)
            metric_prefix = f"{name}/" if len(self.model.names) > 1 else ""
            error_metrics = critic_error(value_nt, target_nt, mask_nt.bool())
            all_metrics |= {f"{metric_prefix}{metric_name}": number for metric_name, number in error_metrics.items()}
        return all_metrics

    def _move(self, device: torch.device | str) -> None:
        """Move the critic and its optimizer to a device, if `offload` is set."""
        if self.config.offload:
            self.model.to(device)
            for state in self.optimizer.state.values():
                state.update({name: x.to(device) for name, x in state.items() if isinstance(x, Tensor) and x.dim()})

    def save(self, folder: str | Path, tokenizer: Any = None, *, state: bool = True) -> None:
        """Write the critic's model and the state of its optimizer. `state=False` leaves out the state."""
        self.model.save(folder, tokenizer)
        if state:
            optimizer_state = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
            torch.save({**optimizer_state, "updates": self.updates, "batches": self.batches}, Path(folder) / STATE)

    def restore(self, folder: str | Path) -> None:
        """Load the critic's model and optimizer from the files that `Critic.save` wrote."""
        critic_folder = Path(folder)
        if not (critic_folder / STATE).is_file() or not (critic_folder / ABOUT).is_file():
            raise DataError(
                f"The checkpoint '{critic_folder.parent}' lacks the critic or its optimizer ({critic_folder.name}/{STATE}), so "
                "the run cannot resume from it. Resume from another checkpoint, or start a new run."
            )
        self.model.load_state_dict(ValueModel.load(str(critic_folder), self.model.names, self.config).state_dict())
        device = next(self.model.parameters()).device
        saved_state = torch.load(critic_folder / STATE, map_location=device, weights_only=True)
        self.optimizer.load_state_dict(saved_state["optimizer"])
        self.schedule.load_state_dict(saved_state["schedule"])
        self.updates, self.batches = saved_state["updates"], saved_state["batches"]


@dataclass(frozen=True)
class _Batch:
    """The rows to which a critic is fitted. Each row has a value before every token and one after the last."""

    rows: Sequences
    streams: Streams
    truncated_n: Tensor
    config: CriticConfig
    gamma: float

    @property
    def mask_nts(self) -> Tensor:
        """True for values that have a target. The axes are rows, tokens, and the values that the critic predicts per token."""
        mask_snt = self.streams.mask_snt
        if self.config.truncated == "mask":
            mask_snt = mask_snt & ~(self.streams.last_sn & self.truncated_n)[..., None]
        return mask_snt.permute(1, 2, 0)

    def bootstrap(self, value_nts: Tensor) -> Tensor:
        """Return the value after each row's last token. For cut-off rows it depends on the critic's option `truncated`."""
        bootstrap_end_values = partial(bootstrap_values, self.truncated_n, truncated=self.config.truncated)
        return torch.stack([bootstrap_end_values(value_end_n=value_n) for value_n in self.ends(value_nts).unbind(1)], 1)

    def ends(self, value_nts: Tensor) -> Tensor:
        """Return the critic's values after the last token of each row."""
        return value_nts.gather(1, self.rows.end_n[:, None, None].expand(-1, 1, value_nts.shape[2])).squeeze(1)

    def lost_n(self, value_nts: Tensor) -> Tensor:
        """Count each row's NaN or infinite values: at trained tokens, and at a truncated end whose value the critic uses."""
        uses_end_value_n = self.truncated_n & (self.config.truncated == "bootstrap")
        is_nonfinite_nts = self.streams.mask_snt.permute(1, 2, 0) & ~value_nts[:, :-1].isfinite()
        is_nonfinite_end_ns = uses_end_value_n[:, None] & ~self.ends(value_nts).isfinite()
        return is_nonfinite_nts.sum(dim=(1, 2)).float() + is_nonfinite_end_ns.sum(dim=1)

    def targets(self, value_nts: Tensor) -> Tensor:
        """Return the target of each value, or 0 for a value without a target. A value that is not finite counts as 1/2."""
        value_nts = torch.where(value_nts.isfinite(), value_nts, 0.5)
        target_nts = self._targets(value_nts, lam=self.config.gae_lambda_value)
        if self.config.head == "scalar" or self.config.gae_lambda_value == 1:
            return target_nts
        # If lambda is below 1, a wrong value can move a target out of `value_range`, although all returns lie inside.
        return_nts = self._targets(value_nts, lam=1.0)
        value_min, value_max = self.config.value_range
        return target_nts.clamp(min=return_nts.clamp(max=value_min), max=return_nts.clamp(min=value_max))

    def _targets(self, value_nts: Tensor, *, lam: float) -> Tensor:
        inputs_of_streams: Iterator[dict[str, Any]] = self.streams.inputs(value_nts[:, :-1], self.bootstrap(value_nts))
        return torch.stack([value_target(**inputs, lam=lam, gamma=self.gamma) for inputs in inputs_of_streams], dim=2)

    def take(self, row_r: Tensor) -> _Batch:
        """Return the batch with only the given rows."""
        return self.changed(lambda x: x[row_r.to(x.device)])

    def changed(self, change: Callable[[Tensor], Tensor]) -> _Batch:
        """Return the batch with a function applied to each tensor. The first dimension of the tensors is the rows."""
        stream_tables = {name: getattr(self.streams, name) for name in ("reward_snt", "mask_snt", "stop_sn", "last_sn")}
        new_tables = {name: change(table.transpose(0, 1)).transpose(0, 1) for name, table in stream_tables.items()}
        rows = Sequences(change(self.rows.ids_nl), change(self.rows.attention_nl), self.rows.width)
        return replace(self, rows=rows, streams=replace(self.streams, **new_tables), truncated_n=change(self.truncated_n))


class CriticInTrl(TrlPart):
    """The critic in TRL's trainer. It gives each generation batch its values, and is then fitted to the batch."""

    def __init__(self, mode: CriticConfig, trainer: Any) -> None:
        super().__init__(mode, trainer)
        scheme, tokenizer, args = trainer.scheme, trainer._text_tokenizer, trainer.args
        if mode.model is None:
            value_model = ValueModel.of_policy(trainer.model, scheme.value_names, mode)
        else:
            value_model = ValueModel.load(mode.model, scheme.value_names, mode, tokenizer)
        options = {"micro_batch": args.per_device_train_batch_size, "gamma": scheme.gamma, "seed": args.seed}
        self.critic = Critic(value_model, mode, trainer.accelerator, **options)
        self._ends = getattr(trainer, "eos_token_ids", None) or [tokenizer.eos_token_id]
        self._ended: float | None = None

    def fill(self, read_batch: Any, output: dict[str, Any]) -> tuple[Any, dict[str, float]]:
        """Add the critic's values to a batch, and fit the critic to it. Measure the critic's share of training time."""
        start_time = time.perf_counter()
        batch = read_batch.batch
        reward_streams = streams(read_batch.reading, batch, self.trainer.scheme)
        is_training = bool(self.trainer.model.training)
        is_cut_off_n = cut_off(batch, self._ends)
        critic_values = self.critic.learn(sequences(output, batch), reward_streams, is_cut_off_n, fit=is_training)
        metrics, value_nts, end_time = dict(critic_values.metrics), critic_values.value_nts, time.perf_counter()
        if is_training:
            if self._ended is not None:
                metrics["critic/share"] = (end_time - start_time) / (start_time - self._ended)
            self._ended = end_time
        if reward_streams.names != ("return",):  # an objective's values are used only in the blocks that it rewards
            value_nts = value_nts.masked_fill(~reward_streams.mask_snt.permute(1, 2, 0), torch.nan)
        return replace(read_batch, batch=replace(batch, value_nt=value_nts, bootstrap_n=critic_values.bootstrap_ns)), metrics

    @property
    def waits(self) -> bool:
        """True while only the critic trains and the policy stays unchanged."""
        return self.critic.batches <= self.mode.policy_training_start_step

    def save(self, folder: Path) -> None:
        """Write the critic and its optimizer into a checkpoint."""
        self.critic.save(folder / CRITIC, self.trainer._text_tokenizer)

    def restore(self, folder: Path) -> None:
        """Load the critic and its optimizer from a checkpoint."""
        self.critic.restore(folder / CRITIC)


def megabytes(model: nn.Module) -> float:
    """Estimate a model's memory in MB. Training adds gradients and AdamW's two moments."""
    return sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters()) / 1e6
