"""Measure LaSeR's `reference`: the mean log-probability of LaSeR's reserved token before training."""

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from spanwise.commands.shared.task import load_model, make_task, task_roller
from spanwise.engines.sample import end_ids
from spanwise.errors import RecipeError
from spanwise.modes.laser.logps import ScoreReader, measured
from spanwise.recipe import Recipe


def reference(recipe: Recipe, *, prompts: int, samples: int, console: Console) -> dict[str, Any]:
    """Sample completions of training prompts, and measure the log-probability of laser's reserved token after them."""
    laser_mode = recipe.modes.get("laser")
    if laser_mode is None:
        raise RecipeError(
            "The recipe has no laser section, so there is no reference to measure; write laser: {token: NAME}."
        )
    torch.set_num_threads(recipe.threads)
    laser_mode = replace(laser_mode, reference=None)
    task = make_task(recipe, console)
    model, tokenizer = load_model(task.model)
    score_reader = ScoreReader(laser_mode, model, tokenizer, end_ids(model, tokenizer))
    train_rows = task.train.select(range(min(prompts, len(task.train))))
    roller = task_roller(model, tokenizer, task, recipe)
    ids_nt, mask_nt, _ = roller.completions(train_rows, samples=samples, seed=recipe.seed)
    prompt_ids_n = [ids for ids in roller.prompt_ids(train_rows) for _ in range(samples)]
    logp_n = score_reader.logps(prompt_ids_n, ids_nt, mask_nt, temperature=recipe.temperature)
    return measured(laser_mode, score_reader.token, logp_n, temperature=recipe.temperature)[1]
