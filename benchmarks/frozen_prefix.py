"""Where each baseline drives the confidence of a real policy whose solutions stay as they are.

Full training on the embedded task hides the bias of the outcome baseline: solutions become certain, groups unanimous, and in a
unanimous group every baseline points the same way. Here the solution of every completion is sampled from the frozen warm start, so
that groups stay mixed, and only the confidence block is trained. What a calibrated policy should say is then known.

    python benchmarks/frozen_prefix.py --seeds 5 --steps 60 [--score log_score] [--group-size 16 --prompts 16]
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from spanwise.commands.shared.progress import quiet
from spanwise.commands.shared.task import load_model
from spanwise.credit import advantage
from spanwise.credit.registry import WORST_SCORE
from spanwise.engines.sample import continue_ids, prompt_ids, sample
from spanwise.fidelity import proper_score
from spanwise.fidelity.baselines import ScoreName
from spanwise.measure import auroc, compare_arms, ece
from spanwise.objective import Objective
from spanwise.score import score_all
from spanwise.segment import Vocabulary, find_blocks
from spanwise.tasks import Task, digits_task
from spanwise.tasks.embedded import stated_confidences

ARMS = ("none", "group", "outcome", "blended")


class Frozen:
    """Prefixes (prompt and solution) sampled once from the frozen model, with the verdict on each."""

    def __init__(self, model: Any, tokenizer: Any, task: Task, rows: Dataset, *, samples: int, seed: int) -> None:
        self.task, self.tokenizer = task, tokenizer
        self.vocabulary = Vocabulary.of(tokenizer, model)
        prompts = rows["prompt"][:]
        ids_nt, mask_nt = sample(model, tokenizer, prompts, samples=samples, max_new_tokens=32, seed=seed)
        spans, text = find_blocks(ids_nt, mask_nt, layout=task.layout, vocabulary=self.vocabulary)
        answers = [answer for answer in rows["answer"] for _ in range(samples)]
        self.correct_n = score_all([Objective("correct", pays=("solution",))], text, columns={"answer": answers}).reward_nm[
            :, 0
        ]
        self.correct_n = torch.where(spans.present_nk[:, 0], self.correct_n, 0.0)
        before = [ids for ids in prompt_ids(tokenizer, prompts) for _ in range(samples)]
        ends = spans.end_nk[:, 0].tolist()
        self.solutions = [row[:end] for row, end in zip(ids_nt.tolist(), ends, strict=True)]
        self.prefixes = [b + s for b, s in zip(before, self.solutions, strict=True)]

    def continued(self, model: Any, rows: list[int], *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Fresh confidence blocks after the prefixes `rows`: ids, mask, stated confidences (NaN: none)."""
        prefixes = [self.prefixes[i] for i in rows]
        ids_nt, mask_nt = continue_ids(model, self.tokenizer, prefixes, samples=1, max_new_tokens=24, seed=seed)
        whole = [self.solutions[i] + ids[: int(m)] for i, ids, m in zip(rows, ids_nt.tolist(), mask_nt.sum(1), strict=True)]
        width = max(map(len, whole))
        padded_nt = torch.tensor([ids + [0] * (width - len(ids)) for ids in whole])
        inside_nt = torch.arange(width) < torch.tensor([len(ids) for ids in whole])[:, None]
        _, text = find_blocks(padded_nt, inside_nt, layout=self.task.layout, vocabulary=self.vocabulary)
        return ids_nt, mask_nt, stated_confidences(text, "confidence", self.task.layout)


