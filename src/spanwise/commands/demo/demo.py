"""`spanwise demo`: train from one warm start with two ways of giving credit, and show the figures."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from spanwise.commands.shared.display import figure_table, text_plot
from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.folder import check_no_run, new_folder
from spanwise.commands.train.train import train
from spanwise.errors import RecipeError
from spanwise.recipe import Recipe, load, scheme_of
from spanwise.rollouts.folder import RunFolder, check_free, metrics_until, sole_writer
from spanwise.tasks import Fields, task_shape
from spanwise.tasks.invoices import MEASURED

#: The number of batches that a running mean covers.
WINDOW = 5
#: The share of right fields that a run must reach. The demo counts the completions until then.
GOAL = 0.8


@dataclass(frozen=True)
class Trained:
    """A finished run of the demo. `arm` is its way of crediting; `title` names the arm and any seed."""

    arm: str
    title: str
    recipe: Recipe
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Demo:
    """A demo, which compares ways of crediting (arms). Users may not set `fixed` recipe fields."""

    name: str
    arms: Mapping[str, Mapping[str, Any]]
    common: Mapping[str, Any]
    fixed: Sequence[str]
    result: Callable[[Sequence[Trained]], dict[str, Any]]
    show: Callable[[Console, Sequence[Trained], Mapping[str, Any]], None]


def run_demo(
    demo: Demo,
    *,
    seeds: Sequence[int],
    output: str | None,
    choices: Mapping[str, Any],
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train each arm of a demo with each seed. Return the content of `summary.json`."""
    console = console or Console()
    start_time = time.perf_counter()
    if len(set(seeds)) < len(seeds):
        raise RecipeError(f"Give each seed once; got {', '.join(map(str, seeds))}.")
    for field in choices.keys() & set(demo.fixed):
        raise RecipeError(f"The demo chooses the {field} of each run itself. Remove --set {field}.")
    folder = new_folder(demo.name) if output is None else Path(output)
    check_no_run(folder)
    has_many_seeds = len(seeds) > 1
    run_folders = {
        (arm, seed): folder / (arm.replace(" ", "_") + (f"-{seed}" if has_many_seeds else ""))
        for seed in seeds
        for arm in demo.arms
    }
    for run_folder in run_folders.values():
        check_free(run_folder, overwrite=overwrite)
    trained_runs = []
    with sole_writer(folder):
        for (arm, seed), run_folder in run_folders.items():
            recipe_fields = {**demo.common, **demo.arms[arm], **choices, "seed": seed, "output": str(run_folder)}
            run_recipe = load(None, recipe_fields)
            run_title = f"{arm}, seed {seed}" if has_many_seeds else arm
            run_summary = train(run_recipe, console=console, title=run_title, overwrite=overwrite)
            trained_runs.append(Trained(arm, run_title, run_recipe, run_summary))
        summary = {**demo.result(trained_runs), "seconds": time.perf_counter() - start_time}
        RunFolder(folder).write_summary(summary)
    demo.show(console, trained_runs, summary)
    console.print(f"The demo took {summary['seconds']:.0f} s. {folder} holds its summary.json, and a folder for each run.")
    return summary


def _sum_up_digits(trained: Sequence[Trained]) -> dict[str, Any]:
    """Return the accuracy and other figures of the digits demo."""
    figures_by_seed: dict[str, dict[str, dict[str, Any]]] = {}
    for run in trained:
        evaluation_points = run.summary["curve"]
        final_figures = run.summary["final"]
        figures_by_seed.setdefault(str(run.recipe.seed), {})[run.arm] = {
            **{name: final_figures[name] for name in ("accuracy", "refusal_rate")},
            "peak_refusal_rate": max(point["refusal_rate"] for point in evaluation_points),
            "mean_accuracy": sum(point["accuracy"] for point in evaluation_points) / len(evaluation_points),
            **{name: final_figures[name] for name in ("ece", "brier", "auroc", "format_rate")},
            **{name: run.summary[name] for name in ("seconds", "spanwise_share")},
        }
    means_by_arm: dict[str, dict[str, float | None]] = {}
    for arm in DIGITS.arms:
        figures_of_seeds = [figures_by_arm[arm] for figures_by_arm in figures_by_seed.values()]
        means_by_arm[arm] = {}
        for name in figures_of_seeds[0]:
            figure_values = [figures[name] for figures in figures_of_seeds if figures[name] is not None]
            means_by_arm[arm][name] = sum(figure_values) / len(figure_values) if figure_values else None
    return {
        "arms": means_by_arm,
        "seeds": figures_by_seed,
        "recipe": trained[0].recipe.model_dump(mode="json", exclude=set(DIGITS.fixed)),
    }


