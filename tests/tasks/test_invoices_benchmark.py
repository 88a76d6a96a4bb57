"""The benchmark of the letters: one object by hand, completions to a goal, the differences of a table, a judge that errs."""

import json
import math
import sys
from functools import partial

import invoices as benchmark
import numpy as np
import pytest
import rubric
import scale
import torch
from transformers import AutoTokenizer

from spanwise.recipe import load, scheme_of
from spanwise.tasks import invoices, task_shape, warm_start
from spanwise.tasks.embedded import STARTS
from spanwise.tasks.invoices import LONGEST, MEASURED

pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # thousands of letters: the checks take most of the time
GOLD = {
    "invoice": 4821, "customer": "Dana Weltor", "date": None, "due": None, "currency": "EUR",
    "items": [{"name": "blue lamp", "quantity": 3, "price": 12}], "total": 36,
}  # fmt: skip
SECOND = {"name": "desk", "quantity": 1, "price": 40}


def test_an_object_is_compared_field_by_field_and_null_is_not_absence():
    right = benchmark.compared(GOLD, GOLD, "Total 36 euros.")
    assert {*MEASURED} <= right.keys()
    assert not right.keys() & {"total computed", "due stated"}
    assert [right[name] for name in ("fields", "item count", "adds up", "due invented")] == [1.0, True, True, False]
    without = {name: value for name, value in GOLD.items() if name != "date"}
    assert benchmark.compared(without, GOLD, "Total 36 euros.")["date"] is False
    longer = benchmark.compared({**GOLD, "items": [*GOLD["items"], SECOND], "due": "2024-01-01"}, GOLD, "Prices in euros.")
    names = ("item count", "adds up", "due invented", "total computed", "fields")
    assert [longer[name] for name in names] == [False, False, True, True, pytest.approx(8 / 9)]
    assert benchmark.compared(GOLD, {**GOLD, "due": "2024-01-01"}, "")["due stated"] is False
    for text in ("", "[1]", '{"items": ', '{"items": [3], "total": 1}', '{"items": 4}'):  # no object: nothing is right
        figures = benchmark.compared(benchmark.parsed(text), {**GOLD, "date": "2024-01-01", "due": "2024-01-01"}, "")
        assert (figures["fields"], bool(figures["adds up"])) == (0, False), text


def right_from(step):
    return {"batches": [{"a": float(n >= step)} for n in range(1, 20)]}


def test_completions_to_a_goal_count_steps_of_the_running_mean_and_are_compared_by_a_geometric_mean():
    run = {"batches": [dict.fromkeys(MEASURED, value) for value in (0.0, 0.4, 0.8, 1.0, 1.0, 1.0)]}
    assert benchmark.curve(run) == pytest.approx([0, 0.2, 0.4, 0.55, 0.64, 0.84])
    assert [benchmark.completions_to(run, goal) for goal in (0.6, 0.9)] == [5 * 64, math.inf]
    assert benchmark.written([1.0, math.inf]) == "1 of 2 got there"
    # 60 % of the last five batches, or of all so far: those right from step 2 get there at step 3 (0 1 1), from 6 at 8.
    assert [benchmark.completions_to(right_from(step), 0.6) for step in (1, 2, 6, 30)] == [64, 192, 512, math.inf]
    base, late = ({seed: right_from(step) for seed, step in enumerate(steps)} for steps in ((1, 1, 1), (2, 6, 30)))
    row = scale.ratio_rows("g4", {"by_field": base, "sum": late})[-1]
    assert (row["reached"], row["seeds"]) == (2, 3)
    assert row["value"] == pytest.approx(math.sqrt(3 * 8))
    never_by_field = scale.ratio_rows("g4", {"by_field": late, "sum": base})[-1]
    assert (never_by_field["reached"], never_by_field["value"]) == (2, pytest.approx(1 / math.sqrt(3 * 8)))
    text = benchmark.times_completions({0: late[0], 1: late[1]}, base, 0.6)
    assert (text.startswith(f"{math.sqrt(24):.2f} ("), text.endswith("2 seeds")) == (True, True)
    never = {0: right_from(30), 1: right_from(30)}
    assert benchmark.times_completions(never, base, 0.6) == "more than 48.00 (48.00, 48.00), 2 seeds"
    assert benchmark.times_completions(base, {0: right_from(1), 1: right_from(30)}, 0.6) == "-"


