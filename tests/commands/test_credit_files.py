"""`spanwise credit`: every format read as its writer meant it, the trainer's own numbers again, one sentence for bad files.

Files come from the real writers where these run here (spanwise's and TRL's trainers); verl's and verifiers' are lines as their
sources write them.
"""

import json
import warnings
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

import trl_small
from spanwise.commands.credit.credit import credit, credit_rollouts, figures
from spanwise.commands.credit.groups import split_groups
from spanwise.commands.credit.page import choose_rows
from spanwise.commands.report.report import last_rollouts
from spanwise.commands.shared.folder import RunFolder
from spanwise.commands.train.train import train
from spanwise.errors import DataError, RecipeError
from spanwise.layout import Layout
from spanwise.recipe import load, plan, resolved
from spanwise.rollouts import read_rollouts
from spanwise.segment import segment
from spanwise.types import Status

pytestmark = [
    *trl_small.THIRD_PARTY,
    pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning"),
]

LAYOUT = {"solution": ["answer"], "confidence": ["confidence"]}


def quiet():
    from io import StringIO

    from rich.console import Console

    return Console(file=StringIO(), width=160)


def said(answer, confidence, thought="so "):
    report = "" if confidence is None else f"<confidence>{confidence}</confidence>"
    return f"{thought}<answer>{answer}</answer>{report}"


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --------------------------------------------------------------------------- the trainer's own numbers


def written_rows(folder, column):
    """A per-token column as the trainer wrote it, steps in order; NaN for null."""
    files = sorted((folder / "rollouts").glob("*.parquet"))
    rows = [row for file in files for row in pq.read_table(file)[column].to_pylist()]
    return [np.array([np.nan if value is None else value for value in row]) for row in rows]


def written(folder, column):
    """The same, end to end."""
    return np.concatenate(written_rows(folder, column))


