"""The token view of a real export in a browser: its arithmetic, its group, its list and its hints, at three widths."""

# ruff: noqa: RUF001 the page writes − and × where it means them

import random

import pyarrow.parquet as pq
import pytest

from arithmetic import holds
from report_pages import credit_page
from rollout_files import quiet, verl_file
from spanwise.commands.credit.credit import credit

WIDTHS = [(1440, False), (768, True), (375, False), (375, True)]
HINT = "return document.querySelector('.token-details')"
COUNT = "return document.querySelector('.token-count').textContent"


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """48 completions in two steps: right and wrong, with every kind of confidence, one cut off."""
    folder = tmp_path_factory.mktemp("explained")
    roll = random.Random(5)
    outputs, prompts = [], []
    for group in (n // 8 for n in range(48)):
        answer = roll.choice(["4", "4", "5"])
        stated = roll.choice(["0.9", "0.7", "0.0", "1.0", "high", None])
        tail = "" if stated is None else f"<analysis>I checked.</analysis><confidence>{stated}</confidence>"
        outputs.append(f"<reasoning>2 and {group} make {answer}.</reasoning><answer>{answer}</answer>{tail}")
        prompts.append(f"What is 2+{group}? </script> \u202e{'long ' * 30 if group == 5 else ''}")
    outputs[-1] = "<reasoning>2 and " + "supercalifragilistic" * 40
    credit(verl_file(folder / "1.jsonl", outputs, prompts=prompts, gts=["4"] * 48), output=folder / "out", console=quiet())
    return folder / "out"


@pytest.fixture(scope="module")
def rows(export):
    return pq.read_table(export / "credit.parquet").to_pylist()


def opened(browser, export, **how):
    browser.show(export / "report.html", **how)
    browser.wait("return document.querySelector('.token-app:not([hidden])')")


def listing(browser):
    """Every completion of the list, in its order, by scrolling through it."""
    browser.run("document.querySelector('.token-listing').open = true")
    return browser.driver.execute_async_script("""
        const done = arguments[0], box = document.querySelector('.token-table'), seen = [];
        const wait = () => new Promise((r) => requestAnimationFrame(r));
        (async () => {
          await wait();
          for (box.scrollTop = 0; ; box.scrollTop += box.clientHeight / 2) {
            await wait(); await wait();
            for (const row of box.querySelectorAll('[data-n]')) if (!seen.includes(+row.dataset.n)) seen.push(+row.dataset.n);
            if (box.scrollTop + box.clientHeight >= box.scrollHeight - 1) break;
          }
          done(seen);
        })();""")


def sort_by(browser, key):
    browser.run("document.querySelector(`[aria-label='Sort by ${arguments[0]}']`).click()", key)


#: Point at an element that stands at this place of the window: the hint's text, its left and right edge, whether it lies over it.
POINT = """
const [element, block] = arguments, hint = document.querySelector('.token-details');
element.scrollIntoView({block, inline: 'center', behavior: 'instant'});
const over = (kind, at) => element.dispatchEvent(new PointerEvent(kind, {bubbles: true, ...at}));
const first = element.getClientRects()[0];
over('pointerover', {clientX: first.left + 1, clientY: first.top + 1});
const box = hint.getBoundingClientRect(), covers = [...element.getClientRects()].some((r) =>
  r.left < box.right && r.right > box.left && r.top < box.bottom && r.bottom > box.top);
const found = [hint.checkVisibility() ? hint.innerText.trim() : '', box.left, box.right, covers];
over('pointerout', {});
return found;
"""


@pytest.mark.parametrize(("width", "dark"), WIDTHS)
def test_nothing_is_wider_than_the_window_but_what_scrolls(browser, export, width, dark):
    opened(browser, export, width=width, height=900, dark=dark)
    names = ("headline", "panes", "why", "group", "listing", "more")  # the completion comes first, controls are folded
    tops = [browser.run(f"return document.querySelector('.token-{name}').getBoundingClientRect().top") for name in names]
    assert tops == sorted(tops)
    assert not any(browser.one(f"[name={name}]").is_displayed() for name in ("left", "order", "search"))
    for fold in ("listing", "more", "prompt"):
        browser.run(f"document.querySelector('.token-{fold}').open = true")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert (
        browser.run("""
        return [...document.querySelectorAll('.token-view *')].filter((e) => !e.closest('.token-scroll, .token-details, template'))
          .filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.className || e.tagName)""")
        == []
    )
    for box in browser.each(".token-scroll"):
        assert box.get_attribute("tabindex") == "0"  # can be scrolled by keys, and says that it goes on
        assert "sideways" in box.get_attribute("aria-label")


@pytest.mark.parametrize("width", [1440, 768, 375])
def test_a_hint_never_lies_on_what_it_explains(browser, export, width):
    opened(browser, export, width=width, height=700)
    browser.run("document.querySelector('.token-listing').open = true")
    targets = ".token-panes .token, .token-sum, .token-term, .token-credit, .token-group [data-hint]"
    elements = browser.run("return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility())", targets)
    for element in [elements[0], *random.Random(1).sample(elements, 14)]:
        for block in ("end", "start", "center"):  # at the lower edge, too
            text, left, right, covers = browser.run(POINT, element, block)
            assert text
            assert not covers, (element.text, block)
            assert 0 <= left < right <= width


def test_on_a_phone_the_strip_has_its_own_space(browser, export):
    opened(browser, export, width=375, height=700)
    browser.run("document.querySelector('.token-panes .token').click()")
    strip = browser.run(HINT + ".getBoundingClientRect().toJSON()")
    assert [strip["left"], strip["right"], strip["bottom"]] == [0, 375, 700]
    assert browser.run("return parseFloat(document.body.style.paddingBottom)") >= strip["height"]
    browser.run("scrollTo({top: document.documentElement.scrollHeight, behavior: 'instant'})")
    last = browser.run("return document.querySelector('main').getBoundingClientRect().bottom")
    assert last <= strip["top"] + 1
    browser.press("ESCAPE")
    assert browser.run("return document.body.style.paddingBottom") == ""


def test_grpo_stands_left_the_recipe_right_and_what_differs_most_is_first(browser, export, rows):
    """The order is computed from the file alone."""

    def unit(method):
        names = [name for name in rows[0] if name.startswith(f"credit/{method}/") and "stop" not in name]
        sizes = sorted(abs(row[name]) for row in rows for name in names if row[name])
        return sizes[-(-98 * (len(sizes) - 1) // 100)]

    def gap(row):
        grpo = four_digits(row["credit/grpo/completion"]) / unit("grpo")
        blockwise = [row[f"credit/bae/{block}"] for block in ("solution", "confidence")]
        return max(abs(grpo - four_digits(value) / unit("bae")) for value in blockwise if value is not None)

    opened(browser, export)
    sides = "return ['left', 'right'].map((n) => document.querySelector(`[name=${n}]`).selectedOptions[0].text)"
    assert browser.run(sides) == ["grpo", "bae"]
    order = sorted(range(len(rows)), key=lambda n: (-gap(rows[n]), n))
    assert listing(browser) == order
    assert browser.run(COUNT) == f"1 of 48: completion {order[0] + 1} of 48"


def four_digits(value):
    return float(f"{value:.4g}")


def test_the_list_sorts_as_python_does(browser, export, rows):
    opened(browser, export)
    for key, column in (("bae: confidence", "credit/bae/confidence"), ("reward correct", "reward/correct")):
        present = [n for n in range(len(rows)) if rows[n][column] is not None]
        absent = [n for n in range(len(rows)) if rows[n][column] is None]  # what is not known is last both ways
        directions = []
        for _ in range(2):
            sort_by(browser, key)
            directions.append(browser.one("th[aria-sort=descending], th[aria-sort=ascending]").get_attribute("aria-sort"))
            sign = -1 if directions[-1] == "descending" else 1
            assert listing(browser) == sorted(present, key=lambda n: (sign * four_digits(rows[n][column]), n)) + absent
        assert sorted(directions) == ["ascending", "descending"]


FILTERS = [
    ("bae: confidence", ">0.1", lambda r: (r["credit/bae/confidence"] or 0) > 0.1),
    ("bae: confidence", "-0.5..0", lambda r: -0.5 <= (9 if (x := r["credit/bae/confidence"]) is None else x) <= 0),
    ("outcome", "wrong", lambda r: r["reward/correct"] == 0),
    ("status", "unparsable", lambda r: r["status/brier"] == "unparsable"),
    ("prompt", "2+5", lambda r: "2+5" in r["prompt"]),
    ("confidence", "0.7", lambda r: r["stated/brier"] == 0.7),
    ("confidence", "none", lambda r: r["stated/brier"] is None),
    ("prompt", "nowhere", lambda r: False),
]  # fmt: skip


def test_the_list_filters_as_python_does_and_is_gone_through_by_keys(browser, export, rows):
    opened(browser, export)
    sort_by(browser, "completion")
    for key, text, fits in FILTERS:
        field = f"document.querySelector(`[aria-label^='Filter {key}:']`)"
        browser.run(f"{field}.value = arguments[0]; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))", text)
        expected = [n for n in range(len(rows)) if fits(rows[n])]
        assert listing(browser) == expected, (key, text)
        assert expected or browser.run(COUNT) == "No completion fits."
        browser.run("document.querySelector('[data-go=reset]').click()")
    assert len(listing(browser)) == len(rows)
    browser.run("document.querySelector('.token-table').scrollTop = 0")
    browser.wait("return document.querySelector('.token-table tr[data-row=\"0\"]')")
    browser.run("document.querySelector('.token-table tr[data-row=\"0\"]').focus()")
    browser.press("ARROW_DOWN", "ARROW_DOWN", "ENTER")
    assert "completion 3 of 48" in browser.run(COUNT)
    browser.run("document.querySelector('.token-table tr[data-n=\"2\"]').focus()")
    browser.press("END")
    assert browser.run("return document.activeElement.dataset.n") == str(len(rows) - 1)
    browser.press("ENTER")
    assert browser.run("return location.hash") == "#token-48"


def test_the_arithmetic_shown_holds(browser, export, rows):
    opened(browser, export)
    seen = 0
    for n in (0, 5, 17, 30, 46, 47):
        browser.run("location.hash = arguments[0]", f"#token-{n + 1}")
        browser.wait(f"return document.querySelector('.token-group tr.current button')?.textContent === '{n + 1}'")
        sums = [e.get_property("textContent") for e in browser.each(".token-reason .token-sum")]
        assert all(holds(text) for text in sums), sums
        seen += len(sums)
        credits = browser.run(
            "return [...document.querySelectorAll('.token-reason')].map((e) =>"
            " [e.closest('.token-method').querySelector('h4'), e.querySelector('b'), e.querySelector('.token-credit')]"
            " .map((each) => each.textContent))"
        )
        for method, block, number in credits:
            assert float(number.replace("−", "-")) == pytest.approx(rows[n][f"credit/{method}/{block}"], rel=5.1e-4)
        assert len(credits) >= 2
    assert seen > 20


def test_the_group_leads_to_its_completions_and_says_who_was_compared(browser, export, rows):
    opened(browser, export, fragment="token-3")
    lines = "[...document.querySelectorAll('.token-group tbody tr')]"
    group = browser.run(f"return {lines}.map((e) => [...e.children].map((c) => c.textContent))")
    mates = [n for n in range(len(rows)) if rows[n]["group"] == rows[2]["group"]]
    assert [int(cells[0]) for cells in group] == [n + 1 for n in mates]
    strata_of = [{part["objective"]: part["stratum"] for part in row["parts/bae"] if part["stratum"] >= 0} for row in rows]
    for cells, n in zip(group, mates, strict=True):
        strata, of_third = strata_of[n], strata_of[2]
        same = [name for name in of_third if strata.get(name) == of_third[name]]
        assert cells[-1] == ("this one" if n == 2 else ", ".join(same) or "nothing")
    browser.run(f"document.querySelector(`[aria-label='Go to completion {mates[-1] + 1}']`).click()")
    assert browser.run("return location.hash") == f"#token-{mates[-1] + 1}"
    assert "Gold answer 4" in browser.run("return document.querySelector('.token-gold').textContent")


def test_words_are_explained_by_pointer_and_by_keys(browser, export):
    opened(browser, export, height=1200)
    term = browser.one(".token-reason-head > :last-child .token-term")
    browser.point_at(term)
    assert browser.run(HINT).text.startswith("token share: The part of a block's credit")
    browser.point_at(browser.one(".token-count"))
    assert not browser.run(HINT).is_displayed()
    browser.run("arguments[0].focus()", term)
    assert browser.run(HINT).is_displayed()


def test_thousands_of_rows_are_quick(browser):
    browser.show(credit_page(4000, 6), width=1200)
    browser.wait("return document.querySelector('.token-app:not([hidden])')", seconds=30)
    browser.run("document.querySelector('.token-listing').open = true")
    click = "document.querySelector(`[aria-label='Sort by completion']`).click()"
    assert browser.run(f"const start = performance.now(); {click}; return performance.now() - start") < 3000
    assert browser.wait("return document.querySelectorAll('.token-table [data-n]').length") < 60


def test_print_leaves_out_the_controls_and_has_the_whole_table_of_the_group(browser, export):
    opened(browser, export, width=794, height=1123)
    table = "return document.querySelector('.token-group table').getBoundingClientRect().right"
    assert browser.run(table) > 794  # on the screen it is scrolled
    kept = {"headline": True, "panes": True, "why": True, "bar": False, "listing": False, "more": False}
    with browser.on_paper():
        assert browser.run(table) <= 794
        for name, visible in kept.items():
            assert browser.one(f".token-{name}").is_displayed() == visible, name
