"""Let NeMo-RL train with a spanwise recipe, through an advantage estimator. Written for NVIDIA-NeMo/RL 7ea279ab, not run.

python -m spanwise.engines.nemo_rl examples/run_grpo.py --config ...    # instead of: python examples/run_grpo.py --config ...
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from spanwise.batch import Batch
from spanwise.engines.recipe_run import RecipeRun
from spanwise.engines.rule import check_rule, read_rule
from spanwise.engines.shared import columns_of
from spanwise.errors import RecipeError
from spanwise.recipe import RecipeRule

#: The fields of NeMo-RL's batch that reward functions do not get.
_OTHER = ("message_log", "extra_env_info", "total_reward", "filtered_reward", "unshaped_total_reward", "baseline", "std")
#: Maps NeMo-RL options to pairs: the option's required value, and a sentence that gives the reason.
_FIXED: dict[str, tuple[Any, str]] = {
    "grpo.advantage_clip_low": (None, "NeMo-RL would clip advantages after spanwise has scaled them for the loss."),
    "grpo.advantage_clip_high": (None, "NeMo-RL would clip advantages after spanwise has scaled them for the loss."),
    "grpo.invalid_tool_call_advantage": (None, "NeMo-RL would overwrite spanwise's advantages of all tokens in a message."),
    "grpo.malformed_thinking_advantage": (None, "NeMo-RL would overwrite spanwise's advantages of all tokens in a message."),
    "loss_fn.use_kl_in_reward": (
        False,
        "NeMo-RL would add the KL to a reward that spanwise does not use. For the KL, set reference_policy_kl_penalty.",
    ),
    "data_plane.enabled": (False, "NeMo-RL would pass no token ids to spanwise, so spanwise could not find blocks."),
}


def attach() -> None:
    """Let NeMo-RL use `SpanEstimator` for `grpo.adv_estimator.name=spanwise`. Other names work as before."""
    from nemo_rl.algorithms import grpo  # pyright: ignore[reportMissingImports]

    original_factory = grpo._create_advantage_estimator

    def create(master_config: Any) -> Any:
        is_spanwise = get_setting(master_config, "grpo.adv_estimator.name") == "spanwise"
        return SpanEstimator(master_config) if is_spanwise else original_factory(master_config)

    grpo._create_advantage_estimator = create


def get_setting(config: Any, path: str) -> Any:
    """Look up a setting by its dotted name. Return None if it does not exist."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)
    return config


def check(master_config: Any) -> RecipeRule:
    """Load the recipe that NeMo-RL's configuration names. Refuse settings that do not work with it."""
    get_option = partial(get_setting, master_config)
    recipe_path = get_option("grpo.adv_estimator.recipe")
    rule, rule_notes = read_rule(
        recipe_path,
        engine="NeMo-RL",
        longest=get_option("policy.generation.max_new_tokens"),
        get_setting=get_option,
        faults={"There is no recipe; add +grpo.adv_estimator.recipe=recipe.yaml.": recipe_path is None},
        fixed=_FIXED,
        deviation="grpo.adv_estimator.normalize_rewards",
    )
    if get_option("grpo.use_dynamic_sampling"):
        rule_notes.append(
            "grpo.use_dynamic_sampling drops groups whose environment rewards are equal, even if rewards of their blocks "
            "differ. To keep such groups, set it to false."
        )
    return check_rule(recipe_path, rule, engine="NeMo-RL", notes=rule_notes)


