"""The line of values under a completion in a real browser: its numbers, its ticks, what pointing at it says."""

# ruff: noqa: RUF001 the page writes − where it means it

import math
import re

import pytest
from test_report_tokens_browser import PIXEL, choose, luminance, page, row, style, text, token

WORDS = "A tick marks each place where a token with a probability below 0.2 opens a segment."
VALUES = [0.5, 0.25, math.nan, 0.75, 1.0, -1.0]
FIRST = row(
    ["So", " two", "tool", " and", " so", " on"],
    a=[0.5, -0.25, math.nan, 0.125, 0.0, 1.0],
    values={"": VALUES},
    probabilities=[0.9, 0.1, math.nan, 0.5, 0.125, 0.75],
    opens={"": [1, 4]},
)


def show(browser, *rows, segments=WORDS, **how):
    """Open a page of some completions, with what is said of segments."""
    browser.show(page(*rows, segments=segments), **how)
    browser.wait("return document.querySelector('.token-app:not([hidden])')")


def charts(browser):
    return browser.each(".token-course svg")


def path(chart, name):
    return chart.find_element("css selector", f".token-{name}").get_attribute("d")


def read(chart, low, high):
    """The line as a reader finds it by the numbers at its axis (y = .04 is high, .84 low): (token, value), one list per piece."""
    pieces = [re.findall(r"([\d.]+) ([\d.]+)", piece) for piece in path(chart, "line").split("M")[1:]]
    return [[(float(x) - 0.5, high - (float(y) - 0.04) / 0.8 * (high - low)) for x, y in piece] for piece in pieces]


def point_at(browser, chart, t, size):
    browser.point_at(chart, right=round(((t + 0.5) / size - 0.5) * chart.rect["width"]))


def test_the_line_has_the_values_and_a_gap_where_there_is_none(browser):
    show(browser, FIRST)
    (chart,) = charts(browser)
    assert text(browser, ".token-axis").split() == ["1", "−1"]
    left, right = read(chart, -1.0, 1.0)
    assert dict(left + right) == pytest.approx({0: 0.5, 1: 0.25, 3: 0.75, 4: 1.0, 5: -1.0}, abs=1e-3)
    assert browser.run("return arguments[0].getAttribute('viewBox')", chart) == "0 0 6 1"
    assert chart.get_attribute("aria-label") == "value before each token: −1 to 1, 3 segments"
    # a tick stands at the left edge of each token that opens a segment
    assert re.findall(r"M(\d+) ", path(chart, "ticks")) == ["1", "4"]
    assert text(browser, ".token-courses").split("\n")[-1] == WORDS


def test_a_method_without_segments_has_no_ticks_and_no_words_of_them(browser):
    show(browser, row(["a", "b"], values={"": [0.25, 0.5]}), segments="")
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
    show(browser, FIRST)
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
    show(browser, *(row(["a", "b"], values={"": values}) for values in ([0.0, 1.0], [0.5, 0.505])))
    browser.press("j")
    ((first, second),) = read(charts(browser)[0], 0.0, 1.0)
    assert abs(first[1] - second[1]) == pytest.approx(0.005, abs=2.5e-4)
    assert text(browser, ".token-axis").split() == ["1", "0"]
    show(browser, row(["a", "b"], values={"": [0.5, 0.5]}))
    assert [value for _, value in read(charts(browser)[0], 0.0, 1.0)[0]] == pytest.approx([0.0] * 2)
    assert text(browser, ".token-axis") == "0.5"


def test_a_completion_without_values_has_no_line(browser):
    show(browser, FIRST, row(["x"], values={"": [math.nan]}, probabilities=[math.nan]), row(["y"]))
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
    show(browser, row(["u", "v", "w"], values=values, opens={"correct": [1], bad: []}))
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
    show(browser, row(["w"] * size, values={"": values}, opens={"": list(range(1, size, 3))}))
    (chart,) = charts(browser)
    assert len(path(chart, "line")) < 60_000
    assert len(path(chart, "ticks")) < 30_000
    (stroke,) = read(chart, 0.0, 1.0)
    assert max(stroke, key=lambda point: point[1]) == pytest.approx((123_456, 1.0), abs=1e-3)
    assert min(stroke, key=lambda point: point[1]) == pytest.approx((77_777, 0.0), abs=1e-3)
    assert [t for t, _ in stroke] == sorted(t for t, _ in stroke)


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_whole_and_nothing_lies_over_it(browser, dark):
    show(browser, FIRST, width=375, height=700, dark=dark)
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
    ground = browser.run(PIXEL, style(browser, browser.one("body"), "background-color"))
    for name in ("line", "ticks", "cursor"):
        ink = luminance(browser.run(PIXEL, style(browser, chart.find_element("css selector", f".token-{name}"), "stroke")))
        assert (max(luminance(ground), ink) + 0.05) / (min(luminance(ground), ink) + 0.05) >= 3
