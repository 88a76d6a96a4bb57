"""`spanwise credit` on the command line."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from spanwise.commands.shared.options import Fields, read_options

#: The extra of pip that brings what this command needs.
EXTRA = "report"


def command(
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
    set_: Fields = None,
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
    options = read_options(recipe, methods, tokenizer, columns, reward, set_)
    run(rollouts, output=output, rows=rows, console=Console(), **options)
