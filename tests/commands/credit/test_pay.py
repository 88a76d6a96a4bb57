"""`--pay`: a block is paid by a column of the file under its own name, without a recipe."""

import pytest

from rollout_files import write_lines
from spanwise.cli import app
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.shared.options import CreditOptions
from spanwise.rollouts import read_rollouts

TEXTS = ["<draft>a b</draft><final>c</final>", "<draft>a</draft><final>c d</final>", "<final>e</final>"]


def file(folder, texts=TEXTS):
    rows = [
        {"prompt": "p", "completion": text, "passed": p, "style": s}
        for text, p, s in zip(texts, (1, 0, 0), (0.2, 0.8, 0.5), strict=True)
    ]
    return write_lines(folder / "1.jsonl", rows)


def credit_of(place, *pay, **options):
    result = credit_rollouts(place, **{**CreditOptions(pay=[*pay]).parsed(), **options, "methods": ["bae"]})
    (applied,) = result.applied
    return result.file_spans.names, applied.credit.block_nk


def test_each_block_is_paid_by_its_column(tmp_path):
    names, credit_nk = credit_of(file(tmp_path), "draft=passed", "final=style")
    assert names == ("draft", "final")
    # By hand: passed 1 0 among the two that have a draft, mean .5; style .2 .8 .5, mean .5.
    assert credit_nk[:2].tolist() == [pytest.approx([0.5, -0.3]), pytest.approx([-0.5, 0.3])]
    assert credit_nk[2, 1].item() == pytest.approx(0.0)


def test_one_column_may_pay_two_blocks(tmp_path):
    _, credit_nk = credit_of(file(tmp_path), "draft=style", "final=style")
    assert credit_nk[:2].tolist() == [pytest.approx([-0.3, -0.3]), pytest.approx([0.3, 0.3])]


def test_the_page_repeats_it(tmp_path):
    place = file(tmp_path)
    for words in ("--pay draft=passed --pay final=style", "--pay draft=passed,final=style"):
        app(
            ["credit", str(place), *words.split(), "--output", str(tmp_path / "out")],
            exit_on_error=False,
            result_action="return_value",
        )
        assert "--pay draft=passed,final=style" in (tmp_path / "out" / "report.html").read_text()


def test_without_tags_a_name_is_the_whole_completion(tmp_path):
    names, credit_nk = credit_of(file(tmp_path, ["a", "b", "c"]), "text=passed")
    assert names == ("text",)
    assert credit_nk[:, 0].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("block", ["answer", "completion"])
def test_the_block_of_the_only_tag_has_the_name_of_the_tag_or_completion(block, tmp_path):
    """Both hold the thought before it, as with several tags."""
    texts = [f"so <answer>{n}</answer>" for n in "abc"]
    names, credit_nk = credit_of(file(tmp_path, texts), f"{block}=passed")
    assert names == (block,)
    assert credit_nk[:, 0].tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_a_column_pays_under_a_name_of_its_own_in_a_recipe(tmp_path):
    objectives = [{"reward": "passed", "name": "right", "pays": ["draft"]}, {"reward": "style", "pays": ["final"]}]
    fields = {"layout": {"draft": ["draft"], "final": ["final"]}, "objectives": objectives}
    _, credit_nk = credit_of(file(tmp_path), overrides=fields)
    assert credit_nk[:2].tolist() == [pytest.approx([0.5, -0.3]), pytest.approx([-0.5, 0.3])]


SHEET = "prompt,draft,final,passed,style\np,a b,c,1,.2\np,a,c d,0,.8\np,,e,0,.5\n"


def test_parts_may_be_columns_of_a_sheet(tmp_path):
    (tmp_path / "sheet.csv").write_text(SHEET)
    names, credit_nk = credit_of(tmp_path / "sheet.csv", "draft=passed", "final=style")
    assert names == ("draft", "final")
    # As in the first test: the third row has no draft.
    assert credit_nk[:2].tolist() == [pytest.approx([0.5, -0.3]), pytest.approx([-0.5, 0.3])]
    assert credit_nk[2, 1].item() == pytest.approx(0.0)
    table = read_rollouts(tmp_path / "sheet.csv", parts=["draft", "final"])
    texts = [table.vocabulary.join(table.tokens.slice(n, n + 1))[0].decode() for n in range(3)]
    assert texts == ["<draft>a b</draft>\n<final>c</final>", "<draft>a</draft>\n<final>c d</final>", "<final>e</final>"]
    assert list(table.rewards) == ["passed", "style"]


def test_a_column_of_completions_goes_before_those_of_parts(tmp_path):
    (tmp_path / "sheet.csv").write_text("prompt,completion,draft,passed\np,<draft>x</draft>,no,1\np,<draft>y</draft>,no,0\n")
    names, credit_nk = credit_of(tmp_path / "sheet.csv", "draft=passed")
    assert names == ("draft",)
    assert credit_nk[:, 0].tolist() == pytest.approx([0.5, -0.5])
