"""`spanwise fidelity`: compare baselines and token estimators with Monte Carlo re-rolls."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from spanwise.commands.report.report import report_folder
from spanwise.commands.shared.fitted import plain_table, say
from spanwise.commands.shared.folder import FIDELITY, without_nan
from spanwise.commands.shared.task import model_and_task, task_roller
from spanwise.disk import write_text
from spanwise.errors import DataError, RecipeError, check_known
from spanwise.fidelity import rerolls as rolls
from spanwise.fidelity.baselines import FIGURES, Fidelity, measure_fidelity
from spanwise.fidelity.fixed_point import fixed_point_rows
from spanwise.fidelity.page import difference_rows, token_rows, written_baselines
from spanwise.fidelity.tokens import TOKEN_KINDS, VALUES, SaeSegments, TokenFidelity, Trajectories, token_fidelity
from spanwise.measure import Interval
from spanwise.modes.critic.value_model import ABOUT
from spanwise.recipe import Recipe, answer_layout, scheme_of
from spanwise.rollouts.folder import hidden
from spanwise.tasks import task_layout

GROUP_SIZES = (4, 8, 16, 32)
#: The number of continuations per token that a Monte Carlo critic averages.
FEW = 4
#: The kinds of critics: the saved model's own, one trained by this command, and Monte Carlo averages.
CRITICS = ("own", "fitted", "mc")
#: The SAE variant that is compared with GAE. It was chosen on samples outside this comparison.
SAE = "SAE start 0.5, 0"
GROUP_MEAN = "GRPO c - group mean"


def show(checkpoint: Path, recipe: Recipe, *, output: Path, console: Console, options: Mapping[str, Any]) -> None:
    """Compare a saved model's estimated advantages with Monte Carlo."""
    layout = answer_layout(recipe, task_layout(recipe))
    compares_baselines = "tokens" not in options or recipe.answer_tags["confidence"] in layout.keys[layout.names[-1]]
    for objective in recipe.objectives or ():
        clip = (objective.get("options") or {}).get("clip", 0.01)
        if objective.get("reward") == "log_score" and clip != 0.01 and compares_baselines:
            raise RecipeError(
                f"Fidelity clips log_score at 0.01, but the recipe clips it at {clip}. Give a --recipe without clip."
            )
    first_block, answer_tag = layout.names[0], recipe.answer_tags["answer"]
    if answer_tag not in ("", *layout.keys[first_block]):  # the tag "" stands for the whole block
        raise RecipeError(
            f"`spanwise fidelity` judges the first block, but block '{first_block}' has no tag '{answer_tag}'. Give a "
            "--recipe whose first block holds the answer."
        )
    report_fields: dict[str, Any] = {"options": options}
    if "tokens" in options:
        max_critic_steps, critic_names, seed = options["critic_steps"], options["critics"], options["seed"]
        sae_segments = SaeSegments() if options["reference"] == "segment" else None
        trajectories, critic_values = rolled_tokens(
            checkpoint, recipe, prompts=options["token_prompts"], rerolls=options["rerolls"], seed=seed, console=console,
            critics=critic_names and critic_names.split(","),
            steps=sorted({max_critic_steps, *(step for step in rolls.CRITIC_STEPS if step < max_critic_steps)}),
        )  # fmt: skip
        fidelity = token_fidelity(trajectories, critic_values, segments=sae_segments, seed=seed)
        report_fields |= show_tokens(fidelity, sae_segments, console=console)
    if compares_baselines:
        report_fields |= show_baselines(checkpoint, recipe, console, options)
    else:
        say(console, "The layout's last block has no confidence, so only token advantages are compared, not the baselines.")
    write_fidelity(output, source=str(checkpoint), recipe=recipe.model_dump(mode="json"), **report_fields)
    say(console, f"Report: {report_folder(output)}")


def write_fidelity(folder: str | Path, *, source: str, recipe: Mapping[str, Any], **measured: Any) -> None:
    """Write `fidelity.json`, from which the report is made."""
    empty_fields = {"counts": {}, "figures": [], "differences": [], "points": [], "tokens": [], "options": {}}
    report_fields = {"source": source, "recipe": dict(recipe), **empty_fields, **measured}
    write_text(Path(folder) / FIDELITY, json.dumps(without_nan(hidden(report_fields)), indent=1) + "\n")


