"""Evaluation on held-out prompts: sample, segment, score, figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from spanwise.commands.shared.samples import Samples, unmeasured
from spanwise.commands.shared.task import model_and_task, run_above
from spanwise.engines.sample import end_ids, prompt_ids
from spanwise.fidelity.rerolls import Roller
from spanwise.mode import Mode, part_class
from spanwise.objective import Objective
from spanwise.recipe import Recipe
from spanwise.tasks import Task, is_refusal
from spanwise.tasks.task import stated_confidences


def evaluate(
    model: Any,
    tokenizer: Any,
    task: Task,
    recipe: Recipe,
    *,
    prompts: int,
    samples: int,
    seed: int = 1,
    scored: Mode | None = None,
) -> Samples:
    """Sample the first held-out prompts and read what the completions say; `.figures()` of it is the evaluation.

    The seed is the same in every evaluation, so that differences between checkpoints are not the dice's.

    Edge cases:
        Fewer held-out prompts than asked for: all there are. No block with the answer's tag: no verdict, NaN.
    """
    tags, inside = recipe.answer_tags, task.layout.keys
    rows = task.evaluation.select(range(min(prompts, len(task.evaluation))))
    longest = recipe.max_completion_length or task.max_completion_length
    roller = Roller(model, tokenizer, task, recipe.temperature, longest)
    ids_nt, mask_nt, row_n = roller.completions(rows, samples=samples, seed=seed)
    spans, text = roller.read(ids_nt, mask_nt)
    answering = [name for name in task.layout.names if tags["answer"] in inside[name]] or [task.layout.names[0]]
    options = {"tag": tags["answer"], **recipe.verifier}
    correct = dict.fromkeys(answering, torch.full((len(text),), torch.nan, dtype=torch.float64))
    for name in answering:
        if options["tag"] in inside[name] and "answer" in rows.column_names:
            right_n = roller.rewards(rows, text, row_n.tolist(), Objective("correct", pays=(name,), options=options))
            there_n = torch.tensor([entry.get(name) is not None for entry in text])  # without the block nothing is solved
            correct[name] = torch.where(there_n, right_n, 0.0)
    score_n = None
    if scored is not None:
        reader = part_class(scored, "model")(scored, model, tokenizer, end_ids(model, tokenizer))
        starts = [ids for ids in prompt_ids(tokenizer, rows["prompt"][:]) for _ in range(samples)]
        score_n = reader.scores(starts, ids_nt, mask_nt, temperature=recipe.temperature).double()
    return Samples(
        row_n,
        {name: [(entry.get(name) or {}).get(tags["answer"]) for entry in text] for name in answering},
        correct,
        stated_confidences(text, task.layout.names[-1], task.layout, tag=tags["confidence"]),
        spans.fault_n == 0,
        torch.tensor([is_refusal(entry) for entry in text]) if task.name.startswith("digits") else None,
        score_n,
    )


def evaluate_folder(
    model_folder: Path, recipe: Recipe, *, prompts: int, samples: int, seed: int, console: Console
) -> tuple[Samples, dict[str, str]]:
    """Evaluate a saved model on the task of a recipe."""
    places = (model_folder, *run_above(model_folder))
    scored = next((mode.as_trained(places) for mode in recipe.modes.values() if mode.judge is not None), None)
    model, tokenizer, task = model_and_task(model_folder, recipe, console)
    evaluated = evaluate(model, tokenizer, task, recipe, prompts=prompts, samples=samples, seed=seed, scored=scored)
    return evaluated, unmeasured(task.layout, recipe.answer_tags, scored=scored is not None)
