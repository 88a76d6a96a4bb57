"""Where runs of the command line go, and what else their commands write into a folder."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from spanwise.disk import write_text
from spanwise.errors import DataError
from spanwise.rollouts.folder import is_run

#: Where runs go that name no folder.
RUNS = Path("runs")


def new_folder(name: str) -> Path:
    """`runs/<name>-<n>` with the smallest n that is not there yet."""
    return next(place for n in count(1) if not (place := RUNS / f"{name}-{n}").exists())


def newest_folder(name: str) -> Path | None:
    """The `runs/<name>-<n>` of the largest n; None if there is none."""
    found = {place: place.name.removeprefix(f"{name}-") for place in RUNS.glob("*") if place.name.startswith(f"{name}-")}
    numbered = [place for place, number in found.items() if number.isdecimal() and place.is_dir()]
    return max(numbered, key=lambda place: int(found[place]), default=None)


def check_no_run(path: str | Path) -> None:
    """Refuse the folder of a run to what would write its own `summary.json` or `report.html` over that of the run."""
    if is_run(Path(path)):
        raise DataError(f"'{path}' holds a run, whose summary and report would be written over; give another --output.")


def write_page(folder: Path, html: str) -> Path:
    """Write `report.html` into a folder; where it lies."""
    target = folder / "report.html"
    write_text(target, html)
    return target
