"""Explain a completion's credit in sentences: each block's arithmetic, each token's share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spanwise.rollouts.rows import COMPLETION, TokenRow
from spanwise.rollouts.schema import CreditPart

DIGITS = 4  # significant digits of a number on a report page
_MINUS = "\u2212"
_MOST_NAMED = 3  # The largest number of blocks that a sentence names one by one.
#: A term of a sum that is shown as text: its amount, the amount as text, and its name.
_Term = tuple[float, str, str]
LEFT_OUT = ("absent", "unparsable")  # The statuses of a reward whose block is missing or unreadable.
_NO_BASELINE = {  # Maps `CreditPart.reason` to a sentence.
    "singleton": "no other completion can be compared with this completion",
    "no_scale": "the compared rewards have a spread of 0, and no credit can be divided by 0",
}


@dataclass(frozen=True)
class Rule:
    """The facts about a credit method that a report page explains."""

    kind: str = ""  # What the method credits: "block", "completion", "token" or "step"; "" if unknown.
    about: str = ""  # A sentence that describes the credit method.
    #: Maps an objective's name to its recipe fields, such as `pays`, `weight` and `baseline`.
    objectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    verdict: str = ""  # the objective that the self-rewarding score is mixed with, or ""


def rule_words(baseline: str | None, given: Sequence[str]) -> str:
    """Say in words which completions a reward baseline averages over."""
    text_of_baseline = {
        "none": "nothing is subtracted",
        "batch": "all of the step",
        "outcome": "".join(["same prompt", *(f", same {name}" for name in given)]),
        "blended": f"same prompt, blended with completions of other prompts whose {' and '.join(given)} is the same",
    }
    return text_of_baseline.get(baseline or "", "same prompt")


def shown(value: float | None, *, sign: bool = False) -> str:
    """Format a number with four significant digits."""
    if value is None or math.isnan(value):
        return "none"
    number_text = f"{value:.{DIGITS}g}"
    number_text = "0" if float(number_text) == 0 else number_text
    return (f"+{number_text}" if sign and value > 0 and number_text != "0" else number_text).replace("-", _MINUS)


def _factor(value: float) -> str:
    """Format a number within a sum, in brackets if it is negative."""
    number_text = shown(value)
    return f"({number_text})" if number_text.startswith(_MINUS) else number_text


def equation(part: CreditPart) -> str:
    """Return an objective's credit as an equation of reward, baseline and divisor. "" without a baseline."""
    if part.worth is None or part.baseline is None or part.divisor is None:
        return ""
    difference_text = f"{shown(part.worth)} {_MINUS} {_factor(part.baseline)}"
    if part.weight != 1.0 or part.divisor != 1.0:
        difference_text = f"({difference_text})"
    weight_text = "" if part.weight == 1.0 else f"{shown(part.weight)} · "
    divisor_text = "" if part.divisor == 1.0 else f" / {shown(part.divisor)}"
    return f"{shown(part.part, sign=True)} = {weight_text}{difference_text}{divisor_text}"


def added(total: float, terms: Sequence[_Term]) -> str:
    """Return a sum of named terms as text, such as `+0.5 = 0.8 (correct) − 0.3 (brier)`."""
    sum_text = " + ".join(f"{number} ({name})" for _, number, name in terms)
    return f"{shown(total, sign=True)} = {sum_text.replace(f'+ {_MINUS}', f'{_MINUS} ')}"


def _term(weight: float, value: float, name: str) -> _Term:
    """Build one term of a sum: the value `weight * value`, the term as text, and its name."""
    return weight * value, shown(value) if weight == 1.0 else f"{shown(weight)} · {_factor(value)}", name


def credits(row: TokenRow, method: str, rule: Rule) -> dict[str, float]:
    """Return a completion's credit per block. Methods that credit it as a whole give one number."""
    credit = row.credit.get(method, {})
    block_credit = {block: value for block, value in credit.items() if value is not None and math.isfinite(value)}
    objectives_pay_all = all(block_credit.keys() <= set(objective["pays"]) for objective in rule.objectives.values())
    credits_whole_completion = rule.kind == "completion" and block_credit and objectives_pay_all
    return {COMPLETION: next(iter(block_credit.values()))} if credits_whole_completion else block_credit


