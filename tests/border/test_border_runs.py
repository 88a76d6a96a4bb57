"""Folders, checkpoints, evaluations, comparisons and reports that cannot be what was meant."""

import io
import json
import os
import shlex
from unittest.mock import patch

import torch
import yaml
from rich.console import Console

from border.case import QUICK, case, check, command, trained
from spanwise.commands.report.report import report_folder
from spanwise.commands.shared.display import interval_table
from spanwise.commands.shared.samples import Samples
from spanwise.engines.checkpoints import write_manifest
from spanwise.measure import mean_interval
from spanwise.recipe import load, resolved, scheme_of
from spanwise.report import train_report
from spanwise.rollouts.folder import metrics_until, sole_writer
from spanwise.tasks import DIGITS_LAYOUT
from tokenizers_small import byte_model, digits_model


def begun(folder, *, checkpoint=True, **fields):
    """A run of one step that was stopped before its end."""
    recipe = load(None, {"steps": 1, "start_steps": 1, "eval_prompts": 2, "eval_samples": 2, **fields})
    settings, saved = resolved(recipe, scheme_of(recipe, DIGITS_LAYOUT, 64)), folder / "checkpoints" / "checkpoint-1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    (folder / "metrics.jsonl").write_text('{"step": 0, "evaluation": {"accuracy": 0.25}}\n')
    if checkpoint:
        saved.mkdir(parents=True)
        (saved / "trainer_state.json").write_text('{"global_step": 1}')
        write_manifest(saved, processes=1, settings=settings)
    return folder


@case
def measured(folder, *words, by="eval", code=0):
    """What `spanwise eval`, or another command, says of a model that has learned nothing."""
    return command(by, digits_model(folder / "m"), "--prompts", "2", "--samples", "2", *QUICK[:2], *words, code=code)


@case
def ran(words):
    return command(*shlex.split(words))


@case
def beside(folder, words, *more, checkpoint=True, **fields):
    """`spanwise WORDS` beside a run in the folder A that has not ended; the word RUN is the path of A."""
    run = begun(folder / "A", checkpoint=checkpoint, **fields)
    return command(*words.replace("RUN", str(run)).split(), *more)


@case
def of_bytes(folder, name):
    return command(name, str(byte_model(folder / "mine")))


@case
def of_two_processes(*words):
    with patch.dict(os.environ, {"WORLD_SIZE": "2"}):
        return command("train", *QUICK, *words)


def own_model(folder):
    digits_model(folder / "mine" / "model")
    return command("train", "--output", "mine", "--overwrite", *QUICK)


def below_a_file(folder):
    (folder / "notes").write_text("")
    return command("train", "--output", "notes/run", *QUICK)


def in_use(folder):
    with sole_writer(begun(folder / "runs" / "a")):
        return command("train", "--output", "runs/a", *QUICK)


def collapsed(folder):
    """An evaluation of a policy that refuses everything and says so."""
    run = begun(folder / "a", checkpoint=False, method="rlcr")
    zeros_n, yes_n = torch.zeros(8).double(), torch.ones(8).bool()
    samples = Samples(torch.arange(8) // 2, {"solution": ["?"] * 8}, {"solution": zeros_n}, zeros_n, yes_n, yes_n)
    samples.write(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 1, "final": {**samples.figures(), "auroc": None}}) + "\n")
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


def cut_through(folder):
    run = begun(folder / "A")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "los')
    return f"{metrics_until(run, 9)}"