def test_the_table_pairs_what_is_right_at_the_end_by_seed(capsys):
    ends = {"by_field": {0: 0.5, 1: 0.7, 2: 0.9}, "sum": {0: 0.4, 1: 0.5}}
    batches = [{"a": 1.0}] * benchmark.STEPS
    benchmark.show(
        [
            {"arm": arm, "rate": 3e-4, "seed": seed, "batches": batches, "end": {"due": share}}
            for arm, by_seed in ends.items() for seed, share in by_seed.items()
        ],
        {"due": 0.3},
    )  # fmt: skip
    lines = [line for line in capsys.readouterr().out.splitlines() if "at the end" in line]
    assert lines[0].startswith("  at the end, due: 0.700 (")
    assert lines[0].endswith("(start 0.300)")
    # -.1 and -.2: half of their distance is .05, times 12.706 for one degree of freedom
    assert lines[1].endswith("(start 0.300); minus by_field -0.150 (-0.785, 0.485)")


# ------------------------------------------------------------------------------------------- options of the command


def run_main(monkeypatch, *words):
    monkeypatch.setitem(STARTS, "invoices", STARTS["invoices"])
    monkeypatch.setattr(sys, "argv", ["invoices.py", *map(str, words)])
    monkeypatch.setattr(benchmark, "quiet", lambda: None)
    monkeypatch.setattr(benchmark, "warm_start", lambda *_, **__: "start")
    benchmark.main()


def test_runs_with_other_options_are_not_read_as_those_asked_for(monkeypatch, tmp_path, capsys):
    def run_of(arm, seed, rate, folder, **choices):
        run = {"arm": arm, "seed": seed, "rate": rate, "batches": [{"a": 1.0}] * benchmark.STEPS}
        (folder / f"{arm}-{rate:g}-{seed}.figures").write_text(json.dumps(run))

    monkeypatch.setattr(benchmark, "run_of", run_of)
    monkeypatch.setattr(benchmark, "held_out_figures", lambda *_: {})
    words = ["--arms", "sum", "--seeds", "0", "--rate", "3e-4", "--output", tmp_path]
    recipe = ["--recipe", "recipes/invoices.yaml"]
    run_main(monkeypatch, *words, *recipe)
    run_main(monkeypatch, *words, *recipe)
    for more, name in (
        ([*recipe, "--group", "4"], "group"), ([], "recipe"), ([*recipe, "--width", "64"], "width"),
        ([*recipe, "--only-sums", "--held-out", "9"], "held-out, --only-sums"),
    ):  # fmt: skip
        with pytest.raises(SystemExit, match=f"holds runs with another --{name}. Give another --output"):
            run_main(monkeypatch, *words, *more)
    (tmp_path / "options.json").unlink()
    with pytest.raises(SystemExit, match="with their options is missing"):
        run_main(monkeypatch, *words, *recipe)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, *words, *recipe, "--error", ".2")
    assert "leave out --recipe" in capsys.readouterr().err


def test_without_runs_the_rate_and_the_table_are_a_sentence(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"tells the best learning rate of 'sum'. Set --rate, or run --tune first"):
        run_main(monkeypatch, "--arms", "sum", "--output", tmp_path)
    with pytest.raises(SystemExit, match=r"There is no run in .* Leave out --table to train"):
        run_main(monkeypatch, "--table", "--output", tmp_path)


