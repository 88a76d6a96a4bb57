"""The fields: gold values by hand, the tokenizer, the warm start's traces, prompts that stay apart."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from field_kinds import KINDS as BY_NAME
from field_kinds import Chain, Total

from spanwise.errors import DataError, RecipeError
from spanwise.recipe import load, resolved, scheme_of
from spanwise.tasks import digits_task, task_layout
from spanwise.tasks.embedded import build_fields_tokenizer, embedded
from spanwise.tasks.fields import FIELDS_NOISE, FieldProblems, Fields, FieldsNoise
from spanwise.tasks.warm_start import _folder_name, shortened

PROMPT = "9_0_4_3_3_8_7_1_="
ONE = FieldProblems(np.array([[9, 0, 4, 3, 3, 8, 7, 1]]), np.array([2]))
KINDS = [Fields(16), Chain(16), Total(9)]


def test_gold_values_are_those_worked_out_by_hand() -> None:
    assert ONE.prompts == [PROMPT]
    # larger(9, 0), hidden, copy 4, smaller(3, 3), look-up of 8, parity of 1, rest of 7 by 3, larger(3, 7), copy 9, look-up of 0,
    # smaller(4, 8), parity of 3, rest of 1 by 3, larger(8, 1), copy 3, look-up of 7; the table is 4719062853
    expected = [9, 2, 4, 3, 5, 1, 1, 7, 9, 4, 4, 1, 1, 8, 3, 8]
    assert list(json.loads(Fields(16).answers(ONE)[0]).values()) == expected
    # 9, +0, +4, +3, +3, +8, +7, +1, and again from the first digit: +9, +0
    assert Chain(10).values(ONE).tolist() == [[9, 9, 3, 6, 9, 7, 4, 5, 4, 4]]
    # copy 9, then the rests of 0, 4 and 3 by 3: 0, 1, 0
    assert Total(5).answers(ONE) == ['{"a": 9, "b": 0, "c": 1, "d": 0, "total": 0}']
    slip = np.array([[False, True, False]]), np.array([[0, 5, 0]])  # later fields go on from what leaves its rule
    assert Chain(3).values(ONE, slip).tolist() == [[9, 5, 9]]  # 5 + 4
    assert Total(3).values(ONE, slip).tolist() == [[9, 5, 4]]  # 9 + 5 = 14
    for count in range(1, 16):  # fewer fields are the first of more
        assert Fields(count).values(ONE).tolist() == KINDS[0].values(ONE)[:, :count].tolist()


def test_fields_know_their_names_and_what_cannot_be_known() -> None:
    assert (Fields(3).names, Fields(3).knowable, Fields(1).knowable) == (("a", "b", "c"), ("a", "c"), ("a",))
    assert Chain(3).knowable == ("a", "b", "c")
    assert Total(3).names == Total(3).knowable == ("a", "b", "total")
    for kind, count, limits in (("independent", 17, "1 to 16"), ("chain", 0, "1 to 16"), ("total", 1, "2 to 9")):
        with pytest.raises(DataError, match=f"'{kind}' has {limits}"):
            BY_NAME[kind](count)


@pytest.mark.parametrize("fields", KINDS)
def test_the_tokenizer_gives_a_token_to_each_key_and_value_and_loses_nothing(fields) -> None:
    tokenizer = build_fields_tokenizer()
    text = fields.answers(ONE)[0]
    ids = tokenizer(PROMPT + text)["input_ids"]
    assert tokenizer.decode(ids) == PROMPT + text
    assert tokenizer.unk_token_id not in ids
    assert len(ids) == 17 + 2 * fields.count + 1
    values = [int(tokenizer.decode([token])) for token in ids[18::2]]
    assert values == list(json.loads(text).values())
    assert fields.longest == 2 * fields.count + 2  # and the end


def test_traces_follow_the_rules_as_often_as_the_noise_says() -> None:
    fields, rng = Fields(4), np.random.default_rng(1)
    problems = fields.source.draw(8000, rng=rng)
    traces = fields.traces(problems, FieldsNoise(right=(0.5, 1.0), astray=0.0), rng=rng)
    values = np.array([list(json.loads(trace).values()) for trace in traces])
    share = (values == fields.values(problems)).mean(axis=0)
    assert share == pytest.approx([0.55, 0.1, 0.55, 1.0], abs=0.02)  # b is a guess, whatever the noise says
    always = FieldsNoise(right=(1.0,), astray=1.0)  # what goes astray is the digit four places on
    assert Fields(3).traces(ONE, always, rng=rng) == ['{"a": 3, "b": 8, "c": 7}']  # d_4, d_5, d_6
    assert Chain(3).traces(ONE, always, rng=rng) == ['{"a": 9, "b": 9, "c": 3}']  # never a chain


def test_batches_of_the_warm_start_guess_as_often_as_stated() -> None:
    tokenizer, fields, rng = build_fields_tokenizer(), Chain(3), np.random.default_rng(20_263)
    ids_nt, length_n = embedded(fields).course.stretches[1].batch(tokenizer, 1000, rng)
    (prompt_length,) = set(length_n.tolist())
    assert (tuple(ids_nt.shape), prompt_length) == ((1000, 17 + fields.longest), 17)
    prompts = tokenizer.batch_decode(ids_nt[:, :prompt_length])
    values = np.array(tokenizer.batch_decode(ids_nt[:, 18:19]), dtype=int)
    right = np.array([int(prompt[0]) for prompt in prompts]) == values
    assert right.mean() == pytest.approx(0.1 + 0.9 * FIELDS_NOISE["fields"].right[0], abs=0.05)
    assert Chain.source.held_out().digit_nd[:, 1:].max() == 4  # chains held out have small steps


def test_every_kind_and_number_has_a_warm_start_of_its_own_and_a_task(tmp_path) -> None:
    settings, fields = replace(shortened(1), batch=4), Total(3)
    task = digits_task(fields, train_size=20, cache_folder=tmp_path, settings=settings)
    assert (task.name, task.max_completion_length, task.layout.names) == ("fields-total-3", 8, ("form", "a", "b", "total"))
    for row in task.train:
        a, b = int(row["prompt"][0]), int(row["prompt"][2]) % 3
        assert json.loads(row["answer"]) == {"a": a, "b": b, "total": (a + b) % 10}
    assert json.loads(Path(task.model, "warm_start.json").read_text())["fields"] == {"kind": "total", "count": 3}
    names = {_folder_name(embedded(kind).course, 1, 0, settings) for kind in (fields, Chain(3), Total(2))}
    assert len(names) == 3
    assert Path(task.model).name in names


def test_a_recipe_rewards_each_field_and_pays_the_form_for_all() -> None:
    recipe = load(None, {"task": "fields", "fields": 2})
    scheme = scheme_of(recipe, task_layout(recipe), 6)
    paid = [(o.name, o.pays, o.baseline) for o in scheme.objectives]
    assert paid == [("equals.a", ("a", "form"), "group"), ("equals.b", ("b", "form"), "group")]
    recipe = load(None, {"task": "fields", "fields": 2, "method": "grpo"})
    assert [o.pays for o in scheme_of(recipe, task_layout(recipe), 6).objectives] == [("form", "a", "b")] * 2
    assert load(None, resolved(recipe, scheme_of(recipe, task_layout(recipe), 6))).fields == 2
    for useless in ({"fields": 3}, {"task": "fields", "start": "hard"}):
        with pytest.raises(RecipeError):
            load(None, useless)
