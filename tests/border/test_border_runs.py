"""Folders, checkpoints, evaluations, comparisons and reports that cannot be what was meant."""

import io
import json
import os
from unittest.mock import patch

import torch
import yaml
from rich.console import Console

from border.case import QUICK, check, command, trained
from spanwise.commands.report.report import report_folder
from spanwise.commands.shared.display import interval_table
from spanwise.commands.shared.samples import Samples
from spanwise.engines.checkpoints import write_manifest
from spanwise.measure import mean_interval
from spanwise.recipe import load, resolved, scheme_of
from spanwise.report import train_report
from spanwise.rollouts.folder import metrics_until, sole_writer
from spanwise.tasks import DIGITS_LAYOUT
from spanwise.tasks.embedded import build_model, build_tokenizer
from tokenizers_small import byte_model


def begun(folder, *, checkpoint=True, **fields):
    """A run of one step that was stopped before its end."""
    recipe = load(None, {"steps": 1, "start_steps": 1, "eval_prompts": 2, "eval_samples": 2, **fields})
    folder.mkdir(parents=True)
    settings = resolved(recipe, scheme_of(recipe, DIGITS_LAYOUT, 64))
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    (folder / "metrics.jsonl").write_text('{"step": 0, "evaluation": {"accuracy": 0.25}}\n')
    if checkpoint:
        (folder / "checkpoints" / "checkpoint-1").mkdir(parents=True)
        (folder / "checkpoints" / "checkpoint-1" / "trainer_state.json").write_text('{"global_step": 1}')
        write_manifest(folder / "checkpoints" / "checkpoint-1", processes=1, settings=settings)
    return folder


