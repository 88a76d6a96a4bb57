"""A small conversation, a policy that can learn it on the CPU, and SkyRL's trainer around them.

In every turn the environment shows a sign and the agent answers with one; each sign has one right answer, the same in all
conversations. `turns` of a row of the dataset are the signs it will show, one to four of them.
"""

import asyncio
import json
import random
from pathlib import Path

import torch
from loguru import logger
from skyrl.train.dataset import PromptDataset
from skyrl.train.generators.base import GeneratorInterface
from skyrl.train.trainer import RayPPOTrainer
from skyrl.train.config import SkyRLTrainConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIGNS = 6
WORDS = ["<pad>", "<eos>", *(f"q{n}" for n in range(SIGNS)), *(f"a{n}" for n in range(SIGNS))]
FIRST_ASKED, FIRST_SAID = 2, 2 + SIGNS


def right(sign):
    """The answer that a sign asks for."""
    return (sign * 5 + 2) % SIGNS


def tokenizer():
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def policy(seed=0):
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def save_policy(folder):
    """A folder that SkyRL takes for a model; what is trained is made by `policy`."""
    policy().config.save_pretrained(folder / "model")
    return str(folder / "model")


def write_dataset(path, size=24, seed=0, turns=(1, 2, 3, 4)):
    """Conversations of different lengths, all lengths equally often."""
    draw = random.Random(seed)
    rows = []
    for n in range(size):
        signs = [draw.randrange(SIGNS) for _ in range(turns[n % len(turns)])]
        rows.append({"prompt": [{"role": "user", "content": f"q{signs[0]}"}], "env_class": "signs", "turns": signs})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class SignsGenerator(GeneratorInterface):
    """Plays the conversations with the policy, all at once, and lays them out as the configuration asks.

    reward: where a turn's own reward goes beside the outcome (the share of right answers, at the last turn):
        outcome: nowhere; turns: every turn has its own, the last turn as well.
    """

    def __init__(self, model, cfg, *, reward="outcome", token_level=False, tail=0):
        self.model, self.cfg, self.reward, self.token_level, self.tail = model, cfg, reward, token_level, tail
        self.curve = []

    async def generate(self, input_batch):
        plans = [extras["turns"] for extras in input_batch["env_extras"]]
        said = self.play(plans)
        self.curve.append(sum(sum(self.checked(p, s)) / len(p) for p, s in zip(plans, said, strict=True)) / len(plans))
        lay_out = self.rows if self.cfg.generator.step_wise_trajectories else self.flat
        output = {key: [] for key in ("prompt_token_ids", "response_ids", "rewards", "loss_masks")}
        output |= {"stop_reasons": None, "rollout_metrics": {}, "rollout_logprobs": None}
        if self.cfg.generator.step_wise_trajectories:
            output |= {"trajectory_ids": [], "is_last_step": []}
        for n, (plan, answers) in enumerate(zip(plans, said, strict=True)):
            lay_out(output, input_batch["trajectory_ids"][n], plan, answers)
        return output

    @torch.no_grad()
    def play(self, plans):
        said = [[] for _ in plans]
        for turn in range(max(map(len, plans))):
            playing = [n for n, plan in enumerate(plans) if turn < len(plan)]
            contexts = torch.tensor([self.context(plans[n], said[n]) for n in playing])
            logits = self.model(input_ids=contexts).logits[:, -1]
            for n, token in zip(playing, torch.multinomial(logits.softmax(dim=-1), 1).squeeze(1).tolist(), strict=True):
                said[n].append(token)
        return said

    @staticmethod
    def context(plan, answers):
        tokens = [FIRST_ASKED + plan[0]]
        for answer, sign in zip(answers, plan[1:], strict=False):
            tokens += [answer, FIRST_ASKED + sign]
        return tokens

    @staticmethod
    def checked(plan, answers):
        return [float(answer == FIRST_SAID + right(sign)) for sign, answer in zip(plan, answers, strict=True)]

    def turn_rewards(self, plan, answers):
        """A number for every turn; the last one is the outcome unless turns are paid."""
        each = self.checked(plan, answers)
        return each if self.reward == "turns" else [0.0] * (len(each) - 1) + [sum(each) / len(each)]

    def rows(self, output, trajectory, plan, answers):
        rewards = self.turn_rewards(plan, answers)
        for turn, answer in enumerate(answers):
            last = turn == len(answers) - 1
            self.put(output, self.context(plan, answers[:turn]), [answer], [1], rewards[turn])
            output["trajectory_ids"].append(trajectory)
            output["is_last_step"].append(last)

    def flat(self, output, trajectory, plan, answers):
        whole = self.context(plan, answers)[1:] + ([] if len(answers) < len(plan) else [])
        tokens = [*whole, answers[-1]]
        mask = [1 - n % 2 for n in range(len(tokens))]
        rewards = self.turn_rewards(plan, answers)
        if self.token_level:
            values = [0.0] * len(tokens)
            values[::2] = rewards
            self.put(output, self.context(plan, [])[:1], tokens, mask, values)
        else:
            self.put(output, self.context(plan, [])[:1], tokens, mask, rewards[-1])

    def put(self, output, prompt, response, mask, reward):
        if self.token_level and not isinstance(reward, list):
            reward = [0.0] * (len(response) - 1) + [reward]
        for key, value in zip(
            ("prompt_token_ids", "response_ids", "rewards", "loss_masks"), (prompt, response, reward, mask), strict=True
        ):
            output[key].append(value)


class Tracker:
    """Keeps what the trainer logs."""

    def __init__(self):
        self.logged = []

    def log(self, data, step, commit=False):
        self.logged.append(dict(data))

    def finish(self):
        pass


def config(data, *, cls=SkyRLTrainConfig, prompts=6, samples=8, steps=25, lr=0.01, layout="flat", **changes):
    """A configuration for one CPU process; `layout` is flat, stepwise or merged."""
    return cls.from_cli_overrides(
        {
            "data.train_data": [data],
            "data.dataloader.num_workers": 0,
            "trainer.train_batch_size": prompts,
            "trainer.policy_mini_batch_size": prompts,
            "trainer.micro_train_batch_size_per_gpu": 4,
            "trainer.epochs": 1000,
            "trainer.max_training_steps": steps,
            "trainer.eval_interval": -1,
            "trainer.ckpt_interval": -1,
            "trainer.resume_mode": "none",
            "trainer.placement.colocate_all": False,
            "trainer.policy.model.path": save_policy(Path(data).parent),
            "trainer.policy.optimizer_config.lr": lr,
            "trainer.algorithm.use_kl_loss": False,
            "trainer.print_example_interval": -1,
            "generator.n_samples_per_prompt": samples,
            "generator.inference_engine.enable_ray_prometheus_stats": False,
            "generator.step_wise_trajectories": layout != "flat",
            "generator.merge_stepwise_output": layout == "merged",
            **changes,
        }
    )


def trainer(cfg, model, generator, dispatch, *, cls=RayPPOTrainer):
    """The trainer with a stub in the place of its workers; nothing else is replaced."""
    tok = tokenizer()
    dataset = PromptDataset(cfg.data.train_data, tok, max_prompt_length=8, num_workers=1)
    made = cls(cfg=cfg, tracker=Tracker(), tokenizer=tok, train_dataset=dataset, inference_engine_client=None, generator=generator)
    made.dispatch = dispatch
    return made


def run(made, seed=0):
    logger.disable("skyrl")
    torch.manual_seed(seed)
    asyncio.run(made.train())
    return made
