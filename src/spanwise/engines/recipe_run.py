"""`RecipeRun`: compute a recipe's credit for trainers that offer only hooks."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from transformers import AutoTokenizer

from spanwise.engines.shared import RunRecord, model_vocabulary_size, say
from spanwise.errors import DataError, first_line
from spanwise.recipe import RecipeRule
from spanwise.rollouts import Rollouts
from spanwise.segment import Vocabulary
from spanwise.step import Ranks, ReadBatch, Step, StepResult


class RecipeRun:
    """Computes a recipe's credit for a trainer's batches, and writes the recipe's run folder."""

    def __init__(
        self,
        rule: RecipeRule,
        tokenizer: Any,
        vocabulary: Vocabulary,
        *,
        ranks: Ranks | None = None,
        resumes: bool = False,  # True if the trainer numbers its batches.
        **settings: Any,  # The trainer's settings for `recipe.yaml`.
    ) -> None:
        recipe = rule.recipe
        self.scheme, self.tokenizer, self.settings = rule.scheme, tokenizer, settings
        self.step = Step(self.scheme, vocabulary, ranks=ranks)
        self.batches = 0
        self.record = None
        if recipe.output:
            self.record = RunRecord(recipe.output, keep_rollouts=recipe.keep_rollouts, report=False, option="output")
            if not resumes:
                self.record.check({}, step=None)

    @staticmethod
    def of(rule: RecipeRule, *, model: str, tokenizer: str | None = None, **options: Any) -> RecipeRun:
        """Build a `RecipeRun`. `tokenizer` names a tokenizer other than the model's."""
        tokenizer_source = tokenizer or model
        try:
            loaded_tokenizer = AutoTokenizer.from_pretrained(tokenizer_source, trust_remote_code=False)
        except Exception as error:  # transformers raises many types of errors for an unreadable tokenizer
            raise DataError(f"The tokenizer '{tokenizer_source}' cannot be read: {first_line(error)}.") from error
        vocabulary = Vocabulary.from_tokenizer(loaded_tokenizer, size=model_vocabulary_size(model))
        return RecipeRun(rule, loaded_tokenizer, vocabulary, model=model, **options)

    def finish(
        self, read_batch: ReadBatch, *, number: int | None = None, learn: bool = True, **options: Any
    ) -> tuple[Float[Tensor, "n t"], dict[str, float]]:
        """Compute the credit of a scored batch, and write the run folder. Return advantages and metrics.

        `read_batch` has each row's prompt in the column `prompts`; without the trainer's `number` the batches are counted from 1.
        """
        step_result = self.step.finish(read_batch, learn=learn, number=number, **options)
        if self.step.ranks is None or self.step.ranks.rank == 0:
            say(*step_result.warnings)
        if learn:
            self.batches = self.batches + 1 if number is None else number
            if self.record is not None:
                self._keep(self.record, step_result)
        return read_batch.put(step_result.advantages_nt), step_result.metrics

    def _keep(self, record: RunRecord, result: StepResult) -> None:
        """Write the metrics of a batch to the run folder, and the rollouts if they are due."""

        def rollouts() -> Rollouts:
            batch_columns, group_of_row = result.own.batch.columns, result.own.batch.group_n.tolist()
            prompt_by_group: dict[int, Any] = {}
            for group, prompt in zip(group_of_row, batch_columns["prompts"], strict=True):
                prompt_by_group.setdefault(group, prompt)  # keep the first prompt, because later turns have longer prompts
            row_prompts = [prompt_by_group[group] for group in group_of_row]
            return self.step.rollouts(result, number=self.batches, prompts=row_prompts, columns=batch_columns)

        batch = result.own.everyone.batch  # the rows of all processes
        rollout_count = len(batch.group_n if batch.steps is None else batch.steps.trajectory_s.unique())
        prompt_count = max(1, len(batch.group_n.unique()))
        group_size = max(2, rollout_count // prompt_count)
        record.add_batch(
            self.batches,
            result,
            self.scheme,
            recipe=record.recipe(self.scheme, prompts=prompt_count, group_size=group_size, **self.settings),
            tokenizer=self.tokenizer,
            rollouts=rollouts,
            ranks=self.step.ranks,
        )
        record.flush()
