"""What credit by turns is worth on the agent task: the same prompts and steps, credited in several ways, several seeds each.

    python benchmarks/turns.py --seeds 5 --steps 40 [--arms outcome,turns] [--output runs/turns]

    outcome      the outcome of the rollout, broadcast to all of its turns (rloo)
    gigpo        the same outcome; besides, turns that start from the same state are compared with each other
    summed       the sum of the turns' rewards, broadcast to all turns (rloo)
    gigpo_turns  the same rewards; besides, what follows a turn is compared among turns from the same state
    turns        every turn its own reward, compared with the turns of the group (bae, scope: turn)

The first two know the outcome only, the last three the rewards of the turns only. Runs that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # its notice about rollout_func

import numpy as np
import torch
from agent_start import agent_start, draw_chains, held_out_chains
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from chain_agent import AGENT_LAYOUT, Chain, Episode, right, solved
from play_turns import play, rollout_function
from spanwise import Batch, Objective, Scheme, Vocabulary, credit_batch, read
from spanwise.commands.shared.progress import quiet
from spanwise.commands.shared.task import load_model
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.measure import compare_arms
from spanwise.step import turn_rows

TURN_TOKENS = 6
OUTCOME, OF_TURNS = Objective(solved, pays="turn", scope="rollout"), Objective(right, pays="turn", scope="turn")
ARMS = {
    "outcome": ("rloo", OUTCOME, {}),
    "gigpo": ("gigpo", OUTCOME, {"over": "trajectories"}),
    "gigpo_turns": ("gigpo", OF_TURNS, {"over": "trajectories"}),
    "summed": ("rloo", OF_TURNS, {}),
    "turns": ("bae", OF_TURNS, {}),
}


def scheme_of(arm: str) -> Scheme:
    """The rule of credit of an arm."""
    method, objective, options = ARMS[arm]
    return Scheme(method, AGENT_LAYOUT, [objective], per="completion", options=options)


def figures(model: Any, tokenizer: Any, chains: list[Chain], *, samples: int) -> dict[str, float]:
    """Shares of episodes solved and of turns that are right; every evaluation throws the same dice."""
    episodes = [Episode(chain.prompt) for chain in chains for _ in range(samples)]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        play(model, tokenizer, episodes, max_turn_tokens=TURN_TOKENS)
    rewards = [reward for episode in episodes for reward in episode.turn_rewards]
    return {"solved": float(np.mean([episode.solved for episode in episodes])), "right": float(np.mean(rewards))}


class Watch(TrainerCallback):
    """Evaluates every so many steps."""

    def __init__(self, chains: list[Chain], tokenizer: Any, every: int) -> None:
        self.chains, self.tokenizer, self.every = chains, tokenizer, every
        self.curve: dict[int, dict[str, float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note the figures; twice the samples at the end."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            samples = 4 if state.global_step == state.max_steps else 1
            self.curve[state.global_step] = figures(more["model"], self.tokenizer, self.chains, samples=samples)


def run(arm: str, seed: int, options: argparse.Namespace, chains: list[Chain]) -> dict[str, Any]:
    """Train one arm with one seed and follow it on `chains`."""
    start = agent_start()
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    held_out = frozenset(chain.prompt for chain in held_out_chains())
    drawn = draw_chains(options.prompts * options.steps, rng=np.random.default_rng([seed, 1]), exclude=held_out)
    watch = Watch(chains, tokenizer, options.every)
    size = options.prompts * options.group_size
    trainer = SpanGRPOTrainer(
        model=str(start),
        args=SpanGRPOConfig(
            "runs/turns-scratch",
            per_device_train_batch_size=size,
            num_generations=options.group_size,
            max_completion_length=64,
            max_steps=options.steps,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=10,
            seed=seed,
            use_cpu=True,
            bf16=False,
            activation_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": [chain.prompt for chain in drawn]}),
        processing_class=tokenizer,
        scheme=scheme_of(arm),
        rollout_func=rollout_function(Episode, max_turn_tokens=TURN_TOKENS),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    watch.curve[0] = figures(trainer.model, tokenizer, chains, samples=1)
    started = time.perf_counter()
    trainer.train()
    return {"arm": arm, "seed": seed, "seconds": time.perf_counter() - started, "curve": watch.curve}


def signal(chains: list[Chain], *, group_size: int) -> None:
    """Before any training: how well the credit of a turn tells a right one from a wrong one."""
    model, tokenizer = load_model(agent_start())
    torch.manual_seed(0)
    episodes = [Episode(chain.prompt) for chain in chains for _ in range(group_size)]
    conversations = play(model, tokenizer, episodes, max_turn_tokens=TURN_TOKENS)
    columns = {"turns": [episode.turns for episode in episodes]}
    ids, flags = [one.completion_ids for one in conversations], [one.env_mask for one in conversations]
    batch = Batch.jagged(ids, torch.arange(len(ids)) // group_size, sampled=flags, columns=columns)
    right_s = torch.tensor([reward for episode in episodes for reward in episode.turn_rewards])
    solved_share = np.mean([episode.solved for episode in episodes])
    print(f"at the start, {len(episodes)} rollouts of {len(right_s)} turns:", end=" ")
    print(f"{float(right_s.mean()):.3f} of the turns are right, {solved_share:.3f} of the rollouts solved")
    print("correlation of a turn's credit with its being right, and the share of wrong turns with positive credit:")
    for arm in ARMS:
        scheme = scheme_of(arm)
        rows, _ = turn_rows(batch, scheme)
        credit_s = credit_batch(read(rows, scheme, Vocabulary.of(tokenizer, model)), rows, scheme).block_nk[:, 0]
        together = float(torch.corrcoef(torch.stack([credit_s, right_s.double()]))[0, 1])
        print(f"  {arm:12} {together:.3f}  {float((credit_s[right_s == 0] > 0).double().mean()):.3f}")


def show(found: list[dict[str, Any]], arms: list[str]) -> None:
    """Curves as means over the seeds, then what the arms differ by."""
    steps = sorted({int(step) for one in found for step in one["curve"]})
    print(f"{'solved at step':16}" + "".join(f"{step:>8}" for step in steps))
    runs: dict[str, dict[int, dict[str, float]]] = {}
    for arm in arms:
        curves = {
            one["seed"]: {int(step): value for step, value in one["curve"].items()} for one in found if one["arm"] == arm
        }
        means = [np.mean([curve[step]["solved"] for curve in curves.values() if step in curve]) for step in steps]
        print(f"{arm:16}" + "".join(f"{mean:8.3f}" for mean in means))
        runs[arm] = {
            seed: {
                "solved": curve[steps[-1]]["solved"],
                "right": curve[steps[-1]]["right"],
                "solved, mean of the curve": float(np.mean([curve[step]["solved"] for step in steps[1:]])),
            }
            for seed, curve in curves.items()
        }
    compared = compare_arms(runs)
    for figure in ("solved", "solved, mean of the curve", "right"):
        print(f"\n{figure}")
        for arm in arms:
            cell = compared.cells[arm, figure]
            print(f"  {arm:10} {cell.value:.3f} [{cell.low:.3f}, {cell.high:.3f}]")
        for one in (one for one in compared.differences if one.figure == figure):
            low, high = one.interval.low, one.interval.high
            print(f"  {one.a} - {one.b}: {one.interval.value:+.3f} [{low:+.3f}, {high:+.3f}], {one.verdict}")


def main() -> None:
    """Run what is missing, then show everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=5, help="seeds 0 to 4 were looked at while the task was made")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--output", default="runs/turns")
    parser.add_argument("--tune", action="store_true", help="look at other chains than the held-out ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    quiet()
    chains = draw_chains(256, rng=np.random.default_rng(777)) if options.tune else held_out_chains()
    signal(draw_chains(64, rng=np.random.default_rng(778)), group_size=options.group_size)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    arms, records = options.arms.split(","), []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for arm in arms:
            file = folder / f"{arm}-{seed}.json"
            if not file.is_file():
                result = run(arm, seed, options, chains)
                file.write_text(json.dumps(result))
                print(f"{arm}, seed {seed}: {result['seconds']:.0f} s", flush=True)
            records.append(json.loads(file.read_text()))
    show(records, arms)


if __name__ == "__main__":
    main()
