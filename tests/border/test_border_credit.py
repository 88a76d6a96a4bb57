"""`spanwise credit` on files with other tags, other rewards or other contents than it expects."""

import functools
import json
import shlex
import shutil
from pathlib import Path

import torch

import trl_small
from border.case import case, check, command
from rollout_files import LAYOUT, WELL_FORMED, node, small_episode, trl_file, verl_file, verl_rows, write_lines

WRITTEN = Path(__file__).parents[1] / "rollouts" / "written"
REPORTED = zip("abcd", (0.9, 0.7, 0.8, 0.2), strict=True)
CODE = [f"<plan>add</plan><code>{code}</code><confidence>{q}</confidence>" for code, q in REPORTED]
PAPER = "--set 'layout={solution: [reasoning, answer], confidence: [analysis, confidence]}'"
BLOCKS = {"plan": ["plan"], "code": ["code"], "confidence": ["confidence"]}
TRACES, BOTH = WRITTEN / "verifiers_branches", "--set 'layout={solution: [answer], confidence: [confidence]}'"
EXACT = f"--methods bae --reward correct=exact {BOTH}"


def slime(folder):
    """A sample of two tokens, the second of which a tool said."""
    fields = {"prompt": "p", "tokens": [1, 2, 3], "response": "ab", "response_length": 2, "loss_mask": [1, 0]}
    torch.save({"rollout_id": 0, "samples": [fields]}, folder / "0.pt")
    return folder / "0.pt"


@case
def credited(folder, write, words="", code=2, recipe=None):
    """`spanwise credit` on a file, or on what a function of the folder writes; `recipe`: the fields of one, of other blocks."""
    if recipe is not None:
        (folder / "mine.yaml").write_text(json.dumps({"layout": BLOCKS, **recipe}))
        words += " --recipe mine.yaml"
    return command("credit", write(folder) if callable(write) else write, "--output", "out", *shlex.split(words), code=code)


@case
def text(folder, name, content):
    """A file of this text; what is no text is written as JSON."""
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


@case
def verl(folder, outputs, **columns):
    return verl_file(folder / "1.jsonl", outputs, **columns)


@case
def trl(folder, **columns):
    return trl_file(folder / "a.parquet", WELL_FORMED, **columns)


def tagged(*texts):
    texts = texts or ("<draft>a</draft><final>b</final>", "<draft>c</draft><final>d</final>")
    rows = [{"prompt": "p", "completion": text, "passed": 1} for text in texts]
    return lambda folder: write_lines(folder / "1.jsonl", rows)


def own_prompts(folder):
    """Conversations of two questions; what the model said to the first one is part of the prompt of the second."""
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, said, strict=True)]}
        for said in (("hi", "hello", "2+2?", "4"), ("hi", "hey", "2+2?", "5"))
    ]
    return write_lines(folder / "1.jsonl", [{**row, "passed": n} for n, row in enumerate(rows)])


