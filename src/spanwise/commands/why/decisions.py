"""Judge whether SAE (segmental advantage estimation) suits a rollout file. Count decisions, measure the critic's delay."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from spanwise.commands.credit.apply import CreditResult, opening_tokens
from spanwise.commands.credit.arms import token_columns
from spanwise.credit.methods._gae import SaeSegments


def decision_notes(result: CreditResult) -> Iterator[str]:
    """Say how often methods such as SAE cut completions at unlikely tokens, and how many tokens later the critic reacts."""
    for name, scheme in result.arms.schemes.items():
        segments = SaeSegments.of(scheme.method, scheme.options)
        if segments is None:
            continue
        column_by_field = token_columns(scheme)
        logp_column = column_by_field["logp_nt"][0]
        value_column = column_by_field["value_nt"][0]
        decision_counts, segment_values, segment_rewards = _cut_segments(result, segments, logp_column, value_column)
        mean_cuts = sum(decision_counts) / max(len(decision_counts), 1)
        count_text = f"{name}: a completion has {mean_cuts:.3g} decisions (tokens of probability < {segments.threshold:g})"
        if not segment_values:
            yield f"{count_text}. '{name}' discounts only at decisions. Without decisions, '{name}' equals GAE with lambda 1."
            continue
        segment_lengths = np.array([len(value_t) - 1 for value_t in segment_values])
        mean_length = segment_lengths.mean()
        relative_deviation = segment_lengths.std() / mean_length
        lambda_per_token = scheme.options.get("lam", 0.95) ** (1 / mean_length)
        yield (
            f"{count_text}. The average distance between two decisions is {mean_length:.3g} tokens (standard deviation: "
            f"{relative_deviation:.2g} times the average). Over the average distance, '{name}' discounts as much as GAE with "
            f"lambda {lambda_per_token:.4g}. docs/critic.md compares SAE and GAE."
        )
        yield _describe_delay(name, segment_values, np.array(segment_rewards))


def _cut_segments(
    result: CreditResult, segments: SaeSegments, logp_column: str, value_column: str
) -> tuple[list[int], list[np.ndarray], list[float]]:
    """Cut completions as SAE does, and return how many cuts each has, and every segment's critic values and reward."""
    table = result.table
    decision_counts = list[int]()
    segment_values = list[np.ndarray]()
    segment_rewards = list[float]()
    reward_sum_n = result.scores.reward_nm.nansum(dim=1).tolist()
    for n in range(len(table)):
        token_range = slice(int(table.tokens.offsets[n]), int(table.tokens.offsets[n + 1]))
        is_sampled = np.asarray(table.trainable[token_range])
        logp_t = table.token_values[logp_column][token_range][is_sampled]
        value_t = table.token_values[value_column][token_range][is_sampled]
        is_trained_t = np.ones(len(logp_t), dtype=bool)
        decision_positions = opening_tokens(segments, logp_t, is_trained_t)
        decision_counts.append(len(decision_positions))
        for segment_start, segment_end in pairwise([*decision_positions, len(value_t) - 1]):
            if segment_end > segment_start and np.isfinite(value_t[segment_start : segment_end + 1]).all():
                segment_values.append(value_t[segment_start : segment_end + 1].astype(np.float64))
                segment_rewards.append(reward_sum_n[n])
    return decision_counts, segment_values, segment_rewards


def _describe_delay(name: str, values: list[np.ndarray], rewards: np.ndarray) -> str:
    """Say how many tokens after a decision the critic's value has moved half as far towards the reward as in the end."""

    def agreement(lag: int) -> np.ndarray:
        later_values = [value_t[min(lag, len(value_t) - 1)] for value_t in values]
        value_changes = np.array(later_values) - np.array([value_t[0] for value_t in values])
        return (value_changes - value_changes.mean()) * (rewards - rewards.mean())

    full_agreements = agreement(max(map(len, values)))
    if len(full_agreements) < 2 or full_agreements.mean() <= 2 * full_agreements.std(ddof=1) / len(full_agreements) ** 0.5:
        return (
            f"{name}: after an unlikely token (decision), the critic's value does not move towards the reward. So the critic "
            "ignores decisions."
        )
    half_agreement = full_agreements.mean() / 2
    halfway_lag = next((lag for lag in (1, 2, 4, 8, 16, 32, 64) if agreement(lag).mean() >= half_agreement), None)
    lag_text = "more than 64 tokens" if halfway_lag is None else f"{halfway_lag} token{'s' if halfway_lag > 1 else ''}"
    return f"{name}: after an unlikely token (decision), half of the critic's move towards the reward takes {lag_text}."
