"""The reference says everything there is: names, fields, columns and log metrics of the code, none more and none less."""

import ast
import inspect
import re
from importlib import import_module

import pytest
import torch

import logged
import public_face
import reference_api
import reference_pages
import trl_critic_small
from docstrings import has_example
from pages import DOCS, ROOT
from reference_api import places, said_of
from spanwise import CriticConfig, Laser, Objective
from spanwise.cli import app
from spanwise.credit_metrics import CREDIT
from spanwise.measure import figures
from spanwise.modes import MODES
from spanwise.recipe import Recipe
from spanwise.rollouts import schema
from trl_small import THIRD_PARTY, scheme, trainer

API = DOCS / "reference" / "api"
SOURCE = ROOT / "src" / "spanwise"
pytestmark = THIRD_PARTY


@pytest.mark.parametrize("room", public_face.ROOMS)
def test_every_room_has_a_page_with_every_public_name_once(room):
    assert {page.stem for page in API.glob("spanwise*.md")} == set(public_face.ROOMS)
    assert f"```{{reference}} api {room}\n" in (API / f"{room}.md").read_text(encoding="utf-8")
    page = reference_api.api(room)
    for name in import_module(room).__all__:
        home, _ = places()[f"{room}.{name}"]
        headed = len(re.findall(rf"^## {re.escape(name)}$", page, re.MULTILINE))
        assert headed == (1 if home == f"{room}.{name}" else 0), name
        assert headed or f"`{name} <{home}>`" in page, name


#: Names without an example in the docstring, because they train or load a model: where they run instead.
ELSEWHERE = {
    "spanwise.engines.trl.SpanGRPOTrainer": "tests/engines/trl/test_trl_trainer.py",
    "spanwise.score.ask_judge": "tests/score/judges/test_judge.py",
    "spanwise.score.score_by_model": "tests/score/judges/test_reward_model.py",
    "spanwise.rollouts.Rollouts": "tests/engines/trl/test_trl_trainer.py",
    "spanwise.tasks.digits_task": "tests/tasks/test_tasks_warm_start.py",
    "spanwise.tasks.load_task": "tests/tasks/test_tasks_hub.py",
    "spanwise.tasks.warm_start": "tests/tasks/test_tasks_warm_start.py",
}


def test_every_public_name_says_what_it_is_and_functions_and_classes_show_an_example():
    public = dict(places().values())  # each once: where it is documented, and its object
    called = {name: member for name, member in public.items() if inspect.isclass(member) or inspect.isfunction(member)}
    assert [name for name, member in called.items() if not member.__doc__] == []
    assert [name for name in public.keys() - called.keys() if not said_of(name)] == []
    assert {name for name, member in called.items() if not has_example(member)} == set(ELSEWHERE)
    for name, file in ELSEWHERE.items():
        last = name.rsplit(".", 1)[1]
        used = {"Rollouts": "last_rollouts", "SpanGRPOTrainer": "trainer("}.get(last, last)
        assert used in (ROOT / file).read_text(encoding="utf-8"), name


def test_every_command_and_option_is_on_the_page():
    page = reference_pages.cli()
    for name in [name for name in app if not name.startswith("-")]:
        part = page.partition(f"## spanwise {name}\n")[2].partition("\n## ")[0]
        assert part, name
        assert re.search(rf"^\$ spanwise {name}( \[\w+\]| [A-Z]+)*$", part, re.MULTILINE), part[:200]
        for parameter in public_face.arguments_of(app[name].default_command):
            if parameter.kind is parameter.KEYWORD_ONLY:
                line = re.search(rf"^\* `--{parameter.name.strip('_').replace('_', '-')}\b.*$", part, re.MULTILINE)
                assert line, (name, parameter.name)
                if parameter.default not in (None, parameter.empty, ""):
                    assert f"default: {parameter.default}" in line[0], (name, parameter.name)


def rows(page):
    lines = (line.strip("|").split(" | ") for line in page.splitlines())
    return {cells[0].strip("` "): cells for cells in lines if len(cells) > 2}


def test_every_field_of_a_recipe_is_on_the_page_once_with_a_sentence():
    listed = [name for names in reference_pages.recipe_groups().values() for name in names]
    assert sorted(listed) == sorted([*Recipe.model_fields, *MODES])
    page = reference_pages.recipe()
    fields = rows(page.partition("## Fields of")[0])
    assert [name for name in fields if name != "field"] == listed
    assert [name for name, field in Recipe.model_fields.items() if not field.description] == []
    assert [name for name, mode in MODES.items() if not mode.about] == []
    # Values are shown as YAML writes them: the defaults as the class says them, and those of a model by name beside them.
    assert fields["learning_rate"][1:3] == ["number, more than 0, at most 1", "`0.0004`; `1e-06` with a model by name"]
    assert fields["report"][2] == "`true`"
    assert fields["model"][1:3] == ["text", "null"]
    assert rows(page)["reward"][2] == "required"
    for kind in (Objective, CriticConfig, Laser):
        listed = reference_pages.part_rows(kind)
        assert {name for name, *_ in listed} == set(inspect.signature(kind).parameters)
        assert [name for name, *_, sentence in listed if not sentence] == []


