"""Define the options of `spanwise train`."""

from pathlib import Path
from typing import Literal

from rich.console import Console

from spanwise.commands.shared.options import Fields, Flag, Whole, column_roles, recipe_fields
from spanwise.errors import check_known


def command(
    recipe: Path | None = None,
    /,
    *,
    task: Literal["digits", "digits_twice", "digits_long", "fields", "invoices", "confidence", "two_attempts"] | None = None,
    start: Literal["easy", "hard"] | None = None,
    model: str | None = None,
    dataset: str | None = None,
    columns: list[str] | None = None,
    method: str | None = None,
    calibration: Literal["brier", "log_score"] | None = None,
    baseline: Literal["none", "batch", "group", "outcome", "blended"] | None = None,
    steps: Whole | None = None,
    prompts: Whole | None = None,
    group_size: Whole | None = None,
    learning_rate: float | None = None,
    seed: Whole | None = None,
    eval_every: Whole | None = None,
    save_every: Whole | None = None,
    output: str | None = None,
    report_to: str | None = None,
    resume: str | None = None,
    overwrite: Flag = False,
    set_: Fields = None,
) -> None:
    """Train from a recipe; without a recipe, train a digit puzzle with the method `bae`, which credits each block.

    Recipe fields and their defaults: task=digits, start=easy, start_seed=0, start_steps=null, fields=8, model=null,
    dataset=null, split=train, question_column=question, prompt_column=null, answer_column=answer, instruction=null,
    method=bae, calibration=null, baseline=null, layout=null, segmenter=tags, most=null, prefilled=null, objectives=null,
    per=null, values=null, verifier={}, options={}, refine=null, steps=120, prompts=16,
    group_size=16, mini_batches=1, micro_batch=null, learning_rate=0.0004, warmup_steps=10, clip=0.2, entropy=0.04,
    entropy_target=0.2, temperature=1.0, max_completion_length=null, seed=0, trainer={}, eval_every=10,
    eval_prompts=512, eval_samples=8, output=null, save_every=0, keep_rollouts=1, report=true, report_to=none,
    threads=1, critic=null, laser=null. For a model by name: learning_rate=1.0e-06, warmup_steps=20,
    entropy=0.0, eval_every=0, eval_prompts=100, eval_samples=4, save_every=40, keep_rollouts=20.

    Args:
        recipe: YAML file; options on the command line win over it.
        task: digits, digits_twice, digits_long, fields or invoices (embedded); confidence or two_attempts (with --model and
            --dataset).
        start: warm start of the embedded task.
        model: hub name or folder.
        dataset: hub name, folder or file (json, jsonl, parquet, csv, tsv).
        columns: role=column for a dataset with other column names, as in question=problem,answer=gold; roles are
            question, prompt (whole prompts, used unchanged) and answer. May be repeated.
        method: a preset, see `spanwise methods`.
        calibration: the scoring rule of a confidence.
        baseline: the baseline that a confidence is compared with.
        steps: the number of generation batches.
        prompts: prompts per step.
        group_size: completions per prompt.
        learning_rate: learning rate of AdamW.
        seed: seed of prompts and sampling.
        eval_every: steps between evaluations.
        save_every: steps between checkpoints.
        output: folder of the run; default: a new one, runs/<task>-<method>-<seed>-<n>.
        report_to: none, trackio or wandb.
        resume: a run folder to resume, a checkpoint, or "last" for the newest intact checkpoint of the output.
        overwrite: replace the run in the output folder.
        set_: any recipe field from the list above, as field=value; may be repeated.
    """
    given_fields = {
        field: value
        for field, value in locals().items()
        if field not in ("recipe", "columns", "resume", "overwrite", "set_")
    }
    from spanwise.commands.shared.folder import secret_fields
    from spanwise.recipe import load

    if recipe is None and resume and (Path(resume) / "recipe.yaml").is_file():
        recipe = Path(resume) / "recipe.yaml"
    for role, column in column_roles(columns).items():
        check_known("role of --columns", role, ("question", "prompt", "answer"))
        given_fields[f"{role}_column"] = column
    full_recipe = load(recipe, {**recipe_fields(set_, **given_fields), **secret_fields()})
    from spanwise.commands.train.train import train

    train(full_recipe, console=Console(), resume=resume, overwrite=overwrite)
