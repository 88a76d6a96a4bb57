"""`SpanEstimator`: the credit of a recipe in the form of NeMo-RL's advantage estimators."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from spanwise.batch import Batch
from spanwise.engines.nemo_rl.settings import check, get_setting
from spanwise.engines.shared import columns_of, model_size, say
from spanwise.errors import RecipeError
from spanwise.segment import Vocabulary
from spanwise.step import Step

#: What the batch holds of every row and no reward reads: messages, and numbers of NeMo-RL's own baseline.
_OTHER = frozenset(
    ("message_log", "extra_env_info", "total_reward", "filtered_reward", "unshaped_total_reward", "baseline", "std")
)


class SpanEstimator:
    """The credit of a recipe, in the form of NeMo-RL's estimators; `last_metrics` are those of the last batch."""

    def __init__(self, master_config: Any) -> None:
        scheme, name = check(master_config), get_setting(master_config, "policy.tokenizer.name")
        self.tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
        size = model_size(get_setting(master_config, "policy.model_name"))
        self.step = Step(scheme, Vocabulary.from_tokenizer(self.tokenizer, size=size))
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
        """Return advantages under which NeMo-RL's loss is the mean over rollouts of sums over tokens."""
        if "message_log" not in (repeated_batch or {}):
            raise RecipeError(
                "This trainer hands estimators no messages; train with grpo_train, as examples/run_grpo.py does."
            )
        first_n = [int(length) for length in repeated_batch["length"]]  # where the first reply begins
        batch = self._batch(repeated_batch, first_n, prompt_ids, rewards)
        assert batch.mask_nt is not None
        width, padded_nt = batch.mask_nt.shape[1], pad(mask.float().cpu(), (0, batch.mask_nt.shape[1]))
        place_nt = torch.tensor(first_n)[:, None] + torch.arange(width)  # of the replies' tokens in the whole sequence
        own = self.step.read(batch)
        result = self.step.finish(own, mask_nt=(padded_nt.gather(1, place_nt) > 0) & batch.mask_nt)
        self.last_metrics = {name: value for name, value in result.metrics.items() if value == value}
        say(*result.warnings)
        adv_nt = torch.zeros_like(padded_nt).scatter(1, place_nt, own.put(result.advantages_nt, width=width))
        # NeMo-RL counts a rollout without a reply, too; the mask has nothing of it.
        multiplier_n = torch.as_tensor(repeated_batch["loss_multiplier"]).float().cpu()
        weight_n = torch.where(batch.mask_nt.any(dim=1), padded_nt.amax(dim=1), multiplier_n)
        sizes = {"mini_batch": self.mini_batch, "token_level": self.token_level}
        return (adv_nt[:, : mask.shape[1]] * fold_factor(mask.cpu(), weight_n, **sizes)).to(mask.device)

    def _batch(self, batch: Any, first_n: Sequence[int], prompt_ids: Tensor, rewards: Tensor) -> Batch:
        """Return the replies, with what the environment said between them, as a batch of spanwise."""
        ids, sampled, logps = (
            [torch.cat([message[name] for message in log])[first:].tolist()
             for log, first in zip(batch["message_log"], first_n, strict=True)]
            for name in ("token_ids", "token_loss_mask", "generation_logprobs")
        )  # fmt: skip
        index = batch.get("idx")  # prompts of the same words may have different images
        rows = [0] * len(ids) if index is None else [int(row) for row in index]
        return Batch.jagged(
            ids,
            list(zip(map(tuple, prompt_ids.tolist()), rows, strict=True)),
            sampled=sampled,
            columns=self._columns(batch, prompt_ids, ids, rewards),
            logp_nt=pad_sequence([torch.tensor(logp) for logp in logps], True),
        )

    def _columns(self, batch: Any, prompt_ids: Tensor, ids: list[list[int]], rewards: Tensor) -> dict[str, list[Any]]:
        """Return what rewards may read: the environment's facts, other values of every rollout, texts and the reward."""
        facts = batch.get("extra_env_info") or [None] * len(ids)
        lists = {name: values.tolist() if is_vector(values) else values for name, values in batch.items()}
        lists = {name: values for name, values in lists.items() if isinstance(values, list) and len(values) == len(ids)}
        rows = [{name: values[n] for name, values in lists.items() if name not in _OTHER} for n in range(len(ids))]
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        return {
            **columns_of([{**row, **(fact or {})} for row, fact in zip(rows, facts, strict=True)]),
            "prompts": [decode(row_ids) for row_ids in prompt_ids.tolist()],
            "completions": [decode(row_ids) for row_ids in ids],
            "completion_ids": ids,
            "environment": rewards.tolist(),
        }


def is_vector(values: Any) -> bool:
    """Return whether the values are a tensor of one number per row."""
    return isinstance(values, Tensor) and values.dim() == 1


def fold_factor(
    mask_nt: Shaped[Tensor, "n t"], weight_n: Shaped[Tensor, " n"], *, mini_batch: int, token_level: bool
) -> Float[Tensor, "n 1"]:
    """Compute the factor on advantages that turns NeMo-RL's loss into a mean over the rows of a mini-batch of sums over tokens.

    factor[i] = D[i] / R,  R the rows of i's mini-batch; D[i] the tokens in its loss, or at sequence level those of row i times
    the rows in the loss. `weight_n` is NeMo-RL's `sample_mask`.
    """
    mask_nt = mask_nt[:, 1:].float()  # the loss predicts no first token
    factors = []
    for part_nt, part_n in zip(mask_nt.split(mini_batch), weight_n.split(mini_batch), strict=True):
        whole = part_nt.sum().expand(len(part_n)) if token_level else (part_nt > 0).sum(dim=1) * part_n.sum()
        factors.append(whole / len(part_n))
    return torch.cat(factors)[:, None]
