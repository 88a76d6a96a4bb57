"""Recipes, prompts and datasets that do not fit: nothing trains, and the sentence says what to set."""

import json
import math
import warnings
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import datasets
import yaml
from datasets import Dataset

import trl_small
from border.case import Case, check, command
from spanwise.engines.trl import SpanGRPOTrainer
from spanwise.scheme import Scheme
from spanwise.tasks import build_model, build_tokenizer

pytestmark = trl_small.THIRD_PARTY

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(10)]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
OWN = {
    "layout": {"plan": ["plan"], "code": ["code"]},
    "objectives": [{"reward": "format", "pays": ["plan", "code"]}],
}


@cache
def model(template: str | None = TEMPLATE) -> str:
    """The folder of a small model."""
    folder = mkdtemp()
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    build_model(tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rows(folder: Path, cells=ROWS, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in cells))
    return file


def recipe(folder: Path, name: str = "recipe.yaml", **fields) -> Path:
    """A recipe of a model and a dataset in the folder, with some fields changed."""
    usual = {
        "model": model(),
        "dataset": "data.jsonl",
        "prompts": 2,
        "group_size": 4,
        "steps": 1,
        "output": str(folder / "run"),
    }
    file = folder / name
    file.write_text(yaml.safe_dump({**usual, **fields}, sort_keys=False))
    return file


@contextmanager
def own_cache(folder: Path):
    """Datasets of one path are not taken for each other."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = str(folder / "cache")
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = before


def trains(cells=ROWS, *words, **fields):
    """`spanwise train` of a recipe on rows."""

    def run(folder: Path) -> str:
        rows(folder, cells)
        with own_cache(folder):
            return command("train", recipe(folder, **fields), *words)

    return run


def refused(text: str, *words):
    """`spanwise train` of a recipe file that says `text`."""

    def run(folder: Path) -> str:
        (folder / "recipe.yaml").write_text(text)
        return command("train", folder / "recipe.yaml", *words)

    return run


def elsewhere(folder: Path) -> str:
    """A recipe in a folder of its own, with a reward that lies nowhere."""
    (folder / "project").mkdir()
    rows(folder / "project")
    objectives = [{"reward": "rewards:code_correct", "pays": ["solution"]}]
    with own_cache(folder):
        return command("train", recipe(folder / "project", objectives=objectives))


def misnamed(folder: Path) -> str:
    (folder / "train.py").write_text("def code_correct(blocks):\n    return [1.0 for _ in blocks]\n")
    return trains(objectives=[{"reward": "train:code_corect", "pays": ["solution"]}])(folder)


def broken(folder: Path) -> str:
    (folder / "train.py").write_text("import nowhere_at_all\n")
    return trains(objectives=[{"reward": "train:code_correct", "pays": ["solution"]}])(folder)


def table(text: str):
    def run(folder: Path) -> str:
        (folder / "data.csv").write_text(text)
        with own_cache(folder):
            return command("train", recipe(folder, dataset="data.csv"))

    return run


def tokenless(folder: Path) -> str:
    (folder / "weights").mkdir()
    (folder / "weights" / "model.safetensors").write_bytes((Path(model()) / "model.safetensors").read_bytes())
    return trains(model="weights")(folder)


def trainer(said=trl_small.SAID, **extra):
    """A `train.py` of the user's own."""

    def run(folder: Path) -> str:
        trl_small.trainer(folder, said=said, extra=extra).train()
        return ""

    return run


def real_trainer(*prompts):
    """A `train.py` whose completions are really sampled, for these prompts."""

    def run(folder: Path) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SpanGRPOTrainer(
                trl_small.policy(),
                args=trl_small.config(folder),
                train_dataset=Dataset.from_dict({"prompt": list(prompts), "answer": ["4"] * len(prompts)}),
                processing_class=trl_small.tokenizer(),
                scheme=trl_small.scheme(),
            )
        return ""

    return run


PLAN = trl_small.Layout({"plan": ["reasoning"], "confidence": ["confidence"]})

