"""The reports in a real browser: drawn, quiet, light and dark, on a phone, quick, and with scripts of others locked out."""

from __future__ import annotations

import time

import pytest

from report_pages import HOSTILE, compare_page, credit_page, fidelity_page, train_page

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:selenium")

PAGES = {"train": train_page, "compare": compare_page, "fidelity": fidelity_page, "credit": credit_page}
DRAWN = "return [...document.querySelectorAll('.chart')].every(e => e.querySelector('svg path, svg rect'))"
PRINT = "dispatchEvent(new Event('beforeprint'))"


@pytest.fixture(scope="module")
def pages():
    return {name: page() for name, page in PAGES.items()}


def assert_drawn(browser):
    """All charts hold marks, not only axes, and are as wide as their frame."""
    browser.run(PRINT)
    browser.wait(DRAWN)
    found = browser.run(
        "return [...document.querySelectorAll('.chart')].map(e => [e.querySelectorAll('.role-mark path, .role-mark rect').length,"
        " e.querySelector('svg').getBoundingClientRect().width / e.getBoundingClientRect().width])"
    )
    assert found
    for marks, width in found:
        assert marks > 0
        assert 0.85 < width < 1.01


def assert_fits(browser):
    """Nothing makes the page scroll sideways."""
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "dark"), [(1200, False), (1200, True), (360, False)])
def test_every_report_is_drawn_without_a_word_in_the_console(browser, pages, name, width, dark):
    browser.show(pages[name], width=width, dark=dark)
    assert_drawn(browser)
    assert_fits(browser)
    assert browser.console() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    light = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] > 128")
    assert light != dark


def test_charts_take_the_colours_of_the_theme_and_change_with_it(browser, pages):
    label = "return getComputedStyle(document.querySelector('.chart .role-axis-label text')).fill"
    wanted = "return getComputedStyle(document.querySelector('.lead')).color"
    browser.show(pages["compare"])
    assert_drawn(browser)
    light = browser.run(label)
    assert light == browser.run(wanted)
    browser.run("document.getElementById('theme').click()")
    browser.wait(f"return (() => {{ {label} }})() !== '{light}'")
    assert browser.run(label) == browser.run(wanted)
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    browser.run("document.getElementById('theme').click(); try { localStorage.clear() } catch {}")
    assert browser.console() == []


def test_charts_wait_until_they_are_near(browser, pages):
    browser.show(pages["train"], width=360, height=600)
    browser.run("document.querySelector('.chart').scrollIntoView({behavior: 'instant'})")
    browser.wait("return document.querySelector('.chart svg')")
    last = "[...document.querySelectorAll('.chart')].at(-1)"
    assert browser.run(f"return {last}.querySelector('svg')") is None
    browser.run(f"{last}.scrollIntoView({{behavior: 'instant'}})")
    browser.wait(f"return {last}.querySelector('svg')")


def test_charts_follow_the_width(browser, pages):
    browser.show(pages["credit"], width=1200)
    assert_drawn(browser)
    browser.size(400, 900)
    browser.wait("return [...document.querySelectorAll('.chart svg')].every(e => e.getBoundingClientRect().width < 400)")
    assert_fits(browser)


def test_series_have_the_colours_of_the_legend(browser, pages):
    browser.show(pages["compare"])
    assert_drawn(browser)
    section = "document.getElementById('learning').querySelectorAll"
    legend = browser.run(f"return [...{section}('.legend svg')].map(e => getComputedStyle(e).fill)")
    lines = browser.run(f"return [...{section}('.mark-line path')].map(e => getComputedStyle(e).stroke)")
    assert set(lines) == set(legend[:2])  # the third arm was never evaluated


def test_a_tooltip_says_the_number(browser, pages):
    browser.show(pages["compare"])
    assert_drawn(browser)
    point = browser.driver.find_element("css selector", "#learning .mark-symbol path")
    frames = "return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    for x in (1, 2):  # what was printed folds again, and then the place is where it stays
        browser.run("dispatchEvent(new Event('afterprint'))")
        browser.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", point)
        browser.run(frames)
        middle = "const b = arguments[0].getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]"
        left, top = browser.run(middle, point)
        event = {"type": "mouseMoved", "x": left + x, "y": top}
        browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
        browser.run(frames)
    said = browser.wait("const e = document.getElementById('values'); return e.hidden ? null : e.innerText")
    words = ["step", "0", *(part for arm in ("blended", "outcome") for part in (arm, "10", "%", "[10", "%,", "10", "%]"))]
    assert said.split() == words  # all seeds start at .1
    assert browser.console() == []


def test_hostile_text_does_nothing_and_is_shown(browser):
    browser.show(credit_page(text=HOSTILE, source=HOSTILE))
    assert_drawn(browser)
    assert browser.run("return window.hacked") is None
    assert HOSTILE in browser.run("return document.querySelector('h1').textContent")
    assert browser.console() == []


def test_a_script_that_slipped_in_is_refused(browser, pages):
    browser.show(pages["credit"].replace("<h2>", "<h2><script>window.hacked = 1</script>", 1))
    browser.wait("return document.querySelector('.chart')")
    assert browser.run("return window.hacked") is None
    assert any("Content Security Policy" in line or "script-src" in line for line in browser.console())


def test_five_hundred_completions_are_small_and_quick(browser, capsys):
    html = credit_page(500, 1000)
    assert len(html.encode()) < 3_000_000
    started = time.perf_counter()
    browser.show(html)
    browser.wait("return document.querySelector('#tokens') && document.querySelectorAll('#tokens button').length > 2")
    first = browser.wait("return performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
    loaded = browser.run("const t = performance.timing; return t.loadEventEnd - t.navigationStart")
    browser.run("document.querySelector('.chart').scrollIntoView({behavior: 'instant'})")
    browser.wait("return document.querySelector('.chart svg')")
    charts = time.perf_counter() - started
    with capsys.disabled():
        print(
            f"\n{len(html) / 1e6:.2f} MB, first view {first:.0f} ms, loaded {loaded:.0f} ms, first chart {1000 * charts:.0f} ms"
        )
    assert first < 2000
    assert loaded < 4000
    assert browser.console() == []


def test_charts_follow_the_system_when_it_turns_dark(browser, pages):
    label = "getComputedStyle(document.querySelector('.chart .role-axis-label text')).fill"
    browser.show(pages["credit"])
    assert_drawn(browser)
    light = browser.run(f"return {label}")
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    browser.wait(f"return {label} !== '{light}'")
    assert browser.run(f"return {label}") == browser.run("return getComputedStyle(document.querySelector('.lead')).color")
