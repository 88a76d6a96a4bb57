"""`SpanEstimator`: an advantage estimator of NeMo-RL that computes the credit of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from spanwise.batch import Batch
from spanwise.engines.nemo_rl.settings import check, get_setting
from spanwise.engines.recipe_run import RecipeRun
from spanwise.engines.shared import columns_of
from spanwise.errors import RecipeError

#: Fields of NeMo-RL's batch that reward functions cannot read: messages, and the numbers of NeMo-RL's own baseline.
_OTHER = frozenset(
    ("message_log", "extra_env_info", "total_reward", "filtered_reward", "unshaped_total_reward", "baseline", "std")
)


class SpanEstimator:
    """NeMo-RL's advantage estimator for the credit of a recipe; `last_metrics` holds the metrics of the last batch."""

    def __init__(self, master_config: Any) -> None:
        model, tokenizer = (get_setting(master_config, f"policy.{name}") for name in ("model_name", "tokenizer.name"))
        self.run = RecipeRun.of(check(master_config), model=model, tokenizer=tokenizer)
        self.last_metrics: dict[str, float] = {}
        self.mini_batch: int = get_setting(master_config, "policy.train_global_batch_size")
        self.token_level: bool = get_setting(master_config, "loss_fn.token_level_loss")

    def compute_advantage(
        self,
        prompt_ids: Int[Tensor, "n p"],
        rewards: Float[Tensor, " n"],
        mask: Shaped[Tensor, "n t"],
        repeated_batch: Any = None,
        **_rest: Any,
    ) -> Float[Tensor, "n t"]:
        """Return each token's advantage, scaled so that NeMo-RL's loss becomes the mean over rollouts of sums over tokens."""
        if "message_log" not in (repeated_batch or {}):
            raise RecipeError(
                "This trainer gives estimators no messages. Train with grpo_train, as examples/run_grpo.py does."
            )
        reply_start_n = [int(length) for length in repeated_batch["length"]]
        batch = self._batch(repeated_batch, reply_start_n, prompt_ids, rewards)
        assert batch.mask_nt is not None
        reply_width, full_mask_nt = batch.mask_nt.shape[1], pad(mask.float().cpu(), (0, batch.mask_nt.shape[1]))
        column_nt = torch.tensor(reply_start_n)[:, None] + torch.arange(reply_width)  # each reply token's column in `mask`
        scored_rows = self.run.step.read(batch)
        step_result = self.run.finish(scored_rows, mask_nt=(full_mask_nt.gather(1, column_nt) > 0) & batch.mask_nt)
        self.last_metrics = {name: value for name, value in step_result.metrics.items() if value == value}
        adv_nt = torch.zeros_like(full_mask_nt).scatter(
            1, column_nt, scored_rows.put(step_result.advantages_nt, width=reply_width)
        )
        # A rollout without a reply has no token in the mask, so NeMo-RL's divisor counts its loss multiplier instead.
        loss_multiplier_n = torch.as_tensor(repeated_batch["loss_multiplier"]).float().cpu()
        sample_weight_n = torch.where(batch.mask_nt.any(dim=1), full_mask_nt.amax(dim=1), loss_multiplier_n)
        loss_settings = {"mini_batch": self.mini_batch, "token_level": self.token_level}
        return (adv_nt[:, : mask.shape[1]] * fold_factor(mask.cpu(), sample_weight_n, **loss_settings)).to(mask.device)

    def _batch(self, batch: Any, reply_start_n: Sequence[int], prompt_ids: Tensor, rewards: Tensor) -> Batch:
        """Build a `Batch` from the messages after each prompt: the replies and the environment's messages between them."""
        reply_ids, sampled_masks, reply_logps = (
            [torch.cat([message[name] for message in log])[first:].tolist()
             for log, first in zip(batch["message_log"], reply_start_n, strict=True)]
            for name in ("token_ids", "token_loss_mask", "generation_logprobs")
        )  # fmt: skip
        prompt_numbers = batch.get("idx")  # tells prompts apart that have the same words but different images
        prompt_number_n = [0] * len(reply_ids) if prompt_numbers is None else [int(row) for row in prompt_numbers]
        return Batch.jagged(
            reply_ids,
            list(zip(map(tuple, prompt_ids.tolist()), prompt_number_n, strict=True)),
            sampled=sampled_masks,
            columns=self._columns(batch, prompt_ids, reply_ids, rewards),
            logp_nt=pad_sequence([torch.tensor(logp) for logp in reply_logps], True),
        )

    def _columns(self, batch: Any, prompt_ids: Tensor, ids: list[list[int]], rewards: Tensor) -> dict[str, list[Any]]:
        """Return the columns that reward functions read: the batch's lists, the environment's info and reward, and texts."""
        environment_infos = batch.get("extra_env_info") or [None] * len(ids)
        list_by_name: dict[str, list[Any]] = {}
        for name, values in batch.items():
            values = values.tolist() if isinstance(values, Tensor) and values.dim() == 1 else values
            if isinstance(values, list) and len(values) == len(ids) and name not in _OTHER:
                list_by_name[name] = values
        row_dicts = [{name: values[n] for name, values in list_by_name.items()} for n in range(len(ids))]
        decode_ids = partial(self.run.tokenizer.decode, skip_special_tokens=True)
        return {
            **columns_of([{**row, **(fact or {})} for row, fact in zip(row_dicts, environment_infos, strict=True)]),
            "prompts": [decode_ids(row_ids) for row_ids in prompt_ids.tolist()],
            "completions": [decode_ids(row_ids) for row_ids in ids],
            "completion_ids": ids,
            "environment": rewards.tolist(),
        }


def fold_factor(
    mask_nt: Shaped[Tensor, "n t"], weight_n: Shaped[Tensor, " n"], *, mini_batch: int, token_level: bool
) -> Float[Tensor, "n 1"]:
    """Compute what advantages are multiplied by, so that NeMo-RL's loss is a mean over a mini-batch's rows of sums over tokens.

    factor[i] = D[i] / R,  R the rows of i's mini-batch; D[i] the tokens in its loss, or at sequence level those of row i times
    the rows in the loss. `weight_n` is NeMo-RL's `sample_mask`.
    """
    mask_nt = mask_nt[:, 1:].float()  # nothing predicts the first token, so the loss has no term for it
    mini_batch_factors = []
    for mini_nt, mini_weight_n in zip(mask_nt.split(mini_batch), weight_n.split(mini_batch), strict=True):
        divisor_n = (mini_nt > 0).sum(dim=1) * mini_weight_n.sum()
        if token_level:
            divisor_n = mini_nt.sum().expand(len(mini_nt))
        mini_batch_factors.append(divisor_n / len(mini_nt))
    return torch.cat(mini_batch_factors)[:, None]
