"""Ten thousand hostile completions through everything that reads one, and megabytes that must not cost more than their length."""

import time

import pytest
import segmenters
from checks import Cell, check, kept
from hostile import LAYOUTS, families, giants, rows
from linear import READERS, SHAPES

FAMILIES = families()
COUNT = 10_000 // (len(FAMILIES) * len(LAYOUTS)) + 1
#: Completions of each kind that are read under the checks of the shapes, which take half of the time.
CHECKED = 64


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_is_said_is_read_and_credited(family, layout, request):
    cell = Cell(family, LAYOUTS[layout])
    completions = rows(f"test/{family.name}/{layout}", COUNT, family, cell.layout)
    check(cell, completions[:CHECKED], sample=2)
    request.getfixturevalue("unchecked_shapes")
    check(cell, completions, sample=32)
    assert cell.seen[0] == CHECKED + COUNT


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_whatever_is_said_is_kept_voted_on_and_shown(family, tmp_path):
    cell = Cell(family, LAYOUTS["two attempts"])
    kept(cell, rows(f"kept/{family.name}", 48, family, cell.layout), tmp_path)


@pytest.mark.parametrize("name", segmenters.SOUPS)
def test_whatever_is_said_is_cut_by_every_segmenter(name, request):
    layouts, words = segmenters.SOUPS[name]
    for family in segmenters.read_by(FAMILIES, name):
        for layout in layouts:
            segmenters.check(layout, family, segmenters.rows(f"test/{name}/{family.name}", 48, family, words), sample=2)
        request.getfixturevalue("unchecked_shapes")  # the first family has had them


@pytest.mark.parametrize("layout", ["four tags", "no tags"])
def test_a_giant_is_read(layout):
    cell = Cell(FAMILIES[0], LAYOUTS[layout])
    for _, pairs in giants(f"giant/{layout}", 3, cell.family, cell.layout, sizes=(2**16, 2**17)):
        check(cell, pairs, sample=0)


@pytest.mark.usefixtures("unchecked_shapes")  # they cost more than the readers, and users run without them
@pytest.mark.long
@pytest.mark.parametrize("reader", READERS)
def test_time_is_proportional_to_length(reader):
    """At 32 kB no shape takes two seconds on a crowded machine; what is quadratic takes several, or has raised before."""
    for shape, write in SHAPES.items():
        text = write(2**15)
        start = time.process_time()
        READERS[reader](text)
        assert time.process_time() - start < 2.0, shape
