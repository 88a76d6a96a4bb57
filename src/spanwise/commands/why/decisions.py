"""How a file's unlikely tokens and its critic suit SAE: how many decisions there are, how they lie, and how late they are seen."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from spanwise.commands.credit.apply import CreditResult
from spanwise.commands.credit.arms import token_columns
from spanwise.commands.credit.page import opening_tokens
from spanwise.credit.methods._gae import SaeSegments

#: Tokens after a decision at which a critic is asked how much it has seen.
LAGS = (1, 2, 4, 8, 16, 32, 64)


def decision_notes(result: CreditResult) -> Iterator[str]:
    """Yield a sentence for each method that cuts at unlikely tokens, and one on the critic's delay where the rewards tell."""
    for name, scheme in result.arms.schemes.items():
        segments = SaeSegments.of(scheme.method, scheme.options)
        if segments is None:
            continue
        columns = token_columns(scheme)
        counts, values, rewards = _stretches(result, segments, columns["logp_nt"][0], columns["value_nt"][0])
        mean_count = sum(counts) / max(len(counts), 1)
        start = f"{name}: {mean_count:.3g} decisions (tokens below {segments.threshold:g}) in a completion"
        if not values:
            yield f"{start}, so that it is GAE with lambda 1 nearly everywhere."
            continue
        sizes = np.array([len(value_t) - 1 for value_t in values])
        lam = scheme.options.get("lam", 0.95) ** (1 / sizes.mean())
        yield (
            f"{start}, {sizes.mean():.3g} tokens from one to the next (deviation {sizes.std() / sizes.mean():.2g} of that). "
            f"GAE with lambda {lam:.4g} at each token has the same horizon; docs/critic.md says where they differ."
        )
        yield _seen(name, values, np.array(rewards))


def _stretches(
    result: CreditResult, segments: SaeSegments, logp: str, value: str
) -> tuple[list[int], list[np.ndarray], list[float]]:
    """Return the number of decisions of each completion; of each stretch between two the critic's values, and its reward."""
    table, counts, values, rewards = result.table, list[int](), list[np.ndarray](), list[float]()
    reward_n = result.scores.reward_nm.nansum(dim=1).tolist()
    for n in range(len(table)):
        tokens = slice(int(table.tokens.offsets[n]), int(table.tokens.offsets[n + 1]))
        sampled = np.asarray(table.trainable[tokens])
        logp_t, value_t = (table.token_values[column][tokens][sampled] for column in (logp, value))
        opens = opening_tokens(segments, logp_t, np.ones(len(logp_t), dtype=bool))
        counts.append(len(opens))
        for first, last in pairwise([*opens, len(value_t) - 1]):
            if last > first and np.isfinite(value_t[first : last + 1]).all():
                values.append(value_t[first : last + 1].astype(np.float64))
                rewards.append(reward_n[n])
    return counts, values, rewards


def _seen(name: str, values: list[np.ndarray], rewards: np.ndarray) -> str:
    """Say how soon the critic's value follows a decision, as far as its changes agree with the rewards."""

    def agreement(lag: int | None) -> np.ndarray:
        change = np.array([value_t[-1 if lag is None else min(lag, len(value_t) - 1)] - value_t[0] for value_t in values])
        return (change - change.mean()) * (rewards - rewards.mean())

    whole = agreement(None)
    if len(whole) < 2 or whole.mean() <= 2 * whole.std(ddof=1) / len(whole) ** 0.5:
        return f"{name}: over a stretch the critic's value does not move with the reward, so that it has not seen what was decided."
    lag = next((lag for lag in LAGS if agreement(lag).mean() >= whole.mean() / 2), None)
    words = "more than 64 tokens" if lag is None else f"{lag} token{'s' if lag > 1 else ''}"
    return f"{name}: the critic has half of what it learns of a decision after {words}."
