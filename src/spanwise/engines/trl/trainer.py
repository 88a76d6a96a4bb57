"""`SpanGRPOTrainer`: TRL's GRPO trainer, with an advantage for every span instead of one for the completion."""

from __future__ import annotations

import time
import warnings
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import trl
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.grpo_config import GRPOConfig

from spanwise.batch import Batch
from spanwise.credit import restrict
from spanwise.credit.assign import completed
from spanwise.credit.trajectories.turns import Turns
from spanwise.engines.keep import reward_means
from spanwise.engines.trl import arguments, checks
from spanwise.engines.trl.canary import check_own_advantage, surrogate_slope
from spanwise.engines.trl.config import SpanGRPOConfig
from spanwise.engines.trl.diverged import GradientGuard, check_loss
from spanwise.engines.trl.dppo import DPPO, dppo_term
from spanwise.engines.trl.fold import fold_factor, loss_mask
from spanwise.engines.trl.keeping import Keeping
from spanwise.engines.trl.kl import kl_term, token_kl
from spanwise.engines.trl.logged import cited, log_credit
from spanwise.engines.trl.metrics import MetricBuffer
from spanwise.engines.trl.saving import Saving
from spanwise.engines.trl.turns import gathered_turns, mean_credit, of_completions, put, restrict_turns
from spanwise.engines.turns import has_turns, turn_rows
from spanwise.mode import added_by, parts_of
from spanwise.modes.critic.config import CriticConfig
from spanwise.modes.critic.critic import Critic
from spanwise.modes.critic.value_model import ValueModel
from spanwise.modes.sequences import cut_off, sequences
from spanwise.pipeline import Reading, advantages, credit, metrics, read, streams
from spanwise.remarks import Watch
from spanwise.rollouts import Rollouts
from spanwise.scheme import Scheme
from spanwise.segment import Vocabulary
from spanwise.types import Credit, Spans

#: What TRL passes to a reward function besides prompts, completions and dataset columns.
_TRL_KWARGS = ("trainer_state", "log_extra", "log_metric", "environments")
#: The fields of `Batch` that TRL's batches fill in, and those that a critic adds.
PROVIDES = ("group_n", "ids_nt", "mask_nt", "columns", "steps", "logp_nt")
#: Those that are there when completions are read: TRL calls rewards before it computes log-probabilities.
AT_READ = ("group_n", "ids_nt", "mask_nt", "columns", "steps")
WITH_CRITIC = ("value_nt", "bootstrap_n")


