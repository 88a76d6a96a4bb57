"""Code of a user as a type checker sees it; every `ignore` stands on a line that must be reported (tests/test_typing.py)."""

from typing import assert_type

import torch
from torch import Tensor

from spanwise import (
    Batch,
    Credit,
    Layout,
    Objective,
    Reading,
    Scheme,
    Vocabulary,
    advantages,
    credit_batch,
    metrics,
    read,
    setup_warnings,
)
from spanwise.credit import grpo
from spanwise.engines.trl import SpanGRPOConfig, SpanGRPOTrainer
from spanwise.measure import ece
from spanwise.segment import find_blocks
from spanwise.types import BlockText, Spans

layout = Layout({"solution": ["answer"], "confidence": "confidence"})
objective = Objective("correct", pays="solution", if_missing=0)
scheme = Scheme.preset("bae", layout, objectives=[objective])
vocabulary = Vocabulary((b"<answer>", b"4"))
batch = Batch.jagged([[0, 1]], ["2+2"], columns={"answer": ["4"]})
reading = read(batch, scheme, vocabulary)
credit = credit_batch(reading, batch, scheme)

assert_type(scheme, Scheme)
assert_type(batch, Batch)
assert_type(reading, Reading)
assert_type(credit, Credit)
assert_type(advantages(credit, reading.spans, scheme), Tensor)
assert_type(metrics(credit, reading, scheme), dict[str, float])
assert_type(setup_warnings(reading, scheme), dict[str, str])
assert_type(grpo(torch.ones(4), torch.zeros(4)), Tensor)
assert_type(
    find_blocks(torch.ones(1, 2), torch.ones(1, 2), layout=layout, vocabulary=vocabulary), tuple[Spans, list[BlockText]]
)

Objective("correct", pays=3)  # pyright: ignore[reportArgumentType]
Objective("correct", pays="solution", baseline="grupo")  # pyright: ignore[reportArgumentType]
Objective("correct", pays="solution", if_mising=0.0)  # pyright: ignore[reportCallIssue]
Layout()  # pyright: ignore[reportCallIssue]
credit_batch(reading, scheme)  # pyright: ignore[reportCallIssue]
advantages(credit, reading.spans)  # pyright: ignore[reportCallIssue]
Vocabulary(["<answer>"])  # pyright: ignore[reportArgumentType]
SpanGRPOConfig("out", canari=False)  # pyright: ignore[reportCallIssue]
SpanGRPOTrainer("model", schema=scheme, scheme="bae")  # pyright: ignore[reportArgumentType]
ece()  # pyright: ignore[reportCallIssue]
