"""The rollouts of conformance.json through TRL's trainer, with any sampler: what reaches the loss, completion by completion."""

import torch

import conformance
import trl_small as small
from spanwise.recipe import scheme_at


def groups(name):
    """TRL's groups have one size, and at least two members: each prompt is a batch of its own."""
    by_group = {}
    for row, values in zip(*conformance.expected(name, whole=True), strict=True):
        by_group.setdefault(row["group"], []).append((row, values))
    return [group for group in by_group.values() if len(group) > 1]


CASES = [(name, group) for name in conformance.RECIPES for group in groups(name)]


def replayed(rows, logps=None):
    """A rollout function that gives back what is in the file; `logps`: what a sampler says of every token."""

    names = {"prompt_ids": "prompt", "completion_ids": "ids", "env_mask": "sampled", "turns": "turns"}
    output = {key: [row[name] for row in rows] for key, name in names.items() if name in rows[0]}
    output["logprobs"] = None if logps is None else [[logps] * len(row["ids"]) for row in rows]
    return lambda batch, trainer: dict(output)


class Watched(small.SpanGRPOTrainer):
    """Keeps what goes into the loss, its advantages before the loss's normaliser is undone."""

    def _generate_and_score_completions(self, inputs):
        self.seen = super()._generate_and_score_completions(inputs)
        return self.seen


def trainer(folder, recipe, rows, *, extra=None, **options):
    """The trainer of one step on replayed rollouts of one group."""
    file = folder / "recipe.yaml"
    file.write_text(conformance.RECIPES[recipe])
    usual = {
        "model": policy(),
        "scheme": scheme_at(file, longest=64),
        "train_dataset": small.Dataset.from_list([{"prompt": rows[0]["question"], "answer": rows[0]["answer"]}]),
        "processing_class": conformance.tokenizer(),
        "rollout_func": replayed(rows),
    }
    sizes = {"num_generations": len(rows), "per_device_train_batch_size": len(rows), "max_completion_length": 64}
    return small.trainer(folder, kind=Watched, extra={**usual, **(extra or {})}, **sizes, **options)


def trained(*arguments, **options):
    run = trainer(*arguments, **options)
    run.train()
    return run


def policy():
    return small.policy(words=len(conformance.PIECES))


def assert_defined(run, group):
    """What reached the loss is what loops over the definitions say."""
    for values_t, (row, expected) in zip(run.seen["advantages"], group, strict=True):
        length = len(row["ids"])
        assert torch.allclose(values_t[:length].double(), torch.tensor(expected).double(), atol=1e-6, rtol=0)
        assert not values_t[length:].any()


def gradient(group, *, unlearned=()):
    """The gradient of minus the mean over rollouts of the sum over tokens of advantage, which the file has, times ratio."""
    model, total = policy(), 0.0
    for n, (row, advantages) in enumerate(group):
        logp_t = small.completion_logps(model, row["prompt"], row["ids"])
        advantages = [0.0] * len(advantages) if n in unlearned else advantages
        total = total + ((logp_t - logp_t.detach()).exp() * torch.tensor(advantages, dtype=logp_t.dtype)).sum()
    return small.gradient_of(model, -total / len(group))