def roller_of(folder: Path, recipe: Recipe, console: Console | None = None) -> rolls.Roller:
    """Build the `Roller` that samples completions of a recipe's task from a saved model."""
    return task_roller(*model_and_task(folder, recipe, console or Console()), recipe)


def show_baselines(checkpoint: Path, recipe: Recipe, console: Console, options: Mapping[str, Any]) -> dict[str, Any]:
    """Print how well each baseline matches Monte Carlo, and which confidence a policy learns with it. Return the numbers."""
    per_prompt_count, seed = options["samples"], options["seed"]
    roller = roller_of(checkpoint, recipe, console)
    held_out_rows = roller.task.evaluation
    prompt_rows = held_out_rows.select(range(min(options["prompts"], len(held_out_rows))))
    rerolls = rolls.collect_last_blocks(roller, prompt_rows, samples=per_prompt_count, rerolls=options["rerolls"], seed=seed)
    group_sizes = [size for size in GROUP_SIZES if size <= per_prompt_count] or [per_prompt_count]
    fidelity = measure_fidelity(rerolls, group_sizes=group_sizes, rule=recipe.rule, seed=seed)
    report_fields = written_baselines(fidelity, rerolls)
    report_fields["points"] = fixed_point_rows(rule=recipe.rule, seed=seed)
    sample_counts = report_fields["counts"]
    console.print(
        f"spanwise sampled {sample_counts['completions']} completions of {sample_counts['prompts']} prompts. Before their last "
        f"blocks, the completions have {sample_counts['prefixes']} different texts. From these texts, spanwise sampled last blocks "
        f"again, {sample_counts['rerolls']} in total. {fidelity.share:.1%} of the completions can be compared: the completion and "
        "at least two of its new last blocks state a confidence.",
        highlight=False,
    )
    say(console, *fidelity_tables(fidelity), difference_table(fidelity))
    say(console, fixed_point_table(report_fields["points"]), keep=2)
    return report_fields


def fidelity_tables(fidelity: Fidelity) -> Iterator[Table]:
    """Build one table per group size. Each row has a baseline's RMSE with its interval, then other figures."""
    for size in fidelity.group_sizes:
        table_rows = []
        for name in fidelity.baselines:
            rmse, *rmse_bounds = fidelity.interval(name, size, "rmse")
            other_figure_names = (figure for figure in FIGURES if figure not in ("rmse", "ceiling"))
            other_cells = (_decimals(fidelity.interval(name, size, figure)[0]) for figure in other_figure_names)
            table_rows.append([name, _decimals(rmse), "-".join(map(_decimals, rmse_bounds)), *other_cells])
        correlation, *_ = fidelity.interval(fidelity.baselines[0], size, "ceiling")
        title = f"Groups of {size}: advantages against Monte Carlo (its noise allows no correlation above {correlation:.3f})"
        yield _table(title, ("", "RMSE", "95 %", "wrong", "right", "alone", "corr", "scaled", "noise"), table_rows)


def difference_table(fidelity: Fidelity) -> Table:
    """Build a table of the differences between the baselines `blended` and `outcome`."""
    figure_differences = difference_rows(fidelity)
    figure_names = dict.fromkeys(row["figure"].replace("_", " ") for row in figure_differences)
    cells_by_size: dict[int, list[str]] = {size: [str(size)] for size in fidelity.group_sizes}
    for row in figure_differences:
        cells_by_size[row["group_size"]].append(f"{row['value']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]")
    table_title = "Each cell is the figure of the baseline 'blended' minus that of 'outcome', for the same prompts."
    return _table(table_title, ("G", *figure_names), cells_by_size.values())


