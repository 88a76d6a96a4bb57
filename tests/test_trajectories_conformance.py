"""The rollouts of `conformance.json` get its advantages as trajectories, in files and as datums."""

from dataclasses import replace
from itertools import compress

import pytest
import torch

import conformance
from rollout_files import node, write_lines
from spanwise import Vocabulary, advantages, credit_batch, read
from spanwise.credit import Trajectory, Turn, merge_counts
from spanwise.engines.tinker import credit_datums
from spanwise.rollouts import read_traces, write_traces
from spanwise.trajectories import onto_turns, turn_batch

SAVED = conformance.load()
VOCABULARY = Vocabulary(tuple(piece.encode() for piece in SAVED["pieces"]))
ROWS, STORED = SAVED["rollouts"]["turns"], ("prompt_ids", "response_ids", "mask", "parent")


def by_rollout(name):
    """Trajectories of the rows, what the environment paid with the turns; the outcome of the last turn where the recipe has it."""
    turns = []
    for n, row in enumerate(ROWS):
        about = {"anchor": row["anchor"], "rewards": {"environment": row["paid"]}, "extra": {"row": n}}
        turns.append(Turn(row["prompt"], row["ids"], row["sampled"], **about))
    last = {row["rollout"]: {"correct": row["right"]} for row in ROWS} if name == "turns" else {}
    shuffled = sorted(range(len(ROWS)), key=lambda n: (ROWS[n]["step"], -n))
    columns = ([ROWS[n][key] for n in shuffled] for key in ("rollout", "step", "group"))
    return Trajectory.of_rows([turns[n] for n in shuffled], *columns, rewards=last)


def credited(rollouts, rule, dtype=torch.float64):
    batch, recorded = turn_batch(rollouts)
    reading = read(batch, rule, VOCABULARY, recorded=recorded)
    adv_su = advantages(credit_batch(reading, batch, rule), reading.spans, rule, dtype=dtype)
    return onto_turns(rollouts, "advantages", adv_su)


@pytest.mark.parametrize("name", ["turns", "gigpo"])
@pytest.mark.parametrize("layout", ["rows", "merged", "graph"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_every_layout_gives_each_row_its_credit(tmp_path, name, layout, dtype, tolerance):
    rollouts = by_rollout(name)
    if layout != "rows":
        rollouts = [rollout.merged(VOCABULARY) for rollout in rollouts]
        assert merge_counts(rollouts)["branches"] < merge_counts(rollouts)["rows"]
    paid = credited(rollouts, conformance.scheme(name, tmp_path), dtype)
    if layout == "graph":  # what is trained: the tokens of every branch
        by_row = [
            (rollout.turns[t].extra["row"], [*compress(branch.per_token["advantages"], (at == t for at in branch.turn))])
            for rollout in paid
            for branch in rollout.branches()
            for t in branch.turns
        ]
    else:
        by_row = [(turn.extra["row"], turn.per_token["advantages"]) for rollout in paid for turn in rollout.rows().turns]
    assert sorted(row for row, _ in by_row) == list(range(len(ROWS)))
    for row, values in by_row:
        assert list(values) == pytest.approx(SAVED["advantages"][name][row], abs=tolerance)


def traces(rollouts):
    """The trajectories as verifiers keeps them: a node for what came in between, one for what was sampled."""
    for rollout in rollouts:
        nodes, at = [], {}
        for t, turn in enumerate(rollout.turns):
            parent = None if turn.parent is None else at[turn.parent]
            if turn.prompt_ids:
                nodes.append(node("user", "", parent=parent, ids=turn.prompt_ids, mask=[False] * len(turn.prompt_ids)))
                parent = len(nodes) - 1
            flags = map(bool, turn.mask)
            nodes.append(node("assistant", "", parent=parent, sampled=True, ids=turn.response_ids, mask=flags))
            at[t] = len(nodes) - 1
        trace = {"id": rollout.id, "agent": {"name": "a"}, "nodes": nodes, "rewards": {"right": rollout.rewards["correct"]}}
        yield {"group": {"id": rollout.group}, "run": {"work": {"step": 1}}, "traces": [trace]}


def test_the_file_road_gives_the_same_and_layouts_agree_bit_for_bit(tmp_path):
    """A trace has no field for the rewards of turns, so the test puts them back."""
    merged = [rollout.merged() for rollout in by_rollout("turns")]
    file = write_lines(tmp_path / "traces.jsonl", traces(merged))
    read_back = []
    for rollout, before in zip(read_traces(file), merged, strict=True):
        turns = tuple(replace(turn, rewards=old.rewards) for turn, old in zip(rollout.turns, before.turns, strict=True))
        read_back.append(replace(rollout, turns=turns, rewards={"correct": rollout.rewards["right"]}))
        for turn, old in zip(turns, before.turns, strict=True):
            assert [getattr(turn, name) for name in STORED] == [getattr(old, name) for name in STORED]
    rule = conformance.scheme("turns", tmp_path)
    assert [rollout.rows() for rollout in credited(merged, rule)] == credited(by_rollout("turns"), rule)  # bit for bit
    write_traces(file, file, credited(read_back, rule))
    for rollout, before in zip(read_traces(file), merged, strict=True):
        for turn, old in zip(rollout.turns, before.turns, strict=True):
            assert turn.per_token["advantages"] == pytest.approx(SAVED["advantages"]["turns"][old.extra["row"]], abs=1e-12)


def test_datums_get_the_credit_of_blocks(tmp_path):
    """Ragged groups, tool output, missing blocks, a completion that was cut off: float32, as the wire is."""
    flat = SAVED["rollouts"]["flat"]
    groups = {}
    for n, row in enumerate(flat):
        groups.setdefault(row["group"], []).append(n)

    def datum(row):
        target = [*row["prompt"][1:], *row["ids"]]
        mask = [0.0] * (len(row["prompt"]) - 1) + [float(flag) for flag in row["sampled"]]
        return {"loss_fn_inputs": {"target_tokens": target, "mask": mask, "advantages": [0.0] * len(target)}}

    rule, columns = conformance.scheme("blocks", tmp_path), {"answer": [flat[rows[0]]["answer"] for rows in groups.values()]}
    datums = credit_datums([[datum(flat[n]) for n in rows] for rows in groups.values()], rule, VOCABULARY, columns=columns)
    for rows, group in zip(groups.values(), datums, strict=True):
        for n, (paid,) in zip(rows, group, strict=True):
            values = paid["loss_fn_inputs"]["advantages"][len(flat[n]["prompt"]) - 1 :]
            assert values == pytest.approx(SAVED["advantages"]["blocks"][n], abs=1e-6)
