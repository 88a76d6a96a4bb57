"""`Objective`: what may be written, what it becomes, and the sentence for everything else."""

import functools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from spanwise.errors import RecipeError
from spanwise.objective import Objective, families, function_name


def solved(text, *, columns):
    return [True] * len(text)


async def waits(blocks):
    return []


def test_one_name_is_one_name_and_not_its_letters_and_numbers_become_floats(unchecked_shapes):
    objective = Objective("brier", pays="report", given="correct")
    assert (objective.pays, objective.given, objective.outcomes) == (("report",), ("correct",), ("correct",))
    several = Objective("brier", pays=["a", "b"], given=["correct", solved, "pkg.mod:f"])
    assert (several.pays, several.given) == (("a", "b"), ("correct", solved, "pkg.mod:f"))
    assert several.outcomes == ("correct", f"{__name__}:solved", "pkg.mod:f")
    assert Objective("brier", pays="a", given=solved).outcomes == (f"{__name__}:solved",)
    assert Objective("brier", pays="a", given=None).given == Objective("brier", pays="a").given == ()
    objective = Objective("correct", pays="a", weight=Fraction(1, 4), if_missing=np.float32(-1))
    numbers = objective.weight, objective.if_missing
    assert (numbers, [*map(type, numbers)]) == ((0.25, -1.0), [float, float])


def test_a_changed_copy_is_checked_too():
    fields = {"given": ["correct", "complete"], "baseline": "outcome", "back_off": False, "name": "q"}
    objective = Objective("brier", pays="a", **fields)
    assert replace(objective, weight=3.0) == Objective("brier", pays="a", weight=3.0, **fields) != objective
    with pytest.raises(RecipeError, match="needs an outcome in 'given'"):
        replace(objective, given=())
    with pytest.raises(AttributeError):
        objective.weight = 1.0


def test_a_function_is_called_as_recipes_write_it_and_more_than_three_parts_of_a_reward_are_one_family():
    assert function_name(math.sqrt) == "math:sqrt"
    with pytest.raises(RecipeError, match="has no name"):
        function_name(functools.partial(solved, columns={}))
    assert Objective(solved, pays="a").name == "solved"
    names = ["equals.a", "equals.b", "equals.c", "equals.d", "form", "near.a", "near.b", "near.c"]
    assert families(names) == {"equals (4 parts)": names[:4], **{name: [name] for name in names[4:]}}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"reward": 3}, r"has reward: 3; write the name of a reward, or pass a function"),
        ({"given": waits}, r"has given: \(<function waits"),
        ({"given": ["correct", dict]}, r"has given: \('correct', <class 'dict'>\)"),
        ({"name": 3}, r"has name: 3; a name is text"),
        ({"pays": []}, r"'brier' pays no block; name at least one in 'pays'"),
        ({"pays": ["a", 1]}, r"'brier' has pays: \('a', 1\); write names of blocks: 'pays: \[solution\]'"),
        ({"given": 5}, r"'brier' has given: 5; write names of earlier objectives or outcomes, or 'module:function'\. In"),
        ({"given": ["a", "b", "a"]}, r"'brier' has 'a' twice in 'given'; name each outcome once"),
        ({"if_missing": False}, r"has if_missing: False; write a finite number, or leave the field out"),
        ({"if_missing": -math.inf}, r"has if_missing: -inf"),
        ({"back_off": 1, "given": "correct", "baseline": "outcome"}, r"has back_off: 1; write true or false"),
        ({"back_off": True}, r"'brier' has back_off: true, which needs the baseline 'outcome'; leave it out or write"),
        ({"back_off": False, "given": "correct", "baseline": "blended"}, r"has back_off: false, which needs the baseline"),
        ({"options": ["tag"]}, r"has options: \['tag'\]; write 'options: \{name: value\}'"),
        ({"baseline": "grup"}, r"no baseline 'grup'. Did you mean 'group'"),
        ({"scale": "sd"}, r"no scale 'sd'. Did you mean 'std'"),
        ({"baseline": "outcome"}, r"baseline 'outcome', which needs an outcome in 'given'"),
        ({"baseline": "blended", "given": []}, r"baseline 'blended', which needs"),
    ],
)
def test_what_a_field_cannot_mean_is_refused_with_what_to_write(unchecked_shapes, fields, sentence):
    with pytest.raises(RecipeError, match=sentence):
        Objective(**{"reward": "brier", "pays": "a", **fields})
