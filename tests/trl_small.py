"""A real policy, tokenizer and dataset small enough for gradients in float64, and the loss written out by hand.

Completions are scripted (TRL's `rollout_func`), so every token's block is known here without asking the code under test.
"""

import functools
import math
import os
import warnings
from dataclasses import dataclass, replace

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import accelerate.utils.imports
import pytest
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence

with warnings.catch_warnings(action="ignore"):
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
    from trl import GRPOConfig

import conformance
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.layout import Layout
from spanwise.objective import Objective
from spanwise.scheme import Scheme
from tokenizers_small import tag_level

#: accelerate asks at every step whether peft is installed, and reads its metadata each time.
accelerate.utils.imports._is_package_available = functools.cache(accelerate.utils.imports._is_package_available)

#: Third-party notices that say nothing about spanwise.
THIRD_PARTY = [pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing.*` is deprecated:FutureWarning")]
#: TRL keeps advantages in float32.
EXACT = 2e-6

LAYOUT = Layout({"solution": ["answer"], "confidence": ["confidence"]})
OBJECTIVES = (
    Objective("correct", pays=("solution",), options={"verify": "exact"}),
    Objective("brier", pays=("confidence",), given="correct", baseline="outcome", if_missing=-1.0),
)
PIECES = ["<pad>", "<eos>", "<answer>", "</answer>", "<confidence>", "</confidence>", "<tool>", *"0123456789.+=?ab"]
ROWS = [{"prompt": "2+2=", "answer": "4"}, {"prompt": "1+2=", "answer": "3"}]
GROUP = 4

# What the policy "said": pieces with the block each belongs to (-1: written by a tool), and the facts a reader sees:
# whether the answer is right and the confidence (None: the block is missing). Two prompts, 2+2= and 1+2=, four each.


@dataclass
class Said:
    pieces: list[str]
    blocks: list[int]
    right: float
    confidence: float | None


def say(thought, answer, confidence, right, tool=""):
    """<answer> after a thought, a tool's output in between, and a confidence."""
    return Said(*conformance.completion(thought, answer, confidence, tool=tool), right, confidence)


#: Thought, answer, confidence, whether it is right, and what a tool writes in between if there is one.
SCRIPT = [
    ("ab", "4", 0.9, 1.0, "77"), ("", "4", 0.6, 1.0, ""), ("aabb", "3", 0.8, 0.0, "4"), ("b", "5", 0.1, 0.0, ""),
    ("a", "3", 0.75, 1.0, "bbb"), ("bb", "3", None, 1.0, "9"), ("", "3", 0.5, 1.0, ""), ("abab", "7", 0.3, 0.0, "01"),
]  # fmt: skip
SAID = [say(*row[:4]) for row in SCRIPT]
SAID_WITH_TOOLS = [say(*row) for row in SCRIPT]


def cut(script):
    return replace(script, pieces=script.pieces[:-1], blocks=script.blocks[:-1])


def tokenizer(pieces=None):
    return tag_level(pieces or PIECES)  # tests replace PIECES


def policy(seed=0, dtype=torch.float64, words=None):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=words or len(PIECES), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, initializer_range=0.2, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, attn_implementation="sdpa", dtype=dtype,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def prompts(count=2):
    return Dataset.from_list([ROWS[i % 2] for i in range(count)])


def scripted(scripts=SAID, *, tools=False):
    """A rollout function that answers the i-th prompt of the whole batch, over all ranks, with the i-th script."""

    def rollout(batch, trainer):
        first = trainer.accelerator.process_index * len(batch)
        mine = [scripts[(first + i) % len(scripts)] for i in range(len(batch))]
        encoder = trainer.processing_class
        prompt_ids = [encoder.encode(prompt, add_special_tokens=False) for prompt in batch]
        completion_ids = [encoder.convert_tokens_to_ids(script.pieces) for script in mine]
        masks = {"env_mask": [[int(block >= 0) for block in script.blocks] for script in mine]} if tools else {}
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None, **masks}

    return rollout


def config(folder, **options):
    """One plain gradient step, so that the weights before minus the weights after are the gradient."""
    usual = {
        "per_device_train_batch_size": 8, "num_generations": GROUP, "max_completion_length": 16, "max_steps": 1,
        "learning_rate": 1.0, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "shuffle_dataset": False,
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "save_strategy": "no", "logging_steps": 1,
        "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return SpanGRPOConfig(str(folder), **{**usual, **options})


def plain(args):
    """TRL's own config with the fields that it shares with ours."""
    fields = {name: getattr(args, name) for name, field in GRPOConfig.__dataclass_fields__.items() if field.init}
    return GRPOConfig(**{**fields, "generation_batch_size": None})


def scheme(method="bae", layout=LAYOUT, objectives=OBJECTIVES, credit=None):
    """The rule of credit; `credit` are options of the method and `per`."""
    return Scheme.preset(method, layout, objectives=objectives, **(credit or {}))


def trainer(folder, *, scripts=SAID, tools=False, kind=SpanGRPOTrainer, extra=None, **options):
    """The real trainer on scripted completions; `extra` replaces its arguments (and parts of its scheme), `options` its config."""
    arguments = dict(extra or {})
    parts = {name: arguments.pop(name) for name in ("method", "layout", "objectives", "credit") if name in arguments}
    usual = {
        "model": None if "model" in arguments else policy(),
        "scheme": None if "scheme" in arguments else scheme(**parts),
        "args": config(folder, **options),
        "train_dataset": prompts(),
        "processing_class": tokenizer(),
        "rollout_func": scripted(scripts, tools=tools),
    }
    return kind(**{**usual, **arguments})


def many_a(completions, **columns):
    """A reward that an untrained policy earns."""
    return [float(text.count("a") - text.count("b")) for text in completions]


def sampling(**extra):
    """Arguments of a trainer that samples by itself; the whole completion is one block."""
    torch.manual_seed(0)
    rule = {"layout": Layout({"completion": []}), "objectives": [Objective(many_a, pays="completion")]}
    return {"model": policy(), "rollout_func": None, "train_dataset": prompts(6), **rule, **extra}


def beside_a_reference(folder, dtype=torch.float64):
    """A policy whose reference, which TRL loads by the name in its config, is `policy(seed=1)`."""
    policy(seed=1, dtype=dtype).save_pretrained(folder / "reference")
    model = policy(dtype=dtype)
    model.config._name_or_path = str(folder / "reference")
    return model


class EveryStep(TrainerCallback):
    def __init__(self):
        self.weights = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.weights.append(weights(model))


def second_step(folder, rate, *, extra=None, scripts=SAID, dtype=torch.float64, **options):
    """Two steps on one batch: the trainer, the gradient of the second, the policy before it, the log-probabilities that sampled."""
    seen = EveryStep()
    options = {"num_iterations": 2, "max_steps": 2, "learning_rate": rate, **options}
    run = trainer(folder, scripts=scripts, extra={"callbacks": [seen], **(extra or {})}, **options)
    run.train()
    first, second = seen.weights
    before, moved = policy(dtype=dtype), policy(dtype=dtype)
    moved.load_state_dict(first, strict=False)
    old = [row.detach() for row in log_probs(before, scripts)]
    return run, {name: (first[name] - second[name]) / rate for name in first}, moved, old


def step(run, learning_rate=1.0):
    """Train, and return (weights before - weights after) / learning rate: the gradient of the one plain step."""
    before = weights(run.model)
    run.train()
    return {name: (before[name] - value) / learning_rate for name, value in weights(run.model).items()}


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}


def token_advantages(scripts):
    """Per completion and token: the credit of its block over the block's tokens, and that of stopping on the last one."""
    return conformance.blocks_advantages([{**vars(script), "group": i // GROUP} for i, script in enumerate(scripts)])


def credit(scripts):
    """Per completion: the credit of the solution, of the confidence, and of stopping. Loops over the definitions."""
    return conformance.blocks_credit([{**vars(script), "group": i // GROUP} for i, script in enumerate(scripts)])


def log_probs(model, scripts):
    """(log-probabilities of the completion's tokens) for each completion; no token sees the padding behind the end of its row."""
    rows = [(*question, *script.pieces) for question, script in zip(questions(scripts), scripts, strict=True)]
    ids_nt = pad_sequence([torch.tensor([*map(PIECES.index, row)]) for row in rows], batch_first=True)
    logp_nt = model(ids_nt).logits[:, :-1].log_softmax(dim=-1).gather(2, ids_nt[:, 1:, None])[:, :, 0]
    ends = [(len(row) - 1, len(script.pieces)) for row, script in zip(rows, scripts, strict=True)]
    return [logp_t[end - length : end] for logp_t, (end, length) in zip(logp_nt, ends, strict=True)]


def completion_logps(model, prompt_ids, ids):
    logits = model(torch.tensor([[*prompt_ids, *ids]])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def surrogate(ratio, advantage, log_prob, loss_type, clip=0.2):
    """What is maximised at one token, by the papers' definitions (SAPO temperatures 1.0 and 1.05)."""
    if loss_type in ("dppo_tv", "dppo_kl"):
        now, before = float(log_prob.detach().exp()), float((log_prob - ratio.log()).detach().exp())
        if loss_type == "dppo_tv":
            kept = (now - before <= clip) if advantage > 0 else (before - now <= clip)
        else:
            others = (1 - before) * math.log((1 - before + 1e-8) / (1 - now + 1e-8))
            kept = before * math.log(before / now) + others <= clip or (now <= before if advantage > 0 else now >= before)
        return ratio.detach().clamp(max=20.0) * advantage * log_prob * kept
    if loss_type == "cispo":
        return ratio.detach().clamp(max=clip) * advantage * log_prob
    if loss_type == "sapo":
        temperature = 1.0 if advantage > 0 else 1.05
        return torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage
    beyond = ratio > 1 + clip if advantage > 0 else ratio < 1 - clip
    return (ratio.detach().clamp(1 - clip, 1 + clip) if beyond else ratio) * advantage


def questions(scripts):
    return [ROWS[i // GROUP]["prompt"] for i in range(len(scripts))]


def paper_loss(model, scripts, *, loss_type="dr_grpo", old=None, clip=0.2, unlearned=(), level="token"):
    """-(1/N) sum_i sum_k (1/|T_k|) sum_{t in T_k} surrogate(rho_t, A_k), plus the decision to stop as a block of one token.

    `unlearned` completions count in every baseline and none of their tokens is trained. `level`: the tokens with one ratio.
    """
    total = 0.0
    rows, advantages = log_probs(model, scripts), token_advantages(scripts)
    for i, (script, row) in enumerate(zip(scripts, rows, strict=True)):
        trainable = [t for t, block in enumerate(script.blocks) if block >= 0 and i not in unlearned]
        log_ratio = (row - (row if old is None else old[i])).detach()
        for t in trainable:
            advantage, ratio = advantages[i][t], (row[t] - row[t].detach() + log_ratio[t]).exp()
            if level != "token":
                alike = [s for s in trainable if level == "sequence" or script.blocks[s] == script.blocks[t]]
                ratio = (row[t] - row[t].detach() + log_ratio[alike].mean()).exp()
            if loss_type == "vespo":
                w = math.exp(log_ratio[trainable].sum())
                k, lam = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
                total = total + w**k * math.exp(lam - lam * w) * advantage * row[t]
            else:
                total = total + surrogate(ratio, advantage, row[t], loss_type, clip)
    return -total / len(scripts)


def gradient_of(model, loss):
    model.zero_grad()
    loss.backward()
    gradients = {name: value.grad.detach().clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    return gradients


def paper_gradient(model, scripts=SAID, **options):
    return gradient_of(model, paper_loss(model, scripts, **options))


def kl_gradient(model, scripts=SAID, *, beta, reference=None, old=None, corrected=True, cut=math.inf):
    """The gradient of beta times the mean over completions of their mean r - log r - 1 over trained tokens, r = reference / policy.

    `corrected`: each token times policy / old policy, which on-policy is 1 and has a gradient. `cut`: a token's largest divergence.
    """
    total = 0.0
    reference = policy(seed=1, dtype=model.dtype) if reference is None else reference
    rows = zip(scripts, log_probs(model, scripts), log_probs(reference, scripts), strict=True)
    for i, (script, row, other) in enumerate(rows):
        before = row.detach() if old is None else old[i]
        trained = [t for t, block in enumerate(script.blocks) if block >= 0]
        for t in trained:
            r = (other[t].detach() - row[t]).exp()
            ratio = (row[t] - before[t]).exp() if corrected else 1.0
            total = total + (ratio * (r - r.log() - 1)).clamp(max=cut) / len(trained) / len(scripts)
    return gradient_of(model, beta * total)


def added(left, right):
    return {name: value + right[name] for name, value in left.items()}


def largest_difference(left, right):
    """The largest difference of any entry, relative to the largest entry of `right`."""
    scale = max(float(value.abs().max()) for value in right.values())
    return max(float((left[name] - right[name]).abs().max()) for name in right) / scale
