"""A small conversation, a policy that learns it on the CPU, and SkyRL's trainer around them.

In every turn the environment shows a sign and the agent answers with one; each sign has one right answer, the same in all
conversations. A row of the dataset names the signs that will be shown, one to four of them.
"""

import asyncio
import json
import random
from functools import cache
from pathlib import Path

import torch
from loguru import logger
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.generators.base import GeneratorInterface, TrajectoryID
from skyrl.train.generators.utils import get_rollout_metrics, prepare_generator_input
from skyrl.train.trainer import RayPPOTrainer
from stub_dispatch import StubDispatch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from spanwise.engines.skyrl.config import SpanwiseTrainConfig
from spanwise.engines.skyrl.trainer import SpanRayPPOTrainer

SIGNS = 6
WORDS = ["<pad>", "<eos>", *(f"q{n}" for n in range(SIGNS)), *(f"a{n}" for n in range(SIGNS))]
FIRST_ASKED, FIRST_SAID = 2, 2 + SIGNS
FIELDS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks")

#: One number for a rollout, at every token of every turn.
BROADCAST = "layout: {turn: []}\nmethod: rloo\nper: completion\nobjectives: [{reward: environment, pays: turn}]\n"
#: Every turn is compared with the turns of its group.
_RIGHT = "objectives: [{reward: environment, pays: turn, scope: turn, options: {column: right}}]\n"
BY_TURN = f"layout: {{turn: []}}\nmethod: bae\n{_RIGHT}"
#: And with the turns that were asked the same.
GIGPO = f"layout: {{turn: []}}\nmethod: gigpo\n{_RIGHT}"


def right(sign):
    """The answer that a sign asks for."""
    return (sign * 5 + 2) % SIGNS


def tokenizer():
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", padding_side="left")
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return wrapped


def policy(seed=0):
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def write_dataset(path, size=24, seed=0, turns=(1, 2, 3, 4)):
    """Conversations of all lengths equally often, and a folder that SkyRL takes for a model."""
    draw = random.Random(seed)
    rows = []
    for n in range(size):
        signs = [draw.randrange(SIGNS) for _ in range(turns[n % len(turns)])]
        prompt = [{"role": "user", "content": f"q{signs[0]}"}]
        rows.append({"prompt": prompt, "env_class": "signs", "turns": signs, "reward_spec": {"ground_truth": "none"}})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy().save_pretrained(model_path(path))
    return str(path)


def model_path(data):
    return str(Path(data).parent / "model")


class SignsGenerator(GeneratorInterface):
    """Plays the conversations with the policy, all at once, and lays them out as the configuration asks.

    The environment's reward is the share of right answers, at the end. Extra fields say which turns were right and which sign
    each turn showed.
    """

    def __init__(self, model, cfg, *, script=None):
        self.model, self.cfg, self.script = model, cfg, script
        self.curve, self.outputs = [], []

    async def generate(self, input_batch):
        plans = [extras["turns"] for extras in input_batch["env_extras"]]
        replies = self.play(plans) if self.script is None else self.script(plans)
        self.curve.append(sum(sum(checked(p, s)) / len(p) for p, s in zip(plans, replies, strict=True)) / len(plans))
        stepwise = self.cfg.generator.step_wise_trajectories
        places = ("trajectory_ids", "is_last_step") if stepwise else ()
        output = {key: [] for key in (*FIELDS, "right", "anchors", "solved", *places)}
        for trajectory, plan, answers in zip(input_batch["trajectory_ids"], plans, replies, strict=True):
            (self.rows if stepwise else self.flat)(output, trajectory, plan, answers)
        self.outputs.append(dict(output))
        metrics = get_rollout_metrics(output["response_ids"], output["rewards"])  # as SkyRL's generators return them
        return {**output, "stop_reasons": None, "rollout_metrics": metrics, "rollout_logprobs": None}

    @torch.no_grad()
    def play(self, plans):
        replies = [[] for _ in plans]
        for turn in range(max(map(len, plans))):
            playing = [n for n, plan in enumerate(plans) if turn < len(plan)]
            contexts = torch.tensor([context(plans[n], replies[n]) for n in playing])
            logits = self.model(input_ids=contexts).logits[:, -1]
            for n, token in zip(playing, torch.multinomial(logits.softmax(dim=-1), 1).squeeze(1).tolist(), strict=True):
                replies[n].append(token)
        return replies

    def rows(self, output, trajectory, plan, answers):
        right = checked(plan, answers)
        for turn, (answer, fits) in enumerate(zip(answers, right, strict=True)):
            last = turn == len(answers) - 1
            facts = fits, plan[turn], float(all(right)) if last else None
            reward = sum(right) / len(right) if last else 0.0
            self.add(output, context(plan, answers[:turn]), [answer], reward, [1], *facts, trajectory, last)

    def flat(self, output, trajectory, plan, answers):
        tokens, right = [*context(plan, answers)[1:], answers[-1]], checked(plan, answers)
        mask = [1 - n % 2 for n in range(len(tokens))]
        facts = right, plan, float(all(right))
        self.add(output, [FIRST_ASKED + plan[0]], tokens, sum(right) / len(right), mask, *facts)

    def add(self, output, *row):
        for key, value in zip(output, row, strict=True):
            output[key].append(value)


def context(plan, answers):
    """The tokens that the model sees before its next answer."""
    tokens = [FIRST_ASKED + plan[0]]
    for answer, sign in zip(answers, plan[1:], strict=False):
        tokens += [answer, FIRST_ASKED + sign]
    return tokens


