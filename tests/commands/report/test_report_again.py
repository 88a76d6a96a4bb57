"""A report written again is the same page, and the command on it does the same again."""

import json
import re
import shlex
from html import unescape

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import spanwise.commands.credit.credit as credit_module
import spanwise.commands.fidelity.fidelity as fidelity_module
import trl_small
from report_pages import data_of
from rollout_files import LAYOUT, quiet
from spanwise import cli
from spanwise.commands.credit.credit import credit
from spanwise.commands.credit.write import outcome_of
from spanwise.commands.report.report import report_folder
from spanwise.commands.shared.folder import again_command
from spanwise.commands.shared.options import recipe_fields
from spanwise.commands.shared.task import run_or_model
from spanwise.layout import Layout
from spanwise.recipe import load, resolved, scheme_of
from tokenizers_small import byte_level

#: Two completions of four have no confidence; those of the first prompt are right and wrong, those of the second both right.
SAID = [
    trl_small.say("ab", "4", 0.9, 1.0), trl_small.say("b", "3", None, 0.0),
    trl_small.say("", "3", 0.5, 1.0), trl_small.say("a", "3", None, 1.0),
]  # fmt: skip


def rollouts(path, **extra):
    """spanwise's own columns; the tokenizer lies elsewhere."""
    tokenizer = trl_small.tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(one.pieces) for one in SAID]
    columns = {
        "step": [1] * 4, "prompt": [*["2+2="] * 2, *['[{"role": "user", "content": "1+2="}]'] * 2],
        "completion_ids": ids, "trainable": [[True] * len(row) for row in ids], "text": ["".join(one.pieces) for one in SAID],
        "reward/correct": [one.right for one in SAID], "status/correct": ["ok"] * 4,
        "logprobs": [[-0.1 * (t + 1) for t in range(len(row))] for row in ids], **extra,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    tokenizer.save_pretrained(path.parent / "elsewhere")
    return path


def command_of(html):
    return unescape(re.search(r'<pre class="command"><code>(.*?)</code>', html, re.S)[1])


def cells(html):
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.S)
    return [[unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.S)] for row in rows]


def run_command(monkeypatch, module, name, command):
    """Parse a printed command as the command line does; what it would call `module.name` with."""
    called = {}
    monkeypatch.setattr(module, name, lambda *args, **kwargs: called.update({"args": args, **kwargs}))
    words = shlex.split(command)
    assert words[0] == "spanwise"
    cli.app(words[1:], exit_on_error=False)
    return called


def exported(tmp_path, monkeypatch=None, **options):
    file = rollouts(tmp_path / "data" / "some.parquet")
    options = {
        "methods": ["grpo", "bae"],
        "tokenizer": tmp_path / "data" / "elsewhere",
        "overrides": {"layout": LAYOUT},
        **options,
    }
    credit(file, output=tmp_path / "out", console=quiet(), **options)
    return (tmp_path / "out" / "report.html").read_text()


def test_a_credit_report_written_again_is_the_same_page(tmp_path):
    first = exported(tmp_path)
    again = report_folder(tmp_path / "out").read_text()
    assert again == first
    row = next(row for row in cells(again) if row and row[0] == "bae: confidence")
    assert row[1] == "2"  # two of the four have none: absent, not credit 0
    assert data_of(again)["tokens"]["words"]  # and texts, not ids
    assert "⟨" not in "".join(data_of(again)["tokens"]["words"])
    assert data_of(again)["probabilities"] is not None


def test_another_model_folder_is_never_taken_for_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    html = exported(tmp_path)
    byte_level().save_pretrained(tmp_path / "model")  # of something else, and it could spell these ids
    assert data_of(report_folder("out").read_text()) == data_of(html)
    (tmp_path / "data" / "elsewhere").rename(tmp_path / "gone")
    words = data_of(report_folder("out").read_text())["tokens"]["words"]
    assert all(re.fullmatch(r"⟨\d+⟩", word) for word in words)


