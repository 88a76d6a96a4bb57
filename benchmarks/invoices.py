"""What credit by field is worth on letters that are read into JSON, against one number for the whole object.

    python benchmarks/invoices.py --tune               # one run of each arm and rate on seed 100, by its training batches
    python benchmarks/invoices.py [--arms by_field,sum,grpo,gdpo] [--seeds 0,1,2,3,4] [--output runs/invoices]
    python benchmarks/invoices.py --table [--charts docs/images]       # trains nothing: the runs that are there
    python benchmarks/invoices.py --rate 3e-4 --arms by_field,sum --group 4 --output runs/invoices-g4     # other groups
    python benchmarks/invoices.py --rate 3e-4 --arms by_field,sum --width 64 --output runs/invoices-w64   # another size of policy
    python benchmarks/invoices.py --rate 3e-4 --arms by_field,sum --error .2 --output runs/invoices-e20   # a judge that errs
    python benchmarks/invoices.py --completion 0 --error .2      # trains nothing: one completion's verdicts and credit
    python benchmarks/invoices.py --careful amounts --sums --output runs/invoices-amounts   # trains nothing: the sums in these runs
    python benchmarks/invoices.py --rate 3e-4 --arms by_field,sum --careful due --recipe recipes/invoices.yaml --output runs/due

`--careful` trains from another start:

    due        a clerk who overlooks fewer due dates
    small      the same, and small numbers
    sums       the same as small, and letters with nothing but two items among those that are read without a fault
    amounts    the same as sums, and each item of an object has a line amount, quantity times price

    by_field   each field's reward minus the group's mean pays the field's own value; keys, end and number of items pay the form
    sum        the rewards added up, minus the group's mean (`dr_grpo`); the same as each with a baseline of its own, broadcast
    grpo       the same over the standard deviation
    gdpo       each reward standardised in its group; their sum pays every token

The arms have the `per` of their methods: block, length, completion and completion.

A step is 8 new letters with 8 completions each and one step of Adam. Nine fields are measured: those that every letter has, and
the first item's. A curve is the mean of five batches; every letter is new. At the end 256 held-out letters are read, sampled once.
With `--error` a simulated judge turns round that share of its verdicts on values, and the policy is paid by what the judge says.
Keys, end and number of items are still checked exactly, and so are all figures. What is there already is not run again. The runs
of a folder have the same options, but for arms, seeds and rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from rich.console import Console
from rubric import chance_of
from torch import Tensor

from spanwise.batch import Batch
from spanwise.commands.demo.demo import running_mean, shares_right
from spanwise.commands.shared.progress import quiet
from spanwise.commands.shared.task import load_model
from spanwise.commands.train.train import train
from spanwise.layout import Layout
from spanwise.measure import mean_interval
from spanwise.pipeline import credit_batch, read
from spanwise.recipe import load, scheme_of
from spanwise.score.fields import equals
from spanwise.segment import Vocabulary
from spanwise.tasks import invoices as letters_task
from spanwise.tasks import task_shape, warm_start
from spanwise.tasks.digits import Source
from spanwise.tasks.embedded import STARTS, Embedded, Pairs, Stretch, build_invoice_tokenizer
from spanwise.tasks.fields import FORM
from spanwise.tasks.invoices import INVOICES, LONGEST, MEASURED, ClerkNoise, InvoiceProblems, clerk_traces, draw_letters
from spanwise.types import whole_text

METHODS = {"by_field": "bae", "sum": "dr_grpo", "grpo": "grpo", "gdpo": "gdpo"}
TUNING_SEED = 100
#: The block of the line amounts of `--careful amounts`.
AMOUNT = "items[*].amount"
GOALS = (0.6, 0.8)
STEPS, PROMPTS, GROUP = 48, 8, 8
#: Completions of a step, whatever the size of a group.
BATCH = PROMPTS * GROUP
HELD_OUT = 256
#: Where `train` trains, too.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The most items, the largest quantity and the largest price of every careful clerk but `due`.
SMALL_NUMBERS = (2, 3, 9)
#: The share of letters that a careful clerk reads without a fault, by the choice of `--careful`.
CAREFUL = {"due": 0.5, "small": 0.7, "sums": 0.85, "amounts": 0.85}


def erring_judge(blocks: Any, answer: Any, block: str, error: float, seed: int) -> list[float | None]:
    """Judge a field of each completion, and turn the verdict round with the probability `error`.

    The seed, the field, the letter's object and the completion decide whether a verdict is turned round; the batch does not.
    """
    exact = equals(blocks, pays=(block,), columns={"answer": answer}, scored={}, tag=block)
    return [
        None if math.isnan(right) else float((right == 1) != (chance_of(f"{seed} {block}", gold, whole_text(parts)) < error))
        for parts, gold, right in zip(blocks, answer, exact.value_n.tolist(), strict=True)
    ]


def judged_objectives(fields: Mapping[str, Any], error: float) -> list[dict[str, Any]]:
    """The objectives of the task, with a judge that errs in place of each exact check, which stays with weight 0 as a figure."""
    recipe = load(None, fields)
    exact = scheme_of(recipe, *task_shape(recipe)).plain()["objectives"]
    checks = [entry for entry in exact if entry["reward"] == "equals"]
    judges = [
        {
            **entry, "reward": "invoices:erring_judge", "name": entry["name"].replace("equals", "judge"),
            "options": {"block": entry["options"]["tag"], "error": error, "seed": recipe.seed},
        }
        for entry in checks
    ]  # fmt: skip
    return [*({**entry, "weight": 0.0} for entry in checks), *judges, *(entry for entry in exact if entry not in checks)]


def run_of(
    arm: str,
    seed: int,
    rate: float,
    folder: Path,
    *,
    held_out: int = HELD_OUT,
    group: int = GROUP,
    error: float = 0.0,
    objectives: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Train an arm, or read what it left; with `objectives` of a recipe instead of the task's own."""
    place = folder / f"{arm}-{rate:g}-{seed}"
    figures = place.parent / f"{place.name}.figures"
    if not figures.is_file():
        fields = {
            "task": "invoices", "method": METHODS[arm], "learning_rate": rate, "seed": seed, "output": str(place), "steps": STEPS,
            "prompts": BATCH // group, "group_size": group, "warmup_steps": 0, "entropy": 0.0, "entropy_target": None,
            "eval_every": 0, "eval_prompts": 8, "eval_samples": 1, "keep_rollouts": 0, "save_every": 0,
        }  # fmt: skip
        if error:
            fields["objectives"] = judged_objectives(fields, error)
        if objectives is not None:
            fields["objectives"] = list(objectives) if arm == "by_field" else summed(objectives)
        recipe = load(None, fields)
        summary = train(recipe, console=Console(quiet=True), overwrite=True)
        batches = shares_right(recipe, MEASURED)
        record = {"arm": arm, "seed": seed, "rate": rate, "seconds": summary["step_seconds"], "batches": batches}
        figures.write_text(
            json.dumps({**record, **({"end": held_out_figures(place / "model", held_out)} if held_out else {})})
        )
    return json.loads(figures.read_text())


