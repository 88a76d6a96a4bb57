"""Errors whose message says what is wrong and what to do.

An error about a wrong argument is a `ValueError` as well, for code that catches Python's own errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any


class SpanwiseError(Exception):
    """Base of every error this package raises on purpose. The command line prints its message without a traceback.

    Example:
        >>> from spanwise import Layout, Scheme
        >>> try:
        ...     Scheme.preset("bea", Layout(["answer"]))
        ... except SpanwiseError as error:
        ...     print(str(error)[:45])
        There is no method 'bea'. Did you mean 'bae'?
    """


class LayoutError(SpanwiseError, ValueError):
    """A layout has a tag or a block that cannot work. Also a ValueError.

    Example:
        >>> from spanwise import Layout
        >>> Layout({"stop": ["answer"]})
        Traceback (most recent call last):
        spanwise.errors.LayoutError: ...'stop'...
    """


class RecipeError(SpanwiseError, ValueError):
    """A recipe or an option asks for something that does not exist or does not fit together. It is a ValueError, too.

    Example:
        >>> from spanwise import Objective
        >>> Objective("corect", pays="solution")
        Traceback (most recent call last):
        spanwise.errors.RecipeError: There is no reward 'corect'. Did you mean 'correct'? ...
    """


class AlignmentError(SpanwiseError, ValueError):
    """Two things that must have the same size differ. The message names both sizes. Also a ValueError.

    Example:
        >>> import torch
        >>> from spanwise import Batch
        >>> Batch(["a", "b"], ids_nt=torch.ones(3, 4).long(), mask_nt=torch.ones(3, 4).bool())
        Traceback (most recent call last):
        spanwise.errors.AlignmentError: ...3...2...
    """


class RewardError(SpanwiseError, ValueError):
    """A reward is missing, not finite, or has the wrong length. Also a ValueError.

    Example:
        >>> import torch
        >>> from spanwise import advantage
        >>> advantage(torch.tensor([float("inf"), 0.0]), torch.tensor([0, 0]))
        Traceback (most recent call last):
        spanwise.errors.RewardError: ...
    """


class DataError(SpanwiseError):
    """A dataset, a model folder or a file lacks what the run needs.

    No ValueError: what is wrong is outside the program, and as often a file that cannot be read as one that holds nonsense.

    Example:
        >>> from spanwise.rollouts import read_rollouts
        >>> read_rollouts("runs/gone")
        Traceback (most recent call last):
        spanwise.errors.DataError: ...runs/gone...
    """


class DivergedError(SpanwiseError):
    """A number in training is no longer finite. Training stopped before the model was updated with it.

    Example:
        >>> import torch
        >>> from spanwise import Credit, Layout, Scheme, Spans, advantages
        >>> none, huge = torch.zeros(1), torch.tensor([[1e300]], dtype=torch.float64)  # more than float32 can hold
        >>> credit = Credit(huge, none.double(), none.long(), none.long())
        >>> advantages(credit, Spans.of_blocks(("answer",), torch.zeros(1, 2).long()), Scheme.preset("grpo", Layout(["answer"])))
        Traceback (most recent call last):
        spanwise.errors.DivergedError: The advantage of completion 0 of 1 at token 0 is inf. ...
    """


_MOST = 60  # the largest number of names that an error message lists


def refuse(faults: Mapping[str, Any], error: type[SpanwiseError] = RecipeError) -> None:
    """Raise an error for the first fault that applies. `faults` maps error messages to whether they apply."""
    for sentence, fault_applies in faults.items():
        if fault_applies:
            raise error(sentence)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop, or else the error's type."""
    message_lines = str(error).strip().splitlines()
    return (message_lines[0].rstrip(" .:") if message_lines else "") or type(error).__name__


def wrong_entries(entries: Any, kind: type) -> list[Any]:
    """Return the entries of a list that have the wrong type. A value that is not a list is itself a wrong entry."""
    is_list = isinstance(entries, Sequence) and not isinstance(entries, str)
    return [entry for entry in entries if not isinstance(entry, kind)] if is_list else [entries]


def unknown(kind: str, name: str, valid_names: Iterable[str]) -> str:
    """Build the message for an unknown name, with the nearest known name and all known names."""
    known_names = sorted(valid_names)
    nearest_names = get_close_matches(str(name), known_names, n=3)
    suggestion = f" Did you mean '{nearest_names[0]}'?" if nearest_names else ""
    if len(known_names) <= _MOST:
        known_text = f"Known: {', '.join(known_names)}."
    else:
        closest_text = f"The closest of the {len(known_names)} known names are: {', '.join(nearest_names)}."
        known_text = closest_text if nearest_names else f"None of the {len(known_names)} known names is close to '{name}'."
    return f"There is no {kind} '{name}'.{suggestion} {known_text}"


def check_known(kind: str, name: Any, valid_names: Iterable[str]) -> None:
    """Refuse an unknown name. `kind` is what the error message calls it, such as "baseline"."""
    if name not in (known_names := tuple(valid_names)):
        raise RecipeError(unknown(kind, name, known_names))


def check_number(
    called: str,
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
    whole: bool = False,
) -> None:
    """Refuse a value that is no finite number, or that is out of bounds. With `whole` it must be a whole number."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not value > above or not least <= value <= most:
        minimum_text = f", at least {least:g}" if least > -math.inf else ""
        bound_text = f" above {above:g}" if above > -math.inf else minimum_text
        requirement = f"be a {'whole ' if whole else ''}number{bound_text}"
        if most < math.inf:
            requirement = f"lie between {least:g} and {most:g}"
        raise RecipeError(f"{called} is {value!r}; it must {requirement}.")


#: Maps a package's import name to the pip extra of spanwise that installs it.
EXTRAS = {
    **dict.fromkeys(("cyclopts", "rich", "pydantic", "pydantic_core", "yaml", "pyarrow", "filelock"), "cli"),
    **dict.fromkeys(("jinja2", "markupsafe", "altair", "vl_convert"), "report"),
    **dict.fromkeys(("trl", "transformers", "tokenizers", "accelerate", "datasets"), "train"),
    **dict.fromkeys(("re2", "tree_sitter", "tree_sitter_python"), "segment"),
    "scipy": "measure", "hypothesis": "testing", "math_verify": "math", "jsonschema": "json", "peft": "peft",
}  # fmt: skip


def lacking(part: str, error: ModuleNotFoundError, *, extra: str | None = None) -> ModuleNotFoundError:
    """Build the error for a missing package. It says which part of spanwise needs the package, and how to install it."""
    package_name = (error.name or "").split(".")[0]
    message = f"{part} needs '{package_name}', which does not come with spanwise; install it, or put it on PYTHONPATH."
    if package_name in EXTRAS:
        message = f"{part} needs '{package_name}'. Install it with: pip install 'spanwise[{extra or EXTRAS[package_name]}]'"
    return ModuleNotFoundError(message, name=error.name)
