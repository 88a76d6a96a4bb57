"""Read verifiers' traces, which are graphs of messages, and write advantages into them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

from spanwise.credit import Trajectory, Turn
from spanwise.disk import whole_file
from spanwise.errors import DataError
from spanwise.rollouts.cells import FieldError, list_field, missing_field, object_field, prompt_text, whole_number
from spanwise.rollouts.files import parse_records, read_records
from spanwise.rollouts.table import finite
from spanwise.types import Status

#: The fields of a node that list one number for each of its sampled tokens.
NUMBER_FIELDS = ("logprobs", "advantages", "reference_logprobs", "trainer_logprobs", "entropies")
_WEIGHTS = "loss_weights"  # the field of a message that maps the name of a loss to token weights


@dataclass(frozen=True)
class Trace:
    """A trained agent's trace, written by the library verifiers. Traces with equal keys are of the same task and agent."""

    raw: Mapping[str, Any]
    nodes: Sequence[Mapping[str, Any]]
    place: int  # the index of the trace in its episode
    key: str
    step: int
    keyed: bool  # True if the episode has a group id
    task: Mapping[str, Any]
    paths: list[tuple[list[int], list[int]]]  # for each trained branch: the indices of prompt and completion messages

    def prompt(self, before: Sequence[int]) -> str:
        """Return the prompt of a completion: the text of the messages before it."""
        return prompt_text([object_field(self.nodes[node_id], "message") for node_id in before])


class NodeTokens(NamedTuple):
    """The tokens of a message (a node) in a trace, with numbers per token: 0 for a token that no model sampled."""

    ids: list[int]
    mask: list[bool]
    number_lists: dict[str, list[float]]

    def numbers(self, name: str) -> list[float]:
        """Return the message's numbers called `name`, such as `logprobs`. If it has none, sampled tokens get NaN."""
        return self.number_lists.get(name, [math.nan if flag else 0.0 for flag in self.mask])

    def split(self) -> tuple[list[int], NodeTokens]:
        """Split the tokens at the first sampled one."""
        response_start = self.mask.index(True) if True in self.mask else len(self.mask)
        number_lists = {name: values[response_start:] for name, values in self.number_lists.items()}
        return self.ids[:response_start], NodeTokens(self.ids[response_start:], self.mask[response_start:], number_lists)


def read_traces(path: str | Path) -> list[Trajectory]:
    """Read a file of verifiers' traces. Each becomes one trajectory, whose turns are the sampled nodes.

    A turn's parent is the sampled node before it, so what branches share is there once. Every stream of the nodes is an entry of
    `per_token`: `advantages`, `logprobs`, `entropies`, `reference_logprobs`, `trainer_logprobs`, `loss_weights/NAME`. The rewards
    of the trace are the trajectory's. Traces of agents that are not trained, and branches that are not (an attempt to shorten the
    history that was given up), are left out.

    Args:
        path: a `traces.jsonl`, an episode per line.

    Returns:
        Trajectories in the order of the file. `extra` holds the episode, the trace and its task's data, a turn's `extra` its node.

    Raises:
        DataError: a line that is not JSON or lacks a field; a sampled node without token ids; a stream whose length is not that of
            its tokens.

    Example:
        A prompt of two tokens and an answer of one.

        >>> import json, tempfile
        >>> nodes = [
        ...     {"parent": None, "message": {"role": "user", "content": "2+2="}, "token_ids": [7, 8], "mask": [False, False]},
        ...     {"parent": 0, "message": {"role": "assistant", "content": "4"}, "token_ids": [4], "mask": [True], "sampled": True},
        ... ]
        >>> exact = {"exact": {"score": 1.0, "weight": 1.0}}
        >>> episode = {"group": {"id": "g"}, "traces": [{"id": "t", "nodes": nodes, "rewards": exact}]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "traces.jsonl"
        ...     _ = file.write_text(json.dumps(episode) + chr(10))
        ...     (one,) = read_traces(file)
        >>> one.turns[0].prompt_ids, one.turns[0].response_ids, one.rewards["exact"]
        ((7, 8), (4,), 1.0)
    """
    episodes = parse_records([Path(path)], lambda record: list(_trajectories(record)))
    return [
        replace(trajectory, extra={"episode": episode_index, **trajectory.extra})
        for episode_index, trajectories in enumerate(episodes)
        for trajectory in trajectories
    ]


