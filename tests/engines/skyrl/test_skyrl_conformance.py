"""The conformance rollouts through SkyRL's trainer: as rows and merged rows, in float64 and float32."""

from itertools import pairwise

import pytest
import skyrl_small as small
import torch
from skyrl.train.generators.base import TrajectoryID

import conformance
from spanwise.segment import Vocabulary


class Prompts(list):
    """The dataset: a prompt's id is the number of its row."""

    def __init__(self, rows):
        groups = dict.fromkeys(row["group"] for row in rows)
        by_group = {row["group"]: row for row in rows}
        super().__init__(([], None, {"answer": by_group[group]["answer"]}, str(n)) for n, group in enumerate(groups))
        self.uid = {group: str(n) for n, group in enumerate(groups)}

    def collate_fn(self, rows):
        return rows


def credited(data, recipe, rows, uids, output, dtype, **shape):
    """Run a generator's output for these rows through the trainer, up to its advantages; returns the trainer and its rows."""
    trainer = small.trainer(small.config(data, recipe=recipe, **shape))
    trainer.train_dataset, trainer.advantage_dtype = Prompts(rows), dtype
    trainer.vocabulary = Vocabulary.from_tokenizer(conformance.tokenizer())
    columns = {"prompt_token_ids": "prompt", "response_ids": "ids", "loss_masks": "sampled"}
    output |= {name: [row[key] for row in rows] for name, key in columns.items()}
    output |= {"rewards": [0.0] * len(rows), "stop_reasons": None, "rollout_logprobs": None}
    trained, uids = trainer.postprocess_generator_output(dict(output), uids)
    batch = trainer.convert_to_training_input(trained, uids)
    batch["values"] = None
    trainer.compute_advantages_and_returns(batch)
    return trainer, trained


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
# Here leaving list elements out is free, and one turn is paid for a confidence that it does not state.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*leave out n:UserWarning", "ignore:.*spanwise ignores rewards of completions"),
    pytest.mark.parametrize("dtype", TOLERANCE),
    pytest.mark.parametrize("name", conformance.RECIPES),
]


@pytest.mark.parametrize("layout", ["stepwise", "merged"])
def test_it_gives_every_token_the_advantage_of_the_file(data, name, layout, dtype):
    """Rows come as a generator returns them: groups together, the turns of a rollout in order."""
    rows, expected = conformance.expected(name)
    uid = Prompts(rows).uid
    order = sorted(range(len(rows)), key=lambda n: uid[rows[n]["group"]])
    rows = [rows[n] for n in order]
    rollouts = [row.get("rollout", n) for n, row in zip(order, rows, strict=True)]
    ids = [TrajectoryID(uid[row["group"]], key) for row, key in zip(rows, rollouts, strict=True)]
    output = {theirs: [row.get(name) for row in rows] for name, theirs in (("paid", "paid"), ("anchor", "anchors"))}
    output |= {"trajectory_ids": ids, "is_last_step": [*(a != b for a, b in pairwise(rollouts)), True]}
    shape = {"layout": layout, "prompts": len(uid), "samples": 1}
    trainer, trained = credited(data, conformance.RECIPES[name], rows, [t.instance_id for t in ids], output, dtype, **shape)
    assert (len(trained["response_ids"]) < len(rows)) == (layout == "merged" and conformance.ROWS[name] == "turns")
    ours = []
    for (n, first), row in zip(trainer.last_rows.place_s, rows, strict=True):
        own_t = trainer.last_advantages[n, -len(trained["response_ids"][n]) :]
        ours.append(own_t[first : first + len(row["ids"])].tolist())
    conformance.assert_rows(ours, [expected[n] for n in order], TOLERANCE[dtype])
    assert dtype == torch.float32 or ours == conformance.by_pipeline(rows, trainer.scheme)  # the pipeline's very numbers


def test_whole_conversations(data, name, dtype):
    """In SkyRL's flat layout all prompts have equally many rollouts, so each prompt is a batch here."""
    every, expected = conformance.expected(name, whole=True)
    for group in dict.fromkeys(row["group"] for row in every):
        pairs = [(row, values) for row, values in zip(every, expected, strict=True) if row["group"] == group]
        rows = [row for row, _ in pairs]
        turns = [row.get("turns", []) for row in rows]
        names = {"paid": "paid", "anchor": "anchors"} if turns[0] else {}
        output = {theirs: [[turn[name] for turn in row] for row in turns] for name, theirs in names.items()}
        shape = {"prompts": 1, "samples": len(rows)}
        trainer, _ = credited(data, conformance.RECIPES[name], rows, ["0"] * len(rows), output, dtype, **shape)
        width = trainer.last_advantages.shape[1]
        ours = [adv[width - len(row["ids"]) :].tolist() for adv, row in zip(trainer.last_advantages, rows, strict=True)]
        conformance.assert_rows(ours, [values for _, values in pairs], TOLERANCE[dtype])
