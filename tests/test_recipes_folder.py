"""The recipes folder: every file loads and plans, the paper's settings reach the trainer, the embedded ones train."""

import json
import runpy
from pathlib import Path

import pytest
from datasets import Dataset

from spanwise import Batch, Vocabulary, credit_batch, read
from spanwise.commands.train.train import train, trainer_config
from spanwise.recipe import load, scheme_of
from spanwise.tasks import DIGITS_LAYOUT, Task
from spanwise.tasks.digits import TWICE_LAYOUT
from spanwise.tasks.embedded import build_invoice_tokenizer
from spanwise.tasks.hub import LAYOUTS, find_unasked
from spanwise.tasks.invoices import INVOICES_LAYOUT

pytestmark = [
    # transformers 5 warns of its own property, which TRL reads.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    # Eight completions of an untrained model may all be wrong.
    pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning"),
]

FOLDER = Path(__file__).parents[1] / "recipes"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
EMBEDDED = {"confidence.yaml", "laser.yaml", "two_attempts.yaml"}
PAPER = {"qwen_3b_confidence.yaml": 1024, "qwen_3b_two_attempts.yaml": 1024, "qwen_7b_confidence.yaml": 512}
CRITIC = {"ppo.yaml", "sae.yaml", "vapo.yaml", "qwen3_8b_sae.yaml", "qwen_32b_vapo.yaml"}
FIELDS, INVOICES = "fields.yaml", "invoices.yaml"
BLOCKWISE = [name for name in FILES if name not in CRITIC | {FIELDS, INVOICES}]


def planned(name: str, **overrides):
    recipe = load(FOLDER / name, overrides)
    layouts = {"digits": DIGITS_LAYOUT, "digits_twice": TWICE_LAYOUT, "invoices": INVOICES_LAYOUT, **LAYOUTS}
    return recipe, scheme_of(recipe, layouts[recipe.task], recipe.max_completion_length or 32)


def config_of(recipe, layout):
    rows = Dataset.from_dict({"prompt": ["1"] * recipe.prompts, "answer": ["1"] * recipe.prompts})
    return trainer_config(recipe, Task("paper", str(recipe.model), rows, rows, layout, 4096))


def credit_by_block(filled, vocabulary, ids, answer):
    """The credit of each block for the completions of one prompt."""
    batch = Batch.jagged(ids, ["a prompt"] * len(ids), columns={"answer": [answer] * len(ids)})
    credit = credit_batch(read(batch, filled, vocabulary), batch, filled)
    return {name: credit.block_nk[:, k].tolist() for k, name in enumerate(filled.layout.names)}


@pytest.mark.parametrize("name", FILES)
def test_each_says_what_it_is_and_its_command(name) -> None:
    summary, command, *fields = (FOLDER / name).read_text().splitlines()
    assert summary.startswith("# ")
    assert f"train recipes/{name}" in command
    assert fields[0].startswith("task: ")
    assert load(FOLDER / name).output is None  # a new folder for every run
    assert name in EMBEDDED | set(PAPER) | CRITIC | {FIELDS, INVOICES}  # else it would be left untested below


@pytest.mark.parametrize("name", BLOCKWISE)
def test_each_pays_every_block_by_itself_or_all_with_one_number(name) -> None:
    recipe, filled = planned(name)
    first, last = filled.layout.names
    formats = [] if name in PAPER else ["format", "format"]  # the paper has no reward for the format
    assert [objective.pays for objective in filled.objectives] == [(first,), (last,), (first,), (last,)][: 2 + len(formats)]
    expected = "second_attempt" if "twice" in recipe.task or "attempts" in recipe.task else "brier"
    assert [objective.reward for objective in filled.objectives] == ["correct", expected, *formats]
    assert (filled.entry.name, filled.per) == ("bae_paper" if name in PAPER else "bae", "block")
    assert (filled.objectives[1].given, filled.objectives[1].baseline) == (("correct",), "outcome")
    _, one_number = planned(name, method="rlcr")  # a variant of each
    assert one_number.entry.kind == "completion"
    assert {frozenset(objective.pays) for objective in one_number.objectives} == {frozenset((first, last))}
    assert one_number.objectives[1].pays[0] == last  # the block it reads


def test_one_line_pays_sixteen_fields_and_the_prompt_asks_for_each() -> None:
    recipe, filled = planned(FIELDS)
    assert find_unasked(filled.layout, [str(recipe.instruction)]) == []
    assert "total" in find_unasked(filled.layout, [str(recipe.instruction).replace("total", "totals")])
    items = [f"items[{n}].{key}" for key in ("name", "quantity", "price") for n in range(4)]
    names = ["seller", "date", "currency", "total", *items]
    keys = {"items": {"items": {"required": ["name", "quantity", "price"]}}}
    schema = {"required": ["seller", "date", "currency", "total", "items"], "properties": keys}
    assert [(o.name, o.pays, o.weight, o.options) for o in filled.objectives] == [
        *((f"equals.{n}", (n,), 1.0, {"tag": n}) for n in names),
        ("json_schema", ("form",), 1.0, {"alone": True, "schema": schema}),
        ("count", ("form",), 1.0, {"path": "items"}),
    ]