def unit(rows: Sequence[TokenRow], method: str, rule: Rule) -> float:
    """Return the usual size of a method's credit: the 98th percentile of nonzero sizes, or 1 if all are zero."""
    credit_sizes = [abs(value) for row in rows for value in credits(row, method, rule).values() if value]
    return float(np.quantile(credit_sizes, 0.98, method="higher")) if credit_sizes else 1.0


def opening(row: TokenRow, outcome: str | None, stating: set[str]) -> str:
    """Describe a completion in words, such as `Right with confidence 0.1`."""
    fault_phrase = "cut off" if "truncated" in row.fault else "malformed"
    phrases = [fault_phrase] if row.fault else []
    outcome_reward = row.rewards.get(outcome or "")
    outcome_status = row.statuses.get(outcome or "", "")
    if outcome_reward is not None:
        outcome_phrase = {1.0: "right", 0.0: "wrong"}.get(outcome_reward) or f"{outcome} {shown(outcome_reward)}"
        phrases.append(outcome_phrase + (" (broke its check)" if outcome_status == "broke" else ""))
    elif outcome_status in LEFT_OUT:
        phrases.append("there is no readable answer")
    elif outcome_status not in ("", "ok"):
        phrases.append(f"the answer is not judged, because its check failed ({outcome_status})")
    opening_text = ", ".join(phrases) or f"{len(row.tokens)} token{'' if len(row.tokens) == 1 else 's'}"
    phrase_of_status = {"absent": ", and no confidence is stated", "unparsable": ", and the confidence cannot be read"}
    for name, value in row.stated.items():
        if name in stating and value is not None and not math.isnan(value):
            confidence_text = f"{value:.1f}" if value in (0, 1) else shown(value)
            opening_text += f" with confidence {confidence_text}"
            break
        if name in stating and row.statuses.get(name) in phrase_of_status:
            opening_text += phrase_of_status[row.statuses[name]]
            break
    return opening_text[:1].upper() + opening_text[1:]


def clause(row: TokenRow, method: str, rule: Rule) -> str:
    """Say how a method such as bae treats a completion: `bae praises the solution (+1) and blames the confidence (−0.8)`."""
    advantages = [float(value) for value in row.advantages[method] if not math.isnan(value)]
    block_credit = credits(row, method, rule)
    stop_credit = row.stop.get(method)
    if not advantages:
        return f"{method} trains no token of the completion"
    if not block_credit and not stop_credit:
        return f"{method} gives the completion's tokens {_range(min(advantages), max(advantages))}"
    clauses = []
    for verb, sign in (("praises", 1), ("blames", -1)):
        credited_blocks = {block: value for block, value in block_credit.items() if value * sign > 0}
        if len(credited_blocks) > _MOST_NAMED:
            top_block = max(credited_blocks, key=lambda block: abs(credited_blocks[block]))
            top_block_text = f"{top_block} ({shown(credited_blocks[top_block], sign=True)})"
            clauses.append(f"{verb} {len(credited_blocks)} blocks, most of all {top_block_text}")
        elif credited_blocks:
            block_texts = (f"the {block} ({shown(value, sign=True)})" for block, value in credited_blocks.items())
            clauses.append(f"{verb} {' and '.join(block_texts)}")
    zero_blocks = [block for block, value in block_credit.items() if value == 0]
    if zero_blocks and (clauses or stop_credit):
        block_names_text = f"the {' and the '.join(zero_blocks)}"
        zero_blocks_text = block_names_text if len(zero_blocks) <= _MOST_NAMED else f"{len(zero_blocks)} blocks"
        clauses.append(f"gives {zero_blocks_text} 0")
    elif zero_blocks:
        is_alone = {part.reason for part in row.parts.get(method, ())} == {"singleton"}
        cause_text = ", because no other completion can be compared with it" if is_alone else ""
        clauses.append(f"gives the completion exactly 0{cause_text}")
    if stop_credit:
        stop_verb = "charges" if stop_credit < 0 else "pays"
        clauses.append(f"{stop_verb} {shown(stop_credit, sign=True)} for missing blocks")
    average_note = ", on average over tokens" if rule.kind == "token" else ""
    return f"{method} {' and '.join(clauses)}{average_note}"


