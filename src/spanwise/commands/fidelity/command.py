"""Define the options of `spanwise fidelity`."""

from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from spanwise.commands.shared.options import Fields, Flag, Whole, check_sizes, recipe_fields
from spanwise.errors import RecipeError


def command(
    checkpoint: Path,
    /,
    *,
    recipe: Path | None = None,
    prompts: Whole = 128,
    samples: Whole = 32,
    rerolls: Whole = 32,
    tokens: Flag = False,
    token_prompts: Whole = 48,
    critics: str | None = None,
    critic_steps: Whole = 80,
    reference: Literal["token", "segment"] | None = None,
    seed: Whole = 0,
    output: Path = Path("runs/fidelity"),
    set_: Fields = None,
) -> None:
    """Compare baselines' advantages with Monte Carlo ones, and show the confidence that each baseline pays best (docs/fidelity.md).

    Args:
        checkpoint: a run folder or a model folder of the embedded task.
        recipe: YAML file that names the task; default: the run's own, else the embedded task.
        prompts: the number of held-out prompts.
        samples: completions per prompt.
        rerolls: the number of fresh last blocks per distinct prefix.
        tokens: also compare GAE, SAE and GRPO at the tokens of the first block.
        token_prompts: the number of held-out prompts of --tokens, with four completions each.
        critics: the critics of --tokens, separated by commas: own, saved with the model; fitted, on other prompts; mc, means of
            further re-rolls; default: all that exist.
        critic_steps: the number of fitting steps of the fitted critic, which is also measured at earlier steps.
        reference: the reference of --tokens: Monte Carlo values by token (default), or by segment of SAE, which favours SAE.
        seed: the seed of sampling.
        output: folder for fidelity.json and report.html.
        set_: any recipe field, as field=value (spanwise train --help lists them); may be repeated.
    """
    from spanwise.commands.fidelity.fidelity import show
    from spanwise.commands.shared.folder import check_no_run
    from spanwise.commands.shared.task import run_or_model
    from spanwise.rollouts.folder import sole_writer

    check_sizes(prompts=prompts, samples=samples, rerolls=rerolls, token_prompts=token_prompts, critic_steps=critic_steps)
    check_no_run(output)
    recipe_changes = recipe_fields(set_)
    model_folder, full_recipe = run_or_model(checkpoint, recipe, recipe_changes)
    if (critics or reference) and not tokens:
        raise RecipeError("--critics and --reference apply only if single tokens are compared; add --tokens.")
    fidelity_options: dict[str, Any] = {"prompts": prompts, "samples": samples, "rerolls": rerolls, "seed": seed}
    if tokens:
        fidelity_options |= {"tokens": True, "token_prompts": token_prompts, "critics": critics}
        fidelity_options |= {"critic_steps": critic_steps, "reference": reference}
    fidelity_options |= {"recipe": recipe, "overrides": recipe_changes}
    with sole_writer(output):
        show(model_folder, full_recipe, output=output, console=Console(), options=fidelity_options)
