"""`SpanRayPPOTrainer`: SkyRL's PPO trainer with the credit of a recipe."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from skyrl.train.trainer import RayPPOTrainer  # pyright: ignore[reportMissingImports]
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig

from spanwise.engines.shared import RunRecord, columns_of, model_vocabulary_size, prompt_texts, say
from spanwise.engines.skyrl.config import OPTION, check, critic_of, reads_turns
from spanwise.engines.skyrl.estimators import register, register_loss
from spanwise.engines.skyrl.rows import SampledRows
from spanwise.mode import parts_of
from spanwise.modes.critic.config import returns
from spanwise.modes.parts import RowPart, token_logp, with_token
from spanwise.pipeline import read
from spanwise.rollouts import Rollouts
from spanwise.segment import Vocabulary
from spanwise.step import ReadBatch, Step, StepResult, check_turn_rewards, in_useful_groups

#: The key that holds the real rewards while fake ones tell SkyRL which groups to keep.
_REWARDS = "spanwise_rewards"
#: Maps metric names in spanwise's report to SkyRL's names.
UPDATE = {
    "loss": "policy/final_loss",
    "entropy": "policy/policy_entropy",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "policy/policy_lr",
    "completions/mean_length": "generate/avg_num_tokens",
}


class SpanRayPPOTrainer(RayPPOTrainer):
    """SkyRL's `RayPPOTrainer` with the advantages of a recipe instead of an estimator's."""

    advantage_dtype = torch.float32

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        recipe, self.scheme = check(cfg)
        self.critic_config = critic_of(recipe)
        register()
        super().__init__(cfg, *args, **kwargs)
        algorithm_config, policy_path = cfg.trainer.algorithm, cfg.trainer.policy.model.path
        vocabulary_size = model_vocabulary_size(policy_path)
        self.vocabulary = Vocabulary.from_tokenizer(self.tokenizer, size=vocabulary_size)
        try:
            generation_config = GenerationConfig.from_pretrained(policy_path)
        except OSError:
            generation_config = None
        self.parts: dict[str, RowPart] = parts_of(
            self.scheme.modes,
            "skyrl",
            self.tokenizer,
            size=vocabulary_size or len(self.tokenizer),
            generation=generation_config,
            temperature=algorithm_config.temperature,
        )
        for name, mode_part in self.parts.items():  # `policy_loss_type` tells SkyRL's workers which loss to use
            algorithm_config.policy_loss_type = register_loss(name, algorithm_config.policy_loss_type, mode_part.parted)
        self._appended: dict[str, Tensor] = {}
        self.last_advantages: Tensor | None = None
        self.last_rows: SampledRows | None = None
        self.step = Step(self.scheme)
        self._record = RunRecord.of(vars(cfg.trainer.algorithm.spanwise), option=OPTION)

    async def train(self) -> None:
        """Run SkyRL's training, and complete the run folder even if training fails."""
        for mode in (*self.scheme.modes, self.critic_config):
            mode.check_steps(self.total_training_steps)
        with nullcontext() if self._record is None else self._record.running():
            return await super().train()

    def postprocess_generator_output(self, generator_output: Any, uids: list[str], *more: Any, **rest: Any) -> Any:
        """Store the turns of rollouts before SkyRL merges them. Merged rows lack the turns' rewards and ends."""
        unmerged_output, turn_uids = dict(generator_output), list(uids)
        algorithm_config = self.cfg.trainer.algorithm
        # Switch off SkyRL's filter, which reads rewards, because `_leave_out_useless` leaves out groups without credit.
        filter_setting = algorithm_config.zero_variance_filter
        algorithm_config.zero_variance_filter = False
        try:
            merged_output, uids = super().postprocess_generator_output(generator_output, uids, *more, **rest)
        finally:
            algorithm_config.zero_variance_filter = filter_setting
        self.last_rows = self._rows(unmerged_output, turn_uids, merged_output)
        for name, part in self.parts.items():
            has_ended_n = list(map(part.ended, merged_output["response_ids"], merged_output["loss_masks"]))
            self._appended[name] = torch.tensor(has_ended_n)
            appended_value_by_field = {"response_ids": part.token, "loss_masks": 0, "rewards": 0.0, "rollout_logprobs": 0.0}
            for field, token_value in appended_value_by_field.items():
                if merged_output.get(field) is not None:
                    row_end_pairs = zip(merged_output[field], has_ended_n, strict=True)
                    extended_rows = [[*row, token_value] if has_ended else row for row, has_ended in row_end_pairs]
                    merged_output = {**merged_output, field: extended_rows}
        return merged_output, uids

    def handle_dynamic_sampling(self, generator_output: Any, uids: list[str]) -> Any:
        """Let SkyRL sample more prompts until enough groups get credit."""
        useful_uids = self._useful_uids(generator_output, uids)
        # SkyRL keeps groups with unequal rewards, so set the reward of one row per useful group to 1, and all others to 0.
        first_row_indices = {uids.index(uid) for uid in useful_uids}
        fake_rewards = [float(row in first_row_indices) for row in range(len(uids))]
        fake_output = {**generator_output, "rewards": fake_rewards, _REWARDS: generator_output["rewards"]}
        sampled_output, uids, keep_sampling = super().handle_dynamic_sampling(fake_output, uids)
        original_rewards = sampled_output.pop(_REWARDS)
        return {**sampled_output, "rewards": original_rewards}, uids, keep_sampling

    def _rows(self, output: Any, uids: Sequence[str], trained: Any) -> SampledRows:
        return SampledRows.of(output, uids, trained, stepwise=self.cfg.generator.step_wise_trajectories)

    def _useful_uids(self, output: Any, uids: Sequence[str]) -> set[str]:
        """Return the prompt ids of the groups that get credit."""
        sampled_rows = self._rows(output, uids, output)
        scored_batch = self._read(sampled_rows, width=max(sampled_rows.length_n))
        return _prompts_of(uids, scored_batch.batch.group_n[self.step.useful(scored_batch)])

    def _read(self, rows: SampledRows, *, width: int, data: Any = None) -> ReadBatch:
        """Build a batch of turns or rows, then find and score its blocks."""
        shared_columns = sorted(rows.extra.keys() & self._columns(rows.uids[:1]).keys())
        if shared_columns:
            say(
                f"Both the generator's output and the dataset have columns called {', '.join(shared_columns)}. Rewards read "
                "the generator's columns. If rewards should read the dataset's columns, let the generator use other names."
            )
        if reads_turns(self.scheme, stepwise=rows.stepwise):
            needs_states = "anchor_s" in self.scheme.entry.inputs
            batch, turns = rows.turns(self._columns, width=width, anchored=needs_states)
            row_values = {
                name: [None if isinstance(value, list) else value for value in values] for name, values in rows.extra.items()
            }
            turn_count_s = [len(ranges) for ranges in rows.turn_ranges_s]
            check_turn_rewards(
                self.scheme, row_values, turn_count_s, advice="Let the generator return a list with one number per turn"
            )
        else:
            batch = rows.whole(self._columns, data)
            turns = None
        completions = self.tokenizer.batch_decode(batch.columns["completion_ids"], skip_special_tokens=True)
        batch = replace(batch, columns={**batch.columns, "completions": completions})
        return ReadBatch(batch, read(batch, self.scheme, self.vocabulary), len(rows.length_n), turns)

    def _execute_forward_pass(self, model: str, batch: Any, key: str, mini_batch_boundaries: Any) -> Tensor:
        """Compute old log-probabilities or values, in the order of the batch's rows."""
        # For mini-batches that need padding, SkyRL would also return padding rows, so do not pass their boundaries.
        row_multiple = self.dispatch.get_lcm_dp_size()
        needs_padding = any((end - start) % row_multiple for start, end in mini_batch_boundaries or ())
        return super()._execute_forward_pass(model, batch, key, None if needs_padding else mini_batch_boundaries or None)

    def _execute_training_step(self, model: str, data: Any) -> dict[str, float]:
        """Run SkyRL's optimizer step. Skip the policy while only the critic trains."""
        trains_only_critic = 0 < self.global_step <= self.critic_config.policy_training_start_step
        return {} if model == "policy" and trains_only_critic else super()._execute_training_step(model, data)

    def train_critic_and_policy(self, data: Any) -> Any:
        """Update critic and policy as SkyRL does. Write the loss, gradient norm and entropy to the run folder."""
        training_status = super().train_critic_and_policy(data)
        if self._record is not None:
            self._record.add_update(self.all_metrics, UPDATE)
        return training_status

    @torch.no_grad()
    def compute_advantages_and_returns(self, data: Any) -> Any:
        """Replace the advantages of SkyRL's estimator by those of the recipe."""
        data = super().compute_advantages_and_returns(data)
        sampled_rows = self.last_rows
        assert sampled_rows is not None, "SkyRL must call postprocess_generator_output before it computes advantages"
        mask_nt = data["loss_mask"] > 0
        if not mask_nt.any():
            say(
                "The loss mask of a batch is 0 at every token, so nothing is learned from it. If replies were cut off, raise "
                "generator.sampling_params.max_generate_length, or set generator.apply_overlong_filtering=false."
            )
        row_count = len(sampled_rows.length_n)
        scored_batch = self._read(sampled_rows, width=mask_nt.shape[1], data=data)
        batch, reading = scored_batch.batch, scored_batch.reading
        if self.scheme.value_names:  # the critic does not learn from rows outside the loss
            batch = replace(batch, mask_nt=mask_nt[:row_count])
        last_column = mask_nt.shape[1] - 1  # the last column holds the token that a mode (such as LaSeR) appended
        column_by_mode = {mode: torch.where(has_token_n, last_column, -1) for mode, has_token_n in self._appended.items()}
        past_step_count = self.global_step - 1
        for name, part in self.parts.items():
            mode_logp_n = token_logp(data["action_log_probs"][:row_count], column_by_mode[name])
            batch = replace(batch, **part.fields(mode_logp_n, past_step_count))
        scored_batch = replace(scored_batch, batch=batch)
        step_result = self.step.finish(scored_batch, number=self.global_step, dtype=self.advantage_dtype)
        adv_nt = scored_batch.put(step_result.advantages_nt)
        if self.cfg.trainer.algorithm.zero_variance_filter:
            self._leave_out_useless(data, step_result, sampled_rows)
            mask_nt = data["loss_mask"] > 0
        padding_row_count = len(mask_nt) - row_count
        adv_nt = pad(adv_nt, (0, 0, 0, padding_row_count)) * mask_nt  # tokens outside the loss mask get advantage 0
        all_metrics = dict(step_result.metrics)
        rollout_n = torch.tensor([sampled_rows.rollout_s[s] for s in sampled_rows.source_row_n])
        advantage_factor_n1 = fold_factor(
            data["loss_mask"],
            pad(rollout_n, (0, padding_row_count), value=-1),  # -1: padding rows belong to no rollout
            loss_reduction=self.cfg.trainer.algorithm.loss_reduction,
            mini_batches=data.metadata["policy_mini_batch_boundaries"],
            prompts=data.metadata["policy_prompt_boundaries"],
            max_seq_len=self.cfg.trainer.algorithm.max_seq_len,
            micro_batch_size=self.cfg.trainer.micro_train_batch_size_per_gpu,
        )
        data["advantages"], data["returns"] = adv_nt * advantage_factor_n1, adv_nt
        if batch.value_nt is not None and self.scheme.value_names:
            # Masked tokens must hold 0, because SkyRL multiplies by the mask and 0 times NaN is NaN.
            return_nt, critic_metrics = returns(reading, batch, self.scheme, lam=self.critic_config.gae_lambda_value)
            all_metrics |= critic_metrics
            for name, value_nt in (("values", batch.value_nt), ("returns", return_nt)):
                data[name] = torch.where(mask_nt, pad(value_nt, (0, 0, 0, padding_row_count)), 0.0)
        for name, part in self.parts.items():
            mode_weight_n, target_logp_n, mode_metrics = part.lesson(reading, self.scheme, past_step_count, rows=row_count)
            mode_weight_n = mode_weight_n * advantage_factor_n1[:row_count, 0]
            for field, token_value_n in (("advantages", mode_weight_n), ("action_log_probs", target_logp_n)):
                data[field] = with_token(data[field], column_by_mode[name], token_value_n)
            all_metrics |= mode_metrics
        self.last_advantages = adv_nt[:row_count]
        if self._record is not None:
            self._keep(self._record, replace(step_result, metrics=all_metrics), sampled_rows)
        self.all_metrics.update({name: value for name, value in all_metrics.items() if value == value})
        trained_advantages = adv_nt[mask_nt]
        for name, logged_advantages in (("", trained_advantages), ("_abs", trained_advantages.abs())):
            self.all_metrics[f"loss/avg_raw_advantages{name}"] = float(logged_advantages.mean())
        say(*step_result.warnings)
        return data

    def _leave_out_useless(self, data: Any, result: StepResult, rows: SampledRows) -> None:
        """Leave groups without credit out of the loss. This includes KL and entropy."""
        tolerance = self.cfg.trainer.algorithm.zero_variance_filter_tol
        group_n = result.own.batch.group_n
        is_useful_n = in_useful_groups(result.credit, group_n, tolerance=tolerance)
        useful_uids = _prompts_of(rows.uids, group_n[is_useful_n])
        for n, source_row in enumerate(rows.source_row_n):
            if rows.uids[source_row] not in useful_uids:
                data["loss_mask"][n] = 0
        self.all_metrics["reward/num_zero_variance_filtered"] = len(set(rows.uids)) - len(useful_uids)

    def _columns(self, uids: Sequence[str]) -> dict[str, list[Any]]:
        """Return the dataset's columns for some prompts, and add nested ones, such as `reward_spec.ground_truth`.

        As under verl, rewards read the ground truth as the column `answer`, unless the dataset has such a column.
        """
        prompt_dataset: Any = self.train_dataset
        columns_by_uid = {}
        for uid in filter(str.isdecimal, set(uids)):  # a numeric uid is a dataset row's index
            messages, _, dataset_columns, *_ = prompt_dataset[int(uid)]
            gold_answer = (dataset_columns.get("reward_spec") or {}).get("ground_truth")
            answer_columns = {} if gold_answer is None else {"answer": gold_answer}
            columns_by_uid[uid] = {**answer_columns, **dataset_columns, "prompts": messages}
        return columns_of([columns_by_uid.get(uid, {}) for uid in uids])

    def _keep(self, record: RunRecord, result: StepResult, sampled_rows: SampledRows) -> None:
        """Write a batch's metrics to the run folder, and its rollouts if the step is a multiple of `keep_rollouts`."""

        def rollouts() -> Rollouts:
            prompt_by_uid = prompt_texts(self.tokenizer, sampled_rows.uids, sampled_rows.output["prompt_token_ids"])
            prompt_by_group = list(prompt_by_uid.values())  # groups have the order of the prompts in `prompt_by_uid`
            row_prompts = [prompt_by_group[group] for group in result.own.batch.group_n.tolist()]
            return self.step.rollouts(result, number=self.global_step, prompts=row_prompts)

        recipe = record.recipe(
            self.scheme,
            model=self.cfg.trainer.policy.model.path,
            steps=self.total_training_steps,
            prompts=self.cfg.trainer.train_batch_size,
            group_size=max(2, self.cfg.generator.n_samples_per_prompt),
            temperature=float(self.cfg.generator.sampling_params.temperature),
            seed=self.cfg.trainer.seed,
        )
        record.add_batch(self.global_step, result, self.scheme, recipe=recipe, tokenizer=self.tokenizer, rollouts=rollouts)


