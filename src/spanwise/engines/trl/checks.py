"""What is refused before a run starts, each with the sentence that says what to do."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from packaging.version import Version
from torch import nn
from trl.trainer.grpo_config import GRPOConfig

from spanwise.engines.trl.dppo import check_dppo
from spanwise.engines.trl.fold import check_loss_type
from spanwise.errors import DataError, RecipeError, SpanwiseError
from spanwise.layout import Layout, Part
from spanwise.objective import Objective
from spanwise.rollouts.messages import prompt_fault
from spanwise.segment import SEGMENTERS


def check_version(version: str) -> None:
    """Refuse a TRL release that is known not to work.

    Example:
        >>> check_version("1.16.0")
        >>> check_version("1.15.0")
        Traceback (most recent call last):
        spanwise.errors.SpanwiseError: trl 1.15.0 cannot run GRPO without triton... Install trl 1.14.2, or 1.16 or newer.
    """
    if Version(version) < Version("1.10"):
        raise SpanwiseError(
            f"trl {version} normalises some losses differently from what spanwise undoes. Install trl 1.10 or newer."
        )
    if Version(version) == Version("1.15.0"):
        raise SpanwiseError(
            "trl 1.15.0 cannot run GRPO without triton, for example on CPU. Install trl 1.14.2, or 1.16 or newer."
        )


def check_config(args: GRPOConfig, *, trl_version: str) -> None:
    """Refuse options that would give wrong credit, and say which ones have no effect.

    Example:
        >>> args = GRPOConfig("out", use_cpu=True, bf16=False, gradient_checkpointing=None)
        >>> check_config(args, trl_version="1.16.0")
    """
    check_loss_type(args.loss_type)
    check_dppo(args)
    if args.reward_weights is not None:
        raise RecipeError(
            f"reward_weights is {args.reward_weights}: TRL would only weigh the reward it logs. Give each objective its weight "
            "instead, for example Objective('brier', weight=0.5, ...)."
        )
    if args.importance_sampling_level != "token":
        raise RecipeError(
            f"importance_sampling_level is '{args.importance_sampling_level}': one ratio for a whole completion trains every "
            "token with the completion's mean advantage, so spans lose their own. Use importance_sampling_level='token'."
        )
    if args.use_liger_kernel and Version(trl_version) < Version("1.14"):
        raise RecipeError(
            f"use_liger_kernel=True with trl {trl_version} sends the advantages to a loss that takes one number per completion. "
            "Set it to False, or install trl 1.14 or newer."
        )
    for name, usual in (("scale_rewards", "group"), ("multi_objective_aggregation", "sum_then_normalize")):
        value = getattr(args, name)
        if value != usual:
            warnings.warn(
                f"{name}={value!r} changes nothing: it shapes TRL's own advantage of a completion, and what is trained comes from "
                "the objectives (their baseline, scale and weight).",
                UserWarning,
                stacklevel=3,
            )


def check_callables(objectives: Sequence[Objective], reward_funcs: Any) -> None:
    """Refuse rewards that this trainer cannot call."""
    if reward_funcs:
        raise RecipeError(
            "reward_funcs is built from the objectives. Pass each reward as Objective(reward, pays=[...]), so that it is known "
            "which blocks it pays."
        )
    for objective in objectives:
        if isinstance(objective.reward, nn.Module):
            raise RecipeError(
                f"Objective '{objective.name}' has a model as reward; pass a function that calls it and returns one number per "
                "completion."
            )


def check_environment_rewards(names: Sequence[str], objectives: Sequence[Objective]) -> None:
    """Refuse a reward that TRL took from an environment's `get_reward`, since no block is paid by it."""
    extra = list(names)[len(objectives) :]
    if extra:
        raise RecipeError(
            f"The environment {', '.join(extra)} has a get_reward method, and no block is paid by it. Rename the method and "
            "call it from an objective: a reward function gets the environments as its argument 'environments'."
        )


