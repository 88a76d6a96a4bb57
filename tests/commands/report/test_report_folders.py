"""`spanwise report` on folders of runs, comparisons, fidelity and credit."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from helpers import NAN
from report_pages import RECIPE, Page, start
from spanwise.commands.fidelity.fidelity import write_fidelity
from spanwise.commands.report.report import over_seeds, pooled, report_folder
from spanwise.commands.shared.samples import Samples
from spanwise.errors import DataError
from spanwise.fidelity import Rerolls, measure_fidelity
from spanwise.fidelity.fixed_point import fixed_point_rows
from spanwise.fidelity.page import fidelity_rows, written_baselines
from spanwise.measure import mean_interval, reliability, voting
from spanwise.report.page import shown


def make_run(folder, *, seed=0, accuracy=0.5, evaluation=True):
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "seed": seed}))
    final = start() | {"accuracy": accuracy}
    lines = [{"step": 0, "evaluation": start()}, {"step": 2, "final": final}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(
        json.dumps({"final": final, "curve": [{"step": 0, **start()}, {"step": 2, **final}]})
    )
    if evaluation:
        right_n = (torch.arange(16) < 16 * accuracy).double()
        confidence_n = torch.where(torch.arange(16) == 0, NAN, 0.75).double()
        answers = ["a" if right else "b" for right in right_n.tolist()]
        samples = Samples(
            torch.arange(16) // 4, {"solution": answers}, {"solution": right_n}, confidence_n, torch.ones(16).bool()
        )
        samples.write(folder)
    return folder


def test_report_of_a_run_folder(tmp_path):
    folder = make_run(tmp_path / "run", accuracy=0.625)
    (folder / "rollouts").mkdir()
    rollouts = {
        "step": [2], "prompt": ["1+1="], "completion_ids": [[5, 6]], "trainable": [[True, True]], "fault": [0],
        "start/solution": [0], "end/solution": [2], "reward/correct": [1.0], "status/correct": ["ok"],
        "advantages/bae": [[0.5, 0.5]],
    }  # fmt: skip
    pq.write_table(pa.table(rollouts), folder / "rollouts" / "step_000002.parquet")
    path = report_folder(folder)
    assert path == folder / "report.html"
    page = Page(path.read_text())
    assert page.headline("accuracy") == "62.5 %"
    assert "15 of 16 completions state a confidence and could be judged." in page.text
    assert {"Learning", "Reliability", "Voting", "Tokens", "Recipe"} <= set(page.texts)
    assert f"spanwise train {folder}/recipe.yaml --output {folder}-again" in page.text


def test_report_of_a_comparison_folder(tmp_path):
    for arm, accuracy in (("group", 0.5), ("blended", 0.75)):
        for seed in (0, 1):
            make_run(tmp_path / f"{arm}-{seed}", seed=seed, accuracy=accuracy, evaluation=(arm, seed) != ("group", 1))
    make_run(tmp_path / "other-0")
    listed = {name: {} for name in ("accuracy", "ece", "weighted@4")}
    summary = {
        "arms": ["group", "blended"], "seeds": [0, 1, 2], "reference": None, "recipe": RECIPE, "figures": {"group": listed},
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    page = Page(report_folder(tmp_path).read_text())
    rows = {row[0]: row[1:] for row in page.cells if row and row[0] in ("group", "blended", "other")}
    assert rows["group"][0] == "0.500 ± 0.000"  # the run without samples gives its final figures
    assert rows["group"][2].endswith("(n=1)")  # and no vote
    assert rows["blended"][0] == "0.750 ± 0.000"
    assert "other" not in rows
    assert [
        "group - blended",
        "-0.250",
        "-0.250",
        "-0.250",
        "0.500",
        "borderline",
        "unknown",
    ] in page.cells  # two equal seeds
    assert "All seeds together; whiskers count a prompt once" in page.text


def test_report_of_a_fidelity_folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    confidence_xs = torch.rand(16, 4, generator=generator, dtype=torch.float64)
    outcome_xs = (torch.arange(4) % 2).double().expand(16, 4)
    prefix_xs = 2 * torch.arange(16)[:, None] + outcome_xs.long()
    rolled = Rerolls(confidence_xs, outcome_xs, prefix_xs, torch.rand(32, 8, generator=generator, dtype=torch.float64))
    fidelity = measure_fidelity(rolled, group_sizes=[4], resamples=2, draws=10)
    points = fixed_point_rows(group_sizes=[4], probabilities=[0.1, 0.2], batches=8)
    measured = written_baselines(fidelity, rolled)
    write_fidelity(tmp_path / "f", source="runs/bae", recipe=RECIPE, points=points, **measured)
    page = Page(report_folder(tmp_path / "f").read_text())
    assert page.headline("blended, G = 4") == shown(fidelity.interval("blended", 4, "correlation")[0])
    assert "64 completions of 16 prompts; 256 re-rolls of 32 distinct prefixes." in page.text
    row = next(row for row in page.cells if row[0] == "0.100" and len(row) == 7)
    assert row[4] == "0.021"  # outcome at G = 4, p = .1: the closed form
    assert len(fidelity_rows(fidelity)) == 6 * 8


def check_refused(folder, *words):
    with pytest.raises(DataError) as caught:
        report_folder(folder)
    for word in words:
        assert word in str(caught.value)


def test_folders_that_no_report_can_be_made_of(tmp_path):
    check_refused(tmp_path, "no folder of spanwise train")
    (tmp_path / "summary.json").write_text("{}")
    check_refused(tmp_path, "no summary of a comparison")
    (tmp_path / "summary.json").write_text("{")
    check_refused(tmp_path, "summary.json", "not a JSON object")
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 0}\nnonsense\n')
    check_refused(folder, "Line 2", "metrics.jsonl")
    folder = make_run(tmp_path / "other")
    (folder / "evaluation.parquet").write_bytes(b"PAR1 but no more")
    check_refused(folder, "evaluation.parquet")
    (tmp_path / "summary.json").write_text(json.dumps({"arms": ["a"], "seeds": [0], "figures": {"a": {"ece": {}}}}))
    check_refused(tmp_path, "No run of this comparison")
    (tmp_path / "fidelity.json").write_text('{"source": "x"}')
    check_refused(tmp_path, "fidelity.json")


def test_votes_over_seeds_have_intervals_over_seeds(tmp_path):
    seeds = {
        seed: voting(
            ["a", "a"], torch.full((2,), 0.5).double(), torch.full((2,), value).double(), prompts=[0, 0], resamples=1
        )
        for seed, value in enumerate((0.0, 1.0, 1.0))
    }
    curve = over_seeds(seeds)["majority"]
    expected = mean_interval(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    assert curve.intervals[1] == expected
    assert curve.prompts == (0, 1, 2)


def test_a_prompt_that_two_seeds_answer_is_one_prompt():
    wrong_n, right_n = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    half_n, well_n = torch.full((4,), 0.5, dtype=torch.float64), torch.ones(4).bool()
    seeds = [
        Samples(torch.tensor([0, 0, 1, 1]), {"solution": ["a"] * 4}, {"solution": correct_n}, half_n, well_n)
        for correct_n in (wrong_n, right_n)
    ]
    assert pooled(seeds)["prompt"].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert pooled(seeds)["correct"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_whiskers_of_a_comparison_do_not_shrink_because_seeds_answer_the_same():
    """64 prompts, right or wrong in every seed alike: five seeds know no more than one does."""
    correct_n = (torch.arange(64) % 2).double()
    one = Samples(
        torch.arange(64), {"s": ["a"] * 64}, {"s": correct_n}, torch.full((64,), 0.75).double(), torch.ones(64).bool()
    )
    found = pooled([one] * 5)
    row, *more = reliability(found["confidence"], found["correct"], prompts=found["prompt"])
    assert not more
    # Wilson for 32 of 64: z = 1.95996, half = z sqrt(.25/64 + z^2/(4 64^2)) / (1 + z^2/64) = .11898.
    assert (row["accuracy_low"], row["accuracy_high"]) == (
        pytest.approx(0.38102, abs=1e-3),
        pytest.approx(0.61898, abs=1e-3),
    )
