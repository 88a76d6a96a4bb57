"""Turns, trajectories and engines that do not fit together."""

import pytest
import torch

from border.case import case, check, command
from rollout_files import WELL_FORMED, trl_file
from spanwise import Batch, Laser, Layout, Objective, Scheme, Steps, Vocabulary, by_turn, credit_batch, read
from spanwise.credit.trajectories.turns import Trajectory, Turn
from spanwise.engines.tinker import credit_datums
from spanwise.engines.verl.estimators import recipe_advantages
from spanwise.step import Ranks, Step, turn_rows

pytestmark = pytest.mark.usefixtures("unchecked_shapes")
VOCABULARY = Vocabulary((b"<answer>", b"4", b"5", b"</answer>", b"<ans", b"wer>"))
WHOLE = Layout({"all": ["answer"]})
OF_EACH_TURN = Scheme("bae", WHOLE, [Objective("environment", "all", scope="turn")])
OF_STEPS = Scheme("gigpo", WHOLE, [Objective("environment", "all")])
CHAT = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
FIRST, SECOND = Turn([1], [0, 1, 3], [1, 1, 1]), Turn([1, 0, 1, 3, 2], [2], [1])


@case
def credited(method="grpo", *, trajectory=(0, 0), step=(0, 1), anchor=None, group=(0, 0), steps=True, **options):
    its_steps = Steps(torch.tensor(trajectory), torch.tensor(step), anchor) if steps else None
    batch = Batch.jagged([[0, 1, 3], [0, 2, 3]], list(group), columns={"answer": ["4", "4"]}, steps=its_steps)
    scheme = Scheme.preset(method, WHOLE, longest=64, **options)
    credit_batch(read(batch, scheme, VOCABULARY), batch, scheme)


@case
def of_turns(*turns, **options):
    return Trajectory("a", 0, turns, **options)


@case
def by_rows(step=(0, 1), group=(0, 0)):
    Trajectory.of_rows([FIRST, SECOND], ["a", "a"], step, group)


@case
def paid_once(scheme, **columns):
    turn_rows(Batch.jagged([[0, 1, 3]], [0], sampled=[[1, 0, 1]], columns=columns or {"environment": [1.0]}), scheme)


@case
def with_scope(scope, method="grpo", **options):
    credited(method, objectives=[Objective("correct", "all", scope=scope)], **options)(None)


def without_turns_elsewhere(folder):
    """A rollout function that returned `turns` in one of two processes."""
    others = lambda own: [own, (*own[:2], None)]  # noqa: E731
    batch = Batch.jagged([[0, 1, 3]], [0], columns={"turns": [[{"environment": 1.0}]]})
    Step(OF_EACH_TURN, VOCABULARY, ranks=Ranks(0, others)).read(batch)


def answered_too_early(folder):
    """Two rollouts of two turns: one says the right answer in its first turn, and no answer in its last."""
    paid = [Objective("correct", "all"), Objective("environment", "all", scope="turn")]
    step = Step(Scheme("bae", WHOLE, paid), VOCABULARY)
    turns = [[{"environment": 1.0}, {"environment": 0.0}]] * 2
    ids, sampled = [[0, 1, 3, 2, 1], [0, 2, 3, 2, 0, 1, 3]], [[1, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1, 1]]
    batch = Batch.jagged(ids, [0, 0], sampled=sampled, columns={"answer": ["4", "4"], "turns": turns})
    return " ".join(step.finish(step.read(batch)).warnings)