def test_texts_that_a_tokenizer_cuts_inside_characters_survive(tmp_path):
    byte_level().save_pretrained(tmp_path / "model")
    row = {"input": "q", "output": "<answer>日本語</answer>", "gts": "日本語", "score": 1.0, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    options = {"methods": ["grpo"], "tokenizer": tmp_path / "model", "overrides": {"layout": LAYOUT}}
    credit(tmp_path / "1.jsonl", output=tmp_path / "out", console=quiet(), **options)
    first = (tmp_path / "out" / "report.html").read_text()
    assert report_folder(tmp_path / "out").read_text() == first
    assert "\udcaa" in data_of(first)["tokens"]["words"]  # a byte of 語


def test_the_command_of_a_credit_report_asks_for_the_same(tmp_path, monkeypatch):
    (tmp_path / "a recipe.yaml").write_text(json.dumps({"layout": LAYOUT}))
    asked = {
        "recipe": tmp_path / "a recipe.yaml", "methods": ["bae:group", "grpo"], "reward": {"brier": "text"}, "rows": 2,
        "overrides": {"learning_rate": 1e-6, "prefilled": None, "calibration": "brier"},
    }  # fmt: skip
    html = exported(tmp_path, **asked)
    assert "2 of 4 completions are shown" in html
    assert report_folder(tmp_path / "out").read_text() == html
    called = run_command(monkeypatch, credit_module, "credit", command_of(html))
    assert called.pop("args") == (tmp_path / "data" / "some.parquet",)
    assert called.pop("console")
    assert called == {**asked, "columns": {}, "tokenizer": tmp_path / "data" / "elsewhere", "output": tmp_path / "out-again"}


@pytest.mark.parametrize(
    ("names", "given", "outcome"),
    [
        (["correct", "brier"], [None, "correct"], "correct"),
        (["format", "solved", "brier"], [None, None, "solved"], "solved"),
        (["format", "correct"], [None, None], "correct"),
        (["format"], [None], None),
        (["correct"], ["elsewhere"], "correct"),
    ],
)
def test_the_outcome_is_what_others_are_judged_by(names, given, outcome):
    assert outcome_of(names, given) == outcome


@pytest.mark.parametrize(("objective", "place"), [("given", 1), ("of", 1), (None, None)])
def test_the_outcome_of_an_export_is_that_of_its_objectives(objective, place, tmp_path):
    judged = {"given": {"given": "solved"}, "of": {"options": {"of": "solved"}}}.get(objective)
    objectives = [
        {"reward": "format", "pays": ["solution"]},
        {"reward": "correct", "name": "solved", "pays": ["solution"], "options": {"verify": "exact"}},
        *([{"reward": "brier", "pays": ["confidence"], **judged}] if judged else []),
    ]
    options = {
        "methods": ["recipe"],
        "reward": {"solved": "correct"},
        "overrides": {"layout": LAYOUT, "objectives": objectives},
    }
    html = exported(tmp_path, **options)
    assert data_of(html)["objectives"][:2] == ["format", "solved"]
    assert data_of(html)["outcome"] == place
    assert report_folder(tmp_path / "out").read_text() == html


def trained(folder, *, ids, size, **fields):
    """A run folder with one kept completion of a real byte-level tokenizer; the config says how many ids the model has."""
    (folder / "rollouts").mkdir(parents=True)
    byte_level().save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"vocab_size": size}))
    recipe = load(None, {"layout": {"solution": ["answer"]}, "method": "grpo", **fields})
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump(resolved(recipe, scheme_of(recipe, Layout(LAYOUT), 32)), sort_keys=False)
    )
    (folder / "metrics.jsonl").write_text('{"step": 0, "evaluation": {"accuracy": 0.5}}\n')
    columns = {
        "step": [2], "prompt": ["1+1="], "completion_ids": [ids], "trainable": [[True] * len(ids)], "fault": [0], "answer": ["2"],
        "start/solution": [0], "end/solution": [len(ids)], f"credit/{recipe.method}/solution": [0.5],
        f"credit/{recipe.method}/stop": [-0.25],
        "reward/format": [1.0], "status/format": ["ok"], "reward/correct": [0.0], "status/correct": ["ok"],
        f"advantages/{recipe.method}": [[0.5] * len(ids)],
    }  # fmt: skip
    pq.write_table(pa.table(columns), folder / "rollouts" / "step_000002.parquet")
    return folder


@pytest.mark.parametrize(("beyond", "padded", "shown"), [(3, 8, "text"), (3, 0, "ids"), (9, 8, "ids")])
def test_an_id_beyond_the_tokenizer_aborts_no_report(beyond, padded, shown, tmp_path):
    """Qwen has more embedding rows than tokens, and such an id can be sampled."""
    tokenizer = byte_level()
    text = tokenizer.encode("ok", add_special_tokens=False)
    ids = [*text, len(tokenizer) + beyond]
    html = report_folder(trained(tmp_path / "run", ids=ids, size=len(tokenizer) + padded)).read_text()
    data = data_of(html)
    found = [data["tokens"]["words"][ord(code) - 32] for code in data["tokens"]["codes"][0]]
    assert found == ([*tokenizer.convert_ids_to_tokens(text), ""] if shown == "text" else [f"⟨{index}⟩" for index in ids])