def summed(objectives: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the same rewards for a method that adds them up: each pays everything, and a missing one is 0."""
    shared = {"pays": [FORM, "*"], "if_missing": 0.0}
    return [{**{key: entry for key, entry in objective.items() if key != "only"}, **shared} for objective in objectives]


def held_out_figures(folder: Path, count: int = HELD_OUT) -> dict[str, float]:
    """Read held-out letters with a model, sampled at temperature 1: the share of fields right, and the faults of a clerk."""
    letters = STARTS["invoices"].source.held_out(count)
    rows: dict[str, list[float]] = {}
    texts = sampled(*load_model(folder), letters.prompts)
    for text, gold, letter in zip(texts, letters.gold_n, letters.letter_n, strict=True):
        for name, value in compared(parsed(text), gold, letter).items():
            rows.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in rows.items()}


def sampled(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    """Sample a completion of each prompt at temperature 1, from the seed 0."""
    model.to(DEVICE)
    tokens = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to(DEVICE)
    torch.manual_seed(0)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        ids_nt = model.generate(**tokens, max_new_tokens=LONGEST, **options)[:, tokens["input_ids"].shape[1] :]
    return tokenizer.batch_decode(ids_nt, True)


def parsed(text: str) -> dict[str, Any]:
    """The object of a completion; {} if it is none."""
    try:
        record = json.loads(text)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def compared(record: Mapping[str, Any], gold: Mapping[str, Any], letter: str) -> dict[str, bool]:
    """Which fields are right, and which faults there are; a figure is left out where it has no meaning."""
    listed = record.get("items")
    items = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    first = items[0] if items else {}
    right = {name: record.get(name, "none") == value for name, value in gold.items() if name != "items"}
    right |= {f"items[0].{name}": first.get(name) == value for name, value in gold["items"][0].items()}
    figures = {
        "fields": float(np.mean([right[name] for name in MEASURED])),
        **right,
        "item count": len(items) == len(gold["items"]),
    }
    figures["due stated" if gold["due"] else "due invented"] = (
        record.get("due") == gold["due"] if gold["due"] else bool(record.get("due"))
    )
    if not states_total(letter, gold):
        is_right = record.get("total") == gold["total"]
        figures |= {"total computed": is_right, f"total computed of {len(gold['items'])}": is_right}
    try:
        figures["adds up"] = sum(item["quantity"] * item["price"] for item in items) == record["total"]
    except (KeyError, TypeError):
        figures["adds up"] = False
    if "amount" in gold["items"][0]:
        figures |= amounts_compared(items, gold)
    return figures


def amounts_compared(items: Sequence[Mapping[str, Any]], gold: Mapping[str, Any]) -> dict[str, bool]:
    """Whether all line amounts of a completion are right, and whether they fit its own quantities and prices."""
    amounts = [item.get("amount") for item in items]
    try:
        own_amounts = [item["quantity"] * item["price"] for item in items]
    except (KeyError, TypeError):
        own_amounts = None
    return {"amounts": amounts == [item["amount"] for item in gold["items"]], "amounts fit": amounts == own_amounts}


def show_sums(folder: Path) -> None:
    """Print of the start and of each run how often amounts are right, and the total where they are, in four samples a letter."""
    letters = STARTS["invoices"].source.held_out()
    letters = letters.take(np.flatnonzero(list(map(is_sum, letters.letter_n, letters.gold_n))))
    for place in (warm_start("invoices"), *sorted(folder.glob("*/model"))):
        rows = []
        for text, gold in zip(sampled(*load_model(place), letters.prompts * 4), [*letters.gold_n] * 4, strict=True):
            record = parsed(text)
            items = [item for item in record.get("items") or [] if isinstance(item, dict)]
            total = record.get("total")
            has_tens = isinstance(total, int) and total // 10 == gold["total"] // 10
            rows.append((amounts_compared(items, gold)["amounts"], total == gold["total"], has_tens))
        amounts_n, total_n, tens_n = np.array(rows, dtype=bool).T
        print(f"{place}: amounts {amounts_n.mean():.3f}, total {total_n.mean():.3f}, ", end="")
        print(f"where amounts are right {total_n[amounts_n].mean():.3f}, its tens {tens_n[amounts_n].mean():.3f}")


def is_sum(letter: str, gold: Mapping[str, Any]) -> bool:
    """Return whether a letter has the most items and does not state their total."""
    return len(gold["items"]) == letters_task.MOST_ITEMS and not states_total(letter, gold)


def curve(run: Mapping[str, Any]) -> list[float]:
    """The share of the nine fields that is right in the batches, as means of five."""
    return running_mean([float(np.mean(list(batch.values()))) for batch in run["batches"]])


def verdicts_and_credit(
    texts: Sequence[str], gold: Mapping[str, Any], tokenizer: Any, error: float
) -> dict[str, Float[Tensor, "n k"]]:
    """Return of N completions of one letter which measured fields are right, the judge's verdicts, and the credit in each arm."""
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    batch = Batch.jagged(ids, [0] * len(texts), columns={"answer": [json.dumps(gold)] * len(texts)})
    tables: dict[str, Float[Tensor, "n k"]] = {}
    for arm in ("by_field", "sum"):
        fields = {"task": "invoices", "method": METHODS[arm]}
        recipe = load(None, {**fields, "objectives": judged_objectives(fields, error)})
        scheme = scheme_of(recipe, *task_shape(recipe))
        reading = read(batch, scheme, Vocabulary.from_tokenizer(tokenizer))
        tables["right"], tables["verdict"] = (
            torch.stack([reading.scores.outcome(f"{reward}.{name}") for name in MEASURED], dim=1)
            for reward in ("equals", "judge")
        )
        credit_nk = credit_batch(reading, batch, scheme).block_nk
        tables[arm] = credit_nk[:, [scheme.layout.names.index(name) for name in MEASURED]]
    return tables


def show_completion(letter: int, error: float, group: int) -> None:
    """Print, for the completion that the sum pays least of a letter's group from the warm start, its verdicts and its credit."""
    model, tokenizer = load_model(warm_start("invoices"))
    letters = STARTS["invoices"].source.held_out(letter + 1)
    texts = sampled(model, tokenizer, [letters.prompts[letter]] * group)
    exact, erring = (verdicts_and_credit(texts, letters.gold_n[letter], tokenizer, share) for share in (0.0, error))
    n = int(exact["sum"][:, 0].argmin())
    print(
        f"{letters.letter_n[letter]}\n{texts[n]}\n\n| field | right | in the group | by field | sum | judge | by field | sum |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for k, name in enumerate(MEASURED):
        right, verdict = ("right" if table[n, k] == 1 else "wrong" for table in (exact["verdict"], erring["verdict"]))
        paid, paid_by_judge = ([f"{table[arm][n, k]:+.2f}" for arm in ("by_field", "sum")] for table in (exact, erring))
        cells = [name, right, f"{exact['right'][:, k].nansum():.0f} of {group}", *paid, verdict, *paid_by_judge]
        print(f"| {' | '.join(cells)} |")


def completions_to(run: Mapping[str, Any], goal: float) -> float:
    """Completions until the curve reached a goal; infinity: never."""
    step = next((step for step, value in enumerate(curve(run), start=1) if value >= goal), math.inf)
    return step * BATCH


def written(values: Sequence[float], form: str = "{:.3f}") -> str:
    """A mean with its interval over seeds; how many were not infinite, where some are."""
    if not all(map(math.isfinite, values)):
        return f"{sum(map(math.isfinite, values))} of {len(values)} got there"
    interval = mean_interval(torch.tensor(values, dtype=torch.float64))
    texts = [form.format(value) for value in (interval.value, interval.low, interval.high)]
    return texts[0] if len(values) < 2 else f"{texts[0]} ({texts[1]}, {texts[2]})"


def times_completions(runs: Mapping[int, Mapping[str, Any]], base: Mapping[int, Mapping[str, Any]], goal: float) -> str:
    """How many times the completions of `base` the runs need, a geometric mean over seeds; "more than", where one ended before."""
    pairs = [
        (completions_to(runs[seed], goal), completions_to(base[seed], goal)) for seed in sorted(runs.keys() & base.keys())
    ]
    if len(pairs) < 2 or not all(math.isfinite(of_base) for _, of_base in pairs):
        return "-"
    ratios = torch.tensor([min(own, STEPS * BATCH) / of_base for own, of_base in pairs], dtype=torch.float64)
    interval = mean_interval(ratios.log())
    more = "" if all(math.isfinite(own) for own, _ in pairs) else "more than "
    return f"{more}{math.exp(interval.value):.2f} ({math.exp(interval.low):.2f}, {math.exp(interval.high):.2f}), {len(pairs)} seeds"


def by_arm_and_seed(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, float], dict[int, Mapping[str, Any]]]:
    """Return the runs of each arm and learning rate by seed."""
    by_arm: dict[tuple[str, float], dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault((run["arm"], run["rate"]), {})[run["seed"]] = run
    return by_arm


def show(
    runs: Sequence[Mapping[str, Any]], start: Mapping[str, float] | None, exact: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Print the figures of each arm, and its differences from credit by field and from runs without error, paired by seed."""
    by_arm, exact_by_arm = by_arm_and_seed(runs), by_arm_and_seed(exact)
    base = next((found for (arm, _), found in by_arm.items() if arm == "by_field"), {})
    for (arm, rate), found in by_arm.items():
        print(f"\n{arm}, learning rate {rate:g}, seeds {', '.join(map(str, sorted(found)))}")
        for goal in GOALS:
            print(f"  completions to {goal:.0%}: {written([completions_to(run, goal) for run in found.values()], '{:.0f}')}")
            if arm != "by_field":
                print(f"    times those of by_field: {times_completions(found, base, goal)}")
            if exact:
                print(f"    times those without error: {times_completions(found, exact_by_arm.get((arm, rate), {}), goal)}")
        for step in (8, 16, 32, STEPS):
            values = {seed: curve(run)[step - 1] for seed, run in found.items()}
            line = f"  fields right in the batches up to step {step}: {written(list(values.values()))}"
            if arm != "by_field" and (both := sorted(values.keys() & base.keys())):
                line += f"; minus by_field {written([values[seed] - curve(base[seed])[step - 1] for seed in both])}"
            print(line)
        for name in start or {}:
            ends, base_ends = (
                {seed: run["end"][name] for seed, run in runs.items() if "end" in run} for runs in (found, base)
            )
            if ends:
                line = f"  at the end, {name}: {written(list(ends.values()))} (start {start[name]:.3f})"
                if arm != "by_field" and (both := sorted(ends.keys() & base_ends.keys())):
                    line += f"; minus by_field {written([ends[seed] - base_ends[seed] for seed in both])}"
                print(line)


def draw(runs: Sequence[Mapping[str, Any]], place: Path) -> None:
    """Draw the curves of every seed, and the fields at the end, by field and with the sum, on white and on dark."""
    import altair as alt

    place.mkdir(parents=True, exist_ok=True)
    arms = ("by_field", "sum")
    points = [
        {"arm": run["arm"], "seed": run["seed"], "completions": step * BATCH, "right": value}
        for run in runs if run["arm"] in arms for step, value in enumerate(curve(run), start=1)
    ]  # fmt: skip
    ends = [
        {"arm": run["arm"], "field": name.replace("items[0].", ""), "right": run["end"][name]}
        for run in runs if run["arm"] in arms for name in MEASURED
    ]  # fmt: skip
    for name, background, ink in (("invoices", "white", "#333"), ("invoices-dark", "#16181d", "#ccc")):
        colour = alt.Color("arm:N", scale=alt.Scale(domain=arms), legend=alt.Legend(orient="bottom", title=None))
        curves = alt.Chart(alt.InlineData(values=points), title="fields right in new letters", width=280, height=220)
        left = curves.mark_line(strokeWidth=1.2, opacity=0.8).encode(
            x=alt.X("completions:Q", axis=alt.Axis(grid=False, tickCount=4)), y=alt.Y("right:Q", title=None), color=colour,
            detail="seed:N",
        )  # fmt: skip
        bars = alt.Chart(alt.InlineData(values=ends), title="held-out letters at the end, each seed", width=280, height=220)
        right = bars.mark_point(filled=True, size=40, opacity=0.8).encode(
            x=alt.X("right:Q", title=None, axis=alt.Axis(grid=False, tickCount=4)), y=alt.Y("field:N", title=None, sort=None),
            yOffset=alt.YOffset("arm:N"), color=colour,
        )  # fmt: skip
        chart = alt.hconcat(left, right).configure(background=background).configure_view(stroke=None)
        text: dict[str, Any] = {"labelColor": ink, "titleColor": ink}
        chart = chart.configure_axis(**text).configure_legend(**text).configure_title(color=ink)
        chart.save(str(place / f"{name}.png"), scale_factor=2)


def main() -> None:
    """Run what is missing, then print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rates", default="1.5e-4,3e-4,1e-3", help="learning rates of the tuning")
    parser.add_argument("--output", default="runs/invoices")
    parser.add_argument("--rate", type=float, help="one learning rate for all arms, instead of the best of the tuning")
    parser.add_argument("--group", type=int, default=GROUP, help="completions of a letter; a step has 64 in any case")
    parser.add_argument(
        "--width", type=int, default=128, help="of the policy; 64, 128 and 256 are .2, .7 and 2.7 M parameters"
    )
    parser.add_argument(
        "--error", type=float, default=0.0, help="share of the judge's verdicts on values that are turned round"
    )
    parser.add_argument("--exact", help="folder of the runs without error, to compare those of --error with")
    parser.add_argument(
        "--completion", type=int, metavar="LETTER", help="train nothing: one completion of this held-out letter"
    )
    parser.add_argument("--careful", choices=list(CAREFUL), help="the start of a careful clerk, see above")
    parser.add_argument("--recipe", help="a file with objectives, instead of the task's own")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="letters read at the end, of 512")
    parser.add_argument("--only-sums", action="store_true", help="train on letters of the most items and without a total")
    parser.add_argument("--sums", action="store_true", help="train nothing: the sums of amounts in the runs that are there")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--charts", help="folder for the curves as PNG")
    options = parser.parse_args()
    if options.error and options.recipe:
        parser.error("--error needs the task's own objectives; leave out --recipe")
    torch.set_num_threads(1)
    quiet()
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    arms, start = options.arms.split(","), folder / "start.json"
    if options.width != 128:
        STARTS["invoices"] = resized(STARTS["invoices"], options.width)
    if options.careful:
        STARTS["invoices"] = careful(STARTS["invoices"], options.careful)
    if options.only_sums:
        STARTS["invoices"] = dataclasses.replace(
            STARTS["invoices"], source=OnlySums(STARTS["invoices"].source.draw_any, INVOICES.held_out_seed)
        )
    if options.completion is not None:
        show_completion(options.completion, options.error, options.group)
        return
    if options.sums:
        show_sums(folder)
        return
    objectives = load(options.recipe).objectives if options.recipe else None
    choices = {"group": options.group, "error": options.error, "objectives": objectives}
    if not options.table:
        check_options(
            folder, {name: getattr(options, name) for name in ("width", "careful", "held_out", "only_sums")} | choices
        )
        rates = {} if options.tune else {arm: options.rate or best_rate(arm, folder) for arm in arms}
        warm_start("invoices", device=DEVICE)  # the runs find it in the cache
    if options.tune:
        tuning_rates = map(float, options.rates.split(","))
        show([run_of(arm, TUNING_SEED, rate, folder, held_out=0, **choices) for rate in tuning_rates for arm in arms], None)
        return
    if not options.table:
        for seed in map(int, options.seeds.split(",")):
            for arm in arms:
                run_of(arm, seed, rates[arm], folder, held_out=options.held_out, **choices)
        if not start.is_file():
            start.write_text(json.dumps(held_out_figures(warm_start("invoices"), options.held_out)))
    runs = runs_in(folder)
    if not runs:
        raise SystemExit(f"There is no run in '{folder}'. Leave out --table to train.")
    start_figures = json.loads(start.read_text()) if start.is_file() else None
    show(runs, start_figures, runs_in(Path(options.exact)) if options.exact else ())
    if options.charts:
        draw(runs, Path(options.charts))


def check_options(folder: Path, choices: Mapping[str, Any]) -> None:
    """Refuse a folder whose runs have other options. They would be read instead of trained."""
    file = folder / "options.json"
    if any(folder.glob("*.figures")):
        if not file.is_file():
            raise SystemExit(f"'{folder}' holds runs, but '{file}' with their options is missing. Give another --output.")
        folder_options = json.loads(file.read_text())
        changed = [f"--{name.replace('_', '-')}" for name, choice in choices.items() if folder_options.get(name) != choice]
        if changed:
            names = ", ".join(changed).replace("--objectives", "--recipe")
            raise SystemExit(f"'{folder}' holds runs with another {names}. Give another --output.")
    file.write_text(json.dumps(choices))


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """Return what the runs of a folder left, but for those of the tuning."""
    figures = [json.loads(file.read_text()) for file in sorted(folder.glob("*.figures"))]
    return [run for run in figures if run["seed"] != TUNING_SEED]


def resized(task: Embedded, width: int) -> Embedded:
    """Return the task with a policy of another width, which is warm-started the same way."""
    return dataclasses.replace(task, course=dataclasses.replace(task.course, shape={"width": width}, key={"width": width}))


def careful(task: Embedded, clerk: str) -> Embedded:
    """Return the task with the careful clerk of a choice of `--careful`; all but `due` have small numbers."""
    careful_fields = ("due",) if clerk == "due" else ("due", "items", "total")
    if clerk != "due":
        letters_task.MOST_ITEMS, letters_task.MOST_QUANTITY, letters_task.MOST_PRICE = SMALL_NUMBERS
    if clerk in ("sums", "amounts"):
        task = with_sums(task, amounts=clerk == "amounts")
    *reading_stages, clerk_stage = task.course.stretches

    def draw(size: int, rng: np.random.Generator) -> Pairs:
        letters = task.source.draw(size // 4 or 1, rng=rng, exclude=task.source.held_out_prompts)
        records = [json.loads(trace) for trace in clerk_traces(letters, clerk_stage.noise, rng=rng)]
        for record, gold in zip(records, letters.gold_n, strict=True):
            if rng.random() < CAREFUL[clerk]:
                record.update({name: gold[name] for name in careful_fields})
            elif clerk == "amounts":
                record["items"] = [miscalculated(item, clerk_stage.noise.slip, rng) for item in record["items"]]
        return list(zip(letters.prompts, map(json.dumps, records), strict=True))

    stages = (*reading_stages, dataclasses.replace(clerk_stage, draw=draw))
    key = {"careful": careful_fields} | ({"arithmetic": clerk} if clerk in ("sums", "amounts") else {})
    return dataclasses.replace(task, course=dataclasses.replace(task.course, stretches=stages, key=key))


def with_sums(task: Embedded, *, amounts: bool) -> Embedded:
    """Return the task with many sums among the letters that are read without a fault; with `amounts` each item has one, too."""
    finish = add_amounts if amounts else lambda letters: letters
    sums = Source(lambda size, rng: finish(draw_sums(size, rng)), INVOICES.held_out_seed)

    def source_of(noise: ClerkNoise) -> Source[InvoiceProblems]:
        return Source(lambda size, rng: finish(draw_letters(size, rng, facts=noise.facts)), INVOICES.held_out_seed)

    source = source_of(ClerkNoise())

    def reading(stage: Stretch) -> Stretch:
        def draw(size: int, rng: np.random.Generator) -> Pairs:
            kinds = [(source_of(stage.noise), size // 4 or 1), *([(sums, size // 2 or 1)] if stage.noise.facts == 1 else [])]
            batches = [kind.draw(count, rng=rng, exclude=source.held_out_prompts) for kind, count in kinds]
            return [pair for letters in batches for pair in zip(letters.prompts, letters_task.answers(letters), strict=True)]

        return dataclasses.replace(stage, draw=draw)

    *reading_stages, clerk_stage = task.course.stretches
    stages = (*map(reading, reading_stages), clerk_stage)
    task = dataclasses.replace(task, source=source, course=dataclasses.replace(task.course, stretches=stages))
    if not amounts:
        return task
    layout = Layout({**dict(task.layout.blocks), AMOUNT: [AMOUNT]}, segmenter="json", most=task.layout.most)
    course = dataclasses.replace(task.course, tokenizer=tokenizer_with_amounts)
    return dataclasses.replace(task, layout=layout, course=course)


class OnlySums(Source[InvoiceProblems]):
    """Letters for training that have the most items and do not state their total; held-out letters are of all kinds."""

    def training(self, size: int, *, rng: np.random.Generator) -> InvoiceProblems:
        """Draw letters for training, none with the prompt of a held-out letter."""

        def draw(count: int, rng: np.random.Generator) -> InvoiceProblems:
            letters = self.draw_any(4 * count, rng)
            return letters.take(np.flatnonzero(list(map(is_sum, letters.letter_n, letters.gold_n)))[:count])

        return Source(draw, self.held_out_seed).draw(size, rng=rng, exclude=self.held_out_prompts)


def draw_sums(size: int, rng: np.random.Generator) -> InvoiceProblems:
    """Draw letters that hold nothing but the most items and the currency, so that the total has to be computed."""
    letters = draw_letters(2 * size, rng, facts=0.0, most_facts=0.0)
    longest = [n for n, gold in enumerate(letters.gold_n) if len(gold["items"]) == letters_task.MOST_ITEMS]
    return letters.take(np.array(longest[:size], dtype=np.int64))


def add_amounts(letters: InvoiceProblems) -> InvoiceProblems:
    """Return the letters with objects whose items end with a line amount, quantity times price."""
    gold_n = np.empty_like(letters.gold_n)
    for n, gold in enumerate(letters.gold_n):
        gold_n[n] = {**gold, "items": [{**item, "amount": item["quantity"] * item["price"]} for item in gold["items"]]}
    return dataclasses.replace(letters, gold_n=gold_n)


def miscalculated(item: Mapping[str, Any], rate: float, rng: np.random.Generator) -> dict[str, Any]:
    """Return a clerk's item with the amount of its own quantity and price; with probability `rate` the price of one piece."""
    return {**item, "amount": item["price"] * (1 if rng.random() < rate else item["quantity"])}


def tokenizer_with_amounts() -> Any:
    """Build the tokenizer of the letters with one token more, the key of an amount."""
    from tokenizers import AddedToken

    tokenizer = build_invoice_tokenizer()
    tokenizer.add_tokens([AddedToken(', "amount": ', normalized=False)])
    return tokenizer


def states_total(letter: str, gold: Mapping[str, Any]) -> bool:
    """Return whether the letter itself holds the total."""
    return f" {gold['total']} " in letter


def best_rate(arm: str, folder: Path) -> float:
    """The rate with the highest mean of the curve on the tuning seed, of those that were run."""
    runs = [json.loads(file.read_text()) for file in folder.glob(f"{arm}-*-{TUNING_SEED}.figures")]
    if not runs:
        raise SystemExit(f"No run of '{folder}' tells the best learning rate of '{arm}'. Set --rate, or run --tune first.")
    return float(max(runs, key=lambda run: float(np.mean(curve(run))))["rate"])


if __name__ == "__main__":
    main()
