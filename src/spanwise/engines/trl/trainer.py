"""`SpanGRPOTrainer`: TRL's GRPO trainer with one advantage per span instead of one per completion."""

from __future__ import annotations

import copy
import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import trl
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback
from transformers.trainer_utils import rotate_checkpoints
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from spanwise.batch import Batch
from spanwise.engines.checkpoints import MANIFEST, read_manifest, restore_estimator, whole_checkpoint, write_manifest
from spanwise.engines.shared import reward_means
from spanwise.engines.trl import config, fold
from spanwise.engines.trl.keeping import Keeping, few_in, log_credit
from spanwise.engines.trl.sampling import DynamicSampling, check_sampling
from spanwise.errors import DataError, RecipeError, first_line
from spanwise.mode import added_by, parts_of
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.sequences import Sequences, image_inputs, sequences
from spanwise.rollouts import Rollouts
from spanwise.rollouts.folder import hidden
from spanwise.scheme import Scheme
from spanwise.score.event_loop import run
from spanwise.segment import Vocabulary
from spanwise.step import Ranks, ReadBatch, Step, wider

#: The arguments that TRL passes to reward functions besides columns with one value per completion.
_TRL_KWARGS = ("trainer_state", "log_extra", "log_metric")
#: The `Batch` fields known when TRL calls reward functions. Log-probabilities come later.
AT_READ = ("group_n", "ids_nt", "mask_nt", "columns", "steps")
#: The fields of `Batch` that TRL fills in.
PROVIDES = (*AT_READ, "logp_nt")
#: TRL arguments that a resumed run must keep.
_LASTING = (
    "seed", "data_seed", "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "max_grad_norm", "beta", "epsilon", "epsilon_high", "delta", "loss_type", "num_iterations", "num_generations",
    "max_completion_length", "mask_truncated_completions", "temperature", "top_p", "top_k", "min_p",
    "entropy_coef", "importance_sampling_level", "dynamic_sampling", "dynamic_sampling_rounds",
)  # fmt: skip


class SpanGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` with the credit of a scheme: every span gets an advantage of its own.

    Generation, vLLM, tools, PEFT, accelerate, logging and resuming work as in TRL. The `scheme` decides the blocks, rewards and
    comparisons. The loss of every supported `loss_type` becomes the mean over completions of the sum over tokens of
    advantage times surrogate, plus `beta` times the mean over completions of the mean over tokens of the KL divergence
    (`kl_term`). TRL's entropy bonus and auxiliary loss stay as they are.

    Args:
        model: as in `GRPOTrainer`.
        reward_funcs: must stay None, because the scheme's objectives define the reward functions.
        args: a `SpanGRPOConfig`, or a plain `GRPOConfig`.
        train_dataset, eval_dataset, processing_class: as in `GRPOTrainer`.
        scheme: the complete rule of credit; required.
        critic: the value model, for methods that need values (`gae`, `sae`).
        options: any further argument of `GRPOTrainer` (`callbacks`, `peft_config`, `tools`, `rollout_func`, ...).

    Attributes:
        last_rollouts: the `Rollouts` of this process's last generation batch; None before the first.
        last_metrics: the metrics of the last training batch of all processes: its credit, and the mean of each reward.
        zero_batches: the number of training batches in which every credit was 0.
        critic: the `Critic`; None without one.
        parts: the part of each mode in this trainer, by the mode's name (`spanwise.modes`).
        keeping: the callback that writes the run folder; None without one.
        settings: the settings that checkpoints store instead of scheme, critic and arguments; None: those. A caller that sets them
            must compare them with the checkpoint's before `train`.

    Raises:
        LayoutError, RecipeError, DataError, SpanwiseError: the arguments cannot work together; raised before training starts.
    """

    _tag_names = ["trl", "grpo", "spanwise"]  # noqa: RUF012 - TRL's own class attribute
    # A trainer always has these attributes, although TRL calls them optional.
    args: Any
    model: Any
    processing_class: Any
    max_completion_length: Any
    num_generations: Any
    num_generations_eval: Any
    settings: Mapping[str, Any] | None
    _moves_columns = False  # whether the loss moves tokens to other columns, as with Unsloth

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        scheme: Scheme | None = None,
        critic: CriticConfig | None = None,
        **options: Any,
    ) -> None:
        config.check_base(moves_columns=self._moves_columns)
        scheme = config.check_scheme(scheme, critic, options)
        all_modes = scheme.modes if critic is None else (critic, *scheme.modes)
        scheme.check((*PROVIDES, *added_by(all_modes, "trl")), at_read=AT_READ)
        if args is None:
            model_path = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", ""))
            model_name = model_path.split("/")[-1] or "model"
            args = config.SpanGRPOConfig(f"{model_name}-SpanGRPO")
        config.check_args(args)
        config.check_use(
            args, trl_version=trl.__version__, model=model, reward_funcs=reward_funcs, options=options, critic=critic
        )
        prompts_per_batch = (args.generation_batch_size or 0) // (args.num_generations or 1)
        config.check_datasets(train_dataset, eval_dataset, scheme.objectives, options, needed=prompts_per_batch)
        check_sampling(args, scheme, dataset=train_dataset, options=options, modes=all_modes)
        self.scheme, self.settings = scheme, None
        title, _, arxiv_id = scheme.entry.paper.rpartition(", arXiv ")  # TRL's model cards cite the paper of the method
        self._name = f"spanwise's method '{scheme.method}'"
        self._paper = {"title": title, "id": arxiv_id} if title else {}
        self.last_rollouts: Rollouts | None = None
        self._trained_rollouts: Rollouts | None = None  # the rollouts of the last training batch, not of an evaluation
        self.last_metrics: dict[str, float] = {}
        # The following attributes pass data from one hook of TRL to a later one.
        self._sampled: list[list[int]] | None = None  # The mask of sampled tokens; None: all are sampled.
        self._reward_arguments: dict[str, Any] = {}
        self._rows: list[dict[str, Any]] = []
        sampling_criterion = getattr(args, "dynamic_sampling", None)
        round_count = getattr(args, "dynamic_sampling_rounds", None)
        self.sampling = None if sampling_criterion is None else DynamicSampling(self, sampling_criterion, round_count or 0)
        self._scored_batch: ReadBatch | None = None
        self._read_seconds = 0.0
        self._done: set[str] = set()
        # `off_policy_mask_threshold` and `top_entropy_quantile` let TRL mask more tokens, so the gradient check would fail.
        trl_masks_tokens = args.off_policy_mask_threshold is not None or args.top_entropy_quantile < 1.0
        # The gradient check runs once, but not under DPPO, whose loss TRL does not compute.
        self._canary_due = getattr(args, "canary", True) and not trl_masks_tokens and args.loss_type not in fold.DPPO
        self._logps: Tensor | None = None
        self._loss_inputs: dict[str, Any] = {}  # The inputs of the loss while TRL computes it.
        # TRL always gets the importance-sampling level "token", because TRL averages advantages at the level "sequence".
        self._ratio_level = args.importance_sampling_level
        # `_changed` restores `importance_sampling_level` even after an error, because the user may use `args` again.
        with _changed(args, importance_sampling_level="token"):
            super().__init__(
                model=model,
                reward_funcs=[self._reward_function(name) for name in scheme.names],
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                **options,
            )
        self._environment_rewards = config.taken_from(self, scheme.objectives)
        if not any(options.get(name) for name in ("rollout_func", "environment_factory")):
            has_template = bool(getattr(self.processing_class, "chat_template", None))
            config.check_prompts(train_dataset, eval_dataset, template=has_template)
        # With these weights TRL logs the same weighted sum of rewards as training uses.
        self.reward_weights = torch.tensor([objective.weight for objective in scheme.objectives], dtype=torch.float32)
        process_ranks = Ranks(self.accelerator.process_index, lambda own: gather_object([own]))
        ranks = process_ranks if self.accelerator.num_processes > 1 else None
        self.step: Step = Step(scheme, Vocabulary.of(self._text_tokenizer, self.model), ranks=ranks)
        self.parts = parts_of(all_modes, "trl", self)
        self.critic = None if critic is None else self.parts[critic.name].critic
        self.add_callback(fold.LengthGuard(all_modes))
        if getattr(args, "log_metrics", "all") == "few":
            for callback_class in (PrinterCallback, ProgressCallback):
                if self.pop_callback(callback_class) is not None:
                    self.add_callback(few_in(callback_class))
        self.keeping: Keeping | None = None
        if getattr(args, "keep_rollouts", 0) or getattr(args, "report", False):
            self.keeping = Keeping(self)
            self.add_callback(self.keeping)

    @property
    def zero_batches(self) -> int:
        """The number of training batches in which every credit was 0."""
        return self.step.zero_batches

    @property
    def _text_tokenizer(self) -> Any:
        # The processor of a multimodal model holds its tokenizer.
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train, or resume from a checkpoint (True: from the newest). Complete the run folder even after an error."""
        checkpoint = whole_checkpoint(self.args, resume_from_checkpoint, self._lasting if self.settings is None else None)
        run_writer = self.keeping if self.accelerator.is_main_process else None
        try:
            with nullcontext() if run_writer is None else run_writer.record.running():
                return super().train(checkpoint, *args, **options)
        except UnpicklingError as error:
            if checkpoint is None:
                raise
            raise DataError(
                f"Checkpoint '{checkpoint}' was not loaded, because its objects could run code: {first_line(error)}. Resume "
                "from another checkpoint."
            ) from error

    @property
    def _lasting(self) -> dict[str, Any]:
        """The settings that a resumed run must keep."""
        critic_settings = {} if self.critic is None else {"critic": vars(self.critic.config)}
        return {**self.scheme.plain(), **critic_settings, **{name: getattr(self.args, name, None) for name in _LASTING}}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write TRL's checkpoint and a list of its files. Then delete older checkpoints."""
        folder = Path(self._get_output_dir(trial=trial))
        checkpoint = folder / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            (checkpoint / MANIFEST).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        with _changed(self.args, save_total_limit=None):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            # TRL saved the arguments without the user's save_total_limit, so save them again.
            torch.save(self._written_args(), checkpoint / "training_args.bin")
            method_entry: Any = self.scheme.entry
            write_manifest(
                checkpoint,
                processes=self.accelerator.num_processes,
                resumable=not self.args.save_only_model,
                estimator=method_entry.estimator.state_dict() if method_entry.stateful else None,
                settings=self._lasting if self.settings is None else self.settings,
            )
            limit, best_checkpoint = self.args.save_total_limit, self.state.best_model_checkpoint
            rotate_checkpoints(str(folder), save_total_limit=limit, best_model_checkpoint=best_checkpoint, use_mtime=True)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        with _changed(self, args=self._written_args()):
            super()._save(output_dir, state_dict)

    def _written_args(self) -> Any:
        """Copy the training arguments without secrets."""
        public_args = copy.copy(self.args)
        public_args.__dict__ = hidden({"trainer": vars(self.args)}, None)["trainer"]
        return public_args

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        for mode_part in self.parts.values() if self.args.should_save else ():
            mode_part.save(Path(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        for mode_part in self.parts.values():
            mode_part.restore(Path(checkpoint))
        if self.scheme.entry.stateful:
            restore_estimator(self.scheme, read_manifest(Path(checkpoint))["estimator"], Path(checkpoint))

    def _reward_function(self, name: str) -> Any:
        """Build a reward function for TRL that only stores its arguments and returns zeros."""

        def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
            text_columns = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
            self._reward_arguments = {**columns, **text_columns}
            return [0.0] * len(completion_ids)

        reward.__name__ = name
        return reward

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Sample completions as TRL does, while modes such as LaSeR record the log-probabilities that they need."""
        is_training = self.model.training
        with ExitStack() as exit_stack:
            for mode_part in self.parts.values():
                exit_stack.enter_context(mode_part.generating())
            outputs = super()._generate(*args, **kwargs)
        if self.model.training != is_training:  # TRL's continuous batching leaves the model in training mode
            self.model.train(is_training)
        return outputs

    def _read(self, generated: Any, prompts: list[Any], rows: list[dict[str, Any]]) -> ReadBatch:
        """Find and score the blocks of sampled completions before TRL asks for rewards."""
        self._sampled = generated[2]
        self._calculate_rewards(rows, prompts, generated[3], generated[1])
        assert self._scored_batch is not None, "rewards were read"
        return self._scored_batch

    def _generate(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        generated_outputs = self._sample(prompts, *args, **kwargs)
        extra_fields = next((output for output in generated_outputs if isinstance(output, dict)), {})
        shared_columns = [name for name in extra_fields if self._rows and name in self._rows[0]]
        if shared_columns and self._is_first_time("shared columns") and self.accelerator.is_main_process:
            warnings.warn(
                f"Both the output of rollout_func and the dataset have columns called {', '.join(shared_columns)}. Rewards "
                "read those of rollout_func. If they should read those of the dataset, let rollout_func use other names.",
                UserWarning,
                stacklevel=2,
            )
        if self.sampling is not None and self.model.training:
            generated_outputs = self.sampling.fill(generated_outputs, prompts, self._rows)
            self._note(self.sampling.metrics)
        self._sampled = generated_outputs[2]
        self._check_prompt_ends(generated_outputs[0])
        return generated_outputs

    def _check_prompt_ends(self, prompt_ids: Any) -> None:
        """Refuse a prompt whose end does not fit the layout. After the first batch, only warn once."""
        is_first_batch = self._is_first_time("prompts")
        for last_ids in dict.fromkeys(tuple(prompt_tokens)[-64:] for prompt_tokens in prompt_ids):
            prompt_end = self._text_tokenizer.decode(list(last_ids), skip_special_tokens=False)
            try:
                config.check_prefilled(prompt_end, self.scheme.layout)
            except RecipeError as error:
                if is_first_batch:
                    raise
                if self._is_first_time("later prompts"):
                    warnings.warn(f"A prompt of a later batch does not fit the layout. {error}", UserWarning, stacklevel=2)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        if self.sampling is not None and self._scored_batch is not None and self.sampling.scored is completion_ids_list:
            return self._logged_rewards(self._scored_batch)
        super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        start_time = time.perf_counter()
        arguments = self._reward_arguments
        trl_arguments = {key: arguments.pop(key) for key in _TRL_KWARGS if key in arguments}
        if self._environment_rewards:
            async_loop = getattr(self, "async_loop", None)
            arguments["environment"] = _environment_column(self._environment_rewards, arguments["environments"], async_loop)
        # Completions of a prompt are adjacent, and each process has equally many completions.
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        first_row_index = self.accelerator.process_index * len(completion_ids_list)
        group_n = (first_row_index + torch.arange(len(completion_ids_list))) // group_size
        if "log_extra" in trl_arguments:
            trl_arguments["log_extra"] = _checked(trl_arguments["log_extra"], len(completion_ids_list))
        batch = Batch.jagged(completion_ids_list, group_n, sampled=self._sampled, columns=arguments, extras=trl_arguments)
        self._scored_batch = self.step.read(batch)
        reward_nm = self._logged_rewards(self._scored_batch)
        self._read_seconds += time.perf_counter() - start_time
        return reward_nm

    def _logged_rewards(self, read_batch: ReadBatch) -> Tensor:
        """Return all rewards for TRL's log, one column per objective."""
        # Log missing rewards as `if_missing`. If they were skipped, omitting blocks would raise the logged mean.
        return read_batch.everyone.worth_nm(self.scheme).to(self.accelerator.device, torch.float32)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._rows, self._read_seconds = inputs, 0.0
        output = super()._generate_and_score_completions(inputs)
        scored_batch = self._scored_batch
        is_training = self.model.training
        assert scored_batch is not None, "TRL asks for rewards"
        batch = scored_batch.batch
        all_rows = scored_batch.everyone
        step_number = self.state.global_step
        if "logp_nt" in self.scheme.needs:
            batch = replace(batch, logp_nt=self._sampled_logps(sequences(output, batch), output))
            scored_batch = replace(scored_batch, batch=batch)
        for mode_part in self.parts.values():
            scored_batch, metrics = mode_part.fill(scored_batch, output)
            self._note(metrics)
        start_time = time.perf_counter()
        mask_nt = fold.loss_mask(output).bool().cpu()
        step_result = self.step.finish(scored_batch, mask_nt=mask_nt, learn=is_training, number=step_number)
        advantage_nt = scored_batch.put(step_result.advantages_nt, width=mask_nt.shape[1])
        output["advantages"] = advantage_nt.to(output["completion_ids"].device)
        if self._ratio_level == "block":
            output["block_numbers"] = wider(step_result.blocks_nt, mask_nt.shape[1]).to(output["completion_ids"].device)
        trl_column_names = ("prompts", "completions", "completion_ids", "environments")
        self.last_rollouts = self.step.rollouts(
            step_result,
            number=step_number,
            prompts=batch.columns["prompts"],
            completions=batch.columns["completions"],
            columns={name: values for name, values in batch.columns.items() if name not in trl_column_names},
            learn=is_training,
        )
        spanwise_seconds = self._read_seconds + time.perf_counter() - start_time
        metrics = {**step_result.metrics, "spanwise/seconds": spanwise_seconds}
        self._note(metrics)
        if is_training:
            self._trained_rollouts = self.last_rollouts
            self.last_metrics = {**metrics, **reward_means(all_rows.worth_nm(self.scheme), self.scheme.names)}
        completion_credit, present_nk = step_result.by_completion()
        warning_by_kind = {"table": log_credit(getattr(self, "_logs", {}), completion_credit, present_nk, self.scheme)}
        if scored_batch.turns is None and "reopened" not in self._done:  # a turn's row starts after the `prefilled` tag
            warning_by_kind["reopened"] = config.warn_reopened(
                batch.ids_nt, batch.mask_nt, self.scheme.layout, self._text_tokenizer
            )
        if int(output["num_items_in_batch"]) == 0:
            warning_by_kind["cut off"] = (
                f"Step {step_number} learns nothing. All {all_rows.completions} completions were cut off at "
                f"max_completion_length={self.max_completion_length}, and mask_truncated_completions leaves such "
                "completions out of the loss. Raise max_completion_length, or set mask_truncated_completions=False."
            )
            if not self.mask_truncated_completions:
                warning_by_kind["cut off"] = (
                    f"Step {step_number} learns nothing. The mask of sampled tokens is 0 at every token of all "
                    f"{all_rows.completions} completions. Let rollout_func return an "
                    "env_mask of 1 at each token that the model wrote."
                )
        new_warnings = [warning for kind, warning in warning_by_kind.items() if warning and self._is_first_time(kind)]
        for warning in (*new_warnings, *step_result.warnings) if self.accelerator.is_main_process else ():
            warnings.warn(warning, UserWarning, stacklevel=2)
        return output

    def sample_rollouts(self, prompts: Sequence[Mapping[str, Any]]) -> Rollouts:
        """Sample and credit a group of completions per row, without effect on training. One process only."""
        was_training = self.model.training
        # A `Step` gives each warning only once. Use a new one, so that training still gives the warnings of `self.step`.
        sample_step = Step(self.scheme, self.step.vocabulary)
        temporary_attributes = {"step": sample_step, "_logs": copy.deepcopy(self._logs), "_done": {*self._done}}
        self.model.eval()
        try:
            with (
                _changed(self, last_rollouts=None, **temporary_attributes),
                torch.random.fork_rng(),
                warnings.catch_warnings(action="ignore"),
            ):
                torch.manual_seed(0)
                self._generate_and_score_completions(
                    [dict(row) for row in prompts for _ in range(self.num_generations_eval)]
                )
                assert self.last_rollouts is not None, "completions were sampled"
                return self.last_rollouts
        finally:
            self.model.train(was_training)
            self._metrics["eval"].clear()

    @torch.no_grad()
    def _sampled_logps(self, rows: Sequences, output: dict[str, Any]) -> Tensor:
        """Compute the tokens' log-probabilities under the policy that sampled them."""
        sampled_logp_nt = output.get("old_per_token_logps")
        if sampled_logp_nt is None:
            forward_inputs = (rows.ids_nl, rows.attention_nl, rows.width, self.args.per_device_train_batch_size)
            images = image_inputs(output, rows.ids_nl.shape[1])
            sampled_logp_nt = self._get_per_token_logps_and_entropies(self.model, *forward_inputs, **images)[0]
            self._logps = None
        return sampled_logp_nt[:, : rows.width].float().cpu()

    def _is_first_time(self, key: str) -> bool:
        """Return True only at the first call with a key."""
        is_first_time = key not in self._done
        self._done.add(key)
        return is_first_time

    def _note(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to TRL's next log line."""
        for name, value in metrics.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        """Compute TRL's loss, with advantages scaled to undo the loss's normaliser. Add the terms of KL, DPPO and modes."""
        is_training = self.model.training
        if is_training and self._waits:
            return next(parameter for parameter in model.parameters() if parameter.requires_grad).sum() * 0.0
        mask_bt = fold.loss_mask(inputs)
        fold_factor_b1 = fold.fold_factor(
            mask_bt,
            loss_type=self.loss_type,
            max_completion_length=self.max_completion_length,
            num_items=inputs["num_items_in_batch"],
            processes=self.accelerator.num_processes,
            steps_per_generation=self.args.steps_per_generation if is_training else 1,
        )
        is_dppo = self.loss_type in fold.DPPO
        advantages_bt = torch.zeros_like(inputs["advantages"]) if is_dppo else inputs["advantages"] * fold_factor_b1
        is_canary_due = self._canary_due and is_training and torch.is_grad_enabled()
        advantages_bt.requires_grad_(is_canary_due)
        accumulation_steps = self.current_gradient_accumulation_steps if is_training else 1
        loss_inputs = {**inputs, "advantages": advantages_bt}
        trl_options = {
            "beta": 0.0,  # Keeps TRL from adding its KL; `kl_term` is added below.
            "loss_type": "sapo" if is_dppo else self.loss_type,  # Under DPPO, TRL's own loss is 0.
        }
        self._logps = None
        with _changed(self, _loss_inputs=loss_inputs, **trl_options):
            total_loss = super().compute_loss(model, loss_inputs, return_outputs, num_items_in_batch)
        logps_bt, self._logps = self._logps, None
        if is_dppo and logps_bt is not None:
            dppo_loss_value, dropped_share = fold.dppo_term(logps_bt, inputs, mask_bt, self.args)
            token_count = mask_bt.sum()
            local_dppo_sums = torch.stack([dropped_share * token_count, token_count, dppo_loss_value.detach()])
            global_dppo_sums: Any = self.accelerator.reduce(local_dppo_sums, reduction="sum")
            dropped_count, token_count, loss_sum = global_dppo_sums.tolist()
            self._note({"dppo/dropped": dropped_count / max(token_count, 1)})
            logged_losses = self._metrics["train" if is_training else "eval"]["policy_loss"]
            if logged_losses:  # TRL logs a policy loss only if there is an entropy bonus
                logged_losses[-1] = loss_sum / self.accelerator.num_processes
            total_loss = total_loss + dppo_loss_value / accumulation_steps
        fold.check_loss(total_loss, logps_bt, inputs, mask_bt, self._text_tokenizer, step=self.state.global_step)
        if is_canary_due and logps_bt is not None:
            fold.check_own_advantage(
                total_loss,
                logps_bt,
                advantages_bt,
                mask_bt,
                factor_b1=fold_factor_b1,
                accumulation=accumulation_steps,
                height_bt=fold.surrogate_slope(logps_bt.detach(), loss_inputs, self.args),
            )
            self._canary_due = False
        if self.beta != 0.0 and logps_bt is not None:
            old_logp_bt = None
            if self.args.use_bias_correction_kl:
                old_logp_bt = inputs.get("old_per_token_logps", logps_bt.detach())
            kl_bt = fold.token_kl(logps_bt, inputs["ref_per_token_logps"], mask_bt, old_bt=old_logp_bt)
            kl_and_token_sums = torch.stack([kl_bt.detach().sum(), mask_bt.sum().to(kl_bt.dtype)])
            global_totals: Any = self.accelerator.reduce(kl_and_token_sums, reduction="sum")
            self._note({"kl": float(global_totals[0] / global_totals[1].clamp(min=1))})
            total_loss = total_loss + self.beta * fold.kl_term(kl_bt, mask_bt) / accumulation_steps
        for mode_part in self.parts.values():
            mode_loss, mode_metrics = mode_part.loss(inputs)
            total_loss = total_loss + mode_loss / accumulation_steps
            self._note(mode_metrics)
            self.step.note(mode_metrics if is_training else {})
        return total_loss

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        compute_logps = super()._get_per_token_logps_and_entropies
        for mode_part in self.parts.values():
            compute_logps = partial(mode_part.forward, compute_logps)
        logp_outputs = compute_logps(*args, **kwargs)
        self._logps = logp_outputs[0]
        loss_inputs = self._loss_inputs
        old_logp_bt = loss_inputs.get("old_per_token_logps")
        if old_logp_bt is not None and self._ratio_level != "token":  # TRL's loss reads the new values from `loss_inputs`
            mask_bt = fold.loss_mask(loss_inputs)
            block_bt = loss_inputs.get("block_numbers")
            loss_inputs["old_per_token_logps"] = fold.pooled_logps(logp_outputs[0], old_logp_bt, mask_bt, block_bt)
        return logp_outputs

    @property
    def _waits(self) -> bool:
        """True while only the critic (or another mode) trains."""
        return any(mode_part.waits for mode_part in self.parts.values())

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run TRL's training step, and check the gradient. Remove the gradient while only the critic (or another mode) trains."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            fold.check_gradient(self.model, scaled=self.accelerator.scaler is not None, step=self.state.global_step)
        if self._waits:
            model.zero_grad(set_to_none=True)  # AdamW would decay weights even at gradients of 0
        return loss

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Write TRL's log line. Leave out metrics that were NaN in every batch."""
        metric_lists = self._metrics["train" if self.model.training else "eval"]
        for name in [name for name, values in metric_lists.items() if all(math.isnan(value) for value in values)]:
            del metric_lists[name]
        super().log(logs, start_time)


@contextmanager
def _changed(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object during a `with` block, and restore the old values even after an error."""
    old_values = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in old_values.items():
            setattr(owner, name, value)


def _checked(log_extra: Callable[[str, list[Any]], None], completion_count: int) -> Callable[[str, list[Any]], None]:
    """Make `log_extra` refuse columns without one value per completion, because TRL's table would misplace the values."""

    def checked(column: str, values: list[Any]) -> None:
        if len(values) != completion_count:
            raise DataError(
                f"A reward function logs {len(values)} values as '{column}' with log_extra, but there are {completion_count} "
                "completions. TRL's table has one row per completion, not per turn. Log one value per completion, or remove "
                "log_extra."
            )
        log_extra(column, values)

    return checked


def _environment_column(rewards: Sequence[Any], environments: Sequence[Any], loop: Any) -> list[float | None]:
    """Return the reward of each rollout's environment, or None. `loop` is the event loop of the environments' async tools."""
    reward_columns = [reward(environments=environments) for reward in rewards]
    awaited_columns = [run(column, loop) if inspect.iscoroutine(column) else column for column in reward_columns]
    return [next((value for value in row if value is not None), None) for row in zip(*awaited_columns, strict=True)]