def test_the_outcome_of_a_run_is_not_its_first_reward(tmp_path):
    objectives = [
        {"reward": "format", "pays": ["solution"]},
        {"reward": "correct", "pays": ["solution"]},
    ]
    ids = byte_level().encode("ok", add_special_tokens=False)
    folder = trained(tmp_path / "run", ids=ids, size=400, method="bae", objectives=objectives)
    data = data_of(report_folder(folder).read_text())
    assert data["objectives"] == ["format", "correct"]
    assert data["outcome"] == 1
    assert data["stops"][0][0] == -0.25


def test_fields_of_a_recipe_survive_the_command_line(tmp_path):
    fields = {
        "learning_rate": 1e-06, "prefilled": None, "layout": {"c": [], "a b": ["x"]},
        "trainer": {"beta": 1e-07, "x": "1e-7", "y": "no"},
        "objectives": [{"reward": "correct", "pays": ["a"], "if_missing": -4.605170185988091}] * 9, "output": "a 'quoted' = é",
        "entropy_target": 0.2, "options": {"leave_one_out": True},
    }  # fmt: skip
    words = shlex.split(again_command("credit", folder=tmp_path, options={"overrides": fields}))[2:-2]
    assert words[::2] == ["--set"] * len(fields)
    read = recipe_fields(words[1::2])
    assert read == fields
    assert list(read["layout"]) == ["c", "a b"]  # blocks have an order


@pytest.mark.parametrize("case", ["plain", "shared", "choices", "files"])
def test_the_command_of_a_comparison_asks_for_the_same(case, tmp_path, monkeypatch):
    import spanwise.commands.compare.compare as compare_module

    asked = {
        "plain": {"arms": ["blended", "rlcr"]},
        "shared": {"arms": ["outcome", "rlcr"], "shared": tmp_path / "shared.yaml"},
        "choices": {"arms": ["outcome"], "choices": {"entropy_target": None, "layout": LAYOUT, "micro_batch": 4}},
        "files": {"arms": [str(tmp_path / "mine.yaml"), "grpo"], "reference": "mine"},
    }[case]
    asked = {"seeds": [3, 4], "shared": None, "choices": {}, "reference": None, **asked}
    (tmp_path / "shared.yaml").write_text("steps: 7")
    (tmp_path / "mine.yaml").write_text("method: rlcr")
    pages = []
    monkeypatch.setattr(compare_module, "_train_waiting", lambda *_: None)
    monkeypatch.setattr(
        compare_module, "ended_runs", lambda places: ({}, {}, {arm: {3: {"ece": 0.1}, 4: {"ece": 0.2}} for arm in places})
    )
    monkeypatch.setattr("spanwise.commands.report.report.report_folder", lambda folder: pages.append(folder))
    compare_module.compare(output=str(tmp_path / "out"), console=quiet(), **asked)
    options = json.loads((tmp_path / "out" / "summary.json").read_text())["options"]
    command = again_command("compare", *options.pop("places"), folder=tmp_path / "out", options=options)
    called = run_command(monkeypatch, compare_module, "compare", command)
    assert called == {"args": (), "output": f"{tmp_path}/out-again", "processes": None, **asked}
    if case == "plain":
        assert command == f"spanwise compare --arms blended,rlcr --seeds 3,4 --output {tmp_path}/out-again"


@pytest.mark.parametrize("place", ["run", "run/model", "alone"])
def test_the_command_of_a_fidelity_report_measures_the_same(place, tmp_path, monkeypatch):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "alone").mkdir()
    recipe = load(None, {"start": "hard", "baseline": "blended", "entropy": 1e-6})
    written = resolved(recipe, scheme_of(recipe, Layout(LAYOUT), 32))
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(written))
    given = {"prompts": 5, "samples": 6, "rerolls": 7, "seed": 8}
    fields = {"temperature": 0.5}
    asked = run_or_model(tmp_path / place, None, fields)
    command = again_command(
        "fidelity", asked[0], folder=tmp_path / "out", options={**given, "recipe": None, "overrides": fields}
    )
    called = run_command(monkeypatch, fidelity_module, "show", command)
    assert called["args"] == asked
    assert called["options"] == {**given, "recipe": None, "overrides": fields}
    assert called["output"] == tmp_path / "out-again"
