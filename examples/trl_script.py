"""A GRPOTrainer script with a reward of its own, paid by block; it leaves a run folder and a report behind.

    python examples/trl_script.py --output runs/mine

What was changed of a GRPOTrainer script: the trainer, the scheme, and two options of the configuration.
Without --model it trains the embedded model of 0.4 M parameters. With --model NAME --dataset ROWS.jsonl it is yours.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from spanwise import Objective, Scheme
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.tasks import Task, digits_task, load_task
from spanwise.tasks.warm_start import shortened


def solved(blocks: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """A reward of your own: what the solution's tag holds, against a column of the dataset."""
    said = [(part["solution"] or {}).get("answer") for part in blocks]
    return [float((text or "").strip() == right) for text, right in zip(said, answer, strict=True)]


def task_of(asked: argparse.Namespace) -> Task:
    """Prompts, answers, blocks, and the model to start from."""
    if asked.model:
        return load_task(asked.model, asked.dataset)
    settings = None if asked.warm_up is None else shortened(asked.warm_up)
    return digits_task("easy", train_size=asked.steps * 16, settings=settings)


def main() -> None:
    """Train and say where the report lies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name or folder; default: the embedded model")
    parser.add_argument("--dataset", help="file of rows with question and answer, for --model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="runs/trl_script")
    parser.add_argument("--warm-up", type=int, help="shorten the warm-up of the embedded model, for a quick look")
    asked = parser.parse_args()
    task = task_of(asked)

    objectives = [
        Objective(solved, name="correct", pays=["solution"], if_missing=0.0),
        Objective("brier", pays=["confidence"], given="correct", baseline="outcome", if_missing=-1.0),
    ]
    on_cpu = not torch.cuda.is_available()
    args = SpanGRPOConfig(
        asked.output,
        num_generations=8,
        per_device_train_batch_size=16 * 8 if asked.model is None else 8,
        max_completion_length=task.max_completion_length,
        max_steps=asked.steps,
        learning_rate=4e-4 if asked.model is None else 1e-6,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(10, asked.steps),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=on_cpu,
        bf16=not on_cpu,
        keep_rollouts=5,  # the rollouts of every fifth batch: spanwise why FOLDER, spanwise credit FOLDER
        report=True,  # report.html at the end
    )
    trainer = SpanGRPOTrainer(
        task.model,
        args=args,
        train_dataset=task.train,
        scheme=Scheme.preset("bae", task.layout, objectives=objectives),
    )
    trainer.train()
    print(f"Report: {asked.output}/report.html")


if __name__ == "__main__":
    main()
