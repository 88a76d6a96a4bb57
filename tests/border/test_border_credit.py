"""`spanwise credit` on files with other tags, other rewards or other contents than it expects."""

import json
from pathlib import Path

from border.case import Case, check, command
from rollout_files import WELL_FORMED, trl_file, verl_file, verl_rows, write_lines

WRITTEN = Path(__file__).parents[1] / "rollouts" / "written"
CODE = [
    f"<plan>add</plan><code>{code}</code><confidence>{q}</confidence>"
    for code, q in zip("abcd", (0.9, 0.7, 0.8, 0.2), strict=True)
]
PAPER = ["layout={solution: [reasoning, answer], confidence: [analysis, confidence]}"]
BLOCKS = {"plan": ["plan"], "code": ["code"], "confidence": ["confidence"]}


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


CASES = [
    Case(
        "a verl dump whose completions are <plan> <code> <confidence>, no recipe",
        lambda folder: credited(WRITTEN / "verl", code=0),
        "recorded plan ... You gave no layout, and the usual layout does not fit the file. <reasoning> is in 0 and <answer> is "
        "in 0 and <analysis> is in 0 of 8 completions; they do contain <confidence> (7), <code> (8), <plan> (8). 7 of 8 "
        "completions consist of <plan> <code> <confidence>, in this order, so the blocks are plan, code, confidence; "
        "for other blocks, edit and give: --set ... "
        "recorded is no method: the file's 'score', from which nothing is subtracted, ... "
        "Rewards: score from the file, correct from the file's 'acc', brier from the text. No objective uses the file's format; "
        "--reward OBJECTIVE=COLUMN assigns one. "
        "The one number of a completion adds up rewards: grpo: score alone; rlcr: correct + brier.",
    ),
    Case(
        "the same file with the paper's layout",
        lambda folder: credited(WRITTEN / "verl", "--set", *PAPER, "--reward", "correct=text"),
        "Error: grpo and rlcr and bae cannot be applied to ...: <reasoning> is in 0 and <answer> is in 0 of 8 completions; they do "
        "contain <code> (8), <plan> (8), <confidence> (7). The file records score, acc, format. Give the layout "
        "that they were sampled with (most are made of "
        '{"plan": ["plan"], "code": ["code"], "confidence": ["confidence"]}), or credit whole completions with --methods grpo '
        "--reward correct=acc",
    ),
    Case(
        "a layout with one tag that nobody writes",
        lambda folder: credited(
            verl_file(folder / "1.jsonl", WELL_FORMED, acc=[1, 0, 1, 0]),
            "--set",
            "layout={solution: [think, answer], confidence: [confidence]}",
            code=0,
        ),
        "<think> is in 0 of 4 completions; they do contain <answer> (4), <confidence> (4). The layout asks for it.",
    ),
    Case(
        "answers in <think> alone, and a score from -1 to 1",
        lambda folder: credited(
            verl_file(folder / "1.jsonl", ["<think>so</think> 4"] * 2, score=[-1.0, 1.0], gts=["4"] * 2), code=0
        ),
        "the blocks are its tags. No column says which completions are right, so every recorded number is a reward: score. Choose "
        "with --pay completion=score.",
    ),
    Case(
        "a confidence judged by a score from -1 to 1",
        lambda folder: credited(
            verl_file(folder / "1.jsonl", CODE, score=[1, 1, -1, -1]), "--reward", "correct=score", "--methods", "bae"
        ),
        "Error: Objective 'correct' gives completion 2 the outcome -1.0; a confidence is judged by one in [0, 1].",
    ),
    Case(
        "no right answers, and no recorded reward that says right or wrong",
        lambda folder: credited(
            rows_without_answers(folder), "--set", "layout={solution: [answer], confidence: [confidence]}"
        ),
        "Error: Reward 'correct' needs gold answers, but ... has no column 'answer'. The file records acc, grade: take one "
        "with --reward correct=acc, or add the column.",
    ),
    Case(
        "TRL's completions with two reward functions, no recipe",
        lambda folder: credited(
            trl_file(folder / "a.parquet", WELL_FORMED, step=[1] * 4, form=[1.0] * 4, accuracy_reward=[1.0, 0.0, 0.0, 1.0]),
            code=0,
        ),
        "The one number of a completion adds up rewards: grpo: form + accuracy_reward; rlcr: correct + brier ...",
    ),
    Case(
        "`--reward correct=acc` where `acc` holds words",
        lambda folder: credited(
            verl_file(folder / "1.jsonl", CODE, acc=["good", "bad", "good", "bad"]), "--reward", "correct=acc"
        ),
        "Error: --reward correct=acc: that column of ... holds no numbers; it has 'good'.",
    ),
    Case(
        "a recipe whose reward cannot be imported",
        lambda folder: credited(
            verl_file(folder / "1.jsonl", CODE, acc=[1, 0, 1, 0]),
            *("--recipe", recipe(folder, objectives=[{"reward": "train_of_nobody:code_correct", "pays": ["code"]}])),
        ),
        "Error: Objective 1: the reward 'train_of_nobody:code_correct' cannot be imported: there is no module ...",
    ),
    Case(
        "a recipe for other tags than the file's",
        lambda folder: credited(trl_file(folder / "a.parquet", WELL_FORMED, acc=[1, 0, 1, 0]), "--recipe", recipe(folder)),
        "Error: bae cannot be applied to ...: <plan> is in 0 and <code> is in 0 of 4 completions; they do contain <answer> (4), "
        "<confidence> (4). The file records acc. Give the layout that they were sampled with (most are made of "
        '{"answer": ["answer"], "confidence": ["confidence"]}), or credit whole completions with --methods grpo '
        "--reward correct=acc",
    ),
    Case(
        "`--methods recorded` on a file that records no advantages, score or reward",
        lambda folder: credited(trl_file(folder / "a.parquet", WELL_FORMED, acc=[1, 0, 1, 0]), "--methods", "recorded"),
        "Error: ... records no advantages, score or reward, so there is nothing to show; leave 'recorded' out.",
    ),
    Case(
        "a CSV table whose columns say nothing to spanwise",
        lambda folder: credited(text(folder / "a.csv", "prompt,text,gold\n2+2=,4,4\n")),
        "Error: ... has the columns prompt, text, gold, which is no rollout format known here: none of them is called completion, "
        "response, output, completions or responses. Say which holds the completions: --columns completion=NAME, in Python "
        "columns={'completion': 'NAME'}. Known here: spanwise's rollouts ...",
    ),
    Case(
        "a CSV table with both `response` and `output`",
        lambda folder: credited(text(folder / "a.csv", "prompt,response,output\n2+2=,4,4\n")),
        "Error: ... has the columns response and output, and each may hold the completion. Choose one: --columns completion=NAME, "
        "in Python columns={'completion': 'NAME'}.",
    ),
    Case(
        "`--columns completoin=text`",
        lambda folder: credited(
            text(folder / "a.csv", "prompt,text,gold\n2+2=,4,4\n"), "--columns", "completoin=text,answer=gold"
        ),
        "Error: There is no role of --columns 'completoin'. Did you mean 'completion'? Known: answer, ...",
    ),
    Case(
        "a CSV table in which a completion is missing, and a reward",
        lambda folder: credited(
            text(folder / "a.csv", "prompt,completion,acc\nq,<answer>4</answer>,1\nq,<answer>5</answer>,0\nq,,1\nq,so,\n"),
            "--methods",
            "grpo",
            "--set",
            "layout={solution: [answer]}",
            code=0,
        ),
        "1 of 4 rows hold no completion and are left out. 1 of 3 recorded values of 'acc' are missing or not finite: unscored, so "
        "they join no baseline.",
    ),
    Case(
        "a CSV file in which a text with a comma stands in no quotes",
        lambda folder: credited(text(folder / "a.csv", "prompt,completion\n2+2=,4, I think\n")),
        "Error: ... cannot be read as CSV: ...xpected 2 columns, got 3...; text with a comma or a line break must stand in quotes.",
    ),
    Case(
        "a list of two completions beside a list of one reward",
        lambda folder: credited(
            text(folder / "a.json", json.dumps([{"prompt": "2+2=", "completions": ["4", "5"], "reward": [1.0]}]))
        ),
        "Error: Row 0 of ... has 2 completions and 1 values of 'reward'; give one for each, null where there is none.",
    ),
    Case(
        "an id of each row in `group_id`",
        lambda folder: credited(text(folder / "a.csv", "prompt,completion,group_id\n2+2=,4,0\n2+2=,5,1\n")),
        "Error: The column 'group_id' of ... has another value in each of 2 rows, and these have 1 prompts, so nothing would be "
        "compared. Say what the completions of one prompt share: --columns group=NAME, ..., such as group=prompt.",
    ),
    Case(
        "a verifiers file in which every rollout failed",
        lambda folder: credited(WRITTEN / "verifiers_failed"),
        "Error: ... holds no completions. 3 of 3 episodes hold no message that a trained model sampled. 3 of them failed with "
        "ModelError: connection refused.",
    ),
    Case(
        "completions that are all empty",
        lambda folder: credited(verl_file(folder / "1.jsonl", ["", ""], score=[0, 0])),
        "Error: None of the 2 completions of ... has any text.",
    ),
    Case(
        "conversations in which the user has the last word",
        lambda folder: credited(
            text(
                folder / "a.json",
                json.dumps([{"messages": [{"role": who, "content": "hm"} for who in ("user", "assistant", "user")]}]),
            )
        ),
        "Error: '...' holds no completions. What follows the last user message of 'messages' is the completion; what tools said in "
        "it is masked. 1 of 1 rows hold no completion and are left out.",
    ),
    Case(
        "a log of Inspect",
        lambda folder: credited(text(folder / "1.eval", "PK")),
        "is a log of Inspect, which its own package reads: pip install inspect_ai. Or write its samples as JSON lines, each with "
        "the prompt, the completion and its rewards as numbers.",
    ),
    Case(
        "a block of --pay that no completion has",
        lambda folder: credited(tagged(folder), "--pay", "drft=passed"),
        "Error: --pay drft=...: There is no block 'drft'. Did you mean 'draft'? Known: draft, final.",
    ),
    Case(
        "two blocks of --pay in completions without tags",
        lambda folder: credited(tagged(folder, "x", "y"), "--pay", "a=passed", "--pay", "b=passed"),
        "Error: --pay a=...: Most completions have no tags; give --set layout=...",
    ),
    Case(
        "a reward of --pay that is neither a column nor known",
        lambda folder: credited(tagged(folder), "--pay", "draft=pased"),
        "Error: Objective 1: There is no reward 'pased'. Did you mean 'passed'? Known: brier, correct, count, environment, equals, "
        "format, json_schema, judge, listed, log_score, near, one_of, overlong, passed, reward_model, runs, second_attempt.",
    ),
    Case(
        "--pay beside objectives",
        lambda folder: credited(tagged(folder), "--pay", "draft=passed", "--set", "objectives=[]"),
        "Error: Both --pay and --set objectives say who is paid; give one of them.",
    ),
    Case(
        "a method of one number beside a recipe with two rewards",
        lambda folder: credited(summed(folder), "--methods", "dr_grpo", "--recipe", folder / "mine.yaml", code=0),
        "The one number of a completion adds up rewards: dr_grpo: form + 4 acc.",
    ),
]


def summed(folder):
    rewards = [{"name": "form"}, {"name": "acc", "weight": 4.0}]
    objectives = [{"reward": "correct", "pays": ["solution"], **one} for one in rewards]
    recipe(folder, layout={"solution": ["answer"]}, objectives=objectives)
    rows = [{"prompt": "2+2=", "completion": f"<answer>{n}</answer>", "form": 1.0, "acc": n / 2} for n in (0, 1, 2)]
    return text(folder / "own.json", json.dumps(rows))


def text(path, content):
    path.write_text(content)
    return path


test = check(CASES)
