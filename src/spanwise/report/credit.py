"""Write the report of `spanwise credit`: several methods' credit for the same rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum

import torch
from torch import Tensor

from spanwise.layout import together
from spanwise.report import sections as parts
from spanwise.report.charts import bars
from spanwise.report.page import Headline, Panel, Section, render
from spanwise.report.tokens import TokenView
from spanwise.rollouts.rows import summarise_credit
from spanwise.rollouts.schema import RECORDED, STOP
from spanwise.types import Status

#: The column headings for the numbers that `summarise_credit` returns.
_HEADINGS = ("completions", "mean |credit|", "exactly 0", "lowest", "highest")


def credit_report(
    *,
    source: str,
    note: str,
    methods: Sequence[str],
    credit: Mapping[str, Mapping[str, Tensor]],
    rewards: Mapping[str, Tensor],
    statuses: Mapping[str, Mapping[str, int]],
    dead: Mapping[str, Mapping[str, float]],
    view: TokenView,
    samples: Mapping[str, Tensor] | None = None,
    command: str = "",
) -> str:
    """Write the report that compares several methods' credit for the same rollouts. It is one HTML file.

    Args:
        source: where the rollouts came from.
        note: how they were read, one sentence.
        methods: names, in the order of their colours; `recorded` is none, but what the rollouts say.
        credit: method -> block -> credit of each completion (n,); NaN where it has no such block. `stop` is NaN where it is 0.
        rewards: objective -> reward of each completion (n,); NaN where it is absent.
        statuses: objective -> status -> completions.
        dead: method -> objective -> share of the strata without any signal.
        view: completions for the token view.
        samples: `score` and `correct` (and `prompt`) of each completion, where they have a self-rewarding score.
        command: how to make the page again.

    Example:
        >>> import torch
        >>> page = credit_report(source="rollouts.parquet", note="", methods=["grpo"], rewards={"correct": torch.tensor([1., 0.])},
        ...     credit={"grpo": {"all": torch.tensor([.5, -.5])}}, statuses={"correct": {"ok": 2}}, dead={"grpo": {"correct": 0.}},
        ...     view=TokenView(("grpo",), []))
        >>> "rollouts.parquet" in page
        True
    """
    all_columns = [column_n for columns in (rewards, *credit.values()) for column_n in columns.values()]
    count = max(map(len, all_columns), default=0)
    finding_text = credit_finding(credit, *view.pair)
    credit = {method: parts.grouped(columns) for method, columns in credit.items()}
    rewards = parts.grouped(rewards)
    statuses = {name: sum(map(Counter, counts), Counter[str]()) for name, counts in together(statuses).items()}
    methods_tried = [name for name in methods if name != RECORDED]
    title = f"The credit that {', '.join(methods_tried)} would have given to {count:,} completions, without training"
    if RECORDED in methods:
        title = f"{title}, beside the recorded credit" if methods_tried else f"The recorded credit of {count:,} completions"
    page_sections = [
        parts.tokens_section(view),
        parts.credit_section(methods, credit, of="these rollouts"),
        parts.section("Summary", tables=_summary_tables(methods, credit)),
        parts.section("Dead strata", legend=methods, panels=_dead_strata_panels(methods, dead)),
        _status_section(statuses, rewards),
        parts.calibration_section({"": samples} if samples else {}),
    ]
    return render(
        title=f"Credit in {source}",
        lead=f"{title}. {note}".strip(),
        finding=finding_text,
        command=command,
        warnings=[
            f"No completion has the reward {name} ({', '.join(f'{n:,} {key}' for key, n in counts.items())}), so it trains nothing."
            for name, counts in statuses.items()
            if counts and not counts.keys() & {"ok", "broke"}  # a completion that made its check fail has the reward 0
        ],
        headlines=[Headline("completions", count), *_headlines(rewards, statuses)],
        sections=page_sections,
    )


def _headlines(rewards: Mapping[str, Tensor], statuses: Mapping[str, Mapping[str, int]]) -> list[Headline]:
    """Build a headline per objective with its mean reward. The note counts the statuses of rewards."""
    headlines = []
    for name, reward_n in rewards.items():
        counts_text = ", ".join(f"{count:,} {status}" for status, count in {"ok": 0, **statuses.get(name, {})}.items())
        headlines.append(Headline(f"mean reward: {name}", float(reward_n.double().nanmean()), counts_text))
    return headlines


def _summary_tables(methods: Sequence[str], credit: Mapping[str, Mapping[str, Tensor]]) -> list[list[parts.Row]]:
    """Summarise the credit of each method and block in a table row. Methods with the same blocks share a table."""
    rows_by_blocks: dict[frozenset[str], list[parts.Row]] = {}
    for method in methods:
        for block, credit_n in credit[method].items():
            figure_cells = dict(zip(_HEADINGS, summarise_credit(credit_n).values(), strict=True))
            block_names = frozenset(credit[method].keys() - {STOP})
            rows_by_blocks.setdefault(block_names, []).append({"method and block": f"{method}: {block}", **figure_cells})
    return list(rows_by_blocks.values())


def _dead_strata_panels(methods: Sequence[str], dead: Mapping[str, Mapping[str, float]]) -> list[Panel]:
    """Draw the share of strata (sets of compared rewards) whose rewards are all equal. By objective and method."""
    chart_rows = []
    for method in methods:
        for name, shares in together(dead.get(method, {})).items():
            if known_shares := [share for share in shares if share == share]:
                chart_rows.append({"name": name, "series": method, "value": fsum(known_shares) / len(known_shares)})
    if not chart_rows:
        return []
    bar_chart = bars(chart_rows, names=methods, x="share of strata without signal", percent=True, stacked=False)
    return [Panel("Strata without signal", (bar_chart,), _rows_by_objective(chart_rows))]


def _status_section(statuses: Mapping[str, Mapping[str, int]], rewards: Mapping[str, Tensor]) -> Section:
    """Build the section on reward statuses: how many rewards exist, and why the others are missing."""
    used_statuses = {status for counts in statuses.values() for status in counts}
    status_names = [name for status in Status if (name := status.name.lower()) in used_statuses]
    mean_rewards = {name: float(reward_n.double().nanmean()) for name, reward_n in rewards.items()}
    rows = [
        {"name": name, "series": status, "value": counts.get(status, 0)}
        for name, counts in statuses.items()
        for status in status_names
    ]
    table_rows = [{**row, "mean reward": mean_rewards.get(row["objective"])} for row in _rows_by_objective(rows)]
    panels = [Panel("Rewards by status", (bars(rows, names=status_names, x="completions"),), table_rows)] if rows else []
    return parts.section("Status of the rewards", legend=status_names, panels=panels)


def _rows_by_objective(rows: Sequence[parts.Row]) -> list[parts.Row]:
    """Turn the rows of a bar chart into a table with one row per objective."""
    return parts.merged(({"objective": row["name"], row["series"]: row["value"]} for row in rows), key="objective")


def credit_finding(credit: Mapping[str, Mapping[str, Tensor]], left: str, right: str) -> str:
    """Say how often two methods push a block in opposite directions. Name the most frequent block."""
    columns_of_pair = (credit.get(left, {}), credit.get(right, {}))
    left_credit, right_credit = ({block: x for block, x in columns.items() if block != STOP} for columns in columns_of_pair)
    if not right_credit or not left_credit:
        return ""
    completion_count = len(next(iter(right_credit.values())))
    if left == right:
        has_credit_kn = torch.stack([credit_n.nan_to_num() != 0 for credit_n in credit[right].values()])
        credited_count = int(has_credit_kn.any(dim=0).sum())
        alarm_sentence = "" if credited_count else "Alarm: nothing would be learned. "
        return f"{alarm_sentence}The method {right} gives credit to {credited_count:,} of {completion_count:,} completions."
    if len(left_credit) == 1:  # the credit of a whole completion counts for every block
        left_credit = {block: next(iter(left_credit.values())) for block in right_credit}
    elif len(right_credit) == 1:
        right_credit = {block: next(iter(right_credit.values())) for block in left_credit}
    common_blocks = [block for block in right_credit if block in left_credit]
    is_opposed_by_block = {block: left_credit[block] * right_credit[block] < 0 for block in common_blocks}
    if not common_blocks:
        return ""
    opposed_row_count = int(torch.stack(list(is_opposed_by_block.values())).any(dim=0).sum())
    count_text = f"none of {completion_count:,} completions"
    if opposed_row_count:
        share_text = parts.percent(opposed_row_count / completion_count)
        count_text = f"{opposed_row_count:,} of {completion_count:,} completions ({share_text})"
    if opposed_row_count and len(common_blocks) > 1:
        count_by_block = {block: int(is_opposed_n.sum()) for block, is_opposed_n in is_opposed_by_block.items()}
        top_block = max(count_by_block, key=count_by_block.__getitem__)
        count_text += f", most often in the block {top_block} ({count_by_block[top_block]:,})"
    return f"{left} and {right} disagree on the sign of a block's credit in {count_text}."
