"""The token view of a page in a real browser: what it shows of completions, and how one moves among them."""

# ruff: noqa: RUF001 the page writes − and × where it means them

import math
import re
import time
from dataclasses import replace

import pytest

from report_pages import token_row as row
from spanwise.report import TokenView
from spanwise.report.page import render
from spanwise.report.sections import tokens_section

WORDS = "A tick marks each place where a token with a probability below 0.2 opens a segment."


def page(*rows, methods=("a", "b"), outcome="correct", **more):
    """A page of the report with nothing but the view."""
    sections = [tokens_section(TokenView(methods, rows, outcome, **more))]
    return render(title="t", lead="", sections=sections)


FIRST = row(
    ["So", " two", "\n", "</s>", "tool"],
    a=[1.0, -1.0, 0.0, 1e-6, math.nan],
    b=[0.25, 0.25, -0.0625, -0.0625, math.nan],
    spans={"solution": [(0, 2)], "confidence": [(2, 4)]},
    rewards={"correct": 1.0, "brier": None},
    statuses={"correct": "ok", "brier": "absent"},
    values={"": [0.5, -0.25, 0.0, 0.125, math.nan]},
    probabilities=[1.0, 0.5, 0.25, 0.01, 0.75],
    step=40,
)
SECOND = row(["No"], [0.0], [0.0], rewards={"correct": 0.0, "brier": -0.25}, statuses={"correct": "ok", "brier": "ok"},
             values={"": [0.5]}, probabilities=[0.5])  # fmt: skip
THIRD = row(["cut", " Needle"], [0.1, 0.1], [0.0, 0.0], prompt="other", fault="truncated",
            rewards={"correct": None, "brier": None}, statuses={"correct": "timeout", "brier": "absent"})  # fmt: skip


def opened(browser, *rows, methods=("a", "b"), outcome="correct", by_step=False, segments="", **how):
    browser.show(page(*rows, methods=methods, outcome=outcome, by_step=by_step, segments=segments), **how)
    browser.wait("return document.querySelector('.token-app:not([hidden])')")
    browser.run("document.querySelector('.token-more').open = true")
    if len(methods) > 1:
        choose(browser, "order", "file")


def text(browser, selector):
    return browser.run("return document.querySelector(arguments[0]).innerText", selector)


def token(browser, index, side=0):
    return browser.each(f'.token-panes [data-token="{index}"]')[side]


def details_of(browser, index):
    """Point at a token and return the lines that are said of it."""
    browser.point_at(token(browser, index))
    return text(browser, ".token-details").split("\n")


def style(browser, element, name):
    return browser.run("return getComputedStyle(arguments[0]).getPropertyValue(arguments[1])", element, name)


def choose(browser, name, value):
    browser.run(
        "const c = document.querySelector(`[name=${arguments[0]}]`); c.value = arguments[1];"
        "c.dispatchEvent(new Event(c.type === 'search' ? 'input' : 'change', {bubbles: true}))", name, value,
    )  # fmt: skip


def at(browser):
    return text(browser, ".token-count"), browser.run("return location.hash")


