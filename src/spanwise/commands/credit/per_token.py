"""What methods ask of a file beyond rewards: values of a critic, log-probabilities, scores, whole rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spanwise.credit import Method
from spanwise.errors import RecipeError
from spanwise.rollouts import RolloutTable, schema
from spanwise.scheme import Scheme

#: Fields of a `Batch` that a file may hold, in words.
PER_TOKEN = {"value_nt": "values of a critic", "logp_nt": "log-probabilities"}


def token_keys(scheme: Scheme) -> dict[str, list[str]]:
    """The `token_values` of a table that a scheme reads, by the field of a `Batch` that they are.

    >>> from spanwise import Layout, Objective
    >>> pair = [Objective("correct", "solution"), Objective("brier", "confidence", given="correct")]
    >>> token_keys(Scheme("sae", Layout({"solution": ["answer"], "confidence": ["confidence"]}), pair))
    {'value_nt': ['value/correct', 'value/brier'], 'logp_nt': ['logp']}
    """
    asked = {"value_nt": schema.value_keys(scheme.value_names), "logp_nt": ["logp"]}
    return {need: keys for need, keys in asked.items() if need in scheme.needs}


def recorded(scheme: Scheme, table: RolloutTable, rows: Sequence[int] | Tensor) -> dict[str, Any]:
    """The fields of `Batch` that the scheme's modes read of some rows of one step."""
    return {name: value for mode in scheme.modes for name, value in mode.recorded(table, rows).items()}


def check_tokens(scheme: Scheme, table: RolloutTable) -> None:
    """Refuse a method or a mode whose values, log-probabilities or scores a file does not hold."""
    recorded(scheme, table, ())
    if scheme.refine is not None and table.rollout_n is not None:
        raise RecipeError(
            f"refine changes the tokens of whole completions, and rollouts of '{table.path}' are several rows. Leave it out."
        )
    asked, held = token_keys(scheme), table.token_values
    missing = [need for need, keys in asked.items() if any(key not in held for key in keys)]
    if not missing:
        return
    streams = [key.partition("/")[2] for key in held if key.startswith("value")]
    there = "no token ids" if not table.has_ids else "none of them"
    if streams and missing == ["value_nt"]:
        there = f"those of {', '.join(streams)}" if streams != [""] else "one value"
        wanted = f" for {', '.join(scheme.value_names)}"
        advice = "Use the recipe that the critic was trained under (its objectives and `values`)"
    else:
        wanted = ""
        columns = [schema.token_column(key) for keys in asked.values() for key in keys]
        advice = (
            f"Use a method that needs rewards only (grpo, rlcr, bae), or a file with the columns {' and '.join(columns)}"
        )
    raise RecipeError(
        f"Method '{scheme.method}' needs {' and '.join(PER_TOKEN[need] for need in missing)} of every token{wanted}, and "
        f"'{table.path}' holds {there}. {advice}."
    )


def check_rows(chosen: Method, table: RolloutTable) -> None:
    """Refuse a method per token where a rollout is several rows."""
    if chosen.kind == "token" and table.rollout_n is not None:
        raise RecipeError(
            f"Method '{chosen.name}' runs over the tokens of a rollout from its end, and rollouts of '{table.path}' are several "
            f"rows (branches). Use a method that needs rewards only (grpo, rlcr, bae)."
        )
