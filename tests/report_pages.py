"""The four reports from small hand-made figures, for the tests of the page and of the browser."""

import base64
import json
import re
import zlib
from functools import cache

import torch
from bs4 import BeautifulSoup, NavigableString

from helpers import NAN, double
from spanwise.fidelity.page import fidelity_report
from spanwise.measure import compare_arms, voting
from spanwise.report import TokenView, compare_report, credit_report, train_report
from spanwise.rollouts.rows import TokenRow

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">'
RECIPE = {"task": "digits", "method": "bae", "baseline": "outcome", "steps": 2, "prompts": 4, "group_size": 2, "seed": 7}


def start():
    """Figures of an evaluation; the AUROC does not exist."""
    return {"accuracy": 0.25, "refusal_rate": 0.5, "format_rate": 0.75, "ece": 0.3125, "brier": 0.375, "auroc": None}


def batch(step):
    """A line of metrics of one training batch."""
    return {
        "step": step, "accuracy": 0.5, "ece": 0.2, "malformed": 0.125, "rewards/correct/mean": 0.5, "rewards/brier/mean": -0.25,
        "credit/solution/mean_abs": 0.25, "credit/solution/zero_frac": 0.5, "credit/correct/singletons": 0.0,
        "credit/brier/singletons": 0.125, "credit/correct/reward_absent": 0.0, "credit/brier/reward_absent": None,
        "frac_reward_zero_std": 0.5, "credit/no_signal": 0.0, "entropy": 0.75,
    }  # fmt: skip


def train_page(**changes):
    """A run of two steps, with samples, votes and one completion."""
    prompt_n = torch.arange(8) // 4
    confidence_n, correct_n = double([0.75, 0.75, 0.25, 1.0, 0.75, 0.25, NAN, 0.5]), double([1, 0, 0, 1, 1, 0, 0, 1])
    votes = voting(list("abcaaabb"), confidence_n, correct_n, prompts=prompt_n.tolist(), resamples=20)
    final = {"step": 2, "final": start() | {"accuracy": 0.875}}
    options = {
        "recipe": RECIPE, "metrics": [{"step": 0, "evaluation": start()}, batch(1), batch(2), final],
        "summary": {"seconds": 12.0, "spanwise_share": 0.015}, "samples": {"confidence": confidence_n, "correct": correct_n},
        "votes": {"solution": votes}, "view": view(1),
    }  # fmt: skip
    return train_report(**{**options, **changes})


@cache
def compare_page():
    """Two arms over three seeds; one figure is missing in one seed."""
    runs = {
        "blended": {0: {"ece": 0.0625, "accuracy": 0.75}, 1: {"ece": 0.07, "accuracy": None}, 2: {"ece": 0.06, "accuracy": 0.5}},
        "outcome": {0: {"ece": 0.125, "accuracy": 0.75}, 1: {"ece": 0.13, "accuracy": 0.5}, 2: {"ece": 0.12, "accuracy": 0.25}},
        "never": {0: {"ece": None, "accuracy": 0.5}},
    }  # fmt: skip
    points = {seed: [{"step": 0, "ece": 0.5, "accuracy": 0.1}, {"step": 9, "ece": 0.25 - 0.01 * seed}] for seed in range(3)}
    curves = {"blended": points, "outcome": points}
    return compare_report(title="Two arms", recipe=RECIPE, comparison=compare_arms(runs), curves=curves)


@cache
def fidelity_page():
    """Two baselines at two group sizes."""

    def around(value):
        return {"value": value, "low": value - 0.0625, "high": value + 0.0625}

    figures = [
        {"baseline": name, "group_size": size, "figure": figure, **around(value)}
        for name, value in (("group", 0.5), ("blended", 0.8125))
        for size in (4, 16)
        for figure in ("rmse", "correlation", "ceiling")
    ]
    differences = [{"a": "blended", "b": "group", "group_size": 4, "figure": "correlation", **around(0.3125)}]
    points = [
        {"baseline": name, "group_size": 4, "p": p, "q": p + off, "error": error}
        for name, off, error in (("group", 0.0, None), ("blended", 0.001, 0.004))
        for p in (0.1, 0.5, 0.9)
    ]
    tokens = [{"critic": "critic after 5 steps", "estimator": "SAE", "value": 0.4375, "low": 0.375, "high": 0.5}]
    counts = {"completions": 64, "prompts": 8, "rerolls": 512, "prefixes": 16, "share": 0.984375}
    measured = {"figures": figures, "differences": differences, "points": points, "tokens": tokens}
    return fidelity_report(source="runs/bae", recipe=RECIPE, counts=counts, **measured)


