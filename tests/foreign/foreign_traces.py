"""Traces as the types of verifiers 0.4 write and read them, which are prime-rl's rollouts, too: `make test-foreign`."""

import random
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from spanwise.commands.credit.credit import credit
from spanwise.rollouts import read_rollouts, read_traces, write_traces
from tokenizers_small import byte_level

TOKENIZER = byte_level()
WORDS = ["so", "4", "é", "日本", "\u2028", "🙂", "<b>", '"q"', "{}"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    return folder


def theirs():
    return pytest.importorskip("verifiers.v1.episode")


def episodes_in(file):
    return [theirs().WireEpisode.model_validate_json(line) for line in file.read_text().split("\n") if line]


def trained_in(file):
    return [trace for episode in episodes_in(file) for trace in episode.traces if trace.agent.trainable]


def varied_traces(seed, file):
    """A file of episodes drawn by a seed: turns, tools, branches, a judge that does not train, rewards that are missing."""
    draw = random.Random(seed)

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 5)))

    def node(role, parent):
        content = text()
        ids, sampled = TOKENIZER(content)["input_ids"], role == "assistant"
        head = [1] * draw.randint(0, 2)  # what a chat template writes before a message
        streams = {"logprobs": [-draw.random() for _ in ids]} if sampled else {}
        tokens = {"token_ids": head + ids, "mask": [False] * len(head) + [sampled] * len(ids), **streams}
        message = {"role": role, "content": content, **({"tool_call_id": "c"} if role == "tool" else {})}
        return {"parent": parent, "message": message, "sampled": sampled, **tokens}

    def nodes():
        grown = [node("user", None), node("assistant", 0)]
        for _ in range(draw.randint(0, 2)):
            parent = draw.choice([n for n, entry in enumerate(grown) if entry["sampled"]])
            grown.append(node(draw.choice(["tool", "user"]), parent))
            grown.append(node("assistant", len(grown) - 1))
        return grown

    def trace(*, name, trainable):
        rewards = {"exact": {"score": draw.choice([0.0, 0.5, 1.0])}} if draw.random() < 0.8 else {}
        task = {"type": "Sums", "data": {"idx": 0, "answer": "4"}, "hash": "h"}
        agent = {"config": {}, "name": name, "trainable": trainable}
        facts = {"id": f"{draw.random()}", "task": task, "agent": agent, "metrics": {"turns": draw.random()}}
        return {**facts, "nodes": nodes(), "rewards": rewards}

    lines = []
    for number in range(draw.randint(3, 5)):
        judge = [trace(name="judge", trainable=False)] if draw.random() < 0.3 else []
        traces = [trace(name="solver", trainable=True), *judge]
        group = {"id": f"g{number % 2}"}
        run = {"type": "train", "id": "r", "work": {"type": "train", "step": 3}}
        episode = {"task": traces[0]["task"], "group": group, "run": run, "ok": True, "traces": traces}
        lines.append(theirs().WireEpisode.model_validate(episode).model_dump_json(exclude_none=True))
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


@pytest.mark.parametrize("seed", range(10))
def test_any_traces_are_what_verifiers_own_reader_says(seed, tmp_path, tokenizer):
    """Every sampled token stands once, in the order of verifiers' branches, with its log-probability."""
    file = varied_traces(seed, tmp_path / "traces.jsonl")
    table = read_rollouts(file, tokenizer=tokenizer)
    traces = trained_in(file)
    expected, rewards, votes = [], [], []
    for number, trace in enumerate(traces):
        trained = set()
        for branch in trace.branches:
            untrained = [id(node.message) not in trained for node in branch.nodes]
            tokens = zip(branch.token_ids, branch.sampled_mask, branch.logprobs, strict=True)
            owners = [flag for node, flag in zip(branch.nodes, untrained, strict=True) for _ in node.token_ids]
            row = [token for token, is_own in zip(tokens, owners, strict=True) if is_own and token[1]]
            trained |= {id(node.message) for node in branch.nodes if node.sampled}
            if row:
                expected.append(row)
                rewards.append(trace.rewards["exact"].score if "exact" in trace.rewards else np.nan)
                votes.append(number)
    assert len(table) == len(expected)
    for n, row in enumerate(expected):
        sampled = np.array(table.tokens.with_values(table.trainable).slice(n, n + 1))
        assert table.tokens.slice(n, n + 1)[sampled].tolist() == [token for token, _, _ in row]
        logps = table.tokens.with_values(table.token_values["logprobs"]).slice(n, n + 1)[sampled]
        np.testing.assert_allclose(logps, [logp for _, _, logp in row], rtol=1e-6)
    rollout_n = list(range(len(table))) if table.rollout_n is None else table.rollout_n.tolist()
    assert rollout_n == votes
    if "exact" in table.rewards:
        np.testing.assert_allclose(table.rewards["exact"].value_n.numpy(), rewards)


@pytest.mark.parametrize("seed", range(10))
def test_verifiers_reads_the_advantages_that_were_written(seed, tmp_path, tokenizer):
    """`write_traces` and `spanwise credit --write`: all else of an episode is as it was."""
    file = varied_traces(seed, tmp_path / "traces.jsonl")
    numbers = iter(range(10_000))

    def numbered(turn):
        return replace(turn, per_token={"advantages": [next(numbers) / 8 if flag else 0.0 for flag in turn.mask]})

    trajectories = [replace(trajectory, turns=tuple(map(numbered, trajectory.turns))) for trajectory in read_traces(file)]
    write_traces(tmp_path / "one.jsonl", file, trajectories)
    result = credit(
        file, output=tmp_path / "out", write="grpo", methods=["grpo"], tokenizer=tokenizer, console=Console(quiet=True),
        pay=["completion=turns"],
    )  # fmt: skip
    drop = {"traces": {"__all__": {"nodes": {"__all__": {"advantages"}}}}}
    before = [episode.model_dump(mode="json", exclude=drop) for episode in episodes_in(file)]
    for path in (tmp_path / "one.jsonl", tmp_path / "out" / "traces.jsonl"):
        assert [episode.model_dump(mode="json", exclude=drop) for episode in episodes_in(path)] == before
    by_trace = {(trajectory.extra["episode"], trajectory.extra["trace"]): trajectory for trajectory in trajectories}
    for n, episode in enumerate(episodes_in(tmp_path / "one.jsonl")):
        for k, trace in enumerate(episode.traces):
            for turn in by_trace[n, k].turns if (n, k) in by_trace else ():
                node = trace.nodes[turn.extra["node"]]
                values = [value for value, flag in zip(turn.per_token["advantages"], turn.mask, strict=True) if flag]
                assert node.advantages == pytest.approx(values)
    (arm,) = result.applied
    values = arm.advantages(result.table, 0, len(result.table))[result.table.trainable]
    branches = [branch for trace in trained_in(tmp_path / "out" / "traces.jsonl") for branch in trace.branches]
    nodes = {id(node): node for branch in branches for node in branch.nodes if node.sampled}  # each node once
    assert any(values)
    assert [value for node in nodes.values() for value in node.advantages] == pytest.approx(values.tolist())
