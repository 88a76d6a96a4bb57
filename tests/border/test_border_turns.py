"""Turns, trajectories and engines that do not fit together."""

import pytest
import torch

from border.case import Case, check, command
from rollout_files import WELL_FORMED, trl_file
from spanwise import Batch, Layout, Objective, Scheme, Vocabulary, credit_batch, read
from spanwise.batch import Steps, by_turn
from spanwise.credit.trajectories.turns import Trajectory, Turn
from spanwise.engines.verl.estimators import carried_advantages

pytestmark = pytest.mark.usefixtures("unchecked_shapes")
VOCABULARY = Vocabulary((b"<answer>", b"4", b"5", b"</answer>", b"<ans", b"wer>"))
WHOLE = Layout({"all": ["answer"]})
FIRST, SECOND = Turn([1], [0, 1, 3], [1, 1, 1]), Turn([1, 0, 1, 3, 2], [2], [1])


def credited(method="grpo", *, trajectory=(0, 0), step=(0, 1), anchor=None, group=(0, 0), steps=True, **options):
    """Two rows under a method, as turns of trajectories or on their own."""
    where = Steps(torch.tensor(trajectory), torch.tensor(step), anchor) if steps else None
    batch = Batch.jagged([[0, 1, 3], [0, 2, 3]], list(group), columns={"answer": ["4", "4"]}, steps=where)
    scheme = Scheme.preset(method, WHOLE, longest=64, **options)
    return f"{credit_batch(read(batch, scheme, VOCABULARY), batch, scheme)}"


def of_turns(*turns, **options):
    return f"{Trajectory('a', 0, turns, **options)}"


def by_rows(step=(0, 1), group=(0, 0)):
    return f"{Trajectory.of_rows([FIRST, SECOND], ['a', 'a'], step, group)}"


def with_scope(scope, method="grpo", **options):
    return credited(method, objectives=[Objective("correct", "all", scope=scope)], **options)


