"""The token view of completions that methods credit, from a table of `rollouts.schema` and from what pays under each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from spanwise.commands.shared.segments import Segments
from spanwise.credit import METHODS
from spanwise.modes.laser import Laser, own_opinion
from spanwise.report import Rule, TokenView, rule_words
from spanwise.rollouts import schema
from spanwise.rollouts.recorded import numbers
from spanwise.rollouts.rows import read_vocabulary, token_rows


def credited_view(
    table: pa.Table,
    shown: pa.Table,
    rows: Sequence[int],
    *,
    methods: Sequence[str],
    paying: Mapping[str, Mapping[str, Any]],
    segments: Segments | None,
    outcome: str | None,
    own: str | None,
    tokenizer: Path | None,
) -> TokenView:
    """The token view of `shown`, the `rows` of a table of whole groups; `paying`: method -> the arguments of `rule_of`."""
    lasers = {name: Laser.of(listed["laser"]) for name, listed in paying.items() if listed.get("laser")}
    shares = {name: own_shares(table, laser) for name, laser in lasers.items()}
    mixed = {name: [by_row[n] for n in rows] for name, by_row in shares.items()}
    opens = None if segments is None else segments.opens
    return TokenView(
        tuple(methods),
        token_rows(shown, read_vocabulary(tokenizer), opens, mixed),
        outcome,
        "" if segments is None else segments.words,
        rules={name: rule_of(**listed) for name, listed in paying.items()},
        own=own,
        total=len(table),
    )


def rule_of(method: str, objectives: Sequence[Mapping[str, Any]], laser: Mapping[str, Any] | None = None) -> Rule:
    """How a method credits, as far as a page explains it, its objectives and its laser as `Scheme.plain` writes them.

    Example:
        >>> rule = rule_of("bae", [{"name": "brier", "pays": ["b"], "baseline": "outcome", "given": ["correct"]}])
        >>> rule.kind, rule.baselines, rule.pays
        ('block', {'brier': 'same prompt, same correct'}, {'b': ['brier']})
    """
    if method == schema.RECORDED or method not in METHODS:
        return Rule()
    chosen = METHODS[method]
    listed = {str(one.get("name") or one.get("reward")): one for one in objectives}
    pays: dict[str, list[str]] = {}
    for name, one in listed.items():
        for block in several(one.get("pays")):
            pays.setdefault(block, []).append(name)
    by_block = chosen.kind == "block"
    return Rule(
        kind=chosen.kind,
        about=f"{method}: {chosen.summary}",
        pays=pays,
        baselines={
            name: rule_words(one["baseline"], several(one.get("given")))
            for name, one in listed.items()
            if by_block and one.get("baseline")
        },
        weights={name: float(one.get("weight", 1.0)) for name, one in listed.items()},
        missing={name: one.get("if_missing") for name, one in listed.items()},
        verdict="" if laser is None else Laser.of(laser).verdict,
    )


def several(names: str | Sequence[Any] | None) -> list[str]:
    """The names that a field lists, or the one that it is."""
    return [names] if isinstance(names, str) else [str(name) for name in names or ()]


def own_shares(table: pa.Table, laser: Laser) -> list[tuple[float, float]]:
    """(tau, z) of each completion: the share of its own score in its credit, and that score as its group compares it.

    (0, 0) where the score is not mixed in: also where the table, of whole groups, has no scores or does not say the groups.

    Example:
        >>> table = pa.table({"step": [1] * 4, "group": [0] * 4, "self_reward": [.9, .7, .3, .1]})
        >>> [(round(t, 4), round(z, 4)) for t, z in own_shares(table, Laser("<unk>", self_rewarding_warmup=0))]
        [(0.1, 1.0954), (0.1, 0.5477), (0.1, -0.5477), (0.1, -1.0954)]
    """
    if not {schema.SELF_REWARD, schema.GROUP} <= set(table.column_names):
        return [(0.0, 0.0)] * len(table)
    stepped = schema.STEP in table.column_names
    step_n = numbers(table, schema.STEP).nan_to_num().long() if stepped else torch.zeros(len(table)).long()
    group_n = torch.unique(torch.stack([step_n, numbers(table, schema.GROUP).long()]), dim=1, return_inverse=True)[1]
    score_n = numbers(table, schema.SELF_REWARD).masked_fill(~laser.mixes_at(step_n), torch.nan)
    share_n, own_n = own_opinion(score_n, group_n, mix=laser.mix, threshold=laser.threshold, scale=laser.scale)
    return list(zip(share_n.tolist(), own_n.where(share_n > 0, 0.0).tolist(), strict=True))
