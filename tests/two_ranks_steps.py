"""Three steps of a policy that really samples, in two processes, which `launch_two_ranks.py` starts; each saves what it saw.

What is sampled depends on the weights and on a generator of its own for each completion, seeded by step and place in the whole
batch: so one process and two sample the same as long as their weights agree, and drift apart as soon as these do not.
"""

from dataclasses import replace
from functools import partial

import torch
from datasets import Dataset

from spanwise import Laser, Layout, Objective
from spanwise.engines.trl import SpanGRPOTrainer
from trl_small import PIECES, many_a, trainer, weights

STEPS = 3
LOGGED = ("credit/", "rewards/", "laser/")
#: Three prompts of four completions on two processes of six: the second group lies on both.
GROUP, PROMPTS = 4, 3
SUMS = [(a, b) for a in range(1, 4) for b in range(1, 4)]
#: A score's reference, its weights of right and wrong and the groups it is mixed in are those of all ranks.
SCORE = Laser("?", beta=1.0, mix=0.25, self_rewarding_warmup=0, threshold=0.0, scale="none")
PLAIN = {"method": "reinforce++", "layout": Layout({"completion": []}), "objectives": [Objective(many_a, pays="completion")]}


def many_a_of_turn(blocks):
    return many_a([texts["turn"][""] for texts in blocks])


#: A run of the mask is a turn: a process can have another number of them than the other.
TURNS = {"layout": Layout({"turn": ["answer"]}), "objectives": [Objective(many_a_of_turn, pays="turn", scope="turn")]}
CASES = {
    "dr_grpo": {"loss_type": "dr_grpo"},
    "dapo with tools": {"loss_type": "dapo", "tools": True, "extra": {"credit": {"per": "batch"}}},
    "clipped": {"loss_type": "grpo", "max_grad_norm": 0.05},
    "bnpo": {"loss_type": "bnpo"},
    "reinforce++": {"tools": True, "extra": {**PLAIN, "credit": {"per": "completion"}}},
    "laser": {"extra": {"credit": {"laser": SCORE}}},
    "turns": {"tools": True, "extra": {**TURNS, "credit": {"per": "completion"}}},
}


class Counted(SpanGRPOTrainer):
    """Records the tokens and advantages of each step, and how often it gathers from the other processes."""

    gathers = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.step.ranks is not None:
            self.step.ranks = replace(self.step.ranks, gather=partial(self._gathered, self.step.ranks.gather))

    def _gathered(self, gather, local):
        self.gathers += 1
        return gather(local)

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        rows = zip(output["completion_ids"], output["completion_mask"].bool(), output["advantages"], strict=True)
        self.seen = getattr(self, "seen", [])
        self.seen += [(ids[mask].tolist(), [f"{a:.9g}" for a in adv[mask].tolist()]) for ids, mask, adv in rows]
        return output


def sampled(model, prompt, generator, *, tools):
    """Thoughts, a tool's digits in between, an answer and nearly always a confidence: what is free is drawn from the policy."""
    pieces, flags = [], []

    def put(*written, flag=1):
        pieces.extend(written)
        flags.extend([flag] * len(written))

    def draw(choices):
        ids = [*prompt, *map(PIECES.index, pieces)]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        chances = logits[[PIECES.index(piece) for piece in choices]].softmax(dim=0)
        put(choices[int(torch.multinomial(chances, 1, generator=generator))])
        return pieces[-1]

    while draw(["a", "b", "<answer>"]) != "<answer>" and len(flags) < 6:
        if tools and len(flags) == 2:
            put("7", flag=0)
    if pieces[-1] != "<answer>":
        put("<answer>")
    draw("23456")
    put("</answer>")
    if draw(["<confidence>", "<eos>"]) == "<confidence>":
        put("0", ".")
        draw("1379")
        put("</confidence>", "<eos>")
    return [*map(PIECES.index, pieces)], flags


def rollout(batch, trainer, *, tools=False):
    first, step = trainer.accelerator.process_index * len(batch), trainer.state.global_step
    encoder, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    prompts = [encoder.encode(prompt, add_special_tokens=False) for prompt in batch]
    generators = (torch.Generator().manual_seed(1000 * step + first + n) for n in range(len(prompts)))
    completions = [sampled(model, *pair, tools=tools) for pair in zip(prompts, generators, strict=True)]
    output = {"prompt_ids": prompts, "completion_ids": [ids for ids, _ in completions], "logprobs": None}
    return {**output, "env_mask": [flags for _, flags in completions]} if tools else output


def train(folder, name, *, rows):
    """Three steps; what was sampled, credited and logged in this process, the weights after them, and the gathers of all steps."""
    options = dict(CASES[name])
    tools, extra = options.pop("tools", False), dict(options.pop("extra", {}))
    dataset = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS])
    extra |= {"train_dataset": dataset, "rollout_func": lambda batch, trainer: rollout(batch, trainer, tools=tools)}
    run = trainer(
        f"{folder}/{name}", kind=Counted, extra=extra, per_device_train_batch_size=rows,
        gradient_accumulation_steps=2, num_generations=GROUP, max_steps=STEPS, learning_rate=0.5,
        shuffle_dataset=True, seed=5, **options,
    )  # fmt: skip
    before = weights(run.model)
    run.train()
    model = run.accelerator.unwrap_model(run.model)
    logged = [{name: value for name, value in line.items() if name.startswith(LOGGED)} for line in run.state.log_history]
    return {"seen": run.seen, "weights": weights(model), "before": before, "gathers": run.gathers, "logged": logged}, run


def train_all(folder):
    for name in CASES:
        steps, run = train(f"{folder}/steps", name, rows=GROUP * PROMPTS // 4)
        torch.save(steps, f"{folder}/steps {name}.{run.accelerator.process_index}.pt")
        run.accelerator.wait_for_everyone()