def assert_the_trainers_own(folder, result):
    expected = written(folder, f"advantages/{load(folder / 'recipe.yaml', None).method}")
    advantages = result.applied[0].advantages(result.table, 0, len(result.table))
    left_out = np.repeat(~result.table.learned_n.numpy(), result.table.tokens.lengths)
    np.testing.assert_array_equal(np.isnan(expected), left_out)
    expected[left_out] = 0.0
    assert np.abs(expected).max() > 0  # else this shows nothing
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps from a warm start that is just long enough for tags, as `spanwise train` leaves it."""
    folder = tmp_path_factory.mktemp("run")
    choices = {
        "steps": 2, "prompts": 8, "group_size": 4, "start_steps": 64, "eval_prompts": 2, "eval_samples": 1, "eval_every": 0,
        "output": str(folder),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("SPANWISE_CACHE", str(tmp_path_factory.mktemp("cache")))
        train(load(None, choices), console=quiet())
    return folder


def test_a_run_of_ours_gets_the_advantages_it_was_trained_with(run):
    assert_the_trainers_own(run, credit_rollouts(run, methods=["recipe"]))


def test_a_file_of_a_run_is_known_by_its_folder(run):
    file = run / "rollouts" / "step_000001.parquet"
    for place, rows in ((run, 64), (run / "rollouts", 64), (file, 32)):
        result = credit_rollouts(place, overrides={"baseline": "group", "objectives": OWN_OBJECTIVES})
        assert len(result.table) == rows
        assert [one.arm.name for one in result.applied] == ["grpo", "rlcr", "bae", "bae:group"]
        assert result.table.has_ids
    joined = [result.table.vocabulary.join(result.table.tokens.slice(n, n + 1).astype(np.int64))[0] for n in range(32)]
    assert [text.decode() for text in joined] == pq.read_table(file)["text"].to_pylist()


OWN_OBJECTIVES = [
    {"reward": "correct", "pays": ["solution"], "if_missing": 0.0},
    {"reward": "brier", "pays": ["confidence"], "given": "correct", "baseline": "group", "if_missing": -1.0},
]
VARIANTS = {
    "blended": ({"baseline": "blended"}, {}),
    "rlcr": ({"method": "rlcr"}, {"sum_first": True}),
    "tools": ({}, {}),
    "truncated": ({"baseline": "batch"}, {"mask_truncated_completions": True}),
    "gdpo": ({"method": "gdpo"}, {"per": "completion"}),
}


def script(*, tools=False, truncated=False):
    """What the policy says to four prompts, the first two of them equal: both outcomes in each, one confidence missing."""
    spoken = [
        trl_small.say("ab"[: k % 3], "4333"[(k + k // 4) % 4] if k % 3 else "4", None if k == 6 else (7 * k + 3) % 10 / 10, 0.0,
                      tool="7" * (k % 3) if tools else "")
        for k in range(16)
    ]  # fmt: skip
    if truncated:  # it stopped before its end-of-sequence token
        spoken[1] = replace(spoken[1], pieces=spoken[1].pieces[:-1], blocks=spoken[1].blocks[:-1])
    return spoken


def scripted_run(variant, folder_path):
    """A run of two steps of the real trainer: one prompt for two groups, tool output, completions left out of the loss."""
    choices, options = VARIANTS[variant]
    recipe = load(None, {"layout": LAYOUT, "prompts": 4, "group_size": 4, "output": str(folder_path), **choices})
    filled = plan(recipe, Layout(LAYOUT), 16)
    folder = RunFolder(folder_path)
    said = script(tools=variant == "tools", truncated=variant == "truncated")
    for step, spoken in ((1, said), (2, said[::-1])):
        extra = {
            "layout": filled.layout, "objectives": filled.objectives, "whiten": filled.whiten, "estimator": filled.estimator,
            "train_dataset": trl_small.prompts().select([0, 0, 1, 1]), "model": trl_small.policy(),
        }  # fmt: skip
        options = {"per_device_train_batch_size": 16, **options}
        trainer = trl_small.trainer(folder_path / "c", said=spoken, tools=variant == "tools", extra=extra, **options)
        trainer.train()
        folder.write_rollouts(trainer.last_rollouts, method=recipe.method, step=step)
    folder.write_recipe(resolved(recipe, filled))
    trl_small.tokenizer().save_pretrained(folder.model)


@pytest.mark.parametrize("variant", VARIANTS)
def test_scripted_runs_get_the_advantages_they_were_trained_with(variant, tmp_path):
    scripted_run(variant, tmp_path)
    result = credit_rollouts(tmp_path, methods=["recipe"])
    assert_the_trainers_own(tmp_path, result)
    assert (result.table.trainable == written(tmp_path, "trainable")).all()
    if variant == "truncated":
        assert int((~result.table.learned_n).sum()) == 2


@pytest.mark.parametrize(("variant", "trained", "other"), [("blended", "bae", "rlcr"), ("rlcr", "rlcr", "bae")])
def test_the_report_of_a_run_shows_another_method_beside_its_own(variant, trained, other, tmp_path):
    scripted_run(variant, tmp_path)
    view, credit = last_rollouts(tmp_path, {"method": trained})
    rows = pq.read_table(tmp_path / "rollouts" / "step_000002.parquet").to_pylist()
    assert view.methods == (trained, other)
    assert [row.tokens for row in view.completions] == [
        trl_small.tokenizer().convert_ids_to_tokens(row["completion_ids"]) for row in rows
    ]
    assert list(credit) == [trained, other]
    checked = 0
    for first in range(0, 16, 4):  # groups of four, in file order
        group, shown = rows[first : first + 4], view.completions[first : first + 4]
        for n, (row, seen) in enumerate(zip(group, shown, strict=True)):
            np.testing.assert_array_equal(seen.advantages[trained], row[f"advantages/{trained}"])
            for block in ("solution", "confidence"):
                here = row[f"end/{block}"] > 0
                held = float(credit[trained][block][first + n])
                assert held == row[f"credit/{trained}/{block}"] if here else np.isnan(held)
        totals = [row["reward/correct"] + (-1.0 if row["reward/brier"] is None else row["reward/brier"]) for row in group]
        right = [row["reward/correct"] for row in group]
        for row, seen, total in zip(group, shown, totals, strict=True):
            if other == "rlcr":  # one number: the sum of the rewards against the group's mean
                expected = np.sign(round(total - np.mean(totals), 9))
            else:  # bae: the first block against the group's mean of its own reward
                expected = np.sign(round(row["reward/correct"] - np.mean(right), 9))
            assert np.sign(round(seen.advantages[other][row["start/solution"]], 9)) == expected
            checked += expected != 0
    assert checked > 8


def test_a_run_whose_rollouts_cannot_be_credited_again_shows_its_own_method(tmp_path):
    scripted_run("blended", tmp_path)
    for file in (tmp_path / "model").glob("*"):
        file.unlink()
    view, credit = last_rollouts(tmp_path, {"method": "bae"})
    assert view.methods == ("bae",)
    assert list(credit) == ["bae"]


# --------------------------------------------------------------------------- TRL


def right(completions, answer, **kwargs):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(f"<answer>{gold}</answer>" in text) for text, gold in zip(texts, answer, strict=True)]


@pytest.mark.filterwarnings("ignore")  # TRL's table of completions and pandas warn of themselves
def test_completions_of_trl_get_the_credit_our_trainer_gave(tmp_path):
    run = trl_small.trainer(tmp_path, log_completions=True)
    run.train()
    result = credit_rollouts(tmp_path, methods=["bae"], overrides={"layout": LAYOUT})
    assert result.table.source == "TRL"
    assert result.table.note == (  # the confidence that was left out
        "The file holds no token ids; credit is shown per word. 1 of 8 recorded values of 'brier' are missing or not finite; "
        "where the block is there, they count as failed checks."
    )
    torch.testing.assert_close(result.applied[0].credit.block_nk, run.last_rollouts.credit.block_nk, atol=1e-6, rtol=0)
    torch.testing.assert_close(result.applied[0].credit.stop_n, run.last_rollouts.credit.stop_n, atol=1e-6, rtol=0)
    assert torch.equal(result.scores.reward_nm.isnan(), run.last_rollouts.scores.reward_nm.isnan())


@pytest.mark.filterwarnings("ignore")
def test_a_plain_trl_run_has_the_advantages_of_dr_grpo(tmp_path):
    """Two optimiser steps on one generation batch: TRL writes it twice, and it counts once."""
    options = {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 16, "max_steps": 2, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "logging_steps": 1, "report_to": "none",
        "disable_tqdm": True, "log_completions": True, "scale_rewards": "none", "steps_per_generation": 2,
        "shuffle_dataset": False,
    }  # fmt: skip
    run = GRPOTrainer(
        model=trl_small.policy(), reward_funcs=[right], args=GRPOConfig(str(tmp_path), **options),
        train_dataset=trl_small.prompts(), processing_class=trl_small.tokenizer(), rollout_func=trl_small.scripted(),
    )  # fmt: skip
    run.train()
    files = sorted((tmp_path / "completions").glob("*.parquet"))
    assert len(files) == 2
    result = credit_rollouts(tmp_path, methods=["dr_grpo"], reward={"correct": "right"}, overrides={"layout": LAYOUT})
    assert "1 of 2 files repeat the batch before them" in result.note
    logged = pq.read_table(files[0])["advantage"].to_numpy()
    np.testing.assert_allclose(result.applied[0].credit.block_nk[:, 0].numpy(), logged, atol=1e-6)


def test_conversations_of_trl(tmp_path):
    turns = [
        {"role": "assistant", "content": "let me see"},
        {"role": "tool", "content": "<answer>9</answer>"},
        {"role": "assistant", "content": said("4", "0.5", thought="")},
    ]
    rows = {
        "step": [1, 1], "prompt": [[{"role": "user", "content": "2+2"}]] * 2,
        "completion": [turns, [{"role": "assistant", "content": said("5", "0.5")}]],
        "answer": ["4", "4"], "advantage": [0.0, 0.0],
    }  # fmt: skip
    (tmp_path / "completions").mkdir()
    pq.write_table(pa.table(rows), tmp_path / "completions" / "completions_00001.parquet")
    result = credit_rollouts(tmp_path, methods=["bae"], overrides={"layout": LAYOUT})
    assert result.table.prompts[0] == "[user] 2+2"
    assert result.scores.reward_nm[:, 0].tolist() == [1.0, 0.0]  # the tool's answer is not the model's
    advantages = result.applied[0].advantages(result.table, 0, 1)
    sampled = result.table.tokens.with_values(result.table.trainable).slice(0, 1)
    assert sampled[:8].tolist() == [True] * 3 + [False] * 3 + [True] * 2  # let, me, see; the tool's tags; the answer's
    assert (advantages[~sampled] == 0).all()
    assert (advantages[sampled] != 0).any()


# --------------------------------------------------------------------------- verl


def verl_rows():
    """As `_write_generations` of verl 0.9 writes them: four fields, the step, then what the reward function returned."""
    spoken = [said("4", "0.9"), said("4", "0.7"), said("3", "0.8"), said("5", "0.1")]
    return [
        {"input": "2+2=", "output": text, "gts": "4", "score": score, "step": step, "acc": score > 0}
        for step, scores in ((9, (1.0, 1.0, 0.0, 0.0)), (10, (1.0, 1.0, 0.0, 0.0)))
        for text, score in zip(spoken, scores, strict=True)
    ]


def test_a_dump_of_verl(tmp_path):
    rows = verl_rows()
    for step in (9, 10):
        write_lines(tmp_path / f"{step}.jsonl", [row for row in rows if row["step"] == step])
    result = credit_rollouts(tmp_path, overrides={"layout": LAYOUT})
    assert result.table.group_n.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]  # one prompt, two steps
    assert result.table.step_n.tolist() == [9] * 4 + [10] * 4  # 9.jsonl comes before 10.jsonl
    grpo, rlcr, bae = (one.credit.block_nk[:4] for one in result.applied)
    # By hand: rewards 1 1 0 0 have mean .5 and standard deviation .5774 (ddof 1).
    torch.testing.assert_close(grpo[:, 0], torch.tensor([1.0, 1.0, -1.0, -1.0]).double() * 0.8660, atol=1e-4, rtol=0)
    # Brier -.01 -.09 -.64 -.01; the sum with correctness is .99 .91 -.64 -.01, its mean .3125.
    torch.testing.assert_close(rlcr[:, 0], torch.tensor([0.6775, 0.5975, -0.9525, -0.3225], dtype=torch.float64))
    # Outcome strata: (-.01, -.09) has mean -.05, (-.64, -.01) has -.325.
    torch.testing.assert_close(bae[:, 1], torch.tensor([0.04, -0.04, -0.315, 0.315], dtype=torch.float64))
    taken = credit_rollouts(tmp_path, methods=["grpo"], reward={"correct": "acc"}, overrides={"layout": LAYOUT})
    torch.testing.assert_close(taken.applied[0].credit.block_nk[:4], grpo, atol=1e-12, rtol=0)
    assert "correct from the file's 'acc'" in taken.note


def test_keys_of_verl_v1_tell_equal_prompts_apart(tmp_path):
    rows = [{**row, "uid": f"sample-{n // 2}_{n % 2}_0"} for n, row in enumerate(verl_rows()[:4])]
    assert read_rollouts(write_lines(tmp_path / "1.jsonl", rows)).group_n.tolist() == [0, 0, 1, 1]


# --------------------------------------------------------------------------- verifiers


def node(role, content, *, parent, sampled=False, ids=(), mask=(), logprobs=()):
    message = {"role": role, "content": content}
    extra = {"token_ids": list(ids), "mask": list(mask), "logprobs": list(logprobs)} if ids else {}
    return {"parent": parent, "message": message, "sampled": sampled, "timestamp": 1.0, **extra}


def trace(text, answer, reward, *, prompt="2+2=", extra=(), **fields):
    nodes = [node("user", prompt, parent=None), node("assistant", text, parent=0, sampled=True), *extra]
    return {
        "version": 1, "id": "t", "task": {"type": "Sums", "data": {"idx": 0, "prompt": prompt, "answer": answer}, "hash": "h"},
        "agent": {"config": {}, "name": "agent"}, "nodes": nodes, "rewards": reward, "metrics": {"turns": 1.0}, **fields,
    }  # fmt: skip


def episode(one, *, step=3, group="g"):
    return {
        "id": "e", "env": {"id": "sums"}, "task": one["task"], "group": {"id": group}, "ok": True, "errors": [],
        "run": {"type": "train", "id": "r", "work": {"type": "train", "step": step}}, "traces": [one],
    }  # fmt: skip


def test_traces_of_verifiers(tmp_path):
    won, lost = {"exact": {"score": 1.0, "weight": 0.5}}, {"exact": {"score": 0.0, "weight": 0.5}}
    lines = [
        episode(trace(said("4", "0.9"), "4", won)),
        episode(trace(said("5", "0.2"), "4", lost)),
        episode(trace(said("4", "0.6"), "4", {"exact": None}, errors=[{"type": "E", "message": "m"}])),
        episode(trace(said("4", "0.6"), "4", {}, errors=[{"type": "E", "message": "m"}])),
        episode(trace(said("7", "0.6"), "7", won), group="h"),
    ]
    judge = trace("fine", "4", {})
    lines[0]["traces"].append({**judge, "agent": {"config": {}, "name": "judge", "trainable": False}})
    result = credit_rollouts(
        write_lines(tmp_path / "traces.jsonl", lines).parent, methods=["bae"], reward={"correct": "exact"},
        overrides={"layout": LAYOUT},
    )  # fmt: skip
    table = result.table
    assert (table.source, table.prompts[0], table.step_n.tolist()) == ("verifiers", "[user] 2+2=", [3] * 5)
    assert table.group_n.tolist() == [0, 0, 0, 0, 1]
    assert table.columns["answer"] == ["4", "4", "4", "4", "7"]
    assert table.rewards["reward"].value_n[:2].tolist() == [0.5, 0.0]  # the weighted sum, as verifiers trains with
    # Scoring that did not run is not a wrong answer: it joins no baseline and costs nothing.
    assert table.rewards["exact"].status_n.tolist() == [0, 0, int(Status.ERROR), int(Status.ERROR), 0]
    assert result.applied[0].credit.block_nk[:, 0].tolist() == [0.5, -0.5, 0.0, 0.0, 0.0]
    assert table.note == (
        "The file holds no token ids; credit is shown per word. 2 of 5 recorded values of 'exact' and 2 of 5 recorded values of "
        "'reward' are missing or not finite; where the block is there, they count as failed checks."
    )


def test_ids_of_verifiers_with_the_tokenizer(tmp_path):
    tokenizer = trl_small.tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    pieces = ["a", "<answer>", "4", "</answer>", "<eos>"]
    ids = tokenizer.convert_tokens_to_ids(pieces)
    reply = node("assistant", "a<answer>4</answer>", parent=0, sampled=True, ids=[2, *ids],
                 mask=[False, *[True] * 5], logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5])  # fmt: skip
    one = trace("", "4", {"exact": {"score": 1.0, "weight": 1.0}})
    one["nodes"] = [node("user", "2+2=", parent=None, ids=[7, 8], mask=[False, False]), reply]
    table = read_rollouts(write_lines(tmp_path / "traces.jsonl", [episode(one)]), tokenizer=tmp_path / "model")
    assert table.has_ids
    assert table.tokens.slice(0, 1).tolist() == ids
    assert [table.vocabulary.pieces[i].decode() for i in table.tokens.slice(0, 1)] == pieces
    np.testing.assert_allclose(table.token_values["logp"], [-0.1, -0.2, -0.3, -0.4, -0.5], rtol=1e-6)
    one["nodes"][1]["mask"] = [True] * 5
    with pytest.raises(DataError, match=r"Line 1 of .* has 6 tokens and 5 values of 'mask'"):
        read_rollouts(write_lines(tmp_path / "traces.jsonl", [episode(one)]))


def test_the_last_branch_of_a_trace_is_shown(tmp_path):
    other = node("assistant", said("9", "0.1"), parent=0, sampled=True)
    one = trace(said("4", "0.9"), "4", {}, extra=[other])
    table = read_rollouts(write_lines(tmp_path / "traces.jsonl", [episode(one)]))
    assert b"<answer>9</answer>" in table.vocabulary.join(table.tokens.slice(0, 1).astype(np.int64))[0]
    assert "1 of 1 traces have several branches" in table.note


def test_results_of_verifiers_before_1_0(tmp_path):
    rows = [
        {"example_id": i, "prompt": [{"role": "user", "content": "2+2="}], "answer": "4", "reward": r, "error": error,
         "completion": [{"role": "assistant", "content": said("4", "0.5")}], "metrics": {"exact": r}, "exact": r}
        for i, r, error in ((0, 1.0, None), (0, 0.0, None), (1, 0.0, {"error": "Timeout"}))
    ]  # fmt: skip
    table = read_rollouts(write_lines(tmp_path / "results.jsonl", rows).parent)
    assert table.group_n.tolist() == [0, 0, 1]
    assert table.rewards["exact"].status_n.tolist() == [0, 0, int(Status.ERROR)]
    assert table.columns["answer"] == ["4"] * 3


# --------------------------------------------------------------------------- text without ids

HOSTILE = [
    "",
    " ",
    "\n\n<answer>4</answer>",
    "a<b> <",
    "<<answer>>4</answer",
    "é\u2028日本 <answer>½</answer>\r\n",
    "\ud800x",
]


def test_pieces_keep_every_byte_and_cut_at_tags(tmp_path):
    rows = [{"input": "q", "output": text, "gts": "4", "score": 0.0, "step": 1} for text in HOSTILE]
    table = read_rollouts(write_lines(tmp_path / "1.jsonl", rows))
    joined = [table.vocabulary.join(table.tokens.slice(n, n + 1).astype(np.int64))[0].decode() for n in range(len(HOSTILE))]
    assert joined == [*HOSTILE[:-1], "\ufffdx"]
    tagged = [table.vocabulary.pieces[i].decode() for i in table.tokens.slice(5, 6)]
    assert tagged == ["é", "\u2028日本", " ", "<answer>", "½", "</answer>", "\r\n"]
    ids, filled = table.tokens.padded(2, 3)
    spans, text = segment(
        torch.from_numpy(ids), torch.from_numpy(filled), layout=Layout({"before": [], "x": ["answer"]}),
        vocabulary=table.vocabulary,
    )  # fmt: skip
    assert text[0]["before"][""] == "\n\n"
    assert text[0]["x"]["answer"] == "4"
    assert spans.start_nk.tolist() == [[0, 1]]


def test_text_can_be_encoded_with_a_tokenizer(tmp_path):
    trl_small.tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"input": "2+2=", "output": "ab<answer>4</answer>", "gts": "4", "score": 1.0, "step": 1}]
    table = read_rollouts(write_lines(tmp_path / "1.jsonl", rows), tokenizer=tmp_path / "model")
    assert [table.vocabulary.pieces[i] for i in table.tokens.values] == [b"a", b"b", b"<answer>", b"4", b"</answer>"]
    assert table.note.startswith("The file holds no token ids; the text is encoded with the tokenizer of")
    rows[0]["output"] = "xyz<answer>4</answer>"  # not in its vocabulary
    table = read_rollouts(write_lines(tmp_path / "1.jsonl", rows), tokenizer=tmp_path / "model")
    assert "changes 1 of 1 texts" in table.note


# --------------------------------------------------------------------------- methods per token


def own_file(path, *, values=False):
    """spanwise's own columns, as `rollouts.schema` names them, for the words of a small tokenizer beside it."""
    tokenizer = trl_small.tokenizer()
    (path / "rollouts").mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path / "model")
    (path / "recipe.yaml").write_text(f"layout: {json.dumps(LAYOUT)}\nprompts: 1\ngroup_size: 4\n")
    pieces = [one.pieces for one in trl_small.SAID[:4]]
    ids = [tokenizer.convert_tokens_to_ids(row) for row in pieces]
    right = [one.right for one in trl_small.SAID[:4]]
    columns = {
        "step": [1] * 4, "prompt": ["2+2="] * 4, "completion_ids": ids, "trainable": [[True] * len(row) for row in ids],
        "text": ["".join(row) for row in pieces], "reward/correct": right, "status/correct": ["ok"] * 4,
    }  # fmt: skip
    if values:
        columns |= {"values": [[0.5] * len(row) for row in ids], "logprobs": [[-0.1] * len(row) for row in ids]}
    pq.write_table(pa.table(columns), path / "rollouts" / "step_000001.parquet")
    return path


