"""Which part of an answer is compared, and that a long answer takes time in proportion to its length."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import quickly
from score_small import ERROR, OK
from spanwise.score import MathVerifier, Verdict, judge
from spanwise.score.answers import LONGEST, bare
from spanwise.types import Status


class Asked(MathVerifier):
    """Record the pairs that a worker process would compare."""

    pairs = ()

    def equal(self, pairs):
        self.pairs = list(pairs)
        return [Verdict(Status.OK, 0.0)] * len(pairs)


def peeled(text):
    """`bare` by its docstring: strip one layer, then the remainder by itself."""
    text = text.strip()
    if len(text) > 2 and text[0] == text[-1] == "$" and "$" not in text[1:-1]:
        return peeled(text[1:-1])
    if text.startswith("\\boxed{"):
        depth = 1
        for at in range(len("\\boxed{"), len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if depth == 0:
                return peeled(text[len("\\boxed{") : -1]) if at == len(text) - 1 else text
    return text


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from(["\\boxed{", "\\boxed{", "}", "}", "{", "$", "$", " ", "\n", "\u3000", "4", "\\"]), max_size=14)
)
def test_layers_fall_away_one_by_one(parts):
    text = "".join(parts)
    assert bare(text) == peeled(text)


def test_a_thousand_boxes_are_no_deeper_than_one():
    nested = "\\boxed{" * 10_000 + "4" + "}" * 10_000
    with MathVerifier() as idle:
        verdicts = quickly(judge, ["4", "5"], [nested, nested], verifier=idle)
        assert [(verdict.status, verdict.value) for verdict in verdicts] == [(OK, 1.0), (OK, 0.0)]
        assert idle._workers[0].process is None
    assert quickly(bare, nested[:-1]) == nested[:-1]


@pytest.mark.parametrize("answer", ["0" * 40_000 + "x", "-" + "0" * 40_000, "7" * 40_000, "so " * 20_000 + "!"])
def test_long_answers_are_compared_as_text_at_once(answer):
    assert [verdict.value for verdict in quickly(judge, ["4", answer], [answer, answer])] == [0.0, 1.0]
    gold = "1+" * LONGEST  # too long for mathematics: an error, unless it is given back
    wrong, right = judge([gold, gold], ["1/2", gold])
    assert (wrong.status, wrong.value != wrong.value, right.value, "20000" in wrong.why) == (ERROR, True, 1.0, True)


SIGNED = "x" * 2 * LONGEST + "\nso $4$, thus\nit is \\boxed{4}"
LONG = {
    "as long as may be": ("1+" * (LONGEST // 2), "1+" * (LONGEST // 2)),
    "one character more": ("1+" * (LONGEST // 2) + "1", None),
    "the lines at its end": (SIGNED, "so $4$, thus\nit is \\boxed{4}"),
    "one line": ("x" * 2 * LONGEST + "$4$", "x" * (LONGEST - 3) + "$4$"),
    "mathematics far from the end": ("$4$" + "x" * LONGEST, None),
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("verify", ["auto", "math"])
def test_of_a_long_answer_its_end_is_sent_or_nothing(case, verify):
    answer, sent = LONG[case]
    verifier = Asked()
    (verdict,) = judge(["1/2"], [answer], verify=verify, verifier=verifier)
    assert list(verifier.pairs) == ([] if sent is None else [("1/2", sent)])
    assert (verdict.status, verdict.value) == (OK, 0.0)
