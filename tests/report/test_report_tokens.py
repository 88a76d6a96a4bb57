"""The data of the token view: it survives the coding, stays small, and no completion can reach the page as markup."""

import math
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import spanwise.report.tokens as code
from report_pages import Page, data_of, decoded
from report_pages import token_row as row
from rollouts_cases import trained_batch
from spanwise.errors import AlignmentError, DataError
from spanwise.report import TokenView
from spanwise.report.tokens import token_view
from spanwise.rollouts.rows import TokenRow, display_prompt, token_rows
from spanwise.segment import Vocabulary

STATIC = Path(code.__file__).parent / "static"
HOSTILE = [
    "<script>alert(1)</script>", "</script><script>x=1</script>", "<!--", "-->", "<img src=x onerror=x>", "\u2028\u2029",
    "\x00\x1b[31m",    "\u202e\u2066", "\u200b\ufeff", "a" + "\u0301" * 50, "\ud83d", "\udcc3", "\ude00\ud83d", '"\'&\\', "]]>",
    "{{ 7 * 7 }}", "{% raw %}",
]  # fmt: skip


def assert_numbers(entries, expected, digits):
    assert len(entries) == len(expected)
    for entry, number in zip(entries, expected, strict=True):
        if math.isnan(number):
            assert entry is None
        elif math.isinf(number):
            assert entry == ("Infinity" if number > 0 else "-Infinity")
        else:
            assert (entry == 0) == (number == 0)
            assert entry == pytest.approx(number, rel=0.5001 * 10 ** (1 - digits))
            assert float(f"{entry:.{digits}g}") == entry


def test_everything_survives_the_coding():
    dice = random.Random(3)
    awkward = [-0.0, 1e-12, -3e-300, 5e-324, 1e300, 123456.0, math.nan, math.inf, -math.inf, 0.1 + 0.2, -0.99995, 0.0]
    rows = []
    for n in range(7):
        size = dice.choice([0, 1, 5, 40])
        tokens = [dice.choice(["a", "b", " ", "\udcc3", *HOSTILE]) for _ in range(size)]
        numbers = {m: [dice.choice([*awkward, dice.gauss(0, 1)]) for _ in range(size)] for m in ("a", "b")}
        chances = None if n % 2 else [dice.random() for _ in range(size)]
        rows.append(row(tokens, prompt=f"prompt {n // 3} \ud800", advantages=numbers, probabilities=chances, step=n or None))
    rewards, statuses = {"brier": -0.123456, "correct": None}, {"brier": "ok", "correct": "timeout"}
    spans = {"solution": [(0, 2)], "confidence": [(9, 9)]}  # the second is absent
    rows[2] = row(["x", "y"], spans=spans, rewards=rewards, statuses=statuses, fault="missing")
    data = data_of(token_view(TokenView(("a", "b"), rows)))
    assert (data["methods"], data["objectives"], data["values"]) == (["a", "b"], ["correct", "brier"], [])
    assert data["steps"] == [None, 1, None, 3, 4, 5, 6]
    for n, expected in enumerate(rows):
        assert decoded(data["tokens"], n) == list(expected.tokens)
        assert decoded(data["prompts"], n) == [expected.prompt]
        assert decoded(data["faults"], n) == [expected.fault]
        assert decoded(data["statuses"], n) == [expected.statuses.get("correct", ""), expected.statuses.get("brier", "")]
        for m, method in enumerate(("a", "b")):
            assert_numbers(decoded(data["advantages"][m], n), expected.advantages[method], 4)
        if expected.probabilities is None:
            assert decoded(data["probabilities"], n) is None
        else:
            assert_numbers(decoded(data["probabilities"], n), expected.probabilities, 3)
    assert data["rewards"][:3:2] == [[1, None], [None, -0.1235]]
    assert data["spans"][2] == [["solution", 0, 2]]
    assert len(data["prompts"]["words"]) == 4  # "1+1=" and three others: what repeats is stored once


def test_the_scale_is_the_98th_percentile_of_what_is_not_zero():
    for numbers, scale in (
        ([n / 100 for n in range(1, 101)], 0.99),
        ([0.0] * 1000 + [-0.25, 0.125], 0.25),
        ([1.0] * 99 + [1000.0], 1.0),  # one outlier in a hundred does not bleach the others
        ([math.nan, math.inf, 0.0], 0.0),
    ):
        view = TokenView(("a",), [row(["x"] * len(numbers), advantages={"a": numbers})])
        assert data_of(token_view(view))["advantages"][0]["scale"] == scale


def test_hostile_completions_do_not_change_the_markup():
    def parsed(text):
        hostile = row([text] * 3, prompt=text, fault=text, rewards={text: 1.0}, statuses={text: text}, spans={text: [(0, 3)]},
                      advantages={text: [0.1, 0.2, 0.3]})  # fmt: skip
        html = str(token_view(TokenView((text,), [hostile])))
        assert decoded(data_of(html)["tokens"], 0) == [text] * 3
        return Page(html).elements, re.sub(r'\{"deflate":"[A-Za-z0-9+/=]*"\}', "", html)

    elements, around = parsed("plain")
    assert [tag for tag, _ in elements].count("script") == 1
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on") or name == "style"]
    for text in HOSTILE:
        assert parsed(text) == (elements, around)


