"""The fields of a recipe and their defaults as `--help` lists them, without loading what a recipe needs; a test compares."""

from __future__ import annotations

#: Field -> its default, as YAML has it.
FIELDS = {
    "task": "digits",
    "start": "easy",
    "start_seed": "0",
    "start_steps": "null",
    "fields": "8",
    "model": "null",
    "dataset": "null",
    "split": "train",
    "question_column": "question",
    "prompt_column": "null",
    "answer_column": "answer",
    "instruction": "null",
    "method": "bae",
    "calibration": "null",
    "baseline": "null",
    "layout": "null",
    "segmenter": "tags",
    "most": "16",
    "prefilled": "null",
    "objectives": "null",
    "per": "null",
    "values": "null",
    "verifier": "{}",
    "options": "{}",
    "critic": "null",
    "laser": "null",
    "steps": "120",
    "prompts": "16",
    "group_size": "16",
    "mini_batches": "1",
    "micro_batch": "null",
    "learning_rate": "0.0004",
    "warmup_steps": "10",
    "clip": "0.2",
    "entropy": "0.04",
    "entropy_target": "0.2",
    "temperature": "1.0",
    "max_completion_length": "null",
    "seed": "0",
    "trainer": "{}",
    "eval_every": "10",
    "eval_prompts": "512",
    "eval_samples": "8",
    "output": "null",
    "save_every": "0",
    "keep_rollouts": "1",
    "report": "true",
    "report_to": "none",
    "threads": "1",
}
#: The same of a model and a dataset by name, where it differs.
BY_NAME = {
    "learning_rate": "1.0e-06",
    "warmup_steps": "20",
    "entropy": "0.0",
    "eval_every": "0",
    "eval_prompts": "100",
    "eval_samples": "4",
    "save_every": "40",
    "keep_rollouts": "20",
}


def fields_text() -> str:
    """The fields with their defaults, in one paragraph.

    >>> "steps=120" in fields_text()
    True
    """
    listed = ", ".join(f"{name}={default}" for name, default in FIELDS.items())
    by_name = ", ".join(f"{name}={default}" for name, default in BY_NAME.items())
    return f"Recipe fields and their defaults: {listed}. For a model by name: {by_name}."