def test_an_invented_item_costs_and_the_form_is_paid_once() -> None:
    """Two of four completions write a second item that the invoice does not have; all else is right."""
    _, filled = planned(FIELDS)
    item = '{"name": "tea", "quantity": 2, "price": 6}'
    head = '{"seller": "Ada", "date": "2026-01-02", "currency": "EUR", "total": 12, "items": ['
    right, invented, wrong = (f"{head}{items}]}}" for items in (item, f"{item}, {item}", item.replace("tea", "cup")))
    vocabulary = Vocabulary(tuple(bytes([byte]) for byte in range(256)))
    # 1 0 1 0, mean 1/2; a wrong value is no fault of the form.
    for texts, credit in (([right, invented] * 2, [0.5, -0.5] * 2), ([right, right, wrong, right], [0.0] * 4)):
        ids = [list(text.encode()) for text in texts]
        assert credit_by_block(filled, vocabulary, ids, right)["form"] == pytest.approx(credit)


LETTER = {
    "invoice": 4821, "customer": "Dana Weltor", "date": "2024-03-12", "due": "2024-03-26", "currency": "EUR",
    "items": [{"name": "blue lamp", "quantity": 3, "price": 9}], "total": 27,
}  # fmt: skip
NO_DUE_DATE = {**LETTER, "due": None}


def test_a_due_date_is_paid_for_being_stated_and_a_total_for_being_right_and_for_adding_up() -> None:
    (_, filled), tokenizer = planned(INVOICES), build_invoice_tokenizer()

    def letter_credit(records, gold):
        ids = tokenizer([json.dumps(record) for record in records])["input_ids"]
        return credit_by_block(filled, Vocabulary.from_tokenizer(tokenizer), ids, json.dumps(gold))

    # Choice: rewards 1 1 0 0, mean 1/2. Among the two dates: rewards 1 0, mean 1/2. Null is not charged for being no date.
    records = [LETTER, {**LETTER, "due": "2024-03-20"}, NO_DUE_DATE, NO_DUE_DATE]
    assert letter_credit(records, LETTER)["due"] == pytest.approx([0.5 + 0.5, 0.5 - 0.5, -0.5, -0.5])
    # Without a due date in the letter the choice is all: a date is wrong, and one null is like another.
    assert letter_credit(records, NO_DUE_DATE)["due"] == pytest.approx([-0.5, -0.5, 0.5, 0.5])
    # Right: 1 0 0 0, mean 1/4. Adds up with the object's own items: 1 1 0 0, mean 1/2.
    dearer = {**LETTER, "items": [{**LETTER["items"][0], "price": 8}], "total": 24}
    records = [LETTER, dearer, {**LETTER, "total": 24}, {**dearer, "total": 9}]
    assert letter_credit(records, LETTER)["total"] == pytest.approx([3 / 4 + 1 / 2, -1 / 4 + 1 / 2, -3 / 4, -3 / 4])


def test_the_rewards_of_the_letters_judge_objects_that_are_not_whole() -> None:
    rewards = runpy.run_path(str(FOLDER / "invoice_rewards.py"))
    dates = ["2024-03-26", "null", None]
    blocks = [{"due": None if date is None else {"": date, "due": date}} for date in dates]
    assert rewards["due_stated"](blocks, [json.dumps(LETTER)] * 3) == [1.0, 0.0, None]
    assert rewards["due_stated"](blocks, [json.dumps(NO_DUE_DATE)] * 3) == [0.0, 1.0, None]
    no_item = {"total": {"": "0", "total": "0"}}
    no_price = {**no_item, "items[0].quantity": {"": "2", "items[0].quantity": "2"}, "items[0].price": None}
    numbers = {"total": "10", "items[0].quantity": "2", "items[0].price": "5", "items[1].price": "7"}
    no_quantity = {path: {path: text} for path, text in numbers.items()}
    assert rewards["adds_up"]([no_item, no_price, no_quantity, {"total": None}]) == [0.0, 0.0, 0.0, None]


