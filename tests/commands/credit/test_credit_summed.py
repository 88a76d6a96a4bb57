"""A method of one number per completion adds up the rewards that the trainer added up, and says which."""

import pytest

from rollout_files import said, trl_file, verifiers_file, verl_rows, write_lines
from spanwise.commands.credit.credit import credit_rollouts

#: Every completion is well-formed, so that the first reward is the same for all.
OUTPUTS = [said("4", "0.9"), said("4", "0.8"), said("4", "0.7"), said("5", "0.1")]
CENTRED = [1.0, 0.0, 0.0, -1.0]  # form + right = 1 + (2, 1, 1, 0), minus their mean


def credit_of(file, name, **options):
    result = credit_rollouts(file, methods=[name], **options)
    return result, result.applied[0].credit.block_nk[:, 0].tolist()


def test_trl_trains_on_the_sum_of_its_reward_functions(tmp_path):
    file = trl_file(tmp_path / "completions_1.parquet", OUTPUTS, step=[1] * 4, form=[1.0] * 4, right=[2.0, 1.0, 1.0, 0.0],
                    advantage=CENTRED)  # fmt: skip
    result, credit = credit_of(file, "dr_grpo")
    assert credit == CENTRED
    assert "dr_grpo: form + right" in result.note
    assert list(result.applied[0].dead) == ["form + right"]


def test_verls_score_is_the_reward_and_what_stands_beside_it_a_diagnostic(tmp_path):
    rows = [{**row, "score": score, "acc": 1.0} for row, score in zip(verl_rows()[:4], (2.0, 1.0, 1.0, 0.0), strict=True)]
    result, credit = credit_of(write_lines(tmp_path / "1.jsonl", rows), "dr_grpo")
    assert credit == CENTRED  # and not those of score + acc, nor of acc
    assert result.arms.schemes["dr_grpo"].names == ("score",)


def test_verifiers_own_sum_is_not_added_to_what_it_is_the_sum_of(tmp_path):
    file = verifiers_file(tmp_path / "traces.jsonl", OUTPUTS, form=[1.0] * 4, right=[2.0, 1.0, 1.0, 0.0])
    result, credit = credit_of(file, "dr_grpo")
    assert credit == CENTRED
    assert result.arms.schemes["dr_grpo"].names == ("reward",)


@pytest.mark.parametrize(
    ("columns", "names", "expected"),
    [
        ({"rewards/form": [1, 1, 1, 1], "rewards/right": [2, 1, 1, 0], "length": [9, 1, 1, 1]}, ("form", "right"), CENTRED),
        ({"rewards": [{"form": 1, "right": n} for n in (2, 1, 1, 0)]}, ("form", "right"), CENTRED),
        ({"form": [1, 1, 1, 1], "acc": [1, 0, 0, 1], "reward": [3, 2, 2, 1]}, ("reward",), CENTRED),
        ({"acc": [1, 0, 0, 1], "length": [9, 1, 1, 1]}, ("correct",), [0.5, -0.5, -0.5, 0.5]),  # nothing says what length is
    ],
)
def test_a_table_of_ones_own_says_by_name_which_columns_are_the_reward(columns, names, expected, tmp_path):
    rows = [{"prompt": "2+2=", "completion": text} | {name: column[n] for name, column in columns.items()}
            for n, text in enumerate(OUTPUTS)]  # fmt: skip
    result, credit = credit_of(write_lines(tmp_path / "mine.jsonl", rows), "dr_grpo")
    assert result.arms.schemes["dr_grpo"].names == names
    assert credit == expected


def test_a_list_of_rewards_beside_a_list_of_completions_is_the_reward(tmp_path):
    row = {"prompt": "2+2=", "completions": OUTPUTS, "rewards": [3, 2, 2, 1], "acc": [1, 0, 0, 1]}
    result, credit = credit_of(write_lines(tmp_path / "mine.jsonl", [row]), "dr_grpo")
    assert (result.arms.schemes["dr_grpo"].names, credit) == (("rewards",), CENTRED)


def test_what_the_user_says_goes_before_what_the_trainer_added_up(tmp_path):
    file = trl_file(tmp_path / "completions_1.parquet", OUTPUTS, step=[1] * 4, form=[1.0] * 4, right=[1.0, 0.0, 0.0, 1.0])
    _, credit = credit_of(file, "dr_grpo", reward={"correct": "right"})
    assert credit == [0.5, -0.5, -0.5, 0.5]
    _, credit = credit_of(
        file, "dr_grpo", overrides={"objectives": [{"reward": "mine:right", "pays": ["solution"], "weight": 4.0}]}
    )
    assert credit == [2.0, -2.0, -2.0, 2.0]
    blocks, _ = credit_of(file, "bae", reward={"correct": "right"})
    assert blocks.arms.schemes["bae"].names[:2] == ("correct", "brier")
