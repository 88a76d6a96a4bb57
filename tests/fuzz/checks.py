"""What must hold of every batch of completions, whatever they say. A finding is an AssertionError that names the completion."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from hostile import GOLDS, Family, padded
from linear import NoProcess

from oracles import owners_of_tokens, slow_segment
from spanwise import Batch, Layout, Objective, Scheme, advantages, credit_batch, read
from spanwise.commands.credit.blocks import usual_tags
from spanwise.explain import setup_warnings
from spanwise.measure import voting
from spanwise.pipeline import metrics
from spanwise.report import TokenView
from spanwise.report.tokens import token_view
from spanwise.rollouts import Rollouts, read_rollouts, write_rollouts
from spanwise.rollouts.cells import clean
from spanwise.rollouts.rows import read_rows, token_rows
from spanwise.rollouts.table import split_pieces
from spanwise.score import parse_confidence
from spanwise.score.answers import LONGEST
from spanwise.segment import find_blocks
from spanwise.types import Fault, Status, whole_text


@dataclass
class Cell:
    """One family and one layout under one segmenter, with the scheme that reads them and what was counted."""

    family: Family
    layout: Layout

    def __post_init__(self):
        self.verifier = NoProcess()
        self.seen = np.zeros(4, dtype=np.int64)  # completions, tokens, bytes and completions with a fault
        self.scheme = Scheme("bae", self.layout, self.objectives())

    def objectives(self):
        names, tags = self.layout.names, dict(self.layout.blocks)
        first, tag = names[0], "answer" if "answer" in tags[names[0]] else ""
        rules = [
            Objective("correct", pays=first, options={"tag": tag, "verify": "exact"}),
            Objective("correct", pays=first, name="auto", options={"tag": tag, "verifier": self.verifier}),
            Objective("format", pays=names),
            Objective("environment", pays=first, name="played"),
        ]
        if "confidence" in tags:
            rules += [
                Objective(reward, pays="confidence", given="correct", baseline="outcome", if_missing=-1.0)
                for reward in ("brier", "log_score")
            ]
        if "second" in tags:
            rules.append(Objective("second_attempt", pays="second", options={"verifier": self.verifier}))
        return rules

    def batch(self, rows):
        """Rows of `hostile.rows` with groups of eight, gold answers and rewards of an environment."""
        ids_nt, mask_nt = padded(rows)
        n = np.arange(len(rows))
        gold = [GOLDS[k // 8 % len(GOLDS)] for k in n]
        played = [(None, 0.0, 1.0, float("nan"), -2.5)[k % 5] for k in n]
        columns = {"answer": gold, "environment": played}
        return Batch(torch.from_numpy(n // 8), torch.from_numpy(ids_nt), torch.from_numpy(mask_nt), columns)


def check(cell, rows, *, sample=4):
    """Read, credit and spread one batch, and check what comes out; of the first `sample` completions more."""
    batch = cell.batch(rows)
    reading = read(batch, cell.scheme, cell.family.vocabulary)
    data = [joined(cell, ids[mask]) for ids, mask in rows]
    partition(reading.spans, batch.mask_nt.numpy())
    texts(reading, data)
    rewards(cell, reading)
    credited(cell, batch, reading)
    find = partial(find_blocks, layout=cell.layout, vocabulary=cell.family.vocabulary)
    for n in range(min(sample, len(rows))):
        deletion(find, rows[n], reading.spans, reading.text, n)
        if len(data[n]) < 400:
            by_oracle(cell, rows[n], data[n], reading, n)
        others(reading.text[n])
    cell.seen += [len(rows), *[int(batch.mask_nt.sum()), sum(map(len, data)), int((reading.fault_n != 0).sum())]]
    return batch, reading


def joined(cell, ids):
    return b"".join(map(cell.family.vocabulary.pieces.__getitem__, ids.tolist()))


def partition(spans, mask, *, in_order=True):
    """Every trainable token in exactly one block, no masked one in any; blocks in order, spans as the tokens say."""
    block = spans.block_nt.numpy().astype(np.int64)
    assert block.shape == mask.shape
    assert np.array_equal(block >= 0, mask), "a trainable token without a block, or a masked one with a block"
    rows, width = block.shape
    assert block.max(initial=-1) < len(spans.names)
    row, at = np.nonzero(mask)
    owner = block[row, at]
    assert not (in_order and ((np.diff(owner) < 0) & (np.diff(row) == 0)).any()), "a block goes on after the next has begun"
    first, last = np.full((rows, len(spans.names)), width), np.zeros((rows, len(spans.names)), dtype=np.int64)
    np.minimum.at(first, (row, owner), at)
    np.maximum.at(last, (row, owner), at + 1)
    count = np.zeros_like(last)
    np.add.at(count, (row, owner), 1)
    first[count == 0] = 0
    for actual, expected in ((spans.start_nk, first), (spans.end_nk, last), (spans.length_nk, count)):
        assert np.array_equal(actual.numpy(), expected), "a span is not where its tokens are"


def texts(reading, data):
    """The texts of the blocks, in order, are the bytes of the trainable tokens; tags hold parts of their block."""
    present = reading.present_nk.tolist()
    for n, blocks in enumerate(reading.text):
        assert [block is not None for block in blocks.values()] == present[n], n
        assert whole_text(blocks) == data[n].decode(errors="replace"), n
        for block in blocks.values():
            if block is not None:
                assert all(inside is None or inside in block[""] for tag, inside in block.items()), n
    assert ((reading.fault_n == int(Fault.EMPTY)).tolist()) == [not any(present_k) for present_k in present]


def rewards(cell, reading):
    """Numbers of the range of each reward, or a status; nothing long is sent to Math-Verify."""
    value, status = reading.scores.reward_nm, reading.scores.status_nm
    assert torch.equal(value.isfinite(), status == int(Status.OK))
    ranges = {"second_attempt": {0.0, 0.1, 1.0}, "played": {0.0, 1.0, -2.5}}
    ranges |= {name: {0.0, 1.0} for name in ("correct", "auto", "format")}
    for m, name in enumerate(reading.scores.names):
        values = value[:, m][value[:, m].isfinite()]
        if name in ranges:
            assert set(values.unique().tolist()) <= ranges[name], name
        else:
            assert bool((values <= 0).all() and (values >= -5).all()), name
    stated = reading.scores.stated_nm
    assert bool((stated.isnan() | ((stated >= 0) & (stated <= 1))).all())
    assert cell.verifier.longest <= LONGEST


def credited(cell, batch, reading):
    credit = credit_batch(reading, batch, cell.scheme)
    spread = advantages(credit, reading.spans, cell.scheme)
    assert bool(credit.block_nk.isfinite().all() and credit.stop_n.isfinite().all() and spread.isfinite().all())
    assert not bool(spread[~batch.mask_nt].any())
    metrics(credit, reading, cell.scheme)
    assert all(len(sentence) < 2000 for sentence in setup_warnings(reading, cell.scheme).values())
    return credit, spread


def deletion(find, row, spans, texts, n):
    """A completion without its masked tokens, alone, is read as it is with them in a batch; `find` finds blocks."""
    ids, mask = row
    alone = torch.from_numpy(ids[mask][None])
    spans_alone, text = find(alone, torch.ones_like(alone, dtype=torch.bool))
    assert spans_alone.block_nt[0].tolist() == spans.block_nt[n, : len(mask)][torch.from_numpy(mask)].tolist(), n
    assert (text[0], int(spans_alone.fault_n)) == (texts[n], int(spans.fault_n[n])), n


def by_oracle(cell, row, data, reading, n):
    ids, mask = row
    tokens = [cell.family.vocabulary.pieces[i] for i in ids[mask].tolist()]
    if not tokens:
        return
    owner, pieces, fault, inside = slow_segment(data, cell.layout)
    owners = owners_of_tokens(tokens, owner)
    if cell.layout.prefilled and owner[:1] not in ([], [0]) and not tokens[0]:
        return  # a prefilled block holds the tokens without bytes before byte 0
    block_t = reading.spans.block_nt[n, : len(mask)][torch.from_numpy(mask)].tolist()
    assert block_t == owners, (data, owners)
    assert Fault(int(reading.fault_n[n])) == fault, (data, fault)
    for k, (name, tags) in enumerate(cell.layout.blocks):
        expected = {tag: inside[k, tag] for tag in tags} | {"": pieces[k].decode(errors="replace")}
        assert reading.text[n][name] == (expected if k in owners else None), (data, name)


def others(blocks):
    """Feed a text to its other readers: the cutter of texts without ids, messages, tags of a file, confidences."""
    text = whole_text(blocks)
    assert "".join(split_pieces(text)) == text
    assert clean(text) == text
    usual_tags([text])
    for inside in (text, *(part for block in blocks.values() if block for part in block.values() if part)):
        q = parse_confidence(inside)
        assert q is None or 0.0 <= q <= 1.0


def kept(cell, rows, folder):
    """Through a rollout file and back, into a vote and a token view; the prompts hold half a pair of surrogates."""
    batch, reading = check(cell, rows, sample=0)
    credit, spread = credited(cell, batch, reading)
    asked = ("\ud800 say 4", "2+2=", [{"role": "user", "content": "\udfff"}], "\u202e\x00")
    prompts, plain = [asked[n // 8 % 4] for n in range(len(rows))], replace(batch, columns={})
    rollouts = Rollouts("train", 0, "bae", plain, reading, reading.spans, credit, spread, prompts, [""] * len(rows))
    file = Path(folder) / "step_000001.parquet"
    write_rollouts(file, [rollouts.recorded(step=1)], pieces=cell.family.vocabulary.pieces)
    table = read_rollouts(file)
    for n, (ids, mask) in enumerate(rows):
        stored, (start, end) = table.tokens.slice(n, n + 1).astype(np.int64), table.tokens.offsets[n : n + 2]
        assert table.vocabulary.join(stored[table.trainable[start:end]])[0] == joined(cell, ids[mask]), n
    for m, name in enumerate(reading.scores.names):
        found_n, own_n = table.rewards[name].value_n, reading.scores.reward_nm[:, m]
        assert torch.equal(found_n.nan_to_num(nan=9.0), own_n.nan_to_num(nan=9.0))
    assert token_view(TokenView(("bae",), token_rows(read_rows(file), cell.family.vocabulary)))
    answers = [blocks[cell.layout.names[0]] and whole_text(blocks) for blocks in reading.text]
    half_n, one_n = torch.full((len(rows),), 0.5), torch.ones(len(rows))
    voting(answers, half_n, one_n, prompts=batch.group_n.tolist(), budgets=[2], resamples=2)