def checked(plan, answers):
    return [float(answer == FIRST_SAID + right(sign)) for sign, answer in zip(plan, answers, strict=True)]


#: What a generator may leave out.
BARE = dict.fromkeys(("stop_reasons", "rollout_metrics", "rollout_logprobs"))


def output_of(*rows, **more):
    """The output of a generator for rows of prompt, response, reward and mask."""
    output = {name: list(values) for name, values in zip(FIELDS, zip(*rows, strict=True), strict=True)}
    return {**output, **BARE, **more}


def one_talk(*rows, **more):
    """The same, the rows being the turns of one conversation."""
    last = [n == len(rows) - 1 for n in range(len(rows))]
    return output_of(*rows, trajectory_ids=[TrajectoryID("0", 0)] * len(rows), is_last_step=last, **more)


def ragged(seed, *, prompts=4, samples=3, turns=6):
    """Rollouts of one to `turns` turns with contexts and responses of many lengths; some turns end with the environment's words."""
    draw = random.Random(seed)
    output = {key: [] for key in (*FIELDS, "trajectory_ids", "is_last_step")}

    def words(least, most):
        return [draw.randrange(2, len(WORDS)) for _ in range(draw.randint(least, most))]

    for prompt in range(prompts):
        opening = words(2, 6)
        for sample in range(samples):
            history, last = list(opening), draw.randint(1, turns) - 1
            for turn in range(last + 1):
                reply, heard = words(1, 7), words(0, 3)
                mask = [1] * len(reply) + [0] * len(heard)
                reward = float(draw.randrange(3)) if turn == last else 0.0
                row = history, reply + heard, reward, mask, TrajectoryID(str(prompt), sample), turn == last
                for key, value in zip(output, row, strict=True):
                    output[key].append(value)
                history = history + reply + heard + words(0, 2)
    return {**output, **BARE}


class Tracker:
    def __init__(self):
        self.logged = []

    def log(self, data, step, commit=False):
        self.logged.append(dict(data))

    def finish(self):
        pass


def config(data, *, recipe=None, prompts=6, samples=8, steps=25, lr=0.01, layout="flat", **changes):
    """A configuration for one CPU process; `layout` is flat, stepwise or merged. `recipe`: text, and ours; None: SkyRL's own."""
    if recipe is not None:
        path = Path(data).parent / f"{abs(hash(recipe))}.yaml"
        path.write_text(recipe)
        changes = {"trainer.algorithm.spanwise.recipe": str(path), **changes}
    fields = [
        ("data", {"train_data": [data], "dataloader.num_workers": 0}),
        ("trainer", {"train_batch_size": prompts, "policy_mini_batch_size": prompts, "micro_train_batch_size_per_gpu": 4}),
        ("trainer", {"epochs": 1000, "max_training_steps": steps, "eval_interval": -1, "ckpt_interval": -1}),
        ("trainer", {"resume_mode": "none", "logger": "console", "print_example_interval": -1}),
        ("trainer", {"placement.colocate_all": False, "algorithm.use_kl_loss": False}),
        ("trainer.policy", {"model.path": model_path(data), "optimizer_config.lr": lr}),
        ("generator", {"n_samples_per_prompt": samples, "inference_engine.enable_ray_prometheus_stats": False}),
        ("generator", {"step_wise_trajectories": layout != "flat", "merge_stepwise_output": layout == "merged"}),
    ]
    usual = {f"{place}.{name}": value for place, part in fields for name, value in part.items()}
    return (SkyRLTrainConfig if recipe is None else SpanwiseTrainConfig).from_cli_overrides({**usual, **changes})


@cache
def dataset(path):
    return PromptDataset(path, tokenizer(), max_prompt_length=8, num_workers=1)


def trainer(cfg, *, dp=1, seed=0, cls=None, **generator):
    """The trainer with a stub in the place of its workers; nothing else is replaced."""
    model = policy(seed)
    cls = cls or (SpanRayPPOTrainer if isinstance(cfg, SpanwiseTrainConfig) else RayPPOTrainer)
    parts = {"tokenizer": tokenizer(), "train_dataset": dataset(cfg.data.train_data[0]), "inference_engine_client": None}
    built = cls(cfg=cfg, tracker=Tracker(), generator=SignsGenerator(model, cfg, **generator), **parts)
    logger.disable("skyrl")
    built.dispatch = StubDispatch(model, cfg, dp=dp)
    return built


def run(ppo_trainer, seed=0):
    torch.manual_seed(seed)
    asyncio.run(ppo_trainer.train())
    return ppo_trainer


def batch_of(ppo_trainer):
    """One batch as `train` makes it, up to the advantages."""
    prompts = next(iter(ppo_trainer.train_dataloader))
    size = ppo_trainer.cfg.generator.n_samples_per_prompt
    request, uids = prepare_generator_input(prompts, size, {}, "signs", "train", 1)
    output = asyncio.run(ppo_trainer.generate(request))
    return up_to_values(ppo_trainer, output, None if ppo_trainer.cfg.generator.step_wise_trajectories else uids)[0]


def up_to_values(ppo_trainer, output, uids=None):
    """The batch that `train` makes of a generator's output, before its advantages, and the rows it trains on."""
    uids = [trajectory.instance_id for trajectory in output["trajectory_ids"]] if uids is None else uids
    trained, uids = ppo_trainer.postprocess_generator_output(dict(output), uids)
    return ppo_trainer.fwd_logprobs_values_reward(ppo_trainer.convert_to_training_input(trained, uids)), trained
