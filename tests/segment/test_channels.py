"""`channels`: the families' own signs, token by token, and what a prompt has opened.

`tests/fuzz` holds every family against an oracle, also with signs that are tokens and with masked tokens.
"""

import pytest

from segment_small import segment
from spanwise.engines.trl.config import check_prefilled
from spanwise.errors import LayoutError, RecipeError
from spanwise.layout import Layout
from spanwise.segment import census
from spanwise.types import Fault

PLAIN = Layout(["reasoning", "tool_call[*]", "answer"], segmenter="channels", most=2)
OPENED = Layout(["reasoning", "tool_call[*]", "answer"], segmenter="channels", most=2, prefilled="reasoning")
R, C, D, A = "reasoning", "tool_call[0]", "tool_call[1]", "answer"
LACKS = Fault.MISSING

#: Layout, tokens with their blocks, what reasoning, the calls and the answer say, faults.
CASES = {
    "Qwen: white space between channels is no answer": (
        PLAIN, [("<think>", R), ("</think>", R), ("\n\n", R), ("<tool_call>", C), ("{}", C), ("</tool_call>", C), ("\n", C),
                ("<tool_call>", D), ("[]", D), ("</tool_call>", D), ("<|im_end|>", D)],
        ["", "{}", "[]", None], LACKS,
    ),
    "Qwen: prefilled, turn by turn": (
        OPENED, [("2", R), ("</think>", R), ("<tool_call>", C), ("{}", C), ("</tool_call>", C), ("<|im_end|>", C), ("3", R),
                 ("</think>", R), ("4", A), ("<|im_end|>", A)],
        ["3", "{}", None, "4"], 0,
    ),
    "Llama: a call to the end of its message": (
        PLAIN, [("<|start_header_id|>", C), ("assistant", C), ("<|end_header_id|>", C), ("\n\n", C), ("<|python_tag|>", C),
                ("f('<think>')", C), ("<|eom_id|>", C), ("4", A), ("<|eot_id|>", A)],
        [None, "f('<think>')", None, "4"], LACKS | Fault.NESTED,
    ),
    "gpt-oss: a preamble is answer, analysis without its end is cut off": (
        PLAIN, [("<|channel|>", A), ("commentary", A), ("<|message|>", A), ("hi", A), ("<|end|>", A), ("<|start|>", R),
                ("assistant", R), ("<|channel|>", R), ("analysis", R), ("<|message|>", R), ("2", R)],
        [None, None, None, "hi"], LACKS | Fault.TRUNCATED,
    ),
    "gpt-oss: analysis prefilled": (
        OPENED, [("2", R), ("<|end|>", R), ("<|start|>", A), ("<|channel|>", A), ("final", A), ("<|message|>", A), ("4", A)],
        ["2", None, None, "4"], LACKS,
    ),
    "Mistral": (
        PLAIN, [("[THINK]", R), ("2", R), ("[/THINK]", R), ("ok", A), ("[TOOL_CALLS]", C), ("f", C), ("[ARGS]", C), ("{}", C),
                ("[TOOL_CALLS]", D), ("g[ARGS]{}", D), ("</s>", D)],
        ["2", "f[ARGS]{}", "g[ARGS]{}", "ok"], 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_blocks_texts_and_faults(case):
    layout, tokens, contents, fault = CASES[case]
    owners, text, faults = segment(layout, [piece for piece, _ in tokens])
    assert owners == [owner for _, owner in tokens]
    keys = ("reasoning", C, D, "answer")
    assert [None if text[name] is None else text[name][name] for name in keys] == contents
    assert faults == Fault(fault)


def test_layouts_that_cannot_work():
    for block, prefilled in (("thinking", None), ("answer", "answer")):
        with pytest.raises(LayoutError, match=block):
            Layout([block], segmenter="channels", prefilled=prefilled)


@pytest.mark.parametrize("end", ["<think>\n", "[THINK]", "<|start|>assistant<|channel|>analysis<|message|>"])
def test_a_prompt_that_opens_the_reasoning_and_a_layout_must_agree(end):
    check_prefilled(end, OPENED)
    with pytest.raises(RecipeError, match="reasoning"):
        check_prefilled(end, PLAIN)
    for closed in ("<|im_start|>assistant\n", "<think>\n\n</think>\n\n"):
        check_prefilled(closed, PLAIN)
        with pytest.raises(RecipeError):
            check_prefilled(closed, OPENED)


def test_a_prompt_that_opens_delimiters():
    layout = Layout({"work": "delimiters:<<...>>", "math": "delimiters:$$...$$"})
    with pytest.raises(RecipeError, match="<<"):
        check_prefilled("Work: <<", layout)
    check_prefilled("It is $$x$$", layout)  # this one closes as well


def test_the_census_counts_channels():
    counts = census(["<tool_call>", "4"], ["reasoning", "tool_call[*]", "answer"], segmenter="channels")
    assert (dict(counts.wanted), dict(counts.others)) == ({"reasoning": 0, "tool_call[*]": 1, "answer": 2}, {"tool_call": 1})
    harmony = ["<|channel|>analysis<|message|>", "<|channel|>commentary to=f<|message|>", "<|channel|>final<|message|>"]
    assert dict(census(harmony, ["reasoning", "tool_call"], segmenter="channels").wanted) == {"reasoning": 1, "tool_call": 1}
