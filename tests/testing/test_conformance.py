"""Every registered method, the segmenter and the built-in rewards under the public conformance suite."""

import importlib
import inspect
import pkgutil
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spanwise import credit
from spanwise.credit import METHODS, bae, dr_grpo
from spanwise.credit.registry import PROPERTIES
from spanwise.errors import RecipeError
from spanwise.layout import Layout
from spanwise.registry import register
from spanwise.segment import find_blocks
from spanwise.testing import (
    ConformanceError,
    check_estimator,
    check_reward,
    check_segmenter,
    small_vocabulary,
    texts,
    token_rows,
)
from spanwise.testing.estimators import BY_KIND

for module in pkgutil.iter_modules(credit.__path__):  # every file of the room, exported or not
    importlib.import_module(f"spanwise.credit.{module.name}")
pytestmark = pytest.mark.usefixtures("unchecked_shapes")  # they cost four fifths of the time
NAMES = sorted(name for name in METHODS if METHODS[name].estimator.__module__.startswith("spanwise."))
#: `make test` draws a third of the examples of `make test-long`.
thirds_of_examples = pytest.mark.parametrize("thirds", [1, pytest.param(3, marks=pytest.mark.long)])


@thirds_of_examples
@pytest.mark.parametrize("name", NAMES)
def test_method(name, thirds):
    check_estimator(name, examples=6 * thirds)


@pytest.mark.parametrize(
    ("name", "property_name"),
    [(name, p) for name in NAMES for p in METHODS[name].exceptions if p in BY_KIND[METHODS[name].kind]],
)
@pytest.mark.usefixtures("unshrunk_examples")
def test_declared_exceptions_are_real(name, property_name):
    method = METHODS[name]
    entries = {"reward_n": st.sampled_from([0.0, 0.125, 0.5, 1.0, 2.0])} if "negative" in method.exceptions else None
    with pytest.raises(ConformanceError, match=f"'{name}|{method.estimator.__name__}' breaks '{property_name}'"):
        check_estimator(method.estimator, kind=method.kind, properties=[property_name], inputs=entries, examples=1000)


@pytest.mark.parametrize("name", NAMES)
def test_docstring_has_every_part(name):
    text = inspect.getdoc(METHODS[name].estimator) or ""
    parts = ("Equation", "Args:", "Edge cases:", "Example:", ">>> ", "Reference:")
    assert [part for part in parts if part not in text] == []
    assert METHODS[name].summary.endswith(".")


@pytest.mark.parametrize("baseline", ["none", "batch", "group", "outcome"])
def test_bae_with_one_block_is_the_sequence_method(baseline):
    check_estimator("bae", options={"baseline": baseline}, properties=["one block"], sequence=dr_grpo)


def test_bae_with_every_baseline():
    check_estimator("bae", options={"leave_one_out": True}, examples=10)
    level = {"shift": "the reward is the credit", "constant": "as shift"}
    check_estimator(bae, exceptions=level, options={"baseline": "none"}, examples=10)
    borrowing = {"split": "it borrows from other prompts", "constant": "as split", "shift": "as split"}
    check_estimator(bae, options={"baseline": "blended"}, exceptions=borrowing, examples=10)


def test_slow_loop():
    def slow(reward_n, group_n):
        mates = [reward_n[(group_n == group) & ~reward_n.isnan()].double() for group in group_n]
        return torch.stack(
            [r - same.mean() if r == r else same.new_zeros(()) for r, same in zip(reward_n, mates, strict=True)]
        )

    check_estimator("dr_grpo", properties=["oracle"], oracle=slow)
    with pytest.raises(ConformanceError, match="breaks 'oracle'"):
        check_estimator("grpo", properties=["oracle"], oracle=slow)


