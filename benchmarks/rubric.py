"""What a judge's errors cost: a rubric of eight criteria, each paying its part, against their sum on the whole completion.

    python benchmarks/rubric.py [--judges exact,flips10,flips20,lenient,biased] [--arms by_part,sum] [--rate .001]
    python benchmarks/rubric.py --table        # trains nothing

The task is `fields` with K = 8 (benchmarks/fields.py). Criterion k asks whether field k is right.
Another objective pays the form: the share of the fields that are there.

    by_part    `bae`: each verdict minus the group's mean pays the part that the criterion names
    sum        `grpo`: the same verdicts added up, minus the group's mean, over its standard deviation

    exact      every verdict is right
    flips10    each verdict is turned round with a probability of .1, for each completion and criterion by itself
    flips20    with .2
    lenient    the verdicts about field c are yes for a right value and for every 0; the others are right
    biased     the verdicts about field c are yes for every 0, and for another right value one time in two; the others are right

An arm has, for each judge, the learning rate that was best on two other seeds and on other held-out prompts.
What is there is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from fields import (
    EVERY,
    GOALS,
    MOST_STEPS,
    SEEDS,
    TUNING_SEEDS,
    Run,
    best_rate,
    kept_run,
    ratio,
    reach,
    runs_in,
    train,
)

from spanwise import Objective, Scheme
from spanwise.commands.shared.progress import quiet
from spanwise.measure import mean_interval
from spanwise.tasks import Fields
from spanwise.tasks.fields import FORM

FIELDS = Fields(8)
ARMS = ("by_part", "sum")
JUDGES = {"exact": 0.0, "flips10": 0.1, "flips20": 0.2, "lenient": 0.0, "biased": 0.0}
BIASED = "c"
GOAL = GOALS[0]
RUBRIC = [{"name": name, "part": name, "text": f"The value of {name} follows from the digits."} for name in FIELDS.names]


def chance_of(*texts: str) -> float:
    """Return a number in [0, 1) that texts decide; those of similar texts are independent, as their checksums are not."""
    return int.from_bytes(blake2b("\n".join(texts).encode(), digest_size=6).digest(), "big") / 2**48


def simulated_judge(blocks: Any, answer: Any, criterion: str, judge: str) -> list[float | None]:
    """Give a verdict of known error on one criterion; what it says of a completion does not depend on the rest of the batch."""
    name = criterion.split()[3]
    verdicts = list[float | None]()
    for parts, gold in zip(blocks, answer, strict=True):
        if parts[name] is None:
            verdicts.append(None)
            continue
        value, right = parts[name][""].strip(), str(json.loads(gold)[name])
        is_yes = value == right
        read = "".join(part[""] or "" for part in parts.values() if part is not None) + gold
        chance = chance_of(criterion, read)
        if name == BIASED and judge in ("lenient", "biased"):
            is_yes = value == "0" or (is_yes and (judge == "lenient" or chance < 0.5))
        verdicts.append(float(is_yes != (chance < JUDGES[judge])))
    return verdicts


def fields_there(blocks: Any) -> list[float]:
    """Return the share of the fields that a completion has."""
    return [sum(parts[name] is not None for name in FIELDS.names) / FIELDS.count for parts in blocks]


def scheme_of(arm: str, judge: str) -> Scheme:
    """The rule of credit of an arm."""
    if arm == "by_part":
        method, rubric, how = "bae", RUBRIC, {"baseline": "group"}
    else:
        method, rubric, how = "grpo", [{key: one[key] for key in ("name", "text")} for one in RUBRIC], {"pays": "*"}
    judged: dict[str, Any] = {"criteria": rubric, "if_missing": 0.0, "options": {"judge": judge}, **how}
    form: dict[str, Any] = {"pays": FORM, **how}
    objectives = [Objective(simulated_judge, name="rubric", **judged), Objective(fields_there, name="form", **form)]
    return Scheme.preset(method, FIELDS.layout, objectives=objectives)


def run_of(arm: str, judge: str, rate: float, seed: int, folder: Path) -> dict[str, Any]:
    """A run, read or made, with the curve of the fields that are judged without bias."""
    run = kept_run(
        folder / judge / f"{arm}-{rate:g}-{seed}.json",
        {"arm": arm, "judge": judge, "rate": rate, "seed": seed},
        lambda: train(Run(arm, FIELDS, rate, seed, tuning=seed in TUNING_SEEDS, scheme=scheme_of(arm, judge))),
    )
    return judged_without_bias(run)


def judged_without_bias(run: dict[str, Any]) -> dict[str, Any]:
    """The run with the mean accuracy of the fields that can be known and whose judge is not biased."""
    biased = BIASED if run["judge"] in ("lenient", "biased") else None
    columns = [k for k, name in enumerate(FIELDS.names) if name in FIELDS.knowable and name != biased]
    curve = [point | {"accuracy": sum(point["by_field"][k] for k in columns) / len(columns)} for point in run["curve"]]
    return run | {"curve": curve}


def tuned(arm: str, judge: str, folder: Path) -> float:
    """The learning rate with the smallest area above the curves of the tuning seeds."""
    return best_rate(
        lambda rate: sum(_shortfall(run_of(arm, judge, rate, seed, folder)) for seed in TUNING_SEEDS), largest=0.02
    )


def _shortfall(run: Mapping[str, Any]) -> float:
    """What is wrong on average over the budget; a run that ended early keeps its last accuracy."""
    accuracy = [point["accuracy"] for point in run["curve"]]
    points = MOST_STEPS // EVERY + 1
    return 1 - (sum(accuracy) + (points - len(accuracy)) * accuracy[-1]) / points


def train_all(judges: Sequence[str], arms: Sequence[str], folder: Path, given: float | None = None) -> None:
    """Choose learning rates, if none is given, and train what is missing, one run after the other."""
    for judge in judges:
        for arm in arms:
            rate = given or tuned(arm, judge, folder)
            if given is None:
                (folder / judge / f"{arm}.json").write_text(json.dumps({"rate": rate}))
            for seed in SEEDS:
                run_of(arm, judge, rate, seed, folder)


def runs_of(arm: str, judge: str, folder: Path, given: float | None = None) -> list[dict[str, Any]]:
    """The runs of an arm at its learning rate, or at a given one, by seed; none before the rate is chosen."""
    return [judged_without_bias(run) for run in runs_in(folder / judge, arm, given)]


def show(folder: Path, given: float | None = None) -> None:
    """Completions to 80 %, the ratio to by_part, accuracy at the end and paired differences, as Markdown."""
    heading = ["judge", "arm", "learning rate", "seeds", "completions to 80 %", "ratio", "right at the end"]
    print("| " + " | ".join([*heading, "by part minus sum", "field c"]) + " |")
    print("|---|---|---|---|---|---|---|---|---|")
    for judge in JUDGES:
        table = {arm: runs_of(arm, judge, folder, given) for arm in ARMS}
        table["by_part"] = table["by_part"] or runs_of("by_part", judge, folder)  # a rate may be given to the sum alone
        ends = {arm: torch.tensor([run["curve"][-1]["accuracy"] for run in runs]).double() for arm, runs in table.items()}
        for arm, runs in table.items():
            if len(runs) < 2:
                continue
            is_paired = arm == "sum" and len(table["by_part"]) == len(runs)
            against = ratio(runs, table["by_part"], GOAL) if is_paired else ""
            difference = _mean(ends["by_part"] - ends["sum"], "+.3f") if is_paired else ""
            biased = torch.tensor([run["curve"][-1]["by_field"][FIELDS.names.index(BIASED)] for run in runs]).double()
            cells = [judge, f"`{arm}`", f"{runs[0]['rate']:g}", str(len(runs)), reach(runs, GOAL), against]
            print("| " + " | ".join([*cells, _mean(ends[arm], ".3f"), difference, _mean(biased, ".3f")]) + " |")


def _mean(values: torch.Tensor, form: str) -> str:
    interval = mean_interval(values)
    return f"{interval.value:{form}} ({interval.low:{form}}, {interval.high:{form}})"


def draw(folder: Path, place: Path) -> None:
    """Draw the curves of every seed under the judges that are right, and that flip one verdict in ten and in five."""
    import altair as alt

    panels = []
    for judge, title in (("exact", "exact"), ("flips10", "10 % flipped"), ("flips20", "20 % flipped")):
        runs = [run for arm in ARMS for run in runs_of(arm, judge, folder)]
        points = [{"arm": run["arm"], "seed": run["seed"], **point} for run in runs for point in run["curve"]]
        chart = alt.Chart(alt.InlineData(values=points), title=title, width=200, height=200)
        panels.append(
            chart.mark_line(strokeWidth=1.2, opacity=0.8).encode(
                x=alt.X("samples:Q", title="completions", axis=alt.Axis(grid=False, tickCount=4)),
                y=alt.Y("accuracy:Q", title="fields right", scale=alt.Scale(domain=[0, 1])),
                color=alt.Color("arm:N", legend=alt.Legend(orient="bottom", title=None)),
                detail="seed:N",
            )
        )
    alt.hconcat(*panels).configure(background="white").configure_view(stroke=None).save(
        str(place / "rubric.png"), scale_factor=2
    )


def main() -> None:
    """Run what is missing, then show everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judges", default=",".join(JUDGES))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--output", default="runs/rubric")
    parser.add_argument("--rate", type=float, help="in place of the one that was best on the other seeds")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--charts", help="folder for the curves as PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    folder = Path(options.output)
    if not options.table:
        train_all(options.judges.split(","), options.arms.split(","), folder, options.rate)
    show(folder, options.rate)
    if options.charts:
        draw(folder, Path(options.charts))


if __name__ == "__main__":
    main()
