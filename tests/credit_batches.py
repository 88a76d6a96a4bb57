"""Batches that several tests of credit share: worked examples, random batches of completions, tokens and steps."""

import math

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from helpers import NAN, double
from spanwise.types import Scores


def scores_of(reward_nm, names=("correct", "brier")):
    """Rewards with a status each: NaN is absent. Nothing is re-scored."""
    reward_nm = torch.as_tensor(reward_nm, dtype=torch.float64)
    status = torch.where(reward_nm.isnan(), 1, 0).to(torch.int8)
    return Scores(names, reward_nm, status, torch.full((*reward_nm.shape, 2), NAN, dtype=torch.float64))


@st.composite
def completion_batches(draw):
    """Ragged groups in any order, some rewards absent, rewards and lengths on coarse grids so that ties happen."""
    n = draw(st.integers(1, 20))

    def column(values):
        return torch.tensor(draw(st.lists(values, min_size=n, max_size=n)))

    reward_n = column(st.integers(-4, 6)).double() / 4
    reward_n[column(st.sampled_from([False, False, False, True]))] = NAN
    return reward_n, column(st.integers(0, 4)), column(st.integers(0, 5))


def all_of(n, t):
    return torch.ones(n, t, dtype=torch.bool)


GAE_REWARD = double([[0, 0, 0, 0, 1, 0]])
GAE_VALUE = double([[0.5, 0.6, 9, 0.4, 0.7, 7]])  # 9 and 7 stand at masked tokens, which nobody may read
GAE_MASK = torch.tensor([[True, True, False, True, True, False]])


@st.composite
def token_batches(draw):
    n, t = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 7, 40, 75]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    mask = torch.rand(n, t, generator=generator) < draw(st.sampled_from([0.2, 0.6, 1.0]))
    reward = torch.randn(n, t, generator=generator).double() * (torch.rand(n, t, generator=generator) < 0.3)
    value = torch.randn(n, t, generator=generator).double()
    value[~mask] = draw(st.sampled_from([NAN, 1e9, math.inf]))
    if draw(st.booleans()):
        reward[~mask & (torch.rand(n, t, generator=generator) < 0.2)] = NAN  # no reward at all
    if draw(st.booleans()) and bool(mask.any()):
        i, at = mask.nonzero()[0].tolist()
        reward[i, at] = NAN  # an absent one
    logp = torch.rand(n, t, generator=generator).double().log()
    logp[~mask] = draw(st.sampled_from([NAN, -1e9, 1e9]))
    end = torch.randn(n, generator=generator).double() if draw(st.booleans()) else None
    if end is not None and draw(st.booleans()):
        end[0] = NAN
    return reward, value, logp, mask, end


fast = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# Trajectory a: s0 s1 s2 with rewards 0 0 10, trajectory b: s0 s1 s1 with nothing; one task.
STEP_REWARD = torch.tensor([0.0, 0, 10, 0, 0, 0])
TASK, TRAJECTORY, STEP = torch.zeros(6).long(), torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
STATE = ["s0", "s1", "s2", "s0", "s1", "s1"]
WORKED = (STEP_REWARD, TASK, TRAJECTORY, STEP, STATE)


@st.composite
def step_batches(draw):
    """Tasks with trajectories of one to five steps on few states, rows shuffled, step numbers with gaps, some rewards absent."""
    rows = []
    for trajectory in draw(st.lists(st.integers(-5, 40), min_size=1, max_size=7, unique=True)):
        task = draw(st.integers(0, 2))
        for step in draw(st.lists(st.integers(-3, 9), min_size=1, max_size=5, unique=True)):
            reward = draw(st.sampled_from([0.0, 0.0, 1.0, 2.5, -1.0, NAN]))
            rows.append((reward, task, trajectory, step, draw(st.sampled_from(["p", "q", "r", None]))))
    *columns, state = zip(*draw(st.permutations(rows)), strict=True)
    return *map(torch.tensor, columns), list(state)


LARGE = (2.0**53 - 1, 2.0**53 - 2)  # codes of outcomes that float32 takes for one
PROMPTS = (-9_000_000_000_000_000_000, -3, -1, 0, 5)  # hashes of prompts may be negative, -1 included


def _exact(value):
    """Rewards that are equal on paper are equal numbers: .3^2 and (1 - .7)^2 differ in the last bit."""
    return (value * 1e6).round() / 1e6


@st.composite
def report_batches(draw):
    """Ragged groups in any order, one to three outcomes of any codes, some unknown, some rewards absent; rewards are exact."""
    n, columns = draw(st.integers(1, 18)), draw(st.integers(1, 3))
    group = draw(st.lists(st.sampled_from(PROMPTS), min_size=n, max_size=n))
    judged = draw(st.integers(0, columns - 1))
    codes = [(0.0, 1.0) if k == judged else draw(st.permutations([0.0, 1.0, -2.5, *LARGE]))[:2] for k in range(columns)]
    value = st.tuples(*(st.sampled_from([zero, zero, one, one, one, NAN]) for zero, one in codes))
    outcome = draw(st.lists(value, min_size=n, max_size=n))
    report = draw(st.lists(st.integers(0, 8), min_size=n, max_size=n))
    absent = draw(st.lists(st.sampled_from([False, False, False, True]), min_size=n, max_size=n))
    q, outcome = double(report) / 8, double(outcome)
    c = outcome[:, judged].nan_to_num(nan=0.5)
    reward = torch.where(torch.tensor(absent), NAN, _exact(-((q - c) ** 2)))
    return reward, torch.tensor(group), outcome, _exact(torch.stack([-(q**2), -((q - 1) ** 2)], dim=1)), judged


PAIR, SAME = torch.tensor([0.0, 2.0], dtype=torch.float64), torch.tensor([0, 0])
