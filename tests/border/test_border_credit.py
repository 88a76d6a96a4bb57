"""`spanwise credit` on files with other tags, other rewards or other contents than it expects."""

import json
import shutil
from pathlib import Path

import torch

import trl_small
from border.case import check, command
from rollout_files import WELL_FORMED, trl_file, verl_file, verl_rows, write_lines

WRITTEN = Path(__file__).parents[1] / "rollouts" / "written"
CODE = [
    f"<plan>add</plan><code>{code}</code><confidence>{q}</confidence>"
    for code, q in zip("abcd", (0.9, 0.7, 0.8, 0.2), strict=True)
]
PAPER = ["layout={solution: [reasoning, answer], confidence: [analysis, confidence]}"]
BLOCKS = {"plan": ["plan"], "code": ["code"], "confidence": ["confidence"]}


TRACES = WRITTEN / "verifiers_branches"
EXACT = ["--methods", "bae", "--reward", "correct=exact", "--set", "layout={solution: [answer], confidence: [confidence]}"]


def slime_file(path):
    """A sample of two tokens, the second of which a tool said."""
    fields = {"prompt": "p", "tokens": [1, 2, 3], "response": "ab", "response_length": 2, "loss_mask": [1, 0]}
    torch.save({"rollout_id": 0, "samples": [fields]}, path)
    return path


def traces_in(folder):
    """The traces in a folder, beside the tokenizer of their ids in the folder above."""
    trl_small.tokenizer().save_pretrained(folder.parent)
    shutil.copytree(TRACES, folder)
    return folder


def credited(file, *words, code=2):
    return command("credit", file, "--output", "out", *words, code=code)


def recipe(folder, **fields):
    path = folder / "mine.yaml"
    path.write_text(json.dumps({"layout": BLOCKS, **fields}))
    return path


def tagged(folder, *texts):
    texts = texts or ("<draft>a</draft><final>b</final>", "<draft>c</draft><final>d</final>")
    return write_lines(folder / "1.jsonl", [{"prompt": "p", "completion": text, "passed": 1} for text in texts])


def rows_without_answers(folder):
    rows = [{name: value for name, value in row.items() if name not in ("score", "gts")} for row in verl_rows()]
    return write_lines(folder / "1.jsonl", [{**row, "grade": 0.5, "acc": -0.5} for row in rows])


def sheet(folder, row):
    (folder / "sheet.csv").write_text(f"prompt,draft,final,passed,style\n{row}\n")
    return folder / "sheet.csv"


