"""The parts of the door to Unsloth that need no Unsloth; its own trainer runs in tests/foreign/foreign_unsloth.py."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trl_small as small
from spanwise.engines import unsloth as door
from spanwise.engines.shared import KL_LOSS_TYPES
from spanwise.errors import SpanwiseError

PAD = 0
pytestmark = small.THIRD_PARTY


def slow_packed(value_bt, prompts, completions, width):
    """Row by row: the tokens of a row first, then its padding; the last `width` columns."""
    rows = []
    for values, prompt, completion in zip(value_bt, prompts, completions, strict=True):
        pairs = [*((token, 0.0) for token in prompt), *zip(completion, values, strict=True)]
        row = [value for token, value in pairs if token != PAD] + [value for token, value in pairs if token == PAD]
        rows.append(row[len(row) - width :])
    return rows


ids = st.integers(1, 9)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_table_moves_as_unsloth_packs_its_rows(data):
    width_p, width_t, more = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), data.draw(st.integers(0, 3))
    prompts, completions, values = [], [], []
    for _ in range(data.draw(st.integers(1, 4))):
        prompt, completion = (data.draw(st.lists(ids, min_size=1, max_size=width)) for width in (width_p, width_t))
        prompts.append([PAD] * (width_p - len(prompt)) + prompt)
        completions.append(completion + [PAD] * (width_t - len(completion)))
        values.append([float(t + 1) if t < len(completion) else 0.0 for t in range(width_t)])
    padding = max(prompt.count(PAD) for prompt in prompts)
    inputs = {"prompt_ids": torch.tensor(prompts), "completion_ids": torch.tensor(completions)}
    width = width_t + padding
    if data.draw(st.booleans()) and padding + more <= width_p:  # the generation batch has a shorter prompt
        width += more
        inputs["old_per_token_logps"] = torch.zeros(len(prompts), width)
    moved = door.packed(torch.tensor(values), inputs, pad_id=PAD)
    assert moved.tolist() == slow_packed(values, prompts, completions, width)
    for row, prompt in zip(moved.tolist(), prompts, strict=True):  # where Unsloth's mask of completions begins
        start = width - width_t - prompt.count(PAD)
        assert row.index(1.0) == start


def test_with_images_nothing_moves():
    value_bt = torch.tensor([[1.0, 2.0]])
    inputs = {"prompt_ids": torch.tensor([[PAD, 5]]), "completion_ids": torch.tensor([[8, 9]])}
    for name in ("pixel_values", "pixel_values_videos"):
        assert door.packed(value_bt, {**inputs, name: torch.zeros(1)}, pad_id=PAD) is value_bt


class UnslothGRPOTrainer:
    """The name that Unsloth gives to the trainer that it writes."""


def test_what_it_can_serve(tmp_path, monkeypatch):
    """docs/border.md has what it cannot serve."""
    monkeypatch.setattr(door, "GRPOTrainer", UnslothGRPOTrainer)
    monkeypatch.delenv("UNSLOTH_GRPO_LOSS_AGGREGATION", raising=False)
    monkeypatch.setenv("UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE", "0")
    for loss_type, beta in [*((name, 0.0) for name in door.LOSS_TYPES), *((name, 0.1) for name in KL_LOSS_TYPES)]:
        door.check_use(small.config(tmp_path, loss_type=loss_type, beta=beta), small.scheme())
    door.check_use(None, small.scheme())


EXPECTED = torch.tensor([[0.0, 0.0, -0.5, 1.0], [-0.25, 0.75, 0.0, 0.0]])


@pytest.mark.parametrize("exact", [True, False])
def test_a_gradient_in_other_columns_is_refused(exact):
    door.check_gradient(EXPECTED.clone(), EXPECTED, exact=exact)
    for wrong in (EXPECTED.roll(1, dims=1), EXPECTED.mean(dim=1, keepdim=True).expand_as(EXPECTED), None):
        with pytest.raises(SpanwiseError, match="Unsloth"):
            door.check_gradient(wrong, EXPECTED, exact=exact)
    refused = pytest.raises(
        SpanwiseError,
        match=r"completion 0\. The gradient of the token in column 2 is -0\.25\. .* asks for a gradient of -0\.5",
    )
    with refused if exact else nullcontext():  # where ratios change the size of a gradient, it may differ
        door.check_gradient(EXPECTED / 2, EXPECTED, exact=exact)
