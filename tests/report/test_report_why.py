"""The sentences and sums of the token view: true in every case, made of numbers that hold."""

# ruff: noqa: E501, RUF001 sentences are whole, and the page writes − and · where it means them

from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from arithmetic import holds
from helpers import NAN
from report_pages import decoded
from rollout_files import quiet, tagged, verl_file
from spanwise.commands.credit.credit import credit
from spanwise.commands.credit.page import rule_of
from spanwise.report import TokenView
from spanwise.report.tokens import payload
from spanwise.report.why import Rule, equation, explained, rule_words, shown
from spanwise.rollouts.rows import TokenRow, token_rows
from spanwise.rollouts.schema import CreditPart, family_names


def row(**changes):
    fields = {
        "prompt": "p", "tokens": ["a", "b", "c"], "advantages": {"grpo": [0.1] * 3, "bae": [0.5, 0.5, -0.8]},
        "spans": {"solution": [(0, 2)], "confidence": [(2, 3)]}, "rewards": {"correct": 1.0, "brier": -0.81},
        "statuses": {"correct": "ok", "brier": "ok"}, "fault": "", "stated": {"brier": 0.1},
        "credit": {"grpo": {"completion": 0.3}, "bae": {"solution": 1.0, "confidence": -0.8}},
    }  # fmt: skip
    return TokenRow(**{**fields, **changes})


def sentence(case, left="grpo", right="bae", rows=(), **view):
    data = payload(TokenView(("grpo", "bae"), [case, *rows], "correct", **view))  # joined as the page does it
    columns = [data["clauses"][data["methods"].index(name)] for name in dict.fromkeys((left, right))]
    opening, *clauses = (decoded(column, 0)[0] for column in (data["openings"], *columns))
    return f"{opening}: {', '.join(clauses)}."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Right with confidence 0.1: grpo praises the completion (+0.3), bae praises the solution (+1) and blames the confidence (−0.8)."),
        ({"rewards": {"correct": 0.0}, "stated": {"brier": 0.0}}, "Wrong with confidence 0.0: "),
        ({"rewards": {"correct": 0.5}, "stated": {}}, "Correct 0.5: "),
        ({"stated": {"brier": None}, "statuses": {"correct": "ok", "brier": "absent"}}, "Right, and no confidence is stated: "),
        ({"stated": {"brier": None}, "statuses": {"correct": "ok", "brier": "unparsable"}}, "Right, and the confidence cannot be read: "),
        ({"rewards": {"correct": 0.0}, "statuses": {"correct": "broke"}, "stated": {}}, "Wrong (broke its check): "),
        ({"rewards": {}, "statuses": {"correct": "timeout"}, "stated": {}}, "The answer is not judged, because its check failed (timeout): "),
        ({"rewards": {}, "statuses": {"correct": "absent"}, "stated": {}}, "There is no readable answer: "),
        ({"rewards": {}, "statuses": {}, "stated": {}}, "3 tokens: "),
        ({"fault": "missing, truncated"}, "Cut off, right with confidence 0.1: "),
        ({"fault": "order"}, "Malformed, right with confidence 0.1: "),
        ({"advantages": {"grpo": [0.1] * 3, "bae": [NAN] * 3}}, "bae trains no token of the completion."),
        ({"credit": {"grpo": {"completion": 0.0}, "bae": {}}}, "grpo gives the completion exactly 0, bae gives the completion's tokens −0.8 to +0.5."),
        ({"credit": {"grpo": {}, "bae": {"solution": 0.0, "confidence": -0.8}}}, "bae blames the confidence (−0.8) and gives the solution 0."),
        ({"credit": {"grpo": {}, "bae": {"solution": 0.5, "confidence": None}}, "stop": {"bae": -0.7}},
         "bae praises the solution (+0.5) and charges −0.7 for missing blocks."),
        ({"credit": {"grpo": {}, "bae": {"solution": 0.0, "confidence": None}}, "stop": {"bae": -0.7}},
         "bae gives the solution 0 and charges −0.7 for missing blocks."),
        ({"credit": {"grpo": {}, "bae": {f"f{n}": n - 1.5 for n in range(8)}}}, "praises 6 blocks, most of all f7 (+5.5)"),
        ({"credit": {"grpo": {}, "bae": {"solution": 0.0}}, "parts": {"bae": [CreditPart("correct", 1.0, None, None, 1.0, 0.0, reason="singleton")]}},
         "bae gives the completion exactly 0, because no other completion can be compared with it."),
    ],
)  # fmt: skip
def test_the_sentence_is_true(changes, words):
    assert words in sentence(row(**changes), rows=[row()])


