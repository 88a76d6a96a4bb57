"""verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, which returns a number or a dict."""

from __future__ import annotations

from typing import Any

from spanwise.errors import DataError
from spanwise.score.foreign.convention import Convention, Item

#: Where verl, SkyRL and files keep the right answer.
_GOLD = ("ground_truth", "reward_model.ground_truth", "reward_spec.ground_truth", "answer")


def _arguments(item: Item) -> dict[str, Any]:
    spec = item.first("reward_model", "reward_spec")
    inside = isinstance(spec, dict) and "ground_truth" in spec
    if not inside and not any(name in item.row for name in _GOLD):
        raise DataError(
            f"A function in verl's signature needs the right answer, and the dataset has no column {', '.join(_GOLD)} or "
            f"reward_model with a ground_truth; its columns are {', '.join(sorted(item.row)) or 'none'}."
        )
    return {
        **item.row,
        "data_source": item.first("data_source"),
        "solution_str": item.text,
        "ground_truth": spec["ground_truth"] if isinstance(spec, dict) and inside else item.first(*_GOLD),
        "extra_info": item.first("extra_info", default={}),
    }


CONVENTION = Convention(lambda _, parameters: "solution_str" in parameters, _arguments, key="score")