def test_methods_per_token_where_the_file_has_values(tmp_path):
    result = credit_rollouts(own_file(tmp_path, values=True), methods=["gae", "sae", "bae"])
    lengths = result.table.tokens.lengths
    # By hand: values are .5 everywhere, no token is unlikely, so SAE credits each token with return - .5; GAE discounts it by
    # .95 for every token to come. Both are shared out over the tokens of the completion.
    for n, (length, one) in enumerate(zip(lengths, trl_small.SAID[:4], strict=True)):
        surprise = one.right - 0.5
        np.testing.assert_allclose(result.applied[1].advantages(result.table, n, n + 1), surprise / length, rtol=1e-5)
        decayed = surprise * 0.95 ** np.arange(length - 1, -1, -1) / length
        np.testing.assert_allclose(result.applied[0].advantages(result.table, n, n + 1), decayed, rtol=1e-4)
    present_nk = result.applied[1].marked.length_nk > 0
    expected_nk = torch.tensor([[one.right - 0.5] * 2 for one in trl_small.SAID[:4]]).double()
    torch.testing.assert_close(result.applied[1].credit.block_nk, expected_nk * present_nk, atol=1e-6, rtol=0)


def test_methods_per_token_without_values_say_what_is_missing(tmp_path):
    folder = own_file(tmp_path)
    with pytest.raises(RecipeError, match=r"'gae' needs values of a critic of every token, and .* holds none of them"):
        credit_rollouts(folder, methods=["gae"])
    with pytest.raises(RecipeError, match="'sae' needs values of a critic and log-probabilities of every token"):
        credit_rollouts(folder, methods=["sae"])
    with pytest.raises(RecipeError, match="'gigpo' cannot be applied to a rollout file: it needs trajectory_s, step_s"):
        credit_rollouts(folder, methods=["gigpo"])


