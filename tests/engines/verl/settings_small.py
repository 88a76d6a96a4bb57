"""The settings of 110 of verl's example scripts (22 August 2026), laid over verl's own configuration with a recipe."""

import json
import warnings
from functools import cache
from pathlib import Path

from verl_small import config_of

from spanwise import SpanwiseError
from spanwise.engines.verl.settings import prepare

RECIPE = "{{layout: {{all: [answer]}}, method: {}, objectives: [{{reward: {}, pays: [all]}}]}}"
#: Prefix of a setting in older scripts -> the prefix in verl's V1.
RENAMED = {"reward_model.": "reward.", "custom_reward_function.": "reward.custom_reward_function."}
#: Options of programs that `main_ppo` does not read.
ELSEWHERE = ("async_training.", "data.gen_batch_size")


@cache
def scripts():
    """Script -> {option: value}."""
    return json.loads((Path(__file__).parent / "settings_of_scripts.json").read_text())


def overrides_of(settings):
    """The overrides of a script, and its recipe."""
    pairs = {}
    for name, value in settings.items():
        if name.startswith(ELSEWHERE) or name == "algorithm.adv_estimator" or not value or "<" in value or "$" in value:
            continue
        old = next((old for old in RENAMED if name.startswith(old) and not name.startswith("reward_model.rollout")), None)
        renamed = name if old is None else RENAMED[old] + name.removeprefix(old)
        pairs["reward.reward_manager.name" if renamed == "reward.reward_manager" else renamed] = value
    critic = settings["algorithm.adv_estimator"] == "gae"
    if critic:
        pairs |= {"critic.enable": "True", "critic.model.path": "critic"}
    if any(name.startswith("async_training.") for name in settings):
        pairs |= {"trainer.use_v1": "True", "trainer.v1.trainer_mode": "separate_async"}
    theirs = pairs.get("reward.reward_manager.name", "naive") != "naive" or "reward.custom_reward_function.path" in pairs
    recipe = RECIPE.format("gae" if critic else "bae_paper", "environment" if theirs else "correct")
    return [f"++{name}={value}" for name, value in pairs.items()], recipe


def check(folder, settings):
    """The error of our check for a script's settings; None if it takes them."""
    overrides, recipe = overrides_of(settings)
    config = config_of(folder, *overrides, recipe=recipe, plain=True)
    try:
        with warnings.catch_warnings(action="ignore"):
            prepare(config)
    except SpanwiseError as error:
        return str(error)
