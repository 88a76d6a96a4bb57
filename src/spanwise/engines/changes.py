"""Compare the settings of a resumed run with those of its checkpoint. No trainer package is imported."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from spanwise.rollouts.folder import hidden
from spanwise.score.reward import FREE_OPTIONS

#: The settings that a resumed run may change.
MAY_CHANGE = (
    "output", "eval_every", "eval_samples", "save_every", "keep_rollouts", "report", "report_to", "threads", "steps", "micro_batch",
)  # fmt: skip


def changes(old: Mapping[str, Any], new: Mapping[str, Any], *, but: Collection[str] = MAY_CHANGE) -> list[str]:
    """List the settings in which a resumed run differs from its checkpoint. Skip secrets and `but`."""
    old_settings, new_settings = lasting(plain(old)), lasting(plain(new))
    compared_names = [name for name in {**new_settings, **old_settings} if name not in but]
    names = changed_names(old_settings, new_settings, compared_names)
    notes = [f"{name} was {old_settings.get(name)!r} and is {new_settings.get(name)!r} now" for name in names]
    return [note if len(note) < 100 else f"{name} differs" for name, note in zip(names, notes, strict=True)]


def changed_names(old: Mapping[str, Any], new: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """List the names of settings that differ between two runs. The order of the blocks in `layout` counts, too."""
    old_order, new_order = (list(settings.get("layout") or ()) for settings in (old, new))
    return [name for name in names if old.get(name) != new.get(name) or (name == "layout" and old_order != new_order)]


def lasting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without reward options that cannot change a verdict, such as the address of a judge model."""
    objectives = settings.get("objectives")
    if not isinstance(objectives, list):
        return dict(settings)
    return {**settings, "objectives": [_lasting_objective(objective) for objective in objectives]}


def _lasting_objective(objective: Any) -> Any:
    options = objective.get("options") if isinstance(objective, Mapping) else None
    if not isinstance(options, Mapping):
        return objective
    free_option_names = FREE_OPTIONS.get(str(objective.get("reward")), ())
    lasting_options = {name: value for name, value in options.items() if name not in free_option_names}
    other_fields = {name: value for name, value in objective.items() if name != "options"}
    return {**other_fields, "options": lasting_options} if lasting_options else other_fields


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return training settings as JSON stores them, without secrets."""
    return json.loads(json.dumps(hidden(dict(settings), None), default=as_list_or_text))


def as_list_or_text(value: Any) -> Any:
    """Convert an array to a list, and any other value to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
