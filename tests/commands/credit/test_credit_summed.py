"""A method of one number per completion adds up the rewards that the trainer added up, and says which."""

import pytest

from rollout_files import said, trl_file, verifiers_file, verl_file, write_lines
from spanwise.commands.credit.credit import credit_rollouts

#: Every completion is well-formed, so that the first reward is the same for all.
OUTPUTS = [said("4", "0.9"), said("4", "0.8"), said("4", "0.7"), said("5", "0.1")]
CENTRED = [1.0, 0.0, 0.0, -1.0]  # form + right = 1 + (2, 1, 1, 0), minus their mean
FORM, RIGHT, ACC = [1.0] * 4, [2.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]


def credit_of(file, name, **options):
    result = credit_rollouts(file, methods=[name], **options)
    return result, result.applied[0].credit.block_nk[:, 0].tolist()


def own_table(**columns):
    """A table of one's own with these columns."""
    rows = [{"prompt": "2+2=", "completion": OUTPUTS[n], **{name: c[n] for name, c in columns.items()}} for n in range(4)]
    return lambda folder: write_lines(folder / "mine.jsonl", rows)


def listed(folder):
    row = {"prompt": "2+2=", "completions": OUTPUTS, "rewards": [3, 2, 2, 1], "acc": ACC}
    return write_lines(folder / "mine.jsonl", [row])


@pytest.mark.parametrize(
    ("write", "names", "expected"),
    [
        (
            lambda f: trl_file(
                f / "completions_1.parquet", OUTPUTS, step=[1] * 4, form=FORM, right=RIGHT, advantage=CENTRED
            ),
            ("form", "right"),
            CENTRED,
        ),
        # verl's score is the reward, and what stands beside it a diagnostic: not score + acc, nor acc.
        (lambda f: verl_file(f / "1.jsonl", OUTPUTS, gts=["4"] * 4, score=RIGHT, acc=FORM), ("score",), CENTRED),
        # The sum of verifiers is not added to what it is the sum of.
        (lambda f: verifiers_file(f / "traces.jsonl", OUTPUTS, form=FORM, right=RIGHT), ("reward",), CENTRED),
        # A table of one's own says by name which columns are the reward.
        (own_table(**{"rewards/form": FORM, "rewards/right": RIGHT, "length": [9, 1, 1, 1]}), ("form", "right"), CENTRED),
        (own_table(rewards=[{"form": 1, "right": n} for n in RIGHT]), ("form", "right"), CENTRED),
        (own_table(form=FORM, acc=ACC, reward=[3, 2, 2, 1]), ("reward",), CENTRED),
        (own_table(acc=ACC, length=[9, 1, 1, 1]), ("correct",), [0.5, -0.5, -0.5, 0.5]),  # nothing says what length is
        (listed, ("rewards",), CENTRED),
    ],
    ids=["TRL", "verl", "verifiers", "prefixed", "an object", "reward", "acc", "a list"],
)
def test_the_rewards_that_the_trainer_added_up_are_added_up(write, names, expected, tmp_path):
    result, credit = credit_of(write(tmp_path), "dr_grpo")
    assert result.arms.schemes["dr_grpo"].names == names
    assert credit == expected
    assert list(result.applied[0].dead) == [" + ".join(names)]


def test_what_the_user_says_goes_before_what_the_trainer_added_up(tmp_path):
    file = trl_file(tmp_path / "completions_1.parquet", OUTPUTS, step=[1] * 4, form=FORM, right=ACC)
    _, credit = credit_of(file, "dr_grpo", reward={"correct": "right"})
    assert credit == [0.5, -0.5, -0.5, 0.5]
    objectives = [{"reward": "mine:right", "pays": ["solution"], "weight": 4.0}]
    _, credit = credit_of(file, "dr_grpo", overrides={"objectives": objectives})
    assert credit == [2.0, -2.0, -2.0, 2.0]
    blocks, _ = credit_of(file, "bae", reward={"correct": "right"})
    assert blocks.arms.schemes["bae"].names[:2] == ("correct", "brier")
