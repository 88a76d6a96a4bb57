"""Recipes and settings of prime-rl that need more than one group, or a reward for each turn."""

from types import ModuleType, SimpleNamespace
from unittest import mock

from border.case import case, check, write_recipe
from spanwise.engines import prime_rl


@case
def checked(folder, method="bae", more="", *, objective="", tokens=512):
    return prime_rl.check(str(write_recipe(folder, method, more, objective=objective)), tokens=tokens).scheme.method


def with_length_penalty(folder):
    write_recipe(folder)
    algo, base = ModuleType("algo"), ModuleType("base")
    vars(algo).update(Algorithm=object, ALGORITHM_CLASSES={})
    vars(base)["iter_trainable_traces"] = iter
    packages = {"prime_rl": ModuleType("prime_rl"), "prime_rl.orchestrator": SimpleNamespace(algo=algo)}
    packages |= {"prime_rl.orchestrator.algo": algo, "prime_rl.orchestrator.algo.base": base}
    with mock.patch.dict("sys.modules", packages):
        prime_rl.attach("recipe.yaml", tokens=512)
    algo.ALGORITHM_CLASSES["grpo"](SimpleNamespace(length_penalty={}), None)


CASES = {
    "prime-rl without arguments": lambda folder: prime_rl.main([]),
    "prime-rl with TOKENS left out": checked(tokens="@"),
    "prime-rl with TOKENS 0": checked(tokens=0),
    "prime-rl with `baseline: batch`": checked(objective=", baseline: batch"),
    "prime-rl with `per: batch`": checked(more="per: batch\n"),
    "prime-rl with `method: reinforce++`": checked("reinforce++"),
    "prime-rl with `method: gdpo`, which has no `whiten`": checked("gdpo"),
    "prime-rl with `scope: turn` for the environment's reward": checked(objective=", scope: turn"),
    "prime-rl with `method: gigpo`": checked("gigpo"),
    "prime-rl with a `critic` in the recipe": checked(more="critic: {gae_lambda_value: 0.5}\n"),
    "prime-rl with `algo.length_penalty`": with_length_penalty,
}

test = check(__doc__, CASES)
