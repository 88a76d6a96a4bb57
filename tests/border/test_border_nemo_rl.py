"""Settings of NeMo-RL that would change the credit, or hand the estimator no tokens."""

import subprocess
import sys
from types import SimpleNamespace

import torch

from border.case import case, check, write_recipe
from spanwise import Layout, Scheme, Vocabulary
from spanwise.engines.nemo_rl import SpanEstimator
from spanwise.engines.nemo_rl import check as check_settings
from spanwise.engines.recipe_run import RecipeRun
from spanwise.recipe import RecipeRule, load


@case
def checked(folder, method="bae", more="", *, recipe="recipe.yaml", grpo=None, data_plane=False, **loss_fn):
    write_recipe(folder, method, more)
    options = {"adv_estimator": {"name": "spanwise", "recipe": recipe, "normalize_rewards": True}, **(grpo or {})}
    policy = {"generation": {"max_new_tokens": 64}}
    parts = {"grpo": options, "policy": policy, "loss_fn": loss_fn, "data_plane": {"enabled": data_plane}}
    return check_settings(SimpleNamespace(**parts)).scheme.method


def run_again(folder):
    (folder / "run").mkdir()
    for name in ("recipe.yaml", "metrics.jsonl"):
        (folder / "run" / name).touch()
    RecipeRun(RULE, None, Vocabulary((b"a",)))


RULE = RecipeRule(load(None, {"output": "run"}), Scheme.preset("grpo", Layout(["answer"])))
NOT_DIVIDED = {"adv_estimator": {"recipe": "recipe.yaml", "normalize_rewards": False}}
CASES = {
    "NeMo-RL with `adv_estimator.name=spanwise` and no recipe": checked(recipe=None),
    "NeMo-RL with `grpo.advantage_clip_high=5`": checked(grpo={"advantage_clip_high": 5.0}),
    "NeMo-RL with `grpo.invalid_tool_call_advantage=-5`": checked(grpo={"invalid_tool_call_advantage": -5.0}),
    "NeMo-RL with `loss_fn.use_kl_in_reward=true`": checked(use_kl_in_reward=True),
    "NeMo-RL with `data_plane.enabled=true`": checked(data_plane=True),
    "`python -m spanwise.engines.nemo_rl` without a script": lambda folder: (
        subprocess.run([sys.executable, "-m", "spanwise.engines.nemo_rl"], capture_output=True, text=True).stderr
    ),
    "NeMo-RL's single controller": case(SpanEstimator.__new__(SpanEstimator).compute_advantage)(
        torch.zeros(1, 1).long(), torch.zeros(1), torch.ones(1, 2), repeated_batch={"std": 0}
    ),
    "NeMo-RL with `adv_estimator.normalize_rewards=false` and `method: grpo`": checked("grpo", grpo=NOT_DIVIDED),
    "NeMo-RL with `grpo.use_dynamic_sampling=true`": checked(grpo={"use_dynamic_sampling": True}),
    "NeMo-RL with `method: gae`": checked("gae"),
    "NeMo-RL with an `output` that holds a run": run_again,
    "NeMo-RL with a model folder without a tokenizer": lambda folder: RecipeRun.of(RULE, model=str(folder)),
    "NeMo-RL with a `critic` in the recipe": checked(more="critic: {gae_lambda_value: 0.5}\n"),
}

test = check(__doc__, CASES)
