"""A SkyRL run leaves the folder behind that `spanwise train` does: `trainer.algorithm.spanwise.folder`."""

from typing import Any

from spanwise.engines.keep import RunRecord, prompt_texts
from spanwise.rollouts import Rollouts
from spanwise.step import StepResult

#: What a report reads of an update -> what SkyRL calls it.
UPDATE = {
    "loss": "policy/final_loss",
    "entropy": "policy/policy_entropy",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "policy/policy_lr",
    "completions/mean_length": "generate/avg_num_tokens",
}


def keep(trainer: Any, record: RunRecord, result: StepResult) -> None:
    """Keep a batch of a `SpanRayPPOTrainer`."""
    step, sampled = trainer.global_step, trainer.last_rows

    def recipe() -> dict[str, Any]:
        cfg = trainer.cfg
        return record.recipe(
            trainer.scheme,
            model=cfg.trainer.policy.model.path,
            steps=trainer.total_training_steps,
            prompts=cfg.trainer.train_batch_size,
            group_size=max(2, cfg.generator.n_samples_per_prompt),
            temperature=float(cfg.generator.sampling_params.temperature),
            seed=cfg.trainer.seed,
        )

    def rollouts() -> Rollouts:
        texts = prompt_texts(trainer.tokenizer, sampled.uids, sampled.output["prompt_token_ids"])
        of_group = list(texts.values())  # groups are numbered as they appear
        prompts = [of_group[group] for group in result.own.batch.group_n.tolist()]
        return trainer.step.rollouts(result, number=step, prompts=prompts)

    record.add_batch(step, result, trainer.scheme, recipe=recipe, tokenizer=trainer.tokenizer, rollouts=rollouts)
