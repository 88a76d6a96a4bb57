"""Objectives with `each`: the objectives they expand to, their credit, and that nothing is lost on the way to a file."""

import pytest
import torch
import yaml

from helpers import NAN, assert_close
from score_small import BYTES, byte_group
from spanwise import Layout, Objective, Scheme, advantages, credit_batch, metrics, read
from spanwise.errors import RecipeError
from spanwise.recipe import load, resolved, scheme_of
from spanwise.score.score import written_out

ITEMS = Layout(["name", "items[*]", "total"], segmenter="json", most=2)
PAIR = Layout(["a", "b"], segmenter="json")


def expanded(layout, *objectives):
    written = written_out([o if isinstance(o, Objective) else Objective("equals", **o) for o in objectives], layout)
    return [(o.name, o.pays, o.options.get("tag")) for o in written]


def test_a_pattern_is_every_block_it_matches_in_the_order_of_the_layout_and_pays_may_hold_one_too():
    def alone(*names):
        return [(f"equals.{name}", (name,), name) for name in names]

    assert expanded(ITEMS, {"each": "*"}) == alone("name", "items[0]", "items[1]", "total")
    items = [(f"item.items[{n}]", (f"items[{n}]",), f"items[{n}]") for n in (0, 1)]
    assert expanded(ITEMS, {"each": "items[*]", "name": "item"}) == items
    assert expanded(ITEMS, {"each": "total", "options": {"tag": "name"}}) == [("equals.total", ("total",), "name")]
    assert expanded(Layout({"prose": [], "price": "json:price"}), {"each": "*"}) == alone("price")  # the rest is no field
    assert expanded(Layout({"step[*]": "tags:step"}, most=2), {"each": "*"}) == alone("step[0]", "step[1]")

    items = ("items[0]", "items[1]", "total")
    mixed = expanded(ITEMS, {"each": "items[*]", "pays": ["items[*]", "total"]}, {"pays": ["total", "items[*]", "items[0]"]})
    paid = [("equals.items[0]", items), ("equals.items[1]", items), ("equals", ("total", "items[0]", "items[1]"))]
    assert [(name, pays) for name, pays, _ in mixed] == paid
    everything = expanded(PAIR, {"each": "*", "pays": "*"})  # as GDPO has it: each reward by itself, paid to all
    assert everything == [("equals.a", ("a", "b"), "a"), ("equals.b", ("a", "b"), "b")]
    assert Scheme("gdpo", PAIR, [Objective("equals", each="*", pays="*")]).names == ("equals.a", "equals.b")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_earlier_blocks_are_given_and_the_first_one_has_its_group(size):
    layout, names = Layout(list("abc")[:size], segmenter="json"), [f"equals.{name}" for name in "ab"]
    objectives = written_out([Objective("equals", each="*", given="earlier", baseline="outcome", back_off=True)], layout)
    earlier = [(), *[tuple(reversed(names[:n])) for n in (1, 2)]][:size]
    later = [(given, "outcome", True) for given in earlier[1:]]
    assert [(o.given, o.baseline, o.back_off) for o in objectives] == [((), "group", None), *later]
    both = written_out([Objective("equals", each="*", given=["complete", "earlier"], baseline="outcome")], layout)
    assert [(o.given, o.baseline) for o in both] == [(("complete", *given), "outcome") for given in earlier]


def why(blocks, block):
    """Reward a step by its length: -1 if it is empty, none if it is missing."""
    return [None if text[block] is None else float(len(text[block][block]) or -1) for text in blocks]


STEPS = Layout({"step[*]": "step"}, most=3)


def test_a_function_of_one_block_hears_which_and_an_absent_step_is_absent():
    scheme = Scheme("bae", STEPS, [Objective(why, each="step[*]"), Objective("listed", each="step[*]")])
    assert [o.options for o in scheme.objectives] == [{"block": f"step[{n}]"} for n in range(3)] * 2
    text = "<step>abc</step><step></step>"
    reading = read(byte_group(text, text, listed=[[0.1, 0.2, 0.3], [0.5, None]]), scheme, BYTES)
    expected = [[3, -1, NAN, 0.1, 0.2, NAN], [3, -1, NAN, 0.5, NAN, NAN]]
    assert_close(reading.scores.reward_nm, expected, 1e-12, equal_nan=True)
    for reward in (why, "listed"):
        chosen = Scheme("bae", STEPS, [Objective(reward, each="*", pays="step[2]", options={"block": "step[0]"})])
        assert [dict(o.options) for o in chosen.objectives] == [{"block": "step[0]"}] * 3


RECIPE = """
layout: [name, 'items[*].price', total]
segmenter: json
most: 2
objectives:
- {reward: equals, each: '*', given: earlier, baseline: outcome}
- {reward: 'steps:why', each: 'items[*].price', pays: ['items[*].price', total], name: why}
"""


