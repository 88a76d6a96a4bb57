"""Small tables for the tests of rollout files: what stands in them as plain lists, and the same as the writer takes it."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from hypothesis import strategies as st

from spanwise import Batch, Credit, Reading, Scores, Spans, Status
from spanwise.rollouts import Rollouts, rollout_table
from spanwise.rollouts.schema import credit_columns, score_columns, span_columns

NAN = float("nan")


@dataclass
class Case:
    """N completions, one dictionary each; `pieces` are the bytes of the ids, None in a file of ids."""

    rows: list[dict]
    blocks: tuple[str, ...] = ("solution", "confidence")
    objectives: tuple[str, ...] = ("correct",)
    methods: tuple[str, ...] = ("bae",)
    per_token: tuple[str, ...] = ()
    pieces: list[bytes] | None = None
    text: bool = False
    cuts: list[int] = field(default_factory=list)

    def part(self, first, last):
        """The rows first..last - 1 as the writer takes them."""
        rows = self.rows[first:last]

        def flat(name, dtype):
            return np.array([value for row in rows for value in row[name]], dtype=dtype)

        def table(name, columns, dtype):
            values = [[row[name][column] for column in columns] for row in rows]
            return torch.tensor(values, dtype=dtype).reshape(len(rows), len(columns))

        edges = [table(name, self.blocks, torch.long) for name in ("start", "end")]
        unknown_nmo = torch.full((len(rows), len(self.objectives), 2), NAN, dtype=torch.float64)
        reward_nm, status_nm = table("reward", self.objectives, torch.float64), table("status", self.objectives, torch.long)
        scores = Scores(self.objectives, reward_nm, status_nm, unknown_nmo)
        columns = {name: [row[name] for row in rows] for name in ("step", "group", "prompt", "fault")}
        columns |= {"text": [row["text"] for row in rows]} if self.text else {}
        columns |= span_columns(self.blocks, *edges) | score_columns(scores)
        columns |= {"completion_ids": flat("ids", np.int32), "trainable": flat("trainable", np.bool_)}
        columns |= {name: flat(name, np.float32) for name in self.per_token}
        for method in self.methods:
            stop_n = torch.tensor([row[f"stop/{method}"] for row in rows], dtype=torch.float64)
            nobody_m = torch.zeros(0, dtype=torch.long)
            credit = Credit(table(f"credit/{method}", self.blocks, torch.float64), stop_n, nobody_m, nobody_m)
            present_nk = torch.ones(len(rows), len(self.blocks), dtype=torch.bool)
            columns |= credit_columns(method, self.blocks, present_nk, credit, flat(f"advantages/{method}", np.float32))
        return rollout_table(columns, np.cumsum([0, *(len(row["ids"]) for row in rows)]))

    def parts(self):
        """All rows, cut where the case says."""
        edges = [0, *sorted(self.cuts), len(self.rows)]
        return [self.part(a, b) for a, b in pairwise(edges) if a < b]


def completion(ids=(0, 1, 2), **changes):
    """One completion of two blocks under one method."""
    size = len(ids)
    plain = {
        "step": 1, "group": 0, "prompt": "p", "ids": list(ids), "trainable": [True] * size, "fault": 0, "text": "t",
        "start": {"solution": 0, "confidence": 1}, "end": {"solution": 1, "confidence": size},
        "reward": {"correct": 1.0}, "status": {"correct": int(Status.OK)},
        "credit/bae": {"solution": 0.5, "confidence": -0.25}, "stop/bae": 0.0, "advantages/bae": [0.5] * size,
    }  # fmt: skip
    return {**plain, **changes}


def trained_batch():
    """Four completions of up to five tokens: tool output, a part that is missing, one left out of the loss, one without tokens."""
    block_nt = torch.tensor([[0, -1, 1, -1, -1], [0, 0, -1, -1, -1], [-1] * 5, [-1] * 5])
    mask_nt = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0] * 5]).bool()
    both = {"solution": {"": "so"}, "confidence": {"": " .5"}}
    start_nk, end_nk = torch.tensor([[0, 2], [0, 2], [0, 0], [0, 0]]), torch.tensor([[1, 3], [2, 2], [0, 0], [0, 0]])
    spans = Spans(("solution", "confidence"), start_nk, end_nk, block_nt, torch.tensor([0, 1, 17, 32]))
    scores = Scores(
        ("correct", "brier"),
        torch.tensor([[1.0, -0.25], [0.0, NAN], [NAN, -0.5], [NAN, NAN]], dtype=torch.float64),
        torch.tensor([[Status.OK, Status.OK], [Status.OK, Status.ABSENT], [Status.TIMEOUT, Status.OK], [Status.ABSENT] * 2]),
        torch.full((4, 2, 2), NAN, dtype=torch.float64),
    )
    text = [both, {"solution": {"": "no"}, "confidence": None}, both, {"solution": None, "confidence": None}]
    ids_nt = torch.arange(20).reshape(4, 5)  # the fourth and fifth token of the first were written by a tool
    credit_nk = torch.tensor([[0.5, 0.0], [-0.5, 0.0], [0.25, -0.25], [0.0, 0.0]], dtype=torch.float64)
    stop_n = torch.tensor([0.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    return Rollouts(
        mode="train", step=70, method="bae", batch=Batch(torch.tensor([4, 4, 5, 5]), ids_nt, mask_nt),
        reading=Reading(scores, spans.length_nk, spans.fault_n, spans, text),
        prompts=["1+1=", "1+1=", [{"role": "user", "content": 'say "é"\nnow'}], "2+2="], completions=[""] * 4, spans=spans,
        credit=Credit(credit_nk, stop_n, torch.zeros(2).long(), torch.zeros(2).long()),
        advantages_nt=torch.tensor([[0.5, 0.0, 0.25, 0.0, 0.0], [-0.25, -1.25, 0.0, 0.0, 0.0], [0.0] * 5, [0.0] * 5]),
    )  # fmt: skip


SINGLE = st.floats(width=32, allow_nan=False, allow_infinity=False)
DOUBLE = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.sampled_from(["a", "a b", "c/d", "é", "credit", "advantages", "reward/x"])
METHODS = st.sampled_from(["bae", "bae:group", "reinforce++", "gdpo", "stop", "日本"])
#: What may be known of each token: nothing, a critic's only value, or one of several by name.
PER_TOKEN = [(), ("values",), ("logprobs",), ("values", "logprobs")]
PER_TOKEN += [("values/correct", "values/c/d"), ("values/é", "values/stop", "logprobs")]
#: Bytes that are a text each, and bytes that are none: a character cut in two, a byte that starts nothing.
TEXTS, BYTES = [b"a", b" b", "é".encode(), b"", b"a", b"\n"], [b"a", b"\xc3", b"\xa9", b"\xff", b"", "日".encode()]


@st.composite
def cases(draw):
    """Any small table: ids or texts, absent and failed rewards, completions left out of the loss, null credit, NaN values."""
    blocks = tuple(draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)))
    objectives = tuple(draw(st.lists(NAMES, max_size=2, unique=True)))
    methods = tuple(draw(st.lists(METHODS, min_size=1, max_size=3, unique=True)))
    per_token = draw(st.sampled_from(PER_TOKEN))
    pieces = draw(st.sampled_from([None, TEXTS, BYTES]))

    def row():
        size = draw(st.integers(0, 5))
        trainable = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        left_out = any(trainable) and draw(st.booleans())
        spans = {name: sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for name in blocks}
        if any(trainable) and not left_out:
            spans[draw(st.sampled_from(blocks))] = [0, size]  # a token that is trained lies in a block
        if left_out:
            spans = {name: [0, 0] for name in blocks}
        status = {name: draw(st.sampled_from(list(Status))) for name in objectives}
        cells = {
            "step": draw(st.integers(0, 2)),
            "group": draw(st.integers(-1, 2)),
            "prompt": draw(st.text(max_size=3)),
            "ids": draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)),
            "trainable": trainable,
            "left_out": left_out,
            "fault": draw(st.integers(0, 63)),
            "start": {name: span[0] for name, span in spans.items()},
            "end": {name: span[1] for name, span in spans.items()},
            "status": {name: int(value) for name, value in status.items()},
            "reward": {name: draw(DOUBLE) if value in (Status.OK, Status.BROKE) else NAN for name, value in status.items()},
        }
        for method in methods:
            cells[f"credit/{method}"] = {name: draw(st.just(NAN) | DOUBLE) for name in blocks}
            cells[f"stop/{method}"] = draw(st.just(0.0) | DOUBLE)
            numbers = draw(st.lists(SINGLE, min_size=size, max_size=size))
            cells[f"advantages/{method}"] = [NAN] * size if left_out else numbers
        for name in per_token:
            sign = -1 if name == "logprobs" else 1
            numbers = draw(st.lists(st.just(NAN) | SINGLE, min_size=size, max_size=size))
            cells[name] = [sign * abs(number) for number in numbers]
        return cells

    rows = [row() for _ in range(draw(st.integers(1, 5)))]
    cuts = draw(st.lists(st.integers(0, len(rows)), max_size=2))
    return Case(rows, blocks, objectives, methods, per_token, pieces, cuts=cuts)
