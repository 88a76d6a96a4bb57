"""Judges that cannot answer, or that are asked something else than their author thinks."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from aiohttp import web

from border.case import case, check
from judge_server import Server, reply, verdict
from spanwise import Layout, Objective, Scheme, score_all

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

LAYOUT = Layout({"plan": ["plan"], "answer": ["answer"]})
TEXT = [{"plan": {"": f"plan {n}", "plan": "x"}, "answer": {"": "4", "answer": "4"}} for n in range(3)]


@case
def asked(answer=lambda *_: verdict("yes"), text=TEXT, times=1, **options):
    """A scheme with a judge of the plan, and the verdicts of a server on some completions."""
    with Server(answer).serving() as server:
        for change in [{}] * times if isinstance(times, int) else times:
            named = {"model": "small", "base_url": server.url, **options, **change}
            given = {key: value for key, value in named.items() if value is not None}
            objective = Objective("judge", pays="plan", options=given)
            Scheme.preset("bae", LAYOUT, objectives=[objective])
            score_all([objective], text, columns={"prompt": ["2+2"] * len(text)})


def without_a_key(folder):
    with patch.dict(os.environ):
        os.environ.pop("OPENAI_API_KEY", None)
        asked(base_url=None)(folder)


def unsupported(*_):
    """What OpenAI answers for its reasoning models."""
    message = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    error = {"message": message, "type": "invalid_request_error", "param": "max_tokens", "code": "unsupported_parameter"}
    return web.json_response({"error": error}, status=400)


@case
def rubric(criteria, written=None, **fields):
    """A scheme with a judge by a rubric, whose file or list it is."""
    if written is not None:
        Path("rubric.yaml").write_text(written)
    options = {"model": "small", "base_url": "http://127.0.0.1:9/v1"}
    fields = {"reward": "judge", "name": "rubric", "criteria": criteria, "options": options, **fields}
    return Scheme.preset("bae", LAYOUT, objectives=[Objective(**fields)])


@case
def by_column(cell, column="rubric"):
    scheme = rubric("rubric", pays="*")(None)
    score_all(scheme.objectives, TEXT, columns={column: [cell] * len(TEXT)})


def not_a_cache(folder):
    (folder / "judge.sqlite").write_text("verdicts, written by hand, and long enough to be read as a page" * 20)
    asked(cache="judge.sqlite")(folder)


CASES = {
    "A judge without a model": asked(model=None),
    "A judge of OpenAI's without a key": without_a_key,
    "A judge whose `key` names a variable that is not set": asked(key="MY_KY"),
    "A judge whose `key` is the key itself": asked(key="sk-4f6a"),
    "`key: null`": lambda folder: rubric(["It is short."], pays="plan", options={"model": "small", "key": None})(folder),
    "A model that the server does not know": asked(
        lambda *_: web.json_response({"error": {"message": "The model `small` does not exist."}}, status=404)
    ),
    "A model that takes no `max_tokens`": asked(unsupported, TEXT[:1]),
    "A server that is not there": asked(base_url="http://127.0.0.1:9/v1", retries=0),
    "A judge that answers nothing at all": asked(lambda *_: reply("")),
    "A judge that chooses two words": asked(lambda *_: reply("Verdict: yes, not no"), constrain="none"),
    "A template that names a column which is not there": asked(prompt="{{ part }} of {{ promt }}"),
    "A template that shows nothing of the completion": asked(prompt="{{ criterion }}"),
    "A template that is none": asked(prompt="{{ part "),
    "A prompt file that is not there": asked(prompt="judge.txt"),
    "Choices without numbers": asked(choices={"bad": "low", "good": "high"}),
    "`choices: {no: 0, yes: 1}` in YAML, which reads the words as true and false": asked(choices={False: 0, True: 1}),
    "A cache of another prompt": asked(cache="judge.sqlite", times=[{}, {"criterion": "Is it short?"}]),
    "A file that is no cache": not_a_cache,
    "`max_concurrent: 0`": asked(max_concurrent=0),
    "`only` with an objective that is not there": rubric(["It is short."], pays="plan", only="correct"),
    "`only` under a method that adds all rewards up": lambda folder: Scheme.preset(
        "grpo", LAYOUT, objectives=[Objective("correct", pays="answer"), Objective("format", pays="answer", only="correct")]
    ),
    "A judge that is to locate its verdict with one word": asked(locate=True, constrain="choice"),
    "A judge that locates its verdict nowhere": asked(lambda *_: verdict("yes"), locate=True),
    "A rubric that is about a part which is not there": rubric([{"text": "It is short.", "part": "anser"}]),
    "Two criteria of one name": rubric("rubric.yaml", "[{name: a, text: It is.}, {name: a, text: It is not.}]", pays="plan"),
    "A rubric's file that is not there": rubric("rubrik.yaml", pays="plan"),
    "A rubric with a question that is not in quotes": rubric("rubric.yaml", "- {text: Is it short?, part: plan}"),
    "A criterion that pays nothing": rubric(["It is short."]),
    "A criterion without text": rubric([{"weight": 2}], pays="plan"),
    "A criterion's weight in words": rubric([{"text": "It is short.", "weight": "high"}], pays="plan"),
    "A rubric for a reward that sees none": rubric(["It is short."], reward="correct", options={}, pays="answer"),
    "A rubric beside a criterion": rubric(["It is short."], pays="plan", options={"model": "m", "criterion": "It is long."}),
    "A column of rubrics that pays nothing": rubric("rubric"),
    "A rubric by part for each step": rubric([{"text": "It is short.", "part": "plan"}], each="*"),
    "A column of rubrics that is not there": by_column([], column="rubrics"),
    "A prompt's rubric about a part which is not there": by_column([{"text": "It is short.", "part": "plans"}]),
    "A prompt's rubric that is no list": by_column("It is short."),
}
test = check(__doc__, CASES)
