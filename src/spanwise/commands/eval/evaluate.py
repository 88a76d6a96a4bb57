"""Evaluate a policy on held-out prompts: sample, segment, score, compute figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from spanwise.commands.shared.samples import Samples, unmeasured
from spanwise.commands.shared.task import model_and_task, run_above, task_roller
from spanwise.credit.spread import fill_missing
from spanwise.engines.sample import end_ids
from spanwise.layout import any_index
from spanwise.mode import Mode, part_class
from spanwise.objective import Objective
from spanwise.recipe import Recipe, scheme_of
from spanwise.score import score_all
from spanwise.score.fields import gold_there
from spanwise.score.foreign import completion_after
from spanwise.score.reward import Columns, Texts
from spanwise.tasks import Task
from spanwise.tasks.digits import is_refusal
from spanwise.tasks.embedded import stated_confidences
from spanwise.types import Status


def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    recipe: Recipe,
    *,
    prompts: int,
    samples: int,
    seed: int = 1,  # all evaluations share a seed, so that they differ only by the policy
    scored: Mode | None = None,
    state: Any = None,  # the trainer's state, for reward functions; None outside of training
) -> Samples:
    """Sample completions of held-out prompts, and judge their answers."""
    answer_tags = recipe.answer_tags
    prompt_rows = task.evaluation.select(range(min(prompts, len(task.evaluation))))
    is_digits_task = recipe.task.startswith("digits")
    roller = task_roller(model, tokenizer, task, recipe)
    ids_nt, mask_nt, row_n = roller.completions(prompt_rows, samples=samples, seed=seed)
    spans, texts = roller.read(ids_nt, mask_nt)
    answering_blocks = [name for name, keys in task.layout.keys.items() if answer_tags["answer"] in keys]
    unknown_verdict_n = torch.full((len(texts),), torch.nan, dtype=torch.float64)
    verdict_by_block = dict.fromkeys(answering_blocks, unknown_verdict_n)
    for name in answering_blocks if roller.verdict_options.get("column", "answer") in prompt_rows.column_names else ():
        objective = Objective("correct", pays=(name,), options=roller.verdict_options)
        verdict_n = roller.rewards(prompt_rows, texts, row_n.tolist(), objective)
        has_block_n = torch.tensor([blocks.get(name) is not None for blocks in texts])
        verdict_by_block[name] = torch.where(has_block_n, verdict_n, 0.0)  # a missing block counts as wrong
    reward_by_objective = dict[str, Tensor]()
    if not is_digits_task:  # for the task `digits`, accuracy and calibration already cover every reward
        completion_ids = [ids_t[mask_t].tolist() for ids_t, mask_t in zip(ids_nt, mask_nt, strict=True)]
        prompts_n = [prompt_rows["prompt"][row] for row in row_n.tolist()]
        completion_texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        trainer_arguments = {  # reward functions get completions without the end token, as in TRL
            "prompts": prompts_n,
            "completions": [completion_after(*pair) for pair in zip(prompts_n, completion_texts, strict=True)],
            "completion_ids": completion_ids,
            **dict.fromkeys(("log_metric", "log_extra"), lambda *_, **__: None),
            **({} if state is None else {"trainer_state": state}),
        }
        reward_columns = roller.columns(prompt_rows, row_n.tolist()) | trainer_arguments
        objectives = scheme_of(recipe, task.layout, roller.limit).objectives
        reward_by_objective = compute_rewards(objectives, texts, reward_columns)
    score_n = None
    if scored is not None:
        score_reader = part_class(scored, "model")(scored, model, tokenizer, end_ids(model, tokenizer))
        prompt_ids_n = [ids for ids in roller.prompt_ids(prompt_rows) for _ in range(samples)]
        score_n = score_reader.scores(prompt_ids_n, ids_nt, mask_nt, temperature=recipe.temperature).double()
    answers = {name: [(blocks.get(name) or {}).get(answer_tags["answer"]) for blocks in texts] for name in answering_blocks}
    first_block_answers = next(iter(answers.values()), [None] * len(texts))
    refusal_n = torch.tensor([is_refusal(answer) for answer in first_block_answers]) if is_digits_task else None
    confidence_n = stated_confidences(texts, task.layout.names[-1], task.layout, tag=answer_tags["confidence"])
    is_well_formed_n = spans.fault_n == 0
    return Samples(row_n, answers, verdict_by_block, confidence_n, is_well_formed_n, refusal_n, score_n, reward_by_objective)


def compute_rewards(objectives: Sequence[Objective], text: Texts, columns: Columns) -> dict[str, Tensor]:
    """Compute the reward of each completion under each objective. A missing block gets the objective's `if_missing`."""
    scores = score_all(objectives, text, columns=columns)
    filled_reward_nm = fill_missing(scores, objectives)
    # A list element that the completion left out is wrong. Elements beyond the gold list do not count.
    for m, objective in enumerate(objectives):
        is_list_element = any_index(objective.name) != objective.name
        if is_list_element and (is_in_gold_n := gold_there(objective, columns)) is not None:
            reward_n = filled_reward_nm[:, m]
            is_omitted_n = reward_n.isnan() & (scores.status_nm[:, m] == int(Status.ABSENT))
            filled_reward_nm[:, m] = reward_n.masked_fill(is_omitted_n, 0.0).masked_fill(~is_in_gold_n, torch.nan)
    return dict(zip(scores.names, filled_reward_nm.T, strict=True))


def evaluate_folder(
    model_folder: Path, recipe: Recipe, *, prompts: int, samples: int, seed: int, console: Console
) -> tuple[Samples, dict[str, str]]:
    """Evaluate a saved model on a recipe's held-out prompts. Return samples, and reasons for missing figures."""
    folders = (model_folder, *run_above(model_folder))
    score_mode = next((mode.as_trained(folders) for mode in recipe.modes.values() if mode.judge is not None), None)
    model, tokenizer, task = model_and_task(model_folder, recipe, console)
    evaluation = evaluate(model, tokenizer, task, recipe, prompts=prompts, samples=samples, seed=seed, scored=score_mode)
    return evaluation, unmeasured(task.layout, recipe.answer_tags, scored=score_mode is not None)
