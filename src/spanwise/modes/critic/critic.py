"""`Critic`: a value model that is fitted on each generation batch, beside any trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import get_constant_schedule_with_warmup

from spanwise.credit import Streams, bootstrap_values, value_target
from spanwise.errors import DataError, DivergedError, RecipeError
from spanwise.losses import CriticError, critic_error
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.value_model import ABOUT, Sequences, ValueModel

#: What a checkpoint keeps of a critic's optimizer.
STATE = "optimizer.pt"


class Learned(NamedTuple):
    """What a critic said of a batch before it was fitted to it: values before each token and behind cut-off rows, and metrics."""

    value_nts: Float[Tensor, "n t s"]
    bootstrap_ns: Float[Tensor, "n s"]
    metrics: Mapping[str, float]


class Critic:
    r"""A value model with its own optimizer, fitted on each generation batch apart from the policy.

    Equation
        target[k] = V[k] + A_lam[k] with lam = `gae_lambda_value`, the return itself at 1
        loss = mean over streams and their trainable tokens, of all processes, of (V - target)^2, or the cross entropy

    The values of a completion are those of the pass that first fits the critic to it: they never saw its reward, and cost nothing
    more. Every process holds the whole critic; gradients are summed over processes, so that the weights stay equal.

    Attributes:
        updates: optimizer steps so far.
        batches: generation batches so far.
    """

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
            raise RecipeError("critic.offload is true, but the critic already is in main memory on a CPU; leave it out.")
        self.model, self.config, self.accelerator, self.seed = model, config, accelerator, seed
        self.gamma = gamma
        self.micro_batch = config.micro_batch or micro_batch
        self.updates = self.batches = 0
        self.model.to("cpu" if config.offload else accelerator.device)
        if config.gradient_checkpointing:
            own = self.model.model  # transformers 5 has a new name for it
            getattr(own, "activation_checkpointing_enable", own.gradient_checkpointing_enable)()
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
        self.schedule = get_constant_schedule_with_warmup(self.optimizer, config.warmup_steps)

    def learn(self, rows: Sequences, streams: Streams, truncated_n: Bool[Tensor, " n"], *, fit: bool) -> Learned:
        """Say the values of a batch, then fit the critic to it."""
        started, n = time.perf_counter(), len(truncated_n)
        with self._awake():
            batch = _Batch(rows, streams, truncated_n, torch.arange(n), self.config, self.gamma).to(self.accelerator.device)
            values, size = self._fit(batch) if fit else (self._values(batch), {})
            if not fit:
                self._check_finite(batch.lost_n(*values), batch.own_n)
        batch, value_nts, end_ns = batch.to("cpu"), *(x.cpu() for x in values)
        metrics = {**self._compare(batch, value_nts, end_ns), **size, "seconds": time.perf_counter() - started}
        return Learned(value_nts, batch.bootstrap(end_ns), {f"critic/{name}": number for name, number in metrics.items()})

    def _fit(self, batch: _Batch) -> tuple[tuple[Tensor, Tensor], dict[str, float]]:
        """All epochs; what was said of every row before it was first fitted, and the mean size of losses and gradients."""
        n, streams, device = len(batch), len(self.model.names), self.accelerator.device
        value_nts, end_ns = torch.zeros(n, batch.rows.width, streams, device=device), torch.zeros(n, streams, device=device)
        sizes = []
        for epoch in range(self.config.epochs):
            for part in self._parts(n, epoch):
                values, size = self._update(batch.take(part), (value_nts[part], end_ns[part]) if epoch else None)
                sizes.append(size)
                if epoch == 0:
                    value_nts[part], end_ns[part] = values
        self.batches += 1
        return (value_nts, end_ns), {name: sum(size[name] for size in sizes) / len(sizes) for name in sizes[0]}

    @torch.no_grad()
    def _values(self, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Values before each token, and after the last one of each row."""
        self.model.eval()
        parts = [self._read(batch.take(part))[1:] for part in torch.arange(len(batch)).split(self.micro_batch)]
        return torch.cat([value for value, _ in parts]), torch.cat([end for _, end in parts])

    def _read(self, batch: _Batch) -> tuple[Tensor, Tensor, Tensor]:
        """What the head says, the values before each token, and those after each row's last one."""
        with self.accelerator.autocast():
            logits = self.model(batch.rows)
        value_nts = self.model.value(logits).detach()
        end_n11 = batch.rows.end_n[:, None, None].expand(-1, 1, value_nts.shape[2])
        return logits, value_nts[:, :-1], value_nts.gather(1, end_n11).squeeze(1)

    def _parts(self, n: int, epoch: int) -> Sequence[Tensor]:
        """The rows of each mini-batch of an epoch; one mini-batch is the batch in its order."""
        if self.config.mini_batches == 1:
            return [torch.arange(n)]
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self.batches) * 1_000 + epoch)
        return torch.randperm(n, generator=generator).tensor_split(min(self.config.mini_batches, n))

    def _update(self, batch: _Batch, old: tuple[Tensor, Tensor] | None) -> tuple[tuple[Tensor, Tensor], dict[str, float]]:
        """One optimizer step; what the model said on the way, and the size of loss and gradient."""
        self.model.train()
        count = self._sum(batch.mask_nts.sum().float()).clamp(min=1)
        values, lost, total = [], [], torch.zeros((), device=count.device)
        for part in torch.arange(len(batch)).split(self.micro_batch):
            here = batch.take(part)
            logits, *said = self._read(here)
            values.append(said)
            before_nts, after_ns = said if old is None else (old[0][part], old[1][part])
            lost.append(here.lost_n(before_nts, after_ns))
            target_nts, mask_nts = here.targets(before_nts, after_ns), here.mask_nts
            losses = (
                self.model.loss(logits[:, :-1, s], target_nts[..., s], mask_nts[..., s], before_nts[..., s]).sum() / count
                for s in range(len(self.model.names))
            )
            loss = sum(losses, start=torch.zeros((), device=count.device))
            loss.backward()
            total += loss.detach()
        self._check_finite(torch.cat(lost), batch.own_n)
        value_nts, end_ns = (torch.cat(parts) for parts in zip(*values, strict=True))
        return (value_nts, end_ns), {"grad_norm": self._step(), "loss": float(self._sum(total))}

    def _step(self) -> float:
        """Sum the gradients over processes, look at them, then change the weights; the norm of the gradient."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            parameter.grad = self._sum(parameter.grad)
        norm = float(nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm))
        if not norm < float("inf"):  # NaN as well; every process sees the same sum
            raise self._diverged(f"the norm of its gradient is {norm}")
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.updates += 1
        return norm

    def _check_finite(self, lost_n: Tensor, own_n: Tensor) -> None:
        """Stop all processes before anything is made of values that are not finite in one of them."""
        count = int(self._sum(lost_n.sum()))
        if count:
            here = own_n[lost_n > 0].tolist()
            where = f"of completion {here[0]} first" if here else "of completions of another process"
            raise self._diverged(f"{count:g} of its values are not finite, {where}")

    def _diverged(self, what: str) -> DivergedError:
        self.optimizer.zero_grad()
        return DivergedError(
            f"The critic has diverged: after {self.updates} updates {what}. Nothing was updated from them. Set "
            f"critic.learning_rate ({self.config.learning_rate:g}) down, or go on from an earlier checkpoint."
        )

    def _sum(self, value: Tensor) -> Tensor:
        """The sum over processes."""
        if self.accelerator.num_processes == 1:
            return value
        total: Any = self.accelerator.reduce(value, reduction="sum")
        return total

    def _compare(self, batch: _Batch, value_nts: Tensor, end_ns: Tensor) -> dict[str, float]:
        """How good the values were, in all processes together."""
        target_nts, figures = batch.targets(value_nts, end_ns), {}
        for s, name in enumerate(self.model.names):
            error = critic_error(value_nts[..., s], target_nts[..., s], batch.mask_nts[..., s])
            if self.accelerator.num_processes > 1:
                gathered: Any = self.accelerator.gather(error.numbers().to(self.accelerator.device)[None])
                error = CriticError.joined(gathered)
            prefix = f"{name}/" if len(self.model.names) > 1 else ""
            figures |= {f"{prefix}{key}": number for key, number in error.figures().items()}
        return figures

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """The critic on the device while it is used."""
        if self.config.offload:
            self._move(self.accelerator.device)
        try:
            yield
        finally:
            if self.config.offload:
                self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        self.model.to(device)
        for state in self.optimizer.state.values():
            state.update({name: x.to(device) for name, x in state.items() if isinstance(x, Tensor) and x.dim()})

    def save(self, folder: str | Path, tokenizer: Any = None, *, state: bool = True) -> None:
        """Write the model and, to go on from, the optimizer."""
        self.model.save(folder, tokenizer)
        if state:
            held = {"optimizer": self.optimizer.state_dict(), "schedule": self.schedule.state_dict()}
            torch.save({**held, "updates": self.updates, "batches": self.batches}, Path(folder) / STATE)

    def restore(self, folder: str | Path) -> None:
        """Go on from what `save` wrote."""
        place = Path(folder)
        if not (place / STATE).is_file() or not (place / ABOUT).is_file():
            raise DataError(
                f"The checkpoint '{place.parent}' holds no critic with its optimizer ({place.name}/{STATE}), so the run cannot "
                "go on from it as it was. Resume from another checkpoint, or start anew."
            )
        saved = ValueModel.load(str(place), self.model.names, self.config)
        self.model.load_state_dict(saved.state_dict())
        held = torch.load(place / STATE, map_location=next(self.model.parameters()).device, weights_only=True)
        self.optimizer.load_state_dict(held["optimizer"])
        self.schedule.load_state_dict(held["schedule"])
        self.updates, self.batches = held["updates"], held["batches"]


@dataclass(frozen=True)
class _Batch:
    """What a critic is fitted to, row by row; `own_n` are the places of the rows in the batch of this process."""

    rows: Sequences
    streams: Streams
    truncated_n: Tensor
    own_n: Tensor
    config: CriticConfig
    gamma: float

    def __len__(self) -> int:
        return len(self.truncated_n)

    @property
    def mask_nts(self) -> Tensor:
        """The tokens that have a target."""
        mask_snt = self.streams.mask_snt
        if self.config.truncated == "mask":
            mask_snt = mask_snt & ~(self.streams.last_sn & self.truncated_n)[..., None]
        return mask_snt.permute(1, 2, 0)

    def bootstrap(self, end_ns: Tensor) -> Tensor:
        """The values after the last token, as the configuration takes truncation."""
        options: Any = {"truncated": self.config.truncated}
        ends = [bootstrap_values(self.truncated_n, value_end_n=end_n, **options) for end_n in end_ns.unbind(1)]
        return torch.stack(ends, 1)

    def lost_n(self, value_nts: Tensor, end_ns: Tensor) -> Tensor:
        """How many of the values that are read are not finite, of each row."""
        behind_n = self.truncated_n & (self.config.truncated == "bootstrap")
        here_nts = self.streams.mask_snt.permute(1, 2, 0) & ~value_nts.isfinite()
        return here_nts.sum(dim=(1, 2)).float() + (behind_n[:, None] & ~end_ns.isfinite()).sum(dim=1)

    def targets(self, value_nts: Tensor, end_ns: Tensor) -> Tensor:
        """What each value should have been; 0 where there is no target. Values that are `lost` count as 1/2: all stop together."""
        value_nts, end_ns = (torch.where(x.isfinite(), x, 0.5) for x in (value_nts, end_ns))
        rule: dict[str, Any] = {"lam": self.config.gae_lambda_value, "gamma": self.gamma}
        parts: Iterator[dict[str, Any]] = self.streams.inputs(value_nts, self.bootstrap(end_ns))
        return torch.stack([value_target(**part, **rule) for part in parts], dim=2)

    def take(self, rows: Tensor) -> _Batch:
        """Some of the rows."""
        return self._changed(lambda x: x[rows.to(x.device)])

    def to(self, device: torch.device | str) -> _Batch:
        """The same on a device."""
        return self._changed(lambda x: x.to(device))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> _Batch:
        """Each of its tables changed, with the rows as its first dimension."""
        names = ("reward_snt", "mask_snt", "stop_sn", "last_sn")
        streams = {name: change(getattr(self.streams, name).transpose(0, 1)).transpose(0, 1) for name in names}
        return replace(
            self,
            rows=Sequences(change(self.rows.ids_nl), change(self.rows.attention_nl), self.rows.width),
            streams=replace(self.streams, **streams),
            truncated_n=change(self.truncated_n),
            own_n=change(self.own_n),
        )


def megabytes(model: nn.Module) -> float:
    """Memory that a model and its training take: weights, and gradients and AdamW's two moments of those that are trained.

    >>> megabytes(nn.Linear(1000, 250, bias=False))
    4.0
    """
    return sum(p.numel() * p.element_size() * (4 if p.requires_grad else 1) for p in model.parameters()) / 1e6
