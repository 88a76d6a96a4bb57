"""Measure the reference of laser: its reserved token's log-probability before training."""

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise.commands.shared.task import make_task, task_roller
from spanwise.engines.sample import end_ids, prompt_ids
from spanwise.errors import RecipeError
from spanwise.modes.laser.logps import ScoreReader, measured
from spanwise.recipe import Recipe


def reference(recipe: Recipe, *, prompts: int, samples: int, console: Console) -> dict[str, Any]:
    """Measure the log-probability of the mode laser's reserved token after sampled completions of training prompts."""
    laser_mode = recipe.modes.get("laser")
    if laser_mode is None:
        raise RecipeError(
            "The recipe has no laser section, so there is no reference to measure; write laser: {token: NAME}."
        )
    torch.set_num_threads(recipe.threads)
    laser_mode = replace(laser_mode, reference=None)
    task = make_task(recipe, console)
    model: Any = AutoModelForCausalLM.from_pretrained(task.model, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(task.model, padding_side="left", trust_remote_code=False)
    score_reader = ScoreReader(laser_mode, model, tokenizer, end_ids(model, tokenizer))
    train_rows = task.train.select(range(min(prompts, len(task.train))))
    roller = task_roller(model, tokenizer, task, recipe)
    ids_nt, mask_nt, _ = roller.completions(train_rows, samples=samples, seed=recipe.seed)
    ids_by_prompt = prompt_ids(tokenizer, train_rows["prompt"][:])
    prompt_ids_n = [ids for ids in ids_by_prompt for _ in range(samples)]
    logp_n = score_reader.logps(prompt_ids_n, ids_nt, mask_nt, temperature=recipe.temperature)
    return measured(laser_mode, score_reader.token, logp_n, temperature=recipe.temperature)[1]
