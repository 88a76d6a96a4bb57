"""Measure the reference of laser: its reserved token's log-probability before training."""

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise.commands.shared.task import make_task
from spanwise.engines.sample import end_ids, prompt_ids, sample
from spanwise.errors import RecipeError
from spanwise.modes.laser.logps import ScoreReader, measured
from spanwise.recipe import Recipe


def reference(recipe: Recipe, *, prompts: int, samples: int, console: Console) -> dict[str, Any]:
    """Sample completions of training prompts. Measure the log-probability of laser's token after each."""
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
    train_prompts = task.train["prompt"][:prompts]
    max_tokens = recipe.max_completion_length or task.max_completion_length
    sampling_options = {"max_new_tokens": max_tokens, "temperature": recipe.temperature, "seed": recipe.seed}
    ids_nt, mask_nt = sample(model, tokenizer, train_prompts, samples=samples, **sampling_options)
    ids_by_prompt = prompt_ids(tokenizer, train_prompts)
    prompt_ids_n = [ids for ids in ids_by_prompt for _ in range(samples)]
    logp_n = score_reader.logps(prompt_ids_n, ids_nt, mask_nt, temperature=recipe.temperature)
    return measured(laser_mode, score_reader.token, logp_n, temperature=recipe.temperature)[1]
