"""The segmenter `markdown`: hand-worked completions, and another parser of Markdown for what is a heading and a fence."""

import random

import pytest
from markdown_it import MarkdownIt

from segment_small import claims_in, segment
from spanwise.layout import Layout
from spanwise.segment.markdown import outline
from spanwise.types import Fault

PLAN = Layout({"plan": "markdown:Plan", "answer": "markdown:Answer", "rest": []})


def sections_of(text, layout):
    claims, fault = claims_in(layout, text)
    return [(layout.names[claim.part.block], content) for claim, _, content in claims], fault


SAID = {
    "plain": ("Hm.\n# Plan\nAdd.\n# Answer\n4", [("plan", "Add.\n"), ("answer", "4")], 0),
    "capitals and closing signs": ("## PLAN ##\nAdd.\n## answer\t#\n4", [("plan", "Add.\n"), ("answer", "4")], 0),
    "another level goes on": ("# Plan\na\n## How\nb\n# Other\nc", [("plan", "a\n## How\nb\n")], 0),
    "one inside the other": ("# Plan\na\n## Answer\nb\n# Plan B", [("plan", "a\n## Answer\nb\n"), ("answer", "b\n")], 0),
    "in a fence": ("# Plan\n```\n# Answer\n```\n# Answer\n4", [("plan", "```\n# Answer\n```\n"), ("answer", "4")], 0),
    "a title twice": ("# Plan\na\n# Plan\nb", [("plan", "a\n")], Fault.DUPLICATE),
    "cut off after the title": ("# Plan", [("plan", "")], 0),
    "longer titles": ("# Plan B\n# The Answer\n", [], 0),
    "lines of another system": ("# Plan\r\na\r\n# Answer\r\n", [("plan", "a\r\n"), ("answer", "")], 0),
}


@pytest.mark.parametrize("name", SAID)
def test_what_sections_say(name):
    text, contents, fault = SAID[name]
    assert sections_of(text, PLAN) == (contents, fault)


def test_a_turn_begins_with_a_line_of_its_own():
    answer = sections_of("# Plan\nAdd.<|im_end|># Answer\n4<|im_end|>", PLAN)
    assert answer == ([("plan", "Add.<|im_end|>"), ("answer", "4<|im_end|>")], 0)
    (fence,), _ = outline(b"```py\nx = 1\n```<|im_end|>Done<|im_end|>")
    assert (fence.inner, fence.closed) == ((6, 12), True)


def test_a_block_per_section():
    layout = Layout(["section[*]"], segmenter="markdown", most=3)
    text = "Hm.\n# A\na\n## B\nb\n# C\nc\n"
    assert sections_of(text, layout)[0] == [("section[0]", "a\n## B\nb\n"), ("section[1]", "b\n"), ("section[2]", "c\n")]
    assert sections_of(text + "# D", layout)[1] == Fault.MORE
    owners, texts, _ = segment(layout, text.splitlines(keepends=True))
    assert owners == ["section[0]"] * 3 + ["section[1]"] * 2 + ["section[2]"] * 2
    assert texts["section[1]"][""] == "## B\nb\n"
    layout = Layout({"plan": "markdown:plan", "other[*]": "markdown:section", "rest": []}, most=2)  # any that no title names
    assert [block for block, _ in sections_of("# A\n# Plan\n# B\n", layout)[0]] == ["other[0]", "plan", "other[1]"]


LINES = [
    "# A", "## B ##", "### C #", "#", "# ", "#D", "   # E", "    # no", "####### no", "x", "", "", "```", "````", "~~~", "~~~ py",
    "```py", "`` `", "``` a`b", "  ```", "   ~~~~", "```` ", "# é#", "# a # b", "\\# x", "# x\\",
]  # fmt: skip


def test_agrees_with_another_parser():
    draw, parser = random.Random(0), MarkdownIt("commonmark")
    for _ in range(600):
        lines = draw.choices(LINES, k=draw.randint(1, 9))
        text = "\n".join(lines) + "\n"
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line.encode()) + 1)
        tokens = parser.parse(text)
        data = text.encode()
        code, titled = outline(data)
        expected = [(starts[t.map[0]], starts[t.map[1]]) for t in tokens if t.type == "fence"]
        assert [(fence.start, fence.stop) for fence in code] == expected, text
        fenced = [t.content.rstrip("\n") for t in tokens if t.type == "fence"]
        plain = [line.lstrip(" ") for line in lines]
        if all(line in plain for line in lines):  # another parser takes the indentation of the fence out of its lines
            assert [data[slice(*fence.inner)].decode().rstrip("\n") for fence in code] == fenced, text
        titles = [(starts[t.map[0]], int(t.tag[1])) for t in tokens if t.type == "heading_open" and t.markup[0] == "#"]
        assert [(heading.start, heading.level) for heading in titled] == titles, text
        contents = [tokens[n + 1].content for n, t in enumerate(tokens) if t.type == "heading_open" and t.markup[0] == "#"]
        assert [heading.title for heading in titled] == contents, text
