"""Define the options of `spanwise credit`."""

from pathlib import Path

from spanwise.commands.shared.options import AS_USUAL, CreditOptions, Whole

#: The pip extra that installs the packages of this command.
EXTRA = "report"


def command(
    rollouts: Path,
    /,
    *,
    how: CreditOptions = AS_USUAL,
    output: Path = Path("runs/credit"),
    rows: Whole = 500,
    write: str | None = None,
) -> None:
    """Show the credit that several methods would have given to every token of existing rollouts. Nothing is trained.

    Reads spanwise's own rollouts, TRL's completions (log_completions=True), verl's rollout dump (trainer.rollout_data_dir),
    traces of verifiers and prime-rl, slime's dumps (--save-debug-rollout-data), logs of Inspect and lm-eval, and tables of your own
    (CSV, TSV, JSON, JSONL, parquet) with a prompt and a completion, or a list of them, in each row (docs/howto/own_data.md). Writes
    credit.parquet, summary.json and report.html.

    Args:
        rollouts: a file, a folder of files, or the run folder of such files.
        output: folder for the files that the command writes.
        rows: the largest number of completions in the report.
        write: a method, such as bae: write traces of verifiers or prime-rl, or dumps of slime, again with its advantage per token.
    """
    from spanwise.commands.credit.credit import credit as run
    from spanwise.commands.shared.progress import large_files_shown

    with large_files_shown() as console:
        run(rollouts, output=output, rows=rows, write=write, console=console, **how.parsed())