CASES = {
    "two turns of one trajectory in different groups": credited(group=(0, 1)),
    "the same, as rows of `Trajectory.of_rows`": by_rows(group=(0, 1)),
    "two rows that are the same turn of one trajectory": credited(step=(1, 1)),
    "one turn twice among the rows of `Trajectory.of_rows`": by_rows(step=(1, 1)),
    "`reinforce++`, which runs over the tokens of a rollout, on a row per turn": credited("reinforce++"),
    "`gigpo` on completions that are no turns": credited("gigpo", steps=False),
    "`gigpo` on turns without the state that each starts from": credited("gigpo"),
    "`gigpo` that compares states by their likeness, and the states are numbers": credited(
        "gigpo", anchor=[4, 7], similarity=0.9
    ),
    "`gigpo` in TRL on a task of one turn": case(command)(
        "train", "--set", "method=gigpo", "--set", "start_steps=1", "--steps", "1"
    ),
    "`gigpo` on a file of rollouts": lambda folder: command(
        "why", trl_file(folder / "a.parquet", WELL_FORMED), "--methods", "gigpo"
    ),
    "an objective with `scope: step`": with_scope("step"),
    "an objective with `scope: turn` where completions are no turns": with_scope("turn", steps=False),
    "`scope: turn` with a method that runs over the tokens of a rollout": with_scope("turn", "reinforce++"),
    "`scope: turn` with a method that knows no trajectories": with_scope("turn", "dcpo"),
    "a merge of turns whose history was tokenised again": case(
        Trajectory("a", 0, (FIRST, Turn([1, 4, 5, 1, 3, 2], [2], [1]))).merged
    )(VOCABULARY),
    "a turn with two tokens and one advantage": of_turns(Turn([1], [0, 1], [1, 1], per_token={"advantages": [0.5]})),
    "a reward that the turn has and the trajectory too": of_turns(
        Turn([1], [0], [1], rewards={"won": 1.0}), rewards={"won": 1.0}
    ),
    "a turn whose reward is NaN": of_turns(Turn([1], [0], [1], rewards={"won": float("nan")})),
    "a turn whose reward is None": lambda folder: Trajectory("a", 0, (Turn([1], [0], [1], rewards={"won": None}),)),
    "rewards by ids that are texts for `Trajectory.of_rows`, and ids of rows that are numbers": case(Trajectory.of_rows)(
        [FIRST], [7], [0], [0], rewards={"7": {"won": 1.0}}
    ),
    "rewards for Tinker's datums under a name that no objective has": case(credit_datums)(
        [[{}]], Scheme.preset("dr_grpo", WHOLE, longest=64), VOCABULARY, rewards={"corect": [[1.0]]}
    ),
    "rewards for Tinker's datums of an objective with `scope: turn`": case(credit_datums)(
        [[[{}, {}]]],
        Scheme("bae", WHOLE, [Objective("correct", "all", scope="turn")]),
        VOCABULARY,
        rewards={"correct": [[1.0]]},
    ),
    "Tinker's datums under a scheme with `laser`": case(credit_datums)(
        [[{}]], Scheme.preset("dr_grpo", WHOLE, longest=64, laser=Laser(token="?")), VOCABULARY
    ),
    "a turn that goes on from a later one": of_turns(Turn([1], [0], [1], parent=3)),
    "`adv_estimator=spanwise` in a trainer of verl that passes rewards alone": case(recipe_advantages)(
        torch.zeros(1, 2), torch.ones(1, 2), index=["a"]
    ),
    "a batch of two rows whose `steps` have one": lambda folder: Batch([0, 0], steps=Steps(torch.zeros(1), torch.zeros(1))),
    "group ids in a column of their own, `torch.tensor([[0], [0]])`": case(Batch)(torch.tensor([[0], [0]])),
    "`reward: environment` with `scope: turn`, and one number for a sequence of two turns": paid_once(OF_EACH_TURN),
    "the same under `gigpo` without a scope": paid_once(OF_STEPS),
    "`correct` without a scope beside `scope: turn`, and an answer before the last turn": answered_too_early,
    "a function of `completions` with `scope: turn`, and a conversation of two turns": paid_once(
        Scheme("bae", WHOLE, [Objective(lambda completions: [1.0], "all", name="lengths", scope="turn")])
    ),
    "`overlong` under `gigpo` without a scope": paid_once(
        Scheme("gigpo", WHOLE, [Objective("overlong", "all", options={"longest": 8, "buffer": 4})])
    ),
    "a function of verifiers under `gigpo` without a scope, and messages": paid_once(
        Scheme("gigpo", WHOLE, [Objective(lambda completion, answer: 1.0, "all", name="contains")]),
        prompts=[CHAT[:1]],
        completions=[CHAT[1:]],
        answer=["4"],
    ),
    "a dataset with a column `turns` of chats": case(turn_rows)(
        Batch.jagged([[0, 1, 3]], [0], columns={"turns": [CHAT]}), OF_EACH_TURN
    ),
    "a `rollout_func` that returns `turns` in one process and not in the other": without_turns_elsewhere,
    "one state for a sequence of two turns": case(by_turn)(
        Batch.jagged([[0, 1, 3]], [0], sampled=[[1, 0, 1]]), anchor_s=["hall"]
    ),
}

test_turns = check(__doc__, CASES)