# --------------------------------------------------------------------------- what is left behind


def test_the_parquet_holds_what_was_worked_out(tmp_path):
    folder = own_file(tmp_path / "run")
    result = credit(folder, output=tmp_path / "out", console=quiet(), methods=["grpo", "bae"])
    table = pq.read_table(tmp_path / "out" / "credit.parquet")
    rows = table.to_pylist()
    assert [row["completion_ids"] for row in rows] == [ids.tolist() for ids in written_rows(folder, "completion_ids")]
    for n, (row, one) in enumerate(zip(rows, trl_small.SAID[:4], strict=True)):
        assert len(row["completion_ids"]) == len(row["advantages/grpo"]) == len(row["advantages/bae"]) == len(one.pieces)
        solution, confidence, stop = trl_small.credit(trl_small.SAID[:4])[n]  # loops over the definitions
        assert row["credit/bae/solution"] == pytest.approx(solution)
        assert row["credit/bae/confidence"] == pytest.approx(confidence)
        by_block = [sum(a for a, block in zip(row["advantages/bae"], one.blocks, strict=True) if block == k) for k in (0, 1)]
        assert by_block == pytest.approx([solution, confidence + stop], abs=1e-6)
        start, end = row["start/confidence"], row["end/confidence"]
        assert [block == 1 for block in one.blocks] == [start <= t < end for t in range(len(one.blocks))]
        assert row["reward/brier"] == pytest.approx(-((one.confidence - one.right) ** 2))
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["statuses"]["brier"] == {"ok": 4}
    assert summary["methods"]["bae"]["dead_strata"] == {"correct": 0.0, "brier": 0.0}
    assert result.applied[1].silent_n.tolist() == [False] * 4


