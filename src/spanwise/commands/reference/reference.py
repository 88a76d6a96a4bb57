"""The reference of a self-rewarding score, measured on the policy that a recipe starts from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise.commands.shared.task import make_task
from spanwise.engines.sample import end_ids, prompt_ids, sample
from spanwise.engines.self_reward import end_logps, measured, reserved_id
from spanwise.errors import RecipeError
from spanwise.recipe import Recipe


def reference(recipe: Recipe, *, prompts: int, samples: int, console: Console) -> dict[str, Any]:
    """Sample completions of training prompts and read the log-probability of the reserved token after their ends."""
    if recipe.laser is None:
        raise RecipeError("The recipe has no laser, whose reference could be measured; write laser: {token: NAME}.")
    torch.set_num_threads(recipe.threads)
    laser, task = replace(recipe.laser, reference=None), make_task(recipe, console)
    model: Any = AutoModelForCausalLM.from_pretrained(task.model, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(task.model, padding_side="left", trust_remote_code=False)
    ends, asked = end_ids(model, tokenizer), task.train["prompt"][:prompts]
    token = reserved_id(laser, tokenizer, size=model.get_input_embeddings().num_embeddings, ends=ends)
    longest = recipe.max_completion_length or task.max_completion_length
    how = {"max_new_tokens": longest, "temperature": recipe.temperature, "seed": recipe.seed}
    ids_nt, mask_nt = sample(model, tokenizer, asked, samples=samples, **how)
    before = [row for row in prompt_ids(tokenizer, asked) for _ in range(samples)]
    where = {"token": token, "ends": ends, "pad": int(tokenizer.pad_token_id), "temperature": recipe.temperature}
    logp_n = end_logps(model, before, ids_nt, mask_nt, **where)
    return measured(laser, token, logp_n, temperature=recipe.temperature)[1]
