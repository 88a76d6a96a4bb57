"""`SpanGRPOTrainer`: TRL's GRPO trainer, with an advantage for every span instead of one for the completion."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import trl
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from spanwise.credit import assign, spread
from spanwise.engines.trl import checks
from spanwise.engines.trl.batch import LocalBatch, loss_mask, pack, pad_tokens, restrict, rows, unpack
from spanwise.engines.trl.canary import check_own_advantage, surrogate_slope
from spanwise.engines.trl.config import SpanGRPOConfig, credit_options, parse_per
from spanwise.engines.trl.fold import fold_factor
from spanwise.engines.trl.metrics import MetricBuffer, credit_metrics, has_signal
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.rollouts import Rollouts
from spanwise.score import check_objectives, score_one
from spanwise.segment import Vocabulary, segment
from spanwise.types import Credit, Scores, Spans

#: What TRL passes to a reward function besides prompts, completions and dataset columns.
_TRL_KWARGS = ("trainer_state", "log_extra", "log_metric", "environments")


class SpanGRPOTrainer(GRPOTrainer):
    """TRL's `GRPOTrainer` that pays every span of a completion for what that span controls.

    Everything TRL offers stays as it is: generation, vLLM, tools, PEFT, accelerate, logging, resume. Rewards come from
    `objectives`, each of which names the blocks it pays; blocks come from `layout`. The loss of every `loss_type` in
    `LOSS_TYPES` becomes the mean over completions of the sum over tokens of advantage times surrogate.

    Args:
        model: as in `GRPOTrainer`.
        reward_funcs: must stay empty: the reward functions are built from the objectives.
        args: a `SpanGRPOConfig`, or a plain `GRPOConfig`.
        train_dataset, eval_dataset, processing_class: as in `GRPOTrainer`.
        layout: the blocks of a completion and the tags each is made of.
        objectives: the rewards, the blocks each pays and its baseline, in an order in which `given` looks back.
        estimator: with `sum_first`, what turns the sum of the rewards into one advantage per completion: a function (reward_n,
            group_n, ...) or the name of a registered one; it may ask for `length_n`. None: the objectives' baseline.
        whiten: scale the credit of each block to a standard deviation of 1 over the batch (GDPO).
        options: any further argument of `GRPOTrainer` (`callbacks`, `peft_config`, `tools`, `rollout_func`, ...).

    Attributes:
        last_rollouts: the `Rollouts` of the last generation batch of this process, None before the first.
        zero_batches: how many training batches had no credit other than 0.

    Raises:
        LayoutError, RecipeError, DataError, SpanwiseError: what cannot work is refused before training starts.
    """

    _tag_names = ["trl", "grpo", "spanwise"]  # noqa: RUF012 - TRL's own class attribute
    _name = "SpanGRPO"
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
        layout: Layout,
        objectives: Sequence[Objective],
        estimator: str | Callable[..., Tensor] | None = None,
        whiten: bool = False,
        **options: Any,
    ) -> None:
        checks.check_version(trl.__version__)
        check_objectives(objectives, layout)
        checks.check_callables(objectives, reward_funcs)
        if args is None:
            name = model if isinstance(model, str) else str(getattr(model.config, "_name_or_path", ""))
            args = SpanGRPOConfig(f"{name.split('/')[-1] or 'model'}-SpanGRPO")
        checks.check_config(args, trl_version=trl.__version__)
        checks.check_columns(objectives, getattr(train_dataset, "column_names", None))
        length = len(train_dataset) if hasattr(train_dataset, "__len__") else None
        checks.check_size(length, needed=(args.generation_batch_size or 0) // (args.num_generations or 1))
        self.layout = layout
        self.objectives = tuple(objectives)
        self.estimator = checks.check_estimator(estimator, sum_first=getattr(args, "sum_first", False))
        self.whiten = whiten
        self.last_rollouts: Rollouts | None = None
        self.zero_batches = 0
        self._credit_options = credit_options(args)
        self._per: Any = parse_per(getattr(args, "per", "block"))
        self._batch: LocalBatch | None = None
        self._tool_mask: list[list[int]] | None = None
        self._span_metrics = MetricBuffer()
        self._prompts_checked = False
        # These two mask tokens inside TRL's loss by what only TRL computes.
        unseen = args.off_policy_mask_threshold is not None or args.top_entropy_quantile < 1.0
        self._canary_due = getattr(args, "canary", True) and not unseen
        self._canary_logps: Tensor | None = None
        super().__init__(
            model=model,
            reward_funcs=[self._reward_function(objective) for objective in objectives],
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **options,
        )
        checks.check_environment_rewards(self.reward_func_names, objectives)
        # Models often have more embedding rows than their tokenizer has tokens, and can sample them.
        size = getattr(self.model.config.get_text_config(), "vocab_size", None)
        self.vocabulary = Vocabulary.from_tokenizer(self._text_tokenizer, size=size)

    @property
    def _text_tokenizer(self) -> Any:
        # A processor holds the tokenizer of a multimodal model.
        return getattr(self.processing_class, "tokenizer", self.processing_class)

    # ------------------------------------------------------------------ rewards

    def _reward_function(self, objective: Objective) -> Callable[..., list[float | None]]:
        """The function TRL calls, gathers and logs under the objective's name."""

        def reward(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
            batch = self._batch
            assert batch is not None, "TRL asked for a reward outside _calculate_rewards"
            given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns}
            result = score_one(objective, batch.text, columns=given, scored=batch.rewards)
            batch.rewards[objective.name] = result
            values = torch.as_tensor(result.value_n, dtype=torch.float64)
            return [None if value != value else value for value in values.tolist()]

        reward.__name__ = objective.name
        return reward

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        self._tool_mask = generated[2]
        if not self._prompts_checked:
            for ids in generated[0]:
                end = self._text_tokenizer.decode(list(ids)[-64:], skip_special_tokens=False)
                checks.check_prefilled(end, self.layout)
            self._prompts_checked = True
        return generated

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        started = time.perf_counter()
        ids_nt, mask_nt = pad_tokens(completion_ids_list, self._tool_mask)
        spans, text = segment(ids_nt, mask_nt, layout=self.layout, vocabulary=self.vocabulary)
        columns = {name: [row[name] for row in inputs] for name in inputs[0] if name not in ("prompt", *_TRL_KWARGS)}
        self._batch = LocalBatch(prompts, completions, columns, ids_nt, mask_nt, spans, text)
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._batch.seconds += time.perf_counter() - started
        return rewards

    # ------------------------------------------------------------------ credit

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        started = time.perf_counter()
        batch, self._batch = self._batch, None
        assert batch is not None, "TRL scored no completions"
        mode = "train" if self.model.training else "eval"
        table = self._gather(pack([batch.rewards[o.name] for o in self.objectives], batch.spans))
        names = [o.name for o in self.objectives]
        scores, length_nk, fault_n = unpack(table, names, len(self.layout.names))
        present_nk = length_nk > 0
        group_size = self.num_generations if mode == "train" else self.num_generations_eval
        credit = assign(
            scores,
            torch.arange(len(table)) // group_size,
            present_nk,
            objectives=self.objectives,
            block_names=self.layout.names,
            estimator=self.estimator,
            inputs={"length_n": length_nk.sum(dim=1)},
            whiten=self.whiten,
            **self._credit_options,
        )
        first = self.accelerator.process_index * len(batch.text)
        local_credit, local_scores = rows(credit, scores, slice(first, first + len(batch.text)))
        spans = restrict(batch.spans, loss_mask(output).bool().cpu())
        advantages_nt = spread(local_credit, spans, per=self._per)
        output["advantages"] = advantages_nt.to(output["completion_ids"].device)
        self._keep(mode, batch, spans, local_scores, local_credit, advantages_nt)
        metrics = credit_metrics(credit, present_nk, fault_n, block_names=self.layout.names, objective_names=names)
        metrics["spanwise/seconds"] = batch.seconds + time.perf_counter() - started
        self._span_metrics.add(mode, metrics)
        if mode == "train" and not has_signal(credit):
            self._no_signal()
        return output

    def _gather(self, table_nc: Tensor) -> Tensor:
        """The table of all ranks, in rank order, as TRL orders completions."""
        if self.accelerator.num_processes == 1:
            return table_nc
        gathered: Any = self.accelerator.gather(table_nc.to(self.accelerator.device))
        return gathered.cpu()

    def _keep(
        self, mode: str, batch: LocalBatch, spans: Spans, scores: Scores, credit: Credit, advantages_nt: Tensor
    ) -> None:
        spare = (0, advantages_nt.shape[1] - batch.ids_nt.shape[1])  # pad_to_multiple_of
        row_n = torch.arange(len(batch.text)) + self.accelerator.process_index * len(batch.text)
        self.last_rollouts = Rollouts(
            mode=mode,
            step=self.state.global_step,
            group_n=row_n // (self.num_generations if mode == "train" else self.num_generations_eval),
            prompts=list(batch.prompts),
            completions=list(batch.completions),
            columns=batch.columns,
            ids_nt=pad(batch.ids_nt, spare),
            mask_nt=pad(batch.mask_nt, spare),
            text=batch.text,
            spans=spans,
            scores=scores,
            credit=credit,
            advantages_nt=advantages_nt,
        )

    def _no_signal(self) -> None:
        self.zero_batches += 1
        if self.zero_batches == 1 and self.accelerator.is_main_process:
            names = ", ".join(f"'{o.name}'" for o in self.objectives)
            warnings.warn(
                f"Every advantage of the batch at step {self.state.global_step} is zero: under no objective ({names}) did a "
                "completion differ from what it is compared with, so nothing is learned from it. If this lasts (see "
                "credit/no_signal), the prompts are too easy or too hard, or a reward is constant.",
                UserWarning,
                stacklevel=2,
            )

    # ------------------------------------------------------------------ loss

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        """TRL's loss, with its normaliser undone in the advantages."""
        train = self.model.training
        mask_bt = loss_mask(inputs)
        factor_b1 = fold_factor(
            mask_bt,
            loss_type=self.loss_type,
            max_completion_length=self.max_completion_length,
            num_items=inputs["num_items_in_batch"],
            processes=self.accelerator.num_processes,
            steps_per_generation=self.args.steps_per_generation if train else 1,
        )
        advantages_bt = inputs["advantages"] * factor_b1
        watch = self._canary_due and train and torch.is_grad_enabled()
        advantages_bt.requires_grad_(watch)
        self._canary_logps = None
        loss = super().compute_loss(model, {**inputs, "advantages": advantages_bt}, return_outputs, num_items_in_batch)
        if watch and self._canary_logps is not None:
            check_own_advantage(
                loss,
                self._canary_logps,
                advantages_bt,
                mask_bt,
                factor_b1=factor_b1,
                accumulation=self.current_gradient_accumulation_steps,
                height_bt=self._slope(self._canary_logps.detach(), inputs),
            )
            self._canary_due = False
        self._canary_logps = None
        return loss

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
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._canary_due and result[0].requires_grad:
            self._canary_logps = result[0]
        return result

    # ------------------------------------------------------------------ log

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """TRL's log line, with the credit metrics of the batches since the last one."""
        logs.update(self._span_metrics.flush("train" if self.model.training else "eval"))
        super().log(logs, start_time)