def verdict(figures: Mapping[str, Any]) -> str:
    """Say whether a run collapsed into refusals, and whether it recovered."""
    if figures["peak_refusal_rate"] < 0.5:
        return "the policy kept answering"
    if figures["refusal_rate"] > 0.5:
        return "the policy learned to refuse most questions, and still refuses them at the end"
    return "the policy learned to refuse most questions, but recovered"


def _show_digits(console: Console, trained: Sequence[Trained], result: Mapping[str, Any]) -> None:
    recipe = trained[0].recipe
    setup_text = (
        f"all arms begin with the same warm start ({recipe.start}); the rewards are correctness and "
        f"{recipe.rule.replace('_', ' ')}"
    )
    for seed, figures_by_arm in result["seeds"].items():
        table_title = f"digit puzzle, seed {seed}: {setup_text}"
        verdict_texts = (f"{arm}: {verdict(figures)}" for arm, figures in figures_by_arm.items())
        say(console, *figure_table(table_title, figures_by_arm, absent=["spanwise_share"]), *verdict_texts)
    for run in trained:
        refusal_rates = [point.get("refusal_rate") for point in run.summary["curve"]]
        accuracies = [point.get("accuracy") for point in run.summary["curve"]]
        curves_text = text_plot({"refusals": refusal_rates, "accuracy": accuracies})
        say(console, f"\n{run.title}, evaluated every {run.recipe.eval_every} steps", curves_text)


def _sum_up_fields(trained: Sequence[Trained]) -> dict[str, Any]:
    """Return figures and curves of the runs of the fields demo."""
    figures_by_run = dict[str, dict[str, Any]]()
    curve_by_run = dict[str, list[float]]()
    for run in trained:
        field_shares_by_batch = shares_right(run.recipe, measured_fields(run.recipe))
        share_curve = running_mean([sum(shares.values()) / len(shares) for shares in field_shares_by_batch])
        batch_count = next((batch_number for batch_number, value in enumerate(share_curve, start=1) if value >= GOAL), None)
        figures_by_run[run.title] = {
            "right at the end": share_curve[-1],
            "completions to 80 %": None if batch_count is None else batch_count * run.recipe.prompts * run.recipe.group_size,
            "format rate": run.summary["final"]["format_rate"],
            # Count only the time of RL: the first run also trains the warm start, which both runs use.
            "seconds of steps": run.summary["step_seconds"],
        }
        curve_by_run[run.title] = share_curve
    return {"arms": figures_by_run, "curves": curve_by_run}


def _show_fields(console: Console, trained: Sequence[Trained], result: Mapping[str, Any]) -> None:
    title = f"share of the {len(measured_fields(trained[-1].recipe))} fields that are right, averaged over {WINDOW} batches"
    say(console, *figure_table(title, result["arms"]), text_plot(result["curves"]))


def shares_right(recipe: Recipe, names: Sequence[str]) -> list[dict[str, float]]:
    """For each training batch, return how often each field is right. A missing field counts as wrong."""
    objectives = scheme_of(recipe, *task_shape(recipe)).objectives
    # If `if_missing` is None, the mean skips completions without the field, so scale the mean down to count them as 0.
    names_with_if_missing = {objective.name for objective in objectives if objective.if_missing is not None}
    return [
        {
            name: batch.get(f"rewards/equals.{name}/mean", 0.0)
            * (1.0 if f"equals.{name}" in names_with_if_missing else 1.0 - batch[f"credit/equals.{name}/reward_absent"])
            for name in names
        }
        for batch in metrics_until(Path(recipe.output or ""), recipe.steps)
        if f"credit/equals.{names[0]}/reward_absent" in batch
    ]


def measured_fields(recipe: Recipe) -> tuple[str, ...]:
    """Return the JSON fields that the demo counts: those that the prompt determines. Lists count by their first element."""
    return MEASURED if recipe.task == "invoices" else Fields(recipe.fields).knowable


def running_mean(values: Sequence[float]) -> list[float]:
    """Replace each value by the mean of the last `WINDOW` values up to it."""
    windows = (values[max(0, window_end - WINDOW) : window_end] for window_end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


_WRITTEN = yaml.safe_load(files("spanwise.commands.demo").joinpath("demos.yaml").read_text(encoding="utf-8"))
DIGITS = Demo(**_WRITTEN["digits"], result=_sum_up_digits, show=_show_digits)
FIELDS = Demo(**_WRITTEN["fields"], result=_sum_up_fields, show=_show_fields)
INVOICES = Demo(**_WRITTEN["invoices"], result=_sum_up_fields, show=_show_fields)
DEMOS = {"invoices": INVOICES, "confidence": DIGITS, "fields": FIELDS, "digits": DIGITS}
