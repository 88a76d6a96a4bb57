"""Fields, repeated blocks and rewards of each block that cannot be what was meant."""

import functools
import json

import pytest

import trl_small
from border.case import case, check, command
from rollout_files import trl_file
from score_small import BYTES, byte_group
from spanwise import Layout, Objective, Scheme, read, setup_warnings

pytestmark = [*trl_small.THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]

PAIR = Layout(["name", "price"], segmenter="json")
WRITTEN = '{"title": "tea", "cost": 3}'
laid = case(Layout)
fields = functools.partial(laid, segmenter="json")
EQUALS = Objective("equals", each="*")
RUNS = Objective("runs", "all", options={"tag": "", "tests": "answer", "allow": True})
PRICE, WHOLE = Layout(["price"], segmenter="json"), Layout({"all": ["answer"]})


@case
def scheme(reward="equals", layout=PAIR, **options):
    return Scheme("bae", layout, [Objective(reward, **{"pays": "price", **options})])


def schema(schema, **options):
    return scheme("json_schema", options={"schema": schema, **options})


@case
def remarked(written=WRITTEN, gold='{"name": "tea", "price": 3}', layout=PAIR, objective=EQUALS):
    """What is said of the first batch of completions."""
    rule = Scheme("bae", layout, [objective])
    texts = [written] * 4 if isinstance(written, str) else written
    return "\n".join(setup_warnings(read(byte_group(*texts, answer=[gold] * 4), rule, BYTES), rule).values())


def credited(folder):
    (folder / "recipe.yaml").write_text(json.dumps({"layout": ["name", "price"], "segmenter": "json", "objectives": EACH}))
    file = trl_file(folder / "completions.parquet", [WRITTEN] * 4, answer=['{"name": "tea", "price": 3}'] * 4)
    return command("credit", file, "--recipe", folder / "recipe.yaml", "--methods", "recipe", "--output", "out")


@case
def resolved(folder, text):
    (folder / "recipe.yaml").write_text(text)
    return command("train", folder / "recipe.yaml")


EACH = [{"reward": "equals", "each": "*"}]
priced = functools.partial(remarked, layout=PRICE, gold='{"price": 3}')
OF_FIELDS = "start_steps: 1\nlayout: [name, price]\nsegmenter: json\nobjectives:\n"

CASES = {
    'Layout(["price"], segmenter="json"), and completions that call it `cost`': priced(),
    "JSON that ends before it closes, at the first batch": priced('{"name": "tea and'),
    "completions that were cut off before they write any tag, at the first batch": remarked(
        written=[f"I add {n} and 2" for n in range(4)], layout=WHOLE
    ),
    'Layout({"all": ["answer"]}), and completions that write <ответ>': remarked(written="<ответ>4</ответ>", layout=WHOLE),
    "The same in `spanwise credit`, of two fields": credited,
    "A layout of fields for a model that writes tags, at the first batch of a training": lambda folder: trl_small.trainer(
        folder, extra={"layout": PAIR, "objectives": [EQUALS]}
    ).train(),
    "A gold column whose objects never have the path of a field": remarked(
        written='{"name": "tea", "price": 3}', gold='{"name": "tea", "cost": 3}'
    ),
    "Tests of `runs` that define a function `check` and never call it": remarked(
        "def two(): return 2", gold="def check(f):\n    assert f() == 2\n", layout=Layout({"all": []}), objective=RUNS
    ),
    'Layout({"buyer": "buyer", "name": "buyer.name"}, segmenter="json")': fields({"buyer": "buyer", "name": "buyer.name"}),
    'Layout({"one": "price", "other": "price"}, segmenter="json")': fields({"one": "price", "other": "price"}),
    'Layout(["price."], segmenter="json")': fields(["price."]),
    'Layout({"step[*]": []}), nothing to look for': laid({"step[*]": []}),
    'Layout({"run": []}, segmenter="fixed"), nothing to look for': laid({"run": []}, segmenter="fixed"),
    'Layout(["items[*].parts[*]"], segmenter="json")': fields(["items[*].parts[*]"]),
    'Layout(["items[*]"], segmenter="json", most=0)': fields(["items[*]"], most=0),
    "`most: 0` in a recipe": resolved("most: 0\n"),
    "`most: 5` for the digits, whose layout repeats no block": resolved("most: 5\n"),
    'Layout({"plan": "Plan", "answer": "Answer"}, segmenter="markdown", prefilled="Plan")': laid(
        {"plan": "Plan", "answer": "Answer"}, segmenter="markdown", prefilled="Plan"
    ),
    'Layout({"plan": "plan", "code": "code"}, prefilled="code")': laid({"plan": "plan", "code": "code"}, prefilled="code"),
    'Objective("equals", each="item[*]") for fields called otherwise': scheme(
        each="item[*]", layout=Layout(["items[*]", "price"], segmenter="json", most=2)
    ),
    'Objective("equals", each="*") for a block of two tags': scheme(each="*", layout=Layout({"price": ["plan", "price"]})),
    'Objective("equals", pays="price", given="earlier", baseline="outcome") without `each`': scheme(
        given="earlier", baseline="outcome"
    ),
    "A reward function with `each` that does not ask which block it is for": scheme(
        lambda blocks: [1.0], each="*", name="one_number"
    ),
    "`format`, the price on malformed tags, for fields of JSON": scheme("format"),
    "`{reward: near, pays: [price], options: {rel: 1%}}`": resolved(
        OF_FIELDS + "- {reward: near, pays: [price], options: {tag: price, rel: 1%}}\n"
    ),
    "`runs`, which executes what the model wrote, without permission": scheme("runs", options={"tag": "price"}),
    "`runs` with a memory in megabytes": scheme("runs", options={"tag": "price", "allow": True, "memory": 512}),
    "`runs` with a deadline of 0": scheme("runs", options={"tag": "price", "allow": True, "deadline": 0}),
    "`log_score` with clip: 0.6": scheme("log_score", options={"tag": "price", "of": "equals", "clip": 0.6}),
    "`format` with a tag that the layout lacks": scheme(
        "format", layout=Layout(["name", "price"]), options={"tags": ["name", "prize"]}
    ),
    "`format` for a block that may be repeated": scheme("format", layout=Layout({"step[*]": "step"}, most=2), pays="*"),
    "`overlong` without its lengths": scheme("overlong"),
    "`json_schema` with a schema that is none": schema({"properties": {"price": {"type": "nubmer"}}}),
    "`json_schema` of one field that must stand alone": schema({"type": "object"}, tag="price", alone=True),
    "`json_schema` with a `$ref` to another machine": schema({"$ref": "https://example.com/order.json"}),
    "`json_schema` with a pattern that is none, in a part that a `$ref` leads to": schema(
        {"items": {"$ref": "#/code"}, "code": {"pattern": "[a-"}}
    ),
    "`json_schema` with patterns of keys that are none together": schema(
        {"patternProperties": {"(?P<key>a)": {}, "(?P<key>b)": {}}}
    ),
    "`json_schema` with a `$ref` that leads back to itself": schema({"anyOf": [{"$ref": "#"}]}),
    "`json_schema` with a file that is not there": schema("order.json"),
}

test = check(__doc__, CASES)
