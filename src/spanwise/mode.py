"""`Mode`: what one feature beside the methods does to credit and to a loss, so that the road knows it by no name."""

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
    """Curves of a mode's metrics on the page of a run: one curve for all values together, or several for each value.

    Attributes:
        title: of the panel.
        series: end of a metric's name -> what its curve is called.
        y: what its axis is called.
        note: under the chart.
        floor: what is below is drawn there.
    """

    title: str
    series: Mapping[str, str]
    y: str
    note: str = ""
    floor: float | None = None


@dataclass(frozen=True)
class Page:
    """The section of a mode on the page of a run: curves, and the last value of one metric at the top of the page.

    Attributes:
        title, text, asks: of the section; what it took of a step, the metric `<mode>/share`, is said behind the text.
        charts: in order.
        headline: the end of the metric's name, what it is called, and what is said of it beside its `Metric.at_end`.
    """

    title: str
    text: str
    asks: str
    charts: tuple[Chart, ...]
    headline: tuple[str, str, str]


class Mode:
    """A feature beside the methods. All of it lies in one room: its settings, its credit, its part in each engine.

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
        """The mode that its section of a recipe says."""
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in written:
            check_known(f"field of {cls.name}", name, names)
        for one in fields(cls):  # type: ignore[arg-type]
            if one.default is MISSING and one.name not in written:
                raise RecipeError(f"{cls.name} has no {one.name}, which it needs; write {cls.name}: {{{one.name}: ...}}.")
        return cls(**dict(written))

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for one in fields(self):  # type: ignore[arg-type]
            called, value, kind = f"{self.name}.{one.name}", getattr(self, one.name), hints[one.name]
            kinds = get_args(kind) or (kind,)
            if get_origin(kind) is Literal:
                check_known(called, value, kinds)
            if kind is bool and not isinstance(value, bool):
                raise RecipeError(f"{called} is {value!r}; write true or false.")
            if one.metadata and not (value is None and NoneType in kinds):
                check_number(called, value, whole=int in kinds, **one.metadata)

    @property
    def compares(self) -> bool:
        """Whether its credit compares completions, so that whole groups have to be there."""
        return type(self).credit is not Mode.credit

    def check_scheme(self, scheme: Any) -> None:
        """Refuse a `Scheme` that the mode does not suit, with a `RecipeError`."""

    def check_provided(self, provided: Collection[str]) -> None:
        """Refuse batches without a field that the mode cannot do without, with a `RecipeError`."""

    def check_turns(self) -> None:
        """Refuse rollouts of several turns or outputs, if the mode is about whole completions, with a `RecipeError`."""

    def check_steps(self, steps: int) -> None:
        """Refuse a run of so many generation batches in which the mode would do nothing, with a `RecipeError`."""

    def recorded(self, table: Any, rows: Any) -> Mapping[str, Tensor]:
        """The fields of `Batch` that some completions of a `RolloutTable` hold for the credit; none where they do not count yet."""
        return {}

    @property
    def readable(self) -> bool:
        """Whether its part "model" can read scores of completions: all that they are counted from is known."""
        return False

    def as_trained(self, places: Sequence[Path]) -> Mode:
        """The mode with what a run has measured for it, so that its score can be read (`readable`).

        Args:
            places: folders in which the run may have left its files, the nearest first.
        """
        return self

    @property
    def judge(self) -> str | None:
        """The objective that its score of a completion is about; None: it gives completions no score."""
        return None

    def opinion(self, score_n: Tensor, group_n: Tensor, step_n: Tensor) -> tuple[Tensor, Tensor]:
        """Of completions with its score, of steps: its share in the credit, and the score as its group compares it."""
        return torch.zeros_like(score_n), torch.zeros_like(score_n)

    def columns(self, batch: Any) -> Mapping[str, Tensor]:
        """What a rollout file keeps of each completion of a `Batch` for the mode: a number for each, by the name of its column."""
        return {}

    def note(self, table: Any) -> str:
        """What is to be said of the completions of a `RolloutTable` for which it does not count yet; empty: nothing."""
        return ""

    def credit(self, credit: Credit, reading: Any, batch: Any, scheme: Any) -> Credit:
        """The credit of a method with what the mode changes in it; arguments as in `pipeline.credit_batch`."""
        return credit

    def plain(self) -> dict[str, Any]:
        """The mode's section of a recipe."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


def setting(default: Any, **bounds: float) -> Any:
    """A field of a mode that is a number, or a whole one, within bounds: `above`, `least`, `most` (`check_number`)."""
    return field(default=default, metadata=bounds)


def check_modes(modes: Any) -> None:
    """Refuse what is no list of modes, and two of one name."""
    wrong = next((mode for mode in modes if not isinstance(mode, Mode)), None) if isinstance(modes, Sequence) else modes
    if wrong is not None or isinstance(modes, str):
        raise RecipeError(f"The modes are a list of modes, such as [Laser(token='<|vision_start|>')]; there is {wrong!r}.")
    names = [mode.name for mode in modes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RecipeError(f"There are two modes '{twice}'; give one.")


def part_class(mode: Mode | type[Mode], engine: str) -> Any:
    """The class of what a mode does in an engine, of `spanwise.modes.parts`; None: nothing but `Mode.credit`.

    Its module is imported here and nowhere else, so that a mode without engines needs none of them.
    """
    if engine not in mode.parts:
        return None
    module, _, name = mode.parts[engine].partition(":")
    return getattr(import_module(module), name)


def parts_of(modes: Sequence[Mode], engine: str, *given: Any, **more: Any) -> dict[str, Any]:
    """The parts in an engine of all modes that have one, by the name of the mode, made with what that engine gives."""
    return {mode.name: part_class(mode, engine)(mode, *given, **more) for mode in modes if engine in mode.parts}


def added_by(modes: Sequence[Mode], engine: str) -> frozenset[str]:
    """The fields of `Batch` that modes fill in where an engine has their parts."""
    return frozenset(name for mode in modes if engine in mode.parts for name in mode.adds)
