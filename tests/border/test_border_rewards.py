"""Rewards, outcomes and layouts that cannot work, or that do something else than their author thinks."""

import time

import numpy as np
import pytest
import torch

from border.case import Case, check, command
from rollout_files import WELL_FORMED, trl_file
from spanwise import Layout, Objective, Scheme, score_all
from spanwise.score import custom
from trl_small import THIRD_PARTY, trainer

pytestmark = [*THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
SOLVED = Objective("correct", pays="solution")
WHOLE = {"solution": {"": "4", "answer": "4"}, "confidence": {"": "0.9", "confidence": "0.9"}}
SILENT = {**WHOLE, "confidence": None}


def scored(reward, *, text=(WHOLE, WHOLE), **fields):
    """A scheme with one reward of the user's, and what it makes of some completions."""
    objectives = [Objective(reward, **{"pays": "solution", **fields})]
    Scheme("bae", LAYOUT, objectives)
    score_all(objectives, list(text), columns={"answer": ["4"] * len(text)})


def given(outcome, size=2):
    """A scheme whose confidence is compared given the outcome, and what it makes of some completions."""
    objectives = [SOLVED, Objective("brier", pays="confidence", given=["correct", outcome], baseline="outcome")]
    Scheme("bae", LAYOUT, objectives)
    score_all(objectives, [WHOLE] * size, columns={"answer": ["4"] * size})


def returning(value):
    def mine(blocks):
        return value

    return mine


def trained(folder, *objectives):
    """One step of the real trainer on eight completions, the sixth of which states no confidence."""
    trainer(
        folder, extra={"objectives": [Objective("correct", pays="solution", options={"verify": "exact"}), *objectives]}
    ).train()


def minus_one_without_a_confidence(blocks):
    return [-1.0 if block["confidence"] is None else 0.5 for block in blocks]


def never(blocks):
    return [None for _ in blocks]


def fails(blocks, answer):
    gold = {"4": 1.0}
    return [gold[one] for one in answer]


def reads_what_is_not_there(blocks):
    return [float(block["confidence"]["confidence"]) for block in blocks]


class Judge:
    def __init__(self, weight):
        self.weight = weight


async def compute_score(data_source, solution_str, ground_truth):
    raise ConnectionError("no server")


def two_scores(data_source, solution_str, ground_truth):
    return {"score": 1.0, "form": 0.0}


def misnamed(block):
    return [1.0 for _ in block]


def short(blocks, limit=5):
    return [1.0 for _ in blocks]


def of_blocks(blocks):
    return [True for _ in blocks]


def seeds(blocks):
    torch.manual_seed(0)
    return [1.0 for _ in blocks]


def sleepy(folder):
    usual, custom.SLOW = custom.SLOW, 0.05
    try:
        scored(lambda blocks: time.sleep(0.3) or [1.0, 1.0], name="sleepy")
    finally:
        custom.SLOW = usual


def verdict(completions):
    return ["good" for _ in completions]


def recipe_with_words(folder):
    (folder / "recipe.yaml").write_text(
        "method: bae\nlayout: {solution: [reasoning, answer], confidence: [analysis, confidence]}\n"
        f"objectives:\n- {{reward: '{__name__}:verdict', pays: [solution]}}\n"
    )
    file = trl_file(folder / "completions.parquet", WELL_FORMED, other=[1.0] * len(WELL_FORMED))
    return command("credit", file, "--recipe", folder / "recipe.yaml", "--methods", "recipe")


CASES = [
    Case(
        'Objective("corect", pays="solution")',
        lambda folder: scored("corect"),
        "There is no reward 'corect'. Did you mean 'correct'? Known: ...",
    ),
    Case(
        'Objective("correct", pays="solutoin")',
        lambda folder: scored("correct", pays="solutoin"),
        "Objective 'correct' pays 'solutoin'. There is no block 'solutoin'. Did you mean 'solution'? Known: confidence, solution.",
    ),
    Case(
        'Objective("correct", pays="solution", weight="2")',
        lambda folder: scored("correct", weight="2"),
        "Objective 'correct' has weight: '2'; write a finite number.",
    ),
    Case(
        "A class as a reward, not an object of it",
        lambda folder: scored(Judge),
        "Objective 'Judge' has reward: <class ...Judge'>; write the name of a reward, or pass a function (an instance, if it is a "
        "class).",
    ),
    Case(
        "An `async def` reward that fails for every completion",
        lambda folder: scored(compute_score),
        "Objective 'compute_score': its reward function failed for all 2 completions. The first says: ConnectionError: no server. "
        "It happened in ...test_border_rewards.py, line ...",
    ),
    Case(
        "A `key` of a function that returns a list",
        lambda folder: scored(of_blocks, key="format"),
        "Objective 'format' has key: format, but its function returns a list for the whole batch. A key goes with a function for "
        "one completion, such as verl's compute_score; leave it out.",
    ),
    Case(
        "A `key` that the function does not return",
        lambda folder: scored(two_scores, key="from"),
        "Objective 'from': its reward function returned a dict; set key. There is no key 'from'. Did you mean 'form'? "
        "Known: form, score.",
    ),
    Case(
        "A function in verl's signature without the right answer",
        lambda folder: score_all([Objective(two_scores, pays="solution")], [WHOLE], columns={}),
        "A function in verl's signature needs the right answer, and the dataset has no column ground_truth, "
        "reward_model.ground_truth, reward_spec.ground_truth, answer or reward_model with a ground_truth; its columns are none.",
    ),
    Case(
        "`timeout` of a function that is not async",
        lambda folder: scored(two_scores, options={"timeout": 5}),
        "Objective 'two_scores' has timeout: 5, but its function is not async, so it runs for one completion after another and "
        "nothing stops it. Leave timeout out, or write `async def`.",
    ),
    Case(
        'Layout({"solution": ["answer"]}, segmenter="tag")',
        lambda folder: Layout({"solution": ["answer"]}, segmenter="tag"),
        "There is no segmenter 'tag'. Did you mean 'tags'? Known: ...",
    ),
    Case(
        'Scheme("bae", {"solution": ["answer"]}, objectives)',
        lambda folder: Scheme("bae", {"solution": ["answer"]}, [SOLVED]),
        "The layout is {'solution': ['answer']}; write Layout({'solution': ['answer'], 'confidence': ['confidence']}).",
    ),
    Case(
        "One objective in the place of a list",
        lambda folder: Scheme("bae", LAYOUT, SOLVED),
        "The objectives are a list of Objective(...), such as [Objective('correct', pays='solution')]; there is Objective(...",
    ),
    Case(
        "An option that the reward function has no parameter for",
        lambda folder: scored(short, options={"limt": 9}),
        "Objective 'short' has the option 'limt', but its reward function has no such parameter; it has blocks, limit.",
    ),
    Case(
        "A reward function with a parameter that is no column",
        lambda folder: scored(misnamed),
        "Objective 'misnamed' needs the column 'block'; the dataset has answer. Did you mean 'blocks'?...",
    ),
    Case(
        "A reward function that raises",
        lambda folder: trained(folder, Objective(fails, pays="solution")),
        "Objective 'fails': its reward function raised KeyError: '3'. Return None for a completion that has no reward. It happened "
        "in ...test_border_rewards.py, line ...",
    ),
    Case(
        "A reward function that reads a block which a completion left out",
        lambda folder: scored(reads_what_is_not_there, text=[WHOLE, SILENT]),
        "raised TypeError: 'NoneType' object is not subscriptable...A block or a tag that a completion lacks is None...",
    ),
    Case(
        "A reward function that sleeps for minutes",
        sleepy,
        "Objective 'sleepy': its reward function has been running for ... s on 2 completions. Nothing stops it; ...",
    ),
    Case(
        "A reward function that returns one text",
        lambda folder: scored(returning("good")),
        "Objective 'mine': its reward function returned str; return a list of 2 numbers.",
    ),
    Case(
        "A reward function of a recipe that returns words",
        recipe_with_words,
        "Error: Objective 'verdict' gives completion 0 of ... the reward 'good'; return a finite number, or None for no reward.",
    ),
    Case(
        "A reward function that returns numbers as text",
        lambda folder: scored(returning(["1.0", "0.0"])),
        "Objective 'mine' gives completion 0 of 2 the reward '1.0'; return a finite number, or None for no reward.",
    ),
    Case(
        "A reward function that returns an array of the shape (N, 1)",
        lambda folder: scored(returning(np.ones((2, 1)))),
        "Objective 'mine': its reward function returned an array of the shape (2, 1); return one number per completion, an array "
        "of the shape (2,).",
    ),
    Case(
        "A reward function that returns the mean of the batch",
        lambda folder: scored(returning(torch.tensor(0.5))),
        "Objective 'mine': its reward function returned float; return a list of 2 numbers.",
    ),
    Case(
        "A reward function that returns a dict, one entry per completion",
        lambda folder: scored(returning({0: 1.0, 1: 0.0})),
        "Objective 'mine': its reward function returned dict; return a list of 2 numbers.",
    ),
    Case(
        "A reward function that yields",
        lambda folder: scored(returning(value for value in (1.0, 0.0))),
        "Objective 'mine': its reward function returned generator; return a list of 2 numbers.",
    ),
    Case(
        "A reward function that returns too few",
        lambda folder: scored(returning([1.0])),
        "Objective 'mine': its reward function returned 1 numbers for 2 completions.",
    ),
    Case(
        "A reward function that returns NaN",
        lambda folder: scored(returning([1.0, float("nan")])),
        "Objective 'mine' gives completion 1 of 2 the reward nan; return a finite number, or None for no reward.",
    ),
    Case(
        "A reward function that returns 1e308",
        lambda folder: scored(returning([1.0, 1e308])),
        "Objective 'mine' gives completion 1 of 2 the reward 1e+308; beyond 1e+30 credit overflows. Return a smaller number, or "
        "None for no reward.",
    ),
    Case(
        "A reward function that returns a tensor on the device meta",
        lambda folder: scored(returning(torch.ones(2, device="meta"))),
        "Objective 'mine': its reward function returned a tensor on the device meta, which holds no numbers; return a list of 2.",
    ),
    Case(
        "A reward function that sets a seed, the default dtype, gradients or the working directory",
        lambda folder: scored(seeds),
        "Objective 'seeds': its reward function changed torch's seed (0) for the whole process; it is put back after each call. "
        "Leave that to your script, or use a generator of your own (random.Random, torch.Generator).",
    ),
    Case(
        "A reward function that returns -1.0 where the block is left out",
        lambda folder: trained(folder, Objective(minus_one_without_a_confidence, pays="confidence", name="mine")),
        "Objective 'mine': its reward function returned -1 for 1 of 8 completions without confidence (completion 5 first). "
        "That is ignored: a missing block has no reward and costs nothing. To make it count, write if_missing=-1.",
    ),
    Case(
        "The same with if_missing=0.0",
        lambda folder: trained(
            folder, Objective(minus_one_without_a_confidence, pays="confidence", name="mine", if_missing=0.0)
        ),
        "Objective 'mine': its reward function returned -1 for 1 of 8 completions without confidence (completion 5 first). "
        "That is ignored: a missing block counts as its if_missing, 0. To make it count, write if_missing=-1.",
    ),
    Case(
        "A reward function that returns None for every completion",
        lambda folder: trained(folder, Objective(never, pays="solution")),
        "Objective 'never' has no reward for any of 8 completions (8 absent), so it trains nothing. ...",
    ),
    Case(
        "An outcome function of other parameters",
        lambda folder: given(of_blocks),
        "The outcome '...of_blocks' cannot be called as f(text, columns=columns): ... Write it as def f(text, *, columns).",
    ),
    Case(
        "An outcome function that returns a number of tokens",
        lambda folder: given(lambda text, columns: list(range(len(text))), size=20),
        "The outcome '...' took 20 different values in one batch: an outcome must be discrete. Condition on a 0/1 reward such as "
        "'correct', or use baseline: group.",
    ),
    Case(
        "An outcome function that returns lists",
        lambda folder: given(lambda text, columns: [[1] for _ in text]),
        "Outcome '...' of completion 0 is [1]; return a bool, a finite number below 2**52, a string, or None where it is unknown.",
    ),
    Case(
        'given: "brier", a score that is different in every completion',
        lambda folder: Scheme(
            "bae",
            LAYOUT,
            [
                SOLVED,
                Objective("brier", pays="confidence"),
                Objective("format", pays="confidence", given="brier", baseline="outcome"),
            ],
        ),
        "Objective 'format' is given 'brier', a score that hardly two completions share, so that none would have its like. Give it "
        "the outcome behind that score, 'correct', or use baseline: group.",
    ),
    Case(
        'given: "corect"',
        lambda folder: given("corect"),
        "Objective 'brier' is given 'corect', which is not an objective before it; those are: correct. Put 'corect' first, or "
        "correct the name; ...",
    ),
]

test = check(CASES)
