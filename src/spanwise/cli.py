"""The command line: `spanwise train | eval | reference | compare | fidelity | credit | why | report | demo | methods | doctor`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from spanwise.commands.shared.fields import fields_text
from spanwise.disk import refusal, unwritten
from spanwise.errors import RecipeError, SpanwiseError, lacking, unknown

try:
    from cyclopts import App, Parameter
    from rich.console import Console
except ModuleNotFoundError as error:  # the core installs without the command line
    raise SystemExit(
        f"The command line needs '{error.name}'. Install it with: pip install 'spanwise[train]' to train with TRL, or with "
        "'spanwise[cli]' beside another engine. What is installed and whether it works: python -m spanwise.commands.doctor"
    ) from None

app = App(
    name="spanwise",
    help="Credit for every span of a completion. With no recipe, everything runs on a small embedded task.",
    result_action="return_value",
)
app.register_install_completion_command(help="Install completion of commands and options for this shell (bash, zsh, fish).")
Flag = Annotated[bool, Parameter(negative="")]


def _with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of a recipe in its help."""
    command.__doc__ = (command.__doc__ or "").replace("    Args:", f"    {fields_text()}\n\n    Args:", 1)
    return command


@app.command
@_with_fields
def train(
    recipe: Path | None = None,
    /,
    *,
    task: Literal["digits", "digits_twice", "digits_long", "fields", "confidence", "two_attempts"] | None = None,
    start: Literal["easy", "hard"] | None = None,
    model: str | None = None,
    dataset: str | None = None,
    columns: list[str] | None = None,
    method: str | None = None,
    calibration: Literal["brier", "log_score"] | None = None,
    baseline: Literal["none", "batch", "group", "outcome", "blended"] | None = None,
    steps: int | None = None,
    prompts: int | None = None,
    group_size: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    eval_every: int | None = None,
    save_every: int | None = None,
    output: str | None = None,
    report_to: str | None = None,
    resume: str | None = None,
    overwrite: Flag = False,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> None:
    """Train from a recipe; without one, the embedded task with blockwise credit (BAE + OCB).

    Args:
        recipe: YAML file; options on the command line win over it.
        task: digits, digits_twice, digits_long or fields (embedded), confidence or two_attempts (with --model and --dataset).
        start: warm start of the embedded task.
        model: hub name or folder.
        dataset: hub name, folder or file (json, jsonl, parquet, csv, tsv).
        columns: role=column of a dataset whose columns are called otherwise, as in question=problem,answer=gold; roles are
            question, prompt (whole prompts, used as they are) and answer. May be repeated.
        method: a preset, see `spanwise methods`.
        calibration: how a confidence is scored.
        baseline: what a confidence is compared with.
        steps: generation batches.
        prompts: prompts per step.
        group_size: completions per prompt.
        learning_rate: of AdamW.
        seed: of prompts and sampling.
        eval_every: steps between evaluations.
        save_every: steps between checkpoints.
        output: folder of the run; default: a new one, runs/<task>-<method>-<seed>-<n>.
        report_to: none, trackio or wandb.
        resume: a run folder to go on with, one of its checkpoints, or "last" for the newest intact one of the output.
        overwrite: replace the run that the output holds.
        set_: any other recipe field of those above, as field=value; may be repeated.
    """
    given = {
        key: value for key, value in locals().items() if key not in ("recipe", "columns", "resume", "overwrite", "set_")
    }
    named = {key: value for key, value in given.items() if value is not None}
    from spanwise.recipe import load

    if recipe is None and resume and (Path(resume) / "recipe.yaml").is_file():
        recipe = Path(resume) / "recipe.yaml"
    loaded = load(recipe, {**named, **_dataset_columns(columns), **_assignments(set_ or [])})
    from spanwise.commands.shared.display import quiet
    from spanwise.commands.train.train import train as run

    quiet()
    run(loaded, console=Console(), resume=resume, overwrite=overwrite)


@app.command(name="eval")
def evaluate(
    model: Path,
    /,
    *,
    recipe: Path | None = None,
    prompts: int = 512,
    samples: int = 16,
    seed: int = 1,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> None:
    """Sample a trained model on held-out prompts: accuracy, calibration, format, refusals, votes, with 95 % intervals by prompt.

    Args:
        model: a run folder (its recipe says the task), a checkpoint of it or a model folder; `evaluation.parquet` is written
            into it.
        recipe: YAML file that says the task; default: the run's own, else the embedded task.
        prompts: held-out prompts.
        samples: completions per prompt.
        seed: of sampling.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.eval.evaluate import evaluate_folder
    from spanwise.commands.shared.display import gain_table, interval_table, quiet, vote_table
    from spanwise.commands.shared.task import run_or_model
    from spanwise.measure import curve_difference
    from spanwise.report import VOTES_BY_SCORE, unmeasured_sentences
    from spanwise.rollouts.folder import sole_writer

    quiet()
    _check_sizes(prompts=prompts, samples=samples)
    place, loaded = run_or_model(model, recipe, {**_assignments(set_ or []), "eval_prompts": prompts})
    console = Console()
    with sole_writer(model):
        found, absent = evaluate_folder(place, loaded, prompts=prompts, samples=samples, seed=seed, console=console)
        found.write(model)
    there = len(found.prompt_n.unique())
    fewer = "" if there == prompts else f" (there are no more; {prompts} were asked for)"
    console.print(interval_table(f"{model}: {there} prompts x {samples} samples{fewer}", found.intervals(), absent=absent))
    for sentence in unmeasured_sentences(absent):
        console.print(sentence, highlight=False, soft_wrap=True)
    votes = {block: found.votes(block) for block in found.correct if found.most_votes(block)}
    if votes and found.self_reward_n is not None and not found.stated:
        console.print(VOTES_BY_SCORE, highlight=False)
    for block, curves in votes.items():
        console.print(vote_table(f"accuracy of a vote, block '{block}'", curves))
    for block in list(votes)[1:]:
        gain = curve_difference(votes[block]["majority"], votes[found.first]["majority"])
        console.print(gain_table(f"majority of '{block}' minus majority of '{found.first}', paired by prompt", gain))


@app.command
def reference(
    recipe: Path | None = None,
    /,
    *,
    model: str | None = None,
    dataset: str | None = None,
    prompts: int = 16,
    samples: int = 16,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> None:
    """Measure the reference of a self-rewarding score (laser) on the policy that a recipe starts from (docs/laser.md).

    Args:
        recipe: YAML file with laser; a model and a dataset stand in it or are given here.
        model: hub name or folder.
        dataset: hub name, folder or file (json, jsonl, parquet, csv, tsv).
        prompts: training prompts.
        samples: completions per prompt.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.reference.reference import reference as measure
    from spanwise.commands.shared.display import quiet
    from spanwise.recipe import load

    quiet()
    _check_sizes(prompts=prompts, samples=samples)
    given = {name: value for name, value in (("model", model), ("dataset", dataset)) if value is not None}
    console = Console()
    found = measure(load(recipe, {**_assignments(set_ or []), **given}), prompts=prompts, samples=samples, console=console)
    console.print(
        f"Over {found['completions']} of {prompts * samples} completions, those that ended, log pi('{found['token']}') is "
        f"{found['mean']:.4g} +- {found['std']:.2g} at temperature {found['temperature']:g}. Write in the recipe:\n"
        f"laser: {{token: '{found['token']}', reference: {found['mean']:.4g}, ...}}",
        highlight=False, soft_wrap=True, markup=False,
    )  # fmt: skip


@app.command
def compare(
    recipe: Path | None = None,
    /,
    *,
    arms: str = "outcome,blended,group,rlcr",
    seeds: str = "0,1,2,3,4",
    output: str = "runs/compare",
    reference: str | None = None,
    processes: int | None = None,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> None:
    """Train several methods or baselines with several seeds from one start, and say which differences are more than noise.

    What is already in the output folder is not trained again, so an interrupted comparison goes on, and more seeds can be added.
    Ctrl-C ends the trainings as well.

    Args:
        recipe: YAML file with what the arms share; an arm's own fields win over it.
        arms: baselines, methods or recipe files, separated by commas.
        seeds: numbers separated by commas.
        output: folder for the table, the report and the runs.
        reference: compare every other arm with this one only; default: all pairs.
        processes: trainings side by side; default 2 on two CPU cores.
        set_: any recipe field of all arms, as field=value; may be repeated. null is a value.
    """
    from spanwise.commands.compare.compare import compare as run
    from spanwise.commands.shared.display import quiet

    quiet()
    names = [name.strip() for name in arms.split(",") if name.strip()]
    run(
        arms=names, seeds=_numbers(seeds), output=output, shared=recipe, choices=_assignments(set_ or []), reference=reference,
        processes=processes,
    )  # fmt: skip


@app.command
def fidelity(
    checkpoint: Path,
    /,
    *,
    recipe: Path | None = None,
    prompts: int = 128,
    samples: int = 32,
    rerolls: int = 32,
    tokens: Flag = False,
    token_prompts: int = 48,
    critics: str | None = None,
    critic_steps: int = 80,
    reference: Literal["token", "segment"] | None = None,
    seed: int = 0,
    output: Path = Path("runs/fidelity"),
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> None:
    """Compare the advantages of every baseline with Monte Carlo, and show where each drives a confidence (docs/fidelity.md).

    Args:
        checkpoint: a run folder or a model folder of the embedded task.
        recipe: YAML file that says the task; default: the run's own, else the embedded task.
        prompts: held-out prompts.
        samples: completions per prompt.
        rerolls: fresh last blocks per distinct prefix.
        tokens: also compare GAE, SAE and GRPO at the tokens of the first block.
        token_prompts: held-out prompts of --tokens, four completions each.
        critics: of --tokens, separated by commas: own, the run's, saved with the model; fitted on other prompts; mc, means of
            further re-rolls; default: all there are.
        critic_steps: how long the fitted critic is fitted; it is looked at on the way.
        reference: of --tokens: what Monte Carlo says of each token (default), or of each segment of SAE, which favours SAE.
        seed: of sampling.
        output: folder for fidelity.json and report.html.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.fidelity.fidelity import show
    from spanwise.commands.shared.display import quiet
    from spanwise.commands.shared.folder import check_no_run
    from spanwise.commands.shared.task import run_or_model
    from spanwise.rollouts.folder import sole_writer

    quiet()
    _check_sizes(prompts=prompts, samples=samples, rerolls=rerolls, token_prompts=token_prompts, critic_steps=critic_steps)
    check_no_run(output)
    place, loaded = run_or_model(checkpoint, recipe, _assignments(set_ or []))
    if (critics or reference) and not tokens:
        raise RecipeError("--critics and --reference are of the comparison token by token; add --tokens.")
    asked = {"token_prompts": token_prompts, "critics": critics, "critic_steps": critic_steps, "reference": reference}
    with sole_writer(output):
        show(
            place, loaded, output=output, console=Console(), prompts=prompts, samples=samples, rerolls=rerolls, seed=seed,
            tokens=asked if tokens else None,
        )  # fmt: skip


@app.command
def credit(
    rollouts: Path,
    /,
    *,
    recipe: Path | None = None,
    methods: str | None = None,
    tokenizer: Path | None = None,
    columns: list[str] | None = None,
    reward: list[str] | None = None,
    output: Path = Path("runs/credit"),
    rows: int = 500,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> None:
    """Show what several methods would have credited to every token of rollouts that exist already. Nothing is trained.

    Reads spanwise's own rollouts, TRL's completions (log_completions=True), verl's rollout dump (trainer.rollout_data_dir),
    verifiers' traces, and tables of your own (CSV, TSV, JSON, JSONL, parquet) with a prompt and a completion, or a list of them, in
    each row (docs/howto/own_data.md). Writes credit.parquet, summary.json and report.html.

    Args:
        rollouts: a file, a folder of files, or the run folder they lie in.
        recipe: YAML file with layout and objectives; default: the run's own, else the layout of the confidence task, or a
            block for each tag of the file where it has others.
        methods: separated by commas: a preset, a preset with a baseline (bae:group), recipe for the recipe's own, or recorded for
            what the trainer recorded (advantage, score, reward); default: grpo, rlcr, bae, the recipe's own, and what another
            trainer recorded.
        tokenizer: folder of the tokenizer that the completions were sampled with; default: the run's own, else words.
        columns: role=column of a table whose columns are called otherwise, as in prompt=input,completion=output,answer=gold; roles
            are prompt, completion or completions (a list in each cell), answer, group and step. May be repeated.
        reward: objective=column: take the reward from this column of the file, as in correct=my_reward; objective=text computes
            it from the text. May be repeated. Default: the column of its name; for correct also acc, accuracy_reward, score or
            reward, if they hold nothing but 0 and 1.
        output: folder for what is written.
        rows: at most so many completions in the report.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.credit.credit import credit as run
    from spanwise.commands.shared.display import quiet

    quiet()
    options = _read_options(recipe, methods, tokenizer, columns, reward, set_)
    run(rollouts, output=output, rows=rows, console=Console(), **options)


@app.command
def why(
    rollouts: Path,
    /,
    *,
    recipe: Path | None = None,
    methods: str | None = None,
    tokenizer: Path | None = None,
    columns: list[str] | None = None,
    reward: list[str] | None = None,
    completion: int | None = None,
    examples: int = 3,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> None:
    """Say why tokens of rollouts train with 0: masked, all right or all wrong, alone, absent, failed, ... with counts that add up.

    Reads what `spanwise credit` reads, under the same methods; writes nothing.

    Args:
        rollouts: a file, a folder of files, or the run folder they lie in.
        recipe: see `spanwise credit`.
        methods: see `spanwise credit`; default: of a run of ours its own method, else those of `spanwise credit`.
        tokenizer: see `spanwise credit`.
        columns: see `spanwise credit`.
        reward: see `spanwise credit`.
        completion: show this completion token by token, counted from 0 in the order of the file.
        examples: rows that are named for each reason.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.shared.display import quiet
    from spanwise.commands.why.why import why as run

    quiet()
    _check_sizes(examples=examples)
    options = _read_options(recipe, methods, tokenizer, columns, reward, set_)
    run(rollouts, completion=completion, examples=examples, console=Console(), **options)


@app.command
def report(folder: Path, /) -> None:
    """Write FOLDER/report.html: one file, no network, of a training run, a comparison, a fidelity measurement or a credit export.

    Args:
        folder: what `spanwise train`, `compare`, `fidelity` or `credit` wrote.
    """
    from spanwise.commands.report.report import report_folder

    print(report_folder(folder))


@app.command
def demo(
    task: Literal["digits", "fields"] = "digits",
    /,
    *,
    output: str | None = None,
    seeds: str = "0",
    steps: int | None = None,
    overwrite: Flag = False,
    set_: Annotated[list[str] | None, Parameter(name="--set")] = None,
) -> None:
    """Show the point: one number for the whole completion against one per block, from the same warm start.

    Args:
        task: digits, a solution and a confidence in it; fields, a JSON object of eight small answers.
        output: folder for the summary and the runs; default: a new one, runs/demo-<n>.
        seeds: one or more, separated by commas.
        steps: generation batches of each arm.
        overwrite: replace the runs that the output holds.
        set_: any other recipe field of both arms, as field=value; may be repeated.
    """
    from spanwise.commands.demo.demo import demo as demo_digits
    from spanwise.commands.demo.fields import demo_fields
    from spanwise.commands.shared.display import quiet

    quiet()
    choices = _assignments(set_ or []) | ({} if steps is None else {"steps": steps})
    run = demo_digits if task == "digits" else demo_fields
    run(output=output, seeds=_numbers(seeds), choices=choices, overwrite=overwrite, console=Console())


@app.command
def methods(name: str | None = None, /) -> None:
    """List the methods with what each needs and its paper, or print one preset in full.

    Args:
        name: a method.
    """
    from spanwise.commands.methods.methods import show_methods

    show_methods(name, console=Console())


@app.command
def doctor() -> None:
    """Say which engines are installed and work: versions, the plug-in in this verl, which trainer it uses, what broke.

    Exit status 1 if something that is installed is broken.
    """
    from spanwise.commands.doctor.doctor import doctor as run

    if not run(console=Console()):
        sys.exit(1)


def _read_options(
    recipe: Path | None,
    methods: str | None,
    tokenizer: Path | None,
    columns: list[str] | None,
    reward: list[str] | None,
    set_: list[str] | None,
) -> dict[str, Any]:
    """What says how a rollout file is read and credited."""
    taken = dict(_pair(entry, "--reward", "objective=column, such as correct=accuracy_reward") for entry in reward or [])
    names = [name.strip() for name in (methods or "").split(",") if name.strip()]
    return {
        "recipe": recipe,
        "methods": names,
        "tokenizer": tokenizer,
        "columns": _columns(columns),
        "reward": taken,
        "overrides": _assignments(set_ or []),
    }


def _columns(given: list[str] | None) -> dict[str, str]:
    """Role -> column, as given in one piece or in several."""
    entries = [entry for piece in given or [] for entry in piece.split(",") if entry.strip()]
    pairs = [_pair(entry, "--columns", "role=column, such as completion=output,answer=gold") for entry in entries]
    twice = next((role for role, _ in pairs if [other for other, _ in pairs].count(role) > 1), None)
    if twice is not None:
        raise RecipeError(f"--columns names the column of {twice} more than once.")
    return dict(pairs)


def _dataset_columns(given: list[str] | None) -> dict[str, str]:
    """The recipe fields that `--columns` of a dataset stands for."""
    found = _columns(given)
    for role in found:
        if role not in ("question", "prompt", "answer"):
            raise RecipeError(unknown("role of --columns", role, ("question", "prompt", "answer")))
    return {f"{role}_column": column for role, column in found.items()}


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise RecipeError(f"--{name.replace('_', '-')} is {size}; at least 1 is needed.")


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise RecipeError(f"--seeds takes whole numbers separated by commas, such as 0,1,2; got '{seeds}'.") from None


def _pair(entry: str, option: str, shape: str) -> tuple[str, str]:
    key, equals, value = entry.partition("=")
    if not equals or not value:
        raise RecipeError(f"{option} takes {shape}; got '{entry}'.")
    return key.strip(), value.strip()


def _assignments(pairs: list[str]) -> dict[str, Any]:
    import yaml

    values: dict[str, Any] = {}
    for pair in pairs:
        key, value = _pair(pair, "--set", "field=value, such as --set entropy=0.05")
        values[key.replace("-", "_")] = yaml.safe_load(value)
    return values


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line, or `words` in its place; a SpanwiseError becomes one sentence and exit status 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    # A sentence for the user, not a line of code.
    warnings.formatwarning = lambda message, *_: f"Warning: {message}\n"
    try:
        app(words)
    except SpanwiseError as error:
        Console(stderr=True).print(f"Error: {error}", style="red", markup=False, soft_wrap=True, highlight=False)
        sys.exit(2)
    except OSError as error:
        if refusal(error) is None:  # of what no command writes itself: a cache, the terminal's own file
            raise
        print(f"Error: {unwritten(Path(str(error.filename or '.')), error)}", file=sys.stderr)
        sys.exit(2)
    except ModuleNotFoundError as error:
        command = next(iter(words or sys.argv[1:]), "")
        extra = "report" if command in ("credit", "why", "report") else "train"  # the former beside another engine, too
        sys.exit(f"Error: {lacking(f'spanwise {command}', error, extra=extra)}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