def test_the_scripts_build_text_nodes_only():
    bad = r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|eval\(|Function\(|setAttribute\(.on|fetch|http"
    for script in STATIC.glob("*.js"):
        assert not re.search(bad, script.read_text()), script.name


def test_500_long_completions_stay_small(unchecked_shapes):
    dice = np.random.default_rng(0)
    words = [f"{'' if n % 3 else ' '}w{n:x}" for n in range(20_000)]
    rows = []
    for _ in range(250):
        ids = np.minimum(dice.zipf(1.25, 1000), 20_000) - 1  # no text repeats itself as little
        cut = int(dice.integers(300, 900))
        credit = {m: [float(dice.normal())] * cut + [float(dice.normal())] * (1000 - cut) for m in ("a", "b", "c")}
        values = np.cumsum(dice.normal(0, 0.02, 1000)) + 0.5
        chances = np.where(dice.random(1000) < 0.5, 1 - dice.exponential(0.005, 1000).clip(0, 1), dice.beta(2, 1, 1000))
        numbers = {"advantages": credit, "values": {"": values.tolist()}, "probabilities": chances.tolist()}
        rows.append(row([words[i] for i in ids], **numbers))
    html = token_view(TokenView(("a", "b", "c"), rows))
    assert 2 * len(html) < 2_000_000  # leaves 1 MB for the charts
    data = data_of(html)
    assert_numbers(decoded(data["values"][0], 7), rows[7].values[""], 2)
    assert [data["values"][0]["rounded"], data["advantages"][2]["rounded"]] == [True, False]
    assert_numbers(decoded(data["advantages"][2], 7), rows[7].advantages["c"], 4)


def test_what_does_not_fit_is_refused():
    for name, wrong in (
        *(("advantages", {"a": [1.0]}), ("values", {"": [1.0] * 3}), ("values", {"brier": [1.0]}), ("opens", {"": [1, 2]})),
        *(("probabilities", []), ("spans", {"end": [(1, 3)]}), ("spans", {"end": [(-1, 2)]})),
    ):
        with pytest.raises(AlignmentError, match="ompletion 2 "):
            token_view(TokenView(("a",), [row(["x"]), row(["x", "y"], **{name: wrong})]))
    for methods in ((), ("c",)):
        with pytest.raises(DataError):
            token_view(TokenView(methods, [row(["x"])]))
    assert "There are no completions to show." in token_view(TokenView(("a",), []))


def test_the_outcome_is_the_objective_that_is_named_and_no_other():
    for rewards, outcome, place in (
        ({"format": 1.0, "correct": 0.0}, "correct", 1),
        ({"format": 1.0, "correct": 0.0}, None, None),
        ({"format": 1.0, "correct": 0.5}, "correct", None),  # it never says right or wrong
        ({"format": 1.0, "correct": None}, "correct", None),
        ({"format": 1.0}, "correct", None),
    ):
        completion = row(["x"], rewards=rewards, statuses=dict.fromkeys(rewards, "ok"))
        assert data_of(token_view(TokenView(("a",), [completion], outcome)))["outcome"] == place


TABLE = trained_batch().recorded(step=3)


def test_rows_of_a_rollouts_table():
    tool, second, chat, _ = token_rows(TABLE, Vocabulary(tuple(f"t{index}".encode() for index in range(20))))
    assert second == TokenRow(
        prompt="1+1=", tokens=["t5", "t6"], advantages={"bae": [-0.25, -1.25]}, stop={"bae": -1.0},
        spans={"solution": [(0, 2)], "confidence": [(2, 2)]}, rewards={"correct": 0.0, "brier": None},
        statuses={"correct": "ok", "brier": "absent"}, fault="missing", step=3,
        credit={"bae": {"solution": -0.5, "confidence": None}}, stated={"correct": None, "brier": None}, group=4,
    )  # fmt: skip
    assert tool.advantages["bae"] == pytest.approx([0.5, math.nan, 0.25], nan_ok=True)  # what a tool wrote is not trained
    assert (chat.prompt, chat.fault) == ('user: say "é"\nnow', "missing, truncated")
    for prompt in ("[{not json", '[{"role": "user"}]', '[{"a":' + "[" * 100_000):  # no conversations
        assert display_prompt(prompt) == prompt


def test_a_missing_column_and_lengths_that_do_not_match_are_named():
    for column in ("prompt", "completion_ids", "trainable", "advantages/bae"):
        with pytest.raises(DataError, match=f"no column '{column}' in the rollouts, only "):
            token_rows(TABLE.drop_columns([column]), None)
    short = TABLE.drop_columns(["advantages/bae"]).append_column("advantages/bae", pa.array([[0.5] * 3, [0.5], [], []]))
    with pytest.raises(DataError, match="Completion 1 of the rollouts has 2 tokens and 1 values of 'advantages/bae'"):
        token_rows(short, None)


def test_what_repeats_most_has_the_shortest_code_and_there_may_be_more_texts_than_characters(monkeypatch):
    assert code._coded([[*"xyzz"], [*"zzy"]]) == {"words": ["z", "y", "x"], "codes": ['"!  ', "  !"]}
    points = code._MOST_WORDS - 1 + 32 + 2048
    assert (chr(points), points) == ("\U0010ffff", 0x10FFFF)
    monkeypatch.setattr(code, "_MOST_WORDS", 3)
    coded = code._coded([["a", "b", "b", "c", "d"], ["d", "a"]])
    words = [[coded["words"][ord(sign) - 32] for sign in codes] for codes in coded["codes"]]
    assert words == [["a", "b", "b", "…", "…"], ["…", "a"]]