def credit_page(completions=4, tokens=6, *, text="x", source="rollouts.parquet", stop=None):
    """Two methods over some completions; one reward in four is absent, one in four failed; `stop` is the second method's."""
    n, quarter = torch.arange(completions), completions // 4
    blocks = {"solution": (n % 3).double() - 1, "confidence": torch.where(n % 4 == 3, NAN, 0.25 * (n % 2))}
    bae = blocks if stop is None else {**blocks, "stop": stop.masked_fill(stop == 0, NAN)}
    never_n = torch.full((completions,), NAN, dtype=torch.float64)
    statuses = {"ok": completions - 2 * quarter, "absent": quarter, "timeout": quarter}
    return credit_report(
        source=source, note="The file holds no token ids.", methods=["grpo", "bae"],
        credit={"grpo": {"all": (n % 2).double() - 0.5}, "bae": bae},
        rewards={"correct": torch.where(n % 4 >= 2, NAN, (n % 2).double()), "never": never_n},
        statuses={"correct": statuses, "never": {"absent": completions}},
        dead={"grpo": {"correct": 0.375}, "bae": {"correct": 0.375, "never": 1.0}}, view=view(completions, tokens, text),
    )  # fmt: skip


def view(completions, tokens=6, text="x"):
    """Completions whose tokens say `text`, each with its number."""

    def row(number):
        half = tokens // 2
        credit = {"grpo": [0.5 - number % 2] * tokens, "bae": [0.25 * (number % 5)] * half + [-0.125] * (tokens - half)}
        words = [f"{text}{number * 7 % 50}.{t % 400} " for t in range(tokens)]
        return token_row(
            words, prompt=f"prompt {number // 4} {text}", advantages=credit, step=number // 64,
            spans={"solution": [(0, half)], "confidence": [(half, tokens)]},
            values={"": [0.001 * (t % 100) for t in range(tokens)]}, probabilities=[0.5] * tokens,
        )  # fmt: skip

    return TokenView(("grpo", "bae"), [row(number) for number in range(completions)])


def token_row(tokens, a=None, b=None, **changes):
    """One plain completion under methods a and b."""
    size = len(tokens)
    fields = {
        "prompt": "1+1=", "tokens": tokens, "advantages": {"a": a or [0.5] * size, "b": b or [0.0] * size},
        "spans": {"solution": [(0, size)]}, "rewards": {"correct": 1.0}, "statuses": {"correct": "ok"}, "fault": "",
    }  # fmt: skip
    return TokenRow(**{**fields, **changes})


def data_of(html, view=None):
    """Return the decompressed JSON of a token view, by default of the only one on the page."""
    packed = re.findall(r'<script type="application/json" class="token-data">(.*?)</script>', html, re.S)
    assert view is not None or len(packed) == 1
    return json.loads(zlib.decompress(base64.b64decode(json.loads(packed[view or 0])["deflate"])))


def decoded(column, n):
    """Decode the n-th text of a column of the token view slowly, from the description of the format alone."""
    if column is None or column["codes"][n] is None:
        return None
    points = [ord(character) for character in column["codes"][n]]
    assert not any(0xD800 <= point <= 0xDFFF for point in points)
    return [column["words"][point - 32 - (2048 if point > 0xDFFF else 0)] for point in points]


class Page:
    """What an HTML parser sees: elements, scripts, texts, cells of tables."""

    def __init__(self, html):
        soup = BeautifulSoup(html, "html.parser", multi_valued_attributes=None)
        self.elements = [(tag.name, tag.attrs) for tag in soup.find_all(True)]
        self.scripts = [(tag.attrs, tag.string or "") for tag in soup.find_all("script")]
        for term in soup.find_all(class_="term"):  # a term of the glossary stands inside a text and does not end it
            term.unwrap()
        soup.smooth()
        # Scripts, styles and the declaration of the type are of other classes.
        self.texts = [text.strip() for text in soup.find_all(string=True) if type(text) is NavigableString]
        self.cells = [[cell.get_text() for cell in row.find_all(["td", "th"])] for row in soup.find_all("tr")]

    @property
    def text(self):
        return " ".join(text for text in self.texts if text)

    @property
    def specs(self):
        return [json.loads(text) for attributes, text in self.scripts if (attributes.get("id") or "").startswith("spec-")]

    def headline(self, label):
        return self.texts[self.texts.index(label) + 1]
