"""Train with TRL and a reward of your own that pays one block, and write a report.

    python examples/trl_script.py --output runs/mine

A GRPOTrainer script differs in three places: the trainer, the scheme, and two options of the configuration.
Without --model, the script trains the embedded model of 0.4 M parameters. Give --model NAME --dataset ROWS.jsonl for your own.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from spanwise import Objective, Scheme
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.score import judge
from spanwise.tasks import Task, digits_task, load_task
from spanwise.tasks.warm_start import shortened


def solved(blocks: list[Any], answer: list[str], **columns: Any) -> list[float]:
    r"""Return 1 for each completion whose <answer>, with or without `\boxed{}`, equals the dataset's column `answer`, else 0."""
    texts = [(part["solution"] or {}).get("answer") for part in blocks]
    return [verdict.value for verdict in judge(answer, texts)]


def make_task(options: argparse.Namespace) -> Task:
    """Return the prompts, the answers, the layout of the blocks, and the model to start from."""
    if options.model:
        return load_task(options.model, options.dataset)
    settings = None if options.warm_up is None else shortened(options.warm_up)
    return digits_task("easy", train_size=options.steps * 16, settings=settings)


def main() -> None:
    """Train, and print where the report is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub name or folder; default: the embedded model")
    parser.add_argument("--dataset", help="file of rows with question and answer, for --model")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="runs/trl_script")
    parser.add_argument("--warm-up", type=int, help="shorten the warm-up of the embedded model, for a quick look")
    options = parser.parse_args()
    task = make_task(options)

    objectives = [
        Objective(solved, name="correct", pays=["solution"], if_missing=0.0),
        Objective("brier", pays=["confidence"], given="correct", baseline="outcome", if_missing=-1.0),
    ]
    on_cpu = not torch.cuda.is_available()
    args = SpanGRPOConfig(
        options.output,
        num_generations=8,
        per_device_train_batch_size=16 * 8 if options.model is None else 8,
        max_completion_length=task.max_completion_length,
        max_steps=options.steps,
        learning_rate=4e-4 if options.model is None else 1e-6,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=min(10, options.steps),
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
    print(f"Report: {options.output}/report.html")


if __name__ == "__main__":
    main()
