"""What a recipe says that a trainer with a configuration of its own does not read."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import yaml

from spanwise.modes import MODES

#: The fields that say how credit is given; such a trainer's own configuration says everything else.
CREDIT = frozenset(
    (
        "method",
        "calibration",
        "baseline",
        "layout",
        "segmenter",
        "most",
        "prefilled",
        "objectives",
        "per",
        "options",
        "values",
        "verifier",
        "critic",
        *MODES,
        "refine",
    )
)


def idle_fields(path: str | Path, *, critic: Collection[str]) -> list[str]:
    """The fields that a recipe file sets and nothing reads."""
    written = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    own = {f"critic.{name}" for name in written.get("critic") or {} if name not in critic}
    return sorted({*written} - CREDIT | own)