def test_colours_say_sign_and_size_and_what_has_none_and_blocks_their_credit(browser):
    opened(browser, FIRST)
    signs = (("plus", "plus"), ("minus", "plus"), ("zero", "minus"), ("plus", "minus"), ("none", "none"))
    classes = [[token(browser, t, side).get_attribute("class") for side in (0, 1)] for t in range(5)]
    assert classes == [[f"token {sign}" for sign in pair] for pair in signs]
    full, minus, zero, tiny, untrained = (token(browser, t) for t in range(5))
    less = token(browser, 0, 1)
    # 1 is the full scale of both sides; b's 0.25 is half as strong: 14 + 86 * sqrt(0.25) = 57 %.
    assert [style(browser, each, "--strength") for each in (full, less)] == ["100.0%", "57.0%"]
    blue, orange = "0.352941 0.662745 0.94902", "0.960784 0.603922 0.239216"  # #5aa9f2 and #f59a3d
    grounds = [f"color(srgb {colour})" for colour in (blue, orange, f"{blue} / 0.57", f"{blue} / 0.141")]
    colours = [style(browser, each, "background-color") for each in (full, minus, less, tiny, zero)]
    assert colours == [*grounds, "rgba(0, 0, 0, 0)"]
    assert [style(browser, zero, name) for name in ("border-bottom-style", "background-image")] == ["dotted", "none"]
    assert "gradient" in style(browser, untrained, "background-image")
    assert text(browser, ".token-legend").split("\n") == [
        "credit", "≤ −1", "−0.3", "−0.05", "0", "+0.05", "+0.3", "≥ +1", "not trained",
    ]  # fmt: skip
    choose(browser, "scale", "own")
    assert style(browser, token(browser, 0, 1), "--strength") == "100.0%"
    assert "credit, b" in text(browser, ".token-legend")
    # blocks have borders and their credit
    choose(browser, "scale", "shared")
    assert [head.text for head in browser.each(".token-head")] == [
        "solution · a · per token −1 to +1, 2 tokens", "solution · b · per token +0.25 × 2 tokens",
        "confidence · a · per token 0 to +0.000001, 2 tokens", "confidence · b · per token −0.0625 × 2 tokens",
        "no block · a · per token not trained", "no block · b · per token not trained",
    ]  # fmt: skip
    cells = browser.each(".token-cell")
    assert [style(browser, cell, "border-left-style") for cell in cells] == ["solid"] * 4 + ["dotted"] * 2
    left, right = (cell.rect for cell in cells[:2])
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] < right["x"]


def test_the_details_of_a_token_by_pointer_and_by_focus(browser):
    opened(browser, FIRST)
    assert details_of(browser, 1) == [
        "token 2 of 5", "·two", "block", "solution", "credit, a", "−1", "credit, b", "+0.25", "value", "−0.25",
        "probability", "0.5", "rewards", "correct 1 ✓, brier: absent",
    ]  # fmt: skip
    assert len(browser.each(".token.current")) == 2  # the same token on the other side
    token(browser, 2, 1).click()
    browser.point_at(browser.one(".token-legend"))
    assert text(browser, ".token-details").split("\n")[:4] == ["token 3 of 5", "⏎", "block", "confidence"]  # stays
    browser.press("ARROW_RIGHT", "ARROW_RIGHT")
    assert text(browser, ".token-details").split("\n")[4:8] == ["credit, a", "not trained", "credit, b", "not trained"]
    assert browser.run("const e = document.activeElement; return e.closest('.token-row').lastElementChild.contains(e)")
    browser.press("ESCAPE")
    assert not browser.one(".token-details").is_displayed()
    assert browser.run("return document.querySelectorAll('.token-panes [tabindex=\"0\"]').length") == 1


def test_moving_by_keys_and_buttons(browser):
    opened(browser, FIRST, SECOND, THIRD)
    assert at(browser) == ("1 of 3", "")
    seen = []
    for key in ("ARROW_RIGHT", "j", "j", "k", "ARROW_LEFT", "ARROW_LEFT", "END", "HOME"):
        browser.press(key)
        seen.append(at(browser)[0][0])
    assert seen == ["2", "3", "3", "2", "1", "1", "3", "1"]
    for name, place in (("Next", "2"), ("Last", "3"), ("Previous", "2"), ("First", "1")):
        browser.one(f'[aria-label="{name} completion"]').click()
        assert at(browser) == (f"{place} of 3", f"#token-{place}")
    browser.one("[name=search]").send_keys("jk")
    assert text(browser, ".token-count") == "No completion fits."  # letters go into the field