CLIPPED = "{reward: log_score, pays: confidence, options: {clip: 0.05}}"
CASES = {
    "the recipe.yaml of a run whose reward had an api_key, trained again": trained(
        objectives=[{"reward": "correct", "pays": ["solution"], "options": {"api_key": "<hidden>"}}]
    ),
    "the recipe.yaml of a run whose trainer had a hub_token, trained again (and no run to go on with)": trained(
        "--resume", "last", trainer={"hub_token": "<hidden>"}
    ),
    "a metrics.jsonl whose last line was cut off by an interruption": cut_through,
    "`spanwise train --output A --method rlcr` where A holds a run of bae": beside(
        "train --output RUN --method rlcr", *QUICK
    ),
    "`spanwise train --output A --method rlcr --resume last` where A holds a run of bae": beside(
        "train --output RUN --method rlcr --resume last --steps 1", *QUICK
    ),
    "a run is to be trained for fewer steps than its recipe says": beside("train --resume RUN --steps 1", steps=200),
    "`spanwise train --resume last` where nothing was trained": ran("train --resume last"),
    "`--resume last` on a run without checkpoints": beside("train --output RUN --resume last", checkpoint=False),
    "`--resume` and `--overwrite` together": beside("train --resume RUN --overwrite"),
    "`--overwrite` on a folder of one's own that has a model/ in it": own_model,
    "`--overwrite` on the run that the new one starts from": beside(
        "train --model A/checkpoints --dataset d.jsonl --output RUN --overwrite"
    ),
    "a second training into a folder while the first one goes on": in_use,
    "an output below a file": below_a_file,
    "torchrun of two processes that share 3 completions": of_two_processes("--prompts", "1", "--group-size", "3"),
    "torchrun without an output folder": of_two_processes(),
    "`report_to: wanb`": ran("train --report-to wanb"),
    "`--set layout='{solution: [answer]'`, without its last bracket": ran("train --set 'layout={solution: [answer]'"),
    "`--set stepz=3`": ran("train --set stepz=3"),
    "a mean reward that is the same for every prompt, evaluated": unanimous,
    "`spanwise eval` on a model of something else than the embedded task, without a recipe": of_bytes("eval"),
    "`spanwise fidelity` on a model of something else than the embedded task": of_bytes("fidelity"),
    "`spanwise fidelity` on a layout without a confidence": measured(
        *QUICK[2:], "--set", "layout={draft: [reasoning, answer]}", by="fidelity", code=2
    ),
    "`spanwise fidelity` on a layout whose first block has no answer": measured(
        "--set", "layout={plan: [reasoning], rest: [answer, analysis, confidence]}", by="fidelity", code=2
    ),
    "`spanwise fidelity` with a `log_score` of another `clip`": measured(
        *("--set", f"objectives=[{{reward: correct, pays: solution}}, {CLIPPED}]"), by="fidelity", code=2
    ),
    "`spanwise fidelity` with a run folder as its output": beside("fidelity RUN --output RUN"),
    "`spanwise eval` on a run that has not ended": beside("eval RUN"),
    "`spanwise eval --samples 0`": ran("eval anything --samples 0"),
    "`spanwise eval` under a layout without the tags <answer> and <confidence>": measured(
        "--set", "layout={draft: [reasoning, analysis]}"
    ),
    "`spanwise eval` under a layout of JSON fields without them": measured(
        "--set", "layout=[g, h]", "--set", "segmenter=json"
    ),
    "`spanwise eval` of a model that answers nothing": measured(),
    "the report of a policy that refuses everything, whose ECE is beautiful": collapsed,
    "`spanwise report` on an empty folder": ran("report ."),
    "`spanwise compare --set seed=3`": ran("compare --set seed=3"),
    "`spanwise compare` into the folder of a run": beside("compare --output RUN"),
    "`spanwise demo` into the folder of a run": beside("demo --output RUN"),
    "`spanwise demo --seeds one`": ran("demo --seeds one"),
    "`spanwise demo --seeds 1,1`": ran("demo --seeds 1,1"),
    "`spanwise demo --set method=grpo`": ran("demo --set method=grpo"),
    "`train` with `--steps 1.5`": ran("train --steps 1.5"),
    "`train` with `--set steps=1` and `--set steps=2`": ran("train --set steps=1 --set steps=2"),
    "`demo` with `--steps 1` and `--set steps=2`": ran("demo --steps 1 --set steps=2"),
    "`spanwise train missing.yaml`": ran("train missing.yaml"),
    "`spanwise train --resume nowhere`": ran("train --resume nowhere"),
    "`spanwise eval nowhere`": ran("eval nowhere"),
    "`spanwise fidelity nowhere`": ran("fidelity nowhere"),
    "`spanwise eval .` in an empty folder": ran("eval ."),
}

test = check(__doc__, CASES)
