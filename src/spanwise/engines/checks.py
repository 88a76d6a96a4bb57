"""What engines with a configuration of their own say alike of a recipe, and know of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import PretrainedConfig

from spanwise.modes import MODES

_SCHEME = ("method", "layout", "prefilled", "segmenter", "objectives", "per", "options", "values")
#: The fields of a recipe that a run may not change while it goes on.
RULE = (*_SCHEME, *(name for name, mode in MODES.items() if mode.in_scheme))
#: Those that say how credit is given; the trainer's own configuration says everything else.
_CREDIT = {*RULE, *MODES, "calibration", "baseline", "most", "verifier", "refine"}


def idle_fields(path: str | Path, *, engine: str) -> str:
    """The sentence for what a recipe file sets and nothing reads; empty if there is nothing."""
    written = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    idle = {*written} - _CREDIT
    for name, mode in MODES.items():
        idle |= {f"{name}.{field}" for field in written.get(name) or {} if mode.elsewhere and field not in mode.elsewhere}
    if not idle:
        return ""
    return (
        f"The recipe also sets {', '.join(sorted(idle))}, which {engine}'s own configuration decides; nothing reads it here."
    )


def fixed_faults(fixed: Mapping[str, tuple[Any, str]], setting: Callable[[str], Any]) -> dict[str, bool]:
    """The sentence for each option of an engine that is not what it must be: option -> that, and why; `setting` reads one.

    >>> fixed_faults({"gamma": (1.0, "it changes nothing")}, {"gamma": 0.9}.get)
    {'gamma is 0.9: it changes nothing. Leave it at 1.0.': True}
    """
    set_to = {name: setting(name) for name in fixed}
    return {
        f"{name} is {set_to[name]}: {why}. Leave it at {usual}.": set_to[name] not in (None, usual)
        for name, (usual, why) in fixed.items()
    }


def model_size(path: str | None) -> int | None:
    """How many ids a model in a folder can sample, often more than its tokenizer has tokens; None where no file says it."""
    try:
        written, _ = PretrainedConfig.get_config_dict(path) if path else ({}, {})
    except (OSError, ValueError):
        return None
    return {**written, **(written.get("text_config") or {})}.get("vocab_size")