def test_the_place_is_in_the_address(browser):
    opened(browser, FIRST, SECOND, THIRD, fragment="token-3")
    assert text(browser, ".token-count") == "3 of 3"
    assert text(browser, ".token-facts") == "2 tokens\nmalformed: truncated\ncorrect: timeout\nbrier: absent"
    choose(browser, "status", "well")
    browser.run("location.hash = '#token-3'; dispatchEvent(new HashChangeEvent('hashchange'))")
    assert text(browser, ".token-count") == "3 of 3"  # a link opens what a filter hides
    choose(browser, "jump", "2")
    assert at(browser) == ("2 of 3", "#token-2")
    for beyond, place in (("9", "3"), ("99", "3"), ("0", "1"), ("-7", "1"), ("", "1"), ("2.4", "2")):
        choose(browser, "jump", beyond)
        assert browser.run("return document.querySelector('[name=jump]').value") == place
        assert text(browser, ".token-count") == f"{place} of 3"
    for nonsense in ("token-0", "token-4", "token-x", "other"):
        opened(browser, FIRST, SECOND, THIRD, fragment=nonsense)
        assert text(browser, ".token-count") == "1 of 3"


FILTERS = [
    ("status", "well", [1, 2, 4]), ("status", "malformed", [3]), ("status", "absent", [1, 3]), ("status", "failed", [3]),
    ("status", "left", [2]), ("status", "right", [2, 3, 4]), ("outcome", "right", [1, 4]), ("outcome", "wrong", [2]),
    ("search", "needle", [3]), ("search", "OTHER", [3]), ("search", "so two", [1]), ("search", "absent word", []),
    ("search", "café", [4]),
]  # fmt: skip


def test_filters(browser):
    opened(browser, FIRST, SECOND, THIRD, row(["caf", "\udcc3", "\udca9"]))  # two tokens cut a character
    for control, value, listed in FILTERS:
        browser.press("HOME")
        choose(browser, control, value)
        visited = []
        for place in range(len(listed)):
            words = text(browser, ".token-count")
            assert words.startswith(f"{place + 1} of {len(listed)} that fit")
            visited.append(int(words.split("completion ")[1].split(" ")[0]))
            browser.press("j")
        assert visited == listed, (control, value)
        assert listed or text(browser, ".token-count") == "No completion fits."
        browser.run("document.querySelector('[data-go=reset]').click()")
        assert text(browser, ".token-count").endswith("of 4")


def test_right_and_wrong_are_those_of_the_outcome_not_of_another_reward_and_a_broken_check_is_a_failed_one(browser):
    kinds = {"format": "ok", "solved": "ok"}
    rows = [row(["x"], rewards={"format": f, "solved": s}, statuses=kinds) for f, s in ((1.0, 0.0), (1.0, 1.0), (0.0, 1.0))]
    rows[1] = replace(rows[1], rewards={"format": None, "solved": 0.0}, statuses={"format": "absent", "solved": "broke"})
    opened(browser, *rows, outcome="solved")
    assert text(browser, ".token-facts").split("\n")[-2:] == ["format 1", "solved 0 ✗"]
    assert text(browser, ".token-outcome").split()[0] == "solved"
    choose(browser, "outcome", "wrong")
    assert text(browser, ".token-count") == "1 of 2 that fit: completion 1 of 3"
    choose(browser, "status", "failed")
    assert text(browser, ".token-count") == "1 of 1 that fit: completion 2 of 3"
    assert text(browser, ".token-facts").split("\n")[-2:] == ["format: absent", "solved 0 ✗ (broke)"]
    opened(browser, *rows, outcome=None)
    assert not browser.one("[name=outcome]").is_displayed()
    assert not browser.run("return /[✓✗]/.test(document.querySelector('.token-facts').textContent)")