def test_one_completion_is_that_of_the_start_and_the_group_asked_for(monkeypatch, tmp_path, letter_numbers):
    asked = []
    monkeypatch.setattr(benchmark, "show_completion", lambda *words: asked.append((*words, STARTS["invoices"].course.key)))
    run_main(monkeypatch, "--completion", "3", "--group", "4", "--careful", "amounts", "--output", tmp_path)
    assert asked == [(3, 0.0, 4, {"careful": ("due", "items", "total"), "arithmetic": "amounts"})]


def test_a_picture_may_go_into_a_new_folder(tmp_path):
    row = {"setting": "groups of 4", "goal": "60%", "value": 2.0, "low": 1.5, "high": 3.0}
    scale.draw([row], tmp_path / "new" / "charts")
    assert {file.name for file in (tmp_path / "new" / "charts").iterdir()} == {"scale.png", "scale-dark.png"}


# ------------------------------------------------------------------------------------------------- a judge that errs


def flipped(blocks, answers, name):
    return rubric.simulated_judge(blocks, answers, f"The value of {name} follows from the digits.", "flips20")


@pytest.mark.parametrize("judge", [partial(benchmark.erring_judge, error=0.2, seed=0), flipped], ids=["invoices", "rubric"])
def test_verdicts_on_different_fields_are_turned_round_independently(judge):
    """How many of eight verdicts are turned round has the variance of a binomial; equal errors would have eight times as much."""
    names = rubric.FIELDS.names
    golds = [{name: (n // 10**k) % 10 for k, name in enumerate(names)} for n in range(3000)]
    blocks = [{name: {"": f"{gold[name]}", name: f"{gold[name]}"} for name in names} for gold in golds]
    answers = [json.dumps(gold) for gold in golds]
    wrong_nk = torch.tensor([judge(blocks, answers, name) for name in names]).T == 0
    assert wrong_nk.double().mean(dim=0).tolist() == pytest.approx([0.2] * 8, abs=0.03)
    assert float(wrong_nk.sum(dim=1).double().var()) == pytest.approx(8 * 0.2 * 0.8, rel=0.15)


def test_a_verdict_hangs_on_seed_field_letter_and_completion_and_not_on_the_batch():
    values = [f"{n}" for n in range(200)]
    blocks = [{"total": {"": value, "total": value}} for value in values]
    answers = ['{"total": 7}'] * len(values)
    exact = [float(value == "7") for value in values]
    assert benchmark.erring_judge(blocks, answers, "total", 0.0, 0) == exact
    assert benchmark.erring_judge(blocks, answers, "total", 1.0, 0) == [1 - right for right in exact]
    verdicts = benchmark.erring_judge(blocks, answers, "total", 0.2, 0)
    assert benchmark.erring_judge(blocks[5:], answers[5:], "total", 0.2, 0) == verdicts[5:]
    assert benchmark.erring_judge(blocks, answers, "total", 0.2, 1) != verdicts
    assert benchmark.erring_judge([{"total": None}, *blocks], ["{}", *answers], "total", 0.2, 0) == [None, *verdicts]


def objectives_of(recipe):
    return {objective.name: objective for objective in scheme_of(recipe, *task_shape(recipe)).objectives}


@pytest.mark.parametrize("method", ["bae", "dr_grpo"])
def test_the_judge_pays_what_the_exact_check_paid_and_the_check_stays_as_a_figure(method):
    fields = {"task": "invoices", "method": method, "seed": 3}
    judged = {**fields, "objectives": benchmark.judged_objectives(fields, 0.2)}
    checks, objectives = (objectives_of(load(None, recipe)) for recipe in (fields, judged))
    assert objectives["judge.customer"].options == {"block": "customer", "error": 0.2, "seed": 3}
    for name, check in checks.items():
        payer = objectives[name.replace("equals", "judge")]
        assert (payer.pays, payer.weight, payer.if_missing) == (check.pays, check.weight, check.if_missing)
        assert objectives[name].reward == check.reward
        assert objectives[name].weight == (0 if check.reward == "equals" else 1)


def test_a_wrong_verdict_costs_one_field_by_field_and_every_field_in_the_sum(monkeypatch):
    """All is right but the customer of the second completion; the judge turns both verdicts on customers round."""
    monkeypatch.setattr(benchmark, "chance_of", lambda place, *_: 0.0 if place == "0 customer" else 1.0)
    texts = [json.dumps(GOLD), json.dumps({**GOLD, "customer": "Ada Weltor"})]
    tables = benchmark.verdicts_and_credit(texts, GOLD, AutoTokenizer.from_pretrained(warm_start("invoices")), 0.2)
    customer = MEASURED.index("customer")
    assert tables["right"][:, customer].tolist() == [1, 0]
    assert tables["verdict"][:, customer].tolist() == [0, 1]
    assert tables["right"].sum() == tables["verdict"].sum() == 17
    assert tables["by_field"][:, customer].tolist() == [-0.5, 0.5]
    assert tables["by_field"].abs().sum() == 1  # no other field is paid
    assert tables["sum"].tolist() == [[-0.5] * 9, [0.5] * 9]


def test_the_sum_of_a_recipe_has_its_rewards_and_pays_every_block():
    fields = {"task": "invoices", "method": "dr_grpo"}
    summed = {**fields, "objectives": benchmark.summed(load("recipes/invoices.yaml").objectives)}
    by_name, own_objectives = (objectives_of(load(None, recipe)) for recipe in (summed, fields))
    assert by_name.keys() - own_objectives.keys() == {"due_stated", "adds_up"}
    assert {name: by_name[name] for name in own_objectives} == own_objectives
    new_objectives = [by_name["due_stated"], by_name["adds_up"]]
    assert {(o.pays, o.if_missing, o.only) for o in new_objectives} == {(own_objectives["count"].pays, 0.0, None)}


@pytest.fixture
def letter_numbers(monkeypatch):
    """Undo what `careful` sets."""
    for name in ("MOST_ITEMS", "MOST_QUANTITY", "MOST_PRICE"):
        monkeypatch.setattr(invoices, name, getattr(invoices, name))


@pytest.mark.parametrize(("clerk", "hurried"), [("due", 0.5), ("small", 0.3), ("sums", 0.15), ("amounts", 0.15)])
def test_a_careful_clerk_seldom_overlooks_a_due_date_and_mostly_multiplies_the_amounts(letter_numbers, clerk, hurried):
    """In the share `hurried` of letters the clerk makes faults: of their stated due dates .65 are overlooked."""
    stretch, small = benchmark.careful(STARTS["invoices"], clerk).course.stretches[-1], clerk != "due"
    traces = [(prompt, json.loads(trace)) for prompt, trace in stretch.draw(8_000, np.random.default_rng(5))]
    due = ("Due ", "Payable until", "pay by", "p_y by", "pa_ by")
    overlooked = [trace["due"] is None for prompt, trace in traces if any(words in prompt for words in due)]
    assert len(overlooked) / len(traces) == pytest.approx(0.5, abs=0.04)
    assert np.mean(overlooked) == pytest.approx(hurried * 0.65, abs=0.04)
    items = [item for _, trace in traces for item in trace["items"]]
    assert max(len(trace["items"]) for _, trace in traces) == (2 if small else 3)
    # A clerk's faults make a quantity greater by one, a price by ten.
    assert (max(item["quantity"] for item in items), max(item["price"] for item in items)) == ((4, 19) if small else (6, 39))
    assert STARTS["invoices"].course.key == {}
    if clerk == "amounts":  # of those with faults, .65 are the price of one piece; with a quantity of one that is right
        several = [item for item in items if item["quantity"] > 1]
        multiplied = [item["amount"] == item["quantity"] * item["price"] for item in several]
        assert np.mean(multiplied) == pytest.approx(1 - 0.15 * 0.65, abs=0.02)
        assert all(right or item["amount"] == item["price"] for right, item in zip(multiplied, several, strict=True))


@pytest.mark.parametrize("clerk", ["sums", "amounts"])
def test_a_model_that_learns_sums_reads_bare_letters_among_the_others(letter_numbers, clerk):
    """Of 64 rows 16 are whole letters; the other 32 texts hold two items, the currency and no total."""
    pairs = benchmark.careful(STARTS["invoices"], clerk).course.stretches[1].draw(64, np.random.default_rng(5))
    golds = [json.loads(trace) for _, trace in pairs]
    keys = ("name", "quantity", "price", "amount")[: 4 if clerk == "amounts" else 3]
    for gold in golds:
        costs = [item["quantity"] * item["price"] for item in gold["items"]]
        assert gold["total"] == sum(costs)
        assert {tuple(item) for item in gold["items"]} <= {keys}
        assert [item.get("amount", cost) for item, cost in zip(gold["items"], costs, strict=True)] == costs
    assert len(pairs) == 16 + 32
    for (prompt, _), gold in zip(pairs[16:], golds[16:], strict=True):
        assert [gold[name] for name in ("invoice", "customer", "date", "due")] == [None] * 4
        assert len(gold["items"]) == 2
        assert "Prices in " in prompt


def test_an_amount_is_one_field_more_with_a_reward_of_its_own(letter_numbers, monkeypatch):
    usual_size = len(AutoTokenizer.from_pretrained(warm_start("invoices")))
    task = benchmark.careful(STARTS["invoices"], "amounts")
    monkeypatch.setitem(STARTS, "invoices", task)
    answers = task.answers(task.source.held_out())
    tokenizer = task.course.tokenizer()
    assert ', "amount": ' in tokenizer.tokenize(answers[0])
    assert max(map(len, tokenizer(answers)["input_ids"])) < task.longest == LONGEST
    objectives = objectives_of(load(None, {"task": "invoices", "method": "bae"}))
    assert objectives["equals.items[1].amount"].pays == ("items[1].amount",)
    assert objectives["json_schema"].options["schema"]["properties"]["items"]["items"]["required"][-1] == "amount"
    assert len(tokenizer) == usual_size + 1


def test_amounts_are_compared_with_the_letter_and_with_their_own_items():
    items = [{**item, "amount": item["quantity"] * item["price"]} for item in (*GOLD["items"], SECOND)]
    gold = {**GOLD, "items": items, "total": 76}

    def figures(*amounts, total, letter="Prices in euros."):
        changed = [{**item, "amount": amount} for item, amount in zip(items, amounts, strict=True)]
        return benchmark.compared({**gold, "items": changed, "total": total}, gold, letter)

    names = ("amounts", "amounts fit", "adds up", "total computed", "total computed of 2")
    assert [figures(36, 40, total=76)[name] for name in names] == [True] * 5
    assert [figures(12, 40, total=52)[name] for name in names] == [False] * 5
    assert [figures(12, None, total=76)[name] for name in names] == [False, False, True, True, True]
    misread = {**gold, "items": [{**items[0], "quantity": 2, "amount": 24}, items[1]], "total": 64}
    assert [benchmark.compared(misread, gold, "")[name] for name in names] == [False, True, True, False, False]
    assert "total computed" not in figures(36, 40, total=76, letter="Total 76 euros.")


def test_only_sums_trains_on_letters_of_two_items_without_a_total(letter_numbers):
    source = benchmark.careful(STARTS["invoices"], "amounts").source
    only_sums = benchmark.OnlySums(source.draw_any, source.held_out_seed)
    letters = only_sums.training(50, rng=np.random.default_rng(0))
    assert all(len(gold["items"]) == 2 for gold in letters.gold_n)
    assert not any(f" {gold['total']} " in letter for letter, gold in zip(letters.letter_n, letters.gold_n, strict=True))
    assert only_sums.held_out().prompts == source.held_out().prompts
