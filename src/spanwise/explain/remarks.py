"""`setup_warnings`: warnings about a batch that would train on something else than the scheme intends."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from spanwise.credit import length_adaptive_lambda
from spanwise.explain.alarms import IN_A_ROW, habits, later_elements
from spanwise.objective import Objective
from spanwise.pipeline import Reading
from spanwise.scheme import Scheme
from spanwise.score import REWARDS
from spanwise.segment import census_of
from spanwise.types import Fault, Status, whole_text

_DRIFT = (
    "this costs nothing, so training may drift towards it. Set if_missing, the reward to count for such a completion: "
    "Objective(..., if_missing=-1.0)."
)


def setup_warnings(reading: Reading, scheme: Scheme) -> dict[str, str]:
    """Warn about a setup that would train on nothing: missing parts, rewards that never arrive, omissions that cost nothing.

    An engine says each sentence once (`Watch`): the keys stay the same, the numbers in a sentence do not.

    Args:
        reading: of completions that were read here, with their text.
        scheme: what they were read under.

    Returns:
        Key -> sentence: `tags`; `scored/<objective>`, no completion has a reward; `unused/<objective>`, a number came for a block
        that is not there; `dear/<objective>`, `if_missing` is far from all rewards; `free/<objective>`, a block is left out and
        `if_missing` is None; `lambda`, an adaptive lambda is 0 for most completions. Nothing where there is nothing to say.

    Example:
        >>> from spanwise import Batch, Layout, Objective, Vocabulary, read
        >>> vocabulary = Vocabulary((b"<answer>", b"4", b"</answer>", b"<plan>"))
        >>> batch = Batch.jagged([[3, 1], [3, 1]], [0, 0], columns={"answer": ["4", "4"]})
        >>> scheme = Scheme.preset("grpo", Layout({"all": ["answer"]}))
        >>> print(setup_warnings(read(batch, scheme, vocabulary), scheme)["tags"])
        <answer> is in 0 of 2 completions; they do contain <plan> (2). The layout asks for it...
    """
    if not len(reading):
        return {}
    warnings, later = {"tags": _untagged(reading, scheme)}, later_elements(scheme.names)
    for m, objective in enumerate(scheme.objectives):
        statuses = set(reading.scores.status_nm[:, m].tolist())
        if warnings["tags"] and not statuses & {Status.OK, Status.ERROR}:
            continue  # the missing tags explain the missing reward
        if Status.ABSENT in statuses and objective.name in later:
            continue
        for kind, check in (_OF_REWARDS if Status.OK in statuses else {"scored": _unscored}).items():
            if sentence := check(objective, reading, scheme, m):
                warnings[f"{kind}/{objective.name}"] = sentence
                break
    warnings = _free_together(warnings, reading, scheme) | {"lambda": _short(reading, scheme)}
    return {key: sentence for key, sentence in warnings.items() if sentence}


class Watch:
    """Gives every warning only once: returns each remark on the batches of a training once."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self._said = set[str]()
        self._batches: deque[Mapping[str, Any]] = deque(maxlen=IN_A_ROW)

    def of_reading(self, reading: Reading) -> tuple[list[str], bool]:
        """Return the warnings of `setup_warnings` not given before, and whether some objective has no reward at all."""
        warnings = setup_warnings(reading, self.scheme)
        sentences = self._new(warnings)
        for kind, _, name in (key.partition("/") for key in warnings):  # `habits` would repeat this warning in other words
            if kind == "tags":
                self._said.add("credit/malformed")
            elif kind in ("scored", "free"):
                parts = [each for each in self.scheme.names if each == name or each.startswith(f"{name}.")]
                self._said.update(text for each in parts for text in (f"free/{each}", f"credit/{each}/reward_absent"))
        return sentences, any(key.startswith(("tags", "scored/")) for key in warnings)

    def of_batch(self, shown: Mapping[str, float], *, step: int | None = None) -> list[str]:
        """Return the warnings of `habits` not given before, after a training batch with these metrics."""
        self._batches.append({**({} if step is None else {"step": step}), **shown})
        return self._new(habits(self._batches))

    def _new(self, warnings: Mapping[str, str]) -> list[str]:
        sentences = [sentence for key, sentence in warnings.items() if key not in self._said]
        self._said.update(warnings)
        return sentences


