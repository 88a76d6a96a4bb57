"""`spanwise fidelity`: what is re-rolled, what is refused, the tables."""

import io

import pytest
from datasets import Dataset
from rich.console import Console

from measure_small import rolled
from spanwise.batch import Batch
from spanwise.commands.fidelity.fidelity import difference_table, fidelity_tables, fixed_point_table, show
from spanwise.commands.shared.task import task_roller
from spanwise.errors import DataError, RecipeError
from spanwise.fidelity import measure_fidelity
from spanwise.fidelity import rerolls as room
from spanwise.fidelity.fixed_point import fixed_point_rows
from spanwise.fidelity.rerolls import Roller
from spanwise.layout import Layout
from spanwise.recipe import load
from spanwise.tasks import DIGITS_LAYOUT, Task
from spanwise.tasks.embedded import build_model, build_tokenizer


@pytest.fixture(scope="module")
def tiny():
    tokenizer = build_tokenizer()
    return build_model(tokenizer, 0).eval(), tokenizer


def solved(digit, confidence):
    sure = f"<analysis></analysis><confidence>{confidence}</confidence>"
    return f"<reasoning>{digit}</reasoning><answer>{digit}</answer>{sure}"


def rows(texts):
    """What the sampler returns for texts."""
    tokenizer = build_tokenizer()
    batch = Batch.jagged([tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts], texts)
    return batch.ids_nt, batch.mask_nt


@pytest.fixture
def scripted(monkeypatch):
    """A model with scripted completions: first four for each of two prompts, then one confidence per re-roll."""
    heads = []

    def first(model, tokenizer, prompts, *, samples, **options):
        assert list(prompts) == ["1+1_____=", "2+2_____="]
        assert samples == 4
        return rows([
            solved(2, 0.5), solved(2, 0.6), solved(3, 0.7), "<reasoning>2</reasoning><answer>2</answer>",
            solved(4, 0.8), solved(4, "high"), solved(5, 0.9), "no tags",
        ])  # fmt: skip

    def reroll(model, tokenizer, prefixes, *, samples, max_new_tokens, **options):
        heads.extend(tokenizer.decode(prefix) for prefix in prefixes)
        ways = ["<analysis>", *(f"<analysis></analysis><confidence>0.{k}</confidence>" for k in range(1, samples))]
        return rows(ways * len(prefixes))

    monkeypatch.setattr(room, "sample", first)
    monkeypatch.setattr(room, "continue_ids", reroll)
    return heads


def rerolled(tiny, longest):
    data = Dataset.from_dict({"prompt": ["1+1_____=", "2+2_____="], "answer": ["2", "4"]})
    task = Task("digits-easy", "nowhere", data, data, DIGITS_LAYOUT, max_completion_length=longest)
    return room.collect_last_blocks(Roller(*tiny, task, 1.0, longest), data, samples=4, rerolls=3)


def test_prefixes_are_re_rolled_once_each_and_a_completion_may_not_grow_longer_than_it_could_have(tiny, scripted):
    rolls = rerolled(tiny, 32)
    block = "<reasoning>{0}</reasoning><answer>{0}</answer>".format
    assert scripted == [f"1+1_____={block(2)}", f"1+1_____={block(3)}", f"2+2_____={block(4)}", f"2+2_____={block(5)}"]
    assert rolls.prefix_xs.tolist() == [[0, 0, 1, -1], [2, 2, 3, -1]]
    assert rolls.outcome_xs[:, :3].tolist() == [[1, 1, 0], [1, 1, 0]]
    assert rolls.confidence_xs.nan_to_num(nan=-1.0).tolist() == [[0.5, 0.6, 0.7, -1], [0.8, -1, 0.9, -1]]
    assert rolls.again_dm.nan_to_num(nan=-1.0).tolist() == [[-1, 0.1, 0.2]] * 4
    # 6 tokens of the first block and 6 of the last: without its closing tag there is no confidence to read.
    assert bool(rerolled(tiny, 12).again_dm.isnan().all())