def write_traces(
    file: str | Path, source: str | Path, trajectories: Sequence[Trajectory], *, entry: str = "advantages"
) -> None:
    """Copy a file of traces with new `advantages` on their nodes. Everything else stays as it is.

    Args:
        file: written anew; it may be the source itself.
        source: the file that `read_traces` has read.
        trajectories: those it gave, each turn with `entry` in its `per_token`; traces that are not among them stay as they are.
        entry: the numbers to write, such as those of `onto_turns`.

    Raises:
        DataError: a trajectory that was not read from the source, a turn without the entry or with a number that is not finite, a
            file that cannot be written.

    Example:
        >>> import json, tempfile
        >>> from dataclasses import replace
        >>> message = {"role": "assistant", "content": "4"}
        >>> node = {"parent": None, "message": message, "token_ids": [4], "mask": [True], "sampled": True}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder) / "traces.jsonl"
        ...     _ = file.write_text(json.dumps({"traces": [{"id": "t", "nodes": [node], "rewards": {}}]}) + chr(10))
        ...     (one,) = read_traces(file)
        ...     paid = replace(one, turns=tuple(replace(turn, per_token={"advantages": [0.5]}) for turn in one.turns))
        ...     write_traces(file, file, [paid])
        ...     read_traces(file)[0].turns[0].per_token["advantages"]
        [0.5]
    """
    trace_places = [(trajectory.extra.get("episode"), trajectory.extra.get("trace")) for trajectory in trajectories]
    unwritten_trajectories = dict(zip(trace_places, trajectories, strict=True))
    with whole_file(Path(file)) as temporary_file:
        with temporary_file.open("w", encoding="utf-8") as stream:
            for episode_index, (_, _, record) in enumerate(read_records([Path(source)])):
                for trace_position, trace in enumerate(_list_traces(record)):
                    if (episode_index, trace_position) in unwritten_trajectories:
                        _write_advantages(trace, unwritten_trajectories.pop((episode_index, trace_position)), entry, source)
                stream.write(json.dumps(record) + "\n")
        if unwritten_trajectories:
            unknown_trajectory = next(iter(unwritten_trajectories.values()))
            raise DataError(
                f"Trajectory {unknown_trajectory.id!r} was not read from '{source}'. Give trajectories that read_traces returned."
            )


def write_branches(file: Path, source: Path, advantage_rows: Iterator[Sequence[float]]) -> None:
    """Copy a file of traces with new advantages, one row per trained branch (path of messages)."""
    with whole_file(file) as temporary_file, temporary_file.open("w", encoding="utf-8") as stream:
        for _, _, record in read_records([source]):
            for trace in trained_traces(record):
                for _, node_ids in trace.paths:
                    tokens_of_nodes = [node_tokens(trace, node_id) for node_id in node_ids]
                    values_and_flags = zip(next(advantage_rows), branch_tokens(tokens_of_nodes).mask, strict=True)
                    sampled_advantages = (value for value, flag in values_and_flags if flag)
                    nodes = cast(Sequence[dict[str, Any]], trace.nodes)
                    for node_id, tokens in zip(node_ids, tokens_of_nodes, strict=True):
                        if sampled_token_count := sum(tokens.mask):
                            nodes[node_id]["advantages"] = list(islice(sampled_advantages, sampled_token_count))
            stream.write(json.dumps(record) + "\n")


def _write_advantages(trace: Mapping[str, Any], trajectory: Trajectory, entry: str, source: str | Path) -> None:
    """Copy the numbers `per_token[entry]` of each turn to the field `advantages` of the turn's node in a trace."""
    node_by_index: dict[Any, dict[str, Any]] = dict(enumerate(trace["nodes"]))
    for t, turn in enumerate(trajectory.turns):
        turn_name = f"Turn {t} of trajectory {trajectory.id!r}"
        if entry not in turn.per_token:
            raise DataError(
                f"{turn_name} has no '{entry}', so the turn cannot be written. Set '{entry}' for every turn. At tokens without "
                "credit, set 0."
            )
        advantages = [float(value) for value, flag in zip(turn.per_token[entry], turn.mask, strict=True) if flag]
        unusable_value = next((value for value in advantages if not math.isfinite(value)), None)
        if unusable_value is not None:
            raise DataError(f"{turn_name} has {unusable_value} in '{entry}', which no trainer can use; give finite numbers.")
        turn_node = node_by_index.get(turn.extra.get("node"), {})
        sampled_token_count = sum(bool(flag) for flag in turn_node.get("mask", ()))
        if sampled_token_count != len(advantages):
            raise DataError(
                f"{turn_name} has {len(advantages)} sampled tokens, but '{source}' holds {sampled_token_count} sampled tokens "
                f"for the turn. Read '{source}' again, and give the advantages of the turns that you read."
            )
        turn_node["advantages"] = advantages