def test_chunks_change_nothing(tmp_path, monkeypatch):
    for step in (1, 2):
        write_lines(tmp_path / f"{step}.jsonl", [{**row, "step": step} for row in verl_rows()[:4]])
    whole = credit_rollouts(tmp_path, overrides={"layout": LAYOUT})
    for module in ("score", "apply", "write"):
        monkeypatch.setattr(f"spanwise.commands.credit.{module}.AT_A_TIME", 25)
    parts = credit(tmp_path, output=tmp_path / "out", console=quiet(), overrides={"layout": LAYOUT})
    assert len(list(whole.table.tokens.chunks(25))) > 2
    for one, other in zip(whole.applied, parts.applied, strict=True):
        assert torch.equal(one.credit.block_nk, other.credit.block_nk)
        column = pq.read_table(tmp_path / "out" / "credit.parquet")[f"advantages/{one.arm.name}"].to_pylist()
        np.testing.assert_array_equal(np.concatenate(column), one.advantages(whole.table, 0, 8))


def test_dead_strata_and_silent_completions_are_counted(tmp_path):
    """Prompt a: all right, confidences differ. Prompt b: right and wrong, nobody shares an outcome, no confidence."""
    rows = [
        {"input": "a", "output": said("4", q), "gts": "4", "score": 1.0, "step": 1} for q in ("0.9", "0.5")
    ] + [{"input": "b", "output": said(x, None), "gts": "4", "score": 0.0, "step": 1} for x in ("4", "5")]  # fmt: skip
    result = credit_rollouts(write_lines(tmp_path / "1.jsonl", rows), methods=["grpo", "bae"], overrides={"layout": LAYOUT})
    grpo, bae = result.applied
    assert grpo.dead == {"correct": 0.5}
    assert bae.dead == {"correct": 0.5, "brier": 0.0}  # one stratum has rewards at all, and it has a signal
    assert grpo.silent_n.tolist() == [True, True, False, False]
    assert figures(bae)["confidence"] == {"completions": 2.0, "mean_abs": pytest.approx(0.12), "zero_share": 0.0}


