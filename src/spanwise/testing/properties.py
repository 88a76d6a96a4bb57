"""The properties of estimators, each as a check of one example. `spanwise.credit.registry.PROPERTIES` says them in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spanwise.credit.spread import spread
from spanwise.testing.batches import NAN, Batch, left_padded
from spanwise.testing.search import unchanged
from spanwise.testing.suite import Suite
from spanwise.types import Credit, Spans


def _result(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        result = suite.run(batch)
        rows = batch.inputs()[suite.spec[0].name]
        shape = rows.shape if suite.method.kind == "block" else rows.shape[:1]
        if suite.method.kind in ("token", "refinement"):
            shape = batch.place_nt.shape
        if result.shape != shape:
            suite.fail("result", batch, f"the shape {tuple(shape)}", result)
        if result.dtype != torch.float64:
            suite.fail("result", batch, f"torch.float64 (the rewards are float64), not {result.dtype}", result)
        if not bool(result.isfinite().all()):
            suite.fail("result", batch, "finite numbers", result)

    return check


def _pure(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        inputs = batch.inputs()
        before = {name: value.clone() if isinstance(value, Tensor) else list(value) for name, value in inputs.items()}
        first = suite.call(inputs, suite.method.estimator).clone()
        for name, value in inputs.items():
            if not unchanged(value, before[name]):
                suite.fail("pure", batch, f"'{name}' to stay as it was", first)
        suite.same("pure", batch, suite.call(inputs, suite.method.estimator), first, tolerance=0.0)

    return check


def _precision(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        inputs = batch.inputs()
        single = {
            name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in inputs.items()
        }
        result = suite.call(single, suite.method.estimator)
        by_token = suite.method.kind in ("token", "refinement")
        if result.dtype != (torch.float32 if by_token else torch.float64):
            expected = "float32, as the rewards" if by_token else "float64 whatever the rewards are"
            suite.fail("precision", batch, f"{expected}, not {result.dtype}", result)
        tolerance = 1e-4 if by_token else 1e-9
        suite.same("precision", batch, result.double(), suite.call(inputs, suite.method.estimator), tolerance=tolerance)

    return check


def _absent(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        gone = torch.zeros(len(batch.group_n), dtype=torch.bool)
        for name in suite.rewards:
            gone |= (
                batch.rows[name].isnan().flatten(1).any(dim=1) if batch.rows[name].dim() > 1 else batch.rows[name].isnan()
            )
        result = suite.run(batch)
        if bool((result[gone] != 0).any()):
            suite.fail("absent", batch, "exactly 0 where the reward is NaN", result)
        if bool((~gone).any()):
            alone = suite.run(batch.take((~gone).nonzero().flatten()))
            expected = torch.zeros_like(result)
            expected[~gone] = alone
            suite.same("absent", batch, result, expected)

    return check


def _permutation(suite: Suite) -> Callable[[tuple[Batch, list[int]]], None]:
    def check(example: tuple[Batch, list[int]]) -> None:
        batch, order = example
        moved = batch.relabelled().take(order)
        suite.same("permutation", moved, suite.run(moved), suite.run(batch)[order])

    return check


def _shift(suite: Suite) -> Callable[[tuple[Batch, list[float]]], None]:
    def check(example: tuple[Batch, list[float]]) -> None:
        batch, shifts = example
        by_group = torch.tensor(shifts, dtype=torch.float64)[batch.group_n % len(shifts)]
        moved = batch.put({name: _by_row(batch.rows[name], by_group, add=True) for name in suite.rewards})
        suite.same("shift", moved, suite.run(moved), suite.run(batch))

    return check


def _constant(suite: Suite) -> Callable[[Any], None]:
    """Some groups are constant, the others are as they come; in steps, where trajectories differ in length, nothing is earned."""

    def check(example: Any) -> None:
        if suite.method.kind == "step":
            batch = example.put({name: torch.zeros_like(example.rows[name]) for name in suite.rewards})
            level_n = torch.zeros(len(batch.group_n), dtype=torch.float64)
        else:
            batch, levels = example
            signed = [
                NAN if level is None else abs(level) if "negative" in suite.method.exceptions else level for level in levels
            ]
            level_n = torch.tensor(signed, dtype=torch.float64)[batch.group_n % len(levels)]
            names = [entry.name for entry in suite.spec if entry.is_reward or entry.stem in ("confidence", "report")]
            batch = batch.put({name: _by_row(batch.rows[name], level_n, add=False) for name in names})
        for dtype in (torch.float64, torch.float32):
            inputs = batch.inputs()
            rewards = {name: inputs[name].to(dtype) for name in suite.rewards}
            result = suite.call({**inputs, **rewards}, suite.method.estimator)
            if bool((result[~level_n.isnan()] != 0).any()):
                suite.fail("constant", batch, f"exactly 0 in rows {(~level_n.isnan()).nonzero().flatten().tolist()}", result)
        if suite.method.kind != "step":
            _alone(suite, example[0])

    return check


def _alone(suite: Suite, batch: Batch) -> None:
    """Every row a group of one."""
    names = [entry.name for entry in suite.spec if entry.stem == "group"]
    if not names:
        return
    single = batch.put({name: torch.arange(len(batch.group_n)) for name in names})
    result = suite.run(single)
    if bool((result != 0).any()):
        suite.fail("constant", single, "exactly 0 in a group of one", result)


def _by_row(value: Tensor, by_row: Tensor, *, add: bool) -> Tensor:
    """Add a number to each row, or put it there unless it is NaN; absent entries stay absent."""
    wide = by_row.to(value.dtype).reshape(-1, *(1 for _ in value.shape[1:])).expand_as(value)
    return value + wide if add else torch.where(value.isnan() | wide.isnan(), value, wide)


def _split(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        whole = suite.run(batch)
        pieces = torch.empty_like(whole)
        for group in batch.group_n.unique():
            here = (batch.group_n == group).nonzero().flatten()
            pieces[here] = suite.run(batch.take(here))
        suite.same("split", batch, whole, pieces)

    return check


def _masking(suite: Suite) -> Callable[[tuple[Batch, Tensor]], None]:
    def check(example: tuple[Batch, Tensor]) -> None:
        _moved(suite, "masking", example[0], example[1], fill=0.0)

    return check


def _poison(suite: Suite) -> Callable[[tuple[Batch, Tensor]], None]:
    def check(example: tuple[Batch, Tensor]) -> None:
        batch = replace(example[0], place_nt=example[1])
        for fill in (NAN, 1e9):
            suite.same("poison", batch, suite.run(batch, fill=fill), suite.run(batch), fill=fill)

    return check


def _padding(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        _moved(suite, "padding", batch, left_padded(batch), fill=0.0)

    return check


def _moved(suite: Suite, name: str, batch: Batch, place_nt: Tensor, *, fill: float) -> None:
    """The same trainable tokens at other places: the same numbers there, exactly 0 at masked ones."""
    plain, moved = suite.run(batch), replace(batch, place_nt=place_nt)
    result = suite.run(moved, fill=fill)
    if bool((result[place_nt < 0] != 0).any()):
        suite.fail(name, moved, "exactly 0 at masked tokens", result, fill)
    expected = torch.zeros_like(result)
    for row in range(len(place_nt)):
        here = place_nt[row] >= 0
        expected[row, here] = plain[row, batch.place_nt[row] >= 0][place_nt[row, here]]
    suite.same(name, moved, result, expected, fill=fill)


def _conservation(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        result = suite.run(batch)
        block_nk = result if result.dim() == 2 else result[:, None]
        n, k = block_nk.shape
        # Block j of completion i has (i + j) % 3 tokens, with a masked token after each block.
        length = [[(i + j) % 3 for j in range(k)] for i in range(n)]
        block_nt = torch.full((n, 3 * k), -1)
        start_nk, end_nk = torch.zeros(n, k, dtype=torch.long), torch.zeros(n, k, dtype=torch.long)
        for i, j in ((i, j) for i in range(n) for j in range(k) if length[i][j]):
            start_nk[i, j], end_nk[i, j] = 3 * j, 3 * j + length[i][j]
            block_nt[i, 3 * j : 3 * j + length[i][j]] = j
        spans = Spans(tuple(f"block {j}" for j in range(k)), start_nk, end_nk, block_nt, torch.zeros(n, dtype=torch.long))
        nothing = torch.zeros(k, dtype=torch.long)
        present_nk = spans.present_nk
        credit = Credit(torch.where(present_nk, block_nk, 0.0), torch.zeros(n, dtype=torch.float64), nothing, nothing)
        adv_nt = spread(credit, spans, dtype=torch.float64)
        sums = torch.stack([torch.where(block_nt == j, adv_nt, 0.0).sum(dim=1) for j in range(k)], dim=1)
        suite.same("conservation", batch, sums, credit.block_nk)
        if bool((adv_nt[block_nt < 0] != 0).any()):
            suite.fail("conservation", batch, "exactly 0 outside every block", adv_nt)

    return check


def _oracle(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        assert suite.oracle is not None
        suite.same("oracle", batch, suite.run(batch), suite.run(batch, function=suite.oracle).double())

    return check


def _one_block(suite: Suite) -> Callable[[Batch], None]:
    def check(batch: Batch) -> None:
        assert suite.sequence is not None
        inputs = {name: value[:, :1] if name.endswith("_nk") else value for name, value in batch.inputs().items()}
        by_row = {name.removesuffix("k"): value[:, 0] if name.endswith("_nk") else value for name, value in inputs.items()}
        expected = suite.sequence(**by_row)
        suite.same("one block", batch, suite.call(inputs, suite.method.estimator)[:, 0], expected)

    return check


CHECKS: Mapping[str, Callable[[Suite], Callable[[Any], None]]] = {
    "result": _result,
    "pure": _pure,
    "precision": _precision,
    "absent": _absent,
    "permutation": _permutation,
    "shift": _shift,
    "constant": _constant,
    "split": _split,
    "masking": _masking,
    "poison": _poison,
    "padding": _padding,
    "conservation": _conservation,
    "oracle": _oracle,
    "one block": _one_block,
}