def test_one_method_is_named_once_and_a_mean_is_called_one():
    spoken = sentence(row(), "bae", "bae", rules={"bae": Rule(kind="token")})
    assert spoken.count("bae") == 1
    assert spoken.endswith("(−0.8), on average over tokens.")


PAYS = {"correct": ["solution"], "form": ["solution"], "brier": ["confidence"]}
LISTED = {name: {"pays": blocks} for name, blocks in PAYS.items()}
RULE = Rule(objectives=LISTED)


def test_terms_add_up_and_what_does_not_is_said():
    parts = [CreditPart("correct", 1.0, 0.25, 1.0, 1.0, 0.75, 0), CreditPart("form", 1.0, 0.0, 1.0, 0.25, 0.25, 0),
             CreditPart("brier", -0.9, -0.1, 1.0, 1.0, -0.8, 1)]  # fmt: skip
    blocks = explained(row(parts={"bae": parts}), "bae", RULE)["blocks"]
    solution, confidence = blocks["solution"], blocks["confidence"]
    assert solution["total"] == "+1 = 0.75 (correct) + 0.25 (form)"
    assert [term["sum"] for term in solution["terms"]] == ["+0.75 = 1 − 0.25", "+0.25 = 0.25 · (1 − 0)"]
    assert (solution["each"], solution["share"]) == ("+0.5", "on each of its 2 tokens, together +1")
    assert [confidence["total"], confidence["terms"][0]["sum"]] == ["", "−0.8 = −0.9 − (−0.1)"]
    wrong = explained(row(parts={"bae": parts[::2]}), "bae", RULE)["blocks"]["solution"]
    assert wrong["terms"] == []
    assert "add up to +0.75, not to the credit" in wrong["warning"]


NOT_COMPARED = CreditPart("brier", worth=-0.5, baseline=None, divisor=None, weight=1.0, part=0.0)
MISSING = replace(NOT_COMPARED, worth=None)
ALONE = replace(NOT_COMPARED, reason="singleton")


def test_where_there_is_no_sum_a_sentence_says_why():
    for part, status, words in (
        (MISSING, "timeout", "the check of the reward failed (timeout), so the completion gets no credit"),
        (MISSING, "absent", "the reward is absent, and its objective sets no if_missing to replace it"),
        (ALONE, "ok", "no other completion can be compared with this completion, so the credit is"),
        (replace(NOT_COMPARED, part=0.4), "ok", "The method does not compute credit as reward minus baseline. about it"),
    ):
        case = row(parts={"bae": [part]}, statuses={"brier": status}, credit={"bae": {"confidence": part.part}})
        confidence = explained(case, "bae", Rule(objectives=LISTED, about="about it"))["blocks"]["confidence"]
        assert [confidence["terms"][0]["sum"], words in confidence["terms"][0]["note"]] == ["", True]


def test_methods_per_token_what_is_recorded_and_a_file_without_parts_have_a_sentence():
    note = explained(row(), "bae", Rule("token", "bae: Compare."))["note"]
    assert note.startswith("bae credits each token separately. The credit of a block is the mean over the block's tokens.")
    case = row(credit={"recorded": {"solution": 1.0}}, advantages={"recorded": [1.0] * 3})
    note = "'recorded' is the credit that the trainer wrote into the file. The file does not say how it was computed."
    assert explained(case, "recorded", Rule())["note"] == note
    unknown = explained(row(), "bae", RULE)
    assert unknown["note"] == "The file does not say how the credit of bae was computed."
    assert unknown["blocks"]["solution"]["terms"] == []


