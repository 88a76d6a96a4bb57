"""`Mode`: the base class of optional features, such as a critic."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from spanwise.errors import RecipeError, check_known, check_number, wrong_entries
from spanwise.metric import Metric
from spanwise.types import Credit


@dataclass(frozen=True)
class Chart:
    """A chart of a mode's metrics on the report page of a run."""

    title: str
    series: Mapping[str, str]  # Maps a metric's name without its prefix to the label of its curve.
    y: str  # The label of the vertical axis.
    note: str = ""  # A text that the report prints below the chart.
    floor: float | None = None  # The chart draws values below this floor at the floor.


@dataclass(frozen=True)
class Page:
    """A mode's section on a run's report page."""

    title: str
    text: str
    asks: str
    charts: tuple[Chart, ...]
    # the metric at the top of a run's page: its name (without the mode's prefix), title and warning
    headline: tuple[str, str, str]


class Mode:
    """The base class of optional features that work beside any method, such as a critic.

    A mode can act at three points, each of them optional:

        before the policy's forward pass   its part in an engine adds tokens to the pass, and fields to `Batch`
        after the method                   `credit` changes the credit of a batch of whole groups
        in the loss                        its part in an engine adds a term

    A subclass is a frozen dataclass whose fields are the keys of its section in a recipe. `@register(NAME, kind="mode")` adds it.
    """

    name: ClassVar[str]  # Names the mode's section in a recipe, and is the prefix of its metrics.
    about: ClassVar[str] = ""  # The help text of the mode's section in a recipe.
    metrics: ClassVar[tuple[Metric, ...]] = ()  # The mode's metrics that have alarms.
    page: ClassVar[Page | None] = None  # The mode's section on the report page of a run; None: no section.
    #: The mode's settings that verl and SkyRL take from the recipe, not from their own configuration. Empty: all settings.
    elsewhere: ClassVar[tuple[str, ...]] = ()
    in_scheme: ClassVar[bool] = True  # False if engines get the mode as an argument, not in `Scheme.modes`.
    adds: ClassVar[frozenset[str]] = frozenset()  # The fields of `Batch` that the mode's code in an engine fills in.
    #: Maps an engine to the class "module:Class" that runs the mode there.
    parts: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> Any:
        """Build the mode from its section of a recipe, and refuse unknown or missing fields."""
        known_names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in section:
            check_known(f"field of {cls.name}", name, known_names)
        for known_field in fields(cls):  # type: ignore[arg-type]
            if known_field.default is MISSING and known_field.name not in section:
                raise RecipeError(f"{cls.name} needs {known_field.name}; write {cls.name}: {{{known_field.name}: ...}}.")
        return cls(**dict(section))

    def __post_init__(self) -> None:
        type_hint_by_field = get_type_hints(type(self))
        for setting_field in fields(self):  # type: ignore[arg-type]
            setting_path = f"{self.name}.{setting_field.name}"
            setting_value = getattr(self, setting_field.name)
            type_hint = type_hint_by_field[setting_field.name]
            allowed_types = get_args(type_hint) or (type_hint,)
            if get_origin(type_hint) is Literal:
                check_known(setting_path, setting_value, allowed_types)
            if type_hint is bool and not isinstance(setting_value, bool):
                raise RecipeError(f"{setting_path} is {setting_value!r}; write true or false.")
            if setting_field.metadata and not (setting_value is None and NoneType in allowed_types):
                check_number(setting_path, setting_value, whole=int in allowed_types, **setting_field.metadata)

    @property
    def compares(self) -> bool:
        """True if the mode compares completions, which needs whole groups."""
        return type(self).credit is not Mode.credit

    def check_scheme(self, scheme: Any) -> None:
        """Raise a `RecipeError` if the mode does not work with a `Scheme`, for example with its method or its objectives."""

    def check_provided(self, provided: Collection[str]) -> None:
        """Raise a `RecipeError` if batches lack a field that the mode needs."""

    def check_turns(self) -> None:
        """Raise a `RecipeError` for rollouts of several turns if the mode needs whole completions."""

    def check_steps(self, steps: int) -> None:
        """Raise a `RecipeError` or warn if `steps`, the number of the run's generation batches, is too low for the mode."""

    def recorded(self, table: Any, rows: Any) -> Mapping[str, Tensor]:
        """From recorded rollouts, read the `Batch` fields that this mode fills in."""
        return {}

    @property
    def readable(self) -> bool:
        """True if the mode can score completions with a model outside of training."""
        return False

    def as_trained(self, places: Sequence[Path]) -> Mode:
        """Return the mode with the settings that its training run measured and stored, such as `laser.reference`."""
        return self

    @property
    def judge(self) -> str | None:
        """The name of the objective that the mode's score predicts. None without a score."""
        return None

    def opinion(self, score_n: Tensor, group_n: Tensor, step_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return each score's weight in the credit, and the score relative to its group."""
        return torch.zeros_like(score_n), torch.zeros_like(score_n)

    def columns(self, batch: Any) -> Mapping[str, Tensor]:
        """Return the columns that the mode adds to a rollout file, with one number per completion."""
        return {}

    def note(self, table: Any) -> str:
        """Say how many completions were sampled before the mode took effect. Empty if none were."""
        return ""

    def credit(self, credit: Credit, reading: Any, batch: Any, scheme: Any) -> Credit:
        """Return a batch's credit with the mode's changes. Arguments after `credit`: those of `pipeline.credit_batch`."""
        return credit

    def plain(self) -> dict[str, Any]:
        """Return the mode's settings as its section of a recipe."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


def setting(default: Any, **bounds: float) -> Any:
    """Declare a mode's setting that is a number. `bounds` are `above`, `least` and `most` of `check_number`."""
    return field(default=default, metadata=bounds)


def check_modes(modes: Any) -> None:
    """Refuse a value that is no list of modes, or repeats a name."""
    if wrong_modes := wrong_entries(modes, Mode):
        raise RecipeError(
            f"modes must be a list such as [Laser(token='<|vision_start|>')], but {wrong_modes[0]!r} is no mode."
        )
    mode_names = [mode.name for mode in modes]
    duplicate_name = next((name for name in mode_names if mode_names.count(name) > 1), None)
    if duplicate_name is not None:
        raise RecipeError(f"There are two modes '{duplicate_name}'; give only one of them.")


def part_class(mode: Mode | type[Mode], engine: str) -> Any:
    """Import the class that runs a mode (optional feature) inside an engine. Return None if there is none."""
    if engine not in mode.parts:
        return None
    module_name, _, class_name = mode.parts[engine].partition(":")
    return getattr(import_module(module_name), class_name)


def parts_of(modes: Sequence[Mode], engine: str, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Map modes' names to the objects that run the modes inside an engine. Modes without code for the engine are skipped."""
    return {mode.name: part_class(mode, engine)(mode, *arguments, **options) for mode in modes if engine in mode.parts}


def added_by(modes: Sequence[Mode], engine: str) -> frozenset[str]:
    """Return the fields of `Batch` that modes fill in when they run inside an engine."""
    return frozenset(name for mode in modes if engine in mode.parts for name in mode.adds)