def explained(row: TokenRow, method: str, rule: Rule) -> dict[str, Any]:
    """Explain the arithmetic of each block's credit under one method. If the file lacks it, a note says so."""
    explained_blocks = {
        block: _explain_block(row, method, rule, block, credit) for block, credit in credits(row, method, rule).items()
    }
    note = f"The file does not say how the credit of {method} was computed."
    if rule.kind in ("token", "step"):
        note = f"{method} credits each {rule.kind} separately. The credit of a block is the mean over the block's tokens."
    elif method == "recorded":
        note = "'recorded' is the credit that the trainer wrote into the file. The file does not say how it was computed."
    has_terms = any(block["terms"] for block in explained_blocks.values())
    return {
        "note": f"{note} {rule.about}".strip() if explained_blocks and not has_terms else "",
        "blocks": explained_blocks,
        "stop": _explain_stop(row, method, rule),
        "strata": {part.objective: part.stratum for part in row.parts.get(method, ()) if part.stratum >= 0},
    }


def _explain_block(row: TokenRow, method: str, rule: Rule, block: str, credit: float) -> dict[str, Any]:
    """Explain a block's credit: the terms that add up to it, and the share of each token."""
    objective_names = [name for name, fields in rule.objectives.items() if block == COMPLETION or block in fields["pays"]]
    credit_parts = list(row.parts.get(method, ()))
    if not objective_names or len(credit_parts) != 1:  # a single `CreditPart` may hold the credit of all objectives together
        credit_parts = [part for part in credit_parts if part.objective in objective_names]
    share_and_score = row.own.get(method) if rule.verdict in objective_names else None
    score_share, own_score = share_and_score or (0.0, 0.0)
    credit_terms: list[_Term] = []
    for part in credit_parts:
        part_score_share = score_share if len(credit_parts) == 1 or part.objective == rule.verdict else 0.0
        credit_terms.append(_term(1 - part_score_share, part.part, part.objective))
        if part_score_share:
            credit_terms.append(_term(part_score_share * part.weight, own_score, "its own score"))
    terms_sum = math.fsum(amount for amount, *_ in credit_terms)
    parts_add_up = abs(terms_sum - credit) <= 1e-6 * (1 + abs(credit))
    token_share_text, token_sum_text = _token_shares(row, method, block, credit)
    warning = f"The credit's parts add up to {shown(terms_sum, sign=True)}, not to the credit. Do not rely on the parts."
    return {
        "credit": shown(credit, sign=True),
        "total": added(credit, credit_terms) if parts_add_up and len(credit_terms) > 1 else "",
        "terms": [
            {"objective": part.objective, "credit": shown(part.part, sign=True), "sum": equation(part),
             "worth": _name_worth(row, rule, part), "note": _baseline_note(row, rule, part),
             "said": row.notes.get(part.objective) or ""}
            for part in credit_parts if parts_add_up
        ],
        "warning": warning if credit_parts and not parts_add_up else "",
        "each": token_share_text,
        "share": token_sum_text,
    }  # fmt: skip


def _name_worth(row: TokenRow, rule: Rule, part: CreditPart) -> str:
    """Explain a number that is compared in place of one reward: a sum of rewards, or the replacement of a missing one."""
    if part.worth is None:
        return ""
    if part.objective in row.statuses or part.objective in row.rewards or not rule.objectives:
        reward_status = row.statuses.get(part.objective)
        return f"{part.objective} is {reward_status}, and counts as {shown(part.worth)}" if reward_status in LEFT_OUT else ""
    reward_terms: list[_Term] = []
    for name, objective in rule.objectives.items():
        is_left_out = row.rewards.get(name) is None and row.statuses.get(name) in LEFT_OUT
        reward = objective.get("if_missing") if is_left_out else row.rewards.get(name)
        if reward is None:
            return ""
        reward_terms.append(_term(objective.get("weight", 1.0), reward, f"{name}, left out" if is_left_out else name))
    # In a rollout of several turns, the compared reward also contains the rewards of other turns.
    terms_sum = math.fsum(amount for amount, *_ in reward_terms)
    is_same_sum = math.isclose(terms_sum, part.worth, rel_tol=1e-9, abs_tol=1e-9)
    return added(part.worth, reward_terms).removeprefix("+") if is_same_sum else ""