@pytest.mark.parametrize(("name", "steps"), PAPER.items())
def test_the_settings_of_table_4_reach_the_trainer(name, steps) -> None:
    recipe, filled = planned(name)
    config = config_of(recipe, filled.layout)
    assert config.per_device_train_batch_size * config.gradient_accumulation_steps == config.generation_batch_size == 2048
    assert (config.num_generations, config.max_completion_length, config.temperature) == (32, 4096, 1.0)
    assert (config.learning_rate, config.weight_decay) == (1e-6, 0.1)
    assert (config.adam_beta1, config.adam_beta2) == (0.9, 0.999)
    assert config.optim.startswith("adamw")
    assert (config.lr_scheduler_type, config.warmup_steps) == ("constant_with_warmup", 64)
    assert (config.use_adaptive_entropy, config.entropy_target, config.entropy_coef_delta) == (True, 0.2, 5e-4)
    assert (config.beta, config.max_steps) == (0.0, steps)
    assert recipe.model == f"Qwen/Qwen2.5-{'3B' if '3b' in name else '7B'}-Instruct"


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")
def test_checkpointing_is_on_if_the_recipe_says_so_in_the_old_word_or_the_new() -> None:
    def is_on(**trainer):
        recipe, filled = planned("confidence.yaml", trainer=trainer)
        return config_of(recipe, filled.layout).gradient_checkpointing

    assert [is_on(), is_on(gradient_checkpointing=True)] == [False, True]


@pytest.mark.parametrize("name", sorted(CRITIC))
def test_recipes_with_a_critic_pay_the_solution_alone(name) -> None:
    recipe, filled = planned(name)
    assert filled.value_names == ("return",)
    assert [(o.reward, o.pays, o.if_missing) for o in filled.objectives] == [("correct", ("solution",), 0.0)]
    critic = recipe.modes["critic"]
    assert critic.gae_lambda_value == 1.0
    assert 0 < critic.policy_training_start_step < recipe.steps
    if "vapo" in name:
        assert (recipe.method, set(filled.options)) == ("gae", {"length_adaptive_alpha"})
    else:
        segments = {"threshold": 0.2, "boundary": "start"} if "sae" in name else {}
        assert (recipe.method, filled.options) == ("sae" if segments else "gae", {**segments, "lam": 0.95})


@pytest.mark.parametrize(
    ("name", "size", "rates", "clips", "temperature"),
    [("qwen3_8b_sae.yaml", 8, (1e-6, 1e-5), (0.2, 0.2), 0.6), ("qwen_32b_vapo.yaml", 16, (1e-6, 2e-6), (0.2, 0.28), 1.0)],
)
def test_what_is_known_of_both_papers_reaches_the_trainer(name, size, rates, clips, temperature) -> None:
    recipe, filled = planned(name)
    config = config_of(recipe, filled.layout)
    assert (config.num_generations, config.generation_batch_size) == (size, 512 * size)
    assert (config.max_completion_length, config.temperature) == (8192, temperature)
    assert (config.learning_rate, recipe.modes["critic"].learning_rate) == rates
    assert (config.epsilon, config.epsilon_high or config.epsilon) == clips
    assert (config.beta, config.entropy_coef, config.use_adaptive_entropy) == (0.0, 0.0, False)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Step 0. <:UserWarning")  # a policy of two steps writes no tags, which is a warning
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("confidence.yaml", "bae"), ("two_attempts.yaml", "bae"), ("two_attempts.yaml", "rlcr"), ("ppo.yaml", "gae"),
        ("sae.yaml", "sae"), ("vapo.yaml", "gae"),
    ],
)  # fmt: skip
def test_embedded_recipes_train(name, method, tmp_path) -> None:
    small = {"steps": 1, "prompts": 2, "group_size": 4, "start_steps": 2, "eval_prompts": 4, "eval_samples": 2}
    if "critic" in load(FOLDER / name).modes:
        small["critic"] = {"learning_rate": 1e-3}
    recipe = load(FOLDER / name, {**small, "report": False, "method": method, "output": str(tmp_path / "run")})
    summary = train(recipe)
    assert (summary["method"], summary["task"], summary["steps"]) == (method, recipe.task, 1)
    assert summary["final"]["refusal_rate"] is not None
    assert ("second_accuracy" in summary["final"]) == (recipe.task == "digits_twice")
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert (tmp_path / "run" / "critic" / "model.safetensors").is_file() == ("critic" in recipe.modes)


def test_the_script_that_writes_the_papers_prompts_reads_the_last_box() -> None:
    script = runpy.run_path(str(FOLDER / "math_dapo.py"))
    boxed = script["boxed"]
    assert boxed(r"first \boxed{1}, then $\boxed{\frac{1}{2}}$.") == r"\frac{1}{2}"
    # MATH has these forms, too.
    assert (boxed(r"so $x = \boxed 3$."), boxed(r"$\boxed{1}$, or \fbox{7} in all")) == ("3", "7")
    assert boxed(r"nothing \boxed{open") == boxed("no box at all") == ""
    rows = Dataset.from_dict({"problem": [" a? ", "b?", "c?"], "solution": [r"so \boxed{ {2} }", "?", r"\boxed{7}"]})
    questions = script["questions"](rows, question="problem", solution="solution", box=True)
    assert questions.to_dict() == {"question": ["a?", "c?"], "answer": [" {2} ", "7"]}
    plain = script["questions"](rows, question="problem", solution="problem", box=False)
    assert plain["answer"][:] == ["a?", "b?", "c?"]
