"""`tests/conformance.json` through ms-swift's GRPO trainer on CPU: its loop of turns, its masks, two processes: `make test-swift`.

Only the engine that samples is replaced, by one that replays the file. A group of the file is a step of its own, with
`num_generations` completions. Two groups of the file have no place there: ms-swift asks for two completions or more, and a rollout
whose history branches is several of its samples, which `settings.check` refuses.
"""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from foreign_swift import Recorded, prepare, trained
from swift.infer_engine import protocol
from swift.rollout import MultiTurnScheduler, multi_turns

import conformance
import opened_folder

pytestmark = pytest.mark.filterwarnings("default")  # their packages warn of themselves

CASES = conformance.load()
GROUPS = {"flat": ("g4", "g3", "g2"), "fields": ("g4", "g3", "g2"), "turns": ("h3", "h2")}
EACH = [(name, group) for name, kind in conformance.ROWS.items() for group in GROUPS[kind]]


def rollouts_of(name, group):
    """The rollouts of a group: for each turn its row, and the credit of its tokens."""
    rows = CASES["rollouts"][conformance.ROWS[name]]
    rollouts = {}
    for n, (row, credit) in enumerate(zip(rows, CASES["advantages"][name], strict=True)):
        if row["group"] == group:
            rollouts.setdefault(row.get("rollout", n), []).append((row, credit))
    return list(rollouts.values())


class Replay(MultiTurnScheduler):
    """After each turn, say which of its tokens were a tool's, and give the environment's answer."""

    async def on_turn_end(self, infer_request, response_choice, current_turn):
        turns, number = Replayed.turns_of(infer_request.uuid)
        row = turns[current_turn - 1][0]
        facts = [{"anchor": row.get("anchor"), "paid": row.get("paid")} for row, _ in turns]
        infos = {"number": number, **({"turns": facts} if "rollout" in row else {})}
        mask = {"response_token_ids": row["ids"], "response_loss_mask": row["sampled"]}
        return {"done": current_turn == len(turns), "rollout_infos": infos, **mask}

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": "".join(conformance.BETWEEN)})
        return {"infer_request": infer_request}


multi_turns["replay"] = Replay


class Replayed(Recorded):
    """ms-swift's trainer with an engine that replays the file."""

    rollouts, numbers = (), {}

    def number_of(self, sample):
        return sample.rollout_infos["number"]

    @classmethod
    def turns_of(cls, uuid):
        return cls.rollouts[cls.numbers[uuid]], cls.numbers[uuid]

    def _engine_infer(self, infer_requests, request_config=None, **_):
        start = self.accelerator.process_index * len(infer_requests)
        outputs = []
        for n, request in enumerate(infer_requests):
            turn = sum(message["role"] == "assistant" for message in request.messages)
            number = Replayed.numbers.setdefault(request.uuid, start + n)
            row = Replayed.rollouts[number][turn][0]
            text = "".join(conformance.PIECES[token] for token in row["ids"])
            message = protocol.ChatMessage("assistant", text)
            choice = protocol.ChatCompletionResponseChoice(0, message, "stop", token_ids=row["ids"])
            response = protocol.ChatCompletionResponse("file", [choice], protocol.UsageInfo(0, 0, 0))
            outputs.append(protocol.RolloutOutput(response=response))
        return outputs


def replayed(folder, name, group, **options):
    """The trainer after a step on a group of the file."""
    rollouts = rollouts_of(name, group)
    Replayed.rollouts, Replayed.numbers = rollouts, {}
    row = rollouts[0][0][0]
    recipe = CASES["recipes"][name] + options.pop("more", "")
    tasks = [{"prompt": row["question"], "answer": row["answer"]}] * 2
    prepare(folder, pieces=conformance.PIECES, tasks=tasks, recipe=recipe)
    sizes = dict.fromkeys(("num_generations", "per_device_train_batch_size"), len(rollouts))
    usual = {"multi_turn_scheduler": "replay", "loss_type": "dr_grpo", "max_completion_length": 64}
    more = {**usual, **sizes, "gradient_accumulation_steps": 1, **options}
    return trained(folder, trainer=f"{__name__}.Replayed", **more)[0]


def defined(name, group):
    """The credit of each rollout's sampled tokens, by loops over the definitions."""
    return [
        [value for row, credit in turns for value, flag in zip(credit, row["sampled"], strict=True) if flag]
        for turns in rollouts_of(name, group)
    ]


def assert_defined(advantages, name, group):
    expected = defined(name, group)
    assert sorted(advantages) == [*range(len(expected))]
    for number, values in enumerate(expected):
        assert advantages[number] == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(("name", "group"), EACH)
def test_it_gives_every_token_the_advantage_of_the_file(tmp_path, name, group):
    assert_defined(replayed(tmp_path, name, group).seen, name, group)


def test_a_group_of_one_is_refused_by_ms_swift(tmp_path):
    with pytest.raises(ValueError, match="num_generations"):
        replayed(tmp_path, "blocks", "g1")


@pytest.mark.parametrize(("name", "group"), [("blocks", "g4"), ("turns", "h2")])
def test_two_processes_share_a_group(tmp_path, name, group):
    """Each has half of the group's completions; they are compared across processes, and one writes the folder of both."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*command, str(tmp_path), name, group], env=environment, check=True)
    by_number = {}
    for file in tmp_path.glob("seen_*.json"):
        by_number |= {int(number): values for number, values in json.loads(file.read_text()).items()}
    assert len([*tmp_path.glob("seen_*.json")]) == 2
    assert_defined(by_number, name, group)
    rows, advantages = opened_folder.numbers(tmp_path / "run")
    assert advantages == pytest.approx([*chain(*defined(name, group))], abs=1e-6)
    (prompt,) = {row["prompt"] for row in rows}
    assert json.loads(prompt)[0]["content"] == rollouts_of(name, group)[0][0][0]["question"]


def main(folder, name, group):
    """Train in one of two processes, and write the advantages of its completions."""
    rank = os.environ["RANK"]
    rank_folder = Path(folder) / rank
    rank_folder.mkdir()
    half = len(rollouts_of(name, group)) // 2
    output = {"more": f"output: {folder}/run\n"}
    run = replayed(rank_folder, name, group, per_device_train_batch_size=half, ddp_backend="gloo", **output)
    (Path(folder) / f"seen_{rank}.json").write_text(json.dumps(run.seen))


if __name__ == "__main__":
    sys.modules["foreign_swift_conformance"] = sys.modules["__main__"]
    main(*sys.argv[1:])