def _baseline_note(row: TokenRow, rule: Rule, part: CreditPart) -> str:
    """Describe the baseline and divisor behind one objective's credit, or say why there is no baseline."""
    if part.baseline is None:
        reward_status = row.statuses.get(part.objective) or "ok"
        if part.part != 0:
            return f"The method does not compute credit as reward minus baseline. {rule.about}".strip()
        if part.reason in _NO_BASELINE:
            return f"{_NO_BASELINE[part.reason]}, so the credit is exactly 0"
        absence_reason = "a reward is absent"
        if reward_status in LEFT_OUT:
            absence_reason = f"the reward is {reward_status}, and its objective sets no if_missing to replace it"
        elif reward_status != "ok":
            absence_reason = f"the check of the reward failed ({reward_status})"
        return f"{absence_reason}, so the completion gets no credit and is left out of baselines"
    objective_rule = rule.objectives.get(part.objective, {})
    baseline_name = objective_rule.get("baseline")
    baseline_text = rule_words(baseline_name, objective_rule["given"]) if baseline_name else ""
    if part.averaged == 1:
        baseline_text = "the reward of the only other completion"
    elif part.averaged:
        members_text = f"compared completions ({baseline_text})" if baseline_text else "compared completions"
        averaged_text = "other completions" if part.averaged < part.members else members_text
        baseline_text = f"the mean of the {part.averaged} {averaged_text}"
    divisor_note = ""
    if part.divisor != 1.0:
        divisor_note = f"; the reward minus the baseline is divided by {shown(part.divisor)}, the scale of the rewards"
    return f"baseline {shown(part.baseline)}{f': {baseline_text}' if baseline_text else ''}{divisor_note}"


def _token_shares(row: TokenRow, method: str, block: str, credit: float) -> tuple[str, str]:
    """Return the credit of each trained token in a block, and their sum, as text."""
    advantage_by_token = {t: float(value) for t, value in enumerate(row.advantages[method]) if not math.isnan(value)}
    if advantage_by_token and row.stop.get(method):
        advantage_by_token[max(advantage_by_token)] -= row.stop[method]
    block_spans = row.spans.get(block)
    if block_spans is None:  # a method with a single block credits the whole completion
        block_spans = [(0, len(row.tokens))] if block == COMPLETION or len(row.credit[method]) == 1 else []
    token_indices = {t for span in block_spans for t in range(*span)}
    token_advantages = [advantage_by_token[t] for t in sorted(token_indices & advantage_by_token.keys())]
    if not token_advantages:
        return "", ""
    min_advantage, max_advantage = min(token_advantages), max(token_advantages)
    total_advantage = math.fsum(token_advantages)
    is_whole_credit = math.isclose(total_advantage, credit, rel_tol=1e-5, abs_tol=1e-9)
    total_text = shown(credit if is_whole_credit else total_advantage, sign=True)
    is_uniform = math.isclose(min_advantage, max_advantage, rel_tol=1e-5, abs_tol=1e-12)
    token_count = len(token_advantages)
    tokens_text = "its one token" if token_count == 1 else f"{'each of ' if is_uniform else ''}its {token_count} tokens"
    share_text = shown(min_advantage, sign=True) if is_uniform else _range(min_advantage, max_advantage)
    return share_text, f"on {tokens_text}, together {total_text}"


def _range(low: float, high: float) -> str:
    return shown(low, sign=True) if low == high else f"{shown(low, sign=True)} to {shown(high, sign=True)}"


def _explain_stop(row: TokenRow, method: str, rule: Rule) -> str:
    """Explain the credit that the last token gets because the completion left out rewarded blocks."""
    stop_credit = row.stop.get(method)
    credit = row.credit.get(method, {})
    if not stop_credit:
        return ""
    left_out_parts = []
    for part in row.parts.get(method, ()):
        blocks = rule.objectives.get(part.objective, {}).get("pays")
        if row.statuses.get(part.objective) in LEFT_OUT and blocks and all(credit.get(block) is None for block in blocks):
            left_out_parts.append(part)
    equations = [equation_text for part in left_out_parts if (equation_text := equation(part))]
    if len(left_out_parts) > 1:
        credit_terms = [_term(1.0, part.part, part.objective) for part in left_out_parts]
        equations = [added(stop_credit, credit_terms), *equations]
    left_out_sum = math.fsum(part.part for part in left_out_parts)
    parts_add_up = abs(left_out_sum - stop_credit) <= 1e-6 * (1 + abs(stop_credit))
    arithmetic_text = f": {', where '.join(equations)}" if parts_add_up and equations else ""
    return f"{shown(stop_credit, sign=True)} on the last token{arithmetic_text}"
