"""`spanwise report` on folders of runs, comparisons, fidelity and credit; written again, page and command are the same."""

import json
import math
import re
import shlex
from collections import Counter
from html import unescape

import pytest
import torch
import yaml

import spanwise.commands.compare.compare as compare_module
import trl_small
from helpers import NAN
from measure_small import rolled
from report_pages import RECIPE, Page, data_of, decoded, start
from rollout_files import LAYOUT, sae_run, write_own
from spanwise import cli
from spanwise.commands.credit.credit import credit
from spanwise.commands.credit.write import outcome_of
from spanwise.commands.fidelity.fidelity import write_fidelity
from spanwise.commands.report.report import over_seeds, pooled, report_folder
from spanwise.commands.shared.folder import again_command
from spanwise.commands.shared.options import recipe_fields
from spanwise.commands.shared.samples import Samples
from spanwise.commands.shared.task import run_or_model
from spanwise.errors import DataError
from spanwise.fidelity import measure_fidelity
from spanwise.fidelity.fixed_point import fixed_point_rows
from spanwise.fidelity.page import written_baselines
from spanwise.layout import Layout
from spanwise.measure import mean_interval, voting
from spanwise.recipe import load, resolved, scheme_of
from spanwise.report.page import shown
from tokenizers_small import byte_level