CASES = [
    Case(
        "two turns of one trajectory in different groups",
        lambda folder: credited(group=(0, 1)),
        "Trajectory 0 has rows of prompt 0 and of prompt 1; give the trajectories of different prompts different ids.",
    ),
    Case(
        "the same, as rows of `Trajectory.of_rows`",
        lambda folder: by_rows(group=(0, 1)),
        "Trajectory 'a' has rows of prompt 0 and of prompt 1; give the trajectories of different prompts different ids.",
    ),
    Case(
        "two rows that are the same turn of one trajectory",
        lambda folder: credited(step=(1, 1)),
        "Rows 0 and 1 are both step 1 of trajectory 0; number the steps of a trajectory differently",
    ),
    Case(
        "one turn twice among the rows of `Trajectory.of_rows`",
        lambda folder: by_rows(step=(1, 1)),
        "Rows 0 and 1 are both step 1 of trajectory 'a'; number the steps of a trajectory differently",
    ),
    Case(
        "`reinforce++`, which runs over the tokens of a rollout, on a row per turn",
        lambda folder: credited("reinforce++"),
        "Method 'reinforce++' runs over the tokens of a rollout from its end, and rows [0, 1] are turns of one; each would end "
        "where its turn ends. Merge the turns of a rollout into one row, or use an outcome method or 'gigpo'.",
    ),
    Case(
        "`gigpo` on completions that are no turns",
        lambda folder: credited("gigpo", steps=False),
        "Method 'gigpo' needs steps of trajectories (steps), which is not there. Methods that can be run: bae, ...",
    ),
    Case(
        "`gigpo` on turns without the state that each starts from",
        lambda folder: credited("gigpo"),
        "Method 'gigpo' needs anchor_s, which this batch does not have.",
    ),
    Case(
        "`gigpo` that compares states by their likeness, and the states are numbers",
        lambda folder: credited("gigpo", anchor=[4, 7], similarity=0.9),
        "The anchor state of row 0 is a int, ...",
    ),
    Case(
        "`gigpo` in TRL on a task of one turn",
        lambda folder: command("train", "--set", "method=gigpo", "--set", "start_steps=1", "--steps", "1"),
        "Error: Method 'gigpo' compares turns that start from the same state, but no turn names its state. Let your environment "
        "give 'turns': for each completion a list with one {'anchor': STATE} per turn.",
    ),
    Case(
        "`gigpo` on a file of rollouts",
        lambda folder: command("why", trl_file(folder / "a.parquet", WELL_FORMED), "--methods", "gigpo"),
        "Error: Method 'gigpo' cannot be applied to a rollout file: it needs ... anchor_s, which no format holds.",
    ),
    Case(
        "an objective with `scope: step`",
        lambda folder: with_scope("step"),
        "Objective 'correct' has scope: 'step'; write 'rollout' or 'turn', or leave it out.",
    ),
    Case(
        "an objective with `scope: turn` where completions are no turns",
        lambda folder: with_scope("turn", steps=False),
        "Objective 'correct' has scope: turn, but here completions are not turns of rollouts (Batch.steps). Leave it out: each "
        "completion is one turn.",
    ),
    Case(
        "`scope: turn` with a method that runs over the tokens of a rollout",
        lambda folder: with_scope("turn", "reinforce++"),
        "Objective 'correct' has scope: turn, but method 'reinforce++' runs over the tokens of whole rollouts, with one reward at "
        "the end. Leave it out, or use method 'gigpo'.",
    ),
    Case(
        "`scope: turn` with a method that knows no trajectories",
        lambda folder: with_scope("turn", "dcpo"),
        "Objective 'correct' has scope: turn, but method 'dcpo' does not know whose rows it compares: a rollout of many turns "
        "would have many votes. Leave it out, or use method 'bae'.",
    ),
    Case(
        "a merge of turns whose history was tokenised again",
        lambda folder: f"{Trajectory('a', 0, (FIRST, Turn([1, 4, 5, 1, 3, 2], [2], [1]))).merged(VOCABULARY)}",
        "Turn 1 of trajectory 'a' repeats the text up to the end of turn 0 in other tokens, so they cannot be one sequence: token "
        "1 was 0 (b'<answer>'), in its prompt it is 4 (b'<ans'). Pass sampled tokens on as ids",
    ),
    Case(
        "a turn with two tokens and one advantage",
        lambda folder: of_turns(Turn([1], [0, 1], [1, 1], per_token={"advantages": [0.5]})),
        "Turn 0 of trajectory 'a' has 2 response tokens and 1 entries of 'advantages'; give one to each.",
    ),
    Case(
        "a reward that the turn has and the trajectory too",
        lambda folder: of_turns(Turn([1], [0], [1], rewards={"won": 1.0}), rewards={"won": 1.0}),
        "Turn 0 of trajectory 'a' has a reward 'won', and so has the trajectory as a whole; give the two different names.",
    ),
    Case(
        "a turn whose reward is NaN",
        lambda folder: of_turns(Turn([1], [0], [1], rewards={"won": float("nan")})),
        "Turn 0 of trajectory 'a' has nan as reward 'won'; give a finite number, or the Status that says why there is none.",
    ),
    Case(
        "a turn that goes on from a later one",
        lambda folder: of_turns(Turn([1], [0], [1], parent=3)),
        "Turn 0 of trajectory 'a' goes on from turn 3, which does not come before it.",
    ),
    Case(
        "`adv_estimator=spanwise` in a trainer of verl that passes rewards alone",
        lambda folder: f"{carried_advantages(torch.zeros(1, 2), torch.ones(1, 2), index=['a'])}",
        "adv_estimator 'spanwise' needs the readings of the reward workers, but this trainer passes rewards alone. Use "
        "verl.trainer.main_ppo with trainer.v1.trainer_mode sync, colocate_async or separate_async, or trainer.use_v1=False. With "
        "another trainer use an estimator of one reward: spanwise_dr_grpo, spanwise_grpo, ...",
    ),
    Case(
        "one state for a sequence of two turns",
        lambda folder: f"{by_turn(Batch.jagged([[0, 1, 3]], [0], sampled=[[1, 0, 1]]), anchor_s=['hall'])}",
        "There are 1 anchor states for 2 turns; give one to each.",
    ),
]

test_turns = check(CASES)