def test_every_column_of_a_rollout_file_is_on_the_page_with_its_type():
    table = rows(reference_pages.rollouts())
    types = {name: cells[1].strip() for name, cells in table.items() if name != "column" and not set(name) <= {"-"}}
    assert {name.partition("<")[0].partition("/")[0] + "/" * ("/" in name) for name in types} == set(schema.COLUMNS)
    for name, kind in types.items():
        stored = str(schema.type_of(name.replace("<", "").replace(">", "")))
        arrow = re.sub(r"list<\w+: (\w+).*>", r"list<\1>", stored)
        assert kind.partition(" ")[0] == arrow, name


OURS = re.compile(r"^(credit|critic|laser|spanwise|loss)/")


def written():
    """Find every string of the logging code that begins like a metric of ours; filled-in parts stand as x."""
    strings = set()
    for file in [SOURCE / "pipeline.py", *(SOURCE / "engines").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                strings.add("".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in parts))
    return {text for text in strings if OURS.match(text) and re.fullmatch(r"[\w/]+", text)}


#: Beginnings whose rest comes from elsewhere: figures of a critic, means of a score, and TRL's table of completions.
BEGINNINGS = {"critic/x", "laser/x", "critic/", "laser/", "loss/avg_raw_advantagesx", "credit/x", "credit/", "credit/stop"}


def find_logged(name):
    """Return the meaning of a logged name, with or without the `eval_` of an evaluation in training; None if it is not ours."""
    for pattern, meaning in (entry for group in logged.GROUPS.values() for entry in group.items()):
        shape = re.sub(r"\\?<\w+\\?>", ".+", re.escape(pattern))
        if pattern in logged.CRITIC:  # or of one of several values
            shape = shape.replace("critic/", "critic/(.+/)?")
        if re.fullmatch(shape, name.removeprefix("eval_")):
            return meaning
    return None


def test_every_name_that_the_code_writes_is_explained_and_every_metric_of_the_page_written():
    names = written()
    assert len(names) + len(CREDIT) > 12
    assert [name for name in names - BEGINNINGS if find_logged(name) is None] == []
    assert [metric.name for metric in CREDIT] == sorted(logged.CREDIT, key=[metric.name for metric in CREDIT].index)
    code = "\n".join(file.read_text(encoding="utf-8") for file in SOURCE.rglob("*.py"))
    for name in (name for group in (logged.CREDIT, logged.CRITIC, logged.LASER_LOG, logged.ENGINES) for name in group):
        last_word = name.rsplit("/", 1)[-1].rsplit("_", 1)[-1]
        assert name in code or re.search(rf"\b{re.escape(last_word)}", code), name


def test_every_figure_of_an_evaluation_is_explained(unchecked_shapes):
    half, yes = torch.tensor([0.5, 0.9]), torch.tensor([1.0, 0.0])
    measured = figures(half, yes, well_formed_n=yes.bool(), refusal_n=yes.bool())
    assert [name for name in measured if name not in logged.RUN] == []
    assert find_logged("laser_ece") is logged.RUN["laser_<figure>"]
    assert find_logged("second_accuracy") is logged.RUN["<block>_accuracy"]


def test_every_number_in_the_log_of_a_run_is_explained(tmp_path):
    """With a critic of two values, and with a score; what is not ours is TRL's."""
    with_critic = trl_critic_small.with_critic(tmp_path / "critic", max_steps=2)
    with_critic.train()
    laser = Laser("?", beta=1.0, alpha=0.3, mix=0.0)
    only = (Objective("correct", pays=("solution",), options={"verify": "exact"}, baseline="group"),)
    with_score = trainer(tmp_path / "score", extra={"scheme": scheme(objectives=only, credit={"laser": laser})}, max_steps=2)
    with_score.train()
    names = {name for run in (with_critic, with_score) for line in run.state.log_history for name in line}
    ours = {name for name in names if OURS.match(name.removeprefix("eval_"))}
    assert [name for name in sorted(ours) if find_logged(name) is None] == []
    assert {"critic/correct/explained_variance", "critic/seconds", "laser/loss", "credit/solution/zero_frac"} <= ours
