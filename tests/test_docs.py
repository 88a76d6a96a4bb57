"""The pages say what runs: every python block is executed, every recipe is filled in, tables agree with the code."""

import dataclasses
import re
import tomllib
from functools import cache

import pytest
import torch

import trl_small
from credit_batches import scores_of
from helpers import assert_close
from pages import DOCS, FENCED, PAGES, README, ROOT, blocks, named, page_id, rows
from rollout_files import write_lines
from spanwise import Batch, CriticConfig, Objective, Reading, Scheme, Steps, assign, credit_batch
from spanwise.credit import METHODS, Method
from spanwise.credit.registry import FACTS, PROPERTIES
from spanwise.engines.trl.trainer import PROVIDES
from spanwise.modes import MODES
from spanwise.recipe import load, scheme_of
from spanwise.score import OUTCOMES, REWARDS
from spanwise.segment import SEGMENTERS
from spanwise.tasks.digits import DIGITS_LAYOUT
from spanwise.testing.estimators import BY_KIND

HOWTO = DOCS / "howto"
RUN_HERE = [page for page in PAGES if page.parent.name != "tutorials"]  # those are run by test_tutorials, outputs and all
REGISTRIES = (METHODS, REWARDS, OUTCOMES, SEGMENTERS, MODES)
pytestmark = pytest.mark.usefixtures("unchecked_shapes")


@cache
def namespace_of(page):
    """Run the python blocks of a page, one after the other, in one namespace; with what they register, by registry."""
    before, namespace = [set(registry) for registry in REGISTRIES], {"__name__": f"docs.{page.stem}"}
    for position, code in enumerate(blocks(page, "python")):
        exec(compile(code, f"{page.name}, python block {position + 1}", "exec"), namespace)
    pairs = zip(REGISTRIES, before, strict=True)
    return namespace, [{name: registry[name] for name in set(registry) - names} for registry, names in pairs]


@pytest.fixture
def page_runs():
    """The namespace of a page that was run once; what it registers is there during the test and forgotten afterwards."""
    before = [set(registry) for registry in REGISTRIES]

    def run(page):
        namespace, added = namespace_of(page)
        for registry, entries in zip(REGISTRIES, added, strict=True):
            registry.update(entries)
        return namespace

    yield run
    for registry, names in zip(REGISTRIES, before, strict=True):
        for name in set(registry) - names:
            del registry[name]