def test_groups_larger_than_the_run_says_are_cut():
    assert split_groups(torch.tensor([0, 1, 0, 1, 0, 0]), 2).tolist() == [0, 2, 0, 2, 1, 1]


@pytest.mark.parametrize(("size", "count"), [(10, 4), (7, 7), (100, 12), (3, 1), (30, 11)])
def test_rows_of_the_report_keep_groups_together(size, count):
    group_n = torch.arange(size) // 4
    chosen = choose_rows(group_n, count)
    assert len(chosen) <= count
    assert chosen == sorted(set(chosen))
    if count >= 4:
        kept = set(group_n[chosen].tolist())
        assert chosen == [n for n in range(size) if int(group_n[n]) in kept]
        assert count >= size or len(chosen) > count - 8


# --------------------------------------------------------------------------- bad input


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def truncated(folder):
    file = next((own_file(folder / "run") / "rollouts").glob("*"))
    file.write_bytes(file.read_bytes()[:-40])
    return file


def damaged(folder):
    file = next((own_file(folder / "run") / "rollouts").glob("*"))
    data = bytearray(file.read_bytes())
    data[4:400] = bytes(396)
    file.write_bytes(bytes(data))
    return file


def uneven(folder):
    return parquet(folder / "a.parquet", prompt=["q"], completion_ids=[[1, 2, 3]], trainable=[[True, True]], text=["abc"])


