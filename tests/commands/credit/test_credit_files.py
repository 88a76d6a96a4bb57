"""`spanwise credit` on files: formats, methods per token, what is left behind, bad input, the page."""

import json
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trl_small
from report_pages import Page, data_of, decoded
from rollout_files import LAYOUT, episode, tagged, texts, trace, verl_file, verl_rows, write_lines, write_own
from rollouts_cases import Case, completion
from spanwise.commands.credit.credit import credit, credit_rollouts
from spanwise.commands.credit.page import choose_rows, opening_tokens
from spanwise.credit import sae
from spanwise.credit.methods._gae import SaeSegments
from spanwise.errors import DataError, RecipeError
from spanwise.rollouts import read_rollouts, write_rollouts
from spanwise.rollouts.table import fitting_runs

pytestmark = [*trl_small.THIRD_PARTY, pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning")]


def test_a_judges_own_trace_is_no_rollout(tmp_path):
    line = episode(trace("5", "4", {"exact": {"score": 0.0, "weight": 0.5}}))
    line["traces"].append({**trace("fine", "4", {}), "agent": {"name": "judge", "trainable": False}})
    table = read_rollouts(write_lines(tmp_path / "traces.jsonl", [line]))
    assert (table.source, table.step_n.tolist(), texts(table)) == ("verifiers", [3], ["5"])


def own_file(path, *, values=(), recipe=""):
    """spanwise's own columns, as `rollouts.schema` names them, for the words of a small tokenizer beside it."""
    tokenizer, replies = trl_small.tokenizer(), trl_small.SAID[:4]
    ids = [tokenizer.convert_tokens_to_ids(reply.pieces) for reply in replies]
    columns = {"text": ["".join(reply.pieces) for reply in replies], "reward/correct": [reply.right for reply in replies]}
    for name in ("logprobs", *values) if values else ():
        columns[name] = [[-0.1 if name == "logprobs" else 0.5] * len(row) for row in ids]
    write_own(path / "rollouts" / "step_000001.parquet", ids, **columns)
    tokenizer.save_pretrained(path / "model")
    (path / "recipe.yaml").write_text(f"layout: {json.dumps(LAYOUT)}\nprompts: 1\ngroup_size: 4\n{recipe}")
    return path


def test_a_token_of_a_tool_has_no_value_and_is_as_if_deleted(tmp_path):
    """GAE and SAE of a run's file are the same with a tool's tokens in the middle and without them: null is not 0."""
    plain, tool = (own_file(tmp_path / name, values=["values"]) for name in ("plain", "tool"))
    columns = pq.read_table(plain / "rollouts" / "step_000001.parquet").to_pydict()
    draw = np.random.default_rng(0)
    for name, shift in (("values", 0), ("logprobs", -2)):
        columns[name] = [(draw.random(len(row)) + shift).tolist() for row in columns[name]]
    pq.write_table(pa.table(columns), plain / "rollouts" / "step_000001.parquet")
    cells = {"completion_ids": [5, 6], "trainable": [False] * 2, "values": [None] * 2, "logprobs": [None] * 2}
    columns |= {name: [row[:3] + more + row[3:] for row in columns[name]] for name, more in cells.items()}
    pq.write_table(pa.table(columns), tool / "rollouts" / "step_000001.parquet")
    options, trainable = {"methods": ["gae", "sae"], "overrides": {"layout": LAYOUT}}, np.concatenate(columns["trainable"])
    without, within = (credit_rollouts(folder, **options) for folder in (plain, tool))
    for plain_arm, tool_arm in zip(without.applied, within.applied, strict=True):
        expected, advantages = plain_arm.advantages(without.table, 0, 4), tool_arm.advantages(within.table, 0, 4)
        np.testing.assert_array_equal(advantages[trainable], expected)
        assert not advantages[~trainable].any()
        assert np.unique(expected).size > 4


PAIR = """method: sae
objectives: [{reward: correct, pays: solution}, {reward: brier, pays: confidence, given: correct}]
"""


def test_values_of_other_streams_are_not_taken_for_what_is_asked(tmp_path):
    bare, single = own_file(tmp_path / "0"), own_file(tmp_path / "1", values=["values"])
    several = own_file(tmp_path / "2", values=["values/correct", "values/brier"], recipe=PAIR)
    pair = {"methods": ["recipe"], "recipe": several / "recipe.yaml"}
    for folder, options, needs in (
        (single, pair, "for correct, brier, but .* holds only one value"),
        (several, {"methods": ["gae"]}, r"for return, but .* holds only values for correct, brier\."),
        (bare, {"methods": ["gae"]}, "needs values of a critic, but"),
        (bare, {"methods": ["sae"]}, "and log-probabilities"),
        (bare, {"methods": ["gigpo"]}, "trajectory_s, step_s"),
    ):
        with pytest.raises(RecipeError, match=needs):
            credit_rollouts(folder, **options)
    assert len(credit_rollouts(single, **pair, overrides={"values": "shared"}).applied) == 1


def test_a_recipe_says_what_values_predict_where_the_columns_are_the_rewards(tmp_path):
    """By hand: with lambda 1, a token's advantage is the reward minus the value, summed over both rewards."""
    values = [[0.5] * 2, [0.25, 0.75]]
    columns = {"prompt": ["q"] * 2, "tokens": [["so ", "4"], ["so ", "5"]], "trainable": [[True] * 2] * 2}
    columns |= {"reward/grade": [1.0, 2.0], "reward/style": [0.5] * 2, "values/grade": values, "values/style": values}
    pq.write_table(pa.table(columns), tmp_path / "export.parquet")
    overrides = {"method": "gae", "values": "objective", "options": {"lam": 1.0}}
    result = credit_rollouts(tmp_path, methods=["recipe"], overrides=overrides)
    advantages = result.applied[0].advantages(result.table, 1, 2) * 2  # shared out over the tokens of the completion
    assert advantages.tolist() == pytest.approx([2.0 + 0.5 - 2 * 0.25, 2.0 + 0.5 - 2 * 0.75])


def test_chunks_change_nothing(tmp_path, monkeypatch):
    for step in (9, 10):  # one prompt, two steps; 9.jsonl comes before 10.jsonl
        write_lines(tmp_path / f"{step}.jsonl", [row for row in verl_rows() if row["step"] == step])
    whole = credit_rollouts(tmp_path, overrides={"layout": LAYOUT})
    assert (whole.table.group_n.tolist(), whole.table.step_n.tolist()) == ([0] * 4 + [1] * 4, [9] * 4 + [10] * 4)
    for module in ("apply", "write"):
        monkeypatch.setattr(f"spanwise.commands.credit.{module}.AT_A_TIME", 25)
    parts = credit(tmp_path, output=tmp_path / "out", overrides={"layout": LAYOUT})
    assert len(list(fitting_runs(whole.table.tokens.lengths, 25))) > 2
    for arm, chunked in zip(whole.applied, parts.applied, strict=True):
        assert torch.equal(arm.credit.block_nk, chunked.credit.block_nk)
        column = pq.read_table(tmp_path / "out" / "credit.parquet")[f"advantages/{arm.name}"].to_pylist()
        np.testing.assert_array_equal(np.concatenate(column), arm.advantages(whole.table, 0, 8))


def test_a_refinement_compares_whole_groups_in_chunks_too(tmp_path, monkeypatch):
    options = {"methods": ["recipe"], "overrides": {"layout": LAYOUT, "method": "gae", "refine": "ktae"}}
    folder = own_file(tmp_path, values=["values"])
    whole = credit_rollouts(folder, **options)
    monkeypatch.setattr("spanwise.commands.credit.apply.AT_A_TIME", 1)
    chunked = credit_rollouts(folder, **options)
    np.testing.assert_array_equal(*(result.applied[0].advantages(result.table, 0, 4) for result in (whole, chunked)))


@pytest.mark.parametrize("method", ["bae", "reinforce++"])
def test_a_share_of_the_batch_is_counted_in_its_own_step(tmp_path, monkeypatch, method):
    for step, more in ((1, ""), (2, "7 7 7 7 ")):
        rows = [{**row, "step": step, "output": more + row["output"]} for row in verl_rows()[:4]]
        write_lines(tmp_path / f"{step}.jsonl", rows)
    monkeypatch.setattr("spanwise.commands.credit.apply.AT_A_TIME", 25)  # a part is not a whole step

    def credit_per(per):
        result = credit_rollouts(tmp_path, methods=["recipe"], overrides={"layout": LAYOUT, "method": method, "per": per})
        return result.table, result.applied[0].advantages(result.table, 0, 8)

    (table, per_batch), (_, per_one) = credit_per("batch"), credit_per(1)
    offsets = table.tokens.offsets
    count = np.array([table.trainable[first:last].sum() for first, last in pairwise(offsets)])
    mean = np.repeat([count[:4].mean(), count[4:].mean()], 4)
    assert mean[0] < mean[4]
    # The last token alone pays for stopping, whatever the share.
    inside = np.setdiff1d(np.arange(len(per_one)), offsets[1:] - 1)
    np.testing.assert_allclose(per_batch[inside], (per_one / np.repeat(mean, table.tokens.lengths))[inside], rtol=1e-6)


def test_a_stratum_where_only_an_empty_completion_would_have_credit_is_dead(tmp_path):
    """The empty completion is wrong, too, and lacks a confidence, but has no token that could get the credit for it."""
    file = verl_file(tmp_path / "1.jsonl", [tagged("5", "0.3"), tagged("5", "0.3"), ""], gts=["4"] * 3, score=[0.0] * 3)
    brier = {"reward": "brier", "pays": ["confidence"], "given": "correct", "if_missing": -1.0}
    overrides = {"layout": LAYOUT, "objectives": [{"reward": "correct", "pays": ["solution"]}, brier]}
    options = {"methods": ["recipe"], "reward": {"correct": "text"}, "overrides": overrides}
    (own,) = credit_rollouts(file, **options).applied
    assert (own.silent_n.all(), own.dead["brier"]) == (True, 1.0)


def test_rows_of_the_report_keep_groups_together_and_of_a_larger_group_are_drawn_evenly():
    for size, count in ((10, 4), (7, 7), (100, 12), (3, 1), (30, 11)):
        group_n = torch.arange(size) // 4
        chosen = choose_rows(group_n, count)
        assert len(chosen) <= count
        assert chosen == sorted(set(chosen))
        if count >= 4:
            groups = set(group_n[chosen].tolist())
            assert chosen == [n for n in range(size) if int(group_n[n]) in groups]
            assert count >= size or len(chosen) > count - 8
    for group_n in (torch.zeros(101), (torch.arange(101) - 50).clamp(min=0)):  # one group, and one before many
        assert choose_rows(group_n.long(), 11) == [*range(0, 101, 10)]


def test_an_option_is_used_or_refused(tmp_path):
    """bae:group reads the options of bae. `baseline` belongs to the recipe's own rule, which is not asked for."""
    file = write_lines(tmp_path / "1.jsonl", verl_rows())
    own = {"methods": ["bae:group"], "overrides": {"layout": LAYOUT, "options": {"leave_one_out": True}}}
    assert credit_rollouts(file, **own).arms.schemes["bae:group"].options["leave_one_out"]
    for options, fields, names in (
        ({"methods": ["bae:group"]}, {"baseline": "outcome"}, "--set baseline "),
        ({"methods": ["bea"]}, {}, "Did you mean 'bae'"),
        ({"methods": ["bae:bach"]}, {}, "Baseline 'bach' .* choose from none, batch, group, outcome, blended"),
        ({"methods": ["grpo:batch"]}, {}, "Method 'grpo' takes no baseline"),
        ({"reward": {"correct": "ac"}}, {}, "Did you mean 'acc'"),
        ({"reward": {"corect": "acc"}}, {}, "Did you mean 'correct'"),
        ({"tokenizer": "nowhere"}, {}, "'nowhere' holds no tokenizer.json"),
    ):
        with pytest.raises((RecipeError, DataError), match=names):
            credit_rollouts(file, **options, overrides={"layout": LAYOUT, **fields})


def test_a_tokenizer_of_another_model_is_refused_and_without_any_credit_is_per_word(tmp_path, monkeypatch):
    folder = own_file(tmp_path / "run")
    special, words = trl_small.PIECES[:7], trl_small.PIECES[7:]
    monkeypatch.setattr(trl_small, "PIECES", [*special, *reversed(words)])
    trl_small.tokenizer().save_pretrained(tmp_path / "other")
    with pytest.raises(DataError, match="4 of the first 4 completions"):
        credit_rollouts(folder, tokenizer=tmp_path / "other")
    (tmp_path / "moved").mkdir()
    moved = (folder / "rollouts" / "step_000001.parquet").rename(tmp_path / "moved" / "alone.parquet")
    result = credit_rollouts(moved, methods=["bae"], overrides={"layout": LAYOUT})
    assert not result.table.has_ids
    assert result.note.startswith("There is no tokenizer beside the file; credit is shown per word.")


def run(folder, *, answers, **options):
    """Completions of some prompts, four of each, the third left out of the loss."""
    tokenizer = trl_small.tokenizer()
    tokenizer.save_pretrained(folder / "model")
    rows = []
    for n, answer in enumerate(answers):
        ids = tokenizer.convert_tokens_to_ids(answer.pieces)
        spans = {"start": {"solution": 0, "confidence": 0}, "end": {"solution": len(ids) * (n != 2), "confidence": 0}}
        rows.append(completion(
            ids, group=n // 4, prompt=f"prompt {n // 4}", trainable=[block >= 0 for block in answer.blocks], **spans,
            reward={"correct": answer.right}, logprobs=[-0.25] * len(ids),
        ))  # fmt: skip
    write_rollouts(folder / "in.parquet", Case(rows, per_token=("logprobs",)).parts(), tokenizer=folder / "model")
    options = {"methods": ["grpo", "rlcr", "bae"], "overrides": {"layout": LAYOUT}, **options}
    return credit(folder / "in.parquet", output=folder / "out", **options)


def test_the_page_shows_what_was_worked_out_of_whole_groups_evenly_from_the_file(tmp_path, monkeypatch):
    """Eight of twelve, written in parts of one or two prompts: the first prompt and the last."""
    monkeypatch.setattr("spanwise.commands.credit.write.AT_A_TIME", 90)
    answers = [*trl_small.SAID, *trl_small.SAID[:4]]
    result = run(tmp_path, answers=answers, rows=8)
    html = (tmp_path / "out" / "report.html").read_text()
    data = data_of(html)
    assert data["methods"] == ["grpo", "rlcr", "bae"]
    for n, row in enumerate([*range(4), *range(8, 12)]):
        assert decoded(data["prompts"], n) == [f"prompt {row // 4}"]
        assert decoded(data["tokens"], n) == answers[row].pieces
        assert data["rewards"][n][0] == answers[row].right
        for method, applied in enumerate(result.applied):
            expected = pytest.approx(applied.advantages(result.table, row, row + 1).tolist(), rel=1e-3)
            untrained = [None] * len(answers[row].pieces)
            assert decoded(data["advantages"][method], n) == (untrained if row == 2 else expected)
    assert "The page shows 8 of 12 completions, drawn evenly over the file. The option --rows sets how many" in html
    assert ">12</" in html  # the figures are over all of them


def test_the_page_has_a_row_for_stopping_and_says_of_no_living_stratum_that_it_is_dead(tmp_path):
    """By prompt: right and wrong; right, right, right without a confidence, wrong; nothing differs; only stopping differs."""
    four, three = trl_small.say("", "4", 0.5, 1.0), trl_small.say("", "3", 0.5, 1.0)
    stops = trl_small.say("", "3", None, 1.0)
    result = run(tmp_path, answers=[*trl_small.SAID, *[four] * 4, *[three] * 3, stops], methods=["grpo", "bae"])
    assert result.applied[0].silent_n.tolist() == [False] * 8 + [True] * 8
    cells = Page((tmp_path / "out" / "report.html").read_text()).cells
    # Prompt 1: -1 less the mean of -.0625 and -.25, the two that are right; prompt 3: -1 less -.25. Their mean is .796875.
    assert ["bae: stop", "2", "0.797", "0", "-0.844", "-0.750"] in cells
    grpo, bae = json.loads((tmp_path / "out" / "summary.json").read_text())["methods"].values()
    stop = {"completions": 2, "mean_abs": 0.796875, "zero_share": 0.0, "lowest": -0.84375, "highest": -0.75}
    assert ("stop" in grpo["blocks"], bae["blocks"]["stop"]) == (False, pytest.approx(stop))
    counts = {row[0]: row[1] for row in cells if row}
    assert "grpo: stop" not in counts
    assert counts["bae: confidence"] == "14"  # two of the sixteen have none: absent, not credit 0
    # Of four prompts the last two are all right. The confidences have six strata: right and wrong of prompts 0 and 1, one of
    # each other prompt. The wrong one of prompt 1 is alone and in prompt 2 all are equal; in prompt 3 stopping is charged.
    assert ["correct", "0.500", "0.500"] in cells
    assert ["brier", "not measured", "0.333"] in cells


def read_by_sae(logp, trained, threshold, boundary):
    """The tokens whose value an earlier token's advantage depends on: by the definition of SAE those that open a segment."""
    size, mask_nt, positions = len(logp), torch.tensor([trained]), []
    for t in range(size):
        value_nt = torch.zeros(1, size)
        value_nt[0, t] = 1.0
        options = {"lam": 0.5, "threshold": threshold, "boundary": boundary}
        adv_nt = sae(torch.zeros(1, size), value_nt, torch.tensor([logp]), mask_nt, **options)
        if trained[t] and bool((adv_nt[0, :t] != 0).any()):
            positions.append(t)
    return positions


@settings(deadline=None)  # a busy machine is no fault
@given(
    tokens=st.lists(st.tuples(st.sampled_from([0.01, 0.15, 0.2, 0.25, 0.9]), st.booleans()), max_size=9),
    threshold=st.sampled_from([0.0, 0.2, 0.5, 2.0]),
    boundary=st.sampled_from(["start", "end"]),
)
def test_segments_open_where_sae_reads_a_value(tokens, threshold, boundary):
    logp, trained = [float(np.log(p)) for p, _ in tokens], [flag for _, flag in tokens]
    noisy = np.where(trained, logp, np.nan)  # tokens that are not trained are never read
    opened = opening_tokens(SaeSegments(threshold, boundary), noisy, np.array(trained, dtype=bool))
    assert opened == read_by_sae(logp, trained, threshold, boundary)
