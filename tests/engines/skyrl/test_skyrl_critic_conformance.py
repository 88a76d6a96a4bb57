"""The rollouts that every engine is held against, with a critic: rewards inside the completion, through SkyRL's trainer."""

import math
from itertools import pairwise

import pytest
import skyrl_small as small
import torch
from test_skyrl_conformance import Prompts, generated, trainer_of

import conformance

ROWS = conformance.load()["rollouts"]["flat"]
OPTIONS = {"gae": {"lam": 0.6, "gamma": 0.9}, "sae": {"lam": 0.3, "threshold": 0.4, "gamma": 0.9}}
LAM = 0.8  # of the critic's target


def recipe(method):
    return (
        f"{conformance.RECIPES['blocks'].replace('bae', method).replace(', baseline: outcome', '')}"
        f"values: shared\nper: completion\noptions: {OPTIONS[method]}\ncritic: {{gae_lambda_value: {LAM}}}\n"
    )


def told():
    """Values and log-probabilities of every token; nonsense where the environment speaks."""
    draw = torch.Generator().manual_seed(7)
    for row in ROWS:
        value_t = torch.rand(len(row["ids"]), generator=draw, dtype=torch.float64)
        logp_t = torch.rand(len(row["ids"]), generator=draw, dtype=torch.float64).log()
        quiet_t = torch.tensor(row["sampled"]) == 0
        yield value_t.masked_fill(quiet_t, 1e9).tolist(), logp_t.masked_fill(quiet_t, torch.nan).tolist()


def by_loops(row, values, logps, method):
    """Advantages and targets from the definition: each reward lies on the last token of its block, of all if that is not there."""
    kept = [t for t, sampled in enumerate(row["sampled"]) if sampled]
    reward = dict.fromkeys(kept, 0.0)
    ends = [max((t for t in kept if row["blocks"][t] == block), default=kept[-1]) for block in (0, 1)]
    reward[ends[0]] += row["right"]
    reward[ends[1]] += -1.0 if row["confidence"] is None else -((row["confidence"] - row["right"]) ** 2)
    options, found = OPTIONS[method], []
    for own in (True, False):
        ahead, laid = 0.0, {}
        for k, following in reversed([*pairwise(kept), (kept[-1], None)]):
            lam = options["lam"] if own else LAM
            if own and method == "sae" and following is not None and logps[following] >= math.log(options["threshold"]):
                lam = 1.0
            later = 0.0 if following is None else options["gamma"] * (values[following] + lam * ahead)
            ahead = reward[k] - values[k] + later
            laid[k] = ahead / len(kept) if own else values[k] + ahead
        found.append([laid.get(t, 0.0) for t in range(len(row["ids"]))])
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("method", OPTIONS)
def test_advantages_and_returns_are_those_of_loops(data, method, dtype):
    dataset = Prompts(ROWS)
    critic = {"trainer.critic.model.path": small.model_path(data), "trainer.critic_mini_batch_size": len(dataset)}
    cfg = small.config(data, recipe=recipe(method), layout="merged", prompts=len(dataset), samples=1, **critic)
    made = trainer_of(cfg, dataset, dtype)
    order, output = generated(ROWS, dataset.uid)
    numbers = list(told())
    trained, uids = made.postprocess_generator_output(dict(output), [t.instance_id for t in output["trajectory_ids"]])
    batch = made.convert_to_training_input(trained, uids)
    for k, field in enumerate(("values", "action_log_probs")):
        batch[field] = torch.full(batch["loss_mask"].shape, torch.nan, dtype=dtype)
        for n, row in enumerate(order):
            batch[field][n, -len(ROWS[row]["ids"]) :] = torch.tensor(numbers[row][k], dtype=dtype)
    made.compute_advantages_and_returns(batch)
    for n, row in enumerate(order):
        size = len(ROWS[row]["ids"])
        expected = by_loops(ROWS[row], *numbers[row], method)
        for found, loops in zip((made.last_advantages, batch["returns"]), expected, strict=True):
            assert found[n, -size:].tolist() == pytest.approx(loops, abs=1e-12 if dtype == torch.float64 else 1e-6)
            assert bool((found[n, :-size] == 0).all())
