"""`Mode`: a feature beside the methods that changes credit or loss; the other rooms know no mode by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from spanwise.errors import RecipeError, check_known, check_number
from spanwise.metric import Metric
from spanwise.types import Credit


@dataclass(frozen=True)
class Chart:
    """Curves of a mode's metrics on the page of a run: one curve for all values together, or several for each value."""

    title: str
    series: Mapping[str, str]  # maps the end of a metric's name to the name of the curve
    y: str  # the name of the axis
    note: str = ""  # the text under the chart
    floor: float | None = None  # lower values are drawn at this bound


@dataclass(frozen=True)
class Page:
    """The section of a mode on the page of a run: curves, and the last value of one metric at the top of the page."""

    title: str
    text: str
    asks: str
    charts: tuple[Chart, ...]
    headline: tuple[str, str, str]  # the end of the metric's name, the title, the sentence if `Metric.at_end` holds


class Mode:
    """A feature beside the methods; its settings, its credit and its part in each engine lie in one room.

    A mode is called at three places, and each call may be left out:

        before the policy's pass   the part of an engine: what the pass must see, and the fields of `Batch` that come of it
        into the credit            `credit`, once per batch of whole groups, after the method
        into the loss              the part of an engine: what is added to a loss

    Subclasses are frozen dataclasses: their fields are what the mode's section of a recipe holds. `@register(NAME, kind="mode")`
    makes one known, and everything that it declares here with it.

    Attributes:
        name: under which it is registered; its section in a recipe, and the beginning of its metrics.
        about: what its section in a recipe is for.
        metrics: those of a log that it has alarms for.
        page: its section on the page of a run; None: it has none.
        elsewhere: those of its fields that a trainer with a configuration of its own reads; empty: all of them.
        in_scheme: it is a part of the rule of credit (`Scheme.modes`); False: an engine is handed it beside the rule.
        adds: the fields of `Batch` that the parts of engines fill in, once they are known.
        parts: engine -> "module:Class", made with the mode and what the engine gives (`parts_of`). An engine that is not named does
            nothing before the pass and adds nothing to the loss.
    """

    name: ClassVar[str]
    about: ClassVar[str] = ""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    page: ClassVar[Page | None] = None
    elsewhere: ClassVar[tuple[str, ...]] = ()
    in_scheme: ClassVar[bool] = True
    adds: ClassVar[frozenset[str]] = frozenset()
    parts: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Any:
        """Build the mode from its section of a recipe."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in written:
            check_known(f"field of {cls.name}", name, names)
        for option in fields(cls):  # type: ignore[arg-type]
            if option.default is MISSING and option.name not in written:
                raise RecipeError(
                    f"{cls.name} has no {option.name}, which it needs; write {cls.name}: {{{option.name}: ...}}."
                )
        return cls(**dict(written))

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for option in fields(self):  # type: ignore[arg-type]
            setting, value, kind = f"{self.name}.{option.name}", getattr(self, option.name), hints[option.name]
            kinds = get_args(kind) or (kind,)
            if get_origin(kind) is Literal:
                check_known(setting, value, kinds)
            if kind is bool and not isinstance(value, bool):
                raise RecipeError(f"{setting} is {value!r}; write true or false.")
            if option.metadata and not (value is None and NoneType in kinds):
                check_number(setting, value, whole=int in kinds, **option.metadata)

    @property
    def compares(self) -> bool:
        """True if the mode's credit compares completions and therefore needs whole groups."""
        return type(self).credit is not Mode.credit

    def check_scheme(self, scheme: Any) -> None:
        """Refuse, with a `RecipeError`, a `Scheme` that does not fit the mode."""

    def check_provided(self, provided: Collection[str]) -> None:
        """Refuse, with a `RecipeError`, batches that lack a field which the mode needs."""

    def check_turns(self) -> None:
        """Refuse rollouts of several turns, with a `RecipeError`, if the mode needs whole completions."""

    def check_steps(self, steps: int) -> None:
        """Refuse, with a `RecipeError`, a run that is too short for the mode to do anything."""

    def recorded(self, table: Any, rows: Any) -> Mapping[str, Tensor]:
        """Return the fields of `Batch` that a `RolloutTable` records for the mode; none before the mode counts."""
        return {}

    @property
    def readable(self) -> bool:
        """True if the mode's part "model" can read scores of completions now."""
        return False

    def as_trained(self, places: Sequence[Path]) -> Mode:
        """Return the mode with what a run has measured for it, so that it is `readable`.

        Args:
            places: folders in which the run may have left its files, the nearest first.
        """
        return self

    @property
    def judge(self) -> str | None:
        """The objective that the mode's score of a completion predicts; None if the mode gives no score."""
        return None

    def opinion(self, score_n: Tensor, group_n: Tensor, step_n: Tensor) -> tuple[Tensor, Tensor]:
        """Return the share that the mode's score has in the credit, and the score as its group compares it."""
        return torch.zeros_like(score_n), torch.zeros_like(score_n)

    def columns(self, batch: Any) -> Mapping[str, Tensor]:
        """Return the numbers that a rollout file keeps for the mode, one per completion, by column."""
        return {}

    def note(self, table: Any) -> str:
        """Return a sentence on completions for which the mode does not count yet; empty if it counts for all."""
        return ""

    def credit(self, credit: Credit, reading: Any, batch: Any, scheme: Any) -> Credit:
        """Change the credit of a method; the arguments are those of `pipeline.credit_batch`."""
        return credit

    def plain(self) -> dict[str, Any]:
        """Return the mode's section of a recipe."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


def setting(default: Any, **bounds: float) -> Any:
    """Declare a number as a field of a mode, with the bounds `above`, `least` and `most` of `check_number`."""
    return field(default=default, metadata=bounds)


def check_modes(modes: Any) -> None:
    """Refuse anything but a list of modes, and two modes of one name."""
    entry = next((mode for mode in modes if not isinstance(mode, Mode)), None) if isinstance(modes, Sequence) else modes
    if entry is not None or isinstance(modes, str):
        raise RecipeError(f"The modes are a list of modes, such as [Laser(token='<|vision_start|>')]; there is {entry!r}.")
    names = [mode.name for mode in modes]
    doubled_name = next((name for name in names if names.count(name) > 1), None)
    if doubled_name is not None:
        raise RecipeError(f"There are two modes '{doubled_name}'; give only one of them.")


def part_class(mode: Mode | type[Mode], engine: str) -> Any:
    """Return the class of a mode's part in an engine (`spanwise.modes.parts`); None if the mode has no part there."""
    if engine not in mode.parts:
        return None
    module, _, name = mode.parts[engine].partition(":")
    return getattr(import_module(module), name)


def parts_of(modes: Sequence[Mode], engine: str, *given: Any, **more: Any) -> dict[str, Any]:
    """Build the parts of all modes that have one in an engine, by the name of the mode."""
    return {mode.name: part_class(mode, engine)(mode, *given, **more) for mode in modes if engine in mode.parts}


def added_by(modes: Sequence[Mode], engine: str) -> frozenset[str]:
    """Return the fields of `Batch` that modes fill in, in an engine that has their parts."""
    return frozenset(name for mode in modes if engine in mode.parts for name in mode.adds)
