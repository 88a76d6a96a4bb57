"""The agent task of `make turns` in SkyRL's real trainer on the CPU, with a stub for its workers: outcome beside turns.

    .venv-skyrl/bin/python benchmarks/skyrl_agent.py --seeds 5

The digit chain asked step by step (`examples/chain_agent.py`), played by the same warm-started model. All arms of a seed start from
the same weights and see the same chains; step-wise rows, merged before training. Evaluated on chains that are not trained on.
"""

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines" / "skyrl"))
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import skyrl_small as small  # noqa: E402
import torch  # noqa: E402
from agent_start import agent_start, draw_chains, held_out_chains  # noqa: E402
from loguru import logger  # noqa: E402
from skyrl.train.dataset import PromptDataset  # noqa: E402
from skyrl.train.generators.base import GeneratorInterface  # noqa: E402
from skyrl_turns import interval  # noqa: E402
from stub_dispatch import StubDispatch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from chain_agent import Episode  # noqa: E402
from play_turns import play  # noqa: E402
from spanwise.credit.trajectories.turns import split_turns  # noqa: E402
from spanwise.engines.skyrl.trainer import SpanRayPPOTrainer  # noqa: E402

TURN_TOKENS = 6
FIELDS = ("prompt_token_ids", "response_ids", "loss_masks", "rewards")
HEAD = "layout: {turn: []}\nper: completion\n"
ARMS = {
    "outcome": f"{HEAD}method: rloo\nobjectives: [{{reward: environment, pays: turn, options: {{column: solved}}}}]",
    "turns": f"{HEAD}method: bae\nobjectives: [{{reward: environment, pays: turn, scope: turn, options: {{column: right}}}}]",
}


class ChainGenerator(GeneratorInterface):
    """Plays the chains with the policy and lays every turn out as a row."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    async def generate(self, input_batch: Any) -> Any:
        """One conversation for each row of the batch."""
        episodes = [Episode(extras["chain"]) for extras in input_batch["env_extras"]]
        conversations = play(self.model, self.tokenizer, episodes, max_turn_tokens=TURN_TOKENS)
        output: dict[str, Any] = {
            name: [] for name in (*FIELDS, "trajectory_ids", "is_last_step", "right", "solved", "anchors")
        }
        for trajectory, episode, one in zip(input_batch["trajectory_ids"], episodes, conversations, strict=True):
            places = split_turns(torch.tensor([one.env_mask]).bool()).place_su.tolist()
            for n, place in enumerate(places):
                places_of_turn = [t for t in place if t >= 0]
                turn, last = episode.turns[n], n + 1 == len(places)
                ids = [one.completion_ids[t] for t in places_of_turn]
                row = (
                    [*one.prompt_ids, *one.completion_ids[: places_of_turn[0]]],
                    ids,
                    [1] * len(ids),
                    float(last and turn["solved"]),
                )
                more = trajectory, last, turn["right"], turn["solved"], turn["anchor"]
                for values, value in zip(output.values(), (*row, *more), strict=True):
                    values.append(value)
        return {**output, "stop_reasons": None, "rollout_metrics": {}, "rollout_logprobs": None}


@torch.no_grad()
def solved(model: Any, tokenizer: Any, *, samples: int) -> float:
    """Share of held-out chains that are solved; every evaluation throws the same dice."""
    episodes = [Episode(chain.prompt) for chain in held_out_chains() for _ in range(samples)]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        play(model, tokenizer, episodes, max_turn_tokens=TURN_TOKENS)
    return float(np.mean([episode.solved for episode in episodes]))


def trained(recipe: str, seed: int, given: argparse.Namespace, folder: Path) -> float:
    """Train one arm and evaluate it."""
    start = str(agent_start())
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model = AutoModelForCausalLM.from_pretrained(start)
    held_out = frozenset(chain.prompt for chain in held_out_chains())
    chains = draw_chains(given.prompts * given.steps, rng=np.random.default_rng([seed, 1]), exclude=held_out)
    data = folder / f"chains-{seed}.jsonl"
    rows = [{"prompt": [{"role": "user", "content": c.prompt}], "env_class": "chain", "chain": c.prompt} for c in chains]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = small.config(
        str(data), recipe=recipe, prompts=given.prompts, samples=given.samples, steps=given.steps, lr=given.lr, layout="merged",
        **{"trainer.seed": seed, "trainer.policy.model.path": start, "trainer.micro_train_batch_size_per_gpu": 64},
    )  # fmt: skip
    trainer = SpanRayPPOTrainer(
        cfg=cfg, tracker=small.Tracker(), tokenizer=tokenizer, inference_engine_client=None,
        train_dataset=PromptDataset(str(data), tokenizer, max_prompt_length=64, num_workers=1),
        generator=ChainGenerator(model, tokenizer),
    )  # fmt: skip
    logger.disable("skyrl")
    trainer.dispatch = StubDispatch(model, cfg, dp=2)
    small.run(trainer, seed=seed)
    return solved(model, tokenizer, samples=4)


def main() -> None:
    """Run all arms and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=5, help="seeds 0 to 4 were looked at while the task was made")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    rates: dict[str, list[float]] = {name: [] for name in ARMS}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name, recipe in ARMS.items():
            rates[name].append(trained(recipe, seed, options, folder))
            print(f"seed {seed}  {name:8s} solved {rates[name][-1]:.3f}", flush=True)
    for name, values in rates.items():
        print(f"{name:8s} {np.mean(values):.3f}")
    if options.seeds > 1:
        pairs = np.subtract(rates["turns"], rates["outcome"])
        print(f"turns less outcome, paired: {interval(pairs.tolist())}")


if __name__ == "__main__":
    main()