def fixed_point_table(points: Sequence[Mapping[str, Any]]) -> Table:
    """Build a table of q*, the confidence that the policy states when training ends, for each baseline."""
    right_probabilities = list(dict.fromkeys(row["p"] for row in points))
    confidences_by_setting = {("none, batch, group", "any"): right_probabilities}
    for name in dict.fromkeys(row["baseline"] for row in points if row["baseline"] not in ("none", "batch", "group")):
        for row in (row for row in points if row["baseline"] == name):
            confidences_by_setting.setdefault((name, str(row["group_size"])), []).append(row["q"])
    table_rows = ([name, size, *map(_decimals, confidences)] for (name, size), confidences in confidences_by_setting.items())
    headings = ("", "G", *(f"{p:g}" for p in right_probabilities))
    table_title = (
        "Each cell is the confidence q* at which training ends. Each heading is the probability that the policy is right."
    )
    confidence_table = _table(table_title, headings, table_rows)
    largest_error = max(row["error"] or 0.0 for row in points)
    confidence_table.caption = (
        "G is the number of completions per prompt. For the baseline 'outcome', the confidence is exact. For the baseline "
        f"'blended', the confidence comes from a simulation with a standard error of at most {largest_error:.4f}."
    )
    return confidence_table


def rolled_tokens(
    model_folder: Path,
    recipe: Recipe,
    *,
    prompts: int = 48,
    rerolls: int = 32,
    critics: Sequence[str] | None = None,
    steps: Sequence[int] = rolls.CRITIC_STEPS,
    seed: int = 0,
    console: Console | None = None,
    **options: int,
) -> tuple[Trajectories, dict[str, torch.Tensor]]:
    """Sample completions, and compute Monte Carlo values of their tokens. Return both, and each critic's values."""
    if rerolls < 2:
        raise DataError(f"Monte Carlo values need at least 2 re-rolls to estimate their noise, but you asked for {rerolls}.")
    critic_folder = rolls.own_critic_folder(model_folder)
    critic_kinds = critics or [kind for kind in CRITICS if kind != "own" or critic_folder]
    for kind in critic_kinds:
        check_known("kind of critic", kind, CRITICS)
    if "own" in critic_kinds and critic_folder is None:
        raise DataError(
            f"The model in '{model_folder}' has no critic: there is no folder 'critic' with {ABOUT}. Remove 'own' from "
            "--critics, or measure a run whose recipe has a critic."
        )
    critic_training_fields = {}
    if "fitted" in critic_kinds:  # read each prompt only once, so that the critic cannot memorise it
        critic_training_fields = {"steps": max(steps, default=1), "prompts": rolls.CRITIC_BATCH}
    roller = roller_of(model_folder, recipe.model_copy(update=critic_training_fields), console)
    task = roller.task
    row_order = torch.randperm(len(task.evaluation), generator=torch.Generator().manual_seed(seed)).tolist()
    prompt_rows = task.evaluation.select(row_order[:prompts])
    blocks, trajectories, reward_ntm = rolls.collect_tokens(
        roller, prompt_rows, rerolls=rerolls, sets=2 if "mc" in critic_kinds else 1, seed=seed, **options
    )
    critic_values: dict[str, torch.Tensor] = {}
    if "own" in critic_kinds and critic_folder is not None:
        scheme = scheme_of(recipe, task.layout, roller.limit)
        objective_names = [objective.name for objective in scheme.objectives]
        critic, value_column = rolls.own_critic(critic_folder, roller.tokenizer, objective_names)
        critic_values["own"] = rolls.values(critic, blocks, stream=value_column)
    if "fitted" in critic_kinds:
        for step, critic in rolls.fitted_critics(roller, task.train, steps=steps, seed=seed + 1):
            critic_values[f"{step} steps"] = rolls.values(critic, blocks)
    if "mc" in critic_kinds:
        critic_values |= {f"MC {k}": reward_ntm[..., :k].nanmean(dim=2) for k in sorted({min(FEW, rerolls), rerolls})}
    return trajectories, critic_values