class SpanEstimator:
    """NeMo-RL's advantage estimator for the credit of a recipe. `last_metrics` has the metrics of the last batch."""

    def __init__(self, master_config: Any) -> None:
        get_option = partial(get_setting, master_config)
        self.run = RecipeRun.of(
            check(master_config), model=get_option("policy.model_name"), tokenizer=get_option("policy.tokenizer.name")
        )
        self.last_metrics: dict[str, float] = {}
        self.mini_batch: int = get_option("policy.train_global_batch_size")
        self.token_level: bool = get_option("loss_fn.token_level_loss")

    def compute_advantage(
        self,
        prompt_ids: Int[Tensor, "n p"],
        rewards: Float[Tensor, " n"],
        mask: Shaped[Tensor, "n t"],
        repeated_batch: Any = None,
        **_rest: Any,
    ) -> Float[Tensor, "n t"]:
        """Compute the advantages of a batch, scaled to undo the normaliser of NeMo-RL's loss."""
        if "message_log" not in (repeated_batch or {}):
            raise RecipeError("spanwise got no message_log from NeMo-RL. Train with grpo_train, as in examples/run_grpo.py.")
        batch = self._batch(repeated_batch, prompt_ids, rewards)
        assert batch.mask_nt is not None
        reply_width = batch.mask_nt.shape[1]
        padded_mask_nt = pad(mask.float().cpu(), (0, reply_width))
        reply_column_nt = torch.as_tensor(repeated_batch["length"]).cpu()[:, None] + torch.arange(reply_width)
        reply_mask_nt = padded_mask_nt.gather(1, reply_column_nt)
        reply_adv_nt, metrics = self.run.finish(self.run.step.read(batch), mask_nt=(reply_mask_nt > 0) & batch.mask_nt)
        self.last_metrics = {name: value for name, value in metrics.items() if value == value}
        padded_adv_nt = torch.zeros_like(padded_mask_nt).scatter(1, reply_column_nt, reply_adv_nt)
        # Without reply tokens, the mask does not tell the rollout's weight, so take NeMo-RL's `loss_multiplier`.
        loss_multiplier_n = torch.as_tensor(repeated_batch["loss_multiplier"]).float().cpu()
        rollout_weight_n = torch.where(batch.mask_nt.any(dim=1), padded_mask_nt.amax(dim=1), loss_multiplier_n)
        fold_factor_n1 = fold_factor(mask.cpu(), rollout_weight_n, mini_batch=self.mini_batch, token_level=self.token_level)
        return (padded_adv_nt[:, : mask.shape[1]] * fold_factor_n1).to(mask.device)

    def _batch(self, batch: Any, prompt_ids: Tensor, rewards: Tensor) -> Batch:
        """Build a `Batch` from the messages after each prompt."""
        logs_and_lengths = list(zip(batch["message_log"], batch["length"], strict=True))

        def after_prompt(name: str) -> list[list[Any]]:
            return [torch.cat([message[name] for message in log])[int(start) :].tolist() for log, start in logs_and_lengths]

        reply_ids = after_prompt("token_ids")
        row_dicts: list[dict[str, Any]] = [{} for _ in reply_ids]
        for name, row_values in batch.items():
            if isinstance(row_values, Tensor) and row_values.dim() == 1:
                row_values = row_values.tolist()
            if isinstance(row_values, list) and len(row_values) == len(reply_ids) and name not in _OTHER:
                for row_dict, value in zip(row_dicts, row_values, strict=True):
                    row_dict[name] = value
        for row_dict, environment_info in zip(row_dicts, batch.get("extra_env_info") or [{}] * len(row_dicts), strict=True):
            row_dict.update(environment_info or {})
        decode_ids = partial(self.run.tokenizer.decode, skip_special_tokens=True)
        reward_columns = {
            **columns_of(row_dicts),
            "prompts": [decode_ids(ids) for ids in prompt_ids.tolist()],
            "completions": [decode_ids(ids) for ids in reply_ids],
            "completion_ids": reply_ids,
            "environment": rewards.tolist(),
        }
        prompt_numbers = batch.get("idx")  # prompts may have the same words but different images
        if prompt_numbers is None:
            prompt_numbers = [0] * len(reply_ids)
        return Batch.jagged(
            reply_ids,
            list(zip(map(tuple, prompt_ids.tolist()), map(int, prompt_numbers), strict=True)),
            sampled=after_prompt("token_loss_mask"),
            columns=reward_columns,
            logp_nt=pad_sequence([torch.tensor(logp) for logp in after_prompt("generation_logprobs")], True),
        )


def fold_factor(
    mask_nt: Shaped[Tensor, "n t"], weight_n: Shaped[Tensor, " n"], *, mini_batch: int, token_level: bool
) -> Float[Tensor, "n 1"]:
    """Return the factors on advantages that undo the normaliser of NeMo-RL's loss.

    factor[i] = D[i] / R,  R the rows of i's mini-batch; D[i] the tokens in its loss, or at sequence level those of row i times
    the rows in the loss. `weight_n` is NeMo-RL's `sample_mask`.
    """
    mask_nt = mask_nt[:, 1:].float()  # nothing predicts the first token, so the loss has no term for it
    mini_batch_factors = []
    for mini_mask_nt, mini_weight_n in zip(mask_nt.split(mini_batch), weight_n.split(mini_batch), strict=True):
        loss_divisor_n = (mini_mask_nt > 0).sum(dim=1) * mini_weight_n.sum()
        if token_level:
            loss_divisor_n = mini_mask_nt.sum().expand(len(mini_mask_nt))
        mini_batch_factors.append(loss_divisor_n / len(mini_mask_nt))
    return torch.cat(mini_batch_factors)[:, None]


if __name__ == "__main__":
    sys.argv = sys.argv[1:] or sys.exit("Add NeMo-RL's script: python -m spanwise.engines.nemo_rl examples/run_grpo.py ...")
    attach()
    sys.path[:1] = [sys.argv[0].rpartition("/")[0] or "."]  # NeMo-RL's script imports modules from its own folder
    runpy.run_path(sys.argv[0], run_name="__main__")
