"""Recipes, prompts and datasets that do not fit: nothing trains, and the sentence says what to set."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

import datasets
import torch
import yaml
from datasets import Dataset

import trl_small
from border.case import case, check, command
from rollout_files import write_lines
from spanwise.credit import ktae
from spanwise.scheme import Scheme
from spanwise.tasks import load_task
from tokenizers_small import digits_model

pytestmark = trl_small.THIRD_PARTY

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(10)]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
ASKED = [{"role": "user", "content": "2 + 2?"}]
OWN = {"layout": {"plan": ["plan"], "code": ["code"]}, "objectives": [{"reward": "format", "pays": ["plan", "code"]}]}


@cache
def model(template: str | None = TEMPLATE) -> str:
    return digits_model(mkdtemp(), template)


def rows(folder: Path, cells=ROWS, name: str = "data.jsonl") -> Path:
    return write_lines(folder / name, cells)


def recipe(folder: Path, **fields) -> Path:
    """A recipe of a model and a dataset in the folder, with some fields changed."""
    usual = {"model": model(), "dataset": "data.jsonl", "prompts": 2, "group_size": 4, "steps": 1, "output": "run"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**usual, **fields}, sort_keys=False))
    return folder / "recipe.yaml"


@case
def trains(folder: Path, cells=ROWS, *words, project=".", **fields) -> str:
    """`spanwise train` of a recipe on rows, both in the folder `project`; each with a cache of datasets of its own."""
    (folder / project).mkdir(exist_ok=True)
    rows(folder / project, cells)
    with patch.object(datasets.config, "HF_DATASETS_CACHE", str(folder / "cache")):
        return command("train", recipe(folder / project, **fields), *words)


@case
def refused(folder: Path, text: str) -> str:
    (folder / "recipe.yaml").write_text(text)
    return command("train", folder / "recipe.yaml")


@case
def own_code(folder: Path, text: str, reward: str):
    (folder / "train.py").write_text(text)
    return trains(objectives=[{"reward": reward, "pays": ["solution"]}])(folder)


@case
def table(folder: Path, text: str) -> str:
    (folder / "data.csv").write_text(text)
    return trains(dataset="data.csv")(folder)


def without_the_split(folder: Path) -> str:
    (folder / "data").mkdir()
    rows(folder / "data", name="train.jsonl")
    return command("train", recipe(folder, dataset=str(folder / "data"), split="dev"))


def tokenless(folder: Path) -> str:
    (folder / "weights").mkdir()
    (folder / "weights" / "model.safetensors").write_bytes((Path(model()) / "model.safetensors").read_bytes())
    return trains(model="weights")(folder)


@case
def trainer(folder: Path, *, beta=0.0, **extra):
    trl_small.trainer(folder, extra=extra, beta=beta).train()


@case
def real_trainer(folder: Path, *prompts):
    """A `train.py` whose completions are really sampled, for these prompts."""
    dataset = Dataset.from_dict({"prompt": list(prompts), "answer": ["4"] * len(prompts)})
    trl_small.trainer(folder, extra={"train_dataset": dataset, "rollout_func": None})


@case
def preset(method, **options):
    return str(Scheme.preset(method, trl_small.LAYOUT, **options))


def compared_as(verify):
    return refused(f"objectives: [{{reward: correct, pays: solution, options: {{verify: {verify}}}}}]")


def without_math(folder):
    with patch("spanwise.score.answers.find_spec", return_value=None):
        return compared_as("math")(folder)


PLAN, ONES_N1 = trl_small.Layout({"plan": ["reasoning"], "confidence": ["confidence"]}), torch.ones(2, 1)

CASES = {
    "a recipe with a layout of its own and no instruction": trains(**OWN),
    "`task: digits` with a layout of other tags": refused(yaml.safe_dump(OWN, sort_keys=False)),
    "`instruction:` without a model by name": refused("instruction: Think first."),
    "`prompt_column: prompt` and an `instruction:`": trains(
        [{"prompt": "2 + 2?", "answer": "4"}] * 4, prompt_column="prompt", instruction="Think first."
    ),
    "conversations in the column of the questions": trains([{"question": ASKED, "answer": "4"}] * 4),
    "conversations as prompts, and a tokenizer without a chat template": trains(
        [{"prompt": ASKED, "answer": "4"}] * 4, model=model(None)
    ),
    "prompts that are lists of lists": trains([{"prompt": [["user", "2 + 2?"]], "answer": "4"}] * 4),
    "an empty question in row 3": trains([*ROWS[:3], {"question": " ", "answer": "6"}, *ROWS[4:]]),
    "answers that are lists": trains([{"question": "2 + 2?", "answer": ["4", "four"]}] * 4),
    "a dataset without answers": trains([{"question": "2 + 2?", "gold": "4"}] * 4),
    "`answer_column: null`, and a reward that reads the answers": trains(
        [{"question": f"{n} + 2?", "gold": "4"} for n in range(10)], answer_column=None
    ),
    "a dataset with a column of images": trains([{**row, "image": "a.png"} for row in ROWS]),
    "a dataset file without a line in it": trains([]),
    "a CSV file with a heading and no rows": table("question,answer\n"),
    "a CSV file without a heading": table("2 + 2?,4\n3 + 3?,6\n4 + 4?,8\n"),
    "`--columns questoin=problem`": trains(ROWS, "--columns", "questoin=problem"),
    "three rows, and sixteen prompts a step": trains(ROWS[:3], prompts=16),
    "`--set split=dev` of a file": trains(ROWS, "--set", "split=dev"),
    "`load_task` with an `eval_split` that is the split of the training": lambda folder: load_task(
        model(), str(rows(folder)), eval_split="train"
    ),
    "a split that the dataset does not have": without_the_split,
    "a model folder without a tokenizer and a config": tokenless,
    "a model that is neither in this folder nor beside the recipe": trains(model="my-model"),
    "`reward: rewards:code_correct`, and no rewards.py here or beside the recipe": trains(
        project="project", objectives=[{"reward": "rewards:code_correct", "pays": ["solution"]}]
    ),
    "`reward: train:code_corect`, a slip": own_code(
        "def code_correct(blocks):\n    return [1.0 for _ in blocks]\n", "train:code_corect"
    ),
    "`reward: train:Judge`, a class": own_code("class Judge:\n    def __call__(self, blocks): ...\n", "train:Judge"),
    "a train.py whose own import fails": own_code("import nowhere_at_all\n", "train:code_correct"),
    "`--group-size 1`": lambda folder: command("train", "--group-size", "1"),
    "`clip: 1.5`, which never clips a ratio from below": refused("clip: 1.5"),
    "`temperature: 1.0e-9`": refused("temperature: 1.0e-9"),
    "`learning_rate: 4`, a slip for 4e-4": refused("learning_rate: 4"),
    "`entropy: 99`": refused("entropy: 99"),
    "`options: {eps: .inf}`, which makes every advantage 0": preset("grpo", eps=math.inf),
    '`options: {leave_one_out: "false"}`, a text that Python takes for true': preset("bae", leave_one_out="false"),
    "`gigpo` with `options: {over: trajectory}`": preset("gigpo", over="trajectory"),
    '`gigpo` with `options: {step_weight: "1"}`, a text': preset("gigpo", step_weight="1"),
    "`gigpo` with `options: {similarity: 95}`": preset("gigpo", similarity=95),
    "`sae` with `options: {threshold: -1}`": preset("sae", threshold=-1),
    "`ha_dw` with `options: {window: 10.0}`": preset("ha_dw", window=10.0),
    "`refine: {method: oar, options: {beta: -1.5}}`": preset("grpo", refine={"method": "oar", "options": {"beta": -1.5}}),
    "`refine: {method: ktae, options: {h1: 0, h2: 0}}`": preset(
        "grpo", refine={"method": "ktae", "options": {"h1": 0, "h2": 0}}
    ),
    "`ktae(..., h1=0, h2=0)`, in Python": case(ktae)(
        torch.zeros(2, 1), ONES_N1.long(), ONES_N1.bool(), torch.eye(2)[0], torch.zeros(2).long(), h1=0.0, h2=0.0
    ),
    "`sae` with `options: {boundary: begin}`": preset("sae", boundary="begin"),
    "`options: {eps_at: var}`": preset("gdpo", eps_at="var"),
    "a train.py with `beta=-0.1`, which pays for leaving the reference": trainer(beta=-0.1),
    "`steps: 0`": refused("steps: 0"),
    "`seed: -1`": refused("seed: -1"),
    "`steps: yes`": refused("steps: yes"),
    "`objectivs:` in a recipe": refused("objectivs: []"),
    "a recipe that is a list": refused("- task: digits\n- steps: 5\n"),
    "`trainer: {scale_eps: 1.0e-4}`, which TRL does not have": trains(trainer={"scale_eps": 1e-4}),
    "`trainer: {max_completion_length: 4096}`, which the recipe has a field for": trains(
        trainer={"max_completion_length": 4096}
    ),
    "`trainer: {num_generations: 8}`": trains(trainer={"num_generations": 8}),
    "`trainer: {weight_decay: 1e-2}`, which YAML reads as a text": trains(trainer={"weight_decay": "1e-2"}),
    "a train.py whose prompts and layout disagree about the tags": trainer(
        layout=PLAN, objectives=[trl_small.Objective("format", pays=("plan", "confidence"))]
    ),
    "a train.py with an if_missing far below every reward": trainer(
        objectives=[trl_small.OBJECTIVES[0], replace(trl_small.OBJECTIVES[1], if_missing=-1000.0)]
    ),
    "a train.py with a dataset of questions in place of prompts": trainer(train_dataset=Dataset.from_list(ROWS)),
    "a train.py with a prompt that is None": real_trainer("2+2=", None),
    "a train.py with an empty prompt": real_trainer("2+2=", ""),
    "`steps: many`": refused("steps: many"),
    "`task: confidence` and a model without a dataset": refused("{task: confidence, model: m}"),
    "`task: digits` and a model by name": refused("{task: digits, model: m}"),
    "`mini_batches: 3` of 256 completions": refused("mini_batches: 3"),
    "`learning_rate: .inf`": refused("learning_rate: .inf"),
    "`layout: answer`": refused("layout: answer"),
    "`layout: {a: 5}`": refused("layout: {a: 5}"),
    "`per: [1]`": refused("per: [1]"),
    "`report: maybe`": refused("report: maybe"),
    "`start: hard` for a model by name": refused("{model: m, dataset: d, start: hard}"),
    "`values: each`": refused("values: each"),
    "`values: shared` under a method without a critic": refused("{values: shared, start_steps: 1}"),
    "`verifier: {worker: 3}`": refused("verifier: {worker: 3}"),
    "`verifier: {workers: 0}`": refused("verifier: {workers: 0}"),
    "`verifier: {workers: 1.5}`": refused("verifier: {workers: 1.5}"),
    "`verifier: {deadline: .inf}`": refused("verifier: {deadline: .inf}"),
    '`verifier: {deadline: "5"}`': refused("verifier: {deadline: '5'}"),
    "`verifier` where nothing compares answers": refused(
        "{start_steps: 1, verifier: {workers: 1}, objectives: [{reward: format, pays: solution}]}"
    ),
    "`options: {verify: maths}`": compared_as("maths"),
    "`options: {verify: math}` without Math-Verify": without_math,
    "`reward: train:f`, and a train.py that exits": own_code("raise SystemExit(2)", "train:f"),
    "`reward: nowhere.py:f`": trains(objectives=[{"reward": "nowhere.py:f", "pays": ["solution"]}]),
    "`reward: :f`": trains(objectives=[{"reward": ":f", "pays": ["solution"]}]),
}

test = check(__doc__, CASES)
