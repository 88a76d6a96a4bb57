"""The rollouts of `conformance.json` through TRL's trainer."""

import pytest
import torch
from datasets import Dataset

import conformance
import trl_small as small

pytestmark = [
    *small.THIRD_PARTY,
    pytest.mark.filterwarnings("ignore:Every advantage of the batch at step:UserWarning"),
]
SAVED = conformance.load()


def trained(folder, rows, rule, *, turns=False):
    """The advantages with which TRL trains the completions of one group."""
    data = Dataset.from_list([{"prompt": rows[0]["question"], "answer": rows[0]["answer"]}])

    def rollout(prompts, trainer):
        output = {
            "prompt_ids": [conformance.ids(prompt) for prompt in prompts],
            "completion_ids": [row["ids"] for row in rows],
            "logprobs": None,
            "env_mask": [row["sampled"] for row in rows],
        }
        return {**output, "turns": [row["turns"] for row in rows]} if turns else output

    run = small.trainer(
        folder,
        extra={"scheme": rule, "train_dataset": data, "processing_class": conformance.tokenizer(), "rollout_func": rollout},
        num_generations=len(rows),
        per_device_train_batch_size=len(rows),
        max_completion_length=64,
        learning_rate=0.0,
    )
    seen = []
    generate = run._generate_and_score_completions

    def kept(inputs):
        output = generate(inputs)
        seen.append(output["advantages"].clone())
        return output

    run._generate_and_score_completions = kept
    run.train()
    return [values[: len(row["ids"])].tolist() for values, row in zip(seen[0], rows, strict=True)]


def groups(rows, expected):
    found = {}
    for row, values in zip(rows, expected, strict=True):
        found.setdefault(row["group"], []).append((row, values))
    return [members for members in found.values() if len(members) > 1]  # TRL has no group of one


def check(found, expected):
    for row, values in zip(found, expected, strict=True):
        assert row == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("number", range(3))
def test_blocks(tmp_path, number):
    rule = conformance.scheme("blocks", tmp_path)
    rows, expected = zip(*groups(SAVED["rollouts"]["flat"], SAVED["advantages"]["blocks"])[number], strict=True)
    check(trained(tmp_path, rows, rule), expected)


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("name", ["turns", "gigpo"])
def test_turns(tmp_path, name, number):
    rows = SAVED["rollouts"]["turns"]
    expected = conformance.of_sequences(rows, SAVED["advantages"][name])
    members, values = zip(*groups(conformance.sequences(rows), expected)[number], strict=True)
    found = trained(tmp_path, members, conformance.scheme(name, tmp_path), turns=True)
    check(found, values)
    assert any(value for row in found for value in row)


def test_float64_is_the_pipeline_to_the_last_bit(tmp_path):
    """What TRL's batches become, before it is made float32 for TRL."""
    rule = conformance.scheme("blocks", tmp_path)
    rows = [row for row in SAVED["rollouts"]["flat"] if row["group"] == "g4"]
    data = Dataset.from_list([{"prompt": rows[0]["question"], "answer": rows[0]["answer"]}])
    said = {"completion_ids": [row["ids"] for row in rows], "env_mask": [row["sampled"] for row in rows], "logprobs": None}
    run = small.trainer(
        tmp_path,
        extra={
            "scheme": rule, "train_dataset": data, "processing_class": conformance.tokenizer(),
            "rollout_func": lambda prompts, trainer: {"prompt_ids": [conformance.ids(p) for p in prompts], **said},
        },
        num_generations=4, per_device_train_batch_size=4, max_completion_length=64,
    )  # fmt: skip
    run.train()
    from spanwise import advantages

    kept = run.last_rollouts
    found = advantages(kept.credit, kept.spans, rule, dtype=torch.float64).tolist()
    for row, values, exact in zip(rows, found, conformance.by_pipeline(rows, rule), strict=True):
        assert values[: len(row["ids"])] == exact
