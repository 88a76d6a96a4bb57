"""An engine as small as one can be: a trainer's completions -> `Batch`; advantages and metrics -> the trainer."""

import torch

from spanwise import Batch, Steps, advantages, credit_batch, metrics, read

SIDES = ("left", "right", "jagged")


class ToyEngine:
    """Takes rows {"prompt", "ids", "sampled", ...columns} and gives every token of every row its advantage.

    side: how the trainer aligns completions. left: padding behind them, right: padding before them, jagged: lists.
    """

    provides = ("group_n", "ids_nt", "mask_nt", "columns")

    def __init__(self, scheme, vocabulary, *, side="left", needs=()):
        scheme.check((*self.provides, *needs))
        self.scheme, self.vocabulary, self.side = scheme, vocabulary, side

    def step(self, rows, *, steps=None, **per_token):
        batch = self.batch(rows, steps, per_token)
        reading = read(batch, self.scheme, self.vocabulary)
        credit = credit_batch(reading, batch, self.scheme)
        return self.cut(advantages(credit, reading.spans, self.scheme), rows), metrics(credit, reading, self.scheme)

    def batch(self, rows, steps, per_token):
        groups = [row["prompt"] for row in rows]
        names = rows[0].keys() - {"prompt", "ids", "sampled"}
        more = {
            "columns": {name: [row[name] for row in rows] for name in names},
            "steps": None if steps is None else Steps(*steps),
            **{name: self.padded(values) for name, values in per_token.items()},
        }
        if self.side == "jagged":
            return Batch.jagged([r["ids"] for r in rows], groups, sampled=[r["sampled"] for r in rows], **more)
        ids_nt = self.padded([row["ids"] for row in rows], poison=-100)
        return Batch(groups, ids_nt, self.padded([row["sampled"] for row in rows]).bool(), **more)

    def padded(self, lists, poison=0):
        width = max(map(len, lists)) + (2 if self.side != "jagged" else 0)
        if self.side == "right":
            return torch.tensor([[poison] * (width - len(row)) + list(row) for row in lists])
        return torch.tensor([list(row) + [poison] * (width - len(row)) for row in lists])

    def cut(self, adv_nt, rows):
        lengths = [len(row["ids"]) for row in rows]
        if self.side == "right":
            return [row[len(row) - length :].tolist() for row, length in zip(adv_nt, lengths, strict=True)]
        return [row[:length].tolist() for row, length in zip(adv_nt, lengths, strict=True)]