def make_run(folder, *, seed=0, accuracy=0.5, evaluation=True):
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "seed": seed}))
    final = start() | {"accuracy": accuracy}
    lines = [{"step": 0, "evaluation": start()}, {"step": 2, "final": final}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = [{"step": 0, **start()}, {"step": 2, **final}]
    (folder / "summary.json").write_text(json.dumps({"final": final, "curve": curve}))
    if evaluation:
        right_n = (torch.arange(16) < 16 * accuracy).double()
        confidence_n = torch.where(torch.arange(16) == 0, NAN, 0.75).double()
        answers = ["a" if right else "b" for right in right_n.tolist()]
        columns = ({"solution": answers}, {"solution": right_n}, confidence_n, torch.ones(16).bool())
        Samples(torch.arange(16) // 4, *columns).write(folder)
    return folder


def test_report_of_a_run_folder_shows_whole_groups_of_all_of_a_large_batch(tmp_path):
    """Of 64 groups of 8 completions, 62 fit on a page of at most 500."""
    folder, group = make_run(tmp_path / "run", accuracy=0.625), [n // 8 for n in range(512)]
    same = {"fault": 0, "start/solution": 0, "end/solution": 1, "advantages/bae": [0.5], "step": 2}
    columns = {name: [cell] * 512 for name, cell in same.items()} | {"prompt": [f"prompt {n}" for n in group]}
    write_own(folder / "rollouts" / "step_000002.parquet", [[5]] * 512, group=group, **columns)
    path = report_folder(folder)
    assert path == folder / "report.html"
    html = path.read_text()
    data, page = data_of(html), Page(html)
    sizes = Counter(decoded(data["prompts"], n)[0] for n in range(len(data["steps"])))
    assert set(sizes.values()) == {8}
    assert (len(sizes), {"prompt 0", "prompt 63"} <= sizes.keys()) == (62, True)
    assert "--rows" not in html  # an option of spanwise credit alone
    assert page.headline("accuracy") == "62.5 %"
    assert "15 of 16 completions have a confidence, and are known to be right or wrong." in page.text
    assert {"Learning", "Reliability", "Voting", "Tokens", "Recipe"} <= set(page.texts)
    assert f"spanwise train {folder}/recipe.yaml --output {folder}-again" in page.text


def test_report_of_a_comparison_folder(tmp_path):
    for arm, accuracy in (("group", 0.5), ("blended", 0.75)):
        for seed in (0, 1):
            make_run(tmp_path / f"{arm}-{seed}", seed=seed, accuracy=accuracy, evaluation=(arm, seed) != ("group", 1))
    make_run(tmp_path / "other-0")
    listed = {name: {} for name in ("accuracy", "ece", "weighted@4")}
    asked = {"arms": ["group", "blended"], "seeds": [0, 1, 2], "reference": None}
    summary = {**asked, "recipe": RECIPE, "figures": {"group": listed}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = Page(report_folder(tmp_path).read_text())
    rows = {row[0]: row[1:] for row in page.cells if row and row[0] in ("group", "blended", "other")}
    assert rows["group"][0] == "0.500 ± 0.000"  # the run without samples gives its final figures
    assert rows["group"][2].endswith("(n=1)")  # and no vote
    assert rows["blended"][0] == "0.750 ± 0.000"
    assert "other" not in rows
    assert ["group - blended", "-0.250", "-0.250", "-0.250", "0.500", "borderline", "unknown"] in page.cells
    assert (
        "The diagram shows the answers of all seeds. Its whiskers allow for answers to the same prompt being alike."
        in page.text
    )


def test_report_of_a_fidelity_folder(tmp_path):
    rerolls = rolled(16, 4, 8, own_prefix=False)
    fidelity = measure_fidelity(rerolls, group_sizes=[4], resamples=2, draws=10)
    points = fixed_point_rows(group_sizes=[4], probabilities=[0.1, 0.2], batches=8)
    measured = written_baselines(fidelity, rerolls)
    write_fidelity(tmp_path / "f", source="runs/bae", recipe=RECIPE, points=points, **measured)
    page = Page(report_folder(tmp_path / "f").read_text())
    assert page.headline("blended, G = 4") == shown(fidelity.interval("blended", 4, "correlation")[0])
    assert "64 completions of 16 prompts; 256 re-rolls of 32 distinct prefixes." in page.text
    row = next(row for row in page.cells if row[0] == "0.100" and len(row) == 7)
    assert row[4] == "0.021"  # outcome at G = 4, p = .1: the closed form


def test_folders_that_no_report_can_be_made_of(tmp_path):
    def refused(folder, words, **files):
        for name, text in files.items():
            (folder / name.replace("_", ".")).write_text(text)
        with pytest.raises(DataError, match=words):
            report_folder(folder)

    refused(tmp_path, "no summary of a comparison", summary_json="{}")
    refused(tmp_path, r"summary\.json.* not a JSON object", summary_json="{")
    refused(make_run(tmp_path / "run"), r"Line 2 .*metrics\.jsonl", metrics_jsonl='{"step": 0}\nnonsense\n')
    refused(make_run(tmp_path / "other"), r"evaluation\.parquet", evaluation_parquet="PAR1 but no more")
    empty = {"arms": ["a"], "seeds": [0], "figures": {"a": {"ece": {}}}}
    refused(tmp_path, "No run of this comparison", summary_json=json.dumps(empty))
    refused(tmp_path, r"fidelity\.json", fidelity_json='{"source": "x"}')


def test_votes_over_seeds_have_intervals_over_seeds_and_a_prompt_that_two_seeds_answer_is_one_prompt():
    half_n, wrong_n, right_n = (torch.full((2,), value).double() for value in (0.5, 0.0, 1.0))
    options = {"prompts": [0, 0], "resamples": 1}
    seeds = {seed: voting(["a", "a"], half_n, n, **options) for seed, n in enumerate((wrong_n, right_n, right_n))}
    curve = over_seeds(seeds)["majority"]
    assert curve.intervals[1] == mean_interval(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    assert curve.prompts == (0, 1, 2)
    answers, every_n = {"solution": ["a"] * 2}, torch.ones(2).bool()
    runs = [Samples(torch.tensor([0, 1]), answers, {"solution": n}, half_n, every_n) for n in (wrong_n, right_n)]
    assert [pooled(runs)[name].tolist() for name in ("prompt", "correct")] == [[0, 1, 0, 1], [0, 0, 1, 1]]


#: Two completions of four have no confidence; those of the first prompt are right and wrong, those of the second both right.
SAID = [
    trl_small.say("ab", "4", 0.9, 1.0), trl_small.say("b", "3", None, 0.0),
    trl_small.say("", "3", 0.5, 1.0), trl_small.say("a", "3", None, 1.0),
]  # fmt: skip


def exported(tmp_path, **options):
    """The page of spanwise's own columns, whose tokenizer lies elsewhere."""
    tokenizer, elsewhere = trl_small.tokenizer(), tmp_path / "data" / "elsewhere"
    ids = [tokenizer.convert_tokens_to_ids(reply.pieces) for reply in SAID]
    columns = {
        "prompt": [*["2+2="] * 2, *['[{"role": "user", "content": "1+2="}]'] * 2],
        "text": ["".join(reply.pieces) for reply in SAID], "reward/correct": [reply.right for reply in SAID],
        "logprobs": [[-0.1 * (t + 1) for t in range(len(row))] for row in ids],
    }  # fmt: skip
    tokenizer.save_pretrained(elsewhere)
    file = write_own(tmp_path / "data" / "some.parquet", ids, **columns)
    usual = {"methods": ["grpo", "bae"], "tokenizer": elsewhere, "overrides": {"layout": LAYOUT}}
    credit(file, output=tmp_path / "out", **{**usual, **options})
    return (tmp_path / "out" / "report.html").read_text()


def run_command(monkeypatch, function, command):
    """Parse a printed command as the command line does; what it would call this function with."""
    called = {}
    monkeypatch.setattr(f"spanwise.commands.{function}", lambda *args, **kwargs: called.update({"args": args, **kwargs}))
    words = shlex.split(command)
    assert words[0] == "spanwise"
    cli.app(words[1:], exit_on_error=False)
    return called


def test_another_model_folder_is_never_taken_for_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    html = exported(tmp_path)
    byte_level().save_pretrained(tmp_path / "model")  # of something else, and it could spell these ids
    assert data_of(report_folder("out").read_text()) == data_of(html)
    (tmp_path / "data" / "elsewhere").rename(tmp_path / "gone")
    words = data_of(report_folder("out").read_text())["tokens"]["words"]
    assert all(re.fullmatch(r"⟨\d+⟩", word) for word in words)
    assert "⟨" not in "".join(data_of(html)["tokens"]["words"])


def test_the_command_of_a_credit_report_asks_for_the_same(tmp_path, monkeypatch):
    (tmp_path / "a recipe.yaml").write_text(json.dumps({"layout": LAYOUT}))
    options = {
        "recipe": tmp_path / "a recipe.yaml", "methods": ["bae:group", "grpo"], "reward": {"brier": "text"}, "rows": 2,
        "overrides": {"learning_rate": 1e-6, "prefilled": None, "calibration": "brier"},
    }  # fmt: skip
    html = exported(tmp_path, **options)
    assert "The page shows 2 of 4 completions" in html
    assert report_folder(tmp_path / "out").read_text() == html
    command = unescape(re.search(r'<pre class="command"><code>(.*?)</code>', html, re.S)[1])
    called = run_command(monkeypatch, "credit.credit.credit", command)
    assert (called.pop("args"), called.pop("columns"), called.pop("pay")) == ((tmp_path / "data" / "some.parquet",), {}, [])
    assert called.pop("console")
    assert called.pop("write") is None  # a page is written again, traces are not
    assert called == {**options, "tokenizer": tmp_path / "data" / "elsewhere", "output": tmp_path / "out-again"}


@pytest.mark.parametrize(
    ("judged", "place"),
    [({"given": "solved"}, 1), ({"options": {"of": "solved"}}, 1), (None, None)],
    ids=["given", "of", "none"],
)
def test_the_outcome_of_an_export_is_that_of_its_objectives(judged, place, tmp_path):
    assert outcome_of(["format", "correct"], [None, "elsewhere"]) == "correct"  # what is no reward is not taken
    objectives = [
        {"reward": "format", "pays": ["solution"]},
        {"reward": "correct", "name": "solved", "pays": ["solution"], "options": {"verify": "exact"}},
        *([{"reward": "brier", "pays": ["confidence"], **judged}] if judged else []),
    ]
    options = {"methods": ["recipe"], "reward": {"solved": "correct"}}
    html = exported(tmp_path, **options, overrides={"layout": LAYOUT, "objectives": objectives})
    assert (data_of(html)["objectives"][:2], data_of(html)["outcome"]) == (["format", "solved"], place)
    assert report_folder(tmp_path / "out").read_text() == html


@pytest.mark.parametrize(("beyond", "padded", "form"), [(3, 8, "text"), (3, 0, "ids"), (9, 8, "ids")])
def test_an_id_beyond_the_tokenizer_aborts_no_report_and_the_outcome_is_not_the_first_reward(beyond, padded, form, tmp_path):
    """Qwen has more embedding rows than tokens, and such an id can be sampled."""
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": len(tokenizer) + padded}))
    objectives = [{"reward": name, "pays": ["solution"]} for name in ("format", "correct")]
    recipe = load(None, {"layout": {"solution": ["answer"]}, "method": "bae", "objectives": objectives})
    filled = resolved(recipe, scheme_of(recipe, Layout(LAYOUT), 32))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(filled, sort_keys=False))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "evaluation": {"accuracy": 0.5}}\n')
    text = tokenizer.encode("ok", add_special_tokens=False)
    ids = [*text, len(tokenizer) + beyond]
    columns = {
        "reward/format": [1.0], "status/format": ["ok"], "reward/correct": [0.0], "status/correct": ["ok"], "fault": [0],
        "start/solution": [0], "end/solution": [len(ids)], "credit/bae/solution": [0.5], "credit/bae/stop": [-0.25],
        "advantages/bae": [[0.5] * len(ids)],
    }  # fmt: skip
    write_own(tmp_path / "rollouts" / "step_000002.parquet", [ids], **columns)
    data = data_of(report_folder(tmp_path).read_text())
    shown_as = {"text": [*tokenizer.convert_ids_to_tokens(text), ""], "ids": [f"⟨{index}⟩" for index in ids]}
    assert decoded(data["tokens"], 0) == shown_as[form]
    assert (data["objectives"], data["outcome"], data["stops"][0][0]) == (["format", "correct"], 1, -0.25)


def test_fields_of_a_recipe_survive_the_command_line(tmp_path):
    fields = {
        "learning_rate": 1e-06, "prefilled": None, "layout": {"c": [], "a b": ["x"]},
        "trainer": {"beta": 1e-07, "x": "1e-7", "y": "no"},
        "objectives": [{"reward": "correct", "pays": ["a"], "if_missing": -4.605170185988091}] * 9, "output": "a 'quoted' = é",
        "entropy_target": 0.2, "options": {"leave_one_out": True},
    }  # fmt: skip
    words = shlex.split(again_command("credit", folder=tmp_path, options={"overrides": fields}))[2:-2]
    assert words[::2] == ["--set"] * len(fields)
    parsed = recipe_fields(words[1::2])
    assert parsed == fields
    assert list(parsed["layout"]) == ["c", "a b"]  # blocks have an order


def test_the_command_of_a_comparison_asks_for_the_same(tmp_path, monkeypatch):
    arguments = {
        "shared": tmp_path / "shared.yaml", "arms": [str(tmp_path / "mine.yaml"), "grpo"], "seeds": [3, 4], "reference": "mine",
        "choices": {"entropy_target": None, "layout": LAYOUT, "micro_batch": 4},
    }  # fmt: skip
    (tmp_path / "shared.yaml").write_text("steps: 7")
    (tmp_path / "mine.yaml").write_text("method: rlcr")
    figures = {3: {"ece": 0.1}, 4: {"ece": 0.2}}
    monkeypatch.setattr(compare_module.ArmRun, "finished", lambda run: True)
    monkeypatch.setattr(compare_module, "ended_runs", lambda places: ({}, {}, dict.fromkeys(places, figures)))
    monkeypatch.setattr("spanwise.commands.report.report.report_folder", lambda folder: folder)
    compare_module.compare(output=str(tmp_path / "out"), **arguments)
    options = json.loads((tmp_path / "out" / "summary.json").read_text())["options"]
    command = again_command("compare", *options.pop("places"), folder=tmp_path / "out", options=options)
    called = run_command(monkeypatch, "compare.compare.compare", command)
    assert called == {"args": (), "output": f"{tmp_path}/out-again", "processes": None, **arguments}


@pytest.mark.parametrize("place", ["run", "run/model", "alone"])
def test_the_command_of_a_fidelity_report_measures_the_same(place, tmp_path, monkeypatch):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "alone").mkdir()
    recipe = load(None, {"start": "hard", "baseline": "blended", "entropy": 1e-6})
    filled = resolved(recipe, scheme_of(recipe, Layout(LAYOUT), 32))
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump(filled))
    fields = {"temperature": 0.5}
    options = {"prompts": 5, "samples": 6, "rerolls": 7, "seed": 8, "recipe": None, "overrides": fields}
    arguments = run_or_model(tmp_path / place, None, fields)
    command = again_command("fidelity", arguments[0], folder=tmp_path / "out", options=options)
    called = run_command(monkeypatch, "fidelity.fidelity.show", command)
    assert [called[name] for name in ("args", "options", "output")] == [arguments, options, tmp_path / "out-again"]


#: Chances of two completions of five tokens, the fourth of the first a tool's.
CHANCES = [[0.1, 0.9, 0.1, None, 0.9], [0.9, 0.3, 0.9, 0.9, 0.1]]


def critic_run(path, options, **columns):
    """A run of SAE with a critic that explains nothing."""
    trl_small.tokenizer().save_pretrained(path / "model")
    ids = trl_small.tokenizer().convert_tokens_to_ids(["<answer>", "4", "</answer>", "a", "b"])
    cells = {
        "completion_ids": [ids] * 2, "trainable": [[True, True, True, False, True], [True] * 5],
        "text": ["<answer>4</answer>b", "<answer>4</answer>ab"], "values": [[0.5, 0.25, 0.75, None, 1.0], [0.5] * 5],
        "logprobs": [[p and math.log(p) for p in row] for row in CHANCES], **columns,
    }  # fmt: skip
    metrics = {"loss": 0.5, "critic/explained_variance": -0.5, "critic/error_mean": 0.25, "critic/error_within": 0.125}
    return sae_run(path, options, metrics=metrics, **cells)


@pytest.mark.parametrize(
    ("options", "opens", "words"),
    [
        ({}, [[2], [4]], "below 0.2 opens a segment"),  # the first token has none before it
        # The tool's token is as if deleted.
        ({"boundary": "end", "threshold": 0.4, "lam": 0.9}, [[1, 4], [2]], "below 0.4 closes a segment"),
    ],
)
def test_the_segments_of_a_run_and_of_its_export_are_those_of_its_recipe(options, opens, words, tmp_path):
    folder = critic_run(tmp_path / "run", options)
    html = report_folder(folder).read_text()
    assert '<section id="critic">' in html
    credit(folder, methods=["sae", "grpo"], output=tmp_path / "out")
    export = (tmp_path / "out" / "report.html").read_text()
    for data in map(data_of, (html, export)):
        assert data["opens"] == [{"": tokens} for tokens in opens]
        assert words in data["segments"]
        (column,) = data["values"]
        assert (data["methods"][0], column["name"], decoded(column, 0)) == ("sae", "", [0.5, 0.25, 0.75, None, 1])
    assert report_folder(tmp_path / "out").read_text() == export  # from its files alone
    credit(folder, methods=["gae"], output=tmp_path / "gae")
    data = data_of((tmp_path / "gae" / "report.html").read_text())
    assert (data["segments"], len(data["values"])) == ("", 1)


def test_values_by_objective_have_a_line_each_and_a_run_without_values_has_none(tmp_path):
    named = {"values/correct": [[0.5] * 3 + [None, 0.25], [0.5] * 5], "values/short": [[None] * 4 + [0.25], [None] * 5]}
    data = data_of(report_folder(critic_run(tmp_path, {"boundary": "end"}, **named, values=None)).read_text())
    assert [column["name"] for column in data["values"]] == ["correct", "short"]
    assert data["opens"] == [{"correct": [1, 4], "short": []}, {"correct": [], "short": []}]  # each in its own tokens
    data = data_of(report_folder(critic_run(tmp_path / "bare", {}, values=None, logprobs=None)).read_text())
    assert (data["values"], data["opens"], data["probabilities"]) == ([], [{}, {}], None)