class SpanGRPOTrainer(Saving):
    """TRL's `GRPOTrainer` that pays every span of a completion for what that span controls.

    Everything TRL offers stays as it is: generation, vLLM, tools, PEFT, accelerate, logging, resume. What is read, rewarded and
    compared is the `scheme`. The loss of every `loss_type` in `LOSS_TYPES` becomes the mean over completions of the sum over
    tokens of advantage times surrogate, plus `beta` times the mean over completions of the mean over tokens of the KL divergence
    (`kl_term`). TRL's entropy bonus and auxiliary loss stay as they are: `loss_type` does not change them.

    Args:
        model: as in `GRPOTrainer`.
        reward_funcs: must stay empty: the reward functions are built from the scheme's objectives.
        args: a `SpanGRPOConfig`, or a plain `GRPOConfig`.
        train_dataset, eval_dataset, processing_class: as in `GRPOTrainer`.
        scheme: the complete rule of credit; it must be given.
        critic: the value model, for methods that need values (`gae`, `sae`).
        options: any further argument of `GRPOTrainer` (`callbacks`, `peft_config`, `tools`, `rollout_func`, ...).

    Attributes:
        last_rollouts: the `Rollouts` of the last generation batch of this process, None before the first.
        last_metrics: what was measured of the last training batch of all processes: credit, and the mean of each reward.
        zero_batches: how many training batches had no credit other than 0.
        critic: the `Critic`, None without one.
        parts: what each mode of the scheme does here, by its name (`spanwise.modes`).

    Raises:
        LayoutError, RecipeError, DataError, SpanwiseError: what cannot work is refused before training starts.
    """

    _tag_names = ["trl", "grpo", "spanwise"]  # noqa: RUF012 - TRL's own class attribute
    # TRL sets these; its annotations allow a None that a trainer never has.
    model: Any
    args: Any
    processing_class: Any
    max_completion_length: Any
    num_generations: Any
    num_generations_eval: Any

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
        checks.check_version(trl.__version__)
        scheme = arguments.check_scheme(scheme, options)
        arguments.check_critic(critic, scheme)
        provides = (*PROVIDES, *added_by(scheme.modes, "trl"))
        scheme.check(provides if critic is None else (*provides, *WITH_CRITIC), at_read=AT_READ)
        checks.check_callables(scheme.objectives, reward_funcs)
        if args is None:
            name = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", ""))
            args = SpanGRPOConfig(f"{name.split('/')[-1] or 'model'}-SpanGRPO")
        arguments.check_args(args)
        checks.check_config(args, trl_version=trl.__version__)
        arguments.check_reference(args, model, options)
        arguments.check_datasets(train_dataset, eval_dataset, scheme.objectives, options)
        length = len(train_dataset) if hasattr(train_dataset, "__len__") else None
        checks.check_size(length, needed=(args.generation_batch_size or 0) // (args.num_generations or 1))
        self.scheme = scheme
        self._name, self._paper = cited(scheme)
        self.last_rollouts: Rollouts | None = None
        self.last_metrics: dict[str, float] = {}
        self.zero_batches = 0
        self._batch: Batch | None = None
        self._turns: Turns | None = None
        self._reading: Reading | None = None
        self._everyone: Reading | None = None
        self._seconds = 0.0
        self._reward_means: dict[str, float] = {}
        self._said_once: set[str] = set()
        self._tool_mask: list[list[int]] | None = None
        self._span_metrics = MetricBuffer()
        self._prompts_checked = False
        self._watch, self._cut_off_said = Watch(scheme), False
        # These two mask tokens inside TRL's loss by what only TRL computes.
        unseen = args.off_policy_mask_threshold is not None or args.top_entropy_quantile < 1.0
        # DPPO is no loss of TRL's.
        self._canary_due = getattr(args, "canary", True) and not unseen and args.loss_type not in DPPO
        self._logps: Tensor | None = None
        super().__init__(
            model=model,
            reward_funcs=[self._reward_function(name) for name in scheme.names],
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **options,
        )
        checks.check_environment_rewards(self.reward_func_names, scheme.objectives)
        if length is not None and options.get("rollout_func") is None and options.get("environment_factory") is None:
            checks.check_prompts(
                train_dataset["prompt"], template=bool(getattr(self.processing_class, "chat_template", None))
            )
        # The reward that TRL logs is the weighted sum, as what is trained is.
        self.reward_weights = torch.tensor([objective.weight for objective in scheme.objectives], dtype=torch.float32)
        self.vocabulary = Vocabulary.of(self._text_tokenizer, self.model)
        self.critic = None if critic is None else self._critic(critic)
        self.parts = parts_of(scheme.modes, "trl", self)
        self._critic_seconds = self._step_seconds = 0.0
        self.add_callback(GradientGuard(lambda: self.accelerator.scaler is not None))
        keep, report = getattr(args, "keep_rollouts", 0), getattr(args, "report", False)
        self.keeping = Keeping(self, keep_rollouts=keep, report=report) if keep or report else None
        if self.keeping is not None:
            self.add_callback(self.keeping)

    def _critic(self, config: CriticConfig) -> Critic:
        names, tokenizer = self.scheme.value_names, self._text_tokenizer
        if config.model is None:
            model = ValueModel.of_policy(self.model, names, config)
        else:
            model = ValueModel.load(config.model, names, config, tokenizer)
        size = self.args.per_device_train_batch_size
        return Critic(model, config, self.accelerator, micro_batch=size, gamma=self.scheme.gamma, seed=self.args.seed)

    # ------------------------------------------------------------------ rewards

    def _gather(self, table_nc: Tensor) -> Tensor:
        gathered: Any = self.accelerator.gather(table_nc.to(self.accelerator.device))
        return gathered.cpu()

    def _reward_function(self, name: str) -> Any:
        """The function TRL calls for an objective; the first one called reads for all, and what they return goes nowhere."""

        def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float]:
            if self._reading is None:
                extras = {key: columns.pop(key) for key in _TRL_KWARGS if key in columns}
                columns |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
                alone_n = torch.arange(len(completion_ids))  # whom each is compared with is known after the gather
                self._batch = Batch.jagged(completion_ids, alone_n, sampled=self._tool_mask, columns=columns, extras=extras)
                if has_turns(self._batch, self.scheme):
                    self._batch, self._turns = turn_rows(self._batch, self.scheme)
                self._reading = read(self._batch, self.scheme, self.vocabulary)
            return [0.0] * len(completion_ids)

        reward.__name__ = name
        return reward

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as around:
            for part in self.parts.values():
                around.enter_context(part.generating())
            generated = super()._generate(*args, **kwargs)
        self._tool_mask = generated[2]
        if not self._prompts_checked:
            for ids in generated[0]:
                end = self._text_tokenizer.decode(list(ids)[-64:], skip_special_tokens=False)
                checks.check_prefilled(end, self.scheme.layout)
            self._prompts_checked = True
        return generated

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        started = time.perf_counter()
        self._batch = self._reading = self._turns = None
        super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        reading: Any = self._reading
        several = self.accelerator.num_processes > 1 and self._turns is None  # processes have different numbers of turns
        everyone = Reading.unpack(self._gather(reading.pack()), self.scheme) if several else reading
        # What a completion left out is logged as what it stands for; a mean over the rest would praise leaving it out.
        turns = self._turns
        if turns is None:
            value_nm = completed(everyone.scores, self.scheme.objectives).float()
        else:
            value_sm = completed(reading.scores, self.scheme.objectives).float()
            value_nm = self._gather(of_completions(value_sm, turns.row_s, self.scheme, completions=len(completion_ids_list)))
        self._everyone = everyone
        self._reward_means = reward_means(value_nm, self.scheme.names)
        self._seconds = time.perf_counter() - started
        return value_nm.to(self.accelerator.device)

    # ------------------------------------------------------------------ credit

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        batch, reading, everyone, turns = self._batch, self._reading, self._everyone, self._turns
        self._batch = self._reading = self._everyone = self._turns = None
        assert batch is not None, "TRL scored no completions"
        assert reading is not None, "TRL scored no completions"
        assert everyone is not None, "TRL scored no completions"
        assert reading.spans is not None, "what this process read has spans"
        mode = "train" if self.model.training else "eval"
        batch = self._with_values(batch, reading, output, mode)
        started = time.perf_counter()
        mask_nt = loss_mask(output).bool().cpu()
        everyone, whole, here = self._whole(batch, reading, everyone, mode, completions=len(mask_nt), turns=turns)
        for part in self.parts.values():
            batch, whole = part.fill(batch, everyone, whole, here, output)
        with self._unmoved() if mode == "eval" else nullcontext():
            found = credit(everyone, whole, self.scheme)
        shown_n = self._by_completion(found, everyone, whole, len(mask_nt))
        self._say_once(log_credit(getattr(self, "_logs", {}), *shown_n, self.scheme))
        own = found.take(here)
        spans = restrict(reading.spans, mask_nt) if turns is None else restrict_turns(reading.spans, mask_nt, turns)
        advantages_nt = advantages(own, spans, self.scheme)
        trained_nt = advantages_nt if turns is None else put(advantages_nt, turns, like=mask_nt)
        output["advantages"] = trained_nt.to(output["completion_ids"].device)
        if int(output["num_items_in_batch"]) == 0:
            self._all_cut_off(len(mask_nt) * self.accelerator.num_processes)
        self._keep(mode, replace(batch, group_n=whole.group_n[here]), reading, spans, own, advantages_nt)
        shown = metrics(found, everyone, self.scheme, group_n=whole.group_n)
        shown["spanwise/seconds"] = self._seconds + time.perf_counter() - started
        self._span_metrics.add(mode, shown)
        if mode == "train":
            self.last_metrics = {**shown, **self._reward_means}
        told = self._say(reading, shown, mode)
        if mode == "train" and not found.has_signal:
            self._no_signal(explained=told)
        return output

    @torch.no_grad()
    def _with_logps(self, batch: Batch, output: dict[str, Any]) -> Batch:
        """The batch with the log-probabilities of its tokens under the policy and at the temperature that sampled it."""
        rows = sequences(output, batch)
        logp_nt = output.get("old_per_token_logps")
        if logp_nt is None:
            size = self.args.per_device_train_batch_size
            found = self._get_per_token_logps_and_entropies(self.model, rows.ids_nl, rows.attention_nl, rows.width, size)
            logp_nt, self._logps = found[0], None
        return replace(batch, logp_nt=logp_nt[:, : rows.width].float().cpu())

    def _with_values(self, batch: Batch, reading: Reading, output: dict[str, Any], mode: str) -> Batch:
        """The batch with all that the method needs of models: log-probabilities, and a critic's values before it is fitted."""
        if "logp_nt" in self.scheme.needs:
            batch = self._with_logps(batch, output)
        if self.critic is None:
            return batch
        started = time.perf_counter()
        ends = getattr(self, "eos_token_ids", None) or [self._text_tokenizer.eos_token_id]
        over = streams(reading, batch, self.scheme)
        learned = self.critic.learn(sequences(output, batch), over, cut_off(batch, ends), fit=mode == "train")
        self._span_metrics.add(mode, learned.metrics)
        self._critic_seconds += time.perf_counter() - started
        value_nts = learned.value_nts
        if over.names != ("return",):  # of an objective: outside its blocks it is of nothing
            value_nts = value_nts.masked_fill(~over.mask_snt.permute(1, 2, 0), torch.nan)
        return replace(batch, value_nt=value_nts, bootstrap_n=learned.bootstrap_ns)

    def _whole(
        self, batch: Batch, reading: Reading, everyone: Reading, mode: str, *, completions: int, turns: Turns | None
    ) -> tuple[Reading, Batch, slice]:
        """The batch of all processes, in their order, as TRL orders completions; TRL puts a prompt's completions together."""
        size = self.num_generations if mode == "train" else self.num_generations_eval
        rank = self.accelerator.process_index
        if turns is not None:
            return gathered_turns(batch, reading, self.scheme, completions=completions, size=size, rank=rank)
        here = slice(rank * completions, (rank + 1) * completions)
        group_n = torch.arange(len(everyone)) // size
        if everyone is reading:
            return reading, replace(batch, group_n=group_n), here
        if "mask_nt" not in self.scheme.needs:
            return everyone, Batch(group_n), here
        assert reading.spans is not None, "what this process read has spans"
        blocks_nt = reading.spans.block_nt.long() + 1  # padding is 0, and so is a token of no block
        block_nt = self._gather_wide(blocks_nt) - 1
        nowhere_nk = torch.zeros_like(everyone.length_nk)
        spans = Spans(self.scheme.layout.names, nowhere_nk, nowhere_nk, block_nt, everyone.fault_n)
        known = {name: getattr(batch, name) for name in ("value_nt", "logp_nt", "bootstrap_n", "ids_nt")}
        shared: dict[str, Any] = {name: None if value is None else self._gather_wide(value) for name, value in known.items()}
        return replace(everyone, spans=spans), Batch(group_n, mask_nt=block_nt >= 0, **shared), here

    def _by_completion(self, found: Credit, everyone: Reading, whole: Batch, completions: int) -> tuple[Credit, Tensor]:
        """Credit and blocks of whole completions, as TRL's table of them has it."""
        if whole.steps is None:
            return found, everyone.present_nk
        rows_s = whole.steps.trajectory_s
        return mean_credit(found, everyone, rows_s, completions=completions * self.accelerator.num_processes)

    def _gather_wide(self, value_nt: Tensor) -> Tensor:
        """What processes have of their tokens, whose number differs."""
        wide: Any = self.accelerator.pad_across_processes(value_nt.to(self.accelerator.device), dim=1)
        return self._gather(wide)

    def _keep(self, mode: str, batch: Batch, reading: Reading, spans: Spans, own: Credit, adv_nt: Tensor) -> None:
        assert batch.ids_nt is not None, "the batch of a trainer has token ids"
        assert batch.mask_nt is not None, "the batch of a trainer has a mask"
        spare = (0, adv_nt.shape[1] - batch.ids_nt.shape[1])  # pad_to_multiple_of
        told = ("prompts", "completions", "completion_ids")
        self.last_rollouts = Rollouts(
            mode=mode,
            step=self.state.global_step,
            method=self.scheme.method,
            group_n=batch.group_n,
            prompts=list(batch.columns["prompts"]),
            completions=list(batch.columns["completions"]),
            columns={name: list(values) for name, values in batch.columns.items() if name not in told},
            ids_nt=pad(batch.ids_nt, spare),
            mask_nt=pad(batch.mask_nt, spare),
            text=reading.text or [],
            spans=spans,
            scores=reading.scores,
            credit=own,
            advantages_nt=adv_nt,
            value_nt=None if batch.value_nt is None else pad(batch.value_nt, (0, 0, *spare), value=torch.nan),
            logp_nt=None if batch.logp_nt is None else pad(batch.logp_nt, spare, value=torch.nan),
            value_names=self.scheme.value_names,
            self_reward_n=batch.self_reward_n,
        )

    def _all_cut_off(self, completions: int) -> None:
        if not self._cut_off_said and self.accelerator.is_main_process:
            warnings.warn(
                f"Step {self.state.global_step}: all {completions} completions were cut off at max_completion_length="
                f"{self.max_completion_length}, and mask_truncated_completions leaves those out of the loss, so nothing is learned "
                "from them. Set max_completion_length up, or mask_truncated_completions=False.",
                UserWarning,
                stacklevel=2,
            )
        self._cut_off_said = True

    def _say(self, reading: Reading, shown: dict[str, float], mode: str) -> bool:
        """Warn of what is not as the scheme takes it to be, each thing once; whether that leaves an objective without rewards."""
        sentences, unscored = self._watch.of_reading(reading)
        if mode == "train":
            sentences += self._watch.of_batch(shown, step=self.state.global_step)
        for sentence in sentences:
            if self.accelerator.is_main_process:
                warnings.warn(f"Step {self.state.global_step}: {sentence}", UserWarning, stacklevel=2)
        return unscored

    def _say_once(self, sentence: str) -> None:
        if sentence and sentence not in self._said_once and self.accelerator.is_main_process:
            warnings.warn(sentence, UserWarning, stacklevel=2)
        self._said_once.add(sentence)

    def _no_signal(self, *, explained: bool) -> None:
        self.zero_batches += 1
        if self.zero_batches == 1 and self.accelerator.is_main_process:
            names = ", ".join(f"'{name}'" for name in self.scheme.names)
            reason = (
                "the warning before this one says why"
                if explained
                else "the prompts are too easy or too hard, or a reward is constant"
            )
            warnings.warn(
                f"Every advantage of the batch at step {self.state.global_step} is zero: under no objective ({names}) did a "
                "completion differ from what it is compared with, so nothing is learned from it. If this lasts (see "
                f"credit/no_signal), {reason}.",
                UserWarning,
                stacklevel=2,
            )

    # ------------------------------------------------------------------ loss

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        """TRL's loss, with its normaliser undone in the advantages, plus the KL term, which has a normaliser of its own."""
        train = self.model.training
        if train and self._critic_only:
            return next(p for p in model.parameters() if p.requires_grad).sum() * 0.0
        mask_bt = loss_mask(inputs)
        factor_b1 = fold_factor(
            mask_bt,
            loss_type=self.loss_type,
            max_completion_length=self.max_completion_length,
            num_items=inputs["num_items_in_batch"],
            processes=self.accelerator.num_processes,
            steps_per_generation=self.args.steps_per_generation if train else 1,
        )
        own = self.loss_type if self.loss_type in DPPO else None
        advantages_bt = inputs["advantages"] * factor_b1 * float(own is None)
        watch = self._canary_due and train and torch.is_grad_enabled()
        advantages_bt.requires_grad_(watch)
        accumulation = self.current_gradient_accumulation_steps if train else 1
        beta, self._logps = self.beta, None
        self.beta = 0.0  # TRL would divide the KL as it divides the policy term, and nothing undoes it there
        self.loss_type = "sapo" if own else self.loss_type  # of advantages that are all 0
        try:
            loss = super().compute_loss(model, {**inputs, "advantages": advantages_bt}, return_outputs, num_items_in_batch)
        finally:
            self.beta, logps_bt, self._logps = beta, self._logps, None
            self.loss_type = own or self.loss_type
        if own is not None:
            loss = loss + self._dppo(logps_bt, inputs, mask_bt, own) / accumulation
        check_loss(loss, logps_bt, inputs, mask_bt, self._text_tokenizer, step=self.state.global_step)
        if watch and logps_bt is not None:
            check_own_advantage(
                loss,
                logps_bt,
                advantages_bt,
                mask_bt,
                factor_b1=factor_b1,
                accumulation=accumulation,
                height_bt=self._slope(logps_bt.detach(), inputs),
            )
            self._canary_due = False
        if beta != 0.0:
            loss = loss + beta * self._kl(logps_bt, inputs, mask_bt) / accumulation
        for part in self.parts.values():
            more, shown = part.loss(inputs)
            loss = loss + more / accumulation
            self._span_metrics.add("train" if train else "eval", shown)
        return loss

    def _dppo(self, logps_bt: Tensor | None, inputs: Any, mask_bt: Tensor, loss_type: str) -> Tensor:
        """The policy term of a micro-batch under DPPO, logged as TRL logs its own."""
        assert logps_bt is not None, "TRL computed no log-probabilities"
        deltas = self.epsilon_low, self.epsilon_high
        term, dropped = dppo_term(logps_bt, inputs, mask_bt, loss_type=loss_type, deltas=deltas)
        mode = "train" if self.model.training else "eval"
        self._span_metrics.add(mode, {"dppo/dropped": float(dropped)})
        if self._metrics[mode]["policy_loss"]:  # TRL logs it beside an entropy bonus
            self._metrics[mode]["policy_loss"][-1] = float(term.detach())
        return term

    def _kl(self, logps_bt: Tensor | None, inputs: Any, mask_bt: Tensor) -> Tensor:
        """The KL term of a micro-batch; its mean over the tokens of all processes is logged, as TRL does."""
        assert logps_bt is not None, "TRL computed no log-probabilities"
        kl_bt = token_kl(
            logps_bt,
            inputs["ref_per_token_logps"],
            mask_bt,
            old_bt=inputs.get("old_per_token_logps", logps_bt.detach()) if self.args.use_bias_correction_kl else None,
        )
        totals = torch.stack([kl_bt.detach().sum(), mask_bt.sum().to(kl_bt.dtype)])
        sums: Any = self.accelerator.reduce(totals, reduction="sum")
        self._span_metrics.add("train" if self.model.training else "eval", {"kl": float(sums[0] / sums[1].clamp(min=1))})
        return kl_term(kl_bt, mask_bt)

    def _slope(self, logps_bt: Tensor, inputs: Any) -> Tensor:
        """What the canary expects of each token."""
        old_bt = inputs.get("old_per_token_logps")
        slope_bt = surrogate_slope(
            torch.ones_like(logps_bt) if old_bt is None else (logps_bt - old_bt).exp(),
            inputs["advantages"],
            loss_type=self.loss_type,
            clip=(self.epsilon_low, self.epsilon_high),
            delta=self.args.delta,
            sapo_temperatures=(self.args.sapo_temperature_pos, self.args.sapo_temperature_neg),
        )
        sampler_ratio = inputs.get("importance_sampling_ratio")
        return slope_bt if sampler_ratio is None else slope_bt * sampler_ratio

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        score = super()._get_per_token_logps_and_entropies
        for part in self.parts.values():
            score = partial(part.forward, score)
        result = score(*args, **kwargs)
        self._logps = result[0]
        return result

    @property
    def _critic_only(self) -> bool:
        """Whether the policy waits for its critic still."""
        return self.critic is not None and self.critic.batches <= self.critic.config.policy_training_start_step

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's training; where the run folder is asked for, it is complete however training ends."""
        with nullcontext() if self.keeping is None else self.keeping.running():
            return super().train(*args, **kwargs)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """A step of TRL's; while the critic alone is fitted, one that leaves the policy without gradients."""
        started = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._critic_only:
            model.zero_grad(set_to_none=True)  # zeros would still decay the weights
        self._step_seconds += time.perf_counter() - started
        return loss

    # ------------------------------------------------------------------ log

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """TRL's log line, with the credit metrics of the batches since the last one."""
        if self.critic is not None and self.model.training and self._step_seconds > self._critic_seconds > 0:
            logs["critic/share"] = self._critic_seconds / (self._step_seconds - self._critic_seconds)
            self._critic_seconds = self._step_seconds = 0.0
        logs.update(self._span_metrics.flush("train" if self.model.training else "eval"))
        super().log(logs, start_time)