def show_tokens(fidelity: TokenFidelity, segments: SaeSegments | None = None, *, console: Console) -> dict[str, Any]:
    """Print how token estimators correlate with Monte Carlo. Return the correlations."""
    sample_counts = {"completions": len(fidelity.prompt_n), "prompts": len(fidelity.prompt_n.unique())}
    console.print(
        f"spanwise sampled {sample_counts['completions']} completions of {sample_counts['prompts']} prompts. {fidelity.count()} "
        f"tokens of the completions' first blocks are compared with Monte Carlo values. {fidelity.count('decision')} of the "
        f"{fidelity.count()} tokens are decisions: their probability is below .97. {reference_words(segments)}",
        highlight=False,
    )
    say(console, *(_correlation_table(fidelity, kind) for kind in TOKEN_KINDS))
    say(console, *(_lead_table(fidelity, kind, estimator) for kind in TOKEN_KINDS for estimator in ("GAE", GROUP_MEAN)))
    return {"tokens": token_rows(fidelity), "counts": sample_counts}


def reference_words(segments: SaeSegments | None) -> str:
    """Describe the Monte Carlo reference that token advantages are compared with."""
    if segments is None:
        return "Each token's advantage is compared with the change that this token makes to the Monte Carlo value."
    return (
        f"SAE cuts completions into segments. A token with a probability below {segments.threshold:g} {segments.boundary}s a "
        "segment. Each token's advantage is compared with the change of the Monte Carlo value over the token's segment. The "
        "comparison favours SAE, because SAE gives credit by segments, too."
    )


def _correlation_table(fidelity: TokenFidelity, kind: str) -> Table:
    """Build the table that compares critics and estimators with Monte Carlo."""
    table_rows = []
    estimator_rows = ((estimator, estimator, "correlation") for estimator in fidelity.estimators)
    for heading, estimator, figure in [("RMSE of the values", VALUES, "rmse"), *estimator_rows]:
        critic_figures = (fidelity.interval(critic, estimator, figure, kind=kind).value for critic in fidelity.critics)
        table_rows.append([heading, *map(_decimals, critic_figures)])
    ceiling_interval = fidelity.interval(fidelity.critics[0], fidelity.estimators[0], "ceiling", kind=kind)
    title = f"{kind} tokens: correlation with Monte Carlo (its noise allows at most {_decimals(ceiling_interval.value)})"
    correlation_table = _table(title, ("", *fidelity.critics), table_rows)
    correlation_table.rows[0].end_section = True
    return correlation_table


def _lead_table(fidelity: TokenFidelity, kind: str, other: str) -> Table:
    """Build a table of how much better SAE correlates with Monte Carlo than the estimators `other` do."""
    other_is_estimator = other in fidelity.estimators
    estimator_text = other if other_is_estimator else f"the best {other}"
    table_title = f"{kind} tokens: lead of SAE over {estimator_text} in correlation with Monte Carlo (95 % intervals)"
    table_rows = []
    for critic in fidelity.critics:
        other_name = _short_name(fidelity.best(critic, other, kind=kind), other)
        sae_name = _short_name(fidelity.best(critic, "SAE", kind=kind), "SAE")
        lead_text = _format_lead(fidelity.lead(critic, SAE, other, kind=kind))
        best_lead_text = _format_lead(fidelity.lead(critic, "SAE", other, kind=kind))
        table_rows.append([critic, *([] if other_is_estimator else [other_name]), lead_text, sae_name, best_lead_text])
    other_headings = [] if other_is_estimator else [f"best {other}"]
    headings = ("critic", *other_headings, _short_name(SAE, "SAE"), "best SAE", "its lead")
    return _table(table_title, headings, table_rows)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table without borders; every column but the first holds numbers."""
    table_columns = [columns[0], *(Column(name, justify="right", no_wrap=True) for name in columns[1:])]
    return plain_table(*table_columns, rows=rows, title=title, padding=(0, 1, 0, 0))


def _decimals(number: float) -> str:
    return "-" if number != number else f"{number:.3f}"


def _short_name(name: str, family: str) -> str:
    """Shorten an estimator's name: drop the leading `family`, such as SAE, and the 0 before a decimal point."""
    return name.removeprefix(f"{family} ").replace("0.", ".")


def _format_lead(interval: Interval) -> str:
    """Format a difference with its interval, as in `+.046 (+.032,+.059)`."""
    return f"{interval.value:+.3f} ({interval.low:+.3f},{interval.high:+.3f})".replace("0.", ".")
