"""Rewards, outcomes and layouts that cannot work, or that do something else than their author thinks."""

import time
from unittest.mock import patch

import numpy as np
import pytest
import torch

from border.case import case, check, command
from rollout_files import WELL_FORMED, trl_file
from spanwise import Layout, Objective, Scheme, score_all
from spanwise.score import Reward, custom
from trl_small import THIRD_PARTY, trainer

pytestmark = [*THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
SOLVED, REPORT = Objective("correct", pays="solution"), Objective("brier", pays="confidence")
WHOLE = {"solution": {"": "4", "answer": "4"}, "confidence": {"": "0.9", "confidence": "0.9"}}
SILENT = {**WHOLE, "confidence": None}
GOLDS = {"answer": ["4", "4"]}


def score(objectives, text, columns):
    """A scheme, and what it makes of some completions."""
    Scheme("bae", LAYOUT, objectives)
    score_all(objectives, list(text), columns=columns)


@case
def scored(reward, *, text=(WHOLE, WHOLE), columns=GOLDS, **fields):
    score([Objective(reward, **{"pays": "solution", **fields})], text, columns)


@case
def compare_given(outcome, size=2):
    report = Objective("brier", pays="confidence", given=["correct", outcome], baseline="outcome")
    score([SOLVED, report], [WHOLE] * size, {"answer": ["4"] * size})


def returned(value):
    return scored(lambda blocks: value, name="mine")


@case
def trained(folder, reward, **fields):
    """One step of the real trainer with one more reward; the sixth of eight completions states no confidence."""
    exact = Objective("correct", pays="solution", options={"verify": "exact"})
    trainer(folder, extra={"objectives": [exact, Objective(reward, **fields)]}).train()


def charged(**fields):
    """-1.0 where the confidence is left out."""
    paid = {"pays": "confidence", "name": "mine", **fields}
    return trained(lambda blocks: [-1.0 if block["confidence"] is None else 0.5 for block in blocks], **paid)


def fails(blocks, answer):
    gold = {"4": 1.0}
    return [gold[text] for text in answer]


async def compute_score(data_source, solution_str, ground_truth):
    raise ConnectionError("no server")


def two_scores(data_source, solution_str, ground_truth):
    return {"score": 1.0, "form": 0.0}


def of_blocks(blocks):
    return [True for _ in blocks]


def seeds(blocks):
    torch.manual_seed(0)
    return [1.0 for _ in blocks]


def sleepy(folder):
    with patch.object(custom, "SLOW", 0.05):
        scored(lambda blocks: time.sleep(0.3) or [1.0, 1.0], name="sleepy")(folder)


def verdict(completions):
    return ["good" for _ in completions]


def recipe_with_words(folder):
    layout = "{solution: [reasoning, answer], confidence: [analysis, confidence]}"
    rewards = f"[{{reward: '{__name__}:verdict', pays: [solution]}}]"
    (folder / "recipe.yaml").write_text(f"method: bae\nlayout: {layout}\nobjectives: {rewards}\n")
    file = trl_file(folder / "completions.parquet", WELL_FORMED, other=[1.0] * len(WELL_FORMED))
    return command("credit", file, "--recipe", folder / "recipe.yaml", "--methods", "recipe")


CASES = {
    'Objective("corect", pays="solution")': scored("corect"),
    'Objective("correct", pays="solutoin")': scored("correct", pays="solutoin"),
    'Objective("correct", pays="solution", weight="2")': scored("correct", weight="2"),
    "A class as a reward, not an object of it": scored(type("Judge", (), {})),
    "An `async def` reward that fails for every completion": scored(compute_score),
    "A `key` of a function that returns a list": scored(of_blocks, key="format"),
    "A `key` that the function does not return": scored(two_scores, key="from"),
    "A function in verl's signature without the right answer": scored(two_scores, columns={}),
    "A function in verifiers' signature without the right answer": scored(
        lambda completion, answer: 1.0, name="contains", columns={"question": ["2+2", "2+2"]}
    ),
    "`timeout` of a function that is not async": scored(two_scores, options={"timeout": 5}),
    "`timeout` of a function in TRL's signature": scored(
        lambda completions, **columns: [], name="of_trl", options={"timeout": 5}
    ),
    "A `block` of a function that sees the whole completion": scored(two_scores, options={"block": "solution"}),
    "`sees: part` of a block that the layout lacks": scored(two_scores, options={"sees": "part", "block": "solutoin"}),
    'Layout({"solution": ["answer"]}, segmenter="tag")': case(Layout)({"solution": ["answer"]}, segmenter="tag"),
    'Scheme("bae", {"solution": ["answer"]}, objectives)': case(Scheme)("bae", {"solution": ["answer"]}, [SOLVED]),
    "One objective in the place of a list": case(Scheme)("bae", LAYOUT, SOLVED),
    "An option that the reward function has no parameter for": scored(
        lambda blocks, limit=5: [1.0] * limit, name="short", options={"limt": 9}
    ),
    "A reward function with a parameter that is no column": scored(lambda block: block, name="misnamed"),
    "A reward function that raises": trained(fails, pays="solution"),
    "A reward function that reads a block which a completion left out": scored(
        lambda blocks: [block["confidence"]["confidence"] for block in blocks], text=[WHOLE, SILENT]
    ),
    "A reward function that sleeps for minutes": sleepy,
    "A reward function that returns one text": returned("good"),
    "A reward function of a recipe that returns words": recipe_with_words,
    "A reward function that returns numbers as text": returned(["1.0", "0.0"]),
    "A reward function that returns an array of the shape (N, 1)": returned(np.ones((2, 1))),
    "A reward function that returns the mean of the batch": returned(torch.tensor(0.5)),
    "A reward function that returns too few": returned([1.0]),
    "A reward function that returns NaN": returned([1.0, float("nan")]),
    "A reward function that returns 1e308": returned([1.0, 1e308]),
    "A reward function that returns a tensor on the device meta": returned(torch.ones(2, device="meta")),
    "A reward function that returns measured costs, which nobody named": returned(
        Reward.of([1.0, 1.0], measured=[[3.0], [3.0]])
    ),
    "A reward function that sets a seed, the default dtype, gradients or the working directory": scored(seeds),
    "A reward function that returns -1.0 where the block is left out": charged(),
    "The same with if_missing=0.0": charged(if_missing=0.0),
    "A reward function that returns None for every completion": trained(
        lambda blocks: [None for _ in blocks], pays="solution", name="never"
    ),
    "An outcome function of other parameters": compare_given(of_blocks),
    "An outcome function that returns a number of tokens": compare_given(lambda text, columns: [*range(20)], size=20),
    "An outcome function that returns lists": compare_given(lambda text, columns: [[1] for _ in text]),
    'given: "brier", a score that is different in every completion': case(Scheme)(
        "bae", LAYOUT, [SOLVED, REPORT, Objective("format", pays="confidence", given="brier", baseline="outcome")]
    ),
    'given: "corect"': compare_given("corect"),
}

test = check(__doc__, CASES)
