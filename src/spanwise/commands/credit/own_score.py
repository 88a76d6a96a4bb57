"""What the self-rewarding scores of a rollout file are worth as a confidence."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from spanwise.explain import OF_SCORE, SCORE_FIGURES, alarms
from spanwise.rollouts import RolloutTable
from spanwise.scheme import Scheme
from spanwise.types import Scores

_SHOWN = {"ece": "ECE", "brier": "Brier", "auroc": "AUROC"}


def score_figures(table: RolloutTable, schemes: Collection[Scheme], scores: Scores) -> tuple[dict[str, Any] | None, str]:
    """Coverage and calibration of the clipped scores against the verdict, and a sentence on them; None and "" without scores."""
    if table.score_n is None:
        return None, ""
    verdict = next((mode.judge for scheme in schemes for mode in scheme.modes if mode.judge is not None), "correct")
    clipped_n = table.score_n.clamp(0.0, 1.0)
    known_n = ~clipped_n.isnan()
    right_n = torch.full_like(clipped_n, torch.nan)
    if verdict in scores.names:
        right_n = scores.outcome(verdict).double()
        right_n = right_n.masked_fill((right_n != 0) & (right_n != 1), torch.nan)
    judged = not bool(right_n.isnan().all())
    worth: dict[str, Any] = {"completions": int(known_n.sum()), "coverage": float(known_n.double().mean())}
    worth["verdict"] = verdict if judged else None
    sentence = f"Score of its own (laser): {worth['completions']:,} completions have one ({100 * worth['coverage']:.3g} %)"
    reasons: list[str] = []
    try:
        from spanwise.measure import figures
    except ModuleNotFoundError:  # the extra cli does without SciPy
        pass
    else:
        values = figures(clipped_n, right_n, well_formed_n=known_n)
        by_score = {name: values[name.removeprefix(OF_SCORE)] for name in SCORE_FIGURES}
        reasons = list(dict.fromkeys(alarms(by_score).values()))
        worth |= {**{name.removeprefix(OF_SCORE): value for name, value in by_score.items()}, "alarms": reasons}
        numbers = ((word, worth[name]) for name, word in _SHOWN.items())
        if judged:
            shown = ", ".join(f"{word} {'-' if value is None else f'{value:.3f}'}" for word, value in numbers)
            sentence = f"{sentence}, and against {verdict} {shown}"
    if not judged:
        return worth, f"{sentence}; nothing in the file says which are right."
    return worth, f"{sentence}." + "".join(f" {why[:1].upper()}{why[1:]}." for why in reasons)