def log_probabilities(model: Any, prefixes: list[list[int]], ids_nt: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Log p of every continuation token, and the entropy there."""
    width = max(map(len, prefixes))
    left = torch.tensor([[pad] * (width - len(p)) + p for p in prefixes])
    prefix_mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prefixes])
    input_nt = torch.cat([left, ids_nt], dim=1)
    attention_nt = torch.cat([prefix_mask, torch.ones_like(ids_nt)], dim=1)
    position_nt = (attention_nt.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=input_nt, attention_mask=attention_nt, position_ids=position_nt).logits[:, width - 1 : -1]
    logp_ntv = logits.log_softmax(dim=-1)
    chosen_nt = logp_ntv.gather(2, ids_nt[:, :, None])[:, :, 0]
    return chosen_nt, -(logp_ntv.exp() * logp_ntv).sum(dim=-1)


def train(
    arm: Any, start: Any, train_pool: Frozen, *, rule: ScoreName, steps: int, prompts: int, group_size: int, seed: int
) -> Any:
    """Train the confidence block of a fresh copy of the warm start."""
    model, tokenizer = load_model(start)
    learning_rate, entropy = 3e-4, 0.01
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    group_n = torch.arange(prompts).repeat_interleave(group_size)
    size = prompts * group_size
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / 10)
        rows = list(range(step * size, (step + 1) * size))
        ids_nt, mask_nt, q_n = train_pool.continued(model, rows, seed=1000 * seed + step)
        c_n = train_pool.correct_n[rows].double()
        reward_n = proper_score(q_n, c_n, rule=rule)
        by_outcome_n2 = torch.stack([proper_score(q_n, torch.full_like(q_n, o), rule=rule) for o in (0.0, 1.0)], dim=1)
        comparison = advantage(
            reward_n, group_n, baseline=arm, outcome_no=c_n, by_outcome_n2=by_outcome_n2, if_missing=WORST_SCORE[rule]
        )
        adv_n = comparison.advantage_n + comparison.missing_n  # a block without a confidence pays with its own tokens
        logp_nt, entropy_nt = log_probabilities(
            model, [train_pool.prefixes[i] for i in rows], ids_nt, tokenizer.pad_token_id
        )
        adv_nt = adv_n.float()[:, None].expand_as(logp_nt)
        ratio_nt = (logp_nt - logp_nt.detach()).exp()
        loss_nt = torch.where(mask_nt, -adv_nt * ratio_nt - entropy * entropy_nt, 0.0)
        length_n = mask_nt.sum(dim=1)
        loss = (loss_nt.sum(dim=1) / length_n.clamp(min=1)).sum() / (length_n > 0).sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def figures(model: Any, pool: Frozen, *, seed: int) -> dict[str, float]:
    """Held-out calibration over the frozen solutions."""
    _, _, q_n = pool.continued(model, list(range(len(pool.prefixes))), seed=seed)
    stated_n = ~q_n.isnan()
    q_n, c_n = q_n[stated_n], pool.correct_n[stated_n].double()
    over = float((q_n - c_n).mean())
    return {
        "mean confidence": float(q_n.mean()), "over-confidence": over, "ece": ece(q_n, c_n), "auroc": auroc(q_n, c_n),
        "brier": float((q_n - c_n).square().mean()), "states one": float(stated_n.double().mean()),
    }  # fmt: skip


def main() -> None:
    """Print a line per run, then the comparison."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--group-size", type=int, default=4)
    options.add_argument("--score", choices=("brier", "log_score"), default="brier")
    options.add_argument("--arms", default=",".join(ARMS))
    chosen = options.parse_args()
    quiet()
    torch.set_num_threads(1)
    runs = {arm: {} for arm in chosen.arms.split(",")}
    for seed in range(chosen.seeds):
        task = digits_task("easy", seed=seed, train_size=chosen.steps * chosen.prompts)
        model, tokenizer = load_model(task.model)
        pool = Frozen(model, tokenizer, task, task.train, samples=chosen.group_size, seed=seed)
        held_out = Frozen(model, tokenizer, task, task.evaluation, samples=8, seed=1)
        if seed == 0:
            right_pg = pool.correct_n.reshape(-1, chosen.group_size).mean(dim=1)
            mixed = float(((right_pg > 0) & (right_pg < 1)).double().mean())
            print(
                f"{float(held_out.correct_n.mean()):.3f} of the frozen solutions are right, {mixed:.0%} of the groups mixed"
            )
            print("before:", {name: round(value, 3) for name, value in figures(model, held_out, seed=1).items()})
        for arm in runs:
            started = time.perf_counter()
            trained = train(
                arm, task.model, pool, rule=chosen.score, steps=chosen.steps, prompts=chosen.prompts,
                group_size=chosen.group_size, seed=seed,
            )  # fmt: skip
            runs[arm][seed] = figures(trained, held_out, seed=1)
            shown = "  ".join(f"{name} {value:.3f}" for name, value in runs[arm][seed].items() if not math.isnan(value))
            print(f"seed {seed}  {arm:8}  {shown}  ({time.perf_counter() - started:.0f} s)", flush=True)
    comparison = compare_arms(runs, reference="blended" if "blended" in runs else None)
    print(comparison.markdown(), *comparison.sentences(), sep="\n")


if __name__ == "__main__":
    main()
