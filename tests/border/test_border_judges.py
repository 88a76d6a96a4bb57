"""Judges that cannot answer, or that are asked something else than their author thinks."""

import os
from pathlib import Path

import pytest
from aiohttp import web

from border.case import Case, check
from judge_server import Server, reply, verdict
from spanwise import Layout, Objective, Scheme, score_all

pytestmark = pytest.mark.usefixtures("unchecked_shapes")

LAYOUT = Layout({"plan": ["plan"], "answer": ["answer"]})
TEXT = [{"plan": {"": f"plan {n}", "plan": "x"}, "answer": {"": "4", "answer": "4"}} for n in range(3)]


def asked(answer=lambda *_: verdict("yes"), text=TEXT, times=1, **options):
    """A scheme with a judge of the plan, and the verdicts of a server on some completions."""
    with Server(answer).serving() as server:
        for change in [{}] * times if isinstance(times, int) else times:
            named = {"model": "small", "base_url": server.url, **options, **change}
            objective = Objective(
                "judge", pays="plan", options={key: value for key, value in named.items() if value is not None}
            )
            Scheme.preset("bae", LAYOUT, objectives=[objective])
            score_all([objective], text, columns={"prompt": ["2+2"] * len(text)})


def without_a_key(folder):
    key = os.environ.pop("OPENAI_API_KEY", None)
    try:
        asked(base_url=None)
    finally:
        os.environ.update({} if key is None else {"OPENAI_API_KEY": key})


def unknown_model(*_):
    return web.json_response({"error": {"message": "The model `small` does not exist."}}, status=404)


def rubric(criteria, written=None, **fields):
    """A scheme with a judge by a rubric, whose file or list it is."""
    if written is not None:
        (Path.cwd() / "rubric.yaml").write_text(written)
    options = {"model": "small", "base_url": "http://127.0.0.1:9/v1"}
    fields = {"reward": "judge", "name": "rubric", "criteria": criteria, "options": options, **fields}
    return Scheme.preset("bae", LAYOUT, objectives=[Objective(**fields)])


def by_column(cell, column="rubric"):
    scheme = rubric("rubric", pays="*")
    score_all(scheme.objectives, TEXT, columns={column: [cell] * len(TEXT)})


def not_a_cache(folder):
    (folder / "judge.sqlite").write_text("verdicts, written by hand, and long enough to be read as a page" * 20)
    asked(cache="judge.sqlite")