def test_answers_and_confidences_are_read_as_the_objectives_say(tiny, monkeypatch):
    """Tags and a column of their own, and `exact`, under which 2.0 is not 2."""
    options = {"tag": "reasoning", "column": "gold", "verify": "exact"}
    layout = {"solution": ["reasoning"], "sure": ["analysis"]}
    brier = {"reward": "brier", "options": {"tag": "analysis"}, "pays": ["sure"]}
    objectives = [{"reward": "correct", "options": options, "pays": ["solution"]}, brier]
    recipe = load(None, {"task": "confidence", "model": "m", "dataset": "d", "layout": layout, "objectives": objectives})
    said = [f"<reasoning>{answer}</reasoning><analysis>{q}</analysis>" for answer, q in (("2", "0.5"), ("2.0", "0.7"))]
    monkeypatch.setattr(room, "sample", lambda *_, **__: rows(said))
    monkeypatch.setattr(room, "continue_ids", lambda *_, **__: rows(["<analysis>0.3</analysis>"] * 4))
    data = Dataset.from_dict({"prompt": ["1+1_____="], "answer": ["9"], "gold": ["2"]})
    roller = task_roller(*tiny, Task("sums", "nowhere", data, data, Layout(layout), 32), recipe)
    rolls = room.collect_last_blocks(roller, data, samples=2, rerolls=2)
    assert rolls.outcome_xs.tolist() == [[1, 0]]
    assert (rolls.confidence_xs.tolist(), rolls.again_dm.tolist()) == ([[0.5, 0.7]], [[0.3] * 2] * 2)


@pytest.mark.parametrize("options", [{}, {"tokens": True}])
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(options, tmp_path):
    clipped = {"objectives": [{"reward": "log_score", "pays": "confidence", "options": {"clip": 0.05}}]}
    late = {"layout": {"plan": ["reasoning"], "solution": ["answer"], "confidence": ["analysis", "confidence"]}}
    for fields in (clipped, late):  # the answer is in the second block
        with pytest.raises(RecipeError):
            show(tmp_path / "no model", load(None, fields), output=tmp_path, console=Console(), options=options)


def test_an_answer_in_the_whole_first_block_and_another_clip_where_only_tokens_are_compared_are_no_reason(tmp_path):
    recipe = load(None, {"objectives": [{"reward": "correct", "pays": ["solution"], "options": {"tag": ""}}]})
    with pytest.raises(DataError, match="no model"):
        show(tmp_path / "no model", recipe, output=tmp_path, console=Console(), options={"samples": 2, "seed": 0})
    # The last block has no confidence, so no baseline clips one.
    layout = {"solution": ["answer"], "sure": ["confidence"], "end": ["analysis"]}
    log_score = {"reward": "log_score", "pays": "sure", "options": {"clip": 0.05}}
    recipe = load(None, {"layout": layout, "objectives": [{"reward": "correct", "pays": "solution"}, log_score]})
    tokens = {"tokens": True, "critics": None, "critic_steps": 1, "reference": "token", "token_prompts": 1, "rerolls": 2}
    with pytest.raises(DataError, match="no model"):
        show(tmp_path / "no model", recipe, output=tmp_path, console=Console(), options={**tokens, "seed": 0})


def test_tables_hold_every_baseline():
    measured = measure_fidelity(rolled(10, 8, 4), group_sizes=[4, 8], resamples=2, draws=20)
    console = Console(width=80, record=True, file=io.StringIO())
    points = fixed_point_rows(group_sizes=(4,), batches=40)
    for table in (*fidelity_tables(measured), difference_table(measured), fixed_point_table(points)):
        console.print(table)
    text = console.export_text()
    assert "…" not in text
    correlation = f"{measured.interval('blended', 8, 'correlation')[0]:.3f}"
    for words in ("outcome (LOO)", correlation, "0.087", "standard error of at most"):
        assert words in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