@pytest.mark.parametrize("page", [p for p in RUN_HERE if blocks(p, "python") or blocks(p, "yaml")], ids=page_id)
def test_python_blocks_run_and_yaml_blocks_are_recipes(page, page_runs, tmp_path):
    page_runs(page)  # a page may register the method that its recipe names
    for text in blocks(page, "yaml"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(text)
        assert scheme_of(load(recipe), DIGITS_LAYOUT, 32).objectives


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        place = page if not path else page.parent / path
        assert place.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", place.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings], target


def test_no_line_is_a_comment_to_the_site():
    """Sphinx leaves out a line that begins with a percent sign, even within a paragraph."""
    prose = {page: FENCED.sub("", page.read_text(encoding="utf-8")) for page in PAGES}
    assert [(page.name, line) for page, text in prose.items() for line in re.findall(r"^ *%.*", text, re.M)] == []


def test_two_pages_give_the_numbers_they_promise(page_runs):
    namespace = page_runs(HOWTO / "without_a_trainer.md")
    # Brier scores -.01 -.64 of the right answers (mean -.325) and -.81 -.04 of the wrong ones (mean -.425); half are right.
    assert_close(namespace["credit"].block_nk, [[0.5, 0.315], [0.5, -0.315], [-0.5, -0.385], [-0.5, 0.385]], 1e-7)
    # Form, city, year; half of the cities are right, and three of four years.
    expected = [[0.75, 0.5, 0.25], [-0.25, 0.5, -0.75], [-0.25, -0.5, 0.25], [-0.25, -0.5, 0.25]]
    assert_close(namespace["fields"].block_nk, expected, 1e-7)
    namespace = page_runs(DOCS / "methods.md")
    # -.64 and -.01 are .315 below and above their mean; without backing off each is alone with its tuple.
    assert_close(namespace["comparison"].advantage_n, [0.04, -0.04, -0.315, 0.315], 1e-7)
    assert_close(namespace["alone"].advantage_n, [0.04, -0.04, 0.0, 0.0], 1e-7)


def test_the_picture_of_the_readme_has_the_numbers_of_the_fields():
    """The second completion: sums of 2, 1, 1, 1 have the mean 1.25, so one number is -.25."""
    sentence = "With one number every token gets -0.25. By part the city gets +0.50, the year -0.75 and the form -0.25."
    assert sentence in README.read_text(encoding="utf-8")
    for name in ("front.svg", "front-dark.svg"):
        numbers = re.findall(r">([+\u2212-]\d\.\d+)<", (DOCS / "images" / name).read_text(encoding="utf-8"))
        assert [float(number.replace("\u2212", "-")) for number in numbers] == [-0.25, -0.25, 0.5, -0.75]


def test_the_readme_is_short_and_has_the_lines_of_the_whole_script_and_the_results_of_the_evidence():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 120
    (diff,), (script,) = blocks(README, "diff"), blocks(HOWTO / "from_grpotrainer.md", "python", "notest")
    new = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert len(new) == 3
    assert set(new) <= set(script.splitlines())
    short, full = rows(README, "completions"), rows(DOCS / "evidence.md", "completions")
    assert len(short) == 4
    assert short == full[:4]  # the first table of the page; another one has a judge that errs


@pytest.mark.filterwarnings("ignore")  # those of the libraries that a trainer loads
def test_the_whole_script_can_be_built(tmp_path):
    (code,) = blocks(HOWTO / "from_grpotrainer.md", "python", "notest")
    trl_small.policy(dtype=torch.float32).save_pretrained(tmp_path / "model")
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    sums = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
    places = {
        "Qwen/Qwen2.5-3B-Instruct": tmp_path / "model",
        "my/problems.jsonl": write_lines(tmp_path / "sums.jsonl", sums),
        '"out"': f'"{tmp_path}"',
        "num_generations=16,": "num_generations=16, use_cpu=True, bf16=False,",
        "trainer.train()": "",
    }
    for name, place in places.items():
        assert name in code
        code = code.replace(name, str(place))
    namespace = {}
    exec(compile(code, "the whole script", "exec"), namespace)
    trainer = namespace["trainer"]
    assert (trainer.args.num_generations, trainer.scheme.names) == (16, ("correct", "brier"))
    assert namespace["task"].train.column_names == ["prompt", "answer", "question"]


RUNS = {"value_nt": "values of a critic", "logp_nt": "log-probabilities", "steps": "steps of trajectories"}
OURS = sorted(name for name, method in METHODS.items() if method.estimator.__module__.startswith("spanwise."))


def entries():
    """Read docs/methods.md: method -> (heading, text)."""
    text = (DOCS / "methods.md").read_text(encoding="utf-8")
    by_method = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kind, *methods = re.split(r"^### ", part, flags=re.MULTILINE)
        for entry in methods:
            name, _, body = entry.partition("\n")
            by_method[name] = (kind.split("\n")[0], body.partition("\n\nA method for")[0])
    return by_method


def test_every_method_stands_on_the_page_once():
    assert sorted(entries()) == OURS
    overview = [name for _, cell in rows(DOCS / "methods.md", "credits") for name in named(cell)]
    assert sorted(overview) == OURS


@pytest.mark.parametrize("name", OURS)
def test_the_page_says_of_each_method_what_the_registry_says(name):
    method, (heading, text) = METHODS[name], entries()[name]
    contrib = ".contrib." in method.estimator.__module__
    to_call = method.preset is None and method.kind != "refinement"
    assert method.summary.startswith("A function to call from Python") == to_call
    assert contrib or not to_call
    if not to_call:  # TRL can train it
        base, refine = ("grpo", {"refine": name}) if method.kind == "refinement" else (name, {})
        Scheme.preset(base, DIGITS_LAYOUT, longest=32, **refine).check((*PROVIDES, *CriticConfig.adds))
    assert heading == ("Contrib" if contrib else f"{method.kind.capitalize()}s")
    assert not contrib or re.search(rf"The method `{name}` credits {method.kind}s( as a whole)?( \(|\.)", text)
    assert re.search(r"```text\n.*A[^`]*\n```", text)
    title, _, number = method.paper.partition(", arXiv ")
    assert f"{title}, [arXiv {number}](https://arxiv.org/abs/{number})." in text
    assert f"The formula of `{name}` is from {method.source}." in text
    in_yaml = {"None": "null", "True": "true", "False": "false"}
    defaults = [f"`{option}: {in_yaml.get(str(value), value)}`" for option, value in method.of_a_run().options.items()]
    if method.kind == "refinement":
        words = {"ids_nt": "token ids", "importance_nt": "log-probabilities"}
        needs = " and ".join(words[need] for need in method.needs if need in words)
        assert f"\n| `refine: {name}` | {needs} | {', '.join(defaults)} |\n" in text
        return
    if method.preset is None:
        needs = ", ".join(f"`{need}`" for need in method.needs)
        needs = f", which needs {needs}" if needs else ""
        assert f"Python only: `spanwise.credit.{method.estimator.__name__}`{needs}." in text
        head = "The option and its default are" if len(defaults) == 1 else "The options and their defaults are"
        assert f"{head} {', '.join(defaults)}.\n" in text + "\n"
        return
    (cells,) = re.findall(r"^\| blocks \|.*\n.*\n\| (.*) \| (.*) \| `(\w+)` \| (.*) \| (.*) \|$", text, re.MULTILINE)
    needs = Scheme.preset(name, DIGITS_LAYOUT, longest=32).needs - {"mask_nt"}
    assert {need for need, words in RUNS.items() if words in cells[3]} == needs
    assert (cells[3] == "nothing") == (not needs)
    blocks_ = "the whole completion" if method.preset.whole else "those of the task"
    rewards = "correctness and a second objective" if method.preset.calibrated else "correctness"
    assert (*cells[:3], cells[4]) == (blocks_, rewards, method.preset.per, ", ".join(defaults))
    priced = re.search(r"tags, at weight (\S+)\.\n", text)
    assert method.preset.format == (float(priced[1]) if priced else 0.0)


OWN = DOCS / "write_your_own.md"


def test_the_example_method_is_short_and_runs_from_a_recipe(page_runs, tmp_path):
    first = blocks(OWN, "python")[0]
    assert len([line for line in first.splitlines() if line.strip()]) < 30
    namespace = page_runs(OWN)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(blocks(OWN, "yaml")[0])
    scheme = scheme_of(load(recipe), DIGITS_LAYOUT, 32)
    assert (scheme.entry.estimator, scheme.options) == (namespace["median"], {"quantile": 0.25})
    # It is really called: the lower quartile of 3 1 0 2 is .75, which no other method subtracts.
    reading = Reading(scores_of([[3.0], [1.0], [0.0], [2.0]], ("correct",)), torch.full((4, 1), 5), torch.zeros(4).long())
    credit = credit_batch(reading, Batch(["q"] * 4), scheme)
    assert credit.block_nk.flatten().tolist() == [2.25, 0.25, -0.75, 1.25]


def test_the_entry_points_are_those_we_read_and_name_what_the_page_registers(page_runs):
    page_runs(OWN)
    points = tomllib.loads(blocks(OWN, "toml")[0])["project"]["entry-points"]
    assert list(points) == [registry.group for registry in REGISTRIES]
    for registry, announced in zip(REGISTRIES, points.values(), strict=True):
        assert set(announced) <= set(registry)


def test_the_tables_of_kinds_inputs_facts_and_properties_are_complete_and_the_toy_engine_as_long_as_it_says():
    assert [named(cells[0])[0] for cells in rows(OWN, "kind")] == list(BY_KIND)
    inputs = {name for cells in rows(OWN, "input") for name in named(cells[0])}
    fields = [field.name for kind in (Batch, Steps) for field in dataclasses.fields(kind)]
    others = ["reward_n", "reward_nm", "reward_nk", "reward_nt", "reward_s", "group_n", "group_s", "length_n", "block_nt"]
    assert inputs == {name for name in fields if name.endswith(("_nt", "_s"))} | {*others}
    assert {name for cells in rows(OWN, "fact") for name in named(cells[0])} == set(FACTS)
    text = OWN.read_text(encoding="utf-8")
    cells = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| (.+) \|$", text, re.MULTILINE)
    table = {name: (kinds, sentence) for name, kinds, sentence in cells if name in PROPERTIES}
    for name, sentence in PROPERTIES.items():
        if kinds := [kind for kind, names in BY_KIND.items() if name in names]:
            assert table[name] == ("all" if len(kinds) == len(BY_KIND) else ", ".join(kinds), sentence)
    (lines,) = re.findall(r"a whole engine in (\d+) lines", text)
    assert len((ROOT / "tests" / "toy_engine.py").read_text().splitlines()) == int(lines)


@pytest.mark.parametrize("kind", [kind for kind in BY_KIND if kind != "refinement"])
def test_a_method_is_handed_the_facts_that_the_table_says(kind):
    handed = {}

    def spy(**facts):
        handed.update(facts)
        shape = {"block": (2, 1), "token": (2, 3)}.get(kind, (2,))
        return torch.zeros(shape)

    ones_nt = torch.ones(2, 3)
    inputs = {"mask_nt": ones_nt.bool(), "block_nt": ones_nt.long() - 1, "bootstrap_n": torch.zeros(2)}
    if kind == "block":  # no other kind compares the rows of one rollout
        inputs["voter_n"] = torch.zeros(2).long()
    assign(
        scores_of([[1.0], [0.0]], ("correct",)), torch.tensor([0, 0]), torch.ones(2, 1).bool(), block_names=("all",),
        objectives=[Objective("correct", pays="all")], method=Method("spy", spy, kind, "a test"), inputs=inputs,
    )  # fmt: skip
    expected = set()
    for names, _, kinds in rows(OWN, "fact"):
        if kinds == "all" or kinds == kind or (kinds.startswith("all but block") and kind != "block"):
            expected |= set(named(names))
    assert {name for name in handed if name in FACTS} == expected
    takes = {name for cells in rows(OWN, "kind") if named(cells[0]) == [kind] for name in named(cells[1])}
    assert takes <= set(handed)


def test_the_road_is_the_one_that_is_checked():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    checked = [set(layer.replace("spanwise.", "").split(" : ")) for layer in reversed(contracts[0]["layers"])]
    assert [set(named(cells[0])) for cells in rows(ROOT / "CONTRIBUTING.md", "room")] == checked
