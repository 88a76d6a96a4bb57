"""benchmarks/critic.py: what an arm of a walk is trained with."""

import critic
import pytest
from walk_task import WALKS

import trl_small

pytestmark = trl_small.THIRD_PARTY


@pytest.mark.parametrize(
    ("task", "arm", "rate", "starts"),
    [
        ("walk", "gae-.95", 1e-4, [0, 1, 0, 1]), ("walk", "gae-0.9936", 3e-4, [0, 1, 0, 1]),
        ("walk_uneven", "gae-.95", 3e-4, [0, 1, 2, 0]), ("walk_uneven", "sae-start-.2-lam-.5-exact", 3e-4, [0, 1, 2, 0]),
        ("walk_long", "gae-0.9936-exact", 3e-4, [0, 1, 2, 0]),
    ],
)  # fmt: skip
def test_each_walk_has_its_own_rates_and_number_of_warm_starts(monkeypatch, tmp_path, task, arm, rate, starts):
    taken = []
    monkeypatch.setattr(critic, "walk_start", lambda walk, seed: taken.append(seed) or tmp_path)
    runs = [critic.planned(task, arm, seed, tmp_path) for seed in range(4)]
    assert {run.recipe.learning_rate for run in runs} == {rate}
    assert {run.recipe.max_completion_length for run in runs} == {WALKS[task].longest}
    assert taken == starts
    # Seeds with one warm start share a critic on the walks with three.
    assert [critic.critic_seed("walk_uneven", seed) for seed in range(5)] == [0, 1, 2, 0, 1]
    assert [critic.critic_seed(task, 4) for task in ("walk", "digits")] == [4, 4]


def test_the_lambda_per_token_has_the_horizon_of_sae_at_the_mean_length_of_a_line():
    # A line is a number, a move, a state and a countdown of 5, 5 or 116 / 16 tokens.
    lines = {"walk": 8, "walk_long": 8, "walk_longest": 8, "walk_uneven": 10.25, "walk_uneven_long": 10.25}
    for name, length in lines.items():
        arm = critic.ARMS[f"gae-{WALKS[name].horizon:.4f}"]
        assert arm["options"]["lam"] ** length == pytest.approx(0.95)