#: `tests/fuzz` holds the other segmenters against their oracles.
SEGMENTERS_OF = {
    "tags": (Layout({"solution": ["answer"], "confidence": ["confidence"]}), (), {}),
    "tags, prefilled": (Layout({"first": ["answer"], "second": ["answer"]}, prefilled="answer"), (), {}),
    "tags, one block": (Layout({"all": []}), (), {}),
    "delimiters": (
        Layout({"a": "delimiters:<<...>>", "rest": []}, prefilled="<<...>>"),
        ("<<", ">>"),
        {"contiguous": "a block may lie in several pieces"},
    ),
}


@thirds_of_examples
@pytest.mark.parametrize("name", SEGMENTERS_OF)
def test_segmenters(name, thirds):
    layout, signs, exceptions = SEGMENTERS_OF[name]
    tags = ("answer", "confidence") if name.startswith("tags") else ()
    vocabulary = small_vocabulary(signs=signs)
    segmenter = partial(find_blocks, layout=layout, vocabulary=vocabulary)
    options = {"tags": tags, "signs": signs, "exceptions": exceptions, "examples": (7 if tags else 4) * thirds}
    check_segmenter(segmenter, vocabulary=vocabulary, **options)


def test_a_segmenter_by_probability():
    def cut_by_probability(ids_nt, mask_nt, logp_nt):
        layout = Layout({"s[*]": "low_probability:0.4"}, most=3)
        return find_blocks(ids_nt, mask_nt, layout=layout, vocabulary=small_vocabulary(), logp_nt=logp_nt)

    check_segmenter(cut_by_probability, examples=3)


EXACT = {"options": {"verify": "exact"}}
CONFIDENCE = {"pays": ["confidence"], "scored": {"correct": [0.0, 1.0, None]}}
TWO = Layout({"first": ["answer"], "second": ["answer"]})
REWARDS = {
    "correct": {"columns": {"answer": ["4", "0.7", "nan", "\\frac{1}{2}"]}, **EXACT},
    "brier": CONFIDENCE,
    "log_score": CONFIDENCE,
    "format": {"pays": ["solution", "confidence"]},
    "second_attempt": {"pays": ["second"], "layout": TWO, "columns": {"answer": ["4", "5"]}, **EXACT},
}


@thirds_of_examples
@pytest.mark.parametrize("reward", REWARDS)
def test_reward(reward, thirds):
    check_reward(reward, processes=reward == "brier", examples=9 * thirds, **REWARDS[reward])


def test_unknown_names_are_sentences():
    def warm(reward_n, group_n, *, temperature_n):
        return dr_grpo(reward_n, group_n) * temperature_n

    with pytest.raises(RecipeError, match="which values to test the argument 'temperature_n' with"):
        check_estimator(warm)
    check_estimator(warm, inputs={"temperature_n": st.sampled_from([0.5, 1.0, 2.0])}, examples=10)
    with pytest.raises(RecipeError, match=r"no property 'shfit'\. Did you mean 'shift'"):
        check_estimator("grpo", properties=["shfit"])
    with pytest.raises(
        RecipeError,
        match=r"ends in 'nk2', but only n, nm, nk, nt, s tell what a method credits\. "
        "Pass the kind of the method, for example kind=",
    ):
        check_estimator(lambda by_outcome_nk2, group_n: by_outcome_nk2)
    with pytest.raises(RecipeError, match=r"Method 'x': There is no property 'fast'"):
        register("x", kind="completion", paper="none", exceptions={"fast": "it is slow"})(dr_grpo)
    with pytest.raises(RecipeError, match="There is no method 'gropo'"):
        check_estimator("gropo")


def test_every_property_belongs_to_a_kind():
    assert {name for names in BY_KIND.values() for name in names} | {"negative"} == set(PROPERTIES)


@given(ids=token_rows(small_vocabulary()), text=texts(["a"]))
@settings(max_examples=50, deadline=None)
def test_tokens_spell_valid_text(ids, text):
    b"".join(small_vocabulary().pieces[i] for i in ids).decode()
    assert isinstance(text, str)
