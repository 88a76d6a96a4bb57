"""Fields, repeated blocks and rewards of each block that cannot be what was meant."""

import json

import pytest

import trl_small
from border.case import Case, check, command
from rollout_files import trl_file
from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, read
from spanwise.explain import setup_warnings

pytestmark = [*trl_small.THIRD_PARTY, pytest.mark.usefixtures("unchecked_shapes")]

BYTES = Vocabulary(tuple(bytes([byte]) for byte in range(256)))
PAIR = Layout(["name", "price"], segmenter="json")
WRITTEN = '{"title": "tea", "cost": 3}'


def laid_out(blocks, **more):
    return lambda folder: Layout(blocks, **more)


def scheme(reward="equals", layout=PAIR, **fields):
    return lambda folder: Scheme("bae", layout, [Objective(reward, **{"pays": "price", **fields})])


def remarked(written=WRITTEN, gold='{"name": "tea", "price": 3}', layout=PAIR):
    """What is said of the first batch of completions."""

    def run(folder):
        rule = Scheme("bae", layout, [Objective("equals", each="*")])
        texts = [written] * 4 if isinstance(written, str) else written
        batch = Batch.jagged([list(text.encode()) for text in texts], [0] * 4, columns={"answer": [gold] * 4})
        return "\n".join(setup_warnings(read(batch, rule, BYTES), rule).values())

    return run


def trained(folder):
    """One step of the real trainer, whose completions are made of tags, on fields."""
    objectives = [Objective("equals", each="*")]
    trl_small.trainer(folder, extra={"layout": PAIR, "objectives": objectives}).train()


def credited(folder):
    (folder / "recipe.yaml").write_text(json.dumps({"layout": ["name", "price"], "segmenter": "json", "objectives": EACH}))
    file = trl_file(folder / "completions.parquet", [WRITTEN] * 4, answer=['{"name": "tea", "price": 3}'] * 4)
    return command("credit", file, "--recipe", folder / "recipe.yaml", "--methods", "recipe", "--output", "out")


def resolved(text):
    def run(folder):
        (folder / "recipe.yaml").write_text(text)
        return command("train", folder / "recipe.yaml")

    return run


def one_number(blocks):
    return [1.0 for _ in blocks]


EACH = [{"reward": "equals", "each": "*"}]
OF_FIELDS = "layout: [name, price]\nsegmenter: json\nobjectives:\n"

