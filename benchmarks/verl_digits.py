"""The demo of the README through verl: the digit chain with one number for a completion, and blockwise. `make demo-verl`.

Both arms start from the same hard warm start and are paid for a right answer plus the log score of the stated confidence. verl
is the real one, `python -m verl.trainer.main_ppo`; without a GPU it needs the plug-in of its tests (`tests/engines/verl/cpu`).
The curves are those of verl's own rollout dump, whose prompts no step has seen before. The table is `spanwise eval`'s protocol
on the weights that verl saved: 512 held-out prompts, 8 completions each.

    .venv/bin/python benchmarks/verl_digits.py --python .venv-verl/bin/python
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise.commands.demo.demo import DIGITS
from spanwise.commands.eval.evaluate import evaluate
from spanwise.commands.shared.display import figure_table, text_plot
from spanwise.commands.shared.fitted import say
from spanwise.commands.shared.folder import new_folder
from spanwise.measure import figures
from spanwise.recipe import load
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks import DIGITS_LAYOUT, Task, digits_task
from spanwise.tasks.digits import is_refusal
from spanwise.tasks.embedded import stated_confidences

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engines/verl/cpu"))
from run_verl import options, run, write_task

#: So many steps make one point of a curve.
SMOOTH = 5


def train(folder: Path, arm: str, task: Task, choice: argparse.Namespace) -> float:
    """One run of verl; how long it took."""
    write_task(folder, task)
    recipe = {"layout": {name: list(tags) for name, tags in DIGITS_LAYOUT.blocks}, **DIGITS.arms[arm]}
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump({**recipe, "calibration": DIGITS.common["calibration"]}, sort_keys=False)
    )
    overrides = options(
        folder,
        prompts=choice.prompts,
        group=choice.group_size,
        steps=choice.steps,
        algorithm__adv_estimator="spanwise",
        _algorithm__spanwise__recipe=folder / "recipe.yaml",
        actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-mean",
        actor_rollout_ref__actor__entropy_coeff=choice.entropy,
        actor_rollout_ref__actor__optim__lr=4e-4,
        actor_rollout_ref__actor__optim__lr_warmup_steps=10,
        actor_rollout_ref__actor__checkpoint__save_contents="[hf_model]",
        actor_rollout_ref__rollout__seed=choice.seed,
        trainer__save_freq=choice.steps,
    )
    started = time.perf_counter()
    run(folder, overrides, timeout=3600, python=choice.python, VERL_ON_CPU_RECORD="")
    return time.perf_counter() - started


def curve(folder: Path, steps: int) -> list[dict[str, float | None]]:
    """The figures of the rollouts that verl dumped, `SMOOTH` steps at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    vocabulary, points = Vocabulary.from_tokenizer(tokenizer), []
    for first in range(1, steps + 1, SMOOTH):
        files = [folder / "rollouts" / f"{step}.jsonl" for step in range(first, min(first + SMOOTH, steps + 1))]
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        tokens = tokenizer([row["output"] for row in rows], padding=True, padding_side="right", return_tensors="pt")
        spans, text = find_blocks(
            tokens["input_ids"], tokens["attention_mask"].bool(), layout=DIGITS_LAYOUT, vocabulary=vocabulary
        )
        answers = [(entry.get("solution") or {}).get("answer") for entry in text]
        right_n = torch.tensor([float(answer == row["gts"]) for answer, row in zip(answers, rows, strict=True)])
        stated_n = stated_confidences(text, "confidence", DIGITS_LAYOUT)
        refusal_n = torch.tensor([is_refusal(entry) for entry in text])
        points.append(figures(stated_n, right_n.double(), well_formed_n=spans.fault_n == 0, refusal_n=refusal_n))
    return points


def main() -> None:
    """Train the arms, print a table and curves, write `summary.json`."""
    parser = argparse.ArgumentParser(description="The digit chain through verl, on CPU.")
    parser.add_argument("--python", default=sys.executable, help="of the environment with verl and spanwise in it")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: a new one, runs/demo-verl-<n>")
    parser.add_argument("--arms", default=",".join(DIGITS.arms))
    for name, default in {"steps": 80, "seed": 0, "prompts": 16, "group-size": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--entropy", type=float, default=0.04, help="coefficient of verl's entropy bonus")
    choice = parser.parse_args()
    choice.output = choice.output or new_folder("demo-verl")
    torch.set_num_threads(1)
    console, figures_by_arm, curves = Console(), dict[str, dict[str, Any]](), dict[str, list[dict[str, Any]]]()
    task = digits_task("hard", seed=choice.seed, train_size=choice.steps * choice.prompts)
    for arm in choice.arms.split(","):
        folder = (choice.output / f"{arm}-{choice.seed}").resolve()
        folder.mkdir(parents=True)
        seconds = train(folder, arm, task, choice)
        curves[arm] = curve(folder, choice.steps)
        end = folder / f"checkpoints/global_step_{choice.steps}/actor/huggingface"
        model = AutoModelForCausalLM.from_pretrained(end, dtype=torch.float32).eval()
        evaluation = evaluate(model, AutoTokenizer.from_pretrained(task.model), task, load(None), prompts=512, samples=8)
        peak = max(point["refusal_rate"] or 0.0 for point in curves[arm])
        figures_by_arm[arm] = {**evaluation.figures(), "peak_refusal_rate": peak, "seconds": seconds}
        console.print(f"{arm}: {seconds:.0f} s", highlight=False)
    settings = {key: value if isinstance(value, int | float | str) else str(value) for key, value in vars(choice).items()}
    (choice.output / "summary.json").write_text(
        json.dumps({"options": settings, "arms": figures_by_arm, "curves": curves}, indent=2)
    )
    say(
        console,
        *figure_table(f"correctness + log score from the same hard warm start, verl, seed {choice.seed}", figures_by_arm),
    )
    for arm, points in curves.items():
        console.print(f"\n{arm}, every {SMOOTH} steps", highlight=False)
        metrics = {"refusals": "refusal_rate", "accuracy": "accuracy"}
        console.print(
            text_plot({title: [point[name] for point in points] for title, name in metrics.items()}), highlight=False
        )


if __name__ == "__main__":
    main()