def _prompts_of(uids: Sequence[str], group_r: Int[Tensor, " r"]) -> set[str]:
    """Convert group numbers to prompt ids. Groups are numbered in the order in which their ids first appear."""
    distinct_uids = list(dict.fromkeys(uids))
    return {distinct_uids[group] for group in group_r.unique().tolist()}


def fold_factor(
    loss_mask_nt: Shaped[Tensor, "n t"],
    rollout_n: Int[Tensor, " n"],
    *,
    loss_reduction: str,
    mini_batches: Sequence[tuple[int, int]],
    prompts: Sequence[tuple[int, int]],
    max_seq_len: int | None = None,
    micro_batch_size: int = 1,
) -> Float[Tensor, "n 1"]:
    """Return the factors on advantages that undo the normaliser of SkyRL's loss.

    factor[i] = D[i] / R,  R the rollouts of i's mini-batch and D[i] what SkyRL divides row i by; 1 outside mini-batches
    """
    length_n = loss_mask_nt.sum(dim=1).float()
    fold_factor_n = torch.ones_like(length_n)
    for start, end in mini_batches:
        mini_batch_slice, row_count = slice(start, end), end - start
        prompt_slices = [slice(first, stop) for first, stop in prompts if start <= first < end]
        micro_batch_slices = [slice(first, first + micro_batch_size) for first in range(start, end, micro_batch_size)]
        slices_by_reduction = {"prompt_mean": prompt_slices, "token_mean_legacy": micro_batch_slices}
        for row_slice in slices_by_reduction.get(loss_reduction, [mini_batch_slice]):
            token_count = length_n[row_slice].sum()
            divisor_by_reduction = {
                "token_mean": token_count,
                "prompt_mean": len(prompt_slices) * token_count,
                "token_mean_legacy": len(micro_batch_slices) * token_count,
                "sequence_mean": row_count * length_n[row_slice],
                "seq_mean_token_sum_norm": float(row_count * (max_seq_len or 1)),
            }
            fold_factor_n[row_slice] = divisor_by_reduction[loss_reduction]
        fold_factor_n[mini_batch_slice] /= len(rollout_n[mini_batch_slice].unique())
    return fold_factor_n[:, None]
