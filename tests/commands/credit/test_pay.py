"""`--pay`: a block is paid by a column of the file under its own name, without a recipe."""

import pytest

from rollout_files import write_lines
from spanwise.cli import app
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.commands.shared.options import CreditOptions

TEXTS = ["<draft>a b</draft><final>c</final>", "<draft>a</draft><final>c d</final>", "<final>e</final>"]


def file(folder, completions=TEXTS):
    cells = zip(completions, (1, 0, 0), (0.2, 0.8, 0.5), strict=True)
    rows = [{"prompt": "p", "completion": text, "passed": p, "style": s} for text, p, s in cells]
    return write_lines(folder / "1.jsonl", rows)


def sheet(text):
    def write(folder):
        (folder / "sheet.csv").write_text(text)
        return folder / "sheet.csv"

    return write


BOTH, PAIR = ("draft=passed", "final=style"), ("draft", "final")
#: Passed is 1 0 among the two that have a draft, mean .5; style .2 .8 .5, mean .5.
BY_HAND = [[0.5, -0.3], [-0.5, 0.3]]
THIRDS = [[2 / 3], [-1 / 3], [-1 / 3]]
SHEET = "prompt,draft,final,passed,style\np,a b,c,1,.2\np,a,c d,0,.8\np,,e,0,.5\n"
SAID_AND_SHEET = "prompt,completion,draft,passed\np,<draft>x</draft>,no,1\np,<draft>y</draft>,no,0\n"
OBJECTIVES = [{"reward": "passed", "name": "right", "pays": ["draft"]}, {"reward": "style", "pays": ["final"]}]
RECIPE = {"overrides": {"layout": {"draft": ["draft"], "final": ["final"]}, "objectives": OBJECTIVES}}
ANSWERS = [f"so <answer>{n}</answer>" for n in "abc"]
CASES = {
    "a column each": (file, BOTH, {}, PAIR, BY_HAND),
    "one column twice": (file, ("draft=style", "final=style"), {}, PAIR, [[-0.3, -0.3], [0.3, 0.3]]),
    "no tags: the completion has any name": (lambda folder: file(folder, [*"abc"]), ["text=passed"], {}, ("text",), THIRDS),
    "the only tag, and the thought before it": (lambda f: file(f, ANSWERS), ["answer=passed"], {}, ("answer",), THIRDS),
    "the completion around it": (lambda f: file(f, ANSWERS), ["completion=passed"], {}, ("completion",), THIRDS),
    "under a name of its own, by a recipe": (file, (), RECIPE, PAIR, BY_HAND),
    "parts that are columns of a sheet": (sheet(SHEET), BOTH, {}, PAIR, BY_HAND),
    "completions go before columns of parts": (sheet(SAID_AND_SHEET), ["draft=passed"], {}, ("draft",), [[0.5], [-0.5]]),
}


@pytest.mark.parametrize("case", CASES)
def test_each_block_is_paid_by_its_column(case, tmp_path):
    write, pay, options, names, expected = CASES[case]
    result = credit_rollouts(write(tmp_path), **{**CreditOptions(pay=[*pay]).parsed(), **options, "methods": ["bae"]})
    assert result.file_spans.names == names
    (arm,) = result.applied
    assert arm.credit.block_nk[: len(expected)].tolist() == [pytest.approx(row) for row in expected]
    assert names != PAIR or arm.credit.block_nk[2, 1].item() == pytest.approx(0.0)


def test_the_page_repeats_it(tmp_path):
    for words in ("--pay draft=passed --pay final=style", "--pay draft=passed,final=style"):
        command = ["credit", str(file(tmp_path)), *words.split(), "--output", str(tmp_path / "out")]
        app(command, exit_on_error=False, result_action="return_value")
        assert "--pay draft=passed,final=style" in (tmp_path / "out" / "report.html").read_text()
