"""Whether the lead of credit by field on the letters depends on the size of a group or of the policy: docs/scale.md.

    python benchmarks/scale.py [--seeds 0,1,2,3,4] [--output runs/scale] [--charts docs/images]
    python benchmarks/scale.py --table       # trains nothing: the runs that are there
    python benchmarks/scale.py --settings w1024   # a policy of 42 million parameters, for a GPU

Each setting is `benchmarks/invoices.py` with the learning rate 3e-4, by field and with the sum. What is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import invoices
import torch

from spanwise.measure import mean_interval

RATE = 3e-4
#: Each setting with its options of `benchmarks/invoices.py` and its name on the picture.
SETTINGS = {
    "g4": (["--group", "4"], "groups of 4"), "g8": ([], "groups of 8, .7 M"), "g16": (["--group", "16"], "groups of 16"),
    "w64": (["--width", "64"], ".2 M parameters"), "w256": (["--width", "256"], "2.7 M parameters"),
    "w1024": (["--width", "1024"], "42 M parameters"),
}  # fmt: skip
GOALS = (0.4, 0.5, 0.6)


def read_runs(folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Read the figures of a setting's runs, by arm and seed."""
    runs: dict[str, dict[int, dict[str, Any]]] = {"by_field": {}, "sum": {}}
    for file in folder.glob("*.figures"):
        run = json.loads(file.read_text())
        if run["arm"] in runs and run["rate"] == RATE and run["seed"] != invoices.TUNING_SEED:
            runs[run["arm"]][run["seed"]] = run
    return runs


def ratio_rows(name: str, runs: dict[str, dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compute, for each goal, how many times the completions of credit by field the sum needs: a geometric mean over seeds."""
    rows = []
    seeds = sorted(runs["by_field"].keys() & runs["sum"].keys())
    for goal in GOALS:
        ratios = [
            invoices.completions_to(runs["sum"][s], goal) / invoices.completions_to(runs["by_field"][s], goal) for s in seeds
        ]
        reached = [math.log(ratio) for ratio in ratios if 0 < ratio < math.inf]
        row = {"setting": SETTINGS[name][1], "goal": f"{goal:.0%}", "reached": len(reached), "seeds": len(seeds)}
        if len(reached) > 1:
            interval = mean_interval(torch.tensor(reached, dtype=torch.float64))
            row |= {part: math.exp(getattr(interval, part)) for part in ("value", "low", "high")}
        rows.append(row)
    return rows


def show(name: str, runs: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Print the curves of a setting and the ratios."""
    print(f"\n{SETTINGS[name][1]}")
    for arm, by_seed in runs.items():
        texts = [
            f"{step * invoices.BATCH}: {invoices.written([invoices.curve(run)[step - 1] for run in by_seed.values()])}"
            for step in (8, 16, 48)
        ]
        print(f"  {arm}, fields right after completions: {'; '.join(texts)}")
    for row in ratio_rows(name, runs):
        text = f"{row['value']:.2f} ({row['low']:.2f}, {row['high']:.2f})" if "value" in row else "-"
        print(
            f"  the sum's completions over those by field, to {row['goal']}: {text}, {row['reached']} of {row['seeds']} got there"
        )


def draw(rows: list[dict[str, Any]], place: Path) -> None:
    """Draw the ratios with their intervals, on white and on dark."""
    import altair as alt

    place.mkdir(parents=True, exist_ok=True)
    rows = [row for row in rows if "value" in row]
    for name, background, ink in (("scale", "white", "#333"), ("scale-dark", "#16181d", "#ccc")):
        y = alt.Y("setting:N", title=None, sort=None)
        colour = alt.Color("goal:N", title="fields right", legend=alt.Legend(orient="bottom"))
        base = alt.Chart(
            alt.InlineData(values=rows), width=420, height=220, title="completions of the sum over those by field"
        )
        axis = alt.Axis(grid=False, tickCount=5)
        whiskers = base.mark_rule().encode(
            x=alt.X("low:Q", title=None, scale=alt.Scale(zero=False), axis=axis),
            x2="high:Q",
            y=y,
            yOffset="goal:N",
            color=colour,
        )
        points = base.mark_point(filled=True, size=60).encode(x="value:Q", y=y, yOffset="goal:N", color=colour)
        text: dict[str, Any] = {"labelColor": ink, "titleColor": ink}
        chart = (whiskers + points).configure(background=background).configure_view(stroke=None)
        chart = chart.configure_axis(**text).configure_legend(**text).configure_title(color=ink)
        chart.save(str(place / f"{name}.png"), scale_factor=2)


def main() -> None:
    """Run what is missing, then print and draw everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", default="g4,g8,g16,w64,w256")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--output", default="runs/scale")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--charts", help="folder for the picture as PNG")
    options = parser.parse_args()
    rows = []
    for name in options.settings.split(","):
        folder = Path(options.output) / name
        if not options.table:
            command = [
                sys.executable,
                str(Path(__file__).with_name("invoices.py")),
                "--rate",
                str(RATE),
                "--arms",
                "by_field,sum",
            ]
            subprocess.run([*command, *SETTINGS[name][0], "--seeds", options.seeds, "--output", str(folder)], check=True)
        runs = read_runs(folder)
        show(name, runs)
        rows += ratio_rows(name, runs)
    if options.charts:
        draw(rows, Path(options.charts))


if __name__ == "__main__":
    main()
