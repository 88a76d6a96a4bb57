"""What `SpanGRPOTrainer` refuses of its arguments, where TRL or Python would say something else, or nothing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from spanwise.engines.trl.checks import check_columns
from spanwise.errors import DataError, RecipeError, unknown
from spanwise.modes.critic.config import CriticConfig
from spanwise.objective import Objective
from spanwise.scheme import Scheme

_SCHEME = "scheme=Scheme.preset('bae', layout, objectives=[Objective(...), ...])"


def check_scheme(scheme: Any, options: Mapping[str, Any]) -> Scheme:
    """The scheme, if it is one, beside options that the trainer knows.

    Example:
        >>> check_scheme("bae", {})
        Traceback (most recent call last):
        spanwise.errors.RecipeError: The scheme is 'bae'; it says what is read, rewarded and compared. Write scheme=Scheme...
    """
    parts = [name for name in options if name in inspect.signature(Scheme.preset).parameters]
    if parts:
        raise RecipeError(f"{' and '.join(parts)} of a run stand in its scheme, not beside it. Write {_SCHEME}.")
    if not isinstance(scheme, Scheme):
        raise RecipeError(f"The scheme is {scheme!r}; it says what is read, rewarded and compared. Write {_SCHEME}.")
    known = list(inspect.signature(GRPOTrainer).parameters)
    for name in options:
        if name not in known:
            raise RecipeError(unknown("argument of SpanGRPOTrainer called", name, [*known, "scheme"]))
    return scheme


def check_critic(critic: Any, scheme: Scheme) -> None:
    """Refuse a method that needs a critic without one, and a critic that nothing needs.

    Example:
        >>> from spanwise import Layout
        >>> check_critic(None, Scheme.preset("gae", Layout({"all": ["answer"]})))
        Traceback (most recent call last):
        spanwise.errors.RecipeError: Method 'gae' needs a critic and there is none. Write critic=CriticConfig(...)...
    """
    names = scheme.value_names
    if critic is None and names:
        raise RecipeError(
            f"Method '{scheme.method}' needs a critic and there is none. Write critic=CriticConfig(...), in a recipe critic: "
            "{learning_rate: 1.0e-5}, or use a method that compares completions, such as 'bae' or 'grpo'."
        )
    if critic is None:
        return
    if not isinstance(critic, CriticConfig):
        raise RecipeError(f"The critic is {critic!r}; write critic=CriticConfig(learning_rate=1e-5, ...).")
    critic.check_scheme(scheme)


def check_args(args: Any) -> None:
    """Refuse a configuration that is no `GRPOConfig`, or with a constant that no training survives.

    Example:
        >>> check_args({"beta": 0.1})
        Traceback (most recent call last):
        spanwise.errors.RecipeError: args is a dict; pass SpanGRPOConfig(...) or TRL's GRPOConfig(...).
    """
    if not isinstance(args, GRPOConfig):
        raise RecipeError(f"args is a {type(args).__name__}; pass SpanGRPOConfig(...) or TRL's GRPOConfig(...).")
    for name, (least, most) in _BOUNDS.items():
        value = getattr(args, name, None)
        if isinstance(value, int | float) and not least <= value <= most:
            raise RecipeError(f"{name} is {value}; it must lie between {least:g} and {most:g}.")


#: What TRL takes as it comes, and what would then turn a term of the loss around, or let it drown all others.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "beta": (0.0, 1e3), "epsilon": (0.0, 1.0), "epsilon_high": (0.0, 1e3), "entropy_coef": (0.0, 1e3),
    "temperature": (0.01, 100.0), "learning_rate": (0.0, 1e3), "num_iterations": (1, 1e4),
}  # fmt: skip


def check_reference(args: GRPOConfig, model: Any, options: Mapping[str, Any]) -> None:
    """Refuse a KL term where TRL would have no place to load the reference model from."""
    adapters = options.get("peft_config") is not None or hasattr(model, "peft_config")
    if args.beta == 0.0 or isinstance(model, str) or adapters or getattr(model.config, "_name_or_path", ""):
        return
    raise RecipeError(
        f"beta is {args.beta}, and TRL loads the reference model by the name of the model, which this one does not have: it was "
        "built in memory. Save it and its tokenizer in a folder and pass the folder as model, or set beta=0."
    )


def check_datasets(train: Any, evaluation: Any, objectives: Sequence[Objective], options: Mapping[str, Any]) -> None:
    """Refuse what is no dataset, and an evaluation dataset without the columns that training needs.

    Example:
        >>> check_datasets([{"prompt": "2+2="}], None, [], {})
        Traceback (most recent call last):
        spanwise.errors.DataError: train_dataset is a list; make a dataset of it: datasets.Dataset.from_list(rows).
    """
    if train is None and options.get("environment_factory") is None:
        raise DataError("train_dataset is missing: pass a dataset with a column 'prompt' and those that the rewards read.")
    _check_kind("train_dataset", train)
    check_columns(objectives, getattr(train, "column_names", None))
    evaluations = evaluation if isinstance(evaluation, Mapping) else {"": evaluation}
    for name, one in evaluations.items():
        called = f"eval_dataset[{name!r}]" if name else "eval_dataset"
        _check_kind(called, one)
        try:
            check_columns(objectives, getattr(one, "column_names", None), called="the evaluation dataset")
        except DataError as error:
            raise DataError(f"{called}: {error}") from error


def _check_kind(called: str, dataset: Any) -> None:
    if isinstance(dataset, Mapping):
        splits = list(dataset)
        raise DataError(f"{called} holds the splits {', '.join(splits)}; pass one of them: {called}=data[{splits[0]!r}].")
    if isinstance(dataset, list | tuple):
        raise DataError(f"{called} is a {type(dataset).__name__}; make a dataset of it: datasets.Dataset.from_list(rows).")
    if dataset is not None and not isinstance(dataset, Dataset | IterableDataset):
        raise DataError(f"{called} is a {type(dataset).__name__}; pass a datasets.Dataset or IterableDataset.")
