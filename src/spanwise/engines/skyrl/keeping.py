"""A SkyRL run leaves the folder behind that `spanwise train` does: `trainer.algorithm.spanwise.folder`."""

from typing import Any

from spanwise.batch import Batch
from spanwise.engines.keep import RunRecord, own_recipe
from spanwise.step import StepResult

#: What a report reads of an update -> what SkyRL calls it.
UPDATE = {
    "loss": "policy/final_loss",
    "entropy": "policy/policy_entropy",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "policy/policy_lr",
    "completions/mean_length": "generate/avg_num_tokens",
}


def record_of(cfg: Any) -> RunRecord | None:
    """The writer of the folder that a configuration names; None: it names none."""
    own = cfg.trainer.algorithm.spanwise
    if own.folder is None:
        return None
    option = "trainer.algorithm.spanwise.folder"
    return RunRecord(own.folder, keep_rollouts=own.keep_rollouts, report=own.report, output=option)


def keep(trainer: Any, record: RunRecord, result: StepResult) -> None:
    """Keep a batch: a row is what was read as one, a completion or a turn of a rollout."""
    step, own = trainer.global_step, result.own
    record.begin_with(lambda: recipe_of(trainer), step=step - 1, tokenizer=trainer.tokenizer)
    record.add_batch(step, own.reading, result.metrics, trainer.scheme)
    if record.wants(step):
        made = trainer.step.rollouts(result, number=step, prompts=prompts_of(trainer, own.batch))
        record.write_batch(made, own.batch.steps)


def prompts_of(trainer: Any, batch: Batch) -> list[str]:
    """What the rows of a group answer: that of its first row, where a rollout begins; groups are numbered as they appear."""
    held = trainer.last_rows
    first: dict[str, Any] = {}
    for uid, ids in zip(held.uids, held.output["prompt_token_ids"], strict=True):
        first.setdefault(uid, ids)
    said = [trainer.tokenizer.decode(ids, skip_special_tokens=False) for ids in first.values()]
    return [said[group] for group in batch.group_n.tolist()]


def recipe_of(trainer: Any) -> dict[str, Any]:
    """The `recipe.yaml` of the run: its rule of credit, and what SkyRL says that a recipe has a field for."""
    cfg = trainer.cfg
    own = cfg.trainer.algorithm.spanwise
    return own_recipe(
        trainer.scheme,
        model=cfg.trainer.policy.model.path,
        steps=trainer.total_training_steps,
        prompts=cfg.trainer.train_batch_size,
        group_size=max(2, cfg.generator.n_samples_per_prompt),
        temperature=float(cfg.generator.sampling_params.temperature),
        seed=cfg.trainer.seed,
        keep_rollouts=own.keep_rollouts,
        report=own.report,
    )