CASES = [
    Case(
        "a recipe with a layout of its own and no instruction",
        trains(**OWN),
        "The layout has <plan>, <code>, but no prompt asks for them: the usual instruction of 'confidence' asks for <reasoning>, "
        "<answer>, <analysis>, <confidence>. Set instruction to a text that asks for the layout's tags, prompt_column to "
        "a column of whole prompts, or instruction='' for a model that writes them by itself.",
    ),
    Case(
        "`task: digits` with a layout of other tags",
        refused(yaml.safe_dump(OWN, sort_keys=False)),
        "The model of the embedded task 'digits' writes <reasoning>, <answer>, <analysis>, <confidence> and nothing else, so no "
        "completion would hold <plan>, <code>. Use its tags in the layout, or train a --model on a --dataset.",
    ),
    Case(
        "`instruction:` without a model by name",
        refused("instruction: Think first."),
        "Task 'digits' does not use instruction (got 'Think first.'); leave instruction out.",
    ),
    Case(
        "`prompt_column: prompt` and an `instruction:`",
        trains([{"prompt": "2 + 2?", "answer": "4"}] * 4, prompt_column="prompt", instruction="Think first."),
        "Prompts of the column 'prompt' are used as they are, so that the instruction would go nowhere. Leave it out, or have it "
        "put before each of them with --set question_column=prompt in place of prompt_column.",
    ),
    Case(
        "conversations in the column of the questions",
        trains([{"question": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}] * 4),
        "Row 0 of the dataset 'data.jsonl' has [{...}] in column 'question'; a question is a text. Name the column with "
        "prompt_column if it holds whole prompts, to be used as they are.",
    ),
    Case(
        "conversations as prompts, and a tokenizer without a chat template",
        trains([{"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4"}] * 4, model=model(None)),
        "Row 0 of the dataset 'data.jsonl' has [{...}] in column 'prompt'; this prompt is a conversation, and the model's "
        "tokenizer has no chat template. Give texts, or another model.",
    ),
    Case(
        "prompts that are lists of lists",
        trains([{"prompt": [["user", "2 + 2?"]], "answer": "4"}] * 4),
        "Row 0 of the dataset 'data.jsonl' has [['user', '2 + 2?']] in column 'prompt'; a prompt is a text, or a list of messages "
        "such as {'role': 'user', 'content': '...'}.",
    ),
    Case(
        "an empty question in row 3",
        trains([*ROWS[:3], {"question": " ", "answer": "6"}, *ROWS[4:]]),
        "Row 3 of the dataset 'data.jsonl' has nothing in column 'question'; fill it in or remove the row.",
    ),
    Case(
        "answers that are lists",
        trains([{"question": "2 + 2?", "answer": ["4", "four"]}] * 4),
        "Row 0 of the dataset 'data.jsonl' has ['4', 'four'] in column 'answer'; an answer is one text or number. With "
        "answer_column=null the column is left to your own reward functions.",
    ),
    Case(
        "a dataset without answers",
        trains([{"question": "2 + 2?", "gold": "4"}] * 4),
        "The dataset 'data.jsonl' has no column 'answer'; its columns are question, gold. Name the right one with --set "
        "answer_column=NAME, or set answer_column=null if there are no answers.",
    ),
    Case(
        "`answer_column: null`, and a reward that reads the answers",
        trains([{"question": "2 + 2?", "gold": "4"}] * 10, answer_column=None),
        "Objective 'correct' reads the dataset column 'answer', which does not exist; the columns are prompt, question, gold.",
    ),
    Case(
        "a dataset file without a line in it",
        trains([]),
        "The dataset 'data.jsonl' is empty and cannot be read; add rows, or set --dataset to another one.",
    ),
    Case(
        "a CSV file with a heading and no rows",
        table("question,answer\n"),
        "The dataset 'data.csv' is empty and cannot be read; add rows, or set --dataset to another one.",
    ),
    Case(
        "a CSV file without a heading",
        table("2 + 2?,4\n3 + 3?,6\n4 + 4?,8\n"),
        "The dataset 'data.csv' has no column 'question'; its columns are 2 + 2?, 4. Name the right one with --set "
        "question_column=NAME, or whole prompts, used as they are, with prompt_column=NAME.",
    ),
    Case(
        "`--columns questoin=problem`",
        trains(ROWS, "--columns", "questoin=problem"),
        "Error: There is no role of --columns 'questoin'. Did you mean 'question'? Known: answer, prompt, question.",
    ),
    Case(
        "three rows, and sixteen prompts a step",
        trains(ROWS[:3], prompts=16),
        "The dataset 'data.jsonl' leaves 2 prompts to train on, after the fifth that is kept for evaluation (at least 1, at most "
        "512), and a step takes 16. Add rows, or set --prompts to 2 or fewer.",
    ),
    Case(
        "a split that the dataset does not have",
        lambda folder: (
            (folder / "data").mkdir(),
            rows(folder / "data", name="train.jsonl"),
            command("train", recipe(folder, dataset=str(folder / "data"), split="dev")),
        )[-1],
        "Split 'dev' of the dataset folder '...data' cannot be read (...). Check --dataset (a file, a folder, or a hub name ...) "
        "and --set split=NAME.",
    ),
    Case(
        "a model folder without a tokenizer and a config",
        tokenless,
        "The model folder 'weights' needs a config and a tokenizer that can be read; it holds model.safetensors",
    ),
    Case(
        "a model that is neither in this folder nor beside the recipe",
        trains(model="my-model"),
        "The model 'my-model' is neither a folder in '...' or beside the recipe, nor a hub model within reach (...). Set --model "
        "to a folder written by save_pretrained or to a hub name.",
    ),
    Case(
        "`reward: rewards:code_correct`, and no rewards.py here or beside the recipe",
        elsewhere,
        "Objective 1: the reward 'rewards:code_correct' cannot be imported: there is no module 'rewards' in the current folder "
        "'...', beside the recipe or installed.",
    ),
    Case(
        "`reward: train:code_corect`, a slip",
        misnamed,
        "Objective 1: the reward 'train:code_corect' cannot be imported: There is no function in '...train.py' called "
        "'code_corect'. Did you mean 'code_correct'? Known: code_correct.",
    ),
    Case(
        "a train.py whose own import fails",
        broken,
        "Objective 1: the reward 'train:code_correct' cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'.",
    ),
    Case(
        "`--group-size 1`",
        lambda folder: command("train", "--group-size", "1"),
        "group_size is 1, and must be at least 2 (completions per prompt, which are compared with each other)",
    ),
    Case(
        "`clip: 1.5`, which never clips a ratio from below",
        refused("clip: 1.5"),
        "clip is 1.5, and must be at most 1.0 (PPO clip range of the ratio)",
    ),
    Case("`temperature: 1.0e-9`", refused("temperature: 1.0e-9"), "temperature is 1e-09, and must be at least 0.01"),
    Case("`learning_rate: 4`, a slip for 4e-4", refused("learning_rate: 4"), "learning_rate is 4, and must be at most 1"),
    Case("`entropy: 99`", refused("entropy: 99"), "entropy is 99, and must be at most 10"),
    Case(
        "`options: {eps: .inf}`, which makes every advantage 0",
        lambda folder: str(Scheme.preset("grpo", trl_small.LAYOUT, eps=math.inf)),
        "The option eps is inf; it must be a finite number that is not negative.",
    ),
    Case(
        "a train.py with `beta=-0.1`, which pays for leaving the reference",
        lambda folder: str(trl_small.trainer(folder, beta=-0.1)),
        "beta is -0.1; set it between 0 and 1000.",
    ),
    Case("`steps: 0`", refused("steps: 0"), "steps is 0, and must be at least 1 (generation batches)"),
    Case("`steps: yes`", refused("steps: yes"), "steps cannot be true; only report can be true or false."),
    Case(
        "`objectivs:` in a recipe",
        refused("objectivs: []"),
        "There is no recipe field 'objectivs'. Did you mean 'objectives'?",
    ),
    Case(
        "a recipe that is a list",
        refused("- task: digits\n- steps: 5\n"),
        "The recipe '...recipe.yaml' must hold 'field: value' lines, not a list.",
    ),
    Case(
        "`trainer: {scale_eps: 1.0e-4}`, which TRL does not have",
        trains(trainer={"scale_eps": 1e-4}),
        "There is no trainer option 'scale_eps'. Did you mean '...'? Of ... the closest are: ...",
    ),
    Case(
        "`trainer: {max_completion_length: 4096}`, which the recipe has a field for",
        trains(trainer={"max_completion_length": 4096}),
        "trainer: {max_completion_length: 4096} would make the run's counts wrong. Use the recipe's own "
        "field instead: max_completion_length.",
    ),
    Case(
        "a train.py whose prompts and layout disagree about the tags",
        trainer(layout=PLAN, objectives=[trl_small.Objective("format", pays=("plan", "confidence"))]),
        "Step 0: <reasoning> is in 0 of 8 completions; they do contain ...<answer> (8)... The layout asks for it, so "
        "what is read there earns nothing. Ask for these tags in the prompt, or write the layout of what the model writes.",
    ),
    Case(
        "a train.py with an if_missing far below every reward",
        trainer(
            objectives=[
                trl_small.Objective("correct", pays=("solution",), options={"verify": "exact"}),
                trl_small.Objective("brier", pays=("confidence",), given="correct", baseline="outcome", if_missing=-1000.0),
            ]
        ),
        "Step 0: Objective 'brier' has if_missing -1000, and its rewards lie between -0.64 and -0.01: one completion that leaves "
        "the block out outweighs all others in the gradient, unless scale: std divides it. Write the lowest possible reward as "
        "if_missing.",
    ),
    Case(
        "a train.py with a dataset of questions in place of prompts",
        trainer(train_dataset=Dataset.from_list(ROWS)),
        "The training dataset has no column 'prompt' with the text or messages to complete; its columns are "
        "question, answer. Rename one: dataset.rename_column('question', 'prompt').",
    ),
    Case(
        "a train.py with a prompt that is None",
        real_trainer("2+2=", None),
        "Row 1 of the training dataset has the prompt None; a prompt is a text, or a list of messages such as",
    ),
    Case(
        "a train.py with an empty prompt",
        real_trainer("2+2=", ""),
        "Row 1 of the training dataset has the prompt ''; a prompt must say something.",
    ),
]

test = check(CASES)
