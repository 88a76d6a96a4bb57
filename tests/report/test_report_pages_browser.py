"""The pages in a browser, wide and narrow, light and dark: drawn, quiet, quick, readable, said to a pointer, printed."""

from __future__ import annotations

import pytest

from report_pages import HOSTILE, compare_page, credit_page, fidelity_page, train_page
from spanwise.report.charts import bars, curves, histograms
from spanwise.report.page import Headline, Panel, Section, render
from spanwise.report.sections import wide

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:selenium")

PAGES = {"train": train_page, "compare": compare_page, "fidelity": fidelity_page}
ALL = {**PAGES, "credit": credit_page}
DRAWN = "return [...document.querySelectorAll('.chart')].every(e => e.querySelector('svg path, svg rect'))"
#: The place between the axes of a chart.
AREA = "const b = arguments[0].querySelector('.background').getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"
SAID = "const e = document.getElementById('values'); return e.hidden ? null : e.innerText"


@pytest.fixture(scope="module")
def pages():
    return {name: page() for name, page in ALL.items()}


def drawn(browser, page, **how):
    """Show a page until all charts hold marks, not only axes, and are as wide as their frame."""
    browser.show(page, **how)
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.wait(DRAWN, seconds=60)
    charts = browser.run(
        "return [...document.querySelectorAll('.chart')].map(e => [e.querySelectorAll('.role-mark path, .role-mark rect').length,"
        " e.querySelector('svg').getBoundingClientRect().width / e.getBoundingClientRect().width])"
    )
    assert charts
    assert all(marks > 0 and 0.85 < share < 1.01 for marks, share in charts), charts
    browser.run("dispatchEvent(new Event('afterprint'))")
    return browser


def settle(browser):
    browser.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


FITS = "return document.documentElement.scrollWidth <= innerWidth"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dark", [False, True])
def test_every_page_is_drawn_fits_and_can_be_read_at_every_width(browser, pages, name, dark):
    drawn(browser, pages[name], width=1440, dark=dark)
    light = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0] > 128")
    assert light != dark
    for width in (1440, 768, 375, 360):
        browser.size(width, 900)
        narrow = "e => e.getBoundingClientRect().width < innerWidth"
        browser.wait(f"return [...document.querySelectorAll('.chart svg')].every({narrow})")
        settle(browser)
        assert browser.run(FITS), width
        assert browser.hard_to_see() == [], width
    assert browser.run("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("how", ["by the button", "with the system"])
def test_charts_take_the_colours_of_the_theme_and_change_with_it(browser, pages, how):
    label = "getComputedStyle(document.querySelector('.chart .role-axis-label text')).fill"
    expected = "return getComputedStyle(document.querySelector('.lead')).color"
    drawn(browser, pages["compare"])
    light = browser.run(f"return {label}")
    assert light == browser.run(expected)
    if how == "by the button":
        browser.run("document.getElementById('theme').click()")
        assert browser.run("return document.documentElement.dataset.theme") == "dark"
    else:
        dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    browser.wait(f"return {label} !== '{light}'")
    assert browser.run(f"return {label}") == browser.run(expected)
    browser.run("if (document.documentElement.dataset.theme) document.getElementById('theme').click()")
    browser.run("try { localStorage.clear() } catch {}")


def test_charts_wait_until_they_are_near(browser, pages):
    browser.show(pages["train"], width=360, height=600)
    browser.scroll_to(browser.one(".chart"))
    browser.wait("return document.querySelector('.chart svg')")
    last = browser.each(".chart")[-1]
    assert not last.find_elements("css selector", "svg")
    browser.scroll_to(last)
    browser.wait("return [...document.querySelectorAll('.chart')].at(-1).querySelector('svg')")


def test_a_browser_that_cannot_unpack_the_library_says_so_in_place_of_the_chart(browser, pages):
    old_browser = {"source": "delete window.DecompressionStream"}
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", old_browser)
    try:
        browser.show(pages["compare"])
        browser.run("dispatchEvent(new Event('beforeprint'))")
        browser.wait("return [...document.querySelectorAll('.chart')].every(e => /could not be drawn/.test(e.innerText))")
        assert all("DecompressionStream" in line for line in browser.console())
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def test_series_have_the_colours_of_the_legend_and_a_tooltip_says_the_number(browser, pages):
    drawn(browser, pages["compare"])
    section = "document.getElementById('learning').querySelectorAll"
    legend = browser.run(f"return [...{section}('.legend svg')].map(e => getComputedStyle(e).fill)")
    lines = browser.run(f"return [...{section}('.mark-line path')].map(e => getComputedStyle(e).stroke)")
    assert set(lines) == set(legend[:2])  # the third arm was never evaluated
    point = browser.one("#learning .mark-symbol path")
    for x in (1, 2):
        browser.scroll_to(point)
        settle(browser)
        middle = "const b = arguments[0].getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]"
        left, top = browser.run(middle, point)
        aim(browser, left + x, top)
    tooltip = browser.wait(SAID)
    words = ["step", "0", *(part for arm in ("blended", "outcome") for part in (arm, "10", "%", "[10", "%,", "10", "%]"))]
    assert tooltip.split() == words  # all seeds start at .1


def test_a_script_that_slipped_in_is_refused(browser, pages):
    browser.show(pages["credit"].replace("<h2>", "<h2><script>window.hacked = 1</script>", 1))
    browser.wait("return document.querySelector('.chart')")
    assert any("Content Security Policy" in line or "script-src" in line for line in browser.console())


def test_five_hundred_completions_are_small_and_quick(browser):
    html = credit_page(500, 1000)
    assert len(html.encode()) < 3_000_000
    browser.show(html)
    browser.wait("return document.querySelector('#tokens') && document.querySelectorAll('#tokens button').length > 2")
    assert browser.wait("return performance.getEntriesByName('first-contentful-paint')[0]?.startTime") < 2000
    assert browser.run("const t = performance.timing; return t.loadEventEnd - t.navigationStart") < 4000


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [1440, 375])
def test_every_chart_says_its_values_wherever_it_is_pointed_at(browser, pages, name, width):
    drawn(browser, pages[name], width=width)
    for chart in browser.each(".chart svg"):
        browser.scroll_to(chart)
        settle(browser)
        box = browser.run(AREA, chart)
        aim(browser, box[0] + 0.2 * box[2], box[1] + 0.4 * box[3])
        aim(browser, box[0] + 0.27 * box[2], box[1] + 0.5 * box[3])
        tooltip = browser.wait(SAID)
        entries = [line.split("\t")[-1] for line in tooltip.splitlines()]
        assert any(sign.isdigit() for value in entries[1:] for sign in value)  # the first is the place
        assert not {"undefined", "null", "NaN", ""} & set(entries)
        box = "document.getElementById('values').getBoundingClientRect()"
        assert browser.run(f"const b = {box}; return b.left >= 0 && b.right <= innerWidth")
        assert browser.run(FITS)