def touched(path, content=""):
    path.write_text(content)
    return path


BAD = {
    "truncated": (truncated, DataError, "is not readable as parquet; it is damaged or cut off"),
    "damaged": (damaged, DataError, "is not readable as parquet; it is damaged or cut off"),
    "no bytes": (lambda f: touched(f / "a.parquet"), DataError, "a.parquet' is empty."),
    "no rows": (
        lambda f: parquet(f / "a.parquet", prompt=pa.array([], pa.string()), completion=pa.array([], pa.string())),
        DataError, "holds no completions.",
    ),
    "foreign": (
        lambda f: parquet(f / "a.parquet", question=["q"], chosen=["a"]), DataError,
        "has the columns question, chosen, which is no rollout format known here: spanwise's rollouts",
    ),
    "foreign lines": (lambda f: touched(f / "a.jsonl", '{"a": 1}\n'), DataError, "has the columns a, which is no rollout"),
    "no lines": (lambda f: touched(f / "a.jsonl", "\n"), DataError, "holds no completions."),
    "not json": (
        lambda f: touched(f / "a.jsonl", json.dumps(verl_rows()[0]) + '\n{"input": "x", "outp'), DataError,
        "Line 2 of",
    ),
    "a list": (lambda f: touched(f / "a.jsonl", "[1]\n"), DataError, "Line 1 of"),
    "a field less": (
        lambda f: touched(f / "a.jsonl", json.dumps(verl_rows()[0]) + '\n{"input": "x"}\n'), DataError, "has no 'output'",
    ),
    "uneven": (uneven, DataError, "Completion 0 of"),
    "nothing there": (lambda f: f / "none.parquet", DataError, "There is no file or folder"),
    "no rollouts": (lambda f: f, DataError, "holds no rollouts"),
    "foreign tags": (
        lambda f: write_lines(f / "1.jsonl", [{**verl_rows()[0], "output": "<think>x</think> 4"}]), RecipeError,
        "The recipe's tags (<reasoning>, <answer>, <analysis>, <confidence>) occur in none of the 1 completions",
    ),
    "no answers": (
        lambda f: write_lines(f / "1.jsonl", [{**verl_rows()[0], "gts": None}]), DataError,
        "Reward 'correct' needs the right answers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_sentence(case, tmp_path):
    make, kind, sentence = BAD[case]
    with pytest.raises(kind) as error:
        credit_rollouts(make(tmp_path))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_what_helps_is_in_the_sentence(tmp_path):
    file = write_lines(tmp_path / "1.jsonl", [{**verl_rows()[0], "gts": None}])
    with pytest.raises(DataError, match="It records score, acc: take one with --reward correct=score, or add the column"):
        credit_rollouts(file)
    file = write_lines(tmp_path / "1.jsonl", [{**verl_rows()[0], "output": "<think>x</think> 4"}])
    with pytest.raises(RecipeError, match="these do: <think>"):
        credit_rollouts(file)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"methods": ["bea"]}, "There is no method 'bea'. Did you mean 'bae'?"),
        ({"methods": ["bae:bach"]}, "Baseline 'bach' of 'bae:bach' is none of none, batch, group, outcome, blended."),
        ({"methods": ["grpo:batch"]}, "Method 'grpo' takes no baseline"),
        ({"reward": {"correct": "ac"}}, "Did you mean 'acc'?"),
        ({"reward": {"corect": "acc"}}, "There is no objective 'corect'. Did you mean 'correct'?"),
        ({"tokenizer": "nowhere"}, "'nowhere' holds no tokenizer.json"),
    ],
)
def test_a_wrong_option_is_one_sentence(options, sentence, tmp_path):
    file = write_lines(tmp_path / "1.jsonl", verl_rows())
    with pytest.raises((RecipeError, DataError)) as error:
        credit_rollouts(file, **{"overrides": {"layout": LAYOUT}, **options})
    assert sentence in str(error.value)


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = own_file(tmp_path / "run")
    other = trl_small.tokenizer()
    backend = json.loads(other.backend_tokenizer.to_str())
    words = list(backend["model"]["vocab"])
    backend["model"]["vocab"] = {word: i for i, word in enumerate(reversed(words))}
    for token in backend["added_tokens"]:
        token["id"] = backend["model"]["vocab"][token["content"]]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(DataError, match=r"spells 4 of the first 4 completions of .* otherwise than the file does"):
        credit_rollouts(folder, tokenizer=tmp_path / "other")


