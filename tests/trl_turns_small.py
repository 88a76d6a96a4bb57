"""Scripted conversations for the real trainer of `trl_small`, and the objectives of turns written out by hand."""

from dataclasses import dataclass

import torch

import trl_small as small
from spanwise import Layout, Objective

TURN_LAYOUT = Layout({"turn": ["answer"]})
BLOCKS_LAYOUT = Layout({"answer": ["answer"], "confidence": ["confidence"]})


@dataclass
class Turn:
    digit: str
    right: float
    anchor: str | None = None
    confidence: float | None = None

    @property
    def pieces(self):
        report = [] if self.confidence is None else ["<confidence>", *str(self.confidence), "</confidence>"]
        return ["<answer>", self.digit, "</answer>", *report]

    @property
    def blocks(self):
        return [0] * 3 + [1] * (len(self.pieces) - 3)


@dataclass
class Talk:
    """Turns, what the environment says after each but the last, and the outcome."""

    turns: list[Turn]
    tools: list[str]
    solved: float
    end: tuple[str, ...] = ("<eos>",)

    @property
    def said(self):
        """As one completion: the environment's tokens are of no block."""
        pieces, blocks = [], []
        for turn, tool in zip(self.turns, [*self.tools, None], strict=True):
            pieces += turn.pieces
            blocks += turn.blocks
            pieces += self.end if tool is None else ["<tool>", *tool]
            blocks += [blocks[-1]] * len(self.end) if tool is None else [-1] * (1 + len(tool))
        return small.Said(pieces, blocks, self.solved, None)

    @property
    def turn_of_token(self):
        """The turn of each token, -1 where the environment speaks."""
        found, turn = [], 0
        for turn, (one, tool) in enumerate(zip(self.turns, [*self.tools, None], strict=True)):
            found += [turn] * len(one.pieces)
            found += [turn] * len(self.end) if tool is None else [-1] * (1 + len(tool))
        return found

    @property
    def told(self):
        """What the environment says of the turns; the digit of a turn is the answer if it is right."""
        return [
            {"anchor": t.anchor, "right": t.right, "solved": self.solved, "answer": t.digit if t.right else "none"}
            for t in self.turns
        ]


def talk(solved, *turns, confidences=None):
    """Turns written "digit right anchor"; the environment says the anchor of the next one."""
    made = []
    for k, text in enumerate(turns):
        digit, right, anchor = text.split()
        made.append(Turn(digit, float(right), anchor, None if confidences is None else confidences[k]))
    return Talk(made, [turn.anchor for turn in made[1:]], solved)


#: Two prompts, four rollouts each, of one to three turns.
TALKS = [
    talk(1.0, "4 1 0", "7 1 14", "2 0 27"),
    talk(0.0, "4 1 0", "5 0 14"),
    talk(0.0, "3 0 0"),
    talk(1.0, "4 1 0", "7 1 14", "3 1 27"),
    talk(0.0, "6 0 5", "8 1 16"),
    talk(1.0, "2 1 5", "8 1 12"),
    talk(1.0, "2 1 5", "8 1 12", "1 1 28"),
    talk(0.0, "6 0 5", "1 0 16"),
]
#: The same shape with a guess and a confidence in every turn.
GUESSES = [
    talk(1.0, "4 1 0", "7 1 14", confidences=[0.9, 0.8]),
    talk(0.0, "4 1 0", "5 0 14", confidences=[0.6, 0.7]),
    talk(0.0, "3 0 0", confidences=[0.5]),
    talk(1.0, "4 1 0", "7 0 14", confidences=[1.0, 0.1]),
    talk(0.0, "6 0 5", "8 1 16", confidences=[0.2, 0.9]),
    talk(1.0, "2 1 5", "8 1 12", confidences=[0.3, 0.3]),
    talk(1.0, "2 1 5", confidences=[0.8]),
    talk(0.0, "6 0 5", "1 0 16", confidences=[0.4, 0.0]),
]


def right(right):
    return list(right)


def solved(solved):
    return list(solved)


OUTCOME = [Objective(solved, pays="turn", scope="rollout")]
OF_TURNS = [Objective(right, pays="turn", scope="turn")]
BY_BLOCK = [
    Objective("correct", pays="answer", scope="turn", baseline="group", options={"verify": "exact"}),
    Objective("brier", pays="confidence", scope="turn", given="correct", baseline="group"),
]
WHOLE = {"layout": TURN_LAYOUT, "credit": {"per": "completion"}}
SCHEMES = {
    "outcome": {"method": "rloo", "objectives": OUTCOME, **WHOLE},
    "summed": {"method": "rloo", "objectives": OF_TURNS, **WHOLE},
    "turns": {"method": "bae", "objectives": OF_TURNS, **WHOLE},
    "gigpo": {"method": "gigpo", "objectives": OUTCOME, **WHOLE},
    "blocks": {"method": "bae", "layout": BLOCKS_LAYOUT, "objectives": BY_BLOCK, "credit": {"per": "block"}},
}


