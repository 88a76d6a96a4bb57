"""What the self-rewarding scores of a rollout file are worth as a confidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spanwise.commands.credit.arms import Arm
from spanwise.explain import OF_SCORE, SCORE_FIGURES, alarms
from spanwise.rollouts import RolloutTable
from spanwise.types import Scores

_SHOWN = {"ece": "ECE", "brier": "Brier", "auroc": "AUROC"}


def score_figures(table: RolloutTable, arms: Sequence[Arm], scores: Scores) -> dict[str, Any] | None:
    """Coverage and calibration of the clipped scores against the verdict; None where the file has none."""
    if table.score_n is None:
        return None
    verdict = next((mode.judge for arm in arms for mode in arm.scheme.modes if mode.judge is not None), "correct")
    clipped_n = table.score_n.clamp(0.0, 1.0)
    known_n = ~clipped_n.isnan()
    right_n = torch.full_like(clipped_n, torch.nan)
    if verdict in scores.names:
        right_n = scores.reward_nm[:, scores.names.index(verdict)].double()
        right_n = right_n.masked_fill((right_n != 0) & (right_n != 1), torch.nan)
    judged = verdict if bool((~right_n.isnan()).any()) else None
    found = {"completions": int(known_n.sum()), "coverage": float(known_n.double().mean()), "verdict": judged}
    try:
        from spanwise.measure import figures
    except ModuleNotFoundError:  # the extra cli does without SciPy
        return found
    values = figures(clipped_n, right_n, well_formed_n=known_n)
    by_score = {name: values[name.removeprefix(OF_SCORE)] for name in SCORE_FIGURES}
    known = {name.removeprefix(OF_SCORE): value for name, value in by_score.items()}
    return {**found, **known, "alarms": list(dict.fromkeys(alarms(by_score).values()))}


def score_note(found: dict[str, Any] | None) -> str:
    """The figures of the scores in a sentence, and what is wrong with them; empty without any.

    >>> score_note({"completions": 3, "coverage": .75, "verdict": "correct", "ece": .125, "brier": .25, "auroc": None})
    'Score of its own (laser): 3 completions have one (75 %), and against correct ECE 0.125, Brier 0.250, AUROC -.'
    """
    if found is None:
        return ""
    said = f"Score of its own (laser): {found['completions']:,} completions have one ({100 * found['coverage']:.3g} %)"
    if found["verdict"] is None:
        return f"{said}; nothing in the file says which are right."
    if "ece" in found:
        numbers = ((word, found[name]) for name, word in _SHOWN.items())
        shown = ", ".join(f"{word} {'-' if value is None else f'{value:.3f}'}" for word, value in numbers)
        said = f"{said}, and against {found['verdict']} {shown}"
    return f"{said}." + "".join(f" {why[:1].upper()}{why[1:]}." for why in found.get("alarms", ()))


def warm_up_note(table: RolloutTable, arms: Sequence[Arm]) -> str:
    """What the modes of the first method that has any say of the file's part in their credit; empty if nothing."""
    modes = next((arm.scheme.modes for arm in arms if arm.scheme.modes), ())
    return " ".join(filter(None, (mode.note(table) for mode in modes)))
