"""slime's dumps: a file of `torch.save` for each rollout, with the fields of its `Sample.to_dict` (THUDM/slime 624b824a, read)."""

import pickle

import numpy as np
import pytest
import torch

from rollout_files import tagged, texts
from spanwise.commands.credit.credit import credit_rollouts
from spanwise.errors import DataError
from spanwise.rollouts import read_rollouts
from tokenizers_small import byte_level

TOKENIZER = byte_level()


def sample(text, *, group=0, index=0, **fields):
    """As slime leaves a sample: the ids of prompt and response in one list, and no mask where all of the response was sampled."""
    ids = TOKENIZER(text)["input_ids"]
    return {
        "group_index": group, "index": index, "rollout_id": None, "prompt": "2+2=", "response": text, "label": "4",
        "tokens": [*TOKENIZER("2+2=")["input_ids"], *ids], "response_length": len(ids), "loss_mask": None, "reward": 1.0,
        "rollout_log_probs": None, "remove_sample": False, "status": "completed", "metadata": {"level": 3, "tools": ["a"]},
        "spec_info": {"spec_verify_ct": 0}, "train_metadata": None, **fields,
    }  # fmt: skip


def dump(folder, *rollouts):
    (folder / "rollout_data").mkdir(exist_ok=True)
    for number, samples in enumerate(rollouts):
        torch.save({"rollout_id": number, "samples": samples}, folder / "rollout_data" / f"{number}.pt")
    return folder


@pytest.fixture
def tokenizer(tmp_path):
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def credited(folder, tokenizer, rows):
    """The credit of a dump under Dr. GRPO, and that of each completion."""
    options = {"methods": ["dr_grpo"], "overrides": {"layout": {"solution": ["answer"]}}}
    result = credit_rollouts(dump(folder, rows), tokenizer=tokenizer, **options)
    return result, result.applied[0].credit.block_nk.flatten().tolist()


def test_the_response_is_the_last_of_the_tokens_and_the_mask_says_which_were_sampled(tmp_path, tokenizer):
    outputs = [tagged("4", "0.9"), "it says 7, é", tagged("5", "0.9")]
    lengths = [len(TOKENIZER(text)["input_ids"]) for text in outputs]
    mask = [1, 1, 0, 0, *[1] * (lengths[1] - 4)]
    logps = [-0.5 * n for n in range(lengths[1])]
    rows = [sample(outputs[0]), sample(outputs[1], loss_mask=mask, rollout_log_probs=logps), sample(outputs[2], group=1)]
    table = read_rollouts(dump(tmp_path, rows, rows[:2]), tokenizer=tokenizer)
    assert (table.source, table.has_ids, texts(table)) == ("slime", True, [*outputs, *outputs[:2]])
    assert (table.group_n.tolist(), table.step_n.tolist()) == ([0, 0, 1, 2, 2], [0, 0, 0, 1, 1])
    assert table.tokens.with_values(table.trainable).slice(1, 2).tolist() == [bool(flag) for flag in mask]
    assert table.learned_n is None  # none is left out of the loss
    assert (table.columns["answer"], table.columns["level"]) == (["4"] * 5, [3] * 5)
    assert not table.token_values  # some sample has none
    alone = read_rollouts(dump(tmp_path, rows[1:2]) / "rollout_data" / "0.pt", tokenizer=tokenizer)
    np.testing.assert_allclose(alone.token_values["logprobs"], logps)


def test_a_reward_of_several_numbers_is_several_rewards(tmp_path):
    """Without a tokenizer the credit is per word, and the note says so."""
    rewards = [{"acc": 1.0, "style": 0.5, "why": "short"}, {"acc": 0.0, "style": None}]
    table = read_rollouts(dump(tmp_path, [sample("x y", reward=reward) for reward in rewards]))
    assert ("--tokenizer" in table.note, table.has_ids, texts(table)) == (True, False, ["x y"] * 2)
    assert {name: reward.value_n.tolist()[0] for name, reward in table.rewards.items()} == {"acc": 1.0, "style": 0.5}
    assert table.rewards["style"].value_n.isnan().tolist() == [False, True]


def test_what_slime_leaves_out_of_the_loss_is_compared_and_gets_nothing(tmp_path, tokenizer):
    """Of rewards 1, 0 and 0 the mean is 1/3, whoever trains; a sample whose mask is 0 throughout is left out, too."""
    text = tagged("4", None)
    nothing = [0] * len(TOKENIZER(text)["input_ids"])
    rows = [sample(text), sample(text, reward=0.0, remove_sample=True), sample(text, reward=0.0, loss_mask=nothing)]
    result, credits = credited(tmp_path, tokenizer, rows)
    assert result.table.learned_n.tolist() == [True, False, False]
    assert credits[0] == pytest.approx(2 / 3)
    assert [bool(result.applied[0].advantages(result.table, n, n + 1).any()) for n in range(3)] == [True, False, False]


def test_samples_of_one_rollout_have_one_vote(tmp_path, tokenizer):
    """slime's number of a rollout begins anew in each file, and a custom function may begin anew in each group."""
    rows = [sample("a", rollout_id=0), sample("b", rollout_id=0), sample("c", rollout_id=1, reward=0.0)]
    table = read_rollouts(dump(tmp_path, rows, rows), tokenizer=tokenizer)
    assert table.rollout_n.tolist() == [0, 0, 1, 2, 2, 3]
    in_group_1 = [{**row, "group_index": 1, "reward": 1.0 - row["reward"]} for row in rows]
    (tmp_path / "two").mkdir()
    result, credits = credited(tmp_path / "two", tokenizer, rows + in_group_1)
    assert result.group_n.tolist() == [0, 0, 0, 1, 1, 1]
    assert credits == [0.5, 0.5, -0.5, -0.5, -0.5, 0.5]
    # A later sample of a rollout has a prompt of its own; without a group_index, the prompt of the first sample counts.
    rows = [sample("a", group=None, rollout_id=0), sample("b", group=None, rollout_id=0, prompt="2+2=a, so"), rows[2]]
    assert credited(tmp_path / "two", tokenizer, rows)[1] == [0.5, 0.5, -0.5]


def test_samples_without_a_group_are_counted_and_without_a_label_have_the_answer_of_their_metadata(tmp_path):
    """Evaluations have neither; the hooks in slime read the same answer."""
    rows = [sample("a"), sample("b", group=None, label=None, metadata={"answer": "5"}), sample("c", group=1)]
    table = read_rollouts(dump(tmp_path, rows))
    assert (table.group_n.tolist(), table.keyed) == ([0, 0, 0], False)
    assert "1 of 3 samples have no group_index" in table.note
    assert table.columns["answer"] == ["4", "5", "4"]


class Stranger:
    """An object whose unpickling runs code."""

    def __reduce__(self):
        return print, ("it ran",)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: torch.save([1, 2], file),
        lambda file: torch.save({"samples": [3]}, file),
        lambda file: torch.save({"samples": [sample("x", loss_mask=[1] * 99)]}, file),
        lambda file: torch.save({"samples": [sample("x", metadata=Stranger())]}, file),
        lambda file: file.write_bytes(pickle.dumps(Stranger())),
    ],
)
def test_a_damaged_dump_is_refused_and_no_code_of_it_runs(damage, tmp_path, capsys):
    file = dump(tmp_path, [sample("x")]) / "rollout_data" / "0.pt"
    damage(file)
    with pytest.raises(DataError, match=r"0\.pt") as error:
        read_rollouts(file)
    assert "\n" not in str(error.value)
    assert not capsys.readouterr().out