def test_a_recipe_says_it_in_one_line_and_what_is_resolved_loads_as_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps.py").write_text("def why(blocks, block):\n    return [1.0 for _ in blocks]\n")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = load("recipe.yaml")
    scheme = scheme_of(recipe, PAIR, 32)
    prices = ("items[0].price", "items[1].price")
    assert scheme.layout.names == ("name", *prices, "total")
    assert scheme.names == (*(f"equals.{name}" for name in scheme.layout.names), *(f"why.{name}" for name in prices))
    assert scheme.objectives[3].given == ("equals.items[1].price", "equals.items[0].price", "equals.name")
    assert (scheme.objectives[5].pays, scheme.objectives[5].options) == ((*prices, "total"), {"block": prices[1]})
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(resolved(recipe, scheme), sort_keys=False))
    loaded = scheme_of(load("again.yaml"), PAIR, 32)
    assert loaded.plain() == scheme.plain()
    assert (loaded.layout, loaded.layout.most, loaded.layout.keys) == (scheme.layout, 2, scheme.layout.keys)
    assert [vars(o) for o in loaded.objectives] == [vars(o) for o in scheme.objectives]


@pytest.mark.parametrize(
    "layout",
    [
        PAIR, Layout(["a[*].b"], segmenter="json", most=3),
        Layout({"prose": [], "price": "json:price", "why": "tags:why"}),
        Layout({"price": ["json:price", "tags:price"], "rest": []}, most=5),
        Layout({"step[*]": ["step"]}, prefilled="step", most=2),
    ],
)  # fmt: skip
def test_a_layout_of_any_form_is_printed_as_what_it_is(layout):
    scheme = Scheme("bae", layout, [Objective("json_schema", "*", options={"schema": {}})])
    plain = yaml.safe_load(yaml.safe_dump(scheme.plain(), sort_keys=False))
    rebuilt = scheme_of(load(None, {key: value for key, value in plain.items() if value is not None}), PAIR, 32)
    assert rebuilt.layout == layout
    assert (rebuilt.layout.parts and rebuilt.plain()) == scheme.plain()


def test_a_function_that_takes_whatever_it_is_given_does_not_know_its_block():
    for function in (lambda completions, **columns: [], lambda solution_str, ground_truth, **columns: 1.0):
        with pytest.raises(RecipeError, match="does not know which block it scores"):
            Scheme("bae", PAIR, [Objective(function, each="*")])
        with pytest.raises(RecipeError, match="'criterion'"):
            Scheme("bae", PAIR, [Objective(function, "a", criteria=["It is short.", "It is true."])])


def test_a_function_of_one_completion_hears_its_block_or_sees_its_text():
    def place(solution_str, ground_truth, block):
        return float("ab".index(block))

    def number(solution_str, ground_truth):
        return float(solution_str.rstrip("}").rpartition(":")[2].rstrip(", "))

    objectives = [Objective(place, each="*"), Objective(number, each="*", options={"sees": "part"})]
    scores = read(byte_group('{"a": 1, "b": 2}', answer=["4"]), Scheme("bae", PAIR, objectives), BYTES).scores
    assert scores.reward_nm.tolist() == [[0.0, 1.0, 1.0, 2.0]]


def test_a_group_worked_out_by_hand():
    r"""Four completions: a right, right, wrong, wrong; b right, wrong, right, and left out.

    equals.a is 1 1 0 0 with mean 1/2. equals.b given a: of the two with a right 1 0, so \pm 1/2; of the two with a wrong there is
    one reward, whose stratum is then of one and gets 0.
    """
    scheme = Scheme("bae", PAIR, [Objective("equals", each="*", given="earlier", baseline="outcome")])
    texts = '{"a": 1, "b": 2}', '{"a": 1, "b": 9}', '{"b": 2, "a": 8}', '{"a": 8}'
    group = byte_group(*texts, answer=[texts[0]] * 4)
    reading = read(group, scheme, BYTES)
    assert_close(reading.scores.reward_nm, [[1, 1], [1, 0], [0, 1], [0, NAN]], 0, equal_nan=True)
    credit = credit_batch(reading, group, scheme)
    assert_close(credit.block_nk, [[0.5, 0.5], [0.5, -0.5], [-0.5, 0], [-0.5, 0]], 1e-12)
    # {"a": 1,_ is 9 bytes and "b": 2} 7; in the third {"b": 2,_ is 9 and "a": 8} 7; a block's credit is its tokens' sum.
    assert reading.length_nk.tolist() == [[9, 7], [9, 7], [7, 9], [8, 0]]
    expected = torch.tensor([[0.5 / 9] * 9 + [0.5 / 7] * 7, [0.0] * 9 + [-0.5 / 7] * 7])
    assert_close(advantages(credit, reading.spans, scheme)[[0, 2]], expected, 1e-7)
    logged = metrics(credit, reading, scheme)
    assert logged["credit/equals.b/reward_absent"] == 0.25
    assert {"credit/a/mean_abs", "credit/equals.a/singletons", "credit/equals.b/dead_strata"} <= set(logged)
