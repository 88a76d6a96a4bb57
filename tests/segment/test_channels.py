"""`channels`: the families' own signs, token by token; blocks, texts and faults are worked out by hand."""

import pytest

from segment_small import made
from spanwise.engines.trl.config import check_prefilled
from spanwise.errors import LayoutError, RecipeError
from spanwise.layout import Layout
from spanwise.segment import census
from spanwise.types import Fault

PLAIN = Layout(["reasoning", "tool_call[*]", "answer"], segmenter="channels", most=2)
OPENED = Layout(["reasoning", "tool_call[*]", "answer"], segmenter="channels", most=2, prefilled="reasoning")
R, C, D, A = "reasoning", "tool_call[0]", "tool_call[1]", "answer"
LACKS = Fault.MISSING

#: Layout, tokens with their blocks, what reasoning, the calls and the answer say, faults; whole conversations: test_chat_families.
CASES = {
    "Qwen: white space between channels is no answer": (
        PLAIN, [("<think>", R), ("</think>", R), ("\n\n", R), ("<tool_call>", C), ("{}", C), ("</tool_call>", C), ("\n", C),
                ("<tool_call>", D), ("[]", D), ("</tool_call>", D), ("<|im_end|>", D)],
        ["", "{}", "[]", None], LACKS,
    ),
    "Qwen: cut off by the end of the turn, and a second turn": (
        PLAIN, [("<think>", R), ("2", R), ("<|im_end|>", R), ("<think>", R), ("3", R), ("</think>", R), ("4", A)],
        ["3", None, None, "4"], LACKS | Fault.TRUNCATED,
    ),
    "Qwen: prefilled, turn by turn": (
        OPENED, [("2", R), ("</think>", R), ("<tool_call>", C), ("{}", C), ("</tool_call>", C), ("<|im_end|>", C), ("3", R),
                 ("</think>", R), ("4", A), ("<|im_end|>", A)],
        ["3", "{}", None, "4"], 0,
    ),
    "a closing sign of nothing is text": (
        PLAIN, [("2", A), ("</think>", A), ("4", A)], [None, None, None, "2</think>4"], LACKS | Fault.ORDER,
    ),
    "straddled away": (PLAIN, [("<think>2</think>4", R)], ["2", None, None, None], LACKS | Fault.STRADDLED),
    "DeepSeek: what wraps the calls belongs to them": (
        PLAIN, [("ok", A), ("<\uff5ctool▁calls▁begin\uff5c>", C), ("<\uff5ctool▁call▁begin\uff5c>", C), ("f", C),
                ("<\uff5ctool▁call▁end\uff5c>", C), ("<\uff5ctool▁calls▁end\uff5c>", C), ("<\uff5cend▁of▁sentence\uff5c>", C)],
        [None, "f", None, "ok"], LACKS,
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
    "prefilled, and a header of Llama comes first": (
        OPENED, [("<|start_header_id|>", C), ("assistant", C), ("<|end_header_id|>", C), ("<tool_call>", C), ("{}", C),
                 ("</tool_call>", C)],
        [None, "{}", None, None], LACKS | Fault.TRUNCATED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_blocks_texts_and_faults(case):
    layout, tokens, said, fault = CASES[case]
    owners, text, found = made(layout, [piece for piece, _ in tokens])
    assert owners == [owner for _, owner in tokens]
    keys = ("reasoning", C, D, "answer")
    assert [None if text[name] is None else text[name][name] for name in keys] == said
    assert found == Fault(fault)


def test_the_signs_of_other_families_are_text_where_the_vocabulary_has_tokens_of_its_own():
    pieces = [
        "<think>", "a [TOOL_CALLS] <|channel|>final<|message|> </think", ">", "</think>", "4", "[TOOL_CALLS]", "<|im_end|>",
    ]  # fmt: skip
    owners, text, fault = made(PLAIN, pieces, added=("<think>", "</think>", "<|im_end|>"))
    assert owners == [R] * 4 + [A] * 3
    assert (text[R][R], text[A][A]) == ("a [TOOL_CALLS] <|channel|>final<|message|> </think>", "4[TOOL_CALLS]")
    assert fault == LACKS
    owners, text, _ = made(PLAIN, ["<thi", "nk>", "2", "</think>", "4", "<|im_end|>"], added=("<|im_end|>",))
    assert (owners, text[R][R]) == ([R] * 4 + [A] * 2, "2")  # Qwen2.5 has no token for <think> and spells it


@pytest.mark.parametrize(
    ("blocks", "prefilled", "sentence"),
    [
        (["thinking"], None, "There is no channel 'thinking'"),
        (["answer"], "answer", "prefilled is 'answer'; of the channels a prompt can open 'reasoning' only"),
    ],
)
def test_layouts_that_cannot_work(blocks, prefilled, sentence):
    with pytest.raises(LayoutError, match=sentence):
        Layout(blocks, segmenter="channels", prefilled=prefilled)


@pytest.mark.parametrize("end", ["<think>\n", "[THINK]", "<|start|>assistant<|channel|>analysis<|message|>"])
def test_a_prompt_that_opens_the_reasoning_and_a_layout_must_agree(end):
    check_prefilled(end, OPENED)
    with pytest.raises(RecipeError, match="prefilled='reasoning'"):
        check_prefilled(end, PLAIN)
    for closed in ("<|im_start|>assistant\n", "<think>\n\n</think>\n\n"):
        check_prefilled(closed, PLAIN)
        with pytest.raises(RecipeError, match="leave 'prefilled' out"):
            check_prefilled(closed, OPENED)


def test_a_prompt_that_opens_delimiters():
    layout = Layout({"work": "delimiters:<<...>>", "math": "delimiters:$$...$$"})
    with pytest.raises(RecipeError, match=r"prefilled='<<\.\.\.>>'"):
        check_prefilled("Work: <<", layout)
    check_prefilled("It is $$x$$", layout)  # this one closes as well


def test_the_census_says_which_channels_are_there_instead():
    found = census(["<tool_call>", "4"], ["reasoning", "tool_call[*]", "answer"], segmenter="channels")
    assert found.sentence == (
        "'reasoning' is in 0 of 2 completions; they do contain 'tool_call[*]' (1), 'answer' (2), 'tool_call' (1)."
    )
    harmony = ["<|channel|>analysis<|message|>", "<|channel|>commentary to=f<|message|>", "<|channel|>final<|message|>"]
    assert dict(census(harmony, ["reasoning", "tool_call"], segmenter="channels").wanted) == {"reasoning": 1, "tool_call": 1}