def aim(browser, x, y):
    """Move the pointer to a place in the window."""
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})
    settle(browser)


@pytest.mark.parametrize("width", [1440, 768, 375])
def test_a_term_is_explained_beside_it_and_never_on_it(browser, pages, width):
    drawn(browser, pages["compare"], width=width)
    terms = [e for e in browser.each(".term") if e.is_displayed()]
    assert len(terms) > 3
    for term in terms[:8]:
        browser.scroll_to(term, block="end")
        browser.run("arguments[0].focus({preventScroll: true})", term)
        sentence = browser.run("const e = document.getElementById('says'); return e.hidden ? null : e.textContent")
        assert sentence == term.get_attribute("data-says")
        a, b, wide = browser.run(
            "const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };"
            "return [box(arguments[0]), box(document.getElementById('says')), innerWidth]", term
        )  # fmt: skip
        assert b[3] <= a[1] or b[1] >= a[3]
        assert 0 <= b[0] < b[2] <= wide
    browser.press("ESCAPE")
    assert browser.run("return document.getElementById('says').hidden")
    browser.run("document.activeElement.blur()")
    browser.scroll_to(terms[0])
    settle(browser)
    browser.point_at(terms[0])
    assert not browser.run("return document.getElementById('says').hidden")
    browser.run("document.getElementById('says').hidden = true; document.querySelector('.term').click()")  # a tap


def wide_page(columns=14):
    table = [{"arm": f"arm {n}", **{f"a long heading {c}": 0.5 for c in range(columns)}} for n in range(3)]
    return render(title="t", lead="l", sections=[Section("Figures", "text", tables=[table])])


