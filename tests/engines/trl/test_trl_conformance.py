"""The rollouts that every engine is held against, through TRL: what reaches the loss is what loops over the definitions say."""

import pytest
import torch

import conformance
import trl_small as small
from spanwise.pipeline import advantages
from spanwise.recipe import scheme_at

#: A turn without a confidence that the environment pays all the same: that it is not used is what the definitions say.
UNUSED = pytest.mark.filterwarnings("ignore:.*That is ignored:UserWarning")
#: Lists of different lengths, whose last element nobody is charged for.
SHORT = pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning")
pytestmark = [*small.THIRD_PARTY, UNUSED, SHORT]
SAID = conformance.load()


def groups(rows, advantages):
    """TRL's groups have one size, and at least two members: each prompt is a batch of its own."""
    found = {}
    for row, values in zip(rows, advantages, strict=True):
        found.setdefault(row["group"], []).append((row, values))
    return [group for group in found.values() if len(group) > 1]


CASES = [
    *(
        (name, group)
        for name in ("blocks", "waits", "fields")
        for group in groups(SAID["rollouts"][conformance.ROWS[name]], SAID["advantages"][name])
    ),
    *(
        (name, group)
        for name in ("turns", "gigpo")
        for group in groups(
            conformance.sequences(SAID["rollouts"]["turns"]),
            conformance.of_sequences(SAID["rollouts"]["turns"], SAID["advantages"][name]),
        )
    ),
]


def replayed(rows):
    """A rollout function that gives back what is in the file."""

    def rollout(batch, trainer):
        output = {"prompt_ids": [row["prompt"] for row in rows], "completion_ids": [row["ids"] for row in rows]}
        output |= {"logprobs": None, "env_mask": [row["sampled"] for row in rows]}
        return output if "turns" not in rows[0] else {**output, "turns": [row["turns"] for row in rows]}

    return rollout


class Watched(small.SpanGRPOTrainer):
    """Keeps the advantages that go into the loss, before its normaliser is undone."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        self.seen_nt = output["advantages"]
        return output


@pytest.mark.parametrize(("recipe", "group"), CASES, ids=[f"{recipe}-{group[0][0]['group']}" for recipe, group in CASES])
def test_the_advantages_are_those_of_the_definitions(tmp_path, recipe, group):
    file = tmp_path / "recipe.yaml"
    file.write_text(SAID["recipes"][recipe])
    rows = [row for row, _ in group]
    data = small.Dataset.from_list([{"prompt": rows[0]["question"], "answer": rows[0]["answer"]}])
    run = small.trainer(
        tmp_path,
        kind=Watched,
        extra={
            "model": small.policy(words=len(conformance.PIECES)),
            "scheme": scheme_at(file, longest=64),
            "train_dataset": data,
            "processing_class": conformance.tokenizer(),
            "rollout_func": replayed(rows),
        },
        num_generations=len(rows),
        per_device_train_batch_size=len(rows),
        max_completion_length=64,
    )
    run.train()
    for found, (row, want) in zip(run.seen_nt, group, strict=True):
        assert torch.allclose(found[: len(row["ids"])].double(), torch.tensor(want).double(), atol=1e-6, rtol=0)
        assert not found[len(row["ids"]) :].any()


def test_float64_is_the_pipeline_to_the_last_bit(tmp_path):
    """What TRL's batches become, before it is made float32 for TRL."""
    file = tmp_path / "recipe.yaml"
    file.write_text(SAID["recipes"]["blocks"])
    rule, rows = scheme_at(file, longest=64), [row for row in SAID["rollouts"]["flat"] if row["group"] == "g4"]
    run = small.trainer(
        tmp_path,
        extra={
            "scheme": rule,
            "train_dataset": small.Dataset.from_list([{"prompt": rows[0]["question"], "answer": rows[0]["answer"]}]),
            "processing_class": conformance.tokenizer(),
            "rollout_func": replayed(rows),
        },
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=64,
    )
    run.train()
    kept = run.last_rollouts
    found = advantages(kept.credit, kept.spans, rule, dtype=torch.float64).tolist()
    for row, values, exact in zip(rows, found, conformance.by_pipeline(rows, rule), strict=True):
        assert values[: len(row["ids"])] == exact
