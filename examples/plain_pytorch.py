"""Train with credit for every block in a plain PyTorch loop, without a trainer.

    python examples/plain_pytorch.py

The embedded model of 0.4 M parameters solves a small sum and says how sure it is. Its warm start takes about two minutes once,
and is kept. For a model of your own, change make_task. A large model also needs a small learning rate such as 1e-6, a GPU,
a pad token, and backward passes over a few completions at a time.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from spanwise import Batch, Objective, Scheme, Vocabulary, advantages, credit_batch, read
from spanwise.pipeline import metrics
from spanwise.tasks import Task, digits_task
from spanwise.tasks.warm_start import shortened


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=16, help="per step")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--learning-rate", type=float, default=4e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warm-up", type=int, help="shorten the warm-up of the embedded model, for a quick look")
    return parser.parse_args()


def make_task(args: argparse.Namespace) -> Task:
    """Return the prompts, the answers, the layout of the blocks, and the model to start from."""
    settings = None if args.warm_up is None else shortened(args.warm_up)
    return digits_task("easy", seed=args.seed, train_size=args.steps * args.prompts, settings=settings)


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: list[Any], *, group: int, longest: int) -> tuple[Tensor, Tensor, int]:
    """Return the token ids of prompts and completions, the mask of sampled tokens, and the width of the prompts."""
    if tokenizer.chat_template:
        prompts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in prompts]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=not tokenizer.chat_template)
    inputs = inputs.to(model.device)
    ids_nl = model.generate(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, num_return_sequences=group, do_sample=True,
        max_new_tokens=longest, pad_token_id=tokenizer.pad_token_id, disable_compile=True,
    )  # fmt: skip
    width = inputs.input_ids.shape[1]
    ends_nt = ids_nl[:, width:] == tokenizer.eos_token_id
    return ids_nl, ends_nt.cumsum(dim=1) - ends_nt.long() == 0, width  # the first end token is sampled too


def log_probs(model: Any, ids_nl: Tensor, attention_nl: Tensor, width: int) -> Tensor:
    """Return the log-probability of every token of the completions."""
    place_nl = (attention_nl.cumsum(dim=1) - 1).clamp(min=0)
    logits_ntv = model(input_ids=ids_nl, attention_mask=attention_nl, position_ids=place_nl).logits[:, width - 1 : -1]
    return logits_ntv.float().log_softmax(dim=-1).gather(2, ids_nl[:, width:, None]).squeeze(2)


def main() -> None:
    """Train, and print ten lines of progress."""
    args = parse_options()
    torch.manual_seed(args.seed)
    task = make_task(args)
    tokenizer = AutoTokenizer.from_pretrained(task.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(task.model)
    # Sample from the model's own probabilities. Other settings come with some models, such as top_p and a second end token.
    plain_sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    model.generation_config.update(**plain_sampling, eos_token_id=tokenizer.eos_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    vocabulary = Vocabulary.from_tokenizer(tokenizer)

    # A right answer pays the solution. The confidence of a right answer is compared with those of other right answers.
    solution, confidence = task.layout.names
    objectives = [
        Objective("correct", pays=[solution], if_missing=0.0),
        Objective("brier", pays=[confidence], given="correct", baseline="outcome", if_missing=-1.0),
    ]
    scheme = Scheme.preset("bae", task.layout, objectives=objectives)

    print(f"{'step':>6} {'right':>8} {'brier':>8} {'malformed':>10}")
    progress: list[tuple[float, ...]] = []
    for step in range(1, args.steps + 1):
        first = (step - 1) * args.prompts
        rows = task.train[[n % len(task.train) for n in range(first, first + args.prompts)]]
        prompt_n = [prompt for prompt in rows["prompt"] for _ in range(args.group)]
        answer_n = [answer for answer in rows["answer"] for _ in range(args.group)]
        longest = task.max_completion_length
        ids_nl, mask_nt, width = sample(model, tokenizer, rows["prompt"], group=args.group, longest=longest)

        # Compute one advantage per token from the token ids.
        group_n = torch.arange(args.prompts).repeat_interleave(args.group)
        columns = {"prompts": prompt_n, "answer": answer_n}
        batch = Batch(group_n, ids_nt=ids_nl[:, width:].cpu(), mask_nt=mask_nt.cpu(), columns=columns)
        reading = read(batch, scheme, vocabulary)
        credit = credit_batch(reading, batch, scheme)
        adv_nt = advantages(credit, reading.spans, scheme).to(model.device)

        # The policy loss is a sum over tokens: the tokens of a block share its credit, whatever its length.
        prompt_nl = ids_nl[:, :width] != tokenizer.pad_token_id
        logp_nt = log_probs(model, ids_nl, torch.cat([prompt_nl, mask_nt], dim=1).long(), width)
        ratio_nt = (logp_nt - logp_nt.detach()).exp()  # 1 with a gradient; clip it if you take several steps on one batch
        loss = -torch.where(mask_nt, ratio_nt * adv_nt.to(logp_nt.dtype), 0.0).sum() / len(mask_nt)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

        right, brier = reading.scores.reward_nm.nanmean(dim=0).tolist()
        progress.append((right, brier, metrics(credit, reading, scheme)["credit/malformed"]))
        if step % max(1, args.steps // 10) == 0:
            last = torch.tensor(progress[-max(1, args.steps // 10) :]).nanmean(dim=0).tolist()
            print(f"{step:>6} {last[0]:>8.3f} {last[1]:>8.3f} {last[2]:>10.3f}", flush=True)


if __name__ == "__main__":
    main()
