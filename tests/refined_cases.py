"""KTAE and OAR beside GRPO, by loops over completions: what every engine is held against."""

import torch

from oracles import slow_ktae, slow_oar, z_scores

RECIPE = """
layout: {{all: [answer]}}
method: {method}
objectives: [{{reward: correct, pays: [all]}}]
per: completion
{more}
"""
TEXTS = [
    ["So <answer>4</answer>", "Hm, two <answer>5</answer>", "So so <answer>4</answer>", "<answer>7</answer>"],
    ["Hm <answer>4</answer>", "Two and two <answer>5</answer>", "So <answer>8</answer>"],
]


def rows_of(tokenizer, texts):
    """Token ids, whether right, and the prompt of each completion."""
    return [(tokenizer(text)["input_ids"], float("4<" in text), g) for g, group in enumerate(texts) for text in group]


def refined(rows, name, logps):
    """Per completion the advantage of each token over the number of tokens."""
    width = max(len(ids) for ids, _, _ in rows)
    group_n = torch.tensor([g for _, _, g in rows])
    mask_nt = torch.tensor([[t < len(ids) for t in range(width)] for ids, _, _ in rows])
    ids_nt = torch.tensor([ids + [0] * (width - len(ids)) for ids, _, _ in rows])
    right_n = torch.tensor([right for _, right, _ in rows]).double()
    adv_n = [a for g in group_n.unique() for a in z_scores(right_n[group_n == g].tolist(), 1, 1e-6)]
    adv_nt = torch.tensor(adv_n).double()[:, None].expand(-1, width) * mask_nt
    if name == "ktae":
        new_nt = slow_ktae(adv_nt, ids_nt, mask_nt, right_n, group_n, "paper", 1.0, 1.0, 1.0)
    else:
        surprise_nt = torch.nn.utils.rnn.pad_sequence([-logp.double() for logp in logps], batch_first=True)
        new_nt = slow_oar(adv_nt, surprise_nt, mask_nt, 0.25, 1.0, 0.1, False)
    return [row[: len(ids)] / len(ids) for row, (ids, _, _) in zip(new_nt, rows, strict=True)]