def talks_of(name):
    return GUESSES if name == "blocks" else TALKS


def scripted(talks, *, told=None):
    """A rollout function that plays the i-th script, over all ranks; `told` replaces what it says of the turns."""
    plain = small.scripted([one.said for one in talks], tools=True)

    def rollout(batch, trainer):
        first = trainer.accelerator.process_index * len(batch)
        output = plain(batch, trainer)
        said = [one.told for one in talks] if told is None else told
        if told != "nothing":
            output["turns"] = [said[(first + i) % len(talks)] for i in range(len(batch))]
        return output

    return rollout


def trainer(folder, name, *, talks=None, told=None, **options):
    talks = talks_of(name) if talks is None else talks
    extra = {**SCHEMES[name], "rollout_func": scripted(talks, told=told)}
    return small.trainer(folder, extra=extra, max_completion_length=32, **options)


# --------------------------------------------------------------------------- the objectives, written out


def others(values, i):
    """The mean of the others."""
    return small.mean([value for j, value in enumerate(values) if j != i])


def gigpo(group, gamma=0.95):
    """By the paper's definitions, for the rollouts of one prompt: credit of each turn of each of them."""
    outcomes = [one.solved for one in group for _ in one.turns]  # the released code counts step rows
    returns = [[gamma ** (len(one.turns) - 1 - k) * one.solved for k in range(len(one.turns))] for one in group]
    states = {}
    for one, row in zip(group, returns, strict=True):
        for turn, value in zip(one.turns, row, strict=True):
            states.setdefault(turn.anchor, []).append(value)
    credit = []
    for one, row in zip(group, returns, strict=True):
        episode = one.solved - small.mean(outcomes)
        pairs = zip(one.turns, row, strict=True)
        credit.append([episode + value - small.mean(states[turn.anchor]) for turn, value in pairs])
    return credit


def credit_of(name, group):
    """For the rollouts of one prompt: rollout -> turn -> block -> credit."""
    if name in ("outcome", "summed"):
        values = [one.solved if name == "outcome" else sum(turn.right for turn in one.turns) for one in group]
        return [[[values[i] - others(values, i)]] * len(one.turns) for i, one in enumerate(group)]
    if name == "gigpo":
        return [[[value] for value in row] for row in gigpo(group)]
    level = small.mean([small.mean([turn.right for turn in one.turns]) for one in group])
    if name == "turns":
        return [[[turn.right - level] for turn in one.turns] for one in group]
    brier = [[-((turn.confidence - turn.right) ** 2) for turn in one.turns] for one in group]
    calibrated = small.mean([small.mean(row) for row in brier])
    return [
        [[turn.right - level, value - calibrated] for turn, value in zip(one.turns, row, strict=True)]
        for one, row in zip(group, brier, strict=True)
    ]


def token_credit(name, talks, size=small.GROUP):
    """For each completion a credit per token, shared over the block's (or the completion's) tokens of the whole rollout."""
    rows = []
    for first in range(0, len(talks), size):
        group = talks[first : first + size]
        for one, credit in zip(group, credit_of(name, group), strict=True):
            said, row = one.said, []
            trained = sum(block >= 0 for block in said.blocks)
            for block, turn in zip(said.blocks, one.turn_of_token, strict=True):
                share = said.blocks.count(block) if name == "blocks" else trained
                row.append(0.0 if block < 0 else credit[turn][block if name == "blocks" else 0] / share)
            rows.append(row)
    return rows


def gradient(name, talks, size=small.GROUP, unlearned=()):
    """Of minus the mean over rollouts of the sum over tokens of credit times ratio."""
    model = small.policy()
    said = [one.said for one in talks]
    logs = small.log_probs(model, said, small.questions(said, size) if size == small.GROUP else ["2+2="] * len(said))
    total = 0.0
    for n, (row, credit) in enumerate(zip(logs, token_credit(name, talks, size), strict=True)):
        if n not in unlearned:
            total = total + ((row - row.detach()).exp() * torch.tensor(credit, dtype=row.dtype)).sum()
    (-total / len(said)).backward()
    return {key: value.grad.detach().clone() for key, value in model.named_parameters() if value.grad is not None}