def test_our_file_without_a_tokenizer_is_shown_per_word(tmp_path):
    (tmp_path / "moved").mkdir()
    file = next((own_file(tmp_path / "run") / "rollouts").glob("*"))
    alone = file.rename(tmp_path / "moved" / "alone.parquet")
    result = credit_rollouts(alone, methods=["bae"], overrides={"layout": LAYOUT})
    assert not result.table.has_ids
    assert result.note.startswith("There is no tokenizer beside the file; credit is shown per word.")
    solution = [credit[0] for credit in trl_small.credit(trl_small.SAID[:4])]
    assert result.applied[0].credit.block_nk[:, 0].tolist() == pytest.approx(solution)


def test_a_check_that_failed_stays_failed(tmp_path):
    """A timeout is not a missing answer: it joins no baseline and costs nothing."""
    file = next((own_file(tmp_path) / "rollouts").glob("*"))
    table = pq.read_table(file)
    right, said_of = [1.0, None, 0.0, None], ["ok", "timeout", "ok", "absent"]
    for name, values in (("reward/correct", right), ("status/correct", said_of)):
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    pq.write_table(table, file)
    result = credit_rollouts(tmp_path, methods=["bae"])
    assert result.scores.status_nm[:, 0].tolist() == [0, int(Status.TIMEOUT), 0, int(Status.ABSENT)]
    # Present: 1 and 0, mean .5. Absent stands for 0, so it is credited with 0 - .5; the timeout with exactly 0.
    assert result.applied[0].credit.block_nk[:, 0].tolist() == [0.5, 0.0, -0.5, -0.5]