def _list_traces(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the traces of an episode. A record of an old file is one trace."""
    if "traces" not in record and "nodes" not in record:
        raise missing_field("traces", record)
    return list_field(record, "traces", Mapping, "objects") if "traces" in record else [record]


def trained_traces(record: Mapping[str, Any]) -> Iterator[Trace]:
    """Yield those traces of a verifiers episode whose agent is trained."""
    work_field = object_field(object_field(record, "run"), "work")
    step = whole_number(work_field.get("step"), "step")
    group_id = object_field(record, "group").get("id")
    for index, raw_trace in enumerate(_list_traces(record)):
        agent_fields = object_field(raw_trace, "agent")
        if agent_fields.get("trainable", True):
            task = object_field(raw_trace, "task") or object_field(record, "task")
            nodes = list_field(raw_trace, "nodes", Mapping, "objects")
            has_group_id = group_id not in (None, "")
            trace = Trace(raw_trace, nodes, index, "", step, has_group_id, object_field(task, "data"), list(_paths(nodes)))
            task_key = task.get("key") or task.get("hash")
            prompt_nodes = trace.paths[0][0] if trace.paths else ()
            group_key = group_id if has_group_id else task_key or trace.prompt(prompt_nodes)
            yield replace(trace, key=f"{group_key} {agent_fields.get('name', '')}")


def _paths(nodes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[int], list[int]]]:
    """For each trained branch (path of messages), yield the indices of the prompt's messages, and of the completion's."""
    # Each sampled node (message) is trained once, in the first branch that has it. Later branches use it as context.
    parent_of_node = [None if node.get("parent") is None else whole_number(node["parent"], "parent") for node in nodes]
    for i, parent_id in enumerate(parent_of_node):
        if parent_id is not None and not 0 <= parent_id < i:
            raise FieldError(f"node {i} has the parent {parent_id}, but a parent must come before its node")
    links_of_node = [list_field(node, "semantic_parents", Mapping, "objects") for node in nodes]
    all_links = chain.from_iterable(links_of_node)
    compacted_node_ids = {link.get("node") for link in all_links if link.get("type") == "compaction"}
    leaf_ids = sorted({*range(len(nodes))}.difference(parent_of_node))
    attempt_node_ids = {i for i in leaf_ids if any(link.get("type") == "compaction_attempt" for link in links_of_node[i])}
    # Leave out attempts to shorten the history (compactions) that the agent did not use, unless nothing else is left.
    rejected_node_ids = attempt_node_ids - compacted_node_ids
    used_ids: set[int] = set()
    for leaf_id in [leaf_id for leaf_id in leaf_ids if leaf_id not in rejected_node_ids] or leaf_ids:
        branch_path: list[int] = []
        node_id: int | None = leaf_id
        while node_id is not None:
            branch_path.append(node_id)
            node_id = parent_of_node[node_id]
        branch_path.reverse()
        new_positions = (position for position, i in enumerate(branch_path) if nodes[i].get("sampled") and i not in used_ids)
        branch_start = next(new_positions, None)
        if branch_start is not None:
            yield branch_path[:branch_start], branch_path[branch_start:]
            used_ids.update(branch_path)


def node_tokens(trace: Trace, i: int) -> NodeTokens:
    """Read the tokens of node `i` in a trace."""
    node_fields = trace.nodes[i]
    node_place = _where(trace, i)
    ids = list_field(node_fields, "token_ids", int, "ids")
    sampled_mask = [*map(bool, _of_length(len(ids), list_field(node_fields, "mask", int, "flags"), "'mask'", node_place))]
    number_lists: dict[str, list[float]] = {}
    for name in NUMBER_FIELDS:
        if field_values := list_field(node_fields, name, (int, float), "numbers"):
            sampled_values = _of_length(sum(sampled_mask), field_values, f"'{name}'", node_place, "sampled token")
            value_iterator = map(float, sampled_values)
            number_lists[name] = [next(value_iterator) if is_sampled else 0.0 for is_sampled in sampled_mask]
    loss_weights = object_field(node_fields, _WEIGHTS)
    for name in loss_weights:
        field_values = list_field(loss_weights, name, (int, float), "numbers")
        token_weights = _of_length(len(ids), field_values, f"'{_WEIGHTS}' {name!r}", node_place)
        number_lists[f"{_WEIGHTS}/{name}"] = [*map(float, token_weights)]
    return NodeTokens(ids, sampled_mask, number_lists)


def branch_tokens(nodes: Sequence[NodeTokens]) -> NodeTokens:
    """Join the tokens of a branch's messages, from the first sampled token on."""
    all_ids = [token_id for node in nodes for token_id in node.ids]
    branch_mask = [is_sampled for node in nodes for is_sampled in node.mask]
    number_list_names = dict.fromkeys(name for node in nodes for name in node.number_lists)
    number_lists = {name: [value for node in nodes for value in node.numbers(name)] for name in number_list_names}
    return NodeTokens(all_ids, branch_mask, number_lists).split()[1]


def _of_length(length: int, values: list[Any], name: str, place: str, noun: str = "token") -> list[Any]:
    """Check that a node has `length` values, and return them."""
    if len(values) != length:
        raise FieldError(f"{place} has {length} {noun}s but {len(values)} values of {name}; each {noun} needs one value")
    return values


def _where(trace: Trace, i: int) -> str:
    """Name a node (message) and its trace for an error message."""
    return f"node {i}" + (f" of trace {trace.raw['id']!r}" if trace.raw.get("id") else "")


def trace_rewards(trace: Trace) -> dict[str, Any]:
    """Return the rewards and metrics of a trace. `reward` is the rewards' weighted sum, unless the trace has one."""
    rewards: dict[str, Any] = {}
    weighted_sum = 0.0
    is_scored = False
    for name, reward in object_field(trace.raw, "rewards").items():
        raw_score = reward.get("score") if isinstance(reward, Mapping) else reward
        raw_weight = reward.get("weight") if isinstance(reward, Mapping) else None
        rewards[name] = raw_score
        reward_number = finite(raw_score)
        reward_weight = 1.0 if raw_weight is None else finite(raw_weight)
        if reward_weight is None:
            raise FieldError(f"the weight of the reward '{name}' is {raw_weight!r}, but it must be a number")
        if reward_number is not None:
            weighted_sum += reward_number * reward_weight
            is_scored = True
    trace_metrics = {name: value for name, value in object_field(trace.raw, "metrics").items() if name not in rewards}
    all_rewards = {**rewards, **trace_metrics}
    all_rewards.setdefault("reward", weighted_sum if is_scored else None)
    # A failed trace is compared with no other. One with errors is `ok` if a later attempt succeeded.
    if trace.raw.get("errors") and not trace.raw.get("ok", False):
        return {name: value if isinstance(value, str) else None for name, value in all_rewards.items()}
    return all_rewards


def _trajectories(record: Mapping[str, Any]) -> Iterator[Trajectory]:
    """Yield the trained traces of an episode as trajectories."""
    for trace in trained_traces(record):
        turns = tuple(_turns(trace))
        rewards: dict[str, float | Status] = {}
        for name, value in trace_rewards(trace).items():
            if not isinstance(value, str):
                rewards[name] = Status.UNSCORED if (reward := finite(value)) is None else reward
        if turns:
            trace_details = {"trace": trace.place, "task": trace.task}
            yield Trajectory(trace.raw.get("id", trace.place), (trace.key, trace.step), turns, rewards, trace_details)


def _turns(trace: Trace) -> Iterator[Turn]:
    """Yield a turn for each sampled node of a trace. The tokens since the last sampled node are its prompt."""
    nodes = trace.nodes
    tokens_of_node = {i: node_tokens(trace, i) for node_ids in chain(*trace.paths) for i in node_ids}
    turn_of_node: dict[int, int] = {}
    for i in sorted({i for _, own_nodes in trace.paths for i in own_nodes if nodes[i].get("sampled")}):
        if not tokens_of_node[i].ids:
            raise FieldError(f"{_where(trace, i)} has no token ids, so none of its tokens can be credited")
        prompt_ids, response_tokens = tokens_of_node[i].split()
        parent_id = nodes[i].get("parent")
        while parent_id is not None and parent_id not in turn_of_node:
            prompt_ids = tokens_of_node[parent_id].ids + prompt_ids
            parent_id = nodes[parent_id].get("parent")
        parent_turn = None if parent_id is None else turn_of_node[parent_id]
        turn_tokens = (prompt_ids, response_tokens.ids, [int(flag) for flag in response_tokens.mask])
        yield Turn(*turn_tokens, parent=parent_turn, per_token=response_tokens.number_lists, extra={"node": i})
        turn_of_node[i] = len(turn_of_node)