def test_what_a_baseline_is_the_mean_of_is_looked_up():
    def compared(worth, baseline, averaged):
        part = CreditPart("brier", worth, baseline, 1.0, 1.0, worth - baseline, 0, members=2, averaged=averaged)
        return row(parts={"bae": [part]}, credit={"bae": {"confidence": worth - baseline}})

    def note(case):
        rule = Rule(objectives={"brier": {"pays": ["confidence"], "baseline": "group", "given": []}})
        return explained(case, "bae", rule)["blocks"]["confidence"]["terms"][0]["note"]

    assert note(compared(-0.2, -0.3, 2)) == "baseline −0.3: the mean of the 2 compared completions (same prompt)"
    assert note(compared(-0.2, -0.4, 1)) == "baseline −0.4: the reward of the only other completion"
    assert note(compared(-0.2, -0.7, 0)) == "baseline −0.7: same prompt"
    words = [rule_words("outcome", ["correct"]), rule_words("group", []), rule_words("none", [])]
    assert words == ["same prompt, same correct", "same prompt", "nothing is subtracted"]


def test_equations_of_awkward_numbers_hold():
    for numbers in ((1, 0.37512, 0.51762, 1), (-1, -0.00512, 1, 0.25), (0, 0, 1, 1), (12345.6, -3.3, 7, 2)):
        worth, baseline, divisor, weight = map(float, numbers)
        text = equation(CreditPart("x", worth, baseline, divisor, weight, weight * (worth - baseline) / divisor))
        assert holds(text), text
    assert [shown(-0.81239), shown(None), shown(0.5, sign=True), shown(0.0, sign=True)] == ["−0.8124", "none", "+0.5", "0"]


@pytest.mark.parametrize(
    "methods", [["grpo", "rlcr", "bae", "rloo"], ["maxrl", "dr_grpo", "opo", "gdpo"], ["bae:blended", "bae:group", "dcpo"]]
)
def test_every_sum_of_an_export_holds(tmp_path, methods):
    """What the page says under each method, evaluated; and credits against the file's."""
    pairs = (("4", "0.9"), ("4", "0.7"), ("3", "0.8"), ("5", "0.1"), ("4", None), ("3", "x"))
    prompts, golds = [f"2+{n}=" for n in range(4) for _ in pairs], ["4"] * 12 + ["5"] * 6 + ["9"] * 6
    file = verl_file(tmp_path / "1.jsonl", [tagged(*pair) for pair in pairs] * 4, prompts=prompts, gts=golds)
    result = credit(file, output=tmp_path / "out", console=quiet(), methods=methods)
    table = pq.read_table(tmp_path / "out" / "credit.parquet")
    listed = {name: scheme.plain() for name, scheme in result.arms.schemes.items()}
    rules = {name: rule_of(settings["method"], settings["objectives"]) for name, settings in listed.items()}
    view = TokenView(tuple(applied.name for applied in result.applied), token_rows(table, None), rules=rules)
    seen = dict.fromkeys(view.methods, 0)
    for n, why in enumerate(payload(view)["why"]):
        for method, entry in zip(view.methods, why, strict=True):
            for name, facts in entry["blocks"].items():
                texts = (facts["total"], *(term[key] for term in facts["terms"] for key in ("sum", "worth")))
                sums = [text for text in texts if " = " in text]
                assert all(holds(text) for text in sums), (method, sums)
                assert not facts["warning"]
                columns = [f"credit/{method}/{name}"]
                if name == "completion":  # one number, the same in every block that is there
                    columns = [f"credit/{method}/{block}" for block in family_names(table.column_names, "credit", method)]
                (credit_n,) = {table[key][n].as_py() for key in columns if not key.endswith("/stop")} - {None}
                assert float(facts["credit"].replace("−", "-")) == pytest.approx(credit_n, rel=5.1e-4)
                added = [float(term["credit"].replace("−", "-")) for term in facts["terms"]]
                assert not added or sum(added) == pytest.approx(credit_n, abs=2e-3)
                seen[method] += len(sums)
    assert all(count > 10 for method, count in seen.items() if method not in ("gdpo", "dcpo")), seen
