"""In how many completions each tag opens, beside those that a layout asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanwise import Layout
from spanwise.segment import census
from spanwise.segment.census import census_of

PIECES = ["<plan>", "</plan>", "<code>", "<answer>", "</answer>", "text", "<", "< plan>", "<b", "5 <answer"]


@given(st.lists(st.lists(st.sampled_from(PIECES)).map("".join), max_size=8))
def test_each_tag_is_in_as_many_completions_as_hold_its_text(texts):
    counts = census(texts, ["answer", "nowhere"])
    for tag in ("answer", "nowhere", "plan", "code"):
        expected = sum(f"<{tag}>" in text for text in texts)
        assert {**counts.others, **counts.wanted}.get(tag, 0) == expected


def test_the_others_come_in_order_and_special_tokens_are_no_tags():
    counts = census(["<s><plan><code><eos>", "<code><plan><b>"], ["answer"])
    assert list(counts.others.items()) == [("code", 2), ("plan", 2), ("b", 1)]


def test_a_tag_lacks_below_one_in_a_hundred():
    assert census(["<a>"] + [""] * 99, ["a"]).lacking == ()
    assert census(["<a>"] + [""] * 100, ["a"]).lacking == ("a",)
    assert census([], ["a"]).lacking == ()
    assert census(["4</a>"], ["a", "b"], prefilled="a").lacking == ("b",)  # a prefilled tag is in every completion


def test_the_sentence_says_what_is_there_instead():
    sentence = census(["<plan><code>", "<plan>"], ["answer", "plan", "confidence"]).sentence
    wanted = "<answer> is in 0 and <confidence> is in 0 of 2 completions."
    assert sentence == f"{wanted} Instead, the completions contain <plan> (in 2), <code> (in 1)."
    assert census(["4", ""], ["a"]).sentence == "<a> is in 0 of 2 completions. No completion has tags."
    assert census(["<a>"], ["a"]).sentence == ""


TAGS = ["<Answer>", "<ANSWER>", "<ответ>", "<答案>", "<réponse>", "<answer >"]


@pytest.mark.parametrize(("tag", "named"), [*zip(TAGS, TAGS, strict=True), (f"<{'b' * 100_000}>", f"<{'b' * 40}>")])
def test_a_tag_in_other_letters_is_named_in_few_characters(tag, named):
    sentence = census([f"{tag}4"] * 2, ["answer"]).sentence
    assert sentence == f"<answer> is in 0 of 2 completions. Instead, the completions contain {named} (in 2)."


def test_each_segmenter_of_a_layout_is_counted():
    layout = Layout({"why": "why", "price": "json:price"})
    sentences = [count.sentence for count in census_of(layout, ["<why>so</why>{}"] * 2)]
    assert sentences == ["", "'price' is in 0 of 2 completions. The segmenter json finds nothing."]


@pytest.mark.parametrize(
    ("segmenter", "mark", "text", "holds"),
    [
        ("markdown", "Step [1]", "# Step [1]\nAdd.", 1), ("delimiters", "[1]...[/1]", "[1]Add.[/1]", 1),
        ("regex", "score: [01]", "score: 1", 1), ("markdown", "Plan", "## plan\nAdd.", 1),
        ("markdown", " Plan", "## plan\nAdd.", 0), ("markdown", "section", "# Sum\nAdd.", 1),
        ("markdown", "section[*]", "Add.", 0), ("code", "python.function", "```py\ndef f(): pass\n```", 1),
        ("code", "python.class", "```py\ndef f(): pass\n```", 0), ("regex", "x", "score: 1", 0),
        ("json", "items[0].price", '{"items": [{"price": 1}]}', 1),  # an index counts as any, of json alone
    ],
)  # fmt: skip
def test_marks_are_counted_as_they_are_found(segmenter, mark, text, holds):
    counts = census([text], [mark], segmenter=segmenter)
    assert (counts.count(mark), list(counts.wanted.values())) == (holds, [holds])
