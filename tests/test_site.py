"""What the site is built from: links, pictures, examples of the concepts page, and the check that follows every link."""

import contextlib
import doctest
import importlib
import io
import re

import pytest

import concepts_pictures
import site_links
from pages import DOCS, ROOT, blocks


@pytest.mark.parametrize("module", ["docstrings", "reference_api", "reference_pages"])
def test_the_examples_of_the_generators_run(module):
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def concepts():
    parts = re.split(r"^## ", (DOCS / "concepts.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_every_concept_has_a_sentence_a_picture_and_an_example():
    names = ["Block", "Objective", "Baseline", "Given", "Stratum", "Stop credit", "Step", "Trajectory"]
    assert list(concepts()) == names
    for name, text in concepts().items():
        assert f"**{name.lower()}**" in text.lower(), name
        assert f"](images/concepts-{name.lower().replace(' ', '-')}.svg)" in text, name
        assert text.count("\n```python\n") == 1, name
    for name, picture in concepts_pictures.pictures().items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == picture, "run python docs/_ext/concepts_pictures.py"


def test_the_concepts_print_what_the_page_says(unchecked_shapes):
    """Every `print(...)  # value` prints the value, which was worked out by hand from the rewards on the page."""
    namespace, promised, printed = {}, [], io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code in blocks(DOCS / "concepts.md", "python"):
            promised += re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
            exec(compile(code, "docs/concepts.md", "exec"), namespace)
    assert printed.getvalue().splitlines() == promised
    assert len(promised) == 9


def site(folder, **pages):
    folder.mkdir()
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<html><body>{body}</body></html>")


def test_links_of_a_site_are_followed_and_those_that_lead_nowhere_are_named(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    site(whole, one='<a href="two.html#there">x</a><a href="https://example.org/y">', two='<h1 id="there">y</h1>')
    assert site_links.broken(whole) == []
    site(broken, one='<a href="gone.html"><img src="gone.png"><a href="two.html#gone"><a href="#gone">', two="")
    files = [f"one.html: '{name}' leads to no file." for name in ("gone.html", "gone.png")]
    places = [f"one.html: '{name}' leads to no place on that page." for name in ("two.html#gone", "#gone")]
    assert site_links.broken(broken) == [*files, *places]


def test_links_out_of_docs_find_a_page_of_the_site_and_a_picture_has_its_dark_twin_on_the_page(tmp_path):
    application = pytest.importorskip("sphinx.application")  # it comes with `make docs`
    extension = importlib.import_module("pictures_and_links")
    for_site, page = extension.for_site, DOCS / "howto" / "x.md"
    assert for_site("[a](../../SECURITY.md) [b](../../README.md)", page) == "[a](../project/security.md) [b](../index.md)"
    assert for_site("[recipes](../../recipes) and [verl](../verl.md#gae)", page) == "recipes and [verl](../verl.md#gae)"
    assert for_site("```\n[a](../../SECURITY.md)\n```", page) == "```\n[a](../../SECURITY.md)\n```"
    assert for_site("[a](docs/verl.md)", DOCS / "project" / "changelog.md", ROOT) == "[a](../verl.md)"
    # A picture that is shown in one of the two only would be missing in the other.
    twins = [extension.twin(DOCS / "images" / f"{name}.png") for name in ("fields", "report-train", "fields-dark")]
    assert twins == [DOCS / "images" / "fields-dark.png", None, None]
    (tmp_path / "images").mkdir()
    for name in ("a.svg", "a-dark.svg"):
        (tmp_path / "images" / name).write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (tmp_path / "index.md").write_text("# Title\n\n![words](images/a.svg)\n")
    settings = {"extensions": ["myst_nb", "pictures_and_links"], "html_theme": "basic"}
    folders = tmp_path, None, tmp_path / "out", tmp_path / "trees"
    application.Sphinx(*folders, "html", settings, status=None, warning=None).build()
    images = re.findall(r'class="([^"]+)" src="_images/([^"]+)"', (tmp_path / "out" / "index.html").read_text())
    assert images == [("only-light", "a.svg"), ("only-dark", "a-dark.svg")]