@pytest.mark.parametrize("width", [1440, 375])
def test_a_wide_table_says_that_it_goes_on(browser, width):
    browser.show(wide_page(), width=width)
    marks = "return [...document.querySelector('section .wide').classList].filter(c => c.startsWith('more')).sort()"
    browser.wait(f"return (() => {{ {marks} }})().join() === 'more-right'")
    edge = "getComputedStyle(document.querySelector('section .wide'), '::after')"
    assert browser.run(f"return {edge}.backgroundImage").startswith("linear")
    table = browser.one("section .scroll")
    assert table.get_attribute("tabindex") == "0"
    browser.run("arguments[0].focus()", table)
    browser.press("ARROW_RIGHT")
    browser.wait(f"return (() => {{ {marks} }})().length === 2")
    edges = "[document.querySelector('tbody th'), arguments[0]].map(e => e.getBoundingClientRect().left)"
    assert abs(browser.run(f"const [a, b] = {edges}; return a - b", table)) < 2  # the first column stays
    browser.run("arguments[0].scrollLeft = 1e6", table)
    browser.wait(f"return (() => {{ {marks} }})().join() === 'more-left'")
    assert browser.run(FITS)
    browser.show(wide_page(0), width=width)  # a narrow one says nothing of the kind
    settle(browser)
    assert browser.run("return document.querySelector('section .wide').className") == "wide"
    assert browser.run("return document.querySelector('section .scroll').hasAttribute('tabindex')") is False


@pytest.mark.parametrize("dark", [False, True])
def test_paper_has_the_numbers_and_no_controls(browser, pages, dark):
    drawn(browser, pages["compare"], dark=dark)
    with browser.on_paper():
        is_visible = "e => e.checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})"
        assert browser.run(f"return [...document.querySelectorAll('nav, #theme, summary')].some({is_visible})") is False
        assert browser.run(f"return [...document.querySelectorAll('main table, .recipe, .terms dl')].every({is_visible})")
        body = "getComputedStyle(document.body)"
        assert browser.run(f"return [{body}.backgroundColor, {body}.color]") == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
        label = "getComputedStyle(document.querySelector('.chart .role-axis-label text')).fill"
        assert browser.run(f"return {label}") == "rgb(68, 68, 68)"
        assert browser.run("return getComputedStyle(document.querySelector('.chart')).breakInside") == "avoid"
        assert browser.hard_to_see() == []


def test_printing_unfolds_all_and_folds_it_again_but_a_long_table_only_where_somebody_has_unfolded_it(browser):
    def panel(title, many):
        rows = [{"x": x, "value": 0.5, "series": "a"} for x in range(many)]
        return Panel(title, (curves(rows, names=["a"], y="y"),), wide(rows[::-1], key="x", label="step"))

    sections = [Section("S", panels=[panel("few", 30), panel("many", 31)])]
    browser.show(render(title="t", lead="l", headlines=[Headline("n", 1)], sections=sections, recipe={"seed": 0}))
    firsts = browser.run("return [...document.querySelectorAll('figure tbody')].map(e => e.rows[0].textContent)")
    assert firsts == ["00.500"] * 2
    visible = "e => e.checkVisibility({contentVisibilityAuto: true})"
    visibility = f"return [...document.querySelectorAll('figure table, .recipe')].map({visible})"
    assert browser.run(visibility) == [False, False, False]
    browser.run("dispatchEvent(new Event('beforeprint'))")
    with browser.on_paper():
        assert browser.run(visibility) == [True, False, True]
        browser.run("document.querySelectorAll('figure details')[1].open = true")
        assert browser.run(visibility) == [True, True, True]
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run(visibility) == [False, True, False]


def test_names_that_are_no_field_names_are_said_as_they_are(browser):
    names = ["a.b[0]", "c: 'd'", HOSTILE]
    rows = [{"x": x, "value": 0.25 * x, "series": name} for x in (0, 1) for name in names]
    steps = [{"low": x, "high": x + 1, "share": 0.5, "series": name} for x in (0, 1) for name in names]
    kinds = [{"name": name, "series": name, "value": 3} for name in names]
    charts = (curves(rows, names=names, y="y"), histograms(steps, names=names), bars(kinds, names=names, x="n"))
    sections = [Section("S", panels=[Panel("p", charts, rows)])]
    drawn(browser, render(title="t", lead="l", headlines=[Headline("n", 1)], sections=sections))
    browser.scroll_to(browser.one(".chart"))
    settle(browser)
    x, y, width, height = browser.run(AREA, browser.one(".chart svg"))
    aim(browser, x + 0.8 * width, y + height / 2)
    aim(browser, x + 0.9 * width, y + height / 2)
    tooltip = browser.wait(SAID)
    assert all(name in tooltip for name in names)
    assert "0.25" in tooltip