CASES = [
    Case(
        "A judge without a model",
        lambda folder: asked(model=None),
        "The reward 'judge' asks no model; name it as the server does: options: {model: NAME, base_url: URL}.",
    ),
    Case(
        "A judge of OpenAI's without a key",
        without_a_key,
        "The judge has no key: set the environment variable OPENAI_API_KEY, or name another with key: NAME. A server of your own "
        "needs none: set base_url.",
    ),
    Case(
        "A model that the server does not know",
        lambda folder: asked(unknown_model),
        "The judge 'small' at http://127.0.0.1:.../v1 refuses: The model `small` does not exist. Look at model, base_url and key.",
    ),
    Case(
        "A server that is not there",
        lambda folder: asked(base_url="http://127.0.0.1:9/v1", retries=0),
        "The judge's server http://127.0.0.1:9/v1 does not answer (...). Start it, or correct base_url.",
    ),
    Case(
        "A judge that answers nothing at all",
        lambda folder: asked(lambda *_: reply("")),
        "The judge failed for all 3 questions. The first: the judge answered '', and none of no, yes.",
    ),
    Case(
        "A template that names a column which is not there",
        lambda folder: asked(prompt="{{ part }} of {{ promt }}"),
        "The judge's prompt: There is no column 'promt'. Did you mean 'prompt'? Known: ...",
    ),
    Case(
        "A template that shows nothing of the completion",
        lambda folder: asked(prompt="{{ criterion }}"),
        "The judge's prompt shows it nothing of the completion; write {{ part }} or {{ completion }} in it.",
    ),
    Case(
        "A template that is none",
        lambda folder: asked(prompt="{{ part "),
        "The judge's prompt is no template: unexpected end of template, ...",
    ),
    Case(
        "A prompt file that is not there",
        lambda folder: asked(prompt="judge.txt"),
        "The judge's prompt 'judge.txt' cannot be read: No such file or directory. Name a text file, or write a template with "
        "{{ part }} in it.",
    ),
    Case(
        "Choices without numbers",
        lambda folder: asked(choices={"bad": "low", "good": "high"}),
        "The judge's choices are {'bad': 'low', 'good': 'high'}; write two or more words with their numbers: {no: 0, yes: 1}.",
    ),
    Case(
        "`choices: {no: 0, yes: 1}` in YAML, which reads the words as true and false",
        lambda folder: asked(choices={False: 0, True: 1}),
        "The judge's choices are [False, True]; write different words, in quotes where YAML reads no or yes.",
    ),
    Case(
        "A cache of another prompt",
        lambda folder: asked(cache="judge.sqlite", times=[{}, {"criterion": "Is it short?"}]),
        "The judge's cache 'judge.sqlite' holds 3 verdicts, all of another prompt, model or choices, so that every question is "
        "asked anew. If that is not what you meant, set back what you changed.",
    ),
    Case(
        "A file that is no cache",
        not_a_cache,
        "The judge's cache 'judge.sqlite' is no cache of verdicts: file is not a database. Name another file.",
    ),
    Case(
        "`max_concurrent: 0`",
        lambda folder: asked(max_concurrent=0),
        "The judge's option 'max_concurrent' is 0; write a whole number of at least 1.",
    ),
    Case(
        "`only` with an objective that is not there",
        lambda folder: rubric(["It is short."], pays="plan", only="correct"),
        "Objective 'rubric.1' has only: correct, which is not an objective before it; those are: none.",
    ),
    Case(
        "`only` under a method that adds all rewards up",
        lambda folder: Scheme.preset(
            "grpo",
            LAYOUT,
            objectives=[Objective("correct", pays="answer"), Objective("format", pays="answer", only="correct")],
        ),
        "Objective 'format' has only: correct, but method 'grpo' adds all rewards up, so that a completion without this one would "
        "get nothing at all. Leave it out, or use method 'bae'.",
    ),
    Case(
        "A judge that is to locate its verdict with one word",
        lambda folder: asked(locate=True, constrain="choice"),
        "The judge can locate a verdict only in a reply of several fields; leave constrain: choice out.",
    ),
    Case(
        "A judge that locates its verdict nowhere",
        lambda folder: asked(lambda *_: verdict("yes"), locate=True),
        'The judge failed for all 3 questions. The first: the judge answered \'{"reason": "it says so", "verdict": "yes"}\', '
        "with none of the parts plan.",
    ),
    Case(
        "A rubric that is about a part which is not there",
        lambda folder: rubric([{"text": "It is short.", "part": "anser"}]),
        "Criterion '1' of the rubric of objective 'rubric' is about 'anser'. There is no block 'anser'. Did you mean 'answer'? "
        "Known: answer, plan.",
    ),
    Case(
        "Two criteria of one name",
        lambda folder: rubric("rubric.yaml", "[{name: a, text: It is.}, {name: a, text: It is not.}]", pays="plan"),
        "The rubric 'rubric.yaml' has two criteria called 'a'; give one of them another name.",
    ),
    Case(
        "A rubric's file that is not there",
        lambda folder: rubric("rubrik.yaml", pays="plan"),
        "The rubric 'rubrik.yaml' cannot be read: No such file or directory. Write a list of criteria: [{text: 'It names a "
        "figure.', weight: 1, part: plan}].",
    ),
    Case(
        "A rubric with a question that is not in quotes",
        lambda folder: rubric("rubric.yaml", "- {text: Is it short?, part: plan}"),
        "The rubric 'rubric.yaml' is not valid YAML in line 1. Put the texts in quotes: [{text: 'It names a figure.', weight: 1, "
        "part: plan}].",
    ),
    Case(
        "A criterion that pays nothing",
        lambda folder: rubric(["It is short."]),
        "Criterion '1' of the rubric of objective 'rubric' names no part, and its objective pays no block; write part: NAME or "
        "pays: [NAME].",
    ),
    Case(
        "A criterion without text",
        lambda folder: rubric([{"weight": 2}], pays="plan"),
        "Criterion 1 of the rubric of objective 'rubric' has no text; write {text: 'It names a figure.', weight: 1, part: plan}.",
    ),
    Case(
        "A criterion's weight in words",
        lambda folder: rubric([{"text": "It is short.", "weight": "high"}], pays="plan"),
        "Criterion 1 of the rubric of objective 'rubric' has the weight 'high'; write a finite number.",
    ),
    Case(
        "A rubric for a reward that sees none",
        lambda folder: rubric(["It is short."], reward="correct", options={}, pays="answer"),
        "Objective 'rubric' has criteria, which its reward would not see: use judge, or a function with a parameter 'criterion'.",
    ),
    Case(
        "A rubric beside a criterion",
        lambda folder: rubric(["It is short."], pays="plan", options={"model": "small", "criterion": "It is long."}),
        "Objective 'rubric' has criteria and the option 'criterion' too; write one of them.",
    ),
    Case(
        "A column of rubrics that pays nothing",
        lambda folder: rubric("rubric"),
        "Objective 'rubric' pays no block; name at least one in 'pays'.",
    ),
    Case(
        "A rubric by part for each step",
        lambda folder: rubric([{"text": "It is short.", "part": "plan"}], each="*"),
        "Criterion '1' of the rubric of objective 'rubric' is about 'plan', but its objective is for each '*'; leave one "
        "of them out.",
    ),
    Case(
        "A column of rubrics that is not there",
        lambda folder: by_column([], column="rubrics"),
        "The judge's rubric: There is no column 'rubric'. Did you mean 'rubrics'? Known: rubrics.",
    ),
    Case(
        "A prompt's rubric about a part which is not there",
        lambda folder: by_column([{"text": "It is short.", "part": "plans"}]),
        "Criterion 1 of the rubric of completion 0 is about 'plans'. There is no block 'plans'. Did you mean 'plan'? Known: "
        "answer, plan.",
    ),
    Case(
        "A prompt's rubric that is no list",
        lambda folder: by_column("It is short."),
        "The rubric of completion 0 is no JSON: Expecting value: line 1 column 1 (char 0). Write a list of criteria: [{text: "
        "'It names a figure.', weight: 1, part: plan}].",
    ),
]
test = check(CASES)
