"""Scripted conversations for the real trainer of `trl_small`, and the gradient of their objective, turn by turn."""

from dataclasses import dataclass

import torch

import trl_small as small
from spanwise import Batch, Layout, Objective, Steps, Vocabulary, advantages, credit_batch, read

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
    def script(self):
        """As one completion: the environment's tokens are of no block."""
        pieces, blocks = [], []
        for turn, tool in zip(self.turns, [*self.tools, None], strict=True):
            pieces += turn.pieces
            blocks += turn.blocks
            pieces += self.end if tool is None else ["<tool>", *tool]
            blocks += [blocks[-1]] * len(self.end) if tool is None else [-1] * (1 + len(tool))
        return small.Said(pieces, blocks, self.solved, None)

    @property
    def facts(self):
        """What the environment says of the turns; the digit of a turn is the answer if it is right."""
        return [
            {"anchor": t.anchor, "right": t.right, "solved": self.solved, "answer": t.digit if t.right else "none"}
            for t in self.turns
        ]


def talk(solved, *turns, confidences=None):
    """Turns written "digit right anchor"; the environment says the anchor of the next one."""
    parsed = []
    for k, text in enumerate(turns):
        digit, right, anchor = text.split()
        parsed.append(Turn(digit, float(right), anchor, None if confidences is None else confidences[k]))
    return Talk(parsed, [turn.anchor for turn in parsed[1:]], solved)


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


def scripted(talks, *, facts=None):
    """A rollout function that plays the i-th script, over all ranks; `facts` replaces what it says of the turns."""
    plain = small.scripted([dialogue.script for dialogue in talks], tools=True)

    def rollout(batch, trainer):
        first = trainer.accelerator.process_index * len(batch)
        output = plain(batch, trainer)
        by_talk = [dialogue.facts for dialogue in talks] if facts is None else facts
        if facts != "nothing":
            output["turns"] = [by_talk[(first + i) % len(talks)] for i in range(len(batch))]
        return output

    return rollout


def trainer(folder, name, *, talks=None, facts=None, **options):
    talks = talks_of(name) if talks is None else talks
    extra = {**SCHEMES[name], "rollout_func": scripted(talks, facts=facts)}
    return small.trainer(folder, extra=extra, max_completion_length=32, **options)


def token_credit(name, talks, size=small.GROUP):
    """Per completion and token what the pipeline gives it where each turn is a row of its own, 0 where the environment speaks."""
    turns = [(n, k, turn) for n, dialogue in enumerate(talks) for k, turn in enumerate(dialogue.turns)]
    pieces = [[*turn.pieces, *(talks[n].end if turn is talks[n].turns[-1] else ())] for n, _, turn in turns]
    columns = {key: [talks[n].facts[k][key] for n, k, _ in turns] for key in ("right", "solved", "answer")}
    steps = Steps(
        torch.tensor([n for n, *_ in turns]), torch.tensor([k for _, k, _ in turns]), [turn.anchor for *_, turn in turns]
    )
    ids = [[small.PIECES.index(piece) for piece in row] for row in pieces]
    batch, scheme = (
        Batch.jagged(ids, [n // size for n, *_ in turns], columns=columns, steps=steps),
        small.scheme(**SCHEMES[name]),
    )
    reading = read(batch, scheme, Vocabulary(tuple(piece.encode() for piece in small.PIECES)))
    adv_su = advantages(credit_batch(reading, batch, scheme), reading.spans, scheme, dtype=torch.float64)
    rows = [[] for _ in talks]
    for (n, *_), row, values in zip(turns, ids, adv_su.tolist(), strict=True):
        rows[n] += values[: len(row)]
    credit_rows = []
    for dialogue, values in zip(talks, map(iter, rows), strict=True):
        credit_rows.append([next(values) if block >= 0 else 0.0 for block in dialogue.script.blocks])
    return credit_rows


def gradient(name, talks, size=small.GROUP, unlearned=()):
    """The gradient of minus the mean over rollouts of the sum over tokens of credit times ratio."""
    model, scripts = small.policy(), [dialogue.script for dialogue in talks]
    questions = small.questions(scripts, size) if size == small.GROUP else ["2+2="] * len(scripts)
    logs = small.log_probs(model, scripts, questions)
    total = 0.0
    for n, (row, credit) in enumerate(zip(logs, token_credit(name, talks, size), strict=True)):
        if n not in unlearned:
            total = total + ((row - row.detach()).exp() * torch.tensor(credit, dtype=row.dtype)).sum()
    return small.gradient_of(model, -total / len(scripts))