def _untagged(reading: Reading, scheme: Scheme) -> str:
    """Return warnings about parts of the layout that nearly all completions lack."""
    missing_n = (reading.fault_n & int(Fault.MISSING | Fault.EMPTY)) != 0
    if reading.text is None or float(missing_n.double().mean()) <= 0.99:
        return ""
    texts = [whole_text(text) for text in reading.text]
    censuses = census_of(scheme.layout, texts)
    census = next((census for census in censuses if census.lacking), None)
    if census is None:
        return ""
    pronoun, tags_text = "it" if len(census.lacking) == 1 else "them", "these tags" if census.segmenter == "tags" else "this"
    advice = f"Ask for {tags_text} in the prompt, or write the layout of what the model writes."
    count, sign = cut_off(reading.fault_n, reading.length_nk.sum(dim=1), texts.__getitem__, among_n=missing_n)
    if count * 2 >= len(reading):
        advice = (
            f"{count} of {len(reading)} {sign}. If they were cut off, set the longest length of a completion up "
            f"(max_completion_length, in verl data.max_response_length), or ask for shorter ones; if not, "
            f"ask for {tags_text} in the prompt."
        )
    return f"{census.sentence} The layout asks for {pronoun}, so what is read there earns nothing. {advice}"


def cut_off(
    fault_n: Int[Tensor, " n"],
    length_n: Int[Tensor, " n"],
    text_of: Callable[[int], Hashable],
    *,
    among_n: Bool[Tensor, " n"],
) -> tuple[int, str]:
    """Count the completions that seem cut off, and name the sign: an open part, or a length that no completion exceeds."""
    open_ended, longest = int((among_n & ((fault_n & int(Fault.TRUNCATED)) != 0)).sum()), int(length_n.max())
    at_longest = len({text_of(n) for n in (among_n & (length_n == longest)).nonzero().flatten().tolist()} if longest else ())
    return max(
        (open_ended, "end before a part of them closes"),
        (at_longest * (at_longest > 1), f"differ and end after {longest} tokens, as none is longer"),
    )


def _unscored(objective: Objective, reading: Reading, scheme: Scheme, m: int) -> str:
    """Warn that no completion has the reward."""
    counts = Counter(Status(status) for status in sorted(reading.scores.status_nm[:, m].tolist()))
    listed = ", ".join(f"{count} {status.name.lower()}" for status, count in counts.items())
    check_failed = Status.TIMEOUT in counts or Status.ERROR in counts
    advice = "The check itself failed" if check_failed else "Absent: it gave None, or what it reads is not there"
    options = REWARDS.find(objective.reward).options | dict(objective.options) if isinstance(objective.reward, str) else {}
    if "column" in options and Status.ERROR in counts:
        place = f" for '{options['tag']}'" if options.get("tag") else ""
        advice = f"In the column '{options['column']}' there is no value{place} that can be read"
    return (
        f"Objective '{objective.name}' has no reward for any of {len(reading)} completions ({listed}), so it trains nothing. "
        f"{advice}; look at one completion and its columns."
    )


def _unused(objective: Objective, reading: Reading, scheme: Scheme, m: int) -> str:
    """Warn about rewards of missing blocks, unless the rewards equal the values that count for missing blocks anyway."""
    if reading.scores.unused_nm is None:
        return ""
    number_n, if_missing = reading.scores.unused_nm[:, m], objective.if_missing
    ignored = [(n, number) for n, number in enumerate(number_n.tolist()) if number == number and number != if_missing]
    if not ignored:
        return ""
    lowest, highest = min(number for _, number in ignored), max(number for _, number in ignored)
    numbers = f"{lowest:g}" if lowest == highest else f"{lowest:g} to {highest:g}"
    source = "the reward recorded is" if objective.name in scheme.recorded else "its reward function returned"
    rule = "has no reward and costs nothing" if if_missing is None else f"counts as its if_missing, {if_missing:g}"
    return (
        f"Objective '{objective.name}': {source} {numbers} for {len(ignored)} of {len(reading)} completions without "
        f"{' and '.join(objective.pays)} (completion {ignored[0][0]} first). That is ignored: a missing block {rule}. "
        f"To make it count, write if_missing={ignored[0][1]:g}."
    )