def test_stop_credit_is_told_at_the_last_trained_token_and_that_numbers_of_a_coarse_column_are_rounded(browser):
    opened(browser, row(["a", "b", "tool"], [0.25, -0.5, math.nan], [0.25, 0.25, math.nan], stop={"a": -0.75}))
    details = ["\n".join(details_of(browser, t)) for t in (0, 1, 2)]
    assert ["of it stop credit" in lines for lines in details] == [False, True, False]
    assert "of it stop credit, a\n−0.75" in details[1]
    assert "of it stop credit, b" not in details[1]
    size = 200_002
    opened(browser, row(["x "] * size, [0.12346, 0.0] * (size // 2), [0.12346] * size))
    first, second = ("\n".join(details_of(browser, t)) for t in (0, 1))
    assert "credit, a\n+0.12 (rounded)\ncredit, b\n+0.1235\n" in first
    assert "credit, a\n0\n" in second  # exactly 0 is kept


def test_what_differs_most_comes_first(browser):
    # Mean differences, over the tokens both train: .4 / 2 = .2, then .0, then .3; the scale is 1 for all of them.
    pairs = (([0.1, 0.5], [0.1, 0.1]), ([1.0], [1.0]), ([0.3, math.nan], [0.0, math.nan]))
    opened(browser, *(row(["x", "y"][: len(left)], left, right) for left, right in pairs))
    choose(browser, "order", "differ")
    for place in ("3 of 3", "1 of 3", "2 of 3"):
        assert text(browser, ".token-count").endswith(f"completion {place}")
        browser.press("j")
    choose(browser, "left", "1")  # one method on both sides differs nowhere, so completions are in their own order
    browser.press("k")
    assert text(browser, ".token-count").endswith("completion 1 of 3")


def test_other_methods_and_other_colours(browser):
    methods = ("<b>x</b>", "b", "third")
    numbers = {"advantages": {"<b>x</b>": [0.5, 0.5], "b": [0.0, 0.0], "third": [-0.5, 0.5]}, "values": {"": [0.5, -0.125]}}
    opened(browser, row(["u", "v"], **numbers, probabilities=[1.0, 0.5]), methods=methods)
    assert "<b>x</b> · per token +0.5 × 2 tokens" in text(browser, ".token-head")
    choose(browser, "left", "2")
    assert text(browser, ".token-head") == "solution · third · per token −0.5 to +0.5, 2 tokens"
    choose(browser, "colour", "probability")
    assert len(browser.each(".token-cell")) == 1
    assert [style(browser, token(browser, t), "--strength") for t in (0, 1)] == ["14.0%", "57.0%"]
    assert text(browser, ".token-head") == "solution · 0.5 to 1, 2 tokens"
    choose(browser, "colour", "value")
    assert [token(browser, t).get_attribute("class") for t in (0, 1)] == ["token plus", "token minus"]


def test_one_method_and_no_tokens(browser):
    opened(browser, row([], spans={}, advantages={"only": []}, rewards={}, statuses={}, fault="empty"), methods=("only",))
    assert text(browser, ".token-facts") == "0 tokens\nmalformed: empty"
    assert not any(browser.one(f"[name={name}]").is_displayed() for name in ("right", "outcome"))


AS_IT_IS = (
    "<script>window.hacked = 1</script>", "</script><script>window.hacked = 1</script>",
    "<!-- <img src=x onerror='window.hacked = 1'>", "💀", " word", "{{7*7}}&lt;&#60;",
)  # fmt: skip
HOSTILE = {
    **{text: text for text in AS_IT_IS},
    "a\u2028b\u2029c": "a⟨U+2028⟩b⟨U+2029⟩c",
    "\x00\x1b[31m\x7f\x85": "⟨U+0000⟩⟨U+001B⟩[31m⟨U+007F⟩⟨U+0085⟩",
    "\u202elive\u202c \u2066x\u2069\u200f": "⟨U+202E⟩live⟨U+202C⟩ ⟨U+2066⟩x⟨U+2069⟩⟨U+200F⟩",
    "a\u200bb\u200dc\ufeff\u00ad\u2060": "a⟨U+200B⟩b⟨U+200D⟩c⟨U+FEFF⟩⟨U+00AD⟩⟨U+2060⟩",
    "\U000e0041\u3164\u00a0\u2003": "⟨U+E0041⟩⟨U+3164⟩⟨U+00A0⟩⟨U+2003⟩",
    "a" + "\u0301" * 1003: "a\u0301\u0301\u0301⟨+1,000 marks⟩",
    "\u0308": "◌\u0308",
    "\ud83d": "⟨U+D83D⟩",
    "\udcf0\udc9f": "‹F0›‹9F›",
    "x\ty  z\r\n": "x⇥\ty··z⟨U+000D⟩⏎\n",
    " ": "·",
    "": "∅",
}


def test_hostile_text_shows_as_text(browser):
    tokens, texts = list(HOSTILE), list(HOSTILE.values())
    bad = "</script><script>window.hacked=1</script>\u202e"
    hostile = row(tokens, advantages={bad: [0.5] * len(tokens)}, prompt=bad, spans={bad: [(0, 3)]}, rewards={bad: None},
                  statuses={bad: bad}, fault=bad)  # fmt: skip
    opened(browser, hostile, methods=(bad,))
    for t, expected in enumerate(texts):
        assert token(browser, t).get_property("textContent") == expected
        assert style(browser, token(browser, t), "unicode-bidi") == "isolate"
    safe = bad.replace("\u202e", "⟨U+202E⟩")
    for place in (".token-head", ".token-facts", ".token-prompt .token-text"):
        assert safe in text(browser, place)
    browser.point_at(token(browser, tokens.index("\u202elive\u202c \u2066x\u2069\u200f")))
    assert "⟨U+202E⟩live⟨U+202C⟩·⟨U+2066⟩x" in text(browser, ".token-details")
    assert browser.run("return document.querySelectorAll('script').length") == 7  # the page's own six, and the data
    controls = "/[\\u202a-\\u202e\\u2066-\\u2069\\0]/"
    assert not browser.run(f"return {controls}.test(document.querySelector('.token-body').textContent)")


def test_a_flood_of_marks_stays_in_its_line(browser):
    opened(browser, row(["a" + "\u0302" * 2000, *["\u0302" * 50] * 50, "end"]))
    assert style(browser, browser.one(".token-cell"), "overflow-x") == "clip"
    assert max(map(len, browser.run("return document.querySelector('.token-cell').textContent.match(/\\p{M}*/gu)"))) == 3


@pytest.mark.parametrize("tokens", [["x" * 1_000_000], ["word "] * 200_000], ids=["one token", "200,000 tokens"])
def test_a_line_of_a_megabyte_shows_at_once(browser, tokens):
    html = page(row(tokens))

    def seconds():
        started = time.perf_counter()
        browser.show(html)
        browser.wait("return document.querySelector('.token-panes .token') && document.body.offsetHeight")
        return time.perf_counter() - started

    assert any(seconds() < 2 for _ in range(3))  # a busy machine may be slow once
    before = browser.run("return document.querySelectorAll('.token-row').length")
    assert before < 10
    browser.scroll_to(browser.one(".token-end"))
    browser.wait(f"return document.querySelectorAll('.token-row').length > {before}")  # the rest comes as one scrolls
    assert browser.run("""
        const token = document.querySelector('.token-panes .token');
        const edge = token.closest('.token-cell').getBoundingClientRect().right;
        return Math.max(...[...token.getClientRects()].map(box => box.right)) <= edge;
    """)


def test_long_texts_are_shown_whole(browser):
    tokens = ["🙂" * 13_000, *(f"{n}\n" if n % 7 == 0 else f"{n} " for n in range(3000))]
    opened(browser, row(tokens, spans={"solution": [(0, 2000)], "confidence": [(2000, 3001)]}))
    scroll = "document.querySelector('.token-end').scrollIntoView({behavior: 'instant'});"
    browser.wait(f"{scroll} return document.querySelector('[data-token=\"3000\"]')")
    all_text = "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"
    for side in (1, 2):
        shown = browser.run(all_text, f".token-row > :nth-child({side}) .token")
        assert "".join(shown) == "".join(tokens).replace("\n", "⏎\n")
    assert browser.run(all_text, ".token-head b") == ["solution", "solution", "confidence", "confidence"]


def test_rare_tokens_are_read_too(browser):
    # The rarest of 70,000 tokens has a code beyond the gap of the surrogates and beyond four hexadecimal digits.
    common = [f"w{n}" for n in range(69_999)]
    opened(browser, row(["rarest", "w3", *common, *common]))
    assert [token(browser, t).text for t in (0, 1, 2)] == ["rarest", "w3", "w0"]
    opened(browser, row([common[60_000], *common[:60_000], *common[:60_000]]))
    assert [token(browser, t).text for t in (0, 1)] == ["w60000", "w0"]


@pytest.mark.parametrize("theme", ["light", "dark", "dark by choice", "light by choice"])
def test_contrast_is_enough_in_light_and_dark(browser, theme):
    opened(browser, row(["u", "v", "w", "x", "y"], [1.0, -1.0, 0.3, -0.3, 0.0], probabilities=[0.001, 0.5, 0.9, 1.0, 0.2]),
           dark=theme in ("dark", "light by choice"))  # fmt: skip
    if "choice" in theme:
        browser.run("document.documentElement.dataset.theme = arguments[0]", theme.split()[0])
    light = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] > 128")
    assert light != ("dark" in theme)
    for kind in ("credit", "probability"):
        choose(browser, "colour", kind)
        assert browser.hard_to_see() == []


def test_a_phone_stacks_the_two_methods(browser):
    opened(browser, FIRST, width=360, height=740)
    first, second = (cell.rect for cell in browser.each(".token-cell")[:2])
    assert first["x"] == second["x"]
    assert first["y"] + first["height"] <= second["y"]
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert all(min(button.size.values()) >= 32 for button in browser.each(".token-steps button"))
    browser.scroll_to(token(browser, 0))
    token(browser, 0).click()
    assert "token 1 of 5" in text(browser, ".token-details")


def test_every_control_has_a_name_and_changes_are_announced(browser):
    opened(browser, FIRST, SECOND)
    name = "c => c.ariaLabel || c.closest('label')?.textContent || c.textContent"
    assert all(browser.run(f"return [...document.querySelectorAll('select, input, button')].map({name})"))
    announced = browser.run("return [...document.querySelectorAll('[aria-live=polite]')].map(e => e.className)")
    assert announced == ["token-count", "token-details"]
    browser.run("document.querySelector('[data-go=last]').focus()")
    for _ in range(5):  # the prompt, the first token
        if not browser.run("return document.activeElement.matches('.token')"):
            browser.press("TAB")
    assert browser.run("return document.activeElement.matches('.token')")
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_damaged_data_is_one_sentence(browser):
    browser.show(page(FIRST).replace('{"deflate":"', '{"deflate":"AAAA'))
    browser.wait("return document.querySelector('.token-message').textContent")
    assert text(browser, ".token-message").startswith("The completions cannot be shown (")


def test_a_slider_goes_through_the_steps_of_one_prompt(browser):
    def at_step(step, *rewards):
        return [row(["x"], [r], [-r], rewards={"correct": r}, statuses={"correct": "ok"}, step=step) for r in rewards]

    # Written in another order than that of the steps, as a folder's files may be.
    rows = [*at_step(20, 1.0, 0.0, 0.5), *at_step(0, 0.0, 0.0), *at_step(40, 1.0, 1.0, 1.0)]
    opened(browser, *rows, by_step=True)

    def seen():
        return tuple(browser.one(output).text for output in (".token-slider output", ".token-count", ".token-facts li"))

    def slide(value):
        slider = "const s = document.querySelector('.token-slider input'); s.value = arguments[0];"
        browser.run(f"{slider} s.dispatchEvent(new Event('input'))", value)
        return seen()

    assert seen() == ("0 · mean reward correct 0", "1 of 2", "step 0")
    assert slide(1) == ("20 · mean reward correct 0.5", "1 of 3", "step 20")
    browser.one("[data-go=last]").click()
    assert slide(2) == ("40 · mean reward correct 1", "3 of 3", "step 40")  # the third completion of the next step
    assert slide(0) == ("0 · mean reward correct 0", "2 of 2", "step 0")  # which has no third
    browser.run("location.hash = '#token-3'")
    browser.wait("return document.querySelector('.token-count').innerText === '3 of 3'")
    assert seen() == ("20 · mean reward correct 0.5", "3 of 3", "step 20")
    browser.run("document.querySelector('.token-slider input').focus()")
    browser.press("ARROW_RIGHT")
    assert seen()[0] == "40 · mean reward correct 1"
    opened(browser, *rows)
    assert not browser.one(".token-slider").is_displayed()


#: The line of values under a completion: its numbers, its ticks, what pointing at it says.
VALUES = [0.5, 0.25, math.nan, 0.75, 1.0, -1.0]
VALUED = row(
    ["So", " two", "tool", " and", " so", " on"],
    a=[0.5, -0.25, math.nan, 0.125, 0.0, 1.0],
    values={"": VALUES},
    probabilities=[0.9, 0.1, math.nan, 0.5, 0.125, 0.75],
    opens={"": [1, 4]},
)


def charts(browser):
    return browser.each(".token-course svg")


def path(chart, name):
    return chart.find_element("css selector", f".token-{name}").get_attribute("d")


def read(chart, low, high):
    """The line by the numbers at its axis (y = .04 is high, .84 is low): (token, value), a list for each piece."""
    pieces = [re.findall(r"([\d.]+) ([\d.]+)", piece) for piece in path(chart, "line").split("M")[1:]]
    return [[(float(x) - 0.5, high - (float(y) - 0.04) / 0.8 * (high - low)) for x, y in piece] for piece in pieces]


def point_at(browser, chart, t, size):
    browser.point_at(chart, right=round(((t + 0.5) / size - 0.5) * chart.rect["width"]))


def test_the_line_has_the_values_and_a_gap_where_there_is_none(browser):
    opened(browser, VALUED, segments=WORDS)
    (chart,) = charts(browser)
    assert text(browser, ".token-axis").split() == ["1", "−1"]
    left, right = read(chart, -1.0, 1.0)
    assert dict(left + right) == pytest.approx({0: 0.5, 1: 0.25, 3: 0.75, 4: 1.0, 5: -1.0}, abs=1e-3)
    assert browser.run("return arguments[0].getAttribute('viewBox')", chart) == "0 0 6 1"
    assert chart.get_attribute("aria-label") == "value before each token: −1 to 1, 3 segments"
    # a tick stands at the left edge of each token that opens a segment
    assert re.findall(r"M(\d+) ", path(chart, "ticks")) == ["1", "4"]
    assert text(browser, ".token-courses").split("\n")[-1] == WORDS
    # A method without segments has no ticks, and no words of them.
    opened(browser, row(["a", "b"], values={"": [0.25, 0.5]}))
    assert path(charts(browser)[0], "ticks") == ""
    assert "segment" not in text(browser, ".token-courses")
    point_at(browser, charts(browser)[0], 1, 2)
    assert "segment" not in text(browser, ".token-details")


SAID = {
    0: {"token 1 of 6": "So", "credit, a": "+0.5", "value": "0.5", "probability": "0.9", "segment": "1 of 3"},
    1: {"token 2 of 6": "·two", "credit, a": "−0.25", "value": "0.25", "probability": "0.1", "segment": "2 of 3"},
    2: {"token 3 of 6": "tool", "credit, a": "not trained", "value": "none", "probability": "none"},
    3: {"token 4 of 6": "·and", "value": "0.75", "segment": "2 of 3"},
    5: {"token 6 of 6": "·on", "credit, a": "+1", "value": "−1", "probability": "0.75", "segment": "3 of 3"},
}


def test_pointing_at_the_line_says_the_numbers_of_the_token_there(browser):
    opened(browser, VALUED, segments=WORDS)
    details = "[...document.querySelectorAll('.token-details dl > div')].map(e => [...e.children].map(x => x.innerText))"
    for t, numbers in SAID.items():
        point_at(browser, charts(browser)[0], t, 6)
        entries = dict(browser.run(f"return {details}"))
        assert entries.items() >= numbers.items()
        assert ("segment" in entries) == ("segment" in numbers)
        assert path(charts(browser)[0], "cursor") == f"M{t + 0.5} 0V1"
        assert "current" in token(browser, t).get_attribute("class").split()
    browser.point_at(browser.one(".token-facts"))
    assert text(browser, ".token-details") == ""  # what was pointed at is left
    assert path(charts(browser)[0], "cursor") == ""


def test_all_completions_share_one_scale_so_that_a_flat_critic_looks_flat(browser):
    opened(browser, *(row(["a", "b"], values={"": values}) for values in ([0.0, 1.0], [0.5, 0.505])))
    browser.press("j")
    ((first, second),) = read(charts(browser)[0], 0.0, 1.0)
    assert abs(first[1] - second[1]) == pytest.approx(0.005, abs=2.5e-4)
    assert text(browser, ".token-axis").split() == ["1", "0"]
    opened(browser, row(["a", "b"], values={"": [0.5, 0.5]}))
    assert [value for _, value in read(charts(browser)[0], 0.0, 1.0)[0]] == pytest.approx([0.0] * 2)
    assert text(browser, ".token-axis") == "0.5"


def test_a_completion_without_values_has_no_line(browser):
    opened(browser, VALUED, row(["x"], values={"": [math.nan]}, probabilities=[math.nan]), row(["y"]))
    choose(browser, "order", "file")
    choose(browser, "jump", "1")
    assert len(charts(browser)) == 1
    for _ in range(2):
        browser.press("j")
        assert (charts(browser), text(browser, ".token-courses")) == ([], "")
    choose(browser, "search", "nowhere")
    choose(browser, "search", "")
    browser.press("Home")
    assert len(charts(browser)) == 1


def test_each_value_has_a_line_and_a_colour_and_pointing_at_a_token_marks_its_place_on_every_line(browser):
    bad = "<b onmouseover='window.hacked=1'>x</b>"
    values = {"correct": [0.5, 0.25, 0.5], bad: [math.nan, -0.5, -0.5]}
    opened(browser, row(["u", "v", "w"], values=values, opens={"correct": [1], bad: []}), segments=WORDS)
    assert [chart.get_attribute("aria-label") for chart in charts(browser)] == [
        "value, correct before each token: 0.25 to 0.5, 2 segments",
        f"value, {bad} before each token: −0.5 to −0.5, 1 segment",
    ]
    assert f"value, {bad}" in text(browser, ".token-courses")
    browser.point_at(token(browser, 1))
    assert [path(chart, "cursor") for chart in charts(browser)] == ["M1.5 0V1"] * 2
    assert f"value, correct\n0.25\nvalue, {bad}\n−0.5" in text(browser, ".token-details")
    charts(browser)[0].click()
    browser.point_at(browser.one(".token-facts"))
    assert "token 2 of 3" in text(browser, ".token-details")  # a click (a tap) stays
    choose(browser, "colour", f"value, {bad}")
    assert [token(browser, t).get_attribute("class") for t in (0, 1)] == ["token none", "token minus"]


def test_a_long_completion_keeps_its_extremes_and_stays_small(browser):
    size = 200_000
    values = [0.5 + 0.001 * (t % 7) for t in range(size)]
    values[123_456], values[77_777] = 1.0, 0.0
    opened(browser, row(["w"] * size, values={"": values}, opens={"": list(range(1, size, 3))}), segments=WORDS)
    (chart,) = charts(browser)
    assert len(path(chart, "line")) < 60_000
    assert len(path(chart, "ticks")) < 30_000
    (stroke,) = read(chart, 0.0, 1.0)
    assert max(stroke, key=lambda point: point[1]) == pytest.approx((123_456, 1.0), abs=1e-3)
    assert min(stroke, key=lambda point: point[1]) == pytest.approx((77_777, 0.0), abs=1e-3)
    assert [t for t, _ in stroke] == sorted(t for t, _ in stroke)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_whole_and_nothing_lies_over_it(browser, dark):
    opened(browser, VALUED, segments=WORDS, width=375, height=700, dark=dark)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    (chart,) = charts(browser)
    browser.scroll_to(chart)
    assert chart.rect["width"] > 250
    point_at(browser, chart, 0, 6)
    boxes = "['.token-courses', '.token-details'].map(name => document.querySelector(name).getBoundingClientRect())"
    (top, bottom), (above, below) = browser.run(f"return {boxes}.map(box => [box.top, box.bottom])")
    assert 0 <= top < bottom
    assert above < below
    assert bottom <= above or below <= top  # what is said lies beside the line, never on it
    assert browser.each(".token-course path")
    assert browser.hard_to_see(".token-course path") == []