def untrained(folder):
    """A model of the embedded task that has learned nothing."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, 0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def evaluated(folder, *words):
    return command("eval", str(untrained(folder / "m")), "--prompts", "2", "--samples", "2", *QUICK[:2], *words, code=0)


def of_two_processes(folder):
    with patch.dict(os.environ, {"WORLD_SIZE": "2"}):
        return command("train", *QUICK)


def own_model(folder):
    untrained(folder / "mine" / "model")
    return command("train", "--output", "mine", "--overwrite", *QUICK)


def in_use(folder):
    with sole_writer(begun(folder / "runs" / "a")):
        return command("train", "--output", "runs/a", *QUICK)


def collapsed(folder):
    """An evaluation of a policy that refuses everything and says so."""
    run = begun(folder / "a", checkpoint=False, method="rlcr")
    n = 8
    zeros = [0.0] * n

    figures = Samples(
        torch.arange(n) // 2, {"solution": ["?"] * n}, {"solution": torch.tensor(zeros).double()},
        torch.tensor(zeros).double(), torch.ones(n).bool(), torch.ones(n).bool(),
    )  # fmt: skip
    figures.write(run)
    final = {**figures.figures(), "auroc": None}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "final": final}) + "\n")
    html = report_folder(run).read_text()
    return html.split('aria-label="what is wrong">')[1].split("</ul>")[0]


def unanimous(folder):
    """Mean rewards of three prompts that all got .1 and of three that did not, in the terminal and on the page of a run."""
    agree, differ = (mean_interval(torch.tensor(reward_n).double()) for reward_n in ([0.1] * 3, [0.1, 0.1, 0.4]))
    intervals = {"reward/style": agree, "reward/tone": differ}
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(*interval_table("a", intervals))
    lines = [{"step": 0, "final": {"reward/style": 0.1, "reward/tone": 0.2}}]
    page = train_report(recipe={}, metrics=lines, summary={}, intervals=intervals, unmeasured={"accuracy": "", "ece": ""})
    assert page.count("95 %: unknown, as all prompts agree") == 1
    return console.export_text()


def of_secrets(folder, *options, **fields):
    """A recipe that a run has written, with what stands in it for a secret."""
    return trained(folder, *options, **fields)


def cut_through(folder):
    run = begun(folder / "A")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "los')
    return f"{metrics_until(run, 9)}"


CASES = {
    "the recipe.yaml of a run whose reward had an api_key, trained again": lambda folder: of_secrets(
        folder, objectives=[{"reward": "correct", "pays": ["solution"], "options": {"api_key": "<hidden>"}}]
    ),
    "the recipe.yaml of a run whose trainer had a hub_token, trained again (and no run to go on with)": lambda folder: (
        of_secrets(folder, "--resume", "last", trainer={"hub_token": "<hidden>"})
    ),
    "a metrics.jsonl whose last line was cut off by an interruption": cut_through,
    "`spanwise train --output A --method rlcr` where A holds a run of bae": lambda folder: command(
        "train", "--output", str(begun(folder / "A")), "--method", "rlcr", *QUICK
    ),
    "`spanwise train --output A --method rlcr --resume last` where A holds a run of bae": lambda folder: command(
        "train", "--output", str(begun(folder / "A")), "--method", "rlcr", "--resume", "last", "--steps", "1", *QUICK
    ),
    "a run is to be trained for fewer steps than its recipe says": lambda folder: command(
        "train", "--resume", str(begun(folder / "A", steps=200)), "--steps", "1"
    ),
    "`spanwise train --resume last` where nothing was trained": lambda folder: command("train", "--resume", "last"),
    "`--resume last` on a run without checkpoints": lambda folder: command(
        "train", "--output", str(begun(folder / "A", checkpoint=False)), "--resume", "last"
    ),
    "`--resume` and `--overwrite` together": lambda folder: command(
        "train", "--resume", str(begun(folder / "A")), "--overwrite"
    ),
    "`--overwrite` on a folder of one's own that has a model/ in it": own_model,
    "`--overwrite` on the run that the new one starts from": lambda folder: command(
        *("train", "--model", str(begun(folder / "A") / "checkpoints"), "--dataset", "d.jsonl"),
        *("--output", str(folder / "A"), "--overwrite"),
    ),
    "a second training into a folder while the first one goes on": in_use,
    "an output below a file": lambda folder: (
        ((folder / "notes").write_text("") and "") or command("train", "--output", "notes/run", *QUICK)
    ),
    "torchrun without an output folder": of_two_processes,
    "`report_to: wanb`": lambda folder: command("train", "--report-to", "wanb"),
    "`--set stepz=3`": lambda folder: command("train", "--set", "stepz=3"),
    "a mean reward that is the same for every prompt, evaluated": unanimous,
    "`spanwise eval` on a model of something else than the embedded task, without a recipe": lambda folder: command(
        "eval", str(byte_model(folder / "mine"))
    ),
    "`spanwise fidelity` on a model of something else than the embedded task": lambda folder: command(
        "fidelity", str(byte_model(folder / "mine"))
    ),
    "`spanwise fidelity` on a layout without a confidence": lambda folder: command(
        "fidelity",
        str(untrained(folder / "m")),
        "--prompts",
        "2",
        "--samples",
        "2",
        *QUICK,
        "--set",
        "layout={draft: [reasoning, answer]}",
    ),
    "`spanwise fidelity` with a run folder as its output": lambda folder: command(
        "fidelity", str(begun(folder / "A")), "--output", str(folder / "A")
    ),
    "`spanwise eval` on a run that has not ended": lambda folder: command("eval", str(begun(folder / "A"))),
    "`spanwise eval --samples 0`": lambda folder: command("eval", "anything", "--samples", "0"),
    "`spanwise eval` under a layout without the tags <answer> and <confidence>": lambda folder: evaluated(
        folder, "--set", "layout={draft: [reasoning, analysis]}"
    ),
    "`spanwise eval` under a layout of JSON fields without them": lambda folder: evaluated(
        folder, "--set", "layout=[g, h]", "--set", "segmenter=json"
    ),
    "`spanwise eval` of a model that answers nothing": evaluated,
    "the report of a policy that refuses everything, whose ECE is beautiful": collapsed,
    "`spanwise report` on an empty folder": lambda folder: command("report", str(folder)),
    "`spanwise compare --arms outcome,blendd`": lambda folder: command("compare", "--arms", "outcome,blendd"),
    "`spanwise compare --set seed=3`": lambda folder: command("compare", "--set", "seed=3"),
    "`spanwise compare` into the folder of a run": lambda folder: command("compare", "--output", str(begun(folder / "A"))),
    "`spanwise demo --seeds one`": lambda folder: command("demo", "--seeds", "one"),
    "`spanwise demo --seeds 1,1`": lambda folder: command("demo", "--seeds", "1,1"),
    "`spanwise demo --set method=grpo`": lambda folder: command("demo", "--set", "method=grpo"),
    "`spanwise train missing.yaml`": lambda folder: command("train", "missing.yaml"),
    "`spanwise train --resume nowhere`": lambda folder: command("train", "--resume", "nowhere"),
    "`spanwise eval nowhere`": lambda folder: command("eval", "nowhere"),
    "`spanwise fidelity nowhere`": lambda folder: command("fidelity", "nowhere"),
}

test = check(__doc__, CASES)