CASES = [
    Case(
        'Layout(["price"], segmenter="json"), and completions that call it `cost`',
        remarked(layout=Layout(["price"], segmenter="json"), gold='{"price": 3}'),
        "'price' is in 0 of 4 completions; they do contain 'cost' (4), 'title' (4). The layout asks for it, so what is read "
        "there earns nothing. Ask for this in the prompt, or write the layout of what the model writes.",
    ),
    Case(
        "JSON that ends before it closes, at the first batch",
        remarked(written='{"name": "tea and', layout=Layout(["price"], segmenter="json"), gold='{"price": 3}'),
        "'price' is in 0 of 4 completions; ... The layout asks for it, so what is read there earns nothing. 4 of 4 end before a "
        "part of them closes. If they were cut off, set the longest length of a completion up (max_completion_length, in verl "
        "data.max_response_length), or ask for shorter ones; if not, ask for this in the prompt.",
    ),
    Case(
        "completions that were cut off before they write any tag, at the first batch",
        remarked(written=[f"I add {n} and 2" for n in range(4)], layout=Layout({"all": ["answer"]})),
        "<answer> is in 0 of 4 completions; ... The layout asks for it, so what is read there earns nothing. 4 of 4 differ and "
        "end after 13 tokens, as none is longer. If they were cut off, set the longest length of a completion up "
        "(max_completion_length, in verl data.max_response_length), or ask for shorter ones; if not, ask for these tags in the "
        "prompt.",
    ),
    Case(
        'Layout({"all": ["answer"]}), and completions that write <ответ>',
        remarked(written="<ответ>4</ответ>", layout=Layout({"all": ["answer"]})),
        "<answer> is in 0 of 4 completions; they do contain <ответ> (4). The layout asks for it, ...",
    ),
    Case(
        "The same in `spanwise credit`, of two fields",
        credited,
        "'name' is in 0 and 'price' is in 0 of 4 completions; they do contain 'cost' (4), 'title' (4). Give the "
        "layout that they were sampled with, ...",
    ),
    Case(
        "A layout of fields for a model that writes tags, at the first batch of a training",
        trained,
        "'name' is in 0 and 'price' is in 0 of 8 completions; json finds nothing in them. The layout asks for them, so what is "
        "read there earns nothing. ...",
    ),
    Case(
        "A gold column whose objects never have the path of a field",
        remarked(written='{"name": "tea", "price": 3}', gold='{"name": "tea", "cost": 3}'),
        "Objective 'equals.price' has no reward for any of 4 completions (4 error), so it trains nothing. In the column 'answer' "
        "there is no value for 'price' that can be read; look at one completion and its columns.",
    ),
    Case(
        'Layout({"buyer": "buyer", "name": "buyer.name"}, segmenter="json")',
        laid_out({"buyer": "buyer", "name": "buyer.name"}, segmenter="json"),
        "Blocks 'name' and 'buyer' overlap: 'buyer.name' lies inside 'buyer', and a token belongs to one block. Name the fields "
        "of 'buyer' one by one, or leave one of the two out.",
    ),
    Case(
        'Layout({"one": "price", "other": "price"}, segmenter="json")',
        laid_out({"one": "price", "other": "price"}, segmenter="json"),
        "Blocks 'one' and 'other' overlap: 'price' is the same as 'price', ...",
    ),
    Case(
        'Layout(["price."], segmenter="json")',
        laid_out(["price."], segmenter="json"),
        "'price.' is no path of JSON, which begins at a key of an object; write price, buyer.name, items[0], items[*].price or "
        '["a.b"].',
    ),
    Case(
        'Layout({"step[*]": []}), nothing to look for',
        laid_out({"step[*]": []}),
        "The repeated block 'step[*]' has no mark to look for; give it one, such as step[*]: [step].",
    ),
    Case(
        'Layout(["items[*].parts[*]"], segmenter="json")',
        laid_out(["items[*].parts[*]"], segmenter="json"),
        "Block 'items[*].parts[*]' has [*] twice; write one of the two as a number, such as items[0].parts[*].",
    ),
    Case(
        'Layout(["items[*]"], segmenter="json", most=0)',
        laid_out(["items[*]"], segmenter="json", most=0),
        "most is 0; it is how many blocks a repeated block becomes: a whole number, at least 1.",
    ),
    Case(
        "`most: 0` in a recipe",
        resolved("most: 0\n"),
        "Error: most is 0, and must be at least 1 (number of blocks that a repeated block such as items[*] becomes)",
    ),
    Case(
        'Layout({"plan": "plan", "code": "code"}, prefilled="code")',
        laid_out({"plan": "plan", "code": "code"}, prefilled="code"),
        "The prefilled tag 'code' must be the first tag of the first block, which is 'plan'.",
    ),
    Case(
        'Objective("equals", each="item[*]") for fields called otherwise',
        scheme(each="item[*]", layout=Layout(["items[*]", "price"], segmenter="json", most=2)),
        "There is no block 'item[*]'. Did you mean 'items[1]'? Known: items[0], items[1], price.",
    ),
    Case(
        'Objective("equals", each="*") for a block of two tags',
        scheme(each="*", layout=Layout({"price": ["plan", "price"]})),
        "Objective 'equals' is for each block, and block 'price' is made of plan, price; say which part it reads, as in options: "
        "{tag: plan}.",
    ),
    Case(
        'Objective("equals", pays="price", given="earlier", baseline="outcome") without `each`',
        scheme(given="earlier", baseline="outcome"),
        "Objective 'equals' is given 'earlier', which only objectives with 'each' know.",
    ),
    Case(
        "A reward function with `each` that does not ask which block it is for",
        scheme(one_number, each="*"),
        "Objective 'one_number' is for each block, but its reward function is not told which: all would get the same "
        "number. Give it a parameter 'block', the name of the block: def f(blocks, block).",
    ),
    Case(
        "`format`, the price on malformed tags, for fields of JSON",
        scheme("format"),
        "Objective 'format': the reward 'format' judges what tags find, and block 'price' is found by json. Use a reward of its "
        "content, such as json_schema, or a function of your own.",
    ),
    Case(
        "`{reward: near, pays: [price], options: {rel: 1%}}`",
        resolved(OF_FIELDS + "- {reward: near, pays: [price], options: {tag: price, rel: 1%}}\n"),
        "The option 'rel' of reward 'near' is '1%'; it must be a number, at least 0.",
    ),
    Case(
        "`runs`, which executes what the model wrote, without permission",
        scheme("runs", options={"tag": "price"}),
        "The reward 'runs' executes on this machine what a model wrote, and limits of time and memory are no sandbox: it can read, "
        "send and delete whatever you can. Run it in a container that has nothing to lose and no network, and say so: options: "
        "{allow: true}.",
    ),
    Case(
        "`overlong` without its lengths",
        scheme("overlong"),
        "The reward 'overlong' has longest None and buffer None; give both in tokens, with 0 < buffer <= longest, for example "
        "options: {longest: 4096, buffer: 1024}.",
    ),
    Case(
        "`json_schema` with a schema that is none",
        scheme("json_schema", options={"schema": {"properties": {"price": {"type": "nubmer"}}}}),
        "The schema of reward 'json_schema' is none: 'nubmer' is not valid under any of the given schemas (at "
        "properties/price/type).",
    ),
    Case(
        "`json_schema` of one field that must stand alone",
        scheme("json_schema", options={"schema": {"type": "object"}, "tag": "price", "alone": True}),
        "The reward 'json_schema' has tag 'price' and alone, which is about text around the JSON of a whole completion; leave one "
        "of them out.",
    ),
    Case(
        "`json_schema` with a `$ref` to another machine",
        scheme("json_schema", options={"schema": {"$ref": "https://example.com/order.json"}}),
        "The schema of reward 'json_schema' is none: its $ref 'https://example.com/order.json' leads nowhere; nothing is fetched, "
        "so put what it means under $defs.",
    ),
    Case(
        "`json_schema` with a pattern that is none, in a part that a `$ref` leads to",
        scheme("json_schema", options={"schema": {"items": {"$ref": "#/code"}, "code": {"pattern": "[a-"}}}),
        "The schema of reward 'json_schema' is none: '[a-' is not a 'regex' (at pattern).",
    ),
    Case(
        "`json_schema` with patterns of keys that are none together",
        scheme("json_schema", options={"schema": {"patternProperties": {"(?P<key>a)": {}, "(?P<key>b)": {}}}}),
        "The schema of reward 'json_schema' is none: '(?P<key>a)|(?P<key>b)' is no regular expression of Python (redefinition of "
        "group name 'key' as group 2; ...",
    ),
    Case(
        "`json_schema` with a `$ref` that leads back to itself",
        scheme("json_schema", options={"schema": {"anyOf": [{"$ref": "#"}]}}),
        "The schema of reward 'json_schema' is none: its $ref leads back to itself.",
    ),
    Case(
        "`json_schema` with a file that is not there",
        scheme("json_schema", options={"schema": "order.json"}),
        "The schema 'order.json' cannot be read: No such file or directory.",
    ),
]

test = check(CASES)