def _dear(objective: Objective, reading: Reading, scheme: Scheme, m: int) -> str:
    """Warn that leaving out a block outweighs every reward, if `if_missing` is more than ten times as far out as any reward."""
    reward_n = reading.scores.reward_nm[:, m]
    reward_n = reward_n[~reward_n.isnan()]
    lowest, highest, price = float(reward_n.min()), float(reward_n.max()), objective.if_missing
    if price is None or objective.scale == "std" or abs(price) <= 10 * max(1.0, abs(lowest), abs(highest)):
        return ""
    return (
        f"Objective '{objective.name}' has if_missing {price:g}, and its rewards lie between {lowest:g} and {highest:g}: one "
        "completion that leaves the block out outweighs all others in the gradient, unless scale: std divides it. Write the "
        "lowest possible reward as if_missing."
    )


def _free(objective: Objective, reading: Reading, scheme: Scheme, m: int) -> str:
    """Warn that leaving out a block costs nothing, if `if_missing` is None."""
    if objective.if_missing is not None:
        return ""
    omitted = _omitted(objective, reading, scheme)
    unread = int((reading.scores.status_nm[:, m] == int(Status.UNPARSABLE)).sum())
    counts = {f"completions leave out {' and '.join(objective.pays)}": omitted, "write there what cannot be read": unread}
    parts = [f"{count} of {len(reading)} {what}" for what, count in counts.items() if count]
    if not parts:
        return ""
    return f"{' and '.join(parts)}, but objective '{objective.name}' has no if_missing: {_DRIFT}"


def _omitted(objective: Objective, reading: Reading, scheme: Scheme) -> int:
    """Count the completions that leave out what an objective pays, unless another objective charges for it."""
    paid_columns = [scheme.layout.names.index(name) for name in objective.pays]
    is_omitted_n = (reading.length_nk.sum(dim=1) > 0) & (reading.length_nk[:, paid_columns] == 0).all(dim=1)
    is_charged = any(other.if_missing is not None and set(objective.pays) <= set(other.pays) for other in scheme.objectives)
    return 0 if is_charged else int(is_omitted_n.sum())


def _free_together(warnings: dict[str, str], reading: Reading, scheme: Scheme) -> dict[str, str]:
    """Say in one sentence what several parts of one reward have in common: leaving them out costs nothing."""
    free = [objective for objective in scheme.objectives if f"free/{objective.name}" in warnings]
    for family in dict.fromkeys(objective.name.partition(".")[0] for objective in free if "." in objective.name):
        parts = [objective for objective in free if objective.name.startswith(f"{family}.")]
        counts = [count for objective in parts if (count := _omitted(objective, reading, scheme))]
        if len(counts) < 3:
            continue
        warnings = {key: text for key, text in warnings.items() if key not in {f"free/{each.name}" for each in parts}}
        blocks = ", ".join(dict.fromkeys(block for objective in parts for block in objective.pays))
        warnings[f"free/{family}"] = (
            f"Up to {max(counts)} of {len(reading)} completions leave out one of {blocks}, but the objectives '{family}' have no "
            f"if_missing: {_DRIFT}"
        )
    return warnings


def _short(reading: Reading, scheme: Scheme) -> str:
    """Warn about completions too short for an adaptive lambda: at lambda 0 the reward reaches the last token only."""
    alpha = scheme.options.get("length_adaptive_alpha")
    if alpha is None:
        return ""
    length_n = reading.length_nk.sum(dim=1)
    length_n = length_n[length_n > 0]
    is_short_n = length_adaptive_lambda(length_n, alpha=alpha) == 0
    if int(is_short_n.sum()) * 2 <= len(length_n):
        return ""
    return (
        f"length_adaptive_alpha={alpha:g} gives lambda 0 to {int(is_short_n.sum())} of {len(length_n)} completions, those of "
        f"{int(1 / alpha)} tokens and fewer (median {int(length_n.median())}): each token is credited with one step of the critic "
        f"alone, and the reward reaches the last one only. Take a larger alpha, or lam near 1 without one."
    )


#: The checks of an objective that has rewards; the first one with a sentence is used.
_OF_REWARDS = {"unused": _unused, "dear": _dear, "free": _free}