def check_columns(
    objectives: Sequence[Objective], columns: Sequence[str] | None, *, called: str = "the training dataset"
) -> None:
    """Refuse a dataset without prompts, or without the gold answers that a built-in reward reads.

    Example:
        >>> check_columns([Objective("correct", pays=("solution",))], ["prompt", "solution"])
        Traceback (most recent call last):
        spanwise.errors.DataError: Objective 'correct' reads the dataset column 'answer'... there are prompt, solution...
    """
    if columns is None:
        return
    if "prompt" not in columns:
        raise DataError(
            f"{called[0].upper()}{called[1:]} has no column 'prompt', the text or the messages that completions are sampled for; "
            f"there are {', '.join(columns) or 'none'}. Rename one: dataset.rename_column("
            f"{next(iter(columns), 'question')!r}, 'prompt')."
        )
    for objective in objectives:
        if objective.reward not in ("correct", "second_attempt"):
            continue
        column = objective.options.get("column", "answer")
        if column not in columns:
            raise DataError(
                f"Objective '{objective.name}' reads the dataset column '{column}', which is not there; there are "
                f"{', '.join(columns)}. Rename the column, or set options: {{column: NAME}} in the objective."
            )


def check_prompts(prompts: Iterable[Any], *, template: bool) -> None:
    """Refuse a dataset with a row that is no prompt.

    Example:
        >>> check_prompts(["2+2=", None], template=False)
        Traceback (most recent call last):
        spanwise.errors.DataError: Row 1 of the training dataset has the prompt None; a prompt is a text, or a list of...
    """
    for row, prompt in enumerate(prompts):
        fault = prompt_fault(prompt, template=template)
        if fault:
            raise DataError(f"Row {row} of the training dataset has the prompt {prompt!r:.80}; {fault}")


def check_size(prompts: int | None, *, needed: int) -> None:
    """Refuse a dataset that cannot fill one generation batch; TRL would end without a single step.

    Example:
        >>> check_size(1, needed=2)
        Traceback (most recent call last):
        spanwise.errors.DataError: The training dataset has 1 prompts and one generation batch takes 2... or num_generations up.
    """
    if prompts is not None and prompts < needed:
        raise DataError(
            f"The training dataset has {prompts} prompts and one generation batch takes {needed}, so TRL would not make a single "
            "step. Add prompts, or set per_device_train_batch_size, gradient_accumulation_steps or "
            "steps_per_generation down or num_generations up."
        )


def check_prefilled(prompt: str, layout: Layout) -> None:
    """Refuse a prompt and a layout that disagree on whether the completion starts inside a tag, a channel or delimiters.

    Example:
        >>> check_prefilled("Think first. <reasoning>", Layout({"all": ["reasoning"]}))
        Traceback (most recent call last):
        spanwise.errors.RecipeError: The prompt already opens <reasoning>... Write Layout(..., prefilled='reasoning').
    """
    end = prompt.rstrip()
    opening = {part.mark: _openings(part) for part in layout.parts}
    opened = next(((mark, sign) for mark, signs in opening.items() for sign in signs if end.endswith(sign)), None)
    if opened is not None and opened[0] != layout.prefilled:
        mark, sign = opened
        raise RecipeError(
            f"The prompt already opens {sign}, so no completion will hold that {_noun(mark, sign)}. Write Layout(..., "
            f"prefilled='{mark}')."
        )
    signs = opening.get(layout.prefilled or "", ())
    if opened is None and signs:
        raise RecipeError(
            f"The layout says that the prompt opens {' or '.join(signs)}, and a prompt ends with {end[-40:]!r}. End the prompt "
            f"with that {_noun(str(layout.prefilled), signs[0])}, or leave 'prefilled' out of the layout."
        )


def _openings(part: Part) -> tuple[str, ...]:
    """What a prompt ends with, before white space, that has opened a part."""
    opens = SEGMENTERS.find(part.segmenter).opens
    return () if opens is None else tuple(sign.strip() for sign in opens(part.mark) if sign.strip())


def _noun(mark: str, sign: str) -> str:
    return "tag" if sign == f"<{mark}>" else "sign"