CASES = {
    "a verl dump whose completions are <plan> <code> <confidence>, no recipe": lambda folder: credited(
        WRITTEN / "verl", code=0
    ),
    "the same file with the paper's layout": lambda folder: credited(
        WRITTEN / "verl", "--set", *PAPER, "--reward", "correct=text"
    ),
    "a layout with one tag that nobody writes": lambda folder: credited(
        verl_file(folder / "1.jsonl", WELL_FORMED, acc=[1, 0, 1, 0]),
        "--set",
        "layout={solution: [think, answer], confidence: [confidence]}",
        code=0,
    ),
    "answers in <think> alone, and a score from -1 to 1": lambda folder: credited(
        verl_file(folder / "1.jsonl", ["<think>so</think> 4"] * 2, score=[-1.0, 1.0], gts=["4"] * 2), code=0
    ),
    "a confidence judged by a score from -1 to 1": lambda folder: credited(
        verl_file(folder / "1.jsonl", CODE, score=[1, 1, -1, -1]), "--reward", "correct=score", "--methods", "bae"
    ),
    "no right answers, and no recorded reward that says right or wrong": lambda folder: credited(
        rows_without_answers(folder), "--set", "layout={solution: [answer], confidence: [confidence]}"
    ),
    "TRL's completions with two reward functions, no recipe": lambda folder: credited(
        trl_file(folder / "a.parquet", WELL_FORMED, step=[1] * 4, form=[1.0] * 4, accuracy_reward=[1.0, 0.0, 0.0, 1.0]),
        code=0,
    ),
    "`--reward correct=acc` where `acc` holds words": lambda folder: credited(
        verl_file(folder / "1.jsonl", CODE, acc=["good", "bad", "good", "bad"]), "--reward", "correct=acc"
    ),
    "a recipe whose reward cannot be imported": lambda folder: credited(
        verl_file(folder / "1.jsonl", CODE, acc=[1, 0, 1, 0]),
        *("--recipe", recipe(folder, objectives=[{"reward": "train_of_nobody:code_correct", "pays": ["code"]}])),
    ),
    "a recipe for other tags than the file's": lambda folder: credited(
        trl_file(folder / "a.parquet", WELL_FORMED, acc=[1, 0, 1, 0]), "--recipe", recipe(folder)
    ),
    "`--methods recorded` on a file that records no advantages, score or reward": lambda folder: credited(
        trl_file(folder / "a.parquet", WELL_FORMED, acc=[1, 0, 1, 0]), "--methods", "recorded"
    ),
    "a CSV table whose columns say nothing to spanwise": lambda folder: credited(
        text(folder / "a.csv", "prompt,text,gold\n2+2=,4,4\n")
    ),
    "a CSV table with both `response` and `output`": lambda folder: credited(
        text(folder / "a.csv", "prompt,response,output\n2+2=,4,4\n")
    ),
    "`--columns completoin=text`": lambda folder: credited(
        text(folder / "a.csv", "prompt,text,gold\n2+2=,4,4\n"), "--columns", "completoin=text,answer=gold"
    ),
    "a CSV table in which a completion is missing, and a reward": lambda folder: credited(
        text(folder / "a.csv", "prompt,completion,acc\nq,<answer>4</answer>,1\nq,<answer>5</answer>,0\nq,,1\nq,so,\n"),
        "--methods",
        "grpo",
        "--set",
        "layout={solution: [answer]}",
        code=0,
    ),
    "a CSV file in which a text with a comma stands in no quotes": lambda folder: credited(
        text(folder / "a.csv", "prompt,completion\n2+2=,4, I think\n")
    ),
    "a list of two completions beside a list of one reward": lambda folder: credited(
        text(folder / "a.json", json.dumps([{"prompt": "2+2=", "completions": ["4", "5"], "reward": [1.0]}]))
    ),
    "an id of each row in `group_id`": lambda folder: credited(
        text(folder / "a.csv", "prompt,completion,group_id\n2+2=,4,0\n2+2=,5,1\n")
    ),
    "a verifiers file in which every rollout failed": lambda folder: credited(WRITTEN / "verifiers_failed"),
    "completions that are all empty": lambda folder: credited(verl_file(folder / "1.jsonl", ["", ""], score=[0, 0])),
    "conversations in which the user has the last word": lambda folder: credited(
        text(
            folder / "a.json",
            json.dumps([{"messages": [{"role": who, "content": "hm"} for who in ("user", "assistant", "user")]}]),
        )
    ),
    "a dump of slime that is damaged": lambda folder: credited(text(folder / "0.pt", "PK")),
    "a dump of slime with tool output, without its tokenizer": lambda folder: credited(slime_file(folder / "0.pt")),
    "`--write` on a file that is neither traces nor a dump": lambda folder: credited(
        tagged(folder), "--pay", "draft=passed", "--methods", "recipe", "--write", "recipe"
    ),
    "`--write` on traces without a tokenizer": lambda folder: credited(TRACES, *EXACT, "--write", "bae"),
    "`--write` into the folder of the traces": lambda folder: command(
        "credit", traces_in(folder / "out"), *EXACT, "--write", "bae", "--tokenizer", folder, "--output", "out"
    ),
    "a log of Inspect": lambda folder: credited(text(folder / "1.eval", "PK")),
    "a block of --pay that no completion has": lambda folder: credited(tagged(folder), "--pay", "drft=passed"),
    "two blocks of --pay in completions without tags": lambda folder: credited(
        tagged(folder, "x", "y"), "--pay", "a=passed", "--pay", "b=passed"
    ),
    "a reward of --pay that is neither a column nor known": lambda folder: credited(tagged(folder), "--pay", "draft=pased"),
    "a sheet with a column for each part, one of which holds a tag": lambda folder: credited(
        sheet(folder, "p,a</draft>,b,1,0"), "--pay", "draft=passed", "--pay", "final=style"
    ),
    "--pay beside objectives": lambda folder: credited(tagged(folder), "--pay", "draft=passed", "--set", "objectives=[]"),
    "a method of one number beside a recipe with two rewards": lambda folder: credited(
        summed(folder), "--methods", "dr_grpo", "--recipe", folder / "mine.yaml", code=0
    ),
}


def summed(folder):
    rewards = [{"name": "form"}, {"name": "acc", "weight": 4.0}]
    objectives = [{"reward": "correct", "pays": ["solution"], **reward} for reward in rewards]
    recipe(folder, layout={"solution": ["answer"]}, objectives=objectives)
    rows = [{"prompt": "2+2=", "completion": f"<answer>{n}</answer>", "form": 1.0, "acc": n / 2} for n in (0, 1, 2)]
    return text(folder / "own.json", json.dumps(rows))


def text(path, content):
    path.write_text(content)
    return path


test = check(__doc__, CASES)
