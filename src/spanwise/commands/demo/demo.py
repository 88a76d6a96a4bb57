"""What both demos do: train each arm with every seed from one warm start, write `summary.json`, show what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from spanwise.commands.shared.folder import new_folder
from spanwise.commands.train.train import train
from spanwise.errors import RecipeError
from spanwise.recipe import Recipe, load
from spanwise.rollouts.folder import RunFolder, check_free, sole_writer


@dataclass(frozen=True)
class Trained:
    """One arm with one seed: its recipe and what `train` returned; `title` names the seed if there are several."""

    arm: str
    seed: int
    title: str
    recipe: Recipe
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Demo:
    """A demo: recipe fields of all `arms` and of each, those that no option may change, and what is made of the runs.

    Of several seeds the folder of a run is `<arm><before_seed><seed>`.
    """

    name: str
    arms: Mapping[str, Mapping[str, Any]]
    common: Mapping[str, Any]
    fixed: frozenset[str]
    before_seed: str
    result: Callable[[Sequence[Trained]], dict[str, Any]]
    show: Callable[[Console, Sequence[Trained], Mapping[str, Any]], None]


def run_demo(
    demo: Demo,
    *,
    seeds: Sequence[int],
    output: str | None = None,
    choices: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train every arm with every seed, `choices` being recipe fields of all arms, and return what `summary.json` holds."""
    console, started = console or Console(), time.perf_counter()
    if len(set(seeds)) < len(seeds):
        raise RecipeError(f"Give each seed once; got {', '.join(map(str, seeds))}.")
    for field in (choices or {}).keys() & demo.fixed:
        raise RecipeError(
            f"The demo sets the {field} of its arms itself, so --set {field} would change nothing; leave it out."
        )
    folder, several = new_folder(demo.name) if output is None else Path(output), len(seeds) > 1
    runs = [
        (arm, seed, folder / (arm.replace(" ", "_") + (f"{demo.before_seed}{seed}" if several else "")))
        for seed in seeds
        for arm in demo.arms
    ]
    for *_, place in runs:
        check_free(place, overwrite=overwrite)
    trained = []
    with sole_writer(folder):
        for arm, seed, place in runs:
            own = {**demo.common, **demo.arms[arm], **(choices or {}), "seed": seed, "output": str(place)}
            recipe, title = load(None, own), f"{arm}, seed {seed}" if several else arm
            summary = train(recipe, console=console, title=title, overwrite=overwrite)
            trained.append(Trained(arm, seed, title, recipe, summary))
        result = {**demo.result(trained), "seconds": time.perf_counter() - started}
        RunFolder(folder).write_summary(result)
    demo.show(console, trained, result)
    console.print(f"{result['seconds']:.0f} s in all. Everything is in {folder}: summary.json, and a folder for each run.")
    return result
