"""Compare the settings of a resumed run with those it was started with; needs no trainer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from spanwise.rollouts.folder import hidden

#: The settings that a resumed run may change: its folder, its evaluations and files, and its length.
MAY_CHANGE = ("output", "eval_every", "save_every", "keep_rollouts", "report", "report_to", "threads", "steps")


def changes(before: Mapping[str, Any], now: Mapping[str, Any], *, but: Collection[str] = MAY_CHANGE) -> list[str]:
    """List the settings that differ from before, except some names; secrets are not compared."""
    before, now = plain(before), plain(now)
    names = [name for name in now if name not in but and not _same(name, before.get(name), now[name])]
    sentences = [f"{name} was {before.get(name)!r} and is {now[name]!r} now" for name in names]
    return [text if len(text) < 100 else f"{name} was another" for name, text in zip(names, sentences, strict=True)]


def _same(name: str, before: Any, now: Any) -> bool:
    """Compare one setting; for a layout the order of blocks counts too."""
    return before == now and (name != "layout" or list(before or ()) == list(now or ()))


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as a JSON file would give them back, without secrets."""
    return json.loads(json.dumps(hidden(dict(settings), None), default=str))