def counted_tools(folder):
    """`spanwise credit` on an agent's log of two conversations, one with a tool, under a function that counts tool messages."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    question, reply = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    used = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}]
    log = write_lines(folder / "1.jsonl", [{"messages": [question, *tools, reply]} for tools in (used, [])])
    (folder / "mine.py").write_text(
        "def tools(completions, **_):\n    return [float(sum(m['role'] == 'tool' for m in talk)) for talk in completions]\n"
    )
    objective = {"reward": f"{folder / 'mine.py'}:tools", "name": "tools", "pays": ["completion"]}
    return credited(log, recipe={"layout": {"completion": []}, "objectives": [objective]}, code=0)(folder)


def without_answers(folder):
    rows = [{name: value for name, value in row.items() if name not in ("score", "gts")} for row in verl_rows()]
    return write_lines(folder / "1.jsonl", [{**row, "grade": 0.5, "acc": -0.5} for row in rows])


def over_the_traces(folder):
    """Write advantages into the folder of the traces, beside the tokenizer of their ids in the folder above."""
    trl_small.tokenizer().save_pretrained(folder)
    shutil.copytree(TRACES, folder / "out")
    return credited(folder / "out", f"{EXACT} --write bae --tokenizer .")(folder)


def two_formats(folder):
    (folder / "mine").mkdir()
    (folder / "mine" / "a.csv").write_text("prompt,completion,acc\np,4,1\n")
    return write_lines(folder / "mine" / "b.jsonl", [{"prompt": "p", "completion": "5", "acc": 0}]).parent


def two_writers(folder):
    write_lines(folder / "mine" / "1.jsonl", [{"prompt": "p", "completion": "5", "acc": 0}])
    return verl_file(folder / "mine" / "2.jsonl", ["4"], acc=[1]).parent


def unscored_traces(folder):
    """Two traces with token ids, one of them without a reward."""
    trl_small.tokenizer().save_pretrained(folder)
    spoken = node("assistant", "4", parent=None, sampled=True, ids=(5,), mask=(1,))
    rows = [small_episode("4", {"exact": score}, nodes=[spoken]) for score in (1.0, None)]
    return write_lines(folder / "traces.jsonl", rows)


PAID = {"reward": "correct", "pays": ["solution"]}
SUMMED = [{**PAID, "name": "form"}, {**PAID, "name": "acc", "weight": 4.0}]
PASSED, CODED, OF_TRL = verl(WELL_FORMED, acc=[1, 0, 1, 0]), verl(CODE, acc=[1, 0, 1, 0]), trl(acc=[1, 0, 1, 0])
csv, array = functools.partial(text, "a.csv"), functools.partial(text, "a.json")
GOLD = csv("prompt,text,gold\n2+2=,4,4\n")
CASES = {
    "a verl dump whose completions are <plan> <code> <confidence>, no recipe": credited(WRITTEN / "verl", code=0),
    "the same file with the paper's layout": credited(WRITTEN / "verl", f"{PAPER} --reward correct=text"),
    "a layout with one tag that nobody writes": credited(
        PASSED, "--set 'layout={solution: [think, answer], confidence: [confidence]}'", code=0
    ),
    "answers in <think> alone, and a score from -1 to 1": credited(
        verl(["<think>so</think> 4"] * 2, score=[-1.0, 1.0], gts=["4"] * 2), code=0
    ),
    "a confidence judged by a score from -1 to 1": credited(
        verl(CODE, score=[1, 1, -1, -1]), "--reward correct=score --methods bae"
    ),
    "an agent's log with tool calls, and a reward function of `completions`": counted_tools,
    "TRL's completions with a length that a function logs with `log_extra`": credited(
        trl(step=[1] * 4, accuracy_reward=[1.0, 0.0, 0.0, 1.0], length=[9, 8, 7, 6], advantage=[0.0] * 4), code=0
    ),
    "no right answers, and no recorded reward that says right or wrong": credited(without_answers, BOTH),
    "TRL's completions with two reward functions, no recipe": credited(
        trl(step=[1] * 4, form=[1.0] * 4, accuracy_reward=[1.0, 0.0, 0.0, 1.0], advantage=[0.0] * 4), code=0
    ),
    "`--reward correct=acc` where `acc` holds words": credited(verl(CODE, acc=["good", "bad"] * 2), "--reward correct=acc"),
    "a recipe whose reward cannot be imported": credited(
        CODED, recipe={"objectives": [{"reward": "train_of_nobody:code_correct", "pays": ["code"]}]}
    ),
    "a recipe for other tags than the file's": credited(OF_TRL, recipe={}),
    "`--methods rloo --set per=completion`": credited(PASSED, "--methods rloo --set per=completion"),
    "`--reward` twice for one objective": credited(
        verl(WELL_FORMED, acc=[1, 0, 1, 0], fine=[0, 1, 0, 1]), "--reward correct=acc --reward correct=fine"
    ),
    "`--methods recorded` on a file that records no advantages, score or reward": credited(OF_TRL, "--methods recorded"),
    "a CSV table whose columns say nothing to spanwise": credited(GOLD),
    "a CSV table with both `response` and `output`": credited(csv("prompt,response,output\n2+2=,4,4\n")),
    "`--columns completoin=text`": credited(GOLD, "--columns completoin=text,answer=gold"),
    "a CSV table in which a completion is missing, and a reward": credited(
        csv("prompt,completion,acc\nq,<answer>4</answer>,1\nq,<answer>5</answer>,0\nq,,1\nq,so,\n"),
        "--methods grpo --set 'layout={solution: [answer]}'",
        code=0,
    ),
    "a CSV table with a list of rewards per turn": credited(
        csv('prompt,completion,reward,turn_rewards\n2+2=,4,1,"[0, 1]"\n2+2=,5,0,"[0, 0]"\n'), code=0
    ),
    "a CSV file in which a text with a comma stands in no quotes": credited(csv("prompt,completion\n2+2=,4, I think\n")),
    "a list of two completions beside a list of one reward": credited(
        array([{"prompt": "2+2=", "completions": ["4", "5"], "reward": [1.0]}])
    ),
    "a list of two completions beside one reward": credited(
        array([{"prompt": "2+2=", "completions": ["4", "5"], "reward": 0.5}])
    ),
    "a list in which a completion is null": credited(
        array([{"prompt": "q", "completions": ["4", None, "5"], "acc": [1, 0, 0]}]), "--pay all=acc --methods grpo", code=0
    ),
    "conversations of the roles human and gpt": credited(
        array([{"messages": [{"role": who, "content": "hm"} for who in ("human", "gpt")]}])
    ),
    "an id of each row in `group_id`": credited(csv("prompt,completion,group_id\n2+2=,4,0\n2+2=,5,1\n")),
    "a verifiers file in which every rollout failed": credited(WRITTEN / "verifiers_failed"),
    "completions that are all empty": credited(verl(["", ""], score=[0, 0])),
    "conversations in which the user has the last word": credited(
        array([{"messages": [{"role": who, "content": "hm"} for who in ("user", "assistant", "user")]}])
    ),
    "a dump of slime with tool output, without its tokenizer": credited(slime),
    "`--write` on a file that is neither traces nor a dump": credited(
        tagged(), "--pay draft=passed --methods recipe --write recipe"
    ),
    "`--write` on traces without a tokenizer": credited(TRACES, f"{EXACT} --write bae"),
    "`--write` into the folder of the traces": over_the_traces,
    "a log of Inspect": credited(text("1.eval", "PK")),
    "a block of --pay that no completion has": credited(tagged(), "--pay drft=passed"),
    "two blocks of --pay in completions without tags": credited(tagged("x", "y"), "--pay a=passed --pay b=passed"),
    "a reward of --pay that is neither a column nor known": credited(tagged(), "--pay draft=pased"),
    "a sheet with a column for each part, one of which holds a tag": credited(
        csv("prompt,draft,final,passed,style\np,a</draft>,b,1,0\n"), "--pay draft=passed --pay final=style"
    ),
    "--pay beside objectives": credited(tagged(), "--pay draft=passed --set objectives=[]"),
    "a method of one number beside a recipe with two rewards": credited(
        array([{"prompt": "2+2=", "completion": f"<answer>{n}</answer>", "form": 1, "acc": n / 2} for n in range(3)]),
        "--methods dr_grpo",
        recipe={"layout": {"solution": ["answer"]}, "objectives": SUMMED},
        code=0,
    ),
    "a method that divides by the longest completion that there may be, of which the file says nothing": credited(
        array([{"prompt": "p", "completion": "a b c d e", "acc": 1}]), "--pay all=acc --methods dr_grpo", code=0
    ),
    "verl's dump whose scores are words": credited(
        verl(WELL_FORMED, gts=["4"] * 4, score=["good", "bad"] * 2), f"--set 'layout={json.dumps(LAYOUT)}'", code=0
    ),
    "an agent's log in which each row has a prompt of its own": credited(own_prompts, code=0),
    "a folder with tables of two formats": credited(two_formats, "--pay all=acc --methods grpo", code=0),
    "a folder with JSON lines of two writers": credited(two_writers),
    "`--write recorded` on traces without a reward": credited(
        unscored_traces, "--methods recorded --tokenizer . --write recorded"
    ),
    "two blocks in one word, and no tokenizer": credited(
        array([{"prompt": "p", "completion": text, "acc": 1} for text in ("(a)[b]", "(a) [b]")]),
        "--pay y=acc --set \"layout={x: 'delimiters:(...)', y: 'delimiters:[...]'}\"",
        code=0,
    ),
}

test = check(__doc__, CASES)
