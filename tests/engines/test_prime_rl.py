"""prime-rl's algorithm against its contract (`prime_rl_contract.json`, read and not run) and a slow loop of its loss."""

import asyncio
import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import conformance
import opened_folder
from spanwise.engines import prime_rl

CONTRACT = json.loads((Path(__file__).parent / "prime_rl_contract.json").read_text())


class Algorithm:
    """The base class as the contract has it."""

    action_loss_type = "rl"

    def __init__(self, config, policy_pool):
        self.policy_pool = policy_pool


@pytest.fixture(autouse=True)
def prime(monkeypatch):
    """The modules of prime-rl that the door touches, each function one of our own; no prime-rl is installed."""

    def assign_advantages(trace, values):
        left = iter(values)
        for node in trace.nodes:
            node.advantages = [next(left) for flag in node.mask if flag]
        assert next(left, None) is None

    def iter_trainable_traces(episodes):
        traces = ((episode, trace) for episode in episodes for trace in episode.traces)
        return ((episode, trace) for episode, trace in traces if any(any(node.mask) for node in trace.nodes))

    functions = {"assign_advantages": assign_advantages, "iter_trainable_traces": iter_trainable_traces}
    conformance.replace_trainer(monkeypatch, CONTRACT["calls"], functions)
    algo = sys.modules["prime_rl.orchestrator.algo"]
    algo.Algorithm, algo.ALGORITHM_CLASSES = Algorithm, {"grpo": None, "opd": None}
    return algo


def trace_of(rows):
    """A trace of nodes: before each turn a node of its context, which nobody sampled."""
    nodes = []
    for row in rows:
        nodes.append(SimpleNamespace(token_ids=row["prompt"], mask=[False] * len(row["prompt"])))
        nodes.append(SimpleNamespace(token_ids=row["ids"], mask=[bool(flag) for flag in row["sampled"]]))
    task = SimpleNamespace(data={"answer": rows[0].get("answer")})
    fields = {"nodes": nodes, "info": None, "task": task, "reward": rows[-1].get("reward", 0.0)}
    assert sorted(fields) == CONTRACT["trace"]
    return SimpleNamespace(**fields)


def scored(folder, prime, recipe, groups, *, tokens=1):
    """Give the nodes that a model sampled their advantages, group by group."""
    (folder / "recipe.yaml").write_text(recipe)
    prime_rl.attach(str(folder / "recipe.yaml"), tokens=tokens)
    score(prime, groups)


def score(prime, groups):
    """Let an environment's algorithm score its groups."""
    create = prime.ALGORITHM_CLASSES[CONTRACT["registry"]["key"]]
    algorithm = create(SimpleNamespace(length_penalty=None), SimpleNamespace(model_name="m"))
    assert algorithm.action_loss_type == "rl"
    assert [*inspect.signature(type(algorithm).score_group).parameters] == CONTRACT["hook"]["takes"]
    for traces in groups:
        asyncio.run(algorithm.score_group([SimpleNamespace(traces=[trace]) for trace in traces]))


def spread_out(node):
    values = iter(node.advantages)
    return [next(values) if flag else 0.0 for flag in node.mask]


def grouped(rows):
    """The traces of each group, and each row's node."""
    groups, nodes = {}, []
    for row in rows:
        trace = trace_of([row])
        groups.setdefault(row["group"], []).append(trace)
        nodes.append(trace.nodes[1])
    return list(groups.values()), nodes


def credited(folder, prime, name, rows):
    groups, nodes = grouped(rows)
    scored(folder, prime, conformance.RECIPES[name], groups)
    return [spread_out(node) for node in nodes]


# Leaving list elements out is free here; there is a group of one and a unanimous group.
@pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning")
@pytest.mark.parametrize("name", ["blocks", "waits", "fields"])
def test_it_gives_every_token_the_advantage_of_the_file(tmp_path, prime, name):
    rows, expected = conformance.expected(name)
    conformance.assert_rows(credited(tmp_path, prime, name, rows), expected)


def test_the_run_folder_holds_what_was_handed_over(tmp_path, prime):
    """A group is a step of the folder; two environments, each with an algorithm of its own, write the same one."""
    flat = conformance.expected("blocks")[0]
    groups, nodes = grouped(flat)
    scored(tmp_path, prime, conformance.RECIPES["blocks"] + f"output: {tmp_path / 'run'}\n", groups[:2])
    score(prime, groups[2:3])
    order = [n for g in ("g4", "g2", "g3") for n, row in enumerate(flat) if row["group"] == g]
    advantages = [spread_out(nodes[n]) for n in order]
    rows = opened_folder.check(tmp_path / "run", advantages, [flat[n]["sampled"] for n in order], step=3)
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 2 + [3] * 3
    assert {row["prompt"] for row in rows} == {"2+2=", "1+1=", "1+2="}


def test_the_order_of_traces_and_masked_tokens_change_nothing(tmp_path, prime):
    conformance.check_symmetries(lambda rows: credited(tmp_path, prime, "blocks", rows))


def rollout(reward, *lengths):
    turns = [{"prompt": [7, 8], "ids": [2, 11, 3, 1][:length], "sampled": [1] * length} for length in lengths]
    turns[-1]["reward"] = reward
    return trace_of(turns)


def test_prime_rls_loss_is_the_sum_over_tokens_with_one_divisor_for_the_step(tmp_path, prime):
    """RLOO of 1 and 0: 1 and -1; of 0, 2, 1: -3/2, 3/2, 0. A rollout of two nodes has one vote; one alone in its group gets 0.

    Neither that group nor three unanimous ones in a row are warned of: they are parts of a batch.
    """
    groups = [[rollout(1.0, 4, 3), rollout(0.0, 4)], [rollout(0.0, 3), rollout(2.0, 2), rollout(1.0, 4)], [rollout(5.0, 4)]]
    groups += [[rollout(1.0, 2), rollout(1.0, 3)] for _ in range(3)]
    scored(tmp_path, prime, conformance.RLOO, groups, tokens=10)
    values = [[value for node in trace.nodes for value in node.advantages] for traces in groups for trace in traces]
    assert [sum(row) for row in values] == pytest.approx([10.0, -10.0, -15.0, 15.0, 0.0, 0.0] + [0.0] * 6, abs=1e-5)
    weighted = sum(value != 0 for row in values for value in row)
    assert weighted == 4 + 3 + 4 + 3 + 2  # rl_scale, by which the trainer divides all of them alike
