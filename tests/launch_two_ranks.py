"""Run by torchrun in test_trl_ranks.py: trainings in two processes, which save what each one saw.

What a policy really samples depends on its weights and on a generator of its own for each completion, seeded by step and place in
the whole batch: so one process and two sample the same as long as their weights agree, and drift apart as soon as these do not.

Usage: launch_two_ranks.py FOLDER
"""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset

from critic_small import state
from spanwise import Laser, Layout, Objective
from spanwise.engines.trl import SpanGRPOTrainer
from spanwise.errors import DivergedError
from trl_critic_small import ONE, Watched, critic_lines, fast, with_critic
from trl_small import GROUP, PIECES, SAID, many_a, scripted, step, trainer, weights

HALF, QUARTER = {"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
#: Two groups of one prompt: the samples of each call, for the first rank and the second.
ASKED = Dataset.from_list([{"prompt": "2+2=", "answer": "4"}] * 2)
USELESS = [SAID[0]] * 4
#: Two steps on one batch: in the second, DPPO drops tokens. TRL logs the policy loss only beside an entropy bonus.
DPPO = {"loss_type": "dppo_tv", "epsilon": 0.01, "num_iterations": 2, "max_steps": 2, "learning_rate": 0.05}
DPPO |= {"entropy_coef": 1e-6}
#: With a critic: one group of eight over all ranks, in two steps of gradient accumulation each.
CRITIC = {"num_generations": 8, "optim": "sgd", "learning_rate": 0.1}
CRITICS = {
    "objective": {"critic": fast()},
    "clipped": {"critic": fast(epochs=2, value_clip=0.2, gae_lambda_value=0.9), "objectives": ONE},
    "sae": {"critic": fast(), "method": "sae", "objectives": ONE},
    "whitened": {"critic": fast(), "objectives": ONE, "credit": {"whiten": True}},
    "waiting": {"critic": fast(policy_training_start_step=1)},
}
STEPS = 3
LOGGED = ("credit/", "rewards/", "laser/")
#: Three prompts of four completions on two processes of six: the second group lies on both.
PROMPTS = 3
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
        gradient_accumulation_steps=2, max_steps=STEPS, learning_rate=0.5, shuffle_dataset=True, seed=5, **options,
    )  # fmt: skip
    before = weights(run.model)
    run.train()
    model = run.accelerator.unwrap_model(run.model)
    logged = [{name: value for name, value in line.items() if name.startswith(LOGGED)} for line in run.state.log_history]
    return {"seen": run.seen, "weights": weights(model), "before": before, "gathers": run.gathers, "logged": logged}, run


def launched(folder):
    """Run this script in two real processes, quietly and with one thread each; the folder that they have written to."""
    # accelerate's own launcher starts several CPU processes only through mpirun; torchrun sets the same variables.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(Path(__file__)), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def resampled(folder, second_call, **options):
    """The gradient and the log of a step; at the first call the first rank's group is useless, and the second rank's is useful."""
    calls = [[*USELESS, *SAID[4:]], second_call]
    extra = {"rollout_func": lambda batch, trainer: scripted(calls.pop(0))(batch, trainer), "train_dataset": ASKED}
    run = trainer(folder, dynamic_sampling="credit", extra=extra, **options)
    return {"gradient": step(run), "log": run.state.log_history[0]}


def train_critic(folder, name):
    run = with_critic(f"{folder}/critic/{name}", **QUARTER, **CRITIC, **CRITICS[name])
    watched = Watched(run)
    run.train()
    kept = {"critic": state(run.critic.model), "policy": state(run.accelerator.unwrap_model(run.model))}
    kept |= {"lines": critic_lines(run), "values": [estimate.value_nts for estimate in watched.estimates]}
    kept |= {"advantages_nt": run.last_rollouts.advantages_nt}
    torch.save(kept, f"{folder}/critic {name}.{run.accelerator.process_index}.pt")


def break_on_one_rank(folder):
    """Train with a critic whose copy on rank 1 alone says NaN at the second batch; return the trainer."""
    run = with_critic(f"{folder}/broken", **QUARTER, **CRITIC)
    learn = run.critic.learn

    def learning(*inputs, **options):
        if run.critic.batches == 1 and run.accelerator.process_index == 1:
            list(run.critic.model.parameters())[-1].data[0] = float("nan")
        return learn(*inputs, **options)

    run.critic.learn = learning
    try:
        run.train()
    except DivergedError:
        torch.save(run.state.global_step, f"{folder}/broken.{run.accelerator.process_index}.pt")
    return run


def main():
    folder = sys.argv[1]
    saved = {
        "useful": resampled(f"{folder}/useful", [*SAID[:4], *USELESS], **QUARTER),
        "useless": resampled(f"{folder}/useless", [*USELESS, *SAID[:4]], dynamic_sampling_rounds=1, **HALF),
    }
    dppo = trainer(f"{folder}/dppo", **HALF, **DPPO)
    dppo.train()
    if dppo.accelerator.is_main_process:
        torch.save({**saved, "dppo": dppo.state.log_history}, f"{folder}/sampling.pt")
    trainer(f"{folder}/run", **HALF, max_steps=2, learning_rate=0.01, keep_rollouts=1, report=True).train()
    for name in CASES:
        steps, run = train(f"{folder}/steps", name, rows=GROUP * PROMPTS // 4)
        torch.save(steps, f"{folder}/steps {name}.{run.accelerator.process_index}.pt")
        run.accelerator.wait_for_everyone()
    for name in CRITICS:
        train_critic(folder, name)
    last = break_on_one_rank(folder)
    last.accelerator.wait_for_everyone()
    last.accelerator.end_training()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a process that exits normally


if __name__ == "__main__":
    main()
